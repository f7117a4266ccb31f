// Values of 8 bits as operand b of wgmma: rows are dims, columns are tokens. They come token by token from memory, and
// the loading warps transpose them in shared memory.
//
// ldmatrix transposes pairs of bytes: a lane gets two neighbouring dims of two neighbouring tokens. Of two such
// registers, 8 tokens apart, byte permutes make four tokens of one dim and of the other. These are tokens 2i, 2i + 1,
// 2i + 8 and 2i + 9 of 16, which are the columns of a lane's weights: columns 4i to 4i + 3 of the transposed tile.
#pragma once
#include "quire/ptx/copy.cuh"
#include "quire/tile/hopper/kv_loader.cuh"
#include "quire/tile/hopper/kv_tiles.cuh"
#include "quire/tile/hopper/kv_widen.cuh"

namespace quire {

// kRows tokens of kDims dims, which become columns of To.
template <int kRows, int kDims, class To>
class TransposedRows {
 public:
  using From = SwizzledTile<kRows, kDims, 8>;
  static_assert(kRows % 16 == 0 && kDims % 32 == 0, "four matrices of 8 tokens x 16 dims at a time");

  // from, to: addresses of the first tiles.
  QUIRE_DEVICE TransposedRows(uint32_t from, uint32_t to, int lane) {
    const int matrix = lane / 8, row = lane % 8;
    from_ = from + lane_at(lane);
    // The first four lanes of a column store even dims first, the others odd dims: a store's eight rows then differ in
    // their permutation.
    const int dim = (matrix >> 1) * 16 + 2 * row + ((matrix & 1) ^ (row >> 2));
    to_ = to + dim * 128 + ((dim & 7) << 4);
    order_ = lane < 16 ? 0x6420 : 0x7531;
  }

  // Transposes the tile at `from` bytes from the first one to columns from 16 * `first` on of the one at `to` bytes.
  // Tokens from `rest` on do not exist and become zeros, because 0 * NaN is NaN.
  QUIRE_DEVICE void transpose(int from, int to, int first, int rest) const {
    if (rest < kRows) clear(from, max(rest, 0));
    uint32_t src = from_ + from;
#pragma unroll 1
    for (int chunk = first; chunk < first + kRows / 16; ++chunk) {
      const uint32_t dst = (to_ ^ ((chunk & 7) << 4)) + to + (chunk >> 3) * To::kAtomBytes;
#pragma unroll
      for (int block = 0; block < kBlocks; block += kTogether) {
        uint32_t x[kTogether][4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int col = 2 * (block + i);
          ptx::ldmatrix_x4_trans(x[i], (src ^ ((col & 7) << 4)) + (col >> 3) * From::kAtomBytes);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const uint32_t y[4] = {__byte_perm(x[i][0], x[i][1], order_), __byte_perm(x[i][0], x[i][1], order_ ^ 0x1111),
                                 __byte_perm(x[i][2], x[i][3], order_), __byte_perm(x[i][2], x[i][3], order_ ^ 0x1111)};
          ptx::st_matrix(dst + (block + i) * 32 * 128, y);
        }
      }
      src += 16 * 128;
    }
  }

 private:
  static constexpr int kBlocks = kDims / 32, kTogether = kBlocks % 2 == 0 ? 2 : 1;

  // Zeros in the tokens from `rest` on, before they are transposed.
  QUIRE_DEVICE void clear(int from, int rest) const {
    const uint32_t zeros[4] = {};
    const int lane = ptx::lane_id();
    const From tile = {from_ - lane_at(lane) + from};
#pragma unroll 1
    for (int i = lane; i < (kRows - rest) * From::kChunks; i += 32) {
      const int row = i / From::kChunks;
      ptx::st_shared_16(tile.chunk(rest + row, i - row * From::kChunks), zeros);
    }
    __syncwarp();
  }

  // Where this lane reads the first matrices of a tile.
  QUIRE_DEVICE static uint32_t lane_at(int lane) {
    const int matrix = lane / 8, row = lane % 8;
    return ((matrix & 1) * 8 + row) * 128 + (((matrix >> 1) ^ row) << 4);
  }

