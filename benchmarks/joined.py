"""Work of two kinds in one launch: prefill beside decode (POD), and new tokens beside their prefix (MLA prefill).

Providers: "quire" plans as it does by default, "one" must take one launch, "two" runs the parts one after the other
(and merges prefixes), "flashinfer" is its POD wrapper. Results are compared with float64 on sampled rows before
anything is timed. Then the providers of a row take turns, launched one by one out of a flushed L2; MLA's rows are
reported as TFLOP/s, too.

    python benchmarks/joined.py --json results/joined.json

The exit status is 1 if a result of Quire is wrong, or "quire" fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import quire
from latent_rows import measure_rows, tried
from timing import Timing, cpu_times, cuda_times, estimate_us, flusher

__all__ = ["ROWS", "Row", "main"]

_WORST = 1e-2  #: of the norm of the sampled rows
PAGE_SIZE = 64

Launch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """Prefills of q_len tokens beside `decodes` requests of kv_len; or, without decodes, after a prefix of kv_len."""

    name: str
    prefills: int
    q_len: int
    kv_len: int
    decodes: int = 0
    heads: tuple[int, int] = (32, 8)
    head_dims: tuple[int, int] = (128, 128)
    target: str = ""

    @property
    def flops(self) -> float:
        """Of a prefix and new tokens under a causal mask."""
        pairs = self.q_len * self.kv_len + self.q_len * (self.q_len + 1) / 2
        return 2.0 * self.prefills * self.heads[0] * pairs * sum(self.head_dims)


_MLA: dict[str, Any] = {"head_dims": (192, 128)}
ROWS = (
    Row("pod-2x2048-with-128x2048", 2, 2048, 2048, 128, target="0.8 of FlashInfer"),
    Row("pod-1x4096-with-128x2048", 1, 4096, 2048, 128),
    Row("pod-1x2048-with-32x1024", 1, 2048, 1024, 32),
    Row("mla-1x2048-on-32768", 1, 2048, 32768, heads=(128, 128), **_MLA, target="660 TFLOP/s"),
    Row("mla-4x512-on-8192-h16", 4, 512, 8192, heads=(16, 16), **_MLA),
)


def _randn(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query [heads, dims] over keys and values [tokens, kv_heads, dims], in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = (torch.einsum("hd,thd->ht", q.double(), k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)


class Pod:
    """Random prefills and decodes over one paged cache each."""

    def __init__(self, row: Row, device: torch.device) -> None:
        torch.manual_seed(0)
        self.row, self.device = row, device
        heads, kv_heads = row.heads
        self.q = _randn(device, row.prefills * row.q_len, heads, 128), _randn(device, row.decodes, heads, 128)
        self.indptr, self.pages, self.last, self.caches = [], [], [], []
        for batch, length in ((row.prefills, row.q_len), (row.decodes, row.kv_len)):
            each = -(-length // PAGE_SIZE)
            self.indptr.append(torch.arange(batch + 1, dtype=torch.int32) * each)
            self.pages.append(torch.randperm(batch * each).int())
            self.last.append(torch.full((batch,), (length - 1) % PAGE_SIZE + 1, dtype=torch.int32))
            self.caches.append(_randn(device, batch * each, 2, PAGE_SIZE, kv_heads, 128))
        self.rows = tuple(torch.arange(n + 1, dtype=torch.int32) * step for n, step in (
            (row.prefills, row.q_len), (row.decodes, 1)))  # fmt: skip
        self.shape = heads, kv_heads, 128, PAGE_SIZE

    def error(self, found: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Of the last prefill's last row and of the last decode."""
        worst = 0.0
        for q, cache, pages, indptr, length, o in zip(
            self.q, self.caches, self.pages, self.indptr, (self.row.q_len, self.row.kv_len), found, strict=True
        ):
            mine = cache[pages[int(indptr[-2]) :].long().to(self.device)]
            k, v = mine.transpose(0, 1).flatten(1, 2)[:, :length]
            truth = _exact(q[-1], k, v)
            worst = max(worst, float((o[-1].double() - truth).norm() / truth.norm()))
        return worst

    def quire(self, must_be_one: bool) -> Launch:
        wrapper = quire.BatchPODWithPagedKVCacheWrapper(self._workspace())
        arrays = [(self.rows[i], self.indptr[i], self.pages[i], self.last[i]) for i in range(2)]
        wrapper.plan(*arrays[0], *arrays[1], *self.shape, q_data_type=torch.bfloat16)
        call = partial(wrapper.run, self.q[0], self.caches[0], self.q[1], self.caches[1], causal_p=True)
        call()  # plans the prefills again, under their mask
        if must_be_one and "one launch" not in str(wrapper.explain()[0]):
            raise quire.UnsupportedError("prefill and decode take a launch each")
        return call

    def apart(self) -> Launch:
        prefill = quire.BatchPrefillWithPagedKVCacheWrapper(self._workspace())
        prefill.plan(self.rows[0], self.indptr[0], self.pages[0], self.last[0], *self.shape, causal=True,
                     q_data_type=torch.bfloat16)  # fmt: skip
        decode = quire.BatchDecodeWithPagedKVCacheWrapper(self._workspace())
        decode.plan(self.indptr[1], self.pages[1], self.last[1], *self.shape, q_data_type=torch.bfloat16)
        return lambda: (prefill.run(self.q[0], self.caches[0]), decode.run(self.q[1], self.caches[1]))

    def flashinfer(self) -> Launch:
        import flashinfer

        wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(self._workspace(), "NHD")
        arrays = [tuple(t.to(self.device) for t in (self.rows[i], self.indptr[i], self.pages[i], self.last[i]))
                  for i in range(2)]  # fmt: skip
        wrapper.plan(*arrays[0], *arrays[1], *self.shape, q_data_type=torch.bfloat16)
        return lambda: wrapper.run(self.q[0], self.caches[0], self.q[1], self.caches[1], causal_p=True)

    def _workspace(self) -> torch.Tensor:
        return torch.empty(256 << 20, dtype=torch.uint8, device=self.device)


