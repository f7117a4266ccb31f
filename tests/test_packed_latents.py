"""Latents in rows of 656 bytes: 512 e4m3 numbers, a float32 scale for each 128 of them, and 64 bfloat16 numbers.

Attention to them is compared with the oracle on what the rows say, in float64. Bytes that must not be read are 255: NaN
as numbers of each of the three types.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import oracle
import quire
from latents import BYTES, E4M3, SCALE, LatentPages, Latents, of_flash_mla, packed, unpacked
from problems import ints, workspace
from quire.compat.flash_mla import flash_mla_with_kvcache

CUDA_BACKENDS = {"fa2": (8, 0), "fa3": (9, 0)}


class Rows(Latents):
    """A batch whose latents are rows: `rows` as stored, `keys` as they are meant. Scales are powers of two: whether
    products with them are rounded to bfloat16 makes no difference.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        magnitudes = torch.logspace(-3, 2, self.keys.shape[0]).to(
            self.device
        )  # so that tokens have scales of their own
        keys = self.keys * magnitudes[:, None].clamp(max=2.0)
        largest = keys[:, :512].float().view(-1, 4, 128).abs().amax(2)
        self.rows = packed(keys, (largest / 448).log2().ceil().exp2())
        self.keys = unpacked(self.rows)

    def pages_of(self, page_size: int, spare: int = 3, gap: int = 0) -> tuple[Tensor, LatentPages]:
        """uint8 pages [num_pages, page_size, 656] in a random order, `gap` tokens apart, and their tables."""
        counts = [-(-n // page_size) for n in self.kv_lens]
        num_pages = sum(counts) + spare
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(self.seed))[: sum(counts)].tolist()
        cache = torch.full((num_pages, page_size + gap, BYTES), 255, dtype=torch.uint8, device=self.device)
        free, at = iter(order), 0
        for n in self.kv_lens:
            for begin in range(0, n, page_size):
                count = min(page_size, n - begin)
                cache[next(free), :count] = self.rows[at : at + count]
                at += count
        cache = cache[:, :page_size]
        return cache, LatentPages(cache, cache, oracle.indptr_of(counts), order, page_size)


def problem(device: str, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], num_heads: int = 16, **more) -> Rows:
    return Rows(qo_lens, kv_lens, num_heads, torch.bfloat16, device, **more)


