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
#: Operations that C++ calls otherwise.
_NAMES = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor", "not": "bit_not", "div": "divide", "exp2": "exp2_of"}


@lru_cache(maxsize=1024)
def render(expression: Expression) -> str:
    """The members: `Operands`, `score` and `mask`."""
    lines = ["struct Operands {", *(f"  {field}" for field in _fields(expression)), "};"]
    for name, root, more in (("score", expression.score, "X score, "), ("mask", expression.mask, "")):
        if root is not None:
            parameter = "class M, class X, class At" if more else "class M, class At"
            lines += _function(parameter, name, more, _statements(root, expression))
    if expression.score is not None:
        linear = _linear_reads(expression.score)
        lines += [f"static constexpr int kLinearReads = {len(linear)};"]
        lines += _function("class M, class At", "reads_inside", "", _inside(linear, expression)) if linear else []
    return "\n".join(lines)


def _function(parameters: str, name: str, more: str, body: list[str]) -> list[str]:
    head = f"QUIRE_HD static auto {name}(const Operands& o, {more}const At& at) {{"
    return [f"template <{parameters}>", head, *(f"  {line}" for line in body), "}"]


def _linear_reads(root: Node) -> list[Node]:
    """Reads whose last index grows evenly with the key, and whose others do not depend on it: those of a row are
    neighbours in memory, and inside the tensor if those of both ends of a KV tile are.
    """
    degrees: dict[int, int] = {}
    for node in root.walk():
        degrees[id(node)] = _degree(node, [degrees[id(arg)] for arg in node.args])
    reads = (node for node in root.walk() if node.op == "read")
    return [node for node in reads if [degrees[id(arg)] for arg in node.args] == [0] * (len(node.args) - 1) + [1]]


def _degree(node: Node, args: list[int]) -> int:
    """0: the same for all keys of a row; 1: the number of the key, or its reverse, and what is the same; 2: else."""
    if not args:
        return {"score": 2, "index": int(node.value == "kv_idx")}.get(node.op, 0)
    if max(args) == 0:
        return 0
    return 1 if max(args) == 1 and sum(args) == 1 and node.op in ("add", "sub", "neg") else 2


def _inside(linear: list[Node], expression: Expression) -> list[str]:
    """Whether each of these reads is of an element that there is, and that lies beside the next."""
    lines, names, places = [], dict[int, str](), _places(expression)
    for read in linear:
        for node in (node for arg in read.args for node in arg.walk() if id(node) not in names):
            value = _spell(node, [names[id(arg)] for arg in node.args], places)
            names[id(node)] = f"n{len(names)}"
            lines.append(f"const auto {names[id(node)]} = {value};")
    checks = [f"{places[str(read.value)]}.has_neighbours({names[id(read.args[-1])]})" for read in linear]
    return [*lines, f"return {' && '.join(checks)};"]


def _places(expression: Expression) -> dict[str, str]:
    return {operand.name: f"o.p{i}" for i, operand in enumerate(expression.operands)}


def _fields(expression: Expression) -> list[str]:
    first = ["const uint8_t* block_mask;"] if expression.mask is not None else ["int64_t unused;"]
    return first + [
        f"TensorRef<{_CXX[operand.type]}, {operand.rank}> p{i};" if operand.rank else f"{_CXX[operand.type]} p{i};"
        for i, operand in enumerate(expression.operands)
    ]


def _statements(root: Node, expression: Expression) -> list[str]:
    """One a node, in the order of evaluation."""
    places, names, lines = _places(expression), dict[int, str](), list[str]()
    linear = {id(node) for node in _linear_reads(root)} if root.type == FLOAT else set()
    for node in root.walk():
        value = _spell(node, [names[id(arg)] for arg in node.args], places)
        if id(node) in linear:
            value = value.replace("M::read(", "M::template read_linear<At>(", 1)
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
