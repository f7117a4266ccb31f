"""Directories of cache entries. An entry is complete or absent, checked before use, and never rewritten.

    <root>/entries/<slug>/<request>-<toolchain>/   manifest.json, the artifact, its source, the compiler's log
    <root>/locks/ permits/ staging/ logs/ quarantine/ compilers.json

An entry is published by one rename of a finished directory, and then only read. Its validity depends on its name and
manifest, not on times or paths, so a cache may be copied, archived or mounted elsewhere. Entries are used only if
trusted users alone could have written them, from the root down (trust.py). The bytes that were hashed are loaded, so a
cache may be overwritten while processes use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from quire.errors import CacheError
from quire.jit import events, trust
from quire.jit.compilation import Memory
from quire.jit.trust import LARGEST_SIGNATURE, SIGNATURE, PrivateKey, TrustedKeys, subject_of_entry
from quire.jit.unit import SCHEMA, Request, is_slug, request_digest, toolchain_digest

_DIRECTORIES = ("entries", "locks", "permits", "staging", "logs", "quarantine")
_STALE_SECONDS = 3600.0
_LARGEST_FILE = 1 << 28  #: bytes of a file that a signature covers

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 1 << 20  #: bytes; a manifest usually has a few thousand

_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_NO_DIGEST = "0" * 64  #: takes the digest's place while the digest is computed


@dataclass(frozen=True)
class Manifest:
    """What an entry contains, which toolchain made it, and how the compile went."""

    schema: str
    slug: str
    target: str
    fields: dict[str, str]  #: the variant as the user spells it, for explaining a miss
    request: dict[str, str]  #: the labelled parts of the first half of the entry's name
    toolchain: dict[str, str]  #: the labelled parts of the second half
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
    def read(cls, data: str | bytes) -> Manifest:
        """Parse JSON; CacheError if it is not a manifest of this schema, or was changed."""
        try:
            text = data if isinstance(data, str) else data.decode()
            found = json.loads(text)
            if found["schema"] != SCHEMA:
                raise CacheError(f"schema is {found['schema']!r}, expected {SCHEMA!r}")
            if found["digest"] != _digest(text.replace(found["digest"], _NO_DIGEST)):
                raise CacheError("manifest has another digest than it says")
            for name, kind in _field_types().items():
                if not isinstance(found[name], kind):
                    raise TypeError(f"{name} is {str(found[name])[:80]!r}")
            manifest = cls(**{name: found[name] for name in _field_types()})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CacheError(f"manifest is unreadable ({type(error).__name__}: {error})") from error
        if _FILE.fullmatch(manifest.artifact) is None or not is_slug(manifest.slug):
            raise CacheError(
                f"manifest names no plain file or slug: {manifest.artifact[:80]!r}, {manifest.slug[:80]!r}"
            )
        return manifest

    def describes(self, request: Request) -> bool:
        """Whether the entry is of `request`, and exports the symbol of its spec."""
        spec = request.spec
        return (self.request, self.target, self.entry) == (dict(request.parts), spec.target, spec.entry)

    def write(self) -> str:
        """The manifest as JSON, with a digest of all of it."""
        text = json.dumps({**asdict(self), "digest": _NO_DIGEST}, indent=1, sort_keys=True) + "\n"
        return text.replace(_NO_DIGEST, _digest(text))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _field_types() -> dict[str, Any]:
    """The JSON type of each field of a manifest."""
    return {
        name: get_origin(hint) if get_origin(hint) in (dict, list) else hint
        for name, hint in get_type_hints(Manifest).items()
    }


def entry_name(request: Mapping[str, str], toolchain: Mapping[str, str]) -> str:
    """The directory name of the entry of a request and a toolchain."""
    return f"{request_digest(request)}-{toolchain_digest(toolchain)}"


@dataclass(frozen=True)
class Entry:
    """A published artifact that has passed every check."""

    path: Path
    manifest: Manifest
    image: bytes = field(default=b"", repr=False)  #: the cubin or host library, as checked, until it is loaded

    @property
    def slug(self) -> str:
        """The variant's readable name."""
        return self.manifest.slug

    @property
    def artifact(self) -> Path:
        """The file of the cubin or host library."""
        return self.path / self.manifest.artifact

    def without_image(self) -> Entry:
        """The same entry without the bytes of its artifact."""
        return replace(self, image=b"")


