"""The artifact directories: complete or absent, checked before use, never rewritten.

    <root>/entries/<slug>/<request>-<compiler>/   manifest.json, the artifact, its source, the compiler's log
    <root>/locks/ slots/ staging/ logs/ quarantine/ compilers.json

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
from pathlib import Path
from typing import Any

from quire.errors import CacheError
from quire.jit import progress
from quire.jit.request import SCHEMA, Request, compiler_digest, parts_digest
from quire.jit.toolchain import Memory

__all__ = ["Entry", "Manifest", "Store"]

_MANIFEST = "manifest.json"
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Manifest:
    """What an entry says of itself."""

    schema: str
    slug: str
    target: str
    fields: dict[str, str | int]  #: the spec, flat: what a miss is explained with
    parts: dict[str, str]  #: the labelled parts of the key
    compiler: str  #: identity of the compiler
    entry: str  #: exported symbol
    warmup: str  #: `quire warmup` arguments that build exactly this variant
    artifact: str  #: file name
    size: int  #: bytes
    sha256: str
    facts: dict[str, int]  #: what the kernel says of itself: threads, shared memory, ...
    registers: int | None
    spills: int | None  #: bytes of spill stores and loads
    stack: int | None
    smem: int | None
    warnings: list[str]
    seconds: float  #: of the compile
    peak_bytes: int | None  #: resident set of the compiler, where known
    created: float  #: seconds since the epoch

    @classmethod
    def read(cls, text: str) -> Manifest:
        """From JSON; CacheError if it is not a manifest of this schema."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise CacheError(f"schema is {data['schema']!r}, expected {SCHEMA!r}")
            manifest = cls(**{name: data[name] for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(f"manifest is unreadable ({type(error).__name__}: {error})") from error
        if Path(manifest.artifact).name != manifest.artifact:
            raise CacheError(f"manifest names an artifact outside its directory: {manifest.artifact!r}")
        return manifest

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


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

    @property
    def size(self) -> int:
        """Bytes of all the entry's files."""
        return sum(file.stat().st_size for file in self.path.iterdir())


def _code_owners() -> frozenset[int]:
    """Users who can already run code here: ourselves, root, and whoever owns the installed library."""
    return frozenset({os.geteuid(), 0, os.stat(__file__).st_uid})  # noqa: PTH116


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
        """`private`: created with mode 0700 rather than 0755. `trusted_group`: tolerate group-writable entries.

        The latter is for directories installed beside our own code, which the same group could rewrite anyway.
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
            for name in ("entries", "locks", "slots", "staging", "logs"):
                (self.root / name).mkdir(exist_ok=True, mode=0o755)
                if not os.access(self.root / name, os.W_OK | os.X_OK):
                    return f"{name} is not writable"
            _check_trust(self.root / "entries", stat.S_ISDIR, shared_group=False)
        except (OSError, CacheError) as error:
            return str(error)
        return ""

    def find(self, request: Request, accepts: Callable[[str], bool], *, repair: bool = False) -> Entry | None:
        """The newest sound entry of `request` whose compiler digest `accepts`; None if there is none.

        What is damaged or untrusted is passed over with one warning; with `repair` (under the entry's lock) it is moved
        to the quarantine, so that a rebuild can take its place.
        """
        home = self.root / "entries" / request.spec.slug
        prefix = request.digest[:40] + "-"
        try:
            names = [name for name in os.listdir(home) if name.startswith(prefix)]  # noqa: PTH208
        except OSError:  # the slug has no directory, or it is not for us to read
            return None
        sound: list[Entry] = []
        for name in names:
            if not accepts(name[len(prefix) :]):
                continue
            try:
                entry = self.verify(home / name)
                if entry.manifest.parts != dict(request.parts):
                    raise CacheError("its manifest describes another request")
                sound.append(entry)
            except (CacheError, OSError) as error:
                self._refuse(home / name, str(error), repair=repair)
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
        if not (path / _MANIFEST).exists():
            raise CacheError("it has no manifest")
        _check_trust(path / _MANIFEST, stat.S_ISREG, shared_group=shared)
        manifest = Manifest.read((path / _MANIFEST).read_text())
        if path.name != f"{parts_digest(manifest.parts)[:40]}-{compiler_digest(manifest.compiler)}":
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
                yield path, Manifest.read((path / _MANIFEST).read_text())
            except (CacheError, OSError):  # verify() says what is wrong with it
                continue

    def paths(self) -> Iterator[Path]:
        """Every entry directory, sound or not, by slug."""
        home = self.root / "entries"
        if home.is_dir():
            for slug in sorted(home.iterdir()):
                if slug.is_dir():
                    yield from sorted(slug.iterdir())

    def total_bytes(self) -> int:
        """Bytes of all files under the root."""
        return sum(file.lstat().st_size for file in self.root.rglob("*") if file.is_file()) if self.root.is_dir() else 0

    def remove(self, path: Path) -> None:
        """Remove one entry: out of sight by one rename, then deleted. Whoever has it loaded keeps the mapping."""
        grave = self.root / "staging" / f"removed-{time.time_ns()}-{os.getpid()}"
        grave.parent.mkdir(parents=True, exist_ok=True)
        path.rename(grave)
        shutil.rmtree(grave)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()

    def problems(self) -> Iterator[tuple[Path, str]]:
        """(directory, what is wrong with it) of every entry that `verify` refuses."""
        for path in self.paths():
            try:
                self.verify(path)
            except (CacheError, OSError) as error:
                yield path, str(error)

    def gc(self, max_bytes: int) -> list[Path]:
        """Remove entries, unreadable ones first and then the oldest, until all of them take at most `max_bytes`.

        Age counts from the build: a hit writes nothing, so nobody knows when an entry was last used. Returns what went.
        """
        created = {path: manifest.created for path, manifest in self.manifests()}
        sizes = {path: sum(f.lstat().st_size for f in path.rglob("*") if f.is_file()) for path in self.paths()}
        total, removed = sum(sizes.values()), list[Path]()
        for path in sorted(sizes, key=lambda path: (created.get(path, 0.0), path)):
            if total <= max_bytes:
                break
            self.remove(path)
            total -= sizes[path]
            removed.append(path)
        return removed

    def clear(self) -> int:
        """Remove every entry, log and leftover; the number of entries removed. Locks stay: they may be held."""
        paths = list(self.paths())
        for path in paths:
            self.remove(path)
        for name in ("logs", "quarantine"):
            if (self.root / name).is_dir():
                shutil.rmtree(self.root / name)
        return len(paths)

    def lock_path(self, request: Request, compiler: str) -> Path:
        """The file whose lock the builder of this entry holds."""
        return self.root / "locks" / f"{request.spec.slug}.{request.entry_name(compiler)[:24]}.lock"

    def new_staging(self) -> Path:
        """A private directory on the root's file system; leftovers of killed builders are swept on the way."""
        staging = self.root / "staging"
        for leftover in staging.iterdir():
            try:
                if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(leftover, ignore_errors=True)
            except FileNotFoundError:  # its own builder was faster
                continue
        return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=staging))

    def publish(self, staging: Path, request: Request, manifest: Manifest) -> Entry:
        """Give the finished directory its name, at once and for good.

        If another builder was first, its entry is used; if that one cannot be seen or is not sound (a network file
        system may show either), it is moved away, and if even that fails, our own build serves this process from where
        it lies.
        """
        (staging / _MANIFEST).write_text(manifest.write())
        for file in staging.iterdir():
            file.chmod(0o644)
            _fsync(file)
        staging.chmod(0o755)
        _fsync(staging)
        final = self.root / "entries" / request.spec.slug / request.entry_name(manifest.compiler)
        for _ in range(2):
            self._make_home(final.parent)
            try:
                staging.rename(final)
            except OSError:
                if (entry := self._rival(final)) is not None:
                    return entry
                continue
            _fsync(final.parent)
            return Entry(final, manifest)
        progress.warn_once(f"{final} could not be published; this process uses {staging}")
        return Entry(staging, manifest)

    @staticmethod
    def _make_home(path: Path) -> None:
        """The directory of one slug, closed to other writers."""
        path.mkdir(exist_ok=True, mode=0o755)
        status = path.lstat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o022:
            path.chmod(0o755)

    def adopt(self, entry: Entry) -> bool:
        """Publish a verified entry that lies in this store's staging; False if it is there already."""
        final = self.root / "entries" / entry.slug / entry.path.name
        self._make_home(final.parent)
        for file in (*entry.path.iterdir(), entry.path):
            _fsync(file)
        for _ in range(2):
            try:
                entry.path.rename(final)
            except OSError:
                if self._rival(final) is not None:
                    return False
                continue
            _fsync(final.parent)
            return True
        raise CacheError(f"{final} could not be published")

    def _rival(self, final: Path) -> Entry | None:
        """The sound entry that stands where ours should go, or None after moving an unsound one away."""
        try:
            return self.verify(final)
        except (CacheError, OSError) as error:
            self._refuse(final, str(error), repair=True)
            return None


def manifest_dict(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain data, for `--json`."""
    return asdict(manifest)
