"""Loads, stores, atomic operations and asynchronous copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx.decode import DTYPES, Frame, Rule, Run, at, parts
from ptx.memory import SHARED_WINDOW, Array, Fault, Memory
from ptx.program import Instruction

#: Modifiers that change neither where nor how much is loaded: caches, and orders that one thread after another keeps.
_HARMLESS = {
    "global", "local", "param", "const", "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "volatile", "relaxed",
    "acquire", "release", "weak", "gpu", "cta", "sys", "", "L2::128B", "L2::64B", "L2::256B", "L1::no_allocate",
    "L1::evict_first", "L1::evict_last", "L2::evict_first", "L2::evict_last",
}  # fmt: skip


def _shape(instruction: Instruction) -> tuple[bool, int]:
    """Whether shared memory is meant, and how many numbers a thread moves."""
    rest = set(instruction.modifiers[:-1]) - _HARMLESS
    counts = [int(word[1:]) for word in rest if word in ("v2", "v4", "v8")]
    rest -= {"shared", "shared::cta", "v2", "v4", "v8"}
    if rest:
        raise Fault(f"modifiers {sorted(rest)}")
    return bool({"shared", "shared::cta"} & set(instruction.modifiers)), counts[0] if counts else 1


def _load(frame: Frame, instruction: Instruction) -> Run:
    """ld"""
    shared, count = _shape(instruction)
    names, dtype = parts(instruction.operands[0]), DTYPES[instruction.type]
    targets = [None if name == "_" else frame.target(name, instruction.type) for name in names]
    address, memory, threads = frame.addresses(instruction.operands[1]), frame.grid.memory, frame.grid.threads
    if len(names) != count:
        raise Fault(f"{len(names)} registers")

    def run(active: object) -> None:
        found = memory.load(threads[active], address(active), dtype, count, shared=shared)
        for i, target in enumerate(targets):
            if target is not None:
                target[active] = found[:, i]

    return run


def _store(frame: Frame, instruction: Instruction) -> Run:
    """st"""
    shared, count = _shape(instruction)
    dtype, names = DTYPES[instruction.type], parts(instruction.operands[1])
    sources = [_narrowed(frame, name, instruction.type) for name in names]
    address, memory, threads = frame.addresses(instruction.operands[0]), frame.grid.memory, frame.grid.threads
    if len(names) != count:
        raise Fault(f"{len(names)} registers")

    def run(active: object) -> None:
        chosen = threads[active]
        values = np.empty((len(chosen), count), dtype)
        for i, source in enumerate(sources):
            values[:, i] = at(source, active)
        memory.store(chosen, address(active), values, shared=shared)

    return run


def _narrowed(frame: Frame, operand: str, type_name: str) -> Array:
    """A source of which a store takes the lower bits."""
    if operand in frame.function.registers:
        register, dtype = frame.register(operand), DTYPES[type_name]
        if register.dtype.itemsize > dtype.itemsize:
            return register.view(dtype)[:: register.dtype.itemsize // dtype.itemsize]
    return frame.source(operand, type_name)


def _increment(old: int, most: int) -> int:
    return 0 if old >= most else old + 1


_ATOMIC = {
    "add": lambda old, given: old + given, "inc": _increment, "max": max, "min": min,
    "or": lambda old, given: old | given, "and": lambda old, given: old & given, "exch": lambda _, given: given,
}  # fmt: skip


def _atomic(frame: Frame, instruction: Instruction) -> Run:
    """atom, red: the threads one after the other."""
    operation = next(word for word in instruction.modifiers if word in _ATOMIC)
    rest = set(instruction.modifiers[:-1]) - _HARMLESS - {operation, "acq_rel", "shared"}
    if rest:
        raise Fault(f"modifiers {sorted(rest)}")
    shared, type_name = "shared" in instruction.modifiers, instruction.type
    *to, place, given = instruction.operands
    target = frame.target(to[0], type_name) if to and to[0] != "_" else None
    address, value, dtype = frame.addresses(place), frame.source(given, type_name), DTYPES[type_name]
    memory, threads, apply = frame.grid.memory, frame.grid.threads, _ATOMIC[operation]

    def run(active: object) -> None:
        chosen, places = threads[active], address(active)
        values = np.broadcast_to(at(value, active), chosen.shape)
        for i, thread in enumerate(chosen):
            one, where = chosen[i : i + 1], places[i : i + 1]
            old = memory.load(one, where, dtype, 1, shared=shared)
            new = np.array([[apply(old[0, 0].item(), values[i].item())]]).astype(dtype)
            memory.store(one, where, new, shared=shared)
            if target is not None:
                target[thread] = old[0, 0]

    return run


def _to_generic(frame: Frame, instruction: Instruction) -> Run:
    """cvta: generic addresses of global memory and parameters are their own; those of shared memory have a window."""
    words = instruction.modifiers
    shift = 0 if "shared" not in words else -SHARED_WINDOW if "to" in words else SHARED_WINDOW
    address, target = frame.addresses(instruction.operands[1]), frame.target(instruction.operands[0], words[-1])

    def run(active: object) -> None:
        target[active] = address(active) + shift

    return run


# --- asynchronous copies ---------------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Copies of 16 bytes or less that threads have begun together. groups: of each, the group that it belongs to."""

    threads: Array
    addresses: Array
    values: Array
    groups: Array


