// Indices of a thread, clocks, and the warp-wide matrix instruction of sm_80 and newer.
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

// d[16, 8] += a[16, 16] * b[16, 8], all in fragments: lane l holds rows l / 4 and l / 4 + 8, columns 2 * (l % 4) + 0, 1
// (of a and b: + 8, 9 too).
QUIRE_DEVICE void mma_m16n8k16(bf16_t, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

QUIRE_DEVICE void mma_m16n8k16(fp16_t, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace quire::ptx
