"""Runs a plan on tensors: checks what differs from the last run, and launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, NamedTuple

import torch

from quire.engine.checks import check_flags, check_output, check_shape, check_tensor, scalar, shape_of
from quire.engine.device import allocator, is_capturing, refuse_capture
from quire.engine.launch import NO_EXTRAS, AttentionPlan, EncodedMaps, Extras, recorded
from quire.engine.operands import NO_OPERANDS, addresses_of, check_names, unexpected, write_operands
from quire.engine.options import PlanOptions
from quire.engine.planner import index_limits
from quire.engine.rope_prologue import Prologue
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec, GraphState
from quire.engine.tensors import (
    Expected,
    PagedCache,
    Signature,
    cache_tensors,
    cache_view,
    check_floats,
    pointers_of,
    ragged_view,
    to_base_e,
    view_of,
)
from quire.engine.upcast import OPERANDS, check_others, check_scales_fit, has_scales_of_heads, run_scaled, run_upcast
from quire.errors import PlanError, ValidationError
from quire.kernels import Decision
from quire.kernels.features import NVFP4, DType, KVLayout

Result = torch.Tensor | Any  #: o, or (o, lse) with return_lse=True


class RunOptions(NamedTuple):
    """What run() takes beside its tensors. The defaults change nothing.

    logits_scale_by, o_scale_by: further factors of the logits and of the output, each one float32 on a GPU; for paged
        keys only. lse_unit: LN2 for an lse in base e, in place of base 2; negative: FlashMLA's lse (core/params.h).
        others: tensors for the operands that the kernel declares in addition to q, k, v and o, followed by scales.
        operands: tensors and numbers that the score of a variant reads.
    """

    sinks: torch.Tensor | None = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    window_left: int | None = None
    enable_pdl: bool | None = None
    logits_scale_by: torch.Tensor | None = None
    o_scale_by: torch.Tensor | None = None
    lse_unit: float = 1.0
    others: tuple[torch.Tensor, ...] = ()
    operands: Mapping[str, Any] = NO_OPERANDS


PLAIN = RunOptions()


def run_options(
    sinks: torch.Tensor | None, q_scale: Any, k_scale: Any, v_scale: Any, window_left: int | None,
    enable_pdl: bool | None, operands: Mapping[str, Any],
) -> RunOptions:  # fmt: skip
    """The options of a wrapper's run(). Most calls have none, and then cost no new tuple."""
    if sinks is q_scale is k_scale is v_scale is window_left is enable_pdl is None and not operands:
        return PLAIN
    return RunOptions(sinks, q_scale, k_scale, v_scale, window_left, enable_pdl, operands=operands)


class CheckedTensors(NamedTuple):
    """Tensors that run() has checked, for the next plan of the same kernel and options."""

    signature: Signature
    nnz_qo: int
    least_tokens: int  #: pages of the cache, or tokens of ragged keys and values
    v_offset: int  #: bytes from keys to values in a cache of one tensor
    planned: tuple[bytes, EncodedMaps | None]  #: what the plan keeps of them


