// Multi-head latent attention with the warp-wide matrix instruction: sm_80 and newer.
//
// All query heads share one head of keys [ckv, kpe], 512 + 64 dims, and ckv is the value too: a tile of keys is copied
// once and read by both products. Bound: memory for few rows, tensor cores for many, shared memory close behind.
// A row of o has 512 columns, more than a warp's registers hold beside others: the warps that own the same 16 rows
// divide the keys of a tile for q k^T, and the columns of o for p v. Between the products the weights p, rounded, go
// through shared memory, and so do the maxima of rows: three barriers a tile, while the next tiles are in flight.
// 8-bit latents are widened, exactly, from the ring into one tile of 16 bits, once for all warps. Where they have
// scales (kTileScales) they are multiplied by them in float32 on the way, and rounded once, as FlashMLA does.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/params_mla.h"
#include "quire/core/schedule.h"
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/float8.cuh"
#include "quire/ptx/store.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/tile/current_work.cuh"
#include "quire/tile/gemm.cuh"
#include "quire/tile/kv_ring.cuh"
#include "quire/tile/logits.cuh"
#include "quire/tile/partial.cuh"
#include "quire/tile/softmax.cuh"

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
    if (thread_ < V::kTileKv)
      table_[tile % kTiles * V::kTileKv + thread_] = {page_, p_.page.mod(tile * V::kTileKv + thread_)};
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
  static constexpr bool kNarrow = sizeof(Kv) == 1, kScaled = V::kTileScales != 0;
  static_assert((kNarrow || is_same<T, Kv>::value) && is_same<T, typename V::O>::value,
                "q and o have one number type, and so have latents unless they have 8 bits");
  static_assert(kQk == 576 && kVo == 512, "512 dims of a latent and 64 more");
  static_assert(kTileRows == 16 || kTileRows == 32 || kTileRows == 64, "a tile has 16, 32 or 64 rows");

  static constexpr int kWarps = 8, kThreads = kWarps * 32, kMinCtas = 1;
  static constexpr int kM = kTileRows == 64 ? 2 : 1, kWarpRows = 16 * kM;  // blocks of 16 rows a warp
  static constexpr int kRowGroups = kTileRows / kWarpRows, kColGroups = kWarps / kRowGroups;  // warps of the same rows
  static constexpr int kCols = kVo / kColGroups;                                              // of o that a warp owns
  static constexpr int kKeys = max(16, kTileKv / kColGroups), kKeyGroups = kTileKv / kKeys;   // of s

 private:
  using TileQ = SmemTile<kTileRows, kQk>;
  using TileO = SmemTile<kTileRows, kVo>;  // takes its place at the end
  using TileKv = SmemTile<kTileKv, kQk>;
  using TileP = SmemTile<kTileRows, kTileKv>;
  // As the cache has it. With scales these are bytes, of ckv, the scales, and kpe in 16 bits.
  static constexpr int kScaleChunk = kVo / 16, kKpeChunk = kScaleChunk + kVo / kTileDims / 4;
  static constexpr int kRingCols = kScaled ? 16 * kKpeChunk + 2 * kKpe : kQk;
  using TileRing = SmemTile<kTileKv, kRingCols, 8 * static_cast<int>(sizeof(Kv))>;
  using Ckv = TileColumns<TileRing, 0, kVo>;
  using Kpe = TileColumns<TileRing, kVo* static_cast<int>(sizeof(Kv)) / 16, kKpe>;
  using CursorQ = BlockCursor<TileQ>;
  using CursorP = BlockCursor<TileP>;
  using CursorK = BlockCursor<TileKv, Quarters::kTopFirst>;
  using CursorV = BlockCursor<TileKv>;
  static_assert(TileKv::kSwizzled && kCols % 64 == 0, "a warp's columns begin at a multiple of 128 bytes");

  // Of a CTA: 227 KB on sm_90 and sm_100, 163 KB on sm_80 and sm_87, 99 KB on others.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  static constexpr int kMostBytes = 227 * 1024;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870)
  static constexpr int kMostBytes = 163 * 1024;
#else
  static constexpr int kMostBytes = 99 * 1024;
