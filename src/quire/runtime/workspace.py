"""Memory for partial results: the caller's workspace, or torch's allocator for calls without one.

Any number of wrappers on a GPU may share one workspace if all of their runs are on one stream, because partial results
are not needed after a run. Runs on two streams would overwrite each other's partial results, so wrappers on different
streams need separate workspaces. On the CPU each wrapper allocates its own memory, so wrappers of several threads may
share a workspace.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_tensor

ALIGNMENT = 16  #: bytes


def partials_bytes(num_partials: int, tile_rows: int, head_dim_vo: int) -> int:
    """Bytes of the partial results of a plan: a float32 row of o and (m, d) for each row of each of them."""
    return num_partials * tile_rows * (head_dim_vo + 2) * 4


class UserWorkspace:
    """The caller's buffer; its device is the device of the call, and its size is a limit, also on the CPU."""

    def __init__(self, buffer: Any, name: str) -> None:
        self._name = name
        self._buffer = self._as_bytes(buffer)
        self.device = self._buffer.device
        self.most_bytes, self._is_cuda = self._buffer.numel(), self._buffer.is_cuda  #: the first: that take() takes
        self._own = self._buffer[:0]  # on the CPU: what the largest plan took

    def _as_bytes(self, buffer: Any) -> torch.Tensor:
        tensor = check_tensor(buffer, self._name)
        if not tensor.is_contiguous():
            raise ValidationError(f"{self._name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}.")
        data = tensor.view(-1).view(torch.uint8)
        if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
            address = tensor.data_ptr()
            raise ValidationError(f"{self._name} must be {ALIGNMENT}-byte aligned, got address {address:#x}.")
        return data

    @property
    def buffer(self) -> torch.Tensor:
        """The caller's memory, as bytes."""
        return self._buffer

    def set_aside(self, num_bytes: int, most: float, alignment: int) -> tuple[UserWorkspace, torch.Tensor] | None:
        """The rest, and `num_bytes` from the end of the buffer; None if this is more than the fraction `most` of it."""
        if num_bytes + alignment > most * self.most_bytes:
            return None
        begin = self.most_bytes - num_bytes
        begin -= (self._buffer.data_ptr() + begin) % alignment
        return UserWorkspace(self._buffer[:begin], self._name), self._buffer[begin : begin + num_bytes]

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes`: the buffer or, on the CPU, new memory; ValidationError if the buffer is smaller."""
        if num_bytes > self.most_bytes:
            raise ValidationError(
                f"{self._name}: expected at least {num_bytes} bytes for the partial results of this batch, "
                f"got {self.most_bytes}; reserve more, or plan with disable_split_kv=True."
            )
        if self._is_cuda:
            return self._buffer
        if num_bytes > self._own.numel():
            self._own = OwnWorkspace(self.device).take(num_bytes)
        return self._own


class OwnWorkspace:
    """Memory from torch's allocator, as much as a plan needs."""

    most_bytes = 2**63 - 1  #: torch says when there is no more

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def set_aside(self, num_bytes: int, _most: float, _alignment: int) -> tuple[OwnWorkspace, torch.Tensor]:
        """This one, and a new buffer; torch aligns it to 256 bytes or more on a GPU."""
        return self, self.take(num_bytes)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A new buffer of `num_bytes`."""
        return torch.empty(max(ALIGNMENT, num_bytes), dtype=torch.uint8, device=self.device)


Workspace = UserWorkspace | OwnWorkspace
