"""FlashMLA's functions over its rows of bytes, pages with gaps, two caches and several heads of keys, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import oracle
import quire
from latents import Latents, of_flash_mla, packed, packed_v4
from problems import ints
from quire.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from test_flash_mla import check, check_most

E4M3, BF16, SCALE = torch.float8_e4m3fn, torch.bfloat16, 0.04


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_v32(keys: Tensor) -> tuple[Tensor, str]:
    """Rows of 656 or 528 bytes of keys [tokens, 576 or 512], and their kind."""
    rows = packed(torch.nn.functional.pad(keys, (0, 576 - keys.shape[1])))[:, : 528 + 2 * (keys.shape[1] - 512)]
    return rows, "V32"


def of_v4(keys: Tensor) -> tuple[Tensor, str]:
    """The same in rows of 576 + 8 bytes, of which the last 8 lie behind the rows of a page."""
    return packed_v4(keys), "V4"


@dataclass
class Rows:
    """A cache of rows in pages with gaps, and what each of some queries chooses of it.

    What nobody chooses, and the gaps, are NaN.
    """

    cache: Tensor  #: [pages, page_size, 1, numbers or bytes]
    indices: Tensor  #: int32 [queries, top_k]
    lens: Tensor  #: int32 [queries]
    keys: list[Tensor]  #: of each query, float64
    exact: list[Tensor]  #: the same, before they are rounded to bfloat16

    @classmethod
    def of(
        cls, counts: Sequence[int], top_k: int, page_size: int, dims: int, kind: str, device: str, seed: int,
        gap: int = 1,
    ) -> Rows:  # fmt: skip
        """gap: rows behind those of each page, or, below 0, pieces of 16 bytes."""
        total, source = sum(counts), torch.Generator().manual_seed(seed)
        num_pages = -(-total // page_size) + 3
        tokens = torch.randperm(num_pages * page_size, generator=source)[:total]
        keys = drawn(total, dims, seed=seed)
        if kind == "bytes":
            rows, name = of_v32(keys) if dims == 576 or seed % 2 else of_v4(keys)
            truth, exact = oracle.latent_rows(rows, name), oracle.latent_rows(rows, name, exact=True)
            nothing, is_v4 = 0x7F, rows.shape[1] == 584
        else:
            rows = keys.to(E4M3 if kind == "e4m3" else BF16)
            truth, exact, nothing, is_v4 = rows.double(), rows.double(), math.nan, False
        width = rows.shape[1]
        step = page_size * width + (gap * width if gap >= 0 else -gap * 16)
        step = -(-step // 16) * 16
        pages = torch.full((num_pages, step), nothing, dtype=torch.float32 if kind == "e4m3" else rows.dtype)
        pages = pages.to(rows.dtype)
        page, at = tokens // page_size, tokens % page_size
        for part, begin in ((rows[:, :576], 0), (rows[:, 576:], page_size * 576)) if is_v4 else ((rows, 0),):
            columns = begin + at[:, None] * part.shape[1] + torch.arange(part.shape[1])
            pages[page[:, None], columns] = part
        cache = pages.to(device)[:, : page_size * width].unflatten(1, (page_size, 1, width))
        indices, lens, first = torch.full((len(counts), top_k), -1), torch.tensor(counts), 0
        of_rows, of_exact, junk = [], [], torch.tensor([-1, num_pages * page_size, -(2**31), 2**31 - 1])
        for row, n in enumerate(counts):
            indices[row, :n] = tokens[first : first + n]
            indices[row, n:] = junk[torch.arange(top_k - n) % 4]
            if row % 2:  # in any order, and all of them count
                indices[row], lens[row] = indices[row, torch.randperm(top_k, generator=source)], top_k
            elif total:  # what lies beyond the length would name tokens
                indices[row, n:] = tokens[0]
            of_rows.append(truth[first : first + n])
            of_exact.append(exact[first : first + n])
            first += n
        return cls(cache, indices.int().to(device), lens.int().to(device), of_rows, of_exact)


def lse_of(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Of rows of q over their keys, float64."""
    found = []
    for row, own in zip(q.cpu(), keys, strict=True):
        parts = row[None, :, :512], row[None, :, 512:], own[:, :512], own[:, 512:]
        found.append(
            oracle.latent_attention(*parts, [0, 1], [0, own.shape[0]], sm_scale=SCALE, dtype=torch.float64).lse
        )
    return torch.cat(found)


