"""Which kernel takes a problem, without a device."""

from __future__ import annotations

from itertools import product

import pytest

from quire.errors import UnsupportedError, ValidationError
from quire.kernels import AttentionProblem, decide, same_rows
from quire.types import MaskMode, dtype_of

ROWS = [*range(1, 300), *(bound + i for bound in (512, 1024, 2048, 4096, 100_000) for i in (-1, 0, 1))]


def answer(problem: AttentionProblem) -> str:
    """The variant, or why there is none."""
    try:
        return decide.__wrapped__(problem).key.slug
    except (UnsupportedError, ValidationError) as error:
        return type(error).__name__


@pytest.mark.parametrize("target", ["sm90a", "sm80", "x86-64-v4"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_plans_are_looked_up_by_rows_that_kernels_tell_apart(target, dims):
    """A bound that same_rows() does not know would give a batch the kernel of its neighbour."""
    bf16 = dtype_of("bfloat16", "dtype")
    masks, splits = (MaskMode.NONE, MaskMode.CAUSAL, MaskMode.CUSTOM, MaskMode.DRAFT), (0, -1)
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
