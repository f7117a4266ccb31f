"""Multi-head latent attention over a paged cache of latents, against the oracle."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import quire
from latents import SCALE, LatentPages, Latents
from problems import ints, poisoned, workspace
from quire.engine.schedule import Lengths

CUDA_BACKENDS = {"fa2": (8, 0), "auto": (8, 0)}  #: that have kernels of MLA
KV_LENS = (37, 1, 0, 300, 128, 129)
ROUNDED = {"rtol": 0.02, "atol": 0.01}  #: of results that another kernel, or one with another scale, rounded
FORMS = ("joined", "split", "sliced")


def plan(wrapper: quire.BatchMLAPagedAttentionWrapper, p: Latents, pages: LatentPages, **more: object) -> None:
    """plan() on flat arrays, on the host but for the page numbers."""
    wrapper.plan(
        ints(p.qo_indptr, "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, p.device), ints(p.kv_lens, "cpu"),
        p.num_heads, 512, 64, pages.page_size, p.causal, SCALE, p.dtype, p.keys.dtype, **more,
    )  # fmt: skip


def planned(
    p: Latents, pages: LatentPages, backend: str = "auto", **more: object
) -> quire.BatchMLAPagedAttentionWrapper:
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(p.device), backend=backend)
    plan(wrapper, p, pages, **more)
    return wrapper


def parts(p: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    return p.query[..., :512], p.query[..., 512:]


def attend(p: Latents, pages: LatentPages, backend: str = "auto", **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) into tensors that were NaN."""
    out = poisoned((*p.query.shape[:2], 512), p.dtype, p.device)
    lse = poisoned(p.query.shape[:2], torch.float32, p.device)
    wrapper = planned(p, pages, backend)
    result = wrapper.run(
        *parts(p), pages.ckv, pages.kpe, out, lse, True, sinks=None if p.sinks is None else p.sinks.to(p.device), **more
    )
    assert result[0] is out and result[1] is lse
    return out, lse


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_page_sizes_and_forms(device, backend, dtype, page_size, form):
    p = Latents((1,) * len(KV_LENS), KV_LENS, dtype=dtype, device=device)
    p.check(*attend(p, p.paged(page_size, form), backend))


@pytest.mark.parametrize("num_heads", [1, 2, 7, 8, 16, 20, 64, 128])
def test_heads(device, backend, dtype, num_heads):
    p = Latents((1, 1, 1), (65, 4, 200), num_heads, dtype, device)
    p.check(*attend(p, p.paged(), backend))


