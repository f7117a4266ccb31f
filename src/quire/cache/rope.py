"""Rotary position embeddings (RoPE): rotate queries and keys by angles proportional to their positions.

The API is FlashInfer's (https://docs.flashinfer.ai/api/rope.html); the embedding is RoFormer's
(https://arxiv.org/abs/2104.09864). q [nnz, num_qo_heads, head_dim] and k [nnz, num_kv_heads, head_dim] are float16,
bfloat16 or float32; only their last dimension must be contiguous. Angles are exact at any position below 2^31, and
results are rounded once.

Each function raises ValidationError naming the argument, before anything is written. Positions on the host are checked.
Positions on a device are not, because that would wait for the device: a token with an invalid position gets NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.cache.rope_append import (
    mla_rope_quantize_fp8,
    rope_append_paged_kv_cache,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from quire.engine.checks import check_output, check_positive, check_tensor, flag, shape_of
from quire.engine.operators import is_tracing, operator
from quire.engine.rotate import Angles, Heads, Llama31, check_heads, rotary_dim_of, split, start
from quire.engine.tensors import check_apart
from quire.errors import ValidationError

__all__ = [
    "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8", "rope_append_paged_kv_cache", "rope_quantize_fp8",
    "rope_quantize_fp8_append_paged_kv_cache",
]  # fmt: skip

Pair = tuple[torch.Tensor, torch.Tensor]


def apply_rope(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> Pair:  # fmt: skip
    """q and k, rotated: token i of request b, row indptr[b] + i, is at position offsets[b] + i.

    q [nnz, num_qo_heads, head_dim], k [nnz, num_kv_heads, head_dim]: float16, bfloat16 or float32.
    indptr [batch_size + 1], offsets [batch_size]: int32 or int64, on the tensors' device.
    rotary_dim: how many dims of a head are rotated, from the first on; an even number; None: all.
    interleave: True: dims 2 i and 2 i + 1 are a pair; False: dims i and i + rotary_dim / 2.
    rope_scale, rope_theta: pair i rotates by rope_theta ** (-2 i / rotary_dim) / rope_scale radians per token.

    Raises ValidationError naming the argument. Positions on a device are not checked: an invalid one gives NaN.

    >>> q, k = torch.ones(3, 8, 64), torch.ones(3, 2, 64)
    >>> indptr, offsets = torch.tensor([0, 1, 3]), torch.tensor([0, 7])
    >>> q_rope, k_rope = quire.apply_rope(q, k, indptr, offsets)
    >>> positions = torch.tensor([0, 7, 8])
    >>> torch.allclose(k_rope[:, 0, 0], positions.cos() - positions.sin(), atol=1e-6)
    True
    """
    return _rotated(q, k, rotary_dim, _by_requests(indptr, offsets, interleave, rope_scale, rope_theta))


def apply_rope_inplace(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Rotate q [nnz, num_qo_heads, head_dim] and k [nnz, num_kv_heads, head_dim] in place.

    The arguments are those of apply_rope(). Raises ValidationError naming the argument, before anything is written.

    >>> q, k, indptr, offsets = torch.ones(3, 8, 64), torch.ones(3, 2, 64), torch.tensor([0, 3]), torch.tensor([7])
    >>> rotated, _ = quire.apply_rope(q, k, indptr, offsets)
    >>> quire.apply_rope_inplace(q, k, indptr, offsets)
    >>> torch.equal(q, rotated)
    True
    """
    _rope_in_place(q, k, rotary_dim, *_by_requests(indptr, offsets, interleave, rope_scale, rope_theta))


