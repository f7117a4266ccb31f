"""attention_fa3_fp8: queries, keys and values of e4m3, multiplied as they are, with wgmma and TMA, sm_90a."""

from __future__ import annotations

from collections.abc import Mapping

from quire.kernels.attention import AttentionKernel, AttentionKey, AttentionProblem, TileShape, head_dim_reason
from quire.kernels.fa3 import FA3, kv_copies, query_copies
from quire.kernels.features import ANY_PAGE_SIZE, ATTENTION_OPERANDS, Operand, TensorCopy, View
from quire.kernels.params import AttentionFa3Fp8Params
from quire.kernels.types import MaskMode, PosEncodingMode

_ATOM = 128  #: columns of a swizzled row of 128 bytes

_Q_SCALES = Operand("q_scales", ("num_qo_heads",), "fp32")
_OPERANDS = tuple(
    operand._replace(scales=_Q_SCALES) if operand.name == "q" else operand for operand in ATTENTION_OPERANDS
)


def _reject(problem: AttentionProblem) -> str | None:
    if problem.target != "sm90a":
        return f"target {problem.target} is not sm90a"
    if (problem.q.slug, problem.kv.slug) != ("e4m3", "e4m3"):
        return f'q dtype {problem.q}, kv dtype {problem.kv}: it takes e4m3 alone, if backend="quire:fp8" names it'
    if problem.o.slug not in ("fp16", "bf16"):
        return f"o dtype {problem.o} is not fp16 or bf16"
    if problem.mask is MaskMode.TREE:
        return "a tree mask is for a few rows over long keys, which its tiles of 128 rows and more waste"
    if problem.pos_encoding is not PosEncodingMode.NONE or problem.variant is not None:
        return "it has no position encodings and no custom variants"
    for name, dim in (("head_dim_qk", problem.head_dim_qk), ("head_dim_vo", problem.head_dim_vo)):
        if dim % 32:
            return f"{name}={dim}: its matrix instruction takes multiples of 32"
    return head_dim_reason(problem)


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """The tiles that use most of the registers and shared memory without spills; three warpgroups share a transpose."""
    widest, more = max(problem.head_dim_qk, problem.head_dim_vo), problem.soft_cap
    loads_more = problem.mask is MaskMode.CUSTOM or _page_size(problem) == ANY_PAGE_SIZE
    if widest <= 64:
        return (TileShape(128, 128), TileShape(192, 128 if more or loads_more else 160 if problem.paged else 192))
    if widest <= 128:
        low = TileShape(128, 96 if loads_more else 128)
        return (low,) if more or loads_more else (low, TileShape(192, 128))
    if widest <= 192:
        return (TileShape(128, 64 if loads_more else 96),)
    return (TileShape(128, 64 if loads_more else 96 if more else 128),)


def _choose_rows(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """Low tiles for chunks, whose last tiles then waste fewer rows, and if requests must not influence each other."""
    return shapes[0].rows if problem.fixed_split_size or problem.rows <= 2048 else shapes[-1].rows


def _page_size(problem: AttentionProblem) -> int:
    """Pages of a multiple of 8 tokens are copied as TMA boxes, whose size is compiled in. Others are gathered."""
    return problem.page_size if problem.page_size % 8 == 0 else ANY_PAGE_SIZE


def _max_bytes(key: AttentionKey, operand: str) -> int:
    """Addresses of gathered rows, and of results, are 32-bit offsets in units of 16 bytes."""
    gathered = operand in ("k", "v") and key.page_size == ANY_PAGE_SIZE
    return 1 << 36 if operand == "o" or gathered else 0


def _copies(key: AttentionKey, tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    """The tensor maps of core/params.h. Columns of a box beyond the head are filled with zeros."""
    copies = query_copies(tile, views, _ATOM)
    for name, rows in (("k", tile.kv), ("v", tile.kv // 2)):  # of v: a warp's rows
        copies += kv_copies(key, name, views[name], _ATOM, rows)
    return tuple(copies)


FA3_FP8 = AttentionKernel(
    name="attention_fa3_fp8",
    backend="fp8",
    header="quire/kernels/attention_fa3_fp8.cuh",
    cxx="AttentionFa3Fp8",
    on_cuda=True,
    reject=_reject,
    is_opt_in=True,
    tiles=_tiles,
    choose_rows=_choose_rows,
    page_size=_page_size,
    operands=_OPERANDS,
    params=AttentionFa3Fp8Params,
    copies=_copies,
    max_bytes=_max_bytes,
    persistent=True,
    schedule_input=FA3.schedule_input,
    unit_bytes=FA3.unit_bytes,
    operation=FA3.operation,
    fill=FA3.fill,
    notes_times=True,
)
