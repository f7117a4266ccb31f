"""CUDA-graph mode: one captured call, replayed after each new plan of other lengths.

The CPU has no graphs, but a call there keeps what a graph keeps: the parameter struct of the plan that it was made
with. Running the first plan again after later ones is a replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import quire
from calls import capture, outputs, plan_decode, plan_paged, plan_ragged
from problems import PagedCache, Problem, ints, workspace
from quire.engine import planner, spec
from quire.engine import run as run_module
from quire.engine.run import RunOptions

NUM_PAGES, PAGE_SIZE = 300, 16


def captured(device: str, wrapper: object, call: Callable[[object], object]) -> Callable[[], None]:
    """What replays `call(attention)`, which runs the wrapper's present plan."""
    attention = wrapper._attention
    if device == "cpu":
        return lambda: call(attention)
    call(attention)  # outside of a capture first: this is how a server warms up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(attention)
    return graph.replay


def buffers(device: str, *lengths: int) -> list[Tensor]:
    return [torch.zeros(n, dtype=torch.int32, device=device) for n in lengths]


def cache_of(problem: Problem, num_pages: int, seed: int = 0) -> PagedCache:
    used = sum(-(-n // PAGE_SIZE) for n in problem.kv_lens)
    return problem.paged(PAGE_SIZE, spare=num_pages - used, order_seed=seed)


def options(**more: object) -> dict[str, object]:
    """Arguments of run() that returns the lse, too."""
    return {"return_lse": True, **more}


class PagedReplay:
    """A paged wrapper and one captured call of it on tensors that stay where they are."""

    def __init__(
        self,
        wrapper: object,
        plan: Callable[..., None],
        largest: Problem,
        num_pages: int = NUM_PAGES,
        **options_of_plan,
    ) -> None:
        self.wrapper, self._plan, self._options, self._num_pages = wrapper, plan, options_of_plan, num_pages
        cache = cache_of(largest, num_pages)
        plan(wrapper, largest, cache, plan=options_of_plan)
        self._kv = tuple(torch.zeros_like(t) for t in cache.kv)
        self._q = torch.zeros_like(largest.q)
        self.out, self.lse = outputs(largest)
        run = options(out=self.out, lse=self.lse)
        self._replay = captured(largest.device, wrapper, lambda a: a.run(self._q, self._kv, **run))

    def __call__(self, problem: Problem, seed: int = 0) -> Tensor:
        cache = cache_of(problem, self._num_pages, seed)
        self._plan(self.wrapper, problem, cache, plan=self._options)
        for to, source in zip(self._kv, cache.kv, strict=True):
            to.copy_(source)
        n = problem.q.shape[0]
        self._q[:n] = problem.q
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self._replay()
        problem.check(self.out[:n], self.lse[:n])
        assert self.out[n:].isnan().all()
        return self.out[:n].clone()


def decode_replay(problem: Problem, backend: str, num_pages: int = NUM_PAGES, **plan_options: object) -> PagedReplay:
    indptr, indices, last = buffers(problem.device, len(problem.kv_lens) + 1, num_pages, len(problem.kv_lens))
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(problem.device), indptr, indices, last, backend=backend
    )
    assert wrapper.is_cuda_graph_enabled
    return PagedReplay(wrapper, plan_decode, problem, num_pages, **plan_options)


def prefill_replay(problem: Problem, backend: str, mask_bytes: int = 0, **plan_options: object) -> PagedReplay:
    batch, more = len(problem.kv_lens), {}
    if mask_bytes:
        more["custom_mask_buf"] = torch.zeros(mask_bytes, dtype=torch.uint8, device=problem.device)
        (more["mask_indptr_buf"],) = buffers(problem.device, batch + 1)
    tables = buffers(problem.device, batch + 1, batch + 1, NUM_PAGES, batch)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(
        workspace(problem.device), "NHD", True, *tables, **more, backend=backend
    )
    return PagedReplay(wrapper, plan_paged, problem, **plan_options)


def decode_problem(kv_lens: tuple[int, ...], dtype: torch.dtype, device: str, **more: object) -> Problem:
    more = {"num_qo_heads": 8, "num_kv_heads": 2, **more}
    return Problem((1,) * len(kv_lens), kv_lens, dtype=dtype, device=device, **more)


@pytest.mark.parametrize("more", [{}, {"window_left": 40}, {"soft_cap": 20.0, "head_dim": 128}], ids=str)
def test_decode(device, backend, dtype, more):
    """Captured on the shortest lengths, replayed on others, and on a request without keys."""
    lens = [(1, 1, 1, 1), (50, 9, 3, 70), (1500, 7, 900, 1), (0, 120, 30, 2), (16, 16, 16, 16)]
    replay = decode_replay(decode_problem(lens[0], dtype, device, **more), backend)
    for seed, kv_lens in enumerate(lens):
        replay(decode_problem(kv_lens, dtype, device, seed=seed, **more), seed)


def test_decode_from_16_to_65536_keys(device, backend, dtype):
    """Nothing in a captured call depends on lengths."""
    if device == "cpu" and dtype is not torch.float32:
        pytest.skip("once is enough where it is slow")
    replay = decode_replay(decode_problem((16, 1), dtype, device), backend, 65536 // PAGE_SIZE + 2)
    replay(decode_problem((65536, 5), dtype, device))
    replay(decode_problem((17, 3), dtype, device))


@pytest.mark.parametrize("more", [{"causal": True}, {"causal": True, "window_left": 33}, {"head_dim": 128}], ids=str)
def test_paged_prefill(device, backend, dtype, more):
    """Row counts change too, within those of the first plan."""
    shapes = [((40, 40), (50, 41)), ((1, 79), (300, 700)), ((2, 3), (5, 2000)), ((0, 80), (9, 80)), ((0, 0), (0, 0))]
    replay = prefill_replay(Problem(*shapes[0], dtype=dtype, device=device, **more), backend)
    for seed, shape in enumerate(shapes):
        replay(Problem(*shape, dtype=dtype, device=device, seed=seed, **more), seed)


@pytest.mark.one_type
def test_paged_prefill_with_masks(device, backend, dtype):
    """The bits are copied into the caller's buffer."""
    shapes = [((20, 30), (50, 41)), ((1, 40), (300, 70)), ((2, 3), (5, 200))]
    problems = [Problem(*s, dtype=dtype, device=device, seed=i).random_mask() for i, s in enumerate(shapes)]
    problems.append(Problem((10, 12), (600, 100), dtype=dtype, device=device).block_mask(5))
    replay = prefill_replay(problems[0], backend, mask_bytes=1000)
    for problem in problems:
        replay(problem)
    with pytest.raises(quire.ValidationError, match="custom_mask"):
        replay(Problem((20, 20), (300, 300), dtype=dtype, device=device).random_mask())


def test_ragged_prefill(device, backend, dtype):
    shapes = [((50, 30), (500, 300)), ((80, 0), (100, 700)), ((1, 1), (1, 1))]
    more = {"dtype": dtype, "device": device, "causal": True}
    first = Problem(*shapes[0], **more)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), "NHD", True, *buffers(device, 3, 3), backend=backend
    )
    plan_ragged(wrapper, first)
    q, k, v, out = (torch.zeros_like(t) for t in (first.q, first.k, first.v, first.q))
    replay = captured(device, wrapper, lambda a: a.run(q, (k, v), **options(out=out, return_lse=False)))
    for seed, shape in enumerate(shapes):
        p = Problem(*shape, **more, seed=seed)
        plan_ragged(wrapper, p)
        for to, source in ((q, p.q), (k, p.k), (v, p.v)):
            to[: len(source)] = source
        out.fill_(math.nan)
        replay()
        p.check(out[: len(p.q)])
    for shape in (((50, 31), (5, 5)), ((5, 5), (500, 301))):
        with pytest.raises(quire.ValidationError, match="at most"):
            plan_ragged(wrapper, Problem(*shape, **more))


