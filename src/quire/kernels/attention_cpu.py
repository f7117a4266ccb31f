"""attention_cpu: vectorised C++ on host threads, for every machine without a GPU."""

from __future__ import annotations

from quire.kernels.attention import (
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    head_dim_reason,
)

__all__ = ["KERNEL"]


def _reject(problem: AttentionProblem) -> str | None:
    if problem.on_cuda:
        return f"target {problem.target} is a GPU"
    if problem.q.bytes == 1:
        return f"q dtype {problem.q} is not fp32, fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bytes > 1:
        return f"kv dtype {problem.kv} is neither q's {problem.q} nor e4m3 or e5m2"
    if problem.o.bytes == 1:
        return f"o dtype {problem.o} is not fp32, fp16 or bf16"
    return head_dim_reason(problem)


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows hold a decode batch's requests. 192 rows read each copied key tile 3-10 % cheaper than 96 do, up to where
    their scratch (540 KB at head_dim 256) outgrows a small L2 cache (2026-11-21, AVX-512, 2 threads)."""
    return (TileShape(16, 64), TileShape(192 if max(problem.head_dim_qk, problem.head_dim_vo) <= 128 else 96, 64))


def _choose_rows(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """The lowest tile that a typical request fills; always the lowest where neighbours must not have a say."""
    return shapes[0].rows if problem.fixed_split_size else first_tile_that_holds(problem, shapes)


KERNEL = AttentionKernel(
    name="attention_cpu",
    backend="cpu",
    header="quire/kernels/attention_cpu.h",
    cxx="AttentionCpu",
    reject=_reject,
    tiles=_tiles,
    choose_rows=_choose_rows,
)
