// Loads keys and values of 8 bits. The warps of the loading warpgroup copy them into shared memory, and widen them
// there to fp16: the bytes of a row lie where its numbers of 16 bits come to lie, so that they take no memory of their
// own.
//
// Bound: how many instructions an SM issues. Keys and values of 64 tokens of 128 dims take the tensor cores 1,536
// clocks at 192 rows, in which the computing warps issue some 1,000 instructions on each of the SM's four schedulers.
// On each, a loading warp issues 64 conversions, 8 copies, 8 loads, 16 stores and some 80 others. To bf16 it would be
// 192 conversions more.
#pragma once
#include "quire/ptx/float8.cuh"
#include "quire/ptx/store.cuh"
#include "quire/tile/sm90_kv_tiles.cuh"
#include "quire/tile/sm90_load.cuh"

namespace quire {

// Which 16-byte chunks of 8-bit rows a lane of a warp copies: kLanes lanes share a row, kRows rows are copied at once,
// in one step. A chunk becomes two of 16 bits, which lie in the same banks as those of the next atom. Eight lanes
// therefore have four chunks of two neighbouring rows, which the swizzle puts into different banks.
template <int kChunks>
struct ChunkSplit {
  static constexpr int kLanes = min(kChunks & -kChunks, 32), kRows = 32 / kLanes, kChunksPerLane = kChunks / kLanes;
  static constexpr bool kPairsRows = kLanes == 8 || kLanes == 16;

  QUIRE_DEVICE static int row(int lane) {
    return kPairsRows ? (lane / (2 * kLanes)) * 2 + (lane >> 2 & 1) : lane / kLanes;
  }
  QUIRE_DEVICE static int chunk(int lane) {
    return kPairsRows ? ((lane >> 3) * 4 + (lane & 3)) % kLanes : lane % kLanes;
  }
};

// One warp's rows of keys or of values: kRows of each KV tile, from a multiple of 4 on, in kSteps steps.
template <class V, class Tile, int kRows>
class NarrowRows {
  using Kv = typename V::Kv;
  using Split = ChunkSplit<Tile::kCols / 16>;
  static constexpr int kSteps = ceil_div(kRows, Split::kRows), kChunks = Split::kChunksPerLane;

 public:
  // `tile`: the ring's first.
  QUIRE_DEVICE NarrowRows(uint32_t tile, int first_row, int lane)
      : wide_at_(Tile{tile}.chunk(first_row + Split::row(lane), 2 * Split::chunk(lane))),
        bytes_at_(bytes_at(tile, first_row + Split::row(lane), Split::chunk(lane))) {}

  // Of a work tile, whose KV head is `kv_head`.
  QUIRE_DEVICE void begin(const KvSource& from, int kv_head, int lane) {
    base_ = reinterpret_cast<uint64_t>(from.base) + kv_head * from.head_stride + Split::chunk(lane) * 16;
    asm("" : "+l"(base_));  // one register pair, not a sum that each row would add up anew
  }

  // Starts to read the page numbers of a KV tile. `first`: its first token of this warp.
  QUIRE_DEVICE void find_pages(const AttentionParams& p, const WorkTile& work, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int token = min(first + i * 32 + lane, work.tile.kv_len - 1), index = p.page.div(token);
      row_[i] = V::kPaged == 0 ? work.tile.kv_first + token : token - index * static_cast<int>(p.page.divisor);
      if constexpr (V::kPaged != 0) places_[i] = p.kv_indices[work.tile.kv_first + index];
    }
  }

