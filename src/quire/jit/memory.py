"""Remembers the versions of compilers, as long as the compilers' files do not change.

A hit must start no process, yet the version of the compiler is part of an entry's name. The compiler's answer is
therefore kept in the cache (`compilers.json`), with the path, size and time of each file of the compiler.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, TypeAlias

from quire.errors import CacheError
from quire.jit import progress, trust

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
            progress.warn_once(f"ignored {path}, compilers are asked again: {error}")
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
                progress.warn_once(f"{self._path} cannot be written, so each process asks its compilers: {error}")
            self._unsaved = False
