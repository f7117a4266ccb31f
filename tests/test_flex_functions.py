"""What score and mask functions of flex_attention may do: traced, and evaluated in float64, they give what torch gives.

The functions run twice: with values that record operations, and with torch's tensors. Nothing is compiled. What kernels
make of the recorded operations is tested in test_expressions.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quire
from quire.kernels.expressions import tree
from quire.kernels.expressions.dependencies import Capturing, Setting

BATCH, HEADS, Q_LEN, KV_LEN = 2, 3, 9, 14
SOURCE = torch.Generator().manual_seed(7)
SLOPES, TABLE = torch.rand(HEADS, generator=SOURCE), torch.randn(HEADS, 30, generator=SOURCE)
PAIRS = torch.randint(0, 9, (KV_LEN, 2), generator=SOURCE, dtype=torch.int32)
ROPE_Q, ROPE_K = (torch.randn(BATCH, HEADS, n, 6, generator=SOURCE) for n in (Q_LEN, KV_LEN))
LISTED = torch.randint(0, 4, (BATCH, HEADS, 3, 2), generator=SOURCE)
DOCUMENT, STARTS = torch.arange(KV_LEN) // 5, torch.tensor([0, 5, 10], dtype=torch.int32)
LIMIT, GAIN = torch.tensor(5), torch.tensor(0.7)
SCORES = 3 * torch.randn(BATCH, HEADS, Q_LEN, KV_LEN, generator=SOURCE, dtype=torch.float64)

Function = Callable[..., Any]


def eager(function: Function, *, is_mask: bool = False) -> Tensor:
    """torch's results, score after score, as torch.vmap gives them."""
    sizes = (BATCH, HEADS, Q_LEN, KV_LEN)
    at = torch.cartesian_prod(*map(torch.arange, sizes)).int().unbind(1)
    scores = () if is_mask else (SCORES.flatten(),)
    found = torch.vmap(function)(*scores, *at)
    return found.expand(math.prod(sizes)).reshape(sizes)


def traced(function: Function, *, is_mask: bool = False) -> Tensor:
    """The recorded operations, in float64."""
    tracer = Capturing(Setting(Q_LEN, KV_LEN + 1, torch.device("cpu")))  # one key more: no mask is a kernel's own
    variant, parts = tracer.variant_of(None if is_mask else function, function if is_mask else None)
    assert not parts.causal and parts.window_left < 0
    if variant is None:
        return torch.ones_like(SCORES, dtype=torch.bool) if is_mask else SCORES
    values = {name: x.double() if x.is_floating_point() else x for name, x in tracer.captured.items()}
    found = [tree.evaluate(variant.expression, SCORES[b], b, values)[is_mask] for b in range(BATCH)]
    return torch.stack(found)


def check(function: Function, *, is_mask: bool = False) -> None:
    ours, theirs = traced(function, is_mask=is_mask), eager(function, is_mask=is_mask)
    if is_mask:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


