"""Wrappers for batches in which prefills and decodes are mixed, or whose prefix lies in separate tensors.

The API of the wrappers for mixed batches and sinks is that of flashinfer.attention.

In multi-head latent attention the keys and values of a cached prefix (head dims 192 and 128) are expanded from
latents into separate tensors, for each chunk. The prefix and the new tokens are two levels of a cascade
(core/cascade.h). On the CPU and on Hopper one launch computes the row tiles of both, and merges their results.
"""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from typing import Any

import torch

from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.cache.merge import merge_state_in_place
from quire.engine.attention import Attention, planned
from quire.engine.checks import (
    batch_size_of,
    check_positive,
    check_same_device,
    check_tensor,
    device_of,
    host_indices,
    last_of_lens,
    scalar,
)
from quire.engine.device import max_ctas, on_cuda
from quire.engine.inspection import Explanation
from quire.engine.joined import check_kernel_for_prefix, with_prefix
from quire.engine.operands import Level, OperandValue, RemappedOperands, operands_of_levels, unexpected, variant_of
from quire.engine.options import foreign, options_of, refuse_parts
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import Indices, check_offsets
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache, ragged_view
from quire.engine.upcast import scales_of_values
from quire.engine.wrapper import AttentionWrapper, Pair
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.rewrite import variant_of_level
from quire.kernels.expressions.variant import Variant

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BatchPrefillWithPrefixWrapper"]

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
        kv_cache_sf: as in the paged prefill wrapper's run().
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
        """plan() of the paged prefill wrapper; data types and window default to those of the constructor."""
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
        added to the denominators. sm_scale: the factor of the logits; None: the one given to plan().
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


#: What to do in place of an attention to the prefix and one to the new tokens.
_IN_ONE_TENSOR = "put both sets of keys of a request into one tensor, and plan BatchPrefillWithRaggedKVCacheWrapper"
_TILE_ROWS = 128  #: of the kernel that merges both


