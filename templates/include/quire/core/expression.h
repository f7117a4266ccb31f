// The expression of a variant (quire.Variant): a user's score and mask, rendered into struct Variant as
//   struct Operands          the tensors and numbers that they read, which lie behind the parameters
//   row(operands, at)        what all keys of a row have in common
//   score(operands, score, at, row) or score(operands, score, at)
//   mask(operands, at)
// Their template parameter M has the backend's functions (tile/shared/expression.cuh, tile/cpu/expression.h). `at` says
// which query and key (core/logits.h).
//
// Semantics of all backends: integers are 32 bits and wrap. Integer division by 0 gives 0, with the dividend as
// remainder; // and % round towards minus infinity. Shifts count bits modulo 32. A float is converted to the nearest
// integer towards 0 that exists, NaN to 0.
#pragma once
#include "quire/core/convert.h"
#include "quire/core/params.h"
#include "quire/core/rope.h"

namespace quire {

// The parameters of a kernel whose variant has operands.
template <class Base, class Operands>
struct WithOperands {
  Base base;
  Operands operands;
};

// The operands behind the parameters of a kernel; nothing where a variant has none.
template <class V, bool kExists = (V::kScore != 0 || V::kScoreMask != 0)>
struct ExpressionOf {
  QUIRE_HD explicit ExpressionOf(const AttentionParams&) {}
};
template <class V>
struct ExpressionOf<V, true> {
  const typename V::Operands& operands;

  QUIRE_HD explicit ExpressionOf(const AttentionParams& p)
      : operands(*reinterpret_cast<const typename V::Operands*>(reinterpret_cast<const unsigned char*>(&p) +
                                                                V::kOperandsAt)) {}
};

// What rows of a row tile see of each KV tile under the expression's mask, as plan() has found out: a byte for each
// work unit of the KV head. Where the mask depends on the head, KV heads have block masks of their own, unless those
// would take too much memory: block_mask_stride is then 0. Variant::kMaskHeads: for how many neighbouring query heads
// the mask is the same; 0: for all.
template <class V>
QUIRE_HD const uint8_t* block_mask_of(const ExpressionOf<V>& x, int kv_head) {
  if constexpr (V::kMaskHeads != 0) return x.operands.block_mask + kv_head * x.operands.block_mask_stride;
  return x.operands.block_mask;
}
// Whether some rows (visible) or all rows (full) see a KV tile. Without such a mask every row sees all keys.
template <class V>
QUIRE_HD bool block_is_visible(const ExpressionOf<V>& x, int kv_head, int unit) {
  if constexpr (V::kScoreMask != 0) return (block_mask_of<V>(x, kv_head)[unit] & 1) != 0;
  return true;
}
template <class V>
QUIRE_HD bool block_is_full(const ExpressionOf<V>& x, int kv_head, int unit) {
  if constexpr (V::kScoreMask != 0) return (block_mask_of<V>(x, kv_head)[unit] & 2) != 0;
  return true;
}

// An element of a tensor, converted to a number that expressions compute with.
QUIRE_HD float widen_element(float x) { return x; }
QUIRE_HD float widen_element(fp16_t x) { return to_float(x); }
QUIRE_HD float widen_element(bf16_t x) { return to_float(x); }
QUIRE_HD int32_t widen_element(int32_t x) { return x; }
QUIRE_HD int32_t widen_element(int64_t x) {
  return static_cast<int32_t>(max<int64_t>(-INT32_MAX - 1, min<int64_t>(x, INT32_MAX)));
}
QUIRE_HD int32_t widen_element(uint8_t x) { return x; }
QUIRE_HD bool widen_element(bool x) { return x; }

template <class T>
QUIRE_HD T load_element(const T* from) {
#ifdef __CUDA_ARCH__
  if constexpr (is_same<T, int64_t>::value) {
    return static_cast<int64_t>(__ldg(reinterpret_cast<const long long*>(from)));
  } else if constexpr (is_same<T, bool>::value) {
    return __ldg(reinterpret_cast<const unsigned char*>(from)) != 0;
  } else if constexpr (sizeof(T) == 2) {
    return {__ldg(reinterpret_cast<const unsigned short*>(from))};
  } else {
    return __ldg(from);
  }
#else
  return *from;
#endif
}

// A tensor of a call. It reaches less than 2^31 elements, and no size is 0.
template <class T, int kRank>
struct TensorRef {
  const T* data;
  int32_t sizes[kRank];
  int32_t strides[kRank];

