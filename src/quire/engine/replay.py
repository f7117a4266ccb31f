"""Repeated calls of functions without a plan(): found by the signature of their arguments, and launched at once.

The layers and steps of a model make the same call with other tensors. What a call checks, chooses and plans does not
depend on their addresses, so a later call with the same signature takes new addresses and a launch.

A call is recorded when its signature occurs for the second time. It can be replayed if

- it launched one attention kernel, and beside it at most the scheduler of the GPU,
- torch computed nothing with its arguments or results (it may make views and allocate memory), and
- each address that the kernel was given lies in an argument, in memory that the call allocated, or in the plan.

Calls that cannot be replayed run as they did before. Tensors on the host that a plan may have been made from are
compared by content. While a CUDA graph is captured nothing is recorded or replayed. No memory of a caller is kept, and
calls of one thread on one stream share one buffer for schedules and partial results.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.device import allocator, current_stream
from quire.engine.launch import AttentionPlan, Extras, ScheduleMaker, recorded
from quire.engine.tensors import Signature

_MOST_STREAMS = 8  #: for which a thread keeps memory for partial results
_MOST_READ = 1 << 16  #: bytes of a tensor that is compared by content
_ADDRESS = torch.Tensor.data_ptr  # for map(), as a comprehension is a call of its own before Python 3.12
_ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::empty_like"}


class Run(NamedTuple):
    """A launch of an attention kernel, as Attention.run() reports it to the recording of its call."""

    plan: AttentionPlan
    operands: list[tuple[torch.Tensor | None, int]]  #: tensors, and the bytes from each to the operand in it; or None
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    scales: tuple[float, float]  #: of the logits and of the output
    scales_by: tuple[torch.Tensor | None, torch.Tensor | None]
    lse_unit: float
    enable_pdl: bool | None
    captured: list[tuple[int, torch.Tensor]]  #: tensors that a variant reads, and where the parameters say so


class _NotRepeatable(Exception):
    pass


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch allocates, and the memory that it computes with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.new: list[torch.Tensor] = []
        self.touched: set[int] = set()
        self._alive: list[Any] = []  # so that no storage gets the address of an earlier one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive.append(result)
        if func._schema.name in _ALLOCATIONS:
            self.new.append(result)
        elif not func.is_view:
            self.touched.update(_storage(t) for t in _tensors_in((args, tuple((kwargs or {}).values()), result)))
        return result


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Scratch:
    """Memory for the schedule and the partial results of a call. All calls of a thread on a stream use the same, as
    each needs it until its kernel has ended.
    """

    __slots__ = ("__weakref__", "address", "device", "memory", "num_bytes")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory: torch.Tensor | None = None
        self.address, self.num_bytes = 0, 0

    def resize(self, num_bytes: int) -> None:
        """Take other memory, or with 0 bytes give it back."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if num_bytes else None
        self.memory, self.num_bytes, self.address = memory, num_bytes, 0 if memory is None else memory.data_ptr()


class _Scratches(threading.local):
    """The memory of a thread."""

    def __init__(self) -> None:
        self._of_streams: WeakValueDictionary[tuple[torch.device, int], _Scratch] = WeakValueDictionary()
        self._filled: list[_Scratch] = []

    def of(self, device: torch.device, stream: int) -> _Scratch:
        """That of a stream, which may be empty."""
        return self._of_streams.setdefault((device, stream), _Scratch(device))

    def grow(self, scratch: _Scratch, num_bytes: int) -> int:
        """Its address, with so many bytes; beyond a number of streams, the memory of the first one is given back."""
        scratch.resize(num_bytes)
        self._filled = [scratch, *(other for other in self._filled if other is not scratch)]
        for other in self._filled[_MOST_STREAMS:]:
            other.resize(0)
        del self._filled[_MOST_STREAMS:]
        return scratch.address


_scratches = _Scratches()


