"""Multi-item scoring, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from calls import paged_wrapper, plan_paged, prefill
from problems import Problem

KINDS = ("paged", "ragged")
#: (queries, prefix_len, item_lens) of each request; None: no items, and None queries: all tokens.
BATCH = ((None, 5, (3, 2, 4)), (40, 33, (1, 70, 2)), (0, 0, None), (None, 17, None), (3, 9, ()), (9, 1, (0, 5)))


def scoring(batch, dtype, device, **more):
    """A problem under the mask of its items, and the arguments of plan() that say so."""
    kv_lens = [prefix + (0 if items is None else sum(items) + len(items) + 1) for _, prefix, items in batch]
    qo_lens = [kv if qo is None else qo for (qo, _, _), kv in zip(batch, kv_lens, strict=True)]
    p = Problem(qo_lens, kv_lens, dtype=dtype, device=device, **more)
    seen = [
        oracle.visible_items(qo, prefix, items).flatten() for qo, (_, prefix, items) in zip(qo_lens, batch, strict=True)
    ]
    p.mask = torch.cat(seen).to(device)
    numbers = [[] if items is None else oracle.item_positions(items) for _, _, items in batch]
    length = max([1, *map(len, numbers)]) + 2
    padded = [row + [0] * (length - len(row)) for row in numbers]
    return p, {
        "custom_mask": None,
        "prefix_len_ptr": torch.tensor([prefix for _, prefix, _ in batch]).to(torch.uint32).to(device),
        "token_pos_in_items_ptr": torch.tensor(padded).flatten().to(torch.uint16).to(device),
        "token_pos_in_items_len": length,
        "max_item_len_ptr": torch.tensor([max([0, *row]) for row in numbers]).to(torch.uint16).to(device),
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_items_do_not_see_each_other(device, backend, dtype, kind, window_left, causal):
    p, plan = scoring(BATCH, dtype, device, window_left=window_left)
    p.check(*prefill(p, kind, backend, plan={**plan, "causal": causal}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_position_may_be_left_out(device, dtype, kind):
    p, plan = scoring(BATCH, dtype, device)
    p.check(*prefill(p, kind, "auto", plan={**plan, "max_item_len_ptr": None}))


@pytest.mark.one_type
def test_arrays_as_short_as_they_can_be(device, dtype):
    """Zeros behind the last request's items may be left off, and numbers of one request be no lists."""
    p, plan = scoring(((40, 33, (1, 70, 2)), (None, 5, (3, 2))), dtype, device)
    positions = plan["token_pos_in_items_ptr"]
    unpadded = positions[: plan["token_pos_in_items_len"] + 8]  # 3 delimiters and 5 tokens
    p.check(*prefill(p, "paged", "auto", plan={**plan, "token_pos_in_items_ptr": unpadded}))
    p, plan = scoring(((40, 33, (1, 70, 2)),), dtype, device)
    numbers = {name: plan[name].view(()) for name in ("prefix_len_ptr", "max_item_len_ptr")}
    p.check(*prefill(p, "ragged", "auto", plan={**plan, **numbers}))


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_on_the_host(device, dtype, kind):
    p, plan = scoring(BATCH, dtype, device)
    on_host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in plan.items()}
    p.check(*prefill(p, kind, "auto", plan=on_host))


def test_forward_and_a_plan_without_items(device, dtype):
    """What a plan() was told is gone with the next one; forward() leaves the mask as it is."""
    p, plan = scoring(BATCH, dtype, device)
    cache = p.paged(8)
    wrapper = paged_wrapper(p, cache, "auto")
    plan_paged(wrapper, p, cache, plan=plan)
    p.check(wrapper.forward(p.q, cache.kv, causal=False))
    p.mask, p.causal = None, True
    plan_paged(wrapper, p, cache)
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.one_type
@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_items(device, dtype, data):
    batch = []
    for _ in range(data.draw(st.integers(1, 4))):
        items = data.draw(st.none() | st.lists(st.integers(0, 30), max_size=5))
        prefix = data.draw(st.integers(0, 60))
        tokens = prefix + (0 if items is None else sum(items) + len(items) + 1)
        batch.append((data.draw(st.none() | st.integers(0, tokens)), prefix, items))
    p, plan = scoring(batch, dtype, device, window_left=data.draw(st.sampled_from([-1, -1, 7])))
    p.check(*prefill(p, data.draw(st.sampled_from(KINDS)), "auto", plan=plan))


