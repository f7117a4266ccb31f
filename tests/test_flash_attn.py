"""FlashAttention's functions over Quire, against the oracle in float64."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from torch import Tensor

import interface_batches
import oracle
import quire
from calls import capture
from interface_batches import random
from problems import ints, offsets
from quire.compat import flash_attn, flash_attn_batch, flash_attn_interface
from quire.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Q_LENS, KV_LENS = (3, 0, 17, 1), (20, 9, 17, 0)
WINDOWS = [(-1, -1), (5, 0), (4, 2), (-1, 3), (1000, 1000)]


def ragged(dtype: torch.dtype, device: str, num_heads: int = 8, num_heads_k: int = 2, dim: int = 64) -> list[Tensor]:
    shapes = (sum(Q_LENS), num_heads), (sum(KV_LENS), num_heads_k), (sum(KV_LENS), num_heads_k)
    return [random(*shape, dim, device=device, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def check(out, lse, q, k, v, q_lens=Q_LENS, kv_lens=KV_LENS, **options):
    """out [total_q, heads, dim] and lse [total_q, heads] in natural logarithms, against the oracle."""
    interface_batches.check(out, None if lse is None else lse.t(), q, k, v, q_lens, kv_lens, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_varlen(device, backend, dtype, causal, window):
    q, k, v = ragged(dtype, device)
    cu = offsets(Q_LENS, device), offsets(KV_LENS, device)
    out, lse, none = flash_attn_varlen_func(
        q, k, v, *cu, max(Q_LENS), max(KV_LENS), causal=causal, window_size=window, return_attn_probs=True
    )
    assert none is None and lse.shape == (8, sum(Q_LENS))
    check(out, lse.t(), q, k, v, causal=causal, window=window)


def test_varlen_scale_cap_and_sinks(device, backend, dtype):
    q, k, v = ragged(dtype, device)
    cu, sinks = (offsets(Q_LENS, device), offsets(KV_LENS, device)), random(8, device=device, dtype=dtype, seed=9)
    options = {"softmax_scale": 0.3, "softcap": 5.0, "causal": True, "s_aux": sinks, "deterministic": True}
    out = flash_attn_varlen_func(q, k, v, *cu, torch.tensor(17), torch.tensor(20), **options)
    check(out, None, q, k, v, causal=True, sm_scale=0.3, soft_cap=5.0, sinks=sinks)


@pytest.mark.parametrize("window", [(-1, -1), (4, 2)])
def test_varlen_over_pages(device, backend, dtype, window):
    q, k, v = ragged(dtype, device)
    counts = [-(-n // 8) for n in KV_LENS]
    table, free = torch.full((4, max(counts)), 0, dtype=torch.int32), iter(torch.randperm(sum(counts)).tolist())
    pages = torch.full((2, sum(counts), 8, 2, 64), math.nan, dtype=dtype, device=device)
    for b, (begin, n) in enumerate(zip(oracle.indptr_of(KV_LENS), KV_LENS, strict=False)):
        for i in range(counts[b]):
            table[b, i] = page = next(free)
            for cache, tokens in zip(pages, (k, v), strict=True):
                part = tokens[begin + 8 * i : begin + min(n, 8 * i + 8)]
                cache[page, : part.shape[0]] = part
    cu = offsets(Q_LENS, device), offsets(KV_LENS, device)
    out = flash_attn_varlen_func(
        q, *pages, *cu, 17, 20, causal=window == (-1, -1), window_size=window, block_table=table.to(device)
    )
    check(out, None, q, k, v, causal=window == (-1, -1), window=window)


@pytest.mark.one_type
def test_rows_behind_the_last_offset_give_zeros(device, backend, dtype):
    q, k, v = ragged(dtype, device)
    longer = torch.cat([q, torch.full_like(q[:3], math.nan)])
    cu = offsets(Q_LENS, device), offsets(KV_LENS, device)
    out, lse, _ = flash_attn_varlen_func(longer, k, v, *cu, 17, 20, return_attn_probs=True)
    assert not out[-3:].any() and (lse[:, -3:] == -math.inf).all()
    check(out[:-3], lse[:, :-3].t(), q, k, v)


@pytest.mark.parametrize("kind", ["contiguous", "heads first", "wider", "fewer dims of v"])
@pytest.mark.parametrize(("n", "m"), [(5, 33), (1, 7), (33, 33), (3, 0)])
def test_equal_lengths(device, backend, dtype, kind, n, m):
    dim_v = 32 if kind.startswith("fewer") else 64
    q = random(2, n, 8, 64, device=device, dtype=dtype)
    k, v = (random(2, m, 2, dim, device=device, dtype=dtype, seed=dim) for dim in (64, dim_v))
    if kind == "heads first":
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    if kind == "wider":
        k, v = (torch.cat([t, torch.full_like(t, math.nan)], dim=1)[:, :m] for t in (k, v))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == (2, n, 8, dim_v) and lse.shape == (2, 8, n)
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), *flat, (n, n), (m, m), causal=True)


def test_packed_forms(device, backend, dtype):
    qkv = random(2, 9, 3, 4, 64, device=device, dtype=dtype)
    q, k, v = qkv.unbind(2)
    want = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), want)
    cu = offsets((9, 9), device)
    flat = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 9, causal=True)
    check(flat, None, *(t.flatten(0, 1) for t in (q, k, v)), (9, 9), (9, 9), causal=True)
    again = flash_attn.flash_attn_varlen_kvpacked_func(
        q.flatten(0, 1), qkv.flatten(0, 1)[:, 1:], cu, cu, 9, 9, causal=True
    )
    assert torch.equal(again, flat)


@pytest.mark.first(1)
@pytest.mark.parametrize("per_request", [False, True])
def test_alibi(device, backend, dtype, per_request):
    q, k, v = ragged(dtype, device, num_heads=6)
    slopes = oracle.alibi_slopes(6).float().to(device)
    cu = offsets(Q_LENS, device), offsets(KV_LENS, device)
    given = slopes.expand(4, 6) if per_request else slopes
    out = flash_attn_varlen_func(q, k, v, *cu, 17, 20, causal=True, alibi_slopes=given)
    indptrs = oracle.indptr_of(Q_LENS), oracle.indptr_of(KV_LENS)
    how = {"causal": True, "pos_encoding_mode": "ALIBI"}
    ref = oracle.attention(q, k, v, *indptrs, **how)
    oracle.assert_close(out, ref.o, oracle.torch_error(q, k, v, *indptrs, **how), indptrs[0])


def biased(q, k, v, slopes, causal, cap=0.0, left=-1, right=-1, scale=None):
    """One request with FlashAttention's bias in float64; rows that see no key are 0. slopes: [num_heads]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = cap * torch.tanh(logits / cap) if cap else logits
    far = torch.arange(m, device=q.device) - (torch.arange(n, device=q.device)[:, None] + m - n)
    seen = (far <= (0 if causal else right if right >= 0 else m)) & (far >= (-left if left >= 0 else -m - n))
    logits = (logits - slopes.double()[:, None, None] * far.abs()).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1).nan_to_num(0.0), v)


