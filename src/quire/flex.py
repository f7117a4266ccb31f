"""torch's FlexAttention with Quire's kernels: its score and mask functions are traced like those of a quire.Variant.

The API is that of torch.nn.attention.flex_attention (Dong et al., 2024, https://arxiv.org/abs/2412.05496).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from quire.errors import UnsupportedError, ValidationError
from quire.kernels.expression import BOOL, FLOAT, OPERAND_TYPES
from quire.kernels.mask_parts import MaskParts, split_mask
from quire.kernels.trace import Tracer, Value, call_torch, call_traced, fail
from quire.kernels.variant import Variant, variant_of_trees
from quire.runtime.attention import Attention, AttentionSpec
from quire.runtime.checks import check_flags, check_shape, check_tensor, refuse, scalar
from quire.runtime.keywords import Pair
from quire.runtime.ops import is_tracing
from quire.runtime.options import PlanOptions, Types, heads, logits_options
from quire.runtime.schedule import Indices
from quire.runtime.variant_operands import of_plan_and_run
from quire.runtime.workspace import OwnWorkspace
from quire.types import KVLayout

__all__ = ["flex_attention"]

_Plan = tuple[tuple[Any, ...], Attention]
_plans: WeakKeyDictionary[Any, _Plan] = WeakKeyDictionary()  # of block masks, for the layers that share one


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Any = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True], kernel_options: Any = None,
) -> Pair: ...  # fmt: skip
@overload
def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any: ...
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
) -> Any:  # fmt: skip
    """Attention of query [batch, num_qo_heads, q_len, head_dim] over key and value [batch, num_kv_heads, kv_len, ...].

    score_mod(score, batch, head, q_idx, kv_idx): returns the new score. block_mask: the result of torch's
        create_block_mask(), of which the function mask_mod(batch, head, q_idx, kv_idx) is used. Both functions are
        traced, so they cannot contain an `if` on a value. They may read tensors of the enclosing scope, as in
        x[head, q_idx]; new values of these tensors do not compile again. Python numbers are constants. Comparisons of
        q_idx and kv_idx that mean causal or a sliding window run as kernels' own masks, also beside others (`&`).
    scale: None: 1 / sqrt(head_dim). enable_gqa: num_kv_heads may divide num_qo_heads. kernel_options is refused.

    Tensors that are views of [batch, length, heads, head_dim] are read in place; others are copied. The plan of a block
    mask is stored with the mask, for all layers that use it: create a new block mask when its tensors change.

    Returns o [batch, num_qo_heads, q_len, head_dim of value], or (o, lse) with return_lse=True, lse [batch,
    num_qo_heads, q_len] in float32, with the natural logarithm, as in torch. Raises ValidationError that names the
    argument, or the line of a function that cannot be traced.

    >>> q, k, v = torch.randn(2, 4, 9, 64), torch.randn(2, 4, 30, 64), torch.randn(2, 4, 30, 64)
    >>> slopes = torch.rand(4)
    >>> quire.flex_attention(q, k, v, lambda score, b, h, i, j: score + slopes[h] * (j - i)).shape
    torch.Size([2, 4, 9, 64])
    """
    check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    refuse(kernel_options=kernel_options)
    if scale is not None:
        scalar(scale, "scale", positive=True)
    if is_tracing():
        raise UnsupportedError(
            "score_mod: torch traces this call, and Quire traces functions itself; call it outside of torch.compile "
            "(torch.compiler.disable), capture it in a CUDA graph, or plan a wrapper with a quire.Variant."
        )
    _check_shapes(query, key, value, enable_gqa)
    mask_mod = _mask_of(block_mask, (query, key))
    variant, parts, tensors = _traced(score_mod, mask_mod, (query.shape[2], key.shape[2]))
    of_mask, of_score = of_plan_and_run("flex_attention", variant, tensors)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    attention = _planned(block_mask, (query, key, value), scale, variant, parts, of_mask)
    o, lse = attention.run(
        q, (k, v), out=None, lse=None, return_lse=True, sinks=None, q_scale=None, k_scale=None, v_scale=None,
        window_left=None, enable_pdl=None, operands=of_score,
    )  # fmt: skip
    batch, _, q_len, _ = query.shape
    o = o.unflatten(0, (batch, q_len)).transpose(1, 2)
    return (o, lse.unflatten(0, (batch, q_len)).transpose(1, 2) * math.log(2.0)) if return_lse else o


def _mask_of(block_mask: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Its function; None if it hides nothing."""
    if block_mask is None:
        return None
    found = getattr(block_mask, "mask_mod", None)
    if found is None:
        raise ValidationError(
            f"block_mask: expected what torch's create_block_mask() gives, got {type(block_mask).__name__}."
        )
    lens = [t.shape[2] for t in tensors]
    if lens != [*block_mask.shape[-2:]]:
        raise ValidationError(
            f"block_mask: expected one of {lens[0]} queries and {lens[1]} keys, got {list(block_mask.shape)}; create "
            f"one for these lengths."
        )
    from torch.nn.attention.flex_attention import noop_mask  # loaded by whoever made the block mask

    if found is not noop_mask:
        return found
    if not block_mask.to_dense().all():
        raise ValidationError(
            "block_mask: expected a function mask_mod, got lists of blocks alone: write the mask as a function, or "
            "pass the lists to BlockSparseAttentionWrapper."
        )
    return None


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    sizes: dict[str, int | None] = {"batch": None, "num_qo_heads": None, "q_len": None, "head_dim": None}
    check_shape(check_tensor(query, "query"), "query", sizes)
    batch, qo_heads, _, head_dim = query.shape
    sizes = {"batch": batch, "num_kv_heads": None if enable_gqa else qo_heads, "kv_len": None, "head_dim": head_dim}
    check_shape(check_tensor(key, "key"), "key", sizes)
    sizes = {"batch": batch, "num_kv_heads": key.shape[1], "kv_len": key.shape[2], "head_dim_vo": None}
    check_shape(check_tensor(value, "value"), "value", sizes)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype is not query.dtype:
            raise ValidationError(f"{name}: expected the dtype of query, {query.dtype}, got {tensor.dtype}.")


