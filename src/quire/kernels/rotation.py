"""The frequencies of rotary position embeddings, as templates/include/quire/core/rope.h takes them."""

from __future__ import annotations

import math

#: Units of a turn: multiples of a frequency wrap around in 64-bit integers.
_TURN = 2**64


def rope_frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> tuple[int, ...]:
    """Turns a token of each of the rotary_dim / 2 pairs, 2**64 to the turn: theta**(-2 i / rotary_dim) / scale radians."""
    return tuple(fixed_point(rope_theta ** (-2 * pair / rotary_dim) / rope_scale) for pair in range(rotary_dim // 2))


def fixed_point(radians: float) -> int:
    """A frequency in radians a token as turns in fixed point."""
    return round(math.fmod(radians / (2 * math.pi), 1.0) * _TURN) % _TURN