@pytest.mark.parametrize("num_heads", [1, 16, 128])
@pytest.mark.parametrize("q_len", [2, 5, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_several_queries(device, backend, dtype, causal, q_len, num_heads):
    p = Latents((q_len,) * 4, (q_len, 100, 3, 130), num_heads, dtype, device, causal)  # one has fewer keys than queries
    p.check(*attend(p, p.paged(), backend))


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_queries(device, backend, dtype, causal):
    p = Latents((3, 0, 1, 17, 40, 2), (3, 5, 0, 90, 64, 1), 12, dtype, device, causal)
    p.check(*attend(p, p.paged(8), backend))


@pytest.mark.parametrize(
    "kv_lens", [(1,), (0,), (0, 0, 5), (5000,), (1, 4000, 3), tuple(range(40)), ()], ids=lambda n: str(n)[:24]
)
def test_lengths(device, backend, dtype, kv_lens):
    p = Latents((1,) * len(kv_lens), kv_lens, 8, dtype, device)
    p.check(*attend(p, p.paged(), backend))


@pytest.mark.one_type
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_heads", [5, 128])
def test_sinks(device, backend, dtype, num_heads, causal):
    p = Latents((2, 1, 4), (40, 0, 3000), num_heads, dtype, device, causal, sinks=torch.randn(num_heads))
    p.check(*attend(p, p.paged(), backend))


def test_long_keys_with_an_outlier_dim(device, backend, dtype):
    """One dim of latents eight times as large as the others, where partial results are merged."""
    p = Latents((1, 1), (20000, 7), 4, dtype, device, outlier=8.0)
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.each_value
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("num_heads", "q_len"), [(16, 1), (20, 3), (128, 1)])
@pytest.mark.parametrize("page_size", [3, 64])
@pytest.mark.slow
def test_latents_of_eight_bits(device, backend, dtype, page_size, num_heads, q_len, kv_dtype):
    """With a scale for all of the cache, which multiplies logits and results."""
    p = Latents((q_len,) * 4, (37, 0, 700, 129), num_heads, dtype, device, q_len > 1, kv_dtype=kv_dtype, scale=2.0)
    p.check(*attend(p, p.paged(page_size), backend, ckv_scale=p.scale, kpe_scale=p.scale))


def test_latents_and_positions_with_scales_of_their_own(device, backend, dtype):
    """Queries are multiplied by what kpe has more: here four, which rounds nothing."""
    p = Latents((3, 1), (70, 129), 16, dtype, device, True, kv_dtype=torch.float8_e4m3fn, scale=2.0)
    pages = p.paged(16)
    got = planned(p, pages, backend).run(*parts(p), pages.ckv, pages.kpe, return_lse=True, ckv_scale=2.0, kpe_scale=8.0)
    p.query[..., 512:] *= 4
    p.check(*got)


def test_scales_that_are_far_apart(device, backend):
    """The queries whose keys have the smaller scale are made smaller: the others would be beyond float16."""
    p = Latents((3, 1), (70, 129), 16, torch.float16, device, True, kv_dtype=torch.float8_e4m3fn)
    p.keys[:, 512:] = (p.keys[:, 512:].float() / 64).to(p.keys.dtype)
    pages, query, scales = p.paged(16), p.query.clone(), (2.0**-5, 2.0**10)
    run = planned(p, pages, backend).run
    o, lse = run(*parts(p), pages.ckv, pages.kpe, return_lse=True, ckv_scale=scales[0], kpe_scale=scales[1])
    p.query[..., :512] *= scales[0] / scales[1]
    p.scale = scales[1]
    p.check((o.float() * (scales[1] / scales[0])).half(), lse)
    p.query, p.scale = query, 1.0
    negative = run(*parts(p), pages.ckv, pages.kpe, return_lse=True, ckv_scale=1.0, kpe_scale=-0.25)
    p.query[..., 512:] *= -0.25
    p.check(*negative)


@pytest.mark.one_type
@pytest.mark.parametrize("page_size", [1, 16])
def test_without_positions(device, backend, dtype, page_size):
    """head_dim_kpe=0: the logits are those of the latent part alone."""
    p = Latents((3, 1), (70, 129), 16, dtype, device, True)
    pages, (nope, pe) = p.paged(page_size), parts(p)
    wrapper = quire.mla.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    arrays = ints(p.qo_indptr, "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, device), ints(p.kv_lens, "cpu")
    wrapper.plan(*arrays, 16, 512, 0, page_size, True, SCALE, dtype, dtype)
    with pytest.raises(quire.ValidationError, match="q_pe: expected no dims"):
        wrapper.run(nope, pe, pages.ckv, pages.kpe)
    got = wrapper.run(nope, pe[..., :0], pages.ckv, pages.kpe[..., :0], return_lse=True)
    p.query[..., 512:] = 0
    p.check(*got)


def test_offsets_of_more_requests_than_there_are(device, backend, dtype):
    """kv_indptr of a buffer: what follows the entries of the batch is not read."""
    p = Latents((3, 1), (70, 129), 16, dtype, device, True)
    pages = p.paged(16)
    wrapper = quire.mla.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    offsets = ints(p.qo_indptr, "cpu"), ints([*pages.indptr, 7, 1 << 30], "cpu"), ints(pages.indices, device)
    wrapper.plan(*offsets, ints(p.kv_lens, "cpu"), 16, 512, 64, 16, True, SCALE, dtype, dtype)
    p.check(wrapper.run(*parts(p), pages.ckv, pages.kpe))


@pytest.mark.slow
def test_every_number_of_eight_bits_is_widened_exactly(device, backend, dtype):
    """A request of one key returns its latent."""
    for kv_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        p = Latents((1, 1), (1, 1), 16, dtype, device, kv_dtype=kv_dtype)
        p.query.zero_()  # large logits would round its weight
        numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype).to(device)
        p.keys[:] = 0
        p.keys[:, :512] = torch.where(numbers.float().isfinite(), numbers.float(), 0).repeat(2).to(kv_dtype)
        pages = p.paged(16, "split")
        out, _ = attend(p, pages, backend)
        assert torch.equal(out.float(), p.keys[:, None, :512].float().expand(-1, 16, -1))


def test_lse_of_both_bases(device, backend):
    p = Latents((1, 2), (3000, 0), 16, torch.float16, device)
    pages = p.paged()
    wrapper = planned(p, pages, backend)
    _, base_2 = wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True)
    _, base_e = wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True, return_lse_base_on_e=True)
    torch.testing.assert_close(base_e, base_2 * math.log(2), rtol=1e-6, atol=0)
    p.check(wrapper.run(*parts(p), pages.ckv, pages.kpe), base_2)
    plan(wrapper, p, pages, lse_mode="basee")
    with pytest.raises(quire.ValidationError, match="return_lse_base_on_e: expected True"):
        wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True)


def test_base_of_a_call_on_tables(device):
    p = Latents((2,) * 3, (37, 5, 130), 16, torch.bfloat16, device, causal=True)
    pages, decode = p.paged(16), quire.mla.trtllm_batch_decode_with_kv_cache_mla
    call = {"query": p.query.view(3, 2, 16, 576), "kv_cache": joined(pages), **tables(p, pages)}
    o, lse = decode(**call, return_lse=True, return_lse_base="base2")
    p.check(o.flatten(0, 1), lse)
    torch.testing.assert_close(decode(**call, return_lse=True, return_lse_base="basee")[1], lse * math.log(2))
    given = torch.empty(3, 2, 16, device=device)
    decode(**call, lse=given, return_lse_base="basee")
    torch.testing.assert_close(given.flatten(0, 1), lse * math.log(2))


