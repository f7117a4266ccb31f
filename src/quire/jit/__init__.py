"""Quire's JIT: from a `Spec` to a loaded module. Knows nothing of attention and imports no torch.

The path of `get_module(spec)`:

    memory    return the module if this process has loaded it                          a dictionary lookup
    request   hash what the source file is made from, with its headers and target      unit.py
    stores    look in the user's cache, the machine's cache, installed packages        store.py
    lock      let one process build the entry; look in the store again                 builder.py
    tier      copy the entry from the remote cache, if one is configured               tier.py
    build     compile in a private staging directory                                   toolchain.py, builder.py
    publish   fsync, then one rename                                                   store.py
    load      check owner, modes, size and sha256, and load the checked bytes          trust.py, module.py

A hit ends before the lock: it starts no process, takes no lock, writes nothing and needs no compiler.

The name of an entry has two halves, `<request>-<toolchain>`:

    request     what the artifact computes: SCHEMA, the unit's template and values, the content of every header that it
                reaches, the target (for "native" with the processor's fingerprint). Known without a compiler, and must
                match everywhere, always.
    toolchain   the compiler: its name, version and flags. Flags belong to this half because each toolchain spells them
                differently: another toolchain compiles the same request with other flags, and its entry serves the
                same callers. A changed flag or version gives another entry.

The store decides which toolchains' entries are accepted. Read-only stores may have entries of any toolchain. An entry
of the user's cache, or of the remote cache behind it, is accepted if

  - a build made now would have the same toolchain half, by the compiler's version in `compilers.json`; or
  - a toolchain of another name made it (NVRTC and nvcc serve each other), and the user did not name the toolchain; or
  - no compiler is found, or compiling is denied, so that nothing could be built instead; or
  - the compiler that the search finds was never used with this cache, so that its version is unknown.

A compiler whose files have changed since its last use with this cache, or that the user names (QUIRE_NVCC, QUIRE_CXX,
CUDA_HOME, QUIRE_TOOLCHAIN) for the first time, is asked once for its version (`--version`); the answer is stored.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.errors import CacheError, CacheMissError, CompileError, ValidationError
from quire.jit import config, events, unit
from quire.jit.builder import compile_entry, entry_lock
from quire.jit.compilation import stop_compilers
from quire.jit.machine import CUDA_TARGETS, encode_tensor_map, host_target, without_matrix_unit
from quire.jit.module import CudaModule, HostModule, Launch, Module, load
from quire.jit.store import Entry, Manifest, Store
from quire.jit.stores import by_nearness, explain, reading_stores, user_store, writable
from quire.jit.toolchain import find_toolchain, kinds_for, require_toolchain
from quire.jit.unit import Request, Spec, Struct, make_request, toolchain_digest

if TYPE_CHECKING:
    from quire.jit.tier import Tier

__all__ = [
    "CudaModule", "Entry", "HostModule", "Launch", "Manifest", "Module", "Spec", "Store", "Struct", "build",
    "cache_miss", "denied", "encode_tensor_map", "explain_miss", "forget", "get_module",
    "host_target", "is_obtainable", "is_recording", "load", "lookup", "record", "record_batch",
    "record_use", "render_unit", "request_parts", "seal", "sealed", "stop_compilers", "supported_cuda_targets",
    "user_store", "without_matrix_unit",
]  # fmt: skip

Status = Literal["hit", "built"]

_guard = threading.Lock()
_modules: dict[tuple[Spec, Path | None], Module] = {}
#: What this process has recorded. A plan looks whether there is anything, as it has no time for more.
recorded: set[tuple[Path, str]] = set()
_record_to: Path | None = None
_sealed = False


def supported_cuda_targets() -> tuple[str, ...]:
    """Every device target that can be compiled for, oldest first."""
    return tuple(CUDA_TARGETS)


# --- hits ------------------------------------------------------------------------------------------------------------


def _accepted_toolchain(target: str, store: Store, *, denied: bool) -> str | None:
    """The toolchain digest in which entries of `store` must end, or None for any: see the module's docstring."""
    toolchain = None if store.readonly or denied else find_toolchain(target)
    if toolchain is None:
        return None
    version = toolchain.known_version(store.memory)
    if version is None:
        if not toolchain.named and not store.memory.knows(toolchain.path):
            return None
        try:
            version = toolchain.version(store.memory)
        except CompileError as error:
            events.warn_once(f"the compiler {toolchain.path} is unusable, so any compiler's entries will do: {error}")
            return None
    return toolchain_digest(toolchain.parts(target, version))


