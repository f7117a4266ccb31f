"""Writers of caches of 4 bits: every byte is that of the oracle, which rounds in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import oracle
import quire
from problems import ints

NUM_PAGES, HEADS = 11, 2


class Tokens(NamedTuple):
    """New keys and values [nnz, num_kv_heads, head_dim], and the empty cache that they go to."""

    key: Tensor
    value: Tensor
    kv: tuple[Tensor, Tensor]
    sf: tuple[Tensor, Tensor]

    def expect(self, slots, kv_layout, page_size, k_scale, v_scale):
        """Each byte of the cache is the oracle's, or untouched."""
        for which, (rows, scale) in enumerate(((self.key, k_scale), (self.value, v_scale))):
            data, sf = oracle.nvfp4_quantised(rows, scale)
            for got, new in ((self.kv[which], data), (self.sf[which].view(torch.uint8), sf.view(torch.uint8))):
                want = torch.full((NUM_PAGES * page_size, HEADS, new.shape[-1]), 0x5A, dtype=torch.uint8)
                there = torch.tensor([0 <= slot < want.shape[0] for slot in slots], dtype=torch.bool)
                want[torch.tensor(slots, dtype=torch.long)[there]] = new[: len(slots)][there]
                got = got.transpose(1, 2) if kv_layout == "HND" else got
                assert torch.equal(got.cpu().reshape(want.shape), want)


