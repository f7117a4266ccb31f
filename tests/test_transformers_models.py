"""All models of transformers with attn_implementation="quire": each gives eager's logits or is refused by name."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import quire

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own
transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel  # noqa: E402
from transformers.masking_utils import create_causal_mask  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from quire.compat import transformers as integration  # noqa: E402
from quire.compat.transformers_models import own_attention  # noqa: E402

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
MASKED = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
PAIRS = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES  #: encoder and decoder
#: Names of numbers in configs, and a small one.
SMALL = [
    (r"(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|embedding_size|emb_dim)", 64),
    (r".*(intermediate_size|ffn_dim|n_inner|ffn_hidden_size|d_ff)", 64),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_decoder_layers)", 2),
    (r"(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads)", 4),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads)", 2),
    (r"(head_dim|d_kv)", 32),
    (r"(padded_)?vocab_size(_per_layer_input)?", 128),
    (r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts)", 4),
    (r"(num_experts_per_tok|moe_topk|moe_k|top_k_experts)", 2),
    (r"(n_group|topk_group)", 1),
    (r"(sliding_window|attention_window_size|attention_chunk_size)", 8),
    (r"(q_lora_rank|kv_lora_rank|qk_nope_head_dim|v_head_dim)", 32),
    (r"qk_rope_head_dim", 16),
    (r"(initializer_range|init_std|initializer_factor)", 0.2),  # attention counts
    (r"(max_position_embeddings|n_positions|max_seq_len)", 256),
]
LATENT = {"num_key_value_heads": 4, "head_dim": 16}  #: for models with a latent cache
#: What a small model needs beside small numbers.
MORE = {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "helium": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}


@pytest.fixture(autouse=True, scope="module")
def _registered(one_thread):
    integration.register()


def small_config(kind: type[PreTrainedConfig], **more) -> PreTrainedConfig:
    default = kind()
    values = default.to_dict()
    small = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for name, value in values.items():
        numbers = [number for pattern, number in SMALL if re.fullmatch(pattern, name)]
        if numbers and (type(value) in (int, float) or (value is None and name == "head_dim")):
            small[name] = numbers[0]
    for name in getattr(kind, "sub_configs", {}):
        if isinstance(part := getattr(default, name, None), PreTrainedConfig):
            small[name] = small_config(type(part)).to_dict()
    small |= LATENT if "kv_lora_rank" in values else {}
    return kind(**small | _small_layers(default, values) | MORE.get(kind.model_type, {}) | more)


def _small_layers(default: PreTrainedConfig, values: dict) -> dict:
    """Lists with an entry for each layer: the first of each kind."""
    num_layers, small = getattr(default, "num_hidden_layers", None), {}
    for name, value in values.items():
        if num_layers and isinstance(value, list) and len(value) == num_layers:
            kinds = list({str(one): one for one in value}.values())
            small[name] = (kinds * 2)[: max(2, len(kinds))]
            small["num_hidden_layers"] = len(small[name])
    return small


def auto(names: dict[str, str]):
    return {
        id(CAUSAL): transformers.AutoModelForCausalLM, id(MASKED): transformers.AutoModelForMaskedLM,
        id(PAIRS): transformers.AutoModelForSeq2SeqLM,
    }[id(names)]  # fmt: skip


def new_model(model_type: str, names: dict[str, str], implementation: str):
    """A small random model."""
    torch.manual_seed(0)
    causal = names is CAUSAL and hasattr(CONFIG_MAPPING[model_type](), "is_decoder")
    config = small_config(CONFIG_MAPPING[model_type], **({"is_decoder": True} if causal else {}))
    return auto(names).from_config(config, attn_implementation=implementation).eval()


def padded(pads: tuple[int, ...], left: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 128, (len(pads), 20), generator=torch.Generator().manual_seed(1))
    place = torch.arange(20)[None] if left else torch.arange(20).flip(0)[None]
    seen = (place >= torch.tensor(pads)[:, None]).long()
    return {"input_ids": ids * seen, "attention_mask": seen}


#: Without padding, with right and left padding.
PADS = (((0, 0, 0), False), ((0, 7, 15), False), ((0, 7, 15), True))


@torch.no_grad()
def logits(model: nn.Module, batches: tuple[tuple[tuple[int, ...], bool], ...] = PADS) -> list[torch.Tensor]:
    """Of all tokens that are none of padding."""
    found = []
    for pads, left in batches:
        given = padded(pads, left)
        seen = given["attention_mask"].bool()
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            given, seen = {**given, "decoder_input_ids": padded((0, 0, 0), False)["input_ids"]}, torch.ones(3, 20) > 0
        found.append(model(**given).logits[seen])
    assert all(one.isfinite().all() and one.std() > 0 for one in found)
    return found


def difference(want: list[torch.Tensor], got: list[torch.Tensor]) -> float:
    """The largest difference of logits, relative to the largest logit."""
    return max(float((b - a).abs().max() / a.abs().max()) for a, b in zip(want, got, strict=True))


def outcome(model_type: str, names: dict[str, str], pads: tuple[tuple[tuple[int, ...], bool], ...] = PADS) -> str:
    """'runs' with eager's logits, 'refused', 'wrong', or 'not small': it needs more than small numbers and tokens."""
    try:
        with torch.device("meta"):
            model = new_model(model_type, names, "eager")
        if sum(parameter.numel() for parameter in model.parameters()) > 2e7:
            return "not small"
        eager = new_model(model_type, names, "eager")
        want = logits(eager, pads)
    except Exception:
        return "not small"
    try:
        model = new_model(model_type, names, "quire")
        model.load_state_dict(eager.state_dict())
        worst = difference(want, logits(model, pads))
    except (quire.UnsupportedError, quire.ValidationError):
        return "refused"
    return "runs" if worst < 2e-4 else f"wrong: {worst}"


