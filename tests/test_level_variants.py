"""Custom variants over parts of the keys: they mean the places of whole requests, or of a whole matrix."""

from __future__ import annotations

import pytest
import torch

import oracle
import quire
from problems import Problem, any_dtype, ints, workspace
from quire.attention import variants
from quire.kernels.expressions.rewrite import reads_indices, variant_of_blocks, variant_of_level
from test_cascade import joined, shared_prefix
from test_chunked_prefill import split
from test_sparse import bsr, dense, listed, sizes
from test_variants import CASES, joint

# On the CPU, calls over levels and over lists of blocks have a part of the variants each: all of them rewrite a variant
# in the same way, and test_variants.py has each with a plain call.

#: Of the head alone, of distances, of requests, and masks.
NAMES = ("soft_cap", "alibi", "relative_bias", "noise", "sink_score", "document_mask", "tree_mask")
OF_PREFIXES = ("soft_cap", "alibi", "noise", "prefix_lm", "tree_mask")


def levels(device, qo_lens=(3, 1, 4, 6), last=(7, 5, 9, 6)):
    """One system prompt, two documents, four requests."""
    groups = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)]
    p, tables, cache = joined([(25,), (13, 20), last], groups, qo_lens, any_dtype(device), device, causal=True)
    return p, [list(c) for c in zip(*tables, strict=True)], cache


def cascade(device, backend, variant, num_levels=3):
    return quire.MultiLevelCascadeAttentionWrapper(num_levels, workspace(device), backend=backend, variant=variant)


@pytest.mark.daily(2)
@pytest.mark.part(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_variants_over_levels(name, device, backend):
    case, (p, columns, cache) = CASES[name], levels(device)
    of_plan, of_run = case.on(device)
    wrapper = cascade(device, backend, case.variant)
    for _ in range(2):
        wrapper.plan(*columns, 4, 2, p.head_dim, 8, causal=True, q_data_type=p.dtype, **of_plan)
        p.check(wrapper.run(p.q, cache.kv, **of_run), **case.expected())
    assert "custom variants" in wrapper.explain()


@pytest.mark.slow
def test_levels_without_queries_and_keys(device, backend):
    """A request without queries, and one whose own level has no keys."""
    case, (p, columns, cache) = CASES["alibi"], levels(device, (3, 0, 4, 6), (7, 5, 0, 6))
    wrapper = cascade(device, backend, case.variant)
    wrapper.plan(*columns, 4, 2, p.head_dim, 8, causal=False, q_data_type=p.dtype)
    p.causal = False
    p.check(wrapper.run(p.q, cache.kv, **case.on(device)[1]), **case.expected())


@pytest.mark.daily(2)
@pytest.mark.part(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PREFIXES)
def test_decode_with_shared_prefix(name, device, backend):
    case = CASES[name]
    p, (_, *tables), cache, k, v = shared_prefix((1, 1, 1), any_dtype(device), device, "HND", False)
    wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), "HND", backend=backend, variant=case.variant
    )
    wrapper.begin_forward(*tables, 4, 2, p.head_dim, 8, data_type=p.dtype)
    p.check(wrapper.forward(p.q, k, v, cache.kv, **joint(case, device)), **case.expected())


@pytest.mark.daily(2)
@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PREFIXES)
def test_prefill_with_shared_prefix(name, device, backend):
    case = CASES[name]
    p, tables, cache, k, v = shared_prefix((4, 1, 7), any_dtype(device), device, "NHD", True)
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), backend=backend, variant=case.variant
    )
    wrapper.begin_forward(*tables, 4, 2, p.head_dim, q_data_type=p.dtype)
    p.check(wrapper.forward(p.q, k, v, cache.kv, causal=True, **joint(case, device)), **case.expected())


