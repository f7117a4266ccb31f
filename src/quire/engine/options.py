"""The options of plan() that do not depend on the batch, and what becomes of options that Quire does not use.

Options are checked and translated once for equal arguments. Each function declares which arguments of FlashInfer's
surface it refuses, and which have no effect:

    @foreign(refused="o_scale", permissions="non_blocking", older_names={"workspace_buffer": "float_workspace_buffer"})

The function itself does not mention them again. tests/surface.py writes the declarations into docs/surface.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, wraps
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch

from quire.engine.checks import (
    check_flags,
    check_positive,
    check_tensor,
    not_negative,
    number,
    reason_of,
    refuse,
    scalar,
)
from quire.errors import UnsupportedError, ValidationError, explain, explains
from quire.jit import config
from quire.kernels.attention import OWN_SPLITS
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import SCALED_NUMBERS, TILE_DIMS, DType, PosEncodingMode, dtype_of, kv_dtype_of

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


def options_of(
    plan: Callable[..., None], read: Callable[..., PlanOptions] | None = None, also: str = ""
) -> Callable[[Mapping[str, Any]], PlanOptions]:
    """The function that reads the options of `plan` from its arguments by name, `locals()`, once for equal values.

    read: what makes options of those arguments that both it and `plan` name, or `also`; None: plan_options().
    """
    function, arguments = read or plan_options, {*inspect.signature(plan).parameters, *also.split()}
    names = tuple(name for name in inspect.signature(function).parameters if name in arguments)
    take, once = itemgetter(*names), memoised(lambda *values: function(**dict(zip(names, values, strict=True))))
    return lambda given: once(*take(given))


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
        kv_type = q_type if kv is None else kv_dtype_of(kv, names[1])
        o_type = None if o is None else dtype_of(o, names[2])
        if q_type.bits > 8:
            return cls(q_type, kv_type, o_type or q_type)
        wide = kv_type if kv_type.bits > 8 else o_type or dtype_of("float16", names[2])
        return cls(wide, kv_type, o_type or wide, q_type)

    @property
    def without_upcast(self) -> Types:
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
    fixed_split_size: int = 0  #: 0 automatic, -1 never split, OWN_SPLITS, else tokens
    is_mla: bool = False  #: head_dim_vo dims of each key are its value, too
    variant: Variant | None = None  #: of the caller's own
    cascade: bool = False  #: the batch is a tree of shared keys
    prefix: bool = False  #: with cascade: the keys of shared levels lie in tensors of their own
    tile_scales: bool = False  #: with is_mla: each 128 dims of a latent have a scale, and kpe is in q's type
    timed: bool = False  #: its kernel notes when it computes what, for pictures
    sms: int = 0  #: SMs of the GPU that its CTAs fill, beside another launch; 0: all
    #: With is_mla and page_size 1: tokens of a page of the cache. Pages of the batch are then tokens, page number *
    #: cache_page + index in the page.
    cache_page: int = 1
    max_logits: bool = False  #: with is_mla or on a CPU: lse has, behind the lse of a row, the maximum of its logits
    #: Each call gives every request as many rows: steps of decode. Otherwise the rows of a request may be divided into
    #: calls in any way, as the chunks of a prompt are, and must not decide anything where splits are fixed.
    decodes: bool = False
    deterministic: bool | None = None  #: bits of a request depend on it alone; None: as the environment says

    def settled(self) -> PlanOptions:
        """The same with `deterministic` decided, and splits that keep the promise unless the caller gave others."""
        if not is_deterministic(self.deterministic):
            return self
        size, window = self.fixed_split_size, self.logits.window_left
        if 0 < size < window and not self.decodes:
            raise ValidationError(
                f"fixed_split_size: expected at least window_left={window} keys beside deterministic=True, or None, "
                f"got {size}: a window over three splits is summed in an order that depends on the chunks of a prompt."
            )
        return self._replace(deterministic=True, fixed_split_size=size or OWN_SPLITS)

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

    @property
    def num_k_scales(self) -> int:
        """Of keys of 4 bits: scales of a key."""
        return self.head_dim_qk // SCALED_NUMBERS

    @property
    def num_v_scales(self) -> int:
        """Of values of 4 bits: scales of a value."""
        return self.head_dim_vo // SCALED_NUMBERS


def heads(num_qo_heads: Any, num_kv_heads: Any) -> tuple[int, int]:
    """Both head counts; the first must be a multiple of the second."""
    qo, kv = check_positive(num_qo_heads, "num_qo_heads"), check_positive(num_kv_heads, "num_kv_heads")
    if qo % kv:
        raise ValidationError(
            f"num_qo_heads: expected a multiple of num_kv_heads={kv}, got {qo}. Tensors are [tokens, heads, head_dim]: "
            "q.transpose(0, 1) makes one of [heads, tokens, head_dim], and keys and values may be kv_layout='HND'."
        )
    return qo, kv


def is_deterministic(given: bool | None) -> bool:
    """What a caller said or, if nothing, what the environment says."""
    if given is None:
        return not config.says_nothing_of_results() and config.is_deterministic()
    return given


def refuse_parts(name: str, deterministic: bool | None, instead: str) -> None:
    """UnsupportedError if a deterministic call would sum parts of a request's keys that other calls sum as one."""
    if is_deterministic(deterministic):
        raise UnsupportedError(
            f"{name}: expected no deterministic=True (or QUIRE_DETERMINISTIC=1, or an engine's switch): it attends to "
            f"parts of the keys and adds the results, whose bits are not those of one attention; {instead}."
        )


