// Copies: asynchronously from global to shared memory, and from shared memory to matrix fragments.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// The 32-bit address that shared-memory instructions take.
QUIRE_DEVICE uint32_t smem_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies src_bytes (0 or 16) bytes and fills the rest of the 16 with zeros. With 0 the source is not read.
QUIRE_DEVICE void cp_async_16(uint32_t dst, const void* src, int src_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
               : "memory");
}

QUIRE_DEVICE void cp_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

QUIRE_DEVICE void prefetch_l2(const void* src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src)); }

// For memory that nobody writes meanwhile. The compiler does not move the load towards the use of its result.
QUIRE_DEVICE uint32_t ld_global_constant(const uint32_t* src) {
  uint32_t x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(src));
  return x;
}

QUIRE_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are incomplete.
template <int kPending>
QUIRE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Arrives at the mbarrier when this thread's earlier copies are complete; the barrier's count includes this arrival.
// Readers through the async proxy need another fence.
QUIRE_DEVICE void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

QUIRE_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
QUIRE_DEVICE void ldmatrix_x4(uint32_t (&d)[4], uint32_t src) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(src)
               : "memory");
}

QUIRE_DEVICE void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t src) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(src)
               : "memory");
}

QUIRE_DEVICE void st_shared(uint32_t dst, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(value) : "memory");
}

QUIRE_DEVICE void st_shared_if(bool condition, uint32_t dst, float value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.shared.f32 [%0], %1;\n"
      "}\n" ::"r"(dst),
      "f"(value), "r"(static_cast<int>(condition))
      : "memory");
}

QUIRE_DEVICE float ld_shared(uint32_t src) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(src) : "memory");
  return x;
}

QUIRE_DEVICE uint2 ld_shared_8(uint32_t src) {
  uint2 d;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(d.x), "=r"(d.y) : "r"(src) : "memory");
  return d;
}

QUIRE_DEVICE uint4 ld_shared_16(uint32_t src) {
  uint4 d;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
               : "r"(src)
               : "memory");
  return d;
}

// Adds one to *p, or sets it to 0 when it has reached `last`; acquire and release: this thread's earlier writes are
// visible to threads that see the new value, and the other way round. Returns the old value.
QUIRE_DEVICE uint32_t atomic_inc_acq_rel(uint32_t* p, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(last) : "memory");
  return old;
}

// The same, adding any number.
QUIRE_DEVICE uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t x) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(x) : "memory");
  return old;
}

QUIRE_DEVICE uint32_t load_acquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

}  // namespace quire::ptx