@pytest.mark.one_type
@pytest.mark.first(1)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("per_request", [False, True])
def test_any_slopes(device, backend, dtype, causal, cap, per_request):
    """Other numbers than the paper's, to both sides, behind the cap, for each request; new numbers in the same call."""
    q, k, v = ragged(dtype, device, num_heads=6)
    cu = offsets(Q_LENS, device), offsets(KV_LENS, device)
    for seed in (1, 2, 3):
        slopes = random(*((4, 6) if per_request else (6,)), device=device, dtype=torch.float32, seed=seed).abs() / 3
        out = flash_attn_varlen_func(
            q, k, v, *cu, 17, 20, causal=causal, alibi_slopes=slopes, softcap=cap, window_size=(9, -1)
        )
        at = [0, 0]
        for i, (n, m) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
            rows, keys = slice(at[0], at[0] + n), slice(at[1], at[1] + m)
            want = biased(q[rows], k[keys], v[keys], slopes[i] if per_request else slopes, causal, cap, left=9)
            atol = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
            torch.testing.assert_close(out[rows].double(), want, atol=atol, rtol=0)
            at = [at[0] + n, at[1] + m]


def test_slopes_over_a_cache(device, backend):
    """Slopes on the host, too, which are copied; in a replay their new numbers are."""
    q, pages = random(2, 1, 8, 64, device=device, dtype=torch.float16), random(2, 6, 8, 2, 64, device=device)
    k, v = pages.half()
    table, lens = torch.tensor([[3, 1, 0], [2, 5, 4]]).int().to(device), ints((20, 13), device)
    for seed in (1, 2, 3):
        slopes = random(8, device="cpu", dtype=torch.float32, seed=seed).abs()
        out = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, block_table=table, alibi_slopes=slopes, window_size=(-1, -1)
        )
        for i, m in enumerate((20, 13)):
            keys = [t[table[i].long()].flatten(0, 1)[:m] for t in (k, v)]
            want = biased(q[i], *keys, slopes.to(device), causal=True)
            assert (out[i].double() - want).abs().max() < 3e-3


