"""The frequencies of rotary position embeddings, as templates/include/quire/core/rope.h takes them."""

from __future__ import annotations

import math

#: Units of a turn: multiples of a frequency wrap around in 64-bit integers.
_TURN = 2**64


def rope_frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> tuple[int, ...]:
    """Turns a token of the rotary_dim / 2 pairs, 2**64 to the turn: theta**(-2 i / rotary_dim) / scale radians."""
    return tuple(fixed_point(rope_theta ** (-2 * pair / rotary_dim) / rope_scale) for pair in range(rotary_dim // 2))


def fixed_point(radians: float) -> int:
    """A frequency in radians a token as turns in fixed point."""
    return round(math.fmod(radians / (2 * math.pi), 1.0) * _TURN) % _TURN


def llama31_frequencies(
    rotary_dim: int, rope_scale: float, rope_theta: float, low_freq_factor: float, high_freq_factor: float,
    old_context_len: float,
) -> tuple[int, ...]:  # fmt: skip
    """The same for Llama 3.1: a pair that turns less than low_freq_factor times in old_context_len tokens is slowed
    down by rope_scale, one that turns more than high_freq_factor times is not, and those between are interpolated.
    """

    def scaled(radians: float) -> float:
        turns = old_context_len * radians / (2 * math.pi)
        kept = min(max((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0), 1.0)
        return (1 - kept) * radians / rope_scale + kept * radians

    return tuple(fixed_point(scaled(rope_theta ** (-2 * pair / rotary_dim))) for pair in range(rotary_dim // 2))
