"""Ranks of a process group; they exchange partial results and keys, by messages or memory that peers read, and merge.

A message is one tensor of bytes with the outputs of some rows and heads, followed by their lse. The merge reads
received messages in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from quire.cache.merge import merge_state, merge_states
from quire.engine.checks import check_flags, check_positive, check_shape, check_tensor
from quire.errors import PlanError, UnsupportedError, ValidationError

#: Arguments of plan() that count from where a token stands in its request, which a rank's part does not say.
_POSITIONS = {
    "attention_chunk_size": None, "pos_encoding_mode": "NONE", "rope_scale": None, "rope_theta": None, "window_left": -1
}  # fmt: skip
#: Of equally many bytes from each rank, into one tensor: the name that torch gives it from 2.13 on, or the older one.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Ranks(NamedTuple):
    """A process group as seen by one of its ranks."""

    group: Any
    rank: int
    size: int


def ranks_of(group: Any) -> Ranks:
    """The ranks of `group`; None: of all processes."""
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


def peer_memory(
    ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Memory of this GPU that the other ranks of the host can read, torch's handle with its barriers, and the memory of
    each rank. A collective. Uses torch's symmetric memory, without multicast.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    handle = symmetric_memory.rendezvous(own, ranks.group)
    return own, handle, [handle.get_buffer(rank, shape, dtype) for rank in range(ranks.size)]


def check_divisible(num_heads: int, ranks: Ranks, name: str, instead: str) -> None:
    """Check that all ranks can have the same number of heads."""
    if check_positive(num_heads, name) % ranks.size:
        raise ValidationError(
            f"{name}: expected a multiple of {ranks.size}, the size of the group, got {num_heads}; {instead}."
        )


def check_agreement(ranks: Ranks, **values: Any) -> None:
    """Check that all ranks have the same `values`: a collective, after which all ranks raise the same error."""
    told: list[Any] = [None] * ranks.size
    dist.all_gather_object(told, values, group=ranks.group)
    for name, first in told[0].items():
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
                f"request; rotate q and k before they are stored, or use Ulysses, which gives a rank whole requests."
            )


# --- exchanges -------------------------------------------------------------------------------------------------------


State = tuple[torch.Tensor, torch.Tensor]  #: o [rows, heads, head_dim] and its base-2 lse [rows, heads]
_ALIGNMENT = 32  #: bytes: eight values, which the merge reads at once
_LOG2_E = math.log2(math.e)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  #: of o; the first is that of lse


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
        used = -(-self.o_bytes // _ALIGNMENT) * _ALIGNMENT + 4 * self.rows * self.heads
        return max(-(-used // _ALIGNMENT), 1) * _ALIGNMENT

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.empty(count, self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, messages: torch.Tensor) -> State:
        """o [count, rows, heads, head_dim] and lse [count, rows, heads] in messages uint8 [count, num_bytes]."""
        lse_begin = -(-self.o_bytes // _ALIGNMENT) * _ALIGNMENT
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
        self._handle.barrier(channel=0)
        merged = self._merge_parts(v_scale)
        self._handle.barrier(channel=1)
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


def merge_over_ranks(
    o: torch.Tensor, lse: torch.Tensor, group: Any = None, *, exchange: str = "all_to_all", natural_lse: bool = False
) -> State:
    """Merges the (o, lse) that all ranks computed for the same queries, each over its own keys.

    o: float32, float16 or bfloat16 [rows, num_qo_heads, head_dim]. lse: float32 [rows, num_qo_heads], base 2, as
        Quire's wrappers return it (run(..., return_lse=True)). natural_lse: lse is a natural logarithm, like
        FlashAttention's, and so is the returned lse. A rank without keys for a row passes lse -inf and any o.
    group: a torch.distributed process group; None: all processes.
    exchange: "all_to_all": each rank gets its part of the heads, [rows, num_qo_heads / size, head_dim], rank 0 the
        first; "all_gather": every rank gets all heads.

    Outputs and lse are exchanged in one message. They are merged in the order of ranks, so that results are repeatable.
    Raises ValidationError naming the argument. All ranks must have tensors of the same shape.

    >>> from quire.distributed import merge_over_ranks
    >>> o, lse = torch.randn(3, 8, 64), torch.randn(3, 8)
    >>> merged, merged_lse = merge_over_ranks(o, lse)  # of a group of one
    >>> torch.equal(merged, o)
    True
    """
    ranks = ranks_of(group)
    check_shape(check_tensor(o, "o"), "o", dict.fromkeys(("rows", "num_qo_heads", "head_dim")))
    check_shape(check_tensor(lse, "lse"), "lse", {"rows": o.shape[0], "num_qo_heads": o.shape[1]})
    check_flags(natural_lse=natural_lse)
    for tensor, name, dtypes in ((o, "o", _DTYPES), (lse, "lse", _DTYPES[:1])):
        if tensor.dtype not in dtypes:
            raise ValidationError(f"{name}: expected dtype {', '.join(map(str, dtypes))}, got {tensor.dtype}.")
    if isinstance(exchange, str) and exchange == "peer_memory":
        raise ValidationError(
            "exchange: expected 'all_to_all' or 'all_gather', as o lies in memory of this rank alone."
        )
    chosen = exchange_of(exchange, ranks, o.shape[0], o.shape[1], o.shape[2], o.dtype, o.device)
    lse = lse * _LOG2_E if natural_lse else lse
    if ranks.size == 1:  # nothing is merged, and o of a row without keys may hold anything
        o = o.masked_fill((lse == -math.inf)[..., None], 0.0)
    merged, total = chosen.merge(o, lse)
    return merged, total / _LOG2_E if natural_lse else total


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


_GATHERS = {"all_gather": Gather, "peer_memory": PeerReads}


def gather_of(kind: str, ranks: Ranks, device: torch.device) -> Gather:
    """The way to gather with this name."""
    if kind not in _GATHERS:
        raise ValidationError(f"exchange: expected one of {', '.join(_GATHERS)}, got {kind!r}.")
    if kind == "peer_memory" and device.type != "cuda":
        raise UnsupportedError(f"exchange: 'peer_memory' is for GPUs, got {device}; use 'all_gather'.")
    return _GATHERS[kind](ranks)
