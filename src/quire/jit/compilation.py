"""Running compilers: a compile, by ninja, whose log is read, and the question for a version, whose answer is kept.

The supervisor is a dozen lines of `sh` that hold the read end of a pipe. When this process dies, or closes the pipe
at the time limit, the supervisor sends SIGTERM to ninja and its compilers, and SIGKILL a second later. A `preexec_fn`
with PR_SET_PDEATHSIG would reach only ninja, and would run Python in the fork of a process with threads.

A hit must start no process, yet the version of the compiler is part of an entry's name. The compiler's answer is
therefore kept in the cache (`compilers.json`), with the path, size and time of each file of the compiler.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from quire.errors import CacheError, CompileError
from quire.jit import config, events, trust

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


_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
#: ptxas reports lost performance (serialised wgmma, ignored setmaxnreg) as "info" lines with these codes.
_NOTABLE = re.compile(r"\bwarning\b|\bC75\d\d\b")


@dataclass(frozen=True)
class Report:
    """The figures of one artifact; None where the compiler does not say."""

    registers: int | None = None  #: per thread, the maximum over all functions
    spill_stores: int | None = None  #: bytes per thread
    spill_loads: int | None = None  #: bytes per thread
    stack: int | None = None  #: bytes of stack frame per thread
    smem: int | None = None  #: bytes of static shared memory
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> int | None:
        """Bytes of spill stores and loads together."""
        if self.spill_stores is None or self.spill_loads is None:
            return None
        return self.spill_stores + self.spill_loads


def _warnings(log: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.strip() for line in log.splitlines() if _NOTABLE.search(line)))


def parse_nvcc(log: str) -> Report:
    """Read the output of `nvcc -Xptxas -v`."""
    frames = [tuple(map(int, match)) for match in _SPILL.findall(log)]
    registers = [int(count) for count in _REGISTERS.findall(log)]
    smem = [int(count) for count in _SMEM.findall(log)]
    return Report(
        registers=max(registers) if registers else None,
        stack=max(frame[0] for frame in frames) if frames else None,
        spill_stores=sum(frame[1] for frame in frames) if frames else None,
        spill_loads=sum(frame[2] for frame in frames) if frames else None,
        smem=max(smem, default=0) if registers else None,
        warnings=_warnings(log),
    )


def parse_gxx(log: str) -> Report:
    """Read the output of g++, which reports warnings only."""
    return Report(warnings=_warnings(log))


#: (kind, what the log says, what to do), most specific first.
_KINDS: tuple[tuple[str, str, str], ...] = (
    (
        "time limit",
        r"^error: stopped at the time limit",
        "Find out what the compiler waits for: a stopped process, a licence server, a lost network file system.",
    ),
    (
        "killed (most likely out of memory)",
        r"Killed signal|died due to signal 9|signal terminated program|\bKilled\b|code=137|out of memory|"
        r"virtual memory exhausted|cannot allocate memory",
        "Lower QUIRE_MAX_JOBS, raise the memory limit, or build elsewhere and copy the cache (QUIRE_CACHE_DIR).",
    ),
    (
        "crashed compiler",
        r"internal compiler error|died due to signal|Segmentation fault|code=13[469]",
        "Try another compiler version (QUIRE_NVCC, QUIRE_CXX) and report the log.",
    ),
    (
        "full disk",
        r"No space left on device|Disk quota exceeded",
        "Free space, or move the cache with QUIRE_CACHE_DIR.",
    ),
    (
        "missing host compiler",
        r"Failed to preprocess host compiler|gcc: not found|cannot execute 'gcc'|gcc: No such file|"
        r"Cannot find compiler|cannot execute .cc1plus",
        "nvcc preprocesses with gcc: install g++ and have it on PATH.",
    ),
    (
        "unsupported host compiler",
        r"unsupported GNU version|unsupported clang version|#error -- unsupported",
        "Put a host compiler that this nvcc supports first on PATH, or update the toolkit.",
    ),
    (
        "bad architecture",
        r"Unsupported gpu architecture|not defined for option 'gpu-architecture'|Value 'sm_\w+' is not defined|"
        r"invalid value for --gpu-architecture|"
        r"bad value .* for .?-march|unknown value .* for .?-march|not supported on target|not supported on \.target",
        "Update the toolkit, or choose targets that it knows (QUIRE_CUDA_ARCH_LIST).",
    ),
    (
        "drifted parameters",
        r"its ctypes mirror has drifted",
        "The Python mirror and the C++ header differ: reinstall quire, or correct the mirror.",
    ),
    (
        "kernel and catalogue disagree",
        r"the catalogue and the kernel disagree",
        "The numbers in quire/kernels and those in the C++ header differ: reinstall quire, or correct either.",
    ),
    (
        "failed static assertion",
        r"static assertion failed|static_assert",
        "The kernel does not take this combination of constants.",
    ),
    (
        "missing header",
        r"fatal error: .*: No such file or directory|cannot open source file|could not open source file",
        "Only headers under include/quire and those shipped with the compiler are visible.",
    ),
    (
        "incomplete toolkit",
        r"cicc.*(?:not found|No such file)|ptxas.*(?:not found|No such file)|libdevice|nvvm.*No such file|"
        r"failed to open libnvrtc-builtins|libnvrtc cannot be loaded",
        "The toolkit is incomplete: install nvcc together with its nvvm part, or the whole wheel nvidia-cuda-nvrtc.",
    ),
    (
        "assembler error",
        r"ptxas (?:fatal|error)|Error: .*assembl|Assembler messages",
        "ptxas or the assembler refused the code: the instruction may need a newer toolkit.",
    ),
    (
        "linker error",
        r"ld returned|undefined reference|cannot find -l|cannot find crt",
        "Install the compiler's runtime libraries (libgomp, libc6-dev).",
    ),
    ("compiler not runnable", r"Permission denied|: not found|cannot execute", "Check the compiler's path and mode."),
)

_FIRST_ERROR = re.compile(r"\b(?:fatal )?error\b\s*:?|\bfatal\s*:|\berror\b", re.IGNORECASE)


_KILLED = re.compile(r"Killed signal|died due to signal 9|\bKilled\b|code=137|code=-9")


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a failed build, read from its log."""

    kind: str
    line: str  #: the first line that reports an error
    remedy: str
    was_killed: bool  #: another process killed the compiler: worth one more try, alone
    is_unknown: bool = False  #: no row of the table matches the log


