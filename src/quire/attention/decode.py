"""Decode attention: one new query (or a few) per request against all of its keys.

The API is FlashInfer's (https://docs.flashinfer.ai/api/attention.html); fast_decode_plan() is SGLang's.
"""

# @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from quire.attention.prefill import positional_scales, without_flag
from quire.attention.variants import text_of, variant_in
from quire.cache.page import get_seq_lens
from quire.calls.cudnn import cudnn_batch_decode_with_kv_cache
from quire.calls.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from quire.calls.latents import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from quire.calls.single import single_decode_with_kv_cache, single_decode_with_kv_cache_with_jit_module
from quire.engine.attention import planned
from quire.engine.checks import (
    batch_size_of,
    check_flags,
    check_permissions,
    host_indices,
    last_page_lens,
    page_indices,
)
from quire.engine.joined import check_kernel_for_levels, with_shared_prefixes
from quire.engine.operands import OperandValue
from quire.engine.options import foreign, options_of
from quire.engine.run import Result, run_options
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec, check_repeated, host_lens
from quire.engine.tensors import PagedCache
from quire.engine.wrapper import DecodeKeywords, ForwardWrapper, Pair
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache", "fast_decode_plan", "get_seq_lens", "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module", "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache_mla",
]  # fmt: skip


def _check_right_side(window_right: Any, is_causal: Any, q_len_per_req: int) -> None:
    """Queries are the last tokens of their request, and causal."""
    if window_right != 0:
        raise ValidationError(
            f"window_right: expected 0, as no query sees keys to the right of its own, got {window_right!r}; "
            f"BatchPrefillWithPagedKVCacheWrapper.plan() with causal=False shows all keys to each query."
        )
    check_flags(is_causal=is_causal)
    if is_causal is not None and is_causal != (q_len_per_req > 1):
        raise ValidationError(
            f"is_causal: expected None or {q_len_per_req > 1}, as q_len_per_req={q_len_per_req} says, got {is_causal}."
        )


