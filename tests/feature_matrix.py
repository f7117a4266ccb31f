"""Writes docs/matrix.md: what each kernel takes, as the kernels themselves answer. `python tests/feature_matrix.py`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire.kernels import KERNELS, AttentionKernel, AttentionProblem
from quire.kernels.attention import MLA_DIMS
from quire.kernels.expressions import tanh
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import MaskMode, PosEncodingMode, dtype_of, kv_dtype_of

PAGE = Path(__file__).parents[1] / "docs" / "matrix.md"
SOFT = Variant(score=lambda score: tanh(score))
SPARSE = Variant(mask=lambda q_idx, kv_idx: kv_idx <= q_idx)
#: Columns: heading, and the targets on which a kernel is asked.
TARGETS = {"sm80": "Ampere to Blackwell", "sm90a": "Hopper", "x86-64-v4-amx": "CPUs"}


class Row(NamedTuple):
    """A feature, and how a problem has it."""

    name: str
    changes: dict[str, Any]


def types(q: str, kv: str) -> dict[str, Any]:
    number = dtype_of(q, "q")
    result = number if number.bits > 8 else dtype_of("bf16", "o")
    return {"q": number, "kv": kv_dtype_of(kv, "kv"), "o": result}


def dims(qk: int, vo: int | None = None) -> dict[str, Any]:
    return {"head_dim_qk": qk, "head_dim_vo": vo or qk}


ROWS = (
    Row("fp16, bf16", types("bf16", "bf16")),
    Row("fp32", types("fp32", "fp32")),
    Row("8-bit keys and values (e4m3, e5m2)", types("bf16", "e4m3")),
    Row("8-bit queries as they are", types("e4m3", "e4m3")),
    Row("4-bit keys and values (NVFP4)", types("bf16", "nvfp4")),
    Row("head dims of 32 to 256, multiples of 16", dims(96)),
    Row("other multiples of 8", dims(72)),
    Row("192 and 128 (prompts of DeepSeek)", dims(192, 128)),
    Row("512", dims(512)),
    Row("pages of 16 tokens", {}),
    Row("pages of one token", {"page_size": 1}),
    Row("ragged keys", {"page_size": 0}),
    Row("causal", {}),
    Row("custom mask of bits", {"mask": MaskMode.CUSTOM}),
    Row("tree of drafts", {"mask": MaskMode.TREE, "rows": 16}),
    Row("chunks (Llama 4)", {"mask": MaskMode.CHUNKED, "window": True}),
    Row("sliding window", {"window": True}),
    Row("soft cap", {"soft_cap": True}),
    Row("ALiBi", {"pos_encoding": PosEncodingMode.ALIBI}),
    Row("RoPE inside", {"pos_encoding": PosEncodingMode.ROPE_LLAMA}),
    Row("custom score", {"variant": SOFT}),
    Row("custom mask function", {"variant": SPARSE, "mask": MaskMode.NONE}),
    Row("a cascade in one launch", {"cascade": True, "mask": MaskMode.NONE}),
    Row("many rows of a request (prompts)", {"rows": 4096}),
)
LATENT_ROWS = (
    Row("fp16, bf16", types("bf16", "bf16")),
    Row("fp32", types("fp32", "fp32")),
    Row("8-bit latents", types("bf16", "e4m3")),
    Row("8-bit latents with scales (rows of 656 bytes)", {**types("bf16", "e4m3"), "tile_scales": True}),
    Row("pages of 64 tokens", {"page_size": 64}),
    Row("pages of one token, chosen tokens", {"page_size": 1, "mask": MaskMode.NONE}),
    Row("causal", {}),
    Row("the largest logit beside the lse", {"max_logits": True}),
    Row("custom score", {"variant": SOFT}),
    Row("more than 32 rows of a request", {"rows": 128}),
)


def answer(kernel: AttentionKernel, row: Row, *, is_mla: bool) -> str:
    """Whether a kernel has a feature on any of its targets, beside what else it asks for."""
    own = types("e4m3", "e4m3") if kernel.backend == "fp8" else types("bf16", "bf16")
    sizes = dict(zip(("head_dim_qk", "head_dim_vo"), MLA_DIMS, strict=True)) if is_mla else dims(128)
    sizes |= dims(512) if kernel.backend == "wide" else {}
    page_size = 64 if is_mla else 16
    for target in TARGETS:
        plain = AttentionProblem(
            target, **own, **sizes, page_size=page_size, mask=MaskMode.CAUSAL, window=False, soft_cap=False, rows=16,
            is_mla=is_mla,
        )  # fmt: skip
        problem = replace(plain, **row.changes)
        refused = kernel.refusal(problem) or (problem.cascade and not kernel.has_cascades)
        if kernel.on_cuda == problem.on_cuda and not refused:
            return "yes"
    return ""


def table(rows: tuple[Row, ...], *, is_mla: bool) -> str:
    kernels = [kernel for kernel in KERNELS if kernel.is_mla == is_mla]
    lines = [f"| | {' | '.join(f'`{kernel.backend}`' for kernel in kernels)} |", "|---|" + "---|" * len(kernels)]
    for row in rows:
        lines.append(f"| {row.name} | {' | '.join(answer(kernel, row, is_mla=is_mla) for kernel in kernels)} |")
    return "\n".join(lines)


def page() -> str:
    return f"""# What each kernel takes

The kernels' own answers, which `python tests/feature_matrix.py` writes here. `quire matrix` asks them for a head dim,
a page size and a mask of your own, on each target; `quire.is_supported()` does in Python. [Backends](backends.md) says
how the kernels work and where they have run.

## Keys and values

{table(ROWS, is_mla=False)}

`fa3` and `fp8` are for Hopper, `cpu` for CPUs, the others for all GPUs from Ampere on. `wide` was asked with heads of
512 dims, `fp8` with e4m3. Features combine; where two do not, an error says why. Sinks, scales, group sizes and lengths
are run-time values, which all kernels take. Where `fa3` does not rotate keys, Quire does in a launch before it.

## Latents (MLA)

Keys of 576 dims whose first 512 are the values.

{table(LATENT_ROWS, is_mla=True)}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
