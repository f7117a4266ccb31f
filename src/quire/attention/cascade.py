"""Cascade attention: requests that share prefixes read each shared part once.

MultiLevelCascadeAttentionWrapper attends to all levels in one launch, which also merges their results
(engine/joined.py). This works on the CPU, on Hopper, and on other GPUs if `backend` forces a kernel that supports it.
The wrappers whose shared keys are in separate tensors do the same on the CPU and on Hopper. In all other cases each
level is an attention call that returns its log-sum-exp, and further calls merge the results. The API is FlashInfer's
(https://docs.flashinfer.ai/api/cascade.html).

In multi-head latent attention the keys and values of a cached prefix (head dims 192 and 128) are expanded from
latents into separate tensors, for each chunk. BatchPrefillWithPrefixWrapper takes the prefix and the new tokens as two
levels of a cascade (core/schedule.h). On the CPU and on Hopper one launch computes the row tiles of both, and merges
their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch

from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.attention.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    batch_decode_with_shared_prefix_padded_kv_cache,
)
from quire.cache import merge_state, merge_state_in_place, merge_state_v2, merge_states
from quire.engine.attention import Attention, planned
from quire.engine.checks import batch_size_of, check_flags, check_positive, host_indices
from quire.engine.device import max_ctas, on_cuda
from quire.engine.inspection import Explanation
from quire.engine.joined import check_kernel_for_levels, check_kernel_for_prefix, flat_levels, join_levels, with_prefix
from quire.engine.operands import Level, OperandValue, RemappedOperands, operands_of_levels, unexpected, variant_of
from quire.engine.options import is_deterministic, options_of, refuse_parts
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import Indices, check_offsets
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache, ragged_view
from quire.engine.upcast import scales_of_values
from quire.engine.wrapper import AttentionWrapper
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.rewrite import variant_of_level
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import PosEncodingMode

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper", "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper", "batch_decode_with_shared_prefix_padded_kv_cache", "merge_state",
    "merge_state_in_place", "merge_state_v2", "merge_states",
]  # fmt: skip

#: What to do in place of a launch for each level.
_OF_LEVELS = "plan BatchPrefillWithPagedKVCacheWrapper on all pages of each request"
_LevelCall = tuple[BatchPrefillWithPagedKVCacheWrapper, list[Any], dict[str, Any]]


class MultiLevelCascadeAttentionWrapper:
    """Attention over a tree of shared prefixes in one paged cache. Most requests share level 0, none share the last.

    num_levels: the number of levels. float_workspace_buffer, kv_layout, use_cuda_graph and backend are as in
    BatchPrefillWithPagedKVCacheWrapper, and so are the buffers, one per level. variant: a custom quire.Variant.
    deterministic: True plans one attention over all keys of each request, whose bits are those of a batch without
    levels. Shared pages must be full, and CUDA graphs and variants are refused. None: as the environment says.

    >>> wrapper = quire.MultiLevelCascadeAttentionWrapper(2, torch.empty(1 << 20, dtype=torch.uint8))
    >>> int32 = {"dtype": torch.int32}
    >>> wrapper.plan(
    ...     [torch.tensor([0, 2], **int32), torch.tensor([0, 1, 2], **int32)],  # both queries, then one each
    ...     [torch.tensor([0, 3], **int32), torch.tensor([0, 1, 2], **int32)],  # 3 pages for both, 1 for each
    ...     [torch.tensor([0, 1, 2], **int32), torch.tensor([3, 4], **int32)],  # the numbers of the pages
    ...     [torch.tensor([16], **int32), torch.tensor([7, 9], **int32)],  # tokens in the last pages
    ...     num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16, q_data_type=torch.bfloat16,
    ... )
    >>> q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> wrapper.run(q, torch.randn(5, 2, 16, 2, 64, dtype=torch.bfloat16)).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf_arr: Any = None, paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None, paged_kv_last_page_len_buf_arr: Any = None, *, backend: str = "auto",
        variant: Variant | None = None, deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        if (count := check_positive(num_levels, "num_levels")) > 1024:
            raise ValidationError(f"num_levels: expected at most 1024, got {count}.")
        arrays: dict[str, Any] = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr, "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }  # fmt: skip
        buffers = _of_levels({name: array for name, array in arrays.items() if array is not None}, count)
        self._joined = BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, backend=backend, deterministic=deterministic
        )
        self._apart = "not planned"  # why levels are planned one by one; "": they are one launch
        self._variant = variant_of(variant)
        self._operands: RemappedOperands | None = None  # once planned, what the variant reads
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, backend=backend, deterministic=deterministic,
                variant=None if self._variant is None else variant_of_level(self._variant),
                **{name.removesuffix("_arr"): buffer for name, buffer in of_level.items()},
            )
            for of_level in buffers
        ]  # fmt: skip

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Use another buffer from the next plan() on. No int workspace is needed: plans own their index arrays."""
        self._joined.reset_workspace_buffer(float_workspace_buffer)
        for i, level in enumerate(self._levels):
            level.reset_workspace_buffer(
                float_workspace_buffer, None if int_workspace_buffers is None else int_workspace_buffers[i]
            )

    def plan(
        self, qo_indptr_arr: Sequence[torch.Tensor], paged_kv_indptr_arr: Sequence[torch.Tensor],
        paged_kv_indices_arr: Sequence[torch.Tensor], paged_kv_last_page_len: Sequence[torch.Tensor],
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, *, allow_fp16_qk_reduction: bool = False,
        **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan all levels. The arguments are those of the paged prefill wrapper's plan(), with index arrays per level.

        An entry of level i is a group of requests that share pages; qo_indptr_arr[i] gives the query rows of each
        group. `causal` applies to the last level, whose last key has the position of the last query; all keys of
        earlier levels are visible.

        All levels run in one launch if the kernel supports it (quire:cpu, quire:fa3; with `backend` also quire:fa2 and
        quire:decode), the workspace is large enough for its partial results, and CUDA graphs are off; explain() says
        so. plan() then copies page numbers that are on a device; otherwise each run() reads the caller's tensors. With
        a variant each level is a launch. In a variant, positions refer to whole requests: kv_idx counts from the first
        key of a request in level 0. operands: tensors and numbers that the variant's mask reads.

        Raises the errors of the paged prefill wrapper's plan(). The previous plan then stays valid.
        """
        options = dict(locals())
        arrays = {name: options.pop(name) for name in ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr")}
        arrays["paged_kv_last_page_len"] = options.pop("paged_kv_last_page_len")
        del options["self"], options["causal"], options["operands"]
        levels = [copy(level) for level in self._levels]
        tables = _of_levels(arrays, len(levels))
        check_flags(causal=causal)
        if window_left != -1 and len(levels) > 1:
            raise UnsupportedError(
                f"window_left: expected -1 with several levels, got {window_left}: a level does not know how far its "
                f"keys are from the queries."
            )
        if PosEncodingMode.of(pos_encoding_mode) is not PosEncodingMode.NONE and len(levels) > 1:
            raise UnsupportedError(
                f"pos_encoding_mode: expected 'NONE' with several levels, got {pos_encoding_mode!r}: a level does not "
                f"know where its keys stand; rotate q and k before the call."
            )
        calls = [
            (level, [*of_level.values()], {**options, "causal": causal and level is levels[-1]})
            for level, of_level in zip(levels, tables, strict=True)
        ]
        if not (apart := self._plan_joined(calls, operands)):
            self._apart = ""
            return
        has_graph = self._levels[0].is_cuda_graph_enabled
        own = self._operands_of(calls)
        planned = own.in_place_of(self._operands) if own and has_graph else own
        for (_, _, kwargs), given in zip(calls, planned.of_plan(operands) if planned else (), strict=False):
            kwargs.update(given)
        for level, indices, kwargs in calls:
            if level.is_cuda_graph_enabled:  # plan() of one of these writes what its graph reads: look at all first
                level.workspace_size(*indices, **kwargs)
        if own is not None and planned is not None and planned is not own:
            planned.copy_from(own)
        for level, indices, kwargs in calls:
            level.plan(*indices, **kwargs)
        for level, twin in zip(self._levels, levels, strict=True):  # the same wrappers: graphs know them
            level._attention = twin._attention
        self._apart, self._operands = apart, planned

    begin_forward = plan

    def _operands_of(self, calls: Sequence[_LevelCall]) -> RemappedOperands | None:
        if self._variant is None:
            return None
        specs = [level.spec_of(*indices, **kwargs) for level, indices, kwargs in calls]
        levels = [Level.of(spec.indices) for spec in specs if isinstance(spec.indices, Indices)]
        return operands_of_levels(self._variant, levels, specs[0].options.num_qo_heads, self._levels[0].device)

    def _plan_joined(self, calls: Sequence[_LevelCall], operands: Mapping[str, Any]) -> str:
        """Plan all levels as one launch; why not, where they cannot be one, or where a level is wrong."""
        first = calls[0][0]
        if len(calls) > 1 and is_deterministic(first._deterministic):
            if self._variant is not None or first.is_cuda_graph_enabled:
                refuse_parts("MultiLevelCascadeAttentionWrapper", True, _OF_LEVELS)
            unexpected("plan", operands)
            self._joined.set_plan(flat_levels([level.spec_of(*indices, **kwargs) for level, indices, kwargs in calls]))
            return ""
        if self._variant is not None:
            return "custom variants are attended to level by level"
        unexpected("plan", operands)
        if len(calls) == 1:
            return "there is one level"
        if first.is_cuda_graph_enabled:
            return "CUDA graphs fix each level's launch"
        try:
            check_kernel_for_levels(first.device, first._backend)
            self._joined.set_plan(join_levels([level.spec_of(*indices, **kwargs) for level, indices, kwargs in calls]))
        except (UnsupportedError, ValidationError) as error:
            return str(error)
        return ""

    def explain(self) -> str:
        """Whether all levels run in one launch, or why not, and what was planned."""
        if not self._apart:
            return f"all levels in one launch\n{self._joined.explain()}"
        plans = (f"level {i}\n{level.explain()}" for i, level in enumerate(self._levels))
        return "\n".join((f"level by level: {self._apart}", *plans))

    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *, k_scale: Any = None, v_scale: Any = None,
        kv_cache_sf: Any = None, **operands: OperandValue,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim] over all levels, which are in one cache; returns o like q.

        k_scale, v_scale, kv_cache_sf: as in the paged prefill wrapper's run().
        operands: tensors and numbers, by name, that the score of the constructor's variant reads.
        """
        shared: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_sf": kv_cache_sf}
        if not self._apart:
            unexpected("run", operands)
            joined: torch.Tensor = self._joined.run(q, paged_kv_cache, **shared)
            return joined
        given = [operands] * len(self._levels) if self._operands is None else self._operands.of_run(operands)
        o, lse = self._levels[0].run_return_lse(q, paged_kv_cache, **shared, **given[0])
        for level, own in zip(self._levels[1:], given[1:], strict=True):
            merge_state_in_place(o, lse, *level.run_return_lse(q, paged_kv_cache, **shared, **own))
        return o

    forward = run

    def end_forward(self) -> None:
        """Does nothing: plans are released with the wrapper or by the next plan()."""


def _of_levels(arrays: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The tensors of each level, by name."""
    for name, array in arrays.items():
        if not isinstance(array, Sequence) or len(array) != count:
            got = len(array) if isinstance(array, Sequence) else type(array).__name__
            raise ValidationError(f"{name}: expected a list of num_levels={count} tensors, got {got}.")
    return [{name: array[i] for name, array in arrays.items()} for i in range(count)]


# --- a prefix in tensors of its own ----------------------------------------------------------------------------------


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
