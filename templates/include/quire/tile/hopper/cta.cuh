// A CTA of attention_fa3 and attention_fa3_fp8, as far as both are alike: its warps, the rings and tiles in its shared
// memory, how work tiles and queries are loaded, how a warpgroup stores its rows, and at which merge groups of a
// cascade it arrives, and when.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/hopper/gemm.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/kv_tiles.cuh"
#include "quire/tile/hopper/rows.cuh"
#include "quire/tile/hopper/scheduler.cuh"
#include "quire/tile/hopper/softmax.cuh"
#include "quire/tile/shared/cascade_merge.cuh"
#include "quire/tile/shared/logits.cuh"
#include "quire/tile/shared/stamps.h"

namespace quire {

// Each of kThreads threads has a CascadeEnding. The first of them is the CTA's thread 128. All count the same work
// tiles in step. kShared: a named barrier of these threads.
template <class V, int kThreads, int kShared, bool kExists = V::kCascade != 0>
class CascadeEnding {
 public:
  QUIRE_DEVICE explicit CascadeEnding(DeferredArrivals& deferred) : deferred_(deferred) {}

  // Called when a work tile begins. Returns the index of the work tile's first group in DeferredArrivals; -1 if the CTA
  // arrives at the groups as soon as the work tile is stored.
  QUIRE_DEVICE int begin(const WorkTile& work, int warpgroup) {
    const int at = counts_.reserve(work);
    announce_shared(work, warpgroup);
    return at;
  }

  // Called when this warpgroup has stored its rows of a work tile.
  QUIRE_DEVICE void stored(const AttentionParams& p, int warpgroup) {
    if (state_ != State::kAnnounced) return;
    state_ = State::kArrived;
    if (warpgroup != 0) return;
    ptx::cp_async_wait<0>();
    ptx::named_barrier_sync(kShared, kThreads);
    if (ptx::thread_id() < 160) deferred_.arrive_at_shared(p, counts_, ptx::lane_id());
  }

  // Called when all work tiles are stored.
  template <class Sync>
  QUIRE_DEVICE void merge(const AttentionParams& p, int warpgroup, Sync&& sync) {
    stored(p, warpgroup);
    deferred_.template merge<V, kThreads / 32>(p, counts_, state_ == State::kArrived, ptx::thread_id() - 128, sync);
  }

 private:
  // A CTA that begins with shared keys arrives at their groups before all of its work tiles are done, because other
  // CTAs wait for it. Each warpgroup announces that it has stored its rows. The first warpgroup arrives after its next
  // work tile, when all of these stores have reached memory.
  enum class State { kWaiting, kAnnounced, kArrived };

  QUIRE_DEVICE void announce_shared(const WorkTile& work, int warpgroup) {
    if (state_ != State::kWaiting || counts_.shared == 0 || ptx::uniform(work.tile.request) < 0) return;
    state_ = State::kAnnounced;
    if (warpgroup == 0) return;
    ptx::cp_async_wait<0>();
    ptx::named_barrier_arrive(kShared, kThreads);
  }

  DeferredArrivals& deferred_;
  DeferredArrivals::Counts counts_;
  State state_ = State::kWaiting;
};

// Without a cascade there is nothing to do.
template <class V, int kThreads, int kShared>
class CascadeEnding<V, kThreads, kShared, false> {
 public:
  QUIRE_DEVICE explicit CascadeEnding(DeferredArrivals&) {}
  QUIRE_DEVICE int begin(const WorkTile&, int) { return -1; }
  QUIRE_DEVICE void stored(const AttentionParams&, int) {}
  template <class Sync>
  QUIRE_DEVICE void merge(const AttentionParams&, int, Sync&&) {}
};

// The first warpgroup loads and schedules; each of the others computes 64 rows.
template <class V>
struct WgmmaShape {
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo;
  static_assert(kTileRows % 64 == 0 && kTileRows <= 192, "one to three warpgroups own 64 rows each");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256,
                "a key tile is the N of one wgmma and the inner dimension of others");

