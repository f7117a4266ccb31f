"""Names and comments are the field's: ARCHITECTURE.md has the glossary, this finds what it replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("src", "templates")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cuh", ".jinja") and path.name != "_version.py"
)

#: Words that only this project would understand, as parts of names or in prose, and what the field says.
PRIVATE = {
    r"[Tt]erms": "plan options",
    r"[Pp]ieces?": "work tile",
    r"[Tt]ickets?": "tile counter",
    r"[Ss]lots?": "stage, partial, token in page, build permit",
    r"[Rr]ooms?": "capacity, budget, host buffer",
    r"[Tt]eams?": "KV split",
    r"[Ff]acts": "exports",
    r"[Rr]ecipes?": "plan template",
    r"[Jj]obs?": "work tile",
    r"[Ff]orms?": "signature",
    r"[Cc]lasses": "block mask",
    r"Shares?|shares?(?=_)|(?<=_)shares?": "partition",
    r"Cuts?|cut(?=_)|(?<=_)cut": "partition",
    r"DRAFT|[Dd]raft(?=[ _][Mm]ask)|[Dd]raft(?=Mask)": "tree mask",
}
#: Verbs that do not say what is done, as names of functions.
VAGUE = r"\b(look|look_up|locate|fetch|land|leave|soften)\s*[(<]"
#: Names that others gave: FlashInfer, compilers at once as make's -j, and Python's own.
ALLOWED = (
    r"\bslot_mapping|_with_slot_mapping|QUIRE_MAX_JOBS|"
    r"(max_|default_|--|options\.)?\bjobs\b|default_jobs|max_jobs|__slots__|slots=True"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_private_nouns(path: Path) -> None:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = re.sub(ALLOWED, "", line)
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", line)
        for word, field in PRIVATE.items():
            subject = line if "_" in word else split
            if match := re.search(rf"(?<![A-Za-z])(?:{word})(?![A-Za-z])", subject):
                found.append(f"{number}: {match.group()!r} (say {field}): {line.strip()}")
        if match := re.search(VAGUE, line):
            found.append(f"{number}: {match.group(1)}() does not say what it does: {line.strip()}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_dated_figures(path: Path) -> None:
    """Measurements stand in benchmarks/results/, where they can be repeated."""
    lines = path.read_text(encoding="utf-8").splitlines()
    dated = [
        f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if re.search(r"\b20[2-9]\d-\d\d", line)
    ]
    assert not dated, "\n".join(dated)


def test_panels_are_those_of_cpu_tiles() -> None:
    """A panel is what BLIS calls so: rows packed across SIMD lanes."""
    elsewhere = [path for path in SOURCES if "cpu" not in str(path.relative_to(ROOT))]
    assert not [path.name for path in elsewhere if re.search(r"(?i)panel", path.read_text())]
