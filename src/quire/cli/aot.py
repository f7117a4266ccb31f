"""Ahead-of-time compilation: turns options, presets and manifests into variants, and builds many in parallel.

Keys come from the same catalogue and are built by the same code as in a first call, so after a warm-up the first call
compiles nothing.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from quire.errors import CacheError, CompileError, QuireError, UnsupportedError, ValidationError
from quire.jit import (
    Entry,
    Spec,
    Store,
    build,
    host_target,
    lookup,
    request_parts,
    stop_compilers,
    user_store,
    without_matrix_unit,
)
from quire.jit.archive import Pin, import_entries, pack
from quire.jit.machine import default_jobs
from quire.jit.toolchain import HOST_TARGETS
from quire.jit.unit import request_digest
from quire.kernels import BACKENDS, KERNELS, AttentionKernel, AttentionKey, AttentionProblem, PodKey, kernel_of
from quire.kernels.attention import MLA_DIMS
from quire.kernels.expressions.variant import Variant
from quire.kernels.features import NVFP4, dtype_of, kv_dtype_of, read_mask
from quire.kernels.operation import OPERATIONS, OperationKey

__all__ = [
    "PRESETS", "Built", "Selection", "families", "family", "for_hosts", "read_manifest", "select", "spec_of", "warm",
    "warmup",
]  # fmt: skip

_LONGEST_SLUG = 300  #: what is longer is no slug, and not repeated whole in an error


@dataclass(frozen=True)
class Selection:
    """A cross product of options; each variant in it that a kernel accepts is built."""

    backends: tuple[str, ...] = BACKENDS
    head_dims: tuple[tuple[int, int], ...] = ((128, 128),)
    page_sizes: tuple[int, ...] = (0, 16)  #: 0: ragged
    dtypes: tuple[str, ...] = ("bf16",)
    kv_dtypes: tuple[str, ...] = ()  #: (): as dtypes
    masks: tuple[str, ...] = ("none", "causal")  #: with "+window" and "+cap" as wanted
    targets: tuple[str, ...] = field(default_factory=lambda: (host_target(matrix_unit=True),))
    variants: tuple[Variant, ...] = ()  #: custom ones, each instead of none


#: What `quire warmup --preset` knows: options of a Selection.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "serving": {"dtypes": ("bf16", "fp16")},
    "llama": {"head_dims": ((64, 64), (128, 128)), "dtypes": ("bf16", "fp16")},
    "gemma": {"head_dims": ((256, 256),), "masks": ("none", "causal", "causal+cap", "causal+window+cap")},
    "deepseek": {"head_dims": ((192, 128), MLA_DIMS)},
    "encoder": {
        "head_dims": ((32, 32), (64, 64)),
        "page_sizes": (0,),
        "masks": ("none",),
        "dtypes": ("fp32", "fp16", "bf16"),
    },
    "masks": {"masks": ("custom", "causal+window", "none+window", "custom+window", "causal+cap", "custom+cap")},
    "speculative": {"masks": ("causal", "tree", "tree+window"), "page_sizes": (16,)},
    "positions": {"masks": ("none+alibi", "causal+alibi", "none+rope", "causal+rope"), "page_sizes": (16,)},
    "fp8": {"head_dims": ((64, 64), (128, 128)), "kv_dtypes": ("e4m3",), "page_sizes": (16,)},
    "nvfp4": {"head_dims": ((128, 128),), "kv_dtypes": ("nvfp4",), "page_sizes": (16,)},
}


def _problems(s: Selection, target: str) -> Iterator[tuple[dict[str, Any], AttentionProblem]]:
    """Each problem of a selection, and the values of the options that it was made from."""
    options = product(s.head_dims, s.page_sizes, s.dtypes, s.masks, s.variants or (None,))
    for (qk, vo), page_size, dtype, mask, variant in options:
        q, features = dtype_of(dtype, "dtype"), read_mask(mask)
        for kv_dtype in s.kv_dtypes or (dtype,):
            kv = kv_dtype_of(kv_dtype, "kv_dtype")
            values = {
                "head_dims": (qk, vo), "page_sizes": page_size, "dtypes": dtype, "masks": mask, "kv_dtypes": kv_dtype,
                "targets": target, "variants": variant,
            }  # fmt: skip
            problem = AttentionProblem(
                target, q, kv, q, qk, vo, page_size, **features, rows=0, is_mla=(qk, vo) == MLA_DIMS, variant=variant
            )
            yield values, problem
            if kv.bits == 8:  # queries that are rounded to the type of the cache
                yield values, replace(problem, q=kv)


def _attention(kernel: AttentionKernel, problem: AttentionProblem) -> Iterator[Spec]:
    """Variants of all tile heights, because lengths decide which one a call uses; and of the operation that plan()
    launches.
    """
    for key in kernel.keys(problem):
        yield kernel.spec(key)
        if operation := kernel.planning(key):
            yield operation.spec()


def _operations(target: str, dtypes: Iterable[str], kv_dtypes: Iterable[str]) -> Iterator[Spec]:
    """Other operations that a server needs: scheduling on the host, merging, RoPE, appending, packing."""
    yield OperationKey("schedule_attention", host_target()).spec()
    if target.startswith("sm"):
        yield OperationKey("schedule_lengths", target).spec()
    target = without_matrix_unit(target)
    yield OperationKey("packbits", target).spec()
    cached = [kv_dtype_of(name, "kv_dtype") for name in kv_dtypes]
    for dtype in (dtype_of(name, "dtype") for name in dtypes):
        for name in ("merge", "merge_pair", "rope", "rope_append", "rope_norm_append", "rope_pages", "page_scores"):
            yield from (key.spec() for key in OperationKey(name, target, dtype.slug).family())
        if dtype.bits == 16 and any(kv.bits <= 8 for kv in cached):
            yield from (key.spec() for key in OperationKey("widen", target, dtype.slug).family())
        if NVFP4 in cached:
            yield from (key.spec() for key in OperationKey("append_nvfp4", target, dtype.slug).family())
    for dtype in (*(dtype_of(name, "dtype") for name in dtypes), *cached):
        if dtype is not NVFP4:
            yield from (key.spec() for key in OperationKey("append", target, f"u{dtype.bits}").family())


class _Answers:
    """The answers of kernels to the problems of a selection: which values of options are accepted, and why others are
    not.
    """

    def __init__(self, backends: Sequence[str]) -> None:
        for name in backends:
            if name not in BACKENDS:
                raise ValidationError(f"backend: expected some of {', '.join(BACKENDS)}, got {name!r}.")
        self._backends = backends
        self._taken: set[tuple[str, Any]] = set()
        self._refused: dict[tuple[str, Any], str] = {}

    def accepting(self, values: Mapping[str, Any], problem: AttentionProblem) -> list[AttentionKernel]:
        """The kernels of the chosen backends that take `problem`, which was made from `values`."""
        here = [k for k in KERNELS if k.is_for(problem) and k.backend in self._backends]
        accepting = [kernel for kernel in here if kernel.refusal(problem) is None]
        if accepting:
            self._taken |= {*values.items(), *(("backends", kernel.backend) for kernel in accepting)}
        reasons = "".join(
            f"\n  {kernel.name:<16} {kernel.refusal(problem)}" for kernel in here if kernel not in accepting
        )
        example = f", for example {problem}{reasons}" if here else f":\n  no chosen backend runs on {problem.target}"
        for value in (*values.items(), *(("backends", kernel.backend) for kernel in here)):
            self._refused.setdefault(value, example)
        return accepting

    def require(self, given: Iterable[tuple[str, Any]]) -> None:
        """UnsupportedError if no kernel accepts a value that the user gave for an option."""
        if vain := [value for value in given if value not in self._taken]:
            reasons = self._refused.get(vain[-1], ":\n  it runs on none of the targets")
            raise UnsupportedError(f"{', '.join(_spell(*value) for value in vain)}: no kernel takes it{reasons}")


def select(selection: Selection, given: Iterable[str] = ()) -> list[Spec]:
    """The variants of a selection, each once.

    `given`: options of which every value must be accepted by some kernel; otherwise UnsupportedError, with reasons.
    """
    answers = _Answers(selection.backends)
    specs: dict[str, Spec] = {}
    for target in selection.targets:
        found = [
            spec
            for values, problem in _problems(selection, target)
            for kernel in _preferred(answers.accepting(values, problem), problem)
            for spec in _attention(kernel, problem)
        ]
        if found:
            found.extend(_operations(target, selection.dtypes, selection.kv_dtypes))
        specs.update({spec.slug: spec for spec in found})
    answers.require((name, value) for name in given for value in getattr(selection, name))
    return list(specs.values())


def _preferred(kernels: list[AttentionKernel], problem: AttentionProblem) -> list[AttentionKernel]:
    """Without variants that yield to others, which `auto` never uses."""
    return [kernel for kernel in kernels if kernel.yields(problem) is None] or kernels


def _spell(name: str, value: Any) -> str:
    """An option of one value as it is written on the command line."""
    option = "arch" if name == "targets" else name.rstrip("s").replace("_", "-")
    word = "x".join(map(str, value)) if isinstance(value, tuple) else "ragged" if value == 0 else str(value)
    return f"--{option} {word}"


def spec_of(slug: str) -> Spec:
    """The variant that a slug names; ValidationError if no kernel has it."""
    if slug.partition(".")[0] in OPERATIONS:
        return OperationKey.parse(slug).spec()
    if slug.startswith("pod."):
        return PodKey.parse(slug).spec()
    key = AttentionKey.parse(slug)
    kernel = kernel_of(key)
    if reason := kernel.refusal(key.problem()):
        raise ValidationError(f"slug: {key.kernel} does not take {slug!r}: {reason}.")
    return kernel.spec(key)


def family(slug: str) -> list[Spec]:
    """The variant that a slug names, and those that other calls of the same kind need: all tile heights of an attention
    kernel, among which lengths decide, or all vector widths of an operation, among which addresses decide.
    """
    first = spec_of(slug)
    if slug.partition(".")[0] in OPERATIONS:
        others = [key.spec() for key in OperationKey.parse(slug).family()]
    elif slug.startswith("pod."):
        pod = PodKey.parse(slug)
        others = families((pod.prefill.slug, pod.decode.slug))
    else:
        key = AttentionKey.parse(slug)
        others = list(_attention(kernel_of(key), key.problem()))
    return list({spec.slug: spec for spec in (first, *others)}.values())


def families(slugs: Iterable[str]) -> list[Spec]:
    """The variants of the families of `slugs`, each once."""
    return list({spec.slug: spec for slug in slugs for spec in family(slug)}.values())


def for_hosts(specs: Iterable[Spec], hosts: Sequence[str]) -> list[Spec]:
    """The variants of `specs` that machines with CPU targets `hosts` need: GPU variants, and CPU code for each target.

    CPU code is the cpu backend's variants among `specs`, and the scheduler, which all attention calls need. Code for
    another architecture needs a cross compiler (aarch64-linux-gnu-g++). ValidationError for unknown targets.
    """
    for host in hosts:
        if host not in HOST_TARGETS:
            raise ValidationError(f"--cpu: expected some of {', '.join(HOST_TARGETS)}, got {host!r}.")
    found: dict[str, Spec] = {}
    for spec in (*specs, OperationKey("schedule_attention", host_target()).spec()):
        slugs = [spec.slug] if spec.device else [slug for host in hosts for slug in _on_host(spec.slug, host)]
        found.update((slug, spec_of(slug)) for slug in slugs)
    return list(found.values())


def _on_host(slug: str, host: str) -> list[str]:
    """The variants for the CPU target `host` that correspond to `slug`; all tile heights if it lacks this one."""
    name, _, rest = slug.split(".", 2)
    if not name.startswith("attention_"):
        return [f"{name}.{without_matrix_unit(host)}.{rest}"]
    key = AttentionKey.parse(slug)
    keys = kernel_of(key).keys(replace(key.problem(), target=host))
    return [other.slug for other in [k for k in keys if k.tile_rows == key.tile_rows] or keys]


def read_manifest(path: Path) -> list[Spec]:
    """The families of a manifest: a file of QUIRE_RECORD (JSON lines), output of `warmup --json`, or plain slugs."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(f"manifest: {path} cannot be read: {error}.") from error
    if specs := families(_slugs(text, path)):
        return specs
    raise ValidationError(f"manifest: {path} names no variant; expected lines of QUIRE_RECORD, or slugs.")


