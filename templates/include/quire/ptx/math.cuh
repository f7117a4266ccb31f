// One-instruction arithmetic: the special-function unit, and packed conversions.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

QUIRE_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

QUIRE_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

QUIRE_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// For an angle in radians within half a turn. Error: 1e-6.
QUIRE_DEVICE float sin(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

QUIRE_DEVICE float cos(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The lesser of two numbers; NaN if one is.
QUIRE_DEVICE float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The greater of two numbers; NaN if one is.
QUIRE_DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// For any numbers. Error: two units in the last place.
QUIRE_DEVICE float divide(float a, float b) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

QUIRE_DEVICE float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

QUIRE_DEVICE float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

QUIRE_DEVICE float floor(float x) {
  float y;
  asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds towards 0 and clamps to int32. NaN becomes 0.
QUIRE_DEVICE int32_t to_int(float x) {
  int32_t y;
  asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// a - b, clamped to int32.
QUIRE_DEVICE int32_t subtract_saturated(int32_t a, int32_t b) {
  int32_t y;
  asm("sub.sat.s32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Two numbers rounded to nearest even, `low` in the low half.
QUIRE_DEVICE uint32_t pack(bf16_t, float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

QUIRE_DEVICE uint32_t pack(fp16_t, float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace quire::ptx
