"""attention_fa2: mma.sync and cp.async, any GPU from sm_80 on."""

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
    if not problem.on_cuda:
        return f"target {problem.target} is not a GPU"
    if problem.q.slug not in ("fp16", "bf16"):
        return f"q dtype {problem.q} is not fp16 or bf16"
    if problem.kv != problem.q:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q}"
    if problem.o != problem.q:
        return f"o dtype {problem.o} differs from q dtype {problem.q}"
    return head_dim_reason(problem)


def _tiles(head_dim_qk: int, head_dim_vo: int, target: str) -> tuple[TileShape, ...]:
    def shape(rows: int, threads: int, min_ctas: int) -> TileShape:
        kv = 64
        smem = 2 * (rows * (head_dim_qk + 8) + kv * (head_dim_qk + 8) + kv * (head_dim_vo + 8))
        return TileShape(rows, kv, threads, min_ctas, smem)

    return (shape(16, 32, 2), shape(64, 128, 2), shape(128, 128, 2))


KERNEL = AttentionKernel(
    name="attention_fa2",
    backend="fa2",
    header="quire/kernels/attention_fa2.cuh",
    cxx="AttentionFa2",
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_that_holds,
)
