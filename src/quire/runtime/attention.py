"""What every attention wrapper does: plan on arguments, run on tensors. The public classes only translate spellings."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire.errors import PlanError, ValidationError
from quire.kernels import AttentionProblem, Decision, decide, same_rows
from quire.runtime.bits import pack_mask
from quire.runtime.checks import (
    check_contiguous_last,
    check_dtype,
    check_no_grad,
    check_output,
    check_same_device,
    check_shape,
    check_tensor,
    host_indices,
    last_entry,
    scalar,
    to_int32,
)
from quire.runtime.graph import GraphState, is_capturing, refuse_capture
from quire.runtime.layout import KVView, PagedCache, cache_tensors, cache_view, ragged_view, span_bytes
from quire.runtime.options import PlanOptions
from quire.runtime.plan import AttentionPlan
from quire.runtime.planner import make_plan, make_plan_on_device, workspace_bytes
from quire.runtime.schedule import Indices, Lengths
from quire.runtime.target import on_cuda, target_of
from quire.runtime.tensor_maps import Described
from quire.runtime.workspace import Workspace
from quire.types import DType, KVLayout, MaskMode

__all__ = [
    "Attention",
    "AttentionSpec",
    "Result",
    "last_page_lens",
    "page_indices",
    "planned",
    "workspace_bytes_of",
]

Result = torch.Tensor | Any  #: o, or (o, lse) with return_lse=True
Signature = list[tuple[Any, ...]]


def _signature(tensors: tuple[Any, ...]) -> tuple[Signature | None, list[int]]:
    """What decides whether tensors are right, all but where they lie; and where. None if one has no memory."""
    signature, pointers = [], []
    try:
        for t in tensors:
            pointer = t.data_ptr()
            signature.append((t.shape, t.is_contiguous() or t.stride(), t.dtype, t.device, pointer % 16))
            pointers.append(pointer)
    except (AttributeError, RuntimeError):
        return None, pointers
    return None if 0 in pointers else signature, pointers


class _Checked(NamedTuple):
    """Tensors that were found right, for the next plan of the same kernel and options."""

    signature: Signature
    out_shape: tuple[int, int, int]
    host_buffer: int  #: pages of the cache, or tokens of ragged keys
    v_offset: int  #: bytes from keys to values in a cache of one tensor
    planned: tuple[bytes, Described | None]  #: what the plan keeps of them


class AttentionSpec(NamedTuple):
    """What plan() was told, in one spelling; `forward()` plans again with some of it replaced."""

    indices: Indices | Lengths
    options: PlanOptions
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None  #: uint8, of the bits [batch_size, qo_len, round_up(qo_len, 32)]

    @property
    def mask(self) -> MaskMode:
        if self.tree_mask is not None:
            return MaskMode.TREE
        if self.custom_mask is not None or self.packed_custom_mask is not None:
            return MaskMode.CUSTOM
        return MaskMode.CAUSAL if self.options.causal else MaskMode.NONE

    @property
    def nnz_qo(self) -> int:
        """Rows of q."""
        qo_indptr = None if isinstance(self.indices, Lengths) else self.indices.qo_indptr
        return self.indices.qo_len * self.indices.batch_size if qo_indptr is None else last_entry(qo_indptr)

    def decide(self, device: torch.device, backend: str) -> Decision:
        """The kernel that takes this on `device`, among those that `backend` allows."""
        batch_size, options = self.indices.batch_size, self.options
        rows = -(-self.nnz_qo // batch_size) * options.group_size if batch_size else 0  # of a typical request: the mean
        uniform = isinstance(self.indices, Lengths) or self.indices.qo_indptr is None
        return _decide(backend, device, options, self.mask, same_rows(rows), uniform)


@lru_cache(maxsize=4096)
def _decide(backend: str, device: torch.device, t: PlanOptions, mask: MaskMode, rows: int, uniform: bool) -> Decision:
    problem = AttentionProblem(
        target_of(device), *t.types, t.head_dim_qk, t.head_dim_vo, t.page_size, mask, t.logits.window_left >= 0,
        t.logits.logits_soft_cap > 0, rows, uniform, t.fixed_split_size,
    )  # fmt: skip
    return decide(problem, backend)


def page_indices(indices: Any) -> torch.Tensor:
    """Page numbers as a 1-D int32 tensor: copied from the host in plan(), used as they are (and become) on a device."""
    if isinstance(indices, torch.Tensor) and indices.is_cpu:
        return host_indices(indices, "paged_kv_indices")
    tensor = check_tensor(indices, "paged_kv_indices")
    if tensor.dim() != 1:
        raise ValidationError(f"paged_kv_indices: expected a 1-D tensor, got {list(tensor.shape)}.")
    return to_int32(tensor, "paged_kv_indices").contiguous()


def last_page_lens(value: Any, name: str, kv_indptr: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request's last page, on the host.

    With pages of one token they say nothing new, so a device's are not waited for: SGLang plans so between replays.
    """
    if page_size == 1 and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        check_shape(value, name, {"batch_size": kv_indptr.shape[0] - 1})
        return kv_indptr.diff().clamp_(0, 1)
    return host_indices(value, name, kv_indptr.shape[0] - 1)