FAST = [
    "llama",
    "gpt2",
    "opt",
    "mixtral",
    "gpt_neox",
    "phi",
    "bert",
    "bigbird_pegasus",
    "gemma2",
    "qwen3_moe",
    "whisper",
]
REFUSED = ["bloom", "mpt", "xglm", "codegen", "gptj", "gpt_neo", "falcon", "roformer", "deepseek_v32", "deepseek_v4"]


@pytest.mark.parametrize("model_type", FAST)
def test_logits_are_those_of_eager(model_type):
    assert outcome(model_type, CAUSAL) == "runs"


@pytest.mark.parametrize("model_type", ["bart", "nllb-moe", "speech_to_text"])
def test_an_encoder_and_a_decoder(model_type):
    names = PAIRS if model_type in PAIRS else modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    if names is PAIRS:
        assert outcome(model_type, PAIRS) == "runs"
    else:
        assert own_attention(getattr(transformers, names[model_type])) is None


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_compute_attention_themselves_are_refused(model_type):
    """Bloom, for example, adds the mask to its logits: None from make_mask() let token 0 see the last token."""
    config = small_config(CONFIG_MAPPING[model_type], attn_implementation="quire")
    with pytest.raises(quire.UnsupportedError, match=f"(?s){CAUSAL[model_type]}.*attn_implementation=.eager"):
        transformers.AutoModelForCausalLM.from_config(config)


class _Own(nn.Module):
    """Attention as many models of users have it."""

    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        logits = q @ k.mT if attention_mask is None else q @ k.mT + attention_mask
        return (torch.softmax(logits, -1) @ v)[:, 0]


class _Registered(_Own):
    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, None
        )
        return attend(self, q, k, v, attention_mask)[0][:, :, 0]


def _user_model(attention: type[nn.Module]):
    class UserConfig(PreTrainedConfig):
        model_type = "user"
        hidden_size = 32

    class UserModel(PreTrainedModel):
        config_class = UserConfig

        def __init__(self, config):
            super().__init__(config)
            self.attention = attention(config)
            self.attention.config = config

        def forward(self, x):
            return self.attention(x, create_causal_mask(self.config, x, None, None))

    return UserModel(UserConfig(attn_implementation="quire")).eval()


@torch.no_grad()
def test_models_from_elsewhere():
    """A model of a user, or remote code, whose source is perhaps in no file."""
    with pytest.raises(quire.UnsupportedError, match=r"UserModel computes attention itself .*_Own"):
        _user_model(_Own)
    model, x = _user_model(_Registered), torch.randn(2, 9, 32)
    q, k, v = model.attention.qkv(x)[:, None].chunk(3, dim=-1)
    want = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
    assert torch.allclose(model(x), want, atol=1e-5)


def test_an_implementation_assigned_to_a_config():
    """No check sees the model; its masks are refused."""
    config = small_config(transformers.BloomConfig, attn_implementation="eager")
    model = transformers.BloomForCausalLM(config).eval()
    model.config._attn_implementation = "quire"
    with pytest.raises(quire.UnsupportedError, match=r"Bloom.*computes attention itself"), torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))


def test_an_implementation_set_on_a_model():
    """transformers warns, and leaves models without registered functions as they are."""
    model = transformers.BloomForCausalLM(small_config(transformers.BloomConfig, attn_implementation="eager"))
    model.set_attn_implementation("quire")
    assert model.config._attn_implementation == "eager"
    config = small_config(transformers.BigBirdPegasusConfig, attn_implementation="eager")
    model = transformers.BigBirdPegasusForConditionalGeneration(config)
    with pytest.raises(quire.UnsupportedError, match="BigBirdPegasusForConditionalGeneration"):
        model.set_attn_implementation("quire")


