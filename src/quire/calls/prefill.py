"""Prefill in one call, without a plan(): over a block table, and in the layouts of TensorRT-LLM's fmha_v2."""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quire.calls import BlockTables, Output, PagedKV, Scale, check_lengths, indices_of
from quire.engine.attention import AttentionCall
from quire.engine.checks import (
    check_flags,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    device_indices,
    host_indices,
    last_entry,
    number,
    to_int32,
)
from quire.engine.device import UserWorkspace
from quire.engine.operands import OperandValue, split_operands, variant_of
from quire.engine.options import LogitsOptions, PlanOptions, Types, foreign, heads, logits_options
from quire.engine.plan_cache import replayed
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import LEAST_TILE, Indices, Lengths
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout


@replayed
@foreign(
    refused="o_sf_scale o_sf_vec_size uses_spcompress uses_shared_paged_kv_idx",
    permissions="use_fp16_softmax skip_softmax_threshold_scale_factor multi_ctas_kv_counter_buffer",
)
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
    uses_spcompress: bool | None = None, backend: str = "auto", *, variant: Variant | None = None,
    **operands: OperandValue,
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
    of token max_kv_len - 1. kv_cache_sf: as in trtllm_batch_decode_with_kv_cache(). Caches of 8 or 4 bits and variants
    with a mask are planned on the host, which waits. variant: a quire.Variant of the caller's own, whose operands are
    keywords.

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
    check_flags(causal=causal, return_lse=return_lse, enable_pdl=enable_pdl)
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    cache = PagedKV.of(kv_cache, layout, kv_cache_sf=kv_cache_sf, backend=backend)
    batch = (check_positive(batch_size, "batch_size"), block_tables, seq_lens, cum_seq_lens_q, cum_seq_lens_kv)
    rows: dict[str, int | None] = {"nnz_qo": None, "num_qo_heads": None, "head_dim": cache.head_dim_qk}
    check_shape(check_tensor(query, "query"), "query", rows)
    check_same_device(query, "query", workspace.device)
    output = Output.of(out, query, cache.head_dim_vo, 1.0, out_dtype)
    own = variant_of(variant)
    needs_host = (own is not None and own.has_mask) or cache.tensors[0].itemsize == 1
    indices: Indices | Lengths | None = None
    if not needs_host:
        indices = _device_batch(*batch, cache, query, output.result, max_q_len, max_kv_len)
    if indices is None:
        indices = host_batch(*batch, cache.page_size, max_q_len, max_kv_len)
        assert indices.qo_indptr is not None
        check_shape(query, "query", {**rows, "nnz_qo": last_entry(indices.qo_indptr)})
    logits_scale = Scale.of_logits(bmm1_scale, "bmm1_scale", workspace.device)
    v_scale = Scale.of(bmm2_scale, "bmm2_scale", workspace.device)
    options = PlanOptions(
        *heads(query.shape[1], cache.num_kv_heads), cache.head_dim_qk, cache.head_dim_vo,
        Types.of(query.dtype, cache.tensors[0].dtype, output.result.dtype),
        logits_options(cache.head_dim_qk, logits_scale.number, window_left, None, "NONE"), causal, cache.page_size,
        variant=own,
    )  # fmt: skip
    of_mask, of_score = split_operands("trtllm_batch_context_with_kv_cache", options.variant, operands)
    if return_lse and lse is None:
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    run_options = RunOptions(
        sinks, v_scale=v_scale.number, enable_pdl=enable_pdl, logits_scale_by=logits_scale.tensor,
        o_scale_by=v_scale.tensor, others=cache.scales, operands=of_score,
    )  # fmt: skip
    spec = AttentionSpec(indices, options, operands=of_mask)
    AttentionCall(
        spec, query, cache.caller, workspace, layout, backend, output.result, lse, options=run_options
    ).attend()
    result = output.finish()
    return (result, lse) if return_lse else result


