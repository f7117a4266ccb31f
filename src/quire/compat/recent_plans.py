"""Plans of the last calls: the layers of a model ask for the same batch one after another, and plan it once."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

import torch

from quire.runtime.attention import Attention, AttentionSpec
from quire.runtime.graph import is_capturing
from quire.runtime.schedule import Lengths
from quire.runtime.target import current_stream
from quire.runtime.workspace import OwnWorkspace
from quire.types import KVLayout

Source = torch.Tensor | None  #: a tensor that a batch was made from


class RecentPlans:
    """The `most` plans that were used last.

    A plan is found by what it was asked for (`key`), by the tensors that its batch was made from, which must be the
    same objects and unchanged, and by the stream. Plans made on a GPU or in a capture, and those of tensors that count
    no changes (inference mode), are used once.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._plans: OrderedDict[Hashable, tuple[Attention, tuple[Callable[[], Source], ...]]] = OrderedDict()
        self._lock = Lock()

    def get(
        self, key: Hashable, sources: tuple[Source, ...], layout: KVLayout, device: torch.device,
        make: Callable[[], AttentionSpec],
    ) -> Attention:  # fmt: skip
        """The plan of `make()`'s batch."""
        if any(t is not None and t.is_inference() for t in sources) or is_capturing(device):
            return Attention(make(), layout, OwnWorkspace(device), "auto")
        changes = tuple(t if t is None else (id(t), t._version) for t in sources)
        stream = current_stream(device) if device.type == "cuda" else 0
        key = key, changes, layout, device, stream
        with self._lock:
            found = self._plans.get(key)
            if found is not None and all(ref() is t for ref, t in zip(found[1], sources, strict=True)):
                self._plans.move_to_end(key)
                return found[0]
        attention = Attention(make(), layout, OwnWorkspace(device), "auto")
        if not isinstance(attention.spec.indices, Lengths):
            with self._lock:
                self._plans[key] = attention, tuple(_nothing if t is None else weakref.ref(t) for t in sources)
                while len(self._plans) > self._most:
                    self._plans.popitem(last=False)
        return attention


def _nothing() -> None:
    return None
