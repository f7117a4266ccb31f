"""Decode from a table of pages and lengths in one call, without a plan: lengths may lie on the GPU alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quire.errors import PlanError, UnsupportedError, ValidationError
from quire.runtime.attention import Attention, AttentionSpec
from quire.runtime.checks import (
    check_flags,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    refuse,
    scalar,
    to_int32,
)
from quire.runtime.graph import is_capturing
from quire.runtime.launch import refuse_make_fx
from quire.runtime.layout import PagedCache, cache_tensors
from quire.runtime.options import PlanOptions, Types, heads, logits_options
from quire.runtime.schedule import Indices, Lengths
from quire.runtime.workspace import UserWorkspace
from quire.types import KVLayout


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: PagedCache, workspace_buffer: torch.Tensor, block_tables: torch.Tensor,
    seq_lens: torch.Tensor, max_seq_len: int, bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0, window_left: int = -1, out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, kv_layout: str = "NHD", enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: torch.Tensor | None = None,
    kv_cache_sf: Any = None, q_cu_seq_lens: torch.Tensor | None = None, *, backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Attention of the last q_len_per_req tokens of each request over its pages, as FlashInfer's function of this name.

    query: [batch_size * q_len_per_req, num_qo_heads, head_dim] in float16 or bfloat16 (on the CPU also float32).
    kv_cache: one tensor [num_pages, 2, page_size, num_kv_heads, head_dim] (HND: heads before tokens; with 1 instead of
    2, keys are the values too), or a pair of such 4-D tensors; in query's dtype, float8_e4m3fn or float8_e5m2, with any
    strides but a contiguous last dimension. block_tables [batch_size, pages] int32; what lies beyond a request's last
    page is not read. seq_lens [batch_size] uint32 or int32 counts the tokens of each request, the q_len_per_req new
    ones among them; a request without tokens gives zeros. On a GPU both are read there alone: the call neither waits
    nor looks at them, so that it may be captured in a CUDA graph and lengths may change between replays.

    max_seq_len bounds seq_lens: longer ones are refused where they lie on the host, and on a GPU cut off at the end of
    the page that holds token max_seq_len - 1. bmm1_scale multiplies q . k and is all of the softmax scale (1 /
    sqrt(head_dim) is the caller's) and positive, bmm2_scale the result; either may be a tensor of one element, which on
    a GPU is read there, as the rest. window_left: keys to the left of its own that a query sees; -1: all. sinks:
    float32 natural-log logits, one a query head, that join the denominators.

    With q_len_per_req > 1 queries are causal, or `mask` says which of the new tokens each of them sees, in a chain or a
    tree: uint16 [batch_size, q_len_per_req, ceil(q_len_per_req / 32) * 2], bit j of a row (16 in each word, lowest
    first) for new token j. All earlier tokens are seen, as far as the window goes.

    workspace_buffer holds partial results, whatever is in it. out: of query's dtype, or float8_e4m3fn, into which the
    result is rounded; there o_scale is what the reader will multiply by, whose reciprocal bmm2_scale already holds.

    Returns [batch_size * q_len_per_req, num_qo_heads, head_dim], `out` if that is given. Raises ValidationError naming
    the argument, or UnsupportedError with each kernel's reason. kv_cache_sf (4-bit caches) and
    q_cu_seq_lens (drafts of several lengths) are refused.

    >>> query = torch.randn(2, 8, 64, dtype=torch.bfloat16)
    >>> cache = torch.randn(6, 2, 16, 2, 64, dtype=torch.bfloat16)  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> block_tables = torch.tensor([[4, 0], [2, 0]], dtype=torch.int32)
    >>> quire.xqa_batch_decode_with_kv_cache(
    ...     query, cache, torch.empty(1 << 20, dtype=torch.uint8), block_tables,
    ...     seq_lens=torch.tensor([21, 16], dtype=torch.int32), max_seq_len=32, bmm1_scale=64**-0.5,
    ... ).shape
    torch.Size([2, 8, 64])
    """
    refuse_make_fx("xqa_batch_decode_with_kv_cache()")
    refuse(kv_cache_sf=kv_cache_sf)
    if q_cu_seq_lens is not None:
        raise UnsupportedError(
            "q_cu_seq_lens: no kernel takes drafts of several lengths in one call yet; expected None, which is "
            "q_len_per_req new tokens of each request."
        )
    check_flags(enable_pdl=enable_pdl)
    layout = KVLayout.of(kv_layout)
    workspace = UserWorkspace(workspace_buffer, "workspace_buffer")
    cache = _Cache.of(kv_cache, layout)
    q_len = 1 if q_len_per_req is None else check_positive(q_len_per_req, "q_len_per_req")
    tables = _Tables.of(block_tables, seq_lens, workspace.device)
    rows = {"batch_size * q_len_per_req": tables.batch_size * q_len, "num_qo_heads": None}
    check_shape(check_tensor(query, "query"), "query", {**rows, "head_dim": cache.head_dim_qk})
    check_same_device(query, "query", workspace.device)
    target = _Target.of(out, query, cache.head_dim_vo, o_scale)
    logits_scale = _Scale.of(bmm1_scale, "bmm1_scale", workspace.device)
    v_scale = _Scale.of(bmm2_scale, "bmm2_scale", workspace.device)
    options = PlanOptions(
        *heads(query.shape[1], cache.num_kv_heads), cache.head_dim_qk, cache.head_dim_vo,
        Types.of(query.dtype, cache.tensors[0].dtype, target.result.dtype),
        logits_options(cache.head_dim_qk, logits_scale.number, window_left, None, "NONE"), q_len > 1, cache.page_size,
    )  # fmt: skip
    spec = AttentionSpec(
        tables.indices(q_len, cache.page_size, check_positive(max_seq_len, "max_seq_len")), options,
        tree_mask=None if mask is None else _tree_mask_bits(mask, tables.batch_size, q_len, workspace.device),
    )  # fmt: skip
    if tables.batch_size:
        Attention(spec, layout, workspace, backend).run(
            query, cache.as_given, out=target.result, lse=None, return_lse=False, sinks=sinks, q_scale=None,
            k_scale=None, v_scale=v_scale.number, window_left=None, enable_pdl=enable_pdl,
            logits_scale_by=logits_scale.tensor, o_scale_by=v_scale.tensor,
        )  # fmt: skip
    return target.finish()


