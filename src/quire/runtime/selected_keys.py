"""Sparse attention over a paged cache: each query attends to listed tokens, which are treated as pages of one token.

This runs on the device of the call without a synchronisation, so the call may be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_contiguous_last, check_same_device, check_shape, check_tensor, to_int32
from quire.runtime.indices import without_gaps
from quire.runtime.schedule import KeptSchedules, Lengths


def selected_keys(
    indices: torch.Tensor, most: torch.Tensor | None, num_tokens: int, kept: KeptSchedules | None = None
) -> tuple[torch.Tensor | Lengths, torch.Tensor | None]:
    """block_tables and seq_lens for decode_latents() over pages of one token, from int32 indices [rows, top_k] of
    tokens, of which the first `most` [rows] of each row, or all, are used. Indices below 0 or from num_tokens on are
    ignored; a token that is listed twice counts twice. kept: where the schedule is kept if all are used.
    """
    if indices.is_cpu:
        return without_gaps(indices, most, num_tokens)
    return Lengths(None if most is None else most.contiguous(), indices, 1, 1, num_tokens, kept), None


def tokens_of(kv_cache: torch.Tensor) -> torch.Tensor:
    """Pages [num_pages, page_size, dims] as tokens [num_pages * page_size, 1, dims] with one stride."""
    check_contiguous_last(kv_cache, "kv_cache")
    num_pages, page_size, dims = kv_cache.shape
    page, token, _ = kv_cache.stride()
    if num_pages > 1 and page_size > 1 and page != page_size * token:
        raise ValidationError(
            f"kv_cache: expected pages one after another for indices of tokens, got strides {kv_cache.stride()}."
        )
    step = page if page_size == 1 else token
    return kv_cache.as_strided((num_pages * page_size, 1, dims), (step, step, 1))


def row_indices(indices: Any, shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    """Indices of tokens [*shape, top_k] as int32 [rows, top_k] on `device`."""
    check_shape(
        check_tensor(indices, name), name, {f"query.shape[{i}]": n for i, n in enumerate(shape)} | {"top_k": None}
    )
    check_same_device(indices, name, device)
    return to_int32(indices, name).flatten(0, -2).contiguous()


def row_lengths(lens: Any, name: str, num_rows: int, q_len: int, offsets: torch.Tensor | None) -> torch.Tensor | None:
    """Lengths as int32 [num_rows]: of each row, or of each request of q_len rows or of rows between `offsets`."""
    if lens is None:
        return None
    given: torch.Tensor = to_int32(check_tensor(lens, name), name).flatten()
    if given.shape[0] == num_rows:
        return given
    if offsets is not None and given.shape[0] == offsets.shape[0] - 1:
        return given.repeat_interleave(offsets.diff().to(given.device), output_size=num_rows)
    if offsets is None and given.shape[0] * q_len == num_rows:
        return given.repeat_interleave(q_len)
    raise ValidationError(
        f"{name}: expected a length for each of {num_rows} queries or each request, got {list(given.shape)}."
    )
