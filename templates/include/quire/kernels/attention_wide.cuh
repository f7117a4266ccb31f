// Attention of heads of 512 dims with the warp-wide matrix instruction: sm_80 and newer.
//
// The kernel is limited by memory for few rows, and by the tensor cores for many. A row of o has 512 columns, too many
// for the registers of a warp. The warps with the same rows therefore divide the keys of a tile for q k^T, and the
// columns of o for p v. Between the products the rounded weights p and the row maxima go through shared memory. With
// few rows there are more warps than blocks of 16 keys; these also divide the dims of q k^T, and its sums go through
// shared memory, too, because one warp alone would take longer than the memory.
// There are three or four barriers per KV tile. Keys and values have separate rings: a stage of keys is refilled as
// soon as the logits of the tile are computed, a stage of values in the next tile. 64 rows of queries leave only one
// stage of each, which suffices: keys are loaded during p v, and values during q k^T.
// The warps that have copied 8-bit keys and values convert them in shared memory, and rotate keys there: the bytes of a
// row are stored where the second half of its 16-bit numbers will be.
// Sources: FlashAttention-2 (Dao, 2023) for the loop, FlashMLA for dividing columns of o among warps.
#pragma once
#include "quire/ptx/math.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/tile/ampere/column_warps.cuh"
#include "quire/tile/ampere/kv_ring.cuh"
#include "quire/tile/ampere/rope.cuh"

namespace quire {

template <class V>
struct AttentionWide {
  using T = typename V::Q;
  using Kv = typename V::Kv;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv, kDims = 512;
  static constexpr bool kIsFp8 = sizeof(Kv) == 1, kHasRope = V::kPosEncoding == kPosEncodingRope;
  static_assert((kIsFp8 || is_same<T, Kv>::value) && is_same<T, typename V::O>::value,
                "q and o have one dtype, and so have k and v unless they have 8 bits");
  static_assert(V::kHeadDimQk == kDims && V::kHeadDimVo == kDims, "heads have 512 dims");
  static_assert(kTileRows == 16 || kTileRows == 64, "a tile has 16 or 64 rows");
  static_assert(kTileKv == 32 || kTileKv == 64, "a tile has 32 or 64 keys");

  static constexpr int kKeys = 16;  // of s that a warp computes
  using Warp = ColumnWarps<V, kKeys>;
  static constexpr int kWarps = Warp::kWarps, kThreads = Warp::kThreads, kMinCtas = 1;
  static constexpr int kM = Warp::kM, kColGroups = Warp::kColGroups, kCols = Warp::kCols, kKeyGroups = Warp::kKeyGroups;
  static constexpr int kDimGroups = kColGroups / kKeyGroups;  // warps of the same keys
  static_assert(kColGroups % kKeyGroups == 0, "each group of keys has equally many warps");

 private:
  using TileQ = SmemTile<kTileRows, kDims>;  // and o, at the end
  using TileKv = SmemTile<kTileKv, kDims>;   // of keys or of values
  using TileP = typename Warp::TileP;
  // The bytes of a TileKv of 8-bit numbers, as they are copied.
  struct ByteRows {
    static constexpr int kRows = kTileKv, kCols = kDims, kChunks = kDims / 16;
    uint32_t base;
    QUIRE_DEVICE uint32_t chunk(int row, int col) const {
      return base + row * TileKv::kRowBytes + kDims + ((col ^ (row & 7)) << 4);
    }
  };
  using CopiedKv = typename conditional<kIsFp8, ByteRows, TileKv>::type;
  // What warps of the same rows exchange: the maxima, and at the end the denominators, of their keys.
  struct Shared {
    CurrentWork current;
    typename Warp::OfRows of_rows;
    alignas(16) float sums[kDimGroups == 1 ? 1 : kWarps][2 * kM][32][4];  // of some dims, as fragments
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;
  static constexpr int kStageBytes = 2 * TileKv::kBytes;
  static constexpr int kMostTable = max(kThreads, 4 * kTileKv) * 16;  // of KvRows, for up to three stages
  static constexpr int kStages =
      min(3, (kMostSharedBytes - TileQ::kBytes - TileP::kBytes - kSharedBytes - kMostTable) / kStageBytes);
  static_assert(kStages >= 1, "a CTA fits");
  using Rows = KvRows<V, kThreads, kStages + 1>;

