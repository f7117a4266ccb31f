// tanh of logits from exp2 and a reciprocal, within 1e-6 absolutely. (tanh.approx is good to 5e-4.)
#pragma once
#include "quire/core/types.h"
#include "quire/ptx/math.cuh"

namespace quire {

// Of four logits of one row, as a lane holds them in two neighbouring blocks of 8 keys: keys first, + 1, + 8 and + 9.
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

// factor * tanh(x * scale) of small numbers without the special-function unit: four multiply-adds, of which the
// caller's own addition is one. Within 1.3e-6 * factor where |x| is at most `most`, |x * scale| 0.65: x P(x^2) with P
// of degree 3, minimax.
struct SmallTanh {
  float most, c[4];  // the greatest |x| that is small, and the coefficients

  // scale: not negative. Powers of a large one would be infinite: no number is small then.
  QUIRE_DEVICE void set(float scale, float factor) {
    constexpr float kCoefficients[] = {0.9999839f, -0.33280692f, 0.12861554f, -0.03767217f};
    most = scale <= 1e4f ? 0.65f * ptx::rcp(scale) : -1.f;
    float power = scale * factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = kCoefficients[i] * power, power *= scale * scale;
  }

  QUIRE_DEVICE bool is_small(float x) const { return fabsf(x) <= most; }

  // No less than factor * tanh(x * scale) of any small number of this magnitude.
  QUIRE_DEVICE float bound(float magnitude) const { return magnitude * c[0]; }

  // factor * tanh(x * scale) + y.
  QUIRE_DEVICE float plus(float x, float y) const {
    const float square = x * x;
    return fmaf(x, fmaf(square, fmaf(square, fmaf(square, c[3], c[2]), c[1]), c[0]), y);
  }
  QUIRE_DEVICE Four<float> plus(const Four<float>& x, float y) const {
    return {plus(x.at[0], y), plus(x.at[1], y), plus(x.at[2], y), plus(x.at[3], y)};
  }
};

// factor * tanh(x * scale) of any numbers. Each is computed in the way of its own magnitude, so that a logit's bits do
// not depend on which others a warp holds.
template <bool kPairs>
struct AnyTanh {
  const SmallTanh& small;
  float scale, factor;

  // And y.
  QUIRE_DEVICE Four<float> plus(const Four<float>& x, float y) const {
    Four<float> z = tanh_of_four<kPairs>(x, scale);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      z.at[j] = small.is_small(x.at[j]) ? small.plus(x.at[j], y) : fmaf(z.at[j], factor, y);
    }
    return z;
  }
  QUIRE_DEVICE float operator()(float x) const {
    const float y = 1.f - 2.f * ptx::rcp(1.f + ptx::ex2(x * (scale * (2.f * kLog2e))));
    return small.is_small(x) ? small.plus(x, 0.f) : y * factor;
  }
};

}  // namespace quire
