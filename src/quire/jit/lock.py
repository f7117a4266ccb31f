"""One builder for an entry, and a limited number of compilers (build permits) for the machine: locks of `filelock`.

The kernel frees a lock when its holder dies, however it dies, so there is no stale lock to recover from. The files are
opened here: without following links, in a directory that was checked, and close-on-exec, so that a compiler which
outlives its parent holds nothing. They are never deleted, because deleting one while another process opens it makes two
locks of one.

No lock is needed for correctness, only to save work, because publishing is one rename. So a process that has waited too
long builds the entry itself, and so does one that cannot lock at all.
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
from quire.jit import progress, trust

#: Longer than any compile. A holder that takes longer is presumed stuck (a stopped process, a lost NFS client).
PATIENCE_SECONDS = 900.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


class _Lock:
    """A lock file that is open, or none where there can be none."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        try:
            with trust.directory(path.parent.parent, path.parent.name) as at:
                self._descriptor = trust.open_lock(at, path.name)
        except (OSError, CacheError) as error:
            self._do_without(error)

    def _do_without(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        progress.warn_once(
            f"no locks in {self._path.parent.parent} ({reason}); processes may repeat each other's compiles"
        )

    def take(self) -> bool:
        """Whether the lock is ours, or there can be none."""
        from filelock import lock_descriptor  # needed after a miss only

        try:
            return self._descriptor < 0 or lock_descriptor(self._descriptor, blocking=False)
        except OSError as error:  # a file system without locks
            self._do_without(error)
            return True

    def write_note(self) -> None:
        """Say who holds the lock. On a full disk nobody learns it, and the lock holds nevertheless."""
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(note).encode(), 0)

    def holder(self) -> str:
        """Who holds the lock, and since when."""
        try:
            note = json.loads(os.pread(self._descriptor, 4096, 0))
            since = time.strftime("%H:%M:%S", time.localtime(note["since"]))
            return f"process {int(note['pid'])} on {str(note['host'])[:80]} since {since}"
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return "another process"  # which has not written its note, or could not

    def close(self) -> None:
        """Release explicitly, because a forked child may share the descriptor. Closing releases a lock too."""
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
    """Hold one of the machine's build permits, or with `alone` every one of them: so many compilers run at once.

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
