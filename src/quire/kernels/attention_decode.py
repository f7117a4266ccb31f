"""attention_decode: few query rows over long keys, bound by memory; mma.sync and cp.async, any GPU from sm_80 on."""

from __future__ import annotations

from quire.kernels.attention import (
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    tensor_core_reason,
)

__all__ = ["KERNEL"]

_WARP_BYTES = 8192  #: of keys and values that a warp copies at a time, where 16 tokens are not more
_SMALL_SMEM = ("sm86", "sm89", "sm120", "sm121")  #: 99 KB a CTA


def _reject(problem: AttentionProblem) -> str | None:
    if problem.fixed_split_size and not problem.uniform:
        return "rows differ between requests, and with fixed or no splits they may not decide the kernel"
    if reason := tensor_core_reason(problem, takes_8_bit_kv=True):
        return reason
    most = _tiles(problem)[-1].rows
    return f"{problem.rows} rows (qo_len * group_size) are more than {most}" if problem.rows > most else None


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """What the warps of a CTA copy at a time; the kernel states the same numbers in tile/decode_shape.cuh.

    16 rows serve any group of up to 16 heads at one query: the tensor cores' waste costs no time here. 32 and 64 are
    for speculative queries, so that their keys are still read once.
    """
    return tuple(TileShape(rows, _tile_kv(problem, rows)) for rows in (16, 32, 64) if _fits(problem, rows))


def _yields(problem: AttentionProblem) -> str | None:
    """64 rows of wide heads take as many products as bytes: fa3 is a fifth faster there (benchmarks/results)."""
    if problem.rows <= 32 or max(problem.head_dim_qk, problem.head_dim_vo) <= 64:
        return None
    return f"{problem.rows} rows of wide heads are faster in tiles of more rows"


def _row_blocks(problem: AttentionProblem, rows: int) -> int:
    """Blocks of 16 rows in a warp: two where the registers of o and q allow."""
    registers = 2 * (problem.head_dim_vo // 2 + problem.head_dim_qk // 4)
    return 2 if rows > 16 and registers <= (96 if problem.kv.bits == 8 else 192) else 1


def _warps(problem: AttentionProblem, rows: int) -> int:
    """Four, or two where 16 tokens a warp are more than 8 KB; at least what it takes to hold the rows."""
    return max(rows // (16 * _row_blocks(problem, rows)), 2 if 16 * _token_bytes(problem) > _WARP_BYTES else 4)


def _token_bytes(problem: AttentionProblem) -> int:
    return (problem.head_dim_qk + problem.head_dim_vo) * problem.kv.bits // 8


def _tile_kv(problem: AttentionProblem, rows: int) -> int:
    return _warps(problem, rows) * (32 if 32 * _token_bytes(problem) <= _WARP_BYTES else 16)


def _fits(problem: AttentionProblem, rows: int) -> bool:
    """A ring of two stages takes at most 64 KB, but 128 KB for 64 rows of wide heads."""
    if problem.target.rstrip("af") not in _SMALL_SMEM:
        return True
    return 2 * _tile_kv(problem, rows) * _token_bytes(problem) <= 80 * 1024


KERNEL = AttentionKernel(
    name="attention_decode",
    backend="decode",
    header="quire/kernels/attention_decode.cuh",
    cxx="AttentionDecode",
    on_cuda=True,
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_that_holds,  # with fixed splits all requests, and so all batches, have as many rows
    yields=_yields,
    pdl=True,
)
