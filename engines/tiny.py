"""Tiny language models with random weights, and a runner of them that serves several requests at once.

The attention of a model is that of an engine's backend, or torch's: see Torch. A model is as its namesake in what its
attention sees: Llama (grouped heads), Gemma (windows in every second layer, a soft cap), gpt-oss (windows and sinks), DeepSeek (latents
of 512 and 64 dims). Greedy tokens of two kinds of attention agree, or one of them is wrong.
"""

from __future__ import annotations

from types import SimpleNamespace as NS

import torch
from harness import reference

LATENT, ROPE = 512, 64
PROMPTS = (5, 23, 40)  #: tokens of each request
CHUNK, NEW, CONTEXT = 16, 12, 64  #: tokens of a request in one step of its prefill; those that are made; most of both
KINDS = {
    "Llama": dict(),
    "Gemma": dict(window=16, cap=20.0),
    "gpt-oss": dict(window=16, sinks=True),
    "DeepSeek": dict(mla=True),
}


class Model:
    """Two layers over 97 words."""

    def __init__(self, kind, heads=4, kv_heads=2, dim=64, hidden=96, words=97, dtype=torch.float32):
        torch.manual_seed(len(kind))
        options = KINDS[kind]
        self.kind, self.heads, self.kv_heads, self.dim, self.dtype = kind, heads, kv_heads, dim, dtype
        self.mla = options.get("mla", False)
        self.cap = options.get("cap", 0.0)
        self.scale = (128 + ROPE) ** -0.5 if self.mla else dim**-0.5
        self.num_layers = 2
        self.windows = [-1 if i % 2 else options.get("window", -1) for i in range(self.num_layers)]
        self.sinks = [torch.randn(heads, dtype=dtype) if options.get("sinks") else None for _ in range(self.num_layers)]
        widths = (LATENT + ROPE, LATENT + ROPE, 0) if self.mla else (dim, dim, dim)
        keys = 1 if self.mla else kv_heads

        def weight(rows, columns):
            return torch.randn(rows, columns, dtype=dtype) * (2.0 / rows**0.5)

        self.layers = [
            NS(
                q=weight(hidden, heads * widths[0]), k=weight(hidden, keys * widths[1]), v=weight(hidden, keys * widths[2]),
                o=weight(heads * (LATENT if self.mla else dim), hidden), up=weight(hidden, 2 * hidden), down=weight(2 * hidden, hidden),
            )
            for _ in range(self.num_layers)
        ]  # fmt: skip
        self.embedding, self.head = weight(words, hidden) * 4, weight(hidden, words)

    def forward(self, tokens, positions, attend):
        """The logits of each token. attend(layer, q, k, v): [tokens, heads, dims]; with latents k is both."""
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            q = (y @ layer.q).view(len(x), self.heads, -1)
            k, v = (y @ layer.k).view(len(x), -1, q.shape[-1]), None
            if self.mla:
                q, k = (self._turned(t, positions, LATENT) for t in (q, k))
            else:
                v = (y @ layer.v).view(len(x), self.kv_heads, self.dim)
                q, k = (self._turned(t, positions, 0) for t in (q, k))
            x = x + attend(i, q, k, v).reshape(len(x), -1).to(x.dtype) @ layer.o
            y = torch.nn.functional.rms_norm(x, x.shape[-1:])
            x = x + torch.nn.functional.silu(y @ layer.up) @ layer.down
        return torch.nn.functional.rms_norm(x, x.shape[-1:]) @ self.head

    @staticmethod
    def _turned(x, positions, first):
        """With RoPE in the dims from `first` on."""
        part = x[..., first:]
        half = part.shape[-1] // 2
        angles = positions[:, None] * 10000 ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        a, b = part[..., :half], part[..., half:]
        return torch.cat([x[..., :first], a * cos - b * sin, b * cos + a * sin], dim=-1)


class Torch:
    """Attention in float64 over lists of keys."""

    def __init__(self, model):
        self.model, self.cache = model, {}

    def begin(self, batch):
        """batch: for each request its number, its tokens so far, and those of this step."""
        self.batch = batch

    def attend(self, layer, q, k, v):
        """As Model.forward() wants it."""
        out, at, model = [], 0, self.model
        for request, _, n in self.batch:
            rows = slice(at, at + n)
            new = (k[rows], k[rows, :, :LATENT] if model.mla else v[rows])
            old = self.cache.get((layer, request))
            keys, values = new if old is None else (torch.cat(pair) for pair in zip(old, new))
            self.cache[layer, request] = keys, values
            out.append(
                reference(q[rows], keys, values, model.scale, True, model.windows[layer], model.cap, model.sinks[layer])
            )
            at += n
        return torch.cat(out)


def greedy(model, attention):
    """The tokens that a model makes for each request, served together: chunks of prefills beside decodes."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(97, (n,), generator=generator).tolist() for n in PROMPTS]
    done = [0] * len(texts)
    while any(len(text) < n + NEW for text, n in zip(texts, PROMPTS)):
        waiting = [i for i, n in enumerate(PROMPTS) if len(texts[i]) < n + NEW]
        batch = [(i, done[i], min(CHUNK, len(texts[i]) - done[i])) for i in waiting]
        batch.sort(key=lambda one: one[2])  # as vLLM orders them: decodes first
        tokens = torch.tensor([t for i, first, n in batch for t in texts[i][first : first + n]])
        positions = torch.cat([torch.arange(first, first + n) for _, first, n in batch])
        attention.begin(batch)
        logits, at = model.forward(tokens, positions, attention.attend), 0
        for i, first, n in batch:
            at += n
            done[i] = first + n
            if done[i] == len(texts[i]):
                texts[i].append(int(logits[at - 1].argmax()))
    return torch.tensor([text[-NEW:] for text in texts])


def agree(kind, make):
    """A case of the harness: the greedy tokens of a model, by the attention that make(model) gives, and by torch's."""

    def function():
        model = Model(kind)
        want, other = greedy(model, Torch(model)), Model(kind)
        assert want.unique().numel() > len(PROMPTS), "the model says always the same"
        if KINDS[kind] and not model.mla:
            other.windows, other.sinks, other.cap = [-1] * other.num_layers, [None] * other.num_layers, 0.0
            assert not torch.equal(greedy(other, Torch(other)), want), (
                "windows, sinks and caps mean nothing to the model"
            )
        return greedy(model, make(model)), want

    return function
