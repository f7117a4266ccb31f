"""The remote cache (tier): hosts share compiled variants through an HTTP server or any fsspec URL.

An object is one entry as an archive (archive.py), behind a line with its signature. Its two names are sha256 digests in
hexadecimal, as Bazel's servers require: of the request and the toolchain, and of the request alone, for hosts
that accept any toolchain. Objects are added and never overwritten.

The tier is asked only after a miss in every local store. An object that passes the checks of `quire cache import` is
published in the user's cache, where the next process finds it. Each operation has a time limit. Any error is a miss. A
server that has failed is not asked again for a while.

A host that is about to compile adds a claim. Another host that finds a recent claim waits a little for it. One that
finds only old claims adds the next one, which one host does first where the storage creates objects atomically. Claims
only save work: a host that has waited too long, or cannot claim, compiles, and the first object keeps the name.
"""

from __future__ import annotations

import hashlib
import io
import re
import tempfile
import threading
import time
import urllib.request
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit

from quire.errors import CacheError, ValidationError
from quire.jit import config, events
from quire.jit.archive import Signatures, Trust, import_entries, opened, pack, read_secret, sealed
from quire.jit.store import Entry, Manifest, Store
from quire.jit.unit import Request, request_digest, toolchain_digest

LIMIT_SECONDS = 5.0  #: of one operation
RETRY_SECONDS = 60.0  #: before a server that has failed is asked again
PATIENCE_SECONDS = 5.0  #: to wait for another host's compile
CLAIM_SECONDS = 60.0  #: age at which a claim expires
LARGEST_OBJECT = 1 << 26  #: bytes

_POLL_SECONDS = 0.1
_MOST_CLAIMS = 16  #: of a variant: each host looks at those that came before
_OBJECT = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


class _Remote(Protocol):
    """Storage of objects."""

    def read(self, name: str) -> bytes | None:
        """The object; some other bytes if it is larger than LARGEST_OBJECT; None if there is none."""

    def add(self, name: str, data: bytes) -> bool:
        """Write the object unless the name exists; returns whether it was written."""

    def replace(self, name: str, data: bytes) -> None:
        """Write the object in place of the one of this name."""

    def names(self) -> list[str] | None:
        """The names of all objects; None if the storage does not tell."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that a password goes only to the server that it was given for."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _HttpServer:
    """GET, HEAD and PUT of one object, as servers of Bazel, sccache and WebDAV accept them."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        login, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit(parts._replace(netloc=host)).rstrip("/")
        self._headers = {"Authorization": f"Basic {b64encode(unquote(login).encode()).decode()}"} if login else {}
        self._opener = urllib.request.build_opener(_NoRedirect)

    def _ask(self, method: str, name: str, data: bytes | None = None, **headers: str) -> bytes | None:
        headers = {name.replace("_", "-"): value for name, value in headers.items()} | self._headers
        request = urllib.request.Request(f"{self._url}/{name}", data, headers, method=method)
        try:
            with self._opener.open(request, timeout=LIMIT_SECONDS) as answer:
                return bytes(answer.read(LARGEST_OBJECT + 1))
        except HTTPError as error:
            error.close()
            if error.code in (404, 410) and method != "PUT":
                return None
            raise

    def read(self, name: str) -> bytes | None:
        return self._ask("GET", name)

    def add(self, name: str, data: bytes) -> bool:
        if self._ask("HEAD", name) is not None:  # for servers that ignore the condition of the PUT
            return False
        try:
            self._ask("PUT", name, data, If_None_Match="*", Content_Type="application/octet-stream")
        except HTTPError as error:
            if error.code in (409, 412):
                return False
            raise
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._ask("PUT", name, data, Content_Type="application/octet-stream")

    def names(self) -> None:
        return None


class _FileSystem:
    """Files of an fsspec implementation: file://, s3://, gs:// and many more."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CacheError(
                f"QUIRE_SHARED_CACHE={without_login(url)} cannot be opened: {error}. "
                '`pip install "quire-attention[fleet]"` brings fsspec; s3:// also needs s3fs, gs:// gcsfs'
            ) from error
        self._root = root.rstrip("/")

    def read(self, name: str) -> bytes | None:
        path = f"{self._root}/{name}"
        try:
            return bytes(self._files.cat_file(path)) if self._files.size(path) <= LARGEST_OBJECT else b""
        except FileNotFoundError:
            return None

    def add(self, name: str, data: bytes) -> bool:
        try:
            (self._link if "file" in self._files.protocol else self._create)(f"{self._root}/{name}", data)
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        if "file" not in self._files.protocol:
            self._files.pipe_file(path, data)
            return
        unfinished = f"{path}.{uuid.uuid4().hex}"
        self._files.pipe_file(unfinished, data)
        self._files.mv(unfinished, path)

    def names(self) -> list[str]:
        found = (str(path).rpartition("/")[2] for path in self._files.ls(self._root, detail=False))
        return sorted(name for name in found if _OBJECT.fullmatch(name))

    def _create(self, path: str, data: bytes) -> None:
        if self._files.exists(path):  # for implementations that ignore the mode
            raise FileExistsError(path)
        self._files.pipe_file(path, data, mode="create")

    def _link(self, path: str, data: bytes) -> None:
        """Add a file to a directory by a link, so that no reader sees half of it."""
        unfinished = f"{path}.{uuid.uuid4().hex}"
        self._files.makedirs(self._root, exist_ok=True)
        try:
            self._files.pipe_file(unfinished, data)
            self._files.link(unfinished, path)
        finally:
            self._files.rm_file(unfinished)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`; TimeoutError after `seconds`. It runs in a thread that does not delay an exit."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="quire-shared-cache", daemon=True).start()
    return future.result(seconds)


def object_name(request: str, toolchain: str | None, kind: str = "entry") -> str:
    """The name of the object for these halves of an entry's name; without the toolchain if it is None."""
    return hashlib.sha256(f"{kind} {request} {toolchain or 'any'}".encode()).hexdigest()