DIMS = (1, 7, 16, 40, 59, 111, 250)


@pytest.mark.first(2)
@pytest.mark.parametrize("dim", DIMS)
def test_any_head_dim(device, backend, dtype, dim):
    q, k, v = (random(2, n, h, dim, device=device, dtype=dtype, seed=h) for n, h in ((5, 6), (9, 2), (9, 2)))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == q.shape and out.is_contiguous()
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), *flat, (5, 5), (9, 9), causal=True)
    cu = offsets((5, 5), device), offsets((9, 9), device)
    ragged_ = flash_attn_varlen_func(*flat, *cu, 5, 9, causal=True)
    check(ragged_, None, *flat, (5, 5), (9, 9), causal=True)


@pytest.mark.each_value
@pytest.mark.first(2)
@pytest.mark.parametrize("dim", [1, 59, 111])
@pytest.mark.parametrize("is_paged", [False, True])
def test_any_head_dim_of_a_cache(device, backend, dtype, dim, is_paged):
    """New tokens are written into the caller's cache, whatever is computed on a copy."""
    q, new = random(2, 2, 6, dim, device=device, dtype=dtype), random(2, 2, 2, 2, dim, device=device, dtype=dtype)
    cache = random(2, *((5, 8) if is_paged else (2, 20)), 2, dim, device=device, dtype=dtype, seed=3)
    lens, table = ints((9, 4), device), torch.tensor([[4, 0], [3, 2]]).int().to(device)
    given = {"block_table": table} if is_paged else {}
    rows = [[cache[j][table[i].long()].flatten(0, 1) if is_paged else cache[j][i] for i in (0, 1)] for j in (0, 1)]
    keys = [
        torch.cat([torch.cat([side[i][:n], new[j][i]]) for i, n in enumerate((9, 4))]) for j, side in enumerate(rows)
    ]
    out = flash_attn_with_kvcache(q, *cache, *new, cache_seqlens=lens, causal=True, **given)
    check(out.flatten(0, 1), None, q.flatten(0, 1), *keys, (2, 2), (11, 6), causal=True)
    written = cache[0][table[0, 1], 1] if is_paged else cache[0][0, 9]
    assert torch.equal(written, new[0][0, 0])


@pytest.mark.parametrize("appends", [False, True])
def test_more_tokens_than_a_block_table_has_pages_for(device, appends):
    """As FlashAttention: RuntimeError, also where lengths lie on a GPU."""
    q, pages = random(1, 1, 2, 64, device=device).half(), random(2, 4, 16, 1, 64, device=device).half()
    table, new = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.zeros(1, 1, 1, 64, device=device).half()
    more = {"k": new, "v": new} if appends else {}
    with pytest.raises(RuntimeError, match=r"cache_seqlens: expected at most 16 tokens, .*block_table.* got 17"):
        flash_attn_with_kvcache(q, *pages, **more, cache_seqlens=ints((17 - appends,), device), block_table=table)
    assert not flash_attn_with_kvcache(q, *pages, cache_seqlens=ints((16,), device), block_table=table).isnan().any()


