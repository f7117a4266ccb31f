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

#: The batch of the pages: rows of queries, pages of 16 tokens, and tokens in each request's last page.
NUM_LAYERS, HEAD_DIM, PAGE_SIZE, MAX_NUM_PAGES = 2, 128, 16, 128
QO_INDPTR = [0, 33, 44, 55, 66, 77, 88, 100]
PAGED_KV_INDPTR, PAGED_KV_LAST_PAGE_LEN = [0, 17, 29, 44, 48, 66, 100, 128], [1, 7, 14, 4, 3, 1, 16]


def paged_tables(device):
    """indptr, indices and last_page_len of the pages' cache."""
    return ints(PAGED_KV_INDPTR, device), ints(range(MAX_NUM_PAGES), device), ints(PAGED_KV_LAST_PAGE_LEN, device)


def random_half(device, *shape):
    return torch.randn(*shape, dtype=torch.float16, device=device)


def custom_mask(qo_len, kv_len, device):
    """The causal mask of each request, flat, as the pages write it."""
    masks = [
        torch.tril(torch.full((rows, keys), True, device=device), diagonal=keys - rows)
        for rows, keys in zip(qo_len, kv_len, strict=True)
    ]
    return torch.cat([mask.flatten() for mask in masks])


def check_prefill_page(wrapper, tables, sizes, layers, kv_len, device):
    """The page plans with causal=True, then with a mask that says the same, and runs all layers with each plan."""
    wrapper.plan(*tables, *sizes, causal=True)
    outputs = [wrapper.run(*tensors) for tensors in layers]
    assert outputs[0].shape == torch.Size([100, 64, 128])
    mask = custom_mask(oracle.lengths(QO_INDPTR), kv_len, device)
    wrapper.plan(*tables, *sizes, custom_mask=mask)
    for tensors, causal in zip(layers, outputs, strict=True):
        o_custom = wrapper.run(*tensors)
        assert torch.allclose(o_custom, causal, rtol=1e-3, atol=1e-3)
        assert o_custom.shape == torch.Size([100, 64, 128])


def test_paged_prefill_page(device):
    num_qo_heads, num_kv_heads = 64, 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    q_at_layer = random_half(device, NUM_LAYERS, QO_INDPTR[-1], num_qo_heads, HEAD_DIM)
    kv_cache_at_layer = random_half(device, NUM_LAYERS, MAX_NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, HEAD_DIM)
    pages = zip(oracle.lengths(PAGED_KV_INDPTR), PAGED_KV_LAST_PAGE_LEN, strict=True)
    check_prefill_page(
        prefill_wrapper, (ints(QO_INDPTR, device), *paged_tables(device)),
        (num_qo_heads, num_kv_heads, HEAD_DIM, PAGE_SIZE), list(zip(q_at_layer, kv_cache_at_layer, strict=True)),
        [PAGE_SIZE * (count - 1) + last for count, last in pages], device,
    )  # fmt: skip


@pytest.mark.slow
def test_ragged_prefill_page(device):
    num_qo_heads, num_kv_heads = 64, 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    q_at_layer = random_half(device, NUM_LAYERS, QO_INDPTR[-1], num_qo_heads, HEAD_DIM)
    k_at_layer, v_at_layer = random_half(device, 2, NUM_LAYERS, QO_INDPTR[-1], num_kv_heads, HEAD_DIM)
    indptr = ints(QO_INDPTR, device)
    check_prefill_page(
        prefill_wrapper, (indptr, indptr.clone()), (num_qo_heads, num_kv_heads, HEAD_DIM),
        list(zip(q_at_layer, k_at_layer, v_at_layer, strict=True)), oracle.lengths(QO_INDPTR), device,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_shared_prefix_page(device, kind):
    num_qo_heads, num_kv_heads, shared_prefix_len = 64, 8 if kind == "decode" else 16, 8192
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=device)
    kv_data = random_half(device, MAX_NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, HEAD_DIM)
    k_shared, v_shared = random_half(device, 2, shared_prefix_len, num_kv_heads, HEAD_DIM)
    heads = num_qo_heads, num_kv_heads, HEAD_DIM
    # create auxiliary data structures for batch attention
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
        wrapper.begin_forward(*paged_tables(device), *heads, PAGE_SIZE, data_type=torch.float16)
        o = wrapper.forward(random_half(device, 7, num_qo_heads, HEAD_DIM), k_shared, v_shared, kv_data)
    else:
        wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
        wrapper.begin_forward(ints(QO_INDPTR, device), *paged_tables(device), *heads)
        q = random_half(device, QO_INDPTR[-1], num_qo_heads, HEAD_DIM)
        o = wrapper.forward(q, k_shared, v_shared, kv_data, causal=True)
    # clear auxiliary data structures
    wrapper.end_forward()
    assert o.shape == torch.Size([7 if kind == "decode" else 100, 64, 128])


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


@pytest.mark.slow
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


@pytest.mark.one_type
@pytest.mark.first(1)
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
