"""Host cost: microseconds of plan() and run(), and how often each waits for the device, beside FlashInfer's.

plan() is given host index arrays of a new batch each time (lengths differ from call to call), as a serving engine does
each step. run() is given its output; on a GPU only the time until it returns counts, not the kernel's. On a cpu run()
is the computation itself, so only plan() is timed there.

    python benchmarks/plan.py --cases decode-b64,prefill-b64 --json results/plan.json
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import quire
from machine import describe, write_report

PAGE_SIZE = 16
HEADS = (32, 8)
HEAD_DIM = 128
#: Pages that exist. Requests share them: the indices are as long as in a real cache, the cache is not.
POOL_PAGES = 4096
_VARIATIONS = 8  #: batches that are planned in turn


@dataclass(frozen=True)
class Case:
    """A batch: decode with one token a request, or an append of qo_len tokens."""

    name: str
    batch_size: int
    qo_len: int = 1

    @property
    def decode(self) -> bool:
        return self.qo_len == 1


CASES = (*(Case(f"decode-b{batch}", batch) for batch in (1, 4, 16, 64, 256, 1024)), Case("prefill-b64", 64, 128))


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call on the host."""

    p50: float
    p99: float
    least: float
    synchronisations: int | None  #: of one call, as torch counts them; None on a cpu


@dataclass(frozen=True)
class Result:
    case: str
    provider: str
    plan: Cost | None
    run: Cost | None
    reason: str | None = None


