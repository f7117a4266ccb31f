// Attention with wgmma and TMA: sm_90a, head dims that are multiples of 16.
//
// The kernel is limited by the tensor cores, and through them by the GPU's power. Softmax takes 64 / head_dim of the
// tensor cores' time, so it has to run beside them. A warpgroup starts S = Q K^T of the next KV tile together with
// O += P V of the last one, and computes the softmax of S while O += P V still runs. Warpgroups take turns at the
// tensor cores, by named barriers.
// Schedule: persistent CTAs, one per SM. The warps of the first warpgroup load keys, values and queries, and schedule
// one work tile ahead: the first KV tiles of a work tile are loaded while the work tile before it ends. Each of the
// other warpgroups owns 64 rows, and starts the first S of a work tile before it stores the results of the one before.
// Masks and transforms of logits: apply_softmax() applies them. logits_tile() says which queries and keys a lane's
// logits belong to, and score_logits() calls the variant's transform and mask (core/logits.h, core/mask.h).
// Keys and values of 8 bits: the loading warps widen them to fp16 in shared memory (tile/hopper/kv_widen.cuh). The
// computing warps round their queries to fp16 there, a row with its own power of two (tile/hopper/rows.cuh).
// Registers: a warp decides which KV tile to compute, and whether to mask it, from uniform values, so that ring
// positions and descriptors stay in uniform registers. Otherwise turns at the tensor cores take longer.
// Unsuccessful attempts: benchmarks/results/notes-kernels.md.
//
// Sources: FlashAttention-3 (Shah et al., 2024) for the pipeline, FlashAttention-4 for rescaling only when the maximum
// has grown.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/hopper/cascade.cuh"
#include "quire/tile/hopper/distance_bias.cuh"
#include "quire/tile/hopper/gemm.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/rows.cuh"
#include "quire/tile/hopper/softmax.cuh"
#include "quire/tile/hopper/kv_widen.cuh"
#include "quire/tile/hopper/kv_tiles.cuh"
#include "quire/tile/shared/smem.cuh"
#include "quire/tile/shared/stamps.h"

namespace quire {

template <class V, class WorkList = SharedWorkList<1>>
struct AttentionFa3 {
  using Q = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo;

  // Keys and values of 8 bits are widened on their way to the tensor cores.
  static constexpr bool kNarrow = sizeof(typename V::Kv) == 1;
  using T = typename conditional<kNarrow, fp16_t, Q>::type;  // of the matrix products
  // Queries whose range is wider than that of fp16 are scaled row by row.
  static constexpr bool kRescaled = kNarrow && !is_same<Q, T>::value;

  static_assert((kNarrow || is_same<Q, typename V::Kv>::value) && is_same<Q, typename V::O>::value,
                "q and o have one dtype, and so have k and v unless they have 8 bits");
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
  static constexpr bool kHasZeros = kIsGathered || kNarrow;  // from kv_len on
  // Heads of 256 leave no registers for pairs, and so much work to the tensor cores that no pairs are needed.
  using Math = FragmentMath<kVo <= 128>;
  using Transform = LogitsTransform<V, Math>;
  static constexpr bool kIsRamp = has_ramps<V, Math>();
  // What is known of a mask before the logits of a KV tile.
  using Bits = typename conditional<V::kScoreMask != 0, SeenKeys<V, 2>, TileBits<V, 2>>::type;
  // The softmax itself applies a soft cap. Wide heads and conversion leave no registers for this.
  static constexpr bool kIsCap = Transform::kIsSoftCap && max(kQk, kVo) <= 128 && !kNarrow;

  // A loading warp computes the bias of the score. Wide heads and conversion leave no memory or no warp for this.
  static constexpr bool kIsDistance = has_distance_bias<V, Math>() && max(kQk, kVo) <= 128 && !kNarrow;

  // The factor of a row in a score is part of the softmax's scale.
  static constexpr bool kIsRowScale = score_pattern<V>() == kPatternRowScale && !kNarrow;

  static constexpr int kWorkStages = 4;
  static constexpr int kShortTiles = 4;  // KV tiles; after a work tile of so few, the next but one is scheduled at once
  static constexpr int kBiasBytes = kIsDistance ? DistanceSlice<V>::kBytes : 0;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes + kBiasBytes;
  static constexpr int kMaxStages = 4;

  // Shared memory, 227 KB: tiles of queries, keys and values at multiples of 1024 bytes, results on their way out, work
  // stages, mbarriers. What is not queries, keys and values:
  template <int kQStages, int kStages>
  struct Barriers {
    unsigned char work[RingBarriers<kWorkStages>::kBytes], q[RingBarriers<kQStages>::kBytes];
    unsigned char k[RingBarriers<kStages>::kBytes], v[RingBarriers<kStages>::kBytes];
  };
  static constexpr int kCapacity = 227 * 1024;
  static constexpr int kPreparedBytes = kNarrow ? 16 + 4 * kMaxStages * 8 : 0,
                       kQueryFactorsBytes = kRescaled ? kTileRows * 4 : 0;
  static constexpr int kLateArrivalsBytes =
      V::kCascade != 0 ? static_cast<int>(sizeof(LateArrivals) + 15) / 16 * 16 : 0;
  static constexpr int kOtherBytes = static_cast<int>(kWorkStages * sizeof(Stage) + sizeof(Barriers<2, kMaxStages>)) +
                                     kPreparedBytes + kQueryFactorsBytes + kLateArrivalsBytes;
  static constexpr int kTilesCapacity = kCapacity - kOtherBytes;
  // Two tiles of queries, if two stages of keys and values still fit, so that short work tiles overlap.
  static constexpr int kQStages = 2 * TileQ::kBytes + 2 * kStageBytes <= kTilesCapacity ? 2 : 1;
  static constexpr int kStages = max(2, min(kMaxStages, (kTilesCapacity - kQStages * TileQ::kBytes) / kStageBytes));
  // A work tile starts before the one ahead of it is stored. Not where ptxas then keeps ring positions in registers
  // that are not uniform (three stages), nor where registers are short (block masks).
  static constexpr bool kIsEarly = kQStages > 1 && (kStages & (kStages - 1)) == 0 && !has_block_mask<V>();

