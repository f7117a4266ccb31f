"""Position encodings inside attention, against the oracle: ALiBi and rotary embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import oracle
import quire
from calls import decode, decode_wrapper, plan_decode, plan_ragged, prefill_paged, prefill_ragged, ragged_wrapper
from problems import Problem, any_dtype, ints, workspace
from quire.kernels import KERNELS, AttentionKey
from quire.kernels.features import PosEncodingMode, dtype_of

MODES = ("ALIBI", "ROPE_LLAMA")
#: Requests of every sort: append, decode-like, empty, square, one key, no key, more queries than keys.
QO_LENS = (5, 1, 0, 17, 1, 3, 9)
KV_LENS = (37, 130, 4, 17, 1, 0, 4)
#: (query heads, key heads): powers of two and others.
HEADS = ((4, 2), (6, 2), (12, 3), (5, 5), (20, 4), (1, 1), (40, 5))


@pytest.mark.each_value
@pytest.mark.first(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("window_left", "soft_cap"), [(-1, None), (7, None), (-1, 5.0), pytest.param(7, 5.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mask", ["none", "causal", "custom"])
def test_positions_under_masks(device, backend, dtype, mode, mask, window_left, soft_cap):
    p = Problem(QO_LENS, KV_LENS, 6, 2, dtype=dtype, device=device, window_left=window_left, soft_cap=soft_cap)
    p.causal, p.pos_encoding_mode = mask == "causal", mode
    if mask == "custom":
        p.random_mask()
    p.check(*prefill_paged(p, p.paged(8), backend))


@pytest.mark.one_type
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.slow
def test_slopes_of_heads(device, backend, dtype, mode, heads):
    """Slopes of head counts that are no powers of two, and rows of several tiles."""
    p = Problem((70, 3, 1), (150, 300, 65), *heads, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    p.check(*prefill_ragged(p, backend))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 3, 12, 40, 71])
def test_slopes_that_a_variant_reads(device, backend, heads):
    """get_alibi_slopes() has the numbers that kernels compute."""
    slopes = quire.get_alibi_slopes(heads, device)
    assert slopes.dtype is torch.float32 and slopes.device.type == torch.device(device).type
    torch.testing.assert_close(slopes.cpu().double(), oracle.alibi_slopes(heads), rtol=1e-7, atol=0)
    types = {"dtype": any_dtype(device), "device": device}
    p = Problem((9,), (20,), heads, heads, **types, causal=True, pos_encoding_mode="ALIBI")
    options = {"causal": True, "backend": backend}
    p.check(quire.single_prefill_with_kv_cache(p.q, p.k, p.v, variant=quire.variants.alibi, slopes=slopes, **options))
    p.check(quire.single_prefill_with_kv_cache(p.q, p.k, p.v, pos_encoding_mode="ALIBI", **options))


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "8"])
def test_slopes_of_no_heads(wrong):
    with pytest.raises(quire.ValidationError, match=r"^n_heads: expected a positive integer"):
        quire.get_alibi_slopes(wrong)


@pytest.mark.one_type
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_long_positions(device, backend, dtype, mode):
    """A bias of 131,072 tokens leaves few float32 digits for a logit, and such an angle is 0.004 radians off."""
    p = Problem((3,), (131072,), 2, 1, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    p.check(*prefill_ragged(p, backend))


@pytest.mark.one_type
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
@pytest.mark.slow
def test_positions_in_decode(device, backend, dtype, mode, head_dim):
    p = Problem((1,) * 5, (1, 0, 64, 1000, 77), 12, 2, head_dim, dtype=dtype, device=device, pos_encoding_mode=mode)
    p.check(*decode(p, p.paged(16), backend))


@pytest.mark.one_type
@pytest.mark.parametrize("mode", MODES)
def test_positions_of_single_calls(device, backend, dtype, mode):
    p = Problem((9,), (40,), 6, 2, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    options = {"pos_encoding_mode": mode, "backend": backend, "return_lse": True}
    p.check(*quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=True, **options))
    p = Problem((1,), (300,), 6, 2, dtype=dtype, device=device, pos_encoding_mode=mode)
    out, lse = quire.single_decode_with_kv_cache(p.q[0], p.k, p.v, **options)
    p.check(out[None], lse[None])


@pytest.mark.one_type
@pytest.mark.parametrize("mode", MODES)
def test_queries_at_the_end_of_keys_are_the_last_of_all(device, backend, dtype, mode):
    """The last rows of a prompt, computed alone, are those of the whole prompt: where a query stands counts."""
    whole = Problem((90,), (90,), 6, 2, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    tail = Problem((7,), (90,), 6, 2, dtype=dtype, device=device, causal=True, pos_encoding_mode=mode)
    tail.q, tail.k, tail.v = whole.q[-7:], whole.k, whole.v
    tail.check(prefill_ragged(tail, backend)[0], tail_lse := prefill_ragged(tail, backend)[1])
    assert torch.isfinite(tail_lse).all()
    truth = whole.expected().o[-7:]
    oracle.assert_close(prefill_ragged(tail, backend)[0], truth, whole.torch_error()[-7:])


@pytest.mark.parametrize(("scale", "theta"), [(None, 5e5), (8.0, None), (0.5, 1e6)])
@pytest.mark.slow
def test_rope_scale_and_theta(device, backend, scale, theta):
    types = {"dtype": any_dtype(device), "device": device}
    p = Problem((9, 1), (40, 700), 6, 2, **types, causal=True, pos_encoding_mode="ROPE_LLAMA")
    p.rope_scale, p.rope_theta = scale, theta
    p.check(*prefill_ragged(p, backend))
    p.check(*prefill_paged(p, p.paged(8), backend))


@pytest.mark.one_type
@pytest.mark.first(1)
def test_rope_turns_what_is_seen(device, backend, dtype):
    """Of two equal keys one stands a quarter of a turn from the query: its logit is 0 instead of 1."""
    p = Problem((1,), (2,), 1, 1, 32, dtype=dtype, device=device, sm_scale=1 / 16, pos_encoding_mode="ROPE_LLAMA")
    p.q.zero_()
    p.k.zero_()
    p.q[0, 0, 0], p.k[:, 0, 0] = 4.0, 4.0
    p.rope_scale = 2 / math.pi  # the first pair turns by a quarter a token
    _, lse = prefill_ragged(p, backend)
    assert abs(float(lse) - math.log2(math.e + 1.0)) <= 1e-4


def test_rotated_keys_of_eight_bits(device, backend):
    stored = torch.float8_e4m3fn
    p = Problem((2, 1), (300, 65), 8, 2, 128, dtype=torch.bfloat16, kv_dtype=stored, device=device)
    p.pos_encoding_mode = "ROPE_LLAMA"
    p.check(*prefill_paged(p, p.paged(16), backend, plan={"kv_data_type": stored}))


@pytest.mark.one_type
@pytest.mark.parametrize("mode", MODES)
def test_plans_of_a_graph(device, backend, dtype, mode):
    """Lengths change under the parameters that the first plan() has fixed."""
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 3, 60)]
    wrapper = None
    for lens in ((300, 200, 100), (1, 90, 0), (16, 17, 300)):
        p = Problem((1,) * 3, lens, 6, 2, dtype=dtype, device=device, pos_encoding_mode=mode, seed=sum(lens))
        cache = p.paged(16)
        if wrapper is None:
            names = ("indptr", "last_page_len", "indices")
            named = {f"paged_kv_{name}_buffer": b for name, b in zip(names, buffers, strict=True)}
            wrapper = decode_wrapper(p, cache, backend, use_cuda_graph=True, **named)
        plan_decode(wrapper, p, cache)
        p.check(*wrapper.run(p.q, cache.kv, return_lse=True))


@pytest.mark.one_type
@pytest.mark.parametrize("mode", MODES)
def test_forward_takes_a_mode(device, backend, dtype, mode):
    p = Problem((9,), (40,), 6, 2, dtype=dtype, device=device, causal=True)
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p)
    p.pos_encoding_mode = mode
    out, lse = wrapper.forward(p.q, p.k, p.v, causal=True, pos_encoding_mode=mode, return_lse=True)
    p.check(out, lse)


def test_levels_do_not_know_where_their_keys_stand():
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD")
    arrays = [[ints(x, "cpu")] * 2 for x in ([0, 2], [0, 1], [0], [3])]
    with pytest.raises(quire.UnsupportedError, match="pos_encoding_mode"):
        wrapper.plan(*arrays, 4, 2, 64, 16, pos_encoding_mode="ALIBI")


def test_fa3_says_why_it_takes_no_rope():
    key = AttentionKey.parse("attention_fa3.sm90a.bf16-bf16-bf16.d128-128.ragged.causal.m128")
    problem = replace(key.problem(), pos_encoding=PosEncodingMode.ROPE_LLAMA)
    reasons = {kernel.backend: kernel.refusal(problem) for kernel in KERNELS if kernel.is_for(problem)}
    assert "rotate" in reasons["fa3"] and reasons["fa2"] is None
    narrow = replace(problem, kv=dtype_of("float8_e4m3fn", "kv"), head_dim_qk=80, rows=1)
    assert "multiple of 32" in next(k for k in KERNELS if k.backend == "decode").refusal(narrow)
