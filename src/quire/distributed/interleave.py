"""Which tokens of a request a rank holds when tokens are dealt out in turn."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Interleave"]


class Interleave(NamedTuple):
    """Runs of interleave_size tokens go to the ranks in turn, and a rank stores its tokens one behind another.

    Token t of a request lies on rank t // interleave_size % num_ranks. With 1 neighbouring tokens lie on different
    ranks; with the page size of the cache a page holds neighbours. Ranks differ by interleave_size tokens at most. This
    is the layout of vLLM's decode context parallel (cp_kv_cache_interleave_size).

    >>> from quire.distributed import Interleave
    >>> own = Interleave(interleave_size=2, rank=1, num_ranks=2)
    >>> own.lengths(torch.tensor([1, 3, 9]))  # of requests: how many of their tokens are here
    tensor([0, 1, 4])
    >>> positions = torch.arange(9)
    >>> positions[own.holds(positions)]
    tensor([2, 3, 6, 7])
    >>> own.places(torch.tensor([2, 3, 6, 7]))  # which token of those here
    tensor([0, 1, 2, 3])
    """

    interleave_size: int
    rank: int
    num_ranks: int

    def lengths(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first seq_lens tokens lie on this rank."""
        stride = self.interleave_size * self.num_ranks
        rest = seq_lens % stride - self.interleave_size * self.rank
        return seq_lens // stride * self.interleave_size + rest.clamp(0, self.interleave_size)

    def holds(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether tokens lie on this rank: bool."""
        return positions // self.interleave_size % self.num_ranks == self.rank

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The numbers that tokens have among those of their rank: where to append them to its cache."""
        stride = self.interleave_size * self.num_ranks
        return positions // stride * self.interleave_size + positions % self.interleave_size
