// The work tiles of a persistent CTA, handed from the warp that schedules to the warps that load and compute, one
// ahead.
#pragma once
#include "quire/core/params_fa3.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/job.cuh"

namespace quire {

// A position in a ring of kSlots, and the parity of its present round. One register where kSlots is a power of two.
template <int kSlots, bool kIsPowerOfTwo = (kSlots & (kSlots - 1)) == 0>
struct RingPosition {
  int count = 0;

  QUIRE_DEVICE int slot() const { return count & (kSlots - 1); }
  QUIRE_DEVICE int parity() const { return static_cast<uint32_t>(count) / kSlots & 1; }
  QUIRE_DEVICE void advance() { ++count; }
  QUIRE_DEVICE RingPosition before() const { return {count - 1}; }
  QUIRE_DEVICE RingPosition after() const { return {count + 1}; }
  QUIRE_DEVICE RingPosition uniform() const { return {ptx::uniform(count)}; }
};

template <int kSlots>
struct RingPosition<kSlots, false> {
  int at = 0, round = 0;

  QUIRE_DEVICE int slot() const { return at; }
  QUIRE_DEVICE int parity() const { return round; }
  QUIRE_DEVICE void advance() {
    if (++at == kSlots) at = 0, round ^= 1;
  }
  QUIRE_DEVICE RingPosition before() const {
    return at == 0 ? RingPosition{kSlots - 1, round ^ 1} : RingPosition{at - 1, round};
  }
  QUIRE_DEVICE RingPosition uniform() const { return {ptx::uniform(at), ptx::uniform(round)}; }
};

// Pairs of mbarriers in shared memory, "full" and "empty", for a ring of kSlots.
template <int kSlots>
struct RingBarriers {
  static constexpr int kBytes = 16 * kSlots;
  uint32_t base;

  QUIRE_DEVICE void init(int full_count, int empty_count) const {
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(full(i), full_count);
      ptx::mbarrier_init(empty(i), empty_count);
    }
  }
  QUIRE_DEVICE uint32_t full(int slot) const { return base + 8 * slot; }
  QUIRE_DEVICE uint32_t empty(int slot) const { return base + 8 * (kSlots + slot); }

  QUIRE_DEVICE void wait_full(RingPosition<kSlots> at) const { ptx::mbarrier_wait(full(at.slot()), at.parity()); }
  QUIRE_DEVICE void wait_empty(RingPosition<kSlots> at) const { ptx::mbarrier_wait(empty(at.slot()), at.parity() ^ 1); }
  QUIRE_DEVICE void arrive_full(RingPosition<kSlots> at) const { ptx::mbarrier_arrive(full(at.slot())); }
  QUIRE_DEVICE void arrive_empty(RingPosition<kSlots> at) const { ptx::mbarrier_arrive(empty(at.slot())); }
};

// The work of one CTA: its partition, or whole tiles that it takes as it gets to them. One thread's; where it is
// between work tiles stands in the jobs in shared memory, because the loading warps have few registers.
struct WorkList {
  // The first job's beginning, before any work of it.
  QUIRE_DEVICE static void begin(const AttentionFa3Params& p, Job& job, int& work) {
    work = static_cast<int>(blockIdx.x);
    const WorkQueue queue(p);
    if (work < queue.count) job.cursor = cursor(p, queue);
  }

  // Fills in `job`, which follows the one that left `cursor`; job.exists is false when nothing is left.
  QUIRE_DEVICE static void next(const AttentionFa3Params& p, const WorkCursor& cursor_before, Job& job, int& work,
                                int tile_kv) {
    const WorkQueue queue(p);
    job.cursor = cursor_before;
    job.exists = false;
    while (work < queue.count) {
      job.next(p.base, queue.place(p, work), tile_kv);
      if (job.exists) return;
      work = queue.take(p, work);
      if (work < queue.count) job.cursor = cursor(p, queue);
    }
  }

 private:
  // How many work tiles of work there are to begin with: partitions, or whole tiles of each kv head.
  struct WorkQueue {
    int count;
    int heads_per_l2_group;  // whole tiles: a divisor of num_kv_heads; 0: partitions
    int num_tiles;

    QUIRE_DEVICE explicit WorkQueue(const AttentionFa3Params& p) {
      count = p.base.num_ctas, heads_per_l2_group = 0, num_tiles = p.base.num_tiles;
      if (p.base.partitions == nullptr) {
        heads_per_l2_group = p.heads_per_l2_group;
      } else if (const Partition partition = p.base.partitions[blockIdx.x]; partition.units == Partition::kDynamic) {
        count = partition.offset, heads_per_l2_group = partition.tile, num_tiles = partition.num_tiles;
      }
    }

    // A CTA's first work costs no tile_counter. A launch takes one for each of the rest and one a CTA that fails, count
    // in all: then the counter is 0 again.
    QUIRE_DEVICE int take(const AttentionFa3Params& p, int work) const {
      const int grid = static_cast<int>(gridDim.x);
      if (p.tile_counter == nullptr || heads_per_l2_group == 0) return work + grid;
      return min(grid, count) + static_cast<int>(atomicInc(p.tile_counter, count - 1));
    }

    // Whole tiles in order of head sections first. The schedule counts (tile, head) with heads inside.
    QUIRE_DEVICE int place(const AttentionFa3Params& p, int work) const {
      if (heads_per_l2_group == 0 || heads_per_l2_group >= p.base.num_kv_heads) return work;
      const int section_size = heads_per_l2_group * num_tiles;
      const int section = work / section_size, in_section = work - section * section_size;
      const int tile = in_section / heads_per_l2_group, head = in_section - tile * heads_per_l2_group;
      return tile * p.base.num_kv_heads + section * heads_per_l2_group + head;
    }
  };

  QUIRE_DEVICE static WorkCursor cursor(const AttentionFa3Params& p, const WorkQueue& queue) {
    return queue.heads_per_l2_group != 0 ? WorkCursor::of_tile()
                                         : WorkCursor::of_cta(p.base, static_cast<int>(blockIdx.x));
  }
};

}  // namespace quire
