"""Causal prefill with the tokens distributed over the ranks of a group in zigzag order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist

from quire.attention.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from quire.cache import merge_state_in_place
from quire.distributed.exchange import (
    Gather,
    Ranks,
    Wait,
    check_agreement,
    check_divisible,
    gather_of,
    naming_ranks,
    ranks_of,
    refuse_positions,
)
from quire.distributed.ring import InOrder, Layout, RingAttention, groups_of, offsets_of, rows_of
from quire.engine.checks import check_flags, check_positive, check_shape, check_tensor, host_indices, is_choice
from quire.engine.wrapper import Pair
from quire.errors import PlanError, ValidationError

_MOST_TOKENS = 1 << 16  #: of a page: chunks are multiples of it, and so is what each rank allocates
_EARLY, _LATE = _HALVES = (0, 1)  #: the chunks of a rank


class ZigzagPrefill:
    """Causal attention of whole sequences, of which each rank has two chunks: see quire.distributed.Zigzag.

    float_workspace_buffer, backend: as in quire's wrappers. group: a torch.distributed process group; None: all
        processes. An NCCL group should have ProcessGroupNCCL.Options(is_high_priority_stream=True), so that its
        all-gather runs at the same time as attention, not after it.
    page_size: the length of chunks is a multiple of this number of tokens.
    exchange: "all_gather": by the process group; "peer_memory": by copies out of the memory of the other GPUs, if all
        ranks are on one host. Such copies take no SM from attention, so they are faster.
    num_gathers: 1: one all-gather of the keys and values of all chunks; 2: attention to the early chunks runs while the
        late ones are gathered. Use 2 if the network takes longer than attention to a rank's own tokens.

    run() starts the all-gather of keys and values, attends to the rank's own tokens meanwhile, then attends to the
    tokens of the other ranks, and merges.

    >>> from quire.distributed import ZigzagPrefill
    >>> prefill = ZigzagPrefill(torch.empty(1 << 20, dtype=torch.uint8))  # the group has one rank here
    >>> prefill.plan(torch.tensor([40, 7]), 8, 2, 64, q_data_type=torch.bfloat16)
    >>> q, k, v = (torch.randn(47, heads, 64).bfloat16() for heads in (8, 2, 2))
    >>> rows = prefill.rows  # which of the 47 tokens are this rank's
    >>> prefill.run(q[rows], k[rows], v[rows]).shape
    torch.Size([47, 8, 64])
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, group: Any = None, *, page_size: int = 128, num_gathers: int = 1,
        exchange: str = "all_gather", backend: str = "auto",
    ) -> None:  # fmt: skip
        self._ranks = ranks_of(group)
        self._page_size = check_positive(page_size, "page_size")
        if page_size > _MOST_TOKENS:
            raise ValidationError(f"page_size: expected at most {_MOST_TOKENS} tokens, got {page_size}.")
        if not is_choice(num_gathers, (1, 2)):
            raise ValidationError(f"num_gathers: expected 1 or 2, got {num_gathers!r}.")
        self._own = BatchPrefillWithRaggedKVCacheWrapper(float_workspace_buffer, backend=backend)
        halves = (_HALVES,) if num_gathers == 1 else tuple((half,) for half in _HALVES)
        self._kind, device = exchange, self._own.device
        self._exchanges = [
            _Exchange(each, float_workspace_buffer, self._ranks, backend, gather_of(exchange, self._ranks, device))
            for each in halves
        ]
        self._active: list[_Exchange] = []  # none if the planned batch or the group has nothing to send
        self._zigzag: Zigzag | None = None

    def plan(
        self, seq_lens: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int, *, check_ranks: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        """Plan a batch.

        seq_lens: int [batch_size], tokens of each sequence on all ranks together, the same on all ranks.
        check_ranks: compare lengths and options with the other ranks, which waits for them.
        options: as in BatchPrefillWithRaggedKVCacheWrapper.plan(): sm_scale, logits_soft_cap, q_data_type,
            fixed_split_size, ... Those that depend on positions (window_left, pos_encoding_mode, ...) are refused.
            With fixed_split_size or disable_split_kv the result of a sequence does not depend on the others.
        """
        check_flags(check_ranks=check_ranks)
        refuse_positions("ZigzagPrefill", options)
        lens = host_indices(seq_lens, "seq_lens")
        if check_ranks:
            check_agreement(
                self._ranks, seq_lens=lens.tolist(), page_size=self._page_size, exchange=self._kind,
                num_kv_heads=num_kv_heads, head_dim=head_dim, options=str(sorted(options.items())),
            )  # fmt: skip
        zigzag = Zigzag(lens, self._ranks.size, self._page_size)
        shape = num_qo_heads, num_kv_heads, head_dim
        early, late = (zigzag.length(chunk) for chunk in zigzag.chunks(self._ranks.rank))
        indptr = offsets_of(early + late)
        self._own.plan(indptr, indptr, *shape, causal=True, **options)
        for exchange in self._exchanges:
            exchange.plan(zigzag, early, late, shape, options)
        self._active = self._exchanges if self._ranks.size > 1 and bool(lens.any()) else []
        self._zigzag = zigzag

    @property
    def rows(self) -> torch.Tensor:
        """Indices of this rank's rows among the concatenated planned sequences: int64, on the host."""
        return self._planned().rows(self._ranks.rank)

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: Literal[True],
    ) -> Pair: ...  # fmt: skip
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | Pair:  # fmt: skip
        """Attention of this rank's q [rows, num_qo_heads, head_dim] to the tokens of all ranks, of which k and v
        [rows, num_kv_heads, head_dim] are this rank's; returns o, or (o, lse) with lse float32, base 2.
        """
        num_rows = int(self._planned().rows(self._ranks.rank).numel())
        for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
            check_shape(check_tensor(tensor, name), name, {"rows": num_rows, "num_heads": None, "head_dim": None})
        arriving = [exchange.start(k, v) for exchange in self._active]
        try:
            o, lse = self._own.run(q, k, v, return_lse=True, sinks=sinks)
            for exchange, (wait, received) in zip(self._active, arriving, strict=True):
                wait()
                exchange.attend(q, received, o, lse)
        except BaseException:
            for wait, _ in arriving:  # before their memory is let go
                wait()
            raise
        return (o, lse) if return_lse else o

    def _planned(self) -> Zigzag:
        if self._zigzag is None:
            raise PlanError("run() was called before plan(): call plan() first, once per batch.")
        return self._zigzag


