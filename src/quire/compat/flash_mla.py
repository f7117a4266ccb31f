"""FlashMLA's functions, with its signatures and semantics, over Quire's kernels of multi-head latent attention (MLA).

    from quire.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

The API is that of https://github.com/deepseek-ai/FlashMLA (flash_mla_interface.py). Latents have 512 + 64 dims. They
have the queries' type, float16 or bfloat16 (on the CPU also float32), or are 576 float8_e4m3fn numbers per token, or,
with bfloat16 queries, FlashMLA's rows of 656 bytes: 512 float8_e4m3fn numbers, a float32 scale for each 128 of them,
and 64 bfloat16 numbers. Any number of heads and any page size is supported. Both functions may be captured in a CUDA
graph. An lse is a natural logarithm, and -inf if the query sees no token. attn_sink: float32 [num_heads]; results
are multiplied by exp(lse) / (exp(lse) + exp(attn_sink)), and the lse is that without sinks.
"""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from typing import Any

import torch

from quire.calls.decode import TableCall
from quire.calls.tables import Scale
from quire.engine.batch import row_indices, row_lengths, selected_keys, tokens_of
from quire.engine.checks import (
    check_flags,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    number,
    refuse,
)
from quire.engine.device import OwnWorkspace
from quire.engine.options import foreign
from quire.engine.plan_cache import replayed
from quire.engine.schedule import Lengths, ScheduleCache
from quire.engine.tensors import LATENT_DIM, LN2, ROW_BYTES, cached_parts, is_packed, latent_parts
from quire.errors import UnsupportedError, ValidationError

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_KEY_DIM = LATENT_DIM + 64


class MLAMetadata(ScheduleCache):
    """The tile_scheduler_metadata of get_mla_metadata(). It keeps the schedules of sparse calls."""


def get_mla_metadata(*_args: Any, **_options: Any) -> tuple[MLAMetadata, None]:
    """The tile_scheduler_metadata and num_splits of flash_mla_with_kvcache(), for the layers and steps of a model.

    On a GPU the first call with `indices` and without topk_length keeps its schedule in the object, and calls of the
    same shapes use it, also in CUDA graphs. Other calls plan anew, because tensors whose values may change decide.
    Calls and graphs that share the object must not overlap on different streams. FlashMLA's arguments are accepted and
    not needed.
    """
    return MLAMetadata(), None


