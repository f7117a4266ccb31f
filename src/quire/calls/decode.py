"""Decode with a block table and lengths in one call, without a plan. The lengths may be known only to the GPU."""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quire.calls import BlockTables, Output, PagedKV, Scale, check_rank
from quire.engine.attention import AttentionCall
from quire.engine.batch import PaddedQueries
from quire.engine.checks import check_flags, check_positive, check_same_device, check_shape, check_tensor
from quire.engine.device import UserWorkspace, Workspace
from quire.engine.launch import refuse_make_fx
from quire.engine.operands import NO_OPERANDS, OperandValue, split_operands, variant_of
from quire.engine.options import PlanOptions, Types, foreign, heads, logits_options
from quire.engine.plan_cache import replayed
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import Indices, Lengths
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.rewrite import variant_without_mask
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout


class TableCall(NamedTuple):
    """Decode over a block table: the arguments of a public function, translated."""

    query: torch.Tensor  #: [rows, num_qo_heads, head_dim]; of latents the part with positions
    cache: PagedKV
    workspace: Workspace
    block_tables: torch.Tensor | Lengths  #: or both tables and lengths, checked
    seq_lens: Any
    max_seq_len: int
    logits_scale: Scale
    v_scale: Scale
    layout: KVLayout = KVLayout.NHD
    q_len: int | None = 1  #: rows of a request, at most those of one if q_cu_seq_lens says more
    q_cu_seq_lens: torch.Tensor | None = None
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: Any = None
    o_scale: float | None = 1.0
    lse: torch.Tensor | None = None
    return_lse: bool = False
    lse_unit: float = 1.0
    sinks: torch.Tensor | None = None
    enable_pdl: bool | None = None
    mask: torch.Tensor | None = None  #: which new tokens see which, as bits
    backend: str = "auto"
    pos_encoding: tuple[str, float | None, float | None] = ("NONE", None, None)  #: mode, scale and theta of RoPE
    q_nope: torch.Tensor | None = None  #: with latents (MLA): the part of the queries that meets the cache's values
    ckv_scales: torch.Tensor | None = None  #: of latents, one for each 128 dims
    variant: Variant | None = None
    operands: Mapping[str, Any] = NO_OPERANDS
    is_selected: bool = False  #: latents: block_tables are tokens, page number * page_size + index in the page
    deterministic: bool | None = None
    max_logits: bool = False  #: latents: lse is [rows, num_qo_heads, 2], of which the second is the maximum of logits
    name: str = ""  #: of the public function that has `variant` and `operands`, for errors

    @classmethod
    def of_latents(
        cls, query: tuple[torch.Tensor, torch.Tensor], kv_cache: tuple[torch.Tensor, ...], *arguments: Any,
        **options: Any,
    ) -> TableCall:  # fmt: skip
        """A call for the parts of queries [rows, num_heads, dims] and of latents [num_pages, page_size, dims], that
        which is the value first, and the scales of latents [num_pages, page_size, scales] if they have any.
        """
        (q_nope, q_pe), (ckv, kpe, *scales) = query, kv_cache
        check_shape(q_nope, "q_nope", {"rows": q_pe.shape[0], "num_heads": q_pe.shape[1], "head_dim": None})
        cache = PagedKV.of((kpe.unsqueeze(2), ckv.unsqueeze(2)), KVLayout.NHD, is_one_type=not scales)
        call = cls(q_pe, cache, *arguments, **options)
        return call._replace(q_nope=q_nope, ckv_scales=scales[0].unsqueeze(2) if scales else None)

    def attend(self) -> Any:
        """The result, or (result, lse)."""
        refuse_make_fx("decode on block tables")
        check_flags(enable_pdl=self.enable_pdl, return_lse=self.return_lse)
        if self.variant is not None or self.operands:
            split_operands(self.name, variant_of(self.variant), self.operands)
        most = 1 if self.q_len is None else check_positive(self.q_len, "q_len_per_req")
        q_len = most if self.q_cu_seq_lens is None else min(most, max(1, _num_rows(self.query)))
        indices = self._indices(q_len, check_positive(self.max_seq_len, "max_seq_len"))
        batch_size = indices.batch_size
        self._check_query(batch_size, q_len)
        output = Output.of(self.out, self.query, self.cache.head_dim_vo, self.o_scale, self.out_dtype)
        padded = None
        if self.q_cu_seq_lens is not None:
            rows = self.query.shape[0]
            padded = PaddedQueries.of(self.q_cu_seq_lens, rows, batch_size, (q_len, most), self.workspace.device)
        variant, operands = self._remapped_variant(padded)
        options = self._plan_options(q_len, output, variant)
        lse = self._new_lse() if self.return_lse and self.lse is None else self.lse
        if self.query.shape[0]:
            tree_mask = None if self.mask is None else self._tree_mask(batch_size, q_len, most, padded)
            spec = AttentionSpec(indices, options, tree_mask=tree_mask)
            self._attend_rows(spec, output.result, lse, padded, operands)
        elif self.sinks is not None:
            check_tensor(self.sinks, "sinks")
        result = output.finish()
        return (result, lse) if self.return_lse else result

    def _indices(self, q_len: int, most: int) -> Indices | Lengths:
        if isinstance(self.block_tables, Lengths):
            return self.block_tables
        tables = BlockTables.of(self.block_tables, self.seq_lens, self.workspace.device)
        check_tensor(self.query, "query")
        if not self.is_selected:
            tables.check_pages(self.cache)
        return tables.indices(q_len, self._page_size, most)

    @property
    def _page_size(self) -> int:
        """Tokens of what block_tables name."""
        return 1 if self.is_selected else self.cache.page_size

    def _new_lse(self) -> torch.Tensor:
        shape = (*self.query.shape[:2], 2) if self.max_logits else self.query.shape[:2]
        return torch.empty(shape, dtype=torch.float32, device=self.query.device)

    def _check_query(self, batch_size: int, q_len: int) -> None:
        rows: dict[str, int | None] = {"batch_size * q_len_per_req": batch_size * q_len}
        if self.q_cu_seq_lens is not None:
            rows = {"q_cu_seq_lens[-1]": None}
        sizes = {**rows, "num_qo_heads": None, "head_dim": self.cache.head_dim_qk}
        check_shape(check_tensor(self.query, "query"), "query", sizes)
        check_same_device(self.query, "query", self.workspace.device)

    def _remapped_variant(self, padded: PaddedQueries | None) -> tuple[Variant | None, Mapping[str, Any]]:
        """The variant for the rows that the kernel sees, and its operands."""
        if self.variant is None:
            return None, self.operands
        variant = variant_without_mask(self.variant)
        return (
            (variant, self.operands) if padded is None else padded.remapped(variant, self.operands, self.query.shape[1])
        )

    def _plan_options(self, q_len: int, output: Output, variant: Variant | None) -> PlanOptions:
        cache = self.cache
        head_dim_qk = cache.head_dim_qk + (0 if self.q_nope is None else cache.head_dim_vo)
        return PlanOptions(
            *heads(self.query.shape[1], cache.num_kv_heads), head_dim_qk, cache.head_dim_vo,
            Types.of(self.query.dtype, cache.tensors[-1].dtype, output.result.dtype),
            logits_options(head_dim_qk, self.logits_scale.number, self.window_left, None, *self.pos_encoding),
            q_len > 1, self._page_size, is_mla=self.q_nope is not None, tile_scales=self.ckv_scales is not None,
            variant=variant, cache_page=cache.page_size if self.is_selected else 1, max_logits=self.max_logits,
            decodes=self.q_cu_seq_lens is None, deterministic=self.deterministic,
        )  # fmt: skip

    def _attend_rows(
        self, spec: AttentionSpec, out: torch.Tensor, lse: torch.Tensor | None, padded: PaddedQueries | None,
        operands: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Write out and lse, by way of copies if requests have different numbers of rows."""
        q, o, statistics = (self.query, out, lse) if padded is None else padded.batch(self.query, out, lse)
        q_nope = self.q_nope if padded is None or self.q_nope is None else padded.rows(self.q_nope)
        options = RunOptions(
            self.sinks, v_scale=self.v_scale.number, enable_pdl=self.enable_pdl,
            logits_scale_by=self.logits_scale.tensor, o_scale_by=self.v_scale.tensor, lse_unit=self.lse_unit,
            others=tuple(tensor for tensor in (q_nope, self.ckv_scales, *self.cache.scales) if tensor is not None),
            operands=operands,
        )  # fmt: skip
        AttentionCall(
            spec, q, self.cache.caller, self.workspace, self.layout, self.backend, o, statistics, options=options
        ).attend()
        if padded is not None:
            padded.unpad((o, out), (statistics, lse))

    def _tree_mask(self, batch_size: int, q_len: int, most: int, padded: PaddedQueries | None) -> torch.Tensor:
        """The bytes of a tree mask, at a multiple of 4."""
        words = check_tensor(self.mask, "mask")
        if words.dtype is not torch.uint16:
            raise ValidationError(f"mask: expected dtype torch.uint16, 16 tokens a word, got {words.dtype}.")
        rows = {"batch_size": batch_size, "q_len_per_req": q_len}
        rows = rows if padded is None else {"rows of query": padded.num_rows}
        check_shape(words, "mask", {**rows, "ceil(q_len / 32) * 2": 2 * -(-most // 32)})
        check_same_device(words, "mask", self.workspace.device)
        bits = words[..., : 2 * -(-q_len // 32)].contiguous().view(torch.uint8)
        if padded is not None:
            return padded.tree_mask(bits)
        return bits.clone() if bits.data_ptr() % 4 else bits


def _num_rows(query: Any) -> int:
    """The rows of all requests together: no request has more, whatever the caller's bound says."""
    return sum(check_tensor(query, "query").shape[:1])


@replayed
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: PagedCache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, max_seq_len: int, bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0, window_left: int = -1, out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, kv_layout: str = "NHD", enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: torch.Tensor | None = None,
    kv_cache_sf: Any = None, q_cu_seq_lens: torch.Tensor | None = None, *, backend: str = "auto",
    variant: Variant | None = None, **operands: OperandValue,
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

    kv_cache_sf: the scales of a cache of 4 bits (NVFP4), uint8 [..., head_dim / 2]: float8_e4m3fn [..., head_dim / 16]
    in the shape and order of kv_cache, with any strides. bmm1_scale and bmm2_scale then contain the global scales.

    Returns [batch_size * q_len_per_req, num_qo_heads, head_dim], or `out`. Raises ValidationError naming
    the argument, or UnsupportedError with each kernel's reason.

    >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 16, 2, 64, dtype=torch.bfloat16)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> block_tables = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    >>> quire.xqa_batch_decode_with_kv_cache(
    ...     query, cache, torch.empty(1 << 20, dtype=torch.uint8), block_tables,
    ...     seq_lens=torch.tensor([21, 16], dtype=torch.int32), max_seq_len=32, bmm1_scale=64**-0.5,
    ... ).shape
    torch.Size([2, 8, 64])
    """
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    cache = PagedKV.of(kv_cache, layout, kv_cache_sf=kv_cache_sf, backend=backend)
    result: torch.Tensor = TableCall(
        query, cache, workspace, block_tables, seq_lens, max_seq_len,
        Scale.of_logits(bmm1_scale, "bmm1_scale", workspace.device),
        Scale.of(bmm2_scale, "bmm2_scale", workspace.device), layout, q_len=q_len_per_req,
        q_cu_seq_lens=q_cu_seq_lens, window_left=window_left, out=out, sinks=sinks, enable_pdl=enable_pdl,
        o_scale=o_scale, mask=mask, backend=backend, variant=variant, operands=operands,
        name="xqa_batch_decode_with_kv_cache",
    ).attend()  # fmt: skip
    return result


@replayed
@foreign(
    refused="o_sf_scale o_sf_vec_size uses_shared_paged_kv_idx bmm1_scale_log2 "
    "enable_block_sparse_attention "
    "bf16q_fp8kv_transform_mode request_order request_order_plan",
    permissions="multi_ctas_kv_counter_buffer skip_softmax_threshold_scale_factor",
)
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
    **operands: OperandValue,
) -> Result:  # fmt: skip
    """xqa_batch_decode_with_kv_cache() with the arguments of FlashInfer's function of this name, by Quire's kernels.

    kv_layout defaults to "HND". out_dtype: the type of the result, query's or float8_e4m3fn. lse: float32 [batch_size *
    q_len_per_req, num_qo_heads], base 2, written if given and returned with return_lse=True. cum_seq_lens_q and
    max_q_len are q_cu_seq_lens and its q_len_per_req. kv_cache_sf: scales in the order of the cache; with
    backend="trtllm-gen", for which FlashInfer interleaves those of values, they are refused. The counter buffer is
    scratch memory that is not needed, and skip_softmax_threshold_scale_factor permits to skip small weights, which
    Quire's kernels do not. All other arguments that xqa_batch_decode_with_kv_cache() does not have are refused.

    causal_seqlens_kv_global: int32 [batch_size], the tokens of each request before its first row, on all ranks
    together, where token t is on rank t % cp_world and this is rank cp_rank. Row j sees the first
    max(0, (causal_seqlens_kv_global + j - cp_rank) // cp_world + 1) of this rank's keys, of which seq_lens counts all.
    Not beside window_left, mask, cum_seq_lens_q or a variant.

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
    if (cum_seq_lens_q is None) != (max_q_len is None):
        raise ValidationError(f"max_q_len: expected it beside cum_seq_lens_q, and only there, got {max_q_len}.")
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    cache = PagedKV.of(kv_cache, layout, kv_cache_sf=kv_cache_sf, backend=backend)
    q_len, tables = q_len_per_req if max_q_len is None else max_q_len, block_tables
    check_rank(cp_world, cp_rank, causal_seqlens_kv_global)
    if causal_seqlens_kv_global is not None:
        has_places = window_left != -1 or mask is not None or cum_seq_lens_q is not None or variant is not None
        if has_places or q_len is None:
            raise UnsupportedError(
                "causal_seqlens_kv_global: expected None beside window_left, mask, cum_seq_lens_q or a variant, as "
                "kernels do not know where the keys of a rank stand in their request."
            )
        local = BlockTables.of(block_tables, seq_lens, workspace.device)
        tables, seq_lens = local.row_by_row(
            causal_seqlens_kv_global, check_positive(q_len, "q_len_per_req"), cp_world, cp_rank
        )
        q_len = 1
    return TableCall(
        query, cache, workspace, tables, seq_lens, max_seq_len,
        Scale.of_logits(bmm1_scale, "bmm1_scale", workspace.device),
        Scale.of(bmm2_scale, "bmm2_scale", workspace.device), layout, q_len=q_len, q_cu_seq_lens=cum_seq_lens_q,
        window_left=window_left, out=out, out_dtype=out_dtype, sinks=sinks, enable_pdl=enable_pdl, o_scale=o_scale,
        mask=mask, lse=lse, return_lse=return_lse, backend=backend, variant=variant, operands=operands,
        name="trtllm_batch_decode_with_kv_cache",
    ).attend()  # fmt: skip
