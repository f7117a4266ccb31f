"""Finds requests that begin with the same pages, by page numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from quire.runtime.attention import AttentionSpec
from quire.runtime.schedule import Indices

#: What a cascade costs beside the keys that it reads, in bytes that a GPU would read meanwhile.
_START_BYTES = 48 << 20
#: Rows over which the products with a key take as long as reading it.
_ROWS_PER_READ = 128
#: How much longer a cascade takes than its keys say.
_SLOWDOWN = 1.5


class _Run(NamedTuple):
    """Neighbouring requests [begin, end) that begin with the same `pages` pages."""

    begin: int
    end: int
    pages: int


def with_shared_prefixes(spec: AttentionSpec) -> AttentionSpec | None:
    """`spec` of a decode as a cascade over the prefixes that neighbouring requests share; None if there are none, or if
    a cascade is estimated not to be faster. The index arrays are on the host.

    Raises no errors: those in the arrays are reported when the batch is planned without a cascade.
    """
    indices = spec.indices
    assert isinstance(indices, Indices) and indices.kv_indices is not None
    if not indices.kv_indices.is_cpu or indices.batch_size < 2:
        return None
    begins, pages = indices.kv_indptr, indices.kv_indices
    if int(begins[0]) < 0 or int(begins[-1]) > pages.numel() or not _begin_alike(begins, pages):
        return None
    lens = begins.diff()
    if int(lens.min()) < 0 or spec.options.fixed_split_size or _is_wrong(indices, lens):
        return None
    runs = _runs(begins, lens, pages, own=1 + (indices.qo_len - 1 + indices.page_size - 1) // indices.page_size)
    if not runs or not _is_faster(spec, lens, runs):
        return None
    return spec._replace(
        indices=_joined(indices, lens, runs), options=spec.options._replace(cascade=True, causal=indices.qo_len > 1)
    )


def _begin_alike(begins: torch.Tensor, pages: torch.Tensor) -> bool:
    """Whether any two neighbours have the same first page: a quick check, which most batches fail."""
    if not pages.numel():
        return False
    first = _first_pages(begins, pages)
    return bool((first[1:] == first[:-1]).any())


def _first_pages(begins: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    return pages.index_select(0, begins[:-1].clamp(0, pages.numel() - 1))


def _is_wrong(indices: Indices, lens: torch.Tensor) -> bool:
    """Whether the arrays are inconsistent, which the scheduler will report."""
    last = indices.kv_last_page_len
    assert last is not None
    if bool(((last < (lens > 0)) | (last > indices.page_size)).any()):
        return True
    kv_lens = torch.where(lens > 0, (lens - 1) * indices.page_size + last, 0)
    return indices.seq_lens is not None and not torch.equal(indices.seq_lens, kv_lens.to(torch.int32))


def _runs(begins: torch.Tensor, lens: torch.Tensor, pages: torch.Tensor, own: int) -> list[_Run]:
    """All runs of two requests and more. Each request keeps its last `own` pages for itself."""
    sharable = (lens - own).clamp(0)
    alone = -1 - torch.arange(lens.numel(), device="cpu")  # no page of a request that has none to share
    first = torch.where(sharable > 0, _first_pages(begins, pages), alone)
    edges = [0, *((first[1:] != first[:-1]).nonzero().view(-1) + 1).tolist(), lens.numel()]
    runs = []
    for begin, end in pairwise(edges):
        if end - begin > 1:
            most = int(sharable[begin:end].min())
            table = pages[begins[begin:end, None] + torch.arange(most, device="cpu")]
            differs = (table != table[0]).any(0).nonzero()
            runs.append(_Run(begin, end, int(differs[0]) if differs.numel() else most))
    return runs


def _is_faster(spec: AttentionSpec, lens: torch.Tensor, runs: list[_Run]) -> bool:
    """Whether a cascade saves enough reads of keys and values to be faster."""
    options, indices = spec.options, spec.indices
    page_bytes = options.page_size * (options.head_dim_qk + options.head_dim_vo) * options.types.kv.bits // 8
    page_bytes *= options.num_kv_heads
    rows = indices.qo_len * options.group_size
    plain = int(lens.sum())
    own = plain - sum(run.pages * (run.end - run.begin) for run in runs)
    shared = sum(run.pages * max(1.0, (run.end - run.begin) * rows / _ROWS_PER_READ) for run in runs)
    return (own + shared) * page_bytes * _SLOWDOWN + _START_BYTES < plain * page_bytes


def _joined(indices: Indices, lens: torch.Tensor, runs: list[_Run]) -> Indices:
    """The nodes of the runs, followed by the requests with their own pages."""
    begins, pages, last = indices.kv_indptr, indices.kv_indices, indices.kv_last_page_len
    assert pages is not None and last is not None
    numbers, shared = pages[int(begins[0]) : int(begins[-1])], torch.zeros_like(lens)
    for run in runs:
        shared[run.begin : run.end] = run.pages
    place = torch.arange(numbers.numel(), device="cpu") - (begins[:-1] - begins[0]).repeat_interleave(lens)
    of_runs = [pages[int(begins[run.begin]) :][: run.pages] for run in runs]
    requests = torch.arange(lens.numel(), dtype=torch.int32, device="cpu")
    rows = torch.cat((_int32([run[:2] for run in runs]), torch.stack((requests, requests + 1), 1)))
    kv_lens = torch.cat((_int32([run.pages for run in runs]), lens - shared))
    return indices._replace(
        batch_size=len(runs) + lens.numel(), qo_indptr=(rows * indices.qo_len).view(-1),
        kv_indptr=torch.cat((_int32([0]), kv_lens.cumsum(0))).to(torch.int32),
        kv_last_page_len=torch.cat((last.new_full((len(runs),), indices.page_size), last)),
        kv_indices=torch.cat((*of_runs, numbers[place >= shared.repeat_interleave(lens)])),
        seq_lens=None, num_shared_nodes=len(runs),
    )  # fmt: skip


def _int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")
