"""Queries, keys and caches of FlashAttention's functions: where they lie, new tokens, rotation and padding."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import torch

from quire.cache.page import append_paged_kv_cache
from quire.cache.rope import apply_rope_with_cos_sin_cache
from quire.calls import check_page_numbers, equal_lengths, row_step, token_pages
from quire.compat.flash_attn_batch import Source, tensor_of
from quire.engine.checks import check_same_device, check_shape, check_tensor, number, to_int32
from quire.engine.device import is_capturing
from quire.engine.operators import is_tracing
from quire.errors import ValidationError
from quire.jit import config

_ANY = 2**31 - 1  #: number of tokens


class Queries(NamedTuple):
    """Rows of q, and which request each belongs to."""

    q: torch.Tensor  #: [rows, num_heads, head_dim]
    qv: torch.Tensor | None  #: [rows, num_heads, head_dim of v]
    batch: int
    qo_len: int  #: of each request, where there are no offsets
    offsets: torch.Tensor | None  #: int32 [batch * num_parts + 1]
    num_parts: int = 1  #: that each request is divided into, of which the first has queries with keys

    def requests(self) -> torch.Tensor:
        """The request of each row; `batch` for rows behind the last offset."""
        return Rows.of(self.offsets, self.batch * self.num_parts, self.qo_len, self.q).request // self.num_parts


class Keys(NamedTuple):
    """Keys and values, ragged or in pages, and where those of each request lie."""

    k: torch.Tensor
    v: torch.Tensor
    offsets: Source  #: int32 [batch + 1]: of ragged keys; of pages cumulative lengths
    lens: Source  #: int32 [batch]
    table: Source  #: int32 [batch, pages]; None: ragged


class Rows(NamedTuple):
    """Where each row of a concatenation stands."""

    request: torch.Tensor  #: [rows]; the number of requests for rows of none
    place: torch.Tensor  #: [rows], in the request

    @classmethod
    def of(cls, offsets: torch.Tensor | None, batch: int, length: int, like: torch.Tensor) -> Rows:
        """Of requests of `length` rows each, or from offsets; `like` has the rows, and is where the result lies."""
        at = torch.arange(like.shape[0], dtype=torch.int32, device=like.device)
        if offsets is None:
            return cls(at // max(1, length), at % max(1, length))
        offsets = offsets.to(like.device).contiguous()
        request = torch.searchsorted(offsets[1:].contiguous(), at, right=True).to(torch.int32)
        return cls(request, at - offsets[request.clamp(max=batch)])


def sizes(
    first: str, rows: int | None, second: str, tokens: int | None = None, num_heads: int | None = None
) -> dict[str, int | None]:
    return {first: rows, second: tokens, "num_heads_k": num_heads, "head_dim": None}


def _index(value: Any, name: str, batch: int, device: torch.device, most: int) -> torch.Tensor:
    """An int32 index tensor on the host, where its numbers are checked, or on `device`."""
    tensor = to_int32(tensor_of(value, name), name)
    check_shape(tensor, name, {"batch": batch})
    if tensor.is_cpu and not is_tracing() and tensor.numel() and int(tensor.max()) > most:
        raise ValidationError(f"{name}: expected at most {most}, got {int(tensor.max())}.")
    if not tensor.is_cpu:
        check_same_device(tensor, name, device)
    return tensor


def check_longest(offsets: Any, most: int | torch.Tensor, name: str) -> None:
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
    if longest > (given := number(most, name)):
        raise ValidationError(f"{name}: expected at least {longest}, as the offsets say, got {given:g}.")


def batch_of(offsets: Any) -> int:
    if not isinstance(offsets, torch.Tensor):
        raise ValidationError(
            f"cu_seqlens_q: expected int32 [batch + 1], got {offsets!r}; forks have other orders of arguments: pass "
            f"those behind v by name."
        )
    check_shape(tensor_of(offsets, "cu_seqlens_q"), "cu_seqlens_q", {"batch + 1": None})
    if not offsets.shape[0]:
        raise ValidationError("cu_seqlens_q: expected [batch + 1] offsets, got none.")
    return offsets.shape[0] - 1


def used_lengths(lens: torch.Tensor | None, name: str, batch: int) -> Any:
    if lens is None:
        return None
    check_shape(tensor_of(lens, name), name, {"batch": batch})
    return to_int32(lens, name)


def flat_qv(qv: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    if qv is None:
        return None
    sizes = dict(zip(("batch", "seqlen_q", "num_heads"), q.shape[:3], strict=True))
    check_shape(tensor_of(qv, "qv"), "qv", {**sizes, "head_dim_v": None})
    return qv.flatten(0, 1)


def rows_of_keys(k: Any, v: Any, batch: int, lens: torch.Tensor | None, is_ragged: bool) -> Keys:
    """Keys [batch, seqlen_k, num_heads_k, head_dim]: ragged where they can be, else a page for each request."""
    sizes: dict[str, int | None] = {"batch": batch, "seqlen_k": None, "num_heads_k": None, "head_dim": None}
    check_shape(tensor_of(k, "k"), "k", sizes)
    check_shape(tensor_of(v, "v"), "v", {**sizes, "seqlen_k": k.shape[1], "num_heads_k": k.shape[2]})
    equal = equal_lengths(batch, k.shape[1])
    is_flat = all(t.stride(0) == k.shape[1] * t.stride(1) or not t.numel() for t in (k, v))
    is_odd = any(t.shape[3] < 32 or t.shape[3] % 8 for t in (k, v))  # to be copied in any case
    if is_ragged and (is_flat or is_odd):
        return Keys(k.flatten(0, 1), v.flatten(0, 1), equal.offsets, None, None)
    return Keys(k, v, None, equal.lens if lens is None else lens, equal.rows)


def equal_rows(q: Any, k: Any, v: Any, qv: torch.Tensor | None = None) -> tuple[Queries, Keys]:
    """Of q, k, v [batch, seqlen, heads, head_dim]."""
    queries = cache_queries(q, qv, None, None)
    keys = rows_of_keys(k, v, queries.batch, None, is_ragged=qv is None)
    if keys.table is None:
        queries = queries._replace(offsets=equal_lengths(queries.batch, queries.qo_len).offsets)
    return queries, keys


def keys_of(
    k: Any, v: Any, batch: int, offsets: torch.Tensor | None, used: torch.Tensor | None, table: Any, name: str
) -> Keys:
    """What flash_attn_varlen_func() is given."""
    if offsets is not None:
        check_shape(tensor_of(offsets, "cu_seqlens_k"), "cu_seqlens_k", {"batch + 1": batch + 1})
        offsets = to_int32(offsets, "cu_seqlens_k")
    if table is None and offsets is None:
        return rows_of_keys(k, v, batch, used, is_ragged=False)
    dims = ("total_k",) if table is None else ("num_blocks", "page_block_size")
    for tensor, of in ((k, "k"), (v, "v")):
        check_shape(tensor_of(tensor, of), of, dict.fromkeys((*dims, "num_heads_k", "head_dim")))
    if table is None:
        return Keys(k, v, offsets, None, None)
    check_shape(tensor_of(table, name), name, {"batch": batch, "pages": None})
    lens = used if used is not None else None if offsets is None else offsets.diff()
    if lens is None:
        raise ValidationError(f"seqused_k: expected it, or cu_seqlens_k, beside {name}; got neither.")
    check_pages(table, lens, k, name)
    return Keys(k, v, None, lens, to_int32(table, name))


def cache_queries(q: Any, qv: Any, offsets: torch.Tensor | None, most: int | None) -> Queries:
    dims = ("batch", "seqlen_q") if offsets is None else ("total_q",)
    check_shape(tensor_of(q, "q"), "q", dict.fromkeys((*dims, "num_heads", "head_dim")))
    if offsets is None:
        return Queries(q.flatten(0, 1), flat_qv(qv, q), q.shape[0], q.shape[1], None)
    batch = batch_of(offsets)
    if most is not None:
        check_longest(offsets, most, "max_seqlen_q")
    return Queries(q, None if qv is None else tensor_of(qv, "qv"), batch, 0, offsets)


class BeyondTableError(ValidationError, RuntimeError):
    """More tokens than a block table has pages for; FlashAttention raises RuntimeError."""


_waited_for: dict[Any, None] = {}  #: shapes of calls whose lengths on a GPU were compared
_MOST_WAITED_FOR = 512


def check_capacity(lens: torch.Tensor, most: int, shapes: Any = None, new: int = 0) -> None:
    """Tokens, together with new ones, are no more than a block table has pages for. With shapes, the first call that
    has them waits for a GPU where lengths lie there.
    """
    waits = shapes is not None and shapes not in _waited_for and not lens.is_cpu and not is_capturing(lens.device)
    if is_tracing() or not lens.numel() or not (lens.is_cpu or waits):
        return
    longest = int(lens.max()) + new
    if longest > most:
        raise BeyondTableError(
            f"cache_seqlens: expected at most {most} tokens, for which block_table has pages, together with those of "
            f"k; got {longest}."
        )
    if waits:
        if len(_waited_for) >= _MOST_WAITED_FOR:
            _waited_for.clear()
        _waited_for[shapes] = None


class Cache(NamedTuple):
    """A cache in pages: those of the block table, or a row of the cache as one page."""

    tensors: tuple[torch.Tensor, torch.Tensor]
    lens: torch.Tensor  #: int32 [batch], tokens
    pages: torch.Tensor  #: int32 [batch, pages]

    @classmethod
    def of(
        cls, k_cache: Any, v_cache: Any, batch: int, cache_seqlens: Any, cache_batch_idx: Any, block_table: Any
    ) -> Cache:  # fmt: skip
        """Checked, with index tensors on the cache's device or the host."""
        for tensor, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
            tensor_of(tensor, name)
            check_shape(tensor, name, sizes("num_pages", None, "page_size"))
        rows, size = k_cache.shape[:2]
        check_shape(v_cache, "v_cache", sizes("num_pages", rows, "page_size", size, k_cache.shape[2]))
        if block_table is None:
            at = equal_lengths(batch, 0).rows[:, 0] if cache_batch_idx is None else cache_batch_idx
            pages = _index(at, "cache_batch_idx", batch, k_cache.device, rows - 1)[:, None]
        else:
            pages = tensor_of(block_table, "block_table")
            check_shape(pages, "block_table", {"batch": batch, "pages": None})
        most = pages.shape[1] * size
        lens = most if cache_seqlens is None else cache_seqlens
        if not isinstance(lens, torch.Tensor):
            if not isinstance(lens, Integral):
                raise ValidationError(f"cache_seqlens: expected a number of tokens or a tensor, got {lens!r}.")
            lens = equal_lengths(batch, int(lens)).lens
        lens = _index(lens, "cache_seqlens", batch, k_cache.device, most if block_table is None else _ANY)
        if block_table is not None:
            check_capacity(lens, most)
        return cls((k_cache, v_cache), lens, to_int32(pages, "block_table"))


