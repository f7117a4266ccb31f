// Few rows: keys and values stream from memory once, straight into registers, and the head dimension lies across the
// lanes. Bound by memory at decode, so what matters is that the next rows are on their way: while scores are computed
// the values of the same kv tile are fetched, while values are summed the next kv tile's keys are.
#pragma once
#include "quire/core/logits.h"
#include "quire/tile/cpu_keys.h"

namespace quire::cpu {

constexpr int kStreamRows = kVectorRegisters == 32 ? 4 : 2;  // rows at a time: kStreamRows * kStreamKeys accumulators
constexpr int kStreamKeys = 4;

// s[kRows][keys] = q[kRows][kDim] . k_rows[key], for count keys; s has kStride numbers a row and room for whole blocks.
template <int kDim, int kRows, int kStride, bool kFetch, class Kv>
inline void stream_scores(float* s, const float* q, const Kv* const* k_rows, const Kv* const* fetch, int count) {
  for (int key = 0; key < count; key += kStreamKeys) {
    const Kv* k[kStreamKeys];
#pragma GCC unroll 4
    for (int j = 0; j < kStreamKeys; ++j) k[j] = k_rows[min(key + j, count - 1)];
    Floats sum[kStreamKeys][kRows] = {};
#pragma GCC unroll 1
    for (int d = 0; d < kDim; d += kLanes) {
      Floats x[kStreamKeys];
#pragma GCC unroll 4
      for (int j = 0; j < kStreamKeys; ++j) x[j] = load(k[j] + d);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const Floats y = load(q + i * kDim + d);
#pragma GCC unroll 4
        for (int j = 0; j < kStreamKeys; ++j) sum[j][i] += x[j] * y;
      }
    }
    if constexpr (kFetch) {
      for (int j = key; j < min(key + kStreamKeys, count); ++j) prefetch_row<kDim>(fetch[j]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Floats4 sums = sum_lanes(sum[0][i], sum[1][i], sum[2][i], sum[3][i]);
      memcpy(s + i * kStride + key, &sums, sizeof(sums));
    }
  }
}

// The rows that a pass over values brings in besides, for the next kv tile.
template <class Kv>
struct Fetch {
  const Kv* const* rows;
  int count;
};

// o[kRows][kVectors * kLanes of kDim] = alpha[row] * o + sum over keys of s[row][key] v_rows[key][from d on]. One row
// of kFetchDim numbers is fetched beside each value.
template <int kDim, int kRows, int kVectors, int kStride, int kFetchDim, class Kv>
inline void stream_values(float* o, const float* s, const float* alpha, const Kv* const* v_rows, int d, int count,
                          Fetch<Kv> fetch) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = load(o + i * kDim + d + j * kLanes) * alpha[i];
  }
#pragma GCC unroll 1
  for (int key = 0; key < count; ++key) {
    if (key < fetch.count) prefetch_row<kFetchDim>(fetch.rows[key]);
    const Kv* v = v_rows[key] + d;
    Floats x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = load(v + j * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Floats weight = broadcast(s[i * kStride + key]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += weight * x[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(o + i * kDim + d + j * kLanes, sum[i][j]);
  }
}

template <int kDim, int kRows, int kStride, int kFetchDim, class Kv>
inline void stream_all_values(float* o, const float* s, const float* alpha, const Kv* const* v_rows, int count,
                              Fetch<Kv> fetch) {
  constexpr int kVectors = 4, kStep = kVectors * kLanes, kWhole = kDim / kStep * kStep;
  for (int d = 0; d < kWhole; d += kStep) {
    stream_values<kDim, kRows, kVectors, kStride, kFetchDim>(o, s, alpha, v_rows, d, count, fetch);
    fetch.count = 0;
  }
  if constexpr (kWhole < kDim) {
    constexpr int kRest = (kDim - kWhole) / kLanes;
    stream_values<kDim, kRows, kRest, kStride, kFetchDim>(o, s, alpha, v_rows, kWhole, count, fetch);
  }
}

// The same for one row that must not see every value: 0 * NaN is NaN, so a weight of 0 is skipped.
template <int kDim, class Kv>
inline void stream_seen_values(float* o, const float* s, float alpha, const Kv* const* v_rows, int count) {
  Floats sum[kDim / kLanes];
  for (int d = 0; d < kDim; d += kLanes) sum[d / kLanes] = load(o + d) * alpha;
  for (int key = 0; key < count; ++key) {
    const float weight = s[key];
    if (weight == 0.0f) continue;
    for (int d = 0; d < kDim; d += kLanes) sum[d / kLanes] += load(v_rows[key] + d) * weight;
  }
  for (int d = 0; d < kDim; d += kLanes) store(o + d, sum[d / kLanes]);
}

// Softmax over s[0, count) of one row, in place: s becomes p. `shown(key)` tells which of the kLanes keys from `key` on
// the row sees. Returns by how much what was summed before has to shrink.
template <class V, class Shown>
inline float stream_softmax(float* s, int count, const Logits<V::kSoftCap != 0>& logits, Shown&& shown, float& m,
                            float& d) {
  Floats top = broadcast(m);
  for (int key = 0; key < count; key += kLanes) {
    Floats x = logits.apply_scaled(load(s + key), [](Floats y) { return tanh(y); });
    x = shown(key) ? x : broadcast(-kInfinity);
    store(s + key, x);
    top = maximum(top, x);
  }
  const float after = max_lanes(top), base = after == -kInfinity ? 0.0f : after;
  Floats sum = {};
  for (int key = 0; key < count; key += kLanes) {
    const Floats weight = exp2(load(s + key) - base);
    store(s + key, weight);
    sum += weight;
  }
  const float alpha = exp2(m - base);
  m = after;
  d = d * alpha + sum_lanes(sum);
  return alpha;
}

}  // namespace quire::cpu
