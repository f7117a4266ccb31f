// Matrix products of a warpgroup: started here, waited for with wgmma_wait. One call is one group.
#pragma once
#include "quire/ptx/copy.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/sm90_panels.cuh"

namespace quire {

// s[64, TileB::kRows] = a[row .. row + 63, :] * b^T, both in shared memory.
template <class T, class TileA, class TileB>
QUIRE_DEVICE void start_ABt(float (&s)[TileB::kRows / 2], TileA a, int row, TileB b) {
  static_assert(TileA::kCols == TileB::kCols, "a b^T needs rows of equal length");
  const PanelDescriptor rows(a.base + row * 128, 16), keys(b.base, 16);
  ptx::pin(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileA::kCols / 16; ++k) {
    const int panel = k / 4, bytes = k % 4 * 32;  // the swizzle permutes what addresses mean, not these
    ptx::Wgmma<TileB::kRows>::ss(T{}, s, rows.at(panel * TileA::kPanelBytes + bytes),
                                 keys.at(panel * TileB::kPanelBytes + bytes), k > 0);
  }
  ptx::wgmma_commit();
}

// The same with a in registers: fragments of 16 columns each.
template <class T, int kBlocks, class TileB>
QUIRE_DEVICE void start_ABt(float (&s)[TileB::kRows / 2], uint32_t (&a)[kBlocks][4], TileB b) {
  static_assert(kBlocks * 16 == TileB::kCols, "a b^T needs rows of equal length");
  const PanelDescriptor keys(b.base, 16);
  ptx::pin(s);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) ptx::pin(a[k]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    ptx::Wgmma<TileB::kRows>::template rs<ptx::Contiguous::kInner>(
        T{}, s, a[k], keys.at(k / 4 * TileB::kPanelBytes + k % 4 * 32), k > 0);
  }
  ptx::wgmma_commit();
}

// o[64, TileB::kCols] += p[64, TileB::kRows] * b; p in fragments, b in shared memory.
template <class T, class TileB>
QUIRE_DEVICE void start_AB(float (&o)[TileB::kCols / 2], uint32_t (&p)[TileB::kRows / 16][4], TileB b) {
  const PanelDescriptor values(b.base, TileB::kPanelBytes);
  ptx::pin(o);
#pragma unroll
  for (int k = 0; k < TileB::kRows / 16; ++k) ptx::pin(p[k]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileB::kRows / 16; ++k) {
    ptx::Wgmma<TileB::kCols>::template rs<ptx::Contiguous::kN>(T{}, o, p[k], values.at(k * 16 * 128), 1);
  }
  ptx::wgmma_commit();
}

// Fragments of rows row .. row + 15 of a, one warp's.
template <int kBlocks, class TileA>
QUIRE_DEVICE void load_fragments(uint32_t (&a)[kBlocks][4], TileA tile, int row, int lane) {
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) ptx::ldmatrix_x4(a[k], tile.chunk(row + (lane & 15), 2 * k + (lane >> 4)));
}

}  // namespace quire
