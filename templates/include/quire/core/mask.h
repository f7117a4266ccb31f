// Which keys a query sees, for every backend and for the scheduler.
//   causal: aligned at the bottom right; query qo_idx has position qo_idx + kv_len - qo_len and sees the keys up to it
//   window: a query sees the window_left keys left of its position, and the key at its position
//   custom: bits for all queries and keys; replaces causal, and the window still applies
//   chunked: causal, with keys in chunks of window_left + 1, of which a query sees none before the chunk of its
//   position tree:   bits for the last qo_len keys (draft tokens of speculative decoding); every query sees all keys
//   before them
// The mask of a variant's expression (core/expression.h) hides further keys. No query sees a key at or beyond kv_len.
#pragma once
#include "quire/core/params.h"

namespace quire {

constexpr int kMaskNone = 0;
constexpr int kMaskCausal = 1;
constexpr int kMaskCustom = 2;
constexpr int kMaskTree = 3;
constexpr int kMaskChunked = 4;

QUIRE_HD constexpr bool mask_has_bits(int mask) { return mask == kMaskCustom || mask == kMaskTree; }

// Block mask: what the rows of a row tile see of a KV tile under a custom mask. Empty: 0; partial: kBlockVisible; full:
// both.
constexpr uint8_t kBlockVisible = 1;  // at least one row sees at least one key
constexpr uint8_t kBlockFull = 2;     // all rows see all keys

// Whether plan() computes a block mask for the variant: from the bits of a custom mask, or from a mask expression.
template <class V>
QUIRE_HD constexpr bool has_block_mask() {
  return V::kMask == kMaskCustom || V::kScoreMask != 0;
}

// Keys [begin, end); empty when end <= begin.
struct KeyRange {
  int32_t begin, end;

  QUIRE_HD bool empty() const { return end <= begin; }
  QUIRE_HD bool contains(int key) const { return key >= begin && key < end; }
  QUIRE_HD bool covers(KeyRange other) const { return begin <= other.begin && other.end <= end; }
  QUIRE_HD KeyRange within(KeyRange other) const { return {max(begin, other.begin), min(end, other.end)}; }
};

// The keys that a query at `position` sees, before mask bits hide some of them. window_left is -1 if there is no window
// and no chunks.
QUIRE_HD KeyRange visible_from(int mask_mode, int window_left, int kv_len, int position) {
  const bool chunked = mask_mode == kMaskChunked;
  KeyRange range = {0, kv_len};
  if (mask_mode == kMaskCausal || chunked) range.end = max(0, min(kv_len, position + 1));
  if (window_left >= 0 && position > window_left)
    range.begin = position - (chunked ? position % (window_left + 1) : window_left);
  return range;
}

// The keys that at least one query of [first, last] sees: both ends of a query's range move right with the query.
QUIRE_HD KeyRange visible_to_any(int mask_mode, int window_left, int qo_len, int kv_len, int first, int last) {
  const int diagonal = kv_len - qo_len;  // position of query 0
  return {visible_from(mask_mode, window_left, kv_len, first + diagonal).begin,
          visible_from(mask_mode, window_left, kv_len, last + diagonal).end};
}

template <int kMask, bool kWindow>
struct Mask {
  static_assert(kMask >= kMaskNone && kMask <= kMaskChunked, "kMask is none, causal, custom, tree or chunked");

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

  // The keys that the query sees, before mask bits hide some of them.
  QUIRE_HD KeyRange visible(int qo_idx) const {
    return visible_from(kMask, kWindow ? window_left : -1, kv_len, qo_idx + (kv_len - qo_len));
  }

  // The keys that at least one query of [first, last] sees, and those that all of them see whatever the bits are: both
  // ends of a query's range move right with the query.
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

  // The first key that has a bit: every query sees the keys before it. All later keys have bits.
  QUIRE_HD int first_key_with_bit() const { return kMask == kMaskTree ? max(0, kv_len - qo_len) : 0; }

  // Index in `bits` of the bit of a query and a key.
  QUIRE_HD int64_t bit_of(int qo_idx, int key) const {
    if constexpr (kMask == kMaskTree)
      return static_cast<int64_t>(qo_idx) * (32 * tree_words(qo_len)) + (key - (kv_len - qo_len));
    return static_cast<int64_t>(qo_idx) * kv_len + key;
  }

  // Mask bits of a query for keys [key, key + 32), `key` at bit 0; bits from kv_len on are 0. Only hosts call this
  // function: it reads no byte without a wanted bit. GPUs call visible_word (tile/shared/mask_bits.cuh).
  QUIRE_HD uint32_t word(int qo_idx, int key) const {
    const int first = max(key, first_key_with_bit()), skipped = min(32, first - key);
    const int count = min(32 - skipped, kv_len - first);
    const uint64_t without_bit = (uint64_t{1} << skipped) - 1;
    if (count <= 0) return static_cast<uint32_t>(without_bit);
    const int64_t at = bit_of(qo_idx, first);
    const uint8_t* byte = bits + (at >> 3);
    const int shift = static_cast<int>(at & 7), num_bytes = (shift + count + 7) >> 3;
    uint64_t found = 0;
    for (int i = 0; i < num_bytes; ++i) found |= static_cast<uint64_t>(byte[i]) << (8 * i);
    found = (found >> shift) & (0xffffffffu >> (32 - count));
    return static_cast<uint32_t>(found << skipped | without_bit);
  }

 private:
  QUIRE_HD static int tree_words(int qo_len) { return ceil_div(qo_len, 32); }
};

}  // namespace quire
