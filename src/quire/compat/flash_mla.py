"""FlashMLA's functions, with its signatures and semantics, over Quire's kernels of multi-head latent attention (MLA).

    from quire.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

The API is that of https://github.com/deepseek-ai/FlashMLA (flash_mla_interface.py). Keys have 576 dims, of which the
first 512 are the value, or 512, which all are. A cache has them in the queries' type, float16 or bfloat16 (on the CPU
also float32), as float8_e4m3fn, or, with bfloat16 queries, in FlashMLA's rows:

| name | dims | bytes of a token | |
|---|---|---|---|
| V32 | 576 | 656 | 512 float8_e4m3fn, a float32 scale for each 128 of them, 64 bfloat16 |
| V32_NO_ROPE | 512 | 528 | 512 float8_e4m3fn, a float32 scale for each 128 of them |
| V4 | 512 | 584 | 448 float8_e4m3fn, 64 bfloat16; behind a page's tokens 8 bytes for each: 7 scales float8_e8m0fnu |

Any number of heads, page size and distance of pages is supported. All functions may be captured in a CUDA graph. An lse
is a natural logarithm, and +inf if the query sees no token. attn_sink: float32 [num_heads]; results are multiplied by
exp(lse) / (exp(lse) + exp(attn_sink)), also where that is infinite, and the lse is that without sinks. Each function
raises ValidationError naming the argument, or UnsupportedError.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quire.cache.latents import (
    FORMATS,
    LATENT_DIM,
    Chosen,
    cached_parts,
    check_chosen,
    format_of,
    gather_chosen,
    latent_parts,
)
from quire.calls import Scale
from quire.calls.decode import TableCall
from quire.compat.flash_attn import flash_attn_varlen_func as _varlen
from quire.engine.batch import row_indices, row_lengths, selected_keys
from quire.engine.checks import (
    check_flags,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    flag,
    is_choice,
    number,
    refuse,
)
from quire.engine.device import OwnWorkspace, max_ctas
from quire.engine.plan_cache import replayed
from quire.engine.schedule import Lengths, ScheduleCache
from quire.engine.tensors import LN2
from quire.errors import UnsupportedError, ValidationError, teach

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]

_PLAIN = Scale(1.0), Scale(1.0)
_REST = 64  #: dims of a key beside the latent, for kernels


class FlashMLASchedMeta(ScheduleCache):
    """The tile_scheduler_metadata of get_mla_metadata(). It keeps the schedules of sparse calls; what FlashMLA keeps in
    it is accepted and not needed.
    """

    def __init__(
        self, have_initialized: bool = False, config: Any = None, tile_scheduler_metadata: Any = None,
        num_splits: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.have_initialized, self.config = have_initialized, config
        self.tile_scheduler_metadata, self.num_splits = tile_scheduler_metadata, num_splits


def get_mla_metadata(*_args: Any, **_options: Any) -> tuple[FlashMLASchedMeta, None]:
    """The tile_scheduler_metadata and num_splits of flash_mla_with_kvcache(), for the layers and steps of a model.

    On a Hopper GPU the first call with `indices` and without topk_length keeps its schedule in the object, and calls of
    the same shapes use it, also in CUDA graphs. Other calls plan anew, because tensors whose values may change decide.
    Calls and graphs that share the object must not overlap on different streams. FlashMLA's arguments are accepted and
    not needed.
    """
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    cache_seqlens: torch.Tensor, *_args: Any, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of the shapes that FlashMLA's function of this name gives, int32 [SMs, 8] and [batch + 1], for callers
    that keep them in buffers. Quire's kernels take any, and do not read them.

    >>> get_mla_decoding_metadata(torch.tensor([21, 64]).int(), 16, 1)[1].shape
    torch.Size([3])
    """
    shape = max_ctas(check_tensor(cache_seqlens, "cache_seqlens").device, 1), 8
    parts = torch.zeros(shape, dtype=torch.int32, device=cache_seqlens.device)
    return parts, torch.arange(cache_seqlens.shape[0] + 1, dtype=torch.int32, device=cache_seqlens.device)