def _device_batch(
    batch_size: int, block_tables: Any, seq_lens: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, cache: PagedKV,
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
    tables.check_pages(cache)
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


_RAGGED = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V")
_PAGED = {"Q_PAGED_KV_NHD": KVLayout.NHD, "Q_PAGED_KV_HND": KVLayout.HND}
_MASKS = ("causal", "sliding_window", "chunked", "padding")


class _Inputs(NamedTuple):
    """The tensors of a call, whatever their layout was."""

    query: torch.Tensor  #: [nnz_qo, num_qo_heads, head_dim]
    k: torch.Tensor  #: ragged [nnz_kv, num_kv_heads, head_dim], or pages
    v: torch.Tensor
    layout: KVLayout
    is_paged: bool
    tables: torch.Tensor | None  #: int32 [batch_size, pages]

    @classmethod
    def of(cls, qkv: Any, input_layout: str, block_tables: Any) -> _Inputs:
        """ValidationError where `qkv` does not have the layout."""
        if input_layout not in (*_RAGGED, *_PAGED):
            names = ", ".join((*_RAGGED, *_PAGED))
            raise ValidationError(f"input_layout: expected one of {names}, got {input_layout!r}.")
        is_paged = input_layout in _PAGED
        if is_paged != (block_tables is not None):
            raise ValidationError(f"block_tables: expected {'it' if is_paged else 'None'} with {input_layout}.")
        parts = _parts(qkv, input_layout)
        tables = None
        if is_paged:
            parts, tables = _pages(parts, block_tables)
        for tensor, name in zip(parts, ("query", "keys", "values"), strict=True):
            dims = 4 if is_paged and name != "query" else 3
            if check_tensor(tensor, name).dim() != dims:
                raise ValidationError(f"qkv: expected {dims} dimensions of its {name}, got {list(tensor.shape)}.")
        query, k, v = parts
        return cls(query, k, v, _PAGED.get(input_layout, KVLayout.NHD), is_paged, tables)

    @property
    def page_size(self) -> int:
        """Tokens of a page; 0 without pages."""
        return self.k.shape[1 if self.layout is KVLayout.NHD else 2] if self.is_paged else 0

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2 if self.is_paged and self.layout is KVLayout.NHD else 1]

    @property
    def cache(self) -> PagedCache:
        return self.k, self.v


