// Latents of 8 bits in attention_mla_decode, where tokens are rows and heads are columns. In both products latents are
// operand A: they are widened to fp16 on their way through registers. Queries and weights are fp16 too. To use fp16's
// range, each row of queries is scaled by a power of two, and the reference maximum is set below the true maximum.
//
// Where each 128 columns of a token have a scale, sums of S^T, of which a token is a row, are multiplied by it, and so
// are weights: there are then four P^T, one for each 128 columns of O. The scales of weights are divided by a power of
// two that is common to a KV tile. The sums of the values of a KV tile are multiplied by it in float32.
#pragma once
#include "quire/core/convert.h"
#include "quire/ptx/copy.cuh"
#include "quire/ptx/math.cuh"
#include "quire/ptx/wgmma.cuh"
#include "quire/tile/hopper/gemm.cuh"

namespace quire {

// Loads 16 rows of two steps of 16 columns. Lane i gives the address of 16 bytes of row i % 16: lanes 0 to 15 those of
// the first step, the others those of the second. The columns of a step are in the order 0 1 4 5 8 9 12 13 2 3 6 7 10
// 11 14 15, which operand B must have, too.
template <class Fp8>
QUIRE_DEVICE void ldmatrix_widened(uint32_t (&a)[2][4], uint32_t src) {
  uint32_t x[4];  // four columns of a row
  ptx::ldmatrix_x4(x, src);
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::widen(Fp8{}, x[i], a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
}

// Loads 16 columns of two steps of 16 rows, transposed. Lane i gives the address of 16 bytes of row i of 32. Rows lane
// / 4 and lane / 4 + 8 of a fragment are columns 2 * (lane / 4) and 2 * (lane / 4) + 1.
template <class Fp8>
QUIRE_DEVICE void ldmatrix_widened_trans(uint32_t (&a)[2][4], uint32_t src) {
  uint32_t x[4];  // two columns of two neighbouring rows
  ptx::ldmatrix_x4_trans(x, src);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::widen(Fp8{}, __byte_perm(x[i], 0, 0x3120), a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
  }
}

template <class V>
struct MlaFp8 {
  using T = typename V::Q;
  using Fp8 = typename V::Kv;
  static constexpr int kRows = V::kTileRows;
  static constexpr bool kIsScaled = V::kTileScales != 0;  // then kpe is a T

  // A KV tile: four atoms of 128 columns of ckv, and one of kpe, whose last 64 columns are zeros if it has 8 bits.
  static constexpr int kCkvAtoms = 4, kBlocks = 8;
  static constexpr int kPs = kIsScaled ? kCkvAtoms : 1;
  static constexpr int kTileScalesBytes = kIsScaled ? 64 * 16 : 0;
  using TileQ = SwizzledTile<kRows, V::kHeadDimQk>;
  using TileP = SwizzledTile<kRows, 64>;

  using Scores = float[kRows / 2];
  using Values = float[kBlocks][kRows / 2];

  // Scales of a KV tile.
  struct TileScales {
    float of[2][kCkvAtoms];  // this lane's tokens, each 128 columns
    float unit[kCkvAtoms];   // a power of two above those of all tokens

    QUIRE_DEVICE void load(uint32_t from, int warp, int lane) {
      const uint32_t own_at = from + (warp * 16 + lane / 4) * 16;
      const uint4 own[2] = {ptx::ld_shared_16(own_at), ptx::ld_shared_16(own_at + 8 * 16)};
      const uint4 all[2] = {ptx::ld_shared_16(from + lane * 16), ptx::ld_shared_16(from + (32 + lane) * 16)};
#pragma unroll
      for (int i = 0; i < kCkvAtoms; ++i) {
        of[0][i] = __uint_as_float(word(own[0], i)), of[1][i] = __uint_as_float(word(own[1], i));
        const uint32_t larger = max(word(all[0], i) & 0x7fffffff, word(all[1], i) & 0x7fffffff);
        const uint32_t exponent = (__reduce_max_sync(0xffffffffu, larger) >> 23) + 1;
        unit[i] = __uint_as_float(min(exponent, 253u) << 23);
      }
    }
    // What weights of this lane's token `half` are multiplied by for columns of atom i.
    QUIRE_DEVICE float factor(int half, int i) const { return of[half][i] * reciprocal_of_power(unit[i]); }
  };

  // A row of queries, by a warp, times a power of two that brings its greatest number to between 2^14 and 2^15. Returns
  // the reciprocal.
  QUIRE_DEVICE static float load_query(TileQ to, int row, const T* nope, const T* pe, int lane) {
    const uint4 none = {0, 0, 0, 0}, *chunks = reinterpret_cast<const uint4*>(nope);
    const uint4 x[3] = {__ldg(chunks + lane), __ldg(chunks + 32 + lane),
                        lane < 8 ? __ldg(reinterpret_cast<const uint4*>(pe) + lane) : none};
    float top = fmaxf(largest(x[0]), fmaxf(largest(x[1]), kIsScaled ? 0.f : largest(x[2])));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const int exponent = __float_as_int(top) >> 23 & 0xff;
    const float scale = __int_as_float(min(127 + 127 + 14 - exponent, 127 + 100) << 23);
    store_query(to, row, lane, x[0], scale);
    store_query(to, row, 32 + lane, x[1], scale);
    if (lane < 8 && !kIsScaled) store_query(to, row, 64 + lane, x[2], scale);
    if (lane < 8 && kIsScaled) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = multiplied<T>(word(x[2], i), scale);
      ptx::st_shared_16(to.chunk(row, 64 + lane), pairs);
    }
    return reciprocal_of_power(scale);
  }

  // s = [ckv, kpe] q^T. wait(i): until the KV tile's atom i is there. load_scales(): its scales, beside the products.
  // Keys of a step are widened while the products of the one before run.
  template <class Place, class Wait, class Load>
  QUIRE_DEVICE static void multiply(Scores& s, const TileScales& scales, uint32_t ring, TileDescriptor q, Place from,
                                    int warp, int lane, const Wait& wait, const Load& load_scales) {
    constexpr int kPairs = kRows == 16 ? 4 : 1, kStepsPerAtom = 4 / kPairs;  // of 32 columns
    constexpr int kSteps = kCkvAtoms * kStepsPerAtom + (kIsScaled ? 1 : ceil_div(2, kPairs));
    const TileDescriptor keys_in_place(ring, 16);
    const uint32_t chunk = ring + (warp * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    uint32_t keys[2][kPairs][2][4];
    constexpr int kSums = kIsScaled && kRows == 16 ? 2 : 1;
    float sums[kSums][kRows / 2];
    ptx::pin(s);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int atom = step / kStepsPerAtom, first = step % kStepsPerAtom * kPairs;
      const bool is_kpe = atom == kCkvAtoms;
      auto& sum = kIsScaled ? sums[atom % kSums] : s;
      if (first == 0) wait(atom);
      if (is_kpe && kIsScaled) {
        ptx::pin(sum);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          ptx::Wgmma<kRows>::ss(T{}, sum, keys_in_place.at(from.atom_at(atom) + k * 32),
                                q.at(2 * atom * TileQ::kAtomBytes + k * 32), k > 0);
        }
      } else {
        const int pairs = is_kpe ? min(kPairs, 2) : kPairs;
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
          auto& key = keys[step % 2][i];
          ldmatrix_widened<Fp8>(key, (chunk + from.atom_at(atom)) ^ (first + i) * 32);
          ptx::pin(key[0]), ptx::pin(key[1]);
        }
        if (kIsScaled && first == 0) ptx::pin(sum);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2 * pairs; ++k) {
          const int column = atom * 128 + (2 * first + k) * 16;
          ptx::Wgmma<kRows>::template rs<ptx::Contiguous::kInner>(
              fp16_t{}, sum, keys[step % 2][k / 2][k % 2], q.at(column / 64 * TileQ::kAtomBytes + column % 64 * 2),
              kIsScaled ? first + k > 0 : step + k > 0);
        }
      }
      ptx::wgmma_commit();
      if (kIsScaled && step == 0) load_scales();
      ptx::wgmma_wait<1>();
      if (kSums == 2 && step > 0 && first == 0) add_scores(s, sums[(atom - 1) % kSums], scales, atom - 1);
      if (kIsScaled && kSums == 1 && (is_kpe || first + kPairs == 4)) {
        ptx::wgmma_wait<0>();
        add_scores(s, sums[0], scales, atom);
      }
    }
    ptx::wgmma_wait<0>();
    if constexpr (kSums == 2) add_scores(s, sums[0], scales, kCkvAtoms);
    ptx::pin(s);
  }

  // o += ckv^T p^T. Rows of a block of o: of each warp's 16, 2 * (lane / 4) and + 1. `p`: of the first of the P.
  // Values of a step are widened while the products of the one before run.
  template <class Place>
  QUIRE_DEVICE static void add_values(Values& o, const TileScales& scales, uint32_t ring, TileDescriptor p, Place from,
                                      int warp, int lane) {
    constexpr int kAtOnce = 32 / kRows, kSteps = kBlocks / kAtOnce, kBuffers = kRows == 16 ? 2 : 1;
    const uint32_t chunk = ring + lane * 128 + (warp ^ lane % 8) * 16;
    uint32_t values[kBuffers][kAtOnce][2][2][4];
    float sums[kBuffers][kAtOnce][kRows / 2];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::pin(o[block]);
#pragma unroll
    for (int step = 0; step < kSteps + kBuffers - 1; ++step) {
      const int at = step % kBuffers, done = step - (kBuffers - 1);
      if (step < kSteps) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int block = step * kAtOnce + i;
          const uint32_t from_at = (chunk + from.atom_at(block / 2)) ^ block % 2 * 64;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            auto& value = values[at][i][half];
            ldmatrix_widened_trans<Fp8>(value, from_at + half * 32 * 128);
            ptx::pin(value[0]), ptx::pin(value[1]);
          }
          if (kIsScaled) ptx::pin(sums[at][i]);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int block = step * kAtOnce + i;
          auto& sum = kIsScaled ? sums[at][i] : o[block];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            ptx::Wgmma<kRows>::template rs<ptx::Contiguous::kInner>(
                fp16_t{}, sum, values[at][i][k / 2][k % 2], p.at((kIsScaled ? block / 2 * TileP::kBytes : 0) + k * 32),
                !kIsScaled || k > 0);
          }
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<(kBuffers - 1)>();
      } else {
        ptx::wgmma_wait<0>();
      }
