"""Position encodings inside attention, against the oracle: ALiBi."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
import quire
from calls import decode, prefill_paged, prefill_ragged
from problems import Problem

MODES = ("ALIBI",)
#: Requests of every sort: append, decode-like, empty, square, one key, no key, more queries than keys.
QO_LENS = (5, 1, 0, 17, 1, 3, 9)
KV_LENS = (37, 130, 4, 17, 1, 0, 4)
#: (query heads, key heads): powers of two and others.
HEADS = ((4, 2), (6, 2), (12, 3), (5, 5), (20, 4), (1, 1), (40, 5))


def largest_bias(p):
    """In base 2: what float32 rounds an lse of ALiBi relatively to."""
    return max((abs(k - q) + k for q, k in zip(p.qo_lens, p.kv_lens, strict=True)), default=0) * math.log2(math.e)


def check(p, out, lse):
    """As Problem.check, for logits that a bias makes as large as the sequence is long."""
    truth = p.expected()
    oracle.assert_close(out, truth.o, p.torch_error(), p.qo_indptr)
    oracle.assert_lse_close(lse, truth.lse, magnitude=p._largest_logit() + largest_bias(p), soft_cap=p.soft_cap)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window_left", [-1, 7])
@pytest.mark.parametrize("mask", ["none", "causal", "custom"])
def test_masks(device, backend, dtype, mode, mask, window_left, soft_cap):
    p = Problem(QO_LENS, KV_LENS, 6, 2, dtype=dtype, device=device, window_left=window_left, soft_cap=soft_cap)
    p.causal, p.pos_encoding_mode = mask == "causal", mode
    if mask == "custom":
        p.random_mask()
    check(p, *prefill_paged(p, p.paged(8), backend))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(device, backend, dtype, mode, heads):
    """Slopes of head counts that are no powers of two, and rows of several tiles."""
    p = Problem((70, 3, 1), (150, 300, 65), *heads, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    check(p, *prefill_ragged(p, backend))


@pytest.mark.parametrize("mode", MODES)
def test_long_positions(device, backend, dtype, mode):
    """A bias of 131,072 tokens leaves no float32 digit for a logit: distances are counted from the query."""
    p = Problem((3,), (131072,), 2, 1, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    check(p, *prefill_ragged(p, backend))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_decode(device, backend, dtype, mode, head_dim):
    p = Problem((1,) * 5, (1, 0, 64, 1000, 77), 12, 2, head_dim, dtype=dtype, device=device, pos_encoding_mode=mode)
    check(p, *decode(p, p.paged(16), backend))


@pytest.mark.parametrize("mode", MODES)
def test_single_calls(device, backend, dtype, mode):
    p = Problem((9,), (40,), 6, 2, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    options = {"pos_encoding_mode": mode, "backend": backend, "return_lse": True}
    check(p, *quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=True, **options))
    p = Problem((1,), (300,), 6, 2, dtype=dtype, device=device, pos_encoding_mode=mode)
    out, lse = quire.single_decode_with_kv_cache(p.q[0], p.k, p.v, **options)
    check(p, out[None], lse[None])


@pytest.mark.parametrize("mode", MODES)
def test_queries_at_the_end_of_keys_are_the_last_of_all(device, backend, dtype, mode):
    """The last rows of a prompt, computed alone, are those of the whole prompt: where a query stands counts."""
    whole = Problem((90,), (90,), 6, 2, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    tail = Problem((7,), (90,), 6, 2, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    tail.q, tail.k, tail.v = whole.q[-7:], whole.k, whole.v
    check(tail, prefill_ragged(tail, backend)[0], tail_lse := prefill_ragged(tail, backend)[1])
    assert torch.isfinite(tail_lse).all()
    truth = whole.expected().o[-7:]
    oracle.assert_close(prefill_ragged(tail, backend)[0], truth, whole.torch_error()[-7:])
