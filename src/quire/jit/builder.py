"""Builds one request with one toolchain and publishes the entry: locks, staging, build permit, report, manifest.

There is one builder for an entry, and a limited number of compilers for a machine (build permits). Permits belong to
the user and the machine, not to the cache: several caches on one machine share one budget, and several machines that
share a cache have a budget each.

The kernel frees a lock (of `filelock`) when its holder dies, so no lock becomes stale. Lock files are opened in a
checked directory, without following links, and close-on-exec, so that a compiler which outlives its parent holds no
lock. Lock files are never deleted: if one were deleted while another process opens it, both would hold the lock.

Locks only save work. Correctness does not need them, because publishing is one rename. A process that has waited too
long, or cannot lock at all, therefore builds the entry itself.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

from quire.errors import CacheError, CompileError
from quire.jit import compilation, config, events, machine, trust
from quire.jit.store import Entry, Manifest, Store
from quire.jit.toolchain import Outcome, Toolchain
from quire.jit.unit import SCHEMA, Request, read_exports

_LITTLE_SPACE = 4 << 20  #: bytes; compilers write more than this beside the artifact


def _build(request: Request, toolchain: Toolchain, staging: Path, store: Store) -> Outcome:
    """Build in `staging`; a compiler that was killed is run once more, alone on the machine."""
    spec = request.spec
    permits, directory = max_compilers(store, device=spec.device), permits_directory(store)

    def beat(seconds: float) -> None:
        events.emit(events.Event("progress", spec.slug, spec.target, seconds))
        events.info(f"still compiling {spec.slug} for {spec.target}, {seconds:.0f} s so far")

    with events.heartbeat(beat):  # the wait for a permit counts, too
        with build_permit(directory, permits):
            outcome = toolchain.build(request, staging)
        if outcome.failure is not None and outcome.failure.was_killed:
            events.warn_once(f"the compiler of {spec.slug} was killed; trying once more, alone")
            with build_permit(directory, permits, alone=True):
                outcome = toolchain.build(request, staging)
    return outcome


def _keep_only(staging: Path, names: tuple[str, ...]) -> None:
    """Remove all of `staging` but the files that belong to an entry."""
    for path in staging.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


def _describe(request: Request, parts: Mapping[str, str], built: Path, outcome: Outcome) -> Manifest:
    report, spec, image = outcome.report, request.spec, built.read_bytes()
    return Manifest(
        schema=SCHEMA, slug=spec.slug, target=spec.target, fields=dict(spec.fields), request=dict(request.parts),
        toolchain=dict(parts), entry=spec.entry, warmup=spec.warmup, artifact=built.name, size=len(image),
        sha256=hashlib.sha256(image).hexdigest(), exports=read_exports(image, spec), registers=report.registers,
        spills=report.spills, stack=report.stack, smem=report.smem, warnings=list(report.warnings),
        seconds=round(outcome.seconds, 3), peak_bytes=outcome.peak_bytes, created=time.time(),
    )  # fmt: skip


def _failure(request: Request, store: Store, outcome: Outcome, failure: compilation.Diagnosis) -> CompileError:
    """Keep the log, and make an error of it."""
    log = store.root / "logs" / f"{request.spec.slug}.{request.digest[:12]}.log"
    with trust.directory(store.root, "logs") as logs:
        trust.write(logs, log.name, outcome.log.encode())
    if failure.is_unknown and shutil.disk_usage(store.root).free < _LITTLE_SPACE:
        failure = compilation.full_disk(failure)  # a full disk truncates the log, too
    return compilation.compile_error(request.spec.slug, failure, outcome.command, log)


def _compile(request: Request, toolchain: Toolchain, parts: Mapping[str, str], store: Store) -> Entry:
    staging = store.new_staging()
    keep = False
    try:
        with store.inside(staging) as inside:
            outcome = _build(request, toolchain, inside, store)
            if outcome.failure is not None:
                raise _failure(request, store, outcome, outcome.failure)
            manifest = _describe(request, parts, inside / toolchain.artifact, outcome)
            _keep_only(inside, (toolchain.source, toolchain.artifact, "build.log"))
        entry = store.publish(staging, manifest)
        keep = entry.path == staging
        return entry
    finally:
        if not keep:  # the build failed, or another builder was first
            shutil.rmtree(staging, ignore_errors=True)


def compile_entry(request: Request, toolchain: Toolchain, parts: Mapping[str, str], store: Store, cause: str) -> Entry:
    """Compile and publish; `parts`: the toolchain's half of the entry's name. CompileError if the compiler fails.

    The caller holds the entry's lock, or has waited for it too long.
    """
    spec = request.spec
    events.begin(events.Event("begin", spec.slug, spec.target, cause=cause, path=str(store.root)))
    events.info(f"compiling {spec.slug} for {spec.target} into {store.root} ({cause})")
    start = time.monotonic()
    try:
        entry = _compile(request, toolchain, parts, store)
    except BaseException as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        seconds = time.monotonic() - start
        events.emit(events.Event("end", spec.slug, spec.target, seconds, error=first))
        events.info(f"failed to compile {spec.slug} after {seconds:.1f} s: {first}")
        if isinstance(error, OSError):
            free = "free space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise CacheError(f"{store.root}: {error}; {free}move the cache with QUIRE_CACHE_DIR") from error
        raise
    seconds, manifest = time.monotonic() - start, entry.manifest
    events.emit(events.Event("end", spec.slug, spec.target, seconds, path=str(entry.path)))
    figures = f", {manifest.registers} registers, {manifest.spills} bytes of spills"
    events.info(f"compiled {spec.slug} in {seconds:.1f} s{figures if manifest.registers is not None else ''}")
    return entry


_MOST_READ = 32  #: manifests, for each compile


def max_compilers(store: Store, *, device: bool) -> int:
    """QUIRE_MAX_JOBS; else as many as processors and memory allow, by the memory that earlier compiles took."""
    return config.max_jobs() or machine.default_jobs(max(_peaks(store, device=device), default=None))


def _peaks(store: Store, *, device: bool) -> Iterator[int]:
    """Peak memory in bytes of compiles of device or host code, for some entries of the store, if measured."""
    for _, manifest in islice(store.manifests(), _MOST_READ):
        if manifest.target.startswith("sm") == device and manifest.peak_bytes:
            yield manifest.peak_bytes


def permits_directory(store: Store) -> Path:
    """The directory of this user's permits on this machine; in the cache if no other directory is private."""
    name = f"quire-permits-{os.geteuid()}"
    try:
        root = config.runtime_directory()
        with trust.directory(root) as at:
            _make(at, name)
            with trust.directory(at, name) as own:
                _make(own, "permits")
    except (OSError, CacheError):  # missing, read-only, full, or others could write there
        return store.root / "permits"
    return root / name / "permits"


def _make(at: int, name: str) -> None:
    """Make a private directory. An existing one is not changed, and is used only if it can be trusted."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=at)


# --- locks -----------------------------------------------------------------------------------------------------------


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
