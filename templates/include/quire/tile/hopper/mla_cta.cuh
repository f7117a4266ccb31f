// What the warps of a CTA of the MLA kernel share: sizes, tiles and barriers in shared memory, and which work tile and
// KV tile are next.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/scheduler.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

template <class V>
struct MlaCta {
  using T = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kRows = 64, kCtasPerTile = kTileRows / kRows;  // rows of a CTA, CTAs of a row tile
  static constexpr int kCkv = V::kHeadDimVo, kKpe = V::kHeadDimQk - V::kHeadDimVo;

  static constexpr bool kWidens = sizeof(typename V::Kv) == 1;
  using Kpe = typename conditional<V::kTileScales != 0, T, typename V::Kv>::type;  // numbers of kpe in the cache
  static_assert(is_same<T, typename V::O>::value && (kWidens || is_same<T, typename V::Kv>::value),
                "q, ckv, kpe and o have one dtype, but that latents may have 8 bits");
  static_assert(kCkv == 512 && kKpe == 64, "the registers of three warpgroups hold these dims");
  static_assert(kTileRows % kRows == 0 && kTileKv == 64, "a warpgroup owns 64 rows, and weights take the place of kpe");
  static_assert(kv_load_path<V>() != KvLoadPath::kRagged, "keys are in pages");

  // Latents of 8 bits are widened by a fourth warpgroup.
  static constexpr int kThreads = kWidens ? 512 : 384, kMinCtas = 1;

  // Pages are boxes of the copy engine, or tokens are gathered one by one.
  static constexpr bool kGathers = kv_load_path<V>() == KvLoadPath::kGather;

  using Stage = CurrentWork;
  using TileCkv = SwizzledTile<kTileKv, kCkv>;
  using TileKpe = SwizzledTile<kTileKv, kKpe>;

  static constexpr int kHalves = 2, kHalfCols = kCkv / kHalves;
  static constexpr int kWorkStages = 4;            // a half is loaded up to three work tiles ahead
  static constexpr int kStages = kWidens ? 2 : 3;  // of ckv
  static constexpr int kParts = 4;                 // of a ckv stage, with a full barrier each: S starts with the first
  static constexpr int kPartBytes = TileCkv::kBytes / kParts;
  // Row tiles of 64 rows wait for memory: their weights are handed on at once, which frees stages sooner.
  // With two stages of widened latents the next KV tile waits for their release, too.
  static constexpr bool kHandsOnAtOnce = kCtasPerTile == 1 || kWidens;
  // Steps of 16 columns: of S in all, those whose queries are in registers, and the ones before those. Where a
  // warpgroup widens latents, it has the registers that queries would take, and two stages leave space for queries.
  static constexpr int kSteps = V::kHeadDimQk / 16, kHeldSteps = kWidens ? 0 : 28, kFirstSteps = 4;
  using TileP = TileKpe;  // weights, in the place of the kpe that they were computed with
  using TileQ = SwizzledTile<kRows, (kSteps - kHeldSteps) * 16>;  // the other queries

  // One box of the copy engine a warp, 64 columns at a time; all columns of a part where a box has all rows of the
  // tile.
  static constexpr int kBoxRows = kGathers ? kTileKv : gcd(V::kPageSize, kTileKv), kBoxes = kTileKv / kBoxRows;
  static constexpr int kBoxAtoms = kBoxes == 1 ? TileCkv::kAtoms / kParts : 1;
  static_assert(kBoxes <= 4, "a warpgroup has four warps");
  static constexpr int kLoaders = kGathers ? 4 : kBoxes;  // warps of a warpgroup that load

  // Where a warp's box of a KV tile lies; boxes beyond kv_len come from page -1: outside of the tensor, hence zeros.
  struct Box {
    int page, row;