@dataclass(frozen=True)
class Batch:
    """Index arrays on the host, int32."""

    qo_indptr: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def make_batch(case: Case, kv_len: int, seed: int) -> Batch:
    """Lengths around kv_len; every request has room for its queries."""
    generator = torch.Generator().manual_seed(seed)
    low = max(case.qo_len, kv_len - kv_len // 8)
    lengths = torch.randint(low, max(low, kv_len) + 1, (case.batch_size,), generator=generator)
    pages = -(-lengths // PAGE_SIZE)
    zero = torch.zeros(1, dtype=torch.int64)
    indptr = torch.cat([zero, pages.cumsum(0)])
    indices = torch.randint(0, POOL_PAGES, (int(indptr[-1]),), generator=generator)
    qo_indptr = torch.arange(case.batch_size + 1) * case.qo_len
    arrays = (qo_indptr, indptr, indices, lengths - (pages - 1) * PAGE_SIZE)
    return Batch(*(array.to(torch.int32) for array in arrays))


# --- providers -------------------------------------------------------------------------------------------------------

Plan = Callable[[Batch], object]
Run = Callable[[], object]


def prepare(provider: str, case: Case, device: torch.device) -> tuple[Plan, Run]:
    """plan() and run() of a wrapper of quire ("quire") or FlashInfer ("fi-fa2", "fi-fa3")."""
    package: Any = quire
    options: dict[str, Any] = {}
    if provider != "quire":
        import flashinfer

        package = flashinfer
        options = {"backend": provider.removeprefix("fi-")} | ({"use_tensor_cores": True} if case.decode else {})
    workspace = torch.zeros(256 << 20 if device.type == "cuda" else 16 << 20, dtype=torch.uint8, device=device)
    dtype = torch.bfloat16
    q = torch.randn(case.batch_size * case.qo_len, HEADS[0], HEAD_DIM, dtype=dtype, device=device)
    cache = torch.randn(POOL_PAGES, 2, PAGE_SIZE, HEADS[1], HEAD_DIM, dtype=dtype, device=device)
    out = torch.empty_like(q)
    kind = "BatchDecodeWithPagedKVCacheWrapper" if case.decode else "BatchPrefillWithPagedKVCacheWrapper"
    wrapper = getattr(package, kind)(workspace, **options)
    return _plan(wrapper, case, dtype), lambda: wrapper.run(q, cache, out=out)


def _plan(wrapper: Any, case: Case, dtype: torch.dtype) -> Plan:
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    if case.decode:
        return lambda b: wrapper.plan(b.indptr, b.indices, b.last_page_len, *HEADS, HEAD_DIM, PAGE_SIZE, **types)
    return lambda b: wrapper.plan(
        b.qo_indptr, b.indptr, b.indices, b.last_page_len, *HEADS, HEAD_DIM, PAGE_SIZE, causal=True, **types
    )


def reject(provider: str, case: Case, device: torch.device) -> str | None:
    """Why a provider cannot run a case."""
    if provider == "quire":
        return None
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if device.type != "cuda":
        return "it needs a GPU"
    return "decode plans are fa2's" if case.decode and provider == "fi-fa3" else None


# --- measurement -----------------------------------------------------------------------------------------------------


def measure(case: Case, provider: str, device: torch.device, kv_len: int, calls: int) -> Result:
    """One provider on one case."""
    if reason := reject(provider, case, device):
        return Result(case.name, provider, None, None, reason)
    batches = [make_batch(case, kv_len, seed) for seed in range(_VARIATIONS)]
    plan, run = prepare(provider, case, device)
    planned = cost(lambda i: plan(batches[i % _VARIATIONS]), device, calls)
    ran = cost(lambda _: run(), device, calls) if device.type == "cuda" else None
    return Result(case.name, provider, planned, ran)


def cost(call: Callable[[int], object], device: torch.device, calls: int) -> Cost:
    """Of `calls` calls after a warm-up; the device is waited for between them, outside the figure."""
    for i in range(_VARIATIONS):
        call(i)
    times = []
    for i in range(calls):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call(i)
        times.append((time.perf_counter_ns() - start) / 1e3)
    times.sort()
    return Cost(times[calls // 2], times[min(calls - 1, calls * 99 // 100)], times[0], synchronisations(call, device))


def synchronisations(call: Callable[[int], object], device: torch.device) -> int | None:
    """How often one call makes torch wait for the device."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call(0)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing" in str(warning.message) for warning in caught)  # not that the mode is new


# --- the command line ------------------------------------------------------------------------------------------------


def line(result: Result) -> str:
    """One result on one line."""
    head = f"{result.case:14} {result.provider:8}"
    if result.plan is None:
        return f"{head} {result.reason}"

    def text(cost: Cost) -> str:
        waits = "" if cost.synchronisations is None else f" {cost.synchronisations} waits"
        return f"p50 {cost.p50:8.1f}  p99 {cost.p99:8.1f} us{waits}"

    run = "" if result.run is None else f"   run {text(result.run)}"
    return f"{head} plan {text(result.plan)}{run}"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="*", help="names or patterns, comma-separated: " + ", ".join(_names()))
    parser.add_argument("--providers", default="quire,fi-fa2,fi-fa3")
    parser.add_argument("--kv-len", type=int, default=4096, help="tokens of a request, about (default 4096)")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    patterns = options.cases.split(",")
    options.cases = [case for case in CASES if any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]
    options.providers = options.providers.split(",")
    if not options.cases:
        parser.error(f"--cases: expected some of {', '.join(_names())}")
    if unknown := set(options.providers) - {"quire", "fi-fa2", "fi-fa3"}:
        parser.error(f"--providers: expected some of quire, fi-fa2, fi-fa3, got {', '.join(sorted(unknown))}")
    if options.calls < 1:
        parser.error(f"--calls: expected 1 or more, got {options.calls}")
    return options


def _names() -> list[str]:
    return [case.name for case in CASES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _arguments(arguments)
    device = torch.device(options.device)
    results = []
    for case in options.cases:
        for provider in options.providers:
            results.append(measure(case, provider, device, options.kv_len, options.calls))
            print(line(results[-1]), flush=True)
    head = {**describe(device), "kv_len": options.kv_len, "calls": options.calls}
    write_report(options.json, {**head, "results": [asdict(result) for result in results]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