  static constexpr int kKeysAt = TileQ::kBytes, kValuesAt = kKeysAt + kStages * TileKv::kBytes;
  static constexpr int kWeightsAt = kValuesAt + kStages * TileKv::kBytes, kTableAt = kWeightsAt + TileP::kBytes;
  static constexpr int kSharedAt = kTableAt + Rows::kTableBytes;

 public:
  static constexpr int kSmemBytes = kSharedAt + kSharedBytes;
  static_assert(kSmemBytes <= kMostSharedBytes, "a CTA fits");

  QUIRE_DEVICE static void run(const AttentionParams& p, unsigned char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem + kSharedAt);
    shared.current.template for_each<false>(p, kTileKv, [&] { AttentionWide(p, shared, smem).attend(); });
  }

 private:
  const AttentionParams& p_;
  Shared& shared_;
  const WorkTile& work_;
  unsigned char* smem_;
  const Warp warp_;
  int thread_, lane_, keys_, dims_;  // keys_, dims_: this warp's groups of keys and dims of q k^T

  QUIRE_DEVICE AttentionWide(const AttentionParams& p, Shared& shared, unsigned char* smem)
      : p_(p),
        shared_(shared),
        work_(shared.current.work),
        smem_(smem),
        warp_(p, shared.current.work, shared.of_rows, {ptx::smem_address(smem) + kWeightsAt}),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        keys_(warp_.columns % kKeyGroups),
        dims_(warp_.columns / kKeyGroups) {}

  QUIRE_DEVICE uint32_t smem_at(int offset) const { return ptx::smem_address(smem_) + offset; }
  QUIRE_DEVICE TileKv keys(int i) const { return {smem_at(kKeysAt + i % kStages * TileKv::kBytes)}; }
  QUIRE_DEVICE TileKv values(int i) const { return {smem_at(kValuesAt + i % kStages * TileKv::kBytes)}; }

  QUIRE_DEVICE void attend() {
    const int kv_begin = work_.kv_begin, kv_end = work_.kv_end;
    Rows rows(p_, work_, smem_ + kTableAt, thread_);
    warp_.copy_q(TileQ{smem_at(0)}, p_.q, p_.q_token_stride, p_.q_head_stride);
    if constexpr (kHasRope) rotate_q();
    rows.begin(kv_begin);
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      copy<0>(rows, keys(kv_begin + i), kv_begin + i);
      if (i + 1 < kStages) copy<1>(rows, values(kv_begin + i), kv_begin + i);
    }
    KeyRange any, all;
    warp_.find_tiles(any, all);
    typename Warp::Output o;
    typename Warp::Softmax softmax;
    o.clear();
    softmax.clear();
#pragma unroll 1
    for (int i = kv_begin; i < kv_end; ++i) {
      ptx::cp_async_wait<2 * (kStages - 1)>();
      if constexpr (kIsFp8) widen(keys(i));
      if constexpr (kHasRope) rotate_keys(i);
      __syncthreads();  // keys of tile i are loaded, and the values of tile i - 1 are released
      copy<1>(rows, values(i + kStages - 1), i + kStages - 1);
      rows.prefetch_pages(i + kStages + 1);
      typename Warp::Scores s;
      const bool is_visible = any.contains(i);
      if (is_visible) multiply_keys(s, i);
      if constexpr (kDimGroups > 1) {
        __syncthreads();  // every warp has written its sums
        if (is_visible) add_sums(s);
      }
      if (is_visible) warp_.score(s, i * kTileKv + keys_ * kKeys, all.contains(i));
      __syncthreads();  // every warp has published its maxima, and the keys of tile i are released
      copy<0>(rows, keys(i + kStages), i + kStages);
      if (is_visible) warp_.raise_max(o, softmax);
      if (is_visible && warp_.publishes_maxima()) warp_.exponentiate(s, softmax);
      ptx::cp_async_wait<2 * kStages - 1>();
      if constexpr (kIsFp8) widen(values(i));
      rows.publish_offsets(i + kStages + 1);
      __syncthreads();  // weights and values of tile i are in shared memory
      if (is_visible) warp_.add_values(o, values(i));
    }
    warp_.finish(o, softmax, {smem_at(0)}, shared_.current.is_last);
  }

