"""The append of latents by slots: rotation, quantisation and append in one launch, beside its definition in torch."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import Tensor

import oracle
import quire
from latents import BYTES, packed, packed_v4
from quire.attention.mla import concat_and_cache_mla, concat_and_cache_mla_rope_fused
from quire.cache import latents as cached_latents
from test_rope import table
from test_rope_append import assert_quantised

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = {"auto": None, "fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
NNZ, PAGE, NUM_PAGES = 21, 7, 5


class Tokens:
    """Random tokens for random slots, some of none, and a cache whose other bytes must stay 255."""

    def __init__(self, device: str, dtype: torch.dtype, cache_dtype: torch.dtype, width: int, nnz: int = NNZ) -> None:
        source = torch.Generator().manual_seed(nnz)
        magnitudes = torch.logspace(-4, 2, nnz)[:, None]
        draw = torch.randn(nnz, 512, generator=source) * magnitudes, torch.randn(nnz, 64, generator=source)
        self.kv_c, self.k_pe = (x.to(dtype).to(device) for x in draw)
        self.q_pe = torch.randn(nnz, 5, 64, generator=source).to(dtype).to(device)
        self.slots = torch.randperm(NUM_PAGES * PAGE, generator=source)[:nnz]
        self.slots[nnz // 2 :: 6] = -1
        self.slots = self.slots.to(device)
        self.positions = torch.randint(0, 512, (nnz,), generator=source).to(device)
        memory = torch.full((NUM_PAGES, PAGE, width * cache_dtype.itemsize), 255, dtype=torch.uint8, device=device)
        self.cache = memory.view(cache_dtype)
        self.scale = torch.tensor([0.25], device=device)

    def written(self) -> tuple[Tensor, Tensor]:
        """What the slots hold, and which tokens have one; all else must be as it was."""
        rows = self.cache.flatten(0, 1)
        has_slot = self.slots >= 0
        slots = self.slots[has_slot]
        rest = rows.view(torch.uint8).clone()
        rest[slots] = 255
        assert (rest == 255).all()
        return rows[slots], has_slot

    def turned(self, x: Tensor, is_neox: bool, dtype: torch.dtype) -> Tensor:
        """Rotated by the definition, each operation rounded to `dtype`."""
        angles = oracle.rope_angles(self.positions.cpu(), 64, 1.0, 1e4)
        return oracle.rotate(x.cpu(), angles.cos(), angles.sin(), not is_neox, dtype)


@pytest.mark.parametrize("view", ["contiguous", "apart"])
def test_rows_of_656_bytes(device, view):
    """Numbers, scales and the rest are those of the definition, to the last bit."""
    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES)
    if view == "apart":
        t.kv_c = torch.cat((t.kv_c, t.kv_c), dim=1)[:, :512]
        wide = torch.full((NUM_PAGES, 2, PAGE, BYTES), 255, dtype=torch.uint8, device=device)
        t.cache = wide[:, 1]
    t.kv_c[3] = 0
    expected = packed(torch.cat((t.kv_c, t.k_pe), dim=1).cpu())
    concat_and_cache_mla(t.kv_c, t.k_pe, t.cache, t.slots, "fp8_ds_mla", t.scale)
    rows, has_slot = t.written()
    assert torch.equal(rows.cpu(), expected[has_slot.cpu()])


@pytest.mark.parametrize("is_neox", [False, True])
def test_rows_of_656_bytes_of_rotated_keys(device, is_neox):
    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES)
    exact, own = (
        [t.turned(x, is_neox, kind) for x in (t.q_pe, t.k_pe.unsqueeze(1))] for kind in (torch.float64, torch.bfloat16)
    )
    angles = table(512, 64, device)
    concat_and_cache_mla_rope_fused(
        t.positions, t.q_pe, t.k_pe, t.kv_c, angles, is_neox, t.slots, t.cache, "fp8_ds_mla", t.scale
    )
    for got, truth, rounded in zip((t.q_pe, t.k_pe.unsqueeze(1)), exact, own, strict=True):
        oracle.assert_close(got, truth, rounded)
    rows, has_slot = t.written()
    assert torch.equal(rows, packed(torch.cat((t.kv_c, t.k_pe), dim=1).cpu()).to(device)[has_slot])


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("page_size", [1, 7])
def test_rows_of_584_bytes(device, page_size, rotates):
    """DeepSeek V4's, in pages with gaps; scales lie behind the rows of a page. Powers of two stay what they are."""
    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES)
    t.kv_c = t.kv_c[:, :448].contiguous()
    t.kv_c[3] = 0
    t.kv_c[4] = t.kv_c[4].sign() * 448
    num_pages, width = NUM_PAGES * PAGE // page_size, -(-page_size * 584 // 576) * 576 + 576
    memory = torch.full((num_pages, width), 255, dtype=torch.uint8, device=device)
    cache = memory[:, : page_size * 584].unflatten(1, (page_size, 584))
    angles = table(512, 64, device)
    if rotates:
        concat_and_cache_mla_rope_fused(
            t.positions, t.q_pe, t.k_pe, t.kv_c, angles, True, t.slots, cache, "fp8_ds_mla", t.scale
        )
    else:
        concat_and_cache_mla(t.kv_c, t.k_pe, cache, t.slots, "fp8_ds_mla", t.scale)
    expected, want = torch.full_like(memory, 255).cpu(), packed_v4(torch.cat((t.kv_c, t.k_pe), dim=1).cpu())
    for row, slot in zip(want, t.slots.tolist(), strict=True):
        if slot >= 0:
            page, at = divmod(slot, page_size)
            expected[page, at * 576 : (at + 1) * 576] = row[:576]
            expected[page, page_size * 576 + at * 8 : page_size * 576 + (at + 1) * 8] = row[576:]
    assert torch.equal(memory.cpu(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotates", [False, True])
def test_one_type_for_all(device, dtype, kind, rotates):
    cache_dtype = KINDS[kind] or dtype
    t = Tokens(device, dtype, cache_dtype, 576)
    cache = t.cache.view(torch.uint8) if kind == "fp8" else t.cache
    if rotates:
        truth = t.turned(t.k_pe.unsqueeze(1), True, torch.float64).squeeze(1)
        angles = table(512, 64, device)
        concat_and_cache_mla_rope_fused(
            t.positions.int(), t.q_pe, t.k_pe, t.kv_c, angles, True, t.slots, cache, kind, t.scale
        )
    else:
        truth = t.k_pe.cpu().double()
        concat_and_cache_mla(t.kv_c, t.k_pe, cache, t.slots, kind, t.scale)
    rows, has_slot = t.written()
    exact = torch.cat((t.kv_c.cpu().double(), truth), dim=1)[has_slot.cpu()]
    if kind == "auto":
        stays = torch.cat((t.kv_c, t.k_pe), dim=1)[has_slot]
        assert torch.equal(rows, stays)
    else:
        assert_quantised(rows, exact / 0.25)


def test_fewer_slots_than_tokens_and_none(device):
    """An engine pads tokens for CUDA graphs."""
    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES)
    t.slots = t.slots[:5]
    concat_and_cache_mla(t.kv_c, t.k_pe, t.cache, t.slots, "fp8_ds_mla", t.scale)
    rows, has_slot = t.written()
    assert torch.equal(rows.cpu(), packed(torch.cat((t.kv_c, t.k_pe), 1)[:5].cpu())[has_slot.cpu()])
    concat_and_cache_mla(t.kv_c[:0], t.k_pe[:0], t.cache, t.slots[:0], "fp8_ds_mla", t.scale)
    t.written()


def test_slots_of_far_pages(device):
    """Pages beyond 2^20, at more than 2^31 bytes."""
    num_pages = (1 << 20) + 7000
    if device != "cpu" and torch.cuda.mem_get_info()[0] < 3 * num_pages * 4 * BYTES // 2:
        pytest.skip("the GPU's memory")
    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES, nnz=3)
    t.slots = torch.tensor([4 * num_pages - 1, 2, 4 * num_pages - 4096], device=device)
    cache = torch.empty(num_pages, 4, BYTES, dtype=torch.uint8, device=device)
    concat_and_cache_mla(t.kv_c, t.k_pe, cache, t.slots, "fp8_ds_mla", t.scale)
    rows = cache.view(-1, BYTES)[t.slots].cpu()
    assert torch.equal(rows, packed(torch.cat((t.kv_c, t.k_pe), 1).cpu()))


