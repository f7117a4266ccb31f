"""Calls that are planned on the GPU: the checks and choices of one call are reused by the next call like it.

The layers and steps of a model make the same call with different tensors. A kernel plans each of them, but options,
kernel and parameters are those of the previous call. No tensors and no memory of torch's allocator are kept. In a
capture nothing is reused, because its tensors must be kept.
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
    """The result of Attention.run_again() for the last call with this key; None if there is none, or if its tensors
    were different.
    """
    known = _known.calls.get(key)
    return None if known is None else known.run_again(*tensors, **options)


def keep_call(key: Hashable, attention: Attention) -> None:
    """Store a call that passed all checks, after its launch."""
    attention.release()
    calls = _known.calls
    calls.pop(key, None)
    calls[key] = attention
    while len(calls) > _MOST:
        calls.pop(next(iter(calls)))
