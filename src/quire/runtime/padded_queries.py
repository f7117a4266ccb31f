"""Decode calls in which requests have different numbers of new tokens, as a batch with q_len rows for each request.

The rows of a request are the last of its q_len rows in this batch. Query i then has position i + kv_len - q_len, so
causal masks and windows are right. The rows before them are copies of some row, and their results are dropped. All of
this runs on the device of the call without a synchronisation, so the call may be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire.errors import PlanError, ValidationError
from quire.kernels.expression import indices_in
from quire.kernels.level_variant import with_places
from quire.kernels.trace import Tracer, Value
from quire.kernels.variant import Variant
from quire.runtime.checks import check_same_device, check_shape, check_tensor, to_int32
from quire.runtime.graph import is_capturing
from quire.runtime.variant_operands import PlacedOperands, int32_table

#: The table, int32 [batch_size], by which a custom variant finds the index of a query among those of its request.
PADDING = "padding_of_requests"


class PaddedQueries(NamedTuple):
    """The mapping between rows of the call and of the batch."""

    sources: torch.Tensor  #: [batch_size, q_len]: the row of the call in each row of the batch
    places: torch.Tensor  #: [num_rows]: the row of the batch in which each row of the call is
    padding: torch.Tensor  #: [batch_size]: rows of the batch before a request's own

    @classmethod
    def of(cls, offsets: Any, num_rows: int, batch_size: int, q_len: int, device: torch.device) -> PaddedQueries:
        """From offsets [batch_size + 1] into the rows of the call, which are checked if they are on the host."""
        indptr = _offsets(offsets, num_rows, batch_size, q_len, device)
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

    def placed(self, variant: Variant, given: Mapping[str, Any], num_qo_heads: int) -> tuple[Variant, dict[str, Any]]:
        """A custom variant for the rows of the batch, and its operands: it means the queries of the call."""
        limits = {"head": num_qo_heads, "request": self.sources.shape[0], "q_idx": self.sources.shape[1]}
        planned, device = _variant_of_batch(variant), self.sources.device
        tables = {} if planned is variant else {PADDING: int32_table(self.padding, device)}
        return planned, PlacedOperands(variant, planned, (tables,), limits, device).of_run(given)[0]

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
    return with_places(variant, (PADDING,), _places) if reads else variant


def _places(tracer: Tracer) -> dict[str, Value]:
    q_idx, qo_len, request = (tracer.value("index", "int", value=name) for name in ("q_idx", "qo_len", "request"))
    padding = tracer.read(PADDING, request)
    return {"q_idx": q_idx - padding, "qo_len": qo_len - padding}


def _offsets(value: Any, num_rows: int, batch_size: int, q_len: int, device: torch.device) -> torch.Tensor:
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
