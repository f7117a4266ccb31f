"""Rotary embeddings in long prompts: queries and keys are rotated ahead of a kernel that does not rotate.

On the CPU, whose kernel rotates what it reads, the tests choose so; on a GPU plan() does.
"""

from __future__ import annotations

import math

import pytest
import torch

import quire
from calls import paged_wrapper, plan_paged, plan_ragged, ragged_wrapper
from problems import Problem
from quire.engine import rope_prologue, rotate
from quire.engine.device import OwnWorkspace, UserWorkspace
from quire.engine.rotate import Angles, Heads, start
from quire.kernels.operation import RopeParams

CUDA_BACKENDS = {"auto": (9, 0)}
#: Requests of every sort, most of them long.
QO_LENS, KV_LENS = (700, 1, 0, 9, 300), (700, 1300, 4, 4, 900)


@pytest.fixture(autouse=True)
def _rotates(monkeypatch, device):
    if device == "cpu":
        rope = quire.kernels.features.PosEncodingMode.ROPE_LLAMA
        monkeypatch.setattr(rope_prologue, "may_pay", lambda options, *_: options.logits.pos_encoding is rope)
        monkeypatch.setattr(rope_prologue, "is_faster", lambda *_: True)


def problem(device, dtype, lens=(QO_LENS, KV_LENS), heads=(8, 2), head_dim=64, **more):
    if device == "cpu":  # not long
        lens = tuple(tuple(-(-n // 10) for n in part) for part in lens)
    p = Problem(*lens, *heads, head_dim, dtype=dtype, device=device, causal=True, **more)
    p.pos_encoding_mode = "ROPE_LLAMA"
    p._rotates_in_16_bits = lambda: p.pos_encoding_mode == "ROPE_LLAMA"  # on the CPU too
    return p


def is_ahead(wrapper) -> bool:
    return "ahead of the kernel" in wrapper.explain()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", ["tensor", "sliced"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.slow
def test_pages(device, dtype, kv_layout, form, head_dim):
    p = problem(device, dtype, head_dim=head_dim)
    cache = p.paged(16, kv_layout, form)
    wrapper = paged_wrapper(p, cache, "auto")
    plan_paged(wrapper, p, cache)
    assert is_ahead(wrapper)
    for _ in range(2):
        p.check(*wrapper.run(p.q, cache.kv, return_lse=True))


def test_few_ctas_rotate_many_tokens(device, dtype, monkeypatch):
    """A CTA looks for its next tokens in the pages many times."""
    monkeypatch.setattr(rotate, "_resident", lambda *_: 3)
    test_pages(device, dtype, "NHD", "tensor", 64)


def test_pages_on_the_device(device, dtype):
    """Page numbers are read by each run() where they lie."""
    p = problem(device, dtype)
    first, second = p.paged(16), p.paged(16, order_seed=3)
    wrapper = paged_wrapper(p, first, "auto")
    plan_paged(wrapper, p, first, index_device=device)
    p.check(*wrapper.run(p.q, first.kv, return_lse=True))
    if device != "cpu":
        first.indices.copy_(second.indices)
        p.check(*wrapper.run(p.q, second.kv, return_lse=True))


def test_ragged_keys_and_other_tensors(device, dtype):
    """The next layer's tensors lie elsewhere, and outputs that are given are used."""
    p, other = problem(device, dtype), problem(device, dtype, seed=5)
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    assert is_ahead(wrapper)
    out = torch.full_like(p.q, math.nan)
    for each in (p, other, p):
        result, lse = wrapper.run(each.q, each.k, each.v, out=out.fill_(math.nan), return_lse=True)
        assert result.data_ptr() == out.data_ptr()
        each.check(result, lse)


def test_queries_and_keys_stay_as_they_are(device, dtype):
    p = problem(device, dtype)
    before = [t.clone() for t in (p.q, p.k, p.v)]
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    wrapper.run(p.q, p.k, p.v)
    assert all(torch.equal(a, b) for a, b in zip(before, (p.q, p.k, p.v), strict=True))


@pytest.mark.one_type
def test_plans_one_after_another(device, dtype):
    """What a plan has checked of its tensors says nothing of another's, with or without a rotation."""
    wrapper = None
    for lens, mode in ((700, "ROPE_LLAMA"), (1200, "NONE"), (1200, "ROPE_LLAMA"), (900, "ROPE_LLAMA"), (5, "NONE")):
        p = problem(device, dtype, ((lens, 300), (lens, 900)))
        p.pos_encoding_mode = mode
        cache = p.paged(16)
        wrapper = wrapper or paged_wrapper(p, cache, "auto")
        plan_paged(wrapper, p, cache)
        p.check(*wrapper.run(p.q, cache.kv, return_lse=True))


@pytest.mark.slow
@pytest.mark.parametrize(("window_left", "soft_cap"), [(33, None), (-1, 5.0)])
def test_masks(device, dtype, window_left, soft_cap):
    p = problem(device, dtype, window_left=window_left, soft_cap=soft_cap)
    p.rope_scale, p.rope_theta = 2.0, 5e5
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True))
    p.causal = False
    p.block_mask()
    plan_ragged(wrapper, p)
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True))


def test_single_calls(device, dtype):
    p = problem(device, dtype, ((1300,), (1500,)))
    options = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "return_lse": True}
    p.check(*quire.single_prefill_with_kv_cache(p.q, p.k, p.v, **options))


@pytest.mark.one_type
def test_forward_plans_again(device, dtype):
    p = problem(device, dtype)
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    p.sm_scale = 0.1
    options = {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "sm_scale": 0.1, "return_lse": True}
    p.check(*wrapper.forward(p.q, p.k, p.v, **options))
    p.causal = False
    p.check(*wrapper.forward(p.q, p.k, p.v, **{**options, "causal": False}))


