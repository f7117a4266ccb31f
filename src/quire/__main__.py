"""The command line: `quire warmup` fills the cache, `quire cache` inspects it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from quire import config
from quire.aot import PRESETS, Built, Selection, families, for_hosts, read_manifest, select, spec_of, warm
from quire.errors import QuireError, ValidationError
from quire.jit import Spec, Store, explain_miss, host_target, prebuilt_stores, user_store
from quire.jit.gpu import present_targets
from quire.kernels import KERNELS
from quire.kernels.features import mask_words

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0, or 1 after a failure, which stderr tells."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _head_dims(text: str) -> tuple[tuple[int, int], ...]:
    """ "128,192x128" -> ((128, 128), (192, 128))."""
    pairs = [word.lower().split("x") for word in _words(text)]
    if any(len(pair) > 2 or not all(part.isdigit() for part in pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected head dims such as 128 or 192x128, got {text!r}")
    return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)


def _page_sizes(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdigit() or word == "ragged" for word in words):
        raise argparse.ArgumentTypeError(f"expected page sizes such as 16, or ragged, got {text!r}")
    return tuple(0 if word == "ragged" else int(word) for word in words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quire", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_warmup(commands)
    _add_cache(commands)
    return parser


def _add_warmup(commands: Any) -> None:
    warmup = commands.add_parser(
        "warmup",
        help="compile variants ahead of time",
        description="Compile variants ahead of time, also for GPUs that are not present. Lists are comma-separated.",
    )
    warmup.set_defaults(run=_warmup)
    warmup.add_argument("slugs", nargs="*", metavar="SLUG", help="variants by name, as error messages print them")
    warmup.add_argument("--exact", action="store_true", help="of SLUG only itself, not what other lengths would take")
    warmup.add_argument("--manifest", type=Path, metavar="FILE", help="variants that QUIRE_RECORD or --json wrote")
    warmup.add_argument("--preset", type=_words, metavar="NAME", help=f"one or more of {', '.join(PRESETS)}")
    warmup.add_argument("--backend", type=_words, dest="backends", help="of " + ", ".join(k.backend for k in KERNELS))
    warmup.add_argument("--head-dim", type=_head_dims, dest="head_dims", help="such as 128 or 192x128 (default 128)")
    warmup.add_argument("--page-size", type=_page_sizes, dest="page_sizes", help="of pages, or ragged (default both)")
    warmup.add_argument("--dtype", type=_words, dest="dtypes", help="of fp32, fp16, bf16 (default bf16)")
    warmup.add_argument("--kv-dtype", type=_words, dest="kv_dtypes", help="of the cache (default: as --dtype)")
    warmup.add_argument("--mask", type=_words, dest="masks", help=mask_words())
    warmup.add_argument("--arch", type=config.parse_arch_list, help="GPU architectures, such as 8.0,9.0a")
    warmup.add_argument(
        "--cpu", type=_words, help="hosts to build for, of x86-64-v3, x86-64-v4, aarch64 (default this)"
    )
    warmup.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: cores and memory decide)")
    warmup.add_argument("--store", type=Path, metavar="DIR", help="fill this directory instead of the user's cache")
    warmup.add_argument("--dry-run", action="store_true", help="list what would be compiled, compile nothing")
    warmup.add_argument("--json", action="store_true", help="print one JSON object")


def _add_cache(commands: Any) -> None:
    cache = commands.add_parser("cache", help="inspect the cache").add_subparsers(required=True, metavar="ACTION")
    actions: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
        "path": (_cache_path, "print where the cache lies"),
        "list": (_cache_list, "list the entries"),
        "verify": (_cache_verify, "check each entry's owner, mode, size and digest"),
        "clear": (_cache_clear, "remove every entry"),
        "why": (_cache_why, "say why a variant is not in the cache"),
    }
    for name, (run, text) in actions.items():
        action = cache.add_parser(name, help=text, description=text.capitalize() + ".")
        action.set_defaults(run=run)
        if name != "path":
            action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "why":
            action.add_argument("slug", metavar="SLUG")


# --- warmup ----------------------------------------------------------------------------------------------------------


def _warmup(options: argparse.Namespace) -> int:
    start = perf_counter()
    if options.jobs is not None and options.jobs < 1:
        raise ValidationError(f"--jobs: expected 1 or more, got {options.jobs}.")
    specs = list({spec.slug: spec for spec in _wanted(options)}.values())
    specs = for_hosts(specs, options.cpu) if options.cpu and specs else specs
    if not specs:
        raise ValidationError("warmup: no kernel takes any variant of this selection; see --backend, --arch, --dtype.")
    store = None if options.store is None else Store(options.store.expanduser().absolute())
    results = _with_progress(specs, options, store)
    if options.json:
        print(
            json.dumps(
                {"variants": [asdict(r) for r in results], "seconds": round(perf_counter() - start, 3)}, indent=1
            )
        )
    else:
        _print_results(results, perf_counter() - start)
    return int(any(result.status == "failed" for result in results))


def _wanted(options: argparse.Namespace) -> list[Spec]:
    """Slugs and a manifest if given; else, or with options besides, the selection."""
    specs = [spec_of(slug) for slug in options.slugs] if options.exact else families(options.slugs)
    if options.manifest is not None:
        specs += read_manifest(options.manifest)
    chosen = _chosen(options)
    if chosen or options.arch or options.preset or not specs:
        for name in options.preset or ("",):
            specs += select(_selection(name, chosen, options.arch))
    return specs


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    names = (f.name for f in fields(Selection) if f.name != "targets")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _selection(preset: str, chosen: dict[str, Any], arch: tuple[str, ...] | None) -> Selection:
    if preset and preset not in PRESETS:
        raise ValidationError(f"--preset: expected some of {', '.join(PRESETS)}, got {preset!r}.")
    targets = arch or config.arch_list() or present_targets()
    backends = chosen.get("backends")
    if not arch and (not targets or (backends and "cpu" in backends)):
        targets = (*targets, host_target())
    return Selection(**{**PRESETS.get(preset, {}), **chosen, "targets": targets})


def _with_progress(specs: list[Spec], options: argparse.Namespace, store: Store | None) -> list[Built]:
    """A bar on a terminal; otherwise the log lines of the JIT tell enough."""
    if options.json or not sys.stderr.isatty():
        return warm(specs, jobs=options.jobs, store=store, dry_run=options.dry_run)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("variants", total=len(specs))
        return warm(
            specs, jobs=options.jobs, store=store, dry_run=options.dry_run,
            done=lambda built: progress.update(task, advance=1, description=built.slug),
        )  # fmt: skip


def _print_results(results: list[Built], seconds: float) -> None:
    for result in results:
        print(
            f"{result.status:<8}{result.seconds:6.2f} s  {result.slug}" + (f"\n{result.error}" if result.error else "")
        )
    counts = {status: sum(r.status == status for r in results) for status in ("hit", "built", "missing", "failed")}
    print(", ".join(f"{n} {status}" for status, n in counts.items() if n) + f" in {seconds:.1f} s")


# --- cache -----------------------------------------------------------------------------------------------------------


def _cache_path(_: argparse.Namespace) -> int:
    print(user_store().root)
    return 0


def _entries() -> list[dict[str, Any]]:
    return [
        {
            "slug": manifest.slug, "target": manifest.target, "path": str(path), "bytes": manifest.size,
            "compile_seconds": manifest.seconds, "registers": manifest.registers, "spills": manifest.spills,
            "prebuilt": store.readonly,
        }
        for store in (*prebuilt_stores(), user_store())
        for path, manifest in store.manifests()
    ]  # fmt: skip


def _cache_list(options: argparse.Namespace) -> int:
    entries = sorted(_entries(), key=lambda entry: entry["slug"])
    if options.json:
        print(json.dumps({"entries": entries, "bytes": sum(entry["bytes"] for entry in entries)}, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("variant", overflow="fold"), "KB", "compiled in", "registers", "spills", "store")
    for e in entries:
        row = (e["slug"], f"{e['bytes'] / 1024:.0f}", f"{e['compile_seconds']:.2f} s", e["registers"], e["spills"])
        table.add_row(*("" if cell is None else str(cell) for cell in row), "prebuilt" if e["prebuilt"] else "user")
    Console().print(table, f"{len(entries)} entries in {user_store().root}", sep="\n")
    return 0


def _cache_verify(options: argparse.Namespace) -> int:
    store = user_store()
    count = len(list(store.paths()))
    bad = [{"path": str(path), "error": error} for path, error in store.problems()]
    if options.json:
        print(json.dumps({"ok": not bad, "entries": count, "bad": bad}, indent=1))
    else:
        print(*(f"{entry['path']}: {entry['error']}" for entry in bad), f"{count} entries, {len(bad)} bad", sep="\n")
    return int(bool(bad))


def _cache_clear(options: argparse.Namespace) -> int:
    store = user_store()
    freed, removed = store.total_bytes(), store.clear()
    if options.json:
        print(json.dumps({"removed": removed, "bytes": freed}))
    else:
        print(f"removed {removed} entries, {freed / 2**20:.1f} MB, from {store.root}")
    return 0


def _cache_why(options: argparse.Namespace) -> int:
    reason = explain_miss(spec_of(options.slug))
    print(json.dumps({"slug": options.slug, "reason": reason}) if options.json else reason)
    return 0


if __name__ == "__main__":
    sys.exit(main())
