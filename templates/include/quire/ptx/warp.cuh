// Indices of a thread, and clocks.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// For code that differs only in registers and scheduling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kBeforeSm90 = true;
#else
constexpr bool kBeforeSm90 = false;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kFromSm100 = true;
#else
constexpr bool kFromSm100 = false;
#endif

// Volatile, so that each call reads the index again: an epilogue then needs no register during the main loop.
QUIRE_DEVICE int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

QUIRE_DEVICE int sm_id() {
  int sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

// The time of a clock that all SMs share, in ns.
QUIRE_DEVICE int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace quire::ptx
