"""From index arrays to a plan: a schedule, sent to the device in one copy, or made there."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from quire.errors import PlanError, ValidationError
from quire.jit import CudaModule, Module, get_module
from quire.jit.spec import Spec
from quire.kernels import Decision, TileShape
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import (
    AttentionParams,
    BlockMaskParams,
    FastDivisor,
    Partition,
    RowTile,
    ScheduleLengthsParams,
    ScheduleParams,
    aligned_copy,
)
from quire.runtime.checks import check_same_device, check_shape, check_tensor
from quire.runtime.graph import GraphState, is_capturing
from quire.runtime.launch import launch
from quire.runtime.options import PlanOptions
from quire.runtime.plan import LOG2E, AttentionPlan, base_of
from quire.runtime.schedule import (
    Indices,
    Lengths,
    Schedule,
    address_of,
    make_schedule,
    measure_schedule,
    schedule_inputs,
)
from quire.runtime.target import max_ctas
from quire.runtime.upload import DeviceBuffer, Uploader, uploader_of
from quire.runtime.workspace import Workspace, partials_bytes
from quire.types import MaskMode

__all__ = ["make_plan", "make_plan_on_device", "workspace_bytes"]

#: Keys and values in flight at a time: of an H200's 50 MB of L2, 17 MB (2 of 8 heads at B2 x 8192, d128) was the best
#: of 1, 2, 4 and all heads (2026-11-21).
_L2_BYTES = 17 << 20

_BLOCK_MASK_CTAS = 4  #: of each row tile


def _load(spec: Spec, device: torch.device) -> tuple[Module, int]:
    """Compiles or loads a kernel; and how many of its CTAs run at the same time."""
    module = get_module(spec)
    ctas = _prepare(module, device) if isinstance(module, CudaModule) else max_ctas(device, 1)
    return module, ctas


@lru_cache(maxsize=4096)
def _prepare(module: CudaModule, device: torch.device) -> int:
    """Loads a kernel on a GPU; PlanError in a capture."""
    if not module.is_loaded(device.index or 0) and is_capturing(device):
        raise PlanError(
            f"{module.slug} is not loaded on {device}, and a capture cannot: make this call once before it."
        )
    exports = module.exports
    module.prepare(device.index or 0, exports.get("kSmemBytes", 0))
    return max_ctas(device, exports.get("kMinCtas", 1))


class _PlanTemplate(NamedTuple):
    """What plans of the same options on the same kernel have in common."""

    params: ctypes.Structure  #: of the kernel, with all that no schedule decides
    inputs: ScheduleParams
    tile: TileShape
    row_bytes: int  #: of a partial result
    ctas: int  #: that run at the same time

    def new_params(self) -> ctypes.Structure:
        """A copy of the parameters for one plan."""
        same = type(self.params)
        return aligned_copy(self.params) if same is not AttentionParams else same.from_buffer_copy(self.params)

    def partials_bytes(self, num_partials: int) -> int:
        """Bytes of the workspace that a schedule takes."""
        return num_partials * self.tile.rows * self.row_bytes

    def set_partials(self, p: AttentionParams, workspace: Workspace, num_partials: int) -> torch.Tensor:
        """Reserves the workspace."""
        num_bytes = self.partials_bytes(num_partials)
        partials = workspace.take(num_bytes)
        p.partial_o = at = partials.data_ptr()
        p.partial_md = at + num_bytes - num_partials * self.tile.rows * 8
        return partials


@lru_cache(maxsize=1024)
def _plan_template(decision: Decision, options: PlanOptions, ctas: int, tile_capacity: int = 0) -> _PlanTemplate:
    kernel, key = decision.kernel, decision.key
    tile = kernel.tile(key)
    params = kernel.params()
    base = base_of(params)
    base.num_qo_heads, base.num_kv_heads = options.num_qo_heads, options.num_kv_heads
    base.group, base.page = FastDivisor.of(options.group_size), FastDivisor.of(options.page_size or 1)
    base.window_left, base.logits_cap = options.logits.window_left, options.logits.logits_soft_cap * LOG2E
    token_bytes = (key.head_dim_qk + key.head_dim_vo) * key.kv.bytes
    inputs = schedule_inputs(
        num_kv_heads=options.num_kv_heads, group_size=options.group_size, page_size=options.page_size or 1, tile=tile,
        mask=key.mask, window_left=options.logits.window_left, max_ctas=ctas, fixed_split_size=options.fixed_split_size,
        l2_tokens=max(1, _L2_BYTES // token_bytes) if kernel.persistent else 0, tile_capacity=tile_capacity,
    )  # fmt: skip
    return _PlanTemplate(params, inputs, tile, partials_bytes(1, 1, key.head_dim_vo), ctas)


def _template_for(
    decision: Decision, indices: Indices, options: PlanOptions, device: torch.device, graph: GraphState | None
) -> tuple[Module, _PlanTemplate]:
    """The kernel, compiled or loaded, and how it takes this batch; with a graph, the largest."""
    module, ctas = _load(decision.spec, device)
    rows, split, capacity = decision.key.tile_rows, max(0, options.fixed_split_size), 0
    if graph is not None:
        capacity = graph.tile_capacity(indices.batch_size, indices.qo_len, options.group_size, rows, split)
    return module, _plan_template(decision, options, ctas, capacity)


def workspace_bytes(
    decision: Decision, indices: Indices, options: PlanOptions, device: torch.device, graph: GraphState | None
) -> int:
    """What make_plan() with these arguments takes of its workspace, to the byte."""
    _, template = _template_for(decision, indices, options, device, graph)
    return template.partials_bytes(measure_schedule(indices, template.inputs).num_partials)


def make_plan(
    decision: Decision, indices: Indices, options: PlanOptions, workspace: Workspace, mask_bits: torch.Tensor | None,
    graph: GraphState | None,
) -> AttentionPlan:  # fmt: skip
    """Compile or load the variant, plan, and send the plan to the device without waiting for it.

    With `graph`, replays of a captured run() follow each new plan.
    """
    device, kernel = workspace.device, decision.kernel
    module, template = _template_for(decision, indices, options, device, graph)
    uploader = uploader_of(device)
    schedule = make_schedule(indices, template.inputs, uploader)
    s = schedule.params
    params = template.new_params()
    base = base_of(params)
    bits = _mask_bits(mask_bits, s.mask_bytes, device) if decision.key.mask is MaskMode.CUSTOM else mask_bits
    partials = template.set_partials(base, workspace, s.num_partials)
    if graph is not None and bits is not None:
        bits = graph.bits(bits)
    mask_bytes = _block_mask_bytes(decision, template, s, graph)
    at, sent, pages = _send(schedule, indices, device, uploader, graph, mask_bytes)
    base.mask = address_of(bits)
    if indices.kv_indices is not None:
        base.kv_indices = at + s.filled_bytes if pages is None else pages.data_ptr()
    _set_schedule(base, s, at)
    if mask_bytes:
        params.block_mask = at + (s.staged_bytes if graph is None else s.buffer_bytes)
        _build_block_mask(decision, base, s, params.block_mask, device)
    grid = s.num_ctas
    if kernel.persistent:
        grid = min(grid, template.ctas)
        params.tile_counter = base.arrivals + 4 * s.num_counters
        params.heads_per_l2_group = options.num_kv_heads if graph else s.heads_per_l2_group
    if graph is not None:
        base.num_tiles = s.tile_capacity
        graph.keep(partials, params)
    return AttentionPlan(
        decision, module, params, options.logits, device, grid, (bits, partials), uses_pdl=bool(s.is_partitioned),
        schedule=schedule, sent=sent, pages=pages,
    )  # fmt: skip


def _send(
    schedule: Schedule, indices: Indices, device: torch.device, uploader: Uploader | None, graph: GraphState | None,
    more: int,
) -> tuple[int, DeviceBuffer | None, torch.Tensor | None]:  # fmt: skip
    """Where the schedule lies on the device, who holds it there, and page numbers that do not lie behind it. There is
    host_buffer for `more` bytes behind both.
    """
    s, host_buffer, pages = schedule.params, schedule.host_buffer, indices.kv_indices
    if graph is not None:
        if pages is not None:
            pages = graph.pages(schedule.pages if pages.is_cpu else pages, s.nnz_kv)
        at = graph.upload(schedule.buffer, s.buffer_bytes + more, device).data_ptr()
        if uploader is not None:
            uploader.release(host_buffer)
        return at, None, pages
    pages = None if pages is None or pages.is_cpu else pages.to(device)
    if uploader is None:
        return host_buffer.address, None, pages
    sent = uploader.send(host_buffer, s.staged_bytes, more)
    return sent.address, sent, pages


def _block_mask_bytes(decision: Decision, template: _PlanTemplate, s: ScheduleParams, graph: GraphState | None) -> int:
    """Classes of a custom mask's tiles, a byte each work unit; with a graph, as many as any masks have."""
    if decision.key.mask is not MaskMode.CUSTOM or not decision.kernel.reads_block_mask:
        return 0
    return s.work_per_head if graph is None else graph.unit_capacity(template.tile, s.group_size, s.tile_capacity)


