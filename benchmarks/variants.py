"""Variants of one's own beside the plain kernel, and beside torch's compiled FlexAttention.

All rows of a kind take turns in one process. Work is counted by the pairs of query and key that a mask shows, so that a
mask which passes over nothing looks slow. Before anything is timed, the last 64 queries of each request are compared
with the variant's float64 reference.

    python benchmarks/variants.py --json results/variants.json

Launches follow one another, at the clock that the card's power limit leaves. `--pause 2` rests two milliseconds before
each, as a model's other layers may; each then runs at the highest clock.

How long the first call of a new variant takes, from its functions to its result, on two cores:

    QUIRE_CACHE_DIR=$(mktemp -d) taskset -c 0,1 python benchmarks/variants.py --first-calls cuda
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import machine
import quire
import timing
from quire.attention import variants
from quire.kernels.expressions import tanh

CHECKED = 64  #: queries of each request that are compared
identity = quire.Variant(lambda score: score)


@dataclass(frozen=True)
class Row:
    """target: of the rate of the plain row of its kind, or for decode of its time."""

    name: str
    variant: quire.Variant | None = None
    operands: Callable[[torch.device, int, int], Mapping[str, Any]] = lambda *_: {}
    plan: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = True
    target: float | None = None
    of_requests: bool = False  #: each document is a request, in place of the mask


def slopes(device: torch.device, *_: int) -> Mapping[str, Any]:
    """ALiBi's, of 32 heads."""
    return {"slopes": 2.0 ** (-0.25 * torch.arange(1.0, 33.0, device=device))}


def bias(device: torch.device, _: int, length: int) -> Mapping[str, Any]:
    """[heads, 2 length - 1]."""
    return {"bias": torch.randn(32, 2 * length - 1, device=device)}


def documents(device: torch.device, batch: int, length: int, count: int = 12) -> Mapping[str, Any]:
    """`count` documents of random lengths in each request."""
    source = torch.Generator().manual_seed(1)
    cuts = torch.randperm(length, generator=source)[: count - 1].sort().values
    number = torch.bucketize(torch.arange(length), cuts, right=True).int()
    return {"documents": number.expand(batch, length).contiguous().to(device)}


def document_indptr(number: torch.Tensor) -> torch.Tensor:
    """Where documents begin, and the end of the last. number: [requests, length], of each token's document."""
    new = torch.ones_like(number, dtype=torch.bool)
    new[:, 1:] = number[:, 1:] != number[:, :-1]
    begins = new.flatten().nonzero()[:, 0]
    return torch.cat([begins, begins.new_tensor([number.numel()])]).int().cpu()


def prefix(device: torch.device, batch: int, _: int) -> Mapping[str, Any]:
    """1024 tokens."""
    return {"prefix": torch.full((batch,), 1024, dtype=torch.int32, device=device)}


def images(device: torch.device, batch: int, length: int) -> Mapping[str, Any]:
    """Of 256 tokens, each followed by 256 tokens of text; tokens of an image see one another."""
    at = torch.arange(length, dtype=torch.int32, device=device)
    begin = at - at % 512
    rows = torch.stack([begin, begin + 255], 1).where((at % 512 < 256)[:, None], -1)
    first = torch.arange(batch, dtype=torch.int32, device=device) * length
    return {"ranges": rows.repeat(batch, 1), "first_row": first, "causal_window": -1, "range_window": 0}


window = quire.Variant(
    mask=lambda q_idx, kv_idx, qo_len, kv_len, width: kv_idx >= q_idx + kv_len - qo_len - width,
    scalars={"width": "int32"},
)
PREFILL = (
    Row("plain"),
    Row("identity", identity, target=0.99),
    Row("alibi", variants.alibi, slopes, target=0.92),
    Row("alibi, built in", plan={"pos_encoding_mode": "ALIBI"}),
    Row("soft cap", variants.soft_cap, lambda *_: {"cap": 30.0}, target=0.92),
    Row("soft cap, built in", plan={"logits_soft_cap": 30.0}),
    Row("soft cap below logits", variants.soft_cap, lambda *_: {"cap": 1.0}),
    Row("table bias", variants.relative_bias, bias, target=0.92),
    Row("12 documents", variants.document_mask, documents),
    Row("12 documents, each a request", variants.document_mask, documents, of_requests=True),
    Row("window 1024", window, lambda *_: {"width": 1024}),
    Row("window 1024, built in", plan={"window_left": 1024}),
    Row("prefix-lm 1024", variants.prefix_lm, prefix, causal=False),
    Row("16 images", variants.causal_with_ranges, images, causal=False),
)
DECODE = (
    Row("plain"),
    Row("alibi", variants.alibi, slopes, target=1.02),
    Row("table bias", variants.relative_bias, bias),
)


