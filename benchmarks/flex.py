"""quire.flex_attention beside torch's compiled flex_attention: masks, scores, block lists, decode, first calls.

    python benchmarks/flex.py --json results/flex.json

The whole takes 150 seconds (`--seconds`), most of them to compile torch's kernels. What does not fit is named, and
`--cases` takes names and patterns. Tensors are contiguous [batch, heads, length, head_dim]. Quire, torch and Quire's
plain kernel take turns in one process, and sampled rows of both results are compared with float64 before. Rates count
the pairs of query and key that a mask shows; `of_tiles` compares the rate over the tiles that the kernel computes with
that of the plain kernel. Launches follow one another, at the clock that the card's power limit leaves; with
`--pause 2` there are two milliseconds of rest before each. `eager_us` is the time between events around a call to an
idle GPU, the host's share included.
"""

# ruff: noqa: ARG005  # functions of torch's flex_attention have all of its arguments
from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention as theirs

import machine
import quire
import timing
from flex_cases import CASES, SMALL, Case, Function, Inputs, Mods, Size, alibi, block_mask_of, pairs_of
from quire.engine import plan_cache


@dataclass
class Result:
    """us: medians of a launch; tflops: by the pairs that are shown."""

    name: str
    us: float
    eager_us: float
    torch_us: float | None
    torch_eager_us: float | None
    tflops: float
    times: float | None  #: torch's time over ours
    eager_times: float | None
    of_plain: float
    of_tiles: float
    error: float  #: the largest, beside float64
    torch_error: float | None
    torch_reason: str | None  #: why it has no result
    target: Mapping[str, float | None]


