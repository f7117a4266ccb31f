"""Host memory that a schedule is written into: a plan's own, or pinned on its way to a GPU."""

from __future__ import annotations

from collections import deque
from ctypes import byref, c_void_p
from typing import TypeVar

import torch

from quire.jit.driver import driver
from quire.runtime.target import on_cuda

__all__ = ["DeviceBuffer", "HostBuffer", "Uploader", "uploader_of"]

_Item = TypeVar("_Item")

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_LEAST_BYTES = 1 << 16


class HostBuffer:
    """Bytes on the host, 16-byte aligned. With an `event`, a CUevent, they are pinned, and free once it is done; when
    they are gone, `spare` has it.
    """

    __slots__ = ("_spare", "address", "event", "num_bytes", "tensor")

    def __init__(self, num_bytes: int, event: int = 0, spare: list[int] | None = None) -> None:
        self.event, self._spare = event, spare
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=event != 0)
        self.address = self.tensor.data_ptr()
        self.num_bytes = num_bytes

    def __del__(self) -> None:
        if self._spare is not None:
            self._spare.append(self.event)


class DeviceBuffer:
    """Bytes on a GPU that belong to one plan. Once it is gone, the next one on its stream has them: what that one sends
    there comes after all that this one launched.
    """

    __slots__ = ("_home", "address", "stream", "tensor")

    def __init__(self, tensor: torch.Tensor, stream: int, home: list[torch.Tensor]) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.stream = stream
        self._home: list[torch.Tensor] | None = home

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """A launch on another stream reads this: torch's allocator waits for it, and nobody else has the bytes."""
        self.tensor.record_stream(stream)
        self._home = None

    def copy(self, begin: int, end: int) -> torch.Tensor:
        """These bytes, in memory of their own."""
        return self.tensor[begin:end].clone()

    def __del__(self) -> None:
        if self._home is not None:
            self._home.append(self.tensor)


class Uploader:
    """The way to a GPU on one stream, for plans from any thread. Pinned rooms wait in a queue until they are read.

    torch's pinned memory and `.to` take 10.6 us, this 4 (H200's host, 2026-11-21).
    """

    def __init__(self, device: int, stream: int) -> None:
        self._driver = driver()
        self._device, self._stream = device, stream
        self._waiting: deque[HostBuffer] = deque()  # in the stream's order; appending and popping are atomic
        self._spare: list[int] = []  # events of rooms that are gone
        self._left: list[torch.Tensor] = []  # of plans that are gone
        self._least_bytes = _LEAST_BYTES  # that a host_buffer has from now on
        names = "cuCtxGetCurrent", "cuEventQuery", "cuEventRecord", "cuMemcpyHtoDAsync_v2"
        self._get_current, self._query, self._record, self._copy = map(self._driver.function, names)

    def take(self, num_bytes: int = 0) -> HostBuffer:
        """A host_buffer that is as large as the largest that was asked for."""
        while self._least_bytes < num_bytes:
            self._least_bytes *= 2
        try:
            host_buffer = self._waiting.popleft()
        except IndexError:
            return self._new()
        if code := self._query(host_buffer.event):
            self._waiting.appendleft(host_buffer)
            if code != _NOT_READY:
                self._driver.check(code, "cuEventQuery")
            return self._new()
        return host_buffer if host_buffer.num_bytes >= self._least_bytes else self._new()

    def _new(self) -> HostBuffer:
        return HostBuffer(self._least_bytes, _popped(self._spare) or self._new_event(), self._spare)

    def _new_event(self) -> int:
        event = c_void_p()
        with self._driver.current(self._device):
            self._driver.call("cuEventCreate", byref(event), _DISABLE_TIMING)
        return event.value or 0

    def send(self, host_buffer: HostBuffer, num_bytes: int, more: int = 0) -> DeviceBuffer:
        """Copy the first `num_bytes` to the GPU, with capacity for `more` behind them; wait for nothing."""
        tensor = _popped(self._left)
        if tensor is None or tensor.shape[0] < num_bytes + more:
            size = max(host_buffer.num_bytes, num_bytes + more)
            tensor = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", self._device))
        sent = DeviceBuffer(tensor, self._stream, self._left)
        self._enqueue(host_buffer, sent.address, num_bytes)
        return sent

    def release(self, host_buffer: HostBuffer) -> None:
        """Others have copied from it, on this stream."""
        self._enqueue(host_buffer, 0, 0)

    def _enqueue(self, host_buffer: HostBuffer, target: int, num_bytes: int) -> None:
        current = c_void_p()
        self._get_current(byref(current))
        if current.value == self._driver.context(self._device):
            code = self._copy_and_record(host_buffer, target, num_bytes)
        else:
            with self._driver.current(self._device):
                code = self._copy_and_record(host_buffer, target, num_bytes)
        if code:
            self._driver.check(code, "the copy of a plan", f"{num_bytes} bytes to device {self._device}")
        self._waiting.append(host_buffer)

    def _copy_and_record(self, host_buffer: HostBuffer, target: int, num_bytes: int) -> int:
        code = self._copy(target, host_buffer.address, num_bytes, self._stream) if num_bytes else 0
        return code or self._record(host_buffer.event, self._stream)


def _popped(items: list[_Item]) -> _Item | None:
    """The last item; None if there is none, which another thread may see to at any time."""
    try:
        return items.pop()
    except IndexError:
        return None


_stagings: dict[tuple[int, int], Uploader] = {}


def uploader_of(device: torch.device) -> Uploader | None:
    """The uploader of torch's current stream of a GPU; None for the host, where a plan keeps what was written."""
    if not on_cuda(device):
        return None
    index = device.index or 0
    key = index, torch._C._cuda_getCurrentRawStream(index)
    return _stagings.get(key) or _stagings.setdefault(key, Uploader(*key))
