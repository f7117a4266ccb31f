// The logits of a tile that a lane holds. One visitor goes through them row by row, and applies the transform
// (core/logits.h) and the mask (core/mask.h); only here do these reach logits. mma.m16n8k16 and wgmma leave logits in
// the same places, so that both use the visitor.
#pragma once
#include "quire/core/logits.h"
#include "quire/tile/shared/expression.cuh"
#include "quire/tile/shared/gemm.cuh"
#include "quire/tile/shared/mask_bits.cuh"
#include "quire/tile/shared/tanh.cuh"

namespace quire {

// The request, rows and keys of a lane's logits.
template <class V>
struct LogitsTile {
  Mask<V::kMask, V::kWindow != 0> mask;  // of the request
  const FastDivisor& group;
  int request, kv_head;
  int row;  // the lane's first packed row; rows past the request's last repeat its last query
  int key;  // the tile's first key
  int lane;

  // The query of the lane's row i. Rows of a lane are 8 rows apart.
  QUIRE_DEVICE int qo_idx(int i) const { return min(group.div(row + 8 * i), mask.qo_len - 1); }
};

// What an expression may read of a row: its query, and all keys of its request.
template <class V>
struct KeyPlace {
  const LogitsTile<V>& tile;
  int i;

  QUIRE_DEVICE int q_idx() const { return tile.qo_idx(i); }
  QUIRE_DEVICE Ramp<int32_t> kv_idx() const { return {0, 1, 0}; }
  QUIRE_DEVICE int head() const {
    return tile.kv_head * static_cast<int>(tile.group.divisor) + tile.group.mod(tile.row + 8 * i);
  }
  QUIRE_DEVICE int request() const { return tile.request; }
  QUIRE_DEVICE int qo_len() const { return tile.mask.qo_len; }
  QUIRE_DEVICE int kv_len() const { return tile.mask.kv_len; }
};

// Where four logits of one row are, for transforms and masks: the logits of the lane's keys at, at + 1, at + 8 and at +
// 9. kInside: for all keys of the KV tile, the neighbouring elements that a score reads are inside their tensors.
template <class V, bool kInside_ = false>
struct LogitsPlace {
  static constexpr bool kInside = kInside_;
  const LogitsTile<V>& tile;
  int i, qo_idx, at;

  QUIRE_DEVICE int first_key() const { return tile.key + 2 * (tile.lane & 3); }  // of the lane
  QUIRE_DEVICE int q_idx() const { return qo_idx; }
  // The lane's first key of the tile minus the query's position.
  QUIRE_DEVICE int distance() const { return first_key() - (qo_idx + (tile.mask.kv_len - tile.mask.qo_len)); }
  // This takes one instruction a key: `at` is a constant, and the first key's distance is the same for all keys of a
  // row.
  QUIRE_DEVICE Four<float> ramp(float step) const {
    const float first = step * static_cast<float>(distance()), after = static_cast<float>(at);
    return {fmaf(step, after, first), fmaf(step, after + 1.f, first), fmaf(step, after + 8.f, first),
            fmaf(step, after + 9.f, first)};
  }
  QUIRE_DEVICE int head() const {
    return tile.kv_head * static_cast<int>(tile.group.divisor) + tile.group.mod(tile.row + 8 * i);
  }
  QUIRE_DEVICE int request() const { return tile.request; }
  QUIRE_DEVICE int qo_len() const { return tile.mask.qo_len; }
  QUIRE_DEVICE int kv_len() const { return tile.mask.kv_len; }
  QUIRE_DEVICE Ramp<int32_t> kv_idx() const { return {first_key(), 1, at}; }
};

// Which keys of a tile the query of a row sees. Keys are counted from the lane's first key.
template <class V>
class VisibleKeys {
 public:
  static constexpr bool kHasBits = mask_has_bits(V::kMask);

  QUIRE_DEVICE VisibleKeys(const LogitsTile<V>& tile, int qo_idx) : col_(2 * (tile.lane & 3)) {
    const KeyRange keys = tile.mask.visible(qo_idx);
    const int first = tile.key | (kHasBits ? 0 : col_);  // a tile begins at a multiple of 8 keys
    keys_ = {keys.begin - first, keys.end - first};
  }

