// What timed variants note on a GPU: core/stamps.h.
#pragma once
#include "quire/core/stamps.h"
#include "quire/ptx/warp.cuh"

namespace quire {

// Called by one of the threads that compute a work tile.
template <class V>
QUIRE_DEVICE void stamp(const AttentionParams& p, const WorkTile& work, Moment moment, bool is_that_thread) {
  if constexpr (V::kTimed != 0) {
    if (!is_that_thread) return;
    const StampList& list = StampList::of<V>(p);
    const auto at = static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(list.rows), 1ull));
    if (at >= list.capacity) return;
    list.rows[1 + at] = Stamp::of<V>(work, moment, ptx::nanoseconds(), static_cast<int64_t>(blockIdx.x), ptx::sm_id());
  }
}

}  // namespace quire
