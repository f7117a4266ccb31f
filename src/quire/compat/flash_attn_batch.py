"""Batches and caches of FlashAttention's functions, as Quire's engine takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from quire.attention.variants import get_alibi_slopes
from quire.calls import check_lengths, indices_of
from quire.engine.attention import AttentionCall
from quire.engine.checks import (
    batch_size_of,
    check_flags,
    check_shape,
    check_tensor,
    device_indices,
    float_sinks,
    host_indices,
    number,
    to_int32,
)
from quire.engine.device import OwnWorkspace, refuse_capture
from quire.engine.operands import NO_OPERANDS
from quire.engine.operators import NOT_CAPTURABLE, is_tracing, operator
from quire.engine.options import PlanOptions, Types, heads, is_deterministic, logits_options, split_size
from quire.engine.run import RunOptions
from quire.engine.schedule import LEAST_TILE, Indices, Lengths, check_offsets
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import LN2
from quire.errors import UnsupportedError, ValidationError
from quire.jit import config, is_obtainable
from quire.kernels import READS_8_BITS
from quire.kernels.expressions import tanh, to_float
from quire.kernels.expressions.variant import Variant

Window = tuple[int, int]
_LEAST_DIM = 32  #: of heads that kernels take
#: Heads with more dims than the first have the second number of them, of queries, keys and values alike.
_MOST_OWN_DIM, _WIDE_DIM = 256, 512
#: Query rows of a request, tokens times grouped heads, from which on products of 8 bits are faster.
_LEAST_8_BIT_ROWS = 64


Source = torch.Tensor | None  #: a tensor that describes a batch


class Scoring(NamedTuple):
    """What decides on logits beside queries and keys."""

    softmax_scale: float | None
    causal: bool
    left: int  #: keys to the left of a query that it sees; -1: all
    right: int  #: keys to its right; -1: all
    softcap: float
    slopes: torch.Tensor | None = None  #: of ALiBi, float32 [num_heads] or [batch, num_heads]
    num_splits: int = 0

    @classmethod
    def of(
        cls, softmax_scale: float | None, causal: bool, window_size: Window, softcap: float | None,
        alibi_slopes: torch.Tensor | None, num_heads: int, num_splits: int = 0, dropout_p: float = 0.0,
        deterministic: bool = False,
    ) -> Scoring:  # fmt: skip
        """Checked."""
        check_flags(causal=causal, deterministic=deterministic)
        if number(dropout_p, "dropout_p") != 0:
            raise UnsupportedError(f"dropout_p: expected 0, as Quire is for inference only, got {dropout_p}.")
        if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
            raise ValidationError(f"num_splits: expected 0 (any number) or a positive integer, got {num_splits!r}.")
        if softmax_scale is not None:
            softmax_scale = number(softmax_scale, "softmax_scale", positive=True)
        softcap = 0.0 if softcap is None else number(softcap, "softcap")
        left, right = _window(window_size)
        if alibi_slopes is not None:
            _check_slopes(alibi_slopes, num_heads)
        causal = causal or right == 0
        return cls(softmax_scale, causal, left, 0 if causal else right, softcap, alibi_slopes, num_splits)

    def for_parts(self, num_parts: int) -> Scoring:
        """The same for a batch in which each request is that many."""
        if self.slopes is None or self.slopes.dim() == 1 or num_parts == 1:
            return self
        return self._replace(slopes=self.slopes.repeat_interleave(num_parts, 0))


def _window(window_size: Any) -> Window:
    """One side of window_size, where any negative number means no limit."""
    try:
        left, right = (int(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"window_size: expected (left, right), two integers, got {window_size!r}.") from error
    return max(-1, left), max(-1, right)


def _check_slopes(slopes: Any, num_heads: int) -> None:
    given = tensor_of(slopes, "alibi_slopes")
    if given.dim() not in (1, 2) or given.shape[-1] != num_heads:
        raise ValidationError(
            f"alibi_slopes: expected [num_heads={num_heads}] or [batch, num_heads], got {list(given.shape)}."
        )
    if given.dtype is not torch.float32:
        raise ValidationError(f"alibi_slopes: expected dtype torch.float32, got {given.dtype}.")


def _are_of_the_paper(slopes: torch.Tensor) -> bool:
    """Whether slopes on the host are those of the paper (Press et al., 2022), which the kernels compute themselves."""
    if not slopes.is_cpu or is_tracing():
        return False
    known = get_alibi_slopes(slopes.shape[-1], "cpu")
    return torch.allclose(slopes, known.expand(slopes.shape), rtol=1e-5, atol=0)  # powers in float32 differ by so much


@cache
def _alibi(is_per_request: bool, has_cap: bool) -> Variant:
    """FlashAttention's bias: a slope times the distance of key and query, to either side, added behind the cap."""

    def biased(
        score: Any, q_idx: Any, kv_idx: Any, head: Any, request: Any, qo_len: Any, kv_len: Any, slopes: Any
    ) -> Any:
        slope = slopes[request, head] if is_per_request else slopes[head]
        return score - slope * to_float(abs(kv_idx - (q_idx + kv_len - qo_len)))

    def capped(
        score: Any, q_idx: Any, kv_idx: Any, head: Any, request: Any, qo_len: Any, kv_len: Any, slopes: Any, cap: Any
    ) -> Any:
        return biased(cap * tanh(score / cap), q_idx, kv_idx, head, request, qo_len, kv_len, slopes)

    slopes = {"slopes": "float32"}
    return Variant(capped, tensors=slopes, scalars={"cap": "float32"}) if has_cap else Variant(biased, tensors=slopes)


