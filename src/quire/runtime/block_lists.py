"""Block-sparse attention as attention over pages: a row of blocks is a request, whose pages are the blocks it lists.

Nothing but pages that are listed is read, and no kernel evaluates a mask for them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from quire.errors import ValidationError
from quire.kernels.block_variant import LISTS, PAGES, variant_of_blocks
from quire.kernels.variant import Variant
from quire.runtime.checks import check_positive, check_shape, check_tensor, host_indices
from quire.runtime.schedule import Indices
from quire.runtime.variant_operands import PlacedOperands, int32_table


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

    def placed(
        self, variant: Variant, heads: tuple[int, int], group: int, sizes: tuple[int, int], device: torch.device
    ) -> PlacedOperands:
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
        return PlacedOperands(variant, planned, (tables,), limits, device)

    def for_each_query_head(self, num_heads: int, group_size: int) -> BlockLists:
        """With the rows of each of `num_heads` heads as many times as it has query heads, one after another."""
        order = torch.arange(self.qo_indptr.numel() - 1, device="cpu").view(num_heads, 1, -1)
        order = order.expand(-1, group_size, -1).flatten()
        counts = self.kv_indptr.diff()[order]
        pages = self.pages[_pages(self.kv_indptr[:-1][order], counts).long()]
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
        pages = _pages(self.columns * (self.width // page_size), counts)
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
    pages = _pages(first, (widths // page_size)[head, column])
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


def _pages(first: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Runs of page numbers, one after another: counts[i] from first[i] on."""
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
