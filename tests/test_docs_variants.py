"""The blocks of docs/variants.md run as they stand there, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[1] / "docs/variants.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_blocks_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, block in enumerate(BLOCKS):
        file = tmp_path / f"block{number}.py"  # errors name lines of files
        file.write_text(block, encoding="utf-8")
        exec(compile(block, str(file), "exec"), names)
    assert len(BLOCKS) == 8
