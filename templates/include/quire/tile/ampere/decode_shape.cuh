// How a CTA of decode is divided into warps, and what lies in its shared memory.
//
// The warps of a CTA are KV splits: each KV split computes some of the keys of a KV tile, with a separate ring of
// stages and a separate softmax. A KV split is one warp, unless the registers of one warp do not suffice. Then the
// warps of a KV split share its keys. If the rows are too many, each warp computes some of the rows. If a head has more
// than 256 dims, two warps have the same rows: each computes half of the dims of q k^T and half of the columns of o.
#pragma once
#include "quire/core/rope.h"
#include "quire/ptx/barrier.cuh"
#include "quire/core/schedule.h"
#include "quire/tile/ampere/nvfp4.cuh"
#include "quire/tile/shared/smem.cuh"

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

constexpr int kWindowTiles = 32;  // row tiles that a warp reads at a time

// Areas of shared memory that some variants have. The others derive from an empty struct, which takes no bytes: an
// array without elements is beyond C++, and NVRTC refuses it.
template <int kWarps, int kBytes>
struct SpillArea {
  unsigned char spill[kWarps][kBytes];  // o of each warp, at the end of a work tile
};
template <int kBytes>
struct SpillArea<0, kBytes> {};

template <int kWarps, int kBytes>
struct QueryArea {
  unsigned char query[kWarps][kBytes];  // fragments of q that registers do not hold
};
template <int kWarps>
struct QueryArea<kWarps, 0> {};

template <int kWarps, int kFragments>
struct SumsArea {
  float4 sums[kWarps][kFragments][32];  // of q k^T over the dims of each warp
};
template <int kFragments>
struct SumsArea<0, kFragments> {};

template <int kPairs>
struct StepArea {
  alignas(16) Rotation steps[kPairs];  // of rotated keys: what each pair of dims turns in kTurnStep tokens
};
template <>
struct StepArea<0> {};

// The threads that compute a partition: a whole CTA.
struct WholeCta {
  QUIRE_DEVICE static int index() { return static_cast<int>(blockIdx.x); }  // of the partition
  QUIRE_DEVICE static unsigned thread() { return threadIdx.x; }
  QUIRE_DEVICE static void sync() { __syncthreads(); }
  // The named barrier that serves as barrier `id`; 0 is that of sync().
  QUIRE_DEVICE static int barrier(int id) { return id; }
};

// The same where a warpgroup of a CTA computes a partition (kernels/pod.cuh).
struct WarpgroupAsCta {
  int partition = 0;

  QUIRE_DEVICE int index() const { return partition; }
  QUIRE_DEVICE static unsigned thread() { return threadIdx.x % 128; }
  QUIRE_DEVICE static void sync() { ptx::named_barrier_sync(barrier(0), 128); }
  QUIRE_DEVICE static int barrier(int id) { return 1 + static_cast<int>(threadIdx.x) / 128 * 3 + id; }
};

template <class V>
struct DecodeShape {
  using Q = typename V::Q;
  using Kv = typename V::Kv;
  static constexpr int kQk = whole_blocks(V::kHeadDimQk), kVo = whole_blocks(V::kHeadDimVo), kRows = V::kTileRows;
  static constexpr int kKvBits = kBitsOf<Kv>;
  static constexpr bool kIsNarrow = kKvBits < 16;  // keys and values are widened to fp16 on their way to the mma

  // Warps that divide the dims of a head, and the dims of each.
  static constexpr int kDimWarps = max(kQk, kVo) > 256 ? 2 : 1, kWarpQk = kQk / kDimWarps, kWarpVo = kVo / kDimWarps;
  // Blocks of 16 rows in a warp: two where o and q then take at most 192 registers, or 96 if widening needs some too.
  // Heads of more than 512 bytes have one: their KV tiles are made for one (kernels/portable.py).
  static constexpr int kM =
      kRows > 16 && (kQk + kVo) * kKvBits <= 512 * 8 && 2 * (kVo / 2 + kQk / 4) <= (kIsNarrow ? 96 : 192) ? 2 : 1;
  static constexpr int kRowWarps = kRows / (16 * kM);                        // warps that divide the rows of a row tile
  static constexpr int kSplitWarps = kRowWarps * kDimWarps;                  // warps of a KV split
  static constexpr int kWarps = V::kTileKv == 32 && kDimWarps == 1 ? 2 : 4;  // of a CTA
  static constexpr int kWarpTokens = V::kTileKv / kWarps;                    // tokens of a KV tile that a warp copies
  static constexpr int kSplitTokens = kSplitWarps * kWarpTokens;  // tokens of a KV tile that a KV split computes
  static constexpr int kKvSplits = kWarps / kSplitWarps, kThreads = kWarps * 32;
  static constexpr int kBlock = kM == 1 && kVo <= 192 ? min(kSplitTokens, 32) : 16;  // tokens of one softmax step
  static_assert(kDimWarps == 1 || (kRowWarps == 1 && kQk == kVo && kQk % 128 == 0 && kSplitTokens == kBlock),
                "two warps divide the dims of 16 rows and of one block of keys");
  static_assert(kWarps % kSplitWarps == 0, "the KV tile has too few warps for the rows");
  static_assert(kWarpTokens >= 8 && kWarpTokens <= 32, "a warp copies 8, 16 or 32 tokens of a KV tile");

