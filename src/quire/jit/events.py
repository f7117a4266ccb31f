"""Events of the cache, counters of them, and lines in the log.

    unsubscribe = quire.events.subscribe(lambda event: print(event.kind, event.slug))

Callbacks run on the thread that does the work, in the order of subscription. An exception of a callback is logged and
does not disturb the build. Events are also counted: `quire.metrics()` gives the counters in Prometheus' format.

Lines go to the logger "quire". Most serving processes never configure logging, so lines go to stderr, from level
QUIRE_LOG on, while neither that logger nor the root logger has a handler. Only the first rank of a node prints
progress; every process prints warnings, each text once.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from quire.jit import config

Kind = Literal["begin", "progress", "end", "hit", "wait", "waited"]


@dataclass(frozen=True)
class Event:
    """One event.

    `hit`: the variant was found in a store. `wait`: another process builds it; `waited`: the wait is over. `begin`,
    `progress`, `end`: this process compiles it.
    """

    kind: Kind
    slug: str
    target: str
    seconds: float = 0.0  #: since the compile, the wait or, for a hit, the search began
    cause: str = ""  #: begin: why it was a miss; wait: which process holds the lock
    path: str = ""  #: hit, end: the entry's directory
    error: str = ""  #: end: the first line of the failure, empty on success


Callback = Callable[[Event], None]

#: Counters by name: what they count, and the events that add to them. Names that end in "_seconds_total" count seconds.
_COUNTERS: Mapping[str, tuple[str, Callable[[Event], bool]]] = {
    "quire_cache_hits_total": ("Variants found in a store.", lambda e: e.kind == "hit"),
    "quire_cache_lookup_seconds_total": ("Time of finding and checking them.", lambda e: e.kind == "hit"),
    "quire_cache_misses_total": ("Variants that no store had.", lambda e: e.kind == "begin"),
    "quire_compiles_total": ("Compiles that succeeded.", lambda e: e.kind == "end" and not e.error),
    "quire_compile_failures_total": ("Compiles that failed.", lambda e: e.kind == "end" and bool(e.error)),
    "quire_compile_seconds_total": ("Time of compiles, failed ones too.", lambda e: e.kind == "end"),
    "quire_waits_total": ("Variants that another process was compiling.", lambda e: e.kind == "waited"),
    "quire_wait_seconds_total": ("Time of waiting for other processes.", lambda e: e.kind == "waited"),
}

_counted: dict[tuple[str, str], float] = {}  #: (counter, kernel) -> its value
_subscribers: list[Callback] = []
_guards: list[Callback] = []
_guard = threading.Lock()


def subscribe(callback: Callback) -> Callable[[], None]:
    """Call `callback` with every event from now on; returns the function that unsubscribes (safe to call twice)."""
    with _guard:
        _subscribers.append(callback)

    def unsubscribe() -> None:
        with _guard:
            if callback in _subscribers:
                _subscribers.remove(callback)

    return unsubscribe


def guard_compiles(guard: Callback) -> Callable[[], None]:
    """Call `guard` with the event `begin` before each compile from now on; an exception that it raises ends the user's
    call, and nothing is compiled. Returns the function that takes the guard away.
    """
    with _guard:
        _guards.append(guard)

    def remove() -> None:
        with _guard:
            if guard in _guards:
                _guards.remove(guard)

    return remove


def begin(event: Event) -> None:
    """Ask the guards of compiles, then emit `event`."""
    for guard in tuple(_guards):
        guard(event)
    emit(event)


def emit(event: Event) -> None:
    """Count `event`, and deliver it to every subscriber."""
    kernel = event.slug.partition(".")[0]
    with _guard:
        for name, (_, counts) in _COUNTERS.items():
            if counts(event):
                step = event.seconds if name.endswith("_seconds_total") else 1
                _counted[name, kernel] = _counted.get((name, kernel), 0) + step
        subscribers = tuple(_subscribers)
    for callback in subscribers:
        try:
            callback(event)
        except Exception:  # a broken progress bar must not cost the build
            logging.getLogger("quire").exception("a subscriber to quire.events raised on %s", event)


def metrics() -> str:
    """What this process has found, compiled and waited for so far, in Prometheus' text format, one line per kernel.

    Serve the text at /metrics beside the engine's own metrics, or write it to a file for node_exporter. A variant that
    the process has loaded is not searched again, so requests served from memory do not count.

    >>> print(quire.metrics().splitlines()[0])
    # HELP quire_cache_hits_total Variants found in a store.
    """
    with _guard:
        counted = dict(_counted)
    lines: list[str] = []
    for name, (text, _) in _COUNTERS.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
        values = {kernel: value for (counter, kernel), value in sorted(counted.items()) if counter == name}
        lines += [f'{name}{{kernel="{kernel}"}} {value:.6g}' for kernel, value in values.items()]
    return "\n".join(lines) + "\n"


HEARTBEAT_SECONDS = 10.0

_logger = logging.getLogger("quire")
_warned: set[str] = set()
_MOST_WARNED = 1000  #: texts remembered; with more, a text may be repeated
_warn_guard = threading.Lock()


def _write(level: int, text: str) -> None:
    if _logger.hasHandlers():
        _logger.log(level, text)
    elif level >= config.log_level():
        print(f"quire: {text}\n", end="", file=sys.stderr, flush=True)  # one write: threads report at the same time


def info(text: str) -> None:
    """A progress line, from one process of the node."""
    if config.reports_progress():
        _write(logging.INFO, text)


def warn_once(text: str) -> None:
    """Warn, unless this process has already warned with the same text."""
    with _warn_guard:
        if text in _warned:
            return
        if len(_warned) >= _MOST_WARNED:
            _warned.clear()
        _warned.add(text)
    _write(logging.WARNING, text)


@contextmanager
def heartbeat(beat: Callable[[float], None]) -> Iterator[None]:
    """Call `beat(elapsed seconds)` from a thread every HEARTBEAT_SECONDS while the body runs."""
    finished = threading.Event()
    start = time.monotonic()

    def tick() -> None:
        while not finished.wait(HEARTBEAT_SECONDS):
            beat(time.monotonic() - start)

    thread = threading.Thread(target=tick, name="quire-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