#endif

  // What warps of the same rows tell each other: the maxima, and at the end the denominators, of their keys.
  struct Shared {
    CurrentWork current;
    float of_rows[kKeyGroups][kTileRows];
  };
  static constexpr int kOffsetBytes = kTileKv * 16;  // of a tile's tokens
  static constexpr int kWideBytes = kNarrow ? TileKv::kBytes : 0;
  static constexpr int kFixedBytes = TileQ::kBytes + kWideBytes + TileP::kBytes + round_up(sizeof(Shared), 16);
  static constexpr int kStages =
      max(1, min(4, (kMostBytes - kFixedBytes - kOffsetBytes) / (TileRing::kBytes + kOffsetBytes)));
  static constexpr int kTableStages = kStages + (kNarrow || kStages == 1 ? 1 : 0);
  using Rows =
      typename conditional<kScaled, ScaledRows<V, kThreads, kTableStages>, KvRows<V, kThreads, kTableStages>>::type;

  static constexpr int kWideAt = TileQ::kBytes, kRingAt = kWideAt + kWideBytes;
  static constexpr int kWeightsAt = kRingAt + kStages * TileRing::kBytes;
  static constexpr int kTableAt = kWeightsAt + TileP::kBytes;
  static constexpr int kSharedAt = kTableAt + Rows::kTableBytes;

 public:
  static constexpr int kSmemBytes = kSharedAt + round_up(sizeof(Shared), 16);
  static_assert(kSmemBytes <= kMostBytes, "a CTA fits");

  QUIRE_DEVICE static void run(const AttentionMlaParams& p, unsigned char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem + kSharedAt);
    if (threadIdx.x == 0) shared.current.cursor = WorkCursor::of_cta(p.base, static_cast<int>(blockIdx.x));
    for (;;) {
      __syncthreads();  // all of shared memory may still be in use for the work tile before
      if (threadIdx.x == 0) shared.current.exists = shared.current.cursor.next(p.base, kTileKv, shared.current.work);
      __syncthreads();
      if (!shared.current.exists) return;
      AttentionMlaFa2(p, shared, smem).attend();
    }
  }

 private:
  const AttentionMlaParams& mla_;
  const AttentionParams& p_;
  Shared& shared_;
  const WorkTile& work_;
  unsigned char* smem_;
  int thread_, lane_, rows_, columns_;  // rows_: this warp's first row in the tile; columns_: its group of columns

  QUIRE_DEVICE AttentionMlaFa2(const AttentionMlaParams& p, Shared& shared, unsigned char* smem)
      : mla_(p),
        p_(p.base),
        shared_(shared),
        work_(shared.current.work),
        smem_(smem),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        rows_(threadIdx.x / 32 / kColGroups * kWarpRows),
        columns_(threadIdx.x / 32 % kColGroups) {}

  QUIRE_DEVICE uint32_t smem_at(int offset) const { return ptx::smem_address(smem_) + offset; }
  QUIRE_DEVICE TileRing ring_tile(int i) const { return {smem_at(kRingAt + i % kStages * TileRing::kBytes)}; }
  QUIRE_DEVICE TileKv kv_tile(int i) const { return {kNarrow ? smem_at(kWideAt) : ring_tile(i).base}; }
  QUIRE_DEVICE TileP weights() const { return {smem_at(kWeightsAt)}; }
  QUIRE_DEVICE int row_begin() const { return work_.tile.row_begin + rows_; }
  QUIRE_DEVICE bool has_keys() const { return kKeyGroups == kColGroups || columns_ < kKeyGroups; }
  QUIRE_DEVICE Mask<V::kMask, false> mask() const { return Mask<V::kMask, false>::of(p_, work_.tile); }

  // Key tiles that some row of the warp sees, and those that each of its rows sees whole.
  QUIRE_DEVICE void find_tiles(KeyRange& any, KeyRange& all) const {
    any = all = {0, 0};
    if (row_begin() >= work_.row_end) return;
    const auto mask = this->mask();
    const int first = p_.group.div(row_begin()), last = p_.group.div(min(row_begin() + kWarpRows, work_.row_end) - 1);
    any = mask.any(first, last), all = mask.all(first, last);
    any = {any.begin / kTileKv, ceil_div(any.end, kTileKv)};
    all = {ceil_div(all.begin, kTileKv), all.end / kTileKv};
  }

  QUIRE_DEVICE void attend() {
    const int kv_begin = work_.kv_begin, kv_end = work_.kv_end;
    Rows rows(row_params(), work_, smem_ + kTableAt, thread_);
    load_q();
    rows.begin(kv_begin);
    constexpr int kAhead = kNarrow ? kStages : max(1, kStages - 1);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) copy(rows, kv_begin + i);
    KeyRange any, all;
    find_tiles(any, all);
    Accumulator<kM, kCols> o;
    SoftmaxRows<kM> softmax;  // d: of this lane's keys
    o.clear();
    softmax.clear();