_ABSENT: Any = object()  #: of an argument that plan() does not have


def plan_options(
    num_qo_heads: int, num_kv_heads: int, head_dim_qk: int | None = None, head_dim_vo: int | None = None,
    head_dim: int | None = None, page_size: Any = _ABSENT, q_data_type: Any = "float16", kv_data_type: Any = None,
    o_data_type: Any = None, data_type: Any = _ABSENT, causal: bool = False, q_len_per_req: Any = _ABSENT,
    pos_encoding_mode: str = "NONE", sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, rope_scale: float | None = None, rope_theta: float | None = None,
    attention_chunk_size: int | None = None, fixed_split_size: int | None = None, disable_split_kv: bool = False,
) -> PlanOptions:  # fmt: skip
    """The options of plan(), whose arguments these are. Without page_size: ragged; q_len_per_req decides `causal`."""
    check_flags(causal=causal, disable_split_kv=disable_split_kv)
    qo, kv = heads(num_qo_heads, num_kv_heads)
    qk, vo = _head_dims(head_dim_qk, head_dim_vo, head_dim)
    if data_type is not _ABSENT:
        q_data_type, kv_data_type = q_data_type or data_type or "float16", kv_data_type or data_type
    if q_len_per_req is not _ABSENT:
        causal = check_positive(q_len_per_req, "q_len_per_req") > 1
    logits = logits_options(
        qk, sm_scale, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, attention_chunk_size
    )
    return PlanOptions(
        qo, kv, qk, vo, Types.of(q_data_type, kv_data_type, o_data_type), logits, causal,
        0 if page_size is _ABSENT else check_positive(page_size, "page_size"),
        split_size(fixed_split_size, disable_split_kv), decodes=q_len_per_req is not _ABSENT,
    )  # fmt: skip


def _head_dims(head_dim_qk: int | None, head_dim_vo: int | None, head_dim: int | None) -> tuple[int, int]:
    """head_dim_qk and head_dim_vo; `head_dim` is a name for both."""
    if (head_dim_qk is None) == (head_dim is None):
        raise ValidationError(f"head_dim_qk: expected it or head_dim, got {head_dim_qk} and {head_dim}.")
    name, dim = ("head_dim", head_dim) if head_dim_qk is None else ("head_dim_qk", head_dim_qk)
    qk = check_positive(dim, name)
    return qk, qk if head_dim_vo is None else check_positive(head_dim_vo, "head_dim_vo")


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


# --- arguments that Quire does not use -------------------------------------------------------------------------------


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Check = Callable[[Any, str], Any]


def _flag(value: Any, name: str) -> None:
    check_flags(**{name: value})


def _default(default: Any, value: Any, name: str) -> None:
    """Refuse anything else; None and False say the same as a default that permits nothing."""
    if value is default or (type(value) is type(default) and value == default):
        return
    if default is True or (value is not None and value is not False):
        refuse(default, **{name: value})


def _no_position(value: Any, name: str) -> None:
    """Refuse positions; a call that rotates nothing may give the scale and the theta that are usual."""
    if value is not None and scalar(value, name) != USUAL_ROPE[name]:
        refuse(**{name: value})


def _unless_none(check: _Check) -> _Check:
    return lambda value, name: None if value is None else check(value, name)


def _one_of(*words: str | None) -> _Check:
    def check(value: Any, name: str) -> None:
        if not any(value is word or (isinstance(value, str) and value == word) for word in words):
            raise ValidationError(f"{name}: expected one of {', '.join(map(repr, words))}, got {value!r}.")

    return check


