// Matrix products of one warp, with accumulators in registers. They have kM blocks of 16 rows, so that each block of B
// that ldmatrix reads serves kM instructions: with one block of rows, shared memory would set the pace.
#pragma once
#include "quire/ptx/warp.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

// Accumulator [kM * 16, kN]: block (m, n) is 16 x 8.
template <int kM, int kN>
struct Accumulator {
  float at[kM][kN / 8][4];

  QUIRE_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) at[m][n][i] = 0.f;
      }
    }
  }
};

// s = a * b[block * kN .. block * kN + kN - 1, :]^T. a [kM * 16, kCols] gives its fragments by get(), b [.., kCols]
// lies in shared memory.
template <class T, int kM, int kN, class A, class TileB>
QUIRE_DEVICE void mma_ABt(Accumulator<kM, kN>& s, const A& a, BlockCursor<TileB, Quarters::kTopFirst> b,
                          int block = 0) {
  s.clear();
#pragma unroll
  for (int k = 0; k < TileB::kCols / 16; ++k) {
    uint32_t rows[kM][4];
    a.get(k, rows);
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      uint32_t keys[4];
      ptx::ldmatrix_x4(keys, b.at(block * (kN / 16) + n, k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16(T{}, s.at[m][2 * n], rows[m], keys[0], keys[1]);
        ptx::mma_m16n8k16(T{}, s.at[m][2 * n + 1], rows[m], keys[2], keys[3]);
      }
    }
  }
}

// o += p * b[16 * k .. 16 * k + 15, :]; p [kM * 16, 16] in fragments, b [.., kN] in shared memory. kAtOnce: how many
// blocks of b ptxas may load ahead of their use, four registers each (ptxas moves no load across a __syncwarp); 0: all.
template <class T, int kAtOnce, int kM, int kN, class TileB>
QUIRE_DEVICE void mma_AB_step(Accumulator<kM, kN>& o, const uint32_t (&p)[kM][4], BlockCursor<TileB> b, int k) {
  static_assert(TileB::kCols == kN, "o and b have the same columns");
#pragma unroll
  for (int n = 0; n < kN / 16; ++n) {
    if constexpr (kAtOnce > 0) {
      if (n % kAtOnce == 0) __syncwarp();
    }
    uint32_t values[4];
    ptx::ldmatrix_x4_trans(values, b.at(k, n));
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma_m16n8k16(T{}, o.at[m][2 * n], p[m], values[0], values[1]);
      ptx::mma_m16n8k16(T{}, o.at[m][2 * n + 1], p[m], values[2], values[3]);
    }
  }
}

}  // namespace quire
