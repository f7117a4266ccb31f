"""An installed FlashInfer serves what Quire refuses, behind the same names."""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quire
from calls import plan_paged, plan_ragged
from problems import Problem, workspace
from quire.compat import flashinfer as compat
from quire.compat.flashinfer import fallback, overlay, served
from quire.jit import events

#: Their functions and wrappers say what they were called with.
THEIRS = """
def _function(name):
    def call(*args, of_a_later_release=None, **kwargs):
        return "theirs", name, args, kwargs
    call.__name__ = call.__qualname__ = name
    return call


class _Wrapper:
    made = 0

    def __init__(self, *args, later=None, **kwargs):
        type(self).made += 1
        self.made_with, self.heard, self._sm_scale = (args, kwargs), [], 7.0

    def reset_workspace_buffer(self, *args):
        self.heard.append("reset")

    def plan(self, *args, **kwargs):
        self.heard.append("plan")
        self.planned_with, self._plan_info, self._planned_backend = (args, kwargs), [1, 2], self
        self._int_workspace_buffer = "int workspace"

    begin_forward = plan

    def run(self, *args, out=None, of_a_later_release=None, **kwargs):
        self.heard.append("run")
        return "theirs"

    forward = run
    run_return_lse = run
    workspace_size = run
"""


def _text(names: Any) -> str:
    """A module of FlashInfer's with these names."""
    lines = [THEIRS]
    for name, value in names.items():
        if inspect.isclass(value):
            lines.append(f"class {name}(_Wrapper): pass")
        elif callable(value):
            lines.append(f"{name} = _function({name!r})")
    return "\n".join(lines) + "\n"


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """FlashInfer, installed and with Quire over it."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    modules = {tail: names for tail, names in served().items() if tail and "." not in tail}
    for tail, names in modules.items():
        (package / f"{tail}.py").write_text(_text(names))
    (package / "jit" / "attention").mkdir(parents=True)
    for place in ("jit", "jit/attention"):
        (package / place / "__init__.py").write_text("")
    texts = "attention_sink_decl = {'fa2': 'struct AttentionSink {};', 'fa3': 'struct Other {};'}\n"
    (package / "jit" / "attention" / "variants.py").write_text(texts)
    homes = {name: tail for tail, names in modules.items() for name in names}
    lines = [f"from .{homes[name]} import {name}\n" for name in served()[""]]
    (package / "__init__.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    events._warned.clear()
    compat.activate()
    assert overlay.is_active()
    yield import_module("flashinfer")
    compat.deactivate()
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


def left() -> list[str]:
    """What the report says of calls that went to FlashInfer."""
    return [line for line in compat.report().splitlines() if line.startswith("left")]


#: Arguments that Quire refuses, by the function.
REFUSED = (
    ("prefill.trtllm_batch_context_with_kv_cache", "uses_spcompress"),
    ("prefill.trtllm_batch_context_with_kv_cache", "o_sf_scale"),
    ("decode.trtllm_batch_decode_with_kv_cache", "request_order"),
    ("decode.trtllm_batch_decode_with_kv_cache", "o_sf_scale"),
    ("decode.cudnn_batch_decode_with_kv_cache", "batch_offsets_k"),
    ("mla.trtllm_batch_decode_with_kv_cache_mla", "enable_dcp"),
    ("mla.trtllm_batch_decode_with_kv_cache_mla", "cp_world"),
    ("mla.trtllm_batch_decode_with_kv_cache_mla", "uses_shared_paged_kv_idx"),
)


@pytest.mark.parametrize(("path", "argument"), REFUSED)
def test_functions(flashinfer: Any, path: str, argument: str) -> None:
    module, name = path.split(".")
    call, value = getattr(import_module(f"flashinfer.{module}"), name), torch.ones(3)
    who, what, args, kwargs = call(1, **{argument: value})
    assert (who, what, args) == ("theirs", name, (1,)) and kwargs[argument] is value
    (line,) = left()
    assert line.startswith(f"left     {name}  1 x  {argument}: not supported by this call"), line


def test_what_is_said(flashinfer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Once for a cause, whatever was passed; and counted each time."""
    with caplog.at_level(logging.WARNING, "quire"):
        for size in (3, 4, 4):
            flashinfer.prefill.trtllm_batch_context_with_kv_cache(o_sf_scale=torch.ones(size))
    said = "trtllm_batch_context_with_kv_cache: o_sf_scale: not supported by this call, as results are in 16 or 32 bits"
    assert [record.message for record in caplog.records] == [f"FlashInfer serves {said}"]
    assert left() == [f"left     {said.replace(': o', '  3 x  o', 1)}"]


