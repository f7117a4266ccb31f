"""What plan() was asked for: the batch and the options of an attention, checked, without tensors of run()."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from quire.engine.checks import check_positive, check_shape, check_tensor, host_indices, last_entry, to_int32
from quire.engine.device import target_of
from quire.engine.graph import GraphState, is_capturing
from quire.engine.operands import describe, refuse_beside
from quire.engine.options import PlanOptions
from quire.engine.planner import NO_OPERANDS
from quire.engine.schedule import Indices, Lengths
from quire.errors import UnsupportedError, ValidationError
from quire.jit import config, is_obtainable, is_recording, record_batch, record_use, without_matrix_unit
from quire.kernels import PIN, AttentionProblem, Decision, decide, same_rows, variants_for_all_lengths
from quire.kernels.features import KVLayout, MaskMode, PosEncodingMode, planned_features
from quire.kernels.hopper import FA3_FP8

#: The backend that takes 8-bit queries as they are.
READS_8_BITS = PIN + FA3_FP8.backend


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

    def record(self, decision: Decision, layout: KVLayout, device: torch.device) -> None:
        """Append this batch to the record, if it is the first of its size for the variant (see `quire bench`)."""
        indices = self.indices
        if isinstance(indices, Lengths) and is_capturing(device):
            return
        tokens = 0 if isinstance(indices, Lengths) else last_entry(indices.kv_indptr) * max(1, indices.page_size)
        size = ".".join(str(number.bit_length()) for number in (indices.batch_size, self.nnz_qo, tokens))
        record_batch(decision.spec, size, lambda: self._described(layout))

    def _described(self, layout: KVLayout) -> dict[str, Any]:
        """The batch as `quire bench` reads it: plain numbers and words, lengths in groups of equal ones."""
        options, logits = self.options, self.options.logits
        types = {"q": options.types.given or options.types.q, "kv": options.types.kv, "o": options.types.o}
        return {
            "requests": None if self._is_particular() else _grouped(self.indices),
            "uniform": self.indices.qo_indptr is None, "mask": self.mask.name.lower(), "layout": layout.name,
            "num_qo_heads": options.num_qo_heads, "num_kv_heads": options.num_kv_heads,
            "head_dim_qk": options.head_dim_qk, "head_dim_vo": options.head_dim_vo, "page_size": options.page_size,
            "is_mla": options.is_mla, **{f"{name}_data_type": kind.torch_name for name, kind in types.items()},
            "sm_scale": logits.sm_scale, "window_left": logits.window_left, "logits_soft_cap": logits.logits_soft_cap,
            "pos_encoding_mode": logits.pos_encoding.name, "fixed_split_size": options.fixed_split_size,
        }  # fmt: skip

    def _is_particular(self) -> bool:
        """Whether a batch with random tensors and these lengths would be another problem: one with a mask made of bits,
        a variant, a tree of shared keys, or scales within a row.
        """
        options, plain = self.options, (MaskMode.NONE, MaskMode.CAUSAL)
        return options.variant is not None or options.cascade or options.tile_scales or self.mask not in plain

    def with_8_bit_queries(self, backend: str) -> AttentionSpec:
        """The same with queries that are not upcast, if `backend` names the kernel that reads them as they are."""
        if str(backend) != READS_8_BITS or self.options.types.given is None:
            return self
        return self._replace(options=self.options._replace(types=self.options.types.without_upcast))


_MOST_GROUPS = 64  #: of lengths in a recorded batch


def _grouped(indices: Indices | Lengths) -> list[list[int]]:
    """[requests, qo_len, kv_len] of each group of requests with equal lengths, the longest first.

    Of more than 64 groups every n-th stands for its neighbours.
    """
    qo_lens, kv_lens = _lens(indices)
    pairs = sorted(zip(kv_lens.tolist(), qo_lens.tolist(), strict=True), reverse=True)
    groups = [[len(list(equal)), qo_len, kv_len] for (kv_len, qo_len), equal in groupby(pairs)]
    step = max(1, -(-len(groups) // _MOST_GROUPS))
    parts = [groups[i : i + step] for i in range(0, len(groups), step)]
    return [[sum(count for count, _, _ in part), *part[len(part) // 2][1:]] for part in parts]


def _lens(indices: Indices | Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and tokens of each request. Where only a device knows them, reading them waits for it."""
    if isinstance(indices, Indices):
        return indices.qo_lens(), indices.kv_lens()
    same = torch.full((indices.batch_size,), indices.qo_len, device="cpu")
    qo_lens = same if indices.qo_indptr is None else indices.qo_indptr.diff()
    if indices.kv_lens is not None:
        return qo_lens, indices.kv_lens
    longest = torch.full_like(same, indices.max_kv_len)
    return qo_lens, longest if indices.kv_indptr is None else indices.kv_indptr.diff()


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
