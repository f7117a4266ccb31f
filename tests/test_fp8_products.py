"""Queries, keys and values of e4m3 that are multiplied as they are: attention_fa3_fp8, which runs if it is named.

The truth is attention over the stored numbers, in float64. Weights have 4 significant bits, whose rounding is most of
the error; it does not grow with the number of keys.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from calls import paged_wrapper, plan_paged, plan_ragged, prefill_paged, prefill_ragged, ragged_wrapper
from problems import Problem, block_tables, ints, offsets
from quire.compat.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from quire.engine.options import plan_options
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.errors import UnsupportedError, ValidationError
from quire.kernels import AttentionKey, AttentionProblem, decide
from quire.kernels.features import DTYPES, MaskMode, PosEncodingMode

CUDA_BACKENDS = {"fp8": (9, 0)}
E4M3 = torch.float8_e4m3fn
TYPES = {"q_data_type": E4M3, "kv_data_type": E4M3}
#: Errors relative to the result, in the norm of all numbers and of the worst row; absolute ones of lse.
WHOLE, ROW, LSE = 3.2e-2, 6.5e-2, 2e-2
QO_LENS, KV_LENS = (300, 1, 77, 0, 5, 130), (300, 513, 1000, 64, 0, 129)

_TYPES = {dtype.slug: dtype for dtype in DTYPES}
_E4M3 = _TYPES["e4m3"]
_PROMPT = AttentionProblem(
    target="sm90a", q=_E4M3, kv=_E4M3, o=_TYPES["bf16"], head_dim_qk=128, head_dim_vo=128, page_size=16,
    mask=MaskMode.CAUSAL, window=False, soft_cap=False, rows=4096, group_size=4,
)  # fmt: skip


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 5, 16, 64])
@pytest.mark.parametrize("mask", [MaskMode.NONE, MaskMode.CAUSAL, MaskMode.CUSTOM])
def test_long_prompts_of_e4m3_are_multiplied_as_they_are(head_dims, page_size, mask):
    qk, vo = head_dims
    problem = replace(_PROMPT, head_dim_qk=qk, head_dim_vo=vo, page_size=page_size, mask=mask)
    decision = decide(problem, "quire:fp8")
    assert decision.kernel.name == "attention_fa3_fp8"
    assert AttentionKey.parse(decision.key.slug) == decision.key


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": "sm100a"}, "sm100a is not sm90a"),
        ({"q": _TYPES["bf16"]}, "q dtype bf16"),
        ({"kv": _TYPES["e5m2"]}, "kv dtype e5m2"),
        ({"o": _TYPES["fp32"]}, "o dtype fp32"),
        ({"head_dim_qk": 80, "head_dim_vo": 80}, "multiples of 32"),
        ({"pos_encoding": PosEncodingMode.ALIBI}, "no position encodings"),
        ({"mask": MaskMode.TREE}, "tree mask"),
    ],
    ids=str,
)
def test_other_problems_are_refused_with_a_reason(changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        decide(replace(_PROMPT, **changes), "quire:fp8")


@pytest.mark.parametrize("changes", [{"rows": 16}, {"fixed_split_size": -1}], ids=str)
def test_a_named_kernel_takes_any_number_of_rows(changes):
    assert decide(replace(_PROMPT, **changes), "quire:fp8").kernel.backend == "fp8"


def test_auto_does_not_choose_it():
    """Because it rounds more; the reasons say how to choose it."""
    with pytest.raises(UnsupportedError, match="only backend='quire:fp8' chooses it"):
        decide(_PROMPT)
    upcast = decide(replace(_PROMPT, q=_TYPES["bf16"]))
    assert upcast.kernel.backend == "fa3"
    reasons = {verdict.kernel.backend: verdict.reason for verdict in upcast.trace}
    assert 'backend="quire:fp8"' in reasons["fp8"]


def test_queries_are_upcast_unless_the_kernel_is_named():
    options = plan_options(4, 2, 128, q_data_type=E4M3, kv_data_type=E4M3, causal=True)
    spec = AttentionSpec(Indices(0, None, 0, torch.zeros(1, dtype=torch.int32), None, None, 1, None), options)
    assert spec.options.types.q.bits == 16
    for backend in ("auto", "fa3", "quire:fa3"):
        assert spec.with_8_bit_queries(backend) is spec
    types = spec.with_8_bit_queries("quire:fp8").options.types
    assert (types.q, types.given, types.o.slug) == (_E4M3, None, "fp16")


def batch(dtype, device, qo_lens=QO_LENS, kv_lens=KV_LENS, **more):
    """Queries, keys and values of e4m3."""
    options = {"dtype": dtype, "device": device, "kv_dtype": E4M3, "head_dim": 128, "causal": True, **more}
    p = Problem(qo_lens, kv_lens, **options)
    p.q = p.q.to(E4M3)
    return p


def plan_of(p):
    """Keywords of plan()."""
    return {**TYPES, "o_data_type": p.dtype}


def check(p, out, lse, **more):
    """A result is as close to the truth as weights of 4 bits allow, and finite wherever the truth is."""
    truth = p.expected(**more)
    got, want = out.cpu().double(), truth.o
    assert bool(torch.isfinite(got).all())
    error, size = (got - want).flatten(1).norm(dim=1), want.flatten(1).norm(dim=1)
    assert float(error.norm()) <= WHOLE * float(size.norm()) + 1e-6
    assert bool((error <= ROW * size + 1e-6).all())
    seen = torch.isfinite(truth.lse)
    assert torch.equal(torch.isfinite(lse.cpu()), seen)
    if seen.any():
        assert float((lse.cpu().double() - truth.lse)[seen].abs().max()) <= LSE


def on_gpu(device):
    """Skips on the CPU, whose kernels widen queries."""
    if device == "cpu":
        pytest.skip("products of 8 bits are for sm_90a")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged(device, backend, dtype, head_dim, causal):
    on_gpu(device)
    p = batch(dtype, device, head_dim=head_dim, causal=causal)
    check(p, *prefill_ragged(p, backend, plan=plan_of(p)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48, 64, 256])
def test_pages_with_nan_behind_the_keys(device, backend, dtype, head_dim, page_size):
    on_gpu(device)
    p = batch(dtype, device, head_dim=head_dim)
    check(p, *prefill_paged(p, p.paged(page_size), backend, plan=plan_of(p)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "logits",
    [{"window_left": 0}, {"window_left": 100}, {"causal": False, "window_left": 300}, {"soft_cap": 5.0},
     {"soft_cap": 30.0, "window_left": 70}],
    ids=str,
)  # fmt: skip
def test_windows_and_soft_caps(device, backend, dtype, head_dim, logits):
    on_gpu(device)
    p = batch(dtype, device, head_dim=head_dim, **logits)
    check(p, *prefill_ragged(p, backend, plan=plan_of(p)))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("page_size", [0, 16])
def test_custom_masks(device, backend, dtype, head_dim, blocks, page_size):
    on_gpu(device)
    p = batch(dtype, device, head_dim=head_dim)
    p = p.block_mask() if blocks else p.random_mask()
    if page_size:
        result = prefill_paged(p, p.paged(page_size), backend, plan=plan_of(p))
    else:
        result = prefill_ragged(p, backend, plan=plan_of(p))
    check(p, *result)


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (10, 2), (16, 2), (64, 1)])
def test_groups(device, backend, dtype, heads):
    on_gpu(device)
    p = batch(dtype, device, num_qo_heads=heads[0], num_kv_heads=heads[1])
    check(p, *prefill_ragged(p, backend, plan=plan_of(p)))


@pytest.mark.parametrize("page_size", [0, 16])
def test_scales(device, backend, dtype, page_size):
    """Numbers, and a scale for each head."""
    on_gpu(device)
    p = batch(dtype, device)
    cache = p.paged(page_size) if page_size else None
    wrapper = paged_wrapper(p, cache, backend) if cache else ragged_wrapper(p, backend)
    if cache:
        plan_paged(wrapper, p, cache, plan=plan_of(p))
    else:
        plan_ragged(wrapper, p, plan=plan_of(p))
    args = (p.q, cache.kv) if cache else (p.q, p.k, p.v)
    check(p, *wrapper.run(*args, q_scale=2.0, k_scale=0.25, v_scale=1.5, return_lse=True),
          sm_scale=0.5 / math.sqrt(128), v_scale=1.5)  # fmt: skip
    of_q, of_k, of_v = (torch.rand(n, device=device) + 0.5 for n in (4, 2, 2))
    got = wrapper.run(*args, q_scale=of_q, k_scale=of_k, v_scale=of_v, return_lse=True)
    p.q = p.q.double() * of_q[:, None]
    p.k, p.v = p.k.double() * of_k[:, None], p.v.double() * of_v[:, None]
    check(p, *got)


def test_sinks(device, backend, dtype):
    on_gpu(device)
    p = batch(dtype, device)
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p, plan=plan_of(p))
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    check(p, *wrapper.run(p.q, p.k, p.v, sinks=sinks, return_lse=True), sinks=sinks)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_error_does_not_grow_with_the_keys(device, backend, dtype, head_dim):
    on_gpu(device)
    errors = []
    for kv_len in (4096, 65536):
        p = batch(dtype, device, (128,), (kv_len,), head_dim=head_dim, causal=False, num_qo_heads=2, num_kv_heads=1)
        out, _ = prefill_ragged(p, backend, plan=plan_of(p))
        want = p.expected().o
        errors.append(float((out.cpu().double() - want).norm() / want.norm()))
    assert errors[1] <= 1.2 * errors[0]  # it is that of the weights, whatever their number
    assert max(errors) <= WHOLE


def test_one_key_is_its_value(device, backend, dtype):
    """Of one key whose logit is a whole power of two."""
    on_gpu(device)
    p = batch(dtype, device, (64,) * 3, (1,) * 3, causal=False)
    p.q = torch.zeros_like(p.q.float()).to(E4M3)
    out, _ = prefill_ragged(p, backend, plan=plan_of(p))
    request = torch.arange(3, device=device).repeat_interleave(64)
    assert torch.equal(out, p.v[request].to(dtype).repeat_interleave(2, dim=1))


def test_explain_tells_what_was_chosen(device, backend, dtype):
    """With auto the upcast that it chose, and how to choose this kernel."""
    on_gpu(device)
    p = batch(dtype, device, (1024,), (1024,))
    chosen = {}
    for name in ("auto", "quire:fa3", backend):
        wrapper = ragged_wrapper(p, name)
        plan_ragged(wrapper, p, plan=plan_of(p))
        told = str(wrapper.explain())
        chosen[name] = "attention_fa3_fp8" in told.split("->")[-1]
        assert name != "auto" or 'backend="quire:fp8"' in told
    assert chosen == {"auto": False, "quire:fa3": False, backend: True}


def test_few_rows_and_other_options_of_forward(device, backend, dtype):
    """A plan that is made again keeps 8-bit queries."""
    on_gpu(device)
    p = batch(dtype, device, (3, 1), (200, 77))
    check(p, *prefill_ragged(p, backend, plan=plan_of(p)))
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p, plan={**plan_of(p), "causal": False})
    check(p, *wrapper.forward_return_lse(p.q, p.k, p.v, causal=True))


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("has_scales", [False, True])
def test_functions_of_flash_attention_3_choose_it_for_long_prompts(device, dtype, monkeypatch, page_size, has_scales):
    """Also a call that is recorded, one that is replayed, and one in a graph; not if the environment forbids it."""
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products of 8 bits are for sm_90a")
    if dtype is not torch.bfloat16:
        pytest.skip("results of 8-bit queries are bfloat16")
    p = batch(dtype, device)
    lens = {"cu_seqlens_q": offsets(p.qo_lens, device), "max_seqlen_q": max(p.qo_lens), "num_splits": 0}
    if page_size:
        cache = p.paged(page_size)
        keys = list(cache.kv)
        lens |= {"block_table": block_tables(cache).to(device), "seqused_k": ints(p.kv_lens, device)}
    else:
        keys = [p.k, p.v]
        lens |= {"cu_seqlens_k": offsets(p.kv_lens, device), "max_seqlen_k": max(p.kv_lens)}
    scales = {"q": 2.0, "k": 0.25, "v": 1.5} if has_scales else {}
    named = {f"{x}_descale": torch.full((1,), f, device=device).expand(len(p.qo_lens), 2) for x, f in scales.items()}
    truth = {"sm_scale": 0.5 / math.sqrt(128), "v_scale": 1.5} if has_scales else {}

    def call():
        out, lse = flash_attn_varlen_func(p.q, *keys, causal=True, return_softmax_lse=True, **lens, **named)
        return out, lse.t() / math.log(2)

    results = [call() for _ in range(3)]
    check(p, *results[0], **truth)
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = call()
    captured.fill_(math.nan)
    graph.replay()
    assert torch.equal(captured, results[0][0])
    monkeypatch.setenv("QUIRE_FP8_PRODUCTS", "0")
    exact, _ = flash_attn_varlen_func(p.q, *keys, causal=True, return_softmax_lse=True, **lens, **named)
    assert not torch.equal(exact, results[0][0])
    assert float((exact.cpu().double() - p.expected(**truth).o).norm() / p.expected(**truth).o.norm()) < 5e-3


def test_flash_attn_func_chooses_it_by_its_own_length(device, dtype):
    """With num_splits=1, the default, results do not depend on other requests."""
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0) or dtype is not torch.bfloat16:
        pytest.skip("products of 8 bits are for sm_90a, and their results bfloat16")
    q, k, v = (torch.randn(3, 300, h, 128, device=device).to(E4M3) for h in (4, 2, 2))
    one, three = flash_attn_func(q[:1], k[:1], v[:1], causal=True), flash_attn_func(q, k, v, causal=True)
    assert torch.equal(one[0], three[0])  # what a request's own length decides does not depend on others
    lens = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), offsets([300] * 3, device))
    upcast = flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), causal=True, **lens)
    assert not torch.equal(upcast, three.flatten(0, 1))


def test_the_environment_is_checked(monkeypatch):
    q, k, v = (torch.randn(1, 8, 2, 64).to(E4M3) for _ in range(3))
    upcast = flash_attn_func(q, k, v)
    assert upcast.dtype is torch.bfloat16
    monkeypatch.setenv("QUIRE_FP8_PRODUCTS", "0")
    assert torch.equal(flash_attn_func(q, k, v), upcast)
    monkeypatch.setenv("QUIRE_FP8_PRODUCTS", "no")
    with pytest.raises(ValidationError, match="QUIRE_FP8_PRODUCTS: expected 0 or 1, got 'no'"):
        flash_attn_func(q, k, v)