def test_swizzled_scales(flashinfer: Any) -> None:
    """Scales of values in the order that FlashInfer's trtllm-gen has alone are for it."""
    bytes_ = torch.zeros(2, 2, 16, 2, 32, dtype=torch.uint8)
    scales = torch.zeros(2, 2, 16, 2, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    call = flashinfer.decode.trtllm_batch_decode_with_kv_cache
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    options = {"kv_layout": "NHD", "backend": "trtllm-gen", "kv_cache_sf": scales}
    q = torch.zeros(1, 4, 64)
    assert call(q, bytes_, workspace("cpu"), *tables, 1, 1.0, 1.0, **options)[0] == "theirs"
    assert len(left()) == 1 and "backend: expected another than 'trtllm-gen'" in left()[0]


def test_wrong_input_is_an_error(flashinfer: Any) -> None:
    q, k = torch.randn(3, 4, 64), torch.randn(3, 2, 32)
    with pytest.raises(quire.ValidationError, match=r"^k: "):
        flashinfer.single_prefill_with_kv_cache(q, k, k)
    with pytest.raises(TypeError, match="nothing_known"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, nothing_known=1)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    with pytest.raises(quire.ValidationError, match=r"^kv_indptr: "):
        wrapper.plan(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), 4, 2, 64)
    with pytest.raises(quire.PlanError):
        wrapper.run(q, q, q)
    assert not left()


def test_what_is_for_quire_alone_is_refused(flashinfer: Any) -> None:
    p = Problem((3,), (5,))
    with pytest.raises(quire.UnsupportedError, match="o_dtype"):
        flashinfer.single_prefill_with_kv_cache(p.q, p.k, p.v, backend="quire:cpu", o_dtype=torch.int8)
    assert not left()


def test_keywords_of_a_later_release(flashinfer: Any) -> None:
    assert flashinfer.single_prefill_with_kv_cache(1, of_a_later_release=2)[0] == "theirs"
    p = Problem((3,), (5,))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    plan_ragged(wrapper, p)
    assert wrapper.run(p.q, p.k, p.v, of_a_later_release=1) == "theirs"
    assert len(left()) == 2 and all("1 x  of_a_later_release: an argument" in line for line in left())


