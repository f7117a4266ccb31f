"""From config.json to variants: read by fields, and exactly what plan() asks for while such a model is served."""

from __future__ import annotations

import doctest
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from public_calls import ints
from quire.cli import aot, main, presets
from quire.cli.presets import Layer, Serving, needs, read_config
from quire.engine import planner, spec
from quire.errors import ValidationError
from quire.jit import Spec, host_target
from stub_compiler import write_stub

CONFIGS = Path(__file__).parent / "configs"


def read(name: str, options: str = "") -> Serving:
    return read_config(f"{CONFIGS / name}.json{options}")


@pytest.mark.parametrize(
    ("name", "heads", "layers"),
    [
        ("llama-3.1-70b", (64, 8), (Layer(128, 128),)),
        ("qwen2.5-7b", (28, 4), (Layer(128, 128),)),
        ("mistral-7b", (32, 8), (Layer(128, 128, window=True),)),
        ("gemma-2-9b", (16, 8), (Layer(256, 256, window=True, soft_cap=True), Layer(256, 256, soft_cap=True))),
        ("gemma-3-12b", (16, 8), (Layer(256, 256, window=True), Layer(256, 256))),
        ("gpt-oss-120b", (64, 8), (Layer(64, 64, window=True), Layer(64, 64))),
        ("deepseek-v3", (128, 128), (Layer(192, 128),)),
        ("unknown", (16, 1), (Layer(64, 64),)),
        ("mpt-7b", (32, 32), (Layer(128, 128, alibi=True),)),
    ],
)
def test_fields_decide(name: str, heads: tuple[int, int], layers: tuple[Layer, ...]) -> None:
    model = read(name)
    assert ((model.num_qo_heads, model.num_kv_heads), model.layers) == (heads, layers)
    assert model.dtype == "bf16"


def test_options() -> None:
    model = read("llama-3.1-70b", ",tp=16,kv=e4m3,page=64,graph,spec=4,tree")
    assert (model.num_qo_heads, model.num_kv_heads, model.group_size) == (4, 1, 4)
    assert (model.kv_dtype, model.page_size, model.graph, model.spec, model.tree) == ("e4m3", 64, True, 4, True)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (",tp=3", "tp=3: expected a divisor of 64 query heads"),
        (",tp=0", "expected options such as tp=N"),
        (",pages=16", "got 'pages=16'"),
        (",kv=int4", "kv: expected one of"),
    ],
)
def test_wrong_options_are_named(text: str, error: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(error)):
        read("llama-3.1-70b", text)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("[]", "expected a JSON object, got list"),
        ("{", "cannot be read"),
        ("{}", "expected a field num_attention_heads, got no field"),
        ('{"num_attention_heads": "8"}', "num_attention_heads: expected a positive whole number, got '8'"),
        ('{"num_attention_heads": 8}', "expected a field hidden_size, got num_attention_heads"),
        ('{"num_attention_heads": 8, "hidden_size": 64, "dtype": "int4"}', "dtype: expected one of"),
        ('{"num_attention_heads": 8, "kv_lora_rank": 512}', "expected a field qk_nope_head_dim"),
        ("[" * 100_000, "cannot be read"),
    ],
    ids=range(8),
)
def test_wrong_configs_are_named(config: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValidationError, match=re.escape(error)):
        read_config(str(tmp_path))


def test_qwen_with_windows_in_upper_layers() -> None:
    config = json.loads((CONFIGS / "qwen2.5-7b.json").read_text())
    mixed = presets.serving({**config, "use_sliding_window": True, "max_window_layers": 10}, {})
    assert [layer.window for layer in mixed.layers] == [False, True]


@pytest.mark.parametrize(
    "fields", [{"attention_chunk_size": 8192}, {"layer_types": ["chunked_attention", "full_attention"] * 3}]
)
def test_llama_4_has_layers_of_chunks(fields: dict[str, Any]) -> None:
    config = json.loads((CONFIGS / "llama-3.1-70b.json").read_text())
    model = presets.serving({**config, **fields}, {"spec": 3})
    assert [(layer.window, layer.chunked) for layer in model.layers] == [(True, True), (False, False)]
    masks = {spec.slug.split(".")[5] for spec in needs(model, "sm90a").specs if spec.slug.startswith("attention_")}
    assert masks == {"chunked-window", "causal", "none"}


def test_what_no_kernel_does_is_said_and_the_rest_is_given() -> None:
    latent = needs(read("deepseek-v3", ",spec=2"), "sm90a")
    slugs = [spec.slug for spec in latent.specs]
    for wanted in ("d192-128.ragged.causal", "d576-512.paged16.none", "d576-512.paged16.causal"):
        assert any(wanted in slug for slug in slugs)
    assert not latent.refusals
    exact = needs(read("llama-3.1-70b", ",dtype=fp32"), "sm90a")
    assert [text.partition(":")[0] for text in exact.refusals] == ["prefill", "decode"]
    assert all("fp32 is not fp16 or bf16" in text for text in exact.refusals)


