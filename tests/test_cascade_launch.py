"""Levels of shared keys in one launch: any tree, against attention over the joined keys."""

from __future__ import annotations

import random
import re

import pytest
import torch

import oracle
import quire
from problems import poisoned, workspace
from test_cascade import joined


def random_tree(seed, num_levels, requests, longest):
    """levels and groups as joined() takes them: each level's entries are runs of neighbouring requests."""
    source = random.Random(seed)
    groups, levels = [], []
    for level in range(num_levels):
        last = level == num_levels - 1
        group, entry = [], 0
        for request in range(requests):
            entry += request > 0 and (last or source.random() < 0.4)
            group.append(int(entry))
        groups.append(tuple(group))
        levels.append(tuple(source.choice([0, 1, source.randint(1, longest)]) for _ in range(group[-1] + 1)))
    return levels, groups


def plan(tree, qo_lens, dtype, device, *, backend="auto", page_size=8, causal=True, memory=None, **more):
    """A planned wrapper, and the plain problem that it stands for."""
    levels, groups = tree
    if causal:  # a level's keys come before all queries, but the last one's
        levels = [*levels[:-1], tuple(n + qo_len for n, qo_len in zip(levels[-1], qo_lens, strict=True))]
    p, tables, cache = joined(levels, groups, qo_lens, dtype, device, causal=causal, page_size=page_size, **more)
    memory = workspace(device) if memory is None else memory
    wrapper = quire.MultiLevelCascadeAttentionWrapper(len(levels), memory, backend=backend)
    columns = [list(c) for c in zip(*tables, strict=True)]
    arguments = (*columns, p.num_qo_heads, p.num_kv_heads, p.head_dim, page_size)
    wrapper.plan(*arguments, causal=causal, q_data_type=dtype)
    return p, cache, wrapper, arguments


def is_one_launch(wrapper):
    told = wrapper.explain()
    if re.search(r"^level by level: .*\n.*attention_decode +\d+ rows .* are more than", told):
        pytest.skip("decode takes a few rows a node")
    if "has to be pinned" in told:
        pytest.skip("before Hopper a kernel is pinned")
    return told.startswith("all levels in one launch")


