// The functions with which expressions (core/expression.h) are written on a host. A value that is the same in all lanes
// is one number, any other a vector.
#pragma once
#include <math.h>
#include "quire/core/expression.h"
#include "quire/tile/cpu/vector.h"

namespace quire::cpu {

// A bool for each lane: all bits of the lane are set, or none.
struct Bools {
  Ints lanes;
};

// A value as a vector, and a vector's lane.
QUIRE_CPU Floats as_vector(float x) { return broadcast(x); }
QUIRE_CPU Floats as_vector(Floats x) { return x; }
QUIRE_CPU Ints as_vector(int32_t x) { return broadcast(x); }
QUIRE_CPU Ints as_vector(Ints x) { return x; }
QUIRE_CPU Bools as_vector(bool x) { return {broadcast(x ? -1 : 0)}; }
QUIRE_CPU Bools as_vector(Bools x) { return x; }
QUIRE_CPU float lane_of(Floats x, int i) { return x[i]; }
QUIRE_CPU int32_t lane_of(Ints x, int i) { return x[i]; }
QUIRE_CPU bool lane_of(Bools x, int i) { return x.lanes[i] != 0; }
QUIRE_CPU void set_lane(Floats& x, int i, float y) { x[i] = y; }
QUIRE_CPU void set_lane(Ints& x, int i, int32_t y) { x[i] = y; }
QUIRE_CPU void set_lane(Bools& x, int i, bool y) { x.lanes[i] = y ? -1 : 0; }

template <class T>
constexpr bool is_number = is_same<T, float>::value || is_same<T, int32_t>::value || is_same<T, bool>::value;
template <class T>
constexpr bool is_float = is_same<T, float>::value || is_same<T, Floats>::value;
template <class T>
constexpr bool is_bool = is_same<T, bool>::value || is_same<T, Bools>::value;

// f of numbers; lane by lane if an argument is a vector.
template <class F, class... X>
QUIRE_CPU auto each_lane(F&& f, X... x) {
  if constexpr ((is_number<X> && ...)) {
    return f(x...);
  } else {
    decltype(as_vector(f(lane_of(as_vector(x), 0)...))) y = {};
    for (int i = 0; i < kLanes; ++i) set_lane(y, i, f(lane_of(as_vector(x), i)...));
    return y;
  }
}

QUIRE_CPU uint32_t words_of(int32_t x) { return static_cast<uint32_t>(x); }
QUIRE_CPU Words words_of(Ints x) { return reinterpret_cast<Words>(x); }
QUIRE_CPU int32_t ints_of(uint32_t x) { return static_cast<int32_t>(x); }
QUIRE_CPU Ints ints_of(Words x) { return reinterpret_cast<Ints>(x); }

// 2^x of any x; 0 below 2^-126.
QUIRE_CPU Floats exp2_of_any(Floats x) {
  const Floats bounded = x > 200.0f ? broadcast(200.0f) : x;
  return x > 100.0f ? exp2(bounded - 100.0f) * 0x1p100f : exp2(bounded);
}

struct ExpressionMath : SharedMath<ExpressionMath> {
  template <class F, class... X>
  QUIRE_CPU static auto each(F f, X... x) {
    return each_lane(f, x...);
  }

  template <class At, class Tensor, class Row, class Index>
  QUIRE_CPU static auto read_row(const Tensor& tensor, Row row, Index index) {
    return each_lane([&](int32_t r, int32_t i) { return tensor.in_row(r, i); }, row, index);
  }

  // ---- arithmetic ----

  // Integers wrap.
#define QUIRE_ARITHMETIC(name, operator)                \
  template <class A, class B>                           \
  QUIRE_CPU static auto name(A a, B b) {                \
    if constexpr (is_float<A>)                          \
      return a operator b;                              \
    else                                                \
      return ints_of(words_of(a) operator words_of(b)); \
  }
  QUIRE_ARITHMETIC(add, +)
  QUIRE_ARITHMETIC(sub, -)
  QUIRE_ARITHMETIC(mul, *)
#undef QUIRE_ARITHMETIC
  template <class A, class B>
  QUIRE_CPU static auto divide(A a, B b) {
    return a / b;
  }
  template <class A>
  QUIRE_CPU static A neg(A a) {
    if constexpr (is_float<A>)
      return -a;
    else
      return ints_of(0u - words_of(a));
  }
  template <class A>
  QUIRE_CPU static A abs(A a) {
    if constexpr (is_float<A>)
      return each_lane([](float x) { return fabsf(x); }, a);
    else
      return where(lt(a, 0), neg(a), a);
  }

