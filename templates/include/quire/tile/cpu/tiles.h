// Many rows on a matrix unit (tile/cpu/amx.h), or by dot products of pairs of bf16 (AVX512-BF16): bf16 queries, and
// keys and values of bf16 or of 8 bits, which it takes as bf16 without loss.
//
// Scores and outputs are computed transposed, s[key][row] = K Q^T and o[dim][row] = V^T P^T. A vector of 16 rows then
// lies across the lanes, as in tile/cpu/panel.h: softmax needs no sum across lanes, and P, two keys a word, is the
// second operand just as softmax leaves it. K is copied; Q and V are transposed, Q once for a row tile. A panel is two
// tiles of rows: a step of a product loads two tiles of each operand for four products.
//
// Everything lies in tiles of 1 KB, so that a load is 16 consecutive lines:
//
//   q  [rows / 16][dims / 32]   words are two dims of a row
//   k  [keys / 16][dims / 32]   16 keys of 32 dims
//   v  [dims / 16][keys / 32]   16 dims of 32 keys
//   s  [2][keys][16]            floats
//   p  [2][keys / 32]           words are two keys of a row
//   o  [rows / 16][dims / 16]   16 dims of 16 rows, floats
#pragma once
#include "quire/core/convert.h"
#include "quire/tile/cpu/amx.h"
#include "quire/tile/cpu/keys.h"
#include "quire/tile/cpu/logits.h"

namespace quire::cpu {

constexpr int kTileSide = kLanes;          // rows of a tile, and words of each
constexpr int kTilePanel = 2 * kTileSide;  // rows
constexpr int kTileDims = 2 * kTileSide;   // of a tile of queries or keys; keys of a tile of values
constexpr int kTileNumbers = kTileSide * kTileDims;
static_assert(!kHasTiles || kLanes == 16, "a row of a tile is a vector");

// A row's maximum is raised only if a score exceeds it by this much: until then o needs no new scale. Weights are then
// at most 2^kSlack, which costs neither bf16 nor sums of floats any precision.
constexpr float kSlack = 8.0f;

// A head's dims, rounded up to whole tiles.
constexpr int whole_tiles(int head_dim) { return ceil_div(head_dim, kTileDims) * kTileDims; }

// The whole tiles that hold these keys.
inline KeyRange whole_tiles(KeyRange keys) {
  return {keys.begin / kTileDims * kTileDims, static_cast<int>(round_up(keys.end, kTileDims))};
}

// ---- rows become tiles ----

// A row as bf16 numbers, padded to whole tiles: the row itself if it is stored so, else a copy in `to`.
template <int kDim, class Row>
QUIRE_CPU const bf16_t* row_of_tiles(Row row, bf16_t* to) {
  if constexpr (is_same<Row, const bf16_t*>::value && kDim == whole_tiles(kDim)) {
    return row;
  } else {
    float wide[whole_vectors(kDim)];
    widen_rows<kDim>(wide, &row, 1);
    for (int d = 0; d < whole_tiles(kDim); d += kLanes) {
      store(to + d, d < whole_vectors(kDim) ? load(wide + d) : Floats{});
    }
    return to;
  }
}

#if defined(__AVX512BF16__)
constexpr bool kHasDots = true;
#else
constexpr bool kHasDots = false;
#endif

// sum + a[0] b[0] + a[1] b[1] of pairs of bf16, word by word. Subnormal numbers count as 0.
QUIRE_CPU Floats dot_pairs(Floats sum, [[maybe_unused]] Words a, [[maybe_unused]] Words b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
  __builtin_trap();
#endif
  return sum;
}

// Packs two non-negative numbers into a word of bf16, the first in the lower half. Rounds to nearest. A NaN may become
// another number, but its row's denominator is NaN.
QUIRE_CPU Words pair_of(Floats first, Floats second) {
  const Words a = reinterpret_cast<Words>(first) + 0x8000u, b = reinterpret_cast<Words>(second) + 0x8000u;
  return a >> 16 | (b & 0xffff0000u);
}

// The operands of both products of a work tile.
template <int kRows, int kKv, int kHeadDimQk, int kVo>
struct TileOperands {
  static constexpr int kQk = whole_tiles(kHeadDimQk), kCopied = max(kQk, whole_tiles(kVo));

