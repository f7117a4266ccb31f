"""quire.distributed over the GPUs of one machine: decode, its exchange, zigzag prefill, Ulysses, each beside one GPU.

    python benchmarks/distributed.py --ranks 2 --json FILE
    python benchmarks/distributed.py --device cpu --ranks 2 --scale 64     gloo, lengths divided by 64

Each rank is a process with a GPU of its own. Every result is checked before it is timed: against the same call on one
GPU, and both against float64 on sampled rows; an error of more than twice one GPU's (or than one rounding) counts as
wrong, and the exit status is then 1. Times are medians of the slowest rank. What a CUDA graph can hold is timed as one.
Prefills take turns, some calls behind each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import quire
from machine import describe, write_report
from quire.distributed import ContextParallelDecode, Interleave, Ulysses, ZigzagPrefill, merge_over_ranks

HEADS, HEAD_DIM, PAGE_SIZE = (64, 8), 128, 16
LAUNCHES = 20  #: of a graph
LAYERS = 4  #: of prefill, behind each other

Call = Callable[[], Any]


@dataclass
class Rank:
    """This process among the others, and what it has found."""

    rank: int
    size: int
    device: torch.device
    scale: int
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def randn(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """The same numbers on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=self.dtype)

    def workspace(self) -> torch.Tensor:
        return torch.empty(512 << 20 if self.device.type == "cuda" else 64 << 20, dtype=torch.uint8, device=self.device)

    def slowest(self, seconds: float) -> float:
        times = torch.tensor([seconds], device=self.device, dtype=torch.float32)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return float(times)

    def wait(self) -> None:
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, call: Call, rounds: int = 9, launches: int = 1) -> float:
        """Of a launch on the slowest rank: the median."""
        for _ in range(2):
            call()
        times = []
        for _ in range(rounds):
            self.wait()
            times.append(self.slowest(self._once(call)) / launches)
        return statistics.median(times)

    def seconds_in_turn(self, calls: dict[str, Call], rounds: int = 9) -> dict[str, float]:
        """The same of each, in turn: a GPU that has computed for a while is slower than a cool one. What is timed are
        some calls behind each other, as layers of a model are, so that the host is ahead of the GPU.
        """
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self.wait()
                times[name].append(self.slowest(self._once(call, LAYERS)) / LAYERS)
        return {name: statistics.median(found[2:]) for name, found in times.items()}

    def _once(self, call: Call, times: int = 1) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(times):
                call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def graph_seconds(self, call: Call) -> float:
        """The same of a launch inside a CUDA graph of many."""
        if self.device.type == "cpu":
            return self.seconds(call)
        call()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events
            for _ in range(LAUNCHES):
                call()
        found = self.seconds(graph.replay, launches=LAUNCHES)
        self.wait()
        return found


# --- references ------------------------------------------------------------------------------------------------------


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query [num_heads, head_dim] of the kv heads' groups over all keys given, in float64."""
    group = q.shape[0] // k.shape[1]
    logits = torch.einsum("khd,hgd->hgk", k.double(), q.double().unflatten(0, (-1, group))) * q.shape[1] ** -0.5
    return torch.einsum("hgk,khd->hgd", logits.softmax(-1), v.double()).flatten(0, 1)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max()) if a.numel() else 0.0


def verdict(ours: float, one: float, dtype: torch.dtype) -> dict[str, Any]:
    """Errors against float64, of the ranks' result and of one GPU's."""
    rounding = torch.finfo(dtype).eps / 2
    return {"error": ours, "error_of_one": one, "right": ours <= 2 * max(one, rounding)}


# --- decode ----------------------------------------------------------------------------------------------------------