  uint32_t from_, to_, order_;
};

// Loads one warp's half of the values of each KV tile into the warp's ring, and transposes them into the ring that
// the computing warps read.
template <class V, class To, int kStages, int kRawStages>
class ValueTransposer {
 public:
  static constexpr int kRows = V::kTileKv / 2;
  using Rows = TransposedRows<kRows, V::kHeadDimVo, To>;
  static constexpr int kRawBytes = Rows::From::kBytes;
  static_assert((kStages & (kStages - 1)) == 0 && (kRawStages & (kRawStages - 1)) == 0, "one number counts both rings");

  // `raw`: the address of this warp's ring, `arrived`: of an mbarrier for each of its stages. `to`: the address of the
  // first transposed tile.
  QUIRE_DEVICE ValueTransposer(const AttentionParams& p, const KvSource& from, RingBarriers<kStages> ring, uint32_t to,
                               uint32_t raw, uint32_t arrived, int half, int lane)
      : p_(p), from_(from), ring_(ring), rows_(raw, to, lane), raw_(raw), arrived_(arrived), half_(half) {}

  // The KV tiles of a work tile.
  QUIRE_DEVICE void run(const WorkTile& work, KvTileWalk<V>& walk) {
    if (!walk.exists()) return;
    Bytes bytes(p_, from_, work, ptx::lane_id());
    bytes.prefetch_pages(2 * walk.tile() + half_);
    int rest = work.tile.kv_len - (2 * walk.tile() + half_) * kRows;  // all later KV tiles are full
    int ahead = 0;                                                    // KV tiles whose bytes are in flight
#pragma unroll 1
    do {
      const bool starts = walk.exists();
      if (starts) start(bytes, walk, {done_ + ahead}), ++ahead;
      if (starts && ahead < kRawStages) continue;
      const RingPosition<kRawStages> raw = {done_};
      const RingPosition<kStages> at = {done_};
      wait_bytes(raw, ahead);
      ring_.wait_empty(at);
      rows_.transpose(raw.stage() * kRawBytes, at.stage() * To::kBytes, half_ * kRows / 16, rest);
      ptx::fence_proxy_async();
      __syncwarp();
      if (ptx::lane_id() == 0) ring_.arrive_full(at);
      ++done_, --ahead, rest = kRows;
    } while (ahead > 0 || walk.exists());
  }

 private:
  static constexpr KvLoadPath kLoadPath = kv_load_path<V>();
  static constexpr bool kIsBoxed = kLoadPath != KvLoadPath::kGather;
  using Bytes =
      typename conditional<kIsBoxed, KvLoader<V, kLoadPath, kRows>, Fp8Gather<V, typename Rows::From, kRows>>::type;

  // Starts to copy the bytes of a KV tile, and then to find the bytes of the next one.
  QUIRE_DEVICE void start(Bytes& bytes, KvTileWalk<V>& walk, RingPosition<kRawStages> at) {
    bytes.resolve_pages();
    const uint32_t to = raw_ + at.stage() * kRawBytes;
    bytes.load(typename Rows::From{to}, arrived_ + 8 * at.stage());
    walk.advance();
    if (walk.exists()) bytes.prefetch_pages(2 * walk.tile() + half_);
  }

  QUIRE_DEVICE void wait_bytes(RingPosition<kRawStages> at, int ahead) const {
    if constexpr (kIsBoxed) {
      ptx::mbarrier_wait(arrived_ + 8 * at.stage(), at.parity());
    } else {
      static_assert(kRawStages <= 2, "one later copy at most");
      if (ahead > 1) {
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      __syncwarp();  // lanes read what others have copied
    }
  }

  const AttentionParams& p_;
  KvSource from_;
  RingBarriers<kStages> ring_;
  int done_ = 0;  // KV tiles that have been transposed: the next one's place in both rings
  Rows rows_;
  uint32_t raw_, arrived_;
  int half_;
};

}  // namespace quire
