"""FlashAttention-3's functions and their forks' keywords over Quire, against the oracle in float64."""

from __future__ import annotations

import doctest
import inspect
import math
import random as draw

import pytest
import torch
from torch import Tensor

import oracle
import quire
from calls import capture, no_synchronisation
from problems import ints, offsets
from quire.compat import flash_attn_interface as fa3
from quire.compat import flash_attn_interface_batch
from quire.compat.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

Q_LENS, KV_LENS = (3, 0, 17, 1), (20, 9, 33, 0)

#: The parameters of FlashAttention-3's functions (hopper/flash_attn_interface.py), in their order.
SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
    "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk "
    "softcap deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
    "softmax_scale causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
    "get_scheduler_metadata": "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype headdim_v cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size "
    "attention_chunk has_softcap num_splits pack_gqa sm_margin",
    "is_fa_version_supported": "fa_version device",
    "fa_version_unsupported_reason": "fa_version device",
}


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return made.to(device=device, dtype=dtype)


def seen(q_lens, kv_lens, causal: bool, window: tuple[int, int], chunk: int = 0) -> Tensor:
    """Which keys each query sees as FlashAttention's documentation and tests say, flat."""
    masks = []
    for n, m in zip(q_lens, kv_lens, strict=True):
        place, key = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
        left, right = window[0], 0 if causal else window[1]
        mask = ((left < 0) | (key >= place - left)) & ((right < 0) | (key <= place + right))
        if chunk:
            mask = mask & (key // chunk == torch.div(place, chunk, rounding_mode="floor"))
        masks.append(mask.flatten())
    return torch.cat(masks)


def check(out, lse, q, k, v, q_lens, kv_lens, causal=False, window=(-1, -1), chunk=0, soft_cap=None, **options):
    """out [total_q, heads, dim] and lse [heads, total_q] in natural logarithms, against the oracle."""
    indptrs = oracle.indptr_of(q_lens), oracle.indptr_of(kv_lens)
    how = {"mask": seen(q_lens, kv_lens, causal, window, chunk), "soft_cap": soft_cap, **options}
    ref = oracle.attention(q, k, v, *indptrs, **how)
    oracle.assert_close(out, ref.o, oracle.torch_error(q, k, v, *indptrs, **how), indptrs[0])
    if lse is not None:
        oracle.assert_lse_close(lse.t() / math.log(2), ref.lse, magnitude=64.0, soft_cap=soft_cap)


class Batch:
    """Ragged queries and keys, and the keys again in pages whose other places are NaN."""

    def __init__(
        self, device: str, dtype: torch.dtype, q_lens=Q_LENS, kv_lens=KV_LENS, heads: tuple[int, int] = (8, 2),
        dims: tuple[int, int] = (64, 64), page_size: int = 16, leftpad: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.q_lens, self.kv_lens, self.device = tuple(q_lens), tuple(kv_lens), device
        made = {"device": device, "dtype": dtype}
        self.q = random(sum(q_lens), heads[0], dims[0], **made)
        self.k, self.v = (random(sum(kv_lens), heads[1], dim, **made, seed=i) for i, dim in enumerate(dims, 1))
        pads = leftpad or (0,) * len(kv_lens)
        counts = [-(-(n + pad) // page_size) for n, pad in zip(kv_lens, pads, strict=True)]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).tolist()
        table = torch.zeros(len(kv_lens), max(counts) + 1, dtype=torch.int32)
        shape = sum(counts) + 2, page_size, heads[1]
        self.pages = [torch.full((*shape, dim), math.nan, **made) for dim in dims]
        for b, (begin, n) in enumerate(zip(oracle.indptr_of(kv_lens), kv_lens, strict=False)):
            for i in range(counts[b]):
                table[b, i] = order.pop()
            for i in range(n):
                page, place = table[b, (i + pads[b]) // page_size], (i + pads[b]) % page_size
                for cache, tokens in zip(self.pages, (self.k, self.v), strict=True):
                    cache[page, place] = tokens[begin + i]
        self.table, self.pads = table.to(device), ints(pads, device)
        self.cu_q, self.cu_k = offsets(q_lens, device), offsets(kv_lens, device)
        self.lens = ints(kv_lens, device)

    def paged(self, **options):
        """flash_attn_varlen_func() as vLLM calls it."""
        return flash_attn_varlen_func(
            q=self.q, k=self.pages[0], v=self.pages[1], max_seqlen_q=max(self.q_lens), cu_seqlens_q=self.cu_q,
            max_seqlen_k=max(self.kv_lens), seqused_k=self.lens, block_table=self.table, fa_version=3, **options,
        )  # fmt: skip

    def check(self, out, lse=None, **options) -> None:
        check(out, lse, self.q, self.k, self.v, self.q_lens, self.kv_lens, **options)


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


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (True, (6, 0))])
def test_chunks(device, dtype, causal, window):
    b = Batch(device, dtype, (3, 0, 40, 1), (20, 9, 33, 17))
    b.check(b.paged(causal=causal, window_size=window, attention_chunk=8), causal=causal, window=window, chunk=8)
    out, lse = flash_attn_varlen_func(
        b.q, b.k, b.v, b.cu_q, b.cu_k, 40, 33, causal=causal, window_size=window, attention_chunk=8,
        return_attn_probs=True,
    )  # fmt: skip
    b.check(out, lse, causal=causal, window=window, chunk=8)


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


@pytest.mark.parametrize("dims", [(16, 16), (59, 111), pytest.param((1, 8), marks=pytest.mark.slow)])
def test_odd_head_dims_are_padded(device, dtype, dims):
    q, k, v = (random(2, 9, h, d, device=device, dtype=dtype) for h, d in ((4, dims[0]), (2, dims[0]), (2, dims[1])))
    out = torch.full((2, 9, 4, dims[1]), math.nan, dtype=dtype, device=device)
    assert flash_attn_func(q, k, v, causal=True, out=out) is out
    check(out.flatten(0, 1), None, *(t.flatten(0, 1) for t in (q, k, v)), (9, 9), (9, 9), causal=True)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(flash_attn_func(*turned, causal=True), out)


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


def test_default_scale_of_latents():
    b = Batch("cpu", torch.float32, (2, 1), (5, 7), (4, 1), (64, 512))
    qv = random(3, 4, 512) / 8
    assert torch.equal(b.paged(q_v=qv), b.paged(q_v=qv, softmax_scale=576**-0.5))


# The others


def test_combine(device):
    parts, lses = random(3, 2, 5, 4, 64, device=device), random(3, 2, 5, 4, device=device)
    parts[1, 0, 2], lses[1, 0, 2] = math.nan, -math.inf  # no keys there
    lses[:, 1, 3] = -math.inf
    out, lse = flash_attn_combine(parts, lses, out_dtype=torch.bfloat16)
    weights = lses.double().softmax(0).nan_to_num(0)[..., None]
    want = (parts.double().nan_to_num(0) * weights).sum(0)
    assert out.dtype is torch.bfloat16 and torch.allclose(out.double(), want, atol=2e-2)
    assert torch.allclose(lse.double(), lses.double().logsumexp(0))
    given = torch.empty_like(out[0])
    assert flash_attn_combine(parts[:, 0], lses[:, 0], given)[0] is given and torch.equal(given, out[0])


def test_combined_parts_are_the_whole(device, dtype):
    b = Batch(device, dtype, (4, 3), (40, 40))
    q, k, v = b.q[None], b.k[None], b.v[None]
    parts = [flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 33), slice(33, 80))]
    out, _ = flash_attn_combine(*(torch.stack(t) for t in ([o.float() for o, _ in parts], [
        lse.transpose(1, 2) for _, lse in parts])), out_dtype=dtype)  # fmt: skip
    check(out[0], None, b.q, b.k, b.v, (7,), (80,))


def test_metadata_has_no_effect():
    b = Batch("cpu", torch.float32)
    metadata = fa3.get_scheduler_metadata(4, 17, 33, 8, 2, 64, b.lens, num_splits=0, causal=True)
    assert metadata.dtype is torch.int32 and metadata.dim() == 1
    assert torch.equal(b.paged(scheduler_metadata=metadata), b.paged())


def test_versions():
    assert fa3.FA2_AVAILABLE and fa3.FA3_AVAILABLE and int(fa3.__version__.split(".")[0]) == 3
    assert [fa3.is_fa_version_supported(version) for version in (2, 3, 4)] == [True, True, False]
    assert fa3.fa_version_unsupported_reason(3, "cpu") is None and "FA4" in fa3.fa_version_unsupported_reason(4)
    with pytest.raises(quire.ValidationError, match="fa_version"):
        fa3.is_fa_version_supported(5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_3(name):
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] == SIGNATURES[name].split()


def test_ranks():
    """A rank's own keys count alone where queries see all of them."""
    b = Batch("cpu", torch.float32, (1, 1, 1, 1))
    want = b.paged(causal=True)
    assert torch.equal(b.paged(causal=True, cp_world_size=2, cp_rank=1, cp_tot_seqused_k=b.lens), want)


def test_layers_of_one_batch_plan_twice(monkeypatch):
    """The second call is recorded, and the others repeat it."""
    plans, made = [], flash_attn_interface_batch.AttentionCall
    monkeypatch.setattr(flash_attn_interface_batch, "AttentionCall", lambda *a, **o: plans.append(a) or made(*a, **o))
    b = Batch("cpu", torch.float32)
    out, q = torch.empty_like(b.q), b.q
    for layer in range(5):
        b.q = q + layer
        b.paged(causal=True, window_size=[-1, -1], out=out, sinks=None)
        b.check(out, causal=True)
    assert len(plans) == 2


def test_compiled_without_a_break():
    b = Batch("cpu", torch.float32)

    def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 17, 33, causal=True)

    args = b.q, b.k, b.v, b.cu_q, b.cu_k
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*args), call(*args))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", ["plain", "new tokens", "used", "latents", "descales"])
def test_one_graph_for_batches_of_any_lengths(kind):
    """Captured after one call outside, without a synchronisation."""
    device, dtype = "cuda:0", torch.bfloat16
    dims, heads = ((64, 512), (16, 1)) if kind == "latents" else ((64, 64), (8, 2))
    b = Batch(device, dtype, (3, 1, 17, 1), (20, 9, 33, 5), heads, dims)
    lens, cu_q = b.lens.clone(), b.cu_q.clone()
    more = {}
    if kind == "latents":
        more = {"qv": random(22, 16, 512, device=device, dtype=dtype) / 8}
    if kind == "new tokens":
        more = {"cu_seqlens_k_new": cu_q, "k": b.k[:22].clone(), "v": b.v[:22].clone()}
    if kind == "descales":
        more = {"k_descale": torch.full((1,), 0.5, device=device).expand(4, 2)}

    def call() -> Tensor:
        if kind == "used":
            return flash_attn_varlen_func(
                b.q, *b.pages, cu_q, page_table=b.table, seqused_k=lens, seqused_q=cu_q.diff() - 1, causal=True
            )
        return flash_attn_with_kvcache(
            b.q, *b.pages, page_table=b.table, cache_seqlens=lens, cu_seqlens_q=cu_q, max_seqlen_q=17, causal=True,
            **more,
        )  # fmt: skip

    first = lens.clone() - (cu_q.diff() if kind == "new tokens" else 0)
    lens.copy_(first)
    call()
    with no_synchronisation():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for now in (first, first - torch.tensor([1, 0, 4, 2], device=device).int()):
        lens.copy_(now)
        graph.replay()
        captured = out.clone()
        assert torch.equal(captured, call()) and not captured.isnan().any()
    with capture(), pytest.raises(quire.PlanError, match="captured"):
        flash_attn_varlen_func(b.q, *b.pages, cu_q, page_table=b.table, seqused_k=lens, window_size=(3, 3))


