"""How time, plan() and memory grow with length, batch, heads and page size; and what a full cache costs.

    python benchmarks/scaling.py --json FILE                 on a GPU: lengths to 1 M, batches to 1024
    python benchmarks/scaling.py --device cpu --most-tokens 8192 --entries 200
    python benchmarks/scaling.py --of-ranks benchmarks/results/*x2-distributed.json     no GPU: see below

Bf16 on a GPU, float32 on a cpu, 32 query heads, 8 KV heads, head_dim 128, pages of 16, unless a row says otherwise.
Each point is timed on its own: the median of launches one after another, on the device's clock where there is one;
plan() by the wall clock, of host arrays. Memory is what the wrapper uses of its workspace. Points of more tokens than
--most-tokens, or of more operations than --most-flops, are left out and counted.

--of-ranks computes what attention over 2 to 64 GPUs takes, of a result of distributed.py on two: the program is the
model. Attention takes its time on one GPU, divided by the ranks. Bytes pass at --nvlink GB/s inside of a host and at
--network GB/s a GPU between hosts, in each direction, after --latency microseconds a message; a ring overlaps them with
the attention to the message before, an all-gather with the attention to a rank's own keys, Ulysses with nothing. What
two GPUs took beyond that, for merges, copies, launches and the tails of shorter kernels, is kept: for each step of a
ring, or in proportion to a rank's tokens. So the model is what was measured where there are two ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

import quire
from machine import describe, write_report
from quire import jit
from quire.cli import aot
from quire.jit.store import Store

HEAD_DIM = 128
POWERS = tuple(2**i for i in range(7, 21))  #: 128 to 1 M


class Point(NamedTuple):
    """One measured problem; decode where qo_len is 1, otherwise a causal prefill of kv_len queries."""

    sweep: str
    x: int
    batch: int
    kv_len: int
    heads: tuple[int, int] = (32, 8)
    page_size: int = 16
    qo_len: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.kv_len

    @property
    def flops(self) -> float:
        pairs = self.qo_len * self.kv_len / (2 if self.qo_len > 1 else 1)
        return 4.0 * self.batch * self.heads[0] * pairs * HEAD_DIM


def points() -> Iterator[Point]:
    """All that there are."""
    for length in POWERS:
        yield Point("decode: length, batch 1", length, 1, length)
        yield Point("decode: length, batch 16", length, 16, length)
        yield Point("prefill: length, batch 1", length, 1, length, qo_len=length)
    for batch in (2**i for i in range(11)):
        yield Point("decode: batch, 2048 keys", batch, batch, 2048)
        yield Point("prefill: batch, 512 tokens", batch, batch, 512, qo_len=512)
    for heads in (8, 16, 32, 64, 128):
        yield Point("decode: query heads of 8 KV heads", heads, 16, 8192, (heads, 8))
    for kv_heads in (1, 2, 4, 8, 16, 32):
        yield Point("decode: KV heads of 32 query heads", kv_heads, 16, 8192, (32, kv_heads))
    for page_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield Point("decode: page size", page_size, 16, 8192, page_size=page_size)
        yield Point("prefill: page size", page_size, 2, 4096, page_size=page_size, qo_len=4096)


# --- attention -------------------------------------------------------------------------------------------------------


def _offsets(count: int, step: int) -> torch.Tensor:
    return (torch.arange(count + 1) * step).int()


def measure(point: Point, device: torch.device, dtype: torch.dtype, workspace: torch.Tensor) -> dict[str, Any]:
    """One point: microseconds and bytes."""
    pages = -(-point.kv_len // point.page_size)
    total = point.batch * pages
    cache = torch.randn(total, 2, point.page_size, point.heads[1], HEAD_DIM, dtype=dtype, device=device)
    q = torch.randn(point.batch * point.qo_len, point.heads[0], HEAD_DIM, dtype=dtype, device=device)
    out = torch.empty_like(q)
    tables = _offsets(point.batch, pages), torch.randperm(total).int(), torch.full(
        (point.batch,), point.kv_len - (pages - 1) * point.page_size, dtype=torch.int32
    )  # fmt: skip
    wrapper: Any
    if point.qo_len == 1:
        wrapper, first, mask = quire.BatchDecodeWithPagedKVCacheWrapper(workspace), (), {}
    else:
        wrapper, mask = quire.BatchPrefillWithPagedKVCacheWrapper(workspace), {"causal": True}
        first = (_offsets(point.batch, point.qo_len),)
    arguments = *first, *tables, *point.heads, HEAD_DIM, point.page_size
    options = {"q_data_type": dtype, **mask}
    wrapper.plan(*arguments, **options)
    wrapper.run(q, cache, out=out)
    used = wrapper.workspace_size(*arguments, **options)[0]
    plan_us = _wall_us(lambda: wrapper.plan(*arguments, **options))
    run_us = _run_us(lambda: wrapper.run(q, cache, out=out), device)
    return {
        **point._asdict(), "plan_us": plan_us, "run_us": run_us, "tflops": point.flops / run_us / 1e6,
        "gigabytes_per_s": cache.numel() * cache.element_size() / run_us / 1e3, "workspace_bytes": used,
        "cache_bytes": cache.numel() * cache.element_size(),
    }  # fmt: skip


def _wall_us(call: Callable[[], object], count: int = 15) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def _run_us(call: Callable[[], object], device: torch.device) -> float:
    """The median of single launches, the host ahead of the device."""
    call()
    if device.type == "cpu":
        return _wall_us(call, 5)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    torch.cuda._sleep(1_000_000)
    for event in events:
        event.record()
        call()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def sweep(options: argparse.Namespace, device: torch.device, keep: Callable[[dict[str, Any]], None]) -> int:
    """Measures all points that are allowed; returns how many were left out."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    workspace = torch.empty((512 if cuda else 64) << 20, dtype=torch.uint8, device=device)
    left_out = 0
    for point in points():
        if point.tokens > options.most_tokens or point.flops > options.most_flops or options.only not in point.sweep:
            left_out += 1
            continue
        found = measure(point, device, dtype, workspace)
        keep(found)
        print(f"{point.sweep:36} {point.x:>8}  run {found['run_us']:>10.1f} us  plan {found['plan_us']:>8.1f} us  "
              f"workspace {found['workspace_bytes'] / 2**20:>7.1f} MiB", flush=True)  # fmt: skip
    return left_out


