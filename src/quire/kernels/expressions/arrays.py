"""Arrays of few values of a kernel: rows of captured tensors, and what is computed from them, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from quire.kernels.expressions.trace import TORCH, Tracer, Value, call, fail, name_of, operate
from quire.kernels.expressions.tree import BOOL, INT

_MOST_ELEMENTS = 256  #: of an array that is computed with; each is an operation of its own

Place = tuple[Any, ...]  #: an index for each dimension, ints or values


class Array:
    """Values in the shape of a tensor: what is left of a tensor of which not all indices are given, or a result."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: Tracer, shape: tuple[int, ...], element: Callable[[Place], Value]) -> None:
        self.tracer, self.shape, self._element = tracer, shape, element
        self._made: dict[Place, Value] = {}

    @classmethod
    def of(cls, tracer: Tracer, shape: tuple[int, ...], values: Sequence[Value]) -> Any:
        """An array of these values, in the order of rows; of one value without dimensions, the value."""
        if not shape:
            return values[0]
        places = dict(zip(product(*map(range, shape)), values, strict=True))

        def element(place: Place) -> Value:
            if any(isinstance(i, Value) for i in place):
                fail("expected numbers as indices of a computed array; index the captured tensor before computing.")
            return places[place]

        return cls(tracer, shape, element)

    @property
    def ndim(self) -> int:
        """Its number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> Any:
        """As torch's: where the tensors of the call are."""
        return self.tracer.device

    def dim(self) -> int:
        """As torch's."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As torch's."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """As torch's."""
        return math.prod(self.shape)

    def at(self, place: Place) -> Value:
        """The element of these indices."""
        if any(isinstance(i, Value) for i in place):
            return self._element(place)
        if place not in self._made:
            self._made[place] = self._element(place)
        return self._made[place]

    def values(self) -> list[Value]:
        """All elements, in the order of rows."""
        if self.numel() > _MOST_ELEMENTS:
            fail(
                f"expected arrays of at most {_MOST_ELEMENTS} elements to compute with, got {list(self.shape)}; index "
                f"more of the dimensions."
            )
        return [self.at(place) for place in product(*map(range, self.shape))]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self.shape[0])])

    def __getitem__(self, index: Any) -> Any:
        indices, lefts = _spelt_out(index, self.ndim), list[range]()
        fixed: list[Any] = []
        for dim, i in enumerate(indices):
            if isinstance(i, slice):
                if any(isinstance(part, Value) for part in (i.start, i.stop, i.step)):
                    fail("a slice whose ends only the kernel knows; use a slice of numbers, and where().")
                fixed.append(None)
                lefts.append(range(self.shape[dim])[i])
            else:
                fixed.append(_index(self.tracer, i, self.shape[dim], dim))

        def element(place: Place) -> Value:
            rest = iter(place)
            places = iter(lefts)
            return self.at(tuple([_chosen(next(places), next(rest)) if i is None else i for i in fixed]))

        if not lefts:
            return element(())
        return Array(self.tracer, tuple(map(len, lefts)), element)

    def __getattr__(self, name: str) -> Any:
        return TORCH["method"](self, name)

    def __bool__(self) -> bool:
        fail("an array of values decides what Python does next; use any(), all() and where().")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TORCH["call"](name_of(func), args, kwargs or {})


def _chosen(kept: range, i: Any) -> Any:
    """Index i of what a slice leaves."""
    if not isinstance(i, Value):
        return kept[i]
    return i if kept.start == 0 and kept.step == 1 else kept.start + i * kept.step


def _spelt_out(index: Any, ndim: int) -> list[Any]:
    """An index for each of the dimensions."""
    indices = [*index] if isinstance(index, (tuple, list)) else [index]
    if any(i is None or isinstance(i, bool) for i in indices):
        fail("expected integers, values and slices as indices, got None or a bool.")
    dots = [n for n, i in enumerate(indices) if i is Ellipsis]
    if len(indices) - len(dots) > ndim or len(dots) > 1:
        fail(f"expected at most {ndim} indices, got {len(indices) - len(dots)}.")
    n = dots[0] if dots else len(indices)
    return [*indices[:n], *[slice(None)] * (ndim - len(indices) + len(dots)), *indices[n + len(dots) :]]


def _index(tracer: Tracer, i: Any, size: int, dim: int) -> Any:
    """An index of a dimension of `size` elements: negative ones count from the end."""
    if isinstance(i, Value) and i.node.op != "const":
        if i.node.type != INT:
            fail(f"expected integers as indices, got a {i.node.type}; convert it with to(torch.int32).")
        return i if tracer.bounds(i.node)[0] >= 0 else call("where", i < 0, i + int(size), i)
    number = i.node.value if isinstance(i, Value) else i
    if hasattr(number, "item") and not isinstance(number, (int, float)):
        number = tracer.lift(number)
        return _index(tracer, number, size, dim)
    if not isinstance(number, int):
        fail(f"expected integers as indices, got a {type(number).__name__}.")
    if not -size <= number < size:
        fail(f"index {number} is out of bounds for dimension {dim} with size {size}.")
    return number % int(size) if number < 0 else number


# --- functions of arrays ----------------------------------------------------------------------------------------------


