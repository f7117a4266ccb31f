"""Tar archives of entries, to carry compiled variants from one machine to another.

Archives are reproducible: the same entries give the same bytes. Reading an archive trusts nothing: only plain files of
known names and sizes are unpacked, into a private directory, and each entry must pass every check of the store before
any is published.
"""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from quire.errors import CacheError
from quire.jit.manifest import Manifest
from quire.jit.request import Request
from quire.jit.store import Entry, Store

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LARGEST_FILE = 1 << 28  #: bytes
_MOST_FILES = 16  #: of an entry
_MOST_BYTES = 1 << 34  #: of all files


def export_entries(entries: Iterable[Entry], path: Path) -> int:
    """Write `entries` to the new file `path`, compressed if its name ends in .gz; returns the number of entries."""
    ordered = sorted(entries, key=lambda entry: (entry.slug, entry.path.name))
    mode = "w:gz" if path.suffix in (".gz", ".tgz") else "w"
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with tarfile.open(unfinished, mode, format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
            for entry in ordered:
                _add(archive, entry)
        unfinished.replace(path)
    except OSError as error:
        raise CacheError(f"the archive {path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return len(ordered)


def pack(entry: Entry) -> bytes:
    """An archive of one entry, not compressed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, entry)
    return packed.getvalue()


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    """Add the files of an entry, without owners and times."""
    for file in sorted(entry.path.iterdir()):
        data = file.read_bytes()
        member = tarfile.TarInfo(f"entries/{entry.slug}/{entry.path.name}/{file.name}")
        member.size, member.mode = len(data), 0o644
        archive.addfile(member, io.BytesIO(data))


def import_entries(source: Path | BinaryIO, store: Store, *, only: Request | None = None) -> list[Entry]:
    """Publish the entries of an archive in `store`; CacheError, and nothing published, if any is invalid.

    A stream must not be compressed, so that it unpacks to no more than its size. With `only`, the archive must hold one
    entry, of this request.
    """
    name = str(source) if isinstance(source, Path) else "(stream)"
    if reason := store.prepare():
        raise CacheError(f"{store.root} cannot be written: {reason}")
    staging = store.new_staging()
    try:
        try:
            with _open(source) as archive:
                _unpack(archive, name, staging)
            sound = [_check(directory) for directory in sorted(staging.glob("entries/*/*"))]
            if only is not None and not _is_only(sound, only):
                raise CacheError(f"expected one entry of {only.spec.slug}, got {[found.slug for _, found in sound]}")
            return [_publish(store, directory, manifest) for directory, manifest in sound]
        except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, RecursionError) as error:
            raise CacheError(f"the archive {name} cannot be read: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(directory: Path) -> tuple[Path, Manifest]:
    """Check that an unpacked entry agrees with its manifest and its name."""
    found = Store(directory.parents[2]).verify(directory)
    if found.slug != directory.parent.name:
        raise CacheError(f"an entry of {found.slug} lies under {directory.parent.name}")
    return directory, found.manifest


def _is_only(found: list[tuple[Path, Manifest]], request: Request) -> bool:
    """Whether one entry was found, and answers `request`."""
    return [manifest.slug for _, manifest in found] == [request.spec.slug] and found[0][1].describes(request)


def _publish(store: Store, directory: Path, manifest: Manifest) -> Entry:
    """Rename a checked entry to its place in the store."""
    finished = store.new_staging()
    for file in directory.iterdir():
        file.rename(finished / file.name)
    entry = store.publish(finished, manifest)
    if store.root / "entries" not in entry.path.parents:
        raise CacheError(f"{store.root / 'entries'} cannot be written")
    return entry


def _open(source: Path | BinaryIO) -> tarfile.TarFile:
    return tarfile.open(source, "r:*") if isinstance(source, Path) else tarfile.open(fileobj=source, mode="r:")


def _unpack(archive: tarfile.TarFile, path: str, staging: Path) -> None:
    seen: dict[PurePosixPath, int] = {}
    total = 0
    for member, name in _members(archive, path):
        seen[name.parent] = seen.get(name.parent, 0) + 1
        total += member.size
        if seen[name.parent] > _MOST_FILES or member.size > _LARGEST_FILE or total > _MOST_BYTES:
            raise CacheError(f"the archive {path} is too large at {member.name[:200]!r}")
        source = archive.extractfile(member)
        assert source is not None  # because the member is a plain file
        target = staging / name
        for directory in reversed(name.parents[:-1]):
            (staging / directory).mkdir(exist_ok=True, mode=0o755)
        with target.open("xb") as file:  # fails if the archive has a name twice
            shutil.copyfileobj(source, file)
        target.chmod(0o644)


def _members(archive: tarfile.TarFile, path: str) -> Iterator[tuple[tarfile.TarInfo, PurePosixPath]]:
    """The files of an archive; CacheError at the first member that no archive of ours would have."""
    for member in archive:
        parts = member.name.split("/")
        sane = len(parts) == 4 and parts[0] == "entries" and all(_PART.fullmatch(part) for part in parts)
        if not sane or not member.isreg() or member.issparse():
            raise CacheError(
                f"the archive {path} is refused: expected plain files entries/SLUG/NAME/FILE, got {member.name[:200]!r}"
            )
        yield member, PurePosixPath(member.name)