SCORE_FUNCTIONS: dict[str, Function] = {
    "clamp as a method": lambda s, b, h, i, j: s.clamp(max=2),
    "clamp": lambda s, b, h, i, j: torch.clamp(s, -1, max=2) + i.clamp(2, 5),
    "clamp_min": lambda s, b, h, i, j: s.clamp_min(-1) + torch.clamp_max(s, GAIN),
    "clip by a tensor": lambda s, b, h, i, j: torch.clip(s, max=GAIN),
    "methods": lambda s, b, h, i, j: s.abs() + s.sin() + s.tanh() + s.exp() + (i - j).abs().float().sqrt(),
    "trigonometry": lambda s, b, h, i, j: torch.sin(s) + torch.cos(j * 0.1) + torch.tan(s * 0.25),
    "hyperbolic": lambda s, b, h, i, j: torch.sinh(s * 0.1) + s.cosh(),
    "activations": lambda s, b, h, i, j: F.silu(s) + F.gelu(s) + F.relu(s) + F.gelu(s, approximate="tanh"),
    "more activations": lambda s, b, h, i, j: F.softplus(s) + F.leaky_relu(s, 0.2) + F.logsigmoid(s) + torch.erf(s),
    "exponentials": lambda s, b, h, i, j: torch.expm1(s) + torch.log1p(s.abs()) + s.abs().log10() + torch.erfc(s),
    "rounding": lambda s, b, h, i, j: s.floor() + 2 * s.ceil() + 4 * s.trunc() + 8 * s.round() + s.frac() + i.floor(),
    "round of halves": lambda s, b, h, i, j: (i * 0.5 - 2).round() + (j * -0.25).round(),
    "powers": lambda s, b, h, i, j: s**2 + s.abs() ** 0.5 + torch.pow(s, -2) + i**2 + 2.0 ** (j - i) + s.square(),
    "power of values": lambda s, b, h, i, j: torch.pow(s.abs(), i * 0.1) + (-1.0) ** i + torch.pow(s, j.float()),
    "sign and others": lambda s, b, h, i, j: s.sign() + (i - j).sign() + s.reciprocal() + torch.rsqrt(s.abs()),
    "remainder": lambda s, b, h, i, j: s % 0.7 + s % -0.7 + torch.remainder(i - j, 4) + (i - j) % -4 + s // 0.3,
    "fmod": lambda s, b, h, i, j: torch.fmod(s, 0.7) + torch.fmod(i - j, 4) + (i - j).fmod(-4),
    "remainder by infinity": lambda s, b, h, i, j: torch.remainder(s, GAIN * (j - 3) / (i - i)),
    "divisions": lambda s, b, h, i, j: (
        torch.div(i - j, 3, rounding_mode="trunc") + torch.div(s, 0.3, rounding_mode="floor") + (i - j) // 3 + i / 7
    ),
    "lerp": lambda s, b, h, i, j: torch.lerp(s, s * 2, 0.3) + torch.addcmul(s, s, s, value=2) + s.add(i, alpha=3),
    "where as a method": lambda s, b, h, i, j: s.where(i > j, -1.0) + s.masked_fill(i == j, 4.0),
    "made inside": lambda s, b, h, i, j: torch.where(i > j, s, torch.tensor(-1.5)) + s.new_ones(()),
    "like others": lambda s, b, h, i, j: torch.zeros_like(s) + torch.full_like(i, 3) + s.new_full((), 0.5),
    "tensors of one element": lambda s, b, h, i, j: torch.where(j < LIMIT, s, s * GAIN),
    "types": lambda s, b, h, i, j: s.to(torch.int32) + (i > j).int() + (i * 100).to(torch.uint8) + s.type_as(s),
    "sum of bools": lambda s, b, h, i, j: s + ((i > j) + (i > 3)) + ((i > j) * (i > 3)) + (i > j) * 2,
    "partial indices": lambda s, b, h, i, j: s + TABLE[h][j] + ROPE_Q[b][h, i][0] + PAIRS[j][1],
    "slices": lambda s, b, h, i, j: s + TABLE[h, 3:][j] + TABLE[:, 4][h] + TABLE[h, ...][i] + TABLE[h][::2][j],
    "indices from the end": lambda s, b, h, i, j: s + TABLE[h, -1] + TABLE[-1][i - j] + TABLE[h][i - 5],
    "index methods": lambda s, b, h, i, j: s + TABLE[h.clamp(max=1), j.abs()],
    "dot": lambda s, b, h, i, j: s + torch.dot(ROPE_Q[b, h, i], ROPE_K[b, h, j]),
    "matmul": lambda s, b, h, i, j: s + ROPE_Q[b, h, i] @ ROPE_K[b, h, j],
    "rows": lambda s, b, h, i, j: s + (ROPE_Q[b, h, i] * 2 - ROPE_K[b, h, j]).abs().sum() + ROPE_Q[b, h, i].mean(),
    "largest": lambda s, b, h, i, j: ROPE_Q[b, h, i].amax() + ROPE_K[b, h, j].min() + torch.maximum(s, GAIN),
    "row and tensor": lambda s, b, h, i, j: s + (ROPE_Q[b, h, i] * ROPE_K[0, 0, 0]).sum(-1),
    "stack": lambda s, b, h, i, j: s + torch.stack([i * 1.0, j * 0.5]).sum(),
}  # fmt: skip

