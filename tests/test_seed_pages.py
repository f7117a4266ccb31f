"""The examples of the manual pages, as they stand there but for the device and the number of layers."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import oracle
import quire as flashinfer
from problems import Problem, ints, workspace
from test_xqa_function import beside_sink_tokens

NUM_LAYERS = 2


def test_paged_prefill_page(device):
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    paged_kv_indices = torch.arange(max_num_pages).int().to(device)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(device)
    kv_cache_at_layer = torch.randn(
        num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device
    )
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)

    assert outputs[0].shape == torch.Size([100, 64, 128])

    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (page_size * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(torch.full((qo_len[i], kv_len[i]), True, device=device), diagonal=(kv_len[i] - qo_len[i]))
        mask_arr.append(mask_i.flatten())

    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        custom_mask=mask,
    )
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)


def test_ragged_prefill_page(device):
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    kv_indptr = qo_indptr.clone()
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(device)
    k_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(device)
    v_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(device)
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, causal=True)
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)

    assert outputs[0].shape == torch.Size([100, 64, 128])

    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(torch.full((qo_len[i], kv_len[i]), True, device=device), diagonal=(kv_len[i] - qo_len[i]))
        mask_arr.append(mask_i.flatten())

    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, custom_mask=mask)
    outputs_custom_mask = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, k, v)
        outputs_custom_mask.append(o_custom)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)

    assert outputs_custom_mask[0].shape == torch.Size([100, 64, 128])


@pytest.mark.slow
def test_shared_prefix_decode_page(device):
    num_layers = 1
    num_qo_heads = 64
    num_kv_heads = 8
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    shared_prefix_len = 8192
    unique_kv_page_indices = torch.arange(max_num_pages).int().to(device)
    unique_kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    # 1 <= kv_last_page_len <= page_size
    unique_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    unique_kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch decode attention
    wrapper.begin_forward(
        unique_kv_page_indptr,
        unique_kv_page_indices,
        unique_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        data_type=torch.float16,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half().to(device)
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        unique_kv_data = unique_kv_data_at_layer[i]
        # compute batch decode attention, reuse auxiliary data structures for all layers
        o = wrapper.forward(q, k_shared, v_shared, unique_kv_data)
        outputs.append(o)

    # clear auxiliary data structures
    wrapper.end_forward()
    assert outputs[0].shape == torch.Size([7, 64, 128])


@pytest.mark.slow
def test_shared_prefix_prefill_page(device):
    num_layers = 1
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    shared_prefix_len = 8192
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    paged_kv_indices = torch.arange(max_num_pages).int().to(device)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch prefill attention
    prefill_wrapper.begin_forward(
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(nnz_qo, num_qo_heads, head_dim).half().to(device)
        kv_data = kv_data_at_layer[i]
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.forward(q, k_shared, v_shared, kv_data, causal=True)
        outputs.append(o)
    # clear auxiliary data structures
    prefill_wrapper.end_forward()
    assert outputs[0].shape == torch.Size([100, 64, 128])


def test_merge_page(device):
    """The functions of the page of cascades, on states of its sizes."""
    v_a, v_b = torch.randn(2, 7, 64, 128, device=device).half()
    s_a, s_b = torch.randn(2, 7, 64, device=device)
    want = oracle.merge_state(v_a, s_a, v_b, s_b)
    v, s = flashinfer.merge_state(v_a, s_a, v_b, s_b)
    assert torch.allclose(v.cpu().double(), want.o, atol=2e-3) and torch.allclose(s.cpu().double(), want.lse, atol=1e-5)
    stacked, lse = flashinfer.merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
    assert torch.allclose(stacked, v, atol=1e-3) and torch.allclose(lse, s, atol=1e-5)
    assert flashinfer.merge_state_in_place(v_a, s_a, v_b, s_b) is None
    assert torch.equal(v_a, v) and torch.equal(s_a, s)


def test_xqa_pages_by_position(device):
    """The first page's call: one beam, a cache of rows, an output that is written, scratch and semaphores."""
    batch_size, beam_width, num_q_heads, num_kv_heads, head_dim, page_size, num_pages = 4, 1, 8, 2, 64, 32, 9
    q = torch.randn(batch_size, beam_width, num_q_heads, head_dim).half().to(device)
    k_cache, v_cache = torch.randn(2, num_pages * page_size * num_kv_heads, head_dim).half().to(device)
    page_table = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=torch.int32, device=device)
    lens = [64, 33, 1, 40]
    seq_lens = torch.tensor([[n] for n in lens]).to(torch.uint32).to(device)
    output = torch.full_like(q, math.nan)
    workspace_buffer = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(64, dtype=torch.int32, device=device).view(torch.uint32)
    sinks = torch.randn(num_kv_heads, num_q_heads // num_kv_heads, device=device)
    kv_scale = torch.tensor([0.5], dtype=torch.float32, device=device)
    flashinfer.xqa.xqa(
        q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size,
        sinks, 1.5, kv_scale, 20, 132,
    )  # fmt: skip
    tokens = [t.view(num_pages * page_size, num_kv_heads, head_dim) for t in (k_cache, v_cache)]
    k, v = (torch.cat([t[64 * i : 64 * i + n] for i, n in enumerate(lens)]) for t in tokens)
    indptrs = [*range(batch_size + 1)], oracle.indptr_of(lens)
    options = {"sm_scale": 0.75 / math.sqrt(head_dim), "window_left": 19, "v_scale": 0.5, "sinks": sinks.flatten()}
    want = oracle.attention(q[:, 0], k, v, *indptrs, **options)
    oracle.assert_close(output[:, 0], want.o, oracle.torch_error(q[:, 0], k, v, *indptrs, **options))


def test_xqa_pages_by_keyword(device):
    """The third page's calls, with fewer and shorter requests; its sinks are keys without values."""
    batch_size, num_qo_heads, num_kv_heads, head_dim, page_size, max_num_pages, max_seq_len = 3, 32, 8, 128, 16, 64, 256
    q = torch.randn(batch_size, num_qo_heads, head_dim).half().to(device)
    k_cache = torch.randn(max_num_pages, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device)
    v_cache = k_cache.clone()
    max_pages_per_seq = max_seq_len // page_size + 1
    page_table = torch.randint(0, max_num_pages, (batch_size, max_pages_per_seq)).int().to(device)
    seq_lens = torch.randint(100, max_seq_len, (batch_size,)).int().to(device)
    lens = seq_lens.tolist()
    k = torch.cat([k_cache[row.long()].flatten(0, 1)[:n] for row, n in zip(page_table, lens, strict=True)])
    indptrs = [*range(batch_size + 1)], oracle.indptr_of(lens)

    def check(more: dict, options: dict) -> None:
        output = flashinfer.xqa(
            q, k_cache, v_cache, page_table, seq_lens, head_dim=head_dim, page_size=page_size,
            num_kv_heads=num_kv_heads, **more,
        )  # fmt: skip
        want = oracle.attention(q, k, k, *indptrs, **options).o
        oracle.assert_close(output, want, oracle.torch_error(q, k, k, *indptrs, **options))

    check({"pos_encoding_mode": "NONE"}, {})
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 1.0, "rope_theta": 10000.0}
    check(rope, rope)
    check({"sliding_window_size": 48}, {"window_left": 47})
    num_sink_tokens = 4
    sinks = torch.randn(num_sink_tokens, num_kv_heads, head_dim).half().to(device)
    keys, values = (beside_sink_tokens(sinks, k, lens, value) for value in (1.0, 0.0))
    with_sinks = [n + num_sink_tokens for n in lens]
    output = flashinfer.xqa(
        q, k_cache, v_cache, page_table, seq_lens, head_dim=head_dim, page_size=page_size, num_kv_heads=num_kv_heads,
        sinks=sinks,
    )  # fmt: skip
    all_keys = q, keys, values, indptrs[0], oracle.indptr_of(with_sinks)
    oracle.assert_close(output, oracle.attention(*all_keys).o, oracle.torch_error(*all_keys))
    mla_kv_cache = torch.cat([k_cache, v_cache], -1)
    output = flashinfer.xqa_mla(
        q, mla_kv_cache, page_table, seq_lens, head_dim=head_dim, page_size=page_size, num_kv_heads=num_kv_heads
    )
    oracle.assert_close(output, oracle.attention(q, k, k, *indptrs).o, oracle.torch_error(q, k, k, *indptrs))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
