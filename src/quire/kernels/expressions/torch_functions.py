"""torch's functions and methods of values of a kernel.

Each function has torch's names of its parameters. Numbers follow torch's rules where those of a quire.Variant differ:
`+` and `*` of bools are `|` and `&`, floats have // and %, and shifts by 32 bits and more leave no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

from quire.kernels.expressions.arrays import OF_ARRAYS, apply, tracer_of
from quire.kernels.expressions.trace import TORCH, Value, call, fail, operate
from quire.kernels.expressions.tree import BOOL, FLOAT, FLOAT_FUNCTIONS, INT

_MOST_POWER = 64

# --- functions of numbers --------------------------------------------------------------------------------------------


def operate_as_torch(op: str, left: Value, right: Value) -> Value | None:
    """The operation where torch's rules differ from those of a quire.Variant, else None."""
    types = left.node.type, right.node.type
    if types == (BOOL, BOOL) and op in ("add", "mul"):
        return operate("or" if op == "add" else "and", left, right)
    if FLOAT in types and op in ("floordiv", "mod"):
        quotient: Value = call("floor", left / right)
        return quotient if op == "floordiv" else _remainder(left, right, quotient)
    if op in ("shl", "shr") and FLOAT not in types:
        return _shifted(op, left, right)
    return None


def _remainder(a: Value, b: Value, quotient: Value) -> Value:
    if b.node.op == "const" and math.isfinite(b.node.value):  # type: ignore[arg-type]
        return a.tracer.lift(a - quotient * b)
    beyond = call("where", (a != 0) & ((a < 0) != (b < 0)), b, a)
    is_beyond = (call("abs", b) == math.inf) & (call("abs", a) < math.inf)
    found: Value = call("where", is_beyond, beyond, a - quotient * b)
    return found


def _shifted(op: str, a: Value, bits: Value) -> Value | None:
    low, high = a.tracer.bounds(bits.node)
    if low >= 0 and high < 32:
        return None
    is_whole = (bits >= 0) & (bits < 32)
    within = call("where", is_whole, bits, 31)
    last = a.tracer.constant(0) if op == "shl" else a.tracer.value("shr", INT, a, a.tracer.constant(31))
    return call("where", is_whole, a.tracer.value(op, INT, _int(a), _int(within)), last)


def _int(x: Value) -> Value:
    return call("to_int", x)


def _float(x: Any) -> Value:
    return call("to_float", x)


def _bool(x: Any) -> Any:
    return x if x.node.type == BOOL else x != 0


def _of_floats(function: Callable[[Value], Any]) -> Callable[..., Any]:
    return lambda input: function(_float(input))


def _rounded(function: Callable[[Value], Value]) -> Callable[..., Any]:
    """A function that leaves integers as they are."""
    return lambda input: function(input) if input.node.type == FLOAT else input


def _ceil(x: Value) -> Value:
    return -call("floor", -x)


def _trunc(x: Value) -> Value:
    return call("where", x < 0, _ceil(x), call("floor", x))


def _round(x: Value) -> Value:
    low = call("floor", x)
    past, is_even = x - low, low == call("floor", low * 0.5) * 2.0
    up = (past > 0.5) | ((past == 0.5) & ~is_even)
    return call("where", call("abs", x) < 2.0**23, call("where", up, low + 1.0, low), x)


def _clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        fail("clamp(): expected min, max or both.")
    least = input if min is None else call("maximum", input, min)
    return least if max is None else call("minimum", least, max)


