"""What callers pass by mistake: one argument of a call becomes something else, by its type."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ANY_DTYPE = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int16, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
NO_TENSORS = (None, 1, 0.5, "tensor", [1.0], (), {}, b"bytes", object())
NO_INTEGERS = (None, 1.5, math.nan, "4", [4], True, (4, 4), b"4", torch.float32)
INTEGERS = (0, -1, 1, 2, 3, 5, 7, 72, 2**16, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**32 + 1, 2**63, -(2**31), -(2**63))
SCALES = (
    math.nan, math.inf, -math.inf, 1e39, -1e39, 1e30, 1e-30, 1e-40, 1e-60, 0.0, -0.0, -1.0, 2**2000, 3, True, "1",
    None, [1.0], b"1", 1 + 1j,
)  # fmt: skip
WORDS = (
    "", "nhd", "NONE", "HND", "big", "auto", "quire:cpu", "fa2", "decode", "ALIBI", "bogus", "\x00", None, 3, ["NHD"],
    b"NHD",
)  # fmt: skip
ENTRIES = (-1, 0, 1, 3, 5, 100, 10**6, 2**30, 2**31 - 1, -(2**31), -2_000_000)
TYPES = (
    torch.int32, torch.float64, torch.complex64, "float64", "bf16", "half", "bogus", 5, ["float32"], None,
    torch.float8_e5m2,
)  # fmt: skip

Mutation = Callable[[random.Random, Any], Any]


def _other_dtype(rng: random.Random, t: Tensor) -> Tensor:
    dtype = rng.choice(ANY_DTYPE)
    return t.to(dtype) if not (t.is_complex() and not dtype.is_complex) else t.real.to(dtype)


def _index_dtype(_: random.Random, t: Tensor) -> Tensor:
    return t.to(torch.int64 if not t.is_floating_point() else torch.float64)


def _dropped(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim()) if t.dim() else 0
    return t.narrow(dim, 0, t.shape[dim] - 1) if t.dim() and t.shape[dim] else t


def _longer(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim()) if t.dim() else 0
    return torch.cat([t, t.narrow(dim, 0, 1)], dim) if t.dim() and t.numel() else t


def _no_elements(rng: random.Random, t: Tensor) -> Tensor:
    return t.narrow(rng.randrange(t.dim()), 0, 0) if t.dim() else t


def _more_dims(rng: random.Random, t: Tensor) -> Tensor:
    return t.unsqueeze(rng.randrange(t.dim() + 1))


def _flat(_: random.Random, t: Tensor) -> Tensor:
    return t.reshape(-1)


def _permuted(rng: random.Random, t: Tensor) -> Tensor:
    return t.permute(rng.sample(range(t.dim()), t.dim()))


def _restrided(rng: random.Random, t: Tensor) -> Tensor:
    """The same numbers, with gaps after each element of one dimension."""
    if not t.dim():
        return t
    dim, factor = rng.randrange(t.dim()), rng.choice((2, 3))
    wide = torch.zeros([n * factor if i == dim else n for i, n in enumerate(t.shape)], dtype=t.dtype)
    view = wide[tuple(slice(None, None, factor) if i == dim else slice(None) for i in range(t.dim()))]
    return view.copy_(t)


def _transposed_memory(_: random.Random, t: Tensor) -> Tensor:
    """The same numbers, in memory in the opposite order of dimensions."""
    order = tuple(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def _expanded(rng: random.Random, t: Tensor) -> Tensor:
    dim = rng.randrange(t.dim()) if t.dim() else 0
    return t.narrow(dim, 0, 1).expand(t.shape) if t.dim() and t.shape[dim] else t


def _negated(_: random.Random, t: Tensor) -> Tensor:
    return torch._neg_view(-t) if t.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32) else t


def _with_gradient(_: random.Random, t: Tensor) -> Tensor:
    return t.clone().requires_grad_() if t.dtype.is_floating_point and t.element_size() > 1 else t


def _sparse(_: random.Random, t: Tensor) -> Tensor:
    return t.to_sparse()


def _without_data(_: random.Random, t: Tensor) -> Tensor:
    return t.to("meta")


def _freed(_: random.Random, t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _no_tensor(rng: random.Random, t: Tensor) -> Any:
    return rng.choice((*NO_TENSORS, t.tolist() if t.numel() < 100 else 1))


def _one_entry(rng: random.Random, t: Tensor) -> Tensor:
    t = t.clone()
    if t.numel():
        t.reshape(-1)[rng.randrange(t.numel())] = rng.choice(ENTRIES)
    return t


def _one_wide_entry(rng: random.Random, t: Tensor) -> Tensor:
    t = t.to(torch.int64, copy=True)
    if t.numel():
        t.reshape(-1)[rng.randrange(t.numel())] = rng.choice((2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**63)))
    return t


def _last_entry(rng: random.Random, t: Tensor) -> Tensor:
    t = t.clone()
    if t.numel():
        t.reshape(-1)[-1] = rng.choice(ENTRIES)
    return t


def _shuffled(rng: random.Random, t: Tensor) -> Tensor:
    return t[torch.tensor(rng.sample(range(t.shape[0]), t.shape[0]), dtype=torch.int64)] if t.dim() else t


OF_ANY_TENSOR: tuple[Mutation, ...] = (
    _other_dtype, _dropped, _longer, _no_elements, _more_dims, _flat, _permuted, _restrided, _transposed_memory,
    _expanded, _negated, _with_gradient, _sparse, _without_data, _freed, _no_tensor,
)  # fmt: skip
OF_INDICES: tuple[Mutation, ...] = (
    _index_dtype, _one_entry, _one_entry, _one_entry, _one_wide_entry, _last_entry, _shuffled, _dropped, _dropped,
)  # fmt: skip


def _of_integer(rng: random.Random, value: int) -> Any:
    same = (torch.tensor(value), torch.tensor([value]), torch.tensor([value, value]), torch.tensor(float(value)))
    return rng.choice((*INTEGERS, *INTEGERS, *NO_INTEGERS, *same, value + 1, value * 2))


def _of_scale(rng: random.Random, value: float | None) -> Any:
    number = 0.5 if value is None else value
    tensors = (torch.tensor(number), torch.tensor([number]), torch.tensor([1.0, 2.0]), torch.tensor(math.nan))
    return rng.choice((*SCALES, *tensors))


def _of_flag(rng: random.Random, value: bool) -> Any:
    return rng.choice((not value, 1, 0, "yes", None, torch.tensor(True), [True]))


def mutate(rng: random.Random, name: str, value: Any) -> tuple[str, Any]:
    """What became of it, in words, and the changed value. `name` tells scales from options that are None."""
    if isinstance(value, Tensor):
        indices = value.dtype in (torch.int32, torch.int64)
        mutation = rng.choice(OF_INDICES if indices and rng.random() < 0.6 else OF_ANY_TENSOR)
        try:
            return mutation.__name__.strip("_"), mutation(rng, value)
        except RuntimeError:  # torch has no such operation for this dtype
            return "None", None
    if isinstance(value, bool):
        changed = _of_flag(rng, value)
    elif isinstance(value, torch.dtype):
        changed = rng.choice(TYPES)
    elif isinstance(value, int):
        changed = _of_integer(rng, value)
    elif isinstance(value, str):
        changed = rng.choice(WORDS)
    elif "scale" in name or "cap" in name or isinstance(value, float):
        changed = _of_scale(rng, value)
    else:
        changed = rng.choice((*NO_INTEGERS, *INTEGERS, *WORDS, torch.zeros(3)))
    return repr(changed)[:60], changed
