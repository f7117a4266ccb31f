"""Attention states: merging them, and the wrappers that share a prefix."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from problems import Problem, ints, workspace

SIZES = [(1, 1, 64), (7, 4, 128), (33, 5, 256), (3, 64, 192), (5, 2, 48)]


def states(n, num_states, heads, head_dim, dtype, device, seed=0):
    """Random states: v [n, num_states, heads, head_dim] and s [n, num_states, heads], some of them empty."""
    source = torch.Generator().manual_seed(seed)
    v = torch.randn(n, num_states, heads, head_dim, generator=source).to(dtype)
    s = torch.randn(n, num_states, heads, generator=source) * 5.0
    empty = torch.rand(s.shape, generator=source) < 0.2
    s[empty] = -math.inf
    v[empty] = 0.0
    return v.to(device), s.to(device)


def check(got, truth, v):
    """A merge is one rounding away from the truth: there is no half-precision arithmetic in it."""
    assert got[0].dtype == v.dtype and got[0].device == v.device
    oracle.assert_close(got[0], truth.o, truth.o.to(v.dtype))
    oracle.assert_lse_close(got[1], truth.lse)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_merge_state(device, dtype, size):
    n, heads, dim = size
    v, s = states(n, 2, heads, dim, dtype, device)
    got = quire.merge_state(v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
    check(got, oracle.merge_states(v, s), v)


def test_merge_state_of_views(device, dtype):
    """What a slice of stacked states looks like."""
    v, s = states(9, 2, 4, 64, dtype, device)
    check(quire.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), oracle.merge_states(v, s), v)


def test_merge_state_of_base_e(device, dtype):
    """merge_state_v2() of sgl_kernel, whose log-sum-exps are FlashAttention's."""
    v, s = states(9, 2, 4, 64, dtype, device)
    given = v[:, 0], s[:, 0] * math.log(2), v[:, 1], s[:, 1] * math.log(2)
    out = torch.empty_like(v[:, 0]), torch.empty_like(s[:, 0])
    for got in (quire.merge_state_v2(*given), quire.merge_state_v2(*given, *out)):
        check((got[0], got[1] / math.log(2)), oracle.merge_states(v, s), v)
    assert got[0] is out[0] and got[1] is out[1]
    with pytest.raises(quire.ValidationError, match="s_merged: expected"):
        quire.merge_state_v2(*given, s_merged=out[1][1:])


@pytest.mark.parametrize("offset", [4, 8])
def test_merge_of_states_at_any_multiple_of_16_bytes(device, dtype, offset):
    flat = torch.randn(4 * 8 * 64 + offset, device=device).to(dtype)
    v, s = flat[offset:].view(2, 2, 8, 64), torch.randn(2, 2, 8, device=device)
    check(quire.merge_states(v, s), oracle.merge_states(v, s), v)


@pytest.mark.parametrize("num_states", [1, 2, 3, 17])
@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_merge_states(device, dtype, size, num_states):
    n, heads, dim = size
    v, s = states(n, num_states, heads, dim, dtype, device)
    check(quire.merge_states(v, s), oracle.merge_states(v, s), v)


@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.uint8])
def test_merge_state_in_place(device, dtype, mask_dtype):
    """Rows whose mask is 0 stay as they are; nothing new is allocated for the result."""
    v, s = states(11, 2, 4, 128, dtype, device)
    own, own_s = v[:, 0].contiguous(), s[:, 0].contiguous()
    before, before_s = own.clone(), own_s.clone()
    truth = oracle.merge_states(v, s)
    kept = torch.zeros(11, dtype=torch.bool)
    options = {}
    if mask_dtype is not None:
        kept = torch.arange(11) % 3 == 0
        options["mask"] = (~kept).to(mask_dtype).to(device)
    quire.merge_state_in_place(own, own_s, v[:, 1].contiguous(), s[:, 1].contiguous(), **options)
    assert torch.equal(own[kept.to(device)], before[kept.to(device)])
    assert torch.equal(own_s[kept.to(device)], before_s[kept.to(device)])
    rest = (~kept).to(device)
    check((own[rest], own_s[rest]), oracle.State(truth.o[~kept], truth.lse[~kept]), v)


