"""The schedule: every unit is computed exactly once, by partitions of equal cost, within a bound that is known, and the
merge table names each partial result once.

The plan is walked here from its documentation in core/schedule.h, not through the code that kernels walk it with.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from quire.engine.schedule import Indices, Lengths, check_fits_on_device, make_schedule, schedule_input
from quire.engine.spec import GraphState
from quire.errors import ValidationError
from quire.kernels import TileShape
from quire.kernels.features import MaskMode
from quire.kernels.params import MergeGroup, Partition, RowTile


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
    start_cost: int = 0  #: sixteenths of a unit
    splits_by_length: int = 0

    def schedule(self):
        """The schedule of quire.engine.schedule."""
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
        given = schedule_input(
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
            start_cost=self.start_cost,
            splits_by_length=self.splits_by_length,
        )
        return make_schedule(indices, given)

    def work(self):
        """Per (request, first row): the range of kv tiles with a visible key, from the definition of the masks."""
        out = {}
        for b, (qo_len, kv_len) in enumerate(zip(self.qo_lens, self.kv_lens, strict=True)):
            causal, chunked = self.mask in (MaskMode.CAUSAL, MaskMode.CHUNKED), self.mask is MaskMode.CHUNKED
            width = {"chunk_size": self.window_left + 1} if chunked else {"window_left": self.window_left}
            seen = oracle.visible(qo_len, kv_len, causal=causal, **width)
            for row in range(0, qo_len * self.group_size, self.tile_rows):
                end = min(row + self.tile_rows, qo_len * self.group_size)
                rows = seen[row // self.group_size : (end - 1) // self.group_size + 1]
                keys = rows.any(0).nonzero().flatten().tolist()
                out[b, row] = (keys[0] // self.tile_kv, keys[-1] // self.tile_kv + 1) if keys else None
        return out


def array_of(schedule, cls, offset, count):
    """`count` structs of the packed buffer."""
    return list((cls * count).from_buffer_copy(schedule.buffer.numpy().tobytes(), offset))


def tiles_of(schedule):
    """The row tiles, in the order in which they are worked off."""
    return array_of(schedule, RowTile, schedule.sizes.tiles_offset, schedule.sizes.num_tiles)


def partitions_of(schedule):
    """One contiguous run of work a CTA; none when each CTA has one whole row tile."""
    sizes = schedule.sizes
    return array_of(schedule, Partition, sizes.partitions_offset, sizes.num_ctas * sizes.is_partitioned)


def units_of(tile):
    """Work units: an empty tile costs one, for its rows must be written."""
    return max(1, tile.kv_end - tile.kv_begin)


@dataclass(frozen=True)
class Work:
    """A work tile: what a CTA does of one row tile and KV head."""

    cta: int
    tile: int
    kv_head: int
    begin: int  #: units from the start of the row tile
    end: int
    partial: int  #: -1: it is the whole row tile
    group: int


def walk(schedule, num_kv_heads):
    """All work tiles, CTA by CTA, from the documentation of RowTile and Partition."""
    sizes, tiles = schedule.sizes, tiles_of(schedule)
    if not sizes.is_partitioned or sizes.is_dynamic:
        for number in range(sizes.num_tiles * num_kv_heads):
            tile, kv_head = divmod(number, num_kv_heads)
            yield planned(number, tiles, tile, kv_head)
        return
    for cta, partition in enumerate(partitions_of(schedule)):
        tile, kv_head, at, left = partition.tile, partition.kv_head, partition.offset, partition.units
        while left:
            size = units_of(tiles[tile])
            count = min(left, size - at)
            if count == size:
                yield planned(cta, tiles, tile, kv_head)
            else:
                following = int(at == 0)
                yield Work(
                    cta, tile, kv_head, at, at + count, partition.partial + following, partition.group + following
                )
            left -= count
            at = 0
            tile += 1
            if tile == len(tiles):
                tile, kv_head = 0, kv_head + 1


def planned(cta, tiles, tile, kv_head):
    """A whole entry of the row tiles, which a fixed split may have made."""
    t = tiles[tile]
    partial, group = (t.partial + kv_head * t.num_parts, t.group + kv_head) if t.partial >= 0 else (-1, -1)
    return Work(cta, tile, kv_head, 0, units_of(t), partial, group)


def check_everything(batch):
    """All the promises of one schedule."""
    schedule = batch.schedule()
    sizes, tiles = schedule.sizes, tiles_of(schedule)
    work = list(walk(schedule, batch.num_kv_heads))
    check_tiles(batch, tiles)
    check_coverage(batch, tiles, work)
    check_merge_table(batch, schedule, tiles, work)
    if sizes.is_partitioned:
        check_partitions(batch, sizes, tiles, work)
    else:
        check_whole(batch, sizes, tiles)
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


def check_coverage(batch, tiles, work):
    """Every unit of every tile and kv head is in exactly one work tile."""
    done = defaultdict(int)
    for w in work:
        assert 0 <= w.begin < w.end <= units_of(tiles[w.tile])
        for unit in range(w.begin, w.end):
            done[w.tile, w.kv_head, unit] += 1
    every = {
        (i, head, unit)
        for i, t in enumerate(tiles)
        for head in range(batch.num_kv_heads)
        for unit in range(units_of(t))
    }
    assert done.keys() == every
    assert set(done.values()) <= {1}


def check_merge_table(batch, schedule, tiles, work):
    """The partials of a group are those of one row tile and KV head, side by side in the order of their keys; each
    partial is in one group; nothing has arrived.
    """
    rows = defaultdict(list)
    for w in work:
        t = tiles[w.tile]
        rows[t.request, t.row_begin, w.kv_head].append((t.kv_begin + w.begin, w))
    table = array_of(schedule, MergeGroup, schedule.sizes.groups_offset, schedule.sizes.num_groups)
    partials, groups = set(), set()
    for (request, row_begin, _), parts in rows.items():
        parts = [w for _, w in sorted(parts, key=lambda part: part[0])]
        if len(parts) == 1:
            assert parts[0].partial == parts[0].group == -1
            continue
        assert len({w.group for w in parts}) == 1 and parts[0].group not in groups
        groups.add(parts[0].group)
        group = table[parts[0].group]
        numbers = [w.partial for w in parts]
        assert numbers == list(range(numbers[0], numbers[0] + len(parts)))
        assert (group.parts_begin, group.parts_end) == (numbers[0], numbers[-1] + 1)
        assert group.num_rows == min(batch.tile_rows, batch.qo_lens[request] * batch.group_size - row_begin)
        assert group.num_arrived == 0
        assert not partials & set(numbers)
        partials.update(numbers)
    assert len(groups) <= schedule.sizes.num_groups and max(groups, default=-1) < schedule.sizes.num_groups
    assert max(partials, default=-1) < schedule.sizes.num_partials
    if batch.fixed_split_size > 0 and not batch.tile_capacity:
        assert (len(groups), len(partials)) == (schedule.sizes.num_groups, schedule.sizes.num_partials)


def check_partitions(batch, sizes, tiles, work):
    """Partitions are runs of equal cost; a CTA leaves at most two partials."""
    assert 0 < sizes.num_ctas <= batch.max_ctas
    if batch.fixed_split_size:
        assert all(w.end - w.begin == units_of(tiles[w.tile]) for w in work), "divided in advance and nowhere else"
        return
    assert sizes.num_partials == 2 * sizes.num_ctas and sizes.num_groups == sizes.num_ctas
    if counts_starts(batch, sizes, tiles):
        check_counted_starts(batch, sizes, tiles, work)
        return
    count = num_partitions(batch, sizes) if batch.tile_capacity else sizes.num_ctas
    least = min(batch.start_cost, mean_cost(batch, sizes, count) // 2)
    units, cost, partials = [0] * count, [0] * count, [0] * count
    for w in work:
        size = units_of(tiles[w.tile])
        units[w.cta] += w.end - w.begin
        cost[w.cta] += (w.end - w.begin) * (16 * size + batch.start_cost) / size
        partials[w.cta] += w.partial >= 0
        if w.end - w.begin < size:
            assert 16 * min(part for part in (w.begin, size - w.end, size) if part) > least
    assert max(partials) <= 2
    if batch.start_cost == 0:
        assert max(units) - min(units) <= 1
    # Where a run ends moves by half a unit to get to a unit's end, or to the row tile's end, if that is not farther
    # away than a start costs; to the nearest of both ends of a row tile that is too short to be divided.
    farthest = max(16, 2 * batch.start_cost) + batch.start_cost
    assert max(abs(c - sum(cost) / count) for c in cost) <= 2 * farthest


def mean_cost(batch, sizes, count):
    """Of a partition in sixteenths of a unit, if divided row tiles cost one start."""
    return (16 * sizes.work_per_head + batch.start_cost * sizes.num_tiles) * batch.num_kv_heads / count


def counts_starts(batch, sizes, tiles):
    """Whether partitions pay each of their starts: dear ones, of few row tiles that differ."""
    differ = len({units_of(t) for t in tiles}) > 1
    return batch.start_cost >= 32 and differ and len(tiles) * batch.num_kv_heads <= 4 * batch.max_ctas


def check_counted_starts(batch, sizes, tiles, work):
    """No partition is far above the mean, its starts and all others counted in full."""
    cost, partials = [0] * sizes.num_ctas, [0] * sizes.num_ctas
    for w in work:
        cost[w.cta] += (w.end - w.begin) * 16 + batch.start_cost
        partials[w.cta] += w.partial >= 0
    assert max(partials) <= 2
    # A partition ends where too little room is left for units worth a start, or so much earlier that as many are left.
    unused = 2 * (batch.start_cost + 32)
    most = mean_cost(batch, sizes, sizes.num_ctas) + batch.start_cost + unused
    assert max(cost) <= max(most, batch.start_cost + 32)


def check_whole(batch, sizes, tiles):
    """One tile a CTA, the longest first."""
    assert sizes.num_ctas == len(tiles) * batch.num_kv_heads
    lengths = [units_of(t) for t in tiles]
    assert lengths == sorted(lengths, reverse=True)


def ints_at(schedule, offset, count, dtype=torch.int32):
    """`count` numbers of the packed buffer."""
    size = count * dtype.itemsize
    return schedule.buffer[offset : offset + size].view(dtype).tolist()


def check_arrays(batch, schedule):
    """The packed buffer's arrays are aligned, apart, inside, and say what the batch says."""
    p, n = schedule.sizes, len(batch.qo_lens)
    sizes = [
        (p.tiles_offset, 48 * p.num_tiles),
        (p.partitions_offset, 32 * p.num_ctas * p.is_partitioned),
        (p.mask_indptr_offset, 8 * n * (batch.mask is MaskMode.CUSTOM)),
        (p.groups_offset, 16 * p.num_groups),
        (p.tile_counter_offset, 4),
    ]
    assert all(offset % 16 == 0 for offset, _ in sizes)
    spans = sorted((offset, offset + size) for offset, size in sizes if size)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= p.filled_bytes <= schedule.buffer.numel()
    assert p.filled_bytes <= p.buffer_bytes
    assert ints_at(schedule, p.tile_counter_offset, 1) == [0]
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
        start_cost=draw(st.sampled_from([0, 0, 8, 16, 24, 40, 56])),
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
    assert batch.schedule().sizes.num_partials <= 2 * batch.max_ctas


