"""Turns Python functions of a score and indices into expressions, by calling them once with values that record
operations.

Everything that cannot be recorded is an error that names the line: an `if` on a value, a side effect, a wrong type, an
unknown function. torch's functions of the same names are supported: `torch.where`, `torch.tanh`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import FrameType
from typing import Any, NoReturn

from quire.errors import ValidationError
from quire.kernels.expressions.tree import (
    BOOL,
    COMPARISONS,
    FLOAT,
    FLOAT_FUNCTIONS,
    INT,
    INT32,
    OPERAND_TYPES,
    Node,
    Operand,
    Tree,
    as_float32,
    bounds_of,
)

_RANKS = {BOOL: 0, INT: 1, FLOAT: 2}  #: an operation takes the highest type of its arguments
_MOST_NODES = 1000  #: of one function; the compiler would need minutes for more
MOST_DIMS = 4  #: of an operand
_HERE = __name__.rpartition(".")[0]
#: call() and method() of torch_functions.py, which imports this module.
TORCH: dict[str, Callable[..., Any]] = {}


class Untraceable(ValidationError):
    """An error that already names the line."""


FAILURES: ContextVar[list[Untraceable]] = ContextVar("failures")  # of the function that is traced


def fail(text: str, frame: FrameType | None = None) -> NoReturn:
    """ValidationError that begins with the current line of the user's function."""
    frame = sys._getframe(1) if frame is None else frame
    while frame.f_back is not None and is_own(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    error = Untraceable(f"{place_of(frame.f_code.co_filename, frame.f_lineno)}: {text}")
    FAILURES.get([]).append(error)
    raise error from None


def is_own(module: str) -> bool:
    return module.startswith((_HERE + ".", "quire.engine", "quire.attention.flex", "torch."))


def place_of(file: str, line: int) -> str:
    import linecache  # imported only for errors

    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f": `{text}`" if text else "")


