// Reads mask bits in aligned words. The loads start early, at read(); the bits are shifted into place at their use, in
// word().
#pragma once
#include "quire/core/mask.h"
#include "quire/ptx/copy.cuh"

namespace quire {

// A word with ones below bit `count`; `count` may be negative or above 32.
QUIRE_DEVICE uint32_t low_bits(int count) { return ~__funnelshift_lc(0u, 0xffffffffu, max(count, 0)); }

// Up to kWords * 32 bits, with all loads in flight together.
template <int kWords>
struct MaskBits {
  uint32_t words[kWords + 1];
  int shift;

  // Reads `count` > 0 bits from bit `at` on. Bits behind these may be anything: no word without a wanted bit is read.
  QUIRE_DEVICE void read(const uint8_t* bits, int64_t at, int count) {
    const uint64_t address = reinterpret_cast<uint64_t>(bits) + static_cast<uint64_t>(at >> 3);
    const uint32_t* word = reinterpret_cast<const uint32_t*>(address & ~uint64_t{3});
    shift = static_cast<int>((address & 3) * 8 + (at & 7));
    const int last = (shift + count - 1) >> 5;
#pragma unroll
    for (int i = 0; i <= kWords; ++i) words[i] = ptx::ld_global_constant(word + min(i, last));
  }

  // Bits 32 * i to 32 * i + 31.
  QUIRE_DEVICE uint32_t word(int i) const { return __funnelshift_r(words[i], words[i + 1], shift); }
};

// Mask bits of a query for keys [key, key + 32). Bits from kv_len on may be anything.
template <int kMask, bool kWindow>
QUIRE_DEVICE uint32_t visible_word(const Mask<kMask, kWindow>& mask, int qo_idx, int key) {
  const int first = max(key, mask.first_key_with_bit()), skipped = first - key, count = mask.kv_len - first;
  if (skipped >= 32 || count <= 0) return 0xffffffffu;
  MaskBits<1> found;
  found.read(mask.bits, mask.bit_of(qo_idx, first), min(32 - skipped, count));
  return found.word(0) << skipped | low_bits(skipped);
}

}  // namespace quire
