"""The schedule: every piece of work is done exactly once, by partitions that are equal, within a bound that is known.

The plan is walked here from its documentation in core/schedule.h, not through the code that kernels walk it with.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from quire.errors import ValidationError
from quire.kernels import TileShape
from quire.runtime.graph import GraphState
from quire.runtime.schedule import Indices, make_schedule, schedule_inputs
from quire.types import MaskMode


@dataclass(frozen=True)
class Batch:
    """What a schedule is made for."""

    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group_size: int = 4
    tile_rows: int = 16
    tile_kv: int = 64
    mask: MaskMode = MaskMode.NONE
    window_left: int = -1
    max_ctas: int = 13
    fixed_split_size: int = 0
    page_size: int = 0  #: 0: ragged
    tile_capacity: int = 0  #: of a CUDA graph
    l2_tokens: int = 0  #: of a kernel that takes tiles from a counter

    def schedule(self):
        """The schedule of quire.runtime.schedule."""
        counts = [-(-n // self.page_size) if self.page_size else n for n in self.kv_lens]
        last = [(n - 1) % self.page_size + 1 if n else 0 for n in self.kv_lens] if self.page_size else None
        indices = Indices(
            batch_size=len(self.qo_lens),
            qo_indptr=torch.tensor(oracle.indptr_of(self.qo_lens), dtype=torch.int32),
            qo_len=0,
            kv_indptr=torch.tensor(oracle.indptr_of(counts), dtype=torch.int32),
            kv_last_page_len=None if last is None else torch.tensor(last, dtype=torch.int32),
            kv_indices=None,
            page_size=self.page_size or 1,
        )
        inputs = schedule_inputs(
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            page_size=indices.page_size,
            tile=TileShape(self.tile_rows, self.tile_kv),
            mask=self.mask,
            window_left=self.window_left,
            max_ctas=self.max_ctas,
            fixed_split_size=self.fixed_split_size,
            tile_capacity=self.tile_capacity,
            l2_tokens=self.l2_tokens,
        )
        return make_schedule(indices, inputs)

    def work(self):
        """Per (request, first row): the range of kv tiles with a visible key, from the definition of the masks."""
        out = {}
        for b, (qo_len, kv_len) in enumerate(zip(self.qo_lens, self.kv_lens, strict=True)):
            causal = self.mask is MaskMode.CAUSAL
            seen = oracle.visible(qo_len, kv_len, causal=causal, window_left=self.window_left)
            for row in range(0, qo_len * self.group_size, self.tile_rows):
                end = min(row + self.tile_rows, qo_len * self.group_size)
                rows = seen[row // self.group_size : (end - 1) // self.group_size + 1]
                keys = rows.any(0).nonzero().flatten().tolist()
                out[b, row] = (keys[0] // self.tile_kv, keys[-1] // self.tile_kv + 1) if keys else None
        return out


def units_of(tile):
    """Work units: an empty tile costs one, for its rows must be written."""
    return max(1, tile.kv_end - tile.kv_begin)


@dataclass(frozen=True)
class Piece:
    """What a CTA does of one tile and kv head."""

    cta: int
    tile: int
    kv_head: int
    begin: int  #: units from the start of the tile
    end: int


def walk(schedule, num_kv_heads):
    """All pieces, CTA by CTA."""
    p, tiles, partitions = schedule.params, list(schedule.tiles), list(schedule.partitions)
    if not p.is_partitioned or p.is_dynamic:
        for cta in range(p.num_tiles * num_kv_heads):
            tile, kv_head = divmod(cta, num_kv_heads)
            yield Piece(cta, tile, kv_head, 0, units_of(tiles[tile]))
        return
    for cta, partition in enumerate(partitions):
        tile, kv_head, at, left = partition.tile, partition.kv_head, partition.offset, partition.units
        while left:
            count = min(left, units_of(tiles[tile]) - at)
            yield Piece(cta, tile, kv_head, at, at + count)
            left -= count
            at = 0
            tile += 1
            if tile == len(tiles):
                tile, kv_head = 0, kv_head + 1


def check_everything(batch):
    """All the promises of one schedule."""
    schedule = batch.schedule()
    p, tiles = schedule.params, list(schedule.tiles)
    pieces = list(walk(schedule, batch.num_kv_heads))
    check_tiles(batch, tiles)
    check_coverage(batch, tiles, pieces)
    if p.is_partitioned:
        check_shares(batch, p, tiles, pieces)
    else:
        check_whole(batch, p, tiles)
    check_arrays(batch, schedule)


def check_tiles(batch, tiles):
    """Tiles hold the rows and the visible keys of the batch, and no more tiles of keys than those."""
    got = defaultdict(list)
    pages = [-(-n // batch.page_size) if batch.page_size else n for n in batch.kv_lens]
    qo_indptr, kv_indptr = oracle.indptr_of(batch.qo_lens), oracle.indptr_of(pages)
    for t in tiles:
        assert (t.qo_begin, t.qo_len) == (qo_indptr[t.request], batch.qo_lens[t.request])
        assert (t.kv_first, t.kv_len) == (kv_indptr[t.request], batch.kv_lens[t.request])
        got[t.request, t.row_begin].append((t.kv_begin, t.kv_end))
    want = batch.work()
    assert got.keys() == want.keys()
    for key, ranges in got.items():
        ranges.sort()
        if want[key] is None:
            assert all(begin == end for begin, end in ranges) and len(ranges) == 1
            continue
        assert (ranges[0][0], ranges[-1][1]) == want[key]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges)), "parts of a tile must adjoin"
        assert all(begin < end for begin, end in ranges)


def check_coverage(batch, tiles, pieces):
    """Every unit of every tile and kv head is in exactly one piece."""
    done = defaultdict(int)
    for piece in pieces:
        assert 0 <= piece.begin < piece.end <= units_of(tiles[piece.tile])
        for unit in range(piece.begin, piece.end):
            done[piece.tile, piece.kv_head, unit] += 1
    every = {
        (i, head, unit)
        for i, t in enumerate(tiles)
        for head in range(batch.num_kv_heads)
        for unit in range(units_of(t))
    }
    assert done.keys() == every
    assert set(done.values()) <= {1}


def check_shares(batch, p, tiles, pieces):
    """Shares are equal within one unit; a CTA leaves at most a head and a tail; slots are its own and within bounds."""
    assert 0 < p.num_ctas <= batch.max_ctas
    assert p.num_partials == 2 * p.num_ctas <= 2 * batch.max_ctas
    load = defaultdict(int)
    parts = defaultdict(list)
    for piece in pieces:
        load[piece.cta] += piece.end - piece.begin
        parts[piece.tile, piece.kv_head].append(piece)
    assert max(load.values()) - min(load.values()) <= 1
    assert len(load) == p.num_ctas
    slots = set()
    partials = defaultdict(int)
    for group in parts.values():
        ctas = [piece.cta for piece in group]
        assert ctas == list(range(ctas[0], ctas[0] + len(ctas))), "the parts of a tile belong to consecutive CTAs"
        if len(group) == 1:
            continue
        for part, piece in enumerate(group):
            slot = piece.cta + (part == 0) * p.num_ctas  # a tile begun is the CTA's tail, a tile taken over is its head
            assert slot not in slots and slot < p.num_partials
            slots.add(slot)
            partials[piece.cta] += 1
    assert all(n <= 2 for n in partials.values())
    assert p.num_counters == p.num_ctas  # a group counts at its first CTA, and a CTA begins at most one group
    assert [t.partial for t in tiles] == [-1] * len(tiles)


def check_whole(batch, p, tiles):
    """One tile a CTA, the longest first; with fixed splits each group has contiguous slots of its own."""
    assert p.num_ctas == len(tiles) * batch.num_kv_heads
    lengths = [units_of(t) for t in tiles]
    assert lengths == sorted(lengths, reverse=True)
    groups = defaultdict(list)
    for t in tiles:
        assert 0 <= t.part < t.num_parts
        groups[t.request, t.row_begin].append(t)
    slots = set()
    for group in groups.values():
        group.sort(key=lambda t: t.part)
        assert [t.part for t in group] == list(range(group[0].num_parts))
        assert len({t.partial for t in group}) == 1
        assert [t.kv_begin for t in group] == sorted(t.kv_begin for t in group), "parts are in the order of keys"
        if len(group) == 1:
            assert group[0].partial == -1
            continue
        for head in range(batch.num_kv_heads):
            for t in group:
                slot = head * p.partials_per_head + t.partial + t.part
                assert slot not in slots and slot < p.num_partials
                slots.add(slot)
    assert len(slots) == p.num_partials == p.partials_per_head * batch.num_kv_heads


def ints_at(schedule, offset, count, dtype=torch.int32):
    """`count` numbers of the packed buffer."""
    size = count * dtype.itemsize
    return schedule.buffer[offset : offset + size].view(dtype).tolist()


def check_arrays(batch, schedule):
    """The packed buffer's arrays are aligned, apart, inside, and say what the batch says."""
    p, n = schedule.params, len(batch.qo_lens)
    sizes = [
        (p.tiles_offset, 48 * p.num_tiles),
        (p.partitions_offset, 32 * p.num_ctas * p.is_partitioned),
        (p.mask_indptr_offset, 8 * n * (batch.mask is MaskMode.CUSTOM)),
        (p.arrivals_offset, 4 * p.num_counters),
    ]
    assert all(offset % 16 == 0 for offset, _ in sizes)
    spans = sorted((offset, offset + size) for offset, size in sizes if size)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= p.filled_bytes <= schedule.buffer.numel()
    assert p.filled_bytes <= p.buffer_bytes
    assert ints_at(schedule, p.arrivals_offset, p.num_counters) == [0] * p.num_counters
    assert p.kv_tokens == sum(batch.kv_lens)
    if batch.mask is MaskMode.CUSTOM:
        sizes = [-(-q * k // 8) for q, k in zip(batch.qo_lens, batch.kv_lens, strict=True)]
        assert ints_at(schedule, p.mask_indptr_offset, n, torch.int64) == oracle.indptr_of(sizes)[:-1]
        assert p.mask_bytes == sum(sizes)


requests = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 700)), min_size=1, max_size=6)


