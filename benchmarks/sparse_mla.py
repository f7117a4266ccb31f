"""Sparse MLA beside FlashMLA: each query attends to the tokens that its indices name; interleaved in one process.

Each result is compared with float64 on some queries before anything is timed. Then the providers of a row take turns,
each call in a CUDA graph of its own, timed by events, out of a cold L2. Reported are the median with the least and the
most, TFLOP/s, and GB/s of the latents that are named, counted once a query. FlashMLA decodes rows of 656 bytes, which
have 8-bit latents, as `quire-656` does; the 16-bit latents are what such rows mean. Both plan ahead, by
get_mla_metadata(), what depends on shapes alone.

    python benchmarks/sparse_mla.py --rows prefill --json results/sparse_mla.json

The exit status is 1 if a result of quire is wrong, or `quire` fails. A peer that is not installed, or does not take a
row, is named with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import quire
from latent_rows import meant_by, measure_rows, rows_of_656_bytes, tried
from quire.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from timing import Timing, cuda_times, estimate_us, flusher

__all__ = ["ROWS", "Row", "main"]

SCALE = 576**-0.5
PAGE_SIZE = 64
_WORST = 1e-2  #: of the norm of a row of the result


@dataclass(frozen=True)
class Row:
    """`queries` of each of `batch` requests of kv_len tokens; prefill: one request, whose queries are rows."""

    name: str
    batch: int
    queries: int
    num_heads: int
    kv_len: int
    top_k: int = 2048
    target: str = ""

    @property
    def is_prefill(self) -> bool:
        return self.batch == 1

    @property
    def num_keys(self) -> int:
        return self.batch * self.queries * self.top_k

    @property
    def flops(self) -> float:
        return 2.0 * self.num_keys * self.num_heads * (576 + 512)


ROWS = (
    Row("decode-b64-q1-h128", 64, 1, 128, 4096, target="80 us"),
    Row("decode-b64-q2-h128", 64, 2, 128, 4096, target="150 us"),
    Row("decode-b64-q1-h64", 64, 1, 64, 4096, target="60 us"),
    Row("decode-b64-q1-h16", 64, 1, 16, 4096, target="34 us"),
    Row("decode-b2-q1-h128", 2, 1, 128, 4096, target="15 us"),
    Row("prefill-q4096-h128-kv8192", 1, 4096, 128, 8192, target="640 TFLOP/s"),
    Row("prefill-q4096-h128-kv32768", 1, 4096, 128, 32768, target="610 TFLOP/s"),
)

Launch = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Random queries, latents, and for each query top_k tokens of its request in a random order."""

    row: Row
    query: torch.Tensor  #: [batch, queries, num_heads, 576]
    cache: torch.Tensor  #: [num_pages, PAGE_SIZE, 1, 576]
    indices: torch.Tensor  #: [batch, queries, top_k] int32

    @classmethod
    def of(cls, row: Row, device: torch.device) -> Inputs:
        torch.manual_seed(0)
        like = {"device": device, "dtype": torch.bfloat16}
        query = torch.randn(row.batch, row.queries, row.num_heads, 576, **like)
        cache = torch.randn(row.batch * row.kv_len // PAGE_SIZE, PAGE_SIZE, 1, 576, **like)
        cache = meant_by(rows_of_656_bytes(cache))
        chosen = torch.rand(row.batch, row.queries, row.kv_len, device=device).topk(row.top_k).indices
        begin = torch.arange(row.batch, device=device)[:, None, None] * row.kv_len
        return cls(row, query, cache, (chosen + begin).int())

    def error(self, result: torch.Tensor) -> float:
        """The worst distance of a row of the first and the last query from float64, over the row's norm."""
        queries, indices = self.query.flatten(0, 1), self.indices.flatten(0, 1)
        worst = 0.0
        for at in (0, -1):
            keys = self.cache.view(-1, 576)[indices[at].long()].double()
            truth = (queries[at].double() @ keys.T * SCALE).softmax(-1) @ keys[:, :512]
            worst = max(worst, float(((result[at].double() - truth).norm(dim=-1) / truth.norm(dim=-1)).max()))
        return worst


def _quire(x: Inputs) -> Launch:
    if x.row.is_prefill:
        kv = x.cache.view(-1, 1, 576)
        return lambda _: flash_mla_sparse_fwd(x.query[0], kv, x.indices.view(-1, 1, x.row.top_k), SCALE)[0]
    metadata = get_mla_metadata()
    return lambda _: flash_mla_with_kvcache(
        x.query, x.cache, None, None, 512, *metadata, SCALE, indices=x.indices
    )[0].flatten(0, 1)  # fmt: skip


def _quire_on(backend: str, x: Inputs) -> Launch:
    workspace = torch.zeros(1 << 29, dtype=torch.uint8, device=x.query.device)
    query, cache = x.query.flatten(0, 1).unsqueeze(1), x.cache.squeeze(2)
    tables = x.indices.view(-1, 1, x.row.top_k)
    return lambda _: quire.mla.trtllm_batch_decode_with_kv_cache_mla(
        query, cache, workspace, 128, 512, 64, tables, None, x.row.top_k, x.row.top_k, bmm1_scale=SCALE, backend=backend
    ).squeeze(1)  # fmt: skip


def _flashmla(x: Inputs) -> Launch:
    from sgl_kernel import flash_mla

    row, device = x.row, x.query.device
    if row.is_prefill:
        kv = x.cache.view(-1, 1, 576)
        return lambda _: flash_mla.flash_mla_sparse_fwd(x.query[0], kv, x.indices.view(-1, 1, row.top_k), SCALE)[0]
    if row.num_heads % 64:
        raise ValueError(f"a multiple of 64 heads, got {row.num_heads}")
    lens = torch.full((row.batch,), row.kv_len, dtype=torch.int32, device=device)
    plan = flash_mla.get_mla_metadata(lens, row.queries * row.num_heads, 1, row.num_heads, True, row.top_k)
    table = torch.zeros(row.batch, row.kv_len // PAGE_SIZE, dtype=torch.int32, device=device)
    cache = rows_of_656_bytes(x.cache)
    return lambda _: flash_mla.flash_mla_with_kvcache(
        x.query, cache, table, lens, 512, *plan, SCALE, is_fp8_kvcache=True, indices=x.indices
    )[0].flatten(0, 1)  # fmt: skip


def _quire_656(x: Inputs) -> Launch:
    if x.row.is_prefill:
        raise ValueError("prefill reads 16-bit latents")
    cache, metadata = rows_of_656_bytes(x.cache), get_mla_metadata()
    return lambda _: flash_mla_with_kvcache(
        x.query, cache, None, None, 512, *metadata, SCALE, is_fp8_kvcache=True, indices=x.indices
    )[0].flatten(0, 1)  # fmt: skip


PROVIDERS: dict[str, Callable[[Inputs], Launch]] = {
    "quire": _quire,
    "quire-656": _quire_656,
    "quire-fa3": lambda x: _quire_on("quire:fa3", x),
    "quire-fa2": lambda x: _quire_on("quire:fa2", x),
    "flashmla": _flashmla,
}


@dataclass
class Result:
    """One provider on one row."""

    provider: str
    reason: str | None = None  #: why there is no figure
    error: float | None = None
    timing: Timing | None = None
    tflops: float | None = None
    gigabytes_per_s: float | None = None

    @property
    def is_bad(self) -> bool:
        """What the exit status tells: a wrong result of quire's, or none of what calls take by default."""
        missing = self.provider == "quire" and self.error is None
        ours = self.provider.startswith("quire") and self.error is not None
        return missing or (ours and not self.error < _WORST)


def measure(row: Row, names: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    """All providers on one row; with no rounds, results are checked and nothing is timed."""
    x, results = Inputs.of(row, device), [Result(name) for name in names]

    def launch_of(result: Result) -> Launch:
        launch = PROVIDERS[result.provider](x)
        result.error = x.error(launch(0))
        return _captured(launch) if rounds else launch

    launches = tried(results, launch_of)
    if not rounds:
        return results
    estimates = [estimate_us(launch, 1) for _, launch in launches]
    timings = cuda_times([(launch, 1) for _, launch in launches], estimates, 1, rounds, flusher("write"))
    for (result, _), timing in zip(launches, timings, strict=True):
        result.timing = timing
        result.tflops, result.gigabytes_per_s = row.flops / timing.median / 1e6, row.num_keys * 1.152 / timing.median
    return results


def _captured(launch: Launch) -> Launch:
    """One call as a CUDA graph; called before, because a capture loads no kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launch(0)

    def replay(_: int, _plans: Launch = launch) -> torch.Tensor:  # `launch` owns what the graph reads
        graph.replay()
        return result

    return replay


def _line(row: Row, result: Result) -> str:
    if result.timing is None:
        return f"{row.name:28} {result.provider:10} {result.reason or f'error {result.error:.1e}'}"
    t = result.timing
    return (
        f"{row.name:28} {result.provider:10} {t.median:8.1f} us [{t.least:.1f} {t.most:.1f}] "
        f"{result.tflops:5.0f} TFLOP/s {result.gigabytes_per_s:5.0f} GB/s  error {result.error:.1e}  {row.target}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    return measure_rows(__doc__, ROWS, PROVIDERS, measure, _line, arguments)


if __name__ == "__main__":
    sys.exit(main())
