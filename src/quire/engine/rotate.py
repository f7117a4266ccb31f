"""One launch of kernels/rope.h: rotates queries and keys, and can also normalise, quantise and append them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire.engine.checks import (
    batch_size_of,
    check_contiguous_last,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    number,
)
from quire.engine.device import max_ctas, on_cuda, target_of
from quire.engine.launch import launch
from quire.engine.schedule import check_count, check_offsets, check_range, index_table
from quire.errors import UnsupportedError, ValidationError
from quire.jit import get_module
from quire.kernels.operation import (
    HEADS_OF_THREAD,
    MAX_ROTARY_PAIRS,
    MAX_TABLE_PAIRS,
    OPERATIONS,
    PARALLEL_THREADS,
    TURNS_OF_TOKENS,
    HeadRows,
    OperationKey,
    RopeHeads,
    RopeParams,
    llama31_frequencies,
    rope_frequencies,
)
from quire.kernels.params import FastDivisor

INPUTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_OUT_TYPES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  #: HeadType in kernels/rope.h; 0: as the input
_LEAST, _MOST = -(2**31), 2**31 - 1  #: of positions
_LEAST_SCALE = 1e-3
_WARP, _LEAST_THREADS, _THREADS_OF_SM = 32, 96, 768  #: threads; the second of a CTA
_SMEM = 48 << 10  #: bytes of shared memory that a kernel has without asking

Llama31 = tuple[float, float, float]  #: low_freq_factor, high_freq_factor, old_context_len


class Heads(NamedTuple):
    """Queries, keys or values [nnz, num_heads, dims], with rotated dims and other dims in separate tensors."""

    rope: torch.Tensor | None
    nope: torch.Tensor | None
    rope_out: torch.Tensor | None  #: the same shape, or pages [num_pages, page_size, num_heads, dims]
    nope_out: torch.Tensor | None
    weight: torch.Tensor | None = None  #: of the RMS norm, [rope dims + nope dims]
    scale: float = 1.0

    def params(self) -> RopeHeads:
        """The fields of the parameter struct."""
        some, out = (a if a is not None else b for a, b in ((self.rope, self.nope), (self.rope_out, self.nope_out)))
        assert some is not None and out is not None
        return RopeHeads(
            *map(_rows, (self.rope, self.nope, self.rope_out, self.nope_out)),
            None if self.weight is None else self.weight.data_ptr(), self.scale, some.shape[-2], 0, _width(self.rope),
            _width(self.nope), _OUT_TYPES.get(out.dtype, 0), out.dim() == 4,
        )  # fmt: skip

    def units(self, vector: int) -> int:
        """Pairs of vectors of a head."""
        return _width(self.rope) // (2 * vector) + -(-_width(self.nope) // (2 * vector))

    def allows(self, vector: int) -> bool:
        """Whether all of them may be read and written `vector` numbers at a time."""
        widths = _width(self.rope) % (2 * vector) or _width(self.nope) % vector
        return not widths and all(_is_aligned(t, vector) for t in (*self[:4], self.weight) if t is not None)


def _rows(tensor: torch.Tensor | None) -> HeadRows:
    if tensor is None:
        return HeadRows()
    *page, token, head, _ = tensor.stride()
    return HeadRows(tensor.data_ptr(), page[0] if page else 0, token, head)


def _width(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[-1]


def _is_aligned(tensor: torch.Tensor, vector: int) -> bool:
    return tensor.data_ptr() % (vector * tensor.element_size()) == 0 and not any(
        stride % vector for stride in tensor.stride()[:-1]
    )


def split(tensor: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rotated dims, and the others if there are any."""
    width = tensor.shape[-1]
    if rotary_dim == width:
        return tensor, None
    return tensor.narrow(-1, 0, rotary_dim), tensor.narrow(-1, rotary_dim, width - rotary_dim)


