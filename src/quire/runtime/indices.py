"""Index arrays that are not copied: shapes are always checked, values only on the host."""

from __future__ import annotations

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_same_device, check_shape, check_tensor, to_int32


def check_offsets(indptr: torch.Tensor, name: str, largest_first: int = 0) -> None:
    """Check that offsets begin with 0, or at most `largest_first`, and do not decrease."""
    if not 0 <= int(indptr[0]) <= largest_first or bool((indptr[1:] < indptr[:-1]).any()):
        raise ValidationError(f"{name}: expected ascending offsets that begin with 0, got {indptr[:8].tolist()}...")


def check_range(values: torch.Tensor, name: str, low: int, high: int, what: str) -> None:
    """Each of `values` is in low..high, which `what` describes."""
    if values.numel():
        least, most = (int(bound) for bound in values.aminmax())
        if least < low or most > high:
            raise ValidationError(f"{name}: expected {what}, got {least}..{most}.")


def check_count(count: int, name: str, what: str) -> None:
    """Check that there are fewer than 2^31 of `what`: kernels count them in 32 bits."""
    if count >= 2**31:
        raise ValidationError(f"{name}: expected fewer than 2^31 {what}, got {count}.")


def without_gaps(
    indices: torch.Tensor, most: torch.Tensor | None, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first `most` [rows] (or all) entries of each row of indices [rows, top_k], those in 0..num_tokens - 1, in
    order, followed by arbitrary numbers; and how many there are, int32 [rows].
    """
    rows, top_k = indices.shape
    last = min(num_tokens, 2**31) - 1  # torch compares int32 with the low bits of a number
    names_one = (indices >= 0) & (indices <= last)
    if most is not None:
        names_one &= torch.arange(top_k, device=indices.device) < most[:, None]
    places = names_one.cumsum(1)
    found = indices.new_zeros(rows, top_k + 1)  # the last place is for indices that name none
    found.scatter_(1, torch.where(names_one, places - 1, top_k), indices)
    return found[:, :top_k], names_one.sum(1, dtype=torch.int32)


def index_table(tensor: torch.Tensor, name: str, length: int | None, device: torch.device) -> torch.Tensor:
    """`tensor` as a contiguous int32 array on `device`."""
    check_tensor(tensor, name)
    check_shape(tensor, name, {"length": length})
    check_same_device(tensor, name, device)
    return to_int32(tensor, name).contiguous()
