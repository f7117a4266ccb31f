// Matrix fragments: q in registers or shared memory, keys and values from shared memory. 8-bit keys and values are
// widened to fp16 on the way: a lane then receives four neighbouring dims with one 32-bit word. The order of the dims
// in a product over dims is free, so q has the same order: block b of 16 dims gives lane c dims 16 b + 4 c + {0, 1} and
// {2, 3} instead of {2 c, 2 c + 1} and {8 + 2 c, 9 + 2 c}. Columns of o come out in that order, too.
// Numbers of 4 bits have another order (nvfp4.cuh): blocks 2 b and 2 b + 1 give lane c dims 32 b + 8 c + {0, 4}, {1, 5}
// and {2, 6}, {3, 7}.
// RoPE: a lane holds both dims of a pair, so that it rotates them in registers. Block b of 16-bit dims is then the
// eight dims from 8 b on and those that they are paired with, from 8 b + head_dim / 2 on. 8-bit dims keep their order:
// the pairs of block b are in block b + head_dim / 32.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/schedule.h"
#include "quire/ptx/math.cuh"
#include "quire/ptx/copy.cuh"
#include "quire/tile/shared/gemm.cuh"
#include "quire/tile/ampere/nvfp4.cuh"
#include "quire/tile/ampere/rope.cuh"
#include "quire/tile/shared/softmax.cuh"

namespace quire {

// A warp's rows of q: kM blocks of 16 rows of kQk dims, and zeros up to a whole block. The first kHeld blocks of 16
// dims stay in registers. The others lie in shared memory as fragments, one copy for all KV splits.
template <class Q, int kKvBits, int kM, int kQk, int kHeld, bool kHasRope>
struct QueryFragments {
  static constexpr bool kRescaled = kKvBits < 16 && is_same<Q, bf16_t>::value;
  static constexpr int kBlocks = ceil_div(kQk, 16), kHeldBlocks = kHeld;

  uint32_t held[max(kHeld, 1)][kM][4];  // an array has an element, also where none is held
  uint32_t shared;                      // [kBlocks - kHeld, kM, 32 lanes] of 16 bytes, this lane's first
  float factor[kRescaled ? kM : 1][2];  // of the products: what q was divided by to fit fp16

  QUIRE_DEVICE void clear() {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
#pragma unroll
      for (int m = 0; m < kM; ++m) held[k][m][0] = held[k][m][1] = held[k][m][2] = held[k][m][3] = 0;
    }
  }

