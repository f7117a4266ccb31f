// Keys and values on their way into shared memory. Tokens from kv_len on arrive as zeros and are never read, whatever
// their memory holds (0 * NaN is NaN): a copy of no bytes touches no address.
#pragma once
#include "quire/tile/job.cuh"
#include "quire/tile/smem.cuh"

namespace quire {

// Calls copy(row, chunk) for each 16-byte chunk that this thread brings of a kRows x kCols tile.
template <int kThreads, class Tile, class Copy>
QUIRE_DEVICE void for_each_chunk(int thread, Copy&& copy) {
  using Split = RowSplit<kThreads, Tile::kChunks>;
  const Split split(thread);
#pragma unroll
  for (int row = 0; row < Tile::kRows; row += Split::kRowsAtOnce) {
    if (Split::kRowsAtOnce > Tile::kRows && split.row >= Tile::kRows) continue;
#pragma unroll
    for (int c = 0; c < Split::kChunksPerLane; ++c) copy(row + split.row, c * Split::kLanes + split.lane);
  }
}

// Rows of k and v of one request, copied by kThreads threads. kOf: 0 k, 1 v.
//
// Ragged: token t is row t.
template <class V, int kThreads, int kSlots, bool kPaged = V::kPaged != 0>
class KvRows {
 public:
  static constexpr int kTableBytes = 0;

  QUIRE_DEVICE KvRows(const AttentionParams& p, const Job& job, unsigned char*, int thread)
      : p_(p), job_(job), thread_(thread) {}

  QUIRE_DEVICE void begin(int) {}
  QUIRE_DEVICE void fetch(int) {}
  QUIRE_DEVICE void publish(int) {}

  template <int kOf, class Tile>
  QUIRE_DEVICE void copy(Tile dst, int tile) const {
    using Split = RowSplit<kThreads, Tile::kChunks>;
    const Split split(thread_);
    const int64_t stride = kOf == 0 ? p_.k_token_stride : p_.v_token_stride;
    const int64_t head_stride = kOf == 0 ? p_.k_head_stride : p_.v_head_stride;
    const int token = tile * Tile::kRows, left = job_.kv_len - token;
    const typename V::Kv* row_src = static_cast<const typename V::Kv*>(kOf == 0 ? p_.k : p_.v) +
                                    (job_.kv_first + token + split.row) * stride + job_.piece.kv_head * head_stride;
    int at = split.row;
    const auto source = [&](int row, int chunk) {
      if (row != at) row_src += Split::kRowsAtOnce * stride, at = row;
      return row_src + chunk * 8;
    };
    if (left >= Tile::kRows) {
      for_each_chunk<kThreads, Tile>(thread_, [&](int row, int chunk) {
        ptx::cp_async_16(dst.chunk(row, chunk), source(row, chunk));
      });
    } else {
      for_each_chunk<kThreads, Tile>(thread_, [&](int row, int chunk) {
        ptx::cp_async_16(dst.chunk(row, chunk), source(row, chunk), row < left ? 16 : 0);
      });
    }
  }

 private:
  const AttentionParams& p_;
  const Job& job_;
  int thread_;
};

// Paged: one thread looks a token up for all threads that copy parts of its row. The page number of tile i + kSlots is
// fetched before tile i is computed and its offset published in shared memory after it, so that no copy waits for a
// lookup.
template <class V, int kThreads, int kSlots>
class KvRows<V, kThreads, kSlots, true> {
 public:
  struct Offset {
    int64_t at[2];  // of k and of v, in elements; -1: no such token
  };
  static constexpr int kTableBytes = kSlots * V::kTileKv * static_cast<int>(sizeof(Offset));

  QUIRE_DEVICE KvRows(const AttentionParams& p, const Job& job, unsigned char* table, int thread)
      : p_(p), job_(job), table_(reinterpret_cast<Offset*>(table)), thread_(thread) {}

  // Publishes the piece's first tiles, for all threads.
  QUIRE_DEVICE void begin(int tile) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) fetch(tile + i), publish(tile + i);
    __syncthreads();
  }

  QUIRE_DEVICE void fetch(int tile) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int token = tile * V::kTileKv + i * kThreads + thread_;
      page_[i] = -1;
      if (owns(i) && token < job_.kv_len) page_[i] = p_.kv_indices[job_.kv_first + p_.page.div(token)];
    }
  }

  QUIRE_DEVICE void publish(int tile) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (!owns(i)) continue;
      const int slot = p_.page.mod(tile * V::kTileKv + i * kThreads + thread_);
      const int64_t head = job_.piece.kv_head;
      Offset offset = {-1, -1};
      if (page_[i] >= 0) {
        offset.at[0] = page_[i] * p_.k_page_stride + slot * p_.k_token_stride + head * p_.k_head_stride;
        offset.at[1] = page_[i] * p_.v_page_stride + slot * p_.v_token_stride + head * p_.v_head_stride;
      }
      table_[tile % kSlots * V::kTileKv + i * kThreads + thread_] = offset;
    }
  }

  template <int kOf, class Tile>
  QUIRE_DEVICE void copy(Tile dst, int tile) const {
    const Offset* table = table_ + tile % kSlots * V::kTileKv;
    const typename V::Kv* base = static_cast<const typename V::Kv*>(kOf == 0 ? p_.k : p_.v);
    for_each_chunk<kThreads, Tile>(thread_, [&](int row, int chunk) {
      const int64_t offset = table[row].at[kOf];
      ptx::cp_async_16(dst.chunk(row, chunk), base + chunk * 8 + offset, offset >= 0 ? 16 : 0);
    });
  }

 private:
  static constexpr int kTokens = ceil_div(V::kTileKv, kThreads);  // that a thread looks up

  QUIRE_DEVICE bool owns(int i) const {
    return (i + 1) * kThreads <= V::kTileKv || i * kThreads + thread_ < V::kTileKv;
  }

  const AttentionParams& p_;
  const Job& job_;
  Offset* table_;
  int thread_;
  int page_[kTokens];
};

}  // namespace quire
