"""Page-sparse decode: which pages are chosen, against float64, and attention to them alone, against the oracle."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import oracle
import quire
from problems import FORMS, Problem, ints, workspace
from quire.attention import variants

LENS = (70, 0, 8, 33, 1)
HEADS, GROUP, PAGE = 2, 3, 8


def tables(p: Problem, page_size: int, kv_layout: str = "NHD", signature: str = "tuple"):
    """A cache, with NaN wherever no token lies; its table of pages, with numbers of no page behind a request's own."""
    cache = p.paged(page_size, kv_layout, signature)
    ends = cache.indptr.tolist()
    most = max(b - a for a, b in pairwise(ends)) + 1
    table = torch.full((len(ends) - 1, most), -7, dtype=torch.int32)
    for request, (begin, end) in enumerate(pairwise(ends)):
        table[request, : end - begin] = cache.indices[begin:end].cpu()
    return cache, table.to(p.device), ints(p.kv_lens, p.device)


def problem(device: str, dtype: torch.dtype, lens: tuple[int, ...] = LENS) -> Problem:
    sizes = {"num_qo_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": 64}
    return Problem([1] * len(lens), lens, dtype=dtype, device=device, **sizes)


def best_pages(p: Problem, page_size: int, top_k: int) -> list[list[list[int]]]:
    """In float64: the numbers, in the request's table, of the pages that each KV head selects."""
    chosen = []
    for b, n in enumerate(p.kv_lens):
        keys = p.k[p.kv_indptr[b] : p.kv_indptr[b + 1]].cpu().double()
        count = -(-n // page_size)
        for head in range(HEADS):
            q = p.q[b, head * GROUP : (head + 1) * GROUP].cpu().double()
            scores = []
            for page in range(count - 1):
                own = keys[page * page_size : (page + 1) * page_size, head]
                bound = torch.maximum(q * own.amin(0), q * own.amax(0)).sum(1)
                assert (bound[:, None] + 1e-9 >= q @ own.t()).all(), "no logit is above its bound"
                scores.append(float(bound.max()))
            order = sorted(range(count - 1), key=lambda i: (-scores[i], i))[: top_k - 1]
            chosen.append(sorted(order) + ([count - 1] if count else []))
    return [chosen[at : at + HEADS] for at in range(0, len(chosen), HEADS)]


def check_selected(p: Problem, o: Tensor, lse: Tensor, pages: list[list[list[int]]], page_size: int) -> None:
    """Each KV head attends to its pages alone."""
    for b, of_heads in enumerate(pages):
        for head, own in enumerate(of_heads):
            first, end = p.kv_indptr[b], p.kv_indptr[b + 1]
            keys = [
                at for page in own for at in range(first + page * page_size, min(first + (page + 1) * page_size, end))
            ]
            heads = slice(head * GROUP, (head + 1) * GROUP)
            given = p.q[b : b + 1, heads], p.k[keys, head : head + 1], p.v[keys, head : head + 1]
            ends = [0, 1], [0, len(keys)]
            truth = oracle.attention(*given, *ends)
            oracle.assert_close(o[b : b + 1, heads], truth.o, oracle.torch_error(*given, *ends), what=f"{b}, {head}")
            oracle.assert_lse_close(lse[b : b + 1, heads], truth.lse, magnitude=64.0)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["tensor", "tuple", "permuted"])
