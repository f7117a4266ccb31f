"""Loads host libraries from bytes in memory, so that later writes to the file have no effect.

The cache may therefore be on a file system that does not permit execution.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import tempfile
import threading
from itertools import count
from pathlib import Path

_guard = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}  #: sha256 -> a library, which is never unloaded
_loads = count()


def load_library(name: str, image: bytes) -> ctypes.CDLL:
    """The library whose file holds `image`; the same bytes are loaded once a process. OSError if loading fails."""
    digest = hashlib.sha256(image).hexdigest()
    with _guard:
        if digest not in _libraries:
            _libraries[digest] = _load(name, image)
        return _libraries[digest]


def _load(name: str, image: bytes) -> ctypes.CDLL:
    try:
        descriptor = _memory_file(name, image)
    except OSError:  # files in memory may be forbidden (vm.memfd_noexec, a sandbox)
        return _load_copy(image)
    try:
        # Each library gets a different path, because the loader takes an equal path for an earlier library.
        path = f"/proc/self/{'./' * next(_loads)}fd/{descriptor}"
        return ctypes.CDLL(path) if os.path.exists(path) else _load_copy(image)  # noqa: PTH110 - pathlib drops the dots
    finally:
        os.close(descriptor)


def _memory_file(name: str, image: bytes) -> int:
    """A descriptor of a file in memory that is sealed against writes."""
    descriptor = os.memfd_create(f"quire {name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(image)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _load_copy(image: bytes) -> ctypes.CDLL:
    """Load a copy in a directory of mode 0700, which is then deleted."""
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        path = Path(directory) / "variant.so"
        path.write_bytes(image)
        return ctypes.CDLL(str(path))


def hint_of(error: Exception) -> str:
    """What to do about a library that cannot be loaded."""
    if "libgomp" in str(error):
        return "; install libgomp (`apt-get install libgomp1`)"
    if "failed to map segment" in str(error):
        return (
            f"; no file in memory may be executed here, and {tempfile.gettempdir()} is mounted noexec: "
            "set TMPDIR to a directory on a file system that permits execution"
        )
    return ""
