// One-instruction arithmetic: the special-function unit, packed conversions, and 8-bit floats to fp16. The last are
// exact: every e4m3 and e5m2 number is an fp16 number.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// name(x) and name(a, b) are one instruction each.
#define QUIRE_UNARY(name, instruction)              \
  QUIRE_DEVICE float name(float x) {                \
    float y;                                        \
    asm(instruction " %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                       \
  }
#define QUIRE_BINARY(name, instruction)                         \
  QUIRE_DEVICE float name(float a, float b) {                   \
    float y;                                                    \
    asm(instruction " %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); \
    return y;                                                   \
  }

QUIRE_UNARY(ex2, "ex2.approx.ftz.f32")
QUIRE_UNARY(lg2, "lg2.approx.ftz.f32")
QUIRE_UNARY(rcp, "rcp.approx.ftz.f32")
QUIRE_UNARY(sqrt, "sqrt.approx.ftz.f32")
QUIRE_UNARY(rsqrt, "rsqrt.approx.ftz.f32")
QUIRE_UNARY(floor, "cvt.rmi.f32.f32")
QUIRE_UNARY(sin, "sin.approx.ftz.f32")       // of an angle in radians within half a turn; error: 1e-6
QUIRE_UNARY(cos, "cos.approx.ftz.f32")       // likewise
QUIRE_BINARY(min_nan, "min.NaN.f32")         // the lesser of two numbers; NaN if one is
QUIRE_BINARY(max_nan, "max.NaN.f32")         // the greater of two numbers; NaN if one is
QUIRE_BINARY(multiply_finite, "mul.rz.f32")  // rounds towards 0, so that a product of finite numbers is finite
QUIRE_BINARY(divide, "div.full.f32")         // of any numbers; error: two units in the last place
#undef QUIRE_UNARY
#undef QUIRE_BINARY

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

// Four numbers, byte i of x: {0, 1} go to `low`, {2, 3} to `high`, each as two fp16.
QUIRE_DEVICE void widen(e5m2_t, uint32_t x, uint32_t& low, uint32_t& high) {
  low = __byte_perm(x, 0, 0x1404);
  high = __byte_perm(x, 0, 0x3424);
}

#if __CUDA_ARCH__ >= 890
QUIRE_DEVICE void widen(e4m3_t, uint32_t x, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(x));
}
#else
// Two e4m3 in the upper bytes of x's halves. Their seven low bits, moved to the top of fp16's exponent and mantissa,
// are the number times 2^-8, subnormals included; only NaN (all seven bits set) needs a correction.
QUIRE_DEVICE uint32_t widen_upper_bytes(e4m3_t, uint32_t x) {
  const uint32_t magnitude = (x >> 1) & 0x3f803f80u, sign = x & 0x80008000u;
  const uint32_t nan = (magnitude + 0x00800080u) & 0x40004000u;
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(magnitude | sign), "r"(0x5c005c00u));  // 2^8
  return y | ((nan << 1) - (nan >> 5));
}

QUIRE_DEVICE void widen(e4m3_t kind, uint32_t x, uint32_t& low, uint32_t& high) {
  low = widen_upper_bytes(kind, __byte_perm(x, 0, 0x1404));
  high = widen_upper_bytes(kind, __byte_perm(x, 0, 0x3424));
}
#endif

// Converts two fp16 numbers that were 8-bit floats to fp16 or bf16, exactly.
QUIRE_DEVICE uint32_t widened_to(fp16_t, uint32_t x) { return x; }
QUIRE_DEVICE uint32_t widened_to(bf16_t, uint32_t x) {
  uint32_t y;
  asm("{\n"
      ".reg .b16 l, h;\n"
      ".reg .f32 a, b;\n"
      "mov.b32 {l, h}, %1;\n"
      "cvt.f32.f16 a, l;\n"
      "cvt.f32.f16 b, h;\n"
      "cvt.rn.bf16x2.f32 %0, b, a;\n"
      "}"
      : "=r"(y)
      : "r"(x));
  return y;
}

}  // namespace quire::ptx
