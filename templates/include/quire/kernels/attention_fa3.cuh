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
// Unsuccessful attempts: benchmarks/results/notes/fa3.md.
//
// Sources: FlashAttention-3 (Shah et al., 2024) for the pipeline, FlashAttention-4 for rescaling only when the maximum
// has grown.
#pragma once
#include "quire/kernels/attention_fa3_load.cuh"
#include "quire/kernels/attention_fa3_shape.cuh"

namespace quire {

template <class V, class WorkList = SharedWorkList<1>>
class AttentionFa3 : public Fa3Cta<V> {
  using Cta = Fa3Cta<V>;
  using Cta::kQk, Cta::kVo, Cta::kIsFp8, Cta::kRescaled, Cta::kWarpgroups, Cta::kConsumers, Cta::kHasZeros,
      Cta::kIsRamp, Cta::kIsCap, Cta::kIsDistance, Cta::kIsRowScale, Cta::kRaisesSeldom, Cta::kWorkStages,
      Cta::kQStages, Cta::kStages, Cta::kStartsEarly, Cta::kResultsAt, Cta::kHoldsRows, Cta::kLoadRegisters,
      Cta::kComputeRegisters, Cta::kTurn, Cta::kWarpgroup, Cta::kAllConsumers, Cta::kSharedStored, Cta::q_tile,
      Cta::v_tile, Cta::q_by_tma, Cta::bias_at, Cta::ramp_scale, Cta::warpgroup, Cta::is_leader,
      Cta::fits_one_warpgroup, Cta::part_of, Cta::lane_row, Cta::note, Cta::queries, Cta::keys, Cta::logits_tile,
      Cta::query_factor_at, Cta::copy_q, Cta::store_whole, Cta::store_partial, Cta::deferred_arrivals, Cta::p_,
      Cta::stages_, Cta::smem_, Cta::work_, Cta::q_, Cta::k_, Cta::v_;
  using typename Cta::Q, typename Cta::T, typename Cta::TileQ, typename Cta::TileK, typename Cta::TileV,
      typename Cta::Stage, typename Cta::Math, typename Cta::Transform, typename Cta::Bits;

 public:
  using Cta::kTileRows, Cta::kTileKv;

  QUIRE_DEVICE static void run(const AttentionFa3Params& p, unsigned char* smem) {
    const Cta cta(p, smem);
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) cta.init_barriers();
    __syncthreads();
    if (warpgroup == 0) {
      ptx::give_registers<kLoadRegisters>();
      Fa3Loaders<V, WorkList>(cta).produce();
    } else {
      ptx::take_registers<kComputeRegisters>();
      AttentionFa3(cta).compute();
    }
  }

 private:
  QUIRE_DEVICE explicit AttentionFa3(const Cta& cta) : Cta(cta) {}

  // The stages that a computing warpgroup reads next. The values of a KV tile are used one KV tile after its keys;
  // their stage has the number of the keys' stage.
  struct Rings {
    RingPosition<kQStages> q;
    RingPosition<kStages> k;

    QUIRE_DEVICE RingPosition<kStages> values_of_last_keys() const { return k.before(); }
    QUIRE_DEVICE RingPosition<kStages> values_of_tile_before() const { return k.before().before(); }
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
    CascadeEnding<V, kConsumers, kSharedStored> ending(deferred_arrivals());
    for (;;) {
      work_.wait_full(at);
      if (!ptx::uniform(stages_[at.stage()].exists)) break;
      Rows rows;
      rows.clear();
      // Reserve places among the deferred arrivals of a cascade.
      const int deferred_at = ending.begin(stages_[at.stage()].work, warpgroup());
      if (fits_one_warpgroup(stages_[at.stage()].work) && !owns_work_tile(rings)) {
        if (ptx::uniform(KvTileWalk<V>(stages_[at.stage()]).exists())) skip_work_tile(stages_[at.stage()], rings);
        release_work_tile(at);
        continue;
      }
      note(stages_[at.stage()].work, Moment::kBegin);
      // Compute this work tile, and store those that attend_work_tiles() goes past.
      if (ptx::uniform(KvTileWalk<V>(stages_[at.stage()]).exists())) attend_work_tiles(rows, at, rings);
      // Store the last one.
      Stage& current = stages_[at.stage()];
      store(rows, current, deferred_at);
      note(current.work, Moment::kEnd);
      release_work_tile(at);
      ending.stored(p_.base, warpgroup());
    }
    ending.merge(p_.base, warpgroup(), [] { ptx::named_barrier_sync(kAllConsumers, kConsumers); });
  }