def test_functions_below_the_public_ones(device, backend):
    """Ring attention, diffusers and older programs call them."""
    q, k, v = ragged(torch.float16, device)
    cu = offsets(Q_LENS, device), offsets(KV_LENS, device)
    want, lse, _ = flash_attn_varlen_func(q, k, v, *cu, 17, 20, 0.0, 0.2, True, return_attn_probs=True)
    for call in (flash_attn._flash_attn_varlen_forward, flash_attn._wrapped_flash_attn_varlen_forward):
        out, lse_, mask, state = call(q, k, v, *cu, 17, 20, 0.0, 0.2, True, return_softmax=True)
        assert torch.equal(out, want) and torch.equal(lse_, lse) and not mask.numel() and state.dtype is torch.int64
    assert torch.equal(flash_attn.flash_attn_unpadded_func(q, k, v, *cu, 17, 20, 0.0, 0.2, True), want)
    used = ints((11, 2, 17, 0), device)
    out = flash_attn._flash_attn_varlen_forward(
        q, k, v, *cu, max_seqlen_q=17, max_seqlen_k=20, dropout_p=0.0, softmax_scale=0.2, causal=True, seqused_k=used
    )[0]
    starts = oracle.indptr_of(KV_LENS)
    keys = [torch.cat([t[a : a + n] for a, n in zip(starts, used.tolist(), strict=False)]) for t in (k, v)]
    check(out, None, q, *keys, Q_LENS, tuple(used.tolist()), causal=True, sm_scale=0.2)
    equal = [random(2, n, h, 64, device=device, dtype=torch.float16) for n, h in ((5, 8), (9, 2), (9, 2))]
    for call in (flash_attn._flash_attn_forward, flash_attn._wrapped_flash_attn_forward):
        out, lse, mask, _ = call(*equal, 0.0, 0.2, False, 4, 2, 5.0, None, False)
        again = flash_attn_func(*equal, 0.0, 0.2, False, (4, 2), 5.0, return_attn_probs=True)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1]) and not mask.numel()
    with pytest.raises(quire.UnsupportedError, match="leftpad_k"):
        flash_attn._flash_attn_varlen_forward(q, k, v, *cu, 17, 20, 0.0, 0.2, True, leftpad_k=used)
    with pytest.raises(quire.UnsupportedError, match="dropout_p"):
        flash_attn._flash_attn_varlen_forward(q, k, v, *cu, 17, 20, 0.1, 0.2, True)
    with pytest.raises(quire.UnsupportedError, match=r"^num_splits > 1 is not supported"):
        flash_attn._flash_attn_varlen_forward(q, k, v, *cu, 17, 20, 0.0, 0.2, True, num_splits=2)


LENS, NEW = (11, 0, 24, 5), 3  # tokens in the cache, and new ones


