"""Prefill and decode of one step: at the same time where both have enough to do, else one after the other."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import quire
from problems import Problem, ints, workspace
from ptx.impersonated import capability
from quire.cli.aot import family, spec_of
from quire.engine import joined, planner
from quire.engine import launch as plan_module
from quire.engine.device import OwnWorkspace
from quire.engine.joined import FusedPod, Work, sms_of_decode
from quire.engine.options import LogitsOptions, PlanOptions, Types
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.kernels import AttentionProblem, PodKey, decide
from quire.kernels.features import MaskMode, dtype_of
from quire.kernels.params import PodParams

PAGE = 16
CPU = torch.device("cpu")
HOPPER = torch.cuda.is_available() and capability() == (9, 0)


def paged(device, qo_lens, kv_lens, causal):
    p = Problem(qo_lens, kv_lens, device=device, dtype=torch.bfloat16, causal=causal, num_qo_heads=4, num_kv_heads=2)
    return p, p.paged(PAGE)


def spec_of_batch(p, cache):
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(p.q.device))
    return wrapper.spec_of(
        ints(p.qo_indptr, "cpu"), *(t.cpu() for t in cache.tables()), p.num_qo_heads, p.num_kv_heads, p.head_dim, PAGE,
        causal=p.causal, q_data_type=p.dtype,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_work_counts_visible_pairs_and_bytes(causal):
    lens = ((3, 1, 20), (7, 33, 20))
    p, cache = paged("cpu", *lens, causal)
    pairs = sum(
        kv - (qo - 1 - i if causal else 0) for qo, kv in zip(*lens, strict=True) for i in range(qo)
    )  # query i of qo sees all keys but those behind it
    work = Work.of(spec_of_batch(p, cache))
    assert work.flops == 4 * pairs * p.head_dim * p.num_qo_heads
    assert work.bytes == sum(lens[1]) * p.num_kv_heads * p.head_dim * 2 * 2


def test_shares_of_a_gpu(monkeypatch):
    """Decodes get two thirds of the SMs; small work is not worth it, nor is another GPU known."""
    device, targets = torch.device("cuda:0"), ["sm90a"]
    monkeypatch.setattr(joined, "max_ctas", lambda *_: 132)
    monkeypatch.setattr(joined, "target_of", lambda _: targets[0])
    prefill, decode = Work(68.7e9, 0.0), Work(0.0, 1.07e9)
    assert sms_of_decode(prefill, decode, device) == 88
    assert sms_of_decode(prefill, Work(0.0, 1e6), device) == sms_of_decode(Work(1e9, 0.0), decode, device) == 0
    targets[0] = "sm80"
    assert sms_of_decode(prefill, decode, device) == 0
    assert sms_of_decode(prefill, decode, torch.device("cpu")) == 0


def key_of(kernel, **features):
    """A variant of the kernel for Hopper."""
    bf16 = dtype_of("bfloat16", "q")
    first = {"head_dim_qk": 128, "head_dim_vo": 128, "page_size": 64, "mask": MaskMode.NONE, "window": False}
    problem = AttentionProblem(
        "sm90a", bf16, bf16, bf16, **first | {"soft_cap": False, "rows": 4, "group_size": 4} | features
    )
    return decide(problem, f"quire:{kernel}")


def test_a_slug_names_both_kernels():
    key = PodKey(key_of("fa3", rows=8192, mask=MaskMode.CAUSAL).key, key_of("decode").key)
    assert PodKey.parse(key.slug) == key
    assert spec_of(key.slug) == key.spec()
    assert {key.slug, key.prefill.slug, key.decode.slug} <= {spec.slug for spec in family(key.slug)}


@pytest.mark.parametrize(
    "kernels",
    [
        (key_of("decode"), key_of("decode")),
        (key_of("fa3"), key_of("fa3")),
        (key_of("fa3", timed=True), key_of("decode")),
        (key_of("fa3", page_size=5), key_of("decode")),
        (key_of("fa3"), key_of("decode", rows=64)),
        (key_of("fa3"), key_of("decode", head_dim_qk=256, head_dim_vo=256)),
    ],
)
def test_other_kernels_have_launches_of_their_own(kernels):
    with pytest.raises(quire.ValidationError, match="pod: "):
        PodKey(*(decision.key for decision in kernels))


class Modules:
    """Kernels for Hopper that note their launches."""

    exports: ClassVar[dict[str, int]] = {"kMinCtas": 1, "kSmemBytes": 80_000, "kThreads": 512, "kDecoding": 2}


@pytest.fixture
def launches(monkeypatch):
    """(address of the parameters, grid) of each launch."""
    started = []
    monkeypatch.setattr(planner, "load", lambda spec, device: (Modules, 132))
    monkeypatch.setattr(joined, "load", lambda spec, device: (Modules, 132))
    monkeypatch.setattr(joined, "max_ctas", lambda *_: 132)
    for module in (joined, plan_module):
        monkeypatch.setattr(module, "bind", lambda _, at, device, grid, pdl: lambda _: started.append((at, grid)))
    return started


def hopper_plan(decision, qo_len, kv_len):
    """What FusedPod knows of an Attention over three requests."""
    types, pages = Types(*[decision.key.q] * 3), -(-kv_len // 64)
    options = PlanOptions(32, 8, 128, 128, types, LogitsOptions(0.1, -1, 0.0), qo_len > 1, 64, 0)
    last, indptr = torch.full((3,), (kv_len - 1) % 64 + 1), torch.arange(4) * pages
    indices = Indices(3, None, qo_len, indptr.int(), last.int(), torch.arange(3 * pages).int(), 64)
    plan = planner.make_plan(decision, indices, options, OwnWorkspace(CPU), None, None)
    plan.copy_signature(bytes(8 * sum(len(operand.strides) for operand in decision.tensors)), None)
    return SimpleNamespace(decision=decision, plan=plan, device=CPU, spec=AttentionSpec(indices, options))


def run_plan(attention, pointer):
    """run() with all operands at one address."""
    attention.plan.run(0, [pointer] * 4, plan_module.NO_EXTRAS, None)
    return pointer


@pytest.mark.parametrize("qo_len", [2000, 70])
def test_one_launch_has_the_parameters_of_both(launches, qo_len):
    """At the time of the launch; its CTAs are those that decode and those of the prefill's schedule."""
    prefill = hopper_plan(key_of("fa3", rows=4 * qo_len, mask=MaskMode.CAUSAL), qo_len, 2000)
    decodes = hopper_plan(key_of("decode"), 1, 5000)
    both = FusedPod(prefill, decodes, 20)
    for pointer in (64, 128):
        assert both.run(partial(run_plan, prefill, pointer), partial(run_plan, decodes, pointer + 1)) == (
            pointer, pointer + 1,
        )  # fmt: skip
        (at, grid), *others = launches
        p = PodParams.from_address(at)
        assert not others and (p.prefill.base.q, p.decode.q) == (pointer, pointer + 1)
        assert p.decode.num_ctas == decodes.plan.params.num_ctas > 40 and p.num_decode_ctas == 20
        assert ctypes.c_uint32.from_address(p.decode_counter).value == 0
        base = p.prefill.base
        assert (base.partitions is None) == (qo_len == 2000)
        assert grid == (132 if qo_len == 2000 else 20 + base.num_ctas)
        launches.clear()
    assert "20 CTAs decode first" in prefill.plan.note


