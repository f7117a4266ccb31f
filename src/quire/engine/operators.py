"""Calls as torch operators: what torch.compile, torch.export, make_fx and FakeTensorMode record instead of a launch.

An operator does the same as the eager call, and writes into tensors that the graph allocates. Eager calls do not go
through torch's dispatcher. A graph refers to a planned wrapper by an integer, its handle: plan() may be called again
between runs of the graph, and the wrapper must be kept as long as the graph, in the process that traced it.

With torch.compile(mode="reduce-overhead"), run() of a wrapper with use_cuda_graph=True becomes part of a CUDA graph;
other wrappers and single calls run between the graphs, as their plans hold for one batch. Such a graph copies its
inputs at each call, unless they are marked: torch._dynamo.mark_static_address(paged_kv_cache).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import count
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch._C import _functorch, _len_torch_dispatch_stack
from torch._ops import HigherOrderOperator
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_leaves

from quire.engine.attention import planned
from quire.engine.launch import recorded
from quire.engine.operands import NO_OPERANDS
from quire.engine.run import PLAIN, RunOptions
from quire.engine.tensors import PagedCache, cache_tensors
from quire.engine.upcast import numbers_in_byte
from quire.errors import PlanError, ValidationError

P = ParamSpec("P")
R = TypeVar("R")
_torch_library: Any = torch.library  # has types in some releases of torch only
_LIBRARY = _torch_library.Library("quire", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
#: Tags of a call that a CUDA graph cannot hold: torch.compile(mode="reduce-overhead") runs it between its graphs.
NOT_CAPTURABLE = tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)]))

_wrappers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_handles = count(2)  # torch.compile makes graphs of their own for integers 0 and 1


def handle_of(wrapper: Any) -> int:
    """A new handle of `wrapper`, which stays the same when it is planned again."""
    handle = next(_handles)
    _wrappers[handle] = wrapper
    return handle


def is_tracing() -> bool:
    """Whether calls are recorded or transformed by torch, so that tensors may have no memory."""
    if is_dynamo_compiling():
        return True
    modes = _len_torch_dispatch_stack()
    if modes and modes > (recorded.call is not None):  # a recording is a mode, too
        return True
    return _functorch.peek_interpreter_stack() is not None


#: Types in schemas, beside those of the same name; an integer may be symbolic.
_TYPES = {"torch.Tensor": "Tensor", "int": "SymInt", "Llama31": "float[]"}


def _schema_of(name: str, function: Callable[..., Any], written: Sequence[str]) -> str:
    """The schema that the annotations of a function say. torch.library.infer_schema() needs torch 2.5 and no tuples."""
    arguments, signature = [], inspect.signature(function)
    for argument, parameter in signature.parameters.items():
        kind, optional, _ = parameter.annotation.partition(" | None")
        alias = f"({chr(97 + written.index(argument))}!)" if argument in written else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        arguments.append(f"{_TYPES.get(kind, kind)}{alias}{'?' * bool(optional)} {argument}{default}")
    results = ["Tensor"] * str(signature.return_annotation).count("torch.Tensor")
    return f"{name}({', '.join(arguments)}) -> ({', '.join(results)})"


def operator(
    schema: str, fake: Callable[..., Any] = lambda *_, **__: None, tags: tuple[torch.Tag, ...] = (), writes: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a function as the torch operator quire::`schema`, which replaces it while torch traces.

    schema: of torch, or a name alone, if annotations say the rest; the operator then writes into the arguments named in
    `writes`. `fake` creates results without memory; operators that write into their arguments have none.
    """
    name = schema.partition("(")[0]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        text = _schema_of(name, function, writes.split()) if name == schema else schema
        _LIBRARY.define(text, tags=(*_TAGS, *tags))
        op = getattr(torch.ops.quire, name).default

        def without_gradients(*args: Any, **kwargs: Any) -> Any:
            if not is_tracing() and type(args[1]) is torch.Tensor:
                return function(*args, **kwargs)  # one call into Python instead of two; it refuses gradients itself
            _refuse_gradients(f"quire::{name}", (*args, *kwargs.values()))
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args, **kwargs)

        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        _LIBRARY.impl(name, without_gradients, "Autograd")
        _torch_library.register_fake(f"quire::{name}", fake, lib=_LIBRARY)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return _record(op, *args, **kwargs) if is_tracing() else function(*args, **kwargs)

        return call

    return decorate


