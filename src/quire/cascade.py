"""Cascade attention: requests that share prefixes read each shared part once.

Each level (or the shared prefix, and the rest) is an attention call of its own that returns its log-sum-exp; the states
are then merged. Keys that several requests share are read once for all of their queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from quire.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.errors import UnsupportedError, ValidationError
from quire.merge import merge_state, merge_state_in_place, merge_states
from quire.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from quire.runtime.attention import page_indices
from quire.runtime.checks import check_flags, check_positive, check_tensor, host_indices, refuse
from quire.runtime.layout import PagedCache, page_size_of
from quire.types import KVLayout

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


class MultiLevelCascadeAttentionWrapper:
    """Attention over a tree of shared prefixes in one paged cache: level 0 is shared by most, the last by none.

    `num_levels` levels; `float_workspace_buffer`, `kv_layout` and `backend` as in BatchPrefillWithPagedKVCacheWrapper.
    So are `use_cuda_graph` and the buffers, one a level.
    """

    def __init__(
        self, num_levels: int, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf_arr: Any = None, paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None, paged_kv_last_page_len_buf_arr: Any = None, *, backend: str = "auto",
    ) -> None:  # fmt: skip
        count = check_positive(num_levels, "num_levels")
        arrays: dict[str, Any] = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr, "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }  # fmt: skip
        for name, array in arrays.items():
            if array is not None and len(array) != count:
                raise ValidationError(f"{name}: expected num_levels={count} tensors, got {len(array)}.")
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, backend=backend,
                **{name.removesuffix("_arr"): None if array is None else array[i] for name, array in arrays.items()},
            )
            for i in range(count)
        ]  # fmt: skip

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Use another buffer from the next plan() on. Plans own their index arrays: no int workspace is needed."""
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
    ) -> None:  # fmt: skip
        """Plan each level: the arguments of the paged prefill wrapper's plan(), index arrays one per level.

        The entries of a level are groups of requests that share its pages: qo_indptr_arr[i] bounds their query rows.
        `causal` holds for the last level, whose keys end where the queries stand; all earlier keys are visible.
        """
        arrays = {
            "qo_indptr_arr": qo_indptr_arr, "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr, "paged_kv_last_page_len": paged_kv_last_page_len,
        }  # fmt: skip
        for name, array in arrays.items():
            if len(array) != len(self._levels):
                raise ValidationError(f"{name}: expected num_levels={len(self._levels)} tensors, got {len(array)}.")
        check_flags(causal=causal)
        if window_left != -1 and len(self._levels) > 1:
            raise UnsupportedError(
                f"window_left: expected -1 with several levels, got {window_left}: a level does not know how far its "
                f"keys are from the queries."
            )
        for i, level in enumerate(self._levels):
            level.plan(
                qo_indptr_arr[i], paged_kv_indptr_arr[i], paged_kv_indices_arr[i], paged_kv_last_page_len[i],
                num_qo_heads, num_kv_heads, head_dim, page_size, causal=causal and i == len(self._levels) - 1,
                pos_encoding_mode=pos_encoding_mode, use_fp16_qk_reduction=use_fp16_qk_reduction, sm_scale=sm_scale,
                window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
                rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type,
                allow_fp16_qk_reduction=allow_fp16_qk_reduction,
            )  # fmt: skip

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: PagedCache) -> torch.Tensor:
        """Attention of q [nnz_qo, num_qo_heads, head_dim] over all levels, which lie in one cache; returns o like q."""
        o, lse = self._levels[0].run_return_lse(q, paged_kv_cache)
        for level in self._levels[1:]:
            merge_state_in_place(o, lse, *level.run_return_lse(q, paged_kv_cache))
        return o

    forward = run

    def end_forward(self) -> None:
        """Nothing to do: plans are released with the wrapper or by the next plan()."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode attention of requests that begin with the same keys: those in plain tensors, the rest in a paged cache."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        self._kv_layout = kv_layout
        self._backend = backend
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Use another buffer from the next begin_forward() on."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self, unique_kv_indptr: torch.Tensor, unique_kv_indices: torch.Tensor, unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, data_type: str | torch.dtype = "float16",
    ) -> None:  # fmt: skip
        """Plan the part of each request that is its own; arguments as in the decode wrapper's plan()."""
        self._unique.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
            page_size, data_type=data_type,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [batch_size, num_qo_heads, head_dim] over the shared keys and the request's own pages.

        k_shared, v_shared [shared_len, num_kv_heads, head_dim] (HND: heads first). Returns o like q.
        """
        check_flags(allow_fp16_qk_reduction=allow_fp16_qk_reduction)
        refuse(rope_scale=rope_scale, rope_theta=rope_theta)
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, backend=self._backend, return_lse=True
        )
        o, lse = self._unique.forward_return_lse(q, unique_kv_cache, sm_scale=sm_scale)
        merge_state_in_place(o, lse, *shared)
        return o

    def end_forward(self) -> None:
        """Nothing to do: a plan is released with its wrapper or by the next begin_forward()."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefill attention of requests that begin with the same keys: those in tensors, the rest in a paged cache."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        self._kv_layout = kv_layout
        self._backend = backend
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)
        self._planned: partial[None] | None = None  # plan() less the page size, until that is known

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Use another buffer from the next begin_forward() on."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int | None = None, *, q_data_type: str | torch.dtype = "float16",
    ) -> None:  # fmt: skip
        """Plan the part of each request that is its own; arguments as in the prefill wrapper's plan().

        Without `page_size`, forward() takes it from the cache.
        """
        self._planned = partial(
            self._unique.plan, host_indices(qo_indptr, "qo_indptr").clone(),
            host_indices(paged_kv_indptr, "paged_kv_indptr").clone(), page_indices(paged_kv_indices).clone(),
            host_indices(paged_kv_last_page_len, "paged_kv_last_page_len").clone(),
            num_qo_heads, num_kv_heads, head_dim, q_data_type=q_data_type,
        )  # fmt: skip
        if page_size is not None:
            self._plan(page_size, causal=True)

    def _plan(self, page_size: int, causal: bool) -> None:
        if self._planned is not None:
            self._planned(page_size=page_size, causal=causal)
            self._planned = None

    def forward(
        self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: PagedCache,
        causal: bool = True, allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, use_fp16_qk_reduction: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim] over k_shared, v_shared [shared_len, num_kv_heads, head_dim]
        (HND: heads first), all of them visible, and the request's own pages, under `causal`; returns o like q.

        `causal` defaults to True, as the page that shows this class has it (later releases default to False).
        """
        check_flags(allow_fp16_qk_reduction=allow_fp16_qk_reduction, use_fp16_qk_reduction=use_fp16_qk_reduction)
        refuse(rope_scale=rope_scale, rope_theta=rope_theta)
        if self._planned is not None:
            self._plan(page_size_of(unique_kv_cache, KVLayout.of(self._kv_layout)), causal)
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, backend=self._backend, return_lse=True
        )
        o, lse = self._unique.forward_return_lse(q, unique_kv_cache, causal, sm_scale=sm_scale)
        merge_state_in_place(o, lse, *shared)
        return o

    def end_forward(self) -> None:
        """Nothing to do: a plan is released with its wrapper or by the next begin_forward()."""


def batch_decode_with_shared_prefix_padded_kv_cache(
    q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, k_unique: torch.Tensor, v_unique: torch.Tensor,
    kv_layout: str = "NHD", allow_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, *, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Decode attention with a shared prefix and padded suffixes: q [batch_size, num_qo_heads, head_dim], k_shared,
    v_shared [shared_len, num_kv_heads, head_dim], k_unique, v_unique [batch_size, unique_len, num_kv_heads, head_dim]
    (HND: heads before tokens). Returns o like q.
    """
    check_flags(allow_fp16_qk_reduction=allow_fp16_qk_reduction)
    refuse(rope_scale=rope_scale, rope_theta=rope_theta)
    for tensor, name in ((k_unique, "k_unique"), (v_unique, "v_unique")):
        if check_tensor(tensor, name).dim() != 4:
            raise ValidationError(f"{name}: expected 4 dimensions, batch_size first, got {list(tensor.shape)}.")
    token, head = (1, 2) if KVLayout.of(kv_layout) is KVLayout.NHD else (2, 1)
    batch, unique_len, num_kv_heads = k_unique.shape[0], k_unique.shape[token], k_unique.shape[head]
    rows = torch.arange(batch + 1, dtype=torch.int32)
    unique = BatchPrefillWithRaggedKVCacheWrapper(_scratch(q), "NHD", backend=backend)
    unique.plan(
        rows, rows * unique_len, q.shape[1], num_kv_heads, q.shape[2], v_unique.shape[3], sm_scale=sm_scale,
        q_data_type=q.dtype, disable_split_kv=True,
    )  # fmt: skip
    k, v = (t.transpose(1, token).reshape(batch * unique_len, num_kv_heads, t.shape[3]) for t in (k_unique, v_unique))
    o, lse = unique.run_return_lse(q, k, v)
    shared = single_prefill_with_kv_cache(
        q, k_shared, v_shared, kv_layout=kv_layout, sm_scale=sm_scale, backend=backend, return_lse=True
    )
    merge_state_in_place(o, lse, *shared)
    return o


def _scratch(q: torch.Tensor) -> torch.Tensor:
    """A workspace for a plan that splits nothing: it only tells the device."""
    if check_tensor(q, "q").dim() != 3:
        raise ValidationError(f"q: expected [batch_size, num_qo_heads, head_dim], got {list(q.shape)}.")
    return torch.empty(16, dtype=torch.uint8, device=q.device)
