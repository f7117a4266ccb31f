"""Plans that the GPU makes before each launch, from lengths which only it knows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch._C._autograd import _profiler_enabled as _is_profiler_enabled

from quire.engine.device import Workspace, current_stream
from quire.engine.graph import is_capturing
from quire.engine.launch import AttentionPlan, base_of, launch
from quire.engine.options import PlanOptions
from quire.engine.planner import TILE_ALIGNMENT, load, plan_template
from quire.engine.schedule import Lengths, address_of, check_fits_on_device
from quire.jit import CudaModule
from quire.kernels import Decision
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import MergeGroup, Partition, RowTile, ScheduleLengthsParams, ScheduleOutput, pointers_at


def make_plan_on_device(
    decision: Decision, lengths: Lengths, options: PlanOptions, workspace: Workspace, mask_bits: torch.Tensor | None
) -> AttentionPlan:
    """Plan on the current stream of a GPU, from lengths that the host does not know. May be captured in a CUDA graph if
    both kernels have been used before; each replay then plans again.
    """
    schedule = DeviceSchedule(decision, lengths, options, workspace)
    base_of(schedule.params).mask = address_of(mask_bits)
    plan = AttentionPlan(
        decision, schedule.module, schedule.params, options.logits, workspace.device,
        schedule.ctas * decision.ctas_per_tile, (mask_bits, schedule.template.frequencies),
        stream=current_stream(workspace.device), uses_pdl=True, on_device=schedule,
    )  # fmt: skip
    plan.plan_again(lengths, workspace)
    return plan


class Made(NamedTuple):
    """What a schedule on the device was made with."""

    #: lengths of requests, offsets in q and in k, out and lse: each may be None
    arrays: tuple[torch.Tensor | None, ...]
    table: torch.Tensor | None
    partials: torch.Tensor
    kept: torch.Tensor | None  #: the memory of a schedule that was there already


class DeviceSchedule:
    """Schedules for batches of one shape, made by a kernel on the GPU from lengths that only the GPU knows.

    It writes them into memory of each call, so that calls do not share any.
    """

    #: CTAs that fill rows of the results without a request.
    _FILLING_CTAS = 32

    def __init__(self, decision: Decision, lengths: Lengths, options: PlanOptions, workspace: Workspace) -> None:
        self._kernel, self._device = decision.kernel, workspace.device
        self.module, ctas = load(decision.spec, self._device)
        ctas = max(1, ctas // decision.ctas_per_tile)
        self.template = template = plan_template(decision, options, self._device, ctas)
        self.ctas = ctas = max(1, min(ctas, workspace.most_bytes // template.partials_bytes(2)))
        self.params, base = template.new_params()
        check_fits_on_device(lengths, template.schedule)
        self.planner, _ = load(OperationKey("schedule_lengths", decision.key.target).spec(), self._device)
        num_tiles = lengths.num_row_tiles(options.group_size, template.tile.rows)
        has_offsets = lengths.qo_indptr is not None
        self._lay_out(num_tiles, 4 * (lengths.batch_size + 1) if has_offsets else 0)
        self._params = ScheduleLengthsParams(
            batch_size=lengths.batch_size, qo_len=lengths.qo_len, max_kv_len=lengths.max_kv_len,
            num_kv_heads=options.num_kv_heads, group_size=options.group_size, tile_rows=template.tile.rows,
            tile_kv=template.tile.kv, mask_mode=int(decision.key.mask), window_left=options.logits.window_left,
            start_cost=template.schedule.start_cost, max_ctas=ctas, num_rows=lengths.nnz_qo, max_tiles=num_tiles,
            is_ragged=int(not options.page_size), l2_tokens=template.schedule.l2_tokens if has_offsets else 0,
            row_vectors=options.num_qo_heads * options.head_dim_vo * options.types.o.bits // 128,
            may_divide=int(options.fixed_split_size == 0),
        )  # fmt: skip
        self._grid = 1 + self._FILLING_CTAS * has_offsets
        self._shape = self._device, bytes(self._params)  # what a schedule for lengths that are all alike depends on
        base.num_tiles, base.num_ctas = num_tiles, ctas
        self._places = pointers_at(self._params, "kv_lens", "lse")
        self._in_plan = pointers_at(base, "kv_indices", "partial_md")
        self.made: Made | None = None  #: with what make() made the last schedule
        self._arrays: tuple[int | None, ...] = ()
        self._start: Callable[[int], None] | None = None
        self._at = 0  # where the parameters say that the schedule is
        self._num_pages: int | None = None  # for kernels that ignore other page numbers

    def _lay_out(self, num_tiles: int, first_tiles_bytes: int) -> None:
        """Offsets of tile counter, merge table, partitions, row tiles and partial results in the memory of a call."""
        sizes = [16, self.ctas * ctypes.sizeof(MergeGroup), self.ctas * ctypes.sizeof(Partition)]
        sizes += [num_tiles * ctypes.sizeof(RowTile), -(-first_tiles_bytes // TILE_ALIGNMENT) * TILE_ALIGNMENT]
        self._offsets = tuple(accumulate(sizes, initial=0))
        self.num_bytes = self._offsets[-1]  #: of a schedule
        self.partials_bytes = self.template.partials_bytes(2 * self.ctas)
        #: Of the maxima and sums of rows in the partial results.
        self.maxima_offset = self.partials_bytes - 2 * self.ctas * self.template.tile.rows * 8

    def make(self, lengths: Lengths, workspace: Workspace) -> tuple[torch.Tensor | None, ...]:
        """Launch the kernel, for lengths of that shape, and set the parameters to where its schedule will lie; returns
        the tensors that both hold. Nothing is launched for a schedule that was kept.
        """
        lengths = (lengths if self._kernel.has_gaps else lengths.without_gaps()).with_near_pages()
        table = lengths.page_table
        self._params.pages_per_request = 0 if table is None else table.stride(0)
        self._num_pages = None if lengths.num_pages is None else min(lengths.num_pages, 2**31 - 1)
        kept = lengths.kept if lengths.kv_lens is None else None
        shape = self._shape, self._params.pages_per_request
        known = None if kept is None else kept.get(shape, for_graph=is_capturing(self._device))
        partials = workspace.take(self.partials_bytes)
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device) if known is None else known
        arrays = lengths.kv_lens, lengths.qo_indptr, lengths.kv_indptr, *lengths.results
        self.place(buffer.data_ptr(), partials.data_ptr(), address_of(table))
        self.made = Made(arrays, table, partials, known)
        if known is None:
            self.launch(tuple(map(address_of, arrays)))
            if kept is not None and not is_capturing(self._device):
                kept.keep(shape, buffer)
        return buffer, lengths.kv_lens, lengths.qo_indptr, lengths.kv_indptr, table, partials

    def place(self, at: int, partials: int, table: int | None) -> None:
        """Set the parameters to a schedule at address `at`, its partial results and the table of pages."""
        counter, groups, partitions, tiles, first_tiles, _ = [at + offset for offset in self._offsets]
        self._in_plan[0] = table
        self._in_plan[3:] = [tiles, partitions, groups, partials, partials + self.maxima_offset]
        if at != self._at:
            self._places[3:8] = [tiles, first_tiles, partitions, groups, counter]
            if self._kernel.fill is not None:
                self._kernel.fill(self.params, self.template.schedule, ScheduleOutput(), at, 0)
            if self._num_pages is not None:
                self.params.num_pages = self._num_pages
            self._at = at

    def launch(self, arrays: tuple[int | None, ...], stream: int | None = None) -> None:
        """Launch the kernel on these arrays, of which `Made` has the order; on `stream`, if the caller knows torch's
        current one.
        """
        if arrays != self._arrays:
            self._places[:3], self._places[8:], self._arrays = arrays[:3], arrays[3:], arrays
        if stream is None or _is_profiler_enabled():
            params = ctypes.addressof(self._params)
            launch(self.planner, params, self._device, grid=self._grid, block=PARALLEL_THREADS)
            return
        if self._start is None:
            assert isinstance(self.planner, CudaModule)
            index, params = self._device.index or 0, ctypes.addressof(self._params)
            self._start = self.planner.bind(params, self._grid, PARALLEL_THREADS, 0, index).start
        self._start(stream)
