"""Builds one request with one toolchain and publishes the entry: staging, build permit, report, manifest."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from quire.errors import CacheError, CompileError
from quire.jit import artifact, budget, diagnosis, events, progress, trust
from quire.jit.lock import build_permit
from quire.jit.manifest import Manifest
from quire.jit.request import SCHEMA, Request
from quire.jit.store import Entry, Store
from quire.jit.toolchain import Outcome, Toolchain

_LITTLE_SPACE = 4 << 20  #: bytes; compilers write more than this beside the artifact


def _build(request: Request, toolchain: Toolchain, staging: Path, store: Store) -> Outcome:
    """Build in `staging`; a compiler that was killed is run once more, alone on the machine."""
    spec = request.spec
    permits, directory = budget.max_compilers(store, device=spec.device), budget.permits_directory(store)

    def beat(seconds: float) -> None:
        events.emit(events.Event("progress", spec.slug, spec.target, seconds))
        progress.info(f"still compiling {spec.slug} for {spec.target}, {seconds:.0f} s so far")

    with progress.heartbeat(beat):  # the wait for a permit counts, too
        with build_permit(directory, permits):
            outcome = toolchain.build(request, staging)
        if outcome.failure is not None and outcome.failure.was_killed:
            progress.warn_once(f"the compiler of {spec.slug} was killed; trying once more, alone")
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
        exports=artifact.read_exports(image, spec),
        registers=report.registers,
        spills=report.spills,
        stack=report.stack,
        smem=report.smem,
        warnings=list(report.warnings),
        seconds=round(outcome.seconds, 3),
        peak_bytes=outcome.peak_bytes,
        created=time.time(),
    )


def _failure(request: Request, store: Store, outcome: Outcome, failure: diagnosis.Diagnosis) -> CompileError:
    """Keep the log, and make an error of it."""
    log = store.root / "logs" / f"{request.spec.slug}.{request.digest[:12]}.log"
    with trust.directory(store.root, "logs") as logs:
        trust.write(logs, log.name, outcome.log.encode())
    if failure.is_unknown and shutil.disk_usage(store.root).free < _LITTLE_SPACE:
        failure = diagnosis.full_disk(failure)  # a full disk truncates the log, too
    return diagnosis.compile_error(request.spec.slug, failure, outcome.command, log)


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
    progress.info(f"compiling {spec.slug} for {spec.target} into {store.root} ({cause})")
    start = time.monotonic()
    try:
        entry = _compile(request, toolchain, parts, store)
    except BaseException as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        seconds = time.monotonic() - start
        events.emit(events.Event("end", spec.slug, spec.target, seconds, error=first))
        progress.info(f"failed to compile {spec.slug} after {seconds:.1f} s: {first}")
        if isinstance(error, OSError):
            free = "free space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise CacheError(f"{store.root}: {error}; {free}move the cache with QUIRE_CACHE_DIR") from error
        raise
    seconds, manifest = time.monotonic() - start, entry.manifest
    events.emit(events.Event("end", spec.slug, spec.target, seconds, path=str(entry.path)))
    figures = f", {manifest.registers} registers, {manifest.spills} bytes of spills"
    progress.info(f"compiled {spec.slug} in {seconds:.1f} s{figures if manifest.registers is not None else ''}")
    return entry
