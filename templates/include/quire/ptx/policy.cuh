// Copies that tell the L2 cache what to keep.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// For what is read once: first to leave the cache.
QUIRE_DEVICE uint64_t read_once_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies src_bytes (0 or 16) bytes under a policy and fills the rest of the 16 with zeros. With 0 the source is not
// read.
QUIRE_DEVICE void cp_async_16_once(uint32_t dst, const void* src, int src_bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
               "r"(src_bytes), "l"(policy)
               : "memory");
}

}  // namespace quire::ptx
