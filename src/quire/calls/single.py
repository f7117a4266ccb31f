"""Attention of one request, planned and run in one call.

The API is FlashInfer's (https://docs.flashinfer.ai/api/attention.html). While torch traces, an operator stands for
the call.
"""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from quire.engine.attention import AttentionCall
from quire.engine.checks import check_flags, check_shape, check_tensor, is_choice
from quire.engine.device import OwnWorkspace
from quire.engine.operands import NO_OPERANDS, OperandValue, by_position, split_operands, variant_of, variant_of_module
from quire.engine.operators import NOT_CAPTURABLE, OPERANDS, TracedOperands, is_tracing, new_results, operator
from quire.engine.options import PlanOptions, Types, foreign, heads, logits_options
from quire.engine.plan_cache import replayed
from quire.engine.run import Result, RunOptions
from quire.engine.schedule import Indices, check_count
from quire.engine.spec import AttentionSpec
from quire.engine.upcast import check_order, check_scales, numbers_in_byte, scaled, scales_of
from quire.engine.wrapper import Pair, SingleDecodeKeywords, SinglePrefillKeywords
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, o_dtype: Any = None,
    variant: Variant | None = None, operands: Mapping[str, Any], **options: Any,
) -> Result:  # fmt: skip
    """Attention of one request: q [qo_len, num_qo_heads, head_dim_qk], or with decode=True its only row."""
    if not is_tracing():
        own = variant_of(variant)
        return _attend_one(q, k, v, None, None, return_lse, o_dtype, variant=own, operands=operands, **options)
    out, lse = new_results(q, v, o_dtype, None, None, return_lse)
    text = None if variant is None else variant.expression.text
    _attend_one_into(q, k, v, out, lse, **options, variant=text, **TracedOperands.of(operands)._asdict())
    return out if lse is None else (out, lse)


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None,
    return_lse: bool, o_dtype: Any, *, decode: bool, sm_scale: float | None, window_left: int,
    logits_soft_cap: float | None, pos_encoding_mode: str, kv_layout: str, backend: str, q_scale: Any, k_scale: Any,
    v_scale: Any, causal: bool = False, custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    variant: Variant | None = None, operands: Mapping[str, Any] = NO_OPERANDS, k_sf: torch.Tensor | None = None,
    v_sf: torch.Tensor | None = None, deterministic: bool | None = None,
) -> Result:  # fmt: skip
    rows = {} if decode else {"qo_len": None}
    check_shape(check_tensor(q, "q"), "q", {**rows, "num_qo_heads": None, "head_dim_qk": None})
    if decode:
        q, out, lse = (tensor if tensor is None else tensor.unsqueeze(0) for tensor in (q, out, lse))  # type: ignore[assignment]
    call = "single_decode_with_kv_cache" if decode else "single_prefill_with_kv_cache"
    of_mask, of_score = split_operands(call, variant, operands)
    spec = spec_of_one(
        q, k, v, KVLayout.of(kv_layout), o_dtype if out is None else out.dtype, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, causal=causal,
        custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, rope_scale=rope_scale, rope_theta=rope_theta,
        variant=variant, of_mask=of_mask,
    )  # fmt: skip
    check_flags(deterministic=deterministic)
    spec = spec._replace(options=spec.options._replace(decodes=decode, deterministic=deterministic))
    kv, scales = scaled((k, v), None if k_sf is None else (k_sf, v_sf), 0)
    options = RunOptions(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, others=scales, operands=of_score)
    result = AttentionCall(
        spec, q, kv, OwnWorkspace(q.device), KVLayout.of(kv_layout), backend, out, lse, return_lse, options
    ).attend()
    if not decode:
        return result
    return tuple(part[0] for part in result) if isinstance(result, tuple) else result[0]


