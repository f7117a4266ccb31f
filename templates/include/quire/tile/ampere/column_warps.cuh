// Warps that own the same rows of a tile, where a row of o has more columns than one warp's registers hold.
//
// For q k^T these warps divide the keys of a KV tile, and for p v the columns of o. Each warp therefore shares what it
// computes of its keys through shared memory: row maxima, the weights p, and at the end denominators. The kernel
// has a barrier between these steps. FlashMLA divides o in this way.
#pragma once
#include "quire/ptx/warp.cuh"
#include "quire/tile/shared/logits.cuh"
#include "quire/tile/shared/partial.cuh"

namespace quire {

// Shared memory of a CTA: 227 KB on sm_90 and sm_100, 163 KB on sm_80 and sm_87, 99 KB on others.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kMostSharedBytes = 227 * 1024;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870)
constexpr int kMostSharedBytes = 163 * 1024;
#else
constexpr int kMostSharedBytes = 99 * 1024;
#endif

// One of 8 warps. A warp computes q k^T of kKeys keys, of which a tile has kTileKv, for 16 or 32 rows.
template <class V, int kKeys_>
struct ColumnWarps {
  using T = typename V::Q;
  static constexpr int kTileRows = V::kTileRows, kTileKv = V::kTileKv, kVo = V::kHeadDimVo, kKeys = kKeys_;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kM = kTileRows == 64 ? 2 : 1, kWarpRows = 16 * kM;  // blocks of 16 rows a warp
  static constexpr int kRowGroups = kTileRows / kWarpRows, kColGroups = kWarps / kRowGroups;  // warps of the same rows
  static constexpr int kCols = kVo / kColGroups, kKeyGroups = kTileKv / kKeys;                // columns a warp owns
  static_assert(kCols % 64 == 0, "a warp's columns begin at a multiple of 128 bytes");

  using TileO = SmemTile<kTileRows, kVo>;
  using TileP = SmemTile<kTileRows, kTileKv>;
  using Visible = Mask<V::kMask, V::kWindow != 0>;
  using Scores = Accumulator<kM, kKeys>;
  using Output = Accumulator<kM, kCols>;
  using Softmax = SoftmaxRows<kM>;              // d: of this lane's keys
  using OfRows = float[kKeyGroups][kTileRows];  // maxima, and at the end denominators, of each warp's keys

  const AttentionParams& p;
  const WorkTile& work;
  OfRows& of_rows;
  TileP weights;
  int thread, lane, rows, columns;  // rows: the warp's first row in the tile; columns: its group of columns

  QUIRE_DEVICE ColumnWarps(const AttentionParams& p, const WorkTile& work, OfRows& of_rows, TileP weights)
      : p(p),
        work(work),
        of_rows(of_rows),
        weights(weights),
        thread(threadIdx.x),
        lane(threadIdx.x % 32),
        rows(threadIdx.x / 32 / kColGroups * kWarpRows),
        columns(threadIdx.x / 32 % kColGroups) {}

  QUIRE_DEVICE int row_begin() const { return work.tile.row_begin + rows; }
  QUIRE_DEVICE Visible mask() const { return Visible::of(p, work.tile); }
  // Whether the warp publishes the maxima of its keys. If there are more warps than groups of keys, some need not.
  QUIRE_DEVICE bool publishes_maxima() const { return kKeyGroups == kColGroups || columns < kKeyGroups; }

  // The maximum or denominator that key group g has published, for the lane's row h of block m.
  QUIRE_DEVICE float& published(int g, int m, int h) const { return of_rows[g][rows + 16 * m + 8 * h + lane / 4]; }

