// The schedule of prefill, append and decode on every backend: which CTA computes what.
//
// A work unit is one KV tile of one row tile and one KV head. A CTA computes work tiles one at a time; a work tile is a
// run of consecutive units of one row tile and KV head. If there are many row tiles, each work tile is a whole row
// tile, and the longest come first. If there are few, all units in order are divided among the CTAs (stream-K): each
// gets a partition, a run of consecutive units. With fixed splits, row tiles are divided at multiples of
// fixed_split_size, so that the result of a request does not depend on the rest of the batch.
//
// A work tile that has only some of the KV tiles of its row tile leaves a partial result. The scheduler numbers the
// partials in the order of their units, so that those of one row tile and KV head, a merge group, are adjacent. The CTA
// that arrives last at a group merges its partials in this order, so the result does not depend on timing.
//
// Cascades: the keys of a row are in several nodes of a tree, one per level. A node of a shared level has the rows of
// all requests below it, which see all of its keys. The nodes of the last level are requests, under the variant's mask.
//
// A row tile has some rows of one node, so row tiles of different levels group the same rows differently. A merge group
// is the rows between two neighbouring edges of row tiles of any level, so it is part of one row tile of each level.
// Every work tile leaves a partial result, with as many rows as its row tile, and arrives at each group that has some
// of its rows. The list of parts gives the begin of a group's rows in each of its partial results, level by level, and
// in the order of keys within a level.
//
// With kPrefix the keys of shared levels are in separate tensors, beside a paged cache or ragged keys.
// RowTile::kv_first of a shared node is then its first row in these tensors.
#pragma once
#include "quire/core/mask.h"
#include "quire/core/params.h"

namespace quire {

// Mirrored by AttentionPrefixParams in quire/kernels/params.py.
struct AttentionPrefixParams {
  AttentionParams base;
  const void* k_prefix;  // [nnz_prefix, num_kv_heads, head_dim_qk], by strides
  const void* v_prefix;  // the same with head_dim_vo
  int64_t k_prefix_token_stride, k_prefix_head_stride;
  int64_t v_prefix_token_stride, v_prefix_head_stride;
};

// Whether the keys of a row tile lie in k_prefix and v_prefix.
template <class V>
QUIRE_HD bool is_in_prefix(const RowTile& tile) {
  return V::kPrefix != 0 && tile.request < 0;
}

// An entry of a cascade's merge table: one merge group of one KV head. Group i of KV head h is entry i * num_kv_heads +
// h.
struct CascadeGroup : MergeGroup {  // places in the list of parts are counted in int32 from the merge table's begin
  int32_t row;                      // first packed row of the batch: token * group_size + head in group
  int32_t num_shared_parts;         // parts of shared levels, which come first
};

// The first row of a part in partial_o and partial_md. In a cascade the list of parts gives it, which follows the merge
// table `groups`.
template <class Variant>
QUIRE_HD int64_t part_row(const MergeGroup* groups, int parts_begin, int part) {
  if constexpr (Variant::kCascade != 0) return reinterpret_cast<const int32_t*>(groups)[parts_begin + part];
  return static_cast<int64_t>(parts_begin + part) * Variant::kTileRows;
}

// Merge group i of the groups that take rows of this row tile.
QUIRE_HD CascadeGroup& cascade_group(const AttentionParams& p, const RowTile& tile, int i, int kv_head) {
  return reinterpret_cast<CascadeGroup*>(p.groups)[static_cast<int64_t>(tile.group + i) * p.num_kv_heads + kv_head];
}

// Tokens of the fixed splits of a request of `kv_len` tokens, for kernels of decode: what a request of any length needs
// to keep many CTAs busy alone, but no more starts and merges than many requests together can bear. There are 32 splits
// at most (MOST_OWN_SPLITS in quire/kernels/attention.py), and none has fewer than 256 tokens (LEAST_OWN_SPLIT).
QUIRE_HD int splits_of(int kv_len) {
  if (kv_len <= 512) return 512;
  if (kv_len <= 2048) return 256;
  if (kv_len < 4096) return 512;
  if (kv_len < 8192) return 1024;
  int64_t tokens = 2048;
  while (32 * tokens < kv_len) tokens *= 2;
  return static_cast<int>(tokens);
}

QUIRE_HD int tile_units(const RowTile& tile) { return max(1, tile.kv_end - tile.kv_begin); }

// Sets the KV tiles that the rows of a row tile can see. p: the scheduler's parameters, with the mask and the tile
// size.
template <class Params>
QUIRE_HD void set_kv_range(const Params& p, RowTile& tile) {
  const int last_row = min(tile.row_begin + p.tile_rows, tile.qo_len * p.group_size) - 1;
  const KeyRange keys = visible_to_any(p.mask_mode, p.window_left, tile.qo_len, tile.kv_len,
                                       tile.row_begin / p.group_size, last_row / p.group_size);
  tile.kv_begin = keys.begin / p.tile_kv;
  tile.kv_end = keys.empty() ? tile.kv_begin : (keys.end - 1) / p.tile_kv + 1;
}

// What a CTA computes in one go, with the request that it belongs to.
struct WorkTile {
  RowTile tile;
  int32_t kv_head;
  int32_t kv_begin, kv_end;  // KV tiles
  int32_t kv_limit;          // first token that this work tile does not read
  int32_t row_end;           // one past the request's last packed row
  int32_t partial;           // number of its partial; -1: it covers its row tile; in a cascade the partial's first row
  int32_t group;             // merge group of the partial; in a cascade a bit for each group that this CTA merges

