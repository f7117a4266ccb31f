"""The implementation of all attention wrappers: a plan, which the host makes from arguments.

Where only the GPU knows the lengths, it plans before each launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from copy import copy
from itertools import accumulate
from threading import Lock
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _profiler_enabled as _is_profiler_enabled

from quire import jit
from quire.engine import rope_prologue, upcast
from quire.engine.device import (
    OwnWorkspace,
    Workspace,
    current_stream,
    is_capturing,
    on_cuda,
    partials_bytes,
    refuse_capture,
)
from quire.engine.inspection import Explanation, Placed, Timeline, figures_of, place_work, record
from quire.engine.launch import AttentionPlan, base_of, launch
from quire.engine.operands import pack_mask, unexpected
from quire.engine.options import LogitsOptions, PlanOptions
from quire.engine.planner import TILE_ALIGNMENT, load, make_plan, plan_template, variants_of, workspace_bytes
from quire.engine.rope_prologue import Prologue
from quire.engine.run import PLAIN, CheckedTensors, PlannedRun, Result, RunOptions
from quire.engine.schedule import Indices, Lengths, address_of, check_fits_on_device
from quire.engine.spec import AttentionSpec, GraphState, within_limits
from quire.engine.tensors import PagedCache
from quire.errors import CacheMissError, PlanError, UnsupportedError
from quire.jit import CudaModule, config
from quire.kernels import PIN, Decision
from quire.kernels.attention import OWN_SPLITS
from quire.kernels.features import KVLayout, PosEncodingMode
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import MergeGroup, Partition, RowTile, ScheduleLengthsParams, ScheduleOutput, pointers_at


class Attention(PlannedRun):
    """A plan, and the checks of the tensors of run()."""

    _by_heads: Mapping[tuple[int, int], Attention] = {}  # plans of the same batch with fewer heads

    def __init__(
        self, spec: AttentionSpec, layout: KVLayout, workspace: Workspace, backend: str,
        graph: GraphState | None = None, before: Attention | None = None,
    ) -> None:  # fmt: skip
        if spec.options.deterministic or not config.says_nothing_of_results():
            spec = spec.settled()
        options = spec.options
        self.o_dtype = options.types.o.torch
        if spec.operands and options.variant is None:
            unexpected("plan", spec.operands)
        self._layout = layout
        self._device = workspace.device
        self._on_cuda, self._index = on_cuda(self._device), self._device.index or 0
        self.graph = graph
        self._workspace, self._backend = workspace, backend
        self._has_fixed_lengths = graph is None
        if isinstance(spec.indices, Lengths):
            self._has_fixed_lengths = False
        elif graph is None and isinstance(workspace, OwnWorkspace):  # one call, which a graph may hold
            self._has_fixed_lengths = not is_capturing(self._device)
        elif self._on_cuda:
            refuse_capture("plan()", self._device)
        requested, note = options, ""
        if graph is not None:
            spec = within_limits(graph, spec, backend)
        elif options.types.given is not None:
            spec = spec.with_8_bit_queries(backend)
        options = spec.options
        self._given, self._reads_8_bits = options.types.given, options.types.q.bits == 8
        self.decision: Decision = (graph and graph.decision) or spec.decide(self._device, backend)
        rotates = options.logits.pos_encoding is PosEncodingMode.ROPE_LLAMA
        is_gathered = options.page_size == 1 and options.fixed_split_size != 0
        if graph is None and (rotates or options.types.kv.bits <= 8 or is_gathered):
            self._prologue, note = self._choose_prologue(spec, rope_prologue if rotates else upcast)
        elif rotates:
            self._refuse_prologue(spec)
        try:
            self.spec = spec if spec.custom_mask is None else self._packed(spec)
            self._plan_options = options
            self._plan = self._make_plan(workspace)
        except CacheMissError:
            raise jit.cache_miss(variants_of(self.decision, spec.indices, spec.custom_mask is not None)) from None
        if jit.recorded:
            record(spec, self.decision, layout, self._device)
        if note:
            self._plan.note = f"{note}; {self._plan.note}" if self._plan.note else note
        if graph is not None and not graph.awaits_forward and requested.logits != options.logits:
            self.set_logits(requested.logits)
        schedule = self._plan.schedule
        self._nnz_qo: int = spec.nnz_qo if schedule is None else schedule.sizes.nnz_qo
        head_dim = options.head_dim_kpe if options.is_mla else options.head_dim_qk
        self._q_shape = (self._nnz_qo, options.num_qo_heads, head_dim)
        self._num_operands = len(self.decision.tensors)
        self._lock = Lock()
        self._checked = self._known_tensors(before) if graph is None and self._prologue is None else None
        if before is not None and graph is not None:  # captured launches of fewer heads follow this plan() too
            self._by_heads = {heads: self._for_heads(heads, old.graph) for heads, old in before._by_heads.items()}

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._device

    @property
    def plan(self) -> AttentionPlan:
        """What run() launches."""
        return self._plan

    def _known_tensors(self, before: Attention | None) -> CheckedTensors | None:
        """Tensors that the previous plan, or another with equal options and device, has checked. They are valid for
        this plan too, except for lengths.
        """
        if before is not None and before.decision is self.decision and before._layout is self._layout:
            return before._checked or self.decision.checked.get(self._layout)
        return self.decision.checked.get(self._layout)

    def _choose_prologue(self, spec: AttentionSpec, kind: ModuleType) -> tuple[Prologue | None, str]:
        """A launch that rotates or converts keys before another kernel than the chosen one, if faster; and a note for
        explain()."""
        options = spec.options
        if isinstance(spec.indices, Lengths) or not kind.may_pay(options, self.decision, self._backend):
            return None, ""
        plain = kind.plain_decision(spec, self.decision, self._device, self._backend)
        if not kind.is_faster(plain, self.decision):
            return None, ""
        prologue, note = kind.fit_workspace(self._workspace, spec.indices, options, plain)
        if prologue is None:
            self._refuse_prologue(spec)
        self.decision = self.decision if prologue is None else plain
        return prologue, note

    def _refuse_prologue(self, spec: AttentionSpec) -> None:
        """Refuse to rotate in the kernel where other batches of the same options are rotated ahead of another."""
        plain = _kernel_of_rotated(spec, self.decision, self._device, self._backend)
        if plain is None:
            return
        reason, instead = "CUDA graphs have no such launch", ""
        if self.graph is None:
            assert isinstance(spec.indices, Indices)
            least = rope_prologue.least_workspace(spec.indices, spec.options, plain)
            reason, instead = "the workspace is too small for them", f"pass a workspace of at least {least} bytes, "
        raise UnsupportedError(
            f"pos_encoding_mode: expected 'NONE' here with deterministic=True, got 'ROPE_LLAMA', for which "
            f"{plain.kernel.name} computes on keys that were rotated ahead of it, and {reason}; {instead}rotate q and "
            f"k before the call, or pass backend={PIN + self.decision.kernel.backend!r} in all calls, which rotates "
            f"there."
        )

    def _packed(self, spec: AttentionSpec) -> AttentionSpec:
        """`spec` with the mask packed into bits."""
        assert spec.custom_mask is not None and isinstance(spec.indices, Indices)
        bits = pack_mask(spec.custom_mask, spec.indices, self._device)
        return spec._replace(custom_mask=None, packed_custom_mask=bits)

    def _make_plan(self, workspace: Workspace) -> AttentionPlan:
        s = self.spec
        if isinstance(s.indices, Lengths):
            return make_plan_on_device(self.decision, s.indices, s.options, workspace, s.tree_mask)
        bits, prologue = s.packed_custom_mask if s.tree_mask is None else s.tree_mask, self._prologue
        if prologue is not None:
            return make_plan(
                self.decision, prologue.planned, prologue.options, prologue.workspace, bits, None, s.operands
            )
        return make_plan(self.decision, s.indices, s.options, workspace, bits, self.graph, s.operands)

    def replan(self, workspace: Workspace, backend: str, **changes: Any) -> Attention:
        """A plan of the same batch with other options; this plan if only the scale or the cap of logits differ."""
        present, options, graph = self._plan_options, self._plan_options._replace(**changes), self.graph
        requested = None if graph is None else graph.requested
        if options == present:
            result = self
        elif options == present._replace(logits=options.logits) and options.logits.has_same_kernel(present.logits):
            self.set_logits(options.logits)
            result = self
        else:
            graph = None if graph is None else graph.for_forward(options)
            result = Attention(self.same_batch()._replace(options=options), self._layout, workspace, backend, graph)
        if graph is not None:
            graph.record_forward(requested)
        return result

    def set_logits(self, logits: LogitsOptions) -> None:
        """Use another scale and cap of logits from the next run() on."""
        self._plan_options = self._plan_options._replace(logits=logits)
        self.spec = self.spec._replace(options=self._plan_options)
        self._plan.set_logits(logits)
        for plan in self._by_heads.values():
            plan.set_logits(logits)

    def explain(self, more: Mapping[str, str] = MappingProxyType({})) -> Explanation:
        """Which kernel was chosen, why the others were not, and how the work was divided. more: other figures."""
        key, schedule = self.decision.key, self._plan.schedule
        partial = partials_bytes(1, key.tile_rows, key.head_dim_vo)
        sizes = None if schedule is None else schedule.sizes
        figures = figures_of(sizes, self.decision, self.spec.indices.batch_size, partial) | dict(more)
        if self._plan_options.deterministic:
            figures["deterministic"] = "the bits of a request depend on that request alone"
        return Explanation.of(self.decision, figures, self._plan.note)

    def placed_work(self) -> list[Placed]:
        """Which CTA computes what; PlanError if only the device knows the lengths."""
        if self._plan.schedule_input is None or not isinstance(self.spec.indices, Indices):
            raise PlanError("the schedule of this call is made on the GPU: plan() a wrapper with lengths on the host.")
        indices = self.spec.indices if self._prologue is None else self._prologue.planned
        return place_work(self._plan.indices(indices), self._plan.schedule_input)

    def with_timeline(self) -> tuple[Attention, Timeline]:
        """A plan of the same batch and kernel whose runs record the times of work tiles, and the memory of these
        records.
        """
        if isinstance(self.spec.indices, Indices) and self.spec.indices.num_shared_nodes:
            raise UnsupportedError("timeline: expected a plan without shared keys, whose times are not recorded.")
        options, backend = self._plan_options._replace(timed=True), PIN + self.decision.kernel.backend
        twin = Attention(self.same_batch()._replace(options=options), self._layout, self._workspace, backend)
        return twin, Timeline(twin.placed_work(), twin._plan.operands, self._device)

    def same_batch(self) -> AttentionSpec:
        """The spec with the index arrays that were planned, even if the caller has changed them since."""
        spec = self.spec
        if self._prologue is not None:
            return spec._replace(indices=self._prologue.indices)
        return spec._replace(indices=self._plan.indices(spec.indices)) if isinstance(spec.indices, Indices) else spec

    def of_fewer_heads(self, q: Any, cache: tuple[Any, ...]) -> Attention | None:
        """The plan for a layer with fewer heads than planned; None if q does not have fewer."""
        if not all(isinstance(t, torch.Tensor) and t.dim() >= 3 and not t.is_nested for t in (q, cache[0])):
            return None
        has_pages = not self._plan_options.page_size or cache[0].dim() == 6 - len(cache)
        heads = q.shape[1], cache[0].shape[-3 if has_pages and self._layout is KVLayout.HND else -2]
        planned = self._plan_options.num_qo_heads, self._plan_options.num_kv_heads
        if q.dim() != 3 or not 0 < heads[0] < planned[0] or not 0 < heads[1] <= planned[1] or heads[0] % heads[1]:
            return None
        if heads not in self._by_heads:
            graph = self.graph
            self._by_heads = {**self._by_heads, heads: self._for_heads(heads, graph and graph.unplanned())}
        return self._by_heads[heads]

    def _for_heads(self, heads: tuple[int, int], graph: GraphState | None) -> Attention:
        options = self._plan_options._replace(num_qo_heads=heads[0], num_kv_heads=heads[1])
        spec = self.same_batch()._replace(options=options)
        return Attention(spec, self._layout, self._workspace, self._backend, graph)


def workspace_bytes_of(spec: AttentionSpec, device: torch.device, backend: str, graph: GraphState | None) -> int:
    """The bytes of workspace that a plan of `spec` needs; plans nothing."""
    spec, decision = spec.settled(), None
    if graph is not None:
        graph, decision = copy(graph), graph.decision
        spec = within_limits(graph, spec, backend)
    else:
        spec = spec.with_8_bit_queries(backend)
    assert isinstance(spec.indices, Indices)
    chosen = decision or spec.decide(device, backend)
    plain = _kernel_of_rotated(spec, chosen, device, backend) if graph is None else None
    num_bytes = workspace_bytes(plain or chosen, spec.indices, spec.options, device, graph)
    return num_bytes if plain is None else rope_prologue.least_workspace(spec.indices, spec.options, plain, num_bytes)


def _kernel_of_rotated(spec: AttentionSpec, decision: Decision, device: torch.device, backend: str) -> Decision | None:
    """The kernel for keys that are rotated ahead, if all batches of these options are, so that results do not depend on
    the batch; else None.
    """
    options = spec.options
    rotates = options.logits.pos_encoding is PosEncodingMode.ROPE_LLAMA and options.fixed_split_size == OWN_SPLITS
    if not rotates or not rope_prologue.may_pay(options, decision, backend):
        return None
    plain = rope_prologue.plain_decision(spec, decision, device, backend)
    return plain if rope_prologue.is_faster(plain, decision) else None


def planned(attention: Attention | None) -> Attention:
    """The plan of a wrapper; PlanError if there is none."""
    if attention is None:
        raise PlanError("run() was called before plan(): call plan() first, once per batch.")
    return attention


class AttentionCall(NamedTuple):
    """Attention that is planned and run at once. Functions without a plan() make one of their arguments."""

    spec: AttentionSpec
    query: torch.Tensor
    kv: PagedCache  #: or ragged (k, v)
    workspace: Workspace
    layout: KVLayout = KVLayout.NHD
    backend: str = "auto"
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    return_lse: bool = False
    options: RunOptions = PLAIN

    def attend(self) -> Result:
        """Plan and run."""
        attention = Attention(self.spec, self.layout, self.workspace, self.backend)
        return attention.run(self.query, self.kv, self.out, self.lse, self.return_lse, self.options)


# --- plans made on the GPU -------------------------------------------------------------------------------------------


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
