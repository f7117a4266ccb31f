// Who does what: the one schedule of prefill, append and decode on every backend.
//
// Work is (request, row tile, kv head, kv tile range). When there are plenty of tiles, each CTA does one whole tile,
// the longest first. When there are few, all work units in order are cut into one contiguous partition per CTA
// (stream-K), so a CTA leaves at most two partial results: a head (a tile that an earlier CTA began) and a tail (a tile
// that a later CTA ends). The workspace therefore has 2 * num_ctas slots whatever the lengths are. With fixed splits,
// tiles are cut at multiples of fixed_split_size in advance, so a request's result does not depend on its neighbours.
// The last CTA to arrive at a group of partial results merges them in order: the result does not depend on timing.
#pragma once
#include "quire/core/params.h"

namespace quire {

// The partial results of one row tile and kv head, in order.
struct PartialGroup {
  int32_t first_partial;  // slot of part 0
  int32_t next_partial;   // slot of part 1, after which come those of the others
  int32_t num_parts;      // 1: the tile is whole, nothing to merge
  int32_t counter;        // index into AttentionParams::arrivals

  QUIRE_HD int slot(int part) const { return part == 0 ? first_partial : next_partial + part - 1; }
};

// What a CTA does at a time: a run of kv tiles of one row tile and kv head.
struct WorkTile {
  RowTile tile;
  int32_t kv_head;
  int32_t kv_begin, kv_end;  // kv tiles
  int32_t part;              // which part of `group` this is
  PartialGroup group;
};

QUIRE_HD int tile_units(const RowTile& tile) { return max(1, tile.kv_end - tile.kv_begin); }

// The kv tiles that a tile's rows can see. p: the masks' parameters and the tile's size, as schedulers are given them.
template <class Params>
QUIRE_HD void set_kv_range(const Params& p, RowTile& tile) {
  const int row_end = min(tile.row_begin + p.tile_rows, tile.qo_len * p.group_size);
  const int diagonal = tile.kv_len - tile.qo_len;  // key that query 0 stands at
  int begin = 0, end = tile.kv_len;
  if (p.causal) end = min(end, (row_end - 1) / p.group_size + diagonal + 1);
  if (p.window_left >= 0) {
    const int64_t first = static_cast<int64_t>(tile.row_begin / p.group_size) + diagonal - p.window_left;
    begin = static_cast<int>(max<int64_t>(first, 0));
  }
  tile.kv_begin = begin / p.tile_kv;
  tile.kv_end = end <= begin ? tile.kv_begin : ceil_div(end, p.tile_kv);
}

// How many partitions: the fewest that are no longer than max_partitions would be, because the fewer there are, the
// fewer partial results (B 1, 32768 keys, 8 kv heads: 256 partitions 40.1 us, 264 partitions 42.3 us). Where tiles are
// cut at all, a partition is at least two units: merging costs more than a unit (B 1, 2048 keys: 9.0 instead of 9.8
// us). Where one in sixteen or less is lost, as many for each tile, so that tiles that are alike end with a partition
// (B 1, 131072 keys: 256 partitions 132.5 us, 264 partitions 138.0 us). H200, 2026-11-21.
QUIRE_HD int num_partitions(int num_tiles, int work_per_head, int total_units, int max_partitions) {
  if (total_units == 0) return 1;
  const int longest = ceil_div(total_units, min(max_partitions, total_units));
  const int count = ceil_div(total_units, max(longest, work_per_head > num_tiles ? 2 : 1));
  const int whole = num_tiles * (total_units / work_per_head), even = count / whole * whole;
  return 16 * (count - even) <= count ? even : count;
}

// What all partitions of a schedule have in common.
QUIRE_HD Partition cut_into_partitions(int num_tiles, int work_per_head, int total_units, int max_partitions) {
  const int count = num_partitions(num_tiles, work_per_head, total_units, max_partitions);
  return {0, 0, 0, 0, num_tiles, work_per_head, total_units / count, total_units % count};
}

// All units of a schedule are fewer than 2^31, so that these divisions are short.
QUIRE_HD int partition_begin(const Partition& all, int cta) { return all.units_each * cta + min(cta, all.num_longer); }

// The CTA whose partition holds `unit`.
QUIRE_HD int partition_of(const Partition& all, int unit) {
  const uint32_t longer = all.units_each + 1, in_longer = all.num_longer * longer;
  const uint32_t u = static_cast<uint32_t>(unit);
  return static_cast<int>(u < in_longer ? u / longer : all.num_longer + (u - in_longer) / all.units_each);
}

// The partial results of a tile that was cut in advance; its parts lie side by side.
QUIRE_HD PartialGroup planned_group(const AttentionParams& p, const RowTile& tile, int kv_head) {
  const int slot = kv_head * p.partials_per_head + tile.partial;
  return {slot, slot + 1, tile.num_parts, slot};
}

QUIRE_HD WorkTile whole_work_tile(const AttentionParams& p, int cta) {
  WorkTile work;
  const int tile = cta / p.num_kv_heads;
  work.tile = p.tiles[tile];
  work.kv_head = cta - tile * p.num_kv_heads;
  work.kv_begin = work.tile.kv_begin;
  work.kv_end = work.tile.kv_end;
  work.part = work.tile.part;
  work.group = planned_group(p, work.tile, work.kv_head);
  return work;
}

// `units` of a tile from `offset` on. `partition` says how all work is cut; where it stands does not matter.
QUIRE_HD WorkTile partition_work_tile(const AttentionParams& p, int cta, const Partition& partition,
                                      const RowTile& tile, int kv_head, int offset, int units) {
  WorkTile work;
  work.tile = tile;
  work.kv_head = kv_head;
  work.kv_begin = tile.kv_begin + offset;
  work.kv_end = min(work.kv_begin + units, tile.kv_end);
  const int size = tile_units(tile);
  if (units == size) {
    work.part = tile.part;
    work.group = planned_group(p, tile, kv_head);
    return work;
  }
  const int begin = partition.work_per_head * kv_head + tile.work_begin;
  const int first = offset == 0 ? cta : partition_of(partition, begin);
  const int last = partition_of(partition, begin + size - 1);
  work.part = cta - first;
  // WorkStage c: head of CTA c; num_ctas + c: its tail.
  work.group = {p.num_ctas + first, first + 1, last - first + 1, first};
  return work;
}

// Walks the work tiles of one CTA, in order.
struct WorkCursor {
  Partition left;  // what is still to do; units counts down to 0
  bool is_whole;

