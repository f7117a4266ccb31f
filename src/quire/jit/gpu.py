"""The compilation targets of this machine's GPUs, from the driver alone: no CUDA context, no torch."""

from __future__ import annotations

from functools import cache

from quire.errors import UnsupportedError
from quire.jit import driver
from quire.jit.toolchain import CUDA_TARGETS

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def present_targets() -> tuple[str, ...]:
    """The targets of this machine's GPUs, each once."""
    if not driver.available():
        return ()
    return tuple(dict.fromkeys(cuda_target(index) for index in range(driver.driver().device_count())))


@cache
def cuda_target(index: int) -> str:
    """The most specific target that runs on GPU `index`: its own, else the nearest older one of its generation."""
    api = driver.driver()
    major, minor = (api.attribute(index, which) for which in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR))
    for name in (f"sm{major}{minor}a", *(f"sm{major}{m}" for m in range(minor, -1, -1))):
        if name in CUDA_TARGETS:
            return name
    known = ", ".join(CUDA_TARGETS)
    raise UnsupportedError(f"device: cuda:{index} has compute capability {major}.{minor}; known are {known}.")
