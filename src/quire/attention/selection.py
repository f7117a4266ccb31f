"""The choice of what a query attends to: pages by bounds of their keys, and tokens by scores of an indexer.

As in Quest (Tang et al., 2024, https://arxiv.org/abs/2406.10774), a page is summarised by the smallest and the
largest value of its keys in each dim, which give an upper bound on its logits. Everything runs on the device of the
tensors without synchronisation, so the calls may be captured in a CUDA graph.

This is the choice in DeepSeek's sparse attention (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp).

The choice is exact and the same each time. It runs on the device of the scores without a synchronisation, so the call
may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire.calls import BlockTables, PagedKV, Scale, check_lengths, check_page_numbers
from quire.calls.decode import TableCall
from quire.engine.checks import (
    check_contiguous_last,
    check_output,
    check_positive,
    check_same_device,
    check_shape,
    check_tensor,
    to_int32,
)
from quire.engine.device import UserWorkspace, target_of
from quire.engine.launch import launch, row_grid
from quire.engine.operands import OperandValue, RemappedOperands, int32_table, split_operands, variant_of
from quire.engine.operators import operator
from quire.engine.run import Result
from quire.engine.schedule import check_count, check_range
from quire.engine.tensors import PagedCache, cache_tensors, cache_view, page_size_of
from quire.errors import UnsupportedError, ValidationError
from quire.jit import get_module
from quire.kernels.expressions.rewrite import remap_indices, variant_without_mask
from quire.kernels.expressions.trace import Tracer, Value
from quire.kernels.expressions.tree import indices_in
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import KVLayout, dtype_of
from quire.kernels.operation import (
    OPERATIONS,
    PARALLEL_THREADS,
    TOP_TOKENS_SMEM,
    OperationKey,
    PageScoresParams,
    TopTokensParams,
)
from quire.kernels.params import FastDivisor

__all__ = ["SelectedPages", "batch_decode_with_selected_pages", "page_key_bounds", "select_pages", "select_tokens"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  #: of bounds


class SelectedPages(NamedTuple):
    """The result of select_pages(): a table for each request and KV head, in the order of the request's own table.

    block_tables: int32 [batch_size, num_kv_heads, pages], entries beyond a length are any. seq_lens: int32 [batch_size,
    num_kv_heads], tokens of the selected pages. An engine with a selection of its own may make it, too:
    batch_decode_with_selected_pages() raises ValidationError for tables that do not fit.

    >>> selected = quire.SelectedPages(torch.tensor([[[4, 2], [0, 5]]]).int(), torch.tensor([[32, 28]]).int())
    >>> q, cache = torch.randn(1, 8, 64).bfloat16(), torch.randn(6, 2, 16, 2, 64).bfloat16()
    >>> workspace = torch.empty(1 << 20, dtype=torch.uint8)
    >>> quire.batch_decode_with_selected_pages(q, cache, workspace, selected).shape
    torch.Size([1, 8, 64])
    """

    block_tables: torch.Tensor  #: [batch_size, num_kv_heads, pages] int32; those beyond a length are any
    seq_lens: torch.Tensor  #: [batch_size, num_kv_heads] int32, tokens of the selected pages


def page_key_bounds(
    paged_kv_cache: PagedCache, kv_layout: str = "NHD", pages: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The smallest and the largest value of each page's keys in each dim.

    paged_kv_cache: as in BatchDecodeWithPagedKVCacheWrapper.run(). pages: the page numbers, any integers, whose bounds
    are computed and written into `out`, for example pages that were filled since the last call; None: all pages. A page
    that is not full may have any content after its tokens, because the bounds of the last page of a request are unused.

    Returns [num_pages, num_kv_heads, 2, head_dim], smallest first, in the cache's dtype (float16 for 8 bits), `out` if
    that is given. Raises ValidationError naming the argument.

    >>> cache = torch.randn(6, 2, 16, 2, 64).bfloat16()  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> quire.page_key_bounds(cache).shape
    torch.Size([6, 2, 2, 64])
    """
    keys = _keys_and_values(paged_kv_cache, KVLayout.of(kv_layout))[0]
    check_positive(keys.shape[1], "paged_kv_cache: page_size")
    dtype = torch.float16 if keys.dtype.itemsize == 1 else keys.dtype
    if not dtype.is_floating_point:
        raise ValidationError(f"paged_kv_cache: expected numbers in floating point, or of 8 bits, got {keys.dtype}.")
    shape = {"num_pages": keys.shape[0], "num_kv_heads": keys.shape[2], "low and high": 2, "head_dim": keys.shape[3]}
    if out is None and pages is not None:
        raise ValidationError("out: expected the bounds of all pages beside `pages`, got None.")
    if out is not None:
        check_shape(check_output(out, "out"), "out", shape)
        check_same_device(out, "out", keys.device)
        if out.dtype is not dtype:
            raise ValidationError(f"out: expected dtype {dtype}, got {out.dtype}.")
    chosen = keys if pages is None else keys[_page_numbers(pages, keys)]
    bounds: torch.Tensor = torch.stack(torch.aminmax(chosen.to(dtype), dim=1), dim=2)
    if out is None:
        return bounds
    out[slice(None) if pages is None else _page_numbers(pages, keys)] = bounds
    return out


