"""Plans of calls without a plan(), so that the layers of a model, which ask for the same batch in turn, plan it once.

A plan is found by what decided it, by the thread, and by the stream, because two runs of a plan must not overlap.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from quire.runtime.attention import Attention, AttentionSpec
from quire.runtime.graph import is_capturing
from quire.runtime.target import current_stream
from quire.runtime.workspace import OwnWorkspace
from quire.types import KVLayout

_MOST = 32  #: plans of a thread
_MOST_BYTES = 64 << 20  #: of their memory on devices


class _Entry(NamedTuple):
    plan: Attention
    sources: tuple[Callable[[], Any], ...]  #: weak references
    num_bytes: int


class _Plans(threading.local):
    def __init__(self) -> None:
        self.entries: dict[Hashable, _Entry] = {}
        self.num_bytes = 0

    def keep(self, key: Hashable, entry: _Entry) -> None:
        """Store it, and drop the oldest ones beyond the limits."""
        self.drop(key)
        self.entries[key] = entry
        self.num_bytes += entry.num_bytes
        while len(self.entries) > _MOST or (self.num_bytes > _MOST_BYTES and len(self.entries) > 1):
            self.drop(next(iter(self.entries)))

    def drop(self, key: Hashable) -> None:
        """Forget the plan of a key, if there is one."""
        entry = self.entries.pop(key, None)
        self.num_bytes -= 0 if entry is None else entry.num_bytes


_plans = _Plans()


def plan_of(
    key: Hashable, sources: Sequence[Any], device: torch.device, make: Callable[[], AttentionSpec]
) -> Attention:
    """The plan of make(), whose tensors are in the order of NHD.

    key: everything that decides the plan but `sources`, objects (tensors, block masks) that must be the same, and
    tensors among them unchanged. Nothing is kept in a capture, or for tensors that do not count changes (inference
    mode).
    """
    if is_capturing(device) or any(isinstance(source, torch.Tensor) and source.is_inference() for source in sources):
        return new_plan(make(), device)
    versions = [source._version if isinstance(source, torch.Tensor) else 0 for source in sources]
    key = key, device, current_stream(device), *map(id, sources), *versions
    entry = _plans.entries.get(key)
    if entry is not None and all(ref() is source for ref, source in zip(entry.sources, sources, strict=True)):
        return entry.plan
    attention = new_plan(make(), device)
    references = tuple(weakref.ref(source, lambda _: _plans.drop(key)) for source in sources)
    _plans.keep(key, _Entry(attention, references, attention.plan.num_bytes))
    return attention


def new_plan(spec: AttentionSpec, device: torch.device) -> Attention:
    """A plan for one call, whose tensors are in the order of NHD."""
    return Attention(spec, KVLayout.NHD, OwnWorkspace(device), "auto")
