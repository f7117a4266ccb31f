"""The implementation of all attention wrappers: plans from arguments and runs on tensors."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch

from quire import config
from quire.errors import CacheMissError, PlanError, UnsupportedError, ValidationError
from quire.jit import cache_miss, is_obtainable, is_recording, record_use, without_matrix_unit
from quire.kernels import PIN, AttentionProblem, Decision, decide, family, same_rows
from quire.kernels.features import planned_features
from quire.runtime import rotate_ahead, widen_ahead
from quire.runtime.ahead import Ahead
from quire.runtime.bits import pack_mask
from quire.runtime.checks import (
    check_flags,
    check_output,
    check_shape,
    check_tensor,
    device_indices,
    host_indices,
    last_entry,
    scalar,
    shape_of,
)
from quire.runtime.expected import Expected, check_floats, view_of
from quire.runtime.explanation import Explanation, figures_of
from quire.runtime.graph import GraphState, is_capturing, refuse_capture
from quire.runtime.launch import recorded
from quire.runtime.layout import PagedCache, cache_tensors, cache_view, ragged_view
from quire.runtime.options import LogitsOptions, PlanOptions
from quire.runtime.plan import AttentionPlan
from quire.runtime.planner import (
    NO_OPERANDS,
    index_limits,
    make_plan,
    make_plan_on_device,
    variants_of,
    workspace_bytes,
)
from quire.runtime.schedule import Indices, Lengths
from quire.runtime.signature import Signature, pointers_of
from quire.runtime.stamps import Stamps
from quire.runtime.target import on_cuda, target_of
from quire.runtime.tensor_maps import EncodedMaps
from quire.runtime.variant_operands import (
    addresses_of,
    check_names,
    describe,
    refuse_beside,
    unexpected,
    write_operands,
)
from quire.runtime.widened_queries import has_scales_of_heads, run_scaled, run_widened
from quire.runtime.work import Placed, place_work
from quire.runtime.workspace import OwnWorkspace, Workspace, partials_bytes
from quire.types import KVLayout, MaskMode, PosEncodingMode

Result = torch.Tensor | Any  #: o, or (o, lse) with return_lse=True


class _CheckedTensors(NamedTuple):
    """Tensors that run() has checked, for the next plan of the same kernel and options."""

    signature: Signature
    nnz_qo: int
    least_tokens: int  #: pages of the cache, or tokens of ragged keys and values
    v_offset: int  #: bytes from keys to values in a cache of one tensor
    planned: tuple[bytes, EncodedMaps | None]  #: what the plan keeps of them


class AttentionSpec(NamedTuple):
    """The arguments of plan(), normalised. `forward()` plans again with some of the options replaced."""

    indices: Indices | Lengths
    options: PlanOptions
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None  #: uint8, of the bits [batch_size, qo_len, round_up(qo_len, 32)]
    operands: Mapping[str, Any] = NO_OPERANDS  #: what the mask of a variant reads

    @property
    def mask(self) -> MaskMode:
        if self.options.logits.chunked:
            return self._chunked()
        if self.tree_mask is not None:
            return MaskMode.TREE
        if self.custom_mask is not None or self.packed_custom_mask is not None:
            return MaskMode.CUSTOM
        return MaskMode.CAUSAL if self.options.causal else MaskMode.NONE

    def _chunked(self) -> MaskMode:
        if (self.tree_mask, self.custom_mask, self.packed_custom_mask) != (None, None, None):
            raise ValidationError(
                "attention_chunk_size: expected None beside a custom mask; leave the chunks to its bits."
            )
        return MaskMode.CHUNKED

    @property
    def nnz_qo(self) -> int:
        """The rows of q: the last entry of qo_indptr, which the scheduler checks later."""
        if isinstance(self.indices, Lengths):
            return self.indices.nnz_qo
        qo_indptr = self.indices.qo_indptr
        nnz = self.indices.qo_len * self.indices.batch_size if qo_indptr is None else last_entry(qo_indptr)
        if nnz < 0:
            raise ValidationError(f"qo_indptr: expected to ascend from 0, got {nnz} as its last offset.")
        return nnz

    def _typical_rows(self) -> int:
        """Rows of q of a typical request: the mean; in a cascade, the mean of the rows that attend to a page."""
        indices, batch_size = self.indices, self.indices.batch_size
        if indices.qo_indptr is None:
            return indices.qo_len if batch_size else 0
        if isinstance(indices, Lengths) or not indices.num_shared_nodes:
            return -(-self.nnz_qo // batch_size) if batch_size else 0
        begin, end = indices.qo_indptr.view(-1, 2).long().unbind(1)
        tokens = indices.kv_indptr.diff().long() * indices.page_size
        if indices.prefix_indptr is not None:
            tokens[: indices.num_shared_nodes] = indices.prefix_indptr.diff()
        return int(((end - begin) * tokens).sum()) // max(1, int(tokens.sum()))

    def decide(self, device: torch.device, backend: str) -> Decision:
        """The kernel that takes this on `device`, among those that `backend` allows."""
        options = self.options
        if options.variant is not None:
            cap, encoding = options.logits.logits_soft_cap, options.logits.pos_encoding
            has_bits = self.mask in (MaskMode.CUSTOM, MaskMode.TREE)
            refuse_beside(options.variant, soft_cap=cap, has_alibi=encoding is PosEncodingMode.ALIBI, has_bits=has_bits)
        return _decide(str(backend), device, options, self.mask, *self._shape())

    def _shape(self) -> tuple[int, bool]:
        """Rows of a typical request, and whether all requests have as many."""
        rows = self._typical_rows() * self.options.num_qo_heads // self.options.num_kv_heads
        return same_rows(rows), self.indices.qo_indptr is None

    def with_narrow_queries(self, device: torch.device, backend: str) -> AttentionSpec:
        """The same for a kernel that reads 8-bit queries as they are, if one takes them; else self."""
        types = self.options.types.narrow
        if types is None:
            return self
        options = self.options._replace(types=types)
        is_taken = _takes(str(backend), device, options, self.mask, *self._shape())
        return self._replace(options=options) if is_taken else self


@lru_cache(maxsize=4096)
def _decide(
    backend: str, device: torch.device, options: PlanOptions, mask: MaskMode, rows: int, uniform: bool
) -> Decision:
    problem = AttentionProblem(
        target=target_of(device, matrix_unit=True), mask=mask, **planned_features(options), rows=rows, uniform=uniform,
        group_size=options.group_size, fixed_split_size=options.fixed_split_size, is_mla=options.is_mla,
    )  # fmt: skip
    decision = decide(problem, backend)
    portable = without_matrix_unit(problem.target)
    if decision.key.target != portable and config.cpu_target() is None and not is_obtainable(decision.spec):
        decision = decide(replace(problem, target=portable), backend)  # which prebuilt stores have
    if is_recording():  # with what other lengths take, so that a process that is sealed later has it
        for spec in family(problem, backend):
            record_use(spec)
    return decision


@lru_cache(maxsize=4096)
def _takes(backend: str, device: torch.device, options: PlanOptions, mask: MaskMode, rows: int, uniform: bool) -> bool:
    """Whether a kernel takes this, which `backend` names or which does not yield, and its variant is at hand."""
    try:
        decision = _decide(backend, device, options, mask, rows, uniform)
    except (UnsupportedError, ValidationError):
        return False
    yields = any(verdict.yields for verdict in decision.trace if verdict.kernel is decision.kernel)
    return (backend.startswith(PIN) or not yields) and is_obtainable(decision.spec)


_PAGES = (
    "1-D, the pages of all requests one after another (a table with a row for each request is for "
    "trtllm_batch_decode_with_kv_cache)"
)
_LAST_PAGES = (
    "[batch_size={length}], as indptr has batch_size + 1 offsets (0 first, then the sums of the requests' page counts)"
)


def page_indices(indices: Any) -> torch.Tensor:
    """Page numbers as a 1-D int32 tensor: plan() copies them if they are on the host, each run() reads them on a
    device.
    """
    taken = host_indices if isinstance(indices, torch.Tensor) and indices.is_cpu else device_indices
    return taken(indices, "paged_kv_indices", shape=_PAGES)


def last_page_lens(value: Any, name: str, kv_indptr: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request's last page, on the host.

    With pages of one token they are redundant, and not copied from a device: SGLang plans in this way between replays.
    """
    if page_size == 1 and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        check_shape(value, name, {"batch_size": kv_indptr.shape[0] - 1})
        return kv_indptr.diff().clamp_(0, 1)
    return host_indices(value, name, kv_indptr.numel() - 1, shape=_LAST_PAGES)