def cache_of(
    k_cache: Any, v_cache: Any, batch: int, lens: Any, rows: Any, padding: Any, table: Any, name: str
) -> tuple[Cache, torch.Tensor | None]:
    """The cache, and where the keys of each request begin. Rows beside a table are those of the table."""
    if table is not None:
        check_shape(tensor_of(table, name), name, {"batch" if rows is None else "batch_cache": None, "pages": None})
        if rows is not None:
            at = _index(rows, "cache_batch_idx", batch, table.device, table.shape[0] - 1)
            table, rows = table.index_select(0, at.to(table.device)), None
        check_shape(table, name, {"batch": batch, "pages": None})
    cache = Cache.of(k_cache, v_cache, batch, lens, rows, table)
    if padding is not None:
        padding = _index(padding, "cache_leftpad", batch, k_cache.device, cache.pages.shape[1] * k_cache.shape[1])
    return cache, padding


class NewTokens(NamedTuple):
    """Keys and values that are written into a cache."""

    k: torch.Tensor  #: [rows, num_heads_k, head_dim]
    v: torch.Tensor
    rows: Rows
    lens: int | torch.Tensor  #: of each request

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, batch: int) -> NewTokens:
        """Of k and v [batch, seqlen_new, ...], or [total, ...] with offsets [batch + 1]."""
        names = ("batch", "seqlen_new") if offsets is None else ("total_k_new",)
        for tensor, name in ((k, "k"), (v, "v")):
            check_shape(tensor_of(tensor, name), name, dict.fromkeys((*names, "num_heads_k", "head_dim")))
        if offsets is None:
            check_shape(k, "k", {"batch": batch, "seqlen_new": None, "num_heads_k": None, "head_dim": None})
            length = k.shape[1]
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            return cls(k, v, Rows.of(None, batch, length, k), length)
        check_shape(tensor_of(offsets, "cu_seqlens_k_new"), "cu_seqlens_k_new", {"batch + 1": batch + 1})
        offsets = to_int32(offsets, "cu_seqlens_k_new")
        return cls(k, v, Rows.of(offsets, batch, 0, k), offsets.diff())

    def append(self, cache: Cache) -> Cache:
        """Writes them behind the tokens that are there; returns the cache with them."""
        batch, device = cache.lens.shape[0], cache.tensors[0].device
        new = self.lens if isinstance(self.lens, int) else self.lens.to(cache.lens.device)
        total, most = cache.lens + new, cache.pages.shape[1] * cache.tensors[0].shape[1]
        if total.is_cpu and not is_tracing() and batch and int(total.max()) > most:
            raise BeyondTableError(
                f"cache_seqlens: expected at most {most} tokens, for which the cache or block_table has pages, "
                f"together with those of k; got {int(total.max())}."
            )
        lens, pages = cache.lens.to(device), cache.pages.to(device).contiguous()
        request = self.rows.request.clamp(max=batch - 1)
        is_none = (self.rows.request >= batch) | (lens[request] < 0)
        append_paged_kv_cache(
            self.k, self.v, torch.where(is_none, -1, request), lens[request] + self.rows.place, cache.tensors,
            pages.view(-1), torch.arange(batch + 1, dtype=torch.int32, device=device) * pages.shape[1],
            torch.ones_like(lens),
        )  # fmt: skip
        return cache._replace(lens=torch.where(cache.lens < 0, cache.lens, total))