@replayed
@foreign(permissions="skip_softmax_threshold_scale_factor")
def trtllm_fmha_v2_prefill(
    qkv: Any, input_layout: str, workspace_buffer: torch.Tensor, seq_lens: torch.Tensor, max_q_len: int,
    max_kv_len: int, bmm1_scale: float, bmm2_scale: float, batch_size: int, cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor, block_tables: torch.Tensor | None = None, out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None, sinks: Any = None, pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None, mask_mode: str = "causal", window_left: int = -1,
    chunked_attention_size: int = 0, save_softmax_stats: bool = False, skip_softmax_threshold_scale_factor: float = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of a batch of requests, like FlashInfer's function.

    qkv, input_layout: "PACKED_QKV" [tokens, 3, num_heads, head_dim]; "CONTIGUOUS_Q_KV" (q [tokens, num_qo_heads,
        head_dim], kv [tokens, 2, num_kv_heads, head_dim]); "SEPARATE_Q_K_V" (q, k, v); "Q_PAGED_KV_NHD" (q, cache
        [num_pages, 2, page_size, num_kv_heads, head_dim]) and "Q_PAGED_KV_HND" with page_size and num_kv_heads swapped.
        A cache may be a pair; page numbers of both count from the first page of keys.
    seq_lens: int32 [batch_size], tokens of keys. cum_seq_lens_q, cum_seq_lens_kv: int32 [batch_size + 1], offsets.
        block_tables: int32 [batch_size, pages], of a pair [batch_size, 2, pages]. max_q_len and max_kv_len are upper
        bounds of the lengths. The scheduler runs on the host: if arrays are on a GPU, the call waits for it.
    bmm1_scale is the whole factor of q . k, bmm2_scale the factor of the result.
    mask_mode: "causal"; "sliding_window", of window_left keys to the left; "chunked", of chunked_attention_size; or
        "padding", which hides nothing. pos_encoding_mode: None or "alibi". logits_soft_cap_scale: 0 or None for none.
    sinks: float32 [num_qo_heads], logits (natural logarithm) that are added to each denominator.
    out, out_dtype: as in trtllm_batch_context_with_kv_cache(); 8-bit queries give bfloat16 if neither is given.
    skip_softmax_threshold_scale_factor: permits kernels to skip small weights; Quire's compute all of them.

    Returns o [tokens, num_qo_heads, head_dim], or with save_softmax_stats=True (o, stats), stats float32 [tokens,
    num_qo_heads, 2]. With (m, s) in them the logsumexp, base e, is m * sqrt(head_dim) * bmm1_scale + log(s), under a
    soft cap m * sqrt(head_dim) + log(s); s is 1. Raises ValidationError naming the argument, or UnsupportedError.

    >>> qkv = torch.randn(5, 3, 4, 64).bfloat16()
    >>> offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> quire.prefill.trtllm_fmha_v2_prefill(
    ...     qkv, "PACKED_QKV", torch.empty(1 << 20, dtype=torch.uint8), offsets.diff(), 3, 3, 64**-0.5, 1.0, 2, offsets,
    ...     offsets,
    ... ).shape
    torch.Size([5, 4, 64])
    """
    check_flags(save_softmax_stats=save_softmax_stats)
    workspace = UserWorkspace(workspace_buffer, "workspace_buffer")
    inputs = _Inputs.of(qkv, input_layout, block_tables)
    for tensor, name in zip(inputs[:3], ("query", "keys", "values"), strict=True):
        check_same_device(tensor, name, workspace.device)
    indices = _indices(
        inputs, check_positive(batch_size, "batch_size"), seq_lens, cum_seq_lens_q, cum_seq_lens_kv, max_q_len,
        max_kv_len,
    )  # fmt: skip
    query = wide_query(inputs.query, out, out_dtype)
    output = Output.of(out, query, inputs.v.shape[-1], 1.0, out_dtype)
    logits = _logits(
        query.shape[2], bmm1_scale, logits_soft_cap_scale, pos_encoding_mode, mask_mode, window_left,
        chunked_attention_size,
    )  # fmt: skip
    options = PlanOptions(
        *heads(query.shape[1], inputs.num_kv_heads), query.shape[2], inputs.v.shape[-1],
        Types.of(query.dtype, inputs.k.dtype, output.result.dtype), logits, mask_mode.lower() != "padding",
        inputs.page_size,
    )  # fmt: skip
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) if save_softmax_stats else None
    sinks = sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks
    AttentionCall(
        AttentionSpec(indices, options), query, inputs.cache, workspace, inputs.layout, out=output.result, lse=lse,
        options=RunOptions(sinks, v_scale=bmm2_scale),
    ).attend()  # fmt: skip
    result = output.finish()
    return result if lse is None else (result, _stats(lse, query.shape[2], logits))


def _parts(qkv: Any, input_layout: str) -> tuple[Any, ...]:
    """Queries, keys and values; with pages queries and the cache's one or two tensors."""
    sizes = {"PACKED_QKV": 3, "CONTIGUOUS_Q_KV": 2}
    whole: Any = qkv
    first: tuple[Any, ...] = ()
    if input_layout != "PACKED_QKV":
        count = 3 if input_layout == "SEPARATE_Q_K_V" else 2
        if not isinstance(qkv, (tuple, list)) or len(qkv) != count:
            raise ValidationError(f"qkv: expected {count} parts with {input_layout}, got {type(qkv).__name__}.")
        if input_layout not in sizes:
            return tuple(qkv)
        whole, first = qkv[1], (qkv[0],)
    size = sizes[input_layout]
    if check_tensor(whole, "qkv").dim() != 4 or whole.shape[1] != size:
        raise ValidationError(f"qkv: expected [tokens, {size}, heads, head_dim], got {list(whole.shape)}.")
    return (*first, *whole.unbind(1))


def _pages(parts: tuple[Any, ...], block_tables: Any) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Queries, pages of keys and of values, and one table of pages for both."""
    tables = check_tensor(block_tables, "block_tables")
    query, cache = parts
    if isinstance(cache, torch.Tensor):
        check_shape(tables, "block_tables", {"batch_size": None, "pages": None})
        if cache.dim() != 5 or cache.shape[1] != 2:
            raise ValidationError(f"qkv: expected a cache [num_pages, 2, ...], got {list(cache.shape)}.")
        return (query, *cache.unbind(1)), tables
    k, v = cache
    check_shape(tables, "block_tables", {"batch_size": None, "keys and values": 2, "pages": None})
    apart = v.data_ptr() - k.data_ptr()
    page_bytes = k.stride(0) * k.element_size()
    if apart % page_bytes or not torch.equal(tables[:, 1], tables[:, 0] + apart // page_bytes):
        raise UnsupportedError(
            "block_tables: expected the page of values of each page of keys at the same number in its tensor; pages of "
            "values that are numbered on their own are not supported."
        )
    return (query, k, v), tables[:, 0]


def _indices(
    inputs: _Inputs, batch_size: int, seq_lens: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, max_q_len: int,
    max_kv_len: int,
) -> Indices:  # fmt: skip
    if inputs.tables is not None:
        batch = batch_size, inputs.tables, seq_lens, cum_seq_lens_q, cum_seq_lens_kv
        return host_batch(*batch, inputs.page_size, max_q_len, max_kv_len)
    return ragged_batch(batch_size, seq_lens, cum_seq_lens_q, cum_seq_lens_kv, max_q_len, max_kv_len)


def ragged_batch(
    batch_size: int, seq_lens: Any, cum_seq_lens_q: Any, cum_seq_lens_kv: Any, max_q_len: int, max_kv_len: int
) -> Indices:
    """The index arrays of a ragged batch on the host, checked against one another."""
    lens = host_indices(seq_lens, "seq_lens", batch_size)
    qo_indptr = host_indices(cum_seq_lens_q, "cum_seq_lens_q", batch_size + 1)
    kv_indptr = host_indices(cum_seq_lens_kv, "cum_seq_lens_kv", batch_size + 1)
    if not torch.equal(kv_indptr.diff(), lens):
        raise ValidationError(f"cum_seq_lens_kv: expected the sums of seq_lens={lens.tolist()}.")
    for name, most, given in (("max_q_len", max_q_len, qo_indptr.diff()), ("max_kv_len", max_kv_len, lens)):
        if int(given.max()) > check_positive(most, name):
            raise ValidationError(f"{name}: expected at least {int(given.max())}, got {most}.")
    return Indices(batch_size, qo_indptr, 0, kv_indptr, None, None, 1)


def wide_query(query: torch.Tensor, out: torch.Tensor | None, out_dtype: Any) -> torch.Tensor:
    """Queries of 8 bits in the type of the result, which holds each of their values."""
    if query.element_size() > 1:
        return query
    given = out_dtype if out is None else out.dtype
    return query.to(torch.float16 if given in (torch.float16, "float16") else torch.bfloat16)


def _logits(
    head_dim: int, scale: float, soft_cap: float | None, pos_encoding_mode: str | None, mask_mode: str,
    window_left: int, chunk: int,
) -> LogitsOptions:  # fmt: skip
    for value, name in ((window_left, "window_left"), (chunk, "chunked_attention_size")):
        if not isinstance(value, int):
            raise ValidationError(f"{name}: expected an integer, got {value!r}.")
    mask = mask_mode.lower() if isinstance(mask_mode, str) else mask_mode
    if not isinstance(mask, str) or mask not in _MASKS:
        raise ValidationError(f"mask_mode: expected one of {', '.join(_MASKS)}, got {mask_mode!r}.")
    if (chunk > 0) != (mask == "chunked"):
        raise ValidationError(f"chunked_attention_size: expected it with mask_mode='chunked' alone, got {chunk}.")
    if window_left != -1 and mask != "sliding_window":
        raise ValidationError(f"window_left: expected it with mask_mode='sliding_window' alone, got {window_left}.")
    if pos_encoding_mode is not None and str(pos_encoding_mode).lower() not in ("alibi", "none"):
        raise ValidationError(f"pos_encoding_mode: expected None or 'alibi', got {pos_encoding_mode!r}.")
    mode = "NONE" if pos_encoding_mode is None else pos_encoding_mode.upper()
    factor = number(scale, "bmm1_scale", positive=True)
    return logits_options(head_dim, factor, window_left, soft_cap, mode, None, None, chunk or None)


def _stats(lse: torch.Tensor, head_dim: int, logits: LogitsOptions) -> torch.Tensor:
    """lse of base 2 as a maximum in the units of fmha_v2, and a sum of 1."""
    unit = math.sqrt(head_dim) * (1.0 if logits.logits_soft_cap else logits.sm_scale)
    largest = lse * (math.log(2) / unit)
    return torch.stack([largest, torch.ones_like(largest)], -1)
