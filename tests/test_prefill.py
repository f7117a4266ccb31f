"""Prefill and append: ragged and paged, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from calls import (
    outputs,
    paged_wrapper,
    plan_paged,
    plan_ragged,
    prefill,
    prefill_paged,
    prefill_ragged,
    ragged_wrapper,
)
from problems import FORMS, HEAD_DIMS, Problem, ints, poisoned, workspace

PAGE_SIZES = (1, 3, 8, 16, 64, 128)
LAYOUTS = ("NHD", "HND")
KINDS = ("ragged", "paged")
GROUP_SIZES = (1, 2, 3, 4, 5, 7, 8, 16)

#: Requests of every sort: append, decode-like, empty, square, one key, no key, more queries than keys.
QO_LENS = (5, 1, 0, 17, 1, 3, 9)
KV_LENS = (37, 130, 4, 17, 1, 0, 4)


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes(device, backend, dtype, page_size, kv_layout):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    p.check(*prefill_paged(p, p.paged(page_size, kv_layout), backend))


@pytest.mark.parametrize("signature", FORMS)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_cache_forms(device, backend, dtype, kv_layout, signature):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    p.check(*prefill_paged(p, p.paged(8, kv_layout, signature), backend))


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("signature", ["tensor", "tuple"])
def test_page_size_one_without_its_dimension(device, backend, dtype, kv_layout, signature):
    """With pages of one token, SGLang hands over [tokens, heads, head_dim]."""
    p = Problem((3, 6), (5, 6), dtype=dtype, device=device, causal=True)
    cache = p.paged(1, kv_layout, signature)
    token_dim = 1 if kv_layout == "NHD" else 2
    kv = cache.kv.squeeze(token_dim + 1) if signature == "tensor" else tuple(t.squeeze(token_dim) for t in cache.kv)
    wrapper = paged_wrapper(p, cache, backend)
    plan_paged(wrapper, p, cache)
    p.check(wrapper.run(p.q, kv))


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_ragged_layouts(device, backend, dtype, kv_layout):
    """In HND the heads come first: [num_kv_heads, nnz_kv, head_dim]."""
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    kv = (p.k, p.v) if kv_layout == "NHD" else tuple(t.transpose(0, 1).contiguous() for t in (p.k, p.v))
    p.check(*prefill_ragged(p, backend, kv_layout=kv_layout, kv=kv))


def test_ragged_views(device, backend, dtype):
    """k and v are slices of one packed projection and of a bigger tensor: other strides, gaps of NaN."""
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    packed = poisoned((p.k.shape[0], 7, p.head_dim), dtype, device)
    packed[:, 3:5] = p.k
    by_head = poisoned((p.num_kv_heads, p.v.shape[0] + 5, p.head_dim + 8), dtype, device)
    by_head[:, 2:-3, 8:] = p.v.transpose(0, 1)
    p.check(*prefill_ragged(p, backend, kv=(packed[:, 3:5], by_head[:, 2:-3, 8:].transpose(0, 1))))


@pytest.mark.parametrize("kind", KINDS)
def test_query_and_output_views(device, backend, dtype, kind):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    wide = poisoned((p.q.shape[0], p.num_qo_heads + 3, p.head_dim + 16), dtype, device)
    wide[:, 1:-2, :-16] = p.q
    p.q = wide[:, 1:-2, :-16]
    target = poisoned((p.num_qo_heads, p.q.shape[0], p.head_dim), dtype, device).transpose(0, 1)
    out, _ = prefill(p, kind, backend)
    if kind == "ragged":
        wrapper = ragged_wrapper(p, backend)
        plan_ragged(wrapper, p)
        wrapper.run(p.q, p.k, p.v, out=target)
    else:
        cache = p.paged()
        wrapper = paged_wrapper(p, cache, backend)
        plan_paged(wrapper, p, cache)
        wrapper.run(p.q, cache.kv, out=target)
    p.check(out)
    assert torch.equal(out, target)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window_left", [-1, 0, 7, 1000])
@pytest.mark.parametrize("mask", ["none", "causal", "custom", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_masks(device, backend, dtype, kind, mask, window_left, soft_cap):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, window_left=window_left, soft_cap=soft_cap)
    p.causal = mask == "causal"
    plan = {}
    if mask in ("custom", "packed"):
        p.random_mask()
    if mask == "packed":
        plan = {"custom_mask": None, "packed_custom_mask": p.packed_mask()}
    p.check(*prefill(p, kind, backend, plan=plan))


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_soft_cap_has_one_precision(device, backend, dtype, kind):
    """Of one key the lse is the capped logit itself: on every backend tanh is within 1e-5, also where it is 1."""
    p = Problem((60,) * 64, (1,) * 64, 1, 1, dtype=dtype, device=device, soft_cap=1.0, sm_scale=1.0)
    logits = torch.linspace(-12.0, 12.0, p.q.shape[0])
    logits[::100] *= 1000.0
    p.q.zero_()
    p.k.zero_()
    p.q[:, 0, 0], p.k[:, 0, 0] = logits.to(p.q), 1.0
    _, lse = prefill(p, kind, backend)
    truth = torch.tanh(p.q[:, 0, 0].cpu().double()) * math.log2(math.e)
    assert (lse[:, 0].cpu().double() - truth).abs().max() <= 1e-5


@pytest.mark.one_type
@pytest.mark.parametrize("kind", KINDS)
def test_soft_cap_keeps_nan_to_those_who_see_it(device, backend, dtype, kind):
    p = Problem((17, 40), (150, 40), dtype=dtype, device=device, causal=True, soft_cap=5.0)
    p.k[150 + 25 :] = math.nan  # queries 25 on of the second request see some of these
    out, lse = prefill(p, kind, backend)
    assert torch.isfinite(out[: 17 + 25]).all() and torch.isfinite(lse[: 17 + 25]).all()
    assert torch.isnan(out[17 + 25 :]).all() and torch.isnan(lse[17 + 25 :]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_mask_that_hides_whole_rows_and_tiles(device, backend, dtype, kind):
    """Rows that see nothing, rows that see one key at either end, and stretches of keys that nobody sees."""
    p = Problem((6, 40), (300, 200), dtype=dtype, device=device)
    first, second = torch.zeros(6, 300, dtype=torch.bool), torch.zeros(40, 200, dtype=torch.bool)
    first[1, 0] = first[2, 299] = first[4, 150:] = True
    second[:, 130:140] = True
    second[7] = False
    p.mask = torch.cat([first.flatten(), second.flatten()]).to(device)
    p.check(*prefill(p, kind, backend))


@pytest.mark.parametrize("kind", KINDS)
def test_mask_over_many_tiles(device, backend, dtype, kind):
    """Whole, mixed and empty stretches, each longer than what is known of tiles in one go."""
    p = Problem((6, 40), (9000, 5001), dtype=dtype, device=device)
    first, second = torch.zeros(6, 9000, dtype=torch.bool), torch.zeros(40, 5001, dtype=torch.bool)
    first[:, 3:5] = first[:, 8999] = first[:, 100:300] = True
    second[:, :4500] = True
    second[5:, 4096:4300] = torch.rand(35, 204, generator=torch.Generator().manual_seed(2)) < 0.5
    second[9] = False
    p.mask = torch.cat([first.flatten(), second.flatten()]).to(device)
    p.check(*prefill(p, kind, backend))


@pytest.mark.parametrize("kind", KINDS)
def test_custom_mask_takes_the_place_of_causal(device, backend, dtype, kind):
    p = Problem((4, 7), (9, 7), dtype=dtype, device=device).random_mask()
    p.check(*prefill(p, kind, backend, plan={"causal": True}))


@pytest.mark.part(2, 3)
@pytest.mark.each_value
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_head_dims(device, backend, kind, head_dim):
    dtype = torch.float16 if head_dim % 32 == 0 else torch.bfloat16
    p = Problem((5, 1, 20), (33, 70, 20), head_dim=head_dim, dtype=dtype, device=device, causal=True)
    p = p.within_tiles(backend)
    p.check(*prefill(p, kind, backend))


@pytest.mark.one_type
@pytest.mark.parametrize("kind", KINDS)
def test_values_narrower_than_keys(device, backend, dtype, kind):
    p = Problem((5, 30), (33, 70), head_dim=192, head_dim_vo=128, dtype=dtype, device=device, causal=True)
    p = p.within_tiles(backend)
    p.check(*prefill(p, kind, backend))


@pytest.mark.one_type
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_group_sizes(device, backend, dtype, kind, num_kv_heads, group_size):
    heads = {"num_qo_heads": num_kv_heads * group_size, "num_kv_heads": num_kv_heads}
    p = Problem((5, 1, 20), (33, 70, 9), **heads, dtype=dtype, device=device, causal=True, window_left=21)
    p.check(*prefill(p, kind, backend))


@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"),
    [
        ((1,), (1,)),
        ((0,), (0,)),
        ((0, 0), (3, 0)),
        ((3,), (0,)),
        ((0, 3, 0), (5, 0, 0)),
        ((40,), (3,)),
        ((1,) * 33, tuple(range(33))),
        ((129,), (129,)),
        ((257, 1), (511, 513)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(device, backend, dtype, kind, causal, qo_lens, kv_lens):
    p = Problem(qo_lens, kv_lens, dtype=dtype, device=device, causal=causal)
    p.check(*prefill(p, kind, backend))


@pytest.mark.parametrize("kind", KINDS)
def test_few_queries_of_many_keys(device, backend, dtype, kind):
    """So few tiles that the scheduler has to cut them."""
    p = Problem((3, 1), (5000, 777), num_qo_heads=8, num_kv_heads=1, dtype=dtype, device=device, causal=True)
    p.check(*prefill(p, kind, backend, page_size=16))


@pytest.mark.one_type
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causal", "window_left"), [(False, -1), (True, -1), (True, 9), (False, 9)])
def test_which_keys_are_seen(device, backend, dtype, kind, causal, window_left):
    """With q = 0 every visible key counts alike: lse is log2 of their number, and o the mean of their values."""
    p = Problem((7, 150, 1), (200, 150, 77), dtype=dtype, device=device, causal=causal, window_left=window_left)
    p.q.zero_()
    out, lse = prefill(p, kind, backend)
    counts = [
        oracle.visible(q, k, causal=causal, window_left=window_left).sum(1)
        for q, k in zip(p.qo_lens, p.kv_lens, strict=True)
    ]
    assert torch.equal(torch.exp2(lse[:, 0].cpu().double()).round().long(), torch.cat(counts))
    p.check(out, lse)


@pytest.mark.one_type
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_in_prefill(device, backend, dtype, kind, chunk):
    """Requests that are shorter than a chunk, end in one, begin in one, and have more queries than keys."""
    p = Problem((150, 1, 0, 40, 129), (333, 77, 5, 9, 129), dtype=dtype, device=device, attention_chunk_size=chunk)
    p.check(*prefill(p, kind, backend))


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_as_a_custom_mask(device, backend, dtype, kind):
    """What engines did instead: the same keys, by bits."""
    p = Problem((70, 5, 1, 6), (200, 64, 7, 130), dtype=dtype, device=device, attention_chunk_size=48)
    chunks = prefill(p, kind, backend)
    masks = [oracle.visible(q, k, chunk_size=48) for q, k in zip(p.qo_lens, p.kv_lens, strict=True)]
    p.attention_chunk_size, p.mask = None, torch.cat([mask.flatten() for mask in masks]).to(device)
    p.check(*prefill(p, kind, backend))
    p.check(*chunks)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size: expected a positive integer"),
        ({"attention_chunk_size": 64, "window_left": 3}, "expected None beside window_left=3, got 64"),
        (
            {"attention_chunk_size": 64, "custom_mask": torch.ones(40, dtype=torch.bool)},
            "expected None beside a custom",
        ),
    ],
)
def test_wrong_chunks(options, told):
    p = Problem((4,), (10,))
    with pytest.raises(quire.ValidationError, match=told):
        plan_ragged(ragged_wrapper(p, "auto"), p, plan=options)


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits(device, backend, dtype, kind):
    """Logits in the hundreds: one key takes all, and nothing overflows."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True, sm_scale=4.0)
    out, lse = prefill(p, kind, backend)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    p.check(out, lse)


