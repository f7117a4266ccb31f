// Few rows: keys and values stream from memory once, straight into registers, and the head dimension lies across the
// lanes. Decode is limited by memory, so the next rows must always be in flight. While scores are computed, the values
// of the same KV tile are prefetched; while values are summed, the keys of the next KV tile are.
#pragma once
#include "quire/tile/cpu/keys.h"
#include "quire/tile/cpu/logits.h"

namespace quire::cpu {

constexpr int kStreamRows = kVectorRegisters == 32 ? 4 : 2;  // rows at a time: kStreamRows * kStreamKeys accumulators
constexpr int kStreamKeys = 4;

// Rows of bf16 are read two vectors at a time: a shift and a mask widen the even and the odd numbers, where one vector
// at a time would need a shuffle as well. Queries and outputs then have even and odd dims in separate vectors.
template <int kDim, class Row>
constexpr bool kReadsPairs = is_same<Row, const bf16_t*>::value && kDim % (2 * kLanes) == 0;

// Vector d / kLanes of a row.
template <bool kPairs, class Row>
QUIRE_CPU Floats load_streamed(Row row, int d) {
  if constexpr (kPairs) {
    const Words words = load_as<Words>(row + d / (2 * kLanes) * (2 * kLanes));
    return reinterpret_cast<Floats>(d / kLanes % 2 == 0 ? words << 16 : words & 0xffff0000u);
  } else {
    return load(row + d);
  }
}

// A row of outputs in the order of its dims, in place.
template <int kDim, class Row>
QUIRE_CPU void order_streamed(float* o) {
  if constexpr (kReadsPairs<kDim, Row>) {
    for (int d = 0; d < kDim; d += 2 * kLanes) {
      Floats even = load(o + d), odd = load(o + d + kLanes);
      interleave(even, odd);
      store(o + d, even), store(o + d + kLanes, odd);
    }
  }
}

// The rows that a pass prefetches: the values of its KV tile beside keys, the keys of the next beside values.
template <class Row>
struct Prefetch {
  const Row* rows;
  int count;
};

// s[kRows][keys] = q[kRows][kDim] . k_rows[key], for count keys; s has kStride numbers a row, and capacity for whole
// blocks.
template <int kDim, int kRows, int kStride, class Row>
inline void stream_scores(float* s, const float* q, const Row* k_rows, int count, Prefetch<Row> prefetch) {
  for (int key = 0; key < count; key += kStreamKeys) {
    Row k[kStreamKeys];
#pragma GCC unroll 4
    for (int j = 0; j < kStreamKeys; ++j) k[j] = k_rows[min(key + j, count - 1)];
    Floats sum[kStreamKeys][kRows] = {};
    constexpr bool kPairs = kReadsPairs<kDim, Row>;
    constexpr int kStep = kPairs ? 2 * kLanes : kLanes;
#pragma GCC unroll 1
    for (int begin = 0; begin < kDim; begin += kStep) {
#pragma GCC unroll 2
      for (int d = begin; d < begin + kStep; d += kLanes) {
        Floats x[kStreamKeys];
#pragma GCC unroll 4
        for (int j = 0; j < kStreamKeys; ++j) x[j] = load_streamed<kPairs>(k[j] + begin, d - begin);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const Floats y = load(q + i * kDim + d);
#pragma GCC unroll 4
          for (int j = 0; j < kStreamKeys; ++j) sum[j][i] += x[j] * y;
        }
      }
    }
    for (int j = key; j < min(key + kStreamKeys, prefetch.count); ++j) prefetch_row<kDim>(prefetch.rows[j]);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Floats4 sums = sum_lanes(sum[0][i], sum[1][i], sum[2][i], sum[3][i]);
      memcpy(s + i * kStride + key, &sums, sizeof(sums));
    }
  }
}

// o[kRows][kVectors * kLanes of kDim] = alpha[row] * o + sum over keys of s[row][key] v_rows[key][from d on]. One row
// of kPrefetchDim numbers is fetched beside each value.
template <int kDim, int kRows, int kVectors, int kStride, int kPrefetchDim, class Row>
inline void stream_values(float* o, const float* s, const float* alpha, const Row* v_rows, int d, int count,
                          Prefetch<Row> prefetch) {
  Floats sum[kRows][kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = load(o + i * kDim + d + j * kLanes) * alpha[i];
  }
#pragma GCC unroll 1
  for (int key = 0; key < count; ++key) {
    if (key < prefetch.count) prefetch_row<kPrefetchDim>(prefetch.rows[key]);
    const Row v = v_rows[key] + d;
    Floats x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = load_streamed<kReadsPairs<kDim, Row>>(v, j * kLanes);
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

template <int kDim, int kRows, int kStride, int kPrefetchDim, class Row>
inline void stream_all_values(float* o, const float* s, const float* alpha, const Row* v_rows, int count,
                              Prefetch<Row> prefetch) {
  constexpr int kVectors = 4, kStep = kVectors * kLanes, kWhole = kDim / kStep * kStep;
  for (int d = 0; d < kWhole; d += kStep) {
    stream_values<kDim, kRows, kVectors, kStride, kPrefetchDim>(o, s, alpha, v_rows, d, count, prefetch);
    prefetch.count = 0;
  }
  if constexpr (kWhole < kDim) {
    constexpr int kRest = (kDim - kWhole) / kLanes;
    stream_values<kDim, kRows, kRest, kStride, kPrefetchDim>(o, s, alpha, v_rows, kWhole, count, prefetch);
  }
}

// The sum over values for one row that must not see all of them: a weight of 0 is skipped, because 0 * NaN is NaN.
template <int kDim, class Row>
inline void stream_visible_values(float* o, const float* s, float alpha, const Row* v_rows, int count) {
  Floats sum[kDim / kLanes];
  for (int d = 0; d < kDim; d += kLanes) sum[d / kLanes] = load(o + d) * alpha;
  for (int key = 0; key < count; ++key) {
    const float weight = s[key];
    if (weight == 0.0f) continue;
    for (int d = 0; d < kDim; d += kLanes) {
      sum[d / kLanes] += load_streamed<kReadsPairs<kDim, Row>>(v_rows[key], d) * weight;
    }
  }
  for (int d = 0; d < kDim; d += kLanes) store(o + d, sum[d / kLanes]);
}

// Softmax over s[0, count) of one row, in place: s becomes p. score(x, at) turns q . k of a vector of keys from `at` on
// into base-2 exponents. Returns the factor of earlier sums.
template <class Score>
inline float stream_softmax(float* s, int count, Score&& score, float& m, float& d) {
  Floats top = broadcast(m), sum = {};
  for_each_logit(s, {0, count}, kLanes, 1, [&](Floats x, int at) {
    x = score(x, at);
    top = maximum(top, x);
    return x;
  });
  const float after = max_lanes(top), base = after == -kInfinity ? 0.0f : after;
  for_each_logit(s, {0, count}, kLanes, 1, [&](Floats x, int) {
    x = exp2(x - base);
    sum += x;
    return x;
  });
  const float alpha = exp2(m - base);
  m = after;
  d = d * alpha + sum_lanes(sum);
  return alpha;
}

}  // namespace quire::cpu