@pytest.mark.parametrize("plan", [{"fixed_split_size": 256}, {"disable_split_kv": True}], ids=str)
def test_a_replay_does_not_depend_on_neighbours(device, backend, dtype, plan):
    """The promise of fixed splits holds in graphs, bit for bit, whatever partitions a batch."""
    lens = [(700, 9, 3), (700, 2000, 1500), (700, 1, 0)]
    replay = decode_replay(decode_problem(lens[0], dtype, device), backend, **plan)
    results = []
    for kv_lens in lens:
        p = decode_problem(kv_lens, dtype, device)
        p.k[:700], p.v[:700] = (
            decode_problem(lens[0], dtype, device).k[:700],
            decode_problem(lens[0], dtype, device).v[:700],
        )
        results.append(replay(p)[0])
    assert all(torch.equal(r, results[0]) for r in results)


def test_two_replays_agree(device, backend, dtype):
    """A result depends on its plan, not on what was planned and run in between."""
    a, b = decode_problem((900, 33), dtype, device), decode_problem((20, 1200), dtype, device)
    replay = decode_replay(b, backend)
    first = replay(a)
    replay(b)
    assert torch.equal(first, replay(a))


def test_cascade(device, backend, dtype):
    """Each level has buffers of its own."""
    arrays = [buffers(device, *lengths) for lengths in ((2, 3), (2, 3), (64, 64), (1, 2))]
    cascade = quire.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, *arrays, backend=backend)
    shared, own = 64, 30
    p = Problem((5, 7), (shared + own, shared + own), dtype=dtype, device=device, causal=True)
    for t in (p.k, p.v):
        t[shared + own : 2 * shared + own] = t[:shared]
    cache = p.paged(PAGE_SIZE)
    pages = cache.indices
    tables = [
        [ints([0, 12], device), ints([0, 5, 12], device)],
        [ints([0, 4], device), ints([0, 2, 4], device)],
        [pages[:4], torch.cat([pages[4:6], pages[10:12]])],
        [ints([16], device), ints([14, 14], device)],
    ]
    cascade.plan(*tables, p.num_qo_heads, p.num_kv_heads, p.head_dim, PAGE_SIZE, causal=True, q_data_type=dtype)
    out = []
    captured(device, cascade._levels[0], lambda _: out.append(cascade.run(p.q, cache.kv)))()
    p.check(out[-1])


