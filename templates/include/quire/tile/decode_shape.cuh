// How decode cuts a kv tile: KV splits of warps, each with keys, a ring and a softmax of its own. A KV split is one
// warp unless the rows are too many for one warp's registers; then its warps share the KV split's keys and split the
// rows.
#pragma once
#include "quire/tile/decode_scheduler.cuh"
#include "quire/tile/smem.cuh"

namespace quire {

// What one SM has in shared memory, and what each CTA loses of it.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900 || (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
constexpr int kSmemOfSm = 228 * 1024;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int kSmemOfSm = 164 * 1024;
#else
constexpr int kSmemOfSm = 100 * 1024;
#endif
constexpr int kSmemReservedOfCta = 1024;

template <class V>
struct DecodeShape {
  using Kv = typename V::Kv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo, kRows = V::kTileRows;
  static constexpr bool kNarrow = sizeof(Kv) == 1;  // 8-bit keys and values, widened to fp16 on their way to the mma
  static constexpr int kTokenBytes = (kQk + kVo) * static_cast<int>(sizeof(Kv));

  // Two blocks of 16 rows a warp where o and q then take at most 192 registers, or 96 if widening needs some too.
  static constexpr int kM = kRows > 16 && 2 * (kVo / 2 + kQk / 4) <= (kNarrow ? 96 : 192) ? 2 : 1;
  static constexpr int kSplitWarps = kRows / (16 * kM);  // warps
  // A warp copies some 8 KB at a time: enough that few bytes are loop overhead, little enough for a ring of stages.
  static constexpr int kWarpTokens = 32 * kTokenBytes <= 8192 ? 32 : 16;
  static constexpr int kWarps = max(kSplitWarps, 16 * kTokenBytes > 8192 ? 2 : 4);
  static constexpr int kKvSplits = kWarps / kSplitWarps;
  static constexpr int kSlice = kSplitWarps * kWarpTokens;  // tokens of a KV split in a kv tile
  static constexpr int kTileKv = kWarps * kWarpTokens;
  static constexpr int kBlock = kM == 1 && kVo <= 192 ? min(kSlice, 32) : 16;  // keys of one softmax step

  using TileK = SmemTile<kSlice, kQk, 8 * static_cast<int>(sizeof(Kv))>;
  using TileV = SmemTile<kSlice, kVo, 8 * static_cast<int>(sizeof(Kv))>;
  // Blocks of 16 dims of q that a warp keeps in registers; the others it reads again for each block of keys.
  static constexpr int kWanted = kM * (kVo / 2 + kQk / 4) + (kNarrow ? 16 : 0);  // registers of o, q and widening
  static constexpr int kHeldQ = kQk / (kWanted <= 160 ? 16 : kWanted <= 176 ? 32 : kM == 2 ? 64 : 128);
  static constexpr int kQueryBytes = (kQk / 16 - kHeldQ) * kM * 512;  // of a warp's rows
  static constexpr int kStatesBytes = kWarps * kM * 16 * 8;
  static constexpr int kJobBytes = 96;  // of a warp
  static constexpr int kBaseBytes =
      kSplitWarps * kQueryBytes + kStatesBytes + kWarps * (kJobBytes + TileWindow::kBytes) + 16;  // and a flag
  static constexpr int kSmemOfTwo = kSmemOfSm / 2 - kSmemReservedOfCta, kRingBytes = 64 * 1024;

  // Where two CTAs then still fit an SM, o has a place of its own when a work ends, and the ring goes on being filled.
  static constexpr int kTileBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kSpillBytes = 16 * kVo * 4;  // 16 rows of o of a warp
  static constexpr bool kOwnSpill =
      max(kRingBytes, 2 * kKvSplits * kTileBytes) + kBaseBytes + kWarps * kSpillBytes <= kSmemOfTwo;
  static constexpr int kSlotBytes = kOwnSpill ? kTileBytes : max(kTileBytes, kSplitWarps* kSpillBytes);
  static constexpr int kFixedBytes = kBaseBytes + (kOwnSpill ? kWarps * kSpillBytes : 0);
  static constexpr int kStageBytes = kKvSplits * kSlotBytes;
  // Two CTAs an SM, so that one streams while the other ends a work, and 64 KB for the ring of each: with more bytes
  // under way the memory serves them more slowly (192 KB an SM 488 us, 128 KB 480 us for 2.15 GB; H200, 2026-11-21).
  // One where a ring of two stages leaves no room for two.
  static constexpr bool kTwoFit = 2 * kStageBytes <= kRingBytes && 2 * kStageBytes + kFixedBytes <= kSmemOfTwo;
  static constexpr int kMinCtas = kSmemOfSm >= 160 * 1024 && kTwoFit ? 2 : 1;
  static constexpr int kSmemOfCta = kMinCtas == 1 ? kSmemOfSm - kSmemReservedOfCta : kSmemOfTwo;
  static constexpr int kRoom = (kSmemOfCta - kFixedBytes) / kStageBytes;
  static constexpr int kStages = min(kRoom, min(8, max(2, kRingBytes / kStageBytes)));
  static_assert(kStages >= 2, "a ring needs two stages");
  // Shared memory: the KV splits' rings, o at the end of a work, q, row states, the warps' jobs and tiles, the flag,
  // and the first work's queries as they are in memory, where there is room.
  static constexpr int kSpillAt = kStages * kStageBytes;
  static constexpr int kQueryAt = kSpillAt + (kOwnSpill ? kWarps * kSpillBytes : 0),
                       kStatesAt = kQueryAt + kSplitWarps * kQueryBytes;
  static constexpr int kJobsAt = kStatesAt + kStatesBytes;
  static constexpr int kTilesAt = kJobsAt + kWarps * kJobBytes;
  static constexpr int kFlagAt = kTilesAt + kWarps * TileWindow::kBytes;
  static constexpr int kFirstQueryAt = kFlagAt + 16, kFirstQueryRoom = kSmemOfCta - kFirstQueryAt;
  static constexpr int kFirstQueryBytes = kRows <= 32 && kRows * kQk * 2 <= kFirstQueryRoom ? kRows * kQk * 2 : 0;
  // At least so much that kMinCtas CTAs fit an SM and not one more: a dependent launch fills SMs as they come free, and
  // where three CTAs fit, some SMs got three and others one (621 instead of 487 us; H200, 2026-11-21).
  static constexpr int kSmemBytes =
      max(kFirstQueryAt + kFirstQueryBytes, kSmemOfSm / (kMinCtas + 1) / 1024 * 1024 - kSmemReservedOfCta + 1024);
  static constexpr int kThreads = kWarps * 32;
};

}  // namespace quire
