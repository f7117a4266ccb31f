// Warpgroup instructions of sm_90a: asynchronous matrix products and the register budget.
//
// Four warps execute each of them together. d is in flight from the product until wgmma_wait: between wgmma_fence and
// the wait nothing else may touch it, nor the registers of a. Everything that touches d must be inlined and unrolled.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// Volatile, so that each call reads the index again and it takes no register through the main loop.
QUIRE_DEVICE int thread_id() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Tells the compiler that x is the same in all lanes of the warp: it then lives in a uniform register.
QUIRE_DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

template <int kRegisters>
QUIRE_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
QUIRE_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders earlier accesses to registers of d and a before the products that follow.
QUIRE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

QUIRE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the latest groups are still under way.
template <int kPending>
QUIRE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers as operands of one statement: a compiler's time grows with the statements, and matters where they are many.
#define QUIRE_EIGHT(i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// No access to these registers moves across: the compiler does not know that a product changes d after its statement.
template <int n>
QUIRE_DEVICE void pin(float (&d)[n]) {
  constexpr bool kIsWide = n >= 32;
  static_assert(!kIsWide || n % 8 == 0, "registers of d come in eights");
#pragma unroll
  for (int i = 0; i < n; i += kIsWide ? 8 : 1) {
    if constexpr (kIsWide) {
      asm volatile("" : QUIRE_EIGHT(i)::"memory");
    } else {
      asm volatile("" : "+f"(d[i])::"memory");
    }
  }
}
template <int n>
QUIRE_DEVICE void pin(uint32_t (&a)[n]) {
  static_assert(n % 4 == 0, "registers of a come in fours");
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    asm volatile("" : "+r"(a[i]), "+r"(a[i + 1]), "+r"(a[i + 2]), "+r"(a[i + 3])::"memory");
  }
}

// d[64, N] (+)= a[64, 16] * b[16, N]. Lane l of warp w holds rows 16 * w + l / 4 and + 8, and of each 8 columns
// 2 * (l % 4) and + 1: d[4 * block + 2 * half + column].
//   ss: a and b in shared memory, both contiguous along the inner dimension unless said otherwise
//   rs: a in registers, fragments as d's; b in shared memory
enum class Contiguous { kInner, kOuter, kN = kOuter };  // which dimension of a or b; kN: of b
template <int N>
struct Wgmma;

// Registers of d as text and as operands: each list is the one before it and eight more.
#define QUIRE_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QUIRE_TEXT_16 QUIRE_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QUIRE_TEXT_24 QUIRE_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define QUIRE_TEXT_32 QUIRE_TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define QUIRE_TEXT_40 QUIRE_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define QUIRE_TEXT_48 QUIRE_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define QUIRE_TEXT_56 QUIRE_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define QUIRE_TEXT_64 QUIRE_TEXT_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define QUIRE_TEXT_72 QUIRE_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define QUIRE_TEXT_80 QUIRE_TEXT_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define QUIRE_TEXT_88 QUIRE_TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define QUIRE_TEXT_96 QUIRE_TEXT_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define QUIRE_TEXT_104 QUIRE_TEXT_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define QUIRE_TEXT_112 QUIRE_TEXT_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define QUIRE_TEXT_120 QUIRE_TEXT_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define QUIRE_TEXT_128 QUIRE_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define QUIRE_LIST_8 QUIRE_EIGHT(0)
#define QUIRE_LIST_16 QUIRE_LIST_8, QUIRE_EIGHT(8)
#define QUIRE_LIST_24 QUIRE_LIST_16, QUIRE_EIGHT(16)
#define QUIRE_LIST_32 QUIRE_LIST_24, QUIRE_EIGHT(24)
#define QUIRE_LIST_40 QUIRE_LIST_32, QUIRE_EIGHT(32)
#define QUIRE_LIST_48 QUIRE_LIST_40, QUIRE_EIGHT(40)
#define QUIRE_LIST_56 QUIRE_LIST_48, QUIRE_EIGHT(48)
#define QUIRE_LIST_64 QUIRE_LIST_56, QUIRE_EIGHT(56)
#define QUIRE_LIST_72 QUIRE_LIST_64, QUIRE_EIGHT(64)
#define QUIRE_LIST_80 QUIRE_LIST_72, QUIRE_EIGHT(72)
#define QUIRE_LIST_88 QUIRE_LIST_80, QUIRE_EIGHT(80)
#define QUIRE_LIST_96 QUIRE_LIST_88, QUIRE_EIGHT(88)
#define QUIRE_LIST_104 QUIRE_LIST_96, QUIRE_EIGHT(96)
#define QUIRE_LIST_112 QUIRE_LIST_104, QUIRE_EIGHT(104)
#define QUIRE_LIST_120 QUIRE_LIST_112, QUIRE_EIGHT(112)
#define QUIRE_LIST_128 QUIRE_LIST_120, QUIRE_EIGHT(120)

