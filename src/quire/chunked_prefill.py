"""Chunked prefill: attention of new tokens to a prefix that was computed before, and to themselves.

In multi-head latent attention the keys and values of a cached prefix (head dims 192 and 128) are expanded from latents
into separate tensors, for each chunk. The prefix and the new tokens are two levels of a cascade (core/cascade.h). On
the CPU and on Hopper one launch computes the row tiles of both, and merges their results.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import UnsupportedError, ValidationError
from quire.kernels.level_variant import variant_of_level
from quire.kernels.variant import Variant
from quire.merge import merge_state_in_place
from quire.prefill import head_dims
from quire.runtime.attention import Attention, AttentionSpec, Result, planned
from quire.runtime.cascade import check_kernel_for_prefix, with_prefix
from quire.runtime.checks import batch_size_of, check_flags, host_indices
from quire.runtime.explanation import Explanation
from quire.runtime.indices import check_offsets
from quire.runtime.layout import ragged_view
from quire.runtime.level_operands import Level, operands_of_levels
from quire.runtime.options import PlanOptions, Types, heads, logits_options
from quire.runtime.schedule import Indices
from quire.runtime.target import max_ctas, on_cuda
from quire.runtime.variant_operands import PlacedOperands, unexpected, variant_of
from quire.runtime.wrapper import AttentionWrapper

__all__ = ["BatchPrefillWithPrefixWrapper"]

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
        self._placed: PlacedOperands | None = None  # once planned, what the variant reads
        self._prefix: Attention | None = None  # its plan, where it is a launch of its own
        self._apart = ""  # why

    def plan(
        self, qo_indptr: torch.Tensor, prefix_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, head_dim_vo: int | None = None, *, kv_indptr: torch.Tensor | None = None,
        causal: bool = True, sm_scale: float | None = None, logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, **operands: Any,
    ) -> None:  # fmt: skip
        """Plan a batch.

        qo_indptr, prefix_indptr, kv_indptr: int32 [batch_size + 1], offsets into the rows of q, of k_prefix and
            v_prefix, and of k and v; kv_indptr defaults to qo_indptr.
        causal: among the new tokens, query i of a request sees keys up to i + kv_len - qo_len.
        operands: tensors and numbers, by name, that the mask of the constructor's variant reads.
        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan(). Raises ValidationError or
        UnsupportedError.
        """
        check_flags(causal=causal)
        qk, vo = head_dims(head_dim_qk, head_dim_vo, None)
        options = PlanOptions(
            *heads(num_qo_heads, num_kv_heads), qk, vo, Types.of(q_data_type, kv_data_type, o_data_type),
            logits_options(qk, sm_scale, -1, logits_soft_cap, "NONE"), causal, page_size=0,
        )  # fmt: skip
        qo = host_indices(qo_indptr, "qo_indptr")
        batch = batch_size_of(qo, "qo_indptr")
        own = qo if kv_indptr is None else host_indices(kv_indptr, "kv_indptr", batch + 1)
        prefix = host_indices(prefix_indptr, "prefix_indptr", batch + 1)
        check_offsets(prefix, "prefix_indptr", 2**31 - 1)
        indices = Indices(batch, qo, 0, own, None, None, 1)
        spec = AttentionSpec(indices, options)
        placed = None
        if self._of_requests is not None:
            levels = Level(qo, prefix.diff()), Level.of(indices)
            placed = operands_of_levels(self._of_requests, levels, options.num_qo_heads, self._workspace.device)
        self._plan_levels(spec, qo, prefix.clone(), [operands] * 2 if placed is None else placed.of_plan(operands))
        self._placed = placed

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
            self._set_plan(check_kernel_for_prefix(joined, self._workspace.device, self._backend))
            self._apart, self._prefix = "", None
        except (UnsupportedError, ValidationError) as error:
            options = spec.options._replace(causal=False, variant=self._variant)
            prefixes = AttentionSpec(spec.indices._replace(kv_indptr=prefix), options, operands=operands[0])
            shared = Attention(prefixes, self._layout, self._workspace, self._backend)
            self._set_plan(spec._replace(operands=operands[1]))
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
        v_scale: float | None = None, enable_pdl: bool | None = None, **operands: Any,
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
        options: dict[str, Any] = {
            "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "enable_pdl": enable_pdl, "window_left": None,
        }  # fmt: skip
        if self._prefix is None:
            unexpected("run", operands)
            return attention.run(
                q, (k, v), out=out, lse=lse, return_lse=return_lse, sinks=sinks, **options,
                others=shared if attention.spec.options.prefix else (),
            )  # fmt: skip
        of_prefix, own = [operands] * 2 if self._placed is None else self._placed.of_run(operands)
        o, statistics = attention.run(
            q, (k, v), out=out, lse=lse, return_lse=True, sinks=sinks, operands=own, **options
        )  # fmt: skip
        before = self._prefix.run(
            q, (k_prefix, v_prefix), out=None, lse=None, return_lse=True, sinks=None, operands=of_prefix, **options
        )  # fmt: skip
        merge_state_in_place(o, statistics, *before)
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