class Angles(NamedTuple):
    """Positions of tokens, and frequencies of pairs."""

    pos_ids: torch.Tensor | None
    indptr: torch.Tensor | None  #: with offsets, in place of pos_ids
    offsets: torch.Tensor | None
    cos_sin_cache: torch.Tensor | None  #: in place of scale and theta
    interleave: bool
    rope_scale: float
    rope_theta: float
    llama31: Llama31 | None = None

    def checked(self, nnz: int, device: torch.device, name: str) -> Angles:
        """The checked angles for the kernel; `name` is the caller's name for pos_ids."""
        table = self.cos_sin_cache
        if not isinstance(self.interleave, bool):
            raise ValidationError(f"interleave: expected a bool, got {self.interleave!r}.")
        if table is None:
            self.numbers()
        if self.indptr is not None:
            indptr, offsets = _requests(self.indptr, self.offsets, nnz, device)
            return self._replace(indptr=indptr, offsets=offsets)
        pos_ids = _positions(self.pos_ids, name, nnz, device)
        if table is not None and not on_cuda(device):
            check_range(pos_ids, name, 0, table.shape[0] - 1, f"rows of cos_sin_cache {list(table.shape)}")
        return self._replace(pos_ids=pos_ids)

    def fill(self, params: RopeParams, rotary_dim: int) -> None:
        """Write checked angles into `params`."""
        params.interleave, params.num_requests = self.interleave, 0
        for name in ("pos_ids", "indptr", "offsets", "cos_sin_cache"):
            tensor = getattr(self, name)
            setattr(params, name, None if tensor is None else tensor.data_ptr())
        if self.pos_ids is not None:
            params.has_long_pos_ids = self.pos_ids.dtype is torch.int64
        if self.offsets is not None:
            params.num_requests = self.offsets.shape[0]
        if self.cos_sin_cache is None:
            params.frequencies = _frequencies(rotary_dim, *self.numbers())
        else:
            params.cos_sin_stride = self.cos_sin_cache.stride(0)
            params.num_positions = min(self.cos_sin_cache.shape[0], _MOST)

    def numbers(self) -> tuple[float, float, Llama31 | None]:
        """Scale, theta and the factors of Llama 3.1, which must give valid frequencies."""
        scale = number(self.rope_scale, "rope_scale", positive=True)
        theta = number(self.rope_theta, "rope_theta", positive=True)
        if scale < _LEAST_SCALE:
            raise ValidationError(f"rope_scale: expected a number of at least {_LEAST_SCALE}, got {scale}.")
        if theta < 1:
            raise ValidationError(f"rope_theta: expected a number of at least 1, got {theta}.")
        if self.llama31 is None:
            return scale, theta, None
        low, high, length = self.llama31
        low, high = number(low, "low_freq_factor"), number(high, "high_freq_factor")
        if not high > low:
            raise ValidationError(f"high_freq_factor: expected more than low_freq_factor={low}, got {high}.")
        return scale, theta, (low, high, number(length, "old_context_len", positive=True))


