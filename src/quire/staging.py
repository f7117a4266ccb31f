"""Host memory that a schedule is written into: a plan's own, or pinned on its way to a GPU."""

from __future__ import annotations

from collections import deque
from ctypes import byref, c_void_p
from functools import cache

import torch

from quire.jit.driver import driver

__all__ = ["Room", "Staging", "staging_of"]

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


class Staging:
    """Pinned rooms for copies to one GPU, from any thread and on any stream; each waits in a queue until it was read.

    torch's own pinned memory and `.to` take 10.6 us, torch.empty and this 7.0 (H200's host, 2026-11-21).
    """

    def __init__(self, device: int) -> None:
        self._driver = driver()
        self._device = device
        self._waiting: deque[Room] = deque()  # appending and popping are atomic
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

    def send(self, room: Room, num_bytes: int = 0, target: int = 0) -> None:
        """Copy the first `num_bytes` to `target` on torch's current stream of the device, and wait for nothing. None
        where the caller has copied, on that stream.
        """
        stream, current = torch._C._cuda_getCurrentRawStream(self._device), c_void_p()
        self._get_current(byref(current))
        if current.value == self._driver.context(self._device):
            code = self._send(room, num_bytes, target, stream)
        else:
            with self._driver.current(self._device):
                code = self._send(room, num_bytes, target, stream)
        if code:
            self._driver.check(code, "the copy of a plan", f"{num_bytes} bytes to device {self._device}")
        self._waiting.append(room)

    def _send(self, room: Room, num_bytes: int, target: int, stream: int) -> int:
        code = self._copy(target, room.address, num_bytes, stream) if num_bytes else 0
        return code or self._record(room.event, stream)


@cache
def _staging(index: int) -> Staging:
    return Staging(index)


def staging_of(device: torch.device) -> Staging | None:
    """The staging of a GPU; None for the host, where a plan keeps what was written."""
    return _staging(device.index or 0) if device.type == "cuda" else None