class BatchDecodeWithPagedKVCacheWrapper(ForwardWrapper):
    """Decode attention of a batch of requests over a paged cache.

    float_workspace_buffer: memory for partial results, contiguous, of any dtype, on the device of all calls. 128 MiB is
        plenty, and workspace_size() says how much a plan takes. Wrappers may share it if their runs are on one stream.
    kv_layout: of pages, "NHD" [page_size, num_kv_heads, head_dim] or "HND".
    backend: "auto", or one of quire.backends(), such as "quire:fa2", which forces a kernel.
    use_tensor_cores: has no effect, because every GPU kernel uses tensor cores.
    use_cuda_graph: run() may be captured in a CUDA graph, and plan() called again before each replay. The buffers are
        then required, on the device: paged_kv_indptr_buffer int32 [batch_size + 1], paged_kv_last_page_len_buffer int32
        [batch_size], and paged_kv_indices_buffer int32 [largest number of pages], into which plan() copies the pages.
    deterministic: as in BatchPrefillWithPagedKVCacheWrapper. q_len_per_req is part of what a request asks for.

    >>> wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "NHD")
    >>> indptr = torch.tensor([0, 2, 3], dtype=torch.int32)  # 2 pages and 1 page
    >>> indices = torch.tensor([4, 0, 2], dtype=torch.int32)  # the numbers of the pages
    >>> last_page_len = torch.tensor([5, 16], dtype=torch.int32)  # 21 and 16 tokens in all
    >>> wrapper.plan(
    ...     indptr, indices, last_page_len, num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=16,
    ...     q_data_type=torch.bfloat16,
    ... )
    >>> q = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 16, 2, 64, dtype=torch.bfloat16)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> wrapper.run(q, cache).shape
    torch.Size([2, 8, 64])
    """

    @foreign(permissions="use_tensor_cores")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None, paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None, *, variant: Variant | None = None,
        deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, variant_in(variant, jit_args), deterministic,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer, paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )  # fmt: skip
        self.use_tensor_cores = use_tensor_cores
        self._text = text_of(jit_args)

    @foreign(permissions="non_blocking")
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None, sm_scale: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, non_blocking: bool = True, block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
        q_len_per_req: int = 1, *, window_right: int = 0, is_causal: bool | None = None,
        attention_chunk_size: int | None = None, shared_prefix: str | None = None, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch.

        indptr: int32 [batch_size + 1], offsets into indices.
        indices: int32, page numbers. If they are on the host, plan() copies them. If they are on a device, each run()
            reads this tensor: the caller must keep it, and changes to it take effect with the next run().
        last_page_len: int32 [batch_size], tokens in each last page, 1..page_size. With index arrays on the host plan()
            does not synchronise; arrays on a device are copied to the host first.
        data_type: the default of q_data_type and kv_data_type, itself float16 by default.
        q_len_per_req: queries per request, which are its last tokens; if more than one, the mask is causal.
        block_tables int32 [batch_size, pages], seq_lens int32 [batch_size]: redundant, and compared with the other
            index arrays if they are on the host.
        window_right, is_causal: repeat that a query sees no key to the right of its own, and that the mask is causal if
            q_len_per_req is more than one; other values than 0, and than None or this, are refused.
        shared_prefix: with "auto", pages with which several neighbouring requests begin are read once for all of them,
            if an estimate says that this is faster. explain() then names a variant with `cascade` in its slug. This
            needs page numbers on the host, a large enough workspace, and on GPUs before Hopper backend="quire:fa2". It
            does not happen with windows, position encodings, fixed splits or custom variants.
        The other arguments are those of BatchPrefillWithPagedKVCacheWrapper.plan().

        Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.
        """
        if window_right != 0 or is_causal is not None:
            _check_right_side(window_right, is_causal, q_len_per_req)
        options = _options(locals())
        kv_indptr, size = host_indices(indptr, "indptr"), options.page_size
        batch = batch_size_of(kv_indptr, "indptr")
        last = last_page_lens(last_page_len, "last_page_len", kv_indptr, size)
        lens = None if seq_lens is None else host_lens(seq_lens, batch)
        pages = Indices(batch, None, int(q_len_per_req), kv_indptr, last, page_indices(indices), size, lens)
        if block_tables is not None:
            check_repeated(pages, block_tables=block_tables)
        spec = AttentionSpec(pages, options, operands=operands)
        if shared_prefix is None:
            self.set_plan(spec)
        else:
            self._set_shared(spec, shared_prefix)

    def _set_shared(self, spec: AttentionSpec, shared_prefix: str) -> None:
        if shared_prefix != "auto":
            raise ValidationError(f"shared_prefix: expected None or 'auto', got {shared_prefix!r}.")
        if self.is_cuda_graph_enabled:
            raise UnsupportedError("shared_prefix: expected None with use_cuda_graph=True, which fixes the launch.")
        check_kernel_for_levels(self._workspace.device, self._backend)
        cascade = None if self._variant is not None else with_shared_prefixes(spec)
        if cascade is not None:
            with suppress(UnsupportedError, ValidationError):  # then the batch is planned as it is
                return self.set_plan(cascade)
        return self.set_plan(spec)

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *, return_lse: Literal[False] = False,
        **options: Unpack[DecodeKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *, return_lse: Literal[True],
        **options: Unpack[DecodeKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload  # with operands of a variant
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: torch.Tensor | None = None, q_len_per_req: int | None = None,
        kv_cache_sf: Any = None, skip_softmax_threshold_scale_factor: float | None = None, **operands: OperandValue,
    ) -> Result: ...  # fmt: skip
    @foreign(permissions="skip_softmax_threshold_scale_factor", checks_itself=True)
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: torch.Tensor | None = None, q_len_per_req: int | None = None,
        kv_cache_sf: Any = None, skip_softmax_threshold_scale_factor: float | None = None, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of q [batch_size * q_len_per_req, num_qo_heads, head_dim] over the cache; returns o of the
        same shape, or (o, lse) with lse [batch_size * q_len_per_req, num_qo_heads] float32, base 2.

        Options as in BatchPrefillWithPagedKVCacheWrapper.run().
        """
        if scales:
            scales, return_lse = without_flag(scales, return_lse)
        if skip_softmax_threshold_scale_factor is not None:
            check_permissions(skip_softmax_threshold_scale_factor)
        if q_len_per_req is not None and q_len_per_req != (qo_len := planned(self._attention).spec.indices.qo_len):
            raise ValidationError(f"q_len_per_req: expected {qo_len} (fixed by plan()), got {q_len_per_req}.")
        if scales and self._text is None:
            q_scale, k_scale, v_scale = positional_scales(scales, q_scale, k_scale, v_scale)
        options = run_options(sinks, q_scale, k_scale, v_scale, window_left, enable_pdl, operands)
        if kv_cache_sf is not None:
            paged_kv_cache, options = self._scaled(paged_kv_cache, kv_cache_sf, options)
        if self._text is not None:
            return self._text.run(self, q, paged_kv_cache, scales, out, lse, return_lse, options)
        return self._runner().run(q, paged_kv_cache, out, lse, return_lse, options)

    def forward(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, pos_encoding_mode: str = "NONE",
        q_scale: float | None = None, k_scale: float | None = None, v_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool = False,
        **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """run() with arguments of plan(); plans again where they differ from what was planned."""
        self._replan(locals())
        more: dict[str, Any] = operands
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, **more
        )


