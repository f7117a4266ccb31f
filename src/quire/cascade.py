"""Cascade attention: requests that share prefixes read each shared part once.

MultiLevelCascadeAttentionWrapper attends to all levels in one launch, which also merges their results
(runtime/cascade.py). This works on the CPU, on Hopper, and on other GPUs if `backend` forces a kernel that supports it.
The wrappers whose shared keys are in separate tensors do the same on the CPU and on Hopper. In all other cases each
level is an attention call that returns its log-sum-exp, and further calls merge the results. The API is FlashInfer's
(https://docs.flashinfer.ai/api/cascade.html).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.level_variant import variant_of_level, variant_without_mask
from quire.kernels.variant import Variant
from quire.merge import merge_state, merge_state_in_place, merge_states
from quire.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from quire.runtime.attention import Attention, AttentionSpec, page_indices, planned
from quire.runtime.cascade import check_kernel_for_levels, check_kernel_for_prefix, join_levels, with_prefix
from quire.runtime.checks import check_flags, check_positive, check_tensor, host_indices, refuse
from quire.runtime.indices import check_count
from quire.runtime.layout import PagedCache, page_size_of
from quire.runtime.level_operands import Level, operands_of_levels
from quire.runtime.ops import is_tracing
from quire.runtime.options import logits_options, unusual_positions
from quire.runtime.schedule import Indices
from quire.runtime.variant_operands import PlacedOperands, unexpected, variant_of
from quire.runtime.workspace import OwnWorkspace, Workspace
from quire.types import KVLayout, PosEncodingMode

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


_LevelCall = tuple[BatchPrefillWithPagedKVCacheWrapper, list[Any], dict[str, Any]]


class MultiLevelCascadeAttentionWrapper:
    """Attention over a tree of shared prefixes in one paged cache. Most requests share level 0, none share the last.

    num_levels: the number of levels. float_workspace_buffer, kv_layout, use_cuda_graph and backend are as in
    BatchPrefillWithPagedKVCacheWrapper, and so are the buffers, one per level. variant: a custom quire.Variant.

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
        variant: Variant | None = None,
    ) -> None:  # fmt: skip
        if (count := check_positive(num_levels, "num_levels")) > 1024:
            raise ValidationError(f"num_levels: expected at most 1024, got {count}.")
        arrays: dict[str, Any] = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr, "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }  # fmt: skip
        buffers = _of_levels({name: array for name, array in arrays.items() if array is not None}, count)
        self._joined = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)
        self._apart = "not planned"  # why levels are planned one by one; "": they are one launch
        self._variant = variant_of(variant)
        self._operands: PlacedOperands | None = None  # once planned, what the variant reads
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, backend=backend,
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
        kv_data_type: str | torch.dtype | None = None, *, allow_fp16_qk_reduction: bool = False, **operands: Any,
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

    def _operands_of(self, calls: Sequence[_LevelCall]) -> PlacedOperands | None:
        if self._variant is None:
            return None
        specs = [level.spec_of(*indices, **kwargs) for level, indices, kwargs in calls]
        levels = [Level.of(spec.indices) for spec in specs if isinstance(spec.indices, Indices)]
        return operands_of_levels(self._variant, levels, specs[0].options.num_qo_heads, self._levels[0].device)

    def _plan_joined(self, calls: Sequence[_LevelCall], operands: Mapping[str, Any]) -> str:
        """Plan all levels as one launch; why not, where they cannot be one, or where a level is wrong."""
        if self._variant is not None:
            return "a variant of one's own is attended to level by level"
        unexpected("plan", operands)
        if len(calls) == 1:
            return "there is one level"
        if calls[0][0].is_cuda_graph_enabled:
            return "CUDA graphs fix each level's launch"
        first = calls[0][0]
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

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache, **operands: Any) -> torch.Tensor:
        """Attention of q [nnz_qo, num_qo_heads, head_dim] over all levels, which are in one cache; returns o like q.

        operands: tensors and numbers, by name, that the score of the constructor's variant reads.
        """
        if not self._apart:
            unexpected("run", operands)
            return self._joined.run(q, paged_kv_cache)
        given = [operands] * len(self._levels) if self._operands is None else self._operands.of_run(operands)
        o, lse = self._levels[0].run_return_lse(q, paged_kv_cache, **given[0])
        for level, own in zip(self._levels[1:], given[1:], strict=True):
            merge_state_in_place(o, lse, *level.run_return_lse(q, paged_kv_cache, **own))
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


P = ParamSpec("P")
R = TypeVar("R")


