// Attention with the warpgroup matrix instruction and the bulk copy engine: sm_90a, head dims that are multiples of 16.
//
// Bound: tensor cores, and through them the card's power. Softmax needs 64 / head_dim of the tensor cores' time, so it
// has to run beside them: a warpgroup computes S of the next tile and O of the last in one go and does the softmax of
// one while the other is under way, and warpgroups take turns at the tensor cores (named barriers).
// Schedule: persistent CTAs, one an SM. Warps of the first warpgroup load keys, values and queries and schedule, one
// work ahead, so that a work's first tiles travel while the work before it ends; the others own 64 rows each, and
// compute a work's first scores while they store the results of the work before.
// What a warp decides (which tile, masked or not) comes from uniform values, so that ring positions and descriptors
// stay in uniform registers: where ptxas cannot see that, turns take longer and the kernel loses 7 to 14 % (H200,
// 2026-11-21). Tried on the same day and dropped: softmax pinned before the last wait (-3 to -5 %), queries held in
// registers (-1 %), L2 hints on copies (0), handing a turn over before its last products (0), results by bulk copies of
// rows (-5 %: 16 instructions of one lane each), programmatic dependent launch (0), row tiles of short requests in a
// run on one CTA, which then finds their keys in its stages (-4 %: the copies it saves gain 1 %), and no softmax of the
// half of a last tile that nobody sees (0): 64 x 128 tokens wait for memory.
//
// Sources: FlashAttention-3 (Shah et al., 2024) for the pipeline, FlashAttention-4 for rescaling only when the maximum
// has grown.
#pragma once
#include "quire/core/params_fa3.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/sm90_gemm.cuh"
#include "quire/tile/sm90_load.cuh"
#include "quire/tile/sm90_softmax.cuh"
#include "quire/tile/sm90_store.cuh"
#include "quire/tile/sm90_kv_tiles.cuh"
#include "quire/tile/smem.cuh"

namespace quire {

template <class V>
struct AttentionFa3 {
  using T = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo;

  static_assert(is_same<typename V::Q, typename V::Kv>::value && is_same<typename V::Q, typename V::O>::value,
                "q, k, v and o have one dtype");
  static_assert(kQk % 16 == 0 && kVo % 16 == 0 && max(kQk, kVo) <= 256, "head dims are multiples of 16 up to 256");
  static_assert(kTileRows % 64 == 0 && kTileRows <= 192, "one to three warpgroups own 64 rows each");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256,
                "a key tile is the N of one wgmma and the inner dimension of others");

  static constexpr int kWarpgroups = kTileRows / 64;  // that compute
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kMinCtas = 1;

 private:
  using TileQ = SwizzledTile<kTileRows, kQk>;
  using TileK = SwizzledTile<kTileKv, kQk>;
  using TileV = SwizzledTile<kTileKv, kVo>;
  using Stage = WorkStage<V>;
  using Loader = KvLoader<V>;
  static constexpr bool kIsGathered = kv_path<V>() == KvPath::kGather;

  static constexpr int kWorkStages = 4;
  static constexpr int kShortTiles = 4;  // a work of so few lets the next but one be scheduled before it ends
  static constexpr int kBarrierBytes = 256;
  static constexpr int kOtherBytes = kWorkStages * static_cast<int>(sizeof(Stage)) + kBarrierBytes;
  static constexpr int kRoom = 227 * 1024 - kOtherBytes;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  // Two tiles of queries where two stages of keys and values still fit: short work tiles then overlap.
  static constexpr int kQStages = 2 * TileQ::kBytes + 2 * kStageBytes <= kRoom ? 2 : 1;
  static constexpr int kStages = max(2, min(4, (kRoom - kQStages * TileQ::kBytes) / kStageBytes));
  // A work begins before the one ahead of it is stored. Not where ptxas then keeps ring positions in registers that
  // are not uniform (three stages), nor where registers are short (custom masks).
  static constexpr bool kIsEarly = kQStages > 1 && (kStages & (kStages - 1)) == 0 && V::kMask != kMaskCustom;

