"""attention_cpu: vectorised C++ on host threads, for every machine without a GPU."""

from __future__ import annotations

from quire.jit import without_matrix_unit
from quire.kernels.attention import (
    AttentionKernel,
    AttentionProblem,
    TileShape,
    first_tile_without_neighbours,
    head_dim_reason,
)
from quire.kernels.params import AttentionPrefixParams
from quire.kernels.types import PosEncodingMode


def _reject(problem: AttentionProblem) -> str | None:
    for name, dtype in (("q", problem.q), ("o", problem.o)):
        if dtype.bits < 16:
            return f"{name} dtype {dtype} is not fp32, fp16 or bf16"
    if problem.kv != problem.q and problem.kv.bits != 8:
        return f"kv dtype {problem.kv} differs from q dtype {problem.q}; only 8-bit keys and values may"
    return head_dim_reason(problem, most=512)


def _multiplies_tiles(problem: AttentionProblem, rows: int = 32) -> bool:
    """Whether row tiles of `rows` rows are multiplied on the matrix unit: bf16 queries, more rows than in decode, and
    no RoPE in the kernel, because rotated floats would be rounded again.
    """
    if without_matrix_unit(problem.target) == problem.target:
        return False
    return problem.q.slug == "bf16" and rows > 16 and problem.pos_encoding is not PosEncodingMode.ROPE_LLAMA


def _tiles(problem: AttentionProblem) -> tuple[TileShape, ...]:
    """16 rows hold a request of a decode batch. 192 rows share each copied KV tile among more rows than 96 do, as long
    as their scratch memory (540 KB at head_dim 256) fits a small L2 cache. The matrix unit loads and stores the output
    once per KV tile, so tiles of 128 keys halve this cost.
    """
    widest = max(problem.head_dim_qk, problem.head_dim_vo)
    if _multiplies_tiles(problem):
        return TileShape(16, 64), TileShape(256 if widest <= 128 else 128 if widest <= 256 else 64, 128)
    return TileShape(16, 64), TileShape(192 if widest <= 128 else 96 if widest <= 256 else 48, 64)


CPU = AttentionKernel(
    name="attention_cpu",
    backend="cpu",
    header="quire/kernels/attention_cpu.h",
    cxx="AttentionCpu",
    on_cuda=False,
    reject=_reject,
    tiles=_tiles,
    choose_rows=first_tile_without_neighbours,
    uses_matrix_unit=_multiplies_tiles,
    has_expression_blocks=True,
    has_cascades=True,
    prefix_params=AttentionPrefixParams,
    notes_times=True,
)