def tables(lens: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """indptr, and shuffled page numbers."""
    counts = -(-lens // PAGE_SIZE)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    order = torch.randperm(int(indptr[-1]), generator=torch.Generator().manual_seed(seed)).int()
    return indptr, order


def decode_wrapper(me: Rank, batch: int, num_pages: int) -> quire.BatchDecodeWithPagedKVCacheWrapper:
    if me.device.type == "cpu":
        return quire.BatchDecodeWithPagedKVCacheWrapper(me.workspace())
    buffers = (torch.zeros(n, dtype=torch.int32, device=me.device) for n in (batch + 1, num_pages, batch))
    return quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(me.workspace(), *buffers)


def local_cache(own: Interleave, whole: torch.Tensor, lens: torch.Tensor, indptr: torch.Tensor, pages: torch.Tensor,
                seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """This rank's pages of `whole`, whose interleaving is by pages: the cache, indptr and page numbers."""
    here = own.lengths(lens)
    indptr_here, order = tables(here, seed)
    cache = torch.full((len(order), *whole.shape[1:]), torch.nan, dtype=whole.dtype, device=whole.device)
    for i in range(len(lens)):
        numbers = pages[int(indptr[i]) + own.rank : int(indptr[i + 1]) : own.num_ranks].long()
        begin = int(indptr_here[i])
        cache[order[begin : begin + len(numbers)].long().to(whole.device)] = whole[numbers.to(whole.device)]
    return cache, indptr_here, order


def decode(me: Rank, name: str, lens: torch.Tensor, kinds: list[str], is_timed: bool) -> None:
    """Of one new token a request: whole cache on one GPU, and spread over the ranks."""
    (num_qo_heads, num_kv_heads), batch = HEADS, len(lens)
    indptr, pages = tables(lens, 1)
    whole = me.randn(len(pages), 2, PAGE_SIZE, num_kv_heads, HEAD_DIM)
    q = me.randn(batch, num_qo_heads, HEAD_DIM, seed=2)
    one = decode_wrapper(me, batch, len(pages))
    shape = num_qo_heads, num_kv_heads, HEAD_DIM, PAGE_SIZE
    one.plan(indptr, pages, ((lens - 1) % PAGE_SIZE + 1).int(), *shape, q_data_type=me.dtype)
    expected = one.run(q, whole)
    part = num_qo_heads // me.size
    mine = slice(part * me.rank, part * (me.rank + 1))
    at = batch - 1  # the request whose result is compared with float64, in this rank's heads
    keys = whole[pages[int(indptr[at]) :].long().to(me.device)].transpose(0, 1).flatten(1, 2)[:, : int(lens[at])]
    groups = slice(num_kv_heads * me.rank // me.size, num_kv_heads * (me.rank + 1) // me.size)
    truth = exact(q[at, mine], keys[0][:, groups], keys[1][:, groups])
    told = {"lens": lens.tolist(), "heads": HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE}
    found = me.results.setdefault(name, told)
    if is_timed and "one_gpu_us" not in found:
        found["one_gpu_us"] = 1e6 * me.graph_seconds(lambda: one.run(q, whole))
    for kind in kinds:
        call = ContextParallelDecode(decode_wrapper(me, batch, len(pages)), interleave_size=PAGE_SIZE, exchange=kind)
        cache, *here = local_cache(call.interleave, whole, lens, indptr, pages, 3)
        call.plan(lens.int(), *here, *shape, q_data_type=me.dtype, check_ranks=True)
        o = call.run(q, cache)
        o = o if o.shape[1] == part else o[:, mine]
        result = verdict(error(o[at], truth), error(expected[at, mine], truth), me.dtype)
        result["largest_difference_from_one"] = _difference(o, expected[:, mine])
        if is_timed:
            result["us"] = 1e6 * me.graph_seconds(lambda call=call, cache=cache: call.run(q, cache))
            result["speedup"] = found["one_gpu_us"] / result["us"]
        found[kind] = result


def exchange(me: Rank, kinds: list[str]) -> None:
    """What a layer adds to attention: exchange and merge of 64 rows of 64 heads, which lie where attention wrote."""
    from quire.distributed.exchange import exchange_of, ranks_of

    rows, heads = 64, 64
    o, lse = me.randn(rows, heads, HEAD_DIM, seed=10 + me.rank), me.randn(rows, heads, seed=30 + me.rank).float()
    truth, _ = merge_over_ranks(o.float(), lse)
    found = me.results.setdefault("exchange", {"rows": rows, "heads": heads, "head_dim": HEAD_DIM})
    for kind in kinds:
        merging = exchange_of(kind, ranks_of(None), rows, heads, HEAD_DIM, me.dtype, me.device)
        own_o, own_lse = merging.results()
        own_o.copy_(o), own_lse.copy_(lse)
        merged, _ = merging.merge(own_o, own_lse)
        part = heads // me.size
        merged = merged if merged.shape[1] == part else merged[:, part * me.rank : part * (me.rank + 1)]
        seconds = me.graph_seconds(lambda merging=merging, a=own_o, b=own_lse: merging.merge(a, b))
        found[kind] = {**verdict(error(merged, truth.double()), 0.0, me.dtype), "us": 1e6 * seconds}


# --- prefill ---------------------------------------------------------------------------------------------------------


def one_gpu(me: Rank, lens: torch.Tensor, heads: tuple[int, int]) -> quire.BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(me.workspace())
    indptr = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()
    wrapper.plan(indptr, indptr, *heads, HEAD_DIM, causal=True, q_data_type=me.dtype)
    return wrapper


def sampled(lens: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[int],
            of: Callable[[int], torch.Tensor]) -> float:  # fmt: skip
    """Error of rows of the last sequence, whose numbers count from its begin."""
    begin = int(lens[:-1].sum())
    pairs = [(of(row), exact(q[begin + row], k[begin : begin + row + 1], v[begin : begin + row + 1])) for row in rows]
    found, truth = (torch.stack(side) for side in zip(*pairs, strict=True))
    return error(found, truth)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def zigzag(me: Rank, lens: torch.Tensor, page_size: int, qkv: Tensors, expected: torch.Tensor, **options: Any
           ) -> tuple[dict[str, Any], Call]:  # fmt: skip
    """What is wrong with it, and what to time."""
    call = ZigzagPrefill(me.workspace(), page_size=page_size, **options)
    call.plan(lens, *HEADS, HEAD_DIM, q_data_type=me.dtype, check_ranks=True)
    rows = call.rows.to(me.device)
    own = tuple(x[rows] for x in qkv)
    o = call.run(*own)
    begin = int(lens[:-1].sum())
    held = (rows >= begin).nonzero().flatten().tolist()
    places = sorted({*held[:2], *held[-2:]})
    sample = [int(rows[place]) - begin for place in places]
    found: dict[str, Any] = {}
    if sample:  # a rank may have no token of the sequence
        ours, one = dict(zip(sample, o[places], strict=True)), expected[begin:]
        errors = (sampled(lens, *qkv, sample, of) for of in (ours.__getitem__, one.__getitem__))
        found = verdict(*errors, me.dtype)
    found["largest_difference_from_one"] = _difference(o, expected[rows])
    return found, lambda: call.run(*own)


def ulysses(me: Rank, lens: torch.Tensor, qkv: Tensors, expected: torch.Tensor) -> tuple[dict[str, Any], Call]:
    """The same of tokens in order, whose heads are exchanged."""
    total = len(expected)
    counts = [total // me.size + (rank < total % me.size) for rank in range(me.size)]
    mine = slice(sum(counts[: me.rank]), sum(counts[: me.rank + 1]))
    exchange, by_heads = Ulysses(counts), one_gpu(me, lens, (HEADS[0] // me.size, HEADS[1] // me.size))
    own = tuple(x[mine] for x in qkv)

    def call() -> torch.Tensor:
        return exchange.to_tokens(by_heads.run(*exchange.to_heads(*own)))

    difference = _difference(call(), expected[mine])
    return {"largest_difference_from_one": difference, "right": difference <= 2**-6}, call


def prefill(me: Rank, name: str, lens: torch.Tensor, page_size: int, is_timed: bool) -> None:
    """Causal attention of whole sequences: zigzag and Ulysses."""
    total = int(lens.sum())
    q, k, v = (me.randn(total, heads, HEAD_DIM, seed=seed) for seed, heads in enumerate((HEADS[0], HEADS[1], HEADS[1])))
    whole = one_gpu(me, lens, HEADS)
    expected = whole.run(q, k, v)
    found: dict[str, Any] = {"lens": lens.tolist(), "heads": HEADS, "head_dim": HEAD_DIM}
    me.results[name] = found
    calls = {
        "zigzag": zigzag(me, lens, page_size, (q, k, v), expected),
        "zigzag_two_gathers": zigzag(me, lens, page_size, (q, k, v), expected, num_gathers=2),
        "ulysses": ulysses(me, lens, (q, k, v), expected),
    }
    if me.device.type == "cuda":
        calls["zigzag_peer_memory"] = zigzag(me, lens, page_size, (q, k, v), expected, exchange="peer_memory")
    found |= {kind: result for kind, (result, _) in calls.items()}
    if is_timed:
        timed = {kind: call for kind, (_, call) in calls.items()}
        seconds = me.seconds_in_turn({"one_gpu": lambda: whole.run(q, k, v), **timed})
        found["one_gpu_ms"] = 1e3 * seconds["one_gpu"]
        for kind in calls:
            found[kind] |= {"ms": 1e3 * seconds[kind], "of_ideal": seconds["one_gpu"] / me.size / seconds[kind]}


# --- all of it -------------------------------------------------------------------------------------------------------


def sections(me: Rank, kinds: list[str]) -> list[tuple[str, Callable[[], None]]]:
    odd, long = torch.tensor([133, 1, 17, 3000 // min(me.scale, 8)]), torch.full((8,), 131072 // me.scale)
    if kinds == ["peer_memory"]:
        return [
            ("exchange", lambda: exchange(me, kinds)),
            ("decode-odd", lambda: decode(me, "decode-odd", odd, kinds, False)),
            ("decode", lambda: decode(me, "decode", long, kinds, True)),
        ]
    return [
        ("decode-odd", lambda: decode(me, "decode-odd", odd, kinds, False)),
        ("prefill-odd", lambda: prefill(me, "prefill-odd", odd, 8, False)),
        ("exchange", lambda: exchange(me, kinds)),
        ("decode", lambda: decode(me, "decode", long, kinds, True)),
        ("prefill-2x16k", lambda: prefill(me, "prefill-2x16k", torch.full((2,), 16384 // me.scale), 128, True)),
        ("prefill-1x32k", lambda: prefill(me, "prefill-1x32k", torch.full((1,), 32768 // me.scale), 128, True)),
    ]


def work(rank: int, options: argparse.Namespace, store: str) -> None:
    """What each process does."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    size = options.ranks
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
        device_id=device if cuda else None,
        pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if cuda else None,
    )  # fmt: skip
    me = Rank(rank, size, device, options.scale)
    report = {**describe(device), "ranks": size, "scale": options.scale, "results": me.results}
    kinds = options.exchanges.split(",")
    last = [kind for kind in kinds if kind == "peer_memory"]  # what a machine may not have
    parts = sections(me, [kind for kind in kinds if kind not in last])
    for name, section in parts + (sections(me, last) if last else []):
        if options.only not in name:
            continue
        try:
            section()
        except Exception:
            me.results[name] = {"failed": traceback.format_exc(), "right": False}
            print(f"rank {rank}: {me.results[name]['failed']}", file=sys.stderr, flush=True)
        if rank == 0:
            write_report(options.json, report)
            print(name, me.results.get(name), flush=True)
    wrong = [name for name, found in me.results.items() if not _is_right(found)]
    print(f"rank {rank}: wrong: {', '.join(wrong) or 'nothing'}", flush=True)
    os._exit(bool(wrong))  # a rank that failed does not wait for the others


def _is_right(found: Any) -> bool:
    return not isinstance(found, dict) or (
        found.get("right", True) and all(_is_right(inner) for inner in found.values())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, default=1, help="divides the lengths that are timed")
    parser.add_argument("--exchanges", help="of all_to_all, all_gather, peer_memory (default: all that the device has)")
    parser.add_argument("--only", default="", help="sections whose name holds this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.exchanges = options.exchanges or (
        "all_to_all,all_gather" + (",peer_memory" if options.device == "cuda" else "")
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, str(Path(folder) / "store")), options.ranks)


if __name__ == "__main__":
    main()
