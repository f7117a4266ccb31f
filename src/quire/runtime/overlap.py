"""Whether tensors overlap in memory: a kernel must not overwrite what it still reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.errors import ValidationError
from quire.runtime.layout import span_bytes

#: (bytes from one to the next, how many), the largest steps first
Steps = tuple[tuple[int, int], ...]


def check_apart(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Check that no output overlaps another output, or an input other than itself."""
    spans = [(name, tensor, *_span(tensor)) for name, tensor in (*outputs.items(), *inputs.items())]
    for i, (name, tensor, begin, end) in enumerate(spans[: len(outputs)]):
        for j, (other, theirs, their_begin, their_end) in enumerate(spans[i + 1 :], i + 1):
            if begin >= their_end or their_begin >= end or not may_overlap(tensor, theirs):
                continue
            if j < len(outputs) or not is_same(tensor, theirs):
                raise ValidationError(
                    f"{name}: expected memory of its own, as results are written there; got a tensor that lies on "
                    f"{other}; pass a copy."
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first byte and the one behind its last."""
    begin = tensor.data_ptr()
    return begin, begin + span_bytes(tensor.shape, tensor.stride(), tensor.dtype)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements of both have a byte in common; also True if rows of one tensor reach into the next row, which is
    not analysed further.
    """
    return bool(a.numel() and b.numel()) and _meet(b.data_ptr() - a.data_ptr(), _steps(a), _steps(b))


def _steps(tensor: torch.Tensor) -> Steps:
    size = tensor.element_size()
    steps = ((step * size, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return (*sorted(steps, reverse=True), (1, size))


def _length(steps: Steps) -> int:
    return sum(step * (n - 1) for step, n in steps) + 1


def _meet(distance: int, a: Steps, b: Steps) -> bool:
    """Whether bytes at `a`'s steps and, `distance` further, at `b`'s coincide."""
    if distance >= _length(a) or -distance >= _length(b):
        return False
    step = max(a[0][0], b[0][0])
    a, b = (steps if steps[0][0] == step else ((step, 1), *steps) for steps in (a, b))
    if step == 1 or step < max(_length(a[1:]), _length(b[1:])):
        return True
    rows, rest = divmod(distance, step)  # row i of b begins `rest` behind row i + rows of a
    return any(
        -b[0][1] < ahead < a[0][1] and _meet(shift, a[1:], b[1:])
        for ahead, shift in ((rows, rest), (rows + 1, rest - step))
    )
