"""torch's FlexAttention with Quire's kernels: its score and mask functions are traced like those of a quire.Variant.

The API is that of torch.nn.attention.flex_attention (Dong et al., 2024, https://arxiv.org/abs/2412.05496).

A score or a mask is traced once for equal dependencies. A function depends on its code, its defaults, and the closure
cells and global variables that the code names. They are compared by value, and tensors by their types and shapes: a
trace refers to tensors by their place in this list. A function that depends on anything else (an object with
attributes, a module of the program) is traced in each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch.compiler import is_dynamo_compiling

from quire.attention.flex_inputs import (
    Inputs,
    check_lengths,
    in_order_of,
    is_heads_first,
    is_other,
    mask_in_graph,
    mask_of,
    statistics_in_order_of,
)
from quire.engine.attention import Attention
from quire.engine.checks import check_flags, scalar
from quire.engine.inspection import Explanation
from quire.engine.operands import check_operands, split_operands
from quire.engine.operators import NOT_CAPTURABLE, FunctionsOperator, is_tracing, operator
from quire.engine.options import PlanOptions, Types, heads, logits_options
from quire.engine.plan_cache import plan_of, repeated
from quire.engine.planner import index_limits
from quire.engine.run import RunOptions
from quire.engine.schedule import Indices
from quire.engine.spec import AttentionSpec
from quire.engine.tensors import LN2
from quire.engine.wrapper import Pair
from quire.errors import ValidationError
from quire.kernels.expressions.dependencies import (
    CONVERTED,
    Capturing,
    FunctionState,
    RecordedFunction,
    Setting,
    as_operand,
    operands_of_text,
    state_of,
)
from quire.kernels.expressions.rewrite import MaskParts, variant_of_heads
from quire.kernels.expressions.variant import Variant, read_text

__all__ = ["explain_flex_attention", "flex_attention"]

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
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any: ...  # fmt: skip
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
        torch's kernels, which Quire's do not need. return_aux: torch's AuxRequest, of lse and, on the CPU, max_scores.

    The batch of key and value may be 1. Contiguous tensors, transposed views of [batch, length, heads, head_dim] and
    parts of longer ones are read in place. Others are copied: those with a batch that is broadcast, with strides that
    are no multiples of 16 bytes, and the smaller ones where some lie head by head and others token by token. Head dims
    that kernels do not have (below 32, or no multiple of 8) are padded with zeros. The result has the order of the
    query, as in torch. The same functions are traced once, and the plan of a block mask serves all layers that use it:
    create a new block mask when its tensors change, which is not noticed in inference mode. After one call of the same
    shapes, the call may be captured in a CUDA graph.

    torch.compile(fullgraph=True), torch.export and make_fx record it as an operator: tensors that functions capture are
    inputs of the graph. Integers that differ between calls are constants of a kernel, as outside of graphs.

    Returns o [batch, num_qo_heads, q_len, head_dim of value], or (o, lse) with return_lse=True, lse [batch,
    num_qo_heads, q_len] in float32, with the natural logarithm, as in torch, or (o, AuxOutput) with return_aux. Raises
    ValidationError that names the argument, or the line of a function that cannot be traced, and UnsupportedError for
    what no kernel takes, such as float32 on a GPU.

    >>> q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 4, 30, 64), torch.randn(2, 4, 30, 64)
    >>> slopes = torch.rand(4)
    >>> quire.flex_attention(q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i)).shape
    torch.Size([2, 4, 9, 64])
    """
    if is_dynamo_compiling() and not _operator_is_known():  # a release of torch where a graph ends here
        outside: Any = torch.compiler.disable(flex_attention)  # type: ignore[no-untyped-call]
        return outside(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux,
        )  # fmt: skip
    if return_aux is not None:
        return _with_aux(return_aux, return_lse, query, key, value, score_mod, block_mask, scale, enable_gqa)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise ValidationError(f"kernel_options: expected a dict or None, got {type(kernel_options).__name__}.")
    return _call(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)


