"""Whom an artifact is taken from, because loading it runs its code: owners and modes of files, and signatures.

Below a root, each name is opened relative to the descriptor of the directory above it, without following links, and the
open descriptor is checked. A file can therefore not be exchanged between its check and its use.

Signatures are made with Ed25519, and public keys check them. An entry's signature lies in it as the file `signature`,
one line: `quire-signature-1 KEY BASE64`. The signed text names the key, the entry (slug and name, and with them request
and toolchain) and the sha256 of each of its other files, so that a signature fits no other entry. It is made anew from
what is checked: of the file only the name of the key and the 64 bytes are read. An object of the shared tier has such a
line too, over the object's name and all its bytes (archive.py).

A file of public keys has one line for each: `ed25519 KEY BASE64`, and `expires=YYYY-MM-DD` behind it if the key is good
until the end of that day (UTC). After `#` stands a comment. A private key's file has one line: `ed25519-private KEY
BASE64`. KEY is the name that the keys' maker chose.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime, timezone
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from quire.errors import CacheError, ValidationError
from quire.jit import config

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: opening a pipe does not wait for its other end


@cache
def _owner_of_the_library() -> int:
    return Path(__file__).stat().st_uid


def _check(descriptor: int, name: str, *, shared_group: bool, sticky: bool = False) -> os.stat_result:
    """Refuse what another user could have written. With `sticky`, a directory like /tmp passes."""
    status = os.fstat(descriptor)
    if status.st_uid not in (os.geteuid(), 0, _owner_of_the_library()):  # these users can run code here anyway
        raise CacheError(f"{name} belongs to user {status.st_uid}, expected {os.geteuid()} or root")
    # A group with the owner's number has no other members on systems whose umask is 002.
    forbidden = stat.S_IWOTH if shared_group or status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP
    if status.st_mode & forbidden and not (sticky and status.st_mode & stat.S_ISVTX):
        raise CacheError(f"{name} may be written by others (mode {stat.S_IMODE(status.st_mode):04o})")
    return status


def _open(directory: int, name: str, flags: int, mode: int = 0) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=directory)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
            raise
        raise CacheError(f"{name} is not a plain {'directory' if flags & os.O_DIRECTORY else 'file'}") from error


@contextmanager
def directory(root: Path | int, *names: str, shared_group: bool = False) -> Iterator[int]:
    """A descriptor of the directory `names` below `root`. CacheError if others could have written into one of them.

    The path of a root may contain links, since the user chose it. A root that is a descriptor was checked before. With
    `shared_group`, directories may be writable by their group.
    """
    at = os.dup(root) if isinstance(root, int) else os.open(root, _DIRECTORY)
    try:
        if isinstance(root, Path):
            _check(at, root.name, shared_group=shared_group, sticky=True)
        for name in names:
            below = _open(at, name, _DIRECTORY | os.O_NOFOLLOW)
            os.close(at)
            at = below
            _check(at, name, shared_group=shared_group)
        yield at
    finally:
        os.close(at)


def make_directory(at: int, name: str) -> None:
    """Make sure that `name` is a directory that only this user can write, or raise CacheError."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=at)
    below = _open(at, name, _DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(below).st_uid == os.geteuid() and os.fstat(below).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            os.fchmod(below, 0o755)  # created with another umask, or copied
        _check(below, name, shared_group=False)
    finally:
        os.close(below)


def read(at: int, name: str, limit: int, *, shared_group: bool = False) -> bytes:
    """The content of the plain file `name` of at most `limit` bytes; CacheError if others could have written it.

    With `shared_group` (directories installed beside Quire) it may be a link, as in the Hugging Face Hub's cache.
    """
    flags = os.O_RDONLY | (_FILE & ~os.O_NOFOLLOW if shared_group else _FILE)
    with open(_open(at, name, flags), "rb", buffering=0) as file:
        status = _check(file.fileno(), name, shared_group=shared_group)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{name} is not a plain file")
        if status.st_size > limit:
            raise CacheError(f"{name} has {status.st_size} bytes, expected at most {limit}")
        return file.read()


def read_file(path: Path, limit: int, *, private: bool = False) -> bytes:
    """The content of a plain file that the user named, also by a link; CacheError if others could have written it.

    With `private`, also if others could read it. Its directory is the user's choice, as a root is.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = _check(file.fileno(), path.name, shared_group=False)
        if private and status.st_mode & stat.S_IROTH:
            raise CacheError(f"{path.name} may be read by others (mode {stat.S_IMODE(status.st_mode):04o})")
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise CacheError(f"{path.name} is not a plain file of at most {limit} bytes")
        return file.read()


def write(at: int, name: str, data: bytes) -> None:
    """Replace the file `name` by one rename. The old file is not written to."""
    unfinished = f"{name}.{os.getpid()}.{threading.get_ident()}"
    with suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=at)
    try:
        with open(_open(at, unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o644), "wb") as file:
            file.write(data)
        os.rename(unfinished, name, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=at)
        raise


def names(at: int) -> list[str]:
    """The names in an open directory."""
    return os.listdir(at)


def finish(at: int) -> None:
    """Make the files of a directory readable for all and writable for their owner, and sync them to the disk."""
    for name in names(at):
        with open(_open(at, name, os.O_RDONLY | _FILE), "rb") as file:
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
    os.fchmod(at, 0o755)
    os.fsync(at)


def open_lock(at: int, name: str) -> int:
    """A descriptor of the lock file `name`, which is created if it is missing."""
    descriptor = _open(at, name, os.O_RDWR | os.O_CREAT | _FILE, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CacheError(f"{name} is not a plain file")
    return descriptor


def path_of(descriptor: int, name: Path) -> Path:
    """A path of an open directory that stays valid if the directory is renamed; without /proc, its `name`.

    The path is valid in this process, and as the working directory of a child that it starts.
    """
    path = Path(f"/proc/self/fd/{descriptor}")
    return path if path.exists() else name


# --- signatures ------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE = "signature"  #: the file in an entry
LARGEST_SIGNATURE = 512  #: bytes of the line
_FORMAT = "quire-signature-1"
_PUBLIC, _PRIVATE = "ed25519", "ed25519-private"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LARGEST_KEYS = 1 << 16  #: bytes of a file of keys


def _ed25519(setting: str) -> ModuleType:
    """The library; ValidationError if it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ValidationError(
            f'{setting}: expected the package cryptography, got "{error}". '
            '`pip install "quire-attention[signing]"` installs it'
        ) from error
    return ed25519


@dataclass(frozen=True)
class PublicKey:
    """One key of a file of public keys."""

    name: str
    raw: bytes  #: 32 bytes
    expires: date | None = None  #: its last day, UTC

    def days_left(self) -> int | None:
        """Days until the last one on which it is good, negative after it; None if it does not expire."""
        return None if self.expires is None else (self.expires - _today()).days

    def expiry(self) -> str:
        """`expired on` its last day, once that is over; else nothing."""
        is_over = self.expires is not None and self.expires < _today()
        return f"expired on {self.expires}" if is_over else ""

    def line(self) -> str:
        """The key's line in a file."""
        last = f" expires={self.expires.isoformat()}" if self.expires else ""
        return f"{_PUBLIC} {self.name} {base64.b64encode(self.raw).decode()}{last}"


@dataclass(frozen=True)
class PrivateKey:
    """The key that signs."""

    name: str
    _key: Ed25519PrivateKey

    @classmethod
    def generate(cls, name: str) -> PrivateKey:
        """A new key; ValidationError if the name is none."""
        return cls(_name(name, "--id"), _ed25519("keygen").Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path, setting: str = "QUIRE_SIGNING_KEY") -> PrivateKey:
        """The key of a file, which others must not be able to read."""
        words = _read_keys(path, setting, private=True).split()
        if len(words) != 3 or words[0] != _PRIVATE:
            raise ValidationError(
                f"{setting}: expected one line `{_PRIVATE} KEY BASE64` in {path}, got something else. "
                f"`quire cache keygen {path}` makes such a file where there is none"
            )
        raw = _decoded(words[2], 32, f"{setting}: {path}")
        return cls(_name(words[1], setting), _ed25519(setting).Ed25519PrivateKey.from_private_bytes(raw))

    @property
    def public(self) -> PublicKey:
        """The public half."""
        return PublicKey(self.name, self._key.public_key().public_bytes_raw())

    def write(self, path: Path, expires: date | None) -> Path:
        """Write the private key to the new file `path`, and the public one to `path`.pub. Returns the latter's path."""
        public = path.with_name(f"{path.name}.pub")
        secret = base64.b64encode(self._key.private_bytes_raw()).decode()
        for file, mode, text in (
            (path, 0o600, f"{_PRIVATE} {self.name} {secret}\n"),
            (public, 0o644, PublicKey(self.name, self.public.raw, expires).line() + "\n"),
        ):
            try:
                descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except OSError as error:
                raise ValidationError(f"keygen: expected a new file, got {file}: {error}; keys are kept") from error
            with os.fdopen(descriptor, "w", encoding="ascii") as written:
                written.write(text)
        return public

    def sign(self, subject: bytes) -> bytes:
        """The line of a signature of `subject`, without its end."""
        made = base64.b64encode(self._key.sign(_text(self.name, subject))).decode()
        return f"{_FORMAT} {self.name} {made}".encode()


@dataclass(frozen=True)
class TrustedKeys:
    """The public keys of a file."""

    source: str  #: what holds them, for messages
    keys: Mapping[str, PublicKey]

    @classmethod
    def read(cls, path: Path, setting: str = "QUIRE_TRUSTED_KEYS") -> TrustedKeys:
        """The keys of a file that trusted users alone could have written; ValidationError says what is wrong."""
        _ed25519(setting)
        found: dict[str, PublicKey] = {}
        for number, line in enumerate(_read_keys(path, setting).splitlines(), 1):
            if words := line.partition("#")[0].split():
                key = _public(words, f"{setting}: {path}:{number}")
                if key.name in found:
                    raise ValidationError(f"{setting}: expected each key once, got {key.name!r} twice in {path}")
                found[key.name] = key
        if not found:
            raise ValidationError(f"{setting}: expected lines `{_PUBLIC} KEY BASE64` in {path}, got none")
        return cls(str(path), found)

    def check(self, signature: bytes, subject: bytes) -> str:
        """The name of the key that signed `subject`; CacheError says why the signature does not count."""
        words = signature.decode("ascii", "replace").split(" ")
        if not signature.strip():
            raise CacheError(f"it is not signed; expected a signature by {self._names()}. {_SIGN}")
        if words[0] != _FORMAT:
            raise CacheError(f"its signature has the format {words[0][:40]!r}, expected {_FORMAT}. {_SIGN}")
        if len(words) != 3 or _NAME.fullmatch(words[1]) is None:
            raise CacheError(f"its signature is damaged: expected `{_FORMAT} KEY BASE64`. {_SIGN}")
        key = self.keys.get(words[1])
        if key is None:
            raise CacheError(
                f"it is signed by the unknown key {words[1]!r}; expected {self._names()}. If you trust that key, add "
                f"its line to {self.source}; if not, do not use this"
            )
        if expiry := key.expiry():
            raise CacheError(
                f"it is signed by the key {key.name!r}, which {expiry}. Have it signed again with a current key: "
                "`quire cache sign`"
            )
        if not _fits(key, words[2], _text(key.name, subject)):
            raise CacheError(
                f"its signature by {key.name!r} does not fit: it was made for something else or by another key of "
                "that name, or the content was changed. Fetch it again from whoever made it"
            )
        return key.name

    def require(self, private: PrivateKey) -> None:
        """ValidationError unless the public half of `private` is among the keys and has not expired."""
        mine = self.keys.get(private.name)
        if mine is None or mine.raw != private.public.raw:
            raise ValidationError(
                f"QUIRE_SIGNING_KEY: expected the public half of the key {private.name!r} in {self.source}, or what "
                f"is signed here could not be read here; add the line of its .pub file, {private.public.line()}"
            )
        if expiry := mine.expiry():
            raise ValidationError(
                f"QUIRE_SIGNING_KEY: the key {private.name!r} {expiry} by {self.source}; make another with "
                "`quire cache keygen`, and give its public half to all readers first"
            )

    def _names(self) -> str:
        return f"one of the keys {', '.join(self.keys)} of {self.source}"


_SIGN = "Whoever made it can sign it: `quire cache sign`"


def subject_of_entry(slug: str, name: str, files: Mapping[str, bytes]) -> bytes:
    """What is signed of an entry: its slug and name, and the digest of each of its files but the signature."""
    digests = (f"{file} {hashlib.sha256(files[file]).hexdigest()}\n" for file in sorted(files) if file != SIGNATURE)
    return f"entry {slug}/{name}\n{''.join(digests)}".encode()


def subject_of_object(name: str, body: bytes) -> bytes:
    """What is signed of an object of the shared tier."""
    return f"object {name} {hashlib.sha256(body).hexdigest()}\n".encode()


def subject_of_file(name: str, data: bytes) -> bytes:
    """What is signed of a file of a release."""
    return f"file {name} {hashlib.sha256(data).hexdigest()}\n".encode()


def trusted_keys() -> TrustedKeys | None:
    """The keys of QUIRE_TRUSTED_KEYS, as they are now; None if it is unset."""
    path = config.trusted_keys()
    return None if path is None else TrustedKeys.read(path)


def signing_key() -> PrivateKey | None:
    """The key of QUIRE_SIGNING_KEY; None if it is unset."""
    path = config.signing_key()
    return None if path is None else PrivateKey.read(path)


def parse_date(text: str, place: str = "--expires") -> date:
    """A date YYYY-MM-DD."""
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ValidationError(f"{place}: expected a date YYYY-MM-DD, got {text!r}") from error


def _today() -> date:
    return datetime.now(timezone.utc).date()


def _text(name: str, subject: bytes) -> bytes:
    """The bytes under a signature: nothing else that a key might sign begins so."""
    return f"{_FORMAT}\nkey {name}\n".encode() + subject


def _fits(key: PublicKey, signature: str, text: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        made = _decoded(signature, 64, "signature")
        _ed25519("QUIRE_TRUSTED_KEYS").Ed25519PublicKey.from_public_bytes(key.raw).verify(made, text)
    except (InvalidSignature, ValidationError):
        return False
    return True


def _decoded(text: str, size: int, place: str) -> bytes:
    """The `size` bytes that `text` is the one spelling of in base64."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != size or base64.b64encode(raw).decode() != text:
        raise ValidationError(f"{place}: expected {size} bytes in base64, got {len(text)} other characters")
    return raw


def _name(text: str, setting: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValidationError(f"{setting}: expected a key's name of letters, digits, '.', '_' and '-', got {text!r}")
    return text


def _public(words: list[str], place: str) -> PublicKey:
    last = words[3].removeprefix("expires=") if len(words) == 4 and words[3].startswith("expires=") else None
    if len(words) - (last is not None) != 3 or words[0] != _PUBLIC:
        got = words[0] if words[0] == _PRIVATE else " ".join(words)[:80]
        raise ValidationError(f"{place}: expected `{_PUBLIC} KEY BASE64 [expires=YYYY-MM-DD]`, got {got!r}")
    raw = _decoded(words[2], 32, place)
    return PublicKey(_name(words[1], place), raw, None if last is None else parse_date(last, place))


def _read_keys(path: Path, setting: str, *, private: bool = False) -> str:
    try:
        return read_file(path, _LARGEST_KEYS, private=private).decode()
    except (OSError, UnicodeDecodeError, CacheError) as error:
        kind = "a private key that you alone can read" if private else "a file of public keys that you alone can write"
        raise ValidationError(f"{setting}: expected {kind}, got {path}: {error}") from error
