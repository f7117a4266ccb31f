"""Speculative decoding with a tree of drafts: several tokens of a request in one pass, and the same tokens as without.

A draft model proposes a tree of tokens behind the last one: the likeliest few, then the likeliest behind each of those.
One pass of the whole model over all of the tree, under a mask by which a token sees its own ancestors alone, then says
which branch it would have taken itself. The draft is the model's first layers (early exit), so that both share one
cache. The weights are random; the last layers are scaled down, as the first ones would agree with nobody otherwise.
Greedy tokens must equal those of transformers' generate().

    python examples/speculative.py
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

import first_call
import generate
import quire
from generate import PAGE_SIZE, Request
from paged_model import Batch, Model, Part, Step, tables

BRANCHES = 3, 2, 1, 1  #: children of the last token, of each of those, ...
NUM_DRAFT_LAYERS = 2
VOCAB_SIZE, NUM_PAGES = 2048, 64
PROMPTS = ((30, 40), (3, 25), (70, 33))  #: tokens of a prompt, and new ones


class Tree:
    """The shape of the drafts: node 0 is the last token, and each level stands behind the one before."""

    def __init__(self, branches: tuple[int, ...]) -> None:
        self.parents, self.depths, self.levels = [-1], [0], [[0]]
        for depth, count in enumerate(branches, 1):
            level = [(parent, child) for parent in self.levels[-1] for child in range(count)]
            self.levels.append([len(self.parents) + i for i in range(len(level))])
            self.parents += [parent for parent, _ in level]
            self.depths += [depth] * len(level)
        self.sees = torch.eye(len(self.parents), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            self.sees[node] |= self.sees[parent]

    def words(self, size: int) -> torch.Tensor:
        """The mask of the first `size` nodes as the decode call takes it: uint16 [size, 2 * ceil(size / 32)]."""
        bits = torch.zeros(size, -(-size // 32) * 32, dtype=torch.int32)
        bits[:, :size] = self.sees[:size, :size]
        return (bits.view(size, -1, 16) << torch.arange(16)).sum(2).to(torch.int16).view(torch.uint16)


class TreeAttention:
    """Attention of the first `size` nodes of each request's tree, over its pages and over the nodes that they see."""

    def __init__(self, pages: list[list[int]], cached: list[int], tree: Tree, size: int, device: torch.device) -> None:
        most = max(map(len, pages))
        self.size = size
        self.tables = torch.tensor([row + [0] * (most - len(row)) for row in pages], dtype=torch.int32, device=device)
        self.lens = torch.tensor(cached, dtype=torch.int32, device=device) + size
        self.mask = tree.words(size).view(torch.int16).expand(len(pages), -1, -1).contiguous().to(device)
        self.workspace = torch.empty(32 << 20, dtype=torch.uint8, device=device)

    def run(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """q: [requests * size, num_qo_heads, head_dim]; the nodes' keys are in the cache already."""
        return quire.xqa_batch_decode_with_kv_cache(
            q, cache, self.workspace, self.tables, self.lens, self.tables.shape[1] * PAGE_SIZE,
            bmm1_scale=q.shape[-1] ** -0.5, q_len_per_req=self.size, mask=self.mask.view(torch.uint16),
        )  # fmt: skip


class Speculator:
    """A model, its draft, and the cache of both."""

    def __init__(self, model: Any, tree: Tree, device: torch.device) -> None:
        self.model, self.tree, self.device = Model(model, NUM_PAGES), tree, device
        self.head = model.lm_head
        self.draft = copy.copy(model.model)
        self.draft._modules = {**model.model._modules, "layers": model.model.layers[:NUM_DRAFT_LAYERS]}
        self.passes = 0  #: of the whole model, times the requests in them

    def prefill(self, requests: list[Request]) -> None:
        """Cache all tokens but the last, which is the root of the first tree; give each request its pages."""
        free = iter(range(NUM_PAGES))
        for request in requests:
            most = len(request.tokens) + request.num_new + len(self.tree.parents)
            request.pages = [next(free) for _ in range(-(-most // PAGE_SIZE))]
        batch = Batch([(request, len(request.tokens) - 1) for request in requests])
        wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(32 << 20, dtype=torch.uint8, device=self.device)
        )
        self.model.plan(wrapper, batch)
        self.model.hidden(Step.of(batch, self.device), wrapper)
        for request in requests:
            request.cached = len(request.tokens) - 1

    def step(self, requests: list[Request]) -> None:
        """Each request gets the tokens of the branch that the model agrees with, and the one behind it."""
        nodes = torch.tensor([[request.tokens[-1]] for request in requests], device=self.device)
        for level, count in zip(self.tree.levels, BRANCHES, strict=False):
            logits = self.logits(requests, nodes, self.draft)[:, level]
            nodes = torch.cat([nodes, logits.topk(count).indices.flatten(1)], dim=1)
        logits = self.logits(requests, nodes, None)
        self.passes += len(requests)
        for request, drafts, rows in zip(requests, nodes.tolist(), logits.float().cpu(), strict=True):
            self.accept(request, drafts, rows)

    def logits(self, requests: list[Request], nodes: torch.Tensor, layers: torch.nn.Module | None) -> torch.Tensor:
        """Of the first nodes of each tree, whose tokens are given: [requests, size, vocab_size]."""
        size = nodes.shape[1]
        cached = torch.tensor([request.cached for request in requests], device=self.device)[:, None]
        parts = [Part(size, request.pages, request.cached + size) for request in requests]
        numbers = torch.arange(len(requests), dtype=torch.int32, device=self.device).repeat_interleave(size)
        positions = (cached + torch.tensor(self.tree.depths[:size], device=self.device)).flatten()
        slots = (cached + torch.arange(size, device=self.device)).flatten().to(torch.int32)
        step = Step(nodes.flatten(), positions, slots, numbers, *(t.to(self.device) for t in tables(parts)[1:]))
        trees = TreeAttention([r.pages for r in requests], [r.cached for r in requests], self.tree, size, self.device)
        return self.head(self.model.hidden(step, trees, layers)).view(len(requests), size, -1)

    def accept(self, request: Request, drafts: list[int], logits: torch.Tensor) -> None:
        """Follow the tree as long as it has the model's own choice; keep keys and values of that path alone."""
        path, choices = [0], logits.argmax(dim=1).tolist()
        while step := [
            n for n, up in enumerate(self.tree.parents) if up == path[-1] and drafts[n] == choices[path[-1]]
        ]:
            path.append(step[0])
        cache, pages = self.model.cache, torch.tensor(request.pages, device=self.device)
        old = request.cached + torch.tensor(path, device=self.device)
        new = request.cached + torch.arange(len(path), device=self.device)
        kept = cache[:, pages[old // PAGE_SIZE], :, old % PAGE_SIZE]
        cache[:, pages[new // PAGE_SIZE], :, new % PAGE_SIZE] = kept
        left = request.num_new - len(request.generated)
        request.tokens += [choices[node] for node in path][:left]
        request.logits += [logits[node] for node in path][:left]
        request.cached += len(path)


def build_model(device: torch.device) -> Any:
    """examples/generate.py's model, whose last layers change little."""
    model = generate.build_model(VOCAB_SIZE, device)
    for layer in model.model.layers[NUM_DRAFT_LAYERS:]:
        layer.self_attn.o_proj.weight.data *= 0.2
        layer.mlp.down_proj.weight.data *= 0.2
    return model


def attend_once() -> None:
    """All that the passes use: prompts of each size, appends, and trees of each size."""
    device = first_call.device()
    heads = generate.NUM_KV_HEADS, generate.HEAD_DIM
    dtype, tree = generate.attention_dtype(device), Tree(BRANCHES)
    cache = torch.zeros(4, 2, PAGE_SIZE, *heads, dtype=dtype, device=device)
    q = torch.ones(64, generate.NUM_QO_HEADS, generate.HEAD_DIM, dtype=dtype, device=device)
    for size in (3, 10, 64):
        wrapper, request = generate.new_wrappers(device)[0], Request([0] * size, 1, 0, pages=[0, 1, 2, 3])
        batch = generate.Batch([request], [], device)
        generate.plan_prefill(wrapper, batch.qo_indptr, generate.PageTable([request], device), dtype)
        generate.append(
            q[:size, : heads[0]], q[:size, : heads[0]], batch.batch_indices, batch.positions, cache, batch.table
        )
        wrapper.run(q[:size], cache)
    for level in tree.levels:
        TreeAttention([[0, 1]], [5], tree, level[-1] + 1, device).run(q[: level[-1] + 1], cache)


def main() -> None:
    device = first_call.device()
    first_call.report(__file__)
    model = build_model(device)
    random = torch.Generator().manual_seed(1)
    requests = [
        Request(torch.randint(VOCAB_SIZE, (length,), generator=random).tolist(), num_new, 0)
        for length, num_new in PROMPTS
    ]
    model.to(generate.attention_dtype(device))
    speculator = Speculator(model, Tree(BRANCHES), device)
    with first_call.watch() as compiled, torch.inference_mode():
        began = time.perf_counter()
        speculator.prefill(requests)
        while running := [r for r in requests if len(r.generated) < r.num_new]:
            speculator.step(running)
        seconds = time.perf_counter() - began
    tokens = sum(r.num_new for r in requests)
    print(f"accepted        {tokens / speculator.passes:.2f} tokens a pass of the whole model")
    print(f"job             {tokens} tokens in {seconds:.2f} s on {device}, {len(compiled.variants)} compiled")
    model.set_attn_implementation("sdpa")
    generate.compare(model, requests)


if __name__ == "__main__":
    first_call.run(attend_once, main, __doc__)
