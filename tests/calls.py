"""Plans and runs a problem through the wrappers: the few lines that every test of them would otherwise repeat."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from problems import POSITIONS, PagedCache, Problem, ints, poisoned, workspace

Options = Mapping[str, object]
NOTHING: Options = {}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the device in here is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def capture() -> Iterator[None]:
    """A capture of nothing that is kept: for calls that must be refused in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield


def pending(*names: str) -> pytest.MarkDecorator:
    """Expects a test to fail as long as one of these public names is missing, and to pass once they are there."""
    missing = [name for name in names if not hasattr(quire, name)]
    reason = f"not in this release: {', '.join(missing)}"
    return pytest.mark.xfail(bool(missing), reason=reason, raises=AttributeError, strict=True)


def paged_wrapper(problem: Problem, cache: PagedCache, backend: str) -> quire.BatchPrefillWithPagedKVCacheWrapper:
    """An unplanned wrapper for paged prefill."""
    return quire.BatchPrefillWithPagedKVCacheWrapper(workspace(problem.device), cache.kv_layout, backend=backend)


def plan_paged(
    wrapper: quire.BatchPrefillWithPagedKVCacheWrapper,
    problem: Problem,
    cache: PagedCache,
    *,
    index_device: str | None = None,
    plan: Options = NOTHING,
) -> None:
    """Plans with index arrays on `index_device` (None: the problem's); `plan` overrides plan()'s keywords."""
    indptr, indices, last = cache.tables(index_device)
    options: dict[str, object] = {**problem.plan_options(), **plan}
    if problem.head_dim_vo is not None:
        options["head_dim_vo"] = problem.head_dim_vo
    heads = (problem.num_qo_heads, problem.num_kv_heads)
    qo_indptr = ints(problem.qo_indptr, index_device or problem.device)
    wrapper.plan(qo_indptr, indptr, indices, last, *heads, problem.head_dim, cache.page_size, **options)


def prefill_paged(
    problem: Problem,
    cache: PagedCache,
    backend: str,
    *,
    index_device: str | None = None,
    plan: Options = NOTHING,
    run: Options = NOTHING,
) -> tuple[Tensor, Tensor]:
    """o and lse of paged prefill, from outputs that were NaN."""
    wrapper = paged_wrapper(problem, cache, backend)
    plan_paged(wrapper, problem, cache, index_device=index_device, plan=plan)
    out, lse = outputs(problem)
    got = wrapper.run(problem.q, cache.kv, out=out, lse=lse, return_lse=True, **run)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    return out, lse


def ragged_wrapper(
    problem: Problem, backend: str, kv_layout: str = "NHD"
) -> quire.BatchPrefillWithRaggedKVCacheWrapper:
    """An unplanned wrapper for ragged prefill."""
    return quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(problem.device), kv_layout, backend=backend)


def plan_ragged(
    wrapper: quire.BatchPrefillWithRaggedKVCacheWrapper,
    problem: Problem,
    *,
    index_device: str | None = None,
    plan: Options = NOTHING,
) -> None:
    """Plans with index arrays on `index_device` (None: the problem's); `plan` overrides plan()'s keywords."""
    options: dict[str, object] = {**problem.plan_options(), **plan}
    if problem.head_dim_vo is not None:
        options["head_dim_vo"] = problem.head_dim_vo
    qo_indptr, kv_indptr = (ints(i, index_device or problem.device) for i in (problem.qo_indptr, problem.kv_indptr))
    wrapper.plan(qo_indptr, kv_indptr, problem.num_qo_heads, problem.num_kv_heads, problem.head_dim, **options)


def prefill_ragged(
    problem: Problem,
    backend: str,
    *,
    kv_layout: str = "NHD",
    kv: tuple[Tensor, Tensor] | None = None,
    index_device: str | None = None,
    plan: Options = NOTHING,
    run: Options = NOTHING,
) -> tuple[Tensor, Tensor]:
    """o and lse of ragged prefill, from outputs that were NaN; `kv` replaces the problem's k and v by equal views."""
    wrapper = ragged_wrapper(problem, backend, kv_layout)
    plan_ragged(wrapper, problem, index_device=index_device, plan=plan)
    out, lse = outputs(problem)
    k, v = (problem.k, problem.v) if kv is None else kv
    got = wrapper.run(problem.q, k, v, out=out, lse=lse, return_lse=True, **run)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    return out, lse


def prefill(
    problem: Problem, kind: str, backend: str = "auto", *, page_size: int = 8, **more: Any
) -> tuple[Tensor, Tensor]:
    """o and lse of prefill over "paged" or "ragged" keys."""
    if kind == "ragged":
        return prefill_ragged(problem, backend, **more)
    assert kind == "paged"
    return prefill_paged(problem, problem.paged(page_size), backend, **more)


def decode_wrapper(
    problem: Problem, cache: PagedCache, backend: str, **more: object
) -> quire.BatchDecodeWithPagedKVCacheWrapper:
    """An unplanned wrapper for decode."""
    return quire.BatchDecodeWithPagedKVCacheWrapper(workspace(problem.device), cache.kv_layout, backend=backend, **more)


def plan_decode(
    wrapper: quire.BatchDecodeWithPagedKVCacheWrapper,
    problem: Problem,
    cache: PagedCache,
    *,
    index_device: str | None = None,
    plan: Options = NOTHING,
) -> None:
    """Plans with index arrays on `index_device` (None: the problem's); `plan` overrides plan()'s keywords."""
    indptr, indices, last = cache.tables(index_device)
    options: dict[str, object] = {"window_left": problem.window_left, "sm_scale": problem.sm_scale}
    options |= {"logits_soft_cap": problem.soft_cap, "q_data_type": problem.dtype}
    options |= {name: getattr(problem, name) for name in POSITIONS}
    options |= {"attention_chunk_size": problem.attention_chunk_size, **plan}
    heads = (problem.num_qo_heads, problem.num_kv_heads)
    wrapper.plan(indptr, indices, last, *heads, problem.head_dim, cache.page_size, **options)


def decode(
    problem: Problem,
    cache: PagedCache,
    backend: str,
    *,
    index_device: str | None = None,
    plan: Options = NOTHING,
    run: Options = NOTHING,
) -> tuple[Tensor, Tensor]:
    """o and lse of decode, from outputs that were NaN."""
    wrapper = decode_wrapper(problem, cache, backend)
    plan_decode(wrapper, problem, cache, index_device=index_device, plan=plan)
    out, lse = outputs(problem)
    got = wrapper.run(problem.q, cache.kv, out=out, lse=lse, return_lse=True, **run)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    return out, lse


def outputs(problem: Problem) -> tuple[Tensor, Tensor]:
    """out and lse of the right shapes, full of NaN."""
    nnz, heads, dim_vo = problem.q.shape[0], problem.num_qo_heads, problem.v.shape[2]
    out = poisoned((nnz, heads, dim_vo), problem.dtype, problem.device)
    return out, poisoned((nnz, heads), torch.float32, problem.device)
