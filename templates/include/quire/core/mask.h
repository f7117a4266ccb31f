// Which keys a query sees. One place for every backend: causal is bottom-right (query qo_idx stands at key
// qo_idx + kv_len - qo_len), a window keeps window_left keys to the left of that and the key itself, a custom mask
// replaces causal and still obeys the window, and no key at or beyond kv_len exists.
#pragma once
#include "quire/core/types.h"

namespace quire {

constexpr int kMaskNone = 0;
constexpr int kMaskCausal = 1;
constexpr int kMaskCustom = 2;

// Keys [begin, end); empty when end <= begin.
struct KeyRange {
  int32_t begin, end;

  QUIRE_HD bool empty() const { return end <= begin; }
  QUIRE_HD bool contains(int key) const { return key >= begin && key < end; }
  QUIRE_HD bool covers(KeyRange other) const { return begin <= other.begin && other.end <= end; }
  QUIRE_HD KeyRange within(KeyRange other) const { return {max(begin, other.begin), min(end, other.end)}; }
};

template <int kMask, bool kWindow>
struct Mask {
  static_assert(kMask >= kMaskNone && kMask <= kMaskCustom, "kMask is none, causal or custom");

  int32_t qo_len;
  int32_t kv_len;
  int32_t window_left;  // read with kWindow; -1: no window in this launch
  const uint8_t* bits;  // custom: [qo_len, kv_len] bits of this request, little-endian within a byte

  // The keys that the query sees, a custom mask's bits apart.
  QUIRE_HD KeyRange visible(int qo_idx) const {
    KeyRange range = {0, kv_len};
    const int position = qo_idx + (kv_len - qo_len);
    if constexpr (kMask == kMaskCausal) range.end = max(0, min(kv_len, position + 1));
    if constexpr (kWindow) {
      if (window_left >= 0 && position > window_left) range.begin = position - window_left;
    }
    return range;
  }

  // The keys that some query of [first, last] sees, and those that all of them see: both ends move right with qo_idx.
  QUIRE_HD KeyRange any(int first, int last) const { return {visible(first).begin, visible(last).end}; }
  QUIRE_HD KeyRange all(int first, int last) const { return {visible(last).begin, visible(first).end}; }

  // True when a tile of queries [first, last] and `keys` needs no masking at all.
  QUIRE_HD bool full(int first, int last, KeyRange keys) const {
    if constexpr (kMask == kMaskCustom) return false;
    return all(first, last).covers(keys);
  }

  // Bits of keys [key, key + 32) of a query, key at bit 0; 0 from kv_len on. Reads no byte that holds none of them.
  QUIRE_HD uint32_t word(int qo_idx, int key) const {
    const int count = min(32, kv_len - key);
    if (count <= 0) return 0;
    const int64_t at = static_cast<int64_t>(qo_idx) * kv_len + key;
    const uint8_t* byte = bits + (at >> 3);
    const int shift = static_cast<int>(at & 7), num_bytes = (shift + count + 7) >> 3;
    uint64_t word = 0;
    for (int i = 0; i < num_bytes; ++i) word |= static_cast<uint64_t>(byte[i]) << (8 * i);
    return static_cast<uint32_t>(word >> shift) & (0xffffffffu >> (32 - count));
  }
};

}  // namespace quire
