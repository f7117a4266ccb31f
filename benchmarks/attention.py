"""Attention beside its peers: providers x rows, interleaved in one process.

Every result is checked against float64 before anything is timed. Then the providers of a row take turns (A B C A B C
...) for several rounds, timed by events, out of a cold L2; small rows run as CUDA graphs.
Reported are the median with the least and the most, the rate, the fraction of the roof measured in this run, and the
ratio to the best peer.

    python benchmarks/attention.py --rows prefill --providers quire,fi-fa3,fa3 --json results/prefill.json

The exit status is 1 if a result of quire is wrong, or off by more than twice torch's own error.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from inputs import Inputs, make_inputs
from machine import Roof, clocks, describe, measure_roof, write_report
from peers import Launch, Provider, Refused, select_providers
from reference import Accuracy, Sample, take_sample
from rows import Row, select_rows
from timing import Call, Timing, captured, cpu_times, cuda_times, estimate_us, flusher, sets_for

__all__ = ["Result", "main", "measure_row"]


@dataclass
class Result:
    """One provider on one row."""

    provider: str
    peer: bool
    reason: str | None = None  #: why there is no figure
    failed: bool = False  #: the reason is an error rather than a refusal
    accuracy: Accuracy | None = None
    graph: bool = False
    note: str | None = None  #: what makes the figure differ in kind from its neighbours
    timing: Timing | None = None
    rate: float | None = None
    of_roof: float | None = None
    of_best_peer: float | None = None  #: > 1: faster than the best peer

    @property
    def bad(self) -> bool:
        return self.failed or (self.accuracy is not None and not self.accuracy.fine)


@dataclass
class _Runner:
    """A provider that has been checked and awaits its turn."""

    result: Result
    launch: Launch
    estimate_us: float = 0.0


def measure_row(
    row: Row, providers: list[Provider], device: torch.device, roof: Roof, rounds: int, flush: str = "write"
) -> list[Result]:
    """All providers on one row; with no rounds, results are checked and nothing is timed."""
    sets = [make_inputs(row, device, seed) for seed in range(sets_for(row.bytes, device))]
    sample = take_sample(sets[0])
    results = [Result(provider.name, provider.peer) for provider in providers]
    runners = []
    for provider, result in zip(providers, results, strict=True):
        launch = _prepare(provider, result, row, sets, sample)
        if launch is not None:
            runners.append(_Runner(result, launch))
    if rounds:
        _time(row, runners, len(sets), device, rounds, flush)
    _compare(row, results, roof)
    return results


def _prepare(provider: Provider, result: Result, row: Row, sets: list[Inputs], sample: Sample) -> Launch | None:
    """What launches it, if it takes the row and its result is right; the reason goes into `result` otherwise."""
    result.reason = provider.reject(row, sets[0].q.device)
    if result.reason is not None:
        return None
    sets[0].out.fill_(torch.nan)
    try:
        launch = provider.prepare(sets)
        result.accuracy = sample.check(launch(0))
    except Refused as refusal:
        result.reason = str(refusal)
        return None
    except Exception as error:
        _failed(result, error)
        return None
    if result.accuracy.wrong:
        result.reason = f"wrong result: a row is off by {result.accuracy.worst:.2g} of its norm"
        return None
    return launch


def _failed(result: Result, error: Exception) -> None:
    """A provider's own failure does not end the run: the report tells it, and one of quire's makes the status 1."""
    _raise_if_lost(error)
    result.reason, result.failed = f"{type(error).__name__}: {_first_line(error)}", True


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no text"


def _raise_if_lost(error: BaseException) -> None:
    """After an illegal access nothing works in this process: say so at once."""
    if isinstance(error, torch.cuda.OutOfMemoryError) or not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        raise RuntimeError(f"the device is lost: {broken}") from error


def _time(row: Row, runners: list[_Runner], num_sets: int, device: torch.device, rounds: int, flush: str) -> None:
    if device.type == "cpu":
        timings = cpu_times([runner.launch for runner in runners], rounds)
    else:
        runners = [runner for runner in runners if _estimated(runner, num_sets)]
        calls: list[tuple[Call, int]] = [
            _graph(runner, num_sets) if row.is_small else (runner.launch, 1) for runner in runners
        ]
        estimates = [runner.estimate_us for runner in runners]
        timings = cuda_times(calls, estimates, num_sets, rounds, flusher(flush))
    for runner, timing in zip(runners, timings, strict=True):
        runner.result.timing = timing


def _estimated(runner: _Runner, num_sets: int) -> bool:
    """Warm up; False if that fails."""
    try:
        runner.estimate_us = estimate_us(runner.launch, num_sets)
    except Exception as error:
        _failed(runner.result, error)
        return False
    return True


def _graph(runner: _Runner, num_sets: int) -> tuple[Call, int]:
    """The launches as a graph; by themselves, with a note, if they cannot be captured."""
    try:
        call, launches = captured(runner.launch, num_sets)
    except Exception as error:
        _raise_if_lost(error)
        runner.result.note = f"not captured in a graph ({_first_line(error)})"
        return runner.launch, 1
    runner.result.graph = True
    return call, launches


def _compare(row: Row, results: list[Result], roof: Roof) -> None:
    """Rates, fractions and ratios. A peer whose result is off by more than is allowed counts, with its error shown."""
    timed = [(result, result.timing) for result in results if result.timing is not None]
    peers = [timing.median for result, timing in timed if result.peer]
    for result, timing in timed:
        result.rate = row.rate(timing.median / 1e6)
        result.of_roof = roof.us(row.flops, row.bytes) / timing.median
        result.of_best_peer = min(peers) / timing.median if peers else None


# --- the verdict -----------------------------------------------------------------------------------------------------


def verdict(row: Row, results: list[Result], medians: dict[str, float]) -> dict[str, Any] | None:
    """Whether quire reaches the row's target; None if it has none. `medians`: quire's microseconds of rows so far."""
    if row.target is None:
        return None
    ours = next((r for r in results if r.provider == "quire" and r.timing is not None), None)
    reached = None if ours is None else _reached(row, ours, medians)
    return {"target": str(row.target), "reached": reached}


def _reached(row: Row, ours: Result, medians: dict[str, float]) -> bool | None:
    """None where what the target refers to was not measured."""
    target = row.target
    assert target is not None and ours.timing is not None
    median = ours.timing.median
    if target.kind == "us":
        return median <= target.bound
    if target.kind == "tflops":
        return row.flops / median / 1e6 >= target.bound
    if target.kind == "peer":
        return None if ours.of_best_peer is None else ours.of_best_peer >= target.bound
    if target.row not in medians:
        return None
    if target.kind == "time_of":
        return median <= target.bound * medians[target.row]
    (other,) = select_rows((target.row,))
    return row.flops / median >= target.bound * other.flops / medians[target.row]


def geometric_mean(ratios: list[float]) -> float | None:
    """Of quire's ratios to the best peer."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


