// Partial results: what a CTA leaves of a row tile that its work tile does not cover, and their merging by the last CTA
// to arrive at the merge group.
#pragma once
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

// Normalises and stores columns col .. col + 3 of a packed row, and with the first of them its lse.
template <class O>
QUIRE_DEVICE void store_quad(const AttentionParams& p, const WorkTile& work, int row, int col, const RowQuad& quad) {
  const WorkTile::Place to = work.place(p.group, row);
  const RowResult result =
      finish_row(quad.m, quad.d, p.sinks == nullptr ? nullptr : p.sinks + to.head, output_scale(p));
  const uint2 packed = {ptx::pack(O{}, quad.o.x * result.scale, quad.o.y * result.scale),
                        ptx::pack(O{}, quad.o.z * result.scale, quad.o.w * result.scale)};
  O* dst = static_cast<O*>(p.o) + to.token * p.o_token_stride + to.head * p.o_head_stride + col;
  *reinterpret_cast<uint2*>(dst) = packed;
  if (col == 0 && p.lse != nullptr) p.lse[to.token * p.num_qo_heads + to.head] = result.lse;
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

// Eight partials of four columns of a row, on their way from L2. Reads go past L1, which may hold what another CTA has
// written since.
template <int kTileRows, int kVo>
struct PartBatch {
  static constexpr int kParts = 8;

  float2 md[kParts];
  float4 o[kParts];

  // The first one is row `row` of all partials; parts from `count` on do not exist and weigh nothing.
  QUIRE_DEVICE void load(const AttentionParams& p, int64_t row, int col, int count) {
    const float2* states = reinterpret_cast<const float2*>(p.partial_md) + row;
    const float* columns = p.partial_o + row * kVo + col;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      md[i] = {kNoLogit, 0.f}, o[i] = {0.f, 0.f, 0.f, 0.f};
      if (i >= count) continue;
      md[i] = __ldcg(states + i * kTileRows);
      o[i] = __ldcg(reinterpret_cast<const float4*>(columns + i * kTileRows * kVo));
    }
  }

  QUIRE_DEVICE void add_to(RowQuad& sum) const {
    float top = sum.m;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = fmaxf(top, md[i].x);
    const float keep = ptx::ex2(sum.m - top);
    sum.m = top, sum.d *= keep;
    sum.o.x *= keep, sum.o.y *= keep, sum.o.z *= keep, sum.o.w *= keep;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float weight = ptx::ex2(md[i].x - top);
      sum.d = fmaf(weight, md[i].y, sum.d);
      scale_add(sum.o, weight, o[i]);
    }
  }
};

// The last CTA of a group, in kThreads threads: four columns of a row a thread, parts in order. While a batch of parts
// is added the next one, of this row or another, is under way: what an SM reads from L2 bounds it.
template <class V, int kThreads>
QUIRE_DEVICE void merge_partials(const AttentionParams& p, const WorkTile& work, const MergeGroup& group, int thread) {
  constexpr int kVo = V::kHeadDimVo, kQuads = kVo / 4;
  using Batch = PartBatch<V::kTileRows, kVo>;
  const int num_parts = group.num_parts<V::kTileRows>(), count = group.num_rows * kQuads;
  Batch batch, ahead;
  const auto load_ahead = [&](int i, int part) {
    const int row = i / kQuads;
    ahead.load(p, group.row_begin + part * V::kTileRows + row, (i - row * kQuads) * 4,
               i < count ? num_parts - part : 0);
  };
  RowQuad sum = kNoKeys;
  int part = 0;
  load_ahead(thread, 0);
#pragma unroll 1
  for (int i = thread; i < count;) {
    const int at = i;
    batch = ahead;
    if ((part += Batch::kParts) >= num_parts) part = 0, i += kThreads;
    load_ahead(i, part);
    batch.add_to(sum);
    if (part > 0) continue;
    const int row = at / kQuads;
    store_quad<typename V::O>(p, work, work.tile.row_begin + row, (at - row * kQuads) * 4, sum);
    sum = kNoKeys;
  }
}

}  // namespace quire