def test_each_head_attends_to_the_pages_it_selects(device, dtype, kv_layout, form):
    p = problem(device, dtype)
    cache, table, lens = tables(p, PAGE, kv_layout, form)
    bounds = quire.page_key_bounds(cache.kv, kv_layout)
    for top_k in (1, 3, 20):
        selected = quire.select_pages(p.q, bounds, table, lens, PAGE, top_k)
        assert selected.block_tables.shape == (len(LENS), HEADS, min(top_k, table.shape[1]))
        pages = best_pages(p, PAGE, top_k)
        for b, of_heads in enumerate(pages):
            for head, own in enumerate(of_heads):
                got = selected.block_tables[b, head, : len(own)].tolist()
                assert got == table[b, own].tolist(), (b, head)
                last = LENS[b] - (-(-LENS[b] // PAGE) - 1) * PAGE if own else 0
                assert int(selected.seq_lens[b, head]) == max(0, len(own) - 1) * PAGE + last
        o, lse = quire.batch_decode_with_selected_pages(
            p.q, cache.kv, workspace(device), selected, kv_layout=kv_layout, return_lse=True
        )
        check_selected(p, o, lse, pages, PAGE)


def test_all_pages_are_plain_decode(device, dtype):
    p = problem(device, dtype)
    cache, table, lens = tables(p, PAGE)
    selected = quire.select_pages(p.q, quire.page_key_bounds(cache.kv), table, lens, PAGE, 9)
    out, lse = torch.full_like(p.q, math.nan), torch.full(p.q.shape[:2], math.nan, device=device)
    options = {"sm_scale": 0.2, "out": out, "lse": lse, "enable_pdl": False}
    assert quire.batch_decode_with_selected_pages(p.q, cache.kv, workspace(device), selected, **options) is out
    p.sm_scale = 0.2
    p.check(out)
    o = quire.batch_decode_with_selected_pages(
        p.q, cache.kv, workspace(device), selected, 0.1, k_scale=2.0, v_scale=torch.tensor([0.5], device=device)
    )
    p.check(o, v_scale=0.5)


def test_equal_scores_take_the_earlier_pages(device):
    """And the choice does not depend on the request's place in the batch."""
    q = torch.ones(3, 2, 64, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device)
    bounds = torch.zeros(50, 1, 2, 64, dtype=q.dtype, device=device)
    bounds[40] = 1.0
    table = torch.arange(49, -1, -1, dtype=torch.int32, device=device).expand(3, -1)
    lens = ints([400, 400, 396], device)
    selected = quire.select_pages(q, bounds, table, lens, 8, 5)
    assert selected.block_tables.tolist() == [[[49, 48, 47, 40, 0]]] * 3
    assert selected.seq_lens.tolist() == [[40], [40], [36]]


def test_bounds_are_renewed_page_by_page(device, dtype):
    p = problem(device, dtype, (64, 24))
    cache, _, _ = tables(p, PAGE)
    keys = cache.kv[0]
    bounds = quire.page_key_bounds(cache.kv)
    assert torch.equal(bounds[:, :, 0].nan_to_num(7), keys.amin(1).nan_to_num(7))
    assert torch.equal(bounds[:, :, 1].nan_to_num(7), keys.amax(1).nan_to_num(7))
    number = int(cache.indices[1])
    keys[number] += 3
    assert quire.page_key_bounds(cache.kv, pages=ints([number], device), out=bounds) is bounds
    assert torch.equal(bounds.nan_to_num(7), quire.page_key_bounds(cache.kv).nan_to_num(7))
    assert quire.page_key_bounds(cache.kv, out=bounds) is bounds


def test_8_bit_caches(device, dtype):
    if dtype is torch.float32:
        pytest.skip("8-bit keys are of 16-bit queries")
    p = Problem(
        [1] * 3, (70, 8, 33), dtype=dtype, device=device, num_qo_heads=6, head_dim=64, kv_dtype=torch.float8_e4m3fn
    )
    cache, table, lens = tables(p, PAGE)
    bounds = quire.page_key_bounds(cache.kv)
    assert bounds.dtype is torch.float16
    selected = quire.select_pages(p.q, bounds.to(dtype), table, lens, PAGE, 20)
    p.check(quire.batch_decode_with_selected_pages(p.q, cache.kv, workspace(device), selected))


def test_variants(device):
    """They know the request and the head of a row, but not where a selected page is."""
    p = problem(device, torch.bfloat16, (70, 8, 33))
    cache, table, lens = tables(p, PAGE)
    selected = quire.select_pages(p.q, quire.page_key_bounds(cache.kv), table, lens, PAGE, 20)
    bias = torch.randn(3, p.num_qo_heads)
    variant = quire.Variant(
        lambda score, head, request, bias: 3 * torch.tanh(score / 3) + bias[request, head],
        mask=lambda head, request: head != request, tensors={"bias": torch.float32},
    )  # fmt: skip
    call = p.q, cache.kv, workspace(device), selected
    got = quire.batch_decode_with_selected_pages(*call, return_lse=True, variant=variant, bias=bias.to(device))
    p.check(
        *got, score=lambda s, at: 3 * torch.tanh(s / 3) + bias.double()[at.request, at.head],
        sees=lambda at: at.head != at.request,
    )  # fmt: skip
    with pytest.raises(quire.ValidationError, match="bias: expected at least"):
        quire.batch_decode_with_selected_pages(*call, variant=variant, bias=bias[:, :2].to(device))
    with pytest.raises(quire.UnsupportedError, match="reads kv_idx: tables of selected pages"):
        quire.batch_decode_with_selected_pages(*call, variant=variants.alibi, slopes=bias[0].to(device))


def test_in_a_cuda_graph(device):
    if device == "cpu":
        pytest.skip("graphs are a GPU's")
    p = problem(device, torch.bfloat16, (300, 64, 128))
    cache, table, lens = tables(p, PAGE)
    bounds = quire.page_key_bounds(cache.kv)

    def step() -> Tensor:
        selected = quire.select_pages(p.q, bounds, table, lens, PAGE, 4)
        return quire.batch_decode_with_selected_pages(p.q, cache.kv, workspace(device), selected, return_lse=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = step()
    p.q.copy_(p.q.flip(0))
    lens.copy_(ints([200, 60, 128], device))
    graph.replay()
    p.kv_lens = (300, 64, 128)
    expected = step()
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


def test_wrong_arguments():
    p = problem("cpu", torch.float32, (70, 8))
    cache, table, lens = tables(p, PAGE)
    bounds = quire.page_key_bounds(cache.kv)
    selected = quire.select_pages(p.q, bounds, table, lens, PAGE, 2)
    for name, call in (
        ("out", lambda: quire.page_key_bounds(cache.kv, pages=ints([1], "cpu"))),
        ("out", lambda: quire.page_key_bounds(cache.kv, out=bounds[1:])),
        ("out", lambda: quire.page_key_bounds(cache.kv, out=bounds.half())),
        ("kv_layout", lambda: quire.page_key_bounds(cache.kv, "other")),
        ("q", lambda: quire.select_pages(p.q[:1], bounds, table, lens, PAGE, 2)),
        ("q", lambda: quire.select_pages(p.q[:, :5], bounds, table, lens, PAGE, 2)),
        ("bounds", lambda: quire.select_pages(p.q, bounds[:, :, :1], table, lens, PAGE, 2)),
        ("block_tables", lambda: quire.select_pages(p.q, bounds, table.float(), lens, PAGE, 2)),
        ("seq_lens", lambda: quire.select_pages(p.q, bounds, table, lens[:1], PAGE, 2)),
        ("seq_lens", lambda: quire.select_pages(p.q, bounds, table, lens + 1000, PAGE, 2)),
        ("page_size", lambda: quire.select_pages(p.q, bounds, table, lens, 0, 2)),
        ("top_k", lambda: quire.select_pages(p.q, bounds, table, lens, PAGE, 0)),
        ("q", lambda: quire.batch_decode_with_selected_pages(p.q[:, :5], cache.kv, workspace("cpu"), selected)),
        ("block_tables", lambda: quire.batch_decode_with_selected_pages(p.q[:1], cache.kv, workspace("cpu"), selected)),
        (
            "out",
            lambda: quire.batch_decode_with_selected_pages(
                p.q, cache.kv, workspace("cpu"), selected, out=torch.empty(2, 6, 80)[..., :64]
            ),
        ),
        (
            "paged_kv_cache",
            lambda: quire.batch_decode_with_selected_pages(
                p.q, p.paged(PAGE, signature="sliced").kv, workspace("cpu"), selected
            ),
        ),
    ):
        with pytest.raises(quire.ValidationError, match=f"^{name}"):
            call()
    assert len(FORMS) == 4, "all forms of caches are tried above"


def test_page_numbers_outside_of_the_cache_are_refused():
    """They were read: a signal, or, where their product with the heads of a page left 32 bits, another page."""
    cache, q, seq_lens = torch.randn(6, 2, 16, 2, 64), torch.randn(1, 8, 64), ints([60], "cpu")
    bounds = quire.page_key_bounds(cache)
    for number in (-1, 6, 2**29, 2**31 - 1, -(2**31)):
        with pytest.raises(quire.ValidationError, match=rf"^block_tables: .*below 6, got {number}"):
            quire.select_pages(q, bounds, ints([4, number, 2, 5], "cpu")[None], seq_lens, 16, top_k=2)
        selected = quire.SelectedPages(torch.full((1, 2, 1), number, dtype=torch.int32), ints([16, 16], "cpu")[None])
        with pytest.raises(quire.ValidationError, match=rf"^block_tables: .*below 6, got {number}"):
            quire.batch_decode_with_selected_pages(q, cache, workspace("cpu"), selected)
        with pytest.raises(quire.ValidationError, match=rf"^pages: .*got .*{number}"):
            quire.page_key_bounds(cache, pages=ints([number], "cpu"), out=bounds)
    with pytest.raises(quire.ValidationError, match=r"^q: expected a multiple of 2 KV heads, got 0 heads"):
        quire.select_pages(q[:, :0], bounds, ints([4, 2], "cpu")[None], ints([20], "cpu"), 16, top_k=2)
    unread = quire.select_pages(q, bounds, ints([4, 2, -1, 2**30], "cpu")[None], ints([20], "cpu"), 16, top_k=2)
    assert unread.block_tables.tolist() == [[[4, 2]] * 2]


def test_a_cache_with_distances_between_numbers_is_refused():
    """It was read as if there were none."""
    cache = torch.randn(6, 2, 16, 2, 2 * 64)[..., ::2]
    selected = quire.SelectedPages(ints([1, 1], "cpu").view(1, 2, 1), ints([16, 16], "cpu")[None])
    with pytest.raises(quire.ValidationError, match=r"^paged_kv_cache: expected a contiguous last dimension"):
        quire.batch_decode_with_selected_pages(torch.randn(1, 8, 64), cache, workspace("cpu"), selected)