class Cached:
    """A cache of four requests, in rows or in pages, whose unused places are NaN."""

    def __init__(self, dtype, device: str, paged: bool, rows: int = 32, leftpad: tuple[int, ...] = (0, 0, 0, 0)):
        self.old = [[random(n, 2, 64, device=device, dtype=dtype, seed=i) for n in LENS] for i in (1, 2)]
        self.new = [random(4, NEW, 2, 64, device=device, dtype=dtype, seed=i) for i in (3, 4)]
        size = 8 if paged else rows
        pages = rows // size
        table = torch.randperm(4 * pages, generator=torch.Generator().manual_seed(1)).view(4, pages)
        self.table = table.to(device=device, dtype=torch.int32)
        shape = (4 * pages, size, 2, 64)
        self.caches = [torch.full(shape, math.nan, dtype=dtype, device=device) for _ in range(2)]
        for cache, tokens in zip(self.caches, self.old, strict=True):
            for b, part in enumerate(tokens):
                for i, token in enumerate(part, leftpad[b]):
                    cache[self.table[b, i // size], i % size] = token

    def keys(self, new: list[Tensor] | None = None) -> list[Tensor]:
        """Old and new tokens of keys and of values, ragged."""
        new = self.new if new is None else new
        return [
            torch.cat([t for b in range(4) for t in (old[b], fresh[b])])
            for old, fresh in zip(self.old, new, strict=True)
        ]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("lens_on_host", [False, True])
@pytest.mark.parametrize("n", [1, NEW])
def test_kvcache(device, backend, dtype, paged, lens_on_host, n):
    c = Cached(dtype, device, paged)
    q = random(4, n, 8, 64, device=device, dtype=dtype)
    lens = ints(LENS, "cpu" if lens_on_host else device)
    where = {"block_table": c.table} if paged else {"cache_batch_idx": c.table[:, 0]}
    out, lse = flash_attn_with_kvcache(
        q, *c.caches, *c.new, cache_seqlens=lens, causal=True, window_size=(9, 0), return_softmax_lse=True, **where
    )
    kv_lens = [length + NEW for length in LENS]
    rows = q.flatten(0, 1), *c.keys()
    check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), *rows, (n,) * 4, kv_lens, causal=True, window=(9, 0))
    again = flash_attn_with_kvcache(
        q, *c.caches, cache_seqlens=lens + NEW, causal=True, window_size=(9, 0), num_splits=1, **where
    )
    check(again.flatten(0, 1), None, *rows, (n,) * 4, kv_lens, causal=True, window=(9, 0))


def test_kvcache_takes_one_length_or_none(device, backend, dtype):
    cache = [random(2, 16, 2, 64, device=device, dtype=dtype, seed=i) for i in (1, 2)]
    q = random(2, 1, 8, 64, device=device, dtype=dtype)
    for length in (5, None):
        out = flash_attn_with_kvcache(q, *cache, cache_seqlens=length, softcap=3.0)
        n = length or 16
        check(out.flatten(0, 1), None, q[:, 0], *(t[:, :n].flatten(0, 1) for t in cache), (1, 1), (n, n), soft_cap=3.0)


def test_kvcache_of_negative_length_writes_nothing(device, backend, dtype):
    cache = [torch.full((2, 8, 2, 64), 2.0, dtype=dtype, device=device) for _ in range(2)]
    q, new = (random(2, 1, h, 64, device=device, dtype=dtype) for h in (8, 2))
    out = flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=ints([-1, 2], device))
    assert not out[0].any() and out[1].any()
    assert (cache[0][0] == 2).all() and torch.equal(cache[0][1, 2], new[1, 0])


