"""`quire cache` shows, verifies, cleans, exports and imports the cache."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from quire.cli import parser
from quire.cli.aot import spec_of
from quire.cli.parser import add_command, print_table, spell_bytes, spell_seconds, tell
from quire.errors import CacheError, QuireError, ValidationError
from quire.jit import Manifest, Store, explain_miss, lookup, request_parts
from quire.jit.archive import export_entries, import_entries
from quire.jit.stores import kept_entries, outdated, prebuilt_stores, require_times_of_use, sweep, to_remove, user_store
from quire.kernels.expressions.variant import Variant

_ORDERS = ("name", "size", "age")


def add_commands(commands: Any) -> None:
    """Add `cache` to the parser."""
    text = "manage the cache"
    actions = commands.add_parser("cache", help=text, description=f"{text.capitalize()} of compiled variants.")
    actions = actions.add_subparsers(required=True, metavar="ACTION", dest="action")
    add_command(actions, "path", _path, "print where the cache lies")
    listed = add_command(actions, "list", _list, "list the entries")
    listed.add_argument("words", nargs="*", metavar="WORD", help="only variants whose name has each of these words")
    listed.add_argument("--sort", choices=_ORDERS, default="name", help="by name, largest first or newest first")
    add_command(actions, "verify", _verify, "check each entry's owner, mode, size and digest")
    why = add_command(actions, "why", _why, "say where a variant is, or why it is not in the cache")
    why.add_argument("slug", metavar="SLUG")
    gc = add_command(actions, "gc", _gc, "remove the least recently used entries")
    gc.add_argument("--max-size", type=parser.size, metavar="SIZE", help="until at most this is left, such as 2GB")
    gc.add_argument("--unused-for", type=parser.age, metavar="TIME", help="that nobody used for so long, such as 30d")
    prune = add_command(actions, "prune", _prune, "remove what this version of Quire would not use, logs and leftovers")
    for action in (gc, prune):
        action.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    export = add_command(actions, "export", _export, "pack verified entries into a tar archive")
    export.add_argument("file", type=Path, metavar="FILE", help="such as cache.tar or cache.tar.gz")
    export.add_argument("words", nargs="*", metavar="WORD", help="only variants whose name has each of these words")
    imported = add_command(actions, "import", _import, "unpack an archive of `cache export`, which you must trust")
    imported.add_argument("file", type=Path, metavar="FILE")
    imported.add_argument("--store", type=Path, metavar="DIR", help="into this directory, not the user's cache")
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


def _verify(options: argparse.Namespace) -> int:
    store = user_store()
    times = [
        (path, path.stat()) for kept in store.paths() if kept.is_dir() for path in kept.iterdir() if path.is_file()
    ]
    bad = [{"path": str(path), "error": error} for path, error in store.problems()]
    for path, status in times:  # verifying is not using: `gc --unused-for` must not count it
        if path.is_file() and os.access(path, os.W_OK):
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    count = len(list(store.paths()))
    text = "\n".join([*(f"{entry['path']}: {entry['error']}" for entry in bad), f"{count} entries, {len(bad)} bad"])
    tell(options, text, ok=not bad, entries=count, bad=bad)
    return int(bool(bad))


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
        raise CacheError(f"{store.root} has no sound entry of {' '.join(options.words) or 'any variant'}")
    count = export_entries(entries, options.file.expanduser().absolute())
    return tell(options, f"{count} entries in {options.file}", entries=count, path=str(options.file))


def _import(options: argparse.Namespace) -> int:
    store = user_store() if options.store is None else Store(options.store.expanduser().absolute())
    entries = import_entries(options.file.expanduser().absolute(), store)
    slugs = [entry.slug for entry in entries]
    return tell(options, f"{len(slugs)} entries into {store.root}", entries=slugs, path=str(store.root))
