"""Memory layouts of keys and values: every layout of the API becomes [page, token, head, head_dim] with strides.

A paged cache is a 5-D tensor (keys at [:, 0], values at [:, 1]) or a pair of 4-D tensors; a page is NHD
[page_size, num_kv_heads, head_dim] or HND [num_kv_heads, page_size, head_dim]. Only the last dimension must be
contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.errors import ValidationError
from quire.kernels.operands import TILE_DIMS
from quire.runtime.checks import check_tensor
from quire.types import KVLayout

LATENT_DIM = 512  #: of a latent of MLA, where one tensor holds it and the rest of a key
#: Bytes of FlashMLA's row of a token: 512 e4m3 numbers, a float32 scale for each 128 of them, 64 bfloat16 numbers.
ROW_BYTES = 656
PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def span_bytes(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element of a tensor to the end of its last one; 0 without elements."""
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return 0 if 0 in sizes else (last + 1) * dtype.itemsize


def _tokens_first(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    return pages if layout is KVLayout.NHD else pages.transpose(1, 2)


def ragged_view(tensor: torch.Tensor, name: str, layout: KVLayout) -> torch.Tensor:
    """A ragged tensor, NHD [nnz_kv, num_kv_heads, head_dim] or HND [num_kv_heads, nnz_kv, head_dim], as one page."""
    check_tensor(tensor, name)
    if tensor.dim() != 3:
        dims = "nnz_kv, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, nnz_kv"
        raise ValidationError(f"{name}: expected [{dims}, head_dim], got {list(tensor.shape)}.")
    return _tokens_first(tensor.unsqueeze(0), layout)


def cache_tensors(cache: Any) -> tuple[torch.Tensor, ...]:
    """The one or two tensors that a paged cache is made of."""
    if isinstance(cache, torch.Tensor):
        return (cache,)
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        return cache[0], cache[1]
    raise ValidationError(
        f"paged_kv_cache: expected a tensor or a pair (k_cache, v_cache), got {type(cache).__name__}."
    )


def cache_view(cache: tuple[torch.Tensor, ...], layout: KVLayout, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tensors of a paged cache. With page_size 1 the page dimension may be left out."""
    if len(cache) == 2:
        k, v = (_pages(tensor, f"paged_kv_cache[{i}]", layout, page_size) for i, tensor in enumerate(cache))
        return k, v
    tensor = check_tensor(cache[0], "paged_kv_cache")
    if tensor.dim() not in ((4, 5) if page_size == 1 else (5,)) or tensor.shape[1] != 2:
        raise _wrong_shape("paged_kv_cache", "num_pages, 2", layout, tensor)
    k, v = (_pages(tensor.select(1, which), "paged_kv_cache", layout, page_size) for which in (0, 1))
    return k, v


def latent_parts(value: Any, name: str, latent: str = "", rest: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """The latent part and the rest of queries or keys of multi-head latent attention (MLA): a pair of 3-D tensors, or
    views of one in which they are side by side. FlashInfer's (pair, tensor) is its pair. `latent` and `rest` are the
    names of a pair's tensors.
    """
    if type(value) is tuple and len(value) == 2 and getattr(value[0], "ndim", 0) == getattr(value[1], "ndim", 0) == 3:
        return value
    if isinstance(value, torch.Tensor):
        if value.dim() != 3 or value.shape[-1] <= LATENT_DIM:
            raise ValidationError(
                f"{name}: expected 3 dimensions, {LATENT_DIM} + 64 the last, got {list(value.shape)}."
            )
        latents, others = value.split_with_sizes((LATENT_DIM, value.shape[-1] - LATENT_DIM), -1)
        return latents, others
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


def is_packed(cache: Any) -> bool:
    """Whether a cache of latents is one of rows of ROW_BYTES, as bytes or as 8-bit numbers."""
    dtype = getattr(cache, "dtype", None)
    return dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn) and cache.dim() > 0 and cache.shape[-1] == ROW_BYTES


def cached_parts(cache: Any, name: str, latent: str = "", rest: str = "") -> tuple[torch.Tensor, ...]:
    """latent_parts() of a cache; of rows of ROW_BYTES also the scales."""
    return _packed_parts(cache, name) if is_packed(cache) else latent_parts(cache, name, latent, rest)


def _packed_parts(cache: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of pages [num_pages, page_size, ROW_BYTES]: latents e4m3, the rest of keys bfloat16, and the scales."""
    ends = LATENT_DIM + 4 * (LATENT_DIM // TILE_DIMS)
    parts = cache[..., :LATENT_DIM], cache[..., ends:], cache[..., LATENT_DIM:ends]
    types = torch.float8_e4m3fn, torch.bfloat16, torch.float32
    try:
        latents, rest, scales = (part.view(dtype) for part, dtype in zip(parts, types, strict=True))
    except RuntimeError as error:  # rows that are not contiguous, or no multiple of 4 bytes apart
        raise ValidationError(
            f"{name}: expected pages [num_pages, page_size, {ROW_BYTES}] of bytes, rows contiguous and at multiples of "
            f"4 bytes, got {list(cache.shape)} with strides {list(cache.stride())}."
        ) from error
    return latents, rest, scales


def _pages(tensor: torch.Tensor, name: str, layout: KVLayout, page_size: int) -> torch.Tensor:
    check_tensor(tensor, name)
    if tensor.dim() == 3 and page_size == 1:
        return tensor.unsqueeze(1)
    if tensor.dim() != 4:
        raise _wrong_shape(name, "num_pages", layout, tensor)
    return _tokens_first(tensor, layout)


def _wrong_shape(name: str, pages: str, layout: KVLayout, tensor: torch.Tensor) -> ValidationError:
    page = "page_size, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, page_size"
    return ValidationError(f"{name}: expected [{pages}, {page}, head_dim], got {list(tensor.shape)}.")


def page_size_of(cache: PagedCache, layout: KVLayout) -> int:
    """Tokens of a page: 1 where that dimension is left out."""
    tensors = cache_tensors(cache)
    first = check_tensor(tensors[0], "paged_kv_cache")
    if first.dim() != (5 if len(tensors) == 1 else 4):
        return 1
    return first.shape[-3 if layout is KVLayout.NHD else -2]