def test_merge_of_nothing_seen(device, dtype):
    """Two empty states are an empty state, and an empty one leaves the other bit for bit."""
    v = torch.randn(3, 2, 64).to(dtype).to(device)
    s = torch.randn(3, 2).to(device)
    none, gone = torch.zeros_like(v), torch.full_like(s, -math.inf)
    out, lse = quire.merge_state(none, gone, none, gone)
    assert torch.equal(out, none) and torch.equal(lse, gone)
    for got in (quire.merge_state(v, s, none, gone), quire.merge_state(none, gone, v, s)):
        assert torch.equal(got[0], v) and torch.equal(got[1], s)


def test_merge_of_far_states(device, dtype):
    """Log-sums far apart neither overflow nor lose the larger one."""
    v, _ = states(4, 2, 2, 64, dtype, device)
    s = torch.tensor([[300.0, -300.0], [-300.0, 300.0], [9000.0, 9000.0], [-9000.0, -9001.0]]).to(device)
    s = s[:, :, None].expand(4, 2, 2).contiguous()
    check(quire.merge_states(v, s), oracle.merge_states(v, s), v)


@pytest.mark.parametrize("v_scale", [0.25, -4e4])
def test_a_scale_of_merged_values(device, dtype, v_scale):
    """Each state times it may be infinite in float16, and of another sign than its neighbour."""
    v, s = states(9, 2, 4, 64, dtype, device)
    truth = oracle.merge_states(v, s)
    truth = oracle.State(truth.o * v_scale, truth.lse)
    pair = v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous()
    merged = [quire.merge_states(v, s, v_scale), quire.merge_state(*pair, v_scale=v_scale)]
    quire.merge_state_in_place(*pair, v_scale=v_scale)
    for got in (*merged, pair[:2]):
        check(got, truth, v)
    assert got[0].isfinite().any() and got[0].isinf().any() == (dtype is torch.float16 and v_scale < -1)
    with pytest.raises(quire.ValidationError, match="v_scale: expected a finite number"):
        quire.merge_states(v, s, math.inf)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(0, 40), num_states=st.integers(1, 6), heads=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_any_merge(device, dtype, n, num_states, heads, seed):
    v, s = states(n, num_states, heads, 64, dtype, device, seed)
    check(quire.merge_states(v, s), oracle.merge_states(v, s), v)


# Wrappers. A request's keys are the levels one after another, so the truth is plain attention over the joined keys.


