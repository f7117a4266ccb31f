"""Prefill and append attention of a batch over ragged keys and values, and what it shares with prefill over pages.

The API is FlashInfer's, with the argument names of its older and newer versions: see prefill.py.
"""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from quire.engine.checks import batch_size_of, check_flags, check_positive, host_indices, refuse
from quire.engine.foreign import foreign
from quire.engine.masks import with_items
from quire.engine.operands import takes_sinks, variant_of
from quire.engine.options import PlanOptions, Types, heads, logits_options, memoised, split_size
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec, check_repeated, host_lens
from quire.engine.tensors import converted
from quire.engine.wrapper import ForwardWrapper, Pair, PrefillKeywords
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BatchPrefillWithRaggedKVCacheWrapper"]


def head_dims(head_dim_qk: int | None, head_dim_vo: int | None, head_dim: int | None) -> tuple[int, int]:
    """head_dim_qk and head_dim_vo; `head_dim` is the older name for both."""
    if (head_dim_qk is None) == (head_dim is None):
        raise ValidationError(f"head_dim_qk: expected it or head_dim, got {head_dim_qk} and {head_dim}.")
    qk = check_positive(head_dim if head_dim_qk is None else head_dim_qk, "head_dim_qk")
    return qk, qk if head_dim_vo is None else check_positive(head_dim_vo, "head_dim_vo")


@memoised
def prefill_options(
    paged: bool, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int | None, head_dim_vo: int | None,
    head_dim: int | None, page_size: int | None, q_data_type: Any, kv_data_type: Any, o_data_type: Any, causal: bool,
    pos_encoding_mode: str, sm_scale: float | None, window_left: int, logits_soft_cap: float | None,
    fixed_split_size: int | None, disable_split_kv: bool, rope_scale: Any, rope_theta: Any,
    attention_chunk_size: int | None,
) -> PlanOptions:  # fmt: skip
    check_flags(causal=causal, disable_split_kv=disable_split_kv)
    qo, kv = heads(num_qo_heads, num_kv_heads)
    qk, vo = head_dims(head_dim_qk, head_dim_vo, head_dim)
    return PlanOptions(
        qo, kv, qk, vo, Types.of(q_data_type, kv_data_type, o_data_type),
        logits_options(
            qk, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, attention_chunk_size
        ),
        causal, check_positive(page_size, "page_size") if paged else 0, split_size(fixed_split_size, disable_split_kv),
    )  # fmt: skip


