// Keys and values on their way into shared memory: a ring of two tiles, filled by cp.async. Tile i + 1 travels while
// tile i is computed, one barrier a tile. Tokens from kv_len on arrive as zeros and are never read, whatever their
// memory holds: 0 * NaN is NaN.
#pragma once
#include "quire/core/params.h"
#include "quire/tile/smem.cuh"

namespace quire {

// Where a request's rows of k and v are. Ragged: token t is row t.
template <class V, int kThreads, bool kPaged = V::kPaged != 0>
class KvRows {
 public:
  static constexpr int kTableBytes = 0;

  QUIRE_DEVICE KvRows(const AttentionParams& p, int request, int kv_head, unsigned char*)
      : p_(p) {
    const int64_t first = p.kv_indptr[request];
    k_ = static_cast<const typename V::Kv*>(p.k) + first * p.k_token_stride + kv_head * p.k_head_stride;
    v_ = static_cast<const typename V::Kv*>(p.v) + first * p.v_token_stride + kv_head * p.v_head_stride;
  }

  QUIRE_DEVICE void begin(int, int, int) {}
  QUIRE_DEVICE void fetch(int, int, int) {}
  QUIRE_DEVICE void publish(int, int) {}

  template <class TileK, class TileV>
  QUIRE_DEVICE void copy(TileK k, TileV v, int tile, int kv_len, int thread) const {
    copy_rows(k, k_, p_.k_token_stride, tile * V::kTileKv, kv_len, thread);
    copy_rows(v, v_, p_.v_token_stride, tile * V::kTileKv, kv_len, thread);
  }

 private:
  template <class Tile>
  QUIRE_DEVICE void copy_rows(Tile dst, const typename V::Kv* rows, int64_t stride, int token, int kv_len, int thread) const {
    using Split = RowSplit<kThreads, Tile::kChunks>;
    const Split split(thread);
    const typename V::Kv* src = rows + (token + split.row) * stride + split.lane * 8;
#pragma unroll
    for (int row = 0; row < V::kTileKv; row += Split::kRowsAtOnce) {
      if (Split::kRowsAtOnce <= V::kTileKv || split.row < V::kTileKv) {
        const int bytes = token + row + split.row < kv_len ? 16 : 0;
#pragma unroll
        for (int c = 0; c < Split::kChunksPerLane; ++c) {
          const int chunk = c * Split::kLanes;
          ptx::cp_async_16(dst.chunk(row + split.row, chunk + split.lane), src + chunk * 8, bytes);
        }
      }
      src += Split::kRowsAtOnce * stride;
    }
  }

  const AttentionParams& p_;
  const typename V::Kv *k_, *v_;
};

// Paged: one thread looks a token up for all threads that copy parts of its row. The page number of tile i + 2 is
// fetched before tile i is computed and its offset published in shared memory after it, so that no copy waits for a
// lookup.
template <class V, int kThreads>
class KvRows<V, kThreads, true> {
 public:
  struct alignas(16) Offset {
    int64_t at[2];  // of k and of v, in elements; -1: no such token
  };
  static constexpr int kTableBytes = 2 * V::kTileKv * static_cast<int>(sizeof(Offset));

  QUIRE_DEVICE KvRows(const AttentionParams& p, int request, int kv_head, unsigned char* table)
      : p_(p), table_(reinterpret_cast<Offset*>(table)) {
    pages_ = p.kv_indices + p.kv_indptr[request];
    k_ = static_cast<const typename V::Kv*>(p.k) + kv_head * p.k_head_stride;
    v_ = static_cast<const typename V::Kv*>(p.v) + kv_head * p.v_head_stride;
  }

  // Publishes the piece's first two tiles; a barrier must follow.
  QUIRE_DEVICE void begin(int tile, int kv_len, int thread) {
    fetch(tile, kv_len, thread), publish(tile, thread);
    fetch(tile + 1, kv_len, thread), publish(tile + 1, thread);
  }

  QUIRE_DEVICE void fetch(int tile, int kv_len, int thread) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = tile * V::kTileKv + i * kThreads + thread;
      page_[i] = token < kv_len && owns(i, thread) ? pages_[p_.page.div(token)] : -1;
    }
  }

  QUIRE_DEVICE void publish(int tile, int thread) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (!owns(i, thread)) continue;
      const int slot = p_.page.mod(tile * V::kTileKv + i * kThreads + thread);
      Offset offset = {-1, -1};
      if (page_[i] >= 0) {
        offset.at[0] = page_[i] * p_.k_page_stride + slot * p_.k_token_stride;
        offset.at[1] = page_[i] * p_.v_page_stride + slot * p_.v_token_stride;
      }
      table_[(tile & 1) * V::kTileKv + i * kThreads + thread] = offset;
    }
  }

  template <class TileK, class TileV>
  QUIRE_DEVICE void copy(TileK k, TileV v, int tile, int, int thread) const {
    const Offset* table = table_ + (tile & 1) * V::kTileKv;
    copy_rows<0>(k, k_, table, thread);
    copy_rows<1>(v, v_, table, thread);
  }

 private:
  static constexpr int kTokens = ceil_div(V::kTileKv, kThreads);  // that a thread looks up

  QUIRE_DEVICE static bool owns(int i, int thread) {
    return (i + 1) * kThreads <= V::kTileKv || i * kThreads + thread < V::kTileKv;
  }

  template <int kOf, class Tile>
  QUIRE_DEVICE void copy_rows(Tile dst, const typename V::Kv* base, const Offset* table, int thread) const {
    using Split = RowSplit<kThreads, Tile::kChunks>;
    const Split split(thread);
#pragma unroll
    for (int row = 0; row < V::kTileKv; row += Split::kRowsAtOnce) {
      if (Split::kRowsAtOnce > V::kTileKv && split.row >= V::kTileKv) continue;
      const int64_t offset = table[row + split.row].at[kOf];
      const int bytes = offset >= 0 ? 16 : 0;
      const typename V::Kv* src = base + max<int64_t>(offset, 0) + split.lane * 8;
#pragma unroll
      for (int c = 0; c < Split::kChunksPerLane; ++c) {
        const int chunk = c * Split::kLanes;
        ptx::cp_async_16(dst.chunk(row + split.row, chunk + split.lane), src + chunk * 8, bytes);
      }
    }
  }

  const AttentionParams& p_;
  const int32_t* pages_;
  const typename V::Kv *k_, *v_;
  Offset* table_;
  int page_[kTokens];
};

}  // namespace quire
