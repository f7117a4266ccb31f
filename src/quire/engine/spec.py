"""What plan() was asked for: the batch and the options of an attention, checked, without tensors of run().

And what of it later plans of a CUDA graph may change. A captured call reads everything from fixed addresses, so plan()
can change lengths between replays.

A graph keeps the launch that it captured: the grid, and the parameter struct by value. The schedule therefore always
has one partition for each resident CTA, and everything that depends on lengths is in one buffer, which each plan()
refills. The first successful plan() fixes everything else; a later plan() with other options is an error.

Engines call plan() with defaults, and pass the scale, the soft cap, the window and `causal` to forward(). Scale and cap
are parameters of each launch. The others decide about the kernel and the schedule: the first forward() fixes them, and
later calls of plan() with the same arguments as the first use them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from quire.engine.checks import (
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    host_indices,
    last_entry,
    to_int32,
)
from quire.engine.device import is_capturing, target_of
from quire.engine.operands import NO_OPERANDS, describe, refuse_beside
from quire.engine.options import LogitsOptions, PlanOptions
from quire.engine.schedule import Indices, Lengths
from quire.errors import PlanError, UnsupportedError, ValidationError
from quire.jit import config, is_obtainable, is_recording, record_use, without_matrix_unit
from quire.kernels import (
    READS_8_BITS,
    AttentionProblem,
    Decision,
    TileShape,
    decide,
    same_rows,
    variants_for_all_lengths,
)
from quire.kernels.features import MaskMode, PosEncodingMode, planned_features


def host_lens(seq_lens: Any, batch_size: int) -> torch.Tensor | None:
    """seq_lens [batch_size] for the scheduler, which compares them; None if they are on a device, because plan() does
    not wait for it.
    """
    seq_lens = _flat(seq_lens, "seq_lens", batch_size)
    if not seq_lens.is_cpu:
        return None
    lens = seq_lens.view(torch.int32) if seq_lens.dtype is torch.uint32 else seq_lens
    return host_indices(lens, "seq_lens", batch_size)


def _flat(lens: Any, name: str, batch_size: int) -> torch.Tensor:
    """Lengths as [batch_size]; cuDNN's [batch_size, 1, 1, 1] are accepted, too."""
    tensor = check_tensor(lens, name)
    if tuple(tensor.shape) == (batch_size, 1, 1, 1):
        return tensor.reshape(batch_size)
    check_shape(tensor, name, {"batch_size": batch_size})
    return tensor


def check_repeated(
    indices: Indices, seq_lens_q: Any = None, block_tables: Any = None, max_token_per_sequence: Any = None,
    max_sequence_kv: Any = None,
) -> None:  # fmt: skip
    """Compare the given arrays with `indices`, if both are on the host."""
    qo_lens = indices.qo_lens()
    if seq_lens_q is not None:
        seq_lens_q = _flat(seq_lens_q, "seq_lens_q", indices.batch_size)
        if seq_lens_q.is_cpu and not torch.equal(to_int32(seq_lens_q, "seq_lens_q"), qo_lens):
            got = seq_lens_q.tolist()
            raise ValidationError(f"seq_lens_q: expected {qo_lens.tolist()}, as qo_indptr says, got {got}.")
    _check_most("max_token_per_sequence", max_token_per_sequence, qo_lens)
    _check_most("max_sequence_kv", max_sequence_kv, indices.kv_lens())
    if block_tables is not None:
        _check_tables(indices, block_tables)


def _check_most(name: str, given: Any, lens: torch.Tensor) -> None:
    """Check that `given` is not less than any of `lens`."""
    least = int(lens.max()) if lens.numel() else 0
    if given is not None and check_positive(given, name) < least:
        raise ValidationError(f"{name}: expected at least {least}, which a request has, got {given}.")


def _check_tables(indices: Indices, block_tables: Any) -> None:
    tables = to_int32(check_tensor(block_tables, "block_tables"), "block_tables")
    check_shape(tables, "block_tables", {"batch_size": indices.batch_size, "pages": None})
    pages = indices.kv_indices
    if pages is None or not (pages.is_cpu and tables.is_cpu):
        return
    for request, (begin, end) in enumerate(pairwise(indices.kv_indptr.tolist())):
        if not torch.equal(tables[request, : end - begin], pages[begin:end]):
            got = tables[request].tolist()
            raise ValidationError(
                f"block_tables: expected request {request} to begin with {pages[begin:end].tolist()}, as the page "
                f"numbers say, got {got}."
            )