class Copies:
    """cp.async: what is copied is there after a wait for its group; until then its place holds NaN."""

    def __init__(self, memory: Memory, num_threads: int) -> None:
        self._memory, self._batches = memory, list[_Batch]()
        self._committed = np.zeros(num_threads, np.int64)

    def begin(self, threads: Array, addresses: Array, values: Array) -> None:
        """Copy rows of bytes to shared memory."""
        self._memory.store(threads, addresses, np.full_like(values, 0xFFFFFFFF), shared=True)
        self._batches.append(_Batch(threads, addresses, values, self._committed[threads].copy()))

    def commit(self, threads: Array) -> None:
        """What these threads have begun since is a group."""
        self._committed[threads] += 1

    def wait(self, threads: Array, most: int) -> None:
        """Until at most `most` groups of each thread are not done."""
        waits = np.zeros(len(self._committed), bool)
        waits[threads] = True
        left = []
        for batch in self._batches:
            done = waits[batch.threads] & (batch.groups < self._committed[batch.threads] - most)
            if done.any():
                self._memory.store(batch.threads[done], batch.addresses[done], batch.values[done], shared=True)
            if not done.all():
                rest = ~done
                left.append(_Batch(*(part[rest] for part in vars(batch).values())))
        self._batches = left


def _copy(frame: Frame, instruction: Instruction) -> Run:
    """cp.async: bytes beyond the last operand's number are 0, and are not read."""
    rest = set(instruction.modifiers) - _HARMLESS - {"async", "shared", "shared::cta"}
    if rest:
        raise Fault(f"modifiers {sorted(rest)}")
    to, source, size_text, *given = instruction.operands
    size, words = frame.constant(size_text), np.dtype(np.uint32)
    sizes = frame.source(given[0], "u32") if given else np.array(size)
    target, address, grid = frame.addresses(to), frame.addresses(source), frame.grid

    def run(active: object) -> None:
        threads, values = grid.threads[active], np.zeros((len(grid.threads[active]), size // 4), np.uint32)
        wanted = np.broadcast_to(at(sizes, active), threads.shape)
        if not np.isin(wanted, (0, size)).all():
            raise Fault("a part of a copy")
        reads = wanted > 0
        if reads.any():
            values[reads] = grid.memory.load(threads[reads], address(active)[reads], words, size // 4)
        grid.copies.begin(threads, target(active), values)

    return run


def _commit(frame: Frame, instruction: Instruction) -> Run:
    """cp.async.commit_group"""
    del instruction
    return lambda active: frame.grid.copies.commit(frame.grid.threads[active])


def _wait(frame: Frame, instruction: Instruction) -> Run:
    """cp.async.wait_group, cp.async.wait_all: what no commit made a group of is waited for, too"""
    most = frame.constant(instruction.operands[0]) if instruction.operands else -1
    return lambda active: frame.grid.copies.wait(frame.grid.threads[active], most)


def _nothing(frame: Frame, instruction: Instruction) -> Run:
    """Fences, as threads see each other's writes at once; prefetches; waits for a launch before, as there is none."""
    del frame, instruction
    return lambda active: None


RULES: dict[str, Rule] = {
    "ld": _load, "st": _store, "atom": _atomic, "red": _atomic, "cvta": _to_generic,
    "cp.async": _copy, "cp.async.commit_group": _commit, "cp.async.wait_group": _wait, "cp.async.wait_all": _wait,
    "membar": _nothing, "fence": _nothing, "prefetch": _nothing, "griddepcontrol": _nothing, "nanosleep": _nothing,
}  # fmt: skip
