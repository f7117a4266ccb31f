"""The host's scheduler: turns index arrays into row tiles, partitions and a merge table in one packed buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch

from quire.engine.checks import batch_size_of, check_same_device, check_shape, check_tensor, to_int32
from quire.engine.device import CaptureUploader, HostBuffer, Uploader, is_capturing
from quire.errors import ValidationError
from quire.jit import HostModule, config, get_module, host_target
from quire.kernels import TileShape
from quire.kernels.features import MaskMode
from quire.kernels.operation import OperationKey
from quire.kernels.params import ScheduleInput, ScheduleOutput, ScheduleParams, bytes_type

#: No kernel has row tiles of fewer rows, or KV tiles of fewer tokens.
LEAST_TILE = 16, 16


_MOST_TOKENS = 2**31 - 2**16  #: of a request on a GPU, whose kernels count some KV tiles beyond its end


class Indices(NamedTuple):
    """The index arrays of a batch, on the host unless stated otherwise."""

    batch_size: int
    qo_indptr: torch.Tensor | None  #: [batch_size + 1]; None: qo_len rows each; cascade: [batch_size, 2], flat
    qo_len: int
    kv_indptr: torch.Tensor  #: [batch_size + 1] tokens, or pages
    kv_last_page_len: torch.Tensor | None  #: [batch_size]; None: ragged
    kv_indices: torch.Tensor | None  #: paged: page numbers, on any device
    page_size: int
    seq_lens: torch.Tensor | None = None  #: [batch_size] tokens, which repeat the others and must agree with them
    #: A cascade: the requests of this batch are its nodes, level by level; so many are those of shared levels, and
    #: qo_indptr has the begin and end of each one's rows. 0: no cascade.
    num_shared_nodes: int = 0
    #: [num_shared_nodes + 1]: where shared keys lie in tensors of their own, their rows there; shared nodes then have
    #: none of kv_indptr's pages or tokens
    prefix_indptr: torch.Tensor | None = None

    def qo_lens(self) -> torch.Tensor:
        """Rows of each request, int64 [batch_size]."""
        if self.qo_indptr is None:
            return torch.full((self.batch_size,), self.qo_len, device="cpu")
        return self.qo_indptr.long().diff()

    def kv_lens(self) -> torch.Tensor:
        """Tokens of each request, int64 [batch_size]."""
        pages = self.kv_indptr.long().diff()
        if self.kv_last_page_len is None:
            return pages
        return torch.where(pages > 0, (pages - 1) * self.page_size + self.kv_last_page_len, 0)

    def page_beyond(self, num_pages: int) -> str:
        """The first page number that no page of a cache has, and whose it is, for errors."""
        assert self.kv_indices is not None
        return describe_page(self.kv_indices, self.kv_indptr, num_pages)


class ScheduleCache:
    """Schedules that a GPU made for batches without lengths of their own, which depend on shapes alone.

    Later calls of the same shapes read them. Launches that share a schedule count arrivals in it, and must not overlap.
    """

    _of_graphs: ClassVar[set[torch.Tensor]] = set()  # nobody tells when a graph is gone: some 20 KB each

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def get(self, shape: Hashable, for_graph: bool) -> torch.Tensor | None:
        """The schedule for batches of this shape, if one was kept. One that a graph reads is never deleted."""
        buffer = self._buffers.get(shape)
        if for_graph and buffer is not None:
            self._of_graphs.add(buffer)
        return buffer

    def keep(self, shape: Hashable, buffer: torch.Tensor) -> None:
        """Keep a schedule that was made outside of captures: a graph would make it only when it is replayed."""
        self._buffers[shape] = buffer


class Lengths(NamedTuple):
    """A batch whose lengths only the device knows, with keys in pages or ragged."""

    kv_lens: torch.Tensor | None  #: [batch_size] int32 tokens; None: kv_indptr's, or as many as page_table has
    page_table: torch.Tensor | None  #: [batch_size, pages of the longest] int32, rows contiguous; None: ragged
    qo_len: int  #: rows of q of each request
    page_size: int
    num_pages: int | None = None  #: of a cache of one-token pages, where others than 0..num_pages - 1 name no token
    kept: ScheduleCache | None = None  #: where the schedule is kept if kv_lens is None
    qo_indptr: torch.Tensor | None = None  #: [batch_size + 1] int32 offsets of requests in q, in place of qo_len
    kv_indptr: torch.Tensor | None = None  #: [batch_size + 1] int32: cumulative lengths; ragged: offsets in k
    num_rows: int = 0  #: with qo_indptr: of q
    num_tokens: int = 0  #: ragged: of k
    #: With qo_indptr: (out, lse), whose rows that belong to no request become 0 and -inf. Both are contiguous.
    results: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def batch_size(self) -> int:
        if self.page_table is not None:
            return self.page_table.shape[0]
        assert self.kv_indptr is not None
        return self.kv_indptr.shape[0] - 1

    @property
    def nnz_qo(self) -> int:
        """Rows of q, of all requests."""
        return self.num_rows if self.qo_indptr is not None else self.qo_len * self.batch_size

    @property
    def max_kv_len(self) -> int:
        """Tokens that a request has at most."""
        tokens = self.num_tokens if self.page_table is None else self.page_table.shape[1] * self.page_size
        return min(tokens, _MOST_TOKENS)

    def num_row_tiles(self, group_size: int, tile_rows: int) -> int:
        """As many row tiles as any lengths give."""
        if self.qo_indptr is not None:
            return self.num_rows * group_size // tile_rows + self.batch_size
        return self.batch_size * -(-self.qo_len * group_size // tile_rows)

    def can_be_counted(self, tile_rows: int, tile_kv: int, num_kv_heads: int, group_size: int) -> bool:
        """Whether the work of the largest possible lengths can be counted in 32 bits, with tiles of this size."""
        work = self.num_row_tiles(group_size, tile_rows) * num_kv_heads
        has_rows = self.nnz_qo * group_size < 2**31 and work <= 2**23
        return has_rows and work * -(-self.max_kv_len // tile_kv) < 2**31

    def with_near_pages(self) -> Lengths:
        """The same with a page table whose entries 32 bits can number: a view of a far larger one is copied."""
        table = self.page_table
        if table is None or table.shape[0] * max(table.stride(0), table.shape[1]) < 2**31:
            return self
        if table.numel() >= 2**31:
            raise ValidationError(
                f"the table of pages is too large: expected fewer than 2^31 entries, got {list(table.shape)}; call "
                f"with fewer requests at a time."
            )
        return self._replace(page_table=table.contiguous())

    def without_gaps(self) -> Lengths:
        """The same tokens with valid page numbers first, for kernels that read every listed page."""
        if self.num_pages is None or self.page_table is None:
            return self
        pages, lens = without_gaps(self.page_table, self.kv_lens, self.num_pages)
        return self._replace(page_table=pages, kv_lens=lens, num_pages=None)


class Schedule(NamedTuple):
    """A filled schedule: its arrays, followed by page numbers, in pinned or plain host memory."""

    sizes: ScheduleOutput
    host_buffer: HostBuffer
    kept: ctypes.Array[ctypes.c_char]  #: int32: the index arrays that were planned on, one after another

    @property
    def buffer(self) -> torch.Tensor:
        """The filled part, as bytes."""
        return self.host_buffer.tensor[: self.sizes.filled_bytes]

    @property
    def pages(self) -> torch.Tensor:
        """The copied page numbers."""
        return self.host_buffer.tensor[self.sizes.filled_bytes : self.sizes.staged_bytes].view(torch.int32)

    def indices(self, planned: Indices, pages: torch.Tensor | None) -> Indices:
        """The index arrays that were planned, even if the caller has changed them since, with these page numbers."""
        arrays, count = torch.frombuffer(self.kept, dtype=torch.int32), planned.batch_size + 1
        num_rows = 0 if planned.qo_indptr is None else planned.qo_indptr.numel()
        qo_indptr = None if planned.qo_indptr is None else arrays[:num_rows]
        arrays = arrays[num_rows:]
        last = None if planned.kv_last_page_len is None else arrays[count:]
        return planned._replace(
            qo_indptr=qo_indptr, kv_indptr=arrays[:count], kv_last_page_len=last, kv_indices=pages, seq_lens=None
        )


@cache
def _scheduler() -> HostModule:
    module = get_module(OperationKey("schedule_attention", host_target()).spec())
    assert isinstance(module, HostModule)
    return module


_ERRORS = {
    1: "qo_indptr: expected to begin with 0.",
    2: "qo_indptr: expected to ascend, but it falls after request {request}.",
    3: "{kv}_indptr: expected to begin with 0 or more.",
    4: "{kv}_indptr: expected to ascend, but it falls after request {request}.",
    5: "{kv}_last_page_len: expected 1..page_size={page_size} (0 only for a request without pages), "
    "got {last} at request {request}.",
    6: "{rows}, num_qo_heads: the batch is too large: expected query tokens times query heads per KV head below 2**31, "
    "got more at request {request}; call with fewer requests or tokens at a time.",
    7: "the batch is larger than what the first plan() fixed for a CUDA graph: {tiles} row tiles, not {capacity}.",
    8: "out of memory while planning.",
    9: "paged_kv_indices: expected at least paged_kv_indptr[-1]={nnz} entries, got {pages}.",
    10: "{rows}, num_qo_heads: the batch is too large: expected fewer than 2**23 row tiles times {heads} KV heads (a "
    "row is a query token and a query head of the KV head; a row tile holds {tile_rows} of one request; each fixed "
    "split counts), got more at request {request}; call with fewer requests or tokens at a time.",
    11: "the batch is too large: expected fewer than 2**31 KV tiles of {tile_kv} tokens, counted for each row tile of "
    "{tile_rows} rows and each of {heads} KV heads; call with fewer requests at a time.",
    13: "seq_lens: expected {kv_len} tokens of request {request}, as {kv}_indptr and the last page say, got {seq_len}.",
    12: "{kv}_indptr: expected fewer than 2**31 tokens in each request, got more at request {request}.",
}


def _raise(p: ScheduleParams, indices: Indices) -> None:
    given, sizes, last = p.input, p.output, indices.kv_last_page_len
    request = sizes.error_request
    text = _ERRORS[sizes.error].format(
        kv="kv" if last is None else "paged_kv", request=request, page_size=indices.page_size,
        last=int(last[request]) if last is not None and sizes.error == 5 else None, tiles=sizes.num_tiles,
        capacity=given.tile_capacity, nnz=sizes.nnz_kv, pages=given.num_pages, tile_rows=given.tile_rows,
        tile_kv=given.tile_kv, heads=given.num_kv_heads,
        rows="q_len_per_req" if indices.qo_indptr is None else "qo_indptr", **_lengths(indices, request, sizes.error),
    )  # fmt: skip
    raise ValidationError(text)


def _lengths(indices: Indices, request: int, error: int) -> dict[str, int]:
    """The message of error 13."""
    if error != 13 or indices.seq_lens is None:
        return {"kv_len": 0, "seq_len": 0}
    begin, end = indices.kv_indptr[request : request + 2].tolist()
    last = indices.kv_last_page_len
    kv_len = end - begin if last is None or begin == end else (end - begin - 1) * indices.page_size + int(last[request])
    return {"kv_len": kv_len, "seq_len": int(indices.seq_lens[request])}


def schedule_input(
    *, num_kv_heads: int, group_size: int, page_size: int, tile: TileShape, mask: MaskMode, window_left: int,
    max_ctas: int, fixed_split_size: int, start_cost: int = 0, l2_tokens: int = 0, tile_capacity: int = 0,
    arrives_late: int = 0, splits_by_length: int = 0,
) -> ScheduleInput:  # fmt: skip
    """The scheduler's input that does not depend on the batch. `fixed_split_size`: 0 automatic, -1 never divide a row
    tile, else tokens of a split; with `splits_by_length` as many as splits_of() in core/schedule.h says. `start_cost`:
    the fixed cost of a work tile, in sixteenths of a KV tile. `l2_tokens`: how many tokens of one KV head should be in
    the L2 at a time, for a kernel whose CTAs take row tiles from a counter. `arrives_late`: 1: CTAs of a cascade arrive
    at requests' merge groups when they have no other work.

    With a `tile_capacity`, for a CUDA graph, only the content of the buffer depends on lengths: it is filled up to the
    last row tile, but offsets and counts are those of the capacity.
    """
    return ScheduleInput(
        num_kv_heads=num_kv_heads, group_size=group_size, page_size=page_size, tile_rows=tile.rows, tile_kv=tile.kv,
        mask_mode=int(mask), window_left=window_left, start_cost=start_cost, max_ctas=max_ctas,
        fixed_split_size=fixed_split_size, splits_by_length=splits_by_length, has_tile_counter=int(l2_tokens > 0),
        l2_tokens=l2_tokens, tile_capacity=tile_capacity, arrives_late=arrives_late,
    )  # fmt: skip


def measure_schedule(indices: Indices, template: ScheduleInput) -> ScheduleOutput:
    """The sizes of a schedule."""
    p, _ = _started(indices, template)
    return _work(p, indices)


def make_schedule(
    indices: Indices, template: ScheduleInput, uploader: Uploader | CaptureUploader | None = None
) -> Schedule:
    """Schedule on the host, into a buffer of `uploader` or a new one, together with page numbers on the host."""
    p, kept = _started(indices, template)
    host_buffer = None if uploader is None else uploader.take()
    sizes = _work(p, indices, host_buffer)
    if host_buffer is None or sizes.staged_bytes > host_buffer.num_bytes:
        host_buffer = HostBuffer(sizes.staged_bytes) if uploader is None else uploader.take(sizes.staged_bytes)
        _work(p, indices, host_buffer)
    if sizes.least_page < 0:
        got = indices.page_beyond(2**31)
        raise ValidationError(f"paged_kv_indices: expected page numbers from 0 on, got {got}.")
    return Schedule(sizes, host_buffer, kept)


def _started(indices: Indices, template: ScheduleInput) -> tuple[ScheduleParams, ctypes.Array[ctypes.c_char]]:
    """The parameters of a schedule, and the places of its index arrays."""
    params = ScheduleParams()
    params.input = template  # a copy
    p = params.input
    batch, qo_indptr, last, pages = indices.batch_size, indices.qo_indptr, indices.kv_last_page_len, indices.kv_indices
    p.batch_size, p.qo_len, p.kv_indptr, p.num_pages = batch, indices.qo_len, indices.kv_indptr.data_ptr(), -1
    num_kept = batch + 1
    if qo_indptr is not None:
        p.qo_indptr, num_kept = qo_indptr.data_ptr(), num_kept + qo_indptr.numel()
    if last is not None:
        p.kv_last_page_len, num_kept = last.data_ptr(), num_kept + batch
    if indices.num_shared_nodes:
        p.num_shared_nodes, p.prefix_indptr = indices.num_shared_nodes, address_of(indices.prefix_indptr)
    if pages is not None:
        p.num_pages = pages.numel()
        if pages.is_cpu:
            p.kv_indices = pages.data_ptr()
    if indices.seq_lens is not None:
        p.seq_lens = indices.seq_lens.data_ptr()
    kept = bytes_type(4 * num_kept)()
    p.kept = ctypes.addressof(kept)
    return params, kept


def _work(p: ScheduleParams, indices: Indices, host_buffer: HostBuffer | None = None) -> ScheduleOutput:
    if host_buffer is not None:
        p.input.buffer, p.input.capacity = host_buffer.address, host_buffer.num_bytes
    if _scheduler().function(ctypes.addressof(p)):
        _raise(p, indices)
    output: ScheduleOutput = p.output
    return output


def check_fits_on_device(lengths: Lengths, template: ScheduleInput) -> None:
    """ValidationError if the largest possible lengths of a batch that is planned on a GPU are too large."""
    p = template
    if lengths.can_be_counted(p.tile_rows, p.tile_kv, p.num_kv_heads, p.group_size):
        return
    rows = f"{lengths.qo_len} query tokens" if lengths.qo_indptr is None else f"{lengths.num_rows} query tokens in all"
    raise ValidationError(
        f"the batch is too large: {lengths.batch_size} requests of {rows}, {template.group_size} query heads for each "
        f"of {template.num_kv_heads} KV heads, up to {lengths.max_kv_len} tokens each; call with fewer requests at a "
        f"time."
    )


def address_of(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor; None without one."""
    return None if tensor is None else tensor.data_ptr()


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


