// Copies keys and values into shared memory for fa2. Tokens from kv_len on become zeros, because memory there may hold
// NaN, and 0 * NaN is NaN. Their memory is never read: a copy of zero bytes touches no address. Dims that pad a head to
// whole blocks are treated likewise.
#pragma once
#include "quire/core/schedule.h"
#include "quire/tile/shared/smem.cuh"

namespace quire {

// Calls copy(row, chunk, offset) for each 16-byte chunk of a tile that this thread copies. `row` is counted from the
// thread's first row and is a constant; `offset` is counted in elements from the thread's first chunk.
template <int kThreads, class Tile, class Copy>
QUIRE_DEVICE void for_each_chunk(int thread, Copy&& copy) {
  using Split = RowSplit<kThreads, Tile::kChunks>;
  const Split split(thread);
  constexpr int kPasses = ceil_div(Tile::kRows, Split::kRowsAtOnce), kUnrolled = kPasses <= 16 ? kPasses : 8;
#pragma unroll kUnrolled
  for (int row = 0; row < Tile::kRows; row += Split::kRowsAtOnce) {
    if (Split::kRowsAtOnce > Tile::kRows && split.row >= Tile::kRows) continue;
#pragma unroll
    for (int c = 0; c < Split::kChunksPerLane; ++c) {
      copy(row, c * Split::kLanes + split.lane, c * Split::kLanes * (Tile::kCols / Tile::kChunks));
    }
  }
}

// Whether a chunk of a row of k (kOf: 0) or v (1) has data, and does not merely pad the tile to whole blocks.
template <class V, int kOf, class Tile>
QUIRE_DEVICE bool chunk_exists(int chunk) {
  constexpr int kChunks = (kOf == 0 ? V::kHeadDimQk : V::kHeadDimVo) * static_cast<int>(sizeof(typename V::Kv)) / 16;
  return Tile::kChunks <= kChunks || chunk < kChunks;
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
    for_each_chunk<kThreads, Tile>(thread_, [&](int row, int chunk, int offset) {
      if (row != at) row_src += Split::kRowsAtOnce * stride, at = row;
      ptx::cp_async_16(dst.chunk(begin + row, chunk), row_src + offset,
                       row < left && chunk_exists<V, kOf, Tile>(chunk) ? 16 : 0);
    });
    next_[kOf] = src + Tile::kRows * stride;
  }

 private:
  template <int kHeadDim>
  QUIRE_DEVICE const T* first(const void* base, int64_t stride, int64_t head_stride, int tile) const {
    const RowSplit<kThreads, whole_blocks(kHeadDim) / kOfChunk> split(thread_);
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
  struct Offset {
    int64_t at[2];  // offsets of the token in k and in v, in elements; -1: no such token
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
    const T* base = static_cast<const T*>(kOf == 0 ? p_.k : p_.v) + split.lane * (Tile::kCols / Tile::kChunks);
    for_each_chunk<kThreads, Tile>(thread_, [&](int row, int chunk, int offset) {
      const int64_t at = table[split.row + row].at[kOf];
      ptx::cp_async_16(dst.chunk(split.row + row, chunk), base + at + offset,
                       at >= 0 && chunk_exists<V, kOf, Tile>(chunk) ? 16 : 0);
    });
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
