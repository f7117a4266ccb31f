"""attention_mla_fa2: latent attention (MLA), mma.sync and cp.async, any GPU from sm_80 on."""

from __future__ import annotations

from functools import partial

from quire.kernels.attention import (
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_that_holds,
    mla_tensor_core_reason,
)
from quire.kernels.operands import SCALED_MLA_OPERANDS
from quire.kernels.params import AttentionMlaParams

_KEYS = 64  #: of a KV tile if a CTA may have 227 KB of shared memory; else half as many, so that two tiles fit


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16, 32 or 64 heads of a query; 64 rows of queries leave no space for keys in 99 KB of shared memory."""
    target = problem.target.rstrip("af")
    has_large_smem = target.startswith(("sm90", "sm100", "sm103"))
    is_small = not has_large_smem and target not in ("sm80", "sm87")
    return tuple(
        TileShape(rows, _KEYS if has_large_smem else _KEYS // 2) for rows in (16, 32, 64)[: 2 if is_small else 3]
    )


KERNEL = AttentionKernel(
    name="attention_mla_fa2",
    backend="fa2",
    header="quire/kernels/attention_mla_fa2.cuh",
    cxx="AttentionMlaFa2",
    on_cuda=True,
    reject=partial(mla_tensor_core_reason, takes_8_bit_kv=True),
    tiles=_tiles,
    choose_rows=first_tile_that_holds,
    operands=SCALED_MLA_OPERANDS,
    params=AttentionMlaParams,
    schedule_input=lambda _: {"start_cost": 20},
)
