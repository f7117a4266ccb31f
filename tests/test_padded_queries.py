"""Drafts of several lengths in one decode call, against the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from calls import capture
from problems import Problem, block_tables, ints, poisoned, workspace
from test_xqa import Draft

KV_LENS = (300, 9, 0, 64, 37, 3)
Q_LENS = (3, 5, 0, 1, 0, 2)


def drafts(dtype, device, q_lens=Q_LENS, kv_lens=KV_LENS, **more):
    """Causal requests, as their drafts are without a mask."""
    return Problem(q_lens, kv_lens, dtype=dtype, device=device, causal=True, **more)


def call(p: Problem, backend: str = "auto", **more: object) -> torch.Tensor:
    """With the longest draft for q_len_per_req, into an `out` of NaN; `more` overrides."""
    cache = p.paged(16)
    out = poisoned(p.q.shape, p.dtype, p.device)
    right: dict[str, object] = {
        "query": p.q, "kv_cache": cache.kv, "workspace_buffer": workspace(p.device),
        "block_tables": block_tables(cache), "seq_lens": ints(p.kv_lens, p.device), "max_seq_len": 512,
        "bmm1_scale": 1 / math.sqrt(p.head_dim), "q_len_per_req": max([*p.qo_lens, 1]), "out": out,
        "window_left": p.window_left, "q_cu_seq_lens": ints(p.qo_indptr, p.device), "backend": backend,
    }  # fmt: skip
    got = quire.xqa_batch_decode_with_kv_cache(**{**right, **more})
    assert got is out
    return got


def tree(p: Problem, q_len: int, noise: bool = False) -> torch.Tensor:
    """The problem under a mask of its drafts, and the words [nnz_qo, ceil(q_len / 32) * 2] that say so."""
    make = Draft.noise if noise else Draft.tree
    whole = make(len(p.qo_lens), q_len)
    masks, rows = [], []
    for b, (own, kv_len) in enumerate(zip(p.qo_lens, p.kv_lens, strict=True)):
        sees = whole.sees[b : b + 1, :own, :own]
        masks.append(Draft(sees).mask((kv_len,)))
        bits = torch.ones(1, own, q_len, dtype=torch.bool)  # what lies beyond a request's own tokens may be anything
        bits[..., :own] = sees
        rows.append(Draft(bits).words(p.device)[0] if own else torch.empty(0, 2 * -(-q_len // 32), dtype=torch.uint16))
    p.causal, p.mask = False, torch.cat(masks)
    return torch.cat([words.view(torch.int16).to(p.device) for words in rows]).view(torch.uint16)


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.uint32, torch.int64])
@pytest.mark.parametrize("on_host", [False, True])
def test_drafts_are_causal(device, backend, dtype, offsets_dtype, on_host):
    p = drafts(dtype, device)
    offsets = torch.tensor(p.qo_indptr).to(offsets_dtype)
    p.check(call(p, backend, q_cu_seq_lens=offsets if on_host else offsets.to(device)))


@pytest.mark.parametrize("q_len", [None, 6, 9])
def test_the_longest_may_be_longer_than_any(device, dtype, q_len):
    p = drafts(dtype, device)
    p.check(call(p, q_len_per_req=q_len or 5))


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("q_lens", [Q_LENS, (0, 1, 0, 0, 0, 0)], ids=str)
def test_a_bound_costs_no_memory(device, q_lens, is_masked):
    """No request has more rows than there are; with a mask the bound says how wide its rows are."""
    p = drafts(torch.float16, device, q_lens)
    if is_masked:
        p.check(call(p, q_len_per_req=200, mask=tree(p, 200)))
    else:
        p.check(call(p, q_len_per_req=2**31 - 1))
    with pytest.raises(quire.ValidationError, match="q_len_per_req=2, got"):
        offsets = ints((0, *[sum(Q_LENS)] * len(Q_LENS)), "cpu")
        call(drafts(torch.float16, device), q_len_per_req=2, q_cu_seq_lens=offsets)


@pytest.mark.first(2)
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [(Q_LENS, KV_LENS), ((33, 1, 40, 0, 7), (300, 1, 38, 0, 64)), ((1, 1), (5, 70))],
    ids=["short", "long", "ones"],
)
def test_masks(device, dtype, q_lens, kv_lens, noise):
    """Bits of a request's own tokens, where requests are shorter than their drafts, or have none."""
    p = drafts(dtype, device, q_lens, kv_lens)
    words = tree(p, max(q_lens), noise)
    p.check(call(p, mask=words))


@pytest.mark.one_type
def test_masks_in_windows_with_sinks(device, dtype):
    p = drafts(dtype, device, window_left=6)
    sinks = torch.linspace(-2.0, 3.0, p.num_qo_heads).to(device)
    words = tree(p, 5)
    p.check(call(p, mask=words, sinks=sinks), sinks=sinks)


