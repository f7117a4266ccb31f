// The order of instructions within a KV tile of fa2, where the algorithm leaves a choice.
#pragma once
#include "quire/core/mask.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

// An order of the instructions of one KV tile.
struct InstructionOrder {
  int keys_after;      // the step of o += p v after which the copies for the next KV tile start
  int values_at_once;  // blocks of v that ptxas may load ahead of their use; 0: those of a whole step
  bool end_late;       // the test for the last KV tile comes in the last step, not before the first
};

// Chooses an order for each variant so that none spills. A warp with 32 rows keeps 192 registers of o and s; ptxas
// fills the other 63 with fragments that it loads ahead, and exceeds them by one or two. Only the order differs:
// results are the same, bit for bit. After a change of the main loop, check "spills" in the manifests of variants.
template <class V>
constexpr InstructionOrder instruction_order() {
  constexpr int kQk = whole_blocks(V::kHeadDimQk), kVo = whole_blocks(V::kHeadDimVo);
  // From sm_100 on ptxas takes more registers, of which heads of 256 leave none: copies of pages go first.
  constexpr bool kIsFull = ptx::kFromSm100 && kVo > 192 && V::kPaged != 0;
  constexpr InstructionOrder kUsual = {V::kTileKv < 64 || kIsFull ? 0 : 1, 0, false};
  if constexpr (V::kTileRows < 128) return kUsual;
  // With 128 logits a row and page offsets ptxas lacks two registers: copies start a step earlier than usual.
  if constexpr (kQk <= 64 && V::kPaged != 0) return {0, 0, false};
  if constexpr (kVo != 128) return kUsual;
  if constexpr (kQk == 128) {
    // Before sm_90 ptxas wants up to ten registers more: copies wait until most of s is used, and v is loaded two
    // blocks at a time. With pages, and a mask of bits or a window alone, copies come first instead.
    constexpr bool kBits = V::kMask == kMaskCustom || V::kMask == kMaskTree;
    constexpr bool kEarly = V::kPaged != 0 && (kBits || (V::kMask == kMaskNone && V::kWindow != 0));
    if constexpr (ptx::kBeforeSm90) return kEarly ? InstructionOrder{0, 4, true} : InstructionOrder{2, 2, true};
    if constexpr (V::kPosEncoding != 0) return {2, 0, true};
    // With a custom mask, a cap, or ragged keys without any mask: copies wait until most of s is used, and v is loaded
    // four blocks at a time.
    constexpr bool kCustom = V::kMask == kMaskCustom, kCap = V::kSoftCap != 0;
    constexpr bool kAll = V::kMask == kMaskNone && V::kWindow == 0;
    if constexpr (V::kPaged == 0 ? kCap || kCustom || kAll : kCap && kCustom) return {2, 4, false};
  }
  if constexpr (kQk == 192 && V::kPaged != 0) {
    // There is one stage, so only k is copied here. Each generation needs another order.
    if constexpr (ptx::kBeforeSm90) return {2, 0, false};
    return {1, 0, true};
  }
  return kUsual;
}

}  // namespace quire
