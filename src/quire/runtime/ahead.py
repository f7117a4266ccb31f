"""Plans with a launch before the kernel, which writes a converted copy of the keys into the workspace."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from quire.errors import ValidationError
from quire.kernels.operands import View
from quire.runtime.options import PlanOptions
from quire.runtime.schedule import Indices
from quire.runtime.target import current_stream
from quire.runtime.workspace import Workspace

ALIGNMENT = 256  #: bytes
#: Of the workspace that copies may take: partial results need the rest.
MOST_OF_WORKSPACE = 0.75


class Ahead(ABC):
    """The part of a plan that launches before the kernel, and the batch that the kernel is planned on.

    `indices` are the caller's, as plan() read them; `planned` and `options` describe the copies. `end`: the end of the
    tokens of ragged keys. `largest_page`: the caller's largest page number, -1 if only the device knows it.
    """

    def __init__(
        self, indices: Indices, planned: Indices, options: PlanOptions, workspace: Workspace, end: int,
        largest_page: int,
    ) -> None:  # fmt: skip
        self.indices, self.planned, self.options, self.workspace = indices, planned, options, workspace
        self.end, self.largest_page = end, largest_page

    @abstractmethod
    def bind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, /) -> dict[str, View]:
        """Take shapes and strides of the caller's tensors, of which k and v are [page, token, head, dim]. Returns the
        tensors that the kernel is given instead.
        """

    @abstractmethod
    def start(self, pointers: list[int]) -> list[int]:
        """Launch on torch's current stream. Turns the addresses of q, k, v, out, ... into those for the kernel."""

    def _use(self, *tensors: torch.Tensor) -> None:
        """Memory that each launch reads or writes, `tensors[0]` on the device of the call."""
        self._tensors, self._streams = tensors, {current_stream(tensors[0].device)}

    def _record_stream(self) -> None:
        """Tell torch's allocator of another stream that uses these tensors."""
        device = self._tensors[0].device
        if (stream := current_stream(device)) not in self._streams:
            for tensor in self._tensors:
                tensor.record_stream(torch.cuda.current_stream(device))
            self._streams.add(stream)


def set_aside(workspace: Workspace, num_bytes: int) -> tuple[tuple[Workspace, torch.Tensor] | None, int]:
    """What is left of a workspace and `num_bytes` of it, rounded up, and how many those are. Where it is too small:
    None, and how many bytes it would need.
    """
    num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    parts = workspace.set_aside(num_bytes, MOST_OF_WORKSPACE, ALIGNMENT)
    return parts, num_bytes if parts is not None else math.ceil((num_bytes + ALIGNMENT) / MOST_OF_WORKSPACE)


def kept(indices: Indices) -> Indices:
    """`indices` with copies of the arrays on the host, which the caller may change."""
    pages = indices.kv_indices
    return indices._replace(
        qo_indptr=_clone(indices.qo_indptr), kv_indptr=indices.kv_indptr.clone(),
        kv_last_page_len=_clone(indices.kv_last_page_len), kv_indices=_clone(pages) if _on_host(pages) else pages,
        seq_lens=None,
    )  # fmt: skip


def largest_page(indices: Indices) -> int:
    """The largest page number, if they are on the host, where negative ones are refused; else -1."""
    pages = indices.kv_indices
    if pages is None or not pages.is_cpu:
        return -1
    used = pages[int(indices.kv_indptr[0]) : int(indices.kv_indptr[-1])]
    least, largest = (int(x) for x in used.aminmax()) if used.numel() else (0, -1)
    if least < 0:
        raise ValidationError(f"paged_kv_indices: expected page numbers from 0 on, got {least}.")
    return largest


def view_of(tensor: torch.Tensor) -> View:
    """A tensor as described to kernels."""
    return View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _on_host(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_cpu
