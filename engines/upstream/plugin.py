"""A pytest plugin for other libraries' tests: samples cases, maps "cuda" to the CPU if asked, and says what came of each case.

Its settings are in the environment, because pytest-xdist's workers have no other: UPSTREAM_SAMPLE (cases a function), UPSTREAM_SEED,
UPSTREAM_LIMIT (seconds a case), UPSTREAM_DEVICE, UPSTREAM_SUITE, UPSTREAM_RESULTS (the file).
"""

import hashlib
import json
import os
import random
import signal
import types
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

SAMPLE, SEED, LIMIT = (int(os.environ.get(f"UPSTREAM_{name}", "0")) for name in ("SAMPLE", "SEED", "LIMIT"))
ON_CPU = os.environ.get("UPSTREAM_DEVICE") == "cpu"
PRETENDS = ON_CPU and os.environ.get("UPSTREAM_SUITE") != "flex"  # that there is a GPU: torch's tests run on CPUs
if os.environ.get("UPSTREAM_SUITE") == "flash_attn":
    torch.set_grad_enabled(False)  # Quire computes forwards; gradients are zeros on both sides
COUNTS = {}  # file::function -> cases collected


def pytest_configure(config):
    global IS_WORKER
    IS_WORKER = hasattr(config, "workerinput")


def is_outside(name):
    """4-bit keys and values: Quire has no kernels for them yet, so that their cases are counted but not run."""
    return "nvfp4" in name


def order(nodeid):
    """A number from the seed and the case's name: the same in all workers."""
    return hashlib.sha256(f"{SEED} {nodeid}".encode()).digest()


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Keeps a sample of a function's cases. Items are made of these alone: pytest takes a minute for 260,000."""
    cases = metafunc._calls
    name = metafunc.definition.nodeid
    COUNTS[name] = max(len(cases), 1)
    if SAMPLE and len(cases) > SAMPLE:
        cases = random.Random(f"{SEED} {name}").sample(cases, min(len(cases), 8 * SAMPLE))
        metafunc._calls = [case for case in cases if not is_outside(case.id)][:SAMPLE]


def pytest_collection_modifyitems(config, items):
    """Cases in an order of their own, so that a run that is cut off is a sample too; compilers of graphs take longest."""
    items[:] = [item for item in items if not is_outside(item.name)]
    items.sort(key=lambda item: ("torch_compile" not in item.name, order(item.nodeid)))
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        write(counts=COUNTS)


def pytest_runtest_logreport(report):
    """A line in the file at once: a run that is cut off leaves what it had."""
    if IS_WORKER:
        return
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        write(
            case=dict(report.user_properties).get("case", report.nodeid),
            outcome=report.outcome,
            reason=reason(report),
            seconds=round(report.duration, 3),
        )


def write(**line):
    with Path(os.environ["UPSTREAM_RESULTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def reason(report):
    """The last line of what a case raised, or why it was skipped."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash else str(report.longrepr)[-2000:]


class TooLong(Exception):
    """A case that took more than the limit."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    def stop(*_):
        raise TooLong(f"more than {LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        if not ON_CPU:
            return (yield)
        with OnCpu():
            return (yield)
    finally:
        signal.alarm(0)


def on_cpu(value):
    """The CPU for any CUDA device."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return "cpu" if "cuda" in str(value) else value
    return value


class OnCpu(TorchFunctionMode):
    """CUDA devices and pinned memory mean the CPU."""

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], "cpu", *args[2:])
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(on_cpu, args), **kwargs)


if PRETENDS:
    import torch._dynamo  # which looks at torch's functions as they are imported

    hopper = types.SimpleNamespace(
        multi_processor_count=132, name="CPU", major=9, minor=0, total_memory=2**36, shared_memory_per_block_optin=2**18
    )
    torch.cuda.get_device_properties = lambda *_: hopper
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = torch.cuda.empty_cache = torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda *_: (
        None
    )
    torch.cuda.memory_reserved = torch.cuda.current_device = lambda *_: 0

    class CpuGenerator(torch.Generator):
        """Of random numbers, for any device."""

        def __new__(cls, device="cpu"):
            return super().__new__(cls)

    torch.Generator = CpuGenerator
