"""ctypes mirrors of the parameter structs in templates/include/quire/core/params.h and kernels/*.h.

Each rendered unit asserts these layouts, so the build fails if a mirror differs from its C++ struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache, partial
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


def _each(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


pointers = partial(_each, c_void_p)
int32 = partial(_each, c_int32)
int64 = partial(_each, c_int64)
uint32 = partial(_each, c_uint32)
floats = partial(_each, c_float)


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

    _fields_ = (*uint32("divisor multiplier shift"),)

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

    _fields_ = (
        *int32("request row_begin kv_begin kv_end work_begin partial num_parts group kv_first kv_len"),
        *int32("qo_begin qo_len"),
    )  # fmt: skip


class Partition(ctypes.Structure):
    """The work of one CTA. In a cascade `group` and `heads_per_l2_group` mean first_tile and next."""

    _fields_ = (*int32("kv_head tile offset units partial group num_tiles heads_per_l2_group"),)


class MergeGroup(ctypes.Structure):
    """An entry of the merge table: partials of the same rows."""

    _fields_ = (*int32("parts_begin parts_end num_rows"), *uint32("num_arrived"))


class AttentionParams(ctypes.Structure):
    """The parameters of all attention kernels; for shapes see core/params.h."""

    _fields_ = (
        *operand_fields(ATTENTION_OPERANDS),
        *pointers("lse sinks logits_scale_by o_scale_by kv_indices mask mask_indptr tiles partitions groups"),
        *pointers("partial_o partial_md"), ("group", FastDivisor), ("page", FastDivisor),
        *int32("num_qo_heads num_kv_heads num_tiles num_ctas window_left"),
        *floats("logits_scale tanh_scale logits_cap o_scale lse_unit"), *int32("plan_is_resident rows_vary"),
        *pointers("rope_frequencies"),
    )  # fmt: skip


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
        ("base", AttentionParams), ("_to_64", ctypes.c_char * (-ctypes.sizeof(AttentionParams) % 64)),
        *((name, TensorMap) for name in ("tensor_q", "tensor_k", "tensor_v")), *pointers("tile_counter"),
        *int32("heads_per_l2_group _to_8"), *pointers("block_mask"), ("_to_end", ctypes.c_char * 40),
    )  # fmt: skip


class AttentionFa3PrefixParams(ctypes.Structure):
    """The same with shared keys in separate tensors; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        *AttentionFa3Params._fields_, *((name, TensorMap) for name in ("tensor_k_prefix", "tensor_v_prefix")),
        *operand_fields(PREFIX_OPERANDS), ("_to_64", ctypes.c_char * 16),
    )  # fmt: skip


class AttentionFa3Fp8Params(ctypes.Structure):
    """The same with scales of query heads; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        *AttentionFa3Params._fields_, *pointers("q_scales"), *int64("q_scales_head_stride"),
        ("_to_64", ctypes.c_char * 48),
    )  # fmt: skip


class PodParams(ctypes.Structure):
    """The parameters of two kernels in one launch; see kernels/pod.cuh. Allocate with `aligned_copy`."""

    _fields_ = (
        ("prefill", AttentionFa3Params), ("decode", AttentionParams), *pointers("decode_counter"),
        *int32("num_decode_ctas"), ("_to_64", ctypes.c_char * (-(ctypes.sizeof(AttentionParams) + 12) % 64)),
    )  # fmt: skip


class AttentionMlaFa3Params(ctypes.Structure):
    """The parameters of MLA kernels with TMA; see core/params.h. Allocate with `aligned_copy`."""

    _fields_ = (
        *AttentionFa3Params._fields_, *operand_fields(MLA_OPERANDS[len(ATTENTION_OPERANDS) :]), *int32("num_pages"),
        ("cache_page", FastDivisor), *operand_fields(blocks_of(SCALED_MLA_OPERANDS)[-1]),
        ("_to_64", ctypes.c_char * 56),
    )  # fmt: skip


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
        *pointers("qo_indptr kv_indptr kv_last_page_len kv_indices seq_lens prefix_indptr kept buffer"),
        *int64("capacity num_pages"),
        *int32("batch_size qo_len num_kv_heads group_size page_size tile_rows tile_kv mask_mode window_left"),
        *int32("start_cost max_ctas fixed_split_size splits_by_length has_tile_counter l2_tokens"),
        *int32("num_shared_nodes arrives_late tile_capacity"),
    )  # fmt: skip


class ScheduleOutput(ctypes.Structure):
    """Output of the host's scheduler."""

    _fields_ = (
        *int32("error error_request has_kept num_tiles num_ctas is_partitioned is_dynamic heads_per_l2_group"),
        *int32("work_per_head nnz_qo"), *int64("nnz_kv num_partials num_groups mask_bytes kv_tokens"),
        *int32("least_page largest_page"),
        *int64("tile_counter_offset groups_offset partitions_offset mask_indptr_offset tiles_offset"),
        *int64("buffer_bytes filled_bytes staged_bytes"),
    )  # fmt: skip


class ScheduleParams(ctypes.Structure):
    """One call of the host's scheduler."""

    _fields_ = (("input", ScheduleInput), ("output", ScheduleOutput))


class ScheduleLengthsParams(ctypes.Structure):
    """Parameters of the scheduler on the device; see kernels/schedule_lengths.cuh."""

    _fields_ = (
        *pointers("kv_lens qo_indptr kv_indptr tiles first_tiles partitions groups tile_counter o lse"),
        *int32("batch_size qo_len max_kv_len pages_per_request num_kv_heads group_size tile_rows tile_kv"),
        *int32("mask_mode window_left start_cost max_ctas num_rows max_tiles is_ragged l2_tokens row_vectors"),
        *int32("may_divide"),
    )  # fmt: skip


class StampList(ctypes.Structure):
    """Memory in which a timed variant records the times of work tiles; see tile/shared/stamps.h."""

    _fields_ = (*pointers("rows"), *int64("capacity"))
