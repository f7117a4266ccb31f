"""Memory that plans pass on to each other, never while anybody reads it. Tests play the driver and the streams."""

from __future__ import annotations

import ctypes

import pytest
import torch

import quire
from problems import ints, workspace
from quire.engine import device

NOT_READY = 600
EVENTS = iter(range(1, 1000))


class Driver:
    """Copies at once; events are as ready as the test says."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.recorded: list[tuple[int, int]] = []
        self.modes: list[int] = []
        self.pinned: list[ctypes.Array] = []
        self.captured: list[tuple[int, int, int, int]] = []

    def function(self, name: str):
        return getattr(self, name)

    def call(self, name: str, *arguments: object) -> None:
        if name == "cuThreadExchangeStreamCaptureMode":
            self.modes.append(arguments[0]._obj.value)
            arguments[0]._obj.value = 0
        elif name == "cuMemHostAlloc":
            self.pinned.append(ctypes.create_string_buffer(arguments[1]))
            arguments[0]._obj.value = ctypes.addressof(self.pinned[-1])
        elif name == "cuMemcpyHtoDAsync_v2":
            self.captured.append(arguments)
            self.cuMemcpyHtoDAsync_v2(*arguments)
        else:
            assert name == "cuEventCreate"
            arguments[0]._obj.value = next(EVENTS)

    def current(self, device: int):
        return torch.no_grad()  # any context

    def context(self, device: int) -> int:
        return 0

    def check(self, code: int, *words: str) -> None:
        raise quire.DriverError(f"{words[0]} failed with {code}")

    def cuCtxGetCurrent(self, answer: object) -> int:
        return 0

    def cuEventQuery(self, event: int) -> int:
        return NOT_READY if event in self.busy else 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        self.recorded.append((event, stream))
        return 0

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        ctypes.memmove(target, source, num_bytes)
        return 0


@pytest.fixture
def gpu(monkeypatch):
    """The uploader of a stream over a driver that this test plays, and the current stream, which it may change."""
    driver, stream, empty = Driver(), [7], torch.empty
    monkeypatch.setattr(device, "driver", lambda: driver)
    monkeypatch.setattr(device, "_uploaders", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, **_: empty(size, dtype=dtype))
    return device.uploader_of(torch.device("cuda")), driver, stream


def test_a_host_buffer_is_taken_again_once_it_was_read(gpu):
    there, driver, _ = gpu
    first = there.take()
    first.tensor[:4] = torch.arange(4, dtype=torch.uint8)
    sent = there.send(first, 4)
    assert sent.tensor[:4].tolist() == [0, 1, 2, 3] and driver.recorded == [(first.event, 7)]
    driver.busy.add(first.event)
    second = there.take()
    assert second is not first and second.event != first.event
    there.release(second)
    driver.busy.clear()
    assert there.take() is first and there.take() is second


def test_host_buffers_grow(gpu):
    there, _, _ = gpu
    there.release(there.take())
    large = there.take(1 << 20)
    assert large.num_bytes >= 1 << 20
    there.release(large)
    assert there.take().num_bytes == large.num_bytes


def test_a_plan_that_fails_leaks_no_event(gpu):
    there, _, _ = gpu
    buffer = there.take()
    event = buffer.event
    del buffer  # it was never sent
    assert there.take().event == event


def test_a_failed_query_is_an_error(gpu):
    there, _, _ = gpu
    there.release(there.take())
    there._query = lambda event: 700
    with pytest.raises(quire.DriverError, match="cuEventQuery failed with 700"):
        there.take()


def test_a_buffer_that_was_never_made_is_dropped_in_silence():
    """Where torch.empty raises, and where torch.compile makes objects without __init__."""
    for cls in (device.HostBuffer, device.DeviceBuffer):
        cls.__new__(cls).__del__()


def test_what_a_plan_leaves_goes_to_the_next_one_of_its_stream(gpu):
    there, _, stream = gpu
    sent, other = there.send(there.take(), 16), there.send(there.take(), 16)
    left = sent.address
    assert other.address != left  # both are alive
    del sent
    stream[0] = 8
    elsewhere = device.uploader_of(torch.device("cuda"))
    assert elsewhere is not there
    assert elsewhere.send(elsewhere.take(), 16).address != left
    stream[0] = 7
    assert device.uploader_of(torch.device("cuda")) is there
    assert there.send(there.take(), 16).address == left


def test_what_one_call_leaves_is_torchs(gpu):
    """No later plan finds it: the pool of a CUDA graph may have given it."""
    there, _, _ = gpu
    sent = there.send(there.take(), 16, for_one_call=True)
    left = sent.tensor
    assert left.shape[0] == 16
    del sent
    assert there.send(there.take(), 16).tensor is not left


def test_a_capture_records_copies_of_bytes_that_stay(gpu):
    """Nothing is asked of events, which is an error in a capture, and the host buffer may be written again."""
    _, driver, _ = gpu
    there = device.uploader_of(torch.device("cuda"), for_capture=True)
    buffer = there.take(5)
    buffer.tensor[:4] = torch.arange(4, dtype=torch.uint8)
    sent = there.send(buffer, 4, 12)
    assert sent.tensor[:4].tolist() == [0, 1, 2, 3] and sent.tensor.shape[0] == 16
    target, source, num_bytes, stream = driver.captured[0]
    assert (target, num_bytes, stream) == (sent.address, 4, 7) and source != buffer.address
    buffer.tensor[:4] = 9
    assert ctypes.string_at(source, 4) == bytes(range(4))  # what a replay copies
    assert driver.modes == [2, 0] and not driver.recorded


def test_what_another_stream_reads_is_left_to_torch(gpu, monkeypatch):
    there, _, _ = gpu
    told = []
    sent = there.send(there.take(), 16)
    sent.tensor.record_stream = told.append
    sent.used_on("another stream")
    left = sent.tensor
    del sent
    assert told == ["another stream"]
    assert there.send(there.take(), 16).tensor is not left


def test_later_changes_of_the_index_arrays_do_not_matter():
    """A plan owns what it was planned on, also where forward() plans again."""
    cache = torch.randn(4, 2, 16, 1, 64, dtype=torch.bfloat16)
    q = torch.randn(3, 4, 64, dtype=torch.bfloat16)
    lengths = [ints(x, "cpu") for x in ([0, 1, 3], [0, 2, 4], [3, 1, 0, 2], [16, 5])]
    options = {"causal": True, "q_data_type": torch.bfloat16}
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(*lengths, 4, 1, 64, 16, **options)
    want = wrapper.run(q, cache), wrapper.forward(q, cache, causal=False)
    wrapper.plan(*lengths, 4, 1, 64, 16, **options)
    for array in lengths:
        array.fill_(77)
    assert torch.equal(wrapper.run(q, cache), want[0])
    assert torch.equal(wrapper.forward(q, cache, causal=False), want[1])
