// Attention with the warp-wide matrix instruction: sm_80 and newer, every head dim that is a multiple of 8.
//
// The kernel is limited by the tensor cores (mma.sync reaches some 62 % of the rate of wgmma on sm_90a), and almost as
// much by shared memory. A warp reads all of K and V of a tile, so it has 32 rows where registers allow: each block
// that ldmatrix loads then serves two instructions.
// Schedule: each warp has its own rows and never waits for the softmax of another. There is one barrier per KV tile.
// Tile i + 1 is loaded while tile i is computed, and two or more CTAs per SM fill each other's gaps. Only tiles at the
// border of a mask apply the mask, and warps skip tiles of which their rows see nothing.
// Sources: FlashAttention-2 (Dao, 2023) for the loop, FlashAttention-4 for rescaling only when the maximum has grown.
#pragma once
#include "quire/core/schedule.h"
#include "quire/ptx/warp.cuh"
#include "quire/tile/shared/cascade_merge.cuh"
#include "quire/tile/ampere/fragments.cuh"
#include "quire/tile/ampere/kv_ring.cuh"
#include "quire/tile/shared/logits.cuh"
#include "quire/tile/shared/partial.cuh"
#include "quire/tile/ampere/rope.cuh"
#include "quire/tile/shared/softmax.cuh"
#include "quire/tile/shared/stamps.h"

namespace quire {

// The order of the instructions of one KV tile, where the algorithm leaves a choice.
struct InstructionOrder {
  int keys_after;      // the step of o += p v after which the copies for the next KV tile start
  int values_at_once;  // blocks of v that ptxas may load ahead of their use; 0: those of a whole step
  bool end_late;       // the test for the last KV tile comes in the last step, not before the first
};

// Chooses an order for each variant so that none spills. A warp with 32 rows keeps 192 registers of o and s; ptxas
// fills the other 63 with fragments that it loads ahead, and exceeds them by one or two. Only the order differs:
// results are the same, bit for bit. After a change of the main loop, check "spills" in the manifests of variants.
template <class V>
constexpr InstructionOrder instruction_order() {
  constexpr int kQk = whole_blocks(V::kHeadDimQk), kVo = whole_blocks(V::kHeadDimVo);
  // From sm_100 on ptxas takes more registers, of which heads of 256 leave none: copies of pages go first.
  constexpr bool kIsFull = ptx::kFromSm100 && kVo > 192 && V::kPaged != 0;
  constexpr InstructionOrder kUsual = {V::kTileKv < 64 || kIsFull ? 0 : 1, 0, false};
  if constexpr (V::kTileRows < 128) return kUsual;
  // With 128 logits a row and page offsets ptxas lacks two registers: copies start a step earlier than usual.
  if constexpr (kQk <= 64 && V::kPaged != 0) return {0, 0, false};
  if constexpr (kVo != 128) return kUsual;
  if constexpr (kQk == 128) {
    // Before sm_90 ptxas wants up to ten registers more: copies wait until most of s is used, and v is loaded two
    // blocks at a time. With pages, and a mask of bits or a window alone, copies come first instead.
    constexpr bool kBits = V::kMask == kMaskCustom || V::kMask == kMaskTree;
    constexpr bool kEarly = V::kPaged != 0 && (kBits || (V::kMask == kMaskNone && V::kWindow != 0));
    if constexpr (ptx::kBeforeSm90) return kEarly ? InstructionOrder{0, 4, true} : InstructionOrder{2, 2, true};
    if constexpr (V::kPosEncoding != 0) return {2, 0, true};
    // With a custom mask, a cap, or ragged keys without any mask: copies wait until most of s is used, and v is loaded
    // four blocks at a time.
    constexpr bool kCustom = V::kMask == kMaskCustom, kCap = V::kSoftCap != 0;
    constexpr bool kAll = V::kMask == kMaskNone && V::kWindow == 0;
    if constexpr (V::kPaged == 0 ? kCap || kCustom || kAll : kCap && kCustom) return {2, 4, false};
  }
  if constexpr (kQk == 192 && V::kPaged != 0) {
    // There is one stage, so only k is copied here. Each generation needs another order.
    if constexpr (ptx::kBeforeSm90) return {2, 0, false};
    return {1, 0, true};
  }
  return kUsual;
}

template <class V>
struct AttentionFa2 {
  using Q = typename V::Q;
  using Kv = typename V::Kv;
  static constexpr int kKvBits = kBitsOf<Kv>;
  static constexpr bool kIsNarrow = kKvBits < 16;              // keys and values are widened to fp16
  using T = typename conditional<kIsNarrow, fp16_t, Q>::type;  // of the matrix products
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = whole_blocks(V::kHeadDimQk), kVo = whole_blocks(V::kHeadDimVo), kHeadDim = max(kQk, kVo);

