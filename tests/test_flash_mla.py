"""FlashMLA's functions over Quire, against the oracle in float64."""

from __future__ import annotations

import doctest
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

import oracle
import quire
from latents import Latents, of_flash_mla, skips_gaps
from problems import ints
from quire.compat import flash_mla
from quire.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from quire.engine import attention as planned
from quire.engine.launch import launch
from test_mla import SCALE, joined, sparse


def check(p: Latents, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Rows of out and of an lse in natural logarithms, which is +inf for a query without tokens."""
    p.check(out, None if lse is None else of_flash_mla(lse))


def check_most(p: Latents, most: torch.Tensor, unit: float = 1.0) -> None:
    """The largest logits of rows, one query a request, times `unit`."""
    at = oracle.indptr_of(p.kv_lens)
    for row, q in enumerate(p.query.cpu().double()):
        logits = q @ p.keys[at[row] : at[row + 1]].cpu().double().T * SCALE
        want = logits.amax(1) * unit if logits.shape[1] else torch.full((q.shape[0],), -math.inf).double()
        torch.testing.assert_close(most[row].cpu().double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("q_len", "causal"), [(1, False), (2, True), (2, False)])
def test_dense_decode(device, dtype, q_len, causal, page_size):
    p = Latents((q_len,) * 4, (37, q_len, 300, 64), 16, dtype, device, causal)
    pages = p.paged(page_size)
    out, lse = flash_mla_with_kvcache(
        p.query.view(4, q_len, 16, 576), joined(pages).unsqueeze(2), pages.table(device), ints(p.kv_lens, device), 512,
        *get_mla_metadata(ints(p.kv_lens, device), q_len * 16, 1), softmax_scale=SCALE, causal=causal,
    )  # fmt: skip
    assert out.shape == (4, q_len, 16, 512) and lse.shape == (4, 16, q_len)
    check(p, out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("num_heads", [8, 128])
def test_sparse_decode(device, dtype, num_heads):
    p = Latents((1,) * 6, (64, 10, 0, 1, 33, 0), num_heads, dtype, device)
    cache, indices, lens = sparse(p, 64, 8, 64)
    out, lse = flash_mla_with_kvcache(
        p.query.unsqueeze(1), cache.unsqueeze(2), None, None, 512, *get_mla_metadata(), SCALE,
        indices=indices.unsqueeze(1), topk_length=lens,
    )  # fmt: skip
    check(p, out.squeeze(1), lse.squeeze(2))


def test_sparse_decode_again(device):
    """Later calls of the same shapes on other tensors, lengths, outputs and streams, calls of other shapes between."""
    streams = [nullcontext()] * 2 + ([] if device == "cpu" else [torch.cuda.stream(torch.cuda.Stream())])
    for seed, kv_lens in enumerate([(64, 10, 0), (0, 64, 1), (3, 3, 3), (64, 64, 64), (1, 0, 0)]):
        for num_heads in (16, 64):
            p = Latents((1,) * 3, kv_lens, num_heads, torch.bfloat16, device, seed=seed)
            cache, indices, lens = sparse(p, 64, 8, 64)
            _wait(device)
            with streams[seed % len(streams)]:
                for q in (p.query, p.query.flip(0).flip(0)):
                    out, lse = flash_mla_with_kvcache(
                        q.unsqueeze(1), cache.unsqueeze(2), None, None, 512, None, None, SCALE,
                        indices=indices.unsqueeze(1), topk_length=lens,
                    )  # fmt: skip
                    _wait(device)
                    check(p, out.squeeze(1), lse.squeeze(2))


def all_used(p: Latents, page_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache, and indices of which each one counts; in the place of tokens that a request does not have are -1."""
    cache, indices, lens = sparse(p, 64 if max(p.kv_lens) <= 64 else 1024, 64, page_size)
    beyond = torch.arange(indices.shape[-1], device=indices.device) >= lens.to(indices.device)[:, None]
    return cache, indices.masked_fill(beyond, -1)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_metadata_of_several_calls(device, num_heads, monkeypatch):
    """Layers and steps of one shape plan once, those of another shape again; a length of its own is always read. If the
    kernel reads all indices, the lengths are what torch has counted, and each call plans.
    """
    plans, shapes = [], 2 if skips_gaps(device) else 4
    monkeypatch.setattr(planned, "launch", lambda *args, **options: (plans.append(1), launch(*args, **options)))
    metadata, _ = get_mla_metadata()
    for seed, kv_lens in enumerate([(64, 10, 0), (0, 64, 1), (64, 10, 0, 1), (3, 3, 3)]):
        p = Latents((1,) * len(kv_lens), kv_lens, num_heads, torch.bfloat16, device, seed=seed)
        cache, indices = all_used(p)
        call = p.query.unsqueeze(1), cache.unsqueeze(2), None, None, 512, metadata, None, SCALE
        out, lse = flash_mla_with_kvcache(*call, indices=indices.unsqueeze(1))
        check(p, out.squeeze(1), lse.squeeze(2))
    assert len(plans) == (0 if device == "cpu" else shapes)
    _, indices, lens = sparse(p, 64, 64, 64)
    for used in (lens, lens.clone()):
        out, _ = flash_mla_with_kvcache(*call, indices=indices.unsqueeze(1), topk_length=used)
        check(p, out.squeeze(1))
    assert len(plans) == (0 if device == "cpu" else shapes + 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("is_known", [False, True])
def test_metadata_in_a_graph(is_known, num_heads, monkeypatch):
    """A graph plans if nobody did before it, and later calls do not rely on what only a replay would make. Without the
    object a graph is as good; keys are divided among CTAs.
    """
    device, metadata = "cuda:0", get_mla_metadata()[0]
    p = Latents((1,) * 3, (64, 1000, 33), num_heads, torch.bfloat16, device)
    cache, indices = all_used(p)
    call = p.query.unsqueeze(1), cache.unsqueeze(2), None, None, 512

    def decode(metadata):
        return flash_mla_with_kvcache(*call, metadata, None, SCALE, indices=indices.unsqueeze(1))

    decode(metadata if is_known else None)
    plans = []
    monkeypatch.setattr(planned, "launch", lambda *args, **options: (plans.append(1), launch(*args, **options)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(metadata)
    assert len(plans) == (0 if is_known and skips_gaps(device) else 1)
    check(p, decode(metadata)[0].squeeze(1))  # before the graph has run
    del metadata
    first, again = (p, *all_used(p)), Latents((1,) * 3, (700, 0, 64), num_heads, torch.bfloat16, device, seed=1)
    queries = p.query.clone(), again.query
    scratch = [torch.full((1 << 12,), 255, dtype=torch.uint8, device=device) for _ in range(64)]
    for query, (q, *keys) in zip((*queries, *queries), (first, (again, *all_used(again))) * 2, strict=True):
        call[0].copy_(query.unsqueeze(1))
        cache.copy_(keys[0]), indices.copy_(keys[1])
        graph.replay()
        torch.cuda.synchronize()
        q.query = query
        check(q, out.squeeze(1), lse.squeeze(2))
    assert all(bool((part == 255).all()) for part in scratch)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def test_dense_decode_again_in_threads(device):
    """Each on tensors of its own: what one has set for its launch is not another's."""

    def decode(seed: int) -> None:
        p = Latents((1,) * 3, (37, 300 - seed, 64 + seed), 16, torch.bfloat16, device, seed=seed)
        pages = p.paged(64)
        where = pages.table(device)[:, :5], ints(p.kv_lens, device), 512
        for _ in range(5):
            call = p.query.unsqueeze(1), joined(pages).unsqueeze(2), *where
            out, lse = flash_mla_with_kvcache(*call, softmax_scale=SCALE)
            check(p, out.squeeze(1), lse.squeeze(2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(decode, range(8)))


def test_sparse_prefill(device, dtype):
    p = Latents((1,) * 6, (64, 10, 0, 1, 33, 0), 64, dtype, device)
    cache, indices, lens = sparse(p, 64, 512, 1)
    target = torch.empty(6, 64, 512, dtype=dtype, device=device)
    out, most, lse = flash_mla_sparse_fwd(p.query, cache, indices.unsqueeze(1), SCALE, topk_length=lens, out=target)
    assert out is target
    check(p, out, lse)
    check_most(p, most)


def test_sinks(device, dtype):
    """They take their share of the result, and the lse is that without them; infinite ones take all or nothing."""
    p = Latents((1,) * 6, (64, 10, 0, 1, 33, 0), 16, dtype, device)
    cache, indices, lens = sparse(p, 64, 8, 64)
    call = {"indices": indices.unsqueeze(1), "topk_length": lens}
    sink = 3 * torch.randn(16)
    sink[:2] = torch.tensor([math.inf, -math.inf])
    own = p.expected().lse
    p.sinks = sink.clamp(-1e4, 1e4)
    decode = p.query.unsqueeze(1), cache.unsqueeze(2), None, None, 512, None, None, SCALE
    for out, lse in (
        flash_mla_with_kvcache(*decode, attn_sink=sink.to(device), **call),
        flash_mla_sparse_fwd(p.query, cache.view(-1, 1, 576), sm_scale=SCALE, attn_sink=sink.to(device), **call)[::2],
    ):
        check(p, out.view(6, 16, 512))
        oracle.assert_lse_close(of_flash_mla(lse.view(6, 16)), own)
    pages = p.paged(64)
    where = pages.table(device), ints(p.kv_lens, device), 512
    dense = p.query.unsqueeze(1), joined(pages).unsqueeze(2), *where
    check(p, flash_mla_with_kvcache(*dense, softmax_scale=SCALE, attn_sink=sink.to(device))[0].squeeze(1))


def test_latents_of_eight_bits(device):
    p = Latents((1, 1), (37, 300), 16, torch.bfloat16, device, kv_dtype=torch.float8_e4m3fn)
    pages = p.paged(64)
    where = pages.table(device), ints(p.kv_lens, device), 512
    out, lse = flash_mla_with_kvcache(
        p.query.unsqueeze(1), joined(pages).unsqueeze(2), *where, softmax_scale=SCALE, is_fp8_kvcache=True
    )
    check(p, out.squeeze(1), lse.squeeze(2))


def test_wrong_arguments():
    q, cache = torch.zeros(2, 1, 16, 576), torch.zeros(4, 64, 1, 576)
    call = {"q": q, "k_cache": cache, "block_table": ints([[0], [1]], "cpu"), "cache_seqlens": ints([1, 2], "cpu")}
    assert not flash_mla_with_kvcache(**call, head_dim_v=512)[0].any()
    for changes, message in (
        ({"attn_sink": torch.zeros(8)}, "attn_sink: expected"),
        ({"attn_sink": torch.zeros(16).half()}, "attn_sink: expected dtype torch.float32"),
        ({"extra_k_cache": cache}, "extra_k_cache"),
        ({"indices": ints([[[0]], [[1]]], "cpu")}, "indices: expected neither block_table"),
        ({"topk_length": ints([1, 1], "cpu")}, "topk_length"),
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache: expected False"),
        ({"block_table": None}, "block_table"),
        ({"cache_seqlens": ints([1, 65], "cpu")}, "seq_lens: expected 0..64"),
        ({"q": q[..., :512]}, "k_cache: expected rows of 512 numbers"),
        ({"q": q[..., :256]}, "q: expected a head_dim of 576 or 512"),
        ({"kv_format": "V32"}, "kv_format: expected plain numbers"),
        ({"descale_q": torch.ones(1)}, "descale_q, descale_k: expected both"),
        ({"extra_indices_in_kvcache": ints([[[0]]], "cpu")}, "extra_indices_in_kvcache"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            flash_mla_with_kvcache(**{**call, "head_dim_v": 512, **changes})
    with pytest.raises(quire.UnsupportedError, match="head_dim_v"):
        flash_mla_with_kvcache(**call, head_dim_v=256)
    with pytest.raises(quire.ValidationError, match="k_cache: expected"):
        flash_mla_with_kvcache(**{**call, "k_cache": torch.zeros(4, 64, 1, 656)}, head_dim_v=512)
    with pytest.raises(quire.ValidationError, match="sm_scale: expected a positive number"):
        flash_mla_sparse_fwd(q[:, 0], cache[0], ints([[[0]], [[1]]], "cpu"), 0.0)
    with pytest.raises(quire.ValidationError, match="sm_scale: expected a number, got None"):
        flash_mla_sparse_fwd(q[:, 0], cache[0], ints([[[0]], [[1]]], "cpu"), None)
    for kv_format in ("V41_NEW", 5):
        with pytest.raises(quire.UnsupportedError, match="kv_format: expected None or one of V32"):
            flash_mla_with_kvcache(**call, head_dim_v=512, kv_format=kv_format)
    with pytest.raises(quire.ValidationError, match="topk_length: expected None beside indexer_topk"):
        flash_mla_sparse_fwd(
            q[:, 0], cache[0], ints([[[0]], [[1]]], "cpu"), 1.0, topk_length=ints([1, 1], "cpu"), indexer_topk=1
        )


def test_examples():
    assert doctest.testmod(flash_mla, extraglobs={"torch": torch}).failed == 0
