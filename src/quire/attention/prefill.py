"""Prefill and append attention: one request, or a batch over paged or ragged keys and values.

A wrapper's plan() takes the index arrays of a batch, and chooses, compiles and schedules a kernel; run() is then called
once per layer. The API is FlashInfer's (https://docs.flashinfer.ai/api/attention.html), with the argument names of its
older and newer versions: `head_dim` and `head_dim_qk`, `qk_indptr_buf` and `mask_indptr_buf`, `begin_forward` and
`forward`, `allow_fp16_qk_reduction` and `use_fp16_qk_reduction`. The last two and `non_blocking` are permissions that
Quire does not need: logits are always accumulated in float32, and plan() does not wait for uploads.
"""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from quire.attention.variants import text_of, variant_in
from quire.calls.cudnn import check_offsets_of, cudnn_batch_prefill_with_kv_cache, offsets_in_tokens
from quire.calls.latents import trtllm_ragged_attention_deepseek
from quire.calls.prefill import trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill
from quire.calls.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    single_prefill_with_kv_cache_with_jit_module,
)
from quire.engine.batch import with_items
from quire.engine.checks import batch_size_of, check_permissions, host_indices, last_page_lens, page_indices, refuse
from quire.engine.operands import OperandValue
from quire.engine.options import foreign, options_of
from quire.engine.run import Result, converted, run_options
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec, check_repeated, host_lens
from quire.engine.tensors import PagedCache
from quire.engine.wrapper import ForwardWrapper, Pair, PrefillKeywords
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "cudnn_batch_prefill_with_kv_cache",
    "single_prefill_with_kv_cache", "single_prefill_with_kv_cache_return_lse",
    "single_prefill_with_kv_cache_with_jit_module", "trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]  # fmt: skip

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks


