"""Reads a compiled artifact before it is published. Cubins and host libraries are both ELF files."""

from __future__ import annotations

import io
import struct
from typing import Any

from quire.errors import CompileError
from quire.jit.spec import Spec


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
