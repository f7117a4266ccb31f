"""Which tokens of a sequence a rank computes, so that all ranks have equal work under a causal mask."""

from __future__ import annotations

import torch

from quire.errors import ValidationError
from quire.runtime.checks import check_positive, host_indices

__all__ = ["Zigzag"]


class Zigzag:
    """Sequences are divided into 2 * num_ranks chunks; rank r has chunk r and chunk 2 * num_ranks - 1 - r of each.

    seq_lens: int [batch_size], on the host. The length of a chunk is a multiple of page_size; the last chunks of a
    sequence may be shorter, or empty. With one early and one late chunk, each rank computes the same number of
    query-key pairs, as in Llama 3's context parallelism.

    >>> from quire.distributed import Zigzag
    >>> zigzag = Zigzag(torch.tensor([8, 3]), num_ranks=2, page_size=1)
    >>> zigzag.rows(0), zigzag.rows(1)  # of the concatenated sequences: 0 to 7, and 8 to 10
    (tensor([0, 1, 6, 7, 8]), tensor([ 2,  3,  4,  5,  9, 10]))
    """

    def __init__(self, seq_lens: torch.Tensor, num_ranks: int, page_size: int) -> None:
        self.num_ranks, self.page_size = check_positive(num_ranks, "num_ranks"), check_positive(page_size, "page_size")
        self.seq_lens = host_indices(seq_lens, "seq_lens").long()
        if (self.seq_lens < 0).any():
            raise ValidationError(f"seq_lens: expected lengths from 0 on, got {self.seq_lens.tolist()}.")
        self.chunk_pages = -(-self.seq_lens // (2 * self.num_ranks * self.page_size))  #: of a chunk of each sequence

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
        """Indices of a rank's tokens among the concatenated sequences: int64, in the rank's order, which is sequence by
        sequence, with the early chunk before the late one. x[rows] are the rank's rows of x.
        """
        first = self.seq_lens.cumsum(0) - self.seq_lens
        parts = [
            first[i] + torch.arange(int(self.begin(chunk)[i]), int(self.begin(chunk + 1)[i]), device="cpu")
            for i in range(len(first)) for chunk in self.chunks(rank)
        ]  # fmt: skip
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")