  // Blocks of 16 dims of q that a warp keeps in registers. The warp reads the others again for each block of keys.
  static constexpr int kRegisters = kM * (kWarpVo / 2 + kWarpQk / 4) + (kIsNarrow ? 16 : 0);  // for o, q and widening
  // A tree mask with a window, and rotated keys, take registers, too.
  static constexpr bool kHasRope = V::kPosEncoding == kPosEncodingRope;
  static constexpr bool kIsCrowded = (V::kMask == kMaskTree && V::kWindow != 0) || kHasRope;
  static constexpr int kHeldQ = kDimWarps > 1 ? 0
                                              : kQk / (kRegisters <= 160        ? 16
                                                       : kRegisters <= 176      ? 32
                                                       : kM == 2 && !kIsCrowded ? 64
                                                                                : 128);
  // Whether a lane keeps the rotations of its first key from one KV tile to the next.
  static constexpr bool kRotationsRun =
      kHasRope && !kIsNarrow && kM == 1 && kQk <= 128 && kHeldQ == kQk / 16 && kBlock == kSplitTokens;
  static constexpr int kQueryBytes = (kWarpQk / 16 - kHeldQ) * kM * 512;  // the others, of one warp's rows and dims

  using TileK = KvTile<kSplitTokens, kQk, kKvBits>;
  using TileV = KvTile<kSplitTokens, kVo, kKvBits>;
  static constexpr int kTileBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kSpillBytes = 16 * kWarpVo * 4;  // 16 rows of o of one warp

  // Shared memory beside the ring and the first queries.
  template <bool kHasSpill>
  struct Fixed : SpillArea<kHasSpill ? kWarps : 0, kSpillBytes>,
                 QueryArea<kSplitWarps, kQueryBytes>,
                 SumsArea<kDimWarps == 1 ? 0 : kWarps, kBlock / 8>,
                 StepArea<kHasRope ? kQk / (kRotationsRun ? 1 : 2) : 0> {
    float2 states[kWarps][kM * 16];  // maximum and denominator of each row
    WorkTile work[kWarps];
    RowTile tiles[kWarps][kWindowTiles];
    alignas(16) uint32_t is_last;  // this CTA is the last of a merge group to arrive
  };

  // Two CTAs share an SM, so that one streams while the other ends a work tile. Each has 64 KB for its ring: with more
  // bytes under way the memory serves them more slowly. One CTA has the SM where two rings of two stages do not fit.
  static constexpr int kRingTarget = (kKvBits == 4 ? 80 : 64) * 1024, kBudgetOfTwo = kSmemOfSm / 2 - kSmemReservedOfCta;
  // Where two CTAs still fit with it, o has a separate spill area, and the ring is filled while a work tile ends.
  // Elsewhere o goes to a stage of the ring.
  static constexpr bool kHasSpill =
      max(kRingTarget, 2 * kKvSplits * kTileBytes) + static_cast<int>(sizeof(Fixed<true>)) <= kBudgetOfTwo;
  static constexpr int kFixedBytes = static_cast<int>(sizeof(Fixed<kHasSpill>));
  static constexpr int kStageBytes = kHasSpill ? kTileBytes : max(kTileBytes, kSplitWarps* kSpillBytes);
  static constexpr int kKvTileBytes = kKvSplits * kStageBytes;  // a stage of each KV split
  static constexpr bool kTwoFit = 2 * kKvTileBytes <= kRingTarget && 2 * kKvTileBytes + kFixedBytes <= kBudgetOfTwo;
  static constexpr int kMinCtas = kSmemOfSm >= 160 * 1024 && kTwoFit ? 2 : 1;
  static constexpr int kBudget = kMinCtas == 1 ? kSmemOfSm - kSmemReservedOfCta : kBudgetOfTwo;
  static constexpr int kFewestStages = kDimWarps == 1 ? 2 : 3;  // wide heads: an SM has no other CTA that loads
  static constexpr int kStages =
      min((kBudget - kFixedBytes) / kKvTileBytes, min(8, max(kFewestStages, kRingTarget / kKvTileBytes)));
  static_assert(kStages >= 2, "a ring needs two stages");
  // Whether the first work tile's queries are copied to shared memory ahead of its keys.
  static constexpr bool kHasFirstQuery =
      kRows <= 32 && kStages * kKvTileBytes + kFixedBytes + kRows * kQk * static_cast<int>(sizeof(Q)) <= kBudget;

  struct SharedMemory {
    unsigned char ring[kKvSplits][kStages][kStageBytes];
    Fixed<kHasSpill> fixed;

    QUIRE_DEVICE Q* first_query() { return reinterpret_cast<Q*>(this + 1); }  // [rows, head_dim_qk], behind the rest
  };
  static constexpr int kUsedBytes =
      static_cast<int>(sizeof(SharedMemory)) + (kHasFirstQuery ? kRows * kQk * static_cast<int>(sizeof(Q)) : 0);
  static_assert(kUsedBytes <= kBudget, "shared memory of kMinCtas CTAs fits an SM");

  // At least so much that kMinCtas CTAs fit an SM and not one more. A dependent launch fills SMs as they come free:
  // where three CTAs fit, some SMs get three and others one.
  static constexpr int kSmemBytes =
      max(kUsedBytes, kSmemOfSm / (kMinCtas + 1) / 1024 * 1024 - kSmemReservedOfCta + 1024);
};

}  // namespace quire