# What a wrapper for graphs refuses


def graph_decode(device: str, batch: int = 2) -> quire.BatchDecodeWithPagedKVCacheWrapper:
    tables = buffers(device, batch + 1, 8, batch)
    return quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *tables)


def test_what_the_first_plan_fixes(device, dtype):
    wrapper = graph_decode(device)
    p = decode_problem((30, 40), dtype, device)
    plan_decode(wrapper, p, p.paged(PAGE_SIZE))
    for changed, word in (
        ({"head_dim": 128}, "head_dim_qk"),
        ({"num_kv_heads": 4}, "num_kv_heads"),
        ({"window_left": 3}, r"logits: expected {'window_left': -1}, which .* got {'window_left': 3}"),
    ):
        other = decode_problem((30, 40), dtype, device, **changed)
        with pytest.raises(quire.PlanError, match=word):
            plan_decode(wrapper, other, other.paged(PAGE_SIZE))
    with pytest.raises(quire.PlanError, match="page_size"):
        plan_decode(wrapper, p, p.paged(8))
    three = decode_problem((3, 4, 5), dtype, device)
    with pytest.raises(quire.ValidationError, match="batch_size=2"):
        plan_decode(wrapper, three, three.paged(PAGE_SIZE))
    long = decode_problem((130, 40), dtype, device)
    with pytest.raises(quire.ValidationError, match="at most 128"):
        plan_decode(wrapper, long, long.paged(PAGE_SIZE))
    with pytest.raises(quire.PlanError, match="reset_workspace_buffer"):
        wrapper.reset_workspace_buffer(workspace(device))
    plan_decode(wrapper, p, p.paged(PAGE_SIZE))  # none of this has broken it
    p.check(wrapper.run(p.q, p.paged(PAGE_SIZE).kv))


