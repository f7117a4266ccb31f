"""ctypes mirrors of the parameter structs in templates/include/quire/core/params.h and kernels/*.h.

Each rendered unit asserts these layouts, so the build fails if a mirror differs from its C++ struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, TypeVar

from quire.jit.unit import Struct
from quire.kernels.features import (
    ATTENTION_OPERANDS,
    MLA_OPERANDS,
    PREFIX_OPERANDS,
    SCALED_MLA_OPERANDS,
    SCALED_OPERANDS,
    Operand,
    blocks_of,
    operand_fields,
)

_Struct = TypeVar("_Struct", bound=ctypes.Structure)

#: Largest number of pairs of dims that a table of angles rotates: kMaxTablePairs in kernels/rope.h.
MAX_TABLE_PAIRS = 512
#: Pairs of dims for which RopeParams holds frequencies: kMaxRotaryPairs in kernels/rope.h.
MAX_ROTARY_PAIRS = 256


@cache
def struct_of(cls: type[ctypes.Structure]) -> Struct:
    """The layout of a mirror, for the assertions in the rendered unit."""
    return Struct(cls.__name__, ctypes.sizeof(cls), tuple(_offsets(cls)))


def _offsets(cls: type[ctypes.Structure]) -> Iterator[tuple[str, int]]:
    """Each field's name and offset; those of nested structs by their path."""
    for name, kind, *_ in cls._fields_:
        offset = getattr(cls, name).offset
        if name.startswith("_"):  # padding
            continue
        if issubclass(kind, ctypes.Structure):
            yield from ((f"{name}.{inner}", offset + at) for inner, at in _offsets(kind))
        else:
            yield name, offset


