// Converts rows of bf16, which has a wider range than fp16, to rows of fp16 with a power of two for each row.
#pragma once
#include "quire/core/types.h"

namespace quire {

// Brings a row's largest magnitude, `top`, to 2^14..2^15. Numbers 2^28 times smaller than the largest lose bits.
struct Fp16Range {
  float scale, factor;  // the row is multiplied by `scale`, and products of the row by `factor`, its inverse

  QUIRE_DEVICE explicit Fp16Range(float top) {
    const uint32_t exponent = max(__float_as_uint(top) >> 23, 27u);
    scale = __uint_as_float((268 - exponent) << 23);
    factor = __uint_as_float((exponent - 14) << 23);
  }
};

QUIRE_DEVICE float low_bf16(uint32_t x) { return __uint_as_float(x << 16); }
QUIRE_DEVICE float high_bf16(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }

}  // namespace quire
