"""Tests in processes of their own: a crash or a hang fails one test and says which, instead of ending the run.

A server process imports torch and Quire once, before either has started a thread, and forks for each test. It also
imports what torch's tracers import at their first use, which takes over a second.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "quire", "pytest", "torch._dynamo", "torch._subclasses.fake_tensor", "torch.fx.experimental.proxy_tensor"]
)


def how_it_ended(exit_code: int | None) -> str:
    """An exit code in words; negative ones are signals."""
    if exit_code is None:
        return "is still running"
    return f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with status {exit_code}"


@functools.cache
def start_server() -> None:
    """Waits until the server has imported everything, so that this is no test's time."""
    process = SERVER.Process(target=os.getpid)
    process.start()
    process.join()


def waits(pipe: Connection, pid: int | None, seconds: float) -> bool:
    """Whether a message of a process comes: in time, or in six times that if others have the processors meanwhile."""
    began, used = time.monotonic(), _cpu_seconds(pid)
    while not pipe.poll(0.5):
        waited = time.monotonic() - began
        if waited > 6 * seconds or (waited > seconds and _cpu_seconds(pid) - used > seconds / 2):
            return False
    return True


def _cpu_seconds(pid: int | None) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _call(sender: Connection, crash_log: str, module: str, name: str, args: Any, kwargs: Any) -> None:
    with open(crash_log, "w") as log:  # noqa: PTH123  # faulthandler wants a descriptor that stays open
        faulthandler.enable(log)
        try:
            getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
        except BaseException:
            sender.send(traceback.format_exc())
        else:
            sender.send("")
        os._exit(0)  # without waiting for what libraries do at exit, which is no test's subject


def isolated(seconds: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test of plain arguments in a process of its own, which fails if it takes longer than `seconds`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_a_child(*args: Any, **kwargs: Any) -> None:
            start_server()
            receiver, sender = SERVER.Pipe(duplex=False)
            with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
                child = SERVER.Process(
                    target=_call, args=(sender, log.name, test.__module__, test.__name__, args, kwargs)
                )
                child.start()
                sender.close()
                try:
                    in_time = waits(receiver, child.pid, seconds)
                    failure = receiver.recv() if in_time else f"the process took over {seconds:.0f} s"
                except EOFError:
                    child.join()
                    failure = f"the process {how_it_ended(child.exitcode)}\n{log.read()}"
                child.kill()
                child.join()
            if failure:
                pytest.fail(failure, pytrace=False)

        return in_a_child

    return decorate
