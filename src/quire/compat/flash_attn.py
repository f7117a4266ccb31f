"""FlashAttention's functions, with its signatures and semantics, over Quire's kernels.

    from quire.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

The API is that of flash-attn 2 (https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py). Common to all
functions:

- q is [..., num_heads, head_dim], k and v are [..., num_heads_k, head_dim]; num_heads is a multiple of num_heads_k. The
  head_dim of v may differ; the result has the head_dim of v.
- causal: the last query sees the last key (bottom-right). Queries that see no key give zeros, and an lse of -inf.
- window_size=(left, right): how many keys to the left and right of its position a query sees; -1: all. With causal,
  right is 0.
- softcap: c > 0 replaces each scaled logit x by c * tanh(x / c). softmax_scale: None is 1 / sqrt(head_dim).
- alibi_slopes: only those of the ALiBi paper, float32 [num_heads] or [batch, num_heads], and only if no query sees keys
  to its right. Slopes on a GPU are copied to the host, which waits for the GPU.
- s_aux: [num_heads] logits (natural logarithm) that are added to each denominator (attention sinks), as in vLLM's
  flash-attn 3.
- deterministic has no effect, because results are always deterministic. dropout_p must be 0: Quire is for inference.
- return_attn_probs=True returns (out, softmax_lse, None): softmax_lse is float32, with the natural logarithm; the third
  value exists only with dropout. flash_attn_with_kvcache has return_softmax_lse, which returns (out, softmax_lse).

Each function raises ValidationError naming the argument, or UnsupportedError. Results have q's dtype: float16,
bfloat16, and float32 on the CPU. Calls with the same index tensors, as from the layers of a model, share one plan.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch

from quire.alibi import get_alibi_slopes
from quire.compat.flash_attn_cache import Cache, rotated, sizes, tensor_of
from quire.compat.rows import equal_lengths, token_pages
from quire.errors import UnsupportedError, ValidationError
from quire.runtime.attention import Attention, AttentionSpec
from quire.runtime.bits import kv_lens, qo_lens
from quire.runtime.block_tables import check_lengths, indices_of
from quire.runtime.checks import (
    batch_size_of,
    check_flags,
    check_shape,
    check_tensor,
    device_indices,
    float_sinks,
    host_indices,
    scalar,
    to_int32,
)
from quire.runtime.graph import refuse_capture
from quire.runtime.lse_layout import LN2
from quire.runtime.ops import NOT_CAPTURABLE, is_tracing, operator
from quire.runtime.options import PlanOptions, Types, heads, logits_options, split_size
from quire.runtime.replay import replayed
from quire.runtime.schedule import LEAST_TILE, Indices, Lengths
from quire.runtime.workspace import OwnWorkspace
from quire.types import KVLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
Result = Any  #: out, or a tuple of out, softmax_lse and what else was asked for
_ALL = (-1, -1)


class _Scores(TypedDict, total=False):
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: torch.Tensor | None
    s_aux: torch.Tensor | None


class _Keywords(_Scores, total=False):
    dropout_p: float
    deterministic: bool


class _VarlenKeywords(_Keywords, total=False):
    block_table: torch.Tensor | None


class _CacheKeywords(_Scores, total=False):
    k: torch.Tensor | None
    v: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    cache_seqlens: int | torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    block_table: torch.Tensor | None
    rotary_interleaved: bool
    num_splits: int


Source = torch.Tensor | None  #: a tensor that describes a batch


class _Scoring(NamedTuple):
    """The arguments that are not tensors."""

    softmax_scale: float | None
    causal: bool
    left: int  #: keys to the left of a query that it sees; -1: all
    right: int  #: keys to its right; -1: all
    softcap: float
    has_alibi: bool
    num_splits: int = 0

    @classmethod
    def of(
        cls, softmax_scale: float | None, causal: bool, window_size: Window, softcap: float,
        alibi_slopes: torch.Tensor | None, num_heads: int, qo_len: int | None, num_splits: int = 0,
        dropout_p: float = 0.0, deterministic: bool = False,
    ) -> _Scoring:  # fmt: skip
        """Checked; qo_len is None where it differs between requests."""
        check_flags(causal=causal, deterministic=deterministic)
        if scalar(dropout_p, "dropout_p") != 0:
            raise UnsupportedError(f"dropout_p: expected 0, as Quire is for inference only, got {dropout_p}.")
        if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
            raise ValidationError(f"num_splits: expected 0 (any number) or a positive integer, got {num_splits!r}.")
        if softmax_scale is not None:
            softmax_scale = scalar(softmax_scale, "softmax_scale", positive=True)
        softcap = scalar(softcap, "softcap")
        left, right = _window(window_size)
        if alibi_slopes is not None:
            if not (causal or right == 0 or qo_len == 1):
                raise UnsupportedError("alibi_slopes: expected causal=True, as keys to the right have no bias here.")
            _check_slopes(alibi_slopes, num_heads)
        causal = causal or right == 0
        return cls(softmax_scale, causal, left, 0 if causal else right, softcap, alibi_slopes is not None, num_splits)


def _window(window_size: Any) -> Window:
    """One side of window_size, where any negative number means no limit."""
    try:
        left, right = (int(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"window_size: expected (left, right), two integers, got {window_size!r}.") from error
    return max(-1, left), max(-1, right)


def _check_slopes(slopes: Any, num_heads: int) -> None:
    """Refuse other slopes than those of the paper (Press et al., 2022), which the kernels compute themselves."""
    given = check_tensor(slopes, "alibi_slopes")
    if given.dim() not in (1, 2) or given.shape[-1] != num_heads:
        raise ValidationError(
            f"alibi_slopes: expected [num_heads={num_heads}] or [batch, num_heads], got {list(given.shape)}."
        )
    known = get_alibi_slopes(num_heads, "cpu").double()
    if not torch.allclose(given.cpu().double(), known.expand(given.shape), rtol=1e-5, atol=0):
        raise UnsupportedError(
            f"alibi_slopes: expected those of the ALiBi paper for {num_heads} heads, which the kernels compute "
            f"({known[0]:.6g}, {known[1 % num_heads]:.6g}, ...), got other numbers."
        )


@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_attn_probs: Literal[False] = False, **options: Unpack[_Keywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_attn_probs: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_func(*args: Any, **options: Any) -> Result: ...
@replayed
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = _ALL, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, s_aux: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of a batch of requests of equal length.

    q: [batch, seqlen_q, num_heads, head_dim]; k, v: [batch, seqlen_k, num_heads_k, head_dim]. Other arguments and
    errors: at the top of the module. Returns out [batch, seqlen_q, num_heads, head_dim], or (out, softmax_lse [batch,
    num_heads, seqlen_q], None).

    >>> from quire.compat.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(2, 5, 8, 64), torch.randn(2, 20, 2, 64), torch.randn(2, 20, 2, 64)
    >>> flash_attn_func(q, k, v, causal=True, window_size=(7, 0)).shape
    torch.Size([2, 5, 8, 64])
    """
    batch, seqlen_q, num_heads = _check_queries(q)
    check_shape(tensor_of(k, "k"), "k", sizes("batch", batch, "seqlen_k"))
    check_shape(tensor_of(v, "v"), "v", sizes("batch", batch, "seqlen_k", k.shape[1], k.shape[2]))
    scoring = _Scoring.of(
        softmax_scale, causal, window_size, softcap, alibi_slopes, num_heads, seqlen_q, 0, dropout_p, deterministic
    )
    batch_k = equal_lengths(batch, k.shape[1])
    where: tuple[Source, Source, Source, Source] = None, None, batch_k.lens, batch_k.rows
    if all(t.stride(0) == k.shape[1] * t.stride(1) or not t.numel() for t in (k, v)):
        where = equal_lengths(batch, seqlen_q).offsets, batch_k.offsets, None, None
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    out, lse = _attend_equal(q, k, v, where, scoring, s_aux, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


@replayed
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = _ALL, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_func() with keys and values in one tensor: kv [batch, seqlen_k, 2, num_heads_k, head_dim]."""
    k, v = _unpacked(kv, "kv", 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@replayed
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _ALL, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_func() with queries, keys and values in one tensor: qkv [batch, seqlen, 3, num_heads, head_dim]."""
    q, k, v = _unpacked(qkv, "qkv", 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, *,
    return_attn_probs: Literal[False] = False, **options: Unpack[_VarlenKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, *,
    return_attn_probs: Literal[True],
    **options: Unpack[_VarlenKeywords],
) -> tuple[torch.Tensor, torch.Tensor, None]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(*args: Any, **options: Any) -> Result: ...
@replayed
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = _ALL, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None, *, s_aux: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of a batch of requests of different lengths, concatenated in one tensor.

    q: [total_q, num_heads, head_dim]; k, v: [total_k, num_heads_k, head_dim]. cu_seqlens_q, cu_seqlens_k: int32
    [batch + 1], offsets of the requests. If they are on a GPU, they are copied to the host, which waits for the GPU and
    is impossible in the capture of a CUDA graph (PlanError). Rows of q beyond cu_seqlens_q[-1] give zeros.
    max_seqlen_q,
    max_seqlen_k: the length of the longest request; redundant, and checked if the offsets are on the host. block_table:
    int32 [batch, pages]; k and v are then [num_blocks, page_block_size, num_heads_k, head_dim], and cu_seqlens_k has
    the cumulative numbers of tokens in them. Other arguments and errors: at the top of the module. Returns out
    [total_q, num_heads, head_dim], or (out, softmax_lse [num_heads, total_q], None).

    >>> from quire.compat.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(5, 8, 64), torch.randn(30, 2, 64), torch.randn(30, 2, 64)
    >>> cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 5], [0, 20, 30]))
    >>> flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_seqlen_q=4, max_seqlen_k=20, causal=True).shape
    torch.Size([5, 8, 64])
    """
    check_shape(tensor_of(q, "q"), "q", dict.fromkeys(("total_q", "num_heads", "head_dim")))
    pages = ("num_blocks", "page_block_size") if block_table is not None else ("total_k",)
    for tensor, name in ((k, "k"), (v, "v")):
        check_shape(tensor_of(tensor, name), name, dict.fromkeys((*pages, "num_heads_k", "head_dim")))
    scoring = _Scoring.of(
        softmax_scale, causal, window_size, softcap, alibi_slopes, q.shape[1], None, 0, dropout_p, deterministic
    )
    for offsets, most, name in (
        (cu_seqlens_q, max_seqlen_q, "max_seqlen_q"),
        (cu_seqlens_k, max_seqlen_k, "max_seqlen_k"),
    ):
        _check_longest(offsets, most, name)
    out, lse = _new_results(q, v, return_attn_probs)
    _launch(q, k, v, out, lse, s_aux, cu_seqlens_q, cu_seqlens_k, None, block_table, 0, *scoring)
    return (out, lse.t().contiguous(), None) if lse is not None else out


@replayed
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = _ALL, softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_varlen_func() with keys and values in one tensor: kv [total_k, 2, num_heads_k, head_dim]."""
    k, v = _unpacked(kv, "kv", 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@replayed
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = _ALL, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_varlen_func() with all three in one tensor: qkv [total, 3, num_heads, head_dim]."""
    q, k, v = _unpacked(qkv, "qkv", 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    return_softmax_lse: Literal[False] = False, **options: Unpack[_CacheKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, return_softmax_lse: Literal[True],
    **options: Unpack[_CacheKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(*args: Any, **options: Any) -> Result: ...
@replayed
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = _ALL, softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, s_aux: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention over a cache, into which new keys and values are written first.

    q: [batch, seqlen_q, num_heads, head_dim]. k_cache, v_cache: [batch_cache, seqlen_cache, num_heads_k, head_dim]; or
    with block_table, int32 [batch, pages], [num_blocks, page_block_size, num_heads_k, head_dim].
    k, v: [batch, seqlen_new, num_heads_k, head_dim], written to the cache in place, after the tokens of each
    request. cache_seqlens: tokens of each request before that, one number or int32 [batch]; None: all of the cache. If
    it is on a GPU, it is read only there, so the call may be captured in a CUDA graph. Tokens beyond the cache are not
    written; a request with a negative length has no keys and writes none.
    rotary_cos, rotary_sin: [seqlen_rotary, rotary_dim / 2]: k is rotated by its position, and q by its own with causal
    or a window, else by cache_seqlens; rotary_interleaved: True: dims 2 i and 2 i + 1 are a pair; False: i and
    i + rotary_dim / 2. All of them need k.
    cache_batch_idx: int32 [batch], the row of the cache of each request. cache_leftpad: int32 [batch], where the keys
    of each row begin. Both are refused with block_table.
    num_splits: with 1, the keys of a request are never divided; other numbers have no effect. Other arguments and
    errors: at the top of the module. Returns out [batch, seqlen_q, num_heads, head_dim], or (out, softmax_lse [batch,
    num_heads, seqlen_q]).

    >>> from quire.compat.flash_attn import flash_attn_with_kvcache
    >>> q, k, v = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    >>> k_cache, v_cache = torch.zeros(2, 32, 2, 64), torch.zeros(2, 32, 2, 64)
    >>> lens = torch.tensor([0, 7], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True).shape
    torch.Size([2, 1, 8, 64])
    >>> torch.equal(k_cache[1, 7], k[1, 0])
    True
    """
    batch, seqlen_q, num_heads = _check_queries(q)
    check_flags(rotary_interleaved=rotary_interleaved)
    cache = Cache.of(k_cache, v_cache, batch, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    scoring = _Scoring.of(softmax_scale, causal, window_size, softcap, alibi_slopes, num_heads, seqlen_q, num_splits)
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValidationError("k, v and rotary_cos, rotary_sin: expected both of a pair or neither.")
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            moves = scoring.causal or (scoring.left, scoring.right) != _ALL
            q, k = rotated(q, k, cache.lens, rotary_cos, rotary_sin, rotary_interleaved, moves)
        cache = cache.append(k, v)
    elif rotary_cos is not None:
        raise ValidationError("rotary_cos: expected k and v beside it, as keys in the cache are rotated already.")
    lens, pages = (cache.lens, cache.pages) if cache.leftpad is None else cache.without_padding()
    page_k, page_v = cache.tensors if cache.leftpad is None else (token_pages(t) for t in cache.tensors)
    out, lse = _attend_equal(q, page_k, page_v, (None, None, lens, pages), scoring, s_aux, return_softmax_lse)
    return (out, lse) if return_softmax_lse else out


def _attend_equal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: tuple[Source, Source, Source, Source], scoring: _Scoring,
    sinks: torch.Tensor | None, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """out [batch, seqlen_q, num_heads, head_dim], and the lse as FlashAttention has it. `where` is as in _attend()."""
    flat = q.flatten(0, 1)
    out, lse = _new_results(flat, v, return_lse)
    _launch(flat, k, v, out, lse, sinks, *where, q.shape[1], *scoring)
    out = out.view(*q.shape[:3], out.shape[2])
    return out, None if lse is None else lse.view(q.shape[:3]).transpose(1, 2).contiguous()


def _new_results(q: torch.Tensor, v: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_flags(return_lse=return_lse)
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    return out, q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None,
    sinks: torch.Tensor | None, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None,
    seq_lens: torch.Tensor | None, block_table: torch.Tensor | None, qo_len: int, softmax_scale: float | None,
    causal: bool, left: int, right: int, softcap: float, has_alibi: bool, num_splits: int,
) -> None:  # fmt: skip
    """Writes out, and lse in base e. Keys are ragged by cu_seqlens_k, or pages of block_table; of these there are
    seq_lens tokens, or as many as cu_seqlens_k says. There are qo_len queries a request, or as cu_seqlens_q says.
    """
    if q.dtype.itemsize == 1:
        raise UnsupportedError(
            f"q: expected float16 or bfloat16 (float32 on the CPU), got {q.dtype}; convert q, or call "
            f"quire.single_prefill_with_kv_cache() or a wrapper, which take 8-bit queries with their scales."
        )
    page_size = 0 if block_table is None else k.shape[1]
    options = PlanOptions(
        *heads(q.shape[1], k.shape[-2]), q.shape[2], v.shape[-1], Types.of(q.dtype, k.dtype, None),
        logits_options(q.shape[2], softmax_scale, left, softcap, "ALIBI" if has_alibi else "NONE"), causal, page_size,
        split_size(None, num_splits == 1),
    )  # fmt: skip
    has_offsets = cu_seqlens_q is not None and cu_seqlens_q.is_cpu and cu_seqlens_q.numel() > 0
    if not q.shape[0] and not (has_offsets and int(cu_seqlens_q[-1])):  # type: ignore[index]
        return
    batch = _Batch(cu_seqlens_q, cu_seqlens_k, seq_lens, block_table, qo_len, page_size)
    lengths = None if right > 0 else batch.on_device(q, k, (out, lse), options)
    if lengths is not None:
        spec = AttentionSpec(lengths, options)
    else:
        indices = batch.on_host(q.device)
        spec = AttentionSpec(indices, options, _right_window(indices, right, q.device) if right > 0 else None)
    rows = spec.nnz_qo
    if rows > q.shape[0]:
        raise ValidationError(f"cu_seqlens_q: expected offsets up to the {q.shape[0]} rows of q, got {rows}.")
    Attention(spec, KVLayout.NHD, OwnWorkspace(q.device), "auto").run(
        q[:rows], (k, v), out=out[:rows], lse=None if lse is None else lse[:rows], return_lse=False,
        sinks=float_sinks(sinks, "s_aux"), q_scale=None, k_scale=None, v_scale=None,
        window_left=None, enable_pdl=None, lse_unit=LN2,
    )  # fmt: skip
    if rows < q.shape[0]:
        out[rows:].zero_()
        if lse is not None:
            lse[rows:].fill_(-math.inf)


_record = operator(
    """flash_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor? sinks,
       Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seq_lens, Tensor? block_table, SymInt qo_len,
       float? softmax_scale, bool causal, int left, int right, float softcap, bool has_alibi, int num_splits) -> ()""",
    tags=NOT_CAPTURABLE,
)(_attend)


def _launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
    q, k, v = (t if t.stride(-1) == 1 or t.shape[-1] < 2 else t.contiguous() for t in (q, k, v))
    (_record if is_tracing() else _attend)(q, k, v, *rest)


class _Batch(NamedTuple):
    """What describes a batch: see _attend()."""

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seq_lens: torch.Tensor | None
    block_table: torch.Tensor | None
    qo_len: int
    page_size: int

    def on_device(
        self, q: torch.Tensor, k: torch.Tensor, results: tuple[torch.Tensor, torch.Tensor | None], options: PlanOptions
    ) -> Lengths | None:
        """The batch for a plan on the GPU, which the host does not wait for; None if the host has to plan."""
        arrays = self.cu_seqlens_q, self.cu_seqlens_k, self.seq_lens
        if not q.is_cuda or any(t is not None and t.is_cpu for t in arrays):
            return None
        cu_q, cu_k, lens = (
            t if t is None else device_indices(t, name)
            for t, name in zip(arrays, ("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens"), strict=True)
        )
        table = None if self.block_table is None else _rows(self.block_table.to(q.device))
        batch = self._batch_size(cu_q, cu_k, lens, table)
        lengths = Lengths(
            lens, table, self.qo_len, self.page_size, qo_indptr=cu_q, kv_indptr=None if lens is not None else cu_k,
            num_rows=0 if cu_q is None else q.shape[0], num_tokens=0 if table is not None else k.shape[0],
            results=results,
        )  # fmt: skip
        return (
            lengths if batch and lengths.can_be_counted(*LEAST_TILE, options.num_kv_heads, options.group_size) else None
        )

    @staticmethod
    def _batch_size(*arrays: torch.Tensor | None) -> int:
        """The batch size, in which offsets, lengths and tables must agree."""
        names, batch = ("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table"), None
        for i, (name, tensor) in enumerate(zip(names, arrays, strict=True)):
            if tensor is None:
                continue
            size = tensor.shape[0] - (i < 2)
            if batch is not None and size != batch:
                raise ValidationError(f"{name}: expected {batch + (i < 2)} entries, got {list(tensor.shape)}.")
            batch = size
        return batch or 0

    def on_host(self, device: torch.device) -> Indices:
        """Its index arrays; those of a GPU are copied, which waits for it."""
        if any(t is not None and not t.is_cpu for t in self[:3]):
            refuse_capture("a call whose lengths the host must know", device)
        indptr = None if self.cu_seqlens_q is None else host_indices(self.cu_seqlens_q, "cu_seqlens_q")
        if self.block_table is None:
            assert indptr is not None and self.cu_seqlens_k is not None
            batch = batch_size_of(indptr, "cu_seqlens_q")
            return Indices(batch, indptr, 0, host_indices(self.cu_seqlens_k, "cu_seqlens_k", batch + 1), None, None, 1)
        if self.seq_lens is None:
            assert self.cu_seqlens_k is not None
            lens = host_indices(self.cu_seqlens_k, "cu_seqlens_k").diff()
        else:
            lens = self.seq_lens.cpu().clamp(min=0)
        if indptr is not None:
            check_shape(indptr, "cu_seqlens_q", {"batch + 1": lens.shape[0] + 1})
        check_shape(self.block_table, "block_table", {"batch": lens.shape[0], "pages": None})
        check_lengths(lens, self.block_table.shape[1], self.page_size, 2**31 - 1, "2^31 - 1")
        return indices_of(_rows(self.block_table), lens, indptr, self.qo_len, self.page_size)


def _rows(table: torch.Tensor) -> torch.Tensor:
    table = to_int32(table, "block_table")
    return table if table.stride(1) == 1 else table.contiguous()


def _right_window(indices: Indices, right: int, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, flat; None if no query has as many to its right: the first one has qo - 1."""
    lens = list(zip(qo_lens(indices), kv_lens(indices), strict=True))
    if all(right >= qo - 1 or not kv for qo, kv in lens):
        return None
    longest = max(max(pair) for pair in lens)
    at = torch.arange(longest, dtype=torch.int32, device=device)
    return torch.cat([(at[:kv] <= (at[:qo] + (kv - qo + right))[:, None]).flatten() for qo, kv in lens])


def _check_queries(q: Any) -> tuple[int, int, int]:
    """batch, seqlen_q and num_heads."""
    check_shape(tensor_of(q, "q"), "q", dict.fromkeys(("batch", "seqlen_q", "num_heads", "head_dim")))
    return q.shape[0], q.shape[1], q.shape[2]


def _unpacked(tensor: Any, name: str, dims: int, count: int) -> tuple[torch.Tensor, ...]:
    """The tensors that lie in one, which has `dims` dimensions, the third of the last `count`."""
    given = tensor_of(tensor, name)
    if given.dim() != dims or given.shape[-3] != count:
        raise ValidationError(f"{name}: expected [..., {count}, num_heads, head_dim], got {list(given.shape)}.")
    return given.unbind(-3)


def _check_longest(offsets: Any, most: int | torch.Tensor, name: str) -> None:
    """max_seqlen only repeats what offsets say: it is compared with them where both lie on the host."""
    if is_tracing():
        return
    if (
        not check_tensor(offsets, name.replace("max_seqlen", "cu_seqlens")).is_cpu
        or offsets.dim() != 1
        or offsets.numel() < 2
    ):
        return
    if isinstance(most, torch.Tensor) and not most.is_cpu:
        return
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValidationError(f"{name.replace('max_seqlen', 'cu_seqlens')}: expected int32, got {offsets.dtype}.")
    longest = int(offsets.diff().max())
    if longest > (given := scalar(most, name)):
        raise ValidationError(f"{name}: expected at least {longest}, as the offsets say, got {given:g}.")
