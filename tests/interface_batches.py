"""Batches for the tests of FlashAttention-3's dialect, and how results of FlashAttention compare with the oracle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import oracle
from problems import ints, offsets
from quire.compat.flash_attn_interface import flash_attn_varlen_func

Q_LENS, KV_LENS = (3, 0, 17, 1), (20, 9, 33, 0)


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
