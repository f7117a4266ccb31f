// Hides keys in a warp's logits.
#pragma once
#include "quire/core/mask.h"
#include "quire/core/params.h"
#include "quire/tile/gemm.cuh"

namespace quire {

// As Mask::word, from one or two aligned words: of those it reads, each holds at least one of the bits asked for.
template <int kMask, bool kWindow>
QUIRE_DEVICE uint32_t mask_word(const Mask<kMask, kWindow>& mask, int qo_idx, int key) {
  if constexpr (kMask == kMaskTree) return mask.word(qo_idx, key);
  const int count = min(32, mask.kv_len - key);
  if (count <= 0) return 0;
  const int64_t at = static_cast<int64_t>(qo_idx) * mask.kv_len + key;
  const uint64_t byte = reinterpret_cast<uint64_t>(mask.bits) + (at >> 3);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(byte & ~uint64_t{3});
  const int shift = static_cast<int>(byte & 3) * 8 + static_cast<int>(at & 7);
  const uint32_t low = words[0], high = shift + count > 32 ? words[1] : 0;
  return __funnelshift_r(low, high, shift);
}

// s [kM * 16 packed rows from row_begin, kN keys from key_begin]: -inf wherever the row's query does not see the key.
// Rows past the request's last repeat its last query, so that no mask is read out of bounds.
template <int kMask, bool kWindow, int kM, int kN>
QUIRE_DEVICE void hide_keys(Accumulator<kM, kN>& s, const Mask<kMask, kWindow>& mask, const FastDivisor& group,
                            int row_begin, int key_begin, int lane) {
  const int col = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int qo_idx = min(group.div(row_begin + i * 16 + h * 8 + (lane >> 2)), mask.qo_len - 1);
      const KeyRange keys = mask.visible(qo_idx);
      const int begin = keys.begin - key_begin - col, end = keys.end - key_begin - col;
      uint32_t bits = 0xffffffffu;
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        if constexpr (mask_has_bits(kMask)) {
          if (n % 4 == 0) bits = mask_word(mask, qo_idx, key_begin + 8 * n) >> col;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = 8 * n + j;
          bool sees = at < end;
          if constexpr (kWindow) sees = sees && at >= begin;
          if constexpr (mask_has_bits(kMask)) sees = sees && ((bits >> (at % 32)) & 1);
          if (!sees) s.at[i][n][2 * h + j] = __int_as_float(0xff800000);
        }
      }
    }
  }
}

}  // namespace quire