@st.composite
def batches(draw, fixed=False):
    """Any batch on any machine."""
    lens = draw(requests)
    tile_kv = draw(st.sampled_from([16, 64, 128]))
    split = draw(st.sampled_from([-1, tile_kv, 3 * tile_kv])) if fixed else draw(st.sampled_from([0, 0, 0, -1]))
    return Batch(
        qo_lens=tuple(q for q, _ in lens),
        kv_lens=tuple(k for _, k in lens),
        num_kv_heads=draw(st.integers(1, 5)),
        group_size=draw(st.sampled_from([1, 3, 4, 16])),
        tile_rows=draw(st.sampled_from([16, 64])),
        tile_kv=tile_kv,
        mask=draw(st.sampled_from(list(MaskMode))),
        window_left=draw(st.sampled_from([-1, -1, 0, 50, 300])),
        max_ctas=draw(st.sampled_from([1, 2, 13, 132, 264])),
        fixed_split_size=split,
        page_size=draw(st.sampled_from([0, 1, 16])),
    )


@settings(max_examples=200, deadline=None)
@given(batch=batches())
def test_any_schedule(batch):
    check_everything(batch)


@settings(max_examples=100, deadline=None)
@given(batch=batches(fixed=True))
def test_any_schedule_with_fixed_splits(batch):
    check_everything(batch)


