// Timed variants record when and where they compute work tiles, for pictures of a plan (quire.viz). Other variants
// contain none of this code.
#pragma once
#include "quire/core/expression.h"
#include "quire/core/schedule.h"

#ifdef __CUDACC__
#include "quire/ptx/warp.cuh"
#else
extern "C" {  // omp.h declares much more
int omp_get_thread_num();
double omp_get_wtime();  // seconds of a steady clock
}
#endif

namespace quire {

enum class Moment { kBegin, kEnd };

// One note; engine/inspection.py reads its numbers in this order.
struct Stamp {
  int64_t nanoseconds;
  int64_t moment;
  int64_t cta, place;                        // where it was computed: on an SM; on a host both are the thread's number
  int64_t request, kv_head, row_begin, key;  // which work tile: its first packed row and first token

  template <class V>
  QUIRE_HD static Stamp of(const WorkTile& work, Moment moment, int64_t nanoseconds, int64_t cta, int64_t place) {
    return {nanoseconds,
            static_cast<int64_t>(moment),
            cta,
            place,
            work.tile.request,
            work.kv_head,
            work.tile.row_begin,
            static_cast<int64_t>(work.kv_begin) * V::kTileKv};
  }
};

// The operands of a timed variant: they lie behind the parameters.
struct StampList {
  Stamp* rows;  // [1 + capacity]; the first number of the first row counts the others
  int64_t capacity;

  template <class V>
  QUIRE_HD static const StampList& of(const AttentionParams& p) {
    return *reinterpret_cast<const StampList*>(reinterpret_cast<const unsigned char*>(&p) + V::kOperandsAt);
  }
};

#ifdef __CUDACC__
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
#endif

}  // namespace quire

#ifndef __CUDACC__
namespace quire::cpu {

template <class V>
void stamp(const AttentionParams& p, const WorkTile* works, int count, Moment moment) {
  if constexpr (V::kTimed != 0) {
    const StampList& list = StampList::of<V>(p);
    const int thread = omp_get_thread_num();
    const int64_t now = static_cast<int64_t>(omp_get_wtime() * 1e9);
    for (int i = 0; i < count; ++i) {
      const int64_t at = __atomic_fetch_add(&list.rows->nanoseconds, 1, __ATOMIC_RELAXED);
      if (at >= list.capacity) return;
      list.rows[1 + at] = Stamp::of<V>(works[i], moment, now, thread, thread);
    }
  }
}

}  // namespace quire::cpu
#endif
