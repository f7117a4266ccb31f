"""Batch prefill over a paged KV cache: 7 requests, 128 pages, 32 layers, causal and then the same as a custom mask.

The calls are those of FlashInfer's documentation of BatchPrefillWithPagedKVCacheWrapper, made with
`import quire as flashinfer`.

    python examples/paged_prefill.py [--layers N]
"""

from __future__ import annotations

import math
import sys
import time

import torch

import first_call
import quire as flashinfer

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 16, 128
MAX_NUM_PAGES, PAGE_SIZE, NNZ_QO = 128, 16, 100
QO_INDPTR = [0, 33, 44, 55, 66, 77, 88, NNZ_QO]
KV_INDPTR = [0, 17, 29, 44, 48, 66, 100, 128]
LAST_PAGE_LEN = [1, 7, 14, 4, 3, 1, 16]
TOLERANCE = 2e-3  # absolute: outputs are averages of normal values, rounded once to float16


def inputs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qo_indptr [8], paged_kv_indptr [8], paged_kv_indices [128], paged_kv_last_page_len [7]."""
    return (
        torch.tensor(QO_INDPTR, dtype=torch.int32, device=device),
        torch.tensor(KV_INDPTR, dtype=torch.int32, device=device),
        torch.arange(MAX_NUM_PAGES).int().to(device),
        torch.tensor(LAST_PAGE_LEN, dtype=torch.int32, device=device),
    )


def new_wrapper(device: torch.device) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")


def lengths(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, last_page_len: torch.Tensor) -> list[tuple[int, int]]:
    """(qo_len, kv_len) of each request."""
    qo_len = qo_indptr[1:] - qo_indptr[:-1]
    kv_len = PAGE_SIZE * (kv_indptr[1:] - kv_indptr[:-1] - 1) + last_page_len
    return list(zip(qo_len.tolist(), kv_len.tolist(), strict=True))


def causal_mask(each: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """The causal masks of all requests, row-major, one behind the other: bool [sum(qo_len * kv_len)]."""
    return torch.cat(
        [torch.tril(torch.full((q, kv), True, device=device), diagonal=kv - q).flatten() for q, kv in each]
    )


def reference(q: torch.Tensor, kv_cache: torch.Tensor, each: list[tuple[int, int]]) -> torch.Tensor:
    """Causal attention in float64, request by request: [nnz_qo, num_qo_heads, head_dim]."""
    outputs = []
    group = NUM_QO_HEADS // NUM_KV_HEADS
    for i, (qo_len, kv_len) in enumerate(each):
        rows = q[QO_INDPTR[i] : QO_INDPTR[i + 1]].double()
        pages = kv_cache[KV_INDPTR[i] : KV_INDPTR[i + 1]].double()
        k, v = (pages[:, j].flatten(0, 1)[:kv_len].repeat_interleave(group, dim=1) for j in (0, 1))
        logits = torch.einsum("qhd,khd->hqk", rows, k) / math.sqrt(HEAD_DIM)
        hidden = torch.ones(qo_len, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - qo_len + 1)
        outputs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -math.inf).softmax(-1), v))
    return torch.cat(outputs)


def attend_once() -> None:
    """One layer of the example, with each of its two masks."""
    device = first_call.device()
    table = inputs(device)
    wrapper = new_wrapper(device)
    q = torch.ones(NNZ_QO, NUM_QO_HEADS, HEAD_DIM, dtype=torch.float16, device=device)
    kv_cache = torch.ones(MAX_NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float16, device=device)
    mask = causal_mask(lengths(table[0], table[1], table[3]), device)
    for masking in ({"causal": True}, {"custom_mask": mask}):
        wrapper.plan(*table, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, **masking)
        wrapper.run(q, kv_cache)


def main(layers: int) -> None:
    device = first_call.device()
    first_call.report(__file__)
    torch.manual_seed(0)
    qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len = inputs(device)
    each = lengths(qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
    q_at_layer = torch.randn(layers, NNZ_QO, NUM_QO_HEADS, HEAD_DIM).half().to(device)
    kv_cache_at_layer = torch.randn(
        layers, MAX_NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.float16, device=device
    )
    prefill_wrapper = new_wrapper(device)

    with first_call.watch() as compiled:
        began = time.perf_counter()
        prefill_wrapper.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            NUM_QO_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
            causal=True,
        )
        outputs = [prefill_wrapper.run(q, kv) for q, kv in zip(q_at_layer, kv_cache_at_layer, strict=True)]
        prefill_wrapper.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            NUM_QO_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
            custom_mask=causal_mask(each, device),
        )
        outputs_custom = [prefill_wrapper.run(q, kv) for q, kv in zip(q_at_layer, kv_cache_at_layer, strict=True)]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began

    print(
        f"job             {len(each)} requests x {layers} layers, twice, in {seconds:.2f} s on {device}, "
        f"{len(compiled.variants)} compiled"
    )
    error = 0.0
    for q, kv_cache, o, o_custom in zip(q_at_layer, kv_cache_at_layer, outputs, outputs_custom, strict=True):
        if not torch.allclose(o_custom, o, rtol=1e-3, atol=1e-3):
            sys.exit("FAILED: the custom mask gives something else than causal=True")
        error = max(error, (o.double() - reference(q, kv_cache, each)).abs().max().item())
    first_call.judge(error, TOLERANCE)


if __name__ == "__main__":
    first_call.run(attend_once, main, __doc__, layers=32)