#pragma unroll 1
    for (int i = kv_begin; i < kv_end; ++i) {
      ptx::cp_async_wait<kAhead - 1>();
      __syncthreads();  // tile i is there, and all are done with tile i - 1
      if constexpr (kNarrow) {
        if constexpr (kScaled) {
          multiply_by_scales(ring_tile(i), kv_tile(i));
        } else {
          widen(ring_tile(i), kv_tile(i));
        }
        __syncthreads();  // tile i is wide
      }
      if constexpr (kNarrow || kStages > 1) copy(rows, i + kAhead);
      rows.prefetch_pages(i + kTableStages);
      Accumulator<kM, kKeys> s;
      const bool some = any.contains(i), attends = some && has_keys();
      if (attends) score(s, i, all.contains(i));
      sync_rows();  // the maxima of all keys are there
      if (some) raise_max(o, softmax);
      if (attends) exponentiate(s, softmax);
      rows.publish_offsets(i + kTableStages);
      sync_rows();  // so are the weights
      if (some) add_values(o, i);
      if constexpr (!kNarrow && kStages == 1) {
        __syncthreads();  // all are done with tile i
        copy(rows, i + 1);
      }
    }
    ptx::cp_async_wait<0>();
    sum_denominators(softmax);
    if (work_.is_whole()) {
      store(o, softmax);
      return;
    }
    const MergeGroup group = p_.groups[work_.group];
    store_partial(o, softmax);
    if (arrives_last(p_.groups + work_.group, group.num_parts<kTileRows>(), thread_ == 0, shared_.current.is_last,
                     [] { __syncthreads(); })) {
      call_merge_partials<V, kWarps>(p_, work_, group, thread_);
    }
  }

  // Waits for the warps of the same rows.
  QUIRE_DEVICE void sync_rows() const { ptx::named_barrier_sync(1 + rows_ / kWarpRows, kColGroups * 32); }

  // Where the lane's row h of block m tells other warps what group g of keys has.
  QUIRE_DEVICE float& told(int g, int m, int h) const { return shared_.of_rows[g][rows_ + 16 * m + 8 * h + lane_ / 4]; }

  // Rows that do not exist become zeros.
  QUIRE_DEVICE void load_q() const {
    const TileQ tile = {smem_at(0)};
    copy_q<kVo>(TileColumns<TileQ, 0, kVo>{tile}, mla_.q_nope, mla_.q_nope_token_stride, mla_.q_nope_head_stride);
    copy_q<kKpe>(TileColumns<TileQ, kVo / 8, kKpe>{tile}, p_.q, p_.q_token_stride, p_.q_head_stride);
  }

  template <int kDims, class Columns>
  QUIRE_DEVICE void copy_q(Columns tile, const void* q, int64_t token_stride, int64_t head_stride) const {
    using Split = RowSplit<kThreads, Columns::kChunks>;
    const Split split(thread_);
#pragma unroll 4
    for (int r = split.row; r < kTileRows; r += Split::kRowsAtOnce) {
      const int row = work_.tile.row_begin + r;
      const WorkTile::Place at = work_.place(p_.group, min(row, work_.row_end - 1));
      const T* src = static_cast<const T*>(q) + at.token * token_stride + at.head * head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(tile.chunk(r, chunk), src + chunk * 8, row < work_.row_end ? 16 : 0);
      }
    }
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

  // s = q k^T of the warp's rows and keys, masked and scaled; tells the maxima.
  QUIRE_DEVICE void score(Accumulator<kM, kKeys>& s, int i, bool every) const {
    CursorQ q({smem_at(0)}, lane_);
    CursorK k(kv_tile(i), lane_);
    q.lane_base += rows_ * TileQ::kRowBytes;
    k.lane_base += columns_ * kKeys * TileKv::kRowBytes;
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
    const LogitsTile<V> tile = {
        mask(), p_.group, work_.tile.request, work_.kv_head, row_begin() + lane_ / 4, i * kTileKv + columns_ * kKeys,
        lane_};
    const LogitsTransform<V, FragmentMath<false>> transform(p_);
    if (!every) score_logits<true>(s, transform, tile);
    const float scale = transform.factor;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = kNoLogit;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          float (&x)[4] = s.at[m][n];
          x[2 * h] *= scale, x[2 * h + 1] *= scale;
          top = fmaxf(top, fmaxf(x[2 * h], x[2 * h + 1]));
        }
        top = quad_max(top);
        if (lane_ % 4 == 0) told(columns_, m, h) = top;
      }
    }
  }

  // Raises m where a row's maximum exceeds it by more than kMaxLag, and rescales d and o to match.
  QUIRE_DEVICE void raise_max(Accumulator<kM, kCols>& o, SoftmaxRows<kM>& softmax) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = kNoLogit;
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) top = fmaxf(top, told(g, m, h));
        const float next = top > softmax.m[m][h] + kMaxLag ? top : softmax.m[m][h];
        factor[h] = ptx::ex2(softmax.m[m][h] - next);
        softmax.m[m][h] = next, softmax.d[m][h] *= factor[h];
      }
      if (!__any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f)) continue;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o.at[m][n][j] *= factor[j / 2];
      }
    }
  }

  // s becomes exp2(s - m), added up in d and rounded to T in shared memory.
  QUIRE_DEVICE void exponentiate(Accumulator<kM, kKeys>& s, SoftmaxRows<kM>& softmax) const {
    const TileP tile = weights();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const float x = ptx::ex2(s.at[m][n][2 * h] - softmax.m[m][h]);
          const float y = ptx::ex2(s.at[m][n][2 * h + 1] - softmax.m[m][h]);
          softmax.d[m][h] += x + y;
          ptx::st_shared(tile.chunk(rows_ + 16 * m + 8 * h + lane_ / 4, columns_ * (kKeys / 8) + n) + lane_ % 4 * 4,
                         ptx::pack(T{}, x, y));
        }
      }
    }
  }

  // o += p v of the warp's rows and columns.
  QUIRE_DEVICE void add_values(Accumulator<kM, kCols>& o, int i) const {
    CursorP p(weights(), lane_);
    CursorV v(kv_tile(i), lane_);
    p.lane_base += rows_ * TileP::kRowBytes;
    v.lane_base += columns_ * (kCols * 2);
#pragma unroll
    for (int k = 0; k < kTileKv / 16; ++k) {
      uint32_t x[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(x[m], p.at(m, k));
#pragma unroll
      for (int n = 0; n < kCols / 16; ++n) {
        uint32_t values[4];
        ptx::ldmatrix_x4_trans(values, v.at(k, n));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16(T{}, o.at[m][2 * n], x[m], values[0], values[1]);
          ptx::mma_m16n8k16(T{}, o.at[m][2 * n + 1], x[m], values[2], values[3]);
        }
      }
    }
  }

  // Every lane gets the whole denominators of its rows.
  QUIRE_DEVICE void sum_denominators(SoftmaxRows<kM>& softmax) const {
    softmax.reduce();
    __syncthreads();  // all have read the last maxima, and are done with q
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (has_keys() && lane_ % 4 == 0) told(columns_, m, h) = softmax.d[m][h];
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        softmax.d[m][h] = 0.f;
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) softmax.d[m][h] += told(g, m, h);
      }
    }
  }

  // o and lse of a whole tile: rounded, gathered in shared memory (q is done with), stored in rows.
  QUIRE_DEVICE void store(const Accumulator<kM, kCols>& o, const SoftmaxRows<kM>& softmax) const {
    const TileO tile = {smem_at(0)};
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, h = i % 2, r = rows_ + 8 * i + lane_ / 4, row = work_.tile.row_begin + r;
      const WorkTile::Place at = work_.place(p_.group, min(row, work_.row_end - 1));
      const float* sink = p_.sinks == nullptr ? nullptr : p_.sinks + at.head;
      const RowResult result = finish_row(softmax.m[m][h], softmax.d[m][h], sink, output_scale(p_));
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        ptx::st_shared(tile.chunk(r, columns_ * (kCols / 8) + n) + lane_ % 4 * 4,
                       ptx::pack(T{}, o.at[m][n][2 * h] * result.scale, o.at[m][n][2 * h + 1] * result.scale));
      }
      if (p_.lse != nullptr && columns_ == 0 && lane_ % 4 == 0 && row < work_.row_end) {
        p_.lse[at.token * p_.num_qo_heads + at.head] = result.lse;
      }
    }
    __syncthreads();
    using Split = RowSplit<kThreads, TileO::kChunks>;
    const Split split(thread_);
