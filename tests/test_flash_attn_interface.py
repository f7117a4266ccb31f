"""FlashAttention-3's functions over Quire, against the oracle in float64: prefill, caches, scales and latents."""

from __future__ import annotations

import math
import random as draw

import pytest
import torch
from torch import Tensor

import oracle
from interface_batches import KV_LENS, Q_LENS, Batch, check, random
from problems import ints, offsets
from quire.compat.flash_attn_interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from quire.compat.flash_attn_interface_batch import _together
from quire.compat.flash_attn_tokens import Keys, Queries

# Prefill


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_as_vllm_calls_them(device, dtype, page_size):
    b = Batch(device, dtype, page_size=page_size)
    out = torch.full_like(b.q, math.nan)
    sinks = random(8, device=device, seed=9)
    got, lse = b.paged(
        out=out, causal=True, softmax_scale=0.2, window_size=[-1, -1], softcap=0, alibi_slopes=None, s_aux=sinks,
        return_softmax_lse=True, num_splits=0, scheduler_metadata=None,
    )  # fmt: skip
    assert got.data_ptr() == out.data_ptr() and lse.shape == (8, sum(Q_LENS)) and lse.is_contiguous()
    b.check(out, lse, causal=True, sm_scale=0.2, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(device, dtype, seed):
    """Ragged, with all that FlashAttention-3's own signature has."""
    rng = draw.Random(seed)
    q_lens = [rng.choice((0, 1, 5, 31)) for _ in range(4)]
    kv_lens = [rng.choice((0, 7, 33, 64)) for _ in range(4)]
    heads = rng.choice(((4, 4), (6, 2), (5, 1)))
    b = Batch(device, dtype, q_lens, kv_lens, heads)
    causal, window = rng.choice((True, False)), rng.choice(((-1, -1), (5, 0), (4, 3)))
    out, lse = flash_attn_varlen_func(
        b.q, b.k, b.v, b.cu_q, b.cu_k, max(q_lens), max(kv_lens), None, None, 0.3, causal, window_size=window,
        softcap=4.0, return_attn_probs=True, deterministic=True, sm_margin=2, pack_gqa=True, num_splits=1,
    )  # fmt: skip
    b.check(out, lse, causal=causal, window=window, sm_scale=0.3, soft_cap=4.0)
    paged = b.paged(causal=causal, window_size=window)
    b.check(paged, causal=causal, window=window)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_used_lengths(device, dtype, paged, which):
    """Unused keys and queries are NaN; rows of unused queries give zeros."""
    b = Batch(device, dtype, (4, 2, 20, 3), (20, 9, 33, 5))
    used_q = (3, 0, 17, 3) if which != "k" else b.q_lens
    used_k = (20, 4, 11, 0) if which != "q" else b.kv_lens
    rows, keys = (
        torch.cat([torch.arange(at, at + n) for at, n in zip(oracle.indptr_of(lens), used, strict=False)])
        for lens, used in ((b.q_lens, used_q), (b.kv_lens, used_k))
    )
    q, k, v = (torch.full_like(t, math.nan) for t in (b.q, b.k, b.v))
    q[rows], k[keys], v[keys] = b.q[rows], b.k[keys], b.v[keys]
    lens = {"seqused_q": ints(used_q, device)} if which != "k" else {}
    lens |= {"seqused_k": ints(used_k, device)} if which != "q" or paged else {}
    if paged:
        call = {"k": b.pages[0], "v": b.pages[1], "page_table": b.table}
    else:
        call = {"k": k, "v": v, "cu_seqlens_k": b.cu_k}
    out, lse = flash_attn_varlen_func(
        q, cu_seqlens_q=b.cu_q, max_seqlen_q=20, max_seqlen_k=33, causal=True, return_softmax_lse=True, **call, **lens
    )
    check(out[rows], lse[:, rows], q[rows], k[keys], v[keys], used_q, used_k, causal=True)
    unused = torch.ones(out.shape[0], dtype=torch.bool)
    unused[rows] = False
    assert not out[unused].any() and (lse[:, unused] == -math.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (True, (6, 0))])
