"""Functions without a plan(): repeated, on several streams and threads, in captures of CUDA graphs, and what they keep.

The truth of a call is what a thread gets that has never made one: replay.py knows nothing there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import quire
from latents import skips_gaps
from problems import ints, offsets
from quire.compat import flash_attn, flash_mla
from quire.engine import plan_cache, replay

BATCH, HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 8, 2, 64, 16, 6
LENS, Q_LENS = (41, 96, 7, 0), (3, 17, 7, 1)
NUM_PAGES = BATCH * PAGES + 3
DOCUMENTS = torch.arange(96, dtype=torch.int32) // 20


@dataclass(frozen=True)
class Case:
    """One function: tensors to call it with, whose values may change, and the call."""

    name: str
    tensors: Callable[[str, int], list[Tensor]]
    call: Callable[..., Any]


def draw(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + sum(shape))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(shape, generator=generator).to(device, dtype)


def tables(device: str) -> list[Tensor]:
    pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5))[: BATCH * PAGES]
    return [pages.view(BATCH, PAGES).to(device, torch.int32), ints(LENS, device)]


def dense(q_len: int, kv_len: int, batch: int = 1) -> Callable[[str, int], list[Tensor]]:
    def make(device: str, seed: int) -> list[Tensor]:
        shapes = (batch, HEADS, q_len, DIM), (batch, KV_HEADS, kv_len, DIM), (batch, KV_HEADS, kv_len, DIM)
        return [draw(device, *shape, seed=seed + i) for i, shape in enumerate(shapes)]

    return make


def single(device: str, seed: int) -> list[Tensor]:
    shapes = (20, HEADS, DIM), (300, KV_HEADS, DIM), (300, KV_HEADS, DIM)
    return [draw(device, *shape, seed=seed + i) for i, shape in enumerate(shapes)]


def ragged(device: str, seed: int) -> list[Tensor]:
    q = draw(device, sum(Q_LENS) + 2, HEADS, DIM, seed=seed)  # two rows belong to nobody
    k, v = (draw(device, sum(LENS), KV_HEADS, DIM, seed=seed + i) for i in (1, 2))
    return [q, k, v, offsets(Q_LENS, device), offsets(LENS, device)]


def paged(device: str, seed: int) -> list[Tensor]:
    shape = (NUM_PAGES, 2, PAGE, KV_HEADS, DIM)
    return [draw(device, BATCH, HEADS, DIM, seed=seed), draw(device, *shape, seed=seed + 1), *tables(device)]


def context(device: str, seed: int) -> list[Tensor]:
    query = draw(device, sum(Q_LENS), HEADS, DIM, seed=seed)
    return [query, *paged(device, seed)[1:], offsets(Q_LENS, device), offsets(LENS, device)]


def cached(device: str, seed: int) -> list[Tensor]:
    caches = (draw(device, NUM_PAGES, PAGE, KV_HEADS, DIM, seed=seed + i) for i in (1, 2))
    return [draw(device, BATCH, 2, HEADS, DIM, seed=seed), *caches, *tables(device)]


def latents(device: str, seed: int) -> list[Tensor]:
    return [
        draw(device, BATCH, 1, 16, 576, seed=seed),
        draw(device, NUM_PAGES, 64, 1, 576, seed=seed + 1) / 4,
        *tables(device),
    ]


def chosen(device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    indices = torch.randint(-1, NUM_PAGES * 64, (BATCH, 1, 128), generator=generator, dtype=torch.int32)
    return [*latents(device, seed)[:2], indices.to(device)]


def chosen_rows(device: str, seed: int) -> list[Tensor]:
    q, kv, indices = chosen(device, seed)
    return [q[:, 0], kv.flatten(0, 1), indices]


WORKSPACES: dict[str, Tensor] = {}


def scratch(device: torch.device) -> Tensor:
    return WORKSPACES.setdefault(str(device), torch.zeros(32 << 20, dtype=torch.uint8, device=device))


MASKS: dict[Any, Any] = {}


def with_masks(make: Callable[[str, int], list[Tensor]]) -> Callable[[str, int], list[Tensor]]:
    """Also makes the block masks, which no capture can."""

    def made(device: str, seed: int) -> list[Tensor]:
        tensors = make(device, seed)
        for name in ("causal", "documents"):
            mask_of(tensors[0].device, name, tensors[0].shape[2], tensors[1].shape[2])
        return tensors

    return made


def mask_of(device: torch.device, name: str, q_len: int, kv_len: int) -> Any:
    if ("of keys", device) not in MASKS:
        MASKS["of keys", device] = DOCUMENTS.to(device)
    document = MASKS["of keys", device]
    functions = {
        "causal": lambda b, h, i, j: i + (kv_len - q_len) >= j,
        "documents": lambda b, h, i, j: document[i] == document[j],
    }
    key = name, device, q_len, kv_len
    if key not in MASKS:
        MASKS[key] = create_block_mask(functions[name], None, None, q_len, kv_len, device=device)
    return MASKS[key]


def with_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = mask_of(q.device, "documents", 96, 96)
    return quire.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return quire.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], enable_gqa=True)


def causal_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = mask_of(q.device, "causal", q.shape[2], k.shape[2])
    return quire.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def trtllm_decode(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Tensor:
    call = quire.decode.trtllm_batch_decode_with_kv_cache
    return call(q, cache, scratch(q.device), table, lens, PAGE * PAGES, 0.125, 1.0, kv_layout="NHD", **options)


CASES = (
    Case("flex causal", with_masks(dense(40, 96)), causal_flex),
    Case("flex documents", with_masks(dense(96, 96)), with_documents),
    Case("flex bias", lambda device, seed: [*dense(40, 96)(device, seed), torch.rand(HEADS, device=device)], with_bias),
    Case("single_prefill", single, lambda q, k, v: quire.single_prefill_with_kv_cache(q, k, v, causal=True)),
    Case(
        "single_prefill lse", single, lambda q, k, v: quire.single_prefill_with_kv_cache(q, k, v, return_lse=True),
    ),
    Case("single_decode", single, lambda q, k, v: quire.single_decode_with_kv_cache(q[0], k, v)),
    Case("varlen", ragged, lambda q, k, v, a, b: flash_attn.flash_attn_varlen_func(q, k, v, a, b, 17, 96, causal=True)),
    Case("func", dense(40, 96), lambda q, k, v: flash_attn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)))),
    Case(
        "with_kvcache", cached,
        lambda q, k, v, table, lens: flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, block_table=table, causal=True
        ),
    ),
    Case("trtllm decode", paged, trtllm_decode),
    Case("trtllm decode lse", paged, lambda *t: trtllm_decode(*t, return_lse=True)),
    Case(
        "trtllm context", context,
        lambda q, cache, table, lens, a, b: quire.prefill.trtllm_batch_context_with_kv_cache(
            q, cache, scratch(q.device), table, lens, 17, PAGE * PAGES, 0.125, 1.0, BATCH, a, b, kv_layout="NHD"
        ),
    ),
    Case(
        "xqa_batch_decode", paged,
        lambda q, cache, table, lens: quire.xqa_batch_decode_with_kv_cache(
            q, cache, scratch(q.device), table, lens, PAGE * PAGES, 0.125, 1.0
        ),
    ),
    Case("xqa", paged, lambda q, cache, table, lens: quire.xqa(q, cache[:, 0], cache[:, 1], table, lens)),
    Case(
        "flash_mla", latents,
        lambda q, kv, table, lens: flash_mla.flash_mla_with_kvcache(q, kv, table, lens, 512, None, None, 0.07),
    ),
    Case(
    "flash_mla sparse", chosen,
        lambda q, kv, rows: flash_mla.flash_mla_with_kvcache(q, kv, None, None, 512, None, None, 0.07, indices=rows),
    ),
    Case(
        "sparse_fwd", chosen_rows,
        lambda q, kv, indices: flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.07),
    ),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
named = pytest.mark.parametrize("name", BY_NAME)


def parts(result: Any) -> list[Tensor]:
    return [part.clone() for part in (result if isinstance(result, tuple) else (result,)) if part is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(one, other, strict=True))


def fresh(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """What a new thread gets, which has recorded nothing."""

    def run() -> list[Tensor]:
        result = parts(case.call(*tensors))
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        return result

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@named
def test_repeated_calls_give_what_the_first_gives(name, device):
    case = BY_NAME[name]
    kept = []
    for seed in range(5):
        tensors = case.tensors(device, 10 * seed)
        result = case.call(*tensors)
        kept.append((tensors, result, parts(result)))
        assert same(parts(result), fresh(case, tensors)), seed
    for tensors, result, before in kept:  # no call writes results of an earlier one
        assert same(parts(result), before)
        assert same(parts(case.call(*tensors)), before)


@named
def test_the_third_call_is_a_replay(name, device):
    case, calls = BY_NAME[name], []
    tensors = case.tensors(device, 3)

    def counted() -> None:
        for _ in range(2):
            case.call(*tensors)
        run = replay.Replay.__call__
        replay.Replay.__call__ = lambda *args: (calls.append(1), run(*args))[1]
        try:
            case.call(*tensors)
        finally:
            replay.Replay.__call__ = run

    with ThreadPoolExecutor(1) as pool:
        pool.submit(counted).result()
    if device == "cpu":  # some functions plan on the host there, and torch computes with their arguments
        assert len(calls) <= 1
    elif name in ("flash_mla sparse", "sparse_fwd") and not skips_gaps(device):  # torch computes with the indices
        assert not calls
    else:
        assert len(calls) == 1


@named
def test_eight_threads(name, device):
    case = BY_NAME[name]
    many = [case.tensors(device, seed) for seed in range(8)]
    truth = [fresh(case, tensors) for tensors in many]

    def work(i: int) -> bool:
        results = [parts(case.call(*many[i])) for _ in range(3 if device == "cpu" else 6)]
        if device != "cpu":
            torch.cuda.synchronize()
        return all(same(result, truth[i]) for result in results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@named
@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
def test_several_streams(name, count, device):
    if device == "cpu":
        pytest.skip("a CPU has no streams")
    case = BY_NAME[name]
    many = [case.tensors(device, seed) for seed in range(count)]
    truth = [fresh(case, tensors) for tensors in many]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(count)]
    for _ in range(5):
        results = []
        for _ in range(4):
            for tensors, stream in zip(many, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(parts(case.call(*tensors)))
        torch.cuda.synchronize()
        assert all(same(result, truth[i % count]) for i, result in enumerate(results))


def captured(case: Case, tensors: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = case.call(*tensors)
    return graph, result


def replayed(graph: torch.cuda.CUDAGraph, result: Any) -> list[Tensor]:
    graph.replay()
    torch.cuda.synchronize()
    return parts(result)


@named
@pytest.mark.gpu
@pytest.mark.parametrize("eager_calls", [0, 1, 3])
def test_captures(name, eager_calls, device):
    """Before and after eager calls, with other values, and two of them alive."""
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    case = BY_NAME[name]
    first, second = case.tensors(device, 1), case.tensors(device, 50)
    truth = [fresh(case, first), fresh(case, second)]

    def check() -> None:
        for _ in range(eager_calls):
            case.call(*first)
        torch.cuda.synchronize()
        one, other = captured(case, first), captured(case, second)
        for _ in range(2):
            assert same(parts(case.call(*first)), truth[0])
            assert same(replayed(*one), truth[0])
            assert same(replayed(*other), truth[1])
        before = [tensor.clone() for tensor in first]
        for tensor, value in zip(first, second, strict=True):
            tensor.copy_(value)
        assert same(replayed(*one), truth[1])
        assert same(parts(case.call(*first)), truth[1])
        for tensor, value in zip(first, before, strict=True):
            tensor.copy_(value)
        assert same(replayed(*one), truth[0])

    with ThreadPoolExecutor(1) as pool:  # which has recorded nothing
        pool.submit(check).result()


@named
def test_nothing_of_the_caller_is_kept(name, device):
    case = BY_NAME[name]

    def check() -> None:
        for _ in range(4):
            case.call(*case.tensors(device, 2))
        if device != "cpu":
            gc.collect()
            torch.cuda.synchronize()
        before = 0 if device == "cpu" else torch.cuda.memory_allocated()
        tensors = case.tensors(device, 4)
        references = [weakref.ref(tensor) for tensor in tensors]
        for _ in range(3):
            case.call(*tensors)
        del tensors
        if any(reference() is not None for reference in references):  # a cycle may hold them until then
            gc.collect()
        assert [reference() for reference in references] == [None] * len(references)
        if device != "cpu":
            assert torch.cuda.memory_allocated() - before < 1 << 16

    with ThreadPoolExecutor(1) as pool:
        pool.submit(check).result()


def test_a_workspace_is_not_kept(device):
    tensors = paged(device, 0)
    before = 0 if device == "cpu" else torch.cuda.memory_allocated()
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    for _ in range(3):
        quire.decode.trtllm_batch_decode_with_kv_cache(
            tensors[0], tensors[1], workspace, *tensors[2:], PAGE * PAGES, 0.125, 1.0, kv_layout="NHD"
        )
    reference = weakref.ref(workspace)
    del workspace
    gc.collect()
    assert reference() is None
    if device != "cpu":  # where a view of it would keep its memory
        assert torch.cuda.memory_allocated() - before < 32 << 20


def test_what_lies_in_tuples_is_part_of_a_call(device):
    """Its numbers, its types, and the order of its tensors."""
    q, k, v = (tensor[None, :16] for tensor in single(device, 0))
    call = flash_attn.flash_attn_func
    windows = (-1, -1), (3, 0), [2, 0], (True, 0)
    paged_q, cache, *rest = paged(device, 0)
    keys, values = cache.unbind(1)
    workspace, decode = torch.zeros(8 << 20, dtype=torch.uint8, device=device), quire.xqa_batch_decode_with_kv_cache
    orders = (keys, values), (values, keys), [keys, values]

    def attend(function: Callable[..., Tensor], window: Any) -> Tensor:
        return function(q, k, v, window_size=window)

    def attend_pages(function: Callable[..., Tensor], pair: Any) -> Tensor:
        return function(paged_q, pair, workspace, *rest, PAGE * PAGES, 0.125, 1.0, kv_layout="NHD")

    for _ in range(4):
        for window in windows:
            assert torch.equal(attend(call, window), attend(call.__wrapped__, window)), window
        for pair in orders:
            assert torch.equal(attend_pages(decode, pair), attend_pages(decode.__wrapped__, pair))


def test_memory_of_streams_is_bounded():
    """Beyond a number of streams that of the first one is given back, and taken again when it is needed."""
    scratches, cpu = replay._Scratches(), torch.device("cpu")
    held = [scratches.of(cpu, stream) for stream in range(replay._MOST_STREAMS + 2)]
    for scratch in held:
        assert scratches.grow(scratch, 64) == scratch.address != 0
    assert [scratch.num_bytes for scratch in held] == [0, 0] + [64] * replay._MOST_STREAMS
    assert scratches.of(cpu, 0) is held[0]
    scratches.grow(held[0], 128)
    scratches.grow(held[3], 128)
    assert [scratch.num_bytes for scratch in held[:5]] == [128, 0, 0, 128, 64]
    del held, scratch
    assert scratches.of(cpu, 1).num_bytes == 0  # calls that are forgotten keep no memory of streams that have none


def test_lengths_on_the_host_are_compared_by_content(device):
    """Also where torch does not notice that they change."""
    q, k, v, *_ = ragged(device, 0)
    cu_q, cu_k = offsets(Q_LENS, "cpu"), offsets(LENS, "cpu")
    call = flash_attn.flash_attn_varlen_func
    for _ in range(3):
        first = call(q, k, v, cu_q, cu_k, 17, 96)
    cu_k.numpy()[1:] -= 5
    other = call(q, k, v, cu_q, cu_k, 17, 96)
    assert not torch.equal(first, other)
    assert torch.equal(other, call(q, k, v, cu_q.clone(), cu_k.clone(), 17, 96))
    cu_k.numpy()[1:] += 5
    assert torch.equal(call(q, k, v, cu_q, cu_k, 17, 96), first)


@pytest.mark.gpu
def test_lengths_on_a_gpu_are_read_in_each_call(device):
    if device == "cpu":
        pytest.skip("the host plans there")
    q, k, v, cu_q, cu_k = ragged(device, 0)
    call = flash_attn.flash_attn_varlen_func
    want = {}
    for shift in (0, 5):
        want[shift] = call(q, k, v, cu_q.cpu(), cu_k.cpu() - shift * (cu_k.cpu() > 0), 17, 96, causal=True)
    for shift in (0, 5, 0, 5, 0):
        now = cu_k - shift * (cu_k > 0).int()
        got = call(q, k, v, cu_q, now, 17, 96, causal=True)
        assert (got.float() - want[shift].float()).abs().max() < 2e-2


@pytest.mark.parametrize("bad", ["falling", "negative", "too long"])
@pytest.mark.gpu
def test_impossible_lengths_on_a_gpu_are_cut_off(bad, device):
    """They cannot be refused, but nothing is read or written beyond the tensors."""
    if device == "cpu":
        pytest.skip("the host refuses them")
    q, k, v, cu_q, cu_k = ragged(device, 0)
    q_values = {"falling": (0, 9, 3, 20, 28), "negative": (-4, 3, 20, 27, 28), "too long": (0, 3, 20, 2**31 - 1, 5)}[
        bad
    ]
    flash_attn.flash_attn_varlen_func(q, k, v, ints(q_values, device), cu_k, 17, 96)
    k_values = {
        "falling": (0, 90, 30, 140, 144),
        "negative": (-9, 41, 137, 144, 144),
        "too long": (0, 41, 2**31 - 1, 7, 9),
    }
    flash_attn.flash_attn_varlen_func(q, k, v, cu_q, ints(k_values[bad], device), 17, 96, causal=True)
    torch.cuda.synchronize()


def test_a_call_that_computes_with_its_arguments_is_not_replayed(device):
    q, k, v = single(device, 0)
    scale = torch.tensor(0.5)

    @plan_cache.replayed
    def scaled(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        return quire.single_prefill_with_kv_cache.__wrapped__(q * scale.to(q.device), k, v)

    first = scaled(q, k, v, scale)
    for _ in range(3):
        assert torch.equal(scaled(q, k, v, scale), first)
    assert not torch.equal(scaled(q + 1, k, v, scale), first)

    @plan_cache.replayed
    def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return quire.single_prefill_with_kv_cache.__wrapped__(q, k, v).mul_(2)

    plain = quire.single_prefill_with_kv_cache(q, k, v)
    for _ in range(4):
        assert torch.equal(doubled(q, k, v), plain * 2)


def test_arguments_in_one_tensor_are_told_from_others(device):
    q, k, v = single(device, 0)
    both = torch.stack([k, v], 1)
    call = quire.single_prefill_with_kv_cache
    apart = torch.stack([v, k], 1)
    want = call(q, both[:, 0], both[:, 1]), call(q, both[:, 0], apart[:, 1])
    for _ in range(4):
        assert torch.equal(call(q, both[:, 0], both[:, 1]), want[0])
        assert torch.equal(call(q, both[:, 0], apart[:, 1]), want[1])
        assert torch.equal(call(q, both[:, 0], both[:, 0]), call(q, k, k))


def test_functions_are_traced_once_and_again_if_they_change(device, monkeypatch):
    q, k, v = dense(40, 96)(device, 0)
    traces, known = [], quire.attention.flex.Capturing.variant_of
    monkeypatch.setattr(quire.attention.flex.Capturing, "variant_of", lambda *args: (traces.append(1), known(*args))[1])
    limit, bias = 5.0, torch.rand(HEADS, device=device)

    def attend() -> Tensor:
        return quire.flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.tanh(s / limit) * limit + bias[h], enable_gqa=True
        )

    results = [attend() for _ in range(4)]
    assert len(traces) == 1 and all(torch.equal(result, results[0]) for result in results)
    limit = 2.0
    assert not torch.equal(attend(), results[0]) and len(traces) == 2
    bias = bias + 3  # other values, which the trace does not know
    once = attend()
    assert len(traces) == 2
    bias = bias.clone()
    assert torch.equal(attend(), once) and torch.equal(attend(), once)


def test_a_function_that_reads_an_attribute_is_traced_in_each_call(device):
    class Settings:
        width = 4

    settings, (q, k, v) = Settings(), dense(40, 96)(device, 0)

    def attend() -> Tensor:
        return quire.flex_attention(q, k, v, lambda s, b, h, i, j: s * settings.width, enable_gqa=True)

    first = [attend() for _ in range(3)]
    settings.width = 1
    assert not torch.equal(attend(), first[0]) and torch.equal(first[2], first[0])