  static_assert((kIsNarrow || is_same<Q, Kv>::value) && is_same<Q, typename V::O>::value,
                "q and o have one dtype, and so have k and v unless they have 8 bits or 4");
  static_assert(V::kHeadDimQk % 8 == 0 && V::kHeadDimVo % 8 == 0 && kHeadDim <= 256,
                "head dims are multiples of 8 up to 256");
  static_assert((!kIsNarrow && V::kPosEncoding != kPosEncodingRope) || (kQk == V::kHeadDimQk && kVo == V::kHeadDimVo),
                "narrow and rotated heads are whole blocks");
  static_assert(kKvBits != 4 || V::kPosEncoding != kPosEncodingRope, "4-bit keys are not rotated");
  static_assert(kTileRows == 16 || kTileRows == 64 || (kTileRows == 128 && kVo <= 128),
                "a tile has 16, 64 or, while 32 rows of o fit a warp's registers, 128 rows");
  static_assert(kTileKv % 16 == 0, "key tiles are made of blocks of 16");

  static constexpr int kM = kTileRows == 128 ? 2 : 1;  // blocks of 16 rows a warp
  static constexpr int kWarpRows = kM * 16;
  static constexpr int kWarps = kTileRows / kWarpRows;  // that own rows
  // One warp cannot both copy and compute as fast as memory delivers, so other warps only copy (few of them if o leaves
  // them no registers).
  static constexpr int kThreads = max(kWarps, kVo <= 128 ? 4 : 2) * 32;
  // Two tiles of k and v in flight where 99 KB of shared memory (sm_86, sm_89, sm_120) hold them, else one.
  static constexpr int kStages = kHeadDim <= 128 ? 2 : 1;

 private:
  using TileQ = SmemTile<kWarpRows, kQk>;  // of one warp
  using TileO = SmemTile<kWarpRows, kVo>;  // takes its place at the end
  using TileK = KvTile<kTileKv, kQk, kKvBits>;
  using TileV = KvTile<kTileKv, kVo, kKvBits>;
  using CursorQ = BlockCursor<TileQ>;
  static constexpr bool kHasRope = V::kPosEncoding == kPosEncodingRope;
  using Query = QueryFragments<Q, kKvBits, kM, kQk, 0, kHasRope>;  // in place of TileQ, for narrow keys
  using CursorK = KvCursor<TileK, kKvBits, Quarters::kTopFirst>;
  using CursorV = KvCursor<TileV, kKvBits>;
  // With few rows, memory is the limit: k and v are each refilled as soon as they have been read. With many rows, k and
  // v are refilled together, with one barrier per tile.
  static constexpr bool kEager = kM == 1 && kStages == 2;
  static constexpr int kTableStages = kEager ? 3 : 2;
  using Rows = KvRows<V, kThreads, kTableStages>;

  static constexpr int kSteps = kTileKv / 16;  // of o += p v
  static constexpr InstructionOrder kOrder = instruction_order<V>();
  static_assert(kOrder.keys_after + 1 < kSteps, "the next tile's copies start within the steps");

  static constexpr int kWarpBytes = max(TileQ::kBytes, TileO::kBytes);
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;
  static constexpr int kRingAt = kWarps * kWarpBytes;
  static constexpr int kTableAt = kRingAt + kStages * kStageBytes;
  static constexpr int kCurrentAt = kTableAt + Rows::kTableBytes;