def test_what_plan_says_of_sinks(device, backend):
    p = Latents((1, 1), (30, 50), 16, torch.bfloat16, device)
    pages, wrapper = p.paged(), quire.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    plan(wrapper, p, pages, use_sinks=True, enable_pdl=False)
    with pytest.raises(quire.ValidationError, match="sinks: expected a tensor, as use_sinks=True"):
        wrapper.run(*parts(p), pages.ckv, pages.kpe)
    p.sinks = torch.randn(16)
    p.check(wrapper.run(*parts(p), pages.ckv, pages.kpe, sinks=p.sinks.to(device)))
    for name, value in (("bmm1_scale", 1.0), ("bmm2_scale", 1.0), ("skip_softmax_threshold_scale_factor", -1.0)):
        with pytest.raises(quire.ValidationError, match=name):
            wrapper.run(*parts(p), pages.ckv, pages.kpe, sinks=p.sinks, **{name: value})
    plan(wrapper, p, pages, skip_softmax=True)
    sinks = p.sinks.to(device)
    p.check(wrapper.run(*parts(p), pages.ckv, pages.kpe, sinks=sinks, skip_softmax_threshold_scale_factor=500.0))


def test_queries_and_cache_as_one_tensor_or_a_pair(device, backend):
    p = Latents((1, 2), (30, 50), 16, torch.bfloat16, device)
    pages = p.paged()
    wrapper = planned(p, pages, backend)
    expected = wrapper.run(*parts(p), pages.ckv, pages.kpe)
    cache = pages.ckv.as_strided((*pages.ckv.shape[:2], 576), pages.ckv.stride())
    for query in (p.query, parts(p), (parts(p), p.query)):
        for kv_cache in (cache, (pages.ckv, pages.kpe)):
            assert torch.equal(wrapper.run(query=query, kv_cache=kv_cache), expected)
    with pytest.raises(quire.ValidationError, match="query: expected it, or q_nope and q_pe, and not both"):
        wrapper.run(parts(p)[0], None, pages.ckv, pages.kpe)
    freed = cache.clone()
    freed.untyped_storage().resize_(0)
    for query, kv_cache, words in (
        (p.query, cache.to_sparse(), "kv_cache: expected a dense tensor"),
        (p.query.to_sparse(), cache, "query: expected a dense tensor"),
        (p.query, freed, "kv_cache: expected a tensor with memory of its own"),
    ):
        with pytest.raises(quire.ValidationError, match=words):
            wrapper.run(query=query, kv_cache=kv_cache)


