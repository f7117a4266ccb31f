"""The rows of the attention tables: one problem each, with what is expected of it and how it is counted.

Counting, so that figures can be compared with published ones: an operation is 2 per visible (query, key) pair and
element of both head dims; a square causal mask shows exactly half of the pairs, every other mask the pairs it shows.
The rate of a bandwidth row counts the bytes of the visible keys and values once; the roof also counts q and the output.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["ROWS", "Row", "Target", "select_rows"]

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Target:
    """What a row is to reach. tflops, peer and rate_of are lower bounds, us and time_of upper ones."""

    kind: str
    bound: float
    row: str = ""  #: the row that rate_of and time_of refer to

    def __str__(self) -> str:
        texts = {
            "tflops": f">= {self.bound:g} TFLOP/s",
            "us": f"<= {self.bound:g} us",
            "peer": f">= {self.bound:g} x best peer",
            "rate_of": f">= {self.bound:g} x the rate of {self.row}",
            "time_of": f"<= {self.bound:g} x the time of {self.row}",
        }
        return texts[self.kind]


@dataclass(frozen=True)
class Row:
    """One problem. kind: "ragged" or "paged" prefill, or "decode" (paged, the last q_len tokens of each request)."""

    name: str
    kind: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 0  #: 0: ragged
    mask: str = "causal"  #: none, causal, or custom: a bit mask that equals causal
    window_left: int = -1
    soft_cap: float = 0.0
    pos_encoding: str = "NONE"  #: or ALIBI, ROPE_LLAMA (theta 10000)
    sinks: bool = False
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    bound: str = "flops"  #: which rate is reported: flops (TFLOP/s) or bytes (GB/s of keys and values)
    target: Target | None = None
    group: str = "prefill"

    @property
    def batch_size(self) -> int:
        return len(self.qo_lens)

    @property
    def nnz_qo(self) -> int:
        return sum(self.qo_lens)

    @property
    def sm_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim_qk)

    @property
    def q_type(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def kv_type(self) -> torch.dtype:
        return DTYPES[self.kv_dtype]

    @property
    def uniform(self) -> bool:
        """Whether all requests have the same lengths."""
        return len(set(self.qo_lens)) == 1 and len(set(self.kv_lens)) == 1

    @cached_property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one head."""
        return sum(self._pairs(q, kv) for q, kv in zip(self.qo_lens, self.kv_lens, strict=True))

    def _pairs(self, qo_len: int, kv_len: int) -> float:
        if self.mask == "none" and self.window_left < 0:
            return float(qo_len * kv_len)
        if qo_len == kv_len and self.window_left < 0:
            return qo_len * kv_len / 2
        last = torch.arange(qo_len, dtype=torch.int64) + kv_len - qo_len  # the key under the diagonal
        end = (torch.full_like(last, kv_len - 1) if self.mask == "none" else last).clamp(min=-1)
        begin = (last - self.window_left).clamp(min=0) if self.window_left >= 0 else torch.zeros_like(last)
        return float((end - begin + 1).clamp(min=0).sum())

    @property
    def is_small(self) -> bool:
        """Whether launches from Python would be part of the figure: then it is measured as a CUDA graph.

        By the least time on an H200: 4.7 TB/s and 800 TFLOP/s.
        """
        return max(self.bytes / 4.7e6, self.flops / 800e6) < 80

    @property
    def flops(self) -> float:
        """2 * heads * visible pairs * (head_dim_qk + head_dim_vo)."""
        return 2.0 * self.num_qo_heads * self.pairs * (self.head_dim_qk + self.head_dim_vo)

    def _visible_keys(self, qo_len: int, kv_len: int) -> int:
        return kv_len if self.window_left < 0 else min(kv_len, self.window_left + qo_len)

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that any query sees, each once."""
        keys = sum(self._visible_keys(q, kv) for q, kv in zip(self.qo_lens, self.kv_lens, strict=True))
        return keys * self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * self.kv_type.itemsize

    @property
    def bytes(self) -> int:
        """kv_bytes, and q and the output once."""
        rows = self.nnz_qo * self.num_qo_heads * (self.head_dim_qk + self.head_dim_vo)
        return self.kv_bytes + rows * self.q_type.itemsize

    def rate(self, seconds: float) -> float:
        """TFLOP/s or GB/s, as `bound` says."""
        return self.flops / seconds / 1e12 if self.bound == "flops" else self.kv_bytes / seconds / 1e9

    @property
    def unit(self) -> str:
        return "TFLOP/s" if self.bound == "flops" else "GB/s"


def _prefill(name: str, batch: int, length: int, heads: tuple[int, int], dims: int | tuple[int, int] = 128,
             target: Target | None = None, **more: Any) -> Row:  # fmt: skip
    """A batch of equal prompts."""
    qk, vo = (dims, dims) if isinstance(dims, int) else dims
    kind = "paged" if more.get("page_size") else "ragged"
    return Row(name, kind, (length,) * batch, (length,) * batch, *heads, qk, vo, target=target, **more)


def _append(name: str, qo_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: tuple[int, int],
            target: Target | None = None, **more: Any) -> Row:  # fmt: skip
    """New tokens at the end of paged requests."""
    return Row(name, "paged", qo_lens, kv_lens, *heads, page_size=16, target=target, **more)


def _decode(name: str, kv_lens: tuple[int, ...], heads: tuple[int, int], page_size: int = 16, dim: int = 128,
            target: Target | None = None, q_len: int = 1, **more: Any) -> Row:  # fmt: skip
    """One new token (or q_len) for each request."""
    mask = "causal" if q_len > 1 else "none"
    return Row(
        name, "decode", (q_len,) * len(kv_lens), kv_lens, *heads, dim, dim, page_size, mask, bound="bytes",
        group="decode", target=target, **more,
    )  # fmt: skip


def _skewed(count: int, least: int, most: int) -> tuple[int, ...]:
    """`count` lengths from `least` to `most`, a few long ones, in an order that is neither up nor down.

    The exponent makes 128 lengths from 16 to 32768 sum to 468 thousand: 1.92 GB of keys and values at 8 x 128 bf16.
    """
    lengths = [round(least * (most / least) ** ((i / (count - 1)) ** 1.247)) for i in range(count)]
    return tuple(lengths[i * 37 % count] for i in range(count))


_SKEWED_DECODE = _skewed(128, 16, 32768)


def _alternating(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The longest, the shortest, the second longest, the second shortest, ..."""
    down = sorted(lengths, reverse=True)
    half = (len(down) + 1) // 2
    pairs = zip(down[:half], reversed(down[half:]), strict=True)
    return tuple(length for pair in pairs for length in pair)


