"""Quire's JIT: from a `Spec` to a loaded module. Knows nothing of attention and imports no torch.

The path of `get_module(spec)`:

    memory    this process has it                                                      a dictionary look-up
    request   hash what the unit is made from, with its headers, flags and target              request.py
    stores    the prebuilt package (quire_jit_cache), then the user's cache            store.py
    lock      one builder for one entry; look again                                    lock.py
    build     ninja in a private staging directory, fsync, publish by one rename       builder.py
    load      check owner, modes, size and sha256, then open                           module.py

A hit ends before the lock: it starts no process, takes no lock, writes nothing and needs no compiler.

Which compiler made an entry is part of its name, and it is used like this. In the user's cache an entry is accepted if

  - its compiler is the one that a build would use now, as far as `compilers.json` remembers that one; or
  - no compiler is found, or compiling is denied: then nothing could be built, and every compiler's work is as good; or
  - the compiler that the search finds was never used with this cache, so that nothing says it differs.

A compiler that has changed since the cache met it, or that the user named (QUIRE_NVCC, QUIRE_CXX, CUDA_HOME) for the
first time, is asked once who it is (`--version`, some 10 ms); its answer is remembered. Prebuilt stores are accepted
whatever compiler made them: they pin their own. All other parts of the key must match everywhere, always.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from quire import _templates, config
from quire.errors import CacheError, CacheMissError, CompileError, ValidationError
from quire.jit import events, progress
from quire.jit.archive import export_entries, import_entries
from quire.jit.builder import compile_entry
from quire.jit.cpu import host_target
from quire.jit.driver import encode_tensor_map
from quire.jit.lock import entry_lock
from quire.jit.miss import explain
from quire.jit.module import CudaModule, HostModule, Launch, Module, load
from quire.jit.request import Request, compiler_digest, make_request
from quire.jit.spec import Spec, Struct
from quire.jit.store import Entry, Manifest, Store
from quire.jit.toolchain import CUDA_TARGETS, Toolchain

__all__ = [
    "CudaModule",
    "Entry",
    "HostModule",
    "Launch",
    "Manifest",
    "Module",
    "Spec",
    "Store",
    "Struct",
    "build",
    "denied",
    "encode_tensor_map",
    "explain_miss",
    "export_entries",
    "forget",
    "get_module",
    "host_target",
    "import_entries",
    "load",
    "lookup",
    "prebuilt_stores",
    "record",
    "seal",
    "sealed",
    "supported_cuda_targets",
    "user_store",
]

Status = Literal["hit", "built"]

_PREBUILT_PACKAGE = "quire_jit_cache"

_guard = threading.Lock()
_modules: dict[tuple[Spec, Path | None], Module] = {}
_stores: dict[tuple[Path, bool], Store] = {}
_recorded: set[tuple[Path, str]] = set()
_record_to: Path | None = None
_sealed = False


def supported_cuda_targets() -> tuple[str, ...]:
    """Every device target that can be compiled for, oldest first."""
    return tuple(CUDA_TARGETS)


# --- stores ----------------------------------------------------------------------------------------------------------


def user_store() -> Store:
    """The user's cache (QUIRE_CACHE_DIR, or the user's cache directory). Nothing is created here."""
    root, private = config.cache_root(), not config.cache_root_is_explicit()
    with _guard:
        return _stores.setdefault((root, False), Store(root, private=private))


def prebuilt_stores() -> tuple[Store, ...]:
    """The read-only stores of the installed package `quire_jit_cache`: its `store` directory, or none."""
    try:
        found = importlib.util.find_spec(_PREBUILT_PACKAGE)
    except (ImportError, ValueError):  # half-installed: as good as absent
        found = None
    places = list(found.submodule_search_locations or ()) if found is not None else []
    roots = [Path(place) / "store" for place in places if (Path(place) / "store" / "entries").is_dir()]
    with _guard:
        return tuple(_stores.setdefault((r, True), Store(r, readonly=True, trusted_group=True)) for r in roots)


_private_store: Store | None = None


def _temporary_store(instead_of: Store, reason: str) -> Store:
    """A store that lives as long as this process, for when the cache cannot be written."""
    global _private_store
    with _guard:
        if _private_store is None:
            root = Path(tempfile.mkdtemp(prefix="quire-"))
            atexit.register(shutil.rmtree, root, ignore_errors=True)
            _private_store = Store(root, private=True)
            progress.warn_once(
                f"the cache {instead_of.root} cannot be written ({reason}); compiling into {root} for this process. "
                "Set QUIRE_CACHE_DIR to a directory that lasts"
            )
        return _private_store


def _reading_stores(store: Store | None) -> Iterator[Store]:
    """Where to look, in order. An explicit store is the only one: filling it is what its caller wants."""
    if store is not None:
        yield store
        return
    yield from prebuilt_stores()
    yield user_store()
    if _private_store is not None:
        yield _private_store


# --- hits ------------------------------------------------------------------------------------------------------------


def _acceptance(toolchain: Toolchain, store: Store, *, denied: bool) -> Callable[[str], bool]:
    """Which compilers' entries of `store` count: see the module's docstring."""

    def anyone(digest: str) -> bool:  # noqa: ARG001
        return True

    compiler = None if store.readonly or denied else toolchain.find()
    if compiler is None:
        return anyone
    identity = toolchain.recall(compiler, store.memory)
    if identity is None:
        if not compiler.named and not toolchain.met(compiler, store.memory):
            return anyone
        try:
            identity = toolchain.identify(compiler, store.memory)
        except CompileError as error:
            progress.warn_once(f"the compiler {compiler.path} is unusable, so any compiler's entries will do: {error}")
            return anyone
    wanted = compiler_digest(identity)
    return lambda digest: digest == wanted


def _find(request: Request, stores: Iterator[Store], *, denied: bool) -> Entry | None:
    for store in stores:
        if not (
            store.root / "entries" / request.spec.slug
        ).is_dir():  # most misses end here, before any compiler is sought
            continue
        entry = store.find(request, _acceptance(request.toolchain, store, denied=denied))
        if entry is not None:
            return entry
    return None


def _request(spec: Spec, templates: Path | None, store: Store | None, *, ask: bool) -> Request:
    memory = (store or user_store()).memory
    return make_request(spec, templates or _templates.root(), memory, ask=ask)


def lookup(spec: Spec, *, store: Store | None = None, templates: Path | None = None) -> Entry | None:
    """The entry of `spec`, or None. Never builds."""
    request = _request(spec, templates, store, ask=not denied())
    return _find(request, _reading_stores(store), denied=denied())


def explain_miss(spec: Spec, *, store: Store | None = None, templates: Path | None = None) -> str:
    """Why `spec` is not in the cache: what differs from the nearest entry that is."""
    request = _request(spec, templates, store, ask=not denied())
    return _explain(request, store)


def _explain(request: Request, store: Store | None) -> str:
    stores = list(_reading_stores(store))
    manifests = [manifest for one in stores for _, manifest in one.manifests()]
    compiler = request.toolchain.find()
    identity = None if compiler is None else request.toolchain.recall(compiler, stores[-1].memory)
    return explain(request, manifests, identity)


# --- misses ----------------------------------------------------------------------------------------------------------


def denied() -> bool:
    """Whether this process must not compile (QUIRE_JIT=deny, or `seal`)."""
    return _sealed or config.jit_denied()


def seal() -> None:
    """From now on a miss in this process raises CacheMissError: call it when warm-up is over."""
    global _sealed
    _sealed = True


def sealed() -> bool:
    """Whether `seal` was called."""
    return _sealed


def _refuse(request: Request, store: Store | None) -> CacheMissError:
    spec = request.spec
    by = "this process is sealed" if _sealed else "QUIRE_JIT=deny"
    line = f"quire warmup {spec.warmup}".rstrip()
    return CacheMissError(
        f"{spec.slug} is not in the cache and must not be compiled ({by})\n"
        f"  target: {spec.target}\n"
        f"  cause:  {_explain(request, store)}\n"
        f"  to do:  {line}"
    )


def _wait_reporter(spec: Spec) -> Callable[[str, float], None]:
    told = -progress.HEARTBEAT_SECONDS

    def report(holder: str, seconds: float) -> None:
        nonlocal told
        if seconds - told < progress.HEARTBEAT_SECONDS:
            return
        told = seconds
        events.emit(events.Event("wait", spec.slug, spec.target, seconds, cause=holder))
        progress.info(f"waiting for {holder} to compile {spec.slug}, {seconds:.0f} s so far")

    return report


def _build(request: Request, store: Store, templates: Path, cause: str) -> tuple[Status, Entry]:
    toolchain = request.toolchain
    compiler = toolchain.require()
    place = store
    if reason := store.prepare():
        place = _temporary_store(store, reason)
        if failure := place.prepare():
            raise CacheError(f"neither {store.root} ({reason}) nor {place.root} ({failure}) can be written")
    identity = toolchain.identify(compiler, place.memory)
    place.memory.save()  # what was learnt before the root existed
    wanted = compiler_digest(identity)
    with entry_lock(place.lock_path(request, identity), _wait_reporter(request.spec)) as held:
        entry = place.find(request, lambda digest: digest == wanted, repair=True)
        if entry is not None:
            return "hit", entry
        if not held:
            progress.warn_once(f"gave up waiting for the builder of {request.spec.slug}; building it here as well")
        return "built", compile_entry(request, compiler, identity, place, templates, cause)


def build(spec: Spec, *, store: Store | None = None, templates: Path | None = None) -> tuple[Status, Entry]:
    """Make sure that `spec` is in a store: ("hit", entry) or ("built", entry). Safe from many threads and processes.

    With `store`, only that one is looked into and filled. Raises CacheMissError where compiling is denied, CompileError
    where a compiler is missing or fails.
    """
    forbidden = denied()
    where = templates or _templates.root()
    request = _request(spec, where, store, ask=not forbidden)
    entry = _find(request, _reading_stores(store), denied=forbidden)
    status: Status = "hit"
    if entry is None:
        if forbidden:
            raise _refuse(request, store)
        status, entry = _build(request, store or user_store(), where, _explain(request, store))
    if status == "hit":
        events.emit(events.Event("hit", spec.slug, spec.target, path=str(entry.path)))
    return status, entry


def get_module(spec: Spec, *, templates: Path | None = None) -> Module:
    """The loaded module of `spec`, compiling it if no store has it. The same object every time in one process."""
    key = (spec, templates)
    module = _modules.get(key)
    if module is None:
        _, entry = build(spec, templates=templates)
        fresh = load(entry)
        with _guard:
            module = _modules.setdefault(key, fresh)
        _record(spec)
    return module


def forget() -> None:
    """Drop this process's modules, so that the next `get_module` reads the stores again. Plans keep theirs."""
    with _guard:
        _modules.clear()


# --- record ----------------------------------------------------------------------------------------------------------


def record(path: str | Path | None) -> None:
    """Append every variant that this process uses to the manifest `path` (None: stop); QUIRE_RECORD does so too."""
    global _record_to
    _record_to = None if path is None else Path(path).expanduser().absolute()
    if _record_to is not None:
        for spec, _ in list(_modules):
            _record(spec)


def _record(spec: Spec) -> None:
    path = _record_to or config.record_path()
    if path is None:
        return
    with _guard:
        if (path, spec.slug) in _recorded:
            return
        _recorded.add((path, spec.slug))
    line = json.dumps({"slug": spec.slug, "target": spec.target, "warmup": spec.warmup})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")  # one short write: lines of several processes do not mix
    except OSError as error:
        raise ValidationError(f"the record {path} cannot be written: {error}") from error
