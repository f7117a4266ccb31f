"""Rotary embeddings against the copy roof: q and k rotated, and the fused prologue that also appends to the pages.

Bytes are counted once each: queries, keys and values that are read, what is written, and rows of the table of angles.
The roof, "torch-copy" and the clock are those of operations.py. Results are compared with torch's in float64 before
anything is timed. FlashInfer's bf16 prologue is two launches, its rotation and its append; its e4m3 one is fused.

    python benchmarks/rope.py --json results/rope.json
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

import operations
from operations import Prepared, num_sets

PAGE_SIZE, NUM_POSITIONS = 16, 8192


@dataclass(frozen=True)
class Case:
    """kind: rope (computed angles), table (angles from a table), prologue (rotate and append), norm (with RMS norms),
    or e4m3 (quantised prologue).
    """

    name: str
    kind: str
    num_tokens: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    target_us: float | None = None
    target_of_roof: float | None = None
    num_states: int = 1

    @property
    def appends(self) -> bool:
        """Whether values are moved too."""
        return self.kind in ("prologue", "norm", "e4m3")

    @property
    def allowed_error(self) -> float:
        """Relative: beyond the rounding of bf16, or of e4m3."""
        return 4e-2 if self.kind == "e4m3" else 1e-2

    @property
    def bytes(self) -> int:
        """Read and written, a token."""
        heads = self.num_qo_heads + (2 if self.appends else 1) * self.num_kv_heads
        written = 1 if self.kind == "e4m3" else 2
        table = 0 if self.kind == "rope" else 4
        return self.num_tokens * self.head_dim * (heads * (2 + written) + table)


CASES = (
    *(Case(f"{kind}-8192x32/8x128", kind, 8192) for kind in ("rope", "table")),
    *(Case(f"{kind}-8192x32/8x128", kind, 8192, target_of_roof=0.85) for kind in ("prologue", "norm", "e4m3")),
    *(Case(f"{kind}-64x32/8x128", kind, 64) for kind in ("rope", "prologue", "e4m3")),
    Case("prologue-8192x8/8x64", "prologue", 8192, 8, 8, 64, target_of_roof=0.85),
    *(Case(f"tiny-{kind}", kind, 20, 4, 2, 64) for kind in ("rope", "table", "prologue", "norm", "e4m3")),
)


class Inputs:
    """One set of tensors; positions are shuffled, so that rows of the table are not read in order."""

    def __init__(self, case: Case, device: torch.device) -> None:
        def draw(heads: int) -> torch.Tensor:
            return torch.randn(case.num_tokens, heads, case.head_dim, dtype=torch.bfloat16, device=device)

        self.q, self.k, self.v = (draw(n) for n in (case.num_qo_heads, case.num_kv_heads, case.num_kv_heads))
        self.weight = torch.rand(case.head_dim, device=device).bfloat16() + 0.5
        num_pages = -(-case.num_tokens // PAGE_SIZE)
        self.dtype = torch.float8_e4m3fn if case.kind == "e4m3" else torch.bfloat16
        shape = (num_pages, PAGE_SIZE, case.num_kv_heads, case.head_dim)
        self.cache = tuple(torch.zeros(shape, device=device).to(self.dtype) for _ in range(2))
        self.out = torch.empty_like(self.q, dtype=self.dtype)
        self.pos_ids = torch.randperm(case.num_tokens, device=device).to(torch.int32) % NUM_POSITIONS
        frequency = 1e4 ** (-torch.arange(0, case.head_dim, 2, dtype=torch.float64, device=device) / case.head_dim)
        self.angles = torch.arange(NUM_POSITIONS, device=device)[:, None] * frequency
        self.table = torch.cat((self.angles.cos(), self.angles.sin()), 1).float()
        self.tokens = torch.arange(case.num_tokens, dtype=torch.int32, device=device)
        self.indices = torch.randperm(num_pages, device=device).to(torch.int32)
        self.indptr = torch.tensor([0, num_pages], dtype=torch.int32, device=device)
        last = case.num_tokens - (num_pages - 1) * PAGE_SIZE
        self.last = torch.tensor([last], dtype=torch.int32, device=device)
        self.batch = torch.zeros_like(self.tokens)

    def exact(self, x: torch.Tensor, norm: bool) -> torch.Tensor:
        """x, normalised if asked and rotated, in float64."""
        x = x.double()
        if norm:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight.double()
        angles = self.angles[self.pos_ids.long()][:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def stored(self, pages: torch.Tensor) -> torch.Tensor:
        """The tokens in pages, in float64."""
        return pages[self.indices.long()].flatten(0, 1)[: self.q.shape[0]].double()


def prepare(package: Any, case: Case, device: torch.device) -> Prepared:
    """`package` is quire or FlashInfer: both have these names, but for what only quire fuses."""
    torch.manual_seed(0)
    sets = [Inputs(case, device) for _ in range(num_sets(device))]
    step = _step(package, case)

    def check() -> tuple[torch.Tensor, torch.Tensor]:
        s, norm = sets[0], case.kind == "norm"
        q, k = step(s)
        found, want = [q.reshape(s.q.shape)], [s.exact(s.q, norm)]
        if case.appends:
            found += [s.stored(pages) for pages in s.cache]
            want += [s.exact(s.k, norm), s.v.double()]
        else:
            found.append(k.reshape(s.k.shape))
            want.append(s.exact(s.k, norm))
        return tuple(torch.cat([t.double().flatten() for t in part]) for part in (found, want))  # type: ignore[return-value]

    return lambda i: step(sets[i % len(sets)]), check


def _step(package: Any, case: Case) -> Any:
    """What is timed, on one set: gives rotated queries, and keys where they are not appended."""
    if case.kind == "rope":
        return lambda s: package.apply_rope_pos_ids(s.q, s.k, s.pos_ids)
    if case.kind == "e4m3":
        return lambda s: _quantised(package.rope.rope_quantize_fp8_append_paged_kv_cache, s)
    if case.kind == "table" or not hasattr(package, "rope_append_paged_kv_cache"):
        if case.kind == "norm":
            raise AttributeError("norms, rotation and append in one call")
        return lambda s: _by_steps(package, case, s)
    return lambda s: _fused(package.rope_append_paged_kv_cache, case, s)


def _fused(call: Any, case: Case, s: Inputs) -> tuple[torch.Tensor, None]:
    weight = s.weight if case.kind == "norm" else None
    tables = (s.batch, s.tokens, s.cache, s.indices, s.indptr)
    options = {"pos_ids": s.pos_ids, "cos_sin_cache": s.table, "q_weight": weight, "k_weight": weight}
    return call(s.q, s.k, s.v, *tables, **options, out=s.out), None


def _quantised(call: Any, s: Inputs) -> tuple[torch.Tensor, None]:
    tables = (s.indices, s.indptr, s.batch, s.tokens)
    q, _ = call(s.q, s.k, None, None, s.v, s.table, s.pos_ids, s.cache, *tables, q_rope_out=s.out)
    return q, None


def _by_steps(package: Any, case: Case, s: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = package.apply_rope_with_cos_sin_cache(s.pos_ids, s.q.flatten(1), s.k.flatten(1), s.q.shape[2], s.table)
    if case.appends:
        tables = (s.batch, s.tokens, s.cache, s.indices, s.indptr, s.last)
        package.append_paged_kv_cache(k.reshape(s.k.shape), s.v, *tables)
    return q, k


if __name__ == "__main__":
    sys.exit(operations.main(None, __doc__, CASES, prepare))
