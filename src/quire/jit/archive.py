"""What carries compiled variants from one machine to another: tar archives of entries, lock files, which name them, and
the line before an archive in the shared tier, which says who wrote it.

Archives are reproducible: the same entries give the same bytes. Reading an archive trusts nothing: only plain files of
known names and sizes are unpacked, into a private directory, and each entry must pass every check of the store before
any is published. What is written and kept in memory is bounded, whatever the archive says.
"""

from __future__ import annotations

import gzip
import hmac
import io
import json
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeAlias, cast

from quire.errors import CacheError, ValidationError
from quire.jit.store import Entry, Manifest, Store, entry_name
from quire.jit.trust import PrivateKey, TrustedKeys, subject_of_object
from quire.jit.unit import Request

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_LARGEST_ENTRY = 1 << 28  #: bytes of its files
_MOST_FILES = 16  #: of an entry
_MOST_ENTRIES = 1 << 14
_MOST_BYTES = 1 << 34  #: of all files
_PIECE = 1 << 20  #: bytes that are copied at a time
#: What reading bytes that anybody wrote may raise.
_UNREADABLE = (
    tarfile.TarError, EOFError, zlib.error, OSError, ValueError, TypeError, LookupError, ArithmeticError,
    RecursionError, MemoryError,
)  # fmt: skip


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
        try:
            archive.addfile(member, io.BytesIO(data))
        except ValueError as error:
            raise CacheError(f"{entry.slug} does not fit an archive: {error}") from error


def import_entries(
    source: Path | BinaryIO, store: Store, *, only: Request | None = None, keys: TrustedKeys | None = None
) -> list[Entry]:
    """Publish the entries of an archive in `store`; CacheError, and nothing published, if any is invalid.

    A stream must not be compressed, so that it unpacks to no more than its size. With `only`, the archive must hold one
    entry, of this request. With `keys`, one of them must have signed each entry.
    """
    name = str(source) if isinstance(source, Path) else "(stream)"
    if reason := store.prepare():
        raise CacheError(f"{store.root} cannot be written: {reason}")
    staging = store.new_staging()
    try:
        with _open(source) as stream:
            most = _MOST_ENTRIES if only is None else 1
            sound = [_check(place, keys) for place in _unpack(stream, name, staging, most)]
        if only is not None and not _is_only(sound, only):
            raise CacheError(f"expected one entry of {only.spec.slug}, got {[found.slug for _, found in sound]}")
        return [_publish(store, directory, manifest) for directory, manifest in sound]
    except _UNREADABLE as error:
        raise CacheError(
            f"the archive {name} cannot be read: expected a file of `quire cache export`, got one with "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def verify_archive(path: Path, keys: TrustedKeys | None) -> list[tuple[str, str]]:
    """(SLUG/NAME, what is wrong with it, or "") of each entry of an archive; CacheError if it cannot be read on.

    Unpacked files are deleted again.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="quire-") as staging, _open(path) as stream:
        try:
            for place in _unpack(stream, str(path), Path(staging), _MOST_ENTRIES):
                reason = ""
                try:
                    _check(place, keys)
                except (CacheError, OSError) as error:
                    reason = str(error)
                found.append(("/".join(place.parts[-2:]), reason))
                shutil.rmtree(place)
                place.mkdir()  # so that a second entry of this name is refused
        except _UNREADABLE as error:
            raise CacheError(f"the archive {path} cannot be read: {type(error).__name__}: {error}") from error
    return found


def _check(directory: Path, keys: TrustedKeys | None) -> tuple[Path, Manifest]:
    """Check that an unpacked entry agrees with its manifest and its name, and that it is signed if there are keys."""
    found = Store(directory.parents[2], keys=lambda: keys).verify(directory)
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
    return entry.without_image()  # all images of an archive may be more than fits into memory


@contextmanager
def _open(source: Path | BinaryIO) -> Iterator[BinaryIO]:
    """The archive's bytes. Only a file may be compressed, by gzip as export_entries() does."""
    if not isinstance(source, Path):
        yield source
        return
    with source.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not is_compressed:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield cast("BinaryIO", unpacked)


def _unpack(stream: BinaryIO, path: str, staging: Path, most: int) -> Iterator[Path]:
    """Write the files of at most `most` entries under `staging`. Yields each directory before the next is read."""
    places = groupby(_members(stream, path), key=lambda member: PurePosixPath(member.name).parent)
    for count, (place, files) in enumerate(places):
        if count == most:
            raise CacheError(f"the archive {path} is refused: expected at most {most} entries")
        for directory in (staging / place.parent.parent, staging / place.parent):
            directory.mkdir(exist_ok=True, mode=0o755)
        (staging / place).mkdir(mode=0o755)  # fails if another entry lies between its files
        size = 0
        for number, member in enumerate(files):
            size += member.size
            if number == _MOST_FILES or size > _LARGEST_ENTRY:
                raise CacheError(f"the archive {path} is too large at {member.name[:200]!r}")
            _copy(stream, member.size, staging / member.name)
        yield staging / place


def _copy(stream: BinaryIO, size: int, target: Path) -> None:
    with target.open("xb") as file:  # fails if the archive has a name twice
        for done in range(0, size, _PIECE):
            file.write(_read(stream, min(_PIECE, size - done)))
    target.chmod(0o644)


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"it ends {size - len(data)} bytes too early")
    return data