def joined(levels, groups, qo_lens, dtype, device, *, causal, kv_layout="NHD", page_size=8, **more):
    """A cache of shared levels, and the plain problem that it stands for.

    Args:
        levels: per level, the kv length of each of its entries; the last has one entry per request.
        groups: per level, which of its entries each request reads.

    Returns: the joined Problem, and per level (PagedCache tables, qo_indptr), and the cache.
    """
    entries = [n for level in levels for n in level]
    store = Problem((1,) * len(entries), entries, dtype=dtype, device=device, seed=5, **more)
    cache = store.paged(page_size, kv_layout, "tuple")
    starts, first = store.kv_indptr, oracle.indptr_of([len(level) for level in levels])
    keys = []
    for request in range(len(qo_lens)):
        for level, group in enumerate(groups):
            entry = first[level] + group[request]
            keys += range(starts[entry], starts[entry + 1])
    kv_lens = [sum(level[g[r]] for level, g in zip(levels, groups, strict=True)) for r in range(len(qo_lens))]
    whole = Problem(qo_lens, kv_lens, dtype=dtype, device=device, causal=causal, **more)
    index = torch.tensor(keys, dtype=torch.long, device=device)
    whole.k, whole.v = store.k[index], store.v[index]
    tables = []
    for level, group in enumerate(groups):
        a, b = first[level], first[level + 1]
        rows = [sum(n for n, g in zip(qo_lens, group, strict=True) if g == e) for e in range(b - a)]
        pages = cache.indptr[a : b + 1]
        indices = cache.indices[int(pages[0]) : int(pages[-1])]
        tables.append((ints(oracle.indptr_of(rows), device), pages - pages[0], indices, cache.last_page_len[a:b]))
    return whole, tables, cache


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_three_levels(device, backend, dtype, causal, kv_layout):
    """One system prompt, two documents, four requests."""
    p, tables, cache = joined(
        levels=[(40,), (13, 29), (7, 5, 9, 6)],
        groups=[(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)],
        qo_lens=(3, 1, 4, 6),
        dtype=dtype,
        device=device,
        causal=causal,
        kv_layout=kv_layout,
    )
    wrapper = quire.MultiLevelCascadeAttentionWrapper(3, workspace(device), kv_layout, backend=backend)
    columns = [list(c) for c in zip(*tables, strict=True)]
    for plan, run in ((wrapper.plan, wrapper.run), (wrapper.begin_forward, wrapper.forward)):
        plan(*columns, p.num_qo_heads, p.num_kv_heads, p.head_dim, 8, causal=causal, q_data_type=dtype)
        for _ in range(2):
            p.check(run(p.q, cache.kv))


def test_one_level_is_plain_prefill(device, backend, dtype):
    p, tables, cache = joined([(20, 33)], [(0, 1)], (3, 5), dtype, device, causal=True)
    wrapper = quire.MultiLevelCascadeAttentionWrapper(1, workspace(device), backend=backend)
    columns = [list(c) for c in zip(*tables, strict=True)]
    wrapper.plan(*columns, p.num_qo_heads, p.num_kv_heads, p.head_dim, 8, causal=True, q_data_type=dtype)
    p.check(wrapper.run(p.q, cache.kv))


def test_a_window_over_levels_is_right_or_refused(device, backend, dtype):
    """A level does not know how far its keys are from the queries: windows inside each level would be wrong."""
    p, tables, cache = joined([(40,), (7, 5)], [(0, 0), (0, 1)], (3, 1), dtype, device, causal=True)
    p.window_left = 20
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace(device), backend=backend)
    columns = [list(c) for c in zip(*tables, strict=True)]
    try:
        wrapper.plan(*columns, 4, 2, 64, 8, causal=True, window_left=20, q_data_type=dtype)
    except quire.UnsupportedError as error:
        assert "window_left" in str(error)
        return
    p.check(wrapper.run(p.q, cache.kv))


def test_levels_that_do_not_match(device, backend):
    """One array a level, and a run only after a plan."""
    dtype = torch.float16
    p, tables, cache = joined([(40,), (7, 5)], [(0, 0), (0, 1)], (3, 1), dtype, device, causal=True)
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace(device), backend=backend)
    with pytest.raises(quire.PlanError, match=r"plan\(\)"):
        wrapper.run(p.q, cache.kv)
    columns = [list(c) for c in zip(*tables, strict=True)]
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    for i, name in enumerate(names):
        short = [c[:1] if i == j else c for j, c in enumerate(columns)]
        with pytest.raises(quire.ValidationError, match=name):
            wrapper.plan(*short, 4, 2, 64, 8)
    for bad in (0, -1, None, 1.5):
        with pytest.raises(quire.ValidationError, match="num_levels"):
            quire.MultiLevelCascadeAttentionWrapper(bad, workspace(device))


