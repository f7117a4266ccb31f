"""What becomes of arguments of FlashInfer's surface that Quire does not use: each function declares its own.

    @foreign(refused="o_scale", permissions="non_blocking", older_names={"workspace_buffer": "float_workspace_buffer"})

The function itself does not mention them again. tests/surface.py writes the declarations into docs/surface.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch

from quire.engine.checks import check_flags, check_positive, check_tensor, not_negative, reason_of, refuse, scalar
from quire.engine.options import USUAL_ROPE
from quire.errors import ValidationError

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


def _scratch(value: Any, name: str) -> None:
    if value is not None:
        check_tensor(value, name)


def _count(value: Any, name: str) -> None:
    if value is not None:
        check_positive(value, name)


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
    "each key that a query sees counts": (not_negative, ("skip_softmax_threshold_scale_factor",)),
    "kernels count in memory of the plan": (_scratch, ("multi_ctas_kv_counter_buffer",)),
    "a hint for FlashInfer's kernels": (_count, ("uniform_q_len",)),
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
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

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
