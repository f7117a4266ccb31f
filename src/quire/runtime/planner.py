"""From index arrays to a plan: a schedule, sent to the device in one copy, or made there."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch

from quire.runtime.checks import check_same_device, check_shape, check_tensor
from quire.errors import PlanError, ValidationError
from quire.runtime.graph import GraphState, is_capturing
from quire.jit import CudaModule, Module, get_module
from quire.jit.spec import Spec
from quire.kernels import Decision, TileShape
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import (
    AttentionParams,
    ClassifyMaskParams,
    FastDivisor,
    ScheduleLengthsParams,
    ScheduleParams,
    Share,
    Tile,
    aligned_copy,
)
from quire.runtime.launch import launch
from quire.runtime.plan import LOG2E, AttentionPlan, base_of
from quire.runtime.schedule import Indices, Lengths, Schedule, address_of, cut_of, make_schedule, measure_schedule
from quire.runtime.upload import Sent, Staging, staging_of
from quire.runtime.target import max_ctas
from quire.runtime.options import Terms
from quire.types import MaskMode
from quire.runtime.workspace import Workspace, partials_bytes

__all__ = ["make_plan", "make_plan_on_device", "workspace_bytes"]

#: Keys and values in flight at a time: of an H200's 50 MB of L2, 17 MB (2 of 8 heads at B2 x 8192, d128) was the best
#: of 1, 2, 4 and all heads (2026-11-21).
_L2_BYTES = 17 << 20

_CLASSIFYING_CTAS = 4  #: of each row tile


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
    facts = module.facts
    module.prepare(device.index or 0, facts.get("kSmemBytes", 0))
    return max_ctas(device, facts.get("kMinCtas", 1))


class _Recipe(NamedTuple):
    """What plans of the same terms on the same kernel have in common."""

    params: ctypes.Structure  #: of the kernel, with all that no schedule decides
    cut: ScheduleParams
    tile: TileShape
    row_bytes: int  #: of a partial result
    ctas: int  #: that run at the same time

    def new_params(self) -> ctypes.Structure:
        """A copy of the parameters for one plan."""
        same = type(self.params)
        return aligned_copy(self.params) if same is not AttentionParams else same.from_buffer_copy(self.params)

    def partials_bytes(self, num_slots: int) -> int:
        """Bytes of the workspace that a schedule takes."""
        return num_slots * self.tile.rows * self.row_bytes

    def set_partials(self, p: AttentionParams, workspace: Workspace, num_slots: int) -> torch.Tensor:
        """Reserves the workspace."""
        num_bytes = self.partials_bytes(num_slots)
        partials = workspace.take(num_bytes)
        p.partial_o = at = partials.data_ptr()
        p.partial_md = at + num_bytes - num_slots * self.tile.rows * 8
        return partials


@lru_cache(maxsize=1024)
def _recipe(decision: Decision, terms: Terms, ctas: int, tile_capacity: int = 0) -> _Recipe:
    kernel, key = decision.kernel, decision.key
    tile = kernel.tile(key)
    params = kernel.params()
    base = base_of(params)
    base.num_qo_heads, base.num_kv_heads = terms.num_qo_heads, terms.num_kv_heads
    base.group, base.page = FastDivisor.of(terms.group_size), FastDivisor.of(terms.page_size or 1)
    base.window_left, base.logits_cap = terms.scoring.window_left, terms.scoring.logits_soft_cap * LOG2E
    token_bytes = (key.head_dim_qk + key.head_dim_vo) * key.kv.bytes
    cut = cut_of(
        num_kv_heads=terms.num_kv_heads, group_size=terms.group_size, page_size=terms.page_size or 1, tile=tile,
        mask=key.mask, window_left=terms.scoring.window_left, max_ctas=ctas, fixed_split_size=terms.fixed_split_size,
        l2_tokens=max(1, _L2_BYTES // token_bytes) if kernel.persistent else 0, tile_capacity=tile_capacity,
    )  # fmt: skip
    return _Recipe(params, cut, tile, partials_bytes(1, 1, key.head_dim_vo), ctas)


def _recipe_for(
    decision: Decision, indices: Indices, terms: Terms, device: torch.device, graph: GraphState | None
) -> tuple[Module, _Recipe]:
    """The kernel, compiled or loaded, and how it takes this batch; with a graph, the largest."""
    module, ctas = _load(decision.spec, device)
    rows, split, capacity = decision.key.tile_rows, max(0, terms.fixed_split_size), 0
    if graph is not None:
        capacity = graph.tile_capacity(indices.batch_size, indices.qo_len, terms.group_size, rows, split)
    return module, _recipe(decision, terms, ctas, capacity)


def workspace_bytes(
    decision: Decision, indices: Indices, terms: Terms, device: torch.device, graph: GraphState | None
) -> int:
    """What make_plan() with these arguments takes of its workspace, to the byte."""
    _, recipe = _recipe_for(decision, indices, terms, device, graph)
    return recipe.partials_bytes(measure_schedule(indices, recipe.cut).num_slots)


def make_plan(
    decision: Decision, indices: Indices, terms: Terms, workspace: Workspace, mask_bits: torch.Tensor | None,
    graph: GraphState | None,
) -> AttentionPlan:  # fmt: skip
    """Compile or load the variant, plan, and send the plan to the device without waiting for it.

    With `graph`, replays of a captured run() follow each new plan.
    """
    device, kernel = workspace.device, decision.kernel
    module, recipe = _recipe_for(decision, indices, terms, device, graph)
    staging = staging_of(device)
    schedule = make_schedule(indices, recipe.cut, staging)
    s = schedule.params
    params = recipe.new_params()
    base = base_of(params)
    bits = _mask_bits(mask_bits, s.mask_bytes, device) if decision.key.mask is MaskMode.CUSTOM else mask_bits
    partials = recipe.set_partials(base, workspace, s.num_slots)
    if graph is not None and bits is not None:
        bits = graph.bits(bits)
    num_classes = _num_classes(decision, recipe, s, graph)
    at, sent, pages = _send(schedule, indices, device, staging, graph, num_classes)
    base.mask = address_of(bits)
    if indices.kv_indices is not None:
        base.kv_indices = at + s.filled_bytes if pages is None else pages.data_ptr()
    _set_schedule(base, s, at)
    if num_classes:
        params.classes = at + (s.staged_bytes if graph is None else s.buffer_bytes)
        _classify(decision, base, s, params.classes, device)
    grid = s.num_ctas
    if kernel.persistent:
        grid = min(grid, recipe.ctas)
        params.ticket = base.arrivals + 4 * s.num_counters
        params.heads_at_once = terms.num_kv_heads if graph else s.heads_at_once
    if graph is not None:
        base.num_tiles = s.tile_capacity
        graph.keep(partials, params)
    return AttentionPlan(
        decision, module, params, terms.scoring, device, grid, (bits, partials), starts_early=bool(s.is_shared),
        schedule=schedule, sent=sent, pages=pages,
    )  # fmt: skip


def _send(
    schedule: Schedule, indices: Indices, device: torch.device, staging: Staging | None, graph: GraphState | None,
    more: int,
) -> tuple[int, Sent | None, torch.Tensor | None]:  # fmt: skip
    """Where the schedule lies on the device, who holds it there, and page numbers that do not lie behind it. There is
    room for `more` bytes behind both.
    """
    s, room, pages = schedule.params, schedule.room, indices.kv_indices
    if graph is not None:
        if pages is not None:
            pages = graph.pages(schedule.pages if pages.is_cpu else pages, s.nnz_kv)
        at = graph.upload(schedule.buffer, s.buffer_bytes + more, device).data_ptr()
        if staging is not None:
            staging.release(room)
        return at, None, pages
    pages = None if pages is None or pages.is_cpu else pages.to(device)
    if staging is None:
        return room.address, None, pages
    sent = staging.send(room, s.staged_bytes, more)
    return sent.address, sent, pages


def _num_classes(decision: Decision, recipe: _Recipe, s: ScheduleParams, graph: GraphState | None) -> int:
    """Classes of a custom mask's tiles, a byte each work unit; with a graph, as many as any masks have."""
    if decision.key.mask is not MaskMode.CUSTOM or not decision.kernel.reads_classes:
        return 0
    return s.work_per_head if graph is None else graph.unit_capacity(recipe.tile, s.group_size, s.tile_capacity)