  static constexpr int kWarpgroups = kTileRows / 64;  // that compute
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kMinCtas = 1;

  using Stage = WorkStage<V>;
  static constexpr bool kIsGathered = kv_load_path<V>() == KvLoadPath::kGather;
  // Heads of 256 leave no registers for pairs, and so much work to the tensor cores that no pairs are needed.
  using Math = FragmentMath<kVo <= 128>;
  using Transform = LogitsTransform<V, Math>;

  static constexpr int kWorkStages = 4, kMaxStages = 4;
  static constexpr int kShortTiles = 4;  // KV tiles; after a work tile of so few, the next but one is scheduled at once
  static constexpr int kCapacity = 227 * 1024;                                   // of shared memory
  static constexpr int kResultBytes = kTileRows / 16 * StagedRows<kVo>::kBytes;  // of results on their way out

  template <int kQStages, int kStages>
  struct Barriers {
    unsigned char work[RingBarriers<kWorkStages>::kBytes], q[RingBarriers<kQStages>::kBytes];
    unsigned char k[RingBarriers<kStages>::kBytes], v[RingBarriers<kStages>::kBytes];
  };

  // 0 is the barrier of the CTA (__syncthreads). kTurn + i: warpgroup i may start products; kWarpgroup + i: its
  // threads.
  enum NamedBarrier { kTurn = 1, kWarpgroup = kTurn + 3, kAllConsumers = kWarpgroup + 3, kSharedStored, kKeysLoaded };

  // The loading warps give up registers, and the computing warps take them. Together they may not exceed what the
  // launch has, 65,536 rounded down to a multiple of 8 for each thread: warps would wait for the others forever.
  static constexpr bool registers_suffice(int of_loading, int of_computing) {
    return kConsumers * of_computing + 128 * of_loading <= 65536 / kThreads / 8 * 8 * kThreads;
  }
};

// What every warp of the CTA sees. Shape: a WgmmaShape with the tiles, the stages, and where they are.
template <class V, class Shape, class Params>
class WgmmaCta : public Shape {
 public:
  using Shape::kTileRows, Shape::kTileKv, Shape::kVo, Shape::kWarpgroups, Shape::kConsumers, Shape::kIsGathered,
      Shape::kWorkStages, Shape::kShortTiles, Shape::kQStages, Shape::kStages, Shape::kSchedulesLate, Shape::kKAt,
      Shape::kVAt, Shape::kResultsAt, Shape::kIsStaged, Shape::kWorkStagesAt, Shape::kQueryFactorsAt,
      Shape::kBarriersAt, Shape::kWarpgroup, Shape::kAllConsumers, Shape::kKeysLoaded;
  using typename Shape::TileQ, typename Shape::TileK, typename Shape::TileV, typename Shape::Stage,
      typename Shape::AllBarriers;

