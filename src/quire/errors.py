"""What Quire raises.

QuireError
├── ValidationError (also ValueError)        an argument has a wrong type, shape, dtype, device or value
├── UnsupportedError (also NotImplementedError)  no kernel takes this problem; carries each kernel's reason
│   └── UnsupportedArgumentError (also ValidationError)  an argument of another library that Quire has no use for
├── PlanError (also RuntimeError)            run() before plan(), or a plan used where it cannot be
├── CompileError (also RuntimeError)         a compiler was missing or failed; carries its log
├── CacheMissError (also RuntimeError)       compiling is denied and the variant is not in any store
├── CacheError (also RuntimeError)           a store could not be read or written, or must not be trusted
├── RankError (also RuntimeError)            another rank of a process group failed, or did not answer in time
└── DriverError (also RuntimeError)          the CUDA driver refused a call
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from functools import wraps
from types import FrameType, FunctionType
from typing import Any

__all__ = [
    "CacheError", "CacheMissError", "CompileError", "DriverError", "PlanError", "QuireError", "RankError",
    "UnsupportedArgumentError", "UnsupportedError", "ValidationError",
]  # fmt: skip


class QuireError(Exception):
    """Base of everything that Quire raises on purpose. A traceback names the section of docs/troubleshooting.md."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if sys.version_info >= (3, 11):
            self.add_note(f"See docs/troubleshooting.md#{type(self).__name__.lower()}")


class ValidationError(QuireError, ValueError):
    """An argument is wrong: says which, what was expected and what was passed."""


class UnsupportedError(QuireError, NotImplementedError):
    """No kernel accepts the problem: lists each kernel's reason."""


class UnsupportedArgumentError(ValidationError, UnsupportedError):
    """An argument that another library uses and Quire does not: says which and why. Where FlashInfer is installed,
    quire.compat.flashinfer hands such a call to it.
    """


class PlanError(QuireError, RuntimeError):
    """A wrapper was used out of order."""


class CompileError(QuireError, RuntimeError):
    """A compiler is missing or failed: the first error line, then the path of the whole log."""


class CacheMissError(QuireError, RuntimeError):
    """Compiling is denied (QUIRE_JIT=deny) and no store holds the variant: names the command that builds it."""


class CacheError(QuireError, RuntimeError):
    """A store is unusable or holds something that must not be loaded."""


class RankError(QuireError, RuntimeError):
    """A rank of a process group failed or did not answer in time: names it, and carries torch.distributed's error."""


class DriverError(QuireError, RuntimeError):
    """The CUDA driver returned an error: names the call and the error."""


# --- keywords --------------------------------------------------------------------------------------------------------


