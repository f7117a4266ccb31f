"""Custom variants: the library against the oracle, on every backend and through every call."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

import quire
from calls import decode_wrapper, outputs, plan_decode, plan_paged, plan_ragged
from oracle import At
from problems import PagedCache, Problem, any_dtype, ints, workspace
from quire import cli, jit
from quire.attention import variants
from quire.engine import planner
from quire.kernels import AttentionKey, decide, kernel_of
from quire.kernels.expressions import tanh, where
from quire.kernels.expressions.cxx import has_distance_bias, has_pattern, has_row_scale, render
from quire.kernels.features import dtype_of

LENS = (5, 1, 0, 40), (60, 7, 9, 40)
HEADS = 4


@dataclass(frozen=True)
class Case:
    """A variant, what it is given, and what it does as the oracle says it."""

    variant: quire.Variant
    operands: Mapping[str, object]
    score: Callable[[Tensor, At], Tensor] | None = None
    sees: Callable[[At], Tensor] | None = None

    def expected(self) -> dict[str, object]:
        """Options of Problem.check()."""
        return {"score": self.score, "sees": self.sees}

    def on(self, device: str) -> tuple[dict[str, object], dict[str, object]]:
        """What plan() and what run() takes."""
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.operands.items()}
        of_mask = self.variant.expression.mask_operands
        return ({n: x for n, x in moved.items() if n in of_mask}, {n: x for n, x in moved.items() if n not in of_mask})


def table(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def documents() -> Tensor:
    return torch.randint(0, 4, (4, 60), generator=torch.Generator().manual_seed(6), dtype=torch.int32).sort(1).values


SLOPES, BONUS, SCALE, BIAS, T5 = table(HEADS) / 16, table(HEADS), table(60), table(HEADS, 31), table(32, HEADS)
DOCUMENTS, PREFIX = documents(), torch.tensor([13, 0, 3, 9], dtype=torch.int32)
FIRST_ROW, RANGES = torch.tensor([0, 5, 6, 6], dtype=torch.int32), torch.full((46, 2), -1, dtype=torch.int32)
RANGES[1:4], RANGES[20:33], RANGES[40:44] = (torch.tensor(x, dtype=torch.int32) for x in ([50, 70], [14, 26], [0, 3]))
ANCESTORS = torch.randint(0, 2**31 - 1, (4, 40), generator=torch.Generator().manual_seed(7), dtype=torch.int32)


def t5_bucket(distance: Tensor) -> Tensor:
    """As in the code of T5, of 32 buckets up to 128."""
    past = (-distance).clamp(min=0)
    far = 16 + (torch.log(past.clamp(min=1).double() / 16) / math.log(128 / 16) * 16).long()
    return torch.where(past < 16, past, far.clamp(max=31))


def hashed(at: At, seed: int) -> Tensor:
    def wrap(x: Tensor) -> Tensor:
        return ((x + 2**31) % 2**32) - 2**31

    bits = wrap((wrap((at.request * 8191 + at.head) * 131071) + at.q_idx + at.kv_len - at.qo_len) * 524287)
    bits = wrap(bits + at.kv_idx + seed * 1000003)
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D)):
        bits = wrap((bits ^ (bits >> shift)) * factor)
    return ((bits ^ (bits >> 16)) & 0xFFFFFF).double() / 2**23 - 1


CASES = {
    "soft_cap": Case(variants.soft_cap, {"cap": 1.5}, lambda s, _: 1.5 * torch.tanh(s / 1.5)),
    "alibi": Case(variants.alibi, {"slopes": SLOPES}, lambda s, at: s + SLOPES.double()[at.head] * at.distance),
    "t5_bias": Case(
        variants.t5_bias, {"bias": T5, "largest": 128}, lambda s, at: s + T5.double()[t5_bucket(at.distance), at.head]
    ),
    "relative_bias": Case(
        variants.relative_bias, {"bias": BIAS},
        lambda s, at: s + BIAS.double()[at.head, (at.distance + 15).clamp(0, 30)],
    ),
    "kerple": Case(
        variants.kerple, {"r": SLOPES.abs().repeat(2, 1) + 0.1},
        lambda s, at: s - (SLOPES.abs() + 0.1).double()[at.head]
        * torch.log1p((SLOPES.abs() + 0.1).double()[at.head] * at.distance.abs()),
    ),
    "temperature": Case(
        variants.temperature, {"scale": SCALE}, lambda s, at: s * SCALE.double()[at.q_idx + at.kv_len - at.qo_len]
    ),
    "noise": Case(variants.noise, {"seed": 7, "amplitude": 2.0}, lambda s, at: s + 2.0 * hashed(at, 7)),
    "sink_score": Case(
        variants.sink_score, {"num_sinks": 4, "bonus": BONUS},
        lambda s, at: torch.where(at.kv_idx < 4, s + BONUS.double()[at.head], s),
    ),
    "sigmoid": Case(variants.sigmoid, {"bias": -1.0}, lambda s, _: torch.nn.functional.logsigmoid(s - 1.0)),
    "document_mask": Case(
        variants.document_mask, {"documents": DOCUMENTS},
        sees=lambda at: (
            DOCUMENTS[at.request][at.q_idx + at.kv_len - at.qo_len] == DOCUMENTS[at.request][at.kv_idx]
        ),
    ),
    "prefix_lm": Case(
        variants.prefix_lm, {"prefix": PREFIX}, sees=lambda at: (at.kv_idx < PREFIX[at.request]) | (at.distance <= 0)
    ),
    "causal_with_ranges": Case(
        variants.causal_with_ranges,
        {"ranges": RANGES, "first_row": FIRST_ROW, "causal_window": 11, "range_window": 0},
        sees=lambda at: (
            ((at.distance <= 0) & (at.distance >= -11))
            | ((at.kv_idx >= RANGES[FIRST_ROW[at.request] + at.q_idx, 0].clamp(min=0))
               & (at.kv_idx <= RANGES[FIRST_ROW[at.request] + at.q_idx, 1]))
        ),
    ),
    "dilated_window": Case(
        variants.dilated_window, {"width": 5, "step": 3},
        sees=lambda at: (at.distance <= 0) & (at.distance > -15) & (at.distance % 3 == 0),
    ),
    "strided_window": Case(
        variants.strided_window, {"width": 4, "stride": 7},
        sees=lambda at: (at.distance <= 0) & ((at.distance > -4) | (at.kv_idx % 7 == 6)),
    ),
    "tree_mask": Case(
        variants.tree_mask, {"ancestors": ANCESTORS},
        sees=lambda at: (
            (at.kv_idx < at.kv_len - at.qo_len)
            | (ANCESTORS[at.request][at.q_idx] >> ((at.kv_idx - at.kv_len + at.qo_len) & 31) & 1 != 0)
        ),
    ),
}  # fmt: skip


def problem(device: str, **options: object) -> Problem:
    return Problem(*LENS, num_qo_heads=HEADS, device=device, dtype=any_dtype(device), **options)


def check(p: Problem, case: Case, got: tuple[Tensor, Tensor], **more: object) -> None:
    p.check(*got, **case.expected(), **more)


def test_the_library_is_tested():
    ready = {name for name in variants.__all__ if isinstance(getattr(variants, name), quire.Variant)}
    assert ready == CASES.keys()


@pytest.mark.daily(2)
@pytest.mark.first(3)
@pytest.mark.parametrize("name", CASES)
def test_library(name, device, backend):
    """Paged, with empty requests and NaN behind the keys."""
    case, p = CASES[name], problem(device)
    cache = p.paged(8)
    of_plan, of_run = case.on(device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_paged(wrapper, p, cache, plan=of_plan)
    out, lse = outputs(p)
    check(p, case, wrapper.run(p.q, cache.kv, out=out, lse=lse, return_lse=True, **of_run))


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    """The reference of a variant is what the oracle says."""
    case, p = CASES[name], problem("cpu", causal=True, window_left=20)
    o, lse = case.variant.reference(
        p.q, p.k, p.v, qo_indptr=p.qo_indptr, kv_indptr=p.kv_indptr, causal=True, window_left=20, return_lse=True,
        **case.operands,
    )  # fmt: skip
    truth = p.expected(**case.expected())
    torch.testing.assert_close(o, truth.o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, truth.lse, rtol=1e-6, atol=1e-6)


PATTERNS = {
    "soft_cap": "kPatternSoftCap", "alibi": "kPatternBias", "relative_bias": "kPatternBias",
    "temperature": "kPatternRowScale", "sink_score": "0",
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    """Scores that fa3 has code for are known by what they do, and get its high tiles; the others take registers."""
    expression = getattr(variants, name).expression
    assert f"kPattern = {PATTERNS[name]};" in render(expression)
    assert has_pattern(expression) == (name in ("soft_cap", "alibi"))
    assert has_distance_bias(expression) == (name == "relative_bias")
    assert has_row_scale(expression) == (name == "temperature")
    problem = replace(FA3.problem(), variant=getattr(variants, name), rows=4096)
    assert kernel_of(FA3).key(problem).tile_rows == (128 if name == "sink_score" else 192)


FA3 = AttentionKey.parse("attention_fa3.sm90a.bf16-bf16-bf16.d128-128.ragged.causal.m128")

#: Scores, and whether they add what follows from the head and the distance from query to key.
OF_DISTANCE = {
    "a table": (lambda s, q, k, head, t, n: s + t[head, k - q], True),
    "from right to left": (lambda s, q, k, head, t, n: t[n, (q + 7) - (k + n)] + s, True),
    "more than a table": (lambda s, q, k, head, t, n: s + tanh(t[head, k - q]) * abs(k - q), True),
    "by a comparison": (lambda s, q, k, head, t, n: s + where(k - q < n, t[head, n], 0.0), True),
    "a ramp is cheaper": (lambda s, q, k, head, t, n: s + t[head, n] * (k - q), False),
    "of the key": (lambda s, q, k, head, t, n: s + t[head, k], False),
    "of both": (lambda s, q, k, head, t, n: s + t[q, k], False),
    "of their sum": (lambda s, q, k, head, t, n: s + t[head, q + k], False),
    "of a part of them": (lambda s, q, k, head, t, n: s + t[head, k // 2 - q // 2], False),
    "of the query": (lambda s, q, k, head, t, n: s + t[head, q - q], False),
    "of the score": (lambda s, q, k, head, t, n: s + s * t[head, k - q], False),
    "a product": (lambda s, q, k, head, t, n: s * t[head, k - q], False),
}


@pytest.mark.parametrize("name", OF_DISTANCE)
def test_which_biases_follow_from_the_distance(name):
    function, expected = OF_DISTANCE[name]
    variant = quire.Variant(
        lambda score, q_idx, kv_idx, head, t, n: function(score, q_idx, kv_idx, head, t, n),
        tensors={"t": "float32"}, scalars={"n": "int32"},
    )  # fmt: skip
    assert has_distance_bias(variant.expression) == expected


def test_biases_of_too_many_heads():
    """They do not fit into the shared memory of fa3; another kernel takes them."""
    problem = replace(FA3.problem(), variant=variants.relative_bias, rows=4096, group_size=33)
    assert "biases of 33 query heads" in str(kernel_of(FA3).reject(problem))
    assert decide(problem).kernel.backend == "fa2"
    for taken in ({"group_size": 32}, {"variant": variants.alibi}, {"kv": dtype_of("float8_e4m3fn", "kv")}):
        assert kernel_of(FA3).reject(replace(problem, **taken)) is None


#: Tables reach less far than keys, hide some of them, and have a NaN for each distance that a causal mask hides.
def _table_of_distances(heads: int, causal: bool) -> Tensor:
    bias = table(heads, 999)
    bias[:, 100:110] = -math.inf
    bias[:, 3] = 1e5
    if causal:
        bias[:, 500:] = math.nan
    return bias


DISTANCES = quire.Variant(
    lambda score, q_idx, kv_idx, head, qo_len, kv_len, bias, most: (
        score + where(q_idx + kv_len - qo_len - kv_idx > most, 0.25, bias[head, kv_idx - q_idx - kv_len + qo_len + 499])
    ),
    tensors={"bias": torch.float32}, scalars={"most": int},
)  # fmt: skip
#: Heads, KV heads, and lengths of queries: row tiles of 128 and of 192, with and without all heads of a token.
GROUPS = [
    (4, 4, 700),
    (4, 2, 1300),
    (8, 2, 700),
    (3, 1, 200),
    (5, 1, 530),
    (16, 2, 333),
    (23, 1, 130),
    (32, 1, 90),
    (40, 1, 70),
]


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), GROUPS)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_left": 77}, {}], ids=str)
def test_biases_of_distances(options, heads, kv_heads, rows, dim, device, backend):
    """Rows of many tiles, of which the last ones are not whole, and KV tiles with and without hidden keys."""
    bias = _table_of_distances(heads, "causal" in options)

    def score(s: Tensor, at: At) -> Tensor:
        far = bias.double()[at.head, (at.distance + 499).clamp(0, 998)]
        return s + torch.where(at.distance < -480, 0.25, far)

    case, rows = Case(DISTANCES, {"bias": bias, "most": 480}, score), rows if device != "cpu" else rows // 5
    p = Problem(
        (rows, 1, 0, 71), (rows + 150, 300, 40, 71), num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        device=device, dtype=any_dtype(device), **options,
    )  # fmt: skip
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True, **case.on(device)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_biases_of_distances_under_a_mask(page_size, device, backend):
    """Tiles that a mask of blocks passes over share no distances; pages are gathered, or come in boxes."""
    both = quire.Variant(
        lambda score, q_idx, kv_idx, head, bias: score + bias[head, kv_idx - q_idx + 300],
        lambda q_idx, kv_idx, documents: documents[kv_idx] == documents[q_idx],
        tensors={"bias": torch.float32, "documents": torch.int32},
    )
    bias, documents = table(8, 999), torch.arange(1000, dtype=torch.int32) // 90 % 3
    case = Case(
        both, {"bias": bias, "documents": documents},
        lambda s, at: s + bias.double()[at.head, (at.kv_idx - at.q_idx + 300).clamp(0, 998)],
        lambda at: documents[at.kv_idx] == documents[at.q_idx],
    )  # fmt: skip
    p = Problem((690, 5), (970, 60), num_qo_heads=8, head_dim=128, device=device, dtype=any_dtype(device))
    cache = p.paged(page_size)
    of_plan, of_run = case.on(device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=both)
    plan_paged(wrapper, p, cache, plan=of_plan)
    check(p, case, wrapper.run(p.q, cache.kv, return_lse=True, **of_run))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_negative_caps(sign, device, backend):
    """a * tanh(b * score) of numbers of any sign: softmax is given a factor that is positive."""
    variant = quire.Variant(lambda score, a, b: a * tanh(b * score), scalars={"a": float, "b": float})
    case = Case(variant, {"a": -2.0 * sign, "b": -0.7}, lambda s, _: -2.0 * sign * torch.tanh(-0.7 * s))
    p = Problem((70, 200), (300, 900), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True, **case.on(device)[1]))


#: Scores that multiply rows, of any sign and by zero; one of them hides keys besides.
ROW_SCALES = {
    "times": (lambda score, head, x: score * x[head], None, lambda s, x: s * x),
    "turned round": (lambda score, head, x: (1.0 - x[head]) * score, None, lambda s, x: (1.0 - x) * s),
    "divided": (lambda score, head, x: score / (x[head] + 0.5), None, lambda s, x: s / (x + 0.5)),
    "behind a mask": (lambda score, head, x: score * x[head], lambda kv_idx: kv_idx % 5 != 2, lambda s, x: s * x),
}


@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ROW_SCALES)
def test_row_scales_of_any_sign(name, device, backend):
    """In KV tiles that need a mask, and in others; a row times zero sees all of its keys alike."""
    function, mask, truth = ROW_SCALES[name]
    factors = torch.tensor([2.0, -1.5, 0.0, -0.25])
    variant = quire.Variant(function, mask, tensors={"x": "float32"})
    sees = None if mask is None else lambda at: at.kv_idx % 5 != 2
    case = Case(variant, {"x": factors}, lambda s, at: truth(s, factors.double()[at.head]), sees)
    assert has_row_scale(variant.expression)
    p = Problem((70, 200), (300, 900), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True, **case.on(device)[1]))


@pytest.mark.part(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_vo"), [(64, 64), (192, 128), (256, 256)])
def test_row_scales_of_head_dims(head_dim, head_dim_vo, device, backend):
    """By position, in pages; half of them are negative."""
    scale = table(900)
    variant = quire.Variant(lambda score, q_idx, x: score * x[q_idx], tensors={"x": "float32"})
    case = Case(variant, {"x": scale}, lambda s, at: s * scale.double()[at.q_idx])
    p = Problem(
        (70, 200), (300, 900), num_qo_heads=HEADS, head_dim=head_dim, head_dim_vo=head_dim_vo, device=device,
        dtype=any_dtype(device), causal=True,
    )  # fmt: skip
    cache = p.paged(16)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_paged(wrapper, p, cache)
    check(p, case, wrapper.run(p.q, cache.kv, return_lse=True, **case.on(device)[1]))


def test_which_scores_multiply_rows():
    """A factor that differs between keys, or has the score in it, is none; nor is a quotient by the score."""
    for function in (
        lambda score, kv_idx, x: score * x[kv_idx],
        lambda score, head, x: score * tanh(score) * x[head],
        lambda score, head, x: x[head] / score,
        lambda score, head, x: score * x[head] + 1.0,
    ):
        assert not has_row_scale(quire.Variant(function, tensors={"x": "float32"}).expression)


@pytest.mark.parametrize("cap", [1.0, 30.0, 1000.0])
def test_soft_caps_of_long_requests(cap, device, backend):
    """KV tiles that need no mask, with logits beyond the cap, below it, and far below it."""
    case = Case(variants.soft_cap, {"cap": cap}, lambda s, _: cap * torch.tanh(s / cap))
    p = Problem((70, 200), (300, 900), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True, **case.on(device)[1]))


#: Scores that a kernel may compute in more ways than one: name, plan()'s options.
SCORES = [(name, {}) for name in ("soft_cap", "alibi", "relative_bias", "temperature")]
SCORES += [(None, {"logits_soft_cap": 30.0}), (None, {"pos_encoding_mode": "ALIBI"})]


@pytest.mark.part(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SCORES)
def test_a_row_does_not_depend_on_other_rows(name, options, device, backend):
    """Bit for bit, whether the others of its request have larger logits, or are not there."""
    shape = {"head_dim": 128, "num_qo_heads": HEADS, "device": device, "dtype": any_dtype(device), "causal": True}
    p = Problem((30,), (700,), **shape)
    given = {"soft_cap": {"cap": 30.0}, "alibi": {"slopes": SLOPES}, "relative_bias": {"bias": table(HEADS, 1399)}}
    given["temperature"] = {"scale": table(700)}
    case = Case(getattr(variants, name) if name else None, given.get(name, {}))
    operands = case.on(device)[1] if name else {}

    def rows_of(q: Tensor) -> Tensor:
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
        plan_ragged(wrapper, Problem((len(q),), (700,), **shape), plan={"disable_split_kv": True, **options})
        return wrapper.run(q, p.k, p.v, **operands)

    same = torch.arange(30, device=device) % 7 != 3
    louder = torch.where(same[:, None, None], p.q, p.q * 60)
    whole = rows_of(p.q)
    assert torch.equal(rows_of(louder)[same], whole[same])
    if device != "cpu":  # which vectorises few rows and many in different ways
        assert torch.equal(rows_of(p.q[11:].contiguous()), whole[11:])


def test_soft_caps_of_large_values(device, backend):
    """Weights are at most 2^8 before they are normalised: values of 1e30 do not overflow."""
    p = Problem((30,), (900,), head_dim=128, device=device, dtype=any_dtype(device), causal=True, soft_cap=30.0)
    p = p.within_tiles(backend)
    p.k[:800] *= 5.0  # logits rise by far more than 8 from where a kernel begins
    p.v.mul_(1e30)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend)
    plan_ragged(wrapper, p)
    p.check(wrapper.run(p.q, p.k, p.v))


def test_a_kernel_and_what_plans_it_are_compiled_at_a_time(monkeypatch):
    """Each of the two asks while the other does."""
    both, asked = threading.Barrier(2, timeout=30), set()

    def get_module(spec):
        if spec.slug.startswith(("attention_cpu", "expression_blocks")) and spec.slug not in asked:
            asked.add(spec.slug)
            both.wait()
        return jit.get_module(spec)

    monkeypatch.setattr(planner, "get_module", get_module)
    p, variant = problem("cpu"), quire.Variant(mask=lambda kv_idx, odd: kv_idx % 7 != odd, scalars={"odd": "int32"})
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), variant=variant)
    plan_ragged(wrapper, p, plan={"odd": 3})
    check(p, Case(variant, {}, sees=lambda at: at.kv_idx % 7 != 3), wrapper.run(p.q, p.k, p.v, return_lse=True))
    assert len(asked) == 2


# --- everywhere plain attention goes ---------------------------------------------------------------------------------

#: A score and a mask in one.
BOTH = Case(
    quire.Variant(
        lambda score, q_idx, kv_idx, head, qo_len, kv_len, slopes: (
            score + slopes[head] * (kv_idx - (q_idx + kv_len - qo_len))
        ),
        lambda q_idx, kv_idx, qo_len, kv_len, width: (kv_idx < 3) | (kv_idx > q_idx + kv_len - qo_len - width),
        tensors={"slopes": torch.float32}, scalars={"width": int},
    ),
    {"slopes": SLOPES, "width": 20},
    lambda s, at: s + SLOPES.double()[at.head] * at.distance,
    lambda at: (at.kv_idx < 3) | (at.distance > -20),
)  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_left": 9}, {}], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged(options, layout, device, backend):
    p = problem(device, **options)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), layout, backend=backend, jit_args=[BOTH.variant]
    )
    plan_ragged(wrapper, p, plan=of_plan)
    k, v = (p.k, p.v) if layout == "NHD" else (p.k.transpose(0, 1).contiguous(), p.v.transpose(0, 1).contiguous())
    check(p, BOTH, wrapper.run(p.q, k, v, return_lse=True, **of_run))


ROPE = {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e3}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"attention_chunk_size": 16}, {"causal": True, **ROPE}], ids=["chunks", "rope"])
def test_beside_other_options(options, device, backend):
    """Chunks hide keys besides; rotated keys have the scores that the variant is given."""
    p = problem(device, **options)
    cache = p.paged(16)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=BOTH.variant)
    plan_paged(wrapper, p, cache, plan=of_plan)
    check(p, BOTH, wrapper.run(p.q, cache.kv, return_lse=True, **of_run))


@pytest.mark.part(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "head_dim_vo"), [(40, 40), (192, 128), (256, 256), (512, 512)])
def test_head_dims_of_variants(head_dim, head_dim_vo, device, backend):
    p = problem(device, head_dim=head_dim, head_dim_vo=head_dim_vo, causal=True)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=BOTH.variant)
    plan_ragged(wrapper, p, plan=of_plan)
    check(p, BOTH, wrapper.run(p.q, p.k, p.v, return_lse=True, **of_run))


def test_decode(device, backend):
    """With sinks, which join the denominator behind the score."""
    p = Problem((1, 1, 1, 1), LENS[1], num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    cache = p.paged(16)
    of_plan, of_run = BOTH.on(device)
    wrapper = decode_wrapper(p, cache, backend, jit_args=BOTH.variant)
    plan_decode(wrapper, p, cache, plan=of_plan)
    sinks = torch.randn(HEADS, device=device)
    check(p, BOTH, wrapper.run(p.q, cache.kv, sinks=sinks, return_lse=True, **of_run), sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("split", [{"fixed_split_size": 128}, {"disable_split_kv": True}], ids=str)
def test_splits_of_variants(split, device, backend):
    """Work tiles of a part of a row tile have their own place in the block mask."""
    p = Problem((3, 200), (900, 700), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    cache = p.paged(16)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=BOTH.variant)
    plan_paged(wrapper, p, cache, plan={**of_plan, **split})
    check(p, BOTH, wrapper.run(p.q, cache.kv, return_lse=True, **of_run))


@pytest.mark.slow
def test_masks_of_long_variants(device, backend):
    """Many KV tiles of which the mask hides most, some in full."""
    p = Problem((300, 64), (2500, 64), num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    cache = p.paged(16)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=BOTH.variant)
    plan_paged(wrapper, p, cache, plan=of_plan)
    check(p, BOTH, wrapper.run(p.q, cache.kv, return_lse=True, **of_run))


@pytest.mark.slow
def test_a_soft_cap_with_a_mask(device, backend):
    """The pattern of a score beside a custom mask."""
    cap, mask = CASES["soft_cap"], CASES["document_mask"]
    variant = quire.Variant(
        lambda score, cap: cap * tanh(score / cap),
        lambda q_idx, kv_idx, request, qo_len, kv_len, documents: (
            documents[request, q_idx + kv_len - qo_len] == documents[request, kv_idx]
        ),
        tensors={"documents": "int32"}, scalars={"cap": "float32"},
    )  # fmt: skip
    case = Case(variant, {**cap.operands, **mask.operands}, cap.score, mask.sees)
    p = problem(device, causal=True)
    of_plan, of_run = case.on(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p, plan=of_plan)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True, **of_run))


@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "num_qo_heads"), [(64, 2), (64, 12), (128, 8), (128, 16)])
def test_masks_of_rows_that_share_a_query(head_dim, num_qo_heads, device, backend):
    """Heads of a query have one mask: groups of 1, 4, 6 and 8, tiles of 64 and 128 keys, and a request without rows."""
    documents = torch.arange(1900, dtype=torch.int32).div(470, rounding_mode="floor").expand(3, -1).contiguous()
    case = Case(
        variants.document_mask, {"documents": documents},
        sees=lambda at: documents[0][at.q_idx + at.kv_len - at.qo_len] == documents[0][at.kv_idx],
    )  # fmt: skip
    lens = ((401, 0, 33), (603, 9, 290)) if device == "cpu" else ((1601, 0, 33), (1803, 9, 290))
    p = Problem(
        *lens, num_qo_heads=num_qo_heads, head_dim=head_dim, device=device,
        dtype=any_dtype(device), causal=True,
    )  # fmt: skip
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_ragged(wrapper, p, plan=case.on(device)[0])
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True))


@pytest.mark.slow
def test_fp8_cache(device, backend):
    dtype, kv_dtype = torch.bfloat16, torch.float8_e4m3fn
    p = Problem(*LENS, num_qo_heads=HEADS, device=device, dtype=dtype, kv_dtype=kv_dtype, causal=True)
    cache = p.paged(16)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=BOTH.variant)
    plan_paged(wrapper, p, cache, plan={**of_plan, "kv_data_type": kv_dtype})
    check(p, BOTH, wrapper.run(p.q, cache.kv, return_lse=True, **of_run))


@pytest.mark.slow
def test_custom_mask_beside_a_score(device, backend):
    case = CASES["alibi"]
    p = problem(device).random_mask()
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True, **case.on(device)[1]))


def test_single_calls(device, backend):
    p = Problem((17,), (33,), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    operands = {name: x for part in BOTH.on(device) for name, x in part.items()}
    got = quire.single_prefill_with_kv_cache(
        p.q, p.k, p.v, causal=True, return_lse=True, backend=backend, variant=BOTH.variant, **operands
    )
    check(p, BOTH, got)
    p = Problem((1,), (33,), num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    o, lse = quire.single_decode_with_kv_cache(
        p.q[0], p.k, p.v, return_lse=True, backend=backend, variant=BOTH.variant, **operands
    )
    check(p, BOTH, (o[None], lse[None]))


@pytest.mark.each_value
@pytest.mark.first(1)
@pytest.mark.parametrize("backend_of_torch", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ragged", "paged", "decode"])
def test_under_torch_compile(kind, backend_of_torch, device, backend):
    """run() with tensors and numbers that change between calls of one graph."""
    torch._dynamo.reset()
    capped = Case(
        quire.Variant(
            lambda score, head, slopes, cap: cap * torch.tanh(score * slopes[head] / cap),
            lambda q_idx, kv_idx, qo_len, kv_len, width: (kv_idx < 3) | (kv_idx > q_idx + kv_len - qo_len - width),
            tensors={"slopes": torch.float32}, scalars={"cap": float, "width": int},
        ),
        {"width": 20}, sees=BOTH.sees,
    )  # fmt: skip
    lens = ((1, 1, 1, 1), LENS[1]) if kind == "decode" else LENS
    p = Problem(*lens, num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    cache = p.paged(16)
    if kind == "ragged":
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=capped.variant)
        plan_ragged(wrapper, p, plan=capped.operands)
    elif kind == "paged":
        wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=capped.variant)
        plan_paged(wrapper, p, cache, plan=capped.operands)
    else:
        wrapper = decode_wrapper(p, cache, backend, variant=capped.variant)
        plan_decode(wrapper, p, cache, plan=capped.operands)
    kv = (p.k, p.v) if kind == "ragged" else (cache.kv,)

    @torch.compile(fullgraph=True, backend=backend_of_torch)
    def layer(q: Tensor, slopes: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        o, lse = wrapper.run(q * 2, *kv, return_lse=True, slopes=slopes.exp(), cap=cap)
        return o / 2, lse

    for slopes, cap in ((SLOPES, 5.0), (-SLOPES, 5.0), (SLOPES, 0.5)):
        o, lse = layer(p.q / 2, slopes.to(device), cap)
        rates = slopes.to(device).exp().cpu().double()

        def score(s: Tensor, at: At, rates: Tensor = rates, cap: float = cap) -> Tensor:
            return cap * torch.tanh(s * rates[at.head] / cap)

        p.check(o * 2, lse, score=score, sees=capped.sees)
    with pytest.raises(quire.ValidationError, match="slopes: expected at least"):
        layer(p.q, SLOPES[:1].to(device), 1.0)


def test_single_calls_under_torch_compile(device, backend):
    torch._dynamo.reset()
    p = Problem((17,), (33,), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    slopes = SLOPES.to(device)

    @torch.compile(fullgraph=True, backend="eager")
    def layer(slopes: Tensor, width: int) -> tuple[Tensor, Tensor]:
        return quire.single_prefill_with_kv_cache(
            p.q, p.k, p.v, causal=True, return_lse=True, backend=backend, variant=BOTH.variant, slopes=slopes,
            width=width,
        )  # fmt: skip

    check(p, BOTH, layer(slopes, 20))
    p.check(*layer(slopes, 5), score=BOTH.score, sees=lambda at: (at.kv_idx < 3) | (at.distance > -5))


@pytest.mark.slow
def test_batches_of_prefills_and_decodes(device):
    p = problem(device, causal=True)
    cache = p.paged(16)
    of_plan, of_run = BOTH.on(device)
    wrapper = quire.BatchAttention(device=device, variant=BOTH.variant)
    lens = torch.tensor(p.kv_lens, dtype=torch.int32)
    wrapper.plan(
        torch.tensor(p.qo_indptr, dtype=torch.int32), cache.indptr, cache.indices, lens, HEADS, 2, 64, 64, 16,
        causal=True, q_data_type=p.dtype, kv_data_type=p.dtype, **of_plan,
    )  # fmt: skip
    check(p, BOTH, wrapper.run(p.q, cache.kv, **of_run))
    with pytest.raises(quire.ValidationError, match="slopes: expected as a keyword of run"):
        wrapper.run(p.q, cache.kv)


def table_of(p: Problem, cache: PagedCache) -> Tensor:
    """The page numbers of a cache, a row a request; all of them as wide as the widest."""
    rows = [cache.indices[a:b].tolist() for a, b in itertools.pairwise(cache.indptr.tolist())]
    width = max(len(row) for row in rows)
    return ints([row + [0] * (width - len(row)) for row in rows], p.device).view(len(rows), width)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("name", ["alibi", "soft_cap", "relative_bias", "document_mask"])
@pytest.mark.parametrize("call", [quire.xqa_batch_decode_with_kv_cache, quire.trtllm_batch_decode_with_kv_cache])
def test_decode_on_tables_of_pages(call, name, q_len, device, backend):
    """A GPU plans these calls itself; the softmax scale may be a tensor there."""
    case, kv_lens = CASES[name], (37, 5, 0, 60)
    p = Problem((q_len,) * 4, kv_lens, num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=q_len > 1)
    cache, sinks = p.paged(16), torch.randn(HEADS, device=device)
    scale = torch.tensor(1 / 8, device=device)
    for _ in range(2):
        got = call(
            p.q, cache.kv, workspace(device), table_of(p, cache), ints(kv_lens, device), 64, bmm1_scale=scale,
            kv_layout="NHD", q_len_per_req=q_len, sinks=sinks, backend=backend, variant=case.variant,
            **joint(case, device),
        )  # fmt: skip
        p.check(got, **case.expected(), sinks=sinks)


def joint(case: Case, device: str) -> dict[str, object]:
    """All operands, for calls that plan and run."""
    return {name: x for part in case.on(device) for name, x in part.items()}


@pytest.mark.part(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["noise", "prefix_lm", "tree_mask", "soft_cap"])
def test_drafts_of_different_lengths_on_tables_of_pages(name, device, backend):
    """Rows are padded, and the variant means the queries of each request."""
    case = CASES[name]
    p = Problem((3, 0, 5, 1), (37, 5, 60, 9), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    cache, variant = p.paged(16), case.variant
    got = quire.xqa_batch_decode_with_kv_cache(
        p.q, cache.kv, workspace(device), table_of(p, cache), ints(p.kv_lens, device), 64, bmm1_scale=1 / 8,
        q_len_per_req=5, q_cu_seq_lens=ints(p.qo_indptr, device), backend=backend, variant=variant,
        **joint(case, device),
    )  # fmt: skip
    p.check(got, **case.expected())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "document_mask"])
def test_xqa(name, device, backend):
    case = CASES[name]
    p = Problem((1,) * 3, (37, 5, 60), num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    cache = p.paged(16)
    table, lens = table_of(p, cache), ints(p.kv_lens, device)
    got = quire.xqa(
        p.q, *cache.kv, table, lens, page_size=16, backend=backend, variant=case.variant, **joint(case, device)
    )
    p.check(got, **case.expected())
    with pytest.raises(TypeError, match="unexpected keyword argument 'slopes'"):
        quire.xqa(p.q, *cache.kv, table, lens, page_size=16, slopes=SLOPES)


@pytest.mark.slow
def test_prefill_on_tables_of_pages(device, backend):
    p = problem(device, causal=True)
    cache, operands = p.paged(16), {name: x for part in BOTH.on(device) for name, x in part.items()}
    offsets = (torch.tensor(x, dtype=torch.int32, device=device) for x in (p.qo_indptr, p.kv_indptr))
    got = quire.trtllm_batch_context_with_kv_cache(
        p.q, cache.kv, workspace(device), table_of(p, cache), ints(p.kv_lens, device), max(p.qo_lens), max(p.kv_lens),
        1 / 8, 1.0, 4, *offsets, kv_layout="NHD", return_lse=True, backend=backend, variant=BOTH.variant, **operands,
    )  # fmt: skip
    check(p, BOTH, got)


@pytest.mark.slow
def test_the_wrappers_that_are_others_with_options(device, backend):
    """For CUDA graphs, planned as SGLang plans; and with sinks by position."""
    case, sinks = CASES["document_mask"], torch.randn(HEADS, device=device)
    p = Problem((1,) * 3, (37, 5, 60), num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    cache, (of_plan, of_run) = p.paged(16), case.on(device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 20, 3)]
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(device), *buffers, backend=backend, variant=case.variant
    )
    tables = cache.indptr, cache.indices, cache.last_page_len
    quire.fast_decode_plan(wrapper, *tables, HEADS, 2, p.head_dim, 16, q_data_type=p.dtype, **of_plan)
    check(p, case, wrapper.run(p.q, cache.kv, return_lse=True, sinks=sinks, **of_run), sinks=sinks)
    with_sinks = quire.BatchAttentionWithAttentionSinkWrapper(
        workspace(device), backend=backend, q_data_type=p.dtype, kv_data_type=p.dtype, head_dim_qk=p.head_dim,
        head_dim_vo=p.head_dim, variant=case.variant,
    )  # fmt: skip
    with_sinks.plan(ints(p.qo_indptr, device), *tables, HEADS, 2, p.head_dim, 16, **of_plan)
    check(p, case, with_sinks.run(p.q, cache.kv, sinks, return_lse=True, **of_run), sinks=sinks)


def test_what_tables_of_pages_refuse():
    p = Problem((1, 1), (20, 9), num_qo_heads=HEADS)
    cache = p.paged(16)
    given = p.q, cache.kv, workspace("cpu"), table_of(p, cache), ints(p.kv_lens, "cpu"), 32
    for options, error, message in (
        ({"variant": variants.alibi}, quire.ValidationError, "slopes: expected as a keyword"),
        ({"slopes": SLOPES}, TypeError, "unexpected keyword argument 'slopes'"),
        ({"variant": "alibi"}, quire.ValidationError, "variant: expected a quire.Variant, got str"),
        (
            {"variant": variants.alibi, "slopes": SLOPES[:2], "q_cu_seq_lens": ints([0, 1, 2], "cpu")},
            quire.ValidationError, "slopes: expected at least 4 elements in dimension 0",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            quire.xqa_batch_decode_with_kv_cache(*given, **options)


def test_calls_that_take_no_variant():
    """They name the argument."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'variant'"):
        quire.xqa_mla(variant=variants.alibi)