class Bench:
    """All cases of a size. with_torch: measure torch's, too."""

    def __init__(
        self, size: Size, device: torch.device, rounds: int, with_torch: bool, pause: float = 0.0
    ) -> None:  # fmt: skip
        self.size, self.device, self.rounds, self.with_torch, self.pause = size, device, rounds, with_torch, pause
        self.inputs = Inputs.draw(size, device, size.length, size.length, size.batch)
        torch._dynamo.config.recompile_limit = 64  # of one function: each case compiles it anew
        self.theirs = torch.compile(theirs.flex_attention, dynamic=False)
        self._plain: dict[str, tuple[timing.Call, float, float]] = {}

    def call(self, attend: Function, mods: Mods, inputs: Inputs, mask: Any) -> timing.Call:
        """One call, whatever number it has."""
        options = {"score_mod": mods.score, "block_mask": mask, "enable_gqa": True}
        return lambda _=0: attend(*inputs, **options)

    def theirs_of(self, mods: Mods, inputs: Inputs, mask: Any) -> tuple[timing.Call | None, float | None, str | None]:
        """torch's call, its error, or why there is none."""
        if not self.with_torch:
            return None, None, "not asked for"
        call = self.call(self.theirs, mods, inputs, mask)
        try:
            return call, inputs.error(mods, call(0)), None
        except Exception as error:  # torch's compiler has many, and Quire's figures do not depend on it
            return None, None, f"{type(error).__name__}: {str(error)[:300]}"

    def plain(self, name: str) -> tuple[timing.Call, float, float]:
        """A plain call, its pairs and those in its tiles."""
        if name not in self._plain:
            mods = CASES[name].make(self.size, self.device)
            mask = block_mask_of(mods, self.size.length, self.size.length, self.size.heads, self.device)
            call = self.call(quire.flex_attention, mods, self.inputs, mask)
            call(0)
            self._plain[name] = call, *pairs_of(mods, self.size, self.device, self.tile())
        return self._plain[name]

    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile of the last plan."""
        decision = [*plan_cache._plans.entries.values()][-1].plan.decision
        tile = decision.kernel.tile(decision.key)
        return max(1, tile.rows // self.inputs.group), tile.kv

    def measure(self, name: str, case: Case) -> Result:
        """Check a case, and time it beside torch and the plain call."""
        mods, size = case.make(self.size, self.device), self.size
        mask = block_mask_of(mods, size.length, size.length, size.heads, self.device)
        ours = self.call(quire.flex_attention, mods, self.inputs, mask)
        error = self.inputs.error(mods, ours(0))
        pairs, in_tiles = pairs_of(mods, size, self.device, self.tile())
        calls = [ours, self.plain(case.plain)[0]]
        torch_call, torch_error, reason = self.theirs_of(mods, self.inputs, mask)
        calls += [] if torch_call is None else [torch_call]
        if not error <= max(2 * (torch_error or 0), 0.02):
            raise ArithmeticError(f"off by {error}; torch by {torch_error}")
        us, plain_us, *others = self.times(calls)
        eager = self.eager_times([ours, *calls[2:]])
        torch_us, torch_eager = (others[0], eager[1]) if others else (None, None)
        _, plain_pairs, plain_tiles = self.plain(case.plain)
        return Result(
            name, us, eager[0], torch_us, torch_eager, 4 * size.dim * pairs * size.batch / us / 1e6,
            torch_us and torch_us / us, torch_eager and torch_eager / eager[0], pairs / us / (plain_pairs / plain_us),
            in_tiles / us / (plain_tiles / plain_us), error, torch_error, reason,
            {"times": case.times, "of_plain": case.of_plain, "of_tiles": case.of_tiles},
        )  # fmt: skip

    def times(self, calls: list[timing.Call]) -> list[float]:
        """Microseconds of a launch, the host ahead; of a call, without a GPU."""
        if self.device.type == "cpu":
            return [t.median for t in timing.cpu_times(calls, self.rounds)]
        estimates = [timing.estimate_us(call, 1) for call in calls]
        taken = timing.cuda_times(
            [(c, 1) for c in calls], estimates, 1, self.rounds, timing.flusher("write"), self.pause
        )
        return [t.median for t in taken]

    def eager_times(self, calls: list[timing.Call], count: int = 15) -> list[float]:
        """Microseconds between events around a call to an idle GPU."""
        if self.device.type == "cpu":
            return self.times(calls)
        taken: list[list[float]] = [[] for _ in calls]
        for _ in range(count):
            for call, times in zip(calls, taken, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                begin.record()
                call(0)
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) * 1e3)
        return [statistics.median(times) for times in taken]

    # --- decode, first calls, the host's time ---

    def decode(self, name: str) -> dict[str, Any]:
        """One query of each request: flex_attention, the decode wrapper over pages of 16, torch."""
        (batch, length), size = self.size.steps, self.size
        inputs = Inputs.draw(size, self.device, 1, length, batch)
        slopes = alibi(size, self.device).score
        assert slopes is not None
        score = (lambda s, b, h, i, j: slopes(s, b, h, i + (length - 1), j)) if "ALiBi" in name else None
        mods = Mods(score)
        ours = self.call(quire.flex_attention, mods, inputs, None)
        found = {"name": name, "error": inputs.error(mods, ours(0))}
        if not found["error"] < 0.02:
            raise ArithmeticError(f"off by {found['error']}")
        calls = {"us": ours, "wrapper_us": self.wrapper(inputs)}
        torch_call, found["torch_error"], found["torch_reason"] = self.theirs_of(mods, inputs, None)
        calls |= {} if torch_call is None else {"torch_us": torch_call}
        found |= dict(zip(calls, self.times([*calls.values()]), strict=True))
        return found | {"of_wrapper": found["wrapper_us"] / found["us"], "target": {"of_wrapper": 1.0}}

    def wrapper(self, inputs: Inputs) -> timing.Call:
        """The decode wrapper over pages of 16 tokens with the same keys and values."""
        batch, heads, length, dim = inputs.k.shape
        pages = -(-length // 16)
        cache = torch.zeros(batch * pages, 2, 16, heads, dim, dtype=inputs.k.dtype, device=self.device)
        for which, tensor in enumerate(inputs[1:]):
            padded = torch.nn.functional.pad(tensor.transpose(1, 2), (0, 0, 0, 0, 0, -length % 16))
            cache[:, which] = padded.reshape(batch * pages, 16, heads, dim)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace)
        indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
        numbers = torch.arange(batch * pages, dtype=torch.int32, device=self.device)
        last = torch.full((batch,), length - 16 * (pages - 1), dtype=torch.int32)
        wrapper.plan(indptr, numbers, last, self.size.heads, heads, dim, 16, q_data_type=inputs.q.dtype)
        q = inputs.q.squeeze(2).contiguous()
        out = torch.empty_like(q)
        return lambda _=0: wrapper.run(q, cache, out=out)

    def first_call(self) -> dict[str, Any]:
        """Seconds from a function that no cache knows to its result; then the same with another captured tensor."""
        size, began = self.size, list[Any]()
        n = min(2048, size.length)
        inputs, factor = Inputs.draw(size, self.device, n, n, 1), 1 + time.time_ns() % 99991 / 1e6

        def call(gain: torch.Tensor) -> float:
            begin = time.perf_counter()
            score = lambda s, b, h, i, j: s * factor + gain[h] * (i - j).abs()  # noqa: E731
            quire.flex_attention(*inputs, score, enable_gqa=True).float().sum().item()
            return time.perf_counter() - begin

        first = call(torch.rand(size.heads, device=self.device))
        unsubscribe = quire.events.subscribe(lambda event: began.append(event) if event.kind == "begin" else None)
        try:
            again = [call(torch.rand(size.heads, device=self.device)) for _ in range(5)]
        finally:
            unsubscribe()
        return {
            "name": "first call", "seconds": first, "again_us": statistics.median(again) * 1e6, "compiles": len(began),
            "target": {"seconds": 1.2, "compiles": 0},
        }  # fmt: skip

    def host(self) -> dict[str, Any]:
        """Microseconds of the host for a repeated call: eagerly, and for each of a graph's."""
        size, device, n = self.size, self.device, 64
        inputs = Inputs.draw(size, device, n, n, 2)
        slopes = torch.rand(size.heads, device=device)
        number = (torch.arange(n, device=device) // 20).int()
        score = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
        mask = block_mask_of(Mods(mask=lambda b, h, i, j: (i >= j) & (number[i] == number[j])), n, n, 1, device)
        found: dict[str, Any] = {"name": "host", "target": {"eager_us": 25, "compiled_us": 12}}
        layers = [("", quire.flex_attention)] + ([("torch_", theirs.flex_attention)] if self.with_torch else [])
        for prefix, attend in layers:

            def repeat(q: torch.Tensor, count: int, attend: Function = attend) -> torch.Tensor:
                for _ in range(count):
                    q = attend(q, *inputs[1:], score_mod=score, block_mask=mask, enable_gqa=True)
                return q

            compiled = torch.compile(repeat, fullgraph=True, dynamic=False)
            one, five = (self.host_us(partial(compiled, inputs.q, count)) for count in (1, 5))
            found |= {f"{prefix}compiled_us": (five - one) / 4, f"{prefix}graph_of_one_us": one}
            if not prefix:
                found["eager_us"] = self.host_us(lambda: repeat(inputs.q, 1))
                for name, mods, given in (
                    ("plain", Mods(), None),
                    ("score", Mods(score), None),
                    ("mask", Mods(), mask),
                ):
                    call = self.call(attend, mods, inputs, given)
                    found[f"eager_{name}_us"] = self.host_us(call)
        return found

    def host_us(self, call: Function, count: int = 300) -> float:
        """The median of the host's time for a call, while the device keeps up."""
        taken = []
        for i in range(count + 10):
            if self.device.type == "cuda" and i % 20 == 0:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            taken.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(taken[10:])


def show(result: Mapping[str, Any]) -> None:
    """Print what was measured."""
    skipped = ("name", "target")
    values = [f"{k} {v:.4g}" for k, v in result.items() if k not in skipped and isinstance(v, (int, float))]
    values += [result["failed"]] if "failed" in result else []
    print(f"{result['name']:<22}{'  '.join(values)}", flush=True)


def main() -> int:
    """Measure the cases that are asked for, in the time that there is, and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", default="*", help="names and patterns, with commas between")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds before each launch")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    began, device = time.monotonic(), torch.device(options.device)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # torch's, of block masks that are not compiled
    bench = Bench(
        Size() if device.type == "cuda" else SMALL, device, options.rounds, not options.no_torch, options.pause / 1e3
    )
    steps: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda name=name, case=case: asdict(bench.measure(name, case)) for name, case in CASES.items()
    }
    steps |= {"first call": bench.first_call, "host": bench.host}
    steps |= {name: lambda name=name: bench.decode(name) for name in ("decode", "decode, ALiBi")}
    patterns = options.cases.split(",")
    wanted = [name for name in steps if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    order = sorted(wanted, key=lambda name: name in ("dense", "10 % of 64 x 64", "STA 3-D"))  # what may be left out
    report = {**machine.describe(device), "pause_ms": options.pause, "rows": [], "left_out": []}
    report["size"] = bench.size._asdict()
    failed = False
    for i, name in enumerate(order):
        if time.monotonic() - began > options.seconds * (1 - 0.5 / len(order)):
            report["left_out"] = order[i:]
            print(f"no time for: {', '.join(order[i:])}")
            break
        try:
            with torch.no_grad():
                row = steps[name]()
        except Exception as error:  # of torch or Quire: the other cases are measured
            row, failed = {"name": name, "failed": f"{type(error).__name__}: {error}"}, True
        row["at_seconds"] = time.monotonic() - began
        report["rows"].append(row)
        show(row)
        machine.write_report(options.json, report)
    machine.write_report(options.json, report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