def describe_page(pages: torch.Tensor, indptr: torch.Tensor, num_pages: int) -> str:
    """ "99 (page 2 of request 0)": the first of `pages` that is no number below num_pages; indptr: of requests."""
    pages, indptr = pages.cpu(), indptr.cpu()
    used = pages[int(indptr[0]) : int(indptr[-1])]
    places = ((used < 0) | (used > min(num_pages, 2**31) - 1)).nonzero()
    if not len(places):
        return "others"  # the caller has changed them since
    place = int(indptr[0]) + int(places[0])
    request = int(torch.searchsorted(indptr, place, right=True)) - 1
    return f"{int(pages[place])} (page {place - int(indptr[request])} of request {request})"


def append_tables(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, nnz: int, pages: torch.Tensor,
    *last_page_lens: Any,
) -> tuple[dict[str, torch.Tensor], int]:  # fmt: skip
    """The tables that say where `nnz` tokens go in `pages` [num_pages, page_size, ...], by name, and the batch size.
    last_page_lens: kv_last_page_len of functions that have it; it is redundant.
    """
    device, batch = pages.device, batch_size_of(check_tensor(kv_indptr, "kv_indptr"), "kv_indptr")
    given = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    lengths = {"batch_indices": nnz, "positions": nnz}
    tables = {name: index_table(table, name, lengths.get(name), device) for name, table in given.items()}
    for lens in last_page_lens:
        index_table(lens, "kv_last_page_len", batch, device)
    _check_tables(tables, batch, pages.shape[0], pages.shape[1], device)
    return tables, batch


