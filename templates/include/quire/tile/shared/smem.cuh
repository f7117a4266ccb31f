// Tiles in shared memory, and the 16 x 16 blocks of 16-bit elements that one ldmatrix reads from them. Head dims that
// are no multiple of 16 end in a block of which half is zeros.
#pragma once
#include "quire/ptx/copy.cuh"

namespace quire {

// How the rows of a tile lie in shared memory.
// kRows: one row after another, as cp.async writes them and ldmatrix reads them.
// kAtoms: swizzle atoms of 8 rows x 128 bytes, those of the same columns below each other, as the copy engine writes
// them and wgmma reads them. Such a tile begins at a multiple of 1024 bytes.
enum class TileLayout { kRows, kAtoms };

// A head's dims, rounded up to whole blocks of 16.
QUIRE_HD constexpr int whole_blocks(int head_dim) { return ceil_div(head_dim, 16) * 16; }

// kRows x kCols elements of kBits bits, in chunks of 16 bytes. An instruction reads eight neighbouring rows of a chunk
// at a time, so these fall into different banks: the chunks of a row of whole 128 bytes are permuted by the row (XOR,
// the 128-byte swizzle), and any other row is padded to an odd number of chunks.
template <int kRows_, int kCols_, int kBits = 16, TileLayout kLayout = TileLayout::kRows>
struct SmemTile {
  static constexpr bool kInAtoms = kLayout == TileLayout::kAtoms;
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kChunks = kCols * kBits / 128;  // in a row
  static constexpr bool kSwizzled = kInAtoms || kChunks % 8 == 0;
  static constexpr int kRowBytes = kInAtoms ? 128 : (kSwizzled ? kChunks : kChunks | 1) * 16;
  // Atoms side by side; columns from kCols on in the last one are never read.
  static constexpr int kAtoms = ceil_div(kChunks, 8), kAtomCols = 1024 / kBits, kAtomBytes = kRows * 128;
  static constexpr int kBytes = kInAtoms ? kAtoms * kAtomBytes : kRows * kRowBytes;
  static_assert(kRows % 16 == 0 && kCols % 16 == 0, "a tile is made of 16 x 16 blocks");

  uint32_t base;

  QUIRE_DEVICE uint32_t chunk(int row, int col) const {
    if constexpr (kInAtoms) return base + (col >> 3) * kAtomBytes + row * 128 + (((col ^ row) & 7) << 4);
    return base + row * kRowBytes + ((kSwizzled ? col ^ (row & 7) : col) << 4);
  }
};

template <int kRows, int kCols, int kBits = 16>
using SwizzledTile = SmemTile<kRows, kCols, kBits, TileLayout::kAtoms>;

// kCols neighbouring columns of a tile, whose `base` is moved by the bytes of the columns before them: a multiple of
// 128, so that rows are permuted as in the whole tile.
template <class Tile, int kCols_>
struct TileSlice : Tile {
  static constexpr int kCols = kCols_;
};

// The order in which ldmatrix visits the 8 x 8 quarters of a 16 x 16 block. Left half first: as operand A wants them,
// and operand B from a transposed block. Top half first: as operand B wants them from rows of b^T. The registers of one
// instruction's operand are then neighbours; otherwise each would cost a move.
enum class Quarters { kLeftFirst, kTopFirst };

// One lane's view of a tile's 16 x 16 blocks: the row that the lane points ldmatrix at.
template <class Tile, Quarters kOrder = Quarters::kLeftFirst>
struct BlockCursor {
  uint32_t lane_base;

  QUIRE_DEVICE BlockCursor(Tile tile, int lane)
      : lane_base(kOrder == Quarters::kLeftFirst ? tile.chunk(lane & 15, lane >> 4)
                                                 : tile.chunk((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1)) {}

  // The swizzle's XOR touches three bits of the address: two bits of a block's column pass through it, and the others
  // are added.
  QUIRE_DEVICE uint32_t at(int row_block, int col_block) const {
    const uint32_t row = row_block * 16 * Tile::kRowBytes, col = col_block * 32;
    if constexpr (Tile::kSwizzled) return (lane_base ^ (col & 96)) + (col & ~127u) + row;
    return lane_base + col + row;
  }

  // Loads block k of columns of the first kM blocks of rows, as operand A.
  template <int kM>
  QUIRE_DEVICE void get(int k, uint32_t (&a)[kM][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) ptx::ldmatrix_x4(a[m], at(m, k));
  }
};

// How kThreads threads copy rows of kChunks chunks: kLanes neighbours share a row, a power of two so that no division
// is needed.
template <int kThreads, int kChunks>
struct RowSplit {
  static constexpr int kLanes = min(kChunks & -kChunks, kThreads);
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kChunksPerLane = kChunks / kLanes;

  int row, lane;

  QUIRE_DEVICE explicit RowSplit(int thread) : row(thread / kLanes), lane(thread % kLanes) {}
};

}  // namespace quire
