"""The vocabulary that every floor shares: number types, masks, layouts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.errors import ValidationError

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
_BY_NAME = {name: d for d in DTYPES for name in (d.slug, d.torch_name, f"torch.{d.torch_name}")}
_BY_NAME |= {"half": _BY_NAME["fp16"], "float": _BY_NAME["fp32"]}


def dtype_of(value: Any, name: str) -> DType:
    """The DType that `value` (a torch dtype or one of its spellings) names; `name` is the argument's."""
    if isinstance(value, DType):
        return value
    found = _BY_NAME.get(str(value))
    if found is None:
        known = ", ".join(d.torch_name for d in DTYPES)
        raise ValidationError(f"{name}: expected one of {known}, got {value!r}.")
    return found


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
