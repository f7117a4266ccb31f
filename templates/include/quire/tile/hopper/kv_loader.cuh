// Loads keys and values into swizzled tiles of shared memory: one warp loads keys, one values. There are three ways.
// The copy engine brings ragged rows in one box for each column of atoms, or pages in one box each; pages too small for
// a box are gathered row by row.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/core/schedule.h"
#include "quire/tile/hopper/gemm.cuh"

namespace quire {

enum class KvLoadPath { kRagged, kPages, kGather };

template <class V>
constexpr KvLoadPath kv_load_path() {
  if (V::kPaged == 0) return KvLoadPath::kRagged;
  return V::kPageSize > 0 && V::kPageSize % 8 == 0 ? KvLoadPath::kPages : KvLoadPath::kGather;
}

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// The source of a warp's copies: k or v of a request.
struct KvSource {
  const TensorMap* map;
  const void* base;
  int64_t page_stride, token_stride, head_stride;  // elements

  QUIRE_DEVICE static KvSource k(const AttentionFa3Params& p) {
    return {&p.tensor_k, p.base.k, p.base.k_page_stride, p.base.k_token_stride, p.base.k_head_stride};
  }
  QUIRE_DEVICE static KvSource v(const AttentionFa3Params& p) {
    return {&p.tensor_v, p.base.v, p.base.v_page_stride, p.base.v_token_stride, p.base.v_head_stride};
  }
  // k of the tensors beside the cache. The copy engine needs only their tensor map.
  QUIRE_DEVICE static KvSource k_prefix(const AttentionFa3Params& p) {
    return {&static_cast<const AttentionFa3PrefixParams&>(p).tensor_k_prefix, nullptr, 0, 0, 0};
  }
  QUIRE_DEVICE static KvSource v_prefix(const AttentionFa3Params& p) {
    return {&static_cast<const AttentionFa3PrefixParams&>(p).tensor_v_prefix, nullptr, 0, 0, 0};
  }
};

// prefetch_pages(i) starts to read the page numbers of KV tile i, resolve_pages() waits for them, and load() starts to
// copy. All lanes call each of them. kArrivals threads arrive at the full barrier of a KV tile. Each instruction
// counts: two of the SM's four schedulers issue it in place of a computing warp's, and all computing warps wait for the
// slowest. kRows: the rows of a KV tile, or of a part that is loaded separately.
template <class V, KvLoadPath kLoadPath = kv_load_path<V>(), int kRows = V::kTileKv>
class KvLoader {
 public:
  static constexpr int kArrivals = 1;

  QUIRE_DEVICE KvLoader(const AttentionParams&, const KvSource& from, const WorkTile& work, int lane)
      : map_(from.map), work_(work), lane_(lane) {}

  QUIRE_DEVICE void prefetch_pages(int i) { token_ = i * kRows; }
  QUIRE_DEVICE void resolve_pages() {}

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, uint32_t barrier) const {
    if (lane_ != 0) return;
    ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kAtoms; ++i) {
      ptx::tma_load_4d(dst.base + i * Tile::kAtomBytes, map_, barrier, i * Tile::kAtomCols,
                       work_.tile.kv_first + token_, work_.kv_head, 0);
    }
  }

 private:
  const TensorMap* map_;
  const WorkTile& work_;
  int lane_, token_;
};

// Each lane copies a box of kBoxRows rows. Boxes beyond kv_len are copied from page -1, which is outside the tensor, so
// that zeros arrive.
template <class V, int kRows>
class KvLoader<V, KvLoadPath::kPages, kRows> {
 public:
  static constexpr int kArrivals = 1;
  static constexpr int kBoxRows = gcd(V::kPageSize, kRows);
  static constexpr int kBoxes = kRows / kBoxRows;
  static_assert(kBoxRows % 8 == 0 && kBoxes <= 32, "one lane copies one box, and a box keeps the swizzle's period");

  QUIRE_DEVICE KvLoader(const AttentionParams& p, const KvSource& from, const WorkTile& work, int lane)
      : p_(p), map_(from.map), work_(work), lane_(lane) {}

  QUIRE_DEVICE void prefetch_pages(int i) {
    const int token = i * kRows + lane_ * kBoxRows;
    row_ = token % V::kPageSize;
    page_ = -1;
    if (lane_ < kBoxes && token < work_.tile.kv_len) page_ = p_.kv_indices[work_.tile.kv_first + token / V::kPageSize];
  }
  QUIRE_DEVICE void resolve_pages() {}

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, uint32_t barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
    __syncwarp();
    if (lane_ >= kBoxes) return;
#pragma unroll
    for (int i = 0; i < Tile::kAtoms; ++i) {
      ptx::tma_load_4d(dst.base + i * Tile::kAtomBytes + lane_ * kBoxRows * 128, map_, barrier, i * Tile::kAtomCols,
                       row_, work_.kv_head, page_);
    }
  }

 private:
  const AttentionParams& p_;
  const TensorMap* map_;
  const WorkTile& work_;
  int lane_, row_, page_;
};

