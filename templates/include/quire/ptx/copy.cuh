// Copies: asynchronously from global to shared memory, by threads (cp.async) or of tensor boxes (TMA); between shared
// memory and matrix fragments; atomic accesses; and stores of 8 and 16 bytes per lane. The wide stores are in assembly,
// because the compiler splits them where this saves moves, and four narrow stores cause four times the traffic.
#pragma once
#include "quire/core/params.h"
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

// The same of kBytes: 4, 8 or 16, which may be at any multiple of them.
template <int kBytes>
QUIRE_DEVICE void cp_async_small(uint32_t dst, const void* src, int src_bytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of cp.async");
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(kBytes), "r"(src_bytes)
               : "memory");
}

QUIRE_DEVICE void prefetch_l2(const void* src) { asm volatile("prefetch.global.L2 [%0];" ::"l"(src)); }

// For memory that nobody writes meanwhile. The compiler does not move the load towards the use of its result.
QUIRE_DEVICE uint32_t ld_global_constant(const uint32_t* src) {
  uint32_t x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(src));
  return x;
}

// 16 bytes of memory that nobody writes meanwhile, read once.
QUIRE_DEVICE uint4 ld_global_16_once(const void* src) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(src));
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
  const uint4 d = ld_shared_16(src);
  x[0] = d.x, x[1] = d.y, x[2] = d.z, x[3] = d.w;
}

// dst: global memory, a multiple of 16.
QUIRE_DEVICE void st_global_16(void* dst, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(dst)), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

QUIRE_DEVICE void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the map's box at these coordinates, innermost first, to dst and counts its bytes on the barrier. Elements
// outside of the tensor become zeros and are counted, too.
QUIRE_DEVICE void tma_load_4d(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same for data that is read once: the L2 evicts it first.
QUIRE_DEVICE void tma_load_4d_once(uint32_t dst, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                   int c3) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], policy;\n"
      "}\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Prefetches the same box into the L2.
QUIRE_DEVICE void tma_prefetch_4d(const TensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}

}  // namespace quire::ptx
