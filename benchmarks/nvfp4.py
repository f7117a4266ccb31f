"""Caches of 4 bits (NVFP4) beside caches of 8 and 16 bits: decode, prefill, and appending.

Providers: "nvfp4", "e4m3" and "bf16" are Quire over such caches, "flashinfer" is its fa2 over 4 bits, where it has one.
Results are compared with float64 over the numbers that the cache holds, on sampled rows, before anything is timed. Then
the providers of a row take turns, launched one by one out of a flushed L2. A rate counts the bytes of keys, values and
scales once; that of prefill is in TFLOP/s.

    python benchmarks/nvfp4.py --json results/nvfp4.json

An append of 8 and 16 bits moves tokens that have the cache's type; one of 4 bits quantises bfloat16.

The exit status is 1 if a result of Quire is wrong, or "nvfp4" fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import quire
from latent_rows import measure_rows, tried
from timing import Timing, cpu_times, cuda_times, estimate_us, flusher

__all__ = ["ROWS", "Row", "main"]

_WORST = 1e-2  #: of the norm of the sampled rows
_DTYPES = {"nvfp4": torch.uint8, "e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "flashinfer": torch.uint8}

Launch = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """`batch` requests of kv_len tokens, of which the last q_len are queries; or new tokens, if kind is "append"."""

    name: str
    kind: str  #: decode, prefill or append
    batch: int
    kv_len: int
    q_len: int = 1
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    kv_layout: str = "NHD"
    target: str = ""

    def bytes_of(self, provider: str) -> float:
        """Of keys, values and scales; with the bfloat16 rows that an append reads."""
        bits = {"e4m3": 8, "bf16": 16}.get(provider, 4.5)
        numbers = 2 * self.batch * self.kv_len * self.heads[1] * self.head_dim
        return numbers * (bits + (16 if self.kind == "append" else 0)) / 8

    @property
    def flops(self) -> float:
        """Under a causal mask."""
        pairs = self.q_len * (self.kv_len - self.q_len) + self.q_len * (self.q_len + 1) / 2
        return 4.0 * self.batch * self.heads[0] * pairs * self.head_dim


ROWS = (
    Row("decode-64x4096", "decode", 64, 4096, target="nvfp4: 95 us"),
    Row("decode-64x4096-hnd", "decode", 64, 4096, kv_layout="HND", target="nvfp4: 95 us"),
    Row("decode-64x8192-64/8-p64", "decode", 64, 8192, heads=(64, 8), page_size=64),
    Row("decode-64x4096-d64", "decode", 64, 4096, head_dim=64),
    Row("decode-16x8192-d256", "decode", 16, 8192, heads=(16, 4), head_dim=256),
    Row("decode-1x65536", "decode", 1, 65536, heads=(32, 4)),
    Row("draft-64x4096-q4", "decode", 64, 4096, 4),
    Row("prefill-2x8192", "prefill", 2, 8192, 8192, target="nvfp4: 0.95 of e4m3"),
    Row("prefill-8x512-on-8192", "prefill", 8, 8704, 512),
    Row("prefill-4x64-on-8192", "prefill", 4, 8256, 64),
    Row("append-8192", "append", 1, 8192, target="nvfp4: 1.3 x e4m3"),
    Row("append-64", "append", 1, 64),
)


class Problem:
    """Random queries, and one cache for each provider: its numbers are the bfloat16 ones, rounded."""

    def __init__(self, row: Row, device: torch.device) -> None:
        torch.manual_seed(0)
        self.row, self.device = row, device
        heads, kv_heads = row.heads
        each = -(-row.kv_len // row.page_size)
        self.page = (row.page_size, kv_heads) if row.kv_layout == "NHD" else (kv_heads, row.page_size)
        self.num_pages = row.batch * each
        self.q = self._randn(row.batch * row.q_len, heads, row.head_dim)
        self.rows = [self._randn(self.num_pages * row.page_size, kv_heads, row.head_dim) for _ in range(2)]
        self.pages = torch.randperm(self.num_pages).int()
        self.indptr = torch.arange(row.batch + 1, dtype=torch.int32) * each
        self.qo_indptr = torch.arange(row.batch + 1, dtype=torch.int32) * row.q_len
        self.last = torch.full((row.batch,), (row.kv_len - 1) % row.page_size + 1, dtype=torch.int32)
        self.kv: tuple[torch.Tensor, ...] = ()
        self.sf: tuple[torch.Tensor, ...] = ()

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def fill(self, provider: str) -> None:
        """Make the cache of a provider: token i of the rows is token i of the pages, page after page."""
        row, dtype = self.row, _DTYPES[provider]
        if dtype is torch.uint8:
            self.kv, self.sf = (self._empty(row.head_dim // n, torch.uint8) for n in (2, 16))
            self.sf = tuple(scales.view(torch.float8_e4m3fn) for scales in self.sf)
            self._append_4_bits(torch.arange(self.rows[0].shape[0], device=self.device))
        else:
            pages = [rows.to(dtype).view(self.num_pages, row.page_size, row.heads[1], -1) for rows in self.rows]
            self.kv, self.sf = tuple(p.transpose(1, 2) if row.kv_layout == "HND" else p for p in pages), ()
            self.kv = tuple(pages.contiguous() for pages in self.kv)

    def _empty(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        shape = (self.num_pages, *self.page, size)
        return tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))

    def _append_4_bits(self, slots: torch.Tensor) -> None:
        quire.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *self.rows, slots, self.kv, self.sf, 1.0, 1.0, self.row.kv_layout
        )

    def numbers(self, which: int) -> torch.Tensor:
        """Keys or values of the last request in float64, [kv_len, num_kv_heads, head_dim], as the cache has them."""
        mine = self.pages[int(self.indptr[-2]) :].long().to(self.device)
        pages = self.kv[which].view(torch.uint8)[mine].view(self.kv[which].dtype)
        if self.sf:
            codes = torch.stack((pages & 15, pages >> 4), -1).flatten(-2).long()
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=self.device)
            factors = self.sf[which].view(torch.uint8)[mine].view(torch.float8_e4m3fn).double()
            pages = torch.cat((table, -table))[codes] * factors.repeat_interleave(16, -1)
        pages = pages.double().transpose(1, 2) if self.row.kv_layout == "HND" else pages.double()
        return pages.flatten(0, 1)[: self.row.kv_len]

    def error(self, o: torch.Tensor) -> float:
        """Of the last query, which sees all keys of its request."""
        group = self.row.heads[0] // self.row.heads[1]
        k, v = (self.numbers(i).repeat_interleave(group, 1) for i in range(2))
        weights = (torch.einsum("hd,thd->ht", self.q[-1].double(), k) * self.row.head_dim**-0.5).softmax(-1)
        truth = torch.einsum("ht,thd->hd", weights, v)
        return float((o[-1].double() - truth).norm() / truth.norm())

    def launch(self, provider: str) -> tuple[Launch, float]:
        """A provider's call over its cache, and its error."""
        self.fill(provider)
        if self.row.kind == "append":
            return self._append(provider), 0.0
        package: Any = quire
        if provider == "flashinfer":
            import flashinfer as package

        kv, sf, row = self.kv, {"kv_cache_sf": self.sf} if self.sf else {}, self.row
        types = {"q_data_type": torch.bfloat16, "kv_data_type": _DTYPES[provider]}
        tables = [t.to(self.device) if package is not quire else t for t in (self.indptr, self.pages, self.last)]
        shape = (*row.heads, row.head_dim, row.page_size)
        workspace = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        if row.kind == "decode" and row.q_len == 1 and package is quire:
            wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace, row.kv_layout)
            wrapper.plan(*tables, *shape, **types)
        else:
            backend = {"backend": "fa2"} if package is not quire else {}
            wrapper = package.BatchPrefillWithPagedKVCacheWrapper(workspace, row.kv_layout, **backend)
            wrapper.plan(self.qo_indptr.to(tables[0].device), *tables, *shape, causal=True, **types)
        out = torch.empty_like(self.q)

        def call() -> torch.Tensor:
            wrapper.run(self.q, kv, out=out, **sf)
            return out

        return call, self.error(call())

    def _append(self, provider: str) -> Launch:
        kv, sf, row = self.kv, self.sf, self.row
        slots = torch.randperm(self.rows[0].shape[0], device=self.device)[: row.kv_len]
        if provider in ("nvfp4", "flashinfer"):
            package: Any = quire
            if provider == "flashinfer":
                import flashinfer as package
            append = package.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
            one = torch.ones(1, device=self.device)
            return lambda: append(*self.rows, slots, kv, sf, one, one, row.kv_layout) or kv[0]
        rows = [rows[: row.kv_len].to(_DTYPES[provider]) for rows in self.rows]
        tables = [t.to(self.device) for t in (self.pages, self.indptr, self.last)]
        requests, positions = torch.zeros_like(slots, dtype=torch.int32), slots.int()

        def call() -> torch.Tensor:
            quire.append_paged_kv_cache(*rows, requests, positions, kv, *tables, row.kv_layout)
            return kv[0]

        return call