@pytest.mark.slow
@pytest.mark.parametrize("num_levels", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_any_tree(device, backend, seed, num_levels):
    """Odd lengths, nodes without keys, requests without queries, under a causal mask; NaN wherever no key is."""
    source = random.Random(seed)
    requests = source.randint(2, 9)
    tree = random_tree(seed, num_levels, requests, 150)
    qo_lens = [source.choice([0, 1, 3, source.randint(1, 70)]) for _ in range(requests - 1)] + [1]
    heads = {"num_qo_heads": source.choice([2, 6, 10]), "num_kv_heads": 2}
    p, cache, wrapper, _ = plan(tree, qo_lens, torch.float16, device, backend=backend, causal=seed % 2 == 0, **heads)
    assert is_one_launch(wrapper), wrapper.explain()
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.parametrize("requests", [1, 5, 70])
def test_one_token_a_request(device, backend, dtype, requests):
    """Decode: row tiles of the root hold many requests, whose own row tiles hold a few rows."""
    tree = [(260,), tuple(range(1, requests + 1))], [(0,) * requests, tuple(range(requests))]
    p, cache, wrapper, _ = plan(tree, [1] * requests, dtype, device, backend=backend, causal=False, num_qo_heads=8)
    assert is_one_launch(wrapper), wrapper.explain()
    p.check(wrapper.run(p.q, cache.kv))


def test_lse_and_repeats(device, backend):
    """The merge's lse is that of all levels; a plan runs any number of times with the same bits."""
    tree = random_tree(3, 3, 12, 200)
    p, cache, wrapper, _ = plan(tree, [1] * 12, torch.bfloat16, device, backend=backend)
    assert is_one_launch(wrapper), wrapper.explain()
    o, lse = wrapper._joined.run(p.q, cache.kv, return_lse=True)
    p.check(o, lse)
    for _ in range(5):
        assert torch.equal(wrapper.run(p.q, cache.kv), o)


def test_groups_that_straddle_row_tiles(device, backend):
    """Rows of a request lie in several row tiles of the root, at other places than its own."""
    tree = [(90,), (70, 3, 130)], [(0, 0, 0), (0, 1, 2)]
    p, cache, wrapper, _ = plan(
        tree, [37, 201, 55], torch.float16, device, backend=backend, num_qo_heads=6, num_kv_heads=2
    )
    assert is_one_launch(wrapper)
    p.check(wrapper.run(p.q, cache.kv))


@pytest.mark.slow
def test_soft_cap_and_scale(device, backend):
    tree = random_tree(5, 2, 6, 90)
    p, cache, wrapper, arguments = plan(tree, [2] * 6, torch.float16, device, backend=backend)
    p.soft_cap, p.sm_scale = 8.0, 0.3
    wrapper.plan(*arguments, causal=True, q_data_type=torch.float16, logits_soft_cap=8.0, sm_scale=0.3)
    assert is_one_launch(wrapper)
    p.check(wrapper.run(p.q, cache.kv))


def test_a_plan_that_fails_changes_nothing(device, backend):
    """In one launch as level by level: the last right plan still runs."""
    tree = random_tree(7, 2, 6, 90)
    p, cache, wrapper, arguments = plan(tree, [1] * 6, torch.float16, device, backend=backend)
    before = wrapper.run(p.q, cache.kv)
    broken = [*arguments]
    broken[1] = [arguments[1][0], arguments[1][1].flip(0)]
    with pytest.raises(quire.ValidationError, match="kv_indptr"):
        wrapper.plan(*broken, causal=True, q_data_type=torch.float16)
    assert is_one_launch(wrapper)
    assert torch.equal(wrapper.run(p.q, cache.kv), before)


def test_a_small_workspace_is_level_by_level(device, backend):
    """Where it does not hold the partial results; explain() says why."""
    tree = [(40,), (7, 5)], [(0, 0), (0, 1)]
    memory = torch.empty(1024, dtype=torch.uint8, device=device)
    p, cache, wrapper, _ = plan(tree, [3, 1], torch.float16, device, backend=backend, memory=memory)
    assert not is_one_launch(wrapper)
    assert wrapper.explain().startswith("level by level: float_workspace_buffer")
    p.check(wrapper.run(p.q, cache.kv))


def test_page_numbers_of_another_call_are_not_read(device, backend):
    """Offsets that begin behind 0, as slices of a server's arrays have them."""
    tree = [(40,), (7, 25)], [(0, 0), (0, 1)]
    p, cache, wrapper, arguments = plan(tree, [3, 1], torch.float16, device, backend=backend)
    columns = [list(column) for column in arguments[:4]]
    columns[1] = [indptr + 2 for indptr in columns[1]]
    columns[2] = [torch.cat([pages.new_full((2,), 1 << 28), pages]) for pages in columns[2]]
    wrapper.plan(*columns, *arguments[4:], causal=True, q_data_type=torch.float16)
    assert is_one_launch(wrapper)
    p.check(wrapper.run(p.q, cache.kv))


def test_as_vllm_plans_a_cascade(device, dtype):
    """Two levels, the shared one's arrays on the host, the requests' own on the device, pages in the order HND."""
    levels, groups, qo_lens = [(48,), (9, 40, 16)], [(0, 0, 0), (0, 1, 2)], (1, 7, 2)
    p, tables, cache = joined(levels, groups, qo_lens, dtype, device, causal=True, kv_layout="HND", page_size=16)
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace(device), "HND")
    shared, own = ([t.cpu() for t in tables[0]], tables[1])
    wrapper.plan(
        *([a, b] for a, b in zip(shared, own, strict=True)), p.num_qo_heads, p.num_kv_heads, p.head_dim, 16,
        causal=True, sm_scale=0.2, window_left=-1, logits_soft_cap=None, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    p.sm_scale = 0.2
    assert is_one_launch(wrapper), wrapper.explain()
    p.check(wrapper.run(p.q, torch.stack(cache.kv, 1)))


def shared_and_own(qo_lens, shared, unique, dtype, device, **more):
    """A problem whose requests begin with `shared` keys in tensors, rows of wider ones that hold NaN elsewhere; the
    tables of what each has of its own; and the cache.
    """
    tree = [(shared,), unique], [(0,) * len(unique), tuple(range(len(unique)))]
    p, tables, cache = joined(*tree, qo_lens, dtype, device, **more)
    rows = poisoned((shared + 130, 3, *p.k.shape[1:]), dtype, device)
    rows[:shared, 0], rows[:shared, 2] = p.k[:shared], p.v[:shared]
    return p, tables[1], cache, rows[:shared, 0], rows[:shared, 2]


def is_joined(wrapper, backend):
    """Whether shared and own keys were one launch, which they must be but where another kernel is pinned."""
    told = wrapper.explain()
    if re.search(r"before Hopper|has to be pinned", told) or backend in ("quire:fa2", "quire:decode"):
        pytest.skip("decode and fa2 find all keys in the cache")
    return told.startswith("shared and own keys in one launch")


@pytest.mark.one_type
@pytest.mark.parametrize("shared", [1, 50, 700])
def test_decode_over_shared_tensors_and_pages(device, backend, dtype, shared):
    """Requests of no keys of their own, of one, and of several KV tiles; a plan for each length of the shared keys."""
    unique, heads = (0, 1, 30, 200, 129, 8), {"num_qo_heads": 8, "num_kv_heads": 2}
    p, (_, *tables), cache, k, v = shared_and_own((1,) * 6, shared, unique, dtype, device, causal=False, **heads)
    wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), backend=backend)
    wrapper.begin_forward(*tables, 8, 2, p.head_dim, 8, data_type=dtype)
    for scale in (None, 0.3, None):
        p.sm_scale = scale
        p.check(first := wrapper.forward(p.q, k, v, cache.kv, sm_scale=scale))
        assert torch.equal(wrapper.forward(p.q, k, v, cache.kv, sm_scale=scale), first)
    p.check(wrapper.forward(p.q, k.contiguous(), v.contiguous(), cache.kv))
    assert is_joined(wrapper, backend), wrapper.explain()
    half = wrapper.forward(p.q, k[: shared // 2], v[: shared // 2], cache.kv)
    again = wrapper.forward(p.q, k, v, cache.kv)
    assert not torch.equal(half, again)
    p.check(again)


@pytest.mark.one_type
@pytest.mark.first(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [8, 3])
def test_prefill_over_shared_tensors_and_pages(device, backend, dtype, page_size, causal):
    """Row tiles of the shared keys hold several requests. A causal mask is that of the requests' own keys."""
    qo_lens = (37, 1, 201, 0, 5)
    p, tables, cache, k, v = shared_and_own(
        qo_lens, 333, (37, 5, 300, 4, 131), dtype, device, causal=causal, page_size=page_size, num_qo_heads=6,
        num_kv_heads=2,
    )  # fmt: skip
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), backend=backend)
    wrapper.begin_forward(*tables, 6, 2, p.head_dim, page_size, q_data_type=dtype)
    p.check(wrapper.forward(p.q, k, v, cache.kv, causal=causal))
    if device == "cpu" or page_size % 8 == 0:
        assert is_joined(wrapper, backend), wrapper.explain()


