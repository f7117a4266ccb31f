// Rows of bf16, whose range is wider than that of fp16, as rows of fp16 and a power of two each.
#pragma once
#include "quire/core/types.h"

namespace quire {

// Brings a row's largest magnitude, `top`, to 2^14..2^15. Numbers 2^28 times smaller than the largest lose bits.
struct Fp16Range {
  float scale, factor;  // what the row is multiplied by, and what makes up for it

  QUIRE_DEVICE explicit Fp16Range(float top) {
    const uint32_t exponent = max(__float_as_uint(top) >> 23, 27u);
    scale = __uint_as_float((268 - exponent) << 23);
    factor = __uint_as_float((exponent - 14) << 23);
  }
};

QUIRE_DEVICE float low_bf16(uint32_t x) { return __uint_as_float(x << 16); }
QUIRE_DEVICE float high_bf16(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

}  // namespace quire
