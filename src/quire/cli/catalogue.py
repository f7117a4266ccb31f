"""`quire matrix` prints which kernels run where, `quire show` describes a variant, `quire plan-for` what a model needs.

Whether a kernel takes a problem, and what its variant costs, needs no compiler, GPU or torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import quire
from quire import cli
from quire.cli import add_command, presets, print_table, spell_bytes, tell
from quire.cli.aot import spec_of
from quire.errors import QuireError, ValidationError
from quire.jit import Manifest, Spec, config, explain_miss, host_target, lookup, render_unit
from quire.jit.doctor import examine
from quire.jit.machine import present_targets
from quire.jit.stores import prebuilt_stores, user_store
from quire.jit.toolchain import for_target
from quire.kernels import KERNELS, AttentionKernel, AttentionProblem, decide
from quire.kernels.attention import MLA_DIMS, AttentionKey
from quire.kernels.features import KV_DTYPES, dtype_of, kv_dtype_of, read_mask

#: GPUs and processors on which variants were compared with the oracle.
RAN_ON = {
    "sm90a": "H100, H200",
    "x86-64-v3": "x86-64 with AVX2",
    "x86-64-v4": "x86-64 with AVX-512",
    "x86-64-v4-bf16": "EPYC with AVX512-BF16",
    "x86-64-v4-amx": "Xeon with AMX",
}
#: Targets whose kernels ran on a GPU of another architecture, as PTX (`pytest -m gpu --as-gpu 8.6`) and without a wrong
#: result, and on which GPU. docs/backends.md says how many tests passed, when, and what failed.
RAN_AS_PTX = {"sm86": "H100", "sm89": "H100", "sm120a": "H100 (PTX of sm_89)"}
_RUN, _AS_PTX, _COMPILED = "run", "run as PTX on another GPU", "compiled"
_ON_ARM = "tested under an emulator; no Arm machine has run it"
_GPUS = ("sm80", "sm86", "sm89", "sm90a", "sm100a", "sm120a")
_TARGETS = (*_GPUS, "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16", "x86-64-v4-amx", "aarch64")
#: Of queries, and of keys and values.
_TYPES = (*(("bf16" if d.bits < 16 else d.slug, d.slug) for d in KV_DTYPES), ("e4m3", "e4m3"))
#: Head dims that kernels are asked for, in this order, unless the command line has others.
_DIMS = (128, 128), (512, 512), MLA_DIMS


def state(target: str) -> str:
    """What is known of a target's code: "run", "run as PTX on another GPU" or "compiled"; never more than was seen."""
    return _RUN if target in RAN_ON else _AS_PTX if target in RAN_AS_PTX else _COMPILED


def add_commands(commands: Any) -> None:
    """Add `matrix`, `show`, `plan-for`, `viz` and `doctor` to the parser."""
    matrix = add_command(
        commands, "matrix", _matrix, "which kernels run where",
        "Say which kernels take which number types on which targets. Nothing is compiled.",
    )  # fmt: skip
    matrix.add_argument(
        "--head-dim", type=cli.head_dims,
        help="such as 128 or 192x128 (default: the first of 128, 512 and 576x512 that a kernel takes)",
    )  # fmt: skip
    matrix.add_argument("--page-size", type=cli.page_sizes, default=(64,), help="or ragged (default 64)")
    matrix.add_argument("--mask", type=cli.masks, default=("causal",), help="as of `quire warmup` (default causal)")
    matrix.add_argument("--arch", type=cli.targets, help="GPU architectures, such as 8.0,9.0a")
    show = add_command(commands, "show", _show, "what a variant is", "Say what a variant is and how it is built.")
    show.add_argument("slug", metavar="SLUG")
    show.add_argument("--source", action="store_true", help="print the unit that is compiled")
    _add_plan_for(commands)
    _add_viz(commands)
    text = "find what keeps Quire from compiling, caching or loading"
    add_command(commands, "doctor", _doctor, text, f"{text.capitalize()}. Exit status 1 if there is a fault.")


def _add_plan_for(commands: Any) -> None:
    plan = add_command(
        commands, "plan-for", _plan_for, "what serving a model needs, in variants, seconds and bytes",
        "List the variants that serving a model needs, with estimated seconds and bytes.",
    )  # fmt: skip
    plan.add_argument(
        "config", type=cli.checked(presets.read_config), metavar="CONFIG",
        help="a Hugging Face config.json, with options: config.json,tp=8,kv=e4m3,page=16,graph",
    )  # fmt: skip
    plan.add_argument("--arch", type=cli.targets, help="GPU architectures (default: those of this machine)")


def _add_viz(commands: Any) -> None:
    """Its arguments are those of quire.attention.viz, which imports torch."""
    viz = commands.add_parser("viz", help="draw who computes what under a plan", prefix_chars="\0", add_help=False)
    viz.add_argument("words", nargs="*")
    viz.set_defaults(run=_viz)


def _viz(options: argparse.Namespace) -> int:
    from quire.attention import viz

    viz.main(options.words, "quire viz")
    return 0


