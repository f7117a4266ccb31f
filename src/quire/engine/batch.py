"""Batches that are attended to as other batches: padded queries, chosen tokens, lists of blocks, items to score.

The rows of a request are the last of its q_len rows in this batch. Query i then has position i + kv_len - q_len, so
causal masks and windows are right. The rows before them are copies of some row, and their results are dropped. All of
this runs on the device of the call without a synchronisation, so the call may be captured.

This runs on the device of the call without a synchronisation, so the call may be captured in a CUDA graph.

Nothing but pages that are listed is read, and no kernel evaluates a mask for them.

In multi-item scoring a token of an item sees the prefix and its own item up to itself, a delimiter sees only the
prefix, and a token of the prefix sees earlier tokens. One pass therefore scores items independently. Kernels read this
as a custom mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire.engine.checks import check_positive, check_same_device, check_shape, check_tensor, host_indices, to_int32
from quire.engine.device import is_capturing
from quire.engine.operands import RemappedOperands, int32_table
from quire.engine.schedule import Indices, Lengths, ScheduleCache, check_count, check_offsets, without_gaps
from quire.errors import PlanError, ValidationError
from quire.kernels.expressions.rewrite import LISTS, PAGES, remap_indices, variant_of_blocks
from quire.kernels.expressions.trace import Tracer, Value
from quire.kernels.expressions.tree import indices_in
from quire.kernels.expressions.variant import Variant

#: The table, int32 [batch_size], by which a custom variant finds the index of a query among those of its request.
PADDING = "padding_of_requests"


class PaddedQueries(NamedTuple):
    """The mapping between rows of the call and of the batch."""

    sources: torch.Tensor  #: [batch_size, q_len]: the row of the call in each row of the batch
    places: torch.Tensor  #: [num_rows]: the row of the batch in which each row of the call is
    padding: torch.Tensor  #: [batch_size]: rows of the batch before a request's own

    @classmethod
    def of(
        cls, offsets: Any, num_rows: int, batch_size: int, lengths: tuple[int, int], device: torch.device
    ) -> PaddedQueries:
        """From offsets [batch_size + 1] into the rows of the call, which are checked if they are on the host. lengths:
        the rows of a request in the batch, and the most that the caller says it may have.
        """
        q_len, most = lengths
        indptr = _row_offsets(offsets, num_rows, batch_size, most, device)
        begin, rows = indptr[:-1], torch.arange(num_rows, device=device)
        padding = q_len - indptr.diff()
        own = torch.arange(q_len, device=device) - padding[:, None]  # the token of its request, below 0: none
        request = torch.searchsorted(indptr[1:].contiguous(), rows, right=True).clamp_(max=batch_size - 1)
        places = request * q_len + padding[request] + rows - begin[request]
        return cls(
            (begin[:, None] + own.clamp_(min=0)).clamp_(0, max(0, num_rows - 1)),
            places.clamp_(0, batch_size * q_len - 1), padding,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Rows of the call."""
        return self.places.shape[0]

    def rows(self, query: torch.Tensor) -> torch.Tensor:
        """For each row of the batch, the row of the call that it copies."""
        return query[self.sources.view(-1)]

    def batch(
        self, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """query, and memory for out and lse, of the batch."""
        rows = self.sources.numel()
        return (
            self.rows(query),
            out.new_empty((rows, *out.shape[1:])),
            None if lse is None else lse.new_empty((rows, *lse.shape[1:])),
        )

    def unpad(self, *pairs: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        """Copies the rows of the call from the first of each pair into the second."""
        for batch, rows in pairs:
            if batch is not None and rows is not None:
                rows.copy_(batch[self.places])

    def remapped(self, variant: Variant, given: Mapping[str, Any], num_qo_heads: int) -> tuple[Variant, dict[str, Any]]:
        """A custom variant for the rows of the batch, and its operands: it means the queries of the call."""
        limits = {"head": num_qo_heads, "request": self.sources.shape[0], "q_idx": self.sources.shape[1]}
        planned, device = _variant_of_batch(variant), self.sources.device
        tables = {} if planned is variant else {PADDING: int32_table(self.padding, device)}
        return planned, RemappedOperands(variant, planned, (tables,), limits, device).of_run(given)[0]

    def tree_mask(self, words: torch.Tensor) -> torch.Tensor:
        """The bits uint8 [batch_size, q_len, bytes] of a mask [num_rows, bytes], whose first bit is the first token of
        a request: what comes before that in the batch are older tokens, which all see.
        """
        q_len, num_bits = self.sources.shape[1], 8 * words.shape[1]
        shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
        bits = ((words[..., None] >> shifts) & 1).flatten(1)[self.sources]  # [batch_size, q_len, num_bits]
        token = torch.arange(num_bits, device=words.device) - self.padding[:, None]
        columns = token.clamp(0, q_len - 1)[:, None].expand(-1, q_len, -1)
        bits = torch.where((token < 0)[:, None], 1, bits.gather(2, columns))
        return (bits.view(-1, q_len, num_bits // 8, 8) << shifts).sum(3).to(torch.uint8)


@lru_cache(maxsize=256)
def _variant_of_batch(variant: Variant) -> Variant:
    reads = indices_in(variant.expression.score) & {"q_idx", "qo_len"}
    return remap_indices(variant, (PADDING,), _places) if reads else variant


def _places(tracer: Tracer) -> dict[str, Value]:
    q_idx, qo_len, request = (tracer.value("index", "int", value=name) for name in ("q_idx", "qo_len", "request"))
    padding = tracer.read(PADDING, request)
    return {"q_idx": q_idx - padding, "qo_len": qo_len - padding}


def _row_offsets(value: Any, num_rows: int, batch_size: int, q_len: int, device: torch.device) -> torch.Tensor:
    """int64 on the device."""
    offsets = check_tensor(value, "q_cu_seq_lens")
    offsets = offsets.view(torch.int32) if offsets.dtype is torch.uint32 else to_int32(offsets, "q_cu_seq_lens")
    check_shape(offsets, "q_cu_seq_lens", {"batch_size + 1": batch_size + 1})
    if not offsets.is_cpu:
        check_same_device(offsets, "q_cu_seq_lens", device)
        return offsets.long()
    if is_capturing(device):
        raise PlanError(f"q_cu_seq_lens: expected a tensor on {device} in the capture of a CUDA graph, got a host's.")
    ends, lens = (int(offsets[0]), int(offsets[-1])), offsets.diff()
    if ends != (0, num_rows) or (batch_size and not 0 <= int(lens.min()) <= int(lens.max()) <= q_len):
        raise ValidationError(
            f"q_cu_seq_lens: expected offsets from 0 to the {num_rows} rows of query, in steps of 0 to "
            f"q_len_per_req={q_len}, got {offsets.tolist()}."
        )
    return offsets.long().to(device, non_blocking=True)


def selected_keys(
    indices: torch.Tensor, most: torch.Tensor | None, num_tokens: int, kept: ScheduleCache | None = None
) -> tuple[torch.Tensor | Lengths, torch.Tensor | None]:
    """block_tables and seq_lens for TableCall.of_latents() with is_selected, from int32 indices [rows, top_k], of which
    the first `most` [rows] of each row, or all, are used. Indices below 0 or from num_tokens on are ignored; a token
    that is listed twice counts twice. kept: where the schedule is kept if all are used.
    """
    if indices.is_cpu:
        return without_gaps(indices, most, num_tokens)
    return Lengths(None if most is None else most.contiguous(), indices, 1, 1, num_tokens, kept), None


def row_indices(indices: Any, shape: tuple[int, ...], name: str, device: torch.device) -> torch.Tensor:
    """Indices of tokens [*shape, top_k] as int32 [rows, top_k] on `device`."""
    check_shape(
        check_tensor(indices, name), name, {f"query.shape[{i}]": n for i, n in enumerate(shape)} | {"top_k": None}
    )
    check_same_device(indices, name, device)
    return to_int32(indices, name).flatten(0, -2).contiguous()


def row_lengths(lens: Any, name: str, num_rows: int, q_len: int, offsets: torch.Tensor | None) -> torch.Tensor | None:
    """Lengths as int32 [num_rows]: of each row, or of each request of q_len rows or of rows between `offsets`."""
    if lens is None:
        return None
    given: torch.Tensor = to_int32(check_tensor(lens, name), name).flatten()
    if given.shape[0] == num_rows:
        return given
    if offsets is not None and given.shape[0] == offsets.shape[0] - 1:
        return given.repeat_interleave(offsets.diff().to(given.device), output_size=num_rows)
    if offsets is None and given.shape[0] * q_len == num_rows:
        return given.repeat_interleave(q_len)
    raise ValidationError(
        f"{name}: expected a length for each of {num_rows} queries or each request, got {list(given.shape)}."
    )


class BlockLists(NamedTuple):
    """Rows of blocks, each with the blocks that its queries see. All on the host."""

    qo_indptr: torch.Tensor  #: [rows + 1] int32, offsets into the queries
    kv_indptr: torch.Tensor  #: [rows + 1] int32, offsets into `pages`
    pages: torch.Tensor  #: int32
    page_size: int  #: a divisor of all widths of blocks

    def indices(self) -> Indices:
        """The index arrays of a batch, whose pages are full."""
        rows = self.qo_indptr.numel() - 1
        last = torch.full((rows,), self.page_size, dtype=torch.int32, device="cpu")
        return Indices(rows, self.qo_indptr, 0, self.kv_indptr, last, self.pages, self.page_size)

    def remapped(
        self, variant: Variant, heads: tuple[int, int], group: int, sizes: tuple[int, int], device: torch.device
    ) -> RemappedOperands:
        """What kernels are given of a variant whose places are those of a matrix of `sizes` queries and keys. Rows of
        different heads lie one after another; group: query heads of such a row.
        """
        (num_qo_heads, num_kv_heads), (qo_len, kv_len) = heads, sizes
        first, rows_of_heads = self.qo_indptr[:-1], int(self.qo_indptr[-1])
        part, columns = first // max(1, qo_len), self.kv_indptr[:-1]
        first_key = part * group // (num_qo_heads // num_kv_heads) * kv_len
        lens = (torch.full_like(first, size) for size in sizes)
        table = torch.stack([first - part * qo_len, part * group, columns, first_key, *lens], 1)
        planned = variant_of_blocks(variant, self.page_size, rows_of_heads > qo_len)
        known = {LISTS: int32_table(table, device), PAGES: int32_table(self.pages, device)}
        read = {operand.name for operand in planned.expression.operands}
        limits = {"head": num_qo_heads, "request": 1, "q_idx": qo_len, "kv_idx": kv_len}
        tables = {name: tensor for name, tensor in known.items() if name in read}
        return RemappedOperands(variant, planned, (tables,), limits, device)

    def for_each_query_head(self, num_heads: int, group_size: int) -> BlockLists:
        """With the rows of each of `num_heads` heads as many times as it has query heads, one after another."""
        order = torch.arange(self.qo_indptr.numel() - 1, device="cpu").view(num_heads, 1, -1)
        order = order.expand(-1, group_size, -1).flatten()
        counts = self.kv_indptr.diff()[order]
        pages = self.pages[runs_from(self.kv_indptr[:-1][order], counts).long()]
        return BlockLists(_offsets(self.qo_indptr.diff()[order]), _offsets(counts), pages, self.page_size)


class BlockMatrix(NamedTuple):
    """Which blocks of a matrix of queries and keys are listed: SciPy's BSR, whose last blocks may be cut off."""

    indptr: torch.Tensor  #: [block rows + 1] int32, offsets into `columns`
    columns: torch.Tensor  #: int32, the number of each listed block's column
    num_rows: int  #: queries
    num_columns: int  #: keys
    rows: int  #: of a block
    width: int  #: of a block

    @classmethod
    def of(cls, indptr: Any, indices: Any, M: Any, N: Any, R: Any, C: Any) -> BlockMatrix:
        """From the arguments of BlockSparseAttentionWrapper.plan()."""
        num_rows, num_columns = check_positive(M, "M"), check_positive(N, "N")
        rows, width = check_positive(R, "R"), check_positive(C, "C")
        offsets = host_indices(indptr, "indptr", -(-num_rows // rows) + 1)
        columns, num_blocks = host_indices(indices, "indices"), -(-num_columns // width)
        if int(offsets[0]) or bool((offsets.diff() < 0).any()) or int(offsets[-1]) != columns.numel():
            raise ValidationError(
                f"indptr: expected to ascend from 0 to {columns.numel()}, as many as indices, got {offsets.tolist()}."
            )
        if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < num_blocks:
            raise ValidationError(
                f"indices: expected block columns 0..{num_blocks - 1} (N={num_columns}, C={width}), got "
                f"{int(columns.min())}..{int(columns.max())}."
            )
        return cls(offsets, columns, num_rows, num_columns, rows, width)

    @property
    def widths(self) -> torch.Tensor:
        """Keys of each listed block."""
        return (self.num_columns - self.columns * self.width).clamp_(max=self.width)

    def lists(self) -> BlockLists:
        """With blocks as pages, or as several where the last column is narrower."""
        page_size = math.gcd(self.width, self.num_columns)
        ends = (torch.arange(self.indptr.numel(), device="cpu") * self.rows).clamp_(max=self.num_rows)
        counts = self.widths // page_size
        pages = runs_from(self.columns * (self.width // page_size), counts)
        offsets = _offsets(counts)[self.indptr.long()].contiguous()
        return BlockLists(ends.to(torch.int32), offsets, pages, page_size)

    def flat_mask(self, mask: Any) -> torch.Tensor:
        """A mask [listed blocks, R, C] as kernels take it: for each row of blocks a matrix of queries and keys."""
        sizes = {"listed blocks": self.columns.numel(), "R": self.rows, "C": self.width}
        check_shape(check_tensor(mask, "mask"), "mask", sizes)
        seen = torch.arange(self.width, device="cpu") < self.widths[:, None]
        parts = [torch.empty(0, dtype=mask.dtype, device=mask.device)]
        for row, (begin, end) in enumerate(zip(self.indptr.tolist(), self.indptr.tolist()[1:], strict=False)):
            matrix = mask[begin:end].transpose(0, 1).reshape(self.rows, -1)
            if not (shown := seen[begin:end].flatten()).all():
                matrix = matrix[:, shown.to(mask.device)]
            parts.append(matrix[: self.num_rows - row * self.rows].flatten())
        return torch.cat(parts)


def lists_of_heads(block_mask_map: Any, block_row_sz: Any, block_col_sz: Any, num_kv_heads: int) -> BlockLists:
    """Of heads with blocks of their own, one after another: head h has queries h * qo_len and keys h * kv_len on."""
    shown = check_tensor(block_mask_map, "block_mask_map")
    check_shape(shown, "block_mask_map", {"num_kv_heads": num_kv_heads, "MB": None, "NB": None})
    shown = shown.cpu().bool()
    rows, widths = (
        _sizes(given, name, num_kv_heads, number, blocks)
        for given, name, number, blocks in (
            (block_row_sz, "block_row_sz", "MB", shown.shape[1]),
            (block_col_sz, "block_col_sz", "NB", shown.shape[2]),
        )
    )
    page_size = max(1, math.gcd(*widths.flatten().tolist()))
    head, _, column = shown.nonzero(as_tuple=True)
    first = (_offsets(widths.flatten())[:-1].view_as(widths) // page_size)[head, column]
    pages = runs_from(first, (widths // page_size)[head, column])
    counts = torch.where(shown, widths[:, None, :], 0).sum(2).flatten() // page_size
    return BlockLists(_offsets(rows.flatten()), _offsets(counts), pages, page_size)


def _sizes(given: Any, name: str, num_kv_heads: int, number: str, num_blocks: int) -> torch.Tensor:
    """Sizes of blocks [num_kv_heads, blocks], whose sum is one for all heads."""
    tensor = check_tensor(given, name)
    check_shape(tensor, name, {"num_kv_heads": num_kv_heads, number: num_blocks})
    sizes = host_indices(tensor.flatten(), name).view(num_kv_heads, num_blocks)
    sums = sizes.sum(1)
    if bool((sizes < 0).any()) or bool((sums != sums[0]).any()):
        raise ValidationError(f"{name}: expected sizes from 0 on with the same sum for each head, got {sums.tolist()}.")
    return sizes


def runs_from(first: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Runs of numbers, one after another: counts[i] from first[i] on, int32."""
    starts = first - _offsets(counts)[:-1]
    total = int(counts.sum())
    return (torch.arange(total, device="cpu") + starts.repeat_interleave(counts, output_size=total)).to(torch.int32)


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """Offsets [n + 1] int32 of counts [n]; ValidationError from 2**31 on."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=offsets[1:])
    if int(offsets[-1]) >= 2**31:
        raise ValidationError(f"blocks: expected fewer than 2**31 rows and listed keys in all, got {int(offsets[-1])}.")
    return offsets.to(torch.int32)


# --- multi-item scoring ----------------------------------------------------------------------------------------------


def with_items(
    custom_mask: torch.Tensor | None, packed_custom_mask: torch.Tensor | None, indices: Indices, device: torch.device,
    prefix_len_ptr: Any, token_pos_in_items_ptr: Any, token_pos_in_items_len: Any, max_item_len_ptr: Any,
) -> torch.Tensor | None:  # fmt: skip
    """The mask of multi-item scoring if plan() was asked for it, else `custom_mask`."""
    if prefix_len_ptr is None:
        if token_pos_in_items_ptr is not None or token_pos_in_items_len or max_item_len_ptr is not None:
            raise ValidationError(
                "prefix_len_ptr: expected a tensor beside token_pos_in_items_ptr, token_pos_in_items_len and "
                "max_item_len_ptr, got None."
            )
        return custom_mask
    if custom_mask is not None or packed_custom_mask is not None:
        name = "packed_custom_mask" if custom_mask is None else "custom_mask"
        raise ValidationError(f"{name}: expected None beside prefix_len_ptr, which says all that is seen.")
    length = check_positive(token_pos_in_items_len, "token_pos_in_items_len")
    if indices.qo_indptr is not None:
        check_offsets(indices.qo_indptr, "qo_indptr")
    check_count(int((indices.qo_lens() * indices.kv_lens()).sum()), "qo_indptr", "rows times tokens of their requests")
    batch = {"batch_size": indices.batch_size}
    prefixes = _prefix_lens(prefix_len_ptr, indices, length)
    positions = _of_type(token_pos_in_items_ptr, "token_pos_in_items_ptr", torch.uint16, device)
    missing = len(prefixes) * length - positions.numel()  # zeros behind the last request's tokens
    spare = length - (int(indices.kv_lens()[-1]) - prefixes[-1]) if prefixes else 0
    if positions.dim() != 1 or not 0 <= missing <= spare:
        check_shape(
            positions, "token_pos_in_items_ptr", {"batch_size * token_pos_in_items_len": len(prefixes) * length}
        )
    positions = torch.nn.functional.pad(positions.to(torch.int32), (0, missing)).view(-1, length)
    if max_item_len_ptr is not None:
        most = _of_requests(_of_type(max_item_len_ptr, "max_item_len_ptr", torch.uint16, device))
        check_shape(most, "max_item_len_ptr", batch)
        _check_longest(positions, most)
    positions = positions.to(device, non_blocking=True)
    lens = zip(indices.qo_lens().tolist(), indices.kv_lens().tolist(), prefixes, positions, strict=True)
    return torch.cat([torch.empty(0, dtype=torch.bool, device=device), *(_seen(*one).flatten() for one in lens)])


def _of_type(value: Any, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of FlashInfer's number type, on the host or the device."""
    tensor = check_tensor(value, name)
    if tensor.dtype is not dtype:
        raise ValidationError(f"{name}: expected dtype {dtype}, got {tensor.dtype}.")
    if not tensor.is_cpu:
        check_same_device(tensor, name, device)
    return tensor.contiguous()


def _of_requests(tensor: torch.Tensor) -> torch.Tensor:
    """[batch_size]; that of one request may be a number."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _prefix_lens(value: Any, indices: Indices, length: int) -> list[int]:
    """On the host, to which a device's are copied, as index arrays are."""
    tensor = check_tensor(value, "prefix_len_ptr")
    prefixes = _of_requests(_of_type(tensor, "prefix_len_ptr", torch.uint32, tensor.device))
    check_shape(prefixes, "prefix_len_ptr", {"batch_size": indices.batch_size})
    numbers: list[int] = prefixes.cpu().tolist()
    for request, (prefix, kv_len) in enumerate(zip(numbers, indices.kv_lens().tolist(), strict=True)):
        if not kv_len - length <= prefix <= kv_len:
            raise ValidationError(
                f"prefix_len_ptr: expected {max(0, kv_len - length)}..{kv_len} of request {request}, with {kv_len} "
                f"tokens (token_pos_in_items_len={length}), got {prefix}."
            )
    return numbers


def _check_longest(positions: torch.Tensor, most: torch.Tensor) -> None:
    """Compare max_item_len_ptr, which is redundant, with the positions, if both are on the host."""
    if positions.is_cpu and most.is_cpu and positions.numel():
        longest = positions.amax(dim=1)
        if bool((longest > most.to(torch.int32)).any()):
            raise ValidationError(
                f"max_item_len_ptr: expected at least {longest.tolist()}, the largest positions in "
                f"token_pos_in_items_ptr, got {most.tolist()}."
            )


def _seen(qo_len: int, kv_len: int, prefix_len: int, positions: torch.Tensor) -> torch.Tensor:
    """Which keys each query of one request sees: bool [qo_len, kv_len]. `positions` begin after the prefix."""
    key = torch.arange(kv_len, dtype=torch.int32, device=positions.device)
    at = torch.arange(kv_len - qo_len, kv_len, dtype=torch.int32, device=positions.device)
    position = positions[(at - prefix_len).clamp_(0, positions.shape[0] - 1)]
    begin = torch.where(at < prefix_len, 0, at + 1 - position)
    return (key <= at[:, None]) & ((key < prefix_len) | (key >= begin[:, None]))