class TestWrappers:
    """A wrapper is Quire's or FlashInfer's, as its last plan() says."""

    def test_served(self, flashinfer: Any) -> None:
        p = Problem((3, 7), (40, 7), causal=True)
        cache = p.paged(8)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
        assert isinstance(wrapper, quire.BatchPrefillWithPagedKVCacheWrapper)
        assert isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
        assert not isinstance(wrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper)
        plan_paged(wrapper, p, cache)
        p.check(wrapper.run(p.q, cache.kv))
        p.check(wrapper.run(p.q, cache.kv, return_lse=True)[0])
        assert compat.report().startswith("served   BatchPrefillWithPagedKVCacheWrapper.run  2 x  attention_")
        assert not left() and wrapper._behind._made is None, "FlashInfer's was not made"

    def test_a_refused_plan(self, flashinfer: Any) -> None:
        p = Problem((3, 7), (40, 7), causal=True)
        buffer = workspace("cpu")
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD")
        plan_ragged(wrapper, p)
        p.check(wrapper.run(p.q, p.k, p.v))
        wrapper.reset_workspace_buffer(buffer, buffer)
        wrapper.plan(p.qo_indptr, p.kv_indptr, 4, 2, 64, kv_data_type=torch.int8)
        assert wrapper.run(p.q, p.k, p.v) == wrapper.run_return_lse(p.q) == "theirs"
        theirs = wrapper._behind.wrapper()
        assert theirs.made_with == ((buffer, "NHD"), {}) and theirs.heard == ["reset", "plan", "run", "run"]
        assert theirs.planned_with[1] == {"kv_data_type": torch.int8}
        assert wrapper._sm_scale == 7.0 and isinstance(wrapper, flashinfer.BatchPrefillWithRaggedKVCacheWrapper)
        wrapper._sm_scale = 8.0  # as SGLang writes it
        assert theirs._sm_scale == 8.0 and repr(wrapper) == repr(theirs)
        wrapper.reset_workspace_buffer(buffer, buffer)
        assert theirs.heard[-1] == "reset" and wrapper.run() == "theirs"
        plan_ragged(wrapper, p)
        p.check(wrapper.run(p.q, p.k, p.v))
        assert wrapper._sm_scale == p.sm_scale or wrapper._sm_scale == p.head_dim**-0.5
        assert len(left()) == 1 and "BatchPrefillWithRaggedKVCacheWrapper.plan  1 x  kv_data_type: " in left()[0]
        assert theirs.made == 1

    def test_a_refused_run(self, flashinfer: Any) -> None:
        """All later calls are FlashInfer's, which must not plan while a CUDA graph is captured."""
        p = Problem((3, 7), (40, 7), causal=True)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
        plan_ragged(wrapper, p)
        assert wrapper.run(p.q, p.k, p.v, o_scale=torch.ones(1)) == "theirs"
        plan_ragged(wrapper, p)
        assert wrapper.run(p.q, p.k, p.v, o_scale=torch.ones(1)) == "theirs"
        assert wrapper._behind.wrapper().heard == ["plan", "run", "plan", "run"]
        assert len(left()) == 1 and "Wrapper.run  1 x  o_scale: " in left()[0]

    @pytest.mark.parametrize("given", [{"jit_args": ("mine", "struct Mine {};")}, {"variant_owns_mask": True}])
    def test_a_refused_constructor(self, flashinfer: Any, given: dict[str, Any]) -> None:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), **given)
        wrapper.plan(1, 2, 3)
        assert wrapper.run() == wrapper.forward() == "theirs" and wrapper.planned_with == ((1, 2, 3), {})
        assert wrapper._behind.wrapper().made_with[1] == given and len(left()) == 1

    def test_the_variant_with_sinks(self, flashinfer: Any) -> None:
        """Quire knows FlashInfer's own text, which FlashInfer can still compile; not another of its name."""
        text = import_module("flashinfer.jit.attention.variants").attention_sink_decl["fa2"]
        assert text == "struct AttentionSink {};"
        names = ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink"
        p = Problem((3, 7), (40, 7), causal=True, sm_scale=0.2)
        given = ("uri", p.dtype, p.dtype, p.dtype, torch.int32, 64, 64, *names)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), jit_args=(*given, text))
        plan_ragged(wrapper, p, plan={"sm_scale": None})
        sinks = torch.randn(4)
        p.check(wrapper.run(p.q, p.k, p.v, sinks, 0.2), sinks=sinks)
        assert wrapper.run(p.q, p.k, p.v, sinks, 0.2, o_scale=2.0) == "theirs"
        assert wrapper._behind.wrapper().made_with[1]["jit_args"][-1] is text
        other = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), jit_args=(*given, str(text) + " "))
        other.plan()
        assert other.run() == "theirs"

    @pytest.mark.parametrize("argument", ["use_profiler", "output_scale"])
    def test_latents(self, flashinfer: Any, argument: str) -> None:
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace("cpu"))
        wrapper.plan(1, 2, **{argument: "per-tensor" if argument == "output_scale" else True})
        assert wrapper.run(3) == "theirs" and f"plan  1 x  {argument}: " in left()[0]

    def test_internals_of_latents(self, flashinfer: Any) -> None:
        """vLLM's sparse MLA on Hopper reads FlashInfer's plan, and changes it on the device."""
        flashinfer.mla.BatchMLAPagedAttentionWrapper.run.__signature__.parameters["of_a_later_release"]
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace("cpu"))
        indptr, one = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        wrapper.plan(indptr, indptr, one - 1, one, 16, 512, 64, 1, False, 0.1, q_data_type=torch.bfloat16)
        assert [int(x) for x in wrapper._plan_info] == [1, 2]
        assert wrapper._planned_backend._int_workspace_buffer == "int workspace"
        assert wrapper.run(1) == "theirs" and wrapper.planned_with[1] == {"q_data_type": torch.bfloat16}
        assert "reads _plan_info, which is FlashInfer's own" in left()[0]

    def test_data_of_plans_is_theirs(self, flashinfer: Any) -> None:
        """It may be handed to FlashInfer, and Quire reads it."""
        kind = flashinfer.mla.MLAPlanMetadata
        assert kind is not quire.mla.MLAPlanMetadata and kind.__module__ == "flashinfer.mla"
        metadata, p = kind(), Problem((1,), (1,))
        for name in ("cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len"):
            setattr(metadata, name, None)
        indptr, one = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr = indptr, indptr, one - 1, one
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace("cpu"))
        types = {"q_data_type": p.dtype, "kv_data_type": p.dtype}
        heads = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 1}
        wrapper.plan(metadata=metadata, causal=False, sm_scale=0.1, **heads, **types)
        cache = torch.randn(1, 1, 576)
        o = wrapper.run(query=torch.randn(1, 16, 576), kv_cache=cache)
        torch.testing.assert_close(o, cache[:, :, :512].expand(1, 16, 512))

    def test_sizes_of_workspaces(self, flashinfer: Any) -> None:
        p = Problem((3, 7), (40, 7), causal=True)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
        given = p.qo_indptr, p.kv_indptr, 4, 2, 64
        assert wrapper.workspace_size(*given)[0] > 0 and not left()
        assert wrapper.workspace_size(*given, kv_data_type=torch.int8) == "theirs"

    def test_fast_decode_plan(self, flashinfer: Any) -> None:
        """SGLang puts it in the place of begin_forward()."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
        indptr, one = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)

        def begin_forward(*args: Any, **kwargs: Any) -> None:
            flashinfer.decode.fast_decode_plan(wrapper, *args, **kwargs)

        wrapper.begin_forward = begin_forward
        for dtype, is_theirs in ((torch.int8, True), (torch.float32, False), (torch.int8, True)):
            wrapper.begin_forward(indptr, one - 1, one, 4, 2, 64, 16, kv_data_type=dtype, q_data_type=torch.float32)
            cache = torch.zeros(1, 2, 16, 2, 64)
            assert (wrapper.run(torch.zeros(1, 4, 64), cache) == "theirs") is is_theirs

    def test_classes_that_programs_derive(self, flashinfer: Any) -> None:
        class Mine(flashinfer.BatchPrefillWithRaggedKVCacheWrapper):  # type: ignore[misc]
            def own(self) -> str:
                return "own"

        p = Problem((3, 7), (40, 7), causal=True)
        wrapper = Mine(workspace("cpu"))
        assert isinstance(wrapper, Mine) and not isinstance(
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu")), Mine
        )
        wrapper.plan(p.qo_indptr, p.kv_indptr, 4, 2, 64, kv_data_type=torch.int8)
        assert wrapper.run() == "theirs" and isinstance(wrapper, Mine)
        plan_ragged(wrapper, p)
        p.check(wrapper.run(p.q, p.k, p.v))
        assert wrapper.own() == "own" and type(wrapper) is Mine and type(copy.copy(wrapper)) is Mine


class TestWhere:
    """Names are replaced where Quire has run, or where somebody says so."""

    def activated(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
        """How many names activate() replaces."""
        (tmp_path / "flashinfer.py").write_text("def merge_state(): return 'theirs'\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        try:
            compat.activate()
            module = import_module("flashinfer")
            return sum(hasattr(module, name) for name in served()[""] if name != "merge_state")
        finally:
            compat.deactivate()
            sys.modules.pop("flashinfer", None)

    @pytest.mark.parametrize(
        ("gpus", "wish", "is_on"),
        [
            ([], "auto", True),
            ([(9, 0)], "", True),
            ([(10, 0)], "", False),
            ([(10, 3)], "auto", False),
            ([(11, 0)], "auto", False),
            ([(9, 0), (10, 0)], "auto", False),
            ([(10, 0)], "on", True),
            ([(9, 0)], "off", False),
        ],
    )
    def test_by_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any, wish: str, is_on: bool) -> None:
        monkeypatch.setattr(fallback, "_capabilities", lambda: gpus)
        monkeypatch.setenv("QUIRE_FLASHINFER", wish)
        count = self.activated(tmp_path, monkeypatch)
        assert count > 30 if is_on else count == 0

    def test_wrong_wish(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("QUIRE_FLASHINFER", "maybe")
        with pytest.raises(quire.ValidationError, match="QUIRE_FLASHINFER: expected auto, on or off, got 'maybe'"):
            compat.activate()

    def test_nvml(self) -> None:
        """No context, nor even the driver of CUDA, is needed."""

        class Nvml:
            def __getattr__(self, name: str) -> Any:
                def call(*args: Any) -> int:
                    if name == "nvmlDeviceGetCount_v2":
                        args[0]._obj.value = 2
                    elif name == "nvmlDeviceGetHandleByIndex_v2":
                        args[1]._obj.value = 100 + args[0]
                    elif name == "nvmlDeviceGetCudaComputeCapability":
                        args[1]._obj.value, args[2]._obj.value = (9, 0) if args[0].value == 100 else (12, 1)
                    return 0

                return call

        assert fallback._nvml_capabilities(Nvml()) == [(9, 0), (12, 1)]  # type: ignore[arg-type]
        with pytest.raises(OSError, match="NVML: error 9"):
            fallback._nvml_capabilities(SimpleNamespace(nvmlInit_v2=lambda: 9))  # type: ignore[arg-type]
