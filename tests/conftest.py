"""What every test runs on: the CPU always, and each GPU backend where there is a GPU.

A test that asks for `dtype` (with `device` and `backend`) runs once per number type that the backend takes; one that
asks for `device` alone runs once per device.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Target:
    """A backend, where it runs and what it computes in."""

    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]


CPU = Target("cpu", "cpu", (torch.float32, torch.float16, torch.bfloat16))

#: Backends and the oldest GPU that runs them. Add one here and the whole suite runs on it.
CUDA_BACKENDS = {"fa2": (8, 0), "fa3": (9, 0), "auto": (8, 0)}


def targets() -> list[Target]:
    """The backends that this machine can run."""
    if not torch.cuda.is_available():
        return [CPU]
    capability = torch.cuda.get_device_capability()
    names = [
        name for name, oldest in CUDA_BACKENDS.items() if capability >= oldest and (name != "fa3" or capability[0] == 9)
    ]
    return [CPU, *(Target("cuda:0", name, (torch.float16, torch.bfloat16)) for name in names)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fills in `device`, `backend` and `dtype`."""
    names = [n for n in ("device", "backend", "dtype") if n in metafunc.fixturenames]
    if not names:
        return
    rows: dict[str, tuple[object, ...]] = {}
    for target in targets():
        for dtype in target.dtypes:
            values = {"device": target.device, "backend": target.backend, "dtype": dtype}
            row = tuple(values[n] for n in names)
            rows["-".join(str(v).removeprefix("torch.") for v in row)] = row
    params = []
    for slug, row in rows.items():
        marks = [pytest.mark.gpu] if any(str(v).startswith("cuda") or v in CUDA_BACKENDS for v in row) else []
        params.append(pytest.param(*row, id=slug, marks=marks))
    metafunc.parametrize(names, params)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same numbers in every run, whatever the order of the tests."""
    torch.manual_seed(0)