def _check_tables(
    tables: Mapping[str, torch.Tensor], batch: int, num_pages: int, page_size: int, device: torch.device
) -> None:
    """Check tables that are on the host, before anything is written. With QUIRE_CHECK_PAGES=1 those of a GPU, too, and
    that no token is skipped because its position is beyond the pages of its request.
    """
    checks_more = config.checks_pages() and not is_capturing(device)
    if device.type != "cpu" and not checks_more:
        return
    batch_indices, positions, kv_indices, kv_indptr = (
        tables[name].cpu() for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")
    )
    check_offsets(kv_indptr, "kv_indptr")
    used = int(kv_indptr[-1])
    if used > kv_indices.shape[0]:
        raise ValidationError(
            f"kv_indices: expected at least kv_indptr[-1]={used} page numbers, got {kv_indices.shape[0]}."
        )
    pages = kv_indices[:used]
    if used and (int(pages.min()) < 0 or int(pages.max()) >= num_pages):
        got = describe_page(kv_indices, kv_indptr, num_pages)
        raise ValidationError(f"kv_indices: expected page numbers below num_pages={num_pages}, got {got}.")
    check_range(batch_indices, "batch_indices", -(2**31), batch - 1, f"requests below batch_size={batch}")
    if checks_more and batch:
        _check_positions(batch_indices, positions, kv_indptr, page_size)


def _check_positions(requests: torch.Tensor, positions: torch.Tensor, indptr: torch.Tensor, page_size: int) -> None:
    reached = indptr.long().diff()[requests.clamp(min=0).long()] * page_size
    skipped = ((requests >= 0) & ((positions < 0) | (positions >= reached))).nonzero()
    if len(skipped):
        token = int(skipped[0])
        raise ValidationError(
            f"positions: expected a position below {int(reached[token])}, as the pages of request "
            f"{int(requests[token])} reach, for token {token}, got {int(positions[token])}; add pages to the request "
            f"before appending."
        )
