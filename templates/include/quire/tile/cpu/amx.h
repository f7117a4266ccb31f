// The matrix unit of x86-64 (AMX): eight tiles of 16 rows of 64 bytes, and the product of two tiles. Each function is
// one instruction. A process asks Linux for permission before it uses tiles: may_use_tiles() in quire/jit/machine.py.
#pragma once
#include "quire/tile/cpu/vector.h"

namespace quire::cpu {

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
constexpr bool kHasTiles = true;
#define QUIRE_TILE(...) asm volatile(__VA_ARGS__)
#else
constexpr bool kHasTiles = false;
#define QUIRE_TILE(...) __builtin_trap()
#endif

// While a UseTiles exists, all tiles of this thread have their full size.
struct UseTiles {
  UseTiles() {
    struct alignas(64) Shapes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    [[maybe_unused]] const Shapes shapes;
    QUIRE_TILE("ldtilecfg %0" ::"m"(shapes));
  }
  ~UseTiles() { QUIRE_TILE("tilerelease"); }
  UseTiles(const UseTiles&) = delete;
};

template <int kTile>
QUIRE_CPU void tile_zero() {
  QUIRE_TILE("tilezero %%tmm%c0" ::"i"(kTile));
}

// Loads and stores a tile: 16 consecutive rows, 1 KB.
template <int kTile>
QUIRE_CPU void tile_load([[maybe_unused]] const void* from) {
  QUIRE_TILE("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(kTile) : "memory");
}

template <int kTile>
QUIRE_CPU void tile_store([[maybe_unused]] void* to) {
  QUIRE_TILE("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(kTile) : "memory");
}

// c[m][n] += sum over k of a[m][k] b[k / 2][n][k % 2]. c is 16 x 16 floats, a is 16 x 32 bf16 numbers. So is b, with
// pairs of neighbours in k side by side. Subnormal numbers count as 0.
template <int kC, int kA, int kB>
QUIRE_CPU void tile_dot() {
  QUIRE_TILE("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#undef QUIRE_TILE

}  // namespace quire::cpu
