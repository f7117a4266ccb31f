"""CUDA graphs: a captured call reads everything from fixed addresses, so plan() can change lengths between replays.

A graph keeps the launch that it captured: the grid, and the parameter struct by value. The schedule therefore always
has one partition for each resident CTA, and everything that depends on lengths is in one buffer, which each plan()
refills. The first successful plan() fixes everything else; a later plan() with other options is an error.

Engines call plan() with defaults, and pass the scale, the soft cap, the window and `causal` to forward(). Scale and cap
are parameters of each launch. The others decide about the kernel and the schedule: the first forward() fixes them, and
later calls of plan() with the same arguments as the first use them.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from quire.engine.checks import check_same_device, check_tensor
from quire.engine.device import on_cuda
from quire.engine.options import LogitsOptions, PlanOptions
from quire.errors import PlanError, ValidationError
from quire.kernels import Decision, TileShape

_OPTIONAL = ("mask_indptr_buf", "qk_indptr_buf")  #: with custom_mask_buf; both names mean the same


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured, which the default stream never is."""
    if not on_cuda(device) or not torch._C._cuda_getCurrentRawStream(index := device.index or 0):
        return False
    if torch._C._cuda_getDevice() == index:  # torch answers for the current device
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()


def refuse_capture(what: str, device: torch.device) -> None:
    """PlanError in a capture of a CUDA graph: a replay would read memory that `what` made and that may be freed by
    then.
    """
    if is_capturing(device):
        raise PlanError(
            f"{what} cannot be captured in a CUDA graph: construct the wrapper with use_cuda_graph=True and its "
            f"buffers, and call plan() before the capture and before each replay."
        )


