"""Reads a compiler's report on the generated code: registers, spills, memory, and warnings."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
#: ptxas reports lost performance (serialised wgmma, ignored setmaxnreg) as "info" lines with these codes.
_NOTABLE = re.compile(r"\bwarning\b|\bC75\d\d\b")


@dataclass(frozen=True)
class Report:
    """The figures of one artifact; None where the compiler does not say."""

    registers: int | None = None  #: per thread, the maximum over all functions
    spill_stores: int | None = None  #: bytes per thread
    spill_loads: int | None = None  #: bytes per thread
    stack: int | None = None  #: bytes of stack frame per thread
    smem: int | None = None  #: bytes of static shared memory
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> int | None:
        """Bytes of spill stores and loads together."""
        if self.spill_stores is None or self.spill_loads is None:
            return None
        return self.spill_stores + self.spill_loads


def _warnings(log: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.strip() for line in log.splitlines() if _NOTABLE.search(line)))


def parse_nvcc(log: str) -> Report:
    """Read the output of `nvcc -Xptxas -v`."""
    frames = [tuple(map(int, match)) for match in _SPILL.findall(log)]
    registers = [int(count) for count in _REGISTERS.findall(log)]
    smem = [int(count) for count in _SMEM.findall(log)]
    return Report(
        registers=max(registers) if registers else None,
        stack=max(frame[0] for frame in frames) if frames else None,
        spill_stores=sum(frame[1] for frame in frames) if frames else None,
        spill_loads=sum(frame[2] for frame in frames) if frames else None,
        smem=max(smem, default=0) if registers else None,
        warnings=_warnings(log),
    )


def parse_gxx(log: str) -> Report:
    """Read the output of g++, which reports warnings only."""
    return Report(warnings=_warnings(log))
