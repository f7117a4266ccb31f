"""Causal masks with ranges of keys that are seen in both directions, against the oracle and bits of the same mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_cases
import quire
from calls import NOTHING, paged_wrapper, plan_paged, plan_ragged, ragged_wrapper
from problems import PagedCache, Problem, any_dtype, ints, workspace
from quire import variants

QO_LENS, KV_LENS = (150, 0, 40, 1), (150, 8, 200, 30)
FEW = (30, 0, 32, 1)  #: queries, as many as decode takes
#: Of each request: (first query, one behind the last, first key, last key).
SPANS = (((10, 60, 10, 59), (70, 140, 70, 139)), (), ((5, 30, 0, 189), (30, 33, 198, 500)), ((0, 1, 3, 12),))
WINDOWS = ((-1, -1), (5, -1), (0, 0), (-1, 20), (16, 24))


def ranges(p: Problem, spans: Any = SPANS) -> Tensor:
    """int32 [nnz_qo, 2]."""
    parts = []
    for count, own in zip(p.qo_lens, spans, strict=True):
        rows = torch.full((count, 2), -1, dtype=torch.int32)
        for begin, end, first, last in own:
            rows[begin:end] = torch.tensor([first, last], dtype=torch.int32)
        parts.append(rows)
    return torch.cat(parts).to(p.device)


def visible(p: Problem, rows: Tensor, causal_window: int = -1, range_window: int = -1) -> Tensor:
    """The mask, flat, from the definition."""
    masks, at = [], 0
    for qo_len, kv_len in zip(p.qo_lens, p.kv_lens, strict=True):
        past = torch.arange(kv_len - qo_len, kv_len)[:, None] - torch.arange(kv_len)
        own, key = rows[at : at + qo_len].cpu().long(), torch.arange(kv_len)
        seen = (past >= 0) & ((past <= causal_window) if causal_window >= 0 else True)
        both = (key >= own[:, :1]) & (key <= own[:, 1:]) & ((past < range_window) if range_window > 0 else True)
        masks.append((seen | both).flatten())
        at += qo_len
    return torch.cat(masks).to(p.device)


def problem(device: str, dtype: torch.dtype, backend: str = "auto", **more: Any) -> Problem:
    return Problem(FEW if backend == "quire:decode" else QO_LENS, KV_LENS, dtype=dtype, device=device, **more)


def planned(p: Problem, cache: PagedCache, backend: str = "auto", **plan: Any) -> Any:
    kinds = {"q_data_type": p.dtype, "kv_data_type": p.dtype}
    wrapper = quire.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(p.device), cache.kv_layout, head_dim_qk=p.head_dim, head_dim_vo=p.head_dim, backend=backend, **kinds
    )
    tables, heads = cache.tables(p.device), (p.num_qo_heads, p.num_kv_heads, p.head_dim, cache.page_size)
    wrapper.plan(ints(p.qo_indptr, p.device), *tables, *heads, **plan)
    return wrapper


def check_bits(backend: str, wrapper: Any, o: Tensor, other: Any, of_mask: Tensor) -> None:
    """Bits equal those under a custom mask, if both plans divide the keys alike."""
    schedules = [(w._attention.plan.schedule_input, w._attention.plan.schedule.sizes) for w in (wrapper, other)]
    alike = {(given.tile_rows, given.tile_kv, s.num_ctas, s.num_partials) for given, s in schedules}
    assert len(alike) == 1 or backend not in ("quire:cpu", "quire:fa3", "quire:decode")
    assert len(alike) > 1 or torch.equal(o, of_mask)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_paged(device, backend, dtype, windows):
    p = problem(device, dtype, backend)
    rows = ranges(p)
    cache = p.paged(16)
    wrapper = planned(p, cache, backend)
    o, lse = wrapper.run(p.q, cache.kv, rows, *windows, return_lse=True)
    p.mask = visible(p, rows, *windows)
    p.check(o, lse)
    plain = paged_wrapper(p, cache, backend)
    plan_paged(plain, p, cache)
    check_bits(backend, wrapper, o, plain, plain.run(p.q, cache.kv))


def test_ranges_that_change(device, backend):
    p = problem(device, any_dtype(device), backend)
    rows = ranges(p)
    cache = p.paged(16)
    wrapper = planned(p, cache, backend)

    def check(rows: Tensor, *windows: int) -> None:
        p.mask = visible(p, rows, *windows)
        p.check(wrapper.run(p.q, cache.kv, rows, *windows))

    check(rows)
    plan = wrapper._attention
    check(rows)
    assert wrapper._attention is plan, "other layers take the plan as it is"
    check(rows, 9)
    rows[20:26] = torch.tensor([2, 77], dtype=torch.int32, device=device)  # in place
    check(rows, 9)
    check(torch.full_like(rows, -1))
    check(rows)
    with torch.inference_mode():  # whose tensors count no changes
        mine = ranges(p)
        check(mine)
        mine[0:5] = 90
        wrapper.plan(ints(p.qo_indptr, device), *cache.tables(device), 4, 2, 64, 16)
        check(mine)
    check(rows)


@pytest.mark.one_type
def test_ragged(device, backend, dtype):
    p = problem(device, dtype, backend)
    rows = ranges(p)
    first = {"first_row": ints(p.qo_indptr[:-1], device), "ranges": rows, "causal_window": -1, "range_window": 0}
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), backend=backend, variant=variants.causal_with_ranges
    )
    plan_ragged(wrapper, p, plan=first)
    o, lse = wrapper.run(p.q, p.k, p.v, return_lse=True, **NOTHING)
    p.mask = visible(p, rows)
    p.check(o, lse)
    plain = ragged_wrapper(p, backend)
    plan_ragged(plain, p)
    check_bits(backend, wrapper, o, plain, plain.run(p.q, p.k, p.v))


def test_scales_and_types(device):
    p = problem(device, any_dtype(device), v_scale=0.5)
    rows = ranges(p)
    cache, p.mask, p.sm_scale = p.paged(16, "HND"), visible(p, rows), 0.3
    wrapper = planned(p, cache, sm_scale=0.1)
    got = wrapper.run_return_lse(p.q, cache.kv, rows, q_scale=6.0, k_scale=0.5, v_scale=0.5)
    p.check(*got)
    out = torch.empty_like(p.q)
    assert wrapper.forward(p.q, cache.kv, rows, q_scale=6.0, k_scale=0.5, v_scale=0.5, out=out) is out
    assert torch.equal(out, got[0])


def test_caches_of_4_bits(device):
    p = problem(device, torch.bfloat16, **nvfp4_cases.SCALES)
    cache, rows = nvfp4_cases.paged(p, nvfp4_cases.quantise(p), 16), ranges(p)
    wrapper = quire.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(device), head_dim_qk=64, head_dim_vo=64, kv_data_type=torch.uint8
    )
    wrapper.plan(ints(p.qo_indptr, device), *cache.tables(device), 4, 2, 64, 16, kv_data_type="nvfp4")
    p.mask = visible(p, rows)
    p.check(wrapper.run(p.q, cache.kv, rows, k_scale=p.k_scale, v_scale=p.v_scale, kv_cache_sf=cache.sf))


def test_a_batch_without_queries(device):
    p = Problem((0, 0), (5, 0), dtype=any_dtype(device), device=device)
    cache = p.paged(16)
    o = planned(p, cache).run(p.q, cache.kv, torch.empty(0, 2, dtype=torch.int32, device=device))
    assert o.shape == (0, 4, 64)


def test_wrong_arguments():
    p = problem("cpu", torch.float32)
    rows = ranges(p)
    cache = p.paged(16)
    kind, wrapper = quire.BatchPrefillWithCausalBidirectionalRangesWrapper, planned(p, cache)
    for given, message in (
        ((rows.long(),), r"ranges: expected dtype torch.int32"),
        ((rows[1:],), r"bidirectional_ranges: expected \[nnz_qo=191, first and last key=2\]"),
        ((rows.flatten(),), "bidirectional_ranges: expected"),
        ((rows.tolist(),), "bidirectional_ranges: expected a torch.Tensor"),
        ((rows, 1.5), "causal_window_left: expected a number of keys"),
        ((rows, -1, True), "range_window_left: expected a number of keys"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            wrapper.run(p.q, cache.kv, *given)
    with pytest.raises(quire.ValidationError, match="kv_cache_sf: expected None with keys and values of"):
        wrapper.run(p.q, cache.kv, rows, kv_cache_sf=rows)
    for name, value in (
        ("causal", True), ("window_left", 3), ("logits_soft_cap", 3.0), ("custom_mask", rows), ("prefix_len_ptr", rows),
        ("token_pos_in_items_len", 3), ("pos_encoding_mode", "ALIBI"),
    ):  # fmt: skip
        with pytest.raises(quire.UnsupportedArgumentError, match=f"^{name}: "):
            planned(p, cache, **{name: value})
    planned(p, cache, logits_soft_cap=0.0, o_data_type="float32", head_dim_vo=64)
    for name, value in (("q_data_type", torch.float16), ("o_data_type", "float16"), ("head_dim_vo", 32)):
        with pytest.raises(quire.ValidationError, match=f"^{name}: expected .*, as the constructor was told"):
            planned(p, cache, **{name: value})
    for name, value in (("use_cuda_graph", True), ("pos_encoding_mode", "ALIBI")):
        with pytest.raises(quire.UnsupportedArgumentError, match=f"^{name}: "):
            kind(workspace("cpu"), **{name: value})
    with pytest.raises(quire.PlanError):
        kind(workspace("cpu")).run(p.q, cache.kv, rows)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 256])
def test_long_requests(device, head_dim):
    """Of images among text: several row tiles of a kernel."""
    length, short = (600, 400) if device == "cpu" else (2048, 700)
    spans = tuple((at, at + 256, at, at + 255) for at in range(100, length - 248, 400))
    p = Problem((length, short), (length, length), 8, 2, head_dim, dtype=torch.bfloat16, device=device)
    rows = ranges(p, (spans, ((0, 256, length - short, length - short + 255),)))
    cache = p.paged(64)
    wrapper = planned(p, cache, disable_split_kv=True)
    o, lse = wrapper.run(p.q, cache.kv, rows, return_lse=True)
    p.mask = visible(p, rows)
    p.check(o, lse)
    plain = paged_wrapper(p, cache, "auto")
    plan_paged(plain, p, cache, plan={"disable_split_kv": True})
    check_bits("auto", wrapper, o, plain, plain.run(p.q, cache.kv))
