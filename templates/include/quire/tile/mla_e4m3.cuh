// Latents of 8 bits in the kernel with heads as columns (kernels/attention_mla_decode.cuh): both products take e4m3
// numbers as they are. Queries and weights are sums of two e4m3 numbers, side by side as columns of a product: first
// the high parts of all rows, then the low parts. Sums of such products keep some 14 bits, so that each 128 columns,
// and the values of each KV tile, have sums of their own, added up in float32.
#pragma once
#include "quire/ptx/store.cuh"
#include "quire/tile/e4m3_split.cuh"
#include "quire/tile/sm90_tile.cuh"

namespace quire {

template <class V>
struct MlaE4m3 {
  using T = typename V::Q;
  static constexpr int kRows = V::kTileRows, kLowScale = 32;

  // A KV tile: four atoms of 128 columns of ckv, and one whose first 64 are kpe.
  static constexpr int kTileAtoms = 5, kCkvAtoms = 4, kAtomBytes = 64 * 128, kBlocks = 8;
  using TileQ = SwizzledTile<2 * kRows, V::kHeadDimQk, 8>;
  static constexpr int kPRowBytes = 64, kPBytes = 2 * kRows * kPRowBytes;

  using Scores = float[kRows / 2];
  using Values = float[kBlocks][kRows / 2];
  using Sums = float[kRows];  // columns of high parts, then of low parts

  QUIRE_DEVICE static float total(const Sums& x, int i) { return fmaf(x[kRows / 2 + i], 1.f / kLowScale, x[i]); }

  // A row of queries, by a warp: a power of two lets its greatest number use all of e4m3. Returns its reciprocal.
  QUIRE_DEVICE static float load_query(TileQ to, int row, const T* nope, const T* pe, int lane) {
    const uint4 none = {0, 0, 0, 0}, *chunks = reinterpret_cast<const uint4*>(nope);
    const uint4 x[3] = {__ldg(chunks + lane), __ldg(chunks + 32 + lane),
                        lane < 8 ? __ldg(reinterpret_cast<const uint4*>(pe) + lane) : none};
    float top = fmaxf(largest(x[0]), fmaxf(largest(x[1]), largest(x[2])));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float scale = e4m3_scale(top);
    store_query(to, row, lane, x[0], scale);
    store_query(to, row, 32 + lane, x[1], scale);
    if (lane < 8) store_query(to, row, 64 + lane, x[2], scale);
    return reciprocal_of_power(scale);
  }

  // s = [ckv, kpe] q^T. wait(i): until the KV tile's atom i is there.
  template <class Place, class Wait>
  QUIRE_DEVICE static void multiply(Scores& s, TileDescriptor keys, TileDescriptor q, Place from, const Wait& wait) {
    constexpr int kAtOnce = kRows == 16 ? 4 : 1;
#pragma unroll
    for (int first = 0; first < kCkvAtoms; first += kAtOnce) {
      Sums sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) ptx::pin(sums[i]);
#pragma unroll
      for (int atom = first; atom < first + kAtOnce; ++atom) {
        const int atoms = atom + 1 == kCkvAtoms ? 2 : 1;  // kpe with the last of ckv
#pragma unroll
        for (int k = 0; k < 2 * atoms + 2; ++k) {
          const int i = atom + k / 4, at = k % 4 * 32;
          if (k % 4 == 0) wait(i), ptx::wgmma_fence();
          ptx::Wgmma<2 * kRows>::ss(e4m3_t{}, sums[atom - first], keys.at(from.atom_at(i) + at),
                                    q.at(i * TileQ::kAtomBytes + at), k > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        ptx::pin(sums[i]);
#pragma unroll
        for (int j = 0; j < kRows / 2; ++j) s[j] = (first + i > 0 ? s[j] : 0.f) + total(sums[i], j);
      }
    }
  }

  // Weights, to shared memory as rows of P, in the order of tokens that ldmatrix_bytes_trans() has. Two lanes have the
  // four tokens of a word, for each of two rows.
  QUIRE_DEVICE static void store_weights(const Scores& s, uint32_t p, int warp, int lane) {
    const bool is_odd = lane / 4 % 2 != 0;
    const uint32_t to = p + warp * 128 + (lane % 4 * 2 + is_odd) * 16 + lane / 8 * 4;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const float (&x)[kRows / 2] = s;
      const E4m3Pair<kLowScale> pair({x[4 * i], x[4 * i + 2], x[4 * i + 1], x[4 * i + 3]});
      const uint32_t sent = __byte_perm(pair.high, pair.low, is_odd ? 0x5410 : 0x7632);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, sent, 4);
      ptx::st_shared(to + i * 8 * kPRowBytes, __byte_perm(pair.high, other, is_odd ? 0x3524 : 0x5140));
      ptx::st_shared(to + (kRows + i * 8) * kPRowBytes, __byte_perm(pair.low, other, is_odd ? 0x3726 : 0x7160));
    }
  }

