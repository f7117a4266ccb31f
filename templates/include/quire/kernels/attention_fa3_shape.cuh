// A CTA of attention_fa3: its warps and their registers, and what lies where in its shared memory.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/cascade.cuh"
#include "quire/tile/hopper/distance_bias.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/kv_tiles.cuh"
#include "quire/tile/hopper/rows.cuh"
#include "quire/tile/shared/smem.cuh"

namespace quire {

template <class V>
struct Fa3Shape {
  using Q = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo;

  // Keys and values of 8 bits are widened on their way to the tensor cores.
  static constexpr bool kIsFp8 = sizeof(typename V::Kv) == 1;
  using T = typename conditional<kIsFp8, fp16_t, Q>::type;  // of the matrix products
  // Queries whose range is wider than that of fp16 are scaled row by row.
  static constexpr bool kRescaled = kIsFp8 && !is_same<Q, T>::value;

  static_assert((kIsFp8 || is_same<Q, typename V::Kv>::value) && is_same<Q, typename V::O>::value,
                "q and o have one dtype, and so have k and v unless they have 8 bits");
  static_assert(kQk % 16 == 0 && kVo % 16 == 0 && max(kQk, kVo) <= 256, "head dims are multiples of 16 up to 256");
  static_assert(kTileRows % 64 == 0 && kTileRows <= 192, "one to three warpgroups own 64 rows each");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256,
                "a key tile is the N of one wgmma and the inner dimension of others");

  static constexpr int kWarpgroups = kTileRows / 64;  // that compute
  static constexpr int kConsumers = kWarpgroups * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kMinCtas = 1;

  using TileQ = SwizzledTile<kTileRows, kQk>;
  using TileK = SwizzledTile<kTileKv, kQk>;
  using TileV = SwizzledTile<kTileKv, kVo>;
  using Stage = WorkStage<V>;
  using Loader = KvLoader<V>;
  static constexpr bool kIsGathered = kv_load_path<V>() == KvLoadPath::kGather;
  static constexpr bool kHasZeros = kIsGathered || kIsFp8;  // from kv_len on
  // Heads of 256 leave no registers for pairs, and so much work to the tensor cores that no pairs are needed.
  using Math = FragmentMath<kVo <= 128>;
  using Transform = LogitsTransform<V, Math>;
  static constexpr bool kIsRamp = has_ramps<V, Math>();
  // What is known of a mask before the logits of a KV tile.
  using Bits = typename conditional<V::kScoreMask != 0, SeenKeys<V, 2>, TileBits<V, 2>>::type;
  // The softmax itself applies a soft cap. Wide heads and conversion leave no registers for this.
  static constexpr bool kIsCap = Transform::kIsSoftCap && max(kQk, kVo) <= 128 && !kIsFp8;

  // A loading warp computes the bias of the score. Wide heads and conversion leave no memory or no warp for this.
  static constexpr bool kIsDistance = has_distance_bias<V, Math>() && max(kQk, kVo) <= 128 && !kIsFp8;

  // The factor of a row in a score is part of the softmax's scale.
  static constexpr bool kIsRowScale = score_pattern<V>() == kPatternRowScale && !kIsFp8;

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
  static constexpr int kPreparedBytes = kIsFp8 ? 16 + 4 * kMaxStages * 8 : 0,
                       kQueryFactorsBytes = kRescaled ? kTileRows * 4 : 0;
  static constexpr int kDeferredArrivalsBytes =
      V::kCascade != 0 ? static_cast<int>(sizeof(DeferredArrivals) + 15) / 16 * 16 : 0;
  static constexpr int kOtherBytes = static_cast<int>(kWorkStages * sizeof(Stage) + sizeof(Barriers<2, kMaxStages>)) +
                                     kPreparedBytes + kQueryFactorsBytes + kDeferredArrivalsBytes;
  static constexpr int kTilesCapacity = kCapacity - kOtherBytes;
  // Two tiles of queries, if two stages of keys and values still fit, so that short work tiles overlap.
  static constexpr int kQStages = 2 * TileQ::kBytes + 2 * kStageBytes <= kTilesCapacity ? 2 : 1;
  static constexpr int kStages = max(2, min(kMaxStages, (kTilesCapacity - kQStages * TileQ::kBytes) / kStageBytes));
  // Whether a work tile starts before the results of the one before are stored. With three stages ptxas would then keep
  // ring positions in registers that are not uniform, and with block masks there are too few registers.
  static constexpr bool kStartsEarly = kQStages > 1 && (kStages & (kStages - 1)) == 0 && !has_block_mask<V>();

