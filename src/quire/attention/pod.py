"""Prefill and decode of one step in one call, like FlashInfer's POD wrappers.

On Hopper GPUs one launch computes both if both have enough work, decodes on some of the SMs and prefills on the others
(engine/joined.py). Otherwise, and under a custom variant, they run one after the other.
"""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch

from quire.attention.decode import BatchDecodeWithPagedKVCacheWrapper
from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.calls.single import single_prefill_with_kv_cache, spec_of_one
from quire.engine.attention import planned
from quire.engine.checks import check_flags, check_tensor
from quire.engine.device import is_capturing, on_cuda
from quire.engine.inspection import Explanation
from quire.engine.joined import FusedPod
from quire.engine.operands import NO_OPERANDS, variant_of
from quire.engine.operators import is_tracing
from quire.engine.options import foreign
from quire.engine.run import Result, RunOptions
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import PagedCache
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper:
    """One prefill over tensors, and a batch of decodes over a paged cache.

    The arguments of the constructor and of plan() are those of BatchDecodeWithPagedKVCacheWrapper, for the decodes. A
    variant is used for both; plan() takes what its mask reads for the decodes. With deterministic=True there are two
    launches.

    >>> wrapper = quire.PODWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [4, 0, 2], [5, 16]))
    >>> wrapper.plan(indptr, indices, last, num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16)
    >>> q, k, v, q_d = (torch.randn(n, heads, 64).half() for n, heads in ((3, 8), (20, 2), (20, 2), (2, 8)))
    >>> o, o_d = wrapper.run(q, k, v, q_d, torch.randn(6, 2, 16, 2, 64).half(), causal_p=True)
    >>> o.shape, o_d.shape
    (torch.Size([3, 8, 64]), torch.Size([2, 8, 64]))
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None, paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None, jit_args: Any = None, *,
        variant: Variant | None = None, deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        self._variant, self._deterministic = variant_of(variant, jit_args), deterministic
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer, variant=self._variant, deterministic=deterministic,
        )  # fmt: skip
        self._fused: tuple[Hashable, FusedPod | None] = (), None  # of what, and its launch
        self.plan = self.begin_forward = self._decode.plan
        self.reset_workspace_buffer = self._decode.reset_workspace_buffer

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the decodes are planned for CUDA graphs."""
        return self._decode.is_cuda_graph_enabled

    @foreign(
        refused="custom_mask_d packed_custom_mask_d rope_scale_d rope_theta_d",
        permissions="causal_d use_fp16_qk_reduction",
    )
    def run(
        self, q_p: torch.Tensor, k_p: torch.Tensor, v_p: torch.Tensor, q_d: torch.Tensor, paged_kv_cache_d: PagedCache,
        custom_mask_p: torch.Tensor | None = None, packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False, kv_layout_p: str = "NHD", pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None, window_left_p: int = -1, rope_scale_p: float | None = None,
        rope_theta_p: float | None = None, return_lse_p: bool = False, custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None, causal_d: bool = False, kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE", sm_scale_d: float | None = None, window_left_d: int = -1,
        rope_scale_d: float | None = None, rope_theta_d: float | None = None, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False, enable_pdl: bool | None = None, *, kv_cache_sf_d: Any = None,
        operands_p: Mapping[str, Any] = NO_OPERANDS, operands_d: Mapping[str, Any] = NO_OPERANDS,
    ) -> tuple[Result, Result]:  # fmt: skip
        """Returns (result of the prefill, result of the decodes), each o, or (o, lse) with return_lse_p, return_lse_d.

        q_p [qo_len, num_qo_heads, head_dim], k_p, v_p and the arguments in _p: as in single_prefill_with_kv_cache().
        q_d [batch_size, num_qo_heads, head_dim], paged_kv_cache_d and the scales, kv_cache_sf_d too: as in the decode
        wrapper's run(). Arguments in _d that plan() takes must agree with it. operands_p, operands_d: tensors and
        numbers, by name, that the constructor's variant reads: all of those for the prefill, and those of the score for
        the decodes. Raises PlanError before plan(), ValidationError naming the argument, or UnsupportedError.
        """
        self._check_decode_options(kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d)
        fused = None
        if custom_mask_p is None and packed_custom_mask_p is None and self._variant is None:
            fused = self._fused_prefill(
                q_p, k_p, v_p, KVLayout.of(kv_layout_p), causal=causal_p, pos_encoding_mode=pos_encoding_mode_p,
                sm_scale=sm_scale_p, window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p,
            )  # fmt: skip
        if fused is not None and fused.takes(q_p, q_d):
            check_flags(causal_p=causal_p, enable_pdl=enable_pdl)
            options = RunOptions(enable_pdl=enable_pdl)
            attend = partial(fused.prefill.run, q_p, (k_p, v_p), return_lse=return_lse_p, options=options)
            decodes = partial(
                self._decode.run, q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                enable_pdl=enable_pdl, return_lse=return_lse_d, kv_cache_sf=kv_cache_sf_d, **operands_d,
            )  # fmt: skip
            return fused.run(attend, decodes)
        prefill = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p,
            kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p,
            window_left=window_left_p, rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p,
            variant=self._variant, deterministic=self._deterministic, **operands_p,
        )  # fmt: skip
        decode = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse_d,
            enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf_d, **operands_d,
        )  # fmt: skip
        return prefill, decode

    def _fused_prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: KVLayout, **options: Any
    ) -> FusedPod | None:
        """One launch of a prefill and the decodes, kept for later calls with the same lengths; None if the prefill runs
        before the decodes.
        """
        decodes, device = planned(self._decode._attention), self._decode.device
        if is_tracing() or not on_cuda(device) or is_capturing(device) or check_tensor(q, "q_p").dim() != 3:
            return None
        spec = spec_of_one(q, k, v, layout, None, logits_soft_cap=None, **options)
        wanted = decodes, spec.options, q.shape, k.shape, layout
        if self._fused[0] != wanted:
            self._fused = wanted, FusedPod.of(spec, layout, decodes)
        return self._fused[1]

    def explain(self) -> tuple[Explanation, ...]:
        """How the decodes are planned, and the prefill of the last run() where one launch computes both."""
        fused = self._fused[1]
        return self._decode.explain(), *(() if fused is None else (fused.prefill.explain(),))

    def _check_decode_options(self, layout: str, encoding: str, sm_scale: float | None, window_left: int) -> None:
        """Refuse values other than the defaults and those given to plan() and the constructor."""
        planned = self._decode
        for name, value, default, known in (
            ("kv_layout_d", layout, "NHD", planned._kv_layout), ("pos_encoding_mode_d", encoding, "NONE", "NONE"),
            ("sm_scale_d", sm_scale, None, planned._sm_scale), ("window_left_d", window_left, -1, planned._window_left),
        ):  # fmt: skip
            if value not in (default, known):
                raise ValidationError(f"{name}: expected {known}, as planned, got {value!r}.")