def test_more_rows_than_the_first_plan(device, dtype):
    tables = buffers(device, 2, 2, 8, 1)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *tables)
    p, more = Problem((5,), (30,), dtype=dtype, device=device), Problem((6,), (30,), dtype=dtype, device=device)
    plan_paged(wrapper, p, p.paged(PAGE_SIZE))
    with pytest.raises(quire.ValidationError, match="at most 5"):
        plan_paged(wrapper, more, more.paged(PAGE_SIZE))


@pytest.mark.one_type
def test_masks_need_a_buffer(device, dtype):
    tables = buffers(device, 2, 2, 8, 1)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *tables)
    p = Problem((5,), (30,), dtype=dtype, device=device).random_mask()
    with pytest.raises(quire.PlanError, match="custom_mask_buf"):
        plan_paged(wrapper, p, p.paged(PAGE_SIZE))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({0: None}, "paged_kv_indptr_buffer"),
        ({1: None}, "paged_kv_indices_buffer"),
        ({2: torch.zeros(2)}, "paged_kv_last_page_len_buffer"),
        ({0: torch.zeros(5, dtype=torch.int32)}, "one batch size"),
        ({1: torch.zeros(3, 3, dtype=torch.int32)}, "1-D"),
        ({0: torch.zeros(1, dtype=torch.int32), 2: torch.zeros(0, dtype=torch.int32)}, "batch size"),
    ],
    ids=str,
)
def test_buffers_that_are_wrong(change, word):
    tables = buffers("cpu", 3, 8, 2)
    for at, tensor in change.items():
        tables[at] = tensor
    with pytest.raises(quire.ValidationError, match=word):
        quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), *tables)


def test_buffers_without_graphs():
    """They are not needed: a plan owns its arrays. LightLLM gives them all the same."""
    buffer = torch.zeros(3, dtype=torch.int32)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), paged_kv_indptr_buffer=buffer)
    p = decode_problem((30, 40), torch.float32, "cpu")
    plan_decode(wrapper, p, p.paged(PAGE_SIZE))
    p.check(wrapper.run(p.q, p.paged(PAGE_SIZE).kv))
    assert not buffer.any() and wrapper._paged_kv_indptr_buf.tolist() == [0, 2, 5]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_capture_is_checked_whatever_was_run_before(monkeypatch, layout):
    """Keys that do for this batch, and were run before, do not do for a replay after a later plan()."""
    more = {"num_qo_heads": 8, "num_kv_heads": 2, "dtype": torch.float32, "device": "cpu"}
    first, short = Problem((4,), (1000,), **more), Problem((4,), (100,), **more)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), layout, True, *buffers("cpu", 2, 2))
    plan_ragged(wrapper, first)
    plan_ragged(wrapper, short)
    k, v = (t if layout == "NHD" else t.transpose(0, 1) for t in (short.k, short.v))
    short.check(wrapper.run(short.q, k, v))
    monkeypatch.setattr(run_module, "is_capturing", lambda device: True)
    with pytest.raises(quire.ValidationError, match="k: expected at least 1000 tokens"):
        wrapper.run(short.q, k, v)
    long_k, long_v = (t if layout == "NHD" else t.transpose(0, 1) for t in (first.k, first.v))
    with pytest.raises(quire.ValidationError, match="v: expected at least 1000 tokens"):
        wrapper.run(short.q, long_k, v)
    wrapper.run(short.q, long_k, long_v)


