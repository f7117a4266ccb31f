"""Equalities that hold whatever the numbers are: between layouts, between schedules, between ways to say the same."""

from __future__ import annotations

import pytest
import torch

import quire
from calls import (
    decode,
    decode_wrapper,
    outputs,
    paged_wrapper,
    plan_decode,
    plan_paged,
    plan_ragged,
    prefill_paged,
    prefill_ragged,
    ragged_wrapper,
)
from problems import FORMS, Problem

QO_LENS = (5, 1, 0, 17, 1, 3, 9)
KV_LENS = (37, 300, 4, 17, 1, 0, 4)
#: Tokens between cuts: a multiple of every kernel's kv tile.
SPLIT = 640


def same(a, b):
    """Bitwise, -inf and all."""
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def part(problem, begin, end):
    """Requests [begin, end) of a problem, with the very same numbers."""
    qo, kv = problem.qo_indptr, problem.kv_indptr
    one = Problem(
        problem.qo_lens[begin:end],
        problem.kv_lens[begin:end],
        problem.num_qo_heads,
        problem.num_kv_heads,
        problem.head_dim,
        dtype=problem.dtype,
        device=problem.device,
        causal=problem.causal,
        window_left=problem.window_left,
    )
    one.q = problem.q[qo[begin] : qo[end]]
    one.k, one.v = (t[kv[begin] : kv[end]] for t in (problem.k, problem.v))
    return one


@pytest.mark.one_type
@pytest.mark.parametrize("page_size", [1, 16])
def test_layouts_and_forms_are_the_same_bits(device, backend, dtype, page_size):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    want = prefill_paged(p, p.paged(page_size), backend)
    for layout in ("NHD", "HND"):
        for form in FORMS:
            assert same(prefill_paged(p, p.paged(page_size, layout, form), backend), want)


def test_page_order_and_spare_pages_change_nothing(device, backend, dtype):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    want = prefill_paged(p, p.paged(8), backend)
    for seed in range(1, 5):
        assert same(prefill_paged(p, p.paged(8, spare=seed, order_seed=seed), backend), want)


def test_page_size_changes_nothing(device, backend, dtype):
    """Bit for bit where pages are fetched in the same way: multiples of 8 tokens may have tiles of their own."""
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    for page_sizes in ((1, 3), (8, 16, 64)):
        want = prefill_paged(p, p.paged(page_sizes[0]), backend)
        p.check(*want)
        for page_size in page_sizes[1:]:
            assert same(prefill_paged(p, p.paged(page_size), backend), want)