    // The same for all lanes, as the compiler then knows: it issues copies without a loop over lanes.
    QUIRE_DEVICE Box uniform() const { return {ptx::uniform(page), ptx::uniform(row)}; }
  };
  // The KV tile of which a half is loaded next. It lives in shared memory: o leaves few registers.
  struct NextTile {
    RingPosition<kWorkStages> at;  // its work tile
    int tile, end;                 // of that; end 0: there is none
  };

  enum Flags { kIsRaised = 1, kIsLast = 2 };  // a maximum of its rows; the KV tile, of its work tile

  // Row states on their way from the warpgroup of S to those of O.
  struct Shared {
    Stage work[kWorkStages];
    float2 states[2][kRows];  // of a work tile, of which this ring has one each: maximum and denominator
    float factors[2][kRows];  // that o is multiplied by before a KV tile, if kIsRaised in the rows' warp
    int flags[2][4];          // of a KV tile and a warp
    NextTile next[kWidens ? kLoaders : kHalves * kLoaders];  // each warp that loads has its own
    Box put_off[kBoxes];                                     // of kpe; row -1: there is none
    int number;                                              // of the last whole row tile taken
    int turn;                                                // at merging
    alignas(8) unsigned char work_barriers[RingBarriers<kWorkStages>::kBytes];
    unsigned char kpe_barriers[RingBarriers<2>::kBytes], weights_barriers[RingBarriers<2>::kBytes];
    unsigned char states_barriers[RingBarriers<2>::kBytes];
    uint64_t ckv_barriers[kStages * kParts], free_barriers[kWidens ? kStages * kHalves : 1];
    uint64_t first_tile_barrier, queries_barrier;  // the first KV tile is on its way; the first queries are there
  };
  static constexpr int kKpeAt = kStages * TileCkv::kBytes;
  static constexpr int kQAt = kKpeAt + 2 * TileKpe::kBytes;
  static constexpr int kSharedAt = kQAt + TileQ::kBytes;

  // 0 is the barrier of the CTA.
  enum NamedBarrier { kScore = 1, kValues, kHalf };  // kHalf + i: of a half

  static constexpr int kSmemBytes = kSharedAt + static_cast<int>(sizeof(Shared)) + (kGathers ? kStages * 8 : 0);
  static_assert(kSmemBytes <= 227 * 1024, "the tiles do not fit into shared memory");

  const AttentionMlaFa3Params& p;
  Shared& shared;
  uint32_t barriers;  // address of `shared`

  QUIRE_DEVICE MlaCta(const AttentionMlaFa3Params& p, unsigned char* smem)
      : p(p), shared(*reinterpret_cast<Shared*>(smem + kSharedAt)), barriers(ptx::smem_address(smem) + kSharedAt) {}

  // Where tiles begin: not `barriers`, because lanes compute with that one. The compiler then keeps this address, and
  // the descriptors made from it, in uniform registers, and a product of 32 keys takes 20 clocks instead of 40.
  QUIRE_DEVICE static uint32_t base() {
    extern __shared__ __align__(1024) unsigned char smem[];
    return ptx::smem_address(smem);
  }
  template <int kRing>
  QUIRE_DEVICE RingBarriers<kRing> ring(size_t offset) const {
    return {barriers + static_cast<uint32_t>(offset)};
  }
  QUIRE_DEVICE RingBarriers<kWorkStages> work_ring() const {
    return ring<kWorkStages>(__builtin_offsetof(Shared, work_barriers));
  }
  QUIRE_DEVICE RingBarriers<2> kpe_ring() const { return ring<2>(__builtin_offsetof(Shared, kpe_barriers)); }
  QUIRE_DEVICE RingBarriers<2> states_ring() const { return ring<2>(__builtin_offsetof(Shared, states_barriers)); }
  QUIRE_DEVICE RingBarriers<2> weights_ring() const { return ring<2>(__builtin_offsetof(Shared, weights_barriers)); }
  QUIRE_DEVICE uint32_t first_tile_barrier() const {
    return ring<1>(__builtin_offsetof(Shared, first_tile_barrier)).base;
  }
  QUIRE_DEVICE uint32_t queries_barrier() const { return ring<1>(__builtin_offsetof(Shared, queries_barrier)).base; }
  QUIRE_DEVICE uint32_t ckv_full(int stage, int part) const {
    return ring<1>(__builtin_offsetof(Shared, ckv_barriers)).base + 8 * (stage * kParts + part);
  }

