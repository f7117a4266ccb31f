"""Ulysses' exchange (DeepSpeed): from ranks with some tokens of all heads to ranks with all tokens of some heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from quire.distributed.ranks import check_divisible, ranks_of
from quire.errors import ValidationError
from quire.runtime.checks import check_shape, check_tensor

__all__ = ["Ulysses"]


class Ulysses:
    """Two exchanges, between which each rank computes whole requests with its part of the heads, using any wrapper.

    token_counts: how many consecutive tokens each rank has, in the order of ranks: any numbers, also 0; the same list
        on all ranks. group: a torch.distributed process group; None: all processes.

    >>> from quire.distributed import Ulysses
    >>> ulysses = Ulysses([5])  # a group of one
    >>> q, k, v = ulysses.to_heads(torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64))
    >>> o = quire.single_prefill_with_kv_cache(q, k, v, causal=True)
    >>> ulysses.to_tokens(o).shape
    torch.Size([5, 8, 64])
    """

    def __init__(self, token_counts: Sequence[int], group: Any = None) -> None:
        self._ranks = ranks_of(group)
        self._counts = [int(count) for count in token_counts]
        if len(self._counts) != self._ranks.size or min(self._counts, default=0) < 0:
            raise ValidationError(
                f"token_counts: expected a number of tokens for each of the {self._ranks.size} ranks of the group, got "
                f"{self._counts}."
            )

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each x [tokens of this rank, num_heads, head_dim] as [tokens of all ranks, num_heads / size, head_dim].

        All tensors are sent in one message. Rank r gets the r-th part of the heads. If there are fewer KV heads than
        ranks, KV heads are repeated, so that each rank has the one that its queries need.
        """
        size, own = self._ranks.size, self._counts[self._ranks.rank]
        parts = [self._by_rank(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
        if len({part.dtype for part in parts}) > 1:
            raise ValidationError(f"tensors: expected one dtype, got {[part.dtype for part in parts]}.")
        sent = torch.cat([part.flatten(2) for part in parts], 2).transpose(0, 1).contiguous()
        received = sent.new_empty(sum(self._counts), sent.shape[2])
        self._exchange(received, sent.flatten(0, 1), self._counts, [own] * size)
        columns = torch.split(received, [part.shape[2] * part.shape[3] for part in parts], 1)
        return tuple(x.view(len(x), *part.shape[2:]) for x, part in zip(columns, parts, strict=True))

    def _by_rank(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x as [tokens, ranks, heads of a rank, head_dim]."""
        tokens = {"tokens of this rank": self._counts[self._ranks.rank]}
        check_shape(check_tensor(x, name), name, {**tokens, "num_heads": None, "head_dim": None})
        size = self._ranks.size
        if x.shape[1] and x.shape[1] < size and size % x.shape[1] == 0:
            x = x.repeat_interleave(size // x.shape[1], 1)
        check_divisible(x.shape[1], self._ranks, f"{name}: num_heads", "take a group whose size divides them")
        return x.reshape(x.shape[0], size, x.shape[1] // size, x.shape[2])

    def to_tokens(self, o: torch.Tensor) -> torch.Tensor:
        """o [tokens of all ranks, heads of this rank, head_dim] as [tokens of this rank, heads of all, head_dim]."""
        size, own = self._ranks.size, self._counts[self._ranks.rank]
        check_shape(check_tensor(o, "o"), "o", {"tokens": sum(self._counts), "num_heads": None, "head_dim": None})
        received = o.new_empty(size, own, *o.shape[1:])
        self._exchange(received.view(size * own, *o.shape[1:]), o.contiguous(), [own] * size, self._counts)
        return received.transpose(0, 1).flatten(1, 2)

    def _exchange(
        self, received: torch.Tensor, sent: torch.Tensor, received_counts: list[int], sent_counts: list[int]
    ) -> None:
        dist.all_to_all_single(received, sent, received_counts, sent_counts, group=self._ranks.group)