  // In chunks of 16 bytes: the host refuses a cache of more than 2^32 of them.
  QUIRE_DEVICE void find_rows(const KvSource& from) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const uint32_t page = V::kPaged == 0 ? 0 : places_[i] * static_cast<uint32_t>(from.page_stride >> 4);
      places_[i] = page + row_[i] * static_cast<uint32_t>(from.token_stride >> 4);
    }
  }

  // Starts to copy the bytes of a KV tile. Rows from `rest` on, which do not exist, become zeros.
  QUIRE_DEVICE void copy(int stage, int rest, int lane) const {
    if (rest >= kRows)
      copy_rows<true>(stage, rest, lane);
    else
      copy_rows<false>(stage, rest, lane);
  }

  // Widens the bytes of a KV tile, which have arrived. A lane reads what it has copied itself.
  QUIRE_DEVICE void widen(int stage, int lane) const {
#pragma unroll
    for (int first = 0; first < kSteps; first += kStepsAtOnce) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += kChunksAtOnce) {
        widen_steps(stage, first, min(first + kStepsAtOnce, kSteps), chunk, lane);
      }
    }
  }

 private:
  static constexpr int kPlaces = ceil_div(kRows, 32);
  // At most 32 registers. Where a lane has more chunks of a row, which is then its own, the numbers of four do not
  // reach the bytes of later ones.
  static constexpr int kStepsAtOnce = max(1, 8 / kChunks), kChunksAtOnce = kChunks > 8 ? 4 : kChunks;
  static_assert(kChunks <= 8 || (Split::kLanes == 1 && kChunks <= 16), "a row's bytes lie in one or two atoms");

  // Steps [begin, end), chunks of this lane from `chunk` on.
  QUIRE_DEVICE void widen_steps(int stage, int begin, int end, int chunk, int lane) const {
    const auto exists = [lane](int i) {
      return (i + 1) * Split::kRows <= kRows || i * Split::kRows + Split::row(lane) < kRows;
    };
    uint32_t x[kStepsAtOnce][kChunksAtOnce][4];
#pragma unroll
    for (int i = begin; i < end; ++i) {
      if (!exists(i)) continue;
#pragma unroll
      for (int c = 0; c < min(kChunksAtOnce, kChunks - chunk); ++c) {
        ptx::ld_shared_16(bytes_at(stage, i, chunk + c), x[i - begin][c]);
      }
    }
    __syncwarp();  // every lane has read before any overwrites
#pragma unroll
    for (int i = begin; i < end; ++i) {
      if (!exists(i)) continue;
#pragma unroll
      for (int c = 0; c < min(kChunksAtOnce, kChunks - chunk); ++c) store(stage, i, chunk + c, x[i - begin][c]);
    }
  }

  // The bytes of a row have the last atoms of its numbers of 16 bits. Neighbouring rows are permuted differently, so
  // that eight lanes have eight banks.
  static constexpr int kFirstAtom = Tile::kAtoms - ceil_div(Tile::kCols / 16, 8);
  QUIRE_DEVICE static uint32_t bytes_at(uint32_t tile, int row, int chunk) {
    const int atom = kFirstAtom + (chunk >> 3);
    return tile + atom * Tile::kAtomBytes + row * 128 + (((chunk ^ row * min(Split::kLanes, 4)) & 7) << 4);
  }
  // This lane's chunk c of step i. Neither the row nor the chunk carries into the bits that the lane's own have.
  QUIRE_DEVICE uint32_t bytes_at(int stage, int i, int c) const {
    constexpr int kLanes = Split::kLanes;
    const uint32_t at = (bytes_at_ + stage * Tile::kBytes) ^ ((c * kLanes & 7) << 4);
    return at + (c * kLanes >> 3) * Tile::kAtomBytes + i * Split::kRows * 128;
  }

  template <bool kIsFull>
  QUIRE_DEVICE void copy_rows(int stage, int rest, int lane) const {
    int first = Split::row(lane);
    asm volatile("" : "+r"(first));  // sums with it are not worth a register each through the loop
    const int left = rest - first;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = i * Split::kRows + first;
      const uint64_t chunks = __shfl_sync(0xffffffffu, places_[i * Split::kRows / 32], row % 32);
      if ((i + 1) * Split::kRows > kRows && row >= kRows) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t dst = bytes_at(stage, i, c);
        const void* src = reinterpret_cast<const void*>(base_ + chunks * 16 + c * Split::kLanes * 16);
        if constexpr (kIsFull)
          ptx::cp_async_16(dst, src);
        else
          ptx::cp_async_16(dst, src, i * Split::kRows < left ? 16 : 0);
      }
    }
  }

  QUIRE_DEVICE void store(int stage, int i, int c, const uint32_t (&x)[4]) const {
    const int row = i * Split::kRows, chunk = 2 * c * Split::kLanes;
    const uint32_t at = (wide_at_ + stage * Tile::kBytes) ^ (((chunk ^ row) & 7) << 4);
    const int offset = (chunk >> 3) * Tile::kAtomBytes + row * 128;
    uint32_t wide[4];
    ptx::widen(Kv{}, x[0], wide[0], wide[1]);
    ptx::widen(Kv{}, x[1], wide[2], wide[3]);
    ptx::st_shared_16(at + offset, wide);
    ptx::widen(Kv{}, x[2], wide[0], wide[1]);
    ptx::widen(Kv{}, x[3], wide[2], wide[3]);
    ptx::st_shared_16((at ^ 16) + offset, wide);
  }

  uint32_t wide_at_, bytes_at_;  // in the first stage
  uint64_t base_;                // this lane's column of the head
  // Of a token of this lane in 32: the page's number, and then where its row begins; its row in the page.
  uint32_t places_[kPlaces];
  int row_[kPlaces];
};