class BatchPODWithPagedKVCacheWrapper:
    """A batch of prefills and a batch of decodes over paged caches, each with its own index arrays.

    float_workspace_buffer, kv_layout, variant, deterministic: as in BatchPrefillWithPagedKVCacheWrapper. With
    deterministic=True there are two launches.

    >>> wrapper = quire.BatchPODWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> of_prefills = ([0, 3], [0, 2], [4, 0], [5])  # offsets of queries and pages, page numbers, tokens in last pages
    >>> of_decodes = ([0, 1, 2], [0, 1, 3], [1, 2, 5], [16, 9])
    >>> wrapper.plan(*(torch.tensor(x, dtype=torch.int32) for x in of_prefills + of_decodes), 8, 2, 64, 16)
    >>> q_p, q_d, cache = (torch.randn(*n, 64).half() for n in ((3, 8), (2, 8), (6, 2, 16, 2)))
    >>> o_p, o_d = wrapper.run(q_p, cache, q_d, cache, causal_p=True)
    >>> o_p.shape, o_d.shape
    (torch.Size([3, 8, 64]), torch.Size([2, 8, 64]))
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, variant: Variant | None = None,
        deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        built = partial(
            BatchPrefillWithPagedKVCacheWrapper, float_workspace_buffer, kv_layout, variant=variant,
            deterministic=deterministic,
        )  # fmt: skip
        self._prefill, self._decode = built(), built()
        self._spec_of_prefills: Callable[..., AttentionSpec] | None = None  # with the masks of run()
        self._fused: FusedPod | None = None
        self._planned_causal: bool | None = None  # None: under a mask, or not at all

    @foreign(permissions="non_blocking")
    def plan(
        self, qo_indptr_p: torch.Tensor, kv_indptr_p: torch.Tensor, kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor, qo_indptr_d: torch.Tensor, kv_indptr_d: torch.Tensor, kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        pos_encoding_mode: str = "NONE", window_left: int = -1, q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        non_blocking: bool = True, *, operands_p: Mapping[str, Any] = NO_OPERANDS,
        operands_d: Mapping[str, Any] = NO_OPERANDS,
    ) -> None:  # fmt: skip
        """Plan both: index arrays of the prefills (_p) and of the decodes (_d), and options as in the paged prefill
        wrapper's plan(), qo_indptr_*, kv_indptr_* [batch_size + 1], last_page_len_* [batch_size]. data_type: the
        default of q_data_type and kv_data_type. operands_p, operands_d: tensors and numbers, by name, that the mask of
        the constructor's variant reads. Raises ValidationError or UnsupportedError, as that plan() does.
        """
        q_type = q_data_type or data_type or "float16"
        options: dict[str, Any] = {
            "head_dim_qk": head_dim, "page_size": page_size, "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left, "q_data_type": q_type, "kv_data_type": kv_data_type or data_type,
            "sm_scale": sm_scale, "rope_scale": rope_scale, "rope_theta": rope_theta,
        }  # fmt: skip
        options |= {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}
        prefill = partial(
            self._prefill.spec_of, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, **options, **operands_p
        )
        prefill()
        decode = self._decode.spec_of(qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, **options, **operands_d)
        self._decode.set_plan(decode)
        self._spec_of_prefills = prefill
        self._plan_prefills(causal=False)
        self._planned_causal = False

    def _plan_prefills(self, **masks: Any) -> None:
        """Plan the prefills, in one launch with the decodes or by themselves."""
        assert self._spec_of_prefills is not None
        spec = self._spec_of_prefills(**masks)
        self._fused = FusedPod.of(spec, self._prefill._layout, planned(self._decode._attention))
        if self._fused is None:
            self._prefill.set_plan(spec)
        else:
            self._prefill._attention = self._fused.prefill

    def explain(self) -> tuple[Explanation, Explanation]:
        """How the prefills and the decodes are planned; a note says where one launch computes both."""
        return self._prefill.explain(), self._decode.explain()

    begin_forward = plan

    @foreign(permissions="use_fp16_qk_reduction")
    def run(
        self, q_p: torch.Tensor, paged_kv_cache_p: PagedCache, q_d: torch.Tensor, paged_kv_cache_d: PagedCache,
        custom_mask_p: torch.Tensor | None = None, packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False, q_scale: float | None = None, k_scale: float | None = None,
        v_scale: float | None = None, return_lse: bool = False, use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None, *, kv_cache_sf_p: Any = None, kv_cache_sf_d: Any = None,
        operands_p: Mapping[str, Any] = NO_OPERANDS, operands_d: Mapping[str, Any] = NO_OPERANDS,
    ) -> tuple[Result, Result]:  # fmt: skip
        """Returns (result of the prefills, result of the decodes), each o, or (o, lse) with return_lse=True.

        The prefills are planned again if a mask is given, or if causal_p differs from the last call. The scales are
        for the decodes, and k_scale and v_scale for the prefills, too, if their cache has 4 bits: kv_cache_sf_p and
        kv_cache_sf_d are scales of such caches. operands_p, operands_d: what the score of the constructor's variant
        reads, by name. Raises PlanError before plan(), ValidationError for tensors that do not fit the plan.
        """
        check_flags(causal_p=causal_p)
        causal = None if custom_mask_p is not None or packed_custom_mask_p is not None else causal_p
        if self._spec_of_prefills is not None and (causal is None or causal != self._planned_causal):
            masks = {"custom_mask": custom_mask_p, "packed_custom_mask": packed_custom_mask_p}
            self._plan_prefills(**masks, causal=causal_p)
            self._planned_causal = causal
        has_scales = kv_cache_sf_p is not None
        prefill = partial(
            self._prefill.run, q_p, paged_kv_cache_p, return_lse=return_lse, enable_pdl=enable_pdl,
            k_scale=k_scale if has_scales else None, v_scale=v_scale if has_scales else None, kv_cache_sf=kv_cache_sf_p,
            **operands_p,
        )  # fmt: skip
        decode = partial(
            self._decode.run, q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            return_lse=return_lse, enable_pdl=enable_pdl, kv_cache_sf=kv_cache_sf_d, **operands_d,
        )  # fmt: skip
        if is_tracing() or self._fused is None or not self._fused.takes(q_p, q_d):
            return prefill(), decode()
        return self._fused.run(prefill, decode)