@dataclass
class Result:
    """One provider on one row."""

    provider: str
    reason: str | None = None  #: why there is no figure
    error: float | None = None
    timing: Timing | None = None
    rate: float | None = None  #: GB/s, or TFLOP/s of prefill

    @property
    def is_bad(self) -> bool:
        """What the exit status tells: a wrong result of Quire's, or none over 4 bits."""
        missing = self.provider == "nvfp4" and self.error is None
        return missing or (self.provider != "flashinfer" and self.error is not None and not self.error < _WORST)


def measure(row: Row, names: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    """All providers on one row; with no rounds, results are checked and nothing is timed."""
    x, results = Problem(row, device), [Result(name) for name in names]

    def launch_of(result: Result) -> Launch:
        launch, result.error = x.launch(result.provider)
        return launch

    launches = tried(results, launch_of)
    for (result, _), timing in zip(launches, _times([call for _, call in launches], device, rounds), strict=True):
        result.timing = timing
        if timing is not None:
            work = row.flops / 1e3 if row.kind == "prefill" else row.bytes_of(result.provider)
            result.rate = work / timing.median / 1e3
    return results


def _times(calls: list[Launch], device: torch.device, rounds: int) -> Sequence[Timing | None]:
    if not rounds:
        return [None] * len(calls)
    launches = [lambda _, call=call: call() for call in calls]
    if device.type == "cpu":
        return cpu_times(launches, rounds)
    estimates = [estimate_us(launch, 1) for launch in launches]
    return cuda_times([(launch, 1) for launch in launches], estimates, 1, rounds, flusher("write"))


def _line(row: Row, result: Result) -> str:
    head = f"{row.name:26} {result.provider:10}"
    if result.timing is None:
        return f"{head} {result.reason or f'error {result.error:.1e}'}"
    t, unit = result.timing, "TFLOP/s" if row.kind == "prefill" else "GB/s"
    times = f"{t.median:8.1f} us [{t.least:.1f} {t.most:.1f}] {result.rate:6.0f} {unit}"
    return f"{head} {times}  error {result.error:.1e}  {row.target}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    return measure_rows(__doc__, ROWS, _DTYPES, measure, _line, arguments)


if __name__ == "__main__":
    sys.exit(main())
