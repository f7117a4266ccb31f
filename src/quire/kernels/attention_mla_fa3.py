"""attention_mla_fa3: latent attention (MLA) with wgmma and TMA, sm_90a."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from quire.kernels.attention import AttentionKernel, AttentionKey, AttentionProblem, TileShape, mla_tensor_core_reason
from quire.kernels.features import ANY_PAGE_SIZE
from quire.kernels.operands import SCALED_MLA_OPERANDS, TensorCopy, View
from quire.kernels.params import AttentionMlaFa3Params, ScheduleInput, ScheduleOutput

_ROWS = 64  #: of a CTA
_ATOM_BITS = 1024  #: of a swizzled row
_PARTS = 4  #: of the latents of a KV tile; if pages hold whole KV tiles, each part is a TMA box


def _reject(problem: AttentionProblem) -> str | None:
    if problem.target != "sm90a":
        return f"target {problem.target} is not sm90a"
    return mla_tensor_core_reason(problem, takes_8_bit_kv=True)


def _yields(problem: AttentionProblem) -> str | None:
    """Row tiles have 64 rows, so few rows pay for the products of all, and products do not hide the time of scaling."""
    if problem.tile_scales and problem.rows <= 16:
        return f"rows={problem.rows}: fa2 is as fast with scales of latents"
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


def _copies(key: AttentionKey, tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    def box_of(tokens: int, atoms: int) -> tuple[int, int]:
        rows = math.gcd(tokens, tile.kv)
        return rows, max(1, atoms // _PARTS) if rows == tile.kv else 1

    return () if key.page_size == ANY_PAGE_SIZE else latent_copies(key, views, box_of)


def _page_size(problem: AttentionProblem) -> int:
    """Pages of a multiple of 16 tokens are copied as TMA boxes, whose size is compiled in. Tokens of other pages, and
    8-bit latents, are gathered.
    """
    return ANY_PAGE_SIZE if problem.page_size % 16 or problem.kv.bits == 8 else problem.page_size


def _choose_rows(problem: AttentionProblem, _: tuple[TileShape, ...]) -> int:
    """Two CTAs that read the same keys at the same time read them from memory once, if rows fill both."""
    return _ROWS if problem.rows % (2 * _ROWS) else 2 * _ROWS


def fill(
    params: AttentionMlaFa3Params, given: ScheduleInput, s: ScheduleOutput, _at: int, _unit_memory: int
) -> tuple[None, int]:
    """Whole row tiles, if there are enough, are assigned to CTAs in turn. With a tile counter, the scheduler would not
    divide row tiles of up to `start_cost` units, even if there are few.
    """
    params.tile_counter, params.num_pages = None, 2**31 - 1
    params.heads_per_l2_group = 0 if given.tile_capacity else s.heads_per_l2_group
    return None, 0


KERNEL = AttentionKernel(
    name="attention_mla_fa3",
    backend="fa3",
    header="quire/kernels/attention_mla_fa3.cuh",
    cxx="AttentionMlaFa3",
    on_cuda=True,
    reject=_reject,
    yields=_yields,
    tiles=lambda _: (TileShape(_ROWS, 64), TileShape(2 * _ROWS, 64)),
    choose_rows=_choose_rows,
    ctas_per_tile=lambda key: key.tile_rows // _ROWS,
    page_size=_page_size,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaFa3Params,
    copies=_copies,
    persistent=True,
    has_gaps=True,
    pdl=True,
    schedule_input=lambda _: {"start_cost": 88},
    fill=fill,
)
