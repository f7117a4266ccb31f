"""Attention over rings and meshes of ranks, against the oracle: gloo in two, four and eight processes, NCCL on GPUs."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import oracle
import quire
from problems import any_dtype, ints, offsets, poisoned, workspace
from quire.compat.flash_attn_interface import flash_attn_varlen_func
from quire.distributed import (
    ContextParallelDecode,
    InOrder,
    Interleave,
    MeshAttention,
    RingAttention,
    Ulysses,
    Zigzag,
    ZigzagPrefill,
    merge_over_ranks,
)
from rank_processes import GPUS, GROUPS, Processes, fixture_of_ranks, here

ranks = fixture_of_ranks(GROUPS)


def exchanges() -> list[str]:
    return ["ring", "all_gather", *(["peer_memory"] if here() != "cpu" else [])]


# --- problems --------------------------------------------------------------------------------------------------------


class Sequences:
    """Whole sequences, equal on all ranks; kv_lens: of keys, if they are other tokens."""

    def __init__(
        self, lens: list[int], kv_lens: list[int] | None = None, heads: tuple[int, int] = (12, 3), head_dim: int = 64
    ) -> None:  # fmt: skip
        self.lens, self.kv_lens, self.heads = lens, kv_lens or lens, heads
        self.device, self.dtype = here(), any_dtype(here())
        generator = torch.Generator().manual_seed(5)
        shapes = (sum(lens), heads[0]), (sum(self.kv_lens), heads[1]), (sum(self.kv_lens), heads[1])
        self.q, self.k, self.v = (
            torch.randn(*shape, head_dim, generator=generator).to(self.dtype) for shape in shapes
        )  # fmt: skip
        self.shape = (*heads, head_dim)

    def part(self, rows: torch.Tensor, keys: torch.Tensor | None = None) -> list[torch.Tensor]:
        keys = rows if keys is None else keys
        return [x[at].to(self.device) for x, at in ((self.q, rows), (self.k, keys), (self.v, keys))]

    def check(self, o: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, what: str, **logits: Any) -> None:
        call = self.q, self.k, self.v, oracle.indptr_of(self.lens), oracle.indptr_of(self.kv_lens)
        ref, own = oracle.attention(*call, **logits), oracle.torch_error(*call, **logits)
        oracle.assert_close(o, ref.o[rows], own[rows], what=what)
        oracle.assert_lse_close(lse, ref.lse[rows], magnitude=60.0)


class Mask(NamedTuple):
    """A mask or score: what plan() and run() are told of it, and the oracle."""

    plan: Mapping[str, Any] = MappingProxyType({})
    run: Mapping[str, Any] = MappingProxyType({})
    oracle: Mapping[str, Any] = MappingProxyType({})
    variant: quire.Variant | None = None


def masks(lens: list[int]) -> dict[str, Mask]:
    """All kinds. Tensors are on this rank's device."""
    device = here()
    document = torch.arange(max(lens)) // 17 % 3
    slopes, sinks, bias = quire.get_alibi_slopes(12), torch.randn(12), torch.randn(12)
    window = {"window_left": 11}
    by_head = quire.Variant(score=lambda score, head, bias: score + bias[head], tensors={"bias": "float32"})
    return {
        "full": Mask(),
        "causal": Mask({"causal": True}, oracle={"causal": True}),
        "window": Mask({"causal": True, **window}, oracle={"causal": True, **window}),
        "window both ways": Mask({**window, "sm_scale": 0.3}, oracle={**window, "sm_scale": 0.3}),
        "cap and sinks": Mask(
            {"causal": True, "logits_soft_cap": 3.0}, {"sinks": sinks.to(device)},
            {"causal": True, "soft_cap": 3.0, "sinks": sinks},
        ),
        "alibi": Mask(
            {"causal": True}, {"slopes": slopes.to(device)}, {"causal": True, "pos_encoding_mode": "ALIBI"},
            quire.variants.alibi,
        ),
        "documents": Mask(
            {"documents": document.repeat(len(lens), 1).int().to(device)}, {},
            {"sees": lambda at: document[at.q_idx] == document[at.kv_idx]}, quire.variants.document_mask,
        ),
        "bias of heads": Mask(
            {}, {"bias": bias.to(device)}, {"score": lambda logits, at: logits + bias[at.head]}, by_head
        ),
    }  # fmt: skip