  // With kWidens: a half of a stage is free when the four warps of O that read it have arrived.
  QUIRE_DEVICE uint32_t ckv_free(int stage, int half) const {
    return ring<1>(__builtin_offsetof(Shared, free_barriers)).base + 8 * (stage * kHalves + half);
  }

  // Without kWidens, stages of ckv have no empty barriers: who has used a half reloads it. `weights` has none either,
  // because weights take the place of a kpe that was loaded.
  QUIRE_DEVICE void init_barriers() const {
    // Warps that widen, threads that gather, or the copy engine.
    constexpr int kArrivals = kWidens ? kLoaders : kGathers ? 128 : 1;
    work_ring().init(1, kThreads / 32);
    kpe_ring().init(kWidens && V::kTileScales != 0 ? 32 * kLoaders : kArrivals,
                    kHalves);  // kpe beside scales is gathered
    weights_ring().init(4, 1);
    states_ring().init(4, 8);
    for (int i = 0; i < kStages * kParts; ++i) ptx::mbarrier_init(ckv_full(0, i), kArrivals + arrivals_of_gaps(i));
    for (int i = 0; kWidens && i < kStages * kHalves; ++i) ptx::mbarrier_init(ckv_free(0, i), 4);
    ptx::mbarrier_init(queries_barrier(), 4);
    ptx::mbarrier_init(first_tile_barrier(), kHalves);
    ptx::fence_mbarrier_init();
  }

  // Gathered parts come two at a time. With the latter ones come the gaps, which four warps have noted. Warps that
  // widen have noted them when they arrive for the first part.
  QUIRE_DEVICE static constexpr int arrivals_of_gaps(int part) {
    return kGathers && !kWidens && part % kParts == kParts / kHalves ? 4 : 0;
  }

  QUIRE_DEVICE static int warpgroup() { return ptx::uniform(ptx::thread_id() / 128); }
  QUIRE_DEVICE static int warp_of_group() { return ptx::uniform(ptx::thread_id() / 32 % 4); }
  QUIRE_DEVICE static bool loads() { return warp_of_group() < kLoaders; }
  QUIRE_DEVICE static bool is_leader() { return ptx::thread_id() % 128 == 0; }
  // This lane's upper row.
  QUIRE_DEVICE static int lane_row() { return ptx::thread_id() % 128 / 32 * 16 + ptx::lane_id() / 4; }

  QUIRE_DEVICE TileCkv ckv_tile(int stage) const { return {base() + stage * TileCkv::kBytes}; }
  QUIRE_DEVICE TileKpe kpe_tile(int stage) const { return {base() + kKpeAt + stage * TileKpe::kBytes}; }
  QUIRE_DEVICE TileP weights_tile(int stage) const { return kpe_tile(stage); }
  QUIRE_DEVICE TileQ q_tile() const { return {base() + kQAt}; }

  QUIRE_DEVICE static int half_of_o() { return warpgroup() - 1; }

  // The first of this CTA's rows of a work tile. Rows from row_end on do not exist: it may have none.
  QUIRE_DEVICE static int first_row(const WorkTile& work) {
    return work.tile.row_begin + static_cast<int>(blockIdx.x) % kCtasPerTile * kRows;
  }

  // A work tile without keys has one KV tile, of zeros that no row sees.
  QUIRE_DEVICE static int kv_end(const WorkTile& work) { return max(work.kv_end, work.kv_begin + 1); }

  QUIRE_DEVICE void release_work_tile(RingPosition<kWorkStages>& at) const {
    __syncwarp();
    if (ptx::lane_id() == 0) work_ring().arrive_empty(at);
    at.advance();
  }

