"""Whether a kernel takes a problem, and what its variant costs to build; needs no compiler, GPU or torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from quire.cli.aot import spec_of
from quire.errors import QuireError, ValidationError
from quire.jit import Manifest, Spec, host_target, lookup
from quire.jit.stores import prebuilt_stores, user_store
from quire.kernels import AttentionProblem, decide
from quire.kernels.attention import MLA_DIMS
from quire.kernels.features import read_mask
from quire.kernels.types import dtype_of

#: Seconds and bytes of a compile where no cache in reach has a variant of the kernel; others take as an operation does.
_TYPICAL: Mapping[str, tuple[float, int]] = {
    "attention_fa2": (1.0, 60_000),
    "attention_fa3": (1.7, 85_000),
    "attention_fa3_fp8": (2.5, 75_000),
    "attention_decode": (1.0, 50_000),
    "attention_wide": (1.5, 60_000),
    "attention_cpu": (1.5, 35_000),
    "attention_mla_decode": (1.2, 100_000),
    "attention_mla_fa2": (1.6, 90_000),
    "attention_mla_fa3": (3.0, 115_000),
    "attention_mla_cpu": (1.3, 60_000),
}
_TYPICAL_OPERATION = (0.5, 12_000)


@dataclass(frozen=True)
class Estimate:
    """The cost of building one variant."""

    slug: str
    seconds: float  #: of one core
    bytes: int  #: of the artifact
    cached: bool  #: it is there: the figures are those of its own build


def estimate(variant: str | Spec) -> Estimate:
    """The cost of building a variant, without building it. `variant`: a slug, as in messages and `quire plan-for`.

    The figures are those of the cache entry if there is one, else the median of other variants of the same kernel in
    the caches, else typical values. Raises ValidationError if the slug names no variant.

    >>> quire.estimate("attention_fa3.sm90a.bf16-bf16-bf16.d128-128.paged16.causal.m128").seconds < 60
    True
    """
    if not isinstance(variant, (str, Spec)):
        raise ValidationError(f"variant: expected a slug or a quire.jit.Spec, got {variant!r}.")
    spec = spec_of(variant) if isinstance(variant, str) else variant
    entry, name = lookup(spec), spec.slug.partition(".")[0]
    if entry is not None and entry.manifest.seconds:
        return Estimate(spec.slug, entry.manifest.seconds, entry.manifest.size, True)
    alike = [manifest for manifest in _manifests(f"{name}.") if manifest.target[:2] == spec.target[:2]]
    seconds, size = _TYPICAL.get(name, _TYPICAL_OPERATION)
    sizes = [m.size for m in alike] if entry is None else [entry.manifest.size]
    timed = [m.seconds for m in alike if m.seconds]  # packages of prebuilt variants do not say how long theirs took
    return Estimate(
        spec.slug, median(timed) if timed else seconds, int(median(sizes)) if sizes else size, entry is not None
    )


def _manifests(start: str) -> Iterator[Manifest]:
    """Manifests of cache entries whose slug begins with the prefix."""
    for store in (*prebuilt_stores(), user_store()):
        for slug in store.slugs():
            if slug.startswith(start):
                yield from (manifest for _, manifest in store.manifests(slug))


@dataclass(frozen=True)
class Support:
    """The answer of is_supported(): true or false, with reasons."""

    supported: bool
    slug: str  #: of the variant that would run; "" if none would
    reason: str  #: what each kernel says

    def __bool__(self) -> bool:
        return self.supported


def is_supported(
    *, head_dim: int, head_dim_vo: int | None = None, dtype: Any = "float16", kv_dtype: Any = None, page_size: int = 0,
    mask: str = "causal", rows: int = 128, target: str | None = None, backend: str = "auto",
) -> Support:  # fmt: skip
    """Whether any kernel accepts such a call, and which; nothing is compiled, and no compiler or GPU is needed.

    head_dim: of queries and keys; head_dim_vo: of values (the same by default). 576 and 512 are the latents of MLA.
    dtype, kv_dtype: torch dtypes or their names; kv_dtype is that of the cache (default: dtype).
    page_size: tokens of a page; 0: ragged.
    mask: as on the command line: "none", "causal", "custom" or "tree", optionally followed by "+window" and
        "+cap".
    rows: queries per request times query heads per KV head; 1 query with 8 heads per KV head has 8 rows.
    target: the GPU or CPU, such as "sm90a"; this machine's CPU by default.

    Returns a Support, which is true or false. Raises ValidationError for unknown names.

    >>> bool(quire.is_supported(head_dim=128, dtype="bfloat16", page_size=16, target="sm90a"))
    True
    >>> print(quire.is_supported(head_dim=60, target="sm80").reason.splitlines()[-2].split(";")[1].strip())
    pad with zeros to 64 and pass sm_scale=0.1291
    """
    q = dtype_of(dtype, "dtype")
    kv = q if kv_dtype is None else dtype_of(kv_dtype, "kv_dtype")
    dims = _whole(head_dim, "head_dim"), _whole(head_dim if head_dim_vo is None else head_dim_vo, "head_dim_vo")
    if target is not None and not isinstance(target, str):
        raise ValidationError(f"target: expected the name of a GPU or CPU, such as 'sm90a', or None, got {target!r}.")
    problem = AttentionProblem(
        target or host_target(matrix_unit=True),
        q,
        kv,
        q,
        *dims,
        _whole(page_size, "page_size"),
        **read_mask(mask),
        rows=_whole(rows, "rows"),
        is_mla=dims == MLA_DIMS,
    )
    try:
        decision = decide(problem, backend)
    except QuireError as error:
        if not isinstance(error, NotImplementedError):
            raise
        return Support(False, "", str(error))
    return Support(True, decision.key.slug, str(decision))


def _whole(value: Any, name: str) -> int:
    """`value`, which must be an integer: a kernel says whether it is a good one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValidationError(f"{name}: expected an integer, got {value!r}.")
    return value
