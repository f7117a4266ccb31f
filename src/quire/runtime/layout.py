"""How keys and values lie in memory: every layout of the surface becomes pointers and strides.

A paged cache is a 5-D tensor (keys at [:, 0], values at [:, 1]) or a pair of 4-D tensors; a page is NHD
[page_size, num_kv_heads, head_dim] or HND [num_kv_heads, page_size, head_dim]. Only the last dimension must be
contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ValidationError
from quire.kernels.operands import View
from quire.runtime.checks import check_contiguous_last, check_tensor
from quire.types import KVLayout

PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KVView:
    """Keys or values as the kernels see them: [page, token, head, head_dim] by strides, in elements."""

    tensor: torch.Tensor  #: the storage, which must outlive the call
    pointer: int
    num_pages: int  #: pages; ragged: 1
    num_tokens: int  #: tokens of a page; ragged: in all
    num_heads: int
    head_dim: int
    page_stride: int
    token_stride: int
    head_stride: int

    @property
    def as_operand(self) -> View:
        """Dimensions in the order of kernels/operands.py."""
        sizes = self.num_pages, self.num_tokens, self.num_heads, self.head_dim
        return View(self.pointer, sizes, (self.page_stride, self.token_stride, self.head_stride, 1))

    @property
    def num_bytes(self) -> int:
        """From the first element to the end of the last."""
        view = self.as_operand
        return span_bytes(view.sizes, view.strides, self.tensor.dtype)


def span_bytes(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element of a tensor to the end of the last; 0 without elements."""
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return 0 if 0 in sizes else (last + 1) * dtype.itemsize


def _view(tensor: torch.Tensor, name: str, layout: KVLayout) -> KVView:
    """A 4-D tensor of pages."""
    check_contiguous_last(tensor, name)
    token, head = (1, 2) if layout is KVLayout.NHD else (2, 1)
    shape, stride = tensor.shape, tensor.stride()
    return KVView(
        tensor, tensor.data_ptr(), shape[0], shape[token], shape[head], shape[3], stride[0], stride[token], stride[head]
    )


def ragged_view(tensor: torch.Tensor, name: str, layout: KVLayout) -> KVView:
    """A ragged tensor: NHD [nnz_kv, num_kv_heads, head_dim] or HND [num_kv_heads, nnz_kv, head_dim]."""
    check_tensor(tensor, name)
    if tensor.dim() != 3:
        dims = "nnz_kv, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, nnz_kv"
        raise ValidationError(f"{name}: expected [{dims}, head_dim], got {list(tensor.shape)}.")
    return _view(tensor.unsqueeze(0), name, layout)


def cache_tensors(cache: Any) -> tuple[torch.Tensor, ...]:
    """The one or two tensors that a paged cache is made of."""
    if isinstance(cache, torch.Tensor):
        return (cache,)
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        return cache[0], cache[1]
    raise ValidationError(
        f"paged_kv_cache: expected a tensor or a pair (k_cache, v_cache), got {type(cache).__name__}."
    )


def cache_view(cache: tuple[torch.Tensor, ...], layout: KVLayout, page_size: int) -> tuple[KVView, KVView]:
    """Keys and values of the tensors of a paged cache. With page_size 1 the page dimension may be left out."""
    if len(cache) == 2:
        k, v = cache
        return _pages(k, "paged_kv_cache[0]", layout, page_size), _pages(v, "paged_kv_cache[1]", layout, page_size)
    (tensor,) = cache
    full = tensor.unsqueeze(_page_dim(layout) + 1) if tensor.dim() == 4 and page_size == 1 else tensor
    if full.dim() != 5 or full.shape[1] != 2:
        page = "page_size, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, page_size"
        raise ValidationError(f"paged_kv_cache: expected [num_pages, 2, {page}, head_dim], got {list(tensor.shape)}.")
    return _view(full.select(1, 0), "paged_kv_cache", layout), _view(full.select(1, 1), "paged_kv_cache", layout)


def _page_dim(layout: KVLayout) -> int:
    return 1 if layout is KVLayout.NHD else 2


def _pages(tensor: torch.Tensor, name: str, layout: KVLayout, page_size: int) -> KVView:
    check_tensor(tensor, name)
    full = tensor.unsqueeze(_page_dim(layout)) if tensor.dim() == 3 and page_size == 1 else tensor
    if full.dim() != 4:
        page = "page_size, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, page_size"
        raise ValidationError(f"{name}: expected [num_pages, {page}, head_dim], got {list(tensor.shape)}.")
    return _view(full, name, layout)


def page_size_of(cache: PagedCache, layout: KVLayout) -> int:
    """Tokens of a page: 1 where that dimension is left out."""
    tensors = cache_tensors(cache)
    first = check_tensor(tensors[0], "paged_kv_cache")
    if first.dim() != (5 if len(tensors) == 1 else 4):
        return 1
    return first.shape[-3 if layout is KVLayout.NHD else -2]