def spec_of_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: KVLayout, o_dtype: Any, *, sm_scale: float | None,
    window_left: int, logits_soft_cap: float | None, pos_encoding_mode: str, causal: bool,
    custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, variant: Variant | None = None,
    of_mask: Mapping[str, Any] = NO_OPERANDS,
) -> AttentionSpec:  # fmt: skip
    """The AttentionSpec of a call on one request, q [qo_len, num_qo_heads, head_dim_qk]."""
    in_byte = numbers_in_byte(check_tensor(k, "k"))
    token, head = (0, 1) if layout is KVLayout.NHD else (1, 0)
    sizes: dict[str, int | None] = dict.fromkeys(("kv_len", "num_kv_heads") if head else ("num_kv_heads", "kv_len"))
    check_shape(
        check_tensor(k, "k"),
        "k",
        {**sizes, "head_dim_qk" if in_byte == 1 else "head_dim_qk / 2": q.shape[2] // in_byte},
    )
    check_shape(check_tensor(v, "v"), "v", {**sizes, "kv_len": k.shape[token], "head_dim_vo": None})
    check_count(q.shape[0], "q", "tokens")
    check_count(k.shape[token], "k", "tokens")
    if v.dtype is not k.dtype:
        raise ValidationError(f"v: expected the dtype of k, {k.dtype}, got {v.dtype}.")
    kv_indptr = torch.tensor([0, k.shape[token]], dtype=torch.int32, device="cpu")
    options = PlanOptions(
        *heads(q.shape[1], k.shape[head]), q.shape[2], v.shape[2] * in_byte,
        Types.of(q.dtype, k.dtype, o_dtype, ("q", "k", "o_dtype")),
        logits_options(q.shape[2], sm_scale, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        causal, page_size=0, variant=variant,
    )  # fmt: skip
    indices = Indices(1, None, q.shape[0], kv_indptr, None, None, 1)
    return AttentionSpec(indices, options, custom_mask, packed_custom_mask, operands=of_mask)


@operator(
    """single(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, *, bool decode, float? sm_scale,
       int window_left, float? logits_soft_cap, str pos_encoding_mode, str kv_layout, str backend, float? q_scale,
       float? k_scale, float? v_scale, bool causal=False, Tensor? custom_mask=None,
       Tensor? packed_custom_mask=None, float? rope_scale=None, float? rope_theta=None, Tensor? k_sf=None,
       Tensor? v_sf=None, bool? deterministic=None, str? variant=None, """
    + OPERANDS
    + ") -> ()",
    tags=NOT_CAPTURABLE,
)
def _attend_one_into(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, *,
    variant: str | None = None, tensors: list[torch.Tensor] | None = None, floats: list[float] | None = None,
    ints: list[int] | None = None, names: list[str] | None = None, **options: Any,
) -> None:  # fmt: skip
    own = None if variant is None else Variant.parse(variant)
    operands = TracedOperands(tensors, floats, ints, names).by_name()
    _attend_one(q, k, v, out, lse, False, None, variant=own, operands=operands, **options)


@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[SinglePrefillKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
    **options: Unpack[SinglePrefillKeywords],
) -> Pair: ...  # fmt: skip
@overload
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
    kv_layout: str = "NHD", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, backend: str = "auto", return_lse: bool = False,
    kv_cache_sf: Any = None, k_scale: float | None = None, v_scale: float | None = None, *,
    allow_fp16_qk_reduction: bool = False, variant: Variant | None = None, deterministic: bool | None = None,
    **operands: OperandValue,
) -> Result: ...  # fmt: skip
@replayed
@foreign(permissions="use_fp16_qk_reduction allow_fp16_qk_reduction")
def single_prefill_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None, o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None, packed_custom_mask: torch.Tensor | None = None, causal: bool = False,
    kv_layout: str = "NHD", pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    rope_scale: float | None = None, rope_theta: float | None = None, backend: str = "auto", return_lse: bool = False,
    kv_cache_sf: Any = None, k_scale: float | None = None, v_scale: float | None = None, *,
    allow_fp16_qk_reduction: bool = False, variant: Variant | None = None, deterministic: bool | None = None,
    **operands: OperandValue,
) -> Result:  # fmt: skip
    """Attention of one request, without a plan.

    q: [qo_len, num_qo_heads, head_dim_qk]. k, v: [kv_len, num_kv_heads, head_dim_qk] and [..., head_dim_vo] (HND: heads
    first). custom_mask: bool [qo_len, kv_len]. kv_cache_sf: the scales (k_sf, v_sf) of keys and values of 4 bits, as in
    BatchPrefillWithPagedKVCacheWrapper.run(). variant: a quire.Variant, whose tensors and numbers are passed as
    keywords. deterministic: as in that wrapper's constructor. The other arguments are those of its plan() and run().

    Returns o [qo_len, num_qo_heads, head_dim_vo] in o_dtype (None: q's), or (o, lse) with return_lse=True, lse
    [qo_len, num_qo_heads] in float32, base 2. Raises ValidationError naming the argument, or UnsupportedError with each
    kernel's reason.

    >>> q, k, v = torch.randn(3, 8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> quire.single_prefill_with_kv_cache(q, k, v, causal=True).shape
    torch.Size([3, 8, 64])
    """
    check_flags(causal=causal)
    check_scales(q, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
    k_scale, v_scale = _either_scale("k", k_scale, scale_k), _either_scale("v", v_scale, scale_v)
    return attend_one(
        q, k, v, return_lse=return_lse, o_dtype=o_dtype, decode=False, sm_scale=sm_scale, window_left=window_left,
        logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, kv_layout=kv_layout, backend=backend,
        q_scale=scale_q, k_scale=k_scale, v_scale=v_scale, causal=causal, custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask, rope_scale=rope_scale, rope_theta=rope_theta, variant=variant,
        deterministic=deterministic, operands=operands, **_scales(kv_cache_sf, backend),
    )  # fmt: skip


def _scales(kv_cache_sf: Any, backend: Any) -> dict[str, Any]:
    """The scales of keys and values of 4 bits by name."""
    if kv_cache_sf is None:
        return {}
    check_order(backend)
    k_sf, v_sf = scales_of(kv_cache_sf, 0)
    return {"k_sf": k_sf.squeeze(0), "v_sf": v_sf.squeeze(0)}


def _either_scale(of: str, number: Any, tensor: Any) -> Any:
    """FlashInfer has two names for each scale: one for a number, and one for a tensor with 8-bit queries."""
    if number is not None and tensor is not None:
        raise ValidationError(f"{of}_scale: expected it or scale_{of}, got both.")
    return number if tensor is None else tensor


def single_prefill_with_kv_cache_return_lse(*args: Any, **options: Any) -> Pair:
    """(o [qo_len, num_qo_heads, head_dim_vo], lse [qo_len, num_qo_heads]) of single_prefill_with_kv_cache().

    The arguments are that function's, with return_lse=True. Raises ValidationError or UnsupportedError, as it does.

    >>> q, k, v = torch.randn(3, 8, 64).half(), torch.randn(20, 2, 64).half(), torch.randn(20, 2, 64).half()
    >>> o, lse = quire.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    >>> o.shape, lse.shape
    (torch.Size([3, 8, 64]), torch.Size([3, 8]))
    """
    result: Any = single_prefill_with_kv_cache(*args, **{"return_lse": True, **options})
    return result  # type: ignore[no-any-return]


def single_prefill_with_kv_cache_with_jit_module(
    jit_module: Variant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, kv_layout: str = "NHD",
    mask_mode: int = 0, window_left: int = -1, return_lse: bool = False,
) -> Result:  # fmt: skip
    """single_prefill_with_kv_cache() with a custom variant, as FlashInfer's function of this name.

    jit_module: a quire.Variant; docs/variants.md shows what FlashInfer's C++ text is in Python. args: the variant's
    tensors and numbers, in the order in which it declares them. mask_mode: FlashInfer's number of a mask, 0 (none) or 1
    (causal); other masks are the variant's. Returns o [qo_len, num_qo_heads, head_dim_vo], or (o, lse) with
    return_lse=True. Raises ValidationError naming the argument, or UnsupportedError with each kernel's reason.

    >>> q, k, v = torch.randn(3, 8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> variant = quire.variants.soft_cap
    >>> quire.single_prefill_with_kv_cache_with_jit_module(variant, q, k, v, 30.0, mask_mode=1).shape
    torch.Size([3, 8, 64])
    """
    variant = variant_of_module(jit_module)
    if not is_choice(mask_mode, (0, 1)):
        raise ValidationError(
            f"mask_mode: expected 0 (none) or 1 (causal), got {mask_mode!r}: write another mask into the variant."
        )
    return single_prefill_with_kv_cache(
        q, k, v, causal=mask_mode == 1, kv_layout=kv_layout, window_left=window_left, return_lse=return_lse,
        variant=variant, **by_position(variant, args),
    )  # fmt: skip


@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
    **options: Unpack[SingleDecodeKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
    **options: Unpack[SingleDecodeKeywords],
) -> Pair: ...  # fmt: skip
@overload
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | None = None, k_scale: float | None = None,
    v_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    return_lse: bool = False, *, backend: str = "auto", variant: Variant | None = None,
    deterministic: bool | None = None, **operands: OperandValue,
) -> Result: ...  # fmt: skip
@replayed
@foreign(permissions="use_tensor_cores")
def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: float | None = None, k_scale: float | None = None,
    v_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
    sm_scale: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    return_lse: bool = False, *, backend: str = "auto", variant: Variant | None = None,
    deterministic: bool | None = None, **operands: OperandValue,
) -> Result:  # fmt: skip
    """Decode attention of one request, without a plan.

    q: [num_qo_heads, head_dim]. k, v: [kv_len, num_kv_heads, head_dim] (HND: heads first). The other arguments are as
    in the constructor, plan() and run() of BatchDecodeWithPagedKVCacheWrapper. Returns o [num_qo_heads, head_dim], or
    (o, lse) with return_lse=True, lse [num_qo_heads] in float32, base 2. Raises ValidationError naming the argument, or
    UnsupportedError with each kernel's reason.

    >>> q, k, v = torch.randn(8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> quire.single_decode_with_kv_cache(q, k, v).shape
    torch.Size([8, 64])
    """
    return attend_one(
        q, k, v, return_lse=return_lse, decode=True, sm_scale=sm_scale, window_left=window_left,
        logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, kv_layout=kv_layout, backend=backend,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, rope_scale=rope_scale, rope_theta=rope_theta,
        variant=variant, deterministic=deterministic, operands=operands,
    )  # fmt: skip


