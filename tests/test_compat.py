"""Quire in the place of FlashInfer: a package of its name, or names over those of an installed one."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module, metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import quire
from calls import NOTHING, plan_paged, plan_ragged
from problems import Problem, workspace
from quire.compat import engines
from quire.compat import flashinfer as compat
from quire.compat.flashinfer import REFUSED, VERSION, overlay, served, standin

#: An installed FlashInfer, in small: its own modules import one another's names.
INSTALLED = {
    "__init__.py": "from .decode import BatchDecodeWithPagedKVCacheWrapper\nfrom .norm import rmsnorm\n"
    "from .cascade import merge_state\n__version__ = '9.9'\n",
    "decode.py": "class BatchDecodeWithPagedKVCacheWrapper: pass\ndef cudnn_batch_decode(): return 'theirs'\n",
    "cascade.py": "from .decode import BatchDecodeWithPagedKVCacheWrapper as Base\nclass Own(Base): pass\n"
    "def merge_state(): return 'theirs'\n",
    "norm.py": "def rmsnorm(): return 'theirs'\n",
    "prefill.py": "def single_prefill_with_kv_cache(): return 'theirs'\n"
    "def single_prefill_with_kv_cache_with_jit_module(): return 'theirs'\n",
}

#: FlashInfer's public names for attention, by the module that has them; "": the package.
NAMES = {
    "": "BatchAttention BatchAttentionWithAttentionSinkWrapper BatchDecodeWithPagedKVCacheWrapper "
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper BatchMLAPagedAttentionWrapper BatchPODWithPagedKVCacheWrapper "
    "BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper BlockSparseAttentionWrapper "
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper CUDAGraphBatchDecodeWithPagedKVCacheWrapper "
    "MultiLevelCascadeAttentionWrapper PODWithPagedKVCacheWrapper VariableBlockSparseAttentionWrapper "
    "append_paged_kv_cache append_paged_mla_kv_cache apply_llama31_rope apply_llama31_rope_inplace "
    "apply_llama31_rope_pos_ids apply_llama31_rope_pos_ids_inplace apply_rope apply_rope_inplace apply_rope_pos_ids "
    "apply_rope_pos_ids_inplace apply_rope_with_cos_sin_cache apply_rope_with_cos_sin_cache_inplace "
    "cudnn_batch_decode_with_kv_cache fast_decode_plan get_batch_indices_positions get_seq_lens merge_state "
    "merge_state_in_place merge_states packbits segment_packbits single_decode_with_kv_cache "
    "single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse trtllm_fmha_v2_prefill xqa xqa_mla",
    "cascade": "MultiLevelCascadeAttentionWrapper merge_state merge_state_in_place merge_states",
    "cudnn": "cudnn_batch_decode_with_kv_cache cudnn_batch_prefill_with_kv_cache",
    "decode": "BatchDecodeWithPagedKVCacheWrapper CUDAGraphBatchDecodeWithPagedKVCacheWrapper fast_decode_plan "
    "cudnn_batch_decode_with_kv_cache get_seq_lens single_decode_with_kv_cache "
    "single_decode_with_kv_cache_with_jit_module trtllm_batch_decode_with_kv_cache "
    "trtllm_batch_decode_with_kv_cache_mla xqa_batch_decode_with_kv_cache xqa_batch_decode_with_kv_cache_mla",
    "mla": "BatchMLAPagedAttentionWrapper trtllm_batch_decode_with_kv_cache_mla xqa_batch_decode_with_kv_cache_mla",
    "page": "append_paged_kv_cache append_paged_mla_kv_cache get_batch_indices_positions get_seq_lens",
    "pod": "BatchPODWithPagedKVCacheWrapper PODWithPagedKVCacheWrapper",
    "prefill": "BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper "
    "cudnn_batch_prefill_with_kv_cache single_prefill_with_kv_cache single_prefill_with_kv_cache_return_lse "
    "single_prefill_with_kv_cache_with_jit_module trtllm_batch_context_with_kv_cache trtllm_fmha_v2_prefill",
    "quantization": "packbits segment_packbits",
    "rope": "mla_rope_quantize_fp8 rope_quantize_fp8 rope_quantize_fp8_append_paged_kv_cache",
    "sparse": "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper",
    "utils": "get_alibi_slopes get_compute_capability determine_attention_backend",
    "xqa": "xqa xqa_mla",
}


@pytest.fixture(autouse=True)
def _inactive_afterwards() -> Iterator[None]:
    yield
    compat.deactivate()
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "flashinfer"
    package.mkdir()
    for name, text in INSTALLED.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def attend_one() -> None:
    """A call by the name of FlashInfer, compared with the oracle."""
    p = Problem((5,), (40,), causal=True)
    call = import_module("flashinfer").single_prefill_with_kv_cache
    p.check(call(p.q, p.k, p.v, causal=True))


@pytest.mark.skipif(util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
class TestStandIn:
    """Where no FlashInfer is installed."""

    def test_package(self) -> None:
        assert util.find_spec("flashinfer") is None
        compat.activate()
        compat.activate()
        assert standin.is_active() and not overlay.is_active()
        import flashinfer  # type: ignore[import-not-found]

        assert flashinfer.__version__ == VERSION
        assert flashinfer.BatchPrefillWithPagedKVCacheWrapper is quire.BatchPrefillWithPagedKVCacheWrapper
        assert flashinfer.decode.fast_decode_plan is quire.fast_decode_plan
        assert import_module("flashinfer.cascade").merge_state is quire.merge_state
        attend_one()
        compat.deactivate()
        assert util.find_spec("flashinfer") is None

    @pytest.mark.parametrize("name", ["flashinfer_python", "flashinfer-python", "flashinfer_cubin"])
    def test_version(self, name: str) -> None:
        compat.activate()
        assert metadata.version(name) == VERSION
        assert metadata.version("torch") == torch.__version__.split("+")[0] or metadata.version("torch")
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version("flashinfer-something")

    def test_what_engines_look_for_before_they_choose_is_not_there(self) -> None:
        compat.activate()
        for module in ("flashinfer.comm", "flashinfer.mm", "flashinfer.fused_moe.nothing"):
            assert util.find_spec(module) is None
        assert not hasattr(import_module("flashinfer"), "cutlass_fused_moe")

    def test_engines_choose_their_own_where_theirs_is_faster(self) -> None:
        """vLLM's sampler, and FlashMLA in the place of plans that only FlashInfer has."""
        compat.activate()
        with pytest.raises(RuntimeError, match=r"compiles no kernels of FlashInfer's"):
            import_module("flashinfer.jit.core").check_cuda_arch()
        wrapper = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        assert issubclass(wrapper, quire.mla.BatchMLAPagedAttentionWrapper)
        shown, whole = (inspect.signature(cls.run).parameters for cls in (wrapper, wrapper.__base__))
        assert whole.keys() - shown.keys() == {"ckv_scale_arr"}

    @pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in REFUSED.items() for n in names])
    def test_other_names_refuse(self, module: str, name: str) -> None:
        compat.activate()
        value = getattr(import_module("flashinfer" + f".{module}" * bool(module)), name)
        path = f"{module}.{name}".strip(".")
        with pytest.raises(
            quire.UnsupportedError, match=rf"^flashinfer\.{path}: [^.]*\bno such kernel; [^.]*\.\nSee docs/"
        ):
            value(1, x=2)
        assert not isinstance(3, value)
        with pytest.raises(quire.UnsupportedError, match=rf"{path}\.layout_128x4"):
            value.layout_128x4()
        assert f"refused  {path}  1 x" in compat.report()

    @pytest.mark.parametrize("name", ["decode", "prefill"])
    def test_functions_that_take_a_jit_module_point_to_variants(self, name: str) -> None:
        compat.activate()
        call = getattr(import_module(f"flashinfer.{name}"), f"single_{name}_with_kv_cache_with_jit_module")
        with pytest.raises(quire.ValidationError, match=r"^jit_module: expected a quire\.Variant \(docs/variants\.md"):
            call(object(), *torch.zeros(3, 4, 64), 30.0, window_left=3)

    @pytest.mark.parametrize(("path", "theirs"), NAMES.items())
    def test_names(self, path: str, theirs: str) -> None:
        """What programs import from FlashInfer, and from where."""
        compat.activate()
        module = import_module(f"flashinfer.{path}".rstrip("."))
        assert [name for name in theirs.split() if not callable(getattr(module, name, None))] == []

    def test_what_is_no_kernel(self) -> None:
        compat.activate()
        flashinfer = import_module("flashinfer")
        with flashinfer.autotuner.autotune(True, skip_ops=()):
            attend_one()
        flashinfer.jit.core.logger.setLevel("ERROR")
        assert flashinfer.utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(8, 8) > 0
        assert flashinfer.utils.has_flashinfer_jit_cache() and flashinfer.utils.round_up(17, 8) == 24
        assert flashinfer.utils.PosEncodingMode["ALIBI"].value == 2

    @pytest.mark.parametrize(
        ("capability", "options", "choice"),
        [
            ((9, 0), {}, "fa3"),
            ((8, 0), {}, "fa2"),
            ((9, 0), {"use_custom_mask": True}, "fa2"),
            ((9, 0), {"pos_encoding_mode": 1}, "fa2"),
            ((9, 0), {"dtype_kv": torch.float8_e4m3fn}, "fa2"),
            ((9, 0), {"head_dim_qk": 96, "head_dim_vo": 96}, "fa2"),
            ((9, 0), {"head_dim_qk": 192, "head_dim_vo": 128}, "fa3"),
        ],
    )
    def test_what_programs_ask_of_a_gpu(self, monkeypatch, capability, options, choice) -> None:
        compat.activate()
        utils = import_module("flashinfer.utils")
        properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        utils.get_compute_capability.cache_clear()
        device = torch.device("cuda:0")
        assert utils.is_sm90a_supported(device) == utils.device_support_pdl(device) == (capability == (9, 0))
        assert not utils.is_sm100a_supported(device) and not utils.is_sm12x_supported(device)
        given = {"pos_encoding_mode": 0, "use_fp16_qk_reductions": False, "use_custom_mask": False}
        given |= {"dtype_q": torch.float16, "dtype_kv": torch.float16, **options}
        assert utils.determine_attention_backend(device, **given) == choice
        utils.get_compute_capability.cache_clear()

    @pytest.mark.parametrize("kernel", ["fa2", "fa3"])
    def test_the_variant_with_sinks(self, kernel: str) -> None:
        """FlashInfer declares it with C++ text; a program passes on what it imports."""
        compat.activate()
        text = import_module("flashinfer.jit.attention.variants").attention_sink_decl[kernel]
        name = import_module("flashinfer.jit.utils").filename_safe_dtype_map[torch.float16]
        p = Problem((3, 7), (40, 7), causal=True, window_left=9, sm_scale=0.2)
        jit_args = (f"sink_{name}", p.dtype, p.dtype, p.dtype, torch.int32, 64, 64, ["sink"], ["float"], ["sm_scale"])
        given = {"jit_args": (*jit_args, ["double"], "AttentionSink", text), "jit_kwargs": {"use_sliding_window": True}}
        sinks, cache = torch.randn(4), p.paged(8)
        ragged = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), backend=kernel, **given)
        paged = quire.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"), backend=kernel, **given)
        plan_ragged(ragged, p, plan={"sm_scale": None})
        plan_paged(paged, p, cache, plan={"sm_scale": None})
        p.check(ragged.run(p.q, p.k, p.v, sinks, 0.2), sinks=sinks)
        p.check(paged.run(p.q, cache.kv, sinks, 0.2), sinks=sinks)
        with pytest.raises(quire.ValidationError, match=r"jit_args: expected a quire\.Variant"):
            quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"), jit_args=(*jit_args, "struct Mine {};"))

    @pytest.mark.slow
    def test_command_line(self, tmp_path: Path) -> None:
        script = tmp_path / "serve.py"
        script.write_text(
            "import sys, flashinfer, torch\n"
            "from quire.compat import flashinfer as compat\n"
            "q, k = torch.ones(8, 64), torch.ones(10, 2, 64)\n"
            "print(sys.argv[1:], flashinfer.single_decode_with_kv_cache(q, k, k).sum().item(), __name__)\n"
            "print(compat.report())\n"
        )
        run = [sys.executable, "-m", "quire.compat.flashinfer"]
        environment = {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1])}
        for program in ([str(script), "--x"], ["-m", "serve", "--x"]):
            command = {"cwd": tmp_path, "env": environment, "text": True, "capture_output": True}
            said = subprocess.run([*run, *program], check=False, **command)
            assert said.returncode == 0, said.stderr
            first, second = said.stdout.splitlines()
            assert first == "['--x'] 512.0 __main__"
            assert second.startswith("served   single_decode_with_kv_cache  1 x  attention_cpu")
        usage = subprocess.run(run, check=False, env=environment, text=True, capture_output=True)
        assert usage.returncode == 1 and "[-m MODULE | SCRIPT]" in usage.stderr


