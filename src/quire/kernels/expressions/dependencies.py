"""What a Python function depends on: its code, its defaults, the closure cells and global variables that it names, and
the tensors among them, which become operands when the function is traced.

Values are compared as such, tensors by their types and shapes. Of a function that depends on anything else (an object
with attributes, a module of the program) nothing is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from quire.errors import ValidationError
from quire.kernels.expressions.arrays import Array
from quire.kernels.expressions.rewrite import MaskParts, split_mask
from quire.kernels.expressions.torch_functions import call_torch, operate_as_torch
from quire.kernels.expressions.trace import Tracer, Value, fail, name_of
from quire.kernels.expressions.tree import BOOL, FLOAT, OPERAND_TYPES, Node, bounds_of, names_in
from quire.kernels.expressions.variant import Variant, call_traced, read_text, variant_of_trees

_VALUES = frozenset({int, float, str, bool, bytes, type(None), complex, torch.dtype, torch.device, type(...)})
_MODULES = frozenset({"torch", "math", "operator", "functools", "quire"})  #: whose functions do not change
_MOST_VALUES = 200  #: that a function depends on
_MOST_CODES = 1024  #: that are known


class FunctionState(NamedTuple):
    """What functions depend on."""

    key: Hashable
    tensors: list[torch.Tensor]
    kept: list[Any]  #: objects whose ids are in the key


class _Unknown(Exception):
    pass


def state_of(*functions: Any) -> FunctionState | None:
    """What these functions depend on; None if that is not known."""
    codes: list[CodeType | None] = []
    for function in functions:
        if function is None:
            codes.append(None)
        elif type(function) is FunctionType and not (
            function.__closure__ or function.__defaults__ or function.__kwdefaults__
        ):
            codes.append(function.__code__)
        else:
            return _walked(functions)
    key = (*map(id, codes),)
    found = _of_codes.get(key, _NOT_MET)
    if found is _NOT_MET:
        if len(_of_codes) >= _MOST_CODES:
            _of_codes.clear()
        names = any(_global_names(code) for code in codes if code is not None)
        found = _of_codes[key] = None if names else _walked(functions)
    return found or _walked(functions)


#: By the ids of codes: what functions depend on that read nothing outside of them, which keeps the codes alive; None
#: for functions that read global variables.
_of_codes: dict[tuple[int, ...], FunctionState | None] = {}
_NOT_MET: Any = object()


def _walked(functions: tuple[Any, ...]) -> FunctionState | None:
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
        if kind is RecordedFunction:
            return kind, value.text, value.part, value.numbers, *[self.of(part) for part in value.tensors]
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
        if len(_names) >= _MOST_CODES:
            _names.clear()
        found = _names[id(code)] = code, tuple(dict.fromkeys(_names_in(code)))
    return found[1]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


# --- tracing ---------------------------------------------------------------------------------------------------------

#: torch's arguments of a mask, as a variant names them.
_PLACES = ("request", "head", "q_idx", "kv_idx")
#: torch's functions that read no values of tensors.
_SIZES = frozenset({"__get__", "size", "dim", "numel", "stride", "__len__", "ndimension", "nelement"})
#: torch's functions that make tensors of Python's numbers.
_MAKERS = frozenset({"tensor", "scalar_tensor", "full", "zeros", "ones"})
#: Number types of captured tensors that are converted first.
CONVERTED = {torch.float64: torch.float32, torch.int8: torch.int32, torch.int16: torch.int32}


def as_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A captured tensor as kernels read it."""
    tensor = tensor.to(CONVERTED[tensor.dtype]) if tensor.dtype in CONVERTED else tensor
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


class Setting(NamedTuple):
    """What a trace depends on beside the functions."""

    q_len: int  #: 0: not known
    kv_len: int
    device: torch.device

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor) -> Setting:
        """That of a call."""
        return cls(query.shape[2], key.shape[2], query.device)


