"""Attention whose queries, keys and values are distributed over ranks: queries stay, keys and values go round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, overload

import torch

from quire.attention.prefill import BatchPrefillWithRaggedKVCacheWrapper
from quire.cache import merge_state_in_place
from quire.distributed.exchange import ALIGNMENT, Messages, check_agreement, gather_of, ranks_of
from quire.engine.checks import check_flags, check_positive, check_shape, check_tensor, scalar
from quire.engine.operands import OperandValue, RemappedOperands, int32_table, variant_of
from quire.engine.options import logits_options
from quire.engine.wrapper import Pair
from quire.errors import PlanError, ValidationError
from quire.kernels.expressions.rewrite import COLUMNS, FIRST_ROWS, ROWS, reads_indices, variant_of_level, variant_under
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import dtype_of

# --- keys and values -------------------------------------------------------------------------------------------------


class Wire(NamedTuple):
    """The bytes in which keys and values of some tokens are sent: the keys, then the values.

    sent_as: a type of 8 bits that they are rounded to for the way, with a factor for each head, or None.
    """

    num_kv_heads: int
    head_dims: tuple[int, int]  #: of keys and of values
    dtype: torch.dtype
    sent_as: torch.dtype | None = None

    @property
    def _factors(self) -> int:
        """The bytes of the factors, before those of the numbers."""
        return 0 if self.sent_as is None else -(-8 * self.num_kv_heads // ALIGNMENT) * ALIGNMENT

    def num_bytes(self, tokens: int) -> int:
        size = self.num_kv_heads * sum(self.head_dims) * (self.sent_as or self.dtype).itemsize
        return self._factors + tokens * size if tokens else 0

    def pack(self, k: torch.Tensor, v: torch.Tensor, message: torch.Tensor) -> None:
        """Writes k and v [tokens, num_kv_heads, head_dim] into uint8 [num_bytes or more]."""
        if not len(k):
            return
        for tensor, target, factors in zip((k, v), self._views(message, len(k)), self._scales(message), strict=True):
            if factors is None:
                target.copy_(tensor)
                continue
            assert self.sent_as is not None
            largest = tensor.abs().amax((0, 2)).float()
            factors.copy_(largest.clamp(min=2.0**-100) / torch.finfo(self.sent_as).max)
            target.copy_(tensor / factors[:, None])

    def unpack(self, message: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What pack() was given; a part of the message where nothing was rounded."""
        if not tokens:
            empty = (message.new_empty((0, self.num_kv_heads, dim), dtype=self.dtype) for dim in self.head_dims)
            return tuple(empty)  # type: ignore[return-value]
        pairs = zip(self._views(message, tokens), self._scales(message), strict=True)
        k, v = (x if factors is None else (x.float() * factors[:, None]).to(self.dtype) for x, factors in pairs)
        return k, v

    def _views(self, message: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        dtype, begin, found = self.sent_as or self.dtype, self._factors, []
        for dim in self.head_dims:
            end = begin + tokens * self.num_kv_heads * dim * dtype.itemsize
            found.append(message[begin:end].view(dtype).view(tokens, self.num_kv_heads, dim))
            begin = end
        return found

    def _scales(self, message: torch.Tensor) -> list[torch.Tensor | None]:
        """The factors of the heads of keys and of values: float32 [num_kv_heads]."""
        if self.sent_as is None:
            return [None, None]
        return [*message[: 8 * self.num_kv_heads].view(torch.float32).view(2, -1)]


# --- attention -------------------------------------------------------------------------------------------------------


class Layout(Protocol):
    """Which tokens of each sequence a rank has: chunks, numbered in the order of tokens."""

    num_ranks: int
    seq_lens: torch.Tensor  #: int [batch_size], on the host

    def begin(self, chunk: int) -> torch.Tensor:
        """The first token of a chunk in each sequence."""

    def length(self, chunk: int) -> torch.Tensor:
        """The tokens of a chunk of each sequence."""

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The numbers of the chunks of a rank, which ascend."""


class InOrder:
    """Each rank has consecutive tokens of each sequence, rank 0 the first.

    token_counts: how many tokens of each sequence each rank has, [batch_size][num_ranks] or, of one sequence,
        [num_ranks]: any numbers, also 0.

    >>> from quire.distributed import InOrder
    >>> in_order = InOrder([[5, 3], [2, 0]])
    >>> in_order.rows(0), in_order.rows(1)  # of the concatenated sequences: 0 to 7, and 8 and 9
    (tensor([0, 1, 2, 3, 4, 8, 9]), tensor([5, 6, 7]))
    """

    def __init__(self, token_counts: Sequence[Sequence[int]] | Sequence[int] | torch.Tensor) -> None:
        counts = torch.as_tensor(token_counts, device="cpu")
        counts = counts[None] if counts.dim() == 1 else counts
        if counts.dim() != 2 or counts.is_floating_point() or not counts.shape[1] or bool((counts < 0).any()):
            raise ValidationError(
                f"token_counts: expected numbers of tokens [batch_size][num_ranks], got {counts.tolist()}."
            )
        self._counts = counts.long()
        self._begins = torch.nn.functional.pad(self._counts.cumsum(1), (1, 0))
        self.num_ranks, self.seq_lens = counts.shape[1], self._counts.sum(1)

    def begin(self, chunk: int) -> torch.Tensor:
        """The first token of a chunk in each sequence."""
        return self._begins[:, chunk]

    def length(self, chunk: int) -> torch.Tensor:
        """The tokens of a chunk of each sequence."""
        return self._counts[:, chunk]

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The number of the chunk of a rank."""
        return (rank,)

    def rows(self, rank: int) -> torch.Tensor:
        """Indices of a rank's tokens among the concatenated sequences: int64, sequence by sequence."""
        return rows_of(self, rank)


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1] of counts [n]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def rows_of(layout: Layout, rank: int) -> torch.Tensor:
    """Indices of a rank's tokens among the concatenated sequences: int64, sequence by sequence, chunk by chunk."""
    first = layout.seq_lens.cumsum(0) - layout.seq_lens
    begins = [(layout.begin(chunk), layout.length(chunk)) for chunk in layout.chunks(rank)]
    parts = [
        torch.arange(int(n[i]), device="cpu") + first[i] + begin[i] for i in range(len(first)) for begin, n in begins
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")


class _Launch(NamedTuple):
    """Queries of this rank and keys of a message, cut into requests: int [requests], the lengths of each."""

    qo_lens: torch.Tensor
    kv_lens: torch.Tensor
    causal: bool = False
    first_key: torch.Tensor | None = None  #: of each sequence, where indices are those of whole sequences


class _Part(NamedTuple):
    """The queries of a rank, and which keys of others they see."""

    layout: Layout
    keys: Layout
    rank: int

    def counts(self, layout: Layout, rank: int) -> torch.Tensor:
        """The tokens of a rank, [batch_size, its chunks]."""
        return torch.stack([layout.length(chunk) for chunk in layout.chunks(rank)], 1)

    @property
    def num_rows(self) -> int:
        return int(self.counts(self.layout, self.rank).sum())

    def num_keys(self) -> list[int]:
        """Of each rank."""
        return [int(self.counts(self.keys, rank).sum()) for rank in range(self.keys.num_ranks)]

    def plain(self, source: int, causal: bool) -> list[_Launch]:
        """Of the keys of a rank, without places: all queries see all keys, or those of later chunks do."""
        queries, found = self.counts(self.layout, self.rank), self.counts(self.keys, source)
        if source == self.rank or not causal:
            return [_Launch(queries.sum(1), found.sum(1), causal)]
        seen = [sum(chunk < own for chunk in self.keys.chunks(source)) for own in self.layout.chunks(self.rank)]
        if not any(seen):
            return []
        first, count = next(i for i, n in enumerate(seen) if n), max(seen)
        assert {*seen[first:]} == {count}, "chunks that see different keys"
        before, none = queries[:, :first].sum(1), torch.zeros_like(queries[:, 0])
        qo_lens = before, queries[:, first:].sum(1), none
        return [_Launch(_flat(*qo_lens), _flat(none, found[:, :count].sum(1), found[:, count:].sum(1)))]

    def placed(self, source: int, causal: bool, window_left: int) -> list[_Launch]:
        """Of the keys of a rank, with their places: a launch for each of its chunks, which are consecutive."""
        queries, found = self.counts(self.layout, self.rank).sum(1), self.counts(self.keys, source)
        none = torch.zeros_like(queries)
        return [
            _Launch(
                _flat(none, queries, none), _flat(found[:, :i].sum(1), found[:, i], found[:, i + 1 :].sum(1)),
                first_key=self.keys.begin(chunk),
            )
            for i, chunk in enumerate(self.keys.chunks(source))
            if source == self.rank or self._sees(chunk, causal, window_left)
        ]  # fmt: skip

    def _sees(self, chunk: int, causal: bool, window_left: int) -> bool:
        """Whether a causal mask and a window leave anything of a chunk of keys."""
        if self.keys is not self.layout:
            return True
        own, ends = self.layout.chunks(self.rank), self.keys.begin(chunk) + self.keys.length(chunk)
        is_near = window_left < 0 or bool((ends > self.layout.begin(own[0]) - window_left).any())
        return is_near and (not causal or chunk < own[-1])

    def places(self, launch: _Launch) -> dict[str, torch.Tensor]:
        """The tables that a variant over whole sequences reads in a launch; none where it reads no index."""
        if launch.first_key is None:
            return {}
        queries = self.counts(self.layout, self.rank).sum(1)
        request = torch.arange(len(queries), device="cpu").repeat_interleave(queries)
        first = self.layout.seq_lens.cumsum(0) - self.layout.seq_lens
        columns = {
            "q_idx": rows_of(self.layout, self.rank) - first[request], "request": request,
            "qo_len": self.layout.seq_lens[request], "kv_len": self.keys.seq_lens[request],
            "first_key": launch.first_key[request],
        }  # fmt: skip
        return {
            FIRST_ROWS: offsets_of(launch.qo_lens)[:-1], ROWS: torch.stack([columns[name] for name in COLUMNS], 1)
        }  # fmt: skip


def _flat(*columns: torch.Tensor) -> torch.Tensor:
    return torch.stack(columns, 1).flatten()


class RingAttention:
    """Attention of sequences whose tokens are distributed over ranks in any way, under any mask of a quire.Variant.

    float_workspace_buffer, backend: as in quire's wrappers. group: a torch.distributed process group; None: all
        processes. An NCCL group should have ProcessGroupNCCL.Options(is_high_priority_stream=True), so that it sends
        while attention runs, not after it.
    exchange: "ring": each rank passes keys and values on to the next one, and needs memory for those of two ranks;
        "all_gather": one collective; "peer_memory": copies out of the memory of the other GPUs of the host.
    sent_as: torch.float8_e4m3fn or torch.float8_e5m2: keys and values are rounded to it for the way, with a factor for
        each head, and widened on arrival: half of the bytes on slow networks. None: they are sent as they are.
    variant: a custom quire.Variant. Its indices and lengths are those of whole sequences, on all ranks together.

    Each rank attends to its own keys while the next ones arrive, and merges. Causal attention is even over the ranks if
    the layout is a quire.distributed.Zigzag; without a variant and a window quire.distributed.ZigzagPrefill is faster.

    >>> from quire.distributed import InOrder, RingAttention
    >>> ring = RingAttention(torch.empty(1 << 20, dtype=torch.uint8))  # the group has one rank here
    >>> ring.plan(InOrder([40]), 8, 2, 64, q_data_type=torch.bfloat16)
    >>> q, k, v = (torch.randn(40, heads, 64).bfloat16() for heads in (8, 2, 2))
    >>> ring.run(q, k, v).shape
    torch.Size([40, 8, 64])
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, group: Any = None, *, exchange: str = "ring",
        sent_as: torch.dtype | None = None, variant: Variant | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        self._ranks, self._variant = ranks_of(group), variant_of(variant)
        if sent_as not in (None, torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValidationError(f"sent_as: expected torch.float8_e4m3fn, torch.float8_e5m2 or None, got {sent_as!r}.")
        self._sent_as = sent_as
        self._made_of = float_workspace_buffer, "NHD", False, None, None, None, None, backend
        self.device = BatchPrefillWithRaggedKVCacheWrapper(*self._made_of).device
        self._kind, self._gather = exchange, gather_of(exchange, self._ranks, self.device, may_pass=True)
        self._wire: Wire | None = None  # once planned

    def plan(
        self, layout: Layout, num_qo_heads: int, num_kv_heads: int, head_dim: int, *, kv_layout: Layout | None = None,
        head_dim_vo: int | None = None, causal: bool = False, window_left: int = -1, sm_scale: float | None = None,
        logits_soft_cap: float | None = None, q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None, o_data_type: str | torch.dtype | None = None,
        fixed_split_size: int | None = None, disable_split_kv: bool = False, check_ranks: bool = False,
        first_head: int = 0, all_heads: int | None = None, **operands: OperandValue,
    ) -> None:  # fmt: skip
        """Plan a batch.

        layout: which tokens each rank has: quire.distributed.InOrder or Zigzag, the same on all ranks.
        kv_layout: that of keys and values if they are other tokens than the queries; None: layout.
        causal, window_left: as in BatchPrefillWithRaggedKVCacheWrapper.plan(), of whole sequences. So are the other
            arguments, up to disable_split_kv.
        check_ranks: compare lengths and options with the other ranks, which waits for them.
        first_head, all_heads: the number of the first head of q, and that of all heads, where a variant reads heads and
            q has a part of them (Ulysses). None: first_head + num_qo_heads.
        operands: tensors and numbers, by name, that the mask of the constructor's variant reads.

        Raises ValidationError or UnsupportedError naming the argument.
        """
        check_flags(causal=causal, check_ranks=check_ranks)
        logits_options(head_dim, sm_scale, window_left, logits_soft_cap, "NONE")  # as the launches will check them
        part = self._part(layout, kv_layout or layout)
        dims = head_dim, head_dim if head_dim_vo is None else head_dim_vo
        options = {
            "sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type,
            "kv_data_type": kv_data_type, "o_data_type": o_data_type, "fixed_split_size": fixed_split_size,
            "disable_split_kv": disable_split_kv,
        }  # fmt: skip
        if check_ranks:
            check_agreement(
                self._ranks, exchange=self._kind, tokens=part.num_keys(), num_kv_heads=num_kv_heads, head_dims=dims,
                sent_as=str(self._sent_as), causal=causal, window_left=window_left, options=str(options),
            )  # fmt: skip
        dtype = dtype_of(q_data_type if kv_data_type is None else kv_data_type, "kv_data_type").torch
        if self._sent_as is not None and dtype.itemsize == 1:
            raise ValidationError(f"sent_as: expected None, as keys and values of {dtype} are sent as they are.")
        wire = Wire(check_positive(num_kv_heads, "num_kv_heads"), dims, dtype, self._sent_as)
        heads = check_positive(num_qo_heads, "num_qo_heads"), num_kv_heads
        wants_places = self._variant is not None and reads_indices(self._variant)
        is_placed = wants_places or window_left >= 0 or (causal and part.keys is not layout)
        variant = variant_under(self._variant, causal and is_placed, window_left, first_head)
        launches = [
            part.placed(source, causal, window_left) if is_placed else part.plain(source, causal)
            for source in range(layout.num_ranks)
        ]
        flat = [launch for each in launches for launch in each]
        remapped = self._remapped_of(variant, part, flat, all_heads or first_head + heads[0])
        given = [operands] * len(flat) if remapped is None else remapped.of_plan(operands)
        planned = variant if remapped is None else remapped.planned
        wrappers = [BatchPrefillWithRaggedKVCacheWrapper(*self._made_of, variant=planned) for _ in flat]
        for wrapper, launch, own in zip(wrappers, flat, given, strict=True):
            offsets = offsets_of(launch.qo_lens), offsets_of(launch.kv_lens)
            wrapper.plan(*offsets, *heads, *dims, causal=launch.causal, **{**options, **own})
        self._wire, self._rows, self._tokens = wire, part.num_rows, part.num_keys()
        self._wrappers, self._remapped = wrappers, remapped
        numbers = iter(range(len(flat)))
        self._steps = [[next(numbers) for _ in each] for each in launches]

    def _part(self, layout: Layout, keys: Layout) -> _Part:
        for found, name in ((layout, "layout"), (keys, "kv_layout")):
            if found.num_ranks != self._ranks.size or len(found.seq_lens) != len(layout.seq_lens):
                raise ValidationError(
                    f"{name}: expected {len(layout.seq_lens)} sequences over the group's {self._ranks.size} ranks, got "
                    f"{len(found.seq_lens)} over {found.num_ranks}."
                )
        return _Part(layout, keys, self._ranks.rank)

    def _remapped_of(
        self, variant: Variant | None, part: _Part, launches: list[_Launch], num_heads: int
    ) -> RemappedOperands | None:  # fmt: skip
        """What kernels are given of a variant, in each launch."""
        if variant is None:
            return None
        planned = variant_of_level(variant)
        read = {operand.name for operand in planned.expression.operands}
        tables = [
            {name: int32_table(table, self.device) for name, table in part.places(launch).items() if name in read}
            for launch in launches
        ]
        longest = [int(lens.max()) if len(lens) else 0 for lens in (part.layout.seq_lens, part.keys.seq_lens)]
        limits = {"head": num_heads, "request": len(part.layout.seq_lens)}
        limits |= dict(zip(("q_idx", "kv_idx"), longest, strict=True))
        return RemappedOperands(self._variant or variant, planned, tuple(tables), limits, self.device)

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: Literal[False] = False, q_scale: float | None = None, k_scale: float | None = None,
        v_scale: float | None = None, **operands: OperandValue,
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: Literal[True], q_scale: float | None = None, k_scale: float | None = None,
        v_scale: float | None = None, **operands: OperandValue,
    ) -> Pair: ...  # fmt: skip
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, sinks: torch.Tensor | None = None,
        return_lse: bool = False, q_scale: float | None = None, k_scale: float | None = None,
        v_scale: float | None = None, **operands: OperandValue,
    ) -> torch.Tensor | Pair:  # fmt: skip
        """Attention of this rank's q [rows, num_qo_heads, head_dim] to the keys of all ranks, of which k and v [tokens,
        num_kv_heads, head_dim] are this rank's; returns o, or (o, lse) with lse float32, base 2.

        sinks: as in the wrappers' run(), the same on all ranks. q_scale, k_scale, v_scale: numbers, the same on all
        ranks. operands: tensors and numbers, by name, that the score of the constructor's variant reads.
        Raises RankError if another rank fails or does not answer within the timeout of the group.
        """
        wire = self._planned()
        self._check(q, k, v, wire)
        given = self._remapped.of_run(operands) if self._remapped else [operands] * len(self._wrappers)
        shared: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "return_lse": True}
        state: Pair | None = None
        for source, message in self._messages(k, v, wire):
            own = source == self._ranks.rank
            keys = (k, v) if own else wire.unpack(message, self._tokens[source])
            for step in self._steps[source]:
                added: Pair = self._wrappers[step].run(
                    q, *keys, sinks=sinks if state is None else None, **{**shared, **given[step]}
                )
                if state is not None:
                    merge_state_in_place(*state, *added)
                state = state or added
        assert state is not None  # a rank attends to its own keys first, even if it has none
        if v_scale is not None:
            state[0].mul_(scalar(v_scale, "v_scale"))
        return state if return_lse else state[0]

    def _messages(self, k: torch.Tensor, v: torch.Tensor, wire: Wire) -> Messages:
        """What all ranks have sent, this one's first."""
        if self._ranks.size == 1:
            return iter([(self._ranks.rank, k)])
        sizes = [wire.num_bytes(tokens) for tokens in self._tokens]
        like = k.new_empty(0, dtype=torch.uint8)
        sent = self._gather.sent((max(sizes),), like)
        wire.pack(k, v, sent)
        return self._gather.messages(sent, sizes)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wire: Wire) -> None:
        tokens, dim_qk = self._tokens[self._ranks.rank], wire.head_dims[0]
        check_shape(check_tensor(q, "q"), "q", {"rows": self._rows, "num_qo_heads": None, "head_dim": dim_qk})
        for tensor, name, dim in zip((k, v), "kv", wire.head_dims, strict=True):
            sizes = {"tokens": tokens, "num_kv_heads": wire.num_kv_heads, "head_dim": dim}
            check_shape(check_tensor(tensor, name), name, sizes)
            if tensor.dtype != wire.dtype:
                raise ValidationError(f"{name}: expected dtype {wire.dtype}, as planned, got {tensor.dtype}.")

    def _planned(self) -> Wire:
        if self._wire is None:
            raise PlanError("run() was called before plan(): call plan() first, once per batch.")
        return self._wire


def groups_of(mesh: Any) -> Mapping[str, Any]:
    """The process groups of a DeviceMesh: "ring", "ulysses" or both."""
    if isinstance(mesh, Mapping):
        return mesh
    given = tuple(mesh.mesh_dim_names or ())
    names = ("ring",) if mesh.ndim == 1 and given != ("ulysses",) else given
    if len(names) != mesh.ndim or not {*names} <= {"ring", "ulysses"}:
        raise ValidationError(
            f'mesh: expected dimensions "ring" and "ulysses", as of mesh["ring", "ulysses"], got {given}.'
        )
    return {name: mesh.get_group(i) for i, name in enumerate(names)}
