"""Repeated calls of functions without a plan(), found by the signature of their arguments; plans for layers of a model.

A call is recorded and replayed by replay.py.

A plan is found by what decided it, by the thread, and by the stream, because two runs of a plan must not overlap.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from functools import partial, wraps
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from quire.engine.attention import Attention
from quire.engine.device import OwnWorkspace, current_stream, is_capturing
from quire.engine.launch import recorded
from quire.engine.operators import is_tracing
from quire.engine.replay import Recording, Replay, fits_of, getter
from quire.engine.schedule import ScheduleCache
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import has_nested
from quire.errors import explain, explains
from quire.jit import config
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MOST_KEYS = 512  #: that a thread knows
_MOST_SIGNATURES = 8  #: of a key
_MOST_BYTES = 64 << 20  #: of kept plans, on devices
_NO_KWARGS: Mapping[str, Any] = {}
#: Types of arguments that are compared as parts of a key.
_CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device, Enum, Variant, ScheduleCache)


class _Kept(NamedTuple):
    """A signature that has been met."""

    fits: Callable[..., bool]
    replay: Replay | None
    sources: tuple[Callable[[], Any], ...]  #: weak references
    num_bytes: int
    is_recorded: bool  #: without a replay: such calls cannot be replayed

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], sources: Sequence[Any], is_recorded: bool = False) -> _Kept:
        """That there was a call with these tensors."""
        return cls(fits_of(tensors), None, tuple(map(weakref.ref, sources)), 0, is_recorded)

    @classmethod
    def of_replay(cls, replay: Replay, sources: Sequence[Any]) -> _Kept:
        """What was recorded."""
        return cls(replay.fits, replay, tuple(map(weakref.ref, sources)), replay.num_bytes, True)


class _Known(threading.local):
    """What a thread has met, by key."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, list[_Kept]] = {}
        self.num_bytes = 0


_known = _Known()


def repeated(
    key: Hashable, tensors: Sequence[torch.Tensor], function: Callable[..., Any], args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = _NO_KWARGS, sources: Sequence[Any] = (), are_constant: bool = False,
) -> Any:  # fmt: skip
    """function(*args, **kwargs), or a replay of a call with an equal key and tensors of the same signature.

    What the result depends on beside the tensors is in the key. sources: objects that a plan was made from, which must
    be the same, and tensors among them unchanged; the call finds the plan by them itself (plan_cache.py). are_constant:
    see versions_of().
    """
    first = tensors[0]
    index = first.get_device()
    stream = torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0
    if recorded.call is not None or has_nested(tensors) or (stream and is_capturing(first.device)):
        return function(*args, **kwargs)
    key = key, first.shape, stream, torch.is_grad_enabled()
    if not config.says_nothing_of_results():
        key = key, config.is_deterministic(), config.multiplies_8_bits()
    if sources:
        versions = versions_of(sources, are_constant)
        if versions is None:
            return function(*args, **kwargs)
        key = key, versions, *map(id, sources)
    found = _known.calls.get(key)
    if found is None:
        found = _remember(key)
    for kept in found:
        if kept.fits(*tensors) and (not sources or _are_same(kept.sources, sources)):
            replay = kept.replay
            result = NotImplemented if replay is None else replay(tensors, stream)
            if result is not NotImplemented:
                return result
            if replay is None and not kept.is_recorded:
                return _record(found, kept, tensors, partial(function, *args, **kwargs), sources)
            return function(*args, **kwargs)
    result = function(*args, **kwargs)
    _keep(found, _Kept.of(tensors, sources))
    return result


def versions_of(sources: Sequence[Any], are_constant: bool = False) -> tuple[int, ...] | None:
    """How often the tensors among sources were changed; None if one does not count it, as in inference mode.

    are_constant: those that do not count it are never changed.
    """
    versions = []
    try:
        for source in sources:
            if isinstance(source, torch.Tensor):
                versions.append(source._version)
    except RuntimeError:  # of inference mode
        if not are_constant:
            return None
        tensors = [source for source in sources if isinstance(source, torch.Tensor)]
        return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
    return tuple(versions)


def _are_same(references: Sequence[Callable[[], Any]], sources: Sequence[Any]) -> bool:
    """Whether the references refer to these sources."""
    for reference, source in zip(references, sources, strict=True):  # half the time of all()  # noqa: SIM110
        if reference() is not source:
            return False
    return True


def _record(
    found: list[_Kept], seen: _Kept, tensors: Sequence[torch.Tensor], call: Callable[[], Any], sources: Sequence[Any]
) -> Any:
    """call(), which is recorded in place of `seen`."""
    recording = Recording(tensors)
    result = recording.result_of(call)
    replay = recording.replay(result)
    found.remove(seen)
    _keep(found, _Kept.of(tensors, sources, True) if replay is None else _Kept.of_replay(replay, sources))
    return result


