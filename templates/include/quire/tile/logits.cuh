// The logits that a lane holds of a tile. One visitor goes through them, row by row, with what is known of each row and
// key: the transform (core/logits.h) and the mask (core/mask.h) reach logits here and nowhere else.
// mma.m16n8k16 and wgmma leave logits in the same places, so the visitor is the same for both.
#pragma once
#include "quire/core/logits.h"
#include "quire/tile/expression.cuh"
#include "quire/tile/gemm.cuh"
#include "quire/tile/mask_bits.cuh"
#include "quire/tile/tanh.cuh"

namespace quire {

// What a lane's logits belong to.
template <class V>
struct LogitsTile {
  Mask<V::kMask, V::kWindow != 0> mask;  // of the request
  const FastDivisor& group;
  int request, kv_head;
  int row;  // the lane's first packed row; rows past the request's last repeat its last query
  int key;  // the tile's first key
  int lane;

  // The query of the lane's row i, which is 8 * i below its first.
  QUIRE_DEVICE int qo_idx(int i) const { return min(group.div(row + 8 * i), mask.qo_len - 1); }
};

// One key, and the query of a row.
template <class V>
struct KeyPlace {
  const LogitsTile<V>& tile;
  int i, key;

  QUIRE_DEVICE int q_idx() const { return tile.qo_idx(i); }
  QUIRE_DEVICE int keys() const { return key; }
  QUIRE_DEVICE int head() const {
    return tile.kv_head * static_cast<int>(tile.group.divisor) + tile.group.mod(tile.row + 8 * i);
  }
  QUIRE_DEVICE int request() const { return tile.request; }
  QUIRE_DEVICE int qo_len() const { return tile.mask.qo_len; }
  QUIRE_DEVICE int kv_len() const { return tile.mask.kv_len; }
};

// Four logits of one row, for transforms and masks: those of the lane's keys at, at + 1, at + 8 and at + 9. kInside:
// neighbours that a score reads are inside its tensors for all keys of the KV tile.
template <class V, bool kInside_ = false>
struct LogitsPlace {
  static constexpr bool kInside = kInside_;
  const LogitsTile<V>& tile;
  int i, qo_idx, at;

  QUIRE_DEVICE int first_key() const { return tile.key + 2 * (tile.lane & 3); }  // of the lane
  QUIRE_DEVICE int q_idx() const { return qo_idx; }
  QUIRE_DEVICE Four<int> kv_idx() const {
    const int key = first_key() + at;
    return {key, key + 1, key + 8, key + 9};
  }
  // One instruction a key: `at` is a constant, and the first key's distance is the same for all keys of a row.
  QUIRE_DEVICE Four<float> ramp(float step) const {
    const int stands = qo_idx + (tile.mask.kv_len - tile.mask.qo_len);
    const float first = step * static_cast<float>(first_key() - stands), after = static_cast<float>(at);
    return {fmaf(step, after, first), fmaf(step, after + 1.f, first), fmaf(step, after + 8.f, first),
            fmaf(step, after + 9.f, first)};
  }
  QUIRE_DEVICE int head() const {
    return tile.kv_head * static_cast<int>(tile.group.divisor) + tile.group.mod(tile.row + 8 * i);
  }
  QUIRE_DEVICE int request() const { return tile.request; }
  QUIRE_DEVICE int qo_len() const { return tile.mask.qo_len; }
  QUIRE_DEVICE int kv_len() const { return tile.mask.kv_len; }
  QUIRE_DEVICE Ramp<int32_t> keys() const { return {first_key(), 1, at}; }
};

// Which of a tile's keys a row's query sees. Keys are counted from the lane's first.
template <class V>
class VisibleKeys {
 public:
  static constexpr bool kHasBits = mask_has_bits(V::kMask);

