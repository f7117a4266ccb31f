"""attention_decode: few query rows over long keys, limited by memory; mma.sync and cp.async, any GPU from sm_80 on."""

from __future__ import annotations

from quire.kernels.attention import (
    WIDE_HEAD_DIM,
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    is_blackwell,
    number_types_reason,
    tensor_core_reason,
    whole_blocks,
)
from quire.kernels.types import PosEncodingMode

_WARP_BYTES = 8192  #: that a warp copies at a time, unless 16 tokens have more


def _reject(problem: AttentionProblem) -> str | None:
    if problem.fixed_split_size and not problem.uniform:
        return "rows differ between requests, and with fixed or no splits they may not decide the kernel"
    if reason := _head_reason(problem):
        return reason
    if not (tiles := _tiles(problem)):
        return f"heads of {_widest(problem)} dims leave too few registers or shared memory on {problem.target}"
    most = tiles[-1].rows
    return f"{problem.rows} rows (qo_len * group_size) are more than {most}" if problem.rows > most else None


def _divides_dims(problem: AttentionProblem) -> bool:
    """Whether two warps divide the dims of a head."""
    return (problem.head_dim_qk, problem.head_dim_vo) == (WIDE_HEAD_DIM, WIDE_HEAD_DIM)


def _head_reason(problem: AttentionProblem) -> str | None:
    """Why number types and heads are refused. Of warps that divide dims, none has both of a pair that RoPE rotates."""
    if not _divides_dims(problem):
        return tensor_core_reason(problem, takes_8_bit_kv=True)
    if problem.pos_encoding is PosEncodingMode.ROPE_LLAMA:
        return f"heads of {WIDE_HEAD_DIM} dims are not rotated"
    if problem.cascade:
        return f"heads of {WIDE_HEAD_DIM} dims have no cascades"
    return number_types_reason(problem, takes_8_bit_kv=True)


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows serve one query of up to 16 heads per KV head: unused rows of the tensor cores cost no time here.

    32 and 64 rows serve several queries (speculative decoding), so that keys are still read once. They leave too few
    registers for heads of 512 dims.
    """
    rows_of_tiles = (16,) if _divides_dims(problem) else (16, 32, 64)
    return tuple(
        TileShape(rows, _tile_kv(problem, rows))
        for rows in rows_of_tiles
        if _fits(problem, rows) and not _spills(problem, rows)
    )


def _spills(problem: AttentionProblem, rows: int) -> bool:
    """Whether registers would spill: on Blackwell with wide heads, and with narrower ones if shared memory is small.

    8-bit keys of 512 dims spill everywhere but on Hopper.
    """
    widest = _widest(problem)
    if _divides_dims(problem):
        return is_blackwell(problem) or (problem.kv.bits == 8 and problem.target != "sm90a")
    if widest <= 64 or not is_blackwell(problem):
        return False
    most = 16 if widest > 192 or problem.kv.bits == 8 or _has_small_smem(problem) else 32
    return rows > most or (widest > 192 and _has_small_smem(problem))


def _widest(problem: AttentionProblem) -> int:
    return max(problem.head_dim_qk, problem.head_dim_vo)


def _yields(problem: AttentionProblem) -> str | None:
    """More than 32 rows of wide heads are limited by tensor cores as much as by memory, and fa3 is faster; except with
    8-bit keys, which fa3 has to convert for every 128 rows.
    """
    if problem.cascade:
        return "keys that rows of a cascade share are faster in tiles of more rows"
    if problem.rows <= 32 or _widest(problem) <= 64 or problem.kv.bits == 8:
        return None
    return f"{problem.rows} rows of wide heads are faster in tiles of more rows"


def _tile_kv(problem: AttentionProblem, rows: int) -> int:
    """Four warps copy 32 or 16 tokens each, at most 8 KB. If 16 tokens have more than 8 KB, two warps copy 16 tokens
    each.

    64 rows need the registers of four warps. tile/ampere/decode_shape.cuh derives warps and tokens from this number: of
    heads of 512 dims, four warps copy 8 tokens each.
    """
    token_bytes = _token_bytes(problem)
    # If shared memory is small, each warp's 16 rows of o replace its 16 tokens at the end of a work tile.
    most = max(token_bytes, 4 * whole_blocks(problem.head_dim_vo)) if _has_small_smem(problem) else token_bytes
    if rows < 64 and 16 * most > _WARP_BYTES:
        return 32
    return 128 if 32 * token_bytes <= _WARP_BYTES else 64


def _fits(problem: AttentionProblem, rows: int) -> bool:
    """Whether two stages of a ring fit; 64 rows of o, four bytes a number, must fit a stage."""
    tile_kv = _tile_kv(problem, rows)
    stage_bytes = max(tile_kv * _token_bytes(problem), 256 * whole_blocks(problem.head_dim_vo) if rows == 64 else 0)
    return not _has_small_smem(problem) or 2 * stage_bytes <= 80 * 1024


def _token_bytes(problem: AttentionProblem) -> int:
    return (whole_blocks(problem.head_dim_qk) + whole_blocks(problem.head_dim_vo)) * problem.kv.bits // 8


def _has_small_smem(problem: AttentionProblem) -> bool:
    return problem.target.rstrip("af") in ("sm86", "sm89", "sm120", "sm121")  # 99 KB a CTA


DECODE = AttentionKernel(
    name="attention_decode",
    backend="decode",
    header="quire/kernels/attention_decode.cuh",
    cxx="AttentionDecode",
    on_cuda=True,
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_that_holds,  # with fixed splits all batches have the same number of rows
    yields=_yields,
    has_cascades=True,
    schedule_input=lambda _: {"start_cost": 20},
    pdl=True,
    notes_times=True,
)
