// Tiles of 16-bit elements in shared memory, and the 16 x 16 blocks that one ldmatrix reads from them.
#pragma once
#include "quire/ptx/copy.cuh"

namespace quire {

// kRows x kCols elements. The eight rows that ldmatrix reads at a time must fall into different banks: where a row is a
// multiple of 128 bytes its 16-byte chunks are permuted by the row (XOR), else rows are 16 bytes longer than their
// content, which makes the row pitch an odd number of chunks.
template <int kRows_, int kCols_>
struct SmemTile {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr bool kSwizzled = kCols % 64 == 0;
  static constexpr int kChunks = kCols / 8;  // of 16 bytes, in a row
  static constexpr int kRowBytes = kCols * 2 + (kSwizzled ? 0 : 16);
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kCols % 16 == 0 && kRows % 16 == 0, "a tile is made of 16 x 16 blocks");
  static_assert(kBytes % 128 == 0, "the permutation needs the next tile to begin at a multiple of 128 bytes");

  uint32_t base;

  QUIRE_DEVICE uint32_t chunk(int row, int col) const {
    return base + row * kRowBytes + ((kSwizzled ? col ^ (row & 7) : col) << 4);
  }
};

// In which order ldmatrix visits the 8 x 8 quarters of a 16 x 16 block: left half first, as operand A wants them (and
// operand B from a transposed block), or top half first, as B wants them from rows of b^T. The registers of one
// instruction's operand are then neighbours; if they were not, each would cost a move.
enum class Quarters { kLeftFirst, kTopFirst };

// One lane's view of a tile's 16 x 16 blocks: the row that it points ldmatrix at.
template <class Tile, Quarters kOrder = Quarters::kLeftFirst>
struct BlockCursor {
  uint32_t lane_base;

  QUIRE_DEVICE BlockCursor(Tile tile, int lane)
      : lane_base(kOrder == Quarters::kLeftFirst ? tile.chunk(lane & 15, lane >> 4)
                                                 : tile.chunk((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1)) {}

  // The XOR touches three bits, so two of a block's column bits pass through it and the others are added.
  QUIRE_DEVICE uint32_t at(int row_block, int col_block) const {
    const uint32_t row = row_block * 16 * Tile::kRowBytes, col = col_block * 32;
    if constexpr (Tile::kSwizzled) return (lane_base ^ (col & 96)) + (col & ~127u) + row;
    return lane_base + col + row;
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
