// Attention of few query rows over long keys: decode, speculative decode, the last rows of an append. sm_80 and newer.
//
// The kernel is limited by reading keys and values once. A row tile has all query heads of one KV head (q_len *
// group_size <= 64 rows), so each byte is read once. The tensor cores compute blocks of 16 rows in a third of the time
// that the reads take.
//
// Flash decoding at three levels:
//   1. All work units are divided into one partition per CTA (core/schedule.h); the last CTA to arrive at a merge group
//      merges its partials.
//   2. The keys of a KV tile are divided among the KV splits of a CTA (tile/ampere/decode_shape.cuh). Each KV split has
//      a ring of cp.async stages and a softmax, so the main loop needs no barrier of the CTA. The results of KV splits
//      are merged in shared memory at the end of a work tile.
//   3. A KV split computes its keys block by block with the online softmax.
// Loads continue across the ends of work tiles: 64 KB must be in flight in every SM to keep the memory busy.
// Sources: Flash-Decoding (Dao et al., 2023) for splitting keys, Stream-K (Osama et al., 2023) for equal partitions.
#pragma once
#include "quire/core/schedule.h"
#include "quire/ptx/barrier.cuh"
#include "quire/tile/ampere/fragments.cuh"
#include "quire/tile/ampere/decode_merge.cuh"
#include "quire/tile/ampere/decode_loader.cuh"
#include "quire/tile/shared/logits.cuh"
#include "quire/tile/shared/stamps.h"

namespace quire {

// `Cta`: the threads that compute a partition together.
template <class V, class Cta = WholeCta>
class AttentionDecode {
  using Shape = DecodeShape<V>;
  using SharedMemory = typename Shape::SharedMemory;
  using T = typename conditional<Shape::kIsNarrow, fp16_t, typename V::Q>::type;  // of the matrix products

 public:
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kThreads = Shape::kThreads, kMinCtas = Shape::kMinCtas, kSmemBytes = Shape::kSmemBytes;

  static_assert(kTileRows == 16 || kTileRows == 32 || kTileRows == 64, "a tile has 16, 32 or 64 rows");
  static_assert(Shape::kIsNarrow || is_same<typename V::Q, typename V::Kv>::value, "16-bit keys have the dtype of q");
  static_assert(V::kHeadDimQk % 8 == 0 && V::kHeadDimVo % 8 == 0 && max(V::kHeadDimQk, V::kHeadDimVo) <= 512,
                "head dims are multiples of 8 up to 512");
  static_assert(Shape::kDimWarps == 1 || V::kPosEncoding != kPosEncodingRope, "a warp has both dims of a pair");
  static_assert((!Shape::kIsNarrow && V::kPosEncoding != kPosEncodingRope) ||
                    (Shape::kQk == V::kHeadDimQk && Shape::kVo == V::kHeadDimVo),
                "narrow and rotated heads are whole blocks");
  static_assert(Shape::kKvBits != 4 || (Shape::kDimWarps == 1 && V::kPosEncoding != kPosEncodingRope),
                "4-bit heads have up to 256 dims, and are not rotated");

  QUIRE_DEVICE static void run(const AttentionParams& p, unsigned char* smem, Cta cta = {}) {
    if (!p.plan_is_resident) ptx::wait_for_predecessor();
    AttentionDecode(p, *reinterpret_cast<SharedMemory*>(smem), cta).compute_partition();
  }
  QUIRE_DEVICE static void run(const AttentionScaledParams& p, unsigned char* smem) { run(p.base, smem); }

