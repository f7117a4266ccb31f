"""Batches and scales of FlashAttention-3's functions, as Quire's engine takes them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from quire.compat.flash_attn_batch import Source, _Batch, _right_window, tensor_of
from quire.compat.flash_attn_interface_options import Options
from quire.engine.attention import AttentionCall
from quire.engine.checks import check_output, check_same_device, check_shape, float_sinks
from quire.engine.device import OwnWorkspace
from quire.engine.graph import is_capturing
from quire.engine.operators import NOT_CAPTURABLE, is_tracing, operator
from quire.engine.options import PlanOptions, Types, heads, logits_options, split_size
from quire.engine.run import RunOptions
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import LATENT_DIM, LN2
from quire.errors import UnsupportedError, ValidationError

_LEAST_DIM = 32  #: of heads that kernels take


class Queries(NamedTuple):
    """Rows of q, and which request each belongs to."""

    q: torch.Tensor  #: [rows, num_heads, head_dim]
    qv: torch.Tensor | None  #: [rows, num_heads, head_dim of v]
    batch: int
    qo_len: int  #: of each request, where there are no offsets
    offsets: torch.Tensor | None  #: int32 [batch * num_parts + 1]
    num_parts: int = 1  #: that each request is divided into, of which the first has queries with keys

    def requests(self) -> torch.Tensor:
        """The request of each row; `batch` for rows behind the last offset."""
        return Rows.of(self.offsets, self.batch * self.num_parts, self.qo_len, self.q).request // self.num_parts


class Keys(NamedTuple):
    """Keys and values, ragged or in pages, and where those of each request lie."""

    k: torch.Tensor
    v: torch.Tensor
    offsets: Source  #: int32 [batch + 1]: of ragged keys; of pages cumulative lengths
    lens: Source  #: int32 [batch]
    table: Source  #: int32 [batch, pages]; None: ragged


class Rows(NamedTuple):
    """Where each row of a concatenation stands."""

    request: torch.Tensor  #: [rows]; the number of requests for rows of none
    place: torch.Tensor  #: [rows], in the request

    @classmethod
    def of(cls, offsets: torch.Tensor | None, batch: int, length: int, like: torch.Tensor) -> Rows:
        """Of requests of `length` rows each, or from offsets; `like` has the rows, and is where the result lies."""
        at = torch.arange(like.shape[0], dtype=torch.int32, device=like.device)
        if offsets is None:
            return cls(at // max(1, length), at % max(1, length))
        offsets = offsets.to(like.device).contiguous()
        request = torch.searchsorted(offsets[1:].contiguous(), at, right=True).to(torch.int32)
        return cls(request, at - offsets[request.clamp(max=batch)])


class Scales(NamedTuple):
    """The factors of 8-bit numbers, float32 [batch, num_heads_k], or None."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None

    def check(self, batch: int, num_heads_k: int, device: torch.device) -> None:
        """ValidationError naming the argument."""
        for tensor, name in zip(self, ("q_descale", "k_descale", "v_descale"), strict=True):
            if tensor is None:
                continue
            check_shape(tensor_of(tensor, name), name, {"batch": batch, "num_heads_k": num_heads_k})
            check_same_device(tensor, name, device)
            if tensor.dtype is not torch.float32:
                raise ValidationError(f"{name}: expected dtype torch.float32, got {tensor.dtype}.")

    @property
    def of_logits(self) -> torch.Tensor | None:
        """The product of those of q and k."""
        if self.q is None or self.k is None:
            return self.k if self.q is None else self.q
        if _is_one(self.q) and _is_one(self.k):
            return (self.q[:1, :1] * self.k[:1, :1]).expand(self.q.shape)
        return self.q * self.k


