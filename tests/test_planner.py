"""How a launch is shaped for a batch, on a pretended GPU."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from quire import planner
from quire.kernels import AttentionProblem, decide
from quire.schedule import Indices
from quire.terms import Scoring, Terms, Types
from quire.types import MaskMode, dtype_of


class Sm90Module:
    """An attention_decode of which an SM of 132 holds two CTAs."""

    facts: ClassVar[dict[str, int]] = {"kMinCtas": 2, "kSmemBytes": 80_000, "kThreads": 128}


@pytest.mark.parametrize(
    ("batch_size", "kv_len", "num_qo_heads", "split", "merged"),
    [
        (16, 1024, 32, 0, 2),
        (1, 131072, 64, 0, 2),
        (1, 2048, 32, 0, 1),  # short
        (17, 1024, 32, 0, 1),  # 136 tiles on 132 SMs
        (64, 4096, 32, 0, 1),
        (16, 1024, 32, -1, 1),  # cut as in any other batch
        (4, 8192, 512, 0, 1),  # 64 rows a tile
    ],
)
def test_one_cta_of_two(monkeypatch, batch_size, kv_len, num_qo_heads, split, merged):
    monkeypatch.setattr(planner, "_load", lambda spec, device: (Sm90Module, 264))
    bf16, group_size = dtype_of("bfloat16", "q"), num_qo_heads // 8
    problem = AttentionProblem(
        "sm90a", bf16, bf16, bf16, 128, 128, 16, MaskMode.NONE, False, False, group_size, fixed_split_size=split
    )
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * (kv_len // 16)
    indices = Indices(batch_size, None, 1, indptr, torch.full((batch_size,), 16, dtype=torch.int32), None, 16)
    terms = Terms(num_qo_heads, 8, 128, 128, Types(bf16, bf16, bf16), Scoring(0.1, -1, 0.0), False, 16, split)
    decision = decide(problem, "decode")
    _, recipe = planner._recipe_for(decision, indices, terms, torch.device("cuda", 0), None)
    tile = decision.kernel.tile(decision.key)
    assert (recipe.merged, recipe.ctas, recipe.tile.kv) == (merged, 264 // merged, merged * tile.kv)