@pytest.mark.parametrize(("qo_len", "kv_len", "is_one"), [(2000, 9000, True), (70, 9000, True), (70, 200, False)])
def test_a_divided_prefill_is_beside_long_decodes_only(launches, monkeypatch, qo_len, kv_len, is_one):
    """Its partitions belong to a third of the SMs, which CTAs that have ended their decodes do not help."""
    monkeypatch.setattr(joined, "_LEAST_US", 0.0)
    monkeypatch.setattr(joined, "on_cuda", lambda _: True)
    monkeypatch.setattr(joined, "target_of", lambda _: "sm90a")
    prefill = hopper_plan(key_of("fa3", rows=4 * qo_len, mask=MaskMode.CAUSAL), qo_len, 2000)
    decodes = hopper_plan(key_of("decode"), 1, kv_len)
    monkeypatch.setattr(joined, "Attention", lambda *_: prefill)
    both = FusedPod.of(prefill.spec, None, decodes)
    assert (both is not None) == is_one


def test_each_plan_launches_by_itself_otherwise(launches):
    """Also after an error in one of them, of which nothing was launched."""
    prefill = hopper_plan(key_of("fa3", rows=8000, mask=MaskMode.CAUSAL), 2000, 2000)
    decodes = hopper_plan(key_of("decode"), 1, 5000)
    both = FusedPod(prefill, decodes, 66)
    with pytest.raises(ZeroDivisionError):
        both.run(partial(run_plan, prefill, 64), lambda: 1 // 0)
    assert not launches
    run_plan(prefill, 64), run_plan(decodes, 64)
    assert [grid for _, grid in launches] == [132, decodes.plan.params.num_ctas]


def test_other_heads_have_plans_of_their_own(launches):
    both = FusedPod(
        hopper_plan(key_of("fa3", rows=8000), 2000, 2000), hopper_plan(key_of("decode"), 1, 5000), 66
    )  # fmt: skip
    q, fewer = torch.empty(3, 32, 128), torch.empty(3, 16, 128)
    assert both.takes(q, q) and not both.takes(fewer, q) and not both.takes(q, fewer)


def test_fewer_sms_are_fewer_partitions(device):
    """A plan beside another launch fills no more SMs than it is given, and computes the same."""
    p, cache = paged(device, (1,) * 4, (300, 20, 1000, 7), False)
    spec, wrapper = spec_of_batch(p, cache), quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.set_plan(spec._replace(options=spec.options._replace(sms=1)))
    few = wrapper._attention.placed_work()
    p.check(wrapper.run(p.q, cache.kv))
    wrapper.set_plan(spec)
    assert len({work.line for work in few}) <= len({work.line for work in wrapper._attention.placed_work()})
    assert len({work.line for work in few}) <= 3


@pytest.mark.skipif(not HOPPER, reason="side by side on Hopper")
def test_side_by_side_is_what_each_is_alone():
    """In one launch, call after call, whose inputs change in between."""
    device = torch.device("cuda:0")
    options = {"device": device, "dtype": torch.bfloat16, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    p = Problem((4096,), (4096,), causal=True, **options)
    d = Problem((1,) * 64, (2048,) * 64, **options)
    caches = p.paged(PAGE), d.paged(PAGE)
    heads = 32, 8, 128, PAGE
    wrapper = quire.BatchPODWithPagedKVCacheWrapper(workspace(device))
    tables = [(ints(x.qo_indptr, device), *c.tables()) for x, c in zip((p, d), caches, strict=True)]
    wrapper.plan(*tables[0], *tables[1], *heads, q_data_type=torch.bfloat16)
    prefill, decode = (
        quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device)),
        quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device)),
    )
    prefill.plan(ints(p.qo_indptr, device), *caches[0].tables(), *heads, causal=True, q_data_type=torch.bfloat16)
    decode.plan(*caches[1].tables(), *heads, q_data_type=torch.bfloat16)
    for _ in range(5):
        q, q_d = torch.randn_like(p.q), torch.randn_like(d.q)
        got = wrapper.run(q, caches[0].kv, q_d, caches[1].kv, causal_p=True)
        assert "one launch" in wrapper.explain()[0].note
        for ours, alone in zip(got, (prefill.run(q, caches[0].kv), decode.run(q_d, caches[1].kv)), strict=True):
            torch.testing.assert_close(ours, alone, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not HOPPER, reason="side by side on Hopper")
