// Conversions between float and the types of 16 and 8 bits, on host and device. All of them round to nearest even.
#pragma once
#include "quire/core/types.h"

namespace quire {

#if defined(__aarch64__) && !defined(__CUDACC__)
using half_t = __fp16;  // g++ 12 has no _Float16 for C++ on Arm
#elif !defined(__CUDACC__)
using half_t = _Float16;
#endif

QUIRE_HD float to_float(float x) { return x; }
QUIRE_HD float to_float(bf16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
QUIRE_HD float to_float(fp16_t x) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
#else
  return static_cast<float>(__builtin_bit_cast(half_t, x));
#endif
}

// 8-bit numbers: see core/types.h.
template <class T, int = T::kShift>
QUIRE_HD float to_float(T x) {
  const uint32_t sign = (x.bits & 0x80u) << 8, magnitude = (x.bits & 0x7fu) << T::kShift;
  const float number = to_float(fp16_t{static_cast<uint16_t>(sign | magnitude)}) * T::kScale;
  return T::kNanMask != 0 && (x.bits & T::kNanMask) == T::kNan ? __builtin_nanf("") : number;
}

// The E2M1 number of which `code` has the four bits.
QUIRE_HD float e2m1_to_float(uint32_t code) {
  return to_float(fp16_t{static_cast<uint16_t>((code & 7) << 9 | (code & 8) << 12)}) * 16384.0f;
}

template <class T>
QUIRE_HD T from_float(float x);
template <>
QUIRE_HD float from_float<float>(float x) {
  return x;
}
template <>
QUIRE_HD bf16_t from_float<bf16_t>(float x) {
#ifdef __CUDA_ARCH__
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // any NaN becomes a quiet NaN
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
#endif
}
template <>
QUIRE_HD fp16_t from_float<fp16_t>(float x) {
#ifdef __CUDA_ARCH__
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  return __builtin_bit_cast(fp16_t, static_cast<half_t>(x));
#endif
}

// A number beyond the largest of an 8-bit type becomes the largest; NaN stays NaN.
template <class T>
QUIRE_HD T to_8_bits(float x) {
  constexpr int kMantissa = 10 - T::kShift, kBias = T::kScale == 1.0f ? 15 : 7;
  constexpr uint32_t kNormal = (128 - kBias) << 23, kWhole = (151 - kBias - kMantissa) << 23;
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = (bits >> 24) & 0x80, size = bits & 0x7fffffff;
  // Below kNormal, float addition rounds to a multiple of the smallest number. Both are computed: there is no branch.
  const float sum = __builtin_bit_cast(float, size) + __builtin_bit_cast(float, kWhole);
  const uint32_t half = (1u << (22 - kMantissa)) - 1, odd = (size >> (23 - kMantissa)) & 1;
  const uint32_t small = __builtin_bit_cast(uint32_t, sum) - kWhole,
                 normal = ((size + half + odd) >> (23 - kMantissa)) - ((127 - kBias) << kMantissa);
  const uint32_t y = size < kNormal ? small : normal;
  return {static_cast<uint8_t>(sign | (size > 0x7f800000 ? 0x7f : min<uint32_t>(y, T::kLargest)))};
}

// Two numbers side by side, the first in the low bits.
template <class T>
QUIRE_HD uint32_t two_from_floats(float first, float second) {
  return from_float<T>(first).bits | static_cast<uint32_t>(from_float<T>(second).bits) << 8 * sizeof(T);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define QUIRE_TO_8_BITS(T, instruction)                                    \
  template <>                                                              \
  QUIRE_HD uint32_t two_from_floats<T>(float first, float second) {        \
    uint16_t two;                                                          \
    asm(instruction " %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first)); \
    return two;                                                            \
  }                                                                        \
  template <>                                                              \
  QUIRE_HD T to_8_bits<T>(float x) {                                       \
    return {static_cast<uint8_t>(two_from_floats<T>(x, 0.f))};             \
  }
QUIRE_TO_8_BITS(e4m3_t, "cvt.rn.satfinite.e4m3x2.f32")
QUIRE_TO_8_BITS(e5m2_t, "cvt.rn.satfinite.e5m2x2.f32")
#undef QUIRE_TO_8_BITS
#endif

template <>
QUIRE_HD e4m3_t from_float<e4m3_t>(float x) {
  return to_8_bits<e4m3_t>(x);
}
template <>
QUIRE_HD e5m2_t from_float<e5m2_t>(float x) {
  return to_8_bits<e5m2_t>(x);
}

// A row of bf16 as fp16, which has a smaller range: a power of two brings the row's largest magnitude, `top`, to
// 2^14..2^15. Numbers 2^28 times smaller than the largest lose bits.
struct Fp16Range {
  float scale, factor;  // the row is multiplied by `scale`, and products of the row by `factor`, its inverse

  QUIRE_HD explicit Fp16Range(float top) {
    const uint32_t exponent = max(__builtin_bit_cast(uint32_t, top) >> 23, 27u);
    scale = __builtin_bit_cast(float, (268 - exponent) << 23);
    factor = __builtin_bit_cast(float, (exponent - 14) << 23);
  }
};

QUIRE_HD float low_bf16(uint32_t x) { return __builtin_bit_cast(float, x << 16); }
QUIRE_HD float high_bf16(uint32_t x) { return __builtin_bit_cast(float, x & 0xffff0000u); }

}  // namespace quire