def _planned(
    block_mask: Any, tensors: tuple[torch.Tensor, ...], scale: float | None, variant: Variant | None,
    parts: MaskParts, of_mask: Mapping[str, Any],
) -> Attention:  # fmt: skip
    """A plan: the last one of the same block mask, if the mask reads the same tensors, or a new one."""
    query, key, value = tensors
    built_in = parts.causal, parts.window_left
    told: tuple[Any, ...] = (*(t.shape for t in tensors), query.dtype, query.device, scale, variant, built_in)
    told += tuple((name, x.data_ptr(), x._version) for name, x in of_mask.items())
    known = None if block_mask is None else _plans.get(block_mask)
    if known is not None and known[0] == told:
        return known[1]
    (batch, qo_heads, q_len, head_dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
    options = PlanOptions(
        *heads(qo_heads, kv_heads), head_dim, value.shape[3], Types.of(query.dtype, None, None),
        logits_options(head_dim, scale, parts.window_left, None, "NONE"), causal=parts.causal, page_size=0,
        variant=variant,
    )  # fmt: skip
    kv_indptr = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * kv_len
    indices = Indices(batch, None, q_len, kv_indptr, None, None, 1)
    spec = AttentionSpec(indices, options, operands=of_mask)
    attention = Attention(spec, KVLayout.NHD, OwnWorkspace(query.device), "auto")
    if block_mask is not None:
        _plans[block_mask] = told, attention
    return attention


# --- tracing ---------------------------------------------------------------------------------------------------------

#: Number types of captured tensors that are converted first.
_CONVERTED = {torch.float64: torch.float32, torch.int8: torch.int32, torch.int16: torch.int32}


class _Capturing(Tracer):
    """Declares tensors of the enclosing scope when a function reads them."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.captured: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets an id that is known

    def name_of(self, tensor: torch.Tensor) -> str:
        """The operand that stands for a tensor."""
        if id(tensor) not in self._names:
            kept = tensor.to(_CONVERTED[tensor.dtype]) if tensor.dtype in _CONVERTED else tensor
            kind = str(kept.dtype).removeprefix("torch.")
            if kind not in OPERAND_TYPES:
                fail(f"expected a captured tensor of {', '.join(OPERAND_TYPES)}, got {tensor.dtype}.")
            name = self._names[id(tensor)] = f"t{len(self.captured)}"
            self.tensors[name], self.captured[name] = kind, kept.reshape(1) if kept.dim() == 0 else kept
            self._kept.append(tensor)
        return self._names[id(tensor)]

    def lift(self, value: Any) -> Value:
        """A captured tensor of one element is an operand, whose value may be another one in the next call."""
        if isinstance(value, torch.Tensor):
            if value.dim():
                fail(f"expected captured tensors to be indexed, got {list(value.shape)} beside an operator.")
            return self.read(self.name_of(value), 0)
        return super().lift(value)

    def index(self, tensor: torch.Tensor, index: Any) -> Value:
        """tensor[index] of which a part is a value of the kernel."""
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != tensor.dim():
            fail(f"expected {tensor.dim()} indices of a tensor {list(tensor.shape)}, got {len(indices)}.")
        return self.read(self.name_of(tensor), tuple(self.lift(i) for i in indices))


class _Captures(TorchFunctionMode):
    """While a function is traced: torch's functions of values of the kernel are recorded, others happen."""

    def __init__(self, tracer: _Capturing) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [part for arg in given if isinstance(arg, tuple) for part in arg]
        if not any(isinstance(arg, Value) for arg in given):
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__getitem__:
            return self._tracer.index(*args)
        return call_torch(func.__name__, args, kwargs or {})


def _traced(
    score_mod: Any, mask_mod: Any, lengths: tuple[int, int]
) -> tuple[Variant | None, MaskParts, dict[str, Any]]:
    """The variant of both functions, without the parts of the mask that kernels have built in; these parts; and the
    tensors that the variant reads.
    """
    if score_mod is mask_mod is None:
        return None, MaskParts(), {}
    tracer = _Capturing()
    index = {name: tracer.value("index", "int", value=name) for name in ("request", "head", "q_idx", "kv_idx")}
    places = tuple(index.values())
    trees = {}
    for name, function, first in (
        ("score_mod", score_mod, (tracer.value("score", FLOAT),)), ("block_mask", mask_mod, ()),
    ):  # fmt: skip
        if function is not None:
            with _Captures(tracer):
                result = call_traced(function, (*first, *places), {}, name)
            trees[name] = tracer.lift(result).node
    score, mask = trees.get("score_mod"), trees.get("block_mask")
    if mask is not None and mask.type != BOOL:
        raise ValidationError(f"block_mask: expected a function that returns a bool, got a {mask.type}.")
    parts = split_mask(mask, tracer.tree, *lengths)
    if score is parts.rest is None:
        return None, parts, {}
    return variant_of_trees(score, parts.rest, tracer), parts, dict(tracer.captured)