  // The element at `index`. Indices out of range are clamped to the range.
  template <class... Index>
  QUIRE_HD auto operator()(Index... index) const {
    static_assert(sizeof...(Index) == kRank, "an index for each dimension");
    return widen_element(load_element(data + place(index...)));
  }

  // A row is the last dimension. row() gives the offset of a row, in_row() the element at `last` of it.
  template <class... Index>
  QUIRE_HD int32_t row(Index... index) const {
    static_assert(sizeof...(Index) == kRank - 1, "an index for each dimension but the last");
    return place(index...);
  }
  QUIRE_HD auto in_row(int32_t row, int32_t last) const {
    return widen_element(load_element(data + row + min(max(last, 0), sizes[kRank - 1] - 1) * strides[kRank - 1]));
  }
  // Number of contiguous elements of a row; 0 if the stride of the last dimension is not 1.
  QUIRE_HD int32_t row_size() const { return strides[kRank - 1] == 1 ? sizes[kRank - 1] : 0; }

 private:
  template <class... Index>
  QUIRE_HD int32_t place(Index... index) const {
    const int32_t indices[] = {index..., 0};
    int32_t at = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int i = 0; i < static_cast<int>(sizeof...(Index)); ++i) {
      at += min(max(indices[i], 0), sizes[i] - 1) * strides[i];
    }
    return at;
  }
};

// Whether the score reads neighbouring elements of a tensor for neighbouring keys of a row.
template <class V>
QUIRE_HD constexpr bool has_linear_reads() {
  if constexpr (V::kScore != 0) return V::kLinearReads != 0;
  return false;
}

// Variant::kPattern: patterns of scores for which kernels have faster code.
constexpr int kPatternSoftCap = 1;  // Variant::cap(): outer * tanh(inner * score)
constexpr int kPatternBias = 2;     // Variant::bias(): score + bias; Variant::kIsOfDistance: of head and distance alone
constexpr int kPatternRowScale = 3;  // Variant::row_scale(): score * row_scale, which is the same for all keys
struct SoftCap {
  float outer, inner;
};
template <class V>
QUIRE_HD constexpr int score_pattern() {
  if constexpr (V::kScore != 0) return V::kPattern;
  return 0;
}

// Integer arithmetic that wraps.
QUIRE_HD int32_t wrapped(uint32_t x) { return static_cast<int32_t>(x); }
QUIRE_HD uint32_t word(int32_t x) { return static_cast<uint32_t>(x); }

QUIRE_HD int32_t floor_divide(int32_t a, int32_t b) {
  if (b == 0) return 0;
  if (b == -1) return wrapped(0u - word(a));  // of the least integer a division would trap
  const int32_t q = a / b;
  return q - ((a % b != 0) & ((a < 0) != (b < 0)));
}
QUIRE_HD int32_t floor_remainder(int32_t a, int32_t b) {
  if (b == 0) return a;
  if (b == -1) return 0;
  const int32_t r = a % b;
  return r + ((r != 0) & ((r < 0) != (b < 0)) ? b : 0);
}

// The angle of x radians, |x| > 1/2 and finite, with 2^32 to the turn: x is a whole number times a power of two, and of
// 1 / (2 pi) only the 64 bits matter that are not whole turns.
QUIRE_HD int32_t angle_of(float x) {
  constexpr uint32_t kTurns[] = {0, 0x28be60dbu, 0x9391054au, 0x7f09d5f4u, 0x7d4d3770u, 0x36d8a566u, 0x4f10e410u};
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const int first = static_cast<int>(bits >> 23 & 0xff) - 118, at = first >> 5, shift = first & 31;
  uint32_t words[3] = {};
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int i = 0; i < 7; ++i) {  // no index that only the running program knows: a GPU would keep the table in memory
    for (int j = 0; j < 3; ++j) words[j] = i == at + j ? kTurns[i] : words[j];
  }
  const uint64_t high = static_cast<uint64_t>(words[0]) << 32 | words[1];
  const uint64_t window = shift == 0 ? high : high << shift | words[2] >> (32 - shift);
  const uint32_t turns = static_cast<uint32_t>((window * ((bits & 0x7fffffu) | 0x800000u)) >> 32);
  return wrapped((bits >> 31) != 0 ? 0u - turns : turns);
}

