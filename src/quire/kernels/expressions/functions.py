"""Calls of a user's function while it is traced, and what the function depends on, so that it is traced once.

A function depends on its code, its defaults, and the closure cells and global variables that the code names. They are
compared by value, and tensors by their types and shapes: a trace refers to tensors by their place in this list. A
function that depends on anything else (an object with attributes, a module of the program) is traced in each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

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


_VALUES = frozenset({int, float, str, bool, bytes, type(None), complex, torch.dtype, torch.device, type(...)})
_MODULES = frozenset({"torch", "math", "operator", "functools", "quire"})  #: whose functions do not change
_MOST_VALUES = 200  #: that a function depends on


class FunctionState(NamedTuple):
    """What functions depend on."""

    key: Hashable
    tensors: list[torch.Tensor]
    kept: list[Any]  #: objects whose ids are in the key


class _Unknown(Exception):
    pass


def state_of(*functions: Any) -> FunctionState | None:
    """What these functions depend on; None if that is not known."""
    walk = _Walk()
    try:
        key = tuple([walk.of(function) for function in functions])
    except _Unknown:
        return None
    return FunctionState(key, walk.tensors, walk.kept)


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.kept: list[Any] = []
        self._places: dict[int, int] = {}  # of functions and tensors that have been met
        self._count = 0

    def of(self, value: Any) -> Hashable:
        """A key of the value."""
        kind = type(value)
        if kind in _VALUES:
            return kind, value
        self._count += 1
        if self._count > _MOST_VALUES:
            raise _Unknown
        if kind is FunctionType:
            return self._of_function(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._of_tensor(value)
        if kind is tuple or kind is list:
            return kind, *[self.of(part) for part in value]
        if kind is dict:
            return kind, *[(self.of(key), self.of(part)) for key, part in value.items()]
        if kind is partial:
            return kind, self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] in _MODULES:
                return kind, value.__name__
        elif kind is BuiltinFunctionType and str(value.__module__).partition(".")[0] in _MODULES:
            self.kept.append(value)
            return kind, id(value)
        raise _Unknown

    def _of_tensor(self, tensor: torch.Tensor) -> Hashable:
        place = self._places.get(id(tensor))
        if place is None:
            place = self._places[id(tensor)] = len(self._places)
            self.tensors.append(tensor)
        return torch.Tensor, place, tensor.dtype, tensor.shape, tensor.device

    def _of_function(self, function: FunctionType) -> Hashable:
        place = self._places.get(id(function))
        if place is not None:
            return FunctionType, place
        self._places[id(function)] = len(self._places)
        code, names = function.__code__, _global_names(function.__code__)
        self.kept.append(code)
        key: list[Hashable] = [id(code)]
        try:
            if function.__closure__ is not None:
                key += [self.of(cell.cell_contents) for cell in function.__closure__]
        except ValueError as error:  # an empty cell
            raise _Unknown from error
        if function.__defaults__ or function.__kwdefaults__:
            key += [self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        known = function.__globals__
        key += [(name, self.of(known[name])) for name in names if name in known]
        return tuple(key)


_names: dict[int, tuple[CodeType, tuple[str, ...]]] = {}


def _global_names(code: CodeType) -> tuple[str, ...]:
    """Names in the code that may be those of global variables."""
    found = _names.get(id(code))
    if found is None or found[0] is not code:
        if len(_names) > 1024:
            _names.clear()
        found = _names[id(code)] = code, tuple(dict.fromkeys(_names_in(code)))
    return found[1]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
