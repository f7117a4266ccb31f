"""Who does what: index arrays on the host become row tiles and partitions of work in one packed buffer."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from quire.errors import ValidationError
from quire.jit import HostModule, get_module, host_target
from quire.kernels import TileShape
from quire.kernels.operation import OperationKey
from quire.kernels.params import Partition, RowTile, ScheduleParams
from quire.runtime.upload import HostBuffer, Uploader
from quire.types import MaskMode

__all__ = [
    "Indices",
    "Lengths",
    "Schedule",
    "address_of",
    "make_schedule",
    "measure_schedule",
    "schedule_inputs",
]

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


class Schedule(NamedTuple):
    """A filled schedule: sizes in `params`, arrays in a host_buffer on the host, page numbers behind them."""

    params: ScheduleParams
    host_buffer: HostBuffer
    kept: bytearray  #: int32: the index arrays that were planned on, one after another

    @property
    def buffer(self) -> torch.Tensor:
        """What is filled, as bytes."""
        return self.host_buffer.tensor[: self.params.filled_bytes]

    @property
    def pages(self) -> torch.Tensor:
        """The copied page numbers."""
        return self.host_buffer.tensor[self.params.filled_bytes : self.params.staged_bytes].view(torch.int32)

    def indices(self, planned: Indices, pages: torch.Tensor | None) -> Indices:
        """The index arrays as they were planned on, whoever has written them since, with these page numbers."""
        arrays, count = torch.frombuffer(self.kept, dtype=torch.int32), planned.batch_size + 1
        qo_indptr = None if planned.qo_indptr is None else arrays[:count]
        arrays = arrays if qo_indptr is None else arrays[count:]
        last = None if planned.kv_last_page_len is None else arrays[count:]
        return planned._replace(qo_indptr=qo_indptr, kv_indptr=arrays[:count], kv_last_page_len=last, kv_indices=pages)

    @property
    def tiles(self) -> ctypes.Array[RowTile]:
        """The row tiles, in the order in which they are worked off."""
        return self._view(RowTile * int(self.params.num_tiles), self.params.tiles_offset)

    @property
    def partitions(self) -> ctypes.Array[Partition]:
        """One contiguous run of work a CTA; empty when each CTA does one whole tile."""
        return self._view(
            Partition * int(self.params.num_ctas if self.params.is_partitioned else 0), self.params.partitions_offset
        )

    def _view(self, array: type[_Array], offset: int) -> _Array:
        view = array.from_address(self.host_buffer.address + offset)
        view.host_buffer = self.host_buffer  # type: ignore[attr-defined]  # the view keeps its memory alive
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
    9: "paged_kv_indices: expected at least paged_kv_indptr[-1]={nnz} entries, got {pages}.",
}


def _raise(params: ScheduleParams, indices: Indices) -> None:
    request = params.error_request
    last = indices.kv_last_page_len
    text = _ERRORS[params.error].format(
        qo="qo", kv="kv" if last is None else "paged_kv", request=request, page_size=indices.page_size,
        last=None if last is None else int(last[request]), tiles=params.num_tiles, capacity=params.tile_capacity,
        nnz=params.nnz_kv, pages=params.num_pages,
    )  # fmt: skip
    raise ValidationError(text)


def schedule_inputs(
    *, num_kv_heads: int, group_size: int, page_size: int, tile: TileShape, mask: MaskMode, window_left: int,
    max_ctas: int, fixed_split_size: int, l2_tokens: int = 0, tile_capacity: int = 0,
) -> ScheduleParams:  # fmt: skip
    """The scheduler's inputs that do not depend on the batch. `fixed_split_size`: 0 automatic, -1 never split a row
    tile, else tokens of a split. `l2_tokens`: tokens of one kv head that may lie in L2 at a time, for a kernel whose
    CTAs take tiles from a counter.

    With a `tile_capacity`, for a CUDA graph, only what lies in the buffer depends on lengths: the buffer ends after the
    tiles that there are, but offsets and counts are those of the capacity.
    """
    return ScheduleParams(
        num_kv_heads=num_kv_heads, group_size=group_size, page_size=page_size, tile_rows=tile.rows, tile_kv=tile.kv,
        causal=int(mask is MaskMode.CAUSAL), window_left=window_left, max_ctas=max_ctas,
        fixed_split_size=fixed_split_size, has_mask=int(mask is MaskMode.CUSTOM), tile_capacity=tile_capacity,
        has_tile_counter=int(l2_tokens > 0), l2_tokens=l2_tokens,
    )  # fmt: skip


def measure_schedule(indices: Indices, inputs: ScheduleParams) -> ScheduleParams:
    """The sizes of a schedule."""
    p, _ = _started(indices, inputs)
    _work(p, indices)
    return p


def make_schedule(indices: Indices, inputs: ScheduleParams, uploader: Uploader | None = None) -> Schedule:
    """Plan on the host, into a host_buffer of `uploader` or one of its own. Page numbers on the host travel along."""
    p, kept = _started(indices, inputs)
    host_buffer = None
    if uploader is not None:
        host_buffer = uploader.take()
        p.buffer, p.capacity = host_buffer.address, host_buffer.num_bytes
    _work(p, indices)
    if host_buffer is None or p.staged_bytes > p.capacity:
        host_buffer = HostBuffer(p.staged_bytes) if uploader is None else uploader.take(p.staged_bytes)
        p.buffer, p.capacity = host_buffer.address, host_buffer.num_bytes
        _work(p, indices)
    if p.least_page < 0:
        raise ValidationError(f"paged_kv_indices: expected page numbers from 0 on, got {p.least_page}.")
    return Schedule(p, host_buffer, kept)


def _started(indices: Indices, inputs: ScheduleParams) -> tuple[ScheduleParams, bytearray]:
    """The parameters of a plan, and where its index arrays will lie."""
    p = ScheduleParams.from_buffer_copy(inputs)
    batch, qo_indptr, last, pages = indices.batch_size, indices.qo_indptr, indices.kv_last_page_len, indices.kv_indices
    p.batch_size, p.qo_len, p.kv_indptr, p.num_pages = batch, indices.qo_len, indices.kv_indptr.data_ptr(), -1
    num_kept = batch + 1
    if qo_indptr is not None:
        p.qo_indptr, num_kept = qo_indptr.data_ptr(), num_kept + batch + 1
    if last is not None:
        p.kv_last_page_len, num_kept = last.data_ptr(), num_kept + batch
    if pages is not None:
        p.num_pages = pages.shape[0]
        if pages.is_cpu:
            p.kv_indices = pages.data_ptr()
    kept = bytearray(4 * num_kept)
    p.kept = ctypes.addressof(ctypes.c_char.from_buffer(kept))
    return p, kept


def _work(p: ScheduleParams, indices: Indices) -> None:
    if _scheduler().function(ctypes.addressof(p)):
        _raise(p, indices)


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's data lies; None for none."""
    return None if tensor is None else tensor.data_ptr()