def attend(p: Rows, cache: Tensor, pages: LatentPages, backend: str = "auto", **plan) -> tuple[Tensor, Tensor]:
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(p.device), backend=backend)
    wrapper.plan(
        ints(p.qo_indptr, "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, p.device), ints(p.kv_lens, "cpu"),
        p.num_heads, 512, 64, pages.page_size, p.causal, SCALE, p.dtype, torch.uint8, **plan,
    )  # fmt: skip
    return wrapper.run(p.query[..., :512], p.query[..., 512:], kv_cache=cache, return_lse=True)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize(("num_heads", "q_len"), [(1, 1), (16, 1), (20, 3), (128, 1)])
def test_wrapper(device, backend, num_heads, q_len, page_size):
    p = problem(device, (q_len,) * 5, (37, 0, 700, 1, 129), num_heads, causal=q_len > 1)
    p.check(*attend(p, *p.pages_of(page_size, gap=page_size % 2), backend))


@pytest.mark.parametrize("head_dim_kpe", [64, 0])
def test_scales_beside_the_cache(device, backend, head_dim_kpe):
    """ckv_scale_arr: the same latents as three tensors, with kpe of 8 bits that has a scale, or none."""
    p = problem(device, (1, 3), (37, 500), 20, causal=True)
    if head_dim_kpe == 0:
        p.query[..., 512:] = 0
    p.rows[:, 528:] = (p.rows[:, 528:].contiguous().view(torch.bfloat16).to(E4M3).bfloat16() * 0.5).view(torch.uint8)
    p.keys = unpacked(p.rows)
    cache, pages = p.pages_of(16)
    ckv, scales = cache[..., :512].view(E4M3), cache[..., 512:528].view(torch.float32)
    kpe = (cache[..., 528:].view(torch.bfloat16) * 2).to(E4M3)
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    tables = ints(p.qo_indptr, "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, device), ints(p.kv_lens, "cpu")
    wrapper.plan(*tables, 20, 512, head_dim_kpe, 16, True, SCALE, torch.bfloat16, E4M3)
    query = p.query[..., :512], p.query[..., 512 : 512 + head_dim_kpe]
    for _ in range(2):
        result = wrapper.run(*query, ckv, kpe[..., :head_dim_kpe], return_lse=True, ckv_scale_arr=scales, kpe_scale=0.5)
        p.check(*result)
    with pytest.raises(quire.ValidationError, match="ckv_scale"):
        wrapper.run(*query, ckv, kpe[..., :head_dim_kpe], ckv_scale_arr=scales[..., :2], kpe_scale=0.5)
    with pytest.raises(quire.UnsupportedError, match="ckv_scale_arr: expected a plan"):
        table = {"kv_len": ints(p.kv_lens, device), "page_table": pages.table(device)}
        wrapper.run(*query, ckv, kpe[..., :head_dim_kpe], ckv_scale_arr=scales, kpe_scale=0.5, **table)


@pytest.mark.parametrize("num_heads", [8, 128])
@pytest.mark.parametrize("kv_lens", [(0, 0), (5000,), (1, 4000, 3), ()], ids=str)
def test_lengths(device, backend, kv_lens, num_heads):
    p = problem(device, (1,) * len(kv_lens), kv_lens, num_heads)
    p.check(*attend(p, *p.pages_of(16), backend))


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_requests_that_fill_part_of_a_tile(device, backend, num_heads):
    """Tiles of 128 rows, of which some requests have fewer: one of two CTAs that share keys may have no rows."""
    p = problem(device, (4, 3, 1, 4, 8), (300, 1, 700, 63, 65), num_heads, causal=True)
    p.check(*attend(p, *p.pages_of(64), backend))


def test_more_row_tiles_than_ctas(device, backend):
    p = problem(device, (1,) * 150, tuple(37 * i % 200 for i in range(150)), 128 if device != "cpu" else 8)
    p.check(*attend(p, *p.pages_of(64), backend))


def test_fixed_splits_and_repeated_runs_are_the_same_bits(device, backend):
    p = problem(device, (1,) * 3, (3000, 77, 4000), 20)
    cache, pages = p.pages_of(64)
    first, again = (attend(p, cache, pages, backend, fixed_split_size=256) for _ in range(2))
    assert torch.equal(first[0], again[0])
    p.check(*first)


def test_every_number_of_eight_bits_is_exact(device, backend):
    """A request of one key returns its latent: each e4m3 number, times scales that round nothing."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    latents = torch.where(numbers.isfinite(), numbers, 0).repeat(2)
    p = problem(device, (1,) * 3, (1,) * 3)
    p.query.zero_()  # large logits would round its weight
    scales = torch.tensor([[1.0, 0.5, 2.0**-20, 2.0**30], [0.0, 1.0, 3.0, 2.0**-9], [7.0, 1.0, 1.0, -1.0]])
    p.rows[:, :512] = latents.to(E4M3).view(torch.uint8).to(device)
    p.rows[:, 512:528] = scales.view(torch.uint8).to(device)
    out, _ = attend(p, *p.pages_of(16), backend)
    exact = (latents.view(4, 128) * scales[:, :, None]).flatten(1)  # at most six bits
    assert torch.equal(out.float().cpu(), exact[:, None].expand(-1, 16, -1))


def test_scales_of_many_bits_are_multiplied_by_in_float32(device, backend):
    """The product is rounded once, to bfloat16."""
    p = problem(device, (1,), (1,))
    p.rows = packed(p.keys)
    out, _ = attend(p, *p.pages_of(16), backend)
    numbers = p.rows[0, :512].view(E4M3).float().view(4, 128)
    product = numbers * p.rows[0, 512:528].view(torch.float32)[:, None]
    assert torch.equal(out[0], product.flatten().bfloat16().expand(16, -1))


@pytest.mark.parametrize(("q_len", "causal"), [(1, False), (3, True), (2, False)])
def test_flash_mla_dense(device, q_len, causal):
    """kv_len 0, and fewer tokens than causal queries."""
    p = problem(device, (q_len,) * 4, (37, q_len, 0, 2), 64, causal=causal)
    cache, pages = p.pages_of(64)
    where = pages.table(device), ints(p.kv_lens, device), 512
    query = p.query.view(4, q_len, 64, 576)
    for k_cache in (cache, cache.view(torch.int8), cache.view(E4M3)):
        out, lse = flash_mla_with_kvcache(
            query, k_cache.unsqueeze(2), *where, softmax_scale=SCALE, causal=causal, is_fp8_kvcache=True
        )
        p.check(out.flatten(0, 1), of_flash_mla(lse.transpose(1, 2).flatten(0, 1)))


@pytest.mark.parametrize("num_heads", [8, 128])
@pytest.mark.parametrize("page_size", [1, 64])
def test_flash_mla_sparse(device, num_heads, page_size):
    """Indices of -1 and beyond the cache, one that is named twice, and topk_length 0; what no index names is NaN."""
    p = problem(device, (1,) * 5, (64, 10, 0, 1, 4), num_heads)
    num_tokens, top_k = 512, 64
    cache = torch.full((num_tokens, BYTES), 255, dtype=torch.uint8, device=device)
    tokens = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))[: sum(p.kv_lens)]
    tokens[-1] = tokens[-2]
    p.rows[-1], p.keys[-1] = p.rows[-2].clone(), p.keys[-2].clone()
    cache[tokens.to(device)] = p.rows
    indices, lens, at = tokens[:1].repeat(5, top_k).contiguous(), torch.tensor(p.kv_lens), 0
    nothing = torch.tensor([-1, num_tokens, -(2**31), 2**31 - 1])
    for row, n in enumerate(p.kv_lens):  # beyond a row's length indices name tokens, as do none before it
        indices[row, :n] = tokens[at : at + n]
        at += n
    indices[1, 10:], lens[1] = nothing[torch.arange(top_k - 10) % 4], top_k
    indices[1] = indices[1, torch.randperm(top_k, generator=torch.Generator().manual_seed(2))]
    out, lse = flash_mla_with_kvcache(
        p.query.unsqueeze(1), cache.view(-1, page_size, 1, BYTES), None, None, 512, softmax_scale=SCALE,
        is_fp8_kvcache=True, indices=indices.view(5, 1, top_k).int().to(device), topk_length=lens.int().to(device),
    )  # fmt: skip
    p.check(out.squeeze(1), of_flash_mla(lse.squeeze(2)))


def test_cuda_graphs_follow_new_lengths(device, backend):
    """On the CPU nothing is captured, but plans obey the same limits."""
    int32, graph = {"dtype": torch.int32, "device": device}, None
    buffers = {name: torch.empty(n, **int32) for name, n in (("qo_indptr", 4), ("kv_indptr", 4), ("kv_len_arr", 3))}
    indices = torch.empty(200, **int32)
    wrapper = quire.BatchMLAPagedAttentionWrapper(
        workspace(device), True, **buffers, kv_indices=indices, backend=backend
    )
    query, cache = torch.empty(3, 16, 576, dtype=torch.bfloat16, device=device), torch.empty(0)
    out, lse = torch.empty(3, 16, 512, dtype=torch.bfloat16, device=device), torch.empty(3, 16, device=device)
    for seed, kv_lens in enumerate([(3000, 40, 5), (1, 0, 900), (2000, 500, 17)]):
        p = problem(device, (1, 1, 1), kv_lens, seed=seed)
        pages_of_batch, pages = p.pages_of(16, spare=200 - sum(-(-n // 16) for n in kv_lens))
        cache = pages_of_batch.clone() if seed == 0 else cache.copy_(pages_of_batch)
        query.copy_(p.query)
        wrapper.plan(
            ints(p.qo_indptr, "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, device), ints(kv_lens, "cpu"), 16,
            512, 64, 16, False, SCALE, torch.bfloat16, torch.uint8,
        )  # fmt: skip
        if graph is None:
            wrapper.run(query=query, kv_cache=cache, out=out, lse=lse)
        if device != "cpu" and graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                wrapper.run(query=query, kv_cache=cache, out=out, lse=lse)
        graph.replay() if graph is not None else wrapper.run(query=query, kv_cache=cache, out=out, lse=lse)
        p.check(out, lse)


def test_torch_compile(device, backend):
    p = problem(device, (1, 1), (30, 50))
    cache, pages = p.pages_of(16)
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(device), backend=backend)
    where = ints(p.qo_indptr, "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, device), ints(p.kv_lens, "cpu")
    wrapper.plan(*where, 16, 512, 64, 16, False, SCALE, torch.bfloat16, torch.uint8)

    def step(query: Tensor, kv_cache: Tensor) -> Tensor:
        return wrapper.run(query=query, kv_cache=kv_cache) * 2

    got = torch.compile(step, backend="aot_eager", fullgraph=True)(p.query, cache)
    assert torch.equal(got, step(p.query, cache))


def test_calls_on_tables(device):
    p = problem(device, (1,) * 3, (37, 0, 300))
    cache, pages = p.pages_of(32)
    where = {"kv_len": ints(p.kv_lens, device), "page_table": pages.table(device)}
    run = quire.BatchMLAPagedAttentionWrapper(workspace(device)).run
    p.check(*run(p.query[..., :512], p.query[..., 512:], kv_cache=cache, return_lse=True, **where))
    out = quire.mla.trtllm_batch_decode_with_kv_cache_mla(
        p.query.unsqueeze(1), cache.unsqueeze(1), workspace(device), 128, 512, 64, where["page_table"], where["kv_len"],
        320, bmm1_scale=SCALE,
    )  # fmt: skip
    p.check(out.squeeze(1))


@pytest.mark.parametrize("sparse", [False, True])
def test_page_numbers_beyond_2_20_and_places_beyond_2_31_bytes(device, sparse):
    """Scattered tokens of a cache of 2.7 GiB, of which the host touches a few pages only."""
    num_pages = (1 << 20) + 7000
    if device != "cpu" and torch.cuda.mem_get_info()[0] < 3 * num_pages * 4 * BYTES // 2:
        pytest.skip("the GPU's memory")
    p = problem(device, (1, 1), (9, 4))
    cache = torch.empty(num_pages, 4, BYTES, dtype=torch.uint8, device=device)
    numbers = [num_pages - 1, 3, num_pages - 77, num_pages - 5000]
    for page, begin, count in zip(numbers, (0, 4, 8, 9), (4, 4, 1, 4), strict=True):
        cache[page, :count] = p.rows[begin : begin + count]
    if sparse:
        tokens = torch.tensor([4 * page + i for page, n in zip(numbers, (4, 4, 1, 4), strict=True) for i in range(n)])
        indices = torch.full((2, 1, 9), -1)
        indices[0, 0], indices[1, 0, :4] = tokens[:9], tokens[9:]
        where = {"block_table": None, "cache_seqlens": None, "indices": indices.int().to(device)}
    else:
        where = {
            "block_table": ints([numbers[:3], [numbers[3], -1, -1]], device),
            "cache_seqlens": ints((9, 4), device),
        }
    out, lse = flash_mla_with_kvcache(
        p.query.unsqueeze(1), cache.unsqueeze(2), **where, head_dim_v=512, softmax_scale=SCALE, is_fp8_kvcache=True
    )
    p.check(out.squeeze(1), of_flash_mla(lse.squeeze(2)))


def test_wrong_arguments(device):
    p = problem(device, (1,), (5,))
    cache, pages = p.pages_of(16)
    call = {"block_table": pages.table(device), "cache_seqlens": ints((5,), device), "head_dim_v": 512}
    query = p.query.unsqueeze(1)
    with pytest.raises(quire.ValidationError, match="is_fp8_kvcache: expected True"):
        flash_mla_with_kvcache(query, cache.unsqueeze(2), **call)
    apart = torch.zeros(4, 16, 1, 658, dtype=torch.uint8, device=device)[..., :BYTES]
    shifted = torch.zeros(4, 16, 1, 660, dtype=torch.uint8, device=device)[..., 2:658]
    for wrong in (apart, shifted):
        with pytest.raises(quire.ValidationError, match="multiples of 4"):
            flash_mla_with_kvcache(query, wrong, **call, is_fp8_kvcache=True)
    with pytest.raises(quire.UnsupportedError, match="expected bf16 and e4m3"):
        flash_mla_with_kvcache(query.half(), cache.unsqueeze(2), **call, is_fp8_kvcache=True)
    wrapper = quire.BatchMLAPagedAttentionWrapper(workspace(device))
    where = ints((0, 1), "cpu"), ints(pages.indptr, "cpu"), ints(pages.indices, device), ints((5,), "cpu")
    wide = torch.zeros(4, 16, 576, dtype=torch.bfloat16, device=device)
    for kv_dtype, kv_cache, message in (
        (torch.uint8, wide, "expected rows"),
        (torch.bfloat16, cache, "expected no rows"),
    ):
        wrapper.plan(*where, 16, 512, 64, 16, False, SCALE, torch.bfloat16, kv_dtype)
        with pytest.raises(quire.ValidationError, match=message):
            wrapper.run(query=p.query, kv_cache=kv_cache)