@pytest.mark.parametrize("kind", KINDS)
def test_sm_scale(device, backend, dtype, kind):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, sm_scale=0.031)
    p.check(*prefill(p, kind, backend))


def test_run_scales(device, backend, dtype):
    """q_scale and k_scale multiply the logits, v_scale the output."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True)
    got = prefill_paged(p, p.paged(), backend, run={"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.25})
    p.sm_scale = 0.75 / math.sqrt(p.head_dim)
    p.check(*got, v_scale=0.25)


def test_run_scales_in_place_of_the_first_release(device, backend, dtype):
    """k_scale and v_scale were positional once."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True)
    cache = p.paged()
    wrapper = paged_wrapper(p, cache, backend)
    plan_paged(wrapper, p, cache)
    out = wrapper.run(p.q, cache.kv, 1.5, 0.25)
    p.sm_scale = 1.5 / math.sqrt(p.head_dim)
    p.check(out, v_scale=0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_sinks(device, backend, dtype, kind):
    """A sink joins the denominator; a row that sees no key is 0 all the same."""
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    if kind == "ragged":
        wrapper = ragged_wrapper(p, backend)
        plan_ragged(wrapper, p)
        out = wrapper.run(p.q, p.k, p.v, sinks=sinks)
    else:
        cache = p.paged()
        wrapper = paged_wrapper(p, cache, backend)
        plan_paged(wrapper, p, cache)
        out = wrapper.run(p.q, cache.kv, sinks=sinks)
    p.check(out, sinks=sinks)


@pytest.mark.parametrize("index_device", ["cpu", None])
@pytest.mark.parametrize("kind", KINDS)
def test_index_arrays_on_host_or_device(device, backend, dtype, kind, index_device):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    p.check(*prefill(p, kind, backend, index_device=index_device))


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_allocated_if_not_given(device, backend, dtype, kind):
    p = Problem(QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True)
    out, lse = prefill(p, kind, backend)
    cache = p.paged()
    if kind == "ragged":
        wrapper = ragged_wrapper(p, backend)
        plan_ragged(wrapper, p)
        args = (p.q, p.k, p.v)
    else:
        wrapper = paged_wrapper(p, cache, backend)
        plan_paged(wrapper, p, cache)
        args = (p.q, cache.kv)
    assert torch.equal(wrapper.run(*args), out)
    for pair in (wrapper.run(*args, return_lse=True), wrapper.run_return_lse(*args)):
        assert torch.equal(pair[0], out)
        assert torch.equal(pair[1], lse)


def test_spare_indices(device, backend, dtype):
    """The array of page numbers may be longer than the requests need."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True)
    cache = p.paged()
    qo_indptr = ints(p.qo_indptr, device)
    indices = torch.cat([cache.indices, torch.full((256,), 1 << 30, dtype=torch.int32, device=device)])
    wrapper = paged_wrapper(p, cache, backend)
    heads = (p.num_qo_heads, p.num_kv_heads)
    tables = (qo_indptr, cache.indptr, indices, cache.last_page_len)
    wrapper.plan(*tables, *heads, p.head_dim, cache.page_size, causal=True, q_data_type=dtype)
    p.check(wrapper.run(p.q, cache.kv))


# Spellings


def tables_of(problem, cache):
    """The positional arguments that open plan() of paged prefill in every release."""
    heads = (problem.num_qo_heads, problem.num_kv_heads)
    qo_indptr = ints(problem.qo_indptr, problem.device)
    return qo_indptr, cache.indptr, cache.indices, cache.last_page_len, *heads


@pytest.mark.one_type
def test_paged_plan_in_the_words_of_the_first_release(device, backend, dtype):
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True, window_left=20, soft_cap=8.0, sm_scale=0.1)
    cache = p.paged()
    wrapper = paged_wrapper(p, cache, backend)
    options = {"causal": True, "pos_encoding_mode": "NONE", "allow_fp16_qk_reduction": False, "sm_scale": 0.1}
    options |= {"window_left": 20, "logits_soft_cap": 8.0, "rope_scale": None, "rope_theta": None}
    options |= {"q_data_type": str(dtype).removeprefix("torch."), "kv_data_type": None, "non_blocking": False}
    wrapper.plan(*tables_of(p, cache), head_dim=p.head_dim, page_size=cache.page_size, **options)
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.one_type
def test_paged_plan_by_position_in_the_first_release(device, backend, dtype):
    """There custom_mask followed page_size, where head_dim_vo stands today."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, window_left=20, soft_cap=8.0, sm_scale=0.1).random_mask()
    cache = p.paged()
    wrapper = paged_wrapper(p, cache, backend)
    start = (*tables_of(p, cache), p.head_dim, cache.page_size)
    wrapper.plan(*start, p.mask, None, False, "NONE", False, 0.1, 20, 8.0, None, None, dtype, dtype, False)
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.one_type
def test_paged_plan_by_position_today(device, backend, dtype):
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, window_left=20, soft_cap=8.0, sm_scale=0.1).random_mask()
    cache = p.paged()
    wrapper = paged_wrapper(p, cache, backend)
    start = (*tables_of(p, cache), p.head_dim, cache.page_size)
    wrapper.plan(*start, None, p.mask, None, False, "NONE", False, 0.1, 20, 8.0, None, None, dtype, dtype)
    p.check(wrapper.run(p.q, cache.kv))


