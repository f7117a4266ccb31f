"""Attention of one request, planned and run in one call; while torch traces, an operator stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.errors import ValidationError
from quire.kernels.variant import Variant
from quire.runtime.attention import Attention, AttentionSpec, Result
from quire.runtime.checks import check_shape, check_tensor
from quire.runtime.indices import check_count
from quire.runtime.ops import NOT_CAPTURABLE, OPERANDS, TracedOperands, is_tracing, new_results, operator
from quire.runtime.options import PlanOptions, Types, heads, logits_options
from quire.runtime.planner import NO_OPERANDS
from quire.runtime.schedule import Indices
from quire.runtime.variant_operands import of_plan_and_run, variant_of
from quire.runtime.workspace import OwnWorkspace
from quire.types import KVLayout


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
    variant: Variant | None = None, operands: Mapping[str, Any] = NO_OPERANDS,
) -> Result:  # fmt: skip
    rows = {} if decode else {"qo_len": None}
    check_shape(check_tensor(q, "q"), "q", {**rows, "num_qo_heads": None, "head_dim_qk": None})
    if decode:
        q, out, lse = (tensor if tensor is None else tensor.unsqueeze(0) for tensor in (q, out, lse))  # type: ignore[assignment]
    call = "single_decode_with_kv_cache" if decode else "single_prefill_with_kv_cache"
    of_mask, of_score = of_plan_and_run(call, variant, operands)
    spec = spec_of_one(
        q, k, v, KVLayout.of(kv_layout), o_dtype if out is None else out.dtype, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, causal=causal,
        custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, rope_scale=rope_scale, rope_theta=rope_theta,
        variant=variant, of_mask=of_mask,
    )  # fmt: skip
    result = Attention(spec, KVLayout.of(kv_layout), OwnWorkspace(q.device), backend).run(
        q, (k, v), out=out, lse=lse, return_lse=return_lse, sinks=None, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale, window_left=None, enable_pdl=None, operands=of_score,
    )  # fmt: skip
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
    token, head = (0, 1) if layout is KVLayout.NHD else (1, 0)
    sizes: dict[str, int | None] = dict.fromkeys(("kv_len", "num_kv_heads") if head else ("num_kv_heads", "kv_len"))
    check_shape(check_tensor(k, "k"), "k", {**sizes, "head_dim_qk": q.shape[2]})
    check_shape(check_tensor(v, "v"), "v", {**sizes, "kv_len": k.shape[token], "head_dim_vo": None})
    check_count(q.shape[0], "q", "tokens")
    check_count(k.shape[token], "k", "tokens")
    if v.dtype is not k.dtype:
        raise ValidationError(f"v: expected the dtype of k, {k.dtype}, got {v.dtype}.")
    kv_indptr = torch.tensor([0, k.shape[token]], dtype=torch.int32, device="cpu")
    options = PlanOptions(
        *heads(q.shape[1], k.shape[head]), q.shape[2], v.shape[2],
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
       Tensor? packed_custom_mask=None, float? rope_scale=None, float? rope_theta=None, str? variant=None, """
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
