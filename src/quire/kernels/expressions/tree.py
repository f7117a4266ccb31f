"""The expression of a variant: a tree of typed operations on a score, indices and operands; its text and its values.

The text is Python with one assignment per line, readable for people and for `read_text`. Equal trees have equal texts:
a subexpression that occurs twice is assigned once.
"""

from __future__ import annotations

import math
import operator
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

#: Integers that describe a query, its key and their request. q_idx and kv_idx are counted within the request.
INDICES = ("q_idx", "kv_idx", "head", "request", "qo_len", "kv_len")
#: Types of values. Numbers are float32; integers are int32 and wrap.
FLOAT, INT, BOOL = "float", "int", "bool"
#: Number types of operands, and the types of values read from them.
OPERAND_TYPES = {
    "float32": FLOAT, "float16": FLOAT, "bfloat16": FLOAT, "int32": INT, "int64": INT, "uint8": INT, "bool": BOOL,
}  # fmt: skip
SCALAR_TYPES = ("float32", "int32")
#: Python's operators, by the name of the operation in the tree.
BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
    "shl": "<<", "shr": ">>", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = {"neg": "-", "not": "~"}
#: Functions from float to float.
FLOAT_FUNCTIONS = ("tanh", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "floor", "sin", "cos", "erf")
#: All functions in texts, and their numbers of arguments.
FUNCTIONS = {
    **dict.fromkeys(FLOAT_FUNCTIONS, 1), "abs": 1, "to_float": 1, "to_int": 1, "minimum": 2, "maximum": 2, "where": 3,
}  # fmt: skip


_DEEPEST = 8  #: levels of nested parentheses in a line of text