@dataclass
class Result:
    """us: the median of a launch; tflops: by the pairs that are shown; ratio: to the plain row of its kind."""

    name: str
    us: float
    tflops: float | None = None
    ratio: float | None = None
    target: float | None = None
    error: float | None = None  #: the largest, beside float64


class Prefill:
    """2 x 8192 tokens, 32/8 heads of 128, bf16, ragged."""

    def __init__(
        self, device: torch.device, batch: int = 2, length: int = 8192, heads: tuple[int, int] = (32, 8)
    ) -> None:
        self.device, self.batch, self.length, self.heads = device, batch, length, heads
        draw = lambda count: torch.randn(batch * length, count, 128, device=device, dtype=torch.bfloat16)  # noqa: E731
        self.q, self.k, self.v = draw(heads[0]), draw(heads[1]), draw(heads[1])
        self.workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def prepare(self, row: Row) -> tuple[timing.Call, Result]:
        """A launch of a row, which has been checked."""
        operands = dict(row.operands(self.device, self.batch, self.length))
        of_mask = row.variant.expression.mask_operands if row.variant else frozenset()
        planned = {name: x for name, x in operands.items() if name in of_mask}
        given = {name: x for name, x in operands.items() if name not in of_mask}
        variant, indptr = row.variant, torch.arange(self.batch + 1, dtype=torch.int32) * self.length
        if row.of_requests:
            variant, indptr, planned = None, document_indptr(operands["documents"]), {}
        wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, variant=variant)
        wrapper.plan(
            indptr, indptr, *self.heads, 128, causal=row.causal, q_data_type=torch.bfloat16, **row.plan, **planned
        )
        out = torch.empty_like(self.q)
        call = lambda _: wrapper.run(self.q, self.k, self.v, out=out, **given)  # noqa: E731
        call(0)
        error = None if row.plan else self._error(row, out, operands)
        result = Result(row.name, math.nan, target=row.target, error=error)
        result.tflops = 4 * 128 * self.heads[0] * self._pairs(row, operands) / 1e6  # operations, until times are known
        return call, result

    def _error(self, row: Row, out: torch.Tensor, operands: Mapping[str, Any]) -> float:
        variant = row.variant or identity
        worst = 0.0
        for request in range(self.batch):
            begin, end = request * self.length, (request + 1) * self.length
            own = {n: x[request : request + 1] if n in ("documents", "prefix") else x for n, x in operands.items()}
            heads = slice(0, self.heads[0] // self.heads[1])  # of the first KV head
            own = {n: x[heads] if n in ("slopes", "bias") else x for n, x in own.items()}
            if "ranges" in own:
                own |= {"ranges": own["ranges"][end - CHECKED : end], "first_row": own["first_row"][:1]}
            tokens = (self.q[end - CHECKED : end, heads], self.k[begin:end, :1], self.v[begin:end, :1])
            truth = variant.reference(*tokens, causal=row.causal, **own)
            worst = max(worst, float((out[end - CHECKED : end, heads].cpu().double() - truth).abs().max()))
        if not worst < 0.05:
            raise SystemExit(f"{row.name}: off by {worst}")
        return worst

    def _pairs(self, row: Row, operands: Mapping[str, Any]) -> int:
        """Pairs of query and key that are shown."""
        i = torch.arange(self.length, device=self.device)
        shown = i[:, None] >= i[None, :] if row.causal else torch.ones_like(i[:, None] + i[None, :], dtype=torch.bool)
        if "documents" in operands:
            shown &= operands["documents"][0][:, None] == operands["documents"][0][None, :]
        if "prefix" in operands:
            shown &= (i[None, :] < 1024) | (i[:, None] >= i[None, :])
        if "ranges" in operands:
            image = torch.where(i % 512 < 256, i // 512, -1 - i)
            shown &= (i[:, None] >= i[None, :]) | (image[:, None] == image[None, :])
        if "width" in operands or "window_left" in row.plan:
            shown &= i[None, :] >= i[:, None] - 1024
        return int(shown.sum()) * self.batch

    def flex(self) -> list[tuple[str, timing.Call, int]]:
        """FlexAttention on the same tensors: its launches, and the pairs that each shows."""
        q, k, v = (
            t.view(self.batch, self.length, -1, 128).transpose(1, 2).contiguous() for t in (self.q, self.k, self.v)
        )
        number = documents(self.device, 1, self.length)["documents"][0]
        shown = {
            "plain": lambda _b, _h, i, j: i >= j,
            "12 documents": lambda _b, _h, i, j: (i >= j) & (number[i] == number[j]),
            "window 1024": lambda _b, _h, i, j: (i >= j) & (i - j <= 1024),
            "prefix-lm 1024": lambda _b, _h, i, j: (j < 1024) | (i >= j),
            "16 images": lambda _b, _h, i, j: (i >= j) | ((i // 512 == j // 512) & (i % 512 < 256) & (j % 512 < 256)),
        }
        found = []
        for row in PREFILL:
            score = flex_scores(self.device).get(row.name)
            if row.name in shown or score is not None:
                call = flex_call(q, k, v, score, shown.get(row.name, shown["plain"]))
                operands = row.operands(self.device, self.batch, self.length)
                found.append((row.name, call, self._pairs(row, operands)))
        return found


def flex_scores(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    """What FlexAttention takes for rows with a score."""
    slope = slopes(device)["slopes"]
    return {
        "alibi": lambda score, _b, h, i, j: score + slope[h] * (j - i),
        "soft cap": lambda score, _b, _h, _i, _j: 30.0 * torch.tanh(score / 30.0),
    }


def flex_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Any, mask: Any) -> timing.Call:
    """A launch of FlexAttention, compiled. mask: of batch, head, query and key, or None."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64  # of one function: each row compiles it anew
    attend = torch.compile(flex_attention, dynamic=False)
    blocks = mask and create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=str(q.device))

    def call(_: int) -> Any:
        return attend(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True)

    call(0)
    return call


class Decode:
    """64 requests of 4096 keys, 32/8 heads of 128, bf16, pages of 16 tokens."""

    def __init__(
        self, device: torch.device, batch: int = 64, length: int = 4096, heads: tuple[int, int] = (32, 8)
    ) -> None:
        self.device, self.batch, self.length, self.heads = device, batch, length, heads
        pages = batch * length // 16
        self.q = torch.randn(batch, heads[0], 128, device=device, dtype=torch.bfloat16)
        self.cache = torch.randn(pages, 2, 16, heads[1], 128, device=device, dtype=torch.bfloat16)
        self.order = torch.randperm(pages, dtype=torch.int32)
        self.workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def prepare(self, row: Row) -> tuple[timing.Call, Result]:
        """A launch of a row, which has been checked."""
        operands = row.operands(self.device, self.batch, self.length)
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(self.workspace, variant=row.variant)
        indptr = torch.arange(self.batch + 1, dtype=torch.int32) * (self.length // 16)
        last = torch.full((self.batch,), 16, dtype=torch.int32)
        wrapper.plan(indptr, self.order.to(self.device), last, *self.heads, 128, 16, q_data_type=torch.bfloat16)
        out = torch.empty_like(self.q)
        call = lambda _: wrapper.run(self.q, self.cache, out=out, **operands)  # noqa: E731
        call(0)
        tokens = self.cache[self.order[: self.length // 16].long().to(self.device)]
        k, v = (tokens[:, i].reshape(self.length, self.heads[1], 128) for i in (0, 1))
        truth = (row.variant or identity).reference(self.q[:1], k, v, **operands)
        error = float((out[:1].cpu().double() - truth).abs().max())
        if not error < 0.05:
            raise SystemExit(f"{row.name}: off by {error}")
        return call, Result(row.name, math.nan, target=row.target, error=error)

    def flex(self) -> list[tuple[str, timing.Call]]:
        """FlexAttention on as many keys, which lie contiguously."""
        q = self.q.unsqueeze(2)
        k, v = (self.cache[:, i].reshape(self.batch, self.heads[1], self.length, 128) for i in (0, 1))
        slope = slopes(self.device)["slopes"]
        scores = {"plain": None, "alibi": lambda score, _b, h, _i, j: score + slope[h] * (j - self.length + 1)}
        return [(name, flex_call(q, k, v, score, None)) for name, score in scores.items()]


def measure(kind: str, prepared: list[tuple[timing.Call, Result]], rounds: int, pause: float) -> list[Result]:
    """Time the launches in turn. pause: seconds before each."""
    calls = [(call, 1) for call, _ in prepared]
    times = timing.cuda_times(
        calls, [timing.estimate_us(call, 1) for call, _ in calls], 1, rounds, timing.flusher("write"), pause
    )
    results = [result for _, result in prepared]
    for result, taken in zip(results, times, strict=True):
        result.us = taken.median
        result.tflops = None if result.tflops is None else result.tflops / taken.median
    plain = results[0]
    for result in results:
        result.ratio = result.us / plain.us if result.tflops is None else (result.tflops or 0) / (plain.tflops or 1)
        result.name = f"{kind}: {result.name}"
    return results


def show(results: list[Result]) -> list[Result]:
    """Print a line a row."""
    for result in results:
        rate = "" if result.tflops is None else f"{result.tflops:7.1f} TFLOP/s"
        error = "" if result.error is None else f"  error {result.error:.1e}"
        print(f"{result.name:<32}{result.us:9.1f} us {rate:>16}  {result.ratio:.3f} of plain{error}", flush=True)
    return results


#: What makes a new variant, and what it is given for queries and keys of a length.
NEW: Mapping[str, tuple[Callable[[], quire.Variant], Callable[[torch.device, int, int], Mapping[str, Any]]]] = {
    "alibi": (lambda: quire.Variant(lambda score, q_idx, kv_idx, head, slopes: score + slopes[head] * (kv_idx - q_idx),
                                    tensors={"slopes": "float32"}), slopes),
    "table bias": (lambda: quire.Variant(lambda score, q_idx, kv_idx, head, bias: score + bias[head, kv_idx - q_idx],
                                         tensors={"bias": "float32"}), bias),
    "soft cap": (lambda: quire.Variant(lambda score, cap: cap * tanh(score / cap), scalars={"cap": "float32"}),
                 lambda *_: {"cap": 30.0}),
    "temperature": (lambda: quire.Variant(lambda score, head, slopes: score * slopes[head],
                                          tensors={"slopes": "float32"}), slopes),
    "window": (lambda: quire.Variant(mask=lambda q_idx, kv_idx, width: kv_idx + width > q_idx,
                                     scalars={"width": "int32"}), lambda *_: {"width": 100}),
}  # fmt: skip


def first_calls(device: torch.device) -> int:
    """Call each new variant once, behind a call without any."""
    length, dtype = (2048, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    q, k, v = (torch.randn(length, heads, 128, device=device, dtype=dtype) for heads in (32, 8, 8))
    quire.single_prefill_with_kv_cache(q, k, v, causal=True)
    for name, (make, operands) in NEW.items():
        given = operands(device, 1, length)
        begin = time.perf_counter()
        quire.single_prefill_with_kv_cache(q, k, v, causal=True, variant=make(), **given).cpu()
        print(f"{name:<14}{time.perf_counter() - begin:6.2f} s", flush=True)
    return 0


def main() -> int:
    """Measure both kinds of rows, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds before each launch")
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--first-calls", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.first_calls is not None:
        return first_calls(torch.device(options.first_calls))
    torch.manual_seed(0)
    device = torch.device("cuda")
    prefill = Prefill(device)
    prepared = [prefill.prepare(row) for row in PREFILL]
    decode = Decode(device)
    steps = [decode.prepare(row) for row in DECODE]
    if not options.no_flex:
        for name, call, pairs in prefill.flex():
            prepared.append((call, Result(f"flex: {name}", math.nan, 4 * 128 * 32 * pairs / 1e6)))
        steps += [(call, Result(f"flex: {name}", math.nan)) for name, call in decode.flex()]
    pause = options.pause / 1e3
    results = show(measure("prefill", prepared, options.rounds, pause))
    results += show(measure("decode", steps, options.rounds, pause))
    if options.json is not None:
        rows = [asdict(result) for result in results]
        machine.write_report(options.json, {**machine.describe(device), "pause_ms": options.pause, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
