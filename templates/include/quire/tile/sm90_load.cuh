// Keys and values on their way into panels of shared memory, one warp for each of the two. Three ways: ragged rows in
// one box a panel, pages in one box each, and a gather of rows for pages too small for a box.
#pragma once
#include "quire/ptx/barrier.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/tma.cuh"
#include "quire/tile/job.cuh"
#include "quire/tile/sm90_panels.cuh"

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

// fetch(i) looks tile i up; load() starts the copy of the tile fetched last. All lanes call both. kArrivals threads
// arrive at the barrier that counts a tile's arrival.
template <class V, KvPath kPath = kv_path<V>()>
class KvLoader {
 public:
  static constexpr int kArrivals = 1;

  QUIRE_DEVICE KvLoader(const AttentionParams&, const Job& job, int lane) : job_(job), lane_(lane) {}

  QUIRE_DEVICE void fetch(int i) { token_ = i * V::kTileKv; }

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, const KvSource& from, uint32_t barrier) const {
    if (lane_ != 0) return;
    ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
#pragma unroll
    for (int i = 0; i < Tile::kPanels; ++i) {
      ptx::tma_load_4d(dst.base + i * Tile::kPanelBytes, from.map, barrier, i * 64, job_.kv_first + token_,
                       job_.piece.kv_head, 0);
    }
  }

 private:
  const Job& job_;
  int lane_, token_;
};

// One lane a box of kBoxRows rows. Boxes beyond kv_len come from page -1: outside of the tensor, hence zeros.
template <class V>
class KvLoader<V, KvPath::kPages> {
 public:
  static constexpr int kArrivals = 1;
  static constexpr int kBoxRows = gcd(V::kPageSize, V::kTileKv);
  static constexpr int kBoxes = V::kTileKv / kBoxRows;
  static_assert(kBoxRows % 8 == 0 && kBoxes <= 32, "one lane copies one box, and a box keeps the swizzle's period");

  QUIRE_DEVICE KvLoader(const AttentionParams& p, const Job& job, int lane) : p_(p), job_(job), lane_(lane) {}

  QUIRE_DEVICE void fetch(int i) {
    const int token = i * V::kTileKv + lane_ * kBoxRows;
    row_ = token % V::kPageSize;
    page_ = -1;
    if (lane_ < kBoxes && token < job_.kv_len) page_ = p_.kv_indices[job_.kv_first + token / V::kPageSize];
  }

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, const KvSource& from, uint32_t barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive_expect(barrier, Tile::kBytes);
    __syncwarp();
    if (lane_ >= kBoxes) return;
#pragma unroll
    for (int i = 0; i < Tile::kPanels; ++i) {
      ptx::tma_load_4d(dst.base + i * Tile::kPanelBytes + lane_ * kBoxRows * 128, from.map, barrier, i * 64, row_,
                       job_.piece.kv_head, page_);
    }
  }

 private:
  const AttentionParams& p_;
  const Job& job_;
  int lane_, row_, page_;
};

// Each lane looks up one token in 32; rows are then copied four at a time, eight lanes a row, their places passed round
// by shuffles. Tokens from kv_len on arrive as zeros: a copy of no bytes reads no address.
template <class V>
class KvLoader<V, KvPath::kGather> {
 public:
  static constexpr int kArrivals = 32;

  QUIRE_DEVICE KvLoader(const AttentionParams& p, const Job& job, int lane) : p_(p), job_(job), lane_(lane) {}

  QUIRE_DEVICE void fetch(int i) {
    token_ = i * V::kTileKv;
#pragma unroll
    for (int j = 0; j < kLookups; ++j) {
      const int token = token_ + j * 32 + lane_;
      page_[j] = token < job_.kv_len ? p_.kv_indices[job_.kv_first + p_.page.div(token)] : 0;
    }
  }

  template <class Tile>
  QUIRE_DEVICE void load(Tile dst, const KvSource& from, uint32_t) const {
    const int row_in_four = lane_ >> 3, col = lane_ & 7;
    const unsigned char* base =
        static_cast<const unsigned char*>(from.base) + job_.piece.kv_head * from.head_stride * 2 + col * 16;
    const int left = job_.kv_len - token_ - row_in_four;
    // Of eight rows, the permutation of the lower and the upper four.
    const uint32_t lower = dst.chunk(row_in_four, col), upper = dst.chunk(row_in_four + 4, col);
#pragma unroll
    for (int j = 0; j < kLookups; ++j) {
      // In chunks of 16 bytes: the host refuses a cache of 2^32 of them.
      const uint32_t place = static_cast<uint32_t>(
          (page_[j] * from.page_stride + p_.page.mod(token_ + j * 32 + lane_) * from.token_stride) >> 3);
#pragma unroll
      for (int i = 0; i < min(8, (V::kTileKv - j * 32) / 4); ++i) {
        const int row = j * 32 + i * 4;
        const uint32_t chunks = __shfl_sync(0xffffffffu, place, i * 4 + row_in_four);
        const unsigned char* src = base + static_cast<uint64_t>(chunks) * 16;
        const uint32_t to = (i % 2 == 0 ? lower : upper) + (row & ~7) * 128;
        const int bytes = row < left ? 16 : 0;
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
          if ((panel + 1) * 8 > Tile::kChunks && panel * 8 + col >= Tile::kChunks) continue;
          ptx::cp_async_16(to + panel * Tile::kPanelBytes, src + panel * 128, bytes);
        }
      }
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

  const AttentionParams& p_;
  const Job& job_;
  int lane_, token_;
  int page_[kLookups];
};

}  // namespace quire
