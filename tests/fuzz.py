"""Random calls of the public functions on the CPU, good and bad, every tensor between pages that nobody may touch.

    python tests/fuzz.py --calls 20000 --seed 1        a table, and what failed; status 1 if anything did
    python tests/fuzz.py --call 1:417                  one call again, with its arguments
    python tests/fuzz.py --values ...                  the calls of fuzz_values.py: all callables, most calls valid

A call is right (tests/oracle.py in float64 says so) or refused by one of Quire's errors. Everything else is a failure:
a signal, more than ten seconds, an exception of somebody else's, a wrong number, a byte written that is not the call's,
a gradient lost, nonsense taken. Calls are made by a worker process; when one dies, its last call is made again alone.
"""

from __future__ import annotations

import own_environment  # noqa: F401  # before torch is

# isort: split
import argparse
import copy
import faulthandler
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quire
from fuzz_calls import CONSTRUCTORS, GENERATORS, Args, Case, Generators, Nonsense, has_memory
from guard import GuardedMemory
from isolation import SERVER, how_it_ended, waits
from mutations import mutate

SECONDS = 10.0  #: that a call may take
COMPILING = ("begin", "wait")  #: events after which a compiler runs, whose time is not the call's
GOOD_CHANCE = 0.3  #: of a call that nothing is wrong with
WARM_CHANCE = 0.3  #: of a bad call after a good one of the same wrapper
FINE = ("right", "refused")
VERDICTS = (
    *FINE, "wrong", "nonsense taken", "gradient lost", "good call refused", "foreign exception", "signal", "hang",
    "error of the fuzzer",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of a call."""

    kind: str
    name: str  #: of the function
    change: str = ""  #: what was wrong with the call, in words
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.kind in FINE


@dataclass
class Planned:
    """A call that was drawn: the case, its arguments as they will be passed, and how."""

    case: Case
    args: Args
    changes: list[str]
    upper: bool  #: against the guard page behind each tensor
    warm: bool
    grad_mode: bool


MISTAKES = Generators(GENERATORS, GOOD_CHANCE, SECONDS)


def draw(seed: str, generators: Generators = MISTAKES) -> Planned:
    """The call that a seed stands for."""
    rng = random.Random(seed)
    torch.manual_seed(rng.randrange(2**31))
    case = rng.choice(generators.cases)(rng)
    args, changes, changed = dict(case.args), [], set()
    count = 0 if rng.random() < generators.good_chance else rng.choice((1, 1, 1, 2))
    for _ in range(min(count, len(args))):
        name = rng.choice(sorted(set(args) - changed))  # torch itself crashes on some arguments that are changed twice
        words, args[name] = mutate(rng, name, args[name])
        changes.append(f"{name}={words}")
        changed.add(name)
    warm = rng.random() < WARM_CHANCE and not changed & CONSTRUCTORS
    return Planned(case, args, changes, rng.random() < 0.5, warm, rng.random() < 0.8)


def _placed(args: Args, memory: GuardedMemory) -> Args:
    return {name: memory.place(name, value) if has_memory(value) else value for name, value in args.items()}


def _copied(args: Args, good: Args) -> Args:
    """The arguments as they were before the call; of tensors without memory, what they held while they had it."""
    copies = {}
    for name, value in args.items():
        value = good[name] if isinstance(value, Tensor) and not has_memory(value) else value
        copies[name] = value.detach().resolve_neg().clone() if has_memory(value) else copy.copy(value)
    return copies


def _loses_gradient(args: Args, results: tuple[Tensor, ...]) -> bool:
    asked = any(isinstance(value, Tensor) and value.requires_grad for value in args.values())
    return asked and torch.is_grad_enabled() and all(result.grad_fn is None for result in results)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def make(planned: Planned) -> Verdict:
    """Make the call in this process."""
    case, change = planned.case, ", ".join(planned.changes)

    def verdict(kind: str, detail: str = "") -> Verdict:
        return Verdict(kind, case.name, change, detail)

    memory = GuardedMemory(planned.upper)
    args = _placed(planned.args, memory)
    before = _copied(args, case.args)
    with nullcontext() if planned.grad_mode else torch.inference_mode():
        try:
            is_good = True
            if planned.warm and planned.changes:
                case.invoke(_placed(case.args, GuardedMemory(planned.upper)))
            is_good = not planned.changes
            results = case.invoke(args)
            lost = _loses_gradient(args, results)
        except quire.QuireError as error:
            memory.assert_untouched(case.written)
            return verdict("good call refused" if is_good else "refused", _first_line(error))
        except Exception as error:
            return verdict("foreign exception", f"{_first_line(error)} at {_place(error)}")
    try:
        memory.assert_untouched(case.written)
        if lost:
            return verdict("gradient lost")
        case.check(before, tuple(r.detach() for r in results))
    except Nonsense as error:
        return verdict("nonsense taken", str(error))
    except AssertionError as error:
        return verdict("wrong", _first_line(error))
    except Exception as error:  # the oracle could make nothing of the arguments
        return verdict("nonsense taken", f"oracle: {_first_line(error)}")
    return verdict("right")


def _place(error: BaseException) -> str:
    """Where in Quire it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/quire/" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "no line of Quire's"


# Workers


def _work(pipe: Connection, crash_log: str, generators: Generators) -> None:
    """Make calls as their seeds come; tell when a compiler runs, whose time is not the call's."""
    torch.set_num_threads(2)
    quire.events.subscribe(lambda event: pipe.send(event.kind) if event.kind in (*COMPILING, "end") else None)
    with open(crash_log, "w") as log:  # noqa: PTH123  # faulthandler wants a descriptor that stays open
        faulthandler.enable(log)
        pipe.send("ready")
        while seed := _next(pipe):
            planned = draw(seed, generators)
            try:
                verdict = make(planned)
            except Exception as error:
                kind = "wrong" if isinstance(error, AssertionError) else "error of the fuzzer"
                verdict = Verdict(kind, planned.case.name, ", ".join(planned.changes), _first_line(error))
            pipe.send(verdict)
    os._exit(0)


def _next(pipe: Connection) -> str:
    """The seed of the next call; none where the program has ended."""
    try:
        return pipe.recv()
    except EOFError:
        return ""


class Worker:
    """A process that makes calls, one after another, until one is its last."""

    def __init__(self, generators: Generators = MISTAKES) -> None:
        self._log = tempfile.NamedTemporaryFile("r", suffix=".log")  # noqa: SIM115
        self._pipe, theirs = SERVER.Pipe()
        self._process = SERVER.Process(target=_work, args=(theirs, self._log.name, generators), daemon=True)
        self._process.start()
        theirs.close()
        self._generators = generators
        self._pipe.recv()  # it is ready

    def make(self, seed: str) -> Verdict:
        """Make a call; the worker is of no more use where that is a signal or a hang."""
        try:
            self._pipe.send(seed)
            message: Any = "call"
            while not isinstance(message, Verdict):
                if not waits(self._pipe, self._process.pid, 60.0 if message in COMPILING else self._generators.seconds):
                    return self._lost(seed, "hang", f"over {self._generators.seconds:.0f} s")
                message = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            stack = [line.strip() for line in self._log.read().splitlines() if "/quire/" in line]
            return self._lost(seed, "signal", f"{how_it_ended(self._process.exitcode)} {' '.join(stack[:1])}")
        return message

    def _lost(self, seed: str, kind: str, detail: str) -> Verdict:
        self.end()
        planned = draw(seed, self._generators)
        return Verdict(kind, planned.case.name, ", ".join(planned.changes), detail)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._log.close()


def run(calls: int, seed: int, generators: Generators = MISTAKES) -> Iterator[tuple[str, Verdict]]:
    """Each call's seed and verdict. A call that ended its worker is made again by a new one, alone."""
    worker = Worker(generators)
    try:
        for i in range(calls):
            verdict = worker.make(f"{seed}:{i}")
            if verdict.kind in ("signal", "hang"):
                worker = Worker(generators)
                again = worker.make(f"{seed}:{i}")
                if again.kind in ("signal", "hang"):
                    worker = Worker(generators)
                if again.kind != verdict.kind:
                    verdict = Verdict(
                        verdict.kind, verdict.name, verdict.change,
                        f"{verdict.detail} (alone: {again.kind}; an earlier call is to blame, or the clock)",
                    )  # fmt: skip
            yield f"{seed}:{i}", verdict
    finally:
        worker.end()


# Reports


def table(verdicts: list[tuple[str, Verdict]]) -> str:
    """Verdicts by function."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for _, verdict in verdicts:
        counts[verdict.name][verdict.kind] += 1
    kinds = [kind for kind in VERDICTS if any(c[kind] for c in counts.values())]
    width = max(map(len, counts))
    lines = [f"{'':<{width}} " + " ".join(f"{kind:>{max(7, len(kind))}}" for kind in kinds)]
    for name in [*sorted(counts), "all"]:
        row = counts[name] if name in counts else sum(counts.values(), Counter())
        lines.append(f"{name:<{width}} " + " ".join(f"{row[kind] or '.':>{max(7, len(kind))}}" for kind in kinds))
    return "\n".join(lines)


def failures(verdicts: list[tuple[str, Verdict]], each: int = 3) -> str:
    """Failures of a kind together, with the seeds of the first few."""
    groups: dict[tuple[str, str, str], list[tuple[str, Verdict]]] = defaultdict(list)
    for seed, verdict in verdicts:
        if not verdict.is_fine:
            kind_of_detail = "".join("#" if c.isdigit() else c for c in verdict.detail)
            groups[verdict.kind, verdict.name, kind_of_detail[:60]].append((seed, verdict))
    lines = []
    for (kind, name, _), group in sorted(groups.items(), key=lambda item: (VERDICTS.index(item[0][0]), -len(item[1]))):
        lines.append(f"{kind}: {name}, {len(group)} calls: {group[0][1].detail}")
        lines += [f"    --call {seed}  {verdict.change}" for seed, verdict in group[:each]]
    return "\n".join(lines)


def _show(seed: str, generators: Generators) -> Verdict:
    planned = draw(seed, generators)
    print(f"{planned.case.name}, changed: {', '.join(planned.changes) or 'nothing'}")
    print(f"tensors against the {'upper' if planned.upper else 'lower'} guard, after a good call: {planned.warm}")
    for name, value in planned.args.items():
        if isinstance(value, Tensor):
            text = f"{value.dtype} {list(value.shape)} strides {list(value.stride()) if has_memory(value) else '-'}"
            small = has_memory(value) and value.numel() <= 16 and not value.is_floating_point()
            print(f"  {name}: {text} {value.tolist() if small else ''}")
        else:
            print(f"  {name}: {value!r}")
    worker = Worker(generators)
    try:
        return worker.make(seed)
    finally:
        worker.end()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--call", metavar="SEED:NUMBER", help="make this one call again")
    parser.add_argument("--only", metavar="NAME", help="generators whose name contains this")
    parser.add_argument("--values", action="store_true", help="draw from fuzz_values.py: most calls are valid")
    options = parser.parse_args(arguments)
    kind: Generators = import_module("fuzz_values").VALUES if options.values else MISTAKES
    generators = kind.named(options.only or "")
    if options.call:
        verdict = _show(options.call, generators)
        print(f"{verdict.kind}: {verdict.detail}")
        return 0 if verdict.is_fine else 1
    verdicts, began = [], time.monotonic()
    for seed, verdict in run(options.calls, options.seed, generators):
        verdicts.append((seed, verdict))
        if not verdict.is_fine:
            print(failures(verdicts[-1:]), file=sys.stderr, flush=True)
        if len(verdicts) % 200 == 0:
            bad = sum(not v.is_fine for _, v in verdicts)
            print(
                f"{len(verdicts)} calls, {time.monotonic() - began:.0f} s, {bad} failures", file=sys.stderr, flush=True
            )
    print(table(verdicts))
    print(failures(verdicts))
    return 0 if all(verdict.is_fine for _, verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