@replayed
def flash_mla_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None,
    head_dim_v: int, tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool = False, indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None, extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None, *, descale_q: Any = None, descale_k: Any = None,
    kv_format: str | None = None, use_legacy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of q [batch, seqlen_q, num_heads, 576 or 512] over k_cache [num_pages, page_size, num_heads_k, numbers
    or bytes of a row].

    block_table [batch, pages] and cache_seqlens [batch], int32: the pages and tokens of each request, whose last
    tokens are the queries if causal=True; otherwise queries see all tokens. The cache may then have several heads, each
    for as many heads of q. Or indices [batch, seqlen_q, topk] int32: the tokens that each query attends to, page *
    page_size + index in the page; indices below 0 and beyond the cache are ignored. topk_length [batch]: how many of
    the indices are used. extra_k_cache, extra_indices_in_kvcache, extra_topk_length: the same of a second cache, whose
    tokens join those of the first. The chosen tokens of V4 rows, and of two caches, are copied before attention.

    softmax_scale: None is 1 / sqrt(dims of q). head_dim_v: 512. is_fp8_kvcache: whether k_cache has 8 bits; not needed
    with descale_q and descale_k, float32 [1], the factors of q and k_cache in float8_e4m3fn, which give bfloat16.
    kv_format: None, or the name of the rows. tile_scheduler_metadata: get_mla_metadata()'s object, which saves sparse
    calls the plan, or None; others, num_splits and use_legacy have no effect.

    Returns (out [batch, seqlen_q, num_heads, 512], softmax_lse float32 [batch, num_heads, seqlen_q]). Raises
    ValidationError naming the argument, or UnsupportedError.

    >>> q, k_cache = torch.randn(2, 1, 16, 576).bfloat16(), torch.randn(6, 64, 1, 576).bfloat16()
    >>> block_table, cache_seqlens = torch.tensor([[4], [2]]).int(), torch.tensor([21, 64]).int()
    >>> out, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, *get_mla_metadata())
    >>> out.shape, lse.shape
    (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
    """
    del num_splits
    check_flags(causal=causal, is_fp8_kvcache=is_fp8_kvcache, use_legacy=use_legacy)
    check_shape(check_tensor(q, "q"), "q", {"batch": None, "seqlen_q": None, "num_heads": None, "head_dim": None})
    factors, has_descales = _descales(descale_q, descale_k, q.device), descale_q is not None
    _check_cache(q, k_cache, is_fp8_kvcache, kv_format, has_descales=has_descales)
    if has_descales:
        q = q.to(torch.bfloat16)
    call = _Call(q, head_dim_v, softmax_scale, attn_sink, factors)
    if indices is None:
        refuse(
            topk_length=topk_length, extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
            extra_topk_length=extra_topk_length,
        )  # fmt: skip
        return call.over_pages(k_cache, block_table, cache_seqlens, causal)
    if causal or block_table is not None or cache_seqlens is not None:
        raise ValidationError("indices: expected neither block_table, cache_seqlens nor causal=True beside them.")
    caches = [_chosen(q, k_cache, indices, topk_length, "")]
    if extra_k_cache is not None:
        _check_cache(q, extra_k_cache, is_fp8_kvcache, kv_format, "extra_k_cache", has_descales=has_descales)
        caches.append(_chosen(q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, "extra_"))
    else:
        refuse(extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length)
    kept = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else None
    out, lse = call.over_tokens(caches, kept)
    return out.view(*q.shape[:-1], LATENT_DIM), lse.view(q.shape[:-1]).transpose(1, 2)


@replayed
def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = LATENT_DIM,
    attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None, indexer_topk: int = 0,
    out: torch.Tensor | None = None, *, use_legacy: bool = False, return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Attention of q [seqlen_q, num_heads, 576 or 512] over the tokens kv [seqlen_kv, 1, as many] that indices
    [seqlen_q, 1, topk] list for each query, or the first topk_length [seqlen_q] of them; indices below 0 or from
    seqlen_kv on are ignored.

    d_v: 512. indexer_topk > 0: the lse of the first so many indices of each query is returned, too; topk_length is then
    None. return_log2_lse=True: lse and max_logits are in base 2. use_legacy has no effect.

    Returns (out [seqlen_q, num_heads, 512], max_logits, lse float32 [seqlen_q, num_heads]) and with indexer_topk the
    lse of the others. max_logits: the largest scaled logit of a row, -inf if the query sees no token. Raises
    ValidationError naming the argument, or UnsupportedError.

    >>> q, kv = torch.randn(2, 16, 576).bfloat16(), torch.randn(100, 1, 576).bfloat16()
    >>> indices = torch.tensor([[[3, 99, -1, -1]], [[0, 1, 2, 3]]]).int()
    >>> [result.shape for result in flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)]
    [torch.Size([2, 16, 512]), torch.Size([2, 16]), torch.Size([2, 16])]
    """
    check_flags(use_legacy=use_legacy, return_log2_lse=return_log2_lse)
    check_shape(check_tensor(q, "q"), "q", {"seqlen_q": None, "num_heads": None, "head_dim": None})
    dims = {"seqlen_kv": None, "num_heads_k": 1, "head_dim": q.shape[2]}
    check_shape(check_tensor(kv, "kv"), "kv", dims)
    scale = number(sm_scale, "sm_scale", positive=True)
    call = _Call(q.unsqueeze(1), d_v, scale, attn_sink, lse_unit=-1.0 if return_log2_lse else -LN2)
    rows = row_indices(indices, (q.shape[0], 1), "indices", q.device)
    lens = row_lengths(topk_length, "topk_length", q.shape[0], 1, None)
    result, both = call.over_tokens([Chosen(kv, rows, lens, "kv")], None, out, max_logits=True)
    lse, most = both.unbind(-1)
    if not indexer_topk:
        return result, most, lse
    if topk_length is not None:
        raise ValidationError(f"topk_length: expected None beside indexer_topk={indexer_topk}, got a tensor.")
    first = rows[:, : check_positive(indexer_topk, "indexer_topk")].contiguous()
    return result, most, lse, call.over_tokens([Chosen(kv, first, None, "kv")], None)[1]


class _Call(NamedTuple):
    """Queries, and what all ways of attention have in common."""

    q: torch.Tensor  #: [batch, seqlen_q, num_heads, dims]
    head_dim_v: int
    scale: float | None
    sink: torch.Tensor | None
    factors: tuple[Scale, Scale] = _PLAIN  #: of q and of keys
    lse_unit: float = -LN2

    def over_pages(
        self, k_cache: torch.Tensor, block_table: Any, cache_seqlens: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense attention."""
        tables, lens = check_tensor(block_table, "block_table"), check_tensor(cache_seqlens, "cache_seqlens")
        check_shape(tables, "block_table", {"batch": self.q.shape[0], "pages": None})
        check_shape(lens, "cache_seqlens", {"batch": self.q.shape[0]})
        own = format_of(k_cache, self.q.shape[3])
        if own is not None and own.dims == LATENT_DIM:
            raise UnsupportedError(
                f"k_cache: expected no rows of {own.row_bytes} bytes ({own.name}) beside block_table; pass `indices`."
            )
        batch, q_len, num_heads, dims = self.q.shape
        heads = k_cache.shape[2]
        if not heads or num_heads % heads:
            raise ValidationError(f"k_cache: expected a divisor of the {num_heads} heads of q, got {heads} heads.")
        q = self.q.reshape(batch, q_len, heads, num_heads // heads, dims).transpose(1, 2)
        cache = k_cache.squeeze(2)
        if heads > 1:  # each with its queries is a request of its own, in pages of its own
            cache, tables = _by_heads(k_cache, tables)
            lens = lens.repeat_interleave(heads)
        most = tables.shape[-1] * k_cache.shape[1]
        if not causal and q_len > 1:  # queries that see all tokens are requests of their own
            tables, lens, q_len = tables.repeat_interleave(q_len, 0), lens.repeat_interleave(q_len), 1
        rows = q.reshape(-1, num_heads // heads, dims)
        out, lse = self._attend(rows, cache, tables, lens, most, q_len, num_kv_heads=heads)
        out = out.view(batch, heads, -1, num_heads // heads, LATENT_DIM).transpose(1, 2)
        lse = lse.view(batch, heads, -1, num_heads // heads).transpose(2, 3)
        return out.reshape(*self.q.shape[:-1], LATENT_DIM), lse.reshape(batch, num_heads, -1)

    def over_tokens(
        self, caches: list[Chosen], kept: FlashMLASchedMeta | None, out: torch.Tensor | None = None,
        max_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Sparse attention: rows of the result, and their lse."""
        rows, (chosen, *others) = self.q.flatten(0, 1), caches
        cache, table, lens = chosen.cache, chosen.indices, chosen.lens
        own = format_of(cache, rows.shape[2])
        if others or (own is not None and own.has_scales_behind):
            cache, table = gather_chosen(caches, rows.shape[2], rows.dtype)
            lens = None
        elif lens is not None:
            lens = row_lengths(lens, "topk_length", rows.shape[0], self.q.shape[1], None)
        keys = selected_keys(
            table, None if lens is None else lens.to(rows.device), cache.shape[0] * cache.shape[1], kept
        )
        return self._attend(rows, cache, *keys, table.shape[1], 1, out=out, is_selected=True, max_logits=max_logits)

    def _attend(
        self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor | Lengths, lens: torch.Tensor | None, most: int,
        q_len: int, *, num_kv_heads: int = 1, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(out, lse) of rows of q."""
        sinks = _checked_sink(self.sink, q, num_kv_heads)
        if check_positive(self.head_dim_v, "head_dim_v") != LATENT_DIM:
            raise UnsupportedError(f"head_dim_v: expected {LATENT_DIM}, got {self.head_dim_v}.")
        if options.get("out") is not None:
            check_output(options["out"], "out")
        factor = self.q.shape[3] ** -0.5 if self.scale is None else number(self.scale, "softmax_scale", positive=True)
        of_q, of_k = self.factors
        result, lse = TableCall.of_latents(
            _query_parts(q), _cache_parts(cache, q), OwnWorkspace(q.device), table, lens, max(1, most),
            Scale(factor).times(of_q).times(of_k), of_k,
            q_len=q_len, return_lse=True, lse_unit=self.lse_unit, sinks=sinks, **options,
        ).attend()  # fmt: skip
        return result, lse


def _query_parts(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of queries that meets values, and the rest: zeros if there is none."""
    if q.shape[2] != LATENT_DIM:
        return latent_parts(q, "q")
    return q, torch.zeros(1, 1, _REST, dtype=q.dtype, device=q.device).expand(*q.shape[:2], _REST)


def _cache_parts(cache: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Latents, the rest of keys, and scales if there are any. Without a rest, it is anything that zeros multiply."""
    if q.shape[2] != LATENT_DIM:
        return cached_parts(cache, "k_cache")
    own = format_of(cache, LATENT_DIM)
    if own is None:
        return cache, cache[..., :_REST]
    numbers, scales = cache[..., : own.latent_dims], cache[..., own.latent_dims :]
    rest = torch.zeros(1, 1, _REST, dtype=q.dtype, device=q.device).expand(*cache.shape[:2], _REST)
    return numbers.view(torch.float8_e4m3fn), rest, scales.view(torch.float32)


def _by_heads(k_cache: torch.Tensor, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of one head, at each multiple of the distance of heads, and their numbers for each request and head."""
    (num_pages, page_size, heads, dims), (page, token, head, _) = k_cache.shape, k_cache.stride()
    if not head or page % head:
        raise ValidationError(
            f"k_cache: expected pages that are a multiple of the distance of heads apart, got {k_cache.stride()}."
        )
    step = page // head
    count = max(0, (num_pages - 1) * step + heads)
    pages = k_cache.as_strided((count, page_size, dims), (head, token, 1))
    numbers = tables.long()[:, None] * step + torch.arange(heads, device=tables.device)[:, None]
    return pages, numbers.clamp(max=2**31 - 1).to(torch.int32).flatten(0, 1)


def _chosen(q: torch.Tensor, cache: Any, indices: Any, lens: Any, prefix: str) -> Chosen:
    """What the queries choose of a cache."""
    name = "indices" if not prefix else f"{prefix}indices_in_kvcache"
    pages = check_chosen(cache, f"{prefix}k_cache", q.shape[3], q.device)
    if lens is not None:
        check_shape(check_tensor(lens, f"{prefix}topk_length"), f"{prefix}topk_length", {"batch": None})
        lens = row_lengths(lens, f"{prefix}topk_length", q.shape[0] * q.shape[1], q.shape[1], None)
        lens = lens.to(q.device).contiguous()
    return Chosen(pages, row_indices(indices, q.shape[:2], name, q.device), lens, f"{prefix}k_cache")


def _check_cache(
    q: torch.Tensor, cache: Any, is_fp8: bool, kv_format: Any, name: str = "k_cache", *, has_descales: bool
) -> None:
    check_shape(
        check_tensor(cache, name), name, {"num_pages": None, "page_size": None, "num_heads_k": None, "row": None}
    )
    dims = q.shape[3]
    if dims not in (LATENT_DIM, LATENT_DIM + _REST):
        raise ValidationError(f"q: expected a head_dim of {LATENT_DIM + _REST} or {LATENT_DIM}, got {list(q.shape)}.")
    own, width = format_of(cache, dims), cache.shape[3]
    if own is None and width != dims:
        known = ", ".join(f"{found.row_bytes} ({found.name})" for found in FORMATS if found.dims == dims)
        raise ValidationError(
            f"{name}: expected rows of {dims} numbers, or of {known} bytes, got {list(cache.shape)} {cache.dtype}."
        )
    if not has_descales and is_fp8 != (cache.element_size() == 1):
        raise ValidationError(f"is_fp8_kvcache: expected {not is_fp8} with {name} of {cache.dtype}, got {is_fp8}.")
    names = tuple(found.name for found in FORMATS)
    if kv_format is not None and not is_choice(kv_format, names):
        raise UnsupportedError(f"kv_format: expected None or one of {', '.join(names)}, got {kv_format!r}.")
    if kv_format is not None and (own is None or own.name != kv_format):
        found = "plain numbers" if own is None else own.name
        raise ValidationError(f"kv_format: expected {found}, as {name} says, got {kv_format!r}.")


def _descales(descale_q: Any, descale_k: Any, device: torch.device) -> tuple[Scale, Scale]:
    """The factors of q and of keys."""
    if (descale_q is None) != (descale_k is None):
        raise ValidationError("descale_q, descale_k: expected both or neither.")
    return (
        Scale.of(descale_q, "descale_q", device, positive=True), Scale.of(descale_k, "descale_k", device, positive=True)
    )  # fmt: skip


def _checked_sink(sink: Any, q: torch.Tensor, num_kv_heads: int) -> torch.Tensor | None:
    if sink is None:
        return None
    check_shape(check_tensor(sink, "attn_sink"), "attn_sink", {"num_heads": q.shape[1] * num_kv_heads})
    check_same_device(sink, "attn_sink", q.device)
    if sink.dtype is not torch.float32:
        raise ValidationError(f"attn_sink: expected dtype torch.float32, got {sink.dtype}.")
    if num_kv_heads > 1:
        raise UnsupportedError(f"attn_sink: expected None with {num_kv_heads} heads of keys, got a tensor.")
    given: torch.Tensor = sink if sink.is_contiguous() else sink.contiguous()
    return given


# ---- Attention of separate keys and values: the prefill of FlashMLA's interface.


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_qo: torch.Tensor, cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int, max_seqlen_kv: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, deterministic: bool = False, is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of requests of different lengths: q [total_q, num_heads, dims], k and v [total_k, num_heads_k, ...].

    As flash_attn_varlen_func() of quire.compat.flash_attn, without gradients; is_varlen has no effect. Returns (out
    [total_q, num_heads, dims of v], lse float32 [total_q, num_heads], contiguous along the queries, -inf for a query
    that sees no key).

    >>> q, k, v = torch.randn(5, 8, 192), torch.randn(30, 8, 192), torch.randn(30, 8, 128)
    >>> cu_q, cu_k = torch.tensor([0, 1, 5]).int(), torch.tensor([0, 20, 30]).int()
    >>> flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 20, causal=True)[0].shape
    torch.Size([5, 8, 128])
    """
    flag(is_varlen, "is_varlen")
    out, lse, _ = _varlen(
        q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal,
        deterministic=deterministic, return_attn_probs=True,
    )  # fmt: skip
    return out, lse.t()


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_qo: torch.Tensor, cu_seqlens_kv: torch.Tensor, max_seqlen_qo: int,
    max_seqlen_kv: int, head_dim_qk: int, *args: Any, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """flash_attn_varlen_func() with values behind keys: kv [total_k, num_heads_k, head_dim_qk + dims of v].

    >>> q, kv, ends = torch.randn(4, 8, 192), torch.randn(9, 8, 192 + 128), torch.tensor([0, 9]).int()
    >>> flash_attn_varlen_kvpacked_func(q, kv, torch.tensor([0, 4]).int(), ends, 4, 9, 192)[0].shape
    torch.Size([4, 8, 128])
    """
    check_shape(check_tensor(kv, "kv"), "kv", dict.fromkeys(("total_k", "num_heads_k", "head_dim_qk + dims of v")))
    k, v = kv[..., : check_positive(head_dim_qk, "head_dim_qk")], kv[..., head_dim_qk:]
    return flash_attn_varlen_func(q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, head_dim_qk: int, *args: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_varlen_func() with queries, keys and values side by side: qkv [total, num_heads, 2 * head_dim_qk +
    dims of v].

    >>> flash_attn_varlen_qkvpacked_func(torch.randn(9, 8, 512), torch.tensor([0, 9]).int(), 9, 192)[0].shape
    torch.Size([9, 8, 128])
    """
    check_shape(check_tensor(qkv, "qkv"), "qkv", dict.fromkeys(("total", "num_heads", "2 * head_dim_qk + dims of v")))
    q, kv = qkv[..., : check_positive(head_dim_qk, "head_dim_qk")], qkv[..., head_dim_qk:]
    return flash_attn_varlen_kvpacked_func(
        q, kv, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, head_dim_qk, *args, **options
    )


teach(globals(), __all__)
