// Keys and values on their way into swizzled tiles of shared memory, one warp for each of the two. Three ways: ragged
// rows in one box a column of atoms, pages in one box each, and a gather of rows for pages too small for a box.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/tma.cuh"
#include "quire/tile/current_work.cuh"
#include "quire/tile/sm90_tile.cuh"

namespace quire {

enum class KvPath { kRagged, kPages, kGather };

template <class V>
constexpr KvPath kv_path() {
  if (V::kPaged == 0) return KvPath::kRagged;
  return V::kPageSize > 0 && V::kPageSize % 8 == 0 ? KvPath::kPages : KvPath::kGather;
}

constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

// What the warp copies from: k or v of a request.
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
};

// fetch(i) looks tile i up, locate() waits for what that found, load() starts the copy. All lanes call each. kArrivals
// threads arrive at the barrier that counts a tile's arrival. Each instruction counts: the computing warps of two
// schedulers share them with these, and are as fast as the slowest.
template <class V, KvPath kPath = kv_path<V>()>
class KvLoader {
 public:
  static constexpr int kArrivals = 1;

  QUIRE_DEVICE KvLoader(const AttentionParams&, const KvSource& from, const WorkTile& work, int lane)
      : map_(from.map), work_(work), lane_(lane) {}

  QUIRE_DEVICE void fetch(int i) { token_ = i * V::kTileKv; }
  QUIRE_DEVICE void locate() {}

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, uint32_t barrier) const {
    if (lane_ != 0) return;
    ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kAtoms; ++i) {
      ptx::tma_load_4d(dst.base + i * Tile::kAtomBytes, map_, barrier, i * 64, work_.tile.kv_first + token_,
                       work_.kv_head, 0);
    }
  }

 private:
  const TensorMap* map_;
  const WorkTile& work_;
  int lane_, token_;
};

// One lane a box of kBoxRows rows. Boxes beyond kv_len come from page -1: outside of the tensor, hence zeros. (One lane
// for all boxes is 2 to 4 % slower, although the compiler makes a loop over lanes of these copies: H200, 2026-11-21.)
template <class V>
class KvLoader<V, KvPath::kPages> {
 public:
  static constexpr int kArrivals = 1;
  static constexpr int kBoxRows = gcd(V::kPageSize, V::kTileKv);
  static constexpr int kBoxes = V::kTileKv / kBoxRows;
  static_assert(kBoxRows % 8 == 0 && kBoxes <= 32, "one lane copies one box, and a box keeps the swizzle's period");

  QUIRE_DEVICE KvLoader(const AttentionParams& p, const KvSource& from, const WorkTile& work, int lane)
      : p_(p), map_(from.map), work_(work), lane_(lane) {}

  QUIRE_DEVICE void fetch(int i) {
    const int token = i * V::kTileKv + lane_ * kBoxRows;
    row_ = token % V::kPageSize;
    page_ = -1;
    if (lane_ < kBoxes && token < work_.tile.kv_len) page_ = p_.kv_indices[work_.tile.kv_first + token / V::kPageSize];
  }
  QUIRE_DEVICE void locate() {}

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, uint32_t barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
    __syncwarp();
    if (lane_ >= kBoxes) return;
#pragma unroll
    for (int i = 0; i < Tile::kAtoms; ++i) {
      ptx::tma_load_4d(dst.base + i * Tile::kAtomBytes + lane_ * kBoxRows * 128, map_, barrier, i * 64, row_,
                       work_.kv_head, page_);
    }
  }

 private:
  const AttentionParams& p_;
  const TensorMap* map_;
  const WorkTile& work_;
  int lane_, row_, page_;
};

// Each lane looks up one token in 32; rows are then copied four at a time, eight lanes a row, their places passed round
// by shuffles. Tokens from kv_len on arrive as zeros: a copy of no bytes reads no address.
template <class V>
class KvLoader<V, KvPath::kGather> {
 public:
  static constexpr int kArrivals = 32;

  QUIRE_DEVICE KvLoader(const AttentionParams& p, const KvSource& from, const WorkTile& work, int lane)
      : p_(p), from_(from), work_(work), lane_(lane) {
    base_ = reinterpret_cast<uint64_t>(from.base) + work.kv_head * from.head_stride * 2 + (lane & 7) * 16;
    asm("" : "+l"(base_));  // one register pair, not a sum that each row would add up anew
  }

  QUIRE_DEVICE void fetch(int i) {
    token_ = i * V::kTileKv;
#pragma unroll
    for (int j = 0; j < kLookups; ++j) {
      const int token = min(token_ + j * 32 + lane_, work_.tile.kv_len - 1), index = p_.page.div(token);
      row_[j] = token - index * static_cast<int>(p_.page.divisor);
      page_[j] = p_.kv_indices[work_.tile.kv_first + index];
    }
  }

  // In chunks of 16 bytes: the host refuses a cache of more than 2^32 of them.
  QUIRE_DEVICE void locate() {
#pragma unroll
    for (int j = 0; j < kLookups; ++j) {
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

  // Tells the barrier of a tile that it is there: of all tiles but the latest kLater. The writer orders its copies
  // before the tensor cores' reads; were the readers to do it, the time would be theirs.
  template <int kLater>
  QUIRE_DEVICE static void land(uint32_t barrier) {
    ptx::cp_async_wait<kLater>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(barrier);
  }

 private:
  static constexpr int kLookups = ceil_div(V::kTileKv, 32);

  // In step i, rows i, 8 + i, 16 + i and 24 + i of each 32: all have one permutation, and a shuffle among eight lanes
  // takes i from the instruction.
  template <bool kIsWhole, class Tile>
  QUIRE_DEVICE void copy(Tile dst, int left) const {
    const int eight = lane_ & ~7, first = dst.base + eight * 128 + (lane_ & 7) * 16;
    const int room = V::kTileKv - eight, rest = left - eight;  // compared with numbers, not with a register each
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t to = (first ^ i * 16) + i * 128;
#pragma unroll
      for (int j = 0; j < kLookups; ++j) {
        const uint64_t chunks = __shfl_sync(0xffffffffu, place_[j], i, 8);
        const int row = j * 32 + i;
        if (j * 32 + 31 >= V::kTileKv && row >= room) continue;
        const unsigned char* src = reinterpret_cast<const unsigned char*>(base_ + chunks * 16);
#pragma unroll
        for (int atom = 0; atom < Tile::kAtoms; ++atom) {
          if ((atom + 1) * 8 > Tile::kChunks && atom * 8 + (lane_ & 7) >= Tile::kChunks) continue;
          const uint32_t at = to + j * 32 * 128 + atom * Tile::kAtomBytes;
          if constexpr (kIsWhole) {
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
  int page_[kLookups], row_[kLookups];
  uint32_t place_[kLookups];
};

}  // namespace quire
