"""The slopes of ALiBi (Press et al., 2022, https://arxiv.org/abs/2108.12409), as FlashInfer's utils has them."""

from __future__ import annotations

import math

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_positive

__all__ = ["get_alibi_slopes"]

_MOST_HEADS = 1 << 16  #: their slopes are computed one by one in Python, in float64


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The slope of each of n_heads query heads: those that kernels compute under pos_encoding_mode="ALIBI".

    The slopes of n heads, n a power of two, are 2^(-8 (head + 1) / n). The heads from the largest such n on take every
    other slope of 2 n heads. A custom variant with other slopes reads a tensor of the same shape: quire.variants.alibi.

    device: where the tensor is made; None: torch's default device. Returns float32 [n_heads]. Raises ValidationError
    if n_heads is not an integer from 1 to 65536.

    >>> quire.get_alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    heads = check_positive(n_heads, "n_heads")
    if heads > _MOST_HEADS:
        raise ValidationError(f"n_heads: expected at most {_MOST_HEADS} heads, got {heads}.")
    n = 2 ** math.floor(math.log2(heads))
    powers = [8 / n * (i + 1) for i in range(n)] + [4 / n * (2 * i + 1) for i in range(heads - n)]
    return torch.tensor([2.0**-power for power in powers], dtype=torch.float32, device=device)
