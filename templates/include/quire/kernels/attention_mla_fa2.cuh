// Multi-head latent attention with the warp-wide matrix instruction: sm_80 and newer.
//
// All query heads share one KV head with keys [ckv, kpe] of 512 + 64 dims, and ckv is also the value: a KV tile is
// copied once and read by both products. The kernel is limited by memory for few rows, by the tensor cores for many,
// and almost as much by shared memory.
// A row of o has 512 columns, too many for the registers of a warp. The warps with the same 16 rows therefore divide
// the keys of a tile for q k^T, and the columns of o for p v. Between the products the rounded weights p and the row
// maxima go through shared memory. This takes three barriers per tile, while the next tiles are in flight.
// 8-bit latents are converted, exactly, from the ring into one tile of 16 bits, once for all warps. If they have scales
// (kTileScales), they are multiplied by these in float32 and rounded once, as in FlashMLA.
#pragma once
#include "quire/core/convert.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/math.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/tile/ampere/column_warps.cuh"
#include "quire/tile/ampere/kv_ring.cuh"

namespace quire {

// The columns of a tile from chunk kFirst on, as a tile that is copied into.
template <class Tile, int kFirst, int kCols_>
struct TileColumns {
  static constexpr int kRows = Tile::kRows, kCols = kCols_, kChunks = kCols / (Tile::kCols / Tile::kChunks);

  Tile tile;

  QUIRE_DEVICE uint32_t chunk(int row, int col) const { return tile.chunk(row, col + kFirst); }
};

// Copies tokens of latents with scales into a tile of rows [ckv, scales, kpe], of bytes. As with KvRows one thread
// reads a token's page number ahead for all, and tokens from kv_len on become zeros and are never read.
template <class V, int kThreads, int kTiles>
class ScaledRows {
  struct Token {
    int page, in_page;  // page: -1: no such token
  };

 public:
  static constexpr int kTableBytes = kTiles * V::kTileKv * static_cast<int>(sizeof(Token));

  QUIRE_DEVICE ScaledRows(const AttentionMlaParams& p, const WorkTile& work, unsigned char* table, int thread)
      : mla_(p), p_(p.base), work_(work), table_(reinterpret_cast<Token*>(table)), thread_(thread) {}

  QUIRE_DEVICE void begin(int tile) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) prefetch_pages(tile + i), publish_offsets(tile + i);
    __syncthreads();
  }

  QUIRE_DEVICE void prefetch_pages(int tile) {
    const int token = tile * V::kTileKv + thread_;
    page_ = -1;
    if (thread_ < V::kTileKv && token < work_.kv_limit) page_ = p_.kv_indices[work_.tile.kv_first + p_.page.div(token)];
  }

  QUIRE_DEVICE void publish_offsets(int tile) {
    if (thread_ >= V::kTileKv) return;
    const CachePlace at = cache_place(mla_, page_, p_.page.mod(tile * V::kTileKv + thread_));
    table_[tile % kTiles * V::kTileKv + thread_] = {page_ < 0 ? -1 : at.page, at.row};
  }

  template <class Tile>
  QUIRE_DEVICE void copy(Tile dst, int tile) const {
    constexpr int kCkv = V::kHeadDimVo, kScales = kCkv / kTileDims * 4, kKpe = 2 * (V::kHeadDimQk - kCkv);  // bytes
    copy(TileColumns<Tile, 0, kCkv>{dst}, tile, p_.v, p_.v_page_stride, p_.v_token_stride);
    copy(TileColumns<Tile, kCkv / 16, kScales>{dst}, tile, mla_.ckv_scales, 4 * mla_.ckv_scales_page_stride,
         4 * mla_.ckv_scales_token_stride);
    copy(TileColumns<Tile, (kCkv + kScales) / 16, kKpe>{dst}, tile, p_.k, 2 * p_.k_page_stride, 2 * p_.k_token_stride);
  }

 private:
  // Strides are in bytes.
  template <class Columns>
  QUIRE_DEVICE void copy(Columns dst, int tile, const void* src, int64_t page_stride, int64_t token_stride) const {
    const Token* table = table_ + tile % kTiles * V::kTileKv;
    const RowSplit<kThreads, Columns::kChunks> split(thread_);
    for_each_chunk<kThreads, Columns>(thread_, [&](int row, int chunk, int offset) {
      const Token token = table[split.row + row];
      const char* from = static_cast<const char*>(src) + token.page * page_stride + token.in_page * token_stride;
      ptx::cp_async_16(dst.chunk(split.row + row, chunk), from + split.lane * 16 + offset, token.page >= 0 ? 16 : 0);
    });
  }

  const AttentionMlaParams& mla_;
  const AttentionParams& p_;
  const WorkTile& work_;
  Token* table_;
  int thread_, page_;
};