MASKS: dict[str, Function] = {
    "shifts": lambda b, h, i, j: ((i - j) >> 1) + ((i - j) << 2) > (j >> i) - (1 << j),
    "shift functions": lambda b, h, i, j: torch.bitwise_left_shift(i, 2) > torch.bitwise_right_shift(j - i, 40),
    "bits": lambda b, h, i, j: ((i & 3) ^ (j | 4)) + ~j < torch.bitwise_and(i, j) * 2,
    "logical": lambda b, h, i, j: torch.logical_and(i, j % 3) | torch.logical_not(i - j) | (i.bool() ^ (j > 3)),
    "floor division": lambda b, h, i, j: (i - 2 * j) // 3 >= torch.floor_divide(j - i, -2),
    "remainder": lambda b, h, i, j: (i - j) % 4 <= torch.remainder(j - 2 * i, -3) + 3,
    "clamp": lambda b, h, i, j: i.clamp(2, 6) - j.clamp(min=4) <= 0,
    "neighbours": lambda b, h, i, j: ((i // 3).clamp(1, 2) - j // 3).abs() <= 1,
    "intervals": lambda b, h, i, j: (PAIRS[j][0] <= i) & (i < PAIRS[j][1]),
    "intervals at once": lambda b, h, i, j: (PAIRS[j] <= i).any(),
    "neighbourhood in a picture": lambda b, h, i, j: (
        ((i // 4).clamp(1, 2) - j // 4).abs().maximum((i % 4).clamp(1, 2) - j % 4) <= 1
    ),
    "tiles of a picture": lambda b, h, i, j: (
        (_tiled(i)[0].clamp(1, 2) - _tiled(j)[0]).abs() + (_tiled(i)[1] - _tiled(j)[1]).abs() <= 2
    ),
    "order of a curve": lambda b, h, i, j: (_even_bits(i) - _even_bits(j)).abs() + (_even_bits(i >> 1) ^ 1) < 3,
    "listed tiles": lambda b, h, i, j: (LISTED[b, h, i // 4] == (j // 4).unsqueeze(-1)).any(dim=-1),
    "documents by their starts": lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (j - STARTS[DOCUMENT[j]] <= 2),
    "shared prefix": lambda b, h, i, j: (
        ((j >= STARTS[DOCUMENT[i]]) & (i >= j)) | ((DOCUMENT[i] != 0) & (j < STARTS[DOCUMENT[i] * 0 + 1]))
    ),
    "finite": lambda b, h, i, j: torch.isfinite(1.0 / (i - j)) | torch.isnan((i * 0.0) / (j * 0.0)),
    "masks together": lambda b, h, i, j: AND(b, h, i, j),
    "partial": lambda b, h, i, j: PART(b, h, i, j),
}  # fmt: skip


def _tiled(index: Any) -> tuple[Any, Any]:
    """Column and row of an index of tiles of two by two in a picture four wide."""
    tile, inside = index // 4, index % 4
    return tile % 2 * 2 + inside % 2, tile // 2 * 2 + inside // 2


def _even_bits(code: Any) -> Any:
    """The bits at even places."""
    code = code & 0x55
    code = (code | (code >> 1)) & 0x33
    return (code | (code >> 2)) & 0x0F


def within(width: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= width


def AND(*at: Any) -> Any:
    from torch.nn.attention.flex_attention import and_masks, or_masks

    def even(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + h) % 2 == 0

    return and_masks(or_masks(even, functools.partial(within, 1)), functools.partial(within, 4))(*at)


PART = functools.partial(within, 3)


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_scores(name: str) -> None:
    check(SCORE_FUNCTIONS[name])


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    check(MASKS[name], is_mask=True)


#: Of floats, of integers, and of both, for random programs; all are finite of finite numbers.
OF_FLOATS: tuple[Function, ...] = (
    torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.erf, torch.abs, F.silu, F.gelu, torch.floor, torch.ceil,
    torch.round, torch.trunc, torch.sign, torch.square, lambda x: x.clamp(-2, 3), lambda x: torch.exp(x.clamp(max=3)),
    lambda x: x.abs().sqrt(), lambda x: (x.abs() + 1).log(), lambda x: -x, lambda x: x % 1.7,
    lambda x: x.to(torch.int32),
)  # fmt: skip
OF_INTS: tuple[Function, ...] = (
    torch.abs, torch.neg, torch.sign, lambda x: x // 3, lambda x: x // -4, lambda x: x % 5, lambda x: x % -3,
    lambda x: torch.fmod(x, 4), lambda x: x >> 1, lambda x: (x & 255) << 2, lambda x: ~x, lambda x: x.clamp(-7, 11),
    lambda x: torch.div(x, 3, rounding_mode="trunc"), lambda x: x * 0.25, lambda x: TABLE[1, x % 30],
)  # fmt: skip
OF_TWO: tuple[Function, ...] = (
    torch.add, torch.sub, torch.minimum, torch.maximum, lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: x * y.clamp(-3, 3), lambda x, y: x.masked_fill(x < y, 0), lambda x, y: (x >= y) * x,
    lambda x, y: (x / (y.abs() + 1)).float() * 2,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Steps drawn at random, each of what earlier ones gave."""

    def program(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        r, known = Random(seed), [score, i, j, i - j, h * j - 4, score * 0.5]
        for _ in range(r.randint(2, 14)):
            x, y = known[r.randrange(len(known))], known[max(r.randrange(len(known)), r.randrange(len(known)))]
            is_float = str(x.dtype).startswith("torch.float")
            if r.random() < 0.5:
                known.append(r.choice(OF_FLOATS if is_float else OF_INTS)(x))
            elif is_float == str(y.dtype).startswith("torch.float"):
                known.append(r.choice(OF_TWO)(x, y))
        return known[-1] * 1.0 + known[-2]

    ours, theirs = traced(program), eager(program).double()
    close = torch.isclose(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert close.float().mean() > 0.98  # beside a step, float32's constants may land on the other side


@pytest.mark.parametrize(("function", "message"), [
    (lambda s, b, h, i, j: torch.asinh(s), r"torch's asinh\(\) is no function of values"),
    (lambda s, b, h, i, j: s.cumsum(0), "values of the kernel have no 'cumsum'"),
    (lambda s, b, h, i, j: s.clamp_(1), r"torch's clamp_\(\) writes a value of the kernel; use clamp\(\)"),
    (lambda s, b, h, i, j: s.clamp(least=1), r"torch's clamp\(\): got an unexpected keyword argument 'least'"),
    (lambda s, b, h, i, j: s.clamp(), "expected min, max or both"),
    (lambda s, b, h, i, j: s + TABLE[h], "expected a single value, got an array"),
    (lambda s, b, h, i, j: TABLE[h], "expected a single value, got an array"),
    (lambda s, b, h, i, j: s + SLOPES, "expected captured tensors to be indexed"),
    (lambda s, b, h, i, j: s + TABLE[h, i, j], "expected at most 2 indices, got 3"),
    (lambda s, b, h, i, j: s + TABLE[7, i], "index 7 is out of bounds for dimension 0 with size 3"),
    (lambda s, b, h, i, j: s + TABLE[s, i], "expected integers as indices, got a float"),
    (lambda s, b, h, i, j: s + TABLE[h, i:][0], "a slice whose ends only the kernel knows"),
    (lambda s, b, h, i, j: s + torch.zeros(300)[None, :][h].sum(), "expected integers, values and slices|at most 256"),
    (lambda s, b, h, i, j: torch.dot(TABLE[h], ROPE_Q[b, h, i]), "expected rows of equal length, got 30 and 6"),
    (lambda s, b, h, i, j: s + i**-2, "integers have no negative powers"),
    (lambda s, b, h, i, j: torch.where(i, s, 0), "where: expected a bool"),
    (lambda s, b, h, i, j: s if i > j else -s, "decides what Python does next"),
])  # fmt: skip
def test_errors_name_the_function_and_the_line(function: Function, message: str) -> None:
    with pytest.raises(quire.ValidationError, match=rf"score_mod: .*test_flex_functions.py:\d+: .*({message})"):
        traced(function)