  QUIRE_DEVICE VisibleKeys(const LogitsTile<V>& tile, int qo_idx) : col_(2 * (tile.lane & 3)) {
    const KeyRange keys = tile.mask.visible(qo_idx);
    const int first = tile.key | (kHasBits ? 0 : col_);  // a tile begins at a multiple of 8 keys
    keys_ = {keys.begin - first, keys.end - first};
  }

  // The mask's bits of the tile's keys [at, at + 32), at a multiple of 32.
  QUIRE_DEVICE void set_bits(uint32_t bits, int at) {
    bits &= low_bits(keys_.end - at);
    if constexpr (V::kWindow != 0) bits &= ~low_bits(keys_.begin - at);
    bits_ = bits >> col_;
  }

  QUIRE_DEVICE bool contains(int at) const {
    if constexpr (kHasBits) return (bits_ >> at % 32 & 1) != 0;
    return at < keys_.end && (V::kWindow == 0 || at >= keys_.begin);
  }

  // `x` becomes `hidden` where the query does not see the key; the first key is `at`.
  QUIRE_DEVICE void hide(Four<float>& x, int at, float hidden) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!contains(at + j / 2 * 8 + j % 2)) x.at[j] = hidden;
    }
  }

 private:
  int col_;
  KeyRange keys_;
  uint32_t bits_;
};

// A mask's bits for a lane's kRows rows of a tile, read ahead of their use.
template <class V, int kRows>
struct TileBits {
  MaskBits<ceil_div(V::kTileKv, 32)> rows[kRows];

  QUIRE_DEVICE void read(const LogitsTile<V>& tile) {
    if constexpr (mask_has_bits(V::kMask)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        rows[i].read(tile.mask.bits, tile.mask.bit_of(tile.qo_idx(i), tile.key),
                     min(V::kTileKv, tile.mask.kv_len - tile.key));
      }
    }
  }
  QUIRE_DEVICE uint32_t operator()(int i, int, int at) const { return rows[i].word(at / 32); }
};

// Fragments of logits: blocks of 16 rows x 8 keys, of which a lane holds two keys of an upper and of a lower row.
template <class S>
struct Fragment;
template <int kM, int kN>
struct Fragment<Accumulator<kM, kN>> {
  static constexpr int kRows = 2 * kM, kBlocks = kN / 8;  // rows of a lane, blocks side by side
  QUIRE_DEVICE static float* block(Accumulator<kM, kN>& s, int m, int n) { return s.at[m][n]; }
};
template <int size>
struct Fragment<float[size]> {
  static constexpr int kRows = 2, kBlocks = size / 4;
  QUIRE_DEVICE static float* block(float (&s)[size], int, int n) { return s + 4 * n; }
};

// Calls visit(x, visible, place, at) for each four logits x of a lane, rows first. bits(i, qo_idx, at): the mask's bits
// of row i for the tile's keys [at, at + 32).
template <bool kMasked, bool kInside = false, class V, class S, class Bits, class Visit>
QUIRE_DEVICE void for_each_logit(S& s, const LogitsTile<V>& tile, Bits&& bits, Visit&& visit) {
  using F = Fragment<S>;
  static_assert(F::kBlocks % 2 == 0, "logits are visited in pairs of blocks of 8 keys");
#pragma unroll
  for (int i = 0; i < F::kRows; ++i) {
    const int qo_idx = tile.qo_idx(i), h = 2 * (i % 2);
    VisibleKeys<V> visible(tile, qo_idx);
#pragma unroll
    for (int n = 0; n < F::kBlocks; n += 2) {
      const int at = 8 * n;
      if (kMasked && VisibleKeys<V>::kHasBits && at % 32 == 0) visible.set_bits(bits(i, qo_idx, at), at);
      float *left = F::block(s, i / 2, n) + h, *right = F::block(s, i / 2, n + 1) + h;
      Four<float> x = {left[0], left[1], right[0], right[1]};
      visit(x, visible, LogitsPlace<V, kInside>{tile, i, qo_idx, at}, at);
      left[0] = x.at[0], left[1] = x.at[1], right[0] = x.at[2], right[1] = x.at[3];
    }
  }
}