 private:
  static constexpr int kM = Shape::kM, kVo = Shape::kWarpVo, kQk = Shape::kWarpQk, kBlock = Shape::kBlock;
  static constexpr int kStages = Shape::kStages;
  static constexpr bool kHasRope = V::kPosEncoding == kPosEncodingRope, kCascade = V::kCascade != 0;
  using Math = FragmentMath<false>;
  static constexpr bool kHasRegisters = kM == 1 && max(kQk, kVo) <= 128;  // registers for what is added to logits
  using Bias = BiasAhead<V, Math, kBlock, kHasRegisters && !kHasRope>;
  static constexpr bool kHasRamps = LogitsTransform<V, Math>::kIsRamp && kHasRegisters;
  static constexpr bool kRuns = Shape::kRotationsRun;
  using Rotations = typename conditional<kRuns, RunningKeyRotations<kQk / 16, kTileKv>, KeyRotations>::type;
  using Query =
      QueryFragments<typename V::Q, Shape::kKvBits, kM, V::kHeadDimQk / Shape::kDimWarps, Shape::kHeldQ, kHasRope>;
  using WarpK = TileSlice<typename Shape::TileK, kQk>;
  using WarpV = TileSlice<typename Shape::TileV, kVo>;
  using CursorK = KvCursor<WarpK, Shape::kKvBits, Quarters::kTopFirst>;
  using CursorV = KvCursor<WarpV, Shape::kKvBits>;

  // Keys that some row of a warp sees, and keys that each row sees.
  struct Visible {
    Mask<V::kMask, V::kWindow != 0> mask;
    KeyRange any, all;
  };

  enum class Phase {
    kFill,     // the ring is being filled for the first time, and no work tile has started
    kCompute,  // a work tile has KV tiles to compute
    kFinish,   // the last KV tile of a work tile has been computed
  };

  // Each turn of the loop loads one KV tile and computes the one that was loaded kStages turns ago. Each step
  // occurs once in the code, because a CTA with one work tile spends much of its time on fetching instructions.
  QUIRE_DEVICE void compute_partition() {
    Phase phase = Phase::kFill;
    int stage = -1;  // to load: an empty stage, later the one computed last; -1: the first load has no KV tile yet
#pragma unroll 1
    for (;;) {
      if (!Shape::kHasSpill && phase == Phase::kFinish) finish(stage);  // o goes to the stage, so before it is loaded
      load(stage);
      const bool is_filled = phase != Phase::kFill || stage == kStages - 1;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (!is_filled) continue;
      if (Shape::kHasSpill && phase == Phase::kFinish) finish(stage);
      if (phase != Phase::kCompute) {
        if (!cursor_.exists()) break;
        start(phase == Phase::kFill);
      }
      compute(stage);
      phase = ++tile_ < kv_end_ ? Phase::kCompute : Phase::kFinish;
    }
    ptx::cp_async_wait<0>();
  }

  // Starts to copy a KV tile to `stage`, and to read the pages of the next one. The first load (stage -1) has no KV
  // tile to copy: it starts the first work tile and copies its queries. A load is one group of cp.async.
  QUIRE_DEVICE void load(int stage) {
    const bool is_first = stage < 0;
    const bool needs_pages = loader_.load(window_, k_tile(stage), v_tile(stage));
    if (is_first) ptx::wait_for_predecessor();
    if (needs_pages) loader_.prefetch_pages();
    if (Shape::kHasFirstQuery && is_first && cursor_.exists()) load_first_query();
    ptx::cp_async_commit();
  }

  // Copies the queries of the CTA's first work tile before its keys; otherwise they would arrive last.
  QUIRE_DEVICE void load_first_query() {
    using Q = typename V::Q;
    constexpr int kChunks = V::kHeadDimQk / 8;  // of 16 bytes, in a row
    WorkCursor cursor = cursor_;
    const WorkTile work = cursor.take<kCascade>(p_, window_.get(cursor, lane_), kTileKv);
    const int row_begin = work.tile.row_begin, rows = min(kTileRows, work.row_end - row_begin);
#pragma unroll 1
    for (int i = static_cast<int>(Cta::thread()); i < rows * kChunks; i += kThreads) {
      const WorkTile::Place at = work.place(p_.group, row_begin + i / kChunks);
      const Q* src = static_cast<const Q*>(p_.q) + at.token * p_.q_token_stride + at.head * p_.q_head_stride;
      ptx::cp_async_16(ptx::smem_address(smem_.first_query()) + i * 16, src + i % kChunks * 8);
    }
  }

