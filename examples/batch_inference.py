"""A batch inference engine: 16 requests, 32 layers, one token a step, each layer one call of xqa() over its pages.

The engine is that of the manual's page of flashinfer.xqa, made with `import quire as flashinfer`. The page leaves out
projections, and hands each layer's output to the next one as queries. Here the values have a cache of their own.

    python examples/batch_inference.py [--layers N]
"""

from __future__ import annotations

import math
import time

import torch

import first_call
import quire as flashinfer

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_NUM_PAGES, PAGE_SIZE, BATCH_SIZE = 512, 16, 16
TOLERANCE = 3e-3  # absolute: outputs are averages of normal values; rotation and output are rounded to float16


class BatchInferenceEngine:
    """Decodes a token of each request through all layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        pages = (num_layers, 2, MAX_NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.kv_caches = torch.randn(pages, device=device).half()  # as if the prompts had been read

    def decode_step(
        self, layer_idx: int, q: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor
    ) -> torch.Tensor:
        """One layer."""
        k_cache, v_cache = self.kv_caches[layer_idx]
        return flashinfer.xqa(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            pos_encoding_mode="ROPE_LLAMA",
        )

    def generate_step(self, queries: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> list:
        """The input of each layer, and the output of the last."""
        hidden_states = [queries]
        for layer_idx in range(len(self.kv_caches)):
            hidden_states.append(self.decode_step(layer_idx, hidden_states[-1], page_table, seq_lens))
        return hidden_states


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """LLaMA's rotary embedding of x [tokens, heads, head_dim], in float64."""
    half = HEAD_DIM // 2
    frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions[:, None] * frequencies)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def reference(
    q: torch.Tensor, kv_cache: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """One layer in float64, request by request: [batch_size, num_qo_heads, head_dim]."""
    outputs = []
    for row, pages, length in zip(q.double(), page_table, seq_lens.tolist(), strict=True):
        k, v = kv_cache[:, pages.long()].flatten(1, 2)[:, :length].double()
        positions = torch.arange(length, device=q.device)
        k, v = (t.repeat_interleave(NUM_QO_HEADS // NUM_KV_HEADS, dim=1) for t in (rotated(k, positions), v))
        logits = torch.einsum("hd,khd->hk", rotated(row[None], positions[-1:])[0], k) / math.sqrt(HEAD_DIM)
        outputs.append(torch.einsum("hk,khd->hd", logits.softmax(-1), v))
    return torch.stack(outputs)


def inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page's batch: queries, 32 pages for each request, 100 to 500 tokens."""
    q = torch.randn(BATCH_SIZE, NUM_QO_HEADS, HEAD_DIM).half().to(device)
    page_table = torch.randint(0, MAX_NUM_PAGES, (BATCH_SIZE, 32)).int().to(device)
    return q, page_table, torch.randint(100, 500, (BATCH_SIZE,)).int().to(device)


def attend_once() -> None:
    """One layer of the example."""
    device = first_call.device()
    BatchInferenceEngine(1, device).generate_step(*inputs(device))


def main(layers: int) -> None:
    device = first_call.device()
    first_call.report(__file__)
    torch.manual_seed(0)
    engine, batch = BatchInferenceEngine(layers, device), inputs(device)
    with first_call.watch() as compiled:
        began = time.perf_counter()
        hidden_states = engine.generate_step(*batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    print(
        f"job             {BATCH_SIZE} requests x {layers} layers in {seconds:.2f} s on {device}, "
        f"{len(compiled.variants)} compiled"
    )
    error = max(
        (o.double() - reference(q, kv_cache, *batch[1:])).abs().max().item()
        for q, o, kv_cache in zip(hidden_states, hidden_states[1:], engine.kv_caches, strict=False)
    )
    first_call.judge(error, TOLERANCE)


if __name__ == "__main__":
    first_call.run(attend_once, main, __doc__, layers=32)
