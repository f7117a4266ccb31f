"""Tensors between pages that nobody may touch: a read or write beyond one is a SIGSEGV at once, and not a wrong number
some day.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE
PROT_NONE = 0
FILLER = 0xA5  #: in what is left of a tensor's first or last page

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _forbid(address: int, num_bytes: int) -> None:
    if _libc.mprotect(address, num_bytes, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect failed")


def _between_guards(num_bytes: int) -> Tensor:
    """uint8 [whole pages, at least num_bytes], with a forbidden page on either side."""
    inside = max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES
    memory = mmap.mmap(-1, inside + 2 * PAGE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _forbid(address, PAGE_BYTES)
    _forbid(address + PAGE_BYTES + inside, PAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE_BYTES, count=inside)


def span(tensor: Tensor) -> int:
    """Elements from the first to the last in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements lie on each other: nothing can be written into such a tensor."""
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


@dataclass
class _Placed:
    whole: Tensor  #: uint8: all bytes between the guards
    kept: Tensor  #: what they were when placed
    view: Tensor
    begin: int  #: of the tensor, in bytes


class GuardedMemory:
    """Places tensors against the guard page behind them (`upper`) or before them."""

    def __init__(self, upper: bool) -> None:
        self._upper = upper
        self._placed: dict[str, _Placed] = {}

    def place(self, name: str, tensor: Tensor) -> Tensor:
        """A copy with the same sizes, strides, sign and overlaps."""
        if tensor.is_neg():
            return torch._neg_view(self.place(name, torch._neg_view(tensor)))
        count, size = span(tensor), tensor.element_size()
        whole = _between_guards(count * size)
        begin = whole.numel() - count * size if self._upper else 0
        whole.fill_(FILLER)
        elements = whole[begin : begin + count * size].view(tensor.dtype)
        if count:
            elements.copy_(tensor.detach().as_strided((count,), (1,)))
        view = elements.as_strided(tensor.shape, tensor.stride(), elements.storage_offset())
        self._placed[name] = _Placed(whole, whole.clone(), view, begin)
        return view.requires_grad_(tensor.requires_grad)

    def assert_untouched(self, written: frozenset[str]) -> None:
        """No byte has changed but those of the tensors named in `written`; between their rows neither."""
        for name, placed in self._placed.items():
            if name in written and placed.view.numel() and not _overlaps(placed.view):
                kept = placed.kept[placed.begin :].view(placed.view.dtype)
                kept.as_strided(placed.view.shape, placed.view.stride(), kept.storage_offset()).copy_(
                    placed.view.detach()
                )
            changed = (placed.whole != placed.kept).nonzero().flatten()
            assert not changed.numel(), (
                f"{name}: {changed.numel()} bytes that are not the call's to write have changed, the first at byte "
                f"{int(changed[0]) - placed.begin} of the tensor"
            )
