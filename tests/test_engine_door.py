"""FlashAttention's functions where engines import them, and the plug-ins of engines; no engine is installed."""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import quire
from oracle import attention
from quire.compat import engines
from quire.compat import flashinfer as overlay
from quire.compat.engines import DOORS, doors
from quire.compat.flash_attn_interface import flash_attn_varlen_func
from quire.compat.flashinfer import fallback
from quire.jit import events

#: vLLM's order of arguments, and answers that tell whose they are.
VLLM = """
import torch
def flash_attn_varlen_func(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None,
        q_v=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None,
        scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None,
        fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None,
        dynamic_causal=None, gather_kv_indices=None, gather_kv_valid_length=None, of_a_later_release=None):
    return "theirs", scheduler_metadata
def get_scheduler_metadata(*args, **kwargs):
    return "their schedule"
def is_fa_version_supported(version):
    return version == 3
"""
SGLANG = """
def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None,
        cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, only_qv=False,
        return_softmax_lse=False, sinks=None, out=None):
    return "theirs"
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
        seqused_k=None, page_table=None, softmax_scale=None, causal=False, **more):
    return "theirs"
def get_scheduler_metadata(*args, **kwargs):
    return "their schedule"
"""
FILES = {
    "vllm/__init__.py": "",
    "vllm/vllm_flash_attn/__init__.py": "from vllm.vllm_flash_attn.flash_attn_interface import "
    "flash_attn_varlen_func, get_scheduler_metadata, is_fa_version_supported\n",
    "vllm/vllm_flash_attn/flash_attn_interface.py": VLLM,
    "vllm/fa_utils.py": "from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata\n"
    "class Kernel:\n    def run(self, *args, **kwargs): return flash_attn_varlen_func(*args, **kwargs)\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_model_runner.py": "class GPUModelRunner:\n    def execute_model(self, x): return x\n",
    "sgl_kernel/__init__.py": "",
    "sgl_kernel/flash_attn.py": SGLANG,
}
PACKAGES = {name.split("/")[0] for name in FILES} | {"flash_attn", "flash_attn_interface"}


@pytest.fixture(autouse=True)
def _inactive_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fallback, "_capabilities", list)
    events._warned.clear()
    yield
    engines._later.calls.clear()
    engines.uninstall()
    overlay.deactivate()
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES | {"flashinfer"}]:
        del sys.modules[name]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def left() -> list[str]:
    return [line for line in engines.report().splitlines() if line.startswith("left")]


