"""A plan knows the tensors that the one before was run on: what a batch changes is checked all the same."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch

import quire
from calls import decode_wrapper, paged_wrapper, plan_paged, plan_ragged, ragged_wrapper
from problems import FORMS, Problem, any_dtype
from quire.engine import tensors
from quire.engine.device import allocator

LENS = (5, 1, 40), (60, 7, 90)


def problem(device: str, dtype: object, seed: int = 0, lens: tuple[tuple[int, ...], ...] = LENS) -> Problem:
    return Problem(*lens, causal=True, device=device, dtype=dtype, seed=seed)


def knows(wrapper: object) -> object:
    """What its plan has of tensors that were checked."""
    return wrapper._attention._checked


@pytest.mark.parametrize("form", FORMS)
def test_other_tensors_of_the_same_signature(device, backend, dtype, form):
    wrapper, known = None, None
    for seed in range(3):
        p = problem(device, dtype, seed)
        cache = p.paged(16, signature=form, spare=2, order_seed=seed)
        wrapper = wrapper or paged_wrapper(p, cache, backend)
        plan_paged(wrapper, p, cache)
        assert known is None or knows(wrapper) is known, "not what the plan before had"
        p.check(wrapper.run(p.q, cache.kv))
        known = known or knows(wrapper)
        assert known and knows(wrapper) is known, "checked again"


def test_another_wrapper_knows_them_too(device, backend):
    """As calls do that plan each time."""
    p = problem(device, any_dtype(device))
    cache, wrappers = p.paged(16), []
    for _ in range(2):
        wrappers.append(paged_wrapper(p, cache, backend))
        plan_paged(wrappers[-1], p, cache)
        p.check(wrappers[-1].run(p.q, cache.kv))
    assert knows(wrappers[0]) is knows(wrappers[1])


def test_other_signatures(device, backend, dtype):
    """In turn, so that a plan always finds what does not fit it."""
    p = problem(device, dtype)
    caches = [p.paged(16, signature=form) for form in FORMS]
    wrapper = paged_wrapper(p, caches[0], backend)
    for cache in caches + caches[::-1]:
        plan_paged(wrapper, p, cache)
        p.check(wrapper.run(p.q, cache.kv))
        p.check(wrapper.run(p.q, cache.kv))


def test_other_rows(device, backend, dtype):
    wrapper = None
    for lens in (LENS, (LENS[0][::-1], LENS[1][::-1]), ((5, 2, 40), LENS[1]), LENS):
        p = problem(device, dtype, lens=lens)
        cache = p.paged(16)
        wrapper = wrapper or paged_wrapper(p, cache, backend)
        plan_paged(wrapper, p, cache)
        p.check(wrapper.run(p.q, cache.kv))
    more = problem(device, dtype, lens=((6, 1, 40), LENS[1]))
    plan_paged(wrapper, more, cache)
    with pytest.raises(quire.ValidationError, match="q: "):
        wrapper.run(p.q, cache.kv)


def test_pages_beyond_the_cache(device, backend):
    """The batch before had none."""
    p = Problem((1, 1), (40, 30), device=device, dtype=any_dtype(device))
    cache = p.paged(16)
    wrapper = decode_wrapper(p, cache, backend)
    indptr, indices, last = (t.cpu() for t in cache.tables())
    plan = partial(wrapper.plan, indptr, indices, last, p.num_qo_heads, p.num_kv_heads, p.head_dim, 16)
    plan(q_data_type=p.dtype)
    p.check(wrapper.run(p.q, cache.kv))
    indices[-1] = cache.kv[0].shape[0]
    plan(q_data_type=p.dtype)
    assert knows(wrapper)
    with pytest.raises(quire.ValidationError, match="paged_kv_indices"):
        wrapper.run(p.q, cache.kv)


def test_fewer_ragged_tokens_than_this_batch_has(device, backend):
    p = problem(device, any_dtype(device))
    wrapper = ragged_wrapper(p, backend)
    plan_ragged(wrapper, p)
    p.check(wrapper.run(p.q, p.k, p.v))
    more = problem(device, any_dtype(device), lens=(LENS[0], (60, 8, 90)))
    plan_ragged(wrapper, more)
    assert knows(wrapper)
    with pytest.raises(quire.ValidationError, match="tokens"):
        wrapper.run(p.q, p.k, p.v)
    more.check(wrapper.run(more.q, more.k, more.v))


def test_a_plan_keeps_the_bits_of_a_mask_and_not_its_bools(device, backend):
    """Which are eight times as many bytes."""
    p = problem(device, any_dtype(device)).random_mask()
    cache = p.paged(16)
    wrapper = paged_wrapper(p, cache, backend)
    mask = p.mask.clone()
    plan_paged(wrapper, p, cache, plan={"custom_mask": mask})
    kept = weakref.ref(mask)
    del mask
    gc.collect()
    assert kept() is None
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.parametrize("change", ["requires_grad", "negated", "freed"])
def test_a_tensor_that_became_unusable_is_seen(change):
    """Its shape and strides are those of the run before."""
    p = problem("cpu", torch.float32)
    cache = p.paged(16)
    wrapper = paged_wrapper(p, cache, "quire:cpu")
    plan_paged(wrapper, p, cache)
    q, out = p.q.clone(), torch.empty_like(p.q)
    p.check(wrapper.run(q, cache.kv, out=out))
    if change == "requires_grad":
        q.requires_grad_()
    elif change == "negated":
        q = torch._neg_view(q)
    else:
        q.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(quire.ValidationError, match="q: "):
            wrapper.run(q, cache.kv, out=out)
    p.check(wrapper.run(p.q, cache.kv, out=out))


@pytest.mark.parametrize("guards", [True, False])
def test_signatures(monkeypatch, guards):
    """Of torch.compile's guards, and as they are compared where torch has none."""
    if not guards:
        monkeypatch.setattr(tensors, "_guards_work", lambda: False)
    x, y = torch.zeros(4, 6), torch.zeros(3, dtype=torch.int32)
    fits = tensors.Signature([x, y]).fits
    assert fits(torch.ones(4, 6), torch.ones(3, dtype=torch.int32))
    with_grad = torch.zeros(4, 6, requires_grad=True)
    for other in (x[:3], x.double(), torch.zeros(6, 4).t(), torch._neg_view(x), with_grad, torch.zeros(4, 6, 1)):
        assert not fits(other, y)
    assert tensors.pointers_of([x, None]) == tensors.pointers_of([x, [0]]) == [0]
    assert tensors.pointers_of([x, y]) == [x.data_ptr(), y.data_ptr()]


