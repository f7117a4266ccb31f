"""A user's script with types. tests/test_typing.py has mypy and pyright check it, and runs it."""

from __future__ import annotations

import torch

import quire

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


if __name__ == "__main__":
    main()
