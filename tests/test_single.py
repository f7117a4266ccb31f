"""One request: prefill and decode without a plan."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from problems import Problem, poisoned

HEAD_DIMS = (32, 64, 80, 128, 256)


def single(problem, backend, **more):
    """single_prefill_with_kv_cache with the options of a problem, o and lse."""
    options = {"causal": problem.causal, "sm_scale": problem.sm_scale, "window_left": problem.window_left}
    options |= {"logits_soft_cap": problem.soft_cap, "backend": backend, "return_lse": True, **more}
    k, v = options.pop("kv", (problem.k, problem.v))
    return quire.single_prefill_with_kv_cache(problem.q, k, v, **options)


@pytest.mark.parametrize(
    ("qo_len", "kv_len"), [(1, 1), (7, 7), (5, 130), (130, 130), (20, 6), (3, 0), (0, 4), (2, 3000)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_lengths(device, backend, dtype, causal, qo_len, kv_len):
    p = Problem((qo_len,), (kv_len,), dtype=dtype, device=device, causal=causal)
    p.check(*single(p, backend))


@pytest.mark.first(2)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_head_dims(device, backend, dtype, head_dim):
    p = Problem((20,), (33,), head_dim=head_dim, dtype=dtype, device=device, causal=True).within_tiles(backend)
    p.check(*single(p, backend))


@pytest.mark.one_type
def test_prefill_values_narrower_than_keys(device, backend, dtype):
    p = Problem((20,), (33,), head_dim=192, head_dim_vo=128, dtype=dtype, device=device, causal=True)
    p = p.within_tiles(backend)
    p.check(*single(p, backend))


@pytest.mark.parametrize("scale", [1e5, 1e10, 1e30])
def test_prefill_with_huge_logits_on_the_cpu(dtype, scale):
    """A row is the value of its greatest logit, however that is rounded."""
    p = Problem((20,), (300,), dtype=dtype, device="cpu", causal=True, sm_scale=scale)
    o, _ = single(p, "auto")
    group = p.q.shape[1] // p.k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", p.q.double(), p.k.double().repeat_interleave(group, 1))
    hidden = torch.arange(300)[None] > torch.arange(20)[:, None] + 280
    keys = logits.masked_fill(hidden, -math.inf).argmax(2)
    want = torch.stack([p.v[keys[head], head // group] for head in range(p.q.shape[1])], 1)
    torch.testing.assert_close(o, want)


@pytest.mark.parametrize("qo_len", [1, 30])
def test_as_many_keys_as_an_int_counts(qo_len):
    """Keys without memory of their own; the window is inside the last KV tile, whose end is no int."""
    num_keys, num_seen = 2**31 - 1, 11
    q, k, v = torch.randn(1, 1, 32), torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    o, lse = quire.single_prefill_with_kv_cache_return_lse(
        q.expand(qo_len, 1, 32), k.expand(num_keys, 1, 32), v.expand(num_keys, 1, 32),
        causal=True, window_left=num_seen - 1,
    )  # fmt: skip
    score = (q * k).sum() / math.sqrt(32)
    torch.testing.assert_close(o, v.expand(qo_len, 1, 32))
    torch.testing.assert_close(lse, (score * math.log2(math.e) + math.log2(num_seen)).expand(qo_len, 1))


def test_prefill_layouts(device, backend, dtype):
    """HND is [num_kv_heads, kv_len, head_dim]; both may be views."""
    p = Problem((20,), (33,), dtype=dtype, device=device, causal=True)
    want = single(p, backend)
    for kv in [
        (p.k.transpose(0, 1), p.v.transpose(0, 1)),
        (p.k.transpose(0, 1).contiguous(), p.v.transpose(0, 1).contiguous()),
    ]:
        got = single(p, backend, kv=kv, kv_layout="HND")
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    wide = poisoned((40, 9, 64), dtype, device)
    wide[4:37, 5:7] = p.k
    assert torch.equal(single(p, backend, kv=(wide[4:37, 5:7], p.v))[0], want[0])
    p.check(*want)


@pytest.mark.parametrize("window_left", [-1, 6])
def test_prefill_custom_mask(device, backend, dtype, window_left):
    """custom_mask is bool [qo_len, kv_len]; packed_custom_mask holds the same bits, low bit first."""
    p = Problem((13,), (37,), dtype=dtype, device=device, window_left=window_left).random_mask()
    got = single(p, backend, custom_mask=p.mask.reshape(13, 37))
    p.check(*got)
    packed = single(p, backend, packed_custom_mask=p.packed_mask())
    assert torch.equal(packed[0], got[0]) and torch.equal(packed[1], got[1])
    both = single(p, backend, custom_mask=p.mask.reshape(13, 37), causal=True)
    assert torch.equal(both[0], got[0])


def test_prefill_window_soft_cap_scale(device, backend, dtype):
    p = Problem((20,), (90,), dtype=dtype, device=device, causal=True, window_left=30, soft_cap=3.0, sm_scale=0.3)
    p.check(*single(p, backend))


def test_prefill_scales(device, backend, dtype):
    """k_scale goes into the logits, v_scale multiplies the output."""
    p = Problem((20,), (33,), dtype=dtype, device=device, causal=True)
    got = single(p, backend, k_scale=0.5, v_scale=2.0)
    p.sm_scale = 0.5 / math.sqrt(p.head_dim)
    p.check(*got, v_scale=2.0)


def test_prefill_returns(device, backend, dtype):
    p = Problem((20,), (33,), dtype=dtype, device=device)
    out, lse = single(p, backend)
    assert torch.equal(quire.single_prefill_with_kv_cache(p.q, p.k, p.v, backend=backend), out)
    pair = quire.single_prefill_with_kv_cache_return_lse(p.q, p.k, p.v, backend=backend)
    assert torch.equal(pair[0], out) and torch.equal(pair[1], lse)
    assert torch.equal(
        quire.single_prefill_with_kv_cache(p.q, p.k, p.v, use_fp16_qk_reduction=False, backend=backend), out
    )


@pytest.mark.parametrize("kv_len", [0, 1, 17, 128, 5000])
def test_decode_lengths(device, backend, dtype, kv_len):
    p = Problem((1,), (kv_len,), num_qo_heads=8, dtype=dtype, device=device)
    out, lse = quire.single_decode_with_kv_cache(p.q[0], p.k, p.v, return_lse=True, backend=backend)
    assert out.shape == (8, 64) and lse.shape == (8,)
    p.check(out[None], lse[None])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("group_size", [1, 3, 4, 8, 16])
def test_decode_groups_and_layouts(device, backend, dtype, group_size, kv_layout):
    p = Problem((1,), (77,), num_qo_heads=2 * group_size, dtype=dtype, device=device)
    k, v = (p.k, p.v) if kv_layout == "NHD" else (p.k.transpose(0, 1), p.v.transpose(0, 1))
    p.check(quire.single_decode_with_kv_cache(p.q[0], k, v, kv_layout, backend=backend)[None])


def test_decode_options(device, backend, dtype):
    p = Problem((1,), (77,), dtype=dtype, device=device, window_left=20, soft_cap=3.0)
    options = {"window_left": 20, "logits_soft_cap": 3.0, "use_tensor_cores": True, "backend": backend}
    p.sm_scale = 0.3 * 0.5 * 1.5
    out = quire.single_decode_with_kv_cache(
        p.q[0], p.k, p.v, sm_scale=0.3, q_scale=0.5, k_scale=1.5, v_scale=2.0, **options
    )
    p.check(out[None], v_scale=2.0)


# A backend for few rows refuses most examples: others are drawn.
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    qo_len=st.integers(0, 150),
    kv_len=st.integers(0, 400),
    causal=st.booleans(),
    window_left=st.sampled_from([-1, 0, 17]),
    seed=st.integers(0, 1 << 30),
)
def test_any_prefill(device, backend, dtype, qo_len, kv_len, causal, window_left, seed):
    p = Problem((qo_len,), (kv_len,), dtype=dtype, device=device, causal=causal, window_left=window_left, seed=seed)
    p = p.within_tiles(backend)
    p.check(*single(p, backend))


def test_the_oracle_agrees_with_torch():
    """The specification itself, against scaled_dot_product_attention in float64."""
    p = Problem((9,), (31,), num_qo_heads=6, num_kv_heads=3, causal=True, window_left=12)
    q, k, v = (t.double().transpose(0, 1) for t in (p.q, p.k, p.v))
    seen = oracle.visible(9, 31, causal=True, window_left=12)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert torch.allclose(p.expected().o, want.transpose(0, 1), rtol=1e-12, atol=1e-12)


def test_the_comparison_notices():
    """One key too many, one too few, a NaN and a wrong lse are all found."""
    p = Problem((9, 1), (31, 400), dtype=torch.bfloat16, causal=True)
    truth = p.expected()
    p.check(truth.o.bfloat16(), truth.lse.float())
    for wrong in (p.expected(window_left=29).o, p.expected(causal=False).o, torch.full_like(truth.o, math.nan)):
        with pytest.raises(AssertionError):
            p.check(wrong.bfloat16())
    with pytest.raises(AssertionError):
        p.check(truth.o.bfloat16(), truth.lse.float() + 1e-3)
