// Converts queries of bf16 for products with keys of fp16.
#pragma once
#include "quire/ptx/math.cuh"
#include "quire/ptx/store.cuh"
#include "quire/tile/shared/fp16_range.cuh"
#include "quire/tile/shared/smem.cuh"
#include "quire/tile/shared/softmax.cuh"

namespace quire {

// Rounds a row of bf16 in shared memory to fp16 in place, by four lanes together. Returns the factor that undoes the
// row's scale. The row is read twice, because registers are short. All lanes take the same number of steps: otherwise
// ptxas omits the point at which lanes converge, and shuffles mix up lanes.
template <class Tile>
QUIRE_DEVICE float round_query(Tile tile, int row, int quad_lane) {
  float top = 0.f;
  uint32_t x[4];
#pragma unroll 1
  for (int first = 0; first < Tile::kChunks; first += 4) {
    ptx::ld_shared_16(tile.chunk(row, min(first + quad_lane, Tile::kChunks - 1)), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, fmaxf(fabsf(low_bf16(x[i])), fabsf(high_bf16(x[i]))));
  }
  const Fp16Range range(quad_max(top));
#pragma unroll 1
  for (int first = 0; first < Tile::kChunks; first += 4) {
    const int chunk = first + quad_lane;
    ptx::ld_shared_16(tile.chunk(row, min(chunk, Tile::kChunks - 1)), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = ptx::pack(fp16_t{}, low_bf16(x[i]) * range.scale, high_bf16(x[i]) * range.scale);
    }
    if (chunk < Tile::kChunks) ptx::st_shared_16(tile.chunk(row, chunk), x);
  }
  return range.factor;
}

}  // namespace quire
