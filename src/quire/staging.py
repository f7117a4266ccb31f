"""Host memory that a schedule is written into: a plan's own, or pinned on its way to a GPU."""

from __future__ import annotations

from collections import defaultdict, deque
from ctypes import byref, c_void_p
from functools import cache

import torch

from quire.jit.driver import driver

__all__ = ["Room", "Sent", "Staging", "staging_of"]

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_LEAST_BYTES = 1 << 16


class Room:
    """Bytes on the host, 16-byte aligned."""

    __slots__ = ("address", "event", "num_bytes", "tensor")

    def __init__(self, num_bytes: int, *, pin: bool = False, event: int = 0) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin)
        self.address = self.tensor.data_ptr()
        self.num_bytes = num_bytes
        self.event = event  #: a CUevent: done when no copy reads this any more


class Sent:
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


class Staging:
    """The way to one GPU, for plans from any thread, on any stream. Pinned rooms wait in a queue until they are read.

    torch's pinned memory and `.to` take 10.6 us, this 4 (H200's host, 2026-11-21).
    """

    def __init__(self, device: int) -> None:
        self._driver = driver()
        self._device = device
        self._waiting: deque[Room] = deque()  # appending and popping are atomic
        self._left: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by stream, of plans that are gone
        self._least_bytes = _LEAST_BYTES  # that a room has from now on
        names = "cuCtxGetCurrent", "cuEventQuery", "cuEventRecord", "cuMemcpyHtoDAsync_v2"
        self._get_current, self._query, self._record, self._copy = map(self._driver.function, names)

    def take(self, num_bytes: int = 0) -> Room:
        """A room that is as large as the largest that was asked for."""
        while self._least_bytes < num_bytes:
            self._least_bytes *= 2
        try:
            room = self._waiting.popleft()
        except IndexError:
            return self._new()
        if code := self._query(room.event):
            self._waiting.appendleft(room)
            if code != _NOT_READY:
                self._driver.check(code, "cuEventQuery")
            return self._new()
        return room if room.num_bytes >= self._least_bytes else self._new(room.event)

    def _new(self, event: int = 0) -> Room:
        made = c_void_p(event)
        if not event:
            with self._driver.current(self._device):
                self._driver.call("cuEventCreate", byref(made), _DISABLE_TIMING)
        return Room(self._least_bytes, pin=True, event=made.value or 0)

    def send(self, room: Room, num_bytes: int) -> Sent:
        """Copy the first `num_bytes` to the GPU on torch's current stream, and wait for nothing."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        left = self._left[stream]
        tensor = left.pop() if left else None
        if tensor is None or tensor.shape[0] < num_bytes:
            device = torch.device("cuda", self._device)
            tensor = torch.empty(room.num_bytes, dtype=torch.uint8, device=device)
        sent = Sent(tensor, stream, left)
        self._on(stream, room, sent.address, num_bytes)
        return sent

    def release(self, room: Room) -> None:
        """Others have copied from it, on torch's current stream."""
        self._on(torch._C._cuda_getCurrentRawStream(self._device), room, 0, 0)

    def _on(self, stream: int, room: Room, target: int, num_bytes: int) -> None:
        current = c_void_p()
        self._get_current(byref(current))
        if current.value == self._driver.context(self._device):
            code = self._enqueue(stream, room, target, num_bytes)
        else:
            with self._driver.current(self._device):
                code = self._enqueue(stream, room, target, num_bytes)
        if code:
            self._driver.check(code, "the copy of a plan", f"{num_bytes} bytes to device {self._device}")
        self._waiting.append(room)

    def _enqueue(self, stream: int, room: Room, target: int, num_bytes: int) -> int:
        code = self._copy(target, room.address, num_bytes, stream) if num_bytes else 0
        return code or self._record(room.event, stream)


@cache
def _staging(index: int) -> Staging:
    return Staging(index)


def staging_of(device: torch.device) -> Staging | None:
    """The staging of a GPU; None for the host, where a plan keeps what was written."""
    return _staging(device.index or 0) if device.type == "cuda" else None