def _find(request: Request, stores: Iterator[Store], *, denied: bool, builds: bool = False) -> Entry | None:
    """The entry of the first store that has one. `builds`: the caller builds after a miss, and then reports damage."""
    spec, passed = request.spec, list[tuple[Store, str | None]]()
    for store in stores:
        if not os.path.isdir(store.root / "entries" / spec.slug):  # noqa: PTH112 - False if it is unreadable
            continue  # most misses end here, before the search for a compiler
        accepted = _accepted_toolchain(spec.target, store, denied=denied)
        quiet = builds and not store.readonly
        entry = store.find(request, accepted, quiet=quiet)
        if entry is None and accepted is not None:
            entry = _of_another_kind(request, store, quiet=quiet)
        if entry is not None:
            for earlier, toolchain in passed:  # without a build, only this search reports damaged entries
                earlier.find(request, toolchain)
            return entry
        if quiet:
            passed.append((store, accepted))
    return None


def _of_another_kind(request: Request, store: Store, *, quiet: bool) -> Entry | None:
    """An entry by NVRTC on a machine with nvcc, or the other way round; None if the user named the toolchain."""
    toolchain = find_toolchain(request.spec.target)
    entry = None if toolchain is None or toolchain.named else store.find(request, None, quiet=quiet)
    if entry is None or toolchain is None or entry.manifest.toolchain.get("toolchain") == toolchain.name:
        return None
    return entry


def _request(spec: Spec, templates: Path | None) -> Request:
    kinds_for(spec.target)  # UnsupportedError for a target of no toolchain
    return make_request(spec, templates or unit.root())


def request_parts(spec: Spec) -> Mapping[str, str]:
    """The `request` of manifests of `spec`, for the templates as they are now."""
    return _request(spec, None).parts


def render_unit(spec: Spec) -> str:
    """The source file of `spec`, as the compiler reads it."""
    return _request(spec, None).source


def lookup(spec: Spec, *, store: Store | None = None, templates: Path | None = None) -> Entry | None:
    """The entry of `spec`, or None. Never builds."""
    return _find(_request(spec, templates), reading_stores(store), denied=denied())


def is_obtainable(spec: Spec) -> bool:
    """Whether this process could load `spec`: a cache has it, or compiling is allowed and there is a compiler."""
    if not denied() and find_toolchain(spec.target) is not None:
        return True
    return lookup(spec) is not None


def explain_miss(spec: Spec, *, store: Store | None = None, templates: Path | None = None) -> str:
    """Why `spec` is not in the cache: how it differs from the nearest entry. If the cache has it: where."""
    request = _request(spec, templates)
    entry = _find(request, reading_stores(store), denied=denied())
    return _explain(request, store) if entry is None else f"it is in the cache: {entry.path}"


def _explain(request: Request, store: Store | None) -> str:
    stores = tuple(reading_stores(store))
    written = store or next(s for s in reversed(stores) if not s.readonly)
    try:
        slugs = {slug for one in stores for slug in one.slugs()}
        if not slugs:
            return "the cache is empty"
        near = by_nearness(request.spec.slug, slugs)  # called by each miss, so only the nearest manifests are read
        found = ([manifest for one in stores for _, manifest in one.manifests(slug)] for slug in near)
        manifests = next(filter(None, found), [])
    except CacheError as error:
        return f"the cache {written.root} must not be used: {error}"
    return explain(request, manifests, _known_toolchain(request.spec.target, written))


def _known_toolchain(target: str, store: Store) -> Mapping[str, str] | None:
    """The toolchain half that a build made now would have; None if only a new process could tell."""
    toolchain = find_toolchain(target)
    version = None if toolchain is None else toolchain.known_version(store.memory)
    return None if toolchain is None or version is None else toolchain.parts(target, version)


# --- misses ----------------------------------------------------------------------------------------------------------


def denied() -> bool:
    """Whether this process must not compile (QUIRE_JIT=deny, or `seal`)."""
    return _sealed or config.jit_denied()


