// The logits that a lane holds of a tile. One visitor goes through them, row by row, with what is known of each row and
// key: the transform (core/logits.h) and the mask (core/mask.h) reach logits here and nowhere else.
// mma.m16n8k16 and wgmma leave logits in the same places, so the visitor is the same for both.
#pragma once
#include "quire/core/logits.h"
#include "quire/tile/gemm.cuh"
#include "quire/tile/mask_bits.cuh"
#include "quire/tile/tanh.cuh"

namespace quire {

// Of two logits that a lane holds side by side: one row, neighbouring keys.
template <class T>
struct Pair {
  T at[2];
};

// The functions that transforms are written with. kShare: where the special-function unit is the bottleneck, a pair
// shares a reciprocal, for more registers.
template <bool kShare_>
struct FragmentMath {
  static constexpr bool kShare = kShare_;

  QUIRE_DEVICE static Pair<float> tanh(Pair<float> x, float scale) {
    if constexpr (!kShare) return {tanh_by_exp2(x.at[0], scale), tanh_by_exp2(x.at[1], scale)};
    tanh_of_pair(x.at, scale);
    return x;
  }
};

// What a lane's logits belong to.
template <class V>
struct LogitsTile {
  Mask<V::kMask, V::kWindow != 0> mask;  // of the request
  const FastDivisor& group;
  int request, kv_head;
  int row;  // the lane's first packed row; rows past the request's last repeat its last query
  int key;  // the tile's first key, a multiple of 8
  int lane;

  // The query of the lane's row i, which is 8 * i below its first.
  QUIRE_DEVICE int qo_idx(int i) const { return min(group.div(row + 8 * i), mask.qo_len - 1); }
};

// A row of a lane, and which of the tile's keys its query sees. Keys are counted from the lane's first.
template <class V>
struct LogitsRow {
  static constexpr bool kHasBits = mask_has_bits(V::kMask);

  const LogitsTile<V>& tile;
  int i, qo_idx, col;
  KeyRange keys;
  uint32_t bits;  // of 32 keys

  QUIRE_DEVICE LogitsRow(const LogitsTile<V>& tile, int i)
      : tile(tile), i(i), qo_idx(tile.qo_idx(i)), col(2 * (tile.lane & 3)) {
    const int first = tile.key | (kHasBits ? 0 : col);
    const KeyRange visible = tile.mask.visible(qo_idx);
    keys = {visible.begin - first, visible.end - first};
  }

  // `word`: the mask's bits of the tile's keys [at, at + 32).
  QUIRE_DEVICE void set_bits(uint32_t word, int at) {
    word &= low_bits(keys.end - at);
    if constexpr (V::kWindow != 0) word &= ~low_bits(keys.begin - at);
    bits = word >> col;
  }

  QUIRE_DEVICE bool sees(int at) const {
    if constexpr (kHasBits) return (bits >> at % 32 & 1) != 0;
    return at < keys.end && (V::kWindow == 0 || at >= keys.begin);
  }

  // The pair at key `at` becomes `hidden` where the query does not see the key.
  QUIRE_DEVICE void hide(Pair<float>& x, int at, float hidden) const {
    if (!sees(at)) x.at[0] = hidden;
    if (!sees(at + 1)) x.at[1] = hidden;
  }
};

// Where a pair of logits stands, for transforms.
template <class V>
struct LogitsPlace {
  const LogitsRow<V>& row;
  int at;

  QUIRE_DEVICE int q_idx() const { return row.qo_idx; }
  QUIRE_DEVICE Pair<int> kv_idx() const {
    const int key = row.tile.key + row.col + at;
    return {key, key + 1};
  }
  QUIRE_DEVICE int head() const {
    const FastDivisor& group = row.tile.group;
    return row.tile.kv_head * static_cast<int>(group.divisor) + group.mod(row.tile.row + 8 * row.i);
  }
  QUIRE_DEVICE int request() const { return row.tile.request; }
};

// A mask's bits for a lane's kRows rows of a tile, read ahead of their use.
template <class V, int kRows>
struct TileBits {
  MaskBits<ceil_div(V::kTileKv, 32)> rows[kRows];

