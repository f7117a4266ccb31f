"""attention_fa3: warp-specialised wgmma and the bulk copy engine, sm_90a."""

from __future__ import annotations

import math

from quire.kernels.attention import (
    AttentionKernel,
    AttentionKey,
    AttentionProblem,
    Geometry,
    TensorCopy,
    TileShape,
    head_dim_reason,
)
from quire.kernels.params import AttentionFa3Params
from quire.types import MaskMode

__all__ = ["KERNEL"]

_PANEL = 64  #: columns of a 128-byte swizzled row


def _reject(problem: AttentionProblem) -> str | None:
    if problem.target != "sm90a":
        return f"target {problem.target} is not sm90a"
    if problem.q.slug not in ("fp16", "bf16"):
        return f"q dtype {problem.q} is not fp16 or bf16"
    if problem.kv != problem.q:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q}"
    if problem.o != problem.q:
        return f"o dtype {problem.o} differs from q dtype {problem.q}"
    if problem.mask is MaskMode.TREE:
        return "a tree mask is for a few rows over long keys, which its tiles of 128 rows and more waste"
    return head_dim_reason(problem)


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """What fills registers and shared memory best and does not spill (H200, 2026-11-21), after what chunks take.

    192 x 64 leaves room for four stages of keys and is ahead of 192 x 80 with three (causal 1412 us, 1442; 16 x 1024
    255 us, 267).
    """
    qk, vo = problem.head_dim_qk, problem.head_dim_vo
    widest, custom = max(qk, vo), problem.mask is MaskMode.CUSTOM
    plain = not (custom or problem.window or problem.soft_cap)  # what else a mask does takes registers
    if widest <= 64:  # three warpgroups; a gather needs registers of its own
        tall = plain and not _gathers(problem)
        return (TileShape(128, 128), TileShape(192, 112)) if tall else (TileShape(128, 128),)
    if widest <= 128:  # 192 rows: 764 TFLOP/s causal with 80 keys, 670 with 128 x 128; a third less L2 traffic
        return (TileShape(128, 128), TileShape(192, 64))
    if widest <= 192:  # 192/128: 626 TFLOP/s, 588 with 192 x 80
        return (TileShape(128, 128 if vo <= 128 else 112),)
    return (TileShape(128, 64 if custom or (problem.window and problem.soft_cap) else 80),)


def _choose_rows(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    """Low tiles for chunks, whose ends waste less of them: 64 x 128 tokens 58.5 us, 59.1 with 192 rows; 512 tokens on
    8192 700 TFLOP/s, 660 (group 4). Always low ones where neighbours must not have a say, or splits are fixed.
    """
    return shapes[0].rows if problem.fixed_split_size or problem.rows <= 2048 else shapes[-1].rows


def _gathers(problem: AttentionProblem) -> bool:
    """Pages that are not whole boxes are fetched row by row."""
    return problem.paged and _page_size(problem) == 0


def _page_size(problem: AttentionProblem) -> int:
    """Pages of a multiple of 8 tokens are copied as boxes, whose size is compiled in; others are gathered."""
    return problem.page_size if problem.page_size % 8 == 0 else 0


def _max_bytes(key: AttentionKey, tensor: str) -> int:
    """Rows that are gathered, and results, are found by 32-bit numbers of 16 bytes."""
    gathers = key.paged and key.page_size == 0
    return 1 << 36 if tensor == "out" or gathers else 0


def _copies(key: AttentionKey, tile: TileShape, g: Geometry) -> tuple[TensorCopy, ...]:
    """The tensor maps of core/params_fa3.h."""
    copies = []
    if tile.rows % g.group_size == 0 and g.nnz_qo:
        token, head = g.q_strides
        dims = (key.head_dim_qk, g.group_size, g.nnz_qo, g.num_kv_heads)
        box = (_PANEL, g.group_size, tile.rows // g.group_size, 1)
        copies.append(TensorCopy("tensor_q", "q", dims, (head, token, g.group_size * head), box))
    for name, head_dim, strides in (("k", key.head_dim_qk, g.k_strides), ("v", key.head_dim_vo, g.v_strides)):
        page, token, head = strides
        if not key.paged and g.nnz_kv:
            dims, box = (head_dim, g.nnz_kv, g.num_kv_heads, 1), (_PANEL, tile.kv, 1, 1)
            copies.append(TensorCopy(f"tensor_{name}", name, dims, (token, head, 8), box))
        elif key.page_size and g.num_pages:
            dims = (head_dim, key.page_size, g.num_kv_heads, g.num_pages)
            box = (_PANEL, math.gcd(key.page_size, tile.kv), 1, 1)
            copies.append(TensorCopy(f"tensor_{name}", name, dims, (token, head, page), box))
    return tuple(copies)


KERNEL = AttentionKernel(
    name="attention_fa3",
    backend="fa3",
    header="quire/kernels/attention_fa3.cuh",
    cxx="AttentionFa3",
    reject=_reject,
    tiles=_tiles,
    choose_rows=_choose_rows,
    page_size=_page_size,
    params=AttentionFa3Params,
    copies=_copies,
    max_bytes=_max_bytes,
    persistent=True,
    reads_block_mask=True,
)
