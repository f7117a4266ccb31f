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
#include "quire/tile/hopper/cta.cuh"
#include "quire/tile/hopper/transpose.cuh"

namespace quire {

template <class V>
struct Fa3Fp8Shape : WgmmaShape<V> {
  using Base = WgmmaShape<V>;
  using Base::kTileRows, Base::kTileKv, Base::kQk, Base::kVo, Base::kWarpgroups, Base::kIsGathered, Base::kWorkStages,
      Base::kMaxStages, Base::kCapacity, Base::kResultBytes, Base::registers_suffice;
  using typename Base::Stage;
  template <int kQStages, int kStages>
  using Barriers = typename Base::template Barriers<kQStages, kStages>;

  static_assert(is_same<typename V::Q, e4m3_t>::value && is_same<typename V::Kv, e4m3_t>::value, "q, k and v are e4m3");
  static_assert(kQk % 32 == 0 && kVo % 32 == 0 && max(kQk, kVo) <= 256, "head dims are multiples of 32 up to 256");
  static_assert(kWarpgroups >= 2 && kTileKv % 32 == 0,
                "two or three warpgroups; the inner dimension of products is 32");

  using TileQ = SwizzledTile<kTileRows, kQk, 8>;
  using TileK = SwizzledTile<kTileKv, kQk, 8>;
  using TileV = SwizzledTile<kVo, kTileKv, 8>;  // transposed
  using Keys = typename conditional<kIsGathered, Fp8Gather<V, TileK, kTileKv>, KvLoader<V>>::type;

  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kRawStages = 2;  // of values before they are transposed
  static constexpr int kRawBytes = 2 * kRawStages * SwizzledTile<kTileKv / 2, kVo, 8>::kBytes;

  static constexpr int kQueryFactorsBytes = kTileRows * 4;
  static constexpr int kArrivedBytes = 2 * kRawStages * 8;  // of mbarriers
  static constexpr int kOtherBytes = static_cast<int>(kWorkStages * sizeof(Stage) + sizeof(Barriers<2, kMaxStages>)) +
                                     kArrivedBytes + kQueryFactorsBytes;
  static constexpr int kTilesCapacity = kCapacity - kOtherBytes - kRawBytes;
  static constexpr int kQStages = 2 * TileQ::kBytes + 2 * kStageBytes <= kTilesCapacity ? 2 : 1;
  // A ring position takes one register where the number of stages is a power of two.
  static constexpr int kStages = kQStages * TileQ::kBytes + kMaxStages * kStageBytes <= kTilesCapacity ? kMaxStages : 2;

  static constexpr int kKAt = kQStages * TileQ::kBytes;
  static constexpr int kVAt = kKAt + kStages * TileK::kBytes;
  static constexpr int kRawAt = kVAt + kStages * TileV::kBytes;
  static constexpr int kResultsAt = kRawAt + kRawBytes;
  // Results are stored by way of shared memory where that takes no stage away.
  static constexpr bool kIsStaged = kResultsAt + kResultBytes <= kTilesCapacity + kRawBytes;
  static constexpr int kWorkStagesAt = kResultsAt + (kIsStaged ? kResultBytes : 0);
  static constexpr int kQueryFactorsAt = kWorkStagesAt + kWorkStages * static_cast<int>(sizeof(Stage));
  static constexpr int kBarriersAt = kQueryFactorsAt + kQueryFactorsBytes;
  using AllBarriers = Barriers<kQStages, kStages>;
  static constexpr int kArrivedAt = kBarriersAt + static_cast<int>(sizeof(AllBarriers));
  static constexpr int kSmemBytes = kArrivedAt + kArrivedBytes;
  static_assert(kSmemBytes <= kCapacity, "the tiles do not fit into shared memory");
  static_assert(kKAt % 1024 == 0 && kVAt % 1024 == 0 && kRawAt % 1024 == 0 && TileK::kBytes % 1024 == 0 &&
                    TileV::kBytes % 1024 == 0 && SwizzledTile<kTileKv / 2, kVo, 8>::kBytes % 1024 == 0,
                "the 128-byte swizzle repeats every 1024 bytes");
  static_assert(kWorkStagesAt % alignof(Stage) == 0 && kBarriersAt % 8 == 0, "work stages and mbarriers are aligned");

