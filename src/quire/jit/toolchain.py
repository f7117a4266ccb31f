"""The compilers: where they are found, who they are, with which flags they build a target.

Who a compiler is enters the key, yet a hit must start no process. So an identity, once asked for, is remembered in the
cache (`compilers.json`) for as long as the compiler's files keep their path, size and time. `Toolchain.recall` answers
from that memory only; `Toolchain.identify` asks the compiler where the memory has no answer.

A shell script that only executes another program is looked through; any other script is part of the identity itself,
because it may add flags that no `--version` shows.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from quire import config
from quire.errors import CompileError, UnsupportedError
from quire.jit import cpu, report

__all__ = ["CUDA_TARGETS", "HOST_TARGETS", "Compiler", "Gxx", "Memory", "Nvcc", "Toolchain", "for_target"]

#: Device targets and the architecture nvcc calls them by. a: that architecture only; f: its family.
_CUDA_ARCHITECTURES = (
    *("75", "80", "86", "87", "88", "89", "90", "90a"),
    *("100", "100a", "100f", "101", "101a", "103", "103a", "103f"),
    *("110", "110a", "110f", "120", "120a", "120f", "121", "121a", "121f"),
)
CUDA_TARGETS: dict[str, str] = {f"sm{arch}": arch for arch in _CUDA_ARCHITECTURES}

HOST_TARGETS: dict[str, tuple[str, ...]] = {
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4",),
    "aarch64": ("-march=armv8-a",),
    "native": ("-march=native",),  # never used as it stands: resolved before it enters a key
}

_TRANSPARENT = re.compile(r"""exec\s+(?P<quote>["']?)(?P<path>/[^\s"']+)(?P=quote)\s+"\$@"\s*""")


@dataclass(frozen=True)
class Compiler:
    """A compiler that was found, not yet asked anything."""

    path: str  #: as it is invoked; never resolved, since compilers look at their own name
    named: bool  #: whether the user named it (QUIRE_NVCC, QUIRE_CXX, CUDA_HOME) rather than the search finding it


class Memory:
    """What compilers answered before, in a file of the cache: path -> {"stamp", "identity", "resolved"}.

    A memory that is missing, damaged or cannot be written only costs asking again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] | None = None
        self._unsaved = False
        self._guard = threading.Lock()

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            loaded = json.loads(self._path.read_text()) if self._path is not None else {}
        except (OSError, ValueError):  # absent or damaged: there is nothing to recall
            loaded = {}
        return {k: v for k, v in loaded.items() if isinstance(v, dict)} if isinstance(loaded, dict) else {}

    def _load(self) -> dict[str, dict[str, Any]]:
        if self._known is None:
            self._known = self._read()
        return self._known

    def get(self, key: str) -> dict[str, Any] | None:
        """What is remembered under `key`."""
        with self._guard:
            return self._load().get(key)

    def set(self, key: str, value: dict[str, Any]) -> None:
        """Remember `value`, in this process and, if its directory can be written, for later ones."""
        with self._guard:
            self._load()[key] = value
            self._unsaved = True
        self.save()

    def save(self) -> None:
        """Write what is not yet written, if the directory exists by now and can be written."""
        with self._guard:
            if not self._unsaved or self._path is None or not os.access(self._path.parent, os.W_OK):
                return
            self._known = {**self._read(), **self._load()}  # others may have written meanwhile
            draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.{threading.get_ident()}")
            draft.write_text(json.dumps(self._known, indent=1, sort_keys=True))
            draft.replace(self._path)
            self._unsaved = False


def _ask(command: list[str]) -> str:
    """Run a compiler for its answer; CompileError if it does not answer."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
            env=config.child_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CompileError(
            f"{' '.join(command)} failed with exit status {done.returncode}" + (f": {said[0]}" if said else "")
        )
    return (done.stdout + done.stderr).strip()


def _script(path: Path) -> bytes | None:
    """The text of `path` if it is a script, else None."""
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return None
        file.seek(0)
        return file.read(1 << 20)


def _look_through(path: str) -> tuple[list[Path], str]:
    """The files that make up a compiler, outermost first, and a digest of wrapper scripts that do more than execute."""
    files: list[Path] = []
    wrapper = ""
    current = Path(path)
    while current.exists():
        current = Path(os.path.realpath(current))
        if current in files:
            break
        files.append(current)
        script = _script(current)
        if script is None:
            break
        lines = [line.strip() for line in script.decode(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        match = _TRANSPARENT.fullmatch(lines[0]) if len(lines) == 1 else None
        if match is None:
            wrapper = hashlib.sha256(script).hexdigest()
            break
        current = Path(match.group("path"))
    return files, wrapper


def _stamp(files: list[str]) -> list[list[str | int]] | None:
    """(path, size, time) of each file, or None if one is gone."""
    stamp: list[list[str | int]] = []
    for file in files:
        if not os.path.exists(file):  # noqa: PTH110 - on every hit; pathlib doubles its cost
            return None
        status = os.stat(file)  # noqa: PTH116
        stamp.append([os.path.realpath(file), status.st_size, status.st_mtime_ns])
    return stamp


class Toolchain(ABC):
    """One kind of compiler. Instances hold nothing; they are values to dispatch on."""

    name: ClassVar[str]
    source: ClassVar[str]  #: the unit's file name
    artifact: ClassVar[str]  #: the artifact's file name

    @abstractmethod
    def places(self) -> Iterator[tuple[str, str | None, bool]]:
        """Where to look, in order: (description, path or None if there is nothing there, named by the user)."""

    @abstractmethod
    def flags(self, target: str, memory: Memory, *, ask: bool) -> tuple[str, ...]:
        """The flags for `target`, in order and free of paths. Without `ask`, no process is started."""

    @abstractmethod
    def parse_report(self, log: str) -> report.Report:
        """What the compiler said about the code."""

    @abstractmethod
    def _interview(self, compiler: Compiler) -> tuple[str, list[str]]:
        """Ask the compiler: (who it is, further files that it consists of)."""

    def find(self) -> Compiler | None:
        """The compiler that a build would use, or None. Starts no process."""
        return next((Compiler(path, named) for _, path, named in self.places() if path is not None), None)

    def require(self) -> Compiler:
        """The compiler, or CompileError with the places that were searched."""
        compiler = self.find()
        if compiler is not None:
            return compiler
        tried = "\n".join(f"  {where}: {'found' if path else 'nothing there'}" for where, path, _ in self.places())
        raise CompileError(f"no {self.name} was found; searched in this order:\n{tried}\n{self._remedy()}")

    def _remedy(self) -> str:
        return f"Install {self.name}, or fetch a prebuilt cache."

    def recall(self, compiler: Compiler, memory: Memory) -> str | None:
        """Who `compiler` is, as far as the memory knows it in its present state; starts no process."""
        known = memory.get(compiler.path)
        if known is None or known.get("stamp") is None:
            return None
        files = [str(item[0]) for item in known["stamp"]]
        if _stamp([compiler.path]) != known["stamp"][:1] or _stamp(files) != known["stamp"]:
            return None
        identity = known.get("identity")
        return identity if isinstance(identity, str) else None

    def met(self, compiler: Compiler, memory: Memory) -> bool:
        """Whether this cache has ever seen a compiler at this path, in whatever state."""
        return memory.get(compiler.path) is not None

    def identify(self, compiler: Compiler, memory: Memory) -> str:
        """Who `compiler` is: from the memory, else by asking it. CompileError if it does not answer."""
        known = self.recall(compiler, memory)
        if known is not None:
            return known
        layers, wrapper = _look_through(compiler.path)
        stamp_before = _stamp([str(layer) for layer in layers])
        identity, further = self._interview(compiler)
        if wrapper:
            identity += f"\nwrapper {wrapper}"
        files = [str(layer) for layer in layers] + further
        stamp = _stamp(list(dict.fromkeys(files)))
        if stamp is not None and stamp[: len(layers)] == stamp_before:
            memory.set(compiler.path, {"stamp": stamp, "identity": identity})
        return identity


class Nvcc(Toolchain):
    """nvcc, to a bare cubin: no host code, no runtime, no dependence on Python, torch, glibc or gcc."""

    name = "nvcc"
    source = "variant.cu"
    artifact = "variant.cubin"

    def places(self) -> Iterator[tuple[str, str | None, bool]]:
        config.require_known_toolchain()
        named = config.nvcc()
        if named is not None:  # nothing else will do
            yield f"QUIRE_NVCC={named}", shutil.which(named, path=config.search_path()), True
            return
        home = config.cuda_home()
        if home is not None:
            yield f"CUDA_HOME {home}/bin/nvcc", shutil.which(str(home / "bin" / "nvcc")), True
        yield "nvcc on PATH", shutil.which("nvcc", path=config.search_path()), False
        wheels = importlib.util.find_spec("nvidia")
        roots = list(wheels.submodule_search_locations or ()) if wheels is not None else []
        for root in roots:
            for package in ("cu13", "cuda_nvcc"):
                candidate = f"{root}/{package}/bin/nvcc"
                yield f"pip toolkit {candidate}", shutil.which(candidate), False
        yield "/usr/local/cuda/bin/nvcc", shutil.which("/usr/local/cuda/bin/nvcc"), False

    def _remedy(self) -> str:
        return (
            "Install the CUDA toolkit (or `pip install nvidia-cuda-nvcc`), set QUIRE_NVCC to the compiler, "
            "or install a prebuilt cache (quire-jit-cache, `quire cache import`), which needs no compiler."
        )

    def flags(self, target: str, memory: Memory, *, ask: bool) -> tuple[str, ...]:  # noqa: ARG002
        """No -lineinfo: it changes no instruction but triples the cubin and writes paths into it."""
        arch = CUDA_TARGETS.get(target)
        if arch is None:
            raise UnsupportedError(f"{target!r} is not a CUDA target; expected one of {', '.join(CUDA_TARGETS)}")
        code = f"--generate-code=arch=compute_{arch},code=sm_{arch}"
        return ("-cubin", "-O3", "-std=c++17", code, "-Xptxas=-v")

    def parse_report(self, log: str) -> report.Report:
        return report.parse_nvcc(log)

    def _interview(self, compiler: Compiler) -> tuple[str, list[str]]:
        """nvcc is a driver: the passes that make the code are files of their own and may be replaced on their own."""
        identity = "\n".join(_ask([compiler.path, "--version"]).splitlines()[-2:])
        inner = _look_through(compiler.path)[0][-1].parent
        passes = (inner / "ptxas", inner.parent / "nvvm" / "bin" / "cicc")
        return identity, [str(file.resolve()) for file in passes if file.exists()]


class Gxx(Toolchain):
    """g++, to a host library with one exported C function.

    Not -ffast-math: it would break NaN and infinity handling and the magic-number exponential; three of the flags below
    are the part of it that vector code needs.
    """

    name = "g++"
    source = "variant.cpp"
    artifact = "variant.so"

    _COMMON: ClassVar[tuple[str, ...]] = (
        "-O3",
        "-std=c++17",
        "-fPIC",
        "-shared",
        "-fopenmp",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-signed-zeros",
        "-ffp-contract=fast",
        "-fvisibility=hidden",
    )

    def places(self) -> Iterator[tuple[str, str | None, bool]]:
        named = config.cxx()
        if named is not None:  # nothing else will do
            yield f"QUIRE_CXX={named}", shutil.which(named, path=config.search_path()), True
            return
        for name in ("g++", "c++"):
            yield f"{name} on PATH", shutil.which(name, path=config.search_path()), False

    def _remedy(self) -> str:
        return (
            "Install g++ (`apt-get install g++`), set QUIRE_CXX to the compiler, "
            "or install a prebuilt cache (quire-jit-cache, `quire cache import`), which needs no compiler."
        )

    def flags(self, target: str, memory: Memory, *, ask: bool) -> tuple[str, ...]:
        """`native` becomes the exact options that the compiler's driver expands it to on this processor."""
        if target not in HOST_TARGETS:
            raise UnsupportedError(f"{target!r} is not a host target; expected one of {', '.join(HOST_TARGETS)}")
        machine = self._native(memory, ask=ask) if target == "native" else HOST_TARGETS[target]
        return (*machine, *self._COMMON)

    def parse_report(self, log: str) -> report.Report:
        return report.parse_gxx(log)

    def _native(self, memory: Memory, *, ask: bool) -> tuple[str, ...]:
        """Resolved once per processor and compiler; without a compiler, the processor's last resolution stands."""
        key = f"native:{cpu.fingerprint()}"
        known = memory.get(key) or {}
        compiler = self.find()
        identity = self.recall(compiler, memory) if compiler is not None else None
        if known and (compiler is None or not ask or known.get("identity") == identity):
            return tuple(map(str, known["resolved"]))
        if not ask:  # nothing may be asked, so nothing can match
            return ("-march=unresolved",)
        compiler = self.require()
        identity = self.identify(compiler, memory)
        if known.get("identity") == identity:
            return tuple(map(str, known["resolved"]))
        expanded = _ask([compiler.path, "-march=native", "-###", "-E", "-x", "c++", "/dev/null"])
        resolved = _machine_options(expanded)
        if not resolved:
            raise CompileError(f"{compiler.path} does not say what -march=native means; use a named host target")
        memory.set(key, {"identity": identity, "resolved": list(resolved)})
        return resolved

    def _interview(self, compiler: Compiler) -> tuple[str, list[str]]:
        first = _ask([compiler.path, "--version"]).splitlines()[0]
        machine = _ask([compiler.path, "-dumpmachine"])
        inner = _ask([compiler.path, "-print-prog-name=cc1plus"])
        # The first word is the name it was called by (g++, c++): the same compiler under another name is the same.
        passes = [str(Path(inner).resolve())] if Path(inner).is_absolute() else []
        return f"{first.partition(' ')[2] or first}\n{machine}", passes


def _machine_options(expanded: str) -> tuple[str, ...]:
    """The -m options and cache parameters in the output of `g++ -march=native -###`."""
    import shlex

    line = next((line for line in expanded.splitlines() if "cc1plus" in line and "-march=" in line), "")
    words = shlex.split(line)
    options: list[str] = []
    for index, word in enumerate(words):
        if word == "--param" and index + 1 < len(words):
            options.append(f"--param={words[index + 1]}")
        elif (word.startswith("-m") and word != "-march=native") or word.startswith("--param="):
            options.append(word)
    return tuple(options)


_NVCC = Nvcc()
_GXX = Gxx()


def for_target(target: str) -> Toolchain:
    """The toolchain that builds `target`; UnsupportedError for a target that none builds."""
    if target in CUDA_TARGETS:
        return _NVCC
    if target in HOST_TARGETS:
        return _GXX
    known = ", ".join((*CUDA_TARGETS, *HOST_TARGETS))
    raise UnsupportedError(f"no toolchain builds for {target!r}; expected one of {known}")
