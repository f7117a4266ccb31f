"""Prefill and decode of one step: at the same time where both have enough to do, else one after the other."""

from __future__ import annotations

import pytest
import torch

import quire
from problems import Problem, ints, workspace
from quire.runtime import side_by_side
from quire.runtime.side_by_side import Work, sms_of_prefill

PAGE = 16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def paged(device, qo_lens, kv_lens, causal):
    p = Problem(qo_lens, kv_lens, device=device, dtype=torch.bfloat16, causal=causal, num_qo_heads=4, num_kv_heads=2)
    return p, p.paged(PAGE)


def spec_of(p, cache):
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
    work = Work.of(spec_of(p, cache))
    assert work.flops == 4 * pairs * p.head_dim * p.num_qo_heads
    assert work.bytes == sum(lens[1]) * p.num_kv_heads * p.head_dim * 2 * 2


def test_shares_of_a_gpu(monkeypatch):
    """Both end together; decode keeps what reading takes; small work is not worth it, nor is another GPU known."""
    device, targets = torch.device("cuda:0"), ["sm90a"]
    monkeypatch.setattr(side_by_side, "max_ctas", lambda *_: 132)
    monkeypatch.setattr(side_by_side, "target_of", lambda _: targets[0])
    prefill, decode = Work(68.7e9, 0.0), Work(0.0, 1.07e9)
    sms = sms_of_prefill(prefill, decode, device)
    assert 44 <= sms <= 60
    assert sms_of_prefill(Work(10 * prefill.flops, 0.0), decode, device) > 2 * sms
    assert sms_of_prefill(Work(10 * prefill.flops, 0.0), decode, device) < 132
    assert sms_of_prefill(prefill, Work(0.0, 10 * decode.bytes), device) < sms / 2
    assert sms_of_prefill(prefill, Work(0.0, 1e6), device) == sms_of_prefill(Work(1e9, 0.0), decode, device) == 0
    targets[0] = "sm80"
    assert sms_of_prefill(prefill, decode, device) == 0
    assert sms_of_prefill(prefill, decode, torch.device("cpu")) == 0


def test_fewer_sms_are_fewer_partitions(device):
    """A plan beside another launch fills no more SMs than it is given, and computes the same."""
    p, cache = paged(device, (1,) * 4, (300, 20, 1000, 7), False)
    spec, wrapper = spec_of(p, cache), quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.set_plan(spec._replace(options=spec.options._replace(sms=1)))
    few = wrapper._attention.placed_work()
    p.check(wrapper.run(p.q, cache.kv))
    wrapper.set_plan(spec)
    assert len({work.line for work in few}) <= len({work.line for work in wrapper._attention.placed_work()})
    assert len({work.line for work in few}) <= 3


@pytest.mark.skipif(not HOPPER, reason="side by side on Hopper")
def test_side_by_side_is_what_each_is_alone():
    """On two streams, call after call, whose inputs change in between."""
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
        assert wrapper._sms > 0
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
        plans.add(wrapper._beside[1])
        expected = quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=causal)
        for ours, other in ((o, expected), (o_d, alone[0]), (lse_d, alone[1])):
            torch.testing.assert_close(ours, other, atol=1e-2, rtol=1e-2)
    assert len(plans) == 4 and None not in plans