def _div(input: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return operate("floordiv", input, other)
    if rounding_mode is None:
        return operate("div", input, other)
    if rounding_mode != "trunc":
        fail(f"div(): expected rounding_mode None, 'trunc' or 'floor', got {rounding_mode!r}.")
    a, b = _pair(input, other)
    if FLOAT in (a.node.type, b.node.type):
        return _trunc(a / b)
    size = operate("floordiv", call("abs", a), call("abs", b))
    return call("where", (a < 0) ^ (b < 0), -size, size)


def _fmod(input: Any, other: Any) -> Any:
    return input - _div(input, other, "trunc") * other


def _pair(a: Any, b: Any) -> tuple[Value, Value]:
    tracer = tracer_of([a, b])
    return tracer.lift(a), tracer.lift(b)


def _pow(input: Any, exponent: Any) -> Any:
    x, y = _pair(input, exponent)
    if y.node.op == "const" and float(y.node.value).is_integer() and abs(float(y.node.value)) <= _MOST_POWER:
        return _whole_power(x, int(y.node.value), y.node.type == FLOAT)
    if FLOAT not in (x.node.type, y.node.type):
        fail("pow(): expected a whole number as the exponent of integers; convert one of them with float().")
    x, y = _float(x), _float(y)
    if x.node.op == "const" and x.node.value > 0:  # type: ignore[operator]
        return call("exp2", y * math.log2(x.node.value))  # type: ignore[arg-type]
    if y.node.op == "const" and abs(y.node.value) == 0.5:  # type: ignore[arg-type]
        return call("sqrt" if y.node.value > 0 else "rsqrt", x)  # type: ignore[operator]
    size, half = call("exp2", y * call("log2", call("abs", x))), call("floor", y * 0.5)
    of_negative = call("where", call("floor", y) == y, call("where", half * 2.0 == y, size, -size), math.nan)
    return call("where", y == 0, 1.0, call("where", x < 0, of_negative, size))


def _whole_power(x: Value, exponent: int, is_float: bool) -> Value:
    if exponent < 0 and x.node.type != FLOAT and not is_float:
        fail("pow(): integers have no negative powers; convert with float().")
    x = _float(x) if is_float else _int(x) if x.node.type == BOOL else x
    power = x.tracer.constant(1.0 if x.node.type == FLOAT else 1) if exponent == 0 else x
    for bit in bin(abs(exponent))[3:]:  # those below the highest
        power = power * power * x if bit == "1" else power * power
    return power if exponent >= 0 else 1.0 / power


def _sign(input: Any) -> Any:
    sign = call("where", input > 0, 1, call("where", input < 0, -1, 0))
    return _float(sign) if input.node.type == FLOAT else sign


def _gelu(input: Any, approximate: str = "none") -> Any:
    x = _float(input)
    if approximate == "tanh":
        return 0.5 * x * (1.0 + call("tanh", math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    if approximate != "none":
        fail(f"gelu(): expected approximate 'none' or 'tanh', got {approximate!r}.")
    return 0.5 * x * (1.0 + call("erf", x * math.sqrt(0.5)))


def _softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    x = _float(input) * float(beta)
    found = (call("maximum", x, 0.0) + call("log", 1.0 + call("exp", -call("abs", x)))) / float(beta)
    return call("where", x > float(threshold), input, found)


def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    _not_in_place(inplace)
    return call("where", input > 0, input, input * negative_slope)


def _relu(input: Any, inplace: bool = False) -> Any:
    _not_in_place(inplace)
    return call("maximum", input, 0)


def _silu(input: Any, inplace: bool = False) -> Any:
    _not_in_place(inplace)
    return _float(input) * call("sigmoid", input)


def _not_in_place(inplace: bool) -> None:
    if inplace:
        fail("expected inplace=False: values of the kernel cannot be written.")


def _to(input: Any, *args: Any, **kwargs: Any) -> Any:
    wanted = [x for x in (*args, *kwargs.values()) if str(x).startswith("torch.")]
    if len(wanted) != 1:
        fail("to(): expected one data type of torch.")
    return input.to(wanted[0])


def _to_kind(input: Any, *, kind: str) -> Any:
    return input.to(kind)


def _like(value: Any) -> Callable[..., Any]:
    def found(input: Any, fill_value: Any = value, dtype: Any = None, device: Any = None) -> Any:
        filled = input.tracer.constant(fill_value)
        return filled.to(dtype) if dtype is not None else filled.to(input.dtype)

    return found


def _subtracted(input: Any, other: Any, alpha: Any = 1) -> Any:
    return operate("sub", input, other if alpha == 1 else other * alpha)


def _added(input: Any, other: Any, alpha: Any = 1) -> Any:
    return operate("add", input, other if alpha == 1 else other * alpha)


def _where(condition: Any, input: Any, other: Any) -> Any:
    return call("where", condition, input, other)


def _binary_of(op: str) -> Callable[..., Any]:
    return lambda input, other: operate(op, input, other)


def _reflected_of(op: str) -> Callable[..., Any]:
    return lambda input, other: operate(op, other, input)


def _unary_of(op: str) -> Callable[..., Any]:
    return lambda input: call(op, input)


def _logical(op: str) -> Callable[..., Any]:
    def found(input: Any, other: Any) -> Any:
        a, b = _pair(input, other)
        return operate(op, _bool(a), _bool(b))

    return found


_OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "truediv": "div", "floordiv": "floordiv", "mod": "mod",
    "and": "and", "or": "or", "xor": "xor", "lshift": "shl", "rshift": "shr", "lt": "lt", "le": "le", "gt": "gt",
    "ge": "ge", "eq": "eq", "ne": "ne",
}  # fmt: skip
_ALIASES = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "negative": "neg", "clip": "clamp", "less": "lt",
    "less_equal": "le", "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "absolute": "abs", "__abs__": "abs",
    "fix": "trunc", "bitwise_left_shift": "__lshift__", "bitwise_right_shift": "__rshift__", "remainder": "__mod__",
    "bitwise_and": "__and__", "bitwise_or": "__or__", "bitwise_xor": "__xor__", "bitwise_not": "__invert__",
    "floor_divide": "__floordiv__", "true_divide": "__truediv__", "__neg__": "neg", "__pow__": "pow",
    "float_power": "pow", "rsub": "__rsub__", "expit": "sigmoid", "sgn": "sign", "special_erf": "erf",
    "special_expit": "sigmoid", "log_sigmoid": "logsigmoid",
}  # fmt: skip
#: Of single values; applied to each element of arrays.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _binary_of(op) for name, op in _OPERATORS.items()},
    **{f"__r{name}__": _reflected_of(op) for name, op in _OPERATORS.items() if op[:2] not in ("lt", "le", "gt", "ge")},
    **{name: _unary_of(name) for name in (*FLOAT_FUNCTIONS, "abs")},
    **{name: _binary_of(name) for name in ("mul", "lt", "le", "gt", "ge", "eq", "ne")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor")},
    "add": _added, "sub": _subtracted, "div": _div, "fmod": _fmod, "pow": _pow, "where": _where, "clamp": _clamp,
    "clamp_min": lambda input, min: _clamp(input, min), "clamp_max": lambda input, max: _clamp(input, None, max),
    "__rpow__": lambda input, other: _pow(other, input), "__pos__": lambda input: input,
    "minimum": lambda input, other: call("minimum", input, other),
    "maximum": lambda input, other: call("maximum", input, other),
    "neg": lambda input: -input, "__invert__": lambda input: ~input, "logical_not": lambda input: ~_bool(input),
    "square": lambda input: input * input, "reciprocal": lambda input: 1.0 / input, "sign": _sign,
    "floor": _rounded(lambda x: call("floor", x)), "ceil": _rounded(_ceil), "trunc": _rounded(_trunc),
    "round": _rounded(_round), "frac": lambda input: input - _trunc(input),
    "tan": _of_floats(lambda x: call("sin", x) / call("cos", x)),
    "sinh": _of_floats(lambda x: 0.5 * (call("exp", x) - call("exp", -x))),
    "cosh": _of_floats(lambda x: 0.5 * (call("exp", x) + call("exp", -x))),
    "erfc": _of_floats(lambda x: 1.0 - call("erf", x)), "expm1": _of_floats(lambda x: call("exp", x) - 1.0),
    "log1p": _of_floats(lambda x: call("log", 1.0 + x)),
    "log10": _of_floats(lambda x: call("log2", x) * math.log10(2.0)),
    "logsigmoid": _of_floats(lambda x: call("minimum", x, 0.0) - call("log", 1.0 + call("exp", -call("abs", x)))),
    "relu": _relu, "silu": _silu, "gelu": _gelu, "softplus": _softplus, "leaky_relu": _leaky_relu,
    "isnan": lambda input: input != input, "isinf": lambda input: call("abs", _float(input)) == math.inf,
    "isfinite": lambda input: call("abs", _float(input)) < math.inf,
    "masked_fill": lambda input, mask, value: call("where", mask, value, input),
    "lerp": lambda input, end, weight: input + weight * (end - input),
    "addcmul": lambda input, tensor1, tensor2, value=1: input + tensor1 * tensor2 * value,
    "zeros_like": _like(0), "ones_like": _like(1), "full_like": _like(None),
    "clone": lambda input: input, "detach": lambda input: input, "contiguous": lambda input: input,
    "to": _to, "type_as": lambda input, other: input.to(other.dtype),
    **{name: partial(_to_kind, kind=kind) for name, kind in (
        ("float", "float32"), ("double", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("int", "int32"),
        ("long", "int64"), ("bool", "bool"),
    )},
}  # fmt: skip
#: Methods whose arguments have another order than those of the function.
_METHODS: dict[str, Callable[..., Any]] = {
    "where": lambda input, condition, other: call("where", condition, input, other)
}


# --- calls -----------------------------------------------------------------------------------------------------------


def call_torch(name: str, args: Any, kwargs: dict[str, Any], methods: bool = False) -> Any:
    """Record a call of torch's function `name`, or of the method."""
    name = _ALIASES.get(name, name)
    function = _METHODS.get(name) if methods else None
    of_array = None if function is not None else OF_ARRAYS.get(name)
    function = function or of_array or _FUNCTIONS.get(name)
    if function is None:
        if name.endswith("_") and name[:-1] in _FUNCTIONS:
            fail(f"torch's {name}() writes a value of the kernel; use {name[:-1]}().")
        fail(f"torch's {name}() is no function of values of the kernel; there are operators and {_known()}.")
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError as error:
        fail(f"torch's {name}(): {error}; expected {signature(function)}.")
    return function(*args, **kwargs) if of_array is not None else apply(function, args, kwargs)


def method(value: Any, name: str) -> Any:
    """The method of this name of a value or an array."""
    known = _ALIASES.get(name, name)
    if known in _METHODS or known in _FUNCTIONS or known in OF_ARRAYS or name.removesuffix("_") in _FUNCTIONS:
        return lambda *args, **kwargs: call_torch(name, (value, *args), kwargs, True)
    if name.startswith("__"):
        raise AttributeError(name)
    return fail(f"values of the kernel have no {name!r}; they have operators, to(), and the functions {_known()}.")


def _known() -> str:
    names = {*_FUNCTIONS, *OF_ARRAYS, *_ALIASES}
    return ", ".join(sorted(name for name in names if not name.startswith("_")))


TORCH.update(call=call_torch, method=method)