template <class V>
struct AttentionMlaFa2 {
  using T = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv;
  static constexpr int kQk = V::kHeadDimQk, kVo = V::kHeadDimVo, kKpe = kQk - kVo;
  using Kv = typename V::Kv;
  static constexpr bool kIsFp8 = sizeof(Kv) == 1, kScaled = V::kTileScales != 0;
  static_assert((kIsFp8 || is_same<T, Kv>::value) && is_same<T, typename V::O>::value,
                "q and o have one number type, and so have latents unless they have 8 bits");
  static_assert(kQk == 576 && kVo == 512, "512 dims of a latent and 64 more");
  static_assert(kTileRows == 16 || kTileRows == 32 || kTileRows == 64, "a tile has 16, 32 or 64 rows");

  static constexpr int kColGroups = kTileRows == 64 ? 4 : 8 / (kTileRows / 16);
  using Warp = ColumnWarps<V, max(16, kTileKv / kColGroups)>;
  static constexpr int kWarps = Warp::kWarps, kThreads = Warp::kThreads, kMinCtas = 1;
  static constexpr int kM = Warp::kM, kCols = Warp::kCols, kKeys = Warp::kKeys;  // of s that a warp computes

 private:
  using TileQ = SmemTile<kTileRows, kQk>;
  using TileKv = SmemTile<kTileKv, kQk>;
  using TileP = typename Warp::TileP;
  // As the cache has it. With scales these are bytes, of ckv, the scales, and kpe in 16 bits.
  static constexpr int kScaleChunk = kVo / 16, kKpeChunk = kScaleChunk + kVo / kTileDims / 4;
  static constexpr int kRingCols = kScaled ? 16 * kKpeChunk + 2 * kKpe : kQk;
  using TileRing = SmemTile<kTileKv, kRingCols, 8 * static_cast<int>(sizeof(Kv))>;
  using Ckv = TileColumns<TileRing, 0, kVo>;
  using Kpe = TileColumns<TileRing, kVo* static_cast<int>(sizeof(Kv)) / 16, kKpe>;
  using CursorQ = BlockCursor<TileQ>;
  using CursorK = BlockCursor<TileKv, Quarters::kTopFirst>;
  static_assert(TileKv::kSwizzled, "columns begin at a multiple of 128 bytes");

  // What warps of the same rows exchange: the maxima, and at the end the denominators, of their keys.
  struct Shared {
    CurrentWork current;
    typename Warp::OfRows of_rows;
  };
  static constexpr int kOffsetBytes = kTileKv * 16;  // of a tile's tokens
  static constexpr int kWideBytes = kIsFp8 ? TileKv::kBytes : 0;
  static constexpr int kFixedBytes = TileQ::kBytes + kWideBytes + TileP::kBytes + round_up(sizeof(Shared), 16);
  static constexpr int kStages =
      max(1, min(4, (kMostSharedBytes - kFixedBytes - kOffsetBytes) / (TileRing::kBytes + kOffsetBytes)));
  static constexpr int kTableStages = kStages + (kIsFp8 || kStages == 1 ? 1 : 0);
  using Rows =
      typename conditional<kScaled, ScaledRows<V, kThreads, kTableStages>, KvRows<V, kThreads, kTableStages>>::type;

  static constexpr int kWideAt = TileQ::kBytes, kRingAt = kWideAt + kWideBytes;
  static constexpr int kWeightsAt = kRingAt + kStages * TileRing::kBytes;
  static constexpr int kTableAt = kWeightsAt + TileP::kBytes;
  static constexpr int kSharedAt = kTableAt + Rows::kTableBytes;

 public:
  static constexpr int kSmemBytes = kSharedAt + round_up(sizeof(Shared), 16);
  static_assert(kSmemBytes <= kMostSharedBytes, "a CTA fits");

