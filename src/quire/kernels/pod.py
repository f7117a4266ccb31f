"""Prefill and decode of one step in one launch: a unit that contains attention_fa3 and attention_decode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quire.errors import ValidationError
from quire.jit.spec import Spec
from quire.kernels import attention_decode, attention_fa3
from quire.kernels.attention import GPU_EXPORTS, AttentionKey
from quire.kernels.features import ANY_PAGE_SIZE
from quire.kernels.params import PodParams, struct_of

_PREFILL, _DECODE = attention_fa3.KERNEL, attention_decode.KERNEL
_NAME, _BESIDE = "pod", ".beside."  #: a slug: "pod.sm90a.", the prefill's, ".beside.", the decode's


@dataclass(frozen=True)
class PodKey:
    """The keys of the two kernels. `parse` is the inverse of `slug`."""

    prefill: AttentionKey
    decode: AttentionKey

    def __post_init__(self) -> None:
        if reason := pod_reason(self.prefill, self.decode):
            raise ValidationError(f"pod: {reason}.")

    @property
    def slug(self) -> str:
        return f"{_NAME}.{self.prefill.target}.{self.prefill.slug}{_BESIDE}{self.decode.slug}"

    @classmethod
    def parse(cls, slug: str) -> PodKey:
        """The key that `slug` names."""
        prefill, _, decode = slug.partition(_BESIDE)
        return cls(AttentionKey.parse(prefill.split(".", 2)[-1]), AttentionKey.parse(decode))

    @lru_cache(maxsize=256)  # noqa: B019
    def spec(self) -> Spec:
        """The input of the compiler."""
        return Spec(
            slug=self.slug,
            target=self.prefill.target,
            header="quire/kernels/pod.cuh",
            kernel="Pod",
            entry="quire_pod",
            params=struct_of(PodParams),
            code=_members("Prefill", _PREFILL.spec(self.prefill)) + _members("Decode", _DECODE.spec(self.decode)),
            exports=(*GPU_EXPORTS, "kDecoding"),
            warmup=self.slug,
        )


def _members(name: str, spec: Spec) -> str:
    """`spec`'s Variant as a struct inside of another one."""
    types = "".join(f" using {key} = {value};" for key, value in spec.types)
    constants = "".join(f" static constexpr int {key} = {value};" for key, value in spec.constants)
    return f"  struct {name} {{{types}{constants} }};\n"


def pod_reason(prefill: AttentionKey, decode: AttentionKey) -> str | None:
    """Why these variants do not run in one launch; None if they do."""
    if (prefill.kernel, decode.kernel) != (_PREFILL.name, _DECODE.name):
        return f"expected {_PREFILL.name} and {_DECODE.name}, got {prefill.kernel} and {decode.kernel}"
    if any(_has_more(key) for key in (prefill, decode)):
        return "a variant of one's own, or a cascade, has a launch of its own"
    if prefill.page_size == ANY_PAGE_SIZE:
        return "tokens that are gathered one by one take ptxas ten times as long beside another kernel"
    if decode.tile_rows > 32 or _DECODE.tile(decode).kv == 32:
        return "a warpgroup decodes at most 32 rows, and heads of which four warps have 16 tokens each"
    return None


def _has_more(key: AttentionKey) -> bool:
    return key.variant is not None or key.cascade or key.prefix or key.timed
