"""What kernels read beside q, k and v: packed bits of masks, and the tensors and numbers of a custom variant.

Operands of a variant are checked and written into the parameters; for cascades, too.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from quire.engine.checks import check_same_device, check_tensor
from quire.engine.device import target_of
from quire.engine.launch import launch
from quire.engine.schedule import Indices
from quire.engine.tensors import span_bytes
from quire.errors import UnsupportedArgumentError, ValidationError, unexpected_keyword
from quire.jit import get_module
from quire.kernels.expressions.cxx import operands_struct
from quire.kernels.expressions.rewrite import COLUMNS, FIRST_ROWS, ROWS, reads_indices, variant_of_level
from quire.kernels.expressions.tree import Expression, Operand, as_float32
from quire.kernels.expressions.variant import Variant
from quire.kernels.operation import PARALLEL_THREADS, OperationKey, PackbitsParams

_Number = TypeVar("_Number")

NO_OPERANDS: Mapping[str, Any] = {}


class Number(Protocol):
    """A float or an integer, also numpy's; no bool, whose `+` is an integer: so type checkers find `casual=True`."""

    def __pos__(self: _Number) -> _Number:
        """The same number."""


#: What a call may pass for an operand of its variant.
OperandValue: TypeAlias = torch.Tensor | Number


class SinkText(str):
    """In jit_args: the C++ text of FlashInfer's variant with sinks, whose run() takes (sink, sm_scale) by position."""

    __slots__ = ()


ATTENTION_SINK = SinkText("struct AttentionSink, which kernels of Quire have built in")


def variant_of(variant: Any, jit_args: Any = None, jit_kwargs: Any = None) -> Variant | None:
    """The variant of a wrapper, from any of the arguments that can give it."""
    given = [variant, *(jit_args if isinstance(jit_args, (list, tuple)) else [jit_args])]
    if isinstance(jit_kwargs, Mapping):
        given += list(jit_kwargs.values())
    elif jit_kwargs is not None:
        given.append(jit_kwargs)
    given = [value for value in given if value is not None]
    for value in given:
        if not isinstance(value, Variant):
            if value is variant:
                raise ValidationError(f"variant: expected a quire.Variant, got {type(value).__name__}.")
            raise _not_a_variant("jit_args", value)
    if len(given) > 1:
        raise ValidationError("variant: expected it once, of variant, jit_args and jit_kwargs.")
    return given[0] if given else None


def variant_of_module(jit_module: Any) -> Variant:
    """The variant in the place of a module that FlashInfer's JIT compiled."""
    if not isinstance(jit_module, Variant):
        raise _not_a_variant("jit_module", jit_module)
    return jit_module


def _not_a_variant(name: str, value: Any) -> UnsupportedArgumentError:
    return UnsupportedArgumentError(
        f"{name}: expected a quire.Variant (docs/variants.md shows what FlashInfer's C++ text is in Python), got "
        f"{type(value).__name__}."
    )


