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

// From here on CTAs of the next launch may start where an SM has space; they wait for our results themselves.
QUIRE_DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace quire::ptx
