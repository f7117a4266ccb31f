"""The table of arguments is complete, names tests that there are, and is the one in docs/surface.md."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

import quire
import surface
from calls import plan_paged, plan_ragged, prefill
from problems import Problem, workspace

FUNCTIONS = list(surface.functions())
HOW = {"used", "checked", "refused"}


@cache
def names_in(file: str) -> set[str]:
    """The functions of a file of tests."""
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.path)
def test_every_argument_is_in_the_table_once(function):
    counts = Counter(row.argument for row in function.rows)
    assert set(counts) == function.parameters and set(function.shown) <= set(counts)
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.path)
def test_what_is_said_of_arguments_is_shown_by_tests(function):
    for row in function.rows:
        file, _, name = row.test.partition("::")
        assert row.how in HOW and name in names_in(file), row


def test_the_document_is_up_to_date():
    assert surface.DOCUMENT.read_text(encoding="utf-8") == surface.document(), "run python tests/surface.py"


# What no other test shows of these arguments


KINDS = ("paged", "ragged")


def problem(dtype=torch.float32, device="cpu"):
    return Problem((3, 20), (9, 300), dtype=dtype, device=device, causal=True)


@pytest.mark.parametrize("name", ["use_fp16_qk_reduction", "allow_fp16_qk_reduction", "non_blocking"])
@pytest.mark.parametrize("kind", KINDS)
def test_permissions_of_plan(device, dtype, kind, name):
    p = problem(dtype, device)
    got = [prefill(p, kind, plan={name: value})[0] for value in (False, True)]
    assert torch.equal(*got)
    p.check(got[0])
    with pytest.raises(quire.ValidationError, match=f"{name}: expected a bool"):
        prefill(p, kind, plan={name: 1})


@pytest.mark.parametrize("name", ["use_fp16_qk_reduction", "allow_fp16_qk_reduction"])
def test_permissions_of_single_prefill(device, dtype, name):
    p = Problem((5,), (40,), dtype=dtype, device=device)
    p.check(quire.single_prefill_with_kv_cache(p.q, p.k, p.v, **{name: True}))
    with pytest.raises(quire.ValidationError, match=f"{name}: expected a bool"):
        quire.single_prefill_with_kv_cache(p.q, p.k, p.v, **{name: 1})


@pytest.mark.parametrize("name", ["scale_q", "scale_k", "scale_v"])
def test_what_single_prefill_refuses(name):
    p = Problem((5,), (40,))
    with pytest.raises(quire.ValidationError, match=f"{name}: expected one number with queries of"):
        quire.single_prefill_with_kv_cache(p.q, p.k, p.v, **{name: torch.ones(4)})


@pytest.mark.parametrize("kind", KINDS)
def test_permissions_of_run(device, dtype, kind):
    """enable_pdl, and a window that repeats plan()'s."""
    p = problem(dtype, device)
    p.window_left = 7
    got = [prefill(p, kind, run={"enable_pdl": value, "window_left": 7})[0] for value in (None, False, True)]
    p.check(got[0])
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    with pytest.raises(quire.ValidationError, match="window_left: expected 7"):
        prefill(p, kind, run={"window_left": 8})


@pytest.mark.parametrize(("kind", "name"), [("ragged", "o_scale")])
def test_what_run_refuses(kind, name):
    with pytest.raises(quire.ValidationError, match=f"{name}: not supported"):
        prefill(problem(), kind, run={name: torch.ones(1)})


def test_scales_of_ragged_keys(device, backend, dtype):
    p = problem(dtype, device)
    p.sm_scale, p.v_scale = 0.05 * 3.0 * 0.5, 2.0
    scales = {"q_scale": 3.0, "k_scale": 0.5, "v_scale": 2.0}
    p.check(*prefill(p, "ragged", backend, plan={"sm_scale": 0.05}, run=scales))


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_is_no_scale(kind, name):
    with pytest.raises(quire.ValidationError, match=f"{name}: expected a number, got True"):
        prefill(problem(), kind, run={name: True})


@pytest.mark.parametrize("plan", [{"fixed_split_size": 128}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_splits(device, dtype, kind, plan):
    """The result is right, and that of a request alone is that of the request among others, bit for bit."""
    p, alone = problem(dtype, device), Problem((20,), (300,), dtype=dtype, device=device, causal=True)
    alone.q, alone.k, alone.v = p.q[3:], p.k[9:], p.v[9:]
    got = prefill(p, kind, plan=plan)
    p.check(*got)
    assert torch.equal(got[0][3:], prefill(alone, kind, plan=plan)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_another_workspace(device, dtype, kind):
    """From the next plan() on; an int workspace is taken and not needed."""
    p = problem(dtype, device)
    cls = getattr(quire, f"BatchPrefillWith{kind.capitalize()}KVCacheWrapper")
    wrapper, cache = cls(torch.empty(16, dtype=torch.uint8, device=device)), p.paged(8)
    wrapper.reset_workspace_buffer(workspace(device), torch.empty(8, dtype=torch.uint8, device=device))
    assert wrapper._workspace.buffer.data_ptr() == workspace(device).data_ptr()
    plan_ragged(wrapper, p) if kind == "ragged" else plan_paged(wrapper, p, cache)
    p.check(wrapper.run(p.q, p.k, p.v) if kind == "ragged" else wrapper.run(p.q, cache.kv))
    with pytest.raises(quire.ValidationError, match=r"int_workspace_buffer: expected a torch.Tensor"):
        wrapper.reset_workspace_buffer(workspace(device), 3)


def test_masks_of_ragged_graphs(device, dtype):
    """Its bits lie in the caller's buffer."""
    p = problem(dtype, device).random_mask()
    mask = torch.zeros(p.mask.numel(), dtype=torch.uint8, device=device)
    indptrs = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, *indptrs, mask)
    plan_ragged(wrapper, p)
    p.check(wrapper.run(p.q, p.k, p.v))
    assert mask.any()


@pytest.mark.parametrize("kind", ["Decode", "Prefill"])
def test_int_workspaces_of_shared_prefixes(kind):
    wrapper = getattr(quire, f"Batch{kind}WithSharedPrefixPagedKVCacheWrapper")(workspace("cpu"))
    wrapper.reset_workspace_buffer(workspace("cpu"), torch.empty(8, dtype=torch.uint8))
    with pytest.raises(quire.ValidationError, match=r"int_workspace_buffer: expected a torch.Tensor"):
        wrapper.reset_workspace_buffer(workspace("cpu"), 3)
