"""From a torch device to what code is compiled for."""

from __future__ import annotations

from functools import cache

import torch

from quire.errors import UnsupportedError
from quire.jit import host_target, supported_cuda_targets

__all__ = ["max_ctas", "target_of"]


def target_of(device: torch.device) -> str:
    """ "sm90a" for a Hopper GPU, "x86-64-v4" for a host with AVX-512, ..."""
    return cuda_target(device.index or 0) if device.type == "cuda" else _host(device)


def _host(device: torch.device) -> str:
    if device.type != "cpu":
        raise UnsupportedError(f"device: expected cpu or cuda, got {device}.")
    return host_target()


@cache
def cuda_target(index: int) -> str:
    """The most specific target that runs on GPU `index`: its own, else the nearest older one of its generation."""
    major, minor = torch.cuda.get_device_capability(index)
    known = supported_cuda_targets()
    for name in (f"sm{major}{minor}a", *(f"sm{major}{m}" for m in range(minor, -1, -1))):
        if name in known:
            return name
    raise UnsupportedError(
        f"device: cuda:{index} has compute capability {major}.{minor}; known are {', '.join(known)}."
    )


@cache
def _num_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def max_ctas(device: torch.device, min_ctas: int) -> int:
    """CTAs that run at the same time: SMs times CTAs an SM, or host threads."""
    return _num_sms(device.index or 0) * min_ctas if device.type == "cuda" else torch.get_num_threads()
