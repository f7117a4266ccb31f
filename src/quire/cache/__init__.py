"""Operations beside attention: appending to a cache, rotary embeddings, packing bits, and in this file merging states,
which computes the result over all keys from results (v, s) over disjoint sets of keys.

v [num_tokens, num_heads, head_dim] (float32, float16 or bfloat16) is the normalised output and s [num_tokens,
num_heads] (float32) its log-sum-exp, base 2, as run(..., return_lse=True) returns them. The API is FlashInfer's
(https://docs.flashinfer.ai/api/cascade.html). Each function raises ValidationError naming the argument.
"""

from __future__ import annotations

import ctypes
import math

import torch

from quire.engine.checks import check_positive, check_same_device, check_shape, check_tensor, check_written, scalar
from quire.engine.device import target_of
from quire.engine.launch import launch, row_grid
from quire.engine.operators import operator
from quire.engine.schedule import check_count
from quire.engine.tensors import LN2
from quire.errors import ValidationError
from quire.jit import get_module
from quire.kernels.features import dtype_of
from quire.kernels.operation import PARALLEL_THREADS, MergeParams, OperationKey

__all__ = ["merge_state", "merge_state_in_place", "merge_state_v2", "merge_states"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@operator("merge_state", lambda v_a, s_a, *_: (v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)))
def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, v_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged (v, s) of two states. A state with s = -inf had no keys and is ignored.

    v_a, v_b: [num_tokens, num_heads, head_dim] in float32, float16 or bfloat16, normalised outputs over disjoint sets
    of keys. s_a, s_b: float32 [num_tokens, num_heads], their log-sum-exp, base 2.
    v_scale: a number that multiplies the merged v. States that were multiplied by it before may be beyond the range of
        their dtype, although the merged v is not.

    Returns v like v_a, and s like s_a. Raises ValidationError naming the argument.

    >>> q, k, v = torch.randn(3, 8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> first = quire.single_prefill_with_kv_cache(q, k[:4], v[:4], return_lse=True)
    >>> rest = quire.single_prefill_with_kv_cache(q, k[4:], v[4:], return_lse=True)
    >>> o, lse = quire.merge_state(*first, *rest)
    >>> torch.allclose(o, quire.single_prefill_with_kv_cache(q, k, v), atol=1e-5)
    True
    """
    _check_state(v_a, s_a, "v_a", "s_a")
    _check_state(v_b, s_b, "v_b", "s_b", v_a)
    v = torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device)
    s = torch.empty(s_a.shape, dtype=torch.float32, device=v_a.device)
    _merge_pair(v_a, s_a, v_b, s_b, v, s, None, scalar(v_scale, "v_scale"))
    return v, s


def merge_state_v2(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, v_merged: torch.Tensor | None = None,
    s_merged: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """merge_state() of log-sum-exps in base e, as FlashAttention returns them; SGLang's function of this name.

    v_a, v_b [num_tokens, num_heads, head_dim], s_a, s_b [num_tokens, num_heads]: as in merge_state(), but s in base e.
    v_merged, s_merged: tensors like v_a and s_a that the results are written into. Returns (v, s). Raises
    ValidationError naming the argument.

    >>> v_a, v_b, s = torch.zeros(3, 8, 64), torch.ones(3, 8, 64), torch.zeros(3, 8)  # of equal weight
    >>> v, s = quire.merge_state_v2(v_a, s, v_b, s)
    >>> v[0, 0, 0].item(), round(s[0, 0].exp().item(), 3)
    (0.5, 2.0)
    """
    for state, name in ((s_a, "s_a"), (s_b, "s_b")):
        check_tensor(state, name)
    v, s = merge_state(v_a, s_a / LN2, v_b, s_b / LN2)
    s *= LN2
    return tuple(_placed(*pair) for pair in ((v, v_merged, "v_merged"), (s, s_merged, "s_merged")))  # type: ignore[return-value]


def _placed(result: torch.Tensor, out: torch.Tensor | None, name: str) -> torch.Tensor:
    if out is None:
        return result
    check_written(out, name, result, (result.dtype,))
    return out.copy_(result)


@operator("merge_state_in_place", writes="v s")
def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None = None,
    v_scale: float = 1.0,
) -> None:  # fmt: skip
    """Merge (v_other, s_other) into (v, s), which are contiguous; both are written, or in case of an error neither.

    v, v_other, s, s_other, v_scale: as in merge_state(). mask: bool or uint8 [num_tokens]; tokens with 0 stay as they
    are. Raises ValidationError naming the argument.

    >>> v, v_other, s = torch.zeros(3, 8, 64), torch.ones(3, 8, 64), torch.zeros(3, 8)  # of equal weight
    >>> quire.merge_state_in_place(v, s, v_other, torch.zeros(3, 8), mask=torch.tensor([1, 1, 0]).bool())
    >>> v[:, 0, 0].tolist(), s[:, 0].tolist()
    ([0.5, 0.5, 0.0], [1.0, 1.0, 0.0])
    """
    _check_state(v, s, "v", "s")
    _check_state(v_other, s_other, "v_other", "s_other", v)
    for tensor, name in ((v, "v"), (s, "s")):
        if not tensor.is_contiguous():
            raise ValidationError(
                f"{name}: expected a contiguous tensor, as it is written in place; got {tensor.stride()}."
            )
    if mask is not None:
        check_tensor(mask, "mask")
        check_shape(mask, "mask", {"num_tokens": v.shape[0]})
        check_same_device(mask, "mask", v.device)
        if mask.dtype not in (torch.bool, torch.uint8):
            raise ValidationError(f"mask: expected dtype torch.bool or torch.uint8, got {mask.dtype}.")
        mask = mask.contiguous()
    scale = scalar(v_scale, "v_scale")
    before = s.clone()  # threads of a row read it after another one has written s
    _merge_pair(v, before, v_other, s_other, v, s, mask, scale)


@operator(
    "merge_states", lambda v, s, *_: (v.new_empty((v.shape[0], *v.shape[2:])), s.new_empty((s.shape[0], *s.shape[2:])))
)
def merge_states(v: torch.Tensor, s: torch.Tensor, v_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged (v, s) of v [num_tokens, num_states, num_heads, head_dim], s [num_tokens, num_states, num_heads].

    dtypes, units and v_scale are those of merge_state(). Returns v [num_tokens, num_heads, head_dim] and s [num_tokens,
    num_heads]. Raises ValidationError naming the argument.

    >>> v, s = quire.merge_states(torch.randn(3, 5, 8, 64), torch.randn(3, 5, 8))
    >>> v.shape, s.shape
    (torch.Size([3, 8, 64]), torch.Size([3, 8]))
    """
    _check_state(v, s, "v", "s", dims=("num_tokens", "num_states", "num_heads"))
    tokens, states, num_heads, head_dim = v.shape
    v_out = torch.empty((tokens, num_heads, head_dim), dtype=v.dtype, device=v.device)
    s_out = torch.empty((tokens, num_heads), dtype=torch.float32, device=v.device)
    v, s = _dense(v, 2), _dense(s, 1)
    _launch(v, s, _bytes(v, 1), _bytes(s, 1), states, v_out, s_out, None, scalar(v_scale, "v_scale"))
    return v_out, s_out


def _check_state(
    v: torch.Tensor, s: torch.Tensor, v_name: str, s_name: str, like: torch.Tensor | None = None,
    dims: tuple[str, ...] = ("num_tokens", "num_heads"),
) -> None:  # fmt: skip
    """v and s of one state, or of several; `like`: the v of another state to merge it with."""
    check_shape(check_tensor(v, v_name), v_name, dict.fromkeys((*dims, "head_dim")))
    check_positive(v.shape[-1], f"{v_name}: head_dim")
    check_count(v.shape[-2] * v.shape[-1], v_name, "numbers of a token (num_heads times head_dim)")
    check_count(math.prod(v.shape[1:-2]), v_name, "states")
    check_shape(check_tensor(s, s_name), s_name, dict(zip(dims, v.shape, strict=False)))
    check_same_device(s, s_name, v.device)
    if s.dtype is not torch.float32:
        raise ValidationError(f"{s_name}: expected dtype torch.float32, got {s.dtype}.")
    if v.dtype not in _DTYPES:
        raise ValidationError(f"{v_name}: expected dtype {', '.join(map(str, _DTYPES))}, got {v.dtype}.")
    if like is not None and (v.shape != like.shape or v.dtype is not like.dtype or v.device != like.device):
        raise ValidationError(
            f"{v_name}: expected {like.dtype} {list(like.shape)} on {like.device}, got {v.dtype} {list(v.shape)} on "
            f"{v.device}."
        )


def _merge_pair(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, v_out: torch.Tensor,
    s_out: torch.Tensor, mask: torch.Tensor | None, v_scale: float,
) -> None:  # fmt: skip
    """Merges two states, whose distance in memory is that of their tensors."""
    v, v_other = _alike(v, v_other, 2)
    s, s_other = _alike(s, s_other, 1)
    steps = v_other.data_ptr() - v.data_ptr(), s_other.data_ptr() - s.data_ptr()
    _launch(v, s, *steps, 2, v_out, s_out, mask, v_scale)


def _alike(a: torch.Tensor, b: torch.Tensor, dims: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors if their token strides are equal, else copies."""
    a, b = _dense(a, dims), _dense(b, dims)
    return (a, b) if a.stride(0) == b.stride(0) else (a.contiguous(), b.contiguous())


def _dense(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """The tensor if its last `dims` dimensions are contiguous, else a copy."""
    expected = 1
    for dim in range(1, dims + 1):
        if tensor.shape[-dim] > 1 and tensor.stride(-dim) != expected:
            return tensor.contiguous()
        expected *= tensor.shape[-dim]
    return tensor


def _bytes(tensor: torch.Tensor, dim: int) -> int:
    return tensor.stride(dim) * tensor.element_size()


def _launch(
    v: torch.Tensor, s: torch.Tensor, v_state_bytes: int, s_state_bytes: int, num_states: int, v_out: torch.Tensor,
    s_out: torch.Tensor, mask: torch.Tensor | None, v_scale: float,
) -> None:  # fmt: skip
    """v, s: of the first state; each further state follows at a fixed distance in bytes."""
    dtype = dtype_of(v.dtype, "v")
    if v_out.numel() == 0:
        return
    tokens, num_heads, head_dim = v_out.shape
    places = (v.data_ptr(), v_out.data_ptr(), _bytes(v, 0), v_state_bytes)
    vector = 8 if head_dim % 8 == 0 and all(place % (8 * v.element_size()) == 0 for place in places) else 1
    params = MergeParams(
        v=v.data_ptr(), s=s.data_ptr(), v_out=v_out.data_ptr(), s_out=s_out.data_ptr(),
        mask=None if mask is None else mask.data_ptr(), num_tokens=tokens, v_token_bytes=_bytes(v, 0),
        v_state_bytes=v_state_bytes, s_token_bytes=_bytes(s, 0), s_state_bytes=s_state_bytes, num_states=num_states,
        num_heads=num_heads, head_dim=head_dim, v_scale=v_scale,
    )  # fmt: skip
    key = OperationKey("merge_pair" if num_states == 2 else "merge", target_of(v.device), dtype.slug, vector)
    grid = row_grid(tokens, num_heads * (head_dim // vector))
    launch(get_module(key.spec()), ctypes.addressof(params), v.device, grid=grid, block=PARALLEL_THREADS)