class FastDivisor(ctypes.Structure):
    """Division by a run-time number as a multiplication; see core/types.h."""

    _fields_ = (("divisor", c_uint32), ("multiplier", c_uint32), ("shift", c_uint32))

    @classmethod
    def of(cls, divisor: int) -> FastDivisor:
        """Multiplier and shift such that umulhi(n, multiplier) >> shift == n // divisor for 0 <= n < 2**31."""
        if divisor == 1:
            return cls(1, 0, 0)
        shift = (divisor - 1).bit_length() - 1
        return cls(divisor, ((1 << (32 + shift)) + divisor - 1) // divisor, shift)


class RowTile(ctypes.Structure):
    """One row tile of one request, the same for all KV heads. In a cascade `partial` and `num_parts` mean row_end and
    num_groups: see core/params.h.
    """

    _fields_ = tuple(
        (name, c_int32)
        for name in (
            *("request", "row_begin", "kv_begin", "kv_end", "work_begin", "partial", "num_parts", "group"),
            *("kv_first", "kv_len", "qo_begin", "qo_len"),
        )
    )


class Partition(ctypes.Structure):
    """The work of one CTA. In a cascade `group` and `heads_per_l2_group` mean first_tile and next."""

    _fields_ = tuple(
        (name, c_int32)
        for name in (*("kv_head", "tile", "offset", "units"), *("partial", "group", "num_tiles", "heads_per_l2_group"))
    )


class MergeGroup(ctypes.Structure):
    """An entry of the merge table: partials of the same rows."""

    _fields_ = (*((name, c_int32) for name in ("parts_begin", "parts_end", "num_rows")), ("num_arrived", c_uint32))


class AttentionParams(ctypes.Structure):
    """The parameters of all attention kernels; for shapes see core/params.h."""

    _fields_ = (
        *operand_fields(ATTENTION_OPERANDS),
        *((name, c_void_p) for name in ("lse", "sinks", "logits_scale_by", "o_scale_by")),
        *((name, c_void_p) for name in ("kv_indices", "mask", "mask_indptr")),
        *((name, c_void_p) for name in ("tiles", "partitions", "groups", "partial_o", "partial_md")),
        ("group", FastDivisor),
        ("page", FastDivisor),
        *((name, c_int32) for name in ("num_qo_heads", "num_kv_heads", "num_tiles", "num_ctas")),
        ("window_left", c_int32),
        *((name, c_float) for name in ("logits_scale", "tanh_scale", "logits_cap", "o_scale", "lse_unit")),
        ("plan_is_resident", c_int32),
        ("rows_vary", c_int32),
        ("rope_frequencies", c_void_p),
    )


def params_with(
    name: str, operands: Sequence[Operand], more: tuple[tuple[str, Any], ...] = ()
) -> type[ctypes.Structure]:
    """The parameter struct `name` of a kernel with more operands than ATTENTION_OPERANDS, and then fields `more`."""
    others = (field for block in blocks_of(operands)[1:] for field in operand_fields(block))
    return type(name, (ctypes.Structure,), {"_fields_": (("base", AttentionParams), *others, *more)})


#: AttentionParams, followed by shared keys in separate tensors; see core/schedule.h.
AttentionPrefixParams = params_with("AttentionPrefixParams", (*ATTENTION_OPERANDS, *PREFIX_OPERANDS))

#: AttentionParams, followed by the scales of keys and values of 4 bits; see core/params.h.
AttentionScaledParams = params_with("AttentionScaledParams", SCALED_OPERANDS)

#: The parameters of MLA kernels; see core/params.h.
AttentionMlaParams = params_with(
    "AttentionMlaParams", SCALED_MLA_OPERANDS, (("cache_page", FastDivisor), ("_to_8", c_int32))
)


def pointers_at(params: ctypes.Structure, first: str, last: str) -> Any:
    """The neighbouring pointers `first` to `last` of a struct: an array, for whose slices mypy has no type."""
    begin, end = (getattr(type(params), name).offset for name in (first, last))
    kind: Any = c_void_p * ((end - begin) // 8 + 1)
    return kind.from_address(ctypes.addressof(params) + begin)


class TensorMap(ctypes.Structure):
    """A CUtensorMap; the struct that holds it keeps it at a multiple of 64 bytes."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


class AttentionFa3Params(ctypes.Structure):
    """The parameters of fa3; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        ("base", AttentionParams),
        ("_to_64", ctypes.c_char * (-ctypes.sizeof(AttentionParams) % 64)),
        *((name, TensorMap) for name in ("tensor_q", "tensor_k", "tensor_v")),
        ("tile_counter", c_void_p),
        ("heads_per_l2_group", c_int32),
        ("_to_8", c_int32),
        ("block_mask", c_void_p),
        ("_to_end", ctypes.c_char * 40),
    )


class AttentionFa3PrefixParams(ctypes.Structure):
    """The same with shared keys in separate tensors; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        *AttentionFa3Params._fields_,
        *((name, TensorMap) for name in ("tensor_k_prefix", "tensor_v_prefix")),
        *operand_fields(PREFIX_OPERANDS),
        ("_to_64", ctypes.c_char * 16),
    )


class AttentionFa3Fp8Params(ctypes.Structure):
    """The same with scales of query heads; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        *AttentionFa3Params._fields_,
        ("q_scales", c_void_p),
        ("q_scales_head_stride", c_int64),
        ("_to_64", ctypes.c_char * 48),
    )


class PodParams(ctypes.Structure):
    """The parameters of two kernels in one launch; see kernels/pod.cuh. Allocate with `aligned_copy`."""

    _fields_ = (
        ("prefill", AttentionFa3Params),
        ("decode", AttentionParams),
        ("decode_counter", c_void_p),
        ("num_decode_ctas", c_int32),
        ("_to_64", ctypes.c_char * (-(ctypes.sizeof(AttentionParams) + 12) % 64)),
    )


class AttentionMlaFa3Params(ctypes.Structure):
    """The parameters of MLA kernels with TMA; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        *AttentionFa3Params._fields_,
        *operand_fields(MLA_OPERANDS[len(ATTENTION_OPERANDS) :]),
        ("num_pages", c_int32),
        ("cache_page", FastDivisor),
        *operand_fields(blocks_of(SCALED_MLA_OPERANDS)[-1]),
        ("_to_64", ctypes.c_char * 56),
    )


def aligned_copy(params: _Struct) -> _Struct:
    """A copy of a struct at a multiple of 64 bytes, which tensor maps require."""
    memory = bytes_type(ctypes.sizeof(params) + 64)()
    address = ctypes.addressof(memory)
    copies = _array_of_one(type(params)).from_address(address + -address % 64)  # twice as fast as from_buffer()
    copies.memory = memory  # type: ignore[attr-defined]  # keeps the memory alive
    copies[0] = params
    copy: _Struct = copies[0]
    return copy


@cache
def bytes_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The ctypes array type of this size, created once."""
    return ctypes.c_char * num_bytes


