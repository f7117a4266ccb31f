// Attention of few query rows over long keys: decode, speculative decode, the ends of an append. sm_80 and newer.
//
// Bound: reading keys and values once. An H200 gives 4.69 TB/s, some 20 bytes a clock and SM, if 64 KB or more are
// under way in every SM. A tile's rows are all query heads of one kv head (q_len * group_size <= 64), so each byte is
// read once; the tensor cores do in 16-row blocks what the CUDA cores could not at larger groups, a third of their
// time. Schedule: contiguous partitions of all work (core/schedule.h). Inside a CTA the keys of a tile are split among
// KV splits of warps (usually one warp each); a KV split has its own ring of cp.async stages and its own softmax, so
// the main loop has no barrier of the CTA. The ring runs on across work tiles. At the end of a work the KV splits'
// states are merged in shared memory while the ring is filled for the next; a tile that several CTAs work on is
// merged by the last of them. Sources: Flash-Decoding (Dao et al., 2023) for splitting keys, Stream-K (Osama et al.,
// 2023) for equal partitions.
#pragma once
#include "quire/core/schedule.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/grid.cuh"
#include "quire/tile/decode_fragments.cuh"
#include "quire/tile/decode_merge.cuh"
#include "quire/tile/decode_ring.cuh"
#include "quire/tile/mask.cuh"

namespace quire {

template <class V>
struct AttentionDecode {
  using Shape = DecodeShape<V>;
  using T = typename MmaType<typename V::Q, typename V::Kv>::Type;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kThreads = Shape::kThreads, kMinCtas = Shape::kMinCtas, kSmemBytes = Shape::kSmemBytes;

  static_assert(kTileRows == 16 || kTileRows == 32 || kTileRows == 64, "a tile has 16, 32 or 64 rows");
  static_assert(V::kHeadDimQk % 16 == 0 && V::kHeadDimVo % 16 == 0 && max(V::kHeadDimQk, V::kHeadDimVo) <= 256,
                "head dims are multiples of 16 up to 256");
  static_assert(kTileKv == Shape::kTileKv, "the kv tile is what the warps copy at a time");

  QUIRE_DEVICE static void run(const AttentionParams& p, unsigned char* smem) { AttentionDecode(p, smem).work(); }

 private:
  static constexpr int kM = Shape::kM, kVo = V::kHeadDimVo, kQk = V::kHeadDimQk, kBlock = Shape::kBlock;
  static constexpr bool kFetchesFirst = Shape::kFirstQueryBytes > 0;
  using Query = QueryFragments<typename V::Q, Shape::kNarrow, kM, kQk, Shape::kHeldQ>;

  // Keys that some row of a warp sees, and that each row sees.
  struct Visible {
    Mask<V::kMask, V::kWindow != 0> mask;
    KeyRange any, all;
  };

  const AttentionParams& p_;
  unsigned char* smem_;
  int warp_, lane_;

  QUIRE_DEVICE AttentionDecode(const AttentionParams& p, unsigned char* smem)
      : p_(p), smem_(smem), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  QUIRE_DEVICE int kv_split() const { return warp_ / Shape::kSplitWarps; }
  QUIRE_DEVICE uint32_t slot_at(int stage) const {
    return ptx::smem_address(smem_) + (kv_split() * Shape::kStages + stage) * Shape::kSlotBytes;
  }
  QUIRE_DEVICE typename Shape::TileK k_tile(int stage) const { return {slot_at(stage)}; }
  QUIRE_DEVICE typename Shape::TileV v_tile(int stage) const { return {slot_at(stage) + Shape::TileK::kBytes}; }

  QUIRE_DEVICE void split_sync() const {
    if constexpr (Shape::kSplitWarps == 1)
      __syncwarp();
    else
      ptx::named_barrier_sync(1 + kv_split(), Shape::kSplitWarps * 32);
  }

