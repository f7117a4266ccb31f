// tanh of logits, within 2e-6 absolutely. (tanh.approx is good to 5e-4.)
#pragma once
#include "quire/core/types.h"
#include "quire/ptx/math.cuh"

namespace quire {

// tanh(x * scale) = 1 - 2 / (1 + exp(2 * x * scale)).
QUIRE_DEVICE float tanh_by_exp2(float x, float scale) {
  return 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x * (scale * (2.f * kLog2e))));
}

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

// x[i] becomes tanh(x[i] * scale), with half a special function for each: one reciprocal. A NaN reaches both.
QUIRE_DEVICE void tanh_of_pair(float (&x)[2], float scale) {
  const float unit_scale = scale * kTanhUnit;
  const Fraction left = rational_tanh(x[0] * unit_scale), right = rational_tanh(x[1] * unit_scale);
  const float reciprocal = ptx::rcp(left.d * right.d);
  x[0] = left.n * right.d * reciprocal, x[1] = right.n * left.d * reciprocal;
}

}  // namespace quire
