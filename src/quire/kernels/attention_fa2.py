"""attention_fa2: mma.sync and cp.async, any GPU from sm_80 on."""

from __future__ import annotations

from quire.kernels.attention import (
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    head_dim_reason,
)
from quire.types import MaskMode

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


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows for decode (more of its warps only copy), 64, and 128 where registers and 99 KB of shared memory allow.

    All have the same kv tile, so that a row's result does not depend, bit for bit, on the height of its tile.
    """
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    kv = 128 if max(qk, vo) <= 64 else 64
    rows = (16, 64, 128) if vo <= 128 and qk <= 192 and not _awaits_a_run(problem) else (16, 64)
    return tuple(TileShape(m, kv) for m in rows)


def _awaits_a_run(problem: AttentionProblem) -> bool:
    """Variants whose 128-row tiles got another order of copies (tile/fa2_order.cuh) after the last run on an H200.

    There, where fa3 takes these problems anyway, they keep to tiles that have been run until these have been too.
    """
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    if problem.target != "sm90a":
        return False
    if problem.paged:
        return qk <= 64 or (qk == 192 and vo == 128)
    return qk == vo == 128 and (problem.soft_cap or problem.mask is MaskMode.CUSTOM)


KERNEL = AttentionKernel(
    name="attention_fa2",
    backend="fa2",
    header="quire/kernels/attention_fa2.cuh",
    cxx="AttentionFa2",
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_that_holds,
)
