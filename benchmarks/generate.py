"""transformers' generate() with Quire's attention beside the others that are installed, in one run.

    python benchmarks/generate.py --json FILE          a Llama of Llama 3.2 1B's shape, random weights, bf16, on a GPU
    python benchmarks/generate.py --device cpu --tiny  a tiny one in float32

Eight prompts of 10 to 500 tokens, padded on the left, one batch, greedy, a dynamic cache. Implementations take turns;
tokens/s are new tokens of all prompts over the wall clock of generate(), prefill included, the median of the rounds.
The weights are random, so tokens after a near tie may differ: reported is how many of the first tokens agree with those
of "sdpa", and how far the logits behind the prompts are from float32's: |difference| / |logits|.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from machine import describe, write_report
from quire.compat.transformers import register

LENGTHS = (10, 23, 47, 90, 150, 240, 370, 500)
ROUNDS = 5


def config(tiny: bool) -> LlamaConfig:
    """Of Llama 3.2 1B, or one that a cpu runs in a second."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}  # fmt: skip
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000}  # fmt: skip
    return LlamaConfig(**(small if tiny else sizes), max_position_embeddings=8192, rope_theta=5e5, pad_token_id=0)


def batch(vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Prompts at the right end of their rows."""
    longest = max(LENGTHS)
    ids = torch.randint(3, vocabulary, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None]
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.long().to(device)}


def implementations() -> dict[str, str | None]:
    """Names of attn_implementation, and why one cannot run here."""
    modules = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    missing = {
        name: None if importlib.util.find_spec(module) else f"{module} is not installed"
        for name, module in modules.items()
    }
    return {"sdpa": None, "quire": None, "quire_flash_2": None, "eager": None, **missing}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def generate(model: LlamaForCausalLM, name: str, inputs: dict[str, torch.Tensor], new: int) -> tuple[Any, float]:
    """New tokens, and seconds."""
    model.set_attn_implementation(name)
    synchronise(inputs["input_ids"].device)
    start = time.perf_counter()
    ids = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    synchronise(ids.device)
    return ids[:, max(LENGTHS) :], time.perf_counter() - start


@torch.no_grad()
def logits(model: LlamaForCausalLM, name: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the token behind each prompt."""
    model.set_attn_implementation(name)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return model(**inputs, position_ids=positions, logits_to_keep=1).logits[:, 0].double()


def measure(model: LlamaForCausalLM, inputs: dict[str, torch.Tensor], new: int, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: {"reason": reason} for name, reason in implementations().items() if reason}
    names = [name for name, reason in implementations().items() if reason is None]
    times: dict[str, list[float]] = {name: [] for name in names}
    first = {name: generate(model, name, inputs, new)[0] for name in names}  # compiles, too
    for _ in range(rounds):
        for name in names:
            times[name].append(generate(model, name, inputs, new)[1])
    seen = {name: logits(model, name, inputs) for name in names}
    exact = logits(model.float(), "sdpa", inputs)
    for name in names:
        agree = (first[name] == first["sdpa"]).long().cumprod(1).sum(1)
        error = float((seen[name] - exact).norm() / exact.norm())
        tokens = len(LENGTHS) * new
        results[name] = {
            "tokens_per_s": tokens / statistics.median(times[name]), "fastest": tokens / min(times[name]),
            "slowest": tokens / max(times[name]), "first_tokens_as_sdpa": agree.tolist(), "logits_error": error,
        }  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, chosen = torch.device(options.device), config(options.tiny)
    register()
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(chosen).eval().to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    results = measure(model, batch(chosen.vocab_size, device), options.new, options.rounds)
    best = max(r["tokens_per_s"] for name, r in results.items() if "tokens_per_s" in r and "quire" not in name)
    for name, found in results.items():
        rate = found.get("tokens_per_s")
        print(f"{name:18} {found['reason']}" if rate is None else
              f"{name:18} {rate:9.1f} tokens/s  {rate / best:.2f}x of the best other  {found}")  # fmt: skip
    report = {**describe(device), "transformers": transformers.__version__, "lengths": LENGTHS, "new": options.new}
    write_report(options.json, {**report, "tiny": options.tiny, "results": results})


if __name__ == "__main__":
    main()