  // ---- bits ----

#define QUIRE_BITWISE(name, operator)                                    \
  template <class A, class B>                                            \
  QUIRE_CPU static auto name(A a, B b) {                                 \
    if constexpr (is_bool<A>)                                            \
      return logical([](auto x, auto y) { return x operator y; }, a, b); \
    else                                                                 \
      return a operator b;                                               \
  }
  QUIRE_BITWISE(bit_and, &)
  QUIRE_BITWISE(bit_or, |)
  QUIRE_BITWISE(bit_xor, ^)
#undef QUIRE_BITWISE
  QUIRE_CPU static bool bit_not(bool a) { return !a; }
  QUIRE_CPU static Bools bit_not(Bools a) { return {~a.lanes}; }
  QUIRE_CPU static int32_t bit_not(int32_t a) { return ~a; }
  QUIRE_CPU static Ints bit_not(Ints a) { return ~a; }
  template <class F, class A, class B>
  QUIRE_CPU static auto logical(F f, A a, B b) {
    if constexpr (is_number<A> && is_number<B>)
      return static_cast<bool>(f(a, b));
    else
      return Bools{f(as_vector(a).lanes, as_vector(b).lanes)};
  }

  // ---- comparisons ----

  template <class F, class A, class B>
  QUIRE_CPU static auto compare(F f, A a, B b) {
    if constexpr (is_number<A> && is_number<B>)
      return f(a, b);
    else if constexpr (is_bool<A>)
      return Bools{f(as_vector(a).lanes & 1, as_vector(b).lanes & 1)};
    else
      return Bools{f(as_vector(a), as_vector(b))};
  }
  template <class C, class A, class B>
  QUIRE_CPU static auto where(C condition, A a, B b) {
    if constexpr (is_number<C> && is_number<A> && is_number<B>) {
      return condition ? a : b;
    } else if constexpr (is_bool<A>) {
      const Ints c = as_vector(condition).lanes;
      return Bools{(c & as_vector(a).lanes) | (~c & as_vector(b).lanes)};
    } else {
      return as_vector(condition).lanes ? as_vector(a) : as_vector(b);
    }
  }
  // The minimum; NaN if an argument is NaN.
  template <class A, class B>
  QUIRE_CPU static auto minimum(A a, B b) {
    return where(bit_or(lt(a, b), ne(a, a)), a, b);
  }
  template <class A, class B>
  QUIRE_CPU static auto maximum(A a, B b) {
    return where(bit_or(gt(a, b), ne(a, a)), a, b);
  }

  // ---- functions ----

  QUIRE_CPU static float to_float(bool x) { return x ? 1.0f : 0.0f; }
  QUIRE_CPU static float to_float(int32_t x) { return static_cast<float>(x); }
  QUIRE_CPU static Floats to_float(Bools x) { return __builtin_convertvector(x.lanes & 1, Floats); }
  QUIRE_CPU static Floats to_float(Ints x) { return __builtin_convertvector(x, Floats); }
  QUIRE_CPU static int32_t to_int(bool x) { return x; }
  QUIRE_CPU static Ints to_int(Bools x) { return x.lanes & 1; }
  template <class X>
  QUIRE_CPU static auto to_int(X x) {
    return each_lane([](float y) { return truncated(y); }, x);
  }
  QUIRE_CPU static int32_t truncated(float x) {
    if (x != x) return 0;
    return x >= 0x1p31f ? INT32_MAX : x <= -0x1p31f ? -INT32_MAX - 1 : static_cast<int32_t>(x);
  }
  template <class X>
  QUIRE_CPU static X exp2_of(X x) {
    if constexpr (is_number<X>)
      return exp2_of_any(broadcast(x))[0];
    else
      return exp2_of_any(x);
  }
  template <class X>
  QUIRE_CPU static X exp(X x) {
    return exp2_of(x * kLog2e);
  }
  QUIRE_CPU static float log2_of(float x) { return log2f(x); }
  QUIRE_CPU static float log_of(float x) { return logf(x); }
  QUIRE_CPU static float sqrt_of(float x) { return sqrtf(x); }
  QUIRE_CPU static float floor_of(float x) { return floorf(x); }
  template <class X>
  QUIRE_CPU static X rsqrt(X x) {
    return 1.0f / sqrt(x);
  }
  template <class X>
  QUIRE_CPU static X sigmoid(X x) {
    return 1.0f / (1.0f + exp2_of(x * -kLog2e));
  }
  template <class X>
  QUIRE_CPU static X tanh(X x) {
    if constexpr (is_number<X>)
      return cpu::tanh(broadcast(x))[0];
    else
      return cpu::tanh(x);
  }

  // Converts a value to a vector of logits, also if it is the same in all lanes.
  template <class X>
  QUIRE_CPU static Floats as_logits(X x) {
    return as_vector(x);
  }
};

}  // namespace quire::cpu
