"""Sizes, strides and numbers whose products do not fit 32 bits: right, or refused by the name of the argument.

Tensors of many gigabytes are views of little memory, or memory that is hardly touched.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import quire
from problems import ints, workspace
from quire.calls import check_page_numbers, indices_of
from quire.compat.flash_mla import flash_mla_sparse_fwd
from quire.engine.batch import BlockMatrix
from quire.engine.schedule import Indices, measure_schedule, schedule_input
from quire.kernels import TileShape
from quire.kernels.features import MaskMode

MOST = 2**31 - 1


def untouched(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Virtual memory: what is not read or written takes none."""
    return torch.empty(shape, dtype=dtype)


def repeated(length: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """[length, *shape] in the memory of one row."""
    return torch.zeros(1, *shape, dtype=dtype).expand(length, *shape)


def tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """batch_indices, positions, kv_indices and kv_indptr of one token that goes to page 3."""
    return ints([0], "cpu"), ints([0], "cpu"), ints([3], "cpu"), ints([0, 1], "cpu")


def test_append_to_more_pages_than_have_numbers():
    """Page numbers have 32 bits, numbers of pages may have more."""
    cache = untouched(2**31 + 8, 1, 1, 1), untouched(2**31 + 8, 1, 1, 1)
    key = torch.full((1, 1, 1), 7, dtype=torch.uint8)
    quire.append_paged_kv_cache(key, key + 1, *tables()[:2], cache, *tables()[2:], ints([1], "cpu"))
    assert [int(t[3]) for t in cache] == [7, 8]


def test_rotate_and_append_to_more_pages_than_have_numbers():
    cache = [untouched(2**31 + 8, 1, 1, 2, dtype=torch.float8_e4m3fn) for _ in range(2)]
    q, k, v = torch.full((3, 1, 1, 2), 2.0, dtype=torch.float16)
    quire.rope_append_paged_kv_cache(q, k, v, *tables()[:2], tuple(cache), *tables()[2:])
    assert [t[3].flatten().tolist() for t in cache] == [[2.0, 2.0]] * 2


@pytest.mark.slow
def test_a_token_of_too_many_numbers():
    """num_heads times head_dim are counted in 32 bits."""
    heads, message = 2**30, "expected fewer than 2.31 numbers of a token"
    token, cache = untouched(1, heads, 2), (untouched(1, 1, heads, 2), untouched(1, 1, heads, 2))
    with pytest.raises(quire.ValidationError, match=f"paged_kv_cache: {message}"):
        quire.append_paged_kv_cache(token, token, *tables()[:2], cache, *tables()[2:], ints([1], "cpu"))
    state, lse = untouched(1, heads, 2, dtype=torch.float16), repeated(1, heads, dtype=torch.float32)
    with pytest.raises(quire.ValidationError, match=f"v_a: {message}"):
        quire.merge_state(state, lse, state, lse)
    q = repeated(1, 1, 2).expand(1, 2**31 + 4, 2)
    with pytest.raises(quire.ValidationError, match=f"q: {message}"):
        quire.apply_rope_pos_ids(q, q, ints([0], "cpu"))


def test_too_many_states():
    v, s = torch.zeros(1, 1, 1, 8).expand(1, 2**32 + 1, 1, 8), torch.zeros(1, 1, 1).expand(1, 2**32 + 1, 1)
    with pytest.raises(quire.ValidationError, match=r"v: expected fewer than 2.31 states, got 4294967297"):
        quire.merge_states(v, s)


def test_latents_in_too_many_pages():
    cache, kv_c, k_pe = untouched(2**31 + 8, 1, 3), torch.zeros(1, 1).half(), torch.zeros(1, 2).half()
    with pytest.raises(quire.ValidationError, match=r"kv_cache: expected fewer than 2.31 pages"):
        quire.mla.concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([2**31 + 5]), "fp8", torch.ones(1))


@pytest.mark.parametrize("page_size", [2**27, 2**28])
def test_selecting_pages_of_close_to_2_to_the_31_tokens(page_size):
    """The last page is found without a sum beyond 32 bits, on the host and in the kernel."""
    count = 2**31 // page_size
    bounds = torch.arange(count).view(-1, 1, 1, 1).expand(-1, 1, 2, 16).half().contiguous()
    q, table = torch.ones(1, 1, 16).half(), torch.arange(count, dtype=torch.int32)[None]
    selected = quire.select_pages(q, bounds, table, ints([MOST], "cpu"), page_size, 3)
    assert selected.block_tables.flatten().tolist() == [count - 3, count - 2, count - 1]
    assert selected.seq_lens.tolist() == [[3 * page_size - 1]]


def test_bounds_of_more_pages_than_have_numbers():
    bounds = untouched(2**31 + 8, 1, 2, 1, dtype=torch.float16)
    bounds[:4, 0, :, 0] = torch.tensor([[5.0], [3.0], [9.0], [0.0]])
    table = ints([[0, 1, 2, 3]], "cpu")
    selected = quire.select_pages(torch.ones(1, 1, 1).half(), bounds, table, ints([4], "cpu"), 1, 2)
    assert selected.block_tables.flatten().tolist() == [2, 3]


