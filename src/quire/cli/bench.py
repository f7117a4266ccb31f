"""`quire bench` replays the batches of a record, on two versions of Quire that take turns, and says which is slower.

Two workers (replay.py), each run by the interpreter of a version, take turns in a changing order. A round gives the
least time of some calls of each, and so one ratio. The answer is the median of the ratios and, by their order, a bound
of it that holds in 99.8 of 100 cases, so that outliers of a busy machine count little. Pairs of workers are started
anew a few times, because where a process's memory lies changes its speed for as long as it lives.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from quire.cli import add_command, checked, count, print_table, replay, speed, tell
from quire.errors import ValidationError
from quire.jit.config import environment_with

_GENERATIONS = 3  #: pairs of workers, one after the other
_LEAST_ROUNDS = 12  #: in a generation
_MOST_GROUPS, _ROUND_SECONDS = 10, 5e-3  #: groups of calls in a round, and the seconds of a round
_QUANTILE = 3.09  #: of the normal distribution, for 99.8 %
_RESERVE = 5.0  #: seconds for what comes before and behind the measurements
_ENOUGH = 3.0  #: the bound that is wanted, as a part of the limit


# --- two workers that take turns --------------------------------------------------------------------------------------

_START = "import sys; sys.path.pop(0); exec(compile(open({0!r}).read(), {0!r}, 'exec'), {{'__name__': '__worker__'}})"


class Worker:
    """A process that replays batches with the Quire of `python`; ValidationError if it has none."""

    def __init__(self, python: str, threads: int) -> None:
        self._pinned = threads == 1
        read, write = os.pipe()
        command = [python, "-c", _START.format(str(Path(replay.__file__).resolve())), str(write)]
        # Threads that spin while they wait would be counted.
        environment = environment_with(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(write,), text=True, env=environment
            )
        except OSError as error:
            os.close(read)
            raise ValidationError(f"bench: expected a Python interpreter, got {python}: {error}") from error
        finally:
            os.close(write)
        self._answers = os.fdopen(read)
        self._python, self.about = python, dict[str, Any]()

    def wait(self) -> Worker:
        """Wait until it has started."""
        self.about = self._answer()
        if "quire" not in self.about:
            raise ValidationError(f"bench: expected an interpreter that imports torch and quire, got {self._python}")
        return self

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
        return found

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer of serve() to a question."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "its process has ended"}
        return self._answer()

    def pin(self, processor: int) -> None:
        """With one thread: run on this processor, as its opponent does."""
        if self._pinned:
            os.sched_setaffinity(self._process.pid, {processor})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended first
            self._process.stdin.close()
        self._process.wait()
        self._answers.close()


@dataclass
class Row:
    """A batch, and what was measured of it on each side."""

    batch: dict[str, Any]
    chosen: list[str] = field(default_factory=list)  #: variants
    errors: list[str] = field(default_factory=list)  #: "" where it could be replayed
    rounds: list[list[list[float]]] = field(default_factory=list)  #: seconds, for each generation, round and side
    calls: list[dict[str, int]] = field(default_factory=list)  #: how to ask each worker for a round

    def seconds(self, side: int) -> list[float]:
        """Of all rounds."""
        return [taken[side] for generation in self.rounds for taken in generation]

    def ratio(self) -> tuple[float, float]:
        """Side 1 to side 0, and its bound: of order statistics, or of how much generations differ."""
        ratios = [[new / old for old, new in generation] for generation in self.rounds if generation]
        medians = [median(generation) for generation in ratios]
        between = (max(medians) - min(medians)) / 2
        return median(medians), max(between, order_bound(list(chain.from_iterable(ratios))))


def order_bound(values: Sequence[float]) -> float:
    """Half of the interval that has the median of what `values` were drawn from, in 99.8 of 100 cases."""
    n = len(values)
    skipped = math.floor((n - _QUANTILE * math.sqrt(n)) / 2)
    if skipped < 0:
        return math.inf
    ordered = sorted(values)
    return (ordered[n - 1 - skipped] - ordered[skipped]) / 2


def measure(rows: Sequence[Row], workers: Sequence[Worker], seconds: float, goal: float) -> None:
    """Add a generation of rounds to each row, until its bound is below `goal` or time is up."""
    for row in rows:
        answers = [worker.ask(batch=row.batch) for worker in workers]
        row.chosen = [answer.get("chosen", "") for answer in answers]
        row.errors = [answer.get("error", "") for answer in answers]
        row.calls = [_calls(answer) for answer in answers]
        row.rounds.append([])
    deadline, number, left = time.monotonic() + seconds, 0, [row for row in rows if not any(row.errors)]
    while left:
        for row in left:
            if time.monotonic() > deadline:
                return
            _round(row, workers, number)
        number += 1
        left = [
            row for row in left if not any(row.errors) and (number < _LEAST_ROUNDS or _bound(row.rounds[-1]) > goal)
        ]


def _calls(answer: dict[str, Any]) -> dict[str, int]:
    """Calls of a group, and groups of a round: many short ones, one of which nothing disturbs; few of long calls."""
    once = max(1e-7, answer.get("seconds", 1.0))
    groups, calls = min(_MOST_GROUPS, max(3, round(_ROUND_SECONDS / once))), _ROUND_SECONDS / _MOST_GROUPS / once
    return {"index": answer.get("index", 0), "calls": max(1, round(calls)), "groups": groups}


def _bound(rounds: Sequence[Sequence[float]]) -> float:
    """Of the ratio of two sides, or of one side's seconds in relation to their median."""
    values = [taken[-1] / (taken[0] if len(taken) == 2 else 1) for taken in rounds]
    return order_bound(values) / median(values)


