"""The signature of tensors: everything that decides whether they are valid, except addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch

Check = Callable[..., bool]
_IS_NESTED = attrgetter("is_nested")


def pointers_of(tensors: Sequence[Any]) -> list[int]:
    """Addresses of tensors; [0] if one of them is no tensor, or has no memory."""
    try:
        if len(tensors) == 4:  # q, k, v and the result; a fifth less than the loop takes
            q, k, v, out = tensors
            return [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
        pointers = []
        for tensor in tensors:  # a list comprehension would be a call
            pointers.append(tensor.data_ptr())
    except (AttributeError, RuntimeError):
        return [0]
    return pointers


class Signature:
    """Shapes, strides, types, devices, and whether tensors are negated views or need a gradient."""

    __slots__ = ("count", "fits", "of_dense")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.count = len(tensors)
        #: whether as many other tensors, none of them nested, have this signature
        self.of_dense: Check = _guards(tensors) if _guards_work() else _comparison(tensors)
        #: whether as many other tensors have this signature; false of what is no tensor, or a nested one
        self.fits: Check = {3: _dense_3, 4: _dense_4}.get(len(tensors), _dense)(self.of_dense)


def has_nested(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of the tensors are nested."""
    return True in map(_IS_NESTED, tensors)


def _guards(tensors: Sequence[torch.Tensor]) -> Check:
    """By torch.compile's own check: one call takes a fifth of the time of reading the same attributes."""
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check: Check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


# The check asks nested tensors for their sizes, which they do not have, and no code catches that: the process ends.


def _dense_3(check: Check) -> Check:
    def fits(q: Any, kv: Any, out: Any) -> bool:
        try:
            return not (q.is_nested or kv.is_nested or out.is_nested) and check(q, kv, out)
        except AttributeError:  # no tensor
            return False

    return fits


def _dense_4(check: Check) -> Check:
    def fits(q: Any, k: Any, v: Any, out: Any) -> bool:
        try:
            return not (q.is_nested or k.is_nested or v.is_nested or out.is_nested) and check(q, k, v, out)
        except AttributeError:
            return False

    return fits


def _dense(check: Check) -> Check:
    def fits(*tensors: Any) -> bool:
        try:
            return not has_nested(tensors) and check(*tensors)
        except AttributeError:
            return False

    return fits


def _comparison(tensors: Sequence[torch.Tensor]) -> Check:
    """By comparing attributes."""

    def describe(t: torch.Tensor) -> tuple[Any, ...]:
        return type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad

    def fits(*others: Any) -> bool:
        try:
            return own == [describe(t) for t in others]
        except (AttributeError, RuntimeError):  # no tensor, or one without sizes
            return False

    own = [describe(t) for t in tensors]
    return fits


@cache
def _guards_work() -> bool:
    """Whether torch.compile's check, which is no public part of torch, is there and answers as the comparison does.

    Asked once. Whatever else it does in some version of torch, the comparison is used instead.
    """
    one, other = (torch.zeros(2, 3, 4, device="cpu", dtype=torch.float32) for _ in range(2))
    try:
        fits = _dense(_guards((one, other)))
        answers = [fits(*tensors) for tensors in _examples(one, other)]
    except Exception:
        return False
    return answers == [True, True] + [False] * (len(answers) - 2)


def _examples(one: torch.Tensor, other: torch.Tensor) -> list[tuple[Any, Any]]:
    """Two pairs of tensors with the signature of `one` and `other`, and one pair for each way not to have it."""
    different = (
        one[:, :2], one.transpose(0, 1).contiguous().transpose(0, 1), one.expand(2, 2, 3, 4), one.to(torch.float16),
        one.to("meta"), one.clone().requires_grad_(), torch._neg_view(one), torch.nn.Parameter(one, False), None,
    )  # fmt: skip
    return [(one, other), (other.clone(), one.clone()), *((wrong, other) for wrong in different), (one, different[0])]