def processor() -> str:
    """The host's, as Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a cpu")


# --- the cache -------------------------------------------------------------------------------------------------------


def fill(root: Path, entries: int) -> str:
    """A store with so many entries, of which one is real: a variant built here. Returns its slug."""
    slug = f"packbits.{jit.host_target()}.any.v1"
    store = Store(root)
    _, entry = jit.build(aot.spec_of(slug), store=store)
    for number in range(entries - 1):
        copy = dataclasses.replace(entry.manifest, slug=f"{slug}.copy{number}")
        place = root / "entries" / copy.slug / entry.path.name
        place.mkdir(parents=True, mode=0o755)
        shutil.copy(entry.artifact, place)
        (place / "manifest.json").write_text(copy.write())
    return slug


def cache(entries: int) -> dict[str, Any]:
    """What is done with a cache of so many entries: lookups, listing, sizes."""
    with tempfile.TemporaryDirectory() as folder:
        slug = fill(Path(folder), entries)
        store, spec = Store(Path(folder)), aot.spec_of(slug)
        assert jit.lookup(spec, store=store) is not None
        found: dict[str, Any] = {"entries": entries, "lookup_us": _wall_us(lambda: jit.lookup(spec, store=store))}
        start = time.perf_counter()
        assert sum(1 for _ in store.manifests()) == entries
        found["manifests_s"] = time.perf_counter() - start
        command = [sys.executable, "-m", "quire", "cache", "list"]
        environment = {**os.environ, "QUIRE_CACHE_DIR": folder}
        start = time.perf_counter()
        listed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        found["list_s"] = time.perf_counter() - start
        assert listed.count(f"{slug}.copy") >= entries - 1
    return found


# --- ranks -----------------------------------------------------------------------------------------------------------


class Links(NamedTuple):
    """Of a GPU, in one direction."""

    nvlink: float  #: GB/s
    network: float  #: GB/s, between hosts
    latency: float  #: microseconds of a message
    gpus_per_host: int = 8

    def neighbour_ms(self, num_bytes: float, ranks: int) -> float:
        """A message to the next rank, of which each host has one at its border."""
        speed = self.nvlink if ranks <= self.gpus_per_host else self.network
        return 1e-3 * self.latency + num_bytes / speed / 1e6

    def all_ms(self, num_bytes: float, ranks: int) -> float:
        """num_bytes from each other rank; those of other hosts come by the network at the same time."""
        near = min(ranks, self.gpus_per_host)
        inside, outside = num_bytes * (near - 1) / self.nvlink, num_bytes * (ranks - near) / self.network
        return 1e-3 * self.latency + max(inside, outside) / 1e6

    def gathered_ms(self, num_bytes: float, ranks: int) -> float:
        """The same if all GPUs of a host want the same bytes, which come to the host once."""
        near = min(ranks, self.gpus_per_host)
        outside = num_bytes * (ranks - near) / (self.network * near)
        return 1e-3 * self.latency + max(num_bytes * (ranks - 1) / self.nvlink, outside) / 1e6


class Prompt(NamedTuple):
    """A measured case of distributed.py."""

    tokens: int
    heads: tuple[int, int]
    head_dim: int
    one_ms: float

    @classmethod
    def of(cls, case: dict[str, Any]) -> Prompt:
        return cls(sum(case["lens"]), tuple(case["heads"]), case["head_dim"], case["one_gpu_ms"])

    def num_bytes(self, heads: int, ranks: int) -> float:
        """Of so many heads of a rank's tokens, 16 bits each."""
        return 2.0 * self.tokens / ranks * heads * self.head_dim

    def ring_ms(self, ranks: int, links: Links) -> float:
        """Steps of equal work; in each but the last a message comes meanwhile."""
        step = self.one_ms / ranks**2
        arriving = links.neighbour_ms(self.num_bytes(2 * self.heads[1], ranks), ranks)
        return (ranks - 1) * max(step, arriving) + step

    def gather_ms(self, ranks: int, links: Links) -> float:
        """Attention to a rank's own keys while all others come, and then to them."""
        step = self.one_ms / ranks**2
        arriving = links.gathered_ms(self.num_bytes(2 * self.heads[1], ranks), ranks)
        return max(step, arriving) + (ranks - 1) * step

    def ulysses_ms(self, ranks: int, links: Links) -> float:
        """To heads and back, with attention between."""
        sent = self.num_bytes(self.heads[0], ranks) + self.num_bytes(2 * max(self.heads[1], ranks), ranks)
        back = self.num_bytes(self.heads[0], ranks)
        return self.one_ms / ranks + links.all_ms(sent / ranks, ranks) + links.all_ms(back / ranks, ranks)


