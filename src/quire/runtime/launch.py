"""Runs a loaded module on the device of a call: a launch on torch's current stream, or a call on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.errors import QuireError
from quire.jit import CudaModule, HostModule, Module
from quire.kernels.operation import PARALLEL_THREADS

__all__ = ["bind", "launch", "row_grid"]


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


def bind(module: Module, params: int, device: torch.device, grid: int, *, pdl: bool) -> Callable[[int], None]:
    """A launch of `module` on the parameter struct at address `params`, to be called with a stream any number of times.

    `pdl`: it may begin before its predecessor ends.
    """
    if isinstance(module, CudaModule):
        exports = module.exports
        return module.bind(params, grid, exports["kThreads"], exports["kSmemBytes"], device.index or 0, pdl=pdl).start
    return lambda _: launch(module, params, device, grid=grid, block=1)


def row_grid(rows: int, columns: int) -> int:
    """CTAs of a kernel made of one parallel_rows(): a thread an item."""
    if columns < PARALLEL_THREADS:
        return -(-rows // (PARALLEL_THREADS // columns))
    return rows * -(-columns // PARALLEL_THREADS)
