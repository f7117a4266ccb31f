"""Random calls of the public functions (fuzz.py), and that the fuzzer sees each kind of failure."""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fuzz
import quire
from fuzz import Planned, Worker, draw, failures, make, table
from fuzz_calls import Args, Case, Generators, Nonsense, Results, require
from guard import GuardedMemory


def _run(calls: int, seed: int) -> None:
    verdicts = list(fuzz.run(calls, seed))
    assert all(verdict.is_fine for _, verdict in verdicts), f"\n{table(verdicts)}\n{failures(verdicts)}"
    assert {verdict.kind for _, verdict in verdicts} == set(fuzz.FINE), "calls of one kind only"


def test_some_random_calls() -> None:
    _run(24, seed=10)


@pytest.mark.daily(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(11, 15))
def test_many_random_calls(seed: int) -> None:
    """1,000 in two days, in parts that the processes of a run share."""
    _run(250, seed)


# The fuzzer itself


def _case(invoke: object, check: object = lambda a, results: None, written: frozenset[str] = frozenset()) -> Case:
    return Case("a function", {"x": torch.ones(3)}, invoke, check, written)  # type: ignore[arg-type]


def _beyond(x: Tensor, offset: int) -> Results:
    ctypes.string_at(x.data_ptr() + offset, 1)
    return (x,)


def reads_beyond(_: random.Random) -> Case:
    return _case(lambda a: _beyond(a["x"], 12))


def reads_before(_: random.Random) -> Case:
    return _case(lambda a: _beyond(a["x"], -1))


def never_ends(_: random.Random) -> Case:
    def invoke(_: Args) -> Results:
        while True:
            time.sleep(0)

    return _case(invoke)


def _of(generator: object) -> Generators:
    return replace(fuzz.MISTAKES, cases=(generator,))  # type: ignore[arg-type]


def _seed(generator: object, upper: bool) -> str:
    """One of a call that nothing is wrong with, its tensors on this side."""
    for i in range(1000):
        planned = draw(f"0:{i}", _of(generator))
        if not planned.changes and planned.upper == upper:
            return f"0:{i}"
    raise AssertionError("no such call")


@pytest.mark.parametrize(("generator", "upper"), [(reads_beyond, True), (reads_before, False)])
def test_a_read_outside_a_tensor_is_seen(generator: object, upper: bool) -> None:
    worker = Worker(_of(generator))
    verdict = worker.make(_seed(generator, upper))
    assert verdict.kind == "signal" and "SIGSEGV" in verdict.detail


def test_a_hang_is_seen() -> None:
    generators = replace(_of(never_ends), seconds=1.0)
    assert Worker(generators).make(_seed(never_ends, True)).kind == "hang"


def test_a_failure_is_made_again_by_its_seed() -> None:
    """Alone, by another worker: the same seed is the same call."""
    i = int(_seed(reads_beyond, True).partition(":")[2])
    seed, verdict = list(fuzz.run(i + 1, 0, _of(reads_beyond)))[-1]
    assert seed == f"0:{i}" and verdict.kind == "signal" and "alone" not in verdict.detail
    first, second = draw("5:17"), draw("5:17")
    assert first.changes == second.changes and first.case.name == second.case.name


def _verdict(case: Case, changes: list[str] | None = None, args: Args | None = None) -> str:
    return make(Planned(case, args or case.args, changes or [], upper=True, warm=False, grad_mode=True)).kind


def _raises(error: Exception) -> Case:
    def invoke(_: Args) -> Results:
        raise error

    return _case(invoke)


def _writes(offset: int) -> Case:
    def invoke(a: Args) -> Results:
        ctypes.memset(a["x"].data_ptr() + offset, 7, 1)
        return (a["x"],)

    return _case(invoke, written=frozenset({"x"}))


def _checks_wrong(_: Args, results: Results) -> None:
    assert results[0].sum() == 4


def test_each_kind_of_failure_is_seen() -> None:
    refused = quire.ValidationError("x: expected another one.")
    assert _verdict(_case(lambda a: (a["x"],))) == "right"
    assert _verdict(_raises(refused), ["x=other"]) == "refused"
    assert _verdict(_raises(refused)) == "good call refused"
    assert _verdict(_raises(TypeError("x"))) == "foreign exception"
    assert _verdict(_case(lambda a: (a["x"],), _checks_wrong)) == "wrong"
    assert _verdict(_case(lambda a: (a["x"],), lambda a, r: require(False, "no"))) == "nonsense taken"
    wants_gradient = {"x": torch.ones(3, requires_grad=True)}
    assert _verdict(_case(lambda a: (a["x"].detach() * 2,)), ["x=with_gradient"], wants_gradient) == "gradient lost"
    assert _verdict(_case(lambda a: (a["x"] * 2,)), ["x=with_gradient"], wants_gradient) == "right"


def test_bytes_that_are_not_the_calls_to_write_are_seen() -> None:
    assert _verdict(_writes(0)) == "right"
    with pytest.raises(AssertionError, match="1 bytes that are not the call's"):
        memory = GuardedMemory(upper=True)
        x = memory.place("x", torch.ones(3))
        ctypes.memset(x.data_ptr() - 1, 7, 1)
        memory.assert_untouched(frozenset({"x"}))
    assert _verdict(_writes(-1)) == "wrong"


def test_gaps_between_rows_are_not_the_calls_to_write() -> None:
    memory = GuardedMemory(upper=False)
    x = memory.place("x", torch.zeros(4, 8)[:, :3])
    x.fill_(1.0)
    memory.assert_untouched(frozenset({"x"}))
    ctypes.memset(x.data_ptr() + 4 * 3, 7, 1)
    with pytest.raises(AssertionError, match="x"):
        memory.assert_untouched(frozenset({"x"}))


@pytest.mark.parametrize("upper", [True, False])
def test_placed_tensors_are_the_same_tensors(upper: bool) -> None:
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    memory = GuardedMemory(upper)
    for tensor in (base, base[:, ::2], base[:0], base.t(), base[:1].expand(6, 8), torch._neg_view(base), base[2, 3]):
        placed = memory.place("x", tensor)
        assert torch.equal(placed, tensor) and placed.stride() == tensor.stride()
        assert placed.is_neg() == tensor.is_neg()
        assert not tensor.numel() or placed.data_ptr() != tensor.data_ptr()


def test_nonsense_is_named() -> None:
    with pytest.raises(Nonsense, match="no such thing"):
        require(False, "no such thing")
