"""Who does what: index arrays on the host become row tiles and shares of work in one packed buffer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from quire.errors import ValidationError
from quire.jit import HostModule, get_module, host_target
from quire.kernels import TileShape
from quire.kernels.operation import OperationKey
from quire.kernels.params import ScheduleParams, Share, Tile
from quire.types import MaskMode

__all__ = ["Indices", "Lengths", "Schedule", "address_of", "make_schedule", "measure_schedule"]

_Array = TypeVar("_Array", bound=ctypes.Array[Any])


class Indices(NamedTuple):
    """The index arrays of a batch, on the host unless said otherwise."""

    batch_size: int
    qo_indptr: torch.Tensor | None  #: [batch_size + 1]; None: qo_len rows each
    qo_len: int
    kv_indptr: torch.Tensor  #: [batch_size + 1] tokens, or pages
    kv_last_page_len: torch.Tensor | None  #: [batch_size]; None: ragged
    kv_indices: torch.Tensor | None  #: paged: page numbers, on any device
    page_size: int


class Lengths(NamedTuple):
    """A batch whose lengths only the device knows: qo_len rows each, keys in pages."""

    kv_lens: torch.Tensor  #: [batch_size] int32 tokens
    page_table: torch.Tensor  #: [batch_size, pages of the longest] int32 page numbers, rows contiguous
    qo_len: int
    page_size: int

    @property
    def batch_size(self) -> int:
        return self.kv_lens.shape[0]


@dataclass(frozen=True)
class Schedule:
    """A filled schedule: sizes in `params`, arrays in `buffer` (uint8, on the host), page numbers behind them."""

    params: ScheduleParams
    buffer: torch.Tensor

    @property
    def pages(self) -> torch.Tensor:
        """The copied page numbers."""
        return self.buffer[self.params.filled_bytes : self.params.staged_bytes].view(torch.int32)

    @property
    def tiles(self) -> ctypes.Array[Tile]:
        """The row tiles, in the order in which they are worked off."""
        return self._view(Tile * int(self.params.num_tiles), self.params.tiles_offset)

    @property
    def shares(self) -> ctypes.Array[Share]:
        """One contiguous run of work a CTA; empty when each CTA does one whole tile."""
        return self._view(Share * int(self.params.num_ctas if self.params.is_shared else 0), self.params.shares_offset)

    def _view(self, array: type[_Array], offset: int) -> _Array:
        view = array.from_address(self.buffer.data_ptr() + offset)
        view.buffer = self.buffer  # type: ignore[attr-defined]  # the view keeps its memory alive
        return view


@cache
def _scheduler() -> HostModule:
    module = get_module(OperationKey("schedule_attention", host_target()).spec())
    assert isinstance(module, HostModule)
    return module


_ERRORS = {
    1: "{qo}_indptr: expected to begin with 0.",
    2: "{qo}_indptr: expected to ascend, but it falls after request {request}.",
    3: "{kv}_indptr: expected to begin with 0.",
    4: "{kv}_indptr: expected to ascend, but it falls after request {request}.",
    5: "{kv}_last_page_len: expected 1..page_size={page_size} (0 only for a request without pages), "
    "got {last} at request {request}.",
    6: "the batch is too large: a count of rows, tokens or tiles does not fit 31 bits (request {request}).",
    7: "the batch is larger than what the first plan() fixed for a CUDA graph: {tiles} row tiles, not {capacity}.",
    8: "out of memory while planning.",
}


def _raise(params: ScheduleParams, indices: Indices) -> None:
    request = params.error_request
    last = indices.kv_last_page_len
    text = _ERRORS[params.error].format(
        qo="qo", kv="kv" if last is None else "paged_kv", request=request, page_size=indices.page_size,
        last=None if last is None else int(last[request]), tiles=params.num_tiles, capacity=params.tile_capacity,
    )  # fmt: skip
    raise ValidationError(text)


def make_schedule(
    indices: Indices, *, num_kv_heads: int, group_size: int, tile: TileShape, mask: MaskMode, window_left: int,
    max_ctas: int, fixed_split_size: int, pin: bool, l2_tokens: int = 0, tile_capacity: int = 0,
) -> Schedule:  # fmt: skip
    """Plan on the host, into a pinned buffer with `pin`. The other arguments are measure_schedule()'s."""
    p = measure_schedule(
        indices, num_kv_heads=num_kv_heads, group_size=group_size, tile=tile, mask=mask, window_left=window_left,
        max_ctas=max_ctas, fixed_split_size=fixed_split_size, l2_tokens=l2_tokens, tile_capacity=tile_capacity,
    )  # fmt: skip
    buffer = torch.empty(max(16, p.staged_bytes), dtype=torch.uint8, pin_memory=pin)
    p.buffer = buffer.data_ptr()
    if _scheduler().function(ctypes.addressof(p)):
        _raise(p, indices)
    if p.least_page < 0:
        raise ValidationError(f"paged_kv_indices: expected page numbers from 0 on, got {p.least_page}.")
    return Schedule(p, buffer)


