"""The committed pictures are those that benchmarks/figures.py draws from the committed result files."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="make docs installs it")

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
PINNED = re.search(r"^matplotlib==(\S+)", (ROOT / "constraints-dev.txt").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    assert PINNED is not None
    if version("matplotlib") != PINNED.group(1):
        pytest.skip(f"matplotlib {version('matplotlib')} draws other bytes than {PINNED.group(1)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import figures

        return dict(figures.draw())


@pytest.mark.slow
def test_committed_pictures_are_fresh(drawn: dict[str, str]) -> None:
    """And drawn by another process they are equal."""
    assert {path.name for path in FIGURES.glob("*.svg")} == drawn.keys()
    stale = [name for name, text in drawn.items() if (FIGURES / name).read_text(encoding="utf-8") != text]
    assert not stale, f"run make figures: {stale}"


@pytest.mark.slow
def test_each_picture_names_machine_and_date(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        assert re.search(r"20\d\d-\d\d-\d\d", text), name
        assert re.search(r"H200|EPYC|Xeon|g\+\+ 12", text), name


@pytest.mark.slow
def test_readme_counts_the_rows_as_they_are_drawn(drawn: dict[str, str]) -> None:
    import figures

    ratios = [row.ratio for row in figures.attention_rows()]
    slower = [ratio for ratio in ratios if ratio < 1]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"the fastest in {len(ratios) - len(slower)} of {len(ratios)} rows" in text
    assert f"In the other {len(slower)} it is slower" in text
    assert f"than the fastest library by at most {100 * (1 - min(slower)):.0f} %" in text
    assert f"{len(slower)} of {len(ratios)} rows are slower" in drawn["speed-light.svg"]
