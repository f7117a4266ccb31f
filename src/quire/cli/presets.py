"""From the config.json of a model to the variants that serving it needs.

Fields decide, not names of models, so a model that is not known yet is read like those that are: head_dim,
num_attention_heads, num_key_value_heads, sliding_window, layer_types, attn_logit_softcapping, kv_lora_rank and their
other spellings. Sinks, scales, group sizes and lengths of windows are run-time values, of which no variant depends.
How a model is served is said by words behind the file: see read_config().
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
from quire.kernels import READS_8_BITS, AttentionProblem, decide, kernel_of, same_rows, variants_for_all_lengths
from quire.kernels.attention import MLA_DIMS, AttentionKey
from quire.kernels.features import NVFP4, DType, MaskMode, PosEncodingMode, dtype_of, kv_dtype_of
from quire.kernels.operation import OperationKey

_LARGEST_CONFIG = 1 << 24  #: bytes
_LONG_ROWS = 4096  #: packed rows of a long prompt
#: Where multimodal models keep the config of the language model.
_NESTED = ("text_config", "llm_config", "language_config")
_QO_HEADS = "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"
_WIDTHS = "hidden_size", "n_embd", "d_model"
_KV_HEADS = "num_key_value_heads", "num_kv_heads", "num_attention_groups", "n_head_kv", "multi_query_group_num"
_ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "mpnet", "electra", "nomic_bert")
_FLAGS = ("graph", "ragged", "cascade", "tree", "custom", "flash")
#: The options of an engine, for which its name stands.
_ENGINES: Mapping[str, Mapping[str, Any]] = {
    "vllm": dict.fromkeys(("graph", "cascade", "flash"), True),
    "sglang": {**dict.fromkeys(("graph", "cascade", "flash", "ragged", "custom"), True), "page": 1},
}
_ALTERNATING = ("gemma2", "gemma3_text", "gpt_oss")  #: models whose configs leave out that some layers have no window
#: What queries see, by the names in `layer_types`.
_KINDS = {
    "full_attention": "full", "attention": "full", "global_attention": "full", "indexed_attention": "full",
    "sliding_attention": "sliding", "sliding_window_attention": "sliding", "chunked_attention": "chunked",
}  # fmt: skip
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
    num_qo_heads: int = 0  #: of one rank, where they are others than the model's
    num_kv_heads: int = 0
    is_cross: bool = False  #: queries see all keys of another sequence, which are in the cache

    @property
    def is_encoder(self) -> bool:
        """Whether keys and values are those of the prompt alone, and in no cache."""
        return not self.causal and not self.is_cross


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
    cascade: bool = False  #: prefixes are computed apart, for one request or for all that share them, and merged
    tree: bool = False  #: draft tokens branch
    custom: bool = False  #: draft tokens are under a mask of bits (custom_mask)
    flash: bool = False  #: calls are FlashAttention's: decode is under a causal mask too, and may divide no keys
    spec: int = 1  #: queries of a request in decode: 1 and the draft tokens
    sparse: bool = False  #: queries attend to the latents that an indexer chooses (DeepSeek V3.2)
    unknown: tuple[str, ...] = ()  #: kinds of layers that are not known

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def of(self, layer: Layer) -> Serving:
        """The same with the heads of a layer."""
        heads = layer.num_qo_heads or self.num_qo_heads, layer.num_kv_heads or self.num_kv_heads
        return replace(self, num_qo_heads=heads[0], num_kv_heads=heads[1])


@dataclass(frozen=True)
class Needs:
    """What serving takes on one target."""

    specs: tuple[Spec, ...]
    refusals: tuple[str, ...]  #: what no kernel does, with the reasons


def read_config(text: str) -> Serving:
    """ "config.json,tp=8,kv=e4m3,page=16,graph" -> how that model is served; ValidationError says what is wrong.

    tp: ranks that share the heads. kv: number type of the cache; dtype: of the rest. page: tokens of a page.
    spec: queries of a request in decode. graph, ragged, cascade, tree, custom, flash: see Serving. vllm, sglang: what
    that engine's backends do; of other options the last one counts.
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
        elif name in _ENGINES and not value:
            options.update(_ENGINES[name])
        elif name in _NUMBERS and value.isascii() and value.isdigit() and int(value):
            options[name] = int(value)
        elif name in _TYPES and value:
            options[name] = (kv_dtype_of if name == "kv" else dtype_of)(value, name).slug
        else:
            spelled = ", ".join((*(f"{n}=N" for n in _NUMBERS), *(f"{n}=TYPE" for n in _TYPES), *_FLAGS, *_ENGINES))
            raise ValidationError(f"config: expected options such as {spelled}; got {word!r}.")
    return options