def measure_schedule(
    indices: Indices, *, num_kv_heads: int, group_size: int, tile: TileShape, mask: MaskMode, window_left: int,
    max_ctas: int, fixed_split_size: int, l2_tokens: int = 0, tile_capacity: int = 0,
) -> ScheduleParams:  # fmt: skip
    """The sizes of a schedule. `fixed_split_size`: 0 automatic, -1 never cut a tile, else tokens between cuts.
    `l2_tokens`: for a kernel whose CTAs take tickets for tiles, how many tokens of one kv head may lie in L2 at a time.
    Page numbers that lie on the host travel in the same buffer.

    With a `tile_capacity`, for a CUDA graph, only what lies in the buffer depends on lengths: the buffer ends after the
    tiles that there are, but offsets and counts are those of the capacity.
    """
    pages = indices.kv_indices
    if pages is not None and pages.device.type != "cpu":
        pages = None
    p = ScheduleParams.from_buffer_copy(
        _fixed_part(
            num_kv_heads, group_size, indices.page_size, tile, mask, window_left, max_ctas, fixed_split_size,
            tile_capacity, l2_tokens,
        )
    )  # fmt: skip
    p.batch_size, p.qo_len, p.kv_indptr = indices.batch_size, indices.qo_len, indices.kv_indptr.data_ptr()
    p.qo_indptr, p.kv_last_page_len = address_of(indices.qo_indptr), address_of(indices.kv_last_page_len)
    p.kv_indices = address_of(pages)
    if _scheduler().function(ctypes.addressof(p)):
        _raise(p, indices)
    if indices.kv_indices is not None and indices.kv_indices.shape[0] < p.nnz_kv:
        raise ValidationError(
            f"paged_kv_indices: expected at least paged_kv_indptr[-1]={p.nnz_kv} entries, "
            f"got {indices.kv_indices.shape[0]}."
        )
    return p


@lru_cache(maxsize=1024)
def _fixed_part(
    num_kv_heads: int, group_size: int, page_size: int, tile: TileShape, mask: MaskMode, window_left: int,
    max_ctas: int, fixed_split_size: int, tile_capacity: int, l2_tokens: int,
) -> ScheduleParams:  # fmt: skip
    """What stays the same from batch to batch: a server asks for few of these, and each costs more than a copy."""
    return ScheduleParams(
        num_kv_heads=num_kv_heads, group_size=group_size, page_size=page_size, tile_rows=tile.rows, tile_kv=tile.kv,
        causal=int(mask is MaskMode.CAUSAL), window_left=window_left, max_ctas=max_ctas,
        fixed_split_size=fixed_split_size, has_mask=int(mask is MaskMode.CUSTOM), tile_capacity=tile_capacity,
        has_tickets=int(l2_tokens > 0), l2_tokens=l2_tokens,
    )  # fmt: skip


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's data lies; None for none."""
    return None if tensor is None else tensor.data_ptr()
