"""shared_prefix="auto": decode finds the pages that requests share, and is right whatever it finds."""

from __future__ import annotations

import random

import pytest
import torch

import quire
from problems import Problem, workspace
from ptx.impersonated import capability
from quire.engine import joined
from quire.kernels import PIN

PAGE = 4


@pytest.fixture(autouse=True)
def any_sharing_is_worth_it(monkeypatch):
    monkeypatch.setattr(joined, "_START_BYTES", 0)
    monkeypatch.setattr(joined, "_SLOWDOWN", 1.0)


def batch(shared, own, device, dtype=torch.float16, qo_len=1, scale=1):
    """A paged problem whose request i begins with the first shared[i] pages of the request before it."""
    kv_lens = [PAGE * pages + n for pages, n in zip(shared, own, strict=True)]
    p = Problem((qo_len,) * len(own), kv_lens, dtype=dtype, device=device, causal=qo_len > 1, num_qo_heads=6 * scale)
    for i in range(1, len(own)):
        count = min(PAGE * shared[i], kv_lens[i - 1], kv_lens[i])
        here, before = p.kv_indptr[i], p.kv_indptr[i - 1]
        for tensor in (p.k, p.v):
            tensor[here : here + count] = tensor[before : before + count].clone()
    cache = p.paged(PAGE, "NHD", "tuple")
    pages = cache.indices.cpu().clone()
    indptr = cache.indptr.tolist()
    for i in range(1, len(own)):
        count = min(shared[i], kv_lens[i - 1] // PAGE, kv_lens[i] // PAGE)
        pages[indptr[i] : indptr[i] + count] = pages[indptr[i - 1] : indptr[i - 1] + count].clone()
    return p, cache, pages


def plan(p, cache, pages, device, backend, qo_len=1, **more):
    if "cuda" in str(device) and not backend.startswith(PIN) and capability(device) != (9, 0):
        with pytest.raises(quire.UnsupportedError, match="has to be pinned"):
            _plan(p, cache, pages, device, backend, qo_len, **more)
        pytest.skip("before Hopper a kernel is pinned")
    return _plan(p, cache, pages, device, backend, qo_len, **more)


def _plan(p, cache, pages, device, backend, qo_len, **more):
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    wrapper.plan(
        cache.indptr.cpu(), pages, cache.last_page_len.cpu(), p.num_qo_heads, p.num_kv_heads, p.head_dim, PAGE,
        q_data_type=p.dtype, q_len_per_req=qo_len, shared_prefix="auto", **more,
    )  # fmt: skip
    return wrapper


def is_cascade(wrapper):
    return "-cascade" in str(wrapper.explain())


def test_one_prefix(device, backend, dtype):
    p, cache, pages = batch([9] * 7, [1, 4, 3, 17, 2, 8, 5], device, dtype)
    wrapper = plan(p, cache, pages, device, backend)
    assert is_cascade(wrapper)
    p.check(*wrapper.run(p.q, cache.kv, return_lse=True))


@pytest.mark.parametrize("seed", range(8))
def test_any_sharing(device, backend, seed):
    """Runs of any length, requests that share nothing, and requests without keys between them."""
    source = random.Random(seed)
    count, qo_len = source.randint(2, 12), source.choice([1, 1, 3])
    shared = [source.choice([0, 5, 5, 11]) for _ in range(count)]
    own = [source.choice([0, 1, 4, 9, 30]) + qo_len - 1 for _ in range(count)]
    p, cache, pages = batch(shared, own, device, qo_len=qo_len)
    p.check(plan(p, cache, pages, device, backend, qo_len).run(p.q, cache.kv))


def test_nothing_shared_is_plain_decode(device, backend):
    p, cache, _pages = batch([9] * 4, [1, 4, 3, 17], device)
    wrapper = plan(p, cache, cache.indices.cpu(), device, backend)
    assert not is_cascade(wrapper)
    p.check(wrapper.run(p.q, cache.kv))


def test_little_sharing_is_plain_decode(device, backend, monkeypatch):
    monkeypatch.undo()
    p, cache, pages = batch([2] * 3, [40] * 3, device)
    wrapper = plan(p, cache, pages, device, backend)
    assert not is_cascade(wrapper)
    p.check(wrapper.run(p.q, cache.kv))


def test_what_a_cascade_has_not_is_plain_decode(device, backend):
    """Windows, and a workspace that holds no partial results."""
    p, cache, pages = batch([9] * 5, [3] * 5, device)
    p.window_left = 11
    wrapper = plan(p, cache, pages, device, backend, window_left=11)
    assert not is_cascade(wrapper)
    p.check(wrapper.run(p.q, cache.kv))


def test_what_is_wrong_is_said_as_ever(device, backend):
    p, cache, pages = batch([9] * 3, [3] * 3, device)
    with pytest.raises(quire.ValidationError, match="seq_lens"):
        plan(p, cache, pages, device, backend, seq_lens=torch.tensor([39, 39, 38], dtype=torch.int32))
    cache.last_page_len[1] = PAGE + 1
    with pytest.raises(quire.ValidationError, match="last_page_len"):
        plan(p, cache, pages, device, backend)


def test_the_argument_is_checked(device, backend):
    p, cache, pages = batch([9] * 3, [3] * 3, device)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    tables = cache.indptr.cpu(), pages, cache.last_page_len.cpu()
    for wrong in (True, "on", 1):
        with pytest.raises(quire.ValidationError, match="shared_prefix"):
            wrapper.plan(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim, PAGE, shared_prefix=wrong)
