"""Counts which public calls ran which kernel, while Quire stands in for FlashInfer."""

from __future__ import annotations

import sys
from collections import Counter
from functools import wraps
from typing import Any

from quire.runtime.attention import Attention, Result
from quire.runtime.replay import Replay

_run = Attention.run
_replay = Replay.__call__
_served: Counter[tuple[str, str]] = Counter()
_refused: Counter[str] = Counter()


def start() -> None:
    """Count from now on, from nothing."""
    _served.clear()
    _refused.clear()
    Attention.run = _counted  # type: ignore[method-assign]
    Replay.__call__ = _counted_again  # type: ignore[method-assign]


def stop() -> None:
    """Count no more."""
    Attention.run = _run  # type: ignore[method-assign]
    Replay.__call__ = _replay  # type: ignore[method-assign]


def refused(path: str) -> None:
    """A name outside attention was called."""
    _refused[path] += 1


def report() -> str:
    """A line for each call and kernel, and for each refused name."""
    served = [f"served   {name}  {count} x  {kernel}" for (name, kernel), count in _served.most_common()]
    return "\n".join(served + [f"refused  {path}  {count} x" for path, count in _refused.most_common()])


@wraps(_run)
def _counted(self: Attention, *args: Any, **kwargs: Any) -> Result:
    result = _run(self, *args, **kwargs)
    _served[_public_name(), self.decision.key.slug] += 1
    return result


@wraps(_replay)
def _counted_again(self: Replay, *args: Any, **kwargs: Any) -> Any:
    result = _replay(self, *args, **kwargs)
    if result is not NotImplemented:  # else the call runs as its first did
        _served[_public_name(), self.kernel] += 1
    return result


def _public_name() -> str:
    """The function or method of Quire that the program has called."""
    frame, called = sys._getframe(2), None
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("quire."):
        frame, called = frame.f_back, frame  # type: ignore[assignment]  # None is the end
    if called is None:
        return ""
    owner = called.f_locals.get("self")  # a copy of all locals: of this frame alone, since each run() comes here
    return f"{type(owner).__name__}.{called.f_code.co_name}" if owner is not None else called.f_code.co_name