class _Cache(NamedTuple):
    """The paged cache and its sizes."""

    tensors: tuple[torch.Tensor, ...]  #: one 5-D tensor of both, or two 4-D tensors
    page_size: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int

    @classmethod
    def of(cls, kv_cache: Any, layout: KVLayout) -> _Cache:
        """Of either signature; the one plane of a 5-D tensor [num_pages, 1, ...] is keys and values."""
        tensors = cache_tensors(kv_cache)
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
        if values.dtype is not keys.dtype:
            raise ValidationError(f"kv_cache: expected values of the keys' {keys.dtype}, got {values.dtype}.")
        if len(tensors) == 2:
            names = ("page_size", "num_kv_heads") if layout is KVLayout.NHD else ("num_kv_heads", "page_size")
            page = dict(zip(names, keys.shape[1:3], strict=True))
            check_shape(values, "kv_cache: values", {"num_pages": None, **page, "head_dim": None})
        token, head = (-3, -2) if layout is KVLayout.NHD else (-2, -3)
        page_size = check_positive(keys.shape[token], "kv_cache: page_size")
        return cls(tensors, page_size, keys.shape[head], keys.shape[-1], values.shape[-1])

    @property
    def as_given(self) -> PagedCache:
        return self.tensors[0] if len(self.tensors) == 1 else (self.tensors[0], self.tensors[1])


class _Tables(NamedTuple):
    """Where each request's pages are, and how many tokens they hold."""

    pages: torch.Tensor  #: [batch_size, pages] int32 page numbers
    seq_lens: torch.Tensor  #: [batch_size] int32

    @classmethod
    def of(cls, block_tables: Any, seq_lens: Any, device: torch.device) -> _Tables:
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

    def indices(self, q_len: int, page_size: int, max_seq_len: int) -> Indices | Lengths:
        """What the planner is given: on a GPU the tables as they are, on the host their used entries."""
        if self.seq_lens.device.type != "cpu":
            return Lengths(self.seq_lens, self.pages[:, : -(-max_seq_len // page_size)], q_len, page_size)
        longest = min(max_seq_len, self.pages.shape[1] * page_size)
        if self.batch_size and not 0 <= int(self.seq_lens.min()) <= int(self.seq_lens.max()) <= longest:
            raise ValidationError(
                f"seq_lens: expected 0..{longest} (max_seq_len={max_seq_len}, and {self.pages.shape[1]} pages of "
                f"{page_size} tokens in block_tables), got {int(self.seq_lens.min())}..{int(self.seq_lens.max())}."
            )
        counts = (self.seq_lens + (page_size - 1)) // page_size
        indptr = torch.zeros(self.batch_size + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(counts, 0, out=indptr[1:])
        used = torch.arange(self.pages.shape[1], device="cpu") < counts[:, None]
        last = self.seq_lens - (counts - 1).clamp_(min=0) * page_size
        return Indices(self.batch_size, None, q_len, indptr, last, self.pages[used], page_size)


class _Target(NamedTuple):
    """Where results go: what the kernel writes, and what the caller is given."""

    result: torch.Tensor
    caller: torch.Tensor

    @classmethod
    def of(cls, out: torch.Tensor | None, query: torch.Tensor, head_dim_vo: int, o_scale: Any) -> _Target:
        """`out`, or a new tensor; beside an `out` of 8 bits one of query's dtype."""
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


class _Scale(NamedTuple):
    """A scale: a number, and where it lies on a GPU a float32 there that multiplies it."""

    number: float
    tensor: torch.Tensor | None = None

    @classmethod
    def of(cls, value: Any, name: str, device: torch.device) -> _Scale:
        """A number or a tensor of one element; on a GPU nobody looks at its value here."""
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            check_same_device(check_tensor(value, name), name, device)
            if value.numel() != 1 or not value.is_floating_point():
                raise ValidationError(
                    f"{name}: expected a number or a floating-point tensor of one element, got {value.dtype} "
                    f"{list(value.shape)}."
                )
            return cls(1.0, value.to(torch.float32))
        return cls(scalar(value, name, positive=name == "bmm1_scale"))  # kernels take the maximum before they scale


def _tree_mask_bits(mask: Any, batch_size: int, q_len: int, device: torch.device) -> torch.Tensor:
    """The bytes of a tree mask, at a multiple of 4."""
    words = check_tensor(mask, "mask")
    if words.dtype is not torch.uint16:
        raise ValidationError(f"mask: expected dtype torch.uint16, 16 tokens a word, got {words.dtype}.")
    halves = 2 * -(-q_len // 32)
    check_shape(words, "mask", {"batch_size": batch_size, "q_len_per_req": q_len, "ceil(q_len / 32) * 2": halves})
    check_same_device(words, "mask", device)
    bits = words.contiguous().view(torch.uint8)
    return bits.clone() if bits.data_ptr() % 4 else bits
