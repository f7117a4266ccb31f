"""A plan: the parameter struct, its memory, its TMA descriptors, and the launch."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._autograd import _profiler_enabled as is_profiling
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from quire.engine.device import DeviceBuffer, Workspace
from quire.engine.options import LogitsOptions
from quire.engine.schedule import Indices, Lengths, Schedule
from quire.errors import PlanError, QuireError
from quire.jit import CudaModule, HostModule, Module
from quire.jit.machine import encode_tensor_map, move_tensor_map
from quire.kernels import Decision
from quire.kernels.features import View
from quire.kernels.operation import PARALLEL_THREADS
from quire.kernels.params import AttentionParams, ScheduleInput, TensorMap, pointers_at

_STATUSES = {1: "out of memory: no thread got memory to compute with; nothing was written"}
_thread: ThreadPoolExecutor | None = None  # in a forked process: calls kernels of the host for the thread that forked


class _Recorded(threading.local):
    """The call that a thread records, see replay.py."""

    call: Any = None


recorded = _Recorded()


def _after_fork() -> None:
    global _thread
    _thread = ThreadPoolExecutor(1, "quire")


os.register_at_fork(after_in_child=_after_fork)


def launch(module: Module, params: int, device: torch.device, *, grid: int, block: int, smem: int = 0) -> None:
    """Run `module` on the parameter struct at address `params`."""
    if recorded.call is not None:
        recorded.call.launches.append(module)
    if is_profiling():
        profiled(module, _launch, module, params, device, grid, block, smem)
    else:
        _launch(module, params, device, grid, block, smem)


def profiled(module: Module, start: Callable[..., None], *args: Any) -> None:
    """start(*args), which launches `module`. torch's profiler shows it as quire::SLUG."""
    with record_function(f"quire::{module.slug}"):
        start(*args)


def _launch(module: Module, params: int, device: torch.device, grid: int, block: int, smem: int = 0) -> None:
    refuse_make_fx(module.slug)
    if isinstance(module, CudaModule):
        index = device.index or 0
        stream = torch._C._cuda_getCurrentRawStream(index)
        module.launch(params, grid=grid, block=block, smem=smem, stream=stream, device=index, pdl=False)
        return
    assert isinstance(module, HostModule)
    if status := _call(module.function, params):
        meaning = _STATUSES.get(status, "a status that this version does not know; please report it")
        raise QuireError(f"{module.slug}: the kernel returned {status}: {meaning}.")


def refuse_make_fx(name: str) -> None:
    """PlanError while torch records operators: a launch is not recorded, and the graph would return uninitialised
    memory.
    """
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        raise PlanError(f"{name}: torch (make_fx) traces this call and would not record it; call it eagerly.")


def _call(function: Callable[[int], int], params: int) -> int:
    """Calls a CPU kernel, which runs on OpenMP threads.

    OpenMP (libgomp) reuses the threads that it has started for the calling thread. A fork copies this state, but not
    the threads, so that the thread that forked would wait for them forever. After a fork another thread calls the
    kernel.
    """
    if _thread is None or threading.current_thread() is not threading.main_thread() or torch.get_num_threads() == 1:
        return function(params)
    call = _thread.submit(_call_with_threads, torch.get_num_threads(), function, params)
    try:
        return call.result()
    finally:
        wait((call,))  # also after Ctrl-C: the kernel works on memory of the caller


def _call_with_threads(count: int, function: Callable[[int], int], params: int) -> int:
    torch.set_num_threads(count)  # OpenMP has a number of its own for each thread
    return function(params)


def bind(module: Module, params: int, device: torch.device, grid: int, *, pdl: bool) -> Callable[[int], None]:
    """A launch of `module` on the parameter struct at address `params`, to be called with a stream any number of times.

    `pdl`: it may begin before its predecessor ends.
    """
    if isinstance(module, CudaModule):
        exports = module.exports
        return module.bind(params, grid, exports["kThreads"], exports["kSmemBytes"], device.index or 0, pdl=pdl).start
    return lambda _: _launch(module, params, device, grid, 1)


