"""FlashAttention-3's functions and those of its forks in vLLM and SGLang, over Quire's kernels.

    from quire.compat.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

The API is that of https://github.com/Dao-AILab/flash-attention (hopper/flash_attn_interface.py), in its order of
arguments; what vllm.vllm_flash_attn and sgl_kernel.flash_attn add is passed by name. The common arguments, causal,
window_size, softcap and softmax_scale, are those of quire.compat.flash_attn. Beside them:

- attention_chunk: n > 0 divides the keys of a request into chunks of n; a query sees those of its own chunk (Llama 4).
- qv (q_v): [..., num_heads, 512] beside q of 64 dims: logits are q . k + qv . v, over latents (MLA) k [..., 1, 64] and
  v [..., 1, 512]. softmax_scale defaults to 1 / sqrt(64 + 512). Fewer dims and more heads of keys cost a copy of them.
- q_descale, k_descale, v_descale: float32 [batch, num_heads_k], factors of q, k and v; for inputs of 16 bits, too. With
  q of 8 bits the result is bfloat16. Tensors that were expanded from one number cost nothing in paged calls on a GPU.
- sinks (s_aux, learnable_sink): [num_heads] logits (natural logarithm) that are added to each denominator.
- out: where the result is written. return_softmax_lse and return_attn_probs: True returns (out, softmax_lse), float32
  in natural logarithms: [num_heads, total_q], or [batch, num_heads, seqlen_q] where q has four dimensions.
- num_splits: with 1, the keys of a request are never divided; other numbers have no effect.
- scheduler_metadata, pack_gqa, sm_margin, fa_version, ver and deterministic are checked and have no effect: they tune
  FlashAttention's kernels. dropout_p must be 0. alibi_slopes: as in quire.compat.flash_attn.
- cp_world_size, cp_rank, cp_tot_seqused_k: with a page table, key j is key j * cp_world_size + cp_rank of its request,
  which has cp_tot_seqused_k int32 [batch] keys on all ranks. More than one rank is refused beside windows.

Where the host has to know the lengths, for a window to the right or for attention_chunk with causal=False or a window,
it waits for the GPU, and the call cannot be captured in a CUDA graph. Other calls can, after one call outside. Each
function raises ValidationError naming the argument, or UnsupportedError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from quire.compat.flash_attn import _unpacked
from quire.compat.flash_attn_batch import tensor_of
from quire.compat.flash_attn_interface_batch import (
    CacheKeywords,
    Given,
    Keywords,
    Scales,
    ScheduleKeywords,
    VarlenKeywords,
    Window,
    attend,
    attend_equal,
    check_count,
    ragged_tokens,
    the_same,
    with_lse,
)
from quire.compat.flash_attn_tokens import (
    Queries,
    batch_of,
    cache_of,
    cache_queries,
    check_longest,
    equal_rows,
    keys_of,
    used_lengths,
    with_new_tokens,
    with_used_lengths,
)
from quire.engine.checks import check_flags, check_output, check_shape, is_choice
from quire.engine.plan_cache import replayed
from quire.errors import UnsupportedError, ValidationError, teach, unexpected_keyword

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "FA2_AVAILABLE", "FA3_AVAILABLE", "fa_version_unsupported_reason", "flash_attn_combine", "flash_attn_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata",
    "is_fa_version_supported",
]  # fmt: skip

__version__ = "3.0.0"  #: of the API
FA2_AVAILABLE = FA3_AVAILABLE = True  #: as in vllm.vllm_flash_attn
Result = Any  #: out, or (out, softmax_lse)


@replayed
def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, window_size: Window = (-1, -1), attention_chunk: int | None = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False, **forks: Unpack[Keywords],
) -> Result:  # fmt: skip
    """Attention of a batch of requests of equal length.

    q: [batch, seqlen_q, num_heads, head_dim]; k, v: [batch, seqlen_k, num_heads_k, head_dim], where v may have another
    head_dim. Head dims that kernels do not have are padded with zeros. Other arguments and errors: at the top of the
    module. Returns out [batch, seqlen_q, num_heads, head_dim], or (out, softmax_lse [batch, num_heads, seqlen_q]).

    >>> from quire.compat.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(2, 5, 8, 64), torch.randn(2, 20, 2, 64), torch.randn(2, 20, 2, 64)
    >>> flash_attn_func(q, k, v, causal=True, attention_chunk=16).shape
    torch.Size([2, 5, 8, 64])
    """
    queries, keys = equal_rows(q, k, v, qv)
    options = Given(
        q.shape[2], q.shape[1], softmax_scale, causal, window_size, attention_chunk, softcap, num_splits, pack_gqa,
        sm_margin, return_attn_probs, deterministic,
    ).options("flash_attn_func", Keywords, forks)  # fmt: skip
    return attend_equal(q, queries, keys, options, Scales(q_descale, k_descale, v_descale))


@replayed
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: Window = (-1, -1),
    attention_chunk: int | None = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False, **forks: Unpack[Keywords],
) -> Result:  # fmt: skip
    """flash_attn_func() with queries, keys and values in one tensor.

    qkv: [batch, seqlen, 3, num_heads, head_dim], or [batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim] with
    num_heads_q. Returns what flash_attn_func() returns, and raises the same errors.

    >>> flash_attn_qkvpacked_func(torch.randn(2, 30, 12, 64), num_heads_q=8).shape  # 8 + 2 * 2 heads
    torch.Size([2, 30, 8, 64])
    """
    if tensor_of(qkv, "qkv").dim() == 5:
        q, k, v = _unpacked(qkv, "qkv", 5, 3)
    else:
        check_shape(qkv, "qkv", dict.fromkeys(("batch", "seqlen", "num_heads_q + 2 * num_heads_k", "head_dim")))
        heads = check_count(num_heads_q, "num_heads_q")
        rest = qkv.shape[2] - heads
        if not heads or rest < 2 or rest % 2:
            raise ValidationError(f"num_heads_q: expected one that leaves pairs of {qkv.shape[2]} heads, got {heads}.")
        q, k, v = torch.split(qkv, [heads, rest // 2, rest // 2], dim=2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        1, None, deterministic, sm_margin, return_attn_probs, **forks,
    )  # fmt: skip


@replayed
def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, window_size: Window = (-1, -1),
    attention_chunk: int | None = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False, **forks: Unpack[VarlenKeywords],
) -> Result:  # fmt: skip
    """Attention of a batch of requests of different lengths, concatenated in one tensor.

    q: [total_q, num_heads, head_dim], with offsets cu_seqlens_q int32 [batch + 1]. Keys and values are

    - k, v [total_k, num_heads_k, head_dim] with offsets cu_seqlens_k int32 [batch + 1],
    - or with block_table (page_table) int32 [batch, pages], pages [num_blocks, page_block_size, num_heads_k,
      head_dim] of any size, and seqused_k or cu_seqlens_k says how many tokens each request has,
    - or without both, [batch, seqlen_k, num_heads_k, head_dim].

    seqused_q, seqused_k: int32 [batch], how many queries and keys of each request are used; the other queries give
    zeros. max_seqlen_q, max_seqlen_k: the length of the longest request; redundant, and checked where the host sees the
    offsets. Forks have other orders: pass arguments behind v by name. Head dims of ragged keys are padded as in
    flash_attn_func(). Other arguments and errors: at the top of the module. Returns out [total_q, num_heads, head_dim],
    or (out, softmax_lse [num_heads, total_q]).

    >>> from quire.compat.flash_attn_interface import flash_attn_varlen_func
    >>> q, (k, v) = torch.randn(5, 8, 64), torch.randn(2, 6, 16, 2, 64)  # six pages of 16 tokens
    >>> cu_seqlens_q, seqused_k = torch.tensor([0, 1, 5]).int(), torch.tensor([20, 30]).int()
    >>> block_table = torch.tensor([[4, 0], [2, 5]]).int()
    >>> out, lse = flash_attn_varlen_func(
    ...     q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=4, max_seqlen_k=30, seqused_k=seqused_k,
    ...     block_table=block_table, causal=True, fa_version=3, return_softmax_lse=True,
    ... )
    >>> out.shape, lse.shape
    (torch.Size([5, 8, 64]), torch.Size([8, 5]))
    """
    check_shape(tensor_of(q, "q"), "q", dict.fromkeys(("total_q", "num_heads", "head_dim")))
    batch = batch_of(cu_seqlens_q)
    qv, _ = the_same({"qv": qv, "q_v": forks.get("q_v")})
    options = Given(
        q.shape[1], 1 if is_choice(max_seqlen_q, (1,)) else None, softmax_scale, causal, window_size, attention_chunk,
        softcap, num_splits, pack_gqa, sm_margin, return_attn_probs, deterministic,
    ).options("flash_attn_varlen_func", VarlenKeywords, forks)  # fmt: skip
    if qv is not None and options.returns_lse and 4 in (forks.get("fa_version"), forks.get("ver")):
        raise UnsupportedError(
            "fa_version: expected 3 beside q_v and an lse, whose dimensions FA4 has in another order."
        )
    for offsets, most, name in (
        (cu_seqlens_q, max_seqlen_q, "max_seqlen_q"),
        (cu_seqlens_k, max_seqlen_k, "max_seqlen_k"),
    ):
        if offsets is not None and most is not None:
            check_longest(offsets, most, name)
    table, name = the_same({"block_table": forks.get("block_table"), "page_table": forks.get("page_table")})
    used_q, used_k = used_lengths(seqused_q, "seqused_q", batch), used_lengths(seqused_k, "seqused_k", batch)
    keys = keys_of(k, v, batch, cu_seqlens_k, used_k, table, name)
    if qv is not None and keys.table is None:
        keys = ragged_tokens(keys, k.shape[0] if max_seqlen_k is None else int(max_seqlen_k))
    queries, keys = with_used_lengths(Queries(q, qv, batch, 0, cu_seqlens_q), keys, used_q, used_k)
    out, lse = attend(queries, keys, options, Scales(q_descale, k_descale, v_descale))
    return with_lse(out, lse)


@replayed
def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, qv: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None, max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int | None = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: torch.Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
    **forks: Unpack[CacheKeywords],
) -> Result:  # fmt: skip
    """Attention over a cache, into which new keys and values are written first.

    q: [batch, seqlen_q, num_heads, head_dim], or with offsets cu_seqlens_q int32 [batch + 1], [total_q, num_heads,
    head_dim]. k_cache, v_cache: [batch_cache, seqlen_cache, num_heads_k, head_dim]; or with page_table (block_table),
    int32 [batch, pages], [num_blocks, page_block_size, num_heads_k, head_dim].
    k, v: [batch, seqlen_new, num_heads_k, head_dim], or with offsets cu_seqlens_k_new int32 [batch + 1],
    [total_k_new, num_heads_k, head_dim]: written to the cache in place, after the tokens of each request.
    cu_seqlens_k_new without k has no effect. cache_seqlens: tokens of each request before that, one number or int32
    [batch]; None: all of the cache. Where it is on a GPU, it is read only there.
    rotary_cos, rotary_sin: [seqlen_rotary, rotary_dim / 2]: k is rotated by its position, and q by its own with causal
    or a window, else by the first new one. rotary_seqlens int32 [batch]: that position; None: cache_seqlens. Without
    rotary_cos it has no effect. rotary_interleaved: True: dims 2 i and 2 i + 1 are a pair; False: i and i +
    rotary_dim / 2.
    cache_batch_idx: int32 [batch], the row of the cache, or of page_table, of each request. cache_leftpad: int32
    [batch], where the keys of each request begin. max_seqlen_q: redundant beside cu_seqlens_q. Other arguments and
    errors: at the top of the module. Returns out in q's shape, with the head_dim of v, or (out, softmax_lse).

    >>> from quire.compat.flash_attn_interface import flash_attn_with_kvcache
    >>> q, (k_cache, v_cache) = torch.randn(5, 8, 64), torch.zeros(2, 4, 16, 2, 64)  # four pages of 16 tokens
    >>> k, v, cu_seqlens = torch.randn(5, 2, 64), torch.randn(5, 2, 64), torch.tensor([0, 1, 5]).int()
    >>> flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([0, 7]).int(), cu_seqlens_q=cu_seqlens,
    ...     cu_seqlens_k_new=cu_seqlens, max_seqlen_q=4, page_table=torch.tensor([[3], [1]]).int(), causal=True,
    ... ).shape
    torch.Size([5, 8, 64])
    >>> torch.equal(k_cache[1, 7], k[1])
    True
    """
    table, name = the_same({"page_table": page_table, "block_table": forks.get("block_table")})
    qv, _ = the_same({"qv": qv, "q_v": forks.get("q_v")})
    check_flags(rotary_interleaved=rotary_interleaved)
    queries = cache_queries(q, qv, cu_seqlens_q, max_seqlen_q)
    options = Given(
        q.shape[-2], queries.qo_len or (1 if is_choice(max_seqlen_q, (1,)) else None), softmax_scale, causal,
        window_size, attention_chunk, softcap, num_splits, pack_gqa, sm_margin, return_softmax_lse,
    ).options(
        "flash_attn_with_kvcache", CacheKeywords, {**forks, "scheduler_metadata": scheduler_metadata}
    )  # fmt: skip
    cache, padding = cache_of(
        k_cache, v_cache, queries.batch, cache_seqlens, cache_batch_idx, cache_leftpad, table, name
    )
    begins = used_lengths(rotary_seqlens, "rotary_seqlens", queries.batch)
    queries, keys = with_new_tokens(
        queries, cache, padding, (k, v), cu_seqlens_k_new, (rotary_cos, rotary_sin, rotary_interleaved), begins,
        options.is_local, name,
    )  # fmt: skip
    scales = Scales(q_descale, k_descale, v_descale)
    if cu_seqlens_q is None:
        return attend_equal(q, queries, keys, options, scales)
    return with_lse(*attend(queries, keys, options, scales))


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The attention over all keys from results over disjoint parts of them.

    out_partial: [num_splits, batch, seqlen, num_heads, head_dim], or without batch; lse_partial: float32, the same
    without head_dim, natural logarithms. out: where the result is written. out_dtype: of the result; None:
    out_partial's. Returns (out [batch, seqlen, num_heads, head_dim], lse float32 [batch, seqlen, num_heads]). Raises
    ValidationError naming the argument.

    >>> from quire.compat.flash_attn_interface import flash_attn_combine
    >>> out, lse = flash_attn_combine(torch.randn(3, 2, 5, 8, 64), torch.randn(3, 2, 5, 8))
    >>> out.shape, lse.shape
    (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 8]))
    """
    dims: tuple[str, ...] = ("num_splits", "batch", "seqlen", "num_heads", "head_dim")
    dims = dims if tensor_of(out_partial, "out_partial").dim() != 4 else (dims[0], *dims[2:])
    check_shape(out_partial, "out_partial", dict.fromkeys(dims))
    check_shape(
        tensor_of(lse_partial, "lse_partial"), "lse_partial",
        dict(zip(dims[:-1], out_partial.shape[:-1], strict=True)),
    )  # fmt: skip
    if lse_partial.dtype is not torch.float32:
        raise ValidationError(f"lse_partial: expected dtype torch.float32, got {lse_partial.dtype}.")
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - lse).nan_to_num(0.0)[..., None]
    result = (out_partial.float().masked_fill(weights == 0, 0.0) * weights).sum(0).to(dtype)
    if out is None:
        return result, lse
    check_shape(check_output(out, "out"), "out", dict(zip(dims[1:], result.shape, strict=True)))
    if out.dtype is not dtype:
        raise ValidationError(f"out: expected out_dtype={dtype}, got {out.dtype}.")
    return out.copy_(result), lse


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int | None = None,
    num_heads_kv: int | None = None, headdim: int | None = None, cache_seqlens: torch.Tensor | None = None,
    qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_size: int | None = None, max_seqlen_k_new: int = 0,
    causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int | None = 0, has_softcap: bool = False,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0, **forks: Unpack[ScheduleKeywords],
) -> torch.Tensor:  # fmt: skip
    """What engines compute once per step and pass as scheduler_metadata: int32 [1], which has no effect.

    Quire's own schedule is made on the device in each call. Of the arguments, cache_seqlens [batch_size] says where
    the result lies; the others are FlashAttention's, and num_heads, num_heads_k are SGLang's names of two of them.
    Raises ValidationError if cache_seqlens is no tensor, or batch_size no number of requests.

    >>> get_scheduler_metadata(2, 1, 30, 8, 2, 64, torch.tensor([20, 30]).int()).shape
    torch.Size([1])
    """
    for name in forks:
        if name not in ScheduleKeywords.__optional_keys__:
            raise unexpected_keyword("get_scheduler_metadata", name)
    del qkv_dtype, headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, page_size, max_seqlen_k_new, causal
    del max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, window_size, attention_chunk, has_softcap
    del num_splits, pack_gqa, sm_margin, forks
    check_count(batch_size, "batch_size")
    return torch.zeros(1, dtype=torch.int32, device=tensor_of(cache_seqlens, "cache_seqlens").device)


def is_fa_version_supported(fa_version: int, device: Any = None) -> bool:
    """Whether this module has the functions of that version: 2 and 3, on all devices. ValidationError: as below.

    >>> is_fa_version_supported(3), is_fa_version_supported(4)
    (True, False)
    """
    return fa_version_unsupported_reason(fa_version, device) is None


def fa_version_unsupported_reason(fa_version: int, device: Any = None) -> str | None:
    """Why is_fa_version_supported() says no; None where it says yes. ValidationError for versions other than 2, 3, 4.

    >>> fa_version_unsupported_reason(4)
    "FA4's keywords (score_mod, mask_mod) are those of quire.flex_attention()"
    """
    del device
    if not is_choice(fa_version, (2, 3, 4)):
        raise ValidationError(f"fa_version: expected 2, 3 or 4, got {fa_version!r}.")
    return "FA4's keywords (score_mod, mask_mod) are those of quire.flex_attention()" if fa_version == 4 else None


teach(globals(), __all__)