@settings(max_examples=60, deadline=None)
@given(batch=batches(fixed=True), alone=st.integers(0, 5))
def test_fixed_splits_do_not_depend_on_neighbours(batch, alone):
    """A request is divided at the same keys whether it is alone or in a batch, on a small machine or a big one."""
    at = alone % len(batch.qo_lens)
    changes = {"qo_lens": (batch.qo_lens[at],), "kv_lens": (batch.kv_lens[at],), "max_ctas": batch.max_ctas + 50}
    single = Batch(**{**batch.__dict__, **changes})

    def parts(schedule, request):
        fields = ("row_begin", "kv_begin", "kv_end", "num_parts")
        return sorted(tuple(getattr(t, f) for f in fields) for t in tiles_of(schedule) if t.request == request)

    together, apart = batch.schedule(), single.schedule()
    assert parts(together, at) == parts(apart, 0)


@settings(max_examples=60, deadline=None)
@given(batch=batches(fixed=True))
def test_fixed_splits_are_multiples_counted_from_key_zero(batch):
    """Where a window begins must not move the cuts: the same key is added in the same order at every step of decode."""
    schedule = batch.schedule()
    if batch.fixed_split_size < 0:
        assert all(t.num_parts == 1 for t in tiles_of(schedule))
        return
    step = batch.fixed_split_size // batch.tile_kv
    firsts = {}
    for t in tiles_of(schedule):
        at = t.request, t.row_begin
        firsts[at] = min(t.kv_begin, firsts.get(at, t.kv_begin))
        if t.kv_begin < t.kv_end:
            assert t.kv_begin // step == (t.kv_end - 1) // step
    assert all(t.kv_begin % step == 0 for t in tiles_of(schedule) if t.kv_begin > firsts[t.request, t.row_begin])


