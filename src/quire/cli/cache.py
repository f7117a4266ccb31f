"""`quire warmup` fills the cache ahead, `quire cache` manages it."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from quire import cli
from quire.cli import add_command, presets, print_table, provenance, spell_bytes, spell_seconds, tell
from quire.cli.aot import PRESETS, Built, Selection, families, for_hosts, read_manifest, select, spec_of, warm
from quire.cli.catalogue import cost_of, in_words, targets_of
from quire.errors import CacheError, QuireError, ValidationError
from quire.jit import Manifest, Spec, Store, config, explain_miss, lookup, request_parts
from quire.jit.archive import Pin, export_entries, import_entries, read_lock, write_lock
from quire.jit.stores import kept_entries, outdated, prebuilt_stores, require_times_of_use, sweep, to_remove, user_store
from quire.kernels import BACKENDS
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import DTYPES, mask_words


def add_commands(commands: Any) -> None:
    """Add `warmup` and `cache` to the parser."""
    _add_warmup(commands)
    _add_cache(commands)


def _add_warmup(commands: Any) -> None:
    warmup = add_command(
        commands, "warmup", _warmup, "compile variants ahead of time",
        "Compile variants ahead of time, also for GPUs that are not present. Lists are comma-separated.",
    )  # fmt: skip
    types = ", ".join(d.slug for d in DTYPES)
    warmup.add_argument("slugs", nargs="*", metavar="SLUG", help="variants by name, as error messages print them")
    warmup.add_argument("--exact", action="store_true", help="of SLUG only itself, not what other lengths would take")
    warmup.add_argument("--manifest", type=Path, metavar="FILE", help="variants that QUIRE_RECORD or --json wrote")
    warmup.add_argument(
        "--preset", type=_presets, metavar="NAME|CONFIG",
        help=f"of {', '.join(PRESETS)}; or a model: config.json,tp=8,kv=e4m3,page=16,graph",
    )  # fmt: skip
    warmup.add_argument("--backend", type=cli.words(BACKENDS), dest="backends", help="of " + ", ".join(BACKENDS))
    warmup.add_argument("--head-dim", type=cli.head_dims, dest="head_dims", help="128 or 192x128 (default 128)")
    warmup.add_argument("--page-size", type=cli.page_sizes, dest="page_sizes", help="or ragged (default 16,ragged)")
    warmup.add_argument("--dtype", type=cli.dtypes, dest="dtypes", help=f"of {types} (default bf16)")
    warmup.add_argument("--kv-dtype", type=cli.kv_dtypes, dest="kv_dtypes", help="or nvfp4 (default: as --dtype)")
    warmup.add_argument("--mask", type=cli.masks, dest="masks", help=mask_words())
    warmup.add_argument(
        "--variant", type=cli.checked(_variant), action="append", dest="variants", metavar="MODULE:NAME",
        help="a custom quire.Variant, as package.module:name; may be repeated",
    )  # fmt: skip
    warmup.add_argument("--arch", type=cli.targets, help="GPU architectures, such as 8.0,9.0a")
    hosts = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx", "aarch64")
    warmup.add_argument(
        "--cpu",
        type=cli.words(hosts),
        metavar="HOST",
        help=f"hosts to build for, of {', '.join(hosts)} (default: this)",
    )
    warmup.add_argument(
        "--jobs", type=cli.count, metavar="N", help="compilers at a time (default: cores and memory decide)"
    )
    warmup.add_argument("--store", type=Path, metavar="DIR", help="fill this directory instead of the user's cache")
    warmup.add_argument("--dry-run", action="store_true", help="list what would be compiled, compile nothing")
    warmup.add_argument("--yes", action="store_true", help="build the default list, where nothing else is named")
    warmup.add_argument(
        "--lock", type=Path, metavar="FILE", help="write the digests of these entries, such as quire.lock"
    )
    warmup.add_argument(
        "--locked", type=Path, metavar="FILE", help="variants of a lock; entries with other digests fail"
    )


def _presets(text: str) -> tuple[Any, ...]:
    """Names of presets, or the config.json of one model with its options."""
    if (path := Path(text.partition(",")[0])).suffix == ".json" or path.is_dir():
        return (cli.checked(presets.read_config)(text),)
    return cli.words(list(PRESETS))(text)


def _variant(text: str) -> Variant:
    """The variant that `package.module:name` names; its module is imported."""
    module, _, name = text.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValidationError(f"--variant: expected package.module:name, got {text!r}: {error}.") from error
    if not isinstance(found, Variant):
        raise ValidationError(f"--variant: expected {text} to be a quire.Variant, got {type(found).__name__}.")
    return found


# --- warmup ----------------------------------------------------------------------------------------------------------


#: Options that say what to build, beside those of a Selection.
_NAMING = ("slugs", "manifest", "preset", "arch", "locked")


def _warmup(options: argparse.Namespace) -> int:
    start, pins = perf_counter(), None if options.locked is None else _read_lock(options)
    specs = list({spec.slug: spec for spec in (_wanted(options) if pins is None else map(spec_of, pins))}.values())
    specs = for_hosts(specs, options.cpu) if options.cpu and specs else specs
    if not specs:
        raise ValidationError("warmup: no kernel takes any variant of this selection; see --backend, --arch, --dtype.")
    store = None if options.store is None else Store(options.store.expanduser().absolute())
    if not (_is_named(options) or options.dry_run or options.yes or _agreed(specs, options.json)):
        return cli.USAGE
    dry_run = options.dry_run or _is_complete(specs, store)
    results = _build(specs, options, store, dry_run, pins)
    if options.lock is not None:
        write_lock(options.lock, {result.slug: result.path for result in results})
    seconds = perf_counter() - start
    show = partial(_print_results, results, seconds)
    tell(options, show, variants=[asdict(r) for r in results], seconds=round(seconds, 3))
    return int(any(result.status == "failed" for result in results))


def _is_named(options: argparse.Namespace) -> bool:
    """Whether the command line says what to build."""
    return bool(_chosen(options) or any(getattr(options, name) for name in _NAMING))


def _agreed(specs: list[Spec], as_json: bool) -> bool:
    """Whether the user wants the default list, once it is known what it costs."""
    cost = cost_of(specs)
    if not cost.missing:
        return True
    print(f"the default list: {cost}", file=sys.stderr)
    print("what one model needs: quire warmup --preset config.json,vllm; see quire warmup --help", file=sys.stderr)
    if as_json or not sys.stdin.isatty():
        print("quire warmup: expected what to build, or --yes for the default list", file=sys.stderr)
        return False
    return input("Build it? [y/N] ").strip().lower() in ("y", "yes")


def _read_lock(options: argparse.Namespace) -> dict[str, Pin]:
    names = ("slugs", "exact", "manifest", "preset", "arch", "cpu", "lock")
    if _chosen(options) or any(getattr(options, name) for name in names):
        raise ValidationError("--locked: the lock decides the variants; --store, --jobs and --dry-run go with it.")
    pins = read_lock(options.locked)
    for pin in pins.values():
        if pin.expression:
            Variant.parse(pin.expression)  # the slug names it
    return pins


def _is_complete(specs: list[Spec], store: Store | None) -> bool:
    """Whether nothing is left to build for a read-only store; CacheError if variants are missing."""
    kept_in = store or user_store()
    if config.jit_denied() or not (reason := kept_in.prepare()):
        return False
    if any(built.status != "hit" for built in warm(specs, store=store, dry_run=True)):
        raise CacheError(
            f"{kept_in.root} cannot be written ({reason}), so nothing that is built would be kept; "
            "name another directory with --store or QUIRE_CACHE_DIR."
        )
    return True


def _wanted(options: argparse.Namespace) -> list[Spec]:
    """The variants of the given slugs and manifest; and those of the options, if any is given or nothing else is."""
    specs = [spec_of(slug) for slug in options.slugs] if options.exact else families(options.slugs)
    if options.manifest is not None:
        specs += read_manifest(options.manifest)
    chosen = _chosen(options)
    if chosen or options.arch or options.preset or not specs:
        for preset in options.preset or ("",):
            specs += _of_preset(preset, chosen, options.arch)
    return specs


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    names = (f.name for f in fields(Selection) if f.name != "targets")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _of_preset(preset: Any, chosen: dict[str, Any], arch: tuple[str, ...] | None) -> list[Spec]:
    backends = chosen.get("backends")
    targets = targets_of(arch, with_host=bool(backends and "cpu" in backends))
    if isinstance(preset, presets.Serving):
        if chosen:
            raise ValidationError("--preset CONFIG: the model decides the variants; only --arch goes with it.")
        needs = [presets.needs(preset, target) for target in targets]
        for refusal in dict.fromkeys(refusal for need in needs for refusal in need.refusals):
            print(f"quire: not built: {refusal}", file=sys.stderr)
        return [spec for need in needs for spec in need.specs]
    selection = Selection(**{**PRESETS.get(preset, {}), **chosen, "targets": targets})
    return select(selection, given=(*chosen, *(("targets",) if arch else ())))


def _build(
    specs: list[Spec], options: argparse.Namespace, store: Store | None, dry_run: bool, pins: dict[str, Pin] | None
) -> list[Built]:
    """Build, with a progress bar on a terminal; elsewhere the JIT logs its progress."""
    built: list[Built] = []
    with _progress_bar(len(specs), visible=not options.json and sys.stderr.isatty()) as advance:

        def done(result: Built) -> None:
            built.append(result)
            advance(in_words(result.slug))

        try:
            return warm(specs, jobs=options.jobs, store=store, dry_run=dry_run, done=done, pins=pins)
        except KeyboardInterrupt:
            ready, root = sum(b.status in ("built", "hit") for b in built), (store or user_store()).root
            print(f"quire: {ready} of {len(specs)} variants are built and stay in {root}", file=sys.stderr)
            raise


@contextmanager
def _progress_bar(total: int, *, visible: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, which replaces progress lines; warnings are printed above it."""
    if not visible:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    words = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=44))
    columns = (BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), words)
    logger = logging.getLogger("quire")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        handler = _AboveTheBar(progress.console)
        logger.addHandler(handler)
        task = progress.add_task("variants", total=total)
        try:
            yield lambda words: progress.update(task, advance=1, description=words)
        finally:
            logger.removeHandler(handler)


