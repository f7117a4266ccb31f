"""torch's FlexAttention with Quire's kernels: its score and mask functions are traced like those of a quire.Variant.

The API is that of torch.nn.attention.flex_attention (Dong et al., 2024, https://arxiv.org/abs/2412.05496).

A score or a mask is traced once for equal dependencies. A function depends on its code, its defaults, and the closure
cells and global variables that the code names. They are compared by value, and tensors by their types and shapes: a
trace refers to tensors by their place in this list. A function that depends on anything else (an object with
attributes, a module of the program) is traced in each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from quire.attention.flex_inputs import Inputs, check_lengths, is_other, mask_of
from quire.engine.attention import Attention
from quire.engine.checks import check_flags, scalar
from quire.engine.operands import split_operands
from quire.engine.operators import is_tracing
from quire.engine.options import PlanOptions, Types, heads, logits_options
from quire.engine.plan_cache import plan_of, repeated
from quire.engine.run import RunOptions
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import LN2
from quire.engine.wrapper import Pair
from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expressions.arrays import Array
from quire.kernels.expressions.dependencies import FunctionState, state_of
from quire.kernels.expressions.rewrite import MaskParts, split_mask
from quire.kernels.expressions.torch_functions import call_torch, operate_as_torch
from quire.kernels.expressions.trace import Tracer, Value, fail
from quire.kernels.expressions.tree import BOOL, FLOAT, OPERAND_TYPES, Node, bounds_of
from quire.kernels.expressions.variant import Variant, call_traced, variant_of_trees

__all__ = ["flex_attention"]

_MOST_TRACES = 256  #: that are kept
_TENSORS = torch.Tensor, torch.nn.Parameter


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Any = None, *, return_aux: None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True], kernel_options: Any = None,
    return_aux: None = None,
) -> Pair: ...  # fmt: skip
@overload
def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any: ...
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """Attention of query [batch, num_qo_heads, q_len, head_dim] over key and value [batch, num_kv_heads, kv_len, ...].

    score_mod(score, batch, head, q_idx, kv_idx): returns the new score. block_mask: torch's BlockMask, from
        create_block_mask() or BlockMask.from_kv_blocks(): its lists say which blocks are computed, and its function
        mask_mod(batch, head, q_idx, kv_idx) which elements of the partial ones. Both functions are traced, so they
        cannot contain an `if` on a value. Values have torch's operators, functions and methods. The functions may read
        tensors of the enclosing scope, as in x[head, q_idx], and rows of up to 256 elements, as in
        torch.dot(x[head], y[kv_idx]); new values of these tensors do not compile again. Python numbers are constants.
        Comparisons of q_idx and kv_idx that mean causal or a sliding window run as kernels' own masks, also beside
        others (`&`).
    scale: None: 1 / sqrt(head_dim). enable_gqa: num_kv_heads may divide num_qo_heads. kernel_options: options of
        torch's kernels, which Quire's do not need. return_aux: torch's AuxRequest, of lse.

    The batch of key and value may be 1. Tensors that are views of [batch, length, heads, head_dim] are read in place;
    others are copied, and head dims that kernels do not have (below 32, or no multiple of 8) are padded with zeros. The
    same functions are traced once, and the plan of a block mask serves all layers that use it: create a new block mask
    when its tensors change. After one call of the same shapes, the call may be captured in a CUDA graph.

    A function that torch.compile compiles calls it between two graphs; fullgraph=True, torch.export and other traces
    refuse it: plan a wrapper with a quire.Variant there.

    Returns o [batch, num_qo_heads, q_len, head_dim of value], or (o, lse) with return_lse=True, lse [batch,
    num_qo_heads, q_len] in float32, with the natural logarithm, as in torch, or (o, AuxOutput) with return_aux. Raises
    ValidationError that names the argument, or the line of a function that cannot be traced, and UnsupportedError for
    what no kernel takes, such as float32 on a GPU.

    >>> q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 4, 30, 64), torch.randn(2, 4, 30, 64)
    >>> slopes = torch.rand(4)
    >>> quire.flex_attention(q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i)).shape
    torch.Size([2, 4, 9, 64])
    """
    if is_dynamo_compiling():
        outside: Any = torch.compiler.disable(flex_attention)  # type: ignore[no-untyped-call]  # a graph ends here
        return outside(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    if is_tracing():
        raise UnsupportedError(
            "score_mod: torch traces this call, and Quire traces functions itself; call it outside of torch.export, "
            "make_fx and fake tensors, or plan a wrapper with a quire.Variant."
        )
    if return_aux is not None:
        return _with_aux(return_aux, return_lse, query, key, value, score_mod, block_mask, scale, enable_gqa)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise ValidationError(f"kernel_options: expected a dict or None, got {type(kernel_options).__name__}.")
    traced = _known_trace(score_mod, mask_of(block_mask), query, key)
    is_plain = type(enable_gqa) is type(return_lse) is bool and type(scale) in (float, int, type(None))
    if traced is None or type(value) not in _TENSORS or not is_plain:
        return _attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
    options = traced.key, scale, type(scale), enable_gqa, return_lse
    return repeated(
        options, (query, key, value, *traced.of_score.values()), _attend,
        (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, traced),
        sources=_sources(block_mask, traced),
    )  # fmt: skip


def _with_aux(return_aux: Any, return_lse: bool, *args: Any) -> Any:
    """The result, and torch's AuxOutput with what was asked for."""
    from torch.nn.attention.flex_attention import AuxOutput  # loaded by whoever made the AuxRequest

    if return_lse:
        raise ValidationError("return_lse: expected it or return_aux, got both; pass return_aux=AuxRequest(lse=True).")
    lse, max_scores = getattr(return_aux, "lse", None), getattr(return_aux, "max_scores", None)
    if type(lse) is not bool or type(max_scores) is not bool:
        raise ValidationError(f"return_aux: expected torch's AuxRequest, got {type(return_aux).__name__}.")
    if max_scores:
        raise UnsupportedError(
            "return_aux: max_scores is not supported, as kernels keep the maximum of a row to themselves; ask for lse."
        )
    result = flex_attention(*args, return_lse=lse)
    o, statistics = result if lse else (result, None)
    return o, AuxOutput(lse=statistics, max_scores=None)