  // KV tiles that some row of a warp sees, and those that all its rows see in full. In shared memory, too.
  struct WarpTiles {
    KeyRange any, all;
  };
  static constexpr int kWarpTilesAt = kCurrentAt + static_cast<int>(sizeof(CurrentWork));
  static_assert(sizeof(WarpTiles) == 16, "a place in shared memory");

 public:
  static constexpr int kSmemBytes = kWarpTilesAt + 64;
  static constexpr bool kThreeCtas = kTileRows == 16 && !ptx::kFromSm100 && (kKvBits != 4 || kHeadDim > 64);
  static constexpr int kMinCtas = kThreeCtas ? 3 : 2;
  static_assert(kSmemBytes <= 99 * 1024, "a CTA fits every GPU from sm_80 on");

  QUIRE_DEVICE static void run(const AttentionScaledParams& p, unsigned char* smem) { run(p.base, smem); }
  QUIRE_DEVICE static void run(const AttentionParams& p, unsigned char* smem) {
    CurrentWork& current = *reinterpret_cast<CurrentWork*>(smem + kCurrentAt);
    current.for_each<V::kCascade != 0>(p, kTileKv, [&] {
      stamp<V>(p, current.work, Moment::kBegin, threadIdx.x == 0);
      AttentionFa2(p, current, smem).attend();
      stamp<V>(p, current.work, Moment::kEnd, threadIdx.x == 0);
    });
  }

 private:
  const AttentionParams& p_;
  CurrentWork& current_;
  const WorkTile& work_;
  unsigned char* smem_;
  int thread_, lane_;

  QUIRE_DEVICE AttentionFa2(const AttentionParams& p, CurrentWork& current, unsigned char* smem)
      : p_(p), current_(current), work_(current.work), smem_(smem), thread_(threadIdx.x), lane_(threadIdx.x % 32) {}

  QUIRE_DEVICE uint32_t smem_at(int offset) const { return ptx::smem_address(smem_) + offset; }
  QUIRE_DEVICE uint32_t warp_at() const { return smem_at(thread_ / 32 * kWarpBytes); }
  QUIRE_DEVICE TileK k_tile(int i) const { return {smem_at(kRingAt + i % kStages * kStageBytes)}; }
  QUIRE_DEVICE TileV v_tile(int i) const { return {smem_at(kRingAt + i % kStages * kStageBytes + TileK::kBytes)}; }
  QUIRE_DEVICE WarpTiles& warp_tiles() const {
    return *reinterpret_cast<WarpTiles*>(smem_ + kWarpTilesAt + thread_ / 32 * 16);
  }
  // This warp's first packed row.
  QUIRE_DEVICE int row_begin() const { return work_.tile.row_begin + thread_ / 32 * kWarpRows; }
  QUIRE_DEVICE bool owns_rows() const {
    if constexpr (kThreads == kWarps * 32) return true;
    return thread_ < kWarps * 32;
  }
  QUIRE_DEVICE Mask<V::kMask, V::kWindow != 0> mask() const {
    return Mask<V::kMask, V::kWindow != 0>::of(p_, work_.tile);
  }

  QUIRE_DEVICE LogitsTile<V> logits_tile(int i) const {
    return {mask(), p_.group, work_.tile.request, work_.kv_head, row_begin() + lane_ / 4, i * kTileKv, lane_};
  }