class Tracer:
    """The functions of one variant being traced: their tree, their operands, and how many indices each tensor takes."""

    def __init__(self, tensors: Mapping[str, str], scalars: Mapping[str, str]) -> None:
        self.tree, self.tensors, self.scalars = Tree(), dict(tensors), dict(scalars)
        self.ranks: dict[str, int] = {}
        self.sizes: dict[str, int] = {}  # for each tensor, the last dimension whose size is read
        self.num_nodes = 0
        #: An operation where other rules hold than those of a quire.Variant; else None.
        self.rules: Callable[[str, Value, Value], Value | None] | None = None
        self.device: Any = None  #: where values are, if that is known

    def operand(self, name: str) -> Value | TensorValue | None:
        """The value that records reads of a declared operand; None if it is not declared."""
        if name in self.scalars:
            return self.value("scalar", OPERAND_TYPES[self.scalars[name]], value=name)
        return TensorValue(self, name) if name in self.tensors else None

    def operands(self) -> tuple[Operand, ...]:
        """The declared operands, tensors first. ValidationError if one is never read."""
        for name in self.tensors:
            if name not in self.ranks:
                raise ValidationError(f"tensors: {name!r} is declared but never read; remove it, or read it.")
            if self.sizes.get(name, 0) >= self.ranks[name]:
                raise ValidationError(
                    f"{name}.shape[{self.sizes[name]}]: expected a dimension below {self.ranks[name]}, as {name!r} is "
                    f"read with so many indices."
                )
        tensors = (Operand(name, kind, self.ranks[name]) for name, kind in self.tensors.items())
        return (*tensors, *(Operand(name, kind, 0) for name, kind in self.scalars.items()))

    def value(self, op: str, type_: str, *args: Value, value: Any = 0, dim: int = 0) -> Value:
        """Record an operation."""
        self.num_nodes += 1
        if self.num_nodes > _MOST_NODES:
            fail(f"expected at most {_MOST_NODES} operations; write it with fewer, or read a table.")
        return Value(self, self.tree.node(op, type_, *(arg.node for arg in args), value=value, dim=dim))

    def constant(self, value: Any) -> Value:
        """Record a number or a bool of Python."""
        if isinstance(value, bool):
            return self.value("const", BOOL, value=value)
        if isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                got = value if value.bit_length() <= 64 else f"one of {value.bit_length()} bits"
                fail(f"expected integers that int32 holds, got {got}.")
            return self.value("const", INT, value=value)
        if isinstance(value, float):
            return self.value("const", FLOAT, value=as_float32(value))
        cure = "; declare it in tensors= and take it as an argument" if type(value).__name__ == "Tensor" else ""
        fail(f"expected a number or a value of the kernel, got {type(value).__name__}{cure}.")

    def lift(self, value: Any) -> Value:
        """`value` as a Value; numbers become constants."""
        if isinstance(value, Value):
            if value.tracer is not self:
                fail("a value that was kept from an earlier call of a function; compute it from the arguments instead.")
            return value
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # numpy's numbers, torch's scalars
            return self.constant(value.item())
        return self.constant(value)

    def array(self, tensor: Any) -> Any:
        """A tensor beside values."""
        fail(f"expected numbers and values of the kernel, got a tensor {list(tensor.shape)}.")

    def bounds(self, node: Node) -> tuple[int, int]:
        """The least and the greatest integer that a value may be."""
        return bounds_of(node, {})

    def read(self, name: str, index: Any) -> Value:
        """An element of the tensor `name`."""
        indices = [self._index(name, i) for i in (index if isinstance(index, tuple) else (index,))]
        rank = self.ranks.setdefault(name, len(indices))
        if rank != len(indices) or rank > MOST_DIMS:
            most = f"{rank} indices, as it is read elsewhere" if rank <= MOST_DIMS else f"at most {MOST_DIMS} indices"
            fail(f"{name}: expected {most}, got {len(indices)}.")
        return self.value("read", OPERAND_TYPES[self.tensors[name]], *indices, value=name)

    def _index(self, name: str, index: Any) -> Value:
        value = self.lift(index)
        if value.node.type != INT:
            fail(f"{name}: expected integers as indices, got a {value.node.type}; convert it with to_int().")
        if value.node.op == "const" and value.node.value < 0:  # type: ignore[operator]
            fail(f"{name}: expected indices from 0 on, got {value.node.value}; count from name.shape[dim].")
        return value


