"""8-bit queries. They are converted to 16 bits in a copy, which is exact, because no kernel multiplies 8-bit queries.

FlashInfer's kernels for such queries also take a scale for each head of q, k and v. A query head has one KV head, so
the scales of q and k can multiply the copy, and those of v the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_same_device, check_shape, check_tensor
from quire.runtime.options import PlanOptions


def run_widened(
    run: Callable[..., Any], options: PlanOptions, q: torch.Tensor, *args: Any, q_scale: Any, k_scale: Any,
    v_scale: Any, others: tuple[torch.Tensor, ...], **more: Any,
) -> Any:  # fmt: skip
    """`run` of a plan with queries converted to the kernel's type. Each scale is a number or float32 [heads]."""
    check_shape(check_tensor(q, "q"), "q", {"rows": None, "num_qo_heads": None, "head_dim_qk": None})
    wide, heads = q.to(options.types.q.torch), (options.num_qo_heads, options.num_kv_heads)
    factors = [
        _of_query_heads(scale, name, count, heads[0], q.device)
        for scale, name, count in (
            (q_scale, "q_scale", heads[0]), (k_scale, "k_scale", heads[1]), (v_scale, "v_scale", heads[1]),
        )
    ]  # fmt: skip
    for factor in factors[:2]:
        wide = wide if factor is None else (wide * factor).to(wide.dtype)
    numbers = [
        scale if factor is None else None for scale, factor in zip((q_scale, k_scale, v_scale), factors, strict=True)
    ]
    others = tuple(tensor.to(wide.dtype) if tensor.dtype is q.dtype else tensor for tensor in others)
    result = run(wide, *args, others=others, q_scale=numbers[0], k_scale=numbers[1], v_scale=numbers[2], **more)
    if factors[2] is not None:
        (result[0] if isinstance(result, tuple) else result).mul_(factors[2])
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
