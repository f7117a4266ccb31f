"""Rows of tokens in a cache of latents: their formats, and those that a list chooses, gathered from one or two caches.

A row holds the numbers of a latent, their scales, and the rest of the key in bfloat16. Attention kernels read rows with
float32 scales as they are (cached_parts() in engine/tensors.py). Other rows, and the tokens of two caches, are gathered
as 16-bit keys by a launch before attention, into memory that the call allocates.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from quire.engine.checks import check_same_device, check_shape, check_tensor
from quire.engine.device import target_of
from quire.engine.launch import launch, row_grid
from quire.engine.schedule import check_count
from quire.errors import UnsupportedError, ValidationError
from quire.jit import get_module
from quire.kernels.features import dtype_of
from quire.kernels.operation import OPERATIONS, PARALLEL_THREADS, OperationKey
from quire.kernels.params import FastDivisor, GatherLatentsParams, LatentCache

__all__ = ["FORMATS", "Chosen", "RowFormat", "format_of", "gather_chosen"]

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
_PLAIN, _E4M3, _FLOAT_SCALES, _POWER_SCALES = range(4)  #: LatentRows in kernels/gather_latents.h


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
