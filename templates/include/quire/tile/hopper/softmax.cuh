// Softmax over KV tiles by a warpgroup: 64 rows, two a lane, as wgmma leaves them; without and with a soft cap.
//
// With a soft cap: if all logits of a warp are small, tanh is a polynomial without special functions. Otherwise the
// magnitude of each logit alone decides how it is computed, so that a row's bits do not depend on the rows beside it.
#pragma once
#include "quire/tile/shared/softmax.cuh"
#include "quire/tile/shared/tanh.cuh"

namespace quire {

// The number added to all logits of a row, in base 2: none, or an offset in each lane.
struct NoOffsets {
  QUIRE_DEVICE float plus(float x, int) const { return x; }
};
struct RowOffsets {
  float at[2];
  QUIRE_DEVICE float plus(float x, int h) const { return x + at[h]; }
};

// The factor of logits: one number, or one for each of a lane's rows.
struct RowScales {
  float at[2];
};
QUIRE_DEVICE float scale_of(float scale, int) { return scale; }
QUIRE_DEVICE float scale_of(const RowScales& scales, int h) { return scales.at[h]; }

// Factors of any sign, one for each of a lane's rows. A negative factor is applied as the positive one to -q . k.
struct SignedScales {
  RowScales sizes;
  bool is_negative[2], flips;  // flips: a row of the warp

  // scale: the positive factor of q . k. A factor of 0 becomes a number too small to make a difference, because a
  // hidden logit times 0 would be NaN.
  QUIRE_DEVICE void set(int h, float scale, float by) {
    sizes.at[h] = ptx::max_nan(scale * fabsf(by), 1e-30f), is_negative[h] = by < 0.f;
    flips = __any_sync(0xffffffffu, is_negative[0] || is_negative[h]) != 0;
  }

  template <int n>
  QUIRE_DEVICE void flip(float (&s)[n]) const {
    if (!flips) return;
#pragma unroll
    for (int i = 0; i < n; ++i) s[i] = is_negative[i / 2 % 2] ? -s[i] : s[i];
  }
};

// The state of this lane's rows: lane / 4 and lane / 4 + 8 of its warp's 16.
struct WarpgroupSoftmax {
  float m[2];       // reference maximum, base-2 exponent; lags behind the true one by at most kMaxLag
  float d[2];       // this lane's part of the denominator
  float factor[2];  // the factor that o still needs, if is_raised
  bool is_raised;   // the same in all lanes of a warp

  QUIRE_DEVICE void clear() {
    m[0] = m[1] = kNoLogit, d[0] = d[1] = 0.f;
    is_raised = false;
  }

  // Raises m where a row of s * scale, with its offset, exceeds it by more than kMaxLag.
  template <int n, class Scale, class Offsets = NoOffsets>
  QUIRE_DEVICE void raise_max(const float (&s)[n], Scale scale, const Offsets& offsets = {}) {
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = offsets.plus(row_max(s, h) * scale_of(scale, h), h);
    raise_to(top);
  }

  // The same in fewer instructions where few KV tiles raise m. kRaises: this one does.
  template <bool kRaises, int n, class Scale, class Offsets = NoOffsets>
  QUIRE_DEVICE void raise_seldom(const float (&s)[n], Scale scale, const Offsets& offsets = {}) {
    if constexpr (!kRaises) {
      bool may_exceed = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) may_exceed |= offsets.plus(row_bound(s, h) * scale_of(scale, h), h) > m[h] + kMaxLag;
      is_raised = __any_sync(0xffffffffu, may_exceed) != 0;
      if (!is_raised) return;
    }
    raise_max(s, scale, offsets);
  }

  // The maximum of s in this lane's row h, or 0 if that is greater. Floats from 0 on are ordered as integers, others
  // are negative integers, and one instruction gives the largest of three integers.
  template <int n>
  QUIRE_DEVICE static float row_bound(const float (&s)[n], int h) {
    int32_t x = 0;
#pragma unroll
    for (int i = 0; i < n; i += 4) x = max(max(x, __float_as_int(s[i + 2 * h])), __float_as_int(s[i + 2 * h + 1]));
    return __int_as_float(x);
  }

