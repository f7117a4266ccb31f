// Attention with wgmma and TMA over e4m3 queries, keys and values, multiplied as they are: sm_90a, head dims that are
// multiples of 32.
//
// The kernel is limited by the exponential function and by shared memory as much as by the tensor cores, which are
// twice as fast as over 16 bits. The schedule is that of attention_fa3.cuh. What differs:
// Values: products of 8 bits have no transposed operand, so that two loading warps transpose values in shared memory
// (tile/hopper/transpose.cuh). The order of tokens in the transposed tile makes the accumulators of S = Q K^T the
// operand of O += P V without an exchange between lanes. Sums: the tensor cores add up with about 14 bits. O += P V of
// each KV tile starts from 0, a part of the columns at a time, and is added to O in float32: the error does not grow
// with the number of keys. Weights: the largest weight of a row is 2^kFirstExponent when its reference maximum is
// chosen, and at most 2^kMaxLag later, of the 448 that e4m3 reaches. The scale is the same for all KV tiles, and a
// row's largest weight is exact.
//
// Sources: FlashAttention-3 (Shah et al., 2024) for the pipeline and the transpose; DeepSeek-V3 for sums in two levels.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/hopper/fp8_gemm.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/kv_tiles.cuh"
#include "quire/tile/hopper/rows.cuh"
#include "quire/tile/hopper/softmax.cuh"
#include "quire/tile/hopper/transpose.cuh"
#include "quire/tile/shared/smem.cuh"
#include "quire/tile/shared/stamps.h"

namespace quire {

template <class V, class WorkList = SharedWorkList<1>>
struct AttentionFa3Fp8 {
  using O = typename V::O;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo;

  static_assert(is_same<typename V::Q, e4m3_t>::value && is_same<typename V::Kv, e4m3_t>::value, "q, k and v are e4m3");
  static_assert(kQk % 32 == 0 && kVo % 32 == 0 && max(kQk, kVo) <= 256, "head dims are multiples of 32 up to 256");
  static_assert(kTileRows % 64 == 0 && kTileRows >= 128 && kTileRows <= 192,
                "two or three warpgroups own 64 rows each");
  static_assert(kTileKv % 32 == 0 && kTileKv <= 256,
                "a key tile is the N of one wgmma and the inner dimension of others");

  static constexpr int kWarpgroups = kTileRows / 64;  // that compute
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kMinCtas = 1;

 private:
  using TileQ = SwizzledTile<kTileRows, kQk, 8>;
  using TileK = SwizzledTile<kTileKv, kQk, 8>;
  using TileV = SwizzledTile<kVo, kTileKv, 8>;  // transposed
  using Stage = WorkStage<V>;
  static constexpr bool kIsGathered = kv_load_path<V>() == KvLoadPath::kGather;
  using Keys = typename conditional<kIsGathered, Fp8Gather<V, TileK, kTileKv>, KvLoader<V>>::type;
  using Math = FragmentMath<kVo <= 128>;
  using Transform = LogitsTransform<V, Math>;
  using Bits = TileBits<V, 2>;

  // Whether S of the next KV tile is computed beside O += P V of the last one. Three warpgroups have no registers for
  // this, and need it less; neither do wide heads.
  static constexpr bool kOverlaps = kWarpgroups == 2 && kVo <= 128;
  // Columns of a part of O += P V, which are in registers beside O.
  static constexpr int kPartCols = kVo == 256 ? 128 : kVo == 96 ? 96 : kVo % 64 == 0 ? 64 : 32;
  static constexpr int kParts = kVo / kPartCols;
  static_assert(kVo % kPartCols == 0, "parts are equal");

  // The weight of the largest logit, when a row's reference maximum is chosen, is 2^kFirstExponent.
  static constexpr float kFirstExponent = 5.f;

  static constexpr int kWorkStages = 4;
  static constexpr int kShortTiles = 4;  // KV tiles; after a work tile of so few, the next but one is scheduled at once
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kMaxStages = 4;
  static constexpr int kOwnStages = 2;  // of values before they are transposed
  static constexpr int kOwnBytes = 2 * kOwnStages * SwizzledTile<kTileKv / 2, kVo, 8>::kBytes;

