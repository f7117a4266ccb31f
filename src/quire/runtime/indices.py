"""Index arrays that stay where they are: checked by shape everywhere, by value on the host."""

from __future__ import annotations

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_same_device, check_shape, check_tensor, to_int32


def check_offsets(indptr: torch.Tensor, name: str, largest_first: int = 0) -> None:
    """Offsets that begin with 0, or with at most `largest_first`, and do not fall."""
    if not 0 <= int(indptr[0]) <= largest_first or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValidationError(f"{name}: expected ascending offsets that begin with 0, got {indptr[:8].tolist()}...")


def check_range(values: torch.Tensor, name: str, low: int, high: int, what: str) -> None:
    """Each of `values` is in low..high, which `what` describes."""
    if values.numel():
        least, most = (int(bound) for bound in values.aminmax())
        if least < low or most > high:
            raise ValidationError(f"{name}: expected {what}, got {least}..{most}.")


def index_table(tensor: torch.Tensor, name: str, length: int | None, device: torch.device) -> torch.Tensor:
    """`tensor` as a contiguous int32 array on `device`."""
    check_tensor(tensor, name)
    check_shape(tensor, name, {"length": length})
    check_same_device(tensor, name, device)
    return to_int32(tensor, name).contiguous()
