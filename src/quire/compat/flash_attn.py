"""FlashAttention's functions, with its signatures and semantics, over Quire's kernels.

    from quire.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

The API is that of flash-attn 2 (https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py). Common to all
functions:

- q is [..., num_heads, head_dim], k and v are [..., num_heads_k, head_dim]; num_heads is a multiple of num_heads_k. The
  head_dim of v may differ; the result has the head_dim of v.
- causal: the last query sees the last key (bottom-right). Queries that see no key give zeros, and an lse of -inf.
- window_size=(left, right): how many keys to the left and right of its position a query sees; -1: all. With causal,
  right is 0.
- softcap: c > 0 replaces each scaled logit x by c * tanh(x / c); 0 or None: no cap. softmax_scale: None is
  1 / sqrt(head_dim).
- head_dim: from 1 to 256. Where kernels do not have it, as for 59, q, k and v are copied and padded with zeros; so is a
  whole cache.
- alibi_slopes: float32 [num_heads] or [batch, num_heads]: a slope times the distance of query and key, to either side,
  is subtracted from the logit, behind the cap. Those of the ALiBi paper cost least if they lie on the host.
- s_aux: [num_heads] logits (natural logarithm) that are added to each denominator (attention sinks), as in vLLM's
  flash-attn 3.
- deterministic has no effect, because results are always deterministic. dropout_p must be 0: Quire is for inference.
- return_attn_probs=True returns (out, softmax_lse, None): softmax_lse is float32, with the natural logarithm; the third
  value exists only with dropout. flash_attn_with_kvcache has return_softmax_lse, which returns (out, softmax_lse).

Each function raises ValidationError naming the argument, or UnsupportedError. Results have q's dtype: float16,
bfloat16, and float32 on the CPU. Calls with the same index tensors, as from the layers of a model, share one plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch

from quire.compat.flash_attn_batch import Scoring, Window, tensor_of
from quire.compat.flash_attn_interface_batch import Options, attend, attend_equal, with_lse
from quire.compat.flash_attn_tokens import (
    Queries,
    batch_of,
    cache_of,
    cache_queries,
    check_capacity,
    check_longest,
    equal_rows,
    keys_of,
    used_lengths,
    with_new_tokens,
    with_used_lengths,
)
from quire.engine.checks import check_flags, check_shape, number
from quire.engine.plan_cache import replayed
from quire.errors import UnsupportedArgumentError, UnsupportedError, ValidationError, teach

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_unpadded_func",
    "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]  # fmt: skip

__version__ = "2.8.3"  #: of the API
Result = Any  #: out, or a tuple of out, softmax_lse and what else was asked for


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
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    s_aux: torch.Tensor | None = None,
) -> Result: ...  # fmt: skip
@replayed
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    s_aux: torch.Tensor | None = None,
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
    queries, keys = equal_rows(q, k, v)
    options = _options(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, 0, dropout_p, deterministic, s_aux,
        return_attn_probs,
    )  # fmt: skip
    found = attend_equal(q, queries, keys, options)
    return (*found, None) if return_attn_probs else found


@replayed
def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_func() with keys and values in one tensor: kv [batch, seqlen_k, 2, num_heads_k, head_dim].

    >>> flash_attn_kvpacked_func(torch.randn(2, 5, 8, 64), torch.randn(2, 30, 2, 2, 64), causal=True).shape
    torch.Size([2, 5, 8, 64])
    """
    k, v = _unpacked(kv, "kv", 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@replayed
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_func() with queries, keys and values in one tensor: qkv [batch, seqlen, 3, num_heads, head_dim].

    >>> flash_attn_qkvpacked_func(torch.randn(2, 30, 3, 8, 64)).shape
    torch.Size([2, 30, 8, 64])
    """
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
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None, *, s_aux: torch.Tensor | None = None,
) -> Result: ...  # fmt: skip
@replayed
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor, max_seqlen_k: int | torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None, *, s_aux: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention of a batch of requests of different lengths, concatenated in one tensor.

    q: [total_q, num_heads, head_dim]; k, v: [total_k, num_heads_k, head_dim]. cu_seqlens_q, cu_seqlens_k: int32
    [batch + 1], offsets of the requests. If they are on a GPU, they are read only there, and after one call outside a
    call may be captured in a CUDA graph; with a window to the right the host waits for them, which no capture allows
    (PlanError). Rows of q beyond cu_seqlens_q[-1] give zeros. max_seqlen_q, max_seqlen_k: the length of the longest
    request; redundant, and checked if the offsets are on the host. block_table: int32 [batch, pages]; k and v are then
    [num_blocks, page_block_size, num_heads_k, head_dim], and cu_seqlens_k has the cumulative numbers of tokens in
    them. Other arguments and errors: at the top of the module. Returns out
    [total_q, num_heads, head_dim], or (out, softmax_lse [num_heads, total_q], None).

    >>> from quire.compat.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(5, 8, 64), torch.randn(30, 2, 64), torch.randn(30, 2, 64)
    >>> cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 5], [0, 20, 30]))
    >>> flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_seqlen_q=4, max_seqlen_k=20, causal=True).shape
    torch.Size([5, 8, 64])
    """
    check_shape(tensor_of(q, "q"), "q", dict.fromkeys(("total_q", "num_heads", "head_dim")))
    batch = batch_of(cu_seqlens_q)
    options = _options(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, 0, dropout_p, deterministic, s_aux,
        return_attn_probs,
    )  # fmt: skip
    check_longest(cu_seqlens_q, max_seqlen_q, "max_seqlen_q")
    check_longest(cu_seqlens_k, max_seqlen_k, "max_seqlen_k")
    keys = keys_of(k, v, batch, cu_seqlens_k, None, block_table, "block_table")
    found = with_lse(*attend(Queries(q, None, batch, 0, cu_seqlens_q), keys, options))
    return (*found, None) if return_attn_probs else found


@replayed
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
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
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_varlen_func() with all three in one tensor: qkv [total, 3, num_heads, head_dim].

    >>> flash_attn_varlen_qkvpacked_func(torch.randn(9, 3, 8, 64), torch.tensor([0, 4, 9]).int(), 5).shape
    torch.Size([9, 8, 64])
    """
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
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, s_aux: torch.Tensor | None = None,
) -> Result: ...  # fmt: skip
@replayed
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, s_aux: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """Attention over a cache, into which new keys and values are written first.

    q: [batch, seqlen_q, num_heads, head_dim]. k_cache, v_cache: [batch_cache, seqlen_cache, num_heads_k, head_dim]; or
    with block_table, int32 [batch, pages], [num_blocks, page_block_size, num_heads_k, head_dim].
    k, v: [batch, seqlen_new, num_heads_k, head_dim], written to the cache in place, after the tokens of each
    request. cache_seqlens: tokens of each request before that, one number or int32 [batch]; None: all of the cache.
    Where it is on a GPU, the first call with tensors of such shapes waits for it, to compare it with block_table, and
    others do not; a call may be captured in a CUDA graph. Tokens beyond the cache are not written; a request with a
    negative length has no keys and writes none.
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
    queries = cache_queries(q, None, None, None)
    check_flags(rotary_interleaved=rotary_interleaved)
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        name = "cache_leftpad" if cache_batch_idx is None else "cache_batch_idx"
        raise ValidationError(f"{name}: expected None beside block_table, which says where keys are.")
    cache, padding = cache_of(
        k_cache, v_cache, queries.batch, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, "block_table"
    )
    if block_table is not None:
        new = k.shape[1] if isinstance(k, torch.Tensor) and k.dim() > 1 else 0
        shapes = q.shape, k_cache.shape, cache.pages.shape, new
        check_capacity(cache.lens, cache.pages.shape[1] * k_cache.shape[1], shapes, new)
    options = _options(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits, s_aux=s_aux,
        return_lse=return_softmax_lse,
    )  # fmt: skip
    queries, keys = with_new_tokens(
        queries, cache, padding, (k, v), None, (rotary_cos, rotary_sin, rotary_interleaved), None, options.is_local,
        "block_table",
    )  # fmt: skip
    return attend_equal(q, queries, keys, options)


def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """flash_attn_func() as ring attention and diffusers call it: (out, softmax_lse, S_dmask, rng_state), of which the
    last two, which only dropout has, are empty. return_softmax has no effect.
    """
    check_flags(return_softmax=return_softmax)
    window = window_size_left, window_size_right
    out, lse, _ = flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, return_attn_probs=True
    )
    return out, lse, q.new_empty(0), q.new_empty(0, dtype=torch.int64)


