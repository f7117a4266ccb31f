// Hides keys in a warpgroup's logits.
#pragma once
#include "quire/core/mask.h"
#include "quire/tile/job.cuh"

namespace quire {

// 32 bits of a custom mask from bit `at` on, of which `count` are wanted; the others may be anything. Reads aligned
// words that hold some of the wanted bits and no others, without a branch, so that many such reads are under way.
QUIRE_DEVICE uint32_t mask_bits(const uint8_t* bits, int64_t at, int count) {
  if (count <= 0) return 0;
  const uint64_t address = reinterpret_cast<uint64_t>(bits) + static_cast<uint64_t>(at >> 3);
  const uint32_t* word = reinterpret_cast<const uint32_t*>(address & ~uint64_t{3});
  const int shift = static_cast<int>((address & 3) * 8 + (at & 7));
  return __funnelshift_r(__ldg(word), __ldg(word + (shift + min(count, 32) > 32 ? 1 : 0)), shift);
}

// Ones below bit `count`, whatever that is.
QUIRE_DEVICE uint32_t low_bits(int count) { return ~__funnelshift_lc(0u, 0xffffffffu, max(count, 0)); }

// The mask as one lane sees it: rows row and row + 8 (packed). Rows past the request's last repeat its last query.
template <class V>
struct RowMask {
  int qo_idx[2];

  QUIRE_DEVICE RowMask(const FastDivisor& group, const Job& job, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) qo_idx[h] = min(group.div(row + 8 * h), job.qo_len - 1);
  }

  // s [64 rows, kN keys from key_begin]: -inf wherever the row's query does not see the key.
  template <int n>
  QUIRE_DEVICE void hide_keys(float (&s)[n], const AttentionParams& p, const Job& job, int key_begin, int lane) const {
    const uint8_t* all_bits = nullptr;
    if constexpr (V::kMask == kMaskCustom) all_bits = p.mask + p.mask_indptr[job.piece.tile.request];
    const Mask<V::kMask, V::kWindow != 0> mask = {job.qo_len, job.kv_len, p.window_left, all_bits};
    const int col = 2 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = mask.visible(qo_idx[h]);
      const int begin = keys.begin - key_begin - col, end = keys.end - key_begin - col;
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        const int block = i / 4;
        if constexpr (V::kMask == kMaskCustom) {
          if (block % 4 == 0) {
            const int key = key_begin + 8 * block;
            bits = mask_bits(all_bits, static_cast<int64_t>(qo_idx[h]) * job.kv_len + key, job.kv_len - key);
            bits &= low_bits(keys.end - key);
            if constexpr (V::kWindow != 0) bits &= ~low_bits(keys.begin - key);
            bits >>= col;
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = 8 * block + j;
          bool sees;
          if constexpr (V::kMask == kMaskCustom) {
            sees = (bits >> (at % 32)) & 1;  // low_bits() has taken out what range and window hide
          } else {
            sees = at < end && (V::kWindow == 0 || at >= begin);
          }
          if (!sees) s[i + 2 * h + j] = __int_as_float(0xff800000);
        }
      }
    }
  }
};

}  // namespace quire
