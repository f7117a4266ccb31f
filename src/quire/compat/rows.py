"""Batches of rows of equal length, as in Hugging Face and FlashAttention, as index arrays and pages for the planner."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quire.runtime.ops import is_tracing


class EqualLengths(NamedTuple):
    """Index tensors, on the host, of a batch of requests of equal length."""

    offsets: torch.Tensor  #: [batch + 1]
    lens: torch.Tensor  #: [batch]
    rows: torch.Tensor  #: [batch, 1], the number of each request


def equal_lengths(batch: int, length: int) -> EqualLengths:
    """The same tensors for the same batch, so that a plan of them is found again."""
    if is_tracing():
        return _new(batch, length)
    with torch.inference_mode(False):
        return _known(batch, length)


def _new(batch: int, length: int) -> EqualLengths:
    numbers = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    return EqualLengths(numbers * length, torch.full_like(numbers[:-1], length), numbers[:-1, None])


_known = lru_cache(maxsize=256)(_new)


def row_step(cache: torch.Tensor) -> int:
    """The distance between rows of [rows, tokens, heads, dim] in token strides; 0 if it is no multiple of them."""
    row, token = cache.stride(0), cache.stride(1)
    if cache.shape[0] <= 1 or cache.shape[1] <= 1:
        return cache.shape[1]
    return row // token if token and row % token == 0 else 0


def token_pages(cache: torch.Tensor) -> torch.Tensor:
    """A view of [rows, tokens, heads, dim] as pages [pages, 1, heads, dim] of one token: token t of row r is page
    r * row_step() + t. If heads come before tokens, pages overlap, and must only be read.
    """
    rows, tokens, heads, dim = cache.shape
    strides = cache.stride()
    token = strides[1] if tokens > 1 else strides[0]
    return cache.as_strided(((rows - 1) * row_step(cache) + tokens, 1, heads, dim), (token, token, *strides[2:]))