class AttentionSpec(NamedTuple):
    """The arguments of plan(), normalised. `forward()` plans again with some of the options replaced."""

    indices: Indices | Lengths
    options: PlanOptions
    custom_mask: torch.Tensor | None = None
    packed_custom_mask: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None  #: uint8, of the bits [batch_size, qo_len, round_up(qo_len, 32)]
    operands: Mapping[str, Any] = NO_OPERANDS  #: what the mask of a variant reads
    has_equal_lengths: bool = False  #: all requests have as many queries, though qo_indptr says where they are

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

    @property
    def typical_rows(self) -> int:
        """Packed rows of a typical request: its rows of q times grouped heads."""
        return self._typical_rows() * self.options.num_qo_heads // self.options.num_kv_heads

    def decide(self, device: torch.device, backend: str) -> Decision:
        """The kernel that takes this on `device`, among those that `backend` allows."""
        options = self.options
        if options.variant is not None:
            cap, encoding = options.logits.logits_soft_cap, options.logits.pos_encoding
            has_bits = self.mask in (MaskMode.CUSTOM, MaskMode.TREE)
            refuse_beside(options.variant, soft_cap=cap, has_alibi=encoding is PosEncodingMode.ALIBI, has_bits=has_bits)
        are_equal = self.has_equal_lengths or self.indices.qo_indptr is None
        uniform = options.decodes or (are_equal and not options.deterministic)
        return _decide(str(backend), device, options, self.mask, same_rows(self.typical_rows), uniform)

    def settled(self) -> AttentionSpec:
        """The same, with what the environment says of determinism."""
        options = self.options.settled()
        return self if options is self.options else self._replace(options=options)

    def with_8_bit_queries(self, backend: str) -> AttentionSpec:
        """The same with queries that are not upcast, if `backend` names the kernel that reads them as they are."""
        if str(backend) != READS_8_BITS or self.options.types.given is None:
            return self
        return self._replace(options=self.options._replace(types=self.options.types.without_upcast))


@lru_cache(maxsize=4096)
def _decide(
    backend: str, device: torch.device, options: PlanOptions, mask: MaskMode, rows: int, uniform: bool
) -> Decision:
    problem = AttentionProblem(
        target=target_of(device, matrix_unit=True), mask=mask, **planned_features(options), rows=rows,
        uniform=uniform, group_size=options.group_size, fixed_split_size=options.fixed_split_size,
        is_mla=options.is_mla,
    )  # fmt: skip
    decision = decide(problem, backend)
    portable = without_matrix_unit(problem.target)
    if decision.key.target != portable and config.cpu_target() is None and not is_obtainable(decision.spec):
        decision = decide(replace(problem, target=portable), backend)  # which prebuilt stores have
    if is_recording():  # with what other lengths take, so that a process that is sealed later has it
        for spec in variants_for_all_lengths(problem, backend):
            record_use(spec)
    return decision


# --- CUDA graphs -----------------------------------------------------------------------------------------------------

_OPTIONAL = ("mask_indptr_buf", "qk_indptr_buf")  #: with custom_mask_buf; both names mean the same


