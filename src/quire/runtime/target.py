"""The compilation target of a device."""

from __future__ import annotations

from functools import cache

import torch

from quire.errors import UnsupportedError
from quire.jit import host_target
from quire.jit.gpu import cuda_target


@cache
def on_cuda(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU; cached, because device.type creates a string in each call."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream of a GPU, 0 for the default one; 0 for the host."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if on_cuda(device) else 0


def target_of(device: torch.device, *, matrix_unit: bool = False) -> str:
    """ "sm90a" for a Hopper GPU, "x86-64-v4" for a host with AVX-512, ...

    `matrix_unit`: for code that multiplies matrices, for which some CPUs have special instructions.
    """
    if device.type == "cuda":
        return cuda_target(device.index or 0)
    if device.type == "cpu":
        return host_target(matrix_unit=matrix_unit)
    raise UnsupportedError(f"device: expected cpu or cuda, got {device}.")


@cache
def _num_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def max_ctas(device: torch.device, min_ctas: int) -> int:
    """CTAs that run at the same time: SMs times CTAs an SM, or host threads."""
    return _num_sms(device.index or 0) * min_ctas if device.type == "cuda" else torch.get_num_threads()
