"""Custom variants: a score and a mask written in Python, traced, and compiled into the main loop of every kernel."""

from __future__ import annotations

import hashlib
import keyword
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

from quire.errors import ValidationError
from quire.kernels.expressions.trace import (
    FAILURES,
    MOST_DIMS,
    TensorValue,
    Tracer,
    Untraceable,
    Value,
    call,
    is_own,
    operate,
    place_of,
)
from quire.kernels.expressions.tree import (
    BOOL,
    FLOAT,
    FUNCTIONS,
    INDICES,
    INT,
    OPERAND_TYPES,
    SCALAR_TYPES,
    Expression,
    Node,
    attention,
    to_text,
)

if TYPE_CHECKING:
    import ast

    import torch

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


_FLEX_WORDS = " FlexAttention's b is request, and h is head; quire.flex_attention() takes such functions."


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
            f"declared in tensors= or scalars=.{_FLEX_WORDS if parameter in ('b', 'h', 'batch') else ''}"
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


_known: dict[str, Variant] = {}  # by digest, for slugs that name one


class Variant:
    """Python functions that define how each logit is changed, and which keys a query sees.

    score(score, q_idx, kv_idx, head, request, ...): returns the float32 that replaces the logit `score` = sm_scale *
        q . k before softmax. None: logits are unchanged.
    mask(q_idx, kv_idx, head, request, ...): returns a bool, whether the query sees the key. It is combined with
        `causal`, a window and a custom mask. None: all keys are visible. The tensors and numbers that it reads are
        passed to plan(), which finds the KV tiles that need the mask.
    tensors, scalars: names and types of further arguments of both functions, whose values are passed to each call.
        Tensors: float32, float16, bfloat16, int32, int64, uint8 or bool, read as name[i] or name[i, j]. Scalars:
        float32 or int32.

    Functions take the arguments that they need, by name: `score`; the index of the query and of the key in their
    request (q_idx, kv_idx); the query head (head); the index of the request (request); its lengths (qo_len, kv_len);
    and declared names. The position of a query is q_idx + kv_len - qo_len. The constructor calls the functions once,
    with values that record the operations on them: operators, comparisons, and the functions of quire.expression or
    torch's of the same names.

    Numbers are float32, integers are int32 and wrap on overflow. Division by 0 follows IEEE 754; integer division by 0
    gives 0, and the remainder is then the dividend; // and % round towards minus infinity, as in Python. An index
    outside of a tensor reads the nearest element. Where q_idx, kv_idx, head or request itself is the index, the size of
    the tensor is checked before the launch.

    Raises ValidationError that names the line in which a function does anything else: an `if` on a value, a side
    effect, an unknown function, a wrong type.

    >>> alibi = quire.Variant(
    ...     score=lambda score, q_idx, kv_idx, head, qo_len, kv_len, slopes: (
    ...         score + slopes[head] * (kv_idx - (q_idx + kv_len - qo_len))
    ...     ),
    ...     tensors={"slopes": torch.float32},
    ... )
    >>> q, k, v, slopes = torch.randn(3, 8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64), torch.rand(8)
    >>> o = quire.single_prefill_with_kv_cache(q, k, v, causal=True, variant=alibi, slopes=slopes)
    >>> bool((o.double() - alibi.reference(q, k, v, causal=True, slopes=slopes)).abs().max() < 1e-4)
    True
    """

    def __init__(
        self, score: Callable[..., Any] | None = None, mask: Callable[..., Any] | None = None, *,
        tensors: Mapping[str, Any] | None = None, scalars: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        given = _types(tensors, "tensors", tuple(OPERAND_TYPES)), _types(scalars, "scalars", SCALAR_TYPES)
        first, again = (_traced(score, mask, *given) for _ in range(2))
        if first != again:
            raise ValidationError(
                "variant: its functions do not return the same expression each time; they may depend on their "
                "arguments only."
            )
        self.expression = first
        _known[self.digest] = self

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant whose `str()` is `text`, as stored in manifests. Raises ValidationError if there is none."""
        if not isinstance(text, str):
            raise ValidationError(f"variant: expected its text as a str, got {type(text).__name__}; pass str(variant).")
        variant = cls.__new__(cls)
        variant.expression = read_text(text)
        _known[variant.digest] = variant
        return variant

    def __str__(self) -> str:
        return self.expression.text

    def __repr__(self) -> str:
        return f"<quire.Variant {self.digest}>"

    def __hash__(self) -> int:
        return hash(self.expression)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variant) and self.expression == other.expression

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the variant in slugs and keys."""
        return hashlib.sha256(self.expression.text.encode()).hexdigest()[:16]

    @property
    def has_score(self) -> bool:
        """Whether the variant changes scores."""
        return self.expression.score is not None

    @property
    def has_mask(self) -> bool:
        """Whether the variant has a mask."""
        return self.expression.mask is not None

    def reference(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        """Attention in float64 on the CPU, for tests: see attention() in expressions/tree.py."""
        return attention(self.expression, q, k, v, **options)


def variant_of_trees(score: Node | None, mask: Node | None, tracer: Tracer) -> Variant:
    """The variant of functions that the caller has traced."""
    variant = Variant.__new__(Variant)
    variant.expression = _checked(score, mask, tracer)
    _known[variant.digest] = variant
    return variant


def find_variant(digest: str) -> Variant:
    """The variant that a slug names."""
    if digest in _known:
        return _known[digest]
    raise ValidationError(
        f"variant: {digest} is not known in this process; import the module that makes it, or name it with "
        f"--variant package.module:name."
    )


def _types(given: Mapping[str, Any] | None, name: str, known: tuple[str, ...]) -> dict[str, str]:
    """The declared operands, and torch's names of their data types."""
    found = {}
    if given is not None and not isinstance(given, Mapping):
        raise ValidationError(f"{name}: expected names and types, as a dict, got {type(given).__name__}.")
    for operand, kind in (given or {}).items():
        if not isinstance(operand, str):
            raise ValidationError(f"{name}: expected names as str, got {operand!r}; choose a name for each operand.")
        word = {"float": "float32", "int": "int32"}.get(getattr(kind, "__name__", ""), str(kind))
        word = word.removeprefix("torch.")
        if word not in known:
            raise ValidationError(f"{name}: expected one of {', '.join(known)} for {operand!r}, got {kind!r}.")
        taken = operand in INDICES or operand in FUNCTIONS or operand in ("score", "mask", "size", "inf", "nan")
        if (
            not operand.isidentifier()
            or not operand.isascii()
            or operand[0] == "_"
            or taken
            or keyword.iskeyword(operand)
        ):
            raise ValidationError(f"{name}: {operand!r} cannot name an operand; choose another name.")
        found[operand] = word
    return found


def _traced(score: Any, mask: Any, tensors: dict[str, str], scalars: dict[str, str]) -> Expression:
    if both := tensors.keys() & scalars.keys():
        raise ValidationError(f"scalars: {min(both)!r} is declared as a tensor too.")
    if score is None and mask is None:
        raise ValidationError("variant: expected a score, a mask or both.")
    tracer = Tracer(tensors, scalars)
    of_score = None if score is None else trace(score, "score", tracer)
    return _checked(of_score, None if mask is None else trace(mask, "mask", tracer), tracer)


def _checked(score: Node | None, mask: Node | None, tracer: Tracer) -> Expression:
    """The expression of two trees, after checks of their types."""
    for node, name in ((score, "score"), (mask, "mask")):
        if node is not None:
            check_type(node, name)
    if score is not None and score.type != FLOAT:
        score = tracer.tree.node("to_float", FLOAT, score)
    if score is not None and score.op == "score":
        score = None
    operands = tracer.operands()
    written = tracer.tree.node("score", FLOAT) if score is None and mask is None else score  # no text is empty
    text = to_text(written, mask, operands)
    if len(text) > _LONGEST_TEXT:
        raise ValidationError(
            f"variant: expected a text of at most {_LONGEST_TEXT} characters, got {len(text)}; shorten the names of "
            f"operands, or write it with fewer operations."
        )
    return Expression(text, score, mask, operands)


# --- texts -----------------------------------------------------------------------------------------------------------

_LONGEST_TEXT = 1 << 18  #: characters; a thousand operations have a tenth of it
#: Python's operators, by their syntax nodes.
_OPERATORS = {
    "Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "FloorDiv": "floordiv", "Mod": "mod", "BitAnd": "and",
    "BitOr": "or", "BitXor": "xor", "LShift": "shl", "RShift": "shr", "Lt": "lt", "LtE": "le", "Gt": "gt", "GtE": "ge",
    "Eq": "eq", "NotEq": "ne",
}  # fmt: skip


@lru_cache(maxsize=256)
def read_text(text: str) -> Expression:
    """The expression that to_text() wrote. Texts come from files, so Python computes nothing of what they say."""
    import ast  # texts are rarely read

    if len(text) > _LONGEST_TEXT:
        raise ValidationError(
            f"variant: its text cannot be read: expected at most {_LONGEST_TEXT} characters, got {len(text)}."
        )
    try:
        expression = _read(ast.parse(text))
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError, ValidationError) as error:
        raise ValidationError(f"variant: its text cannot be read: {error}: {text[:200]!r}.") from error
    if expression.text != text:
        raise ValidationError(f"variant: its text is not as Quire writes it: {text[:200]!r}.")
    return expression


def _read(module: ast.Module) -> Expression:
    import ast

    tensors, scalars, ranks = dict[str, str](), dict[str, str](), dict[str, int]()
    assigned = list[tuple[str, ast.expr]]()
    for line in module.body:
        match line:
            case ast.AnnAssign(ast.Name(name), ast.Subscript(ast.Name(kind), ast.Constant(int(rank)))):
                tensors[name], ranks[name] = kind, int(rank)
            case ast.AnnAssign(ast.Name(name), ast.Name(kind)):
                scalars[name] = kind
            case ast.Assign([ast.Name(name)], value):
                assigned.append((name, value))
            case _:
                raise SyntaxError(f"{type(line).__name__} is no part of it")
    tracer = Tracer(_types(tensors, "tensors", tuple(OPERAND_TYPES)), _types(scalars, "scalars", SCALAR_TYPES))
    if strange := [name for name, rank in ranks.items() if not 1 <= rank <= MOST_DIMS]:
        raise ValueError(f"{strange[0]} has no 1 to {MOST_DIMS} dimensions")
    tracer.ranks.update(ranks)
    names = _names(tracer)
    for name, value in assigned:
        names[name] = _value(value, names, tracer)
    roots = {name: tracer.lift(names[f"_{name}_"]).node for name in ("score", "mask") if f"_{name}_" in names}
    return _checked(roots.get("score"), roots.get("mask"), tracer)


def _value(syntax: ast.expr, names: Mapping[str, Any], tracer: Tracer) -> Value:
    """What a part of a line says, as recorded operations, also those of constants alone."""
    import ast

    def of(part: ast.expr) -> Value:
        return _value(part, names, tracer)

    match syntax:
        case ast.Name(name) if not isinstance(names[name], TensorValue):
            return tracer.lift(names[name])
        case ast.Constant(bool() | int() | float() as number):
            return tracer.constant(number)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return tracer.constant(-number)
        case ast.UnaryOp(ast.USub(), part):
            return -of(part)
        case ast.UnaryOp(ast.Invert(), part):
            return ~of(part)
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
            return operate(_OPERATORS[type(op).__name__], of(left), of(right))
        case ast.Call(ast.Name("size"), [ast.Name(name), ast.Constant(int(dim))], []):
            return _tensor(name, names).shape[int(dim)]
        case ast.Call(ast.Name(name), args, []) if FUNCTIONS.get(name) == len(args):
            return call(name, *map(of, args))
        case ast.Subscript(ast.Name(name), ast.Tuple(indices)):
            return _tensor(name, names)[tuple(map(of, indices))]
        case ast.Subscript(ast.Name(name), index):
            return _tensor(name, names)[of(index)]
    raise SyntaxError(f"{ast.unparse(syntax)[:100]!r} is no part of it")


def _tensor(name: str, names: Mapping[str, Any]) -> TensorValue:
    found = names[name]
    if not isinstance(found, TensorValue):
        raise TypeError(f"{name} is no tensor")
    return found


def _names(tracer: Tracer) -> dict[str, Any]:
    """The values of names in a text."""
    operands = {name: tracer.operand(name) for name in (*tracer.tensors, *tracer.scalars)}
    return {
        **operands, **{name: tracer.value("index", "int", value=name) for name in INDICES},
        "score": tracer.value("score", FLOAT), "inf": tracer.constant(float("inf")),
        "nan": tracer.constant(float("nan")),
    }  # fmt: skip
