"""Which combinations of a test's parameters run on the CPU, where all of them would take minutes of compiling."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from zlib import crc32

import pytest
import torch

#: Number types of 16 bits, which take turns: on the CPU float16 is bfloat16 with another conversion.
SHORT = (torch.bfloat16, torch.float16)


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """What need not run of tests on the CPU.

    Of three parameters or more, the number type among them, any two values meet. Of a number type and one parameter
    each value is there: what number types do to it is what tests of more parameters ask. Of a number type alone all are
    there, but one where hypothesis draws all else. The types of 16 bits count as one, and take turns from combination
    to combination and from test to test. Of a test that is marked each_value each value is there, however many
    parameters it has. A decorator's row stays as it is: values that stand in one are one parameter.

    A test that is marked one_type runs with float32 alone: other tests of its file ask what number types change. Of a
    test that is marked part(i, n) there is each n-th of these, from the i-th on: n tests that ask the same of different
    calls, each a compile, have a part of the values each. A combination that the command line names alone runs.
    """
    tests: dict[tuple[str, object], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _values(item).get("device") == "cpu":
            tests[item.nodeid.partition("[")[0], _values(item).get("backend")].append(item)
    left: set[pytest.Item] = set()
    for (name, _), test in tests.items():
        wide = [item for item in test if _values(item).get("dtype") is torch.float32]
        if wide and next(test[0].iter_markers("one_type"), None):
            left |= {*test} - {*wide}
            test = wide
        rows, number = [_combination(item) for item in test], crc32(name.encode())
        places = in_turns(rows, name)
        short = ["16 bits" if rows[place][0] in SHORT else rows[place][0] for place in places]
        together = 1 if len(rows[0]) < 3 or next(test[0].iter_markers("each_value"), None) else 2
        kept = covering([[t, *rows[p][1:]] for t, p in zip(short, places, strict=True)], together)
        kept = [places[place] for place in kept]
        if len(rows[0]) == 1 and _is_drawn(test[0]):
            kept = [number % len(test)]
        part = next(test[0].iter_markers("part"), None)
        if part and len(kept) > 1:
            kept = kept[part.args[0] :: part.args[1]]
        left |= set(test) - {test[place] for place in kept}
    return left


def in_turns(rows: Sequence[Sequence[Hashable]], name: str) -> list[int]:
    """The places of `rows` with one of the types of 16 bits for each combination of other values; a hash says which."""
    places: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[tuple(row[1:])].append(place)
    dropped = set()
    for turn, alike in enumerate(places.values()):
        short = [place for place in alike if rows[place][0] in SHORT]
        if short:
            dropped |= set(short) - {short[crc32(f"{name}:{turn}".encode()) % len(short)]}
    return [place for place in range(len(rows)) if place not in dropped]


def covering(rows: Sequence[Sequence[Hashable]], together: int) -> list[int]:
    """The places of some of `rows`: what stands in any `together` columns of a row stands there in one of these.

    Each has the most that those before it lack. Of equals it is one whose first column's value is rarest in these, then
    one whose other values are rarest if none need meet, and the first such: the same ones in every run.
    """
    parts = [set(combinations(enumerate(row), together)) for row in rows]
    missing, chosen, uses = set().union(*parts), [], Counter[tuple[int, Hashable]]()

    def merit(place: int) -> tuple[int, ...]:
        first, *others = (-uses[value] for value in enumerate(rows[place]))
        return len(parts[place] & missing), first, sum(others) if together == 1 else 0

    while missing:
        best = max(range(len(rows)), key=merit)
        chosen.append(best)
        missing -= parts[best]
        uses.update(enumerate(rows[best]))
    return sorted(chosen)


def beyond_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Of tests that are marked first(n), what comes behind the first n fast combinations on the CPU."""
    found, counts = [], Counter[str]()
    for item in items:
        mark, name = next(item.iter_markers("first"), None), item.nodeid.partition("[")[0]
        is_slow = next(item.iter_markers("slow"), None) is not None
        if mark and not is_slow and _values(item).get("device", "cpu") == "cpu":
            counts[name] += 1
            found += [item] if counts[name] > mark.args[0] else []
    return found


def of_other_days(items: Iterable[pytest.Item], day: int) -> set[pytest.Item]:
    """Of tests that are marked daily(n), what n - 1 of n days leave to others of the slow combinations on the CPU."""
    found: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark, is_slow = next(item.iter_markers("daily"), None), next(item.iter_markers("slow"), None) is not None
        if mark and is_slow and _values(item).get("device", "cpu") == "cpu":
            found[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    several = [(n, tests) for (_, n), tests in found.items() if len(tests) > 1]
    return {test for n, tests in several for place, test in enumerate(tests) if place % n != day % n}


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
