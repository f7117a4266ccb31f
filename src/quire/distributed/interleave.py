"""Which tokens of a request a rank has, if tokens are assigned to ranks in turn."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Interleave"]


class Interleave(NamedTuple):
    """Runs of interleave_size tokens are assigned to the ranks in turn, and a rank stores its tokens contiguously.

    Token t of a request is on rank t // interleave_size % num_ranks. With interleave_size=1 neighbouring tokens are on
    different ranks; with the page size of the cache, a page has consecutive tokens. The numbers of tokens of two ranks
    differ by at most interleave_size. This is the layout of vLLM's decode context parallel
    (cp_kv_cache_interleave_size).

    >>> from quire.distributed import Interleave
    >>> own = Interleave(interleave_size=2, rank=1, num_ranks=2)
    >>> own.lengths(torch.tensor([1, 3, 9]))  # how many tokens of each request are on this rank
    tensor([0, 1, 4])
    >>> positions = torch.arange(9)
    >>> positions[own.holds(positions)]
    tensor([2, 3, 6, 7])
    >>> own.places(torch.tensor([2, 3, 6, 7]))  # their indices among the tokens of this rank
    tensor([0, 1, 2, 3])
    """

    interleave_size: int
    rank: int
    num_ranks: int

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first seq_lens tokens are on this rank."""
        stride = self.interleave_size * self.num_ranks
        rest = seq_lens % stride - self.interleave_size * self.rank
        return seq_lens // stride * self.interleave_size + rest.clamp(0, self.interleave_size)

    def holds(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether tokens are on this rank: bool."""
        return positions // self.interleave_size % self.num_ranks == self.rank

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The indices of tokens among the tokens of their rank: where to append them in its cache."""
        stride = self.interleave_size * self.num_ranks
        return positions // stride * self.interleave_size + positions % self.interleave_size
