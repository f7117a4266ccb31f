// A vector of logits: the rows and keys of its lanes. Only here do the transform (core/logits.h) and the mask
// (core/mask.h) reach logits.
#pragma once
#include "quire/core/logits.h"
#include "quire/core/mask.h"
#include "quire/tile/cpu/expression.h"
#include "quire/tile/cpu/rows.h"

namespace quire::cpu {

// The functions with which transforms are written.
struct Math : ExpressionMath {
  using ExpressionMath::tanh;
  using ExpressionMath::to_float;
  static Floats tanh(Floats x, float scale) { return cpu::tanh(x * scale); }
  template <class X>
  static X exp2(X x) {
    return cpu::exp2(x);
  }
  static Floats fma(Floats x, float scale, Floats y) { return x * scale + y; }
};

// The data that all logits of a row tile share.
template <class V>
struct LogitsTile {
  const Rows& rows;
  int request;
  Mask<V::kMask, V::kWindow != 0> mask;
  LogitsTransform<V, Math> transform;

  // The position of query 0.
  int diagonal() const { return mask.kv_len - mask.qo_len; }

  // The factor of q. Without a transform it makes q . k a base-2 exponent at once.
  float q_scale() const { return transform.kIsIdentity ? transform.factor : 1.0f; }
};

// Few rows: a vector is one row and the kLanes keys from `key` on, of which the row sees those of `range` but for what
// mask bits hide.
template <class V>
struct KeyLanes {
  const LogitsTile<V>& tile;
  int row, query, key;
  KeyRange range;

  int q_idx() const { return query; }
  Ints kv_idx() const { return key + iota(); }
  Floats ramp(float step) const { return Math::to_float(kv_idx() - (query + tile.diagonal())) * step; }
  int head() const { return tile.rows.head(row); }
  int request() const { return tile.request; }
  int qo_len() const { return tile.mask.qo_len; }
  int kv_len() const { return tile.mask.kv_len; }

  Ints visible() const {
    const Ints lane = iota(), in_range = (lane >= range.begin - key) & (lane < range.end - key);
    if constexpr (!mask_has_bits(V::kMask)) return in_range;
    return in_range & (((tile.mask.word(query, key) >> (Words)lane) & 1u) != 0u);
  }
};

// The visible keys of each row of a panel, in one KV tile.
template <int kRows, int kTileKv>
struct PanelRows {
  int32_t q_idx[kRows], head[kRows];
  int32_t begin[kRows], end[kRows];  // the keys that the row sees, counted from the kv tile's first
  uint32_t words[kTileKv / 32][kRows];
};

// Many rows: a vector is one key and kLanes rows of a panel, beginning with row `lane`.
template <class V, class Panel>
struct RowLanes {
  const LogitsTile<V>& tile;
  const Panel& panel;
  int lane, tile_begin, at;  // the kv tile's first key, and how many further the vector's is

  Ints q_idx() const { return load(panel.q_idx + lane); }
  int kv_idx() const { return tile_begin + at; }
  Floats ramp(Floats step) const { return Math::to_float(kv_idx() - (q_idx() + tile.diagonal())) * step; }
  Ints head() const { return load(panel.head + lane); }
  int request() const { return tile.request; }
  int qo_len() const { return tile.mask.qo_len; }
  int kv_len() const { return tile.mask.kv_len; }

  Ints visible() const {
    const Ints in_range = (at >= load(panel.begin + lane)) & (at < load(panel.end + lane));
    if constexpr (!mask_has_bits(V::kMask)) return in_range;
    return in_range & (((load(panel.words[at / 32] + lane) >> (at & 31)) & 1u) != 0u);
  }
};

// Turns q . k into a base-2 exponent: -infinity if kMasked and the query does not see the key.
template <bool kMasked, class V, class Lanes>
QUIRE_CPU Floats score_logits(const LogitsTile<V>& tile, Floats x, const Lanes& lanes) {
  if constexpr (!LogitsTransform<V, Math>::kIsIdentity) x = tile.transform.score(x, lanes) * tile.transform.factor;
  if constexpr (kMasked) x = lanes.visible() ? x : broadcast(-kInfinity);
  if constexpr (kMasked && V::kScoreMask != 0) {
    x = Math::where(V::template mask<Math>(tile.transform.operands, lanes), x, -kInfinity);
  }
  return x;
}

// Replaces the vectors at s[at * stride] by visit(vector, at), for each `step`-th `at` of `range`.
template <class Visit>
QUIRE_CPU void for_each_logit(float* s, KeyRange range, int step, int stride, Visit&& visit) {
  for (int at = range.begin; at < range.end; at += step) store(s + at * stride, visit(load(s + at * stride), at));
}

}  // namespace quire::cpu