def test_a_first_plan_that_fails_late_leaves_nothing(monkeypatch, dtype):
    """The last step of a plan, after its arrays were copied: limits and buffers are those of the next plan."""
    wrapper = graph_decode("cpu")
    p, longer = decode_problem((3, 4), dtype, "cpu"), decode_problem((30, 90), dtype, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(planner, "AttentionPlan", None)
        patch.setattr(spec.GraphState, "keep", lambda *_: (_ for _ in ()).throw(quire.PlanError("injected")))
        with pytest.raises(quire.PlanError, match="injected"):
            plan_decode(wrapper, p, p.paged(PAGE_SIZE))
    wrapper.reset_workspace_buffer(workspace("cpu"))
    plan_decode(wrapper, longer, longer.paged(PAGE_SIZE), plan={"window_left": 40})
    with pytest.raises(quire.QuireError):
        wrapper.reset_workspace_buffer(workspace("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_captures_that_could_not_be_replayed():
    """A plan that owns its arrays, planning itself, and a q shorter than a later batch may be."""
    device, dtype = "cuda:0", torch.float16
    p = decode_problem((30, 40), dtype, device)
    cache = p.paged(PAGE_SIZE)
    eager = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    plan_decode(eager, p, cache, index_device="cpu")
    out = eager.run(p.q, cache.kv)
    indptr, last = cache.indptr.cpu(), cache.last_page_len.cpu()
    tables = buffers(device, 3, 3, 64, 2)
    prefill = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *tables)
    two = Problem((2, 2), (30, 40), num_qo_heads=8, dtype=dtype, device=device)
    plan_paged(prefill, two, two.paged(PAGE_SIZE))
    plan_paged(prefill, p, cache)
    prefill.run(p.q, cache.kv)
    for call, error, word in (
        (lambda: eager.run(p.q, cache.kv, out=out), quire.PlanError, "use_cuda_graph=True"),
        (
            lambda: eager.plan(indptr, cache.indices, last, 8, 2, 64, PAGE_SIZE, q_data_type=dtype),
            quire.PlanError,
            "plan",
        ),
        (lambda: prefill.run(p.q, cache.kv, out=out), quire.ValidationError, "4 rows"),
    ):
        with capture(), pytest.raises(error, match=word):
            call()
    p.check(eager.run(p.q, cache.kv))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kv_len", [5, 3000])  # one CTA, and a merge of many
def test_single_calls_are_captured_with_their_plan(kv_len):
    """Replays follow the tensors; calls between them, whose plans reuse memory, change nothing."""
    p = Problem((7,), (kv_len,), dtype=torch.float16, device="cuda:0", causal=True)
    mask = torch.rand(7, kv_len, device="cuda:0") < 0.5

    def calls() -> tuple[torch.Tensor, ...]:
        return (
            quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=True),
            quire.single_prefill_with_kv_cache(p.q, p.k, p.v, custom_mask=mask),
            quire.single_decode_with_kv_cache(p.q[-1], p.k, p.v),
        )

    calls()  # a capture loads no kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for scale in (1.0, -0.5):
        p.q.mul_(scale)
        want = calls()
        graph.replay()
        assert all(torch.equal(got, right) for got, right in zip(captured, want, strict=True))
    p.check(captured[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_single_calls_leave_nothing_in_the_pool_of_a_graph():
    """torch.compile(mode="reduce-overhead") runs a call in such a pool and looks at what is left."""
    p = Problem((7,), (3000,), dtype=torch.float16, device="cuda:0", causal=True)
    out = quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del out
    quire.single_prefill_with_kv_cache(p.q, p.k, p.v, causal=True)
    quire.single_decode_with_kv_cache(p.q[-1], p.k, p.v)
    assert torch.cuda.memory_allocated() <= before


def test_variants_of_a_graph(device, backend):
    """Masks of a variant are classified anew by each plan(); what it reads lies where the capture found it."""
    variant = quire.Variant(
        lambda score, head, gain: score * gain[head],
        lambda kv_idx, request, prefix: kv_idx < prefix[request], tensors={"gain": "float32", "prefix": "int32"},
    )  # fmt: skip
    gain, prefix = torch.rand(4, device=device), torch.tensor([70, 9], dtype=torch.int32, device=device)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, *buffers(device, 3, 3, NUM_PAGES, 2), backend=backend, variant=variant
    )

    def plan(
        qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], seed: int, prefix: Tensor
    ) -> tuple[Problem, PagedCache]:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        p = Problem(qo_lens, kv_lens, dtype=dtype, device=device, causal=True)
        cache = cache_of(p, NUM_PAGES, seed)
        plan_paged(wrapper, p, cache, plan={"prefix": prefix})
        return p, cache

    largest, first = plan((40, 7), (300, 70), 0, prefix)
    q, kv, (out, lse) = largest.q.clone(), tuple(t.clone() for t in first.kv), outputs(largest)
    run = options(out=out, lse=lse, options=RunOptions(operands={"gain": gain}))
    replay = captured(device, wrapper, lambda a: a.run(q, kv, **run))
    for seed, lens, told in ((1, ((33, 1), (290, 40)), [200, 33]), (2, ((40, 7), (300, 70)), [5, 70])):
        prefix.copy_(torch.tensor(told, dtype=torch.int32))
        gain.copy_(torch.rand(4))
        p, cache = plan(*lens, seed, prefix)
        for to, source in zip((q[: p.q.shape[0]], *kv), (p.q, *cache.kv), strict=True):
            to.copy_(source)
        replay()
        p.check(
            out[: p.q.shape[0]], lse[: p.q.shape[0]], score=lambda s, at: s * gain.cpu().double()[at.head],
            sees=lambda at, told=told: at.kv_idx < told[at.request],
        )  # fmt: skip
    with pytest.raises(quire.PlanError, match="prefix: expected"):
        plan((3, 1), (290, 40), 3, prefix.clone())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_operands_of_a_captured_score(kind, device, backend):
    """A replay reads a tensor's present values and a number as it was captured; another capture takes another number.

    Prefill has rows for the tall tiles of fa3.
    """
    variant = quire.Variant(
        lambda score, q_idx, kv_idx, head, qo_len, kv_len, bias, gain: (
            score + gain * bias[head, kv_idx - q_idx - kv_len + qo_len + 99]
        ),
        tensors={"bias": "float32"}, scalars={"gain": "float32"},
    )  # fmt: skip
    lens = ((1, 1), (290, 40)) if kind == "decode" else ((700, 5), (700, 70))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    p = Problem(
        *lens, num_qo_heads=8, num_kv_heads=2, head_dim=128, dtype=dtype, device=device, causal=kind != "decode"
    )
    cache, bias = cache_of(p, NUM_PAGES), torch.zeros(8, 100, device=device)
    of_kind, plan, tables = {
        "prefill": (quire.BatchPrefillWithPagedKVCacheWrapper, plan_paged, buffers(device, 3, 3, NUM_PAGES, 2)),
        "decode": (quire.BatchDecodeWithPagedKVCacheWrapper, plan_decode, [False, *buffers(device, 3, NUM_PAGES, 2)]),
    }[kind]
    wrapper = of_kind(workspace(device), "NHD", True, *tables, backend=backend, variant=variant)
    plan(wrapper, p, cache)
    (out, lse), replays = outputs(p), {}
    for gain in (1.0, -2.5):
        run = options(out=out, lse=lse, options=RunOptions(operands={"bias": bias, "gain": gain}))
        replays[gain] = captured(device, wrapper, lambda a, run=run: a.run(p.q, cache.kv, **run))
    for seed, gain in ((1, 1.0), (2, -2.5), (3, 1.0)):
        bias.copy_(torch.randn(8, 100, generator=torch.Generator().manual_seed(seed)))
        out.fill_(math.nan)
        replays[gain]()
        told = bias.cpu().double() * gain
        p.check(out, lse, score=lambda s, at, told=told: s + told[at.head, (at.distance + 99).clamp(0, 99)])