  // Starts the next work tile: its request, its queries, the keys that they see.
  QUIRE_DEVICE void start(bool is_first) {
    // Not earlier, because CTAs of the next launch would delay the first copies of this one.
    if (is_first) ptx::launch_dependents();
    if constexpr (kHasRope) {
      if (is_first) compute_steps();
    }
    const bool has_query = Shape::kHasFirstQuery && is_first;
    if (has_query) {
      ptx::cp_async_wait<kStages>();  // the first load; kStages of keys are under way
      Cta::sync();
    }
    const WorkTile next = cursor_.take<kCascade>(p_, window_.get(cursor_, lane_), kTileKv);
    stamp<V>(p_, next, Moment::kBegin, Cta::thread() == 0);
    const bool has_rows = num_stored_ > 0;  // those of the work tile before
    if (!has_rows) {
      if constexpr (Shape::kQueryBytes > 0)
        q_.shared = ptx::smem_address(smem_.fixed.query[warp_ % Shape::kSplitWarps]) + lane_ * 16;
      q_.template load<V::kHeadDimQk>(p_, next, row_begin(next), lane_, kv_split() == 0,
                                      has_query ? smem_.first_query() : nullptr, dim_warp() * kQk);
    }
    __syncwarp();  // every lane is done with the work tile before
    if (lane_ == 0) work() = next;
    keys_ = visible(next);
    tile_ = next.kv_begin, kv_end_ = next.kv_end;
    o_.clear();  // again, so that zeros take no registers while queries are loaded
    softmax_.clear();
    // The keys of the next split may follow: rotations begin anew, as in a CTA that computes it alone.
    if constexpr (kRuns) rotations_.expected = -1;
    if (Shape::kQueryBytes > 0 && !has_rows)
      Cta::sync();
    else
      __syncwarp();
    if constexpr (kHasRamps) ramps_.set(LogitsTransform<V, Math>(p_), 1.f, logits_tile(0));
  }

  // The rotation of a pair of dims from one key of a lane to its next one.
  QUIRE_DEVICE void compute_steps() {
#pragma unroll 1
    for (int i = static_cast<int>(Cta::thread()); i < kQk / 2; i += kThreads) {
      smem_.fixed.steps[i] = rope_rotation(kTurnStep, p_.rope_frequencies[i]);
      if constexpr (kRuns)
        smem_.fixed.steps[kQk / 2 + i] = rope_rotation(kTileKv - kBlock + kTurnStep, p_.rope_frequencies[i]);
    }
    if (!Shape::kHasFirstQuery) Cta::sync();  // the first query's barrier is for both
  }

  // Computes the KV split's keys of KV tile tile_, which are loaded or still on their way to `stage`.
  QUIRE_DEVICE void compute(int stage) {
    // Not behind the products: the next load waits for all reads, and would for one that has just begun.
    take_bias(0);
    ptx::cp_async_wait<kStages - 1>();
    sync_split();  // the copies of every lane have arrived
    attend(stage, first_key());
    sync_split();  // every lane has read them: the stage can be loaded
  }