  // Loads the fragments of dims from first_dim on; rows past the request's last are zeros. `rows`: all rows of the row
  // tile, of kRowDims each, if they are in shared memory. One KV split has `writes` set, and writes the fragments that
  // lie in shared memory; a barrier must follow.
  template <int kRowDims = kQk>
  QUIRE_DEVICE void load(const AttentionParams& p, const WorkTile& work, int row_begin, int lane, bool writes,
                         const Q* rows, int first_dim = 0) {
    uint32_t x[kBlocks][kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row_begin + m * 16 + h * 8 + lane / 4;
        if (row < work.row_end) {
          const WorkTile::Place at = work.place(p.group, row);
          const Q* src = static_cast<const Q*>(p.q) + at.token * p.q_token_stride + at.head * p.q_head_stride;
          if (rows != nullptr) src = rows + (row - work.tile.row_begin) * kRowDims;
          load_row(x, m, h, src + first_dim, lane % 4);
          if constexpr (kHasRope) {
            const int position = p.group.div(row) + (work.tile.kv_len - work.tile.qo_len);
            rotate_row(x, m, h, p.rope_frequencies, position, lane % 4);
          }
        } else {
#pragma unroll
          for (int k = 0; k < kBlocks; ++k) x[k][m][h] = x[k][m][h + 2] = 0;
        }
        if constexpr (kRescaled) scale_to_fp16(x, m, h);
      }
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        if (k < kHeld) {
#pragma unroll
          for (int i = 0; i < 4; ++i) held[min(k, kHeld - 1)][m][i] = x[k][m][i];
        } else if (writes) {
          ptx::st_shared_16(shared_at(k, m), x[k][m]);
        }
      }
    }
  }

  QUIRE_DEVICE void get(int k, uint32_t (&a)[kM][4]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if (k < kHeld) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = held[min(k, kHeld - 1)][m][i];
      } else {
        const uint4 x = ptx::ld_shared_16(shared_at(k, m));
        a[m][0] = x.x, a[m][1] = x.y, a[m][2] = x.z, a[m][3] = x.w;
      }
    }
  }

  template <int kN>
  QUIRE_DEVICE void unscale(Accumulator<kM, kN>& s) const {
    if constexpr (kRescaled || kKvBits == 4) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s.at[m][n][i] *= kRescaled ? factor[m][i / 2] : kNvfp4Unit;
        }
      }
    }
  }

 private:
  using Words = uint32_t[kBlocks][kM][4];

  QUIRE_DEVICE uint32_t shared_at(int k, int m) const { return shared + ((k - kHeld) * kM + m) * 512; }

  QUIRE_DEVICE static void load_row(Words& x, int m, int h, const Q* row, int c) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      if constexpr (kKvBits == 4) {
        if (k % 2 != 0) continue;
        const uint4 word = *reinterpret_cast<const uint4*>(row + 16 * k + 8 * c);
        x[k][m][h] = __byte_perm(word.x, word.z, 0x5410), x[k][m][h + 2] = __byte_perm(word.x, word.z, 0x7632);
        x[k + 1][m][h] = __byte_perm(word.y, word.w, 0x5410), x[k + 1][m][h + 2] = __byte_perm(word.y, word.w, 0x7632);
      } else if constexpr (kKvBits == 8) {
        const uint2 word = *reinterpret_cast<const uint2*>(row + 16 * k + 4 * c);
        x[k][m][h] = word.x, x[k][m][h + 2] = word.y;
      } else {
        const int first = kHasRope ? 8 * k : 16 * k, second = first + (kHasRope ? kQk / 2 : 8);
        x[k][m][h] = *reinterpret_cast<const uint32_t*>(row + first + 2 * c);
        x[k][m][h + 2] = second < kQk ? *reinterpret_cast<const uint32_t*>(row + second + 2 * c) : 0;
      }
    }
  }

  QUIRE_DEVICE static void rotate_row(Words& x, int m, int h, const uint64_t* frequencies, int position, int c) {
    static_assert(kKvBits >= 8, "rows for keys of 4 bits are not rotated");
    if constexpr (kKvBits == 8) {
#pragma unroll
      for (int k = 0; k < kBlocks / 2; ++k) {
        const Frequencies<4> f(frequencies + 16 * k + 4 * c);
        rotate_words<Q>(x[k][m][h], x[k + kBlocks / 2][m][h], position, f.at);
        rotate_words<Q>(x[k][m][h + 2], x[k + kBlocks / 2][m][h + 2], position, f.at + 2);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        const Frequencies<2> f(frequencies + 8 * k + 2 * c);
        rotate_words<Q>(x[k][m][h], x[k][m][h + 2], position, f.at);
      }
    }
  }

  // Scales a row by a power of two and rounds it to fp16.
  QUIRE_DEVICE void scale_to_fp16(Words& x, int m, int h) {
    float top = 0.f;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = h; i < 4; i += 2) top = fmaxf(top, fmaxf(fabsf(low_bf16(x[k][m][i])), fabsf(high_bf16(x[k][m][i]))));
    }
    top = quad_max(top);
    const Fp16Range range(top);
    factor[m][h] = kKvBits == 4 ? range.factor * kNvfp4Unit : range.factor;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
      for (int i = h; i < 4; i += 2)
        x[k][m][i] = ptx::pack(fp16_t{}, low_bf16(x[k][m][i]) * range.scale, high_bf16(x[k][m][i]) * range.scale);
    }
  }
};

// One ldmatrix reads 16 keys x 32 dims: {keys 0..7, 8..15} x {chunk 0, 1}. The last of an odd number of chunks is read
// twice.
template <class T, class Kv, int kM, int kN, int kQk, class Query, class Cursor>
QUIRE_DEVICE void mma_fp8_keys(Accumulator<kM, kN>& s, const Query& q, const Cursor& keys, int block, int lane) {
  s.clear();
#pragma unroll
  for (int k = 0; k < kQk / 16; k += 2) {
    const bool is_single = k + 1 == kQk / 16;
    uint32_t x[kN / 16][4];
#pragma unroll
    for (int n = 0; n < kN / 16; ++n) {
      ptx::ldmatrix_x4(x[n], keys.at(block * (kN / 16) + n, k / 2) - (is_single ? ((lane >> 3) & 1) * 16 : 0));
    }
#pragma unroll
    for (int j = 0; j < (is_single ? 1 : 2); ++j) {
      uint32_t rows[kM][4];
      q.get(k + j, rows);
#pragma unroll
      for (int n = 0; n < kN / 8; ++n) {
        uint32_t b0, b1;
        ptx::widen(Kv{}, x[n / 2][n % 2 * 2 + j], b0, b1);
#pragma unroll
        for (int m = 0; m < kM; ++m) ptx::mma_m16n8k16(T{}, s.at[m][n], rows[m], b0, b1);
      }
    }
  }
  q.unscale(s);
}

// One ldmatrix reads 16 tokens x 32 dims: tokens 0..7 chunk 0, tokens 8..15 chunk 0, then chunk 1. A word is {token
// 2c, dim 2g}, {2c, 2g + 1}, {2c + 1, 2g}, {2c + 1, 2g + 1}.
template <class T, class Kv, int kM, int kVo, class Cursor>
QUIRE_DEVICE void mma_fp8_values(Accumulator<kM, kVo>& o, const uint32_t (&p)[kM][4], const Cursor& values, int block,
                                 int lane) {
#pragma unroll
  for (int n = 0; n < kVo / 16; n += 2) {
    const bool is_single = n + 1 == kVo / 16;
    uint32_t x[4];
    ptx::ldmatrix_x4_trans(x, values.at(block, n / 2) - (is_single ? (lane >> 4) * 16 : 0));
#pragma unroll
    for (int j = 0; j < (is_single ? 1 : 2); ++j) {
      uint32_t even[2], odd[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) ptx::widen(Kv{}, __byte_perm(x[2 * j + i], 0, 0x3120), even[i], odd[i]);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma_m16n8k16(T{}, o.at[m][2 * (n + j)], p[m], even[0], even[1]);
        ptx::mma_m16n8k16(T{}, o.at[m][2 * (n + j) + 1], p[m], odd[0], odd[1]);
      }
    }
  }
}