// For rows that are gathered: waits for the copies of all KV tiles but the latest kLater, and arrives at the full
// barrier of the last KV tile that it waited for. The fence between these copies and the tensor cores' reads is
// executed here, so that it costs the readers nothing.
template <int kLater>
QUIRE_DEVICE void arrive_copied(uint32_t barrier) {
  ptx::cp_async_wait<kLater>();
  ptx::fence_proxy_async();
  ptx::mbarrier_arrive(barrier);
}

// Each lane finds the row of one token in 32. Four rows at a time are then copied, each by eight lanes, which get the
// row's address by a shuffle. Tokens from kv_len on arrive as zeros: a copy of zero bytes reads no address.
template <class V>
class KvLoader<V, KvLoadPath::kGather, V::kTileKv> {
 public:
  static constexpr int kArrivals = 32;

  QUIRE_DEVICE KvLoader(const AttentionParams& p, const KvSource& from, const WorkTile& work, int lane)
      : p_(p), from_(from), work_(work), lane_(lane) {
    base_ = reinterpret_cast<uint64_t>(from.base) + work.kv_head * from.head_stride * 2 + (lane & 7) * 16;
    asm("" : "+l"(base_));  // one register pair, not a sum that each row would add up anew
  }

  QUIRE_DEVICE void prefetch_pages(int i) {
    token_ = i * V::kTileKv;
#pragma unroll
    for (int j = 0; j < kTokensPerLane; ++j) {
      const int token = min(token_ + j * 32 + lane_, work_.tile.kv_len - 1), index = p_.page.div(token);
      row_[j] = token - index * static_cast<int>(p_.page.divisor);
      page_[j] = p_.kv_indices[work_.tile.kv_first + index];
    }
  }

  // Computes offsets in chunks of 16 bytes. The host refuses a cache of more than 2^32 chunks.
  QUIRE_DEVICE void resolve_pages() {
#pragma unroll
    for (int j = 0; j < kTokensPerLane; ++j) {
      place_[j] = page_[j] * static_cast<uint32_t>(from_.page_stride >> 3) +
                  row_[j] * static_cast<uint32_t>(from_.token_stride >> 3);
    }
  }

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, uint32_t) const {
    const int left = work_.tile.kv_len - token_;
    if (left >= V::kTileKv) {
      copy<true>(dst, left);
    } else {
      copy<false>(dst, left);
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr int kTokensPerLane = ceil_div(V::kTileKv, 32);

  // In step i, rows i, 8 + i, 16 + i and 24 + i of each 32: all have one permutation, and a shuffle among eight lanes
  // takes i from the instruction.
  template <bool kIsFull, class Tile>
  QUIRE_DEVICE void copy(Tile dst, int left) const {
    const int eight = lane_ & ~7, first = dst.base + eight * 128 + (lane_ & 7) * 16;
    const int tile_rest = V::kTileKv - eight, rest = left - eight;  // compared with numbers, not with a register each
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t to = (first ^ i * 16) + i * 128;
#pragma unroll
      for (int j = 0; j < kTokensPerLane; ++j) {
        const uint64_t chunks = __shfl_sync(0xffffffffu, place_[j], i, 8);
        const int row = j * 32 + i;
        if (j * 32 + 31 >= V::kTileKv && row >= tile_rest) continue;
        const unsigned char* src = reinterpret_cast<const unsigned char*>(base_ + chunks * 16);
#pragma unroll
        for (int atom = 0; atom < Tile::kAtoms; ++atom) {
          if ((atom + 1) * 8 > Tile::kChunks && atom * 8 + (lane_ & 7) >= Tile::kChunks) continue;
          const uint32_t at = to + j * 32 * 128 + atom * Tile::kAtomBytes;
          if constexpr (kIsFull) {
            ptx::cp_async_16(at, src + atom * 128);
          } else {
            ptx::cp_async_16(at, src + atom * 128, row < rest ? 16 : 0);
          }
        }
      }
    }
  }

  const AttentionParams& p_;
  const KvSource& from_;
  const WorkTile& work_;
  uint64_t base_;  // this lane's column of the head
  int lane_, token_;
  int page_[kTokensPerLane], row_[kTokensPerLane];
  uint32_t place_[kTokensPerLane];
};

}  // namespace quire
