"""Rows of the kernels with wgmma and TMA, on sm_90a: attention_fa3, attention_fa3_fp8 for products of 8 bits, and
attention_mla_fa3 and attention_mla_decode for latents (MLA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quire.kernels.attention import (
    MLA_SPLIT,
    AttentionKernel,
    AttentionKey,
    AttentionProblem,
    TileShape,
    head_dim_reason,
    number_types_reason,
    rows_that_decide,
    tensor_core_reason,
)
from quire.kernels.expressions.cxx import has_distance_bias, has_pattern, has_row_scale, mask_blocks, takes_registers
from quire.kernels.expressions.tree import Expression
from quire.kernels.features import (
    ANY_PAGE_SIZE,
    ATTENTION_OPERANDS,
    SCALED_MLA_OPERANDS,
    MaskMode,
    Operand,
    PosEncodingMode,
    TensorCopy,
    View,
)
from quire.kernels.operation import CTAS_PER_ROW_TILE, BlockMaskParams, OperationKey
from quire.kernels.params import (
    AttentionFa3Fp8Params,
    AttentionFa3Params,
    AttentionFa3PrefixParams,
    AttentionMlaFa3Params,
    ScheduleInput,
    ScheduleOutput,
)
from quire.kernels.portable import first_tile_that_holds, mla_reason

_TREE = "a tree mask is for a few rows over long keys, which its tiles of 128 rows and more waste"

_ATOM = 64  #: columns of a swizzled row of 128 bytes

#: Keys and values that CTAs read at the same time, of an H200's 50 MB of L2. 17 MB (2 of 8 heads of 2 x 8192 keys, 128
#: dims) is faster than the keys of 1, 4 or all heads.
_L2_BYTES = 17 << 20

#: Query heads of a KV head whose biases fit into shared memory, see tile/hopper/distance_bias.cuh.
_MOST_BIASED_HEADS = 32


def _reject_fa3(problem: AttentionProblem) -> str | None:
    if problem.mask is MaskMode.TREE:
        return _TREE
    if problem.pos_encoding is PosEncodingMode.ROPE_LLAMA:
        return (
            "keys go from memory to the tensor cores as they are: rotate them before the call, or when they are stored"
        )
    if problem.prefix and (_page_size_fa3(problem) == ANY_PAGE_SIZE or problem.kv.bits == 8):
        return "beside shared keys in tensors of their own it takes 16-bit keys, in pages of a multiple of 8 or ragged"
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim % 16 and not dim % 8:
            return f"{name}={dim}: its matrix instruction takes multiples of 16"
    if problem.group_size > _MOST_BIASED_HEADS and _has_distance_bias(problem):
        return f"biases of {problem.group_size} query heads of a KV head do not fit into shared memory"
    return tensor_core_reason(problem)


def _tiles_fa3(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """For cascades only the low tile, with which two warpgroups take rows of requests in turn."""
    return _all_tiles(problem)[:1] if problem.cascade else _all_tiles(problem)


def _all_tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """The tiles that use most of the registers and shared memory without spills; timings are in benchmarks/results."""
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    widest, custom = max(qk, vo), problem.mask is MaskMode.CUSTOM
    more = problem.window or problem.soft_cap or problem.pos_encoding or problem.variant
    expression = problem.variant.expression if problem.variant else Expression("", None, None, ())
    has_score = expression.score is not None
    if widest <= 64:  # three warpgroups leave no registers for anything else
        return (TileShape(128, 128),) if custom or more else (TileShape(128, 128), TileShape(192, 112))
    if widest <= 128 and problem.soft_cap and problem.pos_encoding:
        return (TileShape(128, 128),)
    if widest <= 128 and problem.kv.bits == 8 and more:  # conversion needs registers, too
        return (TileShape(128, 128),)
    has_scale = has_row_scale(expression) and problem.kv.bits == 16
    has_pattern_here = has_pattern(expression) or has_scale or _has_distance_bias(problem)
    if widest <= 192 and has_score and not has_pattern_here:
        return (TileShape(128, 64 if takes_registers(expression) else 128 if widest <= 128 else 96),)
    if widest <= 128:  # 192 rows: a third less L2 traffic; with 64 keys four stages fit
        return (TileShape(128, 64 if mask_blocks(expression)[1] % 128 else 128), TileShape(192, 64))
    if widest <= 192:
        return (TileShape(128, 128 if vo <= 128 else 96 if problem.kv.bits == 8 else 112),)
    if problem.pos_encoding or has_score or problem.kv.bits == 8:
        return (TileShape(128, 48),)
    return (TileShape(128, 64 if custom or problem.soft_cap else 80),)


def _has_distance_bias(problem: AttentionProblem) -> bool:
    """Whether a loading warp computes the bias that the score adds."""
    is_small = max(problem.head_dim_qk, problem.head_dim_vo) <= 128 and problem.kv.bits == 16
    return is_small and problem.variant is not None and has_distance_bias(problem.variant.expression)


def _choose_rows_fa3(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """Low tiles for chunks, whose last tiles then waste fewer rows; for long prompts high ones that cut no block of a
    mask made of blocks. Where requests must not influence each other, neither rows nor the page size may decide, as
    both tiles have different keys, and so other sums: low ones, in which requests of few rows cost a fifth less, unless
    high ones are far faster: over keys that are widened again for each row tile, and with small heads.
    """
    if problem.fixed_split_size and not problem.uniform:
        is_small = max(problem.head_dim_qk, problem.head_dim_vo) <= 64
        is_high = is_small != (problem.kv.bits == 8)
        fitting = [tile.rows for tile in shapes if max(0, problem.fixed_split_size) % tile.kv == 0] or [shapes[0].rows]
        return fitting[-1 if is_high else 0]
    if problem.rows <= 2048:
        return shapes[0].rows
    block = mask_blocks(problem.variant.expression)[0] * problem.group_size if problem.variant else 0
    return next((tile.rows for tile in reversed(shapes) if block % tile.rows == 0), shapes[0].rows)


def _has_boxes(bits: int, head_dim_qk: int, head_dim_vo: int) -> bool:
    """Whether TMA copies keys and values. For 8-bit ones, a row must be one row of a swizzle atom."""
    return bits == 16 or head_dim_qk == head_dim_vo == 2 * _ATOM


def _page_size_fa3(problem: AttentionProblem) -> int:
    """Pages of a multiple of 8 tokens are copied as TMA boxes, whose size is compiled in. Other pages, and 8-bit rows
    that TMA cannot copy, are gathered row by row.
    """
    has_boxes = _has_boxes(problem.kv.bits, problem.head_dim_qk, problem.head_dim_vo)
    return problem.page_size if problem.page_size % 8 == 0 and (has_boxes or not problem.paged) else ANY_PAGE_SIZE


def _max_bytes_fa3(key: AttentionKey, operand: str) -> int:
    """Addresses of gathered rows, and of results, are 32-bit offsets in units of 16 bytes."""
    has_boxes = key.page_size != ANY_PAGE_SIZE and _has_boxes(key.kv.bits, key.head_dim_qk, key.head_dim_vo)
    gathered = operand in ("k", "v") and not has_boxes
    return 1 << 36 if operand == "o" or gathered else 0


def query_copies(tile: TileShape, views: Mapping[str, View], atom: int) -> list[TensorCopy]:
    """The tensor map of queries, by which all heads of a group are copied at once; none if a group divides no tile."""
    (nnz_qo, num_qo_heads, head_dim), (token, head, _) = views["q"].sizes, views["q"].strides
    num_kv_heads = views["k"].sizes[2]
    group = num_qo_heads // num_kv_heads
    if tile.rows % group or not nnz_qo:
        return []
    dims, box = (head_dim, group, nnz_qo, num_kv_heads), (atom, group, tile.rows // group, 1)
    return [TensorCopy("tensor_q", "q", dims, (head, token, group * head), box)]


def kv_copies(key: AttentionKey, name: str, view: View, atom: int, rows: int) -> list[TensorCopy]:
    """The tensor map of keys or values, ragged or in pages, in boxes of `rows` tokens; none if they are gathered."""
    (pages, tokens, heads, head_dim), (page, token, head, _) = view.sizes, view.strides
    if not key.paged and tokens:
        dims, box = (head_dim, tokens, heads, 1), (atom, rows, 1, 1)
        return [TensorCopy(f"tensor_{name}", name, dims, (token, head, 128 // key.kv.bits), box)]
    if key.page_size > 0 and pages:
        dims, box = (head_dim, tokens, heads, pages), (atom, math.gcd(tokens, rows), 1, 1)
        return [TensorCopy(f"tensor_{name}", name, dims, (token, head, page), box)]
    return []


def _copies_fa3(key: AttentionKey, tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    """The tensor maps of core/params.h."""
    copies = query_copies(tile, views, _ATOM)
    atom, rows = (_ATOM, tile.kv) if key.kv.bits == 16 else (2 * _ATOM, tile.kv // 2)  # 8-bit: a warp's rows
    for name in ("k", "v") if _has_boxes(key.kv.bits, key.head_dim_qk, key.head_dim_vo) else ():
        copies += kv_copies(key, name, views[name], atom, rows)
    for name in ("k_prefix", "v_prefix") if key.prefix else ():
        (tokens, heads, head_dim), (token, head, _) = views[name].sizes, views[name].strides
        if tokens:
            dims, box = (head_dim, tokens, heads, 1), (_ATOM, tile.kv, 1, 1)
            copies.append(TensorCopy(f"tensor_{name}", name, dims, (token, head, 8), box))
    return tuple(copies)


def _schedule_input(key: AttentionKey) -> Mapping[str, int]:
    """CTAs may take row tiles from a tile counter, a few KV heads at a time, so that keys and values stay in L2."""
    token_bits = (key.head_dim_qk + key.head_dim_vo) * key.kv.bits
    return {"l2_tokens": max(1, 8 * _L2_BYTES // token_bits), "arrives_late": 1}


def _operation(key: AttentionKey) -> OperationKey | None:
    """For custom masks, plan() computes the block mask."""
    return OperationKey("block_mask", key.target) if key.mask is MaskMode.CUSTOM else None


def _fill(
    params: AttentionFa3Params, given: ScheduleInput, s: ScheduleOutput, at: int, block_mask: int
) -> tuple[BlockMaskParams | None, int]:
    """With CUDA graphs and lengths on the device, each partition has the number of KV heads per L2 group."""
    base = params.base
    params.tile_counter = at + s.tile_counter_offset
    params.heads_per_l2_group = 0 if given.tile_capacity else s.heads_per_l2_group
    if not block_mask:
        return None, 0
    params.block_mask = block_mask
    mask = BlockMaskParams(
        mask=base.mask, mask_indptr=base.mask_indptr, tiles=base.tiles, block_mask=block_mask, num_tiles=s.num_tiles,
        tile_rows=given.tile_rows, tile_kv=given.tile_kv, group_size=given.group_size, window_left=given.window_left,
    )  # fmt: skip
    return mask, CTAS_PER_ROW_TILE * s.num_tiles


FA3 = AttentionKernel(
    "attention_fa3",
    target="sm90a",
    reject=_reject_fa3,
    tiles=_tiles_fa3,
    choose_rows=_choose_rows_fa3,
    page_size=_page_size_fa3,
    params=AttentionFa3Params,
    copies=_copies_fa3,
    max_bytes=_max_bytes_fa3,
    persistent=True,
    has_expression_blocks=True,
    has_cascades=True,
    prefix_params=AttentionFa3PrefixParams,
    schedule_input=_schedule_input,
    #: one byte of block mask: whether the unit's keys are hidden, visible in part or visible in full
    unit_bytes=lambda key: int(key.mask is MaskMode.CUSTOM),
    operation=_operation,
    fill=_fill,
    notes_times=True,
    is_slower_over_8_bits=True,
)


# --- attention_fa3_fp8: queries, keys and values of e4m3, multiplied as they are -------------------------------------


_FP8_ATOM = 2 * _ATOM

_Q_SCALES = Operand("q_scales", ("num_qo_heads",), "fp32")
_OPERANDS = tuple(
    operand._replace(scales=_Q_SCALES) if operand.name == "q" else operand for operand in ATTENTION_OPERANDS
)


def _reject_fp8(problem: AttentionProblem) -> str | None:
    if (problem.q.slug, problem.kv.slug) != ("e4m3", "e4m3"):
        return f'q dtype {problem.q}, kv dtype {problem.kv}: it takes e4m3 alone, if backend="quire:fp8" names it'
    if problem.o.slug not in ("fp16", "bf16"):
        return f"o dtype {problem.o} is not fp16 or bf16"
    if problem.mask is MaskMode.TREE:
        return _TREE
    if problem.pos_encoding is not PosEncodingMode.NONE or problem.variant is not None:
        return "it has no position encodings and no custom variants"
    if problem.fixed_split_size and _page_size_fp8(problem) == ANY_PAGE_SIZE:
        return (
            f"page_size={problem.page_size}: its KV tile differs; with fixed splits it takes pages of a multiple of 8"
        )
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim % 32:
            return f"{name}={dim}: its matrix instruction takes multiples of 32"
    return head_dim_reason(problem)


def _tiles_fp8(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """The tiles that use most of the registers and shared memory without spills; three warpgroups share a transpose."""
    widest, more = max(problem.head_dim_qk, problem.head_dim_vo), problem.soft_cap
    loads_more = problem.mask is MaskMode.CUSTOM or _page_size_fp8(problem) == ANY_PAGE_SIZE
    if widest <= 64:
        return (TileShape(128, 128), TileShape(192, 128 if more or loads_more else 160 if problem.paged else 192))
    if widest <= 128:
        low = TileShape(128, 96 if loads_more else 128)
        return (low,) if more or loads_more else (low, TileShape(192, 128))
    if widest <= 192:
        return (TileShape(128, 64 if loads_more else 96),)
    return (TileShape(128, 64 if loads_more else 96 if more else 128),)


def _choose_rows_fp8(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """Low tiles for chunks, whose last tiles then waste fewer rows, and if requests must not influence each other."""
    may_depend = problem.uniform or not problem.fixed_split_size
    return shapes[-1].rows if may_depend and problem.rows > 2048 else shapes[0].rows


def _page_size_fp8(problem: AttentionProblem) -> int:
    """Pages of a multiple of 8 tokens are copied as TMA boxes, whose size is compiled in. Others are gathered."""
    return problem.page_size if problem.page_size % 8 == 0 else ANY_PAGE_SIZE


def _max_bytes_fp8(key: AttentionKey, operand: str) -> int:
    """Addresses of gathered rows, and of results, are 32-bit offsets in units of 16 bytes."""
    gathered = operand in ("k", "v") and key.page_size == ANY_PAGE_SIZE
    return 1 << 36 if operand == "o" or gathered else 0


def _copies_fp8(key: AttentionKey, tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    """The tensor maps of core/params.h. Columns of a box beyond the head are filled with zeros."""
    copies = query_copies(tile, views, _FP8_ATOM)
    for name, rows in (("k", tile.kv), ("v", tile.kv // 2)):  # of v: a warp's rows
        copies += kv_copies(key, name, views[name], _FP8_ATOM, rows)
    return tuple(copies)


FA3_FP8 = AttentionKernel(
    "attention_fa3_fp8",
    target="sm90a",
    reject=_reject_fp8,
    is_opt_in=True,
    tiles=_tiles_fp8,
    choose_rows=_choose_rows_fp8,
    page_size=_page_size_fp8,
    operands=_OPERANDS,
    params=AttentionFa3Fp8Params,
    copies=_copies_fp8,
    max_bytes=_max_bytes_fp8,
    persistent=True,
    schedule_input=FA3.schedule_input,
    unit_bytes=FA3.unit_bytes,
    operation=FA3.operation,
    fill=FA3.fill,
    notes_times=True,
)


# --- latents: attention_mla_fa3, and attention_mla_decode for few rows -----------------------------------------------

_LATENT_ROWS = 64  #: of a CTA
_ATOM_BITS = 1024  #: of a swizzled row
_LATENT_PARTS = 4  #: of the latents of a KV tile; if pages hold whole KV tiles, each part is a TMA box


def _yields_mla(problem: AttentionProblem) -> str | None:
    """Row tiles have 64 rows, so few rows pay for the products of all, and products do not hide the time of scaling."""
    if problem.tile_scales and (rows := rows_that_decide(problem)) <= 16:
        return f"rows={rows}: fa2 is as fast with scales of latents"
    return None


def latent_copies(
    key: AttentionKey, views: Mapping[str, View], box_of: Callable[[int, int], tuple[int, int]]
) -> tuple[TensorCopy, ...]:
    """The tensor maps of core/params.h. box_of(tokens of a page, atoms of a row): tokens and atoms of a box.
    TMA fills columns of an atom beyond the operand with zeros.
    """
    copies: list[TensorCopy] = []
    for field, name, type_name in (("tensor_k", "kpe_cache", "kpe"), ("tensor_v", "ckv_cache", "kv")):
        (pages, tokens, _, dims), (page, token, _, _) = views[name].sizes, views[name].strides
        if pages:
            columns = _ATOM_BITS // key.type_of(type_name).bits
            atoms, own = max(1, dims // columns), min(dims, columns)
            box = (columns, *box_of(tokens, atoms), 1)
            sizes, steps = (own, tokens, atoms, pages), (token, own, page)
            copies.append(TensorCopy(field, name, sizes, steps, box, promotion=128))  # faster than 256
    return tuple(copies)


def _copies_mla_fa3(key: AttentionKey, tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    def box_of(tokens: int, atoms: int) -> tuple[int, int]:
        rows = math.gcd(tokens, tile.kv)
        return rows, max(1, atoms // _LATENT_PARTS) if rows == tile.kv else 1

    return () if key.page_size == ANY_PAGE_SIZE else latent_copies(key, views, box_of)


def _page_size_mla(problem: AttentionProblem) -> int:
    """Pages of a multiple of 16 tokens are copied as TMA boxes, whose size is compiled in. Tokens of other pages, and
    8-bit latents, are gathered.
    """
    return ANY_PAGE_SIZE if problem.page_size % 16 or problem.kv.bits == 8 else problem.page_size


def _choose_rows_mla(problem: AttentionProblem, _: tuple[TileShape, ...]) -> int:
    """Two CTAs that read the same keys at the same time read them from memory once, if rows fill both."""
    return _LATENT_ROWS if rows_that_decide(problem) % (2 * _LATENT_ROWS) else 2 * _LATENT_ROWS


def _fill_mla(
    params: AttentionMlaFa3Params, given: ScheduleInput, s: ScheduleOutput, _at: int, _unit_memory: int
) -> tuple[None, int]:
    """Whole row tiles, if there are enough, are assigned to CTAs in turn. With a tile counter, the scheduler would not
    divide row tiles of up to `start_cost` units, even if there are few.
    """
    params.tile_counter, params.num_pages = None, 2**31 - 1
    params.heads_per_l2_group = 0 if given.tile_capacity else s.heads_per_l2_group
    return None, 0


MLA_FA3 = AttentionKernel(
    "attention_mla_fa3",
    target="sm90a",
    reject=lambda problem: number_types_reason(problem) or mla_reason(problem),
    yields=_yields_mla,
    tiles=lambda _: (TileShape(_LATENT_ROWS, 64), TileShape(2 * _LATENT_ROWS, 64)),
    choose_rows=_choose_rows_mla,
    ctas_per_tile=lambda key: key.tile_rows // _LATENT_ROWS,
    page_size=_page_size_mla,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaFa3Params,
    copies=_copies_mla_fa3,
    persistent=True,
    has_gaps=True,
    pdl=True,
    schedule_input=lambda _: {"start_cost": 88},
    own_split=MLA_SPLIT,
    fill=_fill_mla,
)


_LATENTS = 64  #: of a KV tile, all of them in one page
_DECODE_TILES = TileShape(16, _LATENTS), TileShape(32, _LATENTS)


def _reject_mla_decode(problem: AttentionProblem) -> str | None:
    if problem.fixed_split_size and not problem.uniform:
        return "rows differ between requests, and with fixed or no splits they may not decide the kernel"
    if reason := number_types_reason(problem) or mla_reason(problem):
        return reason
    if problem.page_size % _LATENTS and problem.kv.bits == 16:
        return f"page_size={problem.page_size}: expected a multiple of {_LATENTS}"
    if problem.max_logits and problem.kv.bits == 8:
        return "with 8-bit latents it does not return the maximum of logits"
    most = _DECODE_TILES[-1].rows
    return f"{problem.rows} rows (qo_len * heads) are more than {most}" if problem.rows > most else None


def _copies_mla_decode(key: AttentionKey, _tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    return () if key.page_size == ANY_PAGE_SIZE else latent_copies(key, views, lambda _tokens, _atoms: (_LATENTS, 1))


MLA_DECODE = AttentionKernel(
    "attention_mla_decode",
    target="sm90a",
    reject=_reject_mla_decode,
    tiles=lambda _: _DECODE_TILES,
    choose_rows=first_tile_that_holds,
    page_size=lambda problem: ANY_PAGE_SIZE if problem.page_size % _LATENTS else problem.page_size,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaFa3Params,
    copies=_copies_mla_decode,
    persistent=True,
    has_gaps=True,
    pdl=True,
    schedule_input=lambda _: {"start_cost": 24},
    own_split=0,
    fill=_fill_mla,
)
