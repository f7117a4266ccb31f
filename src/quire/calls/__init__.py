"""Functions that plan and run in one call, with the arguments of other libraries: block tables, xqa, cuDNN, fmha_v2.

This file has what they share: caches, tables and lengths of calls that take a block table, batches of requests of equal
length, scales, and where results go.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire.engine.checks import (
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    scalar,
    to_int32,
)
from quire.engine.device import is_capturing
from quire.engine.operators import is_tracing
from quire.engine.schedule import Indices, Lengths
from quire.engine.tensors import PagedCache, cache_tensors
from quire.engine.upcast import as_bytes, check_order, numbers_in_byte, scaled
from quire.errors import PlanError, ValidationError
from quire.jit import config
from quire.kernels.features import KVLayout, dtype_of


class PagedKV(NamedTuple):
    """The paged cache and its sizes."""

    tensors: tuple[torch.Tensor, ...]  #: one 5-D tensor of both, or two 4-D tensors
    page_size: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    scales: tuple[torch.Tensor, ...] = ()  #: of keys and values of 4 bits

    @classmethod
    def of(
        cls, kv_cache: Any, layout: KVLayout, is_one_type: bool = True, kv_cache_sf: Any = None, backend: Any = "auto"
    ) -> PagedKV:
        """Of either signature; the one plane of a 5-D tensor [num_pages, 1, ...] is keys and values."""
        tensors = tuple(as_bytes(tensor) for tensor in cache_tensors(kv_cache))
        for tensor in tensors:
            if check_tensor(tensor, "kv_cache").dim() != 6 - len(tensors):
                raise ValidationError(
                    f"kv_cache: expected a 5-D tensor or a pair of 4-D tensors, got {len(tensors)} with shape "
                    f"{list(tensor.shape)}."
                )
        if len(tensors) == 1 and tensors[0].shape[1] not in (1, 2):
            raise ValidationError(f"kv_cache: expected [num_pages, 1 or 2, ...], got {list(tensors[0].shape)}.")
        if len(tensors) == 1 and tensors[0].shape[1] == 1:
            tensors = (tensors[0][:, 0], tensors[0][:, 0])
        keys, values = tensors[0], tensors[-1]
        if is_one_type and values.dtype is not keys.dtype:
            raise ValidationError(f"kv_cache: expected values of the keys' {keys.dtype}, got {values.dtype}.")
        if len(tensors) == 2:
            names = ("page_size", "num_kv_heads") if layout is KVLayout.NHD else ("num_kv_heads", "page_size")
            page = dict(zip(names, keys.shape[1:3], strict=True))
            check_shape(values, "kv_cache: values", {"num_pages": None, **page, "head_dim": None})
        token, head = (-3, -2) if layout is KVLayout.NHD else (-2, -3)
        page_size = check_positive(keys.shape[token], "kv_cache: page_size")
        qk, vo = (tensor.shape[-1] * numbers_in_byte(tensor) for tensor in (keys, values))
        parts = cls(tensors, page_size, keys.shape[head], qk, vo)
        if kv_cache_sf is None:
            return parts
        check_order(backend)
        return parts._replace(scales=scaled(parts.caller, kv_cache_sf, page_size)[1])

    @property
    def caller(self) -> PagedCache:
        """The cache as the call was given it."""
        return self.tensors[0] if len(self.tensors) == 1 else (self.tensors[0], self.tensors[1])


class BlockTables(NamedTuple):
    """Where each request's pages are, and how many tokens they hold."""

    pages: torch.Tensor  #: [batch_size, pages] int32 page numbers
    seq_lens: torch.Tensor  #: [batch_size] int32

    @classmethod
    def of(cls, block_tables: Any, seq_lens: Any, device: torch.device) -> BlockTables:
        """Both on `device`; what lies on the host is copied to a GPU."""
        pages = to_int32(check_tensor(block_tables, "block_tables"), "block_tables")
        check_shape(pages, "block_tables", {"batch_size": None, "pages": None})
        lens = check_tensor(seq_lens, "seq_lens")
        lens = lens.view(torch.int32) if lens.dtype is torch.uint32 else to_int32(lens, "seq_lens")
        check_shape(lens, "seq_lens", {"batch_size": pages.shape[0]})
        for tensor, name in ((pages, "block_tables"), (lens, "seq_lens")):
            if tensor.device.type != "cpu":
                check_same_device(tensor, name, device)
            elif is_capturing(device):
                raise PlanError(f"{name}: expected a tensor on {device} in the capture of a CUDA graph, got a host's.")
        pages, lens = pages.to(device, non_blocking=True), lens.to(device, non_blocking=True)
        return cls(pages if pages.stride(1) == 1 else pages.contiguous(), lens.contiguous())

    @property
    def batch_size(self) -> int:
        return self.seq_lens.shape[0]

    def check_pages(self, cache: PagedKV) -> None:
        """With QUIRE_CHECK_PAGES=1: page numbers on a GPU are those of the cache. On the host run() checks them."""
        device = self.pages.device
        if config.checks_pages() and device.type != "cpu" and not is_capturing(device):
            num_pages = min(tensor.shape[0] for tensor in cache.tensors)
            check_page_numbers(self.pages.cpu(), self.seq_lens.cpu(), cache.page_size, num_pages)

    def row_by_row(self, before: torch.Tensor, q_len: int, world: int, rank: int) -> BlockTables:
        """Each of q_len rows as a request of its own, of keys dealt to `world` ranks in turn. before: int32
        [batch_size], the keys before the first row on all ranks. Computed on the device.
        """
        check_shape(
            check_tensor(before, "causal_seqlens_kv_global"),
            "causal_seqlens_kv_global",
            {"batch_size": self.batch_size},
        )
        check_same_device(before, "causal_seqlens_kv_global", self.seq_lens.device)
        place = to_int32(before, "causal_seqlens_kv_global")[:, None] + torch.arange(
            q_len, dtype=torch.int32, device=before.device
        )
        seen = (torch.div(place - rank, world, rounding_mode="floor") + 1).clamp(min=0)
        lens = torch.minimum(seen, self.seq_lens[:, None]).flatten()
        return BlockTables(self.pages.repeat_interleave(q_len, 0), lens)

    def indices(self, q_len: int, page_size: int, max_seq_len: int) -> Indices | Lengths:
        """What the planner is given: on a GPU the tables as they are, on the host their used entries."""
        if self.seq_lens.device.type != "cpu":
            return Lengths(self.seq_lens, self.pages[:, : -(-max_seq_len // page_size)], q_len, page_size)
        check_lengths(self.seq_lens, self.pages.shape[1], page_size, max_seq_len, "max_seq_len")
        return indices_of(self.pages, self.seq_lens, None, q_len, page_size)


def check_lengths(
    seq_lens: torch.Tensor, num_pages: int, page_size: int, most: int, name: str, of_lens: str = "seq_lens"
) -> None:
    """Lengths on the host fit the tables of `num_pages` pages a request, and the caller's bound. name, of_lens: of the
    caller's arguments.
    """
    longest = min(most, num_pages * page_size)
    if seq_lens.shape[0] and not 0 <= int(seq_lens.min()) <= int(seq_lens.max()) <= longest:
        raise ValidationError(
            f"{of_lens}: expected 0..{longest} ({name}={most}, and {num_pages} pages of {page_size} tokens in "
            f"block_tables), got {int(seq_lens.min())}..{int(seq_lens.max())}."
        )


def check_page_numbers(pages: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_pages: int) -> None:
    """Tables [..., pages] on the host name pages of the cache, as far as lengths [...] reach."""
    used = torch.arange(pages.shape[-1], device="cpu") < _num_pages(seq_lens, page_size)[..., None]
    last = min(num_pages, 2**31) - 1  # torch compares int32 with the low bits of a number
    outside = (used & ((pages < 0) | (pages > last))).nonzero()
    if outside.numel():
        request, *_, page = place = outside[0].tolist()
        got = f"{int(pages[tuple(place)])} (page {page} of request {request})"
        raise ValidationError(f"block_tables: expected page numbers below {num_pages}, got {got}.")


def _num_pages(seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages of requests of these lengths, without a sum beyond 32 bits."""
    return -(-seq_lens // page_size)


def indices_of(
    pages: torch.Tensor, seq_lens: torch.Tensor, qo_indptr: torch.Tensor | None, q_len: int, page_size: int
) -> Indices:
    """Index arrays of a table of pages [batch_size, pages], on any device, and lengths on the host."""
    counts = _num_pages(seq_lens, page_size)
    indptr = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(counts, 0, out=indptr[1:])
    used = torch.arange(pages.shape[1], device="cpu") < counts[:, None]
    last = seq_lens - (counts - 1).clamp_(min=0) * page_size
    return Indices(seq_lens.shape[0], qo_indptr, q_len, indptr, last, pages[used.to(pages.device)], page_size)


class Output(NamedTuple):
    """Where results go: what the kernel writes, and what the caller is given."""

    result: torch.Tensor
    caller: torch.Tensor

    @classmethod
    def of(
        cls, out: torch.Tensor | None, query: torch.Tensor, head_dim_vo: int, o_scale: Any, dtype: Any = None
    ) -> Output:
        """`out`, or a new tensor of `dtype`; beside an `out` of 8 bits one of query's dtype."""
        out = _new_out(out, query, head_dim_vo, dtype)
        shape = (query.shape[0], query.shape[1], head_dim_vo)
        narrow = out is not None and check_output(out, "out").dtype is torch.float8_e4m3fn
        scale = scalar(o_scale, "o_scale", positive=True)
        if scale != 1.0 and not narrow:
            raise ValidationError(
                f"o_scale: expected 1 where out is not float8_e4m3fn, got {scale}; bmm2_scale multiplies the result."
            )
        if out is not None:
            names = ("batch_size * q_len_per_req", "num_qo_heads", "head_dim")
            check_shape(out, "out", dict(zip(names, shape, strict=True)))
            check_same_device(out, "out", query.device)
            if not narrow:
                return cls(out, out)
        result = torch.empty(shape, dtype=query.dtype, device=query.device)
        return cls(result, result if out is None else out)

    def finish(self) -> torch.Tensor:
        """Rounds into an `out` of 8 bits; what is beyond its largest number becomes that."""
        if self.result is not self.caller:
            most = torch.finfo(self.caller.dtype).max
            self.caller.copy_(self.result.clamp_(-most, most))
        return self.caller


def _new_out(out: torch.Tensor | None, query: torch.Tensor, head_dim_vo: int, dtype: Any) -> torch.Tensor | None:
    """`out`, which has `dtype`; where there is none a new one of that, if that is not query's."""
    wanted = None if dtype is None else dtype_of(dtype, "out_dtype").torch
    if out is not None and wanted is not None and check_output(out, "out").dtype is not wanted:
        raise ValidationError(f"out: expected out_dtype={wanted}, got {out.dtype}.")
    if out is not None or wanted in (None, query.dtype):
        return out
    return torch.empty((*query.shape[:-1], head_dim_vo), dtype=wanted, device=query.device)


class Scale(NamedTuple):
    """A scale: a number, and where it lies on a GPU a float32 there that multiplies it."""

    number: float
    tensor: torch.Tensor | None = None

    @classmethod
    def of(cls, value: Any, name: str, device: torch.device, *, positive: bool = False) -> Scale:
        """A number or a tensor of one element, None being 1; on a GPU nobody looks at its value here."""
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            check_same_device(check_tensor(value, name), name, device)
            if value.numel() != 1 or not value.is_floating_point():
                raise ValidationError(
                    f"{name}: expected a number or a floating-point tensor of one element, got {value.dtype} "
                    f"{list(value.shape)}."
                )
            return cls(1.0, value.to(torch.float32))
        return cls(scalar(value, name, positive=positive))

    @classmethod
    def of_logits(cls, value: Any, name: str, device: torch.device) -> Scale:
        """The whole factor of q . k, which must be given."""
        if value is None:
            raise ValidationError(f"{name}: expected the whole factor of q . k, such as 1 / sqrt(head_dim), got None.")
        return cls.of(value, name, device, positive=True)

    def times(self, other: Scale) -> Scale:
        """The product of both."""
        tensors = [tensor for tensor in (self.tensor, other.tensor) if tensor is not None]
        product = tensors[0] * tensors[1] if len(tensors) == 2 else next(iter(tensors), None)
        return Scale(self.number * other.number, product)


class EqualLengths(NamedTuple):
    """Index tensors, on the host, of a batch of requests of equal length."""

    offsets: torch.Tensor  #: [batch + 1]
    lens: torch.Tensor  #: [batch]
    rows: torch.Tensor  #: [batch, 1], the number of each request


def equal_lengths(batch: int, length: int) -> EqualLengths:
    """The same tensors for the same batch, so that a plan of them is found again."""
    if is_tracing():
        return _new(batch, length)
    with torch.inference_mode(False):
        return _known(batch, length)


def _new(batch: int, length: int) -> EqualLengths:
    numbers = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    return EqualLengths(numbers * length, torch.full_like(numbers[:-1], length), numbers[:-1, None])


_known = lru_cache(maxsize=256)(_new)


def row_step(cache: torch.Tensor) -> int:
    """The distance between rows of [rows, tokens, heads, dim] in token strides; 0 if it is no multiple of them."""
    row, token = cache.stride(0), cache.stride(1)
    if cache.shape[0] <= 1 or cache.shape[1] <= 1:
        return cache.shape[1]
    return row // token if token and row % token == 0 else 0


def token_pages(cache: torch.Tensor) -> torch.Tensor:
    """A view of [rows, tokens, heads, dim] as pages [pages, 1, heads, dim] of one token: token t of row r is page
    r * row_step() + t. If heads come before tokens, pages overlap, and must only be read.
    """
    rows, tokens, heads, dim = cache.shape
    strides = cache.stride()
    token = strides[1] if tokens > 1 else strides[0]
    return cache.as_strided(((rows - 1) * row_step(cache) + tokens, 1, heads, dim), (token, token, *strides[2:]))


def check_rank(cp_world: int, cp_rank: int, before: Any) -> None:
    """Check the place of a rank among those that keys are dealt to; before: causal_seqlens_kv_global."""
    if (
        isinstance(cp_rank, bool)
        or not isinstance(cp_rank, int)
        or not 0 <= cp_rank < check_positive(cp_world, "cp_world")
    ):
        raise ValidationError(f"cp_rank: expected a number below cp_world={cp_world}, got {cp_rank!r}.")
    if before is None and cp_world != 1:
        raise ValidationError(
            f"causal_seqlens_kv_global: expected int32 [batch_size] beside cp_world={cp_world}, got None."
        )
