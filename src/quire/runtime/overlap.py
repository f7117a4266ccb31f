"""Whether tensors lie on each other: what a kernel writes must not be what it still reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.errors import ValidationError

#: (bytes from one to the next, how many), the largest steps first
Steps = tuple[tuple[int, int], ...]


def check_apart(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """No output lies on another, nor on an input that is not the very same tensor."""
    names = list(outputs)
    for i, name in enumerate(names):
        others = {**{other: outputs[other] for other in names[i + 1 :]}, **inputs}
        for other, tensor in others.items():
            if may_overlap(outputs[name], tensor) and (other in outputs or not is_same(outputs[name], tensor)):
                raise ValidationError(
                    f"{name}: expected memory of its own, as results are written there; got a tensor that lies on "
                    f"{other}; pass a copy."
                )


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements of both have a byte in common. Views of one tensor with other strides than each other's are told
    apart only by where they begin and end.
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
    (step, num_a), (step_b, num_b) = a[0], b[0]
    if step != step_b or step < max(_length(a[1:]), _length(b[1:])):
        return True
    if not a[1:] or not b[1:]:
        return True
    rows, rest = divmod(distance, step)  # row i of b begins `rest` behind row i + rows of a
    return any(
        -num_b < ahead < num_a and _meet(shift, a[1:], b[1:])
        for ahead, shift in ((rows, rest), (rows + 1, rest - step))
    )
