"""Kernels for latents (MLA): attention_mla_fa3 and attention_mla_decode on Hopper, attention_mla_fa2 and _cpu."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from quire.kernels.attention import (
    AttentionKernel,
    AttentionKey,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    first_tile_without_neighbours,
    mla_reason,
    mla_tensor_core_reason,
    rows_that_decide,
)
from quire.kernels.features import ANY_PAGE_SIZE, SCALED_MLA_OPERANDS, TensorCopy, View
from quire.kernels.params import AttentionMlaFa3Params, AttentionMlaParams, ScheduleInput, ScheduleOutput

_ROWS = 64  #: of a CTA
_OWN_SPLIT = 4096  #: tokens: there is one KV head, so that few row tiles fill no GPU
_ATOM_BITS = 1024  #: of a swizzled row
_PARTS = 4  #: of the latents of a KV tile; if pages hold whole KV tiles, each part is a TMA box


def _reject_fa3(problem: AttentionProblem) -> str | None:
    if problem.target != "sm90a":
        return f"target {problem.target} is not sm90a"
    return mla_tensor_core_reason(problem, takes_8_bit_kv=True)


def _yields(problem: AttentionProblem) -> str | None:
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


def _copies_fa3(key: AttentionKey, tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    def box_of(tokens: int, atoms: int) -> tuple[int, int]:
        rows = math.gcd(tokens, tile.kv)
        return rows, max(1, atoms // _PARTS) if rows == tile.kv else 1

    return () if key.page_size == ANY_PAGE_SIZE else latent_copies(key, views, box_of)


def _page_size_fa3(problem: AttentionProblem) -> int:
    """Pages of a multiple of 16 tokens are copied as TMA boxes, whose size is compiled in. Tokens of other pages, and
    8-bit latents, are gathered.
    """
    return ANY_PAGE_SIZE if problem.page_size % 16 or problem.kv.bits == 8 else problem.page_size


def _choose_rows_fa3(problem: AttentionProblem, _: tuple[TileShape, ...]) -> int:
    """Two CTAs that read the same keys at the same time read them from memory once, if rows fill both."""
    return _ROWS if rows_that_decide(problem) % (2 * _ROWS) else 2 * _ROWS


def fill(
    params: AttentionMlaFa3Params, given: ScheduleInput, s: ScheduleOutput, _at: int, _unit_memory: int
) -> tuple[None, int]:
    """Whole row tiles, if there are enough, are assigned to CTAs in turn. With a tile counter, the scheduler would not
    divide row tiles of up to `start_cost` units, even if there are few.
    """
    params.tile_counter, params.num_pages = None, 2**31 - 1
    params.heads_per_l2_group = 0 if given.tile_capacity else s.heads_per_l2_group
    return None, 0


MLA_FA3 = AttentionKernel(
    name="attention_mla_fa3",
    backend="fa3",
    header="quire/kernels/attention_mla_fa3.cuh",
    cxx="AttentionMlaFa3",
    on_cuda=True,
    reject=_reject_fa3,
    yields=_yields,
    tiles=lambda _: (TileShape(_ROWS, 64), TileShape(2 * _ROWS, 64)),
    choose_rows=_choose_rows_fa3,
    ctas_per_tile=lambda key: key.tile_rows // _ROWS,
    page_size=_page_size_fa3,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaFa3Params,
    copies=_copies_fa3,
    persistent=True,
    has_gaps=True,
    pdl=True,
    schedule_input=lambda _: {"start_cost": 88},
    own_split=_OWN_SPLIT,
    fill=fill,
)


_KEYS = 64  #: of a KV tile, all of them in one page


def _reject_decode(problem: AttentionProblem) -> str | None:
    if problem.target != "sm90a":
        return f"target {problem.target} is not sm90a"
    if problem.fixed_split_size and not problem.uniform:
        return "rows differ between requests, and with fixed or no splits they may not decide the kernel"
    if reason := mla_tensor_core_reason(problem, takes_8_bit_kv=True):
        return reason
    if problem.page_size % _KEYS and problem.kv.bits == 16:
        return f"page_size={problem.page_size}: expected a multiple of {_KEYS}"
    if problem.max_logits and problem.kv.bits == 8:
        return "with 8-bit latents it does not return the maximum of logits"
    most = _tiles_decode(problem)[-1].rows
    return f"{problem.rows} rows (qo_len * heads) are more than {most}" if problem.rows > most else None


def _tiles_decode(_: AttentionProblem) -> tuple[TileShape, ...]:
    return TileShape(16, _KEYS), TileShape(32, _KEYS)


def _copies_decode(key: AttentionKey, _tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    return () if key.page_size == ANY_PAGE_SIZE else latent_copies(key, views, lambda _tokens, _atoms: (_KEYS, 1))


MLA_DECODE = AttentionKernel(
    name="attention_mla_decode",
    backend="decode",
    header="quire/kernels/attention_mla_decode.cuh",
    cxx="AttentionMlaDecode",
    on_cuda=True,
    reject=_reject_decode,
    tiles=_tiles_decode,
    choose_rows=first_tile_that_holds,
    page_size=lambda problem: ANY_PAGE_SIZE if problem.page_size % _KEYS else problem.page_size,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaFa3Params,
    copies=_copies_decode,
    persistent=True,
    has_gaps=True,
    pdl=True,
    schedule_input=lambda _: {"start_cost": 24},
    own_split=0,
    fill=fill,
)


_KEYS_FA2 = 64  #: of a KV tile if a CTA may have 227 KB of shared memory; else half as many, so that two tiles fit


def _tiles_fa2(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16, 32 or 64 heads of a query; 64 rows of queries leave no space for keys in 99 KB of shared memory."""
    target = problem.target.rstrip("af")
    has_large_smem = target.startswith(("sm90", "sm100", "sm103"))
    is_small = not has_large_smem and target not in ("sm80", "sm87")
    return tuple(
        TileShape(rows, _KEYS_FA2 if has_large_smem else _KEYS_FA2 // 2)
        for rows in (16, 32, 64)[: 2 if is_small else 3]
    )


def _choose_rows_fa2(problem: AttentionProblem, shapes: tuple[TileShape, ...]) -> int:
    rows = rows_that_decide(problem)
    return next((shape.rows for shape in shapes if rows <= shape.rows), shapes[-1].rows)


MLA_FA2 = AttentionKernel(
    name="attention_mla_fa2",
    backend="fa2",
    header="quire/kernels/attention_mla_fa2.cuh",
    cxx="AttentionMlaFa2",
    on_cuda=True,
    reject=partial(mla_tensor_core_reason, takes_8_bit_kv=True, takes_variants=True),
    tiles=_tiles_fa2,
    choose_rows=_choose_rows_fa2,
    own_split=_OWN_SPLIT,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaParams,
    schedule_input=lambda _: {"start_cost": 20},
)


def _reject_cpu(problem: AttentionProblem) -> str | None:
    for name, dtype in (("q", problem.q), ("o", problem.o)):
        if dtype.bits < 16:
            return f"{name} dtype {dtype} is not fp32, fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bits != 8:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q}; only 8-bit keys and values may"
    return mla_reason(problem, takes_variants=True)


def _tiles_cpu(_: AttentionProblem) -> tuple[TileShape, ...]:
    """16 heads of a query, or 128."""
    return TileShape(16, 64), TileShape(128, 64)


MLA_CPU = AttentionKernel(
    name="attention_mla_cpu",
    backend="cpu",
    header="quire/kernels/attention_mla_cpu.h",
    cxx="AttentionMlaCpu",
    on_cuda=False,
    reject=_reject_cpu,
    tiles=_tiles_cpu,
    choose_rows=first_tile_without_neighbours,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaParams,
)
