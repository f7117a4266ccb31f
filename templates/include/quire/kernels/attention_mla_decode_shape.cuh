// A CTA of attention_mla_decode: its warps and their registers, and what lies where in its shared memory.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/mla_fp8.cuh"
#include "quire/tile/hopper/scheduler.cuh"

namespace quire {

template <class V>
struct MlaDecodeShape {
  using T = typename V::Q;
  static constexpr int kRows = V::kTileRows, kCkv = V::kHeadDimVo;
  static constexpr bool kIsFp8 = sizeof(typename V::Kv) == 1;
  static_assert(is_same<T, typename V::O>::value && (kIsFp8 || is_same<T, typename V::Kv>::value),
                "q, latents and o are alike, but that latents may have 8 bits");
  static_assert(kCkv == 512 && V::kHeadDimQk == 576 && V::kTileKv == 64, "a KV tile is nine atoms, or five");
  static constexpr bool kGathers = kv_load_path<V>() == KvLoadPath::kGather;
  static_assert(V::kPaged != 0 && (kGathers ? kIsFp8 : V::kPageSize % 64 == 0), "a page holds whole KV tiles");
  static_assert(kRows % 16 == 0 && kRows <= 32, "O^T has half as many registers as rows, for each of eight blocks");

  static constexpr int kGroups = 2, kWarps = 4 * kGroups, kWorkStages = 2, kTileStages = kIsFp8 ? 6 : 4;
  static constexpr int kAtomBytes = 64 * 128, kTileAtoms = kIsFp8 ? 5 : 9, kBlocks = 8;  // of ckv: 64 columns each

  using TileQ = SwizzledTile<kRows, V::kHeadDimQk>;
  using TileP = SwizzledTile<kRows, 64>;
  using Fp8 = MlaFp8<V>;
  using P = typename conditional<kIsFp8, fp16_t, T>::type;
  static constexpr int kPBytes = Fp8::kPs * TileP::kBytes;
  // Whether latents have scales, which are stored for each KV tile. 8-bit latents also need a scale for each query.
  static constexpr bool kIsScaled = V::kTileScales != 0;
  static constexpr int kTileScalesBytes = kTileStages * Fp8::kTileScalesBytes;
  static constexpr int kQScalesBytes = kIsFp8 ? kRows * 4 : 0;
  static constexpr int kExistingBytes = kGathers ? kTileStages * 8 : 0;  // which tokens exist, a bit each
  // Columns of O^T, as blocks, of 16 rows and of each warpgroup that the atoms of a KV tile hold.
  static constexpr int kMeetingBlocks = kIsFp8 ? 4 : kBlocks;

  using Scores = float[kRows / 2];  // S^T of a KV tile: tokens 16 * warp + lane / 4 and + 8, columns as in Wgmma
  using Values = float[kBlocks][kRows / 2];

  struct Shared {
    CurrentWork work[kWorkStages];
    float tops[kGroups][4][kRows];  // of each warp's tokens; at the end of a work tile denominators
    float maxima[kGroups][kRows];
    int number;  // of the last whole row tile taken
    int turn;    // at merging
    alignas(8) unsigned char work_barriers[RingBarriers<kWorkStages>::kBytes];
    uint64_t full[kTileStages][2], empty[kTileStages];  // KV tiles come in two parts
  };

  static constexpr int kSpace = 227 * 1024 - TileQ::kBytes - kGroups * kPBytes - kTileScalesBytes -
                                static_cast<int>(sizeof(Shared)) - kQScalesBytes - kExistingBytes;
  static constexpr int kRingAtoms = kSpace / kAtomBytes;
  // The first kEarly atoms of KV tile i replace atoms of KV tile i - kLag, and the others replace atoms of KV tile
  // i - kLag + 1.
  static constexpr int kLag = ceil_div(kRingAtoms, kTileAtoms), kEarly = kRingAtoms - (kLag - 1) * kTileAtoms;
  static constexpr int kParts = kEarly < kTileAtoms ? 2 : 1;
  static_assert(kLag > 1 && kLag < kTileStages, "two warpgroups hold a KV tile each");
  static constexpr int kQAt = kRingAtoms * kAtomBytes, kPAt = kQAt + TileQ::kBytes;
  static constexpr int kTileScalesAt = kPAt + kGroups * kPBytes, kSharedAt = kTileScalesAt + kTileScalesBytes;

  // Registers a thread: 504 for a thread of each warpgroup.
  static constexpr int kComputeRegisters = 232, kLoadRegisters = 40;

