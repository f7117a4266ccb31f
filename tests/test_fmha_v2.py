"""trtllm_fmha_v2_prefill(): five layouts of queries, keys and values, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch

import quire
from problems import Problem, block_tables, ints, workspace

PAGED = {"Q_PAGED_KV_NHD": "NHD", "Q_PAGED_KV_HND": "HND"}
LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", *PAGED)
QO_LENS, KV_LENS = (3, 1, 20), (40, 7, 65)


def problem(device, dtype, input_layout, **more):
    """Packed layouts have as many queries as keys, and as many heads."""
    packed = input_layout == "PACKED_QKV"
    heads = {"num_qo_heads": 2} if packed else {}
    return Problem(KV_LENS if packed else QO_LENS, KV_LENS, dtype=dtype, device=device, causal=True, **heads, **more)


def arguments(p, input_layout):
    """qkv and block_tables of a problem."""
    if input_layout == "PACKED_QKV":
        return torch.stack([p.q, p.k, p.v], 1), None
    if input_layout == "CONTIGUOUS_Q_KV":
        return (p.q, torch.stack([p.k, p.v], 1)), None
    if input_layout == "SEPARATE_Q_K_V":
        return (p.q, p.k, p.v), None
    cache = p.paged(16, PAGED[input_layout], "tensor")
    return (p.q, cache.kv), block_tables(cache)


def attend(p, input_layout, *, given=None, bmm2_scale=1.0, **more):
    """The call on a problem."""
    qkv, tables = given or arguments(p, input_layout)
    scale = p.k_scale * (p.head_dim**-0.5 if p.sm_scale is None else p.sm_scale)
    options = {"block_tables": tables, "logits_soft_cap_scale": p.soft_cap, **more}
    return quire.prefill.trtllm_fmha_v2_prefill(
        qkv, input_layout, workspace(p.device), ints(p.kv_lens, p.device), 65, 65, scale, p.v_scale * bmm2_scale, 3,
        ints(p.qo_indptr, p.device), ints(p.kv_indptr, p.device), **options,
    )  # fmt: skip


@pytest.mark.parametrize("input_layout", LAYOUTS)
def test_layouts(device, dtype, input_layout):
    p = problem(device, dtype, input_layout, sm_scale=0.2)
    p.check(attend(p, input_layout))
    p.check(attend(p, input_layout, bmm2_scale=0.5), v_scale=0.5)
    out, sinks = torch.empty_like(p.q), torch.randn(p.num_qo_heads, device=device)
    assert attend(p, input_layout, out=out, sinks=[sinks]).data_ptr() == out.data_ptr()
    p.check(out, sinks=sinks)


@pytest.mark.parametrize("input_layout", ["CONTIGUOUS_Q_KV", "Q_PAGED_KV_HND"])
@pytest.mark.parametrize(("mask", "options"), [
    ({"window_left": 12}, {"mask_mode": "SLIDING_WINDOW", "window_left": 12}),
    ({"attention_chunk_size": 16}, {"mask_mode": "chunked", "chunked_attention_size": 16}),
    ({"causal": False}, {"mask_mode": "padding"}),
    ({"soft_cap": 3.0}, {}),
    ({"pos_encoding_mode": "ALIBI"}, {"pos_encoding_mode": "alibi", "skip_softmax_threshold_scale_factor": 500.0}),
])  # fmt: skip
def test_masks_and_logits(device, dtype, input_layout, mask, options):
    p = problem(device, dtype, input_layout)
    for name, value in mask.items():
        setattr(p, name, value)
    p.check(attend(p, input_layout, **options))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_statistics(device, dtype, soft_cap):
    """A maximum in units of the head dim, and a sum."""
    p = problem(device, dtype, "SEPARATE_Q_K_V", sm_scale=0.2, soft_cap=soft_cap)
    out, stats = attend(p, "SEPARATE_Q_K_V", save_softmax_stats=True)
    unit = math.sqrt(p.head_dim) * (1.0 if soft_cap else 0.2)
    p.check(out, (stats[..., 0] * unit + stats[..., 1].log()) / math.log(2))


@pytest.mark.slow
@pytest.mark.parametrize("o_dtype", [None, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("input_layout", ["CONTIGUOUS_Q_KV", "Q_PAGED_KV_NHD"])
def test_queries_of_eight_bits(device, input_layout, o_dtype):
    e4m3 = torch.float8_e4m3fn
    p = problem(device, torch.bfloat16, input_layout, kv_dtype=e4m3, k_scale=0.5, v_scale=2.0)
    qkv, tables = arguments(p, input_layout) if input_layout in PAGED else ((p.q, torch.stack([p.k, p.v], 1)), None)
    queries = p.q.to(e4m3)
    p.q = queries.bfloat16()
    out = attend(p, input_layout, given=((queries, qkv[1]), tables), out_dtype=o_dtype)
    assert out.dtype == (o_dtype or torch.bfloat16)
    if o_dtype is None:
        p.check(out)
    rounded = 0.07 if o_dtype is e4m3 else 0.01
    torch.testing.assert_close(out.double().cpu(), p.expected().o, atol=rounded, rtol=rounded)


@pytest.mark.parametrize("input_layout", PAGED)
def test_pages_of_keys_and_values_apart(device, dtype, input_layout):
    """Both in one allocation, numbered from the first of keys."""
    p = problem(device, dtype, input_layout)
    (q, cache), tables = arguments(p, input_layout)
    halves = torch.stack([cache[:, 0], cache[:, 1]])
    both = torch.stack([tables, tables + cache.shape[0]], 1)
    p.check(attend(p, input_layout, given=((q, (halves[0], halves[1])), both)))
    both[0, 1, 0] += 1
    with pytest.raises(quire.UnsupportedError, match="block_tables: expected the page of values"):
        attend(p, input_layout, given=((q, (halves[0], halves[1])), both))


WRONG = {
    "layout": ({"input_layout": "QKV"}, "input_layout: expected one of"),
    "parts": ({"qkv": torch.zeros(3)}, "qkv: expected 3 parts"),
    "packed": ({"qkv": torch.zeros(5, 2, 4, 64), "input_layout": "PACKED_QKV"}, "qkv: expected .tokens, 3"),
    "tables": ({"block_tables": torch.zeros(3, 4).int()}, "block_tables: expected None with SEPARATE_Q_K_V"),
    "no tables": ({"input_layout": "Q_PAGED_KV_NHD"}, "block_tables: expected it"),
    "mask": ({"mask_mode": "dense"}, "mask_mode: expected one of"),
    "window": ({"window_left": 5}, "window_left: expected it with mask_mode='sliding_window' alone"),
    "chunk": ({"chunked_attention_size": 16}, "chunked_attention_size: expected it with"),
    "no chunk": ({"mask_mode": "chunked"}, "chunked_attention_size: expected it with"),
    "positions": ({"pos_encoding_mode": "rope"}, "pos_encoding_mode: expected None or 'alibi'"),
    "skipping": ({"skip_softmax_threshold_scale_factor": -1.0}, "skip_softmax_threshold_scale_factor"),
    "stats": ({"save_softmax_stats": 1}, "save_softmax_stats: expected a bool"),
    "sums": ({"seq_lens": ints((40, 7, 64), "cpu")}, "cum_seq_lens_kv: expected the sums"),
    "queries": ({"max_q_len": 19}, "max_q_len: expected at least 20"),
    "keys": ({"max_kv_len": 64}, "max_kv_len: expected at least 65"),
    "batch": ({"batch_size": 2}, "seq_lens: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    p = problem("cpu", torch.float32, "SEPARATE_Q_K_V")
    right = {
        "qkv": (p.q, p.k, p.v), "input_layout": "SEPARATE_Q_K_V", "workspace_buffer": workspace("cpu"),
        "seq_lens": ints(p.kv_lens, "cpu"), "max_q_len": 20, "max_kv_len": 65, "bmm1_scale": 0.125, "bmm2_scale": 1.0,
        "batch_size": 3, "cum_seq_lens_q": ints(p.qo_indptr, "cpu"), "cum_seq_lens_kv": ints(p.kv_indptr, "cpu"),
    }  # fmt: skip
    changes, message = WRONG[name]
    with pytest.raises(quire.ValidationError, match=message):
        quire.prefill.trtllm_fmha_v2_prefill(**right | changes)
