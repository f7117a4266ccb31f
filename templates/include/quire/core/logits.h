// The one door for logits: what happens to q . k before softmax, on every backend. Softmax takes
//   exp2(factor * score(q . k, at))   where the query sees the key (core/mask.h), else 0,
// so that exp2 is the only exponential and lse comes out in base 2.
//
// Another transform (a bias by position, an expression of the user) is a line of score() behind a constant of the
// variant, and a field for each number that it takes from AttentionParams. A backend calls score() from its visitor of
// logits (tile/logits.cuh, tile/cpu_logits.h) and does not know which transforms there are.
#pragma once
#include "quire/core/params.h"

namespace quire {

// Math: the backend's functions of logits. A transform has to keep a NaN.
template <class V, class Math>
struct LogitsTransform {
  // Nothing happens but the scaling that softmax does anyway.
  static constexpr bool kIsIdentity = V::kSoftCap == 0;

  float scale;   // of q . k
  float factor;  // makes what score() returns a base-2 exponent

  QUIRE_HD explicit LogitsTransform(const AttentionParams& p)
      : scale(logits_scale<V>(p)), factor(kIsIdentity ? scale : p.logits_cap) {}

  // X: some logits; at.q_idx(), at.kv_idx(), at.head() and at.request() say which. Queries and keys are counted within
  // their request, heads are query heads.
  template <class X, class At>
  QUIRE_HD X score(X logit, const At& at) const {
    if constexpr (V::kSoftCap != 0) return Math::tanh(logit, scale);
    return logit;
  }
};

}  // namespace quire