  QUIRE_DEVICE void read(const LogitsTile<V>& tile) {
    if constexpr (!mask_has_bits(V::kMask)) return;
    const int count = min(V::kTileKv, tile.mask.kv_len - tile.key);
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i].read(tile.mask.bits, tile.mask.bit_of(tile.qo_idx(i), tile.key), count);
  }
  QUIRE_DEVICE uint32_t operator()(const LogitsRow<V>& row, int at) const { return rows[row.i].word(at / 32); }
};

// Fragments of logits: blocks of 16 rows x 8 keys, of which a lane holds a pair of an upper and one of a lower row.
template <class S>
struct Fragment;
template <int kM, int kN>
struct Fragment<Accumulator<kM, kN>> {
  static constexpr int kRows = 2 * kM, kBlocks = kN / 8;  // rows of a lane, blocks side by side
  QUIRE_DEVICE static float* pair(Accumulator<kM, kN>& s, int i, int n) { return s.at[i / 2][n] + 2 * (i % 2); }
};
template <int size>
struct Fragment<float[size]> {
  static constexpr int kRows = 2, kBlocks = size / 4;
  QUIRE_DEVICE static float* pair(float (&s)[size], int i, int n) { return s + 4 * n + 2 * i; }
};

// Calls visit(x, row, at) for each pair x of a lane's logits, which is at key `at` of the row. read_bits(row, at): the
// mask's bits of the tile's keys [at, at + 32).
template <bool kMasked, class V, class S, class ReadBits, class Visit>
QUIRE_DEVICE void for_each_logit(S& s, const LogitsTile<V>& tile, ReadBits&& read_bits, Visit&& visit) {
#pragma unroll
  for (int i = 0; i < Fragment<S>::kRows; ++i) {
    LogitsRow<V> row(tile, i);
#pragma unroll
    for (int n = 0; n < Fragment<S>::kBlocks; ++n) {
      if (kMasked && row.kHasBits && n % 4 == 0) row.set_bits(read_bits(row, 8 * n), 8 * n);
      float* at = Fragment<S>::pair(s, i, n);
      Pair<float> x = {at[0], at[1]};
      visit(x, row, 8 * n);
      at[0] = x.at[0], at[1] = x.at[1];
    }
  }
}

// q . k becomes score(q . k), -infinity where kMasked and the query does not see the key. Times the transform's factor
// that is a base-2 exponent.
template <bool kMasked, class V, class Math, class S, class ReadBits>
QUIRE_DEVICE void score_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile,
                               ReadBits&& read_bits) {
  if constexpr (transform.kIsIdentity && !kMasked) return;
  for_each_logit<kMasked>(s, tile, read_bits, [&](Pair<float>& x, const LogitsRow<V>& row, int at) {
    if constexpr (!LogitsTransform<V, Math>::kIsIdentity) {
      if constexpr (kMasked && Math::kShare) row.hide(x, at, 0.f);  // may be NaN, which must not reach its neighbour
      x = transform.score(x, LogitsPlace<V>{row, at});
    }
    if constexpr (kMasked) row.hide(x, at, __int_as_float(0xff800000));
  });
}

// The same, masked or not, with bits that are read where they are used. make_tile(): what the logits belong to.
template <class V, class Math, class S, class MakeTile>
QUIRE_DEVICE void score_logits(S& s, const LogitsTransform<V, Math>& transform, bool is_masked, MakeTile&& make_tile) {
  const auto read_bits = [](const LogitsRow<V>& row, int at) {
    return visible_word(row.tile.mask, row.qo_idx, row.tile.key + at);
  };
  if (is_masked) {
    score_logits<true>(s, transform, make_tile(), read_bits);
  } else {
    score_logits<false>(s, transform, make_tile(), read_bits);
  }
}

}  // namespace quire
