"""A server of a known model: its preset is warmed up, the process sealed, and then vLLM's and SGLang's calls compile
nothing. The GPU is not there: the compiler of its kernels is a stub, and launches do nothing. What the calls ask for on
one GPU they ask for on others, whose presets have it too.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine_calls
import quire
from quire import jit
from quire.cli import aot, presets
from quire.cli.presets import needs, read_config
from quire.engine import device, joined, launch, plan_cache, planner, spec
from quire.jit import CudaModule, HostModule, Module, Spec, builder, host_target, machine, stores
from quire.jit.toolchain import Nvcc
from quire.kernels import AttentionProblem, Decision, decide
from quire.kernels.operation import OperationKey
from stub_compiler import handed_out, write_stub

CONFIGS = Path(__file__).parent / "configs"
MODELS = sorted(path.stem for path in CONFIGS.glob("*.json") if path.stem not in ("mpt-7b", "unknown"))
#: How they are served, apart from the engine: (config, words).
SERVED = [(name, "") for name in MODELS]
SERVED += [
    ("llama-3.1-70b", ",tp=8,kv=e4m3,spec=4"), ("command-a", ",tp=4,kv=e4m3,dtype=fp16"), ("gpt-oss-20b", ",spec=3"),
    ("deepseek-v3", ",page=64,spec=3"), ("deepseek-v3.2", ",page=64,kv=e4m3"), ("kimi-k2", ",tp=8,page=64,kv=e4m3"),
    ("qwen3-32b", ",page=32,kv=e5m2"), ("gemma-4-31b", ",page=64,kv=e4m3,spec=2"), ("mimo-v2-flash", ",kv=e4m3"),
    ("llama-4-scout", ",tp=8,spec=4"), ("glm-5", ",tp=8,page=64"), ("step-3.5-flash", ",tp=8,spec=4"),
]  # fmt: skip
#: Those that are not slow: one of each kind of layer.
QUICK = {("gpt-oss-20b", ",spec=3"), ("deepseek-v3.2", ",page=64,kv=e4m3"), ("step3", ""), ("whisper-large-v3", "")}
HOPPER, AMPERE = "sm90a", "sm80"
#: The GPUs on which calls ask for what they ask for on the first: Hopper alone has cascades in one launch, and widened
#: keys. sm_75 has no kernel.
ALIKE = {HOPPER: (HOPPER,), AMPERE: tuple(target for target in machine.CUDA_TARGETS if target not in (HOPPER, "sm75"))}
_EXPORTS = {"kThreads": 128, "kMinCtas": 1, "kSmemBytes": 0}


def parameters() -> Iterator[Any]:
    """All on Hopper; those with words and the quick ones, which have each kind of layer, on other GPUs too. Of those
    that are slow each day has a third; SERVED_MODELS=all has all.
    """
    third = None if os.environ.get("SERVED_MODELS") == "all" else int(os.environ["TESTS_DAY"]) % 3
    for served in SERVED:
        for engine in ("vllm", "sglang"):
            if served not in QUICK and third not in (None, zlib.crc32(f"{served}{engine}".encode()) % 3):
                continue
            marks = () if served in QUICK else (pytest.mark.slow,)
            for target in ALIKE if served[1] or served in QUICK else (HOPPER,):
                yield pytest.param(*served, engine, target, marks=marks, id=f"{served[0]}{served[1]},{engine},{target}")


@pytest.fixture(scope="session")
def host_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the scheduler of the host, which is really compiled."""
    root = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(root / "cache"))
        jit.build(OperationKey("schedule_attention", host_target()).spec())
    return root / "cache"


@pytest.fixture
def target() -> str:
    """The GPU that is not there, unless a test chooses another."""
    return HOPPER


@pytest.fixture
def absent_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_code: Path, target: str) -> Iterator[None]:
    """In here the CPU's tensors are on a GPU whose kernels compute nothing, and the cache has no kernel."""
    shutil.copytree(host_code, tmp_path / "cache", symlinks=True)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_NVCC", str(write_stub(tmp_path / "nvcc")))
    monkeypatch.setattr(Nvcc, "build", handed_out)
    monkeypatch.setattr(stores, "_package_stores", lambda _: ())
    monkeypatch.setattr(jit, "_sealed", False)
    monkeypatch.setattr(builder, "read_exports", lambda _, spec: {n: _EXPORTS.get(n, 1) for n in spec.exports})
    monkeypatch.setattr(device, "host_target", lambda **_: target)
    monkeypatch.setattr(joined, "on_cuda", lambda _: True)
    monkeypatch.setattr(planner, "max_ctas", lambda _, min_ctas: 132 * min_ctas)
    monkeypatch.setattr(plan_cache, "_known", plan_cache._Known())
    monkeypatch.setattr(plan_cache, "_plans", plan_cache._Plans())
    monkeypatch.setattr(CudaModule, "is_loaded", lambda *_: True)
    monkeypatch.setattr(CudaModule, "prepare", lambda *_: None)
    monkeypatch.setattr(CudaModule, "bind", lambda *_, **__: SimpleNamespace(start=lambda stream: None))
    for name in ("encode_tensor_map", "move_tensor_map"):
        monkeypatch.setattr(launch, name, lambda *_, **__: None)
    on_host = launch._launch

    def start(module: Module, params: int, on: torch.device, grid: int, block: int, smem: int = 0) -> None:
        if isinstance(module, HostModule):
            on_host(module, params, on, grid, block, smem)

    monkeypatch.setattr(launch, "_launch", start)
    forget()
    yield
    forget()


