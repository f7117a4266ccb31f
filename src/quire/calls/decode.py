"""Decode with a block table and lengths in one call, without a plan. The lengths may be known only to the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.calls.tables import BlockTables, CacheParts, Scale, Target
from quire.engine.attention import Attention, Result
from quire.engine.batch import PaddedQueries
from quire.engine.checks import (
    check_flags,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    is_choice,
    refuse,
)
from quire.engine.device import UserWorkspace, Workspace
from quire.engine.launch import refuse_make_fx
from quire.engine.operands import of_plan_and_run, variant_of
from quire.engine.options import PlanOptions, Types, heads, logits_options
from quire.engine.plan_cache import replayed
from quire.engine.planner import NO_OPERANDS
from quire.engine.schedule import Lengths
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache
from quire.errors import ValidationError
from quire.kernels.expressions.rewrite import variant_without_mask
from quire.kernels.expressions.variant import Variant
from quire.kernels.types import KVLayout


@replayed
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: PagedCache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, max_seq_len: int, bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0, window_left: int = -1, out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, kv_layout: str = "NHD", enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: torch.Tensor | None = None,
    kv_cache_sf: Any = None, q_cu_seq_lens: torch.Tensor | None = None, *, backend: str = "auto",
    variant: Variant | None = None, **operands: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of the last q_len_per_req tokens of each request over its pages, like FlashInfer's function.

    query: [batch_size * q_len_per_req, num_qo_heads, head_dim] in float16 or bfloat16 (on the CPU also float32).
    kv_cache: one tensor [num_pages, 2, page_size, num_kv_heads, head_dim] (HND: heads before tokens; with 1 instead of
    2, the keys are also the values), or a pair of such 4-D tensors; in query's dtype, float8_e4m3fn or float8_e5m2,
    with any strides but a contiguous last dimension. block_tables [batch_size, pages] int32; entries beyond a request's
    last page are not read. seq_lens [batch_size] uint32 or int32 has the tokens of each request, including the
    q_len_per_req new ones; a request without tokens gives zeros. If they are on a GPU, only the GPU reads them: the
    host does not wait, the call may be captured in a CUDA graph, and lengths may change between replays.

    max_seq_len is an upper bound of seq_lens. Larger lengths on the host are refused; larger lengths on a GPU are cut
    off at the end of the page of token max_seq_len - 1. bmm1_scale, which is positive, is the whole factor of q . k,
    including 1 / sqrt(head_dim); bmm2_scale is the factor of the result. Either may be a tensor of one element, which
    is read on its device. window_left: how many keys to the left of its own a query sees; -1: all. sinks: float32
    logits (natural logarithm), one per query head, that are added to the denominators.

    With q_len_per_req > 1 queries are causal, unless `mask` says which of the new tokens each of them sees, such as a
    tree of draft tokens: uint16 [batch_size, q_len_per_req, ceil(q_len_per_req / 32) * 2], bit j of a row (16 in each
    word, lowest first) for new token j. All earlier tokens within the window are visible.

    workspace_buffer is for partial results, and need not be zeroed. out: in query's dtype, or in float8_e4m3fn, to
    which the result is rounded. With float8_e4m3fn, o_scale is the factor that the reader of `out` will apply;
    bmm2_scale must already contain its reciprocal.

    q_cu_seq_lens: int32 or uint32 [batch_size + 1], offsets into query, if requests have different numbers of new
    tokens, 0..q_len_per_req: query is then [q_cu_seq_lens[-1], num_qo_heads, head_dim] and mask [q_cu_seq_lens[-1],
    words]. Rows are copied to and from a batch with q_len_per_req rows per request, without a synchronisation.

    variant: a quire.Variant of the caller's own, whose operands are keywords. Its mask is evaluated for all keys.

    Returns [batch_size * q_len_per_req, num_qo_heads, head_dim], or `out`. Raises ValidationError naming
    the argument, or UnsupportedError with each kernel's reason. kv_cache_sf (4-bit caches) is refused.

    >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 16, 2, 64, dtype=torch.bfloat16)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> block_tables = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    >>> quire.xqa_batch_decode_with_kv_cache(
    ...     query, cache, torch.empty(1 << 20, dtype=torch.uint8), block_tables,
    ...     seq_lens=torch.tensor([21, 16], dtype=torch.int32), max_seq_len=32, bmm1_scale=64**-0.5,
    ... ).shape
    torch.Size([2, 8, 64])
    """
    refuse(kv_cache_sf=kv_cache_sf)
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    result: torch.Tensor = decode_block_tables(
        query, CacheParts.of(kv_cache, layout), workspace, block_tables, seq_lens, max_seq_len,
        Scale.of(bmm1_scale, "bmm1_scale", workspace.device, positive=True),
        Scale.of(bmm2_scale, "bmm2_scale", workspace.device), layout, q_len_per_req=q_len_per_req,
        q_cu_seq_lens=q_cu_seq_lens, window_left=window_left, out=out, sinks=sinks, enable_pdl=enable_pdl,
        o_scale=o_scale, mask=mask, backend=backend, variant=variant, operands=operands,
        call="xqa_batch_decode_with_kv_cache",
    )  # fmt: skip
    return result