def _classify(decision: Decision, p: AttentionParams, s: ScheduleParams, classes: int, device: torch.device) -> None:
    """Enqueue the classification of a mask's tiles, once for all kv heads and runs of the plan."""
    module, _ = _load(OperationKey("classify_mask", decision.key.target).spec(), device)
    todo = ClassifyMaskParams(
        mask=p.mask, mask_indptr=p.mask_indptr, tiles=p.tiles, classes=classes, num_tiles=s.num_tiles,
        tile_rows=s.tile_rows, tile_kv=s.tile_kv, group_size=s.group_size, window_left=s.window_left,
    )  # fmt: skip
    if s.num_tiles:
        launch(module, ctypes.addressof(todo), device, grid=_CLASSIFYING_CTAS * s.num_tiles, block=PARALLEL_THREADS)


def _set_schedule(p: AttentionParams, s: ScheduleParams, sent: int) -> None:
    """What the schedule decides: `sent` is where its buffer lies on the device."""
    p.tiles, p.mask_indptr, p.arrivals = sent + s.tiles_offset, sent + s.mask_indptr_offset, sent + s.arrivals_offset
    p.shares = sent + s.shares_offset if s.is_shared else None
    p.num_tiles, p.num_ctas, p.slots_per_head = s.num_tiles, s.num_ctas, s.slots_per_head
    p.is_sent = 1