def test_chunks(device, dtype, causal, window):
    b = Batch(device, dtype, (3, 0, 40, 1), (20, 9, 33, 17))
    b.check(b.paged(causal=causal, window_size=window, attention_chunk=8), causal=causal, window=window, chunk=8)
    out, lse = flash_attn_varlen_func(
        b.q, b.k, b.v, b.cu_q, b.cu_k, 40, 33, causal=causal, window_size=window, attention_chunk=8,
        return_attn_probs=True,
    )  # fmt: skip
    b.check(out, lse, causal=causal, window=window, chunk=8)


@pytest.mark.one_type
@pytest.mark.parametrize("layout", ["contiguous", "heads first"])
@pytest.mark.parametrize(("n", "m"), [(5, 33), (33, 7), (3, 0)])
def test_equal_lengths(device, dtype, layout, n, m):
    q = random(2, n, 8, 64, device=device, dtype=dtype)
    k, v = (random(2, m, 2, dim, device=device, dtype=dtype) for dim in (64, 32))
    if layout == "heads first":
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    sinks, out = random(8, device=device, dtype=dtype, seed=3), q.new_full((2, n, 8, 32), math.nan)
    got, lse = flash_attn_func(q, k, v, None, True, learnable_sink=sinks, return_softmax_lse=True, out=out)
    assert got is out and lse.shape == (2, 8, n)
    rows = (t.flatten(0, 1) for t in (q, k, v))
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), *rows, (n, n), (m, m), causal=True, sinks=sinks)


@pytest.mark.slow
@pytest.mark.one_type
@pytest.mark.parametrize(
    "dims",
    [(16, 16), (59, 111), *(pytest.param(dims, marks=pytest.mark.slow) for dims in ((1, 8), (64, 512)))],
    ids=str,
)
def test_odd_head_dims_are_padded(device, dtype, dims):
    q, k, v = (random(2, 9, h, d, device=device, dtype=dtype) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    out = torch.full((2, 9, 4, dims[1]), math.nan, dtype=dtype, device=device)
    assert flash_attn_func(q, k, v, causal=True, out=out) is out
    check(out.flatten(0, 1), None, *(t.flatten(0, 1) for t in (q, k, v)), (9, 9), (9, 9), causal=True)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(flash_attn_func(*turned, causal=True), out)


def test_8_bit_keys_of_odd_head_dims_are_padded_as_queries_are(device):
    q, k, v = (random(2, 9, heads, 40, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    out = flash_attn_func(q, k, v, causal=True)
    check(out.flatten(0, 1), None, q.flatten(0, 1), *(t.bfloat16().flatten(0, 1) for t in (k, v)), (9, 9), (9, 9),
          causal=True)  # fmt: skip


def test_packed(device, dtype):
    qkv = random(2, 9, 3, 4, 64, device=device, dtype=dtype)
    want = flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, None, True), want)
    grouped = torch.cat([qkv[:, :, 0], qkv[:, :, 1, :2], qkv[:, :, 2, :2]], 2)
    out, lse = flash_attn_qkvpacked_func(grouped, causal=True, num_heads_q=4, return_attn_probs=True)
    k, v = grouped[:, :, 4:6].flatten(0, 1), grouped[:, :, 6:].flatten(0, 1)
    rows = qkv[:, :, 0].flatten(0, 1)
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), rows, k, v, (9, 9), (9, 9), causal=True)


def test_keys_of_equal_length_beside_offsets_of_queries(device, dtype):
    """k [batch, seqlen_k, ...] without cu_seqlens_k, as FlashAttention-3 takes it."""
    k, v = (random(4, 33, 2, 64, device=device, dtype=dtype, seed=i) for i in (1, 2))
    q, lens = random(21, 8, 64, device=device, dtype=dtype), (33, 4, 20, 0)
    used = ints(lens, device)
    out = flash_attn_varlen_func(q, k, v, offsets(Q_LENS, device), max_seqlen_q=17, seqused_k=used, causal=True)
    rows = (torch.cat([t[i, :n] for i, n in enumerate(lens)]) for t in (k, v))
    check(out, None, q, *rows, Q_LENS, lens, causal=True)
    every = flash_attn_varlen_func(q, k, v, offsets(Q_LENS, device), max_seqlen_q=17)
    check(every, None, q, k.flatten(0, 1), v.flatten(0, 1), Q_LENS, (33,) * 4)