  template <int kQStages, int kStages>
  struct Barriers {
    unsigned char work[RingBarriers<kWorkStages>::kBytes], q[RingBarriers<kQStages>::kBytes];
    unsigned char k[RingBarriers<kStages>::kBytes], v[RingBarriers<kStages>::kBytes];
    unsigned char arrived[2 * kOwnStages * 8];
  };
  static constexpr int kCapacity = 227 * 1024;
  static constexpr int kQueryFactorsBytes = kTileRows * 4;
  static constexpr int kOtherBytes =
      static_cast<int>(kWorkStages * sizeof(Stage) + sizeof(Barriers<2, kMaxStages>)) + kQueryFactorsBytes;
  static constexpr int kTilesCapacity = kCapacity - kOtherBytes - kOwnBytes;
  static constexpr int kQStages = 2 * TileQ::kBytes + 2 * kStageBytes <= kTilesCapacity ? 2 : 1;
  // A ring position takes one register where the number of stages is a power of two.
  static constexpr int kStages = kQStages * TileQ::kBytes + kMaxStages * kStageBytes <= kTilesCapacity ? kMaxStages : 2;

  static constexpr int kKAt = kQStages * TileQ::kBytes;
  static constexpr int kVAt = kKAt + kStages * TileK::kBytes;
  static constexpr int kOwnAt = kVAt + kStages * TileV::kBytes;
  static constexpr int kResultsAt = kOwnAt + kOwnBytes;
  // Results are stored by way of shared memory where that takes no stage away.
  static constexpr int kResultBytes = kTileRows / 16 * StagedRows<kVo>::kBytes;
  static constexpr bool kIsStaged = kResultsAt + kResultBytes <= kTilesCapacity + kOwnBytes;
  static constexpr int kWorkStagesAt = kResultsAt + (kIsStaged ? kResultBytes : 0);
  static constexpr int kQueryFactorsAt = kWorkStagesAt + kWorkStages * static_cast<int>(sizeof(Stage));
  static constexpr int kBarriersAt = kQueryFactorsAt + kQueryFactorsBytes;
  using AllBarriers = Barriers<kQStages, kStages>;
  static_assert(kKAt % 1024 == 0 && kVAt % 1024 == 0 && kOwnAt % 1024 == 0 && TileK::kBytes % 1024 == 0 &&
                    TileV::kBytes % 1024 == 0 && SwizzledTile<kTileKv / 2, kVo, 8>::kBytes % 1024 == 0,
                "the 128-byte swizzle repeats every 1024 bytes");
  static_assert(kWorkStagesAt % alignof(Stage) == 0 && kBarriersAt % 8 == 0, "work stages and mbarriers are aligned");

  // Registers a thread: see attention_fa3.cuh.
  static constexpr bool kLoadsMore =
      kIsGathered || has_block_mask<V>() || (kWarpgroups == 3 && kVo / 2 + kTileKv / 2 <= 112);
  static constexpr int kLoadRegisters = kLoadsMore ? 56 : kWarpgroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = kWarpgroups == 3 ? (kLoadsMore ? 152 : 160) : kLoadsMore ? 224 : 232;
  static_assert(kConsumers * kComputeRegisters + 128 * kLoadRegisters <= 65536 / kThreads / 8 * 8 * kThreads,
                "the warps ask for more registers than the launch has, and would wait for them forever");

  enum Role { kLoadK, kLoadV, kLoadMoreV, kSchedule };
  // 0 is the barrier of the CTA (__syncthreads). kTurn + i: warpgroup i may start products; kWarpgroup + i: its
  // threads.
  enum NamedBarrier { kTurn = 1, kWarpgroup = kTurn + 3, kAllConsumers = kWarpgroup + 3 };

 public:
  static constexpr int kSmemBytes = kBarriersAt + static_cast<int>(sizeof(AllBarriers));
  static_assert(kSmemBytes <= kCapacity, "the tiles do not fit into shared memory");