class _AboveTheBar(logging.Handler):
    """Prints warnings above a bar."""

    def __init__(self, console: Any) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(record.getMessage(), markup=False, highlight=False)


def _print_results(results: list[Built], seconds: float) -> None:
    for result in results:
        print(f"{result.status:<8}{result.seconds:6.2f} s  {result.slug}")
        if result.error:
            print(result.error)
    counts = {status: sum(r.status == status for r in results) for status in ("hit", "built", "missing", "failed")}
    print(", ".join(f"{n} {status}" for status, n in counts.items() if n) + f" in {seconds:.1f} s")


# --- cache -----------------------------------------------------------------------------------------------------------


_ORDERS = ("name", "size", "age")


def _add_cache(commands: Any) -> None:
    text = "manage the cache"
    actions = commands.add_parser("cache", help=text, description=f"{text.capitalize()} of compiled variants.")
    actions = actions.add_subparsers(required=True, metavar="ACTION", dest="action")
    add_command(actions, "path", _path, "print where the cache lies")
    listed = add_command(actions, "list", _list, "list the entries")
    listed.add_argument("words", nargs="*", metavar="WORD", help="only variants whose name has each of these words")
    listed.add_argument("--sort", choices=_ORDERS, default="name", help="by name, largest first or newest first")
    provenance.add_actions(actions)
    why = add_command(actions, "why", _why, "say where a variant is, or why it is not in the cache")
    why.add_argument("slug", metavar="SLUG")
    gc = add_command(actions, "gc", _gc, "remove the least recently used entries")
    gc.add_argument("--max-size", type=cli.size, metavar="SIZE", help="until at most this is left, such as 2GB")
    gc.add_argument("--unused-for", type=cli.age, metavar="TIME", help="that nobody used for so long, such as 30d")
    prune = add_command(actions, "prune", _prune, "remove what this version of Quire would not use, logs and leftovers")
    for action in (gc, prune):
        action.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    export = add_command(actions, "export", _export, "pack verified entries into a tar archive")
    export.add_argument("file", type=Path, metavar="FILE", help="such as cache.tar or cache.tar.gz")
    export.add_argument("words", nargs="*", metavar="WORD", help="only variants whose name has each of these words")
    imported = add_command(actions, "import", _import, "unpack an archive of `cache export`, which you must trust")
    imported.add_argument("file", type=Path, metavar="FILE")
    imported.add_argument("--store", type=Path, metavar="DIR", help="into this directory, not the user's cache")
    imported.add_argument("--keys", type=Path, metavar="FILE", help="public keys (default: QUIRE_TRUSTED_KEYS)")
    add_command(actions, "clear", _clear, "remove every entry")


