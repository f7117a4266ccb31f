// Loads operand A of wgmma, in fp16, from a tile of 8-bit numbers. Bytes are widened in registers, without rounding.
#pragma once
#include "quire/ptx/copy.cuh"
#include "quire/ptx/float8.cuh"

namespace quire {

// Loads 16 rows of two steps of 16 columns. Lane i gives the address of 16 bytes of row i % 16: lanes 0 to 15 those of
// the first step, the others those of the second. The columns of a step are in the order 0 1 4 5 8 9 12 13 2 3 6 7 10
// 11 14 15, which operand B must have, too.
template <class Narrow>
QUIRE_DEVICE void ldmatrix_widened(uint32_t (&a)[2][4], uint32_t src) {
  uint32_t x[4];  // four columns of a row
  ptx::ldmatrix_x4(x, src);
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::widen(Narrow{}, x[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
}

// Loads 16 columns of two steps of 16 rows, transposed. Lane i gives the address of 16 bytes of row i of 32. Rows lane
// / 4 and lane / 4 + 8 of a fragment are columns 2 * (lane / 4) and 2 * (lane / 4) + 1.
template <class Narrow>
QUIRE_DEVICE void ldmatrix_widened_trans(uint32_t (&a)[2][4], uint32_t src) {
  uint32_t x[4];  // two columns of two neighbouring rows
  ptx::ldmatrix_x4_trans(x, src);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::widen(Narrow{}, __byte_perm(x[i], 0, 0x3120), a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
  }
}

}  // namespace quire
