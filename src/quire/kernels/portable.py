"""Rows of the kernels that many machines run: decode, fa2, wide and mla_fa2 on GPUs from sm_80 on, the others on CPUs.

On GPUs they use mma.sync and cp.async; attention_cpu is vectorised C++ on host threads.
"""

from __future__ import annotations

from quire.jit import without_matrix_unit
from quire.kernels.attention import (
    MLA_DIMS,
    MLA_SPLIT,
    WIDE_HEAD_DIM,
    AttentionKernel,
    AttentionProblem,
    TileShape,
    head_dim_reason,
    number_types_reason,
    rows_that_decide,
    tensor_core_reason,
    whole_blocks,
)
from quire.kernels.features import SCALED_MLA_OPERANDS, MaskMode, PosEncodingMode
from quire.kernels.params import AttentionMlaParams, AttentionPrefixParams, AttentionScaledParams


def first_tile_that_holds(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """The lowest row tile that holds a typical request, or the highest."""
    return next((s.rows for s in shapes if problem.rows <= s.rows), shapes[-1].rows)


def first_tile_without_neighbours(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """first_tile_that_holds(). If requests must not influence each other, the lowest row tile for steps of decode, and
    else the highest whose KV tile divides the splits.
    """
    if not problem.fixed_split_size:
        return first_tile_that_holds(problem, shapes)
    size = max(0, problem.fixed_split_size)
    fitting = [shape.rows for shape in shapes if size % shape.kv == 0] or [shapes[0].rows]
    return fitting[0 if problem.uniform else -1]


def is_blackwell(problem: AttentionProblem) -> bool:
    """Whether the target is a GPU from sm_100 on, where ptxas uses about ten registers more for the same code."""
    return problem.on_cuda and int(problem.target[2:].rstrip("af")) >= 100


def mla_reason(problem: AttentionProblem, *, takes_variants: bool = False) -> str | None:
    """Why an MLA kernel does not take these dims and logits; None if they are fine."""
    if (problem.head_dim_qk, problem.head_dim_vo) != MLA_DIMS:
        latent, positions = problem.head_dim_vo, problem.head_dim_qk - problem.head_dim_vo
        return f"head_dim_ckv={latent}, head_dim_kpe={positions}: expected 512 and 64"
    if problem.tile_scales and (problem.q.slug, problem.kv.slug) != ("bf16", "e4m3"):
        return f"q dtype {problem.q}, kv dtype {problem.kv}: expected bf16 and e4m3, as in rows of 656 bytes"
    if problem.variant is not None and not takes_variants:
        return "it takes no custom variants of latents; fa2 and cpu do"
    changes_logits = problem.window or problem.soft_cap or problem.pos_encoding
    if changes_logits or problem.mask not in (MaskMode.NONE, MaskMode.CAUSAL):
        return "it has no window, soft cap or position encoding, and no mask but causal; a variant can compute them"
    return None if problem.paged else "keys are ragged: it takes pages only"


# --- attention_decode: few query rows over long keys, limited by memory ----------------------------------------------


_WARP_BYTES = 8192  #: that a warp copies at a time, unless 16 tokens have more


def _reject_decode(problem: AttentionProblem) -> str | None:
    if problem.fixed_split_size and not problem.uniform:
        return "rows differ between requests, and with fixed or no splits they may not decide the kernel"
    if reason := _head_reason(problem):
        return reason
    if not (tiles := _tiles_decode(problem)):
        return f"heads of {_widest(problem)} dims leave too few registers or shared memory on {problem.target}"
    most = tiles[-1].rows
    return f"{problem.rows} rows (qo_len * group_size) are more than {most}" if problem.rows > most else None


def _divides_dims(problem: AttentionProblem) -> bool:
    """Whether two warps divide the dims of a head."""
    return (problem.head_dim_qk, problem.head_dim_vo) == (WIDE_HEAD_DIM, WIDE_HEAD_DIM)


def _head_reason(problem: AttentionProblem) -> str | None:
    """Why number types and heads are refused. Of warps that divide dims, none has both of a pair that RoPE rotates."""
    if not _divides_dims(problem):
        return tensor_core_reason(problem)
    if problem.pos_encoding is PosEncodingMode.ROPE_LLAMA:
        return f"heads of {WIDE_HEAD_DIM} dims are not rotated"
    if problem.cascade:
        return f"heads of {WIDE_HEAD_DIM} dims have no cascades"
    return number_types_reason(problem)


def _tiles_decode(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows serve one query of up to 16 heads per KV head: unused rows of the tensor cores cost no time here.

    32 and 64 rows serve several queries (speculative decoding), so that keys are still read once. They leave too few
    registers for heads of 512 dims.
    """
    rows_of_tiles = (16,) if _divides_dims(problem) else (16, 32, 64)
    return tuple(
        TileShape(rows, _tile_kv(problem, rows))
        for rows in rows_of_tiles
        if _fits(problem, rows) and not _spills_decode(problem, rows)
    )


def _spills_decode(problem: AttentionProblem, rows: int) -> bool:
    """Whether registers would spill: on Blackwell with wide heads, and with narrower ones if shared memory is small.

    8-bit keys of 512 dims spill everywhere but on Hopper.
    """
    widest = _widest(problem)
    if _divides_dims(problem):
        return is_blackwell(problem) or (problem.kv.bits == 8 and problem.target != "sm90a")
    if widest <= 64 or not is_blackwell(problem):
        return False
    most = 16 if widest > 192 or problem.kv.bits < 16 or _has_small_smem(problem) else 32
    return rows > most or (widest > 192 and _has_small_smem(problem))


def _widest(problem: AttentionProblem) -> int:
    return max(problem.head_dim_qk, problem.head_dim_vo)


def _yields(problem: AttentionProblem) -> str | None:
    """More than 32 rows of wide heads are limited by tensor cores as much as by memory, and fa3 is faster; except with
    8-bit keys, which fa3 has to convert for every 128 rows.
    """
    if problem.cascade:
        return "keys that rows of a cascade share are faster in tiles of more rows"
    if problem.rows <= 32 or _widest(problem) <= 64 or problem.kv.bits < 16:
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
    "attention_decode",
    reject=_reject_decode,
    tiles=_tiles_decode,
    choose_rows=first_tile_that_holds,  # with fixed splits all batches have the same number of rows
    yields=_yields,
    has_cascades=True,
    scaled_params=AttentionScaledParams,
    schedule_input=lambda _: {"start_cost": 20},
    own_split=0,
    pdl=True,
    notes_times=True,
)


# --- attention_fa2, and attention_wide for heads of 512 dims ---------------------------------------------------------


def _tiles_fa2(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows for decode (where most warps only copy), 64, and 128 if registers and 99 KB of shared memory suffice.
    Converting 8-bit keys and values needs registers, too.

    All heights have the same KV tile, so that the result of a row does not depend, bit for bit, on the height.
    """
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    kv = 128 if max(qk, vo) <= 64 and not _is_encoded(problem) else 64
    fits = vo <= 128 and qk <= 192 and problem.kv.bits == 16
    rows = (16, 64, 128) if fits and not _spills_fa2(problem) else (16, 64)
    return tuple(TileShape(m, kv) for m in rows)


def _spills_fa2(problem: AttentionProblem) -> bool:
    """Whether 128 rows leave too few registers in every order of instructions in attention_fa2.cuh."""
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
    "attention_fa2",
    reject=tensor_core_reason,
    tiles=_tiles_fa2,
    choose_rows=first_tile_that_holds,
    has_expression_blocks=True,
    has_cascades=True,
    scaled_params=AttentionScaledParams,
    notes_times=True,
)


def _reject_wide(problem: AttentionProblem) -> str | None:
    if reason := number_types_reason(problem):
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
    "attention_wide",
    reject=_reject_wide,
    tiles=_tiles_wide,
    choose_rows=first_tile_without_neighbours,
    schedule_input=lambda _: {"start_cost": 20},
)


# --- attention_cpu ---------------------------------------------------------------------------------------------------


def _reject_cpu(problem: AttentionProblem) -> str | None:
    for name, dtype in (("q", problem.q), ("o", problem.o)):
        if dtype.bits < 16:
            return f"{name} dtype {dtype} is not fp32, fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bits > 8:
        return (
            f"kv dtype {problem.kv} differs from q dtype {problem.q} (.to() converts); only 8-bit keys and values may"
        )
    return head_dim_reason(problem, most=512)


def _multiplies_tiles(problem: AttentionProblem, rows: int = 32) -> bool:
    """Whether row tiles of `rows` rows are multiplied on the matrix unit: bf16 queries, more rows than in decode, and
    no RoPE in the kernel, because rotated floats would be rounded again.
    """
    if without_matrix_unit(problem.target) == problem.target:
        return False
    return problem.q.slug == "bf16" and rows > 16 and problem.pos_encoding is not PosEncodingMode.ROPE_LLAMA


def _tiles_cpu(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows hold a request of a decode batch. 192 rows share each copied KV tile among more rows than 96 do, as long
    as their scratch memory (540 KB at head_dim 256) fits a small L2 cache. The matrix unit loads and stores the output
    once per KV tile, so tiles of 128 keys halve this cost.
    """
    widest = max(problem.head_dim_qk, problem.head_dim_vo)
    if _multiplies_tiles(problem):
        return TileShape(16, 64), TileShape(256 if widest <= 128 else 128 if widest <= 256 else 64, 128)
    return TileShape(16, 64), TileShape(192 if widest <= 128 else 96 if widest <= 256 else 48, 64)


CPU = AttentionKernel(
    "attention_cpu",
    on_cuda=False,
    reject=_reject_cpu,
    tiles=_tiles_cpu,
    choose_rows=first_tile_without_neighbours,
    uses_matrix_unit=_multiplies_tiles,
    has_expression_blocks=True,
    has_cascades=True,
    prefix_params=AttentionPrefixParams,
    scaled_params=AttentionScaledParams,
    notes_times=True,
)


# --- latents: attention_mla_fa2 and attention_mla_cpu ----------------------------------------------------------------


_LATENTS = 64  #: of a KV tile if a CTA may have 227 KB of shared memory; else half as many, so that two tiles fit


def _tiles_mla_fa2(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16, 32 or 64 heads of a query; 64 rows of queries leave no space for keys in 99 KB of shared memory."""
    target = problem.target.rstrip("af")
    has_large_smem = target.startswith(("sm90", "sm100", "sm103"))
    is_small = not has_large_smem and target not in ("sm80", "sm87")
    return tuple(
        TileShape(rows, _LATENTS if has_large_smem else _LATENTS // 2) for rows in (16, 32, 64)[: 2 if is_small else 3]
    )


def _choose_rows_mla(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    rows = rows_that_decide(problem)
    return next((shape.rows for shape in shapes if rows <= shape.rows), shapes[-1].rows)


MLA_FA2 = AttentionKernel(
    "attention_mla_fa2",
    reject=lambda problem: number_types_reason(problem) or mla_reason(problem, takes_variants=True),
    tiles=_tiles_mla_fa2,
    choose_rows=_choose_rows_mla,
    own_split=MLA_SPLIT,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaParams,
    schedule_input=lambda _: {"start_cost": 20},
)


def _reject_mla_cpu(problem: AttentionProblem) -> str | None:
    for name, dtype in (("q", problem.q), ("o", problem.o)):
        if dtype.bits < 16:
            return f"{name} dtype {dtype} is not fp32, fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bits != 8:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q} (.to() converts); only 8-bit keys may"
    return mla_reason(problem, takes_variants=True)


def _tiles_mla_cpu(_: AttentionProblem) -> tuple[TileShape, ...]:
    """16 heads of a query, or 128."""
    return TileShape(16, 64), TileShape(128, 64)


MLA_CPU = AttentionKernel(
    "attention_mla_cpu",
    on_cuda=False,
    reject=_reject_mla_cpu,
    tiles=_tiles_mla_cpu,
    choose_rows=first_tile_without_neighbours,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaParams,
)
