"""CUDA-graph mode: what a captured call reads lies at fixed places, so that plan() can change lengths between replays.

A graph keeps the launch that it captured: the grid, and the parameter struct by value. The schedule therefore always
divides work into one partition for each resident CTA, and everything that depends on lengths lies in one buffer that
each plan() fills anew. The first plan() that succeeds fixes the rest; a later one that differs in it is an error.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quire.errors import PlanError, ValidationError
from quire.kernels import Decision, TileShape
from quire.runtime.checks import check_same_device, check_tensor, refuse
from quire.runtime.target import current_stream

_OPTIONAL = ("mask_indptr_buf", "qk_indptr_buf")  #: with custom_mask_buf; both names mean the same


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured, which the default stream never is."""
    if current_stream(device) == 0:
        return False
    index = device.index or 0
    if torch._C._cuda_getDevice() == index:  # torch answers for the current device
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()


def refuse_capture(what: str, device: torch.device) -> None:
    """PlanError in a capture of a CUDA graph: a replay would read what `what` made, which may be gone by then."""
    if is_capturing(device):
        raise PlanError(
            f"{what} cannot be captured in a CUDA graph: construct the wrapper with use_cuda_graph=True and its "
            f"buffers, and call plan() before the capture and before each replay."
        )


class GraphState:
    """What the plans of one wrapper share: the caller's buffers, and what the first plan() that succeeded has fixed.

    `batch_size` requests; `kv_indices` takes the page numbers (None: ragged), `mask` the bits of custom masks. Until a
    plan() has succeeded (`keep`), each one sets the limits anew.
    """

    def __init__(self, batch_size: int, kv_indices: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        self.batch_size = batch_size
        self.kv_indices = kv_indices
        self.mask = mask
        self.decision: Decision | None = None
        self.max_rows = 0  #: rows of q of the first plan
        self.max_tokens = 0  #: tokens of keys of the first plan, or of as many pages as kv_indices takes
        self._fixed: dict[str, Any] = {}
        self._buffer: torch.Tensor | None = None
        self._partials: torch.Tensor | None = None
        self._params = b""

    @property
    def is_planned(self) -> bool:
        """Whether a plan() has succeeded."""
        return bool(self._params)

    def fix(self, **values: Any) -> None:
        """Check that these are as the first plan() had them; PlanError otherwise."""
        if not self.is_planned:
            self._fixed = values
        for name, value in values.items():
            if value != self._fixed[name]:
                raise PlanError(
                    f"{name}: expected {self._fixed[name]}, which the first plan() of a wrapper for CUDA graphs fixes, "
                    f"got {value}; use another wrapper for it."
                )

    def tile_capacity(self, batch_size: int, qo_len: int, group_size: int, tile_rows: int, split: int) -> int:
        """Row tiles of the largest batch within the limits; `split`: tokens of a fixed split, or 0."""
        whole = batch_size * -(-qo_len * group_size // tile_rows)
        if qo_len == 0:
            whole = self.max_rows * group_size // tile_rows + batch_size
        return whole * (self.max_tokens // split + 1) + batch_size if split else whole

    def unit_capacity(self, tile: TileShape, group_size: int, tile_capacity: int) -> int:
        """Work units of a kv head that masks within the limits make at most: the sum of ceil(rows / tile.rows) *
        ceil(kv_len / tile.kv) over the requests, where custom_mask_buf limits the sum of qo_len * kv_len.
        """
        bits = 8 * self.mask.numel() if self.mask is not None else 0
        return -(-bits * (group_size + tile.rows) // (tile.rows * tile.kv)) + tile_capacity

    def upload(self, filled: torch.Tensor, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The buffer of schedules, `num_bytes` long, which begins with `filled` once the copy is done."""
        if self._buffer is None or not self.is_planned:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._buffer[: filled.numel()].copy_(filled, non_blocking=True)
        return self._buffer

    def keep(self, decision: Decision, partials: torch.Tensor, params: ctypes.Structure) -> None:
        """End a plan(). `params` is all that a graph holds by value: it must be what the first plan() had."""
        if not self.is_planned:
            self.decision, self._partials, self._params = decision, partials, bytes(params)
        elif bytes(params) != self._params:
            raise PlanError("plan(): a parameter that a captured graph holds by value has changed; please report this.")

    def pages(self, source: torch.Tensor, count: int) -> torch.Tensor:
        """The caller's buffer, holding the `count` page numbers of `source`."""
        assert self.kv_indices is not None
        return _copied("paged_kv_indices", self.kv_indices, source[:count])

    def bits(self, source: torch.Tensor) -> torch.Tensor:
        """The caller's buffer, holding the bits of the batch's masks."""
        if self.mask is None:
            raise PlanError("custom_mask: expected custom_mask_buf in the constructor for CUDA graphs, got none.")
        return _copied("custom_mask", self.mask, source)


def _copied(name: str, buffer: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if source.numel() > buffer.numel():
        raise ValidationError(f"{name}: expected at most {buffer.numel()} entries, got {source.numel()}.")
    if source.data_ptr() != buffer.data_ptr() or source.device != buffer.device:
        buffer[: source.numel()].copy_(source, non_blocking=True)
    return buffer


def graph_state(use_cuda_graph: bool, device: torch.device, **buffers: torch.Tensor | None) -> GraphState | None:
    """The state of a wrapper with `use_cuda_graph`, from the buffers of its constructor by name; None without.

    The lengths of the index arrays' buffers fix the batch size; the arrays themselves are copied into a buffer of
    GraphState. Page numbers and masks are copied into the caller's buffers.
    """
    if not use_cuda_graph:
        refuse(**buffers)
        return None
    sizes, pages, mask = {}, None, None
    for name, buffer in buffers.items():
        is_mask = name == "custom_mask_buf"
        if buffer is None and (is_mask or name in _OPTIONAL):
            continue
        tensor = check_tensor(buffer, name)
        check_same_device(tensor, name, device)
        dtype = torch.uint8 if is_mask else torch.int32
        if tensor.dtype is not dtype or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValidationError(
                f"{name}: expected a contiguous 1-D {dtype} tensor, got {tensor.dtype} {list(tensor.shape)}."
            )
        if is_mask:
            mask = tensor
        elif "indices" in name:
            pages = tensor
        else:
            sizes[name] = tensor.shape[0] - ("indptr" in name)
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
        raise ValidationError(f"use_cuda_graph: expected buffers of one batch size of at least 1, got {sizes}.")
    return GraphState(next(iter(sizes.values())), pages, mask)