  QUIRE_HD bool is_whole() const { return partial < 0; }

  // The first row of its partial result in partial_o and partial_md.
  template <class Variant>
  QUIRE_HD int64_t partial_row() const {
    if constexpr (Variant::kCascade != 0) return partial;
    return static_cast<int64_t>(partial) * Variant::kTileRows;
  }

  // Token and query head of a packed row, which index q, o and lse.
  struct Place {
    int64_t token;
    int32_t head;
  };
  QUIRE_HD Place place(const FastDivisor& group_size, int row) const {
    const int size = static_cast<int>(group_size.divisor), qo_idx = group_size.div(row);
    return {tile.qo_begin + static_cast<int64_t>(qo_idx), kv_head * size + row - qo_idx * size};
  }
};

// Goes through a CTA's work tiles, in order.
struct WorkCursor {
  Partition left;  // what is still to do; units counts down to 0

  static constexpr int32_t kAllUnits = INT32_MAX;  // of one row tile

  QUIRE_HD static WorkCursor of_row_tile(int tile, int kv_head) { return {{kv_head, tile, 0, kAllUnits, 0, 0, 0, 0}}; }

  // The partition of CTA `cta`. Without partitions each CTA computes one row tile: number cta / num_kv_heads.
  QUIRE_HD static WorkCursor of_cta(const AttentionParams& p, int cta) {
    if (p.partitions != nullptr) return {p.partitions[cta]};
    const int tile = cta / p.num_kv_heads;
    return of_row_tile(tile, cta - tile * p.num_kv_heads);
  }

  QUIRE_HD bool exists() const { return left.units > 0; }

  // The work tile at the cursor, which then moves on. `tile` is the row tile that `left` names.
  template <bool kCascade = false>
  QUIRE_HD WorkTile take(const AttentionParams& p, const RowTile& tile, int tile_kv) {
    const int size = tile_units(tile), units = min(left.units, size - left.offset);
    WorkTile work;
    work.tile = tile;
    work.kv_head = left.kv_head;
    work.kv_begin = tile.kv_begin + left.offset;
    work.kv_end = min(work.kv_begin + units, tile.kv_end);
    work.kv_limit = static_cast<int>(min<uint32_t>(tile.kv_len, static_cast<uint32_t>(work.kv_end) * tile_kv));
    if constexpr (kCascade) {
      work.row_end = tile.row_end, work.partial = left.partial, work.group = 0;
      left.partial += tile.row_end - tile.row_begin;
      advance<true>(units);
      if (left.units == 0 && left.next != 0) left = p.partitions[left.next];
      return work;
    }
    work.row_end = tile.qo_len * static_cast<int>(p.group.divisor);
    work.partial = tile.partial < 0 ? -1 : tile.partial + left.kv_head * tile.num_parts;
    work.group = tile.group + left.kv_head;
    if (units < size) {
      const int is_next = left.offset == 0;
      work.partial = left.partial + is_next, work.group = left.group + is_next;
    }
    advance(units);
    return work;
  }

  template <bool kCascade = false>
  QUIRE_HD void advance(int units) {
    left.units = left.units == kAllUnits ? 0 : left.units - units;
    left.offset = 0;
    if (++left.tile == left.num_tiles) left.tile = kCascade ? left.first_tile : 0, ++left.kv_head;
  }