def _call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_lse: bool, return_most: bool = False,
) -> Any:  # fmt: skip
    """o or (o, lse). return_most: lse has the largest score of a row as the second of two numbers."""
    if is_tracing():
        return _recorded(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_most)
    args = query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_most
    known = _known_trace(score_mod, mask_of(block_mask), query, key)
    is_plain = type(enable_gqa) is type(return_lse) is bool and type(scale) in (float, int, type(None))
    if known is None or type(value) not in _TENSORS or not is_plain:
        return _attend(*args)
    trace, tensors = known
    given, sources = [query, key, value], [] if block_mask is None else [block_mask]
    for i in trace.of_score.values():
        given.append(as_operand(tensors[i]))
    for i in trace.of_mask.values():
        sources.append(tensors[i])
    options = trace.key, scale, type(scale), enable_gqa, return_lse, return_most
    return repeated(options, given, _attend, (*args, known), sources=sources, are_constant=True)


def _with_aux(return_aux: Any, return_lse: bool, *args: Any) -> Any:
    """The result, and torch's AuxOutput with what was asked for."""
    from torch.nn.attention.flex_attention import AuxOutput  # loaded by whoever made the AuxRequest

    if return_lse:
        raise ValidationError("return_lse: expected it or return_aux, got both; pass return_aux=AuxRequest(lse=True).")
    lse, max_scores = getattr(return_aux, "lse", None), getattr(return_aux, "max_scores", None)
    if type(lse) is not bool or type(max_scores) is not bool:
        raise ValidationError(f"return_aux: expected torch's AuxRequest, got {type(return_aux).__name__}.")
    result = partial(_call, return_lse=lse or max_scores, return_most=max_scores)(*args)
    if not max_scores:
        o, statistics = result if lse else (result, None)
        return o, AuxOutput(lse=statistics, max_scores=None)
    o, both = result
    return o, AuxOutput(lse=both[..., 0] if lse else None, max_scores=both[..., 1])


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_lse: bool, return_most: bool, known: _Known | None = None,
) -> Any:  # fmt: skip
    check_flags(return_lse=return_lse)
    args = query, key, value, score_mod, block_mask, scale, enable_gqa, return_most
    inputs, traced, attention = _prepared(*args, known)
    heads_first, options = is_heads_first(query), RunOptions(operands=traced.of_score, lse_unit=LN2)
    (q, k, v), (o, out) = inputs.tensors, inputs.result(heads_first)
    result = attention.run(q, (k, v), out, return_lse=return_lse, options=options)
    rows, lse = result if return_lse else (result, None)
    o = (inputs.of_batch(rows) if o is None else o)[..., : inputs.head_dim_vo]
    if heads_first != (out is not None):
        o = in_order_of(o, query)
    return o if lse is None else (o, inputs.of_batch(lse))


def explain_flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False,
) -> Explanation:  # fmt: skip
    """What flex_attention() does with these arguments: the kernel, how its work is divided, which tensors it copies.

    query [batch, num_qo_heads, q_len, head_dim], key, value [batch, num_kv_heads, kv_len, head_dim]: as there. Returns
    a string of several lines with attributes, as explain() of wrappers. Raises what flex_attention() raises.

    >>> q, k = torch.randn(2, 4, 9, 64), torch.randn(1, 4, 30, 64)
    >>> print(quire.explain_flex_attention(q, k, k).figures["copied in each call"])
    key, value
    """
    inputs, _, attention = _prepared(query, key, value, score_mod, block_mask, scale, enable_gqa, False)
    figures = {"copied in each call": ", ".join(inputs.copied) or "nothing"}
    if inputs.of_heads:
        figures["requests"] = f"{query.shape[0]}, whose heads are those of one request"
    return attention.explain(figures)


