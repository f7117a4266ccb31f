// Copies keys and values into shared memory for fa2. Tokens from kv_len on become zeros, because memory there may hold
// NaN, and 0 * NaN is NaN. Their memory is never read: a copy of zero bytes touches no address. Dims that pad a head to
// whole blocks are treated likewise.
#pragma once
#include "quire/core/schedule.h"
#include "quire/tile/shared/smem.cuh"

namespace quire {

// Calls copy(row, chunk, offset) for each 16-byte chunk of a tile that this thread copies. `row` is counted from the
// thread's first row and is a constant; `offset` is counted in elements, kOfChunk a chunk, from the thread's first one.
template <int kThreads, class Tile, int kOfChunk = Tile::kCols / Tile::kChunks, class Copy>
QUIRE_DEVICE void for_each_chunk(int thread, Copy&& copy) {
  using Split = RowSplit<kThreads, Tile::kChunks>;
  const Split split(thread);
  constexpr int kPasses = ceil_div(Tile::kRows, Split::kRowsAtOnce), kUnrolled = kPasses <= 16 ? kPasses : 8;
#pragma unroll kUnrolled
  for (int row = 0; row < Tile::kRows; row += Split::kRowsAtOnce) {
    if (Split::kRowsAtOnce > Tile::kRows && split.row >= Tile::kRows) continue;
#pragma unroll
    for (int c = 0; c < Split::kChunksPerLane; ++c) {
      copy(row, c * Split::kLanes + split.lane, c * Split::kLanes * kOfChunk);
    }
  }
}

// Whether a chunk of a row of k (kOf: 0) or v (1) has data, and does not merely pad the tile to whole blocks.
template <class V, int kOf, class Tile>
QUIRE_DEVICE bool chunk_exists(int chunk) {
  constexpr int kChunks = (kOf == 0 ? V::kHeadDimQk : V::kHeadDimVo) * kBitsOf<typename V::Kv> / 128;
  return Tile::kChunks <= kChunks || chunk < kChunks;
}

// The scales of k (kOf: 0) or v (1): their address, and their strides over pages, tokens and heads.
struct ScalesOf {
  const e4m3_t* base;
  int64_t page, token, head;

  template <int kOf>
  QUIRE_DEVICE static ScalesOf of(const AttentionParams& base) {
    const auto& p = reinterpret_cast<const AttentionScaledParams&>(base);
    if constexpr (kOf == 0) return {p.k_sf, p.k_sf_page_stride, p.k_sf_token_stride, p.k_sf_head_stride};
    return {p.v_sf, p.v_sf_page_stride, p.v_sf_token_stride, p.v_sf_head_stride};
  }
};

// Copies the scales of a tile. at(row): where those of a row begin, -1 for a row without scales.
template <int kThreads, class Tile, class At>
QUIRE_DEVICE void copy_scales(Tile dst, const e4m3_t* base, int thread, At&& at) {
  constexpr int kBytes = Tile::kRowScales, kCopy = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : 4;
  constexpr int kCopies = kBytes / kCopy;
  for (int i = thread; i < Tile::kRows * kCopies; i += kThreads) {
    const int64_t offset = at(i / kCopies);
    ptx::cp_async_small<kCopy>(dst.scales() + i * kCopy, base + offset + i % kCopies * kCopy, offset >= 0 ? kCopy : 0);
  }
}

// Rows of k and v of one request, copied by kThreads threads, one KV tile after the other. A copy has no branch, so
// that it can hide among matrix instructions. Beyond the last KV tile of the work tile it reads nothing and writes
// zeros. kOf: 0 k, 1 v. kTiles: KV tiles whose pages are known ahead.
//
// Ragged: token t is row t. Each thread's next addresses lie in shared memory, where they cost no registers.
template <class V, int kThreads, int kTiles, bool kPaged = V::kPaged != 0>
class KvRows {
 public:
  using T = typename V::Kv;
  static constexpr int kTableBytes = kThreads * 2 * static_cast<int>(sizeof(T*));
  static constexpr int kOfChunk = 16 / static_cast<int>(sizeof(T));  // elements of a chunk

  QUIRE_DEVICE KvRows(const AttentionParams& p, const WorkTile& work, unsigned char* table, int thread)
      : p_(p), work_(work), next_(reinterpret_cast<const T**>(table) + 2 * thread), thread_(thread) {}

  QUIRE_DEVICE void begin(int tile) {
    next_[0] = first<V::kHeadDimQk>(p_.k, p_.k_token_stride, p_.k_head_stride, tile);
    next_[1] = first<V::kHeadDimVo>(p_.v, p_.v_token_stride, p_.v_head_stride, tile);
  }
  QUIRE_DEVICE void prefetch_pages(int) {}
  QUIRE_DEVICE void publish_offsets(int) {}