def ragged_tables_of(problem):
    """The positional arguments that open plan() of ragged prefill in every release."""
    heads = (problem.num_qo_heads, problem.num_kv_heads)
    return ints(problem.qo_indptr, problem.device), ints(problem.kv_indptr, problem.device), *heads


@pytest.mark.one_type
def test_ragged_plan_by_position_in_both_releases(device, backend, dtype):
    """Here window and soft cap stand before sm_scale, other than in paged prefill."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, window_left=20, soft_cap=8.0, sm_scale=0.1).random_mask()
    rest = (None, False, "NONE", False, 20, 8.0, 0.1, None, None, dtype, dtype)
    for middle in ((p.mask,), (None, p.mask)):
        wrapper = ragged_wrapper(p, backend)
        wrapper.plan(*ragged_tables_of(p), p.head_dim, *middle, *rest)
        p.check(wrapper.run(p.q, p.k, p.v))


def test_ragged_plan_in_the_words_of_the_first_release(device, backend, dtype):
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True)
    wrapper = ragged_wrapper(p, backend)
    name = str(dtype).removeprefix("torch.")
    wrapper.plan(
        *ragged_tables_of(p),
        head_dim=64,
        causal=True,
        allow_fp16_qk_reduction=False,
        q_data_type=name,
        kv_data_type=name,
    )
    p.check(wrapper.run(p.q, p.k, p.v))


@pytest.mark.one_type
def test_old_verbs(device, backend, dtype):
    """begin_forward plans, forward runs with its own options, end_forward does nothing."""
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device)
    cache = p.paged()
    paged, ragged = paged_wrapper(p, cache, backend), ragged_wrapper(p, backend)
    paged.begin_forward(*tables_of(p, cache), p.head_dim, cache.page_size, q_data_type=dtype)
    ragged.begin_forward(*ragged_tables_of(p), p.head_dim, q_data_type=dtype)
    for causal, window, cap in [(True, -1, None), (False, -1, None), (True, 5, 4.0)]:
        p.causal, p.window_left, p.soft_cap = causal, window, cap
        options = {"causal": causal, "window_left": window, "logits_soft_cap": cap}
        p.check(paged.forward(p.q, cache.kv, **options))
        p.check(*ragged.forward_return_lse(p.q, p.k, p.v, **options))
        p.check(*paged.forward_return_lse(p.q, cache.kv, **options))
    paged.end_forward()
    ragged.end_forward()


@pytest.mark.parametrize("name", ["qk_indptr_buf", "mask_indptr_buf"])
@pytest.mark.parametrize("cls", [quire.BatchPrefillWithPagedKVCacheWrapper, quire.BatchPrefillWithRaggedKVCacheWrapper])
def test_buffers_by_both_names(device, cls, name):
    """qk_indptr_buf is today's mask_indptr_buf. Given without a CUDA graph they must be used or refused by name."""
    cls(workspace(device), "NHD", **{name: None})
    buffer = torch.zeros(8, dtype=torch.int32, device=device)
    try:
        cls(workspace(device), "NHD", **{name: buffer})
    except quire.ValidationError as error:
        assert name in str(error)