def _build_block_mask(
    decision: Decision, p: AttentionParams, s: ScheduleParams, block_mask: int, device: torch.device
) -> None:
    """Enqueue the classification of a mask's tiles, once for all kv heads and runs of the plan."""
    module, _ = _load(OperationKey("block_mask", decision.key.target).spec(), device)
    todo = BlockMaskParams(
        mask=p.mask, mask_indptr=p.mask_indptr, tiles=p.tiles, block_mask=block_mask, num_tiles=s.num_tiles,
        tile_rows=s.tile_rows, tile_kv=s.tile_kv, group_size=s.group_size, window_left=s.window_left,
    )  # fmt: skip
    if s.num_tiles:
        launch(module, ctypes.addressof(todo), device, grid=_BLOCK_MASK_CTAS * s.num_tiles, block=PARALLEL_THREADS)


def _set_schedule(p: AttentionParams, s: ScheduleParams, sent: int) -> None:
    """What the schedule decides: `sent` is where its buffer lies on the device."""
    p.tiles, p.mask_indptr, p.arrivals = sent + s.tiles_offset, sent + s.mask_indptr_offset, sent + s.arrivals_offset
    p.partitions = sent + s.partitions_offset if s.is_partitioned else None
    p.num_tiles, p.num_ctas, p.partials_per_head = s.num_tiles, s.num_ctas, s.partials_per_head
    p.plan_is_resident = 1