def forget() -> None:
    """What was decided and loaded for another GPU."""
    machine.cuda_target.cache_clear()
    spec._decide.cache_clear()
    planner._prepare.cache_clear()
    jit.forget()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[AttentionProblem, str], None]:
    """The problems of calls that a kernel takes, with their backends."""
    problems: dict[tuple[AttentionProblem, str], None] = {}

    def noted(problem: AttentionProblem, backend: str) -> Decision:
        decision = decide(problem, backend)
        problems[problem, backend] = None
        return decision

    monkeypatch.setattr(spec, "decide", noted)
    return problems


@pytest.mark.parametrize(("name", "words", "engine", "target"), [*parameters()])
def test_a_sealed_server_compiles_nothing(
    name: str, words: str, engine: str, target: str, absent_gpu: None, asked: dict[tuple[AttentionProblem, str], None]
) -> None:
    model = read_config(f"{CONFIGS / name}.json,{engine}{words}")
    found = needs(model, target)
    assert not found.refusals
    assert {built.status for built in aot.warm(found.specs)} <= {"built", "hit"}
    quire.seal()
    calls = [*getattr(engine_calls, engine)(model, torch.device("cpu"))]
    assert len(calls) >= 20
    for what, call in calls:
        try:
            call()
        except quire.errors.CacheMissError as error:
            pytest.fail(f"{what}: {error}")
    assert asked
    for other in ALIKE[target]:
        has = {one.slug for one in (found if other == target else needs(model, other)).specs}
        lacks = {decide(replace(problem, target=other), backend).spec.slug for problem, backend in asked} - has
        assert not lacks, f"the preset for {other} has no {', '.join(sorted(lacks))}"


def test_thirty_models_of_all_families_are_served() -> None:
    families = (
        "llama-3", "llama-4", "qwen2.5", "qwen3-", "qwen3-next", "gemma-2", "gemma-3", "gpt-oss", "deepseek-v2",
        "deepseek-v3", "deepseek-v3.2", "kimi", "glm-4.5", "glm-5", "mistral", "mixtral", "phi-3", "phi-4",
        "command-r", "step3", "minimax", "olmo", "granite", "falcon", "stablelm", "whisper",
    )  # fmt: skip
    assert len(MODELS) >= 30
    assert all(any(name.startswith(family) for name in MODELS) for family in families)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-3.1-70b", ",tp=8,kv=e4m3,spec=4"), ("gpt-oss-20b", ",spec=3"), ("deepseek-v3.2", ",page=64"),
        ("deepseek-v3.2", ",page=64,kv=e4m3"), ("step-3.5-flash", ""), ("whisper-large-v3", ""), ("mimo-v2-flash", ""),
    ],
)  # fmt: skip
def test_a_sealed_server_on_a_gpu_compiles_nothing(
    name: str, words: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the GPU that is there, whose calls are planned on it."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    gpu = torch.device("cuda")
    model = read_config(f"{CONFIGS / name}.json,{engine}{words}")
    found = needs(model, device.target_of(gpu))
    assert all(built.error is None for built in aot.warm(found.specs))
    monkeypatch.setattr(jit, "_sealed", False)
    jit.forget()
    allowed, real_build = {one.slug for one in found.specs}, jit.build

    def build(spec: Spec, **options: Any) -> Any:  # the cache may have variants of other tests
        assert spec.slug in allowed, f"the preset has no {spec.slug}"
        return real_build(spec, **options)

    monkeypatch.setattr(jit, "build", build)
    quire.seal()
    for _, call in getattr(engine_calls, engine)(model, gpu):
        call()
    torch.cuda.synchronize()


# --- what a miss says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ALIKE)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-3.1-70b", "sglang,spec=4"), ("llama-3.1-70b", "vllm,kv=e4m3,page=64,spec=4,tree"),
        ("gemma-2-9b", "sglang,dtype=fp16"), ("deepseek-v3.2", "vllm,page=64,kv=e4m3"),
        ("command-a", "sglang,kv=nvfp4"),
        ("modernbert-base", "vllm"), ("gemma-4-31b", "sglang,spec=2,page=32"),
    ],
)  # fmt: skip
def test_each_variant_names_the_words_of_the_preset_that_has_it(name: str, words: str, target: str) -> None:
    path = f"{CONFIGS / name}.json"
    spec_word = next((word for word in words.split(",") if word.startswith("spec=")), "spec=1")
    for one in needs(read_config(f"{path},{words}"), target).specs:
        named = ["dtype=fp16"] if "dtype=fp16" in words and "dtype=fp16" not in one.preset else []
        text = ",".join([path, *one.preset, *named]).replace("spec=N", spec_word)
        if one.slug.startswith("attention_decode") and "causal" in one.slug and "spec=N" not in text:
            text += f",{spec_word}"
        assert one.slug in {spec.slug for spec in needs(read_config(text), target).specs}, text


def test_a_miss_says_which_preset_has_the_variant(absent_gpu: None) -> None:
    quire.seal()
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    offsets = torch.tensor([0, 70], dtype=torch.int32)
    with pytest.raises(quire.errors.CacheMissError, match=re.escape("preset: config.json,ragged of `quire warmup")):
        wrapper.plan(offsets, offsets, 8, 2, 128, causal=True, q_data_type=torch.bfloat16)


def test_words_of_engines_are_words_that_can_be_written_apart() -> None:
    path = f"{CONFIGS / 'llama-3.1-70b'}.json"
    for engine, options in presets._ENGINES.items():
        apart = ",".join(word if value is True else f"{word}={value}" for word, value in options.items())
        assert read_config(f"{path},{engine}") == read_config(f"{path},{apart}")
    assert read_config(f"{path},sglang,page=64").page_size == 64