#: Lengths of requests, and how many tokens their splits have: splits_of() in core/schedule.h.
OWN_SPLITS_OF = {
    1: 512, 512: 512, 513: 256, 2048: 256, 2049: 512, 4095: 512, 4096: 1024, 8191: 1024, 8192: 2048, 65536: 2048,
    65537: 4096, 131072: 4096, 131073: 8192,
}  # fmt: skip


@pytest.mark.parametrize("start_cost", [0, 20, 24])
@pytest.mark.parametrize("tile_kv", [32, 128])
@pytest.mark.parametrize("tile_capacity", [0, 2000])
def test_splits_by_length(tile_kv, start_cost, tile_capacity):
    """Each request has splits of its own length, at most 32, whoever is beside it."""
    lens = tuple(OWN_SPLITS_OF)
    batch = Batch(
        (1,) * len(lens), lens, tile_kv=tile_kv, start_cost=start_cost, max_ctas=264, fixed_split_size=256,
        splits_by_length=1, tile_capacity=tile_capacity,
    )  # fmt: skip
    schedule = batch.schedule()
    tiles, work = tiles_of(schedule), list(walk(schedule, batch.num_kv_heads))
    for request, (length, size) in enumerate(OWN_SPLITS_OF.items()):
        parts = sorted((t.kv_begin * tile_kv, t.kv_end * tile_kv) for t in tiles if t.request == request)
        assert [begin for begin, _ in parts] == list(range(0, length, size)) and len(parts) <= 32
        assert all(end - begin == size for begin, end in parts[:-1])
    check_coverage(batch, tiles, work)
    check_merge_table(batch, schedule, tiles, work)