  // The online softmax: S = Q K^T, P = exp2(S - m), O = O + P V, for the keys [key, key + kSplitTokens) in `stage`.
  QUIRE_DEVICE void attend(int stage, int key) {
    const CursorK k({k_tile(stage).base + dim_warp() * (kQk * Shape::kKvBits / 8)}, lane_);
    const CursorV v({v_tile(stage).base + dim_warp() * (kVo * Shape::kKvBits / 8)}, lane_);
#pragma unroll 1
    for (int b = 0; b < Shape::kSplitTokens / kBlock; ++b, key += kBlock) {
      if (key >= keys_.any.end || key + kBlock <= keys_.any.begin) continue;
      Accumulator<kM, kBlock> s;
      if (b > 0) take_bias(b);
      if constexpr (kHasRope) {
        mma_rotated_keys<T, typename V::Kv, kM, kBlock, kQk>(s, q_, k_tile(stage), b, lane_, key, rotations_);
      } else {
        mma_keys<T, typename V::Kv, kM, kBlock, kQk>(s, q_, k, b, lane_);
      }
      if constexpr (Shape::kDimWarps > 1) add_other_dims(s, smem_.fixed.sums);
      const LogitsTransform<V, Math> transform(p_);
      const float scale = transform.factor;
      if constexpr (Bias::kExists) {
        bias_.add(s, transform.scale);
        if (!keys_.all.covers({key, key + kBlock})) hide_logits(s, transform, logits_tile(key));
      } else if constexpr (kHasRamps) {
        ramps_.move(1.f, key);
        ramps_.add(s, transform.scale, logits_tile(key));
        if (!keys_.all.covers({key, key + kBlock})) hide_logits(s, transform, logits_tile(key));
      } else if (keys_.all.covers({key, key + kBlock})) {
        score_logits<false>(s, transform, logits_tile(key));
      } else {
        score_logits<true>(s, transform, logits_tile(key));
      }
      softmax_.raise_max(s, scale, o_);
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        uint32_t weights[kM][4];
        softmax_.template exponentiate<T>(s, scale, i, weights);
        mma_values<T, typename V::Kv>(o_, weights, v, b * (kBlock / 16) + i, lane_);
      }
    }
  }

  // The first key of the KV split in KV tile tile_.
  QUIRE_DEVICE int first_key() const { return tile_ * kTileKv + kv_split() * Shape::kSplitTokens; }

  // The biases of block b of the KV split's keys, and a start on those of the next block.
  QUIRE_DEVICE void take_bias(int b) {
    if constexpr (Bias::kExists) {
      const LogitsTransform<V, Math> transform(p_);
      const bool is_last = b + 1 == Shape::kSplitTokens / kBlock;
      const int key = first_key() + b * kBlock, next_key = is_last ? first_key() + kTileKv : key + kBlock;
      if (!bias_.has_next(key)) bias_.read(transform, logits_tile(key), has_low_rows());
      bias_.advance();
      bias_.read(transform, logits_tile(next_key), has_low_rows());
    }
  }