class BatchPrefillWithPrefixWrapper(AttentionWrapper):
    """Attention of a batch of requests over two sets of ragged keys: those of a prefix, which all queries of a request
    see, and those of the new tokens after it.

    The constructor's arguments are those of BatchPrefillWithRaggedKVCacheWrapper, without CUDA graphs. Partial results
    need 4 * (head_dim_vo + 2) bytes of workspace for each query, head and set of keys. There are two launches and a
    merge if the workspace is smaller, if no kernel merges both sets, and, with backend="auto", if the queries alone
    fill a GPU, because two launches are then faster. explain() says which was planned. variant: a custom quire.Variant,
    whose positions count from the first key of the prefix; it takes two launches.

    >>> wrapper = quire.BatchPrefillWithPrefixWrapper(torch.empty(1 << 24, dtype=torch.uint8))
    >>> qo_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)  # 3 and 2 new tokens
    >>> prefix_indptr = torch.tensor([0, 10, 10], dtype=torch.int32)  # after a prefix of 10 tokens and none
    >>> wrapper.plan(qo_indptr, prefix_indptr, 8, 8, head_dim_qk=192, head_dim_vo=128, q_data_type=torch.bfloat16)
    >>> q, k, k_prefix = (torch.randn(n, 8, 192, dtype=torch.bfloat16) for n in (5, 5, 10))
    >>> v, v_prefix = (torch.randn(n, 8, 128, dtype=torch.bfloat16) for n in (5, 10))
    >>> wrapper.run(q, k, v, k_prefix, v_prefix).shape
    torch.Size([5, 8, 128])
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto",
        variant: Variant | None = None,
    ) -> None:  # fmt: skip
        self._of_requests = variant_of(variant)
        own = None if self._of_requests is None else variant_of_level(self._of_requests)
        super().__init__(float_workspace_buffer, kv_layout, False, backend, own)
        self._remapped: RemappedOperands | None = None  # once planned, what the variant reads
        self._prefix: Attention | None = None  # its plan, where it is a launch of its own
        self._apart = ""  # why

    def plan(
        self, qo_indptr: torch.Tensor, prefix_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, head_dim_vo: int | None = None, *, kv_indptr: torch.Tensor | None = None,
        causal: bool = True, sm_scale: float | None = None, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch.

        qo_indptr, prefix_indptr, kv_indptr: int32 [batch_size + 1], offsets into the rows of q, of k_prefix and
            v_prefix, and of k and v; kv_indptr defaults to qo_indptr.
        causal: among the new tokens, query i of a request sees keys up to i + kv_len - qo_len.
        operands: tensors and numbers, by name, that the mask of the constructor's variant reads.
        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan(). Raises ValidationError or
        UnsupportedError.
        """
        refuse_parts("BatchPrefillWithPrefixWrapper", None, _IN_ONE_TENSOR)
        options = _options(locals())
        qo = host_indices(qo_indptr, "qo_indptr")
        batch = batch_size_of(qo, "qo_indptr")
        own = qo if kv_indptr is None else host_indices(kv_indptr, "kv_indptr", batch + 1)
        prefix = host_indices(prefix_indptr, "prefix_indptr", batch + 1)
        check_offsets(prefix, "prefix_indptr", 2**31 - 1)
        indices = Indices(batch, qo, 0, own, None, None, 1)
        spec = AttentionSpec(indices, options)
        remapped = None
        if self._of_requests is not None:
            levels = Level(qo, prefix.diff()), Level.of(indices)
            remapped = operands_of_levels(self._of_requests, levels, options.num_qo_heads, self._workspace.device)
        self._plan_levels(spec, qo, prefix.clone(), [operands] * 2 if remapped is None else remapped.of_plan(operands))
        self._remapped = remapped

    def _plan_levels(
        self, spec: AttentionSpec, qo: torch.Tensor, prefix: torch.Tensor, operands: list[Any]
    ) -> None:  # fmt: skip
        """Plan both sets as one launch or, if that is impossible, as two."""
        assert isinstance(spec.indices, Indices)
        rows = torch.stack((qo[:-1], qo[1:]), 1).view(-1)
        try:
            if self._variant is not None:
                raise UnsupportedError("a custom variant is computed for each set of keys.")
            unexpected("plan", operands[1])
            self._check_one_launch_is_faster(spec)
            joined = with_prefix(spec, rows, prefix) if spec.nnz_qo else spec
            self.set_plan(check_kernel_for_prefix(joined, self._workspace.device, self._backend))
            self._apart, self._prefix = "", None
        except (UnsupportedError, ValidationError) as error:
            options = spec.options._replace(causal=False, variant=self._variant)
            prefixes = AttentionSpec(spec.indices._replace(kv_indptr=prefix), options, operands=operands[0])
            shared = Attention(prefixes, self._layout, self._workspace, self._backend)
            self.set_plan(spec._replace(operands=operands[1]))
            self._apart, self._prefix = str(error), shared

    def _check_one_launch_is_faster(self, spec: AttentionSpec) -> None:
        """Partial results of many row tiles cost more than the end of a launch, at which some SMs are idle."""
        device, tiles = self._workspace.device, spec.nnz_qo * spec.options.num_qo_heads // _TILE_ROWS
        if self._backend == "auto" and on_cuda(device) and tiles >= max_ctas(device, 1):
            raise UnsupportedError(f"{tiles} row tiles fill this GPU in each of two launches, which is faster.")

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_prefix: torch.Tensor, v_prefix: torch.Tensor, *,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        sinks: torch.Tensor | None = None, q_scale: float | None = None, k_scale: float | None = None,
        v_scale: float | None = None, enable_pdl: bool | None = None, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim_qk] over k_prefix [nnz_prefix, num_kv_heads, head_dim_qk] and
        v_prefix [nnz_prefix, num_kv_heads, head_dim_vo], and over k and v of the new tokens, with the same shapes (HND:
        heads first).

        Returns o [nnz_qo, num_qo_heads, head_dim_vo], or (o, lse) with lse [nnz_qo, num_qo_heads] float32, base 2.
        Options are as in BatchPrefillWithPagedKVCacheWrapper.run(); scales apply to both sets of keys. operands: what
        the score of the constructor's variant reads, by name.
        """
        attention = planned(self._attention)
        shared = self._prefix_rows(k_prefix, v_prefix)
        options = RunOptions(sinks, q_scale, k_scale, v_scale, enable_pdl=enable_pdl)
        if self._prefix is None:
            unexpected("run", operands)
            others = shared if attention.spec.options.prefix else ()
            return attention.run(q, (k, v), out, lse, return_lse, options._replace(others=others))
        of_prefix, own = [operands] * 2 if self._remapped is None else self._remapped.of_run(operands)
        scale, scales = scales_of_values(attention.spec.options, q, v_scale)
        options = options._replace(v_scale=None)  # results times it may be beyond the range that their sum is in
        o, statistics = attention.run(q, (k, v), out, lse, True, options._replace(operands=own))
        without_sinks = options._replace(sinks=None, operands=of_prefix)
        before = self._prefix.run(q, (k_prefix, v_prefix), return_lse=True, options=without_sinks)
        merge_state_in_place(o, statistics, before[0], before[1], v_scale=scale)
        if scales is not None:
            o.mul_(scales)
        return (o, statistics) if return_lse else o

    def _prefix_rows(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[nnz_prefix, num_kv_heads, dims], as long as planned."""
        rows = ragged_view(k, "k_prefix", self._layout)[0], ragged_view(v, "v_prefix", self._layout)[0]
        indices = planned(self._attention).spec.indices
        if self._prefix is None and isinstance(indices, Indices) and indices.prefix_indptr is not None:
            least = int(indices.prefix_indptr[-1])
            for tensor, name in zip(rows, ("k_prefix", "v_prefix"), strict=True):
                if tensor.shape[0] < least:
                    raise ValidationError(
                        f"{name}: expected at least {least} tokens (prefix_indptr[-1]), got {tensor.shape[0]}."
                    )
        return rows

    def explain(self) -> Explanation:
        """explain() as in every wrapper; its note says why there are two launches, if there are."""
        attention = planned(self._attention)
        if self._prefix is not None:
            attention._plan.note = f"the prefix is a launch of its own, and merged: {self._apart}"
        return attention.explain()


_options = options_of(BatchPrefillWithPrefixWrapper.plan)
