// What orders launches: programmatic dependent launch.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// Returns when all that the launch before this one wrote is visible. Launched without the attribute (or before sm_90,
// which has no such instruction) that is already so.
QUIRE_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may start from here on, as far as the SM has capacity. It waits for the results of this one itself.
QUIRE_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace quire::ptx