class _Exchange:
    """The exchange of the early or the late chunks of all ranks, or both, and attention to those of the other ranks.

    A rank sends pages: for each half the keys of its chunk of each sequence, then the values, padded so that all ranks
    send the same number of bytes. A query that sees a page of another rank sees all of it, so there is no mask.
    """

    def __init__(
        self, halves: tuple[int, ...], workspace: torch.Tensor, ranks: Ranks, backend: str, gather: Gather
    ) -> None:
        self._halves, self._ranks, self._gather = halves, ranks, gather
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)

    def plan(
        self, zigzag: Zigzag, early: torch.Tensor, late: torch.Tensor, shape: tuple[int, int, int],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        self._page_size, self._pages = zigzag.page_size, int(zigzag.chunk_pages.sum())
        first, padded = offsets_of(early + late)[:-1], zigzag.chunk_pages * zigzag.page_size
        sources = [_padded(first + half * early, (early, late)[half], padded) for half in self._halves]
        self._sources = [source.to(self._wrapper.device) for source in sources]
        rows = torch.stack([early, late], 1).flatten()  # a request of its own for each chunk of queries
        pages = self._visible_pages(zigzag, rows)
        counts = torch.tensor([len(numbers) for numbers in pages], device="cpu")
        self._has_keys = bool(counts.any())
        if self._has_keys:
            full = torch.full(counts.shape, zigzag.page_size, dtype=torch.int32, device="cpu")
            indices = torch.cat(pages).int()
            self._wrapper.plan(offsets_of(rows), offsets_of(counts), indices, full, *shape, zigzag.page_size, **options)
            seen = (counts > 0).repeat_interleave(rows)
            self._mask = None if bool(seen.all()) else seen.to(self._wrapper.device)

    def _visible_pages(self, zigzag: Zigzag, rows: torch.Tensor) -> list[torch.Tensor]:
        """For each chunk of queries, the received pages of other ranks that it sees, by number."""
        first = zigzag.chunk_pages.cumsum(0) - zigzag.chunk_pages
        pages = []
        for i in range(len(first)):
            own = first[i] + torch.arange(int(zigzag.chunk_pages[i]), device="cpu")
            for queries in _HALVES:
                seen = self._seen_chunks(queries) if rows[2 * i + queries] else []
                pages.append(torch.cat([own[:0], *(own + 2 * self._pages * chunk for chunk in seen)]))
        return pages

    def _seen_chunks(self, queries: int) -> list[int]:
        """Which of the received chunks of other ranks a chunk of queries sees."""
        rank, size, count = self._ranks.rank, self._ranks.size, len(self._halves)
        seen = []
        for at, half in enumerate(self._halves):
            before = range(rank) if half == _EARLY else range(0)  # early chunks of these come before both of ours
            behind = range(rank + 1, size) if queries == _LATE else range(0)
            seen += [other * count + at for other in (*before, *behind)]
        return seen

    def start(self, k: torch.Tensor, v: torch.Tensor) -> tuple[Wait, torch.Tensor]:
        """Starts the gather; returns what to wait for, and pages [ranks * halves * 2 * pages, page_size, ...]."""
        count = len(self._halves) * 2 * self._pages
        sent = self._gather.sent((count, self._page_size, *k.shape[1:]), k)
        for source, half in zip(self._sources, sent.view(len(self._halves), 2, -1, *k.shape[1:]), strict=True):
            for tensor, target in zip((k, v), half, strict=True):
                if len(k):
                    torch.index_select(tensor, 0, source, out=target)
                else:
                    target.zero_()
        received = k.new_empty(self._ranks.size, *sent.shape)
        return self._gather.start(sent, received), received.flatten(0, 1)

    def attend(self, q: torch.Tensor, received: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Merges attention to the received pages into o and lse."""
        if self._has_keys:
            cache = received[: -self._pages], received[self._pages :]  # keys; values lie so many pages further
            merge_state_in_place(o, lse, *self._wrapper.run(q, cache, return_lse=True), self._mask)


def _padded(first: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """For each sequence `lengths` row numbers: `counts` consecutive ones from `first` on, then any others."""
    owner = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
    at = torch.arange(len(owner), device="cpu") - (lengths.cumsum(0) - lengths)[owner]
    return torch.where(at < counts[owner], first[owner] + at, 0)


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
        return rows_of(self, rank)


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

        All tensors are sent in one message, also if their dtypes differ. Rank r gets the r-th part of the heads. If
        there are fewer KV heads than ranks, KV heads are repeated, so that each rank has the one that its queries need.
        """
        size, own = self._ranks.size, self._counts[self._ranks.rank]
        parts = [self._by_rank(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
        widths = [part.shape[2] * part.shape[3] * part.itemsize for part in parts]
        sent = torch.empty(size, own, sum(widths), dtype=torch.uint8, device=parts[0].device)
        received = sent.new_empty(sum(self._counts), sum(widths))
        for part, target in zip(parts, torch.split(sent, widths, 2), strict=True):
            target.view(part.dtype).view(size, own, *part.shape[2:]).copy_(part.transpose(0, 1))
        self._exchange(received, sent.flatten(0, 1), self._counts, [own] * size)
        columns = zip(torch.split(received, widths, 1), parts, strict=True)
        return tuple(x.view(part.dtype).view(len(x), *part.shape[2:]) for x, part in columns)

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
        with naming_ranks(self._ranks, "all_to_all"):
            dist.all_to_all_single(received, sent, received_counts, sent_counts, group=self._ranks.group)


class MeshAttention:
    """RingAttention along one dimension of a torch DeviceMesh, and Ulysses along the other.

    float_workspace_buffer, exchange, sent_as, variant, backend: as in quire.distributed.RingAttention.
    mesh: a torch.distributed.device_mesh.DeviceMesh with a dimension "ring", "ulysses" or both; of other meshes take
        mesh["ring", "ulysses"]. A mesh of one dimension with another name is a ring. Or the process groups by these
        names. Rank r of the ring and u of Ulysses counts as rank r * (ranks of Ulysses) + u.

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from quire.distributed import InOrder, MeshAttention
    >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))  # one rank here
    >>> attention = MeshAttention(torch.empty(1 << 20, dtype=torch.uint8), mesh)
    >>> attention.plan(InOrder([40]), 8, 2, 64, q_data_type=torch.bfloat16)
    >>> q, k, v = (torch.randn(40, heads, 64).bfloat16() for heads in (8, 2, 2))
    >>> attention.run(q, k, v).shape
    torch.Size([40, 8, 64])
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, mesh: Any, **options: Any) -> None:
        groups = groups_of(mesh)
        alone = Ranks(None, 0, 1)
        self._across, self._around = (
            ranks_of(groups[name]) if name in groups else alone for name in ("ulysses", "ring")
        )
        self._ring = RingAttention(float_workspace_buffer, self._around, **options)
        self._planned_rows: tuple[_Row, _Row] | None = None  # of queries and of keys, once planned

    def plan(
        self, layout: Layout, num_qo_heads: int, num_kv_heads: int, head_dim: int, *, kv_layout: Layout | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Plan a batch.

        layout: an InOrder of all ranks; or a Layout of the ranks of the ring, such as Zigzag, of whose tokens each rank
            of Ulysses has an equal part. kv_layout: that of keys and values; None: layout.
        The other arguments are those of RingAttention.plan(). Fewer KV heads than ranks of Ulysses are repeated.
        """
        size = self._across.size
        instead = "use the ring for more ranks"
        check_divisible(num_qo_heads, self._across, "num_qo_heads", instead)
        if check_positive(num_kv_heads, "num_kv_heads") >= size or size % num_kv_heads:
            check_divisible(num_kv_heads, self._across, "num_kv_heads", instead)
        place = self._around, self._across, self._ring.device
        queries = _Row.of(layout, *place)
        keys = queries if kv_layout is None else _Row.of(kv_layout, *place)
        heads = num_qo_heads // size, max(1, num_kv_heads // size)
        self._ring.plan(
            queries.layout, *heads, head_dim, kv_layout=None if keys is queries else keys.layout,
            first_head=self._across.rank * heads[0], all_heads=num_qo_heads, **options,
        )  # fmt: skip
        self._planned_rows, self._num_heads = (queries, keys), num_qo_heads

    @property
    def rows(self) -> torch.Tensor:
        """Indices of this rank's rows among the concatenated planned sequences: int64, on the host."""
        return self._planned()[0].rows

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: bool = False, **options: Any,
    ) -> torch.Tensor | Pair:  # fmt: skip
        """As RingAttention.run(), of this rank's rows of q, k and v with all heads."""
        queries, keys = self._planned()
        if sinks is not None:
            check_shape(check_tensor(sinks, "sinks"), "sinks", {"num_qo_heads": self._num_heads})
            sinks = sinks.chunk(self._across.size)[self._across.rank]
        q, k, v = queries.gather(q, k, v) if keys is queries else (*queries.gather(q), *keys.gather(k, v))
        o, lse = self._ring.run(q, k, v, sinks=sinks, return_lse=True, **options)
        o = queries.scatter(o)
        return (o, queries.scatter(lse[..., None])[..., 0]) if return_lse else o

    def _planned(self) -> tuple[_Row, _Row]:
        if self._planned_rows is None:
            raise PlanError("run() was called before plan(): call plan() first, once per batch.")
        return self._planned_rows


class _Row(NamedTuple):
    """A row of the mesh: the ranks of Ulysses that have the tokens of one rank of the ring together."""

    layout: Layout  #: of the ring
    ulysses: Ulysses | None  #: None: there is one rank
    rows: torch.Tensor  #: this rank's, among the concatenated sequences
    order: Pair | None  #: of tokens as they arrive, and back; None: they arrive sequence by sequence

    @classmethod
    def of(cls, layout: Layout, around: Ranks, across: Ranks, device: torch.device) -> _Row:
        size, ring = across.size, around.rank
        if layout.num_ranks == around.size:
            parts = rows_of(layout, ring).tensor_split(size)
            ulysses = Ulysses([len(part) for part in parts], across) if size > 1 else None
            return cls(layout, ulysses, parts[across.rank], None)
        if not isinstance(layout, InOrder) or layout.num_ranks != around.size * size:
            raise ValidationError(
                f"layout: expected an InOrder of {around.size * size} ranks, or a layout of the ring's {around.size}, "
                f"got a {type(layout).__name__} of {layout.num_ranks}."
            )
        counts = torch.stack([layout.length(rank) for rank in range(layout.num_ranks)], 1).view(-1, around.size, size)
        mine = InOrder(counts[:, ring])
        places = torch.cat([mine.rows(rank) for rank in range(size)])
        order = None if bool((places.diff() > 0).all()) else (places.argsort().to(device), places.to(device))
        rows = rows_of(layout, ring * size + across.rank)
        return cls(InOrder(counts.sum(2)), Ulysses(counts[:, ring].sum(0).tolist(), across), rows, order)

    def gather(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All tokens, of a part of the heads."""
        if self.ulysses is None:
            return tensors
        found = self.ulysses.to_heads(*tensors)
        return found if self.order is None else tuple(x[self.order[0]] for x in found)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, of all heads."""
        x = x if self.order is None else x[self.order[1]]
        return x if self.ulysses is None else self.ulysses.to_tokens(x)