class Rotation(NamedTuple):
    """Rotary embedding of queries and new keys by tables of cosines and sines."""

    cos: torch.Tensor  #: [seqlen_rotary, rotary_dim / 2]
    sin: torch.Tensor
    interleaved: bool

    def turned(self, x: torch.Tensor, rows: Rows, start: torch.Tensor, moves: bool = True) -> torch.Tensor:
        """x [rows, heads, dim], whose requests begin at positions `start`, where all rows stand unless `moves`.
        Numbers of 8 bits become bfloat16.
        """
        first = {"seqlen_rotary": None, "rotary_dim / 2": None}
        check_shape(tensor_of(self.cos, "rotary_cos"), "rotary_cos", first)
        second = dict(zip(first, self.cos.shape, strict=True))
        check_shape(tensor_of(self.sin, "rotary_sin"), "rotary_sin", second)
        if not x.shape[0]:
            return x
        table = torch.cat([self.cos, self.sin], dim=1).float()
        at = start.to(x.device).clamp(min=0)[rows.request.clamp(max=start.shape[0] - 1)] + rows.place * moves
        flat = (x.to(torch.bfloat16) if x.dtype.itemsize == 1 else x).reshape(x.shape[0], -1)
        none = flat.new_zeros(flat.shape[0], 0)
        turned = apply_rope_with_cos_sin_cache(at, flat, none, x.shape[2], table, not self.interleaved)[0]
        return turned.view(x.shape)