  // False when nothing is left.
  template <bool kCascade = false>
  QUIRE_HD bool next(const AttentionParams& p, int tile_kv, WorkTile& work) {
    if (!exists()) return false;
    work = take<kCascade>(p, p.tiles[left.tile], tile_kv);
    return true;
  }
};

// The work tile that a CTA is busy with, and those that follow. Lies in shared memory, because the main loops have no
// registers left for it.
struct CurrentWork {
  WorkTile work;
  WorkCursor cursor;  // the work tiles that follow
  bool exists;        // false: the CTA is done
  bool is_last;       // the CTA is the last one to arrive at the merge group

#ifdef __CUDACC__
  // Called by all threads of a CTA: calls body() for each of its work tiles, which is then in `work`.
  template <bool kCascade, class Body>
  QUIRE_DEVICE void for_each(const AttentionParams& p, int tile_kv, Body&& body) {
    if (threadIdx.x == 0) cursor = WorkCursor::of_cta(p, static_cast<int>(blockIdx.x));
    for (;;) {
      __syncthreads();  // all of shared memory may still be in use for the work tile before
      if (threadIdx.x == 0) exists = cursor.next<kCascade>(p, tile_kv, work);
      __syncthreads();
      if (!exists) return;
      body();
    }
  }
#endif
};

// The number of partitions. It is the smallest for which no partition is longer than with max_partitions, because fewer
// partitions have fewer partials. If row tiles are divided at all, a partition has at least two units: merging costs
// more than a unit. If that loses at most one partition in sixteen, each row tile gets the same number of partitions,
// so that equal row tiles end where partitions do.
QUIRE_HD int num_partitions(int num_tiles, int work_per_head, int total_units, int max_partitions) {
  if (total_units == 0) return 1;
  const auto divided_by = [total_units](int size) {  // rounded up; the sum may have 32 bits
    return static_cast<int>((static_cast<uint32_t>(total_units) + size - 1) / static_cast<uint32_t>(size));
  };
  const int longest = divided_by(min(max_partitions, total_units));
  const int count = divided_by(max(longest, work_per_head > num_tiles ? 2 : 1));
  const int whole = num_tiles * (total_units / work_per_head), even = count / whole * whole;
  return 16 * (count - even) <= count ? even : count;
}

// A position in the sequence of all work units: before a unit, or behind the last one.
struct WorkPosition {
  int kv_head, tile;
  int offset;  // units of the row tile before this position

  QUIRE_HD bool is_in_tile_of(const WorkPosition& other) const {
    return kv_head == other.kv_head && tile == other.tile;
  }
};

// The sequence of all work units, which is divided into partitions of equal cost. The cost of a work tile is its units
// and a start, for what each work tile needs however short it is: loading queries and page numbers, and a merge at its
// end. Costs are in sixteenths of a unit.
struct WorkSequence {
  static constexpr int kUnitCost = 16;

  const RowTile* tiles;
  int num_tiles, num_kv_heads;
  int work_per_head;   // units of one KV head
  int start_cost;      // of a work tile, in sixteenths of a unit
  bool may_divide;     // false: a row tile belongs to one partition
  int num_partitions;  // that have work; later ones are empty
  double partition_cost;

  QUIRE_HD static WorkSequence of(const RowTile* tiles, int num_tiles, int num_kv_heads, int work_per_head,
                                  int start_cost, bool may_divide, int max_partitions) {
    const int count = quire::num_partitions(num_tiles, work_per_head, work_per_head * num_kv_heads, max_partitions);
    WorkSequence sequence = {
        tiles, num_tiles, num_kv_heads, work_per_head, start_cost, may_divide, num_tiles == 0 ? 0 : count};
    sequence.partition_cost =
        static_cast<double>(sequence.cost_before(num_tiles, work_per_head) * num_kv_heads) / count;
    return sequence;
  }

  QUIRE_HD int64_t cost_before(int tile, int units) const {
    return static_cast<int64_t>(kUnitCost) * units + static_cast<int64_t>(start_cost) * tile;
  }

  // The position where partition `i` begins. If a row tile is divided, each partition pays for its part of the start.
  // `near`: an earlier position or the same, from which to search forwards.
  QUIRE_HD WorkPosition begin_of_partition(int i, const WorkPosition* near = nullptr) const {
    if (i >= num_partitions) return {num_kv_heads, 0, 0};
    const int64_t head_cost = cost_before(num_tiles, work_per_head), at = static_cast<int64_t>(i * partition_cost);
    int kv_head = near == nullptr ? static_cast<int>(at / head_cost) : near->kv_head;
    while (at >= (kv_head + 1) * head_cost) ++kv_head;
    const int64_t rest = at - kv_head * head_cost;
    const int tile = near == nullptr ? find_tile(rest) : next_tile(rest, near->kv_head == kv_head ? near->tile : 0);
    const int units = tile_units(tiles[tile]);
    const int64_t cost = cost_before(1, units), into = rest - cost_before(tile, tiles[tile].work_begin);
    const int offset = nearest_end(static_cast<int>(static_cast<double>(into) * units / cost + 0.5), units);
    if (offset < units) return {kv_head, tile, offset};
    return tile + 1 < num_tiles ? WorkPosition{kv_head, tile + 1, 0} : WorkPosition{kv_head + 1, 0, 0};
  }