_options = options_of(BatchDecodeWithPagedKVCacheWrapper.plan)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph=True: indptr_buffer [batch_size + 1], indices_buffer
    [largest number of pages] and last_page_len_buffer [batch_size], int32 on the device.

    plan() writes into the buffers, and raises ValidationError naming the argument if a batch does not fit them.

    >>> workspace = torch.empty(1 << 20, dtype=torch.uint8)
    >>> buffers = (torch.empty(n, dtype=torch.int32) for n in (3, 64, 2))  # up to 64 pages
    >>> wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    >>> indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [4, 0, 2], [5, 16]))
    >>> wrapper.plan(indptr, indices, last, 8, 2, 64, 16)
    >>> wrapper.run(torch.randn(2, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()).shape
    torch.Size([2, 8, 64])
    """

    def __init__(
        self, workspace_buffer: torch.Tensor, indptr_buffer: torch.Tensor, indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False, *,
        backend: str = "auto", variant: Variant | None = None, deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer,
            backend, variant=variant, deterministic=deterministic,
        )  # fmt: skip


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, pos_encoding_mode: str = "NONE",
    window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None, data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    non_blocking: bool = True, fixed_split_size: int | None = None, disable_split_kv: bool = False,
    q_len_per_req: int = 1, global_override_indptr_cpu: torch.Tensor | None = None, **operands: OperandValue,
) -> None:  # fmt: skip
    """plan() of a BatchDecodeWithPagedKVCacheWrapper as SGLang binds it.

    indptr [batch_size + 1], indices [pages], last_page_len [batch_size] and the options: as in plan().
    global_override_indptr_cpu: a host copy of `indptr`. operands: what the mask of the wrapper's variant reads. The
    function exists for its name: plan() with host arrays is just as fast. Raises the errors of plan().

    >>> import functools
    >>> wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> wrapper.begin_forward = functools.partial(quire.decode.fast_decode_plan, wrapper)
    >>> indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [4, 0, 2], [5, 16]))
    >>> wrapper.begin_forward(indptr, indices, last, 8, 2, 64, 16, global_override_indptr_cpu=indptr)
    >>> wrapper.run(torch.randn(2, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()).shape
    torch.Size([2, 8, 64])
    """
    arguments = dict(locals())
    wrapper, on_host = arguments.pop("self"), arguments.pop("global_override_indptr_cpu")
    arguments.update(arguments.pop("operands"))
    # By its class: programs put this function in the place of the wrapper's own plan().
    type(wrapper).plan(wrapper, **arguments | ({} if on_host is None else {"indptr": on_host}))
