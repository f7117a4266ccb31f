"""Custom variants rewritten: for a level of a cascade, for lists of blocks, without the masks that kernels have.

A mask is taken apart at its `&`. Comparisons of q_idx and kv_idx become options of the plan, which compile nothing
and run without mask bits; what is left stays an expression.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, reduce
from math import inf
from typing import NamedTuple

from quire.errors import ValidationError
from quire.kernels.expressions.trace import Tracer, Value, call
from quire.kernels.expressions.tree import BOOL, FLOAT, INT, Node, Tree, indices_in
from quire.kernels.expressions.variant import Variant, variant_of_trees

#: The two tables, int32: the first row of q of each entry of the level, and the columns COLUMNS for each row of q.
FIRST_ROWS, ROWS = "first_rows_of_level", "rows_of_level"
#: first_key: how many keys of the row's request come before those of the level.
COLUMNS = ("q_idx", "request", "qo_len", "kv_len", "first_key")


def reads_indices(variant: Variant) -> bool:
    """Whether the variant reads any index but the head."""
    expression = variant.expression
    return bool((indices_in(expression.score) | indices_in(expression.mask)) - {"head"})


@lru_cache(maxsize=256)
def variant_of_level(variant: Variant) -> Variant:
    """The variant for the keys of a level. If it reads indices, it also has the operands FIRST_ROWS and ROWS."""
    return remap_indices(variant, (FIRST_ROWS, ROWS), _places) if reads_indices(variant) else variant


@lru_cache(maxsize=256)
def variant_without_mask(variant: Variant) -> Variant:
    """The variant with its mask in the score, -inf for hidden keys: for calls that plan no mask."""
    if not variant.has_mask:
        return variant
    tracer = _tracer_of(variant, ())
    score = _rewritten(variant.expression.score, tracer, {}) or tracer.value("score", FLOAT).node
    mask = _rewritten(variant.expression.mask, tracer, {})
    assert mask is not None
    return variant_of_trees(call("where", Value(tracer, mask), Value(tracer, score), -inf).node, None, tracer)


@lru_cache(maxsize=256)
def variant_under(variant: Variant | None, causal: bool, window_left: int, first_head: int = 0) -> Variant | None:
    """The variant with a causal mask and a window (-1: none) in its own mask, and heads counted from first_head on."""
    if not causal and window_left < 0 and (variant is None or not first_head):
        return variant
    tracer = Tracer({}, {}) if variant is None else _tracer_of(variant, ())
    q_idx, kv_idx, qo_len, kv_len, head = (
        tracer.value("index", "int", value=name) for name in ("q_idx", "kv_idx", "qo_len", "kv_len", "head")
    )
    past, places = q_idx + kv_len - qo_len - kv_idx, {"head": head + first_head}
    score, mask = (None, None) if variant is None else (variant.expression.score, variant.expression.mask)
    conditions = [past >= 0] if causal else []
    conditions += [past <= window_left] if window_left >= 0 else []
    own = _rewritten(mask, tracer, places)
    conditions += [] if own is None else [Value(tracer, own)]
    seen = reduce(lambda a, b: a & b, conditions).node if conditions else None
    return variant_of_trees(_rewritten(score, tracer, places), seen, tracer)


def _tracer_of(variant: Variant, tables: Collection[str]) -> Tracer:
    """A tracer with the operands of the variant and the int32 tensors `tables`."""
    operands = variant.expression.operands
    tensors = {operand.name: operand.type for operand in operands if operand.rank}
    scalars = {operand.name: operand.type for operand in operands if not operand.rank}
    tracer = Tracer({**tensors, **dict.fromkeys(tables, "int32")}, scalars)
    tracer.ranks.update({operand.name: operand.rank for operand in operands if operand.rank})
    return tracer


def remap_indices(
    variant: Variant, tables: Collection[str], places_of: Callable[[Tracer], Mapping[str, Value]]
) -> Variant:
    """The same variant with its indices replaced by `places_of`, which may read the int32 operands `tables`."""
    if taken := {operand.name for operand in variant.expression.operands} & {*tables}:
        raise ValidationError(f"variant: an operand cannot be named {min(taken)!r} here; rename it.")
    tracer = _tracer_of(variant, tables)
    places = places_of(tracer)
    score, mask = variant.expression.score, variant.expression.mask
    return variant_of_trees(_rewritten(score, tracer, places), _rewritten(mask, tracer, places), tracer)


def _places(tracer: Tracer) -> dict[str, Value]:
    """The expression that replaces each index."""
    q_idx, kv_idx, request = (tracer.value("index", "int", value=name) for name in ("q_idx", "kv_idx", "request"))
    row = tracer.read(FIRST_ROWS, request) + q_idx
    found = {name: tracer.read(ROWS, (row, number)) for number, name in enumerate(COLUMNS)}
    return {**found, "kv_idx": found.pop("first_key") + kv_idx}


def _rewritten(root: Node | None, tracer: Tracer, places: Mapping[str, Value]) -> Node | None:
    if root is None:
        return None
    made: dict[int, Node] = {}
    for node in root.walk():
        if node.op == "index" and node.value in places:
            made[id(node)] = places[str(node.value)].node
        else:
            args = (made[id(arg)] for arg in node.args)
            made[id(node)] = tracer.tree.node(node.op, node.type, *args, value=node.value, dim=node.dim)
    return made[id(root)]


@lru_cache(maxsize=256)
def variant_of_heads(variant: Variant, num_qo_heads: int) -> Variant:
    """The variant for one request with the heads of all: request r's head h is head r * num_qo_heads + h."""
    if not (indices_in(variant.expression.score) | indices_in(variant.expression.mask)) & {"head", "request"}:
        return variant

    def places(tracer: Tracer) -> Mapping[str, Value]:
        head = tracer.value("index", "int", value="head")
        return {"head": head % num_qo_heads, "request": head // num_qo_heads}

    return remap_indices(variant, (), places)


#: The two tables, int32: the columns LIST_COLUMNS for each row of blocks, and the page numbers of all lists.
LISTS, PAGES = "rows_of_blocks", "pages_of_blocks"
#: q_idx, head: those of the row's first query in the matrix. first_page: where its list begins in PAGES. first_key: the
#: first key of the row's head among all keys. qo_len, kv_len: those of the matrix.
LIST_COLUMNS = ("q_idx", "head", "first_page", "first_key", "qo_len", "kv_len")


@lru_cache(maxsize=256)
def variant_of_blocks(variant: Variant, page_size: int, of_heads: bool) -> Variant:
    """The same variant over lists of pages. of_heads: each row of blocks belongs to one KV head."""
    expression = variant.expression
    reads = indices_in(expression.score) | indices_in(expression.mask)
    if not of_heads:
        reads -= {"head"}
    tables = [LISTS] if reads - {"request"} else []
    tables += [PAGES] if "kv_idx" in reads else []
    return remap_indices(variant, tables, lambda tracer: _list_places(tracer, reads, page_size)) if reads else variant


def _list_places(tracer: Tracer, reads: Collection[str], page_size: int) -> Mapping[str, Value]:
    """The expression that replaces each index of `reads`."""
    q_idx, head, kv_idx, row = (
        tracer.value("index", "int", value=name) for name in ("q_idx", "head", "kv_idx", "request")
    )

    def of_row(name: str) -> Value:
        return tracer.read(LISTS, (row, LIST_COLUMNS.index(name)))

    def key() -> Value:
        page = tracer.read(PAGES, of_row("first_page") + kv_idx // page_size)
        found: Value = page * page_size + kv_idx % page_size - of_row("first_key")
        return found

    places: dict[str, Callable[[], Value]] = {
        "q_idx": lambda: of_row("q_idx") + q_idx, "head": lambda: of_row("head") + head, "kv_idx": key,
        "request": lambda: tracer.constant(0), "qo_len": lambda: of_row("qo_len"), "kv_len": lambda: of_row("kv_len"),
    }  # fmt: skip
    return {name: places[name]() for name in reads}


_MOST = 1 << 29  #: of lengths and constants; sums of four do not wrap in 32 bits


class MaskParts(NamedTuple):
    """A mask in parts, all of which a key must pass."""

    causal: bool = False
    window_left: int = -1  #: -1: none
    rest: Node | None = None  #: the expression that is left


class _Linear(NamedTuple):
    """of_query * q_idx + of_key * kv_idx + constant."""

    of_query: int
    of_key: int
    constant: int

    def plus(self, other: _Linear, sign: int) -> _Linear:
        return _Linear(*(a + sign * b for a, b in zip(self, other, strict=True)))

    @property
    def is_exact(self) -> bool:
        """Whether 32 bits hold all its values."""
        return max(abs(self.of_query), abs(self.of_key)) <= 1 and abs(self.constant) < _MOST


def split_mask(mask: Node | None, tree: Tree, q_len: int, kv_len: int) -> MaskParts:
    """The parts of a mask for requests of q_len queries and kv_len keys, of which the last ones stand side by side."""
    causal, window_left, rest = False, -1, None
    for condition in _conditions(mask):
        found = _built_in(condition, kv_len - q_len) if max(q_len, kv_len) < _MOST else None
        if found is None:
            rest = condition if rest is None else tree.node("and", BOOL, rest, condition)
        elif found.causal:
            causal = True
        else:
            window_left = found.window_left if window_left < 0 else min(window_left, found.window_left)
    return MaskParts(causal, window_left, rest)


def _conditions(mask: Node | None) -> list[Node]:
    """The conditions of the outermost `&`, without those that are always true."""
    found: list[Node] = []
    left = [] if mask is None else [mask]
    while left:
        node = left.pop()
        if node.op == "and" and node.type == BOOL:
            left += reversed(node.args)
        elif node.op != "const" or not node.value:
            found.append(node)
    return found


def _built_in(condition: Node, offset: int) -> MaskParts | None:
    """A comparison of q_idx and kv_idx as an option of the plan, or None. offset: the position of the first query."""
    if condition.op not in ("lt", "le", "gt", "ge"):
        return None
    left, right = (_linear(arg) for arg in condition.args)
    if left is None or right is None or not (left.is_exact and right.is_exact):
        return None
    greater, less = (left, right) if condition.op in ("gt", "ge") else (right, left)
    slack = greater.plus(less, -1)  # not negative where the condition holds, or positive
    slack = slack._replace(constant=slack.constant - (condition.op in ("lt", "gt")))
    if slack == (1, -1, offset):
        return MaskParts(causal=True)
    width = slack.constant + offset
    is_window = slack[:2] == (-1, 1) and width >= 0
    return MaskParts(window_left=width) if is_window else None


def _linear(node: Node) -> _Linear | None:
    if node.type != INT:
        return None
    if node.op == "const":
        return _Linear(0, 0, int(node.value))
    if node.op == "index":
        return {"q_idx": _Linear(1, 0, 0), "kv_idx": _Linear(0, 1, 0)}.get(str(node.value))
    parts = [_linear(arg) for arg in node.args]
    if node.op == "neg" and parts[0] is not None:
        return _Linear(0, 0, 0).plus(parts[0], -1)
    if node.op in ("add", "sub") and parts[0] is not None and parts[1] is not None:
        return parts[0].plus(parts[1], 1 if node.op == "add" else -1)
    return None
