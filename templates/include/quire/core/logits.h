// From q . k to a base-2 exponent, so that softmax needs exp2 alone and lse comes out in base 2.
//   without soft cap: scale * (q . k)               scale = sm_scale * log2(e)
//   with soft cap:    cap * tanh(scale * (q . k))   scale = sm_scale / cap, cap = cap * log2(e)
#pragma once
#include "quire/core/params.h"

namespace quire {

template <bool kSoftCap>
struct Logits {
  float scale;
  float cap;

  QUIRE_HD explicit Logits(const AttentionParams& p) : scale(p.logits_scale), cap(p.logits_cap) {}

  // The exponent of scale * (q . k). T is a float or a vector of floats, `tanh` the backend's own.
  template <class T, class Tanh>
  QUIRE_HD T apply_scaled(T x, Tanh&& tanh) const {
    if constexpr (kSoftCap) return tanh(x) * cap;
    return x;
  }
};

}  // namespace quire
