"""8-bit queries. They are converted to 16 bits in a copy, which is exact, where no kernel reads them as they are.

FlashInfer's kernels for such queries also take a scale for each head of q, k and v. A query head has one KV head, so
the scales of q and k can multiply the copy, and those of v the result. In float16 the copy is also divided by a power
of two that brings its largest number below 2^15, and logits are multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_same_device, check_shape, check_tensor
from quire.runtime.graph import is_capturing
from quire.runtime.options import PlanOptions
from quire.types import PosEncodingMode

_LARGEST_EXPONENT = 15  #: of numbers in the copy: float16 ends at 2^16
_MOST_SHIFT = 64  #: binary places by which it is moved at most: the scale of logits stays within float32


def run_widened(
    run: Callable[..., Any], options: PlanOptions, q: torch.Tensor, *args: Any, q_scale: Any, k_scale: Any,
    v_scale: Any, others: tuple[torch.Tensor, ...], logits_scale_by: torch.Tensor | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`run` of a plan with queries converted to the kernel's type. Each scale is a number or float32 [heads]."""
    check_shape(check_tensor(q, "q"), "q", {"rows": None, "num_qo_heads": None, "head_dim_qk": None})
    wide, heads = q.to(options.types.q.torch), (options.num_qo_heads, options.num_kv_heads)
    of_q, of_k, of_v = (
        _of_query_heads(scale, name, count, heads[0], q.device)
        for scale, name, count in (
            (q_scale, "q_scale", heads[0]), (k_scale, "k_scale", heads[1]), (v_scale, "v_scale", heads[1]),
        )
    )  # fmt: skip
    if of_q is not None or of_k is not None:
        wide, number, by = _scaled(wide, _product(of_q, of_k), torch.finfo(q.dtype).max, _reads_scales(options))
        q_scale = number if of_q is not None else q_scale
        k_scale = k_scale if of_k is None else number if of_q is None else None
        logits_scale_by = _product(logits_scale_by, by)
    others = tuple(tensor.to(wide.dtype) if tensor.dtype is q.dtype else tensor for tensor in others)
    result = run(
        wide, *args, others=others, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale if of_v is None else None,
        logits_scale_by=logits_scale_by, **more,
    )  # fmt: skip
    if of_v is not None:
        (result[0] if isinstance(result, tuple) else result).mul_(of_v)
    return result


def has_scales_of_heads(*scales: Any) -> bool:
    """Whether one of the scales is a tensor of several numbers."""
    return any(isinstance(scale, torch.Tensor) and scale.numel() != 1 for scale in scales)


def run_scaled(
    run: Callable[..., Any], options: PlanOptions, q: torch.Tensor, *args: Any, q_scale: Any, k_scale: Any,
    v_scale: Any, **more: Any,
) -> Any:  # fmt: skip
    """`run` of a plan whose kernel reads 8-bit queries as they are, with scales of heads: it takes those of logits."""
    heads = options.num_qo_heads, options.num_kv_heads
    of_q, of_k, of_v = (
        _of_query_heads(scale, name, count, heads[0], q.device)
        for scale, name, count in (
            (q_scale, "q_scale", heads[0]), (k_scale, "k_scale", heads[1]), (v_scale, "v_scale", heads[1]),
        )
    )  # fmt: skip
    of_logits = _product(of_q, of_k)
    others = () if of_logits is None else (of_logits.view(-1),)
    result = run(
        q, *args, others=others, q_scale=q_scale if of_q is None else None, k_scale=k_scale if of_k is None else None,
        v_scale=v_scale if of_v is None else None, **more,
    )  # fmt: skip
    if of_v is not None:
        (result[0] if isinstance(result, tuple) else result).mul_(of_v)
    return result


def check_scales(q: torch.Tensor, **scales: Any) -> None:
    """ValidationError for scales per head with 16-bit queries, by the caller's name."""
    for name, scale in scales.items():
        if isinstance(scale, torch.Tensor) and scale.numel() != 1 and check_tensor(q, "q").element_size() > 1:
            raise ValidationError(f"{name}: expected one number with queries of {q.dtype}, got {list(scale.shape)}.")


def _of_query_heads(scale: Any, name: str, count: int, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
    """Scales of heads as float32 [num_qo_heads, 1]; None for one number, which kernels take."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return None
    check_same_device(check_tensor(scale, name), name, device)
    check_shape(scale, name, {"heads": count})
    return scale.float().repeat_interleave(num_qo_heads // count)[:, None]


def _product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a * b


def _reads_scales(options: PlanOptions) -> bool:
    """Whether kernels on a GPU read a scale of logits there: over pages, but not over copies of rotated keys."""
    return options.page_size > 0 and options.logits.pos_encoding is not PosEncodingMode.ROPE_LLAMA


def _scaled(
    wide: torch.Tensor, factors: Any, most: float, reads_scales: bool
) -> tuple[torch.Tensor, float | None, torch.Tensor | None]:
    """`wide` times the factors of its heads, moved into the range of its type, which it has for itself; and what
    logits are to be multiplied by, as a number and as a float32 on the device.

    most: the largest number of the queries' type. Only a kernel that cannot read the device's number makes the host
    wait for it; where it cannot wait, in a capture, the range is not moved.
    """
    if torch.finfo(wide.dtype).max > 2.0**16 or not wide.numel():  # bfloat16 has the range of the factors
        return wide.mul_(factors), None, None
    is_on_host = wide.device.type == "cpu"
    if not (is_on_host or reads_scales) and is_capturing(wide.device):
        return wide.mul_(factors), None, None
    unit = _unit(wide, factors, most)
    wide.mul_(factors / unit)
    return (wide, None, unit) if reads_scales and not is_on_host else (wide, float(unit), None)


def _unit(wide: torch.Tensor, factors: torch.Tensor, most: float) -> torch.Tensor:
    """The power of two that brings the largest finite product below 2^15; float32 on the device."""
    peaks = torch.linalg.vector_norm(wide, math.inf, dim=(0, 2), dtype=torch.float32).nan_to_num(most, most)
    top = (peaks * factors[:, 0].abs()).nan_to_num(0.0, 0.0).amax()
    places = torch.frexp(top).exponent - _LARGEST_EXPONENT
    return torch.exp2(places.clamp(-_MOST_SHIFT, _MOST_SHIFT).float())