def test_backend_is_chosen_by_itself(device, dtype):
    p = Problem((4, 9), (50, 9), dtype=dtype, device=device, causal=True)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    plan_ragged(wrapper, p)
    p.check(wrapper.run(p.q, p.k, p.v))


def test_dtype_is_float16_unless_said(device, backend):
    p = Problem((4, 9), (50, 9), dtype=torch.float16, device=device, causal=True)
    wrapper = ragged_wrapper(p, backend)
    wrapper.plan(*ragged_tables_of(p), p.head_dim, causal=True)
    p.check(wrapper.run(p.q, p.k, p.v))


# Any shape


#: Variants of wide heads take a minute to compile.
ANY_HEAD_DIM = pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])


@st.composite
def problems(draw, backend, dtype, device, head_dim):
    """A batch of a few requests with options from a small set of variants."""
    requests = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=1, max_size=5))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from(GROUP_SIZES[:5]))
    problem = Problem(
        [q for q, _ in requests],
        [k for _, k in requests],
        num_qo_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([-1, -1, 0, 13, 64])),
        seed=draw(st.integers(0, 1 << 30)),
    ).within_tiles(backend)
    return problem.random_mask(draw(st.sampled_from([0.02, 0.5, 0.98]))) if draw(st.booleans()) else problem