  // Copying runs kStages kv tiles ahead of computing, also past the end of a work. The code of each step stands here
  // once: a launch in which a CTA computes one tile spends much of its time on fetching instructions.
  QUIRE_DEVICE void work() {
    if (!p_.plan_is_resident) ptx::wait_for_predecessor();
    const Partition mine = partition_of_cta(p_, static_cast<int>(blockIdx.x));
    Walk walk(mine);
    TileWindow window(p_, walk, smem_ + Shape::kTilesAt + warp_ * TileWindow::kBytes, lane_);
    if (lane_ == 0) cut() = {mine.work_per_head, mine.units_each, mine.num_longer};
    __syncwarp();
    DecodeLoader<V> loader(p_, walk, warp_, lane_);
    Query q;
    Accumulator<kM, kVo> o;
    SoftmaxRows<kM> softmax;
    Visible keys;
    int tile = 0, kv_end = 0;             // of the work at hand
    int stage = 0, free = 0;              // the next to compute, the next to fill
    int ahead = -1;                       // stages filled at first; -1: nothing looked up; kStages: a work has begun
    bool at_hand = false, refill = true;  // there is a work at hand; a stage is free
    reset(q, o, softmax);
#pragma unroll 1
    for (;;) {
      const bool ends = at_hand && tile == kv_end;
      if (!Shape::kOwnSpill && ends) end(q, o, softmax, free);
      if (refill) {
        const bool prefetches = loader.issue(window, k_tile(free), v_tile(free));
        if (ahead < 0) ptx::wait_for_predecessor();
        if (prefetches) loader.prefetch_pages();
        if (kFetchesFirst && ahead < 0 && walk.left > 0) fetch_first_query(window, walk);
        ptx::cp_async_commit();
        if (ahead < Shape::kStages - 1) {
          free = ++ahead;
          continue;
        }
        refill = false;
      }
      if (Shape::kOwnSpill && ends) end(q, o, softmax, free);
      if (ends) at_hand = false;
      if (!at_hand) {
        if (walk.left <= 0) break;
        begin(window, walk, q, keys, ahead < Shape::kStages);
        ahead = Shape::kStages;
        o.clear();
        softmax.clear();
        tile = job().work.kv_begin, kv_end = job().work.kv_end;
        at_hand = true;
        if (tile == kv_end) continue;
      }
      ptx::cp_async_wait<Shape::kStages - 1>();
      split_sync();  // every lane's copies are there
      attend(keys, q, o, softmax, stage, tile * kTileKv + kv_split() * Shape::kSlice);
      split_sync();  // every lane has read them
      free = stage, refill = true;
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      ++tile;
    }
    ptx::cp_async_wait<0>();
  }

  // Merges the KV splits and stores the work's result. `free`: a stage that no copy is under way to.
  QUIRE_DEVICE void end(Query& q, Accumulator<kM, kVo>& o, SoftmaxRows<kM>& softmax, int free) const {
    softmax.reduce();
    DecodeEnding<V>{p_, smem_, free * Shape::kSlotBytes, warp_, lane_}.run(job(), o, softmax);
    reset(q, o, softmax);
  }

  // Also tells the compiler that merging partial results has these registers to itself.
  QUIRE_DEVICE static void reset(Query& q, Accumulator<kM, kVo>& o, SoftmaxRows<kM>& softmax) {
    q.clear();
    o.clear();
    softmax.clear();
  }

  // The queries of the CTA's first work, ahead of its keys: behind them they would arrive last (B 1, 2048 keys: 7.0
  // instead of 7.4 us; H200, 2026-11-21).
  QUIRE_DEVICE void fetch_first_query(TileWindow& window, const Walk& walk) const {
    using Q = typename V::Q;
    constexpr int kChunks = kQk / 8;  // of 16 bytes, in a row
    const DecodeWork job(p_, window.get(walk, lane_), walk.kv_head);
    const int row_begin = job.work.tile.row_begin, rows = min(kTileRows, job.row_end - row_begin);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += kThreads) {
      const DecodeWork::Place at = job.place(p_.group, row_begin + i / kChunks);
      const Q* src = static_cast<const Q*>(p_.q) + at.token * p_.q_token_stride + at.head * p_.q_head_stride;
      ptx::cp_async_16(ptx::smem_address(first_query()) + i * 16, src + i % kChunks * 8);
    }
  }

  QUIRE_DEVICE typename V::Q* first_query() const {
    return reinterpret_cast<typename V::Q*>(smem_ + Shape::kFirstQueryAt);
  }

