"""The artifact directories: complete or absent, checked before use, never rewritten.

    <root>/entries/<slug>/<request>-<toolchain>/   manifest.json, the artifact, its source, the compiler's log
    <root>/locks/ permits/ staging/ logs/ quarantine/ compilers.json

An entry is published by one rename of a finished directory and is only ever read after that. Everything an entry's
validity depends on is in its name and its manifest, nothing in its times or its path: a tree that was copied, archived
or mounted elsewhere is as good as the original.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from quire.errors import CacheError
from quire.jit import progress
from quire.jit.memory import Memory
from quire.jit.request import SCHEMA, Request, entry_name

_MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 1 << 20  #: bytes; ours take a few thousand
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Manifest:
    """What an entry is, who made it and how the compile went: its manifest.json."""

    schema: str
    slug: str
    target: str
    fields: dict[str, str]  #: the variant as the user writes it: what a miss is explained with
    request: dict[str, str]  #: the labelled parts of the first half of the entry's name
    toolchain: dict[str, str]  #: those of the second half
    entry: str  #: exported symbol
    warmup: str  #: `quire warmup` arguments that build exactly this variant
    artifact: str  #: file name
    size: int  #: bytes
    sha256: str
    exports: dict[str, int]  #: constants of the kernel: threads, shared memory, ...
    registers: int | None
    spills: int | None  #: bytes of spill stores and loads
    stack: int | None
    smem: int | None
    warnings: list[str]
    seconds: float  #: of the compile
    peak_bytes: int | None  #: resident set of the compiler, where known
    created: float  #: seconds since the epoch

    @classmethod
    def read(cls, text: str | bytes) -> Manifest:
        """From JSON; CacheError if it is not a manifest of this schema."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise CacheError(f"schema is {data['schema']!r}, expected {SCHEMA!r}")
            for name, kind in _field_types().items():
                if not isinstance(data[name], kind):
                    raise TypeError(f"{name} is {data[name]!r}")
            manifest = cls(**{name: data[name] for name in _field_types()})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CacheError(f"manifest is unreadable ({type(error).__name__}: {error})") from error
        if Path(manifest.artifact).name != manifest.artifact:
            raise CacheError(f"manifest names an artifact outside its directory: {manifest.artifact!r}")
        return manifest

    def describes(self, request: Request) -> bool:
        """Whether the entry answers `request`, and is called as its spec says."""
        spec = request.spec
        return (self.request, self.target, self.entry) == (dict(request.parts), spec.target, spec.entry)

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


@cache
def _field_types() -> dict[str, Any]:
    """What JSON must hold under each field of a manifest."""
    return {
        name: get_origin(hint) if get_origin(hint) in (dict, list) else hint
        for name, hint in get_type_hints(Manifest).items()
    }


@dataclass(frozen=True)
class Entry:
    """A published artifact that has passed every check."""

    path: Path
    manifest: Manifest

    @property
    def slug(self) -> str:
        """The variant's readable name."""
        return self.manifest.slug

    @property
    def artifact(self) -> Path:
        """The cubin or host library."""
        return self.path / self.manifest.artifact


def _code_owners() -> frozenset[int]:
    """Users who can already run code here: ourselves, root, and whoever owns the installed library."""
    return frozenset({os.geteuid(), 0, os.stat(__file__).st_uid})  # noqa: PTH116 - __file__ is a string