def test_no_new_tokens_at_all(device, dtype):
    p = drafts(dtype, device, (0, 0), (9, 0))
    assert call(p, mask=torch.empty(0, 2, dtype=torch.uint16, device=device)).shape == p.q.shape


def test_xqa_and_trtllm_take_them_too(device, dtype):
    p = drafts(dtype, device)
    words, cache = tree(p, 5), p.paged(16, "HND")
    offsets, tables, lens = ints(p.qo_indptr, device), block_tables(cache), ints(p.kv_lens, device)
    got = quire.xqa(
        p.q, *cache.kv, tables, lens, kv_layout="HND", q_seq_len=5, q_cu_seq_lens=offsets, mask=words, page_size=16
    )
    p.check(got)
    got, lse = quire.decode.trtllm_batch_decode_with_kv_cache(
        p.q, cache.kv, workspace(device), tables, lens, 512, 1 / math.sqrt(p.head_dim), mask=words, max_q_len=5,
        cum_seq_lens_q=offsets, return_lse=True,
    )  # fmt: skip
    p.check(got, lse)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_drafts(device, dtype, data):
    q_lens = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    kv_lens = tuple(q_len + data.draw(st.integers(0, 200)) if data.draw(st.booleans()) else q_len for q_len in q_lens)
    p = drafts(dtype, device, q_lens, kv_lens, window_left=data.draw(st.sampled_from([-1, 0, 33])))
    q_len = max([*q_lens, 1])
    p.check(call(p, mask=tree(p, q_len, data.draw(st.booleans())) if data.draw(st.booleans()) else None))


@pytest.mark.parametrize(
    ("offsets", "word"),
    [
        ((0, 3, 8, 8, 9, 9), "batch_size"),
        ((0, 3, 8, 8, 9, 9, 12), "to the 11 rows of query"),
        ((1, 3, 8, 8, 9, 9, 11), "offsets from 0"),
        ((0, 6, 8, 8, 9, 9, 11), "q_len_per_req=5"),
        ((0, 3, 2, 8, 9, 9, 11), "in steps of 0"),
    ],
    ids=str,
)
def test_offsets_that_are_wrong(offsets, word):
    p = drafts(torch.float32, "cpu")
    with pytest.raises(quire.ValidationError, match=rf"q_cu_seq_lens: .*{word}"):
        call(p, q_cu_seq_lens=ints(offsets, "cpu"))


def test_masks_and_queries_that_do_not_fit():
    p = drafts(torch.float32, "cpu")
    with pytest.raises(quire.ValidationError, match=r"mask: expected \[rows of query=11, "):
        call(p, mask=torch.zeros(6, 5, 2, dtype=torch.int32).to(torch.uint16))
    with pytest.raises(quire.ValidationError, match="max_q_len: expected it beside cum_seq_lens_q"):
        quire.decode.trtllm_batch_decode_with_kv_cache(
            p.q, p.paged(16, "HND").kv, workspace("cpu"), None, None, 512, max_q_len=3
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_one_graph_for_all_drafts():
    """Captured with one distribution of new tokens, replayed with others; a capture refuses a host's offsets."""
    device, dtype, total = "cuda:0", torch.bfloat16, sum(Q_LENS)
    p = drafts(dtype, device)
    cache = p.paged(16)
    out, offsets, words = poisoned(p.q.shape, dtype, device), ints(p.qo_indptr, device), tree(p, 5)
    call_again = lambda q_cu_seq_lens=offsets: quire.xqa_batch_decode_with_kv_cache(  # noqa: E731 - for captures
        p.q, cache.kv, workspace(device), block_tables_, lens, 512, 1 / math.sqrt(p.head_dim), q_len_per_req=5,
        out=out, q_cu_seq_lens=q_cu_seq_lens, mask=words,
    )  # fmt: skip
    block_tables_, lens = block_tables(cache), ints(KV_LENS, device)
    call_again()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_again()
    for q_lens in (Q_LENS, (1, 2, 0, 5, 3, 0), (0, 5, 0, 5, 0, 1)):
        assert sum(q_lens) == total
        other = drafts(dtype, device, q_lens)
        other.q, other.k, other.v = p.q, p.k, p.v
        words.view(torch.int16).copy_(tree(other, 5).view(torch.int16))
        offsets.copy_(ints(oracle.indptr_of(q_lens), device))
        out.fill_(math.nan)
        graph.replay()
        other.check(out)
    on_host = offsets.cpu()
    with capture(), pytest.raises(quire.PlanError, match=r"q_cu_seq_lens: expected .* in the capture"):
        call_again(on_host)