SKEWED_PROMPTS = (16384, 8192, 4096, 2048, 1024, 777, 512, 333, 256, 129, 128, 64, 33, 16, 2, 1)

_PREFILL = (
    _prefill("prefill-d128-causal-b2-8k", 2, 8192, (32, 8), target=Target("tflops", 720)),
    _prefill("prefill-d128-full-b2-8k", 2, 8192, (32, 8), mask="none", target=Target("tflops", 700)),
    _prefill("prefill-d128-causal-b1-32k", 1, 32768, (64, 8), target=Target("tflops", 720)),
    _prefill("prefill-d128-causal-b16-1k", 16, 1024, (32, 8), target=Target("tflops", 470)),
    _prefill("prefill-d128-causal-b64-128", 64, 128, (32, 8), target=Target("us", 50)),
    _prefill("prefill-d64-causal-b2-8k", 2, 8192, (64, 8), 64, target=Target("tflops", 540)),
    _prefill("prefill-d256-causal-b2-8k", 2, 8192, (16, 8), 256, target=Target("tflops", 720)),
    _prefill("prefill-d192-128-causal-b2-4k", 2, 4096, (128, 128), (192, 128), target=Target("tflops", 640)),
    _prefill("prefill-d192-128-causal-b2-8k", 2, 8192, (128, 128), (192, 128), target=Target("tflops", 700)),
    Row("prefill-skewed", "ragged", SKEWED_PROMPTS, SKEWED_PROMPTS, 32, 8, target=Target("peer", 1.05)),
    _prefill("prefill-p16-causal-b2-8k", 2, 8192, (32, 8), page_size=16,
             target=Target("rate_of", 0.97, "prefill-d128-causal-b2-8k")),
    _prefill("prefill-p1-causal-b2-8k", 2, 8192, (32, 8), page_size=1,
             target=Target("rate_of", 0.92, "prefill-d128-causal-b2-8k")),
    _append("append-q512-kv8k-b8", (512,) * 8, (8192,) * 8, (32, 8), target=Target("tflops", 650)),
    _append("append-q256-kv128k-b1", (256,), (131072,), (8, 1), target=Target("tflops", 500)),
    _prefill("prefill-p16-window-cap-b2-8k", 2, 8192, (32, 16), page_size=16, window_left=1023, soft_cap=50.0,
             target=Target("tflops", 400)),
    _prefill("prefill-custom-b2-8k", 2, 8192, (32, 8), mask="custom",
             target=Target("rate_of", 0.85, "prefill-d128-causal-b2-8k")),
    _append("mixed-q2048-63decodes-kv4k", (2048, *(1,) * 63), (4096,) * 64, (32, 8), bound="bytes",
            target=Target("us", 560)),
    _append("append-q4-kv8k-b64", (4,) * 64, (8192,) * 64, (64, 8), bound="bytes", target=Target("us", 520)),
    _prefill("prefill-p16-e4m3-b2-8k", 2, 8192, (32, 8), page_size=16, kv_dtype="e4m3", target=Target("tflops", 620)),
    _append("append-e4m3-q512-kv8k-b8", (512,) * 8, (8192,) * 8, (32, 8), kv_dtype="e4m3",
            target=Target("rate_of", 1.0, "append-q512-kv8k-b8")),
    _prefill("prefill-alibi-p16-b2-8k", 2, 8192, (32, 8), page_size=16, pos_encoding="ALIBI",
             target=Target("rate_of", 0.97, "prefill-p16-causal-b2-8k")),
    _prefill("prefill-rope-p16-b2-8k", 2, 8192, (32, 8), page_size=16, pos_encoding="ROPE_LLAMA",
             target=Target("rate_of", 0.85, "prefill-p16-causal-b2-8k")),
    _prefill("prefill-d64-full-b1-16k", 1, 16384, (64, 8), 64, mask="none"),
    _prefill("prefill-sinks-d64-full-b1-16k", 1, 16384, (64, 8), 64, mask="none", sinks=True,
             target=Target("tflops", 540)),
    _prefill("prefill-sinks-d128-full-b2-8k", 2, 8192, (32, 8), mask="none", sinks=True, target=Target("tflops", 700)),
)  # fmt: skip

