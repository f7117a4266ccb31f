// tanh of logits from exp2 and a reciprocal, within 1e-6 absolutely. (tanh.approx is good to 5e-4.)
#pragma once
#include "quire/core/types.h"
#include "quire/ptx/math.cuh"

namespace quire {

// Four logits of one row, as a lane holds them in two neighbouring blocks of 8 keys: keys first, + 1, + 8 and + 9.
template <class T>
struct Four {
  T at[4];
};

// tanh(x * scale) = 1 - 2 / d with d = 1 + exp(2 * x * scale). kPairs: two logits share a reciprocal, because the
// special-function unit is the bottleneck beside softmax's exp2. A NaN then reaches both logits of its pair.
template <bool kPairs>
QUIRE_DEVICE Four<float> tanh_of_four(const Four<float>& x, float scale) {
  const float exp_scale = scale * (2.f * kLog2e);
  Four<float> y;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if constexpr (kPairs) {  // halves of d, of which the product stays finite
      const float left = 0.5f + ptx::ex2(ptx::min_nan(fmaf(x.at[i], exp_scale, -1.f), 30.f));
      const float right = 0.5f + ptx::ex2(ptx::min_nan(fmaf(x.at[i + 1], exp_scale, -1.f), 30.f));
      const float reciprocal = ptx::rcp(left * right);
      y.at[i] = 1.f - reciprocal * right, y.at[i + 1] = 1.f - reciprocal * left;
    } else {
      y.at[i] = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x.at[i] * exp_scale));
      y.at[i + 1] = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x.at[i + 1] * exp_scale));
    }
  }
  return y;
}

// factor * tanh(x * scale) of small numbers is u ((u^2 + a)^2 + b) with u = x * unit: the odd minimax polynomial of
// degree 5, scaled so that its leading coefficient is 1. It takes four instructions, one of which is the addition of y,
// and does not use the special-function unit. Where |x| is at most `most`, the absolute error is within 1.7e-6 * factor
// and the relative error within 1.4e-5.
struct SmallTanh {
  static constexpr float kMostResult = 32.f;  // no small number's result is greater

  float most;  // the greatest |x| that is small: |x * scale| 0.4, and less where factor is large
  float unit;  // u is x * unit
  float a, b;

  // factor: not negative. No number is small where scale is negative or powers are out of range.
  QUIRE_DEVICE void set(float scale, float factor) {
    constexpr float kMost = 0.4f, kC1 = 0.99998623f, kC3 = -0.33242562f, kC5 = 0.12025075f;
    const float root = ptx::ex2(-0.2f * ptx::lg2(factor * kC5));  // scale / unit
    unit = scale * ptx::rcp(root);
    a = 0.5f * kC3 * factor * root * root * root;
    b = kC1 * factor * root - a * a;
    const bool is_known = scale >= 1e-20f && scale <= 1e4f && factor >= 1e-20f && factor <= 1e20f;
    most = is_known ? fminf(kMost, kMostResult * ptx::rcp(factor)) * ptx::rcp(scale) : -1.f;
  }

  QUIRE_DEVICE bool is_small(float x) const { return fabsf(x) <= most; }

  // factor * tanh(x * scale) + y.
  QUIRE_DEVICE float plus(float x, float y) const {
    const float u = x * unit, v = fmaf(u, u, a);
    return fmaf(u, fmaf(v, v, b), y);
  }
  QUIRE_DEVICE Four<float> plus(const Four<float>& x, float y) const {
    return {plus(x.at[0], y), plus(x.at[1], y), plus(x.at[2], y), plus(x.at[3], y)};
  }
};

// factor * tanh(x * scale) of any numbers. The magnitude of each number alone decides how it is computed, so that a
// logit's bits do not depend on the other logits of a warp. kPairs: see tanh_of_four; it takes fewer special functions
// and fewer registers.
template <bool kPairs>
struct AnyTanh {
  const SmallTanh& small;
  float scale, factor;

  // factor * tanh(x * scale) + y. For large numbers tanh is 1 - 2 / (1 + exp(2 * x * scale)).
  QUIRE_DEVICE float plus(float x, float y) const {
    const float part = ptx::rcp(1.f + ptx::ex2(x * (scale * (2.f * kLog2e))));
    const float large = fmaf(part, -2.f * factor, factor + y);
    return small.is_small(x) ? small.plus(x, y) : large;
  }
  QUIRE_DEVICE Four<float> plus(const Four<float>& x, float y) const {
    if constexpr (!kPairs) return {plus(x.at[0], y), plus(x.at[1], y), plus(x.at[2], y), plus(x.at[3], y)};
    Four<float> z = tanh_of_four<true>(x, scale);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      z.at[j] = small.is_small(x.at[j]) ? small.plus(x.at[j], y) : fmaf(z.at[j], factor, y);
    }
    return z;
  }
};

}  // namespace quire
