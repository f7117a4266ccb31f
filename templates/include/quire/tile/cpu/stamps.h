// What timed variants note on a host: core/stamps.h.
#pragma once
#include "quire/core/stamps.h"

extern "C" {  // omp.h declares much more
int omp_get_thread_num();
double omp_get_wtime();  // seconds of a steady clock
}

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