  // Under a block mask the time of a work tile is not known when work tiles are put in order. The next work tile is
  // therefore taken late: when the last keys of the one before are being loaded. Four stages of keys hide the delay.
  static constexpr bool kSchedulesLate = has_block_mask<V>() && !kIsFp8 && kStages >= 4;

  static constexpr int kKAt = kQStages * TileQ::kBytes;
  static constexpr int kVAt = kKAt + kStages * TileK::kBytes;
  static constexpr int kBiasAt = kVAt + kStages * TileV::kBytes;
  static constexpr int kResultsAt = kBiasAt + kStages * kBiasBytes;
  // Results are stored by way of shared memory where that takes no stage away.
  static constexpr int kResultBytes = kTileRows / 16 * StagedRows<kVo>::kBytes;
  static constexpr bool kIsStaged = kResultsAt + kResultBytes <= kTilesCapacity;
  // Whether a warp keeps the row-dependent part of a score in shared memory, in the place of its results.
  static constexpr bool kHoldsRows =
      Transform::kHasScore && !Transform::kIsSoftCap && !kIsRamp && !kIsRowScale && !kIsDistance && kIsStaged;
  static constexpr int kWorkStagesAt = kResultsAt + (kIsStaged ? kResultBytes : 0);
  static constexpr int kPreparedAt = kWorkStagesAt + kWorkStages * static_cast<int>(sizeof(Stage));
  static constexpr int kQueryFactorsAt = kPreparedAt + kPreparedBytes;
  static constexpr int kDeferredArrivalsAt = kQueryFactorsAt + kQueryFactorsBytes;
  static constexpr int kBarriersAt = kDeferredArrivalsAt + kDeferredArrivalsBytes;
  using AllBarriers = Barriers<kQStages, kStages>;
  static_assert(kKAt % 1024 == 0 && kVAt % 1024 == 0 && TileK::kBytes % 1024 == 0 && TileV::kBytes % 1024 == 0,
                "the 128-byte swizzle repeats every 1024 bytes");
  static_assert(kWorkStagesAt % alignof(Stage) == 0 && kBarriersAt % 8 == 0, "work stages and mbarriers are aligned");
  static_assert(V::kCascade == 0 || kDeferredArrivalsAt % 16 == 0, "deferred arrivals are aligned");
  static_assert(sizeof(AllBarriers) == 16 * (kWorkStages + kQStages + 2 * kStages), "a ring has two mbarriers a stage");

  // Registers a thread: the loading warps give up some, the computing warps take them. Together they may not exceed
  // what the launch has, 65,536 rounded down to a multiple of 8 for each thread, or the kernel hangs. The scheduling
  // warp needs 56, because it divides 64-bit numbers; beside three warpgroups with 128 keys it has 32 and spills, once
  // a work tile. Widening needs 88.
  static constexpr int kLoadRegisters = kIsFp8 || kIsDistance               ? (kWarpgroups == 3 ? 80 : 88)
                                        : kWarpgroups == 3 && kTileKv > 112 ? 32
                                                                            : 56;
  static constexpr int kWidestCompute = kTileKv > 112 ? 160 : 152;
  static constexpr int kComputeRegisters = kWarpgroups == 3   ? (kIsFp8 || kIsDistance ? 144 : kWidestCompute)
                                           : kWarpgroups == 2 ? (kIsFp8 || kIsDistance ? 208 : 224)
                                                              : 240;
  static_assert(kConsumers * kComputeRegisters + 128 * kLoadRegisters <= 65536 / kThreads / 8 * 8 * kThreads,
                "the warps ask for more registers than the launch has, and would wait for them forever");

