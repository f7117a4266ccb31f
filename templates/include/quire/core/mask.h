// Which keys a query sees. One place for every backend: causal is bottom-right (query qo_idx stands at key
// qo_idx + kv_len - qo_len), a window keeps window_left keys to the left of that and the key itself, a custom mask
// replaces causal and still obeys the window, a tree mask is a custom mask of the last qo_len keys alone (the draft of
// speculative decoding; all keys before them are seen), and no key at or beyond kv_len exists.
#pragma once
#include "quire/core/params.h"

namespace quire {

constexpr int kMaskNone = 0;
constexpr int kMaskCausal = 1;
constexpr int kMaskCustom = 2;
constexpr int kMaskTree = 3;

QUIRE_HD constexpr bool mask_has_bits(int mask) { return mask == kMaskCustom || mask == kMaskTree; }

// What the rows of a tile see of a tile of keys under a custom mask; neither bit: nothing.
constexpr uint8_t kBlockVisible = 1;  // some row sees some key
constexpr uint8_t kBlockFull = 2;     // all rows see all keys

// Keys [begin, end); empty when end <= begin.
struct KeyRange {
  int32_t begin, end;

  QUIRE_HD bool empty() const { return end <= begin; }
  QUIRE_HD bool contains(int key) const { return key >= begin && key < end; }
  QUIRE_HD bool covers(KeyRange other) const { return begin <= other.begin && other.end <= end; }
  QUIRE_HD KeyRange within(KeyRange other) const { return {max(begin, other.begin), min(end, other.end)}; }
};

// The keys that query `qo_idx` sees, before bits hide some of them. window_left: -1 is no window.
QUIRE_HD KeyRange visible_to(int mask_mode, int window_left, int qo_len, int kv_len, int qo_idx) {
  KeyRange range = {0, kv_len};
  const int position = qo_idx + (kv_len - qo_len);
  if (mask_mode == kMaskCausal) range.end = max(0, min(kv_len, position + 1));
  if (window_left >= 0 && position > window_left) range.begin = position - window_left;
  return range;
}

// The keys that at least one query of [first, last] sees: both ends of a query's range move right with the query.
QUIRE_HD KeyRange visible_to_any(int mask_mode, int window_left, int qo_len, int kv_len, int first, int last) {
  return {visible_to(mask_mode, window_left, qo_len, kv_len, first).begin,
          visible_to(mask_mode, window_left, qo_len, kv_len, last).end};
}

template <int kMask, bool kWindow>
struct Mask {
  static_assert(kMask >= kMaskNone && kMask <= kMaskTree, "kMask is none, causal, custom or tree");

  int32_t qo_len;
  int32_t kv_len;
  int32_t window_left;  // read with kWindow; -1: no window in this launch
  // Of this request, little-endian. custom: [qo_len, kv_len] bits; tree: [qo_len, ceil(qo_len / 32)] words of 32, bit
  // j of a row for key kv_len - qo_len + j.
  const uint8_t* bits;

  // The mask of a tile's request.
  QUIRE_HD static Mask of(const AttentionParams& p, const RowTile& tile) {
    const uint8_t* bits = nullptr;
    if constexpr (kMask == kMaskCustom) bits = p.mask + p.mask_indptr[tile.request];
    if constexpr (kMask == kMaskTree) bits = p.mask + 4 * static_cast<int64_t>(tile.qo_begin) * tree_words(tile.qo_len);
    return {tile.qo_len, tile.kv_len, p.window_left, bits};
  }

  // The keys that the query sees, before bits hide some of them.
  QUIRE_HD KeyRange visible(int qo_idx) const {
    return visible_to(kMask, kWindow ? window_left : -1, qo_len, kv_len, qo_idx);
  }

  // The keys that some query of [first, last] sees, and those that all of them see whatever the bits say: both ends
  // move right with qo_idx.
  QUIRE_HD KeyRange any(int first, int last) const { return {visible(first).begin, visible(last).end}; }
  QUIRE_HD KeyRange all(int first, int last) const {
    if constexpr (kMask == kMaskCustom) return {0, 0};
    if constexpr (kMask == kMaskTree) return {visible(last).begin, max(0, kv_len - qo_len)};
    return {visible(last).begin, visible(first).end};
  }

  // True when a tile of queries [first, last] and `keys` needs no masking at all.
  QUIRE_HD bool full(int first, int last, KeyRange keys) const {
    if constexpr (kMask == kMaskCustom) return false;
    return all(first, last).covers(keys);
  }

  // Bits of keys [key, key + 32) of a query, key at bit 0; 0 from kv_len on. Reads no byte that holds none of them.
  QUIRE_HD uint32_t word(int qo_idx, int key) const {
    const int count = min(32, kv_len - key);
    if (count <= 0) return 0;
    if constexpr (kMask == kMaskTree) return tree_word(qo_idx, key - (kv_len - qo_len));
    const int64_t at = static_cast<int64_t>(qo_idx) * kv_len + key;
    const uint8_t* byte = bits + (at >> 3);
    const int shift = static_cast<int>(at & 7), num_bytes = (shift + count + 7) >> 3;
    uint64_t word = 0;
    for (int i = 0; i < num_bytes; ++i) word |= static_cast<uint64_t>(byte[i]) << (8 * i);
    return static_cast<uint32_t>(word >> shift) & (0xffffffffu >> (32 - count));
  }

 private:
  QUIRE_HD static int tree_words(int qo_len) { return ceil_div(qo_len, 32); }

  // Bits of draft keys [at, at + 32), those before the first of them set; at < qo_len.
  QUIRE_HD uint32_t tree_word(int qo_idx, int at) const {
    if (at <= -32) return 0xffffffffu;
    const int num_words = tree_words(qo_len), first = max(at, 0) / 32;
    const uint32_t* row = reinterpret_cast<const uint32_t*>(bits) + static_cast<int64_t>(qo_idx) * num_words;
    const uint64_t low = row[first], high = first + 1 < num_words ? row[first + 1] : 0;
    // The row's last word may be filled up with anything: what lies beyond the draft is not there.
    const int left = qo_len - 32 * first;
    const uint64_t found = (low | high << 32) & (left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1);
    if (at >= 0) return static_cast<uint32_t>(found >> (at % 32));
    return static_cast<uint32_t>(found << -at) | ((1u << -at) - 1);
  }
};

}  // namespace quire
