"""The backends that the suite runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ptx.impersonated import capability


def pin(name: str) -> str:
    """What `backend=` takes for the kernel of this name and no other; "auto" pins none."""
    return name if name == "auto" else f"quire:{name}"


@dataclass(frozen=True)
class Target:
    """A backend, where it runs and what it computes in."""

    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]


CPU = Target("cpu", pin("cpu"), (torch.float32, torch.float16, torch.bfloat16))

#: Backends and the oldest GPU that runs them. Add one here and the whole suite runs on it.
CUDA_BACKENDS = {"decode": (8, 0), "fa2": (8, 0), "fa3": (9, 0), "auto": (8, 0)}

#: Backends that take too few problems for the whole suite, and the files of their own.
APART = {"wide": "test_head_dims.py", "fp8": "test_fp8_products.py"}


def targets(backends: Mapping[str, tuple[int, int]] = CUDA_BACKENDS) -> list[Target]:
    """The backends that this machine can run, of those on GPUs `backends`."""
    if not torch.cuda.is_available():
        return [CPU]
    present = capability()
    of_hopper = (9, 0)  # which is no lower limit: kernels for it run on no newer GPU
    names = [name for name, oldest in backends.items() if present >= oldest and (oldest < of_hopper or present[0] == 9)]
    return [CPU, *(Target("cuda:0", pin(name), (torch.float16, torch.bfloat16)) for name in names)]
