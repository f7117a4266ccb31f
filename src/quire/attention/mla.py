"""Multi-head latent attention (MLA) over a paged cache of latents, with absorbed projections, as in decode.

The API is FlashInfer's (https://docs.flashinfer.ai/api/attention.html#flashinfer-mla). All query heads share one KV
head. A key has two parts: the latent ckv, which is also the value, and kpe, to which RoPE was applied. A query has two
parts, too: q_nope, already multiplied by the key projection, and q_pe. Logits are (q_nope . ckv + q_pe . kpe) *
sm_scale.
"""

# ruff: noqa: ARG002  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from quire.cache.latents import cached_parts, concat_and_cache_mla, concat_and_cache_mla_rope_fused, latent_parts
from quire.calls import Scale
from quire.calls.decode import TableCall
from quire.calls.latents import (
    MLAPlanMetadata,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from quire.engine.attention import Attention, planned
from quire.engine.checks import check_flags, check_positive, check_tensor, number, scalar
from quire.engine.operands import OperandValue, variant_of
from quire.engine.operators import is_tracing
from quire.engine.options import PlanOptions, Types, foreign, logits_options, options_of, split_size
from quire.engine.run import Result, RunOptions
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import to_base_e
from quire.engine.wrapper import AttentionWrapper, LatentKeywords, MlaModule, Pair
from quire.errors import QuireError, UnsupportedArgumentError, UnsupportedError, ValidationError
from quire.kernels.expressions.variant import Variant

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "BatchMLAPagedAttentionWrapper", "MLAPlanMetadata", "concat_and_cache_mla", "concat_and_cache_mla_rope_fused",
    "trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla",
]  # fmt: skip

_NO_KPE = 64  #: dims of zeros that a kernel reads as q_pe where there is none
_LSE_MODES = {"none": None, "base2": False, "basee": True}  #: what return_lse_base_on_e must be


def _read_options(
    num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
    q_data_type: Any, kv_data_type: Any, output_dtype: Any, fixed_split_size: int | None, disable_split_kv: bool,
) -> PlanOptions:  # fmt: skip
    check_flags(causal=causal, disable_split_kv=disable_split_kv)
    if causal is None or sm_scale is None:
        name = "causal" if causal is None else "sm_scale"
        raise ValidationError(f"{name}: expected it with the other arguments of plan(), got None.")
    has_rows = kv_data_type in (torch.uint8, "uint8")
    types = Types.of(q_data_type, "float8_e4m3fn" if has_rows else kv_data_type, output_dtype)
    vo = check_positive(head_dim_ckv, "head_dim_ckv")
    qk = vo + (
        _NO_KPE if type(head_dim_kpe) is int and head_dim_kpe == 0 else check_positive(head_dim_kpe, "head_dim_kpe")
    )
    return PlanOptions(
        check_positive(num_heads, "num_heads"), 1, qk, vo, types,
        logits_options(qk, sm_scale, -1, None, "NONE"), causal, check_positive(page_size, "page_size"),
        split_size(fixed_split_size, disable_split_kv), is_mla=True, tile_scales=has_rows,
    )  # fmt: skip