#pragma unroll
      for (int i = 0; i < (kIsScaled && done >= 0 ? kAtOnce : 0); ++i) {
        const int block = done * kAtOnce + i;
        auto& sum = sums[done % kBuffers][i];
        ptx::pin(sum);
#pragma unroll
        for (int j = 0; j < kRows / 2; ++j) o[block][j] = fmaf(sum[j], scales.unit[block / 2], o[block][j]);
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::pin(o[block]);
  }

 private:
  QUIRE_DEVICE static float reciprocal_of_power(float x) { return __int_as_float((254 << 23) - __float_as_int(x)); }

  // Sums of products with 128 columns, or with kpe.
  QUIRE_DEVICE static void add_scores(Scores& s, Scores& sum, const TileScales& scales, int atom) {
    ptx::pin(sum);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const float scale = atom < kCkvAtoms ? scales.of[i / 2 % 2][atom % kCkvAtoms] : 1.f;
      s[i] = fmaf(scale, sum[i], atom == 0 ? 0.f : s[i]);
    }
  }

  QUIRE_DEVICE static uint32_t word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
  QUIRE_DEVICE static float number(uint32_t pair, int i) { return to_float(T{static_cast<uint16_t>(pair >> i * 16)}); }
  template <class To>
  QUIRE_DEVICE static uint32_t multiplied(uint32_t pair, float scale) {
    return ptx::pack(To{}, number(pair, 0) * scale, number(pair, 1) * scale);
  }
  QUIRE_DEVICE static float largest(const uint4& x) {
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(number(word(x, i / 2), i % 2)));
    return top;
  }
  // Columns 8 * chunk to + 7 of a row, in the order of ldmatrix_widened().
  QUIRE_DEVICE static void store_query(TileQ to, int row, int chunk, const uint4& x, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t left = multiplied<fp16_t>(word(x, i), scale), right = multiplied<fp16_t>(word(x, i + 2), scale);
      ptx::st_shared_8(to.chunk(row, chunk / 2 * 2 + i) + chunk % 2 * 8, __uint_as_float(left), __uint_as_float(right));
    }
  }
};

}  // namespace quire
