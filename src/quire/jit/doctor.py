"""Finds what keeps this machine from compiling, caching and loading, and says what to do about it.

Each check is a function that yields findings. None compiles anything, writes anything or needs a GPU; compilers are
asked for their versions only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from quire.errors import QuireError
from quire.jit import config, machine, trust, unit
from quire.jit.compilation import Memory, find_ninja
from quire.jit.machine import CUDA_TARGETS
from quire.jit.store import Store
from quire.jit.toolchain import Toolchain, for_target

Status = Literal["ok", "note", "fault"]

_LEAST_SPACE = 64 << 20  #: bytes, for the staging directories of some compilers
_LEAST_MEMORY = 400 << 20  #: bytes, twice what a compile of one variant takes
_SOON = 30  #: days before a key expires
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    status: Status  #: note: a fault only for those who need the feature
    text: str
    fix: str = ""


def examine(store: Store, prebuilt: tuple[Store, ...] = ()) -> list[Finding]:
    """All findings, in the order in which a first call would run into them."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("variables", _variables),
        ("templates", _check_templates),
        ("driver", _check_driver),
        ("torch", _check_torch),
        ("g++", _check_gxx),
        ("nvcc", _check_nvcc),
        ("ninja", _check_ninja),
        ("memory", _check_memory),
        ("cache", lambda: _check_root(store)),
        ("entries", lambda: _check_entries(store, prebuilt)),
        ("keys", _check_keys),
        ("shared cache", _check_shared_cache),
    )
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings.extend(check())
        except (QuireError, OSError) as error:  # the check itself failed
            text = str(error).partition("\n")[0]
            if not any(finding.text == text for finding in findings):
                findings.append(Finding(name, "fault", text, "Correct what it names."))
    return findings


def _variables() -> Iterator[Finding]:
    readers = (
        config.jit_denied, config.cpu_target, config.log_level, config.max_jobs, config.arch_list, config.record_path,
        config.checks_pages, config.cache_root, config.toolchain, machine.host_target, config.system_cache,
        config.shared_cache_is_read_only,
        config.shared_cache_key, config.shared_cache_is_trusted_unsigned, config.trusted_keys, config.signing_key,
    )  # fmt: skip
    faults: dict[str, None] = {}
    for read in readers:
        try:
            read()
        except QuireError as error:
            faults[str(error)] = None
    yield from (Finding("variables", "fault", text, "Correct the variable or unset it.") for text in faults)
    for name in config.unknown_variables():
        close = get_close_matches(name, config.variables(), n=1, cutoff=0.8)
        fix = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(config.variables())}."
        yield Finding("variables", "fault", f"{name} is set, and nothing reads it", fix)
        faults[name] = None
    if not faults:
        yield Finding("variables", "ok", "every QUIRE_ variable that is set is understood")


def _check_templates() -> Iterator[Finding]:
    yield Finding("templates", "ok", str(unit.root()))


# --- the GPU ---------------------------------------------------------------------------------------------------------


def _check_driver() -> Iterator[Finding]:
    if machine.available():
        targets = ", ".join(machine.present_targets()) or "no GPU"
        yield Finding("driver", "ok", f"libcuda {machine.driver().version_text()}: {targets}")
    elif any(file.exists() for file in _GPU_FILES):
        fix = "Start the container with `--gpus all` (nvidia-container-toolkit), or install the driver's libcuda.so.1."
        yield Finding("driver", "fault", "there is a GPU, but its driver cannot be loaded or reports an error", fix)
    else:
        yield Finding(
            "driver", "note", "there is no NVIDIA GPU: the cpu backend runs, and CUDA variants can be compiled"
        )


def _check_torch() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "fault", "torch is not installed: only this command line works", "pip install torch")
        return
    if version.endswith("+cpu") and _wanted_targets():
        yield Finding("torch", "fault", f"torch {version} cannot use a GPU", "Install torch from its CUDA index.")
    else:
        yield Finding("torch", "ok", f"torch {version}")


