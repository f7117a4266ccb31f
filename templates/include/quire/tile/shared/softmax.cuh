// Softmax over KV tiles by one warp. A row is spread over four lanes, as the matrix instruction leaves it.
#pragma once
#include "quire/core/params.h"
#include "quire/ptx/math.cuh"
#include "quire/tile/shared/gemm.cuh"

namespace quire {

// Below every logit, and finite: a row that sees no key gives exp2(-inf - kNoLogit) = 0 instead of NaN.
constexpr float kNoLogit = -3.0e38f;

// A row's reference maximum may lag behind its true maximum by this many powers of two. Then p is at most 2^8, which
// costs no precision (p is a float of 8 or 11 bits wherever it lies, and is divided out at the end), while o is
// rescaled a few times a row instead of once a tile. Each row decides for itself: its bits do not depend on other rows.
constexpr float kMaxLag = 8.f;

QUIRE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

QUIRE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The factor of a row's output, and its lse (base 2).
struct RowResult {
  float scale, lse;
};

// A row's result from its maximum m and denominator d; `sink` is a natural-log logit that joins the denominator.
QUIRE_DEVICE RowResult finish_row(float m, float d, const float* sink, float o_scale) {
  float weight = 1.f;
  if (sink != nullptr) {
    const float logit = *sink * kLog2e, top = fmaxf(m, logit);
    weight = ptx::ex2(m - top);
    d = d * weight + ptx::ex2(logit - top);
    m = top;
  }
  if (d == 0.f) return {0.f, __int_as_float(0xff800000)};
  return {weight * ptx::rcp(d) * o_scale, m + ptx::lg2(d)};
}

// How far the reference maximum of a row may lag behind the true one, which some variants return.
template <class V>
constexpr float kMostLagOf = V::kMaxLogits != 0 ? 0.f : kMaxLag;

// The state of kM * 16 rows. Lane l keeps rows l / 4 and l / 4 + 8 of each block of 16.
template <int kM>
struct SoftmaxRows {
  float m[kM][2];  // reference maximum, base-2 exponent
  float d[kM][2];  // this lane's part of the denominator

  QUIRE_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kM; ++i) m[i][0] = m[i][1] = kNoLogit, d[i][0] = d[i][1] = 0.f;
  }

  // Raises m where a row of s * scale exceeds it by more than kMaxLag, and rescales d and o to match.
  template <int kN, int kVo>
  QUIRE_DEVICE void raise_max(const Accumulator<kM, kN>& s, float scale, Accumulator<kM, kVo>& o) {
    float top[kM][2];
    bool exceeds = false;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = fmaxf(s.at[i][0][2 * h], s.at[i][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kN / 8; ++n) x = fmaxf(x, fmaxf(s.at[i][n][2 * h], s.at[i][n][2 * h + 1]));
        top[i][h] = x * scale;
        exceeds |= top[i][h] > m[i][h] + kMaxLag;
      }
    }
    if (__any_sync(0xffffffffu, exceeds)) rescale(top, o);
  }

  // s becomes exp2(s * scale - m) for keys 16 * k .. 16 * k + 15, added up in d and rounded to T in p.
  template <class T, int kN>
  QUIRE_DEVICE void exponentiate(Accumulator<kM, kN>& s, float scale, int k, uint32_t (&p)[kM][4]) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // left top, left bottom, right top, right bottom
        float (&x)[4] = s.at[i][2 * k + j / 2];
        const int h = j % 2;
        x[2 * h] = ptx::ex2(fmaf(x[2 * h], scale, -m[i][h]));
        x[2 * h + 1] = ptx::ex2(fmaf(x[2 * h + 1], scale, -m[i][h]));
        d[i][h] += x[2 * h] + x[2 * h + 1];
        p[i][j] = ptx::pack(T{}, x[2 * h], x[2 * h + 1]);
      }
    }
  }

  // After the last tile: every lane of a quad gets the whole denominator.
  QUIRE_DEVICE void reduce() {
#pragma unroll
    for (int i = 0; i < kM; ++i) d[i][0] = quad_sum(d[i][0]), d[i][1] = quad_sum(d[i][1]);
  }

 private:
  template <int kVo>
  QUIRE_DEVICE void rescale(const float (&top)[kM][2], Accumulator<kM, kVo>& o) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = quad_max(top[i][h]);
        const float next = x > m[i][h] + kMaxLag ? x : m[i][h];
        const float factor = ptx::ex2(m[i][h] - next);
        m[i][h] = next;
        d[i][h] *= factor;
#pragma unroll
        for (int n = 0; n < kVo / 8; ++n) o.at[i][n][2 * h] *= factor, o.at[i][n][2 * h + 1] *= factor;
      }
    }
  }
};

}  // namespace quire