@cache
def _array_of_one(kind: type[_Struct]) -> type[ctypes.Array[_Struct]]:
    return kind * 1


class ScheduleInput(ctypes.Structure):
    """Input of the host's scheduler; see kernels/schedule_attention.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("qo_indptr", "kv_indptr", "kv_last_page_len", "kv_indices")),
        *((name, c_void_p) for name in ("seq_lens", "prefix_indptr", "kept", "buffer")),
        *((name, c_int64) for name in ("capacity", "num_pages")),
        *((name, c_int32) for name in ("batch_size", "qo_len", "num_kv_heads", "group_size", "page_size")),
        *((name, c_int32) for name in ("tile_rows", "tile_kv", "mask_mode", "window_left", "start_cost", "max_ctas")),
        *((name, c_int32) for name in ("fixed_split_size", "splits_by_length", "has_tile_counter", "l2_tokens")),
        *((name, c_int32) for name in ("num_shared_nodes", "arrives_late", "tile_capacity")),
    )


class ScheduleOutput(ctypes.Structure):
    """Output of the host's scheduler."""

    _fields_ = (
        *((name, c_int32) for name in ("error", "error_request", "has_kept", "num_tiles", "num_ctas")),
        *((name, c_int32) for name in ("is_partitioned", "is_dynamic", "heads_per_l2_group", "work_per_head")),
        ("nnz_qo", c_int32),
        *((name, c_int64) for name in ("nnz_kv", "num_partials", "num_groups", "mask_bytes", "kv_tokens")),
        *((name, c_int32) for name in ("least_page", "largest_page")),
        *((name, c_int64) for name in ("tile_counter_offset", "groups_offset", "partitions_offset")),
        *((name, c_int64) for name in ("mask_indptr_offset", "tiles_offset")),
        *((name, c_int64) for name in ("buffer_bytes", "filled_bytes", "staged_bytes")),
    )


class ScheduleParams(ctypes.Structure):
    """One call of the host's scheduler."""

    _fields_ = (("input", ScheduleInput), ("output", ScheduleOutput))


class ScheduleLengthsParams(ctypes.Structure):
    """Parameters of the scheduler on the device; see kernels/schedule_lengths.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("kv_lens", "qo_indptr", "kv_indptr", "tiles", "first_tiles", "partitions")),
        *((name, c_void_p) for name in ("groups", "tile_counter", "o", "lse")),
        *((name, c_int32) for name in ("batch_size", "qo_len", "max_kv_len", "pages_per_request", "num_kv_heads")),
        *((name, c_int32) for name in ("group_size", "tile_rows", "tile_kv", "mask_mode", "window_left")),
        *((name, c_int32) for name in ("start_cost", "max_ctas", "num_rows", "max_tiles", "is_ragged", "l2_tokens")),
        *((name, c_int32) for name in ("row_vectors", "may_divide")),
    )


class BlockMaskParams(ctypes.Structure):
    """Computing the block mask of a custom mask; see kernels/block_mask.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("mask", "mask_indptr", "tiles", "scratch", "arrivals", "block_mask")),
        *((name, c_int32) for name in ("num_tiles", "tile_rows", "tile_kv", "group_size", "window_left")),
    )