  template <int kOf, class Tile>
  QUIRE_DEVICE void copy(Tile dst, int tile) const {
    using Split = RowSplit<kThreads, Tile::kChunks>;
    const int64_t stride = kOf == 0 ? p_.k_token_stride : p_.v_token_stride;
    const int begin = Split(thread_).row, left = work_.kv_limit - tile * Tile::kRows - begin;
    const T *src = next_[kOf], *row_src = src;
    int at = 0;
    for_each_chunk<kThreads, Tile, kOfChunk>(thread_, [&](int row, int chunk, int offset) {
      if (row != at) row_src += Split::kRowsAtOnce * stride, at = row;
      ptx::cp_async_16(dst.chunk(begin + row, chunk), row_src + offset,
                       row < left && chunk_exists<V, kOf, Tile>(chunk) ? 16 : 0);
    });
    next_[kOf] = src + Tile::kRows * stride;
    if constexpr (kBitsOf<T> == 4) {
      const auto scales = ScalesOf::of<kOf>(p_);
      copy_scales<kThreads>(dst, scales.base + work_.kv_head * scales.head, thread_, [&](int row) -> int64_t {
        const int token = tile * Tile::kRows + row;
        return token < work_.kv_limit ? (work_.tile.kv_first + static_cast<int64_t>(token)) * scales.token : -1;
      });
    }
  }

 private:
  template <int kHeadDim>
  QUIRE_DEVICE const T* first(const void* base, int64_t stride, int64_t head_stride, int tile) const {
    const RowSplit<kThreads, whole_blocks(kHeadDim) * kBitsOf<T> / 128> split(thread_);
    const int64_t row = work_.tile.kv_first + tile * V::kTileKv + split.row;
    return static_cast<const T*>(base) + row * stride + work_.kv_head * head_stride + split.lane * kOfChunk;
  }

  const AttentionParams& p_;
  const WorkTile& work_;
  const T** next_;
  int thread_;
};

// Paged: one thread reads the page number of a token for all threads that copy parts of its row. The read for KV tile
// i + kTiles starts before KV tile i is computed. After it, the token's offset is published in shared memory, so that
// no copy waits for a page number.
template <class V, int kThreads, int kTiles>
class KvRows<V, kThreads, kTiles, true> {
 public:
  using T = typename V::Kv;
  static constexpr bool kHasScales = kBitsOf<T> == 4;
  struct Offset {
    int64_t at[kHasScales ? 4 : 2];  // offsets of the token in k, in v and in their scales; -1: no such token
  };
  static constexpr int kTableBytes = kTiles * V::kTileKv * static_cast<int>(sizeof(Offset));

  QUIRE_DEVICE KvRows(const AttentionParams& p, const WorkTile& work, unsigned char* table, int thread)
      : p_(p), work_(work), table_(reinterpret_cast<Offset*>(table)), thread_(thread) {}

  // Writes the offsets of the first KV tiles to shared memory, for all threads.
  QUIRE_DEVICE void begin(int tile) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) prefetch_pages(tile + i), publish_offsets(tile + i);
    __syncthreads();
  }

  QUIRE_DEVICE void prefetch_pages(int tile) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = tile * V::kTileKv + i * kThreads + thread_;
      page_[i] = -1;
      if (owns(i) && token < work_.kv_limit) page_[i] = p_.kv_indices[work_.tile.kv_first + p_.page.div(token)];
    }
  }

  QUIRE_DEVICE void publish_offsets(int tile) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (!owns(i)) continue;
      const int token_in_page = p_.page.mod(tile * V::kTileKv + i * kThreads + thread_);
      const int64_t head = work_.kv_head;
      Offset offset = {-1, -1};
      if constexpr (kHasScales) {
        const auto k = ScalesOf::of<0>(p_), v = ScalesOf::of<1>(p_);
        offset.at[2] = page_[i] < 0 ? -1 : page_[i] * k.page + token_in_page * k.token + head * k.head;
        offset.at[3] = page_[i] < 0 ? -1 : page_[i] * v.page + token_in_page * v.token + head * v.head;
      }
      if (page_[i] >= 0) {
        const CachePlace place = cache_place_of<V>(p_, page_[i], token_in_page);
        offset.at[0] = place.page * p_.k_page_stride + place.row * p_.k_token_stride + head * p_.k_head_stride;
        offset.at[1] = place.page * p_.v_page_stride + place.row * p_.v_token_stride + head * p_.v_head_stride;
      }
      table_[tile % kTiles * V::kTileKv + i * kThreads + thread_] = offset;
    }
  }

  template <int kOf, class Tile>
  QUIRE_DEVICE void copy(Tile dst, int tile) const {
    const Offset* table = table_ + tile % kTiles * V::kTileKv;
    const RowSplit<kThreads, Tile::kChunks> split(thread_);
    constexpr int kOfChunk = 16 / static_cast<int>(sizeof(T));  // elements of a chunk
    const T* base = static_cast<const T*>(kOf == 0 ? p_.k : p_.v) + split.lane * kOfChunk;
    for_each_chunk<kThreads, Tile, kOfChunk>(thread_, [&](int row, int chunk, int offset) {
      const int64_t at = table[split.row + row].at[kOf];
      ptx::cp_async_16(dst.chunk(split.row + row, chunk), base + at + offset,
                       at >= 0 && chunk_exists<V, kOf, Tile>(chunk) ? 16 : 0);
    });
    if constexpr (kHasScales)
      copy_scales<kThreads>(dst, ScalesOf::of<kOf>(p_).base, thread_, [&](int row) { return table[row].at[2 + kOf]; });
  }

 private:
  static constexpr int kTokens = ceil_div(V::kTileKv, kThreads);  // tokens whose page numbers one thread reads

  QUIRE_DEVICE bool owns(int i) const {
    return (i + 1) * kThreads <= V::kTileKv || i * kThreads + thread_ < V::kTileKv;
  }

  const AttentionParams& p_;
  const WorkTile& work_;
  Offset* table_;
  int thread_;
  int page_[kTokens];
};

}  // namespace quire
