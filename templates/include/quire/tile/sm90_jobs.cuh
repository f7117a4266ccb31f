// The pieces of a persistent CTA, handed from the warp that schedules to the warps that load and compute, one ahead.
#pragma once
#include "quire/core/params_fa3.h"
#include "quire/ptx/barrier.cuh"
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

// The work of one CTA: its share, or whole tiles that it takes as it gets to them. One thread's; where it is between
// pieces stands in the jobs in shared memory, because the loading warps have few registers.
struct WorkList {
  // The first job's beginning, before any piece of it.
  QUIRE_DEVICE static void begin(const AttentionFa3Params& p, Job& job, int& work) {
    work = static_cast<int>(blockIdx.x);
    if (work < p.base.num_ctas) job.cursor = PieceCursor(p.base, place(p, work));
  }

  // Fills in `job`, which follows the one that left `cursor`; job.exists is false when nothing is left.
  QUIRE_DEVICE static void next(const AttentionFa3Params& p, const PieceCursor& cursor, Job& job, int& work,
                                int tile_kv) {
    job.cursor = cursor;
    job.exists = false;
    while (work < p.base.num_ctas) {
      job.next(p.base, place(p, work), tile_kv);
      if (job.exists) return;
      work = take(p, work);
      if (work < p.base.num_ctas) job.cursor = PieceCursor(p.base, place(p, work));
    }
  }

 private:
  // A launch takes num_ctas - grid tickets that succeed and one a CTA that fails, num_ctas in all: then it is 0 again.
  QUIRE_DEVICE static int take(const AttentionFa3Params& p, int work) {
    const int grid = static_cast<int>(gridDim.x);
    if (p.ticket == nullptr) return work + grid;
    return grid + static_cast<int>(atomicInc(p.ticket, p.base.num_ctas - 1));
  }

  // Whole tiles in order of head sections first. The schedule counts (tile, head) with heads inside.
  QUIRE_DEVICE static int place(const AttentionFa3Params& p, int work) {
    if (p.base.shares != nullptr || p.heads_at_once >= p.base.num_kv_heads) return work;
    const int section_size = p.heads_at_once * p.base.num_tiles;
    const int section = work / section_size, in_section = work - section * section_size;
    const int tile = in_section / p.heads_at_once, head = in_section - tile * p.heads_at_once;
    return tile * p.base.num_kv_heads + section * p.heads_at_once + head;
  }
};

}  // namespace quire
