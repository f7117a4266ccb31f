// The end of a work tile: the KV splits' results are merged through shared memory, in fixed order, and become rows of
// the output or a partial result.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/shared/cascade_merge.cuh"
#include "quire/tile/ampere/decode_shape.cuh"
#include "quire/tile/ampere/nvfp4.cuh"
#include "quire/tile/shared/partial.cuh"

namespace quire {

// 16 rows of float32 o of one warp. Columns are permuted by the row so that the rows of a fragment share few banks.
template <int kVo>
struct SpillTile {
  static constexpr bool kSwizzled = kVo % 32 == 0;
  uint32_t base;

  // Columns 2 * pair, 2 * pair + 1.
  QUIRE_DEVICE uint32_t pair(int row, int pair) const {
    return base + row * kVo * 4 + ((kSwizzled ? pair ^ ((row & 3) << 2) : pair) << 3);
  }
};

// Writes block m of o to shared memory. kIsFp8: the columns have the order in which tile/ampere/fragments.cuh leaves
// them.
template <bool kIsFp8, int kM, int kVo>
QUIRE_DEVICE void spill(SpillTile<kVo> dst, const Accumulator<kM, kVo>& o, int m, int lane) {
#pragma unroll
  for (int b = 0; b < kVo / 16; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&left)[4] = o.at[m][2 * b];
      const float (&right)[4] = o.at[m][2 * b + 1];
      const int row = lane / 4 + 8 * h, c = lane % 4;
      if constexpr (kIsFp8) {
        ptx::st_shared_16(dst.pair(row, 8 * b + 2 * c), left[2 * h], right[2 * h], left[2 * h + 1], right[2 * h + 1]);
      } else {
        ptx::st_shared_8(dst.pair(row, 8 * b + c), left[2 * h], left[2 * h + 1]);
        ptx::st_shared_8(dst.pair(row, 8 * b + 4 + c), right[2 * h], right[2 * h + 1]);
      }
    }
  }
}

// The same for values of 4 bits.
template <int kM, int kVo>
QUIRE_DEVICE void spill_nvfp4(SpillTile<kVo> dst, const Accumulator<kM, kVo>& o, int m, int lane) {
#pragma unroll
  for (int i = 0; i < kVo / 8; ++i) {
    const int q = i / 4, half = i / 2 % 2, h = i % 2;
    const float4 x = nvfp4_columns(o, m, half, q, h);
    ptx::st_shared_16(dst.pair(lane / 4 + 8 * half, 16 * q + lane % 4 * 4 + 2 * h), x.x, x.y, x.z, x.w);
  }
}

// Ends a work tile.
template <class V, class Cta>
class DecodeEnding {
  using Shape = DecodeShape<V>;
  static constexpr int kVo = Shape::kWarpVo, kM = Shape::kM, kQuads = V::kHeadDimVo / 4;

 public:
  const AttentionParams& p_;
  typename Shape::SharedMemory& smem_;
  int stage_;  // of each KV split's ring, that no copy is under way to: o goes there where it has no spill area
  int warp_, lane_;