  enum Role { kLoadK, kLoadV, kLoadQ, kSchedule };
  // 0 is the barrier of the CTA (__syncthreads). kTurn + i: warpgroup i may start products; kWarpgroup + i: its
  // threads.
  enum NamedBarrier { kTurn = 1, kWarpgroup = kTurn + 3, kAllConsumers = kWarpgroup + 3, kSharedStored, kKeysLoaded };

  static constexpr int kSmemBytes = kBarriersAt + static_cast<int>(sizeof(AllBarriers));
  static_assert(kSmemBytes <= kCapacity, "the tiles do not fit into shared memory");
};

// The rings and tiles in shared memory, as every warp of the CTA sees them.
template <class V>
class Fa3Cta : public Fa3Shape<V> {
  using Shape = Fa3Shape<V>;

 public:
  using Shape::kTileRows, Shape::kIsFp8, Shape::kWarpgroups, Shape::kIsDistance, Shape::kWorkStages, Shape::kBiasBytes,
      Shape::kQStages, Shape::kStages, Shape::kKAt, Shape::kVAt, Shape::kBiasAt, Shape::kWorkStagesAt,
      Shape::kPreparedAt, Shape::kBarriersAt;
  using typename Shape::TileQ, typename Shape::TileK, typename Shape::TileV, typename Shape::Stage,
      typename Shape::Loader, typename Shape::AllBarriers;

  QUIRE_DEVICE Fa3Cta(const AttentionFa3Params& p, unsigned char* smem)
      : p_(p), stages_(reinterpret_cast<Stage*>(smem + kWorkStagesAt)), smem_(ptx::smem_address(smem)) {
    const uint32_t barriers = smem_ + kBarriersAt;
    work_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, work));
    q_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, q));
    k_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, k));
    v_.base = barriers + static_cast<int>(__builtin_offsetof(AllBarriers, v));
  }

  // Full barriers: the loading warp arrives, once a stage. Empty barriers: each computing warpgroup arrives once,
  // because the reads of a product end for all of its threads together; work stages are read by lanes, so that each
  // warp but the scheduling one arrives. Two warps widen a KV tile together.
  QUIRE_DEVICE void init_barriers() const {
    work_.init(1, kWarpgroups * 4 + 3);
    q_.init(1, kWarpgroups);
    k_.init(kIsFp8 ? 2 : Loader::kArrivals + (kIsDistance ? 1 : 0), kWarpgroups);
    v_.init(kIsFp8 ? 2 : Loader::kArrivals, kWarpgroups);
    if constexpr (kIsFp8) {
      for (int i = 0; i < 4 * kStages; ++i) ptx::mbarrier_init(bytes_arrived(0) + 8 * i, 1);
    }
    ptx::fence_mbarrier_init();
  }

 protected:
  const AttentionFa3Params& p_;
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

  // The mbarriers at which a widening warp waits for bytes, one a stage.
  QUIRE_DEVICE uint32_t bytes_arrived(int warp) const { return smem_ + kPreparedAt + 16 + warp * kStages * 8; }

  // The biases of a KV tile are part of its stage of keys.
  QUIRE_DEVICE uint32_t bias_at(RingPosition<kStages> at) const { return smem_ + kBiasAt + at.stage() * kBiasBytes; }

  // The scale of q . k in base 2, which a bias is divided by: plan() passes none below 1e-20. What is multiplied by a
  // number on the device is not known to be the same in all lanes, and then costs registers.
  QUIRE_DEVICE float ramp_scale() const {
    const AttentionParams& p = p_.base;
    if (V::kPaged == 0 || p.logits_scale_by == nullptr) return p.logits_scale;
    return fmaxf(p.logits_scale * *p.logits_scale_by, 1e-20f);
  }
};

}  // namespace quire