  // The KV tiles of which some row of the warp sees a key (any), and those of which every row sees every key (all).
  QUIRE_DEVICE void find_tiles(KeyRange& any, KeyRange& all) const {
    any = all = {0, 0};
    if (row_begin() >= work.row_end) return;
    const Visible mask = this->mask();
    const int first = p.group.div(row_begin()), last = p.group.div(min(row_begin() + kWarpRows, work.row_end) - 1);
    const KeyRange some = mask.any(first, last), each = mask.all(first, last);
    any = {some.begin / kTileKv, ceil_div(some.end, kTileKv)};
    if constexpr (V::kScoreMask == 0) all = {ceil_div(each.begin, kTileKv), each.end / kTileKv};
  }

  // Copies queries to `tile`; rows that do not exist become zeros.
  template <class Tile>
  QUIRE_DEVICE void copy_q(Tile tile, const void* q, int64_t token_stride, int64_t head_stride) const {
    using Split = RowSplit<kThreads, Tile::kChunks>;
    const Split split(thread);
#pragma unroll 4
    for (int r = split.row; r < kTileRows; r += Split::kRowsAtOnce) {
      const int row = work.tile.row_begin + r;
      const WorkTile::Place at = work.place(p.group, min(row, work.row_end - 1));
      const T* src = static_cast<const T*>(q) + at.token * token_stride + at.head * head_stride;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes + split.lane;
        ptx::cp_async_16(tile.chunk(r, chunk), src + chunk * 8, row < work.row_end ? 16 : 0);
      }
    }
  }

  // Transforms and masks s, whose first key is `key`, and publishes the row maxima.
  QUIRE_DEVICE void score(Scores& s, int key, bool is_unmasked) const {
    const LogitsTile<V> tile = {mask(), p.group, work.tile.request, work.kv_head, row_begin() + lane / 4, key, lane};
    const LogitsTransform<V, FragmentMath<false>> transform(p);
    if (is_unmasked) {
      score_logits<false>(s, transform, tile);
    } else {
      score_logits<true>(s, transform, tile);
    }
    publish_maxima(s, transform.factor);
  }