#: Words for the same argument, here and in other libraries.
_SAME = (
    ("causal", "is_causal", "casual"), ("sm_scale", "softmax_scale", "scale", "scaling", "bmm1_scale"),
    ("custom_mask", "attn_mask", "attention_mask", "mask"),
    ("window_left", "causal_window_left", "window_size", "sliding_window", "window"),
    ("logits_soft_cap", "softcap", "soft_cap", "logit_cap", "attn_logit_softcapping"),
    ("kv_data_type", "kv_dtype", "kv_cache_dtype", "cache_dtype"), ("q_data_type", "q_dtype", "dtype", "data_type"),
    ("o_data_type", "out_dtype", "o_dtype"), ("return_lse", "return_softmax_lse", "return_attn_probs"),
    ("num_qo_heads", "num_heads", "num_heads_q", "num_q_heads"), ("num_kv_heads", "num_heads_k", "num_key_value_heads"),
    ("kv_layout", "layout", "tensor_layout"), ("qo_indptr", "cu_seqlens_q", "cum_seq_lens_q"),
    ("sinks", "s_aux", "sink", "attn_sink", "attention_sinks"),
    ("kv_indptr", "paged_kv_indptr", "indptr", "cu_seqlens_k", "cum_seq_lens_kv"), ("k_scale", "k_descale"),
    ("kv_indices", "paged_kv_indices", "indices"), ("kv_last_page_len", "paged_kv_last_page_len", "last_page_len"),
    ("v_scale", "v_descale"), ("q_scale", "q_descale"), ("page_size", "block_size", "page_block_size"),
    ("float_workspace_buffer", "workspace_buffer", "workspace"), ("block_table", "block_tables", "page_table"),
    ("seq_lens", "cache_seqlens", "seqused_k", "kv_lens"), ("head_dim_qk", "head_dim", "head_size"),
    ("q_len_per_req", "seqlen_q", "max_seqlen_q"), ("out", "output"),
    ("q", "query", "queries"), ("k", "key", "append_key", "keys", "k_rope"), ("v", "value", "append_value", "values"),
    ("paged_kv_cache", "kv_cache", "cache"), ("append_ckv", "ckv", "kv_c"), ("append_kpe", "kpe", "k_pe"),
    ("rope_theta", "rope_base", "theta", "base", "rotary_emb_base"), ("rope_scale", "scaling_factor", "rope_factor"),
    ("pos_ids", "position_ids", "positions"), ("rotary_dim", "rope_dim", "rotary_embedding_dim"),
    ("interleave", "interleaved", "rotary_interleaved"), ("is_neox", "is_neox_style"),
    ("cos_sin_cache", "cos_sin", "rotary_cos_sin"), ("old_context_len", "original_max_position_embeddings"),
    ("group", "process_group", "cp_group"),
)  # fmt: skip
_OF_FLEX = "quire.flex_attention() takes it; other calls take variant=quire.Variant(score=..., mask=...)"
_OF_TABLES = "here {0} has the pages of all requests; quire.trtllm_batch_decode_with_kv_cache() takes a table"
_OF_TOKENS = "quire.get_batch_indices_positions() makes batch_indices and positions, which say where tokens go"
_BLOCK_MASK = "write it as a mask_mod: block_mask=torch.nn.attention.flex_attention.create_block_mask(mask_mod, ...)"
_SCORE_MOD = "write it into score_mod"
_OPPOSITE = "write {0}=not {1} here"
#: Words for which a call has no argument; an argument that the call has, if the advice depends on it; and the advice.
_INSTEAD = (
    *((name, "block_mask", _BLOCK_MASK) for name in ("causal", "attn_mask", "custom_mask", "mask_mod", "window_left")),
    *((name, "score_mod", _SCORE_MOD) for name in ("logits_soft_cap", "alibi_slopes", "bias")),
    ("is_neox", "interleave", _OPPOSITE),
    ("interleave", "is_neox", _OPPOSITE),
    ("slot_mapping", "batch_indices", _OF_TOKENS),
    ("block_table", "kv_indices", _OF_TABLES),
    *(("kv_data_type", cache, "leave it out: {0} has this type") for cache in ("paged_kv_cache", "k")),
    ("cos_sin_cache", "rope_theta", "quire.apply_rope_with_cos_sin_cache() takes it"),
    *((name, "", _OF_FLEX) for name in ("score_mod", "mask_mod", "block_mask")),
    *((name, "", "a bias of logits is a variant: variant=quire.Variant(score=...)") for name in ("bias", "attn_bias")),
    *((name, "", "leave it out: Quire is for inference only") for name in ("dropout_p", "dropout")),
    ("enable_gqa", "", "leave it out: query heads share KV heads wherever there are fewer of these"),
    ("alibi_slopes", "", "pos_encoding_mode='ALIBI' has the paper's slopes, others are for quire.compat.flash_attn"),
)
_OTHER_CALL = {"plan": "run", "run": "plan"}
_MOST_NAMES = 20  #: that a message lists


def unexpected_keyword(
    call: str, name: str, names: Iterable[str] | None = None, others: Iterable[str] = (), operands: Iterable[str] = ()
) -> TypeError:
    """Python's error for a keyword that a call does not take, with the word to write.

    names: those that the call takes, by default of the function `call` that is being called. others: of plan(), if
    the call is run(), and the reverse. operands: what it takes of a variant.
    """
    known, others = _arguments_of(call) if names is None else (tuple(names), tuple(others))
    known = (*known, *operands)
    return TypeError(f"{call}() got an unexpected keyword argument {name!r}; {_advice(call, name, known, others)}")