def test_heads_at_more_places_than_have_numbers():
    """A page number times the heads from a page to the next."""
    cache = [untouched(5 * 2**31).view(torch.float8_e4m3fn).as_strided((5, 16, 2, 32), (2**31, 64, 4, 1))] * 2
    chosen = quire.attention.selection.SelectedPages(ints([[[4], [4]]], "cpu"), ints([[3, 3]], "cpu"))
    with pytest.raises(quire.ValidationError, match=r"paged_kv_cache: expected fewer than 2.31 places of heads"):
        quire.batch_decode_with_selected_pages(torch.ones(1, 2, 32).half(), tuple(cache), workspace("cpu"), chosen)


def test_sparse_attention_to_more_tokens_than_have_numbers():
    """Indices of tokens have 32 bits: each that is not negative names one here."""
    q, kv = torch.randn(1, 2, 576).bfloat16(), torch.randn(1, 1, 576).bfloat16()
    many, few = kv.expand(2**31 + 8, 1, 576), kv.expand(8, 1, 576)
    o, _, lse = flash_mla_sparse_fwd(q, many, ints([[[5, MOST, -1, 7]]], "cpu"), 0.1)
    for got, want in zip((o, lse), flash_mla_sparse_fwd(q, few, ints([[[5, 3, -1, 7]]], "cpu"), 0.1)[::2], strict=True):
        assert got.any() and torch.equal(got, want)


def test_selecting_tokens_whose_numbers_do_not_fit():
    scores, table = torch.tensor([[1.0, 2.0]]), ints([[2**26]], "cpu")
    with pytest.raises(quire.ValidationError, match=r"block_tables: expected tokens whose numbers fit 32 bits"):
        quire.select_tokens(scores, 2, block_tables=table, page_size=64)
    assert quire.select_tokens(scores, 2, block_tables=table // 4, page_size=64).tolist() == [[2**30, 2**30 + 1]]


@pytest.mark.parametrize("which", ["q", "k"])
def test_one_request_of_too_many_tokens(which):
    long, short = repeated(2**32 + 5, 1, 64), repeated(5, 1, 64)
    q, k = (long, short) if which == "q" else (short, long)
    with pytest.raises(quire.ValidationError, match=rf"{which}: expected fewer than 2.31 tokens, got 4294967301"):
        quire.single_prefill_with_kv_cache(q, k, k)


def test_shared_keys_of_too_many_tokens():
    shared, own = repeated(2**31 + 5, 1, 64), torch.zeros(2, 3, 1, 64).half()
    with pytest.raises(quire.ValidationError, match=r"k: expected fewer than 2.31 tokens"):
        quire.batch_decode_with_shared_prefix_padded_kv_cache(torch.zeros(2, 1, 64).half(), shared, shared, own, own)


def test_blocks_of_close_to_2_to_the_31_queries():
    """Where the last row of blocks would end is cut off before it is an int32."""
    matrix = BlockMatrix.of(ints([0, 0, 1], "cpu"), ints([0], "cpu"), MOST, 16, 2**30, 16)
    assert matrix.lists().qo_indptr.tolist() == [0, 2**30, MOST]


def test_pages_of_a_request_of_close_to_2_to_the_31_tokens():
    table, lens = torch.arange(16, dtype=torch.int32)[None], ints([MOST], "cpu")
    indices = indices_of(table, lens, None, 1, 2**27)
    assert indices.kv_indptr.tolist() == [0, 16] and indices.kv_last_page_len.tolist() == [2**27 - 1]
    check_page_numbers(table, lens, 2**27, 16)
    with pytest.raises(quire.ValidationError, match="block_tables: expected page numbers below 15, got 15"):
        check_page_numbers(table, lens, 2**27, 15)


def test_a_schedule_of_close_to_2_to_the_31_units():
    """The parts of the work are rounded up without a sum beyond 32 bits."""
    indices = Indices(1, None, 14 * 16, ints([0, MOST], "cpu"), None, None, 1)
    template = schedule_input(
        num_kv_heads=1, group_size=1, page_size=1, tile=TileShape(16, 16), mask=MaskMode.NONE, window_left=-1,
        max_ctas=4, fixed_split_size=0,
    )  # fmt: skip
    sizes = measure_schedule(indices, template)
    assert (sizes.work_per_head, sizes.num_ctas, sizes.is_partitioned) == (14 * 2**27, 4, 1)


def test_a_cache_with_large_strides(device):
    """Products of page numbers and strides have 64 bits: three pages of 4 GB each, of which 16 tokens are touched."""
    if device != "cpu":
        pytest.skip("takes 13 GB")
    pages = untouched(3 * 2**32).view(torch.float16).as_strided((3, 16, 1, 64), (2**31, 64, 64, 1))
    cache = pages, pages
    keys = torch.randn(5, 1, 64).half()
    batch_indices, positions = ints([0] * 5, device), ints(range(5), device)
    quire.append_paged_kv_cache(
        keys, keys, batch_indices, positions, cache, ints([2], device), ints([0, 1], device), ints([5], device)
    )
    assert torch.equal(pages[2, :5], keys)
    wrapper, q = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(device)), torch.randn(1, 2, 64).half()
    wrapper.plan(ints([0, 1], device), ints([2], device), ints([5], device), 2, 1, 64, 16, q_data_type=torch.float16)
    p = torch.softmax((q[0].double() @ keys[:, 0].double().T) / math.sqrt(64), 1)
    torch.testing.assert_close(wrapper.run(q, cache)[0].double(), p @ keys[:, 0].double(), atol=2e-3, rtol=2e-3)