@replayed
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: PagedCache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, max_seq_len: int, bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0, window_left: int = -1, out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None, o_sf_scale: Any = None, o_sf_vec_size: Any = None,
    sinks: torch.Tensor | None = None, kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto",
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: torch.Tensor | None = None,
    max_q_len: int | None = None, cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None, kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True, lse: torch.Tensor | None = None, return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None, multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False, cp_world: int = 1, cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None, bf16q_fp8kv_transform_mode: Any = None,
    request_order: torch.Tensor | None = None, request_order_plan: Any = None, *, variant: Variant | None = None,
    **operands: Any,
) -> Result:  # fmt: skip
    """xqa_batch_decode_with_kv_cache() with the arguments of FlashInfer's function of this name, by Quire's kernels.

    kv_layout defaults to "HND". out_dtype: the type of the result, query's or float8_e4m3fn. lse: float32 [batch_size *
    q_len_per_req, num_qo_heads], base 2, written if given and returned with return_lse=True. cum_seq_lens_q and
    max_q_len are q_cu_seq_lens and its q_len_per_req. The counter buffer is scratch memory that is not needed. All
    other arguments that xqa_batch_decode_with_kv_cache() does not have are refused.

    Returns the result, or (result, lse). Raises ValidationError or UnsupportedError.

    >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 2, 16, 64, dtype=torch.bfloat16)  # [num_pages, 2, num_kv_heads, page_size, head_dim]
    >>> block_tables = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    >>> quire.decode.trtllm_batch_decode_with_kv_cache(
    ...     query, cache, torch.empty(1 << 20, dtype=torch.uint8), block_tables,
    ...     seq_lens=torch.tensor([21, 16], dtype=torch.int32), max_seq_len=32, bmm1_scale=64**-0.5,
    ... ).shape
    torch.Size([2, 8, 64])
    """
    if multi_ctas_kv_counter_buffer is not None:
        check_tensor(multi_ctas_kv_counter_buffer, "multi_ctas_kv_counter_buffer")
    refuse(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf,
        separate_page_tables=not uses_shared_paged_kv_idx, bmm1_scale_log2=bmm1_scale_log2,
        enable_block_sparse_attention=enable_block_sparse_attention,
        cp_world=None if is_choice(cp_world, (1,)) else cp_world, cp_rank=cp_rank or None,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode, request_order=request_order,
        request_order_plan=request_order_plan,
    )  # fmt: skip
    if (cum_seq_lens_q is None) != (max_q_len is None):
        raise ValidationError(f"max_q_len: expected it beside cum_seq_lens_q, and only there, got {max_q_len}.")
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    return decode_block_tables(
        query, CacheParts.of(kv_cache, layout), workspace, block_tables, seq_lens, max_seq_len,
        Scale.of(bmm1_scale, "bmm1_scale", workspace.device, positive=True),
        Scale.of(bmm2_scale, "bmm2_scale", workspace.device), layout,
        q_len_per_req=q_len_per_req if max_q_len is None else max_q_len, q_cu_seq_lens=cum_seq_lens_q,
        window_left=window_left, out=out, out_dtype=out_dtype, sinks=sinks, enable_pdl=enable_pdl, o_scale=o_scale,
        mask=mask, lse=lse, return_lse=return_lse, backend=backend, variant=variant, operands=operands,
        call="trtllm_batch_decode_with_kv_cache",
    )  # fmt: skip