def without_login(url: str) -> str:
    """The URL without user name and password, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class Tier:
    """One remote cache. With `trust` objects are signed, by a secret (HMAC) or by Ed25519, and others refused; without,
    any object is accepted. A host without a private key writes nothing.
    """

    def __init__(self, url: str, remote: _Remote, trust: Trust, *, readonly: bool = False) -> None:
        self.url = without_login(url)
        self.readonly = readonly or (isinstance(trust, Signatures) and trust.private is None)
        self._remote, self._trust = remote, trust
        self._retry = {"read": 0.0, "write": 0.0}  # seconds of the monotonic clock

    def import_into(self, store: Store, request: Request, toolchain: str | None) -> bool | None:
        """Publish in `store` the object of `request` and this toolchain digest (None: any).

        True if it was published, False if the object is invalid, None if there is no object.
        """
        name = object_name(request.digest, toolchain)
        if (data := self._read(name)) is None:
            return None
        try:
            import_entries(io.BytesIO(self._unsigned(name, data)), store, only=request)
        except Exception as error:  # whatever the bytes are, they are no reason to end the user's call
            events.warn_once(f"ignored the object {name} of the shared cache {self.url}: {error}")
            return False
        events.info(f"{request.spec.slug} came from the shared cache {self.url}")
        return True

    def claim(self, request: Request, toolchain: str) -> bool:
        """Claim the compile; False while another host has a claim.

        No object is overwritten: the claim that follows one of a host that died has another name, and again one of the
        hosts adds it first.
        """
        if self.readonly:
            return True
        for number in range(_MOST_CLAIMS):
            name = object_name(request.digest, toolchain, f"claim {number}" if number else "claim")
            note = self._signed(name, f"{time.time():.3f}".encode())
            if self._ask("write", lambda name=name, note=note: self._remote.add(name, note)) is not False:  # type: ignore[misc]
                return True
            if self._is_recent(name):
                return False
        return True

    def _is_recent(self, name: str) -> bool:
        """Whether an object is a claim that counts: not an old or an invalid one."""
        try:
            since = float(self._unsigned(name, self._read(name) or b""))
        except (CacheError, ValueError):
            return False
        return abs(time.time() - since) < CLAIM_SECONDS

    def wait_for_object(self, store: Store, request: Request, toolchain: str) -> None:
        """Call `import_into` until there is an object or PATIENCE_SECONDS are over."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and not self._is_left_alone("read"):
            if self.import_into(store, request, toolchain) is not None:
                return
            time.sleep(_POLL_SECONDS)

    def offer(self, entry: Entry) -> None:
        """Add an entry that was compiled here, under both names."""
        if self.readonly:
            return
        try:
            archive = pack(entry)
        except (CacheError, OSError) as error:
            events.warn_once(f"{entry.slug} is not added to the shared cache: {_text(error)}")
            return
        if len(archive) + 100 > LARGEST_OBJECT:
            events.warn_once(f"{entry.slug} is too large for the shared cache: {len(archive)} bytes")
            return
        for name in _names_of(entry.manifest):
            data = self._signed(name, archive)
            self._ask("write", lambda name=name, data=data: self._remote.add(name, data))  # type: ignore[misc]

    def problem(self) -> str:
        """Why the tier cannot be read; "" if it can."""
        try:
            _within(LIMIT_SECONDS, lambda: self._remote.read(object_name("", None)))
        except Exception as error:  # of whatever implementation
            return _text(error)
        return ""

    def _read(self, name: str) -> bytes | None:
        return self._ask("read", lambda: self._remote.read(name))

    def _is_left_alone(self, kind: Literal["read", "write"]) -> bool:
        """Whether a failure is too recent to ask again. A tier that cannot be read is not written either."""
        return time.monotonic() < max(self._retry["read"], self._retry[kind])

    def _ask(self, kind: Literal["read", "write"], call: Callable[[], T]) -> T | None:
        """The result of an operation; None, and one warning, if it fails in any way."""
        if self._is_left_alone(kind):
            return None
        try:
            return _within(LIMIT_SECONDS, call)
        except Exception as error:  # of whatever implementation
            self._retry[kind] = time.monotonic() + RETRY_SECONDS
            events.warn_once(
                f"the shared cache {self.url} cannot be {'read' if kind == 'read' else 'written'} ({_text(error)}); "
                f"doing without it for {RETRY_SECONDS:.0f} s"
            )
            return None

    def _signed(self, name: str, body: bytes) -> bytes:
        return sealed(self._trust, name, body)

    def _unsigned(self, name: str, data: bytes) -> bytes:
        """The body of an object; CacheError unless it was signed with a key of this host for this name."""
        return opened(self._trust, name, data if len(data) <= LARGEST_OBJECT else b"")

    def verify(self, local: Iterable[Manifest]) -> Iterator[tuple[str, str, str]]:
        """(name, slug, what is wrong, or "") of each object; where the storage does not list them, of those of `local`.

        Claims are left out if they are sound. CacheError if the storage cannot be read.
        """
        for name, data in self._objects(local):
            slug, reason = "", ""
            try:
                body = self._unsigned(name, data)
                if not _is_claim(body):
                    slug = _verify_object(name, body)
            except (CacheError, OSError) as error:
                reason = str(error)
            if slug or reason:
                yield name, slug, reason

    def sign(self, local: Iterable[Manifest]) -> Iterator[tuple[str, str]]:
        """Sign each object that `verify` accepts with this host's key, in place of its signature.

        Yields (name, why it was not signed, or ""). This is for the time before a key expires.
        """
        if self.readonly or not isinstance(self._trust, Signatures):
            raise ValidationError("sign --tier: expected QUIRE_TRUSTED_KEYS, QUIRE_SIGNING_KEY and a URL to write to")
        for name, data in self._objects(local):
            try:
                self._remote.replace(name, self._signed(name, self._unsigned(name, data)))
            except Exception as error:  # of whatever implementation
                yield name, _text(error)
            else:
                yield name, ""

    def _objects(self, local: Iterable[Manifest]) -> Iterator[tuple[str, bytes]]:
        """(name, bytes) of all objects, or of those of `local`."""
        try:
            names = self._remote.names()
            if names is None:
                names = sorted({name for manifest in local for name in _names_of(manifest)})
            for name in names:
                if (data := self._remote.read(name)) is not None:
                    yield name, data
        except Exception as error:  # of whatever implementation
            raise CacheError(f"the shared cache {self.url} cannot be read: {_text(error)}") from error