@dataclass(frozen=True, eq=False)
class Node:
    """One operation, created by a `Tree`, which creates equal nodes only once."""

    op: str  #: of BINARY, UNARY or FUNCTIONS, or "score", "index", "const", "scalar", "read", "size"
    type: str  #: FLOAT, INT or BOOL
    args: tuple[Node, ...] = ()
    value: float | int | str | bool = 0  #: a constant, or the name of an index or operand
    dim: int = 0  #: of "size"

    def walk(self) -> Iterator[Node]:
        """All operations of the tree below this one, and this one: arguments first, each once. Does not recurse."""
        seen, stack = set(), [(self, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                yield node
            elif id(node) not in seen:
                seen.add(id(node))
                stack += [(node, True), *((arg, False) for arg in reversed(node.args))]


class Operand(NamedTuple):
    """A tensor or a number that a call passes to the kernel."""

    name: str
    type: str  #: of OPERAND_TYPES
    rank: int  #: dimensions; 0: a number

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + (f"[{self.rank}]" if self.rank else "")


class Tree:
    """Creates nodes, equal ones only once."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, ...], Node] = {}

    def node(self, op: str, type_: str, *args: Node, value: float | int | str | bool = 0, dim: int = 0) -> Node:
        """The node of this operation."""
        bits = struct.pack("<f", value) if isinstance(value, float) else value  # -0.0 and 0.0 differ; NaN equals NaN
        key = (op, type_, tuple(map(id, args)), type(value), bits, dim)
        if key not in self._nodes:
            self._nodes[key] = Node(op, type_, args, value, dim)
        return self._nodes[key]


@dataclass(frozen=True)
class Expression:
    """The score and the mask of a variant; compared by its text."""

    text: str
    score: Node | None  #: FLOAT
    mask: Node | None  #: BOOL
    operands: tuple[Operand, ...]  #: tensors first, in the order of their declaration

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text

    @cached_property
    def mask_operands(self) -> frozenset[str]:
        """The operands that the mask reads, which plan() needs."""
        return frozenset(names_in(self.mask))


def names_in(root: Node | None) -> set[str]:
    """The operands that a tree reads."""
    nodes = () if root is None else root.walk()
    return {str(node.value) for node in nodes if node.op in ("scalar", "read", "size")}


def indices_in(root: Node | None) -> set[str]:
    """The indices that a tree reads."""
    nodes = () if root is None else root.walk()
    return {str(node.value) for node in nodes if node.op == "index"}


INT32 = -(2**31), 2**31 - 1


def bounds_of(root: Node, limits: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """The least and the greatest value of a tree of integers. limits: those of indices, which are else from 0 on."""
    found: dict[int, tuple[int, int]] = {}
    for node in root.walk():
        low, high = _bounds(node, [found[id(arg)] for arg in node.args], limits)
        found[id(node)] = (low, high) if INT32[0] <= low and high <= INT32[1] else INT32
    return found[id(root)]


def _bounds(node: Node, args: list[tuple[int, int]], limits: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    if node.type == BOOL:
        return 0, 1
    if node.type != INT:
        return INT32
    if node.op == "const":
        return int(node.value), int(node.value)
    if node.op in ("index", "size"):
        return limits.get(str(node.value), (0, INT32[1]))
    if node.op == "to_int" and node.args[0].type == BOOL:
        return 0, 1
    if node.op == "where":
        return min(args[1][0], args[2][0]), max(args[1][1], args[2][1])
    if node.op == "neg":
        return -args[0][1], -args[0][0]
    if len(args) == 2:
        return _bounds_of_two(node.op, *args)
    return INT32


def _bounds_of_two(op: str, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    if op in ("minimum", "maximum"):
        choose = min if op == "minimum" else max
        return choose(a[0], b[0]), choose(a[1], b[1])
    if op in ("add", "sub"):
        return (a[0] + b[0], a[1] + b[1]) if op == "add" else (a[0] - b[1], a[1] - b[0])
    if op == "mul":
        products = [x * y for x in a for y in b]
        return min(products), max(products)
    if op == "floordiv" and b[0] > 0:
        quotients = [x // y for x in a for y in b]
        return min(quotients), max(quotients)
    if op == "mod" and b[0] > 0:
        return a if a[0] >= 0 and a[1] < b[0] else (0, b[1] - 1)
    if op == "shr" and a[0] >= 0:
        return 0, a[1]
    if op == "and" and max(a[0], b[0]) >= 0:
        return 0, min(x[1] for x in (a, b) if x[0] >= 0)
    return INT32


def to_text(score: Node | None, mask: Node | None, operands: tuple[Operand, ...]) -> str:
    """The canonical text."""
    roots = [(name, root) for name, root in (("mask", mask), ("score", score)) if root is not None]
    printer = _Printer([root for _, root in roots])
    lines = [str(operand) for operand in operands]
    for name, root in roots:
        lines += [*printer.assignments(root), f"_{name}_ = {printer.spell(root)}"]
    return "\n".join(lines) + "\n"


class _Printer:
    """Writes trees as Python. A node that is used more than once gets a name, and so does a deeply nested one, because
    Python limits the nesting of parentheses.
    """

    def __init__(self, roots: list[Node]) -> None:
        uses = Counter(id(arg) for node in _walk_all(roots) for arg in node.args)
        self._shared = {id(node) for node in _walk_all(roots) if uses[id(node)] > 1 and node.args}
        self._texts: dict[int, str] = {}  # the name or text of each node
        self._depths: dict[int, int] = {}  # the levels of parentheses in that text
        self._named: set[int] = set()

    def assignments(self, root: Node) -> Iterator[str]:
        """A line for each node below `root` that gets a name."""
        for node in root.walk():
            if id(node) in self._named:
                continue
            text, depth = self._spell(node), 1 + max((self._depths[id(arg)] for arg in node.args), default=-1)
            if node is not root and (id(node) in self._shared or depth > _DEEPEST):
                name = f"_{len(self._named)}"
                self._named.add(id(node))
                yield f"{name} = {text}"
                text, depth = name, 0
            self._texts[id(node)], self._depths[id(node)] = text, depth

    def spell(self, root: Node) -> str:
        """The text of `root`, after its assignments."""
        return self._texts[id(root)]

    def _spell(self, node: Node) -> str:
        args = [self._texts[id(arg)] for arg in node.args]
        if node.op in BINARY:
            return f"({args[0]} {BINARY[node.op]} {args[1]})"
        if node.op in UNARY:
            return f"({UNARY[node.op]}{args[0]})"
        if node.op in FUNCTIONS:
            return f"{node.op}({', '.join(args)})"
        if node.op == "read":
            return f"{node.value}[{', '.join(args)}]"
        if node.op == "size":
            return f"size({node.value}, {node.dim})"
        return _number(node.value) if node.op == "const" else "score" if node.op == "score" else str(node.value)


def _walk_all(roots: list[Node]) -> list[Node]:
    return list({id(node): node for root in roots for node in root.walk()}.values())


def _number(value: float | int | str | bool) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "(-inf)"
    return f"({value!r})" if not isinstance(value, bool) and str(value).startswith("-") else repr(value)


def as_float32(value: float) -> float:
    """The nearest float32, infinite beyond float32's range."""
    try:
        found: float = struct.unpack("<f", struct.pack("<f", value))[0]
        return found
    except OverflowError:
        return math.copysign(math.inf, value)


# --- its values, in plain torch and float64, for comparisons ---------------------------------------------------------

#: Python's functions of the module operator, by the name of the operation.
_IN_PYTHON = {
    **{op: op for op in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "neg", "xor")},
    "div": "truediv", "and": "and_", "or": "or_", "not": "invert",
}  # fmt: skip


def attention(
    expression: Expression, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    qo_indptr: Sequence[int] | torch.Tensor | None = None, kv_indptr: Sequence[int] | torch.Tensor | None = None,
    causal: bool = False, window_left: int = -1, sm_scale: float | None = None, sinks: torch.Tensor | None = None,
    return_lse: bool = False, **operands: Any,
) -> Any:  # fmt: skip
    """Attention of q [nnz_qo, num_qo_heads, head_dim_qk] over k and v [nnz_kv, num_kv_heads, ...], on the CPU.

    qo_indptr, kv_indptr: offsets of requests, [batch_size + 1]; None: one request. Other options are those of plan()
    and run(). Returns o [nnz_qo, num_qo_heads, head_dim_vo], or (o, lse) with lse in base 2.
    """
    import torch  # loaded by whoever asks

    qo = [0, q.shape[0]] if qo_indptr is None else [int(i) for i in qo_indptr]
    kv = [0, k.shape[0]] if kv_indptr is None else [int(i) for i in kv_indptr]
    values = {
        name: x.cpu() if isinstance(x, torch.Tensor) else torch.tensor(x, device="cpu") for name, x in operands.items()
    }
    scale = 1.0 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    parts = [
        _attend(
            expression, q[a:b].cpu().double(), k[c:d].cpu().double(), v[c:d].cpu().double(), request, values, scale,
            causal, window_left, sinks,
        )
        for request, ((a, b), (c, d)) in enumerate(zip(pairwise(qo), pairwise(kv), strict=True))
    ]  # fmt: skip
    o, lse = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    return (o, lse) if return_lse else o


def _attend(
    expression: Expression, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: int,
    values: Mapping[str, torch.Tensor], scale: float, causal: bool, window_left: int, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One request."""
    import torch  # loaded by whoever asks

    (qo_len, heads, _), kv_len, group = q.shape, k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits, seen = evaluate(expression, torch.einsum("qhd,khd->hqk", q, k) * scale, request, values)
    distance = torch.arange(kv_len, device="cpu") - (torch.arange(qo_len, device="cpu")[:, None] + kv_len - qo_len)
    if causal:
        seen = seen & (distance <= 0)
    if window_left >= 0:
        seen = seen & (distance >= -window_left)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.cpu().double()[:, None, None].expand(-1, qo_len, 1)], 2)
        v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
    if not logits.shape[2]:
        return v.new_zeros(qo_len, heads, v.shape[2]), v.new_full((qo_len, heads), -math.inf)
    p = torch.softmax(logits, 2).masked_fill((logits == -math.inf).all(2, keepdim=True), 0.0)
    return torch.einsum("hqk,khd->qhd", p, v), torch.logsumexp(logits, 2).t() / math.log(2.0)


def evaluate(
    expression: Expression, scores: torch.Tensor, request: int, values: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [num_qo_heads, qo_len, kv_len] of one request under the expression, and which of them are visible."""
    import torch  # loaded by whoever asks

    heads, qo_len, kv_len = scores.shape
    q_idx, kv_idx = torch.arange(qo_len, device="cpu"), torch.arange(kv_len, device="cpu")
    numbers = {"request": request, "qo_len": qo_len, "kv_len": kv_len}
    leaves = {
        "score": scores, "head": torch.arange(heads, device="cpu")[:, None, None], "q_idx": q_idx[None, :, None],
        "kv_idx": kv_idx[None, None, :], **{name: torch.tensor(n, device="cpu") for name, n in numbers.items()},
    }  # fmt: skip
    score = scores if expression.score is None else _value(expression.score, leaves, values).expand(scores.shape)
    everything = torch.ones(scores.shape, dtype=torch.bool, device="cpu")
    mask = everything if expression.mask is None else _value(expression.mask, leaves, values) & everything
    return score, mask


def _value(root: Node, leaves: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found: dict[int, torch.Tensor] = {}
    for node in root.walk():
        found[id(node)] = _wrapped(_operate(node, [found[id(arg)] for arg in node.args], leaves, values), node)
    return found[id(root)]


def _wrapped(value: torch.Tensor, node: Node) -> torch.Tensor:
    """Wrap integers to 32 bits."""
    return value.double() if node.type == FLOAT else _int32(value) if node.type == INT else value


def _int32(value: torch.Tensor) -> torch.Tensor:
    return ((value.long() + 2**31) & (2**32 - 1)) - 2**31


def _operate(
    node: Node, args: list[torch.Tensor], leaves: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    import torch  # loaded by whoever asks

    found: torch.Tensor
    if node.op in _IN_PYTHON:
        found = getattr(operator, _IN_PYTHON[node.op])(*args)
        return found
    if node.op in FLOAT_FUNCTIONS or node.op in ("abs", "minimum", "maximum", "where"):
        found = getattr(torch, node.op)(*args)
        return found
    if node.op in ("score", "index"):
        return leaves[node.op if node.op == "score" else str(node.value)]
    if node.op in ("floordiv", "mod"):
        return _divide(node.op, *args)
    if node.op in ("shl", "shr"):
        shifted: torch.Tensor = (operator.lshift if node.op == "shl" else operator.rshift)(args[0], args[1] & 31)
        return shifted
    if node.op == "const":
        return torch.tensor(node.value, device="cpu")
    if node.op == "to_float":
        return args[0].double()
    if node.op == "to_int":
        return args[0].double().nan_to_num(0.0).clamp(-(2.0**31), 2.0**31 - 1).trunc().long()
    tensor = values[str(node.value)]
    if node.op == "size":
        return torch.tensor(tensor.shape[node.dim], device="cpu")
    return _scalar(tensor) if node.op == "scalar" else _read(tensor, args)


def _scalar(number: torch.Tensor) -> torch.Tensor:
    return number.float() if number.is_floating_point() else number


def _read(tensor: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
    """Read with indices clamped to the tensor."""
    element: torch.Tensor = tensor[tuple(i.clamp(0, size - 1) for i, size in zip(indices, tensor.shape, strict=True))]
    return (
        element.clamp(-(2**31), 2**31 - 1)
        if element.dtype.itemsize == 8 and not element.is_floating_point()
        else element
    )


def _divide(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer division rounds towards minus infinity. Division by 0 gives 0, and the remainder is then the dividend."""
    by = b.masked_fill(b == 0, 1)
    quotient = a.div(by, rounding_mode="floor").masked_fill(b == 0, 0)
    return quotient if op == "floordiv" else a - quotient * b