def check_rows(
    q: Tensor, keys: Sequence[Tensor], out: Tensor, lse: Tensor, sink: Tensor | None = None,
    exact: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Rows of q [rows, heads, dims] over their keys, whose first 512 dims are the value.

    exact: keys that are not rounded to bfloat16. A kernel that multiplies sums by the scales computes with those.
    """
    wants = [], []
    for row, own in zip(q.cpu(), keys, strict=True):
        parts = row[None, :, :512], row[None, :, 512:], own[:, :512], own[:, 512:]
        bounded = None if sink is None else sink.clamp(-1e4, 1e4)
        for dtype, into in ((torch.float64, wants[0]), (q.dtype, wants[1])):
            into.append(oracle.latent_attention(*parts, [0, 1], [0, own.shape[0]], sm_scale=SCALE, dtype=dtype))
            if bounded is not None:
                with_sink = oracle.latent_attention(
                    *parts, [0, 1], [0, own.shape[0]], sm_scale=SCALE, sinks=bounded, dtype=dtype
                )
                into[-1] = oracle.State(with_sink.o, into[-1].lse)
    truth, own = (torch.cat([state.o for state in states]) for states in wants)
    oracle.assert_close(out, truth, own.double())
    found, want = of_flash_mla(lse), torch.cat([state.lse for state in wants[0]])
    if exact is not None:
        want = min((want, lse_of(q, exact)), key=lambda one: float((found.cpu() - one).nan_to_num().abs().max()))
    oracle.assert_lse_close(found, want, magnitude=64.0)


@pytest.mark.parametrize("num_heads", [8, 64])
@pytest.mark.parametrize(
    ("dims", "kind", "page_size", "gap"),
    [
        (576, "bytes", 64, 1), (576, "bytes", 61, -1), (576, "bytes", 2, -3), (512, "bytes", 5, -5), (576, "16", 7, 2),
        (576, "16", 64, -1), (576, "e4m3", 3, -1), (512, "16", 64, 1), (576, "bytes", 1, 3),
    ],
)  # fmt: skip
def test_pages_with_gaps(device, dims, kind, page_size, gap, num_heads):
    """Any distance of pages that is a multiple of 16 bytes."""
    x = Rows.of((64, 10, 0, 1, 33, 0), 64, page_size, dims, kind, device, 1, gap)
    q = drawn(6, num_heads, dims, seed=2).to(BF16).to(device)
    out, lse = flash_mla_with_kvcache(
        q.unsqueeze(1), x.cache, None, None, 512, *get_mla_metadata(), SCALE, False, kind != "16",
        x.indices.unsqueeze(1), topk_length=x.lens,
    )  # fmt: skip
    check_rows(q, x.keys, out.squeeze(1), lse.squeeze(2), exact=x.exact)


def test_rows_of_584_bytes_at_any_address(device):
    """Pages at multiples of 4 bytes are gathered number by number."""
    x = Rows.of((40, 3), 64, 5, 512, "bytes", device, 2)
    memory = torch.full((x.cache.shape[0], 5 * 584 + 12), 0x7F, dtype=torch.uint8, device=device)
    memory[:, 4 : 4 + 5 * 584] = x.cache.flatten(1)
    cache = memory[:, 4 : 4 + 5 * 584].unflatten(1, (5, 1, 584))
    q = drawn(2, 16, 512, seed=3).to(BF16).to(device)
    out, lse = flash_mla_with_kvcache(
        q.unsqueeze(1), cache, None, None, 512, None, None, SCALE, False, True, x.indices.unsqueeze(1),
        topk_length=x.lens,
    )  # fmt: skip
    check_rows(q, x.keys, out.squeeze(1), lse.squeeze(2))


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 2, 64, 69])
def test_rows_of_584_bytes(device, page_size, num_heads):
    """V4's, whose scales lie behind the rows of a page; two queries a request, which share its length."""
    x = Rows.of((40, 40, 0, 0, 7, 7), 64, page_size, 512, "bytes", device, 2)
    q = drawn(6, num_heads, 512, seed=3).to(BF16).to(device)
    sink = torch.cat((torch.tensor([math.inf, -math.inf]), drawn(num_heads - 2, seed=4)))
    full = x.indices.masked_fill(torch.arange(64, device=device) >= x.lens[:, None], -1)
    for lens, indices in ((None, full), (ints([64, 64, 64], device), full)):
        out, lse = flash_mla_with_kvcache(
            q.view(3, 2, num_heads, 512), x.cache, None, None, 512, FlashMLASchedMeta(), None, SCALE, False, True,
            indices.view(3, 2, 64), sink.to(device), topk_length=lens, kv_format="V4",
        )  # fmt: skip
        check_rows(q, x.keys, out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), sink)


