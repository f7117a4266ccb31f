"""Keys and values of 8 bits in long prompts: widened in one pass, ahead of a kernel over 16-bit ones.

On the CPU, whose kernel widens what it reads, the tests choose so; on a GPU plan() does.
"""

from __future__ import annotations

import pytest
import torch

import quire
from calls import paged_wrapper, plan_paged
from problems import FORMS, Problem, poisoned
from quire.engine import upcast

CUDA_BACKENDS = {"auto": (9, 0)}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Requests of every sort, most of them long.
QO_LENS, KV_LENS = (700, 1, 0, 1500), (700, 1300, 4, 1700)
SCALES = {"k_scale": 0.05, "v_scale": 1.75}


pytestmark = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture(autouse=True)
def _widens(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(upcast, "may_pay", lambda options, *_: options.types.kv.bits == 8)
        monkeypatch.setattr(upcast, "is_faster", lambda *_: True)
        monkeypatch.setattr(upcast, "_LEAST_ROWS", 0)


def problem(device, dtype, lens=(QO_LENS, KV_LENS), heads=(16, 2), kv_dtype=E4M3, **more):
    if device == "cpu":  # not long
        lens = tuple(tuple(-(-n // 10) for n in part) for part in lens)
    return Problem(*lens, *heads, **{"head_dim": 64, "causal": True, **SCALES, **more}, dtype=dtype, kv_dtype=kv_dtype,
                   device=device)  # fmt: skip


def planned(p, cache, **more):
    wrapper = paged_wrapper(p, cache, "auto")
    plan_paged(wrapper, p, cache, plan={"kv_data_type": p.kv_dtype}, **more)
    return wrapper


def scales(p):
    """Keywords of run()."""
    return {"k_scale": p.k_scale, "v_scale": p.v_scale, "return_lse": True}


def is_ahead(wrapper) -> bool:
    return "ahead of the kernel" in wrapper.explain()


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("signature", FORMS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_forms(device, half, kv_layout, signature, kv_dtype):
    p = problem(device, half, kv_dtype=kv_dtype)
    cache = p.paged(16, kv_layout, signature)
    wrapper = planned(p, cache)
    assert is_ahead(wrapper)
    for _ in range(2):
        p.check(*wrapper.run(p.q, cache.kv, **scales(p)))


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_pages(device, half, page_size):
    p = problem(device, half, head_dim=128, causal=False, soft_cap=20.0)
    cache = p.paged(page_size)
    wrapper = planned(p, cache)
    assert is_ahead(wrapper)
    p.check(*wrapper.run(p.q, cache.kv, **scales(p)))


def test_pages_on_the_device(device, half):
    """Page numbers are read by each run() where they lie; the next layer's tensors lie elsewhere."""
    p = problem(device, half)
    first, second = p.paged(16), p.paged(16, order_seed=3)
    wrapper = planned(p, first, index_device=device)
    p.check(*wrapper.run(p.q, first.kv, **scales(p)))
    if device != "cpu":
        first.indices.copy_(second.indices)
        p.check(*wrapper.run(p.q, second.kv, **scales(p)))


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_code_is_widened_exactly(device, half, kv_dtype):
    """One key sees itself alone, so that its value comes out as it is: all codes, NaN and infinity among them."""
    heads = 64 if device == "cpu" else 4096  # rows for a pass to pay
    codes = torch.arange(256, dtype=torch.uint8).to(device)
    values, keys = codes.view(kv_dtype).view(4, 1, 1, 64), torch.zeros(4, 1, 1, 64, dtype=torch.uint8, device=device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device))
    tables = (torch.arange(5), torch.arange(5), torch.arange(4), torch.ones(4))
    wrapper.plan(*(t.int() for t in tables), heads, 1, 64, 1, q_data_type=half, kv_data_type=kv_dtype)
    assert is_ahead(wrapper)
    out = wrapper.run(poisoned((4, heads, 64), half, device).zero_(), (keys.view(kv_dtype), values))
    want = values.double().view(4, 64).cpu()
    got = out[:, -1].double().cpu()
    if device != "cpu":  # a product of matrices also multiplies padding by 0
        got, want = (t[torch.isfinite(values.double().view(4, 64).cpu()).all(dim=1)] for t in (got, want))
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def test_forward_plans_again_and_fewer_heads(device, half):
    p = problem(device, half)
    cache = p.paged(16)
    wrapper = planned(p, cache)
    p.sm_scale = 0.1
    options = {"causal": True, "sm_scale": 0.1, **scales(p)}
    p.check(*wrapper.forward_return_lse(p.q, cache.kv, **{k: v for k, v in options.items() if k != "return_lse"}))
    layer = problem(device, half, heads=(8, 1), seed=5, sm_scale=0.1)
    layer.check(*wrapper.run(layer.q, layer.paged(16).kv, **scales(layer)))


def test_a_small_workspace_leaves_widening_to_the_kernel(device, half):
    p = problem(device, half)
    cache = p.paged(16)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 15, dtype=torch.uint8, device=device))
    plan_paged(wrapper, p, cache, plan={"kv_data_type": E4M3})
    assert not is_ahead(wrapper) and "of workspace would hold widened ones" in wrapper.explain()
    p.check(*wrapper.run(p.q, cache.kv, **scales(p)))
    needed = int(str(wrapper.explain()).partition(" bytes of workspace would")[0].split()[-1])
    wrapper.reset_workspace_buffer(torch.empty(needed, dtype=torch.uint8, device=device))
    plan_paged(wrapper, p, cache, plan={"kv_data_type": E4M3})
    assert is_ahead(wrapper)
    p.check(*wrapper.run(p.q, cache.kv, **scales(p)))


@pytest.mark.parametrize(("kv_dtype", "page_size"), [(E4M3, 16), (E4M3, 1), (None, 1)], ids=["e4m3", "e4m3-1", "1"])
def test_deterministic_results_are_those_without_copies(device, half, kv_dtype, page_size, monkeypatch):
    """Whether there are copies depends on the batch and on the workspace."""
    if device == "cpu":
        monkeypatch.setattr(upcast, "may_pay", lambda *_: True)
    monkeypatch.setattr(upcast, "_LEAST_ROWS_SIDE_BY_SIDE", 0)
    monkeypatch.setattr(upcast, "_LEAST_ROWS", 0)
    p, small = problem(device, half, head_dim=128, kv_dtype=kv_dtype), torch.empty(1 << 15, dtype=torch.uint8)
    cache, results = p.paged(page_size), []
    for memory in (torch.empty(1 << 26, dtype=torch.uint8, device=device), small.to(device)):
        wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(memory, deterministic=True)
        plan_paged(wrapper, p, cache, plan={"kv_data_type": kv_dtype or half})
        assert is_ahead(wrapper) == (memory.numel() > small.numel())
        results.append(wrapper.run(p.q, cache.kv, **scales(p)))
    p.check(*results[0])
    assert all(torch.equal(ahead, within) for ahead, within in zip(*results, strict=True))


def test_keys_that_few_queries_see_are_widened_by_the_kernel(device, half, monkeypatch):
    monkeypatch.setattr(upcast, "_LEAST_ROWS", 2048)
    p = problem(device, half, ((200, 190), (9000, 300)))  # 16 / 2 heads
    wrapper = planned(p, p.paged(16))
    assert not is_ahead(wrapper)


def test_wrong_pages_and_types_are_named(device, half):
    """As they are where nothing is widened ahead."""
    p = problem(device, half)
    cache = p.paged(16)
    wrapper, options = paged_wrapper(p, cache, "auto"), {"q_data_type": half, "kv_data_type": E4M3, "causal": True}
    tables = [torch.tensor(p.qo_indptr, dtype=torch.int32), *(t.cpu() for t in (cache.indptr, cache.indices))]
    last = cache.last_page_len.cpu()
    with pytest.raises(quire.ValidationError, match="paged_kv_indices"):
        wrapper.plan(*tables[:2], tables[2][:-1], last, 16, 2, 64, 16, **options)
    wrapper.plan(*tables, last, 16, 2, 64, 16, **options)
    assert is_ahead(wrapper)
    with pytest.raises(quire.ValidationError, match="expected page numbers below num_pages=2"):
        wrapper.run(p.q, tuple(t[:2] for t in cache.kv))
    with pytest.raises(quire.ValidationError, match=r"keys.*expected dtype torch.float8_e4m3fn"):
        wrapper.run(p.q, tuple(t.to(half) for t in cache.kv))
