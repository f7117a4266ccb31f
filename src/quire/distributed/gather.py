"""Keys and values of all ranks gathered while attention runs: by a collective, or by reading the other GPUs' memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.distributed.ranks import Ranks, all_gather, peer_memory
from quire.errors import UnsupportedError, ValidationError

__all__ = ["Gather", "Wait", "gather_of"]

Wait = Callable[[], object]  #: lets the current stream wait until all has arrived


class Gather:
    """An all-gather by torch.distributed.

    start() takes what sent() returned, filled by the caller, and returns at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def sent(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory for what this rank sends, of the same shape on all ranks; any contents."""
        return like.new_empty(shape)

    def start(self, sent: torch.Tensor, received: torch.Tensor) -> Wait:
        """Gathers `sent` of rank i into received[i]."""
        work: Any = all_gather(received.flatten(0, 1), sent, self._ranks.group, async_op=True)
        return work.wait  # type: ignore[no-any-return]


class PeerMemory(Gather):
    """Copies out of memory of the other GPUs of this host, which take none of the SMs that attention needs.

    Two barriers between the GPUs order the copies: the first one says that all ranks have read what the last call sent,
    the second one that all ranks have written.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._memory: torch.Tensor | None = None

    def sent(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if self._memory is None or (self._memory.shape, self._memory.dtype) != (torch.Size(shape), like.dtype):
            self._memory, self._handle, self._peers = peer_memory(self._ranks, shape, like.dtype, like.device)
            self._stream = torch.cuda.Stream(like.device, priority=-1)  # type: ignore[no-untyped-call]
        self._handle.barrier(channel=0)
        return self._memory

    def start(self, sent: torch.Tensor, received: torch.Tensor) -> Wait:
        self._handle.barrier(channel=1)
        current = torch.cuda.current_stream(sent.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for step in range(1, self._ranks.size):  # each rank begins with another one
                peer = (self._ranks.rank + step) % self._ranks.size
                received[peer].copy_(self._peers[peer], non_blocking=True)
        arrived = self._stream.record_event()
        return lambda: current.wait_event(arrived)


_GATHERS = {"all_gather": Gather, "peer_memory": PeerMemory}


def gather_of(kind: str, ranks: Ranks, device: torch.device) -> Gather:
    """The way to gather with this name."""
    if kind not in _GATHERS:
        raise ValidationError(f"exchange: expected one of {', '.join(_GATHERS)}, got {kind!r}.")
    if kind == "peer_memory" and device.type != "cuda":
        raise UnsupportedError(f"exchange: 'peer_memory' is for GPUs, got {device}; use 'all_gather'.")
    return _GATHERS[kind](ranks)