def _sources(block_mask: Any, traced: _Trace) -> tuple[Any, ...]:
    """What the plan of a call is made from."""
    return traced.sources if block_mask is None else (block_mask, *traced.sources)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_lse: bool, traced: _Trace | None = None,
) -> Any:  # fmt: skip
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    if scale is not None:
        scalar(scale, "scale", positive=True)
    inputs = Inputs.of(query, key, value, enable_gqa)
    check_lengths(block_mask, query, key)
    traced = traced or _Trace.of(score_mod, mask_of(block_mask), (query.shape[2], key.shape[2]))
    attention = _planned(block_mask, inputs, scale, traced)
    if attention is None:  # the lists of the block mask are not those of its function
        return _attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
    q, k, v = (t.flatten(0, 1) for t in inputs.tensors)
    options = RunOptions(operands=traced.of_score, lse_unit=LN2)
    result = attention.run(q, (k, v), return_lse=return_lse, options=options)
    o, lse = result if return_lse else (result, None)
    batch, q_len = inputs.query.shape[:2]
    o = o[..., : inputs.head_dim_vo].unflatten(0, (batch, q_len)).transpose(1, 2)
    return o if lse is None else (o, lse.unflatten(0, (batch, q_len)).transpose(1, 2))


def _planned(block_mask: Any, inputs: Inputs, scale: float | None, traced: _Trace) -> Attention | None:
    """The plan of the last such call, if its mask read the same tensors, or a new one; None if the block mask turns out
    to have another function than was traced.
    """
    (batch, q_len, qo_heads, head_dim), (_, kv_len, kv_heads, _) = inputs.query.shape, inputs.key.shape
    parts, of_mask, device = traced.parts, traced.of_mask, inputs.query.device
    options = PlanOptions(
        *heads(qo_heads, kv_heads), head_dim, inputs.value.shape[3], Types.of(inputs.query.dtype, None, None),
        logits_options(inputs.head_dim, scale, parts.window_left, None, "NONE"), causal=parts.causal, page_size=0,
        variant=traced.variant,
    )  # fmt: skip

    def indices() -> Indices:
        kv_indptr = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * kv_len
        return Indices(batch, None, q_len, kv_indptr, None, None, 1)

    if is_other(block_mask, options, indices, of_mask, device):
        return None
    return plan_of(
        ("flex", options, batch, q_len, kv_len), _sources(block_mask, traced), device,
        lambda: AttentionSpec(indices(), options, operands=of_mask),
    )  # fmt: skip


# --- tracing ---------------------------------------------------------------------------------------------------------

#: torch's functions that read no values of tensors.
_SIZES = frozenset({"__get__", "size", "dim", "numel", "stride", "__len__", "ndimension", "nelement"})
#: torch's functions that make tensors of Python's numbers.
_MAKERS = frozenset({"tensor", "scalar_tensor", "full", "zeros", "ones"})
#: Number types of captured tensors that are converted first.
_CONVERTED = {torch.float64: torch.float32, torch.int8: torch.int32, torch.int16: torch.int32}


def _as_operand(tensor: torch.Tensor) -> torch.Tensor:
    """A captured tensor as kernels read it."""
    tensor = tensor.to(_CONVERTED[tensor.dtype]) if tensor.dtype in _CONVERTED else tensor
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


