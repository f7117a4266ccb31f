"""Which combinations of a test's parameters run on the CPU, where all of them would take minutes of compiling."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from zlib import crc32

import pytest


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What need not run of tests on the CPU.

    Of three parameters or more, the number type among them, any two values meet. Of a number type and one parameter
    each value is there: what number types do to it is what tests of more parameters ask. Of a number type alone all are
    there, but one where hypothesis draws all else. A decorator's row stays as it is: values that stand in one are one
    parameter.
    """
    tests: dict[tuple[str, object], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _values(item).get("device") == "cpu":
            tests[item.nodeid.partition("[")[0], _values(item).get("backend")].append(item)
    left: set[pytest.Item] = set()
    for (name, _), test in tests.items():
        rows = [_combination(item) for item in test]
        kept = covering(rows, 2 if len(rows[0]) > 2 else 1)
        if len(rows[0]) == 1 and _is_drawn(test[0]):
            kept = [crc32(name.encode()) % len(test)]
        left |= set(test) - {test[place] for place in kept}
    return left


def covering(rows: Sequence[Sequence[Hashable]], together: int) -> list[int]:
    """The places of some of `rows`: what stands in any `together` columns of a row stands there in one of these.

    Each has the most that those before it lack. Of equals it is one whose first column's value is rarest in these, and
    the first such: the same ones in every run.
    """
    parts = [set(combinations(enumerate(row), together)) for row in rows]
    missing, chosen, uses = set().union(*parts), [], Counter[Hashable]()
    while missing:
        best = max(range(len(rows)), key=lambda place: (len(parts[place] & missing), -uses[rows[place][0]]))
        chosen.append(best)
        missing -= parts[best]
        uses[rows[best][0]] += 1
    return sorted(chosen)


def _is_drawn(test: pytest.Item) -> bool:
    return hasattr(getattr(test, "obj", None), "hypothesis")


def _values(test: pytest.Item) -> dict[str, object]:
    return test.callspec.params if hasattr(test, "callspec") else {}


def _combination(test: pytest.Item) -> list[Hashable]:
    """The number type of a test, what it has of each of its decorators, and of fixtures with parameters."""
    given, rows = _values(test), [mark.args[0] for mark in test.iter_markers("parametrize")]
    columns = [names.replace(",", " ").split() if isinstance(names, str) else names for names in rows]
    known = {"device", "backend", "dtype"}.union(*columns)
    columns += [[name] for name in given if name not in known]
    return [given.get("dtype"), *(tuple(id(given[name]) for name in names) for names in columns)]