  // Gives the mask bits of the tile's keys [at, at + 32); `at` is a multiple of 32.
  QUIRE_DEVICE void set_bits(uint32_t bits, int at) {
    bits &= low_bits(keys_.end - at);
    if constexpr (V::kWindow != 0) bits &= ~low_bits(keys_.begin - at);
    bits_ = bits >> col_;
  }

  QUIRE_DEVICE bool contains(int at) const {
    if constexpr (kHasBits) return (bits_ >> at % 32 & 1) != 0;
    return at < keys_.end && (V::kWindow == 0 || at >= keys_.begin);
  }

  // For masks without bits in memory: a bit for each of the lane's keys, two of each 8.
  QUIRE_DEVICE uint32_t lane_bits() const {
    const uint32_t ends = low_bits(count_before(keys_.end));
    return V::kWindow != 0 ? ends & ~low_bits(count_before(keys_.begin)) : ends;
  }

  // Sets `x` to `hidden` where the query does not see the key. The first key is `at`.
  QUIRE_DEVICE void hide(Four<float>& x, int at, float hidden) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!contains(at + j / 2 * 8 + j % 2)) x.at[j] = hidden;
    }
  }

 private:
  QUIRE_DEVICE static int count_before(int key) { return (key >> 3) * 2 + min(key & 7, 2); }

  int col_;
  KeyRange keys_;
  uint32_t bits_;
};

// The mask bits of a tile for a lane's kRows rows, read ahead of their use.
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
  static constexpr bool hides = true;
};

// Which keys of a tile a lane's kRows rows see, including the mask of an expression. This is computed before the logits
// are there: registers are then free, and loads of the mask delay nothing.
template <class V, int kRows>
struct SeenKeys {
  static_assert(V::kTileKv <= 128, "a lane has up to 32 keys of a row");
  uint32_t words[kRows];  // a bit for each key
  bool hides;             // whether some row of the warp does not see some key

  // If four rows belong to one query, they divide its keys among them, unless the mask differs between heads of the
  // group. All lanes take the same steps, because ptxas otherwise does not know that lanes are converged in what
  // follows.
  QUIRE_DEVICE void read(const ExpressionOf<V>& expression, const LogitsTile<V>& tile) {
    const bool is_shared = V::kMaskHeads % tile.group.divisor == 0 && tile.group.divisor % 4 == 0;
    const int share = is_shared ? 4 : 1, part = is_shared ? tile.lane / 4 % 4 : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) words[i] = 0;
#pragma unroll 1
    for (int first = 0; first < kFours; first += share) {
      const int n = first + part;
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        words[i] |= four(expression, LogitsPlace<V>{tile, i, tile.qo_idx(i), 16 * n}) << 4 * n;
    }
    hides = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      words[i] |= is_shared ? __shfl_xor_sync(0xffffffffu, words[i], 4) : 0;
      words[i] |= is_shared ? __shfl_xor_sync(0xffffffffu, words[i], 8) : 0;
      words[i] &= VisibleKeys<V>(tile, tile.qo_idx(i)).lane_bits();
      hides |= (~words[i] & low_bits(4 * kFours)) != 0;
    }
    hides = ptx::uniform(__any_sync(0xffffffffu, hides)) != 0;
  }

  QUIRE_DEVICE void hide(Four<float>& x, int i, int at, float hidden) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((words[i] >> (at / 4 + j) & 1) == 0) x.at[j] = hidden;
    }
  }

 private:
  static constexpr int kFours = V::kTileKv / 16;  // fours of a row's logits in a lane

  QUIRE_DEVICE static uint32_t four(const ExpressionOf<V>& expression, const LogitsPlace<V>& place) {
    auto sees = V::template mask<ExpressionMath>(expression.operands, place);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) bits |= OfKeys<decltype(sees)>::get(sees, j) ? 1u << j : 0u;
    return bits;
  }
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

