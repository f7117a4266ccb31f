"""What a first call costs: each variant of a selection compiled cold, one at a time, into a store of its own.

Reported for each are the seconds (median of several builds), the memory of the largest process below the compiler
(measured around the compiler itself, so that this process does not count), registers, spills and warnings. And the
warm path: what finding, verifying and loading a cached variant costs a fresh process whose compilers always fail.

    python benchmarks/compile.py --target sm90a --head-dim 128 --mask none,causal --max-seconds 2.5

The exit status is 1 if a variant failed, or exceeded --max-seconds or --max-mb.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import quire
from machine import describe, write_report
from quire.cli.aot import PRESETS, Selection, select, spec_of, warm
from quire.jit import Manifest, Spec, Store

_MIB = 1 << 20


@dataclass(frozen=True)
class Compiled:
    """One variant. Figures are None where the compiler does not give them, or where it failed."""

    slug: str
    seconds: float | None  #: median of the cold builds: render, compile, publish
    least: float | None
    most: float | None
    compiler_seconds: float | None  #: of the last build, in ninja and the compiler
    peak_mb: float | None  #: of the largest process of the compiler's tree, MiB
    registers: int | None
    spills: int | None  #: bytes
    artifact_bytes: int | None
    warnings: tuple[str, ...]
    error: str | None = None


# --- cold ------------------------------------------------------------------------------------------------------------


def compile_cold(spec: Spec, repeat: int) -> Compiled:
    """`repeat` builds, each into an empty store, and one more under the gauge."""
    seconds = []
    manifest = None
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as root:
            (built,) = warm([spec], jobs=1, store=Store(Path(root) / "store"))
            if built.path is None:
                return Compiled(spec.slug, None, None, None, None, None, None, None, None, (), built.error)
            seconds.append(built.seconds)
            manifest = Manifest.read((Path(built.path) / "manifest.json").read_text())
    assert manifest is not None
    return Compiled(
        spec.slug, statistics.median(seconds), min(seconds), max(seconds), manifest.seconds, peak_mb(spec),
        manifest.registers, manifest.spills, manifest.size, tuple(manifest.warnings),
    )  # fmt: skip


_GAUGE = """#!{python} -IS
import os, sys
pid = os.posix_spawnp({compiler!r}, [{compiler!r}, *sys.argv[1:]], os.environ)
_, status, usage = os.wait4(pid, 0)
with open({log!r}, "a") as file:
    file.write(str(usage.ru_maxrss) + "\\n")
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_mb(spec: Spec) -> float | None:
    """Of the largest process below the compiler (nvcc waits for cicc and ptxas), with a gauge in its place."""
    variable, compiler = _compiler(spec)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="quire-gauge-") as directory:
        log = Path(directory) / "kilobytes"
        gauge = _script(Path(directory) / Path(compiler).name, log=str(log), compiler=compiler)
        with _environment({variable: str(gauge)}):
            (built,) = warm([spec], jobs=1, store=Store(Path(directory) / "store"))
        if built.path is None or not log.exists():
            return None
        return max(int(line) for line in log.read_text().split()) / 1024


def _compiler(spec: Spec) -> tuple[str, str | None]:
    """The variable that names a target's compiler, and the compiler that a build would use."""
    from quire.jit.toolchain import for_target

    variable = "QUIRE_NVCC" if spec.target.startswith("sm") else "QUIRE_CXX"
    found = for_target(spec.target).find()
    return variable, None if found is None else found.path


def _script(path: Path, **words: str) -> Path:
    path.write_text(_GAUGE.format(python=sys.executable, **words))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables of this process, for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- warm ------------------------------------------------------------------------------------------------------------

_WARM = """
import json, sys, time
start = time.perf_counter()
import quire
from quire.aot import spec_of
imported = time.perf_counter()
spec = spec_of(sys.argv[1])
found = time.perf_counter()
status, entry = quire.jit.build(spec)
verified = time.perf_counter()
if sys.argv[2] == "load":
    quire.jit.load(entry)
loaded = time.perf_counter()
assert status == "hit", status
print(json.dumps({"import_ms": (imported - start) * 1e3, "find_ms": (verified - found) * 1e3,
                  "load_ms": (loaded - verified) * 1e3 if sys.argv[2] == "load" else None}))
"""


@dataclass(frozen=True)
class Warm:
    """Milliseconds of a fresh process (medians) to use a cached variant, while no compiler works."""

    slug: str
    import_ms: float
    find_ms: float  #: render, hash, find and verify the entry
    load_ms: float | None  #: dlopen or cuLibraryLoadData; None where there is no such device


def warm_path(spec: Spec, repeat: int) -> Warm:
    """A cached variant in fresh processes. Raises RuntimeError if one does not get it without a compiler."""
    loads = not spec.target.startswith("sm") or torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="quire-warm-") as root:
        (built,) = warm([spec], jobs=1, store=Store(Path(root)))
        if built.path is None:
            raise RuntimeError(f"{spec.slug} cannot be compiled: {built.error}")
        failing = Path(root).with_suffix(".failing-compiler")
        failing.write_text("#!/bin/sh\nexit 1\n")
        failing.chmod(0o755)
        changes = {"QUIRE_CACHE_DIR": root, "QUIRE_NVCC": str(failing), "QUIRE_CXX": str(failing)}
        try:
            runs = [_fresh(spec, "load" if loads else "find", changes) for _ in range(repeat)]
        finally:
            failing.unlink()
    medians: dict[str, Any] = {
        name: None if runs[0][name] is None else statistics.median(run[name] for run in runs) for name in runs[0]
    }
    return Warm(spec.slug, **medians)


