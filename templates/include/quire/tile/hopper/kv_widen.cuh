// Loads keys and values of 8 bits. The warps of the loading warpgroup copy them to shared memory and widen them there
// to fp16, in place: the bytes of a row are copied into the space of its 16-bit numbers.
#pragma once
#include "quire/ptx/math.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/kv_tiles.cuh"
#include "quire/tile/hopper/kv_loader.cuh"

namespace quire {

// Whether the copy engine loads the bytes: for heads of 128 dims, whose bytes fill rows of swizzle atoms.
template <class V>
constexpr KvLoadPath fp8_load_path() {
  return V::kHeadDimQk == 128 && V::kHeadDimVo == 128 ? kv_load_path<V>() : KvLoadPath::kGather;
}

// One warp's rows of a KV tile: kRows of Tile's, from a multiple of 8 on. Their bytes lie in the last atoms of Tile,
// in its swizzle. Eight lanes have a chunk of 16 bytes of eight rows each, which the swizzle puts into different
// banks; so it does with the two chunks that become of it.
template <class V, class Tile, int kRows>
class Fp8Rows {
  using Kv = typename V::Kv;
  static constexpr int kChunks = Tile::kCols / 16, kGroups = ceil_div(kChunks, 4);
  // A lane has whole rows, or four chunks of each row where there are fewer than 32 rows at a time.
  static constexpr int kSharers = kRows % 32 != 0 && (kChunks == 8 || kChunks == 16) ? kGroups : 1,
                       kStep = 32 / kSharers;
  static_assert(kRows % 8 == 0 && kChunks <= 16, "a warp's rows begin where the swizzle does");

 public:
  static constexpr int kFirstAtom = Tile::kAtoms - ceil_div(kChunks, 8);  // of bytes

  // `first`: the address of the first row in the ring's first tile.
  QUIRE_DEVICE Fp8Rows(uint32_t first, int lane)
      : row_(lane % kStep), lane_at_(first + lane % kStep * 128 + ((lane & 7) << 4)), part_(lane / kStep) {}

  // Widens the bytes of a KV tile. Rows from `rest` on have no token and become zeros.
  QUIRE_DEVICE void widen(int stage, int rest) const {
    if (rest < kRows) clear(stage, rest);
    const int tile = stage * Tile::kBytes;
#pragma unroll
    for (int row = 0; row < kRows; row += kStep) {
      if (row + kStep > kRows && row + row_ >= kRows) continue;
      // The 16-bit numbers of four chunks of bytes fill an atom, whose bytes were read before.
#pragma unroll
      for (int group = 0; group < kGroups; group += kSharers) {
        uint32_t x[4][4];
#pragma unroll
        for (int c = 0; c < min(4, kChunks - 4 * group); ++c) {
          ptx::ld_shared_16(bytes_at(tile + row * 128, 4 * group + c), x[c]);
        }
        if constexpr (kSharers > 1) __syncwarp();
#pragma unroll
        for (int c = 0; c < min(4, kChunks - 4 * group); ++c) store(tile + row * 128, group, c, x[c]);
      }
    }
  }

 private:
  // The swizzle's XOR touches three bits of the address. This lane's chunks of bytes, and of 16-bit numbers in an atom:
  QUIRE_DEVICE uint32_t bytes_at(int offset, int chunk) const {
    const uint32_t at = lane_at_ + offset;
    if constexpr (kSharers == 1) return (at ^ (chunk & 7) << 4) + (kFirstAtom + (chunk >> 3)) * Tile::kAtomBytes;
    return (at ^ (part_ & 1) << 6 ^ chunk << 4) + (kFirstAtom + (part_ >> 1)) * Tile::kAtomBytes;
  }
  QUIRE_DEVICE uint32_t wide_at(int offset, int group, int chunk) const {
    const uint32_t at = (lane_at_ + offset ^ chunk << 4) + group * Tile::kAtomBytes;
    return kSharers == 1 ? at : at + part_ * Tile::kAtomBytes;
  }

