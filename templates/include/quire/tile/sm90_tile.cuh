// Tiles in shared memory as the copy engine writes them and wgmma reads them: panels of 64 columns.
#pragma once
#include "quire/core/types.h"

namespace quire {

// kRows x kCols 16-bit elements. A panel row is 128 bytes; its eight 16-byte chunks are permuted by the row (XOR, the
// 128-byte swizzle), which repeats every 8 rows: panels begin at multiples of 1024 bytes. Columns from kCols on in the
// last panel are never read.
template <int kRows_, int kCols_>
struct SwizzledTile {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kPanels = ceil_div(kCols, 64);
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static constexpr int kChunks = kCols / 8;  // of 16 bytes that hold elements, in a row
  static_assert(kRows % 16 == 0 && kCols % 16 == 0, "a tile is made of 16 x 16 blocks");

  uint32_t base;

  QUIRE_DEVICE uint32_t chunk(int row, int col) const {
    return base + (col >> 3) * kPanelBytes + row * 128 + (((col ^ row) & 7) << 4);
  }
};

// Descriptor of a matrix in panels, as wgmma takes it. Only its lower word depends on addresses, and they are added up
// in that word alone. The shuffle tells the compiler that the word is the same in all lanes: it then lives in a uniform
// register, where wgmma wants it, and not in a register that is moved there before each instruction.
struct TileDescriptor {
  uint32_t low;

  // panel_bytes: distance of neighbouring panels, read when the contiguous dimension (of v: columns) spans several.
  QUIRE_DEVICE TileDescriptor(uint32_t address, int panel_bytes)
      : low(__shfl_sync(0xffffffffu, static_cast<uint32_t>(panel_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4), 0)) {}

  QUIRE_DEVICE uint64_t at(int bytes) const {
    constexpr uint64_t kHigh = uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32;  // swizzle 128 bytes; 8 rows are 1024
    return kHigh | (low + static_cast<uint32_t>(bytes >> 4));
  }
};

}  // namespace quire