def _prepared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: float | None,
    enable_gqa: bool, return_most: bool, known: _Known | None = None,
) -> tuple[Inputs, _Trace, Attention]:  # fmt: skip
    """What a call runs: its tensors, its functions, its plan."""
    check_flags(enable_gqa=enable_gqa)
    if scale is not None:
        scalar(scale, "scale", positive=True)
    inputs = Inputs.of(query, key, value, enable_gqa)
    check_lengths(block_mask, query, key)
    setting = Setting.of(query, key)
    traced = _Trace.of(score_mod, mask_of(block_mask), setting) if known is None else known[0].with_tensors(known[1])
    attention = _planned(block_mask, inputs, scale, traced, return_most)
    if attention is None:  # the lists of the block mask are not those of its function
        return _prepared(query, key, value, score_mod, block_mask, scale, enable_gqa, return_most)
    return inputs, traced, attention


def _planned(
    block_mask: Any, inputs: Inputs, scale: float | None, traced: _Trace, return_most: bool
) -> Attention | None:
    """The plan of the last such call, if its mask read the same tensors, or a new one; None if the block mask turns out
    to have another function than was traced.
    """
    (batch, qo_heads, q_len, head_dim), (_, kv_heads, kv_len, _) = inputs.query.shape, inputs.key.shape
    parts, of_mask, device = traced.parts, traced.of_mask, inputs.query.device
    options = PlanOptions(
        *heads(qo_heads, kv_heads), head_dim, inputs.value.shape[3], Types.of(inputs.query.dtype, None, None),
        logits_options(inputs.head_dim, scale, parts.window_left, None, "NONE"), causal=parts.causal, page_size=0,
        variant=traced.variant, max_logits=return_most,
    )  # fmt: skip

    def indices(requests: int = batch) -> Indices:
        kv_indptr = torch.arange(requests + 1, dtype=torch.int32, device="cpu") * kv_len
        return Indices(requests, None, q_len, kv_indptr, None, None, 1)

    if is_other(block_mask, options, indices, of_mask, device):
        return None
    requests, variant = batch, traced.variant
    if inputs.of_heads:
        if variant is not None:
            check_operands(variant, {**of_mask, **traced.of_score}, device, index_limits(options, indices()))
            variant = variant_of_heads(variant, qo_heads)
        requests, all_heads = 1, heads(batch * qo_heads, batch * kv_heads)
        options = options._replace(num_qo_heads=all_heads[0], num_kv_heads=all_heads[1], variant=variant)
    return plan_of(
        ("flex", options, requests, q_len, kv_len),
        traced.sources if block_mask is None else (block_mask, *traced.sources), device,
        lambda: AttentionSpec(indices(requests), options, operands=of_mask), are_constant=True,
    )  # fmt: skip


# --- in graphs -------------------------------------------------------------------------------------------------------


def _recorded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: Any,
    enable_gqa: bool, return_lse: bool, return_most: bool,
) -> Any:  # fmt: skip
    """A call while torch traces: recorded with its functions, as Dynamo traces them, or with their text."""
    options = {
        "has_score": score_mod is not None, "has_mask": block_mask is not None, "enable_gqa": enable_gqa,
        "return_lse": return_lse, "return_most": return_most,
    }  # fmt: skip
    lists, mask_mod = (None, None, None, None, 0, 0, 0, 0), _no_mask
    if block_mask is not None:
        lists, mask_mod = (
            block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
            *block_mask.seq_lengths, *block_mask.BLOCK_SIZE,
        ), block_mask.mask_mod  # fmt: skip
    record = _functions_operator if is_dynamo_compiling() else _with_text
    given = _same_score if score_mod is None else score_mod
    o, lse = record(query, key, value, given, (*lists, mask_mod), scale, options)
    return (o, lse) if return_lse else o


def _same_score(score: Any, *_: Any) -> Any:
    return score


def _no_mask(b: Any, *_: Any) -> Any:
    return b.new_ones((), dtype=torch.bool)


