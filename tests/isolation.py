"""Tests in processes apart: a crash or a hang fails one test and says which, instead of ending the run.

A server process imports torch and Quire once, before either has started a thread, and forks for each test, or for
several. It also imports what torch's tracers import at their first use, which takes over a second.
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
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

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


def _make(sender: Connection, crash_log: str, module: str, name: str, calls: list[tuple[Any, ...]]) -> None:
    with open(crash_log, "w") as log:  # noqa: PTH123  # faulthandler wants a descriptor that stays open
        faulthandler.enable(log)
        test = getattr(importlib.import_module(module), name).__wrapped__
        for call in calls:
            torch.manual_seed(0)
            try:
                test(*call)
            except BaseException:
                sender.send(traceback.format_exc())
            else:
                sender.send("")
        os._exit(0)  # without waiting for what libraries do at exit, which is no test's subject


def _failures(test: Callable[..., None], calls: list[tuple[Any, ...]], seconds: float) -> list[str]:
    """What went wrong in each call, or "". They share a process; behind a crash or a hang another one goes on."""
    failures: list[str] = []
    while len(failures) < len(calls):
        receiver, sender = SERVER.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
            given = (sender, log.name, test.__module__, test.__name__, calls[len(failures) :])
            child, lives = SERVER.Process(target=_make, args=given), True
            child.start()
            sender.close()
            while lives and len(failures) < len(calls):
                try:
                    lives = waits(receiver, child.pid, seconds)
                    failures.append(receiver.recv() if lives else f"the process took over {seconds:.0f} s")
                except EOFError:
                    lives = False
                    child.join()
                    failures.append(f"the process {how_it_ended(child.exitcode)}\n{log.read()}")
            child.kill()
            child.join()
    return failures


def isolated(
    seconds: float = 60.0, together: Iterable[Any] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test of plain arguments in a process of its own, which fails if it takes longer than `seconds`.

    together: all values of the test's only argument. They share a process, because a fork of one that has imported
    torch takes longer than a small test; each still fails or passes by itself.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        known: dict[Any, str] = {}

        @functools.wraps(test)
        def in_a_child(*args: Any, **kwargs: Any) -> None:
            start_server()
            call = (*args, *kwargs.values())
            if not known and together:
                known.update(zip(together, _failures(test, [(value,) for value in together], seconds), strict=True))
            failure = known[call[0]] if together else _failures(test, [call], seconds)[0]
            if failure:
                pytest.fail(failure, pytrace=False)

        return in_a_child

    return decorate
