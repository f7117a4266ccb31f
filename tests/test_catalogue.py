"""Which kernel takes a problem, without a device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from quire.errors import UnsupportedError, ValidationError
from quire.kernels import AttentionProblem, decide, same_rows
from quire.types import MaskMode, dtype_of

ROWS = [*range(1, 300), *(bound + i for bound in (512, 1024, 2048, 4096, 100_000) for i in (-1, 0, 1))]


def answer(problem: AttentionProblem) -> str:
    """The variant, or why there is none."""
    try:
        return decide(problem).key.slug
    except (UnsupportedError, ValidationError) as error:
        return type(error).__name__


@pytest.mark.parametrize("target", ["sm90a", "sm80", "x86-64-v4"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_plans_are_looked_up_by_rows_that_kernels_tell_apart(target, dims):
    """A bound that same_rows() does not know would give a batch the kernel of its neighbour."""
    bf16 = dtype_of("bfloat16", "dtype")
    masks, splits = (MaskMode.NONE, MaskMode.CAUSAL, MaskMode.CUSTOM, MaskMode.TREE), (0, -1)
    seen = set()
    for mask, split, page_size, uniform in product(masks, splits, (0, 1, 16), (True, False)):
        for rows in ROWS:
            problem = (target, bf16, bf16, bf16, *dims, page_size, mask, False, False)
            want = answer(AttentionProblem(*problem, rows, uniform, split))
            assert want == answer(AttentionProblem(*problem, same_rows(rows), uniform, split)), rows
            seen.add(want)
    assert len(seen) > 4, "rows make no difference here"


def test_few_problems():
    assert same_rows(0) == 0 and len({same_rows(rows) for rows in range(100_000)}) < 25


_BF16, _E4M3 = dtype_of("bfloat16", "q"), dtype_of("float8_e4m3fn", "kv")
_DECODE = AttentionProblem("sm90a", _BF16, _BF16, _BF16, 128, 128, 16, MaskMode.NONE, False, False, rows=8)


def chosen(backend: str = "auto", **changes: object) -> str:
    return decide(replace(_DECODE, **changes), backend).kernel.backend


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "decode"),
        ({"rows": 32}, "decode"),
        ({"rows": 64}, "fa3"),  # decode could, but yields
        ({"rows": 64, "target": "sm80"}, "fa2"),
        ({"rows": 64, "head_dim_qk": 64, "head_dim_vo": 64}, "decode"),
        ({"rows": 64, "kv": _E4M3}, "decode"),  # nobody else takes it
        ({"rows": 64, "mask": MaskMode.TREE}, "fa2"),
        ({"rows": 65}, "fa3"),
        ({"rows": 8, "fixed_split_size": -1}, "decode"),
        ({"rows": 8, "fixed_split_size": -1, "uniform": False}, "fa3"),
    ],
    ids=str,
)
def test_auto(changes, expected):
    assert chosen(**changes) == expected


def test_a_kernel_that_yields_can_be_asked_for():
    decision = decide(replace(_DECODE, rows=64), "decode")
    assert decision.kernel.backend == "decode" and decision.key.tile_rows == 64


def test_a_fixed_split_is_a_multiple_of_the_tile_that_runs():
    """Tiles of 64 rows of 256-wide heads are 64 keys long, lower ones 32."""
    wide = {"head_dim_qk": 256, "head_dim_vo": 256, "fixed_split_size": 32}
    lower = replace(_DECODE, rows=8, **wide)
    assert decide(lower, "decode").kernel.tile(decide(lower, "decode").key).kv == 32
    with pytest.raises(
        ValidationError, match="got 32:\n  attention_decode its kv tile has 64 keys: pass fixed_split_size=64"
    ):
        decide(replace(lower, rows=64), "decode")


@pytest.mark.parametrize(
    ("target", "tiles"), [("sm90a", [(16, 64), (32, 64), (64, 64)]), ("sm89", [(16, 32), (32, 32)])]
)
def test_decode_tiles_of_wide_heads_fit_shared_memory(target, tiles):
    """Rows of o, four bytes a number, take the place of 8-bit keys when a work tile ends: on sm89 two stages of 64 keys
    did not compile."""
    wide = replace(_DECODE, target=target, kv=_E4M3, head_dim_qk=256, head_dim_vo=256)
    assert list(decide(wide, "decode").kernel.tiles(wide)) == tiles


@pytest.mark.parametrize(("page_size", "most"), [(0, 0), (16, 0), (1, 1 << 36), (12, 1 << 36)])
def test_what_fa3_finds_by_32_bits(page_size, most):
    """Boxes are found by the copy engine; rows that are gathered, and results, by their number of 16 bytes."""
    decision = decide(replace(_DECODE, page_size=page_size), "fa3")
    assert decision.kernel.max_bytes(decision.key, "k") == decision.kernel.max_bytes(decision.key, "v") == most
    assert decision.kernel.max_bytes(decision.key, "o") == 1 << 36
