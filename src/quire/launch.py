"""Runs a loaded module on the device of a call: a launch on torch's current stream, or a call on the host."""

from __future__ import annotations

import torch

from quire.errors import QuireError
from quire.jit import CudaModule, HostModule, Module
from quire.kernels.operation import PARALLEL_THREADS
from quire.target import max_ctas

__all__ = ["launch", "parallel_grid"]


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


def parallel_grid(items: int, device: torch.device) -> int:
    """CTAs of a kernel made of one parallel_for: enough for the items, not more than fill the GPU a few times."""
    return min(-(-items // PARALLEL_THREADS), max_ctas(device, 16)) if device.type == "cuda" else 1
