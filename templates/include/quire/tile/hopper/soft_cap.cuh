// Softmax of a warpgroup's logits under a soft cap.
//
// If all logits of a warp are small, tanh is a polynomial without special functions. Otherwise the magnitude of each
// logit alone decides how it is computed, so that a row's bits do not depend on the rows beside it.
#pragma once
#include "quire/tile/hopper/softmax.cuh"
#include "quire/tile/shared/tanh.cuh"

namespace quire {

// T: the type of weights. Weights of bf16 have the range of float, so that all rows can have the same reference in
// place of their maximum, which may differ from it by kReach. No small logit exceeds that reference. Rows with weights
// of other types have references of their own.
template <class T, class Transform>
struct SoftCapSoftmax {
  static constexpr bool kHasReference = is_same<T, bf16_t>::value;
  static constexpr float kReference = SmallTanh::kMostResult - kMaxLag, kReach = 80.f;

  // Replaces s by weights. end(): the code that follows, compiled into each branch so that both overlap. Logits of keys
  // that a row does not see are kHiddenLogit.
  template <bool kMasked, int n, class End>
  QUIRE_DEVICE static void exponentiate(WarpgroupSoftmax& softmax, float (&s)[n], const Transform& transform,
                                        const SmallTanh& cap, const End& end) {
    if constexpr (!kMasked) {
      const float most = WarpgroupSoftmax::most(s);
      if (__all_sync(0xffffffffu, most <= cap.most && may_be_small(softmax)) != 0) {
        exponentiate_small(softmax, s, cap, most);
        end();
        return;
      }
    }
    exponentiate_any<kMasked>(softmax, s, transform, cap);
    end();
  }

 private:
  QUIRE_DEVICE static bool may_be_small(const WarpgroupSoftmax& softmax) {
    return !kHasReference || (softmax.m[0] == kReference && softmax.m[1] == kReference);
  }

  template <int n>
  QUIRE_DEVICE static void exponentiate_small(WarpgroupSoftmax& softmax, float (&s)[n], const SmallTanh& cap,
                                              float most) {
    const auto capped = [&](const Four<float>& x, float y) { return cap.plus(x, y); };
    softmax.is_raised = false;
    if constexpr (kHasReference) {
      softmax.exponentiate_capped(s, capped, {kReference, kReference});
    } else {
      raise_small(softmax, s, cap, most);
      softmax.exponentiate_capped(s, capped, softmax.m);
    }
  }

  // Raises the reference maximum for logits with magnitudes of at most `most`, which mostly shows that no row exceeds
  // the reference.
  template <int n>
  QUIRE_DEVICE static void raise_small(WarpgroupSoftmax& softmax, const float (&s)[n], const SmallTanh& cap,
                                       float most) {
    if (__all_sync(0xffffffffu, cap.plus(most, 0.f) <= fminf(softmax.m[0], softmax.m[1]) + kMaxLag) != 0) return;
    softmax.raise_to({cap.plus(softmax.row_max(s, 0), 0.f), cap.plus(softmax.row_max(s, 1), 0.f)});
  }

  template <bool kMasked, int n>
  QUIRE_DEVICE static void exponentiate_any(WarpgroupSoftmax& softmax, float (&s)[n], const Transform& transform,
                                            const SmallTanh& cap) {
    if (Transform::kIsCapScore && transform.scale < 0.f) flip<kMasked>(s);
    const AnyTanh<!kHasReference> any = {cap, fabsf(transform.scale), transform.factor};
    raise_any<kMasked>(softmax, s, any);
    softmax.exponentiate_capped(
        s,
        [&](const Four<float>& x, float y) {
          Four<float> z = any.plus(x, y);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (kMasked && x.at[j] == kHiddenLogit) z.at[j] = __int_as_float(0xff800000);
          }
          return z;
        },
        softmax.m);
  }

  // Raises the reference maximum, unless no logit can exceed the reference that all rows share.
  template <bool kMasked, int n>
  QUIRE_DEVICE static void raise_any(WarpgroupSoftmax& softmax, const float (&s)[n],
                                     const AnyTanh<!kHasReference>& any) {
    softmax.is_raised = false;
    if (kHasReference && any.factor <= kReference + kMaxLag && __all_sync(0xffffffffu, may_be_small(softmax)) != 0)
      return;
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = softmax.row_max(s, h);
      top[h] = kMasked && x == kHiddenLogit ? kNoLogit : any.plus(x, 0.f);
    }
    softmax.raise_to(top, [](float x) {
      return kHasReference && x >= kReference - kReach && x <= kReference + kMaxLag ? kReference : x;
    });
  }

  // A negative scale is applied as the positive one to -q . k, because tanh is odd.
  template <bool kMasked, int n>
  QUIRE_DEVICE static void flip(float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] = kMasked && s[i] == kHiddenLogit ? s[i] : -s[i];
  }
};

}  // namespace quire
