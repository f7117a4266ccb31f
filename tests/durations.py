"""Where the suite's time goes: `--durations-file FILE` writes the seconds of each file of tests, and then of each test.

The seconds are of the clock, summed over the processes that share the tests, with setup and teardown.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


class Durations:
    """A plugin that adds up the reports of a run; beside xdist that is the controller's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(table(self._tests), encoding="utf-8")


def table(tests: Counter[str]) -> str:
    """Files by their seconds, each with how many tests it has; below them tests of a tenth of a second or more."""
    files, counts = Counter[str](), Counter(name.partition("::")[0] for name in tests)
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    lines = [f"{tests.total():9.2f} s in all, {len(tests)} tests", ""]
    lines += [f"{seconds:9.2f} s  {name} ({counts[name]})" for name, seconds in files.most_common()]
    lines += ["", *(f"{seconds:9.2f} s  {name}" for name, seconds in tests.most_common() if seconds >= 0.1)]
    return "\n".join(lines) + "\n"