  // The next work: its request, its queries, what they see.
  QUIRE_DEVICE void begin(TileWindow& window, Walk& walk, Query& q, Visible& keys, bool is_first) const {
    // Not sooner: CTAs that begin beside this one delay its first copies (B 1, 2048 keys: 7.1 instead of 7.5 us; H200,
    // 2026-11-21).
    if (is_first) ptx::launch_dependents();
    const bool is_fetched = kFetchesFirst && is_first;
    if (is_fetched) {
      ptx::cp_async_wait<Shape::kStages>();  // all but the keys
      __syncthreads();
    }
    DecodeWork next(p_, window.get(walk, lane_), walk.kv_head);
    q.shared =
        ptx::smem_address(smem_) + Shape::kQueryAt + warp_ % Shape::kSplitWarps * Shape::kQueryBytes + lane_ * 16;
    q.load(p_, next, row_begin(next), lane_, kv_split() == 0, is_fetched ? first_query() : nullptr);
    next.complete(p_, cut(), walk);
    __syncwarp();  // every lane is done with the job before
    if (lane_ == 0) job() = next;
    keys = visible(next);
    if constexpr (Shape::kQueryBytes > 0)
      __syncthreads();
    else
      __syncwarp();
  }

  QUIRE_DEVICE DecodeWork& job() const {
    static_assert(sizeof(DecodeWork) + sizeof(Cut) <= Shape::kJobBytes, "a job and what partitions have in common fit");
    return *reinterpret_cast<DecodeWork*>(smem_ + Shape::kJobsAt + warp_ * Shape::kJobBytes);
  }
  // Kept here, because another trip to memory would wait for all the keys that are under way.
  QUIRE_DEVICE Cut& cut() const { return *reinterpret_cast<Cut*>(&job() + 1); }
  // This warp's first packed row.
  QUIRE_DEVICE int row_begin(const DecodeWork& job) const {
    return job.work.tile.row_begin + warp_ % Shape::kSplitWarps * kM * 16;
  }

  QUIRE_DEVICE Visible visible(const DecodeWork& job) const {
    const auto mask = Mask<V::kMask, V::kWindow != 0>::of(p_, job.work.tile);
    const int begin = row_begin(job);
    if (begin >= job.row_end) return {mask, {0, 0}, {0, 0}};
    const int first = p_.group.div(begin), last = p_.group.div(min(begin + kM * 16, job.row_end) - 1);
    return {mask, mask.any(first, last), mask.all(first, last)};
  }

  // The KV split's keys [key, key + kSlice), which lie in `stage`.
  QUIRE_DEVICE void attend(const Visible& keys, const Query& q, Accumulator<kM, kVo>& o, SoftmaxRows<kM>& softmax,
                           int stage, int key) const {
    const BlockCursor<typename Shape::TileK, Quarters::kTopFirst> k(k_tile(stage), lane_);
    const BlockCursor<typename Shape::TileV> v(v_tile(stage), lane_);
#pragma unroll 1
    for (int b = 0; b < Shape::kSlice / kBlock; ++b, key += kBlock) {
      if (key >= keys.any.end || key + kBlock <= keys.any.begin) continue;
      Accumulator<kM, kBlock> s;
      mma_keys<T, typename V::Kv, kM, kBlock, kQk>(s, q, k, b, lane_);
      const float scale = apply_cap(s);
      if (!keys.all.covers({key, key + kBlock})) hide_keys(s, keys.mask, p_.group, row_begin(job()), key, lane_);
      softmax.raise_max(s, scale, o);
#pragma unroll
      for (int i = 0; i < kBlock / 16; ++i) {
        uint32_t weights[kM][4];
        softmax.template exponentiate<T>(s, scale, i, weights);
        mma_values<T, typename V::Kv>(o, weights, v, b * (kBlock / 16) + i, lane_);
      }
    }
  }

  // Logits before scaling become logits after the cap; returns the factor to a base-2 exponent that is left.
  QUIRE_DEVICE float apply_cap(Accumulator<kM, kBlock>& s) const {
    if constexpr (!V::kSoftCap) return logits_scale<V>(p_);
    const float scale = logits_scale<V>(p_) * (2.f * kLog2e);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kBlock / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s.at[m][n][i] = tanh_from_exp2(s.at[m][n][i] * scale);
      }
    }
    return p_.logits_cap;
  }
};

}  // namespace quire