RANKS = (2, 4, 8, 16, 32, 64)
#: The model of a kind, and how what it leaves out grows: a step of a ring, or a rank's tokens.
MODELS: dict[str, tuple[Callable[[Prompt, int, Links], float], Callable[[int], float]]] = {
    "ring": (Prompt.ring_ms, lambda ranks: ranks / 2),
    "ring_peer_memory": (Prompt.ring_ms, lambda ranks: ranks / 2),
    "zigzag": (Prompt.gather_ms, lambda ranks: 2 / ranks),
    "zigzag_peer_memory": (Prompt.gather_ms, lambda ranks: 2 / ranks),
    "ulysses": (Prompt.ulysses_ms, lambda ranks: 2 / ranks),
}


def simulated(case: dict[str, Any], kind: str, links: Links) -> dict[int, float]:
    """Milliseconds by ranks: as measured for two. What the model has too much is attention, which the ranks share."""
    prompt, (model, growth) = Prompt.of(case), MODELS[kind]
    rest = case[kind]["ms"] - model(prompt, 2, links)
    most = links.gpus_per_host if kind.endswith("peer_memory") else RANKS[-1]
    most = min(most, prompt.heads[0]) if kind == "ulysses" else most
    left = {ranks: rest * (growth(ranks) if rest > 0 else 2 / ranks) for ranks in RANKS if ranks <= most}
    return {ranks: model(prompt, ranks, links) + ms for ranks, ms in left.items()}


