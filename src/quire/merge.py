"""Merging attention states: results (v, s) over disjoint sets of keys become the result over all of them.

v [num_tokens, num_heads, head_dim] is the normalised output and s [num_tokens, num_heads] its log-sum-exp, base 2.
"""

from __future__ import annotations

import ctypes

import torch

from quire.checks import check_same_device, check_shape, check_tensor
from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.operation import PARALLEL_THREADS, OperationKey
from quire.kernels.params import MergeParams
from quire.launch import launch, parallel_grid
from quire.target import target_of
from quire.types import dtype_of

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged (v, s) of two states. A state whose s is -inf had no keys and does not count."""
    tokens, num_heads, head_dim = _state(v_a, s_a, "v_a", "s_a")
    _same(v_b, s_b, v_a, "v_b", "s_b")
    v, s = torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device), torch.empty(s_a.shape, device=s_a.device)
    _launch(v_a.contiguous(), _scores(s_a, "s_a"), v, s, tokens, 2, num_heads, head_dim, (v_b, s_b), None)
    return v, s


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None
) -> None:
    """Merge (v_other, s_other) into (v, s). `mask` [num_tokens] bool or uint8: tokens with 0 stay as they are."""
    tokens, num_heads, head_dim = _state(v, s, "v", "s")
    _same(v_other, s_other, v, "v_other", "s_other")
    for tensor, name in ((v, "v"), (s, "s")):
        if not tensor.is_contiguous():
            raise ValidationError(
                f"{name}: expected a contiguous tensor, as it is written in place; got {tensor.stride()}."
            )
    if mask is not None:
        check_tensor(mask, "mask")
        check_shape(mask, "mask", {"num_tokens": tokens})
        check_same_device(mask, "mask", v.device)
        if mask.dtype not in (torch.bool, torch.uint8):
            raise ValidationError(f"mask: expected dtype torch.bool or torch.uint8, got {mask.dtype}.")
        mask = mask.contiguous()
    merged = s.clone()  # the kernel reads s for every part of a row, so it must not write it
    _launch(v, _scores(s, "s"), v, merged, tokens, 2, num_heads, head_dim, (v_other, s_other), mask)
    s.copy_(merged)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged (v, s) of v [num_tokens, num_states, num_heads, head_dim], s [num_tokens, num_states, num_heads]."""
    check_tensor(v, "v")
    if v.dim() != 4:
        raise ValidationError(f"v: expected [num_tokens, num_states, num_heads, head_dim], got {list(v.shape)}.")
    tokens, states, num_heads, head_dim = v.shape
    check_tensor(s, "s")
    check_shape(s, "s", {"num_tokens": tokens, "num_states": states, "num_heads": num_heads})
    check_same_device(s, "s", v.device)
    out = torch.empty((tokens, num_heads, head_dim), dtype=v.dtype, device=v.device)
    lse = torch.empty((tokens, num_heads), dtype=torch.float32, device=v.device)
    _launch(v.contiguous(), _scores(s, "s"), out, lse, tokens, states, num_heads, head_dim, None, None)
    return out, lse


def _state(v: torch.Tensor, s: torch.Tensor, v_name: str, s_name: str) -> tuple[int, int, int]:
    check_tensor(v, v_name)
    if v.dim() != 3:
        raise ValidationError(f"{v_name}: expected [num_tokens, num_heads, head_dim], got {list(v.shape)}.")
    tokens, num_heads, head_dim = v.shape
    check_tensor(s, s_name)
    check_shape(s, s_name, {"num_tokens": tokens, "num_heads": num_heads})
    check_same_device(s, s_name, v.device)
    _scores(s, s_name)
    return tokens, num_heads, head_dim


def _same(v: torch.Tensor, s: torch.Tensor, like: torch.Tensor, v_name: str, s_name: str) -> None:
    _state(v, s, v_name, s_name)
    if v.shape != like.shape or v.dtype is not like.dtype:
        raise ValidationError(f"{v_name}: expected {like.dtype} {list(like.shape)}, got {v.dtype} {list(v.shape)}.")
    check_same_device(v, v_name, like.device)


def _scores(s: torch.Tensor, name: str) -> torch.Tensor:
    if s.dtype is not torch.float32:
        raise ValidationError(f"{name}: expected dtype torch.float32, got {s.dtype}.")
    return s.contiguous()


def _launch(
    v: torch.Tensor, s: torch.Tensor, v_out: torch.Tensor, s_out: torch.Tensor, tokens: int, states: int,
    num_heads: int, head_dim: int, other: tuple[torch.Tensor, torch.Tensor] | None, mask: torch.Tensor | None,
) -> None:  # fmt: skip
    dtype = dtype_of(v.dtype, "v")
    if v_out.numel() == 0:
        return
    pair = None if other is None else (other[0].contiguous(), other[1].contiguous())
    tensors = [v, v_out] + ([pair[0]] if pair else [])
    vector = 8 if head_dim % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors) else 1
    params = MergeParams(
        v=v.data_ptr(), s=s.data_ptr(), v_other=pair[0].data_ptr() if pair else None,
        s_other=pair[1].data_ptr() if pair else None, v_out=v_out.data_ptr(), s_out=s_out.data_ptr(),
        mask=None if mask is None else mask.data_ptr(), num_tokens=tokens, num_states=states, num_heads=num_heads,
        head_dim=head_dim,
    )  # fmt: skip
    module = get_module(OperationKey("merge", target_of(v.device), dtype.slug, vector).spec())
    grid = parallel_grid(v_out.numel() // vector, v.device)
    launch(module, ctypes.addressof(params), v.device, grid=grid, block=PARALLEL_THREADS)
