"""Prefill and append attention: one request, or a batch over paged or ragged keys and values.

A wrapper's plan() takes the index arrays of a batch and picks, compiles and schedules a kernel; run() is then called
once per layer. The spellings of both FlashInfer generations are taken: `head_dim` and `head_dim_qk`, `qk_indptr_buf`
and `mask_indptr_buf`, `allow_fp16_qk_reduction` and `use_fp16_qk_reduction` (permissions, not orders: logits are always
reduced in float32), `begin_forward` and `forward`. `non_blocking` is a permission too: plans never wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec

import torch

from quire.errors import ValidationError
from quire.runtime.attention import Attention, AttentionSpec, Result, last_page_lens, page_indices, planned
from quire.runtime.checks import check_flags, check_positive, check_tensor, host_indices, refuse
from quire.runtime.layout import PagedCache
from quire.runtime.options import PlanOptions, Types, heads, logits_options, memoised, split_size
from quire.runtime.schedule import Indices
from quire.runtime.workspace import OwnWorkspace
from quire.runtime.wrapper import AttentionWrapper
from quire.types import KVLayout

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


P = ParamSpec("P")


def head_dims(head_dim_qk: int | None, head_dim_vo: int | None, head_dim: int | None) -> tuple[int, int]:
    """head_dim_qk and head_dim_vo; `head_dim` is the older spelling of both."""
    if (head_dim_qk is None) == (head_dim is None):
        raise ValidationError(f"head_dim_qk: expected it or head_dim, got {head_dim_qk} and {head_dim}.")
    qk = check_positive(head_dim if head_dim_qk is None else head_dim_qk, "head_dim_qk")
    return qk, qk if head_dim_vo is None else check_positive(head_dim_vo, "head_dim_vo")


@memoised
def _plan_options(
    num_qo_heads: int, num_kv_heads: int, head_dim_qk: int | None, head_dim_vo: int | None, head_dim: int | None,
    paged: bool, page_size: int | None, q_data_type: Any, kv_data_type: Any, o_data_type: Any, causal: bool,
    pos_encoding_mode: str, sm_scale: float | None, window_left: int, logits_soft_cap: float | None,
    use_fp16_qk_reduction: bool, allow_fp16_qk_reduction: bool, non_blocking: bool, fixed_split_size: int | None,
    disable_split_kv: bool, rope_scale: Any, rope_theta: Any, prefix_len_ptr: Any, token_pos_in_items_ptr: Any,
    token_pos_in_items_len: int, max_item_len_ptr: Any, seq_lens: Any = None, seq_lens_q: Any = None,
    block_tables: Any = None, max_token_per_sequence: Any = None, max_sequence_kv: Any = None,
) -> PlanOptions:  # fmt: skip
    check_flags(
        causal=causal, use_fp16_qk_reduction=use_fp16_qk_reduction, allow_fp16_qk_reduction=allow_fp16_qk_reduction,
        non_blocking=non_blocking, disable_split_kv=disable_split_kv,
    )  # fmt: skip
    refuse(
        rope_scale=rope_scale, rope_theta=rope_theta, prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr, token_pos_in_items_len=token_pos_in_items_len or None,
        max_item_len_ptr=max_item_len_ptr, seq_lens=seq_lens, seq_lens_q=seq_lens_q, block_tables=block_tables,
        max_token_per_sequence=max_token_per_sequence, max_sequence_kv=max_sequence_kv,
    )  # fmt: skip
    qo, kv = heads(num_qo_heads, num_kv_heads)
    qk, vo = head_dims(head_dim_qk, head_dim_vo, head_dim)
    return PlanOptions(
        qo, kv, qk, vo, Types.of(q_data_type, kv_data_type, o_data_type),
        logits_options(qk, sm_scale, window_left, logits_soft_cap, pos_encoding_mode), causal,
        check_positive(page_size, "page_size") if paged else 0, split_size(fixed_split_size, disable_split_kv),
    )  # fmt: skip


def _older_order(position: int) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Takes plan()'s arguments by position in the older order too: without head_dim_vo at `position`, and o_data_type.

    custom_mask, packed_custom_mask and causal stand there instead: a tensor, or a bool two places on, tells.
    """
    o_data_type = position + 13

    def decorate(plan: Callable[P, None]) -> Callable[P, None]:
        @wraps(plan)
        def either(*args: P.args, **kwargs: P.kwargs) -> None:
            rest = args[1 + position :] if len(args) > 1 + position else ()  # after self
            if rest and (isinstance(rest[0], torch.Tensor) or (len(rest) > 2 and isinstance(rest[2], bool))):
                args = (*args[: 1 + position], None, *rest)  # type: ignore[assignment]
                if len(args) > 1 + o_data_type:
                    args = (*args[: 1 + o_data_type], None, *args[1 + o_data_type :])  # type: ignore[assignment]
            plan(*args, **kwargs)

        return either

    return decorate


