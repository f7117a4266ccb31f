"""The steps between projection and attention in one launch: RMS norm of q and k, RoPE, quantisation to 8 bits, and the
append of k and v to a paged cache.

rope_quantize_fp8() and the functions named after it have FlashInfer's API (https://docs.flashinfer.ai/api/rope.html).
rope_append_paged_kv_cache() also supports norms, 16-bit caches and undivided heads. Quantised numbers are first
multiplied by their scale, and saturate at the largest 8-bit number.

Each function raises ValidationError naming the argument, before anything is written. Index arrays are treated as in
append_paged_kv_cache(): those on a device are not checked, and tokens whose position is not in the cache are skipped.
"""

# ruff: noqa: ARG001  # @foreign declares them, and tests/test_foreign.py looks

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.engine.checks import (
    check_contiguous_last,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    check_written,
    flag,
    not_negative,
    scalar,
    shape_of,
)
from quire.engine.operators import operator
from quire.engine.options import foreign
from quire.engine.rotate import Angles, Heads, check_heads, rotary_dim_of, split, start
from quire.engine.schedule import append_tables
from quire.engine.tensors import PagedCache, cache_tensors, cache_views, check_apart
from quire.errors import ValidationError
from quire.kernels.features import KVLayout
from quire.kernels.operation import RopeParams

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
Tables = Mapping[str, torch.Tensor]


