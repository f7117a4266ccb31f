"""From the config.json of a model to the variants that serving it needs.

Fields decide, not names of models, so a model that is not known yet is read like those that are: head_dim,
num_attention_heads, num_key_value_heads, sliding_window, layer_types, attn_logit_softcapping, kv_lora_rank and their
older spellings. Sinks, scales, group sizes and lengths of windows are run-time values, of which no variant depends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.errors import UnsupportedError, ValidationError
from quire.jit import Spec, host_target, without_matrix_unit
from quire.kernels import AttentionProblem, decide, kernel_of, same_rows, variants_for_all_lengths
from quire.kernels.attention import MLA_DIMS, AttentionKey
from quire.kernels.features import NVFP4, DType, MaskMode, PosEncodingMode, dtype_of, kv_dtype_of
from quire.kernels.operation import OperationKey

_LARGEST_CONFIG = 1 << 24  #: bytes
_LONG_ROWS = 4096  #: packed rows of a long prompt
#: Where multimodal models keep the config of the language model.
_NESTED = ("text_config", "llm_config", "language_config")
_QO_HEADS = "num_attention_heads", "n_head", "num_heads", "n_heads"
_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "num_attention_groups", "n_head_kv", "multi_query_group_num",
)  # fmt: skip
_GLOBAL_KV_HEADS = "num_global_key_value_heads"  #: of layers without a window
_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "mpnet", "electra", "nomic_bert")
_FLAGS = ("graph", "ragged", "cascade", "tree")
_NUMBERS = ("tp", "page", "spec")
_TYPES = ("kv", "dtype")


@dataclass(frozen=True)
class Layer:
    """One kind of attention layer."""

    head_dim_qk: int
    head_dim_vo: int
    window: bool = False
    chunked: bool = False  #: the window is the query's own chunk (Llama 4)
    soft_cap: bool = False
    causal: bool = True
    alibi: bool = False
    num_kv_heads: int = 0  #: of one rank, where they are others than the model's


@dataclass(frozen=True)
class Serving:
    """A model, and how it is served."""

    model: str
    layers: tuple[Layer, ...]  #: each kind once
    latent: tuple[int, int] | None  #: head dims of decode where keys and values are compressed (MLA)
    num_qo_heads: int  #: of one rank
    num_kv_heads: int
    dtype: str
    kv_dtype: str
    page_size: int = 16
    graph: bool = False  #: decode plans on the device
    ragged: bool = False  #: prompts without a prefix are computed from ragged keys and values too
    cascade: bool = False  #: states are merged
    tree: bool = False  #: draft tokens branch
    spec: int = 1  #: queries of a request in decode: 1 and the draft tokens
    sparse: bool = False  #: queries attend to the latents that an indexer chooses (DeepSeek V3.2)

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class Needs:
    """What serving takes on one target."""

    specs: tuple[Spec, ...]
    refusals: tuple[str, ...]  #: what no kernel does, with the reasons


def read_config(text: str) -> Serving:
    """ "config.json,tp=8,kv=e4m3,page=16,graph" -> how that model is served; ValidationError says what is wrong.

    tp: ranks that share the heads. kv: number type of the cache; dtype: of the rest. page: tokens of a page.
    spec: queries of a request in decode. graph, ragged, cascade, tree: see Serving.
    """
    name, *words = text.split(",")
    return serving(_read(Path(name).expanduser()), _options(words))


def _read(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_LARGEST_CONFIG))
    except FileNotFoundError as error:
        hub = f"; `hf download {path} config.json` gets that of a model of the Hub" if len(path.parts) == 2 else ""
        raise ValidationError(f"config: expected a file or directory, and there is no {path}{hub}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValidationError(f"config: {path} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ValidationError(f"config: {path}: expected a JSON object, got {type(config).__name__}.")
    return config


def _options(words: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = word.strip().partition("=")
        if name in _FLAGS and not value:
            options[name] = True
        elif name in _NUMBERS and value.isascii() and value.isdigit() and int(value):
            options[name] = int(value)
        elif name in _TYPES and value:
            options[name] = (kv_dtype_of if name == "kv" else dtype_of)(value, name).slug
        else:
            spelled = ", ".join((*(f"{n}=N" for n in _NUMBERS), *(f"{n}=TYPE" for n in _TYPES), *_FLAGS))
            raise ValidationError(f"config: expected options such as {spelled}; got {word!r}.")
    return options


def serving(config: Mapping[str, Any], options: Mapping[str, Any]) -> Serving:
    """How a model of this config is served with these options."""
    nested: dict[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    fields = {**config, **{name: value for name, value in nested.items() if value is not None}}
    if all(fields.get(name) is None for name in _QO_HEADS):
        fields = _with_defaults(config, fields)
    qo_heads = _number(fields, *_QO_HEADS)
    kv_heads = _number(fields, *_KV_HEADS, default=1 if fields.get("multi_query") else qo_heads)
    tp = options.get("tp", 1)
    for heads in {kv_heads, _number(fields, _GLOBAL_KV_HEADS, default=kv_heads)}:
        if qo_heads % tp or (heads % tp and tp % heads):
            raise ValidationError(
                f"config: tp={tp}: expected a divisor of {qo_heads} query heads that fits {heads} kv heads."
            )
    stored = dtype_of(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16", "dtype").slug
    dtype = options.get("dtype") or ("bf16" if stored == "fp32" else stored)  # as engines load float32 checkpoints
    latent = fields.get("kv_lora_rank")
    return Serving(
        model=str(fields.get("model_type", "unknown")), layers=tuple(dict.fromkeys(_layers(fields, qo_heads, tp))),
        latent=(latent + _number(fields, "qk_rope_head_dim"), latent) if latent else None,
        num_qo_heads=qo_heads // tp, num_kv_heads=max(1, kv_heads // tp), dtype=dtype,
        kv_dtype=options.get("kv", dtype), page_size=options.get("page", 16), spec=options.get("spec", 1),
        sparse=bool(latent and fields.get("index_topk")),
        **{name: True for name in _FLAGS if options.get(name)},
    )  # fmt: skip


def _with_defaults(config: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, and those that the model's class in transformers fills in, as some configs on the Hub need."""
    if find_spec("transformers") is None or not isinstance(config.get("model_type"), str):
        return fields
    from transformers import AutoConfig  # takes seconds

    try:
        filled = AutoConfig.for_model(**config).to_dict()
    except Exception as error:  # of a class of transformers: it does not know the model, or the config is wrong
        raise ValidationError(
            f"config: expected a field {_QO_HEADS[0]}, and transformers cannot fill it in: {error}."
        ) from error
    nested: dict[str, Any] = next((filled[name] for name in _NESTED if isinstance(filled.get(name), dict)), {})
    return {**{name: value for name, value in {**filled, **nested}.items() if value is not None}, **fields}