@replayed
def _varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    block_table: torch.Tensor | None, seqused_k: torch.Tensor | None, softmax_scale: float, causal: bool,
    window: Window, softcap: float, alibi_slopes: torch.Tensor | None, num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_shape(tensor_of(q, "q"), "q", dict.fromkeys(("total_q", "num_heads", "head_dim")))
    batch = batch_of(cu_seqlens_q)
    options = _options(q, softmax_scale, causal, window, softcap, alibi_slopes, num_splits, return_lse=True)
    used = used_lengths(seqused_k, "seqused_k", batch)
    keys = keys_of(k, v, batch, cu_seqlens_k, used, block_table, "block_table")
    queries, keys = with_used_lengths(Queries(q, None, batch, 0, cu_seqlens_q), keys, None, used)
    found: tuple[torch.Tensor, torch.Tensor] = with_lse(*attend(queries, keys, options))
    return found


def _flash_attn_varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, return_softmax: bool = False, block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None, zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """flash_attn_varlen_func() as ring attention calls it: see _flash_attn_forward(). seqused_k: int32 [batch], how
    many keys of each request are used. zero_tensors has no effect: all of a result is written.
    """
    if leftpad_k is not None:
        raise UnsupportedArgumentError("leftpad_k: expected None; flash_attn_with_kvcache() has cache_leftpad.")
    if num_splits > 1:
        raise UnsupportedError(f"num_splits > 1 is not supported: expected 0 or 1, got {num_splits}.")
    if number(dropout_p, "dropout_p"):
        raise UnsupportedError(f"dropout_p: expected 0, as Quire is for inference only, got {dropout_p}.")
    check_flags(return_softmax=return_softmax, zero_tensors=zero_tensors)
    check_longest(cu_seqlens_q, max_seqlen_q, "max_seqlen_q")
    if cu_seqlens_k is not None:
        check_longest(cu_seqlens_k, max_seqlen_k, "max_seqlen_k")
    out, lse = _varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, num_splits,
    )  # fmt: skip
    return out, lse, q.new_empty(0), q.new_empty(0, dtype=torch.int64)


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward


