"""What a plan tells its kernel, on a pretended GPU."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import quire
from quire.engine import attention, planner
from quire.engine import launch as plan_module
from quire.engine.device import OwnWorkspace
from quire.engine.options import LogitsOptions, PlanOptions, Types
from quire.engine.schedule import Indices, Lengths
from quire.kernels import AttentionProblem, decide
from quire.kernels.features import MaskMode, dtype_of
from quire.kernels.params import AttentionFa3Params, aligned_copy


class Sm90Module:
    """An attention_decode of which an SM of 132 holds two CTAs."""

    exports: ClassVar[dict[str, int]] = {"kMinCtas": 2, "kSmemBytes": 80_000, "kThreads": 128}


@pytest.fixture
def problem(monkeypatch):
    """A decision and the options of its plans, whose launches do nothing."""
    for module in (planner, attention):
        monkeypatch.setattr(module, "load", lambda spec, device: (Sm90Module, 264))
        monkeypatch.setattr(module, "launch", lambda *args, **options: None)
    bf16 = dtype_of("bfloat16", "q")
    problem = AttentionProblem("sm90a", bf16, bf16, bf16, 128, 128, 16, MaskMode.NONE, False, False, 4)
    options = PlanOptions(32, 8, 128, 128, Types(bf16, bf16, bf16), LogitsOptions(0.1, -1, 0.0), False, 16, 0)
    return decide(problem, "quire:decode"), options


def test_what_the_host_has_planned_may_be_read_before_the_launch_ahead_ends(problem):
    """It was copied: no kernel writes it."""
    last, indptr = torch.tensor([16], dtype=torch.int32), torch.tensor([0, 128], dtype=torch.int32)
    indices = Indices(1, None, 1, indptr, last, torch.arange(128, dtype=torch.int32), 16)
    plan = planner.make_plan(problem[0], indices, problem[1], OwnWorkspace(torch.device("cpu")), None, None)
    assert plan._params.plan_is_resident == 1


def test_what_a_kernel_plans_may_not(problem):
    """Attention may be launched while that kernel still runs."""
    lengths = Lengths(torch.tensor([2048]), torch.arange(128, dtype=torch.int32)[None], 1, 16)
    plan = attention.make_plan_on_device(problem[0], lengths, problem[1], OwnWorkspace(torch.device("cpu")), None)
    assert plan._params.plan_is_resident == 0


def test_a_kernel_plans_again_for_other_lengths(problem):
    """Of the same shapes, in other memory."""
    made = [Lengths(torch.tensor([n]), torch.arange(128, dtype=torch.int32)[None] + n, 1, 16) for n in (2048, 7)]
    workspace = OwnWorkspace(torch.device("cpu"))
    plan = attention.make_plan_on_device(problem[0], made[0], problem[1], workspace, None)
    first = bytes(plan._struct)
    plan.plan_again(made[1], workspace)
    assert plan._params.kv_indices == made[1].page_table.data_ptr() != made[0].page_table.data_ptr()
    assert plan._params.tiles and plan._params.partial_o and bytes(plan._struct) != first


def test_a_table_of_pages_that_32_bits_cannot_number_is_copied():
    table = torch.empty(3 << 30, dtype=torch.int32, device="meta").view(3, 1 << 30)[:, :4]
    lengths = Lengths(torch.empty(3, device="meta"), table, 1, 16)
    assert lengths.with_near_pages().page_table.stride() == (4, 1)
    near = Lengths(torch.empty(3, device="meta"), table.contiguous(), 1, 16)
    assert near.with_near_pages() is near
    rows = Lengths(None, torch.empty(1 << 20, 2048, dtype=torch.int32, device="meta"), 1, 1)
    with pytest.raises(quire.ValidationError, match="fewer requests"):
        rows.with_near_pages()


def test_another_stream_that_reads_a_plan_is_told_to_torch(problem, monkeypatch):
    """Once: its tensors must not be given to others while that stream still reads them."""
    told = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: told.append((tensor.data_ptr(), stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "another stream")
    monkeypatch.setattr(plan_module, "bind", lambda *args, **options: lambda stream: None)
    decision, options = problem
    decision = decide(replace(decision.problem, mask=MaskMode.CUSTOM), "quire:decode")
    last, indptr = torch.tensor([16], dtype=torch.int32), torch.tensor([0, 128], dtype=torch.int32)
    indices = Indices(1, None, 1, indptr, last, torch.arange(128, dtype=torch.int32), 16)
    bits = torch.zeros(256, dtype=torch.uint8)
    plan = planner.make_plan(decision, indices, options, OwnWorkspace(torch.device("cpu")), bits, None)
    plan.copy_signature(b"", None)
    for stream in (0, 5, 5, 0):
        plan.run(stream, [0, 0, 0, 0], plan_module.NO_EXTRAS, None)
    assert [stream for _, stream in told] == ["another stream"]  # the bits: each run has partial results of its own
    assert {pointer for pointer, _ in told} == {bits.data_ptr()}


def test_parameters_with_tensor_maps_are_copied_to_where_these_may_lie():
    """A copy owns its memory: the template may change, and be gone."""
    template = AttentionFa3Params(heads_per_l2_group=3)
    copies = [aligned_copy(template) for _ in range(20)]
    template.heads_per_l2_group, copies[0].heads_per_l2_group = 5, 4
    del template
    gc.collect()
    assert [copy.heads_per_l2_group for copy in copies] == [4] + [3] * 19
    assert all(ctypes.addressof(copy) % 64 == 0 for copy in copies)
