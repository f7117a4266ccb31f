// tanh of logits, within 2e-6 absolutely. (tanh.approx is good to 5e-4.)
#pragma once
#include "quire/core/types.h"
#include "quire/ptx/math.cuh"

namespace quire {

// Of four logits of one row, as a lane holds them in two neighbouring blocks of 8 keys: keys first, + 1, + 8 and + 9.
template <class T>
struct Four {
  T at[4];
};

// tanh(x / kTanhUnit) = n / d: a minimax rational function of degree 7 up to an argument of 7, from where it is 1. In
// this unit both polynomials of x^2 begin with 1.
struct Fraction {
  float n, d;
};
constexpr float kTanhUnit = 0.027607948789784433f;
QUIRE_DEVICE Fraction rational_tanh(float x) {
  x = ptx::clamp_nan(x, 7.f * kTanhUnit);
  const float t = x * x;
  const float n = fmaf(fmaf(t + 4.41605873e-01f, t, 1.81854567e-02f), t, 1.12670027e-04f);
  const float d = fmaf(fmaf(t + 1.12828137e-01f, t, 1.86236577e-03f), t, 3.11060176e-06f);
  return {x * n, d};
}

// tanh(x * scale). kPairs: without exp2, and with one reciprocal for two logits, because the special-function unit is
// the bottleneck beside softmax's exp2. A NaN then reaches both logits of its pair.
template <bool kPairs>
QUIRE_DEVICE Four<float> tanh_of_four(const Four<float>& x, float scale) {
  const float unit_scale = scale * (kPairs ? kTanhUnit : 2.f * kLog2e);
  Four<float> y;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if constexpr (kPairs) {
      const Fraction left = rational_tanh(x.at[i] * unit_scale), right = rational_tanh(x.at[i + 1] * unit_scale);
      const float reciprocal = ptx::rcp(left.d * right.d);
      y.at[i] = left.n * right.d * reciprocal, y.at[i + 1] = right.n * left.d * reciprocal;
    } else {
      y.at[i] = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x.at[i] * unit_scale));
      y.at[i + 1] = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x.at[i + 1] * unit_scale));
    }
  }
  return y;
}

}  // namespace quire
