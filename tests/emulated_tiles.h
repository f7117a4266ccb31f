// quire/tile/cpu/amx.h for machines without AMX: the instructions in C++, number by number as Intel's manual has them.
#pragma once
#include "quire/tile/cpu/vector.h"

namespace quire::cpu {

constexpr bool kHasTiles = true;

struct Tile {
  uint8_t rows[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local bool tiles_are_shaped = false;

inline Tile& shaped_tile(int number) {
  if (!tiles_are_shaped) __builtin_trap();  // as a tile instruction without ldtilecfg
  return tiles[number];
}

struct UseTiles {
  UseTiles() {
    memset(tiles, 0, sizeof(tiles));
    tiles_are_shaped = true;
  }
  ~UseTiles() { tiles_are_shaped = false; }
  UseTiles(const UseTiles&) = delete;
};

template <int kTile>
void tile_zero() {
  shaped_tile(kTile) = {};
}

template <int kTile>
void tile_load(const void* from) {
  memcpy(&shaped_tile(kTile), from, sizeof(Tile));
}

template <int kTile>
void tile_store(void* to) {
  memcpy(to, &shaped_tile(kTile), sizeof(Tile));
}

// A number of bf16 in word `word` of a row; a subnormal one is 0.
inline float tile_number(const uint8_t* row, int word, int half) {
  uint16_t bits;
  memcpy(&bits, row + word * 4 + half * 2, 2);
  return __builtin_bit_cast(float, (bits & 0x7f80) == 0 ? 0u : static_cast<uint32_t>(bits) << 16);
}

template <int kC, int kA, int kB>
void tile_dot() {
  const Tile &a = shaped_tile(kA), &b = shaped_tile(kB);
  for (int m = 0; m < 16; ++m) {
    float c[16];
    memcpy(c, shaped_tile(kC).rows[m], sizeof(c));
    for (int n = 0; n < 16; ++n) {
      for (int k = 0; k < 16; ++k) {
        c[n] += tile_number(a.rows[m], k, 0) * tile_number(b.rows[k], n, 0) +
                tile_number(a.rows[m], k, 1) * tile_number(b.rows[k], n, 1);
      }
    }
    memcpy(shaped_tile(kC).rows[m], c, sizeof(c));
  }
}

}  // namespace quire::cpu
