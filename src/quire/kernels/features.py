"""Number types, masks and layouts; the fields that select a variant, and the operands of kernels: one row each.

A row is a field of `Features`: its name and type, its members of Variant in C++, and its spelling. Problems and keys
inherit the fields. Slugs and their parser, the constants of the rendered unit, the words of `quire warmup --mask` and
messages are generated from the rows, so a new feature needs only one more row.

The checks of run(), the strides in the parameter struct and the places of addresses follow from the declarations. A
block of the struct, made by `operand_fields`, has the addresses of some operands followed by their strides.
AttentionParams begins with the block of ATTENTION_OPERANDS. A kernel with more operands, or with scales, has its own
struct, in which `base` is followed by a block of the other operands, and by one of scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, c_int64, c_uint64, c_void_p, memmove, sizeof
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum, IntEnum
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from quire.errors import UnsupportedArgumentError, ValidationError
from quire.kernels.expressions.variant import Variant, find_variant

if TYPE_CHECKING:
    from torch import dtype as TorchDType


@dataclass(frozen=True, eq=False)  # rows of DTYPES are compared and hashed by identity, which costs nothing
class DType:
    """A number type: its names in torch, in C++ and in slugs, its size, and what tensor maps call it."""

    torch_name: str
    cxx: str
    slug: str
    bits: int
    tensor_map: str  #: the element type that describes it to Hopper's copy engine (TMA)

    @cached_property
    def torch(self) -> TorchDType:
        """torch's object for it. Only this needs torch: the catalogue and the command line do without."""
        import torch

        found: TorchDType = getattr(torch, self.torch_name)
        return found

    def __str__(self) -> str:
        return self.slug


DTYPES: tuple[DType, ...] = (
    DType("float32", "float", "fp32", 32, "f32"),
    DType("float16", "fp16_t", "fp16", 16, "f16"),
    DType("bfloat16", "bf16_t", "bf16", 16, "bf16"),
    DType("float8_e4m3fn", "e4m3_t", "e4m3", 8, "u8"),
    DType("float8_e5m2", "e5m2_t", "e5m2", 8, "u8"),
)
#: Numbers of 4 bits (E2M1), two a byte of the tensor, with a scale in e4m3 for each SCALED_NUMBERS of a row. Only keys
#: and values have them.
NVFP4 = DType("uint8", "e2m1x2_t", "nvfp4", 4, "u8")
KV_DTYPES = (*DTYPES, NVFP4)
#: Neighbouring numbers of a row that have one scale: kScaledNumbers in core/types.h.
SCALED_NUMBERS = 16
_BY_NAME = {name: d for d in DTYPES for name in (d.slug, d.torch_name, f"torch.{d.torch_name}")}
_BY_NAME |= {"half": _BY_NAME["fp16"], "float": _BY_NAME["fp32"]}
_BY_NAME |= {"fp8": _BY_NAME["e4m3"], "fp8_e4m3": _BY_NAME["e4m3"], "fp8_e5m2": _BY_NAME["e5m2"]}  # as engines say


def dtype_of(value: Any, name: str, others: str = "") -> DType:
    """The DType that `value` (a torch dtype or one of its spellings) names; `name` is the argument's. others: what it
    may also be.
    """
    if isinstance(value, DType):
        return value
    found = _BY_NAME.get(str(value))
    if found is None:
        known = ", ".join(d.torch_name for d in DTYPES) + others
        is_type = str(value).startswith("torch.")  # of numbers that no kernel reads
        kind = UnsupportedArgumentError if is_type else ValidationError
        raise kind(f"{name}: expected one of {known}, got {value!r}.")
    return found


_NVFP4_NAMES = {"nvfp4", *(f"{torch}{name}" for torch in ("", "torch.") for name in ("uint8", "float4_e2m1fn_x2"))}


def kv_dtype_of(value: Any, name: str) -> DType:
    """dtype_of() keys and values, which may be NVFP4: "nvfp4", or the torch dtypes of its bytes."""
    return NVFP4 if str(value) in _NVFP4_NAMES else dtype_of(value, name, ", fp8 (float8_e4m3fn), nvfp4")


class MaskMode(IntEnum):
    """Which keys a query sees; the numbers are Variant::kMask in C++."""

    NONE = 0
    CAUSAL = 1  #: key j is visible to query i if j <= i + kv_len - qo_len
    CUSTOM = 2  #: one bit per (query, key); replaces causal
    TREE = 3  #: one bit per (query, key among the last qo_len); all keys before those are seen
    CHUNKED = 4  #: causal, and no key before the query's own chunk of window_left + 1 keys

    @property
    def slug(self) -> str:
        return self.name.lower()


class KVLayout(Enum):
    """The order of the last three dimensions of a cache or a ragged tensor."""

    NHD = "NHD"  #: [token, head, head_dim]
    HND = "HND"  #: [head, token, head_dim]

    __hash__ = object.__hash__  # plans look things up by it, and Enum's own is a function in Python

    @classmethod
    def of(cls, value: str) -> KVLayout:
        if str(value) in cls.__members__:
            return cls[value]
        raise ValidationError(f"kv_layout: expected 'NHD' or 'HND', got {value!r}.")