def make_plan_on_device(
    decision: Decision, lengths: Lengths, options: PlanOptions, workspace: Workspace, mask_bits: torch.Tensor | None
) -> AttentionPlan:
    """Plan on the current stream of a GPU, without knowing a length on the host. May be captured in a CUDA graph, if
    both kernels have been used before; each replay then plans anew.
    """
    device, group_size, num_kv_heads = workspace.device, options.group_size, options.num_kv_heads
    module, ctas = _load(decision.spec, device)
    num_tiles = lengths.batch_size * -(-lengths.qo_len * group_size // decision.key.tile_rows)
    pages = lengths.page_table.shape[1]
    template = _plan_template(decision, options, ctas)
    planner, _ = _load(OperationKey("schedule_lengths", decision.key.target).spec(), device)
    tile = template.tile
    arrivals_bytes = -(-4 * (ctas + 1) // 16) * 16
    shares_bytes = ctas * ctypes.sizeof(Partition)
    buffer = torch.empty(
        arrivals_bytes + shares_bytes + num_tiles * ctypes.sizeof(RowTile), dtype=torch.uint8, device=device
    )
    params = template.new_params()
    base = base_of(params)
    base.kv_indices, base.mask = lengths.page_table.data_ptr(), address_of(mask_bits)
    base.arrivals, base.partitions = buffer.data_ptr(), buffer.data_ptr() + arrivals_bytes
    base.tiles = base.partitions + shares_bytes
    base.num_tiles, base.num_ctas = num_tiles, ctas
    if decision.kernel.persistent:
        params.tile_counter, params.heads_per_l2_group = base.arrivals + 4 * ctas, num_kv_heads
    partials = template.set_partials(base, workspace, 2 * ctas)
    p = ScheduleLengthsParams(
        kv_lens=lengths.kv_lens.data_ptr(), tiles=base.tiles, partitions=base.partitions, arrivals=base.arrivals,
        batch_size=lengths.batch_size, qo_len=lengths.qo_len, max_kv_len=min(pages * lengths.page_size, 2**31 - 1),
        pages_per_request=lengths.page_table.stride(0), num_kv_heads=num_kv_heads, group_size=group_size,
        tile_rows=tile.rows, tile_kv=tile.kv, causal=int(decision.key.mask is MaskMode.CAUSAL),
        window_left=options.logits.window_left, max_ctas=ctas,
    )  # fmt: skip
    launch(planner, ctypes.addressof(p), device, grid=1, block=PARALLEL_THREADS)
    owned = (buffer, lengths.kv_lens, lengths.page_table, mask_bits, partials)
    return AttentionPlan(decision, module, params, options.logits, device, ctas, owned, uses_pdl=True)


def _mask_bits(bits: torch.Tensor | None, expected: int, device: torch.device) -> torch.Tensor:
    if bits is None:
        raise PlanError("a custom mask was planned without its bits.")
    name = "packed_custom_mask"
    check_tensor(bits, name)
    check_shape(bits, name, {"bytes of the batch's masks": expected})
    check_same_device(bits, name, device)
    if bits.dtype is not torch.uint8:
        raise ValidationError(f"{name}: expected dtype torch.uint8, got {bits.dtype}.")
    return bits.contiguous()