def _round(row: Row, workers: Sequence[Worker], number: int) -> None:
    """The least seconds of a call on each side, on one processor, in changing order."""
    processors, taken = sorted(os.sched_getaffinity(0)), [math.nan] * len(workers)
    for side in sorted(range(len(workers)), reverse=number % 2 == 1):
        workers[side].pin(processors[number // 2 % len(processors)])
        answer = workers[side].ask(**row.calls[side], renew=number % 4 == 0)
        if "error" in answer:
            row.errors[side] = answer["error"]
            return
        taken[side] = answer["seconds"]
    row.rounds[-1].append(taken)


def compare(
    rows: Sequence[Row], pythons: Sequence[str], seconds: float, limit: float, threads: int, device: str | None = None
) -> list[dict[str, Any]]:
    """Measure rows in generations of workers within `seconds`; returns what the workers say of themselves.

    `device`: the one that they must run on; ValidationError before anything is measured on another.
    """
    end, generations, about = time.monotonic() + seconds - _RESERVE, _GENERATIONS, list[dict[str, Any]]()
    for generation in range(_GENERATIONS):
        if generation >= generations:
            break
        began = time.monotonic()
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(python, threads)) for python in pythons]
            about = [worker.wait().about for worker in workers]
            if device not in (None, got := about[-1]["device"]):
                raise ValidationError(f"bench --against: expected a result of this device, {got}, got one of {device}")
            if not generation:  # a third of the time may go into starts
                generations = max(1, min(_GENERATIONS, int(seconds / 3 / (time.monotonic() - began))))
            left = (end - time.monotonic()) / (generations - generation)
            measure(rows, workers, left, limit / _ENOUGH)
    return about


# --- the command -----------------------------------------------------------------------------------------------------


def add_commands(commands: Any) -> None:
    """Add `bench` to the parser."""
    bench = add_command(
        commands, "bench", _bench, "measure attention on this machine, or replay recorded batches",
        "Measure attention of Quire and of the libraries beside it, and write a table and a picture. What another "
        "library compiles at its first call comes on top of --seconds. With --recorded, "
        "replay the batches of a record; with --against, exit status 1 if any is slower than the limit.",
    )  # fmt: skip
    bench.add_argument("--out", type=Path, default=Path("quire-bench"), metavar="FILE", help="default: quire-bench")
    bench.add_argument("--recorded", type=Path, metavar="FILE", help="what QUIRE_RECORD wrote")
    bench.add_argument(
        "--against", metavar="PYTHON|RESULT", help="the interpreter of another version, or a file of --save"
    )
    bench.add_argument(
        "--python", default=sys.executable, help="the interpreter of the version to judge (default: this)"
    )
    bench.add_argument("--save", type=Path, metavar="FILE", help="write the times, for a later --against")
    bench.add_argument("--limit", type=checked(_percent), default=0.03, metavar="PERCENT", help="default 3%%")
    bench.add_argument("--seconds", type=count, default=60, metavar="N", help="of all measurements (default 60)")
    bench.add_argument("--most", type=count, default=16, metavar="N", help="batches that are replayed (default 16)")
    bench.add_argument("--threads", type=count, default=1, metavar="N", help="of the cpu backend (default 1)")


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ValidationError(f"expected a percentage such as 3%, got {text!r}")
    return value


