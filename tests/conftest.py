"""What every test runs on: the CPU always, and each GPU backend where there is a GPU.

A test that asks for `dtype` (with `device` and `backend`) runs once per number type that the backend takes; one that
asks for `device` alone runs once per device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

#: What the suite compiles stays here, in the checkout, so that a second run finds it; `make clean` empties it. Entries are
#: named by all that they were made from: one of an older run never stands in for changed code. Subprocesses inherit it.
CACHE = Path(__file__).resolve().parent.parent / "build" / "tests"
os.environ["QUIRE_CACHE_DIR"] = str(CACHE)
for name in ("QUIRE_JIT", "QUIRE_RECORD"):  # those of the user's session are not the suite's
    os.environ.pop(name, None)


@dataclass(frozen=True)
class Target:
    """A backend, where it runs and what it computes in."""

    device: str
    backend: str
    dtypes: tuple[torch.dtype, ...]


CPU = Target("cpu", "cpu", (torch.float32, torch.float16, torch.bfloat16))

#: Backends and the oldest GPU that runs them. Add one here and the whole suite runs on it.
CUDA_BACKENDS = {"decode": (8, 0), "fa2": (8, 0), "fa3": (9, 0), "auto": (8, 0)}

#: Limits that a backend has and others have not, in its own words: cases beyond them are skipped.
LIMITS = {
    "decode": r"attention_decode +(\d+ rows \(qo_len \* group_size\) are more than|rows differ between requests)",
}

#: The tests that have cases beyond the limits of a backend. In any other test a refusal is a failure.
BEYOND_LIMITS: dict[str, frozenset[str]] = {"decode": frozenset()}


def targets() -> list[Target]:
    """The backends that this machine can run."""
    if not torch.cuda.is_available():
        return [CPU]
    capability = torch.cuda.get_device_capability()
    names = [
        name for name, oldest in CUDA_BACKENDS.items() if capability >= oldest and (name != "fa3" or capability[0] == 9)
    ]
    return [CPU, *(Target("cuda:0", name, (torch.float16, torch.bfloat16)) for name in names)]


def is_beyond_limits(backend: object, test: str, error: BaseException) -> bool:
    """Whether `error` says that a case of `test` is beyond what this backend takes, and was expected to say so."""
    known = isinstance(error, NotImplementedError) and test in BEYOND_LIMITS.get(str(backend), ())
    return known and re.search(LIMITS[str(backend)], str(error)) is not None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skips a case that is beyond its backend's limits: decide(), which the call went through, knows them."""
    try:
        return (yield)
    except NotImplementedError as error:
        backend = pyfuncitem.callspec.params.get("backend") if hasattr(pyfuncitem, "callspec") else None
        if is_beyond_limits(backend, pyfuncitem.originalname, error):
            pytest.skip(f"backend={backend}: {str(error).splitlines()[1].strip()}")
        raise


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