def _fresh(spec: Spec, until: str, changes: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-c", _WARM, spec.slug, until]
    done = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{spec.slug} was cached, yet a fresh process failed:\n{done.stderr}")
    times: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return times


# --- the report ------------------------------------------------------------------------------------------------------


def exceeded(result: Compiled, max_seconds: float | None, max_mb: float | None) -> list[str]:
    """Why a variant fails the run."""
    reasons = [] if result.error is None else [f"failed: {result.error.splitlines()[0]}"]
    if max_seconds is not None and result.seconds is not None and result.seconds > max_seconds:
        reasons.append(f"{result.seconds:.2f} s > {max_seconds:g} s")
    if max_mb is not None and result.peak_mb is not None and result.peak_mb > max_mb:
        reasons.append(f"{result.peak_mb:.0f} MiB > {max_mb:g} MiB")
    return reasons


def line(result: Compiled) -> str:
    """One variant on one line."""
    if result.seconds is None:
        return f"   failed             {result.slug}"

    def known(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:.0f} {unit}"

    figures = f"{result.seconds:7.2f} s {known(result.peak_mb, 'MiB'):>9} {known(result.registers, 'regs'):>9}"
    warnings = f"  {len(result.warnings)} warnings" if result.warnings else ""
    return f"{figures} {known(result.spills, 'B spilt'):>10}  {result.slug}{warnings}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _head_dims(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [word.split("x") for word in _words(text)]
    return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slugs", nargs="*", help="variants by name instead of a selection")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="begin with the options of a preset")
    parser.add_argument("--backend", dest="backends", type=_words)
    parser.add_argument("--head-dim", dest="head_dims", type=_head_dims, help="such as 64,128,192x128")
    parser.add_argument("--page-size", dest="page_sizes", type=lambda t: tuple(map(int, _words(t))), help="0: ragged")
    parser.add_argument("--dtype", dest="dtypes", type=_words)
    parser.add_argument("--kv-dtype", dest="kv_dtypes", type=_words)
    parser.add_argument("--mask", dest="masks", type=_words, help="of none, causal, custom, with +window, +cap")
    parser.add_argument("--target", dest="targets", type=_words, help="such as sm90a or x86-64-v3; default: this host")
    parser.add_argument("--repeat", type=int, default=3, help="cold builds of each variant (default 3)")
    parser.add_argument("--worst", type=int, default=10, help="how many to print (default 10)")
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--max-mb", type=float)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat: expected 1 or more, got {options.repeat}")
    return options


def _specs(options: argparse.Namespace) -> list[Spec]:
    if options.slugs:
        return [spec_of(slug) for slug in options.slugs]
    names = ("backends", "head_dims", "page_sizes", "dtypes", "kv_dtypes", "masks", "targets")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return select(Selection(**{**PRESETS.get(options.preset, {}), **given}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _arguments(arguments)
    specs = _specs(options)
    if not specs:
        print("no kernel takes any variant of this selection", file=sys.stderr)
        return 1
    results = []
    for number, spec in enumerate(specs, 1):
        results.append(compile_cold(spec, options.repeat))
        print(f"{number:4}/{len(specs)} {line(results[-1])}", flush=True)
    failures = {r.slug: why for r in results if (why := exceeded(r, options.max_seconds, options.max_mb))}
    built = [spec for spec, result in zip(specs, results, strict=True) if result.error is None]
    warmed = warm_path(built[0], options.repeat) if built else None
    _print_summary(results, warmed, options.worst)
    report = {
        **describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")), "repeat": options.repeat,
        "variants": [asdict(result) for result in results], "warm": None if warmed is None else asdict(warmed),
        "failures": failures,
    }  # fmt: skip
    write_report(options.json, report)
    for slug, reasons in failures.items():
        print(f"FAILED {slug}: {'; '.join(reasons)}")
    return int(bool(failures))


def _print_summary(results: list[Compiled], warmed: Warm | None, worst: int) -> None:
    timed = [result for result in results if result.seconds is not None]
    print(f"\nthe slowest of {len(timed)}:")
    for result in sorted(timed, key=lambda r: r.seconds or 0.0, reverse=True)[:worst]:
        print(f"  {line(result)}")
        for warning in result.warnings[:3]:
            print(f"      {warning}")
    if warmed is not None:
        load = "no such device to load it on" if warmed.load_ms is None else f"load {warmed.load_ms:.1f} ms"
        print(f"warm, in a fresh process without a compiler: find {warmed.find_ms:.1f} ms, {load}; "
              f"import quire and torch {warmed.import_ms:.0f} ms ({warmed.slug})")  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except quire.ValidationError as error:
        sys.exit(f"compile.py: {error}")