def _is_one(tensor: torch.Tensor) -> bool:
    """Whether it is one number, expanded."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return bool(tensor.numel()) and all(stride == 0 or size == 1 for size, stride in sizes)


def attend(queries: Queries, keys: Keys, options: Options, scales: Scales) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [rows, num_heads, head_dim of v], and the lse [rows, num_heads] in base e if it is asked for."""
    queries, keys = _together(queries, keys)
    q, qv = queries.q, queries.qv
    scales.check(queries.batch, keys.k.shape[-2], q.device)
    dim_v, is_paged = keys.v.shape[-1], keys.table is not None
    if qv is not None:
        _check_latents(queries, keys, options, scales)
    dim, scale = q.shape[-1] + (0 if qv is None else dim_v), options.scoring.softmax_scale
    scale = dim**-0.5 if scale is None and dim else scale
    q = q.to(torch.bfloat16) if q.dtype.itemsize == 1 else q
    factors = _Factors.of(queries, scales, is_paged and q.is_cuda)
    q = q if factors.q_rows is None else (queries.q.float() * factors.q_rows).to(q.dtype)
    k, v = keys.k, keys.v
    if qv is None and not is_paged:
        q, k, v = _padded(q, k, v)
    out = _result(options.out, q, dim_v, v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if options.returns_lse else None
    scoring = options.scoring._replace(softmax_scale=scale)
    _start(
        q, k, v, out, lse, float_sinks(options.sinks, "sinks"), queries.offsets, keys.offsets, keys.lens, keys.table,
        qv, factors.logits_by, factors.out_by, queries.qo_len, *scoring, options.chunk,
    )  # fmt: skip
    if factors.out_rows is not None:
        out.copy_(out.float() * factors.out_rows)
    return _given_back(options.out, out[..., :dim_v]), lse


def _together(queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """Offsets and lengths on the GPU if some of them lie there: the host then need not wait for these."""
    arrays, device = (queries.offsets, keys.offsets, keys.lens), queries.q.device
    if device.type == "cpu" or all(t is None or t.is_cpu for t in arrays) or is_capturing(device):
        return queries, keys
    offsets, k_offsets, lens = (t if t is None else t.to(device, non_blocking=True) for t in arrays)
    return queries._replace(offsets=offsets), keys._replace(offsets=k_offsets, lens=lens)


class _Factors(NamedTuple):
    """Scales as kernels take them: one for all, or one for each row and head, which are applied before and after."""

    logits_by: torch.Tensor | None = None
    out_by: torch.Tensor | None = None
    q_rows: torch.Tensor | None = None  #: [rows, num_heads, 1]
    out_rows: torch.Tensor | None = None

    @classmethod
    def of(cls, queries: Queries, scales: Scales, takes_one: bool) -> _Factors:
        """takes_one: whether the kernel reads a factor of all logits and one of the result."""
        given = [(scales.of_logits, "logits_by", "q_rows"), (scales.v, "out_by", "out_rows")]
        found: dict[str, torch.Tensor] = {}
        for tensor, one, many in given:
            if tensor is None:
                continue
            if takes_one and _is_one(tensor):
                found[one] = tensor.as_strided((1,), (1,))
            else:
                requests = queries.requests().clamp(max=queries.batch - 1)
                group = queries.q.shape[1] // tensor.shape[1]
                found[many] = tensor[requests].repeat_interleave(group, 1)[..., None]
        return cls(**found)


def _check_latents(queries: Queries, keys: Keys, options: Options, scales: Scales) -> None:
    """qv is supported for the latents of DeepSeek's models."""
    assert queries.qv is not None
    q, qv, scoring = queries.q, queries.qv, options.scoring
    sizes = {"rows": q.shape[0], "num_heads": q.shape[1], "head_dim_v": keys.v.shape[-1]}
    check_shape(qv, "qv", sizes)
    if (q.shape[-1], keys.v.shape[-1], keys.k.shape[-2]) != (64, LATENT_DIM, 1):
        raise UnsupportedError(
            f"qv: expected q of 64 dims and v of {LATENT_DIM} with one head of keys, which kernels of latents take, "
            f"got q of {q.shape[-1]}, v of {keys.v.shape[-1]} and {keys.k.shape[-2]} heads of keys; where "
            f"their dims are 256 at most, concatenate q and qv, and k and v."
        )
    if any(scale is not None for scale in scales):
        raise UnsupportedError("q_descale, k_descale, v_descale: expected None beside qv, whose keys have 16 bits.")
    if scoring.left >= 0 or scoring.right > 0 or options.chunk or scoring.softcap or scoring.has_alibi:
        raise UnsupportedError(
            "qv: expected no window_size, attention_chunk, softcap or alibi_slopes beside it; kernels of latents have "
            "causal=True and False."
        )


def _padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Ragged tensors with heads as wide as kernels take them: zeros change no product."""
    if q.shape[-1] != k.shape[-1] or not q.shape[-1] or not v.shape[-1]:
        return q, k, v
    step = 16 if k.dtype.itemsize == 1 else 8

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        more = max(_LEAST_DIM, -(-tensor.shape[-1] // step) * step) - tensor.shape[-1]
        return pad(tensor, (0, more)) if more else tensor

    return widened(q), widened(k), widened(v)


def _result(given: torch.Tensor | None, q: torch.Tensor, dim_v: int, padded_dim: int) -> torch.Tensor:
    """What the kernel writes: the caller's `out` if it can be written there."""
    shape = (*q.shape[:2], padded_dim)
    if given is None:
        return q.new_empty(shape)
    check_shape(check_output(given, "out"), "out", {"rows": shape[0], "num_heads": shape[1], "head_dim_v": dim_v})
    check_same_device(given, "out", q.device)
    if given.dtype is not q.dtype:
        raise ValidationError(f"out: expected dtype {q.dtype}, got {given.dtype}.")
    return given if padded_dim == dim_v and given.is_contiguous() else q.new_empty(shape)


def _given_back(given: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if given is None or given is out or given.data_ptr() == out.data_ptr():
        return out
    return given.copy_(out)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
    sinks: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    seq_lens: torch.Tensor | None, block_table: torch.Tensor | None, qv: torch.Tensor | None,
    logits_by: torch.Tensor | None, out_by: torch.Tensor | None, qo_len: int, softmax_scale: float | None, causal: bool,
    left: int, right: int, softcap: float, has_alibi: bool, num_splits: int, chunk: int,
) -> None:  # fmt: skip
    """Writes out, and lse in base e. The arrays are those of _attend() of flash_attn_batch.py."""
    page_size = 0 if block_table is None else k.shape[1]
    dim = q.shape[2] + (0 if qv is None else v.shape[-1])
    is_masked = right > 0 or (chunk > 0 and (not causal or left >= 0))  # bits say which keys a query sees
    window, chunks = (-1, None) if is_masked and chunk else (left, chunk or None)
    options = PlanOptions(
        *heads(q.shape[1], k.shape[-2]), dim, v.shape[-1], Types.of(q.dtype, v.dtype, None),
        logits_options(dim, softmax_scale, window, softcap, "ALIBI" if has_alibi else "NONE", None, None, chunks),
        causal, page_size, split_size(None, num_splits == 1), qv is not None,
    )  # fmt: skip
    has_offsets = cu_seqlens_q is not None and cu_seqlens_q.is_cpu and cu_seqlens_q.numel() > 0
    if not q.shape[0] and not (has_offsets and int(cu_seqlens_q[-1])):  # type: ignore[index]
        return
    batch = _Batch(cu_seqlens_q, cu_seqlens_k, seq_lens, block_table, qo_len, page_size)
    lengths = None if is_masked else batch.on_device(q, k, (out, lse), options)
    if lengths is not None:
        spec = AttentionSpec(lengths, options)
    else:
        indices = batch.on_host(q.device)
        spec = AttentionSpec(indices, options, _mask(indices, left, right, chunk, q.device) if is_masked else None)
    rows = spec.nnz_qo
    if rows > q.shape[0]:
        raise ValidationError(f"cu_seqlens_q: expected offsets up to the {q.shape[0]} rows of q, got {rows}.")
    AttentionCall(
        spec, q[:rows], (k, v), OwnWorkspace(q.device), out=out[:rows], lse=None if lse is None else lse[:rows],
        options=RunOptions(
            sinks, logits_scale_by=logits_by, o_scale_by=out_by, lse_unit=LN2,
            others=() if qv is None else (qv[:rows],),
        ),
    ).attend()  # fmt: skip
    if rows < q.shape[0]:
        out[rows:].zero_()
        if lse is not None:
            lse[rows:].fill_(-math.inf)


_record = operator(
    """flash_attention_3(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks,
       Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seq_lens, Tensor? block_table, Tensor? qv,
       Tensor? logits_by, Tensor? out_by, SymInt qo_len, float? softmax_scale, bool causal, int left, int right,
       float softcap, bool has_alibi, int num_splits, int chunk) -> ()""",
    tags=NOT_CAPTURABLE,
)(_attend)


def _start(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous() for t in (q, k, v))
    (_record if is_tracing() else _attend)(q, k, v, *rest)


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


def with_used_lengths(
    queries: Queries, keys: Keys, used_q: torch.Tensor | None, used_k: torch.Tensor | None
) -> tuple[Queries, Keys]:
    """The first used_q queries and used_k keys of each request. The other queries become requests without keys, which
    give zeros; the other ragged keys become requests without queries.
    """
    if keys.table is not None and used_k is not None:
        keys, used_k = keys._replace(lens=used_k, offsets=None), None
    if used_q is None and used_k is None:
        return queries, keys
    assert queries.offsets is not None
    first, behind = queries.offsets[:-1], queries.offsets[1:]
    end = behind if used_q is None else first + torch.minimum(used_q.clamp(min=0).to(first.device), behind - first)
    if keys.table is not None:
        offsets = _flat_offsets((first, end), behind)
        lens = keys.lens if keys.offsets is None else keys.offsets.diff()
        assert lens is not None
        lens = torch.stack((lens, torch.zeros_like(lens)), 1).flatten()
        table = keys.table.repeat_interleave(2, 0)
        return queries._replace(offsets=offsets, num_parts=2), keys._replace(offsets=None, lens=lens, table=table)
    assert keys.offsets is not None
    k_first, k_behind = keys.offsets[:-1], keys.offsets[1:]
    most = k_behind - k_first
    k_end = k_first + (most if used_k is None else torch.minimum(used_k.clamp(min=0).to(most.device), most))
    return (
        queries._replace(offsets=_flat_offsets((first, end, behind), behind), num_parts=3),
        keys._replace(offsets=_flat_offsets((k_first, k_end, k_end), k_behind)),
    )


def _flat_offsets(columns: tuple[torch.Tensor, ...], last: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.stack(columns, 1).flatten(), last[-1:]))


def ragged_tokens(keys: Keys, most: int) -> Keys:
    """Ragged keys as pages of one token, of which a request has at most `most`."""
    assert keys.offsets is not None
    offsets = keys.offsets.to(keys.k.device)
    table = offsets[:-1, None] + torch.arange(max(1, most), dtype=torch.int32, device=offsets.device)
    k, v = keys.k.unsqueeze(1), keys.v.unsqueeze(1)
    return Keys(k, v, None, keys.offsets.diff(), table.clamp(max=max(0, k.shape[0] - 1)).to(torch.int32))
