"""attention_mla_decode: few rows of latent attention (MLA), limited by memory; wgmma with heads as columns, sm_90a."""

from __future__ import annotations

from collections.abc import Mapping

from quire.kernels.attention import (
    AttentionKernel,
    AttentionKey,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    mla_tensor_core_reason,
)
from quire.kernels.attention_mla_fa3 import fill, latent_copies
from quire.kernels.features import ANY_PAGE_SIZE
from quire.kernels.operands import SCALED_MLA_OPERANDS, TensorCopy, View
from quire.kernels.params import AttentionMlaFa3Params

_KEYS = 64  #: of a KV tile, all of them in one page


def _reject(problem: AttentionProblem) -> str | None:
    if problem.target != "sm90a":
        return f"target {problem.target} is not sm90a"
    if problem.fixed_split_size and not problem.uniform:
        return "rows differ between requests, and with fixed or no splits they may not decide the kernel"
    if reason := mla_tensor_core_reason(problem, takes_8_bit_kv=True):
        return reason
    if problem.page_size % _KEYS and problem.kv.bits == 16:
        return f"page_size={problem.page_size}: expected a multiple of {_KEYS}"
    most = _tiles(problem)[-1].rows
    return f"{problem.rows} rows (qo_len * heads) are more than {most}" if problem.rows > most else None


def _tiles(_: AttentionProblem) -> tuple[TileShape, ...]:
    return TileShape(16, _KEYS), TileShape(32, _KEYS)


def _copies(key: AttentionKey, _tile: TileShape, views: Mapping[str, View]) -> tuple[TensorCopy, ...]:
    return () if key.page_size == ANY_PAGE_SIZE else latent_copies(key, views, lambda _tokens, _atoms: (_KEYS, 1))


KERNEL = AttentionKernel(
    name="attention_mla_decode",
    backend="decode",
    header="quire/kernels/attention_mla_decode.cuh",
    cxx="AttentionMlaDecode",
    on_cuda=True,
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_that_holds,
    page_size=lambda problem: ANY_PAGE_SIZE if problem.page_size % _KEYS else problem.page_size,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaFa3Params,
    copies=_copies,
    persistent=True,
    has_gaps=True,
    pdl=True,
    schedule_input=lambda _: {"start_cost": 24},
    fill=fill,
)