def make_plan_on_device(
    decision: Decision, lengths: Lengths, terms: Terms, workspace: Workspace, mask_bits: torch.Tensor | None
) -> AttentionPlan:
    """Plan on the current stream of a GPU, without knowing a length on the host. May be captured in a CUDA graph, if
    both kernels have been used before; each replay then plans anew.
    """
    device, group_size, num_kv_heads = workspace.device, terms.group_size, terms.num_kv_heads
    module, ctas = _load(decision.spec, device)
    num_tiles = lengths.batch_size * -(-lengths.qo_len * group_size // decision.key.tile_rows)
    pages = lengths.page_table.shape[1]
    recipe = _recipe(decision, terms, ctas)
    planner, _ = _load(OperationKey("schedule_lengths", decision.key.target).spec(), device)
    tile = recipe.tile
    arrivals_bytes = -(-4 * (ctas + 1) // 16) * 16
    shares_bytes = ctas * ctypes.sizeof(Share)
    buffer = torch.empty(
        arrivals_bytes + shares_bytes + num_tiles * ctypes.sizeof(Tile), dtype=torch.uint8, device=device
    )
    params = recipe.new_params()
    base = base_of(params)
    base.kv_indices, base.mask = lengths.page_table.data_ptr(), address_of(mask_bits)
    base.arrivals, base.shares = buffer.data_ptr(), buffer.data_ptr() + arrivals_bytes
    base.tiles = base.shares + shares_bytes
    base.num_tiles, base.num_ctas = num_tiles, ctas
    if decision.kernel.persistent:
        params.ticket, params.heads_at_once = base.arrivals + 4 * ctas, num_kv_heads
    partials = recipe.set_partials(base, workspace, 2 * ctas)
    p = ScheduleLengthsParams(
        kv_lens=lengths.kv_lens.data_ptr(), tiles=base.tiles, shares=base.shares, arrivals=base.arrivals,
        batch_size=lengths.batch_size, qo_len=lengths.qo_len, max_kv_len=min(pages * lengths.page_size, 2**31 - 1),
        pages_per_request=lengths.page_table.stride(0), num_kv_heads=num_kv_heads, group_size=group_size,
        tile_rows=tile.rows, tile_kv=tile.kv, causal=int(decision.key.mask is MaskMode.CAUSAL),
        window_left=terms.scoring.window_left, max_ctas=ctas,
    )  # fmt: skip
    launch(planner, ctypes.addressof(p), device, grid=1, block=PARALLEL_THREADS)
    owned = (buffer, lengths.kv_lens, lengths.page_table, mask_bits, partials)
    return AttentionPlan(decision, module, params, terms.scoring, device, ctas, owned, starts_early=True)


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
