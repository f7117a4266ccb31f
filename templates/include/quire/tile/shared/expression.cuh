// The functions with which expressions (core/expression.h) are written on a GPU. A value that is the same for all keys
// of a row is one number. A value that depends on the key is a Four, or a Ramp if it is linear in the key's index.
#pragma once
#include "quire/core/expression.h"
#include "quire/core/mask.h"
#include "quire/tile/shared/tanh.cuh"

namespace quire {

// Numbers that are linear in the key's index: first + step * (at + 0, 1, 8 and 9), where the compiler knows `at`. Only
// `first` is converted from integer to float, and the product with a number of the row is another Ramp, so that a key
// costs one multiply-add.
template <class T>
struct Ramp {
  T first, step;
  int at;
};

// Number j of a value's four, and whether the four may differ.
template <class T>
struct OfKeys {
  static constexpr bool kVaries = false;
  QUIRE_DEVICE static T get(const T& x, int) { return x; }
};
template <class T>
struct OfKeys<Four<T>> {
  static constexpr bool kVaries = true;
  QUIRE_DEVICE static T get(const Four<T>& x, int j) { return x.at[j]; }
};
template <>
struct OfKeys<Ramp<float>> {
  static constexpr bool kVaries = true;
  QUIRE_DEVICE static float get(const Ramp<float>& x, int j) {
    return fmaf(x.step, static_cast<float>(x.at + j / 2 * 8 + j % 2), x.first);
  }
};
template <>
struct OfKeys<Ramp<int32_t>> {
  static constexpr bool kVaries = true;
  QUIRE_DEVICE static int32_t get(const Ramp<int32_t>& x, int j) {
    return wrapped(word(x.first) + word(x.step) * word(x.at + j / 2 * 8 + j % 2));
  }
};

template <class F, class... X>
QUIRE_DEVICE auto of_keys(F f, const X&... x) {
  if constexpr ((OfKeys<X>::kVaries || ...)) {
    Four<decltype(f(OfKeys<X>::get(x, 0)...))> y;
#pragma unroll
    for (int j = 0; j < 4; ++j) y.at[j] = f(OfKeys<X>::get(x, j)...);
    return y;
  } else {
    return f(x...);
  }
}

struct ExpressionMath : SharedMath<ExpressionMath> {
  using Math = ExpressionMath;

  template <class F, class... X>
  QUIRE_DEVICE static auto each(F f, const X&... x) {
    return of_keys(f, x...);
  }

  // Reads a row of a tensor: only the last index depends on the key. At::kInside: the elements for all keys of the KV
  // tile are neighbours inside the tensor, so that a key costs one load.
  template <class At, class Tensor>
  QUIRE_DEVICE static auto read_row(const Tensor& tensor, int32_t row, const Ramp<int32_t>& keys) {
    if constexpr (At::kInside) {
      const auto* from = tensor.data + row + keys.first;
      return of_keys([&](int32_t key) { return widen_element(load_element(from + key)); },
                     Ramp<int32_t>{0, keys.step == 1 ? 1 : -1, keys.at});
    } else {
      return of_keys([&](int32_t key) { return tensor.in_row(row, key); }, keys);
    }
  }
  // The keys whose elements of the tensor, neighbours in memory, are inside the tensor. `keys`: the last index of each.
  template <class Tensor>
  QUIRE_DEVICE static KeyRange keys_inside(const Tensor& tensor, const Ramp<int32_t>& keys) {
    const int32_t size = tensor.row_size();
    if (keys.step == 1) return {ptx::subtract_saturated(0, keys.first), ptx::subtract_saturated(size, keys.first)};
    return {ptx::subtract_saturated(keys.first, size - 1), ptx::subtract_saturated(keys.first, -1)};
  }

  // ---- arithmetic ----

  QUIRE_DEVICE static float sum(float a, float b) { return a + b; }
  QUIRE_DEVICE static int32_t sum(int32_t a, int32_t b) { return wrapped(word(a) + word(b)); }
  QUIRE_DEVICE static float difference(float a, float b) { return a - b; }
  QUIRE_DEVICE static int32_t difference(int32_t a, int32_t b) { return wrapped(word(a) - word(b)); }
  QUIRE_DEVICE static float product(float a, float b) { return a * b; }
  QUIRE_DEVICE static int32_t product(int32_t a, int32_t b) { return wrapped(word(a) * word(b)); }

