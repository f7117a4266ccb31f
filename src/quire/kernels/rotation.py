"""The frequencies of rotary position embeddings, in the format of templates/include/quire/core/rope.h."""

from __future__ import annotations

import math

#: Units per turn, so that 64-bit integers wrap around where angles do.
_TURN = 2**64


def rope_frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> tuple[int, ...]:
    """Rotations per token of the rotary_dim / 2 pairs, in units of 2**-64 turns: theta**(-2 i / rotary_dim) / scale
    radians.
    """
    return tuple(fixed_point(rope_theta ** (-2 * pair / rotary_dim) / rope_scale) for pair in range(rotary_dim // 2))


def fixed_point(radians: float) -> int:
    """A frequency in radians per token as turns in fixed point."""
    return round(math.fmod(radians / (2 * math.pi), 1.0) * _TURN) % _TURN


def llama31_frequencies(
    rotary_dim: int, rope_scale: float, rope_theta: float, low_freq_factor: float, high_freq_factor: float,
    old_context_len: float,
) -> tuple[int, ...]:  # fmt: skip
    """The same for Llama 3.1: pairs with fewer than low_freq_factor rotations in old_context_len tokens are slowed down
    by rope_scale, pairs with more than high_freq_factor rotations are unchanged, and pairs in between are interpolated.
    """

    def scaled(radians: float) -> float:
        turns = old_context_len * radians / (2 * math.pi)
        kept = min(max((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0), 1.0)
        return (1 - kept) * radians / rope_scale + kept * radians

    return tuple(fixed_point(scaled(rope_theta ** (-2 * pair / rotary_dim))) for pair in range(rotary_dim // 2))