# --- the report ------------------------------------------------------------------------------------------------------


def row_report(row: Row, results: list[Result], judged: dict[str, Any] | None) -> dict[str, Any]:
    """One row as JSON."""
    problem = {key: value for key, value in asdict(row).items() if key != "target"}
    counted = {"flops": row.flops, "kv_bytes": row.kv_bytes, "bytes": row.bytes, "unit": row.unit}
    return {"row": row.name, "problem": problem, **counted, "verdict": judged, "results": [asdict(r) for r in results]}


_COLUMNS = ("provider", "us", "least", "most", "rate", "roof", "best peer", "error", "")


def table_lines(results: list[Result], row: Row) -> list[tuple[str, ...]]:
    """The cells of a row's table: who was timed."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        t, a = result.timing, result.accuracy
        if t is None or a is None:
            continue
        ratio = "" if result.of_best_peer is None else f"{result.of_best_peer:.3f}"
        remarks = ["graph"] * result.graph + [result.note or ""] + ["INACCURATE"] * (not a.fine)
        lines.append((
            result.provider, f"{t.median:.1f}", f"{t.least:.1f}", f"{t.most:.1f}", f"{result.rate:.4g} {row.unit}",
            f"{result.of_roof:.3f}", ratio, f"{a.error:.1e} (torch {a.torch_error:.1e})",
            " ".join(filter(None, remarks)),
        ))  # fmt: skip
    return lines


def absences(results: list[Result]) -> list[str]:
    """Who was not timed, by reason."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.timing is None:
            reason = result.reason or _checked(result)
            names.setdefault("FAILED " * result.failed + reason, []).append(result.provider)
    return [f"  {', '.join(providers)}: {reason}" for reason, providers in names.items()]


