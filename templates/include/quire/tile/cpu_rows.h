// The rows of a row tile and their running softmax: what both ways of computing partition, and how a work ends.
//
// o is [kTileRows, kHeadDimVo] floats, not normalised; m and d are each row's maximum and denominator, base 2.
#pragma once
#include <math.h>
#include "quire/core/schedule.h"
#include "quire/tile/cpu_vector.h"

namespace quire::cpu {

// The packed rows [row_begin, row_begin + count) of one request and kv head.
struct Rows {
  const AttentionParams& p;
  int32_t row_begin;
  int32_t count;
  int32_t head_begin;  // first query head of the kv head
  int64_t token_begin;
  int32_t qo_len;

  Rows(const AttentionParams& p, const RowTile& tile, int kv_head, int tile_rows)
      : p(p), row_begin(tile.row_begin), head_begin(kv_head * static_cast<int>(p.group.divisor)) {
    token_begin = tile.qo_begin, qo_len = tile.qo_len;
    count = min(tile_rows, qo_len * static_cast<int>(p.group.divisor) - row_begin);
  }

  int qo_idx(int row) const { return p.group.div(row_begin + row); }
  int head(int row) const { return head_begin + p.group.mod(row_begin + row); }

  template <class Q>
  const Q* q(int row) const {
    return static_cast<const Q*>(p.q) + (token_begin + qo_idx(row)) * p.q_token_stride + head(row) * p.q_head_stride;
  }
  template <class O>
  O* o(int row) const {
    return static_cast<O*>(p.o) + (token_begin + qo_idx(row)) * p.o_token_stride + head(row) * p.o_head_stride;
  }
  float* lse(int row) const { return p.lse + (token_begin + qo_idx(row)) * p.num_qo_heads + head(row); }
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
  for (int i = 0; i < V::kHeadDimVo; i += kLanes) store(to + i, load(o + i) * scale);
  if (rows.p.lse != nullptr) *rows.lse(row) = d == 0.0f ? -kInfinity : m + log2f(d);
}

// Merges the partial results of a group, always from the first part to the last, and finishes its rows.
template <class V>
inline void merge_rows(const Rows& rows, const PartialGroup& group) {
  const AttentionParams& p = rows.p;
  const auto md = [&](int part, int row) {
    return p.partial_md + (static_cast<int64_t>(group.slot(part)) * V::kTileRows + row) * 2;
  };
  for (int row = 0; row < rows.count; ++row) {
    float m = -kInfinity, d = 0.0f;
    for (int part = 0; part < group.num_parts; ++part) m = max(m, md(part, row)[0]);
    const float base = m == -kInfinity ? 0.0f : m;
    float o[V::kHeadDimVo] = {};
    for (int part = 0; part < group.num_parts; ++part) {
      const float weight = exp2(md(part, row)[0] - base);
      if (md(part, row)[1] == 0.0f) continue;  // saw no key; a NaN goes on, whatever its part's maximum
      const float* from = p.partial_o + (static_cast<int64_t>(group.slot(part)) * V::kTileRows + row) * V::kHeadDimVo;
      d += weight * md(part, row)[1];
      for (int i = 0; i < V::kHeadDimVo; i += kLanes) store(o + i, load(o + i) + load(from + i) * weight);
    }
    finish_row<V>(rows, row, o, m, d);
  }
}

// Ends a work: a whole tile is written; a part is left in its slot, and the last part to arrive merges all.
template <class V>
inline void finish_work_tile(const Rows& rows, const WorkTile& work, const float* o, const float* m, const float* d) {
  if (work.group.num_parts == 1) {
    for (int row = 0; row < rows.count; ++row) finish_row<V>(rows, row, o + row * V::kHeadDimVo, m[row], d[row]);
    return;
  }
  const AttentionParams& p = rows.p;
  const int64_t at = static_cast<int64_t>(work.group.slot(work.part)) * V::kTileRows;
  memcpy(p.partial_o + at * V::kHeadDimVo, o, sizeof(float) * rows.count * V::kHeadDimVo);
  for (int row = 0; row < rows.count; ++row) {
    p.partial_md[(at + row) * 2] = m[row];
    p.partial_md[(at + row) * 2 + 1] = d[row];
  }
  uint32_t* arrivals = p.arrivals + work.group.counter;
  const uint32_t before = __atomic_fetch_add(arrivals, 1u, __ATOMIC_ACQ_REL);
  if (before + 1 != static_cast<uint32_t>(work.group.num_parts)) return;
  __atomic_store_n(arrivals, 0u, __ATOMIC_RELAXED);
  merge_rows<V>(rows, work.group);
}

}  // namespace quire::cpu
