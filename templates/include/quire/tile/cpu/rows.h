// The rows of a work tile and their running softmax: what the code for few rows and for many rows shares, and the end
// of a work tile.
#pragma once
#include <math.h>
#include "quire/core/logits.h"
#include "quire/core/rope.h"
#include "quire/core/schedule.h"
#include "quire/tile/cpu/vector.h"

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
};

// Normalises row `row` of a finished tile and writes it. A sink joins the denominator and has no value. A row
// that saw no key is 0, and its lse -inf.
template <class V>
inline void finish_row(const Rows& rows, int row, const float* o, float m, float d) {
  const float own_m = m, own_d = d;
  const WorkTile::Place at = rows.place(row);
  float scale = rows.p.o_scale;
  if (rows.p.sinks != nullptr) {
    const float given = rows.p.sinks[at.head], sink = (kIsLatent<V> ? min(given, 1e38f) : given) * kLog2e;
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
  if (rows.p.lse == nullptr) return;
  if (kIsLatent<V> && rows.p.lse_unit < 0.0f) m = own_m, d = own_d;
  const float lse = d == 0.0f ? -kInfinity : m + log2f(d);
  store_statistics<V>(rows.p, rows.work.tile, at.token, at.head, lse, own_m, own_d);
}

// Adds a row of a partial result to o, which is whole vectors.
template <class V>
inline void add_partial(float* o, const float* from, float weight) {
  constexpr int kRest = V::kHeadDimVo % kLanes, kWhole = V::kHeadDimVo - kRest;
  for (int i = 0; i < kWhole; i += kLanes) store(o + i, load(o + i) + load(from + i) * weight);
  if constexpr (kRest != 0) store(o + kWhole, load(o + kWhole) + load_first<kRest>(from + kWhole) * weight);
}

// Merges the partials of a group, always from the first part to the last, and finishes its rows.
template <class V>
inline void merge_partials(const Rows& rows, const MergeGroup& group) {
  const AttentionParams& p = rows.p;
  for (int row = 0; row < group.num_rows; ++row) {
    const auto at = [&](int part) { return part_row<V>(p.groups, group.parts_begin, part) + row; };
    float m = -kInfinity, d = 0.0f, o[whole_vectors(V::kHeadDimVo)] = {};
    for (int i = 0; i < group.num_parts(); ++i) m = max(m, p.partial_md[at(i) * 2]);
    const float base = m == -kInfinity ? 0.0f : m;
    for (int i = 0; i < group.num_parts(); ++i) {
      const float* md = p.partial_md + at(i) * 2;
      if (md[1] == 0.0f) continue;  // saw no key; a NaN goes on, whatever its part's maximum
      const float weight = exp2(md[0] - base);
      d += weight * md[1];
      add_partial<V>(o, p.partial_o + at(i) * V::kHeadDimVo, weight);
    }
    finish_row<V>(rows, row, o, m, d);
  }
}

// Whether this is the last work tile to arrive at a group. Its counter is then 0 again.
inline bool arrives_last(MergeGroup& group) {
  const uint32_t before = __atomic_fetch_add(&group.num_arrived, 1u, __ATOMIC_ACQ_REL);
  if (static_cast<int>(before) + 1 != group.num_parts()) return false;
  __atomic_store_n(&group.num_arrived, 0u, __ATOMIC_RELAXED);
  return true;
}

// Ends a work tile of a cascade, whose partial is stored. Rows of its groups are counted from the batch's first.
template <class V>
inline void arrive_at_cascade_groups(const AttentionParams& p, const WorkTile& work) {
  for (int i = 0; i < work.tile.num_groups; ++i) {
    CascadeGroup& group = cascade_group(p, work.tile, i, work.kv_head);
    if (!arrives_last(group)) continue;
    WorkTile merged = work;
    merged.tile.qo_begin = 0, merged.tile.row_begin = group.row, merged.row_end = group.row + group.num_rows;
    merge_partials<V>(Rows(p, merged, group.num_rows), group);
  }
}

// Ends a work tile. If it covers its row tile, its rows are written; otherwise its partial is stored, and the last work
// tile of the group to arrive merges all partials.
template <class V>
inline void finish_work_tile(const Rows& rows, const float* o, const float* m, const float* d) {
  constexpr int kStride = whole_vectors(V::kHeadDimVo);
  const WorkTile& work = rows.work;
  if (work.is_whole()) {
    for (int row = 0; row < rows.count; ++row) finish_row<V>(rows, row, o + row * kStride, m[row], d[row]);
    return;
  }
  const AttentionParams& p = rows.p;
  const int64_t at = work.partial_row<V>();
  for (int row = 0; row < rows.count; ++row) {
    memcpy(p.partial_o + (at + row) * V::kHeadDimVo, o + row * kStride, sizeof(float) * V::kHeadDimVo);
    p.partial_md[(at + row) * 2] = m[row];
    p.partial_md[(at + row) * 2 + 1] = d[row];
  }
  if constexpr (V::kCascade != 0) return arrive_at_cascade_groups<V>(p, work);
  MergeGroup& group = p.groups[work.group];
  if (arrives_last(group)) merge_partials<V>(rows, group);
}

// Rotates a row of a query or key that has been widened to float.
// There are two loops, because g++ vectorises each of them.
template <int kDim>
inline void rotate_row(float* x, int position, const uint64_t* frequencies) {
  float cos[kDim / 2], sin[kDim / 2];
  for (int i = 0; i < kDim / 2; ++i) {
    const Rotation by = rope_rotation(position, frequencies[i]);
    cos[i] = by.cos, sin[i] = by.sin;
  }
  for (int i = 0; i < kDim / 2; ++i) rotate(x[i], x[i + kDim / 2], {cos[i], sin[i]});
}

}  // namespace quire::cpu