class Recording:
    """What happens in one call: `recorded.call` of its thread."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.launches: list[Any] = []  #: modules that were launched beside the attention kernel
        self.runs: list[Run] = []
        self._watch = _Watch()

    def add_run(self, plan: AttentionPlan, operands: list[tuple[torch.Tensor | None, int]], **options: Any) -> None:
        """Note what Attention.run() has launched."""
        self.runs.append(Run(plan, operands, **options))

    def result_of(self, call: Callable[[], Any]) -> Any:
        """call(), recorded."""
        before, recorded.call = recorded.call, self
        try:
            with self._watch:
                return call()
        finally:
            recorded.call = before

    def replay(self, result: Any) -> Replay | None:
        """How to repeat the call; None if it cannot be repeated."""
        if len(self.runs) != 1:
            return None
        run = self.runs[0]
        planners = [] if run.plan.on_device is None else [run.plan.on_device.planner]
        if self.launches not in ([], planners):
            return None
        try:
            places = _Places(self.tensors, self._watch.new, self._watch.touched)
            return Replay(run, places, result)
        except _NotRepeatable:
            return None


class _Places:
    """Where the addresses of a recorded call come from: (index, bytes from it), of arguments and then new tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], new: Sequence[torch.Tensor], touched: set[int]) -> None:
        self.tensors, self._touched = tensors, touched
        self._new: list[torch.Tensor] = []  # of those in `new`: those that a kernel writes or the caller gets
        self._allocated = {_storage(t): t for t in new}
        self._given: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            self._given.setdefault(_storage(tensor), []).append(i)

    def of(self, tensor: torch.Tensor | None, offset: int = 0) -> tuple[int, int]:
        """Of the address of a tensor; index -1 stands for address 0."""
        if tensor is None:
            return -1, 0
        storage, address = _storage(tensor), tensor.data_ptr() + offset
        if storage in self._touched:
            raise _NotRepeatable
        if storage in self._given:
            index = self._given[storage][0]
            return index, address - self.tensors[index].data_ptr()
        if storage not in self._allocated:
            raise _NotRepeatable
        whole = self._allocated[storage]
        if all(whole is not known for known in self._new):
            self._new.append(whole)
        index = next(i for i, known in enumerate(self._new) if known is whole)
        return len(self.tensors) + index, address - whole.data_ptr()

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in an argument."""
        return _storage(tensor) in self._given

    def new_tensors(self, results: Sequence[torch.Tensor | None]) -> list[tuple[Any, ...]]:
        """Sizes, strides and types to allocate, as the caller gets them."""
        made = [(tuple(t.shape), t.stride(), t.dtype) for t in self._new]
        replaced = set()
        for result in results:
            index, offset = self.of(result)
            at = index - len(self.tensors)
            if result is None or at < 0 or self.is_part(result):
                continue
            if offset or at in replaced:
                raise _NotRepeatable
            replaced.add(at)
            made[at] = tuple(result.shape), result.stride(), result.dtype
        return made

    def is_part(self, result: torch.Tensor) -> bool:
        """Whether a result is a view of some of a new tensor's elements."""
        whole = self._allocated.get(_storage(result))
        if whole is None or result.nbytes == whole.nbytes:
            return False
        if result.dtype is not whole.dtype:
            raise _NotRepeatable
        return True

    def shared(self) -> list[tuple[int, int, int]]:
        """Pairs of arguments in the same memory, and the distance between both."""
        pairs = [(group[0], i) for group in self._given.values() for i in group[1:]]
        return [(i, j, self.tensors[j].data_ptr() - self.tensors[i].data_ptr()) for i, j in pairs]

    def content(self, device: torch.device) -> list[tuple[int, bytes]]:
        """Arguments that a plan may have been made from, and their bytes. Others must not have been computed with."""
        found = []
        for i, tensor in enumerate(self.tensors):
            if tensor.is_cpu and (device.type != "cpu" or not tensor.is_floating_point()):
                if tensor.nbytes > _MOST_READ or not tensor.is_contiguous():
                    raise _NotRepeatable
                found.append((i, ctypes.string_at(tensor.data_ptr(), tensor.nbytes)))
            elif _storage(tensor) in self._touched:
                raise _NotRepeatable
        return found

    def check_plan(self, params: ctypes.Structure, known: set[int]) -> None:
        """No address in the parameters lies in an argument, except for those that each replay sets."""
        count = ctypes.sizeof(params) // 8
        words = set((ctypes.c_uint64 * count).from_address(ctypes.addressof(params))) - known
        storages = [(begin, self.tensors[group[0]].untyped_storage()) for begin, group in self._given.items()]
        ends = [(begin, begin + storage.nbytes()) for begin, storage in storages]
        if any(begin <= word < end for word in words for begin, end in ends):
            raise _NotRepeatable


