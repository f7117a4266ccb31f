"""`quire warmup` compiles variants ahead of time; `quire plan-for` prints which ones a model needs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from quire.cli import parser, presets
from quire.cli.aot import PRESETS, Built, Selection, families, for_hosts, read_manifest, select, spec_of, warm
from quire.cli.estimates import Estimate, estimate
from quire.cli.parser import add_command, print_table, spell_bytes, tell
from quire.errors import CacheError, ValidationError
from quire.jit import Spec, Store, config, host_target
from quire.jit.driver import present_targets
from quire.jit.stores import user_store
from quire.kernels import KERNELS
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import mask_words
from quire.kernels.types import DTYPES


def add_commands(commands: Any) -> None:
    """Add `warmup` and `plan-for` to the parser."""
    _add_warmup(commands)
    _add_plan_for(commands)


def _add_warmup(commands: Any) -> None:
    warmup = add_command(
        commands, "warmup", _warmup, "compile variants ahead of time",
        "Compile variants ahead of time, also for GPUs that are not present. Lists are comma-separated.",
    )  # fmt: skip
    backends, types = [kernel.backend for kernel in KERNELS], ", ".join(d.slug for d in DTYPES)
    warmup.add_argument("slugs", nargs="*", metavar="SLUG", help="variants by name, as error messages print them")
    warmup.add_argument("--exact", action="store_true", help="of SLUG only itself, not what other lengths would take")
    warmup.add_argument("--manifest", type=Path, metavar="FILE", help="variants that QUIRE_RECORD or --json wrote")
    warmup.add_argument(
        "--preset", type=_presets, metavar="NAME|CONFIG",
        help=f"of {', '.join(PRESETS)}; or a model: config.json,tp=8,kv=e4m3,page=16,graph",
    )  # fmt: skip
    warmup.add_argument("--backend", type=parser.words(backends), dest="backends", help="of " + ", ".join(backends))
    warmup.add_argument("--head-dim", type=parser.head_dims, dest="head_dims", help="128 or 192x128 (default 128)")
    warmup.add_argument("--page-size", type=parser.page_sizes, dest="page_sizes", help="or ragged (default 16,ragged)")
    warmup.add_argument("--dtype", type=parser.dtypes, dest="dtypes", help=f"of {types} (default bf16)")
    warmup.add_argument("--kv-dtype", type=parser.dtypes, dest="kv_dtypes", help="of the cache (default: as --dtype)")
    warmup.add_argument("--mask", type=parser.masks, dest="masks", help=mask_words())
    warmup.add_argument(
        "--variant", type=parser.checked(_variant), action="append", dest="variants", metavar="MODULE:NAME",
        help="a quire.Variant of one's own, as package.module:name; may be repeated",
    )  # fmt: skip
    warmup.add_argument("--arch", type=parser.targets, help="GPU architectures, such as 8.0,9.0a")
    hosts = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx", "aarch64")
    warmup.add_argument(
        "--cpu",
        type=parser.words(hosts),
        metavar="HOST",
        help=f"hosts to build for, of {', '.join(hosts)} (default: this)",
    )
    warmup.add_argument(
        "--jobs", type=parser.count, metavar="N", help="compilers at a time (default: cores and memory decide)"
    )
    warmup.add_argument("--store", type=Path, metavar="DIR", help="fill this directory instead of the user's cache")
    warmup.add_argument("--dry-run", action="store_true", help="list what would be compiled, compile nothing")


def _add_plan_for(commands: Any) -> None:
    plan = add_command(
        commands, "plan-for", _plan_for, "what serving a model needs, in variants, seconds and bytes",
        "List the variants that serving a model needs, with estimated seconds and bytes.",
    )  # fmt: skip
    plan.add_argument(
        "config", type=parser.checked(presets.read_config), metavar="CONFIG",
        help="a Hugging Face config.json, with options: config.json,tp=8,kv=e4m3,page=16,graph",
    )  # fmt: skip
    plan.add_argument("--arch", type=parser.targets, help="GPU architectures (default: those of this machine)")


def _presets(text: str) -> tuple[Any, ...]:
    """Names of presets, or the config.json of one model with its options."""
    if Path(text.partition(",")[0]).suffix == ".json" or Path(text.partition(",")[0]).is_dir():
        return (parser.checked(presets.read_config)(text),)
    return parser.words(list(PRESETS))(text)


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


def _warmup(options: argparse.Namespace) -> int:
    start = perf_counter()
    specs = list({spec.slug: spec for spec in _wanted(options)}.values())
    specs = for_hosts(specs, options.cpu) if options.cpu and specs else specs
    if not specs:
        raise ValidationError("warmup: no kernel takes any variant of this selection; see --backend, --arch, --dtype.")
    store = None if options.store is None else Store(options.store.expanduser().absolute())
    dry_run = options.dry_run or _is_complete(specs, store)
    results = _build(specs, options, store, dry_run)
    seconds = perf_counter() - start
    show = partial(_print_results, results, seconds)
    tell(options, show, variants=[asdict(r) for r in results], seconds=round(seconds, 3))
    return int(any(result.status == "failed" for result in results))


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
    targets = _targets(arch, with_host=bool(backends and "cpu" in backends))
    if isinstance(preset, presets.Serving):
        if chosen:
            raise ValidationError("--preset CONFIG: the model decides the variants; only --arch goes with it.")
        needs = [presets.needs(preset, target) for target in targets]
        for refusal in dict.fromkeys(refusal for need in needs for refusal in need.refusals):
            print(f"quire: not built: {refusal}", file=sys.stderr)
        return [spec for need in needs for spec in need.specs]
    selection = Selection(**{**PRESETS.get(preset, {}), **chosen, "targets": targets})
    return select(selection, given=(*chosen, *(("targets",) if arch else ())))


def _targets(arch: tuple[str, ...] | None, *, with_host: bool) -> tuple[str, ...]:
    targets = arch or config.arch_list() or present_targets()
    return (*targets, host_target(matrix_unit=True)) if not arch and (not targets or with_host) else targets


def _build(specs: list[Spec], options: argparse.Namespace, store: Store | None, dry_run: bool) -> list[Built]:
    """Build, with a progress bar on a terminal; elsewhere the JIT logs its progress."""
    built: list[Built] = []
    with _progress_bar(len(specs), visible=not options.json and sys.stderr.isatty()) as advance:

        def done(result: Built) -> None:
            built.append(result)
            advance()

        try:
            return warm(specs, jobs=options.jobs, store=store, dry_run=dry_run, done=done)
        except KeyboardInterrupt:
            ready, root = sum(b.status in ("built", "hit") for b in built), (store or user_store()).root
            print(f"quire: {ready} of {len(specs)} variants are built and stay in {root}", file=sys.stderr)
            raise


@contextmanager
def _progress_bar(total: int, *, visible: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, which replaces progress lines; warnings are printed above it."""
    if not visible:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    logger = logging.getLogger("quire")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        handler = _AboveTheBar(progress.console)
        logger.addHandler(handler)
        task = progress.add_task("variants", total=total)
        try:
            yield lambda: progress.update(task, advance=1)
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


# --- plan-for --------------------------------------------------------------------------------------------------------


def _plan_for(options: argparse.Namespace) -> int:
    needs = [presets.needs(options.config, target) for target in _targets(options.arch, with_host=False)]
    estimates = [estimate(spec) for spec in {s.slug: s for need in needs for s in need.specs}.values()]
    refusals = list(dict.fromkeys(refusal for need in needs for refusal in need.refusals))
    show, variants = partial(_print_plan, estimates, refusals), [asdict(e) for e in estimates]
    tell(options, show, variants=variants, refused=refusals, model=asdict(options.config))
    return int(bool(refusals))


def _print_plan(estimates: list[Estimate], refusals: list[str]) -> None:
    rows = [(e.slug, f"{e.seconds:.1f} s", spell_bytes(e.bytes), "yes" if e.cached else "no") for e in estimates]
    print_table(("variant", "compile", "size", "cached"), rows)
    missing = [e for e in estimates if not e.cached]
    print(
        f"{len(estimates)} variants, {spell_bytes(sum(e.bytes for e in estimates))}; {len(missing)} to compile, "
        f"about {sum(e.seconds for e in missing):.0f} s of one core"
    )
    for refusal in refusals:
        print(f"not possible: {refusal}")
