"""The memory of a launch. An access that is out of bounds or not aligned is a Fault.

Each tensor's memory is a region of its own, far from all others, so that nothing beyond its end is another tensor.
Generic addresses below the first region mean a CTA's shared memory and a thread's own.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]

_SLOT_BITS = 36  #: bytes of a region and of what lies between two, as a power of 2
SHARED_WINDOW, LOCAL_WINDOW, _FIRST_REGION = (slot << _SLOT_BITS for slot in (1, 2, 16))
_ALIGNMENT = 4096


class Fault(Exception):
    """What a GPU would not do either, or this interpreter cannot do."""


class Bank:
    """Bytes as elements of any type. `begin` and `end`: the bytes that may be used."""

    def __init__(self, data: Array, begin: int = 0, name: str = "memory") -> None:
        self.data, self.begin, self.end, self.name = data, begin, len(data), name
        self._views: dict[np.dtype, Array] = {}

    def view(self, dtype: np.dtype) -> Array:
        """All whole elements of a type."""
        if dtype not in self._views:
            self._views[dtype] = self.data[: self.end // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._views[dtype]

    def places(self, offsets: Array, dtype: np.dtype, count: int, limits: tuple[Array, Array] | None = None) -> Array:
        """The elements at these offsets: their numbers, [len(offsets), count]. limits: first bytes, and ends."""
        size = dtype.itemsize * count
        begin, end = (self.begin, self.end) if limits is None else limits
        wrong = np.flatnonzero((offsets < begin) | (offsets + size > end))
        if len(wrong):
            first, last = (limit[wrong[0]] if np.ndim(limit) else limit for limit in (begin, end))
            raise Fault(f"{self.name}: {size} bytes at byte {offsets[wrong[0]] - first} of {last - first}")
        if (offsets % size).any():
            raise Fault(f"{self.name}: byte {offsets[offsets % size != 0][0]} is not aligned to {size} bytes")
        return (offsets // dtype.itemsize)[:, None] + np.arange(count)


class GlobalMemory:
    """Regions for the tensors of a launch. `storages`: address and bytes of all memory that it may be given."""

    def __init__(self, storages: Mapping[int, int]) -> None:
        self._storages = dict(sorted(storages.items()))
        self._banks: list[Bank] = []
        self._of_storage: dict[int, int] = {}

    @cached_property
    def _starts(self) -> list[int]:
        return list(self._storages)

    def relocate(self, params: bytes, distances: Iterable[tuple[int, int]] = ()) -> bytes:
        """The parameters with simulated addresses in place of those in them.

        distances: (offset of an address, offset of what another address is further on).
        """
        given = np.frombuffer(params[: len(params) // 8 * 8], np.int64)
        words = np.array([self._simulated(word) for word in given.tolist()], np.int64)
        for base, distance in distances:
            address, step = int(given[base // 8]), int(given[distance // 8])
            words[distance // 8] = self._simulated(address + step) - self._simulated(address)
        return words.tobytes() + params[len(words) * 8 :]

    def _simulated(self, word: int) -> int:
        """The simulated address for a real one; what is none stays as it is."""
        place = bisect_right(self._starts, word) - 1
        start = self._starts[place] if place >= 0 else 0
        if not start or word >= start + self._storages[start]:
            return word
        if start not in self._of_storage:
            self._of_storage[start] = self.add(_memory_at(start, self._storages[start]))
        return self._of_storage[start] + word - start // _ALIGNMENT * _ALIGNMENT

    def add(self, bank: Bank) -> int:
        """Make a region of a bank; returns its address."""
        self._banks.append(bank)
        return _FIRST_REGION + (len(self._banks) - 1 << _SLOT_BITS)

    def bank_at(self, slot: int) -> Bank:
        """The bank of a region, by the upper bits of an address."""
        index = slot - (_FIRST_REGION >> _SLOT_BITS)
        if not 0 <= index < len(self._banks):
            raise Fault(f"address {slot << _SLOT_BITS:#x} is in no memory")
        return self._banks[index]


def _memory_at(address: int, size: int) -> Bank:
    """Memory of this process, from the multiple of _ALIGNMENT before it."""
    before = address % _ALIGNMENT
    data = np.frombuffer((ctypes.c_uint8 * (before + size)).from_address(address - before), np.uint8)
    return Bank(data, before, "a tensor's memory")


class Memory:
    """What the threads of a launch see: global memory, shared memory of each CTA, and memory of each thread.

    Shared memory begins as NaN. `cta`: the CTA of each thread.
    """

    def __init__(self, shared_bytes: int, local_bytes: int, cta: Array, regions: GlobalMemory) -> None:
        self._pitch, self._shared_bytes = -(-shared_bytes // 1024) * 1024, shared_bytes
        self._local_bytes, self._regions = -(-local_bytes // 16) * 16, regions
        ctas = int(cta.max()) + 1
        self.shared = Bank(np.full(max(1, ctas * self._pitch), 0xFF, np.uint8), name="shared memory")
        self.local = Bank(np.full(max(1, len(cta) * self._local_bytes), 0xFF, np.uint8), name="memory of a thread")
        self._shared_begin = cta.astype(np.int64) * self._pitch
        self._local_begin = np.arange(len(cta), dtype=np.int64) * self._local_bytes

    def load(self, threads: Array, addresses: Array, dtype: np.dtype, count: int, *, shared: bool = False) -> Array:
        """Elements [len(threads), count] at an address for each thread; `shared`: those are of shared memory."""
        if shared:
            bank, places = self._in_shared(threads, addresses, dtype, count)
            return bank.view(dtype)[places]
        slots = addresses >> _SLOT_BITS
        if (slots == slots[0]).all():
            bank, places = self._in_slot(int(slots[0]), threads, addresses, dtype, count)
            return bank.view(dtype)[places]
        found = np.empty((len(threads), count), dtype)
        for slot in np.unique(slots).tolist():
            of = slots == slot
            bank, places = self._in_slot(slot, threads[of], addresses[of], dtype, count)
            found[of] = bank.view(dtype)[places]
        return found

    def store(self, threads: Array, addresses: Array, values: Array, *, shared: bool = False) -> None:
        """The inverse of load()."""
        dtype, count = values.dtype, values.shape[1]
        if shared:
            bank, places = self._in_shared(threads, addresses, dtype, count)
            bank.view(dtype)[places] = values
            return
        slots = addresses >> _SLOT_BITS
        for slot in np.unique(slots).tolist():
            of = slots == slot
            bank, places = self._in_slot(slot, threads[of], addresses[of], dtype, count)
            bank.view(dtype)[places] = values[of]

    def _in_slot(self, slot: int, threads: Array, addresses: Array, dtype: np.dtype, count: int) -> tuple[Bank, Array]:
        offsets = addresses & ((1 << _SLOT_BITS) - 1)
        if slot == SHARED_WINDOW >> _SLOT_BITS:
            return self._in_shared(threads, offsets, dtype, count)
        if slot == LOCAL_WINDOW >> _SLOT_BITS:
            begin = self._local_begin[threads]
            limits = begin, begin + self._local_bytes
            return self.local, self.local.places(offsets + begin, dtype, count, limits)
        bank = self._regions.bank_at(slot)
        return bank, bank.places(offsets, dtype, count)

    def _in_shared(self, threads: Array, offsets: Array, dtype: np.dtype, count: int) -> tuple[Bank, Array]:
        begin = self._shared_begin[threads]
        return self.shared, self.shared.places(offsets + begin, dtype, count, (begin, begin + self._shared_bytes))
