// Many rows: a panel of rows lies across the lanes.
//
// Scores are computed transposed, s[key][row] = K Q^T, so that K is read one number at a time, just as it lies, and Q
// is transposed once per row tile instead of K once per kv tile. Softmax then runs down the keys with no sum across
// lanes, and P V reads s again one number at a time beside rows of V. A register tile is kKeyBlock x kPanelVectors
// for scores, kRowBlock x kValueVectors for values: 24 accumulators of 32 registers, 12 of 16.
#pragma once
#include "quire/tile/cpu/keys.h"
#include "quire/tile/cpu/logits.h"

namespace quire::cpu {

constexpr int kPanelVectors = 3;
constexpr int kPanel = kPanelVectors * kLanes;  // rows
constexpr int kKeyBlock = kVectorRegisters == 32 ? 8 : 4;
constexpr int kRowBlock = 6;
constexpr int kValueVectors = kVectorRegisters == 32 ? 4 : 2;
static_assert(kPanel % kRowBlock == 0, "a panel is cut into whole row blocks");

// s[key_begin..key_end)[kVectors * kLanes] = k[keys][kDim] qt[kDim][kPanel], whole key blocks.
template <int kDim, int kVectors>
inline void score_block(float* s, const float* k, const float* qt, int key_begin, int key_end) {
  for (int key = key_begin; key < key_end; key += kKeyBlock) {
    Floats sum[kKeyBlock][kVectors] = {};
    const float* at = k + key * kDim;
#pragma GCC unroll 1
    for (int d = 0; d < kDim; ++d) {
      Floats q[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) q[v] = load(qt + d * kPanel + v * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kKeyBlock; ++i) {
        const Floats x = broadcast(at[i * kDim + d]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[i][v] += x * q[v];
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kKeyBlock; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(s + (key + i) * kPanel + v * kLanes, sum[i][v]);
    }
  }
}

// o[kRowBlock rows][kVectors * kLanes] = alpha[row] * o + sum over keys of s[key][row] v[key], v rows of kDim. The keys
// are summed separately: o is large after many keys, and adding each product to it would round away more.
template <int kDim, int kVectors>
inline void value_block(float* o, const float* s, const float* v, const float* alpha, int key_begin, int key_end) {
  Floats sum[kRowBlock][kVectors] = {};
#pragma GCC unroll 1
  for (int key = key_begin; key < key_end; ++key) {
    Floats x[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) x[j] = load(v + key * kDim + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRowBlock; ++i) {
      const Floats weight = broadcast(s[key * kPanel + i]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] += weight * x[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRowBlock; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      float* at = o + i * kDim + j * kLanes;
      store(at, load(at) * alpha[i] + sum[i][j]);
    }
  }
}

// Softmax over keys [keys.begin, keys.end) of one vector of rows, in place: s becomes p. score(x, key) turns q . k into
// a base-2 exponent. Returns the factor of earlier sums.
template <class Score>
inline Floats softmax_rows(float* s, KeyRange keys, Score&& score, float* m_at, float* d_at) {
  const Floats before = load(m_at);
  Floats m = before, sum = {};
  for_each_logit(s, keys, 1, kPanel, [&](Floats x, int key) {
    x = score(x, key);
    m = maximum(m, x);
    return x;
  });
  const Floats base = m == -kInfinity ? Floats{} : m;
  for_each_logit(s, keys, 1, kPanel, [&](Floats x, int) {
    x = exp2(x - base);
    sum += x;
    return x;
  });
  const Floats alpha = exp2(before - base);
  store(m_at, m);
  store(d_at, load(d_at) * alpha + sum);
  return alpha;
}

// o += p v for all rows of a panel, register tile by register tile.
template <int kDim>
inline void accumulate_values(float* o, const float* s, const float* v, const float* alpha, KeyRange keys, int count) {
  constexpr int kStep = kValueVectors * kLanes, kWhole = kDim / kStep * kStep;
  for (int d = 0; d < kWhole; d += kStep) {
    for (int row = 0; row < count; row += kRowBlock) {
      value_block<kDim, kValueVectors>(o + row * kDim + d, s + row, v + d, alpha + row, keys.begin, keys.end);
    }
  }
  if constexpr (kWhole < kDim) {
    for (int row = 0; row < count; row += kRowBlock) {
      value_block<kDim, (kDim - kWhole) / kLanes>(o + row * kDim + kWhole, s + row, v + kWhole, alpha + row, keys.begin,
                                                  keys.end);
    }
  }
}

// o += p v if a value is infinite or NaN and some rows must not see it: a weight of 0 is skipped, because 0 * NaN is
// NaN.
template <int kDim>
inline void accumulate_visible_values(float* o, const float* s, const float* v, const float* alpha, KeyRange keys,
                                      int count) {
  for (int row = 0; row < count; ++row, o += kDim) {
    for (int d = 0; d < kDim; d += kLanes) store(o + d, load(o + d) * alpha[row]);
    for (int key = keys.begin; key < keys.end; ++key) {
      const float weight = s[key * kPanel + row];
      if (weight == 0.0f) continue;
      for (int d = 0; d < kDim; d += kLanes) store(o + d, load(o + d) + load(v + key * kDim + d) * weight);
    }
  }
}

// qt[d][row] = scale * q[row][d] for one vector of rows; rows from `count` on are 0.
template <int kDim, class Q>
inline void transpose_rows(float* qt, const Q* const* rows, int count, float scale) {
  for (int d = 0; d < kDim; d += kLanes) {
    Floats x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = i < count ? load(rows[i] + d) * scale : Floats{};
    transpose(x);
    for (int i = 0; i < kLanes; ++i) store(qt + (d + i) * kPanel, x[i]);
  }
}

// Stages rows [begin, end) of a KV tile as floats, in rows of kStride; the rest of the first and last key blocks is 0.
template <int kDim, int kStride, class Row>
inline void stage_keys(float* to, const Row* rows, int begin, int end) {
  const int block_begin = begin / kKeyBlock * kKeyBlock, block_end = static_cast<int>(round_up(end, kKeyBlock));
  memset(to + block_begin * kStride, 0, sizeof(float) * (begin - block_begin) * kStride);
  widen_rows<kDim>(to + begin * kStride, rows, end - begin);
  memset(to + end * kStride, 0, sizeof(float) * (block_end - end) * kStride);
}

// s = k q^T of a panel of `count` rows.
template <int kDim>
inline void score_panel(float* s, const float* k, const float* qt, KeyRange keys, int count) {
  const int begin = keys.begin / kKeyBlock * kKeyBlock;
  if (count > 2 * kLanes) {
    score_block<kDim, 3>(s, k, qt, begin, keys.end);
  } else if (count > kLanes) {
    score_block<kDim, 2>(s, k, qt, begin, keys.end);
  } else {
    score_block<kDim, 1>(s, k, qt, begin, keys.end);
  }
}

// Describes to softmax the `count` rows from `row` on, and the keys that they see of a KV tile.
template <class V, class Panel>
inline void describe_panel(Panel& panel, const LogitsTile<V>& logits, int row, int count, int tile_begin) {
  for (int i = 0; i < count; ++i) {
    const int qo_idx = logits.rows.qo_idx(row + i);
    const KeyRange keys = logits.mask.visible(qo_idx);
    panel.q_idx[i] = qo_idx, panel.head[i] = logits.rows.head(row + i);
    panel.begin[i] = keys.begin - tile_begin, panel.end[i] = keys.end - tile_begin;
    if constexpr (mask_has_bits(V::kMask)) {
      for (int w = 0; w < V::kTileKv / 32; ++w) panel.words[w][i] = logits.mask.word(qo_idx, tile_begin + 32 * w);
    }
  }
}

// What a thread computes a panel with: its rows' state and output, and a KV tile's logits and values.
template <class Panel>
struct PanelMemory {
  Panel& panel;
  float *s, *alpha, *m, *d, *o;
  const float* v;
};

// s becomes weights. add(s, key, lane) completes q . k of a vector of rows.
template <bool kMasked, class V, class Panel, class Add>
inline void softmax_panel(const PanelMemory<Panel>& x, const LogitsTile<V>& logits, int count, int tile_begin,
                          KeyRange keys, Add&& add) {
  for (int i = 0; i < count; i += kLanes) {
    const auto score = [&](Floats s, int at) {
      return score_logits<kMasked>(logits, add(s, at, i), RowLanes<V, Panel>{logits, x.panel, i, tile_begin, at});
    };
    store(x.alpha + i, softmax_rows(x.s + i, keys, score, x.m + i, x.d + i));
  }
}

// Softmax and o += p v of a panel of `count` rows from `row` on. `keys`: those of the KV tile that some row sees,
// counted from its first key, tile_begin. is_full: all rows see all of them. is_finite: so are all values.
template <int kVo, class V, class Panel, class Add>
inline void add_panel(const PanelMemory<Panel>& x, const LogitsTile<V>& logits, int row, int count, int tile_begin,
                      KeyRange keys, bool is_full, bool is_finite, Add&& add) {
  describe_panel(x.panel, logits, row, count, tile_begin);
  if (is_full) {
    softmax_panel<false>(x, logits, count, tile_begin, keys, add);
  } else {
    softmax_panel<true>(x, logits, count, tile_begin, keys, add);
  }
  if (is_full || is_finite) {
    accumulate_values<kVo>(x.o, x.s, x.v, x.alpha, keys, count);
  } else {
    accumulate_visible_values<kVo>(x.o, x.s, x.v, x.alpha, keys, count);
  }
}

}  // namespace quire::cpu