def shared_prefix(qo_lens, dtype, device, kv_layout, causal, unique=(9, 1, 30)):
    """A problem whose requests begin with the same 50 keys: (whole, tables of the unique part, cache, k, v)."""
    whole, tables, cache = joined(
        [(50,), unique], [(0,) * 3, (0, 1, 2)], qo_lens, dtype, device, causal=causal, kv_layout=kv_layout
    )
    k, v = whole.k[:50], whole.v[:50]
    if kv_layout == "HND":
        k, v = (t.transpose(0, 1).contiguous() for t in (k, v))
    return whole, tables[1], cache, k, v


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("signature", ["tensor", "tuple"])
def test_decode_with_shared_prefix(device, backend, dtype, signature, kv_layout):
    p, (_, indptr, indices, last), cache, k, v = shared_prefix((1, 1, 1), dtype, device, kv_layout, False)
    wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), kv_layout, backend=backend)
    wrapper.begin_forward(indptr, indices, last, p.num_qo_heads, p.num_kv_heads, p.head_dim, 8, data_type=dtype)
    kv = torch.stack(cache.kv, 1) if signature == "tensor" else cache.kv
    p.check(wrapper.forward(p.q, k, v, kv))
    p.sm_scale = 0.3
    p.check(wrapper.forward(p.q, k, v, kv, sm_scale=0.3))
    wrapper.end_forward()


@pytest.mark.one_type
@pytest.mark.first(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_prefill_with_shared_prefix(device, backend, dtype, kv_layout, causal):
    p, tables, cache, k, v = shared_prefix((4, 1, 7), dtype, device, kv_layout, causal)
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), kv_layout, backend=backend)
    wrapper.begin_forward(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim, 8, q_data_type=dtype)
    p.check(wrapper.forward(p.q, k, v, cache.kv, causal=causal))
    p.sm_scale = 0.3
    p.check(wrapper.forward(p.q, k, v, cache.kv, causal=causal, sm_scale=0.3))
    wrapper.end_forward()


@pytest.mark.parametrize("page_size", [(), (8,)], ids=["from the cache", "given"])
def test_prefill_with_shared_prefix_in_the_words_of_its_page(device, backend, dtype, page_size):
    """The first release took the data type from q, and the page size from the cache; a batch after another, too."""
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), "NHD", backend=backend)
    for qo_lens, causal in (((4, 1, 7), True), ((2, 3, 1), False)):
        p, tables, cache, k, v = shared_prefix(qo_lens, dtype, device, "NHD", causal)
        wrapper.begin_forward(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim, *page_size)
        for _layer in range(2):
            p.check(wrapper.forward(p.q, k, v, torch.stack(cache.kv, 1), causal=causal))


def test_a_shared_prefix_plan_keeps_its_own_copy_of_the_tables(device, backend):
    """Also where the page size, and so the plan, waits for the first cache."""
    p, tables, cache, k, v = shared_prefix((4, 1, 7), torch.float16, device, "NHD", True)
    tables = [t.cpu().clone() for t in tables]
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), "NHD", backend=backend)
    wrapper.begin_forward(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim)
    for t in tables:
        t.fill_(0)
    p.check(wrapper.forward(p.q, k, v, cache.kv, causal=True))


@pytest.mark.one_type
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_decode_with_shared_prefix_padded(device, backend, dtype, kv_layout):
    """The suffixes stand in one padded tensor: [batch_size, unique_len, num_kv_heads, head_dim]."""
    p = Problem((1,) * 3, (50 + 12,) * 3, dtype=dtype, device=device)
    k, v = (t.reshape(3, 62, *t.shape[1:]).clone() for t in (p.k, p.v))
    k[:, :50], v[:, :50] = k[:1, :50], v[:1, :50]
    p.k, p.v = (t.reshape(-1, *t.shape[2:]) for t in (k, v))
    parts = [k[0, :50], v[0, :50], k[:, 50:], v[:, 50:]]
    if kv_layout == "HND":
        parts = [t.transpose(-3, -2).contiguous() for t in parts]
    attend = partial(
        quire.batch_decode_with_shared_prefix_padded_kv_cache, p.q, *parts, kv_layout=kv_layout, backend=backend
    )
    p.check(attend())
    p.sm_scale = 0.3
    p.check(attend(sm_scale=0.3, allow_fp16_qk_reduction=True))