def test_ragged_and_paged_agree(device, backend, dtype):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    paged, ragged = prefill_paged(p, p.paged(8), backend), prefill_ragged(p, backend)
    p.check(*paged)
    p.check(*ragged)
    assert torch.allclose(paged[0].float(), ragged[0].float(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_decode_and_prefill_agree(device, backend, dtype):
    """Decode is prefill with one query each, causal or not."""
    p = Problem((1,) * 5, (37, 300, 1, 64, 129), dtype=dtype, device=device, causal=True)
    cache = p.paged(16)
    p.check(*decode(p, cache, backend))
    p.check(*prefill_paged(p, cache, backend))


@pytest.mark.first(2)
@pytest.mark.parametrize("plan", [{}, {"disable_split_kv": True}, {"fixed_split_size": SPLIT}], ids=str)
@pytest.mark.parametrize("window_left", [-1, 700])
def test_splits_do_not_change_the_answer(device, backend, dtype, window_left, plan):
    plan = plan
    more = {"num_qo_heads": 8, "num_kv_heads": 1, "dtype": dtype, "device": device, "window_left": window_left}
    p = Problem((1, 1, 1), (3000, 70, 1500), causal=True, **more)
    p.check(*prefill_paged(p, p.paged(16), backend, plan=plan))
    p.check(*prefill_ragged(p, backend, plan=plan))
    p.check(*decode(p, p.paged(16), backend, plan=plan))


@pytest.mark.parametrize("plan", [{"disable_split_kv": True}, {"fixed_split_size": SPLIT}], ids=str)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_batch_invariance(device, backend, dtype, kind, plan):
    """With fixed splits, or none, the bits of a request do not depend on who else is in the batch."""
    plan = plan
    qo_lens = (1, 1, 1, 1, 1) if kind == "decode" else (1, 40, 3, 1, 130)
    p = Problem(qo_lens, (700, 40, 2000, 1, 300), dtype=dtype, device=device, causal=True)

    def run(problem):
        if kind == "decode":
            return decode(problem, problem.paged(16), backend, plan=plan)
        return prefill_paged(problem, problem.paged(16), backend, plan=plan)

    whole = run(p)
    for begin, end in [(0, 1), (1, 2), (2, 3), (4, 5), (1, 4), (2, 5)]:
        rows = slice(p.qo_indptr[begin], p.qo_indptr[end])
        assert same(run(part(p, begin, end)), (whole[0][rows], whole[1][rows]))


def test_the_same_call_gives_the_same_bits(device, backend, dtype):
    """Partial results are merged in a fixed order, whoever arrives last."""
    p = Problem((1, 2, 1), (3000, 2500, 1500), num_qo_heads=8, num_kv_heads=1, dtype=dtype, device=device, causal=True)
    cache = p.paged(16)
    wrapper = paged_wrapper(p, cache, backend)
    plan_paged(wrapper, p, cache)
    want = wrapper.run(p.q, cache.kv, return_lse=True)
    for _ in range(30):
        assert same(wrapper.run(p.q, cache.kv, return_lse=True), want)


def test_one_plan_serves_many_layers(device, backend, dtype):
    """plan() once, run() with other tensors each time; a buffer may be used again and again."""
    layers = [Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True, seed=s) for s in range(4)]
    caches = [p.paged(8) for p in layers]
    wrapper, ragged = paged_wrapper(layers[0], caches[0], backend), ragged_wrapper(layers[0], backend)
    plan_paged(wrapper, layers[0], caches[0])
    plan_ragged(ragged, layers[0])
    out, _ = outputs(layers[0])
    for p, cache in zip(layers, caches, strict=True):
        p.check(wrapper.run(p.q, cache.kv, out=out))
        p.check(ragged.run(p.q, p.k, p.v, out=out))


@pytest.mark.one_type
def test_a_wrapper_is_planned_again_and_again(device, backend, dtype):
    """Nothing of an earlier plan survives: lengths, mask, window, heads, page size and dtype may all change."""
    first = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    wrapper = paged_wrapper(first, first.paged(8), backend)
    series = [
        (first, 8),
        (Problem((4, 9), (50, 9), dtype=dtype, device=device).random_mask(), 8),
        (Problem((4, 9), (50, 9), dtype=dtype, device=device), 16),
        (Problem((4,), (50,), num_qo_heads=6, num_kv_heads=6, dtype=dtype, device=device, window_left=3), 1),
        (Problem((300,), (300,), head_dim=128, dtype=dtype, device=device, soft_cap=9.0), 16),
        (first, 8),
    ]
    for p, page_size in series:
        cache = p.paged(page_size)
        plan_paged(wrapper, p, cache)
        for _ in range(2):
            p.check(*wrapper.run(p.q, cache.kv, return_lse=True))


def test_a_plan_keeps_its_own_copy_of_the_tables(device, backend, dtype):
    """Serving code overwrites its host arrays for the next step while this one still runs."""
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    cache = p.paged(8)
    tables = [t.clone() for t in cache.tables("cpu")]
    qo_indptr = torch.tensor(p.qo_indptr, dtype=torch.int32)
    wrapper = paged_wrapper(p, cache, backend)
    heads = (p.num_qo_heads, p.num_kv_heads)
    wrapper.plan(qo_indptr, *tables, *heads, p.head_dim, 8, causal=True, q_data_type=dtype)
    for t in (qo_indptr, tables[0], tables[2]):
        t.fill_(0)
    p.check(wrapper.run(p.q, cache.kv))


def test_forward_plans_again_from_what_plan_was_given(device, backend, dtype):
    """forward() with other options than planned: the caller's arrays may hold the next batch by then."""
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    cache = p.paged(8)
    tables = [t.clone() for t in cache.tables("cpu")]
    qo_indptr = torch.tensor(p.qo_indptr, dtype=torch.int32)
    wrapper = paged_wrapper(p, cache, backend)
    heads = (p.num_qo_heads, p.num_kv_heads)
    wrapper.plan(qo_indptr, *tables, *heads, p.head_dim, 8, causal=False, q_data_type=dtype)
    for t in (qo_indptr, tables[0], tables[2]):
        t.fill_(0)
    p.check(wrapper.forward(p.q, cache.kv, causal=True))


def test_two_wrappers_share_a_workspace(device, backend, dtype):
    """vLLM hands the same buffer to prefill and decode."""
    a = Problem((2, 1), (3000, 400), num_qo_heads=8, num_kv_heads=1, dtype=dtype, device=device, causal=True)
    b = Problem((1,) * 4, (3000, 2000, 9, 1), num_qo_heads=8, num_kv_heads=1, dtype=dtype, device=device)
    cache_a, cache_b = a.paged(16), b.paged(16)
    prefill, decoder = paged_wrapper(a, cache_a, backend), decode_wrapper(b, cache_b, backend)
    plan_paged(prefill, a, cache_a)
    plan_decode(decoder, b, cache_b)
    for _ in range(3):
        a.check(prefill.run(a.q, cache_a.kv))
        b.check(decoder.run(b.q, cache_b.kv))


@pytest.mark.parametrize("cut", [0, 1, 100, 299, 300])
def test_two_halves_merge_to_the_whole(device, backend, dtype, cut):
    """Attention over [0, cut) and over [cut, end) are states whose merge is attention over all."""
    p = Problem((4,), (300,), dtype=dtype, device=device)
    states = []
    for keys in (slice(0, cut), slice(cut, 300)):
        half = Problem((4,), (len(range(300)[keys]),), dtype=dtype, device=device)
        half.q, half.k, half.v = p.q, p.k[keys], p.v[keys]
        states += prefill_ragged(half, backend)
    p.check(*quire.merge_state(*states))


def test_merge_is_symmetric_and_order_is_rounding(device, dtype):
    v = torch.randn(6, 5, 4, 64).to(dtype).to(device)
    s = (torch.randn(6, 5, 4) * 4).to(device)
    left = quire.merge_state(v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
    right = quire.merge_state(v[:, 1].contiguous(), s[:, 1].contiguous(), v[:, 0].contiguous(), s[:, 0].contiguous())
    tolerance = 2 * torch.finfo(dtype).eps * float(v.abs().max())
    assert torch.allclose(left[0].float(), right[0].float(), rtol=0, atol=tolerance)
    assert torch.allclose(left[1], right[1], rtol=1e-6, atol=1e-6)
    order = torch.tensor([3, 0, 4, 2, 1], device=device)
    a, b = quire.merge_states(v, s), quire.merge_states(v[:, order].contiguous(), s[:, order].contiguous())
    assert torch.allclose(a[0].float(), b[0].float(), rtol=0, atol=tolerance)
    assert torch.allclose(a[1], b[1], rtol=1e-6, atol=1e-6)


@pytest.mark.one_type
def test_inputs_are_left_alone(device, backend, dtype):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device).random_mask()
    cache = p.paged(8)
    kept = [t.clone() for t in (p.q, p.k, p.v, p.mask, *cache.tables(), *cache.kv)]
    prefill_paged(p, cache, backend)
    prefill_ragged(p, backend)
    now = (p.q, p.k, p.v, p.mask, *cache.tables(), *cache.kv)
    assert all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(now, kept, strict=True))


def test_outputs_are_written_and_nothing_beside_them(device, backend, dtype):
    """Rows before, after and between the heads of an output view keep their poison."""
    p = Problem((5, 1, 17), (37, 300, 17), dtype=dtype, device=device, causal=True)
    big = torch.full((p.q.shape[0] + 4, p.num_qo_heads + 2, p.head_dim + 16), 7.0, dtype=dtype, device=device)
    out = big[2:-2, 1:-1, :-16]
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p)
    wrapper.run(p.q, p.k, p.v, out=out)
    p.check(out)
    out.fill_(7.0)
    assert bool((big == 7.0).all())