class BatchPrefillWithRaggedKVCacheWrapper(ForwardWrapper):
    """Attention of a batch of requests over ragged keys and values: the requests are concatenated in one tensor.

    The constructor's arguments are those of BatchPrefillWithPagedKVCacheWrapper, with kv_indptr_buf int32
    [batch_size + 1] instead of the buffers for pages.

    >>> wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> qo_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)  # 3 and 2 queries
    >>> kv_indptr = torch.tensor([0, 10, 14], dtype=torch.int32)  # 10 and 4 keys
    >>> wrapper.plan(qo_indptr, kv_indptr, num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, q_data_type=torch.bfloat16)
    >>> q, k, v = (torch.randn(n, heads, 64, dtype=torch.bfloat16) for n, heads in ((5, 8), (14, 2), (14, 2)))
    >>> wrapper.run(q, k, v).shape
    torch.Size([5, 8, 64])
    """

    @foreign(refused="variant_owns_mask")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None, *,
        qk_indptr_buf: torch.Tensor | None = None, variant: Variant | None = None, variant_owns_mask: bool = False,
        deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            variant_in(variant, jit_args, jit_kwargs), deterministic,
            qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf, custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf, qk_indptr_buf=qk_indptr_buf,
        )  # fmt: skip
        self._text = text_of(jit_args)

    @foreign(
        permissions="use_fp16_qk_reduction allow_fp16_qk_reduction non_blocking uniform_q_len",
        added="head_dim_vo o_data_type",
    )
    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int | None = None, head_dim_vo: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None, token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, v_indptr: torch.Tensor | None = None, o_indptr: torch.Tensor | None = None,
        *, head_dim: int | None = None, allow_fp16_qk_reduction: bool = False, attention_chunk_size: int | None = None,
        uniform_q_len: int | None = None, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch: qo_indptr and kv_indptr [batch_size + 1] are offsets into the rows of q, and of k and v.

        The other arguments are those of the paged wrapper's plan(), in FlashInfer's order (here window_left and
        logits_soft_cap come before sm_scale). v_indptr and o_indptr [batch_size + 1] repeat where values and results
        begin, and are compared with the offsets of keys and queries. With backend="cudnn", and lengths in seq_lens_q
        and seq_lens, all offsets may count elements, as they do there. Raises ValidationError or UnsupportedError.
        """
        options = _ragged_options(locals())
        if self._backend == "cudnn":
            dim = options.head_dim_qk
            qo_indptr = offsets_in_tokens(qo_indptr, "qo_indptr", seq_lens_q, options.num_qo_heads * dim)
            kv_indptr = offsets_in_tokens(kv_indptr, "kv_indptr", seq_lens, options.num_kv_heads * dim)
        qo_indptr_host = host_indices(qo_indptr, "qo_indptr")
        batch = batch_size_of(qo_indptr_host, "qo_indptr")
        kv_indptr_host = host_indices(kv_indptr, "kv_indptr", batch + 1)
        check_offsets_of(v_indptr, "v_indptr", kv_indptr_host, options.num_kv_heads * options.head_dim_vo)
        check_offsets_of(o_indptr, "o_indptr", qo_indptr_host, options.num_qo_heads * options.head_dim_vo)
        lens = None if seq_lens is None else host_lens(seq_lens, batch)
        indices = Indices(batch, qo_indptr_host, 0, kv_indptr_host, None, None, 1, lens)
        most = max_token_per_sequence, max_sequence_kv
        if seq_lens_q is not None or most != (None, None):
            check_repeated(indices, seq_lens_q, None, *most)
        custom_mask = with_items(
            custom_mask, packed_custom_mask, indices, self._workspace.device, prefix_len_ptr, token_pos_in_items_ptr,
            token_pos_in_items_len, max_item_len_ptr,
        )  # fmt: skip
        self.set_plan(AttentionSpec(indices, options, custom_mask, packed_custom_mask, operands=operands))

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
        **options: Unpack[PrefillKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
        **options: Unpack[PrefillKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload  # with operands of a variant
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, o_scale: float | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None, window_left: int | None = None, sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None, lse_base: str = "log2", lse_layout: str = "NH", **operands: OperandValue,
    ) -> Result: ...  # fmt: skip
    @foreign(refused="o_scale", checks_itself=True)
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, o_scale: float | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None, window_left: int | None = None, sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None, lse_base: str = "log2", lse_layout: str = "NH", **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of q [nnz_qo, num_qo_heads, head_dim_qk] over k [nnz_kv, num_kv_heads, head_dim_qk] and
        v [nnz_kv, num_kv_heads, head_dim_vo] (HND: heads first); returns o [nnz_qo, num_qo_heads, head_dim_vo], or
        (o, lse) with lse [nnz_qo, num_qo_heads] float32, base 2. Options as in the paged wrapper's run(), such as
        lse_base and lse_layout.
        """
        if scales:
            scales, return_lse = without_flag(scales, return_lse)
        if o_scale is not None:
            refuse(o_scale=o_scale)
        if lse_base != "log2" or lse_layout != "NH":
            run = partial(
                self.run, q, k, v, *scales, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out,
                enable_pdl=enable_pdl, window_left=window_left, sinks=sinks, kv_cache_sf=kv_cache_sf, **operands,
            )  # fmt: skip
            return converted(run, lse, return_lse, lse_base, lse_layout)
        if scales and self._text is None:
            q_scale, k_scale, v_scale = positional_scales(scales, q_scale, k_scale, v_scale)
        kv, options = (k, v), run_options(sinks, q_scale, k_scale, v_scale, window_left, enable_pdl, operands)
        if kv_cache_sf is not None:
            kv, options = self._scaled(kv, kv_cache_sf, options)  # type: ignore[assignment]
        if self._text is not None:
            return self._text.run(self, q, kv, scales, out, lse, return_lse, options)
        return self._runner().run(q, kv, out, lse, return_lse, options)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None, *,
        return_lse: bool = False, allow_fp16_qk_reduction: bool = False, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """run() that also takes arguments of plan(), and plans again if they differ from those of the plan."""
        self._replan(locals())
        more: dict[str, Any] = operands
        return self.run(q, k, v, return_lse=return_lse, **more)


def without_flag(scales: tuple[Any, ...], return_lse: bool) -> tuple[tuple[Any, ...], bool]:
    """Scales by position without the return_lse that may follow them, and return_lse."""
    return (scales[:-1], scales[-1]) if isinstance(scales[-1], bool) else (scales, return_lse)


def positional_scales(scales: tuple[Any, ...], q_scale: Any, k_scale: Any, v_scale: Any) -> tuple[Any, Any, Any]:
    """run() takes k_scale and v_scale by position, or all three."""
    keywords = q_scale, k_scale, v_scale
    first = 0 if len(scales) == 3 else 1
    if len(scales) > 3 or any(value is not None for value in keywords[first : first + len(scales)]):
        raise ValidationError(f"k_scale, v_scale: expected each once, got {scales} by position besides keywords.")
    return (*keywords[:first], *scales, *keywords[first + len(scales) :])


# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks


