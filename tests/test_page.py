"""Paged caches: appending to them and their index arithmetic."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
import quire
from problems import FORMS, Problem, ints, poisoned


def bits(t):
    """Compares NaN with NaN: the poison must survive where nothing is written."""
    return torch.nan_to_num(t, nan=-123.0)


def halves(kv):
    """The key and the value pages of a cache in either signature."""
    return (kv[:, 0], kv[:, 1]) if isinstance(kv, torch.Tensor) else kv


def append_and_compare(problem, cache, append_lens, *, key=None, value=None):
    """Appends random tokens at the end of each request and compares every element of the cache with the oracle."""
    device = problem.device
    lens = list(problem.kv_lens)
    batch, position = oracle.get_batch_indices_positions(oracle.indptr_of(append_lens), lens)
    batch_indices, positions = ints(batch, device), ints(position, device)
    nnz = sum(append_lens)
    key = torch.randn(nnz, problem.num_kv_heads, problem.head_dim).to(problem.dtype).to(device) if key is None else key
    value = torch.randn(key.shape).to(problem.dtype).to(device) if value is None else value
    want = [
        oracle.append_paged_kv_cache(t, batch_indices, positions, pages, cache.indices, cache.indptr, cache.kv_layout)
        for t, pages in zip((key, value), halves(cache.kv), strict=True)
    ]
    quire.append_paged_kv_cache(
        key,
        value,
        batch_indices,
        positions,
        cache.kv,
        cache.indices,
        cache.indptr,
        cache.last_page_len,
        cache.kv_layout,
    )
    for got, truth in zip(halves(cache.kv), want, strict=True):
        assert torch.equal(bits(got), bits(truth))


@pytest.mark.parametrize("signature", FORMS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_append(device, dtype, page_size, kv_layout, signature):
    p = Problem((1,) * 5, (37, 1, 0, 130, 16), dtype=dtype, device=device)
    append_and_compare(p, p.paged(page_size, kv_layout, signature), (5, 1, 0, 40, 16))


@pytest.mark.parametrize("head_dim", [32, 80, 128, 256])
def test_append_head_dims(device, dtype, head_dim):
    p = Problem((1, 1), (20, 9), head_dim=head_dim, num_qo_heads=3, num_kv_heads=3, dtype=dtype, device=device)
    append_and_compare(p, p.paged(8), (4, 9))


def test_append_of_views(device, dtype):
    """Keys and values straight out of a packed projection."""
    p = Problem((1, 1), (20, 9), dtype=dtype, device=device)
    packed = poisoned((13, 8, 64), dtype, device)
    packed[:, 4:] = torch.randn(13, 4, 64).to(dtype).to(device)
    append_and_compare(p, p.paged(8), (4, 9), key=packed[:, 4:6], value=packed[:, 6:8])


def test_append_skips_negative_requests(device, dtype):
    """Padding rows of a captured graph carry batch index -1."""
    p = Problem((1,), (20,), dtype=dtype, device=device)
    cache = p.paged(8)
    before = [t.clone() for t in cache.kv]
    key = torch.randn(2, 2, 64).to(dtype).to(device)
    nowhere, at = ints([-1, -1], device), ints([3, 0], device)
    quire.append_paged_kv_cache(
        key, key, nowhere, at, cache.kv, cache.indices, cache.indptr, cache.last_page_len, kv_layout="NHD"
    )
    for got, truth in zip(cache.kv, before, strict=True):
        assert torch.equal(bits(got), bits(truth))


@pytest.mark.parametrize(
    ("indices", "indptr", "batch", "position"),
    [
        pytest.param([0, 1], [0, 3], 0, 17, id="kv_indices is shorter than kv_indptr[-1]"),
        pytest.param([0, 1], [0, 2], 0, 16, id="position is beyond the pages of the request"),
        pytest.param([0, 1, 2], [-3, 3], 0, 3, id="kv_indptr is negative"),
        pytest.param([0, 1, 2], [2**31 - 1, -1], 0, 3, id="kv_indptr descends"),
        pytest.param([0, -1, 2], [0, 3], 0, 8, id="page number is negative"),
        pytest.param([0, 4, 2], [0, 3], 0, 8, id="page number is too large"),
        pytest.param([0, 1, 2], [0, 3], 1, 8, id="request does not exist"),
        pytest.param([0, 1, 2], [0, 3], 0, -1, id="position is negative"),
        pytest.param([], [0, 3], 0, 0, id="kv_indices is empty"),
    ],
)
def test_append_stays_inside_the_cache(device, dtype, indices, indptr, batch, position):
    """Index arrays that describe no place in the cache are refused on the host, where they can be looked at; on a
    device the token is skipped. Memory beside the arrays is not read.

    kv_indices is followed in memory by numbers of pages that exist: a kernel that reads on writes one of them.
    """
    pages = [torch.full((4, 8, 2, 64), 7.0, dtype=dtype, device=device) for _ in range(2)]
    key = torch.randn(1, 2, 64).to(dtype).to(device)
    kv_indices = ints([3, *indices, 3, 3, 3], device)[1 : 1 + len(indices)]
    refused = pytest.raises(quire.ValidationError, match=r"kv_ind|batch_indices")
    is_skipped = device != "cpu" or position in (16, -1)  # a position outside of right tables
    with nullcontext() if is_skipped else refused:
        quire.append_paged_kv_cache(
            key, key, ints([batch], device), ints([position], device), tuple(pages), kv_indices, ints(indptr, device),
            ints([8], device),
        )  # fmt: skip
    for page in pages:
        assert (page == 7.0).all()


def test_append_nothing(device, dtype):
    p = Problem((1,), (20,), dtype=dtype, device=device)
    append_and_compare(p, p.paged(8), (0,))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_append(device, dtype, data):
    lens = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=5))
    new = [data.draw(st.integers(0, n)) for n in lens]
    p = Problem((1,) * len(lens), lens, dtype=dtype, device=device)
    append_and_compare(
        p, p.paged(data.draw(st.sampled_from([1, 3, 8])), signature=data.draw(st.sampled_from(FORMS))), new
    )


@pytest.mark.parametrize(
    "append_lens", [(1,), (3, 0, 5, 1), (0, 0), (1,) * 300, (1000, 1, 2000)], ids=lambda n: str(n)[:20]
)
def test_get_batch_indices_positions(device, append_lens):
    indptr = oracle.indptr_of(append_lens)
    lens = [n + 7 * i for i, n in enumerate(append_lens)]
    batch, position = oracle.get_batch_indices_positions(indptr, lens)
    got = quire.get_batch_indices_positions(ints(indptr, device), ints(lens, device), indptr[-1])
    for values, want in zip(got, (batch, position), strict=True):
        assert values.dtype == torch.int32 and values.device == torch.device(device)
        assert values.tolist() == want


def test_get_batch_indices_positions_into_given_tensors(device):
    """Rows behind the last token get request -1: padding, which append_paged_kv_cache() skips."""
    out = [torch.full((6,), 99, dtype=torch.int32, device=device) for _ in range(2)]
    got = quire.get_batch_indices_positions(ints([0, 1, 4], device), ints([5, 3], device), 6, *out)
    assert [t.data_ptr() for t in got] == [t.data_ptr() for t in out]
    assert out[0].tolist() == [0, 1, 1, 1, -1, -1]
    assert out[1].tolist()[:4] == [4, 0, 1, 2]


def test_get_seq_lens(device):
    """A request without pages has no tokens, whatever its last_page_len says."""
    indptr, last = ints([0, 2, 2, 3, 10], device), ints([3, 0, 16, 1], device)
    got = quire.get_seq_lens(indptr, last, 16)
    assert got.dtype == torch.int32 and got.device == torch.device(device)
    assert got.tolist() == [19, 0, 16, 97]
    assert got.tolist() == oracle.get_seq_lens(indptr.cpu(), last.cpu(), 16).tolist()


def test_fewer_tokens_than_are_appended_are_refused_on_the_host():
    """The first of them would have a negative position."""
    with pytest.raises(quire.ValidationError, match="seq_lens: expected at least as many tokens as are appended"):
        quire.get_batch_indices_positions(ints([0, 3], "cpu"), ints([2], "cpu"), 3)
    with pytest.raises(quire.ValidationError, match="append_indptr: expected ascending"):
        quire.get_batch_indices_positions(ints([0, 3, 1], "cpu"), ints([9, 9], "cpu"), 3)
    with pytest.raises(quire.ValidationError, match=r"kv_last_page_len: expected 1\.\.page_size=16"):
        quire.get_seq_lens(ints([0, 1], "cpu"), ints([17], "cpu"), 16)


def test_outputs_are_checked_before_any_is_written():
    right = torch.full((3,), 99, dtype=torch.int32)
    with pytest.raises(quire.ValidationError, match="positions"):
        quire.get_batch_indices_positions(ints([0, 3], "cpu"), ints([5], "cpu"), 3, right, right.long())
    assert right.tolist() == [99, 99, 99]