// Whether the neighbours that a score reads are inside its tensors for all logits of a warp.
template <class V, class S>
QUIRE_DEVICE bool reads_inside(const ExpressionOf<V>& expression, const LogitsTile<V>& tile) {
  using F = Fragment<S>;
  bool inside = true;
#pragma unroll
  for (int i = 0; i < F::kRows; ++i) {
    const KeyPlace<V> first = {tile, i, tile.key}, last = {tile, i, tile.key + 8 * F::kBlocks - 1};
    inside = inside && V::template reads_inside<ExpressionMath>(expression.operands, first) &&
             V::template reads_inside<ExpressionMath>(expression.operands, last);
  }
  return __all_sync(0xffffffffu, inside) != 0;
}

// q . k becomes score(q . k), -infinity where kMasked and the query does not see the key.
template <bool kMasked, class V, class Math, class S, class Bits>
QUIRE_DEVICE void score_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile,
                               Bits&& bits) {
  constexpr bool kIsIdentity = LogitsTransform<V, Math>::kIsIdentity;
  if constexpr (kIsIdentity && !kMasked) return;
  if constexpr (has_linear_reads<V>() && !kMasked) {
    if (reads_inside<V, S>(transform, tile)) {
      for_each_logit<false, true>(
          s, tile, bits, [&](Four<float>& x, const auto&, const auto& place, int) { x = transform.score(x, place); });
      return;
    }
  }
  for_each_logit<kMasked>(s, tile, bits, [&](Four<float>& x, const auto& visible, const auto& place, int at) {
    if constexpr (!kIsIdentity) {
      // Memory beyond the keys may hold a NaN, which must not reach the other logit of its pair.
      if constexpr (kMasked && Math::kPairs) visible.hide(x, at, 0.f);
      x = transform.score(x, place);
    }
    if constexpr (kMasked) visible.hide(x, at, __int_as_float(0xff800000));
    if constexpr (kMasked && V::kScoreMask != 0) {
      x = Math::where(V::template mask<Math>(transform.operands, place), x, __int_as_float(0xff800000));
    }
  });
}

// ALiBi for a softmax that adds an offset to each row: what differs between a lane's keys of a tile costs a
// multiply-add a logit, the rest is the offset.
template <class V, int kRows>
struct RowRamps {
  float step[kRows];  // from key to key, of q . k

  // scale: of q . k.
  template <class Math>
  QUIRE_DEVICE void set(const LogitsTransform<V, Math>& transform, float scale, const LogitsTile<V>& tile) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) step[i] = __fdividef(transform.bias_step(LogitsPlace<V>{tile, i, 0, 0}), scale);
  }

  // q . k becomes score(q . k) / scale, but for the offset of its row.
  template <bool kMasked, class S, class Bits>
  QUIRE_DEVICE void score(S& s, const LogitsTile<V>& tile, Bits&& bits) const {
    for_each_logit<kMasked>(s, tile, bits, [&](Four<float>& x, const auto& visible, const auto& place, int at) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x.at[j] = fmaf(step[place.i], static_cast<float>(at + j / 2 * 8 + j % 2), x.at[j]);
      if constexpr (kMasked) visible.hide(x, at, __int_as_float(0xff800000));
    });
  }

  // The scaled bias of the lane's first key of the tile.
  QUIRE_DEVICE float offset(float scale, const LogitsTile<V>& tile, int i) const {
    const int stands = tile.qo_idx(i) + (tile.mask.kv_len - tile.mask.qo_len);
    return step[i] * scale * static_cast<float>(tile.key + 2 * (tile.lane & 3) - stands);
  }
};

// score_logits() with bits that are read where they are used.
template <bool kMasked, class V, class Math, class S>
QUIRE_DEVICE void score_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile) {
  score_logits<kMasked>(s, transform, tile,
                        [&](int, int qo_idx, int at) { return visible_word(tile.mask, qo_idx, tile.key + at); });
}

}  // namespace quire