def serving(config: Mapping[str, Any], options: Mapping[str, Any]) -> Serving:
    """How a model of this config is served with these options."""
    nested: dict[str, Any] = next((config[name] for name in _NESTED if isinstance(config.get(name), dict)), {})
    fields = {**config, **{name: value for name, value in nested.items() if value is not None}}
    if all(fields.get(name) is None for name in _QO_HEADS):
        fields = _with_defaults(config, fields)
    kinds, unknown = _kinds(fields)
    tp = options.get("tp", 1)
    qo_heads, kv_heads = _heads(fields, tp)
    stored = dtype_of(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16", "dtype").slug
    dtype = options.get("dtype") or ("bf16" if stored == "fp32" else stored)  # as engines load float32 checkpoints
    latent = fields.get("kv_lora_rank")
    return Serving(
        model=str(fields.get("model_type", "unknown")), layers=tuple(dict.fromkeys(_layers(fields, kinds, tp))),
        latent=(latent + _number(fields, "qk_rope_head_dim"), latent) if latent else None,
        num_qo_heads=qo_heads, num_kv_heads=kv_heads, dtype=dtype,
        kv_dtype=options.get("kv", dtype), page_size=options.get("page", 16), spec=options.get("spec", 1),
        sparse=bool(latent and fields.get("index_topk")), unknown=unknown,
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


def _heads(fields: Mapping[str, Any], tp: int) -> tuple[int, int]:
    """Query heads and KV heads of one rank."""
    qo = _number(fields, *_QO_HEADS)
    has_one = fields.get("multi_query") and not fields.get("new_decoder_architecture")  # Falcon's first, StarCoder
    kv = 1 if has_one else _number(fields, *_KV_HEADS, default=qo)
    if qo % tp or (kv % tp and tp % kv):
        raise ValidationError(f"config: tp={tp}: expected a divisor of {qo} query heads that fits {kv} kv heads.")
    return qo // tp, max(1, kv // tp)


def _head_dims(fields: Mapping[str, Any]) -> tuple[int, int]:
    if fields.get("kv_lora_rank"):
        qk = _number(fields, "qk_nope_head_dim") + _number(fields, "qk_rope_head_dim")
        return qk, _number(fields, "v_head_dim", default=qk)
    names = ("head_dim", "attention_head_dim", "kv_channels", "head_size")
    has_own = any(fields.get(name) is not None for name in names)
    dim = _number(fields, *names) if has_own else _number(fields, *_WIDTHS) // _number(fields, *_QO_HEADS)
    return dim, _number(fields, "v_head_dim", default=dim)


def _fields_of(fields: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The fields of layers of one kind, to which some models give other heads."""
    other = fields.get("attention_other_setting") or {}
    if kind == "full":
        own = {
            "head_dim": fields.get("global_head_dim"), "num_key_value_heads": fields.get("num_global_key_value_heads"),
        }  # fmt: skip
    else:
        own = {"num_attention_heads": fields.get("num_sliding_attention_heads")}
        own |= {name.removeprefix("swa_"): value for name, value in fields.items() if name.startswith("swa_")}
        own |= other if kind in str(other.get("attention_type")) else {}
    return {**fields, **{name: value for name, value in own.items() if value is not None}}


def _layers(fields: Mapping[str, Any], kinds: list[str], tp: int) -> Iterator[Layer]:
    """The kinds of layers, in order, some of them more than once."""
    models = _heads(fields, tp)
    has_encoder, has_image = bool(fields.get("is_encoder_decoder")), bool(fields.get("cross_attention_layers"))
    is_encoder = fields.get("model_type") in _ENCODERS or any("MaskedLM" in a for a in _architectures(fields))
    for kind in kinds:
        its = _fields_of(fields, kind)
        qk, vo = _head_dims(its)
        qo_heads, kv_heads = (0 if n == m else n for n, m in zip(_heads(its, tp), models, strict=True))
        layer = Layer(
            qk, vo, window=kind != "full", chunked=kind == "chunked",
            soft_cap=bool(fields.get("attn_logit_softcapping")), causal=not is_encoder, alibi=_has_alibi(fields),
            num_qo_heads=qo_heads, num_kv_heads=kv_heads,
        )  # fmt: skip
        yield layer
        if has_encoder or has_image:
            yield replace(layer, causal=False, is_cross=True)
        if has_encoder:
            yield replace(layer, causal=False)


def _has_alibi(fields: Mapping[str, Any]) -> bool:
    """Whether positions are a bias of logits (Bloom, MPT, Falcon's first)."""
    nested = fields.get("attn_config")
    own = fields.get("alibi") or fields.get("position_embedding_type") == "alibi" or fields.get("model_type") == "bloom"
    return bool(own or (isinstance(nested, dict) and nested.get("alibi")))


def _architectures(fields: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in fields.get("architectures") or ()]


def _kinds(fields: Mapping[str, Any]) -> tuple[list[str], tuple[str, ...]]:
    """Of each kind of layer, what its queries see: "full", the keys in a "sliding" window, or those of a chunk; and the
    kinds that are not known. Layers that run no attention (mamba, linear attention, ...) are left out.
    """
    types = fields.get("layer_types")
    if not isinstance(types, list) or not types:
        return _kinds_of_windows(fields), ()
    names = [str(kind) for kind in types if "attention" in str(kind) and "linear" not in str(kind)]
    known = {name: _KINDS.get(name) for name in names}
    return [kind for name in names if (kind := known[name])], tuple(name for name, kind in known.items() if not kind)


def _kinds_of_windows(fields: Mapping[str, Any]) -> list[str]:
    """The kinds of a model that does not list them."""
    if fields.get("attention_chunk_size"):  # every few layers see everything
        return ["chunked", "full"]
    if fields.get("local_attention"):
        return ["full", "sliding"]
    if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
        return ["full"]
    first = fields.get("max_window_layers") if fields.get("use_sliding_window") else None
    if first is not None:  # Qwen: the layers below see everything
        layers = _number(fields, "num_hidden_layers")
        return [*(["full"] if first > 0 else []), *(["sliding"] if first < layers else [])]
    alternates = fields.get("sliding_window_pattern") or fields.get("hybrid_layer_pattern")
    return ["sliding", "full"] if alternates or fields.get("model_type") in _ALTERNATING else ["sliding"]


# --- variants --------------------------------------------------------------------------------------------------------


def needs(model: Serving, target: str) -> Needs:
    """The variants that serving `model` on `target` takes, whatever the lengths, and what no kernel does there."""
    specs: dict[str, Spec] = {}
    refusals = [f"layers of {kind}: expected some of {', '.join(_KINDS)}" for kind in model.unknown]
    for what, problem, lengths_vary in _problems(model, target):
        backend = READS_8_BITS if problem.q.bits == 8 else "auto"
        try:
            decision = decide(problem, backend)
        except UnsupportedError as error:
            refusals.append(f"{what}: {error}")
        else:
            specs[decision.spec.slug] = decision.spec
        # Calls never let keys be divided with num_splits=1, a default of FlashAttention-3's varlen function.
        sizes = (0, -1) if model.flash and not problem.uniform else (0,)
        for size in sizes if lengths_vary else ():
            variants = variants_for_all_lengths(replace(problem, fixed_split_size=size), backend)
            specs.update({spec.slug: spec for spec in variants})
    keys = [AttentionKey.parse(slug) for slug in specs]
    operations = [operation for key in keys if (operation := kernel_of(key).planning(key))]
    for operation in (*operations, *_operations(model, target)):
        specs[operation.slug] = operation.spec()
    return Needs(tuple(specs.values()), tuple(refusals))


Wanted = tuple[str, AttentionProblem, bool]  #: what for, problem, whether its number of rows depends on lengths


def _problems(model: Serving, target: str) -> Iterator[Wanted]:
    q, kv = dtype_of(model.dtype, "dtype"), kv_dtype_of(model.kv_dtype, "kv_dtype")
    for layer in model.layers:
        whole = _problem(layer, target, q, kv, model.page_size)
        ragged = replace(whole, page_size=0, kv=q)
        if layer.is_encoder:
            yield "prefill", ragged, True
            if layer.window:  # beyond the window's right end, which short prompts do not have, bits say what is seen
                yield "prefill", replace(ragged, mask=MaskMode.CUSTOM), True
        elif model.latent is not None:  # keys and values are made for the prompt alone
            yield "prefill", ragged, True
            yield "prefill over a cached prefix", replace(ragged, mask=MaskMode.NONE), True
        elif layer.is_cross:
            yield "cross attention", whole, True
        else:
            yield from _over_cache(model.of(layer), layer, whole, ragged)
    if model.latent is not None:
        yield from _over_latents(model, _problem(Layer(*model.latent), target, q, kv, model.page_size))


def _over_cache(model: Serving, layer: Layer, whole: AttentionProblem, ragged: AttentionProblem) -> Iterator[Wanted]:
    """Layers whose keys and values are all in the cache."""
    yield "prefill", whole, True
    yield from _over_8_bits("prefill", whole, model.flash)
    if model.flash and layer.chunked:  # engines make requests of chunks
        yield "prefill of chunks", replace(whole, mask=MaskMode.CAUSAL, window=False), True
    if model.ragged:
        yield "ragged prefill", ragged, True
    if model.cascade and not layer.window:
        prefix = replace(whole, mask=MaskMode.NONE)
        yield "prefill over a shared prefix", prefix, True
        yield from _over_8_bits("prefill over a shared prefix", prefix, model.flash)
        levels = [replace(whole, mask=mask, cascade=True) for mask in (MaskMode.NONE, MaskMode.CAUSAL)]
        if not whole.on_cuda or whole.target == "sm90a":  # others compute levels one by one
            yield from (("cascade", problem, True) for problem in levels if _is_taken(problem, "auto"))
    yield from _decodes(model, whole)


def _is_taken(problem: AttentionProblem, backend: str) -> bool:
    try:
        decide(problem, backend)
    except UnsupportedError:
        return False
    return True


def _over_8_bits(what: str, problem: AttentionProblem, flash: bool) -> Iterator[Wanted]:
    """Long prompts may attend to widened keys; FlashAttention-3's functions multiply 8-bit queries as they are."""
    if problem.kv.bits > 8 or problem.target != "sm90a":
        return
    if not problem.window:
        for rows in (_LONG_ROWS // 2, _LONG_ROWS):
            yield f"{what} over widened keys", replace(problem, kv=problem.q, rows=rows), False
    narrow = replace(problem, q=problem.kv)
    if flash and problem.q.slug == "bf16" and _is_taken(narrow, READS_8_BITS):
        yield f"{what} of 8-bit queries", narrow, True


def _over_latents(model: Serving, whole: AttentionProblem) -> Iterator[Wanted]:
    """Decode of latents, for which all query heads share one KV head."""
    one = replace(model, num_kv_heads=1)
    yield from _decodes(one, whole)
    if model.sparse:  # the tokens that queries see are pages of one; latents of 8 bits then have scales
        tokens = replace(whole, page_size=1, mask=MaskMode.NONE)
        yield from _decodes(replace(one, spec=1, flash=False), replace(tokens, tile_scales=whole.kv.bits == 8))
        prompt = replace(tokens, kv=whole.q, rows=same_rows(model.num_qo_heads))
        yield "sparse prefill", prompt, False
        yield "sparse prefill, with its largest logits", replace(prompt, max_logits=True), False


def _problem(layer: Layer, target: str, q: DType, kv: DType, page_size: int) -> AttentionProblem:
    return AttentionProblem(
        target, q, kv, q, layer.head_dim_qk, layer.head_dim_vo, page_size,
        MaskMode.CHUNKED if layer.chunked else MaskMode.CAUSAL if layer.causal else MaskMode.NONE,
        layer.window, layer.soft_cap, rows=_LONG_ROWS,
        uniform=False, is_mla=(layer.head_dim_qk, layer.head_dim_vo) == MLA_DIMS,
        pos_encoding=PosEncodingMode.ALIBI if layer.alibi else PosEncodingMode.NONE,
    )  # fmt: skip


def _decodes(model: Serving, prefill: AttentionProblem) -> Iterator[Wanted]:
    """One query of a request sees all keys; draft tokens are under a causal mask, that of their tree or one of bits. In
    layers of chunks both see those of their chunk.
    """
    rows, chunks = same_rows(model.group_size), prefill.mask is MaskMode.CHUNKED
    step = replace(prefill, mask=prefill.mask if chunks else MaskMode.NONE, rows=rows, uniform=True)
    yield "decode", step, False
    if model.flash and prefill.is_mla:
        yield "decode", replace(step, mask=MaskMode.CAUSAL), False
    if model.spec > 1:
        mask = prefill.mask if chunks else MaskMode.TREE if model.tree else MaskMode.CAUSAL
        drafts = replace(step, mask=mask, rows=same_rows(model.spec * model.group_size))
        yield "speculative decode", drafts, False
        if model.custom and not (chunks or prefill.is_mla):
            yield "speculative decode under a mask of bits", replace(drafts, mask=MaskMode.CUSTOM), True


def _operations(model: Serving, target: str) -> Iterator[OperationKey]:
    """Planning on the host or the device, appending to the cache, merging states."""
    yield OperationKey("schedule_attention", host_target())
    target = without_matrix_unit(target)
    if model.graph and target.startswith("sm"):
        yield OperationKey("schedule_lengths", target)
    if (model.custom and model.spec > 1) or any(layer.is_encoder and layer.window for layer in model.layers):
        yield OperationKey("packbits", target)
    if any(not layer.is_encoder for layer in model.layers):
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