@pytest.mark.daily(2)
@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prefill_over_a_prefix(name, device, backend):
    case, prefix_lens, kv_lens = CASES[name], (25, 0, 7, 20), (30, 6, 16, 26)
    p = Problem((5, 6, 0, 6), kv_lens, num_qo_heads=4, device=device, dtype=any_dtype(device), causal=True)
    wrapper = quire.BatchPrefillWithPrefixWrapper(workspace(device), backend=backend, variant=case.variant)
    qo, prefix, own = (
        ints(oracle.indptr_of(x), "cpu")
        for x in (p.qo_lens, prefix_lens, [a - b for a, b in zip(kv_lens, prefix_lens, strict=True)])
    )
    of_plan, of_run = case.on(device)
    sinks = torch.randn(4, device=device)
    wrapper.plan(qo, prefix, 4, 2, p.head_dim, kv_indptr=own, q_data_type=p.dtype, **of_plan)
    got = wrapper.run(p.q, *split(p, prefix_lens), return_lse=True, sinks=sinks, **of_run)
    p.check(*got, **case.expected(), sinks=sinks)
    assert "a custom variant is computed for each set of keys" in str(wrapper.explain())
    with pytest.raises(TypeError, match="unexpected"):
        wrapper.run(p.q, *split(p, prefix_lens), **of_run, other=1)


@pytest.mark.daily(2)
@pytest.mark.part(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "document_mask"])
def test_levels_of_a_cuda_graph(name, device, backend):
    """A captured launch reads the tables of the first plan, into which later plans write."""
    case, (p, columns, cache) = CASES[name], levels(device)
    of_plan, of_run = case.on(device)
    sizes = [torch.tensor([len(array) for array in column]) for column in columns]
    buffers = [[torch.zeros(int(n) + 8, dtype=torch.int32, device=device) for n in lens] for lens in sizes]
    for array in (0, 1, 3):
        buffers[array] = [torch.zeros(int(n), dtype=torch.int32, device=device) for n in sizes[array]]
    wrapper = quire.MultiLevelCascadeAttentionWrapper(
        3, workspace(device), "NHD", True, *buffers, backend=backend, variant=case.variant
    )
    plan = {"causal": True, "q_data_type": p.dtype, **of_plan}
    wrapper.plan(*columns, 4, 2, p.head_dim, 8, **plan)
    p.check(wrapper.run(p.q, cache.kv, **of_run), **case.expected())
    first = [{name: table.data_ptr() for name, table in tables.items()} for tables in wrapper._operands.tables]
    again, columns, cache = levels(device, (3, 1, 4, 2), (7, 5, 9, 2))
    wrapper.plan(*columns, 4, 2, p.head_dim, 8, **plan)
    again.check(wrapper.run(again.q, cache.kv, **of_run), **case.expected())
    assert [{name: table.data_ptr() for name, table in tables.items()} for tables in wrapper._operands.tables] == first
    with pytest.raises(quire.ValidationError, match="expected at most 14 rows in a level, as in the first plan"):
        wrapper.plan(*levels(device, (3, 1, 4, 9), (7, 5, 9, 9))[1], 4, 2, p.head_dim, 8, **plan)
    again.check(wrapper.run(again.q, cache.kv, **of_run), **case.expected())


@pytest.mark.slow
def test_operands_are_checked_against_whole_requests():
    """What a level would read inside its tables, a request may not have."""
    p, columns, cache = levels("cpu")
    read = quire.Variant(
        lambda score, kv_idx, request, bias: score + bias[request, kv_idx], tensors={"bias": "float32"}
    )
    wrapper = cascade("cpu", "auto", read)
    wrapper.plan(*columns, 4, 2, p.head_dim, 8, causal=True, q_data_type=p.dtype)
    with pytest.raises(quire.ValidationError, match="bias: expected at least 54 elements in dimension 1"):
        wrapper.run(p.q, cache.kv, bias=torch.zeros(4, 53))
    with pytest.raises(quire.ValidationError, match="bias: expected at least 4 elements in dimension 0"):
        wrapper.run(p.q, cache.kv, bias=torch.zeros(3, 54))
    with pytest.raises(quire.ValidationError, match="bias: expected as a keyword"):
        wrapper.run(p.q, cache.kv)
    with pytest.raises(TypeError, match="slopes"):
        wrapper.run(p.q, cache.kv, bias=torch.zeros(4, 54), slopes=torch.zeros(4))
    bias = torch.randn(4, 54)
    got = wrapper.run(p.q, cache.kv, bias=bias)
    p.check(got, score=lambda s, at: s + bias.double()[at.request, at.kv_idx])


def test_where_levels_take_no_variant():
    with pytest.raises(TypeError, match="cap"):
        cascade("cpu", "auto", None).plan([None] * 3, [None] * 3, [None] * 3, [None] * 3, 4, 2, 64, 8, cap=1.0)
    taken = quire.Variant(
        lambda score, q_idx, rows_of_level: score + rows_of_level[q_idx], tensors={"rows_of_level": torch.float32}
    )
    with pytest.raises(quire.ValidationError, match="cannot be named 'rows_of_level'"):
        cascade("cpu", "auto", taken)