@pytest.mark.parametrize("max_ctas", [1, 2, 264])
@pytest.mark.parametrize(
    "lens",
    [((1,), (100_000,)), ((1,) * 300, (1,) * 300), ((0,), (0,)), ((0, 0), (5, 0)), ((40,), (3,)), ((4000,), (4000,))],
)
def test_extremes(lens, max_ctas):
    check_everything(Batch(*lens, mask=MaskMode.CAUSAL, max_ctas=max_ctas, tile_rows=64))


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_the_workspace_does_not_depend_on_lengths(batch):
    assert batch.schedule().params.num_partials <= 2 * batch.max_ctas


@settings(max_examples=60, deadline=None)
@given(batch=batches(fixed=True), alone=st.integers(0, 5))
def test_fixed_splits_do_not_depend_on_neighbours(batch, alone):
    """A request is cut at the same keys whether it is alone or in a batch, on a small machine or a big one."""
    at = alone % len(batch.qo_lens)
    changes = {"qo_lens": (batch.qo_lens[at],), "kv_lens": (batch.kv_lens[at],), "max_ctas": batch.max_ctas + 50}
    single = Batch(**{**batch.__dict__, **changes})

    def cuts(schedule, request):
        fields = ("row_begin", "kv_begin", "kv_end", "part", "num_parts")
        return sorted(tuple(getattr(t, f) for f in fields) for t in schedule.tiles if t.request == request)

    together, apart = batch.schedule(), single.schedule()
    assert cuts(together, at) == cuts(apart, 0)