_DECODE = (
    _decode("decode-b64-kv4k-p16", (4096,) * 64, (32, 8), target=Target("us", 245)),
    _decode("decode-b64-kv4k-h64-p64", (4096,) * 64, (64, 8), 64, target=Target("us", 245)),
    _decode("decode-b32-kv8k-h32-32", (8192,) * 32, (32, 32), target=Target("us", 935)),
    _decode("decode-b128-skewed", _SKEWED_DECODE, (32, 8), target=Target("us", 440)),
    _decode("decode-b128-skewed-down", tuple(sorted(_SKEWED_DECODE, reverse=True)), (32, 8), target=Target("us", 450)),
    _decode("decode-b128-skewed-up", tuple(sorted(_SKEWED_DECODE)), (32, 8), target=Target("us", 450)),
    _decode("decode-b128-skewed-alternating", _alternating(_SKEWED_DECODE), (32, 8), target=Target("us", 450)),
    _decode("decode-b128-long-then-short", (7000,) * 64 + (32,) * 64, (32, 8), target=Target("us", 430)),
    _decode("decode-b256-512-and-64k", (512,) * 255 + (65536,), (32, 8), target=Target("us", 200)),
    _decode("decode-b256-kv300", (300,) * 256, (32, 8), target=Target("us", 90)),
    _decode("decode-b1-kv32k", (32768,), (32, 8), target=Target("us", 38)),
    _decode("decode-b1-kv128k", (131072,), (64, 8), target=Target("us", 123)),
    _decode("decode-b16-kv1k", (1024,) * 16, (32, 8), target=Target("us", 20)),
    _decode("decode-b1-kv2k", (2048,), (32, 8), target=Target("us", 6.0)),
    _decode("decode-d64-b64-kv4k", (4096,) * 64, (64, 8), dim=64, target=Target("us", 128)),
    _decode("decode-d256-b64-kv4k", (4096,) * 64, (16, 8), dim=256, target=Target("us", 490)),
    _decode("decode-d512-b64-kv4k", (4096,) * 64, (16, 8), dim=512, target=Target("us", 1000)),
    _decode("decode-e4m3-b64-kv4k-p16", (4096,) * 64, (32, 8), kv_dtype="e4m3", target=Target("us", 140)),
    _decode("decode-e4m3-b64-kv8k-p64", (8192,) * 64, (64, 8), 64, kv_dtype="e4m3", target=Target("us", 270)),
    _decode("decode-q1-b64-kv8k", (8192,) * 64, (64, 8)),
    _decode("decode-q4-b64-kv8k", (8192,) * 64, (64, 8), q_len=4, target=Target("time_of", 1.06, "decode-q1-b64-kv8k")),
    _decode("decode-alibi-b64-kv4k-p16", (4096,) * 64, (32, 8), pos_encoding="ALIBI",
            target=Target("time_of", 1.0, "decode-b64-kv4k-p16")),
    _decode("decode-rope-b64-kv4k-p16", (4096,) * 64, (32, 8), pos_encoding="ROPE_LLAMA",
            target=Target("time_of", 1.03, "decode-b64-kv4k-p16")),
    _decode("decode-window-sinks-b128-kv8k", (8192,) * 128, (64, 8), dim=64, window_left=127, sinks=True,
            target=Target("us", 15)),
)  # fmt: skip