  QUIRE_DEVICE static void run(const AttentionFa3Fp8Params& p, unsigned char* smem) {
    const AttentionFa3Fp8 self(p, smem);
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
  const AttentionFa3Fp8Params& p_;
  Stage* stages_;
  uint32_t smem_;
  RingBarriers<kWorkStages> work_;
  RingBarriers<kQStages> q_;
  RingBarriers<kStages> k_, v_;

  QUIRE_DEVICE AttentionFa3Fp8(const AttentionFa3Fp8Params& p, unsigned char* smem)
      : p_(p), stages_(reinterpret_cast<Stage*>(smem + kWorkStagesAt)), smem_(ptx::smem_address(smem)) {
    const uint32_t barriers = smem_ + kBarriersAt;
    work_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, work));
    q_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, q));
    k_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, k));
    v_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, v));
  }

  QUIRE_DEVICE TileQ q_tile(int stage) const { return {smem_ + stage * TileQ::kBytes}; }
  QUIRE_DEVICE TileK k_tile(int stage) const { return {smem_ + kKAt + stage * TileK::kBytes}; }
  QUIRE_DEVICE TileV v_tile(int stage) const { return {smem_ + kVAt + stage * TileV::kBytes}; }
  // The mbarriers at which a warp waits for values before they are transposed, one a stage.
  QUIRE_DEVICE uint32_t bytes_arrived(int half) const {
    return smem_ + kBarriersAt + static_cast<int>(__builtin_offsetof(AllBarriers, arrived)) + half * kOwnStages * 8;
  }

  // Full barriers: the loading warp arrives once a stage, each lane where it gathers keys; both transposing warps do.
  // Empty barriers: each computing warpgroup arrives once; work stages are read by lanes, so that each warp but the
  // scheduling one arrives.
  QUIRE_DEVICE void init_barriers() const {
    work_.init(1, kWarpgroups * 4 + 3);
    q_.init(1, kWarpgroups);
    k_.init(kIsGathered ? 32 : 1, kWarpgroups);
    v_.init(2, kWarpgroups);
    for (int i = 0; i < 2 * kOwnStages; ++i) ptx::mbarrier_init(bytes_arrived(0) + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }

  // Queries come by the copy engine where tiles begin with a token's first head.
  QUIRE_DEVICE bool q_by_tma() const { return kTileRows % p_.base.group.divisor == 0; }

  QUIRE_DEVICE void produce() const {
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = ptx::lane_id();
    if (warp == kLoadK) load_k(lane);
    if (warp == kLoadV || warp == kLoadMoreV) load_v(warp - kLoadV, lane);
    if (warp == kSchedule) schedule(lane);
  }

  // State of the scheduling warp between work tiles.
  struct Schedule {
    RingPosition<kWorkStages> at;
    RingPosition<kQStages> q;
    int number = 0;
    bool exists = true, is_short = true;
  };

  // Schedules work tiles and loads their queries.
  QUIRE_DEVICE void schedule(int lane) const {
    Schedule s;
    if (lane == 0 && q_by_tma()) ptx::prefetch_tensor_map(&p_.tensor_q);
    if (lane == 0) WorkList::begin(p_, stages_[kWorkStages - 1].cursor, s.number);
    while (s.exists) schedule_next(s, lane);
  }

  QUIRE_DEVICE void schedule_next(Schedule& s, int lane) const {
    work_.wait_empty(s.at);
    // Only one long work tile is taken ahead, because with two, CTAs would end at less equal times.
    const auto two_before = s.at.before().before();
    if (!s.is_short) ptx::mbarrier_wait(work_.empty(two_before.stage()), two_before.parity());
    Stage& current = stages_[s.at.stage()];
    if (lane == 0) {
      const Stage& before = stages_[s.at.before().stage()];
      WorkList::next(p_, before.cursor, current, s.number, kTileKv);
    }
    __syncwarp();
    s.exists = current.exists;
    s.is_short = current.work.kv_end - current.work.kv_begin <= kShortTiles;
    if (s.exists) current.read_block_mask(p_, lane);
    if (lane == 0) work_.arrive_full(s.at);
    if (s.exists) copy_q_by_tma(current, s.q, lane);
    s.at.advance();
  }

  QUIRE_DEVICE void copy_q_by_tma(const Stage& current, RingPosition<kQStages>& stage, int lane) const {
    const bool has_tiles = KvTileWalk<V>(current).exists();
    if (lane == 0 && q_by_tma() && has_tiles) {
      q_.wait_empty(stage);
      const uint32_t barrier = q_.full(stage.stage());
      ptx::mbarrier_arrive_expect(barrier, TileQ::kBytes);
      const int token = current.work.tile.qo_begin + p_.base.group.div(current.work.tile.row_begin);
#pragma unroll
      for (int i = 0; i < TileQ::kAtoms; ++i) {
        ptx::tma_load_4d(q_tile(stage.stage()).base + i * TileQ::kAtomBytes, &p_.tensor_q, barrier, i * 128, 0, token,
                         current.work.kv_head);
      }
      stage.advance();
    }
    __syncwarp();
  }

  // Calls body(current) for each work tile.
  template <class Body>
  QUIRE_DEVICE void for_each_work_stage(int lane, Body&& body) const {
    RingPosition<kWorkStages> at;
    for (;;) {
      work_.wait_full(at);
      Stage& current = stages_[at.stage()];
      if (!current.exists) return;
      body(current);
      __syncwarp();
      if (lane == 0) work_.arrive_empty(at);
      at.advance();
    }
  }

  QUIRE_DEVICE void load_k(int lane) const {
    const KvSource from = KvSource::k(p_);
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    RingPosition<kStages> stage;
    for_each_work_stage(lane, [&](const Stage& current) {
      KvTileWalk<V> walk(current);
      Keys next(p_.base, from, current.work, lane);
      bool is_copying = false;
      if (walk.exists()) next.prefetch_pages(walk.tile());
#pragma unroll 1
      while (walk.exists()) {
        next.resolve_pages();
        const Keys keys = next;
        walk.advance();
        if (walk.exists()) next.prefetch_pages(walk.tile());
        k_.wait_empty(stage);
        if constexpr (kIsGathered) {
          keys.load(k_tile(stage.stage()).base);
          ptx::cp_async_commit();
          if (is_copying) arrive_copied<1>(stage.before());
          is_copying = true;
        } else {
          keys.load(k_tile(stage.stage()), k_.full(stage.stage()));
        }
        stage.advance();
      }
      if (is_copying) arrive_copied<0>(stage.before());
    });
  }

  // Waits for the copies of all KV tiles but the latest kLater, and arrives at the full barrier of the last of them.
  template <int kLater>
  QUIRE_DEVICE void arrive_copied(RingPosition<kStages> at) const {
    ptx::cp_async_wait<kLater>();
    ptx::fence_proxy_async();
    k_.arrive_full(at);
  }

  QUIRE_DEVICE void load_v(int half, int lane) const {
    using Values = ValueTransposer<V, TileV, kStages, kOwnStages>;
    const KvSource from = KvSource::v(p_);
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    Values values(p_.base, from, v_, smem_ + kVAt, smem_ + kOwnAt + half * kOwnStages * Values::kOwnBytes,
                  bytes_arrived(half), half, lane);
    for_each_work_stage(lane, [&](const Stage& current) {
      KvTileWalk<V> walk(current);
      values.run(current.work, walk);
    });
  }

  // The next stages of a computing warpgroup.
  struct Rings {
    RingPosition<kQStages> q;
    RingPosition<kStages> k;
  };

  // The state of a warpgroup's rows.
  struct Rows {
    float o[kParts][kPartCols / 2];
    WarpgroupSoftmax softmax;
    uint32_t p[kTileKv / 32][4];  // weights of the tile whose values are next

    QUIRE_DEVICE void clear() {
#pragma unroll
      for (int i = 0; i < kParts * kPartCols / 2; ++i) o[i / (kPartCols / 2)][i % (kPartCols / 2)] = 0.f;
      softmax.clear();
    }
    QUIRE_DEVICE void rescale() {
      if (!softmax.is_raised) return;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < kPartCols / 2; ++i) o[part][i] *= softmax.factor[i / 2 % 2];
      }
    }
    QUIRE_DEVICE void add(int part, const float (&x)[kPartCols / 2]) {
#pragma unroll
      for (int i = 0; i < kPartCols / 2; ++i) o[part][i] += x[i];
    }
  };

  QUIRE_DEVICE void compute() const {
    Rings rings;
    if (kWarpgroups > 1 && warpgroup() == 0) ptx::named_barrier_arrive(kTurn, 256);
    RingPosition<kWorkStages> at;
    for (;;) {
      work_.wait_full(at);
      Stage& current = stages_[at.stage()];
      if (!ptx::uniform(current.exists)) break;
      note(current.work, Moment::kBegin);
      Rows rows;
      rows.clear();
      if (ptx::uniform(KvTileWalk<V>(current).exists())) attend(rows, current, rings);
      store(rows, current);
      note(current.work, Moment::kEnd);
      __syncwarp();
      if (ptx::lane_id() == 0) work_.arrive_empty(at);
      at.advance();
    }
  }

  QUIRE_DEVICE void note(const WorkTile& work, Moment moment) const {
    if constexpr (V::kTimed != 0) stamp<V>(p_.base, work, moment, warpgroup() == 0 && is_leader());
  }

  // Reads again on each call, to save registers.
  QUIRE_DEVICE static int warpgroup() { return ptx::thread_id() / 128 - 1; }
  QUIRE_DEVICE static bool is_leader() { return ptx::thread_id() % 128 == 0; }

  // This lane's upper row in the tile.
  QUIRE_DEVICE static int lane_row(int lane) { return (ptx::thread_id() - 128) / 32 * 16 + lane / 4; }

  QUIRE_DEVICE TileDescriptor queries(RingPosition<kQStages> at, int turn) const {
    return {q_tile(at.stage()).base + turn * 64 * 128, 16};
  }
  QUIRE_DEVICE TileDescriptor keys(RingPosition<kStages> at) const { return {k_tile(at.stage()).base, 16}; }
  QUIRE_DEVICE TileDescriptor values(RingPosition<kStages> at) const { return {v_tile(at.stage()).base, 16}; }
  QUIRE_DEVICE static TileDescriptor part_of(TileDescriptor values, int part) {
    values.low += part * kPartCols * 128 >> 4;
    return values;
  }

  // O, m and d of this warpgroup's 64 rows over the KV tiles of the work tile.
  QUIRE_DEVICE void attend(Rows& rows, const Stage& current, Rings& rings) const {
    const int turn = ptx::uniform(warpgroup());
    wait_queries(current, rings);
    const TileDescriptor q = queries(rings.q, turn);
    if constexpr (kOverlaps) {
      KvTileWalk<V> walk(current);
      const UnmaskedTiles<V> unmasked(p_.base, current, current.work.tile.row_begin + turn * 64);
      first_tile(rows, current, rings, q, walk);
      while (walk.exists()) {
        if (unmasked.contains(walk)) {
          next_tile<false>(rows, current, rings, q, turn, walk);
        } else {
          next_tile<true>(rows, current, rings, q, turn, walk);
        }
      }
      release_queries(rings);
      const auto last = rings.k.before();
      v_.wait_full(last);
      add_values(rows, values(last));
      if (is_leader()) v_.arrive_empty(last);
    } else {
      attend_in_turns(rows, current, rings, q, turn);
      release_queries(rings);
    }
  }

  QUIRE_DEVICE void release_queries(Rings& rings) const {
    if (q_by_tma() && is_leader()) q_.arrive_empty(rings.q);
    rings.q.advance();
  }

  // The KV tiles of a work tile, with the products of a KV tile one after the other. Warpgroups take turns at them: at
  // O += P V of a KV tile and the start of S of the next one, because tensor cores would work on the products of all
  // warpgroups at once, and then on none.
  QUIRE_DEVICE void attend_in_turns(Rows& rows, const Stage& current, Rings& rings, TileDescriptor q, int turn) const {
    KvTileWalk<V> walk(current);
    const UnmaskedTiles<V> unmasked(p_.base, current, current.work.tile.row_begin + turn * 64);
    k_.wait_full(rings.k);
    ptx::named_barrier_sync(kTurn + turn, 256);
    while (walk.exists()) {
      if (unmasked.contains(walk)) {
        whole_tile<false>(rows, current, rings, q, turn, walk);
      } else {
        whole_tile<true>(rows, current, rings, q, turn, walk);
      }
    }
    ptx::named_barrier_arrive(kTurn + (turn + 1) % kWarpgroups, 256);
  }

  // One KV tile: its S, for which this warpgroup has its turn, the softmax, and O += P V, after which its turn goes on.
  template <bool kMasked>
  QUIRE_DEVICE void whole_tile(Rows& rows, const Stage& current, Rings& rings, TileDescriptor q, int turn,
                               KvTileWalk<V>& walk) const {
    float s[kTileKv / 2];
    const int tile = walk.tile();
    // ptxas would keep descriptors, and not in uniform registers.
    rings.k = rings.k.uniform(), q.low = ptx::uniform(q.low);
    start_fp8_ABt<TileQ, TileK>(s, q, keys(rings.k));
    ptx::named_barrier_arrive(kTurn + (turn + 1) % kWarpgroups, 256);
    Bits bits;
    if constexpr (kMasked) bits.read(logits_tile(current, tile));
    walk.advance();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    scale_heads(s);
    if constexpr (kMasked || !Transform::kIsIdentity) {
      score_logits<kMasked>(s, Transform(p_.base), logits_tile(current, tile), bits);
    }
    raise_max(rows, s);
    rows.softmax.exponentiate(s, Transform(p_.base).factor);
    rows.rescale();
    round_weights_fp8(s, rows.p);
    const auto last = rings.k;
    rings.k.advance();
    v_.wait_full(last);
    if (walk.exists()) k_.wait_full(rings.k);
    const TileDescriptor v = values(last);
    ptx::named_barrier_sync(kTurn + turn, 256);
    add_values(rows, v);
    if (is_leader()) v_.arrive_empty(last);
  }

  // O += P V, one part after the other.
  QUIRE_DEVICE void add_values(Rows& rows, TileDescriptor v) const {
    float x[kPartCols / 2];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      start_fp8_AB<TileV, kPartCols>(x, rows.p, part_of(v, part));
      ptx::wgmma_wait<0>();
      ptx::pin(x);
      rows.add(part, x);
    }
  }

  // The rightmost KV tile: S and its softmax alone.
  QUIRE_DEVICE void first_tile(Rows& rows, const Stage& current, Rings& rings, TileDescriptor q,
                               KvTileWalk<V>& walk) const {
    float s[kTileKv / 2];
    const int tile = walk.tile();
    k_.wait_full(rings.k);
    start_fp8_ABt<TileQ, TileK>(s, q, keys(rings.k));
    Bits bits;
    bits.read(logits_tile(current, tile));
    walk.advance();
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    rings.k.advance();
    scale_heads(s);
    score_logits<true>(s, Transform(p_.base), logits_tile(current, tile), bits);
    raise_max(rows, s);
    rows.softmax.exponentiate(s, Transform(p_.base).factor);
    round_weights_fp8(s, rows.p);
  }

  // Starts S = Q K^T of this KV tile and P V of the one before it, and computes the softmax of S while P V runs.
  template <bool kMasked>
  QUIRE_DEVICE void next_tile(Rows& rows, const Stage& current, Rings& rings, TileDescriptor q, int turn,
                              KvTileWalk<V>& walk) const {
    float s[kTileKv / 2], x[kPartCols / 2];
    const int tile = walk.tile();
    rings.k = rings.k.uniform();
    const auto before = rings.k.before();
    const TileDescriptor k = keys(rings.k), v = values(before);
    Bits bits;
    if constexpr (kMasked) bits.read(logits_tile(current, tile));
    v_.wait_full(before);
    k_.wait_full(rings.k);
    ptx::named_barrier_sync(kTurn + turn, 256);
    start_fp8_ABt<TileQ, TileK>(s, q, k);
    start_fp8_AB<TileV, kPartCols>(x, rows.p, v);
    ptx::named_barrier_arrive(kTurn + (turn + 1) % kWarpgroups, 256);
    walk.advance();  // while products run
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    rings.k.advance();
    scale_heads(s);
    if constexpr (kMasked || !Transform::kIsIdentity) {
      score_logits<kMasked>(s, Transform(p_.base), logits_tile(current, tile), bits);
    }
    raise_max(rows, s);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      ptx::wgmma_wait<0>();
      ptx::pin(x);
      rows.add(part, x);
      if (part + 1 < kParts) start_fp8_AB<TileV, kPartCols>(x, rows.p, part_of(v, part + 1));
      if (part == 0) rows.softmax.exponentiate(s, Transform(p_.base).factor);
    }
