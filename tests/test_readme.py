"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quire

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
KNOBS = set(re.findall(r"QUIRE_[A-Z_]*[A-Z]", README))


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), scope)
    o, q, v = scope["o"], scope["q"], scope["v"] if "v" in scope else scope["q"]
    assert o.shape[1:] == (q.shape[1], v.shape[-1])
    assert o.isfinite().all()


def test_every_knob_is_documented_and_exists() -> None:
    config = Path(quire.__file__).with_name("jit").joinpath("config.py").read_text(encoding="utf-8")
    assert set(re.findall(r"_read\(\"(QUIRE_[A-Z_]+)\"\)", config)) == KNOBS
