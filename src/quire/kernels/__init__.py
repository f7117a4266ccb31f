"""The catalogue: which kernels exist, and which one takes a problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from quire.errors import UnsupportedError, ValidationError
from quire.jit.spec import Spec
from quire.kernels import attention_cpu, attention_decode, attention_fa2, attention_fa3
from quire.kernels.attention import AttentionKernel, AttentionKey, AttentionProblem, TileShape, same_rows

__all__ = [
    "KERNELS",
    "AttentionKernel",
    "AttentionKey",
    "AttentionProblem",
    "Decision",
    "TileShape",
    "Verdict",
    "backends",
    "decide",
    "kernel_of",
    "same_rows",
]

#: In order of preference: `auto` takes the first that accepts and does not yield.
KERNELS: tuple[AttentionKernel, ...] = (
    attention_decode.KERNEL,
    attention_fa3.KERNEL,
    attention_fa2.KERNEL,
    attention_cpu.KERNEL,
)


@dataclass(frozen=True)
class Verdict:
    """What one kernel says to a problem."""

    kernel: AttentionKernel
    reason: str | None  #: None: accepted
    yields: str | None = None  #: why another that accepts goes before it

    def __str__(self) -> str:
        return f"{self.kernel.name:<16} {self.reason or self.yields or 'accepts'}"


@dataclass(frozen=True, eq=False)  # decide() gives the same one for the same problem: plans are looked up by it
class Decision:
    """The kernel that was chosen, and the whole trace that led to it."""

    problem: AttentionProblem
    kernel: AttentionKernel
    key: AttentionKey
    trace: tuple[Verdict, ...]

    @cached_property
    def spec(self) -> Spec:
        """What the compiler is given for it."""
        return self.kernel.spec(self.key)

    def __str__(self) -> str:
        lines = [f"attention {self.problem}", *(f"  {verdict}" for verdict in self.trace), f"  -> {self.key.slug}"]
        return "\n".join(lines)


def backends() -> tuple[str, ...]:
    """The names that `backend=` takes."""
    return ("auto", *(kernel.backend for kernel in KERNELS))


@lru_cache(maxsize=4096)
def decide(problem: AttentionProblem, backend: str = "auto") -> Decision:
    """The first kernel that accepts `problem` and does not yield to others, among those that `backend` allows.

    Raises UnsupportedError with each kernel's reason if none does, ValidationError if `backend` is unknown.
    """
    if backend not in backends():
        raise ValidationError(f"backend: expected one of {', '.join(backends())}, got {backend!r}.")
    trace = tuple(Verdict(kernel, _reason(kernel, problem, backend), kernel.yields(problem)) for kernel in KERNELS)
    accepting = [verdict for verdict in trace if verdict.reason is None]
    if accepting:
        verdict = min(accepting, key=lambda v: v.yields is not None)  # the first of equals
        return Decision(problem, verdict.kernel, verdict.kernel.key(problem), trace)
    reasons = "\n".join(f"  {verdict}" for verdict in trace)
    if any(_allowed(kernel, backend) and kernel.reject(problem) is None for kernel in KERNELS):
        raise ValidationError(f"fixed_split_size: no kernel cuts there\n{reasons}")
    raise UnsupportedError(f"no kernel for attention {problem}\n{reasons}")


def _allowed(kernel: AttentionKernel, backend: str) -> bool:
    return backend in ("auto", kernel.backend)


def _reason(kernel: AttentionKernel, problem: AttentionProblem, backend: str) -> str | None:
    if not _allowed(kernel, backend):
        return f"backend={backend!r} was asked for"
    return kernel.reject(problem) or _split_reason(kernel, problem)


def _split_reason(kernel: AttentionKernel, problem: AttentionProblem) -> str | None:
    step = kernel.tile(kernel.key(problem)).kv
    if problem.fixed_split_size > 0 and problem.fixed_split_size % step:
        return f"fixed_split_size={problem.fixed_split_size} is not a multiple of its kv tile, {step}"
    return None


def kernel_of(key: AttentionKey) -> AttentionKernel:
    """The catalogue row of a key."""
    for kernel in KERNELS:
        if kernel.name == key.kernel:
            return kernel
    raise ValidationError(f"kernel: expected one of {', '.join(k.name for k in KERNELS)}, got {key.kernel!r}.")
