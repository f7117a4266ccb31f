"""workspace_size() is what plan() takes, to the byte."""

from __future__ import annotations

import random
import re

import pytest
import torch

import quire
from problems import ints

GPU_CTAS = 264  #: resident CTAs of a large GPU: with the host's few threads the planner would rarely inputs a tile
BUFFER = torch.empty(256 << 20, dtype=torch.uint8)  # never touched: plans are not run here
HEAD_DIM = 64
LEAST = 16  #: bytes of any workspace


def table(random_: random.Random, lens: list[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, page numbers, last_page_len of a cache in which requests share pages."""
    pages = [-(-n // page_size) for n in lens]
    indptr = [0]
    for count in pages:
        indptr.append(indptr[-1] + count)
    last = [n - (count - 1) * page_size if count else 0 for n, count in zip(lens, pages, strict=True)]
    return ints(indptr, "cpu"), torch.zeros(indptr[-1], dtype=torch.int32), ints(last, "cpu")


def any_problem(random_: random.Random) -> tuple[type, tuple[object, ...], dict[str, object]]:
    """A wrapper, and arguments of its plan()."""
    batch, page_size = random_.choice((1, 1, 2, 3, 7, 40)), random_.choice((1, 8, 16, 64))
    longest = random_.choice((1, 50, 3000, 20_000) if batch < 7 else (1, 50, 500))
    kv_lens = [random_.randint(0, longest) for _ in range(batch)]
    kv_heads = random_.choice((1, 2, 8))
    heads = kv_heads * random_.choice((1, 4, 6)), kv_heads
    options: dict[str, object] = {
        "q_data_type": torch.bfloat16,
        "window_left": random_.choice((-1, -1, 100)),
        **random_.choice(({}, {}, {"fixed_split_size": 1024}, {"disable_split_kv": True})),
    }
    indptr, indices, last = table(random_, kv_lens, page_size)
    if random_.random() < 0.4:
        options["q_len_per_req"] = random_.choice((1, 1, 3))
        arguments = (indptr, indices, last, *heads, HEAD_DIM, page_size)
        return quire.BatchDecodeWithPagedKVCacheWrapper, arguments, options
    qo_indptr = [0]
    for _ in range(batch):
        qo_indptr.append(qo_indptr[-1] + random_.choice((0, 1, 5, 100, 900)))
    options["causal"] = random_.random() < 0.7
    qo = ints(qo_indptr, "cpu")
    if random_.random() < 0.5:
        arguments = (qo, indptr, indices, last, *heads, HEAD_DIM, page_size)
        return quire.BatchPrefillWithPagedKVCacheWrapper, arguments, options
    kv_indptr = [0]
    for n in kv_lens:
        kv_indptr.append(kv_indptr[-1] + n)
    return quire.BatchPrefillWithRaggedKVCacheWrapper, (qo, ints(kv_indptr, "cpu"), *heads, HEAD_DIM), options


def check(seed: int) -> int:
    """So many bytes do, and with one less fewer partitions are planned; returns how many."""
    kind, arguments, options = any_problem(random.Random(seed))
    wrapper = kind(BUFFER)
    float_bytes, int_bytes = wrapper.workspace_size(*arguments, **options)
    assert int_bytes > 0 and float_bytes > 0
    with pytest.raises(quire.PlanError):  # looking at a plan is not planning
        wrapper.explain()
    wrapper.reset_workspace_buffer(BUFFER[:float_bytes])
    wrapper.plan(*arguments, **options)
    assert "workspace" not in wrapper.explain()
    if float_bytes > LEAST:
        wrapper.reset_workspace_buffer(BUFFER[: float_bytes - 1])
        check_one_byte_less(wrapper, arguments, options, float_bytes)
    return float_bytes


def check_one_byte_less(wrapper: object, arguments: tuple[object, ...], options: dict, float_bytes: int) -> None:
    """Splits that the caller has fixed are all needed, or a result would depend on the workspace."""
    if "fixed_split_size" in options:
        with pytest.raises(quire.ValidationError, match=f"at least {float_bytes} bytes"):
            wrapper.plan(*arguments, **options)
        return
    wrapper.plan(*arguments, **options)
    said = re.search(r"(\d+) bytes hold .* of (\d+) partitions, .* reserve (\d+) bytes", wrapper.explain())
    assert [int(n) for n in said.groups()] == [float_bytes - 1, int(said[2]), float_bytes]
    assert int(said[2]) < GPU_CTAS


@pytest.mark.slow
def test_exactly_what_is_needed(monkeypatch):
    monkeypatch.setattr("quire.engine.planner.get_num_threads", lambda: GPU_CTAS)
    needs = [check(seed) for seed in range(1_500)]
    assert sum(need > LEAST for need in needs) > 150 and len(set(needs)) > 20


def test_for_graphs_too():
    """The size of the first plan holds for every later one."""
    buffers = torch.zeros(3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(BUFFER, "NHD", True, False, *buffers)
    tables = [table(random.Random(0), lens, 16) for lens in ([1, 7], [500, 300])]
    sizes = {wrapper.workspace_size(*t, 8, 2, HEAD_DIM, 16, q_data_type=torch.bfloat16) for t in tables}
    assert len(sizes) == 1
    ((need, _),) = sizes
    assert not buffers[1].any(), "the caller's buffer was written"
    wrapper.reset_workspace_buffer(BUFFER[:need])
    for t in tables:
        wrapper.plan(*t, 8, 2, HEAD_DIM, 16, q_data_type=torch.bfloat16)
    smaller = quire.BatchDecodeWithPagedKVCacheWrapper(BUFFER[: need - 1], "NHD", True, False, *buffers)
    for t in tables:
        smaller.plan(*t, 8, 2, HEAD_DIM, 16, q_data_type=torch.bfloat16)
        assert f"reserve {need} bytes" in smaller.explain()


def test_wrappers_that_share_a_workspace_on_the_cpu_have_memory_of_their_own(monkeypatch):
    """Runs of two wrappers on two threads would write one another's partial results."""
    monkeypatch.setattr("quire.engine.planner.get_num_threads", lambda: GPU_CTAS)
    shared = torch.zeros(64 << 20, dtype=torch.uint8)
    wrappers = [quire.BatchDecodeWithPagedKVCacheWrapper(shared) for _ in range(2)]
    for wrapper in wrappers:
        wrapper.plan(*table(random.Random(0), [3000], 16), 8, 2, HEAD_DIM, 16, q_data_type=torch.float32)
    first, second = (wrapper._workspace.take(1 << 10).data_ptr() for wrapper in wrappers)
    begin, end = shared.data_ptr(), shared.data_ptr() + shared.numel()
    assert first != second and not begin <= first < end and not begin <= second < end
    wrappers[0].run(torch.randn(1, 8, HEAD_DIM), torch.randn(188, 2, 16, 2, HEAD_DIM))
    assert not shared.any()