@pytest.mark.parametrize(
    ("dims", "kinds", "page_sizes"),
    [(512, ("bytes", "bytes"), (64, 2)), (576, ("bytes", "bytes"), (3, 64)), (576, ("16", "16"), (16, 7)),
     (512, ("bytes", "16"), (5, 1)), (576, ("e4m3", "bytes"), (4, 8))],
)  # fmt: skip
@pytest.mark.parametrize("num_heads", [8, 64])
def test_two_caches(device, dims, kinds, page_sizes, num_heads):
    """The tokens of the second join those of the first; either may have none for a query."""
    first = Rows.of((64, 10, 0, 0), 64, page_sizes[0], dims, kinds[0], device, 2)
    second = Rows.of((0, 33, 128, 0), 128, page_sizes[1], dims, kinds[1], device, 4, -3)
    q = drawn(4, num_heads, dims, seed=5).to(BF16).to(device)
    if kinds[0] != kinds[1] and "16" in kinds:  # is_fp8_kvcache says it of both
        with pytest.raises(quire.ValidationError, match="is_fp8_kvcache: expected False with extra_k_cache"):
            flash_mla_with_kvcache(
                q.unsqueeze(1), first.cache, None, None, 512, None, None, SCALE, False, True, first.indices[:, None],
                None, second.cache, second.indices[:, None],
            )  # fmt: skip
        return
    for lens in (True, False):
        of_first, of_second = first.indices, second.indices
        if not lens:
            of_first = of_first.masked_fill(torch.arange(64, device=device) >= first.lens[:, None], -1)
        out, lse = flash_mla_with_kvcache(
            q.unsqueeze(1), first.cache, None, None, 512, get_mla_metadata()[0], None, SCALE, False, kinds[0] != "16",
            of_first.unsqueeze(1), None, second.cache, of_second.unsqueeze(1), first.lens if lens else None,
            second.lens,
        )  # fmt: skip
        keys = [torch.cat(pair) for pair in zip(first.keys, second.keys, strict=True)]
        check_rows(q, keys, out.squeeze(1), lse.squeeze(2))


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("dims", [512, 576])
def test_prefill_and_its_statistics(device, dims, num_heads):
    """Strided keys; the lse of the first indices beside that of all; statistics in base e and 2."""
    counts = (100, 3, 0, 64)
    x = Rows.of(counts, 128, 1, dims, "16", device, 1, 1)
    q = drawn(4, num_heads, dims, seed=6).to(BF16).to(device)
    indices = x.indices.masked_fill(torch.arange(128, device=device) >= x.lens[:, None], -1)
    kv = x.cache.squeeze(1)
    out, most, lse, first = flash_mla_sparse_fwd(q, kv, indices[:, None], SCALE, indexer_topk=65)
    check_rows(q, x.keys, out, lse)
    part = [kv.squeeze(1)[row[(row >= 0) & (row < kv.shape[0])].long()].cpu().double() for row in indices[:, :65]]
    whole = flash_mla_sparse_fwd(q, kv, indices[:, None, :65].contiguous(), SCALE)
    check_rows(q, part, whole[0], first)
    for row, own in zip(range(4), x.keys, strict=True):
        logits = q[row].cpu().double() @ own.T * SCALE
        want = logits.amax(1) if own.shape[0] else torch.full((num_heads,), -math.inf).double()
        torch.testing.assert_close(most[row].cpu().double(), want, rtol=2e-5, atol=2e-5)
    again = flash_mla_sparse_fwd(q, kv, indices[:, None], SCALE, return_log2_lse=True, use_legacy=True)
    for got, natural in zip(again[1:], (most, lse), strict=True):
        torch.testing.assert_close(got * math.log(2), natural, rtol=1e-5, atol=1e-5)


