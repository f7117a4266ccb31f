"""From index arrays to a plan: a schedule, sent to the device in one copy, or made there."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, TypedDict

import torch

from quire.checks import check_same_device, check_shape, check_tensor
from quire.errors import PlanError, ValidationError
from quire.graph import GraphState, is_capturing
from quire.jit import CudaModule, Module, get_module
from quire.jit.spec import Spec
from quire.kernels import Decision, TileShape
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import (
    AttentionParams,
    FastDivisor,
    ScheduleLengthsParams,
    ScheduleParams,
    Share,
    Tile,
    aligned,
)
from quire.launch import launch
from quire.plan import LOG2E, AttentionPlan, base_of
from quire.schedule import Indices, Lengths, address_of, make_schedule, measure_schedule
from quire.target import max_ctas
from quire.terms import Terms
from quire.types import MaskMode
from quire.workspace import Workspace, partials_bytes

__all__ = ["make_plan", "make_plan_on_device", "workspace_bytes"]

#: Keys and values in flight at a time: of an H200's 50 MB of L2, 17 MB (2 of 8 heads at B2 x 8192, d128) was the best
#: of 1, 2, 4 and all heads (2026-11-21).
_L2_BYTES = 17 << 20


def _module(spec: Spec, device: torch.device) -> Module:
    """The module of `spec`; PlanError in a capture if it was never used on `device`."""
    module = get_module(spec)
    if is_capturing(device) and isinstance(module, CudaModule) and not module.is_loaded(device.index or 0):
        raise PlanError(f"{spec.slug} is not loaded on {device}, and a capture cannot: make this call once before it.")
    return module


class _Cut(TypedDict):
    """Arguments of measure_schedule()."""

    num_kv_heads: int
    group_size: int
    tile: TileShape
    mask: MaskMode
    window_left: int
    max_ctas: int
    fixed_split_size: int
    l2_tokens: int
    tile_capacity: int


class _Variant(NamedTuple):
    """The compiled kernel of a plan and what it plans with."""

    decision: Decision
    module: Module
    tile: TileShape
    ctas: int  #: that run at the same time

    @classmethod
    def of(cls, decision: Decision, device: torch.device) -> _Variant:
        """Compiles or loads it."""
        key = decision.key
        module = _module(decision.kernel.spec(key), device)
        ctas = max_ctas(device, module.facts.get("kMinCtas", 1))
        return cls(decision, module, decision.kernel.tile(key), ctas)

    @property
    def l2_tokens(self) -> int:
        """Tokens of one kv head that may lie in L2 at a time; 0 for a kernel that takes no tickets."""
        key = self.decision.key
        token_bytes = (key.head_dim_qk + key.head_dim_vo) * key.kv.bytes
        return max(1, _L2_BYTES // token_bytes) if self.decision.kernel.persistent else 0

    def params(self, terms: Terms) -> ctypes.Structure:
        """A parameter struct with all that no schedule decides."""
        params = aligned(self.decision.kernel.params)
        base = base_of(params)
        base.num_qo_heads, base.num_kv_heads = terms.num_qo_heads, terms.num_kv_heads
        base.group, base.page = FastDivisor.of(terms.group_size), FastDivisor.of(terms.page_size or 1)
        base.window_left, base.logits_cap = terms.scoring.window_left, terms.scoring.logits_soft_cap * LOG2E
        return params

    def cut(self, indices: Indices, terms: Terms, graph: GraphState | None) -> _Cut:
        """How a schedule is cut for it."""
        capacity = 0
        if graph is not None:
            split = max(0, terms.fixed_split_size)
            capacity = graph.tile_capacity(indices.batch_size, indices.qo_len, terms.group_size, self.tile.rows, split)
        return _Cut(
            num_kv_heads=terms.num_kv_heads, group_size=terms.group_size, tile=self.tile, mask=self.decision.key.mask,
            window_left=terms.scoring.window_left, max_ctas=self.ctas, fixed_split_size=terms.fixed_split_size,
            l2_tokens=self.l2_tokens, tile_capacity=capacity,
        )  # fmt: skip

    def partials_bytes(self, num_slots: int) -> int:
        """Bytes of the workspace that a schedule takes."""
        return partials_bytes(num_slots, self.tile.rows, self.decision.key.head_dim_vo)

    def set_partials(self, p: AttentionParams, workspace: Workspace, num_slots: int) -> torch.Tensor:
        """Reserves the workspace."""
        num_bytes = self.partials_bytes(num_slots)
        partials = workspace.take(num_bytes)
        p.partial_o = partials.data_ptr()
        p.partial_md = partials.data_ptr() + num_bytes - num_slots * self.tile.rows * 8
        return partials


def workspace_bytes(
    decision: Decision, indices: Indices, terms: Terms, device: torch.device, graph: GraphState | None
) -> int:
    """What make_plan() with these arguments takes of its workspace, to the byte."""
    variant = _Variant.of(decision, device)
    return variant.partials_bytes(measure_schedule(indices, **variant.cut(indices, terms, graph)).num_slots)


def make_plan(
    decision: Decision, indices: Indices, terms: Terms, workspace: Workspace, mask_bits: torch.Tensor | None,
    graph: GraphState | None,
) -> AttentionPlan:  # fmt: skip
    """Compile or load the variant, plan, and send the plan to the device without waiting for it.

    With `graph`, replays of a captured run() follow each new plan.
    """
    device = workspace.device
    variant, mask = _Variant.of(decision, device), decision.key.mask
    cut = variant.cut(indices, terms, graph)
    schedule = make_schedule(indices, **cut, pin=device.type == "cuda")
    s = schedule.params
    params = variant.params(terms)
    base = base_of(params)
    bits = _mask_bits(mask_bits, s.mask_bytes, device) if mask is MaskMode.CUSTOM else mask_bits
    partials = variant.set_partials(base, workspace, s.num_slots)
    pages = indices.kv_indices
    if graph is None:
        sent = schedule.buffer.to(device, non_blocking=True)
        if pages is not None and pages.device.type == "cpu":
            pages = sent[s.filled_bytes : s.staged_bytes].view(torch.int32)
        elif pages is not None:
            pages = pages.to(device)
    else:
        if pages is not None:
            pages = graph.pages(schedule.pages if pages.device.type == "cpu" else pages, s.nnz_kv)
        bits = None if bits is None else graph.bits(bits)
        sent = graph.upload(schedule.buffer[: s.filled_bytes], s.buffer_bytes, device)
    base.kv_indices, base.mask = address_of(pages), address_of(bits)
    _set_schedule(base, s, sent.data_ptr())
    grid = s.num_ctas
    if decision.kernel.persistent:
        grid = min(grid, variant.ctas)
        params.ticket = base.arrivals + 4 * s.num_counters
        params.heads_at_once = terms.num_kv_heads if graph else s.heads_at_once
    if graph is not None:
        base.num_tiles = s.tile_capacity
        graph.keep(partials, params)
    owned = (sent, pages, bits, partials)
    return AttentionPlan(
        decision, variant.module, params, terms.scoring, device, owned, grid, starts_early=bool(s.is_shared),
        pages=pages, nnz_kv=s.nnz_kv, largest_page=s.largest_page,
    )  # fmt: skip


def _set_schedule(p: AttentionParams, s: ScheduleParams, sent: int) -> None:
    """What the schedule decides: `sent` is where its buffer lies on the device."""
    p.tiles, p.mask_indptr, p.arrivals = sent + s.tiles_offset, sent + s.mask_indptr_offset, sent + s.arrivals_offset
    p.shares = sent + s.shares_offset if s.is_shared else None
    p.num_tiles, p.num_ctas, p.slots_per_head = s.num_tiles, s.num_ctas, s.slots_per_head


def make_plan_on_device(
    decision: Decision, lengths: Lengths, terms: Terms, workspace: Workspace, mask_bits: torch.Tensor | None
) -> AttentionPlan:
    """Plan on the current stream of a GPU, without knowing a length on the host. May be captured in a CUDA graph, if
    both kernels have been used before; each replay then plans anew.
    """
    device, group_size, num_kv_heads = workspace.device, terms.group_size, terms.num_kv_heads
    variant = _Variant.of(decision, device)
    planner = _module(OperationKey("schedule_lengths", decision.key.target).spec(), device)
    tile, ctas = variant.tile, variant.ctas
    num_tiles = lengths.batch_size * -(-lengths.qo_len * group_size // tile.rows)
    arrivals_bytes = -(-4 * (ctas + 1) // 16) * 16
    shares_bytes = ctas * ctypes.sizeof(Share)
    buffer = torch.empty(
        arrivals_bytes + shares_bytes + num_tiles * ctypes.sizeof(Tile), dtype=torch.uint8, device=device
    )
    params = variant.params(terms)
    base = base_of(params)
    base.kv_indices, base.mask = lengths.page_table.data_ptr(), address_of(mask_bits)
    base.arrivals, base.shares = buffer.data_ptr(), buffer.data_ptr() + arrivals_bytes
    base.tiles = base.shares + shares_bytes
    base.num_tiles, base.num_ctas = num_tiles, ctas
    if decision.kernel.persistent:
        params.ticket, params.heads_at_once = base.arrivals + 4 * ctas, num_kv_heads
    partials = variant.set_partials(base, workspace, 2 * ctas)
    pages = lengths.page_table.shape[1]
    p = ScheduleLengthsParams(
        kv_lens=lengths.kv_lens.data_ptr(), tiles=base.tiles, shares=base.shares, arrivals=base.arrivals,
        batch_size=lengths.batch_size, qo_len=lengths.qo_len, max_kv_len=min(pages * lengths.page_size, 2**31 - 1),
        pages_per_request=lengths.page_table.stride(0), num_kv_heads=num_kv_heads, group_size=group_size,
        tile_rows=tile.rows, tile_kv=tile.kv, causal=int(decision.key.mask is MaskMode.CAUSAL),
        window_left=terms.scoring.window_left, max_ctas=ctas,
    )  # fmt: skip
    launch(planner, ctypes.addressof(p), device, grid=1, block=PARALLEL_THREADS)
    owned = (buffer, lengths.kv_lens, lengths.page_table, mask_bits, partials)
    return AttentionPlan(decision, variant.module, params, terms.scoring, device, owned, ctas, starts_early=True)


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
