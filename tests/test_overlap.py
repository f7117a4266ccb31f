"""Whether views lie on each other, against the sets of bytes that they are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.tensors import is_same, may_overlap

MEMORY = torch.zeros(4096)


@st.composite
def views(draw: st.DrawFn, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    sizes = tuple(draw(st.lists(st.integers(0 if strides is None else 1, 4), min_size=1, max_size=3)))
    steps = (draw(st.integers(1, 40)) for _ in sizes) if strides is None else strides[: len(sizes)]
    return MEMORY.as_strided(sizes, tuple(steps)[: len(sizes)], draw(st.integers(0, 200)))


def elements(view: torch.Tensor) -> set[int]:
    index = torch.arange(MEMORY.numel()).as_strided(view.shape, view.stride(), view.storage_offset())
    return set(index.flatten().tolist())


@settings(max_examples=300, deadline=None)
@given(a=views(), b=views())
def test_no_overlap_is_missed(a: torch.Tensor, b: torch.Tensor) -> None:
    assert may_overlap(a, b) or not elements(a) & elements(b)


@settings(max_examples=300, deadline=None)
@given(a=views(strides=(64, 8, 1)), b=views(strides=(64, 8, 1)))
def test_views_of_one_tensor_are_told_apart(a: torch.Tensor, b: torch.Tensor) -> None:
    """Rows that go on beyond the next one's beginning apart, both ways: columns of a matrix, heads, halves of heads."""
    if a.dim() == b.dim() == 3:
        assert may_overlap(a, b) == bool(elements(a) & elements(b))


def test_the_same_view() -> None:
    x = torch.zeros(4, 6)
    assert is_same(x, x[:]) and not is_same(x, x[:3]) and not is_same(x, x.view(torch.int32))
    assert may_overlap(x, x) and not may_overlap(x, torch.zeros(4, 6)) and not may_overlap(x[:0], x)
