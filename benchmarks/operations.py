"""The operations beside attention against the copy roof: merging states, appending to a paged cache.

Bytes are counted once each: what is read and what is written. The roof is a large device-to-device copy of this run.
Results are compared with torch's in float64 before anything is timed.

    python benchmarks/operations.py --json results/operations.json
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import quire
from machine import copy_gigabytes_per_s, describe, write_report
from timing import Timing, cpu_times, cuda_times, estimate_us, flusher

#: A relative error beyond the rounding of bf16.
ALLOWED_ERROR = 1e-2
PAGE_SIZE = 16


@dataclass(frozen=True)
class Case:
    """kind: merge_states (seq_len, num_states), merge_state (seq_len, 2) or append (nnz tokens)."""

    name: str
    kind: str
    seq_len: int
    num_states: int
    num_heads: int
    head_dim: int
    target_us: float | None = None

    @property
    def bytes(self) -> int:
        """Read and written: bf16 outputs and tokens, float32 lse."""
        row = self.num_heads * self.head_dim * 2
        if self.kind == "append":
            return 2 * 2 * self.seq_len * row  # keys and values, from and to
        return (self.num_states + 1) * self.seq_len * (row + self.num_heads * 4)


CASES = (
    Case("merge_states-8192x4x32x128", "merge_states", 8192, 4, 32, 128, 82.0),
    Case("merge_state-8192x32x128", "merge_state", 8192, 2, 32, 128, 50.0),
    Case("append-65536x8x128", "append", 65536, 1, 8, 128),
    Case("tiny-merge_states", "merge_states", 8, 3, 2, 64),
    Case("tiny-merge_state", "merge_state", 8, 2, 2, 64),
    Case("tiny-append", "append", 40, 1, 2, 64),
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


def prepare(package: Any, case: Case, device: torch.device) -> Prepared:
    """`package` is quire or FlashInfer: both have these names."""
    torch.manual_seed(0)
    return _prepare_append(package, case, device) if case.kind == "append" else _prepare_merge(package, case, device)


def _prepare_merge(package: Any, case: Case, device: torch.device) -> Prepared:
    shape = (case.seq_len, case.num_states, case.num_heads)
    v = torch.randn(*shape, case.head_dim, dtype=torch.bfloat16, device=device)
    s = torch.randn(*shape, device=device) * 4
    if case.kind == "merge_states":
        call: Callable[[int], Any] = lambda _: package.merge_states(v, s)  # noqa: E731
    else:
        parts = [t[:, i].contiguous() for i in range(2) for t in (v, s)]
        call = lambda _: package.merge_state(*parts)  # noqa: E731

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.softmax(s.double() * torch.log(torch.tensor(2.0, dtype=torch.float64)), dim=1)  # lse is base 2
        return call(0)[0].double(), (weights[..., None] * v.double()).sum(1)

    return call, check


def _prepare_append(package: Any, case: Case, device: torch.device) -> Prepared:
    """One request of seq_len tokens onto shuffled pages."""
    num_pages = -(-case.seq_len // PAGE_SIZE)
    shape = (case.seq_len, case.num_heads, case.head_dim)
    k, v = (torch.randn(*shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    cache = torch.zeros(num_pages, 2, PAGE_SIZE, case.num_heads, case.head_dim, dtype=torch.bfloat16, device=device)
    pages = torch.randperm(num_pages, device=device).to(torch.int32)
    positions = torch.arange(case.seq_len, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
    last = torch.tensor([case.seq_len - (num_pages - 1) * PAGE_SIZE], dtype=torch.int32, device=device)
    batch = torch.zeros_like(positions)

    def call(_: int) -> None:
        package.append_paged_kv_cache(k, v, batch, positions, cache, pages, indptr, last)

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        call(0)
        stored = cache[pages.long()].transpose(0, 1).flatten(1, 2)[:, : case.seq_len]
        return stored.double(), torch.stack([k, v]).double()

    return call, check


def measure(case: Case, providers: list[str], device: torch.device, roof: float, rounds: int) -> list[Result]:
    """All providers on one case, in turn."""
    results: dict[str, Result] = {}
    calls: dict[str, Callable[[int], object]] = {}
    for provider in providers:
        if reason := _reject(provider, device):
            results[provider] = Result(case.name, provider, reason=reason)
            continue
        call, check = prepare(quire if provider == "quire" else importlib.import_module(provider), case, device)
        found, exact = check()
        error = float((found - exact).norm() / exact.norm())
        if error <= ALLOWED_ERROR:
            calls[provider] = call
        reason = None if error <= ALLOWED_ERROR else f"wrong result: relative error {error:.2g}"
        results[provider] = Result(case.name, provider, error, reason=reason)
    for (provider, timing), before in zip(_times(calls, device, rounds), list(map(results.get, calls)), strict=True):
        assert before is not None
        results[provider] = _rated(case, before, timing, roof)
    return [results[provider] for provider in providers]


def _reject(provider: str, device: torch.device) -> str | None:
    if provider == "quire":
        return None
    if importlib.util.find_spec(provider) is None:
        return f"{provider} is not installed"
    return None if device.type == "cuda" else "it needs a GPU"


def _times(calls: dict[str, Callable[[int], object]], device: torch.device, rounds: int) -> list[tuple[str, Timing]]:
    if not calls:
        return []
    if device.type == "cpu":
        return list(zip(calls, cpu_times(list(calls.values()), rounds), strict=True))
    estimates = [estimate_us(call, 1) for call in calls.values()]
    timings = cuda_times([(call, 1) for call in calls.values()], estimates, 1, rounds, flusher("write"))
    return list(zip(calls, timings, strict=True))


def _rated(case: Case, before: Result, timing: Timing, roof: float) -> Result:
    rate = case.bytes / timing.median / 1e3
    reached = None if case.target_us is None else timing.median <= case.target_us
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a result of quire was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="[!t]*", help="names or patterns, comma-separated; default: all but tiny")
    parser.add_argument("--providers", default="quire,flashinfer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    patterns = options.cases.split(",")
    cases = [case for case in CASES if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if not cases:
        parser.error(f"--cases: expected some of {', '.join(case.name for case in CASES)}")
    device = torch.device(options.device)
    roof = copy_gigabytes_per_s(device)
    print(f"copy, read and write: {roof:.0f} GB/s, measured now")
    results = []
    for case in cases:
        found = measure(case, options.providers.split(","), device, roof, options.rounds)
        print(*map(line, found), sep="\n", flush=True)
        results += found
    head = {**describe(device), "copy_gigabytes_per_s": roof}
    write_report(options.json, {**head, "results": [asdict(result) for result in results]})
    return int(any(result.provider == "quire" and result.timing is None for result in results))


if __name__ == "__main__":
    sys.exit(main())
