// Products with numbers of 8 bits as they are: the other operand, of 16 bits, is the sum of two e4m3 numbers.
#pragma once
#include "quire/core/convert.h"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/float8.cuh"
#include "quire/ptx/wgmma.cuh"

namespace quire {

// Four numbers, byte i of each: `high` rounds them to four significant bits, `low` is the rest times kLowScale, at most
// 32. high + low / kLowScale is a bfloat16 number exactly where that is at least 2^-2 / kLowScale; below, its error is
// at most 2^-10 / kLowScale. Numbers must be below 256.
template <int kLowScale>
struct E4m3Pair {
  uint32_t high, low;

  QUIRE_DEVICE explicit E4m3Pair(const float (&x)[4])
      : high(two_from_floats<e4m3_t>(x[0], x[1]) | two_from_floats<e4m3_t>(x[2], x[3]) << 16) {
    uint32_t wide[2];
    ptx::widen(e4m3_t{}, high, wide[0], wide[1]);
    float rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rest[i] = (x[i] - to_float(fp16_t{static_cast<uint16_t>(wide[i / 2] >> i % 2 * 16)})) * kLowScale;
    }
    low = two_from_floats<e4m3_t>(rest[0], rest[1]) | two_from_floats<e4m3_t>(rest[2], rest[3]) << 16;
  }
};

// A power of two by which numbers up to `largest` come to lie below 256, the largest of them at 128 or more.
QUIRE_DEVICE float e4m3_scale(float largest) {
  const int exponent = __float_as_int(largest) >> 23 & 0xff;
  return __int_as_float(min(127 + 127 + 7 - exponent, 127 + 100) << 23);
}

// Of a power of two.
QUIRE_DEVICE float reciprocal_of_power(float x) { return __int_as_float((254 << 23) - __float_as_int(x)); }

// b^T as operand A of a product of 8-bit numbers, from 32 rows of b: lane i gives the address of 16 bytes of row i.
// Rows lane / 4 and + 8 of the fragment are columns 2 * (lane / 4) and + 1 of the 16. Each 16 rows of b are its inner
// dimension in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, which operand B must have too.
QUIRE_DEVICE void ldmatrix_bytes_trans(uint32_t (&a)[4], uint32_t src) {
  uint32_t x[4];  // two columns of two neighbouring rows, of each eight rows
  ptx::ldmatrix_x4_trans(x, src);
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = __byte_perm(x[i & ~1], x[i | 1], i % 2 == 0 ? 0x6420 : 0x7531);
}

}  // namespace quire
