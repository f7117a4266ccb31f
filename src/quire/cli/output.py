"""Prints results: plain text with one line per item, or one JSON object. No colours, no boxes, no wrapping."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON object."""
    print(json.dumps(value, indent=1))


def print_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns under `head`, padded with blanks; the first column suits `grep` and `cut`."""
    lines = [list(head), *(["" if cell is None else str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def spell_bytes(count: float) -> str:
    """1536000 -> "1.5 MB"."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def spell_seconds(seconds: float) -> str:
    """90061 -> "1 d"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
