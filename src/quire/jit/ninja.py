"""Run one build.ninja under supervision: time, peak memory, and no compiler left behind when we die.

The supervisor is a dozen lines of `sh` that hold the read end of a pipe. When this process dies in whatever way, the
kernel closes the pipe and the supervisor ends ninja, which ends its compilers. A `preexec_fn` with PR_SET_PDEATHSIG
would reach ninja only, and would run Python in the fork of a process full of threads.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from quire import config
from quire.errors import CompileError

__all__ = ["Outcome", "find_ninja", "run_ninja"]

_SUPERVISOR = """
exec 3<&0 </dev/null
"$@" &
build=$!
( read -r _ <&3; kill -TERM "$build" ) 2>/dev/null &
watch=$!
wait "$build"
status=$?
kill "$watch" 2>/dev/null
exit "$status"
"""


@dataclass(frozen=True)
class Outcome:
    """How a build ended."""

    status: int  #: 0, or why not
    log: str  #: what the compiler said, then what ninja said if it failed
    seconds: float
    peak_bytes: int | None  #: resident set of the largest process of the build, where it can be told from our own


def find_ninja() -> str:
    """The ninja of the Python package, else the one on PATH; CompileError if there is none."""
    try:
        from ninja import BIN_DIR
    except ImportError:  # a distribution may split it off: PATH is as good
        candidates = []
    else:
        candidates = [shutil.which("ninja", path=str(BIN_DIR))]
    candidates.append(shutil.which("ninja", path=config.search_path()))
    found = next((path for path in candidates if path is not None), None)
    if found is None:
        raise CompileError("no ninja was found, neither the Python package nor on PATH: `pip install ninja`")
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor and all it started; it is given a moment to take its compilers along."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None:
        return
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_ninja(staging: Path) -> Outcome:
    """Build what `staging/build.ninja` describes. A failing compiler is an Outcome, not an exception."""
    (staging / "tmp").mkdir(exist_ok=True)
    command = ["/bin/sh", "-c", _SUPERVISOR, "quire-build", find_ninja(), "-j1"]
    start = time.monotonic()
    with (staging / "ninja.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=staging,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=config.child_environment(TMPDIR=str(staging / "tmp")),
            start_new_session=True,
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            _end(process)
    said = staging / "build.log"
    log = said.read_text(errors="replace") if said.exists() else ""
    if process.returncode:
        log += (staging / "ninja.log").read_text(errors="replace")
    # A new process starts with its parent's peak until it executes, so only what exceeds ours says something.
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = usage.ru_maxrss * 1024 if usage.ru_maxrss > ours else None
    return Outcome(process.returncode, log, time.monotonic() - start, peak)