def test_kv_heads_are_read_whatever_they_are_called() -> None:
    step = presets.serving({"num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128}, {"tp": 2})
    assert (step.num_qo_heads, step.num_kv_heads) == (32, 4)
    fields = {
        "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4, "head_dim": 256,
        "global_head_dim": 512, "sliding_window": 1024, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    sliding, full = presets.serving(fields, {"tp": 2}).layers
    assert (sliding.num_kv_heads, full.num_kv_heads, full.head_dim_qk) == (0, 2, 512)
    many = presets.serving({**fields, "global_head_dim": None, "num_global_key_value_heads": 1}, {})
    decodes = {
        spec.slug.split(".", 3)[3] for spec in needs(many, "sm90a").specs if spec.slug.startswith("attention_decode")
    }
    assert {"d256-256.paged.none-window.m16", "d256-256.paged.none.m32"} <= decodes
    with pytest.raises(ValidationError, match="fits 4 kv heads"):
        presets.serving({**fields, "num_key_value_heads": 24, "num_attention_heads": 48}, {"tp": 3})


def test_what_the_hub_leaves_out_comes_from_transformers() -> None:
    pytest.importorskip("transformers")
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024, "model_type": "gemma3_text"}
    model = presets.serving({"model_type": "gemma3", "text_config": text}, {})
    assert (model.num_qo_heads, model.num_kv_heads) == (8, 4) and {layer.window for layer in model.layers} == {
        True,
        False,
    }
    with pytest.raises(ValidationError, match="num_attention_heads, and transformers cannot fill it in"):
        presets.serving({"model_type": "no_such_model"}, {})


def test_latents_over_a_cached_prefix_and_chosen_by_an_indexer() -> None:
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    slugs = {spec.slug for spec in needs(presets.serving({**config, "index_topk": 2048}, {}), "sm90a").specs}
    for wanted in (
        "d192-128.ragged.none",
        "d192-128.ragged.causal",
        "attention_mla_fa3.sm90a.bf16-bf16-bf16.d576-512.paged.none",
    ):
        assert any(wanted in slug for slug in slugs), wanted
    assert {slug.partition(".")[0] for slug in slugs} >= {"mqa_logits", "top_tokens", "append_latents", "merge_pair"}
    narrow = {
        spec.slug for spec in needs(presets.serving({**config, "index_topk": 2048}, {"kv": "e4m3"}), "sm90a").specs
    }
    assert any("bf16-e4m3-bf16.d576-512.paged.none-scaled" in slug for slug in narrow)


# --- exactly what plan() asks for ------------------------------------------------------------------------------------


class _Asked(Exception):
    """Ends plan() when its variant is known."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The variants that plan() asks for, as on a Hopper GPU; nothing is compiled."""
    slugs: set[str] = set()

    def get_module(spec: Spec) -> Any:
        slugs.add(spec.slug)
        raise _Asked

    monkeypatch.setattr(planner, "get_module", get_module)
    monkeypatch.setattr(spec, "target_of", lambda device, **_: "sm90a")
    spec._decide.cache_clear()
    yield slugs
    spec._decide.cache_clear()


def _plan(wrapper: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(_Asked):
        wrapper.plan(*arguments, **options)


def serve(model: Serving) -> None:
    """Prompts and chunks of many lengths, and decode, of each kind of layer."""
    small, workspace = (torch.empty(size << 20, dtype=torch.uint8) for size in (1, 64))
    heads, types = (
        (model.num_qo_heads, model.num_kv_heads),
        {"q_data_type": model.dtype, "kv_data_type": model.kv_dtype},
    )
    types = {name: getattr(torch, presets.dtype_of(value, name).torch_name) for name, value in types.items()}
    for layer in model.layers:
        options = {
            "pos_encoding_mode": "ALIBI" if layer.alibi else "NONE",
            "window_left": 127 if layer.window else -1, "logits_soft_cap": 30.0 if layer.soft_cap else 0.0, **types,
        }  # fmt: skip
        lengths = (1, 2, 3, 5, 7, 9, 16, 31, 64, 100, 250, 500, 513, 1000, 5000)
        for qo_len, before in [*((n, 0) for n in lengths), (250, 3000), (1000, 3000)]:
            pages = -(-(qo_len + before) // model.page_size)
            last = ints((qo_len + before - 1) % model.page_size + 1)
            tables = ints(0, qo_len), ints(0, pages), ints(*range(pages)), last
            for memory in (small, workspace):  # which may not, or may, hold widened keys
                prefill = quire.BatchPrefillWithPagedKVCacheWrapper(memory)
                _plan(prefill, *tables, *heads, layer.head_dim_qk, model.page_size, causal=True, **options)
        decode = quire.BatchDecodeWithPagedKVCacheWrapper(workspace)
        for queries in {1, model.spec}:
            tables = ints(0, 1), ints(0), ints(queries)
            _plan(decode, *tables, *heads, layer.head_dim_qk, model.page_size, q_len_per_req=queries, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.1-70b", ""),
        ("llama-3.1-70b", ",tp=8,page=1"),
        ("qwen2.5-7b", ",tp=4,spec=4"),
        ("mistral-7b", ",page=128"),
        ("gemma-2-9b", ",dtype=fp16"),
        ("gemma-3-12b", ""),
        ("gpt-oss-120b", ",tp=2"),
        ("llama-3.1-70b", ",kv=e4m3"),
        ("unknown", ",spec=3"),
        ("mpt-7b", ",tp=2"),
    ],
)
def test_a_preset_is_exactly_what_plan_asks_for(name: str, options: str, asked: set[str]) -> None:
    model = read(name, options)
    serve(model)
    given = {spec.slug for spec in needs(model, "sm90a").specs if spec.slug.startswith("attention_")}
    assert asked == given


def test_plan_for_lists_keys_seconds_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    line = f"{CONFIGS / 'gpt-oss-120b.json'},tp=8,graph"
    assert main(["plan-for", line, "--arch", "9.0a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    assert all(v["seconds"] > 0 and v["bytes"] > 0 and not v["cached"] for v in found)
    assert main(["warmup", "--preset", line, "--arch", "9.0a", "--dry-run", "--json"]) == 0
    assert {v["slug"] for v in json.loads(capsys.readouterr().out)["variants"]} == {v["slug"] for v in found}
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("function", [quire.is_supported, quire.estimate])
def test_examples_run(function: Any) -> None:
    globs = {"quire": quire}
    (test,) = (t for t in doctest.DocTestFinder(recurse=False).find(function, globs=globs) if t.examples)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_estimates_learn_from_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(write_stub(tmp_path / "g++")))
    one, other = (f"append.{host_target()}.u16.v{width}" for width in (1, 8))
    before = quire.estimate(other)
    quire.jit.build(aot.spec_of(one))
    built, after = quire.estimate(one), quire.estimate(other)
    assert (before.cached, built.cached, after.cached) == (False, True, False)
    assert (after.seconds, after.bytes) == (built.seconds, built.bytes) != (before.seconds, before.bytes)
    with pytest.raises(ValidationError, match="slug"):
        quire.estimate("no.such.variant")


def test_estimates_of_what_does_not_say_how_long_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As packages of prebuilt variants do not: the seconds are those of another build, else typical ones."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(write_stub(tmp_path / "g++")))
    one, other = (f"append.{host_target()}.u16.v{width}" for width in (1, 8))
    typical = quire.estimate(one)
    path = quire.jit.build(aot.spec_of(one))[1].path / "manifest.json"
    path.write_text(replace(quire.jit.Manifest.read(path.read_bytes()), seconds=0.0).write())
    packed = quire.estimate(one)
    assert packed.cached and packed.seconds == typical.seconds and packed.bytes != typical.bytes
    quire.jit.build(aot.spec_of(other))
    assert quire.estimate(one).seconds == quire.estimate(other).seconds


def test_support_is_answered_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NVCC", "/nowhere")
    yes = quire.is_supported(head_dim=128, dtype=torch.bfloat16, page_size=16, target="sm90a", rows=8)
    assert yes and yes.slug == "attention_decode.sm90a.bf16-bf16-bf16.d128-128.paged.causal.m16"
    no = quire.is_supported(head_dim=576, head_dim_vo=512, target="sm90a")
    assert not no and "keys are ragged: it takes pages only" in no.reason
    assert quire.is_supported(head_dim=576, head_dim_vo=512, target="sm90a", page_size=64)
    with pytest.raises(ValidationError, match="mask"):
        quire.is_supported(head_dim=64, mask="alibi")


def test_types_are_also_called_as_engines_call_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("llama-3.1-70b", ",kv=fp8").kv_dtype == read("llama-3.1-70b", ",kv=fp8_e4m3").kv_dtype == "e4m3"
    with pytest.raises(ValidationError, match=r"fp8 \(float8_e4m3fn\), nvfp4, got 'int4'"):
        read("llama-3.1-70b", ",kv=int4")
    with pytest.raises(ValidationError, match=r"hf download no/such config\.json"):
        read_config("no/such")
    with pytest.raises(SystemExit):
        main(["warmup", "--head-dim", "128", "--mask", "casual"])
    assert "got 'casual'; did you mean 'causal'?" in capsys.readouterr().err
