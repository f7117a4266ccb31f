"""What every test runs on: the CPU always, and each GPU backend where there is a GPU.

A test that asks for `dtype` (with `device` and `backend`) runs once per number type that the backend takes; one that
asks for `device` alone runs once per device.

With `--as-gpu 8.6` a GPU is taken for one of that compute capability: see ptx/impersonated.py.

On the CPU, where each variant is a second of compiling, tests run with few combinations of their parameters: those that
covering.py leaves out count as deselected, and `--every-combination` runs them.
"""

from __future__ import annotations

import own_environment  # noqa: F401  # before torch is

# isort: split
import gc
import os
from collections.abc import Generator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path

import pytest
import torch
from hypothesis import reject

from covering import beyond_first, left_out, of_other_days
from durations import Durations
from limits import is_expected, limit
from ptx import impersonated
from targets import CUDA_BACKENDS, pin, targets

GPU_PINS = {pin(name) for name in CUDA_BACKENDS}


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skips what a backend refuses where that is expected (limits.py); elsewhere a refusal is a failure."""
    _draw_within_limits(pyfuncitem)
    try:
        return (yield)
    except NotImplementedError as error:
        if is_expected(error, pyfuncitem.originalname):
            pytest.skip(": ".join(limit(error) or ()))
        if impersonated.is_of_another_gpu(error):
            pytest.skip("names a kernel that the GPU that is played has not")
        raise


def _draw_within_limits(test: pytest.Function) -> None:
    """An example of hypothesis that its backend refuses is none: another one is drawn, and too few are a failure."""
    if not hasattr(test.obj, "hypothesis"):
        return
    examine = test.obj.hypothesis.inner_test

    @wraps(examine)
    def within_limits(*args: object, **kwargs: object) -> None:
        try:
            examine(*args, **kwargs)
        except NotImplementedError as error:
            if is_expected(error, test.originalname):
                reject()
            raise

    test.obj.hypothesis.inner_test = within_limits


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fills in `device`, `backend` and `dtype`. A module may have CUDA_BACKENDS of its own."""
    names = [n for n in ("device", "backend", "dtype") if n in metafunc.fixturenames]
    if not names:
        return
    rows: dict[str, tuple[object, ...]] = {}
    for target in targets(getattr(metafunc.module, "CUDA_BACKENDS", CUDA_BACKENDS)):
        for dtype in target.dtypes:
            values = {"device": target.device, "backend": target.backend, "dtype": dtype}
            row = tuple(values[n] for n in names)
            rows["-".join(str(v).removeprefix("torch.") for v in row)] = row
    params = []
    for slug, row in rows.items():
        on_gpu = any(str(v).startswith("cuda") or v in GPU_PINS for v in row)
        # On the CPU float16 is bfloat16 with another conversion.
        marks = [pytest.mark.gpu] if on_gpu else [pytest.mark.slow] if torch.float16 in row else []
        params.append(pytest.param(*row, id=slug, marks=marks))
    metafunc.parametrize(names, params)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The garbage collector passes over what is there when tests begin: torch, and thousands of tests. None goes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-combination", action="store_true", help="leave out no parameters on the CPU")
    parser.addoption("--durations-file", type=Path, help="where to write the seconds of each file and of each test")
    parser.addoption(
        "--as-gpu", choices=sorted(impersonated.GPUS), help="take this machine's GPUs for one of a compute capability"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Plays another GPU, before tests are collected; writes durations, but not in processes that share the tests."""
    name = config.getoption("as_gpu")
    if name is not None:
        if reason := impersonated.refusal(name):
            raise pytest.UsageError(f"--as-gpu {name}: {reason}")
        stack = ExitStack()
        stack.enter_context(impersonated.impersonated(name))
        config.add_cleanup(stack.close)
    path = config.getoption("durations_file")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(path))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what covering.py says, and marks what it says is slow."""
    every = config.getoption("every_combination")
    _leave_out(config, items, set() if every else left_out(items))
    for item in beyond_first(items):
        item.add_marker("slow")
    _leave_out(config, items, set() if every else of_other_days(items, int(os.environ["TESTS_DAY"])))


def _leave_out(config: pytest.Config, items: list[pytest.Item], left: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same numbers in every run, whatever the order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Generator[None, None, None]:
    """For modules whose matrices are smaller than what it costs to wake a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
