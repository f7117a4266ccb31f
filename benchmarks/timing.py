"""Time several launches against one another: in turn, on the device's clock, out of a cold cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

__all__ = ["Call", "Timing", "captured", "cpu_times", "cuda_times", "estimate_us", "flusher", "sets_for"]

#: Rotating through this much, or overwriting it, leaves nothing of a row in the L2 (60 MB on an H200).
COLD_BYTES = 256 << 20
LAUNCHES_PER_GRAPH = 20
_SLICE_US = 20_000.0  #: of one provider in one round
_MOST_SAMPLES = 30  #: of one provider in one round
_AHEAD_CLOCKS = 200_000  #: that the device waits, so that the host is ahead when a launch begins

Call = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch."""

    median: float
    least: float
    most: float
    samples: int

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        return cls(statistics.median(times), min(times), max(times), len(times))


def sets_for(num_bytes: int, device: torch.device) -> int:
    """How many sets of inputs a row is rotated through."""
    return 1 if device.type == "cpu" else min(32, max(1, math.ceil(COLD_BYTES / num_bytes)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def estimate_us(call: Call, num_sets: int) -> float:
    """A first idea of a launch's time, and its warm-up: the least of several, the host's share included."""
    call(0)
    torch.cuda.synchronize()
    times = []
    for i in range(5):
        begin, end = _event(), _event()
        torch.cuda._sleep(_AHEAD_CLOCKS)
        begin.record()
        call(i % num_sets)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times)


def captured(call: Call, num_sets: int) -> tuple[Call, int]:
    """Launches over all sets as one graph: what replays it, and how many launches it holds. Raises if it cannot be."""
    launches = math.ceil(LAUNCHES_PER_GRAPH / num_sets) * num_sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i % num_sets)

    def replay(_: int) -> torch.cuda.CUDAGraph:  # the graph lives as long as this does
        graph.replay()
        return graph

    replay(0)
    torch.cuda.synchronize()
    return replay, launches


def flusher(kind: str) -> Call:
    """What empties the L2. "write" leaves lines that the next kernel must write back, as triton's do_bench does, and as
    the kernel before it does in a model; "read" leaves clean ones.
    """
    data = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    return (lambda _: data.zero_()) if kind == "write" else (lambda _: data.amax())


def cuda_times(
    calls: list[tuple[Call, int]],
    estimates_us: list[float],
    num_sets: int,
    rounds: int,
    flush: Call,
    pause: float = 0.0,
) -> list[Timing]:
    """Each call (and how many launches it makes), A B C B C A ...: `rounds` slices of each, timed by events.

    Two rounds have one order, there and back: a launch is up to 5 % faster after others that leave power unused.
    With an even number of rounds each call comes before and after each other one equally often.
    A call of a single launch comes out of a flushed L2; a graph rotates through more than the L2 holds by itself.

    pause: seconds in which the device rests before each launch. Without them launches follow one another, and long
    ones run at the clock that the card's power limit leaves; with a few milliseconds each has the highest clock.
    """
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        order = list(zip(calls, estimates_us, times, strict=True))
        order = Random(number // 2).sample(order, len(order))[:: -1 if number % 2 else 1]
        for (call, launches), estimate, taken in order:
            count = max(3, min(_MOST_SAMPLES, int(_SLICE_US / (estimate * launches))))
            taken.extend(_slice(call, launches, count, num_sets, flush if launches == 1 else None, pause))
    return [Timing.of(taken) for taken in times]


def _slice(call: Call, launches: int, count: int, num_sets: int, flush: Call | None, pause: float) -> list[float]:
    """Microseconds of a launch, `count` times; without a pause the host waits for the device at the end only."""
    events = [(_event(), _event()) for _ in range(count)]
    call(0)  # clocks and caches of the previous provider are not this one's
    torch.cuda._sleep(1_000_000)
    for i, (begin, end) in enumerate(events):
        if pause:
            torch.cuda.synchronize()
            time.sleep(pause)
            torch.cuda._sleep(10 * _AHEAD_CLOCKS)  # a host that has slept is slow
        if flush is not None:
            flush(i)
        begin.record()
        call(i % num_sets)
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / launches for begin, end in events]


def cpu_times(calls: list[Call], rounds: int, seconds: float = 0.05) -> list[Timing]:
    """The same on the cpu, by the wall clock."""
    for call in calls:
        call(0)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            end = time.perf_counter() + seconds / rounds
            while True:
                start = time.perf_counter()
                call(0)
                taken.append((time.perf_counter() - start) * 1e6)
                if time.perf_counter() >= end:
                    break
    return [Timing.of(taken) for taken in times]
