// Matrix fragments of keys and values of 4 bits with scales (NVFP4): ldmatrix brings a lane eight numbers with one
// 32-bit word, which become pairs of fp16 times 2^-14, and then times their scale. Both steps are exact. What a product
// with such keys lacks, kNvfp4Unit, is a factor of q (fragments.cuh), and that of values is multiplied into o.
//
// The halves of pair i of a word are numbers i and i + 4. Sign and magnitude are moved within the bytes of a word, four
// numbers at a time, to where fp16's upper byte has them: seven instructions, and four that put these bytes into pairs,
// for eight numbers. In keys the eight numbers are neighbouring dims of one key, and pairs i and i + 1 are an operand
// for q with the same order of dims. In values, read transposed, the halves of a word are four neighbouring dims of two
// tokens, so that pair i is an operand of column i as it is.
#pragma once
#include "quire/ptx/copy.cuh"
#include "quire/ptx/math.cuh"
#include "quire/ptx/warp.cuh"
#include "quire/tile/shared/gemm.cuh"

namespace quire {

constexpr float kNvfp4Unit = 16384.f;

// kRows x kCols numbers of 4 bits, followed by their scales: kCols / kScaledNumbers bytes a row, without gaps.
template <int kRows_, int kCols_>
struct ScaledTile : SmemTile<kRows_, kCols_, 4> {
  using Numbers = SmemTile<kRows_, kCols_, 4>;
  static constexpr int kRowScales = kCols_ / kScaledNumbers;
  static constexpr int kBytes = Numbers::kBytes + kRows_ * kRowScales;
  static_assert(kCols_ % 64 == 0, "the scales of a row are whole words");

  QUIRE_DEVICE uint32_t scales() const { return this->base + Numbers::kBytes; }
};

// A tile of keys or values in shared memory.
template <int kRows, int kCols, int kBits>
using KvTile = typename conditional<kBits == 4, ScaledTile<kRows, kCols>, SmemTile<kRows, kCols, kBits>>::type;

// A BlockCursor of numbers, whose blocks are 16 rows x 64 dims, beside the tile's scales.
template <class Tile, Quarters kOrder = Quarters::kLeftFirst>
struct ScaledCursor : BlockCursor<Tile, kOrder> {
  uint32_t scales;

  QUIRE_DEVICE ScaledCursor(Tile tile, int lane) : BlockCursor<Tile, kOrder>(tile, lane), scales(tile.scales()) {}
};

template <class Tile, int kBits, Quarters kOrder = Quarters::kLeftFirst>
using KvCursor = typename conditional<kBits == 4, ScaledCursor<Tile, kOrder>, BlockCursor<Tile, kOrder>>::type;

QUIRE_DEVICE uint32_t times(uint32_t pair, uint32_t scales) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(pair), "r"(scales));
  return y;
}

// The four pairs of a word of eight numbers, times 2^-14 and their scales.
QUIRE_DEVICE void widen_nvfp4(uint32_t word, uint32_t scales, uint32_t (&pairs)[4]) {
  const uint32_t even = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0e0e0e0eu);
  const uint32_t odd = (word & 0x80808080u) | ((word >> 3) & 0x0e0e0e0eu);
  pairs[0] = times(__byte_perm(even, 0, 0x2404), scales), pairs[1] = times(__byte_perm(odd, 0, 0x2404), scales);
  pairs[2] = times(__byte_perm(even, 0, 0x3414), scales), pairs[3] = times(__byte_perm(odd, 0, 0x3414), scales);
}

// kWords words from an address that is a multiple of their size, or of the largest power of two in it.
template <int kWords>
QUIRE_DEVICE void ld_shared_words(uint32_t (&x)[kWords], uint32_t src) {
#pragma unroll
  for (int i = 0; i < kWords;) {
    if constexpr (kWords % 4 == 0) {
      const uint4 y = ptx::ld_shared_16(src + 4 * i);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w, i += 4;
    } else if constexpr (kWords % 2 == 0) {
      const uint2 y = ptx::ld_shared_8(src + 4 * i);
      x[i] = y.x, x[i + 1] = y.y, i += 2;
    } else {
      x[i] = __float_as_uint(ptx::ld_shared(src + 4 * i)), ++i;
    }
  }
}