  // Rows that do not exist repeat the last one; their results are not stored.
  QUIRE_DEVICE WorkTile::Place place(const WorkTile& work, int row) const {
    return work.place(p.base.group, min(first_row(work) + row, work.row_end - 1));
  }
  QUIRE_DEVICE const T* nope_row(const WorkTile& work, int row) const {
    const WorkTile::Place at = place(work, row);
    return static_cast<const T*>(p.q_nope) + at.token * p.q_nope_token_stride + at.head * p.q_nope_head_stride;
  }
  QUIRE_DEVICE const T* pe_row(const WorkTile& work, int row) const {
    const WorkTile::Place at = place(work, row);
    return static_cast<const T*>(p.base.q) + at.token * p.base.q_token_stride + at.head * p.base.q_head_stride;
  }

  // Which tokens of a ckv stage exist, a bit each. It is there when the stage's latter half is.
  QUIRE_DEVICE uint2& existing(int stage) const { return reinterpret_cast<uint2*>(&shared + 1)[stage]; }

  // Finds the KV tile that follows, where `source` says that its keys lie; false if none does. Each warp that loads;
  // the last half's first one takes work tiles, too.
  template <class Source, class Place>
  QUIRE_DEVICE bool find_next(bool is_first, const Source& source, Place& place) const {
    const int half = kWidens ? kHalves - 1 : half_of_o();
    NextTile& shared_next = shared.next[(kWidens ? 0 : half * kLoaders) + warp_of_group() % kLoaders];
    NextTile next = is_first ? NextTile{} : shared_next;
    __syncwarp();
    if (!is_first && next.end == 0) return false;
    if (is_first || ++next.tile == next.end) {
      if (!is_first && kWidens) {
        release_work_tile(next.at);
      } else if (!is_first) {
        next.at.advance();
      }
      if (half == kHalves - 1 && warp_of_group() == 0) schedule(next.at, is_first);
      work_ring().wait_full(next.at);
      const Stage& stage = shared.work[next.at.stage()];
      next.tile = stage.work.kv_begin;
      next.end = stage.exists ? kv_end(stage.work) : 0;
      if (next.end != 0) source.begin(stage.work);
    }
    if (ptx::lane_id() == 0) shared_next = next;
    __syncwarp();
    if (next.end != 0) source.find(shared.work[next.at.stage()].work, next.tile, place);
    return next.end != 0;
  }

  // One thread, while others get the barriers ready: partitions and row tiles are two trips to memory.
  QUIRE_DEVICE void take_first_work_tile() const {
    Stage& before = shared.work[kWorkStages - 1];
    SharedWorkList<kCtasPerTile>::begin(p, before.cursor, shared.number);
    SharedWorkList<kCtasPerTile>::next(p, before.cursor, shared.work[0], shared.number, kTileKv);
    if (!shared.work[0].exists) return;
    const WorkTile& work = shared.work[0].work;
    const int token = work.kv_begin * kTileKv;
    if (token < work.tile.kv_len) ptx::prefetch_l2(p.base.kv_indices + work.tile.kv_first + p.base.page.div(token));
    if (!work.is_whole()) ptx::prefetch_l2(p.base.groups + work.group);
  }

  // One warp. The first work tile has been taken.
  QUIRE_DEVICE void schedule(RingPosition<kWorkStages> at, bool is_first) const {
    work_ring().wait_empty(at);
    if (ptx::lane_id() == 0) {
      const Stage& before = shared.work[at.before().stage()];
      if (!is_first)
        SharedWorkList<kCtasPerTile>::next(p, before.cursor, shared.work[at.stage()], shared.number, kTileKv);
      work_ring().arrive_full(at);
    }
    __syncwarp();
  }
};

// Brings KV tiles from pages to shared memory.
template <class V, KvLoadPath kLoadPath = kv_load_path<V>(), bool kWidens = MlaCta<V>::kWidens>
class MlaSource;

}  // namespace quire
