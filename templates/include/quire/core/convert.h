// Conversions between float and the 16-bit types, on host and device; they round to nearest even.
#pragma once
#include "quire/core/types.h"

namespace quire {

#if defined(__aarch64__) && !defined(__CUDACC__)
using half_t = __fp16;  // g++ 12 has no _Float16 there in C++
#elif !defined(__CUDACC__)
using half_t = _Float16;
#endif

QUIRE_HD float bits_to_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
#endif
}

QUIRE_HD uint32_t float_to_bits(float f) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(f);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  return bits;
#endif
}

QUIRE_HD float to_float(float x) { return x; }
QUIRE_HD float to_float(bf16_t x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
QUIRE_HD float to_float(fp16_t x) {
#ifdef __CUDA_ARCH__
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
#else
  half_t h;
  __builtin_memcpy(&h, &x.bits, sizeof h);
  return static_cast<float>(h);
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
  const uint32_t bits = float_to_bits(x);
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
  const half_t h = static_cast<half_t>(x);
  fp16_t out;
  __builtin_memcpy(&out.bits, &h, sizeof h);
  return out;
#endif
}

}  // namespace quire