class TestOverlay:
    """Over an installed FlashInfer."""

    @pytest.mark.parametrize("first", ["activate", "import"])
    def test_attention_is_ours_and_the_rest_theirs(self, installed: Path, first: str) -> None:
        if first == "import":
            import_module("flashinfer")
        compat.activate()
        assert overlay.is_active() and not standin.is_active()
        flashinfer = import_module("flashinfer")
        assert flashinfer.__version__ == "9.9" and flashinfer.__file__.startswith(str(installed))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        assert wrapper is flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper
        assert quire.BatchDecodeWithPagedKVCacheWrapper in wrapper.__bases__
        assert flashinfer.merge_state is flashinfer.cascade.merge_state
        assert flashinfer.merge_state.__wrapped__ is quire.merge_state
        assert flashinfer.rmsnorm() == flashinfer.decode.cudnn_batch_decode() == "theirs"
        assert flashinfer.cascade.Own.__mro__[1].__module__ == "flashinfer.decode", "their own classes are whole"
        late = import_module("flashinfer.prefill")  # imported after the package
        assert late.single_prefill_with_kv_cache.__wrapped__ is quire.single_prefill_with_kv_cache
        assert late.single_prefill_with_kv_cache_with_jit_module() == "theirs", "their modules run there"
        attend_one()
        assert compat.report().startswith("served   single_prefill_with_kv_cache  1 x  attention_")

    def test_deactivated(self, installed: Path) -> None:
        compat.activate()
        flashinfer = import_module("flashinfer")
        compat.deactivate()
        assert flashinfer.merge_state() == "theirs" and not hasattr(flashinfer, "single_decode_with_kv_cache")
        assert flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.__module__ == "flashinfer.decode"


