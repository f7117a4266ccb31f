// The end of a work: the KV splits' results are merged through shared memory, and the CTAs' partial results by the last
// CTA to arrive, each in fixed order.
#pragma once
#include "quire/ptx/grid.cuh"
#include "quire/ptx/store.cuh"
#include "quire/tile/decode_shape.cuh"
#include "quire/tile/decode_scheduler.cuh"
#include "quire/tile/softmax.cuh"

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

// Block m of o to shared memory; narrow: columns as tile/decode_fragments.cuh leaves them.
template <bool kNarrow, int kM, int kVo>
QUIRE_DEVICE void spill(SpillTile<kVo> dst, const Accumulator<kM, kVo>& o, int m, int lane) {
#pragma unroll
  for (int b = 0; b < kVo / 16; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&left)[4] = o.at[m][2 * b];
      const float (&right)[4] = o.at[m][2 * b + 1];
      const int row = lane / 4 + 8 * h, c = lane % 4;
      if constexpr (kNarrow) {
        ptx::st_shared_16(dst.pair(row, 8 * b + 2 * c), left[2 * h], right[2 * h], left[2 * h + 1], right[2 * h + 1]);
      } else {
        ptx::st_shared_8(dst.pair(row, 8 * b + c), left[2 * h], left[2 * h + 1]);
        ptx::st_shared_8(dst.pair(row, 8 * b + 4 + c), right[2 * h], right[2 * h + 1]);
      }
    }
  }
}

// Four columns of a row: o not normalised, with the row's reference maximum and denominator.
struct RowQuad {
  float m, d;
  float4 o;
};

QUIRE_DEVICE void scale_add(float4& o, float weight, float4 x) {
  o.x = fmaf(weight, x.x, o.x), o.y = fmaf(weight, x.y, o.y);
  o.z = fmaf(weight, x.z, o.z), o.w = fmaf(weight, x.w, o.w);
}

// Normalises and stores columns col .. col + 3 of a packed row, and with the first of them its lse.
template <class O>
QUIRE_DEVICE void store_quad(const AttentionParams& p, const DecodeWork& job, int row, int col, const RowQuad& quad) {
  const DecodeWork::Place to = job.place(p.group, row);
  const RowResult result =
      finish_row(quad.m, quad.d, p.sinks == nullptr ? nullptr : p.sinks + to.head, output_scale(p));
  const uint2 packed = {ptx::pack(O{}, quad.o.x * result.scale, quad.o.y * result.scale),
                        ptx::pack(O{}, quad.o.z * result.scale, quad.o.w * result.scale)};
  O* dst = static_cast<O*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + col;
  *reinterpret_cast<uint2*>(dst) = packed;
  if (col == 0 && p.lse != nullptr) p.lse[to.token * p.num_qo_heads + to.head] = result.lse;
}

// True in every thread of the CTA that arrives last: all parts are then visible to it and the counter is 0 again. The
// barrier hands every thread's writes to thread 0, whose atomic releases them.
QUIRE_DEVICE bool arrives_last(const AttentionParams& p, const PartialGroup& group, uint32_t* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t last = group.num_parts - 1;
    *flag = ptx::atomic_inc_acq_rel(p.arrivals + group.counter, last) == last;
  }
  __syncthreads();
  return *flag != 0;
}

// Where the last CTA of a group stands: a row, its columns, its parts.
struct PartCursor {
  int row, col, part;
};

// kParts parts of a row on their way from L2: four columns a lane, and the states, one a lane, repeated. Reads go past
// L1, which may hold what another CTA has written since.
template <class V>
struct PartBatch {
  static constexpr int kParts = 8, kVo = V::kHeadDimVo;

  float2 md;
  float4 o[kParts];

  // `col` is this lane's first column. Parts that do not exist weigh nothing.
  QUIRE_DEVICE void load(const AttentionParams& p, const PartialGroup& group, PartCursor at, int col, int lane) {
    constexpr int64_t kSlotSize = V::kTileRows * kVo;
    const int count = group.num_parts - at.part, first = group.slot(at.part), part = lane % kParts;
    const float2* states = reinterpret_cast<const float2*>(p.partial_md) + at.row;
    md = {kNoLogit, 0.f};
    if (part < count) md = __ldcg(states + static_cast<int64_t>(group.slot(at.part + part)) * V::kTileRows);
    const float* columns = p.partial_o + at.row * kVo + col;
    const float* others = columns + (group.next_partial + at.part - 1) * kSlotSize;
    o[0] = __ldcg(reinterpret_cast<const float4*>(columns + first * kSlotSize));
#pragma unroll
    for (int i = 1; i < kParts; ++i) {
      o[i] = {0.f, 0.f, 0.f, 0.f};
      if (i < count) o[i] = __ldcg(reinterpret_cast<const float4*>(others + i * kSlotSize));
    }
  }

