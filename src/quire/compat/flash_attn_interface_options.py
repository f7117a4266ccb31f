"""The keywords of FlashAttention-3's functions and of its forks that are not queries, keys or values: checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import torch

from quire.compat.flash_attn_batch import Scoring, tensor_of
from quire.engine.checks import check_flags, check_shape, is_choice
from quire.errors import UnsupportedError, ValidationError

Window = Any  #: (left, right), as a tuple or a list; None: all keys
ALL = (-1, -1)


class _Common(TypedDict, total=False):
    out: torch.Tensor | None
    sinks: torch.Tensor | None
    s_aux: torch.Tensor | None
    learnable_sink: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    dropout_p: float
    fa_version: int
    ver: int


class Keywords(_Common, total=False):
    """Keywords that forks of FlashAttention-3 add to all functions without a cache."""

    return_softmax_lse: bool


class VarlenKeywords(Keywords, total=False):
    """Those of flash_attn_varlen_func()."""

    page_table: torch.Tensor | None
    block_table: torch.Tensor | None
    q_v: torch.Tensor | None
    scheduler_metadata: torch.Tensor | None
    cp_world_size: int
    cp_rank: int
    cp_tot_seqused_k: torch.Tensor | None


class CacheKeywords(_Common, total=False):
    """Those of flash_attn_with_kvcache()."""

    return_attn_probs: bool
    deterministic: bool
    block_table: torch.Tensor | None
    q_v: torch.Tensor | None
    cp_world_size: int
    cp_rank: int
    cp_tot_seqused_k: torch.Tensor | None


_OF_SIGNATURES = {"scheduler_metadata"}  #: passed on beside those of forks


#: Keywords of forks that are refused unless they are None or False, and why.
_REFUSED = {
    "gather_kv_indices": "flash_mla_sparse_fwd() of quire.compat.flash_mla attends to tokens by their numbers",
    "gather_kv_length": "flash_mla_sparse_fwd() of quire.compat.flash_mla attends to tokens by their numbers",
    "only_qv": "pass q and qv, whose products are added",
    "bidirectional_block_ids": "use a custom mask of quire.BatchPrefillWithPagedKVCacheWrapper",
    "score_mod": "use quire.flex_attention() or a quire.Variant",
    "mask_mod": "use quire.flex_attention() or a quire.Variant",
    "aux_tensors": "use quire.flex_attention() or a quire.Variant",
    "q_scale": "q_descale is the factor of 8-bit queries",
    "attention_mask": "use a custom mask of quire.BatchPrefillWithRaggedKVCacheWrapper",
}


class Options(NamedTuple):
    """What all functions take beside tensors of queries, keys and values."""

    scoring: Scoring
    chunk: int  #: attention_chunk; 0: none
    sinks: torch.Tensor | None
    out: torch.Tensor | None
    returns_lse: bool

    @property
    def is_local(self) -> bool:
        """Whether queries see keys by where they stand, as FlashAttention says "causal or local"."""
        scoring = self.scoring
        return scoring.causal or (scoring.left, scoring.right) != ALL or self.chunk > 0


class Given(NamedTuple):
    """The keywords that a call has in FlashAttention-3's own signature."""

    num_heads: int
    qo_len: int | None  #: of each request; None: they differ
    softmax_scale: float | None
    causal: bool
    window_size: Window
    attention_chunk: int
    softcap: float
    num_splits: int
    pack_gqa: bool | None
    sm_margin: int
    return_lse: bool
    deterministic: bool = False

    def options(self, function: str, known: Any, keywords: Mapping[str, Any]) -> Options:
        """Checked, with the keywords of forks. ValidationError or UnsupportedError naming the keyword."""
        _check_names(function, known, keywords)
        get = keywords.get
        window = ALL if self.window_size is None else self.window_size
        scoring = Scoring.of(
            self.softmax_scale, self.causal, window, self.softcap, get("alibi_slopes"), self.num_heads, self.qo_len,
            self.num_splits, get("dropout_p", 0.0), get("deterministic", self.deterministic),
        )  # fmt: skip
        check_flags(pack_gqa=self.pack_gqa, return_lse=self.return_lse)
        check_flags(**{name: get(name) for name in _LSE})
        _check_version(keywords)
        check_count(self.sm_margin, "sm_margin")
        metadata = get("scheduler_metadata")
        if metadata is not None:
            tensor_of(metadata, "scheduler_metadata")
        options = Options(
            scoring, check_count(self.attention_chunk, "attention_chunk"), _one_of(keywords, _SINKS, self.num_heads),
            get("out"), self.return_lse or any(map(get, _LSE)),
        )  # fmt: skip
        _check_ranks(options, self.qo_len, keywords)
        return options


_LSE = ("return_softmax_lse", "return_attn_probs")
_SINKS = ("sinks", "s_aux", "learnable_sink")


def _check_names(function: str, known: Any, keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        if name in known.__optional_keys__ or name in _OF_SIGNATURES:
            continue
        if name not in _REFUSED:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}: expected None, as {function}() does not support it: {_REFUSED[name]}.")


def _check_version(keywords: Mapping[str, Any]) -> None:
    """All versions of FlashAttention compute the same, so that a valid version has no effect."""
    for name in ("fa_version", "ver"):
        if not is_choice(keywords.get(name, 3), (2, 3, 4)):
            raise ValidationError(f"{name}: expected 2, 3 or 4, which all give the same here, got {keywords[name]!r}.")


def check_count(value: Any, name: str) -> int:
    """`value`, which must be an integer from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValidationError(f"{name}: expected an integer from 0 on, got {value!r}.")
    return value


def _one_of(keywords: Mapping[str, Any], names: tuple[str, ...], num_heads: int) -> torch.Tensor | None:
    """Sinks, for which each fork has another name."""
    given = [name for name in names if keywords.get(name) is not None]
    if len(given) > 1:
        raise ValidationError(f"{', '.join(given)}: expected one of them, as they are names of the same tensor.")
    if not given:
        return None
    sinks = tensor_of(keywords[given[0]], given[0])
    check_shape(sinks, given[0], {"num_heads": num_heads})
    return sinks


def the_same(given: Mapping[str, Any]) -> tuple[Any, str]:
    """The value that is given by one of several names, and that name."""
    found = [(value, name) for name, value in given.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise ValidationError(f"{names}: expected one of them, as they are names of the same tensor.")
    return found[0] if found else (None, next(iter(given)))


def _check_ranks(options: Options, qo_len: int | None, keywords: Mapping[str, Any]) -> None:
    """Context parallelism deals keys to ranks in turns, so that only masks that hide no key are the same on a rank."""
    world, rank = (keywords.get(name, start) for name, start in (("cp_world_size", 1), ("cp_rank", 0)))
    if check_count(rank, "cp_rank") >= max(1, check_count(world, "cp_world_size")):
        raise ValidationError(f"cp_rank: expected a number below cp_world_size={world}, got {rank}.")
    total = keywords.get("cp_tot_seqused_k")
    if total is not None:
        check_shape(tensor_of(total, "cp_tot_seqused_k"), "cp_tot_seqused_k", {"batch": None})
    scoring = options.scoring
    sees_all = scoring.left < 0 and not options.chunk and (qo_len == 1 or (not scoring.causal and scoring.right < 0))
    if world > 1 and not (sees_all and not scoring.has_alibi):
        raise UnsupportedError(
            f"cp_world_size: expected 1 where a mask hides keys, got {world}; with causal=True and max_seqlen_q > 1, a "
            f"window, attention_chunk or alibi_slopes, queries must know where the keys of a rank stand in the request."
        )
