// Partial results: a CTA stores one for each work tile that does not cover its row tile, and the last CTA to arrive at
// a merge group merges them.
#pragma once
#include "quire/core/logits.h"
#include "quire/core/schedule.h"
#include "quire/tile/softmax.cuh"

namespace quire {

// Four columns of a row: o not normalised, with the row's reference maximum and denominator.
struct RowQuad {
  float m, d;
  float4 o;
};

constexpr RowQuad kNoKeys = {kNoLogit, 0.f, {0.f, 0.f, 0.f, 0.f}};

QUIRE_DEVICE void scale_add(float4& o, float weight, float4 x) {
  o.x = fmaf(weight, x.x, o.x), o.y = fmaf(weight, x.y, o.y);
  o.z = fmaf(weight, x.z, o.z), o.w = fmaf(weight, x.w, o.w);
}

// Adds kParts partials of a row, which are in flight together. Lane i % kParts has the maximum and denominator of part
// i, and adds only the weight of that part to `sum.d`.
template <int kParts>
QUIRE_DEVICE void add_parts(RowQuad& sum, float2 md, const float4 (&o)[kParts]) {
  float top = md.x;
#pragma unroll
  for (int i = 1; i < kParts; i *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
  top = fmaxf(top, sum.m);
  const float keep = ptx::ex2(sum.m - top), weight = ptx::ex2(md.x - top);
  sum.m = top, sum.d = fmaf(sum.d, keep, weight * md.y);
  float4& x = sum.o;
  x.x *= keep, x.y *= keep, x.z *= keep, x.w *= keep;
#pragma unroll
  for (int i = 0; i < kParts; ++i) scale_add(x, __shfl_sync(0xffffffffu, weight, i), o[i]);
}

// Normalises and stores columns col .. col + 3 of a packed row. The lane with the first columns also stores the lse.
template <class V, class Params>
QUIRE_DEVICE void store_quad(const Params& p, const WorkTile& work, int row, int col, const RowQuad& quad) {
  using O = typename V::O;
  const WorkTile::Place to = work.place(p.group, row);
  const RowResult result =
      finish_row(quad.m, quad.d, p.sinks == nullptr ? nullptr : p.sinks + to.head, output_scale(p));
  const uint2 packed = {ptx::pack(O{}, quad.o.x * result.scale, quad.o.y * result.scale),
                        ptx::pack(O{}, quad.o.z * result.scale, quad.o.w * result.scale)};
  O* dst = static_cast<O*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + col;
  *reinterpret_cast<uint2*>(dst) = packed;
  if (col == 0 && p.lse != nullptr) {
    p.lse[to.token * p.num_qo_heads + to.head] = returned_lse<V>(result.lse, p, work.tile, to.head);
  }
}

// True in every thread of the CTA that arrives last at a group of `num_parts`: all partials are then visible to it, and
// the group's counter is 0 again. `sync` is a barrier of all threads that have stored partials and will merge: it hands
// their writes to the leader, whose atomic releases them.
template <class Flag, class Sync>
QUIRE_DEVICE bool arrives_last(MergeGroup* group, int num_parts, bool is_leader, Flag& flag, Sync&& sync) {
  sync();
  if (is_leader) {
    const uint32_t last = num_parts - 1;
    flag = ptx::atomic_inc_acq_rel(&group->num_arrived, last) == last;
  }
  sync();
  return flag;
}

// Eight partials of a row in flight from L2: four columns a lane, and the maxima and denominators, one a lane,
// repeated. Loads bypass L1, which may hold what memory held before another CTA's stores.
template <class V>
struct PartBatch {
  static constexpr int kParts = 8;

  float2 md;
  float4 o[kParts];

  // `row`: the row in the first of these partials. Parts from `count` on do not exist and have weight 0.
  template <class Params>
  QUIRE_DEVICE void load(const Params& p, int64_t row, int col, int count, int lane) {
    constexpr int kVo = V::kHeadDimVo;
    const int part = lane % kParts;
    md = {kNoLogit, 0.f};
    if (part < count) md = __ldcg(reinterpret_cast<const float2*>(p.partial_md) + row + part * V::kTileRows);
    const float* columns = p.partial_o + row * kVo + col;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      o[i] = {0.f, 0.f, 0.f, 0.f};
      if (i < count) o[i] = __ldcg(reinterpret_cast<const float4*>(columns + i * V::kTileRows * kVo));
    }
  }

  // d is the sum over this lane's parts until finish().
  QUIRE_DEVICE void add_to(RowQuad& sum) const { add_parts(sum, md, o); }

  QUIRE_DEVICE static void finish(RowQuad& sum) {
#pragma unroll
    for (int i = 1; i < kParts; i *= 2) sum.d += __shfl_xor_sync(0xffffffffu, sum.d, i);
  }
};

// Merges a group, in the last CTA to arrive: one warp a row, four columns a lane. While one batch of parts is added,
// the next batch (of this row or another) is in flight, because the rate at which an SM reads L2 bounds a merge.
template <class V, int kWarps, class Params>
QUIRE_DEVICE void merge_partials(const Params& p, const WorkTile& work, MergeGroup group, int thread) {
  constexpr int kVo = V::kHeadDimVo;
  const int lane = thread % 32, num_parts = group.num_parts<V::kTileRows>();
  struct Place {
    int row, col, part;
  } next = {thread / 32, 0, 0};
  if (next.row >= group.num_rows) return;
  RowQuad sum = kNoKeys;
  PartBatch<V> batch, ahead;
  const auto load_ahead = [&] {
    ahead.load(p, group.row_begin + next.part * V::kTileRows + next.row, min(next.col + lane * 4, kVo - 4),
               num_parts - next.part, lane);
  };
  load_ahead();
#pragma unroll 1
  while (next.row < group.num_rows) {
    const Place at = next;
    batch = ahead;
    if ((next.part += batch.kParts) >= num_parts) next.part = 0, next.col += 128;
    if (next.col >= kVo) next.col = 0, next.row += kWarps;
    if (next.row < group.num_rows) load_ahead();
    batch.add_to(sum);
    if (next.part > 0) continue;
    batch.finish(sum);
    const int col = at.col + lane * 4;
    if (col < kVo) store_quad<V>(p, work, work.tile.row_begin + at.row, col, sum);
    sum = kNoKeys;
  }
}

// The parameters that a merge reads, under the same names.
struct MergeParams {
  void* o;
  int64_t o_token_stride, o_head_stride;
  float *lse, *partial_o, *partial_md;
  const float* sinks;
  FastDivisor group;
  int32_t num_qo_heads;
  float o_scale, lse_unit;
  static constexpr const float* o_scale_by = nullptr;  // is part of o_scale

  QUIRE_DEVICE explicit MergeParams(const AttentionParams& p)
      : o(p.o),
        o_token_stride(p.o_token_stride),
        o_head_stride(p.o_head_stride),
        lse(p.lse),
        partial_o(p.partial_o),
        partial_md(p.partial_md),
        sinks(p.sinks),
        group(p.group),
        num_qo_heads(p.num_qo_heads),
        o_scale(output_scale(p)),
        lse_unit(p.lse_unit) {}
};

// merge_partials() as a function call, for kernels whose main loop leaves no registers to inline it. kOnce: all
// parameters are read once, which takes registers. Without it they are read through a reference, and each row waits for
// them again.
template <class V, int kWarps, bool kOnce = false>
__device__ __noinline__ void call_merge_partials(const AttentionParams& p, const WorkTile& work, MergeGroup group,
                                                 int thread) {
  if constexpr (kOnce)
    merge_partials<V, kWarps>(MergeParams(p), work, group, thread);
  else
    merge_partials<V, kWarps>(p, work, group, thread);
}

}  // namespace quire
