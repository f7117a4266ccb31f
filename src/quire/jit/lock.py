"""Kernel-owned locks: one builder for an entry, and a limited number of compilers (build permits) for the machine.

The kernel frees a flock when its holder dies, however it dies, so there is no stale lock to recover from. Descriptors
are close-on-exec (a compiler that outlives its parent holds nothing) and lock files are never deleted (deleting one
while another process opens it makes two locks of one). No lock is needed for correctness, only to save work: publishing
is one rename, so a process that has waited too long builds the entry itself and raises no error.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from quire.jit import progress

#: Longer than any compile. A holder that takes longer is presumed stuck (a stopped process, a lost NFS client).
PATIENCE_SECONDS = 900.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        progress.warn_once(
            f"the cache's file system has no locks ({error}); processes may repeat each other's compiles"
        )
    return True


def _unlock(descriptor: int) -> None:
    """Release explicitly, because a forked child may share the descriptor. Closing releases a lock too."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 4096, 0).decode(errors="replace")
    try:
        note = json.loads(text)
        return f"process {note['pid']} on {note['host']}"
    except (ValueError, KeyError, TypeError):  # the holder has not written its note, or could not
        return "another process"


def _write_holder(descriptor: int) -> None:
    """Say who holds the lock. On a full disk nobody learns it, and the lock holds nevertheless."""
    note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)


@contextmanager
def entry_lock(path: Path, on_wait: Callable[[str, float], None]) -> Iterator[bool]:
    """Hold the lock at `path`; yields False if others held it for PATIENCE_SECONDS.

    `on_wait(holder, seconds)` is called once when the wait begins and then about once a second.
    """
    descriptor = _open(path)
    try:
        start = time.monotonic()
        pause, next_report = _FIRST_PAUSE, 0.0
        held = _try_lock(descriptor)
        while not held and time.monotonic() - start < PATIENCE_SECONDS:
            waited = time.monotonic() - start
            if waited >= next_report:
                on_wait(_holder(descriptor), waited)
                next_report = waited + 1.0
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            held = _try_lock(descriptor)
        if held:
            _write_holder(descriptor)
        try:
            yield held
        finally:
            if held:
                _unlock(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def build_permit(directory: Path, permits: int, *, alone: bool = False) -> Iterator[None]:
    """Hold one of the machine's build permits, or with `alone` every one of them: so many compilers run at once.

    With `alone` permits are taken in ascending order, so two processes that want all of them cannot block each other.
    """
    with ExitStack() as stack:
        descriptors = []
        for index in range(permits):
            descriptors.append(_open(directory / f"permit-{index}"))
            stack.callback(os.close, descriptors[-1])
        if alone:
            for descriptor in descriptors:
                while not _try_lock(descriptor):
                    time.sleep(_LONGEST_PAUSE)
                stack.callback(_unlock, descriptor)
        else:
            held = next((d for d in descriptors if _try_lock(d)), None)
            while held is None:
                time.sleep(_LONGEST_PAUSE)
                held = next((d for d in descriptors if _try_lock(d)), None)
            stack.callback(_unlock, held)
        yield
