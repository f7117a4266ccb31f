"""Builds one request with one toolchain and publishes the entry: staging, build permit, report, manifest.

Permits belong to the user and the machine, not to the cache: several caches on one machine share one budget, and
several machines that share a cache have a budget each.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from quire.errors import CacheError, CompileError
from quire.jit import compilation, config, cpu, events, trust
from quire.jit.compiler import Outcome, Toolchain
from quire.jit.lock import build_permit
from quire.jit.manifest import SCHEMA, Manifest, Request
from quire.jit.spec import read_exports
from quire.jit.store import Entry, Store

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
        schema=SCHEMA,
        slug=spec.slug,
        target=spec.target,
        fields=dict(spec.fields),
        request=dict(request.parts),
        toolchain=dict(parts),
        entry=spec.entry,
        warmup=spec.warmup,
        artifact=built.name,
        size=len(image),
        sha256=hashlib.sha256(image).hexdigest(),
        exports=read_exports(image, spec),
        registers=report.registers,
        spills=report.spills,
        stack=report.stack,
        smem=report.smem,
        warnings=list(report.warnings),
        seconds=round(outcome.seconds, 3),
        peak_bytes=outcome.peak_bytes,
        created=time.time(),
    )


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
    events.emit(events.Event("begin", spec.slug, spec.target, cause=cause, path=str(store.root)))
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
    return config.max_jobs() or cpu.default_jobs(max(_peaks(store, device=device), default=None))


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