  QUIRE_DEVICE void attend() {
    const int kv_begin = work_.kv_begin;
    Rows rows(p_, work_, smem_ + kTableAt, thread_);
    Query query;
    load_q(query);
    if constexpr (kHasRope) ptx::cp_async_commit();  // a separate group
    rows.begin(kv_begin);
    copy_keys(rows, kv_begin);
    if constexpr (kStages == 2) copy_values(rows, kv_begin);
    if constexpr (kEager) copy_keys(rows, kv_begin + 1), copy_values(rows, kv_begin + 1);
    if constexpr (kHasRope && !kIsNarrow) {
      ptx::cp_async_wait<kEager ? 4 : kStages>();
      rotate_q();
    }

    Accumulator<kM, kVo> o;
    SoftmaxRows<kM> softmax;
    o.clear();
    softmax.clear();

    if (lane_ == 0) warp_tiles() = find_tiles();
    __syncwarp();

    bool more = kv_begin < work_.kv_end;
#pragma unroll 1
    for (int i = kv_begin; more; ++i) {
      // Read before the barrier: after it, the code would wait for each read from shared memory.
      const WarpTiles tiles = warp_tiles();
      bool is_visible = tiles.any.contains(i), is_unmasked = tiles.all.contains(i);
      if constexpr (V::kScoreMask != 0) {
        const ExpressionOf<V> expression(p_);
        const int unit = work_.tile.work_begin + i - work_.tile.kv_begin;
        is_visible = is_visible && block_is_visible<V>(expression, work_.kv_head, unit);
        is_unmasked = is_unmasked && block_is_full<V>(expression, work_.kv_head, unit);
      }
      if constexpr (!kOrder.end_late) more = i + 1 < work_.kv_end;
      ptx::cp_async_wait<kEager ? 3 : 0>();
      __syncthreads();  // k of tile i is loaded (with two stages v too), and every warp is done with tile i - 1
      if constexpr (kStages == 1) copy_values(rows, i);
      if constexpr (kHasRope && !kIsNarrow) {
        rotate_tile<T, kThreads>(k_tile(i), p_.rope_frequencies, thread_, [&](int row) { return i * kTileKv + row; });
        __syncthreads();  // k of tile i is rotated
      }
      Accumulator<kM, kTileKv> s;
      // Compute S = Q K^T.
      if (is_visible) {
        const CursorK k(k_tile(i), lane_);
        if constexpr (kIsNarrow && kHasRope) {  // rotated 8-bit keys have no space in memory, so each warp rotates them
          KeyRotations rotations{p_.rope_frequencies, nullptr};
          mma_rotated_keys<T, Kv, kM, kTileKv, kQk>(s, query, k_tile(i), 0, lane_, i * kTileKv, rotations);
        } else if constexpr (kIsNarrow) {
          mma_keys<T, Kv, kM, kTileKv, kQk>(s, query, k, 0, lane_);
        } else {
          mma_ABt<T>(s, CursorQ({warp_at()}, lane_), k);
        }
      }
      if constexpr (kEager) {
        __syncthreads();  // release K: every warp is done with k of tile i
        copy_keys(rows, i + 2);
        ptx::cp_async_wait<3>();
      }
      if constexpr (kStages == 1) ptx::cp_async_wait<0>();
      if constexpr (kEager || kStages == 1) __syncthreads();  // v of tile i is loaded, and k is released
      if (is_visible) {
        // Transform and mask S, and rescale O if a maximum has grown.
        const LogitsTransform<V, FragmentMath<false>> transform(p_);
        const float scale = transform.factor;
        if (is_unmasked) {
          score_logits<false>(s, transform, logits_tile(i));
        } else {
          score_logits<true>(s, transform, logits_tile(i));
        }
        softmax.raise_max(s, scale, o);
        // Compute O += P V, 16 keys at a time, and start the copies of the next KV tile meanwhile.
        const CursorV v(v_tile(i), lane_);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t weights[kM][4];
          softmax.template exponentiate<T>(s, scale, k, weights);
          mma_values<T, Kv, kOrder.values_at_once>(o, weights, v, k, lane_);
          if (kOrder.end_late && k == kSteps - 1) more = i + 1 < work_.kv_end;
          // Copies have no branch: here they hide among matrix instructions, and s begins to free registers for them.
          if (k == 0) rows.prefetch_pages(i + kTableStages);
          if (k == kOrder.keys_after && !kEager) copy_keys(rows, i + 1);
          if (k == kOrder.keys_after + 1 && kStages == 2 && !kEager) copy_values(rows, i + 1);
        }
      } else {
        if constexpr (kOrder.end_late) more = i + 1 < work_.kv_end;
        rows.prefetch_pages(i + kTableStages);
        if constexpr (!kEager) copy_keys(rows, i + 1);
        if constexpr (kStages == 2 && !kEager) copy_values(rows, i + 1);
      }
      if constexpr (kEager) {
        __syncthreads();  // release V: every warp is done with v of tile i
        copy_values(rows, i + 2);
      }
      rows.publish_offsets(i + kTableStages);
    }
    ptx::cp_async_wait<0>();
    softmax.reduce();
    if constexpr (V::kCascade != 0) {
      store_partial(o, softmax);
      merge_cascade<V, kThreads / 32>(p_, work_, current_.work.group, thread_, [] { __syncthreads(); });
    } else if (work_.is_whole()) {
      store(o, softmax);
    } else {
      const MergeGroup group = p_.groups[work_.group];
      store_partial(o, softmax);
      if (arrives_last(p_.groups + work_.group, group.num_parts(), thread_ == 0, current_.is_last,
                       [] { __syncthreads(); })) {
        call_merge_partials<V, kThreads / 32>(p_, work_, group, thread_);
      }
    }
  }