def apply_rope_pos_ids(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> Pair:  # fmt: skip
    """q and k, rotated: row i is at position pos_ids[i], int32 or int64 [nnz].

    The other arguments are those of apply_rope(). Raises ValidationError naming the argument.

    >>> q, k = torch.ones(2, 8, 64), torch.ones(2, 2, 64)
    >>> q_rope, k_rope = quire.apply_rope_pos_ids(q, k, torch.tensor([0, 131072]))
    >>> torch.equal(q_rope[0], q[0]), torch.equal(q_rope[1], q[1])
    (True, False)
    """
    return _rotated(q, k, rotary_dim, _by_positions(pos_ids, interleave, rope_scale, rope_theta))


def apply_rope_pos_ids_inplace(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 1, rope_theta: float = 1e4,
) -> None:  # fmt: skip
    """Rotate q [nnz, num_qo_heads, head_dim] and k [nnz, num_kv_heads, head_dim] in place.

    The arguments are those of apply_rope_pos_ids(). Raises ValidationError naming the argument, before anything is
    written.

    >>> q, k, pos_ids = torch.ones(2, 8, 64), torch.ones(2, 2, 64), torch.tensor([0, 131072])
    >>> rotated, _ = quire.apply_rope_pos_ids(q, k, pos_ids)
    >>> quire.apply_rope_pos_ids_inplace(q, k, pos_ids)
    >>> torch.equal(q, rotated)
    True
    """
    _rope_in_place(q, k, rotary_dim, *_by_positions(pos_ids, interleave, rope_scale, rope_theta))


def apply_llama31_rope(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1,
    high_freq_factor: float = 4, old_context_len: int = 8192,
) -> Pair:  # fmt: skip
    """q [nnz, num_qo_heads, head_dim] and k [nnz, num_kv_heads, head_dim], rotated with the frequencies of Llama 3.1.

    The arguments up to rope_theta are those of apply_rope().

    Pairs with fewer than low_freq_factor rotations in old_context_len tokens are slowed down by rope_scale. Pairs with
    more than high_freq_factor rotations are not. Frequencies in between are interpolated. Raises ValidationError naming
    the argument.

    >>> q, k = torch.ones(3, 8, 64), torch.ones(3, 2, 64)
    >>> indptr, offsets = torch.tensor([0, 3]), torch.tensor([9000])
    >>> llama31, _ = quire.apply_llama31_rope(q, k, indptr, offsets)
    >>> slow, _ = quire.apply_rope(q, k, indptr, offsets, rope_scale=8, rope_theta=5e5)
    >>> torch.equal(llama31[..., 0], slow[..., 0]), torch.equal(llama31[..., 31], slow[..., 31])
    (False, True)
    """
    llama31 = (low_freq_factor, high_freq_factor, old_context_len)
    return _rotated(q, k, rotary_dim, _by_requests(indptr, offsets, interleave, rope_scale, rope_theta, llama31))


def apply_llama31_rope_inplace(
    q: torch.Tensor, k: torch.Tensor, indptr: torch.Tensor, offsets: torch.Tensor, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1,
    high_freq_factor: float = 4, old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Rotate q [nnz, num_qo_heads, head_dim] and k [nnz, num_kv_heads, head_dim] in place.

    The arguments are those of apply_llama31_rope(). Raises ValidationError naming the argument, before anything is
    written.

    >>> q, k, indptr, offsets = torch.ones(3, 8, 64), torch.ones(3, 2, 64), torch.tensor([0, 3]), torch.tensor([9000])
    >>> rotated, _ = quire.apply_llama31_rope(q, k, indptr, offsets)
    >>> quire.apply_llama31_rope_inplace(q, k, indptr, offsets)
    >>> torch.equal(q, rotated)
    True
    """
    llama31 = (low_freq_factor, high_freq_factor, old_context_len)
    _rope_in_place(q, k, rotary_dim, *_by_requests(indptr, offsets, interleave, rope_scale, rope_theta, llama31))


def apply_llama31_rope_pos_ids(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> Pair:  # fmt: skip
    """q and k, rotated with the frequencies of Llama 3.1: row i is at position pos_ids[i], int32 or int64 [nnz].

    The other arguments are those of apply_llama31_rope(). Raises ValidationError naming the argument.

    >>> q, k = torch.ones(3, 8, 64), torch.ones(3, 2, 64)
    >>> rotated, _ = quire.apply_llama31_rope_pos_ids(q, k, torch.tensor([9000, 9001, 9002]))
    >>> torch.equal(rotated, quire.apply_llama31_rope(q, k, torch.tensor([0, 3]), torch.tensor([9000]))[0])
    True
    """
    llama31 = (low_freq_factor, high_freq_factor, old_context_len)
    return _rotated(q, k, rotary_dim, _by_positions(pos_ids, interleave, rope_scale, rope_theta, llama31))


def apply_llama31_rope_pos_ids_inplace(
    q: torch.Tensor, k: torch.Tensor, pos_ids: torch.Tensor, rotary_dim: int | None = None, interleave: bool = False,
    rope_scale: float = 8, rope_theta: float = 5e5, low_freq_factor: float = 1, high_freq_factor: float = 4,
    old_context_len: int = 8192,
) -> None:  # fmt: skip
    """Rotate q [nnz, num_qo_heads, head_dim] and k [nnz, num_kv_heads, head_dim] in place.

    The arguments are those of apply_llama31_rope_pos_ids(). Raises ValidationError naming the argument, before anything
    is written.

    >>> q, k, pos_ids = torch.ones(2, 8, 64), torch.ones(2, 2, 64), torch.tensor([0, 9000])
    >>> rotated, _ = quire.apply_llama31_rope_pos_ids(q, k, pos_ids)
    >>> quire.apply_llama31_rope_pos_ids_inplace(q, k, pos_ids)
    >>> torch.equal(q, rotated)
    True
    """
    llama31 = (low_freq_factor, high_freq_factor, old_context_len)
    _rope_in_place(q, k, rotary_dim, *_by_positions(pos_ids, interleave, rope_scale, rope_theta, llama31))


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> Pair:  # fmt: skip
    """query [nnz, num_qo_heads * head_size] and key [nnz, num_kv_heads * head_size], rotated by angles from a table.

    positions: int32 or int64 [nnz], rows of the table.
    cos_sin_cache: float32 [max_seq_len, rotary_dim]: cosines of the pairs' angles, then their sines.
    is_neox: True: dims i and i + rotary_dim / 2 are a pair; False: dims 2 i and 2 i + 1.

    Raises ValidationError naming the argument. Positions on a device are not checked: an invalid one gives NaN.

    >>> angles = torch.arange(100)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    >>> cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    >>> positions, query, key = torch.tensor([5, 99]), torch.randn(2, 8 * 64), torch.randn(2, 2 * 64)
    >>> rotated, _ = quire.apply_rope_with_cos_sin_cache(positions, query, key, 64, cos_sin_cache)
    >>> same, _ = quire.apply_rope_pos_ids(query.view(2, 8, 64), key.view(2, 2, 64), positions)
    >>> torch.allclose(rotated.view(2, 8, 64), same, atol=1e-4)
    True
    """
    q, k = _heads(query, "query", head_size), _heads(key, "key", head_size)
    q_rope, k_rope = _rotated(q, k, None, _by_table(positions, cos_sin_cache, is_neox))
    return q_rope.view(query.shape), k_rope.view(key.shape)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:  # fmt: skip
    """Rotate query [nnz, num_qo_heads * head_size] and key [nnz, num_kv_heads * head_size] in place.

    The arguments are those of apply_rope_with_cos_sin_cache(). Raises ValidationError naming the argument, before
    anything is written.

    >>> angles = torch.arange(100)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    >>> cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    >>> positions, query, key = torch.tensor([5, 99]), torch.randn(2, 8 * 64), torch.randn(2, 2 * 64)
    >>> rotated, _ = quire.apply_rope_with_cos_sin_cache(positions, query, key, 64, cos_sin_cache)
    >>> quire.apply_rope_with_cos_sin_cache_inplace(positions, query, key, 64, cos_sin_cache)
    >>> torch.equal(query, rotated)
    True
    """
    q, k = _heads(query, "query", head_size), _heads(key, "key", head_size)
    _rope_in_place(q, k, None, *_by_table(positions, cos_sin_cache, is_neox))


def _rotated(q: Any, k: Any, rotary_dim: int | None, angles: Angles) -> Pair:
    q_rope, k_rope = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor in (_tensor(q, "q"), _tensor(k, "k"))
    )
    _rope(q, k, q_rope, k_rope, rotary_dim, *angles)
    return q_rope, k_rope


def _by_requests(indptr: Any, offsets: Any, *numbers: Any) -> Angles:
    return Angles(None, _tensor(indptr, "indptr"), offsets, None, *numbers)


def _by_positions(pos_ids: Any, *numbers: Any) -> Angles:
    return Angles(_tensor(pos_ids, "pos_ids"), None, None, None, *numbers)


def _by_table(positions: Any, cos_sin_cache: Any, is_neox: Any) -> Angles:
    table = _tensor(cos_sin_cache, "cos_sin_cache")
    return Angles(_tensor(positions, "positions"), None, None, table, not flag(is_neox, "is_neox"), 1, 1)


def _tensor(value: Any, name: str) -> torch.Tensor:
    """`value`, which must not be None: for the operator, None selects another way to give angles."""
    return value if shape_of(value) is not None else check_tensor(value, name)


def _heads(tensor: Any, name: str, head_size: Any) -> torch.Tensor:
    """[nnz, num_heads * head_size] as [nnz, num_heads, head_size]; the latter is also accepted."""
    size = check_positive(head_size, "head_size")
    if not is_tracing():
        check_tensor(tensor, name)
    if tensor.dim() == 3 and tensor.shape[2] == size:
        return tensor  # type: ignore[no-any-return]
    if tensor.dim() != 2 or tensor.shape[1] % size:
        raise ValidationError(f"{name}: expected [nnz, num_heads * head_size={size}], got {list(tensor.shape)}.")
    return tensor.unflatten(1, (tensor.shape[1] // size, size))  # type: ignore[no-any-return]


@operator("rope", writes="q_rope k_rope")
def _rope(
    q: torch.Tensor, k: torch.Tensor, q_rope: torch.Tensor, k_rope: torch.Tensor, rotary_dim: int | None,
    pos_ids: torch.Tensor | None, indptr: torch.Tensor | None, offsets: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None, interleave: bool, rope_scale: float, rope_theta: float,
    llama31: Llama31 | None,
) -> None:  # fmt: skip
    angles = Angles(pos_ids, indptr, offsets, cos_sin_cache, interleave, rope_scale, rope_theta, llama31)
    angles, dim = _checked(q, k, rotary_dim, angles)
    (q_turning, q_rest), (k_turning, k_rest), (q_to, q_rest_to), (k_to, k_rest_to) = (
        split(tensor, dim) for tensor in (q, k, q_rope, k_rope)
    )
    queries, keys = Heads(q_turning, q_rest, q_to, q_rest_to), Heads(k_turning, k_rest, k_to, k_rest_to)
    start("rope", queries, keys, None, angles)


@operator("rope_in_place", writes="q k")
def _rope_in_place(
    q: torch.Tensor, k: torch.Tensor, rotary_dim: int | None, pos_ids: torch.Tensor | None,
    indptr: torch.Tensor | None, offsets: torch.Tensor | None, cos_sin_cache: torch.Tensor | None, interleave: bool,
    rope_scale: float, rope_theta: float, llama31: Llama31 | None,
) -> None:  # fmt: skip
    angles = Angles(pos_ids, indptr, offsets, cos_sin_cache, interleave, rope_scale, rope_theta, llama31)
    angles, dim = _checked(q, k, rotary_dim, angles)
    q_name, k_name = ("q", "k") if cos_sin_cache is None else ("query", "key")
    check_apart({q_name: check_output(q, q_name), k_name: check_output(k, k_name)}, {})
    q_turning, k_turning = split(q, dim)[0], split(k, dim)[0]
    queries, keys = (Heads(turning, None, turning, None) for turning in (q_turning, k_turning))
    start("rope", queries, keys, None, angles)


def _checked(q: torch.Tensor, k: torch.Tensor, rotary_dim: int | None, angles: Angles) -> tuple[Angles, int]:
    """Angles as the kernel takes them, and how many dims are rotated."""
    q_name, k_name = ("q", "k") if angles.cos_sin_cache is None else ("query", "key")
    check_heads(q, q_name, dict.fromkeys(("nnz", "num_qo_heads", "head_dim")))
    nnz, _, head_dim = q.shape
    check_heads(k, k_name, {"nnz": nnz, "num_kv_heads": None, "head_dim": head_dim}, q)
    dim = rotary_dim_of(rotary_dim, head_dim, angles.cos_sin_cache, q.device)
    return angles.checked(nnz, q.device, "pos_ids" if angles.cos_sin_cache is None else "positions"), dim
