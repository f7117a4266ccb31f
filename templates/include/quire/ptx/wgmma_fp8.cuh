// Warpgroup matrix products of e4m3 numbers, sm_90a. Both operands are contiguous along the inner dimension: these
// instructions take no transposed operand. The tensor cores add up with about 14 bits, so that a sum over many keys
// needs another accumulator beside d.
#pragma once
#include "quire/ptx/wgmma.cuh"

namespace quire::ptx {

// Four numbers rounded to nearest even, `a` in the lowest byte. Numbers beyond 448 become 448.
QUIRE_DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t x;
  asm("{\n"
      ".reg .b16 l, h;\n"
      "cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      "mov.b32 %0, {l, h};\n"
      "}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

// d[64, N] = a[64, 32] * b[N, 32]^T, or += if kAdds, d as Wgmma leaves it. A product that does not add does not read d
// either, so that d takes no registers before it.
//   ss: a and b in shared memory
//   rs: a in registers: lane l of warp w holds rows 16 * w + l / 4 and + 8, and of them columns 4 * (l % 4) to + 3, in
//       a[0] and a[1], and those 16 further right, in a[2] and a[3]
template <int N>
struct WgmmaFp8;

#define QUIRE_NEW_EIGHT(i)                                                                                           \
  "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3]), "=&f"(d[i + 4]), "=&f"(d[i + 5]), "=&f"(d[i + 6]), \
      "=&f"(d[i + 7])
#define QUIRE_NEW_16 QUIRE_NEW_EIGHT(0), QUIRE_NEW_EIGHT(8)
#define QUIRE_NEW_32 QUIRE_NEW_16, QUIRE_NEW_EIGHT(16), QUIRE_NEW_EIGHT(24)
#define QUIRE_NEW_48 QUIRE_NEW_32, QUIRE_NEW_EIGHT(32), QUIRE_NEW_EIGHT(40)
#define QUIRE_NEW_64 QUIRE_NEW_48, QUIRE_NEW_EIGHT(48), QUIRE_NEW_EIGHT(56)
#define QUIRE_NEW_80 QUIRE_NEW_64, QUIRE_NEW_EIGHT(64), QUIRE_NEW_EIGHT(72)
#define QUIRE_NEW_96 QUIRE_NEW_80, QUIRE_NEW_EIGHT(80), QUIRE_NEW_EIGHT(88)
#define QUIRE_NEW_112 QUIRE_NEW_96, QUIRE_NEW_EIGHT(96), QUIRE_NEW_EIGHT(104)
#define QUIRE_NEW_128 QUIRE_NEW_112, QUIRE_NEW_EIGHT(112), QUIRE_NEW_EIGHT(120)

#define QUIRE_WGMMA_FP8_TEXT(N, n) "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" QUIRE_TEXT_##n "}, "
#define QUIRE_WGMMA_FP8(N, n, i0, i1, i2, i3, i4)                                                                  \
  template <>                                                                                                      \
  struct WgmmaFp8<N> {                                                                                             \
    template <bool kAdds>                                                                                          \
    QUIRE_DEVICE static void ss(float (&d)[n], uint64_t a, uint64_t b) {                                           \
      if constexpr (kAdds) {                                                                                       \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "%" #i0 ", %" #i1 ", 1, 1, 1;" : QUIRE_LIST_##n : "l"(a), "l"(b)); \
      } else {                                                                                                     \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "%" #i0 ", %" #i1 ", 0, 1, 1;" : QUIRE_NEW_##n : "l"(a), "l"(b));  \
      }                                                                                                            \
    }                                                                                                              \
    template <bool kAdds>                                                                                          \
    QUIRE_DEVICE static void rs(float (&d)[n], const uint32_t (&a)[4], uint64_t b) {                               \
      if constexpr (kAdds) {                                                                                       \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 1, 1, 1;"     \
                     : QUIRE_LIST_##n                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
      } else {                                                                                                     \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 0, 1, 1;"     \
                     : QUIRE_NEW_##n                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
      }                                                                                                            \
    }                                                                                                              \
  };

QUIRE_WGMMA_FP8(32, 16, 16, 17, 18, 19, 20)
QUIRE_WGMMA_FP8(64, 32, 32, 33, 34, 35, 36)
QUIRE_WGMMA_FP8(96, 48, 48, 49, 50, 51, 52)
QUIRE_WGMMA_FP8(128, 64, 64, 65, 66, 67, 68)
QUIRE_WGMMA_FP8(160, 80, 80, 81, 82, 83, 84)
QUIRE_WGMMA_FP8(192, 96, 96, 97, 98, 99, 100)
QUIRE_WGMMA_FP8(224, 112, 112, 113, 114, 115, 116)
QUIRE_WGMMA_FP8(256, 128, 128, 129, 130, 131, 132)

#undef QUIRE_WGMMA_FP8
#undef QUIRE_WGMMA_FP8_TEXT

}  // namespace quire::ptx