def _remember(key: Hashable) -> list[_Kept]:
    """A place for the signatures of a key."""
    calls = _known.calls
    while len(calls) >= _MOST_KEYS or _known.num_bytes > _MOST_BYTES:
        _known.num_bytes -= sum(kept.num_bytes for kept in calls.pop(next(iter(calls))))
    found = calls[key] = []
    return found


def _keep(found: list[_Kept], kept: _Kept) -> None:
    """Store it as the first of a key."""
    found.insert(0, kept)
    _known.num_bytes += kept.num_bytes - sum(old.num_bytes for old in found[_MOST_SIGNATURES:])
    del found[_MOST_SIGNATURES:]


class _Spelling:
    """How a call is spelt: the types of its values, and which of them are tensors."""

    def __init__(self, types: Sequence[type], has_parts: bool = False) -> None:
        """has_parts: what lies in tuples and lists among the values comes after them."""
        tensors = [i for i, kind in enumerate(types) if kind is torch.Tensor or kind is torch.nn.Parameter]
        wholes = [i for i, kind in enumerate(types) if kind is tuple or kind is list]
        others = [i for i in range(len(types)) if i not in tensors and not (has_parts and i in wholes)]
        #: Takes the tuples and lists, such as pairs of tensors and windows; None if there are none.
        self.wholes = getter(wholes) if wholes and not has_parts else None
        #: Whether such calls can be recorded.
        self.is_known = bool(tensors) and all(issubclass(types[i], _CONSTANTS) for i in others)
        self.tensors: Callable[[Sequence[Any]], tuple[Any, ...]] = getter(tensors)
        self.others: Callable[[Sequence[Any]], tuple[Any, ...]] = getter(others)


def replayed(function: _Function) -> _Function:
    """`function`, whose repeated calls are replayed."""
    spellings: dict[Hashable, _Spelling] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return function(*args, **kwargs)
        values: Sequence[Any] = (*args, *kwargs.values()) if kwargs else args
        spelling: Hashable = (*map(type, values), *kwargs)
        known = spellings.get(spelling) or _learn(spellings, spelling, [*map(type, values)])
        if known.wholes is not None:
            wholes = known.wholes(values)
            parts = [*chain.from_iterable(wholes)]
            spelling = known, *map(len, wholes), *map(type, parts)
            values = *values, *parts
            known = spellings.get(spelling) or _learn(spellings, spelling, [*map(type, values)], has_parts=True)
        try:
            if not known.is_known:
                return function(*args, **kwargs)
            return repeated((known, known.others(values)), known.tensors(values), function, args, kwargs)
        except TypeError as error:
            explain(error, function, args, kwargs)
            raise

    call.__code__ = call.__code__.replace(co_name=function.__name__)  # in reports, profiles and tracebacks
    decorated: _Function = explains(wraps(function)(call))
    return decorated


def _learn(
    spellings: dict[Hashable, _Spelling], spelling: Hashable, types: Sequence[type], has_parts: bool = False
) -> _Spelling:
    """Store a spelling that has not been met."""
    if len(spellings) >= _MOST_KEYS:
        spellings.clear()
    known = spellings[spelling] = _Spelling(types, has_parts)
    return known


_MOST_PLANS = 32  #: plans of a thread
_MOST_PLAN_BYTES = 64 << 20  #: of their memory on devices


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
        while len(self.entries) > _MOST_PLANS or (self.num_bytes > _MOST_PLAN_BYTES and len(self.entries) > 1):
            self.drop(next(iter(self.entries)))

    def drop(self, key: Hashable) -> None:
        """Forget the plan of a key, if there is one."""
        entry = self.entries.pop(key, None)
        self.num_bytes -= 0 if entry is None else entry.num_bytes


_plans = _Plans()


def plan_of(
    key: Hashable, sources: Sequence[Any], device: torch.device, make: Callable[[], AttentionSpec],
    are_constant: bool = False,
) -> Attention:  # fmt: skip
    """The plan of make(), whose tensors are in the order of NHD.

    key: everything that decides the plan but `sources`, objects (tensors, block masks) that must be the same, and
    tensors among them unchanged. Nothing is kept in a capture, or for tensors that do not count changes (inference
    mode), unless they are constant.
    """
    versions = None if is_capturing(device) else versions_of(sources, are_constant)
    if versions is None:
        return new_plan(make(), device)
    key = key, device, current_stream(device), versions, *map(id, sources)
    entry = _plans.entries.get(key)
    if entry is not None and _are_same(entry.sources, sources):
        return entry.plan
    attention = new_plan(make(), device)
    references = tuple(weakref.ref(source, lambda _: _plans.drop(key)) for source in sources)
    _plans.keep(key, _Entry(attention, references, attention.plan.num_bytes))
    return attention


def new_plan(spec: AttentionSpec, device: torch.device) -> Attention:
    """A plan for one call, whose tensors are in the order of NHD."""
    return Attention(spec, KVLayout.NHD, OwnWorkspace(device), "auto")