def row_grid(rows: int, columns: int) -> int:
    """CTAs of a kernel that consists of one parallel_rows(): one thread per item."""
    if columns < PARALLEL_THREADS:
        return -(-rows // (PARALLEL_THREADS // columns))
    return rows * -(-columns // PARALLEL_THREADS)


class EncodedMaps(NamedTuple):
    """Encoded tensor maps, which can be copied into any parameter struct of the same kernel."""

    maps: tuple[tuple[int, int, bytes], ...]  #: offset in the struct, index of the operand, the map
    pointers: tuple[int, ...]  #: where the operands lay


class TensorMaps:
    """The tensor maps inside one parameter struct."""

    def __init__(self, decision: Decision, params: ctypes.Structure, device: int) -> None:
        self._decision, self._device = decision, device
        self._params = params
        self._address = ctypes.addressof(params)
        self._maps: list[tuple[int, int]] = []  # offset of each map in the struct, index of its operand
        self._pointers: tuple[int, ...] = ()  # of the operands that the maps describe

    def encode(self, views: Mapping[str, View]) -> None:
        """Encode tensor maps for these operands."""
        kernel, key = self._decision.kernel, self._decision.key
        assert kernel.copies is not None
        operands = self._decision.tensors
        names = [operand.name for operand in operands if operand.name in views]
        self._maps, self._pointers = [], tuple(views[name].pointer for name in names)
        for copy in kernel.copies(key, kernel.tile(key), views):
            index = names.index(copy.operand)
            dtype = key.type_of(operands[index].type)
            offset, strides = (
                getattr(type(self._params), copy.field).offset,
                [s * dtype.bits // 8 for s in copy.strides],
            )
            out, pointer = self._address + offset, self._pointers[index]
            encode_tensor_map(
                out, dtype.tensor_map, pointer, copy.dims, strides, copy.box, device=self._device,
                promotion=copy.promotion,
            )  # fmt: skip
            self._maps.append((offset, index))

    def encoded(self) -> EncodedMaps:
        """A copy of the maps."""
        size = ctypes.sizeof(TensorMap)
        maps = ((offset, index, ctypes.string_at(self._address + offset, size)) for offset, index in self._maps)
        return EncodedMaps(tuple(maps), self._pointers)

    def copy_from(self, encoded: EncodedMaps) -> None:
        """Take the maps of another plan of the same kernel, for operands of the same signature."""
        for offset, _, tensor_map in encoded.maps:
            ctypes.memmove(self._address + offset, tensor_map, len(tensor_map))
        self._maps, self._pointers = [(offset, index) for offset, index, _ in encoded.maps], encoded.pointers

    def move(self, pointers: Sequence[int]) -> None:
        """Patch the tensor maps for other addresses of the same operands."""
        pointers = tuple(pointers)
        if pointers == self._pointers:
            return
        for offset, index in self._maps:
            if self._pointers[index] != pointers[index]:
                move_tensor_map(self._address + offset, pointers[index], self._device)
        self._pointers = pointers


LOG2E = math.log2(math.e)
_LEAST_SCALE = 1e-20  #: of q . k in base 2, where kernels divide a bias by it


#: What a run has beside its operands: addresses of the lse, of sinks, and of float32 numbers on the GPU that multiply
#: the scales of the logits and of the output, for paged keys only; both scales; what an lse of base 2 is multiplied by.
#: A plain tuple, which costs a run less than one with names.
Extras = tuple[int | None, int | None, int | None, int | None, float, float, float]
NO_EXTRAS: Extras = (None, None, None, None, 1.0, 1.0, 1.0)


class OwnPartials(NamedTuple):
    """Memory for partial results that each run of a plan allocates: torch gives it to the next run on the stream."""

    num_bytes: int
    maxima_offset: int  #: of the maxima and sums of rows


class ScheduleMaker(Protocol):
    """Makes schedules on the device: DeviceSchedule in planner.py."""

    made: Any
    planner: Any
    num_bytes: int
    partials_bytes: int
    maxima_offset: int

    def make(self, lengths: Lengths, workspace: Workspace) -> tuple[torch.Tensor | None, ...]:
        """Enqueue it; returns the tensors that the schedule lies in and is made from."""

    def place(self, at: int, partials: int, table: int | None) -> None:
        """Set the parameters of the plan to a schedule at an address."""

    def launch(self, arrays: tuple[int | None, ...], stream: int | None = None) -> None:
        """Enqueue what writes the schedule there."""


class AttentionPlan:
    """Everything that a call needs except its tensors. A plan owns its index arrays and can run any number of times.

    Two runs of one plan must not overlap on different streams, because they share the workspace.
    """

    _made: tuple[torch.Tensor | None, ...] = ()  # the tensors of plan_again()
    _pointers: Any  # where the parameters have the addresses of q, k, v and o: an array, for which mypy has no slices
    _more: Sequence[tuple[Any, slice]] = ()  # with further operands: all such arrays, and their parts of the addresses
    _extras: Extras | None = None  # what run() was given last time
    _given: Any = None  # where the parameters have its addresses
    _partials_at = 0  # where the parameters say that partial results of the plan's own are

    def __init__(
        self, decision: Decision, module: Module, params: ctypes.Structure, logits: LogitsOptions, device: torch.device,
        grid: int, tensors: tuple[torch.Tensor | None, ...], *, stream: int, uses_pdl: bool,
        schedule: Schedule | None = None, sent: DeviceBuffer | None = None, pages: torch.Tensor | None = None,
        note: str = "", schedule_input: ScheduleInput | None = None,
        on_device: ScheduleMaker | None = None, own_partials: OwnPartials | None = None,
    ) -> None:  # fmt: skip
        self.note = note  #: what explain() adds about this plan
        self.schedule = schedule  #: None where only the device knows the lengths
        self.schedule_input = schedule_input  #: what it was made with, beside the batch
        self._sent = sent  # where the schedule lies on a GPU, if not in a graph's buffer
        self._pages = pages  # page numbers that do not lie behind the schedule
        self._module, self.device, self._grid = module, device, grid
        self._may_use_pdl = decision.may_use_pdl
        self._uses_pdl = uses_pdl  # programmatic dependent launch, if the caller has no wish
        self._struct = params
        self._decision = decision
        self._logits = logits
        self._tensors = tensors  # what the parameter struct points into
        self.on_device = on_device  #: makes the schedule where only the device knows the lengths
        self._own_partials = own_partials
        self._held: torch.Tensor | None = None  # partial results of a launch that is still to come
        self._streams: tuple[int, ...] = (stream,)  # that torch's allocator knows to use the tensors
        self._maps = TensorMaps(decision, params, device.index or 0) if decision.kernel.copies else None
        self._instead: Callable[[int], None] | None = None
        self._launches: dict[bool, Callable[[int], None]] = {}  # by whether they are dependent launches

    @property  # a cached one would make a dictionary of each plan
    def _params(self) -> AttentionParams:
        return base_of(self._struct)

    @property
    def nnz_kv(self) -> int:
        """Rows of k, or page numbers; 0 where only the device knows."""
        return self.schedule.sizes.nnz_kv if self.schedule else 0

    @property
    def largest_page(self) -> int:
        """The largest page number; -1 where only the device knows."""
        return self.schedule.sizes.largest_page if self.schedule else -1

    def indices(self, given: Indices) -> Indices:
        """The index arrays as plan() read them, even if the caller has changed them since."""
        assert self.schedule is not None
        pages = self._pages
        if pages is None and given.kv_indices is not None:
            begin, end = self.schedule.sizes.filled_bytes, self.schedule.sizes.staged_bytes
            pages = self.schedule.pages if self._sent is None else self._sent.copy(begin, end).view(torch.int32)
        return self.schedule.indices(given, pages)

    def plan_again(self, lengths: Lengths, workspace: Workspace) -> None:
        """Plan for other lengths of the same shapes, on the device, from the next run() on."""
        assert self.on_device is not None
        self._made = self.on_device.make(lengths, workspace)

    def forget(self) -> None:
        """Keep no tensor that plan_again() was given or made: whoever runs the plan sets all addresses."""
        self._made = ()

    def set_logits(self, logits: LogitsOptions) -> None:
        """Use another scale and cap of logits from the next run() on, without compiling or planning."""
        self._logits, self._params.logits_cap, self._extras = logits, logits.logits_soft_cap * LOG2E, None

    @property
    def operands(self) -> ctypes.Structure:
        """The operands of a custom variant, inside the parameter struct."""
        found: ctypes.Structure = self._struct.operands
        return found

    def set_signature(self, views: Mapping[str, View]) -> None:
        """Take the strides of the operands, and encode their tensor maps."""
        strides: list[int] = []
        for operand in self._decision.tensors:
            count = len(operand.strides)
            strides += views[operand.name].strides[:count] if operand.name in views else (0,) * count
        self._set_strides(struct.pack(f"{len(strides)}q", *strides))
        if self._maps is not None:
            self._maps.encode(views)

    def signature(self) -> tuple[bytes, EncodedMaps | None]:
        """The state after set_signature(), for copy_signature() of another plan with equal kernel and options."""
        return self._strides, self._maps.encoded() if self._maps is not None else None

    def copy_signature(self, strides: bytes, maps: EncodedMaps | None) -> None:
        """Set what set_signature() would set."""
        self._set_strides(strides)
        if self._maps is not None and maps is not None:
            self._maps.copy_from(maps)

    def _set_strides(self, strides: bytes) -> None:
        self._strides, address = strides, ctypes.addressof(self._struct)
        blocks = [block.write(address, strides) for block in self._decision.blocks]
        self._pointers = blocks[0]
        if len(blocks) > 1:
            ends = [*accumulate(map(len, blocks), initial=0)]
            self._more = [(block, slice(*ends[i : i + 2])) for i, block in enumerate(blocks)]

    def run(
        self, stream: int, pointers: Sequence[int], extras: Extras, enable_pdl: bool | None, partials: int = 0
    ) -> None:
        """Launch on `stream`, torch's current one, with operands at `pointers` that have set_signature()'s signature.

        partials: the address of own_partials bytes for partial results; 0: torch is asked for them, if there are any.
        """
        if self._more:  # operands beside q, k, v and o
            for block, part in self._more:
                block[:] = pointers[part]
        else:
            self._pointers[:] = pointers
        if extras != self._extras:
            self._set(extras)
        if self._maps is not None:
            self._maps.move(pointers)
        if stream not in self._streams:
            self._use_on(stream)
        if self._own_partials is not None:
            memory = self._place_partials(self._own_partials, partials)  # must live until the launch is enqueued
            self._held = None if self._instead is None else memory
        if self._instead is not None:
            self._instead(stream)
        elif self._grid:
            pdl = self._may_use_pdl and (self._uses_pdl if enable_pdl is None else enable_pdl)
            launch = self._launches.get(pdl) or self._bind(pdl)
            if profiler._is_profiler_enabled:  # torch's own quick answer
                profiled(self._module, launch, stream)
            else:
                launch(stream)

    def _place_partials(self, own: OwnPartials, at: int) -> torch.Tensor | None:
        """Set the parameters to partial results at an address; 0: in new memory, which is returned."""
        memory = None if at else torch.empty(own.num_bytes, dtype=torch.uint8, device=self.device)
        at = at if memory is None else memory.data_ptr()
        if at != self._partials_at:
            base, self._partials_at = self._params, at
            base.partial_o, base.partial_md = at, at + own.maxima_offset
        return memory

    @property
    def own_partials(self) -> int:
        """Bytes of partial results that each run takes, as no workspace holds them."""
        return 0 if self._own_partials is None else self._own_partials.num_bytes

    @property
    def kernel(self) -> str:
        """The variant that it launches."""
        return self._decision.key.slug

    @property
    def num_bytes(self) -> int:
        """Memory that the plan keeps on its device."""
        sent = 0 if self._sent is None else self._sent.tensor.nbytes
        return sent + sum(tensor.nbytes for tensor in (*self._tensors, *self._made) if tensor is not None)

    @property
    def params(self) -> Any:
        """The parameter struct, as the last run() left it."""
        return self._struct

    @property
    def tile_counter(self) -> int:
        """The address of the schedule's tile counter, which every schedule of the host has."""
        assert self.schedule is not None
        sizes = self.schedule.sizes
        address: int = self._params.tiles - sizes.tiles_offset + sizes.tile_counter_offset
        return address

    @contextmanager
    def launched_by(self, launch: Callable[[int], None]) -> Iterator[None]:
        """Meanwhile run() calls `launch` with the stream in place of a launch of its own."""
        self._instead = launch
        try:
            yield
        finally:
            self._instead = self._held = None

    def _set(self, extras: Extras) -> None:
        if self._given is None:
            self._given = pointers_at(self._params, "lse", "o_scale_by")
        self._given[:], before, self._extras = extras[:4], self._extras, extras
        if before is None or before[4:] != extras[4:]:
            p, (logits_scale, o_scale, lse_unit) = self._params, extras[4:]
            scale, cap = self._logits.sm_scale * logits_scale, self._logits.logits_soft_cap
            p.logits_scale = max(scale * LOG2E, _LEAST_SCALE if self._decision.key.has_bias else 0.0)
            p.tanh_scale, p.o_scale, p.lse_unit = scale / cap if cap else scale, o_scale, lse_unit

    def _use_on(self, stream: int) -> None:
        """Tell torch's allocator that the current stream reads the tensors of this plan, so that their memory is not
        reused before that stream has finished.
        """
        current = torch.cuda.current_stream(self.device)
        if self._sent is not None:
            self._sent.used_on(current)
        for tensor in (*self._tensors, *self._made):
            if tensor is not None:
                tensor.record_stream(current)
        self._streams += (stream,)

    def _bind(self, pdl: bool) -> Callable[[int], None]:
        params = ctypes.addressof(self._struct)
        launch = self._launches[pdl] = bind(self._module, params, self.device, self._grid, pdl=pdl)
        return launch


def base_of(params: ctypes.Structure) -> AttentionParams:
    """The parameters common to all attention kernels, inside of those of one kernel."""
    return params if isinstance(params, AttentionParams) else params.base