  // d is the sum over this lane's parts until `finish`.
  QUIRE_DEVICE void add_to(RowQuad& sum) const {
    float top = md.x;
#pragma unroll
    for (int i = 1; i < kParts; i *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
    top = fmaxf(top, sum.m);
    const float keep = ptx::ex2(sum.m - top), weight = ptx::ex2(md.x - top);
    sum.m = top, sum.d = fmaf(sum.d, keep, weight * md.y);
    sum.o.x *= keep, sum.o.y *= keep, sum.o.z *= keep, sum.o.w *= keep;
#pragma unroll
    for (int i = 0; i < kParts; ++i) scale_add(sum.o, __shfl_sync(0xffffffffu, weight, i), o[i]);
  }

  QUIRE_DEVICE static void finish(RowQuad& sum) {
#pragma unroll
    for (int i = 1; i < kParts; i *= 2) sum.d += __shfl_xor_sync(0xffffffffu, sum.d, i);
  }
};

// The last CTA of a group: a warp a row, four columns a lane. While a batch of parts is added the next one, of this row
// or another, is under way. What an SM reads from L2 bounds it: 32 parts of 8 rows, 128 KB, take 3.6 us, in one batch
// of 32 parts as in four of 8 (H200, 2026-11-21).
template <class V, int kWarps>
QUIRE_DEVICE void merge_parts(const AttentionParams& p, const DecodeWork& job, int warp, int lane) {
  constexpr RowQuad kNothing = {kNoLogit, 0.f, {0.f, 0.f, 0.f, 0.f}};
  const PartialGroup group = job.work.group;
  const int row_begin = job.work.tile.row_begin, rows = min(V::kTileRows, job.row_end - row_begin);
  const auto column = [&](PartCursor at) { return min(at.col + lane * 4, V::kHeadDimVo - 4); };
  PartCursor next = {warp, 0, 0};
  if (next.row >= rows) return;
  RowQuad sum = kNothing;
  PartBatch<V> batch, ahead;
  ahead.load(p, group, next, column(next), lane);
#pragma unroll 1
  while (next.row < rows) {
    const PartCursor at = next;
    batch = ahead;
    if ((next.part += batch.kParts) >= group.num_parts) next.part = 0, next.col += 128;
    if (next.col >= V::kHeadDimVo) next.col = 0, next.row += kWarps;
    if (next.row < rows) ahead.load(p, group, next, column(next), lane);
    batch.add_to(sum);
    if (next.part > 0) continue;
    batch.finish(sum);
    if (at.col + lane * 4 < V::kHeadDimVo) store_quad<typename V::O>(p, job, row_begin + at.row, column(at), sum);
    sum = kNothing;
  }
}

// Ends a work tile.
template <class V>
class DecodeEnding {
  using Shape = DecodeShape<V>;
  static constexpr int kVo = V::kHeadDimVo, kM = Shape::kM, kQuads = kVo / 4;

 public:
  const AttentionParams& p_;
  typename Shape::SharedMemory& smem_;
  int stage_;  // of each KV split's ring, that no copy is under way to: o goes there where it has no spill area
  int warp_, lane_;

  QUIRE_DEVICE void run(const DecodeWork& job, const Accumulator<kM, kVo>& o, const SoftmaxRows<kM>& softmax) const {
    const bool whole = job.work.group.num_parts == 1;
    put_states(softmax);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      spill<Shape::kNarrow>(SpillTile<kVo>{ptx::smem_address(spill_of(warp_))}, o, m, lane_);
      __syncthreads();
      merge_splits(job, m, whole);
      if (m + 1 < kM) __syncthreads();
    }
    if (whole) {
      __syncthreads();
    } else if (arrives_last(p_, job.work.group, &smem_.fixed.is_last)) {
      merge_parts<V, Shape::kWarps>(p_, job, warp_, lane_);
    }
  }

 private:
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
  QUIRE_DEVICE void merge_splits(const DecodeWork& job, int m, bool whole) const {
    const int row_begin = job.work.tile.row_begin;
    const int64_t slot = static_cast<int64_t>(job.work.group.slot(job.work.part)) * V::kTileRows;
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kSplitWarps * 16 * kQuads; i += Shape::kThreads) {
      const int r = i / kQuads, quad = i - r * kQuads, member = r / 16;
      const int row = (member * kM + m) * 16 + r % 16;
      if (row_begin + row >= job.row_end) continue;
      const RowQuad sum = merge_row(member, m, r % 16, quad);
      if (whole) {
        store_quad<typename V::O>(p_, job, row_begin + row, quad * 4, sum);
      } else {
        *reinterpret_cast<float4*>(p_.partial_o + (slot + row) * kVo + quad * 4) = sum.o;
        if (quad == 0) reinterpret_cast<float2*>(p_.partial_md)[slot + row] = {sum.m, sum.d};
      }
    }
  }

  QUIRE_DEVICE RowQuad merge_row(int member, int m, int row, int quad) const {
    float2 md[Shape::kKvSplits];
    RowQuad sum = {kNoLogit, 0.f, {0.f, 0.f, 0.f, 0.f}};
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