@settings(max_examples=60, deadline=None)
@given(batch=batches(fixed=True))
def test_fixed_splits_are_multiples_counted_from_key_zero(batch):
    """Where a window begins must not move the cuts: the same key is added in the same order at every step of decode."""
    schedule = batch.schedule()
    if batch.fixed_split_size < 0:
        assert all(t.num_parts == 1 for t in schedule.tiles)
        return
    step = batch.fixed_split_size // batch.tile_kv
    for t in schedule.tiles:
        if t.kv_begin < t.kv_end:
            assert t.kv_begin // step == (t.kv_end - 1) // step
        if t.part > 0:
            assert t.kv_begin % step == 0


@settings(max_examples=150, deadline=None)
@given(batch=batches(), fixed=st.booleans(), dynamic=st.booleans())
def test_any_schedule_for_a_graph(batch, fixed, dynamic):
    """All work is done once, by as many CTAs as there always are, and only what lies in the buffer tells how much."""
    split = 3 * batch.tile_kv if fixed else batch.fixed_split_size
    changes = {"fixed_split_size": split, "l2_tokens": 500 * dynamic, "tile_capacity": 10_000}
    graph = Batch(**{**batch.__dict__, **changes})
    schedule = graph.schedule()
    p, tiles = schedule.params, list(schedule.tiles)
    assert p.num_ctas == batch.max_ctas and len(schedule.partitions) == p.num_ctas
    check_tiles(graph, tiles)
    check_arrays(graph, schedule)
    pieces = list(walk(schedule, batch.num_kv_heads))
    check_coverage(graph, tiles, pieces)
    empty = Batch(**{**graph.__dict__, "qo_lens": (0,) * len(batch.qo_lens)}).schedule().params
    for name in ("arrivals_offset", "partitions_offset", "mask_indptr_offset", "tiles_offset", "buffer_bytes"):
        assert getattr(p, name) == getattr(empty, name)
    assert (p.num_partials, p.num_counters, p.partials_per_head) == (
        empty.num_partials,
        empty.num_counters,
        empty.partials_per_head,
    )
    for partition in schedule.partitions:
        assert (partition.num_tiles, partition.work_per_head) == (p.num_tiles, p.work_per_head)
        if p.is_dynamic:
            assert (partition.units, partition.offset, partition.tile) == (
                -1,
                p.num_tiles * p.num_kv_heads,
                p.heads_per_l2_group,
            )
    assert p.is_dynamic <= dynamic and p.num_kv_heads % p.heads_per_l2_group == 0
    if not p.is_dynamic:
        check_cuts(graph, p, pieces, tiles)


@settings(max_examples=100, deadline=None)
@given(batch=batches(), fixed=st.booleans())
def test_a_graph_has_room_for_the_units_of_any_mask(batch, fixed):
    """The capacity follows from the buffer that holds the bits, whatever the lengths."""
    split = 3 * batch.tile_kv if fixed else 0
    p = Batch(**{**batch.__dict__, "fixed_split_size": split, "mask": MaskMode.CUSTOM}).schedule().params
    graph = GraphState(len(batch.qo_lens), None, torch.empty(max(1, p.mask_bytes), dtype=torch.uint8))
    tile = TileShape(batch.tile_rows, batch.tile_kv)
    assert p.work_per_head <= graph.unit_capacity(tile, batch.group_size, p.num_tiles)