class Store:
    """A root directory of entries. The constructor does not touch the disk; `prepare` creates the root for a build."""

    def __init__(
        self, root: Path, *, readonly: bool = False, private: bool = False, trusted_group: bool = False,
        keys: Callable[[], TrustedKeys | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`private`: the root is created with mode 0700 rather than 0755. `trusted_group`: group-writable entries pass.

        `trusted_group` is for directories installed beside Quire's code, which the same group could rewrite anyway.
        `keys`: asked at each check; if it gives keys, only entries that one of them has signed pass.
        """
        self.root = root
        self.readonly = readonly
        self.memory = Memory(root / "compilers.json")
        self._private = private
        self._trusted_group = trusted_group
        self._keys = keys

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def _directory(self, *names: str) -> AbstractContextManager[int]:
        """A descriptor of the directory `names` below the root; CacheError if it must not be trusted."""
        return trust.directory(self.root, *names, shared_group=self._trusted_group)

    def prepare(self) -> str:
        """Make the root if need be. Returns why entries cannot be published in it, or "" if they can."""
        if self.readonly:
            return "it is read-only"
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700 if self._private else 0o755)
            with self._directory() as root:
                for name in _DIRECTORIES:
                    trust.make_directory(root, name)
                    if not os.access(name, os.W_OK | os.X_OK, dir_fd=root):
                        return f"{name} is not writable"
        except (OSError, CacheError) as error:
            return str(error)
        return ""

    def find(
        self, request: Request, toolchain: str | None, *, repair: bool = False, quiet: bool = False
    ) -> Entry | None:
        """The newest valid entry of `request` by the toolchain of this digest (None: by any toolchain), or None.

        A damaged or untrusted entry is skipped with one warning. With `repair` (under the entry's lock) it is moved
        to the quarantine, so that a rebuild can take its place. `quiet` leaves the warning to the call with `repair`
        that follows if nothing is found.
        """
        slug, prefix = request.spec.slug, f"{request.digest}-{toolchain or ''}"
        sound: list[Entry] = []
        bad: list[tuple[str, str]] = []
        try:
            with self._directory("entries", slug) as at:
                for name in trust.names(at):
                    if name.startswith(prefix):
                        self._judge(at, request, name, sound, bad)
        except OSError:  # the slug has no directory, or an unreadable one
            return None
        except CacheError as error:  # the slug's directory, or one above it, is not trusted
            bad.append(("", str(error)))
        for name, reason in bad if sound or not quiet else ():
            self._refuse(self.root / "entries" / slug / name, reason, repair=repair)
        return max(sound, key=lambda entry: (entry.manifest.created, entry.path.name), default=None)

    def _judge(self, at: int, request: Request, name: str, sound: list[Entry], bad: list[tuple[str, str]]) -> None:
        """Verify one entry of the slug's directory `at`, and append it to one of the lists."""
        try:
            entry = self._verify(at, request.spec.slug, name)
            if not entry.manifest.describes(request):
                raise CacheError("its manifest describes another request")
            sound.append(entry)
        except (CacheError, OSError) as error:
            bad.append((name, str(error)))

    def _refuse(self, path: Path, reason: str, *, repair: bool) -> None:
        if not os.path.lexists(path):  # another process has just moved it away
            return
        if self.readonly or not repair:
            events.warn_once(f"ignored the cache entry {path}: {reason}")
            return
        try:
            moved = self._move_away(path)
        except (OSError, CacheError) as error:
            events.warn_once(f"the cache entry {path} is unusable ({reason}) and cannot be moved away: {error}")
        else:
            events.warn_once(f"moved the cache entry {path} to {moved}: {reason}")

    def _move_away(self, path: Path) -> Path:
        """Move an entry, or a file with the name of a slug's directory, to the quarantine."""
        *slug, name = path.relative_to(self.root / "entries").parts
        target = f"{time.time_ns()}.{'.'.join((*slug, name))}"[:255]
        with self._directory("entries", *slug) as source, self._directory("quarantine") as quarantine:
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=quarantine)
        return self.root / "quarantine" / target

    def verify(self, path: Path) -> Entry:
        """The entry at `path`, its owner, modes and digests checked; CacheError says what is wrong."""
        with self._directory("entries", path.parent.name) as at:
            return self._verify(at, path.parent.name, path.name)

    def _verify(self, at: int, slug: str, name: str) -> Entry:
        """The entry `name` in the slug's directory `at`."""
        with trust.directory(at, name, shared_group=self._trusted_group) as inside:
            manifest = self._read_manifest(inside)
            if (slug, name) != (manifest.slug, entry_name(manifest.request, manifest.toolchain)):
                raise CacheError("its manifest does not belong to its name")
            if (keys := self._keys()) is not None:
                self._check_signature(inside, slug, name, keys)
            return Entry(self.root / "entries" / slug / name, manifest, self._read_image(inside, manifest))

    def _read_manifest(self, inside: int) -> Manifest:
        try:
            return Manifest.read(trust.read(inside, MANIFEST, LARGEST_MANIFEST, shared_group=self._trusted_group))
        except FileNotFoundError as error:
            raise CacheError("it has no manifest") from error

    def _read_image(self, inside: int, manifest: Manifest) -> bytes:
        """The artifact; CacheError if it is not the one that the manifest describes."""
        try:
            image = trust.read(inside, manifest.artifact, manifest.size, shared_group=self._trusted_group)
        except FileNotFoundError as error:
            raise CacheError("its artifact is missing") from error
        if len(image) != manifest.size:
            raise CacheError(f"its artifact has {len(image)} bytes, expected {manifest.size}")
        if hashlib.sha256(image).hexdigest() != manifest.sha256:
            raise CacheError("its artifact's sha256 is not the manifest's")
        return image

    def _check_signature(self, inside: int, slug: str, name: str, keys: TrustedKeys) -> str:
        """The name of the key that signed an open entry; CacheError says why its signature does not count."""
        try:
            line = trust.read(inside, SIGNATURE, LARGEST_SIGNATURE, shared_group=self._trusted_group)
        except FileNotFoundError:
            line = b""
        return keys.check(line.removesuffix(b"\n"), subject_of_entry(slug, name, self._files(inside)))

    def _files(self, inside: int) -> dict[str, bytes]:
        """The files of an open entry but its signature."""
        names = (name for name in trust.names(inside) if name != SIGNATURE)
        return {name: trust.read(inside, name, _LARGEST_FILE, shared_group=self._trusted_group) for name in names}

    def signer(self, path: Path, keys: TrustedKeys) -> str | None:
        """The name of the key that signed an entry; None if it is not signed. CacheError if the signature is wrong."""
        with self._directory("entries", path.parent.name, path.name) as inside:
            if SIGNATURE not in trust.names(inside):
                return None
            return self._check_signature(inside, path.parent.name, path.name, keys)

    def sign(self, path: Path, key: PrivateKey) -> None:
        """Verify an entry and sign it, in place of a signature that it may have."""
        Store(self.root, trusted_group=self._trusted_group).verify(path)  # whoever signed it before
        slug, name = path.parent.name, path.name
        with self._directory("entries", slug, name) as inside:
            trust.write(inside, SIGNATURE, key.sign(subject_of_entry(slug, name, self._files(inside))) + b"\n")

    def entries(self) -> Iterator[Entry]:
        """Every entry that passes `verify`, by slug; use `paths` to see the others too."""
        for path in self.paths():
            try:
                yield self.verify(path)
            except (CacheError, OSError) as error:
                events.warn_once(f"ignored the cache entry {path}: {error}")

    def manifests(self, slug: str | None = None) -> Iterator[tuple[Path, Manifest]]:
        """(directory, manifest) of every entry (of a slug) whose manifest can be read. Reads no artifact."""
        for path in self.paths(slug):
            try:
                with self._directory("entries", path.parent.name, path.name) as inside:
                    manifest = self._read_manifest(inside)
            except (CacheError, OSError):  # verify() says what is wrong with it
                continue
            yield path, manifest

    def slugs(self) -> list[str]:
        """The slugs that have entries, valid or not; CacheError if other users could have made them."""
        try:
            with self._directory("entries") as at:
                return sorted(trust.names(at))
        except OSError:  # missing or unreadable
            return []

    def paths(self, slug: str | None = None) -> Iterator[Path]:
        """Every entry directory (of a slug), valid or not; CacheError if other users could have made it."""
        for each in self.slugs() if slug is None else (slug,):
            with suppress(OSError):  # missing or unreadable
                yield from sorted((self.root / "entries" / each).iterdir())

    def total_bytes(self) -> int:
        """Bytes of all files under the root."""
        return sum(file.lstat().st_size for file in self.root.rglob("*") if file.is_file())

    def remove(self, path: Path) -> None:
        """Remove one entry: one rename, then deletion. Processes that have loaded the entry are not affected."""
        with self._directory("entries", path.parent.name) as at:
            self._discard(at, path.name)
        with suppress(OSError):  # it has other entries
            path.parent.rmdir()

    def _discard(self, at: int, name: str) -> None:
        """Remove a name from the directory `at`, by one rename, so that no process sees it half deleted."""
        removed = f"removed-{time.time_ns()}-{os.getpid()}"
        with self._directory() as root:
            trust.make_directory(root, "staging")
        with self._directory("staging") as staging:
            os.rename(name, removed, src_dir_fd=at, dst_dir_fd=staging)
            _delete(trust.path_of(staging, self.root / "staging") / removed)

    def problems(self) -> Iterator[tuple[Path, str]]:
        """(directory, what is wrong with it) of every entry that `verify` refuses."""
        for path in self.paths():
            try:
                self.verify(path)
            except (CacheError, OSError) as error:
                yield path, str(error)

    def clear(self) -> int:
        """Remove all but the locks, which may be held; returns the number of entries removed."""
        count = len(list(self.paths()))
        for name in ("entries", "logs", "quarantine"):
            with suppress(FileNotFoundError), self._directory(name) as at:
                for child in trust.names(at):
                    self._discard(at, child)
        return count

    def lock_path(self, request: Request) -> Path:
        """The file whose lock the builder of this request holds."""
        return self.root / "locks" / f"{request.spec.slug}.{request.digest[:24]}.lock"

    def new_staging(self) -> Path:
        """A new private directory on the root's file system. First removes those of killed builders."""
        with self._directory("staging") as at:
            staging = trust.path_of(at, self.root / "staging")
            for leftover in staging.iterdir():
                with suppress(FileNotFoundError):  # its builder removed it first
                    if time.time() - leftover.lstat().st_mtime > _STALE_SECONDS:
                        _delete(leftover)
            return self.root / "staging" / Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=staging)).name

    @contextmanager
    def inside(self, staging: Path) -> Iterator[Path]:
        """A path of the directory of `new_staging`, which nobody can redirect while the block runs."""
        with self._directory("staging", staging.name) as at:
            yield trust.path_of(at, staging)

    def publish(self, staging: Path, manifest: Manifest) -> Entry:
        """Rename the finished directory to its final name, and return its entry.

        If another builder was first, its entry is returned. If the directory cannot be renamed, this process uses it
        where it is.
        """
        with self._directory("staging", staging.name) as at:
            image = self._read_image(at, manifest)
            trust.write(at, MANIFEST, manifest.write().encode())
            trust.finish(at)
        final = self.root / "entries" / manifest.slug / entry_name(manifest.request, manifest.toolchain)
        try:
            return self._place(staging, final) or Entry(final, manifest, image)
        except CacheError as error:
            events.warn_once(f"{error}; this process uses {staging}")
            return Entry(staging, manifest, image)

    def _place(self, staging: Path, final: Path) -> Entry | None:
        """Rename a finished directory to `final`; returns the valid entry that is already there, if any.

        An entry there that is invalid or cannot be seen (both happen on network file systems) is moved away.
        CacheError if even that fails.
        """
        reason: OSError | None = None
        for _ in range(2):
            self._make_slug_directory(final.parent)
            with self._directory("staging") as source, self._directory("entries", final.parent.name) as target:
                try:
                    os.rename(staging.name, final.name, src_dir_fd=source, dst_dir_fd=target)
                    os.fsync(target)
                    return None
                except OSError as error:
                    reason = error
            if (existing := self._sound_entry(final)) is not None:
                return existing
        raise CacheError(f"{final} could not be published: {reason}")

    def _make_slug_directory(self, path: Path) -> None:
        """Make the directory of one slug, writable by us alone, in place of anything else with its name."""
        with self._directory("entries") as entries:
            try:
                trust.make_directory(entries, path.name)
            except CacheError as error:
                self._refuse(path, str(error), repair=True)
                trust.make_directory(entries, path.name)

    def _sound_entry(self, path: Path) -> Entry | None:
        """The entry at `path`, or None after moving an invalid one away."""
        try:
            return self.verify(path)
        except (CacheError, OSError) as error:
            self._refuse(path, str(error), repair=True)
            return None


def _delete(path: Path) -> None:
    """Delete a directory with all it holds, or a file or link; what cannot be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
