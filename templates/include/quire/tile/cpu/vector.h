// The machine's widest vector of floats by GCC's vector extensions: one source for AVX-512, AVX2 and NEON. No
// intrinsics header: immintrin.h alone takes 0.3 s to parse, as long as the kernel takes to compile.
#pragma once
#include <string.h>
#include "quire/core/convert.h"

namespace quire::cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef float Floats4 __attribute__((vector_size(16)));

constexpr float kInfinity = __builtin_inff();

#define QUIRE_CPU inline __attribute__((always_inline))

// A head's dims, rounded up to whole vectors.
constexpr int whole_vectors(int head_dim) { return ceil_div(head_dim, kLanes) * kLanes; }

QUIRE_CPU Floats broadcast(float x) { return x - Floats{}; }
QUIRE_CPU Ints broadcast(int32_t x) { return x - Ints{}; }

QUIRE_CPU Ints iota() {
  Ints x = {};
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

template <class T, class From>
QUIRE_CPU T load_as(const From* from) {
  T x;
  memcpy(&x, from, sizeof(x));
  return x;
}

QUIRE_CPU Floats load(const float* from) { return load_as<Floats>(from); }
QUIRE_CPU Ints load(const int32_t* from) { return load_as<Ints>(from); }
QUIRE_CPU Words load(const uint32_t* from) { return load_as<Words>(from); }

QUIRE_CPU Floats load(const bf16_t* from) {
  return reinterpret_cast<Floats>(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}

// Widens fp16 numbers, given as bits. x86 has an instruction for it since AVX2, which handles subnormal numbers.
// Elsewhere exponent and fraction are shifted into place and multiplied by the difference of biases, which is right for
// subnormals, too.
QUIRE_CPU Floats widen(Halves h) {
#if defined(__AVX512F__)
  typedef short Shorts __attribute__((vector_size(32)));
  constexpr int kCurrentRounding = 4;
  return __builtin_ia32_vcvtph2ps512_mask(reinterpret_cast<Shorts>(h), Floats{}, -1, kCurrentRounding);
#elif defined(__F16C__) && defined(__AVX2__)
  typedef short Shorts __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps256(reinterpret_cast<Shorts>(h));
#else
  const Words x = __builtin_convertvector(h, Words);
  const Floats magnitude = reinterpret_cast<Floats>((x & 0x7fffu) << 13) * 0x1p112f;
  const Words special = (x & 0x7c00u) == 0x7c00u ? Words{} + 0x7f800000u : Words{};
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(magnitude) | special | ((x & 0x8000u) << 16));
#endif
}

QUIRE_CPU Floats load(const fp16_t* from) { return widen(load_as<Halves>(from)); }

// 8-bit numbers: see core/types.h.
template <class T, int = T::kShift>
QUIRE_CPU Floats load(const T* from) {
  const Halves x = __builtin_convertvector(load_as<Bytes>(from), Halves);
  Halves y = (x & 0x7f) << T::kShift | (x & 0x80) << 8;
  if constexpr (T::kNanMask != 0) y |= ((x & T::kNanMask) == T::kNan) & 0x7e00;
  return T::kScale == 1.0f ? widen(y) : widen(y) * T::kScale;
}

// A row of 4-bit numbers and of their scales, from dim `at` on, which is a multiple of kLanes.
struct ScaledRow {
  const e2m1x2_t* numbers;
  const e4m3_t* scales;
  int at;
};
QUIRE_CPU ScaledRow operator+(ScaledRow row, int dims) { return {row.numbers, row.scales, row.at + dims}; }

// The rows of numbers of type T.
template <class T>
struct RowOf {
  using type = const T*;
};
template <>
struct RowOf<e2m1x2_t> {
  using type = ScaledRow;
};

QUIRE_CPU Floats load(ScaledRow row) {
  typedef uint8_t Pairs __attribute__((vector_size(kLanes / 2)));
  typedef uint16_t WidePairs __attribute__((vector_size(kLanes)));
  const WidePairs pairs = __builtin_convertvector(load_as<Pairs>(row.numbers + row.at / 2), WidePairs);
  const WidePairs apart = (pairs | pairs << 4) & 0x0f0f;
  const Halves x = __builtin_convertvector(load_as<Bytes>(&apart), Halves);
  const Halves bits = (x & 0x7) << 9 | (x & 0x8) << 12;  // fp16 of the number times 2^-14
  return widen(bits) * (to_float(row.scales[row.at / kScaledNumbers]) * 0x1p14f);
}

QUIRE_CPU void store(float* to, Floats x) { memcpy(to, &x, sizeof(x)); }

// Rounds to nearest, ties to even; a NaN stays one.
QUIRE_CPU void store(bf16_t* to, Floats x) {
  const Words u = reinterpret_cast<Words>(x);
  const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Halves h = __builtin_convertvector(x == x ? rounded : (u >> 16) | 0x40u, Halves);
  memcpy(to, &h, sizeof(h));
}

// Rounds to nearest, ties to even: normal numbers by integer arithmetic, subnormal ones by adding 0.5, whose unit in
// the last place is fp16's smallest subnormal.
QUIRE_CPU void store(fp16_t* to, Floats x) {
  const Words u = reinterpret_cast<Words>(x), magnitude = u & 0x7fffffffu;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words subnormal = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  Words h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? Words{} + 0x7c00u : h;
  h = magnitude > 0x7f800000u ? Words{} + 0x7e00u : h;
  const Halves halves = __builtin_convertvector(h | ((u >> 16) & 0x8000u), Halves);
  memcpy(to, &halves, sizeof(halves));
}

// Loads the first kCount numbers, with zeros behind them.
template <int kCount, class T>
QUIRE_CPU Floats load_first(const T* from) {
  if constexpr (kCount >= kLanes) return load(from);
  T numbers[kLanes] = {};
  memcpy(numbers, from, sizeof(T) * kCount);
  return load(numbers);
}

template <int kCount, class T>
QUIRE_CPU void store_first(T* to, Floats x) {
  if constexpr (kCount >= kLanes) return store(to, x);
  T numbers[kLanes];
  store(numbers, x);
  memcpy(to, numbers, sizeof(T) * kCount);
}

// The maximum of m and x; a NaN in x is ignored.
QUIRE_CPU Floats maximum(Floats m, Floats x) { return x > m ? x : m; }

// Returns 2^(rounded x), and in `rest` the remainder of x in [-1/2, 1/2]. The sum of x and a large number has the
// rounded x, with the exponent's bias, in its last bits. This needs IEEE addition: -ffast-math would remove the
// rounding.
QUIRE_CPU Floats round_exponent(Floats x, Floats& rest) {
  constexpr float kShift = 0x1.8p23f + 127.0f;
  const Floats shifted = x + kShift;
  rest = x - (shifted - kShift);
  return reinterpret_cast<Floats>(reinterpret_cast<Ints>(shifted) << 23);
}

// 2^x for x <= 126: a polynomial (relative error 9.2e-8, minimax) times a power of two. Below 2^-126 it is 0, so
// exp2(-inf) is exactly 0.
QUIRE_CPU Floats exp2(Floats x) {
  Floats f;
  const Floats power = round_exponent(x, f);
  Floats y = f * 0.001326472731307149f + 0.009671512991189957f;
  y = y * f + 0.05550733581185341f;
  y = y * f + 0.24022242426872253f;
  y = y * f + 0.6931470036506653f;
  y = y * f + 1.0f;
  return x < -126.0f ? Floats{} : y * power;
}

// 2^x with a relative error of 2.7e-6, for weights that are then rounded to bf16.
QUIRE_CPU Floats exp2_coarse(Floats x) {
  Floats f;
  const Floats power = round_exponent(x, f);
  Floats y = f * 0.009570104070007801f + 0.05591786652803421f;
  y = y * f + 0.240247443318367f;
  y = y * f + 0.6931217908859253f;
  y = y * f + 0.9999992847442627f;
  return x < -126.0f ? Floats{} : y * power;
}

// tanh: near 0 an odd polynomial (relative error 6.8e-9, minimax on 0.65). Elsewhere it is 1 - 2 / (e^2x + 1), which
// near 0 would lose all digits.
QUIRE_CPU Floats tanh(Floats x) {
  const Words sign = reinterpret_cast<Words>(x) & 0x80000000u;
  const Floats a = reinterpret_cast<Floats>(reinterpret_cast<Words>(x) ^ sign);
  const Floats z = a * a;
  Floats y = z * -0.005515160970389843f + 0.020469417795538902f;
  y = y * z + -0.05368802323937416f;
  y = y * z + 0.1333083063364029f;
  y = y * z + -0.3333325982093811f;
  const Floats near = a + a * (z * y);
  const Floats bounded = a > 10.0f ? broadcast(10.0f) : a;
  const Floats far = 1.0f - 2.0f / (exp2(bounded * (2.0f * kLog2e)) + 1.0f);
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(a < 0.625f ? near : far) | sign);
}

