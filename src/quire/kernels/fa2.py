"""attention_fa2: mma.sync and cp.async, any GPU from sm_80 on."""

from __future__ import annotations

from functools import partial

from quire.kernels.attention import (
    WIDE_HEAD_DIM,
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    first_tile_without_neighbours,
    is_blackwell,
    number_types_reason,
    tensor_core_reason,
)
from quire.kernels.types import MaskMode, PosEncodingMode


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows for decode (where most warps only copy), 64, and 128 if registers and 99 KB of shared memory suffice.
    Converting 8-bit keys and values needs registers, too.

    All heights have the same KV tile, so that the result of a row does not depend, bit for bit, on the height.
    """
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    kv = 128 if max(qk, vo) <= 64 and not _is_encoded(problem) else 64
    fits = vo <= 128 and qk <= 192 and problem.kv.bits == 16
    rows = (16, 64, 128) if fits and not _spills(problem) else (16, 64)
    return tuple(TileShape(m, kv) for m in rows)


def _spills(problem: AttentionProblem) -> bool:
    """Whether 128 rows leave too few registers in every order of tile/ampere/instruction_order.cuh."""
    is_sm86 = problem.target.rstrip("af") in ("sm86", "sm87", "sm88", "sm89")
    if is_blackwell(problem) or (is_sm86 and problem.mask is MaskMode.CUSTOM and problem.soft_cap):
        return True
    return _is_encoded(problem) and _spills_encoded(problem)


def _is_encoded(problem: AttentionProblem) -> bool:
    """Whether logits depend on the positions of keys, or on a custom variant."""
    return problem.pos_encoding is not PosEncodingMode.NONE or problem.variant is not None


def _spills_encoded(problem: AttentionProblem) -> bool:
    """Whether a position encoding or a custom variant needs too many registers for 128 rows."""
    if problem.head_dim_qk > 128 or problem.mask is MaskMode.CUSTOM or (problem.window and problem.soft_cap):
        return True
    if problem.variant is not None:  # its registers are not known here
        return True
    is_before_sm90 = problem.target.startswith("sm8")
    has_alibi = problem.pos_encoding is PosEncodingMode.ALIBI and max(problem.head_dim_qk, problem.head_dim_vo) > 96
    return has_alibi and not (problem.paged and is_before_sm90)


FA2 = AttentionKernel(
    name="attention_fa2",
    backend="fa2",
    header="quire/kernels/attention_fa2.cuh",
    cxx="AttentionFa2",
    on_cuda=True,
    reject=partial(tensor_core_reason, takes_8_bit_kv=True),
    tiles=_tiles,
    choose_rows=first_tile_that_holds,
    has_expression_blocks=True,
    has_cascades=True,
    notes_times=True,
)


def _reject_wide(problem: AttentionProblem) -> str | None:
    if reason := number_types_reason(problem, takes_8_bit_kv=True):
        return reason
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim != WIDE_HEAD_DIM:
            return f"{name}={dim}: expected {WIDE_HEAD_DIM}"
    return None


def _tiles_wide(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows serve decode. 64 rows of queries leave shared memory for 32 keys and values on an A100, and for 64 on an
    H100; they do not fit 99 KB.
    """
    target = problem.target.rstrip("af")
    if target.startswith(("sm90", "sm100", "sm103")):
        return TileShape(16, 32), TileShape(64, 64)
    return (TileShape(16, 32), TileShape(64, 32)) if target in ("sm80", "sm87") else (TileShape(16, 32),)


WIDE = AttentionKernel(
    name="attention_wide",
    backend="wide",
    header="quire/kernels/attention_wide.cuh",
    cxx="AttentionWide",
    on_cuda=True,
    reject=_reject_wide,
    tiles=_tiles_wide,
    choose_rows=first_tile_without_neighbours,
    schedule_input=lambda _: {"start_cost": 20},
)