// Calls visit(x, visible, place, at) for each four logits x of a lane, row by row. bits(i, qo_idx, at) returns the mask
// bits of row i for the tile's keys [at, at + 32).
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
      if constexpr (kMasked && VisibleKeys<V>::kHasBits) {
        if (at % 32 == 0) visible.set_bits(bits(i, qo_idx, at), at);
      }
      float *left = F::block(s, i / 2, n) + h, *right = F::block(s, i / 2, n + 1) + h;
      Four<float> x = {left[0], left[1], right[0], right[1]};
      visit(x, visible, LogitsPlace<V, kInside>{tile, i, qo_idx, at}, at);
      left[0] = x.at[0], left[1] = x.at[1], right[0] = x.at[2], right[1] = x.at[3];
    }
  }
}

// The keys for which the neighbouring elements that a score reads are inside their tensors, for all rows of a warp.
template <int kRows, class V>
QUIRE_DEVICE KeyRange keys_inside(const ExpressionOf<V>& expression, LogitsTile<V> tile) {
  KeyRange inside = {0, tile.mask.kv_len};
  tile.key = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const KeyPlace<V> place = {tile, i};
    inside = inside.within(V::template keys_inside<ExpressionMath>(expression.operands, place));
  }
  return inside;
}

// Whether the only transform is a score that adds a bias, independent of q . k.
template <class V>
QUIRE_DEVICE constexpr bool has_bias() {
  return score_pattern<V>() == kPatternBias;
}

// The step of a row's bias from key to key, in base 2: of ALiBi, or of a score that adds a ramp.
template <class V, class Math>
QUIRE_DEVICE auto bias_of(const LogitsTransform<V, Math>& transform, const LogitsPlace<V>& at) {
  if constexpr (score_pattern<V>() == kPatternBias) {
    return Math::mul(V::template bias<Math>(transform.operands, at), float{kLog2e});
  } else {
    const float step = transform.bias_step(at);
    return Ramp<float>{step * static_cast<float>(at.distance()), step, 0};
  }
}

// Whether the only transform is a bias that grows by a constant step from key to key, in all rows.
template <class V, class Math>
QUIRE_DEVICE constexpr bool has_ramps() {
  if constexpr (score_pattern<V>() == kPatternBias) {
    using Bias =
        decltype(V::template bias<Math>(declval<const typename V::Operands&>(), declval<const LogitsPlace<V>&>()));
    return is_same<Bias, Ramp<float>>::value;
  }
  return LogitsTransform<V, Math>::kIsRamp;
}

// The factor by which a score multiplies row i of a lane.
template <class V, class Math>
QUIRE_DEVICE float row_scale_of(const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile, int i) {
  return V::template row_scale<Math>(transform.operands, LogitsPlace<V>{tile, i, tile.qo_idx(i), 0});
}

constexpr float kMinusInfinity = -__builtin_huge_valf();

// Sets logits of keys that the query does not see to `hidden`.
template <class V, class Math, bool kInside, class Bits>
QUIRE_DEVICE void hide_unseen(Four<float>& x, const LogitsTransform<V, Math>& transform, const VisibleKeys<V>& visible,
                              const LogitsPlace<V, kInside>& place, const Bits&, float hidden = kMinusInfinity) {
  visible.hide(x, place.at, hidden);
  if constexpr (V::kScoreMask != 0) x = Math::where(V::template mask<Math>(transform.operands, place), x, hidden);
}
template <class V, class Math, bool kInside, int kRows>
QUIRE_DEVICE void hide_unseen(Four<float>& x, const LogitsTransform<V, Math>&, const VisibleKeys<V>&,
                              const LogitsPlace<V, kInside>& place, const SeenKeys<V, kRows>& seen,
                              float hidden = kMinusInfinity) {
  seen.hide(x, place.i, place.at, hidden);
}

// Sets logits of keys that the query does not see to -infinity.
template <class V, class Math, class S, class Bits>
QUIRE_DEVICE void hide_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile, Bits&& bits) {
  for_each_logit<true>(s, tile, bits, [&](Four<float>& x, const auto& visible, const auto& place, int) {
    hide_unseen(x, transform, visible, place, bits);
  });
}

