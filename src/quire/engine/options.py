"""The options of plan() that do not depend on the batch: checked and translated once for equal arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch

from quire.engine.checks import check_positive, scalar
from quire.errors import ValidationError
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import TILE_DIMS
from quire.kernels.types import DType, PosEncodingMode, dtype_of

_Returned = TypeVar("_Returned")
USUAL_ROPE = {"rope_scale": 1.0, "rope_theta": 1e4}  #: where None is given; a call that rotates nothing may say so
_PLAIN = frozenset({int, float, str, bool, type(None), torch.dtype})


def memoised(function: Callable[..., _Returned]) -> Callable[..., _Returned]:
    """`function`, called once for equal plain values, because a server plans every batch with the same options.

    It is called each time if an argument is not a plain value, such as a tensor, which may change in place.
    """

    @lru_cache(maxsize=1024, typed=True)  # True is not 1
    def once(*arguments: Any) -> _Returned:
        if not all(type(argument) in _PLAIN for argument in arguments):
            raise _NotPlain
        return function(*arguments)

    @wraps(function)
    def call(*arguments: Any) -> _Returned:
        try:
            return once(*arguments)
        except (TypeError, _NotPlain):  # the first: not hashable
            return function(*arguments)

    return call


class _NotPlain(Exception):
    pass


class Types(NamedTuple):
    """The data types of q as kernels read it, of keys and values, and of the output."""

    q: DType
    kv: DType
    o: DType
    given: DType | None = None  #: of q, where it has 8 bits and is widened before a kernel reads it

    @classmethod
    def of(
        cls, q: Any, kv: Any, o: Any, names: tuple[str, str, str] = ("q_data_type", "kv_data_type", "o_data_type")
    ) -> Types:
        """From any spelling; kv and o default to q's, o to fp16 if q has 8 bits. names: of the caller's arguments."""
        q_type = dtype_of(q, names[0])
        kv_type = q_type if kv is None else dtype_of(kv, names[1])
        o_type = None if o is None else dtype_of(o, names[2])
        if q_type.bits > 8:
            return cls(q_type, kv_type, o_type or q_type)
        wide = kv_type if kv_type.bits > 8 else o_type or dtype_of("float16", names[2])
        return cls(wide, kv_type, o_type or wide, q_type)

    @property
    def as_given(self) -> Types:
        """The types for a kernel that reads 8-bit queries as they are."""
        return self if self.given is None else Types(self.given, self.kv, self.o)


class LogitsOptions(NamedTuple):
    """The run-time values that change logits."""

    sm_scale: float
    window_left: int  #: -1: none
    logits_soft_cap: float  #: 0: none
    pos_encoding: PosEncodingMode = PosEncodingMode.NONE
    rope_scale: float = 0.0  #: positions are divided by it; 0 without RoPE
    rope_theta: float = 0.0
    chunked: bool = False  #: no key before the query's own chunk of window_left + 1 keys, in place of a sliding window

    @property
    def attention_chunk_size(self) -> int | None:
        """attention_chunk_size as given to plan()."""
        return self.window_left + 1 if self.chunked else None

    def has_same_kernel(self, other: LogitsOptions) -> bool:
        """Whether they differ only in parameters of each launch."""
        same_cap = (self.logits_soft_cap > 0) == (other.logits_soft_cap > 0)
        same_numbers = self._replace(sm_scale=other.sm_scale, logits_soft_cap=other.logits_soft_cap) == other
        return same_cap and same_numbers  # all other numbers are planned


class PlanOptions(NamedTuple):
    """All options of a plan except its batch. They contain no tensor, so that they can be dictionary keys."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    types: Types
    logits: LogitsOptions
    causal: bool
    page_size: int  #: 0: ragged
    fixed_split_size: int = 0  #: 0 automatic, -1 never split, else tokens
    is_mla: bool = False  #: head_dim_vo dims of each key are its value, too
    variant: Variant | None = None  #: of the caller's own
    cascade: bool = False  #: the batch is a tree of shared keys
    prefix: bool = False  #: with cascade: the keys of shared levels lie in tensors of their own
    tile_scales: bool = False  #: with is_mla: each 128 dims of a latent have a scale, and kpe is in q's type
    timed: bool = False  #: its kernel notes when it computes what, for pictures
    sms: int = 0  #: SMs of the GPU that its CTAs fill, beside another launch; 0: all

    @property
    def group_size(self) -> int:
        """Query heads of a kv head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def head_dim_kpe(self) -> int:
        """With is_mla: the dims of a key that are not part of its value."""
        return self.head_dim_qk - self.head_dim_vo

    @property
    def num_tile_scales(self) -> int:
        """With tile_scales: scales of a latent."""
        return self.head_dim_vo // TILE_DIMS


def heads(num_qo_heads: Any, num_kv_heads: Any) -> tuple[int, int]:
    """Both head counts; the first must be a multiple of the second."""
    qo, kv = check_positive(num_qo_heads, "num_qo_heads"), check_positive(num_kv_heads, "num_kv_heads")
    if qo % kv:
        raise ValidationError(f"num_qo_heads: expected a multiple of num_kv_heads={kv}, got {qo}.")
    return qo, kv


def split_size(fixed_split_size: int | None, disable_split_kv: bool) -> int:
    """The two options of batch invariance as one number: tokens of a split, 0: automatic, -1: never split."""
    if fixed_split_size is None or (isinstance(fixed_split_size, int) and fixed_split_size in (-1, 0)):
        size = 0
    else:
        size = check_positive(fixed_split_size, "fixed_split_size")
    return -1 if disable_split_kv else size


@memoised
def logits_options(
    head_dim_qk: int, sm_scale: float | None, window_left: int, logits_soft_cap: float | None, pos_encoding_mode: str,
    rope_scale: float | None = None, rope_theta: float | None = None, attention_chunk_size: int | None = None,
) -> LogitsOptions:  # fmt: skip
    """The options of logits given to plan(); sm_scale defaults to 1 / sqrt(head_dim_qk)."""
    pos_encoding = PosEncodingMode.of(pos_encoding_mode)
    scale = 1.0 / math.sqrt(max(1, head_dim_qk)) if sm_scale is None else scalar(sm_scale, "sm_scale", positive=True)
    cap = 0.0 if logits_soft_cap is None else scalar(logits_soft_cap, "logits_soft_cap")
    if cap < 0:
        raise ValidationError(f"logits_soft_cap: expected a positive number, or None or 0 for none, got {cap}.")
    if cap:
        scalar(scale / cap, "sm_scale / logits_soft_cap", positive=True)
    if isinstance(window_left, bool) or not isinstance(window_left, int) or not -1 <= window_left < 2**31:
        raise ValidationError(
            f"window_left: expected -1 (none) or the number of keys to the left, got {window_left!r}."
        )
    chunked = attention_chunk_size is not None
    if attention_chunk_size is not None:
        window_left = _chunk(attention_chunk_size, window_left)
    return LogitsOptions(scale, window_left, cap, pos_encoding, *_rope(pos_encoding, rope_scale, rope_theta), chunked)


def _chunk(attention_chunk_size: int, window_left: int) -> int:
    """The largest number of keys to the left that a query sees in its chunk."""
    if window_left != -1:
        raise ValidationError(
            f"attention_chunk_size: expected None beside window_left={window_left}, got {attention_chunk_size}; "
            "a query sees a window or its chunk."
        )
    return check_positive(attention_chunk_size, "attention_chunk_size") - 1


def _rope(mode: PosEncodingMode, rope_scale: float | None, rope_theta: float | None) -> tuple[float, float]:
    """Both numbers of rotary embeddings, 0 where there are none."""
    if mode is PosEncodingMode.ROPE_LLAMA:
        theta = USUAL_ROPE["rope_theta"] if rope_theta is None else scalar(rope_theta, "rope_theta", positive=True)
        return scalar(rope_scale, "rope_scale", positive=True), theta
    for name, value in (("rope_scale", rope_scale), ("rope_theta", rope_theta)):
        if value is not None and scalar(value, name) != USUAL_ROPE[name]:
            raise ValidationError(f"{name}: expected None without pos_encoding_mode='ROPE_LLAMA', got {value!r}.")
    return 0.0, 0.0