// One warp's half of the keys, or of the values, of each KV tile. Keys and values have warps of their own, because
// values stay longer in their stages: keys would wait for them.
template <class V, class Tile, int kStages>
class KvWidener {
 public:
  static constexpr int kArrivals = 2;  // warps

  // `half`: of the rows. `tile`: the ring's first.
  QUIRE_DEVICE KvWidener(const AttentionParams& p, const KvSource& from, RingBarriers<kStages> ring, uint32_t tile,
                         int half, int lane)
      : p_(p), from_(from), ring_(ring), rows_(tile, half * kRows, lane), first_row_(half * kRows), lane_(lane) {}

  // The next KV tiles of a work tile, `most` of them or all that are left.
  QUIRE_DEVICE void widen(const WorkTile& work, KvTileWalk<V>& walk, int most) {
    if (!walk.exists()) return;
    rows_.begin(from_, work.kv_head, lane_);
    rows_.find_pages(p_, work, first_token(walk), lane_);
    bool copies = true, is_copied = false;
#pragma unroll 1
    do {
      if (copies) {
        rows_.find_rows(from_);
        ring_.wait_empty(next_);
        rows_.copy(next_.stage(), work.tile.kv_len - first_token(walk), lane_);
        walk.advance();
        if (walk.exists()) rows_.find_pages(p_, work, first_token(walk), lane_);
      }
      ptx::cp_async_commit();
      if (kIsAhead ? is_copied : copies) {
        const RingPosition<kStages> at = kIsAhead ? next_.before() : next_;
        ptx::cp_async_wait<kIsAhead>();
        rows_.widen(at.stage(), lane_);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ring_.arrive_full(at);
      }
      is_copied = kIsAhead && copies;
      if (copies) next_.advance();
      copies = copies && walk.exists() && --most > 0;
    } while (copies || is_copied);
  }

 private:
  static constexpr int kRows = V::kTileKv / 2;
  static_assert(kRows % 4 == 0, "a warp's first row is a multiple of 4");
  // Whether the copies of a tile start before the tile before it is widened. Of two stages they would wait for the
  // tensor cores to be done with that tile's predecessor, which is when the tile is wanted.
  static constexpr bool kIsAhead = kStages > 2;

  QUIRE_DEVICE int first_token(const KvTileWalk<V>& walk) const { return walk.tile() * V::kTileKv + first_row_; }

  const AttentionParams& p_;
  KvSource from_;
  RingBarriers<kStages> ring_;
  RingPosition<kStages> next_;  // to be copied into
  NarrowRows<V, Tile, kRows> rows_;
  int first_row_, lane_;
};

}  // namespace quire
