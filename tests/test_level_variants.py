"""Variants of one's own over parts of the keys: they mean the places of whole requests."""

from __future__ import annotations

import pytest
import torch

import quire
from problems import workspace
from quire import variants
from quire.kernels.level_variant import has_places, variant_of_level
from test_cascade import joined, shared_prefix
from test_variants import CASES, any_dtype

#: Of the head alone, of distances, of requests, and masks.
NAMES = ("soft_cap", "alibi", "relative_bias", "noise", "sink_score", "document_mask", "tree_mask")
SCORES = ("soft_cap", "alibi", "noise")


def levels(device, qo_lens=(3, 1, 4, 6), last=(7, 5, 9, 6)):
    """One system prompt, two documents, four requests."""
    groups = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)]
    p, tables, cache = joined([(25,), (13, 20), last], groups, qo_lens, any_dtype(device), device, causal=True)
    return p, [list(c) for c in zip(*tables, strict=True)], cache


def cascade(device, backend, variant, num_levels=3):
    return quire.MultiLevelCascadeAttentionWrapper(num_levels, workspace(device), backend=backend, variant=variant)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_variants_over_levels(name, device, backend):
    case, (p, columns, cache) = CASES[name], levels(device)
    of_plan, of_run = case.on(device)
    wrapper = cascade(device, backend, case.variant)
    for _ in range(2):
        wrapper.plan(*columns, 4, 2, p.head_dim, 8, causal=True, q_data_type=p.dtype, **of_plan)
        p.check(wrapper.run(p.q, cache.kv, **of_run), **case.expected())
    assert "a variant of one's own" in wrapper.explain()


def test_levels_without_queries_and_keys(device, backend):
    """A request without queries, and one whose own level has no keys."""
    case, (p, columns, cache) = CASES["alibi"], levels(device, (3, 0, 4, 6), (7, 5, 0, 6))
    wrapper = cascade(device, backend, case.variant)
    wrapper.plan(*columns, 4, 2, p.head_dim, 8, causal=False, q_data_type=p.dtype)
    p.causal = False
    p.check(wrapper.run(p.q, cache.kv, **case.on(device)[1]), **case.expected())


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_decode_with_shared_prefix(name, device, backend):
    case = CASES[name]
    p, (_, *tables), cache, k, v = shared_prefix((1, 1, 1), any_dtype(device), device, "HND", False)
    wrapper = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), "HND", backend=backend, variant=case.variant
    )
    wrapper.begin_forward(*tables, 4, 2, p.head_dim, 8, data_type=p.dtype)
    p.check(wrapper.forward(p.q, k, v, cache.kv, **case.on(device)[1]), **case.expected())


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_prefill_with_shared_prefix(name, device, backend):
    case = CASES[name]
    p, tables, cache, k, v = shared_prefix((4, 1, 7), any_dtype(device), device, "NHD", True)
    wrapper = quire.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
        workspace(device), backend=backend, variant=case.variant
    )
    wrapper.begin_forward(*tables, 4, 2, p.head_dim, q_data_type=p.dtype)
    p.check(wrapper.forward(p.q, k, v, cache.kv, causal=True, **case.on(device)[1]), **case.expected())


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
    with pytest.raises(quire.UnsupportedError, match="cannot have a mask, which is planned before"):
        quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"), variant=variants.document_mask)
    with pytest.raises(quire.UnsupportedError, match="a captured graph holds the tables"):
        quire.MultiLevelCascadeAttentionWrapper(1, workspace("cpu"), use_cuda_graph=True, variant=variants.alibi)
    with pytest.raises(TypeError, match="cap"):
        cascade("cpu", "auto", None).plan([None] * 3, [None] * 3, [None] * 3, [None] * 3, 4, 2, 64, 8, cap=1.0)
    taken = quire.Variant(
        lambda score, q_idx, rows_of_level: score + rows_of_level[q_idx], tensors={"rows_of_level": torch.float32}
    )
    with pytest.raises(quire.ValidationError, match="cannot be named 'rows_of_level'"):
        cascade("cpu", "auto", taken)


def test_variants_of_the_head_alone_stay_as_they_are():
    assert not has_places(variants.soft_cap) and variant_of_level(variants.soft_cap) is variants.soft_cap
    assert has_places(variants.alibi) and variant_of_level(variants.alibi) != variants.alibi
    text = str(variant_of_level(variants.alibi))
    assert quire.Variant.parse(text) == variant_of_level(variants.alibi)
