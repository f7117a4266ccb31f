"""How many compilers may run at once, and where all processes of the machine agree on it.

Permits belong to the user and the machine, not to the cache: several caches on one machine share one budget, and
several machines that share a cache have a budget each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from quire import config
from quire.errors import CacheError
from quire.jit import cpu, trust
from quire.jit.store import Store

_MOST_READ = 32  #: manifests, for each compile


def max_compilers(store: Store, *, device: bool) -> int:
    """QUIRE_MAX_JOBS; else as many as processors and memory allow, by the memory that earlier compiles took."""
    return config.max_jobs() or cpu.default_jobs(max(_peaks(store, device=device), default=None))


def _peaks(store: Store, *, device: bool) -> Iterator[int]:
    """Peak memory in bytes of compiles of device or host code, for some entries of the store, if measured."""
    for _, manifest in islice(store.manifests(), _MOST_READ):
        if manifest.target.startswith("sm") == device and manifest.peak_bytes:
            yield manifest.peak_bytes


def permits_directory(store: Store) -> Path:
    """The directory of this user's permits on this machine; in the cache if no other directory is private."""
    name = f"quire-permits-{os.geteuid()}"
    try:
        root = config.runtime_directory()
        with trust.directory(root) as at:
            _make(at, name)
            with trust.directory(at, name) as own:
                _make(own, "permits")
    except (OSError, CacheError):  # missing, read-only, full, or others could write there
        return store.root / "permits"
    return root / name / "permits"


def _make(at: int, name: str) -> None:
    """Make a private directory. An existing one is not changed, and is used only if it can be trusted."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=at)
