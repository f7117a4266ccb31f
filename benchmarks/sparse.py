"""Block-sparse attention and page-sparse decode beside dense attention, and beside FlashInfer where it is at hand.

Work is counted by the pairs of query and key that listed blocks hold: `of dense` is the rate by that count, divided by
that of dense attention without a mask over the same tokens. All rows of a kind take turns in one process. Before
anything is timed, queries of one row of blocks are compared with float64.

    python benchmarks/sparse.py --json results/sparse.json

`--pause 2` rests two milliseconds before each launch: see variants.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

import machine
import quire
import timing

LENGTH, HEADS, DIM = 16384, (32, 8), 128


@dataclass
class Result:
    """us: the median of a launch; ratio: of the dense row's rate, or for decode of its time."""

    name: str
    us: float = math.nan
    tflops: float | None = None
    ratio: float | None = None
    target: float | None = None
    error: float | None = None  #: the largest, beside float64


Prepared = tuple[timing.Call, Result, float]  #: with the operations of a launch, in 1e12


def listed(blocks: int, density: float, heads: int = 1) -> torch.Tensor:
    """Blocks [heads, blocks, blocks] of which each row lists as many, at random places."""
    count = round(blocks * density)
    order = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(1)).argsort(2)
    return order < count


def bsr(shown: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """indptr and indices of [rows, columns]."""
    indptr = torch.zeros(len(shown) + 1, dtype=torch.int32)
    indptr[1:] = shown.sum(1).cumsum(0)
    return indptr, shown.nonzero()[:, 1].int()


class Blocks:
    """Tokens without a mask, with heads after tokens (as BSR takes them) or before."""

    def __init__(self, device: torch.device, heads: tuple[int, int] = HEADS) -> None:
        self.heads, self.workspace = heads, torch.empty(256 << 20, dtype=torch.uint8, device=device)
        draw = lambda count: torch.randn(LENGTH, count, DIM, device=device, dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = draw(heads[0]), draw(heads[1]), draw(heads[1])

    def dense(self) -> Prepared:
        """Every query sees every key."""
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(self.workspace)
        indptr = torch.tensor([0, LENGTH], dtype=torch.int32)
        wrapper.plan(indptr, indptr, *self.heads, DIM, q_data_type=torch.bfloat16)
        out = torch.empty_like(self.q)
        return lambda _: wrapper.run(self.q, self.k, self.v, out=out), Result("dense"), self._work(1.0)

    def bsr(self, library: Any, backend: str, block: int, density: float, target: float | None) -> Prepared:
        """The same list of blocks for all heads."""
        shown = listed(LENGTH // block, density)[0]
        wrapper = library.BlockSparseAttentionWrapper(self.workspace, backend=backend)
        types = {"q_data_type": torch.bfloat16, "o_data_type": torch.bfloat16}
        wrapper.plan(*bsr(shown), LENGTH, LENGTH, block, block, *self.heads, DIM, **types)
        out = torch.empty_like(self.q)
        call = lambda _: wrapper.run(self.q, self.k, self.v, out=out)  # noqa: E731
        call(0)
        error = self._error(out[:block, 0], shown[0].repeat_interleave(block))
        whose = "" if library is quire else f", flashinfer {backend}"
        result = Result(f"{block}x{block}, {density:.0%}{whose}", target=target, error=error)
        return call, result, self._work(float(shown.float().mean()))

    def of_heads(self, block: int, density: float, target: float | None = None) -> Prepared:
        """Each KV head lists blocks of its own."""
        shown = listed(LENGTH // block, density, self.heads[1])
        width = torch.full(shown.shape[:2], block)
        wrapper = quire.VariableBlockSparseAttentionWrapper(self.workspace)
        wrapper.plan(shown, width, width, *self.heads, DIM, q_data_type=torch.bfloat16)
        q, k, v = (t.transpose(0, 1).contiguous() for t in (self.q, self.k, self.v))
        out = torch.empty_like(q)
        call = lambda _: wrapper.run(q, k, v, out=out)  # noqa: E731
        call(0)
        error = self._error(out[0, :block], shown[0, 0].repeat_interleave(block))
        name = f"{block}x{block}, {density:.0%}, {self.heads[0]}/{self.heads[1]} heads with lists of their own"
        return call, Result(name, target=target, error=error), self._work(float(shown.float().mean()))

    def _work(self, density: float) -> float:
        return 4 * DIM * self.heads[0] * LENGTH**2 * density / 1e12

    def _error(self, got: torch.Tensor, seen: torch.Tensor) -> float:
        """Of the first head, in the first queries."""
        q, k, v = (t[:, 0].double() for t in (self.q, self.k, self.v))
        keys = seen.to(q.device)
        truth = torch.softmax(q[: len(got)] @ k[keys].t() / math.sqrt(DIM), 1) @ v[keys]
        error = float((got.double() - truth).abs().max())
        if not error < 0.02:
            raise SystemExit(f"wrong result: off by {error}")
        return error


class Pages:
    """64 requests, 32/8 heads, pages of 64 tokens of which each KV head attends to 64."""

    BATCH, PAGE, TOP_K = 64, 64, 64

    def __init__(self, device: torch.device, length: int = 32768) -> None:
        count = length // self.PAGE
        shape = self.BATCH * count, 2, self.PAGE, HEADS[1], DIM
        self.cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self.q = torch.randn(self.BATCH, HEADS[0], DIM, device=device, dtype=torch.bfloat16)
        self.tables = torch.randperm(self.BATCH * count, device=device).int().view(self.BATCH, count)
        self.lens = torch.full((self.BATCH,), length, dtype=torch.int32, device=device)
        self.workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.bounds = quire.page_key_bounds(self.cache)

    def rows(self) -> list[Prepared]:
        """Dense over as many keys as are selected; the choice; attention to it; both; dense over all keys."""
        selected = self.select(0)
        decode = quire.batch_decode_with_selected_pages
        attend = lambda _: decode(self.q, self.cache, self.workspace, selected)  # noqa: E731
        both = lambda i: decode(self.q, self.cache, self.workspace, self.select(i))  # noqa: E731
        calls = {
            "dense, 4096 keys": self.dense(self.TOP_K * self.PAGE),
            "the choice of 64 of 512 pages": self.select,
            "attention to 64 of 512 pages": attend,
            "both": both,
            "dense, 32768 keys": self.dense(32768),
        }
        for call in calls.values():
            call(0)  # what a capture cannot do: kernels are loaded
        targets = {"attention to 64 of 512 pages": 1.1, "both": 1.25}
        return [
            (timing.captured(call, 1)[0], Result(name, target=targets.get(name)), 0.0) for name, call in calls.items()
        ]

    def select(self, _: int) -> quire.SelectedPages:
        """The tables of this step."""
        return quire.select_pages(self.q, self.bounds, self.tables, self.lens, self.PAGE, self.TOP_K)

    def dense(self, length: int) -> timing.Call:
        """The first keys of each request."""
        tables, lens = self.tables[:, : length // self.PAGE].contiguous(), torch.full_like(self.lens, length)
        return lambda _: quire.xqa_batch_decode_with_kv_cache(
            self.q, self.cache, self.workspace, tables, lens, length, bmm1_scale=DIM**-0.5
        )


def measure(kind: str, prepared: list[Prepared], rounds: int, pause: float, launches: int) -> list[Result]:
    """Time the calls in turn. pause: seconds before each."""
    calls = [(call, launches) for call, _, _ in prepared]
    estimates = [timing.estimate_us(call, 1) / launches for call, _, _ in prepared]
    times = timing.cuda_times(calls, estimates, 1, rounds, timing.flusher("write"), pause)
    results = []
    for (_, result, work), taken in zip(prepared, times, strict=True):
        result.us, result.name = taken.median, f"{kind}: {result.name}"
        result.tflops = work / taken.median * 1e6 or None
        dense = results[0] if results else result
        result.ratio = result.us / dense.us if result.tflops is None else result.tflops / (dense.tflops or 1)
        results.append(result)
    return results


def show(results: list[Result]) -> list[Result]:
    """Print a line a row."""
    for result in results:
        rate = "" if result.tflops is None else f"{result.tflops:7.1f} TFLOP/s"
        error = "" if result.error is None else f"  error {result.error:.1e}"
        target = "" if result.target is None else f"  target {result.target}"
        print(
            f"{result.name:<66}{result.us:9.1f} us {rate:>16}  {result.ratio:.3f} of dense{target}{error}", flush=True
        )
    return results


def block_rows(blocks: Blocks) -> list[Prepared]:
    """Dense, ours, and FlashInfer's where it has modules for this machine."""
    sizes = ((128, 0.1, 0.9), (128, 0.5, 0.92), (64, 0.1, 0.7))
    rows = [blocks.dense(), *(blocks.bsr(quire, "auto", *size) for size in sizes)]
    rows += [blocks.of_heads(128, 0.1), blocks.of_heads(64, 0.1)]
    return rows + (flashinfer_rows(blocks, sizes) if find_spec("flashinfer") else [])


def flashinfer_rows(blocks: Blocks, sizes: tuple[tuple[int, float, float], ...]) -> list[Prepared]:
    """Those that FlashInfer has modules for; says why it has no others."""
    import flashinfer

    rows = []
    for backend, (block, density, _) in product(("fa2", "fa3"), sizes):
        try:
            rows.append(blocks.bsr(flashinfer, backend, block, density, None))
        except (OSError, RuntimeError) as error:
            print(f"flashinfer {backend}, {block}x{block}, {density:.0%}: not measured: {error}", flush=True)
    return rows


def main() -> int:
    """Measure both kinds of rows, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds before each launch")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    few = partial(Blocks, device, (8, 8))
    kinds: tuple[tuple[str, Callable[[], list[Prepared]], int], ...] = (
        ("blocks", lambda: block_rows(Blocks(device)), 1),
        ("blocks, 8/8 heads", lambda: [few().dense(), few().of_heads(64, 0.1), few().of_heads(128, 0.1)], 1),
        ("pages", lambda: Pages(device).rows(), timing.LAUNCHES_PER_GRAPH),
    )
    results = []
    for kind, rows, launches in kinds:
        results += show(measure(kind, rows(), options.rounds, options.pause / 1e3, launches))
    if options.json is not None:
        report = {**machine.describe(device), "pause_ms": options.pause, "rows": [asdict(row) for row in results]}
        machine.write_report(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
