// A CTA of attention_fa3: its warps and their registers, and what lies where in its shared memory.
#pragma once
#include "quire/tile/hopper/cta.cuh"
#include "quire/tile/hopper/distance_bias.cuh"

namespace quire {

template <class V>
struct Fa3Shape : WgmmaShape<V> {
  using Base = WgmmaShape<V>;
  using Base::kTileRows, Base::kTileKv, Base::kQk, Base::kVo, Base::kWarpgroups, Base::kIsGathered, Base::kWorkStages,
      Base::kMaxStages, Base::kCapacity, Base::kResultBytes, Base::registers_suffice;
  using typename Base::Stage, typename Base::Math, typename Base::Transform;
  template <int kQStages, int kStages>
  using Barriers = typename Base::template Barriers<kQStages, kStages>;
  using Q = typename V::Q;

  // Keys and values of 8 bits are widened to fp16 on their way to the tensor cores, or were ahead of the kernel. The
  // products, and the bits of results, are the same.
  using Kv = typename V::Kv;
  static constexpr bool kIsFp8 = sizeof(Kv) == 1, kIsWidened = !is_same<Q, Kv>::value;
  using T = typename conditional<kIsWidened, fp16_t, Q>::type;  // of the matrix products
  // Queries whose range is wider than that of fp16 are scaled row by row.
  static constexpr bool kRescaled = !is_same<Q, T>::value;

  static_assert((kIsFp8 || is_same<T, Kv>::value) && is_same<Q, typename V::O>::value,
                "q and o have one dtype, and so have k and v unless they have or had 8 bits");
  static_assert(kQk % 16 == 0 && kVo % 16 == 0 && max(kQk, kVo) <= 256, "head dims are multiples of 16 up to 256");
  using TileQ = SwizzledTile<kTileRows, kQk>;
  using TileK = SwizzledTile<kTileKv, kQk>;
  using TileV = SwizzledTile<kTileKv, kVo>;
  using Loader = KvLoader<V>;
  static constexpr bool kHasZeros = kIsGathered || kIsFp8;  // from kv_len on
  static constexpr bool kIsRamp = has_ramps<V, Math>();
  // What is known of a mask before the logits of a KV tile.
  using Bits = typename conditional<V::kScoreMask != 0, SeenKeys<V, 2>, TileBits<V, 2>>::type;
  // The softmax itself applies a soft cap. Wide heads and conversion leave no registers for this.
  static constexpr bool kIsCap = Transform::kIsSoftCap && max(kQk, kVo) <= 128 && !kIsWidened;

  // A loading warp computes the bias of the score. Wide heads and conversion leave no memory or no warp for this.
  static constexpr bool kIsDistance = has_distance_bias<V, Math>() && max(kQk, kVo) <= 128 && !kIsWidened;

  // Whether a KV tile that hides no keys first asks if it may raise a row's maximum, in fewer instructions.
  static constexpr bool kRaisesSeldom = !Transform::kIsIdentity || has_block_mask<V>();

  // The factor of a row in a score is part of the softmax's scale.
  static constexpr bool kIsRowScale = score_pattern<V>() == kPatternRowScale && !kIsWidened;

  static constexpr int kBiasBytes = kIsDistance ? DistanceSlice<V>::kBytes : 0;
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes + kBiasBytes;

  // Shared memory, 227 KB: tiles of queries, keys and values at multiples of 1024 bytes, results on their way out, work
  // stages, mbarriers. What is not queries, keys and values:
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
  // therefore taken late: when the last few keys of the one before are about to be loaded. Four stages hide the delay.
  static constexpr bool kSchedulesLate = has_block_mask<V>() && !kIsFp8 && kStages >= 4;

  static constexpr int kKAt = kQStages * TileQ::kBytes;
  static constexpr int kVAt = kKAt + kStages * TileK::kBytes;
  static constexpr int kBiasAt = kVAt + kStages * TileV::kBytes;
  static constexpr int kResultsAt = kBiasAt + kStages * kBiasBytes;
  // Results are stored by way of shared memory where that takes no stage away.
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

  // Registers a thread. The scheduling warp needs 56, because it divides 64-bit numbers; beside three warpgroups with
  // 128 keys it has 32 and spills, once a work tile. Widening needs 88.
  static constexpr int kLoadRegisters = kIsFp8 || kIsDistance               ? (kWarpgroups == 3 ? 80 : 88)
                                        : kWarpgroups == 3 && kTileKv > 112 ? 32
                                                                            : 56;
  static constexpr int kWidestCompute = kTileKv > 112 ? 160 : 152;
  static constexpr int kComputeRegisters = kWarpgroups == 3   ? (kIsFp8 || kIsDistance ? 144 : kWidestCompute)
                                           : kWarpgroups == 2 ? (kIsFp8 || kIsDistance ? 208 : 224)
                                                              : 240;
  static_assert(registers_suffice(kLoadRegisters, kComputeRegisters), "the launch has the warps' registers");

  enum Role { kLoadK, kLoadV, kLoadQ, kSchedule };
  static constexpr int kSmemBytes = kBarriersAt + static_cast<int>(sizeof(AllBarriers));
  static_assert(kSmemBytes <= kCapacity, "the tiles do not fit into shared memory");
};

template <class V>
class Fa3Cta : public WgmmaCta<V, Fa3Shape<V>, AttentionFa3Params> {
  using Cta = WgmmaCta<V, Fa3Shape<V>, AttentionFa3Params>;

 public:
  using Cta::Cta, Cta::kIsFp8, Cta::kWarpgroups, Cta::kIsDistance, Cta::kBiasBytes, Cta::kStages, Cta::kBiasAt,
      Cta::kPreparedAt;
  using typename Cta::Loader;

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
  using Cta::p_, Cta::smem_, Cta::work_, Cta::q_, Cta::k_, Cta::v_;

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
