"""The index arrays of a batch for multi-head latent attention: as offsets, as a block table, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ValidationError
from quire.runtime.attention import page_indices
from quire.runtime.block_tables import check_lengths, indices_of
from quire.runtime.checks import batch_size_of, check_shape, check_tensor, host_indices, to_int32
from quire.runtime.indices import check_offsets, check_range
from quire.runtime.repeated import check_repeated
from quire.runtime.schedule import Indices

_OFFSETS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_TABLES = ("cum_seq_lens_q", "block_tables", "seq_lens")


@dataclass(frozen=True, eq=False)
class MLAPlanMetadata:
    """The `metadata` of BatchMLAPagedAttentionWrapper.plan(), created by csr(), dense() or dual().

    qo_indptr, kv_indptr [batch_size + 1], kv_indices [pages], kv_len_arr [batch_size]: offsets and page numbers.
    cum_seq_lens_q [batch_size + 1], block_tables [batch_size, pages], seq_lens [batch_size], max_q_len: a block
    table. All int32, on the host or the device of the calls.

    >>> table = quire.mla.MLAPlanMetadata.dense(
    ...     torch.tensor([0, 1, 2]), torch.tensor([[4, 0], [2, 0]]), torch.tensor([21, 16])
    ... )
    >>> table.seq_lens.tolist()
    [21, 16]
    """

    qo_indptr: torch.Tensor | None = None
    kv_indptr: torch.Tensor | None = None
    kv_indices: torch.Tensor | None = None
    kv_len_arr: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        """A batch as offsets and page numbers."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:  # fmt: skip
        """A batch as a block table and lengths."""
        return cls(None, None, None, None, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    @classmethod
    def dual(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor, *,
        cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
        max_q_len: int | None = None,
    ) -> MLAPlanMetadata:  # fmt: skip
        """Both, which must agree if they are on the host."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)

    def or_else(self, metadata: Any) -> MLAPlanMetadata:
        """`metadata`, Quire's or FlashInfer's object of this kind, which excludes flat arguments, `self`; or these."""
        names = (*_OFFSETS, *_TABLES, "max_q_len")
        if metadata is None:
            return self
        if not all(hasattr(metadata, name) for name in names):
            raise ValidationError(f"metadata: expected MLAPlanMetadata, got {type(metadata).__name__}.")
        if any(getattr(self, name) is not None for name in names):
            raise ValidationError("metadata: expected it or arrays beside it, and not both.")
        return MLAPlanMetadata(*(getattr(metadata, name) for name in names))

    def indices(self, page_size: int) -> Indices:
        """What the planner is given. ValidationError naming the array that is wrong or missing."""
        given = [names for names in (_OFFSETS, _TABLES) if any(getattr(self, name) is not None for name in names)]
        for names in given or [_OFFSETS]:
            for name in names:
                if getattr(self, name) is None:
                    raise ValidationError(f"{name}: expected a tensor, as of {', '.join(names)}; got None.")
        result = self._from_offsets(page_size) if _OFFSETS in given else self._from_tables(page_size)
        if len(given) == 2:
            self._check_tables(result)
        if self.max_q_len is not None:
            if _TABLES not in given:
                raise ValidationError(f"max_q_len: expected it beside cum_seq_lens_q, got {self.max_q_len}.")
            check_repeated(result, max_token_per_sequence=self.max_q_len)
        return result

    def _from_offsets(self, page_size: int) -> Indices:
        qo_indptr = self._on_host("qo_indptr")
        batch = batch_size_of(qo_indptr, "qo_indptr")
        lens, kv_indptr = self._on_host("kv_len_arr", batch), self._on_host("kv_indptr")
        if kv_indptr.shape[0] < batch + 1:
            check_shape(kv_indptr, "kv_indptr", {"batch_size + 1": batch + 1})
        kv_indptr = kv_indptr[: batch + 1]  # of a buffer for more requests
        pages = page_indices(self.kv_indices)
        used = lens if page_size == 1 else (lens + (page_size - 1)).div_(page_size, rounding_mode="floor")
        if not torch.equal(used, kv_indptr.diff()):
            kv_indptr, pages = _without_surplus(kv_indptr, pages, lens, used, page_size)
        # Of requests without pages the planner asks for no tokens of a last one: there this is page_size.
        last = torch.add(lens, used, alpha=-page_size).add_(page_size)
        return Indices(batch, qo_indptr, 0, kv_indptr, last, pages, page_size)

    def _from_tables(self, page_size: int) -> Indices:
        tables = to_int32(check_tensor(self.block_tables, "block_tables"), "block_tables")
        check_shape(tables, "block_tables", {"batch_size": None, "pages": None})
        batch, num_pages = tables.shape
        lens, qo_indptr = self._on_host("seq_lens", batch), self._on_host("cum_seq_lens_q", batch + 1)
        check_lengths(lens, num_pages, page_size, num_pages * page_size, "block_tables")
        return indices_of(tables, lens, qo_indptr, 0, page_size)

    def _check_tables(self, indices: Indices) -> None:
        """Check that the block table agrees with the offsets, if both are on the host."""
        for name, first_name in (("cum_seq_lens_q", "qo_indptr"), ("seq_lens", "kv_len_arr")):
            first, again = self._on_host(first_name), check_tensor(getattr(self, name), name)
            check_shape(again, name, {"entries": first.shape[0]})
            if again.is_cpu and not torch.equal(to_int32(again, name), first):
                raise ValidationError(f"{name}: expected {first.tolist()}, as {first_name} says, got {again.tolist()}.")
        check_repeated(indices, block_tables=self.block_tables)

    def _on_host(self, name: str, length: int | None = None) -> torch.Tensor:
        return host_indices(getattr(self, name), name, length)


def _without_surplus(
    kv_indptr: torch.Tensor, pages: torch.Tensor, lens: torch.Tensor, used: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and page numbers without surplus pages, which the lengths do not use."""
    check_offsets(kv_indptr, "kv_indptr")
    if page_size > 1:
        used = lens // page_size + (lens % page_size > 0)  # without a sum beyond 32 bits
    check_range(lens, "kv_len_arr", 0, 2**31 - 1, "lengths from 0 on")
    if bool((used > kv_indptr.diff()).any()) or int(kv_indptr[-1]) > pages.numel():
        raise ValidationError(
            f"kv_len_arr: expected at most as many tokens as fit the pages of {page_size} tokens that kv_indptr and "
            f"kv_indices give each request, got {lens.tolist()} tokens in {kv_indptr.diff().tolist()} pages."
        )
    indptr = torch.zeros_like(kv_indptr)
    torch.cumsum(used, 0, out=indptr[1:])
    shift = torch.repeat_interleave(kv_indptr[:-1] - indptr[:-1], used)
    return indptr, pages[(torch.arange(shift.numel(), device="cpu") + shift).to(pages.device)]
