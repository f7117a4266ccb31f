"""attention_mla_fa3: what it takes, the boxes that it copies, and merging by all CTAs of a group."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quire
from latents import SCALE, LatentPages, Latents
from quire.compat.flash_mla import flash_mla_sparse_fwd
from quire.kernels import decide
from quire.kernels.attention import AttentionProblem
from quire.kernels.features import ANY_PAGE_SIZE, MaskMode, View, dtype_of
from quire.kernels.hopper import MLA_FA3
from test_mla import attend, parts, planned, sparse, tables

CUDA_BACKENDS = {"fa3": (9, 0)}

BF16, FP16, E4M3, FP32 = (dtype_of(name, "dtype") for name in ("bfloat16", "float16", "float8_e4m3fn", "float32"))


def problem(page_size: int = 64, **changes: object) -> AttentionProblem:
    plain = AttentionProblem(
        "sm90a", BF16, BF16, BF16, 576, 512, page_size, MaskMode.NONE, False, False, rows=128, is_mla=True
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("page_size", [1, 8, 20, 24, 64, 128, 1000])
@pytest.mark.parametrize("rows", [1, 16, 128, 2048])
def test_pages_of_any_size_get_it(page_size, rows):
    backend = "quire:fa3" if rows <= 32 and page_size % 64 == 0 else "auto"
    assert decide(problem(page_size, rows=rows), backend).kernel is MLA_FA3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv": FP16}, "kv dtype fp16 differs from q dtype bf16"),
        ({"o": FP16}, "o dtype fp16 differs"),
        ({"q": FP32, "kv": FP32, "o": FP32}, "is not fp16 or bf16"),
        ({"target": "sm80"}, "target sm80 is not sm90a"),
        ({"target": "sm100a"}, "target sm100a is not sm90a"),
        ({"head_dim_vo": 256}, "expected 512 and 64"),
        ({"mask": MaskMode.CUSTOM}, "no mask but causal"),
    ],
)
def test_what_it_leaves_to_others(changes, reason):
    assert reason in str(MLA_FA3.refusal(problem(**changes)))


@pytest.mark.parametrize(("page_size", "box"), [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 64)])
def test_boxes_of_a_joined_cache(page_size, box):
    key = MLA_FA3.key(problem(page_size))
    size, strides = (9, page_size, 1, 512), (576 * page_size, 576, 576, 1)
    views = {"ckv_cache": View(0, size, strides), "kpe_cache": View(0, (*size[:3], 64), strides)}
    kpe, ckv = MLA_FA3.copies(key, MLA_FA3.tile(key), views)
    assert (kpe.field, ckv.field) == ("tensor_k", "tensor_v")
    assert ckv.dims == (64, page_size, 8, 9)
    assert kpe.dims == (64, page_size, 1, 9)
    assert ckv.strides == kpe.strides == (576, 64, 576 * page_size)
    assert kpe.box == (64, box, 1, 1)
    assert ckv.box == (64, box, 2 if box == 64 else 1, 1)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("tile_scales", [False, True])
def test_latents_of_eight_bits_get_it(page_size, tile_scales):
    decision = decide(problem(page_size, kv=E4M3, tile_scales=tile_scales))
    assert (decision.kernel, decision.key.page_size) == (MLA_FA3, ANY_PAGE_SIZE)


def test_few_rows_of_latents_with_scales_are_left_to_fa2():
    few = problem(rows=16, kv=E4M3, tile_scales=True, fixed_split_size=-1, uniform=False)  # else decode has them
    assert decide(few).kernel.backend == "fa2"
    assert decide(few, "quire:fa3").kernel is MLA_FA3
    assert decide(replace(few, tile_scales=False)).kernel is MLA_FA3


@pytest.mark.parametrize(("page_size", "kv"), [(1, BF16), (8, BF16), (1000, BF16), (64, E4M3)])
def test_tokens_of_other_pages_are_gathered(page_size, kv):
    key = MLA_FA3.key(problem(page_size, kv=kv))
    assert key == MLA_FA3.key(problem(1, kv=kv))
    assert MLA_FA3.copies(key, MLA_FA3.tile(key), {}) == ()


@pytest.mark.one_type
@pytest.mark.parametrize("page_size", [1, 16, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_small_pages(device, backend, dtype, num_heads, page_size):
    """Gathered tokens, and boxes of 16. Row tiles whole and in parts, lengths that end within and at a KV tile, and
    requests without keys.
    """
    p = Latents((1, 2, 1, 3, 1, 2), (2001, 64, 0, 129, 640, 2), num_heads, dtype, device, causal=True)
    for form in ("joined", "split", "sliced"):
        p.check(*attend(p, p.paged(page_size, form), backend))


@pytest.mark.parametrize("num_heads", [8, 64, 128])
def test_selected_tokens_of_several_tiles(device, backend, dtype, num_heads):
    """Indices that name no token lie between the others and fill whole KV tiles; in one row they come first."""
    p = Latents((1,) * 6, (700, 130, 0, 64, 1001, 0), num_heads, dtype, device)
    cache, indices, lens = sparse(p, 1090, 64, 64)
    indices[3] = indices[3].sort().values
    call = {**tables(p, p.paged(16)), "sparse_mla_top_k": 1090, "return_lse": True, "kv_cache": cache}
    more = {"block_tables": indices.view(6, 1, 1090), "seq_lens": lens, "backend": backend}
    o, lse = quire.mla.trtllm_batch_decode_with_kv_cache_mla(p.query.unsqueeze(1), **call | more)
    p.check(o.squeeze(1), lse)


def test_a_cache_of_more_than_64_gib(device):
    """Tokens beyond 2^36 bytes, named by indices and as pages; where 32 bits of 16 bytes would look, there is NaN."""
    num_tokens = 62_000_000
    if device == "cpu" or torch.cuda.mem_get_info()[0] < num_tokens * 1152 + (2 << 30):
        pytest.skip("less than 72 GB of memory of a GPU")
    p = Latents((1,), (70,), 128, torch.bfloat16, device)
    cache = torch.empty(num_tokens, 1, 576, dtype=torch.bfloat16, device=device)
    cache[: num_tokens - (1 << 36) // 1152 + 1] = math.nan
    cache[-70:, 0] = p.keys
    tokens = torch.arange(num_tokens - 70, num_tokens, dtype=torch.int32, device=device)
    out, _, lse = flash_mla_sparse_fwd(p.query, cache, tokens.view(1, 1, 70), SCALE)
    p.check(out, lse / math.log(2))
    p.check(*attend(p, LatentPages(cache[..., :512], cache[..., 512:], [0, 70], tokens.tolist(), 1), "quire:fa3"))


@pytest.mark.parametrize(
    ("rows", "tile_rows"), [(1, 64), (16, 64), (64, 64), (96, 64), (128, 128), (192, 64), (256, 128)]
)
def test_two_ctas_compute_whole_128_rows(rows, tile_rows):
    decision = decide(problem(rows=rows), "quire:fa3")
    assert (decision.key.tile_rows, decision.ctas_per_tile) == (tile_rows, tile_rows // 64)


@pytest.mark.one_type
@pytest.mark.parametrize("num_heads", [3, 16, 128])
def test_one_request_for_all_ctas(device, backend, dtype, num_heads):
    p = Latents((1,), (9001,), num_heads, dtype, device)
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.one_type
def test_more_row_tiles_than_ctas(device, backend, dtype):
    p = Latents((1,) * 150, [(37 * i) % 200 for i in range(150)], 128 if device != "cpu" else 8, dtype, device)
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_requests_that_fill_part_of_a_tile(device, backend, dtype, num_heads):
    """Tiles of 128 rows, of which some requests have fewer: one of the two CTAs may have no rows."""
    p = Latents((4, 3, 1, 4, 8), (300, 1, 700, 63, 65), num_heads, dtype, device, causal=True)
    p.check(*attend(p, p.paged(64), backend))


@pytest.mark.parametrize("num_heads", [16, 128])
def test_groups_are_merged_the_same_way_each_time(device, backend, dtype, num_heads):
    """Whichever CTAs take part, and however often: the counters of merge groups are 0 again."""
    p = Latents((1, 2, 1), (3000, 40, 700), num_heads, dtype, device)
    pages = p.paged(64)
    wrapper = planned(p, pages, backend)
    first = wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True)
    for _ in range(20):
        again = wrapper.run(*parts(p), pages.ckv, pages.kpe, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    p.check(*first)


@pytest.mark.parametrize(("program", "row"), [("mla.py", "b4-kv1024"), ("sparse_mla.py", "b2-q1")])
@pytest.mark.slow
def test_the_benchmark_checks_results(program, row):
    path = Path(__file__).parents[1] / "benchmarks"
    command = [sys.executable, program, "--rows", row, "--device", "cpu", "--rounds", "0"]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quire      error" in done.stdout