def of_ranks(report: dict[str, Any], links: Links) -> list[dict[str, Any]]:
    """All measured cases over more ranks."""
    if report["ranks"] != 2:
        raise SystemExit(f"--of-ranks: expected a result of two ranks, got one of {report['ranks']}")
    rows = []
    for name, case in report["results"].items():
        for kind in MODELS if "one_gpu_ms" in case else ():
            if "ms" in case.get(kind, {}):
                found = simulated(case, kind, links)
                of_ideal = {ranks: case["one_gpu_ms"] / ranks / ms for ranks, ms in found.items()}
                rows.append({"case": name, "kind": kind, "ms": found, "of_ideal": of_ideal})
    return rows


def print_ranks(rows: list[dict[str, Any]]) -> None:
    """How much of ranks times one GPU."""
    print(f"{'of ranks x one GPU':40}" + "".join(f"{ranks:>7}" for ranks in RANKS))
    for row in rows:
        cells = (f"{row['of_ideal'][ranks]:7.2f}" if ranks in row["of_ideal"] else f"{'-':>7}" for ranks in RANKS)
        print(f"{row['case'] + ', ' + row['kind']:40}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="sweeps whose name holds this")
    parser.add_argument("--most-tokens", type=int, default=1 << 22, help="of a cache")
    parser.add_argument("--most-flops", type=float, default=None, help="of a point; default 5e13 on a GPU, else 1e10")
    parser.add_argument("--entries", type=int, default=10_000, help="of the cache that is filled; 0: none")
    parser.add_argument("--of-ranks", type=Path, help="a result of distributed.py on two GPUs")
    parser.add_argument("--nvlink", type=float, default=450.0, help="GB/s of a GPU in one direction (H100, H200)")
    parser.add_argument("--network", type=float, default=50.0, help="GB/s of a GPU between hosts (400 Gb/s)")
    parser.add_argument("--latency", type=float, default=15.0, help="microseconds of a message")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.of_ranks:
        links = Links(options.nvlink, options.network, options.latency)
        rows = of_ranks(json.loads(options.of_ranks.read_text()), links)
        print_ranks(rows)
        write_report(options.json, {"links": links._asdict(), "of": options.of_ranks.name, "rows": rows})
        return
    device = torch.device(options.device)
    options.most_flops = options.most_flops or (5e13 if options.device == "cuda" else 1e10)
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {**describe(device), "points": rows}
    if device.type == "cpu":
        report["device"] = f"{processor()}, {torch.get_num_threads()} threads"

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        write_report(options.json, report)

    report["left_out"] = sweep(options, device, keep)
    report["caches"] = [cache(n) for n in (10, 100, 1000, 10_000) if n <= options.entries]
    for found in report["caches"]:
        print(
            f"cache of {found['entries']:>6} entries: lookup {found['lookup_us']:.0f} us, list {found['list_s']:.2f} s"
        )
    write_report(options.json, report)


if __name__ == "__main__":
    main()