  // Whether this warpgroup computes a work tile that fits one warpgroup. Where there are two stages of queries, each
  // warpgroup has one.
  QUIRE_DEVICE static bool owns_work_tile(const Rings& rings) {
    constexpr bool kAlternate = kWarpgroups == 2 && kQStages == 2 && !kIsFp8;
    return warpgroup() == (kAlternate ? ptx::uniform(rings.q.stage()) : 0);
  }

  // Releases the queries, keys and values of another warpgroup's work tile. One thread waits for them, and the others
  // wait for this thread: a thread that ran ahead of the ring would confuse one round of the ring with the next.
  QUIRE_DEVICE void skip_work_tile(const Stage& current, Rings& rings) const {
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
    // Start S of the first KV tile.
    wait_work_tile(stages_[at.stage()], rings);
    begin_scores(rows, s, stages_[at.stage()], rings);
    start_ABt<T, TileQ, TileK, kIsDistance>(s, queries(rings.q, turn), keys(rings.k));
#pragma unroll 1
    for (;;) {
      if constexpr ((kStartsEarly && V::kCascade == 0) || has_block_mask<V>()) {
        rings.q = rings.q.uniform(), rings.k = rings.k.uniform(), at = at.uniform();
      }
      Stage& current = stages_[at.stage()];
      // Compute all KV tiles, but for O += P V of the last one.
      attend(rows, s, bits, current, rings, turn);
      const auto last_values = rings.values_of_last_keys();
      v_.wait_full(last_values);
      // Look whether another work tile follows, whose first S can run beside this O += P V.
      const auto next = at.after();
      bool goes_on = kStartsEarly && V::kCascade == 0 && ptx::uniform(current.work.is_whole());
      if (goes_on) {
        work_.wait_full(next);
        goes_on = ptx::uniform(stages_[next.stage()].exists && KvTileWalk<V>(stages_[next.stage()]).exists());
      }
      if (!goes_on) {
        start_AB<T, TileV>(rows.o, rows.p, values(last_values));
        ptx::wgmma_wait<0>();
        ptx::pin(rows.o);
        if (is_leader()) v_.arrive_empty(last_values);  // release V
        return;
      }
      // Start O += P V, and S of the next work tile.
      wait_work_tile(stages_[next.stage()], rings);
      begin_scores(rows, s, stages_[next.stage()], rings);
      const TileDescriptor q = queries(rings.q, turn), k = keys(rings.k), v = values(last_values);
      start_AB<T, TileV>(rows.o, rows.p, v);
      start_ABt<T, TileQ, TileK, kIsDistance>(s, q, k);
      // Wait for O, and store it while S runs.
      ptx::wgmma_wait<1>();
      ptx::pin(rows.o);
      if (is_leader()) v_.arrive_empty(last_values);  // release V
      rows.softmax.reduce();
      store_whole(rows.o, rows.softmax, current.work, lane_row(ptx::lane_id()), ptx::lane_id());
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
      __syncwarp();  // every lane has read the factors of the work tile before
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

  // The main loop: O, m and d of this warpgroup's 64 rows over the KV tiles of the work tile, except O += P V of the
  // last KV tile. s: S of the first KV tile, which is being computed; bits: its mask.
  QUIRE_DEVICE void attend(Rows& rows, float (&s)[kTileKv / 2], const Bits& bits, const Stage& current, Rings& rings,
                           int turn) const {
    KvTileWalk<V> walk(current);
    const UnmaskedTiles<V> unmasked(p_.base, current, current.work.tile.row_begin + turn * 64);
    const TileDescriptor q = queries(rings.q, turn);
    const bool takes_turns = kWarpgroups > 1 && !fits_one_warpgroup(current.work);
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
      if (unmasked.contains(walk)) {
        next_tile<false>(rows, current, rings, q, turn, takes_turns, walk);
      } else {
        next_tile<true>(rows, current, rings, q, turn, takes_turns, walk);
      }
    }
    if (q_by_tma() && is_leader()) q_.arrive_empty(rings.q);  // release Q
    rings.q.advance();
  }

  QUIRE_DEVICE TileDescriptor values(RingPosition<kStages> at) const {
    return {v_tile(at.stage()).base, TileV::kAtomBytes};
  }

  // The rightmost KV tile, whose S is being computed: its softmax alone.
  QUIRE_DEVICE void first_tile(Rows& rows, float (&s)[kTileKv / 2], const Bits& bits, const Stage& current,
                               Rings& rings, int tile) const {
    // Wait for S.
    ptx::wgmma_wait<0>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);  // release K
    rings.k.advance();
    // Turn S into weights.
    if constexpr (kIsCap) {
      apply_soft_cap<true>(rows, s, current, tile, bits, [] {});
    } else {
      apply_softmax<true>(rows, s, current, tile, bits);
    }
    round_weights<T>(s, rows.p);
    // Clear values from kv_len on: they may be NaN, and 0 * NaN is NaN. Gathering and widening have put zeros there.
    const int valid = current.work.tile.kv_len - tile * kTileKv;
    if (!kHasZeros && valid < kTileKv) clear_values(rings.values_of_last_keys(), valid);
  }

