// Matrix products of a warpgroup, and the descriptors of swizzled tiles in shared memory that wgmma takes. A call
// starts one group of wgmma instructions; wgmma_wait waits for it.
#pragma once
#include "quire/ptx/math.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

// The descriptor of a SwizzledTile or of a part of it. Only the lower word depends on addresses, so that addresses are
// added in that word alone. The shuffle tells the compiler that the word is the same in all lanes. It then lives in a
// uniform register, where wgmma wants it, instead of being moved there before each instruction.
struct TileDescriptor {
  uint32_t low;

  // atom_bytes: the distance of neighbouring atoms, read when the contiguous dimension (of v: columns) spans several.
  QUIRE_DEVICE TileDescriptor(uint32_t address, int atom_bytes)
      : low(__shfl_sync(0xffffffffu, static_cast<uint32_t>(atom_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4), 0)) {}

  QUIRE_DEVICE uint64_t at(int bytes) const {
    constexpr uint64_t kHigh = uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32;  // swizzle 128 bytes; 8 rows are 1024
    return kHigh | (low + static_cast<uint32_t>(bytes >> 4));
  }
};

// The number of steps in one asm statement, for a product with N columns.
template <int N, int kSteps>
QUIRE_DEVICE constexpr int steps_together() {
  return ptx::has_four_products<N>() && kSteps % 4 == 0 ? 4 : 1;
}

// s[64, TileB::kRows] = a * b^T, or += if kAdds. a is 64 rows of TileA, b a TileB; both are in shared memory and given
// by descriptors.
template <class T, class TileA, class TileB, bool kAdds = false>
QUIRE_DEVICE void start_ABt(float (&s)[TileB::kRows / 2], TileDescriptor a, TileDescriptor b) {
  static_assert(TileA::kCols == TileB::kCols, "a b^T needs rows of equal length");
  ptx::pin(s);
  ptx::wgmma_fence();
  constexpr int kSteps = TileA::kCols / 16, kTogether = steps_together<TileB::kRows, kSteps>();
#pragma unroll
  for (int k = 0; k < kSteps; k += kTogether) {
    uint64_t left[kTogether], right[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int atom = (k + i) / 4, bytes = (k + i) % 4 * 32;  // the swizzle permutes what addresses mean, not these
      left[i] = a.at(atom * TileA::kAtomBytes + bytes), right[i] = b.at(atom * TileB::kAtomBytes + bytes);
    }
    if constexpr (kTogether == 4) {
      ptx::wgmma_ss_four(T{}, s, left, right, kAdds || k > 0);
    } else {
      ptx::Wgmma<TileB::kRows>::ss(T{}, s, left[0], right[0], kAdds || k > 0);
    }
  }
  ptx::wgmma_commit();
}

// o[64, TileB::kCols] += p[64, TileB::kRows] * b; p in fragments, b in shared memory.
template <class T, class TileB>
QUIRE_DEVICE void start_AB(float (&o)[TileB::kCols / 2], uint32_t (&p)[TileB::kRows / 16][4], TileDescriptor b) {
  ptx::pin(o);
#pragma unroll
  for (int k = 0; k < TileB::kRows / 16; ++k) ptx::pin(p[k]);
  ptx::wgmma_fence();
  constexpr int kSteps = TileB::kRows / 16, kTogether = steps_together<TileB::kCols, kSteps>();
#pragma unroll
  for (int k = 0; k < kSteps; k += kTogether) {
    uint64_t right[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) right[i] = b.at((k + i) * 16 * 128);
    if constexpr (kTogether == 4) {
      ptx::wgmma_rs_four(T{}, o, p + k, right);
    } else {
      ptx::Wgmma<TileB::kCols>::template rs<ptx::Contiguous::kN>(T{}, o, p[k], right[0], 1);
    }
  }
  ptx::wgmma_commit();
}

// --- products of e4m3 numbers ---

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