  QUIRE_OF_TWO(add, auto, sum(x, y))
  template <class T>
  QUIRE_DEVICE static Ramp<T> add(const Ramp<T>& a, const T& b) {
    return {sum(a.first, b), a.step, a.at};
  }
  template <class T>
  QUIRE_DEVICE static Ramp<T> add(const T& a, const Ramp<T>& b) {
    return {sum(a, b.first), b.step, b.at};
  }
  QUIRE_OF_TWO(sub, auto, difference(x, y))
  template <class T>
  QUIRE_DEVICE static Ramp<T> sub(const Ramp<T>& a, const T& b) {
    return {difference(a.first, b), a.step, a.at};
  }
  template <class T>
  QUIRE_DEVICE static Ramp<T> sub(const T& a, const Ramp<T>& b) {
    return {difference(a, b.first), difference(T(0), b.step), b.at};
  }
  QUIRE_OF_TWO(mul, auto, product(x, y))
  template <class T>
  QUIRE_DEVICE static Ramp<T> mul(const Ramp<T>& a, const T& b) {
    return {product(a.first, b), product(a.step, b), a.at};
  }
  template <class T>
  QUIRE_DEVICE static Ramp<T> mul(const T& a, const Ramp<T>& b) {
    return mul(b, a);
  }
  // If the divisor is the same for all keys, they share one reciprocal.
  template <class A, class B>
  QUIRE_DEVICE static auto divide(const A& a, const B& b) {
    if constexpr (OfKeys<A>::kVaries && !OfKeys<B>::kVaries) {
      const float reciprocal = ptx::divide(1.f, b);
      return of_keys([&](float x) { return x * reciprocal; }, a);
    } else {
      return of_keys([](float x, float y) { return ptx::divide(x, y); }, a, b);
    }
  }
  QUIRE_OF_ONE(neg, auto, difference(decltype(x)(0), x))
  template <class T>
  QUIRE_DEVICE static Ramp<T> neg(const Ramp<T>& a) {
    return {difference(T(0), a.first), difference(T(0), a.step), a.at};
  }
  QUIRE_DEVICE static float neg(float a) { return -a; }
  QUIRE_DEVICE static Four<float> neg(const Four<float>& a) { return {-a.at[0], -a.at[1], -a.at[2], -a.at[3]}; }
  QUIRE_OF_ONE(abs, auto, magnitude(x))
  QUIRE_DEVICE static float magnitude(float x) { return fabsf(x); }
  QUIRE_DEVICE static int32_t magnitude(int32_t x) { return x < 0 ? wrapped(0u - word(x)) : x; }

  // ---- bits ----

  QUIRE_OF_TWO(bit_and, auto, static_cast<decltype(x)>(x& y))
  QUIRE_OF_TWO(bit_or, auto, static_cast<decltype(x)>(x | y))
  QUIRE_OF_TWO(bit_xor, auto, static_cast<decltype(x)>(x ^ y))
  QUIRE_OF_ONE(bit_not, auto, inverse(x))
  QUIRE_DEVICE static bool inverse(bool x) { return !x; }
  QUIRE_DEVICE static int32_t inverse(int32_t x) { return ~x; }

  // ---- comparisons ----