  // The maximum of s in this lane's row h.
  template <int n>
  QUIRE_DEVICE static float row_max(const float (&s)[n], int h) {
    float x = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int i = 4; i < n; i += 4) x = fmaxf(x, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
    return x;
  }

  // The largest magnitude in s. The bits of non-negative floats are ordered as integers, and one instruction gives the
  // largest of three integers.
  template <int n>
  QUIRE_DEVICE static float most(const float (&s)[n]) {
    uint32_t x = 0;
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      x = max(max(x, __float_as_uint(fmaxf(fabsf(s[i]), fabsf(s[i + 1])))),
              __float_as_uint(fmaxf(fabsf(s[i + 2]), fabsf(s[i + 3]))));
    }
    return __uint_as_float(x);
  }

  // Raises m to the row's maximum, if this lane's part of a row has a logit that exceeds m by more than kMaxLag.
  QUIRE_DEVICE void raise_to(const float (&top)[2]) {
    raise_to(top, [](float x) { return x; });
  }
  // Raises m to the reference that `choose` returns for the row's maximum.
  template <class Choose>
  QUIRE_DEVICE void raise_to(const float (&top)[2], const Choose& choose, float most_lag = kMaxLag) {
    is_raised = __any_sync(0xffffffffu, top[0] > m[0] + most_lag || top[1] > m[1] + most_lag);
    if (!is_raised) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = quad_max(top[h]), next = x > m[h] + most_lag ? choose(x) : m[h];
      factor[h] = ptx::ex2(m[h] - next);
      m[h] = next;
      d[h] *= factor[h];
    }
  }

  // s becomes exp2(s * scale + offset - m), added up in d.
  template <int n, class Scale, class Offsets = NoOffsets>
  QUIRE_DEVICE void exponentiate(float (&s)[n], Scale scale, const Offsets& offsets = {}) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const int h = i / 2 % 2;
      const float by = offsets.plus(-m[h], h);
      s[i] = ptx::ex2(fmaf(s[i], scale_of(scale, h), by));
      s[i + 1] = ptx::ex2(fmaf(s[i + 1], scale_of(scale, h), by));
      d[h] += s[i] + s[i + 1];
    }
  }

  // s becomes exp2(capped s - reference), added up in d. capped(x, y): the soft cap of four logits, and y.
  template <int n, class Capped>
  QUIRE_DEVICE void exponentiate_capped(float (&s)[n], const Capped& capped, const float (&reference)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < n; i += 8) {
        float *left = s + i + 2 * h, *right = s + i + 4 + 2 * h;
        const Four<float> x = capped(Four<float>{left[0], left[1], right[0], right[1]}, -reference[h]);
        left[0] = ptx::ex2(x.at[0]), left[1] = ptx::ex2(x.at[1]);
        right[0] = ptx::ex2(x.at[2]), right[1] = ptx::ex2(x.at[3]);
        d[h] += left[0] + left[1];
        d[h] += right[0] + right[1];
      }
    }
  }

  // Rescales o to the raised m.
  template <int n>
  QUIRE_DEVICE void rescale(float (&o)[n]) const {
    if (!is_raised) return;
#pragma unroll
    for (int i = 0; i < n; ++i) o[i] *= factor[i / 2 % 2];
  }

  // After the last tile: every lane of a quad gets the whole denominator.
  QUIRE_DEVICE void reduce() { d[0] = quad_sum(d[0]), d[1] = quad_sum(d[1]); }
};

// Fragments of wgmma's operand a from weights: accumulator layout is operand layout, two columns a register.
template <class T, int n>
QUIRE_DEVICE void round_weights(const float (&s)[n], uint32_t (&p)[n / 8][4]) {
#pragma unroll
  for (int i = 0; i < n / 2; ++i) p[i / 4][i % 4] = ptx::pack(T{}, s[2 * i], s[2 * i + 1]);
}

// T: the type of weights. Weights of bf16 have the range of float, so that all rows can have the same reference in
// place of their maximum, which may differ from it by kReach. No small logit exceeds that reference. Each row
// with weights of another type has a separate reference.
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