#define QUIRE_WGMMA_TYPE(T, type, N, n, i0, i1, i2, i3, i4, i5, i6)                                                 \
  template <Contiguous kB = Contiguous::kInner, Contiguous kA = Contiguous::kInner>                                 \
  QUIRE_DEVICE static void ss(T, float (&d)[n], uint64_t a, uint64_t b, int accumulate) {                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                                           \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " {" QUIRE_TEXT_##n              \
                 "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i4 ", %" #i3 ";\n}\n"                                         \
                 : QUIRE_LIST_##n                                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(kB)), "n"(static_cast<int>(kA)));          \
  }                                                                                                                 \
  template <Contiguous kB>                                                                                          \
  QUIRE_DEVICE static void rs(T, float (&d)[n], const uint32_t (&a)[4], uint64_t b, int accumulate) {               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                                           \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " {" QUIRE_TEXT_##n              \
                 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}\n"                   \
                 : QUIRE_LIST_##n                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(static_cast<int>(kB))); \
  }
#define QUIRE_WGMMA(N, n, i0, i1, i2, i3, i4, i5, i6)                \
  template <>                                                        \
  struct Wgmma<N> {                                                  \
    QUIRE_WGMMA_TYPE(bf16_t, bf16, N, n, i0, i1, i2, i3, i4, i5, i6) \
    QUIRE_WGMMA_TYPE(fp16_t, f16, N, n, i0, i1, i2, i3, i4, i5, i6)  \
  };

QUIRE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
QUIRE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
QUIRE_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
QUIRE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
QUIRE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
QUIRE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
QUIRE_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
QUIRE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
QUIRE_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
QUIRE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
QUIRE_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
QUIRE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
QUIRE_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
QUIRE_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
QUIRE_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
QUIRE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

// Four products one after the other: d (+)= a[0] * b[0] + ... + a[3] * b[3]. One statement, of which there is one for
// the shapes that most kernels have: compilers take a quarter less time for their code.
//   ss: all contiguous along the inner dimension
//   rs: b contiguous along the outer one; d is always added to
#define QUIRE_STEP(type, N, n, a, b, p, tail)                                                                        \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " {" QUIRE_TEXT_##n "}, " a ", %" #b ", " p tail \
                                                                                        "\n"
#define QUIRE_SS(type, N, n, a, b, p) QUIRE_STEP(type, N, n, "%" #a, b, p, ", 1, 1, 0, 0;")
#define QUIRE_RS(type, N, n, a, b, c, d, e) \
  QUIRE_STEP(type, N, n, "{%" #a ", %" #b ", %" #c ", %" #d "}", e, "p", ", 1, 1, 1;")
#define QUIRE_FOUR(T, type, N, n, i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, i10, i11, i12, i13, i14, i15, i16, i17, i18, \
                   i19)                                                                                                \
  QUIRE_DEVICE void wgmma_ss_four(T, float (&d)[n], const uint64_t (&a)[4], const uint64_t (&b)[4], int accumulate) {  \
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, 1, 0;\nsetp.ne.b32 q, %" #i8                                     \
                 ", 0;\n" QUIRE_SS(type, N, n, i0, i4, "q") QUIRE_SS(type, N, n, i1, i5, "p")                          \
                     QUIRE_SS(type, N, n, i2, i6, "p") QUIRE_SS(type, N, n, i3, i7, "p") "}\n"                         \
                 : QUIRE_LIST_##n                                                                                      \
                 : "l"(a[0]), "l"(a[1]), "l"(a[2]), "l"(a[3]), "l"(b[0]), "l"(b[1]), "l"(b[2]), "l"(b[3]),             \
                   "r"(accumulate));                                                                                   \
  }                                                                                                                    \
  QUIRE_DEVICE void wgmma_rs_four(T, float (&d)[n], const uint32_t (*a)[4], const uint64_t (&b)[4]) {                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n" QUIRE_RS(type, N, n, i0, i1, i2, i3, i16)                  \
                     QUIRE_RS(type, N, n, i4, i5, i6, i7, i17) QUIRE_RS(type, N, n, i8, i9, i10, i11, i18)             \
                         QUIRE_RS(type, N, n, i12, i13, i14, i15, i19) "}\n"                                           \
                 : QUIRE_LIST_##n                                                                                      \
                 : QUIRE_FOUR_OF(a[0]), QUIRE_FOUR_OF(a[1]), QUIRE_FOUR_OF(a[2]), QUIRE_FOUR_OF(a[3]), "l"(b[0]),      \
                   "l"(b[1]), "l"(b[2]), "l"(b[3]));                                                                   \
  }
#define QUIRE_FOUR_OF(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
#define QUIRE_FOURS(N, n, ...) QUIRE_FOUR(bf16_t, bf16, N, n, __VA_ARGS__) QUIRE_FOUR(fp16_t, f16, N, n, __VA_ARGS__)

QUIRE_FOURS(64, 32, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51)
QUIRE_FOURS(128, 64, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83)

template <int N>
QUIRE_DEVICE constexpr bool has_four_products() {
  return N == 64 || N == 128;
}

