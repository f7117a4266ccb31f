"""Problems over caches of 4 bits (NVFP4), and the layouts of such caches.

Keys and values of a problem are those that the quantised ones stand for, which float16 and bfloat16 hold exactly: the
oracle sees them. Whatever a kernel must not read has NaN as its scale, and numbers of -6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import oracle
from problems import Problem, ints, offsets

SCALES = {"k_scale": 0.05, "v_scale": 1.75}
_NAN = 0x7F  #: of e4m3


class Quantised(NamedTuple):
    """Rows of a problem as bytes of two numbers and as scales, each [nnz, num_kv_heads, ...] uint8."""

    k: Tensor
    v: Tensor
    k_sf: Tensor
    v_sf: Tensor


class Cache(NamedTuple):
    """A cache and its tables."""

    kv: Tensor | tuple[Tensor, Tensor]
    sf: Tensor | tuple[Tensor, Tensor]
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    page_size: int
    kv_layout: str

    def tables(self, device: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """indptr, indices, last_page_len, as PagedCache has them."""
        move = (lambda t: t) if device is None else (lambda t: t.to(device))
        return move(self.indptr), self.indices, move(self.last_page_len)


def quantise(p: Problem) -> Quantised:
    """Quantises keys and values of a problem, which become what the numbers say."""
    device, parts = p.device, []
    for name in ("k", "v"):
        data, scales = oracle.nvfp4_quantised(getattr(p, name), 1.0)
        setattr(p, name, oracle.nvfp4_numbers(data, scales).to(p.dtype).to(device))
        parts.append((data.to(device), scales.view(torch.uint8).to(device)))
    return Quantised(parts[0][0], parts[1][0], parts[0][1], parts[1][1])


def paged(p: Problem, rows: Quantised, page_size: int = 16, kv_layout: str = "NHD", form: str = "tuple") -> Cache:
    """The rows in pages of a random order. form: "tensor" and "tuple" as in problems.py; "packed": keys and values of a
    page each have one region, numbers and then scales, of one allocation; "sliced": views of wider tensors.
    """
    counts = [-(-n // page_size) for n in p.kv_lens]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))[: sum(counts)].tolist()
    pages = [_pages(rows[i], p.kv_lens, order, page_size, num_pages, 0xFF if i < 2 else _NAN) for i in range(4)]
    if kv_layout == "HND":
        pages = [page.transpose(1, 2).contiguous() for page in pages]
    k, v, k_sf, v_sf = {"packed": _packed, "sliced": _sliced}.get(form, lambda pages: pages)(pages)
    k_sf, v_sf = (scales.view(torch.float8_e4m3fn) for scales in (k_sf, v_sf))
    kv, sf = ((k, v), (k_sf, v_sf)) if form != "tensor" else (torch.stack((k, v), 1), torch.stack((k_sf, v_sf), 1))
    last = [(n - 1) % page_size + 1 if n else 0 for n in p.kv_lens]
    return Cache(kv, sf, offsets(counts, p.device), ints(order, p.device), ints(last, p.device), page_size, kv_layout)


def _pages(
    rows: Tensor, lens: Sequence[int], order: Sequence[int], page_size: int, num_pages: int, free: int
) -> Tensor:
    pages = torch.full((num_pages, page_size, *rows.shape[1:]), free, dtype=torch.uint8, device=rows.device)
    numbers, at = iter(order), 0
    for n in lens:
        for begin in range(0, n, page_size):
            count = min(page_size, n - begin)
            pages[next(numbers), :count] = rows[at : at + count]
            at += count
    return pages


def _packed(pages: list[Tensor]) -> list[Tensor]:
    """Views of one tensor [num_pages, bytes]: numbers and scales of keys, then those of values, as vLLM has them."""
    order = (0, 2, 1, 3)
    flat = torch.cat([pages[i].flatten(1) for i in order], 1)
    views, at = {}, 0
    for i in order:
        size = pages[i][0].numel()
        views[i] = flat[:, at : at + size].unflatten(1, pages[i].shape[1:])
        at += size
    return [views[i] for i in range(4)]


def _sliced(pages: list[Tensor]) -> list[Tensor]:
    """Views with other strides for each."""
    views = []
    for i, page in enumerate(pages):
        wide = torch.full(
            (page.shape[0], page.shape[1] + i % 2, page.shape[2] + 1, page.shape[3] + 16),
            _NAN,
            dtype=torch.uint8,
            device=page.device,
        )
        view = wide[:, i % 2 :, 1:, : page.shape[3]]
        view.copy_(page)
        views.append(view)
    return views
