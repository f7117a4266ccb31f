// The order of instructions within a KV tile of fa2, where the algorithm leaves a choice.
#pragma once
#include "quire/core/mask.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

struct Fa2Pipeline {
  int keys_after;      // the step of o += p v after which the copies for the next KV tile start
  int values_at_once;  // blocks of v that ptxas may load ahead of their use; 0: those of a whole step
  bool end_late;       // the test for the last KV tile comes in the last step, not before the first
};

// Chooses an order for each variant so that none spills. A warp with 32 rows keeps 192 registers of o and s; ptxas
// fills the other 63 with fragments that it loads ahead, and exceeds them by one or two. Only the order differs:
// results are the same, bit for bit. After a change of the main loop, check "spills" in the manifests of variants.
template <class V>
constexpr Fa2Pipeline fa2_pipeline() {
  constexpr int kQk = whole_blocks(V::kHeadDimQk), kVo = whole_blocks(V::kHeadDimVo);
  // From sm_100 on ptxas takes more registers, of which heads of 256 leave none: copies of pages go first.
  constexpr bool kIsFull = ptx::kFromSm100 && kVo > 192 && V::kPaged != 0;
  constexpr Fa2Pipeline kUsual = {V::kTileKv < 64 || kIsFull ? 0 : 1, 0, false};
  if constexpr (V::kTileRows < 128) return kUsual;
  // Page offsets beside 128 logits a row: copies a step earlier than usual, which ptxas fits where it misses by two.
  if constexpr (kQk <= 64 && V::kPaged != 0) return {0, 0, false};
  if constexpr (kVo != 128) return kUsual;
  if constexpr (kQk == 128) {
    // ptxas wants up to ten registers more than on sm_90: copies wait until most of s is used, v comes in twos.
    // Paged, under a mask of bits or a window alone, copies go first instead.
    constexpr bool kBits = V::kMask == kMaskCustom || V::kMask == kMaskTree;
    constexpr bool kEarly = V::kPaged != 0 && (kBits || (V::kMask == kMaskNone && V::kWindow != 0));
    if constexpr (ptx::kBeforeSm90) return kEarly ? Fa2Pipeline{0, 4, true} : Fa2Pipeline{2, 2, true};
    if constexpr (V::kPosEncoding != 0) return {2, 0, true};
    // A custom mask, a cap, or ragged keys without any mask: copies wait until most of s is used, v comes in fours.
    constexpr bool kCustom = V::kMask == kMaskCustom, kCap = V::kSoftCap != 0;
    constexpr bool kAll = V::kMask == kMaskNone && V::kWindow == 0;
    if constexpr (V::kPaged == 0 ? kCap || kCustom || kAll : kCap && kCustom) return {2, 4, false};
  }
  if constexpr (kQk == 192 && V::kPaged != 0) {
    // One stage: only k is copied here. No one order fits both generations.
    if constexpr (ptx::kBeforeSm90) return {2, 0, false};
    return {1, 0, true};
  }
  return kUsual;
}

}  // namespace quire
