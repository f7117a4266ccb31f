"""quire.distributed over the GPUs of one machine: decode, its exchange, prefill, full attention, each beside one GPU.

    python benchmarks/distributed.py --ranks 2 --json FILE
    python benchmarks/distributed.py --device cpu --ranks 2 --scale 256    gloo, lengths divided by 64

Each rank is a process with a GPU of its own. Every result is checked before it is timed: against the same call on one
GPU, and both against float64 on sampled rows; an error of more than twice one GPU's (or than one rounding) counts as
wrong, and the exit status is then 1. Times are medians of the slowest rank. What a CUDA graph can hold is timed as one.
Prefills take turns, some calls behind each other; torch's context_parallel is beside them where it runs. A section
that takes longer than --patience ends all ranks; what was found before is in FILE.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import quire
from machine import describe, write_report
from quire.distributed import (
    ContextParallelDecode,
    InOrder,
    Interleave,
    RingAttention,
    Ulysses,
    Zigzag,
    ZigzagPrefill,
    merge_over_ranks,
)

HEADS, HEAD_DIM, PAGE_SIZE = (64, 8), 128, 16
LAUNCHES = 20  #: of a graph
LAYERS = 4  #: of prefill, behind each other; half of them from _LONG tokens on
_LONG = 1 << 16

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

    def seconds_in_turn(self, calls: dict[str, Call], rounds: int, layers: int) -> dict[str, float]:
        """The same of each, in turn: a GPU that has computed for a while is slower than a cool one. What is timed are
        some calls behind each other, as layers of a model are, so that the host is ahead of the GPU.
        """
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self.wait()
                times[name].append(self.slowest(self._once(call, layers)) / layers)
        return {name: statistics.median(found[1:]) for name, found in times.items()}

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
    from quire.distributed.exchange import all_gather, exchange_of, ranks_of

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
    if "all_gather" not in kinds:
        return
    # Beside them: the packed collective alone, without a merge, and results that lie anywhere, as engines have them.
    message = torch.empty(rows * heads * (HEAD_DIM * o.itemsize + 4), dtype=torch.uint8, device=me.device)
    received = message.new_empty(me.size * len(message))
    beside = {
        "collective_alone": lambda: all_gather(received, message),
        "merge_over_ranks": lambda: merge_over_ranks(o, lse, natural_lse=True),
    }
    found |= {f"{name}_us": 1e6 * me.graph_seconds(call) for name, call in beside.items()}


# --- prefill ---------------------------------------------------------------------------------------------------------


@dataclass
class Tokens:
    """Whole sequences, the same on all ranks, and attention to them on one GPU."""

    lens: torch.Tensor
    heads: tuple[int, int]
    causal: bool
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    expected: torch.Tensor

    def verdict(self, o: torch.Tensor, rows: torch.Tensor) -> dict[str, Any]:
        """Of results of some rows, of which those of the last sequence's ends are compared with float64."""
        begin, (q, k, v) = int(self.lens[:-1].sum()), self.qkv
        held = (rows >= begin).nonzero().flatten().tolist()
        found: dict[str, Any] = {}
        if held:  # a rank may have no token of the sequence
            sample = sorted({*held[:1], held[len(held) // 2], *held[-2:]})
            pairs = [(place, int(rows[place])) for place in sample]
            ends = [row + 1 if self.causal else len(q) for _, row in pairs]
            pairs_of = zip(pairs, ends, strict=True)
            truth = torch.stack([exact(q[row], k[begin:end], v[begin:end]) for (_, row), end in pairs_of])
            whole = self.expected[[row for _, row in pairs]]
            found = verdict(error(o[sample], truth), error(whole, truth), o.dtype)
        return {**found, "largest_difference_from_one": _difference(o, self.expected[rows])}


def on_one(me: Rank, lens: torch.Tensor, heads: tuple[int, int], causal: bool) -> Any:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(me.workspace())
    indptr = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()
    wrapper.plan(indptr, indptr, *heads, HEAD_DIM, causal=causal, q_data_type=me.dtype)
    return wrapper


Kind = tuple[Call, torch.Tensor]  #: attention of this rank, and its rows


def zigzag(me: Rank, tokens: Tokens, page_size: int, **options: Any) -> Kind:
    call = ZigzagPrefill(me.workspace(), page_size=page_size, **options)
    call.plan(tokens.lens, *tokens.heads, HEAD_DIM, q_data_type=me.dtype, check_ranks=True)
    rows = call.rows.to(me.device)
    own = tuple(x[rows] for x in tokens.qkv)
    return lambda: call.run(*own), rows


def ring(me: Rank, tokens: Tokens, page_size: int, exchange: str) -> Kind:
    """Causal in zigzag, else in order."""
    layout: Any = Zigzag(tokens.lens, me.size, page_size)
    if not tokens.causal:
        layout = InOrder([[int(n) // me.size + (r < n % me.size) for r in range(me.size)] for n in tokens.lens])
    call = RingAttention(me.workspace(), exchange=exchange)
    call.plan(layout, *tokens.heads, HEAD_DIM, causal=tokens.causal, q_data_type=me.dtype, check_ranks=True)
    rows = layout.rows(me.rank).to(me.device)
    own = tuple(x[rows] for x in tokens.qkv)
    return lambda: call.run(*own), rows


def ulysses(me: Rank, tokens: Tokens) -> Kind:
    """Tokens in order, whose heads are exchanged."""
    rows = torch.arange(len(tokens.expected), device=me.device).tensor_split(me.size)
    counts = [len(part) for part in rows]
    exchange = Ulysses(counts)
    by_heads = on_one(me, tokens.lens, (tokens.heads[0] // me.size, tokens.heads[1] // me.size), tokens.causal)
    own = tuple(x[rows[me.rank]] for x in tokens.qkv)
    return lambda: exchange.to_tokens(by_heads.run(*exchange.to_heads(*own))), rows[me.rank]


def of_torch(me: Rank, tokens: Tokens, backend: str, stack: ExitStack) -> Kind:
    """torch.distributed.tensor.experimental.context_parallel, until the stack is left. KV heads are repeated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = tokens.heads[0] // tokens.heads[1]
    q, k, v = (
        x.repeat_interleave(repeats, 1).transpose(0, 1)[None].contiguous()
        for x, repeats in zip(tokens.qkv, (1, group, group), strict=True)
    )
    buffers = [q, k, v]
    mesh = init_device_mesh(me.device.type, (me.size,))
    stack.enter_context(sdpa_kernel([getattr(SDPBackend, backend)]))
    sequences = [2] * len(buffers)
    stack.enter_context(
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=sequences, no_restore_buffers={*buffers})
    )

    def call() -> torch.Tensor:
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=tokens.causal)
        return o[0].transpose(0, 1)

    return call, Zigzag(tokens.lens, me.size, 1).rows(me.rank).to(me.device)


def prefill(
    me: Rank, name: str, lens: torch.Tensor, heads: tuple[int, int], causal: bool, page_size: int, is_timed: bool
) -> None:  # fmt: skip
    """Attention of whole sequences: on one GPU, and over the ranks in all ways."""
    total = int(lens.sum())
    q, k, v = (me.randn(total, count, HEAD_DIM, seed=seed) for seed, count in enumerate((heads[0], *heads[1:] * 2)))
    whole = on_one(me, lens, heads, causal)
    tokens = Tokens(lens, heads, causal, (q, k, v), whole.run(q, k, v))
    found: dict[str, Any] = {"lens": lens.tolist(), "heads": heads, "head_dim": HEAD_DIM, "causal": causal}
    me.results[name] = found
    kinds: dict[str, Callable[[], Kind]] = {
        "ulysses": lambda: ulysses(me, tokens),
        "ring": lambda: ring(me, tokens, page_size, "ring"),
        "ring_all_gather": lambda: ring(me, tokens, page_size, "all_gather"),
    }
    if causal:
        kinds["zigzag"] = lambda: zigzag(me, tokens, page_size)
        kinds["zigzag_two_gathers"] = lambda: zigzag(me, tokens, page_size, num_gathers=2)
    if me.device.type == "cuda":
        kinds["ring_peer_memory"] = lambda: ring(me, tokens, page_size, "peer_memory")
        if causal:
            kinds["zigzag_peer_memory"] = lambda: zigzag(me, tokens, page_size, exchange="peer_memory")
    calls: dict[str, Call] = {"one_gpu": lambda: whole.run(q, k, v)}
    for kind, make in kinds.items():
        calls[kind], rows = make()
        found[kind] = tokens.verdict(calls[kind](), rows)
    if is_timed:
        rounds, layers = (5, LAYERS // 2) if total >= _LONG else (8, LAYERS)
        _tell(found, me.seconds_in_turn(calls, rounds, layers), me.size)
        beside(me, tokens, found, rounds, layers)


def _tell(found: dict[str, Any], seconds: dict[str, float], size: int) -> None:
    found["one_gpu_ms"] = 1e3 * seconds["one_gpu"]
    for kind in seconds.keys() - {"one_gpu"}:
        found[kind] |= {"ms": 1e3 * seconds[kind], "of_ideal": seconds["one_gpu"] / size / seconds[kind]}


def beside(me: Rank, tokens: Tokens, found: dict[str, Any], rounds: int, layers: int) -> None:
    """torch's own, which is no failure of ours where it fails."""
    for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if me.device.type == "cuda" else ():
        told: dict[str, Any] = {}
        found[f"torch_{backend.partition('_')[0].lower()}"] = told
        try:
            with ExitStack() as stack:
                call, rows = of_torch(me, tokens, backend, stack)
                told["largest_difference_from_one"] = _difference(call(), tokens.expected[rows])
                told["ms"] = 1e3 * me.seconds_in_turn({"torch": call}, rounds, layers)["torch"]
                told["of_ideal"] = found["one_gpu_ms"] / me.size / told["ms"]
        except Exception as error:
            told["failed"] = f"{type(error).__name__}: {str(error)[:300]}"


# --- all of it -------------------------------------------------------------------------------------------------------


def sections(me: Rank, kinds: list[str]) -> list[tuple[str, Callable[[], None]]]:
    odd = torch.tensor([133, 1, 17, 3000 // min(me.scale, 8)])
    batches = {"decode-64x32k": torch.full((64,), 32768 // me.scale), "decode": torch.full((8,), 131072 // me.scale)}
    decodes = [
        ("exchange", lambda: exchange(me, kinds)),
        ("decode-odd", lambda: decode(me, "decode-odd", odd, kinds, False)),
        *((name, lambda name=name, lens=lens: decode(me, name, lens, kinds, True)) for name, lens in batches.items()),
    ]
    if kinds == ["peer_memory"]:
        return decodes
    prompts = {
        "prefill-odd": (odd, HEADS, True, 8, False),
        "full-odd": (odd, (24, 24), False, 8, False),
        "prefill-1x32k": (torch.tensor([32768 // me.scale]), (32, 8), True, 128, True),
        "prefill-1x128k": (torch.tensor([131072 // me.scale]), (32, 8), True, 128, True),
        "full-1x75600": (torch.tensor([75600 // me.scale]), (24, 24), False, 128, True),
    }
    return [
        *((name, lambda name=name, case=case: prefill(me, name, *case)) for name, case in prompts.items()), *decodes
    ]  # fmt: skip


def work(rank: int, options: argparse.Namespace, store: str) -> None:
    """What each process does."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    size = options.ranks
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
        device_id=device if cuda else None, timeout=timedelta(seconds=options.patience),
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
        faulthandler.dump_traceback_later(options.patience + 15, exit=True)
        start = time.monotonic()
        try:
            section()
        except Exception:
            me.results[name] = {"failed": traceback.format_exc(), "right": False}
            print(f"rank {rank}: {me.results[name]['failed']}", file=sys.stderr, flush=True)
        faulthandler.cancel_dump_traceback_later()
        if cuda:
            torch.cuda.empty_cache()
        report["seconds"] = {**report.get("seconds", {}), name: round(time.monotonic() - start, 1)}
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
    parser.add_argument(
        "--patience", type=int, default=45, help="seconds after which a rank that does not answer is lost"
    )
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
