"""What a kernel says of itself, read from its artifact: cubins and host libraries are both ELF files."""

from __future__ import annotations

import struct
from pathlib import Path

from quire.errors import CompileError
from quire.jit.spec import Spec

__all__ = ["read_facts"]


def read_facts(path: Path, spec: Spec) -> dict[str, int]:
    """The values of `spec.facts`, which the unit exports as an array of ints in this order."""
    if not spec.facts:
        return {}
    from elftools.elf.elffile import ELFFile  # needed after a compile only
    from elftools.elf.sections import SymbolTableSection

    name = f"{spec.entry}_facts"
    with path.open("rb") as file:
        elf = ELFFile(file)
        tables = [section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)]
        found = next((symbols for table in tables if (symbols := table.get_symbol_by_name(name))), None)
        if not found:
            raise CompileError(f"{spec.slug}: expected the artifact to export {name}, which it does not.")
        symbol = found[0]
        section = elf.get_section(symbol["st_shndx"])
        begin = symbol["st_value"] - section["sh_addr"]
        values = struct.unpack_from(f"<{len(spec.facts)}i", section.data(), begin)
    return dict(zip(spec.facts, values, strict=True))
