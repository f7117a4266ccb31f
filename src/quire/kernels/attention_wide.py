"""attention_wide: heads of 512 dims; mma.sync and cp.async, any GPU from sm_80 on."""

from __future__ import annotations

from quire.kernels.attention import (
    WIDE_HEAD_DIM,
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_without_neighbours,
    number_types_reason,
)


def _reject(problem: AttentionProblem) -> str | None:
    if reason := number_types_reason(problem, takes_8_bit_kv=True):
        return reason
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim != WIDE_HEAD_DIM:
            return f"{name}={dim}: expected {WIDE_HEAD_DIM}"
    return None


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows serve decode. 64 rows of queries leave shared memory for 32 keys and values on an A100, and for 64 on an
    H100; they do not fit 99 KB.
    """
    target = problem.target.rstrip("af")
    if target.startswith(("sm90", "sm100", "sm103")):
        return TileShape(16, 32), TileShape(64, 64)
    return (TileShape(16, 32), TileShape(64, 32)) if target in ("sm80", "sm87") else (TileShape(16, 32),)


KERNEL = AttentionKernel(
    name="attention_wide",
    backend="wide",
    header="quire/kernels/attention_wide.cuh",
    cxx="AttentionWide",
    on_cuda=True,
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_without_neighbours,
    schedule_input=lambda _: {"start_cost": 20},
)