// Within 2e-7 for every x; NaN of an infinite one.
QUIRE_HD float sine(float x) {
  const float z = x * x, size = x < 0.f ? -x : x;
  if (!(size > 0.5f)) return x + x * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
  return size - size == 0.f ? rotation_of(angle_of(x)).sin : x - x;
}
QUIRE_HD float cosine(float x) {
  const float z = x * x, size = x < 0.f ? -x : x;
  if (!(size > 0.5f)) {
    return 1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  }
  return size - size == 0.f ? rotation_of(angle_of(x)).cos : x - x;
}
// Within 5e-7: a least-squares polynomial up to 1, then Abramowitz and Stegun's formula 7.1.28.
QUIRE_HD float error_function(float x) {
  const float size = x < 0.f ? -x : x, z = x * x;
  if (!(size > 1.f)) {
    const float high = -2.6854328796e-2f + z * (5.1893119430e-3f + z * (-8.0188549950e-4f + z * 7.8824971171e-5f));
    return x * (1.1283791659f + z * (-3.7612626904e-1f + z * (1.1283597463e-1f + z * high)));
  }
  const float low = 1.5201430e-4f + size * (2.7656720e-4f + size * 4.3063800e-5f);
  float p = 1.f + size * (7.0523078400e-2f + size * (4.2282012300e-2f + size * (9.2705272000e-3f + size * low)));
  for (int i = 0; i < 4; ++i) p *= p;
  return x < 0.f ? 1.f / p - 1.f : 1.f - 1.f / p;
}

// A function of expressions: `result` of numbers x, and y, for each key or lane.
#define QUIRE_OF_ONE(name, T, result)                 \
  template <class A>                                  \
  QUIRE_HD static auto name(const A& a) {             \
    return Math::each([](T x) { return result; }, a); \
  }
#define QUIRE_OF_TWO(name, T, result)                         \
  template <class A, class B>                                 \
  QUIRE_HD static auto name(const A& a, const B& b) {         \
    return Math::each([](T x, T y) { return result; }, a, b); \
  }

// The functions of expressions that every backend writes alike. Math, which derives from this class, adds the others:
// each() calls a function of numbers for each key or lane, compare() does the same for comparisons, and *_of() compute
// functions of one number.
template <class Math>
struct SharedMath {
#define QUIRE_OF_PLACE(name)                \
  template <class At>                       \
  QUIRE_HD static auto name(const At& at) { \
    return at.name();                       \
  }
  QUIRE_OF_PLACE(q_idx)
  QUIRE_OF_PLACE(kv_idx)
  QUIRE_OF_PLACE(head)
  QUIRE_OF_PLACE(request)
  QUIRE_OF_PLACE(qo_len)
  QUIRE_OF_PLACE(kv_len)
#undef QUIRE_OF_PLACE

  // read() reads an element of a tensor; row_of() gives the offset of a row, whose elements the backend's read_row()
  // reads.
  template <class Tensor, class... Index>
  QUIRE_HD static auto read(const Tensor& tensor, const Index&... index) {
    return Math::each([&](auto... i) { return tensor(i...); }, index...);
  }
  template <class Tensor, class... Index>
  QUIRE_HD static auto row_of(const Tensor& tensor, const Index&... index) {
    return Math::each([&](auto... i) { return tensor.row(i...); }, index...);
  }

  QUIRE_OF_TWO(floordiv, int32_t, floor_divide(x, y))
  QUIRE_OF_TWO(mod, int32_t, floor_remainder(x, y))
  QUIRE_OF_TWO(shl, int32_t, wrapped(word(x) << (y & 31)))
  QUIRE_OF_TWO(shr, int32_t, x >> (y & 31))

#define QUIRE_COMPARISON(name, operator)                                     \
  template <class A, class B>                                                \
  QUIRE_HD static auto name(const A& a, const B& b) {                        \
    return Math::compare([](auto x, auto y) { return x operator y; }, a, b); \
  }
  QUIRE_COMPARISON(lt, <)
  QUIRE_COMPARISON(le, <=)
  QUIRE_COMPARISON(gt, >)
  QUIRE_COMPARISON(ge, >=)
  QUIRE_COMPARISON(eq, ==)
  QUIRE_COMPARISON(ne, !=)
#undef QUIRE_COMPARISON

  QUIRE_OF_ONE(log2, float, Math::log2_of(x))
  QUIRE_OF_ONE(log, float, Math::log_of(x))
  QUIRE_OF_ONE(sqrt, float, Math::sqrt_of(x))
  QUIRE_OF_ONE(floor, float, Math::floor_of(x))
  QUIRE_OF_ONE(sin, float, sine(x))
  QUIRE_OF_ONE(cos, float, cosine(x))
  QUIRE_OF_ONE(erf, float, error_function(x))
};

}  // namespace quire
