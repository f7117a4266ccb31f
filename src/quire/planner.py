"""From index arrays to a plan: who does what, in one packed buffer that reaches the device in one copy."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from quire.checks import check_same_device, check_shape, check_tensor
from quire.errors import PlanError, ValidationError
from quire.graph import GraphState, is_capturing
from quire.jit import CudaModule, HostModule, Module, get_module, host_target
from quire.jit.spec import Spec
from quire.kernels import Decision, TileShape
from quire.kernels.attention import Geometry
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
from quire.launch import Launcher, launch
from quire.layout import KVView
from quire.target import max_ctas
from quire.tensor_maps import TensorMaps
from quire.types import MaskMode
from quire.workspace import Workspace, partials_bytes

__all__ = [
    "AttentionPlan",
    "Indices",
    "Lengths",
    "Schedule",
    "Scoring",
    "make_plan",
    "make_plan_on_device",
    "make_schedule",
]

_LOG2E = math.log2(math.e)
#: Keys and values in flight at a time: of an H200's 50 MB of L2, 17 MB (2 of 8 heads at B2 x 8192, d128) was the best
#: of 1, 2, 4 and all heads (2026-11-21).
_L2_BYTES = 17 << 20
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


class Scoring(NamedTuple):
    """What happens to a logit, as run-time values."""

    sm_scale: float
    window_left: int  #: -1: none
    logits_soft_cap: float  #: 0: none


@dataclass(frozen=True)
class Schedule:
    """A filled schedule: sizes in `params`, arrays in `buffer` (uint8, on the host)."""

    params: ScheduleParams
    buffer: torch.Tensor

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
    """Plan on the host. `fixed_split_size`: 0 automatic, -1 never cut a tile, else tokens between cuts. `l2_tokens`:
    for a kernel whose CTAs take tickets for tiles, how many tokens of one kv head may lie in L2 at a time.

    With a `tile_capacity`, for a CUDA graph, only what lies in the buffer depends on lengths: the buffer ends after the
    tiles that there are, but offsets and counts are those of the capacity.
    """
    run = _scheduler().function
    p = ScheduleParams(
        qo_indptr=_address(indices.qo_indptr), kv_indptr=_address(indices.kv_indptr),
        kv_last_page_len=_address(indices.kv_last_page_len), buffer=None,
        batch_size=indices.batch_size, qo_len=indices.qo_len, num_kv_heads=num_kv_heads, group_size=group_size,
        page_size=indices.page_size, tile_rows=tile.rows, tile_kv=tile.kv, causal=int(mask is MaskMode.CAUSAL),
        window_left=window_left, max_ctas=max_ctas, fixed_split_size=fixed_split_size,
        has_mask=int(mask is MaskMode.CUSTOM), tile_capacity=tile_capacity,
        has_tickets=int(l2_tokens > 0), l2_tokens=l2_tokens,
    )  # fmt: skip
    if run(ctypes.addressof(p)):
        _raise(p, indices)
    buffer = torch.empty(max(16, p.filled_bytes), dtype=torch.uint8, pin_memory=pin)
    p.buffer = buffer.data_ptr()
    if run(ctypes.addressof(p)):
        _raise(p, indices)
    return Schedule(p, buffer)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class AttentionPlan:
    """Everything of a call but its tensors: owns its index arrays, runs any number of times.

    Two runs of one plan must not overlap on different streams or threads: they share the workspace.
    """

    def __init__(
        self, decision: Decision, module: Module, params: ctypes.Structure, scoring: Scoring, device: torch.device,
        owned: tuple[torch.Tensor | None, ...], grid: int, *, follows_planner: bool = False,
    ) -> None:  # fmt: skip
        kernel = decision.kernel
        self.device = device
        self._follows_planner = follows_planner  # on the device: then starting early always helps
        self._params = _base(params)
        self._scoring = scoring
        self._owned = (params, *owned)  # what the parameter struct points into
        self._maps = TensorMaps(kernel, decision.key, kernel.tile(decision.key), params) if kernel.copies else None
        self._launch = Launcher(module, params, device, grid, pdl=kernel.pdl)

    def set_form(self, q: torch.Tensor, k: KVView, v: KVView, o: torch.Tensor) -> None:
        """The form of the tensors that the next runs bring."""
        p = self._params
        p.q_token_stride, p.q_head_stride, _ = q.stride()
        p.o_token_stride, p.o_head_stride, _ = o.stride()
        p.k_page_stride, p.k_token_stride, p.k_head_stride = k.page_stride, k.token_stride, k.head_stride
        p.v_page_stride, p.v_token_stride, p.v_head_stride = v.page_stride, v.token_stride, v.head_stride
        if self._maps is not None:
            geometry = Geometry(
                q.shape[0], min(k.num_tokens, v.num_tokens), min(k.num_pages, v.num_pages), p.page.divisor,
                p.num_kv_heads, p.group.divisor,
                (p.q_token_stride, p.q_head_stride), (p.k_page_stride, p.k_token_stride, p.k_head_stride),
                (p.v_page_stride, p.v_token_stride, p.v_head_stride),
            )  # fmt: skip
            self._maps.encode(geometry, {"q": q.data_ptr(), "k": k.pointer, "v": v.pointer})

    def run(
        self, q: int, k: int, v: int, o: int, lse: int | None = None, sinks: int | None = None, *,
        logits_scale: float = 1.0, o_scale: float = 1.0, enable_pdl: bool = False,
    ) -> None:  # fmt: skip
        """Launch on the current stream, on tensors at these addresses, of the form that set_form() was told."""
        p = self._params
        p.q, p.k, p.v, p.o, p.lse, p.sinks = q, k, v, o, lse, sinks
        scale, cap = self._scoring.sm_scale * logits_scale, self._scoring.logits_soft_cap
        p.logits_scale = scale / cap if cap else scale * _LOG2E
        p.o_scale = o_scale
        if self._maps is not None:
            self._maps.move({"q": q, "k": k, "v": v})
        if p.num_ctas:
            self._launch(enable_pdl or self._follows_planner)


def _base(params: ctypes.Structure) -> AttentionParams:
    """What every attention kernel is given, inside what this one is."""
    return params if isinstance(params, AttentionParams) else params.base


def _module(spec: Spec, device: torch.device) -> Module:
    """The module of `spec`; PlanError in a capture if it was never used on `device`."""
    module = get_module(spec)
    if is_capturing(device) and isinstance(module, CudaModule) and not module.is_loaded(device.index or 0):
        raise PlanError(f"{spec.slug} is not loaded on {device}, and a capture cannot: make this call once before it.")
    return module


class _Variant(NamedTuple):
    """The compiled kernel of a plan and what it plans with."""

    decision: Decision
    module: Module
    tile: TileShape
    ctas: int  #: that run at the same time

    @classmethod
    def of(cls, decision: Decision, workspace: Workspace) -> _Variant:
        """Compiles or loads it."""
        key = decision.key
        tile = decision.kernel.tile(key)
        module = _module(decision.kernel.spec(key), workspace.device)
        ctas = max_ctas(workspace.device, module.facts.get("kMinCtas", 1))
        return cls(
            decision, module, tile, _shares_that_fit(ctas, workspace, partials_bytes(2, tile.rows, key.head_dim_vo))
        )

    @property
    def l2_tokens(self) -> int:
        """Tokens of one kv head that may lie in L2 at a time; 0 for a kernel that takes no tickets."""
        key = self.decision.key
        token_bytes = (key.head_dim_qk + key.head_dim_vo) * key.kv.bytes
        return max(1, _L2_BYTES // token_bytes) if self.decision.kernel.persistent else 0

    def params(self, scoring: Scoring, num_qo_heads: int, num_kv_heads: int, page_size: int) -> ctypes.Structure:
        """A parameter struct with all that no schedule decides."""
        params = aligned(self.decision.kernel.params)
        base = _base(params)
        base.num_qo_heads, base.num_kv_heads = num_qo_heads, num_kv_heads
        base.group, base.page = FastDivisor.of(num_qo_heads // num_kv_heads), FastDivisor.of(page_size)
        base.window_left, base.logits_cap = scoring.window_left, scoring.logits_soft_cap * _LOG2E
        return params

    def set_partials(self, p: AttentionParams, workspace: Workspace, num_slots: int) -> torch.Tensor:
        """Reserves the workspace."""
        num_bytes = partials_bytes(num_slots, self.tile.rows, self.decision.key.head_dim_vo)
        partials = workspace.take(num_bytes)
        p.partial_o = partials.data_ptr()
        p.partial_md = partials.data_ptr() + num_bytes - num_slots * self.tile.rows * 8
        return partials


def make_plan(
    decision: Decision, indices: Indices, scoring: Scoring, *, num_qo_heads: int, num_kv_heads: int,
    workspace: Workspace, mask_bits: torch.Tensor | None, fixed_split_size: int = 0, graph: GraphState | None = None,
) -> AttentionPlan:  # fmt: skip
    """Compile or load the variant, plan, and send the plan to the device without waiting for it.

    With `graph`, replays of a captured run() follow each new plan.
    """
    device = workspace.device
    variant = _Variant.of(decision, workspace)
    tile, mask, group_size = variant.tile, decision.key.mask, num_qo_heads // num_kv_heads
    capacity = 0
    if graph is not None:
        split = max(0, fixed_split_size)
        capacity = graph.tile_capacity(indices.batch_size, indices.qo_len, group_size, tile.rows, split)
    schedule = make_schedule(
        indices, num_kv_heads=num_kv_heads, group_size=group_size, tile=tile, mask=mask, tile_capacity=capacity,
        window_left=scoring.window_left, max_ctas=variant.ctas, fixed_split_size=fixed_split_size,
        pin=device.type == "cuda", l2_tokens=variant.l2_tokens,
    )  # fmt: skip
    s = schedule.params
    _check_indices(indices, s)
    params = variant.params(scoring, num_qo_heads, num_kv_heads, indices.page_size)
    base = _base(params)
    bits = _mask_bits(mask_bits, s.mask_bytes, device) if mask is MaskMode.CUSTOM else None
    partials = variant.set_partials(base, workspace, s.num_slots)
    pages = indices.kv_indices
    if graph is None:
        sent = schedule.buffer.to(device, non_blocking=True)
        pages = None if pages is None else pages.to(device, torch.int32, non_blocking=True).contiguous()
    else:
        pages = None if pages is None else graph.pages(pages, s.nnz_kv)
        bits = None if bits is None else graph.bits(bits)
        sent = graph.upload(schedule.buffer, s.buffer_bytes, device)
    base.kv_indices, base.mask = _address(pages), _address(bits)
    _set_schedule(base, s, sent.data_ptr())
    grid = s.num_ctas
    if decision.kernel.persistent:
        grid = min(grid, variant.ctas)
        params.ticket = base.arrivals + 4 * s.num_counters
        params.heads_at_once = num_kv_heads if graph else s.heads_at_once
    if graph is not None:
        base.num_tiles = capacity
        graph.keep(partials, params)
    return AttentionPlan(decision, variant.module, params, scoring, device, (sent, pages, bits, partials), grid)


def _set_schedule(p: AttentionParams, s: ScheduleParams, sent: int) -> None:
    """What the schedule decides: `sent` is where its buffer lies on the device."""
    for name in ("tiles", "mask_indptr", "arrivals"):
        setattr(p, name, sent + getattr(s, f"{name}_offset"))
    p.shares = sent + s.shares_offset if s.is_shared else None
    p.num_tiles, p.num_ctas, p.slots_per_head = s.num_tiles, s.num_ctas, s.slots_per_head


def make_plan_on_device(
    decision: Decision, lengths: Lengths, scoring: Scoring, *, num_qo_heads: int, num_kv_heads: int,
    workspace: Workspace,
) -> AttentionPlan:  # fmt: skip
    """Plan on the current stream of a GPU, without knowing a length on the host. May be captured in a CUDA graph, if
    both kernels have been used before; each replay then plans anew.
    """
    device, group_size = workspace.device, num_qo_heads // num_kv_heads
    variant = _Variant.of(decision, workspace)
    planner = _module(OperationKey("schedule_lengths", decision.key.target).spec(), device)
    tile, ctas = variant.tile, variant.ctas
    num_tiles = lengths.batch_size * -(-lengths.qo_len * group_size // tile.rows)
    arrivals_bytes = -(-4 * (ctas + 1) // 16) * 16
    shares_bytes = ctas * ctypes.sizeof(Share)
    buffer = torch.empty(
        arrivals_bytes + shares_bytes + num_tiles * ctypes.sizeof(Tile), dtype=torch.uint8, device=device
    )
    params = variant.params(scoring, num_qo_heads, num_kv_heads, lengths.page_size)
    base = _base(params)
    base.kv_indices = lengths.page_table.data_ptr()
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
        window_left=scoring.window_left, max_ctas=ctas,
    )  # fmt: skip
    launch(planner, ctypes.addressof(p), device, grid=1, block=PARALLEL_THREADS)
    owned = (buffer, lengths.kv_lens, lengths.page_table, partials)
    return AttentionPlan(decision, variant.module, params, scoring, device, owned, ctas, follows_planner=True)


def _shares_that_fit(ctas: int, workspace: Workspace, bytes_each: int) -> int:
    """CTAs whose partial results the workspace holds, if at least half of them; else take() says what is missing."""
    fitting = ctas if workspace.capacity is None else workspace.capacity // bytes_each
    return fitting if ctas // 2 <= fitting < ctas else ctas


def _check_indices(indices: Indices, s: ScheduleParams) -> None:
    if indices.kv_indices is not None and indices.kv_indices.shape[0] < s.nnz_kv:
        raise ValidationError(
            f"paged_kv_indices: expected at least paged_kv_indptr[-1]={s.nnz_kv} entries, "
            f"got {indices.kv_indices.shape[0]}."
        )


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
