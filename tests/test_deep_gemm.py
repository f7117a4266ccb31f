"""DeepGEMM's scores of an indexer over Quire, against the oracle in float64."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

import oracle
import quire
from problems import ints
from quire.compat import deep_gemm
from quire.compat.deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

E4M3 = torch.float8_e4m3fn


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_scores(got: torch.Tensor, want: torch.Tensor) -> None:
    """Finite columns of `want` within float32's rounding of sums; the others are -inf where `got` is."""
    shown = ~want.isinf()
    got, bound = got.double().cpu(), want[shown].abs().amax() if bool(shown.any()) else 0.0
    assert bool((got[~shown] == -math.inf).all())
    assert bool(((got[shown] - want[shown]).abs() <= 1e-5 * bound + 1e-9).all())


@pytest.mark.parametrize(("num_heads", "head_dim"), [(64, 128), (32, 128), (8, 64), (33, 32), (96, 128), (1, 16)])
def test_ranges_of_keys(device, num_heads, head_dim):
    """Each query has its own, also none; keys that no query sees are NaN, as are scales of others."""
    rows, tokens = 5, 700
    q, keys = numbers(rows, num_heads, head_dim).to(E4M3), (4 * numbers(tokens, head_dim, seed=1)).to(E4M3)
    scales, weights = numbers(tokens, seed=2).abs() + 0.1, numbers(rows, num_heads, seed=3)
    keys.view(torch.uint8)[690:], scales[690:] = 0x7F, math.nan
    begins, ends = [0, 3, 129, 500, 40], [690, 3, 131, 517, 690]
    want = oracle.indexer_scores(q, keys, scales, weights, begins, ends)
    args = [x.to(device) for x in (q, keys, scales, weights)]
    call = args[0], (args[1], args[2]), args[3], ints(begins, device), ints(ends, device)
    assert_scores(fp8_mqa_logits(*call), want)
    packed = fp8_mqa_logits(*call, clean_logits=False, max_seqlen_k=691)
    assert packed.shape == (rows, 691)
    for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        assert_scores(packed[row : row + 1, : end - begin], want[row : row + 1, begin:end])


