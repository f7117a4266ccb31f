"""quire.flex_attention beside torch's own, in float64 and uncompiled."""

from __future__ import annotations

import math
import operator
import random
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, noop_mask

import quire
from quire.attention import flex
from quire.engine import plan_cache

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 40, 70
SOURCE = torch.Generator().manual_seed(11)
SLOPES, TABLE = torch.rand(HEADS, generator=SOURCE), torch.randn(HEADS, KV_LEN, generator=SOURCE)
DOCUMENT = torch.randint(0, 3, (BATCH, KV_LEN), generator=SOURCE).sort(1).values
LIMIT = torch.tensor(33)


def draw(device: str, heads: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(BATCH, heads, length, 64, generator=SOURCE).to(dtype).to(device)


def causal(b, h, q_idx, kv_idx):
    return q_idx + (KV_LEN - Q_LEN) >= kv_idx


def functions(device: str) -> dict[str, tuple[object, object]]:
    """Of a score and a mask, as torch's pages write them, with tensors around them."""
    slopes, table, document, limit = (t.to(device) for t in (SLOPES, TABLE, DOCUMENT, LIMIT))
    return {
        "plain": (None, None),
        "causal": (None, causal),
        "alibi": (lambda score, b, h, i, j: score + slopes[h] * (j - i), causal),
        "soft cap": (lambda score, b, h, i, j: torch.tanh(score / 3) * 3, None),
        "table": (lambda score, b, h, i, j: score + table[h, j], None),
        "documents": (None, lambda b, h, i, j: document[b, i] == document[b, j]),
        "both": (None, and_masks(causal, lambda b, h, i, j: document[b, i] == document[b, j])),
        "limit": (lambda score, b, h, i, j: torch.where(j < limit, score, -float("inf")), None),
        "waves": (lambda score, b, h, i, j: score.sin() + torch.cos(score + 0.1 * j) + torch.erf(table[h, j]), None),
        "gain": (lambda score, b, h, i, j: slopes.double()[h] * score, None),
    }


def reference(q: Tensor, k: Tensor, v: Tensor, score_mod: object, mask_mod: object) -> tuple[Tensor, Tensor]:
    """torch's functions of tensors, in float64."""
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1).double() for t in (k, v))
    score = q.double() @ k.transpose(2, 3) / 8
    sizes = (BATCH, HEADS, Q_LEN, KV_LEN)
    at = [torch.arange(n, device=q.device).view(*(-1 if d == i else 1 for d in range(4))) for i, n in enumerate(sizes)]
    score = score if score_mod is None else score_mod(score, *at)
    seen = torch.ones((), dtype=torch.bool, device=q.device) if mask_mod is None else mask_mod(*at)
    score = torch.where(seen, score, -math.inf)
    weights = torch.softmax(score, 3).masked_fill((score == -math.inf).all(3, keepdim=True), 0.0)
    return weights @ v, torch.logsumexp(score, 3)