def _names_of(manifest: Manifest) -> tuple[str, str]:
    """The two names of an entry's object."""
    request = request_digest(manifest.request)
    return object_name(request, toolchain_digest(manifest.toolchain)), object_name(request, None)


def _is_claim(body: bytes) -> bool:
    return re.fullmatch(rb"\d{1,12}\.\d{3}", body) is not None


def _verify_object(name: str, body: bytes) -> str:
    """The slug of the entry in an object; CacheError if it is unsound, or lies under the name of another."""
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        (entry, *others) = import_entries(io.BytesIO(body), Store(Path(directory, "store")))
    if others or name not in _names_of(entry.manifest):
        raise CacheError(f"expected the one entry of this name, got {entry.slug} and {len(others)} more")
    return entry.slug


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300].partition("\n")[0]


@cache
def _open_tier(
    url: str, key: Path | None, trusted: Path | None, private: Path | None, unsigned: bool, readonly: bool
) -> Tier:
    named = {"QUIRE_SHARED_CACHE_KEY": key, "QUIRE_TRUSTED_KEYS": trusted, "QUIRE_SHARED_CACHE_TRUST": unsigned}
    given = [name for name, value in named.items() if value]
    if len(given) != 1:
        raise ValidationError(
            f"QUIRE_SHARED_CACHE={without_login(url)}: expected one of QUIRE_TRUSTED_KEYS (public keys, one of which "
            "signed what is loaded), QUIRE_SHARED_CACHE_KEY (a file with a secret, which signs and checks) or "
            "QUIRE_SHARED_CACHE_TRUST=unsigned (anybody who can write there can run code here), got "
            f"{'both ' if len(given) == 2 else ''}{' and '.join(given) or 'none'}. Set one of them"
        )
    remote: _Remote = _HttpServer(url) if url.startswith(("http://", "https://")) else _FileSystem(url)
    trust: Trust = None if key is None else read_secret(key)
    if trusted is not None:
        trust = Signatures.read(trusted, private)
    return Tier(url, remote, trust, readonly=readonly)


def shared_tier() -> Tier | None:
    """The tier that QUIRE_SHARED_CACHE names, or None. ValidationError or CacheError if it is set up wrong."""
    url = config.shared_cache()
    if url is None:
        return None
    unsigned, readonly = config.shared_cache_is_trusted_unsigned(), config.shared_cache_is_read_only()
    keys = config.shared_cache_key(), config.trusted_keys(), config.signing_key()
    return _open_tier(url, *keys, unsigned, readonly)
