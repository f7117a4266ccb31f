"""The C++ of an expression: members of Variant that core/logits.h calls with a backend's functions of logits."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

from quire.kernels.expressions.tree import FLOAT, INT, Expression, Node, Operand, indices_in

_CXX = {
    "float32": "float", "float16": "fp16_t", "bfloat16": "bf16_t", "int32": "int32_t", "int64": "int64_t",
    "uint8": "uint8_t", "bool": "bool",
}  # fmt: skip
_NUMBERS = {"float32": ctypes.c_float, "int32": ctypes.c_int32}
_NUMBER_OPS = ("const", "scalar")  #: what is the same for all logits of a call
_FEW = 6  #: operations that a key may take beside tiles of 128 x 128 without spills
#: Operations that C++ calls otherwise.
_NAMES = {"and": "bit_and", "or": "bit_or", "xor": "bit_xor", "not": "bit_not", "div": "divide", "exp2": "exp2_of"}


@lru_cache(maxsize=1024)
def render(expression: Expression) -> str:
    """The members: `Operands`, `mask` and of a score `row` and `score`, with what kernels ask about them."""
    lines = ["struct Operands {", *(f"  {field}" for field in _fields(expression)), "};"]
    if expression.score is not None:
        lines += _score(expression.score, expression)
    if expression.mask is not None:
        lines += _function("class M, class At", "mask", ", const At& at", _Body(expression).returns(expression.mask))
        lines.append(f"static constexpr int kMaskHeads = {mask_heads(expression)};")
    return "\n".join(lines)


def _score(score: Node, expression: Expression) -> list[str]:
    """`row`: the values of a score that are the same for all keys of a row; `score`: the others."""
    reads = _linear_reads(score)
    row, of_row = _Body(expression, reads), _row_values(score, reads)
    values = [row.value(node) for node in of_row] + [row.row_of(read) for read in reads]
    fields = "".join(f" decltype({name}) r{i};" for i, name in enumerate(values))
    body = _Body(expression, reads, {id(node): f"row.r{i}" for i, node in enumerate([*of_row, *reads])})
    whole = ["return score<M>(o, score_, at, row<M>(o, at));"]
    linear = [f"static constexpr int kLinearReads = {len(reads)};"]
    if reads:
        linear += _function("class M, class At", "keys_inside", ", const At& at", _keys_inside(reads, expression))
    return [
        *_function("class M, class At", "row", ", const At& at", [
            *row.lines, f"struct Row {{{fields} }};", f"return Row{{{', '.join(values)}}};"]),
        *_function("class M, class X, class At, class Row", "score", ", X score_, const At& at, const Row& row",
                   body.returns(score)),
        *_function("class M, class X, class At", "score", ", X score_, const At& at", whole),
        *linear, *_pattern(score, expression),
    ]  # fmt: skip


def _function(parameters: str, name: str, more: str, body: list[str]) -> list[str]:
    head = f"QUIRE_HD static auto {name}(const Operands& o{more}) {{"
    return [f"template <{parameters}>", head, *(f"  {line}" for line in body), "}"]


def _pattern(score: Node, expression: Expression) -> list[str]:
    """Patterns of scores, which kernels compute more cheaply than operation by operation: `cap()` gives a and b of
    a * tanh(b * score), `bias()` what is added to the score, `row_scale()` what it is multiplied by.
    """
    if (cap := _soft_cap(score)) is not None:
        outer, inner, is_divided = cap
        values = [_spell(node, [], _places(expression)) for node in (outer, inner)]
        inner_value = f"M::divide(1.f, {values[1]})" if is_divided else values[1]
        body = [f"return SoftCap{{{values[0]}, {inner_value}}};"]
        return ["static constexpr int kPattern = kPatternSoftCap;", *_function("class M", "cap", "", body)]
    if (bias := _bias(score)) is not None:
        body = _Body(expression).returns(bias)
        return [
            "static constexpr int kPattern = kPatternBias;",
            f"static constexpr int kIsOfDistance = {int(_is_of_distance(bias))};",
            *_function("class M, class At", "bias", ", const At& at", body),
        ]
    if (found := _row_scale(score)) is not None:
        scale, divides = found
        row = _Body(expression)
        value = row.value(scale)
        body = [*row.lines, f"return {f'M::divide(1.f, {value})' if divides else value};"]
        return [
            "static constexpr int kPattern = kPatternRowScale;",
            *_function("class M, class At", "row_scale", ", const At& at", body),
        ]
    return ["static constexpr int kPattern = 0;"]


def _soft_cap(score: Node) -> tuple[Node, Node, bool] | None:
    """a, b and whether b divides, of a * tanh(score * b) with numbers a and b that are the same for all logits."""
    for outer, tanh in _pairs(score, "mul"):
        if outer.op in _NUMBER_OPS and tanh.op == "tanh":
            argument = tanh.args[0]
            for inner, logit in _pairs(argument, "mul", "div"):
                if (
                    inner.op in _NUMBER_OPS
                    and logit.op == "score"
                    and (argument.op == "mul" or logit is argument.args[0])
                ):
                    return outer, inner, argument.op == "div"
    return None


def _bias(score: Node) -> Node | None:
    """b of score + b, which does not depend on the score."""
    for bias, logit in _pairs(score, "add"):
        if logit.op == "score" and all(node.op != "score" for node in bias.walk()):
            return bias
    return None


def _row_scale(score: Node) -> tuple[Node, bool] | None:
    """b of score * b or score / b, the same for all keys of a row, and whether it divides."""
    for logit, scale in _pairs(score, "mul", "div"):
        if logit.op == "score" and _degrees(score)[id(scale)] == 0 and (score.op == "mul" or logit is score.args[0]):
            return scale, score.op == "div"
    return None


def has_row_scale(expression: Expression) -> bool:
    """Whether a score multiplies by what is the same for all keys of a row."""
    return expression.score is not None and _row_scale(expression.score) is not None


def has_pattern(expression: Expression) -> bool:
    """Whether a score, if there is one, costs a few instructions a key: a soft cap, or a bias that grows evenly."""
    score = expression.score
    if score is None or _soft_cap(score) is not None:
        return True
    bias = _bias(score)
    return bias is not None and _is_ramp(bias, _degrees(bias))


def has_distance_bias(expression: Expression) -> bool:
    """Whether a score adds what follows from the head and the distance from query to key, and is no other pattern."""
    bias = None if expression.score is None else _bias(expression.score)
    return bias is not None and _is_of_distance(bias) and not has_pattern(expression)


def _is_of_distance(bias: Node) -> bool:
    """Whether it changes with the key, but not where the query and the key move on together."""
    return "kv_idx" in indices_in(bias) and _shifts(bias)[id(bias)] == 0


def _shifts(root: Node) -> dict[int, int | None]:
    """What each node grows by where the query and the key move on by one; None: this is not known."""
    found: dict[int, int | None] = {}
    for node in root.walk():
        found[id(node)] = _shift(node, [found[id(arg)] for arg in node.args])
    return found


def _shift(node: Node, args: list[int | None]) -> int | None:
    if node.op == "index":
        return int(node.value in ("q_idx", "kv_idx"))
    known = [arg for arg in args if arg is not None]
    if len(known) == len(args) and (node.op in ("add", "sub", "neg") and node.type == INT):
        return sum(known) if node.op == "add" else known[0] - sum(known[1:]) if node.op == "sub" else -known[0]
    return None if any(arg != 0 for arg in args) else 0


def _is_ramp(node: Node, degrees: dict[int, int]) -> bool:
    """Whether C++ has a `Ramp` of it (tile/shared/expression.cuh)."""
    if not node.args:
        return node.op == "index" and node.value == "kv_idx"
    varying = [arg for arg in node.args if degrees[id(arg)] > 0]
    return node.op in ("add", "sub", "neg", "mul", "to_float") and len(varying) == 1 and _is_ramp(varying[0], degrees)


def takes_registers(expression: Expression) -> bool:
    """Whether a score reads a tensor for each key, or does more to each than a few operations."""
    if expression.score is None:
        return False
    degrees = _degrees(expression.score)
    of_keys = [node.op for node in expression.score.walk() if node.args and degrees[id(node)] > 0]
    return "read" in of_keys or len(of_keys) > _FEW


def _pairs(node: Node, *ops: str) -> list[tuple[Node, Node]]:
    """The arguments of one of these operations, in both orders."""
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])] if node.op in ops else []


def _linear_reads(root: Node) -> list[Node]:
    """Reads whose last index grows evenly with the key, and whose others do not depend on it: those of a row are
    neighbours in memory, and inside the tensor if those of both ends of a KV tile are.
    """
    degrees = _degrees(root)
    reads = (node for node in root.walk() if node.op == "read")
    return [node for node in reads if [degrees[id(arg)] for arg in node.args] == [0] * (len(node.args) - 1) + [1]]


def _row_values(root: Node, linear: list[Node]) -> list[Node]:
    """What differs between rows, is the same for all keys of a row, and is needed by what is not the same."""
    degrees, before_last = _degrees(root), {id(read) for read in linear}
    differs: set[int] = set()
    for node in root.walk():
        if node.op == "index" or any(id(arg) in differs for arg in node.args):
            differs.add(id(node))
    needed = {id(root)}
    for node in root.walk():
        if degrees[id(node)] > 0:
            needed |= {id(arg) for arg in (node.args[-1:] if id(node) in before_last else node.args)}
    return [n for n in root.walk() if id(n) in needed & differs and degrees[id(n)] == 0]


def _degrees(root: Node) -> dict[int, int]:
    found: dict[int, int] = {}
    for node in root.walk():
        found[id(node)] = _degree(node, [found[id(arg)] for arg in node.args])
    return found


def _degree(node: Node, args: list[int]) -> int:
    """0: the same for all keys of a row; 1: the number of the key, or its reverse, and what is the same; 2: else."""
    if not args:
        return {"score": 2, "index": int(node.value == "kv_idx")}.get(node.op, 0)
    if max(args) == 0:
        return 0
    return 1 if max(args) == 1 and sum(args) == 1 and node.op in ("add", "sub", "neg") else 2


def _keys_inside(linear: list[Node], expression: Expression) -> list[str]:
    """The keys for which each of these reads is of an element that there is, and that lies beside the next."""
    body, places = _Body(expression), _places(expression)
    found = [f"M::keys_inside({places[str(read.value)]}, {body.value(read.args[-1])})" for read in linear]
    return [*body.lines, f"return {found[0]}{''.join(f'.within({keys})' for keys in found[1:])};"]


class _Body:
    """Statements, one a node, in the order of evaluation. names: of nodes that have a value already; of linear reads,
    where their row begins.
    """

    def __init__(
        self, expression: Expression, linear: list[Node] | None = None, names: dict[int, str] | None = None
    ) -> None:
        self.places, self.lines = _places(expression), list[str]()
        self._linear, self._names, self._given = {id(read) for read in linear or ()}, dict[int, str](), names or {}

    def value(self, root: Node) -> str:
        """The name of a node's value, once its statements are written."""
        for node in self._missing(root):
            self._name(node, self._spell(node))
        return self._known(root)

    def row_of(self, read: Node) -> str:
        """The name of where the row of a linear read begins."""
        args = [self.value(arg) for arg in read.args[:-1]]
        return self._name(read, f"M::row_of({', '.join((self.places[str(read.value)], *args))})")

    def returns(self, root: Node) -> list[str]:
        """All statements, and one that returns the value of `root`."""
        value = self.value(root)
        return [*self.lines, f"return {value};"]

    def _missing(self, root: Node) -> list[Node]:
        """The nodes below `root`, and itself, that have no value yet, arguments first; nothing below a given value."""
        found, stack = list[Node](), [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                found.append(node)
            elif id(node) not in self._names and (id(node) not in self._given or id(node) in self._linear):
                args = node.args[-1:] if id(node) in self._linear else node.args
                stack += [(node, True), *((arg, False) for arg in reversed(args))]
        return list(dict.fromkeys(found))

    def _name(self, node: Node, value: str) -> str:
        name = f"n{len(self._names)}"
        self.lines.append(f"auto {name} = {value};")
        self._names[id(node)] = name
        return name

    def _spell(self, node: Node) -> str:
        args = [self._known(arg) for arg in (node.args[-1:] if id(node) in self._linear else node.args)]
        if id(node) in self._linear:
            return f"M::template read_row<At>({self.places[str(node.value)]}, {self._given[id(node)]}, {args[0]})"
        return _spell(node, args, self.places)

    def _known(self, node: Node) -> str:
        return self._names.get(id(node)) or self._given[id(node)]


def _first(expression: Expression) -> list[tuple[str, type]]:
    """Of a mask: the block mask and, if it differs between heads, the bytes from one KV head's to the next."""
    if expression.mask is None:
        return [("unused", ctypes.c_int64)]
    stride = [("block_mask_stride", ctypes.c_int64)] if mask_heads(expression) else []
    return [("block_mask", ctypes.c_void_p), *stride]


@lru_cache(maxsize=1024)
def mask_heads(expression: Expression) -> int:
    """For how many neighbouring query heads a mask is the same; 0: for all."""
    found = 0
    for node in () if expression.mask is None else expression.mask.walk():
        of_heads = [arg.op == "index" and arg.value == "head" for arg in node.args]
        if any(of_heads):
            divides = node.op == "floordiv" and of_heads == [True, False] and node.args[1].op == "const"
            found = math.gcd(found, int(node.args[1].value) if divides and int(node.args[1].value) > 0 else 1)
    return found


@lru_cache(maxsize=1024)
def mask_blocks(expression: Expression) -> tuple[int, int]:
    """Queries and keys of the blocks that a mask is made of, if it is: 0 and 0 if not."""
    queries, keys = (_block(expression.mask, name) for name in ("q_idx", "kv_idx"))
    return (queries, keys) if queries and keys else (0, 0)


def _block(mask: Node | None, name: str) -> int:
    """The number by which a mask divides an index: wherever it reads it, or where it finds its place in a tensor."""
    sizes, is_whole, is_place = 0, True, False
    for node in () if mask is None else mask.walk():
        if any(arg.op == "index" and arg.value == name for arg in node.args):
            divides = node.op == "floordiv" and node.args[1].op == "const" and node.args[0].value == name
            sizes, is_whole = math.gcd(sizes, int(node.args[1].value or 0)) if divides else sizes, is_whole and divides
        is_place = is_place or (node.op == "read" and any(_divides(arg, name) for arg in node.args))
    return sizes if is_whole or is_place else 0


def _divides(node: Node, name: str) -> bool:
    return node.op == "floordiv" and node.args[0].op == "index" and node.args[0].value == name


def _places(expression: Expression) -> dict[str, str]:
    return {operand.name: f"o.p{i}" for i, operand in enumerate(expression.operands)}


def _fields(expression: Expression) -> list[str]:
    types: dict[type, str] = {ctypes.c_void_p: "const uint8_t*", ctypes.c_int64: "int64_t"}
    return [f"{types[kind]} {name};" for name, kind in _first(expression)] + [
        f"TensorRef<{_CXX[operand.type]}, {operand.rank}> p{i};" if operand.rank else f"{_CXX[operand.type]} p{i};"
        for i, operand in enumerate(expression.operands)
    ]


def _spell(node: Node, args: list[str], places: dict[str, str]) -> str:
    if node.op == "score":
        return "score_"
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
    """The mirror of `Operands`: the block mask, if there is a mask, and p0, p1, ... It is never empty."""
    fields = [*_first(expression), *((f"p{i}", field_of(operand)) for i, operand in enumerate(expression.operands))]
    return type("Operands", (ctypes.Structure,), {"_fields_": fields})