  bf16_t copies[kRows == 0 ? 0 : kTileDims][kCopied];
  bf16_t q[kRows * kQk], k[kKv * kQk], v[kKv * kVo];
  uint32_t p[kKv * kTileSide];  // 2 * kTileSide rows of kKv / 2 words

  uint32_t* weights(int row_tile) { return p + row_tile * (kKv / 2 * kTileSide); }

  // Copies `count` queries to rows `row` and following of the row tile. Rows of the last tile that have no query are 0.
  void pack_queries(int row, const bf16_t* const* rows, int count) {
    bf16_t* to = q + row * kQk;
    for (int d = 0; d < kQk; d += kTileDims, to += kTileNumbers) {
      Floats x[kTileSide];
      for (int i = 0; i < kTileSide; ++i) x[i] = i < count ? load_as<Floats>(rows[i] + d) : Floats{};
      transpose(x);
      memcpy(to, x, sizeof(x));
    }
  }

  void pack_key(int key, const bf16_t* row) {
    bf16_t* to = k + key / kTileSide * (kTileSide * kQk) + key % kTileSide * kTileDims;
    for (int d = 0; d < kQk; d += kTileDims, to += kTileNumbers) memcpy(to, row + d, sizeof(Floats));
  }

  // Copies the values `rows` of keys `at`, with zeros up to whole tiles.
  template <int kDim, class Row>
  void pack_values(const Row* rows, KeyRange at) {
    static const bf16_t zeros[whole_tiles(kDim)] = {};
    const KeyRange whole = whole_tiles(at);
    for (int key = whole.begin; key < whole.end; key += kTileDims) {
      const bf16_t* some[kTileDims];
      for (int i = 0; i < kTileDims; ++i) {
        const bool is_there = at.contains(key + i);
        some[i] = is_there ? row_of_tiles<kDim>(rows[key + i - at.begin], copies[i]) : zeros;
      }
      for (int d = 0; d < kVo; d += kTileDims) transpose_values(key, d, some);
    }
  }

  // Transposes kTileDims dims of kTileDims keys. Even and odd dims are transposed separately, because a word holds one
  // dim of two keys.
  void transpose_values(int key, int d, const bf16_t* const* rows) {
    Floats even[kTileSide], odd[kTileSide];
    for (int i = 0; i < kTileSide; ++i) {
      const Words a = load_as<Words>(rows[2 * i] + d), b = load_as<Words>(rows[2 * i + 1] + d);
      even[i] = reinterpret_cast<Floats>((a & 0xffffu) | b << 16);
      odd[i] = reinterpret_cast<Floats>(a >> 16 | (b & 0xffff0000u));
    }
    transpose(even), transpose(odd);
    bf16_t* to = values(d, key);
    for (int i = 0; i < kTileSide / 2; ++i, to += 2 * kTileDims) {
      memcpy(to, &even[i], sizeof(Floats)), memcpy(to + kTileDims, &odd[i], sizeof(Floats));
    }
    if (d + kTileSide == kVo) return;
    to = values(d + kTileSide, key);
    for (int i = kTileSide / 2; i < kTileSide; ++i, to += 2 * kTileDims) {
      memcpy(to, &even[i], sizeof(Floats)), memcpy(to + kTileDims, &odd[i], sizeof(Floats));
    }
  }

  // The tile of values of 16 dims from `d` on, of 32 keys from `key` on.
  bf16_t* values(int d, int key) { return v + d * kKv + key * kTileSide; }