def test_prefill_page_by_position(device, dtype, kind, mode):
    """All arguments of plan() and run() in the page's order, with the values that it says are used for None."""
    p = Problem((3, 20), (9, 300), dtype=dtype, device=device, causal=True)
    p.window_left, p.soft_cap, p.sm_scale, p.pos_encoding_mode = 30, 20.0, 0.1, mode
    qo_indptr, kv_indptr = (ints(i, device) for i in (p.qo_indptr, p.kv_indptr))
    if kind == "paged":
        cache = p.paged(8)
        p.sm_scale, p.v_scale = 0.1 * 0.5, 2.0
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD")
        wrapper.plan(
            qo_indptr, cache.indptr, cache.indices, cache.last_page_len, p.num_qo_heads, p.num_kv_heads, p.head_dim, 8,
            None, None, True, mode, False, 0.1, 30, 20.0, 1.0, 1e4, dtype, dtype, False,
        )  # fmt: skip
        call = partial(wrapper.run, p.q, cache.kv, 0.5, 2.0)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD")
        wrapper.plan(
            qo_indptr, kv_indptr, p.num_qo_heads, p.num_kv_heads, p.head_dim, None, None, True, mode, False, 30, 20.0,
            0.1, 1.0, 1e4, dtype, dtype,
        )  # fmt: skip
        call = partial(wrapper.run, p.q, p.k, p.v)
    p.check(call())
    p.check(*call(True))
    assert torch.equal(call(False), call())