  QUIRE_DEVICE void store(int offset, int group, int c, const uint32_t (&x)[4]) const {
    uint32_t wide[4];
    ptx::widen(Kv{}, x[0], wide[0], wide[1]);
    ptx::widen(Kv{}, x[1], wide[2], wide[3]);
    ptx::st_shared_16(wide_at(offset, group, 2 * c), wide);
    ptx::widen(Kv{}, x[2], wide[0], wide[1]);
    ptx::widen(Kv{}, x[3], wide[2], wide[3]);
    ptx::st_shared_16(wide_at(offset, group, 2 * c + 1), wide);
  }

  QUIRE_DEVICE void clear(int stage, int rest) const {
    const uint32_t zeros[4] = {};
#pragma unroll 1
    for (int row = 0; row < kRows; row += kStep) {
      if (row + row_ < rest || row + row_ >= kRows) continue;
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks / kSharers; ++chunk) {
        ptx::st_shared_16(bytes_at(stage * Tile::kBytes + row * 128, chunk), zeros);
      }
    }
  }

  int row_;
  uint32_t lane_at_;  // this lane's first row of the first stage, with the row's permutation
  int part_;          // this lane's part of a row that several lanes share
};

// Gathers the bytes of a warp's rows, as KvLoader does. Rows of tokens from kv_len on get the last token's bytes.
template <class V, class Tile, int kRows>
class Fp8Gather {
  // Lanes that share a row: rows of four chunks are copied in such an order that eight lanes have eight banks.
  static constexpr int kChunks = Tile::kCols / 16, kLanes = min(kChunks & -kChunks, 32), kStep = 32 / kLanes;
  QUIRE_DEVICE static int row(int lane) { return kLanes == 4 ? (lane >> 2 & 1) * 4 | lane >> 3 : lane / kLanes; }
  QUIRE_DEVICE static int chunk(int lane) { return lane % kLanes; }

 public:
  QUIRE_DEVICE Fp8Gather(const AttentionParams& p, const KvSource& from, const WorkTile& work, int lane)
      : p_(p), from_(from), work_(work), lane_(lane) {
    base_ = reinterpret_cast<uint64_t>(from.base) + work.kv_head * from.head_stride + chunk(lane) * 16;
    asm("" : "+l"(base_));  // one register pair, not a sum that each row would add up anew
  }

