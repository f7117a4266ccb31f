"""The toolchain half of an entry's name, and how a request becomes an artifact.

NVRTC, which pip's torch brings along, makes cubins without nvcc, g++ and CUDA headers.

A toolchain is found, not made: `find_toolchain(target)`. It has a name and a version, gives flags for a target, and
builds a request in a staging directory. nvcc and g++ are command lines that ninja runs; NVRTC is a library
that a child process loads. Nothing outside these files knows the difference.

The version comes from asking the compiler once; `Memory` keeps the answer. A shell script that only executes another
program stands for that program; any other script is part of the version, because it may add flags that no `--version`
shows.

It runs in a child process (nvrtc_worker.py), which a time limit can stop and whose memory (some 150 MB) goes with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from quire.errors import CompileError, UnsupportedError
from quire.jit import config, nvrtc_worker, unit
from quire.jit.compilation import (
    Diagnosis,
    Memory,
    Report,
    Run,
    ask,
    diagnose,
    parse_gxx,
    parse_nvcc,
    run,
    run_ninja,
    stamp_of,
)
from quire.jit.machine import CUDA_TARGETS
from quire.jit.unit import Request

#: Host targets, and g++'s name for them with what is added. A request for "native" carries the processor's
#: fingerprint.
HOST_TARGETS: dict[str, str] = {
    "x86-64-v3": "x86-64-v3",
    "x86-64-v4": "x86-64-v4",
    "x86-64-v4-bf16": "x86-64-v4 -mavx512bf16",
    "x86-64-v4-amx": "x86-64-v4 -mamx-tile -mamx-bf16",
    "aarch64": "armv8-a",
    "native": "native",
}


_ONLY_EXECUTES = re.compile(r"""exec\s+(?P<quote>["']?)(?P<path>/[^\s"']+)(?P=quote)\s+"\$@"\s*""")


def _script(path: Path) -> bytes | None:
    """The text of `path` if it is a script, else None."""
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return None
        file.seek(0)
        return file.read(1 << 20)


def resolve_scripts(path: str) -> tuple[list[str], str]:
    """The files of a compiler, outermost first, and a digest of a wrapper script that does more than execute."""
    files: list[str] = []
    current = Path(path)
    while current.exists():
        current = Path(os.path.realpath(current))
        if str(current) in files:
            break
        files.append(str(current))
        script = _script(current)
        if script is None:
            break
        lines = [line.strip() for line in script.decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        match = _ONLY_EXECUTES.fullmatch(lines[0]) if len(lines) == 1 else None
        if match is None:
            return files, hashlib.sha256(script).hexdigest()
        current = Path(match.group("path"))
    return files, ""


@dataclass(frozen=True)
class Outcome:
    """How a build ended. Without a `failure`, the staging directory holds the artifact."""

    command: str  #: what was run, relative to the staging directory
    log: str
    seconds: float
    peak_bytes: int | None  #: resident set of the compiler, where known
    report: Report
    failure: Diagnosis | None


class Toolchain(ABC):
    """A compiler that was found on this machine and not yet asked anything."""

    name: ClassVar[str]
    source: ClassVar[str]  #: the unit's file name
    artifact: ClassVar[str]  #: the artifact's file name
    install_hint: ClassVar[str]

    def __init__(self, path: str, *, named: bool) -> None:
        self.path = path  #: as it is invoked; never resolved, since compilers look at their own name
        #: whether the user named it (QUIRE_NVCC, QUIRE_CXX, CUDA_HOME, QUIRE_TOOLCHAIN); else the search found it
        self.named = named

    @classmethod
    @abstractmethod
    def places(cls) -> Iterator[tuple[str, str | None, bool]]:
        """Where compilers are searched, in order: (description, path or None if there is none, named by the user)."""

    @classmethod
    def find(cls) -> Toolchain | None:
        """The toolchain that a build would use, or None. Starts no process."""
        return next((cls(path, named=named) for _, path, named in cls.places() if path is not None), None)

    @classmethod
    def require(cls) -> Toolchain:
        """The toolchain that a build would use; CompileError lists the places that were searched."""
        found = cls.find()
        if found is not None:
            return found
        tried = "\n".join(f"  {where}: {'found' if path else 'nothing there'}" for where, path, _ in cls.places())
        raise CompileError(
            f"no {cls.name} was found; searched in this order:\n{tried}\n"
            f"{cls.install_hint}, or install prebuilt variants (quire-attention-jit-cache), which need no compiler."
        )

    @abstractmethod
    def flags(self, target: str) -> tuple[str, ...]:
        """The flags for `target`, in order and free of paths."""

    @abstractmethod
    def read_report(self, log: str) -> Report:
        """What the compiler said about the code."""

    @abstractmethod
    def _ask_version(self) -> tuple[str, list[str]]:
        """Ask the compiler: (its version, further files that it consists of)."""

    def known_version(self, memory: Memory) -> str | None:
        """The version, as far as the memory knows it; starts no process."""
        return memory.version(self.path)

    def version(self, memory: Memory) -> str:
        """The version: from the memory, else by asking. CompileError if the compiler does not answer."""
        known = self.known_version(memory)
        if known is not None:
            return known
        layers, wrapper = resolve_scripts(self.path)
        before = stamp_of(layers)
        version, further = self._ask_version()
        if wrapper:
            version += f"\nwrapper {wrapper}"
        stamp = stamp_of(list(dict.fromkeys(layers + further)))
        if stamp is not None and stamp[: len(layers)] == before:
            memory.set(self.path, stamp, version)
        return version

    def parts(self, target: str, version: str) -> dict[str, str]:
        """The labelled parts of this toolchain's half of an entry's name."""
        return {"toolchain": self.name, "version": version, "flags": " ".join(self.flags(target))}

    def build(self, request: Request, staging: Path) -> Outcome:
        """Compile `request` in the directory `staging`, which then holds the unit, `artifact` and the compiler's log.

        A failing compiler is an Outcome, not an exception. The command line is relative to the staging directory: it
        holds no path of this machine but the compiler's own.
        """
        words = self._words(request.spec.target)
        self._write_inputs(request, staging)
        status, log, seconds, peak_bytes = self._run(request, staging, words)
        failed = status != 0 or not (staging / self.artifact).is_file()
        failure = diagnose(log, status) if failed else None
        return Outcome(shlex.join(words), log, seconds, peak_bytes, self.read_report(log), failure)

    def _words(self, target: str) -> list[str]:
        """The command line, to be run in the staging directory."""
        return [self.path, *self.flags(target), "-I", "include", "-o", self.artifact, self.source]

    def _run(self, request: Request, staging: Path, words: list[str]) -> Run:
        """Run the command line; the compiler's own words go to build.log."""
        text = unit.render_ninja(
            request.templates,
            slug=request.spec.slug, command=shlex.join(words), source=self.source, artifact=self.artifact,
        )  # fmt: skip
        (staging / "build.ninja").write_text(text, encoding="utf-8")
        return run_ninja(staging)

    def _write_inputs(self, request: Request, staging: Path) -> None:
        """Write the unit and exactly the headers that were hashed: the compiler sees nothing else."""
        for header in request.headers:
            path = staging / "include" / header.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(header.text)
        (staging / self.source).write_text(request.source, encoding="utf-8")


class Nvcc(Toolchain):
    """nvcc, to a bare cubin: no host code, no runtime, no dependence on Python, torch, glibc or gcc."""

    name = "nvcc"
    source = "variant.cu"
    artifact = "variant.cubin"
    install_hint = (
        "Install the CUDA toolkit (or `pip install nvidia-cuda-nvcc`), set QUIRE_NVCC to the compiler, "
        "let NVRTC compile (`pip install nvidia-cuda-nvrtc`)"
    )

    @classmethod
    def places(cls) -> Iterator[tuple[str, str | None, bool]]:
        named = config.nvcc()
        if named is not None:  # nothing else will do
            yield f"QUIRE_NVCC={named}", shutil.which(named, path=config.search_path()), True
            return
        home = config.cuda_home()
        if home is not None:
            yield f"CUDA_HOME {home}/bin/nvcc", shutil.which(str(home / "bin" / "nvcc")), True
        asked = config.toolchain() == cls.name
        yield "nvcc on PATH", shutil.which("nvcc", path=config.search_path()), asked
        wheels = importlib.util.find_spec("nvidia")
        roots = list(wheels.submodule_search_locations or ()) if wheels is not None else []
        for root in roots:
            for package in ("cu13", "cuda_nvcc"):
                candidate = f"{root}/{package}/bin/nvcc"
                yield f"pip toolkit {candidate}", shutil.which(candidate), asked
        yield "/usr/local/cuda/bin/nvcc", shutil.which("/usr/local/cuda/bin/nvcc"), asked

    def flags(self, target: str) -> tuple[str, ...]:
        """No -lineinfo: it changes no instruction but triples the cubin and writes paths into it."""
        arch = CUDA_TARGETS[target]
        code = f"--generate-code=arch=compute_{arch},code=sm_{arch}"
        return ("-cubin", "-O3", "-std=c++17", code, "-Xptxas=-v")

    def read_report(self, log: str) -> Report:
        return parse_nvcc(log)

    def _ask_version(self) -> tuple[str, list[str]]:
        """nvcc is a driver: the passes that make the code are files of their own and may be replaced on their own."""
        version = "\n".join(ask([self.path, "--version"])[-2:])
        inner = Path(resolve_scripts(self.path)[0][-1]).parent
        passes = (inner / "ptxas", inner.parent / "nvvm" / "bin" / "cicc")
        return version, [str(file.resolve()) for file in passes if file.exists()]


class Gxx(Toolchain):
    """g++, to a host library with one exported C function.

    -O2: what the kernels need beyond it they ask for themselves, and -O3 compiles for almost twice as long.
    -nostdinc++: kernels include C headers, in whose place libstdc++ has some of its own, three times as long to parse.
    Not -ffast-math: it would break NaN and infinity handling and the magic-number exponential; three of the flags below
    are the part of it that vector code needs.
    """

    name = "g++"
    source = "variant.cpp"
    artifact = "variant.so"
    install_hint = "Install g++ (`apt-get install g++`), set QUIRE_CXX to the compiler"

    _COMMON: ClassVar[tuple[str, ...]] = (
        *("-O2", "-std=c++17", "-nostdinc++", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden"),
        *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast"),
    )

    #: the machine that a cross compiler compiles for, as compilers name it; "" for this machine's compiler
    machine: ClassVar[str] = ""

    @classmethod
    def places(cls) -> Iterator[tuple[str, str | None, bool]]:
        if cls.machine:
            name = f"{cls.machine}-g++"
            yield f"{name} on PATH", shutil.which(name, path=config.search_path()), False
            return
        named = config.cxx()
        if named is not None:  # nothing else will do
            yield f"QUIRE_CXX={named}", shutil.which(named, path=config.search_path()), True
            return
        for name in ("g++", "c++"):
            yield f"{name} on PATH", shutil.which(name, path=config.search_path()), False

    def flags(self, target: str) -> tuple[str, ...]:
        return (*f"-march={HOST_TARGETS[target]}".split(), *self._COMMON)

    def read_report(self, log: str) -> Report:
        return parse_gxx(log)

    def _ask_version(self) -> tuple[str, list[str]]:
        first = ask([self.path, "--version"])[0]
        machine = ask([self.path, "-dumpmachine"])[0]
        inner = ask([self.path, "-print-prog-name=cc1plus"])[0]
        # The first word is the name it was called by (g++, c++): the same compiler under another name is the same.
        passes = [str(Path(inner).resolve())] if Path(inner).is_absolute() else []
        return f"{first.partition(' ')[2] or first}\n{machine}", passes


class GxxForAarch64(Gxx):
    """g++ for aarch64 on another machine. Its entries are those that the same g++ makes on aarch64."""

    machine = "aarch64-linux-gnu"
    install_hint = "Install a cross compiler (`apt-get install g++-aarch64-linux-gnu`), compile on an aarch64 machine"


class GxxForX86(Gxx):
    """g++ for x86-64 on another machine. Its entries are those that the same g++ makes on x86-64."""

    machine = "x86_64-linux-gnu"
    install_hint = "Install a cross compiler (`apt-get install g++-x86-64-linux-gnu`), compile on an x86-64 machine"


#: Which toolchain builds which targets; in nvcc's place there may be NVRTC, in g++'s a cross compiler.
_BUILDS: tuple[tuple[type[Toolchain], Mapping[str, str]], ...] = ((Nvcc, CUDA_TARGETS), (Gxx, HOST_TARGETS))


def kinds_for(target: str) -> tuple[type[Toolchain], ...]:
    """The kinds of toolchain that may build `target`, the preferred one first; UnsupportedError if none builds it."""
    found = next((kind for kind, targets in _BUILDS if target in targets), None)
    if found is None:
        known = ", ".join((*CUDA_TARGETS, *HOST_TARGETS))
        raise UnsupportedError(f"no toolchain builds for {target!r}; expected one of {known}")
    if found is Nvcc:
        return _cuda_kinds()
    return (_gxx(target) if found is Gxx else found,)


def _cuda_kinds() -> tuple[type[Toolchain], ...]:
    """The one that QUIRE_TOOLCHAIN or QUIRE_NVCC asks for; else nvcc, and NVRTC for a machine that has only that."""
    asked = config.toolchain() or ("nvcc" if config.nvcc() else None)
    return tuple(kind for kind in (Nvcc, Nvrtc) if asked in (None, kind.name))


def _gxx(target: str) -> type[Gxx]:
    """This machine's g++, or the cross compiler for a target of other machines."""
    on_arm = platform.machine() in ("aarch64", "arm64")
    if target == "native" or on_arm == (target == "aarch64"):
        return Gxx
    return GxxForX86 if on_arm else GxxForAarch64


def find_toolchain(target: str) -> Toolchain | None:
    """The toolchain that a build for `target` would use, or None. Starts no process."""
    return next((found for kind in kinds_for(target) if (found := kind.find()) is not None), None)


def for_target(target: str) -> type[Toolchain]:
    """The kind of toolchain that a build for `target` would use; the preferred one where none is found."""
    found = find_toolchain(target)
    return kinds_for(target)[0] if found is None else type(found)


def require_toolchain(target: str) -> Toolchain:
    """The toolchain that a build for `target` uses; CompileError lists the places that were searched."""
    return for_target(target).require()


#: Where toolkits and distributions put their libraries.
_SYSTEM_DIRECTORIES = ("/usr/local/cuda/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")

#: What nvcc takes from g++ and NVRTC has not (__builtin_offsetof: before 13.4), in words that it has.
_BUILTINS = (
    "__builtin_offsetof(type,field)=((size_t)__INTADDR__(&((type*)0)->field))",
    "__builtin_fabsf(x)=fabsf(x)",
    "__builtin_fmaf(x,y,z)=fmaf(x,y,z)",
    "__builtin_fminf(x,y)=fminf(x,y)",
    "__builtin_huge_valf()=__builtin_bit_cast(float,0x7f800000)",
    "__builtin_inff()=__builtin_bit_cast(float,0x7f800000)",
    "__builtin_nanf(text)=__builtin_bit_cast(float,0x7fc00000)",
)


def _package(name: str, *parts: str) -> Iterator[Path]:
    """The directory `parts` of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(root, *parts)


def _directories() -> Iterator[tuple[str, Path]]:
    """(description, directory) of each place, in order."""
    for wheel in ("cu13", "cuda_nvrtc"):
        yield from (("wheel nvidia-cuda-nvrtc", path) for path in _package("nvidia", wheel, "lib"))
    yield from (("torch", path) for path in _package("torch", "lib"))
    home = config.cuda_home()
    if home is not None:
        yield "CUDA_HOME", home / "lib64"
    yield from (("LD_LIBRARY_PATH", path) for path in config.library_path())
    yield from (("system", Path(path)) for path in _SYSTEM_DIRECTORIES)


def _library(directory: Path) -> str | None:
    """The newest libnvrtc in a directory: libnvrtc.so.13, or libnvrtc-<digest>.so.12 as old torch wheels name it."""
    names = [path.name for path in directory.glob("libnvrtc*.so*")] if directory.is_dir() else []
    found = [name for name in names if not name.startswith("libnvrtc-builtins") and ".alt." not in name]
    return str(directory / max(found, key=lambda name: (name.rpartition(".so")[2], name))) if found else None


class Nvrtc(Toolchain):
    """NVRTC, to a bare cubin. Its machine code is not nvcc's bit for bit: the front ends differ."""

    name = "nvrtc"
    source = "variant.cu"
    artifact = "variant.cubin"
    install_hint = "Install NVRTC (`pip install nvidia-cuda-nvrtc`, which torch's CUDA wheels bring along)"

    @classmethod
    def places(cls) -> Iterator[tuple[str, str | None, bool]]:
        named = config.toolchain() == cls.name
        for description, directory in _directories():
            yield f"{description} {directory}/libnvrtc.so", _library(directory), named

    def flags(self, target: str) -> tuple[str, ...]:
        """-default-device: a generic lambda of a device function is else taken for a host function."""
        arch = f"--gpu-architecture=sm_{CUDA_TARGETS[target]}"
        builtins = (f"--define-macro={builtin}" for builtin in _BUILTINS)
        return (arch, "--std=c++17", "-default-device", "--ptxas-options=-v", *builtins)

    def read_report(self, log: str) -> Report:
        return parse_nvcc(log)

    def _worker(self) -> list[str]:
        """The command line of a child with this library: without site-packages, which it needs not and start slowly."""
        if not sys.executable:
            raise CompileError(
                "NVRTC runs in a Python of its own, and sys.executable does not name one; "
                "set sys.executable, or install nvcc and set QUIRE_TOOLCHAIN=nvcc"
            )
        return [sys.executable, "-I", "-S", nvrtc_worker.__file__, self.path]

    def _ask_version(self) -> tuple[str, list[str]]:
        """The library compiles with a second one, its builtins."""
        builtins = sorted(Path(self.path).resolve().parent.glob("libnvrtc-builtins*.so*"))
        return "\n".join(ask([*self._worker(), "--version"])), [str(path.resolve()) for path in builtins]

    def _words(self, target: str) -> list[str]:
        return [*self._worker(), self.source, self.artifact, "build.log", *self.flags(target), "--include-path=include"]

    def _run(self, request: Request, staging: Path, words: list[str]) -> Run:  # noqa: ARG002
        return run(staging, words)
