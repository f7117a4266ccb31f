"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quire
from quire.cli import catalogue

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
KNOBS = set(re.findall(r"QUIRE_[A-Z0-9_]*[A-Z0-9]", ENVIRONMENT))
MEASURED = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 3


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150 and len(README.split()) <= 1600


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("what", r"^Attention kernels for LLM serving"),
        ("for whom", r"^\| for whom \| .{40,}"),
        ("how fast, against what", r"^\| how fast \| .*\d+ of \d+ rows, against FlashInfer"),
        ("how to install", r"^\| install \| `pip install"),
        ("what it cannot do", r"^\| not here \| a backward pass"),
    ],
)
def test_the_first_screen_answers(question: str, answer: str) -> None:
    assert re.search(answer, "\n".join(README.splitlines()[:40]), re.MULTILINE), question


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), scope)
    o, q, v = scope["o"], scope["q"], scope["v"] if "v" in scope else scope["q"]
    assert o.shape[-2:] == (q.shape[-2], v.shape[-1])
    assert o.isfinite().all()


def test_every_knob_is_documented_and_exists() -> None:
    config = Path(quire.__file__).with_name("jit").joinpath("config.py").read_text(encoding="utf-8")
    assert set(re.findall(r"_read\(\"(QUIRE_[A-Z0-9_]+)\"\)", config)) == KNOBS


def test_what_has_run_is_what_the_matrix_says() -> None:
    states = {target.replace("sm", "sm_"): catalogue.state(target) for target in catalogue._GPUS}
    table = (ROOT / "docs/backends.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| (sm_\w+) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)) == states
    (row,) = re.findall(r"^\| \[GPUs\]\([^)]*\) \| ([^|]+) \|$", README, re.MULTILINE)
    parts = (part.split(":") for part in re.sub(r"\([^)]*\)", "", row).split(";"))
    assert {name.strip(): state.strip() for state, names in parts for name in names.split(",")} == states


def test_measured_tables_are_those_of_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    assert re.findall(r"<!-- table: (\w+) -->", README + MEASURED) == list(tables.TABLES)
    assert tables.filled(README) == README and tables.filled(MEASURED) == MEASURED, "run make figures"
    report = tables.latest("*-h200-attention.json")
    text, roof = " ".join(MEASURED.split()), report["roof"]
    assert f"the fastest other library is {report['geometric_mean']:.2f}" in text
    assert f"by {report['geometric_mean']:.2f} times in the geometric mean" in " ".join(README.split())
    assert f"{roof['tflops']:.0f} TFLOP/s and {roof['gigabytes_per_s']:.0f} GB/s" in text
    orders = [row["results"][0]["timing"]["median"] for row in report["rows"] if "-b128-skewed" in row["row"]]
    assert len(orders) == 4 and f"takes {min(orders):.0f} to {max(orders):.0f} us in whatever order" in text


def test_a_table_marks_what_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from tables import Line

    line = Line("x", "us", (2.0, 300.4), {"other": (None, 7.25), "copy": (1.0, 1.0)}, " (plain 3)", limit="copy")
    assert [*line.cells()] == ["x", "2.0, 300 us (plain 3)", "other -, **7.2**; copy 1.0, 1.0"]
    assert [*Line("x", "TFLOP/s", (2.0,), {"other": (1.0,)}).cells()] == ["x", "**2.0** TFLOP/s", "other 1.0"]


def test_results_are_the_newest_file_of_each_program_and_short_notes() -> None:
    """Older files are in the history of the repository."""
    files = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 1_000_000
    names = [re.sub(r"\d{4}-\d\d-\d\d-?", "", path.name) for path in files]
    assert len(set(names)) == len(names), "two dates of one program"
    long = {path.name for path in files if path.suffix == ".md" and len(path.read_text().split()) > 1500}
    assert not long