def test_a_single_prefill_beside_decodes():
    """Its plan is kept for calls of the same lengths; other lengths and options are planned anew."""
    device = torch.device("cuda:0")
    options = {"device": device, "dtype": torch.bfloat16, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    d = Problem((1,) * 64, (2048,) * 64, **options)
    cache, wrapper = d.paged(PAGE), quire.PODWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*cache.tables(), 32, 8, 128, PAGE, q_data_type=torch.bfloat16)
    decode = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*cache.tables(), 32, 8, 128, PAGE, q_data_type=torch.bfloat16)
    alone = decode.run(d.q, cache.kv, return_lse=True)
    plans = set()
    for length, causal in ((4096, True), (4096, True), (4096, False), (3000, True), (4096, True)):
        p = Problem((length,), (length,), causal=causal, **options)
        o, (o_d, lse_d) = wrapper.run(p.q, p.k, p.v, d.q, cache.kv, causal_p=causal, return_lse_d=True)
        plans.add(wrapper._fused[1])
        expected = quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=causal)
        for ours, other in ((o, expected), (o_d, alone[0]), (lse_d, alone[1])):
            torch.testing.assert_close(ours, other, atol=1e-2, rtol=1e-2)
    assert len(plans) == 4 and None not in plans


SMALL = [  # requests of the prefill and of the decodes, heads, head dim, page size
    (((150, 140) * 20, (150, 200) * 20), (1, 0, 5000, 64, 63, 777), (16, 1), 128, 64),  # tall row tiles, each whole
    (((100, 90) * 30, (100, 91) * 30), (300,) * 300, (8, 2), 64, 8),  # low ones; decodes in whole row tiles
    (((700, 33, 1), (700, 1000, 20)), (17, 4000, 1) * 30, (16, 1), 128, 16),  # prefills in partitions
    (((300, 200), (300, 2000)), (9000,), (4, 4), 128, 8),
]


@pytest.mark.skipif(not HOPPER, reason="one launch on Hopper")
@pytest.mark.parametrize(("prefills", "kv_lens", "heads", "head_dim", "page_size"), SMALL)
def test_one_launch_is_right(monkeypatch, prefills, kv_lens, heads, head_dim, page_size):
    """Also call after call, with the same bits; nothing that no request owns is read."""
    monkeypatch.setattr(joined, "_LEAST_US", 0.0)
    device = torch.device("cuda:0")
    sizes = dict(zip(("num_qo_heads", "num_kv_heads"), heads, strict=True))
    options = {"device": device, "dtype": torch.bfloat16, "head_dim": head_dim, **sizes}
    p, d = Problem(*prefills, causal=True, **options), Problem((1,) * len(kv_lens), kv_lens, seed=1, **options)
    caches = p.paged(page_size), d.paged(page_size)
    wrapper = quire.BatchPODWithPagedKVCacheWrapper(workspace(device))
    tables = [(ints(x.qo_indptr, device), *c.tables()) for x, c in zip((p, d), caches, strict=True)]
    wrapper.plan(*tables[0], *tables[1], *heads, head_dim, page_size, q_data_type=torch.bfloat16)
    first, *others = (
        wrapper.run(p.q, caches[0].kv, d.q, caches[1].kv, causal_p=True, return_lse=True) for _ in range(4)
    )
    assert "one launch" in wrapper.explain()[0].note
    for problem, result in zip((p, d), first, strict=True):
        problem.check(*result)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
