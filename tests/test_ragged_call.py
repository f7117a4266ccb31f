"""trtllm_ragged_attention_deepseek(): prefill of ragged queries, keys and values in one call, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quire
from problems import Problem, ints, workspace

QO_LENS, KV_LENS = (3, 1, 20), (40, 7, 65)


def problem(device: str, dtype: torch.dtype, heads: int = 4, **more: Any) -> Problem:
    dims = {"head_dim": 192, "head_dim_vo": 128, "sm_scale": 0.07, "causal": True}
    return Problem(QO_LENS, KV_LENS, heads, heads, dtype=dtype, device=device, **{**dims, **more})


def arguments(p: Problem, **more: Any) -> dict[str, Any]:
    return {
        "query": p.q, "key": p.k, "value": p.v, "workspace_buffer": workspace(p.device),
        "seq_lens": ints(p.kv_lens, p.device), "max_q_len": 20, "max_kv_len": 65, "bmm1_scale": p.sm_scale,
        "bmm2_scale": 1.0, "o_sf_scale": -1.0, "batch_size": 3, "window_left": p.window_left,
        "cum_seq_lens_q": ints(p.qo_indptr, p.device), "cum_seq_lens_kv": ints(p.kv_indptr, p.device),
        "enable_pdl": None, "is_causal": p.causal, "return_lse": True, **more,
    }  # fmt: skip


def attend(p: Problem, **more: Any) -> Any:
    return quire.prefill.trtllm_ragged_attention_deepseek(**arguments(p, **more))


def test_results(device, dtype):
    p = problem(device, dtype)
    p.check(
        *attend(p, use_fp16_softmax=True, q_seq_lens_cpu=ints(QO_LENS, "cpu"), kv_seq_lens_cpu=ints(KV_LENS, "cpu"))
    )
    p.check(attend(p, return_lse=False, bmm2_scale=0.5), v_scale=0.5)
    out, lse = torch.empty(len(p.q), 4, 128, dtype=dtype, device=device), torch.empty(len(p.q), 4, device=device)
    got = attend(p, out=out, lse=lse, skip_softmax_threshold_scale_factor=500.0)
    assert got[0] is out and got[1] is lse
    p.check(out, lse)
    scales = {"bmm1_scale": torch.tensor([p.sm_scale], device=device), "bmm2_scale": torch.ones(1, device=device)}
    p.check(*attend(p, **scales))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"causal": False}, {"window_left": 9}, {"head_dim": 128}], ids=str)
def test_options(device, dtype, options):
    p = problem(device, dtype, **options)
    sinks = torch.randn(4, device=device)
    o, _ = attend(p, attention_sinks=sinks, backend="auto")
    p.check(o, sinks=sinks)


def test_keys_that_are_views(device, dtype):
    """As sglang makes them: values are a slice of what the up-projection gives."""
    p = problem(device, dtype)
    both = torch.cat([p.k[..., :128], p.v], -1)
    p.check(*attend(p, value=both[..., 128:]))


@pytest.mark.slow
def test_queries_of_eight_bits(device):
    p = problem(device, torch.bfloat16)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (p.q, p.k, p.v))
    o, _ = attend(p, query=q, key=k, value=v)
    p.q, p.k, p.v = (x.bfloat16() for x in (q, k, v))
    assert o.dtype == torch.bfloat16
    p.check(o)


def test_wrong_arguments(device):
    p = problem(device, torch.bfloat16)
    ends = ints([0, 40, 47, 111], "cpu")
    host = {name: value.cpu() for name, value in arguments(p).items() if "seq_lens" in name}
    for change, message in (
        ({"seq_lens": ints(QO_LENS, "cpu")}, "cum_seq_lens_kv: expected the sums of seq_lens"),
        ({"cum_seq_lens_kv": ends}, "cum_seq_lens_kv: expected the sums"),
        ({"max_q_len": 19}, "max_q_len: expected at least 20"),
        ({"max_kv_len": 64}, "max_kv_len: expected at least 65"),
        ({"batch_size": 2}, "seq_lens: expected"),
        ({"query": p.q[1:]}, "query: expected"),
        ({"query": p.q[..., :128]}, "query: expected"),
        ({"value": p.v[1:]}, "value: expected"),
        ({"o_sf_scale": "none"}, "o_sf_scale: expected a number"),
        ({"is_causal": 1}, "is_causal: expected a bool"),
        ({"bmm1_scale": -1.0}, "bmm1_scale: expected a positive number"),
        ({"sage_attn_sfs": (torch.ones(1), None, None, None)}, "sage_attn_sfs: not supported"),
        ({"num_elts_per_sage_attn_blk": (1, 1, 1, 1)}, "num_elts_per_sage_attn_blk: not supported"),
        ({"uses_spcompress": True}, "uses_spcompress: not supported"),
        ({"use_fp16_softmax": 1}, "use_fp16_softmax: expected a bool"),
        ({"q_seq_lens_cpu": torch.tensor([3, 1, 19]).int()}, "q_seq_lens_cpu: expected .3, 1, 20., as the offsets say"),
        ({"kv_seq_lens_cpu": torch.ones(4).int()}, "kv_seq_lens_cpu: expected"),
        ({"out": torch.empty(24, 4, 192, device=device)}, "out: expected"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            attend(p, **host | change)
