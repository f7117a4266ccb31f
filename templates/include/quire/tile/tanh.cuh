// tanh of four logits at once, within 2e-6 absolutely.
#pragma once
#include "quire/ptx/math.cuh"

// To be measured: how many logits share a reciprocal (2 or 4), and how many of those go by exp2.
#ifndef QUIRE_TANH_GROUP
#define QUIRE_TANH_GROUP 4
#endif
#ifndef QUIRE_TANH_EXPS
#define QUIRE_TANH_EXPS 2
#endif

namespace quire {

// Of four logits of one row, as a lane holds them in two neighbouring blocks of 8 keys: keys first, + 1, + 8 and + 9.
template <class T>
struct Four {
  T at[4];
};

// A numerator and a denominator.
struct Fraction {
  float n, d;
};

// tanh(x) = 1 - 1 / d for x = log2(e) * 2 * x - 1, or d = (1 + exp(2 * x)) / 2.
QUIRE_DEVICE float half_exp_plus_one(float x) { return 0.5f + ptx::ex2(ptx::min_nan(x, 30.f)); }

// tanh(x / kUnit) = n / d, both polynomials of degree 3 in x^2, minimax to an argument of 7, from where it is 1: within
// 1.4e-6. The unit is such that both polynomials begin with 1.
constexpr float kRationalUnit = 0.027607948789784433f;
QUIRE_DEVICE Fraction rational_tanh(float x) {
  constexpr float kMost = 7.f * kRationalUnit;
  x = ptx::max_nan(ptx::min_nan(x, kMost), -kMost);
  const float t = x * x;
  const float n = fmaf(fmaf(t + 4.41605873e-01f, t, 1.81854567e-02f), t, 1.12670027e-04f);
  const float d = fmaf(fmaf(t + 1.12828137e-01f, t, 1.86236577e-03f), t, 3.11060176e-06f);
  return {x * n, d};
}

// tanh(x * scale), each with an exp2 and a reciprocal of its own: four special functions a pair, and few registers.
QUIRE_DEVICE Four<float> tanh_by_exp2(const Four<float>& x, float scale) {
  const float exp_scale = scale * (2.f * kLog2e);
  Four<float> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.at[i] = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x.at[i] * exp_scale));
  return result;
}

// tanh(x * scale). The special-function unit would be the bottleneck beside softmax's exp2: half of the logits are
// rational functions, which it has no part in, and the four divisions share a reciprocal.
QUIRE_DEVICE Four<float> tanh_of_four(const Four<float>& x, float scale) {
  constexpr int kGroup = QUIRE_TANH_GROUP, kExps = QUIRE_TANH_EXPS;
  const float exp_scale = scale * (2.f * kLog2e), rational_scale = scale * kRationalUnit;
  Four<float> result;
#pragma unroll
  for (int first = 0; first < 4; first += kGroup) {
    Fraction y[kGroup];
    float inverse[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < kExps)
        y[i] = {0.f, half_exp_plus_one(fmaf(x.at[first + i], exp_scale, -1.f))};
      else
        y[i] = rational_tanh(x.at[first + i] * rational_scale);
    }
    if constexpr (kGroup == 4) {
      const float low = y[0].d * y[1].d, high = y[2].d * y[3].d, reciprocal = ptx::rcp(low * high);
      const float of_low = reciprocal * high, of_high = reciprocal * low;
      inverse[0] = of_low * y[1].d, inverse[1] = of_low * y[0].d;
      inverse[2] = of_high * y[3].d, inverse[3] = of_high * y[2].d;
    } else {
      const float reciprocal = ptx::rcp(y[0].d * y[1].d);
      inverse[0] = reciprocal * y[1].d, inverse[1] = reciprocal * y[0].d;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      result.at[first + i] = i < kExps ? 1.f - inverse[i] : inverse[i] * y[i].n;
    }
  }
  return result;
}

}  // namespace quire
