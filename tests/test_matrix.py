"""The matrix of backends that the suite runs on, and what one of them may refuse."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import every_variant
import quire
from covering import beyond_first, covering, left_out, of_other_days
from isolation import isolated
from limits import BEYOND, LIMITS, is_expected, limit
from quire.jit import host_target
from quire.kernels import backends, decide
from targets import APART, CUDA_BACKENDS, pin, targets
from test_catalogue import _DECODE

HERE = Path(__file__).resolve().parent


def names_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> list[str]:
    """The backends of the matrix on a GPU of this capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    return [target.backend for target in targets()]


def test_every_backend_is_in_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*names_on(monkeypatch, (9, 0)), *map(pin, APART)} == set(backends())
    assert all((HERE / name).exists() for name in APART.values())


def test_older_and_newer_gpus_run_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_on(monkeypatch, (8, 0)) == ["quire:cpu", "quire:decode", "quire:fa2", "auto"]
    assert names_on(monkeypatch, (10, 0)) == ["quire:cpu", "quire:decode", "quire:fa2", "auto"]
    assert names_on(monkeypatch, (7, 5)) == ["quire:cpu"]


def refusal(backend: str = "decode", **changes: object) -> quire.UnsupportedError:
    """What a backend says to a decode problem that was changed."""
    with pytest.raises(quire.UnsupportedError) as caught:
        decide(replace(_DECODE, **changes), pin(backend))
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 80},
        {"rows": 4096},
        {"uniform": False, "fixed_split_size": -1},
        {"uniform": False, "fixed_split_size": 640},
    ],
)
def test_limits_of_decode_are_known(changes: dict[str, object]) -> None:
    error = refusal(**changes)
    assert (limit(error) or ("",))[0] == "decode"
    assert is_expected(error, "test_lengths")
    assert not is_expected(error, "test_split_decode"), "only where it is expected"


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("decode", {"head_dim_qk": 24}),
        ("decode", {"target": "x86-64-v4"}),
        ("fa2", {"head_dim_qk": 24, "rows": 80}),
        ("cpu", {"rows": 80}),
    ],
)
def test_other_refusals_are_failures(kernel: str, changes: dict[str, object]) -> None:
    error = refusal(kernel, **changes)
    assert limit(error) is None and not is_expected(error, "test_lengths")


def test_other_errors_are_failures() -> None:
    assert limit(NotImplementedError("attention_decode 80 rows (qo_len * group_size) are more than 64")) is None
    assert limit(quire.PlanError("rows")) is None


