"""Which tokens of a sequence a rank computes when work, not tokens alone, is to be even under a causal mask."""

from __future__ import annotations

import torch

__all__ = ["Zigzag"]


class Zigzag:
    """Sequences are divided into 2 * num_ranks chunks; rank r has chunk r and chunk 2 * num_ranks - 1 - r of each.

    seq_lens: int [batch_size], on the host. A chunk is a whole number of pages of page_size tokens; what is left of a
    sequence makes the last chunks shorter, or empty. With r early and r late chunks each rank computes equally many
    pairs of queries and keys, as in Llama 3's context parallelism.

    >>> from quire.distributed import Zigzag
    >>> zigzag = Zigzag(torch.tensor([8, 3]), num_ranks=2, page_size=1)
    >>> zigzag.rows(0), zigzag.rows(1)  # of the sequences one after another: 0 to 7, and 8 to 10
    (tensor([0, 1, 6, 7, 8]), tensor([ 2,  3,  4,  5,  9, 10]))
    """

    def __init__(self, seq_lens: torch.Tensor, num_ranks: int, page_size: int) -> None:
        self.seq_lens, self.num_ranks, self.page_size = seq_lens.long(), num_ranks, page_size
        self.chunk_pages = -(-self.seq_lens // (2 * num_ranks * page_size))  #: of a chunk of each sequence

    def begin(self, chunk: int) -> torch.Tensor:
        """The first token of a chunk in each sequence."""
        return torch.minimum(chunk * self.chunk_pages * self.page_size, self.seq_lens)

    def length(self, chunk: int) -> torch.Tensor:
        """The tokens of a chunk of each sequence."""
        return self.begin(chunk + 1) - self.begin(chunk)

    def chunks(self, rank: int) -> tuple[int, int]:
        """The numbers of the two chunks of a rank."""
        return rank, 2 * self.num_ranks - 1 - rank

    def rows(self, rank: int) -> torch.Tensor:
        """Where the tokens of a rank stand among those of all sequences, one after another: int64, in a rank's order:
        sequence after sequence, the early chunk before the late one. x[rows] are its rows of x.
        """
        first = self.seq_lens.cumsum(0) - self.seq_lens
        parts = [
            first[i] + torch.arange(int(self.begin(chunk)[i]), int(self.begin(chunk + 1)[i]))
            for i in range(len(first)) for chunk in self.chunks(rank)
        ]  # fmt: skip
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