class Attention:
    """A plan and the tensors' contract that goes with it."""

    def __init__(
        self, spec: AttentionSpec, layout: KVLayout, workspace: Workspace, backend: str,
        graph: GraphState | None = None, before: Attention | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self._plan_options = spec.options
        self._layout = layout
        self._device = workspace.device
        self._on_cuda, self._index = on_cuda(self._device), self._device.index or 0
        self._graph = graph
        self._is_fixed = graph is None and not isinstance(spec.indices, Lengths)  # to the lengths of this plan
        if not isinstance(spec.indices, Lengths):
            refuse_capture("plan()", self._device)
        if graph is not None:
            _fix(graph, spec)
        self.decision: Decision = (graph and graph.decision) or spec.decide(self._device, backend)
        self._plan = self._make_plan(workspace)
        if graph is not None:
            graph.decision = self.decision
        schedule = self._plan.schedule
        self._nnz_qo: int = spec.nnz_qo if schedule is None else schedule.params.nnz_qo
        self._out_shape = (self._nnz_qo, spec.options.num_qo_heads, spec.options.head_dim_vo)
        self._signature: Signature | None = None  # of the tensors of the last run, which were found right
        self._v_offset = 0
        self._checked: _Checked | None = None  # by this plan or by one before it
        if before is not None and graph is None and self._is_like(before):
            self._checked = before._checked

    def _is_like(self, other: Attention) -> bool:
        """Whether the same tensors are right for both, but for what their batches say."""
        same = other.decision is self.decision and other._plan_options == self._plan_options
        return same and other._device == self._device and other._layout is self._layout

    def _make_plan(self, workspace: Workspace) -> AttentionPlan:
        s = self.spec
        if isinstance(s.indices, Lengths):
            return make_plan_on_device(self.decision, s.indices, s.options, workspace, s.tree_mask)
        bits = s.packed_custom_mask if s.tree_mask is None else s.tree_mask
        if bits is None and s.custom_mask is not None:
            bits = pack_mask(s.custom_mask, s.indices, self._device)
        return make_plan(self.decision, s.indices, s.options, workspace, bits, self._graph)

    def with_changes(self, workspace: Workspace, backend: str, **changes: Any) -> Attention:
        """This plan with other options; itself if they are the same."""
        spec, options = self.spec, self._plan_options._replace(**changes)
        if options == self._plan_options:
            return self
        if isinstance(spec.indices, Indices):  # the caller may have written others since
            spec = spec._replace(indices=self._plan.indices(spec.indices))
        return Attention(spec._replace(options=options), self._layout, workspace, backend, self._graph)

    def run(
        self, q: torch.Tensor, kv: PagedCache, *, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool,
        sinks: torch.Tensor | None, q_scale: Any, k_scale: Any, v_scale: Any, window_left: int | None,
        enable_pdl: bool | None, logits_scale_by: torch.Tensor | None = None, o_scale_by: torch.Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Check what differs from the last run, then launch: tensors of the same signature cost only their pointers.

        kv: a paged cache, or ragged (k, v). `*_by`: one float32 each on a GPU that the logits and the output are
        multiplied by besides; paged keys only.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._on_cuda else 0
        if self._graph is not None:
            self._check_rows(self._graph, q)
        elif stream and self._is_fixed and is_capturing(self._device):
            refuse_capture("run() of a plan without use_cuda_graph=True", self._device)
        if out is None:
            out = torch.empty(self._out_shape, dtype=self._plan_options.types.o.torch, device=self._device)
        tensors = cache_tensors(kv)
        signature, pointers = _signature((q, out, *tensors))
        if signature is None or signature != self._signature:
            if not self._knows(signature):
                self._check_signature(signature, q, out, tensors)
            self._signature = signature
        check_no_grad((q, out, *tensors))
        if window_left is not None and window_left != self._plan_options.logits.window_left:
            raise ValidationError(
                f"window_left: expected {self._plan_options.logits.window_left} (fixed by plan()), got {window_left}."
            )
        if lse is not None or return_lse:
            lse = self._lse(lse)
        logits_scale = 1.0
        if q_scale is not None or k_scale is not None:
            logits_scale = scalar(q_scale, "q_scale") * scalar(k_scale, "k_scale")
            product = logits_scale * self._plan_options.logits.sm_scale
            scalar(product, "q_scale * k_scale * sm_scale", positive=True)  # kernels take the maximum before they scale
        if len(tensors) == 1:
            pointers.append(pointers[-1] + self._v_offset)
        q_at, o_at, k_at, v_at = pointers
        self._plan.run(
            stream, q_at, k_at, v_at, o_at,
            None if lse is None else lse.data_ptr(), None if sinks is None else self._check_sinks(sinks).data_ptr(),
            logits_scale, 1.0 if v_scale is None else scalar(v_scale, "v_scale"),
            None if logits_scale_by is None else logits_scale_by.data_ptr(),
            None if o_scale_by is None else o_scale_by.data_ptr(), enable_pdl,
        )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out

    def _check_rows(self, graph: GraphState, q: torch.Tensor) -> None:
        """For CUDA graphs q may have more rows than this batch; in a capture, as many as any batch may have."""
        rows = check_tensor(q, "q").shape[0] if q.dim() == 3 else 0
        self._out_shape = (max(rows, self._nnz_qo), *self._out_shape[1:])
        if rows < graph.max_rows and is_capturing(self._device):
            raise ValidationError(
                f"q: expected {graph.max_rows} rows in a capture, as the first plan() had, got {rows}."
            )

    def _knows(self, signature: Signature | None) -> bool:
        """Whether the plan before had such tensors, and they do for this batch; if so, they are as if checked."""
        known = self._checked
        if known is None or signature != known.signature or known.out_shape != self._out_shape:
            return False
        if known.host_buffer < (self._plan.largest_page + 1 if self._plan_options.page_size else self._plan.nnz_kv):
            return False
        self._plan.take_signature(*known.planned)
        self._v_offset = known.v_offset
        return True

    def _check_signature(
        self, signature: Signature | None, q: torch.Tensor, out: torch.Tensor, kv: tuple[torch.Tensor, ...]
    ) -> None:
        """Everything about the tensors but where they lie; what the kernel needs of it goes into the plan."""
        k, v = self._paged_views(kv) if self._plan_options.page_size else self._ragged_views(*kv)
        self._check_q(q)
        self._check_out(out)
        self._plan.set_signature(q, k, v, out)
        self._v_offset = v.pointer - k.pointer
        if signature is not None and self._graph is None:
            sizes = (k.num_pages, v.num_pages) if self._plan_options.page_size else (k.num_tokens, v.num_tokens)
            self._checked = _Checked(signature, self._out_shape, min(sizes), self._v_offset, self._plan.signature())

    def _paged_views(self, cache: tuple[torch.Tensor, ...]) -> tuple[KVView, KVView]:
        page_size = self._plan_options.page_size
        k, v = cache_view(cache, self._layout, page_size)
        self._check_kv(k, "paged_kv_cache (keys)", self._plan_options.head_dim_qk)
        self._check_kv(v, "paged_kv_cache (values)", self._plan_options.head_dim_vo)
        num_pages = min(k.num_pages, v.num_pages)
        for view in (k, v):
            if view.num_tokens != page_size:
                raise ValidationError(f"paged_kv_cache: expected page_size={page_size}, got {view.num_tokens}.")
        if self._plan.largest_page >= num_pages:
            raise ValidationError(
                f"paged_kv_indices: expected page numbers below num_pages={num_pages}, got {self._plan.largest_page}."
            )
        return k, v

    def _ragged_views(self, k: torch.Tensor, v: torch.Tensor) -> tuple[KVView, KVView]:
        k_view, v_view = ragged_view(k, "k", self._layout), ragged_view(v, "v", self._layout)
        for view, name, head_dim in (
            (k_view, "k", self._plan_options.head_dim_qk),
            (v_view, "v", self._plan_options.head_dim_vo),
        ):
            self._check_kv(view, name, head_dim)
            tokens = self._plan.nnz_kv
            if self._graph is not None and is_capturing(self._device):
                tokens = self._graph.max_tokens
            if view.num_tokens < tokens:
                raise ValidationError(
                    f"{name}: expected at least {tokens} tokens (kv_indptr[-1]; in a capture that of the first plan), "
                    f"got {view.num_tokens}."
                )
        return k_view, v_view

    def _check_q(self, q: torch.Tensor) -> None:
        s = self._plan_options
        check_tensor(q, "q")
        shape = {"nnz_qo": self._out_shape[0], "num_qo_heads": s.num_qo_heads, "head_dim_qk": s.head_dim_qk}
        check_shape(q, "q", shape)
        check_dtype(q, "q", s.types.q)
        check_same_device(q, "q", self._device)
        check_contiguous_last(q, "q")
        self._check_alignment(q.data_ptr(), q.stride()[:2], "q", s.types.q)

    def _check_out(self, out: torch.Tensor) -> None:
        s = self._plan_options
        check_output(out, "out")
        shape = dict(zip(("nnz_qo", "num_qo_heads", "head_dim_vo"), self._out_shape, strict=True))
        check_shape(out, "out", shape)
        check_dtype(out, "out", s.types.o)
        check_same_device(out, "out", self._device)
        check_contiguous_last(out, "out")
        self._check_alignment(out.data_ptr(), out.stride()[:2], "out", s.types.o)
        self._check_reach(span_bytes(out.shape, out.stride(), out.dtype), "out", "out")

    def _check_kv(self, view: KVView, name: str, head_dim: int) -> None:
        s = self._plan_options
        if view.num_heads != s.num_kv_heads or view.head_dim != head_dim:
            raise ValidationError(
                f"{name}: expected num_kv_heads={s.num_kv_heads} and head_dim={head_dim}, "
                f"got {view.num_heads} and {view.head_dim} (kv_layout={self._layout.value})."
            )
        check_dtype(view.tensor, name, s.types.kv)
        check_same_device(view.tensor, name, self._device)
        self._check_alignment(view.pointer, (view.page_stride, view.token_stride, view.head_stride), name, s.types.kv)
        self._check_reach(view.num_bytes, name, "kv")

    def _check_alignment(self, pointer: int, strides: tuple[int, ...], name: str, dtype: DType) -> None:
        """GPU kernels load 16 bytes at a time."""
        if not self._on_cuda:
            return
        step = 16 // dtype.bytes
        if pointer % 16 or any(stride % step for stride in strides):
            raise ValidationError(
                f"{name}: expected a 16-byte aligned tensor whose strides are multiples of {step} elements, "
                f"got address {pointer:#x} and strides {list(strides)}; call .contiguous() on it."
            )

    def _check_reach(self, num_bytes: int, name: str, tensor: str) -> None:
        """Some kernels find rows by numbers that end somewhere."""
        kernel = self.decision.kernel
        most = kernel.max_bytes(self.decision.key, tensor)
        if most and num_bytes > most:
            raise ValidationError(
                f"{name}: expected at most {most} bytes from its first element to its last, which {kernel.name} "
                f"reaches, got {num_bytes}; plan with another backend."
            )

    def _lse(self, lse: torch.Tensor | None) -> torch.Tensor:
        shape = self._out_shape[:2]
        if lse is None:
            return torch.empty(shape, dtype=torch.float32, device=self._device)
        check_output(lse, "lse")
        check_shape(lse, "lse", dict(zip(("nnz_qo", "num_qo_heads"), shape, strict=True)))
        check_same_device(lse, "lse", self._device)
        if lse.dtype is not torch.float32 or not lse.is_contiguous():
            raise ValidationError(
                f"lse: expected a contiguous float32 tensor, got {lse.dtype}, strides {tuple(lse.stride())}."
            )
        return lse

    def _check_sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        check_tensor(sinks, "sinks")
        check_same_device(sinks, "sinks", self._device)
        if (
            sinks.numel() != self._plan_options.num_qo_heads
            or sinks.dtype is not torch.float32
            or not sinks.is_contiguous()
        ):
            raise ValidationError(
                f"sinks: expected a contiguous float32 tensor of "
                f"num_qo_heads={self._plan_options.num_qo_heads} elements, "
                f"got {sinks.dtype} {list(sinks.shape)}."
            )
        return sinks


def workspace_bytes_of(spec: AttentionSpec, device: torch.device, backend: str, graph: GraphState | None) -> int:
    """Bytes of the workspace that a plan of `spec` takes; plans nothing."""
    assert isinstance(spec.indices, Indices)
    decision = None
    if graph is not None:
        graph, decision = copy(graph), graph.decision
        _fix(graph, spec)
    return workspace_bytes(decision or spec.decide(device, backend), spec.indices, spec.options, device, graph)


def _fix(graph: GraphState, spec: AttentionSpec) -> None:
    """All of a spec but the lengths is as the first plan() had it, and the lengths are within its limits."""
    indices, nnz = spec.indices, spec.nnz_qo
    assert isinstance(indices, Indices)
    if indices.batch_size != graph.batch_size:
        raise ValidationError(
            f"plan(): expected batch_size={graph.batch_size}, which the buffers of the constructor fix, "
            f"got {indices.batch_size}."
        )
    graph.fix(**spec.options._asdict(), mask=spec.mask.name, q_len=indices.qo_len)
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


def planned(attention: Attention | None) -> Attention:
    """The plan of a wrapper, which must exist."""
    if attention is None:
        raise PlanError("run() was called before plan(): call plan() first, once per batch.")
    return attention