def _slugs(text: str, path: Path) -> Iterator[str]:
    whole = _object(text)
    if whole is not None and isinstance(whole.get("variants"), list):
        yield from (_slug(variant, f"{path}: variants") for variant in whole["variants"])
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield _slug(_object(line) or line.strip()[:_LONGEST_SLUG], f"{path}:{number}")


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, if it is one."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _slug(item: Any, place: str) -> str:
    slug = item.get("slug") if isinstance(item, dict) else item
    if isinstance(item, dict) and isinstance(text := item.get("expression"), str):
        Variant.parse(text)  # the slug names it
    if not isinstance(slug, str):
        raise ValidationError(f"manifest: {place}: expected a slug or an object with one, got {str(item)[:200]!r}.")
    return slug


@dataclass(frozen=True)
class Built:
    """The result of building one variant."""

    slug: str
    status: str  #: "hit", "built" or "failed"; "missing" in a dry run
    seconds: float
    path: str | None = None
    error: str | None = None
    expression: str | None = None  #: the text of a custom variant, which the slug names by its digest


def _build(spec: Spec, store: Store | None, dry_run: bool, pin: Pin | None = None) -> Built:
    start, expression = perf_counter(), dict(spec.fields).get("expression")
    try:
        if dry_run:
            entry = lookup(spec, store=store)
            return Built(
                spec.slug, "hit" if entry else "missing", perf_counter() - start, str(entry.path) if entry else None,
                expression=expression,
            )  # fmt: skip
        status, entry = build(spec, store=store, lasting=True) if pin is None else _build_pinned(spec, store, pin)
    except QuireError as error:
        return Built(spec.slug, "failed", perf_counter() - start, error=str(error), expression=expression)
    return Built(spec.slug, status, perf_counter() - start, str(entry.path), expression=expression)