class _Capturing(Tracer):
    """Declares tensors of the enclosing scope when a function reads them. lengths: of queries and keys."""

    def __init__(self, lengths: tuple[int, int]) -> None:
        super().__init__({}, {})
        self._lengths, self.rules = lengths, operate_as_torch
        self.made: dict[int, torch.Tensor] = {}  #: by the function itself, of Python's numbers
        self.captured: dict[str, torch.Tensor] = {}
        self.origins: dict[str, torch.Tensor] = {}  #: what was captured, where `captured` may have another type
        self.is_lasting = True
        self._names: dict[int, str] = {}

    def name_of(self, tensor: torch.Tensor) -> str:
        """The operand that stands for a tensor."""
        if id(tensor) not in self._names:
            operand = _as_operand(tensor)
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
        return bounds_of(node, {name: (0, n - 1) for name, n in zip(("q_idx", "kv_idx"), self._lengths, strict=True)})

    def variant_of(self, score_mod: Any, mask_mod: Any) -> tuple[Variant | None, MaskParts]:
        """Trace both functions: their variant, without the parts of the mask that kernels have built in, and these."""
        if score_mod is mask_mod is None:
            return None, MaskParts()
        index = {name: self.value("index", "int", value=name) for name in ("request", "head", "q_idx", "kv_idx")}
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
        parts = split_mask(mask, self.tree, *self._lengths)
        rest = score is not None or parts.rest is not None
        return variant_of_trees(score, parts.rest, self) if rest else None, parts


class _Captures(TorchFunctionMode):
    """While a function is traced: torch's functions of values of the kernel are recorded, others happen."""

    def __init__(self, tracer: _Capturing) -> None:
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
        return call_torch(func.__name__, args, kwargs or {}, methods=is_method)


class _Trace(NamedTuple):
    """Both functions as the kernels have them, and the tensors that they read."""

    variant: Variant | None  #: without the parts of the mask that kernels have built in
    parts: MaskParts
    of_mask: Mapping[str, torch.Tensor]
    of_score: Mapping[str, torch.Tensor]
    sources: tuple[torch.Tensor, ...] = ()  #: those of the mask as the function captures them
    key: Hashable = None  #: of a trace that is kept

    @classmethod
    def of(cls, score_mod: Any, mask_mod: Any, lengths: tuple[int, int]) -> _Trace:
        """Call the functions with values that record operations."""
        tracer = _Capturing(lengths)
        variant, parts = tracer.variant_of(score_mod, mask_mod)
        of_mask, of_score = split_operands("flex_attention", variant, {} if variant is None else tracer.captured)
        return cls(variant, parts, of_mask, of_score, tuple(tracer.origins[name] for name in of_mask))


class _KeptTrace(NamedTuple):
    """A trace without tensors."""

    trace: _Trace
    of_mask: Mapping[str, int]  #: places of its tensors in FunctionState.tensors
    of_score: Mapping[str, int]
    state: list[Any]  #: what keeps the ids in the key valid

    @classmethod
    def of(cls, state: FunctionState, score_mod: Any, mask_mod: Any, lengths: tuple[int, int]) -> _KeptTrace | None:
        """Trace; None if the functions compute tensors or numbers of their own, in each call anew."""
        tracer, places = _Capturing(lengths), {id(tensor): i for i, tensor in enumerate(state.tensors)}
        variant, parts = tracer.variant_of(score_mod, mask_mod)
        origins = tracer.origins.values()
        if not tracer.is_lasting or any(id(t) not in places or t.dtype in _CONVERTED for t in origins):
            return None
        captured = {} if variant is None else {name: places[id(t)] for name, t in tracer.origins.items()}
        of_mask, of_score = split_operands("flex_attention", variant, captured)
        return cls(_Trace(variant, parts, {}, {}, key=object()), of_mask, of_score, state.kept)

    def with_tensors(self, tensors: list[torch.Tensor]) -> _Trace:
        """The trace with today's tensors."""
        if not self.of_mask and not self.of_score:
            return self.trace
        of_mask, of_score = (
            {name: _as_operand(tensors[i]) for name, i in places.items()} for places in (self.of_mask, self.of_score)
        )
        sources = tuple(tensors[i] for i in self.of_mask.values())
        return self.trace._replace(of_mask=of_mask, of_score=of_score, sources=sources)


_traces: dict[Hashable, _KeptTrace | None] = {}
_NOT_MET: Any = object()


def _known_trace(score_mod: Any, mask_mod: Any, query: Any, key: Any) -> _Trace | None:
    """The trace of functions that are known to depend on nothing else than earlier ones did; else None."""
    state = state_of(score_mod, mask_mod)
    if state is None or type(query) not in _TENSORS or type(key) not in _TENSORS or not query.dim() == key.dim() == 4:
        return None
    lengths = query.shape[2], key.shape[2]
    kept = _traces.get(whole := (state.key, lengths), _NOT_MET)
    if kept is _NOT_MET:
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        kept = _traces[whole] = _KeptTrace.of(state, score_mod, mask_mod, lengths)
    return None if kept is None else kept.with_tensors(state.tensors)
