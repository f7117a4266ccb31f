"""The schedule of a plan as a list of work tiles, read back from the arrays that kernels read.

This is WorkCursor of core/schedule.h in Python, for pictures only.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from quire.kernels.params import Partition, RowTile, ScheduleInput
from quire.runtime.schedule import Indices, Schedule, make_schedule

_Struct = TypeVar("_Struct", bound=ctypes.Structure)

START_COST_UNIT = 16  #: start costs are in sixteenths of a KV tile


class Work(NamedTuple):
    """A work tile: a run of KV tiles of one row tile and KV head, which one CTA computes at a time."""

    request: int  #: negative: keys that several requests share, -1 for the first such node of a cascade
    kv_head: int
    rows: tuple[int, int]  #: packed rows of the request or node: query token * group_size + query head in the group
    keys: tuple[int, int]  #: tokens of the request or node
    units: int  #: KV tiles, at least 1
    group: int  #: merge group, in a cascade the row tile and KV head; -1: it computes its rows alone


class Placed(NamedTuple):
    """A work tile on a line of the picture, with its begin and end in KV tiles."""

    work: Work
    line: int  #: the CTA, or the host's thread
    begin: float
    end: float


def place_work(indices: Indices, template: ScheduleInput) -> list[Placed]:
    """The work tiles of a batch, with place and time if every KV tile takes equally long.

    Each partition is computed by one CTA. Whole row tiles are assigned in order to the CTA that is free first.
    """
    schedule, template = make_schedule(indices, template), ScheduleInput.from_buffer_copy(template)
    template.num_shared_nodes = indices.num_shared_nodes
    start, lines = template.start_cost / START_COST_UNIT, max(1, template.max_ctas)
    tiles, count = _tiles(schedule, template), _num_partitions(schedule)
    placed: list[Placed] = []
    for line in range(count):
        at = 0.0
        for work in _of_line(line, schedule, tiles, template):
            placed.append(Placed(work, line, at, at + start + work.units))
            at = placed[-1].end
    free = [(0.0, line) for line in range(lines)]
    for work in () if count else _whole(tiles, template):
        at, line = heapq.heappop(free)
        placed.append(Placed(work, line, at, at + start + work.units))
        heapq.heappush(free, (placed[-1].end, line))
    return placed


def _num_partitions(schedule: Schedule) -> int:
    """The partitions with work; none if CTAs take whole row tiles."""
    sizes = schedule.sizes
    return sizes.num_ctas if sizes.is_partitioned and not sizes.is_dynamic else 0


def _array(cls: type[_Struct], schedule: Schedule, offset: int, count: int) -> list[_Struct]:
    address, size = schedule.host_buffer.address + offset, ctypes.sizeof(cls)
    return [cls.from_buffer_copy(ctypes.string_at(address + i * size, size)) for i in range(count)]


def _tiles(schedule: Schedule, template: ScheduleInput) -> list[RowTile]:
    """Row tiles; in a cascade the nodes of shared levels get numbers, and requests the caller's."""
    tiles = _array(RowTile, schedule, schedule.sizes.tiles_offset, schedule.sizes.num_tiles)
    node = 0
    for tile in tiles if template.num_shared_nodes else ():
        node -= tile.request < 0 and tile.row_begin == 0
        tile.request = node if tile.request < 0 else tile.request - template.num_shared_nodes
    return tiles


def _units(tile: RowTile) -> int:
    return int(max(1, tile.kv_end - tile.kv_begin))


def _work(tile: RowTile, kv_head: int, offset: int, units: int, group: int, template: ScheduleInput) -> Work:
    first = tile.kv_begin + offset
    keys = (first * template.tile_kv, min(min(first + units, tile.kv_end) * template.tile_kv, tile.kv_len))
    end = tile.partial if template.num_shared_nodes else tile.qo_len * template.group_size
    rows = tile.row_begin, min(tile.row_begin + template.tile_rows, end)
    return Work(tile.request, kv_head, rows, (keys[0], max(keys)), units, group)


def _group(tile: RowTile, kv_head: int) -> int:
    """The merge group of a fixed split; -1 of a whole row tile."""
    return tile.group + kv_head if tile.partial >= 0 else -1


def _whole(tiles: Iterable[RowTile], template: ScheduleInput) -> Iterator[Work]:
    for tile in tiles:
        for head in range(template.num_kv_heads):
            yield _work(tile, head, 0, _units(tile), _group(tile, head), template)


def _of_line(line: int, schedule: Schedule, tiles: list[RowTile], template: ScheduleInput) -> Iterator[Work]:
    """The work of a CTA: a partition, and in a cascade those that follow it."""
    size, is_cascade = ctypes.sizeof(Partition), template.num_shared_nodes > 0
    (partition,) = _array(Partition, schedule, schedule.sizes.partitions_offset + line * size, 1)
    yield from _of_partition(partition, tiles, template, is_cascade)
    if is_cascade and (following := partition.heads_per_l2_group):  # which a cascade calls next
        yield from _of_line(following, schedule, tiles, template)


def _of_partition(
    partition: Partition, tiles: list[RowTile], template: ScheduleInput, is_cascade: bool
) -> Iterator[Work]:
    head, index, offset, left = partition.kv_head, partition.tile, partition.offset, partition.units
    while left > 0:
        size = _units(tiles[index])
        units = min(left, size - offset)
        if is_cascade:
            group = -1 if units == size else index * template.num_kv_heads + head
        else:
            group = _group(tiles[index], head) if units == size else partition.group + (offset == 0)
        yield _work(tiles[index], head, offset, units, group, template)
        left, offset, index = left - units, 0, index + 1
        if index == partition.num_tiles:
            index, head = partition.group if is_cascade else 0, head + 1  # a cascade calls it first_tile
