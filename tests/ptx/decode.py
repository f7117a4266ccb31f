"""From an instruction to a function of the threads that execute it.

A rule takes a Frame and an Instruction and returns that function. The tables of rules are in instructions.py (a
thread's own arithmetic), transfers.py (memory) and warps.py (what the lanes of a warp do together). A name is looked up
with as many of its modifiers as a table has: "mul.hi" before "mul".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ptx.memory import Array, Fault
from ptx.program import Function, Instruction

if TYPE_CHECKING:
    from ptx.threads import Active, Grid

Run = Callable[["Active"], None]
Rule = Callable[["Frame", Instruction], Run]

#: numpy's type for each type of PTX. Pairs and bfloat16 are bits here, which the instructions unpack.
DTYPES = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "pred": np.dtype(bool),
}  # fmt: skip

_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?")
_ADDRESS = re.compile(r"\[?\s*([%$\w]+?)\s*(?:\+\s*(-?\d+))?\s*\]?")


@dataclass
class Step:
    """An instruction, ready to execute: `run` if the next instruction follows, `control` if it says what follows."""

    text: str
    run: Run | None = None
    control: Run | None = None
    of_warp: bool = False  #: whether all lanes of a warp execute it together


class Frame:
    """The registers of a function, for all threads, and what else its operands may name."""

    def __init__(self, grid: Grid, function: Function) -> None:
        self.grid, self.function = grid, function
        self.is_entry = function.name == grid.entry
        self._registers: dict[str, Array] = {}
        self._special = {
            "%tid.x": grid.threads % grid.block, "%ctaid.x": grid.cta, "%ntid.x": np.full(grid.size, grid.block),
            "%nctaid.x": np.full(grid.size, grid.num_ctas), "%laneid": grid.threads % 32,
        }  # fmt: skip
        zeros = np.zeros(grid.size, np.int64)
        self._special |= {f"%{name}.{dim}": zeros for name in ("tid", "ctaid") for dim in "yz"}
        self._special |= {f"%{name}.{dim}": zeros + 1 for name in ("ntid", "nctaid") for dim in "yz"}

    def register(self, name: str) -> Array:
        """A register of all threads, as its declared type; it holds no useful number before it is written."""
        if name not in self._registers:
            if name not in self.function.registers:
                raise Fault(f"{name} is no register of {self.function.name}")
            dtype = DTYPES[self.function.registers[name]]
            array = np.zeros(self.grid.size, dtype)
            if dtype.kind != "b":
                array.view(np.uint8)[:] = 0xFF
            self._registers[name] = array
        return self._registers[name]

    def target(self, name: str, type_name: str) -> Array:
        """A register to write numbers of a type to, which a wider register extends."""
        array, dtype = self.register(name), DTYPES[type_name]
        if array.dtype.kind == "b" or array.dtype.itemsize == dtype.itemsize:
            return array.view(dtype)
        if array.dtype.itemsize < dtype.itemsize:
            raise Fault(f"{name} is too narrow for {type_name}")
        return array.view(f"{'i' if dtype.kind == 'i' else 'u'}{array.dtype.itemsize}")

    def source(self, operand: str, type_name: str) -> Array:
        """The values of an operand: an array over all threads, or one number for all of them."""
        dtype = DTYPES[type_name]
        if operand == "%clock64":
            return self.grid.clock.view(dtype)  # which goes on
        if operand in self._special:
            return self._special[operand].astype(dtype)
        if operand in self.function.registers:
            array = self.register(operand)
            if array.dtype.itemsize > dtype.itemsize:
                raise Fault(f"{operand} is wider than {type_name}")
            if array.dtype.itemsize < dtype.itemsize:
                raise Fault(f"{operand} is narrower than {type_name}")
            return array.view(dtype)
        return np.array(self._number(operand, dtype))

    def _number(self, operand: str, dtype: np.dtype) -> np.generic:
        if operand[:2] in ("0f", "0F") and len(operand) == 10:
            return dtype.type(struct.unpack(">f", bytes.fromhex(operand[2:]))[0])
        if operand[:2] in ("0d", "0D") and len(operand) == 18:
            return dtype.type(struct.unpack(">d", bytes.fromhex(operand[2:]))[0])
        value = self.constant(operand)
        if dtype.kind in "iu":  # modulo 2^bits
            return np.array(value % 2**64, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)[()]
        return dtype.type(value)

    def constant(self, operand: str) -> int:
        """An integer that is written out, or the address of a name."""
        if _NUMBER.fullmatch(operand):
            return int(operand.rstrip("U"), 0)
        own, outer = self.grid.of_function[self.function.name], self.grid.symbols
        if operand in own or operand in outer:
            return own[operand] if operand in own else outer[operand]
        raise Fault(f"operand {operand} is not known here")

    def addresses(self, operand: str) -> Callable[[Active], Array]:
        """From threads to the address, int64, that `[name+offset]` is for each of them."""
        found = _ADDRESS.fullmatch(operand)
        if found is None:
            raise Fault(f"address {operand}")
        name, offset, threads = found[1], int(found[2] or 0), self.grid.threads
        if name in self.function.registers:
            register = self.register(name)
            return lambda active: register[active].astype(np.int64) + offset
        place = self.constant(name) + offset
        return lambda active: np.full(len(threads[active]), place, np.int64)


def parts(operand: str) -> list[str]:
    """The operands in braces, or the only one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def at(values: Array, active: Active) -> Array:
    """The values of the active threads, or the number that all have."""
    return values[active] if values.ndim else values


def find(table: Mapping[str, object], instruction: Instruction) -> str | None:
    """The longest name of the table that the instruction begins with."""
    for count in range(len(instruction.modifiers), -1, -1):
        name = ".".join((instruction.name, *instruction.modifiers[:count]))
        if name in table:
            return name
    return None


def decode(frame: Frame, instruction: Instruction) -> Step:
    """A Step; Fault for an instruction that no table has."""
    from ptx.instructions import RULES as OF_THREADS
    from ptx.transfers import RULES as OF_MEMORY
    from ptx.warps import RULES as OF_WARPS

    for table in (OF_THREADS, OF_MEMORY, OF_WARPS):
        name = find(table, instruction)
        if name is not None:
            break
    else:
        raise Fault(f"`{instruction.text}` is not known here")
    try:
        run = table[name](frame, replace(instruction, known=name.count(".")))
    except (Fault, KeyError, ValueError) as error:
        raise Fault(f"`{instruction.text}` is not known here: {error}") from error
    if instruction.predicate:
        if table is OF_WARPS:
            raise Fault(f"`{instruction.text}` is not known here: lanes may not differ")
        run = _where(frame, instruction, run)
    return Step(instruction.text, run=run, of_warp=table is OF_WARPS)


def _where(frame: Frame, instruction: Instruction, run: Run) -> Run:
    """`run` for the threads whose predicate allows it."""
    predicate, negated, threads = frame.register(instruction.predicate), instruction.negated, frame.grid.threads

    def guarded(active: Active) -> None:
        chosen = threads[active][predicate[active] ^ negated]
        if len(chosen):
            run(chosen)

    return guarded