  // How long a work tile takes under a block mask is not known when they are put in order. The next one is then taken
  // when the last keys of the one before are on their way; four stages of them hide that.
  static constexpr bool kIsLate = has_block_mask<V>() && !kNarrow && kStages >= 4;

  static constexpr int kKAt = kQStages * TileQ::kBytes;
  static constexpr int kVAt = kKAt + kStages * TileK::kBytes;
  static constexpr int kBiasAt = kVAt + kStages * TileV::kBytes;
  static constexpr int kResultsAt = kBiasAt + kStages * kBiasBytes;
  // Results are stored by way of shared memory where that takes no stage away.
  static constexpr int kResultBytes = kTileRows / 16 * StagedRows<kVo>::kBytes;
  static constexpr bool kIsStaged = kResultsAt + kResultBytes <= kTilesCapacity;
  // Where results are on their way out, a warp holds what a score knows of its rows until then.
  static constexpr bool kHoldsRows =
      Transform::kHasScore && !Transform::kIsSoftCap && !kIsRamp && !kIsRowScale && !kIsDistance && kIsStaged;
  static constexpr int kWorkStagesAt = kResultsAt + (kIsStaged ? kResultBytes : 0);
  static constexpr int kPreparedAt = kWorkStagesAt + kWorkStages * static_cast<int>(sizeof(Stage));
  static constexpr int kQueryFactorsAt = kPreparedAt + kPreparedBytes;
  static constexpr int kLateArrivalsAt = kQueryFactorsAt + kQueryFactorsBytes;
  static constexpr int kBarriersAt = kLateArrivalsAt + kLateArrivalsBytes;
  using AllBarriers = Barriers<kQStages, kStages>;
  static_assert(kKAt % 1024 == 0 && kVAt % 1024 == 0 && TileK::kBytes % 1024 == 0 && TileV::kBytes % 1024 == 0,
                "the 128-byte swizzle repeats every 1024 bytes");
  static_assert(kWorkStagesAt % alignof(Stage) == 0 && kBarriersAt % 8 == 0, "work stages and mbarriers are aligned");
  static_assert(V::kCascade == 0 || kLateArrivalsAt % 16 == 0, "late arrivals are aligned");
  static_assert(sizeof(AllBarriers) == 16 * (kWorkStages + kQStages + 2 * kStages), "a ring has two mbarriers a stage");

  // Registers a thread: the loading warps give up some, the others take them. A launch has a multiple of 8 for each
  // thread, 65,536 at most; a kernel that asks for more hangs. Scheduling takes 56, because it divides 64-bit numbers.
  // Three warpgroups at 128 keys leave 32: the scheduling warp then spills, once a work tile.
  // Widening takes 88.
  static constexpr int kLoadRegisters = kNarrow || kIsDistance              ? (kWarpgroups == 3 ? 80 : 88)
                                        : kWarpgroups == 3 && kTileKv > 112 ? 32
                                                                            : 56;
  static constexpr int kWidestCompute = kTileKv > 112 ? 160 : 152;
  static constexpr int kComputeRegisters = kWarpgroups == 3   ? (kNarrow || kIsDistance ? 144 : kWidestCompute)
                                           : kWarpgroups == 2 ? (kNarrow || kIsDistance ? 208 : 224)
                                                              : 240;
  static_assert(kConsumers * kComputeRegisters + 128 * kLoadRegisters <= 65536 / kThreads / 8 * 8 * kThreads,
                "the warps ask for more registers than the launch has, and would wait for them forever");

  enum Role { kLoadK, kLoadV, kLoadQ, kSchedule };
  // 0 is the barrier of the CTA (__syncthreads). kTurn + i: warpgroup i may start products; kWarpgroup + i: its
  // threads.
  enum NamedBarrier { kTurn = 1, kWarpgroup = kTurn + 3, kAllConsumers = kWarpgroup + 3, kSharedStored, kKeysLoaded };