// s [kM * 16, kN] = q * k^T for keys kN * block .. of a tile. One ldmatrix reads 16 keys x 64 dims: {keys 0..7, 8..15}
// x {dims 0..31, 32..63}. A lane has dims 8 c .. 8 c + 7 of each 32: those of scale 2 * (dim / 32) + c / 2.
template <class T, int kM, int kN, int kQk, class Query, class Cursor>
QUIRE_DEVICE void mma_nvfp4_keys(Accumulator<kM, kN>& s, const Query& q, const Cursor& keys, int block, int lane) {
  constexpr int kWords = kQk / 64;
  const uint32_t chosen = (lane & 2) != 0 ? 0x3311 : 0x2200;
  const uint32_t scales = keys.scales + (block * kN + lane / 4) * (kWords * 4);
  uint32_t words[kN / 8][kWords];
#pragma unroll
  for (int n = 0; n < kN / 8; ++n) ld_shared_words(words[n], scales + n * 8 * (kWords * 4));
  s.clear();
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    uint32_t x[kN / 16][4], scale[kN / 8][2];
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) ptx::ldmatrix_x4(x[n], keys.at(block * (kN / 16) + n, k));
#pragma unroll
    for (int n = 0; n < kN / 8; ++n)
      ptx::widen(e4m3_t{}, __byte_perm(words[n][k], 0, chosen), scale[n][0], scale[n][1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t first[kM][4], second[kM][4];
      q.get(4 * k + 2 * j, first);
      q.get(4 * k + 2 * j + 1, second);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        uint32_t pairs[4];
        widen_nvfp4(x[n / 2][n % 2 * 2 + j], scale[n][j], pairs);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16(T{}, s.at[m][n], first[m], pairs[0], pairs[1]);
          ptx::mma_m16n8k16(T{}, s.at[m][n], second[m], pairs[2], pairs[3]);
        }
      }
    }
  }
  q.unscale(s);
}

// o [kM * 16, kVo] += p * v for values 16 * block .. of a tile; p [kM * 16, 16] in fragments. One ldmatrix reads 16
// tokens x 64 dims: tokens 0..7 of dims 0..31, tokens 8..15 of them, then of dims 32..63. A word is tokens 2 c and
// 2 c + 1, of dims 4 g .. 4 g + 3: those of scale 2 * (dim / 32) + g / 4.
template <class T, int kM, int kVo, class Cursor>
QUIRE_DEVICE void mma_nvfp4_values(Accumulator<kM, kVo>& o, const uint32_t (&p)[kM][4], const Cursor& values, int block,
                                   int lane) {
  constexpr int kWords = kVo / 64;
  const uint32_t chosen = (lane & 16) != 0 ? 0x7351 : 0x6240;
  const uint32_t scales = values.scales + (block * 16 + 2 * (lane & 3)) * (kWords * 4);
  uint32_t words[2][2 * kWords];  // of two neighbouring tokens each
  ld_shared_words(words[0], scales);
  ld_shared_words(words[1], scales + 8 * (kWords * 4));
#pragma unroll
  for (int n = 0; n < kWords; ++n) {
    uint32_t x[4], scale[2][2];
    ptx::ldmatrix_x4_trans(x, values.at(block, n));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ptx::widen(e4m3_t{}, __byte_perm(words[i][n], words[i][kWords + n], chosen), scale[0][i], scale[1][i]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t low[4], high[4];
      widen_nvfp4(x[2 * j], scale[j][0], low);
      widen_nvfp4(x[2 * j + 1], scale[j][1], high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::mma_m16n8k16(T{}, o.at[m][8 * n + 4 * j + i], p[m], low[i], high[i]);
      }
    }
  }
}

// The neighbouring columns 32 q + 8 c + 4 h .. + 3 of a row of o, in numbers of the true size. half: which of the two
// rows of a lane.
template <int kM, int kVo>
QUIRE_DEVICE float4 nvfp4_columns(const Accumulator<kM, kVo>& o, int m, int half, int q, int h) {
  const int i = 2 * half + h;
  return {o.at[m][4 * q][i] * kNvfp4Unit, o.at[m][4 * q + 1][i] * kNvfp4Unit, o.at[m][4 * q + 2][i] * kNvfp4Unit,
          o.at[m][4 * q + 3][i] * kNvfp4Unit};
}

}  // namespace quire