#: Seconds on a cpu: for trying the programs out, never for figures.
_TINY = (
    Row("tiny-ragged", "ragged", (33, 17), (33, 40), 4, 2, 64, 64, dtype="fp32", kv_dtype="fp32", group="tiny"),
    Row("tiny-square", "ragged", (32, 32), (32, 32), 4, 2, 64, 64, group="tiny"),
    Row("tiny-custom", "ragged", (9, 5), (9, 30), 4, 2, 64, 64, mask="custom", group="tiny"),
    Row("tiny-paged", "paged", (5, 1), (37, 20), 4, 2, 64, 64, 16, window_left=8, soft_cap=30.0, group="tiny"),
    Row("tiny-decode", "decode", (1, 1, 1), (65, 3, 16), 4, 2, 64, 64, 16, "none", sinks=True, bound="bytes",
        group="tiny"),
    Row("tiny-alibi", "ragged", (9, 5), (9, 30), 4, 2, 64, 64, pos_encoding="ALIBI", group="tiny"),
    Row("tiny-rope", "paged", (5, 1), (37, 20), 4, 2, 64, 64, 16, pos_encoding="ROPE_LLAMA", group="tiny"),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*_PREFILL, *_DECODE, *_TINY)


def select_rows(patterns: tuple[str, ...]) -> list[Row]:
    """The rows that any pattern names (shell wildcards, or a group's name), in the order of the table; () all but tiny.

    Raises ValueError for a pattern that names nothing.
    """
    if not patterns:
        return [row for row in ROWS if row.group != "tiny"]
    for pattern in patterns:
        if not any(_named(row, pattern) for row in ROWS):
            known = "\n  ".join(row.name for row in ROWS)
            raise ValueError(
                f"--rows: {pattern!r} names no row; the groups are prefill, decode, tiny; the rows\n  {known}"
            )
    return [row for row in ROWS if any(_named(row, pattern) for pattern in patterns)]


def _named(row: Row, pattern: str) -> bool:
    return row.group == pattern or fnmatch.fnmatchcase(row.name, pattern)