#pragma unroll 4
    for (int r = split.row; r < kTileRows; r += Split::kRowsAtOnce) {
      const int row = work_.tile.row_begin + r;
      if (row >= work_.row_end) break;
      const WorkTile::Place at = work_.place(p_.group, row);
      T* dst = static_cast<T*>(p_.o) + at.token * p_.o_token_stride + at.head * p_.o_head_stride;
      *reinterpret_cast<uint4*>(dst + split.lane * 8) = ptx::ld_shared_16(tile.chunk(r, split.lane));
    }
  }

  // Rows of partial_o [num_partials, kTileRows, kVo] and partial_md [num_partials, kTileRows, 2] that exist.
  QUIRE_DEVICE void store_partial(const Accumulator<kM, kCols>& o, const SoftmaxRows<kM>& softmax) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, h = i % 2, r = rows_ + 8 * i + lane_ / 4;
      if (work_.tile.row_begin + r >= work_.row_end) continue;
      const int64_t at = static_cast<int64_t>(work_.partial) * kTileRows + r;
      float2* dst = reinterpret_cast<float2*>(p_.partial_o + at * kVo + columns_ * kCols) + lane_ % 4;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) dst[4 * n] = {o.at[m][n][2 * h], o.at[m][n][2 * h + 1]};
      if (columns_ == 0 && lane_ % 4 == 0)
        reinterpret_cast<float2*>(p_.partial_md)[at] = {softmax.m[m][h], softmax.d[m][h]};
    }
  }
};

}  // namespace quire
