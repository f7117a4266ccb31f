// Rotates rows of queries and keys that have been widened to float.
#pragma once
#include "quire/core/rope.h"

namespace quire::cpu {

// There are two loops, because g++ vectorises each of them.
template <int kDim>
inline void rotate_row(float* x, int position, const uint64_t* frequencies) {
  float cos[kDim / 2], sin[kDim / 2];
  for (int i = 0; i < kDim / 2; ++i) {
    const Rotation by = rope_rotation(position, frequencies[i]);
    cos[i] = by.cos, sin[i] = by.sin;
  }
  for (int i = 0; i < kDim / 2; ++i) rotate(x[i], x[i + kDim / 2], {cos[i], sin[i]});
}

}  // namespace quire::cpu
