"""Operations other than attention: scheduling, merging states, appending to a cache, RoPE, scoring pages."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from quire.errors import ValidationError
from quire.jit.unit import Spec
from quire.kernels.expressions.cxx import operands_struct, render
from quire.kernels.expressions.variant import Variant, find_variant
from quire.kernels.params import (
    AppendLatentsParams,
    AppendNvfp4Params,
    AppendParams,
    BlockMaskParams,
    ExpressionBlocksParams,
    GatherLatentsParams,
    MergeParams,
    MqaLogitsParams,
    PackbitsParams,
    PageScoresParams,
    RopeParams,
    ScheduleLengthsParams,
    ScheduleParams,
    TopTokensParams,
    WidenParams,
    struct_of,
)

#: Threads of a CTA of every operation on a GPU: kParallelThreads in core/parallel.h.
PARALLEL_THREADS = 256
#: CTAs of an operation that finds out what a row tile sees of its KV tiles.
CTAS_PER_ROW_TILE = 4
#: kHeads and kTurns of kernels/rope.h: heads of a token per thread, and rounds of tokens that a CTA looks up at once.
HEADS_OF_THREAD, TURNS_OF_TOKENS = 4, 8
#: kLatentThreads and kHeads of kernels/append_latents.h: threads per latent, and heads per other thread.
LATENT_THREADS, LATENT_HEADS = 64, 2
#: kSmemBytes of kernels/mqa_logits.h and kernels/top_tokens.h: shared memory of a CTA.
MQA_LOGITS_SMEM, TOP_TOKENS_SMEM = 33792, 32848


@dataclass(frozen=True)
class Operation:
    """One operation: a row of the catalogue."""

    name: str
    header: str
    cxx: str
    params: type[ctypes.Structure]
    #: elements that a thread copies at a time, by the slug of their type ("": the code depends on no type); calls
    #: choose one by addresses and strides
    widths: Mapping[str, tuple[int, ...]]
    on_cuda: bool = True
    on_host: bool = True
    asserts: tuple[tuple[str, int], ...] = ()  #: constants of the kernel that Python relies on


def _header(name: str) -> str:
    return f"quire/kernels/{name}"


_ONE = {"": (1,)}
_STATES = dict.fromkeys(("fp32", "fp16", "bf16"), (1, 8))
_HEADS = {"fp32": (1, 4), "fp16": (1, 8), "bf16": (1, 8)}
_ROPE = (("kHeads", HEADS_OF_THREAD), ("kTurns", TURNS_OF_TOKENS))
_BITS = {"u8": (1, 16), "u16": (1, 8), "u32": (1, 4)}

OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in (
        Operation(
            "schedule_attention", _header("schedule_attention.h"), "ScheduleAttention", ScheduleParams, _ONE,
            on_cuda=False,
        ),
        Operation(
            "schedule_lengths", _header("schedule_lengths.cuh"), "ScheduleLengths", ScheduleLengthsParams, _ONE,
            on_host=False,
        ),
        Operation("block_mask", _header("block_mask.cuh"), "BuildBlockMask", BlockMaskParams, _ONE, on_host=False),
        Operation(
            "expression_blocks", _header("expression_blocks.h"), "BuildExpressionBlocks", ExpressionBlocksParams, {},
        ),
        Operation("merge", _header("merge.h"), "MergeStates", MergeParams, _STATES),
        Operation("merge_pair", _header("merge.h"), "MergePair", MergeParams, _STATES),
        Operation("append", _header("append.h"), "AppendPaged", AppendParams, _BITS),
        Operation("append_nvfp4", _header("append_nvfp4.h"), "AppendNvfp4", AppendNvfp4Params, _HEADS),
        Operation("rope", _header("rope.h"), "RotateHeads", RopeParams, _HEADS, asserts=_ROPE),
        Operation("rope_append", _header("rope.h"), "RotateAppend", RopeParams, _HEADS, asserts=_ROPE),
        Operation("rope_norm_append", _header("rope.h"), "NormRotateAppend", RopeParams, _HEADS, asserts=_ROPE),
        Operation(
            "append_latents", _header("append_latents.h"), "AppendLatents", AppendLatentsParams, _HEADS,
            asserts=(("kHeads", LATENT_HEADS), ("kLatentThreads", LATENT_THREADS)),
        ),
        Operation("gather_latents", _header("gather_latents.h"), "GatherLatents", GatherLatentsParams, _HEADS),
        Operation(
            "mqa_logits", _header("mqa_logits.h"), "MqaLogits", MqaLogitsParams, {"": (1, 2)},
            asserts=(("kSmemBytes", MQA_LOGITS_SMEM),),
        ),
        Operation(
            "top_tokens", _header("top_tokens.h"), "TopTokens", TopTokensParams, dict.fromkeys(_STATES, (1,)),
            asserts=(("kSmemBytes", TOP_TOKENS_SMEM),),
        ),
        Operation("page_scores", _header("page_scores.h"), "PageScores", PageScoresParams, _HEADS),
        Operation("rope_pages", _header("rope.h"), "RotatePages", RopeParams, _HEADS, asserts=_ROPE),
        Operation("widen", _header("widen.h"), "WidenPages", WidenParams, {"fp16": (1,), "bf16": (1,)}),
        Operation("packbits", _header("packbits.h"), "Packbits", PackbitsParams, _ONE),
    )
}  # fmt: skip
_OF_VARIANT = ("expression_blocks",)  #: operations that are compiled for a custom variant
_CXX = {"fp32": "float", "fp16": "fp16_t", "bf16": "bf16_t", "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t"}


@dataclass(frozen=True)
class OperationKey:
    """The key of a variant of an operation. `parse` is the inverse of `slug`."""

    name: str
    target: str
    type: str = ""  #: slug of the element type, "" if none; for a custom variant "expr" and its digest
    vector: int = 1

    def __post_init__(self) -> None:
        op = OPERATIONS.get(self.name)
        widths = (1,) if self.name in _OF_VARIANT and self.type.startswith("expr") else op and op.widths.get(self.type)
        known = op is not None and self.vector in (widths or ())
        if op is None or not known or not (op.on_cuda if self.target.startswith("sm") else op.on_host):
            raise ValidationError(
                f"operation: there is no {self.name!r} for {self.target} with {self.type!r} x {self.vector}."
            )

    @property
    def slug(self) -> str:
        return f"{self.name}.{self.target}.{self.type or 'any'}.v{self.vector}"

    @classmethod
    def parse(cls, slug: str) -> OperationKey:
        """The key that `slug` names."""
        try:
            name, target, element, vector = slug.split(".")
            key = cls(name, target, "" if element == "any" else element, int(vector.removeprefix("v")))
        except ValueError as error:
            raise ValidationError(f"slug: expected name.target.type.vN, got {slug!r}.") from error
        if key.slug != slug:
            raise ValidationError(f"slug: {slug!r} does not name a variant; the nearest is {key.slug!r}.")
        return key

    @property
    def preset(self) -> tuple[str, ...]:
        """The words of `quire warmup --preset config.json,WORD,...` with which a model's preset has this variant."""
        word = {
            "merge": "cascade", "merge_pair": "cascade", "schedule_lengths": "graph", "packbits": "custom,spec=N",
            "block_mask": "custom,spec=N",
            "widen": "kv=e4m3", "append_nvfp4": "kv=nvfp4", "append": "kv=e4m3" if self.type == "u8" else "",
        }.get(self.name)  # fmt: skip
        return (word,) if word else ()

    def family(self) -> list[OperationKey]:
        """The keys of all widths that calls choose from."""
        return [replace(self, vector=width) for width in OPERATIONS[self.name].widths.get(self.type, (1,))]

    @lru_cache(maxsize=1024)  # calls look their module up by spec  # noqa: B019
    def spec(self) -> Spec:
        """The input of the compiler."""
        op, own = OPERATIONS[self.name], find_variant(self.type[4:]) if self.name in _OF_VARIANT else None
        return Spec(
            slug=self.slug, target=self.target, header=op.header, kernel=op.cxx, entry=f"quire_{self.name}",
            params=struct_of(op.params), types=(("T", _CXX[self.type]),) if self.type in _CXX else (),
            constants=(("kVec", self.vector), *_places(op, own)), code="" if own is None else render(own.expression),
            operands=None if own is None else struct_of(operands_struct(own.expression)),
            asserts=((("kThreads", PARALLEL_THREADS),) if self.target.startswith("sm") else ()) + op.asserts,
            warmup=self.slug, preset=self.preset, fields=() if own is None else (("expression", str(own)),),
        )  # fmt: skip


