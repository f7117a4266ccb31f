"""One GPU taken for another: Quire plans for it, compiles PTX of its level, and the driver translates that for the GPU.

What this shows: the other GPU's tiles, splits and limits of shared memory, and code under conditions of its level, give
right results. What it does not show: that GPU's machine code, its speed, and how many CTAs an SM of it holds. The
number of SMs remains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ptx.artifacts import compiled_to_ptx
from quire.engine import rotate
from quire.engine.device import max_ctas
from quire.jit import machine
from quire.jit.toolchain import find_toolchain
from quire.kernels import Decision


@dataclass(frozen=True)
class Gpu:
    """A GPU that another one can be taken for."""

    capability: tuple[int, int]
    target: str
    level: str  #: of the PTX: of the target, or the highest one below it whose conditions in the code are the target's
    smem_of_cta: int  #: bytes of shared memory that a CTA may have
    smem_of_sm: int

    @property
    def waits_for_predecessors(self) -> bool:
        """Whether code of the level may be launched before its predecessor ends."""
        return int(self.level) >= 90


_KB = 1024
#: sm_90 loads no PTX above its level. sm_120's shared memory is that of sm_86 and sm_89, by which kernels choose code.
GPUS = {
    "8.0": Gpu((8, 0), "sm80", "80", 163 * _KB, 164 * _KB),
    "8.6": Gpu((8, 6), "sm86", "86", 99 * _KB, 100 * _KB),
    "8.9": Gpu((8, 9), "sm89", "89", 99 * _KB, 100 * _KB),
    "12.0": Gpu((12, 0), "sm120a", "89", 99 * _KB, 100 * _KB),
}
_taken_for: list[Gpu] = []


def capability(device: object = None) -> tuple[int, int]:
    """The capability of a GPU, or of the one that it is taken for."""
    if _taken_for:
        return _taken_for[-1].capability
    return torch.cuda.get_device_capability(*(() if device is None else (device,)))


def refusal(name: str) -> str | None:
    """Why this machine cannot play the GPU; None if it can."""
    gpu = GPUS[name]
    if not torch.cuda.is_available():
        return "expected an NVIDIA GPU"
    if find_toolchain(gpu.target) is None:
        return "neither nvcc nor libnvrtc was found"
    major, minor = torch.cuda.get_device_capability()
    if (here := 10 * major + minor) < int(gpu.level):
        return f"expected a GPU from sm_{gpu.level} on, which loads PTX of this level, got sm_{here}"
    return None


@contextmanager
def impersonated(name: str) -> Iterator[None]:
    """In here, but not in processes that start here, this machine's GPUs are taken for that of "8.6", or others."""
    gpu, resident = GPUS[name], rotate._resident

    def fewer(device: torch.device, threads: int, smem: int) -> int:
        most = max_ctas(device, max(1, gpu.smem_of_sm // (smem + _KB)))
        return min(resident(device, threads, smem), most)

    with compiled_to_ptx({gpu.target: gpu.level}) as patch:
        patch.setattr(machine, "capability", lambda _: gpu.capability)
        patch.setattr(machine.Driver, "max_dynamic_smem", lambda *_: gpu.smem_of_cta)
        patch.setattr(rotate, "_resident", fewer)
        if not gpu.waits_for_predecessors:
            patch.setattr(Decision, "may_use_pdl", False)
        _taken_for.append(gpu)
        try:
            yield
        finally:
            _taken_for.pop()


#: Kernels of sm_90a alone, which tests may name; and what a kernel refuses for want of space.
_OF_HOPPER = {"fa3", "fa3_fp8", "mla_fa3", "mla_decode"}
_NO_SPACE = re.compile(r"attention_decode +heads of \d+ dims leave too few registers or shared memory on")


def is_of_another_gpu(error: BaseException) -> bool:
    """Whether a refusal of the kernel that a test names is one of the GPU that is played, and not of a Hopper."""
    asked = set(re.findall(r"^ +attention_(\w+)", str(error), re.MULTILINE))
    of_hopper = bool(asked) and asked <= _OF_HOPPER and "is not sm90a" in str(error)
    return bool(_taken_for) and (of_hopper or (asked == {"decode"} and _NO_SPACE.search(str(error)) is not None))
