// Conversions between float and the 16-bit types, on host and device; they round to nearest even.
#pragma once
#include "quire/core/types.h"

namespace quire {

#if defined(__aarch64__) && !defined(__CUDACC__)
using half_t = __fp16;  // g++ 12 has no _Float16 there in C++
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
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // a quiet NaN stays one
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

}  // namespace quire
