// Programmatic dependent launch.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

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