def flash_attn_unpadded_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, return_attn_probs: bool = False, deterministic: bool = False,
) -> Result:  # fmt: skip
    """flash_attn_varlen_func() by its name in FlashAttention 1, with the arguments of that time."""
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def _options(
    q: torch.Tensor, softmax_scale: float | None, causal: bool, window: Window, softcap: float | None,
    alibi_slopes: torch.Tensor | None, num_splits: int, dropout_p: float = 0.0, deterministic: bool = False,
    s_aux: torch.Tensor | None = None, return_lse: bool = False,
) -> Options:  # fmt: skip
    """Checked."""
    if q.dtype.itemsize == 1:
        raise UnsupportedError(
            f"q: expected float16 or bfloat16 (float32 on the CPU), got {q.dtype}; convert q, or call "
            f"quire.single_prefill_with_kv_cache() or a wrapper, which take 8-bit queries with their scales."
        )
    check_flags(return_lse=return_lse)
    scoring = Scoring.of(
        softmax_scale, causal, window, softcap, alibi_slopes, q.shape[-2], num_splits, dropout_p, deterministic
    )
    return Options(scoring, 0, s_aux, None, return_lse)


def _unpacked(tensor: Any, name: str, dims: int, count: int) -> tuple[torch.Tensor, ...]:
    """The tensors that lie in one, which has `dims` dimensions, the third of the last `count`."""
    given = tensor_of(tensor, name)
    if given.dim() != dims or given.shape[-3] != count:
        raise ValidationError(f"{name}: expected [..., {count}, num_heads, head_dim], got {list(given.shape)}.")
    return given.unbind(-3)


teach(globals(), __all__)