  static constexpr bool kSchedulesLate = false;

  // Registers a thread: see attention_fa3_shape.cuh.
  static constexpr bool kLoadsMore =
      kIsGathered || has_block_mask<V>() || (kWarpgroups == 3 && kVo / 2 + kTileKv / 2 <= 112);
  static constexpr int kLoadRegisters = kLoadsMore ? 56 : kWarpgroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = kWarpgroups == 3 ? (kLoadsMore ? 152 : 160) : kLoadsMore ? 224 : 232;
  static_assert(registers_suffice(kLoadRegisters, kComputeRegisters), "the launch has the warps' registers");

  enum Role { kLoadK, kLoadV, kLoadMoreV, kSchedule };
};

template <class V, class WorkList = SharedWorkList<1>>
class AttentionFa3Fp8 : public WgmmaCta<V, Fa3Fp8Shape<V>, AttentionFa3Fp8Params> {
  using Cta = WgmmaCta<V, Fa3Fp8Shape<V>, AttentionFa3Fp8Params>;
  using Cta::kVo, Cta::kIsGathered, Cta::kWarpgroups, Cta::kWorkStages, Cta::kQStages, Cta::kStages, Cta::kRawStages,
      Cta::kVAt, Cta::kRawAt, Cta::kArrivedAt, Cta::kLoadRegisters, Cta::kComputeRegisters, Cta::kLoadK, Cta::kLoadV,
      Cta::kLoadMoreV, Cta::kSchedule, Cta::kTurn, Cta::q_tile, Cta::k_tile, Cta::v_tile, Cta::q_by_tma,
      Cta::for_each_work_stage, Cta::copy_q_by_tma, Cta::warpgroup, Cta::is_leader, Cta::lane_row, Cta::note,
      Cta::queries, Cta::keys, Cta::logits_tile, Cta::query_factor_at, Cta::copy_q, Cta::store_whole,
      Cta::store_partial, Cta::p_, Cta::stages_, Cta::smem_, Cta::work_, Cta::q_, Cta::k_, Cta::v_;
  using typename Cta::TileQ, typename Cta::TileK, typename Cta::TileV, typename Cta::Stage, typename Cta::Keys,
      typename Cta::Transform, typename Cta::Schedule;
  using Bits = TileBits<V, 2>;

  // Whether S of the next KV tile is computed beside O += P V of the last one. Three warpgroups have no registers for
  // this, and need it less; neither do wide heads.
  static constexpr bool kOverlaps = kWarpgroups == 2 && kVo <= 128;
  // Columns of a part of O += P V, and of how many parts the sums are in registers beside O. Three warpgroups have no
  // registers for two, nor have wide heads whose logits are transformed.
  static constexpr bool kHasOne = kWarpgroups == 3 || (kVo == 256 && !Transform::kIsIdentity);
  static constexpr int kPartSums = kHasOne ? 1 : 2;
  static constexpr int kPartCols = kVo == 96 ? 96 : kVo == 256 && kHasOne ? 128 : kVo % 64 == 0 ? 64 : 32;
  static constexpr int kParts = kVo / kPartCols;
  static_assert(kVo % kPartCols == 0, "parts are equal");

  // The weight of the largest logit, when a row's reference maximum is chosen, is 2^kFirstExponent.
  static constexpr float kFirstExponent = 5.f;

 public:
  using Cta::kTileRows, Cta::kTileKv;

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
  using Cta::Cta;

  // The mbarriers at which a warp waits for values before they are transposed, one a stage.
  QUIRE_DEVICE uint32_t bytes_arrived(int half) const { return smem_ + kArrivedAt + half * kRawStages * 8; }

