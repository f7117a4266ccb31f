"""Runs a loaded module on the device of a call: a launch on torch's current stream, or a call on the host."""

from __future__ import annotations

import ctypes

import torch

from quire.errors import QuireError
from quire.jit import CudaModule, HostModule, Launch, Module
from quire.kernels.operation import PARALLEL_THREADS
from quire.staging import Sent

__all__ = ["Launcher", "launch", "row_grid"]


def launch(
    module: Module, params: int, device: torch.device, *, grid: int, block: int, smem: int = 0, enable_pdl: bool = False
) -> None:
    """Run `module` on the parameter struct at address `params`."""
    if isinstance(module, CudaModule):
        index = device.index or 0
        stream = torch._C._cuda_getCurrentRawStream(index)
        module.launch(params, grid=grid, block=block, smem=smem, stream=stream, device=index, pdl=enable_pdl)
        return
    assert isinstance(module, HostModule)
    if status := module.function(params):
        raise QuireError(f"{module.slug}: the kernel returned {status}: out of memory.")


class Launcher:
    """A planned launch of one parameter struct: what is known in plan() is not looked up again in run().

    Called with whether the launch may begin before its predecessor ends, which counts only if the kernel waits itself.
    """

    __slots__ = ("_bound", "_device", "_grid", "_index", "_may_start_early", "_module", "_params", "_sent")

    def __init__(
        self, module: Module, params: ctypes.Structure, device: torch.device, grid: int, sent: Sent | None, *, pdl: bool
    ) -> None:
        self._index = device.index or 0
        self._params = params  # keeps its memory
        self._module, self._device, self._grid = module, device, grid
        self._sent = sent  # what the launch reads
        self._may_start_early = pdl
        self._bound: dict[bool, Launch] = {}  # by whether it starts early

    def __call__(self, enable_pdl: bool) -> None:
        """Launch on torch's current stream."""
        early = self._may_start_early and enable_pdl
        bound = self._bound.get(early)
        if bound is None:
            if isinstance(self._module, HostModule):
                launch(self._module, ctypes.addressof(self._params), self._device, grid=self._grid, block=1)
                return
            facts = self._module.facts
            bound = self._bound[early] = self._module.bind(
                ctypes.addressof(self._params), self._grid, facts["kThreads"], facts["kSmemBytes"], self._index,
                pdl=early,
            )  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if self._sent is not None and stream != self._sent.stream:
            self._sent.used_on(torch.cuda.current_stream(self._device))
        bound(stream)


def row_grid(rows: int, columns: int) -> int:
    """CTAs of a kernel made of one parallel_rows(): a thread an item."""
    if columns < PARALLEL_THREADS:
        return -(-rows // (PARALLEL_THREADS // columns))
    return rows * -(-columns // PARALLEL_THREADS)