def rope_append_paged_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: PagedCache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_layout: str = "NHD", *,
    pos_ids: torch.Tensor | None = None, cos_sin_cache: torch.Tensor | None = None, rotary_dim: int | None = None,
    interleave: bool = False, rope_scale: float = 1, rope_theta: float = 1e4, q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None, eps: float = 1e-6, quant_scale_q: float = 1.0, quant_scale_k: float = 1.0,
    quant_scale_v: float = 1.0, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rotate q [nnz, num_qo_heads, head_dim] and k, and append k and v [nnz, num_kv_heads, head_dim] to the cache.

    batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_layout: as in append_paged_kv_cache(). The cache
        has the tokens' dtype, float8_e4m3fn or float8_e5m2.
    pos_ids: positions for the rotation, int32 or int64 [nnz]; None: `positions`.
    cos_sin_cache: angles, as in apply_rope_with_cos_sin_cache(); None: the angles follow from rotary_dim, rope_scale
        and rope_theta, as in apply_rope().
    q_weight, k_weight: weights [head_dim] of the RMS norms, in the dtype of q; None: no norm. eps: of the norms.
    quant_scale_q, quant_scale_k, quant_scale_v: factors of q, k and v where they are written as 8 bits.
    out: [nnz, num_qo_heads, head_dim], in q's dtype or an 8-bit one; may be q. None: a new tensor in q's dtype.

    Returns the rotated q. Raises ValidationError naming the argument, before anything is written.

    >>> q, k, v = torch.randn(3, 8, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    >>> cache = torch.zeros(4, 2, 16, 2, 64, dtype=torch.float8_e4m3fn)
    >>> int32 = {"dtype": torch.int32}
    >>> kv_indices, kv_indptr = torch.tensor([2, 0], **int32), torch.tensor([0, 2], **int32)  # one request
    >>> positions, batch_indices = torch.tensor([15, 16, 17], **int32), torch.tensor([0, 0, 0], **int32)
    >>> q_rope = quire.rope_append_paged_kv_cache(
    ...     q, k, v, batch_indices, positions, cache, kv_indices, kv_indptr, quant_scale_v=2.0
    ... )
    >>> torch.equal(q_rope, quire.apply_rope_pos_ids(q, k, positions)[0])
    True
    >>> torch.equal(cache[0, 1, 1].float(), (2 * v[2]).to(torch.float8_e4m3fn).float())
    True
    """
    k_cache, *v_cache = cache_tensors(paged_kv_cache)
    if out is None:
        out = _new(q, "q")
    _rope_append(
        q, k, v, out, k_cache, v_cache[0] if v_cache else None, batch_indices, positions, kv_indices, kv_indptr,
        kv_layout, pos_ids, cos_sin_cache, rotary_dim, interleave, rope_scale, rope_theta, q_weight, k_weight, eps,
        quant_scale_q, quant_scale_k, quant_scale_v,
    )  # fmt: skip
    return out


@foreign(permissions="enable_pdl backend")
def rope_quantize_fp8(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None, quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None, k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None, k_nope_out: torch.Tensor | None = None, enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate q_rope and k_rope, and quantise them together with the other dims, q_nope and k_nope.

    q_rope [nnz, num_qo_heads, rope_dim]; k_rope [nnz, num_kv_heads, rope_dim], or [nnz, rope_dim] of latent attention
        (MLA); q_nope, k_nope: the same with no_rope_dim, or None.
    cos_sin_cache, pos_ids, is_neox: as in apply_rope_with_cos_sin_cache(); the table has rope_dim columns.
    quantize_dtype: float8_e4m3fn or float8_e5m2; None: that of the given outputs, else float8_e4m3fn.
    quant_scale_q, quant_scale_kv: factors of q and k.
    *_out: tensors that results are written into; None: new tensors. enable_pdl: a permission. backend: "cuda" or
        "cutile", which run the same kernel of Quire.

    Returns (q_rope_out, k_rope_out, q_nope_out, k_nope_out); the outputs for arguments that are None are empty. Raises
    ValidationError naming the argument, before anything is written.

    >>> q, k, positions = torch.randn(2, 8, 64), torch.randn(2, 2, 64), torch.tensor([0, 7])
    >>> angles = torch.arange(8)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    >>> cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    >>> q_rope, k_rope, _, _ = quire.rope.rope_quantize_fp8(q, k, None, None, cos_sin_cache, positions)
    >>> q_rope.dtype, torch.equal(q_rope[0].float(), q[0].to(torch.float8_e4m3fn).float())
    (torch.float8_e4m3fn, True)
    """
    dtype = _eight_bits(quantize_dtype, (q_rope_out, k_rope_out, q_nope_out, k_nope_out))
    q_nope, k_nope = _if_any(q_nope), _if_any(k_nope)
    q_out, k_out = _out(q_rope_out, q_rope, "q_rope", dtype), _out(k_rope_out, k_rope, "k_rope", dtype)
    q_rest, k_rest = _rest(q_nope_out, q_nope, "q_nope", dtype), _rest(k_nope_out, k_nope, "k_nope", dtype)
    _rope_quantize(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, q_out, k_out, q_rest, k_rest,
        not flag(is_neox, "is_neox"), quant_scale_q, quant_scale_kv,
    )  # fmt: skip
    return q_out, k_out, _or_nothing(q_rest, q_out), _or_nothing(k_rest, k_out)


def mla_rope_quantize_fp8(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor, k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None, quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0,
    q_rope_out: torch.Tensor | None = None, k_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None, k_nope_out: torch.Tensor | None = None, enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """rope_quantize_fp8() under the name that engines use for latent attention (MLA): k_rope is [nnz, rope_dim].

    Arguments, results and errors are those of rope_quantize_fp8(): it raises ValidationError naming the argument.

    >>> table = torch.cat((torch.ones(8, 32), torch.zeros(8, 32)), dim=1)  # cosines and sines of no rotation
    >>> q, k, pos_ids = torch.randn(2, 16, 576), torch.randn(2, 576), torch.tensor([0, 7])
    >>> rotated = quire.rope.mla_rope_quantize_fp8(q[..., 512:], k[:, 512:], q[..., :512], k[:, :512], table, pos_ids)
    >>> [list(x.shape) for x in rotated]
    [[2, 16, 64], [2, 64], [2, 16, 512], [2, 512]]
    """
    return rope_quantize_fp8(
        q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox, quantize_dtype, quant_scale_q, quant_scale_kv,
        q_rope_out, k_rope_out, q_nope_out, k_nope_out, enable_pdl,
    )  # fmt: skip


@foreign(permissions="enable_pdl")
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    v: torch.Tensor | None, cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor, positions: torch.Tensor, is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None, quant_scale_q: float = 1.0, quant_scale_kv: float = 1.0,
    page_size: int = 16, kv_layout: str = "NHD", q_rope_out: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None, enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """rope_quantize_fp8(), with keys and values appended to a cache of 8 bits instead of returned.

    v: [nnz, num_kv_heads, head_dim]; None in latent attention (MLA), where k_rope is [nnz, rope_dim].
    paged_kv_cache: (k_cache, v_cache), each [num_pages, page_size, num_kv_heads, head_dim] (HND: heads before tokens);
        in MLA (ckv_cache [num_pages, page_size, no_rope_dim], kpe_cache [num_pages, page_size, rope_dim]).
    kv_indices, kv_indptr, batch_indices, positions: as in append_paged_kv_cache().
    quantize_dtype: the cache's dtype, which None stands for.

    Returns (q_rope_out, q_nope_out). Raises ValidationError naming the argument, before anything is written.

    >>> table = torch.cat((torch.ones(8, 32), torch.zeros(8, 32)), dim=1)  # cosines and sines of no rotation
    >>> q, k, zeros = torch.randn(2, 16, 576), torch.randn(2, 576), torch.zeros(2, dtype=torch.int32)
    >>> ckv, kpe = (torch.zeros(4, 16, dim, dtype=torch.float8_e4m3fn) for dim in (512, 64))
    >>> positions, pages = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)  # one request
    >>> q_rope, q_nope = quire.rope.rope_quantize_fp8_append_paged_kv_cache(
    ...     q[..., 512:], k[:, 512:], q[..., :512], k[:, :512], None, table, positions, (ckv, kpe), pages,
    ...     torch.tensor([0, 1], dtype=torch.int32), zeros, positions,
    ... )
    >>> torch.equal(ckv[3, :2].float(), k[:, :512].to(ckv.dtype).float())
    True
    """
    tensors = cache_tensors(paged_kv_cache)
    if len(tensors) != 2:
        raise ValidationError("paged_kv_cache: expected a pair of tensors, got one tensor.")
    dtype = _eight_bits(quantize_dtype, (q_rope_out, q_nope_out, *tensors))
    q_nope, k_nope = _if_any(q_nope), _if_any(k_nope)
    q_out, q_rest = _out(q_rope_out, q_rope, "q_rope", dtype), _rest(q_nope_out, q_nope, "q_nope", dtype)
    _rope_quantize_append(
        q_rope, k_rope, q_nope, k_nope, v, cos_sin_cache, pos_ids, q_out, q_rest, *tensors, batch_indices,
        positions, kv_indices, kv_indptr, page_size, kv_layout, not flag(is_neox, "is_neox"), quant_scale_q,
        quant_scale_kv,
    )  # fmt: skip
    return q_out, _or_nothing(q_rest, q_out)


# Arguments


def _new(tensor: Any, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous tensor of the same shape."""
    if shape_of(tensor) is None:
        check_tensor(tensor, name)
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def _if_any(tensor: Any) -> Any:
    """None if all dims are rotated."""
    return None if isinstance(tensor, torch.Tensor) and (shape_of(tensor) or (1,))[-1] == 0 else tensor


def _out(out: torch.Tensor | None, like: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    return _new(like, name, dtype) if out is None else out


def _rest(out: torch.Tensor | None, like: Any, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Output for the dims that are not rotated; None without any."""
    if like is not None:
        return _out(out, like, name, dtype)
    if out is not None and _if_any(out) is not None:
        got = type(out).__name__ if (shape := shape_of(out)) is None else list(shape)
        raise ValidationError(f"{name}_out: expected None, as {name} is None, got {got}.")
    return None


def _or_nothing(rest: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((*like.shape[:-1], 0)) if rest is None else rest


def _eight_bits(dtype: Any, outputs: tuple[Any, ...]) -> torch.dtype:
    """The output type: `dtype`, or that of the first given output."""
    given = (out.dtype for out in outputs if isinstance(out, torch.Tensor))
    found: Any = next(given, torch.float8_e4m3fn) if dtype is None else dtype
    for known in _EIGHT_BITS:
        if found is known:
            return known  # type: ignore[no-any-return]
    raise ValidationError(
        f"quantize_dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, as the outputs and the cache have, got "
        f"{found!r}."
    )


def _scale(value: Any, name: str, written: torch.dtype) -> float:
    """The factor before numbers are written as 8 bits; 1 for other types."""
    scale = scalar(value, name)
    if written not in _EIGHT_BITS and scale != 1:
        raise ValidationError(f"{name}: expected 1, as nothing is quantised: {written} is written; got {scale}.")
    return scale


def _check_pages(cache: torch.Tensor, name: str, like: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Pages [num_pages, page_size, num_kv_heads, head_dim] that hold heads like `like`'s."""
    check_same_device(cache, "paged_kv_cache", like.device)
    if cache.shape[2:] != like.shape[1:] or cache.dtype not in dtypes:
        raise ValidationError(
            f"paged_kv_cache: expected [num_kv_heads, head_dim] of {name}, {list(like.shape[1:])}, and dtype "
            f"{' or '.join(map(str, dtypes))}; got {list(cache.shape[2:])} of {cache.dtype}."
        )


def _paged(
    batch_indices: Any, positions: Any, kv_indices: Any, kv_indptr: Any, nnz: int, pages: torch.Tensor
) -> tuple[RopeParams, Tables]:
    """Parameters with the addresses of the tables, and the tables, which must be kept until the launch."""
    tables, batch = append_tables(batch_indices, positions, kv_indices, kv_indptr, nnz, pages)
    params = RopeParams(
        num_indices=tables["kv_indices"].shape[0], batch_size=min(batch, 2**31 - 1),
        num_pages=min(pages.shape[0], 2**31 - 1),  # page numbers have 32 bits
        page_size=pages.shape[1], **{name: table.data_ptr() for name, table in tables.items()},
    )  # fmt: skip
    return params, tables


# Operators


@operator("rope_append", writes="out k_cache v_cache")
def _rope_append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, k_cache: torch.Tensor,
    v_cache: torch.Tensor | None, batch_indices: torch.Tensor, positions: torch.Tensor, kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor, kv_layout: str, pos_ids: torch.Tensor | None, cos_sin_cache: torch.Tensor | None,
    rotary_dim: int | None, interleave: bool, rope_scale: float, rope_theta: float, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, quant_scale_q: float, quant_scale_k: float, quant_scale_v: float,
) -> None:  # fmt: skip
    check_heads(q, "q", dict.fromkeys(("nnz", "num_qo_heads", "head_dim")))
    nnz, _, head_dim = q.shape
    check_heads(k, "k", {"nnz": nnz, "num_kv_heads": None, "head_dim": head_dim}, q)
    check_heads(v, "v", {"nnz": nnz, "num_kv_heads": k.shape[1], "head_dim": None}, q)
    for weight, name in ((q_weight, "q_weight"), (k_weight, "k_weight")):
        if weight is not None:
            check_heads(weight, name, {"head_dim": head_dim}, q)
    k_pages, v_pages = cache_views(k_cache if v_cache is None else (k_cache, v_cache), KVLayout.of(kv_layout))
    for pages, tensor, name in ((k_pages, k, "k"), (v_pages, v, "v")):
        _check_pages(pages, name, tensor, (q.dtype, *_EIGHT_BITS))
    check_written(out, "out", q, (q.dtype, *_EIGHT_BITS))
    check_apart({"out": out, "k_cache": k_pages, "v_cache": v_pages}, {"q": q, "k": k, "v": v})
    dim = rotary_dim_of(rotary_dim, head_dim, cos_sin_cache, q.device)
    angles = Angles(
        positions if pos_ids is None else pos_ids, None, None, cos_sin_cache, interleave, rope_scale, rope_theta
    )
    angles = angles.checked(nnz, q.device, "positions" if pos_ids is None else "pos_ids")
    params, tables = _paged(batch_indices, positions, kv_indices, kv_indptr, nnz, k_pages)
    params.eps = not_negative(eps, "eps")
    scale_q = _scale(quant_scale_q, "quant_scale_q", out.dtype)
    scale_k = _scale(quant_scale_k, "quant_scale_k", k_pages.dtype)
    scale_v = _scale(quant_scale_v, "quant_scale_v", v_pages.dtype)
    (q_rope, q_nope), (k_rope, k_nope) = split(q, dim), split(k, dim)
    (q_rope_out, q_nope_out), (k_rope_out, k_nope_out) = split(out, dim), split(k_pages, dim)
    name = "rope_append" if q_weight is None and k_weight is None else "rope_norm_append"
    start(
        name, Heads(q_rope, q_nope, q_rope_out, q_nope_out, q_weight, scale_q),
        Heads(k_rope, k_nope, k_rope_out, k_nope_out, k_weight, scale_k), Heads(None, v, None, v_pages, None, scale_v),
        angles, params,
    )  # fmt: skip
    del tables


@operator("rope_quantize", writes="q_rope_out k_rope_out q_nope_out k_nope_out")
def _rope_quantize(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, q_rope_out: torch.Tensor, k_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor | None, k_nope_out: torch.Tensor | None, interleave: bool, quant_scale_q: float,
    quant_scale_kv: float,
) -> None:  # fmt: skip
    angles = _check_split(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, interleave)
    inputs = _named(q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope)
    outputs = _named(q_rope_out=q_rope_out, k_rope_out=k_rope_out, q_nope_out=q_nope_out, k_nope_out=k_nope_out)
    _check_outputs(outputs, inputs, check_output(q_rope_out, "q_rope_out").dtype)
    queries = Heads(q_rope, q_nope, q_rope_out, q_nope_out, None, scalar(quant_scale_q, "quant_scale_q"))
    rope, nope, rope_out, nope_out = (
        None if t is None else _with_heads(t) for t in (k_rope, k_nope, k_rope_out, k_nope_out)
    )
    keys = Heads(rope, nope, rope_out, nope_out, None, scalar(quant_scale_kv, "quant_scale_kv"))
    start("rope_append", queries, keys, None, angles)


@operator("rope_quantize_append", writes="q_rope_out q_nope_out first_cache second_cache")
def _rope_quantize_append(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    v: torch.Tensor | None, cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, q_rope_out: torch.Tensor,
    q_nope_out: torch.Tensor | None, first_cache: torch.Tensor, second_cache: torch.Tensor,
    batch_indices: torch.Tensor, positions: torch.Tensor, kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
    page_size: int, kv_layout: str, interleave: bool, quant_scale_q: float, quant_scale_kv: float,
) -> None:  # fmt: skip
    angles = _check_split(q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, interleave)
    inputs = _named(q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope, v=v)
    outputs = _named(q_rope_out=q_rope_out, q_nope_out=q_nope_out)
    scale_q, scale_kv = scalar(quant_scale_q, "quant_scale_q"), scalar(quant_scale_kv, "quant_scale_kv")
    if k_rope.dim() == 2:
        keys, values, pages = _latent_pages(k_rope, k_nope, v, first_cache, second_cache, scale_kv)
    else:
        keys, values, pages = _head_pages(k_rope, k_nope, v, first_cache, second_cache, scale_kv, kv_layout)
    if pages["first"].dtype is not q_rope_out.dtype:
        raise ValidationError(
            f"paged_kv_cache: expected the queries' {q_rope_out.dtype} (quantize_dtype), got {pages['first'].dtype}."
        )
    _check_outputs(outputs, inputs, q_rope_out.dtype, {f"paged_kv_cache ({n})": t for n, t in pages.items()})
    if pages["first"].shape[1] != check_positive(page_size, "page_size"):
        raise ValidationError(f"page_size: expected {pages['first'].shape[1]}, the cache's, got {page_size}.")
    params, tables = _paged(batch_indices, positions, kv_indices, kv_indptr, q_rope.shape[0], pages["first"])
    queries = Heads(q_rope, q_nope, q_rope_out, q_nope_out, None, scale_q)
    start("rope_append", queries, keys, values, angles, params)
    del tables


def _named(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _with_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Keys [nnz, dims] as those of one head."""
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor


def _check_split(
    q_rope: torch.Tensor, k_rope: torch.Tensor, q_nope: torch.Tensor | None, k_nope: torch.Tensor | None,
    cos_sin_cache: torch.Tensor, pos_ids: torch.Tensor, interleave: bool,
) -> Angles:  # fmt: skip
    """Check queries and keys whose rotated dims are in separate tensors; returns the angles."""
    check_heads(q_rope, "q_rope", dict.fromkeys(("nnz", "num_qo_heads", "rope_dim")))
    nnz, num_heads, dim = q_rope.shape
    is_latent = isinstance(k_rope, torch.Tensor) and k_rope.dim() == 2
    keys = {"nnz": nnz} if is_latent else {"nnz": nnz, "num_kv_heads": None}
    check_heads(k_rope, "k_rope", {**keys, "rope_dim": dim}, q_rope)
    if q_nope is not None:
        check_heads(q_nope, "q_nope", {"nnz": nnz, "num_qo_heads": num_heads, "no_rope_dim": None}, q_rope)
    if k_nope is not None:
        keys = keys if is_latent else {"nnz": nnz, "num_kv_heads": k_rope.shape[1]}
        check_heads(k_nope, "k_nope", {**keys, "no_rope_dim": None}, q_rope)
    if rotary_dim_of(None, dim, check_tensor(cos_sin_cache, "cos_sin_cache"), q_rope.device) != dim:
        raise ValidationError(
            f"cos_sin_cache: expected [max_seq_len, rope_dim={dim}], got {list(cos_sin_cache.shape)}."
        )
    return Angles(pos_ids, None, None, cos_sin_cache, interleave, 1, 1).checked(nnz, q_rope.device, "pos_ids")


def _check_outputs(
    outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], dtype: torch.dtype,
    pages: Mapping[str, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    for name, tensor in outputs.items():
        check_written(tensor, name, inputs[name.removesuffix("_out")], (dtype,))
    check_apart({**outputs, **(pages or {})}, inputs)


Parts = tuple[Heads, Heads | None, dict[str, torch.Tensor]]


def _head_pages(
    k_rope: torch.Tensor, k_nope: torch.Tensor | None, v: torch.Tensor | None, k_cache: torch.Tensor,
    v_cache: torch.Tensor, scale: float, kv_layout: str,
) -> Parts:  # fmt: skip
    """Keys and values, and the pages for both."""
    if v is None:
        raise ValidationError("v: expected values, as k_rope has heads; None is for latent attention (MLA).")
    check_heads(v, "v", {"nnz": k_rope.shape[0], "num_kv_heads": k_rope.shape[1], "head_dim": None}, k_rope)
    k_pages, v_pages = cache_views((k_cache, v_cache), KVLayout.of(kv_layout))
    _check_pages(v_pages, "v", v, _EIGHT_BITS)
    dims = k_rope.shape[2] + (0 if k_nope is None else k_nope.shape[2])
    _check_pages(k_pages, "k", k_rope[..., :1].expand(-1, -1, dims), _EIGHT_BITS)
    keys = Heads(k_rope, k_nope, *split(k_pages, k_rope.shape[2]), None, scale)
    return keys, Heads(None, v, None, v_pages, None, scale), {"first": k_pages, "second": v_pages}


def _latent_pages(
    k_rope: torch.Tensor, k_nope: torch.Tensor | None, v: torch.Tensor | None, ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor, scale: float,
) -> Parts:  # fmt: skip
    """Latents, which are both keys and values, and the pages for their parts."""
    if v is not None:
        raise ValidationError("v: expected None, as k_rope is that of latent attention (MLA), without heads.")
    if k_nope is None:
        raise ValidationError("k_nope: expected the latent keys that ckv_cache holds, got none.")
    pages = {}
    for cache, tensor, name in ((ckv_cache, k_nope, "first"), (kpe_cache, k_rope, "second")):
        shape = dict.fromkeys(("num_pages", "page_size", "dims"))
        check_shape(check_output(cache, "paged_kv_cache"), "paged_kv_cache", shape)
        check_contiguous_last(cache, "paged_kv_cache")
        pages[name] = cache.unsqueeze(2)
        _check_pages(pages[name], "k", _with_heads(tensor), _EIGHT_BITS)
    if ckv_cache.shape[:2] != kpe_cache.shape[:2] or ckv_cache.dtype is not kpe_cache.dtype:
        raise ValidationError(
            f"paged_kv_cache: expected as many pages and tokens of ckv_cache as of kpe_cache, of one dtype; got "
            f"{list(ckv_cache.shape[:2])} {ckv_cache.dtype} and {list(kpe_cache.shape[:2])} {kpe_cache.dtype}."
        )
    keys = Heads(_with_heads(k_rope), _with_heads(k_nope), pages["second"], pages["first"], None, scale)
    return keys, None, pages
