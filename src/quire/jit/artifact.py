"""Constants that a compiled kernel exports, read from its artifact. Cubins and host libraries are both ELF files."""

from __future__ import annotations

import struct
from pathlib import Path

from quire.errors import CompileError
from quire.jit.spec import Spec


def read_exports(path: Path, spec: Spec) -> dict[str, int]:
    """The values of `spec.exports`, which the unit holds as an array of ints in this order."""
    if not spec.exports:
        return {}
    from elftools.elf.elffile import ELFFile  # needed after a compile only
    from elftools.elf.sections import SymbolTableSection

    name = f"{spec.entry}_exports"
    with path.open("rb") as file:
        elf = ELFFile(file)
        tables = [section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)]
        found = next((symbols for table in tables if (symbols := table.get_symbol_by_name(name))), None)
        if not found:
            raise CompileError(f"{spec.slug}: expected the artifact to export {name}, which it does not.")
        symbol = found[0]
        section = elf.get_section(symbol["st_shndx"])
        begin = symbol["st_value"] - section["sh_addr"]
        values = struct.unpack_from(f"<{len(spec.exports)}i", section.data(), begin)
    return dict(zip(spec.exports, values, strict=True))
