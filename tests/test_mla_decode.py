"""attention_mla_decode: what it takes, its boxes, and results of KV tiles that alternate between two softmaxes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import oracle
from latents import Latents, packed, unpacked
from quire.kernels import decide
from quire.kernels.features import ANY_PAGE_SIZE, MaskMode, View, dtype_of
from quire.kernels.hopper import MLA_DECODE
from test_mla import attend, parts, planned
from test_mla_fa3 import BF16, E4M3, FP16, problem
from test_packed_latents import Rows
from test_packed_latents import attend as attend_to_rows

CUDA_BACKENDS = {"auto": (8, 0)}
E5M2 = dtype_of("e5m2", "dtype")


@pytest.mark.parametrize("number", [BF16, FP16])
@pytest.mark.parametrize("mask", [MaskMode.NONE, MaskMode.CAUSAL])
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 16), (16, 16), (17, 32), (32, 32)])
@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_few_rows_get_it(page_size, rows, tile_rows, mask, number):
    decision = decide(problem(page_size, rows=rows, mask=mask, q=number, kv=number, o=number))
    assert decision.kernel is MLA_DECODE
    assert decision.key.tile_rows == tile_rows


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize("changes", [{"kv": E4M3}, {"kv": E5M2}, {"kv": E4M3, "tile_scales": True}])
def test_latents_of_8_bits_get_it_in_pages_of_any_size(changes, page_size):
    decision = decide(problem(page_size, rows=16, **changes))
    assert decision.kernel is MLA_DECODE
    assert decision.key.page_size == (64 if page_size == 64 else ANY_PAGE_SIZE)
    assert page_size == 64 or MLA_DECODE.copies(decision.key, MLA_DECODE.tile(decision.key), {}) == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 48}, "48 rows (qo_len * heads) are more than 32"),
        ({"page_size": 32}, "page_size=32: expected a multiple of 64"),
        ({"target": "sm80"}, "target sm80 is not sm90a"),
        ({"fixed_split_size": -1, "uniform": False}, "rows differ between requests"),
    ],
)
def test_what_it_leaves_to_others(changes, reason):
    few = replace(problem(rows=16), **changes)
    assert reason in str(MLA_DECODE.refusal(few))
    assert decide(few).kernel is not MLA_DECODE


def test_boxes_are_atoms():
    key, size, strides = MLA_DECODE.key(problem(128, rows=16)), (9, 128, 1, 512), (576 * 128, 576, 576, 1)
    views = {"ckv_cache": View(0, size, strides), "kpe_cache": View(0, (*size[:3], 64), strides)}
    kpe, ckv = MLA_DECODE.copies(key, MLA_DECODE.tile(key), views)
    assert (kpe.field, kpe.dims, kpe.box) == ("tensor_k", (64, 128, 1, 9), (64, 64, 1, 1))
    assert (ckv.field, ckv.dims, ckv.box) == ("tensor_v", (64, 128, 8, 9), (64, 64, 1, 1))


@pytest.mark.parametrize("tile_scales", [False, True])
def test_atoms_of_8_bits_are_128_columns(tile_scales):
    """kpe of 8 bits has 64 of them, and one of 16 bits, beside scales, has 64 columns of as many bytes."""
    key, size = MLA_DECODE.key(problem(64, rows=16, kv=E4M3, tile_scales=tile_scales)), (9, 64, 1, 512)
    ckv, kpe = View(0, size, (64 * 656, 656, 656, 1)), View(0, (*size[:3], 64), (64 * 328, 328, 328, 1))
    copies = MLA_DECODE.copies(key, MLA_DECODE.tile(key), {"ckv_cache": ckv, "kpe_cache": kpe})
    assert [copy.dims for copy in copies] == [(64, 64, 1, 9), (128, 64, 4, 9)]
    assert [copy.box for copy in copies] == [(64 if tile_scales else 128, 64, 1, 1), (128, 64, 1, 1)]


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize(("q_len", "num_heads"), [(1, 16), (1, 3), (1, 32), (2, 16), (2, 8), (5, 3)])
def test_lengths_of_all_kinds(device, backend, dtype, q_len, num_heads, page_size):
    """No keys, less than one KV tile, an odd and an even number of them, and requests that several CTAs divide."""
    p = Latents((q_len,) * 8, (0, 1, 64, 65, 128, 192, 700, 2100), num_heads, dtype, device, causal=q_len > 1)
    for form in ("joined", "split", "sliced"):
        p.check(*attend(p, p.paged(page_size, form), backend))


@pytest.mark.parametrize("causal", [False, True])
def test_fewer_queries_than_the_row_tile_holds(device, backend, dtype, causal):
    p = Latents((4, 0, 1, 2, 3), (300, 5, 700, 63, 2), 8, dtype, device, causal, sinks=torch.randn(8))
    p.check(*attend(p, p.paged(64), backend))


def test_maxima_that_rise_late(device, backend, dtype):
    """Keys grow from tile to tile, so that the two softmaxes have different maxima and raise them again and again."""
    p = Latents((1, 1), (1000, 129), 16, dtype, device)
    for begin, length in ((0, 1000), (1000, 129)):
        p.keys[begin : begin + length] *= torch.linspace(0.01, 4, length, device=device)[:, None].to(p.keys.dtype)
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.parametrize("num_heads", [16, 32])
def test_the_same_bits_each_time(device, backend, dtype, num_heads):
    p = Latents((1,) * 9, [(211 * i) % 1001 for i in range(9)], num_heads, dtype, device)
    pages = p.paged(64)
    wrapper = planned(p, pages, backend)
    first = wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True)
    for _ in range(5):
        again = wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    p.check(*first)


@pytest.mark.each_value
@pytest.mark.parametrize(("q_len", "num_heads"), [(1, 16), (1, 3), (1, 32), (2, 16), (5, 3)])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.slow
def test_latents_of_8_bits(device, backend, dtype, kv_dtype, q_len, num_heads):
    p = Latents(
        (q_len,) * 7, (0, 1, 64, 65, 192, 700, 2100), num_heads, dtype, device, q_len > 1, kv_dtype=kv_dtype, scale=2.0
    )
    for form, page_size in (("joined", 64), ("split", 64), ("sliced", 64), ("sliced", 24), ("joined", 1)):
        p.check(*attend(p, p.paged(page_size, form), backend, ckv_scale=p.scale, kpe_scale=p.scale))


def test_queries_and_weights_use_the_range_of_their_numbers(device, backend):
    """Columns of queries far above the others, rows far below, and a key beside which others weigh little."""
    p = Latents((1, 1), (20000, 77), 16, torch.bfloat16, device, kv_dtype=torch.float8_e4m3fn)
    p.keys[1234] = (p.query[0, 0].float() * 0.8).to(p.keys.dtype)
    p.query[0, 1:] *= 0.25
    p.query[1, :, 5] *= 300
    p.query[1, 3], p.query[1, 4] = 0, p.query[1, 4] * 1e-30
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.parametrize(("q_len", "num_heads"), [(1, 16), (1, 3), (1, 32), (2, 16)])
@pytest.mark.parametrize("page_size", [1, 24, 64, 128])
def test_rows_of_656_bytes(device, backend, q_len, num_heads, page_size):
    """Scales are powers of two: products with them need no rounding. Those of neighbouring tokens differ by 2^30."""
    p = Rows((q_len,) * 6, (0, 1, 65, 192, 700, 2100), num_heads, torch.bfloat16, device, q_len > 1)
    scales = torch.tensor([1.0, 0.5, -1.0, 2.0**-20]).repeat(p.keys.shape[0], 1)
    scales[::2, 3], scales[1::3, 1] = 2.0**-50, 2.0**-8
    p.rows = packed(p.keys.float(), torch.full_like(scales, 0.03).to(device))  # no key is beyond 448 of them
    p.rows[:, 512:528] = (scales / 64).contiguous().view(torch.uint8).to(device)
    p.keys = unpacked(p.rows)
    p.check(*attend_to_rows(p, *p.pages_of(page_size, gap=page_size % 3), backend))


def test_scales_of_many_bits(device, backend):
    """Products with them are not rounded, or, as by other kernels, once to bfloat16, which `own` does too."""
    p = Rows((1, 1), (1500, 70), 16, torch.bfloat16, device)
    p.rows = packed(p.keys.float())
    p.keys = unpacked(p.rows)
    out, _ = attend_to_rows(p, *p.pages_of(64), backend)
    own = p.expected(torch.bfloat16).o.double()
    numbers, scales = p.rows[:, :512].contiguous(), p.rows[:, 512:528].contiguous().view(torch.float32)
    tiles = numbers.view(torch.float8_e4m3fn).float().view(-1, 4, 128) * scales[..., None]
    p.keys = torch.cat((tiles.flatten(1).double(), p.keys[:, 512:]), dim=1)
    oracle.assert_close(out, p.expected().o, own, p.qo_indptr)
