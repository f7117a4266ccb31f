"""What a Python function depends on: its code, its defaults, and the closure cells and global variables that it names.

Values are compared as such, tensors by their types and shapes. Of a function that depends on anything else (an object
with attributes, a module of the program) nothing is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

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