  // Adds q k^T over the dims of the other warp with the same rows and keys. Both warps get the same bits.
  template <class Sums>
  QUIRE_DEVICE void add_other_dims(Accumulator<kM, kBlock>& s, Sums& sums) const {
    static_assert(kM == 1 && Shape::kSplitWarps == 2, "the warps of a KV split are two, of the same rows");
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n) {
      float (&x)[4] = s.at[0][n];
      sums[warp_][n][lane_] = {x[0], x[1], x[2], x[3]};
    }
    sync_split();
#pragma unroll
    for (int n = 0; n < kBlock / 8; ++n) {
      float (&x)[4] = s.at[0][n];
      const float4 y = sums[warp_ ^ 1][n][lane_];
      x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
    }
  }

  // Merges the KV splits of the work tile, stores its result or partial, and merges the partials of its row tile if
  // this CTA is the last to arrive. It arrives once for consecutive parts, as each arrival waits for memory. `stage`:
  // where o goes if it has no spill area; no copy is under way to it.
  QUIRE_DEVICE void finish(int stage) {
    softmax_.reduce();
    const bool continues = has_next_part();
    ++num_stored_;
    DecodeEnding<V, Cta>{p_, smem_, stage, warp_, lane_}.run(work(), o_, softmax_, continues ? 0 : num_stored_);
    stamp<V>(p_, work(), Moment::kEnd, Cta::thread() == 0);
    if (!continues) q_.clear(), num_stored_ = 0;
    reset();
  }

  // Whether the next work tile has the next keys of the same rows, as with short fixed splits.
  QUIRE_DEVICE bool has_next_part() {
    if (kCascade || work().is_whole() || !cursor_.exists()) return false;
    const RowTile& next = window_.get(cursor_, lane_);
    return next.partial >= 0 && next.group + cursor_.left.kv_head == work().group;
  }

  // No register keeps a value of the work tile, so finish() and start() can use them.
  QUIRE_DEVICE void reset() {
    o_.clear();
    softmax_.clear();
    bias_.clear();
  }

  // Whether a row tile has more than eight rows.
  QUIRE_DEVICE bool has_low_rows() const { return work().row_end - row_begin(work()) > 8; }

  // The logits of keys [key, key + kBlock).
  QUIRE_DEVICE LogitsTile<V> logits_tile(int key) const {
    return {keys_.mask, p_.group, work().tile.request, work().kv_head, row_begin(work()) + lane_ / 4, key, lane_};
  }

  QUIRE_DEVICE Visible visible(const WorkTile& work) const {
    const auto mask = Mask<V::kMask, V::kWindow != 0>::of(p_, work.tile);
    const int begin = row_begin(work);
    if (begin >= work.row_end) return {mask, {0, 0}, {0, 0}};
    const int first = p_.group.div(begin), last = p_.group.div(min(begin + kM * 16, work.row_end) - 1);
    if constexpr (V::kScoreMask != 0) return {mask, mask.any(first, last), {0, 0}};
    return {mask, mask.any(first, last), mask.all(first, last)};
  }

  // This warp's first packed row.
  QUIRE_DEVICE int row_begin(const WorkTile& work) const {
    return work.tile.row_begin + warp_ % Shape::kRowWarps * kM * 16;
  }
  // Which half of the dims is this warp's, where warps divide them.
  QUIRE_DEVICE int dim_warp() const { return warp_ % Shape::kSplitWarps / Shape::kRowWarps; }
  QUIRE_DEVICE int kv_split() const { return warp_ / Shape::kSplitWarps; }
  // The current work tile, a copy for each warp.
  QUIRE_DEVICE WorkTile& work() const { return smem_.fixed.work[warp_]; }

  QUIRE_DEVICE uint32_t stage_at(int stage) const { return ptx::smem_address(smem_.ring[kv_split()][stage]); }
  QUIRE_DEVICE typename Shape::TileK k_tile(int stage) const { return {stage_at(stage)}; }
  QUIRE_DEVICE typename Shape::TileV v_tile(int stage) const { return {stage_at(stage) + Shape::TileK::kBytes}; }

  QUIRE_DEVICE void sync_split() const {
    if constexpr (Shape::kSplitWarps == 1)
      __syncwarp();
    else
      ptx::named_barrier_sync(Cta::barrier(1 + kv_split()), Shape::kSplitWarps * 32);
  }

  QUIRE_DEVICE AttentionDecode(const AttentionParams& p, SharedMemory& smem, Cta cta)
      : p_(p),
        smem_(smem),
        warp_(Cta::thread() / 32),
        lane_(Cta::thread() % 32),
        cursor_(WorkCursor::of_cta(p, cta.index())),
        window_(p, cursor_, smem.fixed.tiles[warp_], lane_),
        loader_(p, cursor_, warp_, lane_) {
    if constexpr (kHasRope) rotations_.take(p.rope_frequencies, smem.fixed.steps);
    q_.clear();
    reset();
  }

  const AttentionParams& p_;
  SharedMemory& smem_;
  int warp_, lane_;
  WorkCursor cursor_;            // the next work tile to start
  TileWindow<kCascade> window_;  // row tiles around it
  DecodeLoader<V> loader_;       // the next KV tile to load

  Rotations rotations_;  // of keys

  // The current work tile: KV tiles [tile_, kv_end_) are still to be computed. A work tile without keys computes one KV
  // tile that no row sees.
  int tile_, kv_end_;
  Visible keys_;
  int num_stored_ = 0;  // partials of its merge group that this CTA has stored and not announced
  Query q_;
  Accumulator<kM, kVo> o_;
  SoftmaxRows<kM> softmax_;
  Bias bias_;
  RowRamps<V, 2> ramps_;  // of ALiBi
};

}  // namespace quire