def seal() -> None:
    """Make every later cache miss in this process raise CacheMissError. Call it when warmup() is over.

    >>> q, k = torch.randn(2, 64), torch.randn(5, 2, 64)
    >>> o = quire.single_decode_with_kv_cache(q, k, k)  # loads its kernel, as warm-up does
    >>> quire.seal()
    >>> quire.single_decode_with_kv_cache(q, k[:3], k[:3]).shape  # so this compiles nothing
    torch.Size([2, 64])
    """
    global _sealed
    _sealed = True


def sealed() -> bool:
    """Whether `seal` was called."""
    return _sealed


def _refusal(missing: Sequence[Request], store: Store | None) -> CacheMissError:
    by = "this process is sealed" if _sealed else "QUIRE_JIT=deny"
    lines = [
        f"{request.spec.slug} is not in the cache and must not be compiled ({by})\n"
        f"  target: {request.spec.target}\n"
        f"  cause:  {_explain(request, store)}\n"
        for request in missing
    ]
    one, slugs = missing[0].spec.warmup, [request.spec.slug for request in missing]
    line = one if one and len(missing) == 1 else f"--exact {' '.join(slugs)}"
    words = ",".join(("config.json", *dict.fromkeys(word for request in missing for word in request.spec.preset)))
    return CacheMissError(
        f"{''.join(lines)}  preset: {words} of `quire warmup --preset` (or config.json,vllm; config.json,sglang)\n"
        f"  to do:  quire warmup {line}"
    )


def cache_miss(specs: Iterable[Spec]) -> CacheMissError:
    """One error that names all of `specs` that no store has, instead of only the first."""
    requests = [_request(spec, None) for spec in specs]
    missing = [request for request in requests if _find(request, reading_stores(None), denied=True) is None]
    return _refusal(missing or requests, None)


class _WaitReporter:
    """Reports a wait for another process when it begins, and again every HEARTBEAT_SECONDS."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.told: float | None = None  #: length of the wait at the last report, in seconds
        self.holder = ""

    def __call__(self, holder: str, seconds: float) -> None:
        if self.told is not None and seconds - self.told < events.HEARTBEAT_SECONDS:
            return
        self.told, self.holder = seconds, holder
        events.emit(events.Event("wait", self._spec.slug, self._spec.target, seconds, cause=holder))
        events.info(f"waiting for {holder} to compile {self._spec.slug}, {seconds:.0f} s so far")


@contextmanager
def _locked(request: Request, store: Store) -> Iterator[bool]:
    """Hold the entry's lock, and report the wait for it; yields False if others held it for too long."""
    spec, report, start = request.spec, _WaitReporter(request.spec), time.monotonic()
    with entry_lock(store.lock_path(request), report) as held:
        if report.told is not None:
            events.emit(events.Event("waited", spec.slug, spec.target, time.monotonic() - start, cause=report.holder))
        yield held


def _shared_tier() -> Tier | None:
    """The remote cache, if one is configured; then its module is imported too."""
    if config.shared_cache() is None:
        return None
    from quire.jit.tier import shared_tier

    return shared_tier()


def _from_tier(request: Request, store: Store, *, denied: bool, lasting: bool) -> Entry | None:
    """The entry of `request`, copied from the remote cache to `store`, or put there by another process meanwhile."""
    if (tier := _shared_tier()) is None:
        return None
    target_store, toolchain = writable(store, lasting=lasting), find_toolchain(request.spec.target)
    accepted = _accepted_toolchain(request.spec.target, target_store, denied=denied)
    named = accepted is not None and toolchain is not None and toolchain.named
    with _locked(request, target_store):
        entry = _find(request, iter((target_store,)), denied=denied, builds=True)
        for digest in dict.fromkeys((accepted,) if named else (accepted, None)):
            if entry is None and tier.import_into(target_store, request, digest):
                entry = _find(request, iter((target_store,)), denied=denied)
    return entry