def _check_trust(path: Path, expect: Callable[[int], bool], *, shared_group: bool) -> None:
    """Refuse what another user could have written: loading an artifact is running its code."""
    status = path.lstat()
    if not expect(status.st_mode):
        raise CacheError(f"{path.name} is not a plain {'directory' if expect is stat.S_ISDIR else 'file'}")
    if status.st_uid not in _code_owners():
        raise CacheError(f"{path.name} belongs to user {status.st_uid}, expected {os.geteuid()} or root")
    # A group of the owner's own number is theirs alone, the custom of systems whose umask is 002.
    forbidden = stat.S_IWOTH if shared_group or status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP
    if status.st_mode & forbidden:
        raise CacheError(f"{path.name} may be written by others (mode {stat.S_IMODE(status.st_mode):04o})")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Store:
    """A root directory of entries. Making one touches nothing; `prepare` creates it, and only for a build."""

    def __init__(
        self, root: Path, *, readonly: bool = False, private: bool = False, trusted_group: bool = False
    ) -> None:
        """`private`: the root is created with mode 0700 rather than 0755. `trusted_group`: group-writable entries pass.

        `trusted_group` is for directories installed beside our own code, which the same group could rewrite anyway.
        """
        self.root = root
        self.readonly = readonly
        self.memory = Memory(root / "compilers.json")
        self._private = private
        self._trusted_group = trusted_group

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def prepare(self) -> str:
        """Make the root if need be. Returns why entries cannot be published in it, or an empty string if they can."""
        if self.readonly:
            return "it is read-only"
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700 if self._private else 0o755)
            for name in ("entries", "locks", "permits", "staging", "logs"):
                (self.root / name).mkdir(exist_ok=True, mode=0o755)
                if not os.access(self.root / name, os.W_OK | os.X_OK):
                    return f"{name} is not writable"
            _check_trust(self.root / "entries", stat.S_ISDIR, shared_group=False)
        except (OSError, CacheError) as error:
            return str(error)
        return ""

    def find(self, request: Request, toolchain: str | None, *, repair: bool = False) -> Entry | None:
        """The newest sound entry of `request` made by the toolchain of this digest (None: by any); None if none is.

        A damaged or untrusted entry is passed over with one warning. With `repair` (under the entry's lock) it is moved
        to the quarantine, so that a rebuild can take its place.
        """
        directory = self.root / "entries" / request.spec.slug
        prefix = f"{request.digest}-{toolchain or ''}"
        try:
            names = [name for name in os.listdir(directory) if name.startswith(prefix)]  # noqa: PTH208 - on every miss of memory; names are enough
        except OSError:  # the slug has no directory, or it is not for us to read
            return None
        sound: list[Entry] = []
        for name in names:
            try:
                entry = self.verify(directory / name)
                if not entry.manifest.describes(request):
                    raise CacheError("its manifest describes another request")
                sound.append(entry)
            except (CacheError, OSError) as error:
                self._refuse(directory / name, str(error), repair=repair)
        return max(sound, key=lambda entry: (entry.manifest.created, entry.path.name), default=None)

    def _refuse(self, path: Path, reason: str, *, repair: bool) -> None:
        if not path.exists():  # another process is just repairing it
            return
        if self.readonly or not repair:
            progress.warn_once(f"ignored the cache entry {path}: {reason}")
            return
        quarantine = self.root / "quarantine"
        quarantine.mkdir(exist_ok=True)
        target = quarantine / f"{path.parent.name}.{path.name}.{time.time_ns()}"
        try:
            path.rename(target)
        except OSError as error:
            progress.warn_once(f"the cache entry {path} is unusable ({reason}) and cannot be moved away: {error}")
        else:
            progress.warn_once(f"moved the cache entry {path} to {target}: {reason}")

    def verify(self, path: Path) -> Entry:
        """The entry at `path`, its owner, modes and digests checked; CacheError says what is wrong."""
        shared = self._trusted_group
        for directory in (
            path,
            path.parent,
            path.parent.parent,
        ):  # whoever may write one could exchange what we checked
            _check_trust(directory, stat.S_ISDIR, shared_group=shared)
        manifest = self._read_manifest(path)
        if path.name != entry_name(manifest.request, manifest.toolchain):
            raise CacheError("its manifest does not belong to its name")
        artifact = path / manifest.artifact
        if not artifact.exists():
            raise CacheError("its artifact is missing")
        _check_trust(artifact, stat.S_ISREG, shared_group=shared)
        data = artifact.read_bytes()
        if len(data) != manifest.size:
            raise CacheError(f"its artifact has {len(data)} bytes, expected {manifest.size}")
        if hashlib.sha256(data).hexdigest() != manifest.sha256:
            raise CacheError("its artifact's sha256 is not the manifest's")
        return Entry(path, manifest)

    def _read_manifest(self, path: Path) -> Manifest:
        """The manifest in the entry directory `path`; CacheError if there is none in a plain file of our own."""
        file = path / _MANIFEST
        if not file.exists():
            raise CacheError("it has no manifest")
        _check_trust(file, stat.S_ISREG, shared_group=self._trusted_group)
        if file.stat().st_size > _LARGEST_MANIFEST:
            raise CacheError(f"its manifest has {file.stat().st_size} bytes, expected at most {_LARGEST_MANIFEST}")
        return Manifest.read(file.read_bytes())

    def entries(self) -> Iterator[Entry]:
        """Every entry that passes `verify`, by slug; use `paths` to see the others too."""
        for path in self.paths():
            try:
                yield self.verify(path)
            except (CacheError, OSError) as error:
                progress.warn_once(f"ignored the cache entry {path}: {error}")

    def manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """(directory, manifest) of every entry whose manifest can be read, without reading the artifacts."""
        for path in self.paths():
            try:
                yield path, self._read_manifest(path)
            except (CacheError, OSError):  # verify() says what is wrong with it
                continue

    def paths(self) -> Iterator[Path]:
        """Every entry directory, sound or not, by slug."""
        entries = self.root / "entries"
        if os.path.isdir(entries):  # noqa: PTH112 - False where we may not read
            for slug in sorted(entries.iterdir()):
                if slug.is_dir():
                    yield from sorted(slug.iterdir())

    def total_bytes(self) -> int:
        """Bytes of all files under the root."""
        return sum(file.lstat().st_size for file in self.root.rglob("*") if file.is_file()) if self.root.is_dir() else 0

    def remove(self, path: Path) -> None:
        """Remove one entry: one rename, then deletion. A process that has loaded the entry keeps its mapping."""
        removed = self.root / "staging" / f"removed-{time.time_ns()}-{os.getpid()}"
        removed.parent.mkdir(parents=True, exist_ok=True)
        path.rename(removed)
        shutil.rmtree(removed)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()

    def problems(self) -> Iterator[tuple[Path, str]]:
        """(directory, what is wrong with it) of every entry that `verify` refuses."""
        for path in self.paths():
            try:
                self.verify(path)
            except (CacheError, OSError) as error:
                yield path, str(error)

    def clear(self) -> int:
        """Remove every entry, log and leftover; the number of entries removed. Locks stay: they may be held."""
        paths = list(self.paths())
        for path in paths:
            self.remove(path)
        for name in ("logs", "quarantine"):
            if (self.root / name).is_dir():
                shutil.rmtree(self.root / name)
        return len(paths)

    def lock_path(self, request: Request) -> Path:
        """The file whose lock the builder of this request holds."""
        return self.root / "locks" / f"{request.spec.slug}.{request.digest[:24]}.lock"

    def new_staging(self) -> Path:
        """A new private directory on the root's file system. Leftovers of killed builders are removed first."""
        staging = self.root / "staging"
        for leftover in staging.iterdir():
            try:
                if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)
            except FileNotFoundError:  # the leftover's own builder removed it first
                continue
        return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=staging))

    def publish(self, staging: Path, manifest: Manifest) -> Entry:
        """Give the finished directory its name, at once and for good.

        If another builder was first, its entry is used. If the directory cannot be renamed at all, our own build serves
        this process from where it lies.
        """
        (staging / _MANIFEST).write_text(manifest.write())
        for file in staging.iterdir():
            file.chmod(0o644)
        staging.chmod(0o755)
        final = self.root / "entries" / manifest.slug / entry_name(manifest.request, manifest.toolchain)
        try:
            return self._place(staging, final) or Entry(final, manifest)
        except CacheError as error:
            progress.warn_once(f"{error}; this process uses {staging}")
            return Entry(staging, manifest)

    def _place(self, directory: Path, final: Path) -> Entry | None:
        """Rename a finished directory to `final`; returns the sound entry that stands there already, if one does.

        An entry that stands there but cannot be seen or is not sound (a network file system may show either) is moved
        away. CacheError if even that fails.
        """
        for file in (*directory.iterdir(), directory):
            _fsync(file)
        for _ in range(2):
            self._make_slug_directory(final.parent)
            try:
                directory.rename(final)
            except OSError:
                if (existing := self._sound_entry(final)) is not None:
                    return existing
                continue
            _fsync(final.parent)
            return None
        raise CacheError(f"{final} could not be published")

    @staticmethod
    def _make_slug_directory(path: Path) -> None:
        """Make the directory of one slug, closed to other writers."""
        path.mkdir(exist_ok=True, mode=0o755)
        status = path.lstat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o022:
            path.chmod(0o755)

    def _sound_entry(self, path: Path) -> Entry | None:
        """The entry at `path`, or None after moving away one that is not sound."""
        try:
            return self.verify(path)
        except (CacheError, OSError) as error:
            self._refuse(path, str(error), repair=True)
            return None
