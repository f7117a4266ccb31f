"""The wrappers with plan() and run(). This file has those of flashinfer.attention, with its API: batches in which
prefills and decodes are mixed, sinks, and causal masks with ranges that are seen in both directions.
"""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from typing import Any

import torch

from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.attention.variants import causal_with_ranges
from quire.engine.attention import planned
from quire.engine.checks import (
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    device_of,
    host_indices,
    last_entry,
    last_of_lens,
    refuse,
    scalar,
)
from quire.engine.inspection import Explanation
from quire.engine.operands import OperandValue, int32_table
from quire.engine.operators import is_tracing
from quire.engine.options import foreign
from quire.engine.run import Result
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache
from quire.engine.wrapper import Pair
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import dtype_of, kv_dtype_of

__all__ = [
    "BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithCausalBidirectionalRangesWrapper",
]  # fmt: skip

_WORKSPACE_BYTES = 128 << 20


class BatchAttention:
    """Attention of a batch with prefills and decodes over a paged cache, with one plan and one launch.

    kv_layout: "NHD" or "HND". device: the device of all tensors, on which the wrapper allocates a workspace of 128 MiB.
        variant: a custom quire.Variant; plan() and run() then take the tensors and numbers that it reads, by name, as
        those of BatchPrefillWithPagedKVCacheWrapper do. deterministic: as there.

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
        self, kv_layout: str = "NHD", device: str | torch.device = "cuda", *, variant: Variant | None = None,
        deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        self.float_workspace_buffer = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device_of(device))
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self.float_workspace_buffer, kv_layout, variant=variant, deterministic=deterministic
        )

    @foreign(refused="use_profiler")
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, page_size: int, causal: bool = False,
        sm_scale: float | None = None, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16, kv_data_type: str | torch.dtype = torch.bfloat16,
        use_profiler: bool = False, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch: kv_len_arr int32 [batch_size] counts the tokens of each request.

        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan(). use_profiler=True is refused.
        Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.
        """
        lens, indptr = host_indices(kv_len_arr, "kv_len_arr"), host_indices(kv_indptr, "kv_indptr")
        if lens.shape[0] != indptr.shape[0] - 1:
            raise ValidationError(f"kv_len_arr: expected [{indptr.shape[0] - 1}] lengths, got {list(lens.shape)}.")
        last = last_of_lens(lens, indptr, check_positive(page_size, "page_size"))
        more: dict[str, Any] = operands
        self._wrapper.plan(
            qo_indptr, indptr, kv_indices, last, num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo,
            causal=causal, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
            kv_data_type=kv_data_type, **more,
        )  # fmt: skip

    @foreign(refused="profiler_buffer")
    def run(
        self, q: torch.Tensor, kv_cache: PagedCache, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        k_scale: Any = None, v_scale: Any = None, logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None, kv_cache_sf: Any = None, **operands: OperandValue,
    ) -> Pair:  # fmt: skip
        """(o [nnz_qo, num_qo_heads, head_dim_vo], lse [nnz_qo, num_qo_heads] float32, base 2).

        logits_soft_cap: the value given to plan(), or 0. k_scale, v_scale: numbers or tensors of one element.
        kv_cache_sf: as in the paged prefill wrapper's run(), whose errors this raises, too. Raises ValidationError for
        a cap that is not the planned one.
        """
        given = 0.0 if logits_soft_cap is None else scalar(logits_soft_cap, "logits_soft_cap")
        if given and given != (cap := self._wrapper._logits_soft_cap):
            raise ValidationError(f"logits_soft_cap: expected {cap} (fixed by plan()) or 0, got {logits_soft_cap}.")
        run = self._wrapper.run_return_lse
        return run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, kv_cache_sf=kv_cache_sf, **operands)

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

    @foreign(permissions="use_fp16_qk_reduction")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        q_data_type: str | torch.dtype = torch.bfloat16, kv_data_type: str | torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128, head_dim_vo: int = 128, window_left: int = -1, *, variant: Variant | None = None,
        deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
            variant=variant, deterministic=deterministic,
        )  # fmt: skip
        self._defaults = {
            "q_data_type": q_data_type, "kv_data_type": kv_data_type, "window_left": window_left,
            "pos_encoding_mode": pos_encoding_mode,
        }  # fmt: skip
        self._head_dims = check_positive(head_dim_qk, "head_dim_qk"), check_positive(head_dim_vo, "head_dim_vo")

    def plan(self, *args: Any, **options: Any) -> None:
        """plan() of the paged prefill wrapper; data types and window default to those of the constructor.

        Raises the errors of that plan(), and ValidationError for dims that are not the constructor's.
        """
        defaults = self._defaults if len(args) <= _POSITIONAL else {}
        super().plan(*args, **{**defaults, **options})

    begin_forward = plan

    def set_plan(self, spec: AttentionSpec) -> None:
        dims = spec.options.head_dim_qk, spec.options.head_dim_vo
        if dims != self._head_dims:
            raise ValidationError(
                f"head_dim_qk, head_dim_vo: expected {self._head_dims}, which the constructor was told, got {dims}."
            )
        super().set_plan(spec)

    def run(  # type: ignore[override]  # as in the surface
        self, q: torch.Tensor, paged_kv_cache: PagedCache, sink: torch.Tensor | None = None,
        sm_scale: float | None = None, *, sinks: torch.Tensor | None = None, **options: Any,
    ) -> Result:  # fmt: skip
        """run() of the paged prefill wrapper with `sink` float32 [num_qo_heads], logits (natural logarithm) that are
        added to the denominators. sm_scale: the factor of the logits; None: the one given to plan(). Raises PlanError
        before plan(), ValidationError for tensors that do not fit the plan.
        """
        if sink is not None and sinks is not None:
            raise ValidationError("sink: expected it or sinks, got both.")
        if sm_scale is not None:
            self._rescale(sm_scale)
        given = sinks if sink is None else sink
        if given is not None:
            check_same_device(check_tensor(given, "sink"), "sink", self.device)
        return super().run(q, paged_kv_cache, sinks=given, **options)


_POSITIONAL = 12  #: arguments of plan() that stand before those in BatchAttentionWithAttentionSinkWrapper._defaults


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
        """Plan a batch, as the paged prefill wrapper does; masks and causal windows are for run().

        Raises ValidationError for types and dims that are not the constructor's, and the errors of that plan().
        """
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

        Raises PlanError before plan(), ValidationError for tensors that do not fit the plan.
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
