// The bulk tensor copy engine.
#pragma once
#include "quire/core/params_fa3.h"

namespace quire::ptx {

QUIRE_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// How long the L2 cache should keep what a copy brings.
enum class L2Policy : uint64_t {
  kNormal = 0x1000000000000000,
  kFirstOut = 0x12f0000000000000,
  kLastOut = 0x14f0000000000000
};

// Copies the map's box at these coordinates, innermost first, to dst and counts its bytes on the barrier. What lies
// outside of the tensor arrives as zeros and counts too.
QUIRE_DEVICE void tma_load_4d(uint32_t dst, const TensorMap* map, uint32_t barrier, L2Policy policy, int c0, int c1,
                              int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(dst),
      "l"(map), "r"(barrier), "l"(static_cast<uint64_t>(policy)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace quire::ptx
