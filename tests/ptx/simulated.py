"""Quire on a GPU that is not there: kernels are compiled to PTX, planned for tensors of the CPU, and interpreted."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import is_fake

from ptx.artifacts import compiled_to_ptx, text_of
from ptx.memory import GlobalMemory
from ptx.program import Program, parse
from ptx.threads import Grid, Turns
from quire.engine import device, launch, planner
from quire.jit import CudaModule, HostModule, Module
from quire.kernels.operation import MergeParams

#: SMs of the simulated GPU: a few, so that small problems are divided into parts that have to be merged.
SMS = 3
_A_GPU = torch.device("cuda:0")
Edit = Callable[[str], str]

#: Parameters that are the distance of a tensor from another one, by kernel.
_DISTANCES = {
    "merge_pair": [
        (getattr(MergeParams, name).offset, getattr(MergeParams, f"{name}_state_bytes").offset) for name in ("v", "s")
    ]
}


@lru_cache(maxsize=32)
def _parsed(text: str) -> Program:
    return parse(text)


class SimulatedGpu:
    """The kernels that were launched, and the instructions that they have executed."""

    def __init__(self, edit: Edit | None, turns: Turns) -> None:
        self.edit, self.turns = edit, turns
        self.launched: list[str] = []
        self.executed: set[str] = set()

    def run(self, module: CudaModule, params: int, grid: int, block: int, smem: int) -> None:
        """Interpret a launch; the parameters are read from the address `params`."""
        text = text_of(module._image, module.slug)
        edited = text if self.edit is None else self.edit(text)
        self.launched.append(module.slug)
        program, entry = _parsed(edited), module.entry.manifest.entry
        size = program.functions[entry].params[0].size
        memory = GlobalMemory(storages())
        distances = _DISTANCES.get(module.slug.partition(".")[0], ())
        given = memory.relocate(ctypes.string_at(params, size), distances)
        threads = Grid(program, entry, memory, given, grid, block, smem, self.turns)
        threads.run()
        self.executed |= threads.executed


def storages() -> dict[int, int]:
    """Address and bytes of the memory of each tensor of this process. Other tests may have left fake ones of a trace,
    which have none: to ask for it is a warning.
    """
    found: dict[int, int] = {}
    for tensor in gc.get_objects():
        if not issubclass(type(tensor), torch.Tensor) or is_fake(tensor):
            continue
        if tensor.is_cpu and not tensor.is_sparse:
            storage = tensor.untyped_storage()
            try:
                found[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:  # so has a wrapper of a trace
                continue
    return {address: size for address, size in found.items() if address and size}


@contextmanager
def simulated(target: str = "sm80", edit: Edit | None = None, turns: Turns = Turns.NONE) -> Iterator[SimulatedGpu]:
    """In here the CPU's tensors are on a GPU of this target. `edit`: changes the PTX of all kernels."""
    gpu = SimulatedGpu(edit, turns)
    host_launch, order_bytes = launch._launch, planner._order_bytes

    def bind(
        self: CudaModule, params: int, grid: int, block: int, smem: int, index: int, *, pdl: bool = False
    ) -> _Started:
        return _Started(lambda: gpu.run(self, params, grid, block, smem))

    def start(module: Module, params: int, on: torch.device, grid: int, block: int, smem: int = 0) -> None:
        if isinstance(module, HostModule):
            host_launch(module, params, on, grid, block, smem)
        else:
            gpu.run(module, params, grid, block, smem)

    with compiled_to_ptx({target: target.removeprefix("sm")}) as patch:
        patch.setattr(device, "host_target", lambda **_: target)
        patch.setattr(planner, "max_ctas", lambda _, min_ctas: SMS * min_ctas)
        patch.setattr(planner, "_order_bytes", lambda template, sizes, _: order_bytes(template, sizes, _A_GPU))
        patch.setattr(CudaModule, "is_loaded", lambda *_: True)
        patch.setattr(CudaModule, "prepare", lambda *_: None)
        patch.setattr(CudaModule, "bind", bind)
        patch.setattr(launch, "_launch", start)
        yield gpu


class _Started:
    """Stands for a jit.Launch."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def start(self, stream: int) -> None:
        """Launch; there is one stream."""
        del stream
        self._run()