def paged(lens: tuple[int, ...] = (20, 30), new: tuple[int, ...] = (1, 4)) -> dict[str, Any]:
    """What vLLM passes: queries of requests of `lens` tokens, of which the last `new` are theirs."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 6, 16, 2, 64)
    return {
        "q": torch.randn(sum(new), 8, 64), "k": k, "v": v, "max_seqlen_q": max(new), "max_seqlen_k": max(lens),
        "cu_seqlens_q": torch.tensor([0, *new]).cumsum(0).int(), "seqused_k": torch.tensor(lens).int(),
        "block_table": torch.tensor([[4, 0], [2, 5]]).int(), "causal": True,
    }  # fmt: skip


def expected(given: dict[str, Any], **scoring: Any) -> torch.Tensor:
    """By the oracle."""
    out, at = [], 0
    for row, m in enumerate(given["seqused_k"].tolist()):
        n = int(given["cu_seqlens_q"].diff()[row])
        k, v = (given[name][given["block_table"][row].long()].flatten(0, 1)[:m] for name in ("k", "v"))
        out.append(attention(given["q"][at : at + n], k, v, [0, n], [0, m], causal=given["causal"], **scoring)[0])
        at += n
    return torch.cat(out)


@pytest.mark.usefixtures("packages")
class TestInPlace:
    """install() over installed libraries."""

    @pytest.mark.parametrize("is_first", [True, False], ids=["install first", "import first"])
    def test_importers(self, is_first: bool) -> None:
        """All modules that have a function of theirs get the one that replaces it."""
        if not is_first:
            import_module("vllm.fa_utils")
        assert engines.install() and engines.install()
        utils, given = import_module("vllm.fa_utils"), paged()
        out = utils.Kernel().run(**given, fa_version=3, s_aux=None, mask_mod=None, dynamic_causal=None)
        torch.testing.assert_close(out.double(), expected(given), atol=1e-5, rtol=0)
        interface = import_module("vllm.vllm_flash_attn.flash_attn_interface")
        package = import_module("vllm.vllm_flash_attn")
        assert interface.flash_attn_varlen_func is package.flash_attn_varlen_func is utils.flash_attn_varlen_func
        assert engines.report().split()[:3] == ["served", "flash_attn_varlen_func", "1"] and not left()
        engines.uninstall()
        assert utils.Kernel().run(**given)[0] == "theirs" and interface.flash_attn_varlen_func(**given)[0] == "theirs"

    def test_orders_of_arguments(self) -> None:
        """They are those of the function that was there."""
        engines.install()
        given = paged()
        order = ("q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k")
        first, rest = [given[name] for name in order], {k: v for k, v in given.items() if k not in order}
        theirs = import_module("vllm.vllm_flash_attn")
        out = theirs.flash_attn_varlen_func(*first, **rest)
        torch.testing.assert_close(out.double(), expected(given), atol=1e-5, rtol=0)
        parameters = inspect.signature(theirs.flash_attn_varlen_func).parameters
        assert list(parameters)[3] == "max_seqlen_q" and parameters["num_splits"].default == 0
        with pytest.raises(TypeError, match="multiple values for argument 'cu_seqlens_q'"):
            theirs.flash_attn_varlen_func(*first, **given)
        table, lens = given["block_table"], given["seqused_k"]
        cache = given["q"], given["k"], given["v"], *[None] * 5, lens, None, None, table, given["cu_seqlens_q"]
        call = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
        same = call(*cache, max_seqlen_q=4, causal=True, attention_chunk=None, only_qv=False, sinks=None)
        assert torch.equal(same, out) and not left()

    def test_what_is_refused_is_theirs(self, caplog: pytest.LogCaptureFixture) -> None:
        """With their schedule, which they have made themselves; said once for a cause, and counted each time."""
        engines.install()
        theirs, given = import_module("vllm.vllm_flash_attn"), paged()
        schedule = theirs.get_scheduler_metadata()
        assert schedule == "their schedule" and theirs.is_fa_version_supported(3)
        with caplog.at_level(logging.WARNING, "quire"):
            for _ in range(2):
                mine = theirs.flash_attn_varlen_func(**given, mask_mod=print, scheduler_metadata=torch.zeros(1).int())
                assert mine[0] == "theirs" and mine[1] is not None
        assert [r.message for r in caplog.records] == [
            "vllm.vllm_flash_attn.flash_attn_interface serves flash_attn_varlen_func: mask_mod: expected None, as "
            "flash_attn_varlen_func() does not support it: use quire.flex_attention() or a quire.Variant."
        ]
        assert theirs.flash_attn_varlen_func(**given, of_a_later_release=1)[0] == "theirs"
        assert len(left()) == 2 and "flash_attn_varlen_func  2 x  mask_mod" in left()[0]
        assert "of_a_later_release: an argument that came later" in left()[1]

    def test_wrong_input_is_an_error(self) -> None:
        engines.install()
        theirs, given = import_module("vllm.vllm_flash_attn"), paged()
        with pytest.raises(quire.ValidationError, match=r"^seqused_k"):
            theirs.flash_attn_varlen_func(**{**given, "seqused_k": None})
        with pytest.raises(TypeError, match="nothing_known"):
            theirs.flash_attn_varlen_func(**given, nothing_known=1)
        assert not left()

    def test_gradients_are_theirs(self) -> None:
        engines.install()
        theirs, given = import_module("vllm.vllm_flash_attn"), paged()
        given["q"].requires_grad_()
        assert theirs.flash_attn_varlen_func(**given)[0] == "theirs" and "gradients: " in left()[0]
        with torch.no_grad():
            assert theirs.flash_attn_varlen_func(**given).shape == given["q"].shape

    @pytest.mark.parametrize("error", [quire.PlanError("captured"), quire.CompileError("no compiler")])
    def test_what_cannot_be_done_now_is_theirs(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        def fail(*args: Any) -> None:
            raise error

        monkeypatch.setattr("quire.compat.flash_attn_interface.attend", fail)
        engines.install()
        assert import_module("vllm.vllm_flash_attn").flash_attn_varlen_func(**paged(), softcap=3.0)[0] == "theirs"
        assert len(left()) == 1

    @pytest.mark.parametrize(
        ("gpus", "wish", "is_on"),
        [
            ([], "auto", True),
            ([(9, 0)], "", True),
            ([(10, 0)], "auto", False),
            ([(12, 0)], "", False),
            ([(9, 0), (10, 0)], "auto", False),
            ([(10, 0)], "on", True),
            ([(9, 0)], "off", False),
        ],
    )
    def test_by_gpu(self, monkeypatch: pytest.MonkeyPatch, gpus: Any, wish: str, is_on: bool) -> None:
        monkeypatch.setattr(fallback, "_capabilities", lambda: gpus)
        monkeypatch.setenv("QUIRE_FLASH_ATTN", wish)
        assert engines.install() is is_on
        answer = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func(**paged())
        assert isinstance(answer, torch.Tensor) is is_on

    def test_what_is_not_installed_is_not_made(self) -> None:
        engines.install()
        for name in ("flash_attn", "flash_attn_interface"):
            with pytest.raises(ModuleNotFoundError):
                import_module(name)


def test_wrong_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_FLASH_ATTN", "maybe")
    with pytest.raises(quire.ValidationError, match="QUIRE_FLASH_ATTN: expected auto, on or off, got 'maybe'"):
        engines.install()


def test_stand_ins() -> None:
    engines.install("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
    q = torch.randn(2, 5, 8, 64)
    outs = [
        import_module(name).flash_attn_func(q, q, q, causal=True) for name in ("flash_attn", "flash_attn_interface")
    ]
    torch.testing.assert_close(*outs)
    assert import_module("flash_attn").__version__ == "2.8.3"
    assert import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    engines.uninstall()
    with pytest.raises(ModuleNotFoundError):
        import_module("flash_attn")
    with pytest.raises(quire.ValidationError, match="missing: expected one of flash_attn, "):
        engines.install("flash_attn_4")


def test_doors_name_functions_that_exist() -> None:
    for ours, names in DOORS.values():
        assert all(hasattr(import_module(ours), name) for name in names)
    assert not doors.is_active()


class TestPlugins:
    """What engines call in each of their processes."""

    @pytest.fixture
    def registry(self, packages: None) -> ModuleType:
        """vLLM's registry of backends, as far as it is asked."""

        class Enum:
            __members__: ClassVar[dict[str, Any]] = {}

        def register_backend(name: str, path: str) -> None:
            Enum.__members__[name] = SimpleNamespace(name=name, value=path)

        module = ModuleType("vllm.v1.attention.backends.registry")
        module.AttentionBackendEnum, module.register_backend = Enum, register_backend  # type: ignore[attr-defined]
        prefill = ModuleType("vllm.v1.attention.backends.mla.prefill.registry")
        prefill.MLAPrefillBackendEnum = type("Enum", (), {"__members__": {}})  # type: ignore[attr-defined]
        prefill.register_mla_prefill_backend = lambda name, path: prefill.MLAPrefillBackendEnum.__members__.setdefault(  # type: ignore[attr-defined]
            name, SimpleNamespace(name=name, value=path)
        )
        parts = prefill.__name__.split(".")
        for i in range(3, len(parts)):
            sys.modules[".".join(parts[:i])] = ModuleType(".".join(parts[:i]))
        sys.modules |= {module.__name__: module, prefill.__name__: prefill}
        return module

    def test_of_vllm(self, registry: ModuleType) -> None:
        engines.vllm_plugin()
        engines.vllm_plugin()
        members = registry.AttentionBackendEnum.__members__
        assert {name: member.value for name, member in members.items()} == {
            "QUIRE": "quire.compat.engines.vllm.QuireAttentionBackend",
            "QUIRE_MLA": "quire.compat.engines.vllm.QuireMLABackend",
        }
        assert overlay.standin.is_active() and not doors.is_active(), "FlashInfer's place; FlashAttention's if asked"

    def test_members_reach_new_processes(self, registry: ModuleType) -> None:
        """A process that is started anew reads its configuration before it loads plug-ins."""
        sent = pickle.dumps(engines.vllm_member("attention", "QUIRE_MLA"))
        registry.AttentionBackendEnum.__members__.clear()
        assert pickle.loads(sent).value.endswith("QuireMLABackend")

    def test_of_another_vllm(self, registry: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
        """What it lacks is said; a plug-in that raises would end the engine."""
        del sys.modules["vllm.v1.attention.backends.mla.prefill.registry"], registry.register_backend
        with caplog.at_level(logging.WARNING, "quire"):
            engines.vllm_plugin()
        assert len(caplog.records) == 3 and overlay.standin.is_active()
        assert "takes no backend QUIRE (mla_prefill)" in caplog.records[-1].message

    def test_wish(self, registry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        del registry
        monkeypatch.setenv("QUIRE_FLASH_ATTN", "auto")
        engines.vllm_plugin()
        assert doors.is_active()

    @pytest.mark.parametrize("is_first", [True, False], ids=["plug-in first", "engine first"])
    def test_steps_without_a_call(self, registry: ModuleType, caplog: pytest.LogCaptureFixture, is_first: bool) -> None:
        del registry
        if not is_first:
            import_module("vllm.v1.worker.gpu_model_runner")
        engines.vllm_plugin()
        runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        with caplog.at_level(logging.WARNING, "quire"):
            assert [runner().execute_model(i) for i in range(50)] == list(range(50)) and not caplog.records
            for i in range(60):
                runner().execute_model(i)
        (record,) = caplog.records
        assert "none of 50 steps" in record.message and "--attention-backend QUIRE (QUIRE_MLA " in record.message
        assert "QUIRE_FLASH_ATTN=auto" in record.message
        assert not hasattr(runner.execute_model, "__wrapped__"), "steps cost nothing from then on"

    def test_steps_with_a_call(self, registry: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
        del registry
        engines.vllm_plugin()
        runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        runner().execute_model(0)
        flash_attn_varlen_func(**paged())
        with caplog.at_level(logging.WARNING, "quire"):
            for i in range(60):
                runner().execute_model(i)
        assert not caplog.records and not hasattr(runner.execute_model, "__wrapped__")

    def test_steps_where_quire_is_off(self, registry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody is told to turn it on on a GPU that has not run it."""
        del registry
        monkeypatch.setattr(fallback, "_capabilities", lambda: [(10, 0)])
        monkeypatch.setenv("QUIRE_FLASHINFER", "off")
        engines.vllm_plugin()
        runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
        assert not hasattr(runner.execute_model, "__wrapped__")