def test_metadata(device, backend):
    """The same batch as offsets, as a table of pages, and as both."""
    p = Latents((1, 2, 1), (30, 50, 0), 16, torch.bfloat16, device)
    pages = p.paged()
    qo, lens, table = ints(p.qo_indptr, "cpu"), ints(p.kv_lens, device), pages.table(device)
    offsets = qo, ints(pages.indptr, "cpu"), ints(pages.indices, device), lens
    tables = {"cum_seq_lens_q": qo, "block_tables": table, "seq_lens": lens}
    rest = {
        "num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 16, "causal": True, "sm_scale": SCALE,
        "q_data_type": p.dtype, "kv_data_type": p.dtype,
    }  # fmt: skip
    p.causal = True
    wrapper, kind = quire.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend), quire.mla.MLAPlanMetadata
    for arrays in (
        dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), offsets, strict=True)), tables,
        tables | {"max_q_len": 2}, {"metadata": kind.csr(*offsets)}, {"metadata": kind.dense(**tables)},
        {"metadata": kind.dual(*offsets, **tables)},
    ):  # fmt: skip
        wrapper.plan(**arrays, **rest)
        p.check(wrapper.run(*parts(p), pages.ckv, pages.kpe))
    for arrays, message in (
        ({}, "qo_indptr: expected a tensor"),
        ({"metadata": kind.csr(*offsets), "seq_lens": lens}, "metadata: expected it or arrays"),
        ({"metadata": kind.dual(*offsets, **tables | {"cum_seq_lens_q": qo + 1})}, "cum_seq_lens_q: expected"),
        (tables | {"max_q_len": 1}, "max_token_per_sequence"),
        ({"metadata": 3}, "metadata: expected MLAPlanMetadata, got int"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            wrapper.plan(**arrays, **rest)


def test_pages_beyond_the_lengths_are_not_read(device, backend):
    """Requests keep pages for tokens to come, whose numbers may be anything."""
    p = Latents((1, 1, 1), (5, 0, 40), 16, torch.float16, device)
    pages = p.paged(8)
    order = pages.indices
    surplus = [*order[:1], 2**30, 2**30, *order[1:], 2**30]
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    more = LatentPages(pages.ckv, pages.kpe, [0, 2, 3, 9], surplus, 8)
    plan(wrapper, p, more)
    p.check(wrapper.run(*parts(p), pages.ckv, pages.kpe))
    with pytest.raises(quire.ValidationError, match="kv_len_arr: expected at most"):
        plan(wrapper, p, LatentPages(pages.ckv, pages.kpe, [0, 1, 1, 5], order, 8))


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 1_200_000), (16, 70_000), (64, 17_500)])
def test_a_large_stride(device, backend, page_size, num_pages):
    """Places in the cache beyond 2^31 elements, of a cache whose rows overlap nothing but are far apart."""
    if device == "cpu":
        pytest.skip("the address space of a test")
    p = Latents((1, 1), (70, 3), 16, torch.bfloat16, device)
    pages = p.paged(page_size, spare=0)
    cache = torch.empty(num_pages, page_size, 2048, dtype=p.dtype, device=device)
    numbers = [num_pages - 1 - 3 * i for i in pages.indices]
    cache[numbers, :, :512], cache[numbers, :, 512:576] = pages.ckv[pages.indices], pages.kpe[pages.indices]
    far = LatentPages(cache[..., :512], cache[..., 512:576], pages.indptr, numbers, page_size)
    p.check(*attend(p, far, backend))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_numbers_beyond_2_to_the_20(device, backend, page_size):
    """Pages begin 64 elements apart, so that their memory is little; those of the call are so far from each other that
    they do not overlap. What a page number cut off to 20 bits would find is NaN.
    """
    p = Latents((2, 1), (70, 3), 16, torch.bfloat16, device, causal=True)
    pages = p.paged(page_size, spare=0)
    step = 9 * page_size + 1
    num_pages = (1 << 20) + step * len(pages.indices) + 1
    memory = torch.empty(64 * num_pages + 576 * page_size, dtype=p.dtype, device=device)
    memory[: 64 * step * len(pages.indices) + 576 * page_size] = math.nan
    cache = memory.as_strided((num_pages, page_size, 576), (64, 576, 1))
    numbers = [(1 << 20) + step * i for i in range(len(pages.indices))]
    for number, page in zip(numbers, pages.indices, strict=True):
        cache[number, :, :512], cache[number, :, 512:] = pages.ckv[page], pages.kpe[page]
    far = LatentPages(cache[..., :512], cache[..., 512:], pages.indptr, numbers, page_size)
    p.check(*attend(p, far, backend))


@pytest.mark.slow
def test_128k_keys_with_outlier_channels(device, backend):
    """Two dims of latents fifty times as large as the others, where many partial results are merged."""
    p = Latents((1, 2), (131072, 300), 16, torch.bfloat16, device, causal=True)
    for dim in (7, 300):
        p.keys[:, dim] *= 50.0
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_ties(device, backend, dtype, num_heads):
    """Keys that are all alike, in one KV tile and in partial results: the result is their latent, the lse exact."""
    p = Latents((1, 1, 1), (5000, 1, 64), num_heads, dtype, device)
    p.keys[:] = p.keys[:1]
    out, lse = attend(p, p.paged(), backend)
    bound = 1e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out, p.keys[:1, None, :512].expand_as(out), rtol=bound, atol=bound / 10)
    torch.testing.assert_close(lse.double().cpu(), p.expected().lse, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("base_e", [False, True])
def test_lse_through_merges_of_parts(device, backend, base_e):
    """Keys in three calls, whose states are merged, are keys in one: lse in base 2, and in base e made one."""
    whole, states = Latents((1, 1), (900, 700), 16, torch.float16, device), []
    for begins, ends in pairwise(((0, 0), (300, 200), (650, 200), (900, 700))):
        part = Latents((1, 1), [b - a for a, b in zip(begins, ends, strict=True)], 16, torch.float16, device)
        part.query = whole.query
        part.keys = torch.cat((whole.keys[begins[0] : ends[0]], whole.keys[900 + begins[1] : 900 + ends[1]]))
        pages = part.paged()
        run = planned(part, pages, backend).run
        o, lse = run(*parts(part), pages.ckv, pages.kpe, return_lse=True, return_lse_base_on_e=base_e)
        states.append((o, lse / math.log(2) if base_e else lse))
    o, lse = states[0]
    for state in states[1:]:
        o, lse = quire.merge_state(o, lse, *state)
    whole.check(o, lse)


def test_new_lengths_of_the_same_wrapper(device, backend):
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    for seed, kv_lens in enumerate([(70, 3), (9, 200, 1), (0, 0)]):
        p = Latents((1,) * len(kv_lens), kv_lens, 16, torch.float16, device, seed=seed)
        pages = p.paged()
        plan(wrapper, p, pages)
        p.check(*wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True))


def test_repeated_runs_are_the_same_bits(device, backend):
    p = Latents((1,) * 3, (3000, 77, 4000), 20, torch.bfloat16, device)
    pages = p.paged()
    wrapper = planned(p, pages, backend)
    first = wrapper.run(*parts(p), pages.ckv, pages.kpe)
    for _ in range(5):
        assert torch.equal(wrapper.run(*parts(p), pages.ckv, pages.kpe), first)


