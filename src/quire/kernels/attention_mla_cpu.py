"""attention_mla_cpu: latent attention (MLA) on host threads."""

from __future__ import annotations

from quire.kernels.attention import (
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_without_neighbours,
    mla_reason,
)
from quire.kernels.operands import SCALED_MLA_OPERANDS
from quire.kernels.params import AttentionMlaParams


def _reject(problem: AttentionProblem) -> str | None:
    for name, dtype in (("q", problem.q), ("o", problem.o)):
        if dtype.bits < 16:
            return f"{name} dtype {dtype} is not fp32, fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bits != 8:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q}; only 8-bit keys and values may"
    return mla_reason(problem)


def _tiles(_: AttentionProblem) -> tuple[TileShape, ...]:
    """16 heads of a query, or 128."""
    return TileShape(16, 64), TileShape(128, 64)


KERNEL = AttentionKernel(
    name="attention_mla_cpu",
    backend="cpu",
    header="quire/kernels/attention_mla_cpu.h",
    cxx="AttentionMlaCpu",
    on_cuda=False,
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_without_neighbours,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaParams,
)