  // num_stored: partials of its merge group that the CTA has then stored; 0: it will store the next one, too.
  QUIRE_DEVICE void run(const WorkTile& work, const Accumulator<kM, kVo>& o, const SoftmaxRows<kM>& softmax,
                        int num_stored) const {
    const bool arrives = V::kCascade == 0 && !work.is_whole() && num_stored > 0;
    MergeGroup group = {};
    if (arrives) group = p_.groups[work.group];  // it comes while the KV splits are merged
    put_states(softmax);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const SpillTile<kVo> dst = {ptx::smem_address(spill_of(warp_))};
      if constexpr (Shape::kKvBits == 4) {
        spill_nvfp4(dst, o, m, lane_);
      } else {
        spill<Shape::kKvBits == 8>(dst, o, m, lane_);
      }
      Cta::sync();
      merge_splits(work, m);
      if (m + 1 < kM) Cta::sync();
    }
    if constexpr (V::kCascade != 0) {
      end_cascade(work);
    } else if (!arrives) {
      Cta::sync();
    } else if (arrives_last(
                   p_.groups + work.group, group.num_parts(), Cta::thread() == 0, smem_.fixed.is_last,
                   [] { Cta::sync(); }, num_stored)) {
      merge_partials<V, Shape::kWarps>(p_, work, group, static_cast<int>(Cta::thread()));
    }
  }

 private:
  // Each warp has a copy of the work tile: the flags of is_last serve all of them.
  QUIRE_DEVICE void end_cascade(const WorkTile& work) const {
    merge_cascade<V, Shape::kWarps>(p_, work, smem_.fixed.is_last, static_cast<int>(Cta::thread()),
                                    [] { Cta::sync(); });
    Cta::sync();
  }

  QUIRE_DEVICE unsigned char* spill_of(int warp) const {
    if constexpr (Shape::kHasSpill) return smem_.fixed.spill[warp];
    return smem_.ring[warp / Shape::kSplitWarps][stage_] + warp % Shape::kSplitWarps * Shape::kSpillBytes;
  }

  QUIRE_DEVICE void put_states(const SoftmaxRows<kM>& softmax) const {
    if (lane_ % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        smem_.fixed.states[warp_][m * 16 + h * 8 + lane_ / 4] = {softmax.m[m][h], softmax.d[m][h]};
      }
    }
  }

  // Rows of block m of every warp of a KV split, four columns a thread, the KV splits in order.
  QUIRE_DEVICE void merge_splits(const WorkTile& work, int m) const {
    const int row_begin = work.tile.row_begin;
    const int64_t partial_row = static_cast<int64_t>(work.partial) * (V::kCascade != 0 ? 1 : V::kTileRows);
    for (int i = static_cast<int>(Cta::thread()); i < Shape::kRowWarps * 16 * kQuads; i += Shape::kThreads) {
      const int r = i / kQuads, quad = i - r * kQuads, row_warp = r / 16;
      const int row = (row_warp * kM + m) * 16 + r % 16;
      if (row_begin + row >= work.row_end) continue;
      const int dim_warp = Shape::kDimWarps == 1 ? 0 : quad / (kVo / 4);
      const RowQuad sum = merge_row(row_warp + dim_warp * Shape::kRowWarps, m, r % 16, quad - dim_warp * (kVo / 4));
      if (V::kCascade == 0 && work.is_whole()) {
        store_quad<V>(p_, work, row_begin + row, quad * 4, sum);
      } else {
        *reinterpret_cast<float4*>(p_.partial_o + (partial_row + row) * V::kHeadDimVo + quad * 4) = sum.o;
        if (quad == 0) reinterpret_cast<float2*>(p_.partial_md)[partial_row + row] = {sum.m, sum.d};
      }
    }
  }

  // Warp `member` of a KV split has the row and the columns.
  QUIRE_DEVICE RowQuad merge_row(int member, int m, int row, int quad) const {
    float2 md[Shape::kKvSplits];
    RowQuad sum = kNoKeys;
#pragma unroll
    for (int t = 0; t < Shape::kKvSplits; ++t) {
      md[t] = smem_.fixed.states[t * Shape::kSplitWarps + member][m * 16 + row];
      sum.m = fmaxf(sum.m, md[t].x);
    }
#pragma unroll
    for (int t = 0; t < Shape::kKvSplits; ++t) {
      const unsigned char* spilled = spill_of(t * Shape::kSplitWarps + member);
      const float weight = ptx::ex2(md[t].x - sum.m);
      sum.d = fmaf(weight, md[t].y, sum.d);
      scale_add(sum.o, weight, *reinterpret_cast<const float4*>(spilled + SpillTile<kVo>{0}.pair(row, 2 * quad)));
    }
    return sum;
  }
};

}  // namespace quire
