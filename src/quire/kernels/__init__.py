"""The catalogue: which kernels exist, which one takes a problem, and which two run in one launch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from quire.errors import QuireError, UnsupportedError, ValidationError
from quire.jit.unit import Spec
from quire.kernels.attention import GPU_EXPORTS, AttentionKernel, AttentionKey, AttentionProblem, TileShape, same_rows
from quire.kernels.features import ANY_PAGE_SIZE, NVFP4, MaskMode, Operand, OperandBlock, PosEncodingMode, dtype_of
from quire.kernels.hopper import FA3, FA3_FP8, MLA_DECODE, MLA_FA3
from quire.kernels.params import PodParams, struct_of
from quire.kernels.portable import CPU, DECODE, FA2, MLA_CPU, MLA_FA2, WIDE

__all__ = [
    "BACKENDS", "KERNELS", "PIN", "READS_8_BITS", "WISHES", "AttentionKernel", "AttentionKey", "AttentionProblem",
    "Decision", "PodKey", "TileShape", "Verdict", "backends", "decide", "kernel_of", "pod_reason", "same_rows",
    "variants_for_all_lengths",
]  # fmt: skip

#: In order of preference: `auto` takes the first kernel that accepts and does not yield to later ones.
KERNELS: tuple[AttentionKernel, ...] = (
    DECODE, FA3, FA3_FP8, FA2, WIDE, CPU, MLA_DECODE, MLA_FA3, MLA_FA2, MLA_CPU,
)  # fmt: skip

PIN = "quire:"  #: `backend="quire:fa2"`: that kernel, or an error
READS_8_BITS = PIN + FA3_FP8.backend  #: the one that multiplies queries of 8 bits as they are
BACKENDS = tuple(dict.fromkeys(kernel.backend for kernel in KERNELS))  #: their names
#: FlashInfer's names of its own implementations. They mean `auto`.
WISHES = frozenset(
    {"cute-dsl", "cute-dsl-prims", "cutile", "cutlass", "cudnn", "fa2", "fa3", "fmha_v2"}
    | {"trtllm-fmha-v2", "trtllm-gen", "trtllm-native", "xqa"}
)


@dataclass(frozen=True)
class Verdict:
    """The answer of one kernel to a problem."""

    kernel: AttentionKernel
    reason: str | None  #: why the kernel refuses; None: it accepts
    yields: str | None = None  #: why another kernel that accepts is preferred

    def __str__(self) -> str:
        return f"{self.kernel.name:<16} {self.reason or self.yields or 'accepts'}"


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, as a key of plans
class Decision:
    """The kernel that was chosen, and the answers of all kernels for the device."""

    problem: AttentionProblem
    kernel: AttentionKernel
    key: AttentionKey
    trace: tuple[Verdict, ...]
    loaded: dict[Any, Any] = field(default_factory=dict)  #: its module on each device (engine/planner.py)
    templates: dict[Any, Any] = field(default_factory=dict)  #: plan templates (engine/planner.py)
    checked: dict[Any, Any] = field(default_factory=dict)  #: layouts that passed all checks (engine/attention.py)

    @cached_property
    def spec(self) -> Spec:
        """The input of the compiler."""
        return self.kernel.spec(self.key)

    @cached_property
    def tensors(self) -> tuple[Operand, ...]:
        """The tensors of the kernel: operands and their scales, in the order of the parameter struct."""
        return self.kernel.tensors(self.key)

    @cached_property
    def blocks(self) -> tuple[OperandBlock, ...]:
        """Their places in the parameter struct."""
        return self.kernel.blocks(self.key)

    @cached_property
    def over_copies(self) -> Decision:
        """The same variant over keys and values that were copied ahead of it: of 8 bits to fp16, as it widens them, and
        pages of one token side by side. It makes the same sums, and so the same bits, if its KV tile is the same.
        """
        kv = dtype_of("float16", "kv") if self.problem.kv.bits == 8 else self.problem.kv
        problem = replace(self.problem, kv=kv, page_size=0 if self.problem.page_size == 1 else self.problem.page_size)
        return Decision(problem, self.kernel, self.kernel.key_with(problem, self.key.tile_rows), self.trace)

    @cached_property
    def ctas_per_tile(self) -> int:
        """Neighbouring CTAs that compute a work tile."""
        return self.kernel.ctas_per_tile(self.key)

    @cached_property
    def may_use_pdl(self) -> bool:
        """Whether the kernel can wait for its predecessor itself: programmatic dependent launch, from sm_90 on."""
        return self.kernel.pdl and self.problem.on_cuda and int(self.key.target[2:].rstrip("af")) >= 90

    def __str__(self) -> str:
        lines = [f"attention {self.problem}", *(f"  {verdict}" for verdict in self.trace), f"  -> {self.key.slug}"]
        return "\n".join(lines)


def backends() -> tuple[str, ...]:
    """The names that `backend=` takes, in addition to FlashInfer's names, which mean "auto". An MLA kernel has the same
    name as the corresponding kernel for other attention.

    >>> quire.backends()
    ('auto', 'quire:decode', 'quire:fa3', 'quire:fp8', 'quire:fa2', 'quire:wide', 'quire:cpu')
    """
    return ("auto", *(PIN + name for name in BACKENDS))


def decide(problem: AttentionProblem, backend: str = "auto") -> Decision:
    """The first kernel that accepts `problem` and does not yield to others, among those that `backend` allows.

    Raises UnsupportedError with the reason of each kernel for the device if none accepts, and ValidationError if
    `backend` is unknown or if no kernel can split at multiples of `fixed_split_size`.
    """
    is_word = isinstance(backend, str)
    if is_word and backend in WISHES:
        backend = "auto"
    if not is_word or backend not in backends():
        raise ValidationError(
            f"backend: expected one of {', '.join(backends())} or a name of FlashInfer's, which means auto "
            f"({', '.join(sorted(WISHES))}), got {backend!r}."
        )
    here = [kernel for kernel in KERNELS if kernel.is_for(problem)]
    trace = tuple(Verdict(kernel, _reason(kernel, problem, backend), kernel.yields(problem)) for kernel in here)
    accepting = [verdict for verdict in trace if verdict.reason is None]
    if accepting:
        verdict = min(accepting, key=lambda v: v.yields is not None)  # the first of equals
        return Decision(problem, verdict.kernel, verdict.kernel.key(problem), trace)
    raise _refusal(problem, backend, trace)


def variants_for_all_lengths(problem: AttentionProblem, backend: str) -> list[Spec]:
    """The variants that `backend` takes for `problem` with any number of rows."""
    decisions = []
    for rows in (*range(0, 257, 16), 512, 1024, 2048, 4096):  # all values of same_rows()
        with suppress(UnsupportedError, ValidationError):
            decisions.append(decide(replace(problem, rows=rows), backend))
    return list(dict.fromkeys(decision.spec for decision in decisions))


def _allowed(kernel: AttentionKernel, backend: str) -> bool:
    return backend == PIN + kernel.backend or (backend == "auto" and not kernel.is_opt_in)


def _reason(kernel: AttentionKernel, problem: AttentionProblem, backend: str) -> str | None:
    if kernel.is_opt_in and backend == "auto":
        return _rejection(kernel, problem) or f"only backend={PIN + kernel.backend!r} chooses it: it rounds more"
    if not _allowed(kernel, backend):
        return f"backend={backend!r} was asked for"
    return _rejection(kernel, problem) or _split_reason(kernel, problem)


def _rejection(kernel: AttentionKernel, problem: AttentionProblem) -> str | None:
    """Why this kernel does not take the problem, apart from its splits."""
    if problem.cascade and not kernel.has_cascades:
        return "it has no cascades"
    if problem.prefix and kernel.prefix_params is None:
        return "it finds the keys of shared levels in the cache alone"
    return _cascade_reason(problem) or kernel.lacks(problem) or kernel.reject(problem)


def _cascade_reason(problem: AttentionProblem) -> str | None:
    """Why no kernel can compute this cascade in one launch; None if kernels can, or if `problem` is no cascade."""
    if problem.prefix and not problem.cascade:
        return "only a cascade has shared keys"
    if not problem.cascade:
        return None
    if problem.fixed_split_size:
        return "a cascade divides keys as it likes: it has no fixed splits"
    changes_logits = problem.window or problem.pos_encoding is not PosEncodingMode.NONE or problem.variant is not None
    if changes_logits or problem.mask not in (MaskMode.NONE, MaskMode.CAUSAL):
        return "the shared keys of a cascade have no positions: no window, position encoding, variant or custom mask"
    return None


def _split_reason(kernel: AttentionKernel, problem: AttentionProblem) -> str | None:
    """Why splits of the fixed size are not a whole number of this kernel's KV tiles."""
    step, size = kernel.tile(kernel.key(problem)).kv, problem.fixed_split_size
    if size > 0 and size % step:
        return f"its kv tile has {step} keys: pass fixed_split_size={min(-(-size // step) * step, 2**31 - step)}"
    return None


