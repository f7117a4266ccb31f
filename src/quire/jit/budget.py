"""How many compilers may run at once, and where all processes of the machine agree on it.

The permits are files of the user on this machine, whatever the cache: several caches on one machine then have one
budget, and several machines on one cache have a budget each.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from quire import config
from quire.jit import cpu
from quire.jit.store import Store

_MOST_READ = 32  #: manifests, for each compile


def max_compilers(store: Store, *, device: bool) -> int:
    """QUIRE_MAX_JOBS; else as many as processors and memory allow, by what compiles of that kind took in `store`."""
    return config.max_jobs() or cpu.default_jobs(max(_peaks(store, device=device), default=None))


def _peaks(store: Store, *, device: bool) -> Iterator[int]:
    """Bytes that compilers of device or host code took, as far as it was measured, for some entries of the store."""
    for _, manifest in islice(store.manifests(), _MOST_READ):
        if manifest.target.startswith("sm") == device and manifest.peak_bytes:
            yield manifest.peak_bytes


def permits_directory(store: Store) -> Path:
    """Where the permits of this user lie on this machine; in the cache if nowhere else is private."""
    try:
        root = config.runtime_directory() / f"quire-permits-{os.geteuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        status = root.lstat()
    except OSError:  # none, or a read-only or full file system
        return store.root / "permits"
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
    if not private:
        return store.root / "permits"
    (root / "permits").mkdir(mode=0o700, exist_ok=True)
    return root / "permits"
