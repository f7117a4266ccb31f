"""Rows of tokens in a cache of latents (MLA): their formats, those that a list chooses, and appending them.

A row holds the numbers of a latent, their scales, and the rest of the key in bfloat16. Kernels read rows with float32
scales as they are. Other rows, and tokens of two caches, are gathered as 16-bit keys by a launch before attention.

Appending has names and arguments of vLLM's operators (vllm/_custom_ops.py). Token i is written to row slot_mapping[i] %
page_size of page slot_mapping[i] // page_size; a token with a negative entry is not written. Index arrays on the host
are checked before anything is written. slot_mapping and positions on a device are not, because that would wait for the
device: a token whose page is beyond the cache is skipped, and a token with an invalid position gets NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from quire.engine.checks import check_output, check_same_device, check_shape, check_tensor, flag, shape_of
from quire.engine.device import on_cuda, target_of
from quire.engine.launch import launch, row_grid
from quire.engine.operators import operator
from quire.engine.rotate import INPUTS, Angles, check_heads, rotary_dim_of
from quire.engine.schedule import check_count, check_range
from quire.engine.tensors import check_apart
from quire.errors import UnsupportedError, ValidationError
from quire.jit import get_module
from quire.kernels.features import TILE_DIMS, dtype_of
from quire.kernels.operation import (
    LATENT_HEADS,
    LATENT_THREADS,
    OPERATIONS,
    PARALLEL_THREADS,
    AppendLatentsParams,
    GatherLatentsParams,
    LatentCache,
    OperationKey,
)
from quire.kernels.params import FastDivisor

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_PLAIN, _E4M3, _FLOAT_SCALES, _POWER_SCALES = range(4)  #: LatentRows in kernels/gather_latents.h
LATENT_DIM = 512  #: of a latent of MLA, where one tensor holds it and the rest of a key
#: Bytes of FlashMLA's row of a token: 512 e4m3 numbers, a float32 scale for each 128 of them, 64 bfloat16 numbers.
ROW_BYTES = 656


class RowFormat(NamedTuple):
    """A row of a token in a page."""

    name: str  #: FlashMLA's
    dims: int  #: of a key
    row_bytes: int  #: of a token, with its scales
    latent_dims: int  #: in 8 bits; the rest of the key is in bfloat16
    kind: int
    scale_dims: int  #: dims with a common scale
    scale_bytes: int  #: of the scales of a token
    has_scales_behind: bool  #: the scales of all tokens of a page lie behind its rows, and not in each

    @property
    def step(self) -> int:
        """Bytes from a row to the next one, without scales behind the rows."""
        return self.row_bytes - self.scale_bytes * self.has_scales_behind

    def fields(self, pages: torch.Tensor, name: str) -> dict[str, int]:
        """The places in a cache [num_pages, page_size, bytes], as fields of appending. ValidationError if rows have
        gaps where they may have none, or tokens are no multiple of 4 bytes apart.
        """
        page_bytes, row_bytes, contiguous = pages.stride()
        if self.has_scales_behind and pages.shape[1] > 1 and row_bytes != self.row_bytes:
            raise ValidationError(
                f"{name}: expected pages without gaps in them, whose rows are {self.row_bytes} bytes apart, got "
                f"strides {pages.stride()}."
            )
        row_bytes = self.step if self.has_scales_behind else row_bytes
        if contiguous != 1 or pages.data_ptr() % 4 or page_bytes % 4 or row_bytes % 4:
            raise ValidationError(
                f"{name}: expected pages [num_pages, page_size, {self.row_bytes}] of bytes, rows contiguous and at "
                f"multiples of 4 bytes, got {list(pages.shape)} with strides {list(pages.stride())}."
            )
        behind = self.has_scales_behind
        return {
            "page_bytes": page_bytes, "row_bytes": row_bytes, "k_pe_at": self.rest_at, "scale_dims": self.scale_dims,
            "scales_at": self.step * pages.shape[1] if behind else self.latent_dims,
            "scale_bytes": self.scale_bytes if behind else row_bytes, "has_powers": int(self.kind == _POWER_SCALES),
        }  # fmt: skip

    @property
    def rest_at(self) -> int:
        """Bytes of a row before the rest of its key."""
        return self.latent_dims + self.scale_bytes * (not self.has_scales_behind)


FORMATS = (
    RowFormat("V32", 576, 656, 512, _FLOAT_SCALES, 128, 16, False),
    RowFormat("V32_NO_ROPE", 512, 528, 512, _FLOAT_SCALES, 128, 16, False),
    RowFormat("V4", 512, 584, 448, _POWER_SCALES, 64, 8, True),
)


def format_of(cache: torch.Tensor, dims: int) -> RowFormat | None:
    """The format of a cache [..., bytes] of keys of `dims` dims; None if it has plain numbers."""
    if cache.dtype not in _BYTES:
        return None
    return next((found for found in FORMATS if (found.row_bytes, found.dims) == (cache.shape[-1], dims)), None)


class Chosen(NamedTuple):
    """Tokens of a cache that each of some rows of queries attends to."""

    cache: torch.Tensor  #: [num_pages, page_size, numbers or bytes]
    indices: torch.Tensor  #: int32 [rows, top_k], page * page_size + index in the page; others name no token
    lens: torch.Tensor | None  #: int32, how many of the indices count: [rows], or [rows / n] for each n rows; None: all
    name: str  #: of the cache, in errors

    def params(self, dims: int, dtype: torch.dtype) -> LatentCache:
        """For the kernel."""
        cache, own = self.cache, format_of(self.cache, dims)
        num_pages, page_size, _ = cache.shape
        size, num_tokens = cache.element_size(), num_pages * page_size
        check_count(num_tokens, self.name, "tokens")
        page_bytes, row_bytes = cache.stride(0) * size, cache.stride(1) * size
        if own is None and cache.shape[-1] != dims:
            widths = ", ".join(f"{found.row_bytes} bytes ({found.name})" for found in FORMATS if found.dims == dims)
            raise ValidationError(
                f"{self.name}: expected rows of {dims} numbers, or {widths}; got {list(cache.shape)}."
            )
        if own is None and cache.dtype not in (dtype, *_BYTES):
            raise ValidationError(f"{self.name}: expected dtype {dtype} or 8 bits, got {cache.dtype}.")
        places = {} if own is None else own.fields(cache, self.name)
        row_bytes = places.get("row_bytes", row_bytes)
        if cache.stride(2) != 1:
            raise ValidationError(f"{self.name}: expected contiguous rows, got strides {cache.stride()}.")
        params = LatentCache(
            pages=cache.data_ptr(), indices=self.indices.data_ptr(),
            lens=None if self.lens is None else self.lens.data_ptr(), indices_stride=self.indices.stride(0),
            page_bytes=page_bytes, row_bytes=row_bytes, page=FastDivisor.of(page_size), top_k=self.indices.shape[1],
            num_tokens=num_tokens, latent_dims=dims, kind=_PLAIN if cache.dtype is dtype else _E4M3, scale_dims=1,
            rows_of_len=1 if self.lens is None else self.indices.shape[0] // max(1, self.lens.shape[0]),
        )  # fmt: skip
        if own is not None:
            params.latent_dims, params.kind, params.rest_at = own.latent_dims, own.kind, places["k_pe_at"]
            params.scales_at, params.scale_bytes = places["scales_at"], places["scale_bytes"]
            params.scale_dims = own.scale_dims
        return params


def check_chosen(cache: Any, name: str, dims: int, device: torch.device) -> torch.Tensor:
    """A cache [num_pages, page_size, 1, numbers or bytes] as [num_pages, page_size, numbers or bytes]."""
    check_shape(check_tensor(cache, name), name, {"num_pages": None, "page_size": None, "num_heads_k": 1, "dims": None})
    check_same_device(cache, name, device)
    pages: torch.Tensor = cache.squeeze(2)
    if not pages.shape[1]:
        raise ValidationError(f"{name}: expected pages of a token or more, got {list(cache.shape)}.")
    if format_of(pages, dims) is None and pages.shape[-1] != dims:
        known = [f"{found.row_bytes} bytes ({found.name})" for found in FORMATS if found.dims == dims]
        raise UnsupportedError(
            f"{name}: expected rows of {dims} numbers or of {' or '.join(known)}, as q has {dims} dims; got "
            f"{list(cache.shape)} {cache.dtype}."
        )
    return pages


def gather_chosen(caches: Sequence[Chosen], dims: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that one or two caches' lists choose for each row, of `dtype`: [rows * top_k, 1, dims], and where they
    are, int32 [rows, top_k], -1 in the place of an index that names none. top_k: of both lists. Keys at such places are
    not written.
    """
    first, device = caches[0], caches[0].cache.device
    rows, top_k = first.indices.shape[0], sum(chosen.indices.shape[1] for chosen in caches)
    check_count(rows * top_k, "indices", "chosen tokens; attend to fewer queries at a time")
    keys = torch.empty(rows * top_k, 1, dims, dtype=dtype, device=device)
    table = torch.empty(rows, top_k, dtype=torch.int32, device=device)
    params = GatherLatentsParams(
        out=keys.data_ptr(), table=table.data_ptr(), token_stride=keys.stride(0), num_rows=rows, top_k=top_k, dims=dims
    )
    for i, chosen in enumerate(caches):
        params.caches[i] = chosen.params(dims, dtype)
    if rows * top_k:
        slug = dtype_of(dtype, "q").slug
        narrow, wide = OPERATIONS["gather_latents"].widths[slug]
        vector = wide if all(map(_has_vectors, params.caches[: len(caches)])) else narrow
        module = get_module(OperationKey("gather_latents", target_of(device), slug, vector).spec())
        grid = row_grid(rows * top_k, dims // vector)
        launch(module, ctypes.addressof(params), device, grid=grid, block=PARALLEL_THREADS)
    return keys, table


def _has_vectors(cache: LatentCache) -> bool:
    """Whether rows, and the rest of keys in them, lie at multiples of 16 bytes."""
    return not any(place % 16 for place in (cache.pages, cache.page_bytes, cache.row_bytes, cache.rest_at))


def latent_parts(value: Any, name: str, latent: str = "", rest: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """The latent part and the rest of queries or keys of multi-head latent attention (MLA): a pair of 3-D tensors, or
    views of one in which they are side by side. FlashInfer's (pair, tensor) is its pair. `latent` and `rest` are the
    names of a pair's tensors.
    """
    if type(value) is tuple and len(value) == 2 and getattr(value[0], "ndim", 0) == getattr(value[1], "ndim", 0) == 3:
        return value
    if isinstance(value, torch.Tensor):
        return _split(value, name)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValidationError(f"{name}: expected a tensor or a pair of tensors, got {type(value).__name__}.")
    pair = next((part for part in value if isinstance(part, (tuple, list))), value)
    if len(pair) != 2:
        raise ValidationError(f"{latent}: expected a tensor of 3 dimensions, got {type(value[0]).__name__}.")
    for tensor, part in zip(pair, (latent, rest), strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValidationError(f"{part}: expected a tensor of 3 dimensions, got {got}.")
    return pair[0], pair[1]


def _split(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent part and the rest of a tensor that has both side by side."""
    try:
        shape = tensor.shape
        if len(shape) == 3 and shape[-1] > LATENT_DIM:
            return tensor.split_with_sizes((LATENT_DIM, shape[-1] - LATENT_DIM), -1)  # type: ignore[return-value]
    except RuntimeError:  # a nested tensor, a sparse one, or one whose memory was freed
        check_tensor(tensor, name)
        raise
    raise ValidationError(f"{name}: expected 3 dimensions, {LATENT_DIM} + 64 the last, got {list(shape)}.")


def is_packed(cache: Any) -> bool:
    """Whether a cache of latents is one of rows of ROW_BYTES, as bytes or as 8-bit numbers."""
    return getattr(cache, "dtype", None) in _BYTES and (shape_of(cache) or (0,))[-1] == ROW_BYTES


def cached_parts(cache: Any, name: str, latent: str = "", rest: str = "") -> tuple[torch.Tensor, ...]:
    """latent_parts() of a cache; of rows of ROW_BYTES also the scales."""
    return _packed_parts(cache, name) if is_packed(cache) else latent_parts(cache, name, latent, rest)


def _packed_parts(cache: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of pages [num_pages, page_size, ROW_BYTES]: latents e4m3, the rest of keys bfloat16, and the scales."""
    ends = LATENT_DIM + 4 * (LATENT_DIM // TILE_DIMS)
    types = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    try:
        parts = cache[..., :LATENT_DIM], cache[..., ends:], cache[..., LATENT_DIM:ends]
        latents, rest, scales = (part.view(dtype) for part, dtype in zip(parts, types, strict=True))
    except RuntimeError as error:  # rows that are not contiguous, or no multiple of 4 bytes apart
        check_tensor(cache, name)
        raise ValidationError(
            f"{name}: expected pages [num_pages, page_size, {ROW_BYTES}] of bytes, rows contiguous and at multiples of "
            f"4 bytes, got {list(cache.shape)} with strides {list(cache.stride())}."
        ) from error
    return latents, rest, scales


# --- appending -------------------------------------------------------------------------------------------------------


_ROWS = "fp8_ds_mla"  #: vLLM's name of FlashMLA's rows of 656 and 584 bytes
#: LatentType in kernels/append_latents.h, and torch's type, by vLLM's names
_EIGHT_BITS = {
    "fp8": (1, torch.float8_e4m3fn), "fp8_e4m3": (1, torch.float8_e4m3fn), "fp8_e5m2": (2, torch.float8_e5m2),
}  # fmt: skip


def concat_and_cache_mla(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:  # fmt: skip
    """Write latents kv_c [tokens, kv_lora_rank] and k_pe [tokens, rope_dim] to the rows that slot_mapping gives.

    kv_cache: [num_pages, page_size, kv_lora_rank + rope_dim], in the tokens' dtype with kv_cache_dtype "auto". With
        "fp8", "fp8_e4m3" and "fp8_e5m2" it has 8-bit numbers (dtype uint8 or the 8-bit type), divided by `scale`,
        float32 [1] on the device; the other formats do not use `scale`. With "fp8_ds_mla" it has FlashMLA's rows of
        uint8 [num_pages, page_size, 656], for bfloat16 tokens of 512 + 64 dims: float8_e4m3fn numbers, a float32 scale
        for each 128 of them, such that the largest becomes 448, and k_pe unchanged. Or rows of 584 bytes (DeepSeek V4),
        for tokens of 448 + 64 dims: numbers and k_pe, and behind all of a page 8 bytes for each token, of which 7 are
        scales of 64 numbers each, the least powers of two such that none is beyond 448. Pages may have gaps between
        them.
    slot_mapping: int64 [tokens], page * page_size + row in the page; negative: the token is not written. If it is
        shorter than kv_c, the last tokens are not written.

    Raises ValidationError naming the argument, before anything is written.

    >>> kv_c, k_pe = torch.randn(2, 512).bfloat16(), torch.randn(2, 64).bfloat16()
    >>> kv_cache, rows = torch.zeros(4, 16, 656, dtype=torch.uint8), torch.tensor([17, -1])
    >>> quire.mla.concat_and_cache_mla(kv_c, k_pe, kv_cache, rows, "fp8_ds_mla", torch.ones(1))
    >>> torch.equal(kv_cache[1, 1, 528:].view(torch.bfloat16), k_pe[0])
    True
    """
    _append(None, None, k_pe, kv_c, None, True, slot_mapping, kv_cache, kv_cache_dtype, scale)


def concat_and_cache_mla_rope_fused(
    positions: torch.Tensor, q_pe: torch.Tensor, k_pe: torch.Tensor, kv_c: torch.Tensor, cos_sin_cache: torch.Tensor,
    is_neox: bool, slot_mapping: torch.Tensor, kv_cache: torch.Tensor, kv_cache_dtype: str,
    kv_cache_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Rotate q_pe [tokens, num_heads, rope_dim] and k_pe [tokens, rope_dim] in place by `positions`, int32 or int64
    [tokens], and write kv_c and the rotated k_pe into the cache as concat_and_cache_mla() does.

    cos_sin_cache: float32 [max_position, rope_dim], cosines before sines. is_neox: dims i and i + rope_dim / 2 are
    a pair; False: 2 i and 2 i + 1. Tokens that are not written to the cache are rotated, too.

    Raises ValidationError naming the argument, before anything is written.

    >>> q_pe, k_pe, kv_c = torch.randn(2, 8, 64), torch.randn(2, 64), torch.randn(2, 512)
    >>> angles = torch.arange(8)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    >>> cos_sin_cache, kv_cache = torch.cat((angles.cos(), angles.sin()), dim=1), torch.zeros(4, 16, 576)
    >>> quire.mla.concat_and_cache_mla_rope_fused(
    ...     torch.tensor([3, 4]), q_pe, k_pe, kv_c, cos_sin_cache, True, torch.tensor([5, 6]), kv_cache, "auto",
    ...     torch.ones(1),
    ... )
    >>> torch.equal(kv_cache[0, 5:7, 512:], k_pe)
    True
    """
    flag(is_neox, "is_neox")
    check_tensor(positions, "positions"), check_tensor(q_pe, "q_pe"), check_tensor(cos_sin_cache, "cos_sin_cache")
    _append(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale)


@operator("append_latents", writes="q_pe k_pe kv_cache")
def _append(
    positions: torch.Tensor | None, q_pe: torch.Tensor | None, k_pe: torch.Tensor, kv_c: torch.Tensor,
    cos_sin_cache: torch.Tensor | None, is_neox: bool, slot_mapping: torch.Tensor, kv_cache: torch.Tensor,
    kv_cache_dtype: str, scale: torch.Tensor,
) -> None:  # fmt: skip
    check_heads(kv_c, "kv_c", {"tokens": None, "kv_lora_rank": None})
    check_heads(k_pe, "k_pe", {"tokens": kv_c.shape[0], "rope_dim": None}, kv_c)
    row = _row(kv_cache, kv_cache_dtype, kv_c, k_pe)
    rows, divisor = _rows(slot_mapping, kv_c, kv_cache), _scale(scale, kv_c.device)
    nnz = rows.shape[0]
    params = AppendLatentsParams(
        k_pe=k_pe.data_ptr(), ckv=kv_c.data_ptr(), cache=kv_cache.data_ptr(), cache_rows=rows.data_ptr(),
        kv_scale=divisor.data_ptr(), nnz=nnz, k_token_stride=k_pe.stride(0), ckv_token_stride=kv_c.stride(0),
        rope_dim=k_pe.shape[1], latent_dim=kv_c.shape[1], num_pages=kv_cache.shape[0], page_size=kv_cache.shape[1],
        interleave=not is_neox, **row,
    )  # fmt: skip
    read, written = {"kv_c": kv_c, "k_pe": k_pe}, {"kv_cache": kv_cache}
    if q_pe is not None and cos_sin_cache is not None:
        places = _positions(positions, q_pe, k_pe, cos_sin_cache, nnz)
        read, written = (
            {"kv_c": kv_c},
            {**written, "q_pe": check_output(q_pe, "q_pe"), "k_pe": check_output(k_pe, "k_pe")},
        )
        params.q_pe, params.num_heads = q_pe.data_ptr(), q_pe.shape[1]
        params.q_token_stride, params.q_head_stride, _ = q_pe.stride()
        params.pos_ids, params.has_long_pos_ids = places.data_ptr(), places.dtype is torch.int64
        params.cos_sin_cache, params.cos_sin_stride = cos_sin_cache.data_ptr(), cos_sin_cache.stride(0)
        params.num_positions = min(cos_sin_cache.shape[0], 2**31 - 1)
    check_apart(written, read)
    if nnz:
        _launch(params, kv_c)


def _launch(params: AppendLatentsParams, like: torch.Tensor) -> None:
    """Launch on torch's current stream, with the widest vectors that all addresses and strides allow."""
    slug = INPUTS[like.dtype]
    vector = max(n for n in OPERATIONS["append_latents"].widths[slug] if n == 1 or _allows(params, n, like.itemsize))
    if params.scale_dims and vector == 1 and on_cuda(like.device):
        raise ValidationError(
            "kv_c, k_pe, q_pe, kv_cache: expected addresses and strides that are multiples of 16 bytes; call "
            ".contiguous() on them."
        )
    threads = (-(-params.num_heads // LATENT_HEADS) + 1) * (params.rope_dim // (2 * vector))
    columns = LATENT_THREADS + -(-threads // 32) * 32
    module = get_module(OperationKey("append_latents", target_of(like.device), slug, vector).spec())
    grid = -(-params.nnz * columns // PARALLEL_THREADS)
    launch(module, ctypes.addressof(params), like.device, grid=grid, block=PARALLEL_THREADS)


def _allows(p: AppendLatentsParams, vector: int, size: int) -> bool:
    """Whether dims, addresses and strides are whole vectors of numbers of `size` bytes."""
    strides = p.q_token_stride, p.q_head_stride, p.k_token_stride, p.ckv_token_stride, p.latent_dim, p.rope_dim // 2
    written = vector * (1 if p.latent_type and p.k_pe_type else size)  # bytes
    places = p.cache, p.page_bytes, p.row_bytes, p.k_pe_at
    if any(n % vector for n in strides) or any(n % written for n in places) or p.cos_sin_stride % min(4, vector):
        return False
    addresses = ((p.q_pe, vector * size), (p.k_pe, vector * size), (p.ckv, vector * size), (p.cos_sin_cache, 16))
    return not any((address or 0) % step for address, step in addresses)


def _row(kv_cache: Any, dtype: Any, kv_c: torch.Tensor, k_pe: torch.Tensor) -> dict[str, int]:
    """The format of a row of the cache, as fields of the parameter struct."""
    if dtype not in ("auto", _ROWS, *_EIGHT_BITS):
        raise ValidationError(f"kv_cache_dtype: expected 'auto', {_ROWS!r} or one of {[*_EIGHT_BITS]}, got {dtype!r}.")
    cache, dims = check_output(kv_cache, "kv_cache"), (kv_c.shape[1], k_pe.shape[1])
    check_same_device(cache, "kv_cache", kv_c.device)
    for size, what in zip(cache.shape, ("pages", "tokens of a page"), strict=False):
        check_count(size, "kv_cache", what)
    if dims[1] % 2:
        raise ValidationError(f"k_pe: expected an even number of dims, got {dims[1]}.")
    if dtype == _ROWS:
        found = format_of(cache, sum(dims)) if cache.dim() == 3 else None
        if found is None or dims != (found.latent_dims, 64) or kv_c.dtype is not torch.bfloat16:
            raise ValidationError(
                f"kv_cache: expected rows of 656 bytes, of bfloat16 tokens of 512 + 64 dims, or of 584, of 448 + 64 "
                f"dims, for {_ROWS!r}; got {list(cache.shape)} {cache.dtype} for tokens of {dims[0]} + {dims[1]} "
                f"{kv_c.dtype}."
            )
        return found.fields(cache, "kv_cache") | {"latent_type": 1, "k_pe_type": 0}
    check_shape(cache, "kv_cache", {"num_pages": None, "page_size": None, "kv_lora_rank + rope_dim": sum(dims)})
    check_count(sum(dims) * kv_c.itemsize, "kv_c, k_pe", "bytes of a token")
    code, wanted = (0, kv_c.dtype) if dtype == "auto" else _EIGHT_BITS[dtype]
    if cache.dtype not in (wanted, *((torch.uint8,) if code else ())) or cache.stride(-1) != 1:
        raise ValidationError(
            f"kv_cache: expected contiguous rows of {wanted} with kv_cache_dtype={dtype!r}, got {cache.dtype} with "
            f"strides {cache.stride()}."
        )
    return {
        "page_bytes": cache.stride(0) * cache.itemsize, "row_bytes": cache.stride(1) * cache.itemsize,
        "k_pe_at": dims[0] * cache.itemsize, "latent_type": code, "k_pe_type": code,
    }  # fmt: skip


def _rows(slot_mapping: Any, kv_c: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    rows = check_tensor(slot_mapping, "slot_mapping")
    check_shape(rows, "slot_mapping", {"tokens": None})
    check_same_device(rows, "slot_mapping", kv_c.device)
    if rows.dtype is not torch.int64 or rows.shape[0] > kv_c.shape[0]:
        raise ValidationError(
            f"slot_mapping: expected int64 for at most {kv_c.shape[0]} tokens, got {rows.shape[0]} of {rows.dtype}."
        )
    if not on_cuda(kv_c.device):
        most = kv_cache.shape[0] * kv_cache.shape[1] - 1
        check_range(rows, "slot_mapping", -(2**63), most, "rows of the cache")
    return rows.contiguous()


def _scale(scale: Any, device: torch.device) -> torch.Tensor:
    check_same_device(check_tensor(scale, "scale"), "scale", device)
    if scale.dtype is not torch.float32 or scale.numel() != 1:
        raise ValidationError(f"scale: expected one float32, got {list(scale.shape)} of {scale.dtype}.")
    found: torch.Tensor = scale
    return found


def _positions(
    positions: Any, q_pe: torch.Tensor, k_pe: torch.Tensor, cos_sin_cache: torch.Tensor, nnz: int
) -> torch.Tensor:
    """Of the tokens, whose heads and angles are checked too."""
    dim = k_pe.shape[1]
    check_heads(q_pe, "q_pe", {"tokens": nnz, "num_heads": None, "rope_dim": dim}, k_pe)
    if k_pe.shape[0] != nnz:
        raise ValidationError(f"slot_mapping: expected one for each of {k_pe.shape[0]} tokens, got {nnz}.")
    if rotary_dim_of(None, dim, cos_sin_cache, q_pe.device) != dim:
        raise ValidationError(
            f"cos_sin_cache: expected [max_position, rope_dim={dim}], got {list(cos_sin_cache.shape)}."
        )
    found = Angles(positions, None, None, cos_sin_cache, False, 1, 1).checked(nnz, q_pe.device, "positions").pos_ids
    assert found is not None
    return found
