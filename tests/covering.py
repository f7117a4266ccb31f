"""Which combinations of a test's parameters run: on the CPU, few in which any two values that can meet do meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What need not run of tests on the CPU of three parameters or more, the number type among them.

    A decorator's row stays as it is: values that stand in one are one parameter.
    """
    tests: dict[tuple[str, object], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _values(item).get("device") == "cpu":
            tests[item.nodeid.partition("[")[0], _values(item).get("backend")].append(item)
    left: set[pytest.Item] = set()
    for test in tests.values():
        rows = [_combination(item) for item in test]
        if len(rows[0]) > 2:
            left |= set(test) - {test[place] for place in covering(rows)}
    return left


def covering(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """The places of some of `rows`: two values that stand in the same two columns of any row stand in one of these.

    Each is one with the most pairs that those before it lack, and the first of equals: the same ones in every run.
    """
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def _values(test: pytest.Item) -> dict[str, object]:
    return test.callspec.params if hasattr(test, "callspec") else {}


def _combination(test: pytest.Item) -> list[Hashable]:
    """The number type of a test, and what it has of each of its decorators."""
    given, rows = _values(test), [mark.args[0] for mark in test.iter_markers("parametrize")]
    columns = [names.replace(",", " ").split() if isinstance(names, str) else names for names in rows]
    return [given.get("dtype"), *(tuple(id(given[name]) for name in names) for names in columns)]
