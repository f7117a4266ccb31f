// What a thread knows about its place.
#pragma once
#include "quire/core/types.h"

namespace quire::ptx {

// Read anew each time: an epilogue that asks again holds no register through the main loop.
QUIRE_DEVICE int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace quire::ptx