def without_left_padding(cache: Cache, leftpad: torch.Tensor) -> Keys:
    """Tokens behind the padding on the left, as pages of one token (token_pages())."""
    keys, values = cache.tensors
    if not (row_step(keys) and row_step(keys) == row_step(values)):
        raise ValidationError(f"cache_leftpad: expected pages a multiple of tokens apart, got {keys.stride()}.")
    size, device = keys.shape[1], keys.device
    padding, lens, pages = (t.to(device) for t in (leftpad, cache.lens, cache.pages))
    most = pages.shape[1] * size
    places = (padding[:, None] + torch.arange(most, dtype=torch.int32, device=device)).clamp(max=most - 1)
    table = pages.gather(1, (places // size).long()) * row_step(keys) + places % size
    left = (lens - padding).clamp(min=0).to(cache.lens.device)
    return Keys(token_pages(keys), token_pages(values), None, left, table.to(torch.int32))


def check_pages(table: torch.Tensor, lens: torch.Tensor, cache: torch.Tensor, name: str) -> None:
    """Page numbers are those of the cache, where the host can see tables and lengths, or with QUIRE_CHECK_PAGES=1."""
    is_seen = (table.is_cpu and lens.is_cpu) or (config.checks_pages() and not is_capturing(cache.device))
    if is_tracing() or not is_seen:
        return
    try:
        check_page_numbers(to_int32(table.cpu(), name), lens.cpu().clamp(min=0), cache.shape[1], cache.shape[0])
    except ValidationError as error:
        raise ValidationError(str(error).replace("block_tables", name)) from None


def rotated(
    queries: Queries, new: NewTokens, rotation: Rotation, start: torch.Tensor, moves: bool
) -> tuple[Queries, NewTokens]:
    rows = Rows.of(queries.offsets, queries.batch, queries.qo_len, queries.q)
    turned, k = rotation.turned(queries.q, rows, start, moves), rotation.turned(new.k, new.rows, start)
    if k.dtype is not new.k.dtype:  # 8 bits
        most = torch.finfo(new.k.dtype).max
        k = k.clamp(-most, most).to(new.k.dtype)
    return queries._replace(q=turned), new._replace(k=k)


def with_new_tokens(
    queries: Queries, cache: Cache, padding: torch.Tensor | None, pair: tuple[Any, Any], offsets: Any,
    rotary: tuple[Any, Any, bool], begins: torch.Tensor | None, moves: bool, table: str,
) -> tuple[Queries, Keys]:  # fmt: skip
    """The queries, rotated, and the keys of the cache, into which new ones are written first.

    pair: new k and v, or None; offsets: cu_seqlens_k_new. rotary: cosines, sines and whether pairs are interleaved.
    begins: the position of the first new token, instead of the tokens in the cache. moves: queries have positions of
    their own. table: the name of the argument with page numbers.
    """
    (k, v), (cos, sin, interleaved) = pair, rotary
    if (k is None) != (v is None) or (cos is None) != (sin is None):
        raise ValidationError("k, v and rotary_cos, rotary_sin: expected both of a pair or neither.")
    if k is not None:
        new = NewTokens.of(k, v, offsets, queries.batch)
        if cos is not None:
            start = cache.lens if begins is None else begins
            queries, new = rotated(queries, new, Rotation(cos, sin, interleaved), start, moves)
        cache = new.append(cache)
    elif cos is not None:
        raise ValidationError("rotary_cos: expected k and v beside it, as keys in the cache are rotated already.")
    elif offsets is not None:
        check_shape(tensor_of(offsets, "cu_seqlens_k_new"), "cu_seqlens_k_new", {"batch + 1": None})
    check_pages(cache.pages, cache.lens, cache.tensors[0], table)
    if padding is not None:
        return queries, without_left_padding(cache, padding)
    return queries, Keys(*cache.tensors, None, cache.lens, cache.pages)


def with_used_lengths(
    queries: Queries, keys: Keys, used_q: torch.Tensor | None, used_k: torch.Tensor | None
) -> tuple[Queries, Keys]:
    """The first used_q queries and used_k keys of each request. The other queries become requests without keys, which
    give zeros; the other ragged keys become requests without queries.
    """
    if keys.table is not None and used_k is not None:
        keys, used_k = keys._replace(lens=used_k, offsets=None), None
    if used_q is None and used_k is None:
        return queries, keys
    assert queries.offsets is not None
    first, behind = queries.offsets[:-1], queries.offsets[1:]
    end = behind if used_q is None else first + torch.minimum(used_q.clamp(min=0).to(first.device), behind - first)
    if keys.table is not None:
        offsets = _flat_offsets((first, end), behind)
        lens = keys.lens if keys.offsets is None else keys.offsets.diff()
        assert lens is not None
        lens = torch.stack((lens, torch.zeros_like(lens)), 1).flatten()
        table = keys.table.repeat_interleave(2, 0)
        return queries._replace(offsets=offsets, num_parts=2), keys._replace(offsets=None, lens=lens, table=table)
    assert keys.offsets is not None
    k_first, k_behind = keys.offsets[:-1], keys.offsets[1:]
    most = k_behind - k_first
    k_end = k_first + (most if used_k is None else torch.minimum(used_k.clamp(min=0).to(most.device), most))
    return (
        queries._replace(offsets=_flat_offsets((first, end, behind), behind), num_parts=3),
        keys._replace(offsets=_flat_offsets((k_first, k_end, k_end), k_behind)),
    )


def _flat_offsets(columns: tuple[torch.Tensor, ...], last: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.stack(columns, 1).flatten(), last[-1:]))