def test_a_nan_that_a_query_sees(device, backend):
    """Division by 0 is IEEE 754's: rows that see the NaN are NaN, and no others."""
    variant = quire.Variant(
        lambda score, kv_idx, zero: where(kv_idx == 9, zero / zero, score), scalars={"zero": "float32"}
    )
    p = Problem((20,), (20,), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    o, lse = quire.single_prefill_with_kv_cache(
        p.q, p.k, p.v, causal=True, return_lse=True, backend=backend, variant=variant, zero=0.0
    )
    assert o[9:].isnan().all() and lse[9:].isnan().all()
    before = Problem((9,), (9,), num_qo_heads=HEADS, device=device, dtype=p.dtype, causal=True)
    before.q, before.k, before.v = p.q[:9], p.k[:9], p.v[:9]
    before.check(o[:9], lse[:9])


@pytest.mark.slow
def test_masked_scores(device, backend):
    """-inf as a score hides a key, rows without any included, in a tile that needs no mask otherwise."""
    variant = quire.Variant(
        lambda score, q_idx, kv_idx: torch.where((kv_idx % 3 == 0) & (q_idx % 5 != 0), score, -math.inf)
    )
    case = Case(variant, {}, lambda s, at: torch.where((at.kv_idx % 3 == 0) & (at.q_idx % 5 != 0), s, -math.inf))
    p = problem(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True))


