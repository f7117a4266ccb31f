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
    """The `most` plans that were used last; with 0 each call plans anew.

    A plan is found by what it was asked for (`key`), by the tensors that its batch was made from, which must be the
    same objects and unchanged, and by the stream. Where a GPU plans, it plans each time, and what is kept is the
    batch. Nothing is kept in a capture, and of tensors that count no changes (inference mode).
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, tuple[Attention | AttentionSpec, tuple[Callable[[], Source], ...]]]
        self._kept = OrderedDict()
        self._lock = Lock()

    def get(
        self, key: Hashable, sources: tuple[Source, ...], layout: KVLayout, device: torch.device,
        make: Callable[[], AttentionSpec],
    ) -> Attention:  # fmt: skip
        """The plan of `make()`'s batch."""
        workspace = OwnWorkspace(device)
        if not self._most or is_capturing(device) or any(t is not None and t.is_inference() for t in sources):
            return Attention(make(), layout, workspace, "auto")
        changes = tuple(t if t is None else (id(t), t._version) for t in sources)
        key = key, changes, layout, device, current_stream(device)
        known = self._find(key, sources)
        if known is not None and not isinstance(known, AttentionSpec):
            return known
        attention = Attention(make() if known is None else known, layout, workspace, "auto")
        if known is None:
            is_on_device = isinstance(attention.spec.indices, Lengths)
            self._keep(key, attention.spec if is_on_device else attention, sources)
        return attention

    def _find(self, key: Hashable, sources: tuple[Source, ...]) -> Attention | AttentionSpec | None:
        with self._lock:
            known, references = self._kept.get(key, (None, ()))
            if known is None or not all(ref() is t for ref, t in zip(references, sources, strict=True)):
                return None
            self._kept.move_to_end(key)
            return known

    def _keep(self, key: Hashable, known: Attention | AttentionSpec, sources: tuple[Source, ...]) -> None:
        with self._lock:
            self._kept[key] = known, tuple(_nothing if t is None else weakref.ref(t) for t in sources)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)


def _nothing() -> None:
    return None