@pytest.mark.slow
def test_shared_tensors_that_are_a_launch_of_their_own(device):
    """Where they cannot be one launch, the result is that of two; explain() says why."""
    dtype = torch.float16
    p, (_, *tables), cache, k, v = shared_and_own((1,) * 3, 50, (9, 1, 30), dtype, device, causal=False)
    small = torch.empty(64, dtype=torch.uint8, device=device)
    for memory, variant, reason in (
        (small, None, "float_workspace_buffer"),
        (workspace(device), quire.Variant(score=lambda score: score * 1.0), "level by level"),
    ):
        wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(memory, variant=variant)
        wrapper.begin_forward(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim, 8, data_type=dtype)
        assert "not planned" in wrapper.explain()
        p.check(wrapper.forward(p.q, k, v, cache.kv))
        assert wrapper.explain().startswith("shared and own keys apart")
        assert reason in wrapper.explain() or "has to be pinned" in wrapper.explain()
    with pytest.raises(quire.ValidationError, match="v_shared: expected 3 dimensions, k_shared's first"):
        wrapper.forward(p.q, k, v[1:], cache.kv)


def test_explain_before_a_plan():
    wrapper = quire.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"))
    with pytest.raises(quire.PlanError, match=r"plan\(\)"):
        wrapper.explain()


def test_a_random_tree_has_what_it_should():
    """The generator of these tests: each request has an entry in each level, and the last level one of its own."""
    levels, groups = random_tree(1, 3, 8, 50)
    assert [len(level) for level in levels] == [group[-1] + 1 for group in groups]
    assert groups[-1] == tuple(range(8)) and oracle.indptr_of([len(level) for level in levels])[-1] > 8
