// The one door for logits: what happens to q . k before softmax, on every backend. Softmax takes
//   exp2(factor * score(q . k, at))   where the query sees the key (core/mask.h), else 0,
// so that exp2 is the only exponential and lse comes out in base 2.
//   ALiBi:    slope of the head * (key - where the query stands) is added to the scaled logit
//   soft cap: cap * tanh(logit / cap), of the biased logit
//   score:    the expression of a user (core/expression.h) takes the scaled logit, natural, and gives another
//
// Another transform is a line of score() behind a constant of the variant, and a field for each number that it takes
// from AttentionParams. A backend calls score() from its visitor of logits (tile/shared/logits.cuh, tile/cpu/logits.h),
// and need not know which transforms there are. fa3 has faster code for soft caps and for scores of a
// pattern (core/expression.h).
#pragma once
#ifndef __CUDACC__
#include <math.h>
#endif
#include "quire/core/expression.h"
#include "quire/core/params.h"

namespace quire {

constexpr int kPosEncodingAlibi = 2;  // Variant::kPosEncoding

// The base-2 logarithm of the slope of ALiBi (Press et al., 2022) of a head, whose number is a float or a vector of
// them. The slopes of n heads, n a power of two, are 2^(-8 (head + 1) / n). The heads from the largest such n on take
// every other slope of 2 n heads.
template <class X>
QUIRE_HD X alibi_exponent(X head, int num_heads) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, static_cast<float>(num_heads)) & 0x7f800000u;
  const float n = __builtin_bit_cast(float, bits), eight_by_n = __builtin_bit_cast(float, (257u << 23) - bits);
  const X number = head + 1.0f;
  return -eight_by_n * (number <= n ? number : number - (n + 0.5f));
}

// Math has the backend's functions of logits. A transform of a NaN has to be a NaN.
template <class V, class Math>
struct LogitsTransform : ExpressionOf<V> {
  static constexpr bool kHasAlibi = V::kPosEncoding == kPosEncodingAlibi, kHasScore = V::kScore != 0;
  // The only transform is a soft cap: the built-in one, or a score that computes one.
  static constexpr bool kIsCapScore = score_pattern<V>() == kPatternSoftCap;
  static constexpr bool kIsSoftCap = (V::kSoftCap != 0 && !kHasAlibi) || kIsCapScore;
  // There is no transform, only the scaling, which softmax does anyway.
  static constexpr bool kIsIdentity = V::kSoftCap == 0 && !kHasAlibi && !kHasScore;
  // The only transform is a bias that grows by a constant from key to key.
  static constexpr bool kIsRamp = kHasAlibi && V::kSoftCap == 0;
  static_assert(!kHasScore || (V::kSoftCap == 0 && !kHasAlibi), "a score says all that happens to a logit");

  float scale;      // of q . k
  float factor;     // makes what score() returns a base-2 exponent
  float bias_unit;  // ALiBi: the factor of biases, as `scale` is that of q . k
  int num_heads;

  QUIRE_HD explicit LogitsTransform(const AttentionParams& p)
      : ExpressionOf<V>(p),
        scale(logits_scale<V>(p)),
        factor(kIsIdentity        ? scale
               : V::kSoftCap != 0 ? p.logits_cap
               : kHasScore        ? kLog2e
                                  : 1.0f),
        bias_unit(V::kSoftCap != 0 ? kLog2e / p.logits_cap : kLog2e),
        num_heads(p.num_qo_heads) {
    if constexpr (kIsCapScore) {  // tanh is odd, and softmax wants a factor that is positive
      const SoftCap cap = V::template cap<Math>(this->operands);
      factor = fabsf(cap.outer) * kLog2e;
      scale *= cap.outer < 0.f ? -cap.inner : cap.inner;
    }
  }

  // X is one logit or several. at.q_idx(), at.kv_idx(), at.head() and at.request() say which: queries and keys are
  // counted within their request, which has at.qo_len() and at.kv_len() of them; heads are query heads. at.ramp(step)
  // is step * (key - position of the query).
  template <class X, class At>
  QUIRE_HD X score(X logit, const At& at) const {
    if constexpr (kHasAlibi) logit = Math::fma(logit, scale, at.ramp(bias_step(at)));
    if constexpr (V::kSoftCap != 0 || kIsCapScore) return Math::tanh(logit, kHasAlibi ? 1.0f : scale);
    if constexpr (kHasScore && !kIsCapScore) {
      return Math::as_logits(V::template score<Math>(this->operands, Math::mul(logit, scale), at));
    }
    return logit;
  }

  // The score of an expression, for a row whose Variant::row() was computed before.
  template <class X, class At, class Row>
  QUIRE_HD X score(X logit, const At& at, const Row& row) const {
    return Math::as_logits(V::template score<Math>(this->operands, Math::mul(logit, scale), at, row));
  }

  // ALiBi: the bias of a key minus the bias of the key to its left.
  template <class At>
  QUIRE_HD auto bias_step(const At& at) const {
    return Math::exp2(alibi_exponent(Math::to_float(at.head()), num_heads)) * bias_unit;
  }
};

constexpr float kNoLse = -__builtin_huge_valf();  // of a row without keys
QUIRE_HD float magnitude(float x) { return x < 0.f ? -x : x; }

// The lse to return for a row of `head` with this lse. FlashInfer's ALiBi counts distances from qo_idx instead of the
// query's position, which adds a constant for each request to logits and lse. Under a soft cap it would not be a
// constant: there the lse is not adjusted.
// For latents see AttentionParams::lse_unit.
template <class V, class Params>
QUIRE_HD float returned_lse(float lse, const Params& p, const RowTile& tile, int head) {
  if constexpr (kIsLatent<V>) return lse == kNoLse ? lse * p.lse_unit : lse * magnitude(p.lse_unit);
  if constexpr (V::kPosEncoding != kPosEncodingAlibi || V::kSoftCap != 0) return lse * p.lse_unit;
  const float slope = exp2f(alibi_exponent(static_cast<float>(head), p.num_qo_heads));
  return (lse + slope * kLog2e * static_cast<float>(tile.kv_len - tile.qo_len)) * p.lse_unit;
}

// Stores what is returned of a row beside its result: its lse; with kMaxLogits as the first of two numbers, of which
// the second one is the largest of the row's logits, in the same unit. m, d: its maximum and denominator, without
// sinks.
template <class V, class Params>
QUIRE_HD void store_statistics(const Params& p, const RowTile& tile, int64_t token, int head, float lse, float m,
                               float d) {
  float* to = p.lse + (token * p.num_qo_heads + head) * (1 + V::kMaxLogits);
  to[0] = returned_lse<V>(lse, p, tile, head);
  if constexpr (V::kMaxLogits != 0) to[1] = d == 0.f ? kNoLse : m * magnitude(p.lse_unit);
}

}  // namespace quire
