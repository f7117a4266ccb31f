// Data types, and the few names that differ between host and device units. CUDA math headers are not included: parsing
// them takes longer than compiling a kernel.
#pragma once
#ifdef __CUDACC_RTC__  // NVRTC comes without a C library: these are the types of Linux
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#define INT32_MAX 0x7fffffff
#else
#include <stdint.h>
#endif

#ifdef __CUDACC__
#define QUIRE_HD __host__ __device__ __forceinline__
#define QUIRE_DEVICE __device__ __forceinline__
#else
#define QUIRE_HD inline __attribute__((always_inline))
#endif

namespace quire {

struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};
// 8-bit numbers. Their seven low bits, shifted left by kShift, are the fp16 of the number divided by kScale, subnormals
// included. NaN: the bytes that are kNan under kNanMask, beside those that are NaN as fp16. kLargest: the bits of the
// largest number.
struct e4m3_t {  // 1.4.3 bits, largest 448, no infinities
  uint8_t bits;
  static constexpr int kShift = 7, kNan = 0x7f, kNanMask = 0x7f, kLargest = 0x7e;
  static constexpr float kScale = 256.0f;
};
struct e5m2_t {  // 1.5.2 bits: the upper half of an fp16
  uint8_t bits;
  static constexpr int kShift = 8, kNan = 0x100, kNanMask = 0, kLargest = 0x7b;
  static constexpr float kScale = 1.0f;
};
// Two 4-bit numbers of 1.2.1 bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) in a byte, the first in the
// low bits. Their three low bits, shifted left by 9, are the fp16 of the number times 2^-14, subnormals included. In
// NVFP4 each kScaledNumbers neighbouring numbers of a row have a scale, in e4m3. A number times its scale is exact in
// fp16 and in bf16.
struct e2m1x2_t {
  uint8_t bits;
};
constexpr int kScaledNumbers = 16;  // SCALED_NUMBERS in quire/kernels/features.py

// Bits of a number.
template <class T>
constexpr int kBitsOf = 8 * static_cast<int>(sizeof(T));
template <>
constexpr int kBitsOf<e2m1x2_t> = 4;

constexpr float kLog2e = 1.4426950408889634f;

QUIRE_HD constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
QUIRE_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
QUIRE_HD constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <class T>
QUIRE_HD constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
QUIRE_HD constexpr T max(T a, T b) {
  return a > b ? a : b;
}

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};

// std::declval: an expression of type T, for use in decltype() only.
template <class T>
T declval();

template <bool kFirst, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};

// Division by a run-time divisor as one multiplication (Granlund and Montgomery, PLDI 1994), exact for 0 <= n < 2^31.
// FastDivisor.of() in quire/kernels/params.py computes the multiplier and the shift.
struct FastDivisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;

  QUIRE_HD int div(int n) const {
#ifdef __CUDA_ARCH__
    return divisor == 1 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), multiplier) >> shift);
#else
    return n / static_cast<int>(divisor);
#endif
  }
  QUIRE_HD int mod(int n) const { return n - div(n) * static_cast<int>(divisor); }
};

}  // namespace quire