#undef QUIRE_FOURS
#undef QUIRE_FOUR_OF
#undef QUIRE_FOUR
#undef QUIRE_RS
#undef QUIRE_SS
#undef QUIRE_STEP
#undef QUIRE_WGMMA
#undef QUIRE_WGMMA_TYPE

// Products of e4m3 numbers. Both operands are contiguous along the inner dimension: these instructions take no
// transposed operand. The tensor cores add up with about 14 bits, so that a sum over many keys needs another
// accumulator beside d.
//
// d[64, N] = a[64, 32] * b[N, 32]^T, or += if kAdds, d as Wgmma leaves it. A product that does not add does not read d
// either, so that d takes no registers before it.
//   ss: a and b in shared memory
//   rs: a in registers: lane l of warp w holds rows 16 * w + l / 4 and + 8, and of them columns 4 * (l % 4) to + 3, in
//       a[0] and a[1], and those 16 further right, in a[2] and a[3]
template <int N>
struct WgmmaFp8;

#define QUIRE_NEW_EIGHT(i)                                                                                           \
  "=&f"(d[i]), "=&f"(d[i + 1]), "=&f"(d[i + 2]), "=&f"(d[i + 3]), "=&f"(d[i + 4]), "=&f"(d[i + 5]), "=&f"(d[i + 6]), \
      "=&f"(d[i + 7])
#define QUIRE_NEW_16 QUIRE_NEW_EIGHT(0), QUIRE_NEW_EIGHT(8)
#define QUIRE_NEW_32 QUIRE_NEW_16, QUIRE_NEW_EIGHT(16), QUIRE_NEW_EIGHT(24)
#define QUIRE_NEW_48 QUIRE_NEW_32, QUIRE_NEW_EIGHT(32), QUIRE_NEW_EIGHT(40)
#define QUIRE_NEW_64 QUIRE_NEW_48, QUIRE_NEW_EIGHT(48), QUIRE_NEW_EIGHT(56)
#define QUIRE_NEW_80 QUIRE_NEW_64, QUIRE_NEW_EIGHT(64), QUIRE_NEW_EIGHT(72)
#define QUIRE_NEW_96 QUIRE_NEW_80, QUIRE_NEW_EIGHT(80), QUIRE_NEW_EIGHT(88)
#define QUIRE_NEW_112 QUIRE_NEW_96, QUIRE_NEW_EIGHT(96), QUIRE_NEW_EIGHT(104)
#define QUIRE_NEW_128 QUIRE_NEW_112, QUIRE_NEW_EIGHT(112), QUIRE_NEW_EIGHT(120)

#define QUIRE_WGMMA_FP8_TEXT(N, n) "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" QUIRE_TEXT_##n "}, "
#define QUIRE_WGMMA_FP8(N, n, i0, i1, i2, i3, i4)                                                                  \
  template <>                                                                                                      \
  struct WgmmaFp8<N> {                                                                                             \
    template <bool kAdds>                                                                                          \
    QUIRE_DEVICE static void ss(float (&d)[n], uint64_t a, uint64_t b) {                                           \
      if constexpr (kAdds) {                                                                                       \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "%" #i0 ", %" #i1 ", 1, 1, 1;" : QUIRE_LIST_##n : "l"(a), "l"(b)); \
      } else {                                                                                                     \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "%" #i0 ", %" #i1 ", 0, 1, 1;" : QUIRE_NEW_##n : "l"(a), "l"(b));  \
      }                                                                                                            \
    }                                                                                                              \
    template <bool kAdds>                                                                                          \
    QUIRE_DEVICE static void rs(float (&d)[n], const uint32_t (&a)[4], uint64_t b) {                               \
      if constexpr (kAdds) {                                                                                       \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 1, 1, 1;"     \
                     : QUIRE_LIST_##n                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
      } else {                                                                                                     \
        asm volatile(QUIRE_WGMMA_FP8_TEXT(N, n) "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 0, 1, 1;"     \
                     : QUIRE_NEW_##n                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
      }                                                                                                            \
    }                                                                                                              \
  };

QUIRE_WGMMA_FP8(32, 16, 16, 17, 18, 19, 20)
QUIRE_WGMMA_FP8(64, 32, 32, 33, 34, 35, 36)
QUIRE_WGMMA_FP8(96, 48, 48, 49, 50, 51, 52)
QUIRE_WGMMA_FP8(128, 64, 64, 65, 66, 67, 68)
QUIRE_WGMMA_FP8(160, 80, 80, 81, 82, 83, 84)
QUIRE_WGMMA_FP8(192, 96, 96, 97, 98, 99, 100)
QUIRE_WGMMA_FP8(224, 112, 112, 113, 114, 115, 116)
QUIRE_WGMMA_FP8(256, 128, 128, 129, 130, 131, 132)

#undef QUIRE_WGMMA_FP8
#undef QUIRE_WGMMA_FP8_TEXT

}  // namespace quire::ptx
