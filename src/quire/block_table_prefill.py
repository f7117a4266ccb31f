"""Prefill with a block table and lengths in one call, without a plan()."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ValidationError
from quire.kernels.variant import Variant
from quire.runtime.attention import Attention, AttentionSpec, Result
from quire.runtime.block_tables import BlockTables, CacheParts, Scale, Target, check_lengths, indices_of
from quire.runtime.checks import (
    check_flags,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    device_indices,
    host_indices,
    last_entry,
    refuse,
    to_int32,
)
from quire.runtime.layout import PagedCache
from quire.runtime.options import PlanOptions, Types, heads, logits_options
from quire.runtime.replay import replayed
from quire.runtime.schedule import LEAST_TILE, Indices, Lengths
from quire.runtime.variant_operands import of_plan_and_run, variant_of
from quire.runtime.workspace import UserWorkspace
from quire.types import KVLayout


@replayed
def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor, kv_cache: PagedCache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, max_q_len: int, max_kv_len: int, bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor, batch_size: int, cum_seq_lens_q: torch.Tensor, cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1, out: torch.Tensor | None = None, out_dtype: str | torch.dtype | None = None,
    o_sf_scale: Any = None, o_sf_vec_size: Any = None, kv_layout: str = "HND", enable_pdl: bool | None = None,
    sinks: torch.Tensor | None = None, kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None, uses_shared_paged_kv_idx: bool = True,
    causal: bool = True, lse: torch.Tensor | None = None, return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None, use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None, backend: str = "auto", *, variant: Variant | None = None, **operands: Any,
) -> Result:  # fmt: skip
    """Attention of the new tokens of each request over its pages, like FlashInfer's function.

    query: [nnz_qo, num_qo_heads, head_dim]. kv_cache: [num_pages, 2, num_kv_heads, page_size, head_dim] (kv_layout
    "NHD": page_size first), or a pair of such 4-D tensors. block_tables: int32 [batch_size, pages]. seq_lens: int32
    [batch_size], tokens of each request including the new ones; cum_seq_lens_q int32 [batch_size + 1], offsets of the
    new tokens; cum_seq_lens_kv int32 [batch_size + 1], cumulative seq_lens or page counts, redundant. max_q_len and
    max_kv_len are upper bounds of the lengths.

    bmm1_scale is the whole factor of q . k, bmm2_scale the factor of the result: numbers, or tensors of one element,
    which are read on their device. window_left, sinks, causal, lse: as in a paged wrapper's plan() and run().
    out_dtype: query's, or float8_e4m3fn. If seq_lens and cum_seq_lens_q are on a GPU, only the GPU reads them: the host
    does not wait, and the call may be captured in a CUDA graph; longer requests are then cut off at the end of the page
    of token max_kv_len - 1. Caches of 8 bits and variants with a mask are planned on the host, which waits. variant: a
    quire.Variant of the caller's own, whose operands are keywords.

    Returns [nnz_qo, num_qo_heads, head_dim], or with return_lse=True (result, lse), lse [nnz_qo, num_qo_heads] float32,
    base 2. Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.

    >>> query = torch.randn(5, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 2, 16, 64, dtype=torch.bfloat16)  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    >>> int32 = {"dtype": torch.int32}
    >>> quire.prefill.trtllm_batch_context_with_kv_cache(
    ...     query, cache, torch.empty(1 << 20, dtype=torch.uint8), torch.tensor([[4, 0], [2, 0]], **int32),
    ...     torch.tensor([21, 16], **int32), 3, 32, 64**-0.5, 1.0, 2, torch.tensor([0, 3, 5], **int32),
    ...     torch.tensor([0, 21, 37], **int32),
    ... ).shape
    torch.Size([5, 8, 64])
    """
    check_flags(causal=causal, return_lse=return_lse, enable_pdl=enable_pdl, use_fp16_softmax=use_fp16_softmax)
    if multi_ctas_kv_counter_buffer is not None:
        check_tensor(multi_ctas_kv_counter_buffer, "multi_ctas_kv_counter_buffer")  # scratch that is not needed
    refuse(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, uses_spcompress=uses_spcompress,
        separate_page_tables=not uses_shared_paged_kv_idx,
    )  # fmt: skip
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    cache = CacheParts.of(kv_cache, layout)
    batch = (check_positive(batch_size, "batch_size"), block_tables, seq_lens, cum_seq_lens_q, cum_seq_lens_kv)
    rows: dict[str, int | None] = {"nnz_qo": None, "num_qo_heads": None, "head_dim": cache.head_dim_qk}
    check_shape(check_tensor(query, "query"), "query", rows)
    check_same_device(query, "query", workspace.device)
    target = Target.of(out, query, cache.head_dim_vo, 1.0, out_dtype)
    own = variant_of(variant)
    needs_host = (own is not None and own.has_mask) or cache.tensors[0].itemsize == 1
    indices: Indices | Lengths | None = None
    if not needs_host:
        indices = _device_batch(*batch, cache, query, target.result, max_q_len, max_kv_len)
    if indices is None:
        indices = host_batch(*batch, cache.page_size, max_q_len, max_kv_len)
        assert indices.qo_indptr is not None
        check_shape(query, "query", {**rows, "nnz_qo": last_entry(indices.qo_indptr)})
    logits_scale = Scale.of(bmm1_scale, "bmm1_scale", workspace.device, positive=True)
    v_scale = Scale.of(bmm2_scale, "bmm2_scale", workspace.device)
    options = PlanOptions(
        *heads(query.shape[1], cache.num_kv_heads), cache.head_dim_qk, cache.head_dim_vo,
        Types.of(query.dtype, cache.tensors[0].dtype, target.result.dtype),
        logits_options(cache.head_dim_qk, logits_scale.number, window_left, None, "NONE"), causal, cache.page_size,
        variant=own,
    )  # fmt: skip
    of_mask, of_score = of_plan_and_run("trtllm_batch_context_with_kv_cache", options.variant, operands)
    if return_lse and lse is None:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    Attention(AttentionSpec(indices, options, operands=of_mask), layout, workspace, backend).run(
        query, cache.as_given, out=target.result, lse=lse, return_lse=False, sinks=sinks, q_scale=None, k_scale=None,
        v_scale=v_scale.number, window_left=None, enable_pdl=enable_pdl, logits_scale_by=logits_scale.tensor,
        o_scale_by=v_scale.tensor, operands=of_score,
    )  # fmt: skip
    result = target.finish()
    return (result, lse) if return_lse else result


def _device_batch(
    batch_size: int, block_tables: Any, seq_lens: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, cache: CacheParts,
    query: torch.Tensor, out: torch.Tensor, max_q_len: int, max_kv_len: int,
) -> Lengths | None:  # fmt: skip
    """The batch for a plan on the GPU; None if the host has to plan."""
    arrays = (check_tensor(seq_lens, "seq_lens"), check_tensor(cum_seq_lens_q, "cum_seq_lens_q"))
    if not query.is_cuda or any(tensor.is_cpu for tensor in arrays):
        return None
    check_positive(max_q_len, "max_q_len")
    check_shape(check_tensor(cum_seq_lens_kv, "cum_seq_lens_kv"), "cum_seq_lens_kv", {"batch_size + 1": batch_size + 1})
    check_shape(arrays[1], "cum_seq_lens_q", {"batch_size + 1": batch_size + 1})
    tables = BlockTables.of(block_tables, seq_lens, query.device)
    check_shape(tables.seq_lens, "seq_lens", {"batch_size": batch_size})
    lengths = tables.indices(0, cache.page_size, check_positive(max_kv_len, "max_kv_len"))
    assert isinstance(lengths, Lengths)
    check_same_device(arrays[1], "cum_seq_lens_q", query.device)
    lengths = lengths._replace(
        qo_indptr=device_indices(arrays[1], "cum_seq_lens_q"), num_rows=query.shape[0],
        results=(out if out.is_contiguous() else None, None),
    )  # fmt: skip
    heads_of_one = query.shape[1] // cache.num_kv_heads
    return lengths if lengths.can_be_counted(*LEAST_TILE, cache.num_kv_heads, heads_of_one) else None


def host_batch(
    batch_size: int, block_tables: Any, seq_lens: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, page_size: int,
    max_q_len: int, max_kv_len: int,
) -> Indices:  # fmt: skip
    """The index arrays on the host, checked against one another."""
    check_shape(check_tensor(seq_lens, "seq_lens"), "seq_lens", {"batch_size": batch_size})
    lens = host_indices(seq_lens.view(torch.int32) if seq_lens.dtype is torch.uint32 else seq_lens, "seq_lens")
    qo_indptr = host_indices(cum_seq_lens_q, "cum_seq_lens_q", batch_size + 1)
    _check_sums(cum_seq_lens_kv, lens, page_size)
    if int(qo_indptr.diff().max()) > check_positive(max_q_len, "max_q_len"):
        raise ValidationError(f"max_q_len: expected at least {int(qo_indptr.diff().max())}, got {max_q_len}.")
    tables = check_tensor(block_tables, "block_tables")
    check_shape(tables, "block_tables", {"batch_size": batch_size, "pages": None})
    check_lengths(lens, tables.shape[1], page_size, check_positive(max_kv_len, "max_kv_len"), "max_kv_len")
    return indices_of(to_int32(tables, "block_tables"), lens, qo_indptr, 0, page_size)


def _check_sums(cum_seq_lens_kv: Any, lens: torch.Tensor, page_size: int) -> None:
    """They repeat the lengths: in tokens, or as vLLM passes them in pages. Those on a device are not waited for."""
    sums = check_tensor(cum_seq_lens_kv, "cum_seq_lens_kv")
    check_shape(sums, "cum_seq_lens_kv", {"batch_size + 1": lens.shape[0] + 1})
    pages = (lens + (page_size - 1)) // page_size
    if sums.is_cpu and not any(torch.equal(sums.long().diff(), given.long()) for given in (lens, pages)):
        raise ValidationError(
            f"cum_seq_lens_kv: expected the sums of seq_lens={lens.tolist()}, or of their pages, got {sums.tolist()}."
        )