def test_reports_count_from_activation_on() -> None:
    p = Problem((5,), (40,))
    quire.single_prefill_with_kv_cache(p.q, p.k, p.v)
    compat.activate()
    assert compat.report() == ""
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    wrapper.plan(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 5], [0, 40])), 4, 2, 64, q_data_type=p.dtype)
    for _ in range(3):
        p.check(wrapper.run(p.q, p.k, p.v, **NOTHING))
    (line,) = compat.report().splitlines()
    assert line.split()[:4] == ["served", "BatchPrefillWithRaggedKVCacheWrapper.run", "3", "x"]


def test_reports_count_repeated_calls() -> None:
    p = Problem((5,), (40,))
    compat.activate()
    for _ in range(5):
        p.check(quire.single_prefill_with_kv_cache(p.q, p.k, p.v))
    (line,) = compat.report().splitlines()
    assert line.split()[:4] == ["served", "single_prefill_with_kv_cache", "5", "x"]


def test_served_names_are_those_of_the_public_modules() -> None:
    names = served()
    of_jit_modules = {"single_prefill_with_kv_cache_with_jit_module"}
    assert names["prefill"].keys() == set(quire.prefill.__all__) - of_jit_modules and "BatchAttention" in names[""]
    assert names["mla"].keys() == set(quire.mla.__all__)


def test_entry_points_of_engines() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for group, plugin in (("vllm.general_plugins", "vllm_plugin"), ("sglang.srt.plugins", "sglang_plugin")):
        assert f'[project.entry-points."{group}"]\nquire = "quire.compat.engines:{plugin}"' in text
        assert callable(getattr(engines, plugin))