def test_variants_of_the_head_alone_stay_as_they_are():
    assert not reads_indices(variants.soft_cap) and variant_of_level(variants.soft_cap) is variants.soft_cap
    assert reads_indices(variants.alibi) and variant_of_level(variants.alibi) != variants.alibi
    text = str(variant_of_level(variants.alibi))
    assert quire.Variant.parse(text) == variant_of_level(variants.alibi)


# --- lists of blocks -------------------------------------------------------------------------------------------------

#: Of the head alone, of distances, hashes of the place, and masks.
OF_BLOCKS = ("soft_cap", "noise", "alibi", "relative_bias", "document_mask", "strided_window")
ROWS, KEYS = 37, 60


def matrix(device: str, **options: object) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """A problem; which blocks of 16 x 8 are listed, their last row cut off; and what is seen of them."""
    p = Problem((ROWS,), (KEYS,), num_qo_heads=4, device=device, dtype=any_dtype(device), **options)
    shown = listed(3, 8, 0.6)[0]
    return p, shown, dense(shown, sizes(ROWS, 16), sizes(KEYS, 8)).flatten()


@pytest.mark.daily(2)
@pytest.mark.part(1, 2)
@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("name", OF_BLOCKS)
@pytest.mark.parametrize("order", [None, 3])
def test_variants_of_blocks(name, order, device, backend):
    """In any order of the blocks of a row, with pages of a half of a block: 60 keys are no multiple of 8."""
    case, (p, shown, mask) = CASES[name], matrix(device)
    of_plan, of_run = case.on(device)
    wrapper = quire.BlockSparseAttentionWrapper(workspace(device), backend, variant=case.variant)
    wrapper.plan(*bsr(shown, order), ROWS, KEYS, 16, 8, 4, 2, p.head_dim, q_data_type=p.dtype, **of_plan)
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True, **of_run), mask=mask, **case.expected())
    p.check(wrapper.forward(p.q, p.k, p.v, **of_run), mask=mask, **case.expected())


@pytest.mark.daily(2)
@pytest.mark.part(1, 2)
@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_variants_of_blocks_of_any_size(name, rows, kv_heads, device, backend):
    """Heads with lists of their own, each a request of the kernel; rows of 128 are one for each query head."""
    if rows == 128 and backend == "quire:decode":
        pytest.skip("decode takes at most 64 rows a request")
    case, (p, shown, _) = CASES[name], matrix(device, num_kv_heads=kv_heads)
    if rows == 128:
        p = Problem((256,), (KEYS,), num_qo_heads=4, num_kv_heads=kv_heads, device=device, dtype=any_dtype(device))
        if name in ("alibi", "relative_bias", "document_mask"):
            pytest.skip("more queries than keys: tables of places have none for the first queries")
    heights = torch.tensor([128, 128]) if rows == 128 else torch.tensor([5, 16, 16])
    shown, widths = shown[: len(heights), :4], torch.tensor([4, 16, 8, 32])
    of_plan, of_run = case.on(device)
    wrapper = quire.VariableBlockSparseAttentionWrapper(workspace(device), backend, variant=case.variant)
    of_heads = (t.expand(kv_heads, *t.shape) for t in (shown, heights, widths))
    wrapper.plan(*of_heads, 4, kv_heads, p.head_dim, q_data_type=p.dtype, **of_plan)
    q, k, v = (t.transpose(0, 1).contiguous() for t in (p.q, p.k, p.v))
    o, lse = wrapper.run(q, k, v, return_lse=True, **of_run)
    mask = dense(shown, heights, widths).flatten()
    p.check(o.transpose(0, 1), lse.transpose(0, 1), mask=mask, **case.expected())


def test_the_causal_mask_of_a_matrix(device, backend):
    """As a variant, where rows list blocks in any order; causal=True is that of each row by itself."""
    causal = quire.Variant(mask=lambda q_idx, kv_idx, qo_len, kv_len: kv_idx <= q_idx + kv_len - qo_len)
    p, shown, mask = matrix(device)
    wrapper = quire.BlockSparseAttentionWrapper(workspace(device), backend, variant=causal)
    wrapper.plan(*bsr(shown, 5), ROWS, KEYS, 16, 8, 4, 2, p.head_dim, q_data_type=p.dtype)
    p.check(*wrapper.run(p.q, p.k, p.v, return_lse=True), mask=mask, sees=lambda at: at.distance <= 0)


