"""Events of the JIT, for progress bars, counters and logs of a serving engine.

    unsubscribe = quire.events.subscribe(lambda event: print(event.kind, event.slug))

Callbacks run on the thread that does the work, in the order of subscription. An exception of a callback is logged and
does not disturb the build.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["begin", "progress", "end", "hit", "wait"]


@dataclass(frozen=True)
class Event:
    """One event.

    `hit`: the variant was found in a store. `wait`: another process builds it. `begin`, `progress`, `end`: this process
    compiles it.
    """

    kind: Kind
    slug: str
    target: str
    seconds: float = 0.0  #: since the compile or the wait began
    cause: str = ""  #: begin: why it was a miss; wait: who holds the lock
    path: str = ""  #: hit, end: the entry's directory
    error: str = ""  #: end: the first line of the failure, empty on success


Callback = Callable[[Event], None]

_subscribers: list[Callback] = []
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


def emit(event: Event) -> None:
    """Deliver `event` to every subscriber."""
    with _guard:
        subscribers = tuple(_subscribers)
    for callback in subscribers:
        try:
            callback(event)
        except Exception:  # a broken progress bar must not cost the build
            logging.getLogger("quire").exception("a subscriber to quire.events raised on %s", event)