def _refuse_gradients(name: str, inputs: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in inputs):
        raise ValidationError(
            f"{name}: expected no tensor that requires grad, as Quire is for inference only; call it under "
            f"torch.no_grad() or torch.inference_mode(), or detach its inputs."
        )


def _record(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `op`, or its functional counterpart for torch.func.functionalize, which takes no operators that write."""
    level = None if is_dynamo_compiling() else _functorch.peek_interpreter_stack()
    if level is None or level.key() != _functorch.TransformType.Functionalize or not op._schema.is_mutable:
        return op(*args, **kwargs)
    from torch._higher_order_ops.auto_functionalize import auto_functionalized

    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    for name, result in zip(written, auto_functionalized(op, **given)[1:], strict=True):
        if result is not None:
            given[name].copy_(result)
    return None


def new_results(
    q: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | None, out: torch.Tensor | None, lse: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The tensors that a traced call writes, `out` and `lse` where they are given."""
    if out is None:
        out = q.new_empty((*q.shape[:-1], v.shape[-1] * numbers_in_byte(v)), dtype=dtype)
    if lse is None and return_lse:
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    return out, lse


class FunctionsOperator(HigherOrderOperator):
    """torch.ops.higher_order.NAME: an operator that takes Python functions, which Dynamo traces like those of torch's
    flex_attention: its arguments are theirs (query, key, value, score_mod, (..., mask_mod), scale, kernel_options), and
    then the tensors and integers that each function captures.
    """

    def __init__(self, name: str, call: Callable[..., Any], fake: Callable[..., Any]) -> None:
        """call: the same with what functions say as text; fake: creates results without memory."""
        super().__init__(name)  # type: ignore[no-untyped-call]
        self.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)(call)
        self.py_impl(torch._C.DispatchKey.Autograd)(self._without_gradients)
        self.py_functionalize_impl(self._functional)
        self._call, self._fake = call, fake
        self._is_complete = False

    def __call__(self, *args: Any) -> Any:
        """Call it, or record the call."""
        if not self._is_complete:  # torch's modules of its tracers are loaded by whoever traces
            from torch._subclasses.fake_tensor import FakeTensorMode
            from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

            self.py_impl(FakeTensorMode)(partial(_in_mode, self._fake))
            self.py_impl(ProxyTorchDispatchMode)(partial(_in_mode, self._call))
            self._is_complete = True
        return super().__call__(*args)  # type: ignore[no-untyped-call]

    def _without_gradients(self, *args: Any) -> Any:
        _refuse_gradients(self._name, tree_leaves(args))
        with torch._C._AutoDispatchBelowAutograd():
            return self(*args)

    def _functional(self, context: Any, *args: Any) -> Any:
        given = context.unwrap_tensors(args)
        with context.redispatch_to_next():
            return context.wrap_tensors(self(*given))

    def is_known(self) -> bool:
        """Make Dynamo know the operator, if this release of torch can."""
        from torch._dynamo.variables import higher_order_ops as theirs  # loaded by whoever compiles

        known = getattr(theirs, "_hop_name_to_variable_class", None)
        if known is None or not hasattr(theirs, "FlexAttentionHigherOrderVariable"):
            return False
        known.setdefault(self._name, theirs.FlexAttentionHigherOrderVariable)
        return True


def _in_mode(function: Callable[..., Any], mode: Any, *args: Any) -> Any:
    with mode:
        return function(*args)