class BatchMLAPagedAttentionWrapper(AttentionWrapper):
    """MLA with absorbed projections of a batch of requests over a paged cache of latents, for decode, draft tokens and
    prefill.

    float_workspace_buffer, backend: as in the other wrappers; 128 MiB of any dtype on the device of the calls.
        FlashInfer's names ("fa2", "fa3", "cutlass") mean "auto".
    use_cuda_graph: run() may be captured in a CUDA graph, and plan() called again before each replay. The buffers are
        then required, int32 on the device: qo_indptr and kv_indptr [batch_size + 1], kv_len_arr [batch_size], and
        kv_indices [largest number of pages], into which plan() copies page numbers.
    variant: a quire.Variant, on the backends cpu and fa2. plan() takes what its mask reads, by name, and run() what
        only its score reads. Its mask hides keys one by one: no KV tile is skipped.
    deterministic: as in BatchPrefillWithPagedKVCacheWrapper.

    >>> wrapper = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    >>> int32 = {"dtype": torch.int32}
    >>> wrapper.plan(
    ...     torch.tensor([0, 1, 2], **int32), torch.tensor([0, 2, 3], **int32), torch.tensor([4, 0, 2], **int32),
    ...     torch.tensor([21, 16], **int32), num_heads=16, head_dim_ckv=512, head_dim_kpe=64, page_size=16,
    ...     causal=False, sm_scale=192**-0.5, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    ... )
    >>> q_nope, q_pe = torch.randn(2, 16, 512).bfloat16(), torch.randn(2, 16, 64).bfloat16()
    >>> cache = torch.randn(6, 16, 576).bfloat16()  # [num_pages, page_size, head_dim_ckv + head_dim_kpe]
    >>> wrapper.run(q_nope, q_pe, cache[..., :512], cache[..., 512:]).shape
    torch.Size([2, 16, 512])
    """

    _causal: bool | None = None  # SGLang writes these three, and then plans by _cached_module
    _sm_scale: float | None = None
    _page_size: int | None = None

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None, kv_len_arr: torch.Tensor | None = None, backend: str = "auto", *,
        variant: Variant | None = None, deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            float_workspace_buffer, "NHD", use_cuda_graph, backend, variant_of(variant), deterministic=deterministic,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr,
        )  # fmt: skip
        self._lse_base_on_e: bool | None = None
        self._plan_defaults: tuple[bool | None, bool] = None, False  # enable_pdl and use_sinks of plan()
        self._has_kpe = True
        self._token_scaled: tuple[Attention, Attention] | None = None  # the last plan, and that for ckv_scale_arr

    @foreign(refused="use_profiler", permissions="skip_softmax query_layout kv_cache_layout")
    def plan(
        self, qo_indptr: torch.Tensor | None = None, kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None, kv_len_arr: torch.Tensor | None = None, num_heads: int | None = None,
        head_dim_ckv: int | None = None, head_dim_kpe: int | None = None, page_size: int | None = None,
        causal: bool | None = None, sm_scale: float | None = None, q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None, use_profiler: bool = False, *,
        metadata: MLAPlanMetadata | None = None, cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None, max_q_len: int | None = None,
        query_layout: str | None = None, kv_cache_layout: str | None = None, lse_mode: str = "none",
        output_dtype: str | torch.dtype | None = None, output_scale: str = "none", scale_mode: str = "default",
        skip_softmax: bool = False, enable_pdl: bool | None = None, use_sinks: bool = False,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch.

        qo_indptr: int32 [batch_size + 1], offsets into the rows of q; the queries of a request are its last tokens.
        kv_indptr: int32 [batch_size + 1], offsets into kv_indices, the page numbers. plan() copies page numbers that
            are on the host; each run() reads the caller's tensor if it is on a device.
        kv_len_arr: int32 [batch_size], tokens of each request; further pages are not read.
        cum_seq_lens_q, block_tables int32 [batch_size, pages], seq_lens, max_q_len: the same batch as a block table.
        metadata: the same arrays as MLAPlanMetadata. If the lengths are on the host, plan() does not synchronise.
        num_heads: any number. head_dim_ckv, head_dim_kpe: 512 and 64, or 512 and 0 without RoPE. causal: query i sees
            keys up to i + kv_len - qo_len. sm_scale: the factor of the logits, 1 / sqrt(128 + 64) for DeepSeek's
            models.
        q_data_type, kv_data_type, output_dtype: of the queries, the cache and the result; each defaults to the one
            before it. uint8 means a cache with rows of 656 bytes, which run() takes as kv_cache.
        lse_mode: "none", or the base of run()'s lse, "base2" or "basee"; the arguments of run() must agree.
        query_layout, kv_cache_layout: "packed" or "split"; run() takes both. output_scale: "none". scale_mode:
            "default" or "kv-per-tensor", for 8-bit caches. use_profiler: only False. skip_softmax: a permission that
            has no effect. enable_pdl: what run() does by default. use_sinks: with True run() requires sinks.
        fixed_split_size, disable_split_kv: as in BatchPrefillWithPagedKVCacheWrapper.plan().
        operands: tensors and numbers, by name, that the mask of the constructor's variant reads.

        Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.
        """
        check_flags(enable_pdl=enable_pdl, use_sinks=use_sinks)
        _check_word("lse_mode", lse_mode, tuple(_LSE_MODES))
        _check_word("output_scale", output_scale, ("none",), UnsupportedArgumentError)
        _check_word("scale_mode", scale_mode, ("default", "kv-per-tensor"), UnsupportedArgumentError)
        options = _options(locals())
        flat = MLAPlanMetadata(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len
        )
        self.set_plan(AttentionSpec(flat.or_else(metadata).indices(options.page_size), options, operands=operands))
        self._has_kpe = head_dim_kpe != 0
        self._lse_base_on_e, self._plan_defaults = _LSE_MODES[lse_mode], (enable_pdl, use_sinks)
        self._causal, self._sm_scale, self._page_size = options.causal, options.logits.sm_scale, options.page_size

    begin_forward = plan

    @overload
    def run(
        self, q_nope: torch.Tensor | None = None, q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None, kpe_cache: torch.Tensor | None = None, *,
        return_lse: Literal[False] = False, **options: Unpack[LatentKeywords],
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q_nope: torch.Tensor | None = None, q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None, kpe_cache: torch.Tensor | None = None, *, return_lse: Literal[True],
        **options: Unpack[LatentKeywords],
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q_nope: torch.Tensor | None = None, q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None, kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None, kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None, return_lse_base_on_e: bool = False, o_scale: float | None = None, *,
        query: Any = None, kv_cache: Any = None, ckv_scale: float | None = None, ckv_scale_arr: Any = None,
        kpe_scale: float | None = None, sinks: torch.Tensor | None = None, enable_pdl: bool | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, bmm1_scale: Any = None, bmm2_scale: Any = None,
        **operands: OperandValue,
    ) -> Result: ...  # fmt: skip
    @foreign(refused="profiler_buffer o_scale bmm1_scale bmm2_scale", permissions="skip_softmax_threshold_scale_factor")
    def run(
        self, q_nope: torch.Tensor | None = None, q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None, kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None, kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None, return_lse_base_on_e: bool = False, o_scale: float | None = None, *,
        query: Any = None, kv_cache: Any = None, ckv_scale: float | None = None, ckv_scale_arr: Any = None,
        kpe_scale: float | None = None, sinks: torch.Tensor | None = None, enable_pdl: bool | None = None,
        skip_softmax_threshold_scale_factor: float | None = None, bmm1_scale: Any = None, bmm2_scale: Any = None,
        **operands: OperandValue,
    ) -> Result:  # fmt: skip
        """Attention of the queries over the cache; returns o [nnz_qo, num_heads, head_dim_ckv], or (o, lse) with
        return_lse=True: lse [nnz_qo, num_heads] float32, in base 2, or in base e with return_lse_base_on_e=True.

        q_nope [nnz_qo, num_heads, head_dim_ckv] and q_pe [nnz_qo, num_heads, head_dim_kpe]; or `query`, both
            concatenated in the last dimension, or as a pair.
        ckv_cache [num_pages, page_size, head_dim_ckv] and kpe_cache [num_pages, page_size, head_dim_kpe], or
            `kv_cache`, both also concatenated or as a pair. Only the last dimension must be contiguous, so all of them
            may be views. If planned as uint8, kv_cache is uint8 [num_pages, page_size, 656], in FlashMLA's format: 512
            float8_e4m3fn numbers, a float32 scale for each 128 of them, and 64 bfloat16 numbers.
        out, lse: tensors that results are written into.
        kv_len, page_table: for calls without a plan: tokens [batch_size] and pages [batch_size, pages] of each request,
            which has one query; sm_scale is then 1 / sqrt(192). On a GPU such a call may be captured. With a plan,
            None.
        ckv_scale, kpe_scale: numbers that an 8-bit cache is multiplied by. If they differ, the queries of the part with
            the smaller one are copied and multiplied by their quotient.
        sinks: float32 [num_heads], logits (natural logarithm) that are added to the denominators.
        ckv_scale_arr: instead of ckv_scale, for a ckv of float8_e4m3fn and queries of bfloat16: float32 [num_pages,
            page_size, 4], a factor for each 128 dims of a latent. kpe is then copied and multiplied by kpe_scale. Not
            in CUDA graphs; there, use a cache with rows of 656 bytes.
        profiler_buffer, o_scale, bmm1_scale, bmm2_scale: only None. skip_softmax_threshold_scale_factor: permits to
            skip small weights; Quire's kernels compute all of them.

        Raises ValidationError naming the argument, or PlanError without a plan.
        """
        if enable_pdl is None:
            enable_pdl = self._plan_defaults[0]
        if self._plan_defaults[1] and sinks is None:
            raise ValidationError("sinks: expected a tensor, as use_sinks=True of plan() says, got None.")
        check_flags(return_lse=return_lse, return_lse_base_on_e=return_lse_base_on_e, enable_pdl=enable_pdl)
        pair = _either("query", query, "q_nope", q_nope, "q_pe", q_pe)
        nope, pe = latent_parts(pair, "query", "q_nope", "q_pe")
        pair = _either("kv_cache", kv_cache, "ckv_cache", ckv_cache, "kpe_cache", kpe_cache)
        ckv, kpe, *scales = cached_parts(pair, "kv_cache", "ckv_cache", "kpe_cache")
        if not is_tracing():
            check_tensor(ckv, "ckv_cache"), check_tensor(kpe, "kpe_cache")
        logits_scale = ckv_scale
        if not self._has_kpe:
            pe, kpe = _without_kpe(nope, pe, ckv)
        elif ckv_scale != kpe_scale and ckv_scale_arr is None:
            nope, pe, logits_scale = _scaled(nope, pe, ckv_scale, kpe_scale)
        self._check_base(return_lse or lse is not None, return_lse_base_on_e)
        runner = None
        if ckv_scale_arr is not None:
            runner = self._with_token_scales(ckv_scale, kv_len, page_table, len(scales) > 0)
            kpe = kpe if kpe.dtype is pe.dtype else (kpe.float() * scalar(kpe_scale, "kpe_scale")).to(pe.dtype)
            scales = [check_tensor(ckv_scale_arr, "ckv_scale_arr")]
        if kv_len is not None or page_table is not None:
            if self._variant is not None or operands:
                raise UnsupportedError("variant: expected none in a call without plan(); plan() the batch first.")
            result = self._run_unplanned(
                (nope, pe), (ckv, kpe, *scales), kv_len, page_table, out, lse, return_lse,
                (logits_scale, ckv_scale), sinks, enable_pdl,
            )  # fmt: skip
        else:
            self._check_rows(len(scales) > 0 and runner is None)
            result = (runner or self._runner()).run(
                pe, (kpe.unsqueeze(2), ckv.unsqueeze(2)), out, lse, return_lse,
                RunOptions(
                    sinks, k_scale=logits_scale, v_scale=ckv_scale, enable_pdl=enable_pdl,
                    others=(nope, *(part.unsqueeze(2) for part in scales)), operands=operands,
                ),
            )  # fmt: skip
        statistics = result[1] if return_lse else lse
        if return_lse_base_on_e and statistics is not None:
            to_base_e(statistics)
        return result

    def _with_token_scales(self, ckv_scale: Any, kv_len: Any, page_table: Any, is_packed: bool) -> Attention:
        """The plan of the same batch with a scale for each 128 dims of a latent."""
        if ckv_scale is not None or is_packed:
            other = f"ckv_scale={ckv_scale}" if ckv_scale is not None else "rows of 656 bytes, which have their own"
            raise ValidationError(f"ckv_scale_arr: expected it alone, got it beside {other}.")
        if kv_len is not None or page_table is not None or self._graph is not None:
            raise UnsupportedError(
                "ckv_scale_arr: expected a plan() without use_cuda_graph=True, as it needs a plan of its own; or plan "
                "with kv_data_type=torch.uint8 a cache of rows of 656 bytes, which hold such scales."
            )
        attention = planned(self._attention)
        if self._token_scaled is None or self._token_scaled[0] is not attention:
            self._token_scaled = attention, attention.replan(self._workspace, self._backend, tile_scales=True)
        return self._token_scaled[1]

    def _check_rows(self, is_packed: bool) -> None:
        """Check that the cache has rows of 656 bytes if and only if that was planned."""
        planned = self._attention is not None and self._attention.spec.options.tile_scales
        if self._attention is not None and planned != is_packed:
            wanted = "rows of 656 bytes, as kv_data_type=torch.uint8 says" if planned else "no rows of 656 bytes"
            raise ValidationError(f"kv_cache: expected {wanted}; plan() with the type of the cache.")

    def _check_base(self, wants_lse: bool, base_on_e: bool) -> None:
        """Check that the base of the lse is the one given to plan(), if any."""
        if wants_lse and self._lse_base_on_e not in (None, base_on_e):
            raise ValidationError(
                f"return_lse_base_on_e: expected {self._lse_base_on_e}, as lse_mode of plan() says, got {base_on_e}."
            )

    def _run_unplanned(
        self, query: tuple[torch.Tensor, torch.Tensor], cache: tuple[torch.Tensor, ...], kv_len: Any,
        page_table: Any, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool,
        scales: tuple[Any, Any], sinks: torch.Tensor | None, enable_pdl: bool | None,
    ) -> Result:  # fmt: skip
        """run() with a block table and lengths instead of a plan. scales: of logits, and of values."""
        if self._attention is not None or kv_len is None or page_table is None:
            raise ValidationError(
                "kv_len, page_table: expected both without a plan, or neither after plan(), which was told the lengths."
            )
        scale, v_scale = (Scale.of(value, "ckv_scale", self.device, positive=True) for value in scales)
        return TableCall.of_latents(
            query, cache, self._workspace, page_table, kv_len, page_table.shape[-1] * cache[0].shape[1],
            scale.times(Scale(192**-0.5)), v_scale, out=out, lse=lse, return_lse=return_lse, sinks=sinks,
            enable_pdl=enable_pdl, backend=self._backend, deterministic=self._deterministic,
        ).attend()  # fmt: skip

    @property
    def _kv_indices_buf(self) -> torch.Tensor | None:
        return self._array("kv_indices", "kv_indices")

    @property
    def _kv_len_arr_buf(self) -> torch.Tensor | None:
        return self._buffers["kv_len_arr"]

    @property
    def _cached_module(self) -> MlaModule | None:  # type: ignore[override]
        return None if self._attention is None else MlaModule(self)


_options = options_of(BatchMLAPagedAttentionWrapper.plan, _read_options)


def _scaled(
    nope: torch.Tensor, pe: torch.Tensor, ckv_scale: Any, kpe_scale: Any
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """q_nope and q_pe, of which the one whose keys have the smaller scale is made smaller, so that no number leaves the
    range of its type; and the scale by which the kernel multiplies all logits.
    """
    if ckv_scale is None or kpe_scale is None:
        raise ValidationError(f"kpe_scale: expected it with ckv_scale={ckv_scale}, got {kpe_scale}.")
    of_nope, of_pe = number(ckv_scale, "ckv_scale", positive=True), number(kpe_scale, "kpe_scale")
    largest = max(of_nope, abs(of_pe))
    return _times(nope, of_nope / largest, "q_nope"), _times(pe, of_pe / largest, "q_pe"), largest


def _times(tensor: torch.Tensor, factor: float, name: str) -> torch.Tensor:
    return tensor if factor == 1.0 else (check_tensor(tensor, name).float() * factor).to(tensor.dtype)


def _without_kpe(nope: torch.Tensor, pe: torch.Tensor, ckv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replacements for q_pe and kpe, if there are none: zeros, and dims of ckv that are multiplied by them."""
    if pe.shape[-1]:
        raise ValidationError(f"q_pe: expected no dims, as head_dim_kpe=0 was planned, got {list(pe.shape)}.")
    return nope.new_zeros((*nope.shape[:-1], _NO_KPE)), ckv[..., :_NO_KPE]


def _check_word(name: str, value: Any, words: tuple[str, ...], kind: type[QuireError] = ValidationError) -> None:
    if value not in words:
        raise kind(f"{name}: expected one of {', '.join(map(repr, words))}, got {value!r}.")


def _either(name: str, whole: Any, first_name: str, first: Any, second_name: str, second: Any) -> Any:
    """`whole`, or the pair of its parts: one of both must be given."""
    if whole is None and first is not None and second is not None:
        return first, second
    if whole is None or first is not None or second is not None:
        raise ValidationError(f"{name}: expected it, or {first_name} and {second_name}, and not both.")
    return whole