class PosEncodingMode(IntEnum):
    """Position encodings that plan() can be asked for; the numbers are Variant::kPosEncoding in C++."""

    NONE = 0
    ROPE_LLAMA = 1  #: q and k are rotated by where they stand
    ALIBI = 2  #: a bias for each logit, proportional to the distance of key and query

    @classmethod
    def of(cls, value: str) -> PosEncodingMode:
        if str(value) in cls.__members__:
            return cls[value]
        raise ValidationError(f"pos_encoding_mode: expected 'NONE', 'ROPE_LLAMA' or 'ALIBI', got {value!r}.")


#: page_size of a key whose code takes pages of any size.
ANY_PAGE_SIZE = -1


@dataclass(frozen=True, eq=False)
class Feature:
    """One row: how the values of a field are spelled."""

    members: Mapping[str, Callable[[Any], int | str]]  #: of Variant in C++: an int is a constant, a string a type
    words: Mapping[str, Any]  #: values by their words; slugs leave out the value whose word is ""
    number: str = ""  #: format of any other value, a number: "d{}"; "" if there is none
    separator: str = "-"  #: the character before the word in a slug
    planned: Callable[[Any], Any] | None = None  #: value by plan options; None: the option of the same name
    name: str = ""  #: the name of the field

    def word(self, value: Any) -> str:
        """The word of `value` in slugs, without the separator."""
        by_value = {known: word for word, known in self.words.items()}
        return by_value[value] if value in by_value else self.number.format(value)

    def spell(self, value: Any) -> str:
        """The part of a slug for `value`, with its separator."""
        word = self.word(value)
        return self.separator + word if word else ""

    @property
    def pattern(self) -> str:
        """A regular expression that matches the results of spell(); its group has the field's name."""
        words = [re.escape(word) for word in self.words if word] + [self.number.format(r"\d+")] * bool(self.number)
        return f"(?:{re.escape(self.separator)}(?P<{self.name}>{'|'.join(words)})){'?' * ('' in self.words)}"

    def read(self, word: str) -> Any:
        """The value of a word that `pattern` matches."""
        return self.words[word] if word in self.words else int(re.sub(r"\D", "", word))

    def describe(self, value: Any) -> str:
        """`value` in a message."""
        if isinstance(value, bool):
            return ("no", "yes")[value]
        return self.word(value) or "none" if self.words else str(value)


@dataclass(frozen=True, eq=False)
class ExpressionFeature(Feature):
    """The row of custom variants, which are spelled as their digests."""

    def word(self, value: Variant | None) -> str:
        """ "expr" and the digest."""
        return "" if value is None else f"expr{value.digest}"

    @property
    def pattern(self) -> str:
        """A regular expression, as in other rows."""
        return f"(?:{self.separator}(?P<{self.name}>expr[0-9a-f]{{16}}))?"

    def read(self, word: str) -> Variant | None:
        """The variant of a word, which this process must know."""
        return find_variant(word.removeprefix("expr")) if word else None

    def describe(self, value: Variant | None) -> str:
        """The word of a slug, which names the custom variant in messages, too."""
        return self.word(value) or "none"


def _number_type(
    alias: str, planned: Callable[[Any], DType], separator: str = "-", dtypes: tuple[DType, ...] = DTYPES
) -> Feature:
    types = {dtype.slug: dtype for dtype in dtypes}
    return Feature({alias: lambda dtype: dtype.cxx}, types, separator=separator, planned=planned)


def _number(constant: str, number: str, separator: str = ".") -> Feature:
    return Feature({constant: int}, {}, number, separator)


def _flag(constant: str, word: str, planned: Callable[[Any], bool] | None = None) -> Feature:
    return Feature({constant: int}, {"": False, word: True}, planned=planned)


_PAGE_SIZE = Feature(
    {"kPaged": lambda size: int(size != 0), "kPageSize": lambda size: max(size, 0)},
    {"ragged": 0, "paged": ANY_PAGE_SIZE}, "paged{}", ".",
)  # fmt: skip
_POS_ENCODING = Feature(
    {"kPosEncoding": int},
    {"": PosEncodingMode.NONE, "alibi": PosEncodingMode.ALIBI, "rope": PosEncodingMode.ROPE_LLAMA},
    planned=lambda options: options.logits.pos_encoding,
)  # fmt: skip

_VARIANT = ExpressionFeature(
    {
        "kScore": lambda variant: int(variant is not None and variant.has_score),
        "kScoreMask": lambda variant: int(variant is not None and variant.has_mask),
    },
    {}, planned=lambda options: options.variant,
)  # fmt: skip


