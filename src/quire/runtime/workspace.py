"""The scratch memory of partial results: the caller's, or our own where a call has none."""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_tensor

__all__ = ["OwnWorkspace", "UserWorkspace", "Workspace", "partials_bytes"]

_ALIGNMENT = 16


def partials_bytes(num_partials: int, tile_rows: int, head_dim_vo: int) -> int:
    """Bytes of the partial results of a plan: a float32 row of o and (m, d) for each row of each slot."""
    return num_partials * tile_rows * (head_dim_vo + 2) * 4


class UserWorkspace:
    """The buffer that the caller reserved; its device is the device of the call."""

    def __init__(self, buffer: Any, name: str) -> None:
        self._name = name
        self._buffer = self._as_bytes(buffer)

    def _as_bytes(self, buffer: Any) -> torch.Tensor:
        tensor = check_tensor(buffer, self._name)
        if not tensor.is_contiguous():
            raise ValidationError(f"{self._name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}.")
        data = tensor.view(-1).view(torch.uint8)
        if tensor.numel() and tensor.data_ptr() % _ALIGNMENT:
            raise ValidationError(f"{self._name}: expected a {_ALIGNMENT}-byte aligned tensor.")
        return data

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def take(self, num_bytes: int) -> torch.Tensor:
        """The first `num_bytes` of it; ValidationError if it is smaller."""
        if num_bytes > self._buffer.numel():
            raise ValidationError(
                f"{self._name}: expected at least {num_bytes} bytes for the partial results of this batch, "
                f"got {self._buffer.numel()}; reserve more, or plan with disable_split_kv=True."
            )
        return self._buffer


class OwnWorkspace:
    """Memory from torch's allocator, as much as a plan needs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def take(self, num_bytes: int) -> torch.Tensor:
        """A new buffer of `num_bytes`."""
        return torch.empty(max(_ALIGNMENT, num_bytes), dtype=torch.uint8, device=self.device)


Workspace = UserWorkspace | OwnWorkspace
