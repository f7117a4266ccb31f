"""Plans of the last calls, so that the layers of a model, which ask for the same batch in turn, plan it once."""

from __future__ import annotations

import weakref
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
    """The last `most` plans; with 0 each call plans again.

    A plan is found by the options of the call (`key`), by the tensors that describe the batch, which must be the same
    objects and unchanged, and by the stream. If the GPU plans from the tensors in `sources`, which a kernel may change
    without torch noticing, only the batch is kept, and it is planned in each call. Nothing is kept in a capture, or for
    tensors that do not count changes (inference mode).
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._kept: dict[Hashable, tuple[Attention | AttentionSpec, tuple[Callable[[], Source], ...]]] = {}
        self._lock = Lock()

    def get(
        self, key: Hashable, sources: tuple[Source, ...], device: torch.device, make: Callable[[], AttentionSpec]
    ) -> Attention:
        """The plan of `make()`'s batch, whose tensors are in the order of NHD."""
        if not self._most or is_capturing(device):
            return _plan(make(), device)
        if sources:
            if any(t is not None and t.is_inference() for t in sources):
                return _plan(make(), device)
            key = key, *[t if t is None else (id(t), t._version) for t in sources]
        key = key, device, current_stream(device)
        known, references = self._kept.get(key, (None, ()))
        if references and not all(ref() is t for ref, t in zip(references, sources, strict=True)):
            known = None
        if isinstance(known, Attention):
            return known
        attention = _plan(known or make(), device)
        if known is None:
            self._keep(key, attention, sources)
        return attention

    def _keep(self, key: Hashable, attention: Attention, sources: tuple[Source, ...]) -> None:
        indices = attention.spec.indices
        reads_sources = isinstance(indices, Lengths) and any(t is indices.kv_lens for t in sources)
        known = attention.spec if reads_sources else attention
        with self._lock:
            self._kept[key] = known, tuple(_nothing if t is None else weakref.ref(t) for t in sources)
            while len(self._kept) > self._most:
                self._kept.pop(next(iter(self._kept)))


def _plan(spec: AttentionSpec, device: torch.device) -> Attention:
    return Attention(spec, KVLayout.NHD, OwnWorkspace(device), "auto")


def _nothing() -> None:
    return None
