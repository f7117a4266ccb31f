"""What levels of keys are given of a variant of the caller's own: its operands, checked against whole requests, and the
tables that say where each row of a level stands in its request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quire.errors import ValidationError
from quire.kernels.expression_cxx import operands_struct
from quire.kernels.level_variant import COLUMNS, FIRST_ROWS, ROWS, has_places, variant_of_level
from quire.kernels.variant import Variant
from quire.runtime.bits import kv_lens, qo_lens
from quire.runtime.schedule import Indices
from quire.runtime.variant_operands import check_names, write_operands


class Level(NamedTuple):
    """Entries of a level, on the host: [entries + 1] offsets into the rows of q, and how many keys each has."""

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor

    @classmethod
    def of(cls, indices: Indices) -> Level:
        """Of index arrays."""
        rows, lens = torch.tensor([0, *qo_lens(indices)]).cumsum(0), torch.tensor(kv_lens(indices))
        if rows.diff().lt(0).any():
            raise ValidationError("qo_indptr: expected to ascend.")
        return cls(rows, lens)

    def of_rows(self, of_entries: torch.Tensor) -> torch.Tensor:
        """A number of each entry for each of its rows."""
        return of_entries.repeat_interleave(self.qo_indptr.diff())


@dataclass(frozen=True)
class LevelOperands:
    """Of a planned batch, whose requests are the entries of the last level."""

    variant: Variant
    tables: tuple[Mapping[str, torch.Tensor], ...]  #: of each level
    limits: Mapping[str, int]
    device: torch.device

    @classmethod
    def of(cls, variant: Variant, levels: Sequence[Level], num_qo_heads: int, device: torch.device) -> LevelOperands:
        """Of levels that follow one another."""
        rows = {int(level.qo_indptr[-1]) for level in levels}
        if len(rows) > 1:
            raise ValidationError(f"qo_indptr: expected as many rows of q in each level, got {sorted(rows)}.")
        queries, batch_size = levels[-1].qo_indptr.diff(), len(levels[-1].kv_lens)
        lens = torch.stack([level.of_rows(level.kv_lens) for level in levels])
        limits = {"head": num_qo_heads, "request": batch_size, "q_idx": int(queries.max()) if batch_size else 0}
        limits["kv_idx"] = int(lens.sum(0).max()) if lens.numel() else 0
        tables = _tables(levels, lens, device) if has_places(variant) else [dict[str, torch.Tensor]()] * len(levels)
        return cls(variant, tuple(tables), limits, device)

    def of_plan(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each level's plan() takes of what plan() was given."""
        return self._checked("plan", given)

    def of_run(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each level's run() takes of what run() was given."""
        return self._checked("run", given)

    def _checked(self, call: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        expression, of_mask = self.variant.expression, variant_of_level(self.variant).expression.mask_operands
        own = {operand.name for operand in expression.operands}
        names = {"plan": own & of_mask, "run": own - of_mask}
        other = "run" if call == "plan" else "plan"
        check_names(call, given, names[call], names[other], other)
        write_operands(operands_struct(expression)(), expression, names[call], given, self.device, self.limits)
        return [
            {**given, **{name: table for name, table in tables.items() if (name in of_mask) == (call == "plan")}}
            for tables in self.tables
        ]


def _tables(levels: Sequence[Level], lens: torch.Tensor, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """lens [levels, rows of q]: how many keys of each level a row has."""
    own = levels[-1]
    request = own.of_rows(torch.arange(len(own.kv_lens)))
    qo_len, total = own.qo_indptr.diff()[request], lens.sum(0)
    q_idx = torch.arange(len(request)) - own.qo_indptr[:-1][request]
    found = []
    for level, first_key in zip(levels, lens.cumsum(0) - lens, strict=True):
        columns = {"q_idx": q_idx, "request": request, "qo_len": qo_len, "kv_len": total, "first_key": first_key}
        rows = torch.stack([columns[name] for name in COLUMNS], 1)
        found.append({FIRST_ROWS: _table(level.qo_indptr[:-1], device), ROWS: _table(rows, device)})
    return found


def _table(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, and not empty: operands have elements."""
    if not numbers.shape[0]:
        numbers = numbers.new_zeros((1, *numbers.shape[1:]))
    return numbers.to(torch.int32).to(device)
