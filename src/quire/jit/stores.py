"""The stores in which entries are looked for, why none was found, and which entries go when a store is full.

The last use of an entry is the last read of its artifact, which the file system notes (with "relatime", the default,
once a day), or its creation if that is later. A hit therefore writes nothing.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CacheError
from quire.jit import config, events
from quire.jit.store import Manifest, Store
from quire.jit.trust import trusted_keys
from quire.jit.unit import Request

if TYPE_CHECKING:
    pass

_PREBUILT_PACKAGE = "quire_jit_cache"
_GROUP = "quire.stores"  #: entry points of this group name packages with a directory `store`
_WRITABLE = "Set QUIRE_CACHE_DIR to a directory that you alone can write"
_stores: dict[tuple[Path, bool], Store] = {}
_stores_guard = threading.Lock()


# --- stores ----------------------------------------------------------------------------------------------------------


def user_store() -> Store:
    """The user's cache (QUIRE_CACHE_DIR, or the user's cache directory). Nothing is created here."""
    root, private = config.cache_root(), not config.cache_root_is_explicit()
    with _stores_guard:
        return _stores.setdefault((root, False), Store(root, private=private))


def prebuilt_stores() -> tuple[Store, ...]:
    """The read-only stores that exist: the machine's (QUIRE_SYSTEM_CACHE), then those of installed packages.

    Such a package has a directory `store`, and is `quire_jit_cache` or named by an entry point of the group
    `quire.stores`. The search runs no code of the packages. With QUIRE_TRUSTED_KEYS, their entries must be signed.
    """
    system, packaged = config.system_cache(), _package_stores(tuple(sys.path))
    roots = [root for root in (system, *packaged) if os.path.isdir(root / "entries")]  # noqa: PTH112 - runs at each miss
    with _stores_guard:
        return tuple(_stores.setdefault((root, True), _prebuilt(root, root in packaged)) for root in roots)


def _prebuilt(root: Path, packaged: bool) -> Store:
    """A read-only store. Entries of a package came from elsewhere, and must be signed if there are trusted keys."""
    return Store(root, readonly=True, trusted_group=packaged, keys=trusted_keys if packaged else lambda: None)


@cache
def _package_stores(_search: tuple[str, ...]) -> tuple[Path, ...]:
    """The directories `store` of installed packages, for this value of sys.path."""
    import importlib.metadata  # after a miss in the user's cache only

    packages = [_PREBUILT_PACKAGE, *sorted(point.value for point in importlib.metadata.entry_points(group=_GROUP))]
    return tuple(place / "store" for package in dict.fromkeys(packages) for place in _places(package))


def _places(package: str) -> list[Path]:
    """The directories of a package, which is not imported."""
    try:
        found = importlib.util.find_spec(package.partition(".")[0])
    except (ImportError, ValueError):  # an incomplete installation counts as absent
        found = None
    parents = list(found.submodule_search_locations or ()) if found is not None else []
    return [Path(parent, *package.split(".")[1:]) for parent in parents]


_private_store: Store | None = None


def _temporary_store(instead_of: Store, reason: str) -> Store:
    """A temporary store, deleted when this process ends, in place of a cache that cannot be written."""
    global _private_store
    with _stores_guard:
        if _private_store is None:
            try:
                root = Path(tempfile.mkdtemp(prefix="quire-"))
            except OSError as error:
                raise CacheError(
                    f"cannot write to {instead_of.root} ({reason}) nor elsewhere ({error}). {_WRITABLE}"
                ) from error
            atexit.register(shutil.rmtree, root, ignore_errors=True)
            _private_store = Store(root, private=True)
            events.warn_once(
                f"the cache {instead_of.root} cannot be written ({reason}); compiling into {root} for this process. "
                f"{_WRITABLE}"
            )
        return _private_store


def reading_stores(store: Store | None) -> Iterator[Store]:
    """The stores to search, in order. An explicit store is the only one, because its caller wants it filled."""
    if store is not None:
        yield store
        return
    yield user_store()
    if _private_store is not None:
        yield _private_store
    yield from prebuilt_stores()


def writable(store: Store, *, lasting: bool) -> Store:
    """`store`, if it can be written; else a temporary store, or CacheError if the store must be `lasting`."""
    if not (reason := store.prepare()):
        return store
    if lasting:
        raise CacheError(f"the cache {store.root} cannot be written: {reason}. {_WRITABLE}")
    temporary = _temporary_store(store, reason)
    if failure := temporary.prepare():
        raise CacheError(f"cannot write to {store.root} ({reason}) nor {temporary.root} ({failure}). {_WRITABLE}")
    return temporary


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The labels under which two mappings differ: those of the new one in order, then those of the old one alone."""
    labels = [*new, *(label for label in old if label not in new)]
    return [label for label in labels if old.get(label) != new.get(label)]


