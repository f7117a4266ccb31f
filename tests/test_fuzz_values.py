"""Random calls of all callables, compared with float64 (fuzz_values.py), and that a wrong number is seen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import fuzz
from fuzz import Planned, failures, make, table
from fuzz_values import VALUES


def _run(calls: int, seed: int) -> None:
    verdicts = list(fuzz.run(calls, seed, VALUES))
    assert all(verdict.is_fine for _, verdict in verdicts), f"\n{table(verdicts)}\n{failures(verdicts)}"
    assert {verdict.kind for _, verdict in verdicts} == set(fuzz.FINE), "calls of one kind only"


def test_some_calls_give_the_right_values() -> None:
    _run(36, seed=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(21, 25))
def test_many_calls_give_the_right_values(seed: int) -> None:
    """400 in all, in parts that the processes of a run share."""
    _run(100, seed)


def test_calls_of_a_seed_are_the_same_again() -> None:
    first, second = (fuzz.draw("20:3", VALUES) for _ in range(2))
    assert first.changes == second.changes and first.args.keys() == second.args.keys()
    for name, value in first.args.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(
            value.float().nan_to_num(7.0), second.args[name].float().nan_to_num(7.0)
        )


#: Generators, one for each way of comparing.
KINDS = ("value_ragged", "mla_wrapper", "sparse_mla", "flash_equal", "flash_cache", "block_sparse")


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_number_is_seen(name: str) -> None:
    """A result in which the largest number is a few percent off."""
    generators = replace(VALUES, cases=tuple(case for case in VALUES.cases if case.__name__ == name)[:1])
    for seed in range(40):
        case = generators.cases[0](random.Random(seed))
        if make(Planned(case, case.args, [], True, False, True)).kind == "right":
            spoiled = replace(case, invoke=lambda a, call=case.invoke: _spoiled(call(a)))
            if make(Planned(spoiled, case.args, [], True, False, True)).kind == "wrong":
                return
    pytest.fail("no wrong number was seen")


def _spoiled(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    o = results[0].clone()
    if o.numel():
        o.view(-1)[o.float().abs().argmax()] *= 1.5
    return (o, *results[1:])
