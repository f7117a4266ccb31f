"""A small engine for continuous batching over pages: examples/serve.py puts HTTP in front of it.

Each step is one forward pass: one token of every request that is generating, and chunks of the prompts of others, as
many as fit (chunked prefill). Full pages of prompts are found again by what they hold, so that prompts which begin
alike share them; what several requests of a step share is read once (cascade attention). On a GPU, steps that only
generate replay a CUDA graph. The model is any decoder of transformers whose layers see all earlier tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import quire
import quire.attention.viz
from generate import indptr
from paged_model import PAGE_SIZE, Batch, GraphedDecode, Model, Step


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine."""

    tokens: list[int]  #: the prompt, and what has been generated
    max_tokens: int
    send: Callable[[int | Exception | None], None]  #: each token, then None; or an error
    number: int = 0
    cached: int = 0  #: tokens whose keys and values are in the cache
    found: int = 0  #: of them, those that another request had computed
    pages: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    reason: str = "length"  #: why it ended

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.pages_at_end = -(-(self.prompt_len + self.max_tokens) // PAGE_SIZE)
        self.digests = list(self._digests())

    def _digests(self) -> Iterator[bytes]:
        """Of each full page of the prompt, with all before it; not of the last token, which is always computed."""
        digest = hashlib.sha256()
        for end in range(PAGE_SIZE, self.prompt_len, PAGE_SIZE):
            digest.update(array("q", self.tokens[end - PAGE_SIZE : end]).tobytes())
            yield digest.digest()

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class Pages:
    """Who uses the pages of the cache, and which of them hold the beginnings of prompts."""

    def __init__(self, count: int) -> None:
        self.users = [0] * count
        self.reserved = 0  #: pages that running requests may still ask for
        self._unused = OrderedDict.fromkeys(range(count))  # in the order in which they are given away
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def admit(self, request: Request) -> bool:
        """Give the request the pages that others have computed for it, and reserve the rest, if there are as many."""
        found = list(itertools.takewhile(lambda page: page is not None, map(self._by_digest.get, request.digests)))
        needed = request.pages_at_end - len(found)
        if len(self._unused) - sum(not self.users[page] for page in found) - self.reserved < needed:
            return False
        self.reserved += needed
        request.pages, request.cached, request.found = found, len(found) * PAGE_SIZE, len(found) * PAGE_SIZE
        for page in found:
            self._use(page)
        return True

    def extend(self, request: Request, num_tokens: int) -> None:
        """Give the request the pages that its first `num_tokens` tokens need."""
        while len(request.pages) * PAGE_SIZE < num_tokens:
            page = next(iter(self._unused))
            self._by_digest.pop(self._digests.pop(page, b""), None)
            self._use(page)
            self.reserved -= 1
            request.pages.append(page)

    def _use(self, page: int) -> None:
        self.users[page] += 1
        self._unused.pop(page, None)

    def publish(self, request: Request) -> None:
        """Let others find the pages of the prompt that are full now."""
        for page, digest in zip(request.pages[: request.cached // PAGE_SIZE], request.digests, strict=False):
            if digest not in self._by_digest:
                self._by_digest[digest], self._digests[page] = page, digest

    def leave(self, request: Request) -> None:
        """Take back what the request has or may ask for; pages with the beginning of a prompt are given away last."""
        self.reserved -= request.pages_at_end - len(request.pages)
        for page in reversed(request.pages):
            self.users[page] -= 1
            if not self.users[page]:
                self._unused[page] = None
                self._unused.move_to_end(page, last=page in self._digests)

    def picture(self) -> list[int]:
        """Users of each page; -1: nobody, but what it holds may be found."""
        return [users or -(page in self._digests) for page, users in enumerate(self.users)]


class Engine:
    """A thread that computes steps as long as there are requests."""

    def __init__(
        self, model: Any, num_pages: int = 1024, most_tokens: int = 128, most_requests: int = 64,
        graphs: bool | None = None,
    ) -> None:  # fmt: skip
        device, self.model, self.pages = model.device, Model(model, num_pages), Pages(num_pages)
        self.most_tokens, self.most_requests = most_tokens, most_requests
        self.waiting, self.running = deque[Request](), list[Request]()
        workspace, self._workspace = (torch.empty(64 << 20, dtype=torch.uint8, device=device) for _ in range(2))
        self._flat = quire.BatchPrefillWithPagedKVCacheWrapper(workspace)
        self._cascade = quire.MultiLevelCascadeAttentionWrapper(2, workspace)
        self._uses_graphs = device.type == "cuda" if graphs is None else graphs
        self._graphs: dict[int, GraphedDecode] = {}  # by the most requests that they take
        self._wake, self._is_stopping, self._numbers = threading.Condition(), False, itertools.count(1)
        self._thread = threading.Thread(target=self._loop, name="engine")
        self.steps = self.generated = 0
        self.kind, self.last_step = "", dict[str, Any]()
        self._picture, self._picture_wanted = "<svg xmlns='http://www.w3.org/2000/svg'/>", 0.0

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

    def state(self) -> dict[str, Any]:
        """What the page shows."""
        shown = "number", "prompt_len", "found", "cached", "num_generated", "max_tokens"
        with self._wake:
            requests = *self.running, *itertools.islice(self.waiting, 200)
            rows = [{name: getattr(request, name) for name in shown} for request in requests]
            counts = {"steps": self.steps, "generated": self.generated, "waiting": len(self.waiting)}
            return {"requests": rows, "pages": self.pages.picture(), "step": self.last_step, **counts}

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
            self._wake.wait_for(lambda: self._is_stopping or self.waiting or self.running)
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
            if rows := min(budget, len(request.tokens) - request.cached):
                self.pages.extend(request, request.cached + rows)
                work.append((request, rows))
                budget -= rows
        return work

    def _step(self, batch: Batch) -> None:
        began = time.perf_counter()
        prefill = sum(rows for request, rows in batch.work if rows > 1 or not request.num_generated)
        hidden, ends = self._hidden(batch), (indptr(batch.num_rows)[1:] - 1).to(self.model.device)
        best = self.model.model.lm_head(hidden[ends]).argmax(dim=1).tolist()
        milliseconds = 1e3 * (time.perf_counter() - began)
        with self._wake:
            for (request, rows), token in zip(batch.work, best, strict=True):
                request.cached += rows
                self.pages.publish(request)
                if request.cached == len(request.tokens):
                    self._accept(request, token)
            self.steps += 1
            self.last_step = {
                "ms": milliseconds, "tokens": sum(batch.num_rows), "prefill": prefill, "shared": batch.num_shared,
                "kind": self.kind,
            }  # fmt: skip

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """Plan the step, then run the model."""
        draws = time.monotonic() - self._picture_wanted < 2
        is_decode, wrapper = max(batch.num_rows) == 1, self._cascade if batch.num_shared else self._flat
        self.kind = "cascade" if batch.num_shared else "decode" if is_decode else "prefill and decode"
        if self._uses_graphs and is_decode and not batch.num_shared:
            self.kind = "CUDA graph" if self.model.device.type == "cuda" else "decode at fixed places"
            graph = self._graph(len(batch.work))
            hidden, wrapper = graph.run(batch), graph.wrapper
        else:
            self.model.plan(wrapper, batch)
            hidden = self.model.hidden(Step.of(batch, self.model.device), wrapper)
        if draws:
            with contextlib.suppress(quire.ValidationError):  # a cascade whose levels are launches has no one schedule
                self._picture = quire.viz.schedule(wrapper).svg
        return hidden

    def _graph(self, num_requests: int) -> GraphedDecode:
        """The graph of the next power of two."""
        size = 1 << (num_requests - 1).bit_length()
        if size not in self._graphs:
            self._graphs[size] = GraphedDecode(self.model, size, len(self.pages.users) * 8, self._workspace)
        return self._graphs[size]

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
