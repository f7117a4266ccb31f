"""Turn a failed build's log into one error: its first error line, what kind of failure it is, what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from quire.errors import CompileError

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