def test_each_expected_test_exists() -> None:
    assert set(BEYOND) == set(LIMITS) <= set(CUDA_BACKENDS)
    defined = {
        name for path in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    for names in BEYOND.values():
        assert names <= defined, sorted(names - defined)


def test_the_suite_has_a_cache_of_its_own() -> None:
    """In the checkout, and not the one that the user's programs share."""
    from quire.jit import config

    assert config.cache_root() == HERE.parent / "build" / "tests"


@pytest.mark.slow
def test_shipped_variants_are_right() -> None:
    """The program that compute-sanitizer is run on, where there is no GPU: each value of the variants' keys."""
    keys = list(every_variant.shipped(host_target(), ("cpu",), ("encoder", "speculative")))
    rows = [(key.q, key.head_dim_qk, key.mask, key.window, key.tile_rows) for key in keys]
    keys = [keys[place] for place in covering(rows, 1)]
    assert {key.mask.name for key in keys} == {"NONE", "CAUSAL", "TREE"}
    for key in keys:
        every_variant.run(key, "quire:cpu", "cpu")


@pytest.mark.parametrize("sizes", [(3, 4, 4, 2, 2), (2, 2, 2), (1, 5, 3), (3, 2)])
def test_any_two_values_of_parameters_meet(sizes: tuple[int, ...]) -> None:
    rows = list(itertools.product(*map(range, sizes)))
    few = [rows[place] for place in covering(rows, 2)]
    for (i, n), (j, m) in itertools.combinations(enumerate(sizes), 2):
        assert {(row[i], row[j]) for row in few} == set(itertools.product(range(n), range(m)))
    assert len(few) < len(rows) or len([n for n in sizes if n > 1]) < 3


def test_pairs_that_no_row_has_are_not_missed() -> None:
    rows = [row for row in itertools.product(range(3), repeat=3) if row[0] != row[1]]
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    assert set().union(*pairs) == set().union(*(pairs[place] for place in covering(rows, 2)))


def test_values_that_need_not_meet_are_all_there_and_number_types_take_turns() -> None:
    rows = list(itertools.product("abc", range(7)))
    few = [rows[place] for place in covering(rows, 1)]
    assert sorted(number for _, number in few) == list(range(7))
    assert sorted(few.count(row) for row in few) == [1] * 7
    assert sorted(sum(name == row[0] for row in few) for name in "abc") == [2, 2, 3]


@dataclass(frozen=True, eq=False)
class Collected:
    """A test as left_out() sees it: parameters a, b, ... of one decorator each."""

    device: str
    values: tuple[int, ...]
    dtype: torch.dtype | None = None
    obj: object = None
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @property
    def nodeid(self) -> str:
        return f"test.py::test_{len(self.values)}[{self.values}]"

    @property
    def callspec(self) -> SimpleNamespace:
        given = dict(zip("abc", self.values, strict=False))
        return SimpleNamespace(params={"device": self.device, "dtype": self.dtype, **given})

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        if name != "parametrize":
            return (one.mark for one in self.marks if one.name == name)
        return (getattr(pytest.mark, name)(parameter, []).mark for parameter in "abc"[: len(self.values)])


def test_combinations_are_left_out_on_the_cpu_alone() -> None:
    """And none of tests with one parameter, or with two and no number type: all pairs of two are all there is."""
    tests = [
        Collected(device, values)
        for device in ("cpu", "cuda:0")
        for size in (0, 1, 2, 3)
        for values in itertools.product(range(3), repeat=size)
    ]
    left = left_out(tests)
    assert {(test.device, len(test.values)) for test in left} == {("cpu", 3)}
    assert len(left) >= 27 // 2


@pytest.mark.parametrize("is_drawn", [False, True])
def test_of_number_types_alone_one_is_kept_where_all_else_is_drawn(is_drawn: bool) -> None:
    body = SimpleNamespace(hypothesis=None) if is_drawn else SimpleNamespace()
    tests = [Collected("cpu", (), dtype, body) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    left = left_out(tests)
    assert len(left) == 1 + is_drawn and (is_drawn or tests[0] not in left), "float32 and one type of 16 bits, or one"


def test_each_value_alone_where_a_test_is_marked() -> None:
    tests = [
        Collected("cpu", values, marks=(pytest.mark.each_value,)) for values in itertools.product(range(3), range(5))
    ]
    kept = [test.values for test in tests if test not in left_out(tests)]
    assert len(kept) == 5 and [set(column) for column in zip(*kept, strict=True)] == [{0, 1, 2}, {0, 1, 2, 3, 4}]


def test_one_number_type_where_a_test_is_marked() -> None:
    types = torch.float32, torch.float16, torch.bfloat16
    tests = [
        Collected(device, values, dtype, marks=(pytest.mark.one_type,))
        for device in ("cpu", "cuda:0")
        for dtype in types
        for values in itertools.product(range(4), repeat=2)
    ]
    left = left_out(tests)
    kept = [test for test in tests if test not in left]
    assert {test.dtype for test in kept if test.device == "cpu"} == {torch.float32}
    assert {test.values for test in kept if test.device == "cpu"} == {*itertools.product(range(4), repeat=2)}
    assert sum(test.device == "cuda:0" for test in kept) == len(types) * 16


def test_tests_that_are_parts_have_all_values_between_them() -> None:
    kept = [
        test.values[0]
        for part in range(3)
        for tests in [[Collected("cpu", (n,), marks=(pytest.mark.part(part, 3),)) for n in range(7)]]
        for test in tests
        if test not in left_out(tests)
    ]
    assert kept == [0, 3, 6, 1, 4, 2, 5]
    on_gpu = [Collected("cuda:0", (n,), marks=(pytest.mark.part(1, 3),)) for n in range(7)]
    assert not left_out(on_gpu)
    named = [Collected("cpu", (3,), torch.float16, marks=(pytest.mark.part(1, 3), pytest.mark.one_type))]
    assert not left_out(named)


def test_combinations_that_compile_a_variant_each_are_slow_but_for_the_first() -> None:
    marks = pytest.mark.first(2)
    tests = [
        Collected(device, (number,), marks=(marks, pytest.mark.slow) if number == 0 else (marks,))
        for device in ("cpu", "cuda:0")
        for number in range(5)
    ]
    assert [(test.device, *test.values) for test in beyond_first(tests)] == [("cpu", 3), ("cpu", 4)]


def test_slow_combinations_that_take_turns_are_all_there_in_n_days() -> None:
    marks = pytest.mark.daily(3), pytest.mark.slow
    tests = [
        Collected(device, (number,), marks=marks[: 1 + (number > 1)])
        for device in ("cpu", "cuda:0")
        for number in range(9)
    ]
    days = [[test for test in tests if test not in of_other_days(tests, day)] for day in range(7, 10)]
    always = [test for test in tests if test.device != "cpu" or test.values[0] < 2]
    assert all({*always} <= {*day} and len(day) in (len(always) + 2, len(always) + 3) for day in days)
    assert set().union(*days) == {*tests}
    assert not of_other_days(tests[2:3], 1), "one that is named alone runs"


ENDS = {"right": "", "wrong": "assert 1 == 2", "dead": "was killed by SIGABRT", "late": "took over 1 s", "last": ""}


@isolated(seconds=1, together=ENDS)
def end(how: str) -> None:
    if how == "dead":
        os.abort()
    while how == "late":
        pass
    assert how != "wrong", "assert 1 == 2"


def test_tests_that_share_a_process_end_each_by_itself() -> None:
    for how, said in ENDS.items():
        try:
            end(how)
        except pytest.fail.Exception as error:
            assert said and said in str(error)
        else:
            assert not said


def test_types_of_16_bits_take_turns() -> None:
    """Each value meets float32 and one of them, and both occur."""
    types = torch.float32, torch.float16, torch.bfloat16
    tests = [Collected("cpu", values, dtype) for dtype in types for values in itertools.product(range(4), repeat=2)]
    left = left_out(tests)
    kept = [(test.dtype, *test.values) for test in tests if test not in left]
    assert {dtype for dtype, *_ in kept} == set(types) and len(kept) < len(tests) // 2
    met = {(dtype is torch.float32, place, value) for dtype, *values in kept for place, value in enumerate(values)}
    assert met == set(itertools.product((True, False), range(2), range(4)))