def u16(*numbers):
    return torch.tensor(numbers).to(torch.uint16)


RIGHT = ((None, 4, (2,)), (None, 6, None))  # 8 and 6 tokens; a length of 6
WRONG = {
    "no prefixes": ({"prefix_len_ptr": None}, "prefix_len_ptr: expected a tensor beside token_pos_in_items_ptr"),
    "lonely": ({"prefix_len_ptr": None, "token_pos_in_items_ptr": None}, "prefix_len_ptr: expected a tensor beside"),
    "length alone": (
        {"prefix_len_ptr": None, "token_pos_in_items_ptr": None, "max_item_len_ptr": None},
        "prefix_len_ptr: expected a tensor beside",
    ),
    "a mask too": ({"custom_mask": torch.ones(100).bool()}, "custom_mask: expected None beside prefix_len_ptr"),
    "bits too": ({"packed_custom_mask": torch.ones(13).byte()}, "packed_custom_mask: expected None beside"),
    "prefix dtype": ({"prefix_len_ptr": torch.tensor([4, 6])}, "prefix_len_ptr: expected dtype torch.uint32"),
    "prefix shape": (
        {"prefix_len_ptr": torch.tensor([4]).to(torch.uint32)},
        r"prefix_len_ptr: expected \[batch_size=2\]",
    ),
    "prefix too long": (
        {"prefix_len_ptr": torch.tensor([9, 6]).to(torch.uint32)},
        r"prefix_len_ptr: expected 2\.\.8 of request 0, with 8 tokens .*got 9",
    ),
    "prefix too short": ({"prefix_len_ptr": torch.tensor([1, 6]).to(torch.uint32)}, r"expected 2\.\.8 .*got 1"),
    "no positions": ({"token_pos_in_items_ptr": None}, "token_pos_in_items_ptr: expected a torch.Tensor"),
    "positions dtype": ({"token_pos_in_items_ptr": torch.zeros(12).int()}, "token_pos_in_items_ptr: expected dtype"),
    "positions shape": ({"token_pos_in_items_ptr": u16(*[0] * 13)}, r"token_pos_in_items_ptr: expected \[.*=12\]"),
    "positions of tokens": ({"token_pos_in_items_ptr": u16(*[0] * 5)}, r"token_pos_in_items_ptr: expected \[.*=12\]"),
    "length": ({"token_pos_in_items_len": 0}, "token_pos_in_items_len: expected a positive integer"),
    "longest": ({"max_item_len_ptr": u16(1, 0)}, r"max_item_len_ptr: expected at least \[2, 0\].*got \[1, 0\]"),
    "longest shape": ({"max_item_len_ptr": u16(2)}, r"max_item_len_ptr: expected \[batch_size=2\]"),
    "longest dtype": ({"max_item_len_ptr": torch.tensor([2, 0])}, "max_item_len_ptr: expected dtype torch.uint16"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, kind):
    change, message = WRONG[case]
    p, plan = scoring(RIGHT, torch.float32, "cpu")
    p.check(*prefill(p, kind, "auto", plan=plan))
    with pytest.raises(quire.ValidationError, match=message):
        prefill(p, kind, "auto", plan={**plan, **change})


@pytest.mark.parametrize("ends", [(0, 9, 6), (2, 0, 6), (0, -5, 6), (0, 2**31 - 1, 2**31 - 1)], ids=str)
def test_offsets_that_are_none(ends):
    """Before bits are made of them."""
    p, options = scoring(RIGHT, torch.float32, "cpu")
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    indptr = torch.tensor(ends, dtype=torch.int32), torch.tensor(p.kv_indptr, dtype=torch.int32)
    with pytest.raises(quire.ValidationError, match="qo_indptr"):
        wrapper.plan(*indptr, p.num_qo_heads, p.num_kv_heads, p.head_dim, q_data_type=p.dtype, **options)