class TensorValue:
    """A declared tensor while a function is traced: records reads of elements and sizes."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer, self._name = tracer, name

    def __getitem__(self, index: Any) -> Value:
        return self._tracer.read(self._name, index)

    @property
    def shape(self) -> _Shape:
        """Its sizes, which only the launched kernel knows."""
        return _Shape(self._tracer, self._name)

    def __getattr__(self, name: str) -> NoReturn:
        fail(f"{self._name}: a declared tensor is read ({self._name}[...]) or asked for its shape; it has no {name!r}.")


class _Shape:
    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer, self._name = tracer, name

    def __getitem__(self, dim: Any) -> Value:
        most = self._tracer.ranks.get(self._name, MOST_DIMS)
        if not isinstance(dim, int) or not 0 <= dim < most:
            fail(f"{self._name}.shape: expected a dimension from 0 to {most - 1}, got {dim!r}.")
        self._tracer.sizes[self._name] = max(dim, self._tracer.sizes.get(self._name, 0))
        return self._tracer.value("size", INT, value=self._name, dim=dim)


def _binary(op: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    def forward(self: Value, other: Any) -> Value:
        return operate(op, self, other)

    def backward(self: Value, other: Any) -> Value:
        return operate(op, other, self)

    return forward, backward


class Value:
    """A number that only the kernel knows. Operations on it are recorded."""

    __slots__ = ("node", "tracer")
    __array_priority__ = 1000  # numpy's numbers leave operators to this class

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self.tracer, self.node = tracer, node

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("sub")
    __mul__, __rmul__ = _binary("mul")
    __truediv__, __rtruediv__ = _binary("div")
    __floordiv__, __rfloordiv__ = _binary("floordiv")
    __mod__, __rmod__ = _binary("mod")
    __and__, __rand__ = _binary("and")
    __or__, __ror__ = _binary("or")
    __xor__, __rxor__ = _binary("xor")
    __lshift__, __rlshift__ = _binary("shl")
    __rshift__, __rrshift__ = _binary("shr")
    __lt__, _ = _binary("lt")
    __le__, _ = _binary("le")
    __gt__, _ = _binary("gt")
    __ge__, _ = _binary("ge")
    __eq__, _ = _binary("eq")
    __ne__, _ = _binary("ne")
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Value:
        number, found = self.node.value, self
        if self.node.type == BOOL:
            found = self * -1
        elif self.node.op == "const" and number == number and number != INT32[0]:  # as texts have it
            found = self.tracer.constant(-number)  # type: ignore[operator]
        else:
            found = self.tracer.value("neg", self.node.type, self)
        return found

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return call("abs", self)

    def __invert__(self) -> Value:
        if self.node.type == FLOAT:
            fail("~: expected a bool or an integer, got a float.")
        return self.tracer.value("not", self.node.type, self)

    def __pow__(self, exponent: Any) -> Value:
        found: Value = TORCH["call"]("pow", (self, exponent), {})
        return found

    def __rpow__(self, base: Any) -> Value:
        found: Value = TORCH["call"]("pow", (self.tracer.lift(base), self), {})
        return found

    def to(self, dtype: Any) -> Value:
        """As torch's to(), for float and integer types."""
        name = str(dtype).removeprefix("torch.")
        name = {"float64": "float32", "int": "int32", "long": "int64", "float": "float32"}.get(name, name)
        if name not in OPERAND_TYPES:
            fail(f"to(): expected one of {', '.join(OPERAND_TYPES)}, got {dtype}.")
        kind = OPERAND_TYPES[name]
        if kind == BOOL:
            return self if self.node.type == BOOL else self != 0
        found = call("to_float" if kind == FLOAT else "to_int", self)
        return found & 255 if name == "uint8" else found

    def float(self) -> Value:
        """As torch's float()."""
        return call("to_float", self)

    def int(self) -> Value:
        """As torch's int(): rounds towards 0."""
        return call("to_int", self)

    @property
    def dtype(self) -> Any:
        """The torch.dtype of such values in a kernel."""
        import torch  # loaded by whoever asks

        return {BOOL: torch.bool, INT: torch.int32, FLOAT: torch.float32}[self.node.type]

    @property
    def shape(self) -> tuple[()]:
        """As torch's: a value has no dimensions."""
        return ()

    @property
    def device(self) -> Any:
        """As torch's: where the tensors of the call are."""
        if self.tracer.device is None:
            fail("values of the kernel have no 'device' in a quire.Variant: it may run on several.")
        return self.tracer.device

    def dim(self) -> Any:
        """As torch's."""
        return 0

    ndim = property(dim)

    def new_ones(self, size: Any, *, dtype: Any = None, device: Any = None) -> Value:
        """As torch's, without dimensions; torch's and_masks() calls it."""
        return self.new_full(size, 1, dtype=dtype, device=device)

    def new_zeros(self, size: Any, *, dtype: Any = None, device: Any = None) -> Value:
        """As torch's, without dimensions; torch's or_masks() calls it."""
        return self.new_full(size, 0, dtype=dtype, device=device)

    def new_full(self, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Value:
        """As torch's, without dimensions."""
        if tuple(size) or (device is not None and device != self.tracer.device):
            fail(
                f"new_ones(), new_zeros(), new_full(): expected no dimensions and no other device, got {size} and "
                f"{device}."
            )
        return self.tracer.constant(fill_value).to(self.dtype if dtype is None else dtype)

    def __bool__(self) -> NoReturn:
        fail(
            "a value that only the kernel knows decides what Python does next (if, while, and, or, not, min, max, "
            "a < b < c); use where(condition, a, b), minimum() and maximum(), and combine conditions with &, | and ~."
        )

    def _number(self, *_: Any) -> NoReturn:
        fail("a value that only the kernel knows is used as a number of Python; use operators and functions of values.")

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __len__ = __iter__ = _number
    __contains__ = __array__ = _number

    def __setitem__(self, *_: Any) -> NoReturn:
        fail("a value of the kernel cannot be written; give the result a name of its own.")

    def __getattr__(self, name: str) -> Any:
        return TORCH["method"](self, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return TORCH["call"](name_of(func), args, kwargs or {})


#: Operators of other libraries that are known by the names of torch's functions.
_KNOWN_OPERATORS = {"approx::tanh": "tanh"}  # attention-gym's


def name_of(func: Any) -> str:
    """The name of a function of torch's, or library::name of an operator that torch has not."""
    name = str(getattr(func, "__name__", func))
    library = getattr(func, "namespace", None) or getattr(func, "_qualified_op_name", "").rpartition("::")[0]
    if library:  # of an operator, whose name has its overload behind a dot
        name = name.partition(".")[0]
        return name if library == "aten" else _KNOWN_OPERATORS.get(f"{library}::{name}", f"{library}::{name}")
    return name


def operate(op: str, a: Any, b: Any) -> Value:
    """Record a binary operation with at least one Value."""
    tracer = a.tracer if isinstance(a, Value) else b.tracer
    left, right = tracer.lift(a), tracer.lift(b)
    if tracer.rules is not None and (found := tracer.rules(op, left, right)) is not None:
        return found
    kind = _common(left, right)
    if op in ("and", "or", "xor", "shl", "shr", "floordiv", "mod") and kind == FLOAT:
        hint = {"floordiv": "; write floor(a / b)", "mod": "; write a - floor(a / b) * b"}.get(op, "")
        fail(f"{op}: expected integers{' or bools' if op in ('and', 'or', 'xor') else ''}, got a float{hint}.")
    if op in ("shl", "shr") and right.node.op == "const" and not 0 <= right.node.value < 32:  # type: ignore[operator]
        fail(f"{op}: expected a number of bits from 0 to 31, got {right.node.value}.")
    if op in ("floordiv", "mod") and right.node.op == "const" and not right.node.value:
        fail("integer division by 0.")
    if op == "div":
        kind = FLOAT
    elif kind == BOOL and op not in ("and", "or", "xor", *COMPARISONS):
        kind = INT
    left, right = convert(left, kind), convert(right, kind)
    return tracer.value(op, BOOL if op in COMPARISONS else kind, left, right)


def _common(*values: Value) -> str:
    return max((value.node.type for value in values), key=_RANKS.__getitem__)


def convert(value: Value, kind: str) -> Value:
    """`value` as FLOAT or INT. FLOAT is rounded towards 0."""
    if value.node.type == kind or kind == BOOL:
        return value
    if value.node.op == "const" and kind == FLOAT:
        return value.tracer.constant(float(value.node.value))
    return value.tracer.value("to_float" if kind == FLOAT else "to_int", kind, value)


def call(name: str, *args: Any) -> Value:
    """Record a function call; or compute it, if all arguments are Python's numbers."""
    tracer = next((arg.tracer for arg in args if isinstance(arg, Value)), None)
    if tracer is None:
        fail(f"{name}: expected a value of the kernel, got {', '.join(type(arg).__name__ for arg in args)}.")
    values = [tracer.lift(arg) for arg in args]
    if name in FLOAT_FUNCTIONS:
        return tracer.value(name, FLOAT, convert(values[0], FLOAT))
    if name in ("to_float", "to_int"):
        return convert(values[0], FLOAT if name == "to_float" else INT)
    if name == "where":
        if values[0].node.type != BOOL:
            fail(f"where: expected a bool as its condition, got a {values[0].node.type}; compare it with something.")
        kind = _common(*values[1:])
        return tracer.value("where", kind, values[0], *(convert(value, kind) for value in values[1:]))
    kind = _common(*values)
    kind = INT if kind == BOOL else kind
    return tracer.value(name, kind, *(convert(value, kind) for value in values))
