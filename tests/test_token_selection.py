"""The choice of tokens for sparse MLA, against a sort in Python."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
import quire
from latents import SCALE, Latents
from problems import ints
from quire.compat.flash_mla import flash_mla_sparse_fwd


def chosen(scores: list[float], top_k: int) -> list[int]:
    """By definition: a stable sort by score, NaN as -inf."""
    order = sorted(range(len(scores)), key=lambda i: math.inf if math.isnan(scores[i]) else -scores[i])
    return (sorted(order[:top_k]) + [-1] * top_k)[:top_k]


@pytest.mark.parametrize("top_k", [1, 7, 64, 200])
def test_ties_and_specials(device, dtype, top_k):
    source = torch.Generator().manual_seed(top_k)
    scores = torch.randint(-3, 4, (9, 130), generator=source).to(dtype)  # most are equal to others
    specials = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0], dtype=dtype)
    scores[:, ::3] = specials[torch.randint(0, 5, (9, 44), generator=source)]
    lens = torch.tensor([0, 1, 2, 7, 63, 64, 65, 129, 130])
    expected = [chosen(row[:n].tolist(), top_k) for row, n in zip(scores, lens.tolist(), strict=True)]
    for kind in (torch.int32, torch.int64):
        found = quire.select_tokens(scores.to(device), top_k, lens.to(kind).to(device))
        assert found.dtype is torch.int32 and found.tolist() == expected
    assert quire.select_tokens(scores.to(device), top_k).tolist() == [chosen(row.tolist(), top_k) for row in scores]


def test_pages(device):
    scores, lens = torch.randn(3, 40, device=device), ints([40, 17, 0], device)
    tables = ints([[5, 0, 9], [2, 7, 2**30], [2**30] * 3], device)
    found = quire.select_tokens(scores, 20, lens, tables, page_size=16)
    for row, table, plain in zip(found, tables, quire.select_tokens(scores, 20, lens), strict=True):
        assert row.tolist() == [-1 if i < 0 else int(table[i // 16]) * 16 + i % 16 for i in plain.tolist()]
    assert quire.select_tokens(scores[:, :0], 2).tolist() == [[-1, -1]] * 3
    assert quire.select_tokens(scores[:0], 2, lens[:0], tables[:0], page_size=16).shape == (0, 2)


def test_attention_to_what_is_chosen(device):
    """The tokens of each request have the largest scores: the result is that of dense attention to them."""
    p = Latents((1, 1, 1), (30, 5, 0), 16, torch.bfloat16, device)
    starts = oracle.indptr_of(p.kv_lens)
    indices = torch.full((3, 64), -1, dtype=torch.int32, device=device)
    for row, n in enumerate(p.kv_lens):
        scores = torch.rand(1, 35, device=device)
        scores[0, starts[row] : starts[row] + n] += 2.0
        indices[row, :n] = quire.select_tokens(scores, max(1, n))[0, :n]
    p.check(flash_mla_sparse_fwd(p.query, p.keys.unsqueeze(1), indices.unsqueeze(1), SCALE)[0])


def test_wrong_arguments(device):
    scores = torch.zeros(2, 10, device=device)
    for options, message in (
        ({"scores": scores.double()}, "scores: expected dtype"),
        ({"scores": scores[0]}, "scores: expected"),
        ({"top_k": 0}, "top_k"),
        ({"lens": ints([1], device)}, "lens: expected"),
        ({"lens": torch.ones(2, device=device)}, "lens: expected dtype"),
        ({"block_tables": ints([[0], [0]], device), "page_size": 8}, "block_tables: expected pages of 8 tokens"),
        ({"page_size": 0}, "page_size"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            quire.select_tokens(**{"scores": scores, "top_k": 2, **options})
