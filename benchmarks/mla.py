"""Decode with multi-head latent attention beside its peers: providers x rows, interleaved in one process.

Each result is compared with float64 on some rows before anything is timed. Then the providers of a row take turns,
timed by events, out of a cold L2. Reported are the median with the least and the most, TFLOP/s, and GB/s of the
latents, counted once.

    python benchmarks/mla.py --rows b64 --json results/mla.json

The exit status is 1 if a result of quire is wrong, or `quire` fails. Peers that are not installed are named with the
reason: FlashMLA (`sgl_kernel.flash_mla`), FlashInfer, and FlashAttention-3 with `qv` (`fa3_fwd_interface`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import quire
from latent_rows import meant_by, measure_rows, rows_of_656_bytes, tried
from timing import Timing, cuda_times, estimate_us, flusher

__all__ = ["ROWS", "Inputs", "Row", "main"]

SCALE = 192**-0.5
WORKSPACE = 512 << 20
_WORST = 1e-2  #: of the norm of a row of the result


@dataclass(frozen=True)
class Row:
    """One problem: bf16, causal where a request has several queries."""

    name: str
    kv_lens: tuple[int, ...]
    num_heads: int
    q_len: int = 1
    page_size: int = 64
    target_us: float | None = None
    latents: str = "bf16"  #: "e4m3" and "656": read by quire alone; their numbers are what the others would read

    @property
    def flops(self) -> float:
        return 2.0 * sum(self.kv_lens) * self.num_heads * self.q_len * (576 + 512)

    @property
    def bytes(self) -> int:
        return sum(self.kv_lens) * {"bf16": 1152, "e4m3": 576, "656": 656}[self.latents]


def _skewed() -> tuple[int, ...]:
    """64 lengths from 100 to 20000, most of them short, in an order that is neither up nor down."""
    lengths = [round(100 * 200 ** (i / 63)) for i in range(64)]
    return tuple(lengths[i * 37 % 64] for i in range(64))


ROWS = (
    Row("b64-kv4096-h128", (4096,) * 64, 128, target_us=112),
    Row("b64-kv4096-h128-q2", (4096,) * 64, 128, 2, target_us=215),
    Row("b16-kv16384-h128", (16384,) * 16, 128, target_us=117),
    Row("b64-kv4096-h16", (4096,) * 64, 16, target_us=74),
    Row("b128-kv8192-h16", (8192,) * 128, 16, target_us=270),
    Row("b128-kv4096-h64", (4096,) * 128, 64, target_us=140),
    Row("b1-kv32768-h128", (32768,), 128, target_us=30),
    Row("b4-kv1024-h128", (1024,) * 4, 128, target_us=13),
    Row("b64-skewed-h128", _skewed(), 128, target_us=115),
    Row("b4-mixed-h16-q4", (4641, 45118, 1730, 1696), 16, 4, target_us=30),
    Row("b64-kv4096-h128-p16", (4096,) * 64, 128, page_size=16),
    Row("b64-kv4096-h128-p1", (4096,) * 64, 128, page_size=1),
    Row("b64-kv4096-h16-e4m3", (4096,) * 64, 16, target_us=50, latents="e4m3"),
    Row("b64-kv4096-h16-656", (4096,) * 64, 16, latents="656"),
    Row("b128-kv8192-h16-e4m3", (8192,) * 128, 16, latents="e4m3"),
    Row("b64-kv4096-h128-e4m3", (4096,) * 64, 128, target_us=112, latents="e4m3"),
    Row("b64-kv4096-h128-656", (4096,) * 64, 128, latents="656"),
)

Launch = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Random queries and a cache whose pages lie in a random order."""

    row: Row
    query: torch.Tensor  #: [batch * q_len, num_heads, 576]
    cache: torch.Tensor  #: [num_pages, page_size, 576]
    pages: torch.Tensor  #: int32, those of all requests

    @classmethod
    def of(cls, row: Row, device: torch.device) -> Inputs:
        torch.manual_seed(0)
        total = sum(-(-n // row.page_size) for n in row.kv_lens)
        like = {"device": device, "dtype": torch.bfloat16}
        query = torch.randn(len(row.kv_lens) * row.q_len, row.num_heads, 576, **like)
        cache = torch.randn(total, row.page_size, 576, **like)
        if row.latents == "e4m3":
            cache = cache.to(torch.float8_e4m3fn).to(torch.bfloat16)
        elif row.latents == "656":
            cache = meant_by(rows_of_656_bytes(cache))
        return cls(row, query, cache, torch.randperm(total).int().to(device))

    @cached_property
    def indptr(self) -> torch.Tensor:
        """Offsets into `pages`, on the host."""
        return torch.tensor([0, *(-(-n // self.row.page_size) for n in self.row.kv_lens)]).cumsum(0).int()

    @property
    def qo_indptr(self) -> torch.Tensor:
        return torch.arange(len(self.row.kv_lens) + 1, dtype=torch.int32) * self.row.q_len

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """q_nope, q_pe, ckv and kpe."""
        q, kv = self.query, self.cache
        return q[..., :512], q[..., 512:], kv[..., :512], kv[..., 512:]

    def keys(self, request: int) -> torch.Tensor:
        """The latents of a request in float64 [kv_len, 576]."""
        pages = self.pages[self.indptr[request] : self.indptr[request + 1]].long()
        return self.cache[pages].reshape(-1, 576)[: self.row.kv_lens[request]].double()

    def error(self, result: torch.Tensor) -> float:
        """The worst distance of a row of the first and the last request from float64, over the row's norm."""
        return max(self._error(result, request) for request in {0, len(self.row.kv_lens) - 1})

    def _error(self, result: torch.Tensor, request: int) -> float:
        rows, keys = slice(request * self.row.q_len, (request + 1) * self.row.q_len), self.keys(request)
        logits = torch.einsum("qhd,kd->qhk", self.query[rows].double(), keys) * SCALE
        last = torch.arange(self.row.q_len, device=keys.device) + len(keys) - self.row.q_len
        logits.masked_fill_((torch.arange(len(keys), device=keys.device) > last[:, None])[:, None], -torch.inf)
        truth = torch.einsum("qhk,kd->qhd", logits.softmax(-1), keys[:, :512])
        return float(((result[rows].double() - truth).norm(dim=-1) / truth.norm(dim=-1)).max())


def _planned(wrapper: Any, x: Inputs, host: bool) -> Launch:
    """A wrapper of quire's or FlashInfer's; the latter reads its lengths on the device."""
    row, device, dtype = x.row, x.query.device, torch.bfloat16
    given: dict[str, torch.Tensor] = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), x.parts, strict=True))
    if row.latents == "656":
        dtype, given = torch.uint8, {"query": x.query, "kv_cache": rows_of_656_bytes(x.cache).view(torch.uint8)}
    elif row.latents == "e4m3":
        dtype = torch.float8_e4m3fn
        given |= {name: given[name].to(dtype) for name in ("ckv_cache", "kpe_cache")}
    arrays = x.qo_indptr, x.indptr, x.pages, torch.tensor(row.kv_lens, dtype=torch.int32)
    qo_indptr, indptr, pages, lens = arrays if host else [a.to(device) for a in arrays]
    wrapper.plan(
        qo_indptr, indptr, pages, lens, row.num_heads, 512, 64, row.page_size, row.q_len > 1, SCALE, torch.bfloat16,
        dtype,
    )  # fmt: skip
    out = torch.empty(*x.query.shape[:2], 512, dtype=torch.bfloat16, device=device)
    return lambda _: wrapper.run(**given, out=out)


def _workspace(x: Inputs) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=x.query.device)


def _quire(backend: str, x: Inputs) -> Launch:
    return _planned(quire.mla.BatchMLAPagedAttentionWrapper(_workspace(x), backend=backend), x, host=True)


def _check_latents(x: Inputs) -> None:
    if x.row.latents != "bf16":
        raise ValueError(f"16-bit latents, got {x.row.latents}")


def _flashinfer(backend: str, x: Inputs) -> Launch:
    import flashinfer

    _check_latents(x)
    return _planned(flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(x), backend=backend), x, host=False)


def _flashmla(x: Inputs) -> Launch:
    from sgl_kernel import flash_mla

    _check_latents(x)
    row, device = x.row, x.query.device
    if row.page_size != 64:
        raise ValueError(f"pages of 64 tokens, got {row.page_size}")
    counts = x.indptr.diff()
    table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32, device=device)
    for request, (begin, count) in enumerate(zip(x.indptr.tolist(), counts.tolist(), strict=False)):
        table[request, :count] = x.pages[begin : begin + count]
    lens = torch.tensor(row.kv_lens, dtype=torch.int32, device=device)
    plan = flash_mla.get_mla_metadata(lens, row.q_len * row.num_heads, 1)
    query, cache = x.query.view(len(counts), row.q_len, row.num_heads, 576), x.cache.unsqueeze(2)
    return lambda _: flash_mla.flash_mla_with_kvcache(
        query, cache, table, lens, 512, *plan, SCALE, row.q_len > 1
    )[0].view(-1, row.num_heads, 512)  # fmt: skip