@dataclass(frozen=True)
class Features:
    """The table. Fields from `mask` on are words of the command line's --mask."""

    target: str  #: the compilation target: "sm90a", "x86-64-v4", ...
    q: Annotated[DType, _number_type("Q", lambda options: options.types.q, ".")]
    kv: Annotated[DType, _number_type("Kv", lambda options: options.types.kv, dtypes=KV_DTYPES)]
    o: Annotated[DType, _number_type("O", lambda options: options.types.o)]
    head_dim_qk: Annotated[int, _number("kHeadDimQk", "d{}")]
    head_dim_vo: Annotated[int, _number("kHeadDimVo", "{}", "-")]
    page_size: Annotated[int, _PAGE_SIZE]  #: tokens of a page; 0: ragged
    mask: Annotated[MaskMode, Feature({"kMask": int}, {mode.slug: mode for mode in MaskMode}, separator=".")]
    window: Annotated[bool, _flag("kWindow", "window", lambda options: options.logits.window_left >= 0)]
    soft_cap: Annotated[bool, _flag("kSoftCap", "cap", lambda options: options.logits.logits_soft_cap > 0)]
    _: KW_ONLY
    pos_encoding: Annotated[PosEncodingMode, _POS_ENCODING] = PosEncodingMode.NONE
    variant: Annotated[Variant | None, _VARIANT] = None  #: a custom variant
    #: the batch is a tree of shared keys: core/schedule.h
    cascade: Annotated[bool, _flag("kCascade", "cascade")] = False
    #: keys of shared levels are in separate tensors
    prefix: Annotated[bool, _flag("kPrefix", "prefix")] = False
    #: each tile of 128 dims of a latent has a scale, and kpe is in q's type (MLA): core/params.h
    tile_scales: Annotated[bool, _flag("kTileScales", "scaled")] = False
    #: the maximum of a row's logits is returned beside its lse (MLA, and on the CPU)
    max_logits: Annotated[bool, _flag("kMaxLogits", "most")] = False
    #: records when, and on which SM, each work tile was computed: tile/shared/stamps.h
    timed: Annotated[bool, _flag("kTimed", "timed")] = False

    @property
    def paged(self) -> bool:
        return self.page_size != 0

    @property
    def on_cuda(self) -> bool:
        return self.target.startswith("sm")

    @cached_property
    def has_bias(self) -> bool:
        """Whether something is added to scaled logits: ALiBi, or a custom score."""
        return self.pos_encoding is PosEncodingMode.ALIBI or (self.variant is not None and self.variant.has_score)

    def type_of(self, name: str) -> DType:
        """The number type of an operand: a feature, the type of kpe, or the slug of a type."""
        if name == "kpe":
            return self.q if self.tile_scales else self.kv
        return getattr(self, name) if name in ("q", "kv", "o") else dtype_of(name, "type")

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """(name, value) of each row, for messages."""
        return tuple((name, row.describe(getattr(self, name))) for name, row in rows_of(type(self)).items())


def rows_of(cls: type[Features]) -> dict[str, Feature]:
    """The rows of `cls`, by the names of their fields."""
    return _ROWS.get(cls) or _ROWS.setdefault(cls, _read_rows(cls))


_ROWS: dict[type[Features], dict[str, Feature]] = {}


def _read_rows(cls: type[Features]) -> dict[str, Feature]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: replace(h.__metadata__[0], name=name) for name, h in hints.items() if hasattr(h, "__metadata__")}


_NAMES = list(rows_of(Features))
#: The rows whose words `quire warmup --mask` takes.
MASK_FEATURES = tuple(rows_of(Features)[name] for name in _NAMES[_NAMES.index("mask") :] if name != "variant")


def planned_features(options: Any) -> dict[str, Any]:
    """The fields of Features that follow from plan options: all but the target and the mask."""
    return {
        name: row.planned(options) if row.planned else getattr(options, name)
        for name, row in rows_of(Features).items()
        if name != "mask"
    }


def mask_words() -> str:
    """The words that read_mask() accepts, for messages."""
    first, *rest = ([word for word in row.words if word] for row in MASK_FEATURES)
    return f"of {', '.join(first)}, with {', '.join(f'+{word}' for words in rest for word in words)}"


def read_mask(text: str) -> dict[str, Any]:
    """The fields set by words of the command line, such as "causal+window+cap"."""
    if not isinstance(text, str):
        raise ValidationError(f"mask: expected a str, one {mask_words()} as wanted; got {text!r}.")
    left, values = text.lower().split("+"), {}
    for row in MASK_FEATURES:
        word = next((word for word in left if word and word in row.words), "")
        left = [other for other in left if not word or other != word]
        values[row.name] = row.words.get(word)
    if left or None in values.values():
        raise ValidationError(f"mask: expected one {mask_words()} as wanted; got {text!r}.")
    return values


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

_SF_DIMS = ("num_pages", "page_size", "num_kv_heads")
_SCALES = {
    "k": Operand("k_sf", (*_SF_DIMS, "num_k_scales"), "e4m3"), "v": Operand("v_sf", (*_SF_DIMS, "num_v_scales"), "e4m3")
}  # fmt: skip
#: The same with the scales of keys and values of 4 bits.
SCALED_OPERANDS = tuple(operand._replace(scales=_SCALES.get(operand.name)) for operand in ATTENTION_OPERANDS)

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
