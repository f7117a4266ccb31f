"""attn_implementation="quire" on small models with random weights, beside transformers' own attention."""

from __future__ import annotations

import cProfile
import doctest
import math

import pytest
import torch
from torch import Tensor

import oracle
import quire

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own
transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers.masking_utils import causal_mask_function  # noqa: E402

from quire.compat import transformers as integration  # noqa: E402
from quire.compat.flash_attn import flash_attn_func  # noqa: E402
from quire.engine import plan_cache  # noqa: E402

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"]
#: Name: its config, and the implementation to compare with: sdpa knows neither soft caps nor sinks.
MODELS = {
    "Llama": ({}, "sdpa"),
    "Qwen3": ({}, "sdpa"),
    "Mistral": ({"sliding_window": 8}, "sdpa"),
    "Gemma2": ({"sliding_window": 8, "layer_types": TYPES, "attn_logit_softcapping": 2.0}, "eager"),
    "Gemma3": ({"sliding_window": 8, "layer_types": TYPES}, "sdpa"),
    "GptOss": ({"sliding_window": 8, "layer_types": TYPES, "num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),
    "DeepseekV3": (
        {
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "n_routed_experts": 4, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        },
        "sdpa",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _registered(one_thread):
    integration.register()


def new_model(name: str, dtype: torch.dtype = torch.float32):
    """A model of random weights, one for each name."""
    torch.manual_seed(len(name))
    more, _ = MODELS[name]
    stem = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{stem}Config")(**{**SIZES, **more})
    kind = {"Gemma3": "Gemma3ForCausalLM"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, kind)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 and not parameter.any():  # sinks
            torch.nn.init.normal_(parameter)
    return model.to(dtype)


def prompts(pads: tuple[int, ...] = (0, 0)) -> dict[str, Tensor]:
    """Requests of 20 tokens, of which the first are padding."""
    ids = torch.randint(3, 128, (len(pads), 20), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generated(model, implementation: str, num_tokens: int = 64, pads: tuple[int, ...] = (0, 5, 13), **options):
    """Greedy tokens [batch, num_tokens], and the logits that chose them."""
    model.set_attn_implementation(implementation)
    given = prompts(pads)
    done = model.generate(
        **given, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return done.sequences[:, given["input_ids"].shape[1] :], torch.stack(done.logits)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).abs().max() <= 1e-4 * want[1].abs().max()


PADDED = ("Llama", "Gemma2", "GptOss")  #: the others' padded batches are slow tests


def slow_but(*fast: str) -> list[object]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in MODELS]


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("name", "pads"),
    [pytest.param(name, (0, 5, 13), marks=() if name in PADDED else pytest.mark.slow) for name in MODELS]
    + [pytest.param(name, (0,), marks=() if name == "Mistral" else pytest.mark.slow) for name in MODELS],
)
def test_greedy_tokens_of_a_dynamic_cache(name, pads):
    model = new_model(name)
    want = generated(model, MODELS[name][1], pads=pads)
    assert want[0].unique().numel() > 10  # a model that repeats one token shows nothing
    assert_same(generated(model, "quire", pads=pads), want)


@pytest.mark.parametrize("name", slow_but("Llama", "GptOss"))
def test_greedy_tokens_of_a_static_cache(name):
    model = new_model(name)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert_same(generated(model, "quire", **static), generated(model, MODELS[name][1]))


@pytest.mark.parametrize("name", slow_but("Llama"))
def test_logits_in_bfloat16(name, device):
    """At most twice as far from float32's as those of transformers' own attention."""
    _, reference = MODELS[name]
    given, logits = prompts((0, 5, 13)), {}
    for dtype, implementation in ((torch.float32, reference), (torch.bfloat16, reference), (torch.bfloat16, "quire")):
        model = new_model(name, dtype).to(device)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            rows = model(**{key: tensor.to(device) for key, tensor in given.items()}).logits.float().cpu()
        logits[dtype, implementation] = rows[given["attention_mask"].bool()]
    truth = logits[torch.float32, reference]
    own, ours = ((logits[torch.bfloat16, who] - truth).square().mean().sqrt() for who in (reference, "quire"))
    assert ours <= 2 * own


def bert(layers: int = 3):
    torch.manual_seed(3)
    sizes = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "head_dim")}
    config = transformers.ModernBertConfig(
        **{**sizes, "hidden_size": 128, "num_hidden_layers": layers}, local_attention=8, global_attn_every_n_layers=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config).eval()


@pytest.mark.parametrize("pads", [(0, 0), (0, 9)])
def test_an_encoder_with_local_attention(pads):
    model, given, logits = bert(), prompts(pads), {}
    for implementation in ("sdpa", "quire"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits[implementation] = model(**given).logits[given["attention_mask"].bool()]
    assert torch.allclose(logits["quire"], logits["sdpa"], atol=1e-4 * logits["sdpa"].abs().max())


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("spelling", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_do_not_see_each_other(use_cache, spelling):
    """transformers makes a mask of them without a cache; with one, only position_ids and cu_seq_lens tell."""
    model = new_model("Llama")
    lens, ids = (7, 1, 12), prompts((0,))["input_ids"]
    parts = ids.split(lens, dim=1)
    more = {"position_ids": torch.cat([torch.arange(n) for n in lens])[None]}
    if spelling == "cu_seq_lens":
        offsets = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
        more |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        want = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
        model.set_attn_implementation("quire")
        got = model(ids, use_cache=use_cache, **more).logits
    assert torch.allclose(got, want, atol=1e-4 * want.abs().max())


def test_a_prompt_in_chunks_and_drafts():
    """Queries behind what the cache has: prefill in chunks, and drafts that are looked up in the prompt."""
    model = new_model("Llama")
    want = generated(model, "sdpa", pads=(0,))
    assert_same(generated(model, "quire", pads=(0,), prefill_chunk_size=6), want)
    assert torch.equal(generated(model, "quire", pads=(0,), prompt_lookup_num_tokens=4)[0], want[0])


def test_beams_and_flash():
    model = new_model("Qwen3")
    want = generated(model, "sdpa", num_tokens=16, num_beams=3)
    assert torch.equal(generated(model, "quire", num_tokens=16, num_beams=3)[0], want[0])
    assert torch.equal(generated(model, "quire_flash_2", num_tokens=16, num_beams=3)[0], want[0])


@pytest.mark.parametrize("name", ["Mistral", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_flash_path(name):
    model = new_model(name)
    assert_same(generated(model, "quire_flash_2"), generated(model, MODELS[name][1]))


@pytest.mark.parametrize("dim", [24, 40])
def test_head_dims_that_no_kernel_takes_are_padded(dim):
    more = {**SIZES, "head_dim": dim}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**more)).eval()
    assert_same(generated(model, "quire", num_tokens=4), generated(model, "sdpa", num_tokens=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_compiled_generate(name):
    """With a static cache transformers compiles the step: torch.compile(fullgraph=True)."""
    model = new_model(name)
    want = generated(model, "sdpa", num_tokens=8)
    config = transformers.CompileConfig(fullgraph=True, mode="default", backend="aot_eager")
    config._compile_all_devices = True
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    got = generated(model, "quire", num_tokens=8, cache_implementation="static", compile_config=config)
    assert_same(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


@pytest.mark.slow
def test_compiled_forward_without_a_break():
    model = new_model("Llama")
    model.set_attn_implementation("quire")
    given = prompts((0, 5))
    with torch.no_grad():
        want = model(**given, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.allclose(compiled(**given, use_cache=False).logits, want, atol=1e-5 * want.abs().max())


def test_generate_batch():
    """Continuous batching over transformers' paged cache."""
    model = new_model("Llama")
    ids = [prompts((0,))["input_ids"][0, :n].tolist() for n in (3, 9, 14, 20)]
    greedy = {"do_sample": False, "max_new_tokens": 12}
    model.set_attn_implementation("sdpa")
    want = [model.generate(torch.tensor([one]), **greedy)[0, len(one) :].tolist() for one in ids]
    model.set_attn_implementation("quire_flash_2")
    sizes = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32, "max_requests_per_batch": 8}
    done = model.generate_batch(
        ids, transformers.GenerationConfig(**greedy, eos_token_id=-1, pad_token_id=0),
        transformers.ContinuousBatchingConfig(**sizes),
    )  # fmt: skip
    assert [done[name].generated_tokens for name in sorted(done, key=lambda name: len(done[name].prompt_ids))] == want


@pytest.fixture
def plans(monkeypatch):
    """A list that grows by each plan that the integration makes."""
    made, plan = [], plan_cache.new_plan

    def counted(*args):
        made.append(plan(*args))
        return made[-1]

    monkeypatch.setattr(plan_cache, "new_plan", counted)
    monkeypatch.setattr(integration, "new_plan", counted)
    monkeypatch.setattr(plan_cache, "_plans", plan_cache._Plans())
    monkeypatch.setattr(plan_cache, "_known", plan_cache._Known())
    return made


@pytest.mark.parametrize(
    ("name", "kinds"), [("Llama", 1), ("Mistral", 1), pytest.param("Gemma2", 2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("pads", [(0, 0, 0), (0, 5, 13), (3, 0, 20 - 1)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_share_one_plan_a_step(plans, name, kinds, pads, mode):
    """A plan for each kind of layer, padded or not; none where a cache that is full of its window stays as long."""
    model = new_model(name)
    with mode():
        generated(model, "quire", num_tokens=6, pads=pads)
    assert 0 < len(plans) <= 6 * kinds
    assert name != "Llama" or len(plans) == 6


def test_a_batch_padded_on_the_left_reads_no_mask(plans):
    generated(new_model("Llama"), "quire", num_tokens=3, pads=(0, 5, 13))
    assert [plan.spec.mask.name for plan in plans] == ["CAUSAL", "NONE", "NONE"]
    assert all(plan.spec.options.page_size == 0 for plan in plans)


def test_calls_of_a_layer(plans):
    """What a layer costs beside its kernel: Python's calls, which do not depend on the machine. sdpa makes 27."""
    q, kv = torch.randn(3, 4, 1, 32), torch.randn(3, 2, 20, 32)
    mask = made_mask(prompts((0, 5, 13))["attention_mask"], 1)
    profile = cProfile.Profile()
    for _ in range(2):
        integration.attend(Layer(), q, kv, kv, mask)
    with profile:
        integration.attend(Layer(), q, kv, kv, mask)
    assert len(plans) == 1
    assert sum(entry.callcount for entry in profile.getstats()) <= 80


def made_mask(padding: Tensor, q_length: int) -> Tensor | None:
    """make_mask() of a causal batch, as transformers calls it."""
    kv_length = padding.shape[1]
    return integration.make_mask(
        len(padding), q_length, kv_length, q_offset=kv_length - q_length, attention_mask=padding.bool(),
        mask_function=causal_mask_function, device=padding.device,
    )  # fmt: skip


@pytest.mark.parametrize("q_length", [1, 3, 12])
@pytest.mark.parametrize("pads", [(0, 5, 11), (4,), (0, 0)])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "with room"])
def test_rows_behind_their_padding(device, q_length, pads, layout):
    """Each row as the oracle has it alone; what lies in padding is NaN, and the result of its queries 0."""
    batch, kv_length = len(pads), 12
    dtype, most = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 4e-3)
    q = torch.randn(batch, 4, q_length, 32, device=device, dtype=dtype)
    shape = {"heads first": (2, 12), "tokens first": (12, 2), "with room": (2, 17)}[layout]
    k, v = (torch.randn(batch, *shape, 32, device=device, dtype=dtype) for _ in range(2))
    k, v = (t.transpose(1, 2) if layout == "tokens first" else t[:, :, :kv_length] for t in (k, v))
    padding = torch.ones(batch, kv_length, dtype=torch.long)
    for row, pad in enumerate(pads):
        padding[row, :pad], k[row, :, :pad], v[row, :, :pad] = 0, math.nan, math.nan
    mask = made_mask(padding.to(device), q_length)
    for _ in range(2):  # the second layer finds the plan of the first
        out, _ = integration.attend(Layer(), q, k, v, mask)
    q, k, v, out = (t.cpu() for t in (q, k, v, out))
    for row, pad in enumerate(pads):
        hidden = max(0, pad - (kv_length - q_length))
        rows = q[row, :, hidden:].transpose(0, 1), *(t[row, :, pad:].transpose(0, 1) for t in (k, v))
        offsets = (0, len(rows[0])), (0, len(rows[1]))
        assert torch.allclose(out[row, hidden:].double(), oracle.attention(*rows, *offsets, causal=True).o, atol=most)
        assert not out[row, :hidden].any()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_was_changed_is_read(mode):
    q, kv = torch.randn(2, 4, 1, 32), torch.randn(2, 4, 9, 32)
    with mode():
        mask = made_mask(torch.tensor([[1] * 9, [0] * 4 + [1] * 5]), 1)
        integration.attend(Layer(), q, kv, kv, mask)
        mask[1, 0, 0, 6] = False
        out, _ = integration.attend(Layer(), q, kv, kv, mask)
        want = torch.nn.functional.scaled_dot_product_attention(q, kv, kv, mask)
    assert torch.allclose(out, want.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("hidden", [[7, 8], [0, 3], [4]])
@pytest.mark.parametrize("q_length", [1, 9])
def test_padding_elsewhere_is_a_mask(device, hidden, q_length):
    """On the right, on both sides, in the middle."""
    dtype, most = (torch.float32, 1e-5) if device == "cpu" else (torch.float16, 4e-3)
    q, kv = (torch.randn(2, 4, length, 32, device=device, dtype=dtype) for length in (q_length, 9))
    padding = torch.ones(2, 9, dtype=torch.long, device=device)
    padding[1, hidden] = 0
    mask = made_mask(padding, q_length)
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), kv.float(), kv.float(), mask).nan_to_num()
    for _ in range(3):  # layers of one plan
        out, _ = integration.attend(Layer(), q, kv, kv, mask)
        assert torch.allclose(out.float(), want.transpose(1, 2), atol=most)


class Layer(torch.nn.Module):
    is_causal = True


Q = torch.randn(2, 4, 3, 32)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"dropout": 0.5}, quire.UnsupportedError, "dropout"),
        ({"position_bias": torch.ones(1)}, quire.UnsupportedError, "position_bias"),
        ({"output_attentions": True}, quire.UnsupportedError, "output_attentions"),
        ({"cache": object()}, quire.UnsupportedError, "cache"),
        ({"attention_mask": torch.zeros(2, 1, 3, 3)}, quire.ValidationError, "attention_mask"),
        ({"attention_mask": torch.ones(2, 4, 3, 3) > 0}, quire.ValidationError, "attention_mask"),
        ({"attention_mask": torch.ones(2, 3) > 0}, quire.ValidationError, "attention_mask"),
    ],
)
def test_what_is_not_supported_is_named(options, error, name):
    with pytest.raises(error, match=name):
        integration.attend(Layer(), Q, Q, Q, **{"attention_mask": None, **options})


def test_training_is_refused():
    q = Q.clone().requires_grad_()
    with pytest.raises(quire.ValidationError, match="grad"):
        integration.attend(Layer(), q, Q, Q, None)
    sinks = torch.zeros(Q.shape[1], dtype=torch.float16, requires_grad=True)  # which are copied as float32
    for mask in (None, torch.ones(Q.shape[0], 1, Q.shape[2], Q.shape[2], dtype=torch.bool)):
        with pytest.raises(quire.ValidationError, match="s_aux: expected no tensor that requires grad"):
            integration.attend(Layer(), Q, Q, Q, mask, s_aux=sinks)
    with torch.no_grad():
        integration.attend(Layer(), Q, Q, Q, None, s_aux=sinks)


def test_causal_is_bottom_right_without_a_mask():
    q, kv = Q, torch.randn(2, 4, 9, 32)
    out, _ = integration.attend(Layer(), q, kv, kv, None)
    want = flash_attn_func(*(t.transpose(1, 2) for t in (q, kv, kv)), causal=True)
    assert torch.allclose(out, want, atol=1e-6)
    one, _ = integration.attend(Layer(), q[:, :, :1], kv, kv, None, scaling=1 / math.sqrt(32), is_causal=True)
    assert one.shape == (2, 1, 4, 32)


def test_example_in_the_docstring():
    done = doctest.testmod(integration, extraglobs={"torch": torch})
    assert done.attempted and not done.failed