@pytest.mark.slow
def test_a_mask_of_heads(device, backend):
    """KV tiles are full or empty for all heads alike."""
    variant = quire.Variant(mask=lambda kv_idx, head, limit: kv_idx < limit[head], tensors={"limit": torch.int64})
    limit = torch.tensor([3, 50, 200, 1000])
    case = Case(variant, {"limit": limit}, sees=lambda at: at.kv_idx < limit[at.head])
    p = Problem((20, 3), (300, 170), num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p, plan=case.on(device)[0])
    check(p, case, wrapper.run(p.q, p.k, p.v, return_lse=True))


@pytest.mark.slow
def test_sigmoid_attention(device, backend):
    """Without softmax: the sum of sigmoid(score + bias) * v."""
    p = Problem((9,), (40,), num_qo_heads=HEADS, device=device, dtype=any_dtype(device))
    o, lse = quire.single_prefill_with_kv_cache(
        p.q, p.k, p.v, return_lse=True, backend=backend, variant=variants.sigmoid, bias=-math.log(40)
    )
    k, v = (t.cpu().double().repeat_interleave(2, 1) for t in (p.k, p.v))
    weights = torch.sigmoid(torch.einsum("qhd,khd->hqk", p.q.cpu().double(), k) / 8 - math.log(40))
    truth = torch.einsum("hqk,khd->qhd", weights, v)
    got = variants.sigmoid_output(o, lse).cpu().double()
    assert (got - truth).abs().max() <= 4 * torch.finfo(p.dtype).eps * truth.abs().max()


