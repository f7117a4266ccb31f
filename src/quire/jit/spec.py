"""A spec names a unit that the cache compiles, and what its artifact must export."""

from __future__ import annotations

import dataclasses
import io
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.errors import CompileError


@dataclass(frozen=True)
class Struct:
    """The memory layout of a parameter struct, as its ctypes mirror sees it.

    The rendered unit asserts each field, so the build fails if the mirror differs from the C++ header.
    """

    name: str  #: the C++ type, e.g. "AttentionParams"
    size: int  #: sizeof, in bytes
    offsets: tuple[tuple[str, int], ...]  #: (field, offset in bytes), in order


@dataclass(frozen=True)
class Spec:
    """One variant: one translation unit, one entry point, one artifact.

    The unit includes `header`, defines `struct Variant` from `types`, `constants` and `code`, checks `params`,
    `operands` and `asserts`, and instantiates `kernel<Variant>` behind the exported symbol `entry`. The slug, `warmup`
    and `fields` are for readers: the unit does not contain them, so they are not part of the key.
    """

    slug: str  #: [a-z0-9._-]+, unique per variant and target; up to the first dot the kernel: "attention_fa2.sm90a...."
    #: "sm80", "sm90a", ... -> a cubin; "x86-64-v3", "x86-64-v4", "aarch64", "native", ... -> a host library
    target: str
    header: str  #: the kernel's header, e.g. "quire/kernels/attention_fa2.cuh"
    kernel: str  #: the class template that the header defines, e.g. "AttentionFa2"
    entry: str  #: exported C symbol, e.g. "quire_attention"
    params: Struct
    types: tuple[tuple[str, str], ...] = ()  #: type aliases in Variant: (("Q", "bf16_t"), ...)
    constants: tuple[tuple[str, int], ...] = ()  #: static constexpr ints in Variant: (("kHeadDimQk", 128), ...)
    asserts: tuple[tuple[str, int], ...] = ()  #: constexpr members of kernel<Variant> that Python relies on
    code: str = ""  #: further members of Variant, in C++
    operands: Struct | None = None  #: Variant::Operands, which follows the parameters; None: `code` has none
    exports: tuple[str, ...] = ()  #: constexpr ints of kernel<Variant> that the builder reads back from the artifact
    warmup: str = ""  #: the `quire warmup` arguments that build exactly this variant, for error messages
    fields: tuple[tuple[str, str], ...] = ()  #: (name, value) as the user writes them: (("mask", "custom"), ...)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once per spec, because each plan() looks its module up by this hash."""
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def device(self) -> bool:
        """Whether the variant is device code (a cubin)."""
        return self.target.startswith("sm")


def read_exports(image: bytes, spec: Spec) -> dict[str, int]:
    """The values of `spec.exports`, which the unit holds as an array of ints in this order.

    CompileError if `image` is not an ELF file that defines the entry point and these values.
    """
    from elftools.elf.elffile import ELFFile  # needed after a compile only

    try:
        return _read(ELFFile(io.BytesIO(image)), spec)
    except CompileError:
        raise
    except Exception as error:  # whatever the parser stumbles over
        raise _unusable(spec, f"it is no whole ELF file ({type(error).__name__}: {error})") from error


def _read(elf: Any, spec: Spec) -> dict[str, int]:
    _symbol(elf, spec, spec.entry)
    if not spec.exports:
        return {}
    symbol = _symbol(elf, spec, f"{spec.entry}_exports")
    section = elf.get_section(symbol["st_shndx"])
    begin = symbol["st_value"] - section["sh_addr"]
    values = struct.unpack_from(f"<{len(spec.exports)}i", section.data(), begin)
    return dict(zip(spec.exports, values, strict=True))


def _symbol(elf: Any, spec: Spec, name: str) -> Any:
    """The symbol `name`, which the file defines."""
    from elftools.elf.sections import SymbolTableSection

    for table in (section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)):
        for symbol in table.get_symbol_by_name(name) or ():
            if symbol["st_shndx"] != "SHN_UNDEF":
                return symbol
    raise _unusable(spec, f"expected it to export {name}, which it does not")


def _unusable(spec: Spec, reason: str) -> CompileError:
    return CompileError(
        f"{spec.slug}: the compiler reported success, but what it made cannot be used: {reason}. "
        "Try another compiler (QUIRE_NVCC, QUIRE_CXX)"
    )