class Prefix:
    """Random new tokens of requests, and a prefix of each."""

    def __init__(self, row: Row, device: torch.device) -> None:
        torch.manual_seed(0)
        self.row, self.device = row, device
        (heads, kv_heads), (qk, vo), batch = row.heads, row.head_dims, row.prefills
        self.q = _randn(device, batch * row.q_len, heads, qk)
        self.own, self.prefix = (
            (_randn(device, batch * n, kv_heads, qk), _randn(device, batch * n, kv_heads, vo))
            for n in (row.q_len, row.kv_len)
        )
        self.rows, self.prefixes = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (row.q_len, row.kv_len))

    def error(self, found: tuple[torch.Tensor, torch.Tensor]) -> float:
        """Of the last request's first and last row."""
        n, length = self.row.q_len, self.row.kv_len
        worst = 0.0
        for at in (-n, -1):
            k, v = (
                torch.cat((old[-length:], new[-n : at + 1 or None]))
                for old, new in zip(self.prefix, self.own, strict=True)
            )
            truth = _exact(self.q[at], k, v)
            worst = max(worst, float((found[0][at].double() - truth).norm() / truth.norm()))
        return worst

    def quire(self, must_be_one: bool) -> Launch:
        workspace = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        backend = "quire:fa3" if must_be_one and self.device.type == "cuda" else "auto"
        wrapper = quire.BatchPrefillWithPrefixWrapper(workspace, backend=backend)
        wrapper.plan(self.rows, self.prefixes, *self.row.heads, *self.row.head_dims, q_data_type=torch.bfloat16)
        return lambda: (wrapper.run(self.q, *self.own, *self.prefix),) * 2

    def apart(self) -> Launch:
        calls = []
        for indptr, causal in ((self.prefixes, False), (self.rows, True)):
            call = quire.BatchPrefillWithRaggedKVCacheWrapper(
                torch.empty(256 << 20, dtype=torch.uint8, device=self.device)
            )
            call.plan(self.rows, indptr, *self.row.heads, *self.row.head_dims, causal=causal,
                      q_data_type=torch.bfloat16)  # fmt: skip
            calls.append(call)

        def launch() -> tuple[torch.Tensor, torch.Tensor]:
            o, lse = calls[0].run_return_lse(self.q, *self.prefix)
            quire.merge_state_in_place(o, lse, *calls[1].run_return_lse(self.q, *self.own))
            return o, o

        return launch

    def flashinfer(self) -> Launch:
        raise quire.UnsupportedError("it has no such call")


PROVIDERS: dict[str, Callable[[Any], Launch]] = {
    "quire": lambda x: x.quire(False),
    "one": lambda x: x.quire(True),
    "two": lambda x: x.apart(),
    "flashinfer": lambda x: x.flashinfer(),
}


@dataclass
class Result:
    """One provider on one row."""

    provider: str
    reason: str | None = None  #: why there is no figure
    error: float | None = None
    timing: Timing | None = None
    tflops: float | None = None

    @property
    def is_bad(self) -> bool:
        """What the exit status tells: a wrong result of Quire's, or none of what calls take by default."""
        missing = self.provider == "quire" and self.error is None
        ours = self.provider != "flashinfer" and self.error is not None
        return missing or (ours and not self.error < _WORST)


def measure(row: Row, names: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    """All providers on one row; with no rounds, results are checked and nothing is timed."""
    x: Pod | Prefix = Pod(row, device) if row.decodes else Prefix(row, device)
    results = [Result(name) for name in names]

    def launch_of(result: Result) -> Launch:
        launch = PROVIDERS[result.provider](x)
        result.error = x.error(launch())
        return launch

    launches = tried(results, launch_of)
    for (result, _), timing in zip(launches, _times([call for _, call in launches], device, rounds), strict=True):
        result.timing = timing
        if timing is not None and not row.decodes:
            result.tflops = row.flops / timing.median / 1e6
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
    t, rate = result.timing, "" if result.tflops is None else f" {result.tflops:5.0f} TFLOP/s"
    return f"{head} {t.median:8.1f} us [{t.least:.1f} {t.most:.1f}]{rate}  error {result.error:.1e}  {row.target}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    return measure_rows(__doc__, ROWS, PROVIDERS, measure, _line, arguments)


if __name__ == "__main__":
    sys.exit(main())
