"""Batches of equally long rows, as Hugging Face and FlashAttention have them, in the words of the planner."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quire.runtime.ops import is_tracing


class EqualLengths(NamedTuple):
    """Index tensors, on the host, of a batch whose requests are equally long."""

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
    """Tokens from a row of [rows, tokens, heads, dim] to the next, in steps of the token stride; 0: no whole number."""
    row, token = cache.stride(0), cache.stride(1)
    if cache.shape[0] <= 1 or cache.shape[1] <= 1:
        return cache.shape[1]
    return row // token if token and row % token == 0 else 0


def token_pages(cache: torch.Tensor) -> torch.Tensor:
    """A view of [rows, tokens, heads, dim] as pages [pages, 1, heads, dim] of one token: token t of row r is page
    r * row_step() + t. Where heads come before tokens, pages overlap: they are to be read only.
    """
    rows, tokens, heads, dim = cache.shape
    strides = cache.stride()
    token = strides[1] if tokens > 1 else strides[0]
    return cache.as_strided(((rows - 1) * row_step(cache) + tokens, 1, heads, dim), (token, token, *strides[2:]))
