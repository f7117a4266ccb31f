"""The paged cache: appending to it, and the index arrays that describe it.

The API is FlashInfer's (https://docs.flashinfer.ai/api/page.html). Index arrays are int32, or int64 if the values fit
32 bits. Arrays on the host are checked before anything is written. Arrays on a device are not checked, because that
would wait for the device: a token whose position is not in the cache is skipped, and lengths beyond 32 bits give wrong
results.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quire.cache.quantization import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from quire.engine.checks import (
    batch_size_of,
    check_contiguous_last,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    to_int32,
)
from quire.engine.device import target_of
from quire.engine.launch import launch, row_grid
from quire.engine.operators import is_tracing, operator
from quire.engine.schedule import append_tables, check_offsets, check_range
from quire.engine.tensors import PagedCache, cache_tensors, cache_views
from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.features import KVLayout
from quire.kernels.operation import PARALLEL_THREADS, AppendParams, OperationKey

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]

_MOST = 2**31 - 1  #: of int32
_STRIDES = tuple(field[0] for field in AppendParams._fields_ if field[0].endswith("_stride"))


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: PagedCache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Write append_key, append_value [nnz, num_kv_heads, head_dim] into the cache.

    batch_indices, positions: [nnz]; token i is written to position positions[i] of request batch_indices[i]. Tokens
        with a negative request, or with a position beyond the pages of their request, are skipped. If two tokens have
        the same position in the same request, the result is a mixture of both.
    paged_kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim] (HND: heads before tokens) or a pair of such
        tensors without the second dimension, in the tokens' dtype. Its elements must not overlap in memory.
    kv_indices, kv_indptr [batch_size + 1], kv_last_page_len [batch_size]: the page table after appending, so the pages
        must already be allocated.

    Raises ValidationError naming the argument, before anything is written.

    >>> cache = torch.zeros(4, 2, 16, 2, 64)
    >>> int32 = {"dtype": torch.int32}
    >>> indptr, seq_lens = torch.tensor([0, 1, 3], **int32), torch.tensor([16, 18], **int32)  # 1 new token, then 2
    >>> batch_indices, positions = quire.get_batch_indices_positions(indptr, seq_lens, nnz=3)
    >>> positions.tolist()
    [15, 16, 17]
    >>> kv_indices, kv_indptr = torch.tensor([2, 0, 3], **int32), torch.tensor([0, 1, 3], **int32)
    >>> quire.append_paged_kv_cache(
    ...     torch.ones(3, 2, 64), torch.ones(3, 2, 64), batch_indices, positions, cache, kv_indices, kv_indptr,
    ...     kv_last_page_len=torch.tensor([16, 2], **int32),
    ... )
    >>> int(cache[2, 0, 15, 0, 0]), int(cache[3, 1, 1, 1, 5])
    (1, 1)
    """
    k_cache, *v_cache = cache_tensors(paged_kv_cache)
    _append(
        append_key, append_value, batch_indices, positions, k_cache, v_cache[0] if v_cache else None, kv_indices,
        kv_indptr, kv_last_page_len, kv_layout,
    )  # fmt: skip


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor, append_kpe: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:  # fmt: skip
    """append_paged_kv_cache() for a cache of MLA latents: append_ckv [nnz, head_dim_ckv] into ckv_cache [num_pages,
    page_size, head_dim_ckv], append_kpe [nnz, head_dim_kpe] into kpe_cache [num_pages, page_size, head_dim_kpe].

    The tables are those of append_paged_kv_cache(). Raises ValidationError naming the argument.

    >>> int32 = {"dtype": torch.int32}
    >>> ckv_cache, kpe_cache = torch.zeros(4, 16, 512), torch.zeros(4, 16, 64)
    >>> quire.append_paged_mla_kv_cache(
    ...     torch.ones(1, 512), torch.ones(1, 64), torch.tensor([0], **int32), torch.tensor([17], **int32), ckv_cache,
    ...     kpe_cache, torch.tensor([2, 3], **int32), torch.tensor([0, 2], **int32), torch.tensor([2], **int32),
    ... )
    >>> int(ckv_cache[3, 1, 0]), int(kpe_cache[3, 1, 63])
    (1, 1)
    """
    tensors = {"append_ckv": append_ckv, "append_kpe": append_kpe, "ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
    for name, tensor in tensors.items():
        dims = ("nnz", "head_dim") if name.startswith("append") else ("num_pages", "page_size", "head_dim")
        check_shape(check_tensor(tensor, name), name, dict.fromkeys(dims))
    key, value, k_cache, v_cache = (tensor.unsqueeze(-2) for tensor in tensors.values())  # one head
    append_paged_kv_cache(
        key, value, batch_indices, positions, (k_cache, v_cache), kv_indices, kv_indptr, kv_last_page_len
    )


@operator("append_paged_kv_cache", writes="k_cache v_cache")
def _append(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor | None, kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor, kv_layout: str,
) -> None:  # fmt: skip
    k, v = cache_views(k_cache if v_cache is None else (k_cache, v_cache), KVLayout.of(kv_layout))
    device = k.device
    nnz = append_key.shape[0] if check_tensor(append_key, "append_key").dim() else 0
    for tensor, name, view in ((append_key, "append_key", k), (append_value, "append_value", v)):
        check_tensor(tensor, name)
        check_shape(tensor, name, {"nnz": nnz, "num_kv_heads": view.shape[2], "head_dim": view.shape[3]})
        check_same_device(tensor, name, device)
        check_contiguous_last(tensor, name)
        if tensor.dtype is not view.dtype:
            raise ValidationError(f"{name}: expected the cache's dtype {view.dtype}, got {tensor.dtype}.")
    tables, batch = append_tables(batch_indices, positions, kv_indices, kv_indptr, nnz, k, kv_last_page_len)
    if nnz and batch and k.shape[0]:
        _launch(append_key, append_value, k, v, tables, batch)


def _launch(
    key: torch.Tensor, value: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: dict[str, torch.Tensor],
    batch: int,
) -> None:  # fmt: skip
    num_pages, page_size, num_kv_heads, head_dim_k = k.shape
    strides = *key.stride()[:2], *value.stride()[:2], *k.stride()[:3], *v.stride()[:3]
    params = AppendParams(
        key=key.data_ptr(), value=value.data_ptr(), k_cache=k.data_ptr(), v_cache=v.data_ptr(),
        **{name: table.data_ptr() for name, table in tables.items()}, **dict(zip(_STRIDES, strides, strict=True)),
        nnz=key.shape[0], num_indices=tables["kv_indices"].shape[0], batch_size=min(batch, _MOST),
        num_pages=min(num_pages, _MOST),  # page numbers have 32 bits
        num_kv_heads=num_kv_heads, head_dim_k=head_dim_k, head_dim_v=v.shape[3], page_size=page_size,
    )  # fmt: skip
    size, vector = key.element_size(), 16 // key.element_size()
    counts, pointers = (*strides, head_dim_k, v.shape[3]), (t.data_ptr() for t in (key, value, k, v))
    if any(n % vector for n in counts) or any(p % 16 for p in pointers):
        vector = 1  # 16 bytes at a time where every address and stride allows it, else an element
    module = get_module(OperationKey("append", target_of(key.device), f"u{8 * size}", vector).spec())
    grid = row_grid(key.shape[0], num_kv_heads * (max(head_dim_k, v.shape[3]) // vector))
    launch(module, ctypes.addressof(params), key.device, grid=grid, block=PARALLEL_THREADS)


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of tokens of each request, int32 [batch_size]; 0 for a request without pages.

    kv_indptr: [batch_size + 1], offsets into page numbers; kv_last_page_len: [batch_size], 1..page_size. Raises
    ValidationError naming the argument.

    >>> kv_indptr, kv_last_page_len = torch.tensor([0, 2, 3]), torch.tensor([5, 16])
    >>> quire.get_seq_lens(kv_indptr, kv_last_page_len, page_size=16)
    tensor([21, 16], dtype=torch.int32)
    """
    batch = batch_size_of(check_tensor(kv_indptr, "kv_indptr"), "kv_indptr")
    size = check_positive(page_size, "page_size")
    check_tensor(kv_last_page_len, "kv_last_page_len")
    check_shape(kv_last_page_len, "kv_last_page_len", {"batch_size": batch})
    check_same_device(kv_last_page_len, "kv_last_page_len", kv_indptr.device)
    indptr, last = to_int32(kv_indptr, "kv_indptr"), to_int32(kv_last_page_len, "kv_last_page_len")
    pages = indptr.long().diff()
    lens = torch.where(pages > 0, (pages - 1) * size + last, 0)
    if lens.is_cpu and not is_tracing():
        check_offsets(indptr, "kv_indptr", _MOST)  # of a part of a batch
        check_range(last[pages > 0], "kv_last_page_len", 1, size, f"1..page_size={size}")
        check_range(lens, "kv_indptr", 0, _MOST, f"requests of less than 2^31 tokens with page_size={size}")
    return lens.int()


def get_batch_indices_positions(
    append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The request of each of `nnz` appended tokens, and its position in that request: two tensors int32 [nnz].

    append_indptr [batch_size + 1] are offsets into the tokens; seq_lens [batch_size] are the lengths after appending:
    the last new token of request b has position seq_lens[b] - 1. Tokens beyond append_indptr[-1] get request -1,
    which append_paged_kv_cache() skips. The outputs are written into `batch_indices` and `positions` if given. Raises
    ValidationError naming the argument.

    >>> append_indptr, seq_lens = torch.tensor([0, 2, 3]), torch.tensor([9, 17])  # two new tokens, and one
    >>> requests, positions = quire.get_batch_indices_positions(append_indptr, seq_lens, 3)
    >>> requests.tolist(), positions.tolist()
    ([0, 0, 1], [7, 8, 16])
    """
    batch = batch_size_of(check_tensor(append_indptr, "append_indptr"), "append_indptr")
    indptr = to_int32(append_indptr, "append_indptr").contiguous()
    check_tensor(seq_lens, "seq_lens")
    check_shape(seq_lens, "seq_lens", {"batch_size": batch})
    check_same_device(seq_lens, "seq_lens", indptr.device)
    lens = to_int32(seq_lens, "seq_lens")
    if isinstance(nnz, bool) or not isinstance(nnz, int) or not 0 <= nnz <= 1 << 26:
        raise ValidationError(f"nnz: expected a number of tokens up to 2^26, got {nnz!r}.")
    for out, name in ((batch_indices, "batch_indices"), (positions, "positions")):
        _check_into(out, name, nnz, indptr.device)
    if indptr.is_cpu and not is_tracing():
        check_offsets(indptr, "append_indptr")
        check_range(lens.long() - indptr.diff(), "seq_lens", 0, _MOST, "at least as many tokens as are appended")
    token = torch.arange(nnz, device=indptr.device, dtype=torch.int32)
    request = torch.searchsorted(indptr, token, right=True) - 1
    if batch == 0:
        result = torch.full((2, nnz), -1, dtype=torch.int32, device=indptr.device)
    else:
        valid, at = (request >= 0) & (request < batch), request.clamp(0, batch - 1)
        position = lens[at] - (indptr[at + 1] - token)
        result = torch.stack((torch.where(valid, request, -1), torch.where(valid, position, 0))).to(torch.int32)
    return _into(result[0], batch_indices), _into(result[1], positions)


def _check_into(out: Any, name: str, nnz: int, device: torch.device) -> None:
    if out is not None:
        check_output(out, name)
        check_shape(out, name, {"nnz": nnz})
        check_same_device(out, name, device)
        if out.dtype is not torch.int32:
            raise ValidationError(f"{name}: expected dtype torch.int32, got {out.dtype}.")


def _into(values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return values if out is None else out.copy_(values)
