"""The paged cache: appending to it, and the index arrays that describe it."""

from __future__ import annotations

import ctypes

import torch

from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import AppendParams
from quire.runtime.checks import (
    check_contiguous_last,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    to_int32,
)
from quire.runtime.launch import launch, row_grid
from quire.runtime.layout import KVView, PagedCache, cache_tensors, cache_view, page_size_of
from quire.runtime.target import target_of
from quire.types import KVLayout

_STRIDES = tuple(field[0] for field in AppendParams._fields_ if field[0].endswith("_stride"))

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write append_key, append_value [nnz, num_kv_heads, head_dim] into the cache.

    Token i goes to position positions[i] of request batch_indices[i]; a negative request skips it. The pages must be
    allocated already: kv_indptr [batch_size + 1], kv_indices and kv_last_page_len [batch_size] describe the state after
    appending. A token whose position is beyond the pages of its request, or whose page is beyond kv_indices or not in
    the cache, is skipped. dtypes of cache and tokens must be equal.
    """
    layout = KVLayout.of(kv_layout)
    check_tensor(append_key, "append_key")
    k, v = cache_view(cache_tensors(paged_kv_cache), layout, page_size_of(paged_kv_cache, layout))
    device = k.tensor.device
    nnz = append_key.shape[0] if append_key.dim() else 0
    for tensor, name, view in ((append_key, "append_key", k), (append_value, "append_value", v)):
        check_tensor(tensor, name)
        check_shape(tensor, name, {"nnz": nnz, "num_kv_heads": view.num_heads, "head_dim": view.head_dim})
        check_same_device(tensor, name, device)
        check_contiguous_last(tensor, name)
        if tensor.dtype is not view.tensor.dtype:
            raise ValidationError(f"{name}: expected the cache's dtype {view.tensor.dtype}, got {tensor.dtype}.")
    batch = _batch_size(kv_indptr, "kv_indptr")
    tables = {
        "batch_indices": _table(batch_indices, "batch_indices", nnz, device),
        "positions": _table(positions, "positions", nnz, device),
        "kv_indices": _table(kv_indices, "kv_indices", None, device),
        "kv_indptr": _table(kv_indptr, "kv_indptr", None, device),
    }
    _table(kv_last_page_len, "kv_last_page_len", batch, device)
    if nnz == 0 or batch <= 0:
        return
    _launch(append_key, append_value, k, v, tables, batch)


def _batch_size(indptr: torch.Tensor, name: str) -> int:
    """batch_size of offsets [batch_size + 1]."""
    check_tensor(indptr, name)
    if indptr.dim() != 1 or indptr.shape[0] == 0:
        raise ValidationError(f"{name}: expected [batch_size + 1] offsets, got {list(indptr.shape)}.")
    return indptr.shape[0] - 1


def _table(tensor: torch.Tensor, name: str, length: int | None, device: torch.device) -> torch.Tensor:
    check_tensor(tensor, name)
    check_shape(tensor, name, {"length": length})
    check_same_device(tensor, name, device)
    return to_int32(tensor, name).contiguous()


def _launch(
    key: torch.Tensor, value: torch.Tensor, k: KVView, v: KVView, tables: dict[str, torch.Tensor], batch: int
) -> None:
    params = AppendParams(
        key=key.data_ptr(), value=value.data_ptr(), k_cache=k.pointer, v_cache=v.pointer,
        **{name: table.data_ptr() for name, table in tables.items()},
        nnz=key.shape[0], num_indices=tables["kv_indices"].shape[0],
        key_token_stride=key.stride(0), key_head_stride=key.stride(1),
        value_token_stride=value.stride(0), value_head_stride=value.stride(1),
        k_page_stride=k.page_stride, k_token_stride=k.token_stride, k_head_stride=k.head_stride,
        v_page_stride=v.page_stride, v_token_stride=v.token_stride, v_head_stride=v.head_stride,
        batch_size=batch, num_pages=min(k.num_pages, v.num_pages), num_kv_heads=k.num_heads,
        head_dim_k=k.head_dim, head_dim_v=v.head_dim, page_size=k.num_tokens,
    )  # fmt: skip
    size = key.element_size()
    vector = _vector(params, size)
    module = get_module(OperationKey("append", target_of(key.device), f"u{8 * size}", vector).spec())
    grid = row_grid(key.shape[0], k.num_heads * (max(k.head_dim, v.head_dim) // vector))
    launch(module, ctypes.addressof(params), key.device, grid=grid, block=PARALLEL_THREADS)


def _vector(params: AppendParams, size: int) -> int:
    """Elements to move at a time: 16 bytes where every address and stride allows it, else one."""
    vector = 16 // size
    strides = [getattr(params, name) for name in _STRIDES]
    counts = [*strides, params.head_dim_k, params.head_dim_v]
    pointers = [params.key, params.value, params.k_cache, params.v_cache]
    return vector if all(n % vector == 0 for n in counts) and all(p % 16 == 0 for p in pointers) else 1


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request [batch_size], from its pages and the fill of its last one; 0 without pages."""
    batch = _batch_size(kv_indptr, "kv_indptr")
    check_tensor(kv_last_page_len, "kv_last_page_len")
    check_shape(kv_last_page_len, "kv_last_page_len", {"batch_size": batch})
    pages = to_int32(kv_indptr, "kv_indptr").diff()
    size = check_positive(page_size, "page_size")
    return torch.where(pages > 0, (pages - 1) * size + to_int32(kv_last_page_len, "kv_last_page_len"), 0)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of `nnz` appended tokens, its request and its position there, int32 [nnz].

    append_indptr [batch_size + 1] are offsets into the tokens; seq_lens [batch_size] are the lengths after appending,
    so that the new tokens of request b end at position seq_lens[b] - 1. Tokens beyond append_indptr[-1] get request -1.
    Nothing waits for the device. The two outputs are written into `batch_indices` and `positions` if given.
    """
    batch = _batch_size(append_indptr, "append_indptr")
    indptr = to_int32(append_indptr, "append_indptr")
    check_tensor(seq_lens, "seq_lens")
    check_shape(seq_lens, "seq_lens", {"batch_size": batch})
    check_same_device(seq_lens, "seq_lens", indptr.device)
    if isinstance(nnz, bool) or not isinstance(nnz, int) or nnz < 0:
        raise ValidationError(f"nnz: expected 0 or more, got {nnz!r}.")
    token = torch.arange(nnz, device=indptr.device, dtype=indptr.dtype)
    request = torch.searchsorted(indptr, token, right=True) - 1
    valid = (request >= 0) & (request < seq_lens.shape[0])
    if seq_lens.shape[0] == 0:
        result = torch.full((2, nnz), -1, dtype=torch.int32, device=indptr.device)
    else:
        at = request.clamp(0, seq_lens.shape[0] - 1)
        position = seq_lens[at].to(indptr.dtype) - (indptr[at + 1] - token)
        result = torch.stack((torch.where(valid, request, -1), torch.where(valid, position, 0))).to(torch.int32)
    return _into(result[0], batch_indices, "batch_indices"), _into(result[1], positions, "positions")


def _into(values: torch.Tensor, out: torch.Tensor | None, name: str) -> torch.Tensor:
    if out is None:
        return values
    check_tensor(out, name)
    check_shape(out, name, {"nnz": values.shape[0]})
    if out.dtype is not torch.int32:
        raise ValidationError(f"{name}: expected dtype torch.int32, got {out.dtype}.")
    return out.copy_(values)