def split_operands(
    call: str, variant: Variant | None, operands: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The operands of `call`, which plans and runs: those that the mask reads, and the others. All must be given."""
    if variant is None:
        unexpected(call, operands)
        return {}, {}
    check_names(call, operands, {operand.name for operand in variant.expression.operands}, (), "")
    names = variant.expression.mask_operands
    of_mask = {name: value for name, value in operands.items() if name in names}
    return of_mask, {name: value for name, value in operands.items() if name not in names}


def by_position(variant: Variant, values: Sequence[Any]) -> dict[str, Any]:
    """Operands by name, of values in the order in which the variant declares them."""
    names = [operand.name for operand in variant.expression.operands]
    if len(values) != len(names):
        raise ValidationError(
            f"args: expected the variant's {len(names)} operands ({', '.join(names) or 'none'}), got {len(values)}."
        )
    return dict(zip(names, values, strict=True))


def unexpected(call: str, tensors: Mapping[str, Any]) -> None:
    """TypeError like Python's, for keywords that no variant declares."""
    if tensors:
        raise unexpected_keyword(call, next(iter(tensors)))


def refuse_beside(variant: Variant, *, soft_cap: float, has_alibi: bool, has_bits: bool) -> None:
    """Refuse options that a variant replaces."""
    if variant.has_score and (soft_cap or has_alibi):
        name = "logits_soft_cap" if soft_cap else "pos_encoding_mode"
        raise ValidationError(f"{name}: expected none beside a variant with a score: write it into the score.")
    if variant.has_mask and has_bits:
        raise ValidationError("custom_mask: expected none beside a variant with a mask: let the mask read a tensor.")


def write_operands(
    struct: ctypes.Structure, expression: Expression, names: Collection[str], given: Mapping[str, Any],
    device: torch.device, limits: Mapping[str, int],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Write the operands `names` into their mirror; returns the tensors among them.

    limits: how many values an index has, if known.
    """
    tensors = []
    for i, operand in enumerate(expression.operands):
        if operand.name in names:
            value = given[operand.name]
            if operand.rank:
                _write_tensor(getattr(struct, f"p{i}"), _checked(value, operand, expression, device, limits))
                tensors.append(value)
            else:
                setattr(struct, f"p{i}", _number(value, operand))
    return tuple(tensors)


def check_operands(variant: Variant, given: Mapping[str, Any], device: torch.device, limits: Mapping[str, int]) -> None:
    """Check some operands of a variant. limits: as of write_operands()."""
    write_operands(operands_struct(variant.expression)(), variant.expression, given, given, device, limits)


def addresses_of(
    struct: ctypes.Structure, expression: Expression, given: Mapping[str, Any]
) -> list[tuple[int, torch.Tensor]]:
    """Where the mirror holds the addresses of given tensors."""
    places = []
    for i, operand in enumerate(expression.operands):
        if operand.rank and operand.name in given:
            mirror = getattr(struct, f"p{i}")
            places.append((ctypes.addressof(mirror) + type(mirror).data.offset, given[operand.name]))
    return places


def check_names(call: str, given: Iterable[str], wanted: Collection[str], other: Collection[str], where: str) -> None:
    """ValidationError unless `given` are exactly `wanted`; the names in `other` belong to the call `where`."""
    given = set(given)
    for name in sorted(given - set(wanted)):
        if name in other:
            raise ValidationError(f"{name}: expected by {where}(), {_REASONS[where]}; got it in {call}().")
        raise unexpected_keyword(call, name, operands=wanted)
    for name in sorted(set(wanted) - given):
        raise ValidationError(f"{name}: expected as a keyword of {call}(), as the variant declares it; got none.")


_REASONS = {
    "plan": "because the mask reads it and plan() looks for tiles of keys that need no mask",
    "run": "because only the score reads it",
}


@dataclass(frozen=True)
class RemappedOperands:
    """Of a planned batch whose kernel counts places otherwise than the variant does."""

    variant: Variant
    planned: Variant  #: the same, as the kernel has it: it reads places from tables
    tables: tuple[Mapping[str, torch.Tensor], ...]  #: of each launch
    limits: Mapping[str, int]
    device: torch.device

    def of_plan(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each launch's plan() takes of what plan() was given, which is checked as the variant means it."""
        return self._of_call("plan", given)

    def of_run(self, given: Mapping[str, Any], is_traced: bool = False) -> list[dict[str, Any]]:
        """What each launch's run() takes of what run() was given; tensors that torch traces have no memory to check."""
        return self._of_call("run", given, is_traced)

    def in_place_of(self, before: RemappedOperands | None) -> RemappedOperands:
        """The same with the tables of `before`, which a captured graph reads; copy_from() then copies its own there."""
        for old, new in () if before is None else before._pairs(self):
            if new.shape[0] > old.shape[0]:
                raise ValidationError(
                    f"qo_indptr: expected at most {old.shape[0]} rows in a level, as in the first plan() for a CUDA "
                    f"graph, got {new.shape[0]}."
                )
        return self if before is None else replace(self, tables=before.tables)

    def copy_from(self, other: RemappedOperands) -> None:
        """Write the other's tables into the memory of these."""
        for old, new in self._pairs(other):
            old[: new.shape[0]].copy_(new)

    def _pairs(self, other: RemappedOperands) -> list[tuple[torch.Tensor, torch.Tensor]]:
        both = zip(self.tables, other.tables, strict=True)
        return [(old[name], new[name]) for old, new in both for name in new]

    def _of_call(self, call: str, given: Mapping[str, Any], is_traced: bool = False) -> list[dict[str, Any]]:
        expression, of_mask = self.variant.expression, self.planned.expression.mask_operands
        own = {operand.name for operand in expression.operands}
        names = {"plan": own & of_mask, "run": own - of_mask}
        other = "run" if call == "plan" else "plan"
        check_names(call, given, names[call], names[other], other)
        if not is_traced:
            check_operands(self.variant, {name: given[name] for name in names[call]}, self.device, self.limits)
        return [
            {**given, **{name: table for name, table in tables.items() if (name in of_mask) == (call == "plan")}}
            for tables in self.tables
        ]


def int32_table(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, and not empty: operands have elements."""
    if not numbers.shape[0]:
        numbers = numbers.new_zeros((1, *numbers.shape[1:]))
    return numbers.to(torch.int32).to(device)


def _checked(
    value: Any, operand: Operand, expression: Expression, device: torch.device, limits: Mapping[str, int]
) -> torch.Tensor:
    name, tensor = operand.name, check_tensor(value, operand.name)
    if str(tensor.dtype).removeprefix("torch.") != operand.type:
        raise ValidationError(f"{name}: expected dtype torch.{operand.type}, as declared, got {tensor.dtype}.")
    if tensor.dim() != operand.rank or 0 in tensor.shape:
        raise ValidationError(
            f"{name}: expected {operand.rank} dimensions, none of them empty, as the variant reads it, got "
            f"{list(tensor.shape)}."
        )
    check_same_device(tensor, name, device)
    if span_bytes(tuple(tensor.shape), tensor.stride(), tensor.dtype) >= tensor.element_size() << 31:
        raise ValidationError(f"{name}: expected less than 2**31 elements from its first to its last.")
    for (read, dim), indices in direct_reads(expression).items():
        for index in indices if read == name else ():
            if tensor.shape[dim] < limits.get(index, 0):
                raise ValidationError(
                    f"{name}: expected at least {limits[index]} elements in dimension {dim}, which {index} counts, got "
                    f"{list(tensor.shape)}."
                )
    return tensor


def _write_tensor(mirror: Any, tensor: torch.Tensor) -> None:
    mirror.data = tensor.data_ptr()
    mirror.sizes[:], mirror.strides[:] = tensor.shape, tensor.stride()


def _number(value: Any, operand: Operand) -> float | int:
    """A number of the declared type."""
    if isinstance(value, torch.Tensor):
        if check_tensor(value, operand.name).numel() != 1:
            raise ValidationError(f"{operand.name}: expected a number, got a tensor of shape {list(value.shape)}.")
        value = value.item()
    try:
        number = value.__float__() if operand.type == "float32" else operator.index(value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValidationError(f"{operand.name}: expected a number of type {operand.type}, got {value!r}.") from error
    if isinstance(number, float) and math.isfinite(number) and math.isinf(as_float32(number)):
        raise ValidationError(f"{operand.name}: expected a number that float32 holds, got {number}.")
    if isinstance(number, int) and not -(2**31) <= number < 2**31:
        raise ValidationError(f"{operand.name}: expected an integer that int32 holds, got {number}.")
    return number


@lru_cache(maxsize=1024)
def direct_reads(expression: Expression) -> Mapping[tuple[str, int], frozenset[str]]:
    """The indices that are used directly to read a dimension of a tensor."""
    found: dict[tuple[str, int], set[str]] = {}
    for root in (expression.score, expression.mask):
        for node in () if root is None else root.walk():
            for dim, arg in enumerate(node.args if node.op == "read" else ()):
                if arg.op == "index":
                    found.setdefault((str(node.value), dim), set()).add(str(arg.value))
    return {key: frozenset(indices) for key, indices in found.items()}


def describe(value: Any) -> Any:
    """The part of an operand that a CUDA graph keeps by value."""
    return (value.data_ptr(), *value.shape, *value.stride()) if isinstance(value, torch.Tensor) else value


class Level(NamedTuple):
    """Entries of a level, on the host: [entries + 1] offsets into the rows of q, and how many keys each has."""

    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor

    @classmethod
    def of(cls, indices: Indices) -> Level:
        """Of index arrays."""
        rows, lens = torch.nn.functional.pad(indices.qo_lens().cumsum(0), (1, 0)), indices.kv_lens()
        if rows.diff().lt(0).any():
            raise ValidationError("qo_indptr: expected to ascend.")
        return cls(rows, lens)

    def of_rows(self, of_entries: torch.Tensor) -> torch.Tensor:
        """A number of each entry for each of its rows."""
        return of_entries.repeat_interleave(self.qo_indptr.diff())


def operands_of_levels(
    variant: Variant, levels: Sequence[Level], num_qo_heads: int, device: torch.device
) -> RemappedOperands:
    """The operands for consecutive levels; the entries of the last level are the requests."""
    rows = {int(level.qo_indptr[-1]) for level in levels}
    if len(rows) > 1:
        raise ValidationError(f"qo_indptr: expected as many rows of q in each level, got {sorted(rows)}.")
    queries, batch_size = levels[-1].qo_indptr.diff(), len(levels[-1].kv_lens)
    lens = torch.stack([level.of_rows(level.kv_lens) for level in levels])
    limits = {"head": num_qo_heads, "request": batch_size, "q_idx": int(queries.max()) if batch_size else 0}
    limits["kv_idx"] = int(lens.sum(0).max()) if lens.numel() else 0
    tables = _tables(levels, lens, device) if reads_indices(variant) else [dict[str, torch.Tensor]()] * len(levels)
    return RemappedOperands(variant, variant_of_level(variant), tuple(tables), limits, device)


def _tables(levels: Sequence[Level], lens: torch.Tensor, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """lens [levels, rows of q]: how many keys of each level a row has."""
    own = levels[-1]
    request = own.of_rows(torch.arange(len(own.kv_lens), device="cpu"))
    qo_len, total = own.qo_indptr.diff()[request], lens.sum(0)
    q_idx = torch.arange(len(request), device="cpu") - own.qo_indptr[:-1][request]
    found = []
    for level, first_key in zip(levels, lens.cumsum(0) - lens, strict=True):
        columns = {"q_idx": q_idx, "request": request, "qo_len": qo_len, "kv_len": total, "first_key": first_key}
        rows = torch.stack([columns[name] for name in COLUMNS], 1)
        found.append({FIRST_ROWS: int32_table(level.qo_indptr[:-1], device), ROWS: int32_table(rows, device)})
    return found


# --- masks -----------------------------------------------------------------------------------------------------------

_BYTES_A_CTA = 1024  #: of the result: two for each of the kChunk items in kernels/packbits.h


def pack_mask(mask: torch.Tensor, indices: Indices, device: torch.device) -> torch.Tensor:
    """The bits of a flat bool mask, sum(qo_len * kv_len) values, as the kernels read them."""
    check_tensor(mask, "custom_mask")
    if mask.is_floating_point():
        raise ValidationError(
            f"custom_mask: expected dtype torch.bool, True where a query sees a key, got {mask.dtype}; a bias that is "
            "added to logits is a custom variant: quire.Variant(score=...)."
        )
    check_same_device(mask, "custom_mask", device)
    segments = [0]
    for qo_len, kv_len in zip(indices.qo_lens().tolist(), indices.kv_lens().tolist(), strict=True):
        segments.append(segments[-1] + qo_len * kv_len)
    if mask.numel() != segments[-1]:
        raise ValidationError(
            f"custom_mask: expected sum(qo_len * kv_len)={segments[-1]} elements, got {mask.numel()}."
        )
    return pack_bits(mask.reshape(-1), segments, "little", "custom_mask")


def byte_offsets(segments: list[int]) -> list[int]:
    """The byte at which the bits of each segment begin, and the number of bytes in all."""
    offsets = [0]
    for begin, end in pairwise(segments):
        offsets.append(offsets[-1] + (end - begin + 7) // 8)
    return offsets


def pack_bits(x: torch.Tensor, segments: list[int], bitorder: str, name: str = "x") -> torch.Tensor:
    """Packs eight booleans into a byte: uint8 [byte_offsets(segments)[-1]]. Each segment begins with a new byte."""
    if bitorder not in ("big", "little"):
        raise ValidationError(f"bitorder: expected 'big' or 'little', got {bitorder!r}.")
    if x.dtype not in (torch.bool, torch.uint8):
        raise ValidationError(f"{name}: expected dtype torch.bool or torch.uint8, got {x.dtype}.")
    offsets = byte_offsets(segments)
    if offsets[-1] == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    num_bytes = -(-offsets[-1] // 4) * 4  # attention reads masks by the word, and no byte that nothing has written
    y = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    x = x.contiguous()
    params = PackbitsParams(
        x=x.data_ptr(), y=y.data_ptr(), n=x.shape[0], num_bytes=num_bytes, num_segments=len(segments) - 1,
        little=int(bitorder == "little"),
    )  # fmt: skip
    if segments != [0, x.shape[0]]:
        index = torch.tensor([segments, offsets], dtype=torch.int64, device="cpu", pin_memory=x.is_cuda)
        sent = index.to(x.device, non_blocking=True)
        params.segment_begin, params.byte_begin = sent.data_ptr(), sent.data_ptr() + 8 * len(segments)
    module = get_module(OperationKey("packbits", target_of(x.device)).spec())
    grid = -(-num_bytes // _BYTES_A_CTA)
    launch(module, ctypes.addressof(params), x.device, grid=grid, block=PARALLEL_THREADS)
    return y[: offsets[-1]]
