"""Head dims that end in half a block of 16 dims, and heads of 512 dims, against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from calls import decode, prefill_paged, prefill_ragged
from problems import Problem
from quire.errors import UnsupportedError
from quire.kernels import KERNELS, AttentionKey, AttentionProblem, decide
from quire.kernels.features import MaskMode, PosEncodingMode, dtype_of

CUDA_BACKENDS = {"auto": (8, 0)}  #: decode for few rows, fa2 or fa3 for more, wide for more of 512 dims
#: (dims of a key, of a value)
HALF_BLOCKS = ((72, 72), (40, 120), (128, 88), (248, 200))
QO_LENS, KV_LENS = (5, 1, 0, 17, 1, 3, 9), (37, 130, 4, 17, 1, 0, 4)

BF16, E4M3 = dtype_of("bfloat16", "q"), dtype_of("float8_e4m3fn", "kv")


@pytest.mark.part(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("dims", HALF_BLOCKS, ids=str)
def test_half_blocks(device, backend, dtype, dims):
    p = Problem(QO_LENS, KV_LENS, 6, 2, *dims, dtype=dtype, device=device, causal=True)
    p.check(*prefill_paged(p, p.paged(8, "HND", "sliced"), backend))
    p = Problem((70, 3), (400, 150), 4, 2, *dims, dtype=dtype, device=device, causal=True)
    p.check(*prefill_ragged(p, backend))


@pytest.mark.first(1)
@pytest.mark.parametrize("head_dim", [40, 72, 248])
def test_half_blocks_in_decode(device, backend, dtype, head_dim):
    p = Problem((1,) * 5, (1, 0, 64, 3000, 77), 12, 2, head_dim, dtype=dtype, device=device)
    p.check(*decode(p, p.paged(16, signature="sliced"), backend))


def test_half_blocks_of_keys_in_8_bits():
    """Tensor cores take whole blocks, the host any."""
    problem = AttentionProblem("sm90a", BF16, E4M3, BF16, 72, 72, 16, MaskMode.NONE, False, False, rows=8)
    with pytest.raises(UnsupportedError, match=r"multiple of 16 for 8-bit keys.*pad with zeros to 80"):
        decide(problem)
    assert decide(replace(problem, target="x86-64-v4")).kernel.backend == "cpu"


def test_half_blocks_of_rotated_keys():
    rope = {"pos_encoding": PosEncodingMode.ROPE_LLAMA}
    problem = AttentionProblem("sm90a", BF16, BF16, BF16, 72, 72, 16, MaskMode.NONE, False, False, rows=8, **rope)
    with pytest.raises(UnsupportedError, match="multiple of 16 to rotate keys"):
        decide(problem)


def test_half_blocks_are_not_for_wgmma():
    problem = AttentionProblem("sm90a", BF16, BF16, BF16, 72, 72, 16, MaskMode.NONE, False, False, rows=4096)
    assert decide(problem).kernel.backend == "fa2"
    with pytest.raises(UnsupportedError, match="head_dim_qk=72: its matrix instruction takes multiples of 16"):
        decide(problem, "quire:fa3")


def kernels_of_wide_heads(backend):
    """Backends for few rows of 512 dims: `decode`, which auto chooses on some GPUs, and `wide` on all."""
    return ("auto", "quire:wide") if backend == "auto" else (backend,)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize(
    ("window_left", "soft_cap"), [(-1, None), (7, None), (-1, 5.0), pytest.param(7, 5.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mask", ["none", "causal", "custom"])
def test_wide_heads_under_masks(device, backend, dtype, mask, window_left, soft_cap):
    p = Problem(QO_LENS, KV_LENS, 6, 2, 512, dtype=dtype, device=device, window_left=window_left, soft_cap=soft_cap)
    p.causal = mask == "causal"
    if mask == "custom":
        p.random_mask()
    p.check(*prefill_paged(p, p.paged(8), backend))


@pytest.mark.one_type
@pytest.mark.slow
def test_wide_heads_of_long_prompts(device, backend, dtype):
    """Row tiles of 64, whose keys are divided among CTAs."""
    p = Problem((150, 70), (700, 300), 4, 2, 512, dtype=dtype, device=device, causal=True)
    p.check(*prefill_ragged(p, backend))
    p.check(*prefill_paged(p, p.paged(16, "HND", "sliced"), backend))


@pytest.mark.one_type
@pytest.mark.parametrize("num_qo_heads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 40))])
def test_wide_heads_in_decode(device, backend, dtype, num_qo_heads):
    p = Problem((1,) * 5, (1, 0, 64, 5000, 77), num_qo_heads, 2, 512, dtype=dtype, device=device)
    for each in kernels_of_wide_heads(backend):
        p.check(*decode(p, p.paged(16), each))


@pytest.mark.one_type
@pytest.mark.slow
def test_wide_heads_with_sinks_and_alibi(device, backend, dtype):
    p = Problem((9, 1), (40, 700), 6, 2, 512, dtype=dtype, device=device, causal=True, pos_encoding_mode="ALIBI")
    p.check(*prefill_ragged(p, backend))
    p.pos_encoding_mode, sinks = "NONE", torch.tensor([0.0, 1.0, -math.inf, 8.0, -1.0, 2.0], device=device)
    p.check(*prefill_paged(p, p.paged(16), backend, run={"sinks": sinks}), sinks=sinks)


@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "rotates"),
    [(None, True), (torch.float8_e4m3fn, False), (torch.float8_e5m2, False), (torch.float8_e4m3fn, True)],
    ids=["rope", "e4m3", "e5m2", "e4m3-rope"],
)
def test_wide_heads_over_8_bits_and_rotated(device, backend, dtype, kv_dtype, rotates):
    """Decode and append over pages whose unused rows are NaN, and ragged prompts whose keys are divided among CTAs."""
    options = {"dtype": dtype, "device": device, "kv_dtype": kv_dtype}
    options |= {"k_scale": 0.05, "v_scale": 1.75} if kv_dtype else {}
    options |= {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5} if rotates else {}
    plan, scales = (
        {"kv_data_type": kv_dtype or dtype},
        {name: options.get(name, 1.0) for name in ("k_scale", "v_scale")},
    )
    p = Problem((1,) * 4, (1, 0, 77, 1000), 6, 2, 512, **options)
    for each in kernels_of_wide_heads(backend):
        p.check(*decode(p, p.paged(16, "HND"), each, plan=plan, run=scales))
    p = Problem(QO_LENS, KV_LENS, 6, 2, 512, causal=True, **options)
    p.check(*prefill_paged(p, p.paged(8), backend, plan=plan, run=scales))
    p = Problem((150, 70), (400, 70), 4, 2, 512, causal=True, **options)
    p.check(*prefill_ragged(p, backend, plan=plan, run=scales))


@pytest.mark.parametrize(
    ("target", "kv", "rows", "expected"),
    [
        ("sm90a", BF16, 16, "decode"),
        ("sm90a", BF16, 17, "wide"),
        ("sm90a", E4M3, 2, "decode"),
        ("sm80", BF16, 2, "decode"),
        ("sm80", E4M3, 2, "wide"),
        ("sm89", BF16, 2, "wide"),
        ("sm100a", BF16, 2, "wide"),
    ],
)
def test_which_kernel_decodes_wide_heads(target, kv, rows, expected):
    problem = AttentionProblem(target, BF16, kv, BF16, 512, 512, 16, MaskMode.NONE, False, False, rows=rows)
    assert decide(problem).kernel.backend == expected
    rotated = replace(problem, pos_encoding=PosEncodingMode.ROPE_LLAMA)
    assert decide(rotated).kernel.backend == "wide"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim_vo": 256}, "head_dim_vo=256: expected 512"),
        ({"kv": dtype_of("float16", "kv")}, "kv dtype fp16 differs from q dtype bf16"),
        ({"target": "sm75"}, "sm75 has no asynchronous copies"),
    ],
    ids=str,
)
def test_what_wide_heads_do_not_have(changes, words):
    key = AttentionKey.parse("attention_wide.sm90a.bf16-bf16-bf16.d512-512.paged.causal.m64")
    kernel = next(kernel for kernel in KERNELS if kernel.name == "attention_wide")
    assert kernel.refusal(key.problem()) is None
    assert words in kernel.refusal(replace(key.problem(), **changes))