class ExpressionBlocksParams(ctypes.Structure):
    """Computing the block mask of a custom variant; see kernels/expression_blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("tiles", "scratch", "arrivals")),
        *((name, c_int32) for name in ("num_tiles", "tile_rows", "tile_kv", "group_size", "mask_mode", "window_left")),
        *((name, c_int32) for name in ("num_masks", "mask_heads", "tested_heads")),
    )


class StampList(ctypes.Structure):
    """Memory in which a timed variant records the times of work tiles; see tile/shared/stamps.h."""

    _fields_ = (("rows", c_void_p), ("capacity", c_int64))


class MergeParams(ctypes.Structure):
    """Merging attention states; kernels/merge.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("v", "s", "v_out", "s_out", "mask")),
        ("num_tokens", c_int64),
        *((name, c_int64) for name in ("v_token_bytes", "v_state_bytes", "s_token_bytes", "s_state_bytes")),
        *((name, c_int32) for name in ("num_states", "num_heads", "head_dim")),
        ("v_scale", c_float),
    )


class AppendParams(ctypes.Structure):
    """Appending to a paged cache; kernels/append.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "k_cache", "v_cache")),
        *((name, c_void_p) for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")),
        *((name, c_int64) for name in ("nnz", "num_indices")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("k_page_stride", "k_token_stride", "k_head_stride")),
        *((name, c_int64) for name in ("v_page_stride", "v_token_stride", "v_head_stride")),
        *((name, c_int32) for name in ("batch_size", "num_pages", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim_k", "head_dim_v", "page_size")),
    )


class AppendNvfp4Params(ctypes.Structure):
    """Quantising tokens to 4 bits and appending them; kernels/append_nvfp4.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "k_cache", "v_cache", "k_sf", "v_sf")),
        *((name, c_void_p) for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "places")),
        *((name, c_void_p) for name in ("k_scale_at", "v_scale_at")),
        *((name, c_int64) for name in ("nnz", "num_indices")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("k_page_stride", "k_token_stride", "k_head_stride")),
        *((name, c_int64) for name in ("v_page_stride", "v_token_stride", "v_head_stride")),
        *((name, c_int64) for name in ("k_sf_page_stride", "k_sf_token_stride", "k_sf_head_stride")),
        *((name, c_int64) for name in ("v_sf_page_stride", "v_sf_token_stride", "v_sf_head_stride")),
        *((name, c_int32) for name in ("batch_size", "num_pages", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim_k", "head_dim_v", "page_size")),
        *((name, c_float) for name in ("k_scale", "v_scale")),
    )


class WidenParams(ctypes.Structure):
    """Converting pages of 8 or 4 bits to 16 bits; kernels/widen.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "k_out", "v_out", "kv_indices", "k_sf", "v_sf")),
        *((name, c_int64) for name in ("k_page_stride", "k_token_stride", "k_head_stride")),
        *((name, c_int64) for name in ("v_page_stride", "v_token_stride", "v_head_stride")),
        *((name, c_int64) for name in ("k_sf_page_stride", "k_sf_token_stride", "k_sf_head_stride")),
        *((name, c_int64) for name in ("v_sf_page_stride", "v_sf_token_stride", "v_sf_head_stride")),
        *((name, c_int32) for name in ("num_indices", "num_pages", "page_size", "num_kv_heads")),
        *((name, c_int32) for name in ("head_dim_k", "head_dim_v", "kind")),
        ("_padding", c_int32),
    )


class HeadRows(ctypes.Structure):
    """A tensor [tokens, heads, dims]: its address, and strides in elements."""

    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("page_stride", "token_stride", "head_stride")))


class RopeHeads(ctypes.Structure):
    """Queries, keys or values that are rotated or appended; see kernels/rope.h."""

    _fields_ = (
        *((name, HeadRows) for name in ("rope", "nope", "rope_out", "nope_out")),
        ("weight", c_void_p),
        ("scale", c_float),
        *((name, c_int32) for name in ("num_heads", "first_group", "rotary_dim", "nope_dim", "out_type", "is_paged")),
    )


class RopeParams(ctypes.Structure):
    """Rotating queries and keys; see kernels/rope.h."""

    _fields_ = (
        ("heads", RopeHeads * 3),
        *((name, c_void_p) for name in ("pos_ids", "indptr", "offsets", "cos_sin_cache")),
        ("cos_sin_stride", c_int64),
        *((name, c_void_p) for name in ("batch_indices", "positions", "kv_indices", "kv_indptr")),
        *((name, c_int64) for name in ("nnz", "num_indices")),
        *((name, c_int32) for name in ("batch_size", "num_pages", "page_size", "has_long_pos_ids")),
        *((name, c_int32) for name in ("num_requests", "num_positions", "interleave")),
        *((name, FastDivisor) for name in ("columns", "lanes", "pairs")),
        *((name, c_int32) for name in ("tokens_of_turn", "tokens", "ctas", "vectors_at")),
        ("eps", c_float),
        ("frequencies", c_uint64 * MAX_ROTARY_PAIRS),
    )


class AppendLatentsParams(ctypes.Structure):
    """Appending latents; kernels/append_latents.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("q_pe", "k_pe", "ckv", "cache", "cache_rows", "kv_scale")),
        *((name, c_void_p) for name in ("pos_ids", "cos_sin_cache")),
        *((name, c_int64) for name in ("nnz", "q_token_stride", "q_head_stride", "k_token_stride")),
        *((name, c_int64) for name in ("ckv_token_stride", "cos_sin_stride", "page_bytes", "row_bytes")),
        *((name, c_int64) for name in ("scales_at", "scale_bytes")),
        *((name, c_int32) for name in ("k_pe_at", "scale_dims", "has_powers", "num_heads", "rope_dim", "latent_dim")),
        *((name, c_int32) for name in ("num_pages", "page_size", "has_long_pos_ids", "num_positions", "interleave")),
        *((name, c_int32) for name in ("latent_type", "k_pe_type")),
    )