# --- matrix ----------------------------------------------------------------------------------------------------------


def _cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A cell for each kernel, number types and target; `reason` is None if the kernel accepts all options.

    `state` is that of the target's code, as the function of this name has it.
    """
    for kernel in KERNELS:
        targets = [target for target in options.arch or _TARGETS if kernel.on_cuda == target.startswith("sm")]
        dims = options.head_dim or (_dims_of(kernel, options),)
        for (q, kv), target in product(_TYPES, targets):
            asked = product(dims, options.page_size, options.mask)
            reasons = (_reason(kernel, target, q, kv, *values) for values in asked)
            reason = next((reason for reason in reasons if reason), None)
            names = {"kernel": kernel.name, "q": q, "kv": kv, "target": target}
            yield {**names, "head_dims": dims, "reason": reason, "state": state(target)}


def _dims_of(kernel: AttentionKernel, options: argparse.Namespace) -> tuple[int, int]:
    """The first of _DIMS that the kernel takes in any types and on any target."""
    for dims in _DIMS:
        for (q, kv), target in product(_TYPES, _TARGETS):
            takes = kernel.on_cuda == target.startswith("sm")
            if takes and not _reason(kernel, target, q, kv, dims, options.page_size[0], options.mask[0]):
                return dims
    return _DIMS[0]


def _reason(kernel: AttentionKernel, target: str, q: str, kv: str, dims: Any, page_size: int, mask: str) -> str | None:
    number, cached, (qk, vo) = dtype_of(q, "dtype"), kv_dtype_of(kv, "kv_dtype"), dims
    result = number if number.bits > 8 else dtype_of("bf16", "dtype")
    problem = AttentionProblem(
        target, number, cached, result, qk, vo, page_size, **read_mask(mask), rows=1, is_mla=dims == MLA_DIMS
    )
    return kernel.refusal(problem)


def _matrix(options: argparse.Namespace) -> int:
    cells = list(_cells(options))
    return tell(options, partial(_print_cells, cells), cells=cells, ran_on=RAN_ON, ran_as_ptx_on=RAN_AS_PTX)


def _print_cells(cells: list[dict[str, Any]]) -> None:
    targets = list(dict.fromkeys(cell["target"] for cell in cells))
    marks = {(c["kernel"], c["q"], c["kv"], c["target"]): _mark(c) for c in cells}
    taken = {(c["kernel"], c["q"], c["kv"]) for c in cells if not c["reason"]}
    some = {kernel for kernel, _, _ in taken}
    names = dict.fromkeys((c["kernel"], c["q"], c["kv"]) for c in cells)
    names = {name: None for name in names if name in taken or name[0] not in some}  # types that it takes nowhere: below
    print_table(
        ("kernel", "q", "kv", *targets),
        ((*name, *(marks.get((*name, target), "") for target in targets)) for name in names),
    )
    print()
    for word, ran_on in ((_RUN, RAN_ON), (_AS_PTX, RAN_AS_PTX)):
        if found := "; ".join(f"{t}: {on}" for t, on in ran_on.items() if t in targets):
            print(f"{f'{_SHORT[word]}: ' if word in _SHORT else ''}{word}, and compared with float64, on {found}")
    print(f"{_COMPILED}: the code has run on no such card or processor")
    if "aarch64" in targets:
        print(f"aarch64: {_ON_ARM}")
    reasons = dict.fromkeys((cell["kernel"], cell["reason"]) for cell in cells if cell["reason"])
    print(*(f"no: {kernel}: {reason}" for kernel, reason in reasons), sep="\n")


_SHORT = {_AS_PTX: "as PTX"}  #: in the table


def _mark(cell: dict[str, Any]) -> str:
    return "no" if cell["reason"] else _SHORT.get(cell["state"], cell["state"])


# --- show ------------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    spec = spec_of(options.slug)
    if options.source:
        print(render_unit(spec))
        return 0
    answer = _answer(spec)
    texts = {n: ", ".join(f"{k}={v}" for k, v in a.items()) if isinstance(a, dict) else a for n, a in answer.items()}
    return tell(options, "\n".join(f"{name:<10} {text}" for name, text in texts.items()), **answer)


def _ran_on(target: str) -> str:
    if target in RAN_AS_PTX:
        return f"{RAN_AS_PTX[target]}, as PTX; no such card"
    return RAN_ON.get(target) or (_ON_ARM if target == "aarch64" else "no such card or processor")


def _answer(spec: Spec) -> dict[str, Any]:
    entry, toolchain = lookup(spec), for_target(spec.target)
    answer: dict[str, Any] = {
        "variant": spec.slug, "target": spec.target, "ran on": _ran_on(spec.target),
        "header": spec.header, "fields": dict(spec.fields), "types": dict(spec.types),
        "constants": dict(spec.constants), "compiler": toolchain.name, "warm-up": f"quire warmup {spec.warmup}",
    }  # fmt: skip
    if entry is None:
        return {**answer, "entry": f"none: {explain_miss(spec)}"}
    m = entry.manifest
    figures = {"registers": m.registers, "spills": m.spills, "stack": m.stack, "smem": m.smem, **m.exports}
    return {
        **answer, "entry": str(entry.path), "size": spell_bytes(m.size),
        "compiled": f"in {m.seconds:.2f} s" if m.seconds else "beforehand",
        "figures": {name: value for name, value in figures.items() if value is not None},
    }  # fmt: skip


def _doctor(options: argparse.Namespace) -> int:
    findings = examine(user_store(), prebuilt_stores())
    faults = sum(finding.status == "fault" for finding in findings)
    lines = [f"quire {quire.__version__}"]
    for finding in findings:
        lines.append(f"{finding.status:<6} {finding.check:<10} {finding.text}")
        if finding.fix and finding.status != "ok":
            lines.append(f"{'':<17} -> {finding.fix}")
    text = "\n".join([*lines, f"{faults} faults" if faults else "nothing is in the way"])
    tell(options, text, version=quire.__version__, ok=not faults, findings=[asdict(f) for f in findings])
    return int(bool(faults))


def targets_of(arch: tuple[str, ...] | None, *, with_host: bool) -> tuple[str, ...]:
    """What to build for: --arch, or what the environment says, or the GPUs that are present; else this host."""
    targets = arch or config.arch_list() or present_targets()
    return (*targets, host_target(matrix_unit=True)) if not arch and (not targets or with_host) else targets


# --- plan-for --------------------------------------------------------------------------------------------------------


def _plan_for(options: argparse.Namespace) -> int:
    needs = [presets.needs(options.config, target) for target in targets_of(options.arch, with_host=False)]
    estimates = [estimate(spec) for spec in {s.slug: s for need in needs for s in need.specs}.values()]
    refusals = list(dict.fromkeys(refusal for need in needs for refusal in need.refusals))
    show, variants = partial(_print_plan, estimates, refusals), [asdict(e) for e in estimates]
    tell(options, show, variants=variants, refused=refusals, model=asdict(options.config))
    return int(bool(refusals))


def _print_plan(estimates: list[Estimate], refusals: list[str]) -> None:
    rows = [(e.slug, f"{e.seconds:.1f} s", spell_bytes(e.bytes), "yes" if e.cached else "no") for e in estimates]
    print_table(("variant", "compile", "size", "cached"), rows)
    print(Cost(estimates))
    for refusal in refusals:
        print(f"not possible: {refusal}")


# --- estimates -------------------------------------------------------------------------------------------------------


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


class Cost(NamedTuple):
    """What a list of variants takes."""

    estimates: Sequence[Estimate]

    @property
    def missing(self) -> list[Estimate]:
        """Of those that have to be compiled."""
        return [estimate for estimate in self.estimates if not estimate.cached]

    def __str__(self) -> str:
        size, seconds = sum(e.bytes for e in self.estimates), sum(e.seconds for e in self.missing)
        todo = f"{len(self.missing)} to compile, about {seconds:.0f} s of one core"
        return f"{len(self.estimates)} variants, {spell_bytes(size)}; {todo}"


def cost_of(specs: Iterable[Spec]) -> Cost:
    """The cost of building variants, as far as they are not cached."""
    return Cost([estimate(spec) for spec in specs])


def in_words(slug: str) -> str:
    """ "fa3 bf16, 128 dims, pages of 16, causal, for sm90a": a variant for readers."""
    if not slug.startswith("attention_"):
        name, target, *_ = slug.split(".")
        return f"{name.replace('_', ' ')}, for {target}"
    key = AttentionKey.parse(slug)
    types = key.q.slug if key.q is key.kv else f"{key.q.slug} over {key.kv.slug}"
    dims = "/".join(str(dim) for dim in dict.fromkeys((key.head_dim_qk, key.head_dim_vo)))
    pages = f"pages of {key.page_size}" if key.page_size > 0 else "pages" if key.paged else "ragged"
    mask = slug.split(".")[5].replace("none", "no mask").replace("-", " + ")
    return f"{key.kernel.removeprefix('attention_')} {types}, {dims} dims, {pages}, {mask}, for {key.target}"


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
    dtype, kv_dtype: torch dtypes or their names; kv_dtype is that of the cache (default: dtype), or "nvfp4".
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
    kv = q if kv_dtype is None else kv_dtype_of(kv_dtype, "kv_dtype")
    dims = _whole(head_dim, "head_dim"), _whole(head_dim if head_dim_vo is None else head_dim_vo, "head_dim_vo")
    if target is not None and not isinstance(target, str):
        raise ValidationError(f"target: expected the name of a GPU or CPU, such as 'sm90a', or None, got {target!r}.")
    problem = AttentionProblem(
        target or host_target(matrix_unit=True), q, kv, q, *dims, _whole(page_size, "page_size"), **read_mask(mask),
        rows=_whole(rows, "rows"), is_mla=dims == MLA_DIMS,
    )  # fmt: skip
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
