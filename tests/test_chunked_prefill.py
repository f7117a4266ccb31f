"""New tokens over a prefix and over themselves, against attention over both at once."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch

import oracle
import quire
from problems import Problem, ints, poisoned, workspace

PREFIX_LENS, NEW_LENS = (300, 0, 1, 700, 129, 64), (37, 201, 128, 5, 1, 0)


def split(p: Problem, prefix_lens, kv_layout="NHD"):
    """k, v, k_prefix, v_prefix of a problem whose requests begin with their prefixes: views of tensors that are wider
    and longer, NaN elsewhere.
    """
    parts = []
    for own in (True, False):
        rows = []
        for (begin, end), prefix in zip(pairwise(p.kv_indptr), prefix_lens, strict=True):
            rows += range(begin + prefix, end) if own else range(begin, begin + prefix)
        for tensor in (p.k, p.v):
            wide = poisoned((len(rows) + 130, tensor.shape[1], tensor.shape[2] + 64), tensor.dtype, p.device)
            wide[: len(rows), :, : tensor.shape[2]] = tensor[rows]
            wide = wide.transpose(0, 1).contiguous().transpose(0, 1) if kv_layout == "HND" else wide
            part = wide[: len(rows), :, : tensor.shape[2]]
            parts.append(part.transpose(0, 1) if kv_layout == "HND" else part)
    return parts


def planned(p: Problem, prefix_lens, backend="auto", memory=None, kv_layout="NHD", **more):
    memory = workspace(p.device) if memory is None else memory
    wrapper = quire.BatchPrefillWithPrefixWrapper(memory, kv_layout, backend=backend)
    qo, prefix = (ints(oracle.indptr_of(lens), "cpu") for lens in (p.qo_lens, prefix_lens))
    options = {"causal": p.causal, "q_data_type": p.dtype, "sm_scale": p.sm_scale, "kv_data_type": p.k.dtype}
    wrapper.plan(qo, prefix, p.num_qo_heads, p.num_kv_heads, p.head_dim, p.head_dim_vo, **options | more)
    return wrapper


def problem(device, dtype, prefix_lens=PREFIX_LENS, new_lens=NEW_LENS, **more):
    kv_lens = [a + b for a, b in zip(prefix_lens, new_lens, strict=True)]
    return Problem(new_lens, kv_lens, dtype=dtype, device=device, **{"causal": True} | more)


def is_one_launch(wrapper, backend):
    """Which it must be but where another kernel is pinned."""
    told = str(wrapper.explain())
    if "has to be pinned" in told or backend in ("quire:fa2", "quire:decode"):
        pytest.skip("other kernels find all keys in one place")
    return "-cascade-prefix" in told and not re.search("launch of its own", told)


@pytest.mark.each_value
@pytest.mark.first(2)
@pytest.mark.parametrize(("heads", "dims"), [((4, 4), (192, 128)), ((6, 2), (64, 64))])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_prefix_and_new_tokens(device, backend, dtype, heads, dims, causal, kv_layout):
    """Empty prefixes, requests without new tokens, KV tiles that end within; the lse is that of all keys."""
    more = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dims[0], "head_dim_vo": dims[1]}
    p = problem(device, dtype, causal=causal, **more)
    wrapper, tensors = planned(p, PREFIX_LENS, backend, kv_layout=kv_layout), split(p, PREFIX_LENS, kv_layout)
    out, lse = poisoned((*p.q.shape[:2], dims[1]), dtype, device), poisoned(p.q.shape[:2], torch.float32, device)
    result = wrapper.run(p.q, *tensors, out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    p.check(out, lse)
    assert torch.equal(wrapper.run(p.q, *tensors), out)
    assert is_one_launch(wrapper, backend), wrapper.explain()


@pytest.mark.parametrize("prefix_lens", [(0, 0), (3000, 1)])
def test_chunks(device, backend, prefix_lens):
    """One prefix for many row tiles, and none at all; sinks and scales once."""
    p = problem(device, torch.float16, prefix_lens, (450, 3), head_dim=128, sm_scale=0.05)
    sinks = torch.randn(p.num_qo_heads)
    wrapper, tensors = planned(p, prefix_lens, backend, sm_scale=0.1), split(p, prefix_lens)
    p.check(wrapper.run(p.q, *tensors, sinks=sinks.to(device), q_scale=0.25, k_scale=2.0), sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("chooses", [True, False])
def test_row_tiles_dealt_out_in_turn(device, chooses):
    """So many row tiles of equal length over a prefix that in one launch each CTA has whole ones of several KV heads;
    `auto` makes two launches of that on a GPU.
    """
    new_lens = (1000,) if device != "cpu" else (250,)  # of which a CPU has fewer threads than row tiles, too
    p = problem(device, torch.float16, (130,), new_lens, num_qo_heads=33, num_kv_heads=33, head_dim=64)
    backend = "auto" if chooses or device == "cpu" else "quire:fa3"
    wrapper, tensors = planned(p, (130,), backend), split(p, (130,))
    result = wrapper.run(p.q, *tensors, return_lse=True)
    p.check(*result)
    assert torch.equal(wrapper.run(p.q, *tensors), result[0])
    assert is_one_launch(wrapper, backend) == (not chooses or device == "cpu"), wrapper.explain()


@pytest.mark.slow
def test_a_small_workspace_takes_two_launches(device, backend):
    p = problem(device, torch.float16)
    wrapper = planned(p, PREFIX_LENS, backend, torch.empty(4096, dtype=torch.uint8, device=device))
    p.check(*wrapper.run(p.q, *split(p, PREFIX_LENS), return_lse=True))
    assert "the prefix is a launch of its own, and merged" in str(wrapper.explain())


@pytest.mark.parametrize("is_one", [True, False])
def test_a_scale_of_values_multiplies_the_merged_result(device, is_one):
    """The results of both launches times it are beyond float16 and of either sign where the merged result is not."""
    p = problem(device, torch.float16)
    wrapper = planned(p, PREFIX_LENS, memory=None if is_one else torch.empty(4096, dtype=torch.uint8, device=device))
    for v_scale in (2e5, -2e5, 1e30, 1e-5):
        result = wrapper.run(p.q, *split(p, PREFIX_LENS), return_lse=True, v_scale=v_scale)
        p.check(*result, v_scale=v_scale)
        assert result[0].isinf().any() == (abs(v_scale) > 1)
    told = str(wrapper.explain())  # before Hopper a kernel that does both at once has to be pinned
    assert ("launch of its own" in told) == (not is_one or "has to be pinned" in told)


@pytest.mark.slow
@pytest.mark.parametrize("is_one", [True, False])
def test_queries_keys_and_prefixes_of_8_bits(device, is_one):
    """Queries are converted, and keys and values of a prefix stay as they are; scales of heads multiply both sets."""
    p = problem(device, torch.float16, num_qo_heads=4, num_kv_heads=2)
    q, k, v = (t.to(torch.float8_e4m3fn) for t in (p.q, p.k, p.v))
    p.q, p.k, p.v = (t.to(p.dtype) for t in (q, k, v))
    tensors = [part.to(torch.float8_e4m3fn) for part in split(p, PREFIX_LENS)]
    memory = None if is_one else torch.empty(4096, dtype=torch.uint8, device=device)
    types = {"q_data_type": torch.float8_e4m3fn, "kv_data_type": torch.float8_e4m3fn, "o_data_type": p.dtype}
    wrapper = planned(p, PREFIX_LENS, memory=memory, **types)
    p.check(*wrapper.run(q, *tensors, return_lse=True, v_scale=2.0), v_scale=2.0)
    # No kernel for GPUs has 8-bit keys and a prefix in one launch.
    assert ("launch of its own" in str(wrapper.explain())) == (not is_one or device != "cpu")
    scales = torch.tensor([3.0, -2e5], device=device)
    result, truth = wrapper.run(q, *tensors, v_scale=scales), p.expected()
    by_head = scales.cpu().double().repeat_interleave(2)[:, None]
    oracle.assert_close(result, truth.o * by_head, p.torch_error() * by_head, p.qo_indptr)
    assert not result[:, :2].isinf().any() and result[:, 2:].isinf().any() and result[:, 2:].isfinite().any()
    with pytest.raises(quire.ValidationError, match=r"v_scale: expected (one|a) number"):
        planned(p, PREFIX_LENS, memory=memory, kv_data_type=torch.float8_e4m3fn).run(p.q, *tensors, v_scale=scales)


def test_a_variant_that_cannot_be_had_is_not_needed(device, monkeypatch):
    """A process that compiles nothing may have the variants of both parts alone."""
    monkeypatch.setattr("quire.engine.joined.is_obtainable", lambda _: False)
    p = problem(device, torch.float16)
    wrapper = planned(p, PREFIX_LENS)
    p.check(wrapper.run(p.q, *split(p, PREFIX_LENS)))
    assert re.search("launch of its own, and merged: .*(is in no cache|has to be pinned)", str(wrapper.explain()))


def test_no_queries(device, backend):
    p = problem(device, torch.float16, (5, 3), (0, 0))
    out = planned(p, (5, 3), backend).run(p.q, *split(p, (5, 3)))
    assert out.shape == p.q.shape


def test_arguments_are_checked_by_name(device):
    p = problem(device, torch.float16)
    wrapper, tensors = planned(p, PREFIX_LENS), split(p, PREFIX_LENS)
    with pytest.raises(quire.ValidationError, match="prefix_indptr: expected ascending"):
        planned(p, [-n for n in PREFIX_LENS])
    for at, wrong, message in (
        (2, tensors[2][:-1], r"k_prefix: expected at least 1194 tokens|k: expected at least 1194"),
        (3, tensors[3][..., :32], "v_prefix: expected|v: expected"),
        (2, tensors[2].float(), "k_prefix: expected dtype|k: expected dtype"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            wrapper.run(p.q, *tensors[:at], wrong, *tensors[at + 1 :])
