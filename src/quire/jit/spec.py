"""What one compiled variant is, in words that know nothing of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

__all__ = ["Spec", "Struct"]


@dataclass(frozen=True)
class Struct:
    """The memory layout of a parameter struct, as its ctypes mirror sees it.

    The rendered unit asserts it field by field, so a mirror that drifts from the C++ header stops the build.
    """

    name: str  #: the C++ type, e.g. "AttentionParams"
    size: int  #: sizeof, in bytes
    offsets: tuple[tuple[str, int], ...]  #: (field, offset in bytes), in order


@dataclass(frozen=True)
class Spec:
    """One variant: one translation unit, one entry point, one artifact.

    The unit includes `header`, defines `struct Variant` from `types` and `constants`, checks `params` and `asserts`,
    and instantiates `kernel<Variant>` behind the exported symbol `entry`.
    """

    slug: str  #: readable name, [a-z0-9._-]+, unique per variant and target: "attention-fa2-sm90a-..."
    #: "sm80", "sm90a", ... -> nvcc and a cubin; "x86-64-v3", "x86-64-v4", "aarch64", "native" -> g++ and a host library
    target: str
    header: str  #: the kernel's header, e.g. "quire/kernels/attention_fa2.cuh"
    kernel: str  #: the class template that the header defines, e.g. "AttentionFa2"
    entry: str  #: exported C symbol, e.g. "quire_attention"
    params: Struct
    types: tuple[tuple[str, str], ...] = ()  #: using aliases in Variant: (("Q", "bf16_t"), ...)
    constants: tuple[
        tuple[str, int], ...
    ] = ()  #: static constexpr int members: (("kHeadDimQk", 128), ("kCausal", 1), ...)
    asserts: tuple[
        tuple[str, int], ...
    ] = ()  #: constexpr members of kernel<Variant> that Python relies on: (("kThreads", 128), ...)
    facts: tuple[str, ...] = ()  #: constexpr int members of kernel<Variant> that the caller reads from the module
    warmup: str = ""  #: the `quire warmup` arguments that build exactly this variant, for error messages

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once a spec: each plan() looks a module up by it."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def device(self) -> bool:
        """Whether the variant is device code (a cubin)."""
        return self.target.startswith("sm")

    def fields(self) -> Mapping[str, str | int]:
        """Every field that may change the artifact, flat: what a miss is explained with."""
        return {
            "target": self.target,
            "header": self.header,
            "kernel": self.kernel,
            **dict(self.types),
            **dict(self.constants),
        }