def _number(fields: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these fields that is set; ValidationError if none is a positive whole number."""
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValidationError(f"config: {name}: expected a positive whole number, got {value!r}.")
        return value
    if default is None:
        raise ValidationError(
            f"config: expected a field {names[0]}, got {', '.join(sorted(fields)[:20]) or 'no field'}."
        )
    return default


def _head_dims(fields: Mapping[str, Any], qo_heads: int) -> tuple[int, int]:
    if fields.get("kv_lora_rank"):
        qk = _number(fields, "qk_nope_head_dim") + _number(fields, "qk_rope_head_dim")
        return qk, _number(fields, "v_head_dim", default=qk)
    names = ("head_dim", "attention_head_dim", "kv_channels", "head_size")
    has_own = any(fields.get(name) is not None for name in names)
    dim = _number(fields, *names) if has_own else _number(fields, "hidden_size", "n_embd", "d_model") // qo_heads
    return dim, _number(fields, "v_head_dim", default=dim)


def _layers(fields: Mapping[str, Any], qo_heads: int, tp: int) -> Iterator[Layer]:
    """The kinds of layers, in order, some of them more than once."""
    qk, vo = _head_dims(fields, qo_heads)
    wide = fields.get("global_head_dim")
    heads = _number(fields, _GLOBAL_KV_HEADS) if fields.get(_GLOBAL_KV_HEADS) is not None else 0
    causal = fields.get("model_type") not in _ENCODERS and not any("MaskedLM" in a for a in _architectures(fields))
    for kind in _kinds(fields):
        window = kind != "full"
        dims = (wide, wide) if wide and not window else (qk, vo)
        yield Layer(
            dims[0], dims[1], window=window, chunked=kind == "chunked",
            soft_cap=bool(fields.get("attn_logit_softcapping")), causal=causal, alibi=_has_alibi(fields),
            num_kv_heads=max(1, heads // tp) if heads and not window else 0,
        )  # fmt: skip


def _has_alibi(fields: Mapping[str, Any]) -> bool:
    """Whether positions are a bias of logits (Bloom, MPT, Falcon's first)."""
    nested = fields.get("attn_config")
    own = fields.get("alibi") or fields.get("position_embedding_type") == "alibi" or fields.get("model_type") == "bloom"
    return bool(own or (isinstance(nested, dict) and nested.get("alibi")))


def _architectures(fields: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in fields.get("architectures") or ()]


def _kinds(fields: Mapping[str, Any]) -> list[str]:
    """Of each kind of layer, what its queries see: "full", the keys in a "sliding" window, or those of a chunk."""
    types = fields.get("layer_types")
    if isinstance(types, list) and types:  # layers of other kinds (linear attention, ...) run no attention kernel
        attention = [str(kind) for kind in types if "attention" in str(kind) and "linear" not in str(kind)]
        return [next((word for word in ("sliding", "chunked") if word in kind), "full") for kind in attention]
    if fields.get("attention_chunk_size"):  # every few layers see everything
        return ["chunked", "full"]
    if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
        return ["full"]
    first = fields.get("max_window_layers") if fields.get("use_sliding_window") else None
    if first is not None:  # Qwen: the layers below see everything
        layers = _number(fields, "num_hidden_layers")
        return [*(["full"] if first > 0 else []), *(["sliding"] if first < layers else [])]
    alternates = fields.get("sliding_window_pattern") or fields.get("model_type") in (
        "gemma2",
        "gemma3_text",
        "gpt_oss",
    )
    return ["sliding", "full"] if alternates else ["sliding"]


# --- variants --------------------------------------------------------------------------------------------------------


def needs(model: Serving, target: str) -> Needs:
    """The variants that serving `model` on `target` takes, whatever the lengths, and what no kernel does there."""
    specs: dict[str, Spec] = {}
    refusals: list[str] = []
    for what, problem, lengths_vary in _problems(model, target):
        try:
            decision = decide(problem)
        except UnsupportedError as error:
            refusals.append(f"{what}: {error}")
        else:
            specs[decision.spec.slug] = decision.spec
        if lengths_vary:
            specs.update({spec.slug: spec for spec in variants_for_all_lengths(problem, "auto")})
    keys = [AttentionKey.parse(slug) for slug in specs]
    operations = [operation for key in keys if (operation := kernel_of(key).planning(key))]
    for operation in (*operations, *_operations(model, target)):
        specs[operation.slug] = operation.spec()
    return Needs(tuple(specs.values()), tuple(refusals))


def _problems(model: Serving, target: str) -> Iterator[tuple[str, AttentionProblem, bool]]:
    """(what for, problem, whether its number of rows depends on lengths)."""
    q, kv = dtype_of(model.dtype, "dtype"), kv_dtype_of(model.kv_dtype, "kv_dtype")
    for layer in model.layers:
        whole = _problem(layer, target, q, kv, model.page_size)
        ragged = replace(whole, page_size=0, kv=q)
        if model.latent is not None or not layer.causal:  # keys and values are made for the prompt alone
            yield "prefill", ragged, True
            if model.latent is not None:  # a chunk, and its prefix from the cache, which it sees whole
                yield "prefill over a cached prefix", replace(ragged, mask=MaskMode.NONE), True
            continue
        yield "prefill", whole, True
        if kv.bits <= 8 and target == "sm90a" and not layer.window:  # long prompts may attend to widened keys
            yield "prefill over widened keys", replace(whole, kv=q), False
        if model.ragged:
            yield "ragged prefill", ragged, True
        yield from _decodes(replace(model, num_kv_heads=layer.num_kv_heads or model.num_kv_heads), whole)
    if model.latent is not None:
        one = replace(model, num_kv_heads=1)
        whole = _problem(Layer(*model.latent), target, q, kv, model.page_size)
        yield from _decodes(one, whole)
        if model.sparse:  # the tokens that queries see are pages of one; latents of 8 bits then have scales
            tokens = replace(whole, page_size=1, mask=MaskMode.NONE)
            yield from _decodes(replace(one, spec=1), replace(tokens, tile_scales=kv.bits == 8))
            yield "sparse prefill", replace(tokens, kv=q, rows=same_rows(model.num_qo_heads)), False


def _problem(layer: Layer, target: str, q: DType, kv: DType, page_size: int) -> AttentionProblem:
    return AttentionProblem(
        target, q, kv, q, layer.head_dim_qk, layer.head_dim_vo, page_size,
        MaskMode.CHUNKED if layer.chunked else MaskMode.CAUSAL if layer.causal else MaskMode.NONE,
        layer.window, layer.soft_cap, rows=_LONG_ROWS,
        uniform=False, is_mla=(layer.head_dim_qk, layer.head_dim_vo) == MLA_DIMS,
        pos_encoding=PosEncodingMode.ALIBI if layer.alibi else PosEncodingMode.NONE,
    )  # fmt: skip


def _decodes(model: Serving, prefill: AttentionProblem) -> Iterator[tuple[str, AttentionProblem, bool]]:
    """One query of a request sees all keys; draft tokens are under a causal mask or that of their tree. In layers of
    chunks both see those of their chunk.
    """
    rows, chunks = same_rows(model.group_size), prefill.mask is MaskMode.CHUNKED
    yield "decode", replace(prefill, mask=prefill.mask if chunks else MaskMode.NONE, rows=rows, uniform=True), False
    if model.spec > 1:
        mask = prefill.mask if chunks else MaskMode.TREE if model.tree else MaskMode.CAUSAL
        rows = same_rows(model.spec * model.group_size)
        yield "speculative decode", replace(prefill, mask=mask, rows=rows, uniform=True), False


def _operations(model: Serving, target: str) -> Iterator[OperationKey]:
    """Planning on the host or the device, appending to the cache, merging states."""
    yield OperationKey("schedule_attention", host_target())
    target = without_matrix_unit(target)
    if model.graph and target.startswith("sm"):
        yield OperationKey("schedule_lengths", target)
    if any(layer.causal for layer in model.layers):
        kv = kv_dtype_of(model.kv_dtype, "kv_dtype")
        append = ("append_nvfp4", target, model.dtype) if kv is NVFP4 else ("append", target, f"u{kv.bits}")
        yield from OperationKey(*append).family()
        if kv.bits <= 8 and target == "sm90a":
            yield from OperationKey("widen", target, model.dtype).family()
    if model.sparse:
        yield from OperationKey("mqa_logits", target).family()
        yield from OperationKey("top_tokens", target, "fp32").family()
        yield from OperationKey("append_latents", target, model.dtype).family()
    if model.cascade or model.latent is not None:
        for name in ("merge", "merge_pair"):
            yield from OperationKey(name, target, model.dtype).family()
