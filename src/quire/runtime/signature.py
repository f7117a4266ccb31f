"""The signature of tensors: everything that decides whether they are valid, except addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

_TensorGuards: Any = None
with suppress(ImportError):  # torch.compile's own: one call takes a fifth of the time of reading the same attributes
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards


def pointers_of(tensors: Sequence[Any]) -> list[int]:
    """Addresses of tensors; [0] if one of them is no tensor, or has no memory."""
    pointers = []
    try:
        for tensor in tensors:  # a list comprehension would be a call
            pointers.append(tensor.data_ptr())
    except (AttributeError, RuntimeError):
        return [0]
    return pointers


class Signature:
    """Shapes, strides, types, devices, and whether tensors are negated views or need a gradient."""

    __slots__ = ("count", "fits")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.count = len(tensors)
        #: whether as many other tensors have this signature
        self.fits: Callable[..., bool] = _guards(tensors) if _TensorGuards else _comparison(tensors)


def _guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def _comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    def describe(t: torch.Tensor) -> tuple[Any, ...]:
        return type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad

    own = [describe(t) for t in tensors]
    return lambda *others: own == [describe(t) for t in others]