def test_kvcache_leftpad(device, backend, dtype):
    pads = (2, 0, 5, 1)
    c = Cached(dtype, device, paged=False, leftpad=pads)
    q = random(4, NEW, 8, 64, device=device, dtype=dtype)
    out = flash_attn_with_kvcache(
        q, *c.caches, *c.new, cache_seqlens=ints([a + b for a, b in zip(LENS, pads, strict=True)], device), causal=True,
        cache_leftpad=ints(pads, device), cache_batch_idx=c.table[:, 0],
    )  # fmt: skip
    kv_lens = [length + NEW for length in LENS]
    check(out.flatten(0, 1), None, q.flatten(0, 1), *c.keys(), (NEW,) * 4, kv_lens, causal=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_rotates(device, backend, dtype, interleaved, causal):
    c = Cached(dtype, device, paged=True)
    q = random(4, NEW, 8, 64, device=device, dtype=dtype)
    angles = oracle.rope_angles(torch.arange(40), 32).float()
    table = [t.to(device=device, dtype=dtype) for t in (angles.cos(), angles.sin())]
    out = flash_attn_with_kvcache(
        q, *c.caches, *c.new, *table, cache_seqlens=ints(LENS, device), causal=causal, block_table=c.table,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    at = torch.cat([torch.arange(NEW) + length for length in LENS])
    at_q = at if causal else torch.tensor(LENS).repeat_interleave(NEW)
    cos, sin = (t.cpu().double() for t in table)
    turned_q = oracle.rotate(q.flatten(0, 1), cos[at_q], sin[at_q], interleaved).to(dtype)
    turned_k = oracle.rotate(c.new[0].flatten(0, 1), cos[at], sin[at], interleaved).to(dtype).view(4, NEW, 2, 64)
    k, v = c.keys([turned_k.to(device), c.new[1]])
    check(out.flatten(0, 1), None, turned_q.to(device), k, v, (NEW,) * 4, [n + NEW for n in LENS], causal=causal)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_one_graph_for_a_cache_of_any_lengths():
    device, dtype = "cuda:0", torch.bfloat16
    c, q = Cached(dtype, device, paged=True), random(4, 1, 8, 64, device=device, dtype=dtype)
    lens = ints(LENS, device)
    flash_attn_with_kvcache(q, *c.caches, cache_seqlens=lens, block_table=c.table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(q, *c.caches, cache_seqlens=lens, block_table=c.table)
    for now in (LENS, (3, 0, 9, 5)):
        lens.copy_(ints(now, device))
        graph.replay()
        k, v = (torch.cat([part[:n] for part, n in zip(old, now, strict=True)]) for old in c.old)
        check(out[:, 0], None, q[:, 0], k, v, (1,) * 4, now)
    cu = offsets((1,) * 4, device), offsets(now, device)
    wide = {"causal": False, "window_size": (-1, 3)}  # whose mask the host makes
    with capture(), pytest.raises(quire.PlanError, match="captured"):
        flash_attn_varlen_func(q[:, 0], k, v, *cu, 1, 9, **wide)


def test_layers_of_one_batch_plan_twice(monkeypatch):
    """The second call is recorded, and the others repeat it."""
    plans, made = [], flash_attn_batch.AttentionCall

    def count(*arguments, **options):
        plans.append(arguments)
        return made(*arguments, **options)

    monkeypatch.setattr(flash_attn_batch, "AttentionCall", count)
    q, k, v = ragged(torch.float32, "cpu")
    cu = offsets(Q_LENS, "cpu"), offsets(KV_LENS, "cpu")
    for layer in range(5):
        out = flash_attn_varlen_func(q + layer, k, v, *cu, 17, 20)
        check(out, None, q + layer, k, v)
    assert len(plans) == 2
    cu[1].numpy()[1] -= 1  # in place, which torch does not notice: another batch, whose plan is another
    check(flash_attn_varlen_func(q, k, v, *cu, 17, 20), None, q, k, v, kv_lens=(19, 10, 17, 0))
    assert len(plans) == 3


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_queries_of_8_bits_are_refused_at_once(narrow, monkeypatch):
    monkeypatch.setattr(flash_attn_batch, "AttentionCall", None)  # nothing is compiled
    q = torch.randn(1, 5, 2, 64).to(narrow)
    with pytest.raises(quire.UnsupportedError, match=r"q: expected float16 or bfloat16 .* got torch.float8"):
        flash_attn_func(q, q, q)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 1), (64, 16), (16, 16), (3, 0)])
@pytest.mark.parametrize("side", [0, 1, 15, 63])
def test_more_queries_than_keys_under_a_right_window(q_len, kv_len, side):
    """The first queries stand before all keys, and see only those within the window."""
    q, k = torch.randn(1, q_len, 1, 64), torch.randn(1, kv_len, 1, 64)
    out = flash_attn_func(q, k, torch.ones_like(k), window_size=(-1, side))
    sees_one = torch.arange(q_len) + (kv_len - q_len) + side >= 0
    assert torch.equal(out[0, :, 0, 0].round(), (sees_one & (kv_len > 0)).float())


def test_a_request_of_negative_length_has_no_keys_and_writes_none():
    q, new, caches = random(2, 3, 2, 64), random(2, 3, 2, 64), [torch.zeros(2, 8, 2, 64) for _ in range(2)]
    out = flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=ints((-2, 1), "cpu"), causal=True)
    assert not out[0].any() and not caches[0][0].any() and torch.equal(caches[0][1, 1:4], new[1])