def _page_numbers(pages: Any, keys: torch.Tensor) -> torch.Tensor:
    numbers = check_tensor(pages, "pages")
    check_shape(numbers, "pages", {"pages": None})
    check_same_device(numbers, "pages", keys.device)
    if numbers.dtype not in (torch.int32, torch.int64):
        raise ValidationError(f"pages: expected dtype torch.int32 or torch.int64, got {numbers.dtype}.")
    if numbers.is_cpu:
        check_range(numbers, "pages", 0, keys.shape[0] - 1, "page numbers")
    return numbers.long()


def select_pages(
    q: torch.Tensor, bounds: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, page_size: int,
    top_k: int,
) -> SelectedPages:  # fmt: skip
    """The last page of each request, and the top_k - 1 other pages with the largest bounds on their logits.

    q: [batch_size, num_qo_heads, head_dim]. bounds: the result of page_key_bounds(). block_tables: int32 [batch_size,
    pages]; entries beyond a request's last page are not read. seq_lens: int32 [batch_size].

    The score of a page is the maximum over the query heads of a KV head of sum(max(q * low, q * high)), summed in
    float32; no q . k of the page exceeds it. Of pages with equal scores the earlier one is taken, so the choice is
    deterministic. A request with at most top_k pages gets all of them. The returned tables are [batch_size,
    num_kv_heads, top_k], or narrower if `block_tables` is. Raises ValidationError naming the argument.

    >>> cache = torch.randn(6, 2, 16, 2, 64).bfloat16()
    >>> q, block_tables = torch.randn(1, 8, 64).bfloat16(), torch.tensor([[4, 0, 2, 5]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([60], dtype=torch.int32)
    >>> selected = quire.select_pages(q, quire.page_key_bounds(cache), block_tables, seq_lens, page_size=16, top_k=2)
    >>> selected.block_tables.shape, selected.seq_lens.tolist()  # the last page holds 12 tokens
    (torch.Size([1, 2, 2]), [[28, 28]])
    """
    shape = {"num_pages": None, "num_kv_heads": None, "low and high": 2, "head_dim": None}
    check_shape(check_tensor(bounds, "bounds"), "bounds", shape)
    if bounds.dtype not in _DTYPES:
        raise ValidationError(f"bounds: expected dtype {', '.join(map(str, _DTYPES))}, got {bounds.dtype}.")
    num_kv_heads, head_dim = bounds.shape[1], bounds.shape[3]
    tables = BlockTables.of(block_tables, seq_lens, bounds.device)
    _check_queries(q, tables.batch_size, num_kv_heads, head_dim, bounds.device)
    size, most = check_positive(page_size, "page_size"), min(check_positive(top_k, "top_k"), tables.pages.shape[1])
    if tables.seq_lens.is_cpu:
        check_lengths(tables.seq_lens, tables.pages.shape[1], size, 2**31 - 1, "page_size")
        check_page_numbers(tables.pages, tables.seq_lens, size, bounds.shape[0])
    last = ((tables.seq_lens - 1) // size)[:, None, None]  # its number in the table; -1: no page
    num_columns = tables.pages.shape[1]
    order = torch.topk(_keys(q, bounds, tables, size), most - 1, dim=2, sorted=False).indices
    order = torch.cat([torch.where(order < last, order, num_columns), last.clamp(min=0).expand(-1, num_kv_heads, 1)], 2)
    order = order.sort(dim=2).values.clamp_(max=num_columns - 1)
    chosen = tables.pages[:, None].expand(-1, num_kv_heads, -1).gather(2, order)
    return SelectedPages(chosen, _tokens(tables.seq_lens, size, most).expand(-1, num_kv_heads).contiguous())


def _tokens(seq_lens: torch.Tensor, page_size: int, top_k: int) -> torch.Tensor:
    """Tokens of selected pages, [batch_size, 1]: only the last page may have fewer than page_size."""
    dropped = ((seq_lens - 1) // page_size + (1 - top_k)).clamp_(min=0)
    return (seq_lens - dropped * page_size)[:, None]


def _keys(q: torch.Tensor, bounds: torch.Tensor, tables: BlockTables, page_size: int) -> torch.Tensor:
    """What ascends with the scores of pages, each another number: int64 [batch_size, num_kv_heads, pages]."""
    num_kv_heads, head_dim, num_columns = bounds.shape[1], bounds.shape[3], tables.pages.shape[1]
    keys = torch.empty(tables.batch_size, num_kv_heads, num_columns, dtype=torch.int64, device=q.device)
    queries, bounds = q.to(torch.float32).contiguous(), bounds.contiguous()
    slug = dtype_of(bounds.dtype, "bounds").slug
    vector = OPERATIONS["page_scores"].widths[slug][-1]
    vector = vector if head_dim % vector == 0 and bounds.data_ptr() % 16 == 0 else 1
    params = PageScoresParams(
        q=queries.data_ptr(), bounds=bounds.data_ptr(), pages=tables.pages.data_ptr(), lens=tables.seq_lens.data_ptr(),
        keys=keys.data_ptr(), page_stride=tables.pages.stride(0), batch_size=tables.batch_size,
        num_kv_heads=num_kv_heads, group_size=q.shape[1] // num_kv_heads, head_dim=head_dim, num_columns=num_columns,
        page_size=page_size, num_pages=min(bounds.shape[0], 2**31 - 1),  # page numbers have 32 bits
    )  # fmt: skip
    if keys.numel():
        module = get_module(OperationKey("page_scores", target_of(q.device), slug, vector).spec())
        grid = row_grid(tables.batch_size * num_kv_heads, num_columns)
        launch(module, ctypes.addressof(params), q.device, grid=grid, block=PARALLEL_THREADS)
    return keys


def batch_decode_with_selected_pages(
    q: torch.Tensor, paged_kv_cache: PagedCache, workspace_buffer: torch.Tensor, selected: SelectedPages,
    sm_scale: float | None = None, kv_layout: str = "NHD", out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None, return_lse: bool = False, k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None, enable_pdl: bool | None = None, *, backend: str = "auto",
    variant: Variant | None = None, **operands: OperandValue,
) -> Result:  # fmt: skip
    """Attention of one query per request over the pages that were selected for each KV head; other pages are not read.

    q: [batch_size, num_qo_heads, head_dim]. paged_kv_cache, kv_layout: as in BatchDecodeWithPagedKVCacheWrapper, keys
    and values with the same strides between pages and heads. workspace_buffer: for partial results. selected: the
    result of select_pages(), or any tables with these shapes. sm_scale: None: 1 / sqrt(head_dim). k_scale, v_scale:
    numbers, or tensors of one element, that keys and values are multiplied by. variant: a custom quire.Variant that
    does not read kv_idx or kv_len, which the tables do not say; its operands are keywords.

    Returns o [batch_size, num_qo_heads, head_dim], or (o, lse) with return_lse=True, lse [batch_size, num_qo_heads] in
    float32, base 2. A request without tokens gives 0. Raises ValidationError naming the argument, or UnsupportedError.

    >>> cache = torch.randn(6, 2, 16, 2, 64).bfloat16()  # [num_pages, 2, page_size, num_kv_heads, head_dim]
    >>> q, block_tables = torch.randn(1, 8, 64).bfloat16(), torch.tensor([[4, 0, 2, 5]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([60], dtype=torch.int32)
    >>> selected = quire.select_pages(q, quire.page_key_bounds(cache), block_tables, seq_lens, page_size=16, top_k=2)
    >>> workspace = torch.empty(1 << 20, dtype=torch.uint8)
    >>> quire.batch_decode_with_selected_pages(q, cache, workspace, selected).shape
    torch.Size([1, 8, 64])
    """
    layout, workspace = KVLayout.of(kv_layout), UserWorkspace(workspace_buffer, "workspace_buffer")
    keys, values = _keys_and_values(paged_kv_cache, layout)
    for part in (keys, values):
        check_contiguous_last(part, "paged_kv_cache")
    steps = {_step(keys, "keys"), _step(values, "values")}
    if len(steps) > 1:
        raise ValidationError(f"paged_kv_cache: expected keys and values with the same strides, got {sorted(steps)}.")
    (num_pages, page_size, heads, _), step = keys.shape, steps.pop()
    check_positive(page_size, "paged_kv_cache: page_size"), check_positive(heads, "paged_kv_cache: num_kv_heads")
    _check_queries(q, None, heads, keys.shape[3], workspace.device)
    check_count(num_pages * step + heads, "paged_kv_cache", "places of heads (num_pages times their page's stride)")
    top_k = _check_selected(selected, q.shape[0], heads, page_size, num_pages)
    # Page numbers outside of the cache stay outside: their products would exceed 32 bits.
    pages = selected.block_tables.clamp(-1, num_pages)
    numbers = pages * step + torch.arange(heads, device=q.device, dtype=torch.int32)[:, None]
    own_scale = 1 / math.sqrt(keys.shape[3]) if sm_scale is None else sm_scale
    scale = Scale.of(own_scale, "sm_scale", workspace.device, positive=True)
    rows = q.reshape(q.shape[0] * heads, -1, q.shape[2])
    given = variant_of(variant)
    split_operands("batch_decode_with_selected_pages", given, operands)
    if given is not None:
        variant, operands = _remapped(given, operands, q, heads)
    result: Any = TableCall(
        rows, PagedKV.of((_by_heads(keys), _by_heads(values)), KVLayout.NHD), workspace, numbers.flatten(0, 1),
        selected.seq_lens.flatten(), top_k * page_size,
        scale.times(Scale.of(k_scale, "k_scale", workspace.device, positive=True)),
        Scale.of(v_scale, "v_scale", workspace.device), out=_rows_of(out, "out", q, heads), enable_pdl=enable_pdl,
        o_scale=None, lse=_rows_of(lse, "lse", q, heads), return_lse=return_lse, backend=backend, variant=variant,
        operands=operands, name="batch_decode_with_selected_pages",
    ).attend()  # fmt: skip
    o = (result[0] if return_lse else result).view(*q.shape[:2], -1) if out is None else out
    return (o, result[1].view(q.shape[:2]) if lse is None else lse) if return_lse else o


#: The table, int32 [batch_size * num_kv_heads, 2], by which a variant finds the request and first head of a row of q.
_PLACES = "requests_and_heads"


def _remapped(
    variant: Variant, given: Mapping[str, Any], q: torch.Tensor, num_kv_heads: int
) -> tuple[Variant, dict[str, Any]]:
    """The variant for rows of one KV head each, and its operands."""
    of_rows, (batch_size, num_qo_heads, _) = _variant_of_rows(variant), q.shape
    rows = torch.arange(batch_size * num_kv_heads, device=q.device)
    table = torch.stack((rows // num_kv_heads, rows % num_kv_heads * (num_qo_heads // num_kv_heads)), 1)
    tables = {} if of_rows == variant_without_mask(variant) else {_PLACES: int32_table(table, q.device)}
    limits = {"head": num_qo_heads, "request": batch_size, "q_idx": 1}
    return of_rows, RemappedOperands(variant_without_mask(variant), of_rows, (tables,), limits, q.device).of_run(given)[
        0
    ]


@lru_cache(maxsize=256)
def _variant_of_rows(variant: Variant) -> Variant:
    plain = variant_without_mask(variant)
    reads = indices_in(plain.expression.score)
    if unknown := reads & {"kv_idx", "kv_len"}:
        raise UnsupportedError(
            f"variant: expected none that reads {min(unknown)}: tables of selected pages do not say where a page is in "
            f"its request."
        )
    return remap_indices(plain, (_PLACES,), _places) if reads & {"head", "request"} else plain


def _places(tracer: Tracer) -> dict[str, Value]:
    row, head = (tracer.value("index", "int", value=name) for name in ("request", "head"))
    return {"request": tracer.read(_PLACES, (row, 0)), "head": tracer.read(_PLACES, (row, 1)) + head}


def _keys_and_values(cache: PagedCache, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as [num_pages, page_size, num_kv_heads, head_dim]."""
    return cache_view(cache_tensors(cache), layout, page_size_of(cache, layout))


def _check_queries(q: Any, batch_size: int | None, num_kv_heads: int, head_dim: int, device: torch.device) -> None:
    check_shape(check_tensor(q, "q"), "q", {"batch_size": batch_size, "num_qo_heads": None, "head_dim": head_dim})
    check_same_device(q, "q", device)
    if not q.shape[1] or q.shape[1] % check_positive(num_kv_heads, "num_kv_heads"):
        raise ValidationError(f"q: expected a multiple of {num_kv_heads} KV heads, got {q.shape[1]} heads.")


def _check_selected(
    selected: SelectedPages, batch_size: int, num_kv_heads: int, page_size: int, num_pages: int
) -> int:  # fmt: skip
    """The number of pages per request and KV head."""
    shape, (tables, lens) = {"batch_size": batch_size, "num_kv_heads": num_kv_heads}, selected
    check_shape(check_tensor(tables, "block_tables"), "block_tables", {**shape, "top_k": None})
    check_shape(check_tensor(lens, "seq_lens"), "seq_lens", shape)
    for tensor, name in ((tables, "block_tables"), (lens, "seq_lens")):
        if tensor.dtype is not torch.int32:
            raise ValidationError(f"{name}: expected dtype torch.int32, as of select_pages(), got {tensor.dtype}.")
    if tables.is_cpu and lens.is_cpu:
        check_page_numbers(tables, lens, page_size, num_pages)
    return int(tables.shape[2])


def _step(pages: torch.Tensor, name: str) -> int:
    """How many heads lie between a page and the next, in memory."""
    page, head = pages.stride(0), pages.stride(2)
    if pages.shape[2] > 1 and (not head or page % head):
        raise ValidationError(
            f"paged_kv_cache: expected {name} whose pages are a multiple of the distance of heads apart, got strides "
            f"{pages.stride()}."
        )
    return page // head if pages.shape[2] > 1 else 1


def _by_heads(pages: torch.Tensor) -> torch.Tensor:
    """A page for each place at which the page of a head may begin: head h of page p is page p * _step() + h, a view."""
    count, page_size, heads, head_dim = pages.shape
    page, token, head, _ = pages.stride()
    most, step = (count - 1) * _step(pages, "") + heads, page if heads == 1 else head
    return pages.as_strided((max(0, most), page_size, 1, head_dim), (step, token, step, 1))


def _rows_of(tensor: torch.Tensor | None, name: str, q: torch.Tensor, num_kv_heads: int) -> torch.Tensor | None:
    """A result [batch_size, num_qo_heads, ...] as rows [batch_size * num_kv_heads, heads of a group, ...]."""
    if tensor is None:
        return None
    sizes = {"batch_size": q.shape[0], "num_qo_heads": q.shape[1]}
    check_shape(check_output(tensor, name), name, sizes | ({"head_dim": None} if name == "out" else {}))
    if not tensor.is_contiguous():
        raise ValidationError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}.")
    return tensor.view(q.shape[0] * num_kv_heads, q.shape[1] // num_kv_heads, *tensor.shape[2:])


_SCORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  #: of scores
_MOST = 1 << 16  #: tokens of a row that has fewer: the rest of the result is -1


def select_tokens(
    scores: torch.Tensor, top_k: int, lens: torch.Tensor | None = None, block_tables: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The top_k tokens with the largest scores of each row, in ascending order, followed by -1 where a row has fewer.

    scores: [rows, num_tokens] in float32, float16 or bfloat16. lens: integers [rows], how many tokens each row has;
    scores beyond them may be anything. None: all. Of equal scores the earlier one is taken; NaN counts as -inf.
    block_tables: int32 [rows, pages]; the result is then page number * page_size + index in the page, as sparse MLA
    takes it (trtllm_batch_decode_with_kv_cache_mla(), flash_mla_with_kvcache()), instead of the number in the row.

    Returns int32 [rows, top_k]. Raises ValidationError naming the argument.

    >>> scores = torch.tensor([[0.5, 2.0, 2.0, -1.0], [3.0, 1.0, 0.0, 9.0]])
    >>> quire.select_tokens(scores, 2, lens=torch.tensor([4, 1])).tolist()
    [[1, 2], [0, -1]]
    """
    check_shape(check_tensor(scores, "scores"), "scores", {"rows": None, "num_tokens": None})
    if scores.dtype not in _SCORE_DTYPES:
        raise ValidationError(f"scores: expected dtype {', '.join(map(str, _SCORE_DTYPES))}, got {scores.dtype}.")
    (rows, num_tokens), most = scores.shape, check_positive(top_k, "top_k")
    if most > max(num_tokens, _MOST):
        raise ValidationError(f"top_k: expected at most {max(num_tokens, _MOST)}, got {top_k}.")
    size, device = check_positive(page_size, "page_size"), scores.device
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    ends = None if lens is None else _checked(lens, "lens", {"rows": rows}, device).contiguous()
    pages = None
    if block_tables is not None:
        pages = _checked(block_tables, "block_tables", {"rows": rows, "pages": None}, device)
        if pages.shape[1] * size < num_tokens:
            raise ValidationError(
                f"block_tables: expected pages of {size} tokens for {num_tokens} scores, got {list(pages.shape)}."
            )
        pages = pages if pages.stride(1) == 1 else pages.contiguous()
    found = torch.empty(rows, most, dtype=torch.int32, device=device)
    _choose(scores, ends, pages, found, size)
    if pages is not None and found.device.type == "cpu":
        counts = torch.full((rows,), num_tokens, device=found.device) if ends is None else ends.clamp(0, num_tokens)
        if not torch.equal((found >= 0).sum(1), counts.clamp(max=most).long()):
            raise ValidationError("block_tables: expected tokens whose numbers fit 32 bits, got larger page numbers.")
    return found


@operator("top_tokens", writes="found")
def _choose(
    scores: torch.Tensor, lens: torch.Tensor | None, pages: torch.Tensor | None, found: torch.Tensor, page_size: int
) -> None:
    """Write the chosen tokens of each row."""
    (rows, num_tokens), (_, top_k) = scores.shape, found.shape
    check_count(num_tokens, "scores", "tokens")
    if not rows:
        return
    params = TopTokensParams(
        scores=scores.data_ptr(), lens=None if lens is None else lens.data_ptr(),
        pages=None if pages is None else pages.data_ptr(), tokens=found.data_ptr(), scores_stride=scores.stride(0),
        pages_stride=0 if pages is None else pages.stride(0), page=FastDivisor.of(page_size), num_rows=rows,
        num_tokens=num_tokens, top_k=top_k,
    )  # fmt: skip
    key = OperationKey("top_tokens", target_of(scores.device), dtype_of(scores.dtype, "scores").slug)
    launch(
        get_module(key.spec()), ctypes.addressof(params), scores.device, grid=rows, block=PARALLEL_THREADS,
        smem=TOP_TOKENS_SMEM,
    )  # fmt: skip


def _checked(value: Any, name: str, shape: dict[str, int | None], device: torch.device) -> torch.Tensor:
    check_shape(check_tensor(value, name), name, shape)
    check_same_device(value, name, device)
    return to_int32(value, name)