class GraphState:
    """The state shared by a wrapper's plans: the caller's buffers, and the limits that the first successful plan() set.

    `batch_size`: number of requests. `kv_indices`: buffer for page numbers (None: ragged). `mask`: buffer for the bits
    of custom masks. Until a plan() has succeeded (`keep`), each plan() sets the limits again.
    """

    def __init__(self, batch_size: int, kv_indices: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        self.batch_size = batch_size
        self.kv_indices = kv_indices
        self.mask = mask
        self.decision: Decision | None = None
        self.max_rows = 0  #: rows of q of the first plan
        self.max_tokens = 0  #: tokens of keys of the first plan, or of as many pages as kv_indices takes
        self.requested: PlanOptions | None = None  #: by the first plan()
        self.launched: PlanOptions | None = None  #: the same, or what forward() asked for
        self.has_run = False  #: a capture may hold the launch
        self.is_forwarded = False  #: forward() gives the scale and the cap of each launch
        self.awaits_forward = False  #: the last plan() asked for other options than the launch has
        self._fixed: dict[str, Any] = {}
        self._buffer: torch.Tensor | None = None
        self._partials: torch.Tensor | None = None
        self._params = b""

    @property
    def is_planned(self) -> bool:
        """Whether a plan() has succeeded."""
        return bool(self._params)

    def options(self, requested: PlanOptions) -> PlanOptions:
        """The options of a plan() with these arguments: PlanError if the launch has others."""
        if not self.is_planned:
            self.requested = self.launched = requested
        assert self.requested is not None and self.launched is not None
        self.awaits_forward = self._difference(self.launched, requested) is not None
        if self.awaits_forward and (
            self.launched is self.requested or self._difference(self.requested, requested) is not None
        ):
            self.refuse(self.requested, requested)
        return self.launched

    def refuse(self, launched: PlanOptions, options: PlanOptions) -> None:
        """PlanError that names the first of `options` that differs from the launch."""
        name = self._difference(launched, options)
        assert name is not None
        _refuse(name, getattr(launched, name), getattr(options, name))

    def _difference(self, one: PlanOptions, other: PlanOptions) -> str | None:
        """The name of an option in which both differ, except for parameters of each launch."""
        for name, left, right in zip(one._fields, one, other, strict=True):
            if left != right and not (name == "logits" and self._is_same_launch(one.logits, other.logits)):
                return name
        return None

    def _is_same_launch(self, one: LogitsOptions, other: LogitsOptions) -> bool:
        if not one.has_same_kernel(other):
            return False
        numbers = (one.sm_scale, other.sm_scale), (one.logits_soft_cap, other.logits_soft_cap)
        return self.is_forwarded or all(math.isclose(*pair, rel_tol=1e-6) for pair in numbers)  # as float32

    def for_forward(self, options: PlanOptions) -> GraphState:
        """The state for a new launch, if the first forward() has other options than plan() had."""
        assert self.launched is not None
        if self.has_run:
            self.refuse(self.launched, options)
        if self.kv_indices is not None and is_capturing(self.kv_indices.device):
            raise PlanError(
                "forward(): in a capture its options must be those of plan(), or of a forward() before the capture, "
                "which fixes them: call forward() once before it."
            )
        return self.unplanned()

    def unplanned(self) -> GraphState:
        """A state for another launch of the same buffers."""
        state = GraphState(self.batch_size, self.kv_indices, self.mask)
        state.is_forwarded = self.is_forwarded
        return state

    def record_forward(self, requested: PlanOptions | None) -> None:
        """Record that a forward() has its launch, after a plan() with the arguments `told`."""
        self.requested, self.is_forwarded, self.awaits_forward = requested, True, False

    def fix(self, **values: Any) -> None:
        """Check that these values equal those of the first plan(); PlanError otherwise."""
        if not self.is_planned:
            self._fixed = values
        for name, value in values.items():
            if value != self._fixed[name]:
                _refuse(name, self._fixed[name], value)

    @property
    def partials(self) -> torch.Tensor | None:
        """The memory of partial results of all plans."""
        return self._partials

    def tile_capacity(
        self, batch_size: int, qo_len: int, group_size: int, tile_rows: int, split: int, most: int | None = None
    ) -> int:
        """Row tiles of the largest batch within the limits; `split`: tokens of a fixed split at least, or 0; `most`:
        splits of a request.
        """
        if qo_len == 0:
            whole = self.max_rows * group_size // tile_rows + batch_size
            parts = self.max_tokens // split + 1 if split else 1
            return whole * min(parts, most or parts) + batch_size * (split > 0)
        parts = self.max_tokens // split + batch_size if split else batch_size
        return -(-qo_len * group_size // tile_rows) * min(parts, batch_size * (most or parts))

    def unit_capacity(self, tile: TileShape, group_size: int, tile_capacity: int) -> int:
        """Work units of a kv head that masks within the limits make at most: the sum of ceil(rows / tile.rows) *
        ceil(kv_len / tile.kv) over the requests, where custom_mask_buf limits the sum of qo_len * kv_len. Without that
        buffer, for the mask of a variant, each row tile may see all keys.
        """
        if self.mask is None:
            return tile_capacity * (-(-self.max_tokens // tile.kv) + 1)
        bits = 8 * self.mask.numel()
        return -(-bits * (group_size + tile.rows) // (tile.rows * tile.kv)) + tile_capacity

    def upload(self, filled: torch.Tensor, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The buffer of the schedule, of `num_bytes` bytes, which begins with `filled` after the copy."""
        if self._buffer is None or not self.is_planned:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._buffer[: filled.numel()].copy_(filled, non_blocking=True)
        return self._buffer

    def keep(self, decision: Decision, partials: torch.Tensor, params: ctypes.Structure) -> None:
        """Finish a plan(). `params`, which a graph keeps by value, must equal that of the first plan()."""
        if not self.is_planned:
            self.decision, self._partials, self._params = decision, partials, bytes(params)
        elif bytes(params) != self._params:
            raise PlanError("plan(): a parameter that a captured graph holds by value has changed; please report this.")

    def pages(self, source: torch.Tensor, count: int) -> torch.Tensor:
        """The caller's buffer, holding the `count` page numbers of `source`."""
        assert self.kv_indices is not None
        return _copied("paged_kv_indices", self.kv_indices, source[:count])

    def bits(self, source: torch.Tensor) -> torch.Tensor:
        """The caller's buffer, holding the bits of the batch's masks."""
        if self.mask is None:
            raise PlanError("custom_mask: expected custom_mask_buf in the constructor for CUDA graphs, got none.")
        return _copied("custom_mask", self.mask, source)


def _refuse(name: str, expected: Any, got: Any) -> None:
    if isinstance(expected, LogitsOptions) and isinstance(got, LogitsOptions):
        differ = [name for name in got._fields if getattr(expected, name) != getattr(got, name)]
        expected, got = ({name: getattr(logits, name) for name in differ} for logits in (expected, got))
    raise PlanError(
        f"{name}: expected {expected}, which the first plan() or forward() of a wrapper for CUDA graphs fixes, "
        f"got {got}; use another wrapper for it."
    )


def _copied(name: str, buffer: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if source.numel() > buffer.numel():
        raise ValidationError(f"{name}: expected at most {buffer.numel()} entries, got {source.numel()}.")
    if source.data_ptr() != buffer.data_ptr() or source.device != buffer.device:
        buffer[: source.numel()].copy_(source, non_blocking=True)
    return buffer


def graph_state(use_cuda_graph: bool, device: torch.device, **buffers: torch.Tensor | None) -> GraphState | None:
    """The state of a wrapper with `use_cuda_graph`, from the buffers of its constructor by name. Without it None: a
    plan then owns its arrays, and needs no buffers.

    The lengths of the index arrays' buffers fix the batch size; the arrays themselves are copied into a buffer of
    GraphState. Page numbers and masks are copied into the caller's buffers.
    """
    if not use_cuda_graph:
        return None
    sizes, pages, mask = {}, None, None
    for name, buffer in buffers.items():
        is_mask = name == "custom_mask_buf"
        if buffer is None and (is_mask or name in _OPTIONAL):
            continue
        tensor = check_tensor(buffer, name)
        check_same_device(tensor, name, device)
        dtype = torch.uint8 if is_mask else torch.int32
        if tensor.dtype is not dtype or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValidationError(
                f"{name}: expected a contiguous 1-D {dtype} tensor, got {tensor.dtype} {list(tensor.shape)}."
            )
        if is_mask:
            mask = tensor
        elif "indices" in name:
            pages = tensor
        else:
            sizes[name] = tensor.shape[0] - ("indptr" in name)
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
        raise ValidationError(f"use_cuda_graph: expected buffers of one batch size of at least 1, got {sizes}.")
    return GraphState(next(iter(sizes.values())), pages, mask)


def within_limits(graph: GraphState, spec: AttentionSpec, backend: str) -> AttentionSpec:
    """Check that `spec` equals the first plan() except for lengths, and that these are within its limits. Returns it
    with the options of the launch, which the first forward() may have changed.
    """
    indices, nnz = spec.indices, spec.nnz_qo
    if backend == READS_8_BITS:
        raise UnsupportedError(f'backend={backend!r} is not for CUDA graphs; "auto" converts 8-bit queries in them.')
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
