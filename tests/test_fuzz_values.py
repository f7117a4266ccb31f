"""Random calls of all callables, compared with float64 (fuzz_values.py), and that a wrong number is seen."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

import fuzz
import fuzz_calls
import oracle
from fuzz import Planned, failures, make, table
from fuzz_values import VALUES


def _run(calls: int, seed: int) -> None:
    verdicts = list(fuzz.run(calls, seed, VALUES))
    assert all(verdict.is_fine for _, verdict in verdicts), f"\n{table(verdicts)}\n{failures(verdicts)}"
    assert {verdict.kind for _, verdict in verdicts} == set(fuzz.FINE), "calls of one kind only"


def test_some_calls_give_the_right_values() -> None:
    _run(10, seed=20)


@pytest.mark.daily(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(21, 25))
def test_many_calls_give_the_right_values(seed: int) -> None:
    """200 in two days, in parts that the processes of a run share."""
    _run(50, seed)


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


def test_numbers_beyond_a_type_are_its_infinities() -> None:
    """Those that are beyond it by less than a rounding may be finite."""
    most = torch.finfo(torch.float16).max
    truth = torch.tensor([[1.0, most * 3, -most * 3, most + 20.0]], dtype=torch.float64)
    right = torch.tensor([[1.0, math.inf, -math.inf, most]]).half()
    oracle.assert_close(right, truth, truth)
    oracle.assert_close(right.where(right != most, torch.inf), truth, truth)
    for at, wrong in ((1, most), (1, math.nan), (1, -math.inf), (2, -most), (0, math.inf), (3, most - 200.0)):
        spoiled = right.clone()
        spoiled[0, at] = wrong
        with pytest.raises(AssertionError):
            oracle.assert_close(spoiled, truth, truth)


def test_the_bound_is_that_of_the_least_lucky_order_of_each_request() -> None:
    """A request's logits are as far off as those of any order of its own dims, whatever those of others are."""
    torch.manual_seed(3)
    rows, dims, keys = 2, 256, 300
    q, k, v = torch.randn(2 * rows, 8, dims), torch.randn(2 * keys, 1, dims), torch.randn(2 * keys, 1, dims)
    v[:keys] *= 1e3  # errors of the first request are a thousand times those of the second
    ends, options = ([0, rows, 2 * rows], [0, keys, 2 * keys]), {"sm_scale": 0.3, "pos_encoding_mode": "NONE"}
    truth = oracle.attention(q, k, v, *ends, **options).o
    own = fuzz_calls._least_lucky(q, k, v, *ends, truth, options)
    for request in range(2):
        part = slice(rows * request, rows * (request + 1))
        key = slice(keys * request, keys * (request + 1))
        for in_turn in (False, True):
            alone = oracle.torch_error(q[part], k[key], v[key], [0, rows], [0, keys], in_turn=in_turn, **options)
            assert (own - truth)[part].abs().max() >= (alone - truth[part]).abs().max()


def _spoiled(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    o = results[0].clone()
    if o.numel():
        o.view(-1)[o.float().abs().argmax()] *= 1.5
    return (o, *results[1:])