class _Numbers:
    """Numbers of the addresses that a replay takes and writes, in the order of a list: those of the arguments, those of
    new tensors, 0, and those at a distance from one of the others.
    """

    def __init__(self, num_tensors: int) -> None:
        self._zero = num_tensors
        self.inner: list[tuple[int, int]] = []  #: numbers, and bytes from their addresses: the last ones of the list

    def of(self, place: tuple[int, int]) -> int:
        """Of what _Places.of() returns."""
        index, offset = place
        if index < 0 or not offset:
            return self._zero if index < 0 else index
        if place not in self.inner:
            self.inner.append(place)
        return self._zero + 1 + self.inner.index(place)

    def getter(self, places: Sequence[tuple[int, int]]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """Takes some addresses from the list."""
        return getter([self.of(place) for place in places])


class _Planning:
    """The schedule of a replay that is made on the GPU."""

    def __init__(self, maker: ScheduleMaker, places: _Places) -> None:
        made = maker.made
        self._maker, self._kept = maker, made.kept
        self._of_arrays, self._of_table = [places.of(t) for t in made.arrays], places.of(made.table)
        #: Of partial results in the caller's workspace; None: they lie behind the schedule, in memory of the stream.
        self._of_partials = places.of(made.partials) if places.is_given(made.partials) else None
        self._kept_at: int = 0 if made.kept is None else made.kept.data_ptr()
        self._schedule_bytes = maker.num_bytes if made.kept is None else 0
        self.num_bytes = self._schedule_bytes + maker.partials_bytes * (self._of_partials is None)
        #: The addresses that the recorded call gave the plan.
        self.known = {t.data_ptr() for t in (made.table, made.partials) if t is not None}
        self.known.add(made.partials.data_ptr() + maker.maxima_offset)
        self._last: tuple[int, ...] = ()
        maker.made = None

    def number(self, numbers: _Numbers) -> None:
        """Take the numbers of the addresses."""
        self._arrays, self._table = numbers.getter(self._of_arrays), numbers.of(self._of_table)
        self._partials = -1 if self._of_partials is None else numbers.of(self._of_partials)

    def start(self, at: list[int], memory: int, stream: int) -> None:
        """Plan on the GPU, with num_bytes of `memory`."""
        partials = memory + self._schedule_bytes if self._partials < 0 else at[self._partials]
        places = self._kept_at or memory, partials, at[self._table]
        if places != self._last:
            self._maker.place(*places)
            self._last = places
        if self._kept is None:
            self._maker.launch(self._arrays(at), stream)


class Replay:
    """A recorded call, which is repeated with other tensors of the same signature. It belongs to one thread, and to the
    stream that was current.
    """

    def __init__(self, run: Run, places: _Places, result: Any) -> None:
        self._plan, self._enable_pdl, maker = run.plan, run.enable_pdl, run.plan.on_device
        tensors, device = places.tensors, run.plan.device
        fits, others = fits_of(tensors), (run.lse, run.sinks, *run.scales_by)
        operands, of_others = [places.of(*operand) for operand in run.operands], [places.of(t) for t in others]
        captured = [(address, places.of(tensor)) for address, tensor in run.captured]
        known = {t.data_ptr() + offset for t, offset in run.operands if t is not None}
        known.update(t.data_ptr() for t in (*others, *(tensor for _, tensor in run.captured)) if t is not None)
        self._planning = None if maker is None or maker.made is None else _Planning(maker, places)
        content = places.content(device)
        #: Whether a call is one of this signature.
        self.fits = fits if not content else lambda *given: fits(*given) and _are_equal(given, content)
        results = list(result) if isinstance(result, tuple) else [result]
        of_results = [places.of(t) for t in results]
        #: Size, stride and offset of results that are parts of new tensors.
        self._parts = [
            (t.shape, t.stride(), offset // t.element_size()) if t is not None and places.is_part(t) else None
            for t, (_, offset) in zip(results, of_results, strict=True)
        ]
        self._has_parts = any(self._parts)
        self._new = places.new_tensors(results)
        self._shared = places.shared()
        places.check_plan(run.plan.params, known if self._planning is None else known | self._planning.known)
        _check_results(tensors, results, of_results)

        numbers = _Numbers(len(tensors) + len(self._new))
        self._operands, self._others = numbers.getter(operands), numbers.getter(of_others)
        self._captured = [(ctypes.c_uint64.from_address(address), numbers.of(place)) for address, place in captured]
        whole = [(index, 0) for index, _ in of_results]
        self._results = numbers.getter(whole) if isinstance(result, tuple) else itemgetter(numbers.of(*whole))
        if self._planning is not None:
            self._planning.number(numbers)
            self._plan.forget()
        self._inner = numbers.inner
        self._extras: Extras = (0, 0, 0, 0, *run.scales, run.lse_unit)
        self._has_others = any(t is not None for t in others)
        self._allocate, self._bits = allocator(device), 15 if device.type == "cuda" else 0
        self._scratch = _scratches.of(device, current_stream(device))
        self._scratch_bytes = run.plan.own_partials if self._planning is None else self._planning.num_bytes

    @property
    def kernel(self) -> str:
        """The variant that it launches."""
        return self._plan.kernel

    @property
    def num_bytes(self) -> int:
        """Memory on the device that is kept."""
        return self._plan.num_bytes

    def __call__(self, tensors: Sequence[torch.Tensor], stream: int) -> Any:
        """The result of the call with these tensors, which fit; NotImplemented if their addresses do not."""
        at = [*map(_ADDRESS, tensors)]
        for i, j, distance in self._shared:
            if at[j] - at[i] != distance:
                return NotImplemented
        new, allocate = [], self._allocate
        for size, stride, dtype in self._new:
            tensor = allocate(size, stride, dtype)
            new.append(tensor)
            at.append(tensor.data_ptr())
        at.append(0)
        for i, offset in self._inner:
            at.append(at[i] + offset)
        pointers = self._operands(at)
        if self._bits:
            for pointer in pointers:
                if pointer & 15:
                    return NotImplemented
        for operand, i in self._captured:
            operand.value = at[i]
        extras, memory = self._extras, self._scratch.address
        if self._has_others:
            extras = *self._others(at), *extras[4:]
        if self._scratch.num_bytes < self._scratch_bytes:
            memory = _scratches.grow(self._scratch, self._scratch_bytes)
        if self._planning is not None:
            self._planning.start(at, memory, stream)
        self._plan.run(stream, pointers, extras, self._enable_pdl, memory)
        result = self._results((*tensors, *new, None))
        return self._parts_of(result) if self._has_parts else result

    def _parts_of(self, result: Any) -> Any:
        """The parts of new tensors that are results."""
        whole = result if isinstance(result, tuple) else (result,)
        parts = [t if part is None else t.as_strided(*part) for t, part in zip(whole, self._parts, strict=True)]
        return tuple(parts) if isinstance(result, tuple) else parts[0]


def _check_results(
    tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None], places: Sequence[tuple[int, int]]
) -> None:
    """A result that lies in an argument is that argument."""
    for (index, _), result in zip(places, results, strict=True):
        if 0 <= index < len(tensors) and result is not None:
            given = tensors[index]
            if (given.data_ptr(), given.shape, given.stride()) != (result.data_ptr(), result.shape, result.stride()):
                raise _NotRepeatable


def _are_equal(tensors: Sequence[torch.Tensor], content: list[tuple[int, bytes]]) -> bool:
    """Whether some of the tensors have this content."""
    return all(ctypes.string_at(tensors[i].data_ptr(), len(expected)) == expected for i, expected in content)


# --- finding calls ---------------------------------------------------------------------------------------------------


def fits_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other dense tensors have the signature of these, and the same of them are one object (which torch's check
    of signatures refuses).
    """
    first = {id(tensor): i for i, tensor in reversed([*enumerate(tensors)])}
    unique, again = sorted(first.values()), [(i, first[id(t)]) for i, t in enumerate(tensors) if first[id(t)] != i]
    check, of_unique = Signature([tensors[i] for i in unique]).of_dense, getter(unique)

    def fits(*given: Any) -> bool:
        for i, j in again:
            if given[i] is not given[j]:
                return False
        return check(*of_unique(given))

    return fits if again else check


def getter(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(indices) > 1:
        return itemgetter(*indices)
    if indices:
        (only,) = indices
        return lambda values: (values[only],)
    return lambda _: ()
