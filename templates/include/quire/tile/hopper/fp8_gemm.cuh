// Matrix products of e4m3 numbers by a warpgroup. A call starts one group of wgmma instructions; wgmma_wait waits for
// it.
#pragma once
#include "quire/ptx/wgmma_fp8.cuh"
#include "quire/tile/hopper/gemm.cuh"

namespace quire {

// s[64, TileB::kRows] = a * b^T. a is 64 rows of TileA, b a TileB; both are in shared memory, given by descriptors.
template <class TileA, class TileB>
QUIRE_DEVICE void start_fp8_ABt(float (&s)[TileB::kRows / 2], TileDescriptor a, TileDescriptor b) {
  static_assert(TileA::kCols == TileB::kCols && TileA::kCols % 32 == 0, "a b^T needs rows of equal length");
  using Product = ptx::WgmmaFp8<TileB::kRows>;
  ptx::wgmma_fence();
  Product::template ss<false>(s, a.at(0), b.at(0));
#pragma unroll
  for (int k = 1; k < TileA::kCols / 32; ++k) {
    const int atom = k / 4, bytes = k % 4 * 32;
    Product::template ss<true>(s, a.at(atom * TileA::kAtomBytes + bytes), b.at(atom * TileB::kAtomBytes + bytes));
  }
  ptx::wgmma_commit();
}

// o[64, kCols] = p[64, TileB::kCols] * b^T for kCols rows of b, from the row of the descriptor on; p in fragments.
// kIsFirst: no product of p is under way.
template <class TileB, int kCols, bool kIsFirst = true>
QUIRE_DEVICE void start_fp8_AB(float (&o)[kCols / 2], uint32_t (&p)[TileB::kCols / 32][4], TileDescriptor b) {
  static_assert(TileB::kCols % 32 == 0, "the inner dimension of an instruction is 32");
  if constexpr (kIsFirst) {
#pragma unroll
    for (int k = 0; k < TileB::kCols / 32; ++k) ptx::pin(p[k]);
  }
  ptx::wgmma_fence();
  ptx::WgmmaFp8<kCols>::template rs<false>(o, p[0], b.at(0));
#pragma unroll
  for (int k = 1; k < TileB::kCols / 32; ++k) {
    ptx::WgmmaFp8<kCols>::template rs<true>(o, p[k], b.at(k / 4 * TileB::kAtomBytes + k % 4 * 32));
  }
  ptx::wgmma_commit();
}

// Fragments of wgmma's operand a from weights. Of 16 neighbouring columns a lane has 2 * (lane % 4) and + 1, + 8 and
// + 9 as results, and 4 * (lane % 4) to + 3 as operand: the inner dimension is permuted, see fp8_key().
template <int n>
QUIRE_DEVICE void round_weights_fp8(const float (&s)[n], uint32_t (&p)[n / 16][4]) {
#pragma unroll
  for (int k = 0; k < n / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = s + 16 * k + i / 2 * 8 + i % 2 * 2;
      p[k][i] = ptx::pack_e4m3(x[0], x[1], x[4], x[5]);
    }
  }
}

}  // namespace quire
