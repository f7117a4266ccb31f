"""A custom variant for a part of the keys of its requests, such as a level of a cascade. Kernels number queries, keys
and requests within that part, but the variant refers to whole requests. It is rewritten to read their indices from two
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from math import inf

from quire.errors import ValidationError
from quire.kernels.expression import FLOAT, Node, indices_in
from quire.kernels.trace import Tracer, Value, call
from quire.kernels.variant import Variant, variant_of_trees

#: The two tables, int32: the first row of q of each entry of the level, and the columns COLUMNS for each row of q.
FIRST_ROWS, ROWS = "first_rows_of_level", "rows_of_level"
#: first_key: how many keys of the row's request come before those of the level.
COLUMNS = ("q_idx", "request", "qo_len", "kv_len", "first_key")


def has_places(variant: Variant) -> bool:
    """Whether the variant reads any index but the head."""
    expression = variant.expression
    return bool((indices_in(expression.score) | indices_in(expression.mask)) - {"head"})


@lru_cache(maxsize=256)
def variant_of_level(variant: Variant) -> Variant:
    """The variant for the keys of a level. If it reads indices, it also has the operands FIRST_ROWS and ROWS."""
    return with_places(variant, (FIRST_ROWS, ROWS), _places) if has_places(variant) else variant


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


def _tracer_of(variant: Variant, tables: Collection[str]) -> Tracer:
    """A tracer with the operands of the variant and the int32 tensors `tables`."""
    operands = variant.expression.operands
    tensors = {operand.name: operand.type for operand in operands if operand.rank}
    scalars = {operand.name: operand.type for operand in operands if not operand.rank}
    tracer = Tracer({**tensors, **dict.fromkeys(tables, "int32")}, scalars)
    tracer.ranks.update({operand.name: operand.rank for operand in operands if operand.rank})
    return tracer


def with_places(
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