@pytest.mark.parametrize(
    ("lens", "is_partitioned"),
    [((2048,) * 100, True), ((65536,) * 3, False), ((2048,) * 100 + (65536,), False), ((300, 40) * 400, True)],
)
def test_short_splits_are_computed_several_in_a_partition(lens, is_partitioned):
    """Which reads ahead; not where they differ and are few, because partitions would end at different times."""
    more = {"tile_kv": 64, "start_cost": 20, "max_ctas": 132, "fixed_split_size": 256, "splits_by_length": 1}
    batch = Batch((1,) * len(lens), lens, **more)
    assert bool(batch.schedule().sizes.is_partitioned) == is_partitioned
    assert not Batch(**{**batch.__dict__, "start_cost": 0}).schedule().sizes.is_partitioned


@settings(max_examples=80, deadline=None)
@given(batch=batches(), fixed=st.booleans(), dynamic=st.booleans())
@pytest.mark.slow
def test_any_schedule_for_a_graph(batch, fixed, dynamic):
    """All work is done once, by as many CTAs as there always are, and only what lies in the buffer tells how much."""
    split = 3 * batch.tile_kv if fixed else batch.fixed_split_size
    changes = {"fixed_split_size": split, "l2_tokens": 500 * dynamic, "tile_capacity": 10_000}
    graph = Batch(**{**batch.__dict__, **changes})
    schedule = graph.schedule()
    sizes, tiles = schedule.sizes, tiles_of(schedule)
    assert sizes.num_ctas == batch.max_ctas and len(partitions_of(schedule)) == sizes.num_ctas
    check_tiles(graph, tiles)
    check_arrays(graph, schedule)
    work = list(walk(schedule, batch.num_kv_heads))
    check_coverage(graph, tiles, work)
    check_merge_table(graph, schedule, tiles, work)
    empty = Batch(**{**graph.__dict__, "qo_lens": (0,) * len(batch.qo_lens)}).schedule().sizes
    for name in ("groups", "partitions", "mask_indptr", "tiles"):
        assert getattr(sizes, f"{name}_offset") == getattr(empty, f"{name}_offset")
    for name in ("buffer_bytes", "num_partials", "num_groups"):
        assert getattr(sizes, name) == getattr(empty, name)
    for partition in partitions_of(schedule):
        assert partition.num_tiles == sizes.num_tiles
        assert partition.heads_per_l2_group == (sizes.heads_per_l2_group if sizes.is_dynamic else 0)
        assert partition.units == 0 or not sizes.is_dynamic
    assert sizes.is_dynamic <= dynamic and batch.num_kv_heads % sizes.heads_per_l2_group == 0
    if not sizes.is_dynamic and work:
        check_partitions(graph, sizes, tiles, work)


