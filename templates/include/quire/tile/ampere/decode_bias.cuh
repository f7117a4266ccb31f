// A score that adds a bias, in decode: the biases of a warp's next block of keys are on their way from memory while a
// block is computed.
#pragma once
#include "quire/tile/shared/logits.cuh"

namespace quire {

// Blocks of 16 rows x kN keys. A bias that grows evenly from key to key reads nothing for each key.
template <class V, class Math, int kN, bool kFits, bool kExists_ = kFits && has_bias<V>() && !has_ramps<V, Math>()>
struct BiasAhead {
  static constexpr bool kExists = false;
  QUIRE_DEVICE void clear() {}
};

template <class V, class Math, int kN, bool kFits>
struct BiasAhead<V, Math, kN, kFits, true> {
  static constexpr bool kExists = true;
  Accumulator<1, kN> bias, next;
  int next_key;  // -1: none

  QUIRE_DEVICE void clear() {
    next_key = -1;
    bias.clear(), next.clear();
  }

  QUIRE_DEVICE bool has_next(int key) const { return next_key == key; }
  // The block that was read last becomes the present one.
  QUIRE_DEVICE void advance() { bias = next; }

  // Starts to read a block. has_low_rows: whether some of the lower eight rows exist. Groups of up to eight heads have
  // none.
  QUIRE_DEVICE void read(const LogitsTransform<V, Math>& transform, const LogitsTile<V>& tile, bool has_low_rows) {
    next_key = tile.key;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && !has_low_rows) continue;
      const int qo_idx = tile.qo_idx(i);
#pragma unroll
      for (int n = 0; n < kN / 8; n += 2) {
        const LogitsPlace<V> place = {tile, i, qo_idx, 8 * n};
        const Four<float> x = Math::as_logits(V::template bias<Math>(transform.operands, place));
        float *left = next.at[0][n] + 2 * i, *right = next.at[0][n + 1] + 2 * i;
        left[0] = x.at[0], left[1] = x.at[1], right[0] = x.at[2], right[1] = x.at[3];
      }
    }
  }

  // q . k becomes score(q . k).
  QUIRE_DEVICE void add(Accumulator<1, kN>& s, float scale) const {
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.at[0][n][i] = fmaf(s.at[0][n][i], scale, bias.at[0][n][i]);
    }
  }
};

}  // namespace quire