  // The end of a partition that begins at `at` and costs at most `budget`, if it pays a whole start for each work tile.
  QUIRE_HD WorkPosition end_within_budget(WorkPosition at, int64_t budget) const {
    const int least =
        static_cast<int>(min<int64_t>(start_cost, budget / 2)) / kUnitCost + 1;  // units worth a separate start
    for (bool is_first = true; at.kv_head < num_kv_heads; is_first = false) {
      const int left = tile_units(tiles[at.tile]) - at.offset;
      const int64_t fit = max<int64_t>(0, budget - start_cost) / kUnitCost;
      if (fit < left) {
        const int part = min(static_cast<int>(fit), max(left - least, is_first ? 1 : 0));
        return part < least && !is_first ? at : WorkPosition{at.kv_head, at.tile, at.offset + part};
      }
      budget -= start_cost + int64_t{kUnitCost} * left;
      at = at.tile + 1 < num_tiles ? WorkPosition{at.kv_head, at.tile + 1, 0} : WorkPosition{at.kv_head + 1, 0, 0};
    }
    return at;
  }

  // The smallest budget with which `count` partitions hold all work, by bisection.
  QUIRE_HD int64_t budget_of(int count) const {
    const int64_t cost = cost_before(num_tiles, work_per_head) * num_kv_heads;
    int64_t low = max<int64_t>(cost / count, start_cost + 2 * kUnitCost) - 1, high = 2 * low + 4 * start_cost;
    while (!holds_all(count, high)) high *= 2;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (holds_all(count, middle) ? high : low) = middle;
    }
    return high;
  }
  QUIRE_HD bool holds_all(int count, int64_t budget) const {
    WorkPosition at = {0, 0, 0};
    for (; count > 0 && at.kv_head < num_kv_heads; --count) at = end_within_budget(at, budget);
    return at.kv_head >= num_kv_heads;
  }

  // The last row tile that begins at or before `cost`. find_tile() bisects; next_tile() searches forwards from `tile`.
  QUIRE_HD int find_tile(int64_t cost) const {
    int tile = 0;
    for (int step = 1 << 30; step > 0; step /= 2) {
      if (begins_before(tile + step, cost)) tile += step;
    }
    return tile;
  }
  QUIRE_HD int next_tile(int64_t cost, int tile) const {
    while (begins_before(tile + 1, cost)) ++tile;
    return tile;
  }
  QUIRE_HD bool begins_before(int tile, int64_t cost) const {
    return tile < num_tiles && cost_before(tile, tiles[tile].work_begin) <= cost;
  }

  // Moves `offset` to an end of the row tile if dividing it there is no gain: if one side would cost less than the
  // start that the division adds, or less than half of a partition where that is shorter.
  QUIRE_HD int nearest_end(int offset, int units) const {
    const int side = min(offset, units - offset);
    if (may_divide && side * kUnitCost > min<double>(start_cost, partition_cost / 2)) return offset;
    return 2 * offset < units ? 0 : units;
  }

  QUIRE_HD int units_before(const WorkPosition& at) const {
    return work_per_head * at.kv_head + (at.kv_head < num_kv_heads ? tiles[at.tile].work_begin + at.offset : 0);
  }

  // The partition between two positions, before which there are `partials` partials and `groups` merge groups.
  QUIRE_HD Partition between(const WorkPosition& begin, const WorkPosition& end, int partials, int groups) const {
    const int units = units_before(end) - units_before(begin);
    return {begin.kv_head, begin.tile, begin.offset, units, partials - (begin.offset == 0), groups - 1, num_tiles, 0};
  }
};

// What a partition adds to the merge table. Its first work tile continues a group if an earlier partition begins that
// row tile. Its last work tile begins a group if a later partition ends that row tile.
struct PartialsOfPartition {
  bool continues, ends, begins;

  QUIRE_HD PartialsOfPartition(const WorkPosition& begin, const WorkPosition& end) {
    const bool is_inside = begin.offset > 0 && end.offset > 0 && begin.is_in_tile_of(end);
    continues = begin.offset > 0 && !(is_inside && begin.offset == end.offset);
    ends = continues && !is_inside;
    begins = end.offset > 0 && !is_inside;
  }

  QUIRE_HD int count() const { return continues + begins; }

  // Writes this partition's part of the merge table: the first part and the rows of the group that it begins, and the
  // last part of the group that it ends.
  QUIRE_HD void write(const WorkSequence& sequence, const Partition& partition, const WorkPosition& end, int tile_rows,
                      int group_size, MergeGroup* groups) const {
    if (ends) groups[partition.group].parts_end = partition.partial + 1;
    if (!begins) return;
    MergeGroup& group = groups[partition.group + 1];
    const RowTile& tile = sequence.tiles[end.tile];
    group.parts_begin = partition.partial + 1;
    group.num_rows = min(tile_rows, tile.qo_len * group_size - tile.row_begin);
    group.num_arrived = 0;
  }
};

}  // namespace quire