def test_a_gradient_that_was_not_asked_for_is_asked_for_later():
    """The first run is under no_grad: what it found right is not right now."""
    p = problem("cpu", torch.float32)
    cache = p.paged(16)
    wrapper = paged_wrapper(p, cache, "quire:cpu")
    plan_paged(wrapper, p, cache)
    q = p.q.clone().requires_grad_()
    with torch.no_grad():
        p.check(wrapper.run(q, cache.kv))
    with pytest.raises(quire.ValidationError, match=r"q: .*grad"):
        wrapper.run(q, cache.kv)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("has_quick", [True, False])
def test_memory_from_torch(has_quick, inference, monkeypatch, device):
    """allocator() gives what torch.empty_strided() gives, also where torch has no quicker function."""
    from torch._C._dynamo import guards

    name = "_empty_strided_cpu" if device == "cpu" else "_empty_strided_cuda"
    if not has_quick:
        monkeypatch.delattr(guards, name)
    where = torch.empty(0, device=device).device
    allocate = allocator.__wrapped__(where)
    with torch.inference_mode(inference):
        made = allocate((2, 0, 3), (9, 3, 1), torch.float32), allocate((4, 5), (1, 4), torch.bfloat16)
        wanted = (
            torch.empty_strided((2, 0, 3), (9, 3, 1), dtype=torch.float32, device=where),
            torch.empty_strided((4, 5), (1, 4), dtype=torch.bfloat16, device=where),
        )
        assert made[1].fill_(1).sum() == 20
    for got, like in zip(made, wanted, strict=True):
        assert (got.shape, got.stride(), got.dtype, got.device) == (like.shape, like.stride(), like.dtype, like.device)
        assert got.is_inference() is inference and not got.requires_grad
        assert got.untyped_storage().nbytes() == like.untyped_storage().nbytes()


@pytest.mark.gpu
def test_memory_from_torch_is_on_the_device_that_is_asked_for(device):
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (0, 1):
        for current in (0, 1):
            with torch.cuda.device(current):
                assert allocator(torch.device("cuda", index))((3,), (1,), torch.int32).get_device() == index
