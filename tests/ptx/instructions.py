"""What a thread computes by itself. A row of RULES is an instruction; its function takes and gives numpy arrays.

float32 arithmetic is numpy's. Approximations (ex2, lg2, rcp, ...) are rounded from float64: closer than a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.decode import DTYPES, Frame, Rule, Run, at, parts
from ptx.memory import Array, Fault
from ptx.program import Instruction

#: Modifiers that change no result here, beside types: rounding to nearest, and what differs in denormal numbers.
_HARMLESS = {"rn", "ftz", "approx"}
_LEAST_NORMAL = np.float32(2.0**-126)
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def each(function: Callable[..., Array], *, types: str = "", result: str = "") -> Rule:
    """A rule: result[thread] = function(sources[thread]...).

    types: of the sources, in place of the instruction's own; "." stands for that one. result: of the result.
    """

    def rule(frame: Frame, instruction: Instruction) -> Run:
        own = instruction.type
        if unknown := set(instruction.others) - _HARMLESS:
            raise Fault(f"modifiers {sorted(unknown)}")
        names = types.split() if types else ["."] * (len(instruction.operands) - 1)
        given = zip(instruction.operands[1:], names, strict=True)
        sources = [frame.source(operand, own if name == "." else name) for operand, name in given]
        target = frame.target(instruction.operands[0], result or own)

        def run(active: object) -> None:
            target[active] = function(*(at(source, active) for source in sources))

        return run

    return rule


def _wide(frame: Frame, instruction: Instruction) -> Run:
    """mul.wide, mad.wide: a product of twice the bits."""
    narrow = instruction.type
    wide = _WIDER[narrow]
    a, b = (frame.source(operand, narrow) for operand in instruction.operands[1:3])
    more = [frame.source(operand, wide) for operand in instruction.operands[3:]]
    target, dtype = frame.target(instruction.operands[0], wide), DTYPES[wide]

    def run(active: object) -> None:
        product = at(a, active).astype(dtype) * at(b, active).astype(dtype)
        target[active] = product + at(more[0], active) if more else product

    return run


def _upper_half(a: Array, b: Array) -> Array:
    if a.dtype.itemsize != 4:
        raise Fault("a product of 128 bits")
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards 0."""
    if a.dtype.kind == "f":
        return a / b
    if not np.all(b):
        raise Fault("division by 0")
    wide = a.astype(np.int64), b.astype(np.int64)
    return (np.sign(wide[0]) * np.sign(wide[1]) * (abs(wide[0]) // abs(wide[1]))).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return a - _quotient(a, b) * b


def _shift(operator: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """By at least as many bits as there are: 0, or the sign."""

    def shift(a: Array, count: Array) -> Array:
        bits = 8 * a.dtype.itemsize
        near = np.minimum(count, np.uint32(bits - 1)).astype(a.dtype)
        shifted = operator(a, near)
        is_far = count >= bits
        if (operator is np.right_shift and a.dtype.kind == "i") or not np.any(is_far):
            return shifted
        return np.where(is_far, a.dtype.type(0), shifted)

    return shift


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once (but for double rounding of rare sums)."""
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def _flushed(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function of float32 numbers, without denormal ones."""

    def apply(x: Array) -> Array:
        y = function(np.where(abs(x) < _LEAST_NORMAL, np.copysign(0, x), x).astype(np.float64)).astype(np.float32)
        return np.where(abs(y) < _LEAST_NORMAL, np.copysign(np.float32(0), y), y)

    return apply


def _approximate(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """prmt: bytes of (a, b) by number; a number with 8 added means copies of the byte's sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for i in range(4):
        number = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((number & np.uint32(7)).astype(np.uint64) << np.uint64(3))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(number & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


def _looked_up(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: any function of three bits."""
    result = np.zeros(np.broadcast(a, b, c).shape, a.dtype)
    for i in range(8):
        if int(table) >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def _inserted(field: Array, into: Array, begin: Array, count: Array) -> Array:
    """bfi"""
    one = np.uint64(1)
    begin, count = (np.minimum(x & np.uint32(255), 64).astype(np.uint64) for x in (begin, count))
    mask = (one << count) - one << begin
    wide = into.astype(np.uint64) & ~mask | field.astype(np.uint64) << begin & mask
    return wide.astype(into.dtype)


def _extracted(a: Array, begin: Array, count: Array) -> Array:
    """bfe of unsigned numbers"""
    if a.dtype.kind == "i":
        raise Fault("the sign of a field")
    begin, count = (np.minimum(x & np.uint32(255), 63).astype(np.uint64) for x in (begin, count))
    return (a.astype(np.uint64) >> begin & (np.uint64(1) << count) - np.uint64(1)).astype(a.dtype)


def _bits_set(a: Array) -> Array:
    return np.bitwise_count(a).astype(np.uint32)


def _leading_zeros(a: Array) -> Array:
    bits, exponents = 8 * a.dtype.itemsize, np.frexp(a.astype(np.float64))[1]  # exact below 2^53
    if bits == 64:
        raise Fault("clz of 64 bits")
    return (bits - exponents).astype(np.uint32)


def _highest_bit(is_shift: bool) -> Callable[[Array], Array]:
    """bfind of unsigned numbers: the place of the highest bit, or how far it is from the top; -1 if there is none."""

    def find(a: Array) -> Array:
        if a.dtype.kind == "i":
            raise Fault("the sign of a number")
        place = 8 * a.dtype.itemsize - 1 - _leading_zeros(a).astype(np.int64)
        return np.where(a == 0, -1, 31 - place if is_shift else place).astype(np.int64).astype(np.uint32)

    return find


def _saturated(operator: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Of int32: a result beyond the type is its least or largest number."""

    def apply(a: Array, b: Array) -> Array:
        limits = np.iinfo(np.int32)
        return np.clip(operator(a.astype(np.int64), b), limits.min, limits.max).astype(np.int32)

    return apply


def _reversed(a: Array) -> Array:
    result = np.zeros_like(a)
    for i in range(32):
        result |= (a >> np.uint32(i) & np.uint32(1)) << np.uint32(31 - i)
    return result


def _funnel(to_left: bool, clamps: bool) -> Callable[[Array, Array, Array], Array]:
    """shf: 32 bits of the 64 of (high, low), shifted by up to 31 (wrap) or 32 (clamp)."""

    def shift(low: Array, high: Array, count: Array) -> Array:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        by = (np.minimum(count, np.uint32(32)) if clamps else count & np.uint32(31)).astype(np.uint64)
        return (both << by >> np.uint64(32) if to_left else both >> by).astype(np.uint32)

    return shift


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "equ": lambda a, b: (a == b) | (a != a) | (b != b), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: (a != a) | (b != b), "num": lambda a, b: (a == a) & (b == b),
}  # fmt: skip


# --- moves and conversions -------------------------------------------------------------------------------------------


def _move(frame: Frame, instruction: Instruction) -> Run:
    """mov, also between a register and the parts of it."""
    to, source = instruction.operands
    if to.startswith("{"):
        return _unpack(frame, parts(to), source, instruction.type)
    if source.startswith("{"):
        return _pack(frame, to, parts(source), instruction.type)
    value, target = frame.source(source, instruction.type), frame.target(to, instruction.type)

    def run(active: object) -> None:
        target[active] = at(value, active)

    return run


def _unpack(frame: Frame, names: list[str], source: str, type_name: str) -> Run:
    value, bits = frame.source(source, type_name), int(type_name[1:]) // len(names)
    targets = [None if name == "_" else frame.target(name, f"b{bits}") for name in names]

    def run(active: object) -> None:
        given = at(value, active)
        for i, target in enumerate(targets):
            if target is not None:
                target[active] = given >> given.dtype.type(i * bits)

    return run


def _pack(frame: Frame, to: str, names: list[str], type_name: str) -> Run:
    bits, target = int(type_name[1:]) // len(names), frame.target(to, type_name)
    sources = [frame.source(name, f"b{bits}") for name in names]

    def run(active: object) -> None:
        parts_of = (at(s, active).astype(target.dtype) << target.dtype.type(i * bits) for i, s in enumerate(sources))
        target[active] = np.bitwise_or.reduce(np.broadcast_arrays(*parts_of))

    return run


def to_bfloat16(x: Array) -> Array:
    """The bits of float32 numbers as bfloat16, rounded to nearest."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_float16(x: Array) -> Array:
    """The bits of float32 numbers as float16."""
    return x.astype(np.float16).view(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """float32 from the bits of bfloat16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float16(bits: Array) -> Array:
    """float32 from the bits of float16."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def _pair_of(narrow: Callable[[Array], Array]) -> Rule:
    """cvt of two float32 to a register of 16-bit numbers; the second one is in the lower half."""

    def pair(upper: Array, lower: Array) -> Array:
        bits = (narrow(np.atleast_1d(np.float32(x))).astype(np.uint32) for x in (upper, lower))
        return next(bits) << np.uint32(16) | next(bits)

    return each(pair, types="f32 f32", result="b32")


def _widened(fraction_bits: int) -> Rule:
    """cvt of two numbers of 8 bits to a register of float16. Exponents are float16's after a shift and a product."""
    bias = 15 - (2 ** (7 - fraction_bits - 1) - 1)  # between both exponents

    def pair(numbers: Array) -> Array:
        result = np.zeros(np.shape(numbers), np.uint32)
        for i in (0, 1):
            byte = numbers.astype(np.uint32) >> np.uint32(8 * i) & np.uint32(255)
            bits = (byte & np.uint32(127)) << np.uint32(10 - fraction_bits)
            widened = from_float16(bits) * np.float32(2.0**bias)
            if bias:  # e4m3 has no infinity, and one NaN; e5m2 is the upper half of float16
                widened = np.where(byte & np.uint32(127) == 127, np.float32(np.nan), widened)
            signed = np.where(byte & np.uint32(128), -widened, widened)
            result |= to_float16(signed.astype(np.float32)).astype(np.uint32) << np.uint32(16 * i)
        return result

    return each(pair, types="b16", result="b32")


def _halves(function: Callable[..., Array], widen: Callable, narrow: Callable) -> Rule:
    """An operation on both 16-bit numbers of registers, rounded from float32."""

    def both(*registers: Array) -> Array:
        results = []
        for i in (0, 16):
            numbers = (widen((np.atleast_1d(x) >> np.uint32(i)).astype(np.uint16)) for x in registers)
            results.append(narrow(function(*numbers)).astype(np.uint32))
        return results[0] | results[1] << np.uint32(16)

    return each(both)


def _convert(frame: Frame, instruction: Instruction) -> Run:
    """cvt of one number."""
    *how, to, source_type = instruction.modifiers
    rounding = set(how) - {"ftz", "rn"}
    value, target = frame.source(instruction.operands[1], source_type), frame.target(instruction.operands[0], to)
    is_float = to.startswith(("f", "bf")), source_type.startswith(("f", "bf"))
    if "bf16" in (to, source_type):
        convert = {("bf16", "f32"): to_bfloat16, ("f32", "bf16"): from_bfloat16}[to, source_type]
    elif is_float == (False, True):
        convert = _to_integer(DTYPES[to], rounding)
        rounding = set()
    elif is_float == (True, True) and to == source_type:
        convert = {"rpi": np.ceil, "rmi": np.floor, "rzi": np.trunc, "rni": np.rint}[rounding.pop()]
    else:
        convert = lambda x: x.astype(DTYPES[to])  # noqa: E731
    if rounding:
        raise Fault(f"modifiers {sorted(rounding)}")

    def run(active: object) -> None:
        target[active] = convert(at(value, active))

    return run


def _to_integer(dtype: np.dtype, rounding: set[str]) -> Callable[[Array], Array]:
    """Numbers beyond the type become its least or largest one, and NaN 0."""
    (mode,) = rounding
    rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[mode]
    limits = np.iinfo(dtype)

    def convert(x: Array) -> Array:
        wide = np.nan_to_num(rounded(x.astype(np.float64)), nan=0.0, posinf=2.0**70, neginf=-(2.0**70))
        inside = np.clip(wide, float(limits.min), float(limits.max) - (dtype.itemsize == 8) * 1024.0)
        return inside.astype(dtype)

    return convert


_ANY_WORD = "b32"
RULES: dict[str, Rule] = {
    "add": each(np.add), "sub": each(np.subtract), "mul": each(np.multiply), "mul.lo": each(np.multiply),
    "add.sat.s32": each(_saturated(np.add), types="s32 s32", result="s32"),
    "sub.sat.s32": each(_saturated(np.subtract), types="s32 s32", result="s32"),
    "mul.hi": each(_upper_half), "mul.wide": _wide, "mad.wide": _wide,
    "mad.lo": each(lambda a, b, c: a * b + c), "fma": each(fused),
    "div": each(_quotient), "rem": each(_remainder),
    "neg": each(np.negative), "abs": each(np.abs), "min": each(np.fmin), "max": each(np.fmax),
    "and": each(np.bitwise_and), "or": each(np.bitwise_or), "xor": each(np.bitwise_xor), "not": each(np.invert),
    "shl": each(_shift(np.left_shift), types=". u32"), "shr": each(_shift(np.right_shift), types=". u32"),
    "bfi": each(_inserted, types=". . u32 u32"),
    "bfe": each(_extracted, types=". u32 u32"), "prmt": each(_permuted), "lop3": each(_looked_up, types=". . . b32"),
    "popc": each(_bits_set, result="u32"), "clz": each(_leading_zeros, result="u32"), "brev": each(_reversed),
    "bfind": each(_highest_bit(False), result="u32"), "bfind.shiftamt": each(_highest_bit(True), result="u32"),
    "selp": each(lambda a, b, p: np.where(p, a, b), types=". . pred"),
    "ex2.approx.ftz": each(_flushed(np.exp2)), "ex2.approx": each(_approximate(np.exp2)),
    "lg2.approx.ftz": each(_flushed(np.log2)), "lg2.approx": each(_approximate(np.log2)),
    "rcp.approx.ftz": each(_flushed(np.reciprocal)), "rcp": each(_approximate(np.reciprocal)),
    "rsqrt": each(_approximate(lambda x: 1 / np.sqrt(x))), "sqrt": each(_approximate(np.sqrt)),
    "tanh": each(_approximate(np.tanh)), "sin": each(_approximate(np.sin)), "cos": each(_approximate(np.cos)),
    "mov": _move, "cvt": _convert, "cvt.rn.bf16x2.f32": _pair_of(to_bfloat16), "cvt.rn.f16x2.f32": _pair_of(to_float16),
    **{
        f"shf.{way}.{mode}": each(_funnel(way == "l", mode == "clamp"), types=". . u32")
        for way in "lr" for mode in ("wrap", "clamp")
    },
    "cvt.rn.f16x2.e4m3x2": _widened(3), "cvt.rn.f16x2.e5m2x2": _widened(2),
    **{f"setp.{name}": each(function, result="pred") for name, function in _COMPARISONS.items()},
    **{
        f"{name}.rn.{pair}": _halves(function, widen, narrow)
        for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("fma", fused))
        for pair, widen, narrow in (("f16x2", from_float16, to_float16), ("bf16x2", from_bfloat16, to_bfloat16))
    },
}  # fmt: skip