  enum NamedBarrier { kAll = 1, kGroup };  // kGroup + i: of a warpgroup

  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kThreads = 32 * kWarps + 128, kMinCtas = 1;
  static constexpr int kSmemBytes = kSharedAt + static_cast<int>(sizeof(Shared)) + kQScalesBytes + kExistingBytes;
};

// The ring and the tiles in shared memory, as every warp of the CTA sees them.
template <class V>
class MlaDecodeCta : public MlaDecodeShape<V> {
  using Shape = MlaDecodeShape<V>;

 public:
  using Shape::kRows, Shape::kGathers, Shape::kWarps, Shape::kWorkStages, Shape::kTileStages, Shape::kAtomBytes,
      Shape::kTileAtoms, Shape::kPBytes, Shape::kIsScaled, Shape::kRingAtoms, Shape::kQAt, Shape::kPAt,
      Shape::kTileScalesAt, Shape::kSharedAt;
  using typename Shape::TileQ, typename Shape::TileP, typename Shape::Fp8, typename Shape::Shared;

  QUIRE_DEVICE MlaDecodeCta(const AttentionMlaFa3Params& p, unsigned char* smem)
      : p_(p), shared_(*reinterpret_cast<Shared*>(smem + kSharedAt)), barriers_(ptx::smem_address(smem) + kSharedAt) {}

  QUIRE_DEVICE void init_barriers() const {
    work_ring().init(1, kWarps);
    // Threads that gather arrive with their copies, and each of the four warps once more. Beside the copy engine, a
    // warp copies the scales.
    constexpr int kArrivals = kGathers ? 128 + 4 : kIsScaled ? 32 + 1 : 1;
    for (int i = 0; i < 2 * kTileStages; ++i) ptx::mbarrier_init(full(0, i), i % 2 == 0 ? kArrivals : 1);
    for (int i = 0; i < kTileStages; ++i) ptx::mbarrier_init(empty(i), 4);
    ptx::fence_mbarrier_init();
  }

 protected:
  const AttentionMlaFa3Params& p_;
  Shared& shared_;
  uint32_t barriers_;  // address of `shared_`

  QUIRE_DEVICE static uint32_t base() {
    extern __shared__ __align__(1024) unsigned char smem[];
    return ptx::smem_address(smem);
  }
  QUIRE_DEVICE static int group() { return ptx::uniform(ptx::thread_id() / 128); }
  QUIRE_DEVICE static int warp_of_group() { return ptx::uniform(ptx::thread_id() / 32 % 4); }
  QUIRE_DEVICE static TileQ q_tile() { return {base() + kQAt}; }
  QUIRE_DEVICE static TileP p_tile() { return {base() + kPAt + group() * kPBytes}; }
  QUIRE_DEVICE static uint32_t tile_scales(int stage) { return base() + kTileScalesAt + stage * Fp8::kTileScalesBytes; }

  // Whether tokens 16 * warp to 16 * warp + 15 of a KV tile exist, a bit each.
  QUIRE_DEVICE uint16_t& existing(int stage, int warp) const {
    return reinterpret_cast<uint16_t*>(query_scales() + kRows)[stage * 4 + warp];
  }
  QUIRE_DEVICE float* query_scales() const { return reinterpret_cast<float*>(&shared_ + 1); }

  // The position of a KV tile in the ring.
  struct TilePosition {
    int count = 0, first = 0;  // KV tiles before it; its first atom

    QUIRE_DEVICE void advance() { ++count, first = wrap(first + kTileAtoms); }
    QUIRE_DEVICE static int wrap(int atom) { return atom >= kRingAtoms ? atom - kRingAtoms : atom; }
    QUIRE_DEVICE int atom_at(int i) const { return wrap(first + i) * kAtomBytes; }
    QUIRE_DEVICE int stage() const { return count % kTileStages; }
    QUIRE_DEVICE int parity() const { return count / kTileStages & 1; }
  };

  QUIRE_DEVICE RingBarriers<kWorkStages> work_ring() const {
    return {barriers_ + static_cast<uint32_t>(__builtin_offsetof(Shared, work_barriers))};
  }
  QUIRE_DEVICE uint32_t full(int stage, int part) const {
    return barriers_ + static_cast<uint32_t>(__builtin_offsetof(Shared, full)) + 16 * stage + 8 * part;
  }
  QUIRE_DEVICE uint32_t empty(int stage) const {
    return barriers_ + static_cast<uint32_t>(__builtin_offsetof(Shared, empty)) + 8 * stage;
  }

  // A work tile without keys has one KV tile, of zeros that no row sees.
  QUIRE_DEVICE static int kv_end(const WorkTile& work) { return max(work.kv_end, work.kv_begin + 1); }

  // Rows that do not exist repeat the last one; their results are not stored.
  QUIRE_DEVICE static int row_of(const WorkTile& work, int i) { return min(work.tile.row_begin + i, work.row_end - 1); }
};

}  // namespace quire