QUIRE_CPU float exp2(float x) { return exp2(broadcast(x))[0]; }

// The sum of four neighbouring lanes each, down to four lanes.
QUIRE_CPU Floats4 fold(Floats x) {
  Floats4 parts[kLanes / 4];
  memcpy(parts, &x, sizeof(x));
  if constexpr (kLanes == 16) return (parts[0] + parts[1]) + (parts[2] + parts[3]);
  if constexpr (kLanes == 8) return parts[0] + parts[1];
  return parts[0];
}

// The sums of the lanes of a, b, c and d.
QUIRE_CPU Floats4 sum_lanes(Floats a, Floats b, Floats c, Floats d) {
  const Floats4 a4 = fold(a), b4 = fold(b), c4 = fold(c), d4 = fold(d);
  const Floats4 ab = __builtin_shufflevector(a4, b4, 0, 4, 1, 5) + __builtin_shufflevector(a4, b4, 2, 6, 3, 7);
  const Floats4 cd = __builtin_shufflevector(c4, d4, 0, 4, 1, 5) + __builtin_shufflevector(c4, d4, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

QUIRE_CPU float sum_lanes(Floats x) {
  const Floats4 y = fold(x);
  return (y[0] + y[2]) + (y[1] + y[3]);
}

QUIRE_CPU bool any_lane(Ints x) {
  int any = 0;
  for (int i = 0; i < kLanes; ++i) any |= x[i];
  return any != 0;
}

QUIRE_CPU float max_lanes(Floats x) {
  float m = x[0];
  for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// Interleaves the lanes of a and b: a gets those of their first halves, b those of their second halves.
QUIRE_CPU void interleave(Floats& a, Floats& b) {
#if defined(__AVX512F__)
  const Floats low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const Floats high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  const Floats low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  const Floats high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  const Floats low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Floats high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
  a = low, b = high;
}

// Transposes a square of kLanes vectors, in log2(kLanes) rounds of perfect shuffles.
QUIRE_CPU void transpose(Floats (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int width = kLanes; width > 1; width /= 2) {
    Floats next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = rows[i], next[2 * i + 1] = rows[i + kLanes / 2];
      interleave(next[2 * i], next[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

}  // namespace quire::cpu