  // Starts S = Q K^T of this KV tile and O += P V of the one before it, goes on to the next KV tile, and computes the
  // softmax of S while O += P V runs.
  template <bool kMasked>
  QUIRE_DEVICE void next_tile(Rows& rows, const Stage& current, Rings& rings, TileDescriptor q, int turn,
                              bool takes_turns, KvTileWalk<V>& walk) const {
    float s[kTileKv / 2];
    const int tile = walk.tile();
    // In a cascade ptxas would otherwise keep twelve descriptors of queries, and not in uniform registers.
    if constexpr (V::kCascade != 0) q.low = ptx::uniform(q.low);
    if constexpr (kWarpgroups == 2 && kQk == 128) rings.k = rings.k.uniform();
    const auto values_of_tile_before = rings.values_of_last_keys();
    const TileDescriptor k = keys(rings.k), v = values(values_of_tile_before);
    // Wait and read before the turn begins: the tensor cores are idle from the begin of a turn to its products.
    Bits bits;
    if constexpr (kMasked) read_mask(bits, logits_tile(current, tile));
    if constexpr (kIsRamp) rows.ramps.move(ramp_scale(), tile * kTileKv);
    v_.wait_full(values_of_tile_before);
    k_.wait_full(rings.k);
    if constexpr (kIsDistance) rows.distances.read(s, bias_at(rings.k));
    // Start S of this tile and O += P V of the tile before, and hand the turn over.
    if (takes_turns) ptx::named_barrier_sync(kTurn + turn, 256);
    start_ABt<T, TileQ, TileK, kIsDistance>(s, q, k);
    start_AB<T, TileV>(rows.o, rows.p, v);
    if (takes_turns) ptx::named_barrier_arrive(kTurn + (turn + 1) % kWarpgroups, 256);
    walk.advance();  // while products run
    // Wait for S.
    ptx::wgmma_wait<1>();
    ptx::pin(s);
    if (is_leader()) k_.arrive_empty(rings.k);  // release K
    rings.k.advance();
    // Compute the softmax of S while O += P V runs, and then end the tile before.
    if constexpr (kIsCap) {
      apply_soft_cap<kMasked>(rows, s, current, tile, bits, [&] { end_tile(rows, s, rings); });
    } else {
      apply_softmax<kMasked>(rows, s, current, tile, bits);
      end_tile(rows, s, rings);
    }
  }

  // Ends O += P V of the tile before. Its weights are then replaced by those of S, and O is scaled to the new maximum.
  QUIRE_DEVICE void end_tile(Rows& rows, float (&s)[kTileKv / 2], const Rings& rings) const {
    ptx::wgmma_wait<0>();
    ptx::pin(rows.o);
#pragma unroll
    for (int k = 0; k < kTileKv / 16; ++k) ptx::pin(rows.p[k]);
    if (is_leader()) v_.arrive_empty(rings.values_of_tile_before());  // release V
    round_weights<T>(s, rows.p);
    rows.softmax.rescale(rows.o);
  }

  QUIRE_DEVICE void read_mask(TileBits<V, 2>& bits, const LogitsTile<V>& at) const { bits.read(at); }
  QUIRE_DEVICE void read_mask(SeenKeys<V, 2>& seen, const LogitsTile<V>& at) const {
    seen.read(ExpressionOf<V>(p_.base), at);
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
      rows.softmax.template raise_seldom<kMasked>(s, scale, offsets);
      rows.softmax.exponentiate(s, scale, offsets);
    } else if constexpr (kIsDistance) {
      if constexpr (kMasked) hide_logits(s, transform, at, bits);
      const float scale = ramp_scale();
      rows.softmax.template raise_seldom<kMasked>(s, scale);
      rows.softmax.exponentiate(s, scale);
    } else if constexpr (kIsRowScale) {
      rows.scales.flip(s);
      if constexpr (kMasked) hide_logits(s, transform, at, bits);
      rows.softmax.template raise_seldom<kMasked>(s, rows.scales.sizes);
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
        rows.softmax.template raise_seldom<kMasked || !kRaisesSeldom>(s, transform.factor);
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

  QUIRE_DEVICE void store(Rows& rows, Stage& stage, int deferred_at) const {
    rows.softmax.reduce();
    const int lane = ptx::lane_id(), row = lane_row(stage.work, lane);
    if (V::kCascade == 0 && stage.work.is_whole()) {
      store_whole(rows.o, rows.softmax, stage.work, row, lane);
    } else {
      store_partial(rows.o, rows.softmax, stage, row, lane, deferred_at);
    }
  }
};

}  // namespace quire
