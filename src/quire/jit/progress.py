"""One line when a compile starts, one at least every ten seconds, one when it ends; nothing on a hit.

Lines go to the logger "quire". Most serving processes never configure logging, so lines go to stderr, from level
QUIRE_LOG on, while neither that logger nor the root logger has a handler. Only the first rank of a node prints
progress; every process prints warnings, each text once.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire import config

HEARTBEAT_SECONDS = 10.0

_logger = logging.getLogger("quire")
_warned: set[str] = set()
_MOST_WARNED = 1000  #: texts remembered; with more, a text may be repeated
_guard = threading.Lock()


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
    with _guard:
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