  // Scales s, and writes the row maxima to shared memory.
  QUIRE_DEVICE void publish_maxima(Scores& s, float scale) const {
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
        if (publishes_maxima() && lane % 4 == 0) published(columns, m, h) = top;
      }
    }
  }

  // Raises m where a row's maximum exceeds it by more than kMostLagOf<V>, and rescales d and o to match.
  QUIRE_DEVICE void raise_max(Output& o, Softmax& softmax) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = kNoLogit;
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) top = fmaxf(top, published(g, m, h));
        const float next = top > softmax.m[m][h] + kMostLagOf<V> ? top : softmax.m[m][h];
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
  QUIRE_DEVICE void exponentiate(Scores& s, Softmax& softmax) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const float x = ptx::ex2(s.at[m][n][2 * h] - softmax.m[m][h]);
          const float y = ptx::ex2(s.at[m][n][2 * h + 1] - softmax.m[m][h]);
          softmax.d[m][h] += x + y;
          ptx::st_shared(weights.chunk(rows + 16 * m + 8 * h + lane / 4, columns * (kKeys / 8) + n) + lane % 4 * 4,
                         ptx::pack(T{}, x, y));
        }
      }
    }
  }

  // o += p v of the warp's rows and columns.
  template <class TileV>
  QUIRE_DEVICE void add_values(Output& o, TileV values) const {
    BlockCursor<TileP> p(weights, lane);
    BlockCursor<TileV> v(values, lane);
    p.lane_base += rows * TileP::kRowBytes;
    v.lane_base += columns * (kCols * 2);
#pragma unroll
    for (int k = 0; k < kTileKv / 16; ++k) {
      uint32_t x[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(x[m], p.at(m, k));
#pragma unroll
      for (int n = 0; n < kCols / 16; ++n) {
        uint32_t y[4];
        ptx::ldmatrix_x4_trans(y, v.at(k, n));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16(T{}, o.at[m][2 * n], x[m], y[0], y[1]);
          ptx::mma_m16n8k16(T{}, o.at[m][2 * n + 1], x[m], y[2], y[3]);
        }
      }
    }
  }

  // Ends a work tile: stores o, or a partial result that the last CTA of the merge group to arrive merges. `tile`:
  // where o is gathered.
  QUIRE_DEVICE void finish(const Output& o, Softmax& softmax, TileO tile, bool& is_last) const {
    ptx::cp_async_wait<0>();
    sum_denominators(softmax);
    if (work.is_whole()) {
      store(o, softmax, tile);
      return;
    }
    const MergeGroup group = p.groups[work.group];
    store_partial(o, softmax);
    if (arrives_last(p.groups + work.group, group.num_parts(), thread == 0, is_last, [] { __syncthreads(); })) {
      call_merge_partials<V, kWarps>(p, work, group, thread);
    }
  }

 private:
  // Sums denominators, so that every lane has those of its rows.
  QUIRE_DEVICE void sum_denominators(Softmax& softmax) const {
    softmax.reduce();
    __syncthreads();  // all warps have read the last maxima, and no longer read q
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      if (publishes_maxima() && lane % 4 == 0) published(columns, i / 2, i % 2) = softmax.d[i / 2][i % 2];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      float& d = softmax.d[i / 2][i % 2];
      d = 0.f;
#pragma unroll
      for (int g = 0; g < kKeyGroups; ++g) d += published(g, i / 2, i % 2);
    }
  }

  // Stores o and lse of a whole row tile: o is rounded, gathered in shared memory and stored row by row.
  QUIRE_DEVICE void store(const Output& o, const Softmax& softmax, TileO tile) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, h = i % 2, r = rows + 8 * i + lane / 4, row = work.tile.row_begin + r;
      const WorkTile::Place at = work.place(p.group, min(row, work.row_end - 1));
      const RowResult result = finish_row_of<V>(p, at.head, softmax.m[m][h], softmax.d[m][h]);
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) {
        ptx::st_shared(tile.chunk(r, columns * (kCols / 8) + n) + lane % 4 * 4,
                       ptx::pack(T{}, o.at[m][n][2 * h] * result.scale, o.at[m][n][2 * h + 1] * result.scale));
      }
      if (p.lse != nullptr && columns == 0 && lane % 4 == 0 && row < work.row_end) {
        store_statistics<V>(p, work.tile, at, result.lse, softmax.m[m][h], softmax.d[m][h]);
      }
    }
    __syncthreads();
    using Split = RowSplit<kThreads, TileO::kChunks>;
    const Split split(thread);
#pragma unroll 4
    for (int r = split.row; r < kTileRows; r += Split::kRowsAtOnce) {
      const int row = work.tile.row_begin + r;
      if (row >= work.row_end) break;
      const WorkTile::Place at = work.place(p.group, row);
      T* dst = static_cast<T*>(p.o) + at.token * p.o_token_stride + at.head * p.o_head_stride;
      *reinterpret_cast<uint4*>(dst + split.lane * 8) = ptx::ld_shared_16(tile.chunk(r, split.lane));
    }
  }

  // Stores the rows that exist to partial_o [num_partials, kTileRows, kVo] and partial_md [num_partials, kTileRows, 2].
  QUIRE_DEVICE void store_partial(const Output& o, const Softmax& softmax) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, h = i % 2, r = rows + 8 * i + lane / 4;
      if (work.tile.row_begin + r >= work.row_end) continue;
      const int64_t at = static_cast<int64_t>(work.partial) * kTileRows + r;
      float2* dst = reinterpret_cast<float2*>(p.partial_o + at * kVo + columns * kCols) + lane % 4;
#pragma unroll
      for (int n = 0; n < kCols / 8; ++n) dst[4 * n] = {o.at[m][n][2 * h], o.at[m][n][2 * h + 1]};
      if (columns == 0 && lane % 4 == 0)
        reinterpret_cast<float2*>(p.partial_md)[at] = {softmax.m[m][h], softmax.d[m][h]};
    }
  }
};

}  // namespace quire