// q . k becomes score(q . k), -infinity where kMasked and the query does not see the key.
template <bool kMasked, class V, class Math, class S, class Bits>
QUIRE_DEVICE void score_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile,
                               Bits&& bits) {
  constexpr bool kIsIdentity = LogitsTransform<V, Math>::kIsIdentity;
  if constexpr (kIsIdentity && !kMasked) return;
  if constexpr (has_linear_reads<V>() && !kMasked) {
    const KeyRange tile_keys = {tile.key, tile.key + 8 * Fragment<S>::kBlocks};
    if (__all_sync(0xffffffffu, keys_inside<Fragment<S>::kRows>(transform, tile).covers(tile_keys)) != 0) {
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
    if constexpr (kMasked) hide_unseen(x, transform, visible, place, bits);
  });
}

// A mark, smaller than every visible logit, for hidden logits before a soft cap is applied.
constexpr float kHiddenLogit = -3.0e38f, kLeastLogit = -2.9e38f;

// Sets q . k to kHiddenLogit where the query does not see the key.
template <class V, class Math, class S, class Bits>
QUIRE_DEVICE void mark_unseen(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile, Bits&& bits) {
  for_each_logit<true>(s, tile, bits, [&](Four<float>& x, const auto& visible, const auto& place, int at) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x.at[j] = ptx::max_nan(x.at[j], kLeastLogit);
    hide_unseen(x, transform, visible, place, bits, kHiddenLogit);
  });
}

// The bias of has_ramps(), for a softmax that adds an offset to each row. The differences between a lane's keys of a
// tile cost a multiply-add a logit; the rest is the offset. Only registers are read for a tile: ptxas would move other
// reads between matrix instructions, which then start later.
template <class V, int kRows>
struct RowRamps {
  float step[kRows];    // of the bias from key to key, in units of q . k
  float first[kRows];   // the bias of the key where the query stands, in base 2
  int distance[kRows];  // from the query to the lane's first key of the KV tile at key 0
  float offset[kRows];  // the bias of the lane's first key of the KV tile that move() was given

  // scale: the factor of q . k, in base 2. A row's values depend on the row alone, not on the rows beside it, bit for
  // bit.
  template <class Math>
  QUIRE_DEVICE void set(const LogitsTransform<V, Math>& transform, float scale, LogitsTile<V> tile) {
    const int column = 2 * (tile.lane & 3);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int qo_idx = tile.qo_idx(i), stands = qo_idx + (tile.mask.kv_len - tile.mask.qo_len);
      tile.key = stands - column;
      const auto bias = bias_of(transform, LogitsPlace<V>{tile, i, qo_idx, 0});
      step[i] = __fdividef(bias.step, scale), first[i] = bias.first, distance[i] = column - stands;
    }
  }

  // Replaces q . k by score(q . k) / scale, less the offset of its row.
  template <bool kMasked, class Math, class S, class Bits>
  QUIRE_DEVICE void score(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile,
                          Bits&& bits) const {
    for_each_logit<kMasked>(s, tile, bits, [&](Four<float>& x, const auto& visible, const auto& place, int at) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x.at[j] = fmaf(step[place.i], static_cast<float>(at + j / 2 * 8 + j % 2), x.at[j]);
      if constexpr (kMasked) hide_unseen(x, transform, visible, place, bits);
    });
  }

  // Replaces q . k by score(q . k), if set() and move() were given a scale of 1. scale: the factor of q . k.
  template <class S>
  QUIRE_DEVICE void add(S& s, float scale, const LogitsTile<V>& tile) const {
    for_each_logit<false>(s, tile, 0, [&](Four<float>& x, const auto&, const auto& place, int at) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float after = static_cast<float>(at + j / 2 * 8 + j % 2);
        x.at[j] = fmaf(x.at[j], scale, fmaf(step[place.i], after, offset[place.i]));
      }
    });
  }

  // Sets the first key of the KV tile for which score() is called next.
  QUIRE_DEVICE void move(float scale, int tile_key) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      offset[i] = fmaf(step[i] * scale, static_cast<float>(tile_key + distance[i]), first[i]);
    }
  }
};

