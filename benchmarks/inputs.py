"""The tensors of a row: random, the same in each run, in the layouts that providers take."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rows import Row

__all__ = ["Indices", "Inputs", "make_indices", "make_inputs"]


@dataclass(frozen=True)
class Indices:
    """Where requests lie, on the host. All int32."""

    qo_indptr: torch.Tensor  #: [batch_size + 1]
    kv_indptr: torch.Tensor  #: [batch_size + 1] tokens
    page_indptr: torch.Tensor  #: [batch_size + 1] pages
    pages: torch.Tensor  #: page numbers, shuffled over the whole cache
    last_page_len: torch.Tensor  #: [batch_size]

    @property
    def num_pages(self) -> int:
        return int(self.page_indptr[-1])

    def page_table(self) -> torch.Tensor:
        """[batch_size, most pages of a request]; what a request has not is page 0."""
        counts = (self.page_indptr[1:] - self.page_indptr[:-1]).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for request, count in enumerate(counts):
            begin = int(self.page_indptr[request])
            table[request, :count] = self.pages[begin : begin + count]
        return table


@dataclass
class Inputs:
    """One set of tensors. A request's keys are rows of k (ragged) or of its pages; k and v are views of the cache."""

    row: Row
    indices: Indices
    q: torch.Tensor  #: [nnz_qo, num_qo_heads, head_dim_qk]
    k: torch.Tensor  #: [nnz_kv, num_kv_heads, head_dim_qk], or [num_pages, page_size, num_kv_heads, head_dim_qk]
    v: torch.Tensor
    cache: torch.Tensor | None  #: [num_pages, 2, page_size, num_kv_heads, head_dim]
    out: torch.Tensor  #: [nnz_qo, num_qo_heads, head_dim_vo]
    sinks: torch.Tensor | None  #: [num_qo_heads] float32
    _contiguous: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def keys_and_values(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one request: [kv_len, num_kv_heads, head_dim] each."""
        if self.cache is None:
            begin, end = self.indices.kv_indptr[request : request + 2].tolist()
            return self.k[begin:end], self.v[begin:end]
        begin, end = self.indices.page_indptr[request : request + 2].tolist()
        pages = self.indices.pages[begin:end].to(self.cache.device).long()
        length = self.row.kv_lens[request]
        taken = (_take(self.k, pages), _take(self.v, pages))
        return taken[0].flatten(0, 1)[:length], taken[1].flatten(0, 1)[:length]

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of equally long requests without pages: [batch_size, kv_len, num_kv_heads, head_dim]."""
        if self._contiguous is None:
            if self.cache is None:
                shape = (self.row.batch_size, self.row.kv_lens[0])
                self._contiguous = self.k.unflatten(0, shape), self.v.unflatten(0, shape)
            else:
                requests = [self.keys_and_values(request) for request in range(self.row.batch_size)]
                self._contiguous = torch.stack([k for k, _ in requests]), torch.stack([v for _, v in requests])
        return self._contiguous


def _take(pages: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Pages by number; 8-bit floats travel as bytes, which every device can gather."""
    if pages.element_size() == 1:
        return pages.view(torch.uint8)[numbers].view(pages.dtype)
    return pages[numbers]


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def make_indices(row: Row) -> Indices:
    """The index arrays of a row."""
    page_size = row.page_size or 1
    counts = [-(-length // page_size) for length in row.kv_lens]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    last = [length - (count - 1) * page_size for length, count in zip(row.kv_lens, counts, strict=True)]
    return Indices(
        _offsets(list(row.qo_lens)), _offsets(list(row.kv_lens)), _offsets(counts), pages,
        torch.tensor(last, dtype=torch.int32),
    )  # fmt: skip


def make_inputs(row: Row, device: torch.device, seed: int = 0) -> Inputs:
    """Standard normal tensors. The output is full of NaN: what a kernel does not write shows."""
    generator = torch.Generator(device=device).manual_seed(seed)
    indices = make_indices(row)

    def normal(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        wide = torch.float32 if dtype.itemsize == 1 else dtype
        return torch.randn(*shape, generator=generator, dtype=wide, device=device).to(dtype)

    q = normal(row.q_type, row.nnz_qo, row.num_qo_heads, row.head_dim_qk)
    cache = None
    if row.page_size:
        cache = normal(row.kv_type, indices.num_pages, 2, row.page_size, row.num_kv_heads, row.head_dim_qk)
        k, v = cache.unbind(1)
    else:
        k = normal(row.kv_type, sum(row.kv_lens), row.num_kv_heads, row.head_dim_qk)
        v = normal(row.kv_type, sum(row.kv_lens), row.num_kv_heads, row.head_dim_vo)
    out = torch.full((row.nnz_qo, row.num_qo_heads, row.head_dim_vo), torch.nan, dtype=row.q_type, device=device)
    sinks = normal(torch.float32, row.num_qo_heads) if row.sinks else None
    return Inputs(row, indices, q, k, v, cache, out, sinks)