@settings(max_examples=100, deadline=None)
@given(batch=batches(), fixed=st.booleans())
def test_a_graph_has_room_for_the_units_of_any_mask(batch, fixed):
    """The capacity follows from the buffer that holds the bits, whatever the lengths."""
    split = 3 * batch.tile_kv if fixed else 0
    p = Batch(**{**batch.__dict__, "fixed_split_size": split, "mask": MaskMode.CUSTOM}).schedule().sizes
    graph = GraphState(len(batch.qo_lens), None, torch.empty(max(1, p.mask_bytes), dtype=torch.uint8))
    tile = TileShape(batch.tile_rows, batch.tile_kv)
    assert p.work_per_head <= graph.unit_capacity(tile, batch.group_size, p.num_tiles)


def num_partitions(batch, sizes):
    """The fewest that are not longer, of two units or more where tiles are divided, as many a tile if that loses
    little.
    """
    total = sizes.work_per_head * batch.num_kv_heads
    longest = max(-(-total // min(batch.max_ctas, total)), 1 + (sizes.work_per_head > sizes.num_tiles))
    count = -(-total // longest)
    even = count - count % (sizes.num_tiles * batch.num_kv_heads)
    return even if 16 * (count - even) <= count else count


def test_more_tiles_than_a_graph_has_room_for():
    with pytest.raises(ValidationError, match="larger than what the first plan"):
        Batch((64, 64), (10, 10), tile_capacity=3, tile_rows=16).schedule()


def test_plenty_of_work_is_not_divided():
    """Dividing costs a merge; with a hundred equal tiles a CTA there is nothing to gain."""
    p = Batch((1,) * 1000, (640,) * 1000, max_ctas=20).schedule().sizes
    assert not p.is_partitioned and p.num_partials == 0


def test_little_work_is_divided():
    """One long request must not keep the machine waiting."""
    p = Batch((1,), (64_000,), num_kv_heads=1, max_ctas=132).schedule().sizes
    assert p.is_partitioned and p.num_ctas == 125  # 500 units: with 132 CTAs the longest partition would be no shorter


def test_partitions_end_with_tiles_that_are_alike():
    """A head more or less of which one CTA does the rest would be merged for nothing."""
    p = Batch((1,), (131_072,), num_kv_heads=8, tile_kv=64, max_ctas=264).schedule().sizes
    assert p.is_partitioned and p.num_ctas == 256


def test_tiles_of_one_unit_are_runs():
    """They cannot be divided; CTAs that stay read ahead."""
    p = Batch((1,) * 100, (64,) * 100, tile_kv=64, num_kv_heads=8, max_ctas=264).schedule().sizes
    assert p.is_partitioned and p.num_ctas == 200


BAD = [
    ({"qo_indptr": [1, 3, 4]}, "qo_indptr"),
    ({"qo_indptr": [0, 3, 2]}, "qo_indptr"),
    ({"kv_indptr": [-2, 3, 4]}, "kv_indptr"),
    ({"kv_indptr": [0, 3, 2]}, "kv_indptr"),
    ({"kv_last_page_len": [17, 1]}, "last_page_len"),
    ({"kv_last_page_len": [0, 1]}, "last_page_len"),
    ({"kv_last_page_len": [-3, 1]}, "last_page_len"),
    ({"kv_indptr": [0, 1 << 30, (1 << 30) + 1]}, "fewer than 2..31 tokens"),
    ({"qo_indptr": [0, 1, 2**31 - 1]}, "fewer than 2..23 row tiles times 1 KV heads"),
]


@pytest.mark.parametrize(("change", "word"), BAD, ids=str)
def test_bad_index_arrays(change, word):
    """Found on the host, before anything reads through them."""
    arrays = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 2, 3], "kv_last_page_len": [16, 1], **change}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in arrays.items()}
    indices = Indices(batch_size=2, qo_len=0, kv_indices=None, page_size=16, **tensors)
    with pytest.raises(ValidationError, match=word):
        make_schedule(indices, template(page_size=16))


def template(**changes):
    """The scheduler's input for one query head and KV head."""
    values = {"num_kv_heads": 1, "group_size": 1, "page_size": 1, "tile": TileShape(128, 64), "fixed_split_size": 0}
    return schedule_input(mask=MaskMode.NONE, window_left=-1, max_ctas=4, **{**values, **changes})


def ragged(qo_lens, kv_lens, qo_len=0):
    """Index arrays of ragged keys; qo_lens=None: qo_len rows each."""
    qo_indptr = None if qo_lens is None else torch.tensor(oracle.indptr_of(qo_lens), dtype=torch.int32)
    kv_indptr = torch.tensor(oracle.indptr_of(kv_lens), dtype=torch.int32)
    return Indices(len(kv_lens), qo_indptr, qo_len, kv_indptr, None, None, 1)