def test_fixed_splits_do_not_depend_on_neighbours(device, backend):
    p = Latents((1, 1, 1), (700, 3, 1500), 16, torch.bfloat16, device)
    pages = p.paged()
    together = planned(p, pages, backend, fixed_split_size=256).run(*parts(p), pages.ckv, pages.kpe)
    begin, end = pages.indptr[2:]
    alone = Latents((1,), (1500,), 16, torch.bfloat16, device)
    alone.query, alone.keys = p.query[2:], p.keys[703:]
    own = LatentPages(pages.ckv, pages.kpe, [0, end - begin], pages.indices[begin:end], 16)
    assert torch.equal(
        planned(alone, own, backend, fixed_split_size=256).run(*parts(alone), own.ckv, own.kpe)[0], together[2]
    )
    p.check(together)


def graph_wrapper(p: Latents, batch_size: int, num_pages: int, backend: str) -> quire.BatchMLAPagedAttentionWrapper:
    """For CUDA graphs, with buffers of `batch_size` requests and `num_pages` page numbers."""
    sizes = {
        "qo_indptr": batch_size + 1,
        "kv_indptr": batch_size + 1,
        "kv_indices": num_pages,
        "kv_len_arr": batch_size,
    }
    buffers = {name: torch.empty(size, dtype=torch.int32, device=p.device) for name, size in sizes.items()}
    return quire.BatchMLAPagedAttentionWrapper(workspace(p.device), True, **buffers, backend=backend)


@pytest.mark.parametrize("by_module", [False, True])
def test_cuda_graphs_follow_new_lengths(device, backend, by_module):
    """On the CPU nothing is captured, but plans obey the same limits."""
    p = Latents((1, 1, 1), (3000, 40, 5), 16, torch.float16, device)
    pages = p.paged(1, spare=7)
    wrapper = graph_wrapper(p, 3, 4000, backend)
    plan(wrapper, p, pages)
    query, out, graph = p.query.clone(), poisoned((3, 16, 512), p.dtype, device), None
    lse = poisoned((3, 16), torch.float32, device)
    cache = torch.empty(4000, 1, 576, dtype=p.dtype, device=device)

    def run() -> None:
        wrapper.run(query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:], out, lse)

    run()
    if device != "cpu":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    for seed, kv_lens in enumerate([(3000, 40, 5), (1, 0, 900), (2000, 1000, 17)]):
        p = Latents((1, 1, 1), kv_lens, 16, torch.float16, device, seed=seed)
        pages = p.paged(1, spare=7)
        cache.fill_(math.nan)
        cache[: pages.ckv.shape[0], :, :512], cache[: pages.ckv.shape[0], :, 512:] = pages.ckv, pages.kpe
        query.copy_(p.query)
        if by_module:
            as_sglang_plans(wrapper, p, pages)
        else:
            plan(wrapper, p, pages)
        graph.replay() if graph is not None else run()
        p.check(out, lse)


def as_sglang_plans(wrapper: quire.BatchMLAPagedAttentionWrapper, p: Latents, pages: LatentPages) -> None:
    """Between replays: page numbers into the buffer, and lengths straight to the module."""
    wrapper._causal, wrapper._page_size, wrapper._sm_scale = p.causal, 1, SCALE
    wrapper._kv_indices_buf[: len(pages.indices)].copy_(ints(pages.indices, p.device))
    for buffer, values in ((wrapper._qo_indptr_buf, p.qo_indptr), (wrapper._kv_indptr_buf, pages.indptr)):
        buffer.copy_(ints(values, p.device))
    wrapper._kv_len_arr_buf.copy_(ints(p.kv_lens, p.device))
    arrays = (ints(values, "cpu") for values in (p.qo_indptr, pages.indptr, p.kv_lens))
    buffers = wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer
    wrapper._cached_module.plan(*buffers, *arrays, p.num_heads, 512, p.causal)