def decode_block_tables(
    query: torch.Tensor, cache: CacheParts, workspace: Workspace, block_tables: torch.Tensor | Lengths, seq_lens: Any,
    max_seq_len: int, logits_scale: Scale, v_scale: Scale, layout: KVLayout, *, q_len_per_req: int | None,
    q_cu_seq_lens: torch.Tensor | None, window_left: int, out: torch.Tensor | None, sinks: torch.Tensor | None,
    enable_pdl: bool | None, o_scale: float | None, mask: torch.Tensor | None, backend: str, out_dtype: Any = None,
    lse: torch.Tensor | None = None, return_lse: bool = False,
    pos_encoding: tuple[str, float | None, float | None] = ("NONE", None, None), q_nope: torch.Tensor | None = None,
    ckv_scales: torch.Tensor | None = None, variant: Variant | None = None, operands: Mapping[str, Any] = NO_OPERANDS,
    lse_unit: float = 1.0, call: str = "",
) -> Any:  # fmt: skip
    """The common part of the decode calls with block tables; takes their checked arguments.

    q_nope: with multi-head latent attention (MLA) the part of the queries that meets latents, the cache's values;
    `query` and the cache's keys are then the parts with positions. ckv_scales: of latents, one for each 128 dims.
    block_tables: or both tables and lengths, checked. lse_unit: LN2 for an lse in base e, in place of base 2. call: the
    public function that has `variant` and `operands`, for errors.
    """
    refuse_make_fx("decode on block tables")
    check_flags(enable_pdl=enable_pdl, return_lse=return_lse)
    if variant is not None or operands:
        of_plan_and_run(call, variant_of(variant), operands)
    q_len = 1 if q_len_per_req is None else check_positive(q_len_per_req, "q_len_per_req")
    most = check_positive(max_seq_len, "max_seq_len")
    tables, device = _tables(block_tables, seq_lens, workspace.device), workspace.device
    batch_size, num_rows = tables.batch_size, check_tensor(query, "query").shape[0]
    indices = tables if isinstance(tables, Lengths) else tables.indices(q_len, cache.page_size, most)
    others = tuple(tensor for tensor in (q_nope, ckv_scales) if tensor is not None)
    more: dict[str, Any] = {
        "sinks": sinks, "v_scale": v_scale.number, "enable_pdl": enable_pdl, "logits_scale_by": logits_scale.tensor,
        "o_scale_by": v_scale.tensor, "lse_unit": lse_unit,
    }  # fmt: skip
    rows = {"batch_size * q_len_per_req": batch_size * q_len} if q_cu_seq_lens is None else {"q_cu_seq_lens[-1]": None}
    check_shape(query, "query", {**rows, "num_qo_heads": None, "head_dim": cache.head_dim_qk})
    check_same_device(query, "query", device)
    target = Target.of(out, query, cache.head_dim_vo, o_scale, out_dtype)
    padded = None
    if q_cu_seq_lens is not None:
        padded = PaddedQueries.of(q_cu_seq_lens, num_rows, batch_size, q_len, device)
    if variant is not None:
        variant = variant_without_mask(variant)
        if padded is not None:
            variant, operands = padded.placed(variant, operands, query.shape[1])
    head_dim_qk = cache.head_dim_qk + (0 if q_nope is None else cache.head_dim_vo)
    options = PlanOptions(
        *heads(query.shape[1], cache.num_kv_heads), head_dim_qk, cache.head_dim_vo,
        Types.of(query.dtype, cache.tensors[-1].dtype, target.result.dtype),
        logits_options(head_dim_qk, logits_scale.number, window_left, None, *pos_encoding), q_len > 1,
        cache.page_size, is_mla=q_nope is not None, tile_scales=ckv_scales is not None, variant=variant,
    )  # fmt: skip
    if return_lse and lse is None:
        lse = _new_lse(query)
    if num_rows:
        tree_mask = None if mask is None else _tree_mask_bits(mask, batch_size, q_len, device, padded)
        q, o, statistics = (query, target.result, lse) if padded is None else padded.batch(query, target.result, lse)
        if padded is not None and q_nope is not None:
            others = (padded.rows(q_nope), *others[1:])
        Attention(AttentionSpec(indices, options, tree_mask=tree_mask), layout, workspace, backend).run(
            q, cache.as_given, out=o, lse=statistics, return_lse=False, q_scale=None, k_scale=None, window_left=None,
            others=others, operands=operands, **more,
        )  # fmt: skip
        if padded is not None:
            padded.unpad((o, target.result), (statistics, lse))
    elif sinks is not None:
        check_tensor(sinks, "sinks")
    result = target.finish()
    return (result, lse) if return_lse else result


def _new_lse(query: torch.Tensor) -> torch.Tensor:
    return torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)


def _tables(block_tables: Any, seq_lens: Any, device: torch.device) -> BlockTables | Lengths:
    return block_tables if isinstance(block_tables, Lengths) else BlockTables.of(block_tables, seq_lens, device)


def _tree_mask_bits(
    mask: Any, batch_size: int, q_len: int, device: torch.device, padded: PaddedQueries | None
) -> torch.Tensor:
    """The bytes of a tree mask, at a multiple of 4."""
    words = check_tensor(mask, "mask")
    if words.dtype is not torch.uint16:
        raise ValidationError(f"mask: expected dtype torch.uint16, 16 tokens a word, got {words.dtype}.")
    rows = {"batch_size": batch_size, "q_len_per_req": q_len} if padded is None else {"rows of query": padded.num_rows}
    check_shape(words, "mask", {**rows, "ceil(q_len / 32) * 2": 2 * -(-q_len // 32)})
    check_same_device(words, "mask", device)
    bits = words.contiguous().view(torch.uint8)
    if padded is not None:
        return padded.tree_mask(bits)
    return bits.clone() if bits.data_ptr() % 4 else bits
