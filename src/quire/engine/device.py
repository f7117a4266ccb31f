"""A torch device as Quire uses it: its compilation target, memory for partial results, and uploads of schedules.

Any number of wrappers on a GPU may share one workspace if all of their runs are on one stream, because partial
results are not needed after a run. Runs on two streams would overwrite each other's partial results, so wrappers on
different streams need separate workspaces. On the CPU each wrapper allocates its own memory, so wrappers of several
threads may share a workspace.

A caller that plans on a stream of its own (torch.cuda.ExternalStream) must keep the stream alive until its work is
done, as for torch's allocator. Memory is reused by the handle of the stream: if a stream is destroyed while its
kernels still run, another stream may get the same handle and would not wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import byref, c_int, c_void_p, memmove
from functools import cache
from typing import Any, TypeVar

import torch

from quire.engine.checks import check_tensor
from quire.errors import PlanError, UnsupportedError, ValidationError
from quire.jit import host_target
from quire.jit.machine import cuda_target, driver


@cache
def on_cuda(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU; cached, because device.type creates a string in each call."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream of a GPU, 0 for the default one; 0 for the host."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if on_cuda(device) else 0


def target_of(device: torch.device, *, matrix_unit: bool = False) -> str:
    """ "sm90a" for a Hopper GPU, "x86-64-v4" for a host with AVX-512, ...

    `matrix_unit`: for code that multiplies matrices, for which some CPUs have special instructions.
    """
    if device.type == "cuda":
        return cuda_target(device.index or 0)
    if device.type == "cpu":
        return host_target(matrix_unit=matrix_unit)
    raise UnsupportedError(f"device: expected cpu or cuda, got {device}.")


@cache
def _num_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def max_ctas(device: torch.device, min_ctas: int) -> int:
    """CTAs that run at the same time: SMs times CTAs an SM, or host threads."""
    return _num_sms(device.index or 0) * min_ctas if device.type == "cuda" else torch.get_num_threads()


Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


@cache
def allocator(device: torch.device) -> Empty:
    """torch.empty_strided(size, stride, dtype) on a device, for a caller that makes it in each call.

    It is the function that code of torch.compile allocates with, in half the time. That is no public part of torch:
    torch.empty_strided() is taken where it does not give what is expected. It knows no GPU but the current one.
    """

    def plain(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def on_current(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if torch._C._cuda_getDevice() == index:
            return quick(size, stride, dtype)
        return plain(size, stride, dtype)

    index = device.index or 0
    try:
        from torch._C._dynamo import guards

        quick: Empty = guards._empty_strided_cuda if on_cuda(device) else guards._empty_strided_cpu  # type: ignore
        with torch.cuda.device(index) if on_cuda(device) else nullcontext():
            found = quick((2, 3), (4, 1), torch.float16)
    except Exception:
        return plain
    if (found.device, found.shape, found.stride(), found.dtype) != (device, (2, 3), (4, 1), torch.float16):
        return plain
    return on_current if on_cuda(device) and torch.cuda.device_count() > 1 else quick


ALIGNMENT = 16  #: bytes


def partials_bytes(num_partials: int, tile_rows: int, head_dim_vo: int) -> int:
    """Bytes of the partial results of a plan: a float32 row of o and (m, d) for each row of each of them."""
    return num_partials * tile_rows * (head_dim_vo + 2) * 4


class UserWorkspace:
    """The caller's buffer; its device is the device of the call, and its size is a limit, also on the CPU."""

    def __init__(self, buffer: Any, name: str) -> None:
        self._name = name
        self._buffer = self._as_bytes(buffer)
        self.device = self._buffer.device
        self.most_bytes, self._is_cuda = self._buffer.numel(), self._buffer.is_cuda  #: the first: that take() takes
        self._own = self._buffer[:0]  # on the CPU: what the largest plan took

    def _as_bytes(self, buffer: Any) -> torch.Tensor:
        tensor = check_tensor(buffer, self._name)
        if not tensor.is_contiguous():
            raise ValidationError(f"{self._name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}.")
        data = tensor.view(-1).view(torch.uint8)
        if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
            address = tensor.data_ptr()
            raise ValidationError(f"{self._name} must be {ALIGNMENT}-byte aligned, got address {address:#x}.")
        return data

    @property
    def buffer(self) -> torch.Tensor:
        """The caller's memory, as bytes."""
        return self._buffer

    def set_aside(self, num_bytes: int, most: float, alignment: int) -> tuple[UserWorkspace, torch.Tensor] | None:
        """The rest, and `num_bytes` from the end of the buffer; None if this is more than the fraction `most` of it."""
        if num_bytes + alignment > most * self.most_bytes:
            return None
        begin = self.most_bytes - num_bytes
        begin -= (self._buffer.data_ptr() + begin) % alignment
        return UserWorkspace(self._buffer[:begin], self._name), self._buffer[begin : begin + num_bytes]

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes`: the buffer or, on the CPU, new memory; ValidationError if the buffer is smaller."""
        if num_bytes > self.most_bytes:
            raise ValidationError(
                f"{self._name}: expected at least {num_bytes} bytes for the partial results of this batch, "
                f"got {self.most_bytes}; reserve more, or plan with disable_split_kv=True."
            )
        if self._is_cuda:
            return self._buffer
        if num_bytes > self._own.numel():
            self._own = OwnWorkspace(self.device).take(num_bytes)
        return self._own


class OwnWorkspace:
    """Memory from torch's allocator, as much as a plan needs."""

    most_bytes = 2**63 - 1  #: torch says when there is no more

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def set_aside(self, num_bytes: int, _most: float, _alignment: int) -> tuple[OwnWorkspace, torch.Tensor]:
        """This one, and a new buffer; torch aligns it to 256 bytes or more on a GPU."""
        return self, self.take(num_bytes)

    def take(self, num_bytes: int) -> torch.Tensor:
        """A new buffer of `num_bytes`."""
        return torch.empty(max(ALIGNMENT, num_bytes), dtype=torch.uint8, device=self.device)


Workspace = UserWorkspace | OwnWorkspace


_Item = TypeVar("_Item")

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LEAST_BYTES = 1 << 16
_HOST = torch.device("cpu")


class HostBuffer:
    """Bytes on the host, 16-byte aligned.

    With an `event`, a CUevent, they are pinned, and may be overwritten after the event. When this object is deleted,
    its event is appended to `spare_events`.
    """

    _spare_events: list[int] | None = None

    def __init__(self, num_bytes: int, event: int = 0, spare_events: list[int] | None = None) -> None:
        self.event = event
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=_HOST, pin_memory=event != 0)
        self.address = self.tensor.data_ptr()
        self.num_bytes = num_bytes
        self._spare_events = spare_events

    def __del__(self) -> None:
        if self._spare_events is not None:
            self._spare_events.append(self.event)


class DeviceBuffer:
    """Bytes on a GPU that belong to one plan.

    When the plan is deleted, they are added to `spare_tensors`, for the next plan on the same stream. The copy of that
    plan is enqueued after all launches of this one, so nothing is overwritten while a kernel reads it.
    """

    _spare_tensors: list[torch.Tensor] | None = None

    def __init__(self, tensor: torch.Tensor, spare_tensors: list[torch.Tensor] | None) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._spare_tensors = spare_tensors

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Called if another stream reads these bytes: they then go back to torch's allocator, which waits."""
        self.tensor.record_stream(stream)
        self._spare_tensors = None

    def copy(self, begin: int, end: int) -> torch.Tensor:
        """A copy of bytes [begin, end)."""
        return self.tensor[begin:end].clone()

    def __del__(self) -> None:
        if self._spare_tensors is not None:
            self._spare_tensors.append(self.tensor)


class Uploader:
    """Copies to a GPU asynchronously on one stream, for plans from any thread.

    A host buffer stays in a queue until its copy is done. torch's own way (pinned memory and Tensor.to) takes more than
    twice the host time: see benchmarks/results/notes/decode.md.
    """

    def __init__(self, device: int, stream: int) -> None:
        self._driver = driver()
        self._device, self._context, self.stream = device, self._driver.context(device), stream
        self._in_use: deque[HostBuffer] = deque()  # in the stream's order; appending and popping are atomic
        self._spare_events: list[int] = []
        self._spare_tensors: list[torch.Tensor] = []
        self._num_bytes = _LEAST_BYTES  # of a new host buffer
        names = "cuCtxGetCurrent", "cuEventQuery", "cuEventRecord", "cuMemcpyHtoDAsync_v2"
        self._get_current, self._query, self._record, self._copy = map(self._driver.function, names)

    def take(self, num_bytes: int = 0) -> HostBuffer:
        """A host buffer of at least `num_bytes`, and as large as the largest request so far."""
        while self._num_bytes < num_bytes:
            self._num_bytes *= 2
        try:
            oldest = self._in_use.popleft()
        except IndexError:
            return self._new()
        if code := self._query(oldest.event):
            self._in_use.appendleft(oldest)
            if code != _NOT_READY:
                self._driver.check(code, "cuEventQuery")
            return self._new()
        return oldest if oldest.num_bytes >= self._num_bytes else self._new()

    def _new(self) -> HostBuffer:
        return HostBuffer(self._num_bytes, _taken(self._spare_events.pop) or self._new_event(), self._spare_events)

    def _new_event(self) -> int:
        event = c_void_p()
        with self._driver.current(self._device):
            self._driver.call("cuEventCreate", byref(event), _DISABLE_TIMING)
        return event.value or 0

    def send(
        self, host_buffer: HostBuffer, num_bytes: int, more: int = 0, *, for_one_call: bool = False
    ) -> DeviceBuffer:
        """Enqueue a copy of the first `num_bytes` into a device buffer with `more` bytes after them.

        for_one_call: return the buffer to torch after the plan. torch.compile(mode="reduce-overhead") runs calls in the
        memory pool of a CUDA graph and checks that none of it is still in use.
        """
        tensor = None if for_one_call else _taken(self._spare_tensors.pop)
        if tensor is None or tensor.numel() < num_bytes + more:
            size = num_bytes + more if for_one_call else max(host_buffer.num_bytes, num_bytes + more)
            tensor = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", self._device))
        sent = DeviceBuffer(tensor, None if for_one_call else self._spare_tensors)
        self._enqueue(host_buffer, sent.address, num_bytes)
        return sent

    def release(self, host_buffer: HostBuffer) -> None:
        """Take back `host_buffer`, from which copies have been enqueued on this stream."""
        self._enqueue(host_buffer, 0, 0)

    def _enqueue(self, host_buffer: HostBuffer, target: int, num_bytes: int) -> None:
        current = c_void_p()
        self._get_current(byref(current))
        if current.value == self._context:
            code = self._copy_and_record(host_buffer, target, num_bytes)
        else:
            with self._driver.current(self._device):
                code = self._copy_and_record(host_buffer, target, num_bytes)
        if code:
            self._driver.check(code, "the copy of a plan", f"{num_bytes} bytes to device {self._device}")
        self._in_use.append(host_buffer)

    def _copy_and_record(self, host_buffer: HostBuffer, target: int, num_bytes: int) -> int:
        code = self._copy(target, host_buffer.address, num_bytes, self.stream) if num_bytes else 0
        return code or self._record(host_buffer.event, self.stream)


class CaptureUploader:
    """The copy of one call's plan, recorded in a CUDA graph. Each replay copies the same bytes.

    They are in pinned memory that is never freed, because there is no notification when a graph is deleted: some KiB
    for each captured call.
    """

    def __init__(self, device: int, stream: int) -> None:
        self._driver, self._device, self.stream = driver(), device, stream

    def take(self, num_bytes: int = 0) -> HostBuffer:
        """A host buffer that no copy reads."""
        return HostBuffer(max(num_bytes, _LEAST_BYTES))

    def send(
        self, host_buffer: HostBuffer, num_bytes: int, more: int = 0, *, for_one_call: bool = True
    ) -> DeviceBuffer:
        """Record a copy of the first `num_bytes` into memory of the graph's pool, with `more` bytes after them."""
        assert for_one_call
        tensor = torch.empty(num_bytes + more, dtype=torch.uint8, device=torch.device("cuda", self._device))
        with self._driver.current(self._device):
            address = self._pinned(num_bytes)
            memmove(address, host_buffer.address, num_bytes)
            self._driver.call("cuMemcpyHtoDAsync_v2", tensor.data_ptr(), address, num_bytes, self.stream)
        return DeviceBuffer(tensor, None)

    def _pinned(self, num_bytes: int) -> int:
        """New pinned memory, in a capture mode of this thread that permits the allocation."""
        mode, address = c_int(_CAPTURE_RELAXED), c_void_p()
        self._driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            self._driver.call("cuMemHostAlloc", byref(address), num_bytes, 0)
        finally:
            self._driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        return address.value or 0


def _taken(pop: Callable[[], _Item]) -> _Item | None:
    """The item that `pop` removes from a list or queue; None if there is none, as another thread may have taken it."""
    try:
        return pop()
    except IndexError:
        return None


_uploaders: dict[tuple[int, int], Uploader] = {}


def uploader_of(device: torch.device, *, for_capture: bool = False) -> Uploader | CaptureUploader:
    """The uploader of torch's current stream of a GPU."""
    index = device.index or 0
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if for_capture:
        return CaptureUploader(*key)
    return _uploaders.get(key) or _uploaders.setdefault(key, Uploader(*key))


# --- captures of CUDA graphs


# --- captures of CUDA graphs -----------------------------------------------------------------------------------------


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured, which the default stream never is."""
    if not on_cuda(device) or not torch._C._cuda_getCurrentRawStream(index := device.index or 0):
        return False
    if torch._C._cuda_getDevice() == index:  # torch answers for the current device
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()


def refuse_capture(what: str, device: torch.device) -> None:
    """PlanError in a capture of a CUDA graph: a replay would read memory that `what` made and that may be freed by
    then.
    """
    if is_capturing(device):
        raise PlanError(
            f"{what} cannot be captured in a CUDA graph: construct the wrapper with use_cuda_graph=True and its "
            f"buffers, and call plan() before the capture and before each replay."
        )
