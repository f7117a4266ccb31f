"""This machine's processor and memory, read from /proc: which host targets run here, how many compilers fit."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from quire.errors import ValidationError
from quire.jit import config

#: What an x86-64 microarchitecture level adds, in the names of /proc/cpuinfo (psABI; lzcnt is abm there).
_LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "x86-64-v4-bf16": frozenset({"avx512_bf16"}),
    "x86-64-v4-amx": frozenset({"amx_tile", "amx_bf16"}),
}

#: Targets with instructions that multiply bf16, and the targets of code that does not use these instructions.
_WITHOUT_MATRIX_UNIT = {"x86-64-v4-amx": "x86-64-v4", "x86-64-v4-bf16": "x86-64-v4"}

#: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): its number on x86-64, and its arguments.
_REQUEST_TILES = (158, 0x1023, 18)

#: Bytes that a compile is assumed to need if none was measured, and at least.
_BYTES_PER_JOB, _LEAST_PER_JOB = 1 << 30, 1 << 27


def _cpuinfo() -> Iterator[tuple[str, str]]:
    """The lines of /proc/cpuinfo, of all processors."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


@cache
def features() -> frozenset[str]:
    """The instruction set extensions of processor 0, in /proc/cpuinfo's names; empty if that file has none."""
    lists = (value for name, value in _cpuinfo() if name in ("flags", "Features"))
    return frozenset(next(lists, "").split())


@cache
def fingerprint() -> str:
    """A digest of the processor's model and extensions, on which `-march=native` depends: part of native requests."""
    identifying = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part", "CPU variant")
    model = (f"{name}={value}" for name, value in _cpuinfo() if name in identifying)
    parts = {platform.machine(), *features(), *model}
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def supports(target: str) -> bool:
    """Whether this processor runs artifacts of the host target `target`. Entries of "native" name their processor."""
    machine = platform.machine()
    if target == "native":
        return "amx_tile" not in features() or may_use_tiles()
    if target == "aarch64":
        return machine in ("aarch64", "arm64")
    if machine not in ("x86_64", "AMD64") or target not in _LEVELS:
        return False
    needed = frozenset[str]().union(*(need for level, need in _LEVELS.items() if _includes(target, level)))
    return needed <= features() and ("amx_tile" not in needed or may_use_tiles())


def _includes(target: str, level: str) -> bool:
    """Whether a processor that runs `target` has all of `level`."""
    return level == target or level <= without_matrix_unit(target)


@cache
def may_use_tiles() -> bool:
    """Whether Linux lets this process use AMX: requested once, for all of its threads. A sandbox may refuse."""
    return platform.system() == "Linux" and ctypes.CDLL(None).syscall(*map(ctypes.c_long, _REQUEST_TILES)) == 0


def host_target(*, matrix_unit: bool = False) -> str:
    """The target of host code: QUIRE_CPU_TARGET, or the best portable one of this machine.

    `matrix_unit`: the code uses the matrix unit. Other code is the same with and without one.
    """
    asked = config.cpu_target()
    if asked is not None and not supports(asked):
        raise ValidationError(
            f"QUIRE_CPU_TARGET: this processor does not run {asked!r}; expected {_best_target()} or native."
        )
    target = asked or _best_target()
    return target if matrix_unit else without_matrix_unit(target)


def without_matrix_unit(target: str) -> str:
    """The target, on the same processor, of code that does not use the matrix unit."""
    return _WITHOUT_MATRIX_UNIT.get(target, target)


@cache
def _best_target() -> str:
    """x86-64-v4-amx, x86-64-v4-bf16, x86-64-v4, x86-64-v3 or aarch64; "native" if the processor runs none of them."""
    portable = ("x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "aarch64")
    return next((target for target in portable if supports(target)), "native")


def available_bytes() -> int:
    """Bytes of memory that this process may still use, by the machine and by its control group."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if not (Path(limit).exists() and Path(used).exists()):
            continue
        allowed = Path(limit).read_text().strip()
        if allowed.isdigit():
            reclaimable = _inactive_files(Path(limit).with_name("memory.stat"))
            available = min(available, int(allowed) - int(Path(used).read_text()) + reclaimable)
    return available


def _inactive_files(path: Path) -> int:
    """Bytes of file cache in a control group's usage, which the kernel frees when memory is short."""
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _processors() -> int:
    """Processors that this process may use: its affinity, or fewer if its control group has a quota."""
    count = len(os.sched_getaffinity(0))
    for file in (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")):
        if not file.exists():
            continue
        words = file.read_text().split()
        if len(words) == 1 and (period := file.with_name("cpu.cfs_period_us")).exists():
            words.append(period.read_text().strip())
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            count = min(count, -(-int(words[0]) // int(words[1])))
    return count


def default_jobs(peak_bytes: int | None = None) -> int:
    """How many compilers may run at once: one for each processor, or fewer if memory is short.

    `peak_bytes`: peak memory of the largest compile so far, or None. Half as much again is added as a margin.
    """
    each = _BYTES_PER_JOB if peak_bytes is None else max(peak_bytes * 3 // 2, _LEAST_PER_JOB)
    return max(1, min(_processors(), available_bytes() // each))