def test_fewer_heads_than_planned(device, dtype):
    p = problem(device, dtype, heads=(16, 4))
    wrapper = ragged_wrapper(p, "auto")
    plan_ragged(wrapper, p)
    layer = problem(device, dtype, heads=(8, 2))
    layer.check(*wrapper.run(layer.q, layer.k, layer.v, return_lse=True))


@pytest.mark.one_type
def test_a_small_workspace_leaves_rotation_to_the_kernel(device, dtype):
    p = problem(device, dtype)
    memory = torch.empty(1 << 15, dtype=torch.uint8, device=device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(memory)
    plan_ragged(wrapper, p)
    assert not is_ahead(wrapper) and "of workspace would hold rotated keys" in wrapper.explain()
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True))
    needed = int(str(wrapper.explain()).partition(" bytes of workspace would")[0].split()[-1])
    wrapper.reset_workspace_buffer(torch.empty(needed, dtype=torch.uint8, device=device))
    plan_ragged(wrapper, p)
    assert is_ahead(wrapper)
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True))


@pytest.mark.one_type
def test_a_small_workspace_is_refused_where_it_would_decide_the_kernel(device, dtype):
    """With deterministic=True; workspace_size() says how much is enough."""
    p = problem(device, dtype)
    memory = torch.empty(1 << 15, dtype=torch.uint8, device=device)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(memory, deterministic=True)
    with pytest.raises(
        quire.UnsupportedError, match=r"too small for them; pass a workspace of at least (\d+) bytes"
    ) as told:
        plan_ragged(wrapper, p)
    least = int(str(told.value).partition(" of at least ")[2].split()[0])
    offsets = [torch.tensor(indptr, dtype=torch.int32) for indptr in (p.qo_indptr, p.kv_indptr)]
    needed, _ = wrapper.workspace_size(*offsets, 8, 2, 64, **p.plan_options())
    assert needed >= least > memory.numel()
    wrapper.reset_workspace_buffer(torch.empty(needed, dtype=torch.uint8, device=device))
    plan_ragged(wrapper, p)
    assert is_ahead(wrapper)
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True))
    with pytest.raises(quire.UnsupportedError, match="at least"):
        wrapper.reset_workspace_buffer(torch.empty(least - 4096, dtype=torch.uint8, device=device))
        plan_ragged(wrapper, p)


def test_wrong_pages_are_named(device, dtype):
    """Page numbers on the host are checked, as without a rotation."""
    p = problem(device, dtype)
    cache = p.paged(16)
    wrapper, qo_indptr = paged_wrapper(p, cache, "auto"), torch.tensor(p.qo_indptr, dtype=torch.int32)
    options = {"q_data_type": dtype, "causal": True, "pos_encoding_mode": "ROPE_LLAMA"}
    last = cache.last_page_len.cpu().clone()
    last[0] += 16
    with pytest.raises(quire.ValidationError, match=r"last_page_len: expected 1..page_size=16"):
        wrapper.plan(qo_indptr, cache.indptr.cpu(), cache.indices.cpu(), last, 8, 2, 64, 16, **options)
    last[0] -= 16
    wrapper.plan(qo_indptr, cache.indptr.cpu(), cache.indices.cpu(), last, 8, 2, 64, 16, **options)
    assert is_ahead(wrapper)
    with pytest.raises(quire.ValidationError, match="expected page numbers below num_pages=2"):
        wrapper.run(p.q, tuple(t[:2] for t in cache.kv))


def test_memory_that_is_set_aside():
    memory = torch.empty(4096 + 16, dtype=torch.uint8)
    rest, part = UserWorkspace(memory, "name").set_aside(1000, 0.75, 256)
    assert part.data_ptr() % 256 == 0 and part.numel() == 1000
    assert rest.most_bytes == part.data_ptr() - memory.data_ptr() >= 1024
    assert UserWorkspace(memory, "name").set_aside(3500, 0.75, 256) is None
    own = OwnWorkspace(torch.device("cpu"))
    assert own.set_aside(1 << 20, 0.75, 256)[0] is own


def test_many_keys_are_rotated_out_of_pages(device, dtype):
    """On a GPU a CTA rotates some of them after others."""
    nnz, page_size, num_pages = 30_000, 16, 1876
    pages = [torch.randn(num_pages, page_size, 2, 64).to(dtype).to(device) for _ in range(2)]
    got = [torch.zeros(nnz, 2, 64, dtype=dtype, device=device) for _ in range(2)]
    order = torch.randperm(num_pages).to(torch.int32).to(device)
    position = torch.arange(nnz, dtype=torch.int32, device=device)
    tables = {
        "batch_indices": torch.zeros_like(position), "positions": position, "kv_indices": order,
        "kv_indptr": torch.tensor([0, num_pages], dtype=torch.int32, device=device),
    }  # fmt: skip
    params = RopeParams(
        num_indices=num_pages, batch_size=1, num_pages=num_pages, page_size=page_size,
        **{name: table.data_ptr() for name, table in tables.items()},
    )  # fmt: skip
    angles = Angles(position, None, None, None, False, 1.0, 1e4)
    start("rope_pages", Heads(pages[0], None, got[0], None), Heads(None, pages[1], None, got[1]), None, angles, params)
    k, v = (half[order.long()].flatten(0, 1)[:nnz] for half in pages)
    assert torch.equal(got[0], quire.apply_rope_pos_ids(k, k, position)[0]) and torch.equal(got[1], v)