def _places(op: Operation, own: Variant | None) -> tuple[tuple[str, int], ...]:
    """The constants for core/expression.h: where the operands of a variant begin, and that it has a mask."""
    if own is None:
        return ()
    return ("kOperandsAt", ctypes.sizeof(op.params)), ("kScore", int(own.has_score)), ("kScoreMask", 1)


#: Units per turn, so that 64-bit integers wrap around where angles do.
_TURN = 2**64


def rope_frequencies(rotary_dim: int, rope_scale: float, rope_theta: float) -> tuple[int, ...]:
    """Rotations per token of the rotary_dim / 2 pairs, in units of 2**-64 turns: theta**(-2 i / rotary_dim) / scale
    radians.
    """
    return tuple(fixed_point(rope_theta ** (-2 * pair / rotary_dim) / rope_scale) for pair in range(rotary_dim // 2))


def fixed_point(radians: float) -> int:
    """A frequency in radians per token as turns in fixed point."""
    return round(math.fmod(radians / (2 * math.pi), 1.0) * _TURN) % _TURN


def llama31_frequencies(
    rotary_dim: int, rope_scale: float, rope_theta: float, low_freq_factor: float, high_freq_factor: float,
    old_context_len: float,
) -> tuple[int, ...]:  # fmt: skip
    """The same for Llama 3.1: pairs with fewer than low_freq_factor rotations in old_context_len tokens are slowed down
    by rope_scale, pairs with more than high_freq_factor rotations are unchanged, and pairs in between are interpolated.
    """

    def scaled(radians: float) -> float:
        turns = old_context_len * radians / (2 * math.pi)
        kept = min(max((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0), 1.0)
        return (1 - kept) * radians / rope_scale + kept * radians

    return tuple(fixed_point(scaled(rope_theta ** (-2 * pair / rotary_dim))) for pair in range(rotary_dim // 2))