class PlannedRun:
    """run() of a plan. Attention, which makes the plan, derives from it."""

    decision: Decision
    graph: GraphState | None
    spec: AttentionSpec
    o_dtype: torch.dtype
    _plan: AttentionPlan
    _plan_options: PlanOptions
    _layout: KVLayout
    _device: torch.device
    _on_cuda: bool
    _index: int  # of the GPU
    _given: DType | None  # the type of 8-bit queries, which are upcast
    _reads_8_bits: bool  # the kernel takes 8-bit queries as they are
    _has_fixed_lengths: bool
    _nnz_qo: int
    _q_shape: tuple[int, int, int]
    _num_operands: int
    _lock: Lock
    _checked: CheckedTensors | None
    _prologue: Prologue | None = None
    _limits: dict[str, int] | None = None  # of the indices of a variant
    _signature: Signature | None = None  # of the tensors of the last run, which were found right
    _v_offset = 0

    def of_fewer_heads(self, q: Any, cache: tuple[Any, ...]) -> PlannedRun | None:
        """The plan for a layer with fewer heads than planned; None if q does not have fewer."""
        raise NotImplementedError

    def run(
        self, q: torch.Tensor, kv: PagedCache, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool = False, options: RunOptions = PLAIN,
    ) -> Result:  # fmt: skip
        """Attention of q over a paged cache, or over ragged (k, v).

        Tensors of the same signature as in the last run cost only their pointers. Runs of one plan from several threads
        are serialised.
        """
        if self._given is not None and getattr(q, "dtype", None) is self._given.torch:
            return run_upcast(self.run, self._plan_options, q, kv, out, lse, return_lse, options)
        if self._reads_8_bits and has_scales_of_heads(options):
            return run_scaled(self.run, self._plan_options, q, kv, out, lse, return_lse, options)
        cache, known = (kv,) if type(kv) is torch.Tensor else cache_tensors(kv), self._signature
        tensors: list[Any] = [q, *cache, out, *options.others]
        is_known = out is not None and known is not None and len(tensors) == known.count and known.fits(*tensors)
        q_shape = self._q_shape if is_known else shape_of(q)
        if q_shape != self._q_shape and (narrowed := self.of_fewer_heads(q, cache)) is not None:
            return narrowed.run(q, kv, out, lse, return_lse, options)
        nnz_qo = self._nnz_qo if self.graph is None else self._graph_rows(self.graph, q, cache)
        if out is None:
            out = tensors[1 + len(cache)] = self._new_out(q, q_shape, nnz_qo)
            is_known = known is not None and len(tensors) == known.count and known.fits(*tensors)
        if return_lse is not True and return_lse is not False:
            check_flags(return_lse=return_lse)
        if lse is not None or return_lse:
            lse = self._lse(lse, nnz_qo)
        self._launch(tensors, len(cache), lse, options, known if is_known else None, nnz_qo)
        return (out, lse) if return_lse and lse is not None else out

    def _new_out(self, q: torch.Tensor, q_shape: Any, nnz_qo: int) -> torch.Tensor:
        if nnz_qo != self._nnz_qo or q_shape != self._q_shape:  # q is checked before memory is asked for
            operand, expected = self.decision.kernel.operands[0], self._expected()
            expected.check(operand, q, operand.name, expected.view(operand, q, operand.name), nnz_qo)
        return self._new((nnz_qo, self._plan_options.num_qo_heads, self._plan_options.head_dim_vo), self.o_dtype)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor. A recording sees what torch.empty() allocates."""
        if recorded.call is not None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        strides = (shape[1] * shape[2], shape[2], 1) if len(shape) == 3 else (shape[1], 1)
        return allocator(self._device)(shape, strides, dtype)

    def _logits_scale(self, q_scale: Any, k_scale: Any) -> float:
        """Their product; kernels take the maximum before they scale, so that it is positive."""
        logits_scale = scalar(q_scale, "q_scale") * scalar(k_scale, "k_scale")
        scalar(logits_scale * self._plan_options.logits.sm_scale, "q_scale * k_scale * sm_scale", positive=True)
        return logits_scale

    def _check_window(self, window_left: int) -> None:
        """run() may repeat the window of plan()."""
        if window_left != (planned := self._plan_options.logits.window_left):
            raise ValidationError(f"window_left: expected {planned} (fixed by plan()), got {window_left}.")

    def _launch(
        self, tensors: list[Any], num_cache_tensors: int, lse: torch.Tensor | None, options: RunOptions,
        known: Signature | None, nnz_qo: int,
    ) -> None:  # fmt: skip
        """Check the tensors unless they are known, and launch. tensors: q, the cache, out and the others."""
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._on_cuda else 0
        if stream and self._has_fixed_lengths and is_capturing(self._device):
            refuse_capture("run() of a plan without use_cuda_graph=True", self._device)
        pointers = pointers_of(tensors)
        self._lock.acquire()  # half the time of a with statement
        try:  # another thread may have run since
            is_known = known is not None and known is self._signature and not self._unusual(pointers)
            if not is_known and not self._checked_before(tensors, pointers, nnz_qo):
                self._check_all(tensors, pointers, num_cache_tensors, nnz_qo)
            if num_cache_tensors == 1:
                pointers.insert(2, pointers[1] + self._v_offset)  # of the values in it
            if len(pointers) < self._num_operands:  # scales that were not given
                pointers.extend([0] * (self._num_operands - len(pointers)))
            if options.operands or self._plan_options.variant is not None:
                self._write_operands(options.operands)
            extras = NO_EXTRAS if options is PLAIN and lse is None else self._extras(options, lse)
            if self._prologue is not None:
                pointers = self._prologue.launch(pointers)
            self._plan.run(stream, pointers, extras, options.enable_pdl)
            if recorded.call is not None:
                self._report(tensors, num_cache_tensors, lse, extras, options)
        finally:
            self._lock.release()

    def _extras(self, options: RunOptions, lse: torch.Tensor | None) -> Extras:
        """What the plan takes beside the operands."""
        sinks, q_scale, k_scale, v_scale, window_left, _, logits_by, o_by, lse_unit, *_ = options
        if window_left is not None:
            self._check_window(window_left)
        return (
            None if lse is None else lse.data_ptr(), None if sinks is None else self._check_sinks(sinks).data_ptr(),
            None if logits_by is None else logits_by.data_ptr(), None if o_by is None else o_by.data_ptr(),
            1.0 if q_scale is k_scale is None else self._logits_scale(q_scale, k_scale),
            1.0 if v_scale is None else scalar(v_scale, "v_scale"), lse_unit,
        )  # fmt: skip

    def _report(
        self, tensors: list[torch.Tensor], num_cache_tensors: int, lse: torch.Tensor | None,
        extras: Extras, options: RunOptions,
    ) -> None:  # fmt: skip
        """Tell the recording of a call what was launched for it (replay.py)."""
        if self._prologue is not None:
            return
        places: list[tuple[torch.Tensor | None, int]] = [(tensor, 0) for tensor in tensors]
        if num_cache_tensors == 1:
            places.insert(2, (tensors[1], self._v_offset))
        places += [(None, 0)] * (self._num_operands - len(places))
        variant, captured = self._plan_options.variant, []
        if variant is not None:
            captured = addresses_of(self._plan.operands, variant.expression, options.operands)
        recorded.call.add_run(
            self._plan, places, captured=captured, lse=lse, sinks=options.sinks, scales=extras[4:6],
            scales_by=(options.logits_scale_by, options.o_scale_by), lse_unit=options.lse_unit,
            enable_pdl=options.enable_pdl,
        )  # fmt: skip

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

    def _check_all(self, tensors: list[torch.Tensor], pointers: list[int], num_cache_tensors: int, nnz_qo: int) -> None:
        """Check everything about the tensors but their addresses, and write shapes and strides into the plan."""
        q, kv = tensors[0], tuple(tensors[1 : 1 + num_cache_tensors])
        out, *others = tensors[1 + num_cache_tensors :]
        paged, operands, kv_type = self._plan_options.page_size > 0, self.decision.tensors, self._plan_options.types.kv
        if kv_type is NVFP4:
            operands = OPERANDS  # also where the kernel is given widened ones
        check_others(kv_type, operands, len(others))
        k, v = self._paged_views(kv) if paged else self._ragged_views(kv)
        views, expected = {operands[1].name: view_of(k), operands[2].name: view_of(v)}, self._expected()
        names = {"o": "out", "k_sf": "kv_cache_sf (keys)", "v_sf": "kv_cache_sf (values)"}
        names |= {"k": "paged_kv_cache (keys)", "v": "paged_kv_cache (values)"} if paged else {}
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
        if kv_type is NVFP4:
            check_scales_fit(views, operands)
        if self._prologue is not None:
            views |= self._prologue.bind(q, k, v, out, views)
        self._plan.set_signature(views)
        self._v_offset = v.data_ptr() - k.data_ptr()
        if 0 in pointers or any(tensor.requires_grad for tensor in tensors):  # right this time: to be checked again
            self._signature = None
            return
        self._signature = Signature(tensors)
        if self.graph is None and self._prologue is None:
            least = min(t.shape[0] * self._plan_options.cache_page if paged else t.shape[1] for t in (k, v))
            self._checked = CheckedTensors(self._signature, nnz_qo, least, self._v_offset, self._plan.signature())
            self.decision.checked[self._layout] = self._checked

    def _paged_views(self, cache: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = cache_view(cache, self._layout, self._plan_options.page_size)
        num_pages = min(k.shape[0], v.shape[0]) * self._plan_options.cache_page
        largest = self._plan.largest_page if self._prologue is None else self._prologue.largest_page
        if largest >= num_pages:
            indices = self.spec.indices
            got = indices.page_beyond(num_pages) if isinstance(indices, Indices) else largest
            raise ValidationError(f"paged_kv_indices: expected page numbers below num_pages={num_pages}, got {got}.")
        return k, v

    def _ragged_views(self, kv: tuple[torch.Tensor, ...], least_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        views = ragged_view(kv[0], "k", self._layout), ragged_view(kv[1], "v", self._layout)
        least_tokens = max(least_tokens, self._plan.nnz_kv if self._prologue is None else self._prologue.end)
        for view, name in zip(views, "kv", strict=True):
            if view.shape[1] < least_tokens:
                raise ValidationError(
                    f"{name}: expected at least {least_tokens} tokens (kv_indptr[-1]; in a capture that of the first "
                    f"plan), got {view.shape[1]}."
                )
        return views

    def _lse(self, lse: torch.Tensor | None, nnz_qo: int) -> torch.Tensor:
        shape = {"nnz_qo": nnz_qo, "num_qo_heads": self._plan_options.num_qo_heads}
        if self._plan_options.max_logits:
            shape["lse and maximum"] = 2
        if lse is None:
            return self._new((*shape.values(),), torch.float32)
        check_floats(check_output(lse, "lse"), "lse", self._device)
        check_shape(lse, "lse", shape)
        return lse

    def _check_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        check_floats(check_tensor(sinks, "sinks"), "sinks", self._device)
        check_shape(sinks.view(-1), "sinks", {"num_qo_heads": self._plan_options.num_qo_heads})
        return sinks


def converted(run: Callable[..., Any], lse: torch.Tensor | None, return_lse: bool, base: Any, layout: Any) -> Any:
    """run(lse=, return_lse=), which returns or writes an lse [rows, heads] in base 2, with the lse converted.

    base: "log2" or "ln". layout: "NH", or "HN" for a contiguous lse [heads, rows].
    """
    for name, value, words in (("lse_base", base, ("log2", "ln")), ("lse_layout", layout, ("NH", "HN"))):
        if value not in words:
            raise ValidationError(f"{name}: expected {words[0]!r} or {words[1]!r}, got {value!r}.")
    if lse is None and not return_lse:
        return run(lse=None, return_lse=False)
    o, found = run(lse=lse if layout == "NH" else None, return_lse=True)
    if base == "ln":
        to_base_e(found)
    if layout == "HN":
        found = found.t()
        if lse is not None:
            check_shape(check_output(lse, "lse"), "lse", {"num_qo_heads": found.shape[0], "nnz_qo": found.shape[1]})
        found = found.contiguous() if lse is None else lse.copy_(found)
    return (o, found) if return_lse else o