def _with_text(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: Any, scale: Any,
    options: Mapping[str, bool], of_score: Sequence[Any] = (), of_mask: Sequence[Any] = (),
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The call with its functions as text. of_score, of_mask: what they take after torch's arguments."""
    tracer, numbers = Capturing(Setting(0, 0, query.device)), list[Any]()
    score_mod = _bound(score_mod, of_score, tracer, numbers) if options["has_score"] else None
    mask_mod = _bound(block_mask[-1], of_mask, tracer, numbers) if options["has_mask"] else None
    text, tensors = tracer.text_of(score_mod, mask_mod), [*tracer.origins.values()]
    lists = [x for x in block_mask[:4] if x is not None]
    return torch.ops.quire.flex_attention(  # type: ignore[no-any-return]
        query, key, value, text, tensors, numbers, lists, block_mask[4:8] if lists else [], scale,
        options["enable_gqa"], options["return_lse"], options["return_most"],
    )  # fmt: skip


def _bound(function: Any, given: Sequence[Any], tracer: Capturing, numbers: list[Any]) -> Any:
    """The function with what it takes after torch's arguments: tensors, and integers as numbers of the text."""
    bound = list[Any]()
    for value in given:
        if isinstance(value, torch.Tensor):
            bound.append(value)
        else:
            tracer.scalars[name := f"n{len(numbers)}"] = "int32"
            numbers.append(value)
            bound.append(tracer.operand(name))
    return lambda *values: function(*values, *bound)


def _without_memory(query: torch.Tensor, _: Any, value: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the shapes and strides that a call gives."""
    options = args[3] if isinstance(args[3], dict) else dict(zip(("return_lse", "return_most"), args[-2:], strict=True))
    sizes = query.shape[:3]
    shape = (*sizes, *([2] if options["return_most"] else [])) if options["return_lse"] else (0, 0, 0)
    lse = query.new_empty(shape, dtype=torch.float32)
    return in_order_of(query.new_empty((*sizes, value.shape[3])), query), statistics_in_order_of(lse, query)


@operator(
    "flex_attention(Tensor query, Tensor key, Tensor value, str functions, Tensor[] tensors, SymInt[] numbers, "
    "Tensor[] lists, SymInt[] sizes, float? scale, bool enable_gqa, bool return_lse, bool return_most) "
    "-> (Tensor, Tensor)",
    fake=_without_memory, tags=NOT_CAPTURABLE,
)  # fmt: skip
def _of_graph(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, functions: str, tensors: Sequence[torch.Tensor],
    numbers: Sequence[int], lists: Sequence[torch.Tensor], sizes: Sequence[int], scale: float | None,
    enable_gqa: bool, return_lse: bool, return_most: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """quire::flex_attention: the functions are the text of a variant."""
    given, sources, (of_score, of_mask) = [query, key, value], [*lists], operands_of_text(functions)
    for i in of_score:
        given.append(tensors[i])
    for i in of_mask:
        sources.append(tensors[i])
    options = functions, (*numbers,), (*sizes,), scale, enable_gqa, return_lse, return_most
    args = query, key, value, functions, tensors, (*numbers,), lists, sizes, scale, enable_gqa, return_lse, return_most
    return repeated(options, given, _compute, args, sources=sources, are_constant=True)  # type: ignore[no-any-return]


def _compute(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, functions: str, tensors: Sequence[torch.Tensor],
    numbers: tuple[int, ...], lists: Sequence[torch.Tensor], sizes: Sequence[int], scale: float | None,
    enable_gqa: bool, return_lse: bool, return_most: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What quire::flex_attention returns."""
    expression = read_text(functions) if functions else None
    score, mask = (None, None) if expression is None else (expression.score, expression.mask)
    score_mod = score and RecordedFunction(functions, "score", tensors, numbers)
    is_plain = mask is None or mask.op == "const"
    mask_mod = None if is_plain else RecordedFunction(functions, "mask", tensors, numbers)
    block_mask = mask_in_graph(mask_mod, lists, sizes) if lists else None
    known = _known_trace(score_mod, mask_of(block_mask), query, key)
    result = _attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_most, known)
    o, lse = result if return_lse else (result, query.new_empty((0, 0, 0), dtype=torch.float32))
    return in_order_of(o, query), statistics_in_order_of(lse, query)


_functions_operator = FunctionsOperator("quire_flex_attention", _with_text, _without_memory)


def _operator_is_known() -> bool:
    return _functions_operator.is_known()


_operator_is_known._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it


# --- tracing ---------------------------------------------------------------------------------------------------------


class _Trace(NamedTuple):
    """Both functions as the kernels have them, and the tensors that they read."""

    variant: Variant | None  #: without the parts of the mask that kernels have built in
    parts: MaskParts
    of_mask: Mapping[str, torch.Tensor]
    of_score: Mapping[str, torch.Tensor]
    sources: tuple[torch.Tensor, ...] = ()  #: those of the mask as the function captures them

    @classmethod
    def of(cls, score_mod: Any, mask_mod: Any, setting: Setting) -> _Trace:
        """Call the functions with values that record operations."""
        tracer = Capturing(setting)
        variant, parts = tracer.variant_of(score_mod, mask_mod)
        of_mask, of_score = split_operands("flex_attention", variant, {} if variant is None else tracer.captured)
        return cls(variant, parts, of_mask, of_score, tuple(tracer.origins[name] for name in of_mask))


class _KeptTrace(NamedTuple):
    """A trace without tensors."""

    trace: _Trace
    key: Hashable
    of_mask: Mapping[str, int]  #: places of its tensors in FunctionState.tensors
    of_score: Mapping[str, int]
    state: list[Any]  #: what keeps the ids in the key valid

    @classmethod
    def of(cls, state: FunctionState, score_mod: Any, mask_mod: Any, setting: Setting) -> _KeptTrace | None:
        """Trace; None if the functions compute tensors or numbers of their own, in each call anew."""
        tracer, places = Capturing(setting), {id(tensor): i for i, tensor in enumerate(state.tensors)}
        variant, parts = tracer.variant_of(score_mod, mask_mod)
        origins = tracer.origins.values()
        if not tracer.is_lasting or any(id(t) not in places or t.dtype in CONVERTED for t in origins):
            return None
        captured = {} if variant is None else {name: places[id(t)] for name, t in tracer.origins.items()}
        of_mask, of_score = split_operands("flex_attention", variant, captured)
        return cls(_Trace(variant, parts, {}, {}), object(), of_mask, of_score, state.kept)

    def with_tensors(self, tensors: list[torch.Tensor]) -> _Trace:
        """The trace with today's tensors."""
        if not self.of_mask and not self.of_score:
            return self.trace
        of_mask, of_score = (
            {name: as_operand(tensors[i]) for name, i in places.items()} for places in (self.of_mask, self.of_score)
        )
        sources = tuple(tensors[i] for i in self.of_mask.values())
        return self.trace._replace(of_mask=of_mask, of_score=of_score, sources=sources)


_Known: TypeAlias = tuple[_KeptTrace, list[torch.Tensor]]  #: a trace, and what its functions capture today
_traces: dict[Hashable, _KeptTrace | None] = {}
_NOT_MET: Any = object()


def _known_trace(score_mod: Any, mask_mod: Any, query: Any, key: Any) -> _Known | None:
    """The trace of functions that are known to depend on nothing else than earlier ones did; else None."""
    state = state_of(score_mod, mask_mod)
    if state is None or type(query) not in _TENSORS or type(key) not in _TENSORS or not query.dim() == key.dim() == 4:
        return None
    setting = Setting.of(query, key)
    kept = _traces.get(whole := (state.key, setting), _NOT_MET)
    if kept is _NOT_MET:
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        kept = _traces[whole] = _KeptTrace.of(state, score_mod, mask_mod, setting)
    return None if kept is None else (kept, state.tensors)