# --- operands --------------------------------------------------------------------------------------------------------


def test_other_values_compile_nothing(device, backend):
    case, p = CASES["soft_cap"], problem(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_ragged(wrapper, p)
    wrapper.run(p.q, p.k, p.v, cap=1.0)
    began = []
    unsubscribe = quire.events.subscribe(began.append)
    try:
        for cap in (1.5, 30.0, 2):
            got = wrapper.run(p.q, p.k, p.v, return_lse=True, cap=cap)
            p.check(*got, score=lambda s, _, cap=cap: cap * torch.tanh(s / cap))
    finally:
        unsubscribe()
    assert not began


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_float_tensors(kind, device, backend):
    """By strides, of a view."""
    dtype, kind = kind, str(kind).removeprefix("torch.")
    variant = quire.Variant(lambda score, q_idx, head, bias: score + bias[head, q_idx], tensors={"bias": kind})
    bias = table(40, 9, dtype=dtype).t()[2 : 2 + HEADS]
    p = problem(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p)
    got = wrapper.run(p.q, p.k, p.v, return_lse=True, bias=bias.to(device).t().contiguous().t())
    p.check(*got, score=lambda s, at: s + bias.double()[at.head, at.q_idx])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.uint8, torch.bool])
def test_integer_tensors(kind, device, backend):
    dtype, kind = kind, str(kind).removeprefix("torch.")
    allowed = torch.randint(0, 2, (60,), generator=torch.Generator().manual_seed(3)).to(dtype)
    test = (lambda x: x) if dtype is torch.bool else (lambda x: x == 1)
    variant = quire.Variant(mask=lambda kv_idx, allowed: test(allowed[kv_idx]), tensors={"allowed": kind})
    p = problem(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p, plan={"allowed": allowed.to(device)})
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True), sees=lambda at: test(allowed[at.kv_idx]))