def read_batches(path: Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """At most `most` batches of a record, some of each variant, the largest first; and how many others it has."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValidationError(f"bench --recorded: expected a file of QUIRE_RECORD, got {path}: {error}") from error
    recorded = [line for line in lines if isinstance(line, dict) and isinstance(line.get("batch"), dict)]
    plain = {json.dumps(line["batch"], sort_keys=True): line for line in recorded if line["batch"].get("requests")}
    if not plain:
        raise ValidationError(
            f"bench --recorded: {path} has no batch that can be replayed; record a run: QUIRE_RECORD=FILE"
        )
    of_variant: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(plain.values(), key=_work, reverse=True):
        of_variant.setdefault(line["slug"], []).append(line["batch"])
    turns = [batches[i] for i in range(len(plain)) for batches in of_variant.values() if i < len(batches)]
    return turns[:most], len(recorded) - len(turns[:most])


def _work(line: dict[str, Any]) -> float:
    return float(sum(requests * (q + 1) * (kv + 1) for requests, q, kv in line["batch"]["requests"]))


def _bench(options: argparse.Namespace) -> int:
    if options.recorded is None:
        if options.against or options.save:
            raise ValidationError("bench: expected --recorded FILE with --against or --save, got none.")
        return speed.run(options)
    batches, others = read_batches(options.recorded, options.most)
    rows, saved, pythons = [Row(batch) for batch in batches], dict[str, Any](), [options.python]
    if options.against is not None and options.against.endswith(".json"):
        saved = _read_result(Path(options.against))
    elif options.against is not None:
        pythons.insert(0, options.against)
    device = saved["about"]["device"] if saved else None
    about = compare(rows, pythons, options.seconds, options.limit, options.threads, device)
    judged = [_judge(row, saved, options.limit) for row in rows]
    if options.save is not None:
        _save(options.save, rows, about[-1])
    sides = [*([saved["about"]] if saved else []), *about]
    tell(options, partial(_print, judged, sides, others), batches=judged, sides=sides, not_replayed=others)
    return int(any(row["verdict"] in ("slower", "failed", "unclear") for row in judged))


def _judge(row: Row, saved: dict[str, Any], limit: float) -> dict[str, Any]:
    """One line of the answer. "slower": by more than the limit, and equal speed lies outside of the bound."""
    found: dict[str, Any] = {"batch": _spell(row.batch), "chosen": row.chosen[-1], "seconds": None, "ratio": None}
    if any(row.errors):
        verdict = "failed" if row.errors[-1] else "new"
        return {**found, "bound": None, "verdict": verdict, "error": row.errors[-1] or row.errors[0]}
    new = row.seconds(-1)
    if not new:
        return {**found, "bound": None, "verdict": "unclear", "error": "no time was left for it"}
    found |= {"seconds": median(new), "bound": None, "verdict": "measured", "error": ""}
    old = saved.get("batches", {}).get(json.dumps(row.batch, sort_keys=True)) if saved else None
    if old is not None:
        ratio = median(new) / median(old)
        bound = ratio * math.hypot(order_bound(new) / median(new), order_bound(old) / median(old))
    elif len(row.calls) == 2:
        ratio, bound = row.ratio()
    else:
        return found
    verdict = "slower" if ratio > 1 + limit and ratio - bound > 1 else "unclear" if bound > limit else "equal"
    verdict = "faster" if ratio < 1 - limit and ratio + bound < 1 else verdict
    return {**found, "ratio": ratio, "bound": bound, "verdict": verdict}


def _spell(batch: dict[str, Any]) -> str:
    """ "4 x 1/512 8/2x128 causal": requests, rows and tokens of the longest, heads and dims."""
    requests = sum(group[0] for group in batch["requests"])
    dims = "x".join(str(batch[f"head_dim_{name}"]) for name in ("qk", "vo"))
    _, q, kv = batch["requests"][0]
    return f"{requests} x {q}/{kv} {batch['num_qo_heads']}/{batch['num_kv_heads']} {dims} {batch['mask']}"


def _print(judged: list[dict[str, Any]], sides: list[dict[str, Any]], others: int) -> None:
    for side in sides:
        print(f"quire {side['quire']}, torch {side['torch']}, {side['device']}: {side['file']}")
    rows = []
    for row in judged:
        shown = [f"{value:.{digits}f}" if value else "" for value, digits in (
            ((row["seconds"] or 0) * 1e6, 1), (row["ratio"], 3), (row["bound"], 3))]  # fmt: skip
        rows.append((row["batch"], *shown, f"{row['verdict']} {row['error']}".strip()))
    print_table(("batch", "microseconds", "ratio", "within", ""), rows)
    print(f"{len(judged)} batches, {sum(row['verdict'] == 'slower' for row in judged)} slower; {others} not replayed")
    if any(row["verdict"] == "unclear" for row in judged):
        print("unclear: the machine is too busy for this limit; give more --seconds, or fewer batches (--most)")


def _save(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    batches = {json.dumps(row.batch, sort_keys=True): row.seconds(-1) for row in rows if not row.errors[-1]}
    path.write_text(json.dumps({"about": about, "batches": batches}, indent=1) + "\n", encoding="utf-8")


def _read_result(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = found["about"]["device"], found["batches"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValidationError(f"bench --against: expected a file of --save, got {path}: {error}") from error
    return found
