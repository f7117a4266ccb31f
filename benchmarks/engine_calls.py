"""Calls of serving engines through FlashAttention-3's signature, beside FlashAttention-3; interleaved in one process.

Each row is one call as vLLM and SGLang make it, with the same arguments for both libraries. The results are compared
before anything is timed. Then both take turns, each call in a CUDA graph of its own, timed by events, out of a cold L2;
the host's time of an eager call follows.

    python benchmarks/engine_calls.py --json results/engine_calls.json

The exit status is 1 if results differ, or a call of quire fails.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

from latent_rows import measure_rows, tried
from timing import Timing, captured, cuda_times, estimate_us, flusher, sets_for

__all__ = ["ROWS", "Row", "main"]

MODULES = {"quire": "quire.compat.flash_attn_interface", "flash-attention-3": "fa3_fwd_interface"}
_WORST = 1e-2  #: of the norm of the difference of both results, to that of a result
_EAGER_CALLS = 200


@dataclass(frozen=True)
class Row:
    """A batch of requests with these numbers of queries and keys; page_size 0: keys without pages."""

    name: str
    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    page_size: int = 0
    window: int = -1
    qv_dim: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        heads_q, heads_k = self.heads
        return 2 * (sum(self.kv_lens) * heads_k * sum(self.dims) + sum(self.qo_lens) * heads_q * sum(self.dims))


def _skewed(batch: int) -> list[int]:
    return [max(64, 16384 // (1 + i)) for i in range(batch)]


def _mixed(batch: int) -> list[int]:
    return [64 * (1 + (37 * i) % 61) for i in range(batch)]


ROWS = (
    Row("prefill-2x8192", [8192] * 2, [8192] * 2),
    Row("prefill-16x1024", [1024] * 16, [1024] * 16),
    Row("prefill-mixed-24", _mixed(24), _mixed(24)),
    Row("prefill-d64-window-128", [4096] * 4, [4096] * 4, (64, 8), (64, 64), window=127),
    Row("prefill-d256-window-1024", [4096] * 4, [4096] * 4, (16, 8), (256, 256), window=1023),
    Row("prefill-192-128", [4096] * 2, [4096] * 2, (32, 32), (192, 128)),
    Row("prefill-64-8-heads", [8192], [8192], (64, 8)),
    Row("chunk-512-page-16", [512] * 4, [8192] * 4, page_size=16),
    Row("chunk-512-page-1", [512] * 4, [8192] * 4, page_size=1),
    Row("chunk-2048-page-64", [2048] * 2, [32768] * 2, page_size=64),
    Row("decode-b64-page-16", [1] * 64, [4096] * 64, page_size=16),
    Row("decode-b64-page-1", [1] * 64, [4096] * 64, page_size=1),
    Row("decode-b16-page-64", [1] * 16, [2048] * 16, page_size=64),
    Row("decode-b1-32k-page-16", [1], [32768], page_size=16),
    Row("decode-skewed-b32-page-16", [1] * 32, _skewed(32), page_size=16),
    Row("decode-d64-window-128-page-16", [1] * 64, [8192] * 64, (64, 8), (64, 64), 16, 127),
    Row("decode-d256-b32-page-16", [1] * 32, [4096] * 32, (16, 8), (256, 256), 16),
    Row("verify-q4-b64-page-16", [4] * 64, [4096] * 64, page_size=16),
    Row("mla-qv-h16-b64-page-64", [1] * 64, [4096] * 64, (16, 1), (64, 512), 64, qv_dim=512),
    Row("mla-qv-h128-b64-page-64", [1] * 64, [4096] * 64, (128, 1), (64, 512), 64, qv_dim=512),
)


@dataclass
class Result:
    provider: str
    times: Timing | None = None
    host_us: float = 0.0  #: median of an eager call
    error: float = 0.0  #: of the norm
    reason: str = ""

    @property
    def is_bad(self) -> bool:
        return (self.provider == "quire" and bool(self.reason)) or self.error > _WORST


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _offsets(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.nn.functional.pad(_int32(lens, device).cumsum(0, dtype=torch.int32), (1, 0))


def _arguments(row: Row, device: torch.device, seed: int) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the call."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    (heads_q, heads_k), (dim, dim_v) = row.heads, row.dims
    common: dict[str, Any] = {"causal": True, "num_splits": 0, **row.options}  # as vLLM and SGLang pass it
    if row.window >= 0:
        common["window_size"] = (row.window, 0)
    if row.qv_dim:
        common["qv"] = randn(sum(row.qo_lens), heads_q, row.qv_dim)
    q, offsets = randn(sum(row.qo_lens), heads_q, dim), _offsets(row.qo_lens, device)
    if not row.page_size:
        k, v = randn(sum(row.kv_lens), heads_k, dim), randn(sum(row.kv_lens), heads_k, dim_v)
        lens = {"cu_seqlens_q": offsets, "cu_seqlens_k": _offsets(row.kv_lens, device)}
        longest = {"max_seqlen_q": max(row.qo_lens), "max_seqlen_k": max(row.kv_lens)}
        return "flash_attn_varlen_func", {"q": q, "k": k, "v": v, **lens, **longest, **common}
    pages = [-(-n // row.page_size) for n in row.kv_lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for i, numbers in enumerate(order.split(pages)):
        table[i, : len(numbers)] = numbers
    shape = sum(pages), row.page_size, heads_k
    cache = {"k_cache": randn(*shape, dim), "v_cache": randn(*shape, dim_v), "page_table": table.to(device)}
    lens = {"cache_seqlens": _int32(row.kv_lens, device), "cu_seqlens_q": offsets, "max_seqlen_q": max(row.qo_lens)}
    return "flash_attn_with_kvcache", {"q": q, **cache, **lens, **common}


def _out(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _host_us(call: Callable[[int], object]) -> float:
    times = []
    for _ in range(_EAGER_CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(0)
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def _measure(row: Row, providers: Sequence[str], device: torch.device, rounds: int) -> Sequence[Result]:
    num_sets = min(4, sets_for(row.num_bytes, device))
    problems = [_arguments(row, device, seed) for seed in range(num_sets)]
    name = problems[0][0]
    results = [Result(provider) for provider in providers]
    outs: dict[str, torch.Tensor] = {}

    def launch_of(result: Result) -> Callable[[int], object]:
        function = getattr(import_module(MODULES[result.provider]), name)
        calls = [partial(function, **arguments) for _, arguments in problems]
        for call in calls * 3:
            out = _out(call())
        outs[result.provider] = out.float()
        return lambda i: calls[i]()

    launches = tried(results, launch_of)
    if len(outs) == 2:
        ours, theirs = outs["quire"], outs["flash-attention-3"]
        results[0].error = ((ours - theirs).norm() / theirs.norm()).item()
    if rounds and launches:
        for result, launch in launches:
            result.host_us = _host_us(launch)
        graphs = [captured(launch, num_sets) for _, launch in launches]
        estimates = [estimate_us(launch, num_sets) for _, launch in launches]
        for (result, _), times in zip(
            launches, cuda_times(graphs, estimates, num_sets, rounds, flusher("read")), strict=True
        ):
            result.times = times
    return results


def _line(row: Row, result: Result) -> str:
    if result.times is None:
        return f"{row.name:32} {result.provider:18} {result.reason or f'error {result.error:.1e}'}"
    times = result.times
    return (
        f"{row.name:32} {result.provider:18} {times.median:9.1f} us ({times.least:.1f} .. {times.most:.1f})"
        f"   host {result.host_us:6.1f} us   error {result.error:.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    return measure_rows(__doc__, ROWS, MODULES, _measure, _line, arguments)


if __name__ == "__main__":
    sys.exit(main())