def _path(options: argparse.Namespace) -> int:
    root = str(user_store().root)
    return tell(options, root, path=root)


# --- show and verify -------------------------------------------------------------------------------------------------


def _entries() -> list[dict[str, Any]]:
    now = time.time()
    return [
        {
            "slug": manifest.slug, "target": manifest.target, "path": str(path), "bytes": manifest.size,
            "compile_seconds": manifest.seconds, "registers": manifest.registers, "spills": manifest.spills,
            "age_seconds": round(max(0.0, now - manifest.created)), "prebuilt": store.readonly,
            "expression": manifest.fields.get("expression"),
        }
        for store in (*prebuilt_stores(), user_store())
        for path, manifest in store.manifests()
    ]  # fmt: skip


def _has(slug: str, words: Iterable[str]) -> bool:
    return all(word in slug for word in words)


def _list(options: argparse.Namespace) -> int:
    key = {"name": lambda e: e["slug"], "size": lambda e: -e["bytes"], "age": lambda e: e["age_seconds"]}[options.sort]
    entries = sorted((e for e in _entries() if _has(e["slug"], options.words)), key=key)
    total = sum(entry["bytes"] for entry in entries)
    return tell(options, partial(_print_entries, entries, total), entries=entries, bytes=total)


def _print_entries(entries: list[dict[str, Any]], total: int) -> None:
    head = ("variant", "size", "age", "compiled in", "registers", "spills", "store")
    rows = (
        (e["slug"], spell_bytes(e["bytes"]), spell_seconds(e["age_seconds"]), f"{e['compile_seconds']:.2f} s",
         e["registers"], e["spills"], "prebuilt" if e["prebuilt"] else "user")
        for e in entries
    )  # fmt: skip
    print_table(head, rows)
    for name, text in {name: e["expression"] for e in entries if (name := _expression_of(e["slug"]))}.items():
        print(f"{name}:", *str(text).splitlines(), sep="\n  ")
    print(f"{len(entries)} entries, {spell_bytes(total)}, in {user_store().root}")


