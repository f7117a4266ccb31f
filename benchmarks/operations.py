"""The operations beside attention against the copy roof: merging states, appending to a paged cache, packing bits.

Bytes are counted once each: what is read and what is written. The roof is a large device-to-device copy of this run;
"torch-copy" is a copy of as many bytes as the case moves, by the same clock. Results are compared with torch's in
float64 before anything is timed. On a GPU providers take turns, in graphs of launches that rotate over two sets of
tensors, larger together than the L2; what cannot be captured runs launch by launch out of a flushed L2.

    python benchmarks/operations.py --json results/operations.json
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from machine import copy_gigabytes_per_s, describe, write_report
from timing import Timing, captured, cpu_times, cuda_times, estimate_us, flusher

#: A relative error beyond the rounding of bf16.
ALLOWED_ERROR = 1e-2
PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """kind: merge_states (seq_len, num_states), merge_state (seq_len, 2), append (nnz tokens), or packbits (seq_len
    booleans in num_states segments).
    """

    name: str
    kind: str
    seq_len: int
    num_states: int
    num_heads: int
    head_dim: int
    target_us: float | None = None
    target_of_roof: float | None = None
    allowed_error: float = ALLOWED_ERROR

    @property
    def bytes(self) -> int:
        """Read and written: bf16 outputs and tokens, float32 lse; a byte a boolean."""
        row = self.num_heads * self.head_dim * 2
        if self.kind == "packbits":
            return self.seq_len + self.seq_len // 8
        if self.kind == "append":
            return 2 * 2 * self.seq_len * row  # keys and values, from and to
        return (self.num_states + 1) * self.seq_len * (row + self.num_heads * 4)


CASES = (
    Case("merge_states-8192x4x32x128", "merge_states", 8192, 4, 32, 128, 82.0),
    Case("merge_state-8192x32x128", "merge_state", 8192, 2, 32, 128, 50.0),
    Case("append-65536x8x128", "append", 65536, 1, 8, 128),
    Case("append-64x8x128", "append", 64, 1, 8, 128),
    Case("packbits-2^28", "packbits", 1 << 28, 1, 0, 0),
    Case("packbits-2^28x64", "packbits", 1 << 28, 64, 0, 0),
    Case("tiny-merge_states", "merge_states", 8, 3, 2, 64),
    Case("tiny-merge_state", "merge_state", 8, 2, 2, 64),
    Case("tiny-append", "append", 40, 1, 2, 64),
    Case("tiny-packbits", "packbits", 1000, 1, 0, 0),
    Case("tiny-packbits-segments", "packbits", 1000, 7, 0, 0),
)


@dataclass(frozen=True)
class Result:
    case: str
    provider: str
    error: float | None = None
    timing: Timing | None = None
    gigabytes_per_s: float | None = None
    of_roof: float | None = None
    reached: bool | None = None
    reason: str | None = None


#: What computes, and its result against what it must be.
Prepared = tuple[Callable[[int], object], Callable[[], tuple[torch.Tensor, torch.Tensor]]]
Prepare = Callable[[Any, Any, torch.device], Prepared]


def prepare(package: Any, case: Case, device: torch.device) -> Prepared:
    """`package` is quire or FlashInfer: both have these names."""
    torch.manual_seed(0)
    by_kind = {"append": _prepare_append, "packbits": _prepare_packbits}
    return by_kind.get(case.kind, _prepare_merge)(package, case, device)


def num_sets(device: torch.device) -> int:
    return 2 if device.type == "cuda" else 1


def prepare_copy(case: Any, device: torch.device) -> Prepared:
    """A copy of as many bytes by torch."""
    sources = [torch.randn(case.bytes // 8, device=device) for _ in range(num_sets(device))]
    targets = [torch.empty_like(source) for source in sources]

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        return targets[0].copy_(sources[0]), sources[0]

    return lambda i: targets[i % len(sources)].copy_(sources[i % len(sources)]), check


def _segments(case: Case) -> list[int]:
    """Offsets of segments that do not begin at multiples of eight."""
    inner = [case.seq_len * i // case.num_states + i % 7 for i in range(1, case.num_states)]
    return [0, *inner, case.seq_len]


def _prepare_packbits(package: Any, case: Case, device: torch.device) -> Prepared:
    xs = [torch.rand(case.seq_len, device=device) < 0.5 for _ in range(num_sets(device))]
    offsets = _segments(case)
    indptr = torch.tensor(offsets, dtype=torch.int32, device=device)

    def call(i: int) -> torch.Tensor:
        x = xs[i % len(xs)]
        if case.num_states == 1:
            return package.packbits(x, "little")
        return package.segment_packbits(x, indptr, "little")[0]

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        """A checksum of each segment's bytes: all of them in float64 would not fit beside the booleans."""
        got, want, at = call(0), [], 0
        weights = 2 ** torch.arange(8, dtype=torch.int32, device=device)
        found = []
        for begin, end in pairwise(offsets):
            whole = (end - begin) // 8
            exact = (xs[0][begin : begin + 8 * whole].view(-1, 8).to(torch.uint8) * weights.to(torch.uint8)).sum(1)
            found.append((got[at : at + whole] != exact).sum().double())
            want.append(torch.zeros((), dtype=torch.float64, device=device))
            at += -(-(end - begin) // 8)
        return torch.stack(found) + 1, torch.stack(want) + 1

    return call, check


def _prepare_merge(package: Any, case: Case, device: torch.device) -> Prepared:
    shape = (case.seq_len, case.num_states, case.num_heads)
    sets = []
    for _ in range(num_sets(device)):
        v = torch.randn(*shape, case.head_dim, dtype=torch.bfloat16, device=device)
        sets.append((v, torch.randn(*shape, device=device) * 4))
    v, s = sets[0]
    if case.kind == "merge_states":
        call: Callable[[int], Any] = lambda i: package.merge_states(*sets[i % len(sets)])  # noqa: E731
    else:
        parts = [[t[:, i].contiguous() for i in range(2) for t in pair] for pair in sets]
        call = lambda i: package.merge_state(*parts[i % len(parts)])  # noqa: E731

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(s.double() * torch.log(torch.tensor(2.0, dtype=torch.float64)), dim=1)  # lse is base 2
        return call(0)[0].double(), (weights[..., None] * v.double()).sum(1)

    return call, check


def _prepare_append(package: Any, case: Case, device: torch.device) -> Prepared:
    """One request of seq_len tokens onto shuffled pages."""
    num_pages = -(-case.seq_len // PAGE_SIZE)
    shape = (case.seq_len, case.num_heads, case.head_dim)
    sets = []
    for _ in range(num_sets(device)):
        k, v = (torch.randn(*shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        cache = torch.zeros(num_pages, 2, PAGE_SIZE, case.num_heads, case.head_dim, dtype=torch.bfloat16, device=device)
        sets.append((k, v, cache))
    pages = torch.randperm(num_pages, device=device).to(torch.int32)
    positions = torch.arange(case.seq_len, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
    last = torch.tensor([case.seq_len - (num_pages - 1) * PAGE_SIZE], dtype=torch.int32, device=device)
    batch = torch.zeros_like(positions)

    def call(i: int) -> None:
        k, v, cache = sets[i % len(sets)]
        package.append_paged_kv_cache(k, v, batch, positions, cache, pages, indptr, last)

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        k, v, cache = sets[0]
        call(0)
        stored = cache[pages.long()].transpose(0, 1).flatten(1, 2)[:, : case.seq_len]
        return stored.double(), torch.stack([k, v]).double()

    return call, check


def measure(
    case: Any, providers: list[str], device: torch.device, roof: float, rounds: int, prepare: Prepare = prepare
) -> list[Result]:
    """All providers on one case, in turn."""
    results: dict[str, Result] = {}
    calls: dict[str, Callable[[int], object]] = {}
    for provider in providers:
        if reason := _reject(provider, device):
            results[provider] = Result(case.name, provider, reason=reason)
            continue
        try:
            package = None if provider == "torch-copy" else importlib.import_module(provider)
            call, check = prepare_copy(case, device) if package is None else prepare(package, case, device)
            found, exact = check()
        except Exception as error:  # a provider that does not take a case is a reason in the report
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            results[provider] = Result(case.name, provider, reason=reason)
            continue
        error = float((found - exact).norm() / exact.norm())
        if error <= case.allowed_error:
            calls[provider] = call
        reason = None if error <= case.allowed_error else f"wrong result: relative error {error:.2g}"
        results[provider] = Result(case.name, provider, error, reason=reason)
    capturable = case.kind != "packbits" or case.num_states == 1
    timings = _times(calls, device, rounds, capturable=capturable)
    for (provider, timing), before in zip(timings, list(map(results.get, calls)), strict=True):
        assert before is not None
        results[provider] = _rated(case, before, timing, roof)
    return [results[provider] for provider in providers]


def _reject(provider: str, device: torch.device) -> str | None:
    if provider in ("quire", "torch-copy"):
        return None
    if importlib.util.find_spec(provider) is None:
        return f"{provider} is not installed"
    return None if device.type == "cuda" else "it needs a GPU"


def _times(
    calls: dict[str, Callable[[int], object]], device: torch.device, rounds: int, *, capturable: bool
) -> list[tuple[str, Timing]]:
    if not calls:
        return []
    if device.type == "cpu":
        return list(zip(calls, cpu_times(list(calls.values()), rounds), strict=True))
    sets = num_sets(device)
    estimates = [estimate_us(call, sets) for call in calls.values()]
    launches = [captured(call, sets) if capturable else (call, 1) for call in calls.values()]
    return list(zip(calls, cuda_times(launches, estimates, sets, rounds, flusher("write")), strict=True))


def _rated(case: Any, before: Result, timing: Timing, roof: float) -> Result:
    rate = case.bytes / timing.median / 1e3
    reached = None if case.target_us is None else timing.median <= case.target_us
    if case.target_of_roof is not None:
        reached = rate / roof >= case.target_of_roof
    return Result(case.name, before.provider, before.error, timing, rate, rate / roof, reached)


def line(result: Result) -> str:
    """One result on one line."""
    head = f"{result.case:28} {result.provider:10}"
    if result.timing is None:
        return f"{head} {result.reason}"
    t, target = result.timing, {True: "  reached", False: "  MISSED", None: ""}[result.reached]
    return (
        f"{head} {t.median:8.1f} us ({t.least:.1f} to {t.most:.1f})  {result.gigabytes_per_s:7.0f} GB/s  "
        f"{result.of_roof:.3f} of the copy roof  error {result.error:.1e}{target}"
    )


def main(
    arguments: Sequence[str] | None = None, description: str | None = __doc__, cases: Sequence[Any] = CASES,
    prepare: Prepare = prepare,
) -> int:  # fmt: skip
    """Run the command line; 1 if a result of quire was wrong."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="[!t]*", help="names or patterns, comma-separated; default: all but tiny")
    parser.add_argument("--providers", default="quire,flashinfer,torch-copy")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    patterns = options.cases.split(",")
    chosen = [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if not chosen:
        parser.error(f"--cases: expected some of {', '.join(case.name for case in cases)}")
    device = torch.device(options.device)
    roof = copy_gigabytes_per_s(device)
    print(f"copy, read and write: {roof:.0f} GB/s, measured now")
    results = []
    for case in chosen:
        found = measure(case, options.providers.split(","), device, roof, options.rounds, prepare)
        print(*map(line, found), sep="\n", flush=True)
        results += found
    head = {**describe(device), "copy_gigabytes_per_s": roof}
    write_report(options.json, {**head, "results": [asdict(result) for result in results]})
    return int(any(result.provider == "quire" and result.timing is None for result in results))


if __name__ == "__main__":
    sys.exit(main())
