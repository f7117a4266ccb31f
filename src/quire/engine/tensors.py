"""The tensors of run(): layouts, what a plan expects of them, comparison with those of the last run, overlap.

A paged cache is a 5-D tensor (keys at [:, 0], values at [:, 1]) or a pair of 4-D tensors; a page is NHD [page_size,
num_kv_heads, head_dim] or HND [num_kv_heads, page_size, head_dim]. Only the last dimension must be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch

from quire.engine.checks import (
    check_contiguous_last,
    check_dtype,
    check_output,
    check_positive,
    check_same_device,
    check_tensor,
    cure_of,
)
from quire.engine.device import on_cuda
from quire.engine.options import PlanOptions
from quire.engine.schedule import check_count
from quire.errors import ValidationError
from quire.kernels import Decision
from quire.kernels.features import NVFP4, KVLayout, Operand, View

PagedCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def span_bytes(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element of a tensor to the end of its last one; 0 without elements."""
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return 0 if 0 in sizes else (last + 1) * dtype.itemsize


def _tokens_first(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    return pages if layout is KVLayout.NHD else pages.transpose(1, 2)


def ragged_view(tensor: torch.Tensor, name: str, layout: KVLayout) -> torch.Tensor:
    """A ragged tensor, NHD [nnz_kv, num_kv_heads, head_dim] or HND [num_kv_heads, nnz_kv, head_dim], as one page."""
    check_tensor(tensor, name)
    if tensor.dim() != 3:
        dims = "nnz_kv, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, nnz_kv"
        raise ValidationError(f"{name}: expected [{dims}, head_dim], got {list(tensor.shape)}.")
    return _tokens_first(tensor.unsqueeze(0), layout)


def cache_tensors(cache: Any) -> tuple[torch.Tensor, ...]:
    """The one or two tensors that a paged cache is made of."""
    if isinstance(cache, torch.Tensor):
        return (cache,)
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        return cache[0], cache[1]
    raise ValidationError(
        f"paged_kv_cache: expected a tensor or a pair (k_cache, v_cache), got {type(cache).__name__}."
    )


def cache_view(cache: tuple[torch.Tensor, ...], layout: KVLayout, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the tensors of a paged cache. With page_size 1 the page dimension may be left out."""
    if len(cache) == 2:
        k, v = (_pages(tensor, f"paged_kv_cache[{i}]", layout, page_size) for i, tensor in enumerate(cache))
        return k, v
    tensor = check_tensor(cache[0], "paged_kv_cache")
    if tensor.dim() not in ((4, 5) if page_size == 1 else (5,)) or tensor.shape[1] != 2:
        raise _wrong_shape("paged_kv_cache", "num_pages, 2", layout, tensor)
    k, v = (_pages(tensor.select(1, which), "paged_kv_cache", layout, page_size) for which in (0, 1))
    return k, v


def _pages(tensor: torch.Tensor, name: str, layout: KVLayout, page_size: int) -> torch.Tensor:
    check_tensor(tensor, name)
    if tensor.dim() == 3 and page_size == 1:
        return tensor.unsqueeze(1)
    if tensor.dim() != 4:
        raise _wrong_shape(name, "num_pages", layout, tensor)
    return _tokens_first(tensor, layout)


def cache_views(cache: PagedCache, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache to write to: the kernel finds both by one page number and one head."""
    k, v = cache_view(cache_tensors(cache), layout, page_size_of(cache, layout))
    if k.shape[:3] != v.shape[:3] or k.dtype is not v.dtype:
        raise ValidationError(
            f"paged_kv_cache: expected as many pages, tokens a page and heads of values as of keys, of one dtype; got "
            f"{list(k.shape[:3])} {k.dtype} of keys and {list(v.shape[:3])} {v.dtype} of values."
        )
    for view in (k, v):
        for size, name in zip(view.shape[1:], ("page_size", "num_kv_heads", "head_dim"), strict=True):
            check_positive(size, f"paged_kv_cache: {name}")
        check_count(view.shape[2] * view.shape[3], "paged_kv_cache", "numbers of a token (num_kv_heads times head_dim)")
        check_contiguous_last(check_output(view, "paged_kv_cache"), "paged_kv_cache")
        check_same_device(view, "paged_kv_cache", k.device)
    return k, v


def _wrong_shape(name: str, pages: str, layout: KVLayout, tensor: torch.Tensor) -> ValidationError:
    page = "page_size, num_kv_heads" if layout is KVLayout.NHD else "num_kv_heads, page_size"
    return ValidationError(f"{name}: expected [{pages}, {page}, head_dim], got {list(tensor.shape)}.")


def page_size_of(cache: PagedCache, layout: KVLayout) -> int:
    """Tokens of a page: 1 where that dimension is left out."""
    tensors = cache_tensors(cache)
    first = check_tensor(tensors[0], "paged_kv_cache")
    if first.dim() != (5 if len(tensors) == 1 else 4):
        return 1
    return first.shape[-3 if layout is KVLayout.NHD else -2]


#: (bytes from one to the next, how many), the largest steps first
Steps = tuple[tuple[int, int], ...]


def check_apart(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Check that no output overlaps another output, or an input other than itself."""
    spans = [(name, tensor, *_span(tensor)) for name, tensor in (*outputs.items(), *inputs.items())]
    for i, (name, tensor, begin, end) in enumerate(spans[: len(outputs)]):
        for j, (other, theirs, their_begin, their_end) in enumerate(spans[i + 1 :], i + 1):
            if begin >= their_end or their_begin >= end or not may_overlap(tensor, theirs):
                continue
            if j < len(outputs) or not is_same(tensor, theirs):
                raise ValidationError(
                    f"{name}: expected memory of its own, as results are written there; got a tensor that lies on "
                    f"{other}; pass a copy."
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Its first byte and the one behind its last."""
    begin = tensor.data_ptr()
    return begin, begin + span_bytes(tensor.shape, tensor.stride(), tensor.dtype)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same elements in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype is b.dtype


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements of both have a byte in common; also True if rows of one tensor reach into the next row, which is
    not analysed further.
    """
    return bool(a.numel() and b.numel()) and _meet(b.data_ptr() - a.data_ptr(), _steps(a), _steps(b))


def _steps(tensor: torch.Tensor) -> Steps:
    size = tensor.element_size()
    steps = ((step * size, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    return (*sorted(steps, reverse=True), (1, size))


def _length(steps: Steps) -> int:
    return sum(step * (n - 1) for step, n in steps) + 1


def _meet(distance: int, a: Steps, b: Steps) -> bool:
    """Whether bytes at `a`'s steps and, `distance` further, at `b`'s coincide."""
    if distance >= _length(a) or -distance >= _length(b):
        return False
    step = max(a[0][0], b[0][0])
    a, b = (steps if steps[0][0] == step else ((step, 1), *steps) for steps in (a, b))
    if step == 1 or step < max(_length(a[1:]), _length(b[1:])):
        return True
    rows, rest = divmod(distance, step)  # row i of b begins `rest` behind row i + rows of a
    return any(
        -b[0][1] < ahead < a[0][1] and _meet(shift, a[1:], b[1:])
        for ahead, shift in ((rows, rest), (rows + 1, rest - step))
    )


Check = Callable[..., bool]


def pointers_of(tensors: Sequence[Any]) -> list[int]:
    """Addresses of tensors; [0] if one of them is no tensor, or has no memory."""
    try:
        if len(tensors) == 4:  # q, k, v and the result; a fifth less than the loop takes
            q, k, v, out = tensors
            return [q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()]
        pointers = []
        for tensor in tensors:  # a list comprehension would be a call
            pointers.append(tensor.data_ptr())
    except (AttributeError, RuntimeError):
        return [0]
    return pointers


class Signature:
    """Shapes, strides, types, devices, and whether tensors are negated views or need a gradient."""

    __slots__ = ("count", "fits", "of_dense")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.count = len(tensors)
        #: whether as many other tensors, none of them nested, have this signature
        self.of_dense: Check = _guards(tensors) if _guards_work() else _comparison(tensors)
        #: whether as many other tensors have this signature; false of what is no tensor, or a nested one
        self.fits: Check = {3: _dense_3, 4: _dense_4}.get(len(tensors), _dense)(self.of_dense)


def has_nested(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of the tensors are nested."""
    for tensor in tensors:  # half the time of any()  # noqa: SIM110
        if tensor.is_nested:
            return True
    return False


def _guards(tensors: Sequence[torch.Tensor]) -> Check:
    """By torch.compile's own check: one call takes a fifth of the time of reading the same attributes."""
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(t.shape) for t in tensors]
    strides: Any = [list(t.stride()) for t in tensors]
    check: Check = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


# The check asks nested tensors for their sizes, which they do not have, and no code catches that: the process ends.


def _dense_3(check: Check) -> Check:
    def fits(q: Any, kv: Any, out: Any) -> bool:
        try:
            return not (q.is_nested or kv.is_nested or out.is_nested) and check(q, kv, out)
        except AttributeError:  # no tensor
            return False

    return fits


def _dense_4(check: Check) -> Check:
    def fits(q: Any, k: Any, v: Any, out: Any) -> bool:
        try:
            return not (q.is_nested or k.is_nested or v.is_nested or out.is_nested) and check(q, k, v, out)
        except AttributeError:
            return False

    return fits


def _dense(check: Check) -> Check:
    def fits(*tensors: Any) -> bool:
        try:
            return not has_nested(tensors) and check(*tensors)
        except AttributeError:
            return False

    return fits


def _comparison(tensors: Sequence[torch.Tensor]) -> Check:
    """By comparing attributes."""

    def describe(t: torch.Tensor) -> tuple[Any, ...]:
        return type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg(), t.requires_grad

    def fits(*others: Any) -> bool:
        try:
            return own == [describe(t) for t in others]
        except (AttributeError, RuntimeError):  # no tensor, or one without sizes
            return False

    own = [describe(t) for t in tensors]
    return fits


@cache
def _guards_work() -> bool:
    """Whether torch.compile's check, which is no public part of torch, is there and answers as the comparison does.

    Asked once, on a thread of its own: on this one a mode of torch may hide properties of tensors from the check.
    Whatever else it does in some version of torch, the comparison is used instead.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_answers_are_right).result()


def _answers_are_right() -> bool:
    one, other = (torch.zeros(2, 3, 4, device="cpu", dtype=torch.float32) for _ in range(2))
    try:
        fits = _dense(_guards((one, other)))
        answers = [fits(*tensors) for tensors in _examples(one, other)]
    except Exception:
        return False
    return answers == [True, True] + [False] * (len(answers) - 2)


def _examples(one: torch.Tensor, other: torch.Tensor) -> list[tuple[Any, Any]]:
    """Two pairs of tensors with the signature of `one` and `other`, and one pair for each way not to have it."""
    different = (
        one[:, :2], one.transpose(0, 1).contiguous().transpose(0, 1), one.expand(2, 2, 3, 4), one.to(torch.float16),
        one.to("meta"), one.clone().requires_grad_(), torch._neg_view(one), torch.nn.Parameter(one, False), None,
    )  # fmt: skip
    return [(one, other), (other.clone(), one.clone()), *((wrong, other) for wrong in different), (one, different[0])]


#: The argument of plan() that says the number type of an operand.
_OPTION_OF = {"kv": "kv_data_type", "o": "o_data_type"}
_LAYOUT_HINTS = {
    KVLayout.NHD: " (read as kv_layout='NHD'; make the wrapper with 'HND' if heads come before tokens)",
    KVLayout.HND: " (shown in the order of NHD; the wrapper has kv_layout='HND')",
}


def view_of(tensor: torch.Tensor) -> View:
    """Where a tensor lies, its sizes and strides."""
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


class Expected(NamedTuple):
    """What the kernel declares of its operands, in the numbers of a plan."""

    decision: Decision
    options: PlanOptions
    layout: KVLayout
    device: torch.device

    def view(self, operand: Operand, tensor: torch.Tensor, name: str) -> View:
        """The view of a tensor with the operand's dimensions, in the order of the plan's layout."""
        (check_output if operand.name == "o" else check_tensor)(tensor, name)
        if "page_size" in operand.dims and self.layout is KVLayout.HND:
            tensor = tensor.transpose(1, 2)
        return view_of(tensor)

    def check(self, operand: Operand, tensor: torch.Tensor, name: str, view: View, nnz_qo: int) -> None:
        """Check a tensor against what the kernel declares."""
        dtype = self.options.types.kv if operand.type == "kv" else self.decision.key.type_of(operand.type)
        self._check_sizes(operand, name, view.sizes, nnz_qo)
        check_dtype(tensor, name, dtype, _OPTION_OF.get(operand.type, "q_data_type"))
        check_same_device(tensor, name, self.device)
        if len(operand.strides) < len(operand.dims):
            check_contiguous_last(tensor, name)
        self._check_alignment(
            view, name, math.gcd(16, view.sizes[-1]) if operand.type == "e4m3" else 16, tensor.itemsize
        )
        self._check_reach(span_bytes(view.sizes, view.strides, tensor.dtype), name, operand.name)

    def _check_sizes(self, operand: Operand, name: str, sizes: tuple[int, ...], nnz_qo: int) -> None:
        options = self.options
        page_size = options.page_size * options.cache_page or None
        known = {"nnz_qo": nnz_qo, "num_pages": None, "nnz_prefix": None, "page_size": page_size}
        wanted = [known[dim] if dim in known else getattr(options, dim) for dim in operand.dims]
        names = list(operand.dims)
        if operand.type == "kv" and options.types.kv is NVFP4:  # two numbers a byte
            wanted[-1], names[-1] = getattr(options, names[-1]) // 2, f"{names[-1]} / 2"
        if len(sizes) == len(wanted) and all(w in (None, size) for w, size in zip(wanted, sizes, strict=True)):
            return
        dims = [dim if size is None else f"{dim}={size}" for dim, size in zip(names, wanted, strict=True)]
        if dims[0] == "num_pages" and not options.page_size:
            dims, sizes = ["nnz_kv", *dims[2:]], sizes[1:]
        layout = _LAYOUT_HINTS[self.layout] if operand.type == "kv" else ""
        cure = cure_of(sizes, dict(zip(names, wanted, strict=True))) or self._planned(operand, sizes)
        raise ValidationError(f"{name}: expected [{', '.join(dims)}], got {list(sizes)}{layout}.{cure}")

    def _planned(self, operand: Operand, sizes: tuple[int, ...]) -> str:
        """What plan() was told of a number that is another one here."""
        pairs = zip(operand.dims, sizes, strict=False) if len(sizes) == len(operand.dims) else ()
        told = [f"{dim}={planned}" for dim, size in pairs if (planned := getattr(self.options, dim, size)) != size]
        return f" plan() was told {', '.join(told)}: call it again." if told else ""

    def _check_alignment(self, view: View, name: str, num_bytes: int, itemsize: int) -> None:
        """GPU kernels load 16 bytes at a time, of scales as many as a row of them has."""
        if not on_cuda(self.device):
            return
        step = max(1, num_bytes // itemsize)
        if view.pointer % num_bytes or any(stride % step for stride in view.strides if stride != 1):
            raise ValidationError(
                f"{name}: expected a {num_bytes}-byte aligned tensor whose strides are multiples of {step} elements, "
                f"got address {view.pointer:#x} and strides {list(view.strides)}; call .contiguous() on it."
            )

    def _check_reach(self, num_bytes: int, name: str, operand: str) -> None:
        """Some kernels find rows by numbers of 32 bits."""
        kernel = self.decision.kernel
        most = kernel.max_bytes(self.decision.key, operand)
        if most and num_bytes > most:
            raise ValidationError(
                f"{name}: expected at most {most} bytes from its first element to its last, which {kernel.name} "
                f"reaches, got {num_bytes}; plan with another backend."
            )


def check_floats(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    """Check lse, or sinks: contiguous float32 on the device of the plan."""
    check_same_device(tensor, name, device)
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ValidationError(
            f"{name}: expected a contiguous float32 tensor, got {tensor.dtype}, strides {tuple(tensor.stride())}."
        )


LN2 = math.log(2)  #: an lse in base 2 times this is in base e


def to_base_e(lse: torch.Tensor) -> torch.Tensor:
    """Converts an lse of base 2 to base e, in place."""
    return lse.mul_(LN2)