def _expression_of(slug: str) -> str:
    """The word of a slug that names a custom variant; "" if there is none."""
    return "".join(re.findall(r"expr[0-9a-f]{16}", slug))


def _why(options: argparse.Namespace) -> int:
    spec = spec_of(options.slug)
    if (entry := lookup(spec)) is None:
        reason = explain_miss(spec)
        text = f"it is not there: {reason}\nto build it: quire warmup {options.slug}"
        return tell(options, text, slug=options.slug, path=None, reason=reason)
    m = entry.manifest
    made = (
        f"made {spell_seconds(time.time() - m.created)} ago by {m.toolchain.get('toolchain', 'an unknown toolchain')}"
    )
    version = m.toolchain.get("version", "").partition("\n")[0]
    seconds = f" in {m.seconds:.1f} s" if m.seconds else ""  # unknown for packages
    text = f"it is there: {entry.path}\n{made} {version}{seconds}, {spell_bytes(m.size)}"
    return tell(options, text, slug=options.slug, path=str(entry.path), reason=None)


# --- remove ----------------------------------------------------------------------------------------------------------


def _remove(options: argparse.Namespace, store: Store, paths: list[Path]) -> int:
    """Remove entries, or print which ones would be removed."""
    freed = sum(file.lstat().st_size for path in paths if path.is_dir() for file in path.iterdir())
    for path in () if options.dry_run else paths:
        try:
            store.remove(path)
        except OSError as error:
            if path.exists():  # another process has not removed it
                raise CacheError(f"{path} cannot be removed: {error}") from error
    verb = "would remove" if options.dry_run else "removed"
    text = [f"{verb} {path.relative_to(store.root)}" for path in paths]
    text.append(f"{verb} {len(paths)} entries, {spell_bytes(freed)}, from {store.root}")
    return tell(options, "\n".join(text), removed=[str(path) for path in paths], bytes=freed)


def _gc(options: argparse.Namespace) -> int:
    store = user_store()
    if options.max_size is None and options.unused_for is None:
        raise ValidationError("cache gc: expected --max-size, --unused-for or both.")
    if options.unused_for is not None:
        require_times_of_use(store)
    chosen = to_remove(kept_entries(store), max_bytes=options.max_size, unused_for=options.unused_for, now=time.time())
    return _remove(options, store, [kept.path for kept in chosen])


def _is_current(manifest: Manifest) -> bool:
    try:
        if text := manifest.fields.get("expression"):
            Variant.parse(text)  # parses the custom variant that the slug names
        return manifest.request == request_parts(spec_of(manifest.slug))
    except QuireError:  # a variant that this version does not have
        return False


def _prune(options: argparse.Namespace) -> int:
    store = user_store()
    paths = list(outdated(store, _is_current))
    if not options.dry_run:
        sweep(store)
    return _remove(options, store, paths)


def _clear(options: argparse.Namespace) -> int:
    store = user_store()
    freed, removed = store.total_bytes(), store.clear()
    return tell(
        options, f"removed {removed} entries, {spell_bytes(freed)}, from {store.root}", removed=removed, bytes=freed
    )


# --- export and import -----------------------------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    store = user_store()
    entries = [entry for entry in store.entries() if _has(entry.slug, options.words)]
    if not entries:
        wanted = " ".join(options.words)
        cure = f"; without {wanted!r} all entries are exported" if wanted else ""
        raise CacheError(f"{store.root} has no sound entry of {wanted or 'any variant'}{cure}")
    count = export_entries(entries, options.file.expanduser().absolute())
    return tell(options, f"{count} entries in {options.file}", entries=count, path=str(options.file))


def _import(options: argparse.Namespace) -> int:
    store = provenance.store_of(options)
    entries = import_entries(options.file.expanduser().absolute(), store, keys=provenance.keys_of(options))
    slugs = [entry.slug for entry in entries]
    return tell(options, f"{len(slugs)} entries into {store.root}", entries=slugs, path=str(store.root))
