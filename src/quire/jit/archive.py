"""Carry a cache to another machine in one file.

An archive is a gzipped tar of `<slug>/<entry>/<file>` with neither times nor owners, so the same entries give the same
bytes. Importing checks names before it writes anything, verifies every entry before it publishes any, and keeps entries
that are already there. Digests show damage, not authorship: importing an archive lets its author run code.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from quire.errors import CacheError
from quire.jit.store import Entry, Store

_MEMBER = re.compile(r"([a-z0-9][a-z0-9._-]{0,199})/([0-9a-f]{40}-[0-9a-f]{12})/([A-Za-z0-9][A-Za-z0-9._-]{0,99})")
_LARGEST_FILE = 1 << 30


def export_entries(entries: Iterable[Entry], path: Path) -> int:
    """Write `entries` to the archive `path`; the number of entries written."""
    unfinished = path.with_name(f"{path.name}.part")
    count = 0
    with (
        unfinished.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for entry in sorted(entries, key=lambda entry: (entry.slug, entry.path.name)):
            for file in sorted(entry.path.iterdir()):
                data = file.read_bytes()
                member = tarfile.TarInfo(f"{entry.slug}/{entry.path.name}/{file.name}")
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
            count += 1
    unfinished.replace(path)
    return count


def _unpack(path: Path, target: Path) -> dict[str, tuple[str, Path]]:
    """Write the members into `target`: entry name -> (slug, its directory)."""
    found: dict[str, tuple[str, Path]] = {}
    with tarfile.open(path, "r:*") as tar:
        for member in tar:
            match = _MEMBER.fullmatch(member.name)
            if match is None or not member.isreg() or member.size > _LARGEST_FILE:
                raise CacheError(f"{path} is not an archive of a Quire cache: it holds {member.name!r}")
            slug, name, file = match.groups()
            directory = target / slug / name
            directory.mkdir(parents=True, exist_ok=True)
            data = tar.extractfile(member)
            assert data is not None  # a regular file has data
            (directory / file).write_bytes(data.read())
            (directory / file).chmod(0o644)
            directory.chmod(0o755)
            directory.parent.chmod(0o755)
            found[f"{slug}/{name}"] = (slug, directory)
    return found


def import_entries(path: Path, store: Store) -> tuple[int, int]:
    """Add the archive's entries to `store`: (added, already there).

    CacheError, with nothing added, if the file is not an archive, if any entry fails verification, or if the store
    cannot be written.
    """
    if reason := store.prepare():
        raise CacheError(f"the store {store.root} cannot be written: {reason}")
    staging = store.new_staging()
    try:
        entries = [(slug, store.verify(directory)) for slug, directory in _unpack(path, staging).values()]
        if wrong := next((entry for slug, entry in entries if entry.slug != slug), None):
            raise CacheError(f"{path}: the entry {wrong.path.name} calls itself {wrong.slug!r}")
        added = sum(store.adopt(entry) for _, entry in entries)
        return added, len(entries) - added
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CacheError(f"{path} cannot be imported: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
