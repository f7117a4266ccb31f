"""Decode attention: one new query (or a few) per request against all of its keys."""

from __future__ import annotations

from typing import Any

import torch

from quire.block_table_decode import xqa_batch_decode_with_kv_cache
from quire.errors import ValidationError
from quire.runtime.attention import Attention, AttentionSpec, Result, last_page_lens, page_indices, planned
from quire.runtime.checks import check_flags, check_positive, check_tensor, host_indices, refuse
from quire.runtime.layout import PagedCache
from quire.runtime.options import PlanOptions, Types, heads, logits_options, memoised, split_size
from quire.runtime.schedule import Indices
from quire.runtime.workspace import OwnWorkspace
from quire.runtime.wrapper import AttentionWrapper
from quire.types import KVLayout

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]


@memoised
def _plan_options(
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str, window_left: int,
    logits_soft_cap: float | None, q_data_type: Any, kv_data_type: Any, o_data_type: Any, data_type: Any,
    sm_scale: float | None, rope_scale: Any, rope_theta: Any, non_blocking: bool, block_tables: Any, seq_lens: Any,
    fixed_split_size: int | None, disable_split_kv: bool, q_len_per_req: int,
) -> PlanOptions:  # fmt: skip
    check_flags(non_blocking=non_blocking, disable_split_kv=disable_split_kv)
    refuse(rope_scale=rope_scale, rope_theta=rope_theta, block_tables=block_tables, seq_lens=seq_lens)
    qo, kv = heads(num_qo_heads, num_kv_heads)
    dim = check_positive(head_dim, "head_dim")
    return PlanOptions(
        qo, kv, dim, dim, Types.of(q_data_type or data_type or "float16", kv_data_type or data_type, o_data_type),
        logits_options(dim, sm_scale, window_left, logits_soft_cap, pos_encoding_mode),
        causal=check_positive(q_len_per_req, "q_len_per_req") > 1, page_size=check_positive(page_size, "page_size"),
        fixed_split_size=split_size(fixed_split_size, disable_split_kv),
    )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(AttentionWrapper):
    """Decode attention of a batch of requests over a paged cache.

    `float_workspace_buffer` (uint8, 128 MiB is plenty) holds partial results and decides the device. `kv_layout` is the
    order inside a page: "NHD" or "HND". `use_tensor_cores` is a hint of the surface: every GPU kernel here uses them.

    With `use_cuda_graph`, run() may be captured and plan() called again before each replay. The three buffers are then
    needed, on the device: their lengths fix the batch size, and page numbers are copied into the second.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        refuse(jit_args=jit_args)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer, paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )  # fmt: skip
        check_flags(use_tensor_cores=use_tensor_cores)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Plan a batch.

        indptr [batch_size + 1] are offsets into indices (page numbers); last_page_len [batch_size] counts the tokens of
        each last page (1..page_size). Host arrays plan without a synchronisation. `data_type` stands for q_data_type
        and kv_data_type where those are not given; float16 is the default of all. With q_len_per_req > 1 the queries
        are the last tokens of their request, under a causal mask. The rest is as in the prefill wrapper's plan().

        Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.
        """
        options = _plan_options(
            num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap,
            q_data_type, kv_data_type, o_data_type, data_type, sm_scale, rope_scale, rope_theta, non_blocking,
            block_tables, seq_lens, fixed_split_size, disable_split_kv, q_len_per_req,
        )  # fmt: skip
        kv_indptr = host_indices(indptr, "indptr")
        batch = kv_indptr.shape[0] - 1
        if batch < 0:
            raise ValidationError("indptr: expected [batch_size + 1] offsets, got none.")
        size = options.page_size
        last = last_page_lens(last_page_len, "last_page_len", kv_indptr, size)
        pages = Indices(batch, None, int(q_len_per_req), kv_indptr, last, page_indices(indices), size)
        self._set_plan(AttentionSpec(pages, options))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        *,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Result:
        """Attention of q [batch_size * q_len_per_req, num_qo_heads, head_dim] over the cache; returns o of the
        same shape, or (o, lse) with lse [batch_size * q_len_per_req, num_qo_heads] float32, base 2.

        Options as in the paged prefill wrapper's run().
        """
        if kv_cache_sf is not None or skip_softmax_threshold_scale_factor is not None:
            refuse(kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        attention = planned(self._attention)
        if q_len_per_req is not None and q_len_per_req != attention.spec.indices.qo_len:
            raise ValidationError(
                f"q_len_per_req: expected {attention.spec.indices.qo_len} (fixed by plan()), got {q_len_per_req}."
            )
        return attention.run(
            q, paged_kv_cache, out=out, lse=lse, return_lse=return_lse, sinks=sinks, q_scale=q_scale, k_scale=k_scale,
            v_scale=v_scale, window_left=window_left, enable_pdl=enable_pdl,
        )  # fmt: skip

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: PagedCache, **options: Any) -> Result:
        """run() with return_lse=True."""
        return self.run(q, paged_kv_cache, **options, return_lse=True)

    def forward(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, pos_encoding_mode: str = "NONE",
        q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool = False,
    ) -> Result:  # fmt: skip
        """run() with arguments of plan(); plans again where they differ from what was planned."""
        refuse(rope_scale=rope_scale, rope_theta=rope_theta)
        self._replan(pos_encoding_mode, sm_scale, window_left, logits_soft_cap)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, q: torch.Tensor, paged_kv_cache: PagedCache, *args: Any, **options: Any) -> Result:
        """forward() with return_lse=True."""
        return self.forward(q, paged_kv_cache, *args, **options, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with use_cuda_graph=True: indptr_buffer [batch_size + 1], indices_buffer [most pages] and
    last_page_len_buffer [batch_size], int32 on the device.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer,
            backend,
        )  # fmt: skip


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
    window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    non_blocking: bool = True, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    q_len_per_req: int = 1, global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """plan() of a decode wrapper as SGLang binds it; `global_override_indptr_cpu` is a host copy of `indptr`.

    plan() itself is fast with host arrays; this only keeps the name.
    """
    self.plan(
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu, indices, last_page_len,
        num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap, q_data_type,
        kv_data_type, None, data_type, sm_scale, rope_scale, rope_theta, non_blocking,
        fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req,
    )  # fmt: skip


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    backend: str = "auto",
) -> Result:
    """Decode attention of one request: q [num_qo_heads, head_dim] over k, v [kv_len, num_kv_heads, head_dim] (HND:
    heads first). Returns o [num_qo_heads, head_dim], or (o, lse) with lse [num_qo_heads] float32, base 2.
    """
    check_flags(use_tensor_cores=use_tensor_cores)
    refuse(rope_scale=rope_scale, rope_theta=rope_theta)
    layout = KVLayout.of(kv_layout)
    for tensor, name, dims in ((q, "q", 2), (k, "k", 3), (v, "v", 3)):
        if check_tensor(tensor, name).dim() != dims:
            raise ValidationError(f"{name}: expected {dims} dimensions, got {list(tensor.shape)}.")
    token, head = (0, 1) if layout is KVLayout.NHD else (1, 0)
    if v.shape[token] != k.shape[token]:
        raise ValidationError(f"v: expected kv_len={k.shape[token]} tokens as in k, got {v.shape[token]}.")
    qo, kv = heads(q.shape[0], k.shape[head])
    options = PlanOptions(
        qo, kv, q.shape[1], v.shape[2], Types.of(q.dtype, k.dtype, None),
        logits_options(q.shape[1], sm_scale, window_left, logits_soft_cap, pos_encoding_mode), causal=False,
        page_size=0,
    )  # fmt: skip
    kv_indptr = torch.tensor([0, k.shape[token]], dtype=torch.int32)
    spec = AttentionSpec(Indices(1, None, 1, kv_indptr, None, None, 1), options)
    result = Attention(spec, layout, OwnWorkspace(q.device), backend).run(
        q.unsqueeze(0), (k, v), out=None, lse=None, return_lse=return_lse, sinks=None, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale, window_left=None, enable_pdl=None,
    )  # fmt: skip
    return tuple(part[0] for part in result) if isinstance(result, tuple) else result[0]