def test_tables_of_rotations_are_alike():
    q, new, caches = random(1, 1, 2, 64), random(1, 1, 2, 64), [torch.zeros(1, 8, 2, 64) for _ in range(2)]
    cos = torch.rand(48, 8)
    for sin in (torch.rand(48, 0), torch.rand(40, 8), cos.to_sparse(), None):
        with pytest.raises(quire.ValidationError, match="rotary_sin"):
            flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=1, rotary_cos=cos, rotary_sin=sin)


def test_offsets_beyond_no_queries_are_refused():
    q, k = torch.empty(0, 2, 64), torch.randn(5, 2, 64)
    with pytest.raises(quire.ValidationError, match="cu_seqlens_q"):
        flash_attn_varlen_func(q, k, k, offsets((3,), "cpu"), offsets((5,), "cpu"), 3, 5)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "name"),
    [
        ((0, 5), (0, 2**30), "cu_seqlens_k"),
        ((0, 2**30), (0, 9), "cu_seqlens_q"),
        ((0, 5), (0, -9), "cu_seqlens_k"),
        ((0, 7, 5), (0, 4, 9), "cu_seqlens_q"),
        ((0, 3, 5), (0, 9, 4), "cu_seqlens_k"),
    ],
)
@pytest.mark.parametrize("options", [{"window_size": (-1, 3)}, {"attention_chunk": 4}], ids=str)
def test_offsets_are_checked_before_bits_are_made_of_them(device, cu_q, cu_k, name, options):
    q, k = (torch.zeros(n, 2, 64, dtype=torch.float16, device=device) for n in (5, 9))
    function = flash_attn_interface.flash_attn_varlen_func if "attention_chunk" in options else flash_attn_varlen_func
    with pytest.raises(quire.ValidationError, match=name):
        function(q, k, k, ints(cu_q, device), ints(cu_k, device), 2**31 - 1, 2**31 - 1, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("softmax_scale", 0.0),
        ("softmax_scale", math.inf),
        ("softmax_scale", "1"),
        ("softcap", math.nan),
        ("softcap", b"1"),
    ],
)
@pytest.mark.parametrize("q_len", [0, 3])
def test_numbers_are_checked_without_queries_too(argument, value, q_len):
    q, k = torch.randn(2, q_len, 4, 64), torch.randn(2, 5, 4, 64)
    with pytest.raises(quire.ValidationError, match=argument):
        flash_attn_func(q, k, k, **{argument: value})


def test_tables_and_offsets_are_checked_without_queries_too(device):
    q, k, pages = (torch.empty(n, 2, 64, dtype=torch.float16, device=device) for n in (0, 5, 0))
    pages = k.new_zeros(4, 16, 2, 64)
    none, cu = offsets((0,), device), offsets((5,), device)
    with pytest.raises(quire.ValidationError, match="cu_seqlens_k"):
        flash_attn_varlen_func(q, k, k, none, cu[:1], 1, 5)
    with pytest.raises(quire.ValidationError, match="block_table"):
        flash_attn_varlen_func(q, pages, pages, none, cu, 1, 5, block_table=ints([[0], [1]], device))
    assert flash_attn_varlen_func(q, pages, pages, none, cu, 1, 5, block_table=ints([[3]], device)).shape == q.shape


def test_a_soft_cap_of_none_is_no_cap(device):
    q, k = (torch.randn(2, n, 4, 64).half().to(device) for n in (3, 9))
    assert torch.equal(flash_attn_func(q, k, k, softcap=None), flash_attn_func(q, k, k))


def test_sinks_that_require_grad_are_refused(device):
    """Also where they are copied as float32."""
    q, k = (torch.randn(2, n, 4, 64).half().to(device) for n in (3, 9))
    sinks = torch.zeros(4, dtype=torch.float16, device=device, requires_grad=True)
    with pytest.raises(quire.ValidationError, match="s_aux: expected no tensor that requires grad"):
        flash_attn_func(q, k, k, s_aux=sinks)
    with torch.no_grad():
        assert flash_attn_func(q, k, k, s_aux=sinks).shape == q.shape