class BatchPrefillWithPagedKVCacheWrapper(AttentionWrapper):
    """Attention of a batch of requests over a paged cache.

    `float_workspace_buffer` (uint8, 128 MiB is plenty) holds partial results and decides the device. `kv_layout` is the
    order inside a page: "NHD" or "HND". `backend` is "auto" or one of `quire.backends()`.

    With `use_cuda_graph`, run() may be captured and plan() called again before each replay. The buffers are then
    needed, on the device: their lengths fix the batch size, page numbers are copied into paged_kv_indices_buf and the
    bits of a custom mask into custom_mask_buf. The first plan() fixes everything but lengths, and the most rows.

    plan() looks at the bits of a custom mask, to know which tiles of keys need them: plan again once they change.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        qk_indptr_buf: torch.Tensor | None = None,
    ) -> None:
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            qo_indptr_buf=qo_indptr_buf, paged_kv_indptr_buf=paged_kv_indptr_buf, custom_mask_buf=custom_mask_buf,
            paged_kv_indices_buf=paged_kv_indices_buf, paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            mask_indptr_buf=mask_indptr_buf, qk_indptr_buf=qk_indptr_buf,
        )  # fmt: skip

    @_older_order(8)
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int | None = None,
        page_size: int | None = None,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        head_dim: int | None = None,
        allow_fp16_qk_reduction: bool = False,
    ) -> None:
        """Plan a batch.

        qo_indptr [batch_size + 1] and paged_kv_indptr [batch_size + 1] are offsets into the rows of q and into
        paged_kv_indices; paged_kv_last_page_len [batch_size] counts the tokens of each last page (1..page_size). Host
        arrays plan without a synchronisation; device arrays are copied first. custom_mask is a flat bool tensor of
        sum(qo_len * kv_len) values and replaces `causal`; packed_custom_mask holds its bits, little-endian, each
        request from a byte of its own on. sm_scale defaults to 1 / sqrt(head_dim_qk); window_left counts the keys to
        the left of the diagonal that stay visible (-1: all); logits_soft_cap c gives c * tanh(logit / c), None or 0
        nothing.
        fixed_split_size (tokens) or disable_split_kv make a request's result independent of its neighbours.

        Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.
        """
        options = _plan_options(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, head_dim, True, page_size, q_data_type, kv_data_type,
            o_data_type, causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, use_fp16_qk_reduction,
            allow_fp16_qk_reduction, non_blocking, fixed_split_size, disable_split_kv, rope_scale, rope_theta,
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, seq_lens, seq_lens_q,
            block_tables, max_token_per_sequence, max_sequence_kv,
        )  # fmt: skip
        qo_indptr_host = _at_least_one(host_indices(qo_indptr, "qo_indptr"), "qo_indptr")
        batch = qo_indptr_host.shape[0] - 1
        kv_indptr = host_indices(paged_kv_indptr, "paged_kv_indptr", batch + 1)
        last = last_page_lens(paged_kv_last_page_len, "paged_kv_last_page_len", kv_indptr, options.page_size)
        pages = page_indices(paged_kv_indices)
        indices = Indices(batch, qo_indptr_host, 0, kv_indptr, last, pages, options.page_size)
        mask = None if packed_custom_mask is not None else custom_mask
        self._set_plan(AttentionSpec(indices, options, mask, packed_custom_mask))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *scales: float | None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Result:
        """Attention of q [nnz_qo, num_qo_heads, head_dim_qk] over the cache; returns o [nnz_qo, num_qo_heads,
        head_dim_vo], or (o, lse) with lse [nnz_qo, num_qo_heads] float32, base 2.

        The cache is a tensor [num_pages, 2, page_size, num_kv_heads, head_dim] (NHD; HND swaps page_size and
        num_kv_heads) or a pair of such tensors without the second dimension; only the last one must be contiguous.
        k_scale and q_scale multiply the logits, v_scale the output; `sinks` [num_qo_heads] float32 are logits that join
        each denominator. `out` and `lse` are written if given. `enable_pdl` lets a
        kernel that can be launched before its predecessor ends, and wait for it by itself (None: where that helps).
        """
        if kv_cache_sf is not None or skip_softmax_threshold_scale_factor is not None:
            refuse(kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        if scales:
            k_scale, v_scale = _positional_scales(scales, k_scale, v_scale)
        return planned(self._attention).run(
            q, paged_kv_cache, out=out, lse=lse, return_lse=return_lse, sinks=sinks, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, window_left=window_left, enable_pdl=enable_pdl,
        )  # fmt: skip

    def run_return_lse(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: float | None, **options: Any
    ) -> Result:
        """run() with return_lse=True."""
        return self.run(q, paged_kv_cache, *scales, **options, return_lse=True)

    def forward(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, k_scale: float | None = None, v_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool = False,
        allow_fp16_qk_reduction: bool = False,
    ) -> Result:  # fmt: skip
        """run() with arguments of plan(); plans again where they differ from what was planned."""
        check_flags(
            causal=causal, use_fp16_qk_reduction=use_fp16_qk_reduction, allow_fp16_qk_reduction=allow_fp16_qk_reduction
        )  # fmt: skip
        refuse(rope_scale=rope_scale, rope_theta=rope_theta)
        self._replan(pos_encoding_mode, sm_scale, window_left, logits_soft_cap, causal=causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **options: Any) -> Result:
        """forward() with return_lse=True."""
        return self.forward(q, paged_kv_cache, *args, **options, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(AttentionWrapper):
    """Attention of a batch of requests over ragged keys and values: one tensor each, requests one after another.

    The constructor's arguments are those of BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        qk_indptr_buf: torch.Tensor | None = None,
    ) -> None:
        refuse(jit_args=jit_args, jit_kwargs=jit_kwargs)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf, custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf, qk_indptr_buf=qk_indptr_buf,
        )  # fmt: skip

    @_older_order(5)
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int | None = None,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        head_dim: int | None = None,
        allow_fp16_qk_reduction: bool = False,
    ) -> None:
        """Plan a batch: qo_indptr and kv_indptr [batch_size + 1] are offsets into the rows of q, and of k and v.

        The other arguments are those of the paged wrapper's plan(), in the order of the surface (window_left and
        logits_soft_cap before sm_scale here). Raises ValidationError or UnsupportedError.
        """
        options = _plan_options(
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, head_dim, False, None, q_data_type, kv_data_type,
            o_data_type, causal, pos_encoding_mode, sm_scale, window_left, logits_soft_cap, use_fp16_qk_reduction,
            allow_fp16_qk_reduction, non_blocking, fixed_split_size, disable_split_kv, rope_scale, rope_theta,
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr,
        )  # fmt: skip
        qo_indptr_host = _at_least_one(host_indices(qo_indptr, "qo_indptr"), "qo_indptr")
        batch = qo_indptr_host.shape[0] - 1
        indices = Indices(batch, qo_indptr_host, 0, host_indices(kv_indptr, "kv_indptr", batch + 1), None, None, 1)
        mask = None if packed_custom_mask is not None else custom_mask
        self._set_plan(AttentionSpec(indices, options, mask, packed_custom_mask))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:
        """Attention of q [nnz_qo, num_qo_heads, head_dim_qk] over k [nnz_kv, num_kv_heads, head_dim_qk] and
        v [nnz_kv, num_kv_heads, head_dim_vo] (HND: heads first); returns o [nnz_qo, num_qo_heads, head_dim_vo], or
        (o, lse) with lse [nnz_qo, num_qo_heads] float32, base 2. Options as in the paged wrapper's run().
        """
        refuse(kv_cache_sf=kv_cache_sf, o_scale=o_scale)
        return planned(self._attention).run(
            q, (k, v), out=out, lse=lse, return_lse=return_lse, sinks=sinks, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, window_left=window_left, enable_pdl=enable_pdl,
        )  # fmt: skip

    def run_return_lse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Result:
        """run() with return_lse=True."""
        return self.run(q, k, v, **options, return_lse=True)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None, *,
        return_lse: bool = False, allow_fp16_qk_reduction: bool = False,
    ) -> Result:  # fmt: skip
        """run() with arguments of plan(); plans again where they differ from what was planned."""
        check_flags(
            causal=causal, use_fp16_qk_reduction=use_fp16_qk_reduction, allow_fp16_qk_reduction=allow_fp16_qk_reduction
        )  # fmt: skip
        refuse(rope_scale=rope_scale, rope_theta=rope_theta)
        self._replan(pos_encoding_mode, sm_scale, window_left, logits_soft_cap, causal=causal)
        return self.run(q, k, v, return_lse=return_lse)

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any
    ) -> Result:
        """forward() with return_lse=True."""
        return self.forward(q, k, v, *args, **options, return_lse=True)