# Wrong arguments

Q, K, R = random(2, 3, 8, 64), random(2, 9, 2, 64), random(6, 8, 64)
CU, CU_K = torch.tensor([0, 3, 6]).int(), torch.tensor([0, 9, 18]).int()
LEN, TABLE = torch.tensor([9, 9]).int(), torch.tensor([[0], [1]]).int()
KEYS = K.flatten(0, 1)
VALID, REFUSED = quire.ValidationError, quire.UnsupportedError


def dense(*args, **options):
    return lambda: flash_attn_func(Q, K, K, *args, **options)


def varlen(**options):
    return lambda: flash_attn_varlen_func(**{"q": R, "k": KEYS, "v": KEYS, "cu_seqlens_q": CU, **options})


def cached(*args, **options):
    return lambda: flash_attn_with_kvcache(Q, K, K, *args, **options)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (dense(dropout_p=0.1), REFUSED, "dropout_p"),
        (dense(causal=1), VALID, "causal"),
        (dense(window_size=3), VALID, "window_size"),
        (dense(attention_chunk=-1), VALID, "attention_chunk"),
        (dense(num_splits=-1), VALID, "num_splits"),
        (dense(pack_gqa=1), VALID, "pack_gqa"),
        (dense(sm_margin=True), VALID, "sm_margin"),
        (dense(deterministic=0), VALID, "deterministic"),
        (dense(return_attn_probs=1), VALID, "return_lse"),
        (dense(ver=5), VALID, "ver"),
        (dense(sinks=torch.ones(8), s_aux=torch.ones(8)), VALID, "sinks, s_aux"),
        (dense(sinks=torch.ones(7)), VALID, "sinks"),
        (dense(qv=torch.ones(2, 3, 8, 64)), REFUSED, "qv"),
        (dense(k_descale=torch.ones(2, 3)), VALID, "k_descale"),
        (dense(v_descale=torch.ones(2, 2).half()), VALID, "v_descale"),
        (dense(out=torch.ones(2, 3, 8, 32)), VALID, "out"),
        (dense(out=torch.ones(2, 3, 8, 64).half()), VALID, "out"),
        (dense(score_mod=len), REFUSED, "score_mod"),
        (dense(block_table=TABLE), TypeError, "block_table"),
        (dense(nonsense=1), TypeError, "nonsense"),
        (lambda: flash_attn_qkvpacked_func(K, num_heads_q=2), VALID, "num_heads_q"),
        (lambda: flash_attn_qkvpacked_func(Q, num_heads_q=None), VALID, "num_heads_q"),
        (lambda: flash_attn_varlen_func(R, KEYS, KEYS, 3, CU, 9), VALID, "by name"),
        (varlen(cu_seqlens_k=CU_K, max_seqlen_q=2), VALID, "max_seqlen_q"),
        (varlen(cu_seqlens_k=CU_K[:2]), VALID, "cu_seqlens_k"),
        (varlen(cu_seqlens_k=CU_K, seqused_k=LEN[:1]), VALID, "seqused_k"),
        (varlen(k=K, v=K, block_table=TABLE), VALID, "seqused_k"),
        (varlen(k=K, v=K, block_table=TABLE, page_table=TABLE, seqused_k=LEN), VALID, "block_table and page_table"),
        (varlen(k=K, v=K, page_table=TABLE + 1, seqused_k=LEN), VALID, "page_table: expected page numbers below 2"),
        (varlen(k=K, v=K, block_table=TABLE - 1, seqused_k=LEN), VALID, "block_table: expected page numbers"),
        (varlen(cu_seqlens_k=CU_K, causal=True, cp_world_size=2), REFUSED, "cp_world_size"),
        (varlen(cu_seqlens_k=CU_K, cp_world_size=2, cp_rank=2), VALID, "cp_rank"),
        (varlen(cu_seqlens_k=CU_K, gather_kv_indices=LEN), REFUSED, "gather_kv_indices"),
        (varlen(cu_seqlens_k=CU_K, only_qv=True), REFUSED, "only_qv"),
        (varlen(cu_seqlens_k=CU_K, scheduler_metadata=3), VALID, "scheduler_metadata"),
        (cached(cache_seqlens=10), VALID, "cache_seqlens"),
        (cached(K[:, :1], K[:, :1], cache_seqlens=LEN), VALID, "cache_seqlens"),
        (cached(K[:, :1]), VALID, "k, v"),
        (cached(rotary_cos=K, rotary_sin=K), VALID, "rotary_cos"),
        (cached(cache_batch_idx=LEN), VALID, "cache_batch_idx"),
        (cached(cache_leftpad=LEN + 1), VALID, "cache_leftpad"),
        (cached(page_table=TABLE[:1]), VALID, "page_table"),
        (cached(page_table=TABLE + 1, cache_seqlens=LEN), VALID, "page_table: expected page numbers"),
        (cached(K[0], K[0], cu_seqlens_k_new=CU[:2], cache_seqlens=0), VALID, "cu_seqlens_k_new"),
        (lambda: flash_attn_with_kvcache(R, K, K, cu_seqlens_q=CU, max_seqlen_q=1), VALID, "max_seqlen_q"),
        (lambda: flash_attn_combine(R, R[..., 0].double()), VALID, "out_partial"),
        (lambda: flash_attn_combine(Q, Q[..., 0].double()), VALID, "lse_partial"),
    ],
)
def test_wrong_arguments_are_named(call, error, name):
    with pytest.raises(error, match=name):
        call()


def test_examples_in_docstrings():
    done = doctest.testmod(fa3, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert done.attempted > 10 and not done.failed