  template <class F, class A, class B>
  QUIRE_DEVICE static auto compare(F f, const A& a, const B& b) {
    return of_keys(f, a, b);
  }
  // Compares a Ramp with a number of the row. Keys are in order or in reverse: each one's constant is compared with the
  // position of the row's number among the keys.
  template <class F>
  QUIRE_DEVICE static Four<bool> compare(F f, const Ramp<int32_t>& a, const int32_t& b) {
    if (a.step == 1) {
      const int32_t place = ptx::subtract_saturated(b, a.first);
      return of_keys([&](int32_t key) { return f(key, place); }, Ramp<int32_t>{0, 1, a.at});
    }
    if (a.step == -1) {
      const int32_t place = ptx::subtract_saturated(a.first, b);
      return of_keys([&](int32_t key) { return f(place, key); }, Ramp<int32_t>{0, 1, a.at});
    }
    return of_keys([&](int32_t x) { return f(x, b); }, a);
  }
  template <class F>
  QUIRE_DEVICE static Four<bool> compare(F f, const int32_t& a, const Ramp<int32_t>& b) {
    return compare([&](int32_t x, int32_t y) { return f(y, x); }, b, a);
  }
  template <class C, class A, class B>
  QUIRE_DEVICE static auto where(const C& condition, const A& a, const B& b) {
    return of_keys([](bool c, auto x, auto y) { return c ? x : y; }, condition, a, b);
  }
  QUIRE_OF_TWO(minimum, auto, least(x, y))
  QUIRE_OF_TWO(maximum, auto, greatest(x, y))
  QUIRE_DEVICE static float least(float a, float b) { return ptx::min_nan(a, b); }
  QUIRE_DEVICE static float greatest(float a, float b) { return ptx::max_nan(a, b); }
  QUIRE_DEVICE static int32_t least(int32_t a, int32_t b) { return min(a, b); }
  QUIRE_DEVICE static int32_t greatest(int32_t a, int32_t b) { return max(a, b); }

  // ---- functions ----

  QUIRE_OF_ONE(to_float, auto, static_cast<float>(x))
  QUIRE_DEVICE static Ramp<float> to_float(const Ramp<int32_t>& a) {
    return {static_cast<float>(a.first), static_cast<float>(a.step), a.at};
  }
  QUIRE_OF_ONE(to_int, auto, truncated(x))
  QUIRE_DEVICE static int32_t truncated(float x) { return ptx::to_int(x); }
  QUIRE_DEVICE static int32_t truncated(bool x) { return x; }
  QUIRE_DEVICE static int32_t truncated(int32_t x) { return x; }
  QUIRE_OF_ONE(exp2_of, float, ptx::ex2(x))
  QUIRE_OF_ONE(exp, float, ptx::ex2(x* kLog2e))
  QUIRE_OF_ONE(rsqrt, float, ptx::rsqrt(x))
  QUIRE_OF_ONE(sigmoid, float, ptx::rcp(1.f + ptx::ex2(x * -kLog2e)))
  QUIRE_DEVICE static float log2_of(float x) { return ptx::lg2(x); }
  QUIRE_DEVICE static float log_of(float x) { return ptx::lg2(x) * kLn2; }
  QUIRE_DEVICE static float sqrt_of(float x) { return ptx::sqrt(x); }
  QUIRE_DEVICE static float floor_of(float x) { return ptx::floor(x); }
  static constexpr float kLn2 = 0.6931471805599453f;

  // Converts a value to four logits, also where it is the same for all keys.
  template <class X>
  QUIRE_DEVICE static Four<float> as_logits(const X& x) {
    return {OfKeys<X>::get(x, 0), OfKeys<X>::get(x, 1), OfKeys<X>::get(x, 2), OfKeys<X>::get(x, 3)};
  }
};

// The functions that transforms are written with. kPairs: see tanh_of_four.
template <bool kPairs_>
struct FragmentMath : ExpressionMath {
  static constexpr bool kPairs = kPairs_;
  QUIRE_DEVICE static Four<float> tanh(const Four<float>& x, float scale) { return tanh_of_four<kPairs>(x, scale); }
  template <class X>
  QUIRE_DEVICE static auto tanh(const X& x) {
    const Four<float> y = tanh_of_four<kPairs>(as_logits(x), 1.f);
    if constexpr (OfKeys<X>::kVaries)
      return y;
    else
      return y.at[0];
  }
  using ExpressionMath::to_float;
  QUIRE_DEVICE static Four<float> fma(const Four<float>& x, float scale, const Four<float>& y) {
    return {fmaf(x.at[0], scale, y.at[0]), fmaf(x.at[1], scale, y.at[1]), fmaf(x.at[2], scale, y.at[2]),
            fmaf(x.at[3], scale, y.at[3])};
  }
  QUIRE_DEVICE static float exp2(float x) { return ptx::ex2(x); }
  QUIRE_DEVICE static float to_float(int x) { return static_cast<float>(x); }
};

}  // namespace quire