def test_arguments_are_used_or_refused(device, backend):
    p = Latents((1, 1), (30, 50), 16, torch.bfloat16, device)
    pages = p.paged()
    wrapper = planned(p, pages, backend)
    run = (*parts(p), pages.ckv, pages.kpe)
    scaled = wrapper.run(*run, ckv_scale=0.5, kpe_scale=0.5)
    torch.testing.assert_close(scaled.float(), reference_scaled(p, 0.5).to(device), **ROUNDED)
    table = {"kv_len": ints(p.kv_lens, device), "page_table": pages.table(device)}
    for options, message in (
        ({"profiler_buffer": torch.zeros(1)}, "profiler_buffer"),
        ({"o_scale": 2.0}, "o_scale"),
        ({"ckv_scale_arr": torch.ones(2), "ckv_scale": 2.0, "kpe_scale": 2.0}, "ckv_scale_arr: expected it alone"),
        ({"ckv_scale": 0.5}, "kpe_scale: expected it with ckv_scale=0.5"),
        ({"ckv_scale": -0.5, "kpe_scale": 1.0}, "ckv_scale: expected a positive number"),
        (table, "kv_len, page_table: expected both without a plan"),
        ({"enable_pdl": 1}, "enable_pdl: expected a bool"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            wrapper.run(*run, **options)
    for options, message in (
        ({"use_profiler": True}, "use_profiler"),
        ({"skip_softmax": 1}, "skip_softmax: expected a bool"),
        ({"query_layout": "both"}, "query_layout: expected one of"),
        ({"lse_mode": "base10"}, "lse_mode"),
        ({"output_scale": "per-tensor"}, "output_scale"),
        ({"kv_cache_layout": 3}, "kv_cache_layout: expected one of"),
        ({"scale_mode": "per-token"}, "scale_mode"),
        ({"output_dtype": "int8"}, "o_data_type"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            plan(wrapper, p, pages, **options)
    with pytest.raises(quire.ValidationError, match="sm_scale: expected it"):
        wrapper.plan(*[ints([0], "cpu")] * 3, ints([], "cpu"), 16, 512, 64, 1, False, None, p.dtype, p.dtype)
    with pytest.raises(quire.UnsupportedError, match="head_dim_ckv=256, head_dim_kpe=32: expected 512 and 64"):
        wrapper.plan(*[ints([0], "cpu")] * 3, ints([], "cpu"), 16, 256, 32, 1, False, SCALE, p.dtype, p.dtype)


def reference_scaled(p: Latents, scale: float) -> torch.Tensor:
    twin = Latents(p.qo_lens, p.kv_lens, p.num_heads, p.dtype, p.device)
    twin.keys = p.keys * scale
    return twin.expected().o.float()


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "out"])
def test_tensors_are_checked_by_name(device, backend, name):
    p = Latents((1, 1), (30, 50), 16, torch.bfloat16, device)
    pages = p.paged()
    wrapper = planned(p, pages, backend)
    tensors = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (*parts(p), pages.ckv, pages.kpe), strict=True))
    tensors["out"] = torch.empty(2, 16, 512, dtype=p.dtype, device=device)
    wrapper.run(**tensors)
    wrong = tensors[name]
    for tensor in (wrong[..., ::2], wrong.float(), wrong[:1] if name[0] != "k" and name[0] != "c" else wrong[:, :3]):
        with pytest.raises(quire.ValidationError, match=name):
            wrapper.run(**tensors | {name: tensor})


def tables(p: Latents, pages: LatentPages) -> dict[str, object]:
    """Keywords that the calls on tables of pages share."""
    return {
        "workspace_buffer": workspace(p.device), "qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "block_tables": pages.table(p.device), "seq_lens": ints(p.kv_lens, p.device),
        "max_seq_len": max([*p.kv_lens, 1]), "bmm1_scale": SCALE,
    }  # fmt: skip


def joined(pages: LatentPages) -> torch.Tensor:
    return pages.ckv.as_strided((*pages.ckv.shape[:2], 576), pages.ckv.stride())


@pytest.mark.parametrize("page_size", [1, 32, 64])
@pytest.mark.parametrize("q_len", [1, 3])
def test_trtllm_decode(device, dtype, q_len, page_size):
    p = Latents((q_len,) * 4, (37, q_len, 300, 64), 16, dtype, device, causal=q_len > 1)
    pages = p.paged(page_size)
    query = p.query.view(4, q_len, 16, 576)
    decode = quire.mla.trtllm_batch_decode_with_kv_cache_mla
    out, lse = decode(query, joined(pages), **tables(p, pages), return_lse=True)
    assert out.shape == (4, q_len, 16, 512)
    p.check(out.flatten(0, 1), lse)
    given, statistics = torch.empty_like(out), torch.empty(4, q_len, 16, device=device)
    result = decode(query, joined(pages).unsqueeze(1), **tables(p, pages), out=given, lse=statistics, return_lse=True)
    assert result[0] is given and result[1] is statistics
    assert torch.equal(given, out) and torch.equal(statistics.flatten(0, 1), lse)
    p.sinks = torch.randn(16)
    p.check(decode(query, joined(pages), **tables(p, pages), sinks=[p.sinks.to(device)]).flatten(0, 1))
    scales = {"bmm1_scale": torch.tensor([SCALE], device=device), "bmm2_scale": torch.tensor([0.5], device=device)}
    torch.testing.assert_close(decode(query, joined(pages), **tables(p, pages) | scales), out * 0.5, **ROUNDED)
    if q_len == 1:
        again = quire.mla.xqa_batch_decode_with_kv_cache_mla(query, joined(pages), **tables(p, pages))
        assert torch.equal(again, out)


def test_trtllm_decode_of_ragged_queries(device, dtype):
    p = Latents((1, 4, 0, 2), (37, 4, 5, 300), 16, dtype, device, causal=True)
    pages = p.paged(32)
    out, lse = quire.mla.trtllm_batch_decode_with_kv_cache_mla(
        p.query, joined(pages), **tables(p, pages), cum_seq_lens_q=ints(p.qo_indptr, device), max_q_len=4,
        return_lse=True,
    )  # fmt: skip
    p.check(out, lse)