def _build(request: Request, store: Store, cause: str, *, lasting: bool) -> tuple[Status, Entry]:
    spec = request.spec
    toolchain = require_toolchain(spec.target)
    target_store = writable(store, lasting=lasting)
    parts = toolchain.parts(spec.target, toolchain.version(target_store.memory))
    target_store.memory.save()  # compiler versions asked for before the root existed
    tier, digest = _shared_tier(), toolchain_digest(parts)
    with _locked(request, target_store) as held:
        entry = target_store.find(request, digest, repair=True)
        if entry is None and tier is not None and not tier.claim(request, digest):
            tier.wait_for_object(target_store, request, digest)
            entry = target_store.find(request, digest)
        if entry is not None:
            return "hit", entry
        if not held:
            events.warn_once(f"gave up waiting for the builder of {spec.slug}; building it here as well")
        entry = compile_entry(request, toolchain, parts, target_store, cause)
        _sign(entry, target_store)
    if tier is not None:
        tier.offer(entry)
    return "built", entry


def _sign(entry: Entry, store: Store) -> None:
    """Sign what was compiled here, if QUIRE_SIGNING_KEY names a key."""
    if config.signing_key() is None or store.root / "entries" not in entry.path.parents:
        return
    from quire.jit.trust import signing_key

    if (key := signing_key()) is not None:
        store.sign(entry.path, key)


def build(
    spec: Spec, *, store: Store | None = None, templates: Path | None = None, lasting: bool = False
) -> tuple[Status, Entry]:
    """Make sure that `spec` is in a store: ("hit", entry) or ("built", entry). Safe from many threads and processes.

    With `store`, only that store is read and filled, also from the remote cache, if one is configured. If a store
    cannot be written, a temporary one replaces it; with `lasting`, CacheError is raised instead. Raises CacheMissError
    if compiling is denied, and CompileError if the compiler is missing or fails.
    """
    start = time.monotonic()
    request, forbidden = _request(spec, templates), denied()
    entry = _find(request, reading_stores(store), denied=forbidden, builds=not forbidden)
    status: Status = "hit"
    if entry is None:
        entry = _from_tier(request, store or user_store(), denied=forbidden, lasting=lasting)
    if entry is None:
        if forbidden:
            raise _refusal([request], store)
        status, entry = _build(request, store or user_store(), _explain(request, store), lasting=lasting)
    if status == "hit":
        seconds = time.monotonic() - start
        events.emit(events.Event("hit", spec.slug, spec.target, seconds, path=str(entry.path)))
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
        record_use(spec)
    return module


def forget() -> None:
    """Forget loaded modules, so that the next `get_module` reads the stores again. Plans keep their modules."""
    with _guard:
        _modules.clear()


# --- record ----------------------------------------------------------------------------------------------------------


def record(path: str | Path | None) -> None:
    """Append every variant that this process uses to the manifest `path` (None: stop); QUIRE_RECORD does so too.

    >>> import pathlib, tempfile
    >>> manifest = pathlib.Path(tempfile.mkdtemp(), "used.jsonl")
    >>> quire.record(manifest)
    >>> k = torch.randn(5, 2, 64)
    >>> o = quire.single_decode_with_kv_cache(torch.randn(2, 64), k, k)
    >>> quire.record(None)
    >>> "attention_cpu" in manifest.read_text()  # which warmup() and `quire warmup` take
    True
    """
    global _record_to
    _record_to = None if path is None else Path(path).expanduser().absolute()
    if not is_recording():
        recorded.clear()
    for spec, _ in list(_modules):
        record_use(spec)


def is_recording() -> bool:
    """Whether the variants that this process uses are recorded."""
    return (_record_to or config.record_path()) is not None


def record_use(spec: Spec) -> None:
    """Append a variant to the manifest, if recording: one that is used, or that a call of the same kind may use."""
    texts = {name: value for name, value in spec.fields if name == "expression"}  # the slug has only its digest
    _record(spec.slug, lambda: {"slug": spec.slug, "target": spec.target, "warmup": spec.warmup, **texts})


def record_batch(spec: Spec, size: str, describe: Callable[[], Mapping[str, Any]]) -> None:
    """Append a batch of a variant to the manifest, if recording: the first of each `size`."""
    _record(f"{spec.slug} {size}", lambda: {"slug": spec.slug, "target": spec.target, "batch": describe()})


def _record(key: str, describe: Callable[[], Mapping[str, Any]]) -> None:
    path = _record_to or config.record_path()
    if path is None:
        return
    with _guard:
        if (path, key) in recorded:
            return
        recorded.add((path, key))
    line = json.dumps(describe()) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(line.encode())  # one write, so that lines of several processes do not mix
    except OSError as error:
        raise ValidationError(f"the record {path} cannot be written: {error}") from error