class GraphState:
    """The state shared by a wrapper's plans: the caller's buffers, and the limits that the first successful plan() set.

    `batch_size`: number of requests. `kv_indices`: buffer for page numbers (None: ragged). `mask`: buffer for the bits
    of custom masks. Until a plan() has succeeded (`keep`), each plan() sets the limits again.
    """

    def __init__(self, batch_size: int, kv_indices: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        self.batch_size = batch_size
        self.kv_indices = kv_indices
        self.mask = mask
        self.decision: Decision | None = None
        self.max_rows = 0  #: rows of q of the first plan
        self.max_tokens = 0  #: tokens of keys of the first plan, or of as many pages as kv_indices takes
        self.requested: PlanOptions | None = None  #: by the first plan()
        self.launched: PlanOptions | None = None  #: the same, or what forward() asked for
        self.has_run = False  #: a capture may hold the launch
        self.is_forwarded = False  #: forward() gives the scale and the cap of each launch
        self.awaits_forward = False  #: the last plan() asked for other options than the launch has
        self._fixed: dict[str, Any] = {}
        self._buffer: torch.Tensor | None = None
        self._partials: torch.Tensor | None = None
        self._params = b""

    @property
    def is_planned(self) -> bool:
        """Whether a plan() has succeeded."""
        return bool(self._params)

    def options(self, requested: PlanOptions) -> PlanOptions:
        """The options of a plan() with these arguments: PlanError if the launch has others."""
        if not self.is_planned:
            self.requested = self.launched = requested
        assert self.requested is not None and self.launched is not None
        self.awaits_forward = self._difference(self.launched, requested) is not None
        if self.awaits_forward and (
            self.launched is self.requested or self._difference(self.requested, requested) is not None
        ):
            self.refuse(self.requested, requested)
        return self.launched

    def refuse(self, launched: PlanOptions, options: PlanOptions) -> None:
        """PlanError that names the first of `options` that differs from the launch."""
        name = self._difference(launched, options)
        assert name is not None
        _refuse(name, getattr(launched, name), getattr(options, name))

    def _difference(self, one: PlanOptions, other: PlanOptions) -> str | None:
        """The name of an option in which both differ, except for parameters of each launch."""
        for name, left, right in zip(one._fields, one, other, strict=True):
            if left != right and not (name == "logits" and self._is_same_launch(one.logits, other.logits)):
                return name
        return None

    def _is_same_launch(self, one: LogitsOptions, other: LogitsOptions) -> bool:
        if not one.has_same_kernel(other):
            return False
        numbers = (one.sm_scale, other.sm_scale), (one.logits_soft_cap, other.logits_soft_cap)
        return self.is_forwarded or all(math.isclose(*pair, rel_tol=1e-6) for pair in numbers)  # as float32

    def for_forward(self, options: PlanOptions) -> GraphState:
        """The state for a new launch, if the first forward() has other options than plan() had."""
        assert self.launched is not None
        if self.has_run:
            self.refuse(self.launched, options)
        if self.kv_indices is not None and is_capturing(self.kv_indices.device):
            raise PlanError(
                "forward(): in a capture its options must be those of plan(), or of a forward() before the capture, "
                "which fixes them: call forward() once before it."
            )
        return self.unplanned()

    def unplanned(self) -> GraphState:
        """A state for another launch of the same buffers."""
        state = GraphState(self.batch_size, self.kv_indices, self.mask)
        state.is_forwarded = self.is_forwarded
        return state

    def record_forward(self, requested: PlanOptions | None) -> None:
        """Record that a forward() has its launch, after a plan() with the arguments `told`."""
        self.requested, self.is_forwarded, self.awaits_forward = requested, True, False

    def fix(self, **values: Any) -> None:
        """Check that these values equal those of the first plan(); PlanError otherwise."""
        if not self.is_planned:
            self._fixed = values
        for name, value in values.items():
            if value != self._fixed[name]:
                _refuse(name, self._fixed[name], value)

    @property
    def partials(self) -> torch.Tensor | None:
        """The memory of partial results of all plans."""
        return self._partials

    def tile_capacity(
        self, batch_size: int, qo_len: int, group_size: int, tile_rows: int, split: int, most: int | None = None
    ) -> int:
        """Row tiles of the largest batch within the limits; `split`: tokens of a fixed split at least, or 0; `most`:
        splits of a request.
        """
        if qo_len == 0:
            whole = self.max_rows * group_size // tile_rows + batch_size
            parts = self.max_tokens // split + 1 if split else 1
            return whole * min(parts, most or parts) + batch_size * (split > 0)
        parts = self.max_tokens // split + batch_size if split else batch_size
        return -(-qo_len * group_size // tile_rows) * min(parts, batch_size * (most or parts))

    def unit_capacity(self, tile: TileShape, group_size: int, tile_capacity: int) -> int:
        """Work units of a kv head that masks within the limits make at most: the sum of ceil(rows / tile.rows) *
        ceil(kv_len / tile.kv) over the requests, where custom_mask_buf limits the sum of qo_len * kv_len. Without that
        buffer, for the mask of a variant, each row tile may see all keys.
        """
        if self.mask is None:
            return tile_capacity * (-(-self.max_tokens // tile.kv) + 1)
        bits = 8 * self.mask.numel()
        return -(-bits * (group_size + tile.rows) // (tile.rows * tile.kv)) + tile_capacity

    def upload(self, filled: torch.Tensor, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The buffer of the schedule, of `num_bytes` bytes, which begins with `filled` after the copy."""
        if self._buffer is None or not self.is_planned:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._buffer[: filled.numel()].copy_(filled, non_blocking=True)
        return self._buffer

    def keep(self, decision: Decision, partials: torch.Tensor, params: ctypes.Structure) -> None:
        """Finish a plan(). `params`, which a graph keeps by value, must equal that of the first plan()."""
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


def _refuse(name: str, expected: Any, got: Any) -> None:
    if isinstance(expected, LogitsOptions) and isinstance(got, LogitsOptions):
        differ = [name for name in got._fields if getattr(expected, name) != getattr(got, name)]
        expected, got = ({name: getattr(logits, name) for name in differ} for logits in (expected, got))
    raise PlanError(
        f"{name}: expected {expected}, which the first plan() or forward() of a wrapper for CUDA graphs fixes, "
        f"got {got}; use another wrapper for it."
    )


def _copied(name: str, buffer: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if source.numel() > buffer.numel():
        raise ValidationError(f"{name}: expected at most {buffer.numel()} entries, got {source.numel()}.")
    if source.data_ptr() != buffer.data_ptr() or source.device != buffer.device:
        buffer[: source.numel()].copy_(source, non_blocking=True)
    return buffer


def graph_state(use_cuda_graph: bool, device: torch.device, **buffers: torch.Tensor | None) -> GraphState | None:
    """The state of a wrapper with `use_cuda_graph`, from the buffers of its constructor by name. Without it None: a
    plan then owns its arrays, and needs no buffers.

    The lengths of the index arrays' buffers fix the batch size; the arrays themselves are copied into a buffer of
    GraphState. Page numbers and masks are copied into the caller's buffers.
    """
    if not use_cuda_graph:
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
