"""A user's script with types. tests/test_typing.py has mypy and pyright check it, and runs it."""

from __future__ import annotations

from typing import Any

import torch

import quire
from quire.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from quire.distributed import ContextParallelDecode, ZigzagPrefill, merge_over_ranks

INT32 = torch.int32


def decode(wrapper: quire.BatchDecodeWithPagedKVCacheWrapper, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    o = wrapper.run(q, cache)
    print(o.shape)
    o, lse = wrapper.run(q, cache, return_lse=True)
    print(o.shape, lse.shape)
    o, lse = wrapper.run_return_lse(q, cache, k_scale=0.5)
    return wrapper.run(q, cache, out=o, lse=lse)


def prefill(wrapper: quire.BatchPrefillWithPagedKVCacheWrapper, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    pair: tuple[torch.Tensor, torch.Tensor] = wrapper.run(q, (cache[:, 0], cache[:, 1]), return_lse=True)
    print(pair[1].shape)
    return wrapper.run(q, cache, v_scale=2.0)


def capped(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cap = quire.Variant(score=lambda score, cap: cap * torch.tanh(score / cap), scalars={"cap": float})
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), variant=cap)
    lens = torch.tensor([0, len(q)], dtype=INT32), torch.tensor([0, len(k)], dtype=INT32)
    wrapper.plan(*lens, 8, 2, 64, q_data_type=torch.float32)
    o = wrapper.run(q, k, k, cap=30.0)
    print(o.shape)
    operands: dict[str, Any] = {"cap": 30.0}
    o = o + wrapper.run(q, k, k, **operands) - wrapper.run(q, k, k, cap=30)
    return quire.single_prefill_with_kv_cache(q, k, k, variant=cap, cap=30.0)


def ragged(wrapper: quire.BatchPrefillWithRaggedKVCacheWrapper, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    o, lse = wrapper.run(q, k, k, return_lse=True)
    print(lse.shape)
    return wrapper.run(q, k, k, out=o)


def latents(wrapper: quire.BatchMLAPagedAttentionWrapper, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    o, lse = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)
    print(lse.shape)
    return wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], out=o)


def single(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    o, lse = quire.single_prefill_with_kv_cache(q, k, k, causal=True, return_lse=True)
    print(lse.shape, quire.single_prefill_with_kv_cache_return_lse(q, k, k)[1].shape)
    row: torch.Tensor = quire.single_decode_with_kv_cache(q[0], k, k)
    return quire.single_prefill_with_kv_cache(q, k, k, causal=True) + o + row


def rotated(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(q), dtype=INT32)
    q_rope, k_rope = quire.apply_rope_pos_ids(q, k[: len(q)], positions)
    quire.apply_rope_pos_ids_inplace(q_rope, k_rope, positions, rope_theta=1e4)
    return q_rope + q


def flash(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    out, lse, _ = flash_attn_func(q[None], k[None], k[None], causal=True, return_attn_probs=True)
    ends = torch.tensor([0, len(q)], dtype=INT32), torch.tensor([0, len(k)], dtype=INT32)
    out = out[0] + flash_attn_varlen_func(q, k, k, *ends, len(q), len(k), softcap=30.0) + lse.mean()
    cached, cached_lse = flash_attn_with_kvcache(q[None], k[None], k[None], cache_seqlens=2, return_softmax_lse=True)
    return out + cached[0] + cached_lse.mean() + flash_attn_with_kvcache(q[None], k[None], k[None])[0]


def flexible(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    query, key = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    o, lse = quire.flex_attention(query, key, key, enable_gqa=True, return_lse=True)
    return o[0].transpose(0, 1) + lse.mean() + quire.flex_attention(query, key, key, enable_gqa=True).mean()


def blocks(wrapper: quire.BlockSparseAttentionWrapper, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    o, lse = wrapper.run(q, k, k, return_lse=True)
    return wrapper.run(q, k, k, out=o) + lse.mean()


def spread(decode: ContextParallelDecode, prefill: ZigzagPrefill, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    o, lse = decode.run(q, cache, return_lse=True)
    o, lse = merge_over_ranks(o, lse)
    return decode.run(q, cache) + prefill.run(q, cache[:, 0], cache[:, 1]) + o + lse.mean()


def main() -> None:
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    indptr, pages, last = torch.tensor([0, 1, 2], dtype=INT32), torch.tensor([0, 1], dtype=INT32), [5, 16]
    cache, q = torch.randn(2, 2, 16, 2, 64), torch.randn(2, 8, 64)
    decoder = quire.BatchDecodeWithPagedKVCacheWrapper(workspace)
    decoder.plan(indptr, pages, torch.tensor(last, dtype=INT32), 8, 2, 64, 16, q_data_type=torch.float32)
    print(decode(decoder, q, cache).shape)
    paged = quire.BatchPrefillWithPagedKVCacheWrapper(workspace)
    paged.plan(indptr, indptr, pages, torch.tensor(last, dtype=INT32), 8, 2, 64, 16, q_data_type=torch.float32)
    print(prefill(paged, q, cache).shape)
    flat = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    flat.plan(indptr, indptr, 8, 2, 64, q_data_type=torch.float32)
    print(ragged(flat, q, cache[0, 0, :2]).shape)
    print(single(q, cache[0, 0]).shape)
    print(capped(q, cache[0, 0]).shape)
    for function in (rotated, flash, flexible):
        assert function(q, cache[0, 0]).shape == q.shape
    sparse = quire.BlockSparseAttentionWrapper(workspace)
    sparse.plan(torch.tensor([0, 1], dtype=INT32), torch.tensor([0], dtype=INT32), 2, 16, 2, 16, 8, 2, 64,
                q_data_type=torch.float32)  # fmt: skip
    assert blocks(sparse, q, cache[0, 0]).shape == q.shape


if __name__ == "__main__":
    main()