def _advice(call: str, name: str, known: tuple[str, ...], others: tuple[str, ...]) -> str:
    """What to write instead of a keyword."""
    if word := _same(name, known):
        return f"write {word}=... here"
    if word := _same(name, others):
        return f"it is {word}=... of {_OTHER_CALL[call]}()"
    for unknown, needed, advice in _INSTEAD:
        here = _same(needed, known)
        if name in _words(unknown) and (here or not needed):
            return advice.format(here, name)
    if close := get_close_matches(name, known, 1, 0.7):
        return f"did you mean {close[0]}?"
    if len(known) > _MOST_NAMES:
        return f"help() of it shows the {len(known)} that it takes"
    return f"expected one of {', '.join(known)}" if known else "it takes none"


def _words(name: str) -> tuple[str, ...]:
    """A word, and those for the same argument."""
    return (name, *(word for group in _SAME if name in group for word in group))


def _same(name: str, known: tuple[str, ...]) -> str:
    """The one of `known` that is the same argument; "" if none is."""
    return next((word for word in _words(name) if word in known), "")


def teach(namespace: dict[str, Any], names: Iterable[str]) -> None:
    """Have calls of these callables say what to write in place of an unknown keyword.

    Functions that take any keyword, such as operands of a variant, say it themselves.
    """
    for name in names:
        value = namespace[name]
        if isinstance(value, FunctionType):
            namespace[name] = _taught(value)
        elif isinstance(value, type) and not issubclass(value, BaseException):
            for owner in value.__mro__:
                if owner.__module__.partition(".")[0] == "quire":
                    _teach_class(owner)


def _teach_class(owner: type) -> None:
    """The same for the constructor of a class, and for public methods of several arguments."""
    for name, member in list(vars(owner).items()):
        function = getattr(member, "__func__", member)  # of static methods and class methods
        if isinstance(function, FunctionType) and (name in ("__init__", "__new__") or _is_method(name, function)):
            taught = _taught(function)
            if taught is not function:
                setattr(owner, name, taught if function is member else type(member)(taught))


def _is_method(name: str, function: Any) -> bool:
    code = inspect.unwrap(function).__code__
    return not name.startswith("_") and code.co_argcount + code.co_kwonlyargcount > 2  # self is one


def _taught(function: Any) -> Any:
    """`function` with explain() around it, unless it has it, or is run(), which has time for no call in between."""
    takes_any = inspect.unwrap(function).__code__.co_flags & inspect.CO_VARKEYWORDS
    if hasattr(function, "explains") or (takes_any and function.__name__ == "run"):
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            explain(error, function, args, kwargs)
            raise

    return explains(call)


def explains(function: Any) -> Any:
    """`function`, marked: it raises what explain() makes of an error."""
    function.explains = True
    return function


def explain(error: TypeError, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise unexpected_keyword() in place of Python's own error, if a call of `function` itself raised it: it does not
    take a keyword or, taking any for operands, lacks an argument.
    """
    text, function, place = str(error), inspect.unwrap(function), error.__traceback__
    while place is not None:
        if place.tb_frame.f_code is function.__code__:  # of a call within
            return
        place = place.tb_next
    if "unexpected keyword argument '" not in text and " required positional argument" not in text:
        return
    call = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__").rpartition(".")[2]
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "_cls")]
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        raise unexpected_keyword(call, unknown[0], names, _arguments_of_other(call, *args[:1])) from None


def _arguments_of(call: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments of the outermost function of Quire's with this name that is being called; and if it is plan() or
    run() of a wrapper, those of the other one.
    """
    frame: FrameType | None = sys._getframe(1)
    found: tuple[str, ...] = ()
    wrapper = None
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "quire":
        code = frame.f_code
        if code.co_name == call and (names := code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]):
            found, wrapper = names, frame.f_locals.get("self")
        frame = frame.f_back
    return tuple(name for name in found if name != "self"), _arguments_of_other(call, wrapper)


def _arguments_of_other(call: str, wrapper: Any = None) -> tuple[str, ...]:
    """Those of plan() of a wrapper if the call is its run(), and the reverse."""
    other = getattr(type(wrapper), _OTHER_CALL.get(call, ""), None)
    return () if other is None else tuple(inspect.signature(other).parameters)
