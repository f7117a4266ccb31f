"""The C++ of an expression: members of Variant that core/logits.h calls with a backend's functions of logits."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

from quire.kernels.expression import FLOAT, INT, Expression, Node, Operand

_CXX = {
    "float32": "float", "float16": "fp16_t", "bfloat16": "bf16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip
_NUMBERS = {"float32": ctypes.c_float, "int32": ctypes.c_int32}
#: Operations whose name is a word of C++.
_NAMES = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor", "not": "bit_not", "div": "divide"}


@lru_cache(maxsize=1024)
def render(expression: Expression) -> str:
    """The members: `Operands`, `score` and `mask`."""
    lines = ["struct Operands {", *(f"  {field}" for field in _fields(expression)), "};"]
    for name, root, more in (("score", expression.score, "X score, "), ("mask", expression.mask, "")):
        if root is not None:
            parameter = "class M, class X, class At" if more else "class M, class At"
            lines += [
                f"template <{parameter}>",
                f"QUIRE_HD static auto {name}(const Operands& o, {more}const At& at) {{",
            ]
            lines += [*(f"  {line}" for line in _statements(root, expression)), "}"]
    return "\n".join(lines)


def _fields(expression: Expression) -> list[str]:
    first = ["const uint8_t* block_mask;"] if expression.mask is not None else ["int64_t unused;"]
    return first + [
        f"TensorRef<{_CXX[operand.type]}, {operand.rank}> p{i};" if operand.rank else f"{_CXX[operand.type]} p{i};"
        for i, operand in enumerate(expression.operands)
    ]


def _statements(root: Node, expression: Expression) -> list[str]:
    """One a node, in the order of evaluation."""
    places = {operand.name: f"o.p{i}" for i, operand in enumerate(expression.operands)}
    names: dict[int, str] = {}
    lines = []
    for node in root.walk():
        value = _spell(node, [names[id(arg)] for arg in node.args], places)
        names[id(node)] = f"n{len(names)}"
        lines.append(f"const auto {names[id(node)]} = {value};")
    return [*lines, f"return {names[id(root)]};"]


def _spell(node: Node, args: list[str], places: dict[str, str]) -> str:
    if node.op == "score":
        return "score"
    if node.op == "index":
        return f"M::{node.value}(at)"
    if node.op == "const":
        return _literal(node)
    if node.op == "scalar":
        return places[str(node.value)]
    if node.op == "size":
        return f"{places[str(node.value)]}.sizes[{node.dim}]"
    if node.op == "read":
        return f"M::read({', '.join((places[str(node.value)], *args))})"
    return f"M::{_NAMES.get(node.op, node.op)}({', '.join(args)})"


def _literal(node: Node) -> str:
    value = node.value
    if node.type == INT:
        return f"int32_t{{{value}}}" if value != -(2**31) else "int32_t{-2147483647 - 1}"
    if node.type == FLOAT:
        assert isinstance(value, float)
        if math.isfinite(value):
            return f"{value.hex()}f"
        bits = "0x7fc00000u" if math.isnan(value) else "0x7f800000u" if value > 0 else "0xff800000u"
        return f"__builtin_bit_cast(float, {bits})"
    return "true" if value else "false"


def field_of(operand: Operand) -> type:
    """The mirror of an operand in ctypes: a number, or a TensorRef (core/expression.h)."""
    return _tensor_ref(operand.rank) if operand.rank else _NUMBERS[operand.type]


@lru_cache(maxsize=8)
def _tensor_ref(rank: int) -> type[ctypes.Structure]:
    fields = (("data", ctypes.c_void_p), ("sizes", ctypes.c_int32 * rank), ("strides", ctypes.c_int32 * rank))
    return type(f"TensorRef{rank}", (ctypes.Structure,), {"_fields_": fields})


@lru_cache(maxsize=1024)
def operands_struct(expression: Expression) -> type[ctypes.Structure]:
    """The mirror of `Operands`: block_mask, if there is a mask, and p0, p1, ... It is never empty."""
    first = ("block_mask", ctypes.c_void_p) if expression.mask is not None else ("unused", ctypes.c_int64)
    fields = [first, *((f"p{i}", field_of(operand)) for i, operand in enumerate(expression.operands))]
    return type("Operands", (ctypes.Structure,), {"_fields_": fields})