def _requests(indptr: Any, offsets: Any, nnz: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets into the tokens, and the position of each request's first one."""
    batch = batch_size_of(check_tensor(indptr, "indptr"), "indptr")
    check_shape(check_tensor(offsets, "offsets"), "offsets", {"batch_size": batch})
    indptr, offsets = index_table(indptr, "indptr", None, device), index_table(offsets, "offsets", batch, device)
    if not batch and nnz:
        raise ValidationError(f"indptr: expected requests that the {nnz} tokens of q belong to, got none.")
    if not on_cuda(device):
        check_offsets(indptr, "indptr")
        if int(indptr[-1]) != nnz:
            raise ValidationError(f"indptr: expected to end with nnz={nnz}, the rows of q, got {int(indptr[-1])}.")
        check_range(offsets.long() + indptr.diff(), "offsets", _LEAST, _MOST + 1, "positions that fit 32 bits")
    return indptr, offsets


def _positions(pos_ids: Any, name: str, nnz: int, device: torch.device) -> torch.Tensor:
    tensor = check_tensor(pos_ids, name)
    check_shape(tensor, name, {"nnz": nnz})
    check_same_device(tensor, name, device)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValidationError(f"{name}: expected dtype torch.int32 or torch.int64, got {tensor.dtype}.")
    if not on_cuda(device):
        check_range(tensor, name, _LEAST, _MOST, "positions that fit 32 bits")
    return tensor.contiguous()


@lru_cache(maxsize=64)
def _frequencies(rotary_dim: int, scale: float, theta: float, llama31: Llama31 | None) -> ctypes.Array[ctypes.c_uint64]:
    if llama31 is None:
        values = rope_frequencies(rotary_dim, scale, theta)
    else:
        values = llama31_frequencies(rotary_dim, scale, theta, *llama31)
    return (ctypes.c_uint64 * MAX_ROTARY_PAIRS)(*values)


def check_heads(
    tensor: torch.Tensor, name: str, shape: Mapping[str, int | None], like: torch.Tensor | None = None
) -> None:
    """Check queries, keys or values for the kernel; `like`: a tensor with the required dtype and device."""
    check_shape(check_tensor(tensor, name), name, shape)
    check_contiguous_last(tensor, name)
    check_count(math.prod(tensor.shape[1:]), name, "numbers of a token")
    if tensor.dtype not in INPUTS:
        raise ValidationError(f"{name}: expected dtype float16, bfloat16 or float32, got {tensor.dtype}.")
    if like is not None:
        check_same_device(tensor, name, like.device)
        if tensor.dtype is not like.dtype:
            raise ValidationError(f"{name}: expected the dtype of the queries, {like.dtype}, got {tensor.dtype}.")


def rotary_dim_of(value: int | None, head_dim: int, cos_sin_cache: torch.Tensor | None, device: torch.device) -> int:
    """How many dims of a head are rotated."""
    if cos_sin_cache is None:
        name, most = "rotary_dim", 2 * MAX_ROTARY_PAIRS
        dim = head_dim if value is None else check_positive(value, name)
    else:
        name, dim, most = "cos_sin_cache", _check_table(cos_sin_cache, device), 2 * MAX_TABLE_PAIRS
    if dim > most:
        raise UnsupportedError(
            f"{name}: expected at most {most} dims that turn, got {dim}; {2 * MAX_TABLE_PAIRS} may turn by a table of "
            "apply_rope_with_cos_sin_cache()."
        )
    if dim % 2 or not 0 < dim <= head_dim:
        raise ValidationError(f"{name}: expected an even number of dims up to head_dim={head_dim}, got {dim}.")
    return dim


def _check_table(table: torch.Tensor, device: torch.device) -> int:
    check_shape(check_tensor(table, "cos_sin_cache"), "cos_sin_cache", {"max_seq_len": None, "rotary_dim": None})
    check_same_device(table, "cos_sin_cache", device)
    check_contiguous_last(table, "cos_sin_cache")
    if table.dtype is not torch.float32:
        raise ValidationError(f"cos_sin_cache: expected dtype torch.float32, got {table.dtype}.")
    return table.shape[1]


class Rotation:
    """Operation `name` on up to three tensors of heads that are already checked; the first ones are rotated."""

    def __init__(self, name: str, heads: list[Heads], angles: Angles, params: RopeParams | None = None) -> None:
        some, out, params = heads[0].rope, heads[0].rope_out, params or RopeParams()
        assert some is not None and out is not None
        angles.fill(params, some.shape[-1])
        params.nnz = (some if some.dim() == 3 else out).shape[0]
        groups = 0
        for i in range(len(params.heads)):
            params.heads[i] = heads[i].params() if i < len(heads) else RopeHeads()
            params.heads[i].first_group = groups
            groups += -(-params.heads[i].num_heads // HEADS_OF_THREAD)
        slug, self._device = INPUTS[some.dtype], some.device
        vector = _vector(heads, angles.cos_sin_cache, OPERATIONS[name].widths[slug])
        lanes, pairs = _lanes(heads, vector, self._device), some.shape[-1] // 2
        columns = max(1, lanes * groups)
        params.columns, params.lanes, params.pairs = map(FastDivisor.of, (columns, lanes, pairs))
        thread_bytes = 2 * 2 * HEADS_OF_THREAD * vector * some.element_size()  # two stages, two vectors of each head
        params.tokens, params.ctas, self._block = _cta(columns, pairs, thread_bytes)
        params.vectors_at = _tables_bytes(params.tokens, pairs)
        self._smem = params.vectors_at + self._block * thread_bytes
        resident = max(1, _resident(self._device, self._block, self._smem) // params.ctas)
        items = -(-params.nnz // params.tokens)
        at_a_time = -(-items // max(1, -(-items // resident)))
        params.tokens_of_turn = at_a_time * params.tokens
        self._grid = at_a_time * params.ctas if groups else 0
        self._key, self._params = OperationKey(name, target_of(self._device), slug, vector), params

    def move(self, **addresses: list[int]) -> None:
        """Set other addresses of the same tensors, by the names of Heads."""
        for name, of_heads in addresses.items():
            for i, address in enumerate(of_heads):
                getattr(self._params.heads[i], name).data = address

    def start(self) -> None:
        """Launch on torch's current stream."""
        if self._grid:
            module, params = get_module(self._key.spec()), ctypes.addressof(self._params)
            launch(module, params, self._device, grid=self._grid, block=self._block, smem=self._smem)


def start(name: str, q: Heads, k: Heads, v: Heads | None, angles: Angles, params: RopeParams | None = None) -> None:
    """Launches operation `name` on checked tensors."""
    Rotation(name, [q, k] if v is None else [q, k, v], angles, params).start()


def _vector(heads: list[Heads], table: torch.Tensor | None, widths: tuple[int, ...]) -> int:
    """The widest vectors that every address and stride allows."""

    def allowed(vector: int) -> bool:
        return all(part.allows(vector) for part in heads) and (table is None or _is_aligned(table, min(4, vector)))

    return max(vector for vector in widths if vector == 1 or allowed(vector))


def _cta(columns: int, pairs: int, thread_bytes: int) -> tuple[int, int, int]:
    """Tokens of a CTA at a time, CTAs of a token, and threads of a CTA, for `columns` threads of a token.

    There are few tokens per CTA, because they wait for each other. Shared memory stays below the default limit: more
    would have to be enabled before a graph is captured.
    """

    def threads(tokens: int, ctas: int) -> int:
        return -(-columns * tokens // ctas // _WARP) * _WARP

    def fits(tokens: int, ctas: int = 1) -> bool:
        num = threads(tokens, ctas)
        return num <= PARALLEL_THREADS and num * thread_bytes + _tables_bytes(tokens, pairs) <= _SMEM

    if not fits(1):
        ctas = next(ctas for ctas in range(2, columns + 1) if fits(1, ctas))
        return 1, ctas, threads(1, ctas)
    most = max(tokens for tokens in range(1, PARALLEL_THREADS // columns + 1) if fits(tokens))
    tokens = next((tokens for tokens in range(1, most) if threads(tokens, 1) >= _LEAST_THREADS), most)
    return tokens, 1, threads(tokens, 1)


def _tables_bytes(tokens: int, pairs: int) -> int:
    """Two stages of rotations of 8 bytes, and of tokens of 16 for TURNS_OF_TOKENS turns each."""
    return 2 * tokens * (8 * pairs + 16 * TURNS_OF_TOKENS)


def _resident(device: torch.device, threads: int, smem: int) -> int:
    """CTAs that run at the same time, of a kernel whose registers allow _THREADS_OF_SM threads."""
    if not on_cuda(device):
        return 1
    of_sm: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_multiprocessor", 100 << 10)
    return max_ctas(device, max(1, min(_THREADS_OF_SM // threads, of_sm // (smem + 1024))))


def _lanes(heads: list[Heads], vector: int, device: torch.device) -> int:
    """Threads per head: one for each pair of vectors; with a norm, a warp or a part of one, which can sum."""
    if not on_cuda(device):
        return 1
    units = max(part.units(vector) for part in heads)
    if all(part.weight is None for part in heads):
        return units
    return min(32, 1 << (units - 1).bit_length())