class PageScoresParams(ctypes.Structure):
    """Scores of pages; kernels/page_scores.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "bounds", "pages", "lens", "keys")),
        ("page_stride", c_int64),
        *((name, c_int32) for name in ("batch_size", "num_kv_heads", "group_size", "head_dim")),
        *((name, c_int32) for name in ("num_columns", "page_size", "num_pages")),
    )


class LatentCache(ctypes.Structure):
    """A cache of latents, and what is chosen of it; see kernels/gather_latents.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("pages", "indices", "lens")),
        *((name, c_int64) for name in ("indices_stride", "page_bytes", "row_bytes", "scales_at", "scale_bytes")),
        ("page", FastDivisor),
        *((name, c_int32) for name in ("top_k", "num_tokens", "rows_of_len")),
        *((name, c_int32) for name in ("latent_dims", "rest_at", "scale_dims", "kind")),
    )


class GatherLatentsParams(ctypes.Structure):
    """Gathering chosen latents; kernels/gather_latents.h has the shapes."""

    _fields_ = (
        ("caches", LatentCache * 2),
        *((name, c_void_p) for name in ("out", "table")),
        ("token_stride", c_int64),
        *((name, c_int32) for name in ("num_rows", "top_k", "dims", "_to_8")),
    )


class MqaLogitsParams(ctypes.Structure):
    """Scores of an indexer; kernels/mqa_logits.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "keys", "scales", "weights", "pages", "begins", "ends", "logits")),
        *((name, c_int64) for name in ("q_row_bytes", "q_head_bytes", "key_page_bytes", "scale_page_bytes")),
        *((name, c_int64) for name in ("weights_stride", "pages_stride", "logits_stride")),
        *((name, FastDivisor) for name in ("page", "request", "parts")),
        *((name, c_int32) for name in ("num_rows", "num_heads", "head_dim", "num_pages", "width", "num_keys")),
        *((name, c_int32) for name in ("part_columns", "lengths_are_shared", "is_shifted", "is_clean")),
        ("_to_8", c_int32),
    )


class TopTokensParams(ctypes.Structure):
    """Choosing tokens by scores; kernels/top_tokens.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("scores", "lens", "pages", "tokens")),
        *((name, c_int64) for name in ("scores_stride", "pages_stride")),
        ("page", FastDivisor),
        *((name, c_int32) for name in ("num_rows", "num_tokens", "top_k")),
    )


class PackbitsParams(ctypes.Structure):
    """Packing booleans into bits; kernels/packbits.h has the shapes."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "segment_begin", "byte_begin")),
        ("n", c_int64),
        ("num_bytes", c_int64),
        ("num_segments", c_int32),
        ("little", c_int32),
    )
