// The rows of a work tile and their running softmax: what both ways of computing share, and how a work tile ends.
//
// o is [kTileRows, kHeadDimVo as whole vectors] floats, not normalised; m and d are each row's maximum and denominator,
// base 2.
#pragma once
#include <math.h>
#include "quire/core/logits.h"
#include "quire/core/schedule.h"
#include "quire/tile/cpu_vector.h"

namespace quire::cpu {

// The packed rows of a work tile.
struct Rows {
  const AttentionParams& p;
  const WorkTile& work;
  int32_t count;

  Rows(const AttentionParams& p, const WorkTile& work, int tile_rows)
      : p(p), work(work), count(min(tile_rows, work.row_end - work.tile.row_begin)) {}

  int qo_idx(int row) const { return p.group.div(work.tile.row_begin + row); }
  WorkTile::Place place(int row) const { return work.place(p.group, work.tile.row_begin + row); }
  int head(int row) const { return place(row).head; }

  template <class Q>
  const Q* q(int row) const {
    const WorkTile::Place at = place(row);
    return static_cast<const Q*>(p.q) + at.token * p.q_token_stride + at.head * p.q_head_stride;
  }
  template <class O>
  O* o(int row) const {
    const WorkTile::Place at = place(row);
    return static_cast<O*>(p.o) + at.token * p.o_token_stride + at.head * p.o_head_stride;
  }
  float* lse(int row) const { return p.lse + place(row).token * p.num_qo_heads + head(row); }
};

// Normalises row `row` of a finished tile and writes it. A sink joins the denominator, with no value of its own. A row
// that saw no key is 0, and its lse -inf.
template <class V>
inline void finish_row(const Rows& rows, int row, const float* o, float m, float d) {
  float scale = rows.p.o_scale;
  if (rows.p.sinks != nullptr) {
    const float sink = rows.p.sinks[rows.head(row)] * kLog2e;
    const float top = max(m, sink), base = top == -kInfinity ? 0.0f : top;
    const float shrink = exp2(m - base);
    d = d * shrink + exp2(sink - base);
    scale *= shrink;
    m = top;
  }
  scale = d == 0.0f ? 0.0f : scale / d;
  auto* to = rows.template o<typename V::O>(row);
  constexpr int kRest = V::kHeadDimVo % kLanes, kWhole = V::kHeadDimVo - kRest;
  for (int i = 0; i < kWhole; i += kLanes) store(to + i, load(o + i) * scale);
  if constexpr (kRest != 0) store_first<kRest>(to + kWhole, load(o + kWhole) * scale);
  if (rows.p.lse != nullptr)
    *rows.lse(row) = returned_lse<V>(d == 0.0f ? -kInfinity : m + log2f(d), rows.p, rows.work.tile, rows.head(row));
}

// Merges the partials of a group, always from the first part to the last, and finishes its rows.
template <class V>
inline void merge_partials(const Rows& rows, const MergeGroup& group) {
  const AttentionParams& p = rows.p;
  for (int row = 0; row < group.num_rows; ++row) {
    const auto md = [&](int64_t part_begin) { return p.partial_md + (part_begin + row) * 2; };
    float m = -kInfinity, d = 0.0f;
    for (int64_t at = group.row_begin; at < group.row_end; at += V::kTileRows) m = max(m, md(at)[0]);
    const float base = m == -kInfinity ? 0.0f : m;
    constexpr int kRest = V::kHeadDimVo % kLanes, kWhole = V::kHeadDimVo - kRest;
    float o[whole_vectors(V::kHeadDimVo)] = {};
    for (int64_t at = group.row_begin; at < group.row_end; at += V::kTileRows) {
      const float weight = exp2(md(at)[0] - base);
      if (md(at)[1] == 0.0f) continue;  // saw no key; a NaN goes on, whatever its part's maximum
      const float* from = p.partial_o + (at + row) * V::kHeadDimVo;
      d += weight * md(at)[1];
      for (int i = 0; i < kWhole; i += kLanes) store(o + i, load(o + i) + load(from + i) * weight);
      if constexpr (kRest != 0) store(o + kWhole, load(o + kWhole) + load_first<kRest>(from + kWhole) * weight);
    }
    finish_row<V>(rows, row, o, m, d);
  }
}

// Ends a work tile: one that covers its row tile is written; another leaves its partial, and the last one of a group to
// arrive merges all.
template <class V>
inline void finish_work_tile(const Rows& rows, const float* o, const float* m, const float* d) {
  constexpr int kStride = whole_vectors(V::kHeadDimVo);
  const WorkTile& work = rows.work;
  if (work.is_whole()) {
    for (int row = 0; row < rows.count; ++row) finish_row<V>(rows, row, o + row * kStride, m[row], d[row]);
    return;
  }
  const AttentionParams& p = rows.p;
  const int64_t at = static_cast<int64_t>(work.partial) * V::kTileRows;
  for (int row = 0; row < rows.count; ++row) {
    memcpy(p.partial_o + (at + row) * V::kHeadDimVo, o + row * kStride, sizeof(float) * V::kHeadDimVo);
    p.partial_md[(at + row) * 2] = m[row];
    p.partial_md[(at + row) * 2 + 1] = d[row];
  }
  MergeGroup& group = p.groups[work.group];
  const uint32_t before = __atomic_fetch_add(&group.num_arrived, 1u, __ATOMIC_ACQ_REL);
  if (static_cast<int>(before) + 1 != group.num_parts<V::kTileRows>()) return;
  __atomic_store_n(&group.num_arrived, 0u, __ATOMIC_RELAXED);
  merge_partials<V>(rows, group);
}

}  // namespace quire::cpu