def _members(stream: BinaryIO, path: str) -> Iterator[tarfile.TarInfo]:
    """The files of an archive, whose contents the caller reads; CacheError at the first that no archive of ours has.

    Only headers are read here. tarfile itself would read those that extend other headers (of pax and GNU tar), which
    may be as large as their writer wants, before it returned a member.
    """
    total = 0
    while any(block := _read(stream, tarfile.BLOCKSIZE)):
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        parts = member.name.split("/")
        sane = len(parts) == 4 and parts[0] == "entries" and all(_PART.fullmatch(part) for part in parts)
        if not sane or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            raise CacheError(
                f"the archive {path} is refused: expected plain files entries/SLUG/NAME/FILE, without headers of pax "
                f"or GNU tar, got {member.name[:200]!r} of type {member.type!r}"
            )
        total += member.size
        if total > _MOST_BYTES:
            raise CacheError(f"the archive {path} is too large at {member.name[:200]!r}")
        yield member
        if any(_read(stream, -member.size % tarfile.BLOCKSIZE)):
            raise CacheError(f"the archive {path} is refused: bytes behind {member.name[:200]!r} are not zero")
    if any(rest := stream.read(tarfile.RECORDSIZE + 1)) or len(rest) > tarfile.RECORDSIZE:
        raise CacheError(f"the archive {path} is refused: something follows its end")


# --- lock files ------------------------------------------------------------------------------------------------------

_LOCK = 1  #: the format of lock files


@dataclass(frozen=True)
class Pin:
    """An entry of a lock file."""

    slug: str
    name: str  #: of the entry: the digests of its request and its toolchain
    sha256: str  #: of its artifact
    compiler: str
    expression: str | None = None  #: of a custom variant, which the slug names by its digest

    @classmethod
    def of(cls, manifest: Manifest) -> Pin:
        """The pin of an entry."""
        toolchain = manifest.toolchain
        compiler = f"{toolchain.get('toolchain', '?')} {toolchain.get('version', '?').splitlines()[-1]}"
        name = entry_name(manifest.request, toolchain)
        return cls(manifest.slug, name, manifest.sha256, compiler, manifest.fields.get("expression"))

    def require(self, manifest: Manifest, place: str) -> None:
        """CacheError unless an entry is the pinned one."""
        found = Pin.of(manifest)
        if found.name != self.name:
            raise CacheError(
                f"the lock has the entry {self.name} by {self.compiler}, {place} has {found.name} by {found.compiler}; "
                "use that compiler or a cache that has the entry, or write the lock anew (quire warmup --lock)"
            )
        if found.sha256 != self.sha256:
            raise CacheError(
                f"the artifact of {self.name} has the sha256 {found.sha256} in {place}, {self.sha256} in the lock; if "
                "you know why, write the lock anew (quire warmup --lock)"
            )


