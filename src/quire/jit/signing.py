"""Signatures of entries and objects: Ed25519, which public keys check, and HMAC, for which all hosts have one secret.

An entry's signature lies in it as the file `signature`, one line: `quire-signature-1 KEY BASE64`. The signed text names
the key, the entry (slug and name, and with them request and toolchain) and the sha256 of each of its other files, so
that a signature fits no other entry. It is made anew from what is checked: of the file only the name of the key and the
64 bytes are read. An object of the shared tier has such a line too, over the object's name and all its bytes.

A file of public keys has one line for each: `ed25519 KEY BASE64`, and `expires=YYYY-MM-DD` behind it if the key is good
until the end of that day (UTC). After `#` stands a comment. A private key's file has one line: `ed25519-private KEY
BASE64`. KEY is the name that the keys' maker chose.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from quire.errors import CacheError, ValidationError
from quire.jit import config, trust

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE = "signature"  #: the file in an entry
LARGEST_SIGNATURE = 512  #: bytes of the line
_FORMAT = "quire-signature-1"
_PUBLIC, _PRIVATE = "ed25519", "ed25519-private"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LARGEST_FILE = 1 << 16  #: bytes of a file of keys
LEAST_SECRET = 16  #: bytes
_PLAIN = b"quire-object-1 "  #: then an HMAC in hexadecimal, or "unsigned"
_SIGNED = b"quire-object-2 "  #: then the line of a signature


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
        words = _read_file(path, setting, private=True).split()
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
        for number, line in enumerate(_read_file(path, setting).splitlines(), 1):
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
        if key.expires is not None and (key.days_left() or 0) < 0:
            raise CacheError(
                f"it is signed by the key {key.name!r}, which expired on {key.expires.isoformat()}. Have it signed "
                "again with a current key: `quire cache sign`"
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
        if mine.expires is not None and (mine.days_left() or 0) < 0:
            raise ValidationError(
                f"QUIRE_SIGNING_KEY: the key {private.name!r} expired on {mine.expires.isoformat()} by {self.source}; "
                "make another with `quire cache keygen`, and give its public half to all readers first"
            )

    def _names(self) -> str:
        return f"one of the keys {', '.join(self.keys)} of {self.source}"


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


def _read_file(path: Path, setting: str, *, private: bool = False) -> str:
    try:
        return trust.read_file(path, _LARGEST_FILE, private=private).decode()
    except (OSError, UnicodeDecodeError, CacheError) as error:
        kind = "a private key that you alone can read" if private else "a file of public keys that you alone can write"
        raise ValidationError(f"{setting}: expected {kind}, got {path}: {error}") from error
