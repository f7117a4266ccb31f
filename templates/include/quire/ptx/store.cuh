// Stores of 8 and 16 bytes per lane. In assembly, because the compiler splits wide stores where this saves moves, and
// four narrow stores cause four times the traffic.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

QUIRE_DEVICE void st_shared_8(uint32_t dst, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(dst), "f"(a), "f"(b) : "memory");
}
QUIRE_DEVICE void st_shared_16(uint32_t dst, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
QUIRE_DEVICE void st_shared_16(uint32_t dst, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lane 8 * i + r has the address of row r of matrix i, 16 bytes; lane l holds
// elements 2 * (l % 4) and + 1 of row l / 4 of each.
QUIRE_DEVICE void st_matrix(uint32_t dst, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

QUIRE_DEVICE void st_matrix_trans(uint32_t dst, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

QUIRE_DEVICE void ld_shared_16(uint32_t src, uint32_t (&x)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(src)
               : "memory");
}

// dst: global memory, a multiple of 16.
QUIRE_DEVICE void st_global_16(void* dst, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(dst)), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

}  // namespace quire::ptx
