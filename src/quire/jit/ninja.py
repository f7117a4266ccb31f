"""Runs one build.ninja within a time limit, measures its peak memory, and leaves no compiler behind.

The supervisor is a dozen lines of `sh` that hold the read end of a pipe. When this process dies, or closes the pipe at
the time limit, the supervisor sends SIGTERM to ninja and its compilers, and SIGKILL a second later. A `preexec_fn` with
PR_SET_PDEATHSIG would reach only ninja, and would run Python in the fork of a process with threads.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quire import config
from quire.errors import CompileError

#: Much longer than any compile, and shorter than other processes wait for this one (lock.PATIENCE_SECONDS).
TIME_LIMIT_SECONDS = 600.0

# All processes of a build are in the supervisor's group. `kill -0` fails once the shell has reaped ninja.
_SUPERVISOR = """
exec 3<&0 </dev/null
"$@" 3<&- &
build=$!
trap 'for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 $build || break; sleep 0.1; done; kill -KILL 0' TERM
( read -r _ <&3; kill -TERM 0 ) &
watch=$!
wait "$build"
status=$?
kill -KILL "$watch"
wait "$watch" 2>/dev/null
exit "$status"
"""


_running: set[subprocess.Popen[bytes]] = set()  #: the supervisors of this process


def stop_compilers() -> None:
    """End every build of this process, by closing the pipes of their supervisors."""
    for process in tuple(_running):
        if process.stdin is not None:
            process.stdin.close()


class Run(NamedTuple):
    """How a run of ninja ended."""

    status: int  #: exit status, 0 on success
    log: str  #: the compiler's output, then ninja's if it failed
    seconds: float
    peak_bytes: int | None  #: resident set of the largest process of the build; None if it is below our own


def find_ninja() -> str:
    """The ninja of the Python package, else the one on PATH; CompileError if there is none."""
    directories = [config.search_path()]
    with suppress(ImportError):  # distributions may package ninja without its Python module
        from ninja import BIN_DIR

        directories.insert(0, str(BIN_DIR))
    for directory in directories:
        if (found := shutil.which("ninja", path=directory)) is not None:
            return found
    raise CompileError("no ninja was found, neither the Python package nor on PATH: `pip install ninja`")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor and its processes; the supervisor has a moment to end the compilers first."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None:
        return
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes]) -> resource.struct_rusage:
    """Wait for the supervisor; at the time limit, close its pipe, so that it ends the build."""
    assert process.stdin is not None
    limit = threading.Timer(TIME_LIMIT_SECONDS, process.stdin.close)
    limit.daemon = True
    limit.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        limit.cancel()
        _end(process)
    return usage


def _log(staging: Path, *, failed: bool, stopped: bool) -> str:
    compiler, ninja = staging / "build.log", staging / "ninja.log"
    log = f"error: stopped at the time limit of {TIME_LIMIT_SECONDS:g} s\n" if stopped else ""
    log += compiler.read_text(errors="replace") if compiler.exists() else ""
    return log + (ninja.read_text(errors="replace") if failed else "")


def run_ninja(staging: Path) -> Run:
    """Build what `staging/build.ninja` describes. A failing compiler is a Run, not an exception."""
    return run(staging, [find_ninja(), "-j1"])


def run(staging: Path, words: list[str]) -> Run:
    """Run a command line in `staging` as `run_ninja` runs ninja: supervised, within the time limit."""
    (staging / "tmp").mkdir(exist_ok=True)
    command = ["/bin/sh", "-c", _SUPERVISOR, "quire-build", *words]
    start = time.monotonic()
    with (staging / "ninja.log").open("wb") as output:
        environment = config.child_environment(TMPDIR="tmp")  # below `cwd`
        process = subprocess.Popen(
            command, cwd=staging, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        try:
            usage = _wait(process)
        finally:
            _running.discard(process)
    seconds, failed = time.monotonic() - start, process.returncode != 0
    # A forked process starts with its parent's peak, so only a peak above ours is the build's.
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = usage.ru_maxrss * 1024 if usage.ru_maxrss > ours else None
    log = _log(staging, failed=failed, stopped=failed and seconds >= TIME_LIMIT_SECONDS)
    return Run(process.returncode, log, seconds, peak)