  static constexpr int kKAt = kQStages * TileQ::kBytes;
  static constexpr int kVAt = kKAt + kStages * TileK::kBytes;
  // Results leave by way of shared memory where that takes no stage away.
  static constexpr int kStagedBytes = kTileRows / 16 * StagedRows<kVo>::kBytes;
  static constexpr int kStagedAt = kVAt + kStages * TileV::kBytes;
  static constexpr bool kIsStaged = kStagedAt + kStagedBytes <= kRoom;
  static constexpr int kWorkStagesAt = kStagedAt + (kIsStaged ? kStagedBytes : 0);
  static constexpr int kBarriersAt = kWorkStagesAt + kWorkStages * static_cast<int>(sizeof(Stage));
  static_assert(sizeof(Stage) % 8 == 0, "mbarriers follow the slots");

  // Registers a thread: what the loading warps give up the others take. A launch gets a multiple of 8 for each thread,
  // 65,536 at most; asking for more than that hangs. Scheduling takes 56 (it divides 64-bit numbers). Three warpgroups
  // at 128 keys leave 32: the scheduling warp then spills, once a work.
  static constexpr int kLoadRegisters = kWarpgroups == 3 && kTileKv > 112 ? 32 : 56;
  static constexpr int kComputeRegisters = kWarpgroups == 3   ? (kTileKv > 112 ? 160 : 152)
                                           : kWarpgroups == 2 ? 224
                                                              : 240;
  static_assert(kConsumers * kComputeRegisters + 128 * kLoadRegisters <= 65536 / kThreads / 8 * 8 * kThreads,
                "the warps ask for more registers than the launch has, and would wait for them forever");

  enum Role { kLoadK, kLoadV, kLoadQ, kSchedule };
  // Named barriers; 0 is that of the whole CTA.
  enum Named { kTurn = 1, kWarpgroup = kTurn + 3, kAllConsumers = kWarpgroup + 3 };

 public:
  static constexpr int kSmemBytes = kBarriersAt + kBarrierBytes;
  static_assert(kSmemBytes <= 227 * 1024, "the tiles do not fit into shared memory");