def _elementwise(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function of each element; arrays are broadcast."""
    arrays = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Array)]
    tracer, ndim = arrays[0].tracer, max(array.ndim for array in arrays)
    padded = [(1,) * (ndim - array.ndim) + array.shape for array in arrays]
    shape = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))
    if any(size not in (1, whole) for sizes in padded for size, whole in zip(sizes, shape, strict=True)):
        fail(f"expected arrays whose shapes fit each other, got {', '.join(str(list(a.shape)) for a in arrays)}.")
    for array in arrays:
        array.values()

    def of(arg: Any, place: Place) -> Any:
        if not isinstance(arg, Array):
            return arg
        last = place[len(place) - arg.ndim :]
        return arg.at(tuple(0 if size == 1 else i for i, size in zip(last, arg.shape, strict=True)))

    return Array.of(tracer, shape, [
        function(*[of(arg, place) for arg in args], **{name: of(arg, place) for name, arg in kwargs.items()})
        for place in product(*map(range, shape))
    ])  # fmt: skip


def _folded(array: Any, fold: Callable[[list[Value]], Any], dim: Any = None, keepdim: bool = False) -> Any:
    """An array folded along dimensions."""
    if not isinstance(array, Array):
        return fold([array])
    dims = range(array.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    folded = {d % array.ndim for d in dims}
    array.values()
    kept = tuple(1 if d in folded else size for d, size in enumerate(array.shape))
    along = [range(size) if d in folded else range(1) for d, size in enumerate(array.shape)]
    results = [
        fold([array.at(tuple(a + b for a, b in zip(place, step, strict=True))) for step in product(*along)])
        for place in product(*map(range, kept))
    ]
    shape = kept if keepdim else tuple(size for d, size in enumerate(kept) if d not in folded)
    return Array.of(array.tracer, shape, results)


def _chain(op: str) -> Callable[[list[Value]], Any]:
    def fold(values: list[Value]) -> Any:
        if not values:
            fail("expected an array with elements, got one without any.")
        found = values[0]
        for value in values[1:]:
            found = operate(op, found, value) if op not in ("minimum", "maximum") else call(op, found, value)
        return found

    return fold


def _total(values: list[Value]) -> Any:
    return _chain("add")([call("to_int", value) if value.node.type == BOOL else value for value in values])


def _fold(fold: Callable[[list[Value]], Any]) -> Callable[..., Any]:
    return lambda input, dim=None, keepdim=False: _folded(input, fold, dim, keepdim)


def _dot(input: Any, other: Any) -> Any:
    if not (isinstance(input, Array) and isinstance(other, Array) and input.ndim == other.ndim == 1):
        fail("expected two rows, arrays of one dimension each.")
    if input.shape != other.shape:
        fail(f"expected rows of equal length, got {input.shape[0]} and {other.shape[0]}.")
    return _folded(_elementwise(partial(operate, "mul"), (input, other), {}), _total)


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    tracer = tracer_of([*tensors])
    if dim not in (0, -1) or any(isinstance(part, Array) for part in tensors):
        fail("stack(): expected single values along dimension 0.")
    return Array.of(tracer, (len(tensors),), [tracer.lift(part) for part in tensors])


def _unsqueeze(input: Any, dim: int) -> Any:
    """With one dimension more, of one element; of a value, an array of it."""
    shape = (*input.shape,)
    at = dim % (len(shape) + 1)

    def element(place: Place) -> Value:
        value: Value = input.at((*place[:at], *place[at + 1 :])) if shape else input
        return value

    return Array(input.tracer, (*shape[:at], 1, *shape[at:]), element)


#: Of arrays as a whole.
OF_ARRAYS: dict[str, Callable[..., Any]] = {
    "sum": _fold(_total), "prod": _fold(_chain("mul")), "amax": _fold(_chain("maximum")),
    "amin": _fold(_chain("minimum")), "mean": _fold(lambda values: _total(values) / len(values)),
    "any": _fold(lambda values: _chain("or")([value.to("bool") for value in values])),
    "all": _fold(lambda values: _chain("and")([value.to("bool") for value in values])),
    "dot": _dot, "inner": _dot, "vdot": _dot, "matmul": _dot, "__matmul__": _dot, "stack": _stack,
    "__getitem__": lambda input, index: input[index], "unbind": lambda input: tuple(input),
    "unsqueeze": _unsqueeze,
}  # fmt: skip


def _max_or_min(name: str) -> Callable[..., Any]:
    """torch's max() and min(): of two values or arrays, or of one array."""

    def found(input: Any, other: Any = None) -> Any:
        if isinstance(other, int) and isinstance(input, Array):
            fail(f"{name}(): expected no dim, got {other}; use a{name}().")
        if other is None:
            return _folded(input, _chain(f"{name}imum"))
        return apply(lambda a, b: call(f"{name}imum", a, b), (input, other), {})

    return found


OF_ARRAYS |= {"max": _max_or_min("max"), "min": _max_or_min("min")}


def apply(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function of values; of arrays, that of each element."""
    tracer = tracer_of([*args, *kwargs.values()])
    args, kwargs = [_lifted(tracer, arg) for arg in args], {name: _lifted(tracer, arg) for name, arg in kwargs.items()}
    if any(isinstance(arg, Array) for arg in (*args, *kwargs.values())):
        return _elementwise(function, args, kwargs)
    return function(*args, **kwargs)


def _lifted(tracer: Tracer, arg: Any) -> Any:
    """A captured tensor as values."""
    if isinstance(arg, (Value, Array)) or not hasattr(arg, "ndim"):
        return arg
    return tracer.array(arg) if arg.ndim else tracer.lift(arg)


def tracer_of(args: Sequence[Any]) -> Tracer:
    """The tracer of the first value among the arguments."""
    found: Tracer = next(arg for arg in args if isinstance(arg, (Value, Array))).tracer
    return found


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: TORCH["call"](name, (self, *args), {})


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "pow", "matmul"
):  # fmt: skip
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Array, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "abs", "pos"):
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