def test_reads_beyond_a_tensor(device, backend):
    """Its nearest element, whatever lies around it in memory."""
    variant = quire.Variant(
        lambda score, q_idx, kv_idx, head, bias: score + bias[head * 3 - 2, (kv_idx - 7) * 1000000],
        tensors={"bias": "float32"},
    )
    bias, around = table(3, 5), torch.full((9, 40), math.nan)
    around[3:6, 10:15] = bias
    p = problem(device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=variant)
    plan_ragged(wrapper, p)
    got = wrapper.run(p.q, p.k, p.v, return_lse=True, bias=around.to(device)[3:6, 10:15])
    p.check(
        *got,
        score=lambda s, at: s + bias.double()[(at.head * 3 - 2).clamp(0, 2), ((at.kv_idx - 7) * 1000000).clamp(0, 4)],
    )


REFUSED = {
    "missing": ({}, {}, "slopes: expected as a keyword of run"),
    "in run": ({}, {"slopes": SLOPES, "documents": DOCUMENTS}, "documents: expected by plan"),
    "in plan": ({"slopes": SLOPES}, {}, "slopes: expected by run"),
    "dtype": ({}, {"slopes": SLOPES.double()}, "slopes: expected dtype torch.float32"),
    "rank": ({}, {"slopes": SLOPES[None]}, "slopes: expected 1 dimensions"),
    "heads": ({}, {"slopes": SLOPES[:3]}, "slopes: expected at least 4 elements in dimension 0, which head counts"),
    "keys": ({"documents": DOCUMENTS[:, :59]}, {}, "expected at least 60 elements in dimension 1, which kv_idx counts"),
    "requests": ({"documents": DOCUMENTS[:3]}, {}, "documents: expected at least 4 elements in dimension 0"),
    "empty": ({}, {"slopes": SLOPES[:0]}, "none of them empty"),
    "number": ({}, {"slopes": 1.0}, "slopes: expected a torch.Tensor"),
}  # fmt: skip
STRICT = quire.Variant(
    lambda score, head, slopes: score * slopes[head],
    lambda q_idx, kv_idx, request, documents: documents[request, kv_idx] == documents[request, 0],
    tensors={"slopes": "float32", "documents": "int32"},
)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_operands(name):
    of_plan, of_run, message = REFUSED[name]
    p = problem("cpu")
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), variant=STRICT)
    with pytest.raises(quire.ValidationError, match=message):
        plan_ragged(wrapper, p, plan={"documents": DOCUMENTS, **of_plan})
        wrapper.run(p.q, p.k, p.v, **of_run)