def _wanted_targets() -> tuple[str, ...]:
    """The targets of this machine's GPUs."""
    return machine.present_targets()


# --- compilers -------------------------------------------------------------------------------------------------------


def _found(name: str, target: str) -> tuple[Toolchain | None, list[Finding]]:
    """The compiler of `target` and what is wrong with it."""
    kind = for_target(target)
    toolchain = kind.find()
    if toolchain is None:
        named = [where for where, path, by_user in kind.places() if by_user and path is None]
        text = f"{named[0]} is no program" if named else f"no {kind.name} was found"
        return None, [Finding(name, "fault", text, f"{kind.install_hint}.")]
    try:
        version = toolchain.version(Memory(None))
    except QuireError as error:
        fix = "Repair or replace it, or name another compiler (QUIRE_NVCC, QUIRE_CXX)."
        return None, [Finding(name, "fault", str(error).partition("\n")[0], fix)]
    return toolchain, [Finding(name, "ok", f"{toolchain.path}: {version.partition(chr(10))[0]}")]


def _check_gxx() -> Iterator[Finding]:
    toolchain, findings = _found("g++", machine.host_target())
    if toolchain is not None and not _passes(toolchain, "cc1plus"):
        fix = "Install the whole compiler: `apt-get install g++`."
        findings = [Finding("g++", "fault", f"{toolchain.path} has no cc1plus: it compiles C, not C++", fix)]
    yield from findings


def _passes(toolchain: Toolchain, name: str) -> bool:
    """Whether g++ knows where one of its programs is; g++ repeats the name if it does not know."""
    return Path(_ask(toolchain.path, f"-print-prog-name={name}").strip()).is_absolute()


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=False,
            stdin=subprocess.DEVNULL, env=config.child_environment(),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _check_nvcc() -> Iterator[Finding]:
    wanted = config.arch_list() or machine.present_targets()
    toolchain, findings = _found("nvcc", "sm90a")
    if toolchain is None:
        needed = bool(wanted) or config.nvcc() is not None
        for found in findings:
            status: Status = "fault" if needed else "note"
            yield Finding("nvcc", status, found.text + ("" if needed else ", which only CUDA variants need"), found.fix)
        return
    faults = _nvcc_faults(toolchain, wanted) if toolchain.name == "nvcc" else []
    yield from faults or findings


def _nvcc_faults(toolchain: Toolchain, wanted: tuple[str, ...]) -> list[Finding]:
    directory = Path(os.path.realpath(toolchain.path)).parent
    is_program = (directory / "nvcc.profile").exists()  # a wrapper script is in another directory
    missing = [name for name in ("ptxas", "../nvvm/bin/cicc") if is_program and not (directory / name).exists()]
    if missing:
        text, fix = (
            f"{toolchain.path} lacks {', '.join(Path(m).name for m in missing)}",
            "Install nvcc with its nvvm part.",
        )
        return [Finding("nvcc", "fault", text, fix)]
    known = set(re.findall(r"sm_(\w+)", _ask(toolchain.path, "--list-gpu-code")))
    strange = [
        target
        for target in wanted
        if known and CUDA_TARGETS[target].rstrip("af") not in {k.rstrip("af") for k in known}
    ]
    fix = "Update the CUDA toolkit, or warm up elsewhere and import the cache."
    return [Finding("nvcc", "fault", f"{toolchain.path} does not know {t}", fix) for t in strange]


def _check_ninja() -> Iterator[Finding]:
    try:
        yield Finding("ninja", "ok", find_ninja())
    except QuireError:
        yield Finding("ninja", "fault", "no ninja was found", "pip install ninja")


def _check_memory() -> Iterator[Finding]:
    free = machine.available_bytes()
    if free < _LEAST_MEMORY:
        fix = "Raise the memory limit of the container, or warm up elsewhere and import the cache."
        yield Finding("memory", "fault", f"{free >> 20} MB are left: a compiler may be killed", fix)
    else:
        yield Finding("memory", "ok", f"{machine.default_jobs()} compilers at a time, {free >> 20} MB of memory")