  // Full barriers: the loading warp arrives once a stage, each lane where it gathers keys; both transposing warps do.
  // Empty barriers: each computing warpgroup arrives once; work stages are read by lanes, so that each warp but the
  // scheduling one arrives.
  QUIRE_DEVICE void init_barriers() const {
    work_.init(1, kWarpgroups * 4 + 3);
    q_.init(1, kWarpgroups);
    k_.init(kIsGathered ? 32 : 1, kWarpgroups);
    v_.init(2, kWarpgroups);
    for (int i = 0; i < 2 * kRawStages; ++i) ptx::mbarrier_init(bytes_arrived(0) + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }

  QUIRE_DEVICE void produce() const {
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0), lane = ptx::lane_id();
    if (warp == kLoadK) load_k(lane);
    if (warp == kLoadV || warp == kLoadMoreV) load_v(warp - kLoadV, lane);
    if (warp == kSchedule) schedule(lane);
  }

  // Schedules work tiles and loads their queries.
  QUIRE_DEVICE void schedule(int lane) const {
    Schedule s;
    RingPosition<kQStages> q;
    if (lane == 0 && q_by_tma()) ptx::prefetch_tensor_map(&p_.tensor_q);
    if (lane == 0) WorkList::begin(p_, stages_[kWorkStages - 1].cursor, s.number);
    while (s.exists) {
      const Stage& current = this->template schedule_next<WorkList>(s, lane);
      if (s.exists) {
        copy_q_by_tma(current, q, lane);
        __syncwarp();
      }
    }
  }

  QUIRE_DEVICE void release_work_tile(RingPosition<kWorkStages> at, int lane) const {
    __syncwarp();
    if (lane == 0) work_.arrive_empty(at);
  }

  QUIRE_DEVICE void load_k(int lane) const {
    const KvSource from = KvSource::k(p_);
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    RingPosition<kStages> stage;
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      this->template load_work_tile<Keys>(from, current, k_, stage, [&](int i) { return k_tile(i); }, lane);
      release_work_tile(at, lane);
    });
  }

  QUIRE_DEVICE void load_v(int half, int lane) const {
    using Values = ValueTransposer<V, TileV, kStages, kRawStages>;
    const KvSource from = KvSource::v(p_);
    if (lane == 0 && !kIsGathered) ptx::prefetch_tensor_map(from.map);
    Values values(p_.base, from, v_, smem_ + kVAt, smem_ + kRawAt + half * kRawStages * Values::kRawBytes,
                  bytes_arrived(half), half, lane);
    for_each_work_stage([&](const Stage& current, RingPosition<kWorkStages> at) {
      KvTileWalk<V> walk(current);
      values.run(current.work, walk);
      release_work_tile(at, lane);
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
      release_work_tile(at, ptx::lane_id());
      at.advance();
    }
  }

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
    rows.rescale();  // before the exponentials, as a branch after them would keep the weights' conversion behind it
    rows.softmax.exponentiate(s, Transform(p_.base).factor);
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

  // O += P V. With sums of two parts, the tensor cores compute one while the other is added.
  QUIRE_DEVICE void add_values(Rows& rows, TileDescriptor v) const {
    float x[kPartSums][kPartCols / 2];
    start_fp8_AB<TileV, kPartCols>(x[0], rows.p, v);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool has_next = part + 1 < kParts;
      if (!kHasOne && has_next) {
        start_fp8_AB<TileV, kPartCols, false>(x[(part + 1) % kPartSums], rows.p, part_of(v, part + 1));
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      ptx::pin(x[part % kPartSums]);
      rows.add(part, x[part % kPartSums]);
      if (!kHasOne) ptx::pin(rows.o[part]);  // before its sums are those of another part
      if (kHasOne && has_next) start_fp8_AB<TileV, kPartCols>(x[0], rows.p, part_of(v, part + 1));
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

  QUIRE_DEVICE void store(Rows& rows, Stage& stage) const {
    rows.softmax.reduce();
    float o[kVo / 2];
#pragma unroll
    for (int i = 0; i < kVo / 2; ++i) o[i] = rows.o[i / (kPartCols / 2)][i % (kPartCols / 2)];
    const int lane = ptx::lane_id(), row = lane_row(lane);
    if (stage.work.is_whole()) {
      store_whole(o, rows.softmax, stage.work, row, lane);
    } else {
      store_partial(o, rows.softmax, stage, row, lane, -1);
    }
  }
};

}  // namespace quire
