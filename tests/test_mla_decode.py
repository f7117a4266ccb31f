"""attention_mla_decode: what it takes, its boxes, and results of KV tiles that alternate between two softmaxes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from latents import Latents
from quire.kernels import decide
from quire.kernels.attention_mla_decode import KERNEL
from quire.kernels.operands import View
from quire.types import MaskMode
from test_mla import attend, parts, planned
from test_mla_fa3 import BF16, E4M3, FP16, problem

CUDA_BACKENDS = {"auto": (8, 0)}


@pytest.mark.parametrize("number", [BF16, FP16])
@pytest.mark.parametrize("mask", [MaskMode.NONE, MaskMode.CAUSAL])
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 16), (16, 16), (17, 32), (32, 32)])
@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_few_rows_get_it(page_size, rows, tile_rows, mask, number):
    decision = decide(problem(page_size, rows=rows, mask=mask, q=number, kv=number, o=number))
    assert decision.kernel is KERNEL
    assert decision.key.tile_rows == tile_rows


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 48}, "48 rows (qo_len * heads) are more than 32"),
        ({"page_size": 32}, "page_size=32: expected a multiple of 64"),
        ({"target": "sm80"}, "target sm80 is not sm90a"),
        ({"kv": E4M3}, "kv dtype e4m3 differs from q dtype bf16"),
        ({"fixed_split_size": -1, "uniform": False}, "rows differ between requests"),
    ],
)
def test_what_it_leaves_to_others(changes, reason):
    few = replace(problem(rows=16), **changes)
    assert reason in str(KERNEL.refusal(few))
    assert decide(few).kernel is not KERNEL


def test_boxes_are_atoms():
    key, size, strides = KERNEL.key(problem(128, rows=16)), (9, 128, 1, 512), (576 * 128, 576, 576, 1)
    views = {"ckv_cache": View(0, size, strides), "kpe_cache": View(0, (*size[:3], 64), strides)}
    kpe, ckv = KERNEL.copies(key, KERNEL.tile(key), views)
    assert (kpe.field, kpe.dims, kpe.box) == ("tensor_k", (64, 128, 1, 9), (64, 64, 1, 1))
    assert (ckv.field, ckv.dims, ckv.box) == ("tensor_v", (64, 128, 8, 9), (64, 64, 1, 1))


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
