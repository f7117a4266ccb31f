"""Attention of mixed batches in one call, and a wrapper for attention sinks.

The API is that of flashinfer.attention.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ValidationError
from quire.kernels.variant import Variant
from quire.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.runtime.attention import AttentionSpec, Result
from quire.runtime.checks import check_flags, check_positive, device_of, host_indices, refuse, scalar
from quire.runtime.explanation import Explanation
from quire.runtime.keywords import Pair
from quire.runtime.layout import PagedCache

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]

_WORKSPACE_BYTES = 128 << 20


class BatchAttention:
    """Attention of a batch with prefills and decodes over a paged cache, with one plan and one launch.

    kv_layout: "NHD" or "HND". device: the device of all tensors, on which the wrapper allocates a workspace of 128 MiB.
        variant: a custom quire.Variant; plan() and run() then take the tensors and numbers that it reads, by name, as
        those of BatchPrefillWithPagedKVCacheWrapper do.

    >>> wrapper = quire.BatchAttention("NHD", device="cpu")
    >>> int32 = {"dtype": torch.int32}
    >>> wrapper.plan(
    ...     torch.tensor([0, 3, 4], **int32), torch.tensor([0, 2, 3], **int32), torch.tensor([4, 0, 2], **int32),
    ...     torch.tensor([21, 16], **int32), num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64,
    ...     page_size=16, causal=True,
    ... )
    >>> q, cache = torch.randn(4, 8, 64).bfloat16(), torch.randn(6, 2, 16, 2, 64).bfloat16()
    >>> o, lse = wrapper.run(q, cache)
    >>> o.shape, lse.shape
    (torch.Size([4, 8, 64]), torch.Size([4, 8]))
    """

    def __init__(
        self, kv_layout: str = "NHD", device: str | torch.device = "cuda", *, variant: Variant | None = None
    ) -> None:
        self.float_workspace_buffer = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device_of(device))
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(self.float_workspace_buffer, kv_layout, variant=variant)

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int, causal: bool = False,
        sm_scale: float | None = None, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16, kv_data_type: str | torch.dtype = torch.bfloat16,
        use_profiler: bool = False, **operands: Any,
    ) -> None:  # fmt: skip
        """Plan a batch: kv_len_arr int32 [batch_size] counts the tokens of each request.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan(). use_profiler=True is refused.
        """
        refuse(use_profiler=use_profiler)
        lens, indptr = host_indices(kv_len_arr, "kv_len_arr"), host_indices(kv_indptr, "kv_indptr")
        if lens.shape[0] != indptr.shape[0] - 1:
            raise ValidationError(f"kv_len_arr: expected [{indptr.shape[0] - 1}] lengths, got {list(lens.shape)}.")
        last = lens - (indptr.diff() - 1).clamp_(min=0) * check_positive(page_size, "page_size")
        self._wrapper.plan(
            qo_indptr, indptr, kv_indices, last, num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo,
            causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type, **operands,
        )  # fmt: skip

    def run(
        self, q: torch.Tensor, kv_cache: PagedCache, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        k_scale: Any = None, v_scale: Any = None, logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None, kv_cache_sf: Any = None, **operands: Any,
    ) -> Pair:  # fmt: skip
        """(o [nnz_qo, num_qo_heads, head_dim_vo], lse [nnz_qo, num_qo_heads] float32, base 2).

        logits_soft_cap: the value given to plan(), or 0. k_scale, v_scale: numbers or tensors of one element.
        """
        refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        given = 0.0 if logits_soft_cap is None else scalar(logits_soft_cap, "logits_soft_cap")
        if given and given != (cap := self._wrapper._logits_soft_cap):
            raise ValidationError(f"logits_soft_cap: expected {cap} (fixed by plan()) or 0, got {logits_soft_cap}.")
        run = self._wrapper.run_return_lse
        return run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, **operands)

    def explain(self) -> Explanation:
        """Which kernel plan() chose, why the others were not chosen, and what was planned."""
        return self._wrapper.explain()


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper whose run() takes the sinks and sm_scale by position.

    q_data_type, kv_data_type, window_left: defaults for plan(). head_dim_qk, head_dim_vo: must be those given to
    plan(). The other arguments are those of BatchPrefillWithPagedKVCacheWrapper, whose run() takes sinks, too.

    >>> workspace = torch.empty(1 << 20, dtype=torch.uint8)
    >>> wrapper = quire.BatchAttentionWithAttentionSinkWrapper(workspace, head_dim_qk=64, head_dim_vo=64)
    >>> int32 = {"dtype": torch.int32}
    >>> indptr, indices, last = ([0, 2, 3], [4, 0, 2], [5, 16])  # offsets, page numbers, tokens in the last pages
    >>> wrapper.plan(
    ...     torch.tensor([0, 3, 5], **int32), *(torch.tensor(x, **int32) for x in (indptr, indices, last)), 8, 2, 64,
    ...     16, causal=True,
    ... )
    >>> q, cache = torch.randn(5, 8, 64).bfloat16(), torch.randn(6, 2, 16, 2, 64).bfloat16()
    >>> wrapper.run(q, cache, torch.zeros(8), 64**-0.5).shape
    torch.Size([5, 8, 64])
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        q_data_type: str | torch.dtype = torch.bfloat16, kv_data_type: str | torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128, head_dim_vo: int = 128, window_left: int = -1, *, variant: Variant | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
            variant=variant,
        )  # fmt: skip
        check_flags(use_fp16_qk_reduction=use_fp16_qk_reduction)
        self._defaults = {
            "q_data_type": q_data_type, "kv_data_type": kv_data_type, "window_left": window_left,
            "pos_encoding_mode": pos_encoding_mode,
        }  # fmt: skip
        self._head_dims = check_positive(head_dim_qk, "head_dim_qk"), check_positive(head_dim_vo, "head_dim_vo")

    def plan(self, *args: Any, **options: Any) -> None:
        """plan() of the paged prefill wrapper; data types and window default to those of the constructor."""
        defaults = self._defaults if len(args) <= _POSITIONAL else {}
        super().plan(*args, **{**defaults, **options})

    begin_forward = plan

    def _set_plan(self, spec: AttentionSpec) -> None:
        dims = spec.options.head_dim_qk, spec.options.head_dim_vo
        if dims != self._head_dims:
            raise ValidationError(
                f"head_dim_qk, head_dim_vo: expected {self._head_dims}, which the constructor was told, got {dims}."
            )
        super()._set_plan(spec)

    def run(  # type: ignore[override]  # as in the surface
        self, q: torch.Tensor, paged_kv_cache: PagedCache, sink: torch.Tensor | None = None,
        sm_scale: float | None = None, *, sinks: torch.Tensor | None = None, **options: Any,
    ) -> Result:  # fmt: skip
        """run() of the paged prefill wrapper with `sink` float32 [num_qo_heads], logits (natural logarithm) that are
        added to the denominators. sm_scale: the factor of the logits; None: the one given to plan().
        """
        if sink is not None and sinks is not None:
            raise ValidationError("sink: expected it or sinks, got both.")
        given = self._sinks_and_scale(sinks if sink is None else sink, sm_scale)
        return super().run(q, paged_kv_cache, sinks=given, **options)


_POSITIONAL = 12  #: arguments of plan() that stand before those in BatchAttentionWithAttentionSinkWrapper._defaults