def tokens(dtype, device, nnz=23, head_dim=64, kv_layout="NHD", page_size=16, form="dense"):
    """Numbers of all sizes, zeros, and blocks that are too small for a scale. form: "strided" has rows of both in one
    tensor, and the numbers of the cache in one allocation with their scales.
    """
    source = torch.Generator().manual_seed(0)
    both = torch.randn(nnz, 2, HEADS, head_dim, generator=source) * torch.exp2(
        torch.randint(-6, 7, (nnz, 2, HEADS, 1), generator=source).float()
    )
    both[0, 0, 0, :16] = 0.0
    both[-1, 1, 1, :16] = 6e-8
    both[-1, 0, 0, 0] = 3e4
    both = both.to(dtype).to(device)
    key, value = both.unbind(1) if form == "strided" else (both[:, 0].contiguous(), both[:, 1].contiguous())
    page = (page_size, HEADS) if kv_layout == "NHD" else (HEADS, page_size)
    sizes = [page_size * HEADS * head_dim // n for n in (2, 16)]
    if form == "strided":
        flat = torch.full((NUM_PAGES, 2, sum(sizes)), 0x5A, dtype=torch.uint8, device=device)
        parts = [flat[:, i].split(sizes, 1) for i in (0, 1)]
        kv, sf = ([part[i].unflatten(1, (*page, -1)) for part in parts] for i in (0, 1))
    else:
        kv, sf = (
            [torch.full((NUM_PAGES, *page, head_dim // n), 0x5A, dtype=torch.uint8, device=device) for _ in range(2)]
            for n in (2, 16)
        )
    return Tokens(key, value, tuple(kv), tuple(t.view(torch.float8_e4m3fn) for t in sf))


@pytest.mark.parametrize("form", ["dense", "strided"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("page_size", [1, 16])
def test_positions_in_requests(device, dtype, form, kv_layout, head_dim, page_size):
    t = tokens(dtype, device, 23, head_dim, kv_layout, page_size, form)
    if page_size == 1:
        tables = list(range(NUM_PAGES)), [0, 7, NUM_PAGES], [1, 1]
        places = [(0, i) for i in range(7)] + [(1, 3), (1, 0), (-1, 0), (0, 9)] + [(-1, 0)] * 12
        slots = [b * 7 + p if b >= 0 and p < 7 else -1 for b, p in places]
    else:
        tables = [4, 0, 2, 9], [0, 3, 4], [5, 16]
        places = [(0, 20 + i) for i in range(12)] + [(1, i) for i in range(9)] + [(-1, 3), (1, 16)]
        slots = [
            [4, 0, 2][p // 16] * 16 + p % 16 if b == 0 else 9 * 16 + p if b == 1 and p < 16 else -1 for b, p in places
        ]
    requests, positions = zip(*places, strict=True)
    indices, indptr, last = (ints(x, device) for x in tables)
    quire.nvfp4_quantize_append_paged_kv_cache(
        t.key, t.value, ints(requests, device), ints(positions, device), t.kv, t.sf, indices, indptr, last, 1.0, 0.25,
        kv_layout,
    )  # fmt: skip
    t.expect(slots, kv_layout, page_size, 1.0, 0.25)


@pytest.mark.parametrize("form", ["dense", "strided"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slots(device, dtype, form, kv_layout, index_dtype):
    """More rows than slots, slots that are none, and global scales on the device."""
    t = tokens(dtype, device, 30, 128, kv_layout, 16, form)
    slots = torch.randperm(NUM_PAGES * 16, generator=torch.Generator().manual_seed(0))[:25].tolist()
    slots[3], slots[11] = -1, NUM_PAGES * 16
    scales = [torch.tensor([scale], device=device) for scale in (0.5, 0.037)]
    quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        t.key, t.value, torch.tensor(slots, dtype=index_dtype, device=device), t.kv, t.sf, *scales, kv_layout
    )
    t.expect(slots, kv_layout, 16, *(float(scale) for scale in scales))


def test_both_devices_write_the_same_bits(device, dtype):
    """One tensor of keys and values, and a global scale that is no power of two; on a GPU the CPU's bytes."""
    t = tokens(dtype, "cpu", 100, 128)
    slots = torch.randperm(NUM_PAGES * 16, generator=torch.Generator().manual_seed(1))[:100]
    caches = []
    for where in ("cpu", device):
        kv = torch.zeros(NUM_PAGES, 2, 16, HEADS, 64, dtype=torch.uint8, device=where)
        sf = torch.zeros(NUM_PAGES, 2, 16, HEADS, 8, dtype=torch.uint8, device=where).view(torch.float8_e4m3fn)
        quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            t.key.to(where), t.value.to(where), slots.to(where), kv, sf, 0.0371, 1.7e-3
        )
        caches.append((kv.cpu(), sf.cpu().view(torch.uint8)))
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))
    data, sf = oracle.nvfp4_quantised(t.key, 0.0371)
    assert torch.equal(caches[0][0][:, 0].reshape(-1, HEADS, 64)[slots], data)
    assert torch.equal(caches[0][1][:, 0].reshape(-1, HEADS, 8)[slots], sf.view(torch.uint8))


def test_ties_go_to_even_codes(device, dtype):
    """Halfway between neighbours: 0.25, 0.75, ... of the scale, of either sign."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    key = torch.cat((ties, -ties)).repeat(4)[None, None].to(dtype).to(device)
    kv = torch.zeros(1, 2, 1, 1, 32, dtype=torch.uint8, device=device)
    sf = torch.zeros(1, 2, 1, 1, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        key, key, torch.tensor([0], device=device), kv, sf, 1, 1
    )
    codes = torch.stack((kv[0, 0, 0, 0] & 15, kv[0, 0, 0, 0] >> 4), -1).flatten()[:16].tolist()
    assert codes == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]
    assert sf.float().unique().tolist() == [1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(device, dtype, bad):
    """NaN is seen in all numbers of its scale; infinity is the largest number."""
    key = torch.full((1, 1, 64), 1.5, dtype=dtype, device=device)
    key[0, 0, 5] = bad
    kv = torch.zeros(1, 2, 1, 1, 32, dtype=torch.uint8, device=device)
    sf = torch.zeros(1, 2, 1, 1, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        key, key, torch.tensor([0], device=device), kv, sf, 1, 1
    )
    found = oracle.nvfp4_numbers(kv, sf)[0, 0, 0, 0]
    assert found[:16].isnan().all() if bad != bad else float(found[5]) == 2688.0 * (1 if bad > 0 else -1)
    assert torch.equal(found[16:], torch.full((48,), 1.5, dtype=torch.float64))


WRONG = {
    "tokens": ({"append_key": torch.zeros(3, 2, 64, dtype=torch.int8)}, "append_key: expected dtype torch.float16"),
    "values": ({"append_value": torch.zeros(3, 2, 64)}, "append_value: expected dtype torch.bfloat16"),
    "dims": ({"append_key": torch.zeros(3, 2, 32).bfloat16()}, r"append_key: expected .*head_dim=64"),
    "rows": ({"append_key": torch.zeros(2, 2, 64).bfloat16()}, "append_key: expected a row for each of 3 places"),
    "slots": ({"slot_mapping": torch.zeros(3)}, "slot_mapping: expected int32 or int64"),
    "slots dims": ({"slot_mapping": torch.zeros(3, 1).int()}, "slot_mapping: expected int32 or int64"),
    "cache": ({"paged_kv_cache": torch.zeros(4, 2, 16, 2, 32)}, "paged_kv_cache: expected dtype torch.uint8"),
    "scales": ({"kv_cache_sf": torch.zeros(4, 2, 16, 2, 8).to(torch.float8_e4m3fn)}, r"kv_cache_sf: expected \[4, 16"),
    "scales type": ({"kv_cache_sf": torch.zeros(4, 2, 16, 2, 4)}, "kv_cache_sf: expected dtype torch.float8_e4m3fn"),
    "k_scale": ({"k_scale": 0.0}, "k_scale: expected a positive number"),
    "v_scale": ({"v_scale": float("nan")}, "v_scale: expected a positive number"),
    "layout": ({"kv_layout": "DNH"}, "kv_layout: expected 'NHD' or 'HND'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    change, words = WRONG[case]
    kv = torch.full((4, 2, 16, 2, 32), 0x5A, dtype=torch.uint8)
    given = {
        "append_key": torch.zeros(3, 2, 64).bfloat16(), "append_value": torch.zeros(3, 2, 64).bfloat16(),
        "slot_mapping": torch.arange(3), "paged_kv_cache": kv,
        "kv_cache_sf": torch.zeros(4, 2, 16, 2, 4).to(torch.float8_e4m3fn), "k_scale": 1.0, "v_scale": 1.0, **change,
    }  # fmt: skip
    with pytest.raises(quire.ValidationError, match=words):
        quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(**given)
    assert bool((kv == 0x5A).all())


def test_pages_beyond_the_cache():
    """Page numbers on the host are checked before anything is written."""
    t = tokens(torch.bfloat16, "cpu", 1)
    tables = torch.tensor([NUM_PAGES]).int(), torch.tensor([0, 1]).int(), torch.tensor([1]).int()
    with pytest.raises(quire.ValidationError, match="kv_indices: expected page numbers below num_pages"):
        quire.page.nvfp4_quantize_append_paged_kv_cache(
            t.key, t.value, torch.tensor([0]).int(), torch.tensor([0]).int(), t.kv, t.sf, *tables, 1.0, 1.0
        )
    t.expect([], "NHD", 16, 1.0, 1.0)


def test_compiled_calls_write(device):
    """torch.compile records the operator, which writes into the tensors of the caller."""
    t = tokens(torch.bfloat16, device, 20)
    slots = torch.arange(20, device=device)
    append = quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    torch.compile(lambda key, value: append(key, value, slots, t.kv, t.sf, 1.0, 1.0), backend="eager")(t.key, t.value)
    t.expect(list(range(20)), "NHD", 16, 1.0, 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_captured_with_scales_on_the_device():
    """A CUDA graph reads slots and global scales when it is replayed."""
    device = "cuda:0"
    t = tokens(torch.bfloat16, device, 20)
    slots, scale = torch.full((20,), -1, device=device), torch.ones(1, device=device)
    append = quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    append(t.key, t.value, slots, t.kv, t.sf, scale, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(t.key, t.value, slots, t.kv, t.sf, scale, scale)
    slots.copy_(torch.arange(20, device=device))
    scale.fill_(0.5)
    graph.replay()
    t.expect(list(range(20)), "NHD", 16, 0.5, 0.5)