def single_decode_with_kv_cache_with_jit_module(
    jit_module: Variant, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, kv_layout: str = "NHD",
    window_left: int = -1, return_lse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """single_decode_with_kv_cache() with a custom variant, as FlashInfer's function of this name.

    jit_module: a quire.Variant; docs/variants.md shows what FlashInfer's C++ text is in Python. args: the variant's
    tensors and numbers, in the order in which it declares them. Returns o [num_qo_heads, head_dim]; FlashInfer's
    function never returns an lse, and return_lse=True is refused. Raises ValidationError naming the argument, or
    UnsupportedError with each kernel's reason.

    >>> q, k, v = torch.randn(8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> variant = quire.variants.soft_cap
    >>> quire.single_decode_with_kv_cache_with_jit_module(variant, q, k, v, 30.0).shape
    torch.Size([8, 64])
    """
    variant = variant_of_module(jit_module)
    if return_lse is not False:
        raise ValidationError(
            f"return_lse: expected False, as FlashInfer's function returns o alone, got {return_lse!r}; call "
            f"single_decode_with_kv_cache() with variant= and return_lse=True."
        )
    return single_decode_with_kv_cache(
        q, k, v, kv_layout=kv_layout, window_left=window_left, variant=variant, **by_position(variant, args)
    )