def num_partitions(p, total):
    """The fewest that are not longer, of two units or more where tiles are cut, as many a tile if that loses little."""
    if total == 0:
        return 1
    longest = max(-(-total // min(p.max_ctas, total)), 1 + (p.work_per_head > p.num_tiles))
    count = -(-total // longest)
    even = count - count % (p.num_tiles * p.num_kv_heads)
    return even if 16 * (count - even) <= count else count


def check_cuts(batch, p, pieces, tiles):
    """Each CTA finds who else has a part of its tile from what all partitions have in common."""
    total = p.work_per_head * p.num_kv_heads
    each, longer = divmod(total, num_partitions(p, total))
    starts = [c * each + min(c, longer) for c in range(batch.max_ctas + 1)]
    if batch.fixed_split_size != 0:
        assert all(piece.end - piece.begin == units_of(tiles[piece.tile]) for piece in pieces)
        return
    for piece in pieces:
        unit = p.work_per_head * piece.kv_head + tiles[piece.tile].work_begin + piece.begin
        assert starts[piece.cta] <= unit < starts[piece.cta + 1]


def test_more_tiles_than_a_graph_has_room_for():
    with pytest.raises(ValidationError, match="larger than what the first plan"):
        Batch((64, 64), (10, 10), tile_capacity=3, tile_rows=16).schedule()


def test_tiles_and_shares_keep_their_memory():
    """They are views of the packed buffer: it must live as long as they do."""
    for name in ("tiles", "partitions"):
        schedule = Batch((1,), (64_000,), num_kv_heads=1, max_ctas=132).schedule()
        buffer, view = weakref.ref(schedule.host_buffer.tensor), getattr(schedule, name)
        del schedule
        assert len(view) and buffer() is not None


def test_plenty_of_work_is_not_cut():
    """Cutting costs a merge; with a hundred equal tiles a CTA there is nothing to gain."""
    p = Batch((1,) * 1000, (640,) * 1000, max_ctas=20).schedule().params
    assert not p.is_partitioned and p.num_partials == 0


def test_little_work_is_cut():
    """One long request must not keep the machine waiting."""
    p = Batch((1,), (64_000,), num_kv_heads=1, max_ctas=132).schedule().params
    assert p.is_partitioned and p.num_ctas == 125  # 500 units: with 132 CTAs the longest partition would be no shorter


def test_shares_end_with_tiles_that_are_alike():
    """A head more or less of which one CTA does the rest would be merged for nothing."""
    p = Batch((1,), (131_072,), num_kv_heads=8, tile_kv=64, max_ctas=264).schedule().params
    assert p.is_partitioned and p.num_ctas == 256


def test_tiles_of_one_unit_are_runs():
    """They cannot be cut; CTAs that stay read ahead."""
    p = Batch((1,) * 100, (64,) * 100, tile_kv=64, num_kv_heads=8, max_ctas=264).schedule().params
    assert p.is_partitioned and p.num_ctas == 200


BAD = [
    ({"qo_indptr": [1, 3, 4]}, "qo_indptr"),
    ({"qo_indptr": [0, 3, 2]}, "qo_indptr"),
    ({"kv_indptr": [2, 3, 4]}, "kv_indptr"),
    ({"kv_indptr": [0, 3, 2]}, "kv_indptr"),
    ({"kv_last_page_len": [17, 1]}, "last_page_len"),
    ({"kv_last_page_len": [0, 1]}, "last_page_len"),
    ({"kv_last_page_len": [-3, 1]}, "last_page_len"),
    ({"kv_indptr": [0, 1 << 30, (1 << 30) + 1]}, "too large"),
]


@pytest.mark.parametrize(("change", "word"), BAD, ids=str)
def test_bad_index_arrays(change, word):
    """Found on the host, before anything reads through them."""
    arrays = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 2, 3], "kv_last_page_len": [16, 1], **change}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
    indices = Indices(batch_size=2, qo_len=0, kv_indices=None, page_size=16, **tensors)
    inputs = schedule_inputs(
        num_kv_heads=1,
        group_size=1,
        page_size=16,
        tile=TileShape(16, 64),
        mask=MaskMode.NONE,
        window_left=-1,
        max_ctas=4,
        fixed_split_size=0,
    )
    with pytest.raises(ValidationError, match=word):
        make_schedule(indices, inputs)
