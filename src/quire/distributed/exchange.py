"""Ranks of a process group; they exchange partial results and keys, by messages or memory that peers read, and merge.

A message is one tensor of bytes with the outputs of some rows and heads, followed by their lse. The merge reads
received messages in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quire.cache import merge_state, merge_states
from quire.engine.checks import check_positive
from quire.errors import PlanError, RankError, UnsupportedError, ValidationError

#: Arguments of plan() that count from where a token stands in its request, which a rank's part does not say.
_POSITIONS = {
    "attention_chunk_size": None, "pos_encoding_mode": "NONE", "rope_scale": None, "rope_theta": None, "window_left": -1
}  # fmt: skip
_OF_RANKS = "gloo", "imed out", "timeout", "Connection"  #: what gloo says of them, in RuntimeErrors; NCCL has a class
_PROBE = 1 << 20  #: a tag that no message has
_NOTICED = "quire: rank {} has noticed that another one is lost"  #: a key of the store
#: Of equally many bytes from each rank, into one tensor: the name that torch gives it from 2.13 on, or the older one.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Ranks(NamedTuple):
    """A process group as seen by one of its ranks."""

    group: Any
    rank: int
    size: int

    def others(self) -> list[int]:
        """The other ranks; each rank begins with another one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


def ranks_of(group: Any) -> Ranks:
    """The ranks of `group`; None: of all processes. Ranks are returned as they are."""
    if isinstance(group, Ranks):
        return group
    if not dist.is_available():
        raise UnsupportedError("quire.distributed: expected a torch that was built with torch.distributed.")
    if not dist.is_initialized():
        raise PlanError(
            "quire.distributed: expected a process group; call torch.distributed.init_process_group() first."
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValidationError("group: expected a group that this process is a member of.")
    return Ranks(group if group is not None else dist.group.WORLD, rank, dist.get_world_size(group))


@contextmanager
def naming_ranks(ranks: Ranks, call: str, *peers: int) -> Iterator[None]:
    """Errors of torch.distributed as a RankError. peers: global ranks that the call waits for; none: all others."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in _OF_RANKS):
            raise
        others = [dist.get_global_rank(ranks.group, other) for other in ranks.others()]
        lost = _lost(others, ranks.group)
        names = ", ".join(map(str, sorted(lost or peers or others)))
        what = f"cannot reach rank {names}" if lost else f"got no answer of rank {names} in time"
        raise RankError(f"{call}: rank {dist.get_rank()} {what}: {error}") from error


def _lost(others: list[int], group: Any) -> list[int]:
    """The ranks whose connections are closed, which only gloo says at once, but for those that have closed them because
    they have noticed themselves: they say so in the store of torch.distributed.
    """
    if dist.get_backend(group) != "gloo":
        return []
    lost: list[int] = []
    store, own, patience = dist.distributed_c10d._get_default_store(), _NOTICED.format(dist.get_rank()), 0.1
    with suppress(RuntimeError):  # the store is gone with the rank that served it
        patience = 0.1 if store.check([own]) else 2.0  # the others notice meanwhile
        store.set(own, "")
    sent = []
    for other in others:
        with _noting(other, lost):
            sent.append((other, dist.isend(torch.zeros(1, dtype=torch.uint8, device="cpu"), other, group, tag=_PROBE)))
    for other, work in sent:
        with _noting(other, lost):
            if work is not None:
                work.wait(timedelta(seconds=patience / 2 / len(others)))  # which closes all connections
    end = time.monotonic() + patience
    with suppress(RuntimeError):
        while silent := [rank for rank in lost if not store.check([_NOTICED.format(rank)])]:
            if time.monotonic() > end:
                return silent
            time.sleep(0.02)
    return lost


@contextmanager
def _noting(rank: int, lost: list[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "Timed out" not in str(error):
            lost.append(rank)


def peer_memory(
    ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Memory of this GPU that the other ranks of the host can read, torch's handle with its barriers, and the memory of
    each rank. A collective. Uses torch's symmetric memory, without multicast.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    with torch.inference_mode(False):  # later calls outside of inference mode write there, too
        own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    handle = symmetric_memory.rendezvous(own, ranks.group)
    return own, handle, [handle.get_buffer(rank, shape, dtype) for rank in range(ranks.size)]


def timeout_of(ranks: Ranks, device: torch.device) -> int:
    """Milliseconds after which a barrier between GPUs ends the kernel and says which rank it waited for."""
    timeout: timedelta = ranks.group._get_backend(device).options._timeout
    return int(timeout.total_seconds() * 1000)


def check_divisible(num_heads: int, ranks: Ranks, name: str, instead: str) -> None:
    """Check that all ranks can have the same number of heads."""
    if check_positive(num_heads, name) % ranks.size:
        raise ValidationError(
            f"{name}: expected a multiple of {ranks.size}, the size of the group, got {num_heads}; {instead}."
        )


def check_agreement(ranks: Ranks, **values: Any) -> None:
    """Check that all ranks have the same `values`: a collective, after which all ranks raise the same error."""
    told: list[Any] = [None] * ranks.size
    if ranks.size > 1:
        with naming_ranks(ranks, "check_ranks"):
            dist.all_gather_object(told, values, group=ranks.group)
    for name, first in (told[0] or {}).items():
        for rank, others in enumerate(told):
            if others[name] != first:
                raise ValidationError(
                    f"{name}: expected the same on all ranks of the group, got {first} on rank 0 and {others[name]} on "
                    f"rank {rank}."
                )


def refuse_positions(where: str, options: dict[str, Any]) -> None:
    """Refuse options that depend on positions, because the tokens of a rank are not contiguous."""
    for name, default in _POSITIONS.items():
        if options.get(name, default) != default:
            raise UnsupportedError(
                f"{name}: {where} does not take it, since the tokens of a rank do not stand side by side in their "
                f"request; rotate q and k before, or use RingAttention or Ulysses, which know whole requests."
            )


# --- exchanges -------------------------------------------------------------------------------------------------------


State = tuple[torch.Tensor, torch.Tensor]  #: o [rows, heads, head_dim] and its base-2 lse [rows, heads]
ALIGNMENT = 32  #: bytes: eight values, which the merge reads at once


class Message(NamedTuple):
    """The layout of a message."""

    rows: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def o_bytes(self) -> int:
        return self.rows * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        used = -(-self.o_bytes // ALIGNMENT) * ALIGNMENT + 4 * self.rows * self.heads
        return max(-(-used // ALIGNMENT), 1) * ALIGNMENT

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(count, self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, messages: torch.Tensor) -> State:
        """o [count, rows, heads, head_dim] and lse [count, rows, heads] in messages uint8 [count, num_bytes]."""
        lse_begin = -(-self.o_bytes // ALIGNMENT) * ALIGNMENT
        o = messages[:, : self.o_bytes].view(self.dtype)
        lse = messages[:, lse_begin : lse_begin + 4 * self.rows * self.heads].view(torch.float32)
        count = messages.shape[0]
        sizes = self.rows, self.heads, self.head_dim
        steps = self.heads * self.head_dim, self.head_dim, 1
        return (
            o.as_strided((count, *sizes), (o.stride(0), *steps)),
            lse.as_strided((count, *sizes[:2]), (lse.stride(0), self.heads, 1)),
        )

    def merge(self, messages: torch.Tensor, v_scale: float) -> State:
        o, lse = self.views(messages)
        return merge_states(o.transpose(0, 1), lse.transpose(0, 1), v_scale)


class Exchange:
    """merge() takes partial results of all heads, and merges them with those of the other ranks. It returns the rank's
    heads, times v_scale. With one rank there is nothing to merge.

    results() returns memory for the partial results, so that merge() need not copy them.
    """

    def __init__(
        self, ranks: Ranks, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ranks, self._device = ranks, device
        self._message = Message(rows, heads, head_dim, dtype)
        self._own: torch.Tensor | None = None  # the message that results() lie in

    def results(self) -> State:
        """Memory that attention writes o and lse of all heads to."""
        self._own = self._message.empty(1, self._device)
        o, lse = self._message.views(self._own)
        return o[0], lse[0]

    def merge(self, o: torch.Tensor, lse: torch.Tensor, v_scale: float = 1.0) -> State:
        return (o, lse) if v_scale == 1.0 else (o * v_scale, lse)

    def _message_of(self, o: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The message that contains o and lse, or a copy."""
        if self._own is None or o.data_ptr() != self._own.data_ptr():
            sent_o, sent_lse = self.results()
            sent_o.copy_(o), sent_lse.copy_(lse)
        assert self._own is not None
        return self._own


class AllGather(Exchange):
    """Each rank receives all heads of all ranks."""

    def merge(self, o: torch.Tensor, lse: torch.Tensor, v_scale: float = 1.0) -> State:
        received = self._message.empty(self._ranks.size, self._device)
        with naming_ranks(self._ranks, "all_gather"):
            all_gather(received, self._message_of(o, lse), group=self._ranks.group)
        return self._message.merge(received, v_scale)


class AllToAll(Exchange):
    """Each rank receives its part of the heads from all ranks: sends the fewest bytes, and copies once."""

    def merge(self, o: torch.Tensor, lse: torch.Tensor, v_scale: float = 1.0) -> State:
        size = self._ranks.size
        part = self._message._replace(heads=self._message.heads // size)
        sent, received = part.empty(size, self._device), part.empty(size, self._device)
        sent_o, sent_lse = part.views(sent)
        sent_o.copy_(o.reshape(o.shape[0], size, part.heads, -1).transpose(0, 1))
        sent_lse.copy_(lse.reshape(o.shape[0], size, part.heads).transpose(0, 1))
        with naming_ranks(self._ranks, "all_to_all"):
            dist.all_to_all_single(received, sent, group=self._ranks.group)
        return part.merge(received, v_scale)


class PeerMemory(Exchange):
    """Attention writes into memory that the other GPUs of this host can read; the merge reads it over NVLink.

    There are no messages, but two barriers between the GPUs: one before the merge, and one after it, so that the next
    layer may write again.
    """

    def __init__(
        self, ranks: Ranks, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(ranks, rows, heads, head_dim, dtype, device)
        if device.type != "cuda":
            raise UnsupportedError(f"exchange: 'peer_memory' is for GPUs, got {device}; use 'all_to_all'.")
        shape = 1, self._message.num_bytes
        self._memory, self._handle, peers = peer_memory(ranks, shape, torch.uint8, device)
        self._patience = timeout_of(ranks, device)
        own = heads // ranks.size
        mine = slice(own * ranks.rank, own * (ranks.rank + 1))
        views = [self._message.views(peer) for peer in peers]
        self._parts = [(o[0, :, mine], lse[0, :, mine]) for o, lse in views]

    def results(self) -> State:
        self._own = self._memory
        o, lse = self._message.views(self._own)
        return o[0], lse[0]

    def merge(self, o: torch.Tensor, lse: torch.Tensor, v_scale: float = 1.0) -> State:
        self._message_of(o, lse)
        self._handle.barrier(0, self._patience)
        merged = self._merge_parts(v_scale)
        self._handle.barrier(1, self._patience)
        return merged

    def _merge_parts(self, v_scale: float) -> State:
        if len(self._parts) == 2:
            return merge_state(*self._parts[0], *self._parts[1], v_scale)
        outputs, sums = zip(*self._parts, strict=True)
        return merge_states(torch.stack(outputs, 1), torch.stack(sums, 1), v_scale)


EXCHANGES = {"all_to_all": AllToAll, "all_gather": AllGather, "peer_memory": PeerMemory}


def exchange_of(
    kind: str, ranks: Ranks, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Exchange:
    """The exchange with this name; for one rank, one that does nothing."""
    if not isinstance(kind, str) or kind not in EXCHANGES:
        raise ValidationError(f"exchange: expected one of {', '.join(EXCHANGES)}, got {kind!r}.")
    if kind != "all_gather":
        check_divisible(heads, ranks, "num_qo_heads", "exchange='all_gather' takes any number")
    chosen = EXCHANGES[kind] if ranks.size > 1 else Exchange
    return chosen(ranks, rows, heads, head_dim, dtype, device)


# --- keys and values -------------------------------------------------------------------------------------------------


Wait = Callable[[], object]  #: lets the current stream wait until all has arrived
Messages = Iterator[tuple[int, torch.Tensor]]  #: ranks and what they sent, for which the current stream has waited


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
        with naming_ranks(self._ranks, "all_gather"):
            work: Any = all_gather(received.flatten(0, 1), sent, self._ranks.group, async_op=True)

        def wait() -> None:
            with naming_ranks(self._ranks, "all_gather"):
                work.wait()

        return wait

    def messages(self, sent: torch.Tensor, sizes: list[int]) -> Messages:
        """The message of each rank, this one's first, with which the exchange begins. sizes: what counts of each. Where
        the caller fails between two messages, those under way are waited for: the next call's come after them.
        """
        received = sent.new_empty(self._ranks.size, *sent.shape)
        wait = self.start(sent, received)
        try:
            yield self._ranks.rank, sent
        finally:
            wait()
        for peer in self._ranks.others():
            yield peer, received[peer, : sizes[peer]]


class Passes(Gather):
    """Each rank passes what it has received on to the next one: a message of each other rank at a time, in a ring."""

    def messages(self, sent: torch.Tensor, sizes: list[int]) -> Messages:
        rank, size, group = self._ranks.rank, self._ranks.size, self._ranks.group
        after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        message = sent[: sizes[rank]]
        for step in range(size):
            source = (rank - step) % size
            arriving = sent.new_empty(sizes[source - 1] if step < size - 1 else 0)
            ends = ((dist.isend, message, after), (dist.irecv, arriving, before)) if step < size - 1 else ()
            pairs = [dist.P2POp(op, tensor, peer, group) for op, tensor, peer in ends if len(tensor)]
            with naming_ranks(self._ranks, "ring", before, after):
                works = dist.batch_isend_irecv(pairs) if pairs else []
            try:
                yield source, message
            finally:
                with naming_ranks(self._ranks, "ring", before, after):
                    for work in works:
                        work.wait()
            message = arriving


class PeerReads(Gather):
    """Copies out of memory of the other GPUs of this host, which take none of the SMs that attention needs.

    Two barriers between the GPUs order the copies: the first one says that all ranks have read what the last call sent,
    the second one that all ranks have written.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._memory: torch.Tensor | None = None

    def sent(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if self._memory is None or (self._memory.shape, self._memory.dtype) != (torch.Size(shape), like.dtype):
            torch.cuda.synchronize(like.device)  # no rank reads the memory that there was
            self._memory, self._handle, self._peers = peer_memory(self._ranks, shape, like.dtype, like.device)
            self._patience = timeout_of(self._ranks, like.device)
            self._stream = torch.cuda.Stream(like.device, priority=-1)  # type: ignore[no-untyped-call]
        self._handle.barrier(0, self._patience)
        return self._memory

    def start(self, sent: torch.Tensor, received: torch.Tensor) -> Wait:
        *_, last = self._copies(sent, received, [len(sent)] * self._ranks.size).values()
        current = torch.cuda.current_stream(sent.device)
        return lambda: current.wait_event(last)

    def messages(self, sent: torch.Tensor, sizes: list[int]) -> Messages:
        received = sent.new_empty(self._ranks.size, *sent.shape)
        arrived, current = self._copies(sent, received, sizes), torch.cuda.current_stream(sent.device)
        try:
            yield self._ranks.rank, sent
            for peer, event in arrived.items():
                current.wait_event(event)
                yield peer, received[peer, : sizes[peer]]
        finally:
            current.wait_stream(self._stream)

    def _copies(self, sent: torch.Tensor, received: torch.Tensor, sizes: list[int]) -> dict[int, torch.cuda.Event]:
        """Starts them; an event for each rank that is read."""
        self._handle.barrier(1, self._patience)
        arrived = {}
        self._stream.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.cuda.stream(self._stream):
            for peer in self._ranks.others():
                received[peer, : sizes[peer]].copy_(self._peers[peer][: sizes[peer]], non_blocking=True)
                arrived[peer] = self._stream.record_event()
        return arrived


_GATHERS = {"all_gather": Gather, "peer_memory": PeerReads}
_PASSES = {"ring": Passes, **_GATHERS}


def gather_of(kind: str, ranks: Ranks, device: torch.device, *, may_pass: bool = False) -> Gather:
    """The way to gather with this name. may_pass: message by message is enough."""
    known = _PASSES if may_pass else _GATHERS
    if not isinstance(kind, str) or kind not in known:
        raise ValidationError(f"exchange: expected one of {', '.join(known)}, got {kind!r}.")
    if kind == "peer_memory" and device.type != "cuda":
        raise UnsupportedError(f"exchange: 'peer_memory' is for GPUs, got {device}; use 'all_gather'.")
    return known[kind](ranks)
