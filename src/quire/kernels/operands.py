"""The tensors that a kernel reads and writes, as declared by its row of the catalogue.

The checks of run(), the strides in the parameter struct and the places of addresses follow from the declarations. A
block of the struct, made by `operand_fields`, has the addresses of some operands followed by their strides.
AttentionParams begins with the block of ATTENTION_OPERANDS. A kernel with more operands, or with scales, has its own
struct, in which `base` is followed by a block of the other operands, and by one of scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, c_int64, c_uint64, c_void_p, memmove, sizeof
from functools import cache
from typing import Any, NamedTuple

#: The name of the stride over a dimension, by the name of its size. Other dimensions are contiguous.
_STRIDES = {
    "nnz_qo": "token", "nnz_prefix": "token", "num_qo_heads": "head", "num_pages": "page", "page_size": "token",
    "num_kv_heads": "head",
}  # fmt: skip


class Operand(NamedTuple):
    """One tensor, with the fields `<name>` (address) and `<name>_<dimension>_stride` in the parameter struct."""

    name: str
    dims: tuple[str, ...]  #: names of its sizes in NHD order, those of plan options if there are any
    type: str  #: the feature with its number type, or a type's slug: "q", "kv", "fp32"
    scales: Operand | None = None  #: factors of its numbers, if the call has any

    @property
    def strides(self) -> tuple[str, ...]:
        """Names of its strides in the parameter struct."""
        return _stride_names(self.name, self.dims)


@cache
def _stride_names(name: str, dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}_{_STRIDES[dim]}_stride" for dim in dims if dim in _STRIDES)


class OperandBlock:
    """The place of some operands in a parameter struct: their addresses, then their strides."""

    def __init__(self, offset: int, operands: Sequence[Operand], skipped: Sequence[Operand] = ()) -> None:
        """`skipped`: operands of earlier blocks."""
        begin, size = (8 * sum(len(operand.strides) for operand in some) for some in (skipped, operands))
        self._offset, self._strides = offset, slice(begin, begin + size)
        self._pointers = c_uint64 * len(operands)

    def write(self, params: int, strides: bytes) -> Array[c_uint64]:
        """Write the strides, of the operands of all blocks, into the struct at address `params`; returns where the
        addresses of this block's operands are to be written.
        """
        pointers, own = self._pointers.from_address(params + self._offset), strides[self._strides]
        memmove(params + self._offset + sizeof(pointers), own, len(own))
        return pointers


class View(NamedTuple):
    """The address of a tensor, and its sizes and strides in elements, with the dimensions of its operand."""

    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class TensorCopy(NamedTuple):
    """The copy that one tensor map describes; dimensions are listed innermost first."""

    field: str  #: of the parameter struct
    operand: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]  #: in elements, of all but the innermost dimension
    box: tuple[int, ...]
    promotion: int = 256  #: bytes that an L2 miss reads: 64, 128 or 256


#: Queries, keys, values and the result. Keys and values are pages; ragged ones are a single page.
ATTENTION_OPERANDS = (
    Operand("q", ("nnz_qo", "num_qo_heads", "head_dim_qk"), "q"),
    Operand("k", ("num_pages", "page_size", "num_kv_heads", "head_dim_qk"), "kv"),
    Operand("v", ("num_pages", "page_size", "num_kv_heads", "head_dim_vo"), "kv"),
    Operand("o", ("nnz_qo", "num_qo_heads", "head_dim_vo"), "o"),
)

#: Further operands if the keys of a cascade's shared levels are in separate tensors.
PREFIX_OPERANDS = (
    Operand("k_prefix", ("nnz_prefix", "num_kv_heads", "head_dim_qk"), "kv"),
    Operand("v_prefix", ("nnz_prefix", "num_kv_heads", "head_dim_vo"), "kv"),
)

#: Latent attention (MLA) has one head of keys, [ckv, kpe]; ckv, the latent, is also the value. The first four operands
#: have the places of ATTENTION_OPERANDS: k is kpe, v is the latent.
MLA_OPERANDS = (
    Operand("q_pe", ("nnz_qo", "num_qo_heads", "head_dim_kpe"), "q"),
    Operand("kpe_cache", ("num_pages", "page_size", "num_kv_heads", "head_dim_kpe"), "kpe"),
    Operand("ckv_cache", ("num_pages", "page_size", "num_kv_heads", "head_dim_vo"), "kv"),
    Operand("o", ("nnz_qo", "num_qo_heads", "head_dim_vo"), "o"),
    Operand("q_nope", ("nnz_qo", "num_qo_heads", "head_dim_vo"), "q"),
)

#: Dims of a latent with a common scale in FlashMLA's rows of 656 bytes.
TILE_DIMS = 128
_CKV_SCALES = Operand("ckv_scales", ("num_pages", "page_size", "num_kv_heads", "num_tile_scales"), "fp32")
#: MLA_OPERANDS with such scales, for kernels that take 8-bit latents.
SCALED_MLA_OPERANDS = tuple(
    operand._replace(scales=_CKV_SCALES) if operand.name == "ckv_cache" else operand for operand in MLA_OPERANDS
)


def blocks_of(operands: Sequence[Operand]) -> tuple[tuple[Operand, ...], ...]:
    """Divides operands into those of AttentionParams, the others, and the scales of all; empty blocks are left out."""
    scales = tuple(operand.scales for operand in operands if operand.scales is not None)
    count = len(ATTENTION_OPERANDS)
    return tuple(filter(None, (tuple(operands[:count]), tuple(operands[count:]), scales)))


def operand_fields(operands: Sequence[Operand]) -> tuple[tuple[str, Any], ...]:
    """The block of a parameter struct that holds these operands."""
    strides = (name for operand in operands for name in operand.strides)
    return (*((operand.name, c_void_p) for operand in operands), *((name, c_int64) for name in strides))