@replayed
@foreign(refused="extra_k_cache extra_indices_in_kvcache extra_topk_length")
def flash_mla_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None,
    head_dim_v: int, tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool = False, indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None, extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of q [batch, seqlen_q, num_heads, 576] over k_cache [num_pages, page_size, 1, 576 or 656 bytes].

    block_table [batch, pages] and cache_seqlens [batch], int32: the pages and tokens of each request, whose last
    tokens are the queries if causal=True; otherwise queries see all tokens. Or indices [batch, seqlen_q, topk] int32:
    the tokens that each query attends to, page * page_size + index in the page; indices below 0 and beyond the cache
    are ignored. topk_length [batch]: how many of the indices are used. softmax_scale: None is 1 / sqrt(576).
    head_dim_v: 512. is_fp8_kvcache: whether k_cache has 8 bits. tile_scheduler_metadata: get_mla_metadata()'s object,
    which saves sparse calls the plan, or None; others, and num_splits, have no effect. An extra cache is refused.

    Returns (out [batch, seqlen_q, num_heads, 512], softmax_lse float32 [batch, num_heads, seqlen_q]). Raises
    ValidationError naming the argument, or UnsupportedError.

    >>> q, k_cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(6, 64, 1, 576).bfloat16()
    >>> block_table, cache_seqlens = torch.tensor([[4], [2]]).int(), torch.tensor([21, 64]).int()
    >>> out, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, *get_mla_metadata())
    >>> out.shape, lse.shape
    (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
    """
    del num_splits
    kept = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, MLAMetadata) else None
    check_flags(causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    check_shape(check_tensor(q, "q"), "q", {"batch": None, "seqlen_q": None, "num_heads": None, "head_dim": _KEY_DIM})
    cache = _latents(k_cache, "k_cache", is_fp8_kvcache)
    rows, q_len = q.flatten(0, 1), q.shape[1]
    if indices is not None:
        if causal or block_table is not None or cache_seqlens is not None:
            raise ValidationError("indices: expected neither block_table, cache_seqlens nor causal=True beside them.")
        out, lse = _attend_selected(
            rows, cache, indices, q.shape[:2], "indices", topk_length, head_dim_v, softmax_scale, attn_sink, kept=kept
        )
    else:
        refuse(topk_length=topk_length)
        tables, lens = check_tensor(block_table, "block_table"), check_tensor(cache_seqlens, "cache_seqlens")
        most = tables.shape[-1] * cache.shape[1]
        if not causal and q_len > 1:  # queries that see all tokens are requests of their own
            tables, lens, q_len = tables.repeat_interleave(q_len, 0), lens.repeat_interleave(q_len), 1
        out, lse = _attend(rows, cache, tables, lens, most, q_len, head_dim_v, softmax_scale, attn_sink)
    return out.view(*q.shape[:-1], LATENT_DIM), lse.view(q.shape[:-1]).transpose(1, 2)


@replayed
@foreign(refused="indexer_topk")
def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = LATENT_DIM,
    attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, indexer_topk: int = 0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    """Attention of q [seqlen_q, num_heads, 576] over the tokens kv [seqlen_kv, 1, 576] that indices [seqlen_q, 1, topk]
    list for each query, or the first topk_length [seqlen_q] of them; indices below 0 or from seqlen_kv on are ignored.

    Returns (out [seqlen_q, num_heads, 512], None, lse float32 [seqlen_q, num_heads]); instead of None, FlashMLA
    returns the maximum of each row's logits, which Quire does not store. d_v: 512. indexer_topk: only 0. Raises
    ValidationError naming the argument, or UnsupportedError.

    >>> q, kv = torch.randn(2, 16, 576).bfloat16(), torch.randn(100, 1, 576).bfloat16()
    >>> indices = torch.tensor([[[3, 99, -1, -1]], [[0, 1, 2, 3]]]).int()
    >>> flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)[0].shape
    torch.Size([2, 16, 512])
    """
    check_shape(check_tensor(q, "q"), "q", {"seqlen_q": None, "num_heads": None, "head_dim": _KEY_DIM})
    check_shape(check_tensor(kv, "kv"), "kv", {"seqlen_kv": None, "num_heads_k": 1, "head_dim": _KEY_DIM})
    rows, scale = (q.shape[0], 1), number(sm_scale, "sm_scale", positive=True)
    result, lse = _attend_selected(q, kv, indices, rows, "indices", topk_length, d_v, scale, attn_sink, out)
    return result, None, lse


def _latents(k_cache: torch.Tensor, name: str, is_fp8: bool) -> torch.Tensor:
    """Pages [num_pages, page_size, 576, or 656 bytes] of the cache."""
    width = ROW_BYTES if is_packed(check_tensor(k_cache, name)) else _KEY_DIM
    check_shape(k_cache, name, {"num_pages": None, "page_size": None, "num_heads_k": 1, "head_dim": width})
    if is_fp8 != (k_cache.element_size() == 1):
        raise ValidationError(f"is_fp8_kvcache: expected {not is_fp8} with {name} of {k_cache.dtype}, got {is_fp8}.")
    return k_cache.squeeze(2)


def _attend_selected(
    q: torch.Tensor, kv: torch.Tensor, indices: Any, rows: tuple[int, ...], name: str, lengths: Any, head_dim_v: int,
    scale: float | None, sink: torch.Tensor | None, out: torch.Tensor | None = None, kept: MLAMetadata | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each row of q over the tokens that indices [*rows, topk] name."""
    table = row_indices(indices, rows, name, q.device)
    most = row_lengths(lengths, "topk_length", q.shape[0], rows[1], None)
    tokens = tokens_of(kv)
    keys = selected_keys(table, None if most is None else most.to(q.device), tokens.shape[0], kept)
    return _attend(q, tokens, *keys, table.shape[1], 1, head_dim_v, scale, sink, out)


def _attend(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor | Lengths, lens: torch.Tensor | None, most: int,
    q_len: int, head_dim_v: int, scale: float | None, sink: torch.Tensor | None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse in natural logarithms) of rows of q."""
    _check_sink(sink, q)
    if check_positive(head_dim_v, "head_dim_v") != LATENT_DIM:
        raise UnsupportedError(f"head_dim_v: expected {LATENT_DIM}, got {head_dim_v}.")
    if out is not None:
        check_output(out, "out")
    factor = _KEY_DIM**-0.5 if scale is None else number(scale, "softmax_scale", positive=True)
    result, lse = TableCall.of_latents(
        latent_parts(q, "q"), cached_parts(cache, "k_cache"), OwnWorkspace(q.device), table, lens, max(1, most),
        Scale(factor), Scale(1.0), q_len=q_len, out=out, return_lse=True, lse_unit=LN2,
    ).attend()  # fmt: skip
    if sink is not None:
        result.copy_(result.float() * torch.sigmoid(lse - sink).nan_to_num_(0.0)[..., None])
    return result, lse


def _check_sink(sink: Any, q: torch.Tensor) -> None:
    if sink is not None:
        check_shape(check_tensor(sink, "attn_sink"), "attn_sink", {"num_heads": q.shape[1]})
        check_same_device(sink, "attn_sink", q.device)
        if sink.dtype is not torch.float32:
            raise ValidationError(f"attn_sink: expected dtype torch.float32, got {sink.dtype}.")