def _refusal(problem: AttentionProblem, backend: str, trace: tuple[Verdict, ...]) -> QuireError:
    """The error for a problem that no kernel takes."""
    allowed = [verdict for verdict in trace if _allowed(verdict.kernel, backend)]
    if not allowed:
        names = ", ".join(PIN + verdict.kernel.backend for verdict in trace)
        return UnsupportedError(
            f"backend={backend!r} does not run on {problem.target}; expected auto or one of {names}."
        )
    told = trace if backend == "auto" else allowed  # with how to choose the kernels that have to be named
    reasons = "".join(f"\n  {verdict}" for verdict in told)
    if any(_rejection(verdict.kernel, problem) is None for verdict in allowed):
        size = problem.fixed_split_size
        return ValidationError(f"fixed_split_size: expected a multiple of a kernel's kv tile, got {size}:{reasons}")
    return UnsupportedError(f"no kernel takes attention {problem}:{reasons}")


def kernel_of(key: AttentionKey) -> AttentionKernel:
    """The catalogue row of a key."""
    for kernel in KERNELS:
        if kernel.name == key.kernel:
            return kernel
    raise ValidationError(f"kernel: expected one of {', '.join(k.name for k in KERNELS)}, got {key.kernel!r}.")


# --- prefill and decode in one launch --------------------------------------------------------------------------------