#: Why permissions have no effect: how they are checked, and their names.
_PERMISSIONS: Mapping[str, tuple[_Check, tuple[str, ...]]] = {
    "logits are accumulated in float32": (_flag, ("use_fp16_qk_reduction", "allow_fp16_qk_reduction")),
    "softmax is in float32": (_flag, ("use_fp16_softmax",)),
    "plan() does not wait for uploads": (_flag, ("non_blocking",)),
    "every kernel for GPUs uses tensor cores": (_flag, ("use_tensor_cores",)),
    "each call may be captured, or says why not": (_flag, ("is_cuda_graph_compatible",)),
    "the one query of a request sees all of its keys": (_flag, ("causal_d",)),
    "lengths may always differ": (_flag, ("is_var_seq",)),
    "exact results are always allowed": (_unless_none(not_negative), ("skip_softmax_threshold_scale_factor",)),
    "all weights are computed": (_flag, ("skip_softmax",)),
    "results of 16 bits have no scales of blocks": (_unless_none(number), ("o_sf_scale",)),
    "kernels count in memory of the plan": (_unless_none(check_tensor), ("multi_ctas_kv_counter_buffer",)),
    "a hint for FlashInfer's kernels": (_unless_none(check_positive), ("uniform_q_len",)),
    "FlashInfer's kernels differ, Quire has one": (_one_of("auto", "modular", "monolithic"), ("cute_dsl_impl",)),
    "scales may be any numbers": (_one_of("auto", "pow2_fp32", "arbitrary_fp32"), ("kv_scale_format",)),
    "the launch is like any other": (_flag, ("enable_pdl",)),
    "both run the same kernel": (_one_of("cuda", "cutile"), ("backend",)),
    "run() takes both": (_one_of(None, "packed", "split"), ("query_layout", "kv_cache_layout")),
}
_PERMISSION_OF = {name: (check, why) for why, (check, names) in _PERMISSIONS.items() for name in names}


class Policy(NamedTuple):
    """What becomes of the foreign arguments of a function."""

    refused: Mapping[str, str]  #: argument -> why
    permissions: Mapping[str, str]  #: argument -> why it has no effect
    older_names: Mapping[str, str]  #: older name -> name


def foreign(
    refused: str = "", permissions: str = "", older_names: Mapping[str, str] | None = None, added: str = "",
    checks_itself: bool = False,
) -> Callable[[_Function], _Function]:  # fmt: skip
    """Declares arguments of a function, whose body then need not mention them.

    refused: names of arguments that must have their default. permissions: of those that are checked and have no effect,
        see _PERMISSIONS. older_names: older names of keywords, and the names that replaced them.
    added: two arguments that plan() did not have in its older order. A tensor in the place of the first, or a bool two
        places later, shows that the caller uses that order.
    checks_itself: the function calls refuse(); for run() of wrappers, where a call in between is felt.
    """
    permitted, renamed = {name: _PERMISSION_OF[name] for name in permissions.split()}, dict(older_names or {})
    reasons = {name: reason_of(name) for name in refused.split()}
    policy = Policy(reasons, {name: why for name, (_, why) in permitted.items()}, renamed)

    def decorate(function: _Function) -> _Function:
        function.policy = policy  # type: ignore[attr-defined]
        if checks_itself:
            return function
        parameters = inspect.signature(function).parameters
        places = {name: i for i, name in enumerate(parameters)}
        checks: dict[str, _Check] = {name: check for name, (check, _) in permitted.items()}
        for name in reasons:
            checks[name] = _no_position if name in USUAL_ROPE else partial(_default, parameters[name].default)
        inserted, names = [places[name] for name in added.split()], frozenset((*checks, *renamed))
        first = min([*(places[name] for name in checks), *inserted], default=len(places))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > first or (kwargs and not names.isdisjoint(kwargs)):  # some of them may be there
                args, kwargs = _in_newer_order(args, inserted), _by_newer_names(kwargs, renamed)
                for name, check in checks.items():
                    if name in kwargs:
                        check(kwargs[name], name)
                    elif places[name] < len(args):
                        check(args[places[name]], name)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                explain(error, function, args, kwargs)
                raise

        decorated: _Function = explains(call)
        return decorated

    return decorate


def _in_newer_order(args: tuple[Any, ...], inserted: list[int]) -> tuple[Any, ...]:
    """Arguments by position, with None for those that the older order of plan() does not have."""
    rest = args[inserted[0] :] if inserted else ()
    if rest and (isinstance(rest[0], torch.Tensor) or (len(rest) > 2 and isinstance(rest[2], bool))):
        for place in inserted:
            if len(args) > place:
                args = (*args[:place], None, *args[place:])
    return args


def _by_newer_names(kwargs: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Keywords by the names of the signature."""
    for older, name in renamed.items():
        if older in kwargs and name in kwargs:
            raise ValidationError(f"{older}: expected it or {name}, got both.")
    return {renamed.get(name, name): value for name, value in kwargs.items()}
