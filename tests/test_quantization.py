"""Bits into bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from problems import ints


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1000, 100_003])
def test_packbits(device, n, bitorder):
    x = torch.rand(n) < 0.5
    got = quire.packbits(x.to(device), bitorder)
    assert got.dtype == torch.uint8 and got.device == torch.device(device)
    assert torch.equal(got.cpu(), oracle.packbits(x, bitorder))


def test_packbits_is_big_endian_unless_said(device):
    x = torch.tensor([True] + [False] * 8 + [True], device=device)
    assert quire.packbits(x).tolist() == [0x80, 0x40]
    assert quire.packbits(x, "little").tolist() == [0x01, 0x02]


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("lens", [(1,), (8, 8), (3, 0, 17, 8, 1), (0,), (500, 7, 2000)], ids=str)
def test_segment_packbits(device, lens, bitorder):
    x = torch.rand(sum(lens)) < 0.5
    indptr = oracle.indptr_of(lens)
    packed, offsets = quire.segment_packbits(x.to(device), ints(indptr, device), bitorder)
    want, want_offsets = oracle.segment_packbits(x, indptr, bitorder)
    assert packed.dtype == torch.uint8 and packed.device == torch.device(device)
    assert torch.equal(packed.cpu(), want)
    assert offsets.tolist() == want_offsets


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(segments=st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=6))
def test_any_segments(device, segments):
    x = torch.tensor([b for s in segments for b in s], dtype=torch.bool)
    indptr = oracle.indptr_of([len(s) for s in segments])
    packed, offsets = quire.segment_packbits(x.to(device), ints(indptr, device), "little")
    want, want_offsets = oracle.segment_packbits(x, indptr, "little")
    assert torch.equal(packed.cpu(), want)
    assert offsets.tolist() == want_offsets
