"""A compiler: its files and version, which are remembered, its flags, and how it builds an entry.

A hit must start no process, yet the version of the compiler is part of an entry's name. The compiler's answer is
therefore kept in the cache (`compilers.json`), with the path, size and time of each file of the compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from quire.errors import CacheError, CompileError
from quire.jit import compilation, config, events, trust, unit
from quire.jit.unit import Request

_LARGEST = 1 << 20  #: bytes; an answer takes a few hundred

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
            read = json.loads(trust.read(at, path.name, _LARGEST))
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


_ONLY_EXECUTES = re.compile(r"""exec\s+(?P<quote>["']?)(?P<path>/[^\s"']+)(?P=quote)\s+"\$@"\s*""")


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
    report: compilation.Report
    failure: compilation.Diagnosis | None


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
    def read_report(self, log: str) -> compilation.Report:
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
        failure = compilation.diagnose(log, status) if failed else None
        return Outcome(shlex.join(words), log, seconds, peak_bytes, self.read_report(log), failure)

    def _words(self, target: str) -> list[str]:
        """The command line, to be run in the staging directory."""
        return [self.path, *self.flags(target), "-I", "include", "-o", self.artifact, self.source]

    def _run(self, request: Request, staging: Path, words: list[str]) -> compilation.Run:
        """Run the command line; the compiler's own words go to build.log."""
        text = unit.render_ninja(
            request.templates,
            slug=request.spec.slug, command=shlex.join(words), source=self.source, artifact=self.artifact,
        )  # fmt: skip
        (staging / "build.ninja").write_text(text, encoding="utf-8")
        return compilation.run_ninja(staging)

    def _write_inputs(self, request: Request, staging: Path) -> None:
        """Write the unit and exactly the headers that were hashed: the compiler sees nothing else."""
        for header in request.headers:
            path = staging / "include" / header.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(header.text)
        (staging / self.source).write_text(request.source, encoding="utf-8")