def test_wrong_numbers():
    p = problem("cpu")
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), variant=variants.dilated_window)
    for width in ("5", 2.5, 2**31, SLOPES):
        with pytest.raises(quire.ValidationError, match="width: expected"):
            plan_ragged(wrapper, p, plan={"width": width, "step": 3})
    for cap in (1e300, "5", None):
        with pytest.raises(quire.ValidationError, match="cap: expected a number"):
            quire.single_prefill_with_kv_cache(p.q, p.k, p.v, variant=variants.soft_cap, cap=cap)


def test_what_a_variant_says_is_not_asked_for_besides():
    p = problem("cpu")
    for variant, options, name in (
        (variants.soft_cap, {"logits_soft_cap": 2.0}, "logits_soft_cap"),
        (variants.alibi, {"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        (variants.prefix_lm, {"custom_mask": torch.ones(2008, dtype=torch.bool), "prefix": PREFIX}, "custom_mask"),
    ):
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), variant=variant)
        with pytest.raises(quire.ValidationError, match=f"{name}: expected none beside a variant"):
            plan_ragged(wrapper, p, plan=options)


def test_arguments_that_are_none():
    p = problem("cpu")
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'slopes'"):
        plan_ragged(wrapper, p, plan={"slopes": SLOPES})
    plan_ragged(wrapper, p)
    with pytest.raises(TypeError, match="unexpected keyword argument 'slopes'"):
        wrapper.run(p.q, p.k, p.v, slopes=SLOPES)
    with pytest.raises(TypeError, match=r"single_prefill_with_kv_cache\(\) got .* 'slopes'"):
        quire.single_prefill_with_kv_cache(p.q, p.k, p.v, slopes=SLOPES)
    with pytest.raises(TypeError, match=r"single_decode_with_kv_cache\(\) got .* 'slopes'"):
        quire.single_decode_with_kv_cache(p.q[0], p.k, p.v, slopes=SLOPES)


def single_calls(p: Problem) -> dict[str, Callable[..., object]]:
    """Functions that plan and run, and take operands as keywords, on the tensors of a problem; by name."""
    cache, table, lens = p.paged(16), [[0, 1], [2, 3]], ints(p.kv_lens, "cpu")
    table, work = torch.tensor(table, dtype=torch.int32), workspace("cpu")
    offsets = [ints(x, "cpu") for x in (p.qo_indptr, p.kv_indptr)]
    selected = quire.SelectedPages(table[:, None].expand(-1, 2, -1).contiguous(), lens[:, None].expand(-1, 2))
    return {
        "single_prefill_with_kv_cache": partial(quire.single_prefill_with_kv_cache, p.q, p.k, p.v),
        "single_decode_with_kv_cache": partial(quire.single_decode_with_kv_cache, p.q[0], p.k, p.v),
        "xqa_batch_decode_with_kv_cache": partial(
            quire.xqa_batch_decode_with_kv_cache, p.q, cache.kv, work, table, lens, 32
        ),
        "trtllm_batch_decode_with_kv_cache": partial(
            quire.trtllm_batch_decode_with_kv_cache, p.q, cache.kv, work, table, lens, 32, kv_layout="NHD"
        ),
        "trtllm_batch_context_with_kv_cache": partial(
            quire.trtllm_batch_context_with_kv_cache, p.q, cache.kv, work, table, lens, 1, 32, 1.0, 1.0, 2, *offsets,
            kv_layout="NHD",
        ),
        "xqa": partial(quire.xqa, p.q, *cache.kv, table, lens, page_size=16),
        "batch_decode_with_selected_pages": partial(
            quire.batch_decode_with_selected_pages, p.q, cache.kv, work, selected
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", single_calls(Problem((1, 1), (20, 9), num_qo_heads=HEADS)))
def test_wrong_keywords_name_the_function_that_was_called(name):
    """Not the plan() and run() inside of it."""
    call = single_calls(Problem((1, 1), (20, 9), num_qo_heads=HEADS))[name]
    for variant, operands in ((None, {}), (variants.alibi, {"slopes": SLOPES})):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'slops'; "):
            call(variant=variant, slops=SLOPES, **operands)
    with pytest.raises(quire.ValidationError, match=rf"^slopes: expected as a keyword of {name}\(\)"):
        call(variant=variants.alibi)


def test_jit_args():
    space = workspace("cpu")
    for given in (
        {"jit_args": [variants.alibi]},
        {"jit_kwargs": {"variant": variants.alibi}},
        {"variant": variants.alibi},
    ):
        assert quire.BatchPrefillWithRaggedKVCacheWrapper(space, **given)._variant is variants.alibi
    source = ["single_prefill", torch.float16, "struct FlashSigmoid : AttentionVariantBase {};"]
    with pytest.raises(quire.ValidationError, match=r"docs/variants.md"):
        quire.BatchPrefillWithPagedKVCacheWrapper(space, jit_args=source)
    with pytest.raises(quire.ValidationError, match="expected it once"):
        quire.BatchDecodeWithPagedKVCacheWrapper(space, jit_args=variants.alibi, variant=variants.alibi)


#: What stands for FlashInfer's C++ texts, which are known by their digests.
TEXTS = {
    "FlashSigmoid": "struct FlashSigmoid : AttentionVariantBase { /* of softmax */ };",
    "FlashAlibiDecode": "struct FlashAlibiDecode : AttentionVariantBase { /* a bias */ };",
    "FlashCustomMask": "struct FlashCustomMask : AttentionVariantBase { /* bits */ };",
}


@pytest.fixture
def texts(monkeypatch):
    """jit_args as FlashInfer takes them, with one of the texts, whose white space means nothing."""
    known = {
        "FlashSigmoid": next(text for text in variants._TEXTS.values() if text.is_sum),
        "FlashAlibiDecode": next(text for text in variants._TEXTS.values() if text.has_slopes),
        "FlashCustomMask": next(text for text in variants._TEXTS.values() if text.scale),
    }
    for name, text in TEXTS.items():
        monkeypatch.setitem(variants._TEXTS, hashlib.sha256("".join(text.split()).encode()).hexdigest(), known[name])

    def jit_args(name, tensors=(), scalars=()):
        types = torch.float16, torch.float16, torch.float16, torch.int32, 64, 64
        lists = [*tensors], ["float"] * len(tensors), [*scalars], ["double"] * len(scalars)
        return ("uri", *types, *lists, name, TEXTS[name].replace(" ", "\n  "))

    return jit_args


def test_sigmoid_in_cxx(device, backend, texts):
    """Weights are not divided by their sum; run() takes the scale and the bias by position."""
    p = problem(device)
    given = texts("FlashSigmoid", (), ("logits_scale", "sigmoid_bias"))
    cache, want = p.paged(16), []
    for q0, q1, k0, k1 in zip(p.qo_indptr, p.qo_indptr[1:], p.kv_indptr, p.kv_indptr[1:], strict=False):
        group = p.num_qo_heads // p.num_kv_heads
        k, v = (t[k0:k1].double().repeat_interleave(group, 1) for t in (p.k, p.v))
        weights = torch.sigmoid(torch.einsum("mhd,nhd->hmn", p.q[q0:q1].double(), k) * 0.1 - 2.0)
        want.append(torch.einsum("hmn,nhd->mhd", weights, v))
    ragged = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, jit_args=given)
    plan_ragged(ragged, p, plan={"causal": False, "sm_scale": None})
    paged = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, jit_args=[*given])
    plan_paged(paged, p, cache, plan={"causal": False, "sm_scale": None})
    results = [ragged.run(p.q, p.k, p.v, 0.1, -2.0), paged.run(p.q, cache.kv, 0.1, -2.0, out=torch.empty_like(p.q))]
    for o in results:
        torch.testing.assert_close(o.double(), torch.cat(want), atol=2e-2, rtol=2e-2)
    with pytest.raises(quire.UnsupportedError, match="return_lse: expected False"):
        ragged.run(p.q, p.k, p.v, 0.1, -2.0, return_lse=True)
    with pytest.raises(quire.ValidationError, match="args: expected sm_scale, bias, got 3"):
        ragged.run(p.q, p.k, p.v, 0.1, -2.0, 3.0)