  // Whether no value of these keys is infinite or NaN.
  bool values_are_finite(KeyRange keys) {
    const KeyRange whole = whole_tiles(keys);
    Ints found = {};
    for (int d = 0; d < kVo; d += kTileSide) {
      for (const bf16_t *at = values(d, whole.begin), *end = values(d, whole.end); at < end; at += kTileDims) {
        const Ints x = load_as<Ints>(at);
        found |= ((x & 0x7f80) == 0x7f80) | ((x & 0x7f800000) == 0x7f800000);
      }
    }
    return !any_lane(found);
  }

  // ---- products ----

  // s[kRowTiles][keys][16] = K Q^T for the rows from `row` on and `keys`, whole tiles.
  template <int kRowTiles>
  void score(float* s, int row, KeyRange keys) const {
    if constexpr (!kHasTiles) return score_by_dots<kRowTiles>(s, row, keys);
    constexpr int kRow = kTileSide * kQk, kBlock = kTileSide * kTileSide;
    const bf16_t* rows = q + row * kQk;
    for (int key = keys.begin; key < keys.end; key += 2 * kTileSide) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      const bf16_t* at = k + key * kQk;
#pragma GCC unroll 4
      for (int d = 0; d < kRow; d += kTileNumbers) {
        tile_load<4>(at + d), tile_load<5>(at + kRow + d), tile_load<6>(rows + d);
        tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>();
        if constexpr (kRowTiles == 2) tile_load<7>(rows + kRow + d), tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
      }
      float *to = s + key * kTileSide, *to_more = to + kKv * kTileSide;
      tile_store<0>(to), tile_store<1>(to + kBlock);
      if constexpr (kRowTiles == 2) tile_store<2>(to_more), tile_store<3>(to_more + kBlock);
    }
  }

  // o[kRowTiles] += V^T P^T for `keys`, whole tiles.
  template <int kRowTiles>
  void accumulate(float* o, KeyRange keys) {
    if constexpr (!kHasTiles) return accumulate_by_dots<kRowTiles>(o, keys);
    constexpr int kWhole = kVo / kTileDims * kTileDims;
    for (int d = 0; d < kWhole; d += kTileDims) accumulate_dims<kRowTiles, 2>(o, d, keys);
    if constexpr (kWhole < kVo) accumulate_dims<kRowTiles, 1>(o, kWhole, keys);
  }

  template <int kRowTiles, int kDimTiles>
  void accumulate_dims(float* o, int d, KeyRange keys) {
    constexpr bool kTwoRows = kRowTiles == 2, kTwoDims = kDimTiles == 2;
    float *to = o + d * kTileSide, *to_dims = to + kTileSide * kTileSide;
    float *to_rows = to + kTileSide * kVo, *to_both = to_dims + kTileSide * kVo;
    tile_load<0>(to);
    if constexpr (kTwoDims) tile_load<1>(to_dims);
    if constexpr (kTwoRows) tile_load<2>(to_rows);
    if constexpr (kTwoRows && kTwoDims) tile_load<3>(to_both);
#pragma GCC unroll 1
    for (int key = keys.begin; key < keys.end; key += kTileDims) {
      tile_load<4>(values(d, key)), tile_load<6>(weights(0) + key / 2 * kTileSide), tile_dot<0, 4, 6>();
      if constexpr (kTwoDims) tile_load<5>(values(d + kTileSide, key)), tile_dot<1, 5, 6>();
      if constexpr (kTwoRows) tile_load<7>(weights(1) + key / 2 * kTileSide), tile_dot<2, 4, 7>();
      if constexpr (kTwoRows && kTwoDims) tile_dot<3, 5, 7>();
    }
    tile_store<0>(to);
    if constexpr (kTwoDims) tile_store<1>(to_dims);
    if constexpr (kTwoRows) tile_store<2>(to_rows);
    if constexpr (kTwoRows && kTwoDims) tile_store<3>(to_both);
  }