def _build_pinned(spec: Spec, store: Store | None, pin: Pin) -> tuple[str, Entry]:
    """The pinned entry. It is built, or copied from the shared cache, beside the cache, and kept if it is right."""
    request = request_digest(request_parts(spec))
    if request != pin.name.partition("-")[0]:
        raise CacheError(
            f"the lock has the entry {pin.name}, this Quire would make {request}-...: its sources are others. Install "
            "the version of Quire that wrote the lock, or write it anew (quire warmup --lock)"
        )
    if (entry := lookup(spec, store=store)) is not None:
        pin.require(entry.manifest, str(entry.path.parents[2]))
        return "hit", entry
    with tempfile.TemporaryDirectory(prefix="quire-") as directory:
        status, entry = build(spec, store=Store(Path(directory, "store")))
        pin.require(entry.manifest, "the shared cache" if status == "hit" else "this machine")
        (kept,) = import_entries(io.BytesIO(pack(entry)), store or user_store())
    return "built", kept


def warm(
    specs: Sequence[Spec], *, jobs: int | None = None, store: Store | None = None, dry_run: bool = False,
    done: Callable[[Built], None] = lambda _: None, pins: Mapping[str, Pin] | None = None,
) -> list[Built]:  # fmt: skip
    """Build `specs`, `jobs` at a time, and call `done` after each. The results are in the order of `specs`. With `pins`
    (read_lock) a variant fails if what is found or built is another entry, which is then not kept.

    An exception (Ctrl-C, or raised by `done`) stops the compilers; variants that were built remain in the store.
    """
    results: dict[str, Built] = {}
    pool = ThreadPoolExecutor(max_workers=jobs or default_jobs())
    try:
        futures = [pool.submit(_build, spec, store, dry_run, pins[spec.slug] if pins else None) for spec in specs]
        for future in as_completed(futures):
            results[future.result().slug] = future.result()
            done(future.result())
    except BaseException:  # Ctrl-C: what waits is not begun, what runs is ended, what is built stays
        pool.shutdown(wait=False, cancel_futures=True)
        stop_compilers()
        raise
    pool.shutdown()
    return [results[spec.slug] for spec in specs]


def warmup(variants: str | Path | Iterable[str]) -> list[Built]:
    """Build the families of the variants in a manifest (a path) or of slugs, so that later calls compile nothing.

    Returns a Built for each variant: slug, status, seconds and path. Raises CompileError naming the first that failed.

    >>> built = quire.warmup([f"packbits.{quire.jit.host_target()}.any.v1"])
    >>> [one.error for one in built]
    [None]
    """
    specs = read_manifest(Path(variants)) if isinstance(variants, (str, Path)) else families(variants)
    results = warm(specs)
    for result in results:
        if result.status == "failed":
            raise CompileError(f"{result.slug}: {result.error}")
    return results