def test_statistics_of_divided_keys(device):
    """A few queries with many keys: parts of them are merged."""
    p = Latents((1,) * 2, (3000, 2500), 64, BF16, device)
    indices = torch.full((2, 3000), -1, dtype=torch.int32)
    indices[0], indices[1, 100:2600] = torch.arange(3000), torch.arange(3000, 5500)
    call = p.query, p.keys.unsqueeze(1), indices.unsqueeze(1).to(device), 192**-0.5
    out, most, lse = flash_mla_sparse_fwd(*call, attn_sink=torch.full((64,), -math.inf, device=device))
    check(p, out, lse)
    check_most(p, most)


@pytest.mark.parametrize(("q_len", "causal"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_several_heads_of_keys(device, num_kv_heads, q_len, causal):
    """Each with its own heads of queries."""
    lens, group = (37, 0 if q_len == 1 else q_len, 130), 8
    heads = [
        Latents((q_len,) * 3, lens, group, BF16, device, causal, seed=seed, kv_dtype=BF16)
        for seed in range(num_kv_heads)
    ]
    pages = [head.paged(64) for head in heads]
    number = max(page.ckv.shape[0] for page in pages)
    cache = torch.full((number, 64, num_kv_heads, 576), math.nan, dtype=BF16, device=device)
    for head, page in enumerate(pages):  # in the pages of the first
        for i, to in enumerate(pages[0].indices):
            at = page.indices[i]
            cache[to, :, head, :512], cache[to, :, head, 512:] = page.ckv[at], page.kpe[at]
    q = torch.cat([head.query.view(3, q_len, group, 576) for head in heads], dim=2)
    out, lse = flash_mla_with_kvcache(
        q, cache, pages[0].table(device), ints(lens, device), 512, None, None, 192**-0.5, causal
    )
    assert out.shape == (3, q_len, group * num_kv_heads, 512) and lse.shape == (3, group * num_kv_heads, q_len)
    for i, head in enumerate(heads):
        own = slice(i * group, (i + 1) * group)
        check(head, out[:, :, own].flatten(0, 1), lse[:, own].transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_of_eight_bits(device, causal):
    """With the factors of both, as vLLM passes them; the result is bfloat16."""
    p = Latents((2, 2), (37, 300), 16, BF16, device, causal, kv_dtype=E4M3, scale=1.7)
    of_q, query = 0.6, p.query.float()
    q = (query / of_q).to(E4M3)
    p.query = (q.float() * of_q).to(device)
    pages = p.paged(64)
    cache = torch.cat((pages.ckv, pages.kpe), dim=-1).unsqueeze(2)
    factors = {"descale_q": torch.tensor([of_q]).to(device), "descale_k": torch.tensor([1.7]).to(device)}
    out, lse = flash_mla_with_kvcache(
        q.view(2, 2, 16, 576), cache, pages.table(device), ints(p.kv_lens, device), 512, None, None, 192**-0.5, causal,
        **factors,
    )  # fmt: skip
    assert out.dtype is BF16
    check(p, out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1))


def test_keys_of_512_dims(device, dtype):
    """Dense attention where all dims of a key are the value."""
    p = Latents((1,) * 3, (37, 300, 64), 16, dtype, device)
    p.query[..., 512:] = 0
    pages = p.paged(64)
    out, lse = flash_mla_with_kvcache(
        p.query[..., :512].contiguous().unsqueeze(1), pages.ckv.unsqueeze(2), pages.table(device),
        ints(p.kv_lens, device), 512, None, None, 192**-0.5,
    )  # fmt: skip
    check(p, out.squeeze(1), lse.squeeze(2))


@pytest.mark.parametrize("form", ["three", "kv", "qkv"])
def test_separate_keys_and_values(device, dtype, form):
    """Keys of 192 and values of 128 dims; the lse is contiguous along the queries."""
    lens = [5, 0, 33]
    at = ints(oracle.indptr_of(lens), device)
    q, k, v = (drawn(38, 4, dims, seed=7 + i).to(dtype).to(device) for i, dims in enumerate((192, 192, 128)))
    if form == "three":
        out, lse = flash_attn_varlen_func(q, k, v, at, at, 33, 33, softmax_scale=SCALE, causal=True, is_varlen=True)
    elif form == "kv":
        kv = torch.cat((k, v), -1)
        out, lse = flash_attn_varlen_kvpacked_func(q, kv, at, at, 33, 33, 192, 0.0, SCALE, True)
    else:
        qkv = torch.cat((q, k, v), -1)
        out, lse = flash_attn_varlen_qkvpacked_func(qkv, at, 33, 192, softmax_scale=SCALE, causal=True)
    indptr = oracle.indptr_of(lens)
    parts = [x.cpu() for x in (q, k, v)]
    truth = oracle.attention(*parts, indptr, indptr, causal=True, sm_scale=SCALE)
    own = oracle.attention(*parts, indptr, indptr, causal=True, sm_scale=SCALE, dtype=dtype)
    oracle.assert_close(out, truth.o, own.o.double(), indptr)
    assert lse.shape == (38, 4) and lse.stride() == (1, 38)
    oracle.assert_lse_close(lse / math.log(2), truth.lse)


def test_metadata(device):
    """What FlashMLA's callers make and keep."""
    lens = ints([3, 70], device)
    metadata, nothing = get_mla_metadata(lens, 16, 1)
    assert isinstance(metadata, FlashMLASchedMeta) and nothing is None and metadata.config is None
    parts, splits = get_mla_decoding_metadata(lens, 16, 1, use_legacy=True)
    assert parts.shape[1] == 8 and splits.tolist() == [0, 1, 2]
    assert FlashMLASchedMeta(tile_scheduler_metadata=parts, num_splits=splits).num_splits is splits


def test_refusals(device):
    """By name, and before anything is launched."""
    x = Rows.of((3, 4), 8, 4, 512, "bytes", device, 2)
    q = torch.zeros(2, 1, 16, 512, dtype=BF16, device=device)
    call = q, x.cache, None, None, 512, None, None, SCALE, False, True
    where = ints([[0], [1]], device), ints([1, 1], device)
    with pytest.raises(quire.UnsupportedError, match=r"k_cache: expected no rows of 584 bytes \(V4\) beside"):
        flash_mla_with_kvcache(q, x.cache, *where, 512, None, None, SCALE, False, True)
    spread = x.cache[:, ::2]
    with pytest.raises(quire.ValidationError, match="k_cache: expected pages without gaps in them"):
        flash_mla_with_kvcache(q, spread, *call[2:], x.indices.unsqueeze(1))
    with pytest.raises(quire.ValidationError, match="kv_format: expected V4"):
        flash_mla_with_kvcache(*call, x.indices.unsqueeze(1), kv_format="V32")
    two = torch.zeros(3, 64, 3, 576, dtype=BF16, device=device)
    with pytest.raises(quire.ValidationError, match="k_cache: expected a divisor of the 16 heads"):
        flash_mla_with_kvcache(q.new_zeros(2, 1, 16, 576), two, *where, 512)
    with pytest.raises(quire.UnsupportedError, match="attn_sink: expected None with 2 heads of keys"):
        flash_mla_with_kvcache(
            q.new_zeros(2, 1, 16, 576), two[:, :, :2], *where, 512, attn_sink=torch.zeros(16, device=device)
        )
