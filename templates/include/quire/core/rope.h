// Rotary position embedding: the pairs of dims (d, d + head_dim / 2) of a query or key are rotated by an angle
// proportional to the token's position.
//
// Angles are fractions of a turn in fixed point, with 2^64 per turn. position * frequency then drops whole turns by
// overflow, and an angle is as exact at position 2^31 as at 1. A float32 angle of 131,072 radians would have an error
// of 0.004.
#pragma once
#include "quire/core/types.h"

namespace quire {

constexpr int kPosEncodingRope = 1;  // Variant::kPosEncoding

struct Rotation {
  float cos, sin;
};

// The angle of `position` in [-1/2, 1/2) turns, with 2^32 to the turn. frequency: turns per token, with 2^64 to the
// turn (quire/kernels/operation.py). A position may be negative.
QUIRE_HD int32_t rope_angle(int32_t position, uint64_t frequency) {
  return static_cast<int32_t>((static_cast<uint64_t>(static_cast<int64_t>(position)) * frequency) >> 32);
}

// Sine and cosine within 1e-7: polynomials (Cephes' sinf and cosf) on an eighth of a turn to both sides of the nearest
// quarter.
QUIRE_HD Rotation rotation_of(int32_t angle) {
  const uint32_t turned = static_cast<uint32_t>(angle) + (1u << 29), quarter = turned >> 30;
  const int32_t rest = static_cast<int32_t>(turned & 0x3fffffffu) - (1 << 29);
  const float x = static_cast<float>(rest) * 1.4629180792671596e-9f, z = x * x;  // 2 pi / 2^32
  const float sin = x + x * z * (-1.6666654611e-1f + z * (8.3321608736e-3f + z * -1.9515295891e-4f));
  const float cos =
      1.0f - 0.5f * z + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  const bool swaps = (quarter & 1) != 0;
  const float c = swaps ? sin : cos, s = swaps ? cos : sin;
  return {quarter == 1 || quarter == 2 ? -c : c, quarter >= 2 ? -s : s};
}

QUIRE_HD float fused_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

QUIRE_HD Rotation rope_rotation(int32_t position, uint64_t frequency) {
  return rotation_of(rope_angle(position, frequency));
}

// Rotates a pair of dims. The fma says which product is rounded before the sum, so that all compilers round alike.
QUIRE_HD void rotate(float& x0, float& x1, Rotation by) {
  const float first = x0;
  x0 = fused_multiply_add(first, by.cos, -(x1 * by.sin)), x1 = fused_multiply_add(x1, by.cos, first * by.sin);
}

}  // namespace quire