TOO_LARGE = [
    (ragged((2**31 - 2,), (5,)), {}, "2..23 row tiles"),
    (ragged((1, 2**31 - 2), (5, 5)), {}, "2..23 row tiles.*at request 1"),
    (ragged((2**31 - 1,), (0,)), {"tile": TileShape(256, 128)}, "fewer than 2..23 row tiles"),
    (ragged(None, (5, 5), qo_len=2**30), {"tile": TileShape(256, 64)}, "query heads per KV head below 2..31"),
    (ragged(None, (5,), qo_len=2**30), {"group_size": 3}, "query tokens times query heads"),
    (ragged((1,), (5,)), {"num_kv_heads": 2**31 - 1}, "times 2147483647 KV heads"),
    (ragged((1,), (5,)), {"group_size": 2**31 - 1}, "2..23 row tiles"),
    (ragged((1,), (2**31 - 1,)), {"fixed_split_size": 64}, "each fixed split counts"),
    (ragged((1,), (2**31 - 1,)), {"num_kv_heads": 64}, "2..31 KV tiles of 64 tokens"),
]


@pytest.mark.parametrize(("indices", "changes", "words"), TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_a_batch_that_is_too_large(indices, changes, words):
    """Counted, not walked: the error comes before a loop over row tiles."""
    begin = time.process_time()
    with pytest.raises(ValidationError, match=words):
        make_schedule(indices, template(**changes))
    assert time.process_time() - begin < 2


def test_a_batch_that_is_too_large_on_a_gpu():
    """Only shapes are known there."""
    lengths = Lengths(torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), 1 << 20, 64)
    check_fits_on_device(lengths, template())
    for changes in (
        {"group_size": 1 << 10},
        {"num_kv_heads": 1 << 10},
        {"tile": TileShape(16, 16), "num_kv_heads": 65},
    ):
        with pytest.raises(ValidationError, match="2 requests of 1048576 query tokens"):
            check_fits_on_device(lengths, template(**changes))


def test_an_empty_batch_begins_with_0():
    begin, none = torch.tensor([-5], dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    for last, name in ((None, "^kv_indptr"), (none, "^paged_kv_indptr")):
        with pytest.raises(ValidationError, match=f"{name}: expected to begin with 0"):
            make_schedule(Indices(0, None, 1, begin, last, None, 1), template())
    assert make_schedule(ragged((), ()), template()).sizes.num_ctas == 0


def test_a_start_counts():
    """70 short requests side by side are 70 starts to one CTA, which then gets fewer units of long ones."""
    most = []
    for start_cost in (0, 16):
        batch = Batch((1,) * 128, (8192,) * 58 + (64,) * 70, num_kv_heads=8, max_ctas=264, start_cost=start_cost)
        check_everything(batch)
        units_and_starts = Counter()
        for w in walk(batch.schedule(), 8):
            units_and_starts[w.cta] += w.end - w.begin + 1
        most.append(max(units_and_starts.values()) / (sum(units_and_starts.values()) / 264))
    assert most[0] > 1.25 and most[1] < 1.03


@pytest.mark.parametrize("order", ["up", "down", "shuffled"])
def test_dear_starts_are_counted(order):
    """Where a start costs as much as some units, the longest of 66 partitions is 3 % above the mean in any order of
    lengths that differ much.
    """
    up = [round(100 * 200 ** (i / 63)) for i in range(64)]
    kv_lens = tuple({"up": up, "down": up[::-1], "shuffled": random.Random(0).sample(up, 64)}[order])
    batch = Batch((1,) * 64, kv_lens, num_kv_heads=1, group_size=128, tile_rows=128, max_ctas=66, start_cost=88)
    check_everything(batch)
    cost = Counter()
    for w in walk(batch.schedule(), 1):
        cost[w.cta] += 16 * (w.end - w.begin) + 88
    assert len(cost) == 66 and max(cost.values()) <= 1.03 * sum(cost.values()) / 66


def test_row_tiles_too_short_to_divide():
    """256 requests of 5 units: every partition is 7 or 8 of them, and nothing is merged."""
    work = list(walk(Batch((1,) * 256, (300,) * 256, num_kv_heads=8, max_ctas=264, start_cost=48).schedule(), 8))
    assert all(w.partial < 0 for w in work)
    assert set(Counter(w.cta for w in work).values()) <= {7, 8}