#: Operands of a variant in a graph, by name: tensors, then floats, then integers; None without any.
OPERANDS = "Tensor[]? tensors=None, float[]? floats=None, SymInt[]? ints=None, str[]? names=None"
#: `v` is None where one tensor `k` is the cache of keys and values.
_TENSORS = "SymInt wrapper, Tensor q, Tensor k, Tensor? v, Tensor(a!) out, Tensor(b!)? lse"
_OPTIONS = f"""Tensor? sinks=None, float? q_scale=None, float? k_scale=None, float? v_scale=None, int? window_left=None,
               bool? enable_pdl=None, Tensor[]? others=None, {OPERANDS}"""


class TracedOperands(NamedTuple):
    """Operands of a variant as the graph's operators take them."""

    tensors: list[torch.Tensor] | None = None
    floats: list[float] | None = None
    ints: list[int] | None = None
    names: list[str] | None = None

    @classmethod
    def of(cls, operands: Mapping[str, Any]) -> TracedOperands:
        """From the caller's operands, which are checked when the graph runs."""
        if not operands:
            return cls()
        tensors = {name: value for name, value in operands.items() if isinstance(value, torch.Tensor)}
        ints: dict[str, Any] = {n: value for n, value in operands.items() if isinstance(value, (int, torch.SymInt))}
        floats = {name: value for name, value in operands.items() if name not in tensors and name not in ints}
        names = [*tensors, *floats, *ints]
        return cls(list(tensors.values()), list(floats.values()), list(ints.values()), names)

    def by_name(self) -> Mapping[str, Any]:
        """The operands by name."""
        values = [*(self.tensors or ()), *(self.floats or ()), *(self.ints or ())]
        return dict(zip(self.names or (), values, strict=True))


def _run(
    wrapper: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, out: torch.Tensor,
    lse: torch.Tensor | None, sinks: torch.Tensor | None = None, q_scale: float | None = None,
    k_scale: float | None = None, v_scale: float | None = None, window_left: int | None = None,
    enable_pdl: bool | None = None, others: Sequence[torch.Tensor] | None = None, *operands: Any, **more_operands: Any,
) -> None:  # fmt: skip
    found = _wrappers.get(wrapper)
    if found is None:
        raise PlanError("run(): the wrapper that was traced is gone; keep it for as long as the graph is used.")
    planned(found._attention).run(
        q, k if v is None else (k, v), out, lse, False,
        RunOptions(
            sinks, q_scale, k_scale, v_scale, window_left, enable_pdl, others=tuple(others or ()),
            operands=TracedOperands(*operands, **more_operands).by_name() if operands or more_operands else NO_OPERANDS,
        ),
    )  # fmt: skip


def _operators(name: str, tags: tuple[torch.Tag, ...] = ()) -> tuple[Callable[..., None], Callable[..., None]]:
    """run() as an operator without options and with them: a graph passes each argument of an operator in each call."""
    plain = operator(f"{name}({_TENSORS}) -> ()", tags=tags)(_run)
    return plain, operator(f"{name}_with_options({_TENSORS}, {_OPTIONS}) -> ()", tags=tags)(_run)


_run_eagerly = _operators("run", NOT_CAPTURABLE)
_run_captured = _operators("run_captured")  # of a wrapper with use_cuda_graph=True


class TracedRun:
    """run() of a planned wrapper while torch traces."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def run(
        self, q: torch.Tensor, kv: PagedCache, out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: bool = False, options: RunOptions = PLAIN,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
        """run() of the plan that the wrapper has when the graph runs."""
        wrapper, tensors = self._wrapper, cache_tensors(kv)
        out, lse = new_results(q, tensors[-1], planned(wrapper._attention).o_dtype, out, lse, return_lse)
        plain, with_options = _run_captured if wrapper.is_cuda_graph_enabled else _run_eagerly
        given = {
            "sinks": options.sinks, "q_scale": options.q_scale, "k_scale": options.k_scale, "v_scale": options.v_scale,
            "window_left": options.window_left, "enable_pdl": options.enable_pdl,
            "others": list(options.others) or None, **TracedOperands.of(options.operands)._asdict(),
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        v = tensors[1] if len(tensors) == 2 else None
        (with_options if given else plain)(wrapper._handle, q, tensors[0], v, out, lse, **given)
        return (out, lse) if return_lse and lse is not None else out