def diagnose(log: str, status: int) -> Diagnosis:
    """Classify the log of a failed build; `status` is its exit status."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    first = next((line for line in lines if _FIRST_ERROR.search(line)), lines[0] if lines else "")
    shown = first or f"the compiler ended with status {status} and said nothing"
    text = log + (f"\ncode={status}" if status else "")
    unknown = ("error in the source" if first else "silent failure", "", "The full log has the context.")
    row = next((row for row in _KINDS if re.search(row[1], text)), unknown)
    was_killed = row is not _KINDS[0] and _KILLED.search(text) is not None  # not by the time limit
    return Diagnosis(row[0], shown, row[2], was_killed, is_unknown=row is unknown)


def full_disk(found: Diagnosis) -> Diagnosis:
    """The same failure, explained by the disk, which is known to be full."""
    kind, _, remedy = next(row for row in _KINDS if row[0] == "full disk")
    return replace(found, kind=kind, remedy=remedy, is_unknown=False)


def compile_error(slug: str, found: Diagnosis, command: str, log: Path) -> CompileError:
    """The error to raise for a failed build, at most eight lines."""
    return CompileError(
        f"{found.line}\n"
        f"  cause:   {found.kind}\n"
        f"  variant: {slug}\n"
        f"  to do:   {found.remedy}\n"
        f"  command: {command}\n"
        f"  log:     {log}"
    )


# --- what compilers answer -------------------------------------------------------------------------------------------

_LARGEST_MEMORY = 1 << 20  #: bytes; an answer takes a few hundred

Stamp: TypeAlias = list[list[Any]]  #: [path, size in bytes, time in ns] of each file


def stamp_of(files: list[str]) -> Stamp | None:
    """The present state of `files`, or None if one is missing."""
    stamp: Stamp = []
    for file in files:
        if not os.path.exists(file):  # noqa: PTH110 - runs on every hit; pathlib takes twice as long
            return None
        status = os.stat(file)  # noqa: PTH116 - as above
        stamp.append([os.path.realpath(file), status.st_size, status.st_mtime_ns])
    return stamp


def _is_answer(value: Any) -> bool:
    """Whether `value` is what `Memory.set` writes."""
    if not isinstance(value, dict) or not isinstance(value.get("version"), str):
        return False
    stamp = value.get("stamp")
    return isinstance(stamp, list) and all(isinstance(f, list) and f and isinstance(f[0], str) for f in stamp)


class Memory:
    """path of a compiler -> {"stamp", "version"}. A missing, damaged or read-only file only costs asking again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._answers: dict[str, dict[str, Any]] | None = None
        self._unsaved = False
        self._guard = threading.Lock()

    def _read(self) -> dict[str, dict[str, Any]]:
        if self._path is None:
            return {}
        try:
            with trust.directory(self._path.parent) as at:
                return self._parse(at, self._path)
        except (CacheError, OSError):  # the store reports what is wrong with its root
            return {}

    @staticmethod
    def _parse(at: int, path: Path) -> dict[str, dict[str, Any]]:
        try:
            read = json.loads(trust.read(at, path.name, _LARGEST_MEMORY))
            if not isinstance(read, dict):
                raise ValueError(f"expected an object, got a {type(read).__name__}")
        except FileNotFoundError:
            return {}
        except (CacheError, OSError, ValueError, RecursionError) as error:
            events.warn_once(f"ignored {path}, compilers are asked again: {error}")
            return {}
        return {path: answer for path, answer in read.items() if _is_answer(answer)}

    def _all(self) -> dict[str, dict[str, Any]]:
        if self._answers is None:
            self._answers = self._read()
        return self._answers

    def knows(self, path: str) -> bool:
        """Whether a compiler at this path was ever asked, even if its files have changed since."""
        with self._guard:
            return path in self._all()

    def version(self, path: str) -> str | None:
        """The version of the compiler at `path`, if none of its files has changed since it was asked."""
        with self._guard:
            answer = self._all().get(path)
        if answer is None:
            return None
        stamp: Stamp = answer["stamp"]
        files = [file[0] for file in stamp]
        if stamp_of([path]) != stamp[:1] or stamp_of(files) != stamp:
            return None
        return str(answer["version"])

    def set(self, path: str, stamp: Stamp, version: str) -> None:
        """Remember an answer in this process and, if the cache can be written, for later processes."""
        with self._guard:
            self._all()[path] = {"stamp": stamp, "version": version}
            self._unsaved = True
        self.save()

    def save(self) -> None:
        """Write new answers to the file, if its directory exists and can be written."""
        with self._guard:
            if not self._unsaved or self._path is None or not os.access(self._path.parent, os.W_OK):
                return
            self._answers = {**self._read(), **self._all()}  # other processes may have written
            try:
                with trust.directory(self._path.parent) as at:
                    trust.write(at, self._path.name, json.dumps(self._answers, indent=1, sort_keys=True).encode())
            except (CacheError, OSError) as error:
                events.warn_once(f"{self._path} cannot be written, so each process asks its compilers: {error}")
            self._unsaved = False


def ask(command: list[str]) -> list[str]:
    """The lines that a compiler answers with; CompileError if it fails or says nothing."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False,
            stdin=subprocess.DEVNULL, env=config.child_environment(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    lines = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode != 0 or not lines:
        first = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise CompileError(f"{' '.join(command)} failed with exit status {done.returncode}: {first[0]}")
    return lines