class BatchPrefillWithRaggedKVCacheWrapper(ForwardWrapper):
    """Attention of a batch of requests over ragged keys and values: the requests are concatenated in one tensor.

    The constructor's arguments are those of BatchPrefillWithPagedKVCacheWrapper, with kv_indptr_buf int32
    [batch_size + 1] instead of the buffers for pages.

    >>> wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> qo_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)  # 3 and 2 queries
    >>> kv_indptr = torch.tensor([0, 10, 14], dtype=torch.int32)  # 10 and 4 keys
    >>> wrapper.plan(qo_indptr, kv_indptr, num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_data_type=torch.bfloat16)
    >>> q, k, v = (torch.randn(n, heads, 64, dtype=torch.bfloat16) for n, heads in ((5, 8), (14, 2), (14, 2)))
    >>> wrapper.run(q, k, v).shape
    torch.Size([5, 8, 64])
    """

    @foreign(refused="variant_owns_mask")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None, *,
        qk_indptr_buf: torch.Tensor | None = None, variant: Variant | None = None, variant_owns_mask: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            variant_of(variant) if takes_sinks(jit_args) else variant_of(variant, jit_args, jit_kwargs),
            qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf, custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf, qk_indptr_buf=qk_indptr_buf,
        )  # fmt: skip
        self._takes_sinks = takes_sinks(jit_args)

    @foreign(
        refused="v_indptr o_indptr",
        permissions="use_fp16_qk_reduction allow_fp16_qk_reduction non_blocking uniform_q_len",
        added="head_dim_vo o_data_type",
    )
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int | None = None, head_dim_vo: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None, token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, v_indptr: torch.Tensor | None = None, o_indptr: torch.Tensor | None = None,
        *, head_dim: int | None = None, allow_fp16_qk_reduction: bool = False, attention_chunk_size: int | None = None,
        uniform_q_len: int | None = None, **operands: Any,
    ) -> None:  # fmt: skip
        """Plan a batch: qo_indptr and kv_indptr [batch_size + 1] are offsets into the rows of q, and of k and v.

        The other arguments are those of the paged wrapper's plan(), in FlashInfer's order (here window_left and
        logits_soft_cap come before sm_scale). v_indptr and o_indptr are refused: values have the offsets of keys, and
        results those of queries. Raises ValidationError or UnsupportedError.
        """
        options = prefill_options(
            False, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, head_dim, None, q_data_type, kv_data_type,
            o_data_type, causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, fixed_split_size,
            disable_split_kv, rope_scale, rope_theta, attention_chunk_size,
        )  # fmt: skip
        qo_indptr_host = host_indices(qo_indptr, "qo_indptr")
        batch = batch_size_of(qo_indptr_host, "qo_indptr")
        kv_indptr_host = host_indices(kv_indptr, "kv_indptr", batch + 1)
        lens = None if seq_lens is None else host_lens(seq_lens, batch)
        indices = Indices(batch, qo_indptr_host, 0, kv_indptr_host, None, None, 1, lens)
        most = max_token_per_sequence, max_sequence_kv
        if seq_lens_q is not None or most != (None, None):
            check_repeated(indices, seq_lens_q, None, *most)
        custom_mask = with_items(
            custom_mask, packed_custom_mask, indices, self._workspace.device, prefix_len_ptr, token_pos_in_items_ptr,
            token_pos_in_items_len, max_item_len_ptr,
        )  # fmt: skip
        self._set_plan(AttentionSpec(indices, options, custom_mask, packed_custom_mask, operands=operands))

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
        **options: Unpack[PrefillKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
        **options: Unpack[PrefillKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload  # with operands of a variant
    def run(self, *args: Any, **options: Any) -> Result: ...
    @foreign(refused="kv_cache_sf o_scale", checks_itself=True)
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, o_scale: float | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None, window_left: int | None = None, sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None, lse_base: str = "log2", lse_layout: str = "NH", **operands: Any,
    ) -> Result:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim_qk] over k [nnz_kv, num_kv_heads, head_dim_qk] and
        v [nnz_kv, num_kv_heads, head_dim_vo] (HND: heads first); returns o [nnz_qo, num_qo_heads, head_dim_vo], or
        (o, lse) with lse [nnz_qo, num_qo_heads] float32, base 2. Options as in the paged wrapper's run(), such as
        lse_base and lse_layout.
        """
        if scales:
            scales, return_lse = without_flag(scales, return_lse)
        if kv_cache_sf is not None or o_scale is not None:
            refuse(kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        if lse_base != "log2" or lse_layout != "NH":
            run = partial(
                self.run, q, k, v, *scales, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out,
                enable_pdl=enable_pdl, window_left=window_left, sinks=sinks, **operands,
            )  # fmt: skip
            return converted(run, lse, return_lse, lse_base, lse_layout)
        if scales and self._takes_sinks:
            sinks = self._sinks_and_scale(*scales)
        elif scales:
            q_scale, k_scale, v_scale = positional_scales(scales, q_scale, k_scale, v_scale)
        options = RunOptions(sinks, q_scale, k_scale, v_scale, window_left, enable_pdl, operands=operands)
        return self._runner().run(q, (k, v), out, lse, return_lse, options)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None, *,
        return_lse: bool = False, allow_fp16_qk_reduction: bool = False, **operands: Any,
    ) -> Result:  # fmt: skip
        """run() that also takes arguments of plan(), and plans again if they differ from those of the plan."""
        self._replan(locals())
        return self.run(q, k, v, return_lse=return_lse, **operands)


def without_flag(scales: tuple[Any, ...], return_lse: bool) -> tuple[tuple[Any, ...], bool]:
    """Scales by position without the return_lse that may follow them, and return_lse."""
    return (scales[:-1], scales[-1]) if isinstance(scales[-1], bool) else (scales, return_lse)


def positional_scales(scales: tuple[Any, ...], q_scale: Any, k_scale: Any, v_scale: Any) -> tuple[Any, Any, Any]:
    """run() takes k_scale and v_scale by position, or all three."""
    keywords = q_scale, k_scale, v_scale
    first = 0 if len(scales) == 3 else 1
    if len(scales) > 3 or any(value is not None for value in keywords[first : first + len(scales)]):
        raise ValidationError(f"k_scale, v_scale: expected each once, got {scales} by position besides keywords.")
    return (*keywords[:first], *scales, *keywords[first + len(scales) :])
