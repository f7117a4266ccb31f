"""Locks (of `filelock`): one builder for an entry, and a limited number of compilers (build permits) per machine.

The kernel frees a lock when its holder dies, so no lock becomes stale. Lock files are opened in a
checked directory, without following links, and close-on-exec, so that a compiler which outlives its parent holds no
lock. Lock files are never deleted: if one were deleted while another process opens it, both would hold the lock.

Locks only save work. Correctness does not need them, because publishing is one rename. A process that has waited too
long, or cannot lock at all, therefore builds the entry itself.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from quire.errors import CacheError
from quire.jit import events, trust

#: Longer than any compile. After that the holder is presumed stuck (a stopped process, a lost NFS client).
PATIENCE_SECONDS = 900.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


class _Lock:
    """An open lock file, or nothing if the file system allows none."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        try:
            with trust.directory(path.parent.parent, path.parent.name) as at:
                self._descriptor = trust.open_lock(at, path.name)
        except (OSError, CacheError) as error:
            self._do_without(error)

    def _do_without(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        events.warn_once(
            f"no locks in {self._path.parent.parent} ({reason}); processes may repeat each other's compiles"
        )

    def take(self) -> bool:
        """Try to lock; True if this process holds the lock, or if locks are impossible."""
        from filelock import lock_descriptor  # imported only after a miss

        try:
            return self._descriptor < 0 or lock_descriptor(self._descriptor, blocking=False)
        except OSError as error:  # a file system without locks
            self._do_without(error)
            return True

    def write_note(self) -> None:
        """Write into the file which process holds the lock. On a full disk the note is missing, but the lock holds."""
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(note).encode(), 0)

    def holder(self) -> str:
        """Which process holds the lock, and since when."""
        try:
            note = json.loads(os.pread(self._descriptor, 4096, 0))
            since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
            return f"process {int(note['pid'])} on {str(note['host'])[:80]} since {since}"
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return "another process"  # without a note

    def close(self) -> None:
        """Unlock explicitly: closing does not unlock while a forked child shares the descriptor."""
        from filelock import unlock_descriptor

        if self._descriptor >= 0:
            with suppress(OSError):
                unlock_descriptor(self._descriptor)
            os.close(self._descriptor)


@contextmanager
def entry_lock(path: Path, on_wait: Callable[[str, float], None]) -> Iterator[bool]:
    """Hold the lock at `path`, in a directory of a root; yields False if others held it for PATIENCE_SECONDS.

    `on_wait(holder, seconds)` is called once when the wait begins and then about once a second.
    """
    with closing(_Lock(path)) as lock:
        start = time.monotonic()
        pause, next_report = _FIRST_PAUSE, 0.0
        held = lock.take()
        while not held and time.monotonic() - start < PATIENCE_SECONDS:
            waited = time.monotonic() - start
            if waited >= next_report:
                on_wait(lock.holder(), waited)
                next_report = waited + 1.0
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            held = lock.take()
        if held:
            lock.write_note()
        yield held


@contextmanager
def build_permit(directory: Path, permits: int, *, alone: bool = False) -> Iterator[None]:
    """Hold one of the machine's build permits, or with `alone` all of them. `permits` compilers may run at once.

    With `alone` permits are taken in ascending order, so two processes that want all of them cannot block each other.
    """
    with ExitStack() as stack:
        locks = [stack.enter_context(closing(_Lock(directory / f"permit-{index}"))) for index in range(permits)]
        if alone:
            for lock in locks:
                while not lock.take():
                    time.sleep(_LONGEST_PAUSE)
        else:
            while not any(lock.take() for lock in locks):
                time.sleep(_LONGEST_PAUSE)
        yield