  // Each is one group of asynchronous copies.
  QUIRE_DEVICE void copy_keys(const Rows& rows, int i) const {
    rows.template copy<0>(k_tile(i), i);
    ptx::cp_async_commit();
  }
  QUIRE_DEVICE void copy_values(const Rows& rows, int i) const {
    rows.template copy<1>(v_tile(i), i);
    ptx::cp_async_commit();
  }

  QUIRE_DEVICE WarpTiles find_tiles() const {
    WarpTiles tiles = {{0, 0}, {0, 0}};
    if (row_begin() >= work_.row_end) return tiles;
    if constexpr (kThreads > kWarps * 32) {
      if (!owns_rows()) return tiles;
    }
    const auto mask = this->mask();
    const int first = p_.group.div(row_begin()), last = p_.group.div(min(row_begin() + kWarpRows, work_.row_end) - 1);
    const KeyRange any = mask.any(first, last), all = mask.all(first, last);
    tiles.any = {any.begin / kTileKv, ceil_div(any.end, kTileKv)};
    if constexpr (V::kMask != kMaskCustom) tiles.all = {ceil_div(all.begin, kTileKv), all.end / kTileKv};
    return tiles;
  }

  // Each warp copies its own rows of q. Missing rows become zeros.
  QUIRE_DEVICE void load_q(Query& query) const {
    if constexpr (kThreads > kWarps * 32) {
      if (!owns_rows()) return;
    }
    if constexpr (kIsNarrow) {
      query.shared = warp_at() + lane_ * 16;
      query.load(p_, work_, row_begin(), lane_, true, nullptr);
      return;
    }
    using Split = RowSplit<32, TileQ::kChunks>;
    const Split split(lane_);
    const TileQ tile = {warp_at()};
#pragma unroll 4
    for (int r = split.row; r < kWarpRows; r += Split::kRowsAtOnce) {
      const int row = row_begin() + r;
      const WorkTile::Place at = work_.place(p_.group, min(row, work_.row_end - 1));
      const Q* src = static_cast<const Q*>(p_.q) + at.token * p_.q_token_stride + at.head * p_.q_head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(tile.chunk(r, chunk), src + chunk * 8,
                         row < work_.row_end && (kQk == V::kHeadDimQk || chunk < V::kHeadDimQk / 8) ? 16 : 0);
      }
    }
  }

  // Each warp stores its own rows.
  QUIRE_DEVICE void rotate_q() const {
    if constexpr (kThreads > kWarps * 32) {
      if (!owns_rows()) return;
    }
    __syncwarp();
    const int diagonal = work_.tile.kv_len - work_.tile.qo_len;
    rotate_tile<T, 32>(TileQ{warp_at()}, p_.rope_frequencies, lane_,
                       [&](int row) { return p_.group.div(row_begin() + row) + diagonal; });
    __syncwarp();
  }

  // How many pairs of columns of o a lane has one beside the other.
  static constexpr int kWidth = 16 / kKvBits;

  // Two neighbouring columns of o: pair n of those that a lane has of row h of block m. Column 8 n + 2 c is the first
  // for lane c of a quad, or, where keys and values have 8 bits, 16 (n / 2) + 4 c + 2 (n % 2), or, where they have 4,
  // 32 (n / 4) + 8 c + 2 (n % 4): see tile/ampere/fragments.cuh.
  QUIRE_DEVICE static float2 columns(const Accumulator<kM, kVo>& o, int m, int h, int n) {
    if constexpr (kKvBits == 4) {
      const float4 x = nvfp4_columns(o, m, h, n / 4, n / 2 % 2);
      return n % 2 == 0 ? float2{x.x, x.y} : float2{x.z, x.w};
    }
    if constexpr (kKvBits == 8) return {o.at[m][n / 2 * 2][2 * h + n % 2], o.at[m][n / 2 * 2 + 1][2 * h + n % 2]};
    return {o.at[m][n][2 * h], o.at[m][n][2 * h + 1]};
  }

  // o and lse of a whole tile: rounded, gathered in the warp's shared memory (q is done with), stored in rows.
  QUIRE_DEVICE void store(Accumulator<kM, kVo>& o, const SoftmaxRows<kM>& softmax) const {
    if constexpr (kThreads > kWarps * 32) {
      if (!owns_rows()) return;
    }
    const TileO tile = {warp_at()};
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = m * 16 + h * 8 + lane_ / 4, row = row_begin() + r;
        const WorkTile::Place at = work_.place(p_.group, min(row, work_.row_end - 1));
        const RowResult result = finish_row(p_, at.head, softmax.m[m][h], softmax.d[m][h]);
#pragma unroll
        for (int n = 0; n < kVo / 8; ++n) {
          const float2 x = columns(o, m, h, n);
          const int chunk = n / kWidth * kWidth + lane_ % 4 * kWidth / 4,
                    byte = lane_ % (4 / kWidth) * (4 * kWidth) + n % kWidth * 4;
          ptx::st_shared(tile.chunk(r, chunk) + byte, ptx::pack(Q{}, x.x * result.scale, x.y * result.scale));
        }
        if (p_.lse != nullptr && lane_ % 4 == 0 && row < work_.row_end) store_lse<V>(p_, work_.tile, at, result.lse);
      }
    }
    __syncwarp();
    store_rows(tile);
  }

  QUIRE_DEVICE void store_rows(TileO tile) const {
    using Split = RowSplit<32, TileO::kChunks>;
    const Split split(ptx::lane_id());
#pragma unroll 4
    for (int r = split.row; r < kWarpRows; r += Split::kRowsAtOnce) {
      if (row_begin() + r >= work_.row_end) break;
      const WorkTile::Place at = work_.place(p_.group, row_begin() + r);
      Q* dst = static_cast<Q*>(p_.o) + at.token * p_.o_token_stride + at.head * p_.o_head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        if (kVo != V::kHeadDimVo && chunk >= V::kHeadDimVo / 8) continue;
        *reinterpret_cast<uint4*>(dst + chunk * 8) = ptx::ld_shared_16(tile.chunk(r, chunk));
      }
    }
  }

  // Rows of partial_o [num_partials, kTileRows, head_dim_vo] and partial_md [num_partials, kTileRows, 2] that exist.
  QUIRE_DEVICE void store_partial(const Accumulator<kM, kVo>& o, const SoftmaxRows<kM>& softmax) const {
    if constexpr (kThreads > kWarps * 32) {
      if (!owns_rows()) return;
    }
    const int64_t partial_row = work_.partial_row<V>();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_begin() + m * 16 + h * 8 + lane_ / 4;
        if (row >= work_.row_end) continue;
        const int64_t at = partial_row + row - work_.tile.row_begin;
        float2* dst = reinterpret_cast<float2*>(p_.partial_o + at * V::kHeadDimVo) + kWidth * (lane_ % 4);
#pragma unroll
        for (int n = 0; n < V::kHeadDimVo / 8; ++n) dst[n / kWidth * (4 * kWidth) + n % kWidth] = columns(o, m, h, n);
        if (lane_ % 4 == 0) reinterpret_cast<float2*>(p_.partial_md)[at] = {softmax.m[m][h], softmax.d[m][h]};
      }
    }
  }
};

}  // namespace quire