def _fa3_qv(x: Inputs) -> Launch:
    """FlashAttention-3 with `qv`: the wheel has no pages, so it reads a copy of each request's latents in one piece."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    _check_latents(x)
    row, batch, longest = x.row, len(x.row.kv_lens), max(x.row.kv_lens)
    cache = torch.zeros(batch, longest, 1, 576, dtype=x.cache.dtype, device=x.cache.device)
    for request, length in enumerate(row.kv_lens):
        cache[request, :length, 0] = x.keys(request).to(cache.dtype)
    lens = torch.tensor(row.kv_lens, dtype=torch.int32, device=cache.device)
    query = x.query.view(batch, row.q_len, row.num_heads, 576)
    parts = {"q": query[..., 512:], "qv": query[..., :512], "k_cache": cache[..., 512:], "v_cache": cache[..., :512]}
    return lambda _: flash_attn_with_kvcache(
        **parts, cache_seqlens=lens, softmax_scale=SCALE, causal=row.q_len > 1
    ).view(-1, row.num_heads, 512)


PROVIDERS: dict[str, Callable[[Inputs], Launch]] = {
    "quire": lambda x: _quire("auto", x),
    "quire-fa2": lambda x: _quire("quire:fa2", x),
    "flashmla": _flashmla,
    "fa3-qv": _fa3_qv,
    "fi-fa3": lambda x: _flashinfer("fa3", x),
    "fi-fa2": lambda x: _flashinfer("fa2", x),
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
        ours = self.provider.startswith("quire")
        return (self.provider == "quire" and self.error is None) or (
            ours and self.error is not None and not self.error < _WORST
        )


def measure(row: Row, names: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    """All providers on one row; with no rounds, results are checked and nothing is timed."""
    x, results = Inputs.of(row, device), [Result(name) for name in names]

    def launch_of(result: Result) -> Launch:
        launch = PROVIDERS[result.provider](x)
        result.error = x.error(launch(0))
        return launch

    launches = tried(results, launch_of)
    if not rounds:
        return results
    estimates = [estimate_us(launch, 1) for _, launch in launches]
    timings = cuda_times([(launch, 1) for _, launch in launches], estimates, 1, rounds, flusher("write"))
    for (result, _), timing in zip(launches, timings, strict=True):
        result.timing = timing
        result.tflops, result.gigabytes_per_s = row.flops / timing.median / 1e6, row.bytes / timing.median / 1e3
    return results


def _line(row: Row, result: Result) -> str:
    if result.timing is None:
        return f"{row.name:22} {result.provider:10} {result.reason or f'error {result.error:.1e}'}"
    t, rates = result.timing, f"{result.tflops:6.0f} TFLOP/s {result.gigabytes_per_s:6.0f} GB/s"
    return (
        f"{row.name:22} {result.provider:10} {t.median:8.1f} us [{t.least:.1f} {t.most:.1f}] {rates}  "
        f"error {result.error:.1e}  target {row.target_us or '-'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    return measure_rows(__doc__, ROWS, PROVIDERS, measure, _line, arguments)


if __name__ == "__main__":
    sys.exit(main())