  QUIRE_DEVICE static void run(const AttentionMlaParams& p, unsigned char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem + kSharedAt);
    shared.current.template for_each<false>(p.base, kTileKv, [&] { AttentionMlaFa2(p, shared, smem).attend(); });
  }

 private:
  const AttentionMlaParams& mla_;
  const AttentionParams& p_;
  Shared& shared_;
  const WorkTile& work_;
  unsigned char* smem_;
  const Warp warp_;
  int thread_, lane_;

  QUIRE_DEVICE AttentionMlaFa2(const AttentionMlaParams& p, Shared& shared, unsigned char* smem)
      : mla_(p),
        p_(p.base),
        shared_(shared),
        work_(shared.current.work),
        smem_(smem),
        warp_(p.base, shared.current.work, shared.of_rows, {ptx::smem_address(smem) + kWeightsAt}),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32) {}

  QUIRE_DEVICE uint32_t smem_at(int offset) const { return ptx::smem_address(smem_) + offset; }
  QUIRE_DEVICE TileRing ring_tile(int i) const { return {smem_at(kRingAt + i % kStages * TileRing::kBytes)}; }
  QUIRE_DEVICE TileKv kv_tile(int i) const { return {kIsFp8 ? smem_at(kWideAt) : ring_tile(i).base}; }

  QUIRE_DEVICE void attend() {
    const int kv_begin = work_.kv_begin, kv_end = work_.kv_end;
    Rows rows(row_params(), work_, smem_ + kTableAt, thread_);
    load_q();
    rows.begin(kv_begin);
    constexpr int kAhead = kIsFp8 ? kStages : max(1, kStages - 1);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy(rows, kv_begin + i);
    KeyRange any, all;
    warp_.find_tiles(any, all);
    typename Warp::Output o;
    typename Warp::Softmax softmax;
    o.clear();
    softmax.clear();
#pragma unroll 1
    for (int i = kv_begin; i < kv_end; ++i) {
      ptx::cp_async_wait<kAhead - 1>();
      __syncthreads();  // tile i is loaded, and tile i - 1 is released
      if constexpr (kIsFp8) {
        if constexpr (kScaled) {
          multiply_by_scales(ring_tile(i), kv_tile(i));
        } else {
          widen(ring_tile(i), kv_tile(i));
        }
        __syncthreads();  // tile i is widened
      }
      if constexpr (kIsFp8 || kStages > 1) copy(rows, i + kAhead);
      rows.prefetch_pages(i + kTableStages);
      typename Warp::Scores s;
      const bool is_visible = any.contains(i), attends = is_visible && warp_.publishes_maxima();
      if (attends) score(s, i, all.contains(i));
      sync_rows();  // every warp of these rows has published its maxima
      if (is_visible) warp_.raise_max(o, softmax);
      if (attends) warp_.exponentiate(s, softmax);
      rows.publish_offsets(i + kTableStages);
      sync_rows();  // every warp of these rows has written its weights
      if (is_visible) warp_.add_values(o, kv_tile(i));
      if constexpr (!kIsFp8 && kStages == 1) {
        __syncthreads();  // tile i is released
        copy(rows, i + 1);
      }
    }
    warp_.finish(o, softmax, {smem_at(0)}, shared_.current.is_last);
  }

  // Waits for the warps of the same rows.
  QUIRE_DEVICE void sync_rows() const { ptx::named_barrier_sync(1 + warp_.rows / Warp::kWarpRows, kColGroups * 32); }

  QUIRE_DEVICE void load_q() const {
    const TileQ tile = {smem_at(0)};
    warp_.copy_q(TileColumns<TileQ, 0, kVo>{tile}, mla_.q_nope, mla_.q_nope_token_stride, mla_.q_nope_head_stride);
    warp_.copy_q(TileColumns<TileQ, kVo / 8, kKpe>{tile}, p_.q, p_.q_token_stride, p_.q_head_stride);
  }

  // One group of asynchronous copies.
  QUIRE_DEVICE void copy(const Rows& rows, int i) const {
    if constexpr (kScaled) {
      rows.copy(ring_tile(i), i);
    } else {
      rows.template copy<1>(Ckv{ring_tile(i)}, i);
      rows.template copy<0>(Kpe{ring_tile(i)}, i);
    }
    ptx::cp_async_commit();
  }

  QUIRE_DEVICE decltype(auto) row_params() const {
    if constexpr (kScaled) {
      return (mla_);
    } else {
      return (p_);
    }
  }

  // Chunks of 16 numbers of 8 bits become two of 16 bits.
  QUIRE_DEVICE void widen(TileRing from, TileKv to) const {
    constexpr int kChunks = TileRing::kChunks;
#pragma unroll 3
    for (int i = thread_; i < kTileKv * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i - row * kChunks;
      const uint4 x = ptx::ld_shared_16(from.chunk(row, chunk));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t wide[4];
#pragma unroll
        for (int j = 0; j < 2; ++j) ptx::widen(Kv{}, words[2 * half + j], wide[2 * j], wide[2 * j + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) wide[j] = ptx::widened_to(T{}, wide[j]);
        ptx::st_shared_16(to.chunk(row, 2 * chunk + half), wide);
      }
    }
  }

  // widen() of a tile of latents with scales. kpe has 16 bits already. A thread has the same eight columns of some
  // rows, all of which it reads before it writes one: a trip to shared memory takes longer than the arithmetic.
  QUIRE_DEVICE void multiply_by_scales(TileRing from, TileKv to) const {
    constexpr int kChunks = kVo / 8, kKpeChunks = kKpe / 8, kStep = kThreads / kChunks, kAhead = kM == 1 ? 8 : 4;
    const int chunk = thread_ % kChunks, scale_at = chunk / (kTileDims / 8) * 4;
#pragma unroll 1
    for (int first = thread_ / kChunks; first < kTileKv; first += kAhead * kStep) {
      uint2 x[kAhead];
      float scale[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int row = first + i * kStep;
        x[i] = ptx::ld_shared_8(from.chunk(row, chunk / 2) + chunk % 2 * 8);
        scale[i] = ptx::ld_shared(from.chunk(row, kScaleChunk) + scale_at);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        uint32_t wide[4];
        ptx::widen(Kv{}, x[i].x, wide[0], wide[1]);
        ptx::widen(Kv{}, x[i].y, wide[2], wide[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float low = to_float(fp16_t{static_cast<uint16_t>(wide[j])});
          const float high = to_float(fp16_t{static_cast<uint16_t>(wide[j] >> 16)});
          wide[j] = ptx::pack(T{}, low * scale[i], high * scale[i]);
        }
        ptx::st_shared_16(to.chunk(first + i * kStep, chunk), wide);
      }
    }
    for (int i = thread_; i < kTileKv * kKpeChunks; i += kThreads) {
      const int row = i / kKpeChunks, chunk = i % kKpeChunks;
      const uint4 x = ptx::ld_shared_16(from.chunk(row, kKpeChunk + chunk));
      ptx::st_shared_16(to.chunk(row, kVo / 8 + chunk), {x.x, x.y, x.z, x.w});
    }
  }

  // s = q k^T of the warp's rows and keys, masked and scaled; publishes the maxima.
  QUIRE_DEVICE void score(typename Warp::Scores& s, int i, bool is_unmasked) const {
    CursorQ q({smem_at(0)}, lane_);
    CursorK k(kv_tile(i), lane_);
    q.lane_base += warp_.rows * TileQ::kRowBytes;
    k.lane_base += warp_.columns * kKeys * TileKv::kRowBytes;
    s.clear();
    constexpr bool kTwo = kScaled && kM == 1;  // chains of sums at a time, as each product waits for the one ahead
    Accumulator<kM, kKeys> other;
    if constexpr (kTwo) other.clear();
#pragma unroll 3
    for (int atom = 0; atom < kQk / 64; ++atom) {  // 128 bytes of a row
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t x[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(x[m], q.at(m, j) + atom * 128);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t keys[4];
          ptx::ldmatrix_x4(keys, k.at(n, j) + atom * 128);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            float (&left)[4] = kTwo && j % 2 ? other.at[m][2 * n] : s.at[m][2 * n];
            float (&right)[4] = kTwo && j % 2 ? other.at[m][2 * n + 1] : s.at[m][2 * n + 1];
            ptx::mma_m16n8k16(T{}, left, x[m], keys[0], keys[1]);
            ptx::mma_m16n8k16(T{}, right, x[m], keys[2], keys[3]);
          }
        }
      }
    }
    if constexpr (kTwo) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) s.at[0][n][x] += other.at[0][n][x];
      }
    }
    warp_.score(s, i * kTileKv + warp_.columns * kKeys, is_unmasked);
  }
};

}  // namespace quire