def _checked(result: Result) -> str:
    a = result.accuracy
    assert a is not None
    return f"error {a.error:.1e} (torch {a.torch_error:.1e})" + (", not timed" if a.fine else ", INACCURATE")


def show(row: Row, results: list[Result], judged: dict[str, Any] | None) -> None:
    """A table of a row, with rich where that is installed, and below it who is not in it."""
    title = row.name
    if judged is not None:
        words = {True: "reached", False: "MISSED", None: "open"}
        title += f"   target {judged['target']}: {words[judged['reached']]}"
    lines = table_lines(results, row)
    if importlib.util.find_spec("rich") is None or not lines:
        _show_plain(title, lines)
    else:
        _show_rich(title, lines)
    print(*absences(results), sep="\n", flush=True)


def _show_rich(title: str, lines: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*_COLUMNS, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 160).print(table, markup=False)


def _show_plain(title: str, lines: list[tuple[str, ...]]) -> None:
    widths = [max(len(line[i]) for line in [_COLUMNS, *lines]) for i in range(len(_COLUMNS))]
    print(title)
    for line in [_COLUMNS, *lines] if lines else []:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


# --- the command line ------------------------------------------------------------------------------------------------


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_words, default=(), help="names, patterns or groups; default: all but tiny")
    parser.add_argument("--providers", type=_words, default=(), help="names; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each provider (default 7)")
    parser.add_argument("--flush", choices=("write", "read"), default="write", help="how the L2 is emptied")
    parser.add_argument("--check", action="store_true", help="compile, check every result, time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after each row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--list", action="store_true", help="print the rows and their targets, measure nothing")
    options = parser.parse_args(arguments)
    try:
        options.rows, options.providers = select_rows(options.rows), select_providers(options.providers)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, got {options.rounds}")
    options.rounds = 0 if options.check else options.rounds
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a result of quire was not right."""
    options = _arguments(arguments)
    if options.list:
        for row in options.rows:
            print(f"{row.name:32} {row.flops / 1e9:10.2f} GFLOP {row.kv_bytes / 1e6:9.1f} MB   {row.target or ''}")
        return 0
    device = torch.device(options.device)
    roof = measure_roof(device)
    report: dict[str, Any] = {**describe(device), "roof": asdict(roof), "rows": []}
    report |= {"rounds": options.rounds, "flush": options.flush}
    print(f"{report['device']}: {roof.tflops:.0f} TFLOP/s, {roof.gigabytes_per_s:.0f} GB/s read, measured now")
    right = _measure_all(options, device, roof, report)
    report["gpu_after"] = clocks() if device.type == "cuda" else None
    write_report(options.json, report)
    if report["geometric_mean"] is not None:
        print(f"quire against the best peer of each row: geometric mean {report['geometric_mean']:.3f}")
    return 0 if right else 1


def _measure_all(options: argparse.Namespace, device: torch.device, roof: Roof, report: dict[str, Any]) -> bool:
    """Fill the report row by row; whether everything of quire was right."""
    medians: dict[str, float] = {}
    ratios: list[float] = []
    right = True
    for row in options.rows:
        results = measure_row(row, options.providers, device, roof, options.rounds, options.flush)
        for result in results:
            if result.provider == "quire" and result.timing is not None:
                medians[row.name] = result.timing.median
                ratios += [] if result.of_best_peer is None else [result.of_best_peer]
        judged = verdict(row, results, medians)
        right = right and not any(result.bad for result in results if not result.peer)
        report["rows"].append(row_report(row, results, judged))
        report["geometric_mean"] = geometric_mean(ratios)
        show(row, results, judged)
        write_report(options.json, report)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return right


if __name__ == "__main__":
    sys.exit(main())
