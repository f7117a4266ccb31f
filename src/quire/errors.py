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
from types import FrameType
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
    ("custom_mask", "attn_mask", "attention_mask", "mask"), ("window_left", "window_size", "sliding_window", "window"),
    ("logits_soft_cap", "softcap", "soft_cap", "logit_cap", "attn_logit_softcapping"),
    ("kv_data_type", "kv_dtype", "kv_cache_dtype", "cache_dtype"), ("q_data_type", "q_dtype", "dtype", "data_type"),
    ("o_data_type", "out_dtype", "o_dtype"), ("return_lse", "return_softmax_lse", "return_attn_probs"),
    ("num_qo_heads", "num_heads", "num_heads_q", "num_q_heads"), ("num_kv_heads", "num_heads_k", "num_key_value_heads"),
    ("kv_layout", "layout", "tensor_layout"), ("qo_indptr", "cu_seqlens_q", "cum_seq_lens_q"),
    ("sinks", "s_aux", "sink"),
    ("kv_indptr", "paged_kv_indptr", "indptr", "cu_seqlens_k", "cum_seq_lens_kv"), ("k_scale", "k_descale"),
    ("v_scale", "v_descale"), ("q_scale", "q_descale"), ("page_size", "block_size", "page_block_size"),
    ("float_workspace_buffer", "workspace_buffer", "workspace"), ("block_table", "block_tables", "page_table"),
    ("seq_lens", "cache_seqlens", "seqused_k", "kv_lens"), ("head_dim_qk", "head_dim", "head_size"),
    ("q_len_per_req", "seqlen_q", "max_seqlen_q"), ("block_mask", "attn_mask", "is_causal", "causal"),
)  # fmt: skip
_OF_FLEX = "quire.flex_attention() takes it; other calls take variant=quire.Variant(score=..., mask=...)"
_OF_TABLES = "quire.trtllm_batch_decode_with_kv_cache() takes one; here pages are in paged_kv_indices"
#: What to do about words for which a call has no argument.
_INSTEAD = {
    **dict.fromkeys(("score_mod", "mask_mod", "block_mask"), _OF_FLEX),
    **dict.fromkeys(("block_table", "block_tables", "page_table"), _OF_TABLES),
    **dict.fromkeys(("bias", "attn_bias"), "a bias of logits is a variant: variant=quire.Variant(score=...)"),
    **dict.fromkeys(("dropout_p", "dropout"), "leave it out: Quire is for inference only"),
    "enable_gqa": "leave it out: query heads share KV heads wherever there are fewer of these",
    "alibi_slopes": "pos_encoding_mode='ALIBI' has the paper's slopes, others are for quire.compat.flash_attn",
}
_OTHER_CALL = {"plan": "run", "run": "plan"}


def unexpected_keyword(call: str, name: str, names: Iterable[str] | None = None) -> TypeError:
    """Python's error for a keyword that a call does not take, with the word to write. names: those that it takes, by
    default of the function `call` that is being called.
    """
    text = f"{call}() got an unexpected keyword argument {name!r}"
    known, others = _arguments_of(call) if names is None else (tuple(names), ())
    same = [word for group in _SAME if name in group for word in group if word in known and word != name]
    elsewhere = [word for group in (*_SAME, (name,)) if name in group for word in group if word in others]
    if same:
        return TypeError(f"{text}; write {same[0]}=... here")
    if elsewhere:
        return TypeError(f"{text}; it is {elsewhere[0]}=... of {_OTHER_CALL[call]}()")
    if name in _INSTEAD:
        return TypeError(f"{text}; {_INSTEAD[name]}")
    close = get_close_matches(name, known, 1, 0.7)
    return TypeError(f"{text}; did you mean {close[0]}?" if close else text)


def explained(error: TypeError, function: Any) -> TypeError | None:
    """unexpected_keyword() for Python's own error, if a call of `function` itself raised it."""
    _, found, name = str(error).partition("unexpected keyword argument '")
    function, place = inspect.unwrap(function), error.__traceback__
    while found and place is not None:
        if place.tb_frame.f_code is function.__code__:  # of a call within
            return None
        place = place.tb_next
    if not found:
        return None
    return unexpected_keyword(function.__name__, name.partition("'")[0], inspect.signature(function).parameters)


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
    other = getattr(type(wrapper), _OTHER_CALL.get(call, ""), None)
    return found, () if other is None else tuple(inspect.signature(other).parameters)
