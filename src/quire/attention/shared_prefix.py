"""Requests that share one prefix: attention to it and to their own keys, in one launch or in two that are merged.

The API is FlashInfer's (https://docs.flashinfer.ai/api/cascade.html); cascade.py has more levels.
"""

# ruff: noqa: ARG001, ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from quire.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.cache import merge_state_in_place
from quire.calls.single import single_prefill_with_kv_cache
from quire.engine.attention import Attention, planned
from quire.engine.checks import check_tensor, host_indices, page_indices
from quire.engine.device import OwnWorkspace, Workspace
from quire.engine.joined import check_kernel_for_prefix, with_prefix
from quire.engine.operands import Level, OperandValue, operands_of_levels, unexpected, variant_of
from quire.engine.operators import is_tracing
from quire.engine.options import foreign, logits_options, refuse_parts
from quire.engine.run import RunOptions
from quire.engine.schedule import Indices, check_count
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache, page_size_of
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.rewrite import variant_of_level, variant_without_mask
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout

#: What to do in place of an attention to shared keys and one to the others.
_IN_PAGES = "put shared keys into pages of the cache, and plan BatchPrefillWithPagedKVCacheWrapper on all pages"


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
    o: torch.Tensor = joined.run(q, kv, options=RunOptions(others=shared))
    return o


def _shared_rows(k: torch.Tensor, v: torch.Tensor, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """k_shared and v_shared as [shared_len, num_kv_heads, head_dim]."""
    for tensor, name in ((k, "k_shared"), (v, "v_shared")):
        if check_tensor(tensor, name).dim() != 3 or tensor.shape[:2] != k.shape[:2]:
            raise ValidationError(f"{name}: expected 3 dimensions, k_shared's first, got {list(tensor.shape)}.")
    return (k, v) if layout is KVLayout.NHD else (k.transpose(0, 1), v.transpose(0, 1))


class _SharedPrefixWrapper:
    """Requests that begin with the same keys. `_unique` attends to each request's other keys, in a paged cache.

    float_workspace_buffer, kv_layout, backend, variant: as in BatchDecodeWithPagedKVCacheWrapper. In a variant,
    positions count from the first shared key, and forward() takes all operands. A mask is evaluated for all keys.
    """

    _kind: type[BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper]
    _unique: BatchDecodeWithPagedKVCacheWrapper | BatchPrefillWithPagedKVCacheWrapper

    @foreign(older_names={"workspace_buffer": "float_workspace_buffer"})
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

    @foreign(older_names={"new_workspace_buffer": "float_workspace_buffer"})
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Use another buffer from the next begin_forward() on."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def _attend(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        sm_scale: float | None, operands: Mapping[str, Any], **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        refuse_parts(type(self).__name__, None, _IN_PAGES)
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
            return "custom variants are attended to level by level"
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

    @foreign("rope_scale rope_theta", "allow_fp16_qk_reduction", {"unique_kv_data": "unique_kv_cache"})
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, **operands: OperandValue,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [batch_size, num_qo_heads, head_dim] over the shared keys and each request's own pages.

        k_shared, v_shared [shared_len, num_kv_heads, head_dim] (HND: heads first). operands: what the
        constructor's variant reads. Returns o like q. Raises PlanError before begin_forward(), ValidationError for
        tensors that do not fit the plan.
        """
        return self._attend(q, k_shared, v_shared, unique_kv_cache, sm_scale, operands)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill attention of requests that begin with the same keys: shared keys in tensors, the others in a paged cache.

    The constructor's arguments are those of BatchPrefillWithPagedKVCacheWrapper.

    >>> wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> own = ([0, 3, 5], [0, 1, 2], [0, 1], [7, 9])  # offsets of queries and pages, page numbers, tokens in last pages
    >>> wrapper.begin_forward(*(torch.tensor(x, dtype=torch.int32) for x in own), 8, 2, 64, 16)
    >>> q, k, v, cache = (torch.randn(*n, 64).half() for n in ((5, 8), (100, 2), (100, 2), (2, 2, 16, 2)))
    >>> wrapper.forward(q, k, v, cache, causal=True).shape
    torch.Size([5, 8, 64])
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

    @foreign(
        "rope_scale rope_theta", "allow_fp16_qk_reduction use_fp16_qk_reduction", {"unique_kv_data": "unique_kv_cache"}
    )
    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        causal: bool = True, allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, use_fp16_qk_reduction: bool = False,
        **operands: OperandValue,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim] over k_shared, v_shared [shared_len, num_kv_heads, head_dim]
        (HND: heads first), all of them visible, and over each request's own pages, under `causal`. Returns o like q.

        `causal` defaults to True, as in the version of FlashInfer that documents this class (later ones: False).
        Raises PlanError before begin_forward(), ValidationError for tensors that do not fit the plan.
        """
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


@foreign(refused="rope_scale rope_theta", permissions="allow_fp16_qk_reduction")
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
    for tensor, name in ((k_unique, "k_unique"), (v_unique, "v_unique")):
        if check_tensor(tensor, name).dim() != 4 or tensor.shape[:3] != k_unique.shape[:3]:
            raise ValidationError(f"{name}: expected 4 dimensions, those of k_unique first, got {list(tensor.shape)}.")
    token, head = (1, 2) if KVLayout.of(kv_layout) is KVLayout.NHD else (2, 1)
    batch, unique_len, num_kv_heads = k_unique.shape[0], k_unique.shape[token], k_unique.shape[head]
    refuse_parts("batch_decode_with_shared_prefix_padded_kv_cache", None, _IN_PAGES)
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
