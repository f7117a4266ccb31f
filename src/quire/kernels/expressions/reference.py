"""Attention with a custom variant in plain torch and float64, for comparisons."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from quire.kernels.expressions.tree import FLOAT, INT, Expression, Node

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne, "neg": operator.neg,
    "not": operator.invert, "tanh": torch.tanh, "exp": torch.exp, "exp2": torch.exp2, "log": torch.log,
    "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "floor": torch.floor,
    "sin": torch.sin, "cos": torch.cos, "erf": torch.erf,
    "abs": torch.abs, "minimum": torch.minimum, "maximum": torch.maximum, "where": torch.where,
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
    if node.op in _OPERATORS:
        found: torch.Tensor = _OPERATORS[node.op](*args)
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
    if element.dtype is torch.int64:
        element = torch.clamp(element, -(2**31), 2**31 - 1)
    return element


def _divide(op: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Integer division rounds towards minus infinity. Division by 0 gives 0, and the remainder is then the dividend."""
    by = torch.where(b == 0, 1, b)
    quotient = torch.where(b == 0, 0, torch.div(a, by, rounding_mode="floor"))
    return quotient if op == "floordiv" else a - quotient * b