def test_attention_reads_what_is_appended(device):
    """Tokens go to slots, and FlashMLA's function attends to them."""
    from quire.compat.flash_mla import flash_mla_with_kvcache

    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES)
    t.slots = torch.arange(NNZ, device=device)
    concat_and_cache_mla(t.kv_c, t.k_pe, t.cache, t.slots, "fp8_ds_mla", t.scale)
    query = torch.randn(1, 1, 16, 576, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    where = {"block_table": torch.arange(3, device=device).int()[None], "cache_seqlens": t.slots[-1:].int() + 1}
    call = {**where, "head_dim_v": 512, "softmax_scale": 1e-5}
    out, _ = flash_mla_with_kvcache(query, t.cache.unsqueeze(2), **call, is_fp8_kvcache=True)
    plain = torch.zeros(NUM_PAGES, PAGE, 576, dtype=torch.bfloat16, device=device)
    concat_and_cache_mla(t.kv_c, t.k_pe, plain, t.slots, "auto", t.scale)
    exact, _ = flash_mla_with_kvcache(query, plain.unsqueeze(2), **call)
    assert (out.float() - exact.float()).abs().max() <= 2**-4 * exact.float().abs().max()


def test_wrong_arguments(device):
    t = Tokens(device, torch.bfloat16, torch.uint8, BYTES)
    call = {
        "kv_c": t.kv_c, "k_pe": t.k_pe, "kv_cache": t.cache, "slot_mapping": t.slots, "kv_cache_dtype": "fp8_ds_mla",
        "scale": t.scale,
    }  # fmt: skip
    cases = [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: expected"),
        ({"kv_cache_dtype": "auto"}, "kv_cache: expected"),
        ({"kv_c": t.kv_c.half(), "k_pe": t.k_pe.half()}, "kv_cache: expected rows of 656 bytes"),
        ({"slot_mapping": t.slots.int()}, "slot_mapping: expected int64"),
        ({"scale": t.scale.double()}, "scale: expected one float32"),
        ({"k_pe": t.k_pe[:3]}, "k_pe: expected"),
        ({"kv_cache": t.cache[..., :576], "kv_cache_dtype": "auto"}, "kv_cache: expected contiguous rows"),
    ]
    if device == "cpu":
        cases.append(({"slot_mapping": t.slots + NUM_PAGES * PAGE}, "slot_mapping: expected rows"))
    for changes, message in cases:
        with pytest.raises(quire.ValidationError, match=message):
            concat_and_cache_mla(**call | changes)
    fused = (t.positions, t.q_pe, t.k_pe, t.kv_c, table(512, 64, device), True, t.slots, t.cache, "fp8_ds_mla", t.scale)
    for at, wrong, message in (
        (5, 1, "is_neox: expected a bool"), (1, t.q_pe[:4], "q_pe: expected"), (1, None, "q_pe"),
        (4, table(512, 32, device), "cos_sin_cache: expected"), (6, t.slots[:4], "q_pe: expected"),
        (4, table(512, 64, device).half(), "cos_sin_cache: expected dtype"),
    ):  # fmt: skip
        with pytest.raises(quire.ValidationError, match=message):
            concat_and_cache_mla_rope_fused(*fused[:at], wrong, *fused[at + 1 :])
    t.written()


def test_examples():
    assert doctest.testmod(cached_latents, extraglobs={"torch": torch, "quire": quire}).failed == 0