class Attention:
    """A plan, and the checks of the tensors of run()."""

    _ahead: Ahead | None = None
    _narrowed: Mapping[tuple[int, int], Attention] = {}  # plans of the same batch with fewer heads
    _limits: dict[str, int] | None = None  # of the indices of a variant
    _signature: Signature | None = None  # of the tensors of the last run, which were found right
    _v_offset = 0

    def __init__(
        self, spec: AttentionSpec, layout: KVLayout, workspace: Workspace, backend: str,
        graph: GraphState | None = None, before: Attention | None = None,
    ) -> None:  # fmt: skip
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
        else:
            refuse_capture("plan()", self._device)
        told, note = options, ""
        spec = _within_limits(graph, spec) if graph is not None else spec.with_narrow_queries(self._device, backend)
        options = spec.options
        self._given, self._reads_8_bits = options.types.given, options.types.q.bits == 8
        self.decision: Decision = (graph and graph.decision) or spec.decide(self._device, backend)
        rotates = options.logits.pos_encoding is PosEncodingMode.ROPE_LLAMA
        if graph is None and (rotates or options.types.kv.bits == 8):
            self._ahead, note = self._work_ahead(spec, rotate_ahead if rotates else widen_ahead)
        try:
            self.spec = spec if spec.custom_mask is None else self._packed(spec)
            self._plan_options = options
            self._plan = self._make_plan(workspace)
        except CacheMissError:
            raise cache_miss(variants_of(self.decision, spec.indices, spec.custom_mask is not None)) from None
        if note:
            self._plan.note = f"{note}; {self._plan.note}" if self._plan.note else note
        if graph is not None and not graph.awaits_forward and told.logits != options.logits:
            self.set_logits(told.logits)
        schedule = self._plan.schedule
        self._nnz_qo: int = spec.nnz_qo if schedule is None else schedule.sizes.nnz_qo
        head_dim = options.head_dim_kpe if options.is_mla else options.head_dim_qk
        self._q_shape = (self._nnz_qo, options.num_qo_heads, head_dim)
        self._num_operands = len(self.decision.tensors)
        self._lock = Lock()
        self._checked = self._known_tensors(before) if graph is None and self._ahead is None else None
        if before is not None and graph is not None:  # captured launches of fewer heads follow this plan() too
            self._narrowed = {heads: self._narrow(heads, old.graph) for heads, old in before._narrowed.items()}

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._device

    @property
    def plan(self) -> AttentionPlan:
        """What run() launches."""
        return self._plan

    def _known_tensors(self, before: Attention | None) -> _CheckedTensors | None:
        """Tensors that the previous plan, or another with equal options and device, has checked. They are valid for
        this plan too, except for lengths.
        """
        if before is not None and before.decision is self.decision and before._layout is self._layout:
            return before._checked or self.decision.checked.get(self._layout)
        return self.decision.checked.get(self._layout)

    def _work_ahead(self, spec: AttentionSpec, work: ModuleType) -> tuple[Ahead | None, str]:
        """A launch that rotates or converts keys before another kernel than the chosen one, if faster; and a note for
        explain()."""
        options = spec.options
        if isinstance(spec.indices, Lengths) or not work.may_pay(options, self.decision, self._backend):
            return None, ""
        plain = spec._replace(options=work.plain_options(options)).decide(self._device, self._backend)
        if not work.is_faster(plain, self.decision):
            return None, ""
        ahead, note = work.within(self._workspace, spec.indices, options, plain)
        self.decision = self.decision if ahead is None else plain
        return ahead, note

    def _packed(self, spec: AttentionSpec) -> AttentionSpec:
        """`spec` with the mask packed into bits."""
        assert spec.custom_mask is not None and isinstance(spec.indices, Indices)
        bits = pack_mask(spec.custom_mask, spec.indices, self._device)
        return spec._replace(custom_mask=None, packed_custom_mask=bits)

    def _make_plan(self, workspace: Workspace) -> AttentionPlan:
        s = self.spec
        if isinstance(s.indices, Lengths):
            return make_plan_on_device(self.decision, s.indices, s.options, workspace, s.tree_mask)
        bits, ahead = s.packed_custom_mask if s.tree_mask is None else s.tree_mask, self._ahead
        if ahead is not None:
            return make_plan(self.decision, ahead.planned, ahead.options, ahead.workspace, bits, None, s.operands)
        return make_plan(self.decision, s.indices, s.options, workspace, bits, self.graph, s.operands)

    def replan(self, workspace: Workspace, backend: str, **changes: Any) -> Attention:
        """A plan of the same batch with other options; this plan if only the scale or the cap of logits differ."""
        present, options, graph = self._plan_options, self._plan_options._replace(**changes), self.graph
        told = None if graph is None else graph.told
        if options == present:
            result = self
        elif options == present._replace(logits=options.logits) and options.logits.has_same_kernel(present.logits):
            self.set_logits(options.logits)
            result = self
        else:
            graph = None if graph is None else graph.renewed(options)
            result = Attention(self.same_batch()._replace(options=options), self._layout, workspace, backend, graph)
        if graph is not None:
            graph.forwarded(told)
        return result

    def set_logits(self, logits: LogitsOptions) -> None:
        """Use another scale and cap of logits from the next run() on."""
        self._plan_options = self._plan_options._replace(logits=logits)
        self.spec = self.spec._replace(options=self._plan_options)
        self._plan.set_logits(logits)
        for narrowed in self._narrowed.values():
            narrowed.set_logits(logits)

    def explain(self) -> Explanation:
        """Which kernel was chosen, why the others were not, and how the work was divided."""
        key, schedule = self.decision.key, self._plan.schedule
        partial = partials_bytes(1, key.tile_rows, key.head_dim_vo)
        sizes = None if schedule is None else schedule.sizes
        return Explanation.of(
            self.decision, figures_of(sizes, self.decision, self.spec.indices.batch_size, partial), self._plan.note
        )

    def placed_work(self) -> list[Placed]:
        """Which CTA computes what; PlanError if only the device knows the lengths."""
        if self._plan.schedule_input is None or not isinstance(self.spec.indices, Indices):
            raise PlanError("the schedule of this call is made on the GPU: plan() a wrapper with lengths on the host.")
        indices = self.spec.indices if self._ahead is None else self._ahead.planned
        return place_work(self._plan.indices(indices), self._plan.schedule_input)

    def timed(self) -> tuple[Attention, Stamps]:
        """A plan of the same batch and kernel whose runs record the times of work tiles, and the memory of these
        records.
        """
        if isinstance(self.spec.indices, Indices) and self.spec.indices.num_shared_nodes:
            raise UnsupportedError("timeline: expected a plan without shared keys, whose times are not recorded.")
        options, backend = self._plan_options._replace(timed=True), PIN + self.decision.kernel.backend
        twin = Attention(self.same_batch()._replace(options=options), self._layout, self._workspace, backend)
        return twin, Stamps(twin.placed_work(), twin._plan.operands, self._device)

    def same_batch(self) -> AttentionSpec:
        """The spec with the index arrays that were planned, even if the caller has changed them since."""
        spec = self.spec
        if self._ahead is not None:
            return spec._replace(indices=self._ahead.indices)
        return spec._replace(indices=self._plan.indices(spec.indices)) if isinstance(spec.indices, Indices) else spec

    def _of_fewer_heads(self, q: Any, cache: tuple[Any, ...]) -> Attention | None:
        """The plan for a layer with fewer heads than planned; None if q does not have fewer."""
        if not all(isinstance(t, torch.Tensor) and t.dim() >= 3 and not t.is_nested for t in (q, cache[0])):
            return None
        has_pages = not self._plan_options.page_size or cache[0].dim() == 6 - len(cache)
        heads = q.shape[1], cache[0].shape[-3 if has_pages and self._layout is KVLayout.HND else -2]
        planned = self._plan_options.num_qo_heads, self._plan_options.num_kv_heads
        if q.dim() != 3 or not 0 < heads[0] < planned[0] or not 0 < heads[1] <= planned[1] or heads[0] % heads[1]:
            return None
        if heads not in self._narrowed:
            graph = self.graph
            self._narrowed = {**self._narrowed, heads: self._narrow(heads, graph and graph.fresh())}
        return self._narrowed[heads]

    def _narrow(self, heads: tuple[int, int], graph: GraphState | None) -> Attention:
        options = self._plan_options._replace(num_qo_heads=heads[0], num_kv_heads=heads[1])
        spec = self.same_batch()._replace(options=options)
        return Attention(spec, self._layout, self._workspace, self._backend, graph)

    def run(
        self, q: torch.Tensor, kv: PagedCache, *, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool,
        sinks: torch.Tensor | None, q_scale: Any, k_scale: Any, v_scale: Any, window_left: int | None,
        enable_pdl: bool | None, logits_scale_by: torch.Tensor | None = None, o_scale_by: torch.Tensor | None = None,
        lse_unit: float = 1.0, others: tuple[torch.Tensor, ...] = (), operands: Mapping[str, Any] = NO_OPERANDS,
    ) -> Result:  # fmt: skip
        """Check what differs from the last run, then launch: tensors of the same signature cost only their pointers.

        kv: a paged cache, or ragged (k, v). `*_by`: further factors of the logits and of the output, each one float32
        on a GPU; for paged keys only. lse_unit: LN2 for an lse in base e, in place of base 2. others: tensors for the
        operands that the kernel declares in addition to q, k, v and o, followed by scales. operands: tensors and
        numbers that the score of a variant reads.
        Runs of one plan from several threads are serialised.
        """
        if self._given is not None and getattr(q, "dtype", None) is self._given.torch:
            return run_widened(
                self.run, self._plan_options, q, kv, out=out, lse=lse, return_lse=return_lse, sinks=sinks,
                q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, window_left=window_left, enable_pdl=enable_pdl,
                logits_scale_by=logits_scale_by, o_scale_by=o_scale_by, lse_unit=lse_unit, others=others,
                operands=operands,
            )  # fmt: skip
        if self._reads_8_bits and has_scales_of_heads(q_scale, k_scale, v_scale):
            return run_scaled(
                self.run, self._plan_options, q, kv, out=out, lse=lse, return_lse=return_lse, sinks=sinks,
                q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, window_left=window_left, enable_pdl=enable_pdl,
                logits_scale_by=logits_scale_by, o_scale_by=o_scale_by, lse_unit=lse_unit, operands=operands,
            )  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._on_cuda else 0
        cache, known = cache_tensors(kv), self._signature
        tensors: list[Any] = [q, *cache, out, *others]
        is_known = out is not None and known is not None and len(tensors) == known.count and known.fits(*tensors)
        q_shape = self._q_shape if is_known else shape_of(q)
        if q_shape != self._q_shape and (narrowed := self._of_fewer_heads(q, cache)) is not None:
            return narrowed.run(
                q, kv, out=out, lse=lse, return_lse=return_lse, sinks=sinks, q_scale=q_scale, k_scale=k_scale,
                v_scale=v_scale, window_left=window_left, enable_pdl=enable_pdl, logits_scale_by=logits_scale_by,
                o_scale_by=o_scale_by, lse_unit=lse_unit, others=others, operands=operands,
            )  # fmt: skip
        nnz_qo = self._nnz_qo
        if self.graph is not None:
            nnz_qo = self._graph_rows(self.graph, q, cache)
        elif stream and self._has_fixed_lengths and is_capturing(self._device):
            refuse_capture("run() of a plan without use_cuda_graph=True", self._device)
        if out is None:
            if nnz_qo != self._nnz_qo or q_shape != self._q_shape:
                operand = self.decision.kernel.operands[0]  # checked before memory is asked for
                expected = self._expected()
                expected.check(operand, q, operand.name, expected.view(operand, q, operand.name), nnz_qo)
            o_shape = (nnz_qo, self._plan_options.num_qo_heads, self._plan_options.head_dim_vo)
            out = tensors[1 + len(cache)] = torch.empty(o_shape, dtype=self.o_dtype, device=self._device)
            is_known = known is not None and len(tensors) == known.count and known.fits(*tensors)
        if window_left is not None and window_left != self._plan_options.logits.window_left:
            raise ValidationError(
                f"window_left: expected {self._plan_options.logits.window_left} (fixed by plan()), got {window_left}."
            )
        if return_lse is not True and return_lse is not False:
            check_flags(return_lse=return_lse)
        if lse is not None or return_lse:
            lse = self._lse(lse, nnz_qo)
        logits_scale = 1.0
        if q_scale is not None or k_scale is not None:
            logits_scale = scalar(q_scale, "q_scale") * scalar(k_scale, "k_scale")
            product = logits_scale * self._plan_options.logits.sm_scale
            scalar(product, "q_scale * k_scale * sm_scale", positive=True)  # kernels take the maximum before they scale
        pointers = pointers_of(tensors)
        self._lock.acquire()  # half the time of a with statement
        try:
            is_known = is_known and known is self._signature and not self._unusual(pointers)  # another thread may run
            if not is_known and not self._checked_before(tensors, pointers, nnz_qo):
                self._check_all(tensors, pointers, q, cache, out, others, nnz_qo)
            if len(cache) == 1:
                pointers.insert(2, pointers[1] + self._v_offset)  # of the values in it
            if len(pointers) < self._num_operands:  # scales that were not given
                pointers.extend([0] * (self._num_operands - len(pointers)))
            if operands or self._plan_options.variant is not None:
                self._write_operands(operands)
            if self._ahead is not None:
                pointers = self._ahead.start(pointers)
            self._plan.run(
                stream, pointers, None if lse is None else lse.data_ptr(),
                None if sinks is None else self._check_sinks(sinks).data_ptr(),
                logits_scale, 1.0 if v_scale is None else scalar(v_scale, "v_scale"),
                None if logits_scale_by is None else logits_scale_by.data_ptr(),
                None if o_scale_by is None else o_scale_by.data_ptr(), lse_unit, enable_pdl,
            )  # fmt: skip
            if recorded.call is not None:
                scales = logits_scale, 1.0 if v_scale is None else scalar(v_scale, "v_scale")
                self._report(
                    tensors, len(cache), operands, lse=lse, sinks=sinks, scales=scales,
                    scales_by=(logits_scale_by, o_scale_by), lse_unit=lse_unit, enable_pdl=enable_pdl,
                )  # fmt: skip
        finally:
            self._lock.release()
        return (out, lse) if return_lse and lse is not None else out

    def _report(
        self, tensors: list[torch.Tensor], num_cache_tensors: int, operands: Mapping[str, Any], **options: Any
    ) -> None:
        """Tell the recording of a call what was launched for it (replay.py)."""
        if self._ahead is not None:
            return
        places: list[tuple[torch.Tensor | None, int]] = [(tensor, 0) for tensor in tensors]
        if num_cache_tensors == 1:
            places.insert(2, (tensors[1], self._v_offset))
        places += [(None, 0)] * (self._num_operands - len(places))
        variant, captured = self._plan_options.variant, []
        if variant is not None:
            captured = addresses_of(self._plan.operands, variant.expression, operands)
        recorded.call.add_run(self._plan, places, captured=captured, **options)

    def _write_operands(self, given: Mapping[str, Any]) -> None:
        """Write the tensors and numbers that the score of the variant reads from this run on."""
        variant = self._plan_options.variant
        if variant is None:
            unexpected("run", given)
            return
        planned, expression = variant.expression.mask_operands, variant.expression
        wanted = {operand.name for operand in expression.operands} - planned
        check_names("run", given, wanted, planned, "plan")
        if wanted:
            limits = self._limits = self._limits or index_limits(self._plan_options, self.spec.indices)
            write_operands(self._plan.operands, expression, wanted, given, self._device, limits)

    def _graph_rows(self, graph: GraphState, q: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> int:
        """The rows of q, which with CUDA graphs may be more than those of this batch. In a capture q, and ragged keys
        and values, must be as long as in the largest batch of any later plan().
        """
        if graph.awaits_forward:
            raise PlanError(
                "run(): expected forward(), whose first call fixed other options for this wrapper than the last plan() "
                "was told; pass its options to plan() to use run()."
            )
        graph.has_run = True
        rows = q.shape[0] if check_tensor(q, "q").dim() == 3 else 0
        if (rows < graph.max_rows or not self._plan_options.page_size) and is_capturing(self._device):
            if rows < graph.max_rows:
                raise ValidationError(
                    f"q: expected {graph.max_rows} rows in a capture, as the first plan() had, got {rows}."
                )
            if not self._plan_options.page_size:
                self._ragged_views(kv, graph.max_tokens)
        return max(rows, self._nnz_qo)

    def _unusual(self, pointers: list[int]) -> bool:
        """Whether tensors with a valid signature may be invalid: without memory, or not aligned for a GPU."""
        bits = 15 if self._on_cuda else 0
        for pointer in pointers:  # half the time of any()  # noqa: SIM110
            if pointer & bits or not pointer:
                return True
        return False

    def _expected(self) -> Expected:
        return Expected(self.decision, self._plan_options, self._layout, self._device)

    def _checked_before(self, tensors: list[torch.Tensor], pointers: list[int], nnz_qo: int) -> bool:
        """Whether an earlier plan has checked such tensors, and they fit this batch; they then count as checked."""
        known = self._checked
        if known is None or len(tensors) != known.signature.count or not known.signature.fits(*tensors):
            return False
        least = self._plan.largest_page + 1 if self._plan_options.page_size else self._plan.nnz_kv
        if known.nnz_qo != nnz_qo or known.least_tokens < least or self._unusual(pointers):
            return False
        self._plan.copy_signature(*known.planned)
        self._v_offset, self._signature = known.v_offset, known.signature
        return True

    def _check_all(
        self, tensors: list[torch.Tensor], pointers: list[int], q: torch.Tensor, kv: tuple[torch.Tensor, ...],
        out: torch.Tensor, others: tuple[torch.Tensor, ...], nnz_qo: int,
    ) -> None:  # fmt: skip
        """Check everything about the tensors but their addresses, and write shapes and strides into the plan."""
        paged, operands = self._plan_options.page_size > 0, self.decision.tensors
        k, v = self._paged_views(kv) if paged else self._ragged_views(kv)
        views, expected = {operands[1].name: view_of(k), operands[2].name: view_of(v)}, self._expected()
        names = {"o": "out"} | ({"k": "paged_kv_cache (keys)", "v": "paged_kv_cache (values)"} if paged else {})
        all_tensors = (q, k, v, out, *others)
        given = {
            operand.name: (tensor, names.get(operand.name, operand.name))
            for operand, tensor in zip(operands, all_tensors, strict=False)  # scales may be left out
        }
        for operand in operands:
            if operand.name in given:
                tensor, name = given[operand.name]
                view = views.get(operand.name) or expected.view(operand, tensor, name)
                expected.check(operand, tensor, name, view, nnz_qo)
                views[operand.name] = view
        if self._ahead is not None:
            views |= self._ahead.bind(q, k, v, out)
        self._plan.set_signature(views)
        self._v_offset = v.data_ptr() - k.data_ptr()
        if 0 in pointers or any(tensor.requires_grad for tensor in tensors):  # right this time: to be checked again
            self._signature = None
            return
        self._signature = Signature(tensors)
        if self.graph is None and self._ahead is None:
            least = min(t.shape[0] if paged else t.shape[1] for t in (k, v))
            self._checked = _CheckedTensors(self._signature, nnz_qo, least, self._v_offset, self._plan.signature())
            self.decision.checked[self._layout] = self._checked

    def _paged_views(self, cache: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cache_view(cache, self._layout, self._plan_options.page_size)
        num_pages = min(k.shape[0], v.shape[0])
        largest = self._plan.largest_page if self._ahead is None else self._ahead.largest_page
        if largest >= num_pages:
            raise ValidationError(
                f"paged_kv_indices: expected page numbers below num_pages={num_pages}, got {largest}."
            )
        return k, v

    def _ragged_views(self, kv: tuple[torch.Tensor, ...], least_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        views = ragged_view(kv[0], "k", self._layout), ragged_view(kv[1], "v", self._layout)
        least_tokens = max(least_tokens, self._plan.nnz_kv if self._ahead is None else self._ahead.end)
        for view, name in zip(views, "kv", strict=True):
            if view.shape[1] < least_tokens:
                raise ValidationError(
                    f"{name}: expected at least {least_tokens} tokens (kv_indptr[-1]; in a capture that of the first "
                    f"plan), got {view.shape[1]}."
                )
        return views

    def _lse(self, lse: torch.Tensor | None, nnz_qo: int) -> torch.Tensor:
        shape = (nnz_qo, self._plan_options.num_qo_heads)
        if lse is None:
            return torch.empty(shape, dtype=torch.float32, device=self._device)
        check_floats(check_output(lse, "lse"), "lse", self._device)
        check_shape(lse, "lse", dict(zip(("nnz_qo", "num_qo_heads"), shape, strict=True)))
        return lse

    def _check_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        check_floats(check_tensor(sinks, "sinks"), "sinks", self._device)
        check_shape(sinks.view(-1), "sinks", {"num_qo_heads": self._plan_options.num_qo_heads})
        return sinks


def workspace_bytes_of(spec: AttentionSpec, device: torch.device, backend: str, graph: GraphState | None) -> int:
    """The bytes of workspace that a plan of `spec` needs; plans nothing."""
    decision = None
    if graph is not None:
        graph, decision = copy(graph), graph.decision
        spec = _within_limits(graph, spec)
    else:
        spec = spec.with_narrow_queries(device, backend)
    assert isinstance(spec.indices, Indices)
    return workspace_bytes(decision or spec.decide(device, backend), spec.indices, spec.options, device, graph)


def _within_limits(graph: GraphState, spec: AttentionSpec) -> AttentionSpec:
    """Check that `spec` equals the first plan() except for lengths, and that these are within its limits. Returns it
    with the options of the launch, which the first forward() may have changed.
    """
    indices, nnz = spec.indices, spec.nnz_qo
    assert isinstance(indices, Indices)
    if indices.batch_size != graph.batch_size:
        raise ValidationError(
            f"plan(): expected batch_size={graph.batch_size}, which the buffers of the constructor fix, "
            f"got {indices.batch_size}."
        )
    spec = spec._replace(options=graph.options(spec.options))
    fixed = {name: describe(value) for name, value in spec.operands.items()}
    graph.fix(mask=spec.mask.name, q_len=indices.qo_len, **fixed)
    tokens = int(indices.kv_indptr[-1]) * indices.page_size
    if not graph.is_planned:
        graph.max_rows = nnz
        graph.max_tokens = tokens if graph.kv_indices is None else graph.kv_indices.numel() * indices.page_size
    for name, got, most in (("qo_indptr", nnz, graph.max_rows), ("kv_indptr", tokens, graph.max_tokens)):
        if got > most:
            raise ValidationError(
                f"{name}: expected at most {most} tokens, which the buffers and the first plan() of a wrapper for CUDA "
                f"graphs fix, got {got}."
            )
    return spec


def planned(attention: Attention | None) -> Attention:
    """The plan of a wrapper; PlanError if there is none."""
    if attention is None:
        raise PlanError("run() was called before plan(): call plan() first, once per batch.")
    return attention