  // i: number of a run of kRows tokens.
  QUIRE_DEVICE void prefetch_pages(int i) {
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      const int token = min(i * kRows + j * 32 + lane_, work_.tile.kv_len - 1), index = p_.page.div(token);
      row_[j] = V::kPaged == 0 ? work_.tile.kv_first + token : token - index * static_cast<int>(p_.page.divisor);
      if constexpr (V::kPaged != 0) places_[j] = p_.kv_indices[work_.tile.kv_first + index];
    }
  }

  // Computes offsets in chunks of 16 bytes. The host refuses a cache of more than 2^32 chunks.
  QUIRE_DEVICE void resolve_pages() {
#pragma unroll
    for (int j = 0; j < kPlaces; ++j) {
      const uint32_t page = V::kPaged == 0 ? 0 : places_[j] * static_cast<uint32_t>(from_.page_stride >> 4);
      places_[j] = page + row_[j] * static_cast<uint32_t>(from_.token_stride >> 4);
    }
  }

  // dst: the tile of the bytes.
  template <class Dst>
  QUIRE_DEVICE void load(Dst dst, uint32_t) const {
    int lane_row = row(lane_);
    asm volatile("" : "+r"(lane_row));  // sums with it are not worth a register each through the loop
    const int lane_chunk = chunk(lane_);
    const uint32_t to =
        dst.base + (lane_chunk >> 3) * Tile::kAtomBytes + lane_row * 128 + (((lane_chunk ^ lane_row) & 7) << 4);
#pragma unroll
    for (int row = 0; row < kRows; row += kStep) {
      const uint64_t chunks = __shfl_sync(0xffffffffu, places_[row / 32], (row + lane_row) % 32);
      if (row + kStep > kRows && row + lane_row >= kRows) continue;
#pragma unroll
      for (int c = 0; c < kChunks; c += kLanes) {
        const uint32_t at = (to ^ (((c ^ row) & 7) << 4)) + (c >> 3) * Tile::kAtomBytes + row * 128;
        ptx::cp_async_16(at, reinterpret_cast<const void*>(base_ + chunks * 16 + c * 16));
      }
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr int kPlaces = ceil_div(kRows, 32);

  const AttentionParams& p_;
  const KvSource& from_;
  const WorkTile& work_;
  uint64_t base_;  // this lane's column of the head
  int lane_;
  // Of a token of this lane in 32: the page's number, and then where its row begins; its row in the page.
  uint32_t places_[kPlaces];
  int row_[kPlaces];
};

// Loads one warp's half of the keys, or of the values, of each KV tile. Keys and values have warps of their own,
// because values stay longer in their stages: keys would wait for them.
template <class V, class Tile, int kStages>
class KvWidener {
 public:
  // `half`: which half of the rows. `tile`: the address of the ring's first tile. `arrived`: an mbarrier for each
  // stage, at which this warp alone arrives.
  QUIRE_DEVICE KvWidener(const AttentionParams& p, const KvSource& from, RingBarriers<kStages> ring, uint32_t tile,
                         uint32_t arrived, int half, int lane)
      : p_(p),
        from_(from),
        ring_(ring),
        rows_(tile + half * kRows * 128, lane),
        bytes_at_(tile + half * kRows * 128 + Rows::kFirstAtom * Tile::kAtomBytes),
        arrived_(arrived),
        half_(half),
        lane_(lane) {}

  // Loads and widens the next KV tiles of a work tile: `most` of them, or all that are left.
  QUIRE_DEVICE void widen(const WorkTile& work, KvTileWalk<V>& walk, int most) {
    if (!walk.exists()) return;
    Bytes bytes(p_, from_, work, lane_);
    bytes.prefetch_pages(2 * walk.tile() + half_);
    int rest = work.tile.kv_len - (2 * walk.tile() + half_) * kRows;  // all later KV tiles are full
    int ahead = 0;                                                    // KV tiles whose bytes are in flight
#pragma unroll 1
    do {
      const bool starts = walk.exists() && most > 0;
      if (starts) start(bytes, walk), --most, ++ahead;
      if (starts && ahead <= kAhead) continue;
      wait_bytes(ahead > 1);
      rows_.widen(next_.stage(), rest);
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane_ == 0) ring_.arrive_full(next_);
      next_.advance();
      --ahead, rest = kRows;
    } while (ahead > 0 || (walk.exists() && most > 0));
  }

 private:
  static constexpr int kRows = V::kTileKv / 2;
  static constexpr KvLoadPath kLoadPath = fp8_load_path<V>();
  static constexpr bool kIsBoxed = kLoadPath != KvLoadPath::kGather;
  using Rows = Fp8Rows<V, Tile, kRows>;
  using Bytes = typename conditional<kIsBoxed, KvLoader<V, kLoadPath, kRows>, Fp8Gather<V, Tile, kRows>>::type;
  using BytesTile = typename conditional<kIsBoxed, SwizzledTile<kRows, Tile::kCols, 8>, Tile>::type;
  // Whether the copies of a KV tile start before its predecessor is widened. With two stages they would wait until the
  // tensor cores have read the tile before the predecessor, which is when the tile itself is needed.
  static constexpr int kAhead = kStages > 2;

  // Starts to copy the bytes of a KV tile, and then to find the bytes of the next one.
  QUIRE_DEVICE void start(Bytes& bytes, KvTileWalk<V>& walk) {
    bytes.resolve_pages();
    ring_.wait_empty(copied_);
    const uint32_t to = bytes_at_ + copied_.stage() * Tile::kBytes;
    bytes.load(BytesTile{to}, arrived_ + 8 * copied_.stage());
    copied_.advance();
    walk.advance();
    if (walk.exists()) bytes.prefetch_pages(2 * walk.tile() + half_);
  }

  // Waits for the bytes of the KV tile that is widened next. `is_ahead`: the copies of another KV tile are in flight.
  QUIRE_DEVICE void wait_bytes(bool is_ahead) const {
    if constexpr (kIsBoxed) {
      ptx::mbarrier_wait(arrived_ + 8 * next_.stage(), next_.parity());
      return;
    }
    if (kAhead > 0 && is_ahead) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncwarp();  // lanes read what others have copied
  }

  const AttentionParams& p_;
  KvSource from_;
  RingBarriers<kStages> ring_;
  RingPosition<kStages> copied_, next_;  // the stages that are copied into and widened next
  Rows rows_;
  uint32_t bytes_at_, arrived_;  // of the first stage
  int half_, lane_;
};

}  // namespace quire