@pytest.mark.parametrize("page_size", [64, 7])
@pytest.mark.parametrize("next_n", [1, 3])
def test_pages(device, next_n, page_size):
    """Strided pages in any order, lengths of requests or of queries; no page is read beyond a length."""
    lens, num_heads = (1 + next_n, 130, 64, next_n), 64
    counts = [-(-n // page_size) for n in lens]
    q = numbers(len(lens), next_n, num_heads, 128).to(E4M3)
    weights = numbers(len(lens) * next_n, num_heads, seed=1)
    bytes_of_page = -(-page_size * 132 // 16) * 16 + 48
    pages = torch.full((sum(counts) + 2, bytes_of_page), 0x7F, dtype=torch.uint8)
    keys, scales = numbers(sum(lens), 128, seed=2).to(E4M3), numbers(sum(lens), seed=3).abs()
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4)).tolist()
    table, at, free = torch.full((len(lens), max(counts) + 1), 2**30, dtype=torch.int32), 0, iter(order)
    for request, n in enumerate(lens):
        for i, begin in enumerate(range(0, n, page_size)):
            count, page = min(page_size, n - begin), next(free)
            table[request, i] = page
            rows = slice(at + begin, at + begin + count)
            pages[page, : count * 128] = keys[rows].view(torch.uint8).flatten()
            pages[page, page_size * 128 :][: count * 4] = scales[rows].contiguous().view(torch.uint8)
        at += n
    cache = pages.to(device)[:, : page_size * 132].unflatten(1, (page_size, 1, 132))
    each = torch.tensor([[n - next_n + 1 + i for i in range(next_n)] for n in lens])
    width = max(counts) * page_size
    begins, offsets = [], oracle.indptr_of(lens)
    want = torch.full((len(lens) * next_n, width), -math.inf, dtype=torch.float64)
    for request, n in enumerate(lens):
        own = slice(offsets[request], offsets[request + 1])
        rows = slice(request * next_n, (request + 1) * next_n)
        begins = [0] * next_n
        want[rows, :n] = oracle.indexer_scores(
            q[request], keys[own], scales[own], weights[rows], begins, each[request].tolist()
        )
    for lengths in (ints(lens, device), each.int().to(device)):
        meta = get_paged_mqa_logits_metadata(lengths, 64, 132)
        got = fp8_paged_mqa_logits(
            q.to(device), cache, weights.to(device), lengths, table.to(device), meta, width, clean_logits=True
        )
        assert_scores(got, want)
    got = fp8_paged_mqa_logits(q.to(device), cache, weights.to(device), ints(lens, device), table.to(device), None, 100)
    for row, end in enumerate(each.flatten().tolist()):
        assert_scores(got[row : row + 1, : min(end, 100)], want[row : row + 1, : min(end, 100)])


def test_many_parts(device):
    """More columns than one CTA computes, and requests that end in different parts."""
    q, keys = numbers(3, 64, 128).to(E4M3), numbers(9001, 128, seed=1).to(E4M3)
    scales, weights = torch.ones(9001), numbers(3, 64, seed=2)
    begins, ends = [0, 4100, 8999], [9001, 4101, 9001]
    want = oracle.indexer_scores(q, keys, scales, weights, begins, ends)
    args = [x.to(device) for x in (q, keys, scales, weights)]
    assert_scores(fp8_mqa_logits(args[0], (args[1], args[2]), args[3], ints(begins, device), ints(ends, device)), want)


def test_chosen_tokens(device):
    """The indexer and the choice together: those with the largest scores of each query."""
    q, keys = numbers(2, 8, 128).to(E4M3), numbers(300, 128, seed=1).to(E4M3)
    scales, weights, ends = numbers(300, seed=2).abs(), numbers(2, 8, seed=3), [300, 17]
    want = oracle.indexer_scores(q, keys, scales, weights, [0, 0], ends)
    args = [x.to(device) for x in (q, keys, scales, weights)]
    logits = fp8_mqa_logits(args[0], (args[1], args[2]), args[3], ints([0, 0], device), ints(ends, device))
    tokens = quire.select_tokens(logits, 20, ints(ends, device))
    best = want[0].topk(20).indices.sort().values
    assert tokens[0].tolist() == best.tolist() and tokens[1].tolist() == [*range(17), -1, -1, -1]


def test_wrong_arguments():
    q, keys = torch.zeros(2, 4, 64).to(E4M3), torch.zeros(5, 64).to(E4M3)
    call = {
        "q": q, "kv": (keys, torch.ones(5)), "weights": torch.ones(2, 4), "cu_seq_len_k_start": ints([0, 0], "cpu"),
        "cu_seq_len_k_end": ints([1, 1], "cpu"),
    }  # fmt: skip
    for changes, message in (
        ({"q": torch.zeros(2, 4, 64)}, "q: expected a contiguous tensor of torch.float8_e4m3fn"),
        ({"q": torch.zeros(2, 4, 24).to(E4M3)}, "q: expected heads of a multiple of 16 dims"),
        ({"kv": keys}, "kv: expected a pair"),
        ({"kv": (keys, torch.ones(4))}, r"kv\[1\]: expected"),
        ({"weights": torch.ones(2, 4).half()}, "weights: expected dtype torch.float32"),
        ({"cu_seq_len_k_end": ints([1], "cpu")}, "cu_seq_len_k_end"),
        ({"max_seqlen_k": 3}, "clean_logits: expected False"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            fp8_mqa_logits(**{**call, **changes})
    cache, lens = torch.zeros(3, 64, 1, 68, dtype=torch.uint8), ints([[3]] * 2, "cpu")
    paged = {
        "q": q.view(2, 1, 4, 64), "kv_cache": cache, "weights": torch.ones(2, 4), "context_lens": lens,
        "block_table": ints([[0], [1]], "cpu"), "schedule_meta": None, "max_context_len": 64,
    }  # fmt: skip
    for changes, message in (
        ({"kv_cache": cache[:, ::2]}, "kv_cache: expected pages of bytes without gaps"),
        ({"kv_cache": cache[..., :60]}, "kv_cache: expected"),
        ({"block_table": ints([[0]], "cpu")}, "block_table"),
        ({"context_lens": ints([[3, 3]] * 2, "cpu")}, "context_lens"),
        ({"indices": torch.ones(2)}, "indices"),
        ({"max_context_len": 0}, "max_context_len"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            fp8_paged_mqa_logits(**{**paged, **changes})


def test_examples():
    assert doctest.testmod(deep_gemm, extraglobs={"torch": torch}).failed == 0
