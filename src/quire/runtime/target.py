"""From a device to what code is compiled for."""

from __future__ import annotations

from functools import cache

import torch

from quire.errors import UnsupportedError
from quire.jit import driver, host_target, supported_cuda_targets

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@cache
def on_cuda(device: torch.device) -> bool:
    """Whether it is a GPU of NVIDIA's: device.type makes a string each time it is asked."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream of a GPU, 0 for the default one; 0 for the host."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if on_cuda(device) else 0


def target_of(device: torch.device) -> str:
    """ "sm90a" for a Hopper GPU, "x86-64-v4" for a host with AVX-512, ..."""
    if device.type == "cuda":
        return _cuda_target(device.index or 0)
    if device.type == "cpu":
        return host_target()
    raise UnsupportedError(f"device: expected cpu or cuda, got {device}.")


def present_targets() -> tuple[str, ...]:
    """What the GPUs of this machine run, each once. Asks the driver, so no CUDA context is made."""
    if not driver.available():
        return ()
    return tuple(dict.fromkeys(_cuda_target(index) for index in range(driver.driver().device_count())))


@cache
def _cuda_target(index: int) -> str:
    """The most specific target that runs on GPU `index`: its own, else the nearest older one of its generation."""
    api = driver.driver()
    major, minor = (api.attribute(index, which) for which in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR))
    known = supported_cuda_targets()
    for name in (f"sm{major}{minor}a", *(f"sm{major}{m}" for m in range(minor, -1, -1))):
        if name in known:
            return name
    raise UnsupportedError(
        f"device: cuda:{index} has compute capability {major}.{minor}; known are {', '.join(known)}."
    )


@cache
@cache
def has_dependent_launch(target: str) -> bool:
    """Whether a kernel can wait for its predecessor itself: GPUs from sm_90 on."""
    return target.startswith("sm") and int(target[2:].rstrip("af")) >= 90


@cache
def _num_sms(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def max_ctas(device: torch.device, min_ctas: int) -> int:
    """CTAs that run at the same time: SMs times CTAs an SM, or host threads."""
    return _num_sms(device.index or 0) * min_ctas if device.type == "cuda" else torch.get_num_threads()
