"""The implementation of all attention wrappers: plans from arguments and runs on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch

from quire import jit
from quire.engine import rope_prologue, upcast
from quire.engine.device import OwnWorkspace, Workspace, on_cuda, partials_bytes
from quire.engine.device_planner import make_plan_on_device
from quire.engine.graph import GraphState, is_capturing, refuse_capture
from quire.engine.inspection import Explanation, Placed, Timeline, figures_of, place_work
from quire.engine.launch import AttentionPlan
from quire.engine.operands import pack_mask, unexpected
from quire.engine.options import LogitsOptions
from quire.engine.planner import make_plan, variants_of, workspace_bytes
from quire.engine.rope_prologue import Prologue
from quire.engine.run import PLAIN, CheckedTensors, PlannedRun, Result, RunOptions
from quire.engine.schedule import Indices, Lengths
from quire.engine.spec import AttentionSpec, within_limits
from quire.engine.tensors import PagedCache
from quire.errors import CacheMissError, PlanError, UnsupportedError
from quire.jit import config
from quire.kernels import PIN, Decision
from quire.kernels.attention import OWN_SPLITS
from quire.kernels.features import KVLayout, PosEncodingMode


class Attention(PlannedRun):
    """A plan, and the checks of the tensors of run()."""

    _by_heads: Mapping[tuple[int, int], Attention] = {}  # plans of the same batch with fewer heads

    def __init__(
        self, spec: AttentionSpec, layout: KVLayout, workspace: Workspace, backend: str,
        graph: GraphState | None = None, before: Attention | None = None,
    ) -> None:  # fmt: skip
        if spec.options.deterministic or not config.says_nothing_of_determinism():
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
        if graph is None and (rotates or options.types.kv.bits <= 8):
            self._prologue, note = self._choose_prologue(spec, rope_prologue if rotates else upcast)
        elif rotates:
            self._refuse_prologue(spec, "CUDA graphs have no such launch")
        try:
            self.spec = spec if spec.custom_mask is None else self._packed(spec)
            self._plan_options = options
            self._plan = self._make_plan(workspace)
        except CacheMissError:
            raise jit.cache_miss(variants_of(self.decision, spec.indices, spec.custom_mask is not None)) from None
        if jit.recorded:
            spec.record(self.decision, layout, self._device)
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
        plain = spec._replace(options=kind.plain_options(options)).decide(self._device, self._backend)
        if not kind.is_faster(plain, self.decision):
            return None, ""
        prologue, note = kind.fit_workspace(self._workspace, spec.indices, options, plain)
        if prologue is None:
            self._refuse_prologue(spec, note)
        self.decision = self.decision if prologue is None else plain
        return prologue, note

    def _refuse_prologue(self, spec: AttentionSpec, reason: str) -> None:
        """Refuse to rotate in the kernel where other batches of the same options would be rotated ahead of another."""
        options, decision = spec.options, self.decision
        if options.fixed_split_size != OWN_SPLITS or not rope_prologue.may_pay(options, decision, self._backend):
            return
        plain = spec._replace(options=rope_prologue.plain_options(options)).decide(self._device, self._backend)
        if rope_prologue.is_faster(plain, decision):
            raise UnsupportedError(
                f"pos_encoding_mode: expected 'NONE' here with deterministic=True, got 'ROPE_LLAMA', for which "
                f"{plain.kernel.name} computes on keys that were rotated ahead of it, and {reason}; rotate q and k "
                f"before the call, or pass backend={PIN + decision.kernel.backend!r} in all calls, which rotates there."
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

    def explain(self) -> Explanation:
        """Which kernel was chosen, why the others were not, and how the work was divided."""
        key, schedule = self.decision.key, self._plan.schedule
        partial = partials_bytes(1, key.tile_rows, key.head_dim_vo)
        sizes = None if schedule is None else schedule.sizes
        figures = figures_of(sizes, self.decision, self.spec.indices.batch_size, partial)
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
    return workspace_bytes(decision or spec.decide(device, backend), spec.indices, spec.options, device, graph)


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