def test_alibi(device, dtype):
    b, slopes = Batch(device, dtype), oracle.alibi_slopes(8).float().to(device)
    out = b.paged(causal=True, alibi_slopes=slopes)
    how = {"causal": True, "pos_encoding_mode": "ALIBI"}
    args = b.q, b.k, b.v, oracle.indptr_of(Q_LENS), oracle.indptr_of(KV_LENS)
    oracle.assert_close(out, oracle.attention(*args, **how).o, oracle.torch_error(*args, **how), args[3])


# Caches


@pytest.mark.one_type
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("lens_on_host", [False, True])
def test_cache_as_sglang_calls_it(device, dtype, page_size, lens_on_host):
    b = Batch(device, dtype, page_size=page_size)
    where = "cpu" if lens_on_host else device
    out, lse, *rest = flash_attn_with_kvcache(
        q=b.q, k_cache=b.pages[0], v_cache=b.pages[1], page_table=b.table, cache_seqlens=ints(KV_LENS, where),
        cu_seqlens_q=b.cu_q.to(where), cu_seqlens_k_new=b.cu_k, max_seqlen_q=17, softmax_scale=0.2, causal=True,
        window_size=(-1, -1), softcap=3.0, k_descale=None, v_descale=None, return_softmax_lse=True, num_splits=0,
        sinks=None, ver=3,
    )  # fmt: skip
    assert not rest
    b.check(out, lse, causal=True, sm_scale=0.2, soft_cap=3.0)


NEW = (2, 0, 5, 1)


