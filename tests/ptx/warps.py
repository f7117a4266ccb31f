"""What the 32 lanes of a warp do together: matrix products, loads of matrices, shuffles, votes.

Fragments are as the PTX manual draws them. Of an mma.m16n8k16, lane 4 g + t has in each register of A and of the sums
the rows g or g + 8 and the columns 2 t and 2 t + 1 of a quarter; of B the column g and the rows 2 t and 2 t + 1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.decode import Frame, Rule, Run, at, parts
from ptx.instructions import from_bfloat16, from_float16
from ptx.memory import Array, Fault
from ptx.program import Instruction

_WIDEN = {"bf16": from_bfloat16, "f16": from_float16}
_LANES = np.arange(32)


def _multiply(frame: Frame, instruction: Instruction) -> Run:
    """mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32: D = A B + C"""
    words = instruction.modifiers
    if words[:5] != ("sync", "aligned", "m16n8k16", "row", "col") or words[5] != "f32" or words[8] != "f32":
        raise Fault("a shape or type of mma")
    if words[6] != words[7] or words[6] not in _WIDEN:
        raise Fault("types of mma")
    widen = _WIDEN[words[6]]
    d, a, b, c = (parts(operand) for operand in instruction.operands)
    targets = [frame.target(name, "f32") for name in d]
    of_a, of_b = ([frame.source(name, "b32") for name in names] for names in (a, b))
    of_c = [frame.source(name, "f32") for name in c]

    def run(active: object) -> None:
        left = _halves(of_a, active, widen)  # [columns / 8, rows / 8, warp, g, t, half]
        left = left.reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        right = _halves(of_b, active, widen).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        number = len(left)
        sums = np.stack([np.broadcast_to(at(s, active), (number * 32,)) for s in of_c])
        sums = sums.reshape(2, 2, number, 8, 4).transpose(2, 0, 3, 4, 1).reshape(number, 16, 8)
        result = (left @ right + sums).reshape(number, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for target, row in zip(targets, result, strict=True):
            target[active] = row

    return run


def _halves(registers: list[Array], active: object, widen: Callable[[Array], Array]) -> Array:
    """float32 [register, warp, g, t, half] of registers of two numbers."""
    bits = np.stack([at(register, active) for register in registers])
    return widen(bits.view(np.uint16)).reshape(len(registers), -1, 8, 4, 2)


def _load_matrices(frame: Frame, instruction: Instruction) -> Run:
    """ldmatrix: lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i, of 8 x 8 numbers of 16 bits."""
    words = set(instruction.modifiers)
    counts = words & {"x1", "x2", "x4"}
    if words - {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"} or not counts:
        raise Fault("a shape of ldmatrix")
    count, is_transposed = int(counts.pop()[1:]), "trans" in words
    targets = [frame.target(name, "b32") for name in parts(instruction.operands[0])]
    address, grid = frame.addresses(instruction.operands[1]), frame.grid

    def run(active: object) -> None:
        of_rows = np.s_[:, : 8 * count]
        threads = grid.threads[active].reshape(-1, 32)[of_rows].reshape(-1)
        addresses = address(active).reshape(-1, 32)[of_rows].reshape(-1)
        rows = grid.memory.load(threads, addresses, np.dtype(np.uint32), 4, shared=True)
        matrices = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if is_transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        registers = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, 32)
        for i, target in enumerate(targets):
            target[active] = registers[:, i].reshape(-1)

    return run


def _check_all(mask: Array) -> None:
    if not (np.asarray(mask) == 0xFFFFFFFF).all():
        raise Fault("some lanes of a warp only")


def _shuffle(frame: Frame, instruction: Instruction) -> Run:
    """shfl.sync: a lane takes the number of another one; its own where that is outside of its segment"""
    mode = instruction.modifiers[1]
    to, is_inside = [*instruction.operands[0].split("|"), None][:2]
    target = frame.target(to, "b32")
    found = None if is_inside is None else frame.register(is_inside)
    value, which, clamp, mask = (frame.source(operand, "b32") for operand in instruction.operands[1:])
    if mode not in ("idx", "bfly", "up", "down"):
        raise Fault(f"mode {mode}")

    def run(active: object) -> None:
        _check_all(at(mask, active))
        given, *rest = (
            np.broadcast_to(at(x, active), frame.grid.threads[active].shape).reshape(-1, 32)
            for x in (value, which, clamp)
        )
        by, ends = (x.astype(np.int64) for x in rest)
        segment, bound = ends >> 8 & 31, ends & 31
        first = _LANES & segment
        last = first | (bound & ~segment)
        lane = {
            "up": lambda: _LANES - (by & 31), "down": lambda: _LANES + (by & 31), "bfly": lambda: _LANES ^ (by & 31),
            "idx": lambda: first | (by & 31 & ~segment),
        }[mode]()  # fmt: skip
        inside = lane >= last if mode == "up" else lane <= last
        lane = np.where(inside, lane, _LANES)
        target[active] = np.take_along_axis(given, lane, 1).reshape(-1)
        if found is not None:
            found[active] = inside.reshape(-1)

    return run


def _vote(frame: Frame, instruction: Instruction) -> Run:
    """vote.sync"""
    mode = instruction.modifiers[1]
    to, given, mask_operand = instruction.operands
    negated = given.startswith("!")
    predicate, mask = frame.register(given.lstrip("!")), frame.source(mask_operand, "b32")
    target = frame.target(to, instruction.type)
    answer = {
        "any": lambda p: p.any(1), "all": lambda p: p.all(1), "uni": lambda p: p.all(1) | ~p.any(1),
        "ballot": lambda p: (p.astype(np.uint64) << _LANES.astype(np.uint64)).sum(1, dtype=np.uint64),
    }[mode]  # fmt: skip

    def run(active: object) -> None:
        _check_all(at(mask, active))
        target[active] = np.repeat(answer((predicate[active] ^ negated).reshape(-1, 32)), 32)

    return run


_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


def _reduce(frame: Frame, instruction: Instruction) -> Run:
    """redux.sync"""
    operation, type_name = _REDUCTIONS[instruction.modifiers[1]], instruction.type
    to, given, mask_operand = instruction.operands
    value, mask, target = frame.source(given, type_name), frame.source(mask_operand, "b32"), frame.target(to, type_name)

    def run(active: object) -> None:
        _check_all(at(mask, active))
        target[active] = np.repeat(operation.reduce(value[active].reshape(-1, 32), axis=1), 32)

    return run


def _meet(frame: Frame, instruction: Instruction) -> Run:
    """bar.warp.sync: the lanes have met when it executes"""
    mask = frame.source(instruction.operands[0], "b32")
    return lambda active: _check_all(at(mask, active))


RULES: dict[str, Rule] = {
    "mma": _multiply, "ldmatrix": _load_matrices, "shfl": _shuffle, "vote": _vote, "redux": _reduce,
    "bar.warp.sync": _meet,
}  # fmt: skip