def test_types_are_checked_without_queries_too():
    with pytest.raises(quire.ValidationError, match="int64"):
        flash_attn.flash_attn_qkvpacked_func(torch.empty(0, 0, 3, 2, 64, dtype=torch.int64))


def test_compiled_without_a_break():
    q, k, v = ragged(torch.float32, "cpu")
    cu = offsets(Q_LENS, "cpu"), offsets(KV_LENS, "cpu")
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(q, k, v, *cu, 17, 20, causal=True), flash_attn_varlen_func(q, k, v, *cu, 17, 20, causal=True)
    )
    many = q[None]
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(many, k[None], v[None]), flash_attn_func(many, k[None], v[None]))


Q, K = random(2, 3, 8, 64), random(2, 9, 2, 64)
CU = torch.tensor([0, 3, 6], dtype=torch.int32)
LEN = torch.tensor([9, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: flash_attn_func(Q, K, K, 0.1), quire.UnsupportedError, "dropout_p"),
        (lambda: flash_attn_func(Q, K[0], K), quire.ValidationError, "k:"),
        (lambda: flash_attn_func(Q, K, K[:, :5]), quire.ValidationError, "v:"),
        (lambda: flash_attn_func(Q[0], K, K), quire.ValidationError, "q:"),
        (lambda: flash_attn_func(Q, K, K, causal=1), quire.ValidationError, "causal"),
        (lambda: flash_attn_func(Q, K, K, window_size=3), quire.ValidationError, "window_size"),
        (lambda: flash_attn_func(Q, K, K, softcap=-1.0), quire.ValidationError, "logits_soft_cap"),
        (lambda: flash_attn_func(Q, K, K, deterministic="no"), quire.ValidationError, "deterministic"),
        (lambda: flash_attn_func(Q, K, K, alibi_slopes=torch.ones(8).half()), quire.ValidationError, "alibi_slopes"),
        (
            lambda: flash_attn_func(Q, K, K, causal=True, alibi_slopes=torch.ones(7)),
            quire.ValidationError,
            "alibi_slopes",
        ),
        (lambda: flash_attn.flash_attn_qkvpacked_func(Q), quire.ValidationError, "qkv"),
        (lambda: flash_attn_varlen_func(Q[0], K[0], K[0], CU, CU, 3, 3), quire.ValidationError, "cu_seqlens_q"),
        (
            lambda: flash_attn_varlen_func(Q.flatten(0, 1), K[0], K[0], CU, CU, 2, 3),
            quire.ValidationError,
            "max_seqlen_q",
        ),
        (
            lambda: flash_attn_varlen_func(Q.flatten(0, 1), K[0], K[0], CU, CU[:2], 3, 3),
            quire.ValidationError,
            "cu_seqlens_k",
        ),
        (lambda: flash_attn_with_kvcache(Q, K, K, cache_seqlens=10), quire.ValidationError, "cache_seqlens"),
        (
            lambda: flash_attn_with_kvcache(Q, K, K, K[:, :1], K[:, :1], cache_seqlens=LEN),
            quire.ValidationError,
            "cache_seqlens",
        ),
        (lambda: flash_attn_with_kvcache(Q, K, K, K[:, :1]), quire.ValidationError, "k, v"),
        (lambda: flash_attn_with_kvcache(Q, K, K, rotary_cos=K, rotary_sin=K), quire.ValidationError, "rotary_cos"),
        (lambda: flash_attn_with_kvcache(Q, K, K, num_splits=-1), quire.ValidationError, "num_splits"),
        (lambda: flash_attn_with_kvcache(Q, K, K, cache_batch_idx=LEN), quire.ValidationError, "cache_batch_idx"),
        (
            lambda: flash_attn_with_kvcache(Q, K, K, cache_batch_idx=LEN - 9, block_table=LEN[:, None]),
            quire.ValidationError,
            "cache_batch_idx",
        ),
    ],
)
def test_wrong_arguments_are_named(call, error, name):
    with pytest.raises(error, match=name):
        call()


def test_examples_in_docstrings():
    done = doctest.testmod(flash_attn, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert done.attempted > 10 and not done.failed
