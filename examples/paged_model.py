"""A decoder of transformers over a paged cache, as serve.py, speculative.py and beam_search.py run it."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

import quire
from generate import indptr

PAGE_SIZE = 16


class Part(NamedTuple):
    """What one request is in a batch, or in a level of a cascade."""

    rows: int  #: of q
    pages: list[int]
    tokens: int  #: in them


NOBODY = Part(1, [], 0)


def tables(parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len, on the host."""
    last = [(part.tokens - 1) % PAGE_SIZE + 1 if part.tokens else 0 for part in parts]
    pages = [page for part in parts for page in part.pages]
    offsets = indptr([part.rows for part in parts]), indptr([len(part.pages) for part in parts])
    return *offsets, torch.tensor(pages, dtype=torch.int32), torch.tensor(last, dtype=torch.int32)


class Batch:
    """One step: requests, each with the tokens that it computes now; those with equal first pages stand together."""

    def __init__(self, work: list[tuple[Any, int]]) -> None:
        self.work = sorted(work, key=lambda item: item[0].pages)
        self.num_rows = [rows for _, rows in self.work]
        ends = [(request, rows, request.cached + rows) for request, rows in self.work]
        self.parts = [Part(rows, request.pages[: -(-end // PAGE_SIZE)], end) for request, rows, end in ends]
        self.levels = self._levels()
        self.num_shared = sum(len(part.pages) for part in self.levels[0])

    def _levels(self) -> tuple[list[Part], list[Part]]:
        """A cascade: what neighbours with equal first pages share, and what each request has besides."""
        common, own = list[Part](), list[Part]()
        items = zip(self.work, self.parts, strict=True)
        for _, group in itertools.groupby(items, key=lambda item: item[1].pages[0]):
            requests, parts = zip(*group, strict=True)
            computed = [request.pages[: request.cached // PAGE_SIZE] for request, _ in requests]
            alike = itertools.takewhile(lambda pages: len(set(pages)) == 1, zip(*computed, strict=False))
            shared = [pages[0] for pages in alike] if len(parts) > 1 else []
            count, tokens = len(shared), len(shared) * PAGE_SIZE
            common.append(Part(sum(part.rows for part in parts), shared, tokens))
            own += [Part(part.rows, part.pages[count:], part.tokens - tokens) for part in parts]
        return common, own


class Step(NamedTuple):
    """The tokens of a batch on the device, and where their keys and values go."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor  #: int32, places in the request's pages: the positions, but for trees
    requests: torch.Tensor  #: int32, whose token each is; -1: nobody's
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As append_paged_kv_cache() takes it."""
        return self.kv_indices, self.kv_indptr, self.last_page_len

    @classmethod
    def of(cls, batch: Batch, device: torch.device, size: int = 0) -> Step:
        """With a token of nobody's for each request that is missing to `size`."""
        nobody = [0] * (size - len(batch.work))
        tokens = [token for r, rows in batch.work for token in r.tokens[r.cached : r.cached + rows]] + nobody
        positions = [place for r, rows in batch.work for place in range(r.cached, r.cached + rows)] + nobody
        requests = [i for i, rows in enumerate(batch.num_rows) for _ in range(rows)] + [-1 for _ in nobody]
        slots, numbers = (torch.tensor(values, dtype=torch.int32) for values in (positions, requests))
        _, *table = tables(batch.parts + [NOBODY for _ in nobody])
        return cls(*(t.to(device) for t in (torch.tensor(tokens), torch.tensor(positions), slots, numbers, *table)))


class Model:
    """A decoder of transformers whose layers keep keys and values in pages."""

    def __init__(self, model: Any, num_pages: int) -> None:
        config, self.model, self.device, self.dtype = model.config, model, model.device, model.dtype
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads = heads, kv_heads, head_dim
        shape = config.num_hidden_layers, num_pages, 2, PAGE_SIZE, kv_heads, head_dim
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        AttentionInterface.register("quire_pages", self._attention)
        model.set_attn_implementation("quire_pages")

    def plan(self, wrapper: Any, batch: Batch) -> None:
        """Plan a step on a prefill wrapper, or on a cascade of two levels."""
        arrays = tables(batch.parts)
        if isinstance(wrapper, quire.MultiLevelCascadeAttentionWrapper):
            arrays = [list(pair) for pair in zip(*map(tables, batch.levels), strict=True)]
        wrapper.plan(*arrays, *self.heads, PAGE_SIZE, causal=True, q_data_type=self.dtype)

    def hidden(self, step: Step, wrapper: Any, layers: torch.nn.Module | None = None) -> torch.Tensor:
        """The last hidden state of each token, [tokens, hidden_size], by all layers or others that share the cache.
        `wrapper` is planned.
        """
        states = (layers or self.model.model)(
            input_ids=step.ids[None], position_ids=step.positions[None], use_cache=False, step=step, wrapper=wrapper
        ).last_hidden_state
        return states[0]

    def _attention(
        self, module: Any, q: Any, k: Any, v: Any, _mask: Any, *, step: Step, wrapper: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """q, k, v: [1, heads, tokens, head_dim] of all requests. New keys go to their pages; q reads from there."""
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
        cache = self.cache[module.layer_idx]
        quire.append_paged_kv_cache(k, v, step.requests, step.slots, cache, *step.table)
        return wrapper.run(q, cache)[None], None


class GraphedDecode:
    """One token each of up to `size` requests, captured as a CUDA graph on a GPU; tensors keep their places."""

    def __init__(self, model: Model, size: int, most_pages: int, workspace: torch.Tensor) -> None:
        lengths = size + 1, most_pages, size
        buffers = [torch.zeros(n, dtype=torch.int32, device=model.device) for n in lengths]
        self.model, self.size = model, size
        self.wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
        self.step = Step.of(Batch([]), model.device, size)._replace(kv_indices=torch.zeros_like(buffers[1]))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result = torch.empty(0)

    def run(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the batch's requests; valid until the next run()."""
        _, *table = tables(batch.parts + [NOBODY] * (self.size - len(batch.parts)))
        self.wrapper.plan(*table, *self.model.heads, PAGE_SIZE, q_data_type=self.model.dtype)
        for place, tensor in zip(self.step, Step.of(batch, self.model.device, self.size), strict=True):
            place[: tensor.shape[0]].copy_(tensor)
        if self.graph is None and self.model.device.type == "cuda":
            self._capture()
        if self.graph is None:
            self.result = self.model.hidden(self.step, self.wrapper)
        else:
            self.graph.replay()
        return self.result[: len(batch.work)]

    def _capture(self) -> None:
        self.model.hidden(self.step, self.wrapper)  # loads what a capture cannot
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.model.hidden(self.step, self.wrapper)