  // The sums over its dims of the warp with the same rows and group `columns` of columns.
  QUIRE_DEVICE float (*sums(int columns) const)[32][4] { return shared_.sums[thread_ / 32 - warp_.columns + columns]; }

  // Keys (kOf: 0) or values (1): one group of asynchronous copies.
  template <int kOf>
  QUIRE_DEVICE void copy(const Rows& rows, TileKv tile, int i) const {
    rows.template copy<kOf>(CopiedKv{tile.base}, i);
    ptx::cp_async_commit();
  }

  // Widens what this warp has copied of a tile, a chunk of each row a lane.
  QUIRE_DEVICE void widen(TileKv tile) const {
#pragma unroll
    for (int row = thread_ / 32; row < kTileKv; row += kWarps) {
      uint32_t x[4], wide[8];
      ptx::ld_shared_16(ByteRows{tile.base}.chunk(row, lane_), x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::widen(Kv{}, x[i], wide[2 * i], wide[2 * i + 1]);
        wide[2 * i] = ptx::widened_to(T{}, wide[2 * i]), wide[2 * i + 1] = ptx::widened_to(T{}, wide[2 * i + 1]);
      }
      __syncwarp();  // all have read the row before any overwrites it
      ptx::st_shared_16(tile.chunk(row, 2 * lane_), {wide[0], wide[1], wide[2], wide[3]});
      ptx::st_shared_16(tile.chunk(row, 2 * lane_ + 1), {wide[4], wide[5], wide[6], wide[7]});
    }
  }

  QUIRE_DEVICE void rotate_keys(int i) const {
    __syncthreads();
    rotate_tile<T, kThreads>(keys(i), p_.rope_frequencies, thread_, [&](int row) { return i * kTileKv + row; });
  }

  QUIRE_DEVICE void rotate_q() const {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int first = work_.tile.row_begin, diagonal = work_.tile.kv_len - work_.tile.qo_len;
    rotate_tile<T, kThreads>(TileQ{smem_at(0)}, p_.rope_frequencies, thread_,
                             [&](int row) { return p_.group.div(first + row) + diagonal; });
  }

  // s = q k^T of the warp's rows, keys and dims, which is also written to shared memory for the warps of the same keys.
  QUIRE_DEVICE void multiply_keys(typename Warp::Scores& s, int i) const {
    constexpr int kAtoms = kDims / 64 / kDimGroups;  // 128 bytes of a row each
    BlockCursor<TileQ> q({smem_at(0)}, lane_);
    BlockCursor<TileKv, Quarters::kTopFirst> k(keys(i), lane_);
    q.lane_base += warp_.rows * TileQ::kRowBytes + dims_ * kAtoms * 128;
    k.lane_base += keys_ * kKeys * TileKv::kRowBytes + dims_ * kAtoms * 128;
    s.clear();
#pragma unroll 2
    for (int atom = 0; atom < kAtoms; ++atom) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t x[kM][4], y[4];
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(x[m], q.at(m, j) + atom * 128);
        ptx::ldmatrix_x4(y, k.at(0, j) + atom * 128);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16(T{}, s.at[m][0], x[m], y[0], y[1]);
          ptx::mma_m16n8k16(T{}, s.at[m][1], x[m], y[2], y[3]);
        }
      }
    }
    if constexpr (kDimGroups > 1) {
#pragma unroll
      for (int n = 0; n < 2 * kM; ++n)
        *reinterpret_cast<float4*>(sums(warp_.columns)[n][lane_]) = *reinterpret_cast<float4*>(s.at[n / 2][n % 2]);
    }
  }

  // s of all dims, added up in the same order by each warp of the same keys.
  QUIRE_DEVICE void add_sums(typename Warp::Scores& s) const {
    s.clear();
#pragma unroll
    for (int g = 0; g < kDimGroups; ++g) {
#pragma unroll
      for (int n = 0; n < 2 * kM; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(sums(g * kKeyGroups + keys_)[n][lane_]);
        float (&to)[4] = s.at[n / 2][n % 2];
        to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
      }
    }
  }
};

}  // namespace quire