def test_alibi_in_cxx(device, texts):
    """The bias is added before the scale."""
    p = Problem((1, 1, 1), (20, 1, 65), device=device, dtype=any_dtype(device))
    cache, given = p.paged(16), texts("FlashAlibiDecode", ("maybe_alibi_slopes",), ("sm_scale",))
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), jit_args=given)
    plan_decode(wrapper, p, cache, plan={"sm_scale": None})
    plain = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), variant=variants.alibi)
    plan_decode(plain, p, cache, plan={"sm_scale": 0.2})
    slopes = quire.get_alibi_slopes(p.num_qo_heads, device) * 0.2
    assert torch.equal(wrapper.run(p.q, cache.kv, 0.2), plain.run(p.q, cache.kv, slopes=slopes))


def test_a_mask_in_cxx(device, texts):
    """It reads the bits that plan() is given; logits have no scale."""
    p = problem(device).random_mask()
    given = texts("FlashCustomMask", ("maybe_custom_mask", "maybe_mask_indptr"))
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), jit_args=given)
    plan_ragged(wrapper, p, plan={"sm_scale": None})
    p.sm_scale = 1.0
    p.check(wrapper.run(p.q, p.k, p.v))


def test_functions_of_a_jit_module():
    p = problem("cpu")
    q, k, v = p.q[:5], p.k[:60], p.v[:60]
    single = quire.single_prefill_with_kv_cache
    by_module = quire.single_prefill_with_kv_cache_with_jit_module
    biased = single(q, k, v, causal=True, variant=variants.alibi, slopes=SLOPES)
    assert torch.equal(by_module(variants.alibi, q, k, v, SLOPES, mask_mode=1), biased)
    out, lse = by_module(variants.soft_cap, q, k, v, 2.0, window_left=9, return_lse=True)
    expected = single(q, k, v, variant=variants.soft_cap, cap=2.0, window_left=9, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    one = quire.single_decode_with_kv_cache_with_jit_module(variants.alibi, q[0], k, v, SLOPES)
    assert torch.equal(one, quire.single_decode_with_kv_cache(q[0], k, v, variant=variants.alibi, slopes=SLOPES))
    with pytest.raises(quire.ValidationError, match=r"args: expected the variant's 1 operands \(slopes\), got 2"):
        by_module(variants.alibi, q, k, v, SLOPES, 1.0)
    with pytest.raises(quire.ValidationError, match=r"mask_mode: expected 0 \(none\) or 1"):
        by_module(variants.alibi, q, k, v, SLOPES, mask_mode=2)
    with pytest.raises(quire.ValidationError, match="return_lse: expected False"):
        quire.single_decode_with_kv_cache_with_jit_module(variants.alibi, q[0], k, v, SLOPES, return_lse=True)
    for module in ("struct FlashSigmoid {};", None):
        with pytest.raises(quire.ValidationError, match=r"^jit_module: expected a quire\.Variant"):
            by_module(module, q, k, v)
        with pytest.raises(quire.ValidationError, match=r"^jit_module: expected a quire\.Variant"):
            quire.single_decode_with_kv_cache_with_jit_module(module, q[0], k, v)


# --- tracing ---------------------------------------------------------------------------------------------------------

outside = [0.0]
total = 0.0


def branches(score, q_idx):
    if q_idx > 3:
        return score
    return -score


def writes(score):
    outside[0] = score
    return score


def writes_global(score):
    global total
    total = total + 1
    return score


def chains(score, q_idx, kv_idx):
    return score * (q_idx < kv_idx < 5)


def counts(score):
    outside.append(1)
    return score * float(len(outside))


def appends(score):
    outside.append(1)
    return score * 2


def prints(score):
    print(score)
    return score


def catches(score, q_idx):
    try:
        return score if q_idx > 3 else -score
    except Exception:
        return score


UNTRACEABLE = {
    appends: r"test_variants.py:\d+: `def appends.*changes 'outside'",
    prints: r"test_variants.py:\d+: `print\(score\)`: calls print\(\)",
    catches: r"test_variants.py:\d+: `return score if q_idx > 3 else -score`.*use where",
    lambda score: (
        score,
        score,
    ): r"test_variants.py:\d+: `lambda score: .*returns a tuple; expected a number or a value",
    branches: r"test_variants.py:\d+: `if q_idx > 3:`.*use where",
    writes: r"test_variants.py:\d+: `outside\[0\] = score`: writes an element",
    writes_global: r"test_variants.py:\d+: `total = total \+ 1`: writes a global",
    chains: r"`return score \* \(q_idx < kv_idx < 5\)`",
    counts: "changes 'outside'",
    lambda score: score * random.random(): "do not return the same expression each time",
    lambda score: math.tanh(score): "used as a number of Python",
    lambda score: torch.asinh(score): r"torch's asinh\(\)",
    lambda score: score.cumsum(0): "no 'cumsum'",
    lambda score: None: "returns nothing",
    lambda score: score > 0: "expected a number, got a bool",
    lambda score: score // 2: "write floor",
    lambda score, kv_idx: score + kv_idx // 0: "integer division by 0",
    lambda score: torch.where(score, 1, 0): "expected a bool as its condition",
    lambda score, strange: score: "'strange'",
    lambda score, **more: score: "parameters by name",
    lambda score: score + 2**40: "integers that int32 holds",
    lambda score: score + (1 << 20000): "integers that int32 holds, got one of 20001 bits",
    lambda score: score & 1: "expected integers or bools",
    lambda score, q_idx: score + q_idx**-1: "integers have no negative powers",
    lambda score: score + "a": "expected a number or a value",
    lambda score: [score]: "expected a number or a value",
    lambda score: outside[score]: "used as a number of Python",
    lambda score: score + outside.missing: "AttributeError",
}


@pytest.mark.parametrize("function", UNTRACEABLE, ids=lambda f: f"{f.__name__}{f.__code__.co_firstlineno}")
def test_what_cannot_be_traced(function):
    with pytest.raises(quire.ValidationError, match=UNTRACEABLE[function]):
        quire.Variant(function)


def test_what_cannot_be_declared():
    for options, message in (
        ({"tensors": {"x": torch.complex64}}, "tensors: expected one of"),
        ({"tensors": {"q_idx": "int32"}}, "cannot name an operand"),
        ({"tensors": {"x": "int32"}}, "'x' is declared but never read"),
        ({"scalars": {"x": "float16"}}, "scalars: expected one of"),
        ({"tensors": {"x": "int32"}, "scalars": {"x": int}}, "declared as a tensor too"),
        ({"tensors": ["x"]}, "tensors: expected names and types, as a dict, got list"),
        ({"tensors": {3: "int32"}}, "tensors: expected names as str, got 3"),
        ({"scalars": {None: "int32"}}, "scalars: expected names as str, got None"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            quire.Variant(lambda score: score * 2, **options)
    for read, message in (
        (lambda score, x: score + x[score], "expected integers as indices"),
        (lambda score, x: score + x[0] + x[0, 1], "expected 1 indices"),
        (lambda score, x: score + x[-1], "expected indices from 0 on"),
        (lambda score, x: score + x, "expected a number or a value"),
        (
            lambda score, x: score + x[0] * x.shape[1],
            r"test_variants.py:\d+.*x.shape: expected a dimension from 0 to 0",
        ),
        (lambda score, x: score * x.shape[1] + x[0], r"x.shape\[1\]: expected a dimension below 1"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            quire.Variant(read, tensors={"x": torch.float32})
    with pytest.raises(quire.ValidationError, match="a score, a mask or both"):
        quire.Variant()
    with pytest.raises(quire.ValidationError, match=r"mask: .*test_variants.py:\d+.*: expected a bool, got a int"):
        quire.Variant(mask=lambda q_idx: q_idx)


def test_texts():
    """A text is read as the variant that wrote it; equal functions are one variant."""
    for case in CASES.values():
        again = quire.Variant.parse(str(case.variant))
        assert again == case.variant and again.digest == case.variant.digest
    hidden = quire.Variant(lambda score, kv_idx: where(kv_idx > 9, where(kv_idx > 4, score, -math.inf), -math.inf))
    assert quire.Variant.parse(str(hidden)) == hidden
    same = [quire.Variant(f, scalars={"c": float}) for f in (lambda score, c: c * score, lambda score, c: c * score)]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert quire.Variant(lambda score, c: score * c, scalars={"c": float}) != same[0]
    for text in (
        "_score_ = __import__('os')\n",
        "_score_ = score.node\n",
        "x\n",
        "import os\n",
        "_score_ = (score+1)\n",
    ):
        with pytest.raises(quire.ValidationError, match="its text"):
            quire.Variant.parse(text)


#: Texts that would need a long time or much memory, or raise another error, if Python computed what they say.
HOSTILE = {
    "a long string": "_0 = 'x' * 3000000000\n_score_ = score\n",
    "long bytes": "_0 = b'x' * 3000000000\n_score_ = score\n",
    "products": "_0 = 99999999999\n" + "".join(f"_{i + 1} = (_{i} * _{i})\n" for i in range(40)) + "_score_ = score\n",
    "products of int32": "_0 = 9\n" + "".join(f"_{i + 1} = (_{i} * _{i})\n" for i in range(40)) + "_score_ = _40\n",
    "a shift": f"_score_ = (1 << {2**70})\n",
    "a shift of a shift": "_score_ = (1 << (1 << (1 << 30)))\n",
    "an integer": f"_score_ = (score + 0x{'f' * 5000})\n",
    "integer division": "_score_ = (1 // 0)\n",
    "a remainder": "_score_ = (1 % 0)\n",
    "a division": "_score_ = (1 / 0.0)\n",
    "a tensor's rank": "x: float32[99999999999]\n_score_ = tanh(score)\n",
    "parentheses": f"_score_ = {'-' * 100000}score\n",
    "a sum": f"_score_ = score{' + 1.0' * 40000}\n",
    "many lines": "_0 = 1\n" * 40000,
    "a long text": f"_score_ = {' ' * (1 << 18)}score\n",
    "nothing": "\n",
    "no text": "",
    "a null": "\0",
    "a surrogate": "_score_ = \udc80\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_texts_are_not_computed(name):
    """Manifests come from files: whatever their texts say, they are refused at once."""
    start = time.process_time()
    with pytest.raises(quire.ValidationError, match=r"variant: .*its text"):
        quire.Variant.parse(HOSTILE[name])
    assert time.process_time() - start < 10, "Python computed what the text says"


@pytest.mark.parametrize("text", [None, 3, b"_score_ = tanh(score)\n", ["_score_"]])
def test_texts_that_are_none(text):
    with pytest.raises(quire.ValidationError, match="variant: expected its text as a str"):
        quire.Variant.parse(text)


def test_texts_of_operations_of_constants():
    """A rewritten variant may compute with constants, and the identity changes nothing: both are read again."""
    for text in (
        "_score_ = (score * to_float(((0 * 3) - (-2))))\n",
        "_score_ = score\n",
        "_score_ = (score + (-inf))\n",
    ):
        assert str(quire.Variant.parse(text)) == text
    identity = quire.Variant(lambda score: score)
    assert quire.Variant.parse(str(identity)) == identity and not identity.has_score


def test_values_of_an_earlier_call_are_refused():
    kept = []

    def keeps(score):
        kept.append(score)
        return score * 2

    with pytest.raises(quire.ValidationError, match="changes 'kept'"):
        quire.Variant(keeps)
    for function in (lambda score: kept[0] * 2, lambda score: score + kept[0], lambda score: 1.0 - kept[0]):
        with pytest.raises(quire.ValidationError, match="kept from an earlier call"):
            quire.Variant(function)


def test_the_identity_is_no_variant_of_scores(device, backend):
    """A score that is returned as it is costs nothing: the bits are those of a call without a variant."""
    identity = quire.Variant(lambda score: score)
    assert not identity.has_score
    p = Problem((17,), (33,), num_qo_heads=HEADS, device=device, dtype=any_dtype(device), causal=True)
    plain, own = (
        quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=True, backend=backend, variant=variant)
        for variant in (None, identity)
    )
    assert torch.equal(plain, own)


def test_slugs(device):
    """A slug names a variant that the process knows, by its digest."""
    from quire.cli.aot import spec_of

    slug = f"attention_cpu.x86-64-v3.fp32-fp32-fp32.d64-64.ragged.causal-expr{variants.alibi.digest}.m16"
    spec = spec_of(slug)
    assert spec.slug == slug and dict(spec.fields)["expression"] == str(variants.alibi)
    with pytest.raises(quire.ValidationError, match="not known in this process"):
        spec_of(slug.replace(variants.alibi.digest, "0123456789abcdef"))


@pytest.mark.slow
def test_a_sealed_machine_needs_no_source(tmp_path):
    """What is recorded holds the text: another process builds it, and shows it, without the module that made it."""
    variant = quire.Variant(lambda score, head, gain: score * gain[head] + 0.25, tensors={"gain": torch.float32})
    p = Problem((2,), (9,))
    quire.jit.record(tmp_path / "used.jsonl")
    try:
        quire.single_prefill_with_kv_cache(p.q, p.k, p.v, variant=variant, gain=torch.ones(4))
    finally:
        quire.jit.record(None)
    environment = {**os.environ, "QUIRE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "quire", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    listed = call("warmup", "--manifest", str(tmp_path / "used.jsonl"), "--dry-run")
    assert f"expr{variant.digest}" in listed
    slug = next(line.split()[-1] for line in listed.splitlines() if variant.digest in line)
    (tmp_path / "one.jsonl").write_text(json.dumps({"slug": slug, "expression": str(variant)}) + "\n")
    assert "built" in call("warmup", "--manifest", str(tmp_path / "one.jsonl"))
    assert "(score * gain[head])" in call("cache", "list")
    assert "removed 0 entries" in call("cache", "prune"), "it is current, although its module is not imported"


@pytest.mark.slow
def test_warmup_of_a_module(capsys):
    command = [sys.executable, "-m", "quire", "warmup", "--dry-run", "--backend", "cpu", "--variant"]
    done = subprocess.run([*command, "quire.variants:alibi"], capture_output=True, text=True, check=True)
    assert f"expr{variants.alibi.digest}" in done.stdout
    for name in ("quire.variants:nothing", "nowhere:x", "quire.variants:sigmoid_output", "quire"):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command[3:], name])
        assert ended.value.code == 2 and "--variant: expected" in capsys.readouterr().err


@pytest.mark.part(0, 2)
@pytest.mark.parametrize("name", ["alibi", "document_mask"])
@pytest.mark.slow
def test_pod(name, device):
    """A variant is for the prefill and for the decodes, each with its own operands."""
    case, dtype = CASES[name], any_dtype(device)
    p = Problem((20,), (50,), num_qo_heads=HEADS, device=device, dtype=dtype, causal=True)
    d = Problem((1, 1, 1), (40, 3, 25), num_qo_heads=HEADS, device=device, dtype=dtype)
    of_plan, of_run = case.on(device)
    cache = d.paged(16)
    wrapper = quire.PODWithPagedKVCacheWrapper(workspace(device), variant=case.variant)
    wrapper.plan(*cache.tables(), HEADS, 2, p.head_dim, 16, q_data_type=dtype, **of_plan)
    operands = {"operands_p": {**of_plan, **of_run}, "operands_d": of_run}
    prefilled, decoded = wrapper.run(
        p.q, p.k, p.v, d.q, cache.kv, causal_p=True, return_lse_p=True, return_lse_d=True, **operands
    )
    check(p, case, prefilled)
    check(d, case, decoded)


@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "document_mask"])
def test_batch_pod(name, device):
    case, dtype = CASES[name], any_dtype(device)
    p = problem(device, causal=True)
    d = Problem((1, 1, 1), (40, 3, 25), num_qo_heads=HEADS, device=device, dtype=dtype)
    of_plan, of_run = case.on(device)
    caches = p.paged(16), d.paged(16)
    wrapper = quire.BatchPODWithPagedKVCacheWrapper(workspace(device), variant=case.variant)
    tables = [(ints(x.qo_indptr, device), *c.tables()) for x, c in zip((p, d), caches, strict=True)]
    wrapper.plan(
        *tables[0], *tables[1], HEADS, 2, p.head_dim, 16, q_data_type=dtype, operands_p=of_plan, operands_d=of_plan
    )
    prefilled, decoded = wrapper.run(
        p.q, caches[0].kv, d.q, caches[1].kv, causal_p=True, return_lse=True, operands_p=of_run, operands_d=of_run
    )
    check(p, case, prefilled)
    check(d, case, decoded)


def test_forward(device, backend):
    """forward() takes what run() takes."""
    case, p = CASES["alibi"], problem(device, causal=True)
    operands = case.on(device)[1]
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_ragged(wrapper, p)
    check(p, case, wrapper.forward_return_lse(p.q, p.k, p.v, causal=True, **operands))
    cache = p.paged(16)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), backend=backend, variant=case.variant)
    plan_paged(wrapper, p, cache)
    check(p, case, wrapper.forward_return_lse(p.q, cache.kv, causal=True, **operands))
    with pytest.raises(TypeError, match="cap"):
        wrapper.forward(p.q, cache.kv, causal=True, **operands, cap=1.0)
