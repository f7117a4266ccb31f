// The end of a piece: the teams' results are merged through shared memory, and the CTAs' partial results by the last
// CTA to arrive, each in fixed order.
#pragma once
#include "quire/ptx/grid.cuh"
#include "quire/ptx/store.cuh"
#include "quire/tile/decode_shape.cuh"
#include "quire/tile/decode_work.cuh"
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
QUIRE_DEVICE void store_quad(const AttentionParams& p, const DecodeJob& job, int row, int col, const RowQuad& quad) {
  const DecodeJob::Place to = job.place(p.group, row);
  const RowResult result = finish_row(quad.m, quad.d, p.sinks == nullptr ? nullptr : p.sinks + to.head, p.o_scale);
  const uint2 packed = {ptx::pack(O{}, quad.o.x * result.scale, quad.o.y * result.scale),
                        ptx::pack(O{}, quad.o.z * result.scale, quad.o.w * result.scale)};
  O* dst = static_cast<O*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + col;
  *reinterpret_cast<uint2*>(dst) = packed;
  if (col == 0 && p.lse != nullptr) p.lse[to.token * p.num_qo_heads + to.head] = result.lse;
}

// True in every thread of the CTA that arrives last: all parts are then visible to it and the counter is 0 again.
QUIRE_DEVICE bool arrives_last(const AttentionParams& p, const PartialGroup& group, uint32_t* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t last = group.num_parts - 1;
    *flag = ptx::atomic_inc_acq_rel(p.arrivals + group.counter, last) == last;
  }
  __syncthreads();
  return *flag != 0;
}

// A warp a row, four columns a lane. The parts' states and a batch of their columns are under way together, so merging
// up to kBatch parts takes one trip to L2. Reads go past L1, which may hold what another CTA has written since.
template <class V, int kWarps>
QUIRE_DEVICE void merge_parts(const AttentionParams& p, const DecodeJob& job, int warp, int lane) {
  constexpr int kVo = V::kHeadDimVo, kRows = V::kTileRows, kBatch = 16;
  const PartialGroup group = job.piece.group;
  const int row_begin = job.piece.tile.row_begin, rows = min(kRows, job.row_end - row_begin);
  const float2* states = reinterpret_cast<const float2*>(p.partial_md);
  for (int row = warp; row < rows; row += kWarps) {
    float top = kNoLogit;
    for (int part = lane; part < group.num_parts; part += 32) {
      top = fmaxf(top, __ldcg(states + static_cast<int64_t>(group.slot(part)) * kRows + row).x);
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
    for (int col = lane * 4; col < kVo; col += 128) {
      RowQuad sum = {top, 0.f, {0.f, 0.f, 0.f, 0.f}};
      for (int part = 0; part < group.num_parts; part += kBatch) {
        float2 md[kBatch];
        float4 x[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int64_t at = static_cast<int64_t>(group.slot(min(part + i, group.num_parts - 1))) * kRows + row;
          md[i] = __ldcg(states + at);
          x[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_o + at * kVo + col));
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const float weight = part + i < group.num_parts ? ptx::ex2(md[i].x - top) : 0.f;
          sum.d = fmaf(weight, md[i].y, sum.d);
          scale_add(sum.o, weight, x[i]);
        }
      }
      store_quad<typename V::O>(p, job, row_begin + row, col, sum);
    }
  }
}

// Ends a piece. `slot` is a stage of the ring that no copy is under way to, base of the team's; afterwards it is free.
template <class V>
class DecodeEnding {
  using Shape = DecodeShape<V>;
  static constexpr int kVo = V::kHeadDimVo, kM = Shape::kM, kQuads = kVo / 4;

 public:
  const AttentionParams& p_;
  unsigned char* smem_;
  int slot_at_;  // byte offset of the slot in the first team's ring; teams' rings are kStages * kSlotBytes apart
  int warp_, lane_;

  QUIRE_DEVICE void run(const DecodeJob& job, const Accumulator<kM, kVo>& o, const SoftmaxRows<kM>& softmax) const {
    const bool whole = job.piece.group.num_parts == 1;
    put_states(softmax);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      spill<Shape::kNarrow>(SpillTile<kVo>{ptx::smem_address(smem_) + spill_at(warp_)}, o, m, lane_);
      __syncthreads();
      merge_teams(job, m, whole);
      if (m + 1 < kM) __syncthreads();
    }
    if (whole) {
      __syncthreads();
    } else if (arrives_last(p_, job.piece.group, reinterpret_cast<uint32_t*>(smem_ + Shape::kFlagAt))) {
      merge_parts<V, Shape::kWarps>(p_, job, warp_, lane_);
    }
  }

 private:
  QUIRE_DEVICE int spill_at(int warp) const {
    return warp / Shape::kTeam * Shape::kStages * Shape::kSlotBytes + slot_at_ + warp % Shape::kTeam * 16 * kVo * 4;
  }
  QUIRE_DEVICE float2* states() const {
    return reinterpret_cast<float2*>(smem_ + Shape::kStatesAt);  // [kWarps, kM * 16]
  }

  QUIRE_DEVICE void put_states(const SoftmaxRows<kM>& softmax) const {
    if (lane_ % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        states()[(warp_ * kM + m) * 16 + h * 8 + lane_ / 4] = {softmax.m[m][h], softmax.d[m][h]};
      }
    }
  }

  // Rows of block m of every warp of a team, four columns a thread, the teams in order.
  QUIRE_DEVICE void merge_teams(const DecodeJob& job, int m, bool whole) const {
    const int row_begin = job.piece.tile.row_begin;
    const int64_t slot = static_cast<int64_t>(job.piece.group.slot(job.piece.part)) * V::kTileRows;
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kTeam * 16 * kQuads; i += Shape::kThreads) {
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
    float2 md[Shape::kTeams];
    RowQuad sum = {kNoLogit, 0.f, {0.f, 0.f, 0.f, 0.f}};
#pragma unroll
    for (int t = 0; t < Shape::kTeams; ++t) {
      md[t] = states()[((t * Shape::kTeam + member) * kM + m) * 16 + row];
      sum.m = fmaxf(sum.m, md[t].x);
    }
#pragma unroll
    for (int t = 0; t < Shape::kTeams; ++t) {
      const SpillTile<kVo> tile = {static_cast<uint32_t>(spill_at(t * Shape::kTeam + member))};
      const float weight = ptx::ex2(md[t].x - sum.m);
      sum.d = fmaf(weight, md[t].y, sum.d);
      scale_add(sum.o, weight, *reinterpret_cast<const float4*>(smem_ + tile.pair(row, 2 * quad)));
    }
    return sum;
  }
};

}  // namespace quire