// s [kM * 16, kN] = q * k^T for rotated keys kN * block .. of a tile, of which the first has `position`. One
// ldmatrix reads 16 keys x two chunks that are paired: {keys 0..7, 8..15} x {chunk, the other}.
// rotations: see tile/ampere/rope.cuh.
template <class T, class Kv, int kM, int kN, int kQk, class Query, class Tile, class Rotations>
QUIRE_DEVICE void mma_rotated_keys(Accumulator<kM, kN>& s, const Query& q, Tile tile, int block, int lane, int position,
                                   Rotations& rotations) {
  constexpr bool kIsFp8 = sizeof(Kv) == 1;
  constexpr int kPairs = Tile::kChunks / 2, kDims = kIsFp8 ? 4 : 2;  // of chunks; that a lane has of each
  static_assert(Tile::kChunks % 2 == 0, "all chunks have another to be paired with");
  const int row = block * kN + (lane & 7) + (lane >> 4) * 8, other = (lane >> 3) & 1 ? kPairs : 0;
  rotations.begin(position, lane);
  position += lane / 4;
  s.clear();
  // Registers have names and not numbers: queries that they hold take a loop without turns.
  constexpr int kUnrolled = Query::kHeldBlocks > 0 ? kPairs : 1;
#pragma unroll kUnrolled
  for (int k = 0; k < kPairs; ++k) {
    const int pair = 4 * kDims * k + kDims * (lane & 3);
    Turning<kDims> turning = rotations.template at<kDims>(k, pair, position);
    uint32_t rows[2][kM][4];
    q.get(k, rows[0]);
    if constexpr (kIsFp8) q.get(k + kPairs, rows[1]);
#pragma unroll
    for (int n = 0; n < kN / 8; n += 2) {
      uint32_t x[4];
      ptx::ldmatrix_x4(x, tile.chunk(row + 8 * n, k + other));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t b[2][2] = {{x[2 * h], x[2 * h + 1]}};  // operand: words of two dims
        if constexpr (kIsFp8) {
          ptx::widen(Kv{}, x[2 * h], b[0][0], b[0][1]);
          ptx::widen(Kv{}, x[2 * h + 1], b[1][0], b[1][1]);
          rotate_words<T>(b[0][0], b[1][0], turning.at);
          rotate_words<T>(b[0][1], b[1][1], turning.at + kDims - 2);
        } else {
          rotate_words<T>(b[0][0], b[0][1], turning.at);
        }
        if (n + h + 1 < kN / 8) turning.advance();
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16(T{}, s.at[m][n + h], rows[0][m], b[0][0], b[0][1]);
          if constexpr (kIsFp8) ptx::mma_m16n8k16(T{}, s.at[m][n + h], rows[1][m], b[1][0], b[1][1]);
        }
      }
    }
    rotations.end(k, pair, turning);
  }
  if constexpr (kIsFp8) q.unscale(s);
}

// s [kM * 16, kN] = q * k^T for keys kN * block .. of the tile behind `keys`.
template <class T, class Kv, int kM, int kN, int kQk, class Query, class Cursor>
QUIRE_DEVICE void mma_keys(Accumulator<kM, kN>& s, const Query& q, const Cursor& keys, int block, int lane) {
  if constexpr (kBitsOf<Kv> == 4)
    mma_nvfp4_keys<T, kM, kN, kQk>(s, q, keys, block, lane);
  else if constexpr (kBitsOf<Kv> == 8)
    mma_fp8_keys<T, Kv, kM, kN, kQk>(s, q, keys, block, lane);
  else
    mma_ABt<T>(s, q, keys, block);
}

// o [kM * 16, kVo] += p * v for values 16 * block .. of the tile behind `values`; p [kM * 16, 16] in fragments.
// kAtOnce: see mma_AB_step().
template <class T, class Kv, int kAtOnce = 0, int kM, int kVo, class Cursor>
QUIRE_DEVICE void mma_values(Accumulator<kM, kVo>& o, const uint32_t (&p)[kM][4], const Cursor& values, int block,
                             int lane) {
  if constexpr (kBitsOf<Kv> == 4)
    mma_nvfp4_values<T>(o, p, values, block, lane);
  else if constexpr (kBitsOf<Kv> == 8)
    mma_fp8_values<T, Kv>(o, p, values, block, lane);
  else
    mma_AB_step<T, kAtOnce>(o, p, values, block);
}

}  // namespace quire
