"""The description of one compiled variant, independent of attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property


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