@pytest.mark.parametrize("name", ["rope_scale", "rope_theta"])
def test_positions_of_a_shared_prefix_are_refused(name):
    """The keys of a request's own begin anew at 0 there, so that rotating inside would be wrong."""
    q, kv = torch.zeros(2, 4, 64), torch.zeros(1, 2, 8, 4, 64)
    decode = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    prefill = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    for call in (decode.forward, prefill.forward):
        with pytest.raises(quire.ValidationError, match=f"{name}: not supported"):
            call(q, q, q, kv, **{name: 2.0})
    with pytest.raises(quire.ValidationError, match=f"{name}: not supported"):
        quire.batch_decode_with_shared_prefix_padded_kv_cache(q, q, q, kv[0], kv[0], **{name: 2.0})


def test_the_usual_positions_of_a_shared_prefix_are_taken(device, dtype):
    """Those that the manual names for None: without a rotation they say nothing."""
    p, tables, cache, k, v = shared_prefix((4, 1, 7), dtype, device, "NHD", True)
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim)
    p.check(wrapper.forward(p.q, k, v, cache.kv, rope_scale=1.0, rope_theta=1e4))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_shared_prefixes_in_the_words_of_the_first_release(device, kind):
    """workspace_buffer, new_workspace_buffer and unique_kv_data, and a flag that permits less precision."""
    dtype, lens = torch.float16, (1, 1, 1) if kind == "decode" else (4, 1, 7)
    p, tables, cache, k, v = shared_prefix(lens, dtype, device, "NHD", kind == "prefill")
    cls = getattr(quire, f"Batch{kind.capitalize()}WithSharedPrefixPagedKVCacheWrapper")
    wrapper = cls(workspace_buffer=torch.empty(1 << 10, dtype=torch.uint8, device=device))
    wrapper.reset_workspace_buffer(new_workspace_buffer=workspace(device))
    assert wrapper._unique._workspace.buffer.data_ptr() == workspace(device).data_ptr()
    wrapper.begin_forward(*tables[kind == "decode" :], p.num_qo_heads, p.num_kv_heads, p.head_dim, 8)
    p.check(wrapper.forward(p.q, k, v, unique_kv_data=cache.kv, allow_fp16_qk_reduction=True))
    wrapper.end_forward()
    with pytest.raises(quire.ValidationError, match="unique_kv_data: expected it or unique_kv_cache, got both"):
        wrapper.forward(p.q, k, v, unique_kv_data=cache.kv, unique_kv_cache=cache.kv)


def test_levels_for_graphs_that_are_planned_wrongly_stay_as_they_were():
    """The first level is fine: what its graph reads is not written before the second was looked at."""
    levels = ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]
    lengths = {
        "qo_indptr": (2, 3),
        "paged_kv_indptr": (2, 3),
        "paged_kv_indices": (4, 4),
        "paged_kv_last_page_len": (1, 2),
    }
    buffers = {f"{name}_buf_arr": [torch.zeros(n, dtype=torch.int32) for n in lengths[name]] for name in levels}
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), use_cuda_graph=True, **buffers)
    right = [[[0, 2], [0, 1, 2]], [[0, 2], [0, 1, 2]], [[0, 1], [2, 3]], [[16], [7, 9]]]
    wrong = [[[0, 2], [0, 1, 2]], [[0, 1], [0, 1, 2]], [[3], [2, 3]], [[5], [7, 17]]]

    def plan(tables):
        arrays = [[ints(values, "cpu") for values in level] for level in tables]
        wrapper.plan(*arrays, 8, 2, 64, 16, q_data_type=torch.float32)

    plan(right)
    q, cache = torch.randn(2, 8, 64), torch.randn(4, 2, 16, 2, 64)
    want = wrapper.run(q, cache)
    with pytest.raises(quire.ValidationError, match="last_page_len"):
        plan(wrong)
    assert torch.equal(wrapper.run(q, cache), want)