  QUIRE_DEVICE WgmmaCta(const Params& p, unsigned char* smem)
      : p_(p), stages_(reinterpret_cast<Stage*>(smem + kWorkStagesAt)), smem_(ptx::smem_address(smem)) {
    const uint32_t barriers = smem_ + kBarriersAt;
    work_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, work));
    q_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, q));
    k_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, k));
    v_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, v));
  }

 protected:
  const Params& p_;
  Stage* stages_;
  uint32_t smem_;
  RingBarriers<kWorkStages> work_;
  RingBarriers<kQStages> q_;
  RingBarriers<kStages> k_, v_;

  QUIRE_DEVICE TileQ q_tile(int stage) const { return {smem_ + stage * TileQ::kBytes}; }
  QUIRE_DEVICE TileK k_tile(int stage) const { return {smem_ + kKAt + stage * TileK::kBytes}; }
  QUIRE_DEVICE TileV v_tile(int stage) const { return {smem_ + kVAt + stage * TileV::kBytes}; }

  // Queries come by the copy engine where tiles begin with a token's first head.
  QUIRE_DEVICE bool q_by_tma() const { return kTileRows % p_.base.group.divisor == 0; }

  // --- loading ---

  // State of the scheduling warp between work tiles.
  struct Schedule {
    RingPosition<kWorkStages> at;
    int number = 0;
    bool exists = true, is_short = true;
  };

  // Schedules the next work tile, and returns its stage.
  template <class WorkList>
  QUIRE_DEVICE const Stage& schedule_next(Schedule& s, int lane) const {
    work_.wait_empty(s.at);
    // Wait until the work tile before the last is done, if the last is long: with two long work tiles taken ahead, CTAs
    // would end at less equal times.
    const auto work_tile_before_last = s.at.before().before();
    if constexpr (kSchedulesLate) {
      if (!s.is_short) ptx::named_barrier_sync(kKeysLoaded, 64);
    } else {
      if (!s.is_short) ptx::mbarrier_wait(work_.empty(work_tile_before_last.stage()), work_tile_before_last.parity());
    }
    Stage& current = stages_[s.at.stage()];
    // Take the next work tile.
    if (lane == 0) {
      const Stage& before = stages_[s.at.before().stage()];
      WorkList::next<V::kCascade != 0>(p_, before.cursor, current, s.number, kTileKv);
    }
    __syncwarp();
    s.exists = current.exists;
    // Hand it to the other warps.
    if (s.exists) current.read_block_mask(p_, lane);
    s.is_short = is_short_work(current);
    if (lane == 0) work_.arrive_full(s.at);
    s.at.advance();
    return current;
  }

  QUIRE_DEVICE static bool is_short_work(const Stage& stage) { return stage.num_kv_tiles() <= kShortTiles; }

  // Calls body(current, position) for each work tile.
  template <class Body>
  QUIRE_DEVICE void for_each_work_stage(Body&& body) const {
    RingPosition<kWorkStages> at;
    for (;;) {
      work_.wait_full(at);
      Stage& current = stages_[at.stage()];
      if (!current.exists) return;
      body(current, at);
      at.advance();
    }
  }

  // Loads the keys or values of a work tile into the ring's tiles.
  template <class Load, class TileAt>
  QUIRE_DEVICE void load_work_tile(const KvSource& from, const Stage& current, RingBarriers<kStages> ring,
                                   RingPosition<kStages>& stage, TileAt&& tile_at, int lane) const {
    KvTileWalk<V> walk(current);
    Load next(p_.base, from, current.work, lane);
    bool is_copying = false;
    KeysLeft keys_left(current, kSchedulesLate && ring.base == k_.base);
    if (walk.exists()) next.prefetch_pages(walk.tile());
#pragma unroll 1
    while (walk.exists()) {
      keys_left.next();
      next.resolve_pages();
      const Load loader = next;
      walk.advance();
      if (walk.exists()) next.prefetch_pages(walk.tile());
      ring.wait_empty(stage);
      loader.load(tile_at(stage.stage()), ring.full(stage.stage()));
      if constexpr (kIsGathered) {
        if (is_copying) arrive_copied<1>(ring.full(stage.before().stage()));
        is_copying = true;
      }
      stage.advance();
    }
    if constexpr (kIsGathered) {
      if (is_copying) arrive_copied<0>(ring.full(stage.before().stage()));
    }
    keys_left.end();
  }

  // Lets the scheduling warp go on when the last few keys of a long work tile are about to be loaded, so that the next
  // work tile is known when their stages are free.
  struct KeysLeft {
    int count;
    bool is_awaited;

    QUIRE_DEVICE KeysLeft(const Stage& current, bool are_keys)
        : count(current.num_kv_tiles()), is_awaited(are_keys && !is_short_work(current)) {}
    QUIRE_DEVICE void next() {
      if (is_awaited && count <= kShortTiles) end();
      --count;
    }
    QUIRE_DEVICE void end() {
      if (is_awaited) ptx::named_barrier_arrive(kKeysLoaded, 64);
      is_awaited = false;
    }
  };

  QUIRE_DEVICE void copy_q_by_tma(const Stage& current, RingPosition<kQStages>& stage, int lane) const {
    const bool has_tiles = KvTileWalk<V>(current).exists();
    if (lane == 0 && q_by_tma() && has_tiles) {
      q_.wait_empty(stage);
      const uint32_t barrier = q_.full(stage.stage());
      ptx::mbarrier_arrive_expect(barrier, TileQ::kBytes);
      const int token = current.work.tile.qo_begin + p_.base.group.div(current.work.tile.row_begin);
#pragma unroll
      for (int i = 0; i < TileQ::kAtoms; ++i) {
        ptx::tma_load_4d(q_tile(stage.stage()).base + i * TileQ::kAtomBytes, &p_.tensor_q, barrier,
                         i * TileQ::kAtomCols, 0, token, current.work.kv_head);
      }
      stage.advance();
    }
  }

  // --- computing ---

  // Reads again on each call, to save registers.
  QUIRE_DEVICE static int warpgroup() { return ptx::thread_id() / 128 - 1; }
  QUIRE_DEVICE static bool is_leader() { return ptx::thread_id() % 128 == 0; }

  // Whether one warpgroup computes, stores and merges a work tile. In a cascade many work tiles have a few rows: each
  // warpgroup computes one of them, at the same time and without taking turns at the tensor cores.
  QUIRE_DEVICE static bool fits_one_warpgroup(const WorkTile& work) {
    if constexpr (V::kCascade == 0 || kWarpgroups == 1) return false;
    return ptx::uniform(work.row_end - work.tile.row_begin) <= 64;
  }

  // Index of this warpgroup's 64 rows in the row tile.
  QUIRE_DEVICE static int part_of(const WorkTile& work) { return fits_one_warpgroup(work) ? 0 : warpgroup(); }

  // This lane's upper row in the tile.
  QUIRE_DEVICE static int lane_row(int lane) { return (ptx::thread_id() - 128) / 32 * 16 + lane / 4; }
  QUIRE_DEVICE static int lane_row(const WorkTile& work, int lane) {
    if constexpr (V::kCascade == 0) return lane_row(lane);
    return part_of(work) * 64 + ptx::thread_id() % 128 / 32 * 16 + lane / 4;
  }

  // Of the warpgroups that compute the work tile, the first acts for all.
  QUIRE_DEVICE void note(const WorkTile& work, Moment moment) const {
    if constexpr (V::kTimed != 0) stamp<V>(p_.base, work, moment, part_of(work) == 0 && is_leader());
  }

  QUIRE_DEVICE TileDescriptor queries(RingPosition<kQStages> at, int turn) const {
    return {q_tile(at.stage()).base + turn * 64 * 128, 16};
  }
  QUIRE_DEVICE TileDescriptor keys(RingPosition<kStages> at) const { return {k_tile(at.stage()).base, 16}; }

  // The logits of this lane.
  QUIRE_DEVICE LogitsTile<V> logits_tile(const Stage& stage, int tile) const {
    const WorkTile& work = stage.work;
    const int lane = ptx::lane_id(), row = work.tile.row_begin + lane_row(work, lane);
    return {{work.tile.qo_len, work.tile.kv_len, p_.base.window_left, stage.bits()},
            p_.base.group,
            work.tile.request,
            work.kv_head,
            row,
            tile * kTileKv,
            lane};
  }

  // The factor of this lane's row h, in shared memory.
  QUIRE_DEVICE uint32_t query_factor_at(int h) const {
    return smem_ + kQueryFactorsAt + (lane_row(ptx::lane_id()) + 8 * h) * 4;
  }

  // This warpgroup's rows of q, where a tile may begin between heads of a token. Rows that do not exist become zeros.
  QUIRE_DEVICE void copy_q(TileQ q, const WorkTile& work) const {
    using Q = typename V::Q;
    using Split = RowSplit<128, TileQ::kChunks>;
    const Split split(ptx::thread_id() % 128);
    for (int r = split.row; r < 64; r += Split::kRowsAtOnce) {
      const int row = work.tile.row_begin + part_of(work) * 64 + r;
      const WorkTile::Place at = work.place(p_.base.group, min(row, work.row_end - 1));
      const Q* src =
          static_cast<const Q*>(p_.base.q) + at.token * p_.base.q_token_stride + at.head * p_.base.q_head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(q.chunk(part_of(work) * 64 + r, chunk), src + chunk * (16 / static_cast<int>(sizeof(Q))),
                         row < work.row_end ? 16 : 0);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
  }

  QUIRE_DEVICE void store_whole(const float (&o)[kVo / 2], const WarpgroupSoftmax& softmax, const WorkTile& work,
                                int tile_row, int lane) const {
    using O = typename V::O;
    const AttentionParams& p = p_.base;
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.tile.row_begin + tile_row + 8 * h;
      const WorkTile::Place at = work.place(p.group, min(row, work.row_end - 1));
      const RowResult result = finish_row(p, at.head, softmax.m[h], softmax.d[h]);
      scale[h] = result.scale;
      if (p.lse != nullptr && lane % 4 == 0 && row < work.row_end) store_lse<V>(p, work.tile, at, result.lse);
      if constexpr (!kIsStaged) {
        O* dst = static_cast<O*>(p.o) + at.token * p.o_token_stride + at.head * p.o_head_stride;
        store_row(dst, o, h, result.scale, row < work.row_end, lane);
      }
    }
    if constexpr (kIsStaged) {
      const int warp = ptx::thread_id() / 32 - 4, first = work.tile.row_begin + warp * 16;
      const WorkTile::Place at = work.place(p.group, min(first + lane % 16, work.row_end - 1));
      const int64_t begin = at.token * p.o_token_stride + at.head * p.o_head_stride;  // a multiple of 8
      const StagedRows<kVo> staged = {smem_ + kResultsAt + warp * StagedRows<kVo>::kBytes};
      staged.store(static_cast<O*>(p.o), static_cast<uint32_t>(begin >> 3), work.row_end - first, o, scale, lane);
    }
  }

  QUIRE_DEVICE DeferredArrivals& deferred_arrivals() const {
    return *reinterpret_cast<DeferredArrivals*>(reinterpret_cast<unsigned char*>(stages_) + Shape::kDeferredArrivalsAt -
                                                kWorkStagesAt);
  }

  // deferred_at: the first of the work tile's places in DeferredArrivals; -1: it arrives at its merge groups at once.
  QUIRE_DEVICE void store_partial(const float (&o)[kVo / 2], const WarpgroupSoftmax& softmax, Stage& stage,
                                  int tile_row, int lane, int deferred_at) const {
    const AttentionParams& p = p_.base;
    const WorkTile& work = stage.work;
    const int thread = ptx::thread_id() - 128;
    MergeGroup group = {};
    if constexpr (V::kCascade == 0) group = p.groups[work.group];
    store_partial_rows<V::kCascade != 0 ? 1 : kTileRows>(p, work.partial, o, softmax.m, softmax.d, tile_row,
                                                         work.row_end - work.tile.row_begin, lane);
    const auto sync_all = [] { ptx::named_barrier_sync(kAllConsumers, kConsumers); };
    if constexpr (V::kCascade == 0) {
      if (arrives_last(p.groups + work.group, group.num_parts(), thread == 0, stage.is_last, sync_all)) {
        call_merge_partials<V, kConsumers / 32, kVo <= 128>(p, work, group, thread);
      }
    } else if (deferred_at >= 0) {
      if (fits_one_warpgroup(work) || warpgroup() == 0)
        deferred_arrivals().put(p, work, deferred_at, ptx::thread_id() % 128);
    } else if (fits_one_warpgroup(work)) {
      merge_cascade<V, 4>(p, work, stage.work.group, ptx::thread_id() % 128,
                          [] { ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128); });
    } else {
      merge_cascade<V, kConsumers / 32>(p, work, stage.work.group, thread, sync_all);
    }
  }
};

}  // namespace quire