def _at_least_one(indptr: torch.Tensor, name: str) -> torch.Tensor:
    if indptr.shape[0] == 0:
        raise ValidationError(f"{name}: expected [batch_size + 1] offsets, got none.")
    return indptr


def _positional_scales(
    scales: tuple[float | None, ...], k_scale: float | None, v_scale: float | None
) -> tuple[float | None, float | None]:
    """The older run() took k_scale and v_scale by position."""
    if len(scales) > 2 or k_scale is not None or (len(scales) == 2 and v_scale is not None):
        raise ValidationError(f"k_scale, v_scale: expected each once, got {scales} by position besides keywords.")
    return scales[0], scales[1] if len(scales) == 2 else v_scale


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    allow_fp16_qk_reduction: bool = False,
) -> Result:
    """Attention of one request: q [qo_len, num_qo_heads, head_dim_qk] over k [kv_len, num_kv_heads, head_dim_qk] and
    v [kv_len, num_kv_heads, head_dim_vo] (HND: heads first). custom_mask is a bool tensor [qo_len, kv_len].

    Returns o [qo_len, num_qo_heads, head_dim_vo], or (o, lse) with lse [qo_len, num_qo_heads] float32, base 2.
    """
    check_flags(
        causal=causal, use_fp16_qk_reduction=use_fp16_qk_reduction, allow_fp16_qk_reduction=allow_fp16_qk_reduction
    )  # fmt: skip
    refuse(
        scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf, rope_scale=rope_scale,
        rope_theta=rope_theta,
    )  # fmt: skip
    layout = KVLayout.of(kv_layout)
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        if check_tensor(tensor, name).dim() != 3:
            raise ValidationError(f"{name}: expected 3 dimensions, got {list(tensor.shape)}.")
    token, head = (0, 1) if layout is KVLayout.NHD else (1, 0)
    qo, kv = heads(q.shape[1], k.shape[head])
    if v.shape[token] != k.shape[token]:
        raise ValidationError(f"v: expected kv_len={k.shape[token]} tokens as in k, got {v.shape[token]}.")
    indices = Indices(
        1, torch.tensor([0, q.shape[0]], dtype=torch.int32), 0, torch.tensor([0, k.shape[token]], dtype=torch.int32),
        None, None, 1,
    )  # fmt: skip
    options = PlanOptions(
        qo, kv, q.shape[2], v.shape[2], Types.of(q.dtype, k.dtype, o_dtype),
        logits_options(q.shape[2], sm_scale, window_left, logits_soft_cap, pos_encoding_mode), causal, page_size=0,
    )  # fmt: skip
    mask = None if packed_custom_mask is not None else custom_mask
    spec = AttentionSpec(indices, options, mask, packed_custom_mask)
    return Attention(spec, layout, OwnWorkspace(q.device), backend).run(
        q, (k, v), out=None, lse=None, return_lse=return_lse, sinks=None, q_scale=None, k_scale=k_scale,
        v_scale=v_scale, window_left=None, enable_pdl=None,
    )  # fmt: skip


single_prefill_with_kv_cache_return_lse = partial(single_prefill_with_kv_cache, return_lse=True)