@pytest.mark.part(0, 2)
@ANY_HEAD_DIM
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ragged_batch(device, backend, dtype, head_dim, data):
    p = data.draw(problems(backend, dtype, device, head_dim))
    p.check(*prefill_ragged(p, backend, index_device=data.draw(st.sampled_from(["cpu", None]))))


@ANY_HEAD_DIM
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_paged_batch(device, backend, dtype, head_dim, data):
    p = data.draw(problems(backend, dtype, device, head_dim))
    page_size = data.draw(st.sampled_from([1, 3, 8, 16]))
    layout, signature = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(FORMS))
    cache = p.paged(page_size, layout, signature, order_seed=data.draw(st.integers(0, 99)))
    p.check(*prefill_paged(p, cache, backend, index_device=data.draw(st.sampled_from(["cpu", None]))))


# CUDA graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_paged_prefill_in_a_cuda_graph():
    """Captured once, replayed after each new plan, with the tables in buffers of the caller."""
    device = "cuda:0"
    batches = [((4, 4), (50, 9)), ((1, 7), (300, 7)), ((2, 2), (5, 120))]
    problems_ = [Problem(q, k, dtype=torch.float16, device=device, causal=True) for q, k in batches]
    caches = [p.paged(16, spare=40 - sum(-(-n // 16) for n in p.kv_lens)) for p in problems_]
    static = tuple(torch.zeros_like(t) for t in caches[0].kv)
    q = torch.zeros(8, 4, 64, dtype=torch.float16, device=device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 3, 64, 2)]
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    plan_paged(wrapper, problems_[0], caches[0])
    out, _ = outputs(problems_[0])
    wrapper.run(q, static, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, static, out=out)
    for p, cache in zip(problems_, caches, strict=True):
        plan_paged(wrapper, p, cache)
        for to, source in zip(static, cache.kv, strict=True):
            to.copy_(source)
        n = p.q.shape[0]
        q[:n] = p.q
        out.fill_(math.nan)
        graph.replay()
        p.check(out[:n])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_bases_and_layouts_of_an_lse(kind, device, backend):
    """As FlashInfer 0.7 names them."""
    p = Problem((5, 0, 3), (9, 4, 20), dtype=torch.float16, device=device, causal=True)
    plan, cache = {"causal": True, "q_data_type": p.dtype}, p.paged(8)
    if kind == "ragged":
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend)
        tables = [ints(p.qo_indptr, device), ints(p.kv_indptr, device)]
        given, heads = (p.q, p.k, p.v), (p.num_qo_heads, p.num_kv_heads, p.head_dim)
    else:
        wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend)
        tables = [ints(p.qo_indptr, device), cache.indptr, cache.indices, cache.last_page_len]
        given, heads = (p.q, cache.kv), (p.num_qo_heads, p.num_kv_heads, p.head_dim, 8)
    wrapper.plan(*tables, *heads, **plan, uniform_q_len=4)
    o, lse = wrapper.run(*given, return_lse=True)
    p.check(o, lse)
    for base, factor in (("log2", 1.0), ("ln", math.log(2))):
        for layout, expected in (("NH", lse * factor), ("HN", lse.t() * factor)):
            form = {"lse_base": base, "lse_layout": layout}
            again, found = wrapper.run_return_lse(*given, **form)
            torch.testing.assert_close(found, expected)
            assert found.is_contiguous() and torch.equal(again, o)
            target = torch.empty_like(found)
            assert torch.equal(wrapper.run(*given, lse=target, **form), o) and torch.equal(target, found)
            assert torch.equal(wrapper.run(*given, **form), o)
    for form, message in (
        ({"lse_base": "e"}, "lse_base: expected 'log2' or 'ln'"),
        ({"lse_layout": None}, "lse_layout: expected 'NH' or 'HN'"),
        ({"lse_layout": "HN", "lse": torch.empty_like(lse)}, "lse: expected"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            wrapper.run(*given, **form)
    with pytest.raises(quire.ValidationError, match="uniform_q_len"):
        wrapper.plan(*tables, *heads, **plan, uniform_q_len=0)
    with pytest.raises(quire.ValidationError, match="variant_owns_mask"):
        type(wrapper)(workspace(device), variant_owns_mask=True)
    if kind == "paged":
        for name, value in (("use_fp16_softmax", 1), ("uses_spcompress", True)):
            with pytest.raises(quire.ValidationError, match=name):
                wrapper.run(*given, **{name: value})
        for factor in (-1.0, "high"):
            with pytest.raises(quire.ValidationError, match="skip_softmax_threshold_scale_factor"):
                wrapper.run(*given, skip_softmax_threshold_scale_factor=factor)
        p.check(wrapper.run(*given, skip_softmax_threshold_scale_factor=500.0, use_fp16_softmax=True))
