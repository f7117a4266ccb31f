"""Runs a loaded module on the device of a call: a launch on torch's current stream, or a call on the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled as is_profiling
from torch.autograd.profiler import record_function

from quire.errors import PlanError, QuireError
from quire.jit import CudaModule, HostModule, Module
from quire.kernels.operation import PARALLEL_THREADS

_STATUSES = {1: "out of memory: no thread got memory to compute with; nothing was written"}
_thread: ThreadPoolExecutor | None = None  # in a forked process: calls kernels of the host for the thread that forked


class _Recorded(threading.local):
    """The call that a thread records, see replay.py."""

    call: Any = None


recorded = _Recorded()


def _after_fork() -> None:
    global _thread
    _thread = ThreadPoolExecutor(1, "quire")


os.register_at_fork(after_in_child=_after_fork)


def launch(module: Module, params: int, device: torch.device, *, grid: int, block: int, smem: int = 0) -> None:
    """Run `module` on the parameter struct at address `params`."""
    if recorded.call is not None:
        recorded.call.launches.append(module)
    if is_profiling():
        profiled(module, _launch, module, params, device, grid, block, smem)
    else:
        _launch(module, params, device, grid, block, smem)


def profiled(module: Module, start: Callable[..., None], *args: Any) -> None:
    """start(*args), which launches `module`. torch's profiler shows it as quire::SLUG."""
    with record_function(f"quire::{module.slug}"):
        start(*args)


def _launch(module: Module, params: int, device: torch.device, grid: int, block: int, smem: int = 0) -> None:
    refuse_make_fx(module.slug)
    if isinstance(module, CudaModule):
        index = device.index or 0
        stream = torch._C._cuda_getCurrentRawStream(index)
        module.launch(params, grid=grid, block=block, smem=smem, stream=stream, device=index, pdl=False)
        return
    assert isinstance(module, HostModule)
    if status := _call(module.function, params):
        meaning = _STATUSES.get(status, "a status that this version does not know; please report it")
        raise QuireError(f"{module.slug}: the kernel returned {status}: {meaning}.")


def refuse_make_fx(name: str) -> None:
    """PlanError while torch records operators: a launch is not recorded, and the graph would return uninitialised
    memory.
    """
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        raise PlanError(f"{name}: torch (make_fx) traces this call and would not record it; call it eagerly.")


def _call(function: Callable[[int], int], params: int) -> int:
    """Calls a CPU kernel, which runs on OpenMP threads.

    OpenMP (libgomp) reuses the threads that it has started for the calling thread. A fork copies this state, but not
    the threads, so that the thread that forked would wait for them forever. After a fork another thread calls the
    kernel.
    """
    if _thread is None or threading.current_thread() is not threading.main_thread() or torch.get_num_threads() == 1:
        return function(params)
    call = _thread.submit(_call_with_threads, torch.get_num_threads(), function, params)
    try:
        return call.result()
    finally:
        wait((call,))  # also after Ctrl-C: the kernel works on memory of the caller


def _call_with_threads(count: int, function: Callable[[int], int], params: int) -> int:
    torch.set_num_threads(count)  # OpenMP has a number of its own for each thread
    return function(params)


def bind(module: Module, params: int, device: torch.device, grid: int, *, pdl: bool) -> Callable[[int], None]:
    """A launch of `module` on the parameter struct at address `params`, to be called with a stream any number of times.

    `pdl`: it may begin before its predecessor ends.
    """
    if isinstance(module, CudaModule):
        exports = module.exports
        return module.bind(params, grid, exports["kThreads"], exports["kSmemBytes"], device.index or 0, pdl=pdl).start
    return lambda _: _launch(module, params, device, grid, 1)


def row_grid(rows: int, columns: int) -> int:
    """CTAs of a kernel that consists of one parallel_rows(): one thread per item."""
    if columns < PARALLEL_THREADS:
        return -(-rows // (PARALLEL_THREADS // columns))
    return rows * -(-columns // PARALLEL_THREADS)
