// Barriers and fences: mbarriers, which also count bytes of asynchronous copies; named barriers of some warps of a CTA;
// fences between ordinary accesses and those of TMA and the tensor cores (the async proxy); and programmatic dependent
// launch, by which a launch waits for the preceding one.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

QUIRE_DEVICE void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised mbarriers visible to the async proxy; a barrier of the CTA must follow.
QUIRE_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

QUIRE_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of asynchronous copies.
QUIRE_DEVICE void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns when the phase of this parity is complete. A fresh barrier counts as having completed phase 1.
QUIRE_DEVICE void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni through%=;\n"
      "bra.uni again%=;\n"
      "through%=:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barriers: `threads` is the number of threads that arrive, by either of the two functions.
QUIRE_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; returns whether any thread passes a true condition.
QUIRE_DEVICE bool named_barrier_any(int id, int threads, bool condition) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(condition))
      : "memory");
  return any != 0;
}

QUIRE_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before later ones of the async proxy.
QUIRE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Returns when all writes of the preceding launch are visible: at once, if launched without the attribute, or before
// sm_90.
QUIRE_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets CTAs of the next launch start on SMs with space. They wait for the results of this launch themselves.
QUIRE_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace quire::ptx
