"""Checks of arguments: each failure names the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_int32
from typing import Any

import torch

from quire.errors import ValidationError
from quire.types import DType

__all__ = [
    "check_contiguous_last",
    "check_dtype",
    "check_flags",
    "check_positive",
    "check_same_device",
    "check_shape",
    "check_tensor",
    "host_indices",
    "last_entry",
    "refuse",
    "scalar",
]

_INT32_MAX = 2**31 - 1


def check_tensor(value: Any, name: str) -> torch.Tensor:
    """`value`, which must be a strided tensor."""
    if not isinstance(value, torch.Tensor):
        raise ValidationError(f"{name}: expected a torch.Tensor, got {type(value).__name__}.")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise ValidationError(
            f"{name}: expected a dense tensor with data, got layout {value.layout} on {value.device}."
        )
    return value


def check_shape(tensor: torch.Tensor, name: str, expected: Mapping[str, int | None]) -> None:
    """`tensor` has the named dimensions; None stands for any length."""
    shape = tuple(tensor.shape)
    if len(shape) == len(expected) and all(e is None or e == s for e, s in zip(expected.values(), shape, strict=True)):
        return
    wanted = ", ".join(dim if size is None else f"{dim}={size}" for dim, size in expected.items())
    raise ValidationError(f"{name}: expected [{wanted}], got {list(shape)}.")


def check_dtype(tensor: torch.Tensor, name: str, expected: DType) -> None:
    """`tensor` holds what plan() was told."""
    if tensor.dtype is not expected.torch:
        raise ValidationError(
            f"{name}: expected dtype {expected.torch}, got {tensor.dtype} (the dtype was fixed by plan())."
        )


def check_flags(**flags: Any) -> None:
    """Switches of the surface must be bools (or None, where a page says so)."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise ValidationError(f"{name}: expected a bool, got {value!r}.")


def check_same_device(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """`tensor` lies where the plan was made for."""
    if tensor.device != device:
        raise ValidationError(f"{name}: expected a tensor on {device}, got one on {tensor.device}.")


def check_contiguous_last(tensor: torch.Tensor, name: str) -> None:
    """Neighbours along the last dimension are neighbours in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValidationError(
            f"{name}: expected a contiguous last dimension, got strides {tuple(tensor.stride())}; "
            f"call .contiguous() on it."
        )


def check_positive(value: Any, name: str) -> int:
    """`value`, which must be a positive integer."""
    if type(value) is int and 1 <= value <= _INT32_MAX:
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValidationError(f"{name}: expected a positive integer, got {value!r}.")
    number = int(value.__index__())
    if not 1 <= number <= _INT32_MAX:
        raise ValidationError(f"{name}: expected a positive integer below 2^31, got {number}.")
    return number


def host_indices(value: torch.Tensor | Sequence[int], name: str, length: int | None = None) -> torch.Tensor:
    """`value` as a contiguous int32 tensor on the host, 1-D with `length` entries: itself where it is one.

    A tensor on a device is copied, which waits for it: give host arrays to plan without a synchronisation.
    """
    if isinstance(value, torch.Tensor) and value.dtype is torch.int32 and value.is_cpu:
        shape = value.shape
        if len(shape) == 1 and (length is None or shape[0] == length) and value.is_contiguous():
            return value
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValidationError(f"{name}: expected a 1-D integer tensor, got {type(value).__name__}.") from error
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        wanted = "1-D" if length is None else f"[{length}]"
        raise ValidationError(f"{name}: expected a tensor of shape {wanted}, got {list(tensor.shape)}.")
    return to_int32(tensor, name).cpu().contiguous()


def last_entry(indices: torch.Tensor) -> int:
    """indices[-1] of what host_indices() gave; a third of what torch takes to index."""
    return c_int32.from_address(indices.data_ptr() + 4 * (indices.shape[0] - 1)).value


def to_int32(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` as int32; int64 is taken if it fits."""
    if tensor.dtype is torch.int32:
        return tensor
    if tensor.dtype is not torch.int64:
        raise ValidationError(f"{name}: expected dtype torch.int32, got {tensor.dtype}.")
    if tensor.device.type == "cpu" and tensor.numel() and int(tensor.abs().max()) > _INT32_MAX:
        raise ValidationError(f"{name}: expected values that fit 32 bits, got {int(tensor.abs().max())}.")
    return tensor.to(torch.int32)


def scalar(value: float | torch.Tensor | None, name: str) -> float:
    """A scale as a float; None is 1. A one-element tensor is taken (on a device, reading it waits for it)."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValidationError(f"{name}: expected a number or a tensor of one element, got shape {list(value.shape)}.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"{name}: expected a number, got {value!r}.") from error


def refuse(**arguments: Any) -> None:
    """Arguments of the surface that no kernel here uses: anything but None or False is an error, never ignored."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValidationError(f"{name}: not supported by this call; expected None, got {value!r}.")