# --- rings -----------------------------------------------------------------------------------------------------------


def in_order(lens: list[int], size: int) -> InOrder:
    """Any lengths per rank: one rank has none of the first sequence, one has all of the last."""
    generator = torch.Generator().manual_seed(len(lens))
    rows = []
    for n in lens[:-1]:
        cuts = torch.randint(0, n + 1, (size - 1,), generator=generator).sort().values.tolist()
        cuts[0] = 0
        rows.append([b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)])
    return InOrder([*rows, [0] * (size - 1) + [lens[-1]]])


def check_ring(layout: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lens = [133, 40, 7]
    sequences = Sequences(lens)
    where: Any = in_order(lens, size) if layout == "in order" else Zigzag(torch.tensor(lens), size, 8)
    rows = where.rows(rank)
    for name, mask in masks(lens).items():
        for exchange in exchanges():
            ring = RingAttention(workspace(here()), exchange=exchange, variant=mask.variant)
            ring.plan(where, *sequences.shape, q_data_type=sequences.dtype, check_ranks=True, **mask.plan)
            o, lse = ring.run(*sequences.part(rows), return_lse=True, **mask.run)
            sequences.check(o, lse, rows, f"{name}, {exchange}, rank {rank}", **mask.oracle)
            assert torch.equal(ring.run(*sequences.part(rows), **mask.run), o), "a second run"


@pytest.mark.parametrize("layout", ["in order", "zigzag"])
def test_ring(ranks: Processes, layout: str) -> None:
    ranks.run(check_ring, layout)


def check_cross() -> None:
    """Queries and keys that are other tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sequences = Sequences([30, 9], [77, 20])
    layout, keys = in_order([30, 9], size), in_order([77, 20], size)
    rows, tokens = layout.rows(rank), keys.rows(rank)
    for causal in (False, True):
        ring = RingAttention(workspace(here()))
        ring.plan(layout, *sequences.shape, kv_layout=keys, causal=causal, q_data_type=sequences.dtype)
        o, lse = ring.run(*sequences.part(rows, tokens), return_lse=True)
        sequences.check(o, lse, rows, f"causal={causal}", causal=causal)


def test_keys_of_other_tokens(ranks: Processes) -> None:
    ranks.run(check_cross)


def check_8_bits() -> None:
    """Keys and values of 8 bits as they are, and 16 or 32 bits that are rounded for the way alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    e4m3, lens = torch.float8_e4m3fn, [90, 40]
    layout = in_order(lens, size)
    rows = layout.rows(rank)
    sequences = Sequences(lens)
    k, v = (x.to(e4m3) for x in (sequences.k, sequences.v))
    ring = RingAttention(workspace(here()))
    ring.plan(layout, *sequences.shape, q_data_type=sequences.dtype, kv_data_type=e4m3, causal=True)
    own = (x[rows].to(here()) for x in (sequences.q, k, v))
    o, lse = ring.run(*own, k_scale=0.5, v_scale=2.0, return_lse=True)
    sequences.k, sequences.v = (x.to(sequences.dtype) for x in (k, v))
    sequences.check(o, lse, rows, "as they are", causal=True, sm_scale=0.5 / 8, v_scale=2.0)
    for dtype in (e4m3, torch.float8_e5m2):
        sequences = Sequences(lens)
        ring = RingAttention(workspace(here()), sent_as=dtype)
        ring.plan(layout, *sequences.shape, q_data_type=sequences.dtype)
        o, lse = ring.run(*sequences.part(rows), return_lse=True)
        for other in set(range(size)) - {rank}:
            for x in (sequences.k, sequences.v):
                x[layout.rows(other)] = _rounded(x[layout.rows(other)], dtype)
        sequences.check(o, lse, rows, f"sent as {dtype}")


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To 8 bits, with the largest number of each head as the type's largest."""
    if not len(x):
        return x
    factors = x.abs().amax((0, 2)).float().clamp(min=2.0**-100)[:, None] / torch.finfo(dtype).max
    return ((x / factors).to(dtype).float() * factors).to(x.dtype)


def test_8_bits_on_the_wire(ranks: Processes) -> None:
    ranks.run(check_8_bits)


# --- meshes ----------------------------------------------------------------------------------------------------------


def check_mesh(around: int, across: int) -> None:
    names = ("ring", "ulysses")
    mesh = init_device_mesh("cpu" if here() == "cpu" else "cuda", (around, across), mesh_dim_names=names)
    lens = [133, 40]
    sequences = Sequences(lens, heads=(12 if across < 8 else 24, 3 if across == 1 else max(1, across // 2)))
    cases = [(InOrder([[n // 8] * 3 + [n - n // 8 * 3] for n in lens] if around * across == 4 else
                      [[n] + [0] * (around * across - 1) for n in lens]), "tokens of all ranks"),
             (in_order(lens, around) if around > 1 else InOrder([[n] for n in lens]), "tokens of the ring"),
             (Zigzag(torch.tensor(lens), around, 4), "zigzag")]  # fmt: skip
    kinds = masks(lens)
    if sequences.heads[0] != 12:
        kinds = {name: kinds[name] for name in ("full", "causal", "window", "documents")}
    for layout, what in cases:
        for name, mask in kinds.items():
            attention = MeshAttention(workspace(here()), mesh, variant=mask.variant)
            attention.plan(layout, *sequences.shape, q_data_type=sequences.dtype, check_ranks=True, **mask.plan)
            rows = attention.rows
            o, lse = attention.run(*sequences.part(rows), return_lse=True, **mask.run)
            sequences.check(o, lse, rows, f"{what}, {name}", **mask.oracle)


@pytest.mark.parametrize("ulysses", ["all", "half"])
def test_mesh(ranks: Processes, ulysses: str) -> None:
    """With "all" ranks in Ulysses there are fewer KV heads than ranks."""
    size = len(ranks._processes)
    across = size if ulysses == "all" else size // 2
    ranks.run(check_mesh, size // across, across)


def check_mesh_of_one_dimension() -> None:
    size = dist.get_world_size()
    sequences, kind = Sequences([50]), "cpu" if here() == "cpu" else "cuda"
    for names in (None, ("cp",)):
        mesh = init_device_mesh(kind, (size,), mesh_dim_names=names)
        attention = MeshAttention(workspace(here()), mesh)
        attention.plan(InOrder([50 - 2 * (size - 1)] + [2] * (size - 1)), *sequences.shape, q_data_type=sequences.dtype)
        rows = attention.rows
        sequences.check(*attention.run(*sequences.part(rows), return_lse=True), rows, str(names))
    wrong = init_device_mesh(kind, (size, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(quire.ValidationError, match='mesh: expected dimensions "ring" and "ulysses"'):
        MeshAttention(workspace(here()), wrong)


def test_a_mesh_of_one_dimension_is_a_ring(ranks: Processes) -> None:
    ranks.run(check_mesh_of_one_dimension)


# --- decode as engines call it ---------------------------------------------------------------------------------------


class Shards:
    """Caches of requests whose tokens are dealt to ranks in turn, as vLLM does."""

    def __init__(self, kv_lens: list[int], q_len: int, heads: tuple[int, int] = (8, 2)) -> None:
        self.whole = Sequences([q_len] * len(kv_lens), kv_lens, heads)
        self.own = Interleave(1, dist.get_rank(), dist.get_world_size())
        device, dtype, tokens = here(), self.whole.dtype, max(kv_lens)
        self.lens = self.own.lengths(ints(kv_lens, "cpu"))
        self.total = ints(kv_lens, device)
        pages = poisoned((len(kv_lens), 2, tokens, heads[1], 64), dtype, "cpu")
        for i, begin in enumerate(oracle.indptr_of(kv_lens)[:-1]):
            held = torch.arange(kv_lens[i])[self.own.holds(torch.arange(kv_lens[i]))] + begin
            pages[i, 0, : len(held)], pages[i, 1, : len(held)] = self.whole.k[held], self.whole.v[held]
        self.cache = pages.to(device)
        self.table = torch.arange(len(kv_lens), dtype=torch.int32, device=device)[:, None]
        self.q = self.whole.q.to(device)
        self.cu_q = offsets([q_len] * len(kv_lens), device)

    def of_flash_attention(self, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of this rank's keys: the natural logarithm, [rows, heads]."""
        o, lse = flash_attn_varlen_func(
            self.q, self.cache[:, 0], self.cache[:, 1], cu_seqlens_q=self.cu_q, max_seqlen_q=q_len,
            seqused_k=self.lens.to(here()), block_table=self.table, causal=True, return_softmax_lse=True,
            cp_world_size=self.own.num_ranks, cp_rank=self.own.rank, cp_tot_seqused_k=self.total,
        )  # fmt: skip
        return o, lse.t().contiguous()

    def check(self, o: torch.Tensor, lse: torch.Tensor, exchange: str) -> None:
        call = (
            self.whole.q, self.whole.k, self.whole.v, oracle.indptr_of(self.whole.lens),
            oracle.indptr_of(self.whole.kv_lens),
        )  # fmt: skip
        ref, own = oracle.attention(*call, causal=True), oracle.torch_error(*call, causal=True)
        part = self.whole.heads[0] // self.own.num_ranks
        heads = slice(part * self.own.rank, part * (self.own.rank + 1)) if exchange != "all_gather" else slice(None)
        oracle.assert_close(o, ref.o[:, heads], own[:, heads], what=exchange)
        oracle.assert_lse_close(lse, ref.lse[:, heads], magnitude=60.0)


def check_engines(q_len: int) -> None:
    """Requests of fewer tokens than ranks leave shards empty."""
    shards = Shards([q_len, 133, q_len + 1, 40], q_len)
    for exchange in ("all_to_all", "all_gather"):
        o, lse = merge_over_ranks(*shards.of_flash_attention(q_len), exchange=exchange, natural_lse=True)
        shards.check(o, lse / math.log(2), exchange)
    if q_len > 1:
        return
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(here()))
    counts = (shards.lens > 0).int()
    held = shards.table[:, 0].cpu()[counts > 0]
    indptr = offsets(counts.tolist())
    page_size = shards.cache.shape[2]
    wrapper.plan(
        indptr, held, shards.lens.int().clamp(min=1), *shards.whole.heads, 64, page_size,
        q_data_type=shards.whole.dtype,
    )  # fmt: skip
    o, lse = wrapper.run(shards.q, shards.cache, return_lse=True)
    shards.check(*merge_over_ranks(o, lse), "all_to_all")


@pytest.mark.parametrize("q_len", [1, 3])
def test_decode_as_engines_call_it(ranks: Processes, q_len: int) -> None:
    ranks.run(check_engines, q_len)


def check_graph(exchange: str) -> None:
    """Decode in a CUDA graph, whose lengths change between replays, down to empty shards."""
    batch, page_size, longest, device = 4, 16, 300, here()
    shape = 8, 2, 64, page_size
    pages = batch * -(-longest // page_size)
    buffers = (torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, pages, batch))
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    call = ContextParallelDecode(wrapper, exchange=exchange)
    cache = torch.empty(pages, 2, page_size, 2, 64, dtype=torch.bfloat16, device=device)
    graph, q, o = None, torch.empty(batch, 8, 64, dtype=torch.bfloat16, device=device), None
    for kv_lens in ([longest] * batch, [1, 133, 2, 40], [1] * batch):
        whole = Sequences([1] * batch, kv_lens, (8, 2))
        here_lens = call.interleave.lengths(torch.tensor(kv_lens))
        counts = -(-here_lens // page_size)
        call.plan(ints(kv_lens, "cpu"), offsets(counts.tolist()), torch.arange(int(counts.sum())).int(), *shape,
                  q_data_type=torch.bfloat16)  # fmt: skip
        q.copy_(whole.q), cache.fill_(math.nan)
        first = 0
        for i, begin in enumerate(oracle.indptr_of(kv_lens)[:-1]):
            positions = torch.arange(kv_lens[i])
            held = positions[call.interleave.holds(positions)] + begin
            for keys in held.split(page_size) if len(held) else ():
                cache[first, :, : len(keys)] = torch.stack([whole.k[keys], whole.v[keys]]).to(device)
                first += 1
        if graph is None:
            call.run(q, cache)
            torch.cuda.synchronize(), dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events
                o, lse = call.run(q, cache, return_lse=True)
        graph.replay()
        part = 8 // dist.get_world_size()
        heads = slice(None) if exchange == "all_gather" else slice(part * dist.get_rank(), part * (dist.get_rank() + 1))
        exact = whole.q, whole.k, whole.v, oracle.indptr_of(whole.lens), oracle.indptr_of(kv_lens)
        ref, own = oracle.attention(*exact), oracle.torch_error(*exact)
        oracle.assert_close(o, ref.o[:, heads], own[:, heads], what=f"{kv_lens}")
        oracle.assert_lse_close(lse, ref.lse[:, heads], magnitude=60.0)
        torch.cuda.synchronize(), dist.barrier()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather", "peer_memory"])
def test_decode_in_a_graph(exchange: str) -> None:
    processes = Processes(2, "nccl")
    processes.run(check_graph, exchange)
    processes.close()


def check_engines_in_a_graph() -> None:
    """FlashAttention-3's call with cp_tot_seqused_k, and the merge: lengths are read on the device."""
    device = here()
    first = Shards([300, 133, 70, 40], 3)
    first.of_flash_attention(3)
    lens = first.lens.to(device)
    q, cache, total = first.q, first.cache, first.total
    static = Shards([300, 133, 70, 40], 3)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = flash_attn_varlen_func(
            q, cache[:, 0], cache[:, 1], cu_seqlens_q=static.cu_q, max_seqlen_q=3, seqused_k=lens, max_seqlen_k=300,
            block_table=static.table, causal=True, return_softmax_lse=True, cp_world_size=static.own.num_ranks,
            cp_rank=static.own.rank, cp_tot_seqused_k=total,
        )  # fmt: skip
        return merge_over_ranks(o, lse.t().contiguous(), natural_lse=True)

    call()
    torch.cuda.synchronize(), dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        o, lse = call()
    for kv_lens in ([300, 133, 70, 40], [3, 200, 4, 300]):
        shards = Shards(kv_lens, 3)
        q.copy_(shards.q), total.copy_(shards.total), lens.copy_(shards.lens)
        cache.fill_(math.nan)
        cache[:, :, : shards.cache.shape[2]].copy_(shards.cache)
        graph.replay()
        shards.check(o, lse / math.log(2), "all_to_all")
        torch.cuda.synchronize(), dist.barrier()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_decode_as_engines_capture_it() -> None:
    processes = Processes(2, "nccl")
    processes.run(check_engines_in_a_graph)
    processes.close()


# --- ranks that fail -------------------------------------------------------------------------------------------------


def calls_of_all() -> dict[str, Callable[[], object]]:
    """Each way to exchange, planned."""
    size, sequences = dist.get_world_size(), Sequences([40] * 2)
    even = InOrder([[40 - 5 * (size - 1)] + [5] * (size - 1)] * 2)
    tensors = sequences.part(even.rows(dist.get_rank()))
    calls: dict[str, Callable[[], object]] = {}
    for exchange in ("ring", "all_gather"):
        ring = RingAttention(workspace("cpu"), exchange=exchange)
        ring.plan(even, *sequences.shape, q_data_type=torch.float32)
        calls[f"RingAttention, {exchange}"] = lambda ring=ring: ring.run(*tensors)
    zigzag = ZigzagPrefill(workspace("cpu"), page_size=1)
    zigzag.plan(torch.tensor(sequences.lens), *sequences.shape, q_data_type=torch.float32)
    calls["ZigzagPrefill"] = lambda: zigzag.run(*sequences.part(zigzag.rows))
    calls["Ulysses"] = lambda: Ulysses([4] * size).to_heads(torch.zeros(4, 12, 64))
    for exchange in ("all_to_all", "all_gather"):
        state = torch.zeros(3, 12, 64), torch.zeros(3, 12)
        calls[exchange] = lambda exchange=exchange, state=state: merge_over_ranks(*state, exchange=exchange)
    calls["check_ranks"] = lambda: ring.plan(even, *sequences.shape, q_data_type=torch.float32, check_ranks=True)
    return calls


def check_killed() -> None:
    """Rank 1 dies; the others are told so by each call."""
    calls = calls_of_all()
    for call in calls.values():
        call()
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for name, call in calls.items():
        start = time.monotonic()
        with pytest.raises(quire.RankError, match="cannot reach rank 1:"):
            call()
            raise AssertionError(f"{name} noticed nothing")
        assert time.monotonic() - start < 15, name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named(size: int) -> None:
    processes = Processes(size, seconds=8.0)
    failed = processes.failures(check_killed, patience=60.0)
    processes.close()
    assert failed == {1: "rank 1: has ended"}


def check_late() -> None:
    """Rank 1 comes later than the group waits."""
    calls = calls_of_all()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(6)
        return
    start = time.monotonic()
    with pytest.raises(quire.RankError, match="rank 1"):
        calls["RingAttention, ring"]()
    assert time.monotonic() - start < 6


@pytest.mark.slow
def test_a_late_rank_is_named() -> None:
    processes = Processes(2, seconds=2.0)
    processes.run(check_late)
    processes.close()


def check_killed_on_gpus(exchange: str) -> None:
    sequences, size = Sequences([4096]), dist.get_world_size()
    layout = InOrder([4096 // size] * size)
    ring = RingAttention(workspace(here()), exchange=exchange)
    ring.plan(layout, *sequences.shape, q_data_type=sequences.dtype)
    tensors = sequences.part(layout.rows(dist.get_rank()))
    ring.run(*tensors)
    torch.cuda.synchronize(), dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring.run(*tensors)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("exchange", ["ring", "peer_memory"])
def test_a_killed_rank_of_gpus_ends_the_others(exchange: str) -> None:
    """By an error, or as NCCL's watchdog ends the process, within the group's timeout."""
    start, processes = time.monotonic(), Processes(2, "nccl", seconds=10.0)
    failed = processes.failures(check_killed_on_gpus, exchange, patience=60.0)
    processes.close()
    assert set(failed) == {0, 1} and "has not answered" not in failed[0]
    assert time.monotonic() - start < 90


# --- errors ----------------------------------------------------------------------------------------------------------


def check_errors() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    shape = 12, 3, 64
    even, two = InOrder([4] * size), InOrder([[4] * size] * 2)
    made = partial(RingAttention, workspace("cpu"))
    ring = made()
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (quire.PlanError, r"call plan\(\) first", lambda: ring.run(*torch.zeros(3, 4, 3, 64))),
        (quire.ValidationError, "exchange: expected one of ring", lambda: made(exchange="x")),
        (quire.UnsupportedError, "peer_memory", lambda: made(exchange="peer_memory")),
        (quire.ValidationError, "sent_as: expected", lambda: made(sent_as=torch.int8)),
        (quire.ValidationError, "token_counts: expected", lambda: InOrder([[1, -1]])),
        (quire.ValidationError, "token_counts: expected", lambda: InOrder([1.5, 2])),
        (quire.ValidationError, "layout: expected 1 sequences", lambda: ring.plan(InOrder([4] * (size + 1)), *shape)),
        (quire.ValidationError, "kv_layout: expected", lambda: ring.plan(even, *shape, kv_layout=two)),
        (quire.ValidationError, "window_left", lambda: ring.plan(even, *shape, window_left=-7)),
        (quire.ValidationError, "num_kv_heads", lambda: ring.plan(even, 12, 0, 64)),
        (TypeError, "bias", lambda: ring.plan(even, *shape, bias=3)),
        (quire.ValidationError, "sent_as: expected None, as keys",
         lambda: made(sent_as=torch.float8_e4m3fn).plan(even, *shape, kv_data_type=torch.float8_e4m3fn)),
        (quire.ValidationError, r"tokens: expected the same.*rank 1",
         lambda: ring.plan(InOrder([4 + rank] * size), *shape, check_ranks=True)),
    ]  # fmt: skip
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    ring.plan(even, *shape, q_data_type=torch.float32)
    q, k = torch.zeros(4, 12, 64), torch.zeros(4, 3, 64)
    for name, tensors in {
        "q: expected": (q[:3], k, k),
        "k: expected": (q, k[:, :2], k),
        "v: expected": (q, k, k.half()),
    }.items():
        with pytest.raises(quire.ValidationError, match=name):
            ring.run(*tensors)
    with pytest.raises(quire.ValidationError, match="v_scale"):
        ring.run(q, k, k, v_scale="much")
    of_heads = init_device_mesh("cpu", (size,), mesh_dim_names=("ulysses",))
    biased = MeshAttention(workspace("cpu"), of_heads, variant=masks([4])["bias of heads"].variant)
    biased.plan(even, 12, size, 64, q_data_type=torch.float32)
    with pytest.raises(quire.ValidationError, match="bias: expected at least 12 elements"):
        biased.run(q, q[:, :size], q[:, :size], bias=torch.zeros(12 // size))
    mesh = MeshAttention(workspace("cpu"), of_heads)
    with pytest.raises(quire.PlanError):
        mesh.run(q, k, k)
    with pytest.raises(quire.ValidationError, match="num_qo_heads: expected a multiple"):
        mesh.plan(InOrder([4] * size), 2 * size + 1, 1, 64)
    with pytest.raises(quire.ValidationError, match="layout: expected an InOrder"):
        mesh.plan(Zigzag(torch.tensor([64]), size, 1), 4 * size, 1, 64)


def check_call_after_a_refused_one() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    batch, lens = Sequences([5 * size]), torch.tensor([5 * size])
    zigzag, options = Zigzag(lens, size, 1), {"q_data_type": batch.dtype}
    for exchange in exchanges():
        ring = RingAttention(workspace(batch.device), exchange=exchange)
        ring.plan(zigzag, *batch.shape, causal=True, **options)
        prefill = ZigzagPrefill(
            workspace(batch.device), page_size=1, exchange="all_gather" if exchange == "ring" else exchange
        )
        prefill.plan(lens, *batch.shape, **options)
        q, k, v = batch.part(zigzag.rows(rank))
        for call in (ring.run, prefill.run):
            with pytest.raises(quire.ValidationError, match="sinks: expected"):
                call(q, k + 1, v + 1, sinks=torch.zeros(3, device=batch.device))
            o, lse = call(q, k, v, return_lse=True)
            batch.check(o, lse, zigzag.rows(rank), exchange, causal=True)


def test_a_call_after_a_refused_one(ranks: Processes) -> None:
    """What is refused when messages are under way leaves none of them to the next call."""
    ranks.run(check_call_after_a_refused_one)


def test_errors_name_what() -> None:
    processes = Processes(2)
    processes.run(check_errors)
    processes.close()
