// The work tiles of a persistent CTA, handed from the warp that schedules to the warps that load and compute, one
// ahead.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/core/schedule.h"

namespace quire {

// A position in a ring of kStages, and the parity of its present round. One register where kStages is a power of two.
template <int kStages, bool kIsPowerOfTwo = (kStages & (kStages - 1)) == 0>
struct RingPosition {
  int count = 0;

  QUIRE_DEVICE int stage() const { return count & (kStages - 1); }
  QUIRE_DEVICE int parity() const { return static_cast<uint32_t>(count) / kStages & 1; }
  QUIRE_DEVICE void advance() { ++count; }
  QUIRE_DEVICE RingPosition before() const { return {count - 1}; }
  QUIRE_DEVICE RingPosition after() const { return {count + 1}; }
  QUIRE_DEVICE RingPosition uniform() const { return {ptx::uniform(count)}; }
};

template <int kStages>
struct RingPosition<kStages, false> {
  int at = 0, round = 0;

  QUIRE_DEVICE int stage() const { return at; }
  QUIRE_DEVICE int parity() const { return round; }
  QUIRE_DEVICE void advance() {
    if (++at == kStages) at = 0, round ^= 1;
  }
  QUIRE_DEVICE RingPosition before() const {
    return at == 0 ? RingPosition{kStages - 1, round ^ 1} : RingPosition{at - 1, round};
  }
  QUIRE_DEVICE RingPosition uniform() const { return {ptx::uniform(at), ptx::uniform(round)}; }
};

// Pairs of mbarriers in shared memory, "full" and "empty", for a ring of kStages.
template <int kStages>
struct RingBarriers {
  static constexpr int kBytes = 16 * kStages;
  uint32_t base;

  QUIRE_DEVICE void init(int full_count, int empty_count) const {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full(i), full_count);
      ptx::mbarrier_init(empty(i), empty_count);
    }
  }
  QUIRE_DEVICE uint32_t full(int stage) const { return base + 8 * stage; }
  QUIRE_DEVICE uint32_t empty(int stage) const { return base + 8 * (kStages + stage); }

  QUIRE_DEVICE void wait_full(RingPosition<kStages> at) const { ptx::mbarrier_wait(full(at.stage()), at.parity()); }
  QUIRE_DEVICE void wait_empty(RingPosition<kStages> at) const {
    ptx::mbarrier_wait(empty(at.stage()), at.parity() ^ 1);
  }
  QUIRE_DEVICE void arrive_full(RingPosition<kStages> at) const { ptx::mbarrier_arrive(full(at.stage())); }
  QUIRE_DEVICE void arrive_empty(RingPosition<kStages> at) const { ptx::mbarrier_arrive(empty(at.stage())); }
};

// The work tiles of one CTA, in order: those of its partition, or whole row tiles that it takes from the tile counter.
// One thread calls these functions. What it remembers between work tiles is in shared memory, because the loading warps
// have few registers.
// kCtasPerTile neighbouring CTAs share work tiles: each computes its part of their rows.
// kJoins: some CTAs begin later, after other work. All row tiles are then taken from the counter, and partitions, if
// there are some, belong to the last CTAs of the launch.
template <int kCtasPerTile, bool kJoins = false>
struct SharedWorkList {
  // Before the first call of next(). `number`: of the last whole row tile that was taken.
  QUIRE_DEVICE static void begin(const AttentionFa3Params& p, WorkCursor& cursor, int& number) {
    number = -1;
    cursor = {};
    if constexpr (kJoins) {
      const int partition = static_cast<int>(blockIdx.x - gridDim.x) + p.base.num_ctas;
      if (p.base.partitions != nullptr && partition >= 0) cursor.left = p.base.partitions[partition];
    } else {
      if (p.base.partitions != nullptr) cursor.left = p.base.partitions[blockIdx.x / kCtasPerTile];
    }
  }

  // Fills in `next`, the work tile after the one whose cursor is `cursor`.
  template <bool kCascade = false>
  QUIRE_DEVICE static void next(const AttentionFa3Params& p, const WorkCursor& cursor, CurrentWork& next, int& number,
                                int tile_kv) {
    next.cursor = cursor;
    if (!kCascade && !next.cursor.exists()) {
      const CountedTiles tiles(p);
      if (tiles.count > 0) number = tiles.take(p, number);
      if (number < tiles.count) next.cursor = tiles.cursor(number);
    }
    next.exists = next.cursor.next<kCascade>(p.base, tile_kv, next.work);
  }

 private:
  // Whole row tiles of each KV head, longest first.
  struct CountedTiles {
    int num_tiles, heads_per_l2_group;  // a divisor of num_kv_heads
    int count;

    QUIRE_DEVICE explicit CountedTiles(const AttentionFa3Params& p)
        : num_tiles(p.base.num_tiles), heads_per_l2_group(p.heads_per_l2_group) {
      if (kJoins && p.base.partitions != nullptr) heads_per_l2_group = 0;
      if (!kJoins && p.base.partitions != nullptr) {
        const Partition partition = p.base.partitions[blockIdx.x / kCtasPerTile];
        num_tiles = partition.num_tiles, heads_per_l2_group = partition.heads_per_l2_group;
      }
      count = heads_per_l2_group == 0 ? -1 : num_tiles * p.base.num_kv_heads;
    }

    // Returns the number of the CTA's next row tile; `count` and more: there is none. The first row tile follows from
    // the CTA's number. Each later row tile and each CTA's final failed take increments the counter: `count` increments
    // per launch, after which atomicInc has wrapped to 0.
    QUIRE_DEVICE int take(const AttentionFa3Params& p, int number) const {
      const int grid = static_cast<int>(gridDim.x) / kCtasPerTile;
      if constexpr (kJoins) return static_cast<int>(atomicInc(p.tile_counter, count + grid - 1));
      if (number < 0) return static_cast<int>(blockIdx.x) / kCtasPerTile;
      if (p.tile_counter == nullptr) return number + grid;
      return min(grid, count) + static_cast<int>(atomicInc(p.tile_counter, count - 1));
    }

    // Row tile `number` in the order of the launch: all KV heads of one L2 group before those of the next group, and
    // within a group each row tile for all of its heads.
    QUIRE_DEVICE WorkCursor cursor(int number) const {
      const int section_size = heads_per_l2_group * num_tiles;
      const int section = number / section_size, in_section = number - section * section_size;
      const int tile = in_section / heads_per_l2_group;
      return WorkCursor::of_row_tile(tile, section * heads_per_l2_group + in_section - tile * heads_per_l2_group);
    }
  };
};
using WorkList = SharedWorkList<1>;

// Each CTA brings a line of the row tiles into the L2, while partitions are read that say which one is whose.
QUIRE_DEVICE void prefetch_row_tiles(const AttentionParams& p) {
  const int64_t line = static_cast<int64_t>(blockIdx.x) * 128;
  if (line < p.num_tiles * static_cast<int64_t>(sizeof(RowTile))) {
    ptx::prefetch_l2(reinterpret_cast<const char*>(p.tiles) + line);
  }
}

}  // namespace quire
