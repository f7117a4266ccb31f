"""Operands of a custom variant for the levels of a cascade: tables that give the position of each row of a level in its
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.errors import ValidationError
from quire.kernels.level_variant import COLUMNS, FIRST_ROWS, ROWS, has_places, variant_of_level
from quire.kernels.variant import Variant
from quire.runtime.bits import kv_lens, qo_lens
from quire.runtime.schedule import Indices
from quire.runtime.variant_operands import PlacedOperands, int32_table


class Level(NamedTuple):
    """Entries of a level, on the host: [entries + 1] offsets into the rows of q, and how many keys each has."""

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor

    @classmethod
    def of(cls, indices: Indices) -> Level:
        """Of index arrays."""
        rows, lens = (
            torch.tensor([0, *qo_lens(indices)], device="cpu").cumsum(0),
            torch.tensor(kv_lens(indices), device="cpu"),
        )
        if rows.diff().lt(0).any():
            raise ValidationError("qo_indptr: expected to ascend.")
        return cls(rows, lens)

    def of_rows(self, of_entries: torch.Tensor) -> torch.Tensor:
        """A number of each entry for each of its rows."""
        return of_entries.repeat_interleave(self.qo_indptr.diff())


def operands_of_levels(
    variant: Variant, levels: Sequence[Level], num_qo_heads: int, device: torch.device
) -> PlacedOperands:
    """The operands for consecutive levels; the entries of the last level are the requests."""
    rows = {int(level.qo_indptr[-1]) for level in levels}
    if len(rows) > 1:
        raise ValidationError(f"qo_indptr: expected as many rows of q in each level, got {sorted(rows)}.")
    queries, batch_size = levels[-1].qo_indptr.diff(), len(levels[-1].kv_lens)
    lens = torch.stack([level.of_rows(level.kv_lens) for level in levels])
    limits = {"head": num_qo_heads, "request": batch_size, "q_idx": int(queries.max()) if batch_size else 0}
    limits["kv_idx"] = int(lens.sum(0).max()) if lens.numel() else 0
    tables = _tables(levels, lens, device) if has_places(variant) else [dict[str, torch.Tensor]()] * len(levels)
    return PlacedOperands(variant, variant_of_level(variant), tuple(tables), limits, device)


def _tables(levels: Sequence[Level], lens: torch.Tensor, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """lens [levels, rows of q]: how many keys of each level a row has."""
    own = levels[-1]
    request = own.of_rows(torch.arange(len(own.kv_lens), device="cpu"))
    qo_len, total = own.qo_indptr.diff()[request], lens.sum(0)
    q_idx = torch.arange(len(request), device="cpu") - own.qo_indptr[:-1][request]
    found = []
    for level, first_key in zip(levels, lens.cumsum(0) - lens, strict=True):
        columns = {"q_idx": q_idx, "request": request, "qo_len": qo_len, "kv_len": total, "first_key": first_key}
        rows = torch.stack([columns[name] for name in COLUMNS], 1)
        found.append({FIRST_ROWS: int32_table(level.qo_indptr[:-1], device), ROWS: int32_table(rows, device)})
    return found
