// Rows of a warpgroup on their way in and out: queries of bf16 are converted for products with keys of fp16, and
// results are stored 16 bytes a lane. Results go through shared memory if that takes no stage away; otherwise from
// registers, after the four lanes that share a row have exchanged words.
#pragma once
#include "quire/core/convert.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/math.cuh"
#include "quire/tile/shared/partial.cuh"
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

// Stores 16 rows of one warp through shared memory. 16 bytes of padding between rows spread a warp's writes over all
// banks.
template <int kVo>
struct StagedRows {
  static constexpr int kRowBytes = kVo * 2 + 16, kBytes = 16 * kRowBytes;
  uint32_t base;

  // Scales, rounds and stores o. `first`: offset of row lane % 16 from dst, in units of 16 bytes. `count` rows exist.
  // All lanes of the warp call it together.
  template <class T, int n>
  QUIRE_DEVICE void store(T* dst, uint32_t first, int count, const float (&o)[n], const float (&scale)[2],
                          int lane) const {
    static_assert(n == kVo / 2, "o is 16 rows of a warp");
    const uint32_t to = base + lane % 16 * kRowBytes + lane / 16 * 16;
    __syncwarp();  // every lane has read the rows before
#pragma unroll
    for (int i = 0; i < n; i += 8) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = ptx::pack(T{}, o[i + 2 * j] * scale[j % 2], o[i + 2 * j + 1] * scale[j % 2]);
      ptx::st_matrix(to + i * 4, w);
    }
    __syncwarp();
    constexpr int kChunks = kVo / 8;
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      const int at = i * 32 + lane, row = at / kChunks, chunk = at - row * kChunks;
      const uint32_t begin = __shfl_sync(0xffffffffu, first, row);
      uint32_t w[4];
      ptx::ld_shared_16(base + row * kRowBytes + chunk * 16, w);
      if (row < count) ptx::st_global_16(dst + static_cast<int64_t>(begin + chunk) * 8, w);
    }
  }
};

// Transposes a 4 x 4 matrix of words; each lane of a quad holds a row.
QUIRE_DEVICE void transpose_quad(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_odd = (lane & step) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t sent = is_odd ? w[i] : w[i + step];
      const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, step);
      (is_odd ? w[i] : w[i + step]) = got;
    }
  }
}

// Stores the columns of one row of o, scaled and rounded, to dst [2 * n / 4 columns]. `half` 0 is the lane's upper row.
// All lanes of a warp take part; only rows that exist are written.
template <class T, int n>
QUIRE_DEVICE void store_row(T* dst, const float (&o)[n], int half, float scale, bool exists, int lane) {
  constexpr int kBlocks = n / 4;  // of 8 columns
  const int quad_lane = lane & 3;
#pragma unroll
  for (int first = 0; first + 4 <= kBlocks; first += 4) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (first + i) * 4 + 2 * half;
      w[i] = ptx::pack(T{}, o[at] * scale, o[at + 1] * scale);
    }
    transpose_quad(w, lane);
    if (exists) ptx::st_global_16(dst + (first + quad_lane) * 8, w);
  }
#pragma unroll
  for (int block = kBlocks / 4 * 4; block < kBlocks; ++block) {
    const int at = block * 4 + 2 * half;
    const uint32_t w = ptx::pack(T{}, o[at] * scale, o[at + 1] * scale);
    if (exists) *reinterpret_cast<uint32_t*>(dst + block * 8 + quad_lane * 2) = w;
  }
}

// Stores this lane's two rows to partial_o [num_partials, kRows, 2 * n / 4] and partial_md [num_partials, kRows, 2].
// The first is row `row` of the row tile, of which `rows` rows exist. In a cascade a partial is a row: kRows is 1.
template <int kRows, int n>
QUIRE_DEVICE void store_partial_rows(const AttentionParams& p, int partial, const float (&o)[n], const float (&m)[2],
                                     const float (&d)[2], int row, int rows, int lane) {
  constexpr int kVo = n * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= rows) continue;
    const int64_t at = static_cast<int64_t>(partial) * kRows + row + 8 * h;
    float2* dst = reinterpret_cast<float2*>(p.partial_o + at * kVo) + (lane & 3);
#pragma unroll
    for (int i = 0; i < n; i += 4) dst[i] = {o[i + 2 * h], o[i + 2 * h + 1]};
    if ((lane & 3) == 0) reinterpret_cast<float2*>(p.partial_md)[at] = {m[h], d[h]};
  }
}

}  // namespace quire
