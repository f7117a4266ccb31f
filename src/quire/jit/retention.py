"""Chooses the entries of a cache to remove: unused, beyond a size, or of other versions of Quire.

The last use of an entry is the last read of its artifact, which the file system notes (with "relatime", the default,
once a day), or its creation if that is later. A hit therefore writes nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.errors import CacheError
from quire.jit import Manifest, Store

_STALE_SECONDS = 3600.0  #: age at which no builder still works in a staging directory


@dataclass(frozen=True)
class Kept:
    """An entry, its size, and its last use."""

    path: Path
    bytes: int
    used: float  #: seconds since the epoch


def kept_entries(store: Store) -> list[Kept]:
    """Every entry of `store`, valid or not, the least recently used first."""
    found = []
    for path in store.paths():
        files = [file.lstat() for file in path.iterdir()] if path.is_dir() and not path.is_symlink() else []
        used = max((max(status.st_atime, status.st_mtime) for status in files), default=0.0)
        found.append(Kept(path, sum(status.st_size for status in files), used))
    return sorted(found, key=lambda kept: (kept.used, kept.path))


def to_remove(
    entries: list[Kept], *, max_bytes: int | None = None, unused_for: float | None = None, now: float = 0.0
) -> list[Kept]:
    """The entries not used for `unused_for` seconds, and the least recently used ones beyond `max_bytes` in total."""
    left, chosen = sum(kept.bytes for kept in entries), []
    for kept in entries:
        if (unused_for is not None and now - kept.used > unused_for) or (max_bytes is not None and left > max_bytes):
            chosen.append(kept)
            left -= kept.bytes
    return chosen


def require_times_of_use(store: Store) -> None:
    """CacheError on a file system that does not note reads (mounted with noatime)."""
    if store.root.is_dir() and os.statvfs(store.root).f_flag & os.ST_NOATIME:
        raise CacheError(
            f"{store.root} is on a file system mounted with noatime, which does not note when entries are used; "
            "limit the cache with --max-size, which then removes the oldest entries first."
        )


def outdated(store: Store, is_current: Callable[[Manifest], bool]) -> Iterator[Path]:
    """The entries that this version of Quire would not make, and those without a readable manifest."""
    manifests = store.manifests()
    current = {path for path, m in manifests if path.parent.name == m.slug and is_current(m)}
    yield from (path for path in store.paths() if path not in current)


def sweep(store: Store) -> None:
    """Remove logs of failed compiles, entries in quarantine, and staging directories of killed builders."""
    for name, oldest in (("logs", 0.0), ("quarantine", 0.0), ("staging", _STALE_SECONDS)):
        directory = store.root / name
        if directory.is_symlink() or not directory.is_dir():
            continue
        for path in directory.iterdir():
            if time.time() - path.lstat().st_mtime < oldest:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