@pytest.mark.daily(2)
@pytest.mark.first(4)
@pytest.mark.parametrize("name", functions("cpu"))
@pytest.mark.parametrize("kv_heads", [KV_HEADS])
def test_functions(name, kv_heads, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (
        draw(device, HEADS, Q_LEN, dtype),
        draw(device, kv_heads, KV_LEN, dtype),
        draw(device, kv_heads, KV_LEN, dtype),
    )
    score_mod, mask_mod = functions(device)[name]
    mask = None if mask_mod is None else create_block_mask(mask_mod, BATCH, None, Q_LEN, KV_LEN, device=device)
    o, lse = quire.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    truth, of_rows = reference(q, k, v, score_mod, mask_mod)
    bound = 1e-5 if device == "cpu" else 2e-2
    assert o.shape == truth.shape and o.dtype is dtype and (o - truth).abs().max() < bound
    assert lse.dtype is torch.float32 and (lse - of_rows).nan_to_num(0.0).abs().max() < 1e-4


def test_beside_torch():
    q, k, v = (draw("cpu", HEADS, Q_LEN, torch.float32) for _ in range(3))
    score_mod = functions("cpu")["alibi"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: that it is not compiled
        o, lse = flex_attention(q, k, v, score_mod, scale=0.2, return_lse=True)
    ours = quire.flex_attention(q, k, v, score_mod, scale=0.2, return_lse=True)
    torch.testing.assert_close(ours[0], o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[1], lse, rtol=1e-5, atol=1e-5)


def test_other_values_of_tensors_compile_nothing():
    q, k, v = (draw("cpu", HEADS, Q_LEN, torch.float32) for _ in range(3))
    began = []
    unsubscribe = quire.events.subscribe(began.append)
    try:
        for cap in (1.0, 2.0):
            number = torch.tensor(cap)
            o = quire.flex_attention(q, k, v, lambda s, b, h, i, j, n=number: torch.tanh(s / n) * n)
            want = reference_of_equal_lengths(q, k, v, cap)
            assert (o - want).abs().max() < 1e-5
            began.append(cap)
    finally:
        unsubscribe()
    assert began[-1] == 2.0 and 1.0 in began and began.index(1.0) == len(began) - 2


def reference_of_equal_lengths(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
    score = q.double() @ k.double().transpose(2, 3) / 8
    return torch.softmax(torch.tanh(score / cap) * cap, 3) @ v.double()


def test_a_plan_is_kept_with_its_block_mask():
    q, k, v = draw("cpu", HEADS, Q_LEN, torch.float32), *(draw("cpu", HEADS, KV_LEN, torch.float32) for _ in range(2))
    mask = create_block_mask(causal, None, None, Q_LEN, KV_LEN, device="cpu")
    first, plans = quire.flex_attention(q, k, v, block_mask=mask), plan_cache._plans.entries
    known = [*plans]
    for _ in range(3):
        assert torch.equal(quire.flex_attention(q, k, v, block_mask=mask), first)
    assert [*plans] == known
    assert torch.equal(quire.flex_attention(q[:1], k[:1], v[:1], block_mask=mask), first[:1])
    assert len({*plans} - {*known}) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_repeated_calls_only_launch(mode, monkeypatch):
    """Also in inference mode, whose tensors count no changes: a block mask then stands for its tensors."""
    with mode():
        q, k, v = draw("cpu", HEADS, Q_LEN, torch.float32), *(draw("cpu", KV_HEADS, KV_LEN, torch.float32),) * 2
        slopes, document = SLOPES.clone(), DOCUMENT.clone()
        shown = and_masks(causal, lambda b, h, i, j: document[b, i] == document[b, j])
        mask = create_block_mask(shown, BATCH, None, Q_LEN, KV_LEN, device="cpu")
        for step in range(5):
            if step == 3:
                monkeypatch.setattr(flex, "_attend", None)
            slopes = slopes * 0.5
            score = lambda score, b, h, i, j, by=slopes: score + by[h] * j  # noqa: E731
            o = quire.flex_attention(q, k, v, score, mask, enable_gqa=True)
            assert (o - reference(q, k, v, score, shown)[0]).abs().max() < 1e-5


def parts(device: str) -> dict[str, tuple[object, tuple[bool, int, bool]]]:
    """Masks, and what of them kernels have built in: causal, the window's width; and whether an expression is left."""
    document, last = DOCUMENT.to(device), KV_LEN - Q_LEN
    return {
        "causal": (causal, (True, -1, False)),
        "its negative": (lambda b, h, i, j: -j >= -i - last, (True, -1, False)),
        "strictly": (lambda b, h, i, j: j < i + (last + 1), (True, -1, False)),
        "sliding": (lambda b, h, i, j: (i + last >= j) & (i + last - j <= 9), (True, 9, False)),
        "two windows": (lambda b, h, i, j: (i - j < -20) & (i - j <= -25) & (j <= i + last), (True, 5, False)),
        "window alone": (lambda b, h, i, j: j > i, (False, 29, False)),
        "documents": (and_masks(causal, lambda b, h, i, j: document[b, i] == document[b, j]), (True, -1, True)),
        "nobody": (lambda b, h, i, j: j >= i + KV_LEN, (False, -1, True)),
        "one key late": (lambda b, h, i, j: i + last > j, (False, -1, True)),
        "either": (lambda b, h, i, j: (i + last >= j) | (j < 5), (False, -1, True)),
        "not": (lambda b, h, i, j: ~(i + last < j), (False, -1, True)),
        "twice": (lambda b, h, i, j: 2 * i + last >= i + j, (False, -1, True)),
        "large numbers": (lambda b, h, i, j: j + 2**30 >= i, (False, -1, True)),
        "floats": (lambda b, h, i, j: i + last >= j * 1.0, (False, -1, True)),
    }


def check_mask(function: object, device: str) -> BlockMask:
    """One layer under the mask, with its lse."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = draw(device, HEADS, Q_LEN, dtype), *(draw(device, HEADS, KV_LEN, dtype) for _ in range(2))
    mask = create_block_mask(function, BATCH, None, Q_LEN, KV_LEN, device=device)
    o, lse = quire.flex_attention(q, k, v, block_mask=mask, return_lse=True)
    truth, of_rows = reference(q, k, v, None, function)
    assert (o - truth).abs().max() < (1e-5 if device == "cpu" else 2e-2)
    assert torch.equal(lse.isinf(), of_rows.isinf())
    assert (lse - of_rows).nan_to_num(0.0).abs().max() < 1e-4
    return mask


@pytest.mark.daily(2)
@pytest.mark.first(4)
@pytest.mark.parametrize("name", parts("cpu"))
def test_parts_of_masks_that_kernels_have(name, device):
    function, expected = parts(device)[name]
    mask = check_mask(function, device)
    options = [*plan_cache._plans.entries.values()][-1].plan.spec.options
    assert (options.causal, options.logits.window_left, options.variant is not None) == expected, mask  # which keeps it


#: Sides of a comparison of i - j with a number.
WRITINGS = (
    lambda i, j, c: (i, j + c), lambda i, j, c: (i - c, j), lambda i, j, c: (i - j, c), lambda i, j, c: (-j, -(i - c)),
    lambda i, j, c: (c, i - j), lambda i, j, c: (j + c, i), lambda i, j, c: (j, i - c), lambda i, j, c: (-i + c, -j),
)  # fmt: skip
OPERATORS = (operator.lt, operator.le, operator.gt, operator.ge)


@pytest.mark.daily(2)
@pytest.mark.part(0, 3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_comparisons_of_indices(seed, device):
    """One to three, also of which none or all keys pass. Most are at the edge of what a causal mask shows."""
    rng = random.Random(seed)
    drawn = [(rng.choice(OPERATORS), rng.choice(WRITINGS)) for _ in range(rng.randint(1, 3))]
    numbers = [Q_LEN - KV_LEN + rng.choice((-1, 0, 1, 5, 40)) for _ in drawn]

    def mask(b, h, i, j):
        shown = j >= 0
        for (compare, sides), c in zip(drawn, numbers, strict=True):
            shown = shown & compare(*sides(i, j, c))
        return shown

    check_mask(mask, device)


def branches(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return score
    return -score


def mask_of(function, kv_len):
    return create_block_mask(function, None, None, Q_LEN, kv_len, device="cpu")


def test_a_mask_that_hides_nothing():
    q, k, v = (draw("cpu", HEADS, Q_LEN, torch.float32) for _ in range(3))
    plain = quire.flex_attention(q, k, v)
    assert torch.equal(quire.flex_attention(q, k, v, block_mask=mask_of(noop_mask, Q_LEN)), plain)


@pytest.mark.parametrize("flags", [{"return_lse": [True]}, {"enable_gqa": [True]}, {"scale": [1.0]}, {"scale": "1"}])
def test_flags_of_other_types_are_refused(flags):
    q = torch.randn(1, 2, 4, 64)
    score = lambda score, b, h, i, j: score + 1  # noqa: E731
    with pytest.raises(quire.ValidationError, match=next(iter(flags))):
        quire.flex_attention(q, q, q, score, **flags)


def test_what_is_refused():
    q, k, v = (draw("cpu", HEADS, Q_LEN, torch.float32) for _ in range(3))
    for options, message in (
        ({"score_mod": branches}, r"score_mod: .*test_flex.py:\d+: `if q_idx > kv_idx:`"),
        ({"score_mod": lambda s, b, h, i, j: torch.asinh(s)}, r"torch's asinh\(\)"),
        ({"score_mod": lambda s, b, h, i, j: s + TABLE[h]}, "expected a single value, got an array"),
        ({"score_mod": lambda s, b, h, i, j: s + SLOPES}, "expected captured tensors to be indexed"),
        ({"score_mod": lambda s, b, h, i, j: s + SLOPES[:2][h]}, "expected at least 4 elements"),
        ({"block_mask": torch.ones(2)}, "block_mask: expected what torch's create_block_mask"),
        ({"enable_gqa": 1}, "enable_gqa: expected a bool"),
        ({"scale": 0.0}, "^scale: expected a positive number"),
        ({"score_mod": lambda s: s}, r"score_mod: .*test_flex.py:\d+: .*takes 1 positional argument"),
        ({"block_mask": mask_of(causal, KV_LEN + 1)}, f"block_mask: expected one of {Q_LEN} queries and {Q_LEN} keys"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            quire.flex_attention(q, k, v, **options)
    with pytest.raises(quire.ValidationError, match="key: expected"):
        quire.flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(quire.ValidationError, match="value: expected the dtype"):
        quire.flex_attention(q, k, v.half())
    for value in (b"bytes", None, 1):  # where the functions are known, too
        with pytest.raises(quire.ValidationError, match=r"value: expected a torch.Tensor"):
            quire.flex_attention(q, k, value)