class Capturing(Tracer):
    """Declares tensors of the enclosing scope when a function reads them."""

    def __init__(self, setting: Setting) -> None:
        super().__init__({}, {})
        self._lengths, self.device, self.rules = setting[:2], setting.device, operate_as_torch
        self.made: dict[int, torch.Tensor] = {}  #: by the function itself, of Python's numbers
        self.captured: dict[str, torch.Tensor] = {}
        self.origins: dict[str, torch.Tensor] = {}  #: what was captured, where `captured` may have another type
        self.is_lasting = True
        self._names: dict[int, str] = {}

    def name_of(self, tensor: torch.Tensor) -> str:
        """The operand that stands for a tensor."""
        if id(tensor) not in self._names:
            operand = as_operand(tensor)
            kind = str(operand.dtype).removeprefix("torch.")
            if kind not in OPERAND_TYPES:
                fail(f"expected a captured tensor of {', '.join(OPERAND_TYPES)}, got {tensor.dtype}.")
            name = self._names[id(tensor)] = f"t{len(self.captured)}"
            self.tensors[name], self.captured[name], self.origins[name] = kind, operand, tensor
        return self._names[id(tensor)]

    def lift(self, value: Any) -> Value:
        """A captured tensor of one element is an operand, whose value may be another one in the next call."""
        if isinstance(value, torch.Tensor):
            if value.dim():
                fail(f"expected captured tensors to be indexed, got {list(value.shape)} beside an operator.")
            return self.constant(value.item()) if id(value) in self.made else self.read(self.name_of(value), 0)
        if isinstance(value, Array):
            fail(f"expected a single value, got an array {list(value.shape)}: index it, or use sum() or another fold.")
        return super().lift(value)

    def array(self, tensor: torch.Tensor) -> Array:
        """A captured tensor, whose elements are read where they are used."""

        def element(place: tuple[Any, ...]) -> Value:
            return self.read(self.name_of(tensor), tuple(self.lift(i) for i in place))

        return Array(self, tuple(tensor.shape), element)

    def bounds(self, node: Node) -> tuple[int, int]:
        """The least and the greatest integer that a value may be."""
        limits = zip(("q_idx", "kv_idx"), self._lengths, strict=True)
        return bounds_of(node, {name: (0, n - 1) for name, n in limits if n})

    def variant_of(self, score_mod: Any, mask_mod: Any) -> tuple[Variant | None, MaskParts]:
        """Trace both functions: their variant, without the parts of the mask that kernels have built in, and these."""
        if score_mod is mask_mod is None:
            return None, MaskParts()
        score, mask = self._trees(score_mod, mask_mod)
        parts = split_mask(mask, self.tree, *self._lengths)
        rest = score is not None or parts.rest is not None
        return variant_of_trees(score, parts.rest, self) if rest else None, parts

    def text_of(self, score_mod: Any, mask_mod: Any) -> str:
        """Trace both functions: the text of their variant, for any lengths; empty if they change nothing."""
        score, mask = self._trees(score_mod, mask_mod)
        is_plain = (score is None or score.op == "score") and mask is None
        return "" if is_plain else str(variant_of_trees(score, mask, self))

    def _trees(self, score_mod: Any, mask_mod: Any) -> tuple[Node | None, Node | None]:
        index = {name: self.value("index", "int", value=name) for name in _PLACES}
        trees = {}
        for name, function, first in (
            ("score_mod", score_mod, (self.value("score", FLOAT),)), ("block_mask", mask_mod, ()),
        ):  # fmt: skip
            if function is not None:
                with _Captures(self):
                    result = call_traced(function, (*first, *index.values()), {}, name)
                trees[name] = self.lift(result).node
        score, mask = trees.get("score_mod"), trees.get("block_mask")
        if mask is not None and mask.type != BOOL:
            raise ValidationError(f"block_mask: expected a function that returns a bool, got a {mask.type}.")
        return score, mask


class _Captures(TorchFunctionMode):
    """While a function is traced: torch's functions of values of the kernel are recorded, others happen."""

    def __init__(self, tracer: Capturing) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [part for arg in given if isinstance(arg, (tuple, list)) for part in arg]
        if not any(isinstance(arg, (Value, Array)) for arg in given):
            if func.__name__ not in _SIZES and any(isinstance(arg, torch.Tensor) for arg in given):
                self._tracer.is_lasting = False  # what the function does next may depend on values
            result = func(*args, **(kwargs or {}))
            if func.__name__ in _MAKERS and isinstance(result, torch.Tensor) and not result.dim():
                self._tracer.made[id(result)] = result
            return result
        if func is torch.Tensor.__getitem__ and isinstance(args[0], torch.Tensor):
            return self._tracer.array(args[0])[args[1]]
        is_method = func is getattr(torch.Tensor, func.__name__, None)
        return call_torch(name_of(func), args, kwargs or {}, methods=is_method)


class RecordedFunction:
    """A function that was traced before, with other tensors and numbers."""

    def __init__(self, text: str, part: str, tensors: Sequence[torch.Tensor], numbers: tuple[int, ...]) -> None:
        """text: of a variant whose operands are t0, t1, ... and n0, n1, ...; part: "score" or "mask"."""
        self.text, self.part, self.numbers = text, part, numbers
        self._tensors = {f"t{i}": weakref.ref(tensors[i]) for i in _tensors_of(text, part)}

    @property
    def tensors(self) -> list[Any]:
        """Those that the function reads; its caller keeps them."""
        return [tensor() for tensor in self._tensors.values()]

    def __call__(self, *values: Value) -> Value:
        """The result for the values of torch's arguments: the score, if it is one, batch, head, q_idx, kv_idx."""
        tracer, names = values[0].tracer, dict(zip(_PLACES, values[-4:], strict=True))
        made: dict[int, Node] = {}
        root: Node = getattr(read_text(self.text), self.part)
        for node in root.walk():
            args = [made[id(arg)] for arg in node.args]
            if node.op == "index":
                found = names[str(node.value)].node
            elif node.op == "score":
                found = values[0].node
            elif node.op == "scalar":
                found = tracer.constant(self.numbers[int(str(node.value)[1:])]).node
            elif node.op == "read":
                name = tracer.name_of(self._tensors[str(node.value)]())  # type: ignore[attr-defined]
                found = tracer.read(name, tuple(Value(tracer, arg) for arg in args)).node
            else:
                found = tracer.tree.node(node.op, node.type, *args, value=node.value, dim=node.dim)
            made[id(node)] = found
        return Value(tracer, made[id(root)])


@lru_cache(maxsize=1024)
def operands_of_text(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the tensors that the score of a text reads alone, and of those of its mask."""
    of_mask = _tensors_of(text, "mask") if text else []
    return tuple(i for i in (_tensors_of(text, "score") if text else []) if i not in of_mask), tuple(of_mask)


@lru_cache(maxsize=1024)
def _tensors_of(text: str, part: str) -> list[int]:
    """The numbers of the tensors that a part of a text reads."""
    return sorted(int(name[1:]) for name in names_in(getattr(read_text(text), part)) if name[0] == "t")