  QUIRE_DEVICE static void run(const AttentionFa3Params& p, unsigned char* smem) {
    const AttentionFa3 self(p, smem);
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) self.init_barriers();
    __syncthreads();
    if (warpgroup == 0) {
      ptx::give_registers<kLoadRegisters>();
      self.produce();
    } else {
      ptx::take_registers<kComputeRegisters>();
      self.compute();
    }
  }

 private:
  const AttentionFa3Params& p_;
  Stage* stages_;
  uint32_t smem_;
  RingBarriers<kWorkStages> work_;
  RingBarriers<kQStages> q_;
  RingBarriers<kStages> k_, v_;

  QUIRE_DEVICE AttentionFa3(const AttentionFa3Params& p, unsigned char* smem)
      : p_(p), stages_(reinterpret_cast<Stage*>(smem + kWorkStagesAt)), smem_(ptx::smem_address(smem)) {
    work_.base = smem_ + kBarriersAt;
    q_.base = work_.base + RingBarriers<kWorkStages>::kBytes;
    k_.base = q_.base + RingBarriers<kQStages>::kBytes;
    v_.base = k_.base + RingBarriers<kStages>::kBytes;
  }

  QUIRE_DEVICE TileQ q_tile(int stage) const { return {smem_ + stage * TileQ::kBytes}; }
  QUIRE_DEVICE TileK k_tile(int stage) const { return {smem_ + kKAt + stage * TileK::kBytes}; }
  QUIRE_DEVICE TileV v_tile(int stage) const { return {smem_ + kVAt + stage * TileV::kBytes}; }

  // Full: who fills arrives, once a slot. Empty: each computing warpgroup does, since a product's reads are over for
  // all of it at once; of work tiles, which lanes read, each warp but the scheduling one.
  QUIRE_DEVICE void init_barriers() const {
    work_.init(1, kWarpgroups * 4 + 3);
    q_.init(1, kWarpgroups);
    k_.init(Loader::kArrivals, kWarpgroups);
    v_.init(Loader::kArrivals, kWarpgroups);
    ptx::fence_mbarrier_init();
  }

  // Queries come by the copy engine where tiles begin with a token's first head.
  QUIRE_DEVICE bool q_by_tma() const { return kTileRows % p_.base.group.divisor == 0; }

  QUIRE_DEVICE void produce() const {
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = ptx::lane_id();
    if (warp == kLoadK) load_kv(KvSource::k(p_), k_, [&](int stage) { return k_tile(stage); }, lane);
    if (warp == kLoadV) load_kv(KvSource::v(p_), v_, [&](int stage) { return v_tile(stage); }, lane);
    if (warp == kLoadQ) load_q(lane);
    if (warp == kSchedule) schedule(lane);
  }

  QUIRE_DEVICE void schedule(int lane) const {
    RingPosition<kWorkStages> at;
    int number = 0;
    if (lane == 0) WorkList::begin(p_, stages_[kWorkStages - 1].cursor, number);
    bool exists = true, is_short = true;
    for (; exists; at.advance()) {
      work_.wait_empty(at);
      // Taken too early, long work tiles would make the end of the launch uneven: one of them ahead is enough.
      const auto two_before = at.before().before();
      if (!is_short) ptx::mbarrier_wait(work_.empty(two_before.stage()), two_before.parity());
      Stage& slot = stages_[at.stage()];
      if (lane == 0) {
        const Stage& before = stages_[at.before().stage()];
        WorkList::next(p_, before.cursor, slot, number, kTileKv);
      }
      __syncwarp();
      exists = slot.exists;
      is_short = slot.work.kv_end - slot.work.kv_begin <= kShortTiles;
      if (exists) slot.prefetch_pages(p_, lane);
      if (lane == 0) work_.arrive_full(at);
    }
  }

  // Calls body(slot) for each work.
  template <class Body>
  QUIRE_DEVICE void for_each_work_stage(Body&& body) const {
    RingPosition<kWorkStages> at;
    for (;;) {
      work_.wait_full(at);
      Stage& slot = stages_[at.stage()];
      if (!slot.exists) return;
      body(slot, at);
      at.advance();
    }
  }

  template <class TileAt>
  QUIRE_DEVICE void load_kv(const KvSource& from, RingBarriers<kStages> ring, TileAt&& tile_at, int lane) const {
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    RingPosition<kStages> stage;
    for_each_work_stage([&](const Stage& slot, RingPosition<kWorkStages> at) {
      TileWalk<V> walk(slot);
      Loader next(p_.base, from, slot.work, lane);
      bool is_landing = false;
      if (walk.exists()) next.fetch(walk.tile());
#pragma unroll 1
      while (walk.exists()) {
        next.locate();
        const Loader loader = next;
        walk.advance();
        if (walk.exists()) next.fetch(walk.tile());
        ring.wait_empty(stage);
        loader.load(tile_at(stage.stage()), ring.full(stage.stage()));
        if constexpr (kIsGathered) {
          if (is_landing) Loader::template land<1>(ring.full(stage.before().stage()));
          is_landing = true;
        }
        stage.advance();
      }
      if constexpr (kIsGathered) {
        if (is_landing) Loader::template land<0>(ring.full(stage.before().stage()));
      }
      __syncwarp();
      if (lane == 0) work_.arrive_empty(at);
    });
  }

  QUIRE_DEVICE void load_q(int lane) const {
    if (lane == 0 && q_by_tma()) ptx::prefetch_tensor_map(&p_.tensor_q);
    RingPosition<kQStages> stage;
    for_each_work_stage([&](const Stage& slot, RingPosition<kWorkStages> at) {
      const bool has_tiles = TileWalk<V>(slot).exists();
      if (lane == 0 && q_by_tma() && has_tiles) {
        q_.wait_empty(stage);
        const uint32_t barrier = q_.full(stage.stage());
        ptx::mbarrier_arrive_expect(barrier, TileQ::kBytes);
        const int token = slot.work.tile.qo_begin + p_.base.group.div(slot.work.tile.row_begin);
#pragma unroll
        for (int i = 0; i < TileQ::kAtoms; ++i) {
          ptx::tma_load_4d(q_tile(stage.stage()).base + i * TileQ::kAtomBytes, &p_.tensor_q, barrier, i * 64, 0, token,
                           slot.work.kv_head);
        }
        stage.advance();
      }
      __syncwarp();
      if (lane == 0) work_.arrive_empty(at);
    });
  }

  // Where a computing warpgroup stands in the rings. Values are one tile behind keys.
  struct Rings {
    RingPosition<kQStages> q;
    RingPosition<kStages> k;
  };

  // A warpgroup's rows and what it knows of them.
  struct Rows {
    float o[kVo / 2];
    WarpgroupSoftmax softmax;
    uint32_t p[kTileKv / 16][4];  // weights of the tile whose values are next

    QUIRE_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kVo / 2; ++i) o[i] = 0.f;
      softmax.clear();
    }
  };

  QUIRE_DEVICE void compute() const {
    Rings rings;
    if (kWarpgroups > 1 && warpgroup() == 0) ptx::named_barrier_arrive(kTurn, 256);
    RingPosition<kWorkStages> at;
    for (;;) {
      work_.wait_full(at);
      if (!ptx::uniform(stages_[at.stage()].exists)) break;
      Rows rows;
      rows.clear();
      if (ptx::uniform(TileWalk<V>(stages_[at.stage()]).exists())) attend_work_tiles(rows, at, rings);
      Stage& slot = stages_[at.stage()];
      store(rows, slot);
      leave(at);
    }
  }

  QUIRE_DEVICE void leave(RingPosition<kWorkStages>& at) const {
    __syncwarp();
    if (ptx::lane_id() == 0) work_.arrive_empty(at);
    at.advance();
  }

  // Work tiles that have tiles, from `at` on, until one whose successor has none; that one's rows are not stored yet.
  // The first scores of a work are on their way before the rows of the work before it are stored: the tensor cores have
  // work meanwhile, and the softmax that follows does not wait.
  QUIRE_DEVICE void attend_work_tiles(Rows& rows, RingPosition<kWorkStages>& at, Rings& rings) const {
    const int turn = ptx::uniform(warpgroup());
    float s[kTileKv / 2];
    wait_work_tile(stages_[at.stage()], rings);
    start_ABt<T, TileQ, TileK>(s, queries(rings.q, turn), keys(rings.k));
#pragma unroll 1
    for (;;) {
      if constexpr (kIsEarly) rings.q = rings.q.uniform(), rings.k = rings.k.uniform(), at = at.uniform();
      Stage& slot = stages_[at.stage()];
      attend(rows, s, slot, rings, turn);
      const auto last = rings.k.before();
      v_.wait_full(last);
      const auto next = at.after();
      bool goes_on = kIsEarly && ptx::uniform(slot.work.is_whole());
      if (goes_on) {
        work_.wait_full(next);
        goes_on = ptx::uniform(stages_[next.stage()].exists && TileWalk<V>(stages_[next.stage()]).exists());
      }
      if (!goes_on) {
        start_AB<T, TileV>(rows.o, rows.p, values(last));
        ptx::wgmma_wait<0>();
        ptx::pin(rows.o);
        if (is_leader()) v_.arrive_empty(last);
        return;
      }
      wait_work_tile(stages_[next.stage()], rings);
      const TileDescriptor q = queries(rings.q, turn), k = keys(rings.k), v = values(last);
      start_AB<T, TileV>(rows.o, rows.p, v);
      start_ABt<T, TileQ, TileK>(s, q, k);
      ptx::wgmma_wait<1>();
      ptx::pin(rows.o);
      if (is_leader()) v_.arrive_empty(last);
      rows.softmax.reduce();
      store_whole(rows, slot.work, lane_row(ptx::lane_id()), ptx::lane_id());
      leave(at);
      rows.clear();
    }
  }

  QUIRE_DEVICE TileDescriptor queries(RingPosition<kQStages> at, int turn) const {
    return {q_tile(at.stage()).base + turn * 64 * 128, 16};
  }

  // Until the queries and first keys of a work are there.
  QUIRE_DEVICE void wait_work_tile(const Stage& slot, const Rings& rings) const {
    if (q_by_tma()) {
      q_.wait_full(rings.q);
    } else {
      copy_q(q_tile(rings.q.stage()), slot.work);
    }
    k_.wait_full(rings.k);
  }

  // The main loop: o, m and d of this warpgroup's 64 rows over the work's key tiles, but for the last tile's values.
  // s: scores of the first tile, under way.
  QUIRE_DEVICE void attend(Rows& rows, float (&s)[kTileKv / 2], const Stage& slot, Rings& rings, int turn) const {
    TileWalk<V> walk(slot);
    const WholeTiles<V> whole(p_.base, slot, slot.work.tile.row_begin + turn * 64);
    const TileDescriptor q = queries(rings.q, turn);
    first_tile(rows, s, slot, rings, walk.tile());
    for (walk.advance(); walk.exists(); walk.advance()) {
      if (whole.contains(walk)) {
        next_tile<false>(rows, slot, rings, q, turn, walk.tile());
      } else {
        next_tile<true>(rows, slot, rings, q, turn, walk.tile());
      }
    }
    if (q_by_tma() && is_leader()) q_.arrive_empty(rings.q);
    rings.q.advance();
  }

  // Asked anew each time: registers are short.
  QUIRE_DEVICE static int warpgroup() { return ptx::thread_id() / 128 - 1; }
  QUIRE_DEVICE static bool is_leader() { return ptx::thread_id() % 128 == 0; }

  // This lane's upper row in the tile.
  QUIRE_DEVICE static int lane_row(int lane) { return (ptx::thread_id() - 128) / 32 * 16 + lane / 4; }

  QUIRE_DEVICE TileDescriptor keys(RingPosition<kStages> at) const { return {k_tile(at.stage()).base, 16}; }
  QUIRE_DEVICE TileDescriptor values(RingPosition<kStages> at) const {
    return {v_tile(at.stage()).base, TileV::kAtomBytes};
  }

  // The rightmost tile, whose S is under way: its softmax alone.
  QUIRE_DEVICE void first_tile(Rows& rows, float (&s)[kTileKv / 2], const Stage& slot, Rings& rings, int tile) const {
    TileBits<V, 2> mask;
    mask.read(logits_tile(slot, tile));
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    rings.k.advance();
    apply_softmax<true>(rows, s, slot, tile, mask);
    round_weights<T>(s, rows.p);
    // Values from kv_len on may be anything, and 0 * NaN is NaN. The gather has put zeros there.
    const int valid = slot.work.tile.kv_len - tile * kTileKv;
    if (!kIsGathered && valid < kTileKv) clear_values(rings.k.before(), valid);
  }

  // S of this tile and, beside it, O of the tile before; then the softmax of S while O is still under way.
  template <bool kMasked>
  QUIRE_DEVICE void next_tile(Rows& rows, const Stage& slot, Rings& rings, TileDescriptor q, int turn, int tile) const {
    float s[kTileKv / 2];
    // All that can be looked up and waited for comes before the turn: tensor cores are idle from hand-over to product.
    const auto before = rings.k.before();
    const TileDescriptor k = keys(rings.k), v = values(before);
    TileBits<V, 2> mask;
    if constexpr (kMasked) mask.read(logits_tile(slot, tile));
    v_.wait_full(before);
    k_.wait_full(rings.k);
    if constexpr (kWarpgroups > 1) ptx::named_barrier_sync(kTurn + turn, 256);
    start_ABt<T, TileQ, TileK>(s, q, k);
    start_AB<T, TileV>(rows.o, rows.p, v);
    if constexpr (kWarpgroups > 1) ptx::named_barrier_arrive(kTurn + (turn + 1) % kWarpgroups, 256);
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    rings.k.advance();
    apply_softmax<kMasked>(rows, s, slot, tile, mask);
    ptx::wgmma_wait<0>();
    ptx::pin(rows.o);
#pragma unroll
    for (int k = 0; k < kTileKv / 16; ++k) ptx::pin(rows.p[k]);
    if (is_leader()) v_.arrive_empty(rings.k.before().before());
    round_weights<T>(s, rows.p);
    rows.softmax.rescale(rows.o);
  }

  // The logits of this lane.
  QUIRE_DEVICE LogitsTile<V> logits_tile(const Stage& stage, int tile) const {
    const WorkTile& work = stage.work;
    const int lane = ptx::lane_id(), row = work.tile.row_begin + lane_row(lane);
    return {{work.tile.qo_len, work.tile.kv_len, p_.base.window_left, stage.bits()},
            p_.base.group,
            work.tile.request,
            work.kv_head,
            row,
            tile * kTileKv,
            lane};
  }

  // From q . k to weights. Here a variant's transform and mask come in.
  template <bool kMasked>
  QUIRE_DEVICE void apply_softmax(Rows& rows, float (&s)[kTileKv / 2], const Stage& stage, int tile,
                                  const TileBits<V, 2>& bits) const {
    // Heads of 256 leave no registers for pairs, and so much work to the tensor cores that no pairs are needed.
    const LogitsTransform<V, FragmentMath<kVo <= 128>> transform(p_.base);
    score_logits<kMasked>(s, transform, logits_tile(stage, tile), bits);
    rows.softmax.raise_max(s, transform.factor);
    rows.softmax.exponentiate(s, transform.factor);
  }

  // Zeros in the rows of v from `valid` on; every warpgroup writes them all, rather than wait for the others.
  QUIRE_DEVICE void clear_values(RingPosition<kStages> at, int valid) const {
    v_.wait_full(at);
    const TileV v = v_tile(at.stage());
    for (int i = ptx::thread_id() % 128; i < (kTileKv - valid) * TileV::kChunks; i += 128) {
      const int row = i / TileV::kChunks;
      const uint32_t chunk = v.chunk(valid + row, i - row * TileV::kChunks);
#pragma unroll
      for (int word = 0; word < 4; ++word) ptx::st_shared(chunk + 4 * word, 0);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
  }

  // This warpgroup's rows of q, where a tile may begin amid a token's heads; rows that do not exist become zeros.
  QUIRE_DEVICE void copy_q(TileQ q, const WorkTile& work) const {
    using Split = RowSplit<128, TileQ::kChunks>;
    const Split split(ptx::thread_id() % 128);
    for (int r = split.row; r < 64; r += Split::kRowsAtOnce) {
      const int row = work.tile.row_begin + warpgroup() * 64 + r;
      const WorkTile::Place at = work.place(p_.base.group, min(row, work.row_end - 1));
      const T* src =
          static_cast<const T*>(p_.base.q) + at.token * p_.base.q_token_stride + at.head * p_.base.q_head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(q.chunk(warpgroup() * 64 + r, chunk), src + chunk * 8, row < work.row_end ? 16 : 0);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
  }

  QUIRE_DEVICE void store(Rows& rows, Stage& stage) const {
    rows.softmax.reduce();
    const int lane = ptx::lane_id(), row = lane_row(lane);
    if (stage.work.is_whole()) {
      store_whole(rows, stage.work, row, lane);
    } else {
      store_partial(rows, stage, row, lane);
    }
  }

  QUIRE_DEVICE void store_whole(const Rows& rows, const WorkTile& work, int tile_row, int lane) const {
    const AttentionParams& p = p_.base;
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.tile.row_begin + tile_row + 8 * h;
      const WorkTile::Place at = work.place(p.group, min(row, work.row_end - 1));
      const float* sink = p.sinks == nullptr ? nullptr : p.sinks + at.head;
      const RowResult result = finish_row(rows.softmax.m[h], rows.softmax.d[h], sink, output_scale(p));
      scale[h] = result.scale;
      if (p.lse != nullptr && lane % 4 == 0 && row < work.row_end) {
        p.lse[at.token * p.num_qo_heads + at.head] = result.lse;
      }
      if constexpr (!kIsStaged) {
        T* dst = static_cast<T*>(p.o) + at.token * p.o_token_stride + at.head * p.o_head_stride;
        store_row(dst, rows.o, h, result.scale, row < work.row_end, lane);
      }
    }
    if constexpr (kIsStaged) {
      const int warp = ptx::thread_id() / 32 - 4, first = work.tile.row_begin + warp * 16;
      const WorkTile::Place at = work.place(p.group, min(first + lane % 16, work.row_end - 1));
      const int64_t begin = at.token * p.o_token_stride + at.head * p.o_head_stride;  // a multiple of 8
      const StagedRows<kVo> staged = {smem_ + kStagedAt + warp * StagedRows<kVo>::kBytes};
      staged.store(static_cast<T*>(p.o), static_cast<uint32_t>(begin >> 3), work.row_end - first, rows.o, scale, lane);
    }
  }

  QUIRE_DEVICE void store_partial(const Rows& rows, Stage& stage, int tile_row, int lane) const {
    const AttentionParams& p = p_.base;
    const WorkTile& work = stage.work;
    const MergeGroup group = p.groups[work.group];
    const int thread = ptx::thread_id() - 128;
    store_partial_rows<kTileRows>(p, work.partial, rows.o, rows.softmax.m, rows.softmax.d, tile_row,
                                  work.row_end - work.tile.row_begin, lane);
    if (arrives_last(p.groups + work.group, group.num_parts<kTileRows>(), thread == 0, stage.is_last,
                     [] { ptx::named_barrier_sync(kAllConsumers, kConsumers); })) {
      call_merge_partials<V, kConsumers / 32>(p, work, group, thread);
    }
  }
};

}  // namespace quire