class _Bias(NamedTuple):
    """How slopes reach the kernel: its own for those of the paper, else operands of a variant."""

    mode: str = "NONE"
    variant: Variant | None = None
    operands: Mapping[str, Any] = NO_OPERANDS

    @classmethod
    def of(cls, slopes: torch.Tensor | None, softcap: float, sees_right: bool, device: torch.device) -> _Bias:
        """sees_right: whether a query may see keys to its right, which have no bias in the kernel's own."""
        if slopes is None:
            return cls()
        if not (softcap or sees_right) and _are_of_the_paper(slopes):
            return cls("ALIBI")
        operands: dict[str, Any] = {"slopes": slopes.to(device)}
        if softcap:
            operands["cap"] = softcap
        return cls("NONE", _alibi(slopes.dim() == 2, softcap > 0), operands)


@operator("flash_attention", writes="out lse", tags=NOT_CAPTURABLE)
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
    sinks: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    seq_lens: torch.Tensor | None, block_table: torch.Tensor | None, qo_len: int, softmax_scale: float | None,
    causal: bool, left: int, right: int, softcap: float, slopes: torch.Tensor | None, num_splits: int, chunk: int = 0,
    qv: torch.Tensor | None = None, logits_by: torch.Tensor | None = None, out_by: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes out, and lse in base e. Keys are ragged by cu_seqlens_k, or pages of block_table; of these there are
    seq_lens tokens, or as many as cu_seqlens_k says. There are qo_len queries a request, or as cu_seqlens_q says. With
    qv, k and v are the parts of latents. logits_by, out_by: one factor each of all logits and of the result. q_scale:
    factors of the heads of 8-bit queries.
    """
    page_size = 0 if block_table is None else k.shape[1]
    dim = q.shape[2] + (0 if qv is None else v.shape[-1])
    is_masked = right > 0 or (chunk > 0 and (not causal or left >= 0))  # bits say which keys a query sees
    window, chunks = (-1, None) if is_masked and chunk else (left, chunk or None)
    bias = _Bias.of(slopes, softcap, not (causal or qo_len == 1), q.device)
    cap = 0.0 if bias.variant is not None else softcap
    options = PlanOptions(
        *heads(q.shape[1], k.shape[-2]), dim, v.shape[-1], Types.of(q.dtype, k.dtype, out.dtype),
        logits_options(dim, softmax_scale, window, cap, bias.mode, None, None, chunks), causal, page_size,
        split_size(None, num_splits == 1 or is_deterministic(None)), qv is not None, bias.variant,
    )  # fmt: skip
    batch = _Batch(cu_seqlens_q, cu_seqlens_k, seq_lens, block_table, qo_len, page_size)
    if not q.shape[0] and not batch.is_on_host:
        batch.on(q.device)
        return
    lengths = None if is_masked else batch.on_device(q, k, (out, lse), options)
    if lengths is not None:
        spec = AttentionSpec(lengths, options, has_equal_lengths=qo_len > 0)
    else:
        indices = batch.on_host(q.device)
        if is_masked:
            batch.check_ends(indices, q, k)
        mask = _mask(indices, left, right, chunk, q.device) if is_masked else None
        spec = AttentionSpec(indices, options, mask, has_equal_lengths=qo_len > 0)
    rows = spec.nnz_qo
    if rows > q.shape[0]:
        raise ValidationError(f"cu_seqlens_q: expected offsets up to the {q.shape[0]} rows of q, got {rows}.")
    AttentionCall(
        spec, q[:rows], (k, v), OwnWorkspace(q.device), backend=_backend(spec, q), out=out[:rows],
        lse=None if lse is None else lse[:rows],
        options=RunOptions(
            float_sinks(sinks, "s_aux"), q_scale, logits_scale_by=logits_by, o_scale_by=out_by, lse_unit=LN2,
            others=() if qv is None else (qv[:rows],), operands=bias.operands,
        ),
    ).attend()  # fmt: skip
    if rows < q.shape[0]:
        out[rows:].zero_()
        if lse is not None:
            lse[rows:].fill_(-math.inf)


def _backend(spec: AttentionSpec, q: torch.Tensor) -> str:
    """The kernel that multiplies queries of 8 bits as they are, for long prompts where it takes the call. Where results
    must not depend on other requests, the lengths of these do not decide.
    """
    if q.dtype.itemsize > 1 or is_deterministic(None) or not config.multiplies_8_bits():
        return "auto"
    options = spec.options
    may_depend = spec.has_equal_lengths or not options.fixed_split_size
    if not may_depend or spec.typical_rows < _LEAST_8_BIT_ROWS:
        return "auto"
    try:
        decision = spec.with_8_bit_queries(READS_8_BITS).decide(q.device, READS_8_BITS)
    except UnsupportedError:
        return "auto"
    return READS_8_BITS if is_obtainable(decision.spec) else "auto"


class Where(NamedTuple):
    """Which rows of queries and keys belong together: see _attend()."""

    cu_seqlens_q: Source
    cu_seqlens_k: Source
    seq_lens: Source
    block_table: Source


def attend_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
    sinks: torch.Tensor | None, where: Where, qo_len: int, scoring: Scoring, chunk: int = 0,
    qv: torch.Tensor | None = None, *more: Any,
) -> None:  # fmt: skip
    """_attend() for heads of any width from 1 on: zeros behind them change no product."""
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous() for t in (q, k, v))
    step = 16 if any(t.dtype.itemsize == 1 for t in (q, k, v)) else 8
    is_wide = qv is None and max(k.shape[-1], v.shape[-1]) > _MOST_OWN_DIM
    wide, written = tuple(_widened(t, _WIDE_DIM if is_wide else _LEAST_DIM, step) for t in (q, k, v)), out
    if q.shape[-1] == k.shape[-1] and any(t is not w for t, w in zip((q, k, v), wide, strict=True)):
        if scoring.softmax_scale is None:
            scoring = scoring._replace(softmax_scale=1.0 / math.sqrt(max(1, q.shape[-1])))
        q, k, v = wide
        written = out.new_empty((*out.shape[:-1], v.shape[-1]))
    rest: tuple[Any, ...] = (*where, qo_len, *scoring, chunk, qv, *more)
    _attend(q, k, v, written, lse, sinks, *rest)
    if written is not out:
        out.copy_(written[..., : out.shape[-1]])


def _widened(tensor: torch.Tensor, least: int, step: int) -> torch.Tensor:
    """Heads as wide as kernels take them: a multiple of `step`, and no less than `least`."""
    dim = tensor.shape[-1]
    more = max(least, -(-dim // step) * step) - dim
    return pad(tensor, (0, more)) if more and dim else tensor


class _Batch(NamedTuple):
    """What describes a batch: see _attend()."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seq_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    qo_len: int
    page_size: int

    def on_device(
        self, q: torch.Tensor, k: torch.Tensor, results: tuple[torch.Tensor, torch.Tensor | None], options: PlanOptions
    ) -> Lengths | None:
        """The batch for a plan on the GPU, which the host does not wait for; None if the host has to plan."""
        if not q.is_cuda or any(t is not None and t.is_cpu for t in self[:3]):
            return None
        batch, (cu_q, cu_k, lens, table) = self.on(q.device)
        lengths = Lengths(
            lens, table, self.qo_len, self.page_size, qo_indptr=cu_q, kv_indptr=None if lens is not None else cu_k,
            num_rows=0 if cu_q is None else q.shape[0], num_tokens=0 if table is not None else k.shape[0],
            results=results,
        )  # fmt: skip
        return (
            lengths if batch and lengths.can_be_counted(*LEAST_TILE, options.num_kv_heads, options.group_size) else None
        )

    @property
    def is_on_host(self) -> bool:
        """Whether offsets and lengths are."""
        return all(t is None or t.is_cpu for t in (self.cu_seqlens_q, self.cu_seqlens_k, self.seq_lens))

    def on(self, device: torch.device) -> tuple[int, tuple[Source, Source, Source, Source]]:
        """The batch size, and cu_seqlens_q, cu_seqlens_k, seq_lens and block_table, of which the last is copied to the
        GPU if it lies elsewhere.
        """
        arrays = self.cu_seqlens_q, self.cu_seqlens_k, self.seq_lens
        cu_q, cu_k, lens = (
            t if t is None else device_indices(t, name)
            for t, name in zip(arrays, ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens"), strict=True)
        )
        table = None if self.block_table is None else _rows(self.block_table.to(device))
        return self._batch_size(cu_q, cu_k, lens, table), (cu_q, cu_k, lens, table)

    @staticmethod
    def _batch_size(*arrays: torch.Tensor | None) -> int:
        """The batch size, in which offsets, lengths and tables must agree."""
        names, batch = ("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table"), None
        for i, (name, tensor) in enumerate(zip(names, arrays, strict=True)):
            if tensor is None:
                continue
            size = tensor.shape[0] - (i < 2)
            if batch is not None and size != batch:
                raise ValidationError(f"{name}: expected {batch + (i < 2)} entries, got {list(tensor.shape)}.")
            batch = size
        return batch or 0

    def on_host(self, device: torch.device) -> Indices:
        """Its index arrays; those of a GPU are copied, which waits for it."""
        if any(t is not None and not t.is_cpu for t in self[:3]):
            refuse_capture("a call whose lengths the host must know", device)
        indptr = None if self.cu_seqlens_q is None else host_indices(self.cu_seqlens_q, "cu_seqlens_q")
        if self.block_table is None:
            assert indptr is not None and self.cu_seqlens_k is not None
            batch = batch_size_of(indptr, "cu_seqlens_q")
            return Indices(batch, indptr, 0, host_indices(self.cu_seqlens_k, "cu_seqlens_k", batch + 1), None, None, 1)
        if self.seq_lens is None:
            assert self.cu_seqlens_k is not None
            lens = host_indices(self.cu_seqlens_k, "cu_seqlens_k").diff()
        else:
            lens = self.seq_lens.cpu().clamp(min=0)
        if indptr is not None:
            check_shape(indptr, "cu_seqlens_q", {"batch + 1": lens.shape[0] + 1})
        check_shape(self.block_table, "block_table", {"batch": lens.shape[0], "pages": None})
        check_lengths(lens, self.block_table.shape[1], self.page_size, 2**31 - 1, "2^31 - 1")
        return indices_of(_rows(self.block_table), lens, indptr, self.qo_len, self.page_size)

    def check_ends(self, indices: Indices, q: torch.Tensor, k: torch.Tensor) -> None:
        """Offsets ascend, and end with the tensors, before bits are made of them; the scheduler checks them later."""
        ends = [(indices.qo_indptr, "cu_seqlens_q", q, "q", 0)]
        if self.block_table is None:
            ends.append((indices.kv_indptr, "cu_seqlens_k", k, "k", 2**31 - 1))
        for offsets, name, tensor, of, largest_first in ends:
            if offsets is None:
                continue
            check_offsets(offsets, name, largest_first)
            if int(offsets[-1]) > tensor.shape[0]:
                raise ValidationError(
                    f"{name}: expected offsets up to the {tensor.shape[0]} rows of {of}, got {int(offsets[-1])}."
                )


def _rows(table: torch.Tensor) -> torch.Tensor:
    table = to_int32(check_tensor(table, "block_table"), "block_table")
    return table if table.stride(1) == 1 else table.contiguous()


def _right_window(indices: Indices, right: int, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, flat; None if no query has as many to its right: the first one has qo - 1."""
    lens = list(zip(indices.qo_lens().tolist(), indices.kv_lens().tolist(), strict=True))
    if all(right >= qo - 1 or not kv for qo, kv in lens):
        return None
    longest = max(max(pair) for pair in lens)
    at = torch.arange(longest, dtype=torch.int32, device=device)
    return torch.cat([(at[:kv] <= (at[:qo] + (kv - qo + right))[:, None]).flatten() for qo, kv in lens])


def _mask(indices: Indices, left: int, right: int, chunk: int, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, flat. Chunks are counted from the first key; a query sees all keys of its chunk."""
    if not chunk:
        return _right_window(indices, right, device)
    masks = []
    for qo, kv in zip(indices.qo_lens().tolist(), indices.kv_lens().tolist(), strict=True):
        place = torch.arange(kv - qo, kv, device=device)[:, None]
        key, begin = torch.arange(kv, device=device), place - place % chunk
        seen = (key >= begin) & (key < begin + chunk)
        seen &= (key <= place + right) if right >= 0 else True
        seen &= (key >= place - left) if left >= 0 else True
        masks.append(seen.flatten())
    return torch.cat(masks) if masks else None


def tensor_of(value: Any, name: str) -> torch.Tensor:
    """check_tensor(), for tensors that have memory."""
    if is_tracing() and isinstance(value, torch.Tensor):
        return value
    return check_tensor(value, name)
