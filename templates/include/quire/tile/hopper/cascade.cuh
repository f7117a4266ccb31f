// Cascades, in the computing warpgroups of a CTA: at which merge groups they arrive, and when.
#pragma once
#include "quire/ptx/warp.cuh"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/shared/cascade_merge.cuh"

namespace quire {

// Each of kThreads threads has a CascadeEnding. The first of them is the CTA's thread 128. All count the same work
// tiles in step. kShared: a named barrier of these threads.
template <class V, int kThreads, int kShared, bool kExists = V::kCascade != 0>
class CascadeEnding {
 public:
  QUIRE_DEVICE explicit CascadeEnding(DeferredArrivals& deferred) : deferred_(deferred) {}

  // Called when a work tile begins. Returns the index of the work tile's first group in DeferredArrivals; -1 if the CTA
  // arrives at the groups as soon as the work tile is stored.
  QUIRE_DEVICE int begin(const WorkTile& work, int warpgroup) {
    const int at = counts_.reserve(work);
    announce_shared(work, warpgroup);
    return at;
  }

  // Called when this warpgroup has stored its rows of a work tile.
  QUIRE_DEVICE void stored(const AttentionParams& p, int warpgroup) {
    if (state_ != State::kAnnounced) return;
    state_ = State::kArrived;
    if (warpgroup != 0) return;
    ptx::cp_async_wait<0>();
    ptx::named_barrier_sync(kShared, kThreads);
    if (ptx::thread_id() < 160) deferred_.arrive_at_shared(p, counts_, ptx::lane_id());
  }

  // Called when all work tiles are stored.
  template <class Sync>
  QUIRE_DEVICE void merge(const AttentionParams& p, int warpgroup, Sync&& sync) {
    stored(p, warpgroup);
    deferred_.template merge<V, kThreads / 32>(p, counts_, state_ == State::kArrived, ptx::thread_id() - 128, sync);
  }

 private:
  // A CTA that begins with shared keys arrives at their groups before all of its work tiles are done, because other
  // CTAs wait for it. Each warpgroup announces that it has stored its rows. The first warpgroup arrives after its next
  // work tile, when all of these stores have reached memory.
  enum class State { kWaiting, kAnnounced, kArrived };

  QUIRE_DEVICE void announce_shared(const WorkTile& work, int warpgroup) {
    if (state_ != State::kWaiting || counts_.shared == 0 || ptx::uniform(work.tile.request) < 0) return;
    state_ = State::kAnnounced;
    if (warpgroup == 0) return;
    ptx::cp_async_wait<0>();
    ptx::named_barrier_arrive(kShared, kThreads);
  }

  DeferredArrivals& deferred_;
  DeferredArrivals::Counts counts_;
  State state_ = State::kWaiting;
};

// Without a cascade there is nothing to do.
template <class V, int kThreads, int kShared>
class CascadeEnding<V, kThreads, kShared, false> {
 public:
  QUIRE_DEVICE explicit CascadeEnding(DeferredArrivals&) {}
  QUIRE_DEVICE int begin(const WorkTile&, int) { return -1; }
  QUIRE_DEVICE void stored(const AttentionParams&, int) {}
  template <class Sync>
  QUIRE_DEVICE void merge(const AttentionParams&, int, Sync&&) {}
};

}  // namespace quire