def _common_prefix(one: str, other: str) -> int:
    """How many characters two names have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _name_part(label: str, old: str, new: str) -> str:
    """How one part of an entry's name differs; "" if it does not."""
    if label.startswith("header "):
        return f"{label} {'changed' if old and new else 'was added' if new else 'was removed'}"
    if label == "source":
        return "variant.jinja changed, or the values that it is given"
    if label == "flags":
        gone = [word for word in old.split() if word not in new.split()]
        came = [word for word in new.split() if word not in old.split()]
        return f"flags changed: {' '.join(gone) or 'nothing'} -> {' '.join(came) or 'nothing'}"
    if label == "version":
        lines = zip_longest(new.splitlines(), old.splitlines(), fillvalue="nothing")
        here, there = next(((a, b) for a, b in lines if a != b), (new, old))
        return f"the compiler is {here}, the cache has {there}"
    return f"{label} is {new!r}, the cache has {old!r}"


def _name_parts(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [_name_part(label, str(old.get(label, "")), new.get(label, "")) for label in _changed(old, new)]


def _first(reasons: list[str]) -> str:
    return "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")


def _same_variant(request: Request, manifest: Manifest, toolchain: Mapping[str, str] | None) -> str:
    """Why the entry of the same slug cannot be used."""
    reasons = _name_parts(manifest.request, request.parts)
    if not reasons and toolchain is not None:
        reasons = _name_parts(manifest.toolchain, toolchain)
    return _first(reasons) or "the entry in the cache is damaged or not to be trusted"


def _kernel(slug: str) -> str:
    return slug.partition(".")[0]


def by_nearness(slug: str, slugs: Iterable[str]) -> list[str]:
    """Those of `slugs` with the same kernel as `slug`, those that differ in the fewest words first."""

    def distance(other: str) -> tuple[int, int, str]:
        words = zip_longest(slug.split("."), other.split("."))
        return sum(a != b for a, b in words), -_common_prefix(other, slug), other

    return sorted((other for other in slugs if _kernel(other) == _kernel(slug)), key=distance)


def _short(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields without texts of several lines, whose digests are fields, too."""
    return {name: value for name, value in fields.items() if "\n" not in value}


def explain(request: Request, manifests: Sequence[Manifest], toolchain: Mapping[str, str] | None) -> str:
    """One line. `manifests`: those of the nearest slug; `toolchain`: the second half of the name of a build."""
    spec = request.spec
    if not manifests:
        return f"the cache has no variant of {_kernel(spec.slug)}"
    if manifests[0].slug == spec.slug:
        closest = min(manifests, key=lambda m: (len(_changed(m.request, request.parts)), -m.created))
        return _same_variant(request, closest, toolchain)
    fields, old = ({"target": one.target, **_short(dict(one.fields))} for one in (spec, manifests[0]))
    reasons = [f"{name}={fields.get(name, 'unset')}, not {old.get(name, 'unset')}" for name in _changed(old, fields)]
    words = zip_longest(
        spec.slug.split("."), manifests[0].slug.split("."), fillvalue="nothing"
    )  # kernels without fields
    return f"nearest is {manifests[0].slug}: {_first(reasons or [f'{a}, not {b}' for a, b in words if a != b])}"


_STALE_SECONDS = 3600.0  #: age at which no builder still works in a staging directory


@dataclass(frozen=True)
class Kept:
    """An entry, its size, and its last use."""

    path: Path
    bytes: int
    used: float  #: seconds since the epoch


def kept_entries(store: Store) -> list[Kept]:
    """Every entry of `store`, valid or not, the least recently used first."""
    found = []
    for path in store.paths():
        files = [file.lstat() for file in path.iterdir()] if path.is_dir() and not path.is_symlink() else []
        used = max((max(status.st_atime, status.st_mtime) for status in files), default=0.0)
        found.append(Kept(path, sum(status.st_size for status in files), used))
    return sorted(found, key=lambda kept: (kept.used, kept.path))


def to_remove(
    entries: list[Kept], *, max_bytes: int | None = None, unused_for: float | None = None, now: float = 0.0
) -> list[Kept]:
    """The entries not used for `unused_for` seconds, and the least recently used ones beyond `max_bytes` in total."""
    left, chosen = sum(kept.bytes for kept in entries), []
    for kept in entries:
        if (unused_for is not None and now - kept.used > unused_for) or (max_bytes is not None and left > max_bytes):
            chosen.append(kept)
            left -= kept.bytes
    return chosen


def require_times_of_use(store: Store) -> None:
    """CacheError on a file system that does not note reads (mounted with noatime)."""
    if store.root.is_dir() and os.statvfs(store.root).f_flag & os.ST_NOATIME:
        raise CacheError(
            f"{store.root} is on a file system mounted with noatime, which does not note when entries are used; "
            "limit the cache with --max-size, which then removes the oldest entries first."
        )


def outdated(store: Store, is_current: Callable[[Manifest], bool]) -> Iterator[Path]:
    """The entries that this version of Quire would not make, and those without a readable manifest."""
    manifests = store.manifests()
    current = {path for path, m in manifests if path.parent.name == m.slug and is_current(m)}
    yield from (path for path in store.paths() if path not in current)


def sweep(store: Store) -> None:
    """Remove logs of failed compiles, entries in quarantine, and staging directories of killed builders."""
    for name, oldest in (("logs", 0.0), ("quarantine", 0.0), ("staging", _STALE_SECONDS)):
        directory = store.root / name
        if directory.is_symlink() or not directory.is_dir():
            continue
        for path in directory.iterdir():
            if time.time() - path.lstat().st_mtime < oldest:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