  // ---- the same products, vector by vector ----

  static constexpr int kDots = kTileSide / 2;  // keys or dims at a time, each with kRowTiles accumulators

  template <int kRowTiles>
  void score_by_dots(float* s, int row, KeyRange keys) const {
    for (int key = keys.begin; key < keys.end; key += kDots) {
      Floats sum[kDots][kRowTiles] = {};
      const bf16_t *rows = q + row * kQk, *at = k + key / kTileSide * (kTileSide * kQk) + key % kTileSide * kTileDims;
      for (int d = 0; d < kQk; d += kTileDims, rows += kTileNumbers, at += kTileNumbers) {
        dot_tile<kRowTiles>(sum, at, rows, kTileSide * kQk);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kDots; ++i) {
        store(s + (key + i) * kTileSide, sum[i][0]);
        if constexpr (kRowTiles == 2) store(s + (kKv + key + i) * kTileSide, sum[i][1]);
      }
    }
  }

  template <int kRowTiles>
  void accumulate_by_dots(float* o, KeyRange keys) {
    const bf16_t* from = reinterpret_cast<const bf16_t*>(p);
    for (int d = 0; d < kVo; d += kDots, o += kDots * kTileSide) {
      Floats sum[kDots][kRowTiles];
#pragma GCC unroll 8
      for (int i = 0; i < kDots; ++i) {
        sum[i][0] = load(o + i * kTileSide);
        if constexpr (kRowTiles == 2) sum[i][1] = load(o + (kVo + i) * kTileSide);
      }
      for (int key = keys.begin; key < keys.end; key += kTileDims) {
        const bf16_t* at = values(d / kTileSide * kTileSide, key) + d % kTileSide * kTileDims;
        dot_tile<kRowTiles>(sum, at, from + key * kTileSide, kKv * kTileSide);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kDots; ++i) {
        store(o + i * kTileSide, sum[i][0]);
        if constexpr (kRowTiles == 2) store(o + (kVo + i) * kTileSide, sum[i][1]);
      }
    }
  }

  // sum[i][j] += the product of row i of tile a and tile b, or the tile `stride` numbers behind it.
  template <int kRowTiles>
  QUIRE_CPU static void dot_tile(Floats (&sum)[kDots][kRowTiles], const bf16_t* a, const bf16_t* b, int stride) {
#pragma GCC unroll 2
    for (int pair = 0; pair < kTileDims; pair += 2, a += 2, b += kTileDims) {
      const Words first = load_as<Words>(b), second = kRowTiles == 2 ? load_as<Words>(b + stride) : first;
#pragma GCC unroll 8
      for (int i = 0; i < kDots; ++i) {
        const Words x = load_as<uint32_t>(a + i * kTileDims) - Words{};
        sum[i][0] = dot_pairs(sum[i][0], first, x);
        if constexpr (kRowTiles == 2) sum[i][1] = dot_pairs(sum[i][1], second, x);
      }
    }
  }

  // o += V^T P^T for one tile of rows, if a value is infinite or NaN and a row must not see it: a weight of 0 is
  // skipped.
  void accumulate_visible(float* o, int row_tile, KeyRange keys) {
    for (int key = keys.begin; key < keys.end; ++key) {
      const Words word = load(weights(row_tile) + key / 2 * kTileSide);
      const Floats weight = reinterpret_cast<Floats>(key % 2 == 0 ? word << 16 : word & 0xffff0000u);
      const bf16_t* at = values(0, key / kTileDims * kTileDims) + key % kTileDims;
      for (int d = 0; d < kVo; ++d) {
        const float x = to_float(at[d / kTileSide * (kTileSide * kKv) + d % kTileSide * kTileDims]);
        float* to = o + d * kTileSide;
        store(to, load(to) + (weight == 0.0f ? Floats{} : weight * x));
      }
    }
  }
};

// ---- softmax ----

