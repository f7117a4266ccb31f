"""The threads of a launch: which of them go on, and where.

All threads of a grid are computed at once, as arrays. Of those that can go on, the ones at the first instruction do.
Where an instruction is of a whole warp, threads wait for the rest of their warp, as a GPU's do.

So warps meet at every instruction, and a barrier that is missing is not missed. In turns it is: each warp of a CTA goes
on until it must wait for others, the first one first or the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ptx.decode import Frame, Step, at, decode
from ptx.memory import LOCAL_WINDOW, Array, Bank, Fault, GlobalMemory, Memory
from ptx.program import Function, Instruction, Program
from ptx.transfers import Copies

WARP = 32
_DONE = 1 << 40  #: the place of a thread that has ended
_CLOCKS_OF_BLOCK = 400  #: by which kernels tell that they have waited for long enough
_BARRIERS = 16  #: of a CTA
_MOST_BLOCKS = 100_000  #: of straight code, in all

ALL = slice(None)
Active = slice | Array


class Turns(Enum):
    """Which warp of a CTA goes on first."""

    NONE = 0  #: all at once
    FIRST = 1
    LAST = -1


@dataclass
class _Code:
    """The instructions of all functions, one after the other. ends: where the straight code around each ends."""

    steps: list[Step]
    ends: list[int]


class Grid:
    """A launch of `grid` CTAs of `block` threads with `smem` bytes of shared memory each."""

    def __init__(
        self, program: Program, entry: str, regions: GlobalMemory, params: bytes, grid: int, block: int, smem: int,
        turns: Turns = Turns.NONE,
    ) -> None:  # fmt: skip
        if block % WARP:
            raise Fault(f"{block} threads are no whole warps")
        self.program, self.entry = program, entry
        self.size, self.num_ctas, self.block = grid * block, grid, block
        self.threads = np.arange(self.size)
        self.cta = self.threads // block
        self._turn = self.threads % block // WARP * turns.value
        self._variables(program, entry, regions, params, smem)
        self.memory = Memory(self._shared_bytes, self._local_bytes, self.cta, regions)
        self.copies = Copies(self.memory, self.size)
        self.pc = np.zeros(self.size, np.int64)
        self.clock = np.zeros((), np.int64)
        self._waits_at = np.full(self.size, -1)  # the barrier, numbered over all CTAs; -1: none
        self._starts: dict[str, int] = {}
        self._visited: set[int] = set()
        self.returns = {name: np.zeros(self.size, np.int64) for name in program.functions}
        self._code = self._decode(program, entry)
        self.pc[:] = self._starts[entry]

    def _variables(self, program: Program, entry: str, regions: GlobalMemory, params: bytes, smem: int) -> None:
        """Addresses of all that has a name: of outer variables, and of those of each function."""
        given = np.frombuffer(params.ljust(-(-len(params) // 16) * 16, b"\0"), np.uint8).copy()
        self.symbols: dict[str, int] = {}
        self.of_function: dict[str, dict[str, int]] = {}
        shared, local = smem, 0
        for name, variable in program.variables.items():
            if variable.space == "shared":
                shared = -(-shared // variable.align) * variable.align if variable.size else shared
                self.symbols[name] = shared if variable.size else 0
                shared += variable.size
        for function in program.functions.values():
            own = self.of_function[function.name] = {}
            for variable in (*function.params, *function.returned, *function.variables.values()):
                if variable.space == "shared":
                    shared = -(-shared // variable.align) * variable.align
                    own[variable.name], shared = shared, shared + variable.size
                else:
                    local = -(-local // 16) * 16
                    own[variable.name], local = LOCAL_WINDOW + local, local + variable.size
        self.of_function[entry][program.functions[entry].params[0].name] = regions.add(Bank(given, name="parameters"))
        self._shared_bytes, self._local_bytes = shared, local

    def _decode(self, program: Program, entry: str) -> _Code:
        code, at = _Code([], []), 0
        ordered = sorted(program.functions.values(), key=lambda function: function.name != entry)
        for function in ordered:
            self._starts[function.name] = at
            at += len(function.code) + 1
        for function in ordered:
            start = self._starts[function.name]
            frame = Frame(self, function)
            leaders = set(function.labels.values())
            steps = [self._step(frame, function, start, i) for i in range(len(function.code))]
            steps.append(Step("end of " + function.name, control=self._fail_at_end(function)))
            end = 0
            ends = [0] * len(steps)
            for i in reversed(range(len(steps))):
                if steps[i].control is not None or i + 1 in leaders:
                    end = start + i
                ends[i] = end
            code.steps += steps
            code.ends += ends
        return code

    @staticmethod
    def _fail_at_end(function: Function) -> Callable[[Active], None]:
        def fail(_: Active) -> None:
            raise Fault(f"{function.name}: a thread ran beyond its end")

        return fail

    def _step(self, frame: Frame, function: Function, start: int, number: int) -> Step:
        instruction = function.code[number]
        rule = _CONTROL.get(instruction.name)
        if rule is None or instruction.modifiers[:1] == ("warp",):
            return decode(frame, instruction)
        return Step(instruction.text, control=rule(self, frame, instruction, start, start + number + 1))

    def run(self) -> None:
        """Until all threads have ended."""
        with np.errstate(all="ignore"):
            for _ in range(_MOST_BLOCKS):
                chosen = self._choose()
                if chosen is None:
                    return
                self._execute(*chosen)
        raise Fault(f"the kernel has not ended after {_MOST_BLOCKS} blocks of code")

    def _choose(self) -> tuple[int, Active] | None:
        """The threads that go on, and where they are; None: all have ended."""
        ready = (self._waits_at < 0) & (self.pc != _DONE)
        if ready.any():
            ready &= self._turn == self._turn[ready].min()
        for place in np.unique(self.pc[ready]).tolist():
            active = np.flatnonzero(ready & (self.pc == place))
            if self._code.steps[place].of_warp:
                active = self._in_whole_warps(active)
            if len(active):
                return place, ALL if len(active) == self.size else active
        if (self.pc == _DONE).all():
            return None
        stuck = int(np.flatnonzero(self.pc != _DONE)[0])
        text = self._code.steps[int(self.pc[stuck])].text
        raise Fault(f"thread {stuck % self.block} of CTA {self.cta[stuck]} waits forever at `{text}`")

    def _in_whole_warps(self, active: Array) -> Array:
        """Those of `active` whose warp is among them."""
        counts = np.bincount(active // WARP, minlength=self.size // WARP)
        return active[counts[active // WARP] == WARP]

    def _execute(self, place: int, active: Active) -> None:
        steps, end = self._code.steps, self._code.ends[place]
        self._visited.add(place)
        self.clock += _CLOCKS_OF_BLOCK
        whole = active is ALL or None
        for here in range(place, end + 1):
            step = steps[here]
            if step.of_warp:
                if whole is None:
                    whole = len(self._in_whole_warps(active)) == len(active)
                if not whole:
                    self.pc[active] = here
                    return
            try:
                if step.control is not None:
                    step.control(active)
                    return
                assert step.run is not None
                step.run(active)
            except Fault as fault:
                raise Fault(f"`{step.text}`: {fault}") from None
        self.pc[active] = end + 1

    @property
    def executed(self) -> set[str]:
        """The instructions that some thread has reached."""
        code = self._code
        return {code.steps[i].text for place in self._visited for i in range(place, code.ends[place] + 1)}

    def wait(self, active: Active, barriers: Array, counts: Array, after: int) -> None:
        """Threads arrive at barriers of their CTA, and go on at `after` once as many as a barrier counts are there."""
        self.pc[active] = after
        self._waits_at[active] = at_barrier = self.cta[active] * _BARRIERS + barriers
        for barrier, count in {*zip(np.atleast_1d(at_barrier).tolist(), counts.tolist(), strict=True)}:
            here = self._waits_at == barrier
            if (arrived := int(here.sum())) > count:
                raise Fault(f"{arrived} threads at barrier {barrier % _BARRIERS}, which waits for {count}")
            if arrived == count:
                self._waits_at[here] = -1

    def start_of(self, name: str) -> int:
        """Where a function begins."""
        return self._starts[name]


# --- control flow ----------------------------------------------------------------------------------------------------


def _branch(grid: Grid, frame: Frame, instruction: Instruction, start: int, after: int) -> Callable[[Active], None]:
    """bra"""
    (label,) = instruction.operands
    target = start + frame.function.labels[label]
    if not instruction.predicate:

        def go(active: Active) -> None:
            grid.pc[active] = target

        return go
    predicate = frame.register(instruction.predicate)

    def go_if(active: Active) -> None:
        grid.pc[active] = np.where(predicate[active] ^ instruction.negated, target, after)

    return go_if


def _return(grid: Grid, frame: Frame, instruction: Instruction, start: int, after: int) -> Callable[[Active], None]:
    """ret, exit: the end of a thread in a kernel"""
    del start
    is_kernel = instruction.name == "exit" or frame.is_entry
    places = grid.returns[frame.function.name]
    predicate = frame.register(instruction.predicate) if instruction.predicate else None

    def leave(active: Active) -> None:
        target = _DONE if is_kernel else places[active]
        if predicate is not None:
            target = np.where(predicate[active] ^ instruction.negated, target, after)
        grid.pc[active] = target

    return leave


def _call(grid: Grid, frame: Frame, instruction: Instruction, start: int, after: int) -> Callable[[Active], None]:
    """call of a function that returns nothing"""
    del start
    name, given = instruction.operands
    if instruction.predicate or name not in grid.program.functions or grid.program.functions[name].returned:
        raise Fault(f"`{instruction.text}` is not known here")
    callee = grid.program.functions[name]
    arguments = [frame.constant(part.strip()) for part in given.strip("() ").split(",")]
    targets = [(grid.of_function[name][param.name], param.size) for param in callee.params]

    def call(active: Active) -> None:
        threads = grid.threads[active]
        for source, (target, size) in zip(arguments, targets, strict=True):
            for byte in range(size):
                at = np.full(len(threads), byte, np.int64)
                value = grid.memory.load(threads, at + source, np.dtype(np.uint8), 1)
                grid.memory.store(threads, at + target, value)
        grid.returns[name][active] = after
        grid.pc[active] = grid.start_of(name)

    return call


def _barrier(grid: Grid, frame: Frame, instruction: Instruction, start: int, after: int) -> Callable[[Active], None]:
    """bar.sync"""
    del start
    if instruction.predicate or instruction.modifiers[0] != "sync":
        raise Fault(f"`{instruction.text}` is not known here")
    barrier, count = (frame.source(word, "u32") for word in (*instruction.operands, str(grid.block))[:2])

    def wait(active: Active) -> None:
        like = grid.threads[active].shape
        grid.wait(active, *(np.broadcast_to(at(of, active).astype(np.int64), like) for of in (barrier, count)), after)

    return wait


_CONTROL = {"bra": _branch, "ret": _return, "exit": _return, "call": _call, "bar": _barrier, "barrier": _barrier}