// Some keys of a row, with what a score needs besides the values in ScoreRows.
template <bool kInside_>
struct ScoredKeys {
  static constexpr bool kInside = kInside_;
  int first, at;
  QUIRE_DEVICE Ramp<int32_t> kv_idx() const { return {first, 1, at}; }
};

// The values that a score computes once for each of a lane's rows. They lie in shared memory, in a column of words for
// each lane, because registers are short. From values in registers, moreover, ptxas would compute numbers of keys
// before the matrix instructions end, which takes more registers.
template <class V, class Math>
struct ScoreRows {
  struct Held {
    decltype(V::template row<Math>(declval<const typename V::Operands&>(), declval<const LogitsPlace<V>&>())) rows[2];
    KeyRange inside;  // keys for which neighbours that the score reads are inside its tensors, for all rows of the warp
    int column;       // the lane's first key in a tile
  };
  static constexpr int kWords = ceil_div(static_cast<int>(sizeof(Held)), 4), kBytes = kWords * 128;  // of a warp

  // at: the lane's first word.
  QUIRE_DEVICE static void set(uint32_t at, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile) {
    Held held;
    held.column = 2 * (tile.lane & 3);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      held.rows[i] = V::template row<Math>(transform.operands, LogitsPlace<V>{tile, i, tile.qo_idx(i), 0});
    }
    if constexpr (has_linear_reads<V>()) {
      const KeyRange inside = keys_inside<2>(transform, tile);
      held.inside = {__reduce_max_sync(0xffffffffu, inside.begin), __reduce_min_sync(0xffffffffu, inside.end)};
    }
    uint32_t words[kWords];
    __builtin_memcpy(words, &held, sizeof(held));
#pragma unroll
    for (int i = 0; i < kWords; ++i) ptx::st_shared(at + 128 * i, words[i]);
  }

  // q . k becomes score(q . k), -infinity where kMasked and the query does not see the key.
  template <bool kMasked, int n, class Bits>
  QUIRE_DEVICE static void score(float (&s)[n], uint32_t at, const LogitsTransform<V, Math>& transform,
                                 const LogitsTile<V>& tile, const Bits& bits) {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __float_as_uint(ptx::ld_shared(at + 128 * i));
    Held held;
    __builtin_memcpy(&held, words, sizeof(held));
    if constexpr (has_linear_reads<V>() && !kMasked) {
      if (ptx::uniform(held.inside.covers({tile.key, tile.key + 2 * n}))) {
        score_keys<true>(s, held, transform, tile.key);
        return;
      }
    }
    if constexpr (kMasked && Math::kPairs) {  // as in score_logits()
      for_each_logit<true>(s, tile, bits,
                           [](auto& x, const auto& visible, const auto&, int i) { visible.hide(x, i, 0.f); });
    }
    score_keys<false>(s, held, transform, tile.key);
    if constexpr (kMasked) hide_logits(s, transform, tile, bits);
  }

 private:
  template <bool kInside, int n>
  QUIRE_DEVICE static void score_keys(float (&s)[n], const Held& held, const LogitsTransform<V, Math>& transform,
                                      int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < n; i += 8) {
        float *left = s + i + 2 * h, *right = s + i + 4 + 2 * h;
        const Four<float> x = {left[0], left[1], right[0], right[1]};
        const Four<float> y = transform.score(x, ScoredKeys<kInside>{key + held.column, 2 * i}, held.rows[h]);
        left[0] = y.at[0], left[1] = y.at[1], right[0] = y.at[2], right[1] = y.at[3];
      }
    }
  }
};

// score_logits(), reading mask bits where they are used.
template <bool kMasked, class V, class Math, class S>
QUIRE_DEVICE void score_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile) {
  score_logits<kMasked>(s, transform, tile,
                        [&](int, int qo_idx, int at) { return visible_word(tile.mask, qo_idx, tile.key + at); });
}

// hide_logits(), reading mask bits where they are used.
template <class V, class Math, class S>
QUIRE_DEVICE void hide_logits(S& s, const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile) {
  hide_logits(s, transform, tile,
              [&](int, int qo_idx, int at) { return visible_word(tile.mask, qo_idx, tile.key + at); });
}

}  // namespace quire
