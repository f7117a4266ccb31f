"""The parts of a mask that every kernel has built in: causal, and a window of keys to the left.

A mask is taken apart at its `&`. Comparisons of q_idx and kv_idx become options of the plan, which compile nothing and
run without mask bits; what is left stays an expression.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.kernels.expression import BOOL, INT, Node, Tree

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
