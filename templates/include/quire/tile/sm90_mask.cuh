// Hides keys in a warpgroup's logits.
#pragma once
#include "quire/tile/current_work.cuh"
#include "quire/tile/mask_bits.cuh"

namespace quire {

// The mask as one lane sees it: rows row and row + 8 (packed) of a request, which past its last row repeat its last
// query, and the keys of a tile from key_begin on. look() may run long before hide().
template <class V, bool kHasBits = V::kMask == kMaskCustom>
struct RowMask {
  QUIRE_DEVICE void look(const AttentionParams&, const WorkTile&, const uint8_t*, int, int) {}

  // s [64 rows, keys of a tile]: -inf wherever the row's query does not see the key.
  template <int n>
  QUIRE_DEVICE void hide(float (&s)[n], const AttentionParams& p, const WorkTile& work, int row, int key_begin,
                         int lane) const {
    const Mask<V::kMask, V::kWindow != 0> mask = {work.tile.qo_len, work.tile.kv_len, p.window_left, nullptr};
    const int first = key_begin + 2 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = mask.visible(min(p.group.div(row + 8 * h), work.tile.qo_len - 1));
      const int begin = keys.begin - first, end = keys.end - first;
#pragma unroll
      for (int i = 0; i < n; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = 2 * i + j;
          if (!(at < end && (V::kWindow == 0 || at >= begin))) s[i + 2 * h + j] = __int_as_float(0xff800000);
        }
      }
    }
  }
};

template <class V>
struct RowMask<V, true> {
  static constexpr int kWords = ceil_div(V::kTileKv, 32);
  MaskBits<kWords> rows[2];

  QUIRE_DEVICE void look(const AttentionParams& p, const WorkTile& work, const uint8_t* bits, int row, int key_begin) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows[h].read(bits, static_cast<int64_t>(qo_idx(p, work, row + 8 * h)) * work.tile.kv_len + key_begin,
                   min(V::kTileKv, work.tile.kv_len - key_begin));
    }
  }

  template <int n>
  QUIRE_DEVICE void hide(float (&s)[n], const AttentionParams& p, const WorkTile& work, int row, int key_begin,
                         int lane) const {
    const Mask<kMaskNone, V::kWindow != 0> mask = {work.tile.qo_len, work.tile.kv_len, p.window_left, nullptr};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyRange keys = mask.visible(V::kWindow == 0 ? 0 : qo_idx(p, work, row + 8 * h));
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        if (i % 16 == 0) {
          const int key = key_begin + 2 * i;
          bits = rows[h].word(i / 16) & low_bits(keys.end - key);
          if constexpr (V::kWindow != 0) bits &= ~low_bits(keys.begin - key);
          bits >>= 2 * (lane & 3);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (!(bits >> (2 * i + j) % 32 & 1)) s[i + 2 * h + j] = __int_as_float(0xff800000);
        }
      }
    }
  }

 private:
  QUIRE_DEVICE static int qo_idx(const AttentionParams& p, const WorkTile& work, int row) {
    return min(p.group.div(row), work.tile.qo_len - 1);
  }
};

}  // namespace quire
