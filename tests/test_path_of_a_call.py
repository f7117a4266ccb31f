"""The path of a repeated call is short: functions of Quire that run, files that they are in, moves between files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import quire
from problems import ints
from quire.compat import flash_mla

SOURCES = str(Path(quire.__file__).parent)
BF16 = torch.bfloat16
BATCH, PAGE = 4, 16


class Path_(NamedTuple):
    """Of a call: functions that run, files that they are in, and moves from one file to another."""

    calls: int
    files: int
    moves: int


def path_of(call: Callable[[], Any]) -> Path_:
    """The path of a call that has been made before."""
    for _ in range(4):
        call()
    files: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        is_own = frame.f_code.co_filename.startswith(SOURCES) and frame.f_code.co_name != "__del__"
        if event == "call" and is_own:
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Path_(len(files), len(set(files)), sum(a != b for a, b in pairwise(files)))


def xqa() -> Callable[[], Any]:
    q, cache = torch.randn(BATCH, 1, 2, 64).to(BF16), torch.randn(2, 8, PAGE, 2, 64).to(BF16)
    table, lens = torch.arange(8, dtype=torch.int32).view(BATCH, 2), ints([20] * BATCH, "cpu")
    return lambda: quire.xqa(q, cache[0], cache[1], table, lens, torch.empty_like(q), None, None, 2, PAGE)


def mla() -> Callable[[], Any]:
    q, cache = torch.randn(BATCH, 1, 1, 576).to(BF16), torch.randn(8, 64, 1, 576).to(BF16)
    table, lens = torch.arange(8, dtype=torch.int32).view(BATCH, 2), ints([3] * BATCH, "cpu")
    metadata, splits = flash_mla.get_mla_metadata()
    return lambda: flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, metadata, splits, 0.07)


def flex() -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 4, 4, device="cpu")
    q, k, v = torch.randn(3, 1, 2, 4, 64).to(BF16)
    return lambda: quire.flex_attention(q, k, v, block_mask=mask)


def flex_of_functions() -> Callable[[], Any]:
    """With a score and a mask that read tensors, on contiguous tensors of several requests."""
    from torch.nn.attention.flex_attention import create_block_mask

    slopes, number = torch.rand(2), ints((0, 0, 1, 1), "cpu")
    mask = create_block_mask(lambda b, h, i, j: number[i] == number[j], None, None, 4, 4, device="cpu")
    q, k, v = torch.randn(3, 2, 2, 4, 64).to(BF16)
    return lambda: quire.flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * j, mask)


def flex_in_graph() -> Callable[[], Any]:
    """The operator that a graph calls for it."""
    from torch.nn.attention.flex_attention import create_block_mask

    text = "t0: float32[1]\nt1: int32[1]\n_mask_ = (t1[q_idx] == t1[kv_idx])\n_score_ = (score + t0[head])\n"
    tensors = [torch.rand(2), ints((0, 0, 1, 1), "cpu")]
    mask = create_block_mask(lambda b, h, i, j: tensors[1][i] == tensors[1][j], None, None, 4, 4, device="cpu")
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    options = (lists, [4, 4, *mask.BLOCK_SIZE], None, False, False, False)
    q, k, v = torch.randn(3, 2, 2, 4, 64).to(BF16)
    return lambda: torch.ops.quire.flex_attention(q, k, v, text, tensors, [], *options)


def plan() -> Callable[[], Any]:
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    arrays = ints((0, 2, 4), "cpu"), ints((0, 1, 2), "cpu"), ints((0, 1), "cpu"), ints((5, 6), "cpu")
    return lambda: wrapper.plan(*arrays, 2, 2, 64, PAGE, causal=True, q_data_type=BF16)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (xqa, Path_(30, 10, 15)),
        (mla, Path_(30, 10, 15)),
        (flex, Path_(35, 11, 15)),
        (flex_of_functions, Path_(42, 11, 15)),
        (flex_in_graph, Path_(18, 10, 12)),
        (plan, Path_(40, 10, 18)),
    ],
)
def test_paths_are_short(make, most):
    path = path_of(make())
    assert all(got <= limit for got, limit in zip(path, most, strict=True)), path
