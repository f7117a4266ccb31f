// Descriptors of swizzled tiles in shared memory, as wgmma takes them.
#pragma once
#include "quire/tile/shared/smem.cuh"

namespace quire {

// The descriptor of a SwizzledTile or of a part of it. Only the lower word depends on addresses, so that addresses are
// added in that word alone. The shuffle tells the compiler that the word is the same in all lanes. It then lives in a
// uniform register, where wgmma wants it, instead of being moved there before each instruction.
struct TileDescriptor {
  uint32_t low;

  // atom_bytes: the distance of neighbouring atoms, read when the contiguous dimension (of v: columns) spans several.
  QUIRE_DEVICE TileDescriptor(uint32_t address, int atom_bytes)
      : low(__shfl_sync(0xffffffffu, static_cast<uint32_t>(atom_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4), 0)) {}

  QUIRE_DEVICE uint64_t at(int bytes) const {
    constexpr uint64_t kHigh = uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32;  // swizzle 128 bytes; 8 rows are 1024
    return kHigh | (low + static_cast<uint32_t>(bytes >> 4));
  }
};

}  // namespace quire
