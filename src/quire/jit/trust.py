"""Opens directories and files that only trusted users could have written, because loading an artifact runs its code.

Below a root, each name is opened relative to the descriptor of the directory above it, without following links, and the
open descriptor is checked. A file can therefore not be exchanged between its check and its use.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from quire.errors import CacheError

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