  // o += ckv^T p^T. Rows of a block of o: of each warp's 16, 2 * (lane / 4) and + 1.
  template <class Place>
  QUIRE_DEVICE static void add_values(Values& o, uint32_t ring, uint32_t p, Place from, int warp, int lane) {
    constexpr int kAtOnce = 32 / kRows, kSteps = kBlocks / kAtOnce, kBuffers = kRows == 16 ? 2 : 1;
    const CoreMatrices<kPRowBytes> weights(p);
    const uint32_t row = ring + lane * 128;
    Sums sums[kBuffers][kAtOnce];
    uint32_t values[kBuffers][kAtOnce][2][4];
    // While the products of a step run, the sums of the one before are added up.
#pragma unroll
    for (int step = 0; step < kSteps + kBuffers - 1; ++step) {
      if (step < kSteps) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int block = step * kAtOnce + i;
          const uint32_t at = row + from.atom_at(block / 2) + ((block % 2 * 4 + warp ^ lane % 8) * 16);
          ldmatrix_bytes_trans(values[step % kBuffers][i][0], at);
          ldmatrix_bytes_trans(values[step % kBuffers][i][1], at + 32 * 128);
          ptx::pin(values[step % kBuffers][i][0]), ptx::pin(values[step % kBuffers][i][1]);
          ptx::pin(sums[step % kBuffers][i]);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            ptx::Wgmma<2 * kRows>::rs(e4m3_t{}, sums[step % kBuffers][i], values[step % kBuffers][i][k],
                                      weights.at(k * 256), k);
          }
        }
        ptx::wgmma_commit();
      }
      const int done = step - (kBuffers - 1);
      if (done < 0) continue;
      if (step < kSteps)
        ptx::wgmma_wait<kBuffers - 1>();
      else
        ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        ptx::pin(sums[done % kBuffers][i]);
#pragma unroll
        for (int j = 0; j < kRows / 2; ++j) o[done * kAtOnce + i][j] += total(sums[done % kBuffers][i], j);
      }
    }
  }

 private:
  QUIRE_DEVICE static float number(const uint4& x, int i) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    return to_float(T{static_cast<uint16_t>(words[i / 2] >> i % 2 * 16)});
  }
  QUIRE_DEVICE static float largest(const uint4& x) {
    float top = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(number(x, i)));
    return top;
  }
  // Columns 8 * chunk to + 7 of a row.
  QUIRE_DEVICE static void store_query(TileQ to, int row, int chunk, const uint4& x, float scale) {
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = number(x, 4 * i + j) * scale;
      const E4m3Pair<kLowScale> pair(four);
      high[i] = pair.high, low[i] = pair.low;
    }
    const int half = chunk % 2 * 8;
    ptx::st_shared_8(to.chunk(row, chunk / 2) + half, __uint_as_float(high[0]), __uint_as_float(high[1]));
    ptx::st_shared_8(to.chunk(kRows + row, chunk / 2) + half, __uint_as_float(low[0]), __uint_as_float(low[1]));
  }
};

}  // namespace quire