def test_parts_of_composite_models():
    """The encoder calls registered functions, the decoder does not and runs eager attention."""
    encoder, decoder = small_config(transformers.BertConfig), small_config(transformers.RemBertConfig, is_decoder=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    models = []
    for implementation in ("eager", "quire"):
        torch.manual_seed(0)
        config._attn_implementation = implementation
        models.append(transformers.EncoderDecoderModel(copy.deepcopy(config)).eval())
    assert models[1].encoder.config._attn_implementation == "quire"
    assert models[1].decoder.config._attn_implementation == "eager"
    assert difference(*(logits(model) for model in models)) < 2e-4


def test_a_part_that_picks_its_class_by_name():
    """SAM's vision encoder looks up the implementation in a dictionary of classes."""
    config = transformers.SamConfig(attn_implementation="quire")
    with torch.device("meta"):
        model = transformers.SamModel(config)
    assert model.vision_encoder.config._attn_implementation == "eager"
    assert model.mask_decoder.config._attn_implementation == "quire"


def test_flash_needs_a_model_with_flash():
    config = small_config(transformers.BloomConfig, attn_implementation="quire_flash_2")
    with pytest.raises(quire.UnsupportedError, match=r"quire_flash_2.*Bloom"):
        transformers.BloomForCausalLM(config)


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "output_attentions"])
def test_arguments_that_change_the_result_are_refused(name):
    """Sparse models pass the keys that they selected beside the mask."""
    q = torch.randn(1, 2, 3, 32)
    with pytest.raises(quire.UnsupportedError, match=name):
        integration.attend(nn.Module(), q, q, q, None, **{name: torch.ones(1)})


#: Names, and how many of their small models must run with eager's logits at least.
EVERY = {"causal": (CAUSAL, 130), "masked": (MASKED, 17), "pairs": (PAIRS, 12)}
#: Files with classes that call registered functions and classes that do not, of which the second are refused.
MIXED = {
    "axk2", "bigbird_pegasus", "bridgetower", "clap", "deepseek_ocr2", "deepseek_v32", "deepseek_v4", "deformable_detr",
    "dots3_note", "evolla", "gemma3n", "gemma4", "git", "glm_moe_dsa", "hy_v4", "informer", "longt5", "mistral_large4",
    "pegasus_x", "pp_doclayout_v2", "sam", "sam_hq", "unlimited_ocr",
}  # fmt: skip
SLOW = {"bamba", "blt", "falcon_h1", "vibevoice_asr", "luke", "perceiver"}  #: to build


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_every_small_model_runs_or_is_refused(kind):
    """Of a padded batch, whose first request has no padding; FAST are those with all kinds of padding."""
    names, least = EVERY[kind]
    found = {name: outcome(name, names, PADS[-1:]) for name in names if name not in SLOW}
    print(kind, {what: list(found.values()).count(what) for what in set(found.values())})
    print("not small:", [name for name in found if found[name] == "not small"])
    assert not {name: what for name, what in found.items() if what.startswith("wrong")}
    assert list(found.values()).count("runs") >= least


def _modeling_files() -> dict[str, str]:
    folder = Path(transformers.__file__).parent / "models"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*/modeling_*.py"))}


def _classes(stem: str) -> list[type[PreTrainedModel]]:
    (path,) = (Path(transformers.__file__).parent / "models").glob(f"*/{stem}.py")
    name = f"transformers.models.{path.parent.name}.{stem}"
    try:
        module = importlib.import_module(name)
    except ImportError:  # of a package that a test environment lacks
        return []
    kinds = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, PreTrainedModel))
    return [kind for kind in kinds if kind.__module__ == name]


@pytest.mark.slow
def test_refused_are_those_whose_source_shows_it():
    """Files that make masks, have attention classes with a softmax, and do not name the interface."""
    shown, refused, mixed = set(), set(), set()
    for stem, text in _modeling_files().items():
        has_interface = "ALL_ATTENTION_FUNCTIONS" in text
        makes_masks = re.search(r"create_(causal|bidirectional|sliding|chunked)\w*\(", text) is not None
        attends = re.search(r"^class \w*Attention\w*\(", text, re.MULTILINE) and re.search("(?i)softmax", text)
        if makes_masks and attends and not has_interface:
            shown.add(stem)
        if any(own_attention(kind) for kind in _classes(stem)):
            if has_interface:
                mixed.add(stem)
            elif makes_masks:
                refused.add(stem)
    assert refused == shown
    assert {stem.removeprefix("modeling_") for stem in mixed} == MIXED
    assert len(shown) > 40
