"""What flex_attention is given, as Quire computes with it: tensors of any strides and head dims, torch's block masks.

A block mask says which blocks of (queries, keys) are computed (its lists), and which elements of the partial ones (its
function). Lists that torch's create_block_mask() made say no more than the function, which then is the mask: kernels
look for tiles of their own sizes. Other lists, and those without a function, are looked up by the mask: a table of
states, one number a block. Which of both holds is found out once for each block mask.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quire.engine.checks import check_shape, check_tensor
from quire.engine.device import is_capturing, target_of
from quire.engine.launch import launch
from quire.engine.operands import write_operands
from quire.engine.options import PlanOptions
from quire.engine.planner import index_limits, load
from quire.engine.schedule import Indices
from quire.errors import PlanError, ValidationError
from quire.jit import without_matrix_unit
from quire.kernels.attention import with_operands
from quire.kernels.expressions.cxx import mask_heads, operands_struct
from quire.kernels.expressions.dependencies import RecordedFunction
from quire.kernels.features import MaskMode
from quire.kernels.operation import CTAS_PER_ROW_TILE, PARALLEL_THREADS, ExpressionBlocksParams, OperationKey
from quire.kernels.params import RowTile

_LEAST_DIM, _STEP = 32, 8  #: head dims of kernels are multiples of 8 from 32 on
_ALIGNMENT = 16  #: bytes, of strides that all kernels read
_TOKENS, _HEADS = "tokens", "heads"  #: how the requests of a batch lie one after another
_ANY_LENGTH = 1 << 30  #: torch's block size of a mask for all lengths
_HIDDEN, _PARTIAL, _FULL = 0, 1, 2  #: states of blocks
_VISIBLE_BIT, _FULL_BIT = 1, 2  #: of _blocks_of_mask()


# --- tensors ---------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Tensors [batch, heads, length, head_dim] as kernels take them: tokens of all requests, or heads of all requests.

    Kernels take tokens [tokens, heads, head_dim] with a stride for each dimension. If the requests of a batch lie one
    after another as tokens, they are its requests. If they lie one after another as heads, as in a contiguous tensor
    [batch, heads, length, head_dim], they are one request with the heads of all: all have the same lengths.
    """

    query: torch.Tensor  #: padded and copied where kernels ask for it
    key: torch.Tensor
    value: torch.Tensor
    of_heads: bool  #: whether there is one request, with the heads of all
    head_dim: int  #: as given
    head_dim_vo: int
    copied: tuple[str, ...]  #: names of those that were copied or padded

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that kernels read: [tokens, heads, head_dim]."""
        if self.of_heads:
            return tuple(t.flatten(0, 1).transpose(0, 1) for t in self[:3])
        return tuple(t.transpose(1, 2).flatten(0, 1) for t in self[:3])

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> Inputs:
        """Check the caller's tensors [batch, heads, length, head_dim]; pad, repeat and copy them where kernels ask."""
        _check(query, key, value, enable_gqa)
        batch = query.shape[0]
        key, value = (t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in (key, value))
        given = {"query": _padded(query), "key": _padded(key), "value": _padded(value)}
        reads = {name: _reads(tensor) for name, tensor in given.items()}
        copies = {t: sum(given[n].nbytes for n, read in reads.items() if t not in read) for t in (_TOKENS, _HEADS)}
        result_bytes = query.nbytes // max(1, query.shape[3]) * value.shape[3]
        copies[_TOKENS if is_heads_first(query) else _HEADS] += result_bytes * (batch > 1 < query.shape[2])
        way = _HEADS if copies[_HEADS] < copies[_TOKENS] else _TOKENS
        q, k, v = (t if way in reads[name] else _copied(t, way) for name, t in given.items())
        both = zip(given, (q, k, v), (query, key, value), strict=True)
        copied = tuple(name for name, read, tensor in both if read is not tensor)
        return cls(q, k, v, way is _HEADS, query.shape[3], value.shape[3], copied)

    def result(self, heads_first: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A tensor [batch, heads, length, head_dim] for the result and the same as the kernel writes it, where it would
        not make one in the order of tokens itself. heads_first: what is_heads_first() says, to which one request keeps.
        """
        if not self.of_heads and not (heads_first and self.query.shape[0] == 1):
            return None, None
        o = self.query.new_empty((*self.query.shape[:3], self.value.shape[3]))
        return o, o.flatten(0, 1).transpose(0, 1)

    def of_batch(self, rows: torch.Tensor) -> torch.Tensor:
        """What a kernel wrote for each token and head, [tokens, heads, ...], as [batch, heads, length, ...]."""
        batch, heads, length = self.query.shape[:3]
        if self.of_heads:
            return rows.view(length, batch, heads, *rows.shape[2:]).movedim(0, 2)
        return rows.view(batch, length, *rows.shape[1:]).transpose(1, 2)


def is_heads_first(query: torch.Tensor) -> bool:
    """Whether the result for a query is contiguous, and not the transpose of a contiguous [batch, length, heads, ...]:
    it has the order of the query, as torch's.
    """
    (batch, heads, length, _), strides = query.shape, query.stride()
    if _is_known(batch == 1) and any(map(_is_known, (heads == 1, strides[1] <= strides[2]))):
        return False
    return not any(map(_is_known, (length == 1, strides[0] == length * strides[2])))


def in_order_of(result: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A result for a query in the order that it has, see is_heads_first(); a copy if it has another."""
    return _copied(result, _HEADS if is_heads_first(query) else _TOKENS)


def statistics_in_order_of(lse: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The same of what is returned of rows, [batch, heads, length, ...], which kernels write for each token."""
    if is_heads_first(query):
        return lse.movedim(2, 0).contiguous().movedim(0, 2)
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def _is_known(condition: Any) -> bool:
    """Whether a condition of sizes holds, also of those that a graph does not know."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loaded by whoever traces

    return statically_known_true(condition)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    sizes: dict[str, int | None] = {"batch": None, "num_qo_heads": None, "q_len": None, "head_dim": None}
    check_shape(check_tensor(query, "query"), "query", sizes)
    batch, qo_heads, _, head_dim = query.shape
    of_keys = None if check_tensor(key, "key").dim() == 4 and key.shape[0] == 1 else batch
    sizes = {"batch": of_keys, "num_kv_heads": None if enable_gqa else qo_heads, "kv_len": None, "head_dim": head_dim}
    check_shape(key, "key", sizes)
    sizes = {"batch": key.shape[0], "num_kv_heads": key.shape[1], "kv_len": key.shape[2], "head_dim_vo": None}
    check_shape(check_tensor(value, "value"), "value", sizes)
    if query.dtype is torch.float64:
        raise ValidationError(
            "query: expected float16, bfloat16 or, on a CPU, float32, got torch.float64; convert query, key and value "
            "with .float()."
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype is not query.dtype:
            raise ValidationError(f"{name}: expected the dtype of query, {query.dtype}, got {tensor.dtype}.")


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """With zeros up to the next head dim that kernels have."""
    head_dim = tensor.shape[3]
    more = max(_LEAST_DIM, -(-head_dim // _STEP) * _STEP) - head_dim
    return torch.nn.functional.pad(tensor, (0, more)) if more else tensor


def _reads(tensor: torch.Tensor) -> tuple[str, ...]:
    """How kernels read a tensor [batch, heads, length, head_dim] where it is: not at all, as _TOKENS, as _HEADS."""
    sizes, strides, item = tensor.shape[:3], tensor.stride(), tensor.element_size()
    is_whole = all(n == 1 or (s > 0 and s * item % _ALIGNMENT == 0) for n, s in zip(sizes, strides[:3], strict=True))
    if not is_whole or strides[3] != 1 or tensor.data_ptr() % _ALIGNMENT:
        return ()
    (batch, heads, length), (step, head, token, _) = sizes, strides
    is_one = batch <= 1
    found = {
        _TOKENS: is_one or length == 1 or step == length * token,
        _HEADS: is_one or heads == 1 or step == heads * head,
    }
    return tuple(way for way, is_readable in found.items() if is_readable)


def _copied(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """A copy that kernels read in a way."""
    return tensor.contiguous() if way is _HEADS else tensor.transpose(1, 2).contiguous().transpose(1, 2)


# --- block masks -----------------------------------------------------------------------------------------------------


class GraphMask:
    """A block mask in a graph: torch's lists, and the function as text. It refers to tensors weakly."""

    def __init__(self, mask_mod: Any, lists: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        """lists: kv_num_blocks, kv_indices and, if there are any, those of full blocks.

        sizes: q_len, kv_len, and the two of BLOCK_SIZE.
        """
        self.mask_mod, self._lists = mask_mod, [*map(weakref.ref, lists)]
        self.shape = (*lists[0].shape[:-1], *sizes[:2])
        self.BLOCK_SIZE = (*sizes[2:],)

    def _list(self, i: int) -> Any:
        return self._lists[i]() if i < len(self._lists) else None

    kv_num_blocks = property(lambda self: self._list(0))
    kv_indices = property(lambda self: self._list(1))
    full_kv_num_blocks = property(lambda self: self._list(2))
    full_kv_indices = property(lambda self: self._list(3))


_graph_masks: dict[Hashable, tuple[list[weakref.ref[torch.Tensor]], GraphMask]] = {}
_MOST_MASKS = 64


def mask_in_graph(function: RecordedFunction | None, lists: Sequence[torch.Tensor], sizes: Sequence[int]) -> GraphMask:
    """The block mask of these tensors, the same in each call with them. function: None if it hides nothing."""
    from torch.nn.attention.flex_attention import noop_mask  # loaded by whoever made the block mask

    tensors = [*lists, *([] if function is None else function.tensors)]
    text = function and (function.text, function.numbers)
    key = text, (*sizes,), *map(id, tensors)
    found = _graph_masks.get(key)
    if found is not None and all(ref() is tensor for ref, tensor in zip(found[0], tensors, strict=True)):
        return found[1]
    while len(_graph_masks) >= _MOST_MASKS:
        del _graph_masks[next(iter(_graph_masks))]
    refs = [weakref.ref(tensor, lambda _: _graph_masks.pop(key, None)) for tensor in tensors]
    mask = GraphMask(noop_mask if function is None else function, lists, sizes)
    _graph_masks[key] = refs, mask
    return mask


class _Known:
    """What is known of a block mask."""

    def __init__(self, block_mask: Any, given: Any) -> None:
        self.ref, self.given = weakref.ref(block_mask, lambda _: _known.pop(id_, None)), given
        id_ = id(block_mask)
        self.function: Any = given  #: what kernels compute
        self.is_settled = False  #: whether it has been compared with the lists


_known: dict[int, _Known] = {}


def _knowledge_of(block_mask: Any) -> _Known:
    found = _known.get(id(block_mask))
    given = getattr(block_mask, "mask_mod", None)
    if found is not None and found.ref() is block_mask and found.given is given:
        return found
    if given is None or not hasattr(block_mask, "kv_indices"):
        raise ValidationError(
            f"block_mask: expected what torch's create_block_mask() gives, got {type(block_mask).__name__}."
        )
    from torch.nn.attention import flex_attention as theirs  # loaded by whoever made the block mask

    if given is getattr(theirs, "_sliced_mask_mod_error", None):
        raise ValidationError(
            "block_mask: expected one with a function, got a slice of a block mask, which has none: set its mask_mod, "
            "for the indices that it now has."
        )
    found = _known[id(block_mask)] = _Known(block_mask, given)
    if given is theirs.noop_mask:
        _refuse_capture(block_mask)
        states = states_of(block_mask)
        found.function, found.is_settled = None if bool(states.all()) else _listed(None, states, block_mask), True
    return found


def _refuse_capture(block_mask: Any) -> None:
    """PlanError in a capture, where the lists of a new block mask cannot be looked at."""
    if is_capturing(block_mask.kv_indices.device):
        raise PlanError(
            "block_mask: its lists are read once, which waits for the GPU; call flex_attention with it before the "
            "capture."
        )


def mask_of(block_mask: Any) -> Any:
    """The function of a block mask that kernels compute; None if it hides nothing."""
    return None if block_mask is None else _knowledge_of(block_mask).function


def check_lengths(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> None:
    """ValidationError unless a block mask is for these tensors."""
    if block_mask is None or (*block_mask.BLOCK_SIZE,) == (_ANY_LENGTH, _ANY_LENGTH):
        return
    lens = [query.shape[2], key.shape[2]]
    if lens != [*block_mask.shape[-2:]]:
        raise ValidationError(
            f"block_mask: expected one of {lens[0]} queries and {lens[1]} keys, got {list(block_mask.shape)}; create "
            f"one for these lengths, or take a part with block_mask._adjust({lens[0]}, {lens[1]})."
        )
    lists = block_mask.kv_num_blocks
    for name, got, expected in zip(("batch", "heads"), lists.shape[:-1][-2:], query.shape[:2], strict=False):
        if got not in (1, expected):
            raise ValidationError(f"block_mask: expected a {name} of 1 or {expected}, got {list(block_mask.shape)}.")


def is_other(
    block_mask: Any, options: PlanOptions, indices: Callable[[], Indices], operands: Mapping[str, Any],
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether the lists of a block mask say something else than its function, so that mask_of() is another one from now
    on. They are compared once.

    options, indices, operands: those of a plan with the function as its mask.
    """
    if block_mask is None or (known := _knowledge_of(block_mask)).is_settled:
        return False
    _refuse_capture(block_mask)
    states = states_of(block_mask).to(device)
    known.is_settled = True
    states = states[:, :1] if bool((states == states[:, :1]).all()) else states
    blocks = _blocks(options, indices(), operands, (*block_mask.BLOCK_SIZE,), device, states.shape[1] > 1)
    listed, shown = states != _HIDDEN, (blocks & _VISIBLE_BIT) != 0
    filled, full = states == _FULL, (blocks & _FULL_BIT) != 0
    if bool(((listed | ~shown) & (full | ~filled)).all()):
        return False
    known.function = _listed(known.given, states, block_mask)
    return True


def _blocks(
    options: PlanOptions, indices: Indices, operands: Mapping[str, Any], block: tuple[int, int], device: torch.device,
    of_heads: bool,
) -> torch.Tensor:  # fmt: skip
    """What the mask of a plan leaves of blocks: [batch or 1, heads or 1, rows, columns], as _blocks_of_mask() says it.

    of_heads: of each head, if the mask differs between heads; else of all together.
    """
    if options.variant is not None and options.variant.has_mask:
        return _blocks_of_mask(options, indices, operands, block, device, of_heads)
    q_len, kv_len = indices.qo_len, int(indices.kv_lens()[0])
    first, last = _ends(q_len, block[0], device, kv_len - q_len), _ends(kv_len, block[1], device, 0)
    least, most = last[0] - first[1][:, None], last[1] - first[0][:, None]  # distances from queries to keys
    right = 0 if options.causal else q_len + kv_len
    left = options.logits.window_left if options.logits.window_left >= 0 else q_len + kv_len
    shown, full = (least <= right) & (most >= -left), (most <= right) & (least >= -left)
    return (shown * _VISIBLE_BIT + full * _FULL_BIT)[None, None]


def _blocks_of_mask(
    options: PlanOptions, indices: Indices, given: Mapping[str, Any], block: tuple[int, int], device: torch.device,
    of_heads: bool,
) -> torch.Tensor:  # fmt: skip
    """What a variant's mask, with the plan's causal mask and window, leaves of blocks of (queries, keys): uint8
    [batch_size, heads or 1, rows of blocks, columns], bit 0: some element of the block, bit 1: all of a whole block.
    """
    variant, kv_lens = options.variant, indices.kv_lens().tolist()
    assert variant is not None
    rows, keys = min(block[0], max(1, indices.qo_len)), min(block[1], max(1, *kv_lens))
    height, width = -(-indices.qo_len // rows), -(-max(kv_lens) // keys)
    tiles = (RowTile * (len(kv_lens) * height))(*(
        RowTile(
            request=request, row_begin=row * rows, kv_end=width, work_begin=(request * height + row) * width,
            kv_len=kv_len, qo_len=indices.qo_len,
        )
        for request, kv_len in enumerate(kv_lens) for row in range(height)
    ))  # fmt: skip
    sent = torch.frombuffer(tiles, dtype=torch.uint8).to(device)
    differs = mask_heads(variant.expression) != 0
    num_masks = options.num_qo_heads if differs and of_heads else 1
    found = torch.empty(num_masks, len(kv_lens), height, width, dtype=torch.uint8, device=device)
    todo = with_operands(ExpressionBlocksParams, operands_struct(variant.expression))(
        tiles=sent.data_ptr(), num_tiles=len(tiles), tile_rows=rows, tile_kv=keys, group_size=1,
        mask_mode=MaskMode.CAUSAL if options.causal else MaskMode.NONE, window_left=options.logits.window_left,
        num_masks=num_masks, mask_heads=1, tested_heads=options.num_qo_heads // num_masks if differs else 1,
    )  # fmt: skip
    todo.operands.block_mask = found.data_ptr()
    if differs:
        todo.operands.block_mask_stride = found[0].numel()
    names = variant.expression.mask_operands
    write_operands(todo.operands, variant.expression, names, given, device, index_limits(options, indices))
    operation = OperationKey("expression_blocks", without_matrix_unit(target_of(device)), f"expr{variant.digest}")
    module = load(operation.spec(), device)[0]
    launch(module, ctypes.addressof(todo), device, grid=CTAS_PER_ROW_TILE * len(tiles), block=PARALLEL_THREADS)
    return found.transpose(0, 1)


def _ends(length: int, size: int, device: torch.device, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last place in each block."""
    begin = torch.arange(0, length, size, device=device)
    return begin + offset, (begin + size - 1).clamp(max=length - 1) + offset


def states_of(block_mask: Any) -> torch.Tensor:
    """The state of each block, uint8 [batch or 1, heads or 1, rows, columns]: 0, hidden; 1, partial; 2, full."""
    columns = -(-block_mask.shape[-1] // block_mask.BLOCK_SIZE[1])
    states = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, columns) * _PARTIAL
    if block_mask.full_kv_num_blocks is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns) * _FULL
        states = torch.maximum(states, full)
    return states[(None,) * (4 - states.dim())]


def _dense(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> torch.Tensor:
    """Which of the columns each row lists: uint8 [..., rows, columns]."""
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    places = torch.where(is_listed, indices, columns).clamp(0, columns).long()
    rows = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.uint8, device=indices.device)
    return rows.scatter_(-1, places, 1)[..., :columns].contiguous()


def _listed(mask_mod: Any, states: torch.Tensor, block_mask: Any) -> Any:
    """A mask function that looks up the state of each block, and asks mask_mod in partial ones."""
    (batches, heads), (rows, keys) = states.shape[:2], block_mask.BLOCK_SIZE

    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = b if batches > 1 else 0, h if heads > 1 else 0, q_idx // rows, kv_idx // keys
        state = states[place]
        if mask_mod is None:
            return state != 0
        return (state == 2) | ((state == 1) & mask_mod(b, h, q_idx, kv_idx))

    return listed
