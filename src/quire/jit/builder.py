"""Compile one request into one published entry: staging, ninja, report, manifest."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import time
from pathlib import Path

from quire import config
from quire.errors import CacheError
from quire.jit import artifact, cpu, diagnosis, events, ninja, progress, render
from quire.jit.lock import job_slot
from quire.jit.request import SCHEMA, Request
from quire.jit.store import Entry, Manifest, Store
from quire.jit.toolchain import Compiler

__all__ = ["compile_entry"]


def _command(request: Request, compiler: Compiler) -> str:
    """The command line, relative to the staging directory: no path of this machine but the compiler's own."""
    toolchain = request.toolchain
    words = [compiler.path, *request.flags, "-I", "include", "-o", toolchain.artifact, toolchain.source]
    return shlex.join(words)


def _lay_out(staging: Path, request: Request, compiler: Compiler, templates: Path) -> None:
    """Write the unit, exactly the headers that were hashed, and the ninja file: the compiler sees nothing else."""
    for header in request.headers:
        path = staging / "include" / header.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header.text)
    (staging / request.toolchain.source).write_text(request.source, encoding="utf-8")
    text = render.render_ninja(
        templates,
        slug=request.spec.slug,
        command=_command(request, compiler),
        source=request.toolchain.source,
        artifact=request.toolchain.artifact,
    )
    (staging / "build.ninja").write_text(text, encoding="utf-8")


def _run(staging: Path, request: Request, store: Store) -> ninja.Outcome:
    """Build in `staging`; a compiler that was killed gets one more try with the machine to itself."""
    spec = request.spec
    jobs = config.max_jobs() or cpu.default_jobs()

    def beat(seconds: float) -> None:
        events.emit(events.Event("progress", spec.slug, spec.target, seconds))
        progress.info(f"still compiling {spec.slug} for {spec.target}, {seconds:.0f} s so far")

    with progress.heartbeat(beat):  # around the wait for a slot as well
        with job_slot(store.root / "slots", jobs):
            outcome = ninja.run_ninja(staging)
        if outcome.status and diagnosis.was_killed(outcome.log, outcome.status):
            progress.warn_once(f"the compiler of {spec.slug} was killed; trying once more, alone")
            with job_slot(store.root / "slots", jobs, alone=True):
                outcome = ninja.run_ninja(staging)
    return outcome


def _keep_log(store: Store, request: Request, outcome: ninja.Outcome) -> Path:
    path = store.root / "logs" / f"{request.spec.slug}.{request.digest[:12]}.log"
    path.write_text(outcome.log, encoding="utf-8")
    return path


def _tidy(staging: Path, keep: tuple[str, ...]) -> None:
    """Leave only what belongs to an entry."""
    for path in staging.iterdir():
        if path.name in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _describe(request: Request, identity: str, staging: Path, outcome: ninja.Outcome) -> Manifest:
    report = request.toolchain.parse_report(outcome.log)
    data = (staging / request.toolchain.artifact).read_bytes()
    spec = request.spec
    return Manifest(
        schema=SCHEMA,
        slug=spec.slug,
        target=spec.target,
        fields=dict(spec.fields()),
        parts=dict(request.parts),
        compiler=identity,
        entry=spec.entry,
        warmup=spec.warmup,
        artifact=request.toolchain.artifact,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        facts=artifact.read_facts(staging / request.toolchain.artifact, spec),
        registers=report.registers,
        spills=report.spills,
        stack=report.stack,
        smem=report.smem,
        warnings=list(report.warnings),
        seconds=round(outcome.seconds, 3),
        peak_bytes=outcome.peak_bytes,
        created=time.time(),
    )


def _compile(request: Request, compiler: Compiler, identity: str, store: Store, templates: Path) -> Entry:
    staging = store.new_staging()
    keep = False
    try:
        _lay_out(staging, request, compiler, templates)
        outcome = _run(staging, request, store)
        if outcome.status or not (staging / request.toolchain.artifact).is_file():
            log = _keep_log(store, request, outcome)
            raise diagnosis.compile_error(
                request.spec.slug, outcome.log, outcome.status, _command(request, compiler), log
            )
        manifest = _describe(request, identity, staging, outcome)
        _tidy(staging, keep=(request.toolchain.source, request.toolchain.artifact, "build.log"))
        entry = store.publish(staging, request, manifest)
        keep = entry.path == staging
        return entry
    finally:
        if not keep:  # failed, or another builder was first
            shutil.rmtree(staging, ignore_errors=True)


def compile_entry(
    request: Request, compiler: Compiler, identity: str, store: Store, templates: Path, cause: str
) -> Entry:
    """Compile and publish. The caller holds the entry's lock (or has given up on it). CompileError on failure."""
    spec = request.spec
    events.emit(events.Event("begin", spec.slug, spec.target, cause=cause, path=str(store.root)))
    progress.info(f"compiling {spec.slug} for {spec.target} into {store.root} ({cause})")
    start = time.monotonic()
    try:
        entry = _compile(request, compiler, identity, store, templates)
    except BaseException as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        seconds = time.monotonic() - start
        events.emit(events.Event("end", spec.slug, spec.target, seconds, error=first))
        progress.info(f"failed to compile {spec.slug} after {seconds:.1f} s: {first}")
        if isinstance(error, OSError):
            raise CacheError(f"{store.root}: {error}; free space, or move the cache with QUIRE_CACHE_DIR") from error
        raise
    seconds, manifest = time.monotonic() - start, entry.manifest
    events.emit(events.Event("end", spec.slug, spec.target, seconds, path=str(entry.path)))
    figures = (
        "" if manifest.registers is None else f", {manifest.registers} registers, {manifest.spills} bytes of spills"
    )
    progress.info(f"compiled {spec.slug} in {seconds:.1f} s{figures}")
    return entry