  // Of one whole tile.
  QUIRE_HD static WorkCursor of_tile() { return {{0, 0, 0, 1, 0, 0, 0, 0}, true}; }
  // Of CTA `cta`'s partition, or of its tile where tiles are whole.
  QUIRE_HD static WorkCursor of_cta(const AttentionParams& p, int cta) {
    return p.partitions == nullptr ? of_tile() : WorkCursor{p.partitions[cta], false};
  }

  // False when nothing is left.
  QUIRE_HD bool next(const AttentionParams& p, int cta, WorkTile& work) {
    if (left.units <= 0) return false;
    if (is_whole) {
      work = whole_work_tile(p, cta);
      left.units = 0;
      return true;
    }
    const RowTile tile = p.tiles[left.tile];
    const int units = min(left.units, tile_units(tile) - left.offset);
    work = partition_work_tile(p, cta, left, tile, left.kv_head, left.offset, units);
    left.units -= units;
    left.offset = 0;
    if (++left.tile == left.num_tiles) left.tile = 0, ++left.kv_head;
    return true;
  }
};

// Calls body(const WorkTile&) for each work of CTA `cta`, in order. There is one call of body, because kernels inline
// it.
template <class Body>
QUIRE_HD void for_each_work_tile(const AttentionParams& p, int cta, Body&& body) {
  WorkCursor cursor = WorkCursor::of_cta(p, cta);
  WorkTile work;
  while (cursor.next(p, cta, work)) body(work);
}

}  // namespace quire
