"""Calls that a GPU plans from tables and lengths there: what one has checked and chosen serves the next of its kind.

The layers of a model, and its steps, make the same call on other tensors. Each of them is planned by a kernel, but its
options, kernel and parameters are those of the call before. Nothing is kept of a call's tensors or of torch's memory,
and nothing is known in a capture, whose tensors must stay.
"""

from __future__ import annotations

from collections.abc import Hashable
from threading import local
from typing import Any

import torch

from quire.runtime.attention import Attention

_MOST = 32  #: calls that a thread knows


class _Known(local):
    def __init__(self) -> None:
        self.calls: dict[Hashable, Attention] = {}


_known = _Known()  # of each thread: a call sets the parameters that it is launched with


def repeat_call(key: Hashable, *tensors: Any, **options: Any) -> torch.Tensor | None:
    """The result of Attention.run_again() on what the last call of this kind has planned; None if there is none, or if
    it was of other tensors.
    """
    known = _known.calls.get(key)
    return None if known is None else known.run_again(*tensors, **options)


def keep_call(key: Hashable, attention: Attention) -> None:
    """Remember a call that was right, after its launch."""
    attention.release()
    calls = _known.calls
    calls.pop(key, None)
    calls[key] = attention
    while len(calls) > _MOST:
        calls.pop(next(iter(calls)))
