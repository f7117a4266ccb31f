// Matrix products of a warpgroup: started here, waited for with wgmma_wait. One call is one group.
#pragma once
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/sm90_tile.cuh"

namespace quire {

// s[64, TileB::kRows] = a * b^T, or += where kAdds; a is 64 rows of TileA, b a TileB, both in shared memory and given
// by their descriptors.
template <class T, class TileA, class TileB, bool kAdds = false>
QUIRE_DEVICE void start_ABt(float (&s)[TileB::kRows / 2], TileDescriptor a, TileDescriptor b) {
  static_assert(TileA::kCols == TileB::kCols, "a b^T needs rows of equal length");
  ptx::pin(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileA::kCols / 16; ++k) {
    const int atom = k / 4, bytes = k % 4 * 32;  // the swizzle permutes what addresses mean, not these
    ptx::Wgmma<TileB::kRows>::ss(T{}, s, a.at(atom * TileA::kAtomBytes + bytes), b.at(atom * TileB::kAtomBytes + bytes),
                                 kAdds || k > 0);
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
#pragma unroll
  for (int k = 0; k < TileB::kRows / 16; ++k) {
    ptx::Wgmma<TileB::kCols>::template rs<ptx::Contiguous::kN>(T{}, o, p[k], b.at(k * 16 * 128), 1);
  }
  ptx::wgmma_commit();
}

}  // namespace quire
