"""Beam search over shared pages: beams that come from one another share the pages of what they have in common.

A beam that continues another takes its full pages as they are, and a copy of the last one alone, which it goes on to
write; pages that no beam has any more go back. What all beams of a prompt share is read once for all of them (cascade
attention). The tokens must be those of transformers' generate(num_beams=...), which copies its cache in each step.

    python examples/beam_search.py
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

import first_call
import generate
import quire
from generate import PAGE_SIZE
from paged_model import Batch, Model, Step, tables

NUM_BEAMS, VOCAB_SIZE, NUM_PAGES = 4, 2048, 96
PROMPTS = ((50, 40), (7, 33), (16, 20))  #: tokens of a prompt, and new ones


@dataclass(eq=False)
class Beam:
    """A way to continue a prompt."""

    tokens: list[int]
    score: float = 0.0  #: the sum of its tokens' log-probabilities
    cached: int = 0
    pages: list[int] = field(default_factory=list)


class Pages:
    """Free pages, and how many beams have each of the others."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache, self._free, self.users = cache, list(range(cache.shape[1])), Counter[int]()

    def take(self) -> int:
        page = self._free.pop()
        self.users[page] = 1
        return page

    def extend(self, beam: Beam) -> None:
        """Give the beam the pages that its tokens need."""
        while len(beam.pages) * PAGE_SIZE < len(beam.tokens):
            beam.pages.append(self.take())

    def fork(self, beam: Beam, token: int, score: float) -> Beam:
        """A beam that continues this one: it shares all pages but the one that it writes to."""
        full = beam.cached // PAGE_SIZE
        for page in beam.pages[:full]:
            self.users[page] += 1
        twin = Beam([*beam.tokens, token], score, beam.cached, beam.pages[:full])
        for page in beam.pages[full:]:
            twin.pages.append(self.take())
            self._cache[:, twin.pages[-1]] = self._cache[:, page]
        return twin

    def release(self, beam: Beam) -> None:
        for page in beam.pages:
            self.users[page] -= 1
            if not self.users[page]:
                self._free.append(page)


class Searcher:
    """A model, its cache, and the wrapper that reads shared pages once."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = Model(model, NUM_PAGES), device
        self.pages = Pages(self.model.cache)
        self._cascade = quire.MultiLevelCascadeAttentionWrapper(
            2, torch.empty(32 << 20, dtype=torch.uint8, device=device)
        )
        self.most_pages = self.most_unshared = 0  #: in use, and what beams with pages of their own would use

    def search(self, prompt: list[int], num_new: int) -> Beam:
        """The best of NUM_BEAMS beams of num_new tokens each."""
        beams = [Beam(list(prompt))]
        for _ in range(num_new):
            scores = self.scores(beams)
            best = scores.flatten().topk(NUM_BEAMS)
            parents, tokens = best.indices // scores.shape[1], best.indices % scores.shape[1]
            chosen = zip(parents.tolist(), tokens.tolist(), best.values.tolist(), strict=True)
            children = [self.pages.fork(beams[parent], token, score) for parent, token, score in chosen]
            for beam in beams:
                self.pages.release(beam)
            beams = children
        for beam in beams:
            self.pages.release(beam)
        return beams[0]

    def scores(self, beams: list[Beam]) -> torch.Tensor:
        """Of each beam continued by each token: [beams, vocab_size]. All beams are one step."""
        for beam in beams:
            self.pages.extend(beam)
        self.most_pages = max(self.most_pages, sum(1 for users in self.pages.users.values() if users))
        self.most_unshared = max(self.most_unshared, sum(len(beam.pages) for beam in beams))
        batch = Batch([(beam, len(beam.tokens) - beam.cached) for beam in beams])
        self.model.plan(self._cascade, batch)
        hidden = self.model.hidden(Step.of(batch, self.device), self._cascade)
        ends = (generate.indptr(batch.num_rows)[1:] - 1).to(self.device)
        rows = self.model.model.lm_head(hidden[ends]).float().log_softmax(dim=1)
        order = {beam: row for (beam, _), row in zip(batch.work, rows, strict=True)}
        for beam in beams:
            beam.cached = len(beam.tokens)
        return torch.stack([order[beam] + beam.score for beam in beams])


def attend_once() -> None:
    """All that the steps use: both levels of a cascade for prompts of each size and for single tokens, and appends."""
    device = first_call.device()
    dtype, heads = generate.attention_dtype(device), (generate.NUM_QO_HEADS, generate.NUM_KV_HEADS, generate.HEAD_DIM)
    q = torch.ones(64, heads[0], heads[2], dtype=dtype, device=device)
    cache = torch.zeros(8, 2, PAGE_SIZE, *heads[1:], dtype=dtype, device=device)
    for rows in ([3], [10], [60], [1, 1, 1, 1]):
        beams = [Beam([0] * (16 + n), cached=16, pages=[0, 2 + i, 3 + i, 4 + i, 5 + i][:5]) for i, n in enumerate(rows)]
        batch = Batch([(beam, n) for beam, n in zip(beams, rows, strict=True)])
        wrapper = quire.MultiLevelCascadeAttentionWrapper(2, torch.empty(32 << 20, dtype=torch.uint8, device=device))
        arrays = [list(pair) for pair in zip(*map(tables, batch.levels), strict=True)]
        wrapper.plan(*arrays, *heads, PAGE_SIZE, causal=True, q_data_type=dtype)
        step, nnz = Step.of(batch, device), sum(rows)
        kv = q[:nnz, : heads[1]]
        quire.append_paged_kv_cache(kv, kv, step.requests, step.slots, cache, *step.table)
        wrapper.run(q[:nnz], cache)


def main() -> None:
    device = first_call.device()
    first_call.report(__file__)
    random = torch.Generator().manual_seed(2)
    prompts = [(torch.randint(VOCAB_SIZE, (n,), generator=random).tolist(), num_new) for n, num_new in PROMPTS]
    model = generate.build_model(VOCAB_SIZE, device).to(generate.attention_dtype(device))
    searcher = Searcher(model, device)
    with first_call.watch() as compiled, torch.inference_mode():
        began = time.perf_counter()
        found = [searcher.search(*one) for one in prompts]
        seconds = time.perf_counter() - began
    print(f"pages           {searcher.most_pages} in use at most; without sharing {searcher.most_unshared}")
    tokens = sum(num_new for _, num_new in PROMPTS)
    print(f"job             {tokens} tokens in {seconds:.2f} s on {device}, {len(compiled.variants)} compiled")
    model.set_attn_implementation("sdpa")
    compare(model, prompts, found)


def compare(model: Any, prompts: list[tuple[list[int], int]], found: list[Beam]) -> None:
    """Each prompt against transformers' beam search: the same tokens, and how far the scores are apart."""
    error = 0.0
    for (prompt, num_new), beam in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        done = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=NUM_BEAMS, do_sample=False, max_new_tokens=num_new,
            return_dict_in_generate=True, output_scores=True, length_penalty=0.0,
        )  # fmt: skip
        if done.sequences[0].tolist() != beam.tokens:
            sys.exit(f"FAILED: expected {done.sequences[0].tolist()}\n        got      {beam.tokens}")
        error = max(error, abs(float(done.sequences_scores[0]) - beam.score))
    print(f"tokens          {len(prompts)} of {len(prompts)} prompts equal transformers' beam search")
    print(f"largest error   {error:.2e} in the sums of log-probabilities")


if __name__ == "__main__":
    first_call.run(attend_once, main, __doc__)
