"""Calls of a user's function while it is traced: its parameters, and what it must not do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

from quire.errors import ValidationError
from quire.kernels.expressions.trace import FAILURES, Tracer, Untraceable, Value, is_own, place_of
from quire.kernels.expressions.tree import BOOL, FLOAT, INDICES, INT, Node

#: Python's instructions whose effects outlive the call.
_SIDE_EFFECTS = {
    **dict.fromkeys(("STORE_GLOBAL", "DELETE_GLOBAL"), "a global variable"),
    **dict.fromkeys(("STORE_ATTR", "DELETE_ATTR"), "an attribute"),
    **dict.fromkeys(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"), "an element of something"),
}  # fmt: skip


#: Python's functions with effects outside of the traced function.
_CALLS = ("print", "input", "open", "exec", "eval", "setattr", "delattr")


# --- calling a function ----------------------------------------------------------------------------------------------


def parameters_of(function: Any, name: str) -> list[str]:
    """The names of a function's parameters."""
    code = getattr(function, "__code__", None)
    if not isinstance(function, FunctionType) or code is None:
        raise ValidationError(f"{name}: expected a Python function, got {type(function).__name__}.")
    if code.co_flags & 0x0C:
        raise ValidationError(
            f"{name}: expected parameters by name, got *args or **kwargs in {function.__qualname__}()."
        )
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def refuse_side_effects(function: FunctionType) -> None:
    """ValidationError if the function has effects that outlive its call."""
    import dis  # imported only for new variants

    code, line = function.__code__, function.__code__.co_firstlineno
    for instruction in dis.get_instructions(code):
        starts = getattr(instruction, "line_number", None) or instruction.starts_line
        line = starts if isinstance(starts, int) and not isinstance(starts, bool) else line
        what = _SIDE_EFFECTS.get(instruction.opname)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars:
            what = f"{instruction.argval}, a variable of another function"
        calls = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in _CALLS
        if what is not None or (calls and instruction.argval not in function.__globals__):
            raise ValidationError(
                f"{place_of(code.co_filename, line)}: {f'writes {what}' if what else f'calls {instruction.argval}()'}, "
                f"but a kernel calls the function for each score, in no order; return the result instead."
            )


def _contents(function: FunctionType) -> dict[str, list[int]]:
    """The names of lists, dicts and sets that the function can change, and the identities of their elements."""
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable without a value
            names[name] = cell.cell_contents
    return {
        name: [id(x) for x in (*value, *(value.values() if isinstance(value, dict) else ()))]
        for name, value in names.items()
        if isinstance(value, (list, dict, set))
    }


def trace(function: Any, name: str, tracer: Tracer) -> Node:
    """The tree of a function, which is called once; `name`: "score" or "mask"."""
    names = parameters_of(function, name)
    arguments = {parameter: _argument(tracer, parameter, name, function) for parameter in names}
    node = tracer.lift(call_traced(function, (), arguments, name)).node
    check_type(node, name, f"{_place_of(function)}: ")
    return node


def check_type(node: Node, name: str, place: str = "") -> None:
    """ValidationError unless a score is a number and a mask a bool."""
    if name == "mask" and node.type != BOOL:
        raise ValidationError(f"mask: {place}expected a bool, got a {node.type}; return a comparison.")
    if name == "score" and node.type == BOOL:
        raise ValidationError(
            f"score: {place}expected a number, got a bool; return where(condition, score, -inf) to hide keys."
        )


def _argument(tracer: Tracer, parameter: str, name: str, function: Any) -> Any:
    if parameter == "score" and name == "score":
        return tracer.value("score", FLOAT)
    if parameter in INDICES:
        return tracer.value("index", INT, value=parameter)
    found = tracer.operand(parameter)
    if found is None:
        known = ", ".join((*INDICES, *tracer.tensors, *tracer.scalars))
        raise ValidationError(
            f"{name}: {function.__qualname__}() takes {parameter!r}; expected some of {known}, or {parameter!r} "
            f"declared in tensors= or scalars=."
        )
    return found


def call_traced(function: Any, args: tuple[Any, ...], arguments: Mapping[str, Any], name: str) -> Any:
    """Call function(*args, **arguments). Errors name the line of the function."""
    is_plain = isinstance(function, FunctionType)
    if is_plain:
        refuse_side_effects(function)
    before, failures = _contents(function) if is_plain else {}, list[Untraceable]()
    token = FAILURES.set(failures)
    try:
        result = function(*args, **arguments)
    except Untraceable as error:
        raise ValidationError(f"{name}: {error}") from None
    except ValidationError:
        raise
    except Exception as error:
        frames, found = error.__traceback__, None
        while frames is not None:
            if not is_own(frames.tb_frame.f_globals.get("__name__", "")):
                found = place_of(frames.tb_frame.f_code.co_filename, frames.tb_lineno)
            frames = frames.tb_next
        raise ValidationError(f"{name}: {found or _place_of(function)}: {type(error).__name__}: {error}") from error
    finally:
        FAILURES.reset(token)
    if failures:  # an error that the function caught
        raise ValidationError(f"{name}: {failures[0]}")
    place = _place_of(function)
    for changed in (key for key, ids in (_contents(function) if is_plain else {}).items() if before[key] != ids):
        raise ValidationError(
            f"{name}: {place}: changes {changed!r}, but a kernel calls the function for each score, in no order; "
            f"return the result instead."
        )
    if not isinstance(result, (Value, bool, int, float)) and getattr(result, "ndim", True):
        got = "nothing" if result is None else f"a {type(result).__name__}"
        raise ValidationError(f"{name}: {place}: returns {got}; expected a number or a value of the kernel.")
    return result


def _place_of(function: Any) -> str:
    """Where a function begins."""
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else place_of(code.co_filename, code.co_firstlineno)