def also_named(**older: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function also take keywords by FlashInfer's first names for them: also_named(new_name="older_name")."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def either(*args: P.args, **kwargs: P.kwargs) -> R:
            for name, alias in older.items():
                if alias in kwargs:
                    if name in kwargs:
                        raise ValidationError(f"{alias}: expected it or {name}, got both.")
                    kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        either.older_names = tuple(older.values())  # type: ignore[attr-defined]
        return either

    return decorate


def _join(own: AttentionSpec, k_shared: torch.Tensor, *place: Any) -> Attention:
    """A plan of `own` whose requests all begin with the keys k_shared [shared_len, num_kv_heads, head_dim]; place: the
    layout, the workspace and the backend. Raises UnsupportedError or ValidationError if one launch is impossible.
    """
    layout, workspace, backend = place
    if k_shared.dtype is not own.options.types.kv.torch or not own.nnz_qo:
        raise UnsupportedError(f"shared keys of {k_shared.dtype}, and {own.nnz_qo} queries: expected the cache's type.")
    check_count(k_shared.shape[0], "k_shared", "tokens")
    rows, prefix = (torch.tensor([0, n], dtype=torch.int32, device="cpu") for n in (own.nnz_qo, k_shared.shape[0]))
    joined = check_kernel_for_prefix(with_prefix(own, rows, prefix), workspace.device, backend)
    return Attention(joined, layout, workspace, backend)


def _run_joined(
    joined: Attention, q: torch.Tensor, kv: PagedCache, shared: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    o: torch.Tensor = joined.run(
        q, kv, out=None, lse=None, return_lse=False, sinks=None, q_scale=None, k_scale=None, v_scale=None,
        window_left=None, enable_pdl=None, others=shared,
    )  # fmt: skip
    return o


def _shared_rows(k: torch.Tensor, v: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """k_shared and v_shared as [shared_len, num_kv_heads, head_dim]."""
    for tensor, name in ((k, "k_shared"), (v, "v_shared")):
        if check_tensor(tensor, name).dim() != 3 or tensor.shape[:2] != k.shape[:2]:
            raise ValidationError(f"{name}: expected 3 dimensions, k_shared's first, got {list(tensor.shape)}.")
    return (k, v) if layout is KVLayout.NHD else (k.transpose(0, 1), v.transpose(0, 1))


class _SharedPrefixWrapper:
    """Requests that begin with the same keys. `_unique` attends to each request's other keys, in a paged cache.

    float_workspace_buffer, kv_layout, backend, variant: see quire.runtime.wrapper.AttentionWrapper. In a variant,
    positions count from the first shared key, and forward() takes all operands. A mask is evaluated for all keys.
    """

    _kind: type[BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper]
    _unique: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper

    @also_named(float_workspace_buffer="workspace_buffer")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto",
        variant: Variant | None = None,
    ) -> None:  # fmt: skip
        given = variant_of(variant)  # forward() is the first to know the shared keys, and masks are planned before it
        self._variant = None if given is None else variant_without_mask(given)
        self._kv_layout, self._backend = kv_layout, backend
        own = None if self._variant is None else variant_of_level(self._variant)
        self._unique = self._kind(float_workspace_buffer, kv_layout, backend=backend, variant=own)
        self._joined: tuple[Hashable, Attention | str] = (), "not planned"  # of what, and it or why there is none

    @also_named(float_workspace_buffer="new_workspace_buffer")
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Use another buffer from the next begin_forward() on."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _attend(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        sm_scale: float | None, operands: Mapping[str, Any], **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        if not is_tracing() and (joined := self._one_launch(k_shared, v_shared, sm_scale, **options)) is not None:
            unexpected("forward", operands)
            return _run_joined(joined, q, unique_kv_cache, _shared_rows(k_shared, v_shared, self._unique._layout))
        of_shared, of_unique = self._operands(k_shared, operands)
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, backend=self._backend, return_lse=True,
            variant=self._unique._variant, **of_shared,
        )  # fmt: skip
        o, lse = self._unique.forward_return_lse(q, unique_kv_cache, sm_scale=sm_scale, **options, **of_unique)
        merge_state_in_place(o, lse, *shared)
        return o

    def _one_launch(
        self, k: torch.Tensor, v: torch.Tensor, sm_scale: float | None, causal: bool = False
    ) -> Attention | None:
        """The plan of shared and own keys, made for the first forward() of a batch; None where they are two launches.
        `_joined` is it, or says why.
        """
        own, place = planned(self._unique._attention), (self._unique._layout, self._unique._workspace, self._backend)
        k, _ = _shared_rows(k, v, self._unique._layout)
        wanted = own, k.shape[0], k.dtype, causal
        if self._joined[0] != wanted:
            self._joined = wanted, self._plan_joined(own, k, causal, place)
        joined = self._joined[1]
        if isinstance(joined, str):
            return None
        logits = logits_options(own.spec.options.head_dim_qk, sm_scale, -1, None, "NONE")
        return joined.replan(*place[1:], logits=logits)

    def _plan_joined(
        self, own: Attention, k_shared: torch.Tensor, causal: bool, place: tuple[KVLayout, Workspace, str]
    ) -> Attention | str:
        if self._variant is not None:
            return "a variant of one's own is attended to level by level"
        batch = own.same_batch()
        try:
            return _join(batch._replace(options=batch.options._replace(causal=causal)), k_shared, *place)
        except (UnsupportedError, ValidationError) as error:
            return str(error)

    def explain(self) -> str:
        """Whether shared and own keys were one launch in the last forward(), or why not, and what was planned."""
        joined = self._joined[1]
        if isinstance(joined, str):
            return f"shared and own keys apart: {joined}\n{self._unique.explain()}"
        return f"shared and own keys in one launch\n{joined.explain()}"

    def _operands(self, k_shared: torch.Tensor, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the variant reads for the shared keys, and for each request's own."""
        if self._variant is None:
            unexpected("forward", given)
            return [{}, {}]
        spec = planned(self._unique._attention).spec
        assert isinstance(spec.indices, Indices)
        own, token = Level.of(spec.indices), 0 if KVLayout.of(self._kv_layout) is KVLayout.NHD else 1
        shared = Level(own.qo_indptr[[0, -1]], torch.tensor([k_shared.shape[token]], device="cpu"))
        return operands_of_levels(self._variant, (shared, own), spec.options.num_qo_heads, self._unique.device).of_run(
            given
        )

    def end_forward(self) -> None:
        """Does nothing: a plan is released with its wrapper or by the next begin_forward()."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention of requests that begin with the same keys: shared keys in tensors, the others in a paged cache.

    The constructor's arguments are those of BatchDecodeWithPagedKVCacheWrapper.

    >>> wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> indptr, indices = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    >>> wrapper.begin_forward(indptr, indices, torch.tensor([7, 9], dtype=torch.int32), 8, 2, 64, 16)
    >>> q, k, v, cache = (torch.randn(*n, 64).half() for n in ((2, 8), (100, 2), (100, 2), (2, 2, 16, 2)))
    >>> wrapper.forward(q, k, v, cache).shape
    torch.Size([2, 8, 64])
    """

    _kind = BatchDecodeWithPagedKVCacheWrapper
    _unique: BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self, unique_kv_indptr: torch.Tensor, unique_kv_indices: torch.Tensor, unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, data_type: str | torch.dtype = "float16",
    ) -> None:  # fmt: skip
        """Plan the keys that are not shared; arguments as in the decode wrapper's plan()."""
        self._unique.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size, data_type=data_type,
        )  # fmt: skip

    @also_named(unique_kv_cache="unique_kv_data")
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, **operands: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [batch_size, num_qo_heads, head_dim] over the shared keys and each request's own pages.

        k_shared, v_shared [shared_len, num_kv_heads, head_dim] (HND: heads first). operands: what the
        constructor's variant reads. Returns o like q.
        """
        check_flags(allow_fp16_qk_reduction=allow_fp16_qk_reduction)
        refuse(**unusual_positions(rope_scale, rope_theta))
        return self._attend(q, k_shared, v_shared, unique_kv_cache, sm_scale, operands)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill attention of requests that begin with the same keys: shared keys in tensors, the others in a paged cache.

    The constructor's arguments are those of BatchPrefillWithPagedKVCacheWrapper; see also
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper.
    """

    _kind = BatchPrefillWithPagedKVCacheWrapper
    _unique: BatchPrefillWithPagedKVCacheWrapper
    _planned: partial[None] | None = None  # plan() less what only forward() knows, until then

    def begin_forward(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int | None = None, *, q_data_type: str | torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Plan the keys that are not shared; arguments as in the prefill wrapper's plan().

        Without `page_size`, forward() takes it from the cache. Without `q_data_type` the first forward() takes q's: it
        plans again unless that is float16.
        """
        plan = partial(
            self._unique.plan, host_indices(qo_indptr, "qo_indptr").clone(),
            host_indices(paged_kv_indptr, "paged_kv_indptr").clone(), page_indices(paged_kv_indices).clone(),
            host_indices(paged_kv_last_page_len, "paged_kv_last_page_len").clone(),
            num_qo_heads, num_kv_heads, head_dim,
        )  # fmt: skip
        if q_data_type is not None:
            plan = partial(plan, q_data_type=q_data_type)
        if page_size is not None:
            plan = partial(plan, page_size=page_size)
            plan(causal=True)
        self._planned = plan if page_size is None or q_data_type is None else None

    @also_named(unique_kv_cache="unique_kv_data")
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        causal: bool = True, allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, use_fp16_qk_reduction: bool = False,
        **operands: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim] over k_shared, v_shared [shared_len, num_kv_heads, head_dim]
        (HND: heads first), all of them visible, and over each request's own pages, under `causal`. Returns o like q.

        `causal` defaults to True, as in the version of FlashInfer that documents this class (later ones: False).
        """
        check_flags(allow_fp16_qk_reduction=allow_fp16_qk_reduction, use_fp16_qk_reduction=use_fp16_qk_reduction)
        refuse(**unusual_positions(rope_scale, rope_theta))
        if self._planned is not None:
            self._complete_plan(self._planned, q, unique_kv_cache, causal)
            self._planned = None
        return self._attend(q, k_shared, v_shared, unique_kv_cache, sm_scale, operands, causal=causal)

    def _complete_plan(self, plan: partial[None], q: torch.Tensor, cache: PagedCache, causal: bool) -> None:
        known = {"q_data_type": check_tensor(q, "q").dtype} | plan.keywords
        if "page_size" not in known:
            known["page_size"] = page_size_of(cache, KVLayout.of(self._kv_layout))
        elif known["q_data_type"] is torch.float16:  # as begin_forward() planned
            return
        plan(causal=causal, **known)


def batch_decode_with_shared_prefix_padded_kv_cache(
    q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, k_unique: torch.Tensor, v_unique: torch.Tensor,
    kv_layout: str = "NHD", allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, *, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Decode attention with a shared prefix and padded suffixes: q [batch_size, num_qo_heads, head_dim], k_shared,
    v_shared [shared_len, num_kv_heads, head_dim], k_unique, v_unique [batch_size, unique_len, num_kv_heads, head_dim]
    (HND: heads before tokens). Returns o like q. Raises ValidationError naming the argument, or UnsupportedError.

    >>> q, k, v = torch.randn(2, 8, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64)
    >>> k_unique, v_unique = torch.randn(2, 2, 5, 2, 64)
    >>> quire.batch_decode_with_shared_prefix_padded_kv_cache(q, k, v, k_unique, v_unique).shape
    torch.Size([2, 8, 64])
    """
    check_flags(allow_fp16_qk_reduction=allow_fp16_qk_reduction)
    refuse(**unusual_positions(rope_scale, rope_theta))
    for tensor, name in ((k_unique, "k_unique"), (v_unique, "v_unique")):
        if check_tensor(tensor, name).dim() != 4 or tensor.shape[:3] != k_unique.shape[:3]:
            raise ValidationError(f"{name}: expected 4 dimensions, those of k_unique first, got {list(tensor.shape)}.")
    token, head = (1, 2) if KVLayout.of(kv_layout) is KVLayout.NHD else (2, 1)
    batch, unique_len, num_kv_heads = k_unique.shape[0], k_unique.shape[token], k_unique.shape[head]
    rows = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    unique = BatchPrefillWithRaggedKVCacheWrapper(_scratch(q), "NHD", backend=backend)
    plan = partial(
        unique.plan, rows, rows * unique_len, q.shape[1], num_kv_heads, q.shape[2], v_unique.shape[3],
        sm_scale=sm_scale, q_data_type=q.dtype,
    )  # fmt: skip
    k, v = (t.transpose(1, token).reshape(batch * unique_len, num_kv_heads, t.shape[3]) for t in (k_unique, v_unique))
    shared_rows = _shared_rows(k_shared, v_shared, KVLayout.of(kv_layout))
    joined, spec = None, unique.spec_of(*plan.args, **plan.keywords)
    if not is_tracing():
        with suppress(UnsupportedError, ValidationError):  # they are two launches, then
            joined = _join(spec, shared_rows[0], KVLayout.NHD, OwnWorkspace(q.device), backend)
    if joined is not None:
        return _run_joined(joined, q, (k, v), shared_rows)
    plan(disable_split_kv=True)
    o, lse = unique.run_return_lse(q, k, v)
    shared = single_prefill_with_kv_cache(
        q, k_shared, v_shared, kv_layout=kv_layout, sm_scale=sm_scale, backend=backend, return_lse=True
    )
    merge_state_in_place(o, lse, *shared)
    return o


def _scratch(q: torch.Tensor) -> torch.Tensor:
    """A workspace for a plan without split rows: only its device matters."""
    if check_tensor(q, "q").dim() != 3:
        raise ValidationError(f"q: expected [batch_size, num_qo_heads, head_dim], got {list(q.shape)}.")
    return torch.empty(16, dtype=torch.uint8, device=q.device)