// Softmax of one tile of rows and the scores of a KV tile, which become weights. If a maximum is raised, o (of kVo
// dims) is rescaled.
template <int kVo>
struct SoftmaxTile {
  uint32_t* p;
  float *s, *m, *d, *o;

  // score(x, key) turns q . k of these rows into base-2 exponents or, with kScales, into these divided by `factor`.
  // Keys outside `keys`, up to whole tiles, get weights of 0.
  template <bool kScales, class Score>
  void of(KeyRange keys, float factor, Score&& score) {
    Floats top = broadcast(-kInfinity);
    for_each_logit(s, keys, 1, kTileSide, [&](Floats x, int key) {
      x = score(x, key);
      top = maximum(top, kScales ? x * factor : x);
      return x;
    });
    const KeyRange whole = whole_tiles(keys);
    for (int key = whole.begin; key < keys.begin; ++key) store(s + key * kTileSide, broadcast(-kInfinity));
    for (int key = keys.end; key < whole.end; ++key) store(s + key * kTileSide, broadcast(-kInfinity));
    const Floats base = raise_maximum(top);
    weigh<kScales>(whole, factor, base);
  }

  // Whether of_all() may be called with this factor. Its multiply-add rounds once, so that the largest logit may exceed
  // the maximum by a rounding error: too much for exp2 if logits exceed 2^30.
  static bool takes(float factor) { return factor <= 0x1p16f; }

  // Softmax if all rows see all `keys`, which are whole tiles, and a logit is q . k times `factor`. The weights are
  // those of of<true>(), bit for bit, which rows have beside others that do not see all keys.
  void of_all(KeyRange keys, float factor) {
    Floats top = broadcast(-kInfinity), top_odd = top;
    for (int key = keys.begin; key < keys.end; key += 2) {
      top = maximum(top, load(s + key * kTileSide) * factor);
      top_odd = maximum(top_odd, load(s + (key + 1) * kTileSide) * factor);
    }
    const Floats base = raise_maximum(maximum(top, top_odd));
    weigh<true>(keys, factor, base);
  }

 private:
  // Raises the maximum, and returns the reference that weights are relative to.
  Floats raise_maximum(Floats top) {
    const Floats before = load(m);
    const Ints raised = top > before + kSlack;
    const Floats after = raised ? top : before, base = after == -kInfinity ? Floats{} : after;
    if (!any_lane(raised)) return base;
    const Floats alpha = raised ? exp2(before - base) : broadcast(1.0f);
    for (int i = 0; i < kVo; ++i) store(o + i * kTileSide, load(o + i * kTileSide) * alpha);
    store(m, after);
    store(d, load(d) * alpha);
    return base;
  }

  template <bool kScales>
  void weigh(KeyRange keys, float factor, Floats base) {
    Floats sum = load(d), odd_sum = {};
    const auto weight = [&](int key) {
      const Floats x = load(s + key * kTileSide);
      return exp2_coarse(kScales ? x * factor - base : x - base);
    };
    for (int key = keys.begin; key < keys.end; key += 2) {
      const Floats even = weight(key), odd = weight(key + 1);
      sum += even, odd_sum += odd;
      const Words pair = pair_of(even, odd);
      memcpy(p + key / 2 * kTileSide, &pair, sizeof(pair));
    }
    store(d, sum + odd_sum);
  }
};

// o[16 rows][kVo] of o's tiles, in place.
template <int kVo>
inline void transpose_outputs(float* o) {
  float rows[kTileSide * kVo];
  for (int d = 0; d < kVo; d += kTileSide) {
    Floats x[kTileSide];
    for (int i = 0; i < kTileSide; ++i) x[i] = load(o + (d + i) * kTileSide);
    transpose(x);
    for (int i = 0; i < kTileSide; ++i) store(rows + i * kVo + d, x[i]);
  }
  memcpy(o, rows, sizeof(rows));
}

}  // namespace quire::cpu