def sparse(p: Latents, top_k: int, num_pages: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache, indices [rows, top_k] into it and how many of them count, for a problem of one query a request whose
    keys are those that its indices name. Tokens that no index names are NaN.
    """
    rows, num_tokens = len(p.qo_lens), num_pages * page_size
    cache = poisoned((num_tokens, 576), p.dtype, p.device)
    tokens = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))[: sum(p.kv_lens)]
    cache[tokens.to(p.device)] = p.keys
    indices, lens, at = torch.full((rows, top_k), -1), torch.tensor(p.kv_lens), 0
    nothing = torch.tensor([-1, num_tokens, -(2**31), 2**31 - 1])
    for row, n in enumerate(p.kv_lens):
        indices[row, n:] = nothing[torch.arange(top_k - n) % 4]
        indices[row, :n] = tokens[at : at + n]
        if row % 2:  # in any order, the ones that name nothing between the others
            indices[row], lens[row] = indices[row, torch.randperm(top_k)], top_k
        else:  # what lies beyond the length would name tokens
            indices[row, n:] = tokens[0]
        at += n
    return (
        cache.view(num_pages, page_size, 576),
        indices.to(torch.int32).to(p.device),
        lens.to(torch.int32).to(p.device),
    )


@pytest.mark.parametrize("num_heads", [8, 64, 128])
@pytest.mark.parametrize("page_size", [1, 64])
def test_sparse_decode(device, dtype, page_size, num_heads):
    """Indices that name no token are not read, nor is any that no index names."""
    p = Latents((1,) * 6, (64, 10, 0, 1, 33, 0), num_heads, dtype, device)
    cache, indices, lens = sparse(p, 64, 512 // page_size, page_size)
    call = {**tables(p, p.paged(16)), "sparse_mla_top_k": 64, "return_lse": True, "kv_cache": cache}
    decode = quire.mla.trtllm_batch_decode_with_kv_cache_mla
    more = {"block_tables": indices.view(6, 1, 64), "seq_lens": lens}
    o, lse = decode(p.query.unsqueeze(1), **call | more)
    p.check(o.squeeze(1), lse)
    more = {"block_tables": indices.view(3, 2, 64), "seq_lens": None, "sparse_mla_top_k_lens": lens}
    again, _ = decode(p.query.view(3, 2, num_heads, 576), **call | more)
    assert torch.equal(again.flatten(0, 1), o.squeeze(1))
    offsets = ints((0, 1, 6), device)
    more = {"block_tables": indices, "seq_lens": lens, "cum_seq_lens_q": offsets, "max_q_len": 5}
    assert torch.equal(decode(p.query, **call | more)[0], o.squeeze(1))
    more["seq_lens"], short = ints((64, 5), device), ints((64, 5, 5, 5, 5, 5), device)
    expected, _ = decode(p.query.unsqueeze(1), **call | {"block_tables": indices.view(6, 1, 64), "seq_lens": short})
    limited, _ = decode(p.query, **call | more)
    assert torch.equal(limited.isnan(), expected.squeeze(1).isnan())
    assert torch.equal(limited.nan_to_num(0), expected.squeeze(1).nan_to_num(0))


@pytest.mark.parametrize("lens", [None, (4, 2, 0)])
def test_kernels_without_gaps_get_the_tokens_that_exist(device, lens):
    indices = [[5, -1, 3, 9], [-(2**31), 7, 7, 10], [0, 1, 2, 3]]
    given = Lengths(None if lens is None else ints(lens, device), ints(indices, device), 1, 1, 10)
    found = given.without_gaps()
    assert found.kv_lens is not None and found.num_pages is None
    rows = [row[:n].tolist() for row, n in zip(found.page_table, found.kv_lens, strict=True)]
    assert rows == ([[5, 3, 9], [7, 7], [0, 1, 2, 3]] if lens is None else [[5, 3, 9], [7], []])
    assert found.without_gaps() is found


def test_a_token_that_is_named_twice_counts_twice(device, dtype):
    p = Latents((1,), (3,), 16, dtype, device)
    cache, indices, _ = sparse(p, 4, 8, 1)
    indices[0] = indices[0, [0, 1, 2, 1]]
    p.kv_lens, p.keys = (4,), p.keys[[0, 1, 2, 1]]
    more = {"sparse_mla_top_k": 4, "kv_cache": cache, "block_tables": indices.view(1, 1, 4), "seq_lens": None}
    o = quire.mla.trtllm_batch_decode_with_kv_cache_mla(p.query.unsqueeze(1), **tables(p, p.paged()) | more)
    p.check(o.squeeze(1))
    apart = poisoned((4, 3, 600), dtype, device)[:, :2, :576]  # the same tokens in pages of two, with gaps
    apart.copy_(cache.view(4, 2, 576))
    o = quire.mla.trtllm_batch_decode_with_kv_cache_mla(
        p.query.unsqueeze(1), **tables(p, p.paged()) | more | {"kv_cache": apart}
    )
    p.check(o.squeeze(1))


def test_trtllm_decode_refuses_by_name(device):
    p = Latents((1, 1), (30, 50), 16, torch.bfloat16, device)
    pages = p.paged()
    call = {"query": p.query.view(2, 1, 16, 576), "kv_cache": joined(pages), **tables(p, pages)}
    for options, message in (
        ({"sparse_mla_top_k_lens": 8}, "sparse_mla_top_k_lens"),
        ({"sparse_mla_top_k": 8}, "block_tables: expected"),
        ({"enable_dcp": True}, "enable_dcp"),
        ({"skip_softmax_threshold_scale_factor": -1.0}, "skip_softmax_threshold_scale_factor"),
        ({"uses_shared_paged_kv_idx": False}, "separate_page_tables"),
        ({"cp_rank": 1}, "cp_rank"),
        ({"causal_seqlens_kv_global": 1}, "causal_seqlens_kv_global"),
        ({"is_var_seq": 1}, "is_var_seq: expected a bool"),
        ({"enable_pdl": 1}, "enable_pdl: expected a bool"),
        ({"cute_dsl_impl": "x"}, "cute_dsl_impl: expected one of"),
        ({"multi_ctas_kv_counter_buffer": 1}, "multi_ctas_kv_counter_buffer"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
        ({"cp_world": 2}, "cp_world"),
        ({"use_fp16_softmax": 1}, "use_fp16_softmax: expected a bool"),
        ({"max_q_len": 2}, "max_q_len: expected it beside cum_seq_lens_q"),
        ({"kv_scale_format": "e8m0"}, "kv_scale_format"),
        ({"sinks": []}, "sinks: expected a tensor or a list of one"),
        ({"query": p.query}, "query: expected"),
        ({"out": torch.empty(2, 1, 16, 576, dtype=p.dtype, device=device)}, "out: expected"),
        ({"backend": "sparse"}, "backend: expected one of"),
    ):
        with pytest.raises(quire.ValidationError, match=message):
            quire.mla.trtllm_batch_decode_with_kv_cache_mla(**call | options)
    with pytest.raises(quire.UnsupportedError, match="expected 512 and 64, got 256 and 64"):
        quire.mla.trtllm_batch_decode_with_kv_cache_mla(**call | {"kv_lora_rank": 256})


def test_xqa_mla(device, dtype):
    p = Latents((1,) * 3, (37, 5, 300), 20, dtype, device)
    pages = p.paged(32)
    q, cache = p.query.unsqueeze(1), joined(pages).unsqueeze(2)
    where = pages.table(device), ints(p.kv_lens, device)
    out = quire.xqa_mla(q, cache, cache, *where, page_size=32, q_scale=SCALE, backend="xqa")
    p.check(out.squeeze(1))
    output = torch.empty_like(out)
    more = {"semaphores": ints([0] * 8, device).view(torch.uint32), "workspace_buffer": workspace(device)}
    for values in (cache, cache[..., :512]):
        output.fill_(math.nan)
        options = {"page_size": 32, "q_scale": 2 * SCALE, "kv_scale": 0.5, "sm_count": 8, "enable_pdl": False, **more}
        assert quire.xqa_mla(q, cache, values, *where, output, **options) is output
        torch.testing.assert_close(output, out * 0.5, **ROUNDED)
    with pytest.raises(quire.ValidationError, match="v_cache: expected k_cache itself"):
        quire.xqa_mla(q, cache, cache.clone(), *where)
    with pytest.raises(quire.ValidationError, match="num_kv_heads: expected 1, got 2"):
        quire.xqa_mla(q, cache, cache, *where, num_kv_heads=2)
    with pytest.raises(quire.ValidationError, match="head_dim: expected 576, got 64"):
        quire.xqa_mla(q, cache, cache, *where, head_dim=64)


def test_run_without_a_plan(device, dtype):
    """As FlashInfer's cutlass backend: tables of pages and lengths, one query each."""
    p = Latents((1,) * 3, (37, 0, 300), 16, dtype, device)
    pages = p.paged(32)
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(device), backend="cutlass")
    where = {"kv_len": ints(p.kv_lens, device), "page_table": pages.table(device)}
    p.check(*wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True, **where))
    with pytest.raises(quire.PlanError):
        wrapper.run(*parts(p), pages.ckv, pages.kpe)


def test_torch_compile(device, backend):
    p = Latents((1, 1), (30, 50), 16, torch.float16, device)
    pages = p.paged()
    wrapper = planned(p, pages, backend)

    def step(q_nope, q_pe, ckv, kpe):
        return wrapper.run(q_nope, q_pe, ckv, kpe) * 2

    got = torch.compile(step, backend="aot_eager", fullgraph=True)(*parts(p), pages.ckv, pages.kpe)
    assert torch.equal(got, step(*parts(p), pages.ckv, pages.kpe))
