"""Operations other than attention (merging states, appending to a cache, RoPE, ...): one row each, and the mirrors of
their parameter structs.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_uint64
from dataclasses import dataclass, replace
from functools import lru_cache

from quire.errors import ValidationError
from quire.jit.unit import Spec
from quire.kernels.expressions.cxx import operands_struct, render
from quire.kernels.expressions.variant import Variant, find_variant
from quire.kernels.params import (
    FastDivisor,
    ScheduleLengthsParams,
    ScheduleParams,
    floats,
    int32,
    int64,
    pointers,
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
#: Largest number of pairs of dims that a table of angles rotates: kMaxTablePairs in kernels/rope.h.
MAX_TABLE_PAIRS = 512
#: Pairs of dims for which RopeParams holds frequencies: kMaxRotaryPairs in kernels/rope.h.
MAX_ROTARY_PAIRS = 256


class BlockMaskParams(ctypes.Structure):
    """Computing the block mask of a custom mask; see kernels/block_mask.cuh."""

    _fields_ = (
        *pointers("mask mask_indptr tiles scratch arrivals block_mask"),
        *int32("num_tiles tile_rows tile_kv group_size window_left"),
    )  # fmt: skip


class ExpressionBlocksParams(ctypes.Structure):
    """Computing the block mask of a custom variant; see kernels/expression_blocks.h."""

    _fields_ = (
        *pointers("tiles scratch arrivals"),
        *int32("num_tiles tile_rows tile_kv group_size mask_mode window_left num_masks mask_heads"),
        *int32("tested_heads"),
    )  # fmt: skip


class MergeParams(ctypes.Structure):
    """Merging attention states; kernels/merge.h has the shapes."""

    _fields_ = (
        *pointers("v s v_out s_out mask"),
        *int64("num_tokens v_token_bytes v_state_bytes s_token_bytes s_state_bytes"),
        *int32("num_states num_heads head_dim"), *floats("v_scale"),
    )  # fmt: skip


class AppendParams(ctypes.Structure):
    """Appending to a paged cache; kernels/append.h has the shapes."""

    _fields_ = (
        *pointers("key value k_cache v_cache batch_indices positions kv_indices kv_indptr"),
        *int64("nnz num_indices key_token_stride key_head_stride value_token_stride value_head_stride"),
        *int64("k_page_stride k_token_stride k_head_stride v_page_stride v_token_stride v_head_stride"),
        *int32("batch_size num_pages num_kv_heads head_dim_k head_dim_v page_size"),
    )  # fmt: skip


class AppendNvfp4Params(ctypes.Structure):
    """Quantising tokens to 4 bits and appending them; kernels/append_nvfp4.h has the shapes."""

    _fields_ = (
        *pointers("key value k_cache v_cache k_sf v_sf batch_indices positions kv_indices kv_indptr places"),
        *pointers("k_scale_at v_scale_at"),
        *int64("nnz num_indices key_token_stride key_head_stride value_token_stride value_head_stride"),
        *int64("k_page_stride k_token_stride k_head_stride v_page_stride v_token_stride v_head_stride"),
        *int64("k_sf_page_stride k_sf_token_stride k_sf_head_stride v_sf_page_stride v_sf_token_stride"),
        *int64("v_sf_head_stride"), *int32("batch_size num_pages num_kv_heads head_dim_k head_dim_v page_size"),
        *floats("k_scale v_scale"),
    )  # fmt: skip


class WidenParams(ctypes.Structure):
    """Converting pages of 8 or 4 bits to 16 bits; kernels/widen.h has the shapes."""

    _fields_ = (
        *pointers("k v k_out v_out kv_indices k_sf v_sf"),
        *int64("k_page_stride k_token_stride k_head_stride v_page_stride v_token_stride v_head_stride"),
        *int64("k_sf_page_stride k_sf_token_stride k_sf_head_stride v_sf_page_stride v_sf_token_stride"),
        *int64("v_sf_head_stride"),
        *int32("num_indices num_pages page_size num_kv_heads head_dim_k head_dim_v kind _padding"),
    )  # fmt: skip


class HeadRows(ctypes.Structure):
    """A tensor [tokens, heads, dims]: its address, and strides in elements."""

    _fields_ = (*pointers("data"), *int64("page_stride token_stride head_stride"))


class RopeHeads(ctypes.Structure):
    """Queries, keys or values that are rotated or appended; see kernels/rope.h."""

    _fields_ = (
        *((name, HeadRows) for name in ("rope", "nope", "rope_out", "nope_out")), *pointers("weight"),
        *floats("scale"), *int32("num_heads first_group rotary_dim nope_dim out_type is_paged"),
    )  # fmt: skip


class RopeParams(ctypes.Structure):
    """Rotating queries and keys; see kernels/rope.h."""

    _fields_ = (
        ("heads", RopeHeads * 3), *pointers("pos_ids indptr offsets cos_sin_cache"), *int64("cos_sin_stride"),
        *pointers("batch_indices positions kv_indices kv_indptr"), *int64("nnz num_indices"),
        *int32("batch_size num_pages page_size has_long_pos_ids num_requests num_positions interleave"),
        *((name, FastDivisor) for name in ("columns", "lanes", "pairs")),
        *int32("tokens_of_turn tokens ctas vectors_at"), *floats("eps"), ("frequencies", c_uint64 * MAX_ROTARY_PAIRS),
    )  # fmt: skip


class AppendLatentsParams(ctypes.Structure):
    """Appending latents; kernels/append_latents.h has the shapes."""

    _fields_ = (
        *pointers("q_pe k_pe ckv cache cache_rows kv_scale pos_ids cos_sin_cache"),
        *int64("nnz q_token_stride q_head_stride k_token_stride ckv_token_stride cos_sin_stride page_bytes"),
        *int64("row_bytes scales_at scale_bytes"),
        *int32("k_pe_at scale_dims has_powers num_heads rope_dim latent_dim num_pages page_size"),
        *int32("has_long_pos_ids num_positions interleave latent_type k_pe_type"),
    )  # fmt: skip


class PageScoresParams(ctypes.Structure):
    """Scores of pages; kernels/page_scores.h has the shapes."""

    _fields_ = (
        *pointers("q bounds pages lens keys"), *int64("page_stride"),
        *int32("batch_size num_kv_heads group_size head_dim num_columns page_size num_pages"),
    )  # fmt: skip


class LatentCache(ctypes.Structure):
    """A cache of latents, and what is chosen of it; see kernels/gather_latents.h."""

    _fields_ = (
        *pointers("pages indices lens"), *int64("indices_stride page_bytes row_bytes scales_at scale_bytes"),
        ("page", FastDivisor), *int32("top_k num_tokens rows_of_len latent_dims rest_at scale_dims kind"),
    )  # fmt: skip


class GatherLatentsParams(ctypes.Structure):
    """Gathering chosen latents; kernels/gather_latents.h has the shapes."""

    _fields_ = (
        ("caches", LatentCache * 2), *pointers("out table"), *int64("token_stride"),
        *int32("num_rows top_k dims _to_8"),
    )  # fmt: skip


class MqaLogitsParams(ctypes.Structure):
    """Scores of an indexer; kernels/mqa_logits.h has the shapes."""

    _fields_ = (
        *pointers("q keys scales weights pages begins ends logits"),
        *int64("q_row_bytes q_head_bytes key_page_bytes scale_page_bytes weights_stride pages_stride"),
        *int64("logits_stride"), *((name, FastDivisor) for name in ("page", "request", "parts")),
        *int32("num_rows num_heads head_dim num_pages width num_keys part_columns lengths_are_shared"),
        *int32("is_shifted is_clean _to_8"),
    )  # fmt: skip


class TopTokensParams(ctypes.Structure):
    """Choosing tokens by scores; kernels/top_tokens.h has the shapes."""

    _fields_ = (
        *pointers("scores lens pages tokens"), *int64("scores_stride pages_stride"), ("page", FastDivisor),
        *int32("num_rows num_tokens top_k"),
    )  # fmt: skip


class PackbitsParams(ctypes.Structure):
    """Packing booleans into bits; kernels/packbits.h has the shapes."""

    _fields_ = (*pointers("x y segment_begin byte_begin"), *int64("n num_bytes"), *int32("num_segments little"))


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
