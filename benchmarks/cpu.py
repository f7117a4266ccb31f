"""Attention on the cpu beside torch's scaled_dot_product_attention, through the public API.

    python benchmarks/cpu.py                      a table
    python benchmarks/cpu.py --json               one JSON object on stdout
    python benchmarks/cpu.py --save STEM          also STEM.json and STEM.md
    python benchmarks/cpu.py --case decode        only the cases whose name holds "decode"
    OMP_WAIT_POLICY=passive python benchmarks/cpu.py --clock cpu      on a machine that others use

The two take turns call by call in one process with the same number of threads, so that whatever else the machine does
falls on both. `--clock cpu` counts the processor time of all threads instead, divided by their number: what others take
of the processors is not in it, what they take of caches and memory is. Threads that wait must sleep then. Reported are
the median and the least time of each, the ratio of the medians, and of both the largest error against float64. torch
gets contiguous [batch, heads, tokens, head_dim] tensors; quire gets its own layouts: rows of tokens for prefill, pages
of 16 tokens in random order for decode. Planning and compiling are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import quire

PAGE_SIZE = 16
WORKSPACE_BYTES = 128 << 20

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One problem; decode where qo_len is 1."""

    dtype: torch.dtype
    batch: int
    num_qo_heads: int
    num_kv_heads: int
    qo_len: int
    kv_len: int
    head_dim: int
    causal: bool
    kv_layout: str = "NHD"

    @property
    def name(self) -> str:
        kind = "decode" if self.qo_len == 1 else "prefill"
        mask = "causal" if self.causal else "full"
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"{kind} {dtype} {self.batch}x{heads}x{self.kv_len}x{self.head_dim} {mask} {self.kv_layout}"

    @property
    def flops(self) -> float:
        """Of the visible scores and their values."""
        scores = self.qo_len * self.kv_len / (2 if self.causal and self.qo_len > 1 else 1)
        return 4.0 * self.batch * self.num_qo_heads * scores * self.head_dim

    @property
    def kv_bytes(self) -> int:
        return 2 * self.batch * self.num_kv_heads * self.kv_len * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Tensors:
    """q [batch, num_qo_heads, qo_len, head_dim]; k, v [batch, num_kv_heads, kv_len, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Result:
    case: str
    torch_ms: float
    torch_min_ms: float
    quire_ms: float
    quire_min_ms: float
    speedup: float
    gflops: float
    gigabytes_per_s: float
    torch_max_error: float
    quire_max_error: float


def cases() -> list[Case]:
    """The shapes of an embedded model: a prompt of 1024 tokens, a batch of 8 at 4096; full and grouped heads."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_kv_heads in (32, 8):
            found.append(Case(dtype, 1, 32, num_kv_heads, 1024, 1024, 128, True))
        found.append(Case(dtype, 1, 32, 32, 1024, 1024, 128, False))
        for num_kv_heads in (32, 8):
            found.append(Case(dtype, 8, 32, num_kv_heads, 1, 4096, 128, False))
        found.append(Case(dtype, 8, 32, 32, 1, 4096, 128, False, "HND"))
    return found


def make_tensors(case: Case) -> Tensors:
    """Random tensors, the same in each run."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, length: int) -> torch.Tensor:
        return torch.randn(case.batch, heads, length, case.head_dim, generator=generator).to(case.dtype)

    return Tensors(
        normal(case.num_qo_heads, case.qo_len),
        normal(case.num_kv_heads, case.kv_len),
        normal(case.num_kv_heads, case.kv_len),
    )


def by_torch(case: Case, x: Tensors) -> Attend:
    """torch's call; its output is [batch, num_qo_heads, qo_len, head_dim]."""
    causal = case.causal and case.qo_len > 1
    grouped = case.num_qo_heads != case.num_kv_heads
    return lambda: scaled_dot_product_attention(x.q, x.k, x.v, is_causal=causal, enable_gqa=grouped)


def by_quire(case: Case, x: Tensors) -> Attend:
    """quire's call, planned; its output is [batch * qo_len, num_qo_heads, head_dim]."""
    if case.qo_len > 1:
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (x.q, x.k, x.v))
        return lambda: quire.single_prefill_with_kv_cache(q, k, v, causal=case.causal)
    pages_each = case.kv_len // PAGE_SIZE
    indices = torch.randperm(case.batch * pages_each, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    k, v = (to_pages(t, indices, case.kv_layout) for t in (x.k, x.v))
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8), case.kv_layout)
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32) * pages_each,
        indices,
        torch.full((case.batch,), PAGE_SIZE, dtype=torch.int32),
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim,
        PAGE_SIZE,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    q = x.q[:, :, 0].contiguous()
    return lambda: wrapper.run(q, (k, v))


