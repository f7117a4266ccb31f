"""Prefill under causal masks with ranges that are seen in both directions; the API is that of flashinfer.attention."""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from typing import Any

import torch

from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.attention.variants import causal_with_ranges
from quire.engine.attention import planned
from quire.engine.checks import check_positive, check_shape, check_tensor, host_indices, last_entry, refuse
from quire.engine.operands import int32_table
from quire.engine.operators import is_tracing
from quire.engine.options import foreign
from quire.engine.run import Result
from quire.engine.tensors import PagedCache
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.features import dtype_of, kv_dtype_of

__all__ = ["BatchPrefillWithCausalBidirectionalRangesWrapper"]


class BatchPrefillWithCausalBidirectionalRangesWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Paged prefill in which a query sees keys up to its own, and a range of keys in both directions, as the tokens of
    an image do. For ragged keys: quire.variants.causal_with_ranges in the ragged wrapper.

    q_data_type, kv_data_type, o_data_type, head_dim_qk, head_dim_vo: what plan() takes if it is not told, and must be
    given if it is. pos_encoding_mode: "NONE". The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.
    CUDA graphs are refused: the KV tiles that need the mask are found before the launch.

    >>> wrapper = quire.BatchPrefillWithCausalBidirectionalRangesWrapper(
    ...     torch.empty(1 << 20, dtype=torch.uint8), head_dim_qk=64, head_dim_vo=64
    ... )
    >>> int32 = {"dtype": torch.int32}
    >>> indptr, indices, last = ([0, 2, 3], [4, 0, 2], [5, 16])  # offsets, page numbers, tokens in the last pages
    >>> wrapper.plan(
    ...     torch.tensor([0, 3, 5], **int32), *(torch.tensor(x, **int32) for x in (indptr, indices, last)), 8, 2, 64, 16
    ... )
    >>> q, cache = torch.randn(5, 8, 64).bfloat16(), torch.randn(6, 2, 16, 2, 64).bfloat16()
    >>> ranges = torch.tensor([[18, 20]] * 3 + [[-1, -1]] * 2, **int32)  # the first request's queries see one another
    >>> wrapper.run(q, cache, ranges).shape
    torch.Size([5, 8, 64])
    """

    @foreign(refused="use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE", q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16, o_data_type: str | torch.dtype | None = None,
        head_dim_qk: int = 128, head_dim_vo: int = 128, *, backend: str = "auto", deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        if pos_encoding_mode != "NONE":
            refuse("NONE", pos_encoding_mode=pos_encoding_mode)
        super().__init__(
            float_workspace_buffer, kv_layout, backend=backend, variant=causal_with_ranges, deterministic=deterministic
        )
        self._built: dict[str, Any] = {
            "q_data_type": dtype_of(q_data_type, "q_data_type").torch,
            "kv_data_type": kv_dtype_of(kv_data_type, "kv_data_type").torch,
            "o_data_type": dtype_of(q_data_type if o_data_type is None else o_data_type, "o_data_type").torch,
            "head_dim_vo": check_positive(head_dim_vo, "head_dim_vo"),
            "head_dim_qk": check_positive(head_dim_qk, "head_dim_qk"),
        }  # fmt: skip
        self._seen: tuple[object, ...] | None = None  # the ranges and windows of the plan

    @foreign(
        refused="custom_mask packed_custom_mask causal pos_encoding_mode window_left prefix_len_ptr "
        "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr",
        permissions="use_fp16_qk_reduction non_blocking",
    )
    def plan(  # type: ignore[override]  # as in the surface
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        head_dim_vo: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True, prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None, token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    ) -> None:  # fmt: skip
        """Plan a batch, as the paged prefill wrapper does; masks and causal windows are for run()."""
        if logits_soft_cap:
            refuse(logits_soft_cap=logits_soft_cap)
        told: dict[str, Any] = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo}
        for name, kind in (("q_data_type", q_data_type), ("kv_data_type", kv_data_type), ("o_data_type", o_data_type)):
            known = kv_dtype_of if name == "kv_data_type" else dtype_of
            told[name] = None if kind is None else known(kind, name).torch
        for name, value in told.items():
            if value is not None and value != self._built[name]:
                raise ValidationError(
                    f"{name}: expected {self._built[name]}, as the constructor was told, got {value}."
                )
        offsets = host_indices(qo_indptr, "qo_indptr")
        num_rows = last_entry(offsets) if offsets.numel() else 0
        super().plan(
            offsets, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            page_size=page_size, sm_scale=sm_scale, max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
            ranges=torch.full((max(1, num_rows), 2), -1, dtype=torch.int32, device=self.device),
            first_row=int32_table(offsets[:-1], self.device), causal_window=-1, range_window=0, **self._built,
        )  # fmt: skip
        self._seen = None

    begin_forward = plan  # type: ignore[assignment]

    def run(  # type: ignore[override]  # as in the surface
        self, q: torch.Tensor, paged_kv_cache: PagedCache, bidirectional_ranges: torch.Tensor,
        causal_window_left: int = -1, range_window_left: int = -1, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:  # fmt: skip
        """run() of the paged prefill wrapper, in which a query sees the keys of its causal window and of its range.

        bidirectional_ranges: int32 [nnz_qo, 2], the first and the last key that each query sees in both directions,
            counted from the first key of its request; (-1, -1) for none. The first run() after a plan() finds the KV
            tiles that need the mask, and so does one with other ranges or windows: another tensor, or one that torch
            has written to. If other code writes to the tensor, call plan() again.
        causal_window_left: of the keys up to the query's own the last causal_window_left + 1 are seen; -1: all.
        range_window_left: of a range only keys are seen that are less than so many before the query; -1 or 0: all.
        kv_cache_sf: scales of a cache of 4 bits, as in the paged prefill wrapper.
        """
        rows = check_tensor(bidirectional_ranges, "bidirectional_ranges")
        windows = (
            max(-1, _window(causal_window_left, "causal_window_left")),
            _window(range_window_left, "range_window_left"),
        )
        version = None if rows.is_inference() else rows._version
        seen = (rows.data_ptr(), rows.shape, rows.stride(), version, *windows)
        if seen != self._seen:
            self._see(rows, windows)
            self._seen = seen
        return super().run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf,
        )  # fmt: skip

    def forward(self, *args: Any, **options: Any) -> Result:
        """run()."""
        return self.run(*args, **options)

    def _see(self, ranges: torch.Tensor, windows: tuple[int, int]) -> None:
        """Plan the same batch with other ranges."""
        if is_tracing():
            raise UnsupportedError("bidirectional_ranges: expected a call outside of torch.compile, as it may plan.")
        spec = planned(self._attention).same_batch()
        check_shape(ranges, "bidirectional_ranges", {"nnz_qo": spec.nnz_qo, "first and last key": 2})
        given: dict[str, Any] = {"causal_window": windows[0], "range_window": max(0, windows[1])}
        if ranges.shape[0]:
            given["ranges"] = ranges
        self.set_plan(spec._replace(operands={**spec.operands, **given}))


def _window(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise ValidationError(f"{name}: expected a number of keys, or -1 for all, got {value!r}.")
    return value
