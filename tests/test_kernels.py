"""Which kernel takes a problem, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import quire
from quire.kernels import AttentionProblem, decide
from quire.types import MaskMode, dtype_of

_BF16, _E4M3 = dtype_of(torch.bfloat16, "q"), dtype_of(torch.float8_e4m3fn, "kv")
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
        ({"rows": 64, "mask": MaskMode.DRAFT}, "fa2"),
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
    with pytest.raises(quire.ValidationError, match="fixed_split_size=32 is not a multiple of its kv tile, 64"):
        decide(replace(lower, rows=64), "decode")