class BatchPrefillWithPagedKVCacheWrapper(ForwardWrapper):
    """Attention of a batch of requests, each with any number of queries, over a paged cache.

    float_workspace_buffer: memory for partial results, contiguous, of any dtype, on the device of all calls. 128 MiB is
        plenty, and workspace_size() says how much a plan takes. Wrappers may share it if their runs are on one stream.
    kv_layout: of pages, "NHD" [page_size, num_kv_heads, head_dim] or "HND".
    backend: "auto", or one of quire.backends(), such as "quire:fa2", which forces a kernel.
    use_cuda_graph: run() may be captured in a CUDA graph, and plan() called again before each replay. The buffers are
        then required, on the device: qo_indptr_buf and paged_kv_indptr_buf int32 [batch_size + 1],
        paged_kv_last_page_len_buf int32 [batch_size], and paged_kv_indices_buf int32 [largest number of pages], into
        which plan() copies page numbers. With a custom mask so is custom_mask_buf uint8 [largest number of bytes], into
        which plan() copies the mask's bits. The first plan() fixes everything but lengths, and the largest number of
        rows of q.
    deterministic: True, and the bits of a request's result depend on that request alone: not on its neighbours, their
        number and order, the chunks of its prompt, its pages, or whether a CUDA graph runs. False: they may. None: as
        QUIRE_DETERMINISTIC or the switch of vLLM or SGLang says (docs/concepts/invariance.md).

    plan() reads the bits of a custom mask to find the KV tiles that need them: plan again when the mask changes.

    >>> wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "NHD")
    >>> qo_indptr = torch.tensor([0, 3, 5], dtype=torch.int32)  # 3 and 2 queries
    >>> kv_indptr = torch.tensor([0, 2, 3], dtype=torch.int32)  # 2 pages and 1 page
    >>> kv_indices = torch.tensor([4, 0, 2], dtype=torch.int32)  # the numbers of the pages
    >>> kv_last_page_len = torch.tensor([5, 16], dtype=torch.int32)  # 21 and 16 tokens in all
    >>> wrapper.plan(
    ...     qo_indptr, kv_indptr, kv_indices, kv_last_page_len, num_qo_heads=8, num_kv_heads=2, head_dim_qk=64,
    ...     page_size=16, causal=True, q_data_type=torch.bfloat16,
    ... )
    >>> q = torch.randn(5, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 16, 2, 64, dtype=torch.bfloat16)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> wrapper.run(q, cache).shape
    torch.Size([5, 8, 64])
    >>> o, lse = wrapper.run(q, cache, return_lse=True)
    >>> lse.shape
    torch.Size([5, 8])
    """

    @foreign(refused="variant_owns_mask")
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None, jit_kwargs: Any = None, *,
        qk_indptr_buf: torch.Tensor | None = None, variant: Variant | None = None, variant_owns_mask: bool = False,
        deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend,
            variant_in(variant, jit_args, jit_kwargs), deterministic,
            qo_indptr_buf=qo_indptr_buf, paged_kv_indptr_buf=paged_kv_indptr_buf, custom_mask_buf=custom_mask_buf,
            paged_kv_indices_buf=paged_kv_indices_buf, paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            mask_indptr_buf=mask_indptr_buf, qk_indptr_buf=qk_indptr_buf,
        )  # fmt: skip
        self._text, self._given_layout = text_of(jit_args), self._layout

    @foreign(
        permissions="use_fp16_qk_reduction allow_fp16_qk_reduction non_blocking uniform_q_len",
        added="head_dim_vo o_data_type",
    )
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int | None = None,
        page_size: int | None = None, head_dim_vo: int | None = None, custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, sm_scale: float | None = None, window_left: int = -1,
        logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16", kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None, non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None, token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0, max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None, seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False, *,
        head_dim: int | None = None, allow_fp16_qk_reduction: bool = False, attention_chunk_size: int | None = None,
        uniform_q_len: int | None = None, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch.

        qo_indptr, paged_kv_indptr: int32 [batch_size + 1], offsets into the rows of q and into paged_kv_indices.
        paged_kv_indices: int32, page numbers. If they are on the host, plan() copies them. If they are on a device,
            each run() reads this tensor: the caller must keep it, and changes to it take effect with the next run().
        paged_kv_last_page_len: int32 [batch_size], tokens in each last page, 1..page_size. With index arrays on the
            host plan() does not synchronise; arrays on a device are copied to the host first.
        custom_mask: bool, flat, of sum(qo_len * kv_len) values: which keys each query sees. It replaces `causal`.
            packed_custom_mask: uint8, its bits, little-endian, each request from a byte of its own on.
        prefix_len_ptr: uint32 [batch_size], for multi-item scoring. Request i has prefix_len_ptr[i] tokens that all
            later tokens see, followed by items that do not see each other, with a delimiter before, between and after
            them. token_pos_in_items_ptr: uint16 [batch_size * token_pos_in_items_len], the position of each of these
            tokens in its item, counted from 1, with 0 for delimiters and as padding. max_item_len_ptr: uint16
            [batch_size], the largest of these positions (redundant, and checked). These arrays define a custom mask:
            it replaces `causal`, can be combined with a window, and for a GPU is computed on the GPU.
        causal: query i of a request sees keys up to i + kv_len - qo_len; with more queries than keys the first ones
            see none, and their results are 0.
        sm_scale: the factor that logits are multiplied by; None: 1 / sqrt(head_dim_qk).
        window_left: how many keys to the left of the diagonal are visible; -1: all.
        attention_chunk_size: divides the keys of a request into chunks of this size. The mask is causal, and a query
            sees no key before its own chunk (Llama 4's local layers). Not with a window or a custom mask.
        logits_soft_cap: c replaces each logit by c * tanh(logit / c); None or 0: no cap.
        pos_encoding_mode: "NONE"; "ALIBI", which adds slope * (key position - query position) to each scaled logit,
            with a slope for each head; or "ROPE_LLAMA", which rotates the pairs of dims (d, d + head_dim_qk / 2) of q
            and k by position / rope_scale * rope_theta ** (-2 * d / head_dim_qk). The position of a key is its index in
            the request; the last query has the position of the last key. rope_scale defaults to 1, rope_theta to 1e4.
        seq_lens, seq_lens_q: int32 [batch_size], keys and queries of each request; with backend="cudnn" and seq_lens_q
            qo_indptr may count elements, and pages are then HND, as in FlashInfer's backend of that name. block_tables:
            int32 [batch_size, pages], page numbers; max_token_per_sequence, max_sequence_kv: the largest numbers of
            queries and of keys. All of these are redundant, and are compared with the index arrays if they are on the
            host. uniform_q_len: a hint for FlashInfer's kernels.
        q_data_type, kv_data_type, o_data_type: torch dtypes or their names. The default for q is float16; keys, values
            and results default to q's type. 8-bit queries give float16 results. They are converted to 16 bits in a
            copy, which is exact. backend="quire:fp8" multiplies float8_e4m3fn queries, keys and values as they are on
            Hopper, which is faster. It rounds weights to that type, too: results then differ by 3 % of their norm, 16
            times as much as with a copy, whatever the number of keys. Not with use_cuda_graph=True.
        fixed_split_size, disable_split_kv: divide row tiles at multiples of so many tokens; do not divide them. With
            either, the result of a request does not depend on the rest of the batch, bit for bit. deterministic=True of
            the constructor chooses a size, and promises more.
        operands: tensors and numbers, by name, that the mask of the constructor's variant reads. plan() reads them to
            find the KV tiles that need the mask: plan again when they change.

        Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.
        """
        options = _paged_options(locals())
        if self._backend == "cudnn":
            row = options.num_qo_heads * options.head_dim_qk
            tokens = offsets_in_tokens(qo_indptr, "qo_indptr", seq_lens_q, row)
            self._layout = self._given_layout if tokens is qo_indptr else KVLayout.HND  # as there, whatever was said
            qo_indptr = tokens
        qo_indptr_host = host_indices(qo_indptr, "qo_indptr")
        batch = batch_size_of(qo_indptr_host, "qo_indptr")
        kv_indptr = host_indices(paged_kv_indptr, "paged_kv_indptr", batch + 1)
        last = last_page_lens(paged_kv_last_page_len, "paged_kv_last_page_len", kv_indptr, options.page_size)
        pages = page_indices(paged_kv_indices)
        lens = None if seq_lens is None else host_lens(seq_lens, batch)
        indices = Indices(batch, qo_indptr_host, 0, kv_indptr, last, pages, options.page_size, lens)
        most = max_token_per_sequence, max_sequence_kv
        if seq_lens_q is not None or block_tables is not None or most != (None, None):
            check_repeated(indices, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv)
        has_items = prefix_len_ptr is not None or token_pos_in_items_ptr is not None or max_item_len_ptr is not None
        if has_items or token_pos_in_items_len:
            custom_mask = with_items(
                custom_mask, packed_custom_mask, indices, self._workspace.device, prefix_len_ptr,
                token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr,
            )  # fmt: skip
        self.set_plan(AttentionSpec(indices, options, custom_mask, packed_custom_mask, operands=operands))

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: float | None, return_lse: Literal[False] = False,
        **options: Unpack[PrefillKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: float | None, return_lse: Literal[True],
        **options: Unpack[PrefillKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload  # with operands of a variant
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: torch.Tensor | None = None, kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None, lse_base: str = "log2", lse_layout: str = "NH",
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None, **operands: OperandValue,
    ) -> Result: ...  # fmt: skip
    @foreign(
        refused="uses_spcompress", permissions="skip_softmax_threshold_scale_factor use_fp16_softmax",
        checks_itself=True,
    )  # fmt: skip
    def run(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, *scales: Any, q_scale: float | None = None,
        k_scale: float | None = None, v_scale: float | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None,
        window_left: int | None = None, sinks: torch.Tensor | None = None, kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None, lse_base: str = "log2", lse_layout: str = "NH",
        use_fp16_softmax: bool | None = None, uses_spcompress: bool | None = None, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of q over the cache, as planned.

        q: [nnz_qo, num_qo_heads, head_dim_qk].
        paged_kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] (HND swaps page_size and num_kv_heads), or a
            pair of such tensors without the second dimension; only the last one must be contiguous.
        q_scale, k_scale: multiply the logits; their product must be positive. v_scale multiplies the result. With 8-bit
            queries each may be float32 [heads], for the heads of q or of keys and values; run() also takes the three,
            or k_scale and v_scale, by position, and return_lse after them.
        out, lse: tensors that results are written into, with the shapes of what is returned; None: new tensors.
        enable_pdl: whether the kernel may be launched before the previous kernel ends (programmatic dependent launch);
            None: if that is faster.
        window_left: must be the value given to plan().
        sinks: float32 [num_qo_heads], logits (natural logarithm) that are added to each denominator.
        lse_base, lse_layout: "ln" for an lse in base e; "HN" for a contiguous lse [num_qo_heads, nnz_qo].
        kv_cache_sf: of a cache of 4 bits (NVFP4), uint8 [..., head_dim / 2], the scales: float8_e4m3fn [...,
            head_dim / 16] in the shape and order of the cache, with any strides. plan() is told kv_data_type="nvfp4".
        operands: tensors and numbers, by name, that the score of the constructor's variant reads.

        Returns o [nnz_qo, num_qo_heads, head_dim_vo], or (o, lse) with return_lse=True, lse [nnz_qo, num_qo_heads] in
        float32, base 2. Raises PlanError if plan() was not called, and ValidationError for tensors that do not fit the
        plan or that require grad.
        """
        if scales:
            scales, return_lse = without_flag(scales, return_lse)
        if uses_spcompress:
            refuse(uses_spcompress=uses_spcompress)
        if skip_softmax_threshold_scale_factor is not None or use_fp16_softmax is not None:
            check_permissions(skip_softmax_threshold_scale_factor, use_fp16_softmax)
        if lse_base != "log2" or lse_layout != "NH":
            run = partial(
                self.run, q, paged_kv_cache, *scales, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out,
                enable_pdl=enable_pdl, window_left=window_left, sinks=sinks, kv_cache_sf=kv_cache_sf, **operands,
            )  # fmt: skip
            return converted(run, lse, return_lse, lse_base, lse_layout)
        if scales and self._text is None:
            q_scale, k_scale, v_scale = positional_scales(scales, q_scale, k_scale, v_scale)
        options = run_options(sinks, q_scale, k_scale, v_scale, window_left, enable_pdl, operands)
        if kv_cache_sf is not None:
            paged_kv_cache, options = self._scaled(paged_kv_cache, kv_cache_sf, options)
        if self._text is not None:
            return self._text.run(self, q, paged_kv_cache, scales, out, lse, return_lse, options)
        return self._runner().run(q, paged_kv_cache, out, lse, return_lse, options)

    def forward(
        self, q: torch.Tensor, paged_kv_cache: PagedCache, causal: bool = False, pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False, k_scale: float | None = None, v_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None, *, return_lse: bool = False,
        allow_fp16_qk_reduction: bool = False, **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """run() that also takes arguments of plan(), and plans again if they differ from those of the plan."""
        self._replan(locals())
        more: dict[str, Any] = operands
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse, **more)


_ragged_options = options_of(BatchPrefillWithRaggedKVCacheWrapper.plan)
_paged_options = options_of(BatchPrefillWithPagedKVCacheWrapper.plan)
