"""A small engine for continuous batching over pages: examples/serve.py puts HTTP in front of it.

Each step is one forward pass: one token of every request that is generating, and chunks of the prompts of others, as
many as fit (chunked prefill). Full pages of prompts are found again by what they hold, so that prompts which begin
alike share them; what several requests of a step share is read once (cascade attention). On a GPU, steps that only
generate replay a CUDA graph. The model is any decoder of transformers whose layers see all earlier tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

import first_call
import quire
import quire.viz
from generate import indptr

PAGE_SIZE = 16


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine."""

    tokens: list[int]  #: the prompt, and what has been generated
    max_tokens: int
    send: Callable[[int | Exception | None], None]  #: each token, then None; or an error
    number: int = 0
    prompt_len: int = 0
    cached: int = 0  #: tokens whose keys and values are in the cache
    found: int = 0  #: of them, those that another request had computed
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  #: of the prompt's full pages, each with all before it
    is_cancelled: bool = False
    reason: str = "length"  #: why it ended

    def __post_init__(self) -> None:
        self.prompt_len, digest = len(self.tokens), b""
        for end in range(PAGE_SIZE, self.prompt_len, PAGE_SIZE):  # the last token is always computed
            digest = hashlib.sha256(digest + array("q", self.tokens[end - PAGE_SIZE : end]).tobytes()).digest()
            self.digests.append(digest)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def pages_at_end(self) -> int:
        return -(-(self.prompt_len + self.max_tokens) // PAGE_SIZE)


class Pages:
    """Which pages of the cache are free, who uses the others, and what they hold."""

    def __init__(self, count: int) -> None:
        self.users = [0] * count
        self.reserved = 0  #: pages that running requests may still ask for
        self._free = list(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()  # used by nobody, but known by what they hold; oldest first
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def admit(self, request: Request) -> bool:
        """Give the request the pages that others have computed for it, and reserve the rest, if there are as many."""
        found = list(itertools.takewhile(lambda page: page is not None, map(self._by_digest.get, request.digests)))
        for page in found:
            self.users[page] += 1
            self._idle.pop(page, None)
        needed = request.pages_at_end - len(found)
        if len(self._free) + len(self._idle) - self.reserved < needed:
            self._release(found)
            return False
        self.reserved += needed
        request.pages = found
        request.cached = request.found = len(found) * PAGE_SIZE
        return True

    def extend(self, request: Request, num_tokens: int) -> None:
        """Give the request the pages that its first `num_tokens` tokens need."""
        while len(request.pages) * PAGE_SIZE < num_tokens:
            page = self._free.pop() if self._free else self._idle.popitem(last=False)[0]
            self._by_digest.pop(self._digests.pop(page, b""), None)
            self.users[page] = 1
            self.reserved -= 1
            request.pages.append(page)

    def publish(self, request: Request) -> None:
        """Let others find the pages of the prompt that are full now."""
        for page, digest in zip(request.pages[: request.cached // PAGE_SIZE], request.digests, strict=False):
            if digest not in self._by_digest:
                self._by_digest[digest], self._digests[page] = page, digest

    def leave(self, request: Request) -> None:
        """Take back what the request has, and what was reserved for it."""
        self.reserved -= request.pages_at_end - len(request.pages)
        self._release(request.pages)

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page] and page in self._digests:
                self._idle[page] = None
            elif not self.users[page]:
                self._free.append(page)

    def picture(self) -> list[int]:
        """Users of each page; -1: nobody, but what it holds may be found."""
        return [-1 if page in self._idle else users for page, users in enumerate(self.users)]


Part = tuple[int, list[int], int]  #: rows of q, pages, tokens in them


def tables(parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and last_page_len, on the host."""
    last = [(tokens - 1) % PAGE_SIZE + 1 if tokens else 0 for _, _, tokens in parts]
    return (
        indptr([rows for rows, _, _ in parts]),
        indptr([len(pages) for _, pages, _ in parts]),
        torch.tensor([page for _, pages, _ in parts for page in pages], dtype=torch.int32),
        torch.tensor(last, dtype=torch.int32),
    )


class Batch:
    """One step: requests, each with the tokens that it computes now; those with equal first pages stand together."""

    def __init__(self, work: list[tuple[Request, int]]) -> None:
        self.work = sorted(work, key=lambda item: item[0].pages)
        self.groups = [list(group) for _, group in itertools.groupby(self.work, key=lambda item: item[0].pages[0])]
        self.shared = [self._shared_pages([request for request, _ in group]) for group in self.groups]
        self.num_rows = [rows for _, rows in self.work]
        self.parts = [(rows, r.pages[: -(-(r.cached + rows) // PAGE_SIZE)], r.cached + rows) for r, rows in self.work]
        self.is_decode = all(rows == 1 for rows in self.num_rows)

    @staticmethod
    def _shared_pages(group: list[Request]) -> int:
        """Leading pages that all of the group have, and have computed."""
        if len(group) == 1:
            return 0
        same = itertools.takewhile(lambda pages: len(set(pages)) == 1, zip(*(r.pages for r in group), strict=False))
        return min(sum(1 for _ in same), *(r.cached // PAGE_SIZE for r in group))

    def levels(self) -> tuple[list[Part], list[Part]]:
        """What each group shares, and what each request has besides."""
        common, own, parts = [], [], iter(self.parts)
        for group, shared in zip(self.groups, self.shared, strict=True):
            common.append((sum(rows for _, rows in group), group[0][0].pages[:shared], shared * PAGE_SIZE))
            for rows, pages, tokens in itertools.islice(parts, len(group)):
                own.append((rows, pages[shared:], tokens - shared * PAGE_SIZE))
        return common, own


@dataclass
class Inputs:
    """What the model and its layers are given for one step, on the device."""

    ids: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor  #: int32, whose token each is; -1: nobody's
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  #: kv_indices, kv_indptr, last_page_len
    wrapper: Any  #: planned
    slots: torch.Tensor | None = None  #: places in the cache, where they are not the positions


def inputs_of(batch: Batch, wrapper: Any, device: torch.device) -> Inputs:
    """The tokens of a batch, and where their keys and values go."""
    tokens = [t for request, rows in batch.work for t in request.tokens[request.cached : request.cached + rows]]
    positions = [p for request, rows in batch.work for p in range(request.cached, request.cached + rows)]
    requests = [i for i, rows in enumerate(batch.num_rows) for _ in range(rows)]
    _, indptr, indices, last = tables(batch.parts)
    return Inputs(
        torch.tensor(tokens, device=device), torch.tensor(positions, device=device),
        torch.tensor(requests, dtype=torch.int32, device=device),
        (indices.to(device), indptr.to(device), last.to(device)), wrapper,
    )  # fmt: skip


class Model:
    """A decoder of transformers whose layers keep keys and values in pages."""

    def __init__(self, model: Any, num_pages: int, device: torch.device) -> None:
        config, self.model, self.device = model.config, model, device
        self.dtype = model.dtype
        self.num_qo_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = config.num_hidden_layers, num_pages, 2, PAGE_SIZE, self.num_kv_heads, self.head_dim
        self.cache = torch.zeros(shape, dtype=self.dtype, device=device)
        AttentionInterface.register("quire_pages", self._attention)
        model.set_attn_implementation("quire_pages")

    def _attention(self, module: Any, q: Any, k: Any, v: Any, _mask: Any, *, step: Inputs, **_: Any) -> Any:
        """q, k, v: [1, heads, tokens, head_dim] of all requests. New keys go to their pages; q reads from there."""
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (q, k, v))
        cache = self.cache[module.layer_idx]
        slots = (step.positions if step.slots is None else step.slots).to(torch.int32)
        quire.append_paged_kv_cache(k, v, step.requests, slots, cache, *step.tables)
        return step.wrapper.run(q, cache)[None], None

    def hidden(self, step: Inputs, layers: torch.nn.Module | None = None) -> torch.Tensor:
        """The last hidden state of each token, [tokens, hidden_size], by all layers or others that share the cache."""
        states = (layers or self.model.model)(
            input_ids=step.ids[None], position_ids=step.positions[None], use_cache=False, step=step
        ).last_hidden_state
        return states[0]

    def plan_arguments(self) -> tuple[int, int, int, int]:
        return self.num_qo_heads, self.num_kv_heads, self.head_dim, PAGE_SIZE


class GraphedDecode:
    """One token each of up to `size` requests, captured as a CUDA graph on a GPU; tensors keep their places."""

    def __init__(self, model: Model, size: int, most_pages: int, workspace: torch.Tensor) -> None:
        device, int32 = model.device, {"dtype": torch.int32, "device": model.device}
        self.model, self.size = model, size
        buffers = [torch.zeros(n, **int32) for n in (size + 1, most_pages, size)]
        self.wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
        indptr, indices, last = (torch.zeros(n, **int32) for n in (size + 1, most_pages, size))
        zeros = torch.zeros(2, size, dtype=torch.int64, device=device)
        requests = torch.full((size,), -1, **int32)
        self.inputs = Inputs(zeros[0], zeros[1], requests, (indices, indptr, last), self.wrapper)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result = torch.empty(0)

    def run(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the batch's requests; valid until the next run()."""
        missing = self.size - len(batch.parts)
        _, indptr, indices, last = tables(batch.parts + [(1, [], 0)] * missing)
        self.wrapper.plan(indptr, indices, last, *self.model.plan_arguments(), q_data_type=self.model.dtype)
        here, step = inputs_of(batch, self.wrapper, self.model.device), self.inputs
        step.requests.fill_(-1)
        rows = (step.ids, here.ids), (step.positions, here.positions), (step.requests, here.requests)
        whole = zip(step.tables, (indices, indptr, last), strict=True)
        for place, tensor in itertools.chain(rows, whole):
            place[: tensor.shape[0]].copy_(tensor)
        if self.model.device.type != "cuda":
            return self.model.hidden(step)[: len(batch.parts)]
        if self.graph is None:
            self._capture()
        self.graph.replay()
        return self.result[: len(batch.parts)]

    def _capture(self) -> None:
        self.model.hidden(self.inputs)  # loads what a capture cannot
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.model.hidden(self.inputs)


class Engine:
    """A thread that computes steps as long as there are requests."""

    def __init__(
        self, model: Any, num_pages: int = 1024, most_tokens: int = 128, most_requests: int = 64,
        graphs: bool | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        device = device or first_call.device()
        self.model, self.pages = Model(model, num_pages, device), Pages(num_pages)
        self.most_tokens, self.most_requests = most_tokens, most_requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        workspaces = [torch.empty(64 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
        self._flat = quire.BatchPrefillWithPagedKVCacheWrapper(workspaces[0])
        self._cascade = quire.MultiLevelCascadeAttentionWrapper(2, workspaces[0])
        self._workspace, self._num_table_pages = workspaces[1], num_pages * 8
        self._uses_graphs = device.type == "cuda" if graphs is None else graphs
        self._graphs: dict[int, GraphedDecode] = {}  # by the most requests that they take
        self._wake, self._is_stopping, self._numbers = threading.Condition(), False, itertools.count(1)
        self._thread = threading.Thread(target=self._loop, name="engine")
        self.steps = self.generated = 0
        self.last_step: dict[str, Any] = {}
        self.kind, self._picture, self._picture_wanted = "", "<svg xmlns='http://www.w3.org/2000/svg'/>", 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the present step; requests that are not done are told."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, request: Request) -> None:
        """Raises ValueError if the request can never be served."""
        most = min(len(self.pages.users) * PAGE_SIZE, self.model.model.config.max_position_embeddings)
        if request.prompt_len + request.max_tokens > most:
            raise ValueError(f"prompt and max_tokens: expected at most {most} tokens together")
        with self._wake:
            if self._is_stopping:
                raise ValueError("the server is stopping")
            request.number = next(self._numbers)
            self.waiting.append(request)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Forget the request before the next step, if it is not done."""
        with self._wake:
            request.is_cancelled = True
            self._wake.notify()

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        with self._wake:
            rows = [
                {"number": r.number, "prompt": r.prompt_len, "found": r.found, "cached": r.cached,
                 "generated": r.num_generated, "max": r.max_tokens, "waits": not r.pages}
                for r in (*self.running, *itertools.islice(self.waiting, 200))
            ]  # fmt: skip
            return {
                "requests": rows, "pages": self.pages.picture(), "steps": self.steps, "generated": self.generated,
                "waiting": len(self.waiting), "step": self.last_step,
            }  # fmt: skip

    def schedule(self) -> str:
        """The picture of a recent plan, as SVG; it is drawn while somebody asks for it."""
        self._picture_wanted = time.monotonic()
        return self._picture

    def _loop(self) -> None:
        with torch.inference_mode():
            while self._await_work():
                work = self._schedule()
                try:
                    if work:
                        self._step(Batch(work))
                except Exception as error:  # what one step does wrong must not end the server: its requests are told
                    for request, _ in work:
                        self._leave(request, error)
        for request in (*self.running, *self.waiting):
            request.send(RuntimeError("the server is stopping"))

    def _await_work(self) -> bool:
        with self._wake:
            while not (self._is_stopping or self.waiting or self.running):
                self._wake.wait()
            return not self._is_stopping

    def _schedule(self) -> list[tuple[Request, int]]:
        """Who computes how many tokens in the next step: those that generate first, then prompts as they came."""
        with self._wake:
            for request in [r for r in self.running if r.is_cancelled]:
                self._leave(request, None)
            self.waiting = deque(r for r in self.waiting if not r.is_cancelled)
            while self.waiting and len(self.running) < self.most_requests and self.pages.admit(self.waiting[0]):
                self.running.append(self.waiting.popleft())
        budget, work = self.most_tokens, []
        for request in sorted(self.running, key=lambda r: (not r.num_generated, r.number)):
            rows = min(budget, len(request.tokens) - request.cached)
            if rows:
                self.pages.extend(request, request.cached + rows)
                work.append((request, rows))
                budget -= rows
        return work

    def _step(self, batch: Batch) -> None:
        began = time.perf_counter()
        hidden = self._hidden(batch)
        ends = (indptr(batch.num_rows)[1:] - 1).to(self.model.device)
        best = self.model.model.lm_head(hidden[ends]).argmax(dim=1).tolist()
        with self._wake:
            for i, (request, rows) in enumerate(batch.work):
                request.cached += rows
                self.pages.publish(request)
                if request.cached == len(request.tokens):
                    self._accept(request, best[i])
            self.steps += 1
            self.last_step = {
                "ms": 1e3 * (time.perf_counter() - began), "requests": len(batch.work), "tokens": sum(batch.num_rows),
                "prefill": sum(rows for request, rows in batch.work if rows > 1 or not request.num_generated),
                "shared": sum(batch.shared), "kind": self.kind,
            }  # fmt: skip

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """Plan the step, then run the model."""
        options = {"causal": True, "q_data_type": self.model.dtype}
        if any(batch.shared):
            self.kind = "cascade"
            arrays = [list(pair) for pair in zip(*(tables(level) for level in batch.levels()), strict=True)]
            self._cascade.plan(*arrays, *self.model.plan_arguments(), **options)
            return self.model.hidden(inputs_of(batch, self._cascade, self.model.device))
        if self._uses_graphs and batch.is_decode:
            self.kind = "CUDA graph" if self.model.device.type == "cuda" else "decode at fixed places"
            size = 1 << (len(batch.parts) - 1).bit_length()
            if size not in self._graphs:
                self._graphs[size] = GraphedDecode(self.model, size, self._num_table_pages, self._workspace)
            return self._graphs[size].run(batch)
        self.kind = "prefill and decode" if not batch.is_decode else "decode"
        self._flat.plan(*tables(batch.parts), *self.model.plan_arguments(), **options)
        if time.monotonic() - self._picture_wanted < 2:
            self._picture = quire.viz.schedule(self._flat).svg
        return self.model.hidden(inputs_of(batch, self._flat, self.model.device))

    def _accept(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self.generated += 1
        request.send(token)
        ends = self.model.model.config.eos_token_id
        request.reason = "stop" if token in (ends if isinstance(ends, list) else [ends]) else "length"
        if request.num_generated == request.max_tokens or request.reason == "stop":
            self._leave(request, None)

    def _leave(self, request: Request, error: Exception | None) -> None:
        self.running.remove(request)
        self.pages.leave(request)
        request.send(error)