_POD, _BESIDE = "pod", ".beside."  #: in a slug: "pod.sm90a.", the prefill's, ".beside.", the decode's


@dataclass(frozen=True)
class PodKey:
    """The keys of two kernels in one launch. `parse` is the inverse of `slug`."""

    prefill: AttentionKey
    decode: AttentionKey

    def __post_init__(self) -> None:
        if reason := pod_reason(self.prefill, self.decode):
            raise ValidationError(f"pod: {reason}.")

    @property
    def slug(self) -> str:
        return f"{_POD}.{self.prefill.target}.{self.prefill.slug}{_BESIDE}{self.decode.slug}"

    @classmethod
    def parse(cls, slug: str) -> PodKey:
        """The key that `slug` names."""
        prefill, _, decode = slug.partition(_BESIDE)
        return cls(AttentionKey.parse(prefill.split(".", 2)[-1]), AttentionKey.parse(decode))

    @lru_cache(maxsize=256)  # noqa: B019
    def spec(self) -> Spec:
        """The input of the compiler."""
        return Spec(
            slug=self.slug, target=self.prefill.target, header="quire/kernels/pod.cuh", kernel="Pod",
            entry="quire_pod", params=struct_of(PodParams),
            code=_members("Prefill", FA3.spec(self.prefill)) + _members("Decode", DECODE.spec(self.decode)),
            exports=(*GPU_EXPORTS, "kDecoding"), warmup=self.slug,
        )  # fmt: skip


def _members(name: str, spec: Spec) -> str:
    """`spec`'s Variant as a struct inside of another one."""
    types = "".join(f" using {key} = {value};" for key, value in spec.types)
    constants = "".join(f" static constexpr int {key} = {value};" for key, value in spec.constants)
    return f"  struct {name} {{{types}{constants} }};\n"


def pod_reason(prefill: AttentionKey, decode: AttentionKey) -> str | None:
    """Why these variants do not run in one launch; None if they do."""
    if (prefill.kernel, decode.kernel) != (FA3.name, DECODE.name):
        return f"expected {FA3.name} and {DECODE.name}, got {prefill.kernel} and {decode.kernel}"
    if NVFP4 in (prefill.kv, decode.kv):
        return "scales of keys and values of 4 bits have no place in the parameters of a launch of both"
    if any(_has_more(key) for key in (prefill, decode)):
        return "custom variants and cascades have separate launches"
    if prefill.page_size == ANY_PAGE_SIZE:
        return "tokens that are gathered one by one take ptxas ten times as long beside another kernel"
    if decode.tile_rows > 32 or DECODE.tile(decode).kv == 32:
        return "a warpgroup decodes at most 32 rows, and heads of which four warps have 16 tokens each"
    return None


def _has_more(key: AttentionKey) -> bool:
    return key.variant is not None or key.cascade or key.prefix or key.timed