 public:
  static constexpr int kSmemBytes = kBarriersAt + static_cast<int>(sizeof(AllBarriers));
  static_assert(kSmemBytes <= kCapacity, "the tiles do not fit into shared memory");

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
    const uint32_t barriers = smem_ + kBarriersAt;
    work_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, work));
    q_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, q));
    k_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, k));
    v_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, v));
  }

  QUIRE_DEVICE TileQ q_tile(int stage) const { return {smem_ + stage * TileQ::kBytes}; }
  QUIRE_DEVICE TileK k_tile(int stage) const { return {smem_ + kKAt + stage * TileK::kBytes}; }
  QUIRE_DEVICE TileV v_tile(int stage) const { return {smem_ + kVAt + stage * TileV::kBytes}; }

  // Full barriers: the loading warp arrives, once a stage. Empty barriers: each computing warpgroup arrives once,
  // because the reads of a product end for all of its threads together; work stages are read by lanes, so that each
  // warp but the scheduling one arrives. Two warps widen a KV tile together.
  QUIRE_DEVICE void init_barriers() const {
    work_.init(1, kWarpgroups * 4 + 3);
    q_.init(1, kWarpgroups);
    k_.init(kNarrow ? 2 : Loader::kArrivals + (kIsDistance ? 1 : 0), kWarpgroups);
    v_.init(kNarrow ? 2 : Loader::kArrivals, kWarpgroups);
    if constexpr (kNarrow) {
      for (int i = 0; i < 4 * kStages; ++i) ptx::mbarrier_init(bytes_arrived(0) + 8 * i, 1);
    }
    ptx::fence_mbarrier_init();
  }

  // Queries come by the copy engine where tiles begin with a token's first head.
  QUIRE_DEVICE bool q_by_tma() const { return kTileRows % p_.base.group.divisor == 0; }

  QUIRE_DEVICE void produce() const {
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = ptx::lane_id();
    if constexpr (kNarrow) {
      widen(warp, lane);
      return;
    }
    if (warp == kLoadK) {
      load_kv(KvSource::k(p_), KvSource::k_prefix(p_), k_, [&](int stage) { return k_tile(stage); }, lane);
    }
    if (warp == kLoadV) {
      load_kv(KvSource::v(p_), KvSource::v_prefix(p_), v_, [&](int stage) { return v_tile(stage); }, lane);
    }
    if (warp == kLoadQ) load_q(lane);
    if (warp == kSchedule) schedule(lane);
  }

  // State of the scheduling warp between work tiles.
  struct Schedule {
    RingPosition<kWorkStages> at;
    int number = 0;
    bool exists = true, is_short = true;
  };

  QUIRE_DEVICE void schedule(int lane) const {
    Schedule s;
    if (lane == 0) WorkList::begin(p_, stages_[kWorkStages - 1].cursor, s.number);
    while (s.exists) schedule_next(s, lane);
  }

  QUIRE_DEVICE void schedule_next(Schedule& s, int lane) const {
    work_.wait_empty(s.at);
    // Only one long work tile is taken ahead, because with two, CTAs would end at less equal times.
    const auto two_before = s.at.before().before();
    if constexpr (kIsLate) {
      if (!s.is_short) ptx::named_barrier_sync(kKeysLoaded, 64);
    } else {
      if (!s.is_short) ptx::mbarrier_wait(work_.empty(two_before.stage()), two_before.parity());
    }
    Stage& current = stages_[s.at.stage()];
    if (lane == 0) {
      const Stage& before = stages_[s.at.before().stage()];
      WorkList::next<V::kCascade != 0>(p_, before.cursor, current, s.number, kTileKv);
    }
    __syncwarp();
    s.exists = current.exists;
    s.is_short = is_short_work(current);
    if (s.exists) current.read_block_mask(p_, lane);
    if (lane == 0) work_.arrive_full(s.at);
    s.at.advance();
  }

  QUIRE_DEVICE static bool is_short_work(const Stage& stage) {
    return stage.work.kv_end - stage.work.kv_begin <= kShortTiles;
  }

  // Where kNarrow, one lane schedules and loads queries beside widening. It keeps this in shared memory, ahead of the
  // mbarriers of bytes.
  struct Prepared {
    int number;
    RingPosition<kQStages> q;
  };

  // The mbarriers at which a widening warp waits for bytes, one a stage.
  QUIRE_DEVICE uint32_t bytes_arrived(int warp) const { return smem_ + kPreparedAt + 16 + warp * kStages * 8; }

  // Two warps widen keys, two values.
  QUIRE_DEVICE void widen(int warp, int lane) const {
    if constexpr (kQk == kVo) {  // the same code for both
      const bool is_k = warp < 2;
      widen_kv<TileK>(is_k ? KvSource::k(p_) : KvSource::v(p_), is_k ? k_ : v_, is_k ? kKAt : kVAt, warp, lane);
    } else if (warp < 2) {
      widen_kv<TileK>(KvSource::k(p_), k_, kKAt, warp, lane);
    } else {
      widen_kv<TileV>(KvSource::v(p_), v_, kVAt, warp, lane);
    }
  }

  // One of the warps also schedules and loads queries, in between: it may only wait for what the computing warps do
  // without KV tiles that it has yet to widen.
  template <class Tile>
  QUIRE_DEVICE void widen_kv(const KvSource& from, RingBarriers<kStages> ring, int tiles_at, int warp, int lane) const {
    KvWidener<V, Tile, kStages> widener(p_.base, from, ring, smem_ + tiles_at, bytes_arrived(warp), warp % 2, lane);
    Prepared& prepared =
        *reinterpret_cast<Prepared*>(reinterpret_cast<unsigned char*>(stages_) + kPreparedAt - kWorkStagesAt);
    const bool schedules = warp == kSchedule;
    if (schedules && lane == 0) {
      WorkList::begin(p_, stages_[kWorkStages - 1].cursor, prepared.number);
      prepared.q = {};
    }
    if (schedules) schedule_after({-1}, true, prepared, lane);
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      KvTileWalk<V> walk(current);
      // One stage of queries: they are loaded when the last stage of values is about to wait for them.
      constexpr int kSteps = kQStages > 1 ? 2 : 3;
      int most = kQStages > 1 ? kStages + 2 : kStages - 1;
#pragma unroll 1
      for (int step = schedules ? 0 : kSteps - 1; step < kSteps; ++step) {
        if (schedules && step == kSteps - 2) copy_q_by_tma(current, prepared.q, lane);
        if (step == kSteps - 1) {
          // The computing warps have begun with this work tile, and stored the one before.
          if (schedules) schedule_after(at, is_short_work(current), prepared, lane);
          most = INT32_MAX;
        }
        widener.widen(current.work, walk, most);
        most = 3;
      }
      __syncwarp();
      if (!schedules && lane == 0) work_.arrive_empty(at);
    });
  }

  QUIRE_DEVICE void schedule_after(RingPosition<kWorkStages> at, bool is_short, Prepared& prepared, int lane) const {
    Schedule s;
    s.at = at.after(), s.is_short = is_short;
    if (lane == 0) s.number = prepared.number;
    schedule_next(s, lane);
    if (lane == 0) prepared.number = s.number;
  }

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

  // `prefix`: what shared levels' keys or values are copied from, with kPrefix.
  template <class TileAt>
  QUIRE_DEVICE void load_kv(const KvSource& from, const KvSource& prefix, RingBarriers<kStages> ring, TileAt&& tile_at,
                            int lane) const {
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    RingPosition<kStages> stage;
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      if constexpr (V::kPrefix != 0) {
        static_assert(!kIsGathered && !kNarrow, "tensors beside the cache come by the copy engine, as the cache does");
        if (is_in_prefix<V>(current.work.tile)) {
          load_work_tile<KvLoader<V, KvPath::kRagged>>(prefix, current, ring, stage, tile_at, lane);
        } else {
          load_work_tile<Loader>(from, current, ring, stage, tile_at, lane);
        }
      } else {
        load_work_tile<Loader>(from, current, ring, stage, tile_at, lane);
      }
      __syncwarp();
      if (kIsLate && ring.base == k_.base && !is_short_work(current)) ptx::named_barrier_arrive(kKeysLoaded, 64);
      if (lane == 0) work_.arrive_empty(at);
    });
  }

  template <class Load, class TileAt>
  QUIRE_DEVICE void load_work_tile(const KvSource& from, const Stage& current, RingBarriers<kStages> ring,
                                   RingPosition<kStages>& stage, TileAt&& tile_at, int lane) const {
    KvTileWalk<V> walk(current);
    Load next(p_.base, from, current.work, lane);
    bool is_copying = false;
    if (walk.exists()) next.prefetch_pages(walk.tile());
#pragma unroll 1
    while (walk.exists()) {
      next.resolve_pages();
      const Load loader = next;
      walk.advance();
      if (walk.exists()) next.prefetch_pages(walk.tile());
      ring.wait_empty(stage);
      loader.load(tile_at(stage.stage()), ring.full(stage.stage()));
      if constexpr (kIsGathered) {
        if (is_copying) Load::template arrive_copied<1>(ring.full(stage.before().stage()));
        is_copying = true;
      }
      stage.advance();
    }
    if constexpr (kIsGathered) {
      if (is_copying) Load::template arrive_copied<0>(ring.full(stage.before().stage()));
    }
  }

  QUIRE_DEVICE void load_q(int lane) const {
    if (lane == 0 && q_by_tma()) ptx::prefetch_tensor_map(&p_.tensor_q);
    RingPosition<kQStages> stage;
    RingPosition<kStages> keys;
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      copy_q_by_tma(current, stage, lane);
      if constexpr (kIsDistance) fill_biases(current, keys, lane);
      __syncwarp();
      if (lane == 0) work_.arrive_empty(at);
    });
  }

  // The biases of each KV tile are part of a stage of keys.
  QUIRE_DEVICE void fill_biases(const Stage& current, RingPosition<kStages>& stage, int lane) const {
    using Slice = DistanceSlice<V>;
    const Transform transform(p_.base);
    const WorkTile& work = current.work;
    const Slice slice(p_.base.group, work.tile.row_begin);
    const float unit = ptx::divide(kLog2e, ramp_scale());
    KvTileWalk<V> next(current);
    typename Slice::Values values;  // on their way from memory one step ahead
    if (next.exists()) slice.read(values, transform, work, next.tile() * kTileKv, 0, lane);
    int right = -1;
#pragma unroll 1
    while (next.exists()) {
      const int tile = next.tile();
      next.advance();
      k_.wait_empty(stage);
#pragma unroll 1
      for (int head = 0, after; head < slice.num_heads(); head = after) {
        after = head + Slice::kHeads;
        slice.write(bias_at(stage), values, unit, head, lane);
        const bool is_last = after >= slice.num_heads();
        slice.read(values, transform, work, (is_last ? next.tile() : tile) * kTileKv, is_last ? 0 : after, lane);
        if (tile + 1 == right) {
          slice.copy(bias_at(stage), bias_at(stage.before()), head, lane);
        } else {
          slice.compute(bias_at(stage), transform, unit, work, tile * kTileKv, head, lane);
        }
      }
      right = tile;
      __syncwarp();
      if (lane == 0) k_.arrive_full(stage);
      stage.advance();
    }
  }
  QUIRE_DEVICE uint32_t bias_at(RingPosition<kStages> at) const { return smem_ + kBiasAt + at.stage() * kBiasBytes; }

  QUIRE_DEVICE void copy_q_by_tma(const Stage& current, RingPosition<kQStages>& stage, int lane) const {
    const bool has_tiles = KvTileWalk<V>(current).exists();
    if (lane == 0 && q_by_tma() && has_tiles) {
      q_.wait_empty(stage);
      const uint32_t barrier = q_.full(stage.stage());
      ptx::mbarrier_arrive_expect(barrier, TileQ::kBytes);
      const int token = current.work.tile.qo_begin + p_.base.group.div(current.work.tile.row_begin);
#pragma unroll
      for (int i = 0; i < TileQ::kAtoms; ++i) {
        ptx::tma_load_4d(q_tile(stage.stage()).base + i * TileQ::kAtomBytes, &p_.tensor_q, barrier, i * 64, 0, token,
                         current.work.kv_head);
      }
      stage.advance();
    }
  }

  // The next stages of a computing warpgroup. Values are one KV tile behind keys.
  struct Rings {
    RingPosition<kQStages> q;
    RingPosition<kStages> k;
  };

  // The state of a warpgroup's rows.
  struct Rows {
    float o[kVo / 2];
    WarpgroupSoftmax softmax;
    RowRamps<V, 2> ramps;         // of a bias that needs nothing else
    DistanceRows distances;       // of a bias that loading warps compute
    SmallTanh cap;                // of a soft cap
    SignedScales scales;          // of a score that multiplies rows
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
    CascadeEnding<V, kConsumers, kSharedStored> ending(late_arrivals());
    for (;;) {
      work_.wait_full(at);
      if (!ptx::uniform(stages_[at.stage()].exists)) break;
      Rows rows;
      rows.clear();
      const int late_at = ending.begin(stages_[at.stage()].work, warpgroup());
      if (is_alone(stages_[at.stage()].work) && !is_mine(rings)) {
        if (ptx::uniform(KvTileWalk<V>(stages_[at.stage()]).exists())) pass_over(stages_[at.stage()], rings);
        release_work_tile(at);
        continue;
      }
      note(stages_[at.stage()].work, Moment::kBegin);
      if (ptx::uniform(KvTileWalk<V>(stages_[at.stage()]).exists())) attend_work_tiles(rows, at, rings);
      Stage& current = stages_[at.stage()];
      store(rows, current, late_at);
      note(current.work, Moment::kEnd);
      release_work_tile(at);
      ending.stored(p_.base, warpgroup());
    }
    ending.merge(p_.base, warpgroup(), [] { ptx::named_barrier_sync(kAllConsumers, kConsumers); });
  }

  QUIRE_DEVICE LateArrivals& late_arrivals() const {
    return *reinterpret_cast<LateArrivals*>(reinterpret_cast<unsigned char*>(stages_) + kLateArrivalsAt -
                                            kWorkStagesAt);
  }

  // In a cascade many work tiles have a few rows. One warpgroup computes, stores and merges such a one alone, meanwhile
  // another the next one: nobody takes turns.
  QUIRE_DEVICE static bool is_alone(const WorkTile& work) {
    if constexpr (V::kCascade == 0 || kWarpgroups == 1) return false;
    return ptx::uniform(work.row_end - work.tile.row_begin) <= 64;
  }

  // Whether this warpgroup computes a work tile of few rows. Each has a stage of queries of its own where there are
  // two.
  QUIRE_DEVICE static bool is_mine(const Rings& rings) {
    constexpr bool kAlternate = kWarpgroups == 2 && kQStages == 2 && !kNarrow;
    return warpgroup() == (kAlternate ? ptx::uniform(rings.q.stage()) : 0);
  }

  // Index of this warpgroup's 64 rows in the row tile.
  QUIRE_DEVICE static int part_of(const WorkTile& work) { return is_alone(work) ? 0 : warpgroup(); }

  // Of the warpgroups that compute the work tile, the first acts for all.
  QUIRE_DEVICE void note(const WorkTile& work, Moment moment) const {
    if constexpr (V::kTimed != 0) stamp<V>(p_.base, work, moment, part_of(work) == 0 && is_leader());
  }

  // Another warpgroup's work tile: this one lets go of what is loaded. One thread waits, and the others for it: a
  // thread that runs ahead of the ring takes one round of it for another.
  QUIRE_DEVICE void pass_over(const Stage& current, Rings& rings) const {
    for (KvTileWalk<V> walk(current); walk.exists(); walk.advance()) {
      if (is_leader()) {
        k_.wait_full(rings.k), k_.arrive_empty(rings.k);
        v_.wait_full(rings.k), v_.arrive_empty(rings.k);
      }
      rings.k.advance();
    }
    if (q_by_tma() && is_leader()) q_.wait_full(rings.q), q_.arrive_empty(rings.q);
    rings.q.advance();
    ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
  }

  QUIRE_DEVICE void release_work_tile(RingPosition<kWorkStages>& at) const {
    __syncwarp();
    if (ptx::lane_id() == 0) work_.arrive_empty(at);
    at.advance();
  }

  // Computes work tiles that have KV tiles, from `at` on, up to one whose successor has none; that one's rows are not
  // stored yet. The first S of a work tile is started before the rows of the work tile before it are stored, so that
  // the tensor cores have work meanwhile.
  QUIRE_DEVICE void attend_work_tiles(Rows& rows, RingPosition<kWorkStages>& at, Rings& rings) const {
    const int turn = ptx::uniform(part_of(stages_[at.stage()].work));
    float s[kTileKv / 2];
    Bits bits;
    if constexpr (has_block_mask<V>()) {
      const Stage& first = stages_[at.stage()];
      read_mask(bits, logits_tile(first, KvTileWalk<V>(first).tile()));
    }
    wait_work_tile(stages_[at.stage()], rings);
    begin_scores(rows, s, stages_[at.stage()], rings);
    start_ABt<T, TileQ, TileK, kIsDistance>(s, queries(rings.q, turn), keys(rings.k));
#pragma unroll 1
    for (;;) {
      if constexpr ((kIsEarly && V::kCascade == 0) || has_block_mask<V>()) {
        rings.q = rings.q.uniform(), rings.k = rings.k.uniform(), at = at.uniform();
      }
      Stage& current = stages_[at.stage()];
      attend(rows, s, bits, current, rings, turn);
      const auto last = rings.k.before();
      v_.wait_full(last);
      const auto next = at.after();
      bool goes_on = kIsEarly && V::kCascade == 0 && ptx::uniform(current.work.is_whole());
      if (goes_on) {
        work_.wait_full(next);
        goes_on = ptx::uniform(stages_[next.stage()].exists && KvTileWalk<V>(stages_[next.stage()]).exists());
      }
      if (!goes_on) {
        start_AB<T, TileV>(rows.o, rows.p, values(last));
        ptx::wgmma_wait<0>();
        ptx::pin(rows.o);
        if (is_leader()) v_.arrive_empty(last);
        return;
      }
      wait_work_tile(stages_[next.stage()], rings);
      begin_scores(rows, s, stages_[next.stage()], rings);
      const TileDescriptor q = queries(rings.q, turn), k = keys(rings.k), v = values(last);
      start_AB<T, TileV>(rows.o, rows.p, v);
      start_ABt<T, TileQ, TileK, kIsDistance>(s, q, k);
      ptx::wgmma_wait<1>();
      ptx::pin(rows.o);
      if (is_leader()) v_.arrive_empty(last);
      rows.softmax.reduce();
      store_whole(rows, current.work, lane_row(ptx::lane_id()), ptx::lane_id());
      note(current.work, Moment::kEnd);
      note(stages_[next.stage()].work, Moment::kBegin);
      release_work_tile(at);
      rows.clear();
    }
  }

  // The bias of the first S of a work tile.
  QUIRE_DEVICE void begin_scores(Rows& rows, float (&s)[kTileKv / 2], const Stage& stage, const Rings& rings) const {
    if constexpr (kIsDistance) {
      rows.distances.set(logits_tile(stage, 0), stage.work.tile.row_begin);
      rows.distances.read(s, bias_at(rings.k));
    }
  }

  QUIRE_DEVICE TileDescriptor queries(RingPosition<kQStages> at, int turn) const {
    return {q_tile(at.stage()).base + turn * 64 * 128, 16};
  }

  // Values of this lane's rows for ScoreRows.
  QUIRE_DEVICE uint32_t score_rows_at() const {
    static_assert(ScoreRows<V, Math>::kBytes <= StagedRows<kVo>::kBytes, "what rows have in common takes their place");
    return smem_ + kResultsAt + (ptx::thread_id() / 32 - 4) * StagedRows<kVo>::kBytes + ptx::lane_id() * 4;
  }

  // Waits until the queries and first keys of a work tile are loaded.
  QUIRE_DEVICE void wait_work_tile(const Stage& current, const Rings& rings) const {
    if (q_by_tma()) {
      q_.wait_full(rings.q);
    } else {
      copy_q(q_tile(rings.q.stage()), current.work);
    }
    if constexpr (kRescaled) {
      const TileQ q = q_tile(rings.q.stage());
      const int lane = ptx::lane_id();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = round_query(q, lane_row(current.work, lane) + 8 * h, lane % 4);
        if (lane % 4 == 0) ptx::st_shared(query_factor_at(h), __float_as_uint(factor));
      }
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
    }
    k_.wait_full(rings.k);
  }

  // The factor that undoes the scale of this lane's row h.
  QUIRE_DEVICE uint32_t query_factor_at(int h) const {
    return smem_ + kQueryFactorsAt + (lane_row(ptx::lane_id()) + 8 * h) * 4;
  }

  // The main loop: O, m and d of this warpgroup's 64 rows over the KV tiles of the work tile, except O += P V of the
  // last KV tile. s: S of the first KV tile, which is being computed; bits: its mask.
  QUIRE_DEVICE void attend(Rows& rows, float (&s)[kTileKv / 2], const Bits& bits, const Stage& current, Rings& rings,
                           int turn) const {
    KvTileWalk<V> walk(current);
    const FullTiles<V> full(p_.base, current, current.work.tile.row_begin + turn * 64);
    const TileDescriptor q = queries(rings.q, turn);
    const bool takes_turns = kWarpgroups > 1 && !is_alone(current.work);
    if constexpr (kIsRamp) {
      const Transform transform(p_.base);
      rows.ramps.set(transform, ramp_scale(), logits_tile(current, walk.tile()));
      rows.ramps.move(ramp_scale(), walk.tile() * kTileKv);
    }
    if constexpr (kIsCap) {
      const Transform transform(p_.base);
      rows.cap.set(transform.scale, transform.factor);
    }
    if constexpr (kIsRowScale) {
      const Transform transform(p_.base);
      const LogitsTile<V> at = logits_tile(current, 0);
#pragma unroll
      for (int h = 0; h < 2; ++h) rows.scales.set(h, ramp_scale(), row_scale_of(transform, at, h));
    }
    if constexpr (kHoldsRows) ScoreRows<V, Math>::set(score_rows_at(), Transform(p_.base), logits_tile(current, 0));
    first_tile(rows, s, bits, current, rings, walk.tile());
    walk.advance();
    while (walk.exists()) {
      if (full.contains(walk)) {
        next_tile<false>(rows, current, rings, q, turn, takes_turns, walk);
      } else {
        next_tile<true>(rows, current, rings, q, turn, takes_turns, walk);
      }
    }
    if (q_by_tma() && is_leader()) q_.arrive_empty(rings.q);
    rings.q.advance();
  }

  // Reads again on each call, to save registers.
  QUIRE_DEVICE static int warpgroup() { return ptx::thread_id() / 128 - 1; }
  QUIRE_DEVICE static bool is_leader() { return ptx::thread_id() % 128 == 0; }

  // This lane's upper row in the tile.
  QUIRE_DEVICE static int lane_row(int lane) { return (ptx::thread_id() - 128) / 32 * 16 + lane / 4; }
  QUIRE_DEVICE static int lane_row(const WorkTile& work, int lane) {
    if constexpr (V::kCascade == 0) return lane_row(lane);
    return part_of(work) * 64 + ptx::thread_id() % 128 / 32 * 16 + lane / 4;
  }

  QUIRE_DEVICE TileDescriptor keys(RingPosition<kStages> at) const { return {k_tile(at.stage()).base, 16}; }
  QUIRE_DEVICE TileDescriptor values(RingPosition<kStages> at) const {
    return {v_tile(at.stage()).base, TileV::kAtomBytes};
  }

  // The rightmost KV tile, whose S is being computed: its softmax alone.
  QUIRE_DEVICE void first_tile(Rows& rows, float (&s)[kTileKv / 2], const Bits& bits, const Stage& current,
                               Rings& rings, int tile) const {
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    rings.k.advance();
    if constexpr (kIsCap) {
      apply_soft_cap<true>(rows, s, current, tile, bits, [] {});
    } else {
      apply_softmax<true>(rows, s, current, tile, bits);
    }
    round_weights<T>(s, rows.p);
    // Values from kv_len on may be anything, and 0 * NaN is NaN. Gathering and widening have put zeros there.
    const int valid = current.work.tile.kv_len - tile * kTileKv;
    if (!kHasZeros && valid < kTileKv) clear_values(rings.k.before(), valid);
  }

  // Starts S = Q K^T of this KV tile and O += P V of the one before it, goes on to the next KV tile, and computes the
  // softmax of S while O += P V runs.
  template <bool kMasked>
  QUIRE_DEVICE void next_tile(Rows& rows, const Stage& current, Rings& rings, TileDescriptor q, int turn,
                              bool takes_turns, KvTileWalk<V>& walk) const {
    float s[kTileKv / 2];
    const int tile = walk.tile();
    // All waiting and reading comes before the turn: tensor cores are idle from when a turn is handed over to the
    // products.
    // In a cascade ptxas would keep twelve descriptors of queries, and not in uniform registers.
    if constexpr (V::kCascade != 0) q.low = ptx::uniform(q.low);
    if constexpr (kWarpgroups == 2 && kQk == 128) rings.k = rings.k.uniform();
    const auto before = rings.k.before();
    const TileDescriptor k = keys(rings.k), v = values(before);
    Bits bits;
    if constexpr (kMasked) read_mask(bits, logits_tile(current, tile));
    if constexpr (kIsRamp) rows.ramps.move(ramp_scale(), tile * kTileKv);
    v_.wait_full(before);
    k_.wait_full(rings.k);
    if constexpr (kIsDistance) rows.distances.read(s, bias_at(rings.k));
    if (takes_turns) ptx::named_barrier_sync(kTurn + turn, 256);
    start_ABt<T, TileQ, TileK, kIsDistance>(s, q, k);
    start_AB<T, TileV>(rows.o, rows.p, v);
    if (takes_turns) ptx::named_barrier_arrive(kTurn + (turn + 1) % kWarpgroups, 256);
    walk.advance();  // while products run
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);
    rings.k.advance();
    if constexpr (kIsCap) {
      apply_soft_cap<kMasked>(rows, s, current, tile, bits, [&] { end_tile(rows, s, rings); });
    } else {
      apply_softmax<kMasked>(rows, s, current, tile, bits);
      end_tile(rows, s, rings);
    }
  }

  // Computes the weights of S, after the last use of the previous ones.
  QUIRE_DEVICE void end_tile(Rows& rows, float (&s)[kTileKv / 2], const Rings& rings) const {
    ptx::wgmma_wait<0>();
    ptx::pin(rows.o);
#pragma unroll
    for (int k = 0; k < kTileKv / 16; ++k) ptx::pin(rows.p[k]);
    if (is_leader()) v_.arrive_empty(rings.k.before().before());
    round_weights<T>(s, rows.p);
    rows.softmax.rescale(rows.o);
  }

  QUIRE_DEVICE void read_mask(TileBits<V, 2>& bits, const LogitsTile<V>& at) const { bits.read(at); }
  QUIRE_DEVICE void read_mask(SeenKeys<V, 2>& seen, const LogitsTile<V>& at) const {
    seen.read(ExpressionOf<V>(p_.base), at);
  }

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

  // The scale of q . k in base 2, which a bias is divided by: plan() passes none below 1e-20. What is multiplied by a
  // number on the device is not known to be the same in all lanes, and then costs registers.
  QUIRE_DEVICE float ramp_scale() const {
    const AttentionParams& p = p_.base;
    if (V::kPaged == 0 || p.logits_scale_by == nullptr) return p.logits_scale;
    return fmaxf(p.logits_scale * *p.logits_scale_by, 1e-20f);
  }

  // Turns q . k into weights, with the variant's transform and mask.
  template <bool kMasked>
  QUIRE_DEVICE void apply_softmax(Rows& rows, float (&s)[kTileKv / 2], const Stage& stage, int tile,
                                  const Bits& bits) const {
    const Transform transform(p_.base);
    const LogitsTile<V> at = logits_tile(stage, tile);
    // What queries were divided by is part of the logits' scale, or comes before it.
    float factors[2] = {1.f, 1.f};
    if constexpr (kRescaled)
      factors[0] = ptx::ld_shared(query_factor_at(0)), factors[1] = ptx::ld_shared(query_factor_at(1));
    if constexpr (kRescaled && !Transform::kIsIdentity) {
#pragma unroll
      for (int i = 0; i < kTileKv / 2; ++i) s[i] *= factors[i / 2 % 2];
    }
    if constexpr (kIsRamp) {
      const float scale = ramp_scale();
      rows.ramps.template score<kMasked>(s, transform, at, bits);
      const RowOffsets offsets = {rows.ramps.offset[0], rows.ramps.offset[1]};
      rows.softmax.raise_max(s, scale, offsets);
      rows.softmax.exponentiate(s, scale, offsets);
    } else if constexpr (kIsDistance) {
      if constexpr (kMasked) hide_logits(s, transform, at, bits);
      const float scale = ramp_scale();
      rows.softmax.raise_max(s, scale);
      rows.softmax.exponentiate(s, scale);
    } else if constexpr (kIsRowScale) {
      rows.scales.flip(s);
      if constexpr (kMasked) hide_logits(s, transform, at, bits);
      rows.softmax.raise_max(s, rows.scales.sizes);
      rows.softmax.exponentiate(s, rows.scales.sizes);
    } else {
      if constexpr (kHoldsRows) {
        ScoreRows<V, Math>::template score<kMasked>(s, score_rows_at(), transform, at, bits);
      } else if (!kMasked || !Transform::kIsIdentity || bits.hides) {
        score_logits<kMasked>(s, transform, at, bits);
      }
      if constexpr (kRescaled && Transform::kIsIdentity) {
        const RowScales scales = {transform.factor * factors[0], transform.factor * factors[1]};
        rows.softmax.raise_max(s, scales);
        rows.softmax.exponentiate(s, scales);
      } else {
        rows.softmax.raise_max(s, transform.factor);
        rows.softmax.exponentiate(s, transform.factor);
      }
    }
  }

  // The same with a soft cap. end(): the rest of the step.
  template <bool kMasked, class End>
  QUIRE_DEVICE void apply_soft_cap(Rows& rows, float (&s)[kTileKv / 2], const Stage& stage, int tile, const Bits& bits,
                                   const End& end) const {
    const Transform transform(p_.base);
    if constexpr (kMasked) mark_unseen(s, transform, logits_tile(stage, tile), bits);
    SoftCapSoftmax<T, Transform>::template exponentiate<kMasked>(rows.softmax, s, transform, rows.cap, end);
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
      const int row = work.tile.row_begin + part_of(work) * 64 + r;
      const WorkTile::Place at = work.place(p_.base.group, min(row, work.row_end - 1));
      const Q* src =
          static_cast<const Q*>(p_.base.q) + at.token * p_.base.q_token_stride + at.head * p_.base.q_head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(q.chunk(part_of(work) * 64 + r, chunk), src + chunk * 8, row < work.row_end ? 16 : 0);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128);
  }

  QUIRE_DEVICE void store(Rows& rows, Stage& stage, int late_at) const {
    rows.softmax.reduce();
    const int lane = ptx::lane_id(), row = lane_row(stage.work, lane);
    if (V::kCascade == 0 && stage.work.is_whole()) {
      store_whole(rows, stage.work, row, lane);
    } else {
      store_partial(rows, stage, row, lane, late_at);
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
        p.lse[at.token * p.num_qo_heads + at.head] = returned_lse<V>(result.lse, p, work.tile, at.head);
      }
      if constexpr (!kIsStaged) {
        Q* dst = static_cast<Q*>(p.o) + at.token * p.o_token_stride + at.head * p.o_head_stride;
        store_row(dst, rows.o, h, result.scale, row < work.row_end, lane);
      }
    }
    if constexpr (kIsStaged) {
      const int warp = ptx::thread_id() / 32 - 4, first = work.tile.row_begin + warp * 16;
      const WorkTile::Place at = work.place(p.group, min(first + lane % 16, work.row_end - 1));
      const int64_t begin = at.token * p.o_token_stride + at.head * p.o_head_stride;  // a multiple of 8
      const StagedRows<kVo> staged = {smem_ + kResultsAt + warp * StagedRows<kVo>::kBytes};
      staged.store(static_cast<Q*>(p.o), static_cast<uint32_t>(begin >> 3), work.row_end - first, rows.o, scale, lane);
    }
  }

  // late_at: where the work tile stands among those whose merge groups it arrives at later; -1: not there.
  QUIRE_DEVICE void store_partial(const Rows& rows, Stage& stage, int tile_row, int lane, int late_at) const {
    const AttentionParams& p = p_.base;
    const WorkTile& work = stage.work;
    const int thread = ptx::thread_id() - 128;
    MergeGroup group = {};
    if constexpr (V::kCascade == 0) group = p.groups[work.group];
    store_partial_rows<V::kCascade != 0 ? 1 : kTileRows>(p, work.partial, rows.o, rows.softmax.m, rows.softmax.d,
                                                         tile_row, work.row_end - work.tile.row_begin, lane);
    const auto sync_all = [] { ptx::named_barrier_sync(kAllConsumers, kConsumers); };
    if constexpr (V::kCascade == 0) {
      if (arrives_last(p.groups + work.group, group.num_parts(), thread == 0, stage.is_last, sync_all)) {
        call_merge_partials<V, kConsumers / 32, kVo <= 128>(p, work, group, thread);
      }
    } else if (late_at >= 0) {
      if (is_alone(work) || warpgroup() == 0) late_arrivals().put(p, work, late_at, ptx::thread_id() % 128);
    } else if (is_alone(work)) {
      merge_cascade<V, 4>(p, work, stage.work.group, ptx::thread_id() % 128,
                          [] { ptx::named_barrier_sync(kWarpgroup + warpgroup(), 128); });
    } else {
      merge_cascade<V, kConsumers / 32>(p, work, stage.work.group, thread, sync_all);
    }
  }
};

}  // namespace quire