def with_new(device: str, dtype: torch.dtype, **options) -> tuple[Batch, Tensor, Tensor, tuple[int, ...]]:
    """A batch whose pages lack the last NEW tokens of each request; these tokens; and the lengths without them."""
    b = Batch(device, dtype, (3, 0, 17, 1), (20, 9, 33, 6), **options)
    old = tuple(n - new for n, new in zip(b.kv_lens, NEW, strict=True))
    ends = oracle.indptr_of(b.kv_lens)[1:]
    rows = torch.cat([torch.arange(end - new, end) for end, new in zip(ends, NEW, strict=True)])
    size = b.pages[0].shape[1]
    for i, (n, new) in enumerate(zip(b.kv_lens, NEW, strict=True)):
        for at in range(n - new + int(b.pads[i]), n + int(b.pads[i])):
            for cache in b.pages:
                cache[b.table[i, at // size], at % size] = math.nan
    return b, b.k[rows], b.v[rows], old


@pytest.mark.parametrize("lens_on_host", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_new_tokens_of_different_lengths(device, dtype, lens_on_host, padded):
    """Beside a table, with padding on the left of requests, and rows of the table by their numbers."""
    pads = (2, 0, 5, 1) if padded else None
    b, k, v, old = with_new(device, dtype, leftpad=pads)
    where = "cpu" if lens_on_host else device
    order = ints((3, 1, 0, 2), device)
    table = torch.empty_like(b.table)
    table[order.long()] = b.table
    lens = ints(old, where) + b.pads.to(where)
    out, lse = flash_attn_with_kvcache(
        b.q, *b.pages, k, v, cache_seqlens=lens, page_table=table, cache_batch_idx=order.to(where),
        cache_leftpad=b.pads.to(where) if padded else None, cu_seqlens_q=b.cu_q,
        cu_seqlens_k_new=offsets(NEW, device), causal=True, return_softmax_lse=True,
    )  # fmt: skip
    b.check(out, lse, causal=True)
    again = flash_attn_with_kvcache(
        b.q, *b.pages, cache_seqlens=lens + ints(NEW, where), block_table=b.table, cu_seqlens_q=b.cu_q,
        cache_leftpad=b.pads if padded else None, causal=True,
    )  # fmt: skip
    b.check(again, causal=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_rotation(device, dtype, interleaved, causal, begins):
    """Of queries and new keys of different lengths; rotary_seqlens says where they begin."""
    b, k, v, old = with_new(device, dtype)
    angles = oracle.rope_angles(torch.arange(64), 32).float()
    tables = [t.to(device=device, dtype=dtype) for t in (angles.cos(), angles.sin())]
    start = (7, 3, 0, 30) if begins else old
    out = flash_attn_with_kvcache(
        b.q, *b.pages, k, v, None, *tables, ints(old, device), page_table=b.table, cu_seqlens_q=b.cu_q,
        cu_seqlens_k_new=offsets(NEW, device), rotary_seqlens=ints(start, device) if begins else None, causal=causal,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    cos, sin = (t.cpu().double() for t in tables)

    def turned(x: Tensor, lens: tuple[int, ...], moves: bool = True) -> Tensor:
        at = torch.cat([torch.arange(n) * moves + first for n, first in zip(lens, start, strict=True)])
        return oracle.rotate(x, cos[at], sin[at], interleaved).to(dtype).to(device)

    keys, ends = b.k.clone(), oracle.indptr_of(b.kv_lens)[1:]
    keys[torch.cat([torch.arange(end - n, end) for end, n in zip(ends, NEW, strict=True)])] = turned(k, NEW)
    check(out, None, turned(b.q, b.q_lens, causal), keys, b.v, b.q_lens, b.kv_lens, causal=causal)


def test_rotation_of_8_bits(device):
    """Queries are rotated to bfloat16, and new keys back to 8 bits."""
    narrow, angles = torch.float8_e4m3fn, oracle.rope_angles(torch.arange(64), 64).float().to(device)
    q, k, v = (random(2, 1, h, 64, device=device, dtype=torch.bfloat16).to(narrow) for h in (4, 2, 2))
    pages = [torch.zeros(2, 16, 2, 64, device=device).to(narrow) for _ in range(2)]
    call = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False, "causal": True}
    out = flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=ints((3, 9), device), **call)
    wide = [t.to(torch.bfloat16) for t in (q, k, v)]
    caches = [torch.zeros(2, 16, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(2)]
    want = flash_attn_with_kvcache(wide[0], *caches, *wide[1:], cache_seqlens=ints((3, 9), device), **call)
    assert torch.equal(pages[0].bfloat16(), caches[0].to(narrow).bfloat16()) and out.dtype is torch.bfloat16
    assert torch.allclose(out, want, atol=0.1)


def test_rotary_seqlens_alone_have_no_effect():
    b = Batch("cpu", torch.float32)
    call = {"page_table": b.table, "cache_seqlens": b.lens, "cu_seqlens_q": b.cu_q}
    same = flash_attn_with_kvcache(b.q, *b.pages, rotary_seqlens=b.lens, **call)
    assert torch.equal(same, flash_attn_with_kvcache(b.q, *b.pages, **call))


@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_a_cache(device, dtype, n):
    """Queries and new tokens of equal length; lengths as a number, or all of the cache."""
    caches = [torch.full((3, 24, 2, 64), math.nan, dtype=dtype, device=device) for _ in range(2)]
    old = [random(2, 11, 2, 64, device=device, dtype=dtype, seed=i) for i in (1, 2)]
    new = [random(2, n, 2, 64, device=device, dtype=dtype, seed=i) for i in (3, 4)]
    at = ints((2, 0), device)
    for cache, tokens in zip(caches, old, strict=True):
        cache[at.long(), :11] = tokens
    q = random(2, n, 8, 64, device=device, dtype=dtype)
    out, lse = flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=11, cache_batch_idx=at, causal=True, return_softmax_lse=True
    )
    rows = (torch.cat([a, b], 1).flatten(0, 1) for a, b in zip(old, new, strict=True))
    lens = (n, n), (11 + n,) * 2
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), q.flatten(0, 1), *rows, *lens, causal=True)
    every = flash_attn_with_kvcache(q, *(t.contiguous() for t in old), window_size=None)
    check(every.flatten(0, 1), None, q.flatten(0, 1), *(t.flatten(0, 1) for t in old), (n, n), (11, 11))


def test_requests_of_negative_length_have_no_keys_and_get_none():
    q, new, caches = random(4, 2, 64), random(4, 2, 64), [torch.zeros(2, 8, 2, 64) for _ in range(2)]
    cu = offsets((3, 1))
    lens = {"cache_seqlens": ints((-2, 1), "cpu"), "cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3}
    out = flash_attn_with_kvcache(q, *caches, new, new, causal=True, **lens)
    assert not out[:3].any() and not caches[0][0].any() and torch.equal(caches[0][1, 1], new[3])


def test_more_new_rows_than_offsets_say(device, dtype):
    """The rows behind the last offset, as in the batch of a CUDA graph, are neither written nor attended to."""
    b, k, v, old = with_new(device, dtype)
    more = [torch.cat([t, torch.full_like(t[:2], math.nan)]) for t in (b.q, k, v)]
    lens = {"cache_seqlens": ints(old, device), "cu_seqlens_q": b.cu_q, "cu_seqlens_k_new": offsets(NEW, device)}
    out = flash_attn_with_kvcache(more[0], *b.pages, *more[1:], page_table=b.table, causal=True, **lens)
    assert not out[-2:].any()
    b.check(out[:-2], causal=True)


# Scales, latents


@pytest.mark.parametrize("kind", ["expanded", "each", "ragged", "used", "used pages"])
def test_descales(device, kind):
    narrow = torch.float8_e4m3fn
    b = Batch(device, torch.bfloat16)
    b.q, b.k, b.v = (t.to(narrow) for t in (b.q, b.k, b.v))
    pages = [t.nan_to_num(0.0).to(narrow) for t in b.pages]
    scales = [random(4, 2, device=device, seed=i).exp() for i in range(3)]
    if kind == "expanded":
        scales = [t[:1, :1].reshape(1).expand(4, 2) for t in scales]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options = {"cu_seqlens_q": b.cu_q, "max_seqlen_q": 17, "causal": True, **named}
    used = {"seqused_q": b.cu_q.diff(), "seqused_k": b.lens} if kind.startswith("used") else {}
    if kind in ("ragged", "used"):
        out = flash_attn_varlen_func(b.q, b.k, b.v, cu_seqlens_k=b.cu_k, max_seqlen_k=33, **options, **used)
    elif kind == "used pages":
        out = flash_attn_varlen_func(b.q, *pages, page_table=b.table, **options, **used)
    else:
        out = flash_attn_with_kvcache(b.q, *pages, page_table=b.table, cache_seqlens=b.lens, **options)
    assert out.dtype is torch.bfloat16

    def scaled(tensor: Tensor, scale: Tensor, lens: tuple[int, ...]) -> Tensor:
        each = scale.cpu().double().repeat_interleave(torch.tensor(lens), 0)
        return tensor.cpu().double() * each.repeat_interleave(tensor.shape[1] // 2, 1)[..., None]

    q, k, v = (
        scaled(t, s, lens) for t, s, lens in zip((b.q, b.k, b.v), scales, (Q_LENS, KV_LENS, KV_LENS), strict=True)
    )
    indptrs = oracle.indptr_of(Q_LENS), oracle.indptr_of(KV_LENS)
    ref = oracle.attention(q, k, v, *indptrs, causal=True)
    own = oracle.attention(*(t.bfloat16() for t in (q, k, v)), *indptrs, causal=True, dtype=torch.bfloat16)
    oracle.assert_close(out, ref.o, own.o.double(), indptrs[0])


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_rows_keep_their_requests_on_another_device(num_parts):
    """Offsets that follow the others to a device are divided into as many parts as before."""
    queries = Queries(torch.empty(9, 8, 64, device="meta"), None, 2, 0, torch.zeros(2 * num_parts + 1), num_parts)
    keys = Keys(queries.q, queries.q, torch.zeros(3, device="meta"), None, None)
    moved, _ = _together(queries, keys)
    assert moved.offsets.device.type == "meta"
    assert (moved.num_parts, moved.batch) == (num_parts, 2)


def test_descales_of_16_bits(device, dtype):
    b = Batch(device, dtype)
    k_scale, v_scale = (torch.full((1,), x, device=device).expand(4, 2) for x in (0.5, 2.0))  # exact in any type
    out = b.paged(q_descale=None, k_descale=k_scale, v_descale=v_scale, causal=True)
    check(out, None, b.q, b.k / 2, b.v * 2, Q_LENS, KV_LENS, causal=True)


@pytest.mark.parametrize("call", ["cache", "varlen", "ragged", "dense"])
@pytest.mark.parametrize("causal", [False, True])
def test_latents(device, dtype, call, causal):
    """q of 64 dims beside qv of 512."""
    q_lens, kv_lens = ((4, 4), (21, 21)) if call == "dense" else (Q_LENS, KV_LENS)
    b = Batch(device, dtype, q_lens, kv_lens, (16, 1), (64, 512), page_size=64)
    qv = random(sum(q_lens), 16, 512, device=device, dtype=dtype) / 8
    options = {"softmax_scale": 0.1, "causal": causal, "return_softmax_lse": True}
    if call == "cache":
        out, lse = flash_attn_with_kvcache(
            b.q, *b.pages, qv=qv, page_table=b.table, cache_seqlens=b.lens, cu_seqlens_q=b.cu_q, max_seqlen_q=17,
            **options,
        )  # fmt: skip
    elif call == "varlen":
        out, lse = b.paged(q_v=qv, **options)
    elif call == "ragged":
        out, lse = flash_attn_varlen_func(b.q, b.k, b.v, b.cu_q, b.cu_k, 17, 33, qv=qv, **options)
    else:
        q, k, v, x = (t.unflatten(0, (2, -1)) for t in (b.q, b.k, b.v, qv))
        out, lse = flash_attn_func(q, k, v, qv=x, **options)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    args = qv, b.q, b.v[:, 0], b.k[:, 0], oracle.indptr_of(q_lens), oracle.indptr_of(kv_lens)
    how = {"causal": causal, "sm_scale": 0.1}
    ref, own = (oracle.latent_attention(*args, **how, dtype=kind) for kind in (torch.float64, dtype))
    oracle.assert_close(out, ref.o, own.o.double(), args[4])
    oracle.assert_lse_close(lse.t() / math.log(2), ref.lse, magnitude=64.0)


@pytest.mark.parametrize(("dims", "heads_k"), [((64, 256), 1), ((64, 512), 2), ((32, 128), 2)])
def test_latents_of_other_sizes(device, dtype, dims, heads_k):
    """They are padded; several heads of keys are computed one after the other."""
    b, sinks = Batch(device, dtype, Q_LENS, KV_LENS, (8, heads_k), dims), random(8, device=device, dtype=torch.float32)
    qv = random(sum(Q_LENS), 8, dims[1], device=device, dtype=dtype) / 8
    given = torch.empty(sum(Q_LENS), 8, dims[1], dtype=dtype, device=device)
    out, lse = b.paged(q_v=qv, causal=True, sinks=sinks, return_softmax_lse=True, out=given)
    assert out is given
    q, k = torch.cat([b.q, qv], -1), torch.cat([b.k, b.v], -1)
    how = {"causal": True, "sm_scale": sum(dims) ** -0.5, "sinks": sinks}
    args = q, k, b.v, oracle.indptr_of(Q_LENS), oracle.indptr_of(KV_LENS)
    ref = oracle.attention(*args, **how)
    oracle.assert_close(out, ref.o, oracle.torch_error(*args, **how), args[3])
    oracle.assert_lse_close(lse.t() / math.log(2), ref.lse, magnitude=64.0)


def test_default_scale_of_latents():
    b = Batch("cpu", torch.float32, (2, 1), (5, 7), (4, 1), (64, 512))
    qv = random(3, 4, 512) / 8
    assert torch.equal(b.paged(q_v=qv), b.paged(q_v=qv, softmax_scale=576**-0.5))
