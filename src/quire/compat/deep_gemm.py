"""DeepGEMM's scores of an indexer (DeepSeek's sparse attention), with its names and semantics, over Quire's kernel.

    from quire.compat.deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

The API is that of https://github.com/deepseek-ai/DeepGEMM (csrc/apis/attention.hpp). The score of a query and a key is
the sum over heads of relu(q . k) * weight, times the scale of the key. quire.select_tokens() then chooses tokens by
their scores. Queries and keys are float8_e4m3fn; the number of heads is any, a head has a multiple of 16 dims up to
128, and a page any number of tokens. All functions may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quire.engine.checks import (
    check_flags,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    flag,
    to_int32,
)
from quire.engine.device import max_ctas, on_cuda, target_of
from quire.engine.launch import launch
from quire.engine.operators import operator
from quire.engine.schedule import check_count
from quire.errors import ValidationError, teach
from quire.jit import get_module
from quire.kernels.operation import MQA_LOGITS_SMEM, PARALLEL_THREADS, MqaLogitsParams, OperationKey
from quire.kernels.params import FastDivisor

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

_E4M3 = torch.float8_e4m3fn
_MOST_DIMS = 128
_FEW_HEADS = 32  #: which a narrower variant takes
_LEAST_PART, _MOST_PART = 512, 4096  #: columns that a CTA computes


def fp8_mqa_logits(
    q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor, clean_logits: bool = True, max_seqlen_k: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Scores of each query for its own range of keys.

    q: float8_e4m3fn [seq_len, num_heads, head_dim]. kv: keys float8_e4m3fn [seq_len_kv, head_dim] and their scales
    float32 [seq_len_kv]. weights: float32 [seq_len, num_heads]. cu_seq_len_k_start, cu_seq_len_k_end: int32 [seq_len],
    the first key of a query and the one behind its last. clean_logits: columns outside of that range are -inf; False:
    they may be anything. max_seqlen_k > 0: a row has so many columns, and its first one is of its first key.

    Returns float32 [seq_len, seq_len_kv], or [seq_len, max_seqlen_k]. Raises ValidationError naming the argument.

    >>> q, keys = torch.randn(3, 4, 64).to(torch.float8_e4m3fn), torch.randn(5, 64).to(torch.float8_e4m3fn)
    >>> ends = torch.tensor([3, 4, 5]).int()
    >>> logits = fp8_mqa_logits(q, (keys, torch.ones(5)), torch.ones(3, 4), torch.zeros_like(ends), ends)
    >>> logits.isinf().sum(1).tolist()
    [2, 1, 0]
    """
    flag(clean_logits, "clean_logits")
    rows, num_heads, head_dim = _queries(q, {"seq_len": None, "num_heads": None, "head_dim": None})
    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise ValidationError(f"kv: expected a pair of keys and their scales, got {type(kv).__name__}.")
    keys, scales = check_tensor(kv[0], "kv[0]"), check_tensor(kv[1], "kv[1]")
    check_shape(keys, "kv[0]", {"seq_len_kv": None, "head_dim": head_dim})
    check_shape(scales, "kv[1]", {"seq_len_kv": keys.shape[0]})
    _check_type(keys, "kv[0]", _E4M3, q.device)
    _check_type(scales, "kv[1]", torch.float32, q.device)
    begins = _lengths(cu_seq_len_k_start, "cu_seq_len_k_start", rows, q.device)
    ends = _lengths(cu_seq_len_k_end, "cu_seq_len_k_end", rows, q.device)
    width = check_positive(max_seqlen_k, "max_seqlen_k") if max_seqlen_k else keys.shape[0]
    if max_seqlen_k and clean_logits:
        raise ValidationError(f"clean_logits: expected False beside max_seqlen_k={max_seqlen_k}, got True.")
    logits = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    _score(
        q, keys.contiguous(), scales.contiguous(), _weights(weights, rows, num_heads, q), None, begins, ends, logits,
        keys.shape[0], keys.shape[0], 0, clean_logits, bool(max_seqlen_k),
    )  # fmt: skip
    return logits


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """The schedule_meta of fp8_paged_mqa_logits(): int32 [num_sms + 1, 2] zeros, as buffers for it expect its shape.
    Quire's kernel divides its work by the shapes alone, and takes any. Raises ValidationError naming the argument.

    >>> get_paged_mqa_logits_metadata(torch.tensor([[3], [70]]).int(), 64, 132).shape
    torch.Size([133, 2])
    """
    check_positive(block_kv, "block_kv")
    _check_indices(indices, check_tensor(context_lens, "context_lens").shape[0])
    shape = check_positive(num_sms, "num_sms") + 1, 2
    return torch.zeros(shape, dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor, context_lens: torch.Tensor,
    block_table: torch.Tensor, schedule_meta: torch.Tensor | None, max_context_len: int, clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scores of the next_n last queries of each request for the keys in its pages.

    q: float8_e4m3fn [batch, next_n, num_heads, head_dim]. kv_cache: uint8 [num_blocks, block_kv, 1, head_dim + 4]; a
    page has the keys of its tokens, float8_e4m3fn, and behind them their scales, float32. Pages may be any multiple of
    16 bytes apart. weights: float32 [batch * next_n, num_heads]. context_lens: int32 [batch, next_n], the keys that
    each query sees, or [batch], those of the last query, of which an earlier one sees one less. block_table: int32
    [batch, blocks]. clean_logits: columns of no key are -inf; False: they may be anything. schedule_meta, and indices,
    int32 [batch], the sequences of queries that are requests of their own, have no effect.

    Returns float32 [batch * next_n, max_context_len]. Raises ValidationError naming the argument.

    >>> q, pages = torch.randn(2, 1, 4, 128).to(torch.float8_e4m3fn), torch.zeros(3, 64, 1, 132, dtype=torch.uint8)
    >>> lens, table = torch.tensor([[3], [70]]).int(), torch.tensor([[2, 0], [0, 1]]).int()
    >>> meta = get_paged_mqa_logits_metadata(lens, 64, 132)
    >>> fp8_paged_mqa_logits(q, pages, torch.ones(2, 4), lens, table, meta, 128).shape
    torch.Size([2, 128])
    """
    check_flags(clean_logits=clean_logits)
    batch, next_n, num_heads, head_dim = _queries(q, dict.fromkeys(("batch", "next_n", "num_heads", "head_dim")))
    check_tensor(kv_cache, "kv_cache")
    check_shape(kv_cache, "kv_cache", {"num_blocks": None, "block_kv": None, "1": 1, "head_dim + 4": head_dim + 4})
    keys, scales = _parts(kv_cache, head_dim, q.device)
    table = to_int32(check_tensor(block_table, "block_table"), "block_table")
    check_shape(table, "block_table", {"batch": batch, "blocks": None})
    check_same_device(table, "block_table", q.device)
    table = table if table.stride(1) == 1 else table.contiguous()
    check_tensor(context_lens, "context_lens")
    is_shared = context_lens.dim() == 1
    if not is_shared:
        check_shape(context_lens, "context_lens", {"batch": batch, "next_n": next_n})
    ends = _lengths(context_lens.flatten(), "context_lens", batch if is_shared else batch * next_n, q.device)
    _check_indices(indices, batch)
    if schedule_meta is not None:
        check_tensor(schedule_meta, "schedule_meta")
    rows, width = batch * next_n, check_positive(max_context_len, "max_context_len")
    logits = torch.empty(rows, width, dtype=torch.float32, device=q.device)
    page_size, num_keys = kv_cache.shape[1], min(width, table.shape[1] * kv_cache.shape[1])
    _score(
        q.view(rows, num_heads, head_dim), keys, scales, _weights(weights, rows, num_heads, q), table, None, ends,
        logits, page_size, num_keys, next_n if is_shared else -next_n, bool(clean_logits), False,
    )  # fmt: skip
    return logits


def _queries(q: Any, sizes: dict[str, int | None]) -> torch.Size:
    check_shape(check_tensor(q, "q"), "q", sizes)
    if q.dtype is not _E4M3 or not q.is_contiguous():
        raise ValidationError(f"q: expected a contiguous tensor of {_E4M3}, got {q.dtype}, strides {q.stride()}.")
    head_dim = q.shape[-1]
    if not 16 <= head_dim <= _MOST_DIMS or head_dim % 16:
        raise ValidationError(f"q: expected heads of a multiple of 16 dims up to {_MOST_DIMS}, got {head_dim}.")
    check_positive(q.shape[-2], "q: num_heads")
    shape: torch.Size = q.shape
    return shape


def _check_type(tensor: torch.Tensor, name: str, dtype: torch.dtype, device: torch.device) -> None:
    check_same_device(tensor, name, device)
    if tensor.dtype is not dtype:
        raise ValidationError(f"{name}: expected dtype {dtype}, got {tensor.dtype}.")


def _weights(weights: Any, rows: int, num_heads: int, q: torch.Tensor) -> torch.Tensor:
    check_shape(check_tensor(weights, "weights"), "weights", {"rows of q": rows, "num_heads": num_heads})
    _check_type(weights, "weights", torch.float32, q.device)
    given: torch.Tensor = weights if weights.stride(1) == 1 else weights.contiguous()
    return given


def _lengths(lens: Any, name: str, count: int, device: torch.device) -> torch.Tensor:
    check_shape(check_tensor(lens, name), name, {"queries": count})
    check_same_device(lens, name, device)
    return to_int32(lens, name).contiguous()


def _check_indices(indices: Any, batch: int) -> None:
    if indices is not None:
        check_shape(check_tensor(indices, "indices"), "indices", {"batch": batch})
        to_int32(indices, "indices")


def _parts(kv_cache: torch.Tensor, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [num_blocks, block_kv, head_dim] and scales [num_blocks, block_kv]: views of pages."""
    check_same_device(kv_cache, "kv_cache", device)
    num_blocks, size, _, row = kv_cache.shape
    if kv_cache.element_size() != 1 or kv_cache.stride(1) != row or kv_cache.stride(3) != 1 or not size:
        raise ValidationError(
            f"kv_cache: expected pages of bytes without gaps in them, got {list(kv_cache.shape)} {kv_cache.dtype} with "
            f"strides {kv_cache.stride()}."
        )
    pages = kv_cache.view(torch.uint8).as_strided((num_blocks, size * row), (kv_cache.stride(0), 1))
    keys, scales = pages[:, : size * head_dim], pages[:, size * head_dim :]
    try:
        return keys.view(num_blocks, size, head_dim).view(_E4M3), scales.view(torch.float32)
    except RuntimeError as error:  # pages that are no multiple of 4 bytes apart
        raise ValidationError(
            f"kv_cache: expected pages at multiples of 4 bytes, got strides {kv_cache.stride()} and an offset of "
            f"{kv_cache.storage_offset()}."
        ) from error


@operator("mqa_logits", writes="logits")
def _score(
    q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor | None,
    begins: torch.Tensor | None, ends: torch.Tensor, logits: torch.Tensor, page_size: int, num_keys: int,
    of_request: int, is_clean: bool, is_shifted: bool,
) -> None:  # fmt: skip
    """num_keys: of a row at most. of_request: rows of a request, with one length; negative: a length of each row."""
    (rows, num_heads, head_dim), width = q.shape, logits.shape[1]
    if not rows or not width:
        return
    part = _part(rows, width, q.device)
    parts = -(-width // part)
    check_count(rows * parts, "q", "parts of rows; score fewer queries at a time")
    params = MqaLogitsParams(
        q=q.data_ptr(), keys=keys.data_ptr(), scales=scales.data_ptr(), weights=weights.data_ptr(),
        pages=None if pages is None else pages.data_ptr(), begins=None if begins is None else begins.data_ptr(),
        ends=ends.data_ptr(), logits=logits.data_ptr(), q_row_bytes=q.stride(0), q_head_bytes=q.stride(1),
        key_page_bytes=keys.stride(0) if pages is not None else 0,
        scale_page_bytes=4 * scales.stride(0) if pages is not None else 0, weights_stride=weights.stride(0),
        pages_stride=0 if pages is None else pages.stride(0), logits_stride=logits.stride(0),
        page=FastDivisor.of(max(1, page_size)), request=FastDivisor.of(max(1, abs(of_request))),
        parts=FastDivisor.of(parts), num_rows=rows, num_heads=num_heads, head_dim=head_dim,
        num_pages=keys.shape[0] if pages is not None else 1,
        width=width, num_keys=num_keys, part_columns=part, lengths_are_shared=int(of_request > 0),
        is_shifted=int(is_shifted), is_clean=int(is_clean),
    )  # fmt: skip
    places = (q.data_ptr(), params.key_page_bytes, keys.data_ptr(), params.q_head_bytes)
    if on_cuda(q.device) and any(place % 16 for place in places):
        raise ValidationError(
            "q, kv_cache: expected addresses, and pages apart, that are multiples of 16 bytes; got "
            f"{q.data_ptr():#x}, {keys.data_ptr():#x} and {params.key_page_bytes}."
        )
    module = get_module(OperationKey("mqa_logits", target_of(q.device), "", 1 if num_heads <= _FEW_HEADS else 2).spec())
    launch(module, ctypes.addressof(params), q.device, grid=rows * parts, block=PARALLEL_THREADS, smem=MQA_LOGITS_SMEM)


def _part(rows: int, width: int, device: torch.device) -> int:
    """Columns of a part: few enough that all SMs have some."""
    if not on_cuda(device):
        return width
    fair = rows * width // (4 * max_ctas(device, 1))
    return max(_LEAST_PART, min(_MOST_PART, fair // 128 * 128))


teach(globals(), __all__)
