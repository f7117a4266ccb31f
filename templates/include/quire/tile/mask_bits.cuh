// Bits of a mask in aligned words. The loads start where the bits are asked for; the bits are shifted into place where
// they are used.
#pragma once
#include "quire/core/mask.h"
#include "quire/ptx/copy.cuh"

namespace quire {

// Ones below bit `count`, whatever that is.
QUIRE_DEVICE uint32_t low_bits(int count) { return ~__funnelshift_lc(0u, 0xffffffffu, max(count, 0)); }

// Up to kWords * 32 bits, and the loads of all of them under way together.
template <int kWords>
struct MaskBits {
  uint32_t words[kWords + 1];
  int shift;

  // From bit `at` on; `count` > 0 are wanted, the others may be anything: no word is read that holds none of them.
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

// Bits of keys [key, key + 32) of a query; anything from kv_len on.
template <int kMask, bool kWindow>
QUIRE_DEVICE uint32_t visible_word(const Mask<kMask, kWindow>& mask, int qo_idx, int key) {
  const int first = max(key, mask.first_key_with_bit()), skipped = first - key, count = mask.kv_len - first;
  if (skipped >= 32 || count <= 0) return 0xffffffffu;
  MaskBits<1> found;
  found.read(mask.bits, mask.bit_of(qo_idx, first), min(32 - skipped, count));
  return found.word(0) << skipped | low_bits(skipped);
}

}  // namespace quire