#pragma unroll
    for (int k = 0; k < kTileKv / 32; ++k) ptx::pin(rows.p[k]);
    if (is_leader()) v_.arrive_empty(before);
    rows.rescale();
    round_weights_fp8(s, rows.p);
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

  QUIRE_DEVICE void scale_heads(float (&s)[kTileKv / 2]) const {
    if (p_.q_scales == nullptr) return;
    const float factors[2] = {ptx::ld_shared(query_factor_at(0)), ptx::ld_shared(query_factor_at(1))};
#pragma unroll
    for (int i = 0; i < kTileKv / 2; ++i) s[i] *= factors[i / 2 % 2];
  }

  // Raises the reference maximum: the largest weight becomes 2^kFirstExponent, which has no rounding error.
  QUIRE_DEVICE void raise_max(Rows& rows, const float (&s)[kTileKv / 2]) const {
    const float scale = Transform(p_.base).factor;
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = WarpgroupSoftmax::row_max(s, h) * scale;
    rows.softmax.raise_to(top, [](float x) { return x - kFirstExponent; });
  }

  // Waits until the queries of a work tile are loaded, and reads the scales of their heads, if there are any.
  QUIRE_DEVICE void wait_queries(const Stage& current, const Rings& rings) const {
    if (q_by_tma()) {
      q_.wait_full(rings.q);
    } else {
      copy_q(q_tile(rings.q.stage()), current.work);
    }
    if (p_.q_scales == nullptr) return;
    const int lane = ptx::lane_id();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(current.work.tile.row_begin + lane_row(lane) + 8 * h, current.work.row_end - 1);
      const WorkTile::Place at = current.work.place(p_.base.group, row);
      const float factor = p_.q_scales[at.head * p_.q_scales_head_stride];
      if (lane % 4 == 0) ptx::st_shared(query_factor_at(h), __float_as_uint(factor));
    }
    __syncwarp();
  }
  QUIRE_DEVICE uint32_t query_factor_at(int h) const {
    return smem_ + kQueryFactorsAt + (lane_row(ptx::lane_id()) + 8 * h) * 4;
  }

  // This warpgroup's rows of q, where a tile may begin amid a token's heads; rows that do not exist become zeros.
  QUIRE_DEVICE void copy_q(TileQ q, const WorkTile& work) const {
    using Split = RowSplit<128, TileQ::kChunks>;
    const Split split(ptx::thread_id() % 128);
    const int first = warpgroup() * 64;
    for (int r = first + split.row; r < first + 64; r += Split::kRowsAtOnce) {
      const int row = work.tile.row_begin + r;
      const WorkTile::Place at = work.place(p_.base.group, min(row, work.row_end - 1));
      const unsigned char* src = static_cast<const unsigned char*>(p_.base.q) + at.token * p_.base.q_token_stride +
                                 at.head * p_.base.q_head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(q.chunk(r, chunk), src + chunk * 16, row < work.row_end ? 16 : 0);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
  }

  QUIRE_DEVICE void store(Rows& rows, Stage& stage) const {
    rows.softmax.reduce();
    float o[kVo / 2];
#pragma unroll
    for (int i = 0; i < kVo / 2; ++i) o[i] = rows.o[i / (kPartCols / 2)][i % (kPartCols / 2)];
    const int lane = ptx::lane_id(), row = lane_row(lane);
    if (stage.work.is_whole()) {
      store_whole(o, rows.softmax, stage.work, row, lane);
    } else {
      store_partial(o, rows.softmax, stage, row, lane);
    }
  }

  QUIRE_DEVICE void store_whole(const float (&o)[kVo / 2], const WarpgroupSoftmax& softmax, const WorkTile& work,
                                int tile_row, int lane) const {
    const AttentionParams& p = p_.base;
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.tile.row_begin + tile_row + 8 * h;
      const WorkTile::Place at = work.place(p.group, min(row, work.row_end - 1));
      const float* sink = p.sinks == nullptr ? nullptr : p.sinks + at.head;
      const RowResult result = finish_row(softmax.m[h], softmax.d[h], sink, output_scale(p));
      scale[h] = result.scale;
      if (p.lse != nullptr && lane % 4 == 0 && row < work.row_end) {
        p.lse[at.token * p.num_qo_heads + at.head] = returned_lse<V>(result.lse, p, work.tile, at.head);
      }
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

  QUIRE_DEVICE void store_partial(const float (&o)[kVo / 2], const WarpgroupSoftmax& softmax, Stage& stage,
                                  int tile_row, int lane) const {
    const AttentionParams& p = p_.base;
    const WorkTile& work = stage.work;
    const int thread = ptx::thread_id() - 128;
    const MergeGroup group = p.groups[work.group];
    store_partial_rows<kTileRows>(p, work.partial, o, softmax.m, softmax.d, tile_row,
                                  work.row_end - work.tile.row_begin, lane);
    const auto sync_all = [] { ptx::named_barrier_sync(kAllConsumers, kConsumers); };
    if (arrives_last(p.groups + work.group, group.num_parts(), thread == 0, stage.is_last, sync_all)) {
      call_merge_partials<V, kConsumers / 32, kVo <= 128>(p, work, group, thread);
    }
  }
};

}  // namespace quire