def to_pages(kv: torch.Tensor, indices: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] as pages of `kv_layout`, in the order of `indices`."""
    batch, heads, tokens, head_dim = kv.shape
    pages = kv.reshape(batch, heads, tokens // PAGE_SIZE, PAGE_SIZE, head_dim).transpose(1, 2).flatten(0, 1)
    if kv_layout == "NHD":
        pages = pages.transpose(1, 2)
    out = torch.empty(pages.shape, dtype=kv.dtype)
    out[indices.long()] = pages
    return out


def max_errors(case: Case, x: Tensors, outputs: list[torch.Tensor]) -> list[float]:
    """The largest differences from float64, on the first request; each output is [qo_len, num_qo_heads, head_dim]."""
    first = Tensors(*(t[:1].double() for t in (x.q, x.k, x.v)))
    exact = by_torch(case, first)()[0].transpose(0, 1)
    return [float((o.double() - exact).abs().max()) for o in outputs]


def processor_time() -> float:
    """Seconds of each thread, if all threads work alike."""
    return time.process_time() / torch.get_num_threads()


#: What --clock takes.
CLOCKS = {"wall": time.perf_counter, "cpu": processor_time}


def take_turns(
    calls: list[Attend], seconds: float, least: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Milliseconds by `clock` of each call, called in turn for about `seconds` and at least `least` times."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < least or time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            start = clock()
            call()
            taken.append((clock() - start) * 1e3)
    return times


def measure(case: Case, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Result:
    """One case, torch and quire in turn."""
    x = make_tensors(case)
    theirs, ours = by_torch(case, x), by_quire(case, x)
    outputs = [theirs()[0].transpose(0, 1), ours()[: case.qo_len]]
    their_error, our_error = max_errors(case, x, outputs)
    their_times, our_times = take_turns([theirs, ours], seconds, 7, clock)
    torch_ms, quire_ms = statistics.median(their_times), statistics.median(our_times)
    return Result(
        case=case.name,
        torch_ms=torch_ms,
        torch_min_ms=min(their_times),
        quire_ms=quire_ms,
        quire_min_ms=min(our_times),
        speedup=torch_ms / quire_ms,
        gflops=case.flops / quire_ms / 1e6,
        gigabytes_per_s=case.kv_bytes / quire_ms / 1e6,
        torch_max_error=their_error,
        quire_max_error=our_error,
    )


def machine() -> dict[str, str]:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = " ".join(
        [named.get("model name", platform.processor()), f"family {named.get('cpu family')} model {named.get('model')}"]
        if named
        else [platform.processor()]
    )
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": model,
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load_before": f"{os.getloadavg()[0]:.2f}",
        "target": quire.jit.host_target(matrix_unit=True),
        "quire": quire.__version__,
        "commit": output_of("git", "rev-parse", "--short", "HEAD"),
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "compiler": output_of("g++", "--version"),
        "python": platform.python_version(),
    }


def output_of(*command: str) -> str:
    """The first line that a command prints, run beside this file; "not found" where there is no such command."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return f"not found ({error})"
    return done.stdout.splitlines()[0]


def markdown(about: dict[str, str], results: list[Result]) -> str:
    """The report as a page."""
    head = ["# Attention on the cpu beside torch", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    if max(float(about["load_before"]), float(about["load_after"])) > int(about["threads"]):
        head += ["Others used the cores meanwhile (see the loads): trust the ratios, not the times.", ""]
    if about["clock"] == "cpu":
        head += ["Times are processor time of all threads, divided by their number.", ""]
    table = [
        "| case | torch ms (least) | quire ms (least) | speedup | GFLOP/s | GB/s | torch error | quire error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table += [
        f"| {r.case} | {r.torch_ms:.1f} ({r.torch_min_ms:.1f}) | {r.quire_ms:.1f} ({r.quire_min_ms:.1f}) "
        f"| {r.speedup:.2f} | {r.gflops:.0f} | {r.gigabytes_per_s:.1f} "
        f"| {r.torch_max_error:.1e} | {r.quire_max_error:.1e} |"
        for r in results
    ]
    return "\n".join([*head, *table, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--save", metavar="STEM", help="write STEM.json and STEM.md")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each case")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="time that passes, or that the threads take")
    args = parser.parse_args()
    if args.clock == "cpu" and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        parser.error("--clock cpu: set OMP_WAIT_POLICY=passive; threads that spin while they wait would be counted")

    chosen = [case for case in cases() if args.case in case.name]
    if not chosen:
        parser.error(f"--case: no case holds {args.case!r}; they are: " + "; ".join(case.name for case in cases()))
    about = {**machine(), "clock": args.clock}
    results = [measure(case, args.seconds, CLOCKS[args.clock]) for case in chosen]
    about["load_after"] = f"{os.getloadavg()[0]:.2f}"
    report = json.dumps({**about, "results": [asdict(r) for r in results]}, indent=2)
    print(report if args.json else markdown(about, results))
    if args.save:
        Path(f"{args.save}.json").write_text(report + "\n")
        Path(f"{args.save}.md").write_text(markdown(about, results))


if __name__ == "__main__":
    main()