def write_lock(path: Path, places: Mapping[str, str | None]) -> None:
    """Write the lock file of entries: for each slug the path of its entry. CacheError if one has none."""
    if missing := [slug for slug, place in places.items() if place is None]:
        raise CacheError(f"--lock: {path} is not written: there is no entry of {', '.join(missing)}.")
    entries = sorted(Path(place) for place in places.values() if place)
    pins = [Pin.of(Store(entry.parents[2], trusted_group=True).verify(entry).manifest) for entry in entries]
    pins.sort(key=lambda pin: pin.slug)
    text = json.dumps({"lock": _LOCK, "entries": [asdict(pin) for pin in pins]}, indent=1, sort_keys=True)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValidationError(f"--lock: {path} cannot be written: {error}.") from error


def read_lock(path: Path) -> dict[str, Pin]:
    """The pins of a lock file, by slug."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        pins = {pin["slug"]: Pin(**pin) for pin in found["entries"]}
        texts = [text for pin in pins.values() for text in (pin.slug, pin.name, pin.sha256, pin.compiler)]
        if found["lock"] != _LOCK or not texts or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"it has format {found['lock']!r} and {len(pins)} entries")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValidationError(
            f"--locked: expected a file of `quire warmup --lock` (format {_LOCK}), got {path}: {error}."
        ) from error
    return pins


# --- objects of the shared tier --------------------------------------------------------------------------------------

LEAST_SECRET = 16  #: bytes
_PLAIN = b"quire-object-1 "  #: then an HMAC in hexadecimal, or "unsigned"
_SIGNED = b"quire-object-2 "  #: then the line of a signature


@dataclass(frozen=True)
class Signatures:
    """The Ed25519 keys of a host: those that it trusts, and the one that it signs with, if it makes entries."""

    trusted: TrustedKeys
    private: PrivateKey | None = None

    @classmethod
    def read(cls, trusted: Path, private: Path | None) -> Signatures:
        """The keys of two files; ValidationError if a private key is given that this host does not trust."""
        found = cls(TrustedKeys.read(trusted), None if private is None else PrivateKey.read(private))
        if found.private is not None:
            found.trusted.require(found.private)
        return found


#: What objects of the shared tier are checked with: the secret of an HMAC, Ed25519 keys, or nothing.
Trust: TypeAlias = "bytes | Signatures | None"


def _head(trust: Trust, name: str, body: bytes) -> bytes:
    """The first line of an object, which says who wrote it."""
    if isinstance(trust, Signatures):
        if trust.private is None:
            raise CacheError("this host has no private key (QUIRE_SIGNING_KEY) to sign with")
        return _SIGNED + trust.private.sign(subject_of_object(name, body))
    if trust is None:
        return _PLAIN + b"unsigned"
    return _PLAIN + hmac.new(trust, name.encode() + b"\n" + body, "sha256").hexdigest().encode()


def sealed(trust: Trust, name: str, body: bytes) -> bytes:
    """The object of this name."""
    return _head(trust, name, body) + b"\n" + body


def opened(trust: Trust, name: str, data: bytes) -> bytes:
    """The body of an object; CacheError unless it was signed with a key of this host for this name."""
    head, newline, body = data.partition(b"\n")
    if not newline or not head.startswith((_PLAIN, _SIGNED)):
        raise CacheError("it is no object of Quire, or not a whole one")
    if isinstance(trust, Signatures):
        if not head.startswith(_SIGNED):
            raise CacheError(
                "it has an HMAC or no signature, expected an Ed25519 signature, since QUIRE_TRUSTED_KEYS is set. Have "
                "a host with QUIRE_SIGNING_KEY write it, under another URL"
            )
        trust.trusted.check(head[len(_SIGNED) :], subject_of_object(name, body))
    elif head.startswith(_SIGNED):
        raise CacheError("it has an Ed25519 signature: set QUIRE_TRUSTED_KEYS to the file of the public keys")
    elif trust is not None and not hmac.compare_digest(head, _head(trust, name, body)):
        raise CacheError("it is not signed with the key of QUIRE_SHARED_CACHE_KEY, or was changed")
    return body


def read_secret(path: Path) -> bytes:
    """The secret of QUIRE_SHARED_CACHE_KEY."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ValidationError(f"QUIRE_SHARED_CACHE_KEY: expected a file with a secret, got {path}: {error}") from error
    if len(secret) < LEAST_SECRET:
        raise ValidationError(
            f"QUIRE_SHARED_CACHE_KEY: expected at least {LEAST_SECRET} bytes in {path}, got {len(secret)}. "
            f"`openssl rand -hex 32 > {path}` makes a key"
        )
    return secret