@pytest.mark.slow
def test_operands_of_blocks_are_checked_against_the_matrix():
    p, shown, mask = matrix("cpu")
    read = quire.Variant(lambda score, q_idx, kv_idx, bias: score + bias[q_idx, kv_idx], tensors={"bias": "float32"})
    wrapper = quire.BlockSparseAttentionWrapper(workspace("cpu"), variant=read)
    planned = *bsr(shown), ROWS, KEYS, 16, 8, 4, 2, p.head_dim
    wrapper.plan(*planned, q_data_type=p.dtype)
    for size, dim in (((ROWS - 1, KEYS), 0), ((ROWS, KEYS - 1), 1)):
        with pytest.raises(quire.ValidationError, match=f"bias: expected at least .* in dimension {dim}"):
            wrapper.run(p.q, p.k, p.v, bias=torch.zeros(size))
    with pytest.raises(quire.ValidationError, match="bias: expected as a keyword of run"):
        wrapper.run(p.q, p.k, p.v)
    bias = torch.randn(ROWS, KEYS)
    got = wrapper.run(p.q, p.k, p.v, bias=bias)
    p.check(got, mask=mask, score=lambda s, at: s + bias.double()[at.q_idx, at.kv_idx])
    with pytest.raises(quire.ValidationError, match="bias: expected by run"):
        wrapper.plan(*planned, q_data_type=p.dtype, bias=bias)
    p.check(
        wrapper.run(p.q, p.k, p.v, bias=bias), mask=mask, score=lambda s, at: s + bias.double()[at.q_idx, at.kv_idx]
    )
    masked = quire.BlockSparseAttentionWrapper(workspace("cpu"), variant=variants.prefix_lm)
    with pytest.raises(quire.ValidationError, match="mask: expected none beside a variant with a mask"):
        blocks = torch.ones(int(shown.sum()), 16, 8, dtype=torch.bool)
        masked.plan(*planned, blocks, prefix=torch.zeros(1, dtype=torch.int32))
    plain = quire.BlockSparseAttentionWrapper(workspace("cpu"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        plain.plan(*planned, bias=bias)
    plain.plan(*planned, q_data_type=p.dtype)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        plain.run(p.q, p.k, p.v, bias=bias)


@pytest.mark.slow
@pytest.mark.parametrize("variable", [False, True])
def test_blocks_under_torch_compile(variable, device, backend):
    """Tables of places are constants of the graph, the variant's own tensors are inputs."""
    torch._dynamo.reset()
    case, (p, shown, mask) = CASES["alibi"], matrix(device)
    if variable:
        wrapper = quire.VariableBlockSparseAttentionWrapper(workspace(device), backend, variant=case.variant)
        sides = torch.tensor([[16, 16, 5]] * 2), torch.tensor([[8] * 7 + [4]] * 2)
        wrapper.plan(shown.expand(2, -1, -1), *sides, 4, 2, p.head_dim, q_data_type=p.dtype)
    else:
        wrapper = quire.BlockSparseAttentionWrapper(workspace(device), backend, variant=case.variant)
        wrapper.plan(*bsr(shown), ROWS, KEYS, 16, 8, 4, 2, p.head_dim, q_data_type=p.dtype)
    q, k, v = (t.transpose(0, 1).contiguous() if variable else t for t in (p.q, p.k, p.v))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        o = wrapper.run(q, k, v, slopes=slopes * 2)
        return o.transpose(0, 1) if variable else o

    slopes = case.operands["slopes"]
    p.check(layer(q, slopes.to(device) / 2), mask=mask, **case.expected())


def test_variants_that_need_no_tables():
    assert variant_of_blocks(variants.soft_cap, 8, True) is variants.soft_cap
    by_head = quire.Variant(lambda score, head, gain: score * gain[head], tensors={"gain": "float32"})
    assert variant_of_blocks(by_head, 8, False) is by_head and variant_of_blocks(by_head, 8, True) != by_head
    by_request = quire.Variant(lambda score, request, gain: score * gain[request], tensors={"gain": "float32"})
    assert "gain[0]" in str(variant_of_blocks(by_request, 8, True))