# --- the cache -------------------------------------------------------------------------------------------------------


def _check_root(store: Store) -> Iterator[Finding]:
    root = store.root
    there = next(path for path in (root, *root.parents) if path.exists())
    move = "Set QUIRE_CACHE_DIR to another directory"
    disk, distrust = os.statvfs(there), _distrust(store) if there == root else ""
    faults = (
        (not there.is_dir(), f"{there} is no directory", f"{move}, or remove the file."),
        (not os.access(there, os.W_OK | os.X_OK), f"{there} cannot be written", f"{move}, or `chown` it."),
        (bool(disk.f_flag & os.ST_RDONLY), f"{there} is on a read-only file system", f"{move}, or warm up beforehand."),
        (bool(distrust), f"{distrust}, who could run code as you", f"{move}, or `chown` and `chmod go-w` {root}."),
        (disk.f_bavail * disk.f_frsize < _LEAST_SPACE, f"{there} has {disk.f_bavail * disk.f_frsize >> 20} MB left",
         "Free space (`quire cache gc --max-size 200MB`), or " + move[0].lower() + move[1:] + "."),
        (disk.f_files > 0 and disk.f_favail == 0, f"{there} has no inodes left", "Remove files, or move the cache."),
    )  # fmt: skip
    found = [Finding("cache", "fault", text, fix) for is_fault, text, fix in faults if is_fault]
    yield from found or [Finding("cache", "ok", f"{root}{'' if there == root else ', which a first build makes'}")]


def _distrust(store: Store) -> str:
    """Why nothing is loaded from the root, or "" if it is trusted."""
    try:
        with trust.directory(store.root):
            return ""
    except (QuireError, OSError) as error:
        return str(error)


def _check_entries(store: Store, prebuilt: tuple[Store, ...]) -> Iterator[Finding]:
    bad, count = list(store.problems()), len(list(store.paths()))
    for path, text in bad:
        fix = "The next build replaces it; `quire cache prune` removes it."
        yield Finding("entries", "fault", f"{path}: {text}", fix)
    packaged = sum(len(list(one.paths())) for one in prebuilt)
    if config.jit_denied() and not count and not packaged:
        fix = "Fill the cache with `quire warmup --manifest FILE`, or unset QUIRE_JIT."
        yield Finding("entries", "fault", "QUIRE_JIT=deny forbids compiling, and nothing is compiled", fix)
    elif not bad:
        yield Finding("entries", "ok", f"{count} in the cache, {packaged} prebuilt")


def _check_keys() -> Iterator[Finding]:
    if (keys := trust.trusted_keys()) is not None:
        days = {name: key.days_left() for name, key in keys.keys.items()}
        good = [name for name, left in days.items() if left is None or left >= 0]
        if not good:
            fix = "Add the line of a current key, and have entries signed with it: `quire cache sign`."
            yield Finding("keys", "fault", f"every key of {keys.source} has expired: {', '.join(days)}", fix)
        for name in good:
            if (left := days[name]) is not None and left < _SOON:
                fix = "Make the next key (`quire cache keygen`), and give its .pub file to all readers before then."
                yield Finding("keys", "note", f"the key {name!r} of {keys.source} expires in {left} days", fix)
        if good:
            yield Finding("keys", "ok", f"{keys.source}: entries from elsewhere are signed by {' or '.join(good)}")
    if (private := trust.signing_key()) is not None:
        yield Finding("keys", "ok", f"what is compiled here is signed by {private.name!r}")


def _check_shared_cache() -> Iterator[Finding]:
    if config.shared_cache() is None:
        return
    from quire.jit.tier import shared_tier

    tier = shared_tier()
    assert tier is not None  # one is configured
    if problem := tier.problem():
        fix = "Until it answers, variants are compiled on this host. Correct or unset QUIRE_SHARED_CACHE."
        yield Finding("shared cache", "fault", f"{tier.url} cannot be read: {problem}", fix)
    else:
        yield Finding("shared cache", "ok", f"{tier.url}{', read only' if tier.readonly else ''}")
