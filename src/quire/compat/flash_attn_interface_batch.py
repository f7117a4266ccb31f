"""The keywords of FlashAttention-3's functions and of its forks, checked, and their batches and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from torch.nn.functional import pad

from quire.cache.latents import LATENT_DIM
from quire.compat.flash_attn_batch import Scoring, Where, attend_batch, tensor_of
from quire.compat.flash_attn_tokens import Keys, Queries, Rows
from quire.engine.checks import check_flags, check_output, check_same_device, check_shape, is_choice, to_int32
from quire.engine.device import is_capturing
from quire.errors import UnsupportedError, ValidationError, unexpected_keyword

ROPE_DIM = 64  #: dims of q beside qv
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


class ScheduleKeywords(TypedDict, total=False):
    """Those of get_scheduler_metadata()."""

    num_heads: int
    num_heads_k: int


_OF_SIGNATURES = {"scheduler_metadata"}  #: passed on beside those of forks

#: Keywords of forks that are refused unless they are None or False, and why.
_REFUSED = {
    **dict.fromkeys(
        ("gather_kv_indices", "gather_kv_length", "gather_kv_valid_length"),
        "flash_mla_sparse_fwd() of quire.compat.flash_mla attends to tokens by their numbers",
    ),
    **dict.fromkeys(
        ("score_mod", "mask_mod", "aux_tensors", "aux_tensor_leading_dims", "rel_bias", "rel_bias_prep_cache"),
        "use quire.flex_attention() or a quire.Variant",
    ),
    **dict.fromkeys(("sfk", "sfv"), "pass kv_cache_sf of quire.BatchPrefillWithPagedKVCacheWrapper.run()"),
    "only_qv": "pass q and qv, whose products are added",
    "bidirectional_block_ids": "use a custom mask of quire.BatchPrefillWithPagedKVCacheWrapper",
    "q_scale": "q_descale is the factor of 8-bit queries",
    "attention_mask": "use a custom mask of quire.BatchPrefillWithRaggedKVCacheWrapper",
    "block_sparse_tensors": "use quire.VariableBlockSparseAttentionWrapper",
    "dynamic_causal": "call once for the requests with causal=True and once for the others",
    "output_scale": "results have 16 bits",
    "sfq": "quantize keys and values with nvfp4_quantize_append_paged_kv_cache()",
}


def fork_keywords(function: str) -> tuple[str, ...]:
    """The keywords that forks of FlashAttention-3 pass to one of its functions, those that are refused last."""
    known: Any = {"flash_attn_varlen_func": VarlenKeywords, "flash_attn_with_kvcache": CacheKeywords}.get(
        function, Keywords
    )
    return (*sorted(known.__optional_keys__), *_REFUSED)


class Ranks(NamedTuple):
    """Context parallelism: key j of a rank is key j * world + rank of its request, which has `total` keys."""

    world: int
    rank: int
    total: torch.Tensor  #: int32 [batch]


class Options(NamedTuple):
    """What all functions take beside tensors of queries, keys and values."""

    scoring: Scoring
    chunk: int  #: attention_chunk; 0: none
    sinks: torch.Tensor | None
    out: torch.Tensor | None
    returns_lse: bool
    ranks: Ranks | None = None  #: where the causal mask hides keys of a rank

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
    attention_chunk: int | None
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
            self.softmax_scale, self.causal, window, self.softcap, get("alibi_slopes"), self.num_heads,
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
            scoring, check_count(self.attention_chunk or 0, "attention_chunk"),
            _sinks_of(keywords, self.num_heads), get("out"), self.return_lse or any(map(get, _LSE)),
        )  # fmt: skip
        return options._replace(ranks=_ranks(options, self.qo_len, keywords))


_LSE = ("return_softmax_lse", "return_attn_probs")


def _check_names(function: str, known: Any, keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        if name in known.__optional_keys__ or name in _OF_SIGNATURES:
            continue
        if name not in _REFUSED:
            raise unexpected_keyword(function, name)
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


def _sinks_of(keywords: Mapping[str, Any], num_heads: int) -> Any:
    """Sinks, for which each fork has another name."""
    sinks, name = the_same({name: keywords.get(name) for name in ("sinks", "s_aux", "learnable_sink")})
    if sinks is not None:
        check_shape(tensor_of(sinks, name), name, {"num_heads": num_heads})
    return sinks


def the_same(given: Mapping[str, Any]) -> tuple[Any, str]:
    """The value that is given by one of several names, and that name."""
    found = [(value, name) for name, value in given.items() if value is not None]
    if len(found) > 1:
        names = ", ".join(name for _, name in found)
        raise ValidationError(f"{names}: expected one of them, as they are names of the same tensor.")
    return found[0] if found else (None, next(iter(given)))


def _ranks(options: Options, qo_len: int | None, keywords: Mapping[str, Any]) -> Ranks | None:
    """None where the mask hides no key, so that a rank needs to know nothing of others."""
    world, rank = (keywords.get(name, start) for name, start in (("cp_world_size", 1), ("cp_rank", 0)))
    if check_count(rank, "cp_rank") >= max(1, check_count(world, "cp_world_size")):
        raise ValidationError(f"cp_rank: expected a number below cp_world_size={world}, got {rank}.")
    total = keywords.get("cp_tot_seqused_k")
    if total is not None:
        check_shape(tensor_of(total, "cp_tot_seqused_k"), "cp_tot_seqused_k", {"batch": None})
    scoring = options.scoring
    if world > 1 and not (scoring.left < 0 and scoring.right <= 0 and not options.chunk and scoring.slopes is None):
        raise UnsupportedError(
            f"cp_world_size: expected 1 beside a window, attention_chunk or alibi_slopes, got {world}, as kernels do "
            f"not know where the keys of a rank stand in the request."
        )
    if world <= 1 or qo_len == 1 or not scoring.causal:
        return None
    if total is None:
        raise ValidationError(
            f"cp_tot_seqused_k: expected int32 [batch] beside causal=True and cp_world_size={world}, got None."
        )
    return Ranks(world, rank, to_int32(total, "cp_tot_seqused_k"))


# --- batches ---------------------------------------------------------------------------------------------------------


class Scales(NamedTuple):
    """The factors of 8-bit numbers, float32 [batch, num_heads_k], or None."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None

    def check(self, batch: int, num_heads_k: int, device: torch.device) -> None:
        """ValidationError naming the argument."""
        for tensor, name in zip(self, ("q_descale", "k_descale", "v_descale"), strict=True):
            if tensor is None:
                continue
            check_shape(tensor_of(tensor, name), name, {"batch": batch, "num_heads_k": num_heads_k})
            check_same_device(tensor, name, device)
            if tensor.dtype is not torch.float32:
                raise ValidationError(f"{name}: expected dtype torch.float32, got {tensor.dtype}.")

    @property
    def of_logits(self) -> torch.Tensor | None:
        """The product of those of q and k."""
        if self.q is None or self.k is None:
            return self.k if self.q is None else self.q
        if _is_one(self.q) and _is_one(self.k):
            return (self.q[:1, :1] * self.k[:1, :1]).expand(self.q.shape)
        return self.q * self.k


NO_SCALES = Scales(None, None, None)


def _is_one(tensor: torch.Tensor) -> bool:
    """Whether it is one number, expanded."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return bool(tensor.numel()) and all(stride == 0 or size == 1 for size, stride in sizes)


def attend(
    queries: Queries, keys: Keys, options: Options, scales: Scales = NO_SCALES
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out [rows, num_heads, head_dim of v], and the lse [rows, num_heads] in base e if it is asked for."""
    queries, keys = _together(queries, keys)
    q, qv = queries.q, queries.qv
    scales.check(queries.batch, keys.k.shape[-2], q.device)
    dim_v, is_paged = keys.v.shape[-1], keys.table is not None
    if qv is not None:
        _check_latents(queries, keys, options, scales)
        if (q.shape[-1], dim_v, keys.k.shape[-2]) != (ROPE_DIM, LATENT_DIM, 1):
            return _other_latents(queries, keys, options, scales)
        q = q.to(torch.bfloat16) if q.dtype.itemsize == 1 else q
    dim, scale = q.shape[-1] + (0 if qv is None else dim_v), options.scoring.softmax_scale
    scale = dim**-0.5 if scale is None and dim else scale
    factors = _Factors.of(queries, scales, is_paged and q.is_cuda)
    out = _result(options.out, q, dim_v)
    q = q if factors.q_rows is None else (q.float() * factors.q_rows).to(out.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if options.returns_lse else None
    scoring = options.scoring._replace(softmax_scale=scale).for_parts(queries.num_parts)
    if options.ranks is not None:
        queries, keys = _row_by_row(queries, keys, options.ranks)
        scoring = scoring._replace(causal=False, right=-1)
    attend_batch(
        q, keys.k, keys.v, out, lse, options.sinks,
        Where(queries.offsets, keys.offsets, keys.lens, keys.table), queries.qo_len, scoring, options.chunk, qv,
        factors.logits_by, factors.out_by, factors.q_heads,
    )  # fmt: skip
    if factors.out_rows is not None:
        out.copy_(out.float() * factors.out_rows)
    elif factors.out_number is not None:
        out.mul_(factors.out_number)
    return out if options.out is None or options.out is out else options.out.copy_(out), lse


def attend_equal(q: torch.Tensor, queries: Queries, keys: Keys, options: Options, scales: Scales = NO_SCALES) -> Any:
    """Results of queries [batch, seqlen_q, num_heads, head_dim]."""
    given = options.out
    if given is not None:
        check_shape(check_output(given, "out"), "out", dict.fromkeys(("batch", "seqlen_q", "num_heads", "head_dim")))
        if given.shape[:3] != q.shape[:3] or not given.is_contiguous():
            raise ValidationError(f"out: expected contiguous {[*q.shape[:3], keys.v.shape[-1]]}, got {given.shape}.")
        options = options._replace(out=given.flatten(0, 1))
    out, lse = attend(queries, keys, options, scales)
    out = out.view(*q.shape[:2], *out.shape[1:]) if given is None else given
    return out if lse is None else (out, lse.view(q.shape[:3]).transpose(1, 2).contiguous())


def with_lse(out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    """What functions of concatenated requests return."""
    return out if lse is None else (out, lse.t().contiguous())


def _together(queries: Queries, keys: Keys) -> tuple[Queries, Keys]:
    """Offsets and lengths on the GPU if some of them lie there: the host then need not wait for these."""
    arrays, device = (queries.offsets, keys.offsets, keys.lens), queries.q.device
    if device.type == "cpu" or all(t is None or t.is_cpu for t in arrays) or is_capturing(device):
        return queries, keys
    offsets, k_offsets, lens = (t if t is None else t.to(device, non_blocking=True) for t in arrays)
    return queries._replace(offsets=offsets), keys._replace(offsets=k_offsets, lens=lens)


class _Factors(NamedTuple):
    """Scales as kernels take them: one for all, or one for each row and head, which are applied before and after."""

    logits_by: torch.Tensor | None = None
    out_by: torch.Tensor | None = None
    q_heads: torch.Tensor | None = None  #: [num_heads], of 8-bit queries
    out_number: torch.Tensor | None = None  #: [1], applied after
    q_rows: torch.Tensor | None = None  #: [rows, num_heads, 1]
    out_rows: torch.Tensor | None = None

    @classmethod
    def of(cls, queries: Queries, scales: Scales, takes_one: bool) -> _Factors:
        """takes_one: whether the kernel reads a factor of all logits and one of the result."""
        given = [(scales.of_logits, "logits_by", "q_rows"), (scales.v, "out_by", "out_rows")]
        found: dict[str, torch.Tensor] = {}
        for tensor, one, many in given:
            if tensor is None:
                continue
            if takes_one and _is_one(tensor):
                found[one] = tensor.as_strided((1,), (1,))
            elif one == "out_by" and _is_one(tensor):
                found["out_number"] = tensor.as_strided((1,), (1,))
            elif queries.q.dtype.itemsize == 1 and _is_one(tensor):
                found["q_heads"] = tensor.as_strided((1,), (1,)).expand(queries.q.shape[1]).contiguous()
            else:
                requests = queries.requests().clamp(max=queries.batch - 1)
                group = queries.q.shape[1] // tensor.shape[1]
                found[many] = tensor[requests].repeat_interleave(group, 1)[..., None]
        return cls(**found)


def _check_latents(queries: Queries, keys: Keys, options: Options, scales: Scales) -> None:
    """qv is supported for the latents of DeepSeek's models."""
    assert queries.qv is not None
    q, qv, scoring = queries.q, queries.qv, options.scoring
    sizes = {"rows": q.shape[0], "num_heads": q.shape[1], "head_dim_v": keys.v.shape[-1]}
    check_shape(qv, "qv", sizes)
    if q.shape[-1] > ROPE_DIM or keys.v.shape[-1] > LATENT_DIM:
        raise UnsupportedError(
            f"qv: expected q of at most {ROPE_DIM} dims and v of at most {LATENT_DIM}, which kernels of latents take, "
            f"got q of {q.shape[-1]} and v of {keys.v.shape[-1]}; where their dims are 256 at most together, "
            f"concatenate q and qv, and k and v."
        )
    if any(scale is not None for scale in scales):
        raise UnsupportedError("q_descale, k_descale, v_descale: expected None beside qv, whose keys have 16 bits.")
    if scoring.left >= 0 or scoring.right > 0 or options.chunk or scoring.softcap or scoring.slopes is not None:
        raise UnsupportedError(
            "qv: expected no window_size, attention_chunk, softcap or alibi_slopes beside it; kernels of latents have "
            "causal=True and False."
        )


def _other_latents(
    queries: Queries, keys: Keys, options: Options, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Latents of other sizes, padded with zeros in copies, and of several heads, one head of keys after the other."""
    assert queries.qv is not None
    dim_v, heads_k = keys.v.shape[-1], keys.k.shape[-2]
    scale = options.scoring.softmax_scale
    scale = (queries.q.shape[-1] + dim_v) ** -0.5 if scale is None else scale
    q, k = (pad(t, (0, ROPE_DIM - t.shape[-1])) for t in (queries.q, keys.k))
    qv, v = (pad(t, (0, LATENT_DIM - t.shape[-1])) for t in (queries.qv, keys.v))
    group, results = q.shape[1] // max(1, heads_k), []
    for i in range(heads_k):
        mine = slice(i * group, (i + 1) * group)
        sinks = None if options.sinks is None else options.sinks[mine]
        one = options._replace(sinks=sinks, out=None, scoring=options.scoring._replace(softmax_scale=scale))
        some = queries._replace(q=q[:, mine].contiguous(), qv=qv[:, mine].contiguous())
        its = keys._replace(k=k[..., i : i + 1, :].contiguous(), v=v[..., i : i + 1, :].contiguous())
        results.append(attend(some, its, one, scales))
    out = torch.cat([one[0] for one in results], 1)[..., :dim_v].contiguous()
    lse = torch.cat([one[1] for one in results if one[1] is not None], 1) if options.returns_lse else None
    return out if options.out is None else _result(options.out, out, dim_v).copy_(out), lse


def _row_by_row(queries: Queries, keys: Keys, ranks: Ranks) -> tuple[Queries, Keys]:
    """Each query as a request of its own, with the first keys of its rank, those that the causal mask shows it."""
    if keys.table is None or queries.num_parts > 1:
        raise UnsupportedError(
            f"cp_world_size: expected 1 with causal=True for keys without a page table, or with seqused_q; got "
            f"{ranks.world}."
        )
    assert keys.lens is not None
    check_shape(ranks.total, "cp_tot_seqused_k", {"batch": queries.batch})
    device, offsets = queries.q.device, queries.offsets
    rows = Rows.of(offsets, queries.batch, queries.qo_len, queries.q)
    request = rows.request.clamp(max=queries.batch - 1).long()
    new = torch.full_like(ranks.total, queries.qo_len) if offsets is None else offsets.diff()
    place = (ranks.total.to(device) - new.to(device))[request] + rows.place
    seen = torch.div(place - ranks.rank, ranks.world, rounding_mode="floor") + 1
    lens = torch.minimum(seen.clamp(min=0), keys.lens.to(device)[request])
    lens = torch.where(rows.request < queries.batch, lens, 0).to(torch.int32)
    one = queries._replace(batch=queries.q.shape[0], qo_len=1, offsets=None)
    return one, keys._replace(lens=lens, table=keys.table.to(device)[request])


def _result(given: torch.Tensor | None, q: torch.Tensor, dim_v: int) -> torch.Tensor:
    """What is written: the caller's `out` if it can be written there. It is bfloat16 for queries of 8 bits."""
    shape, dtype = (*q.shape[:2], dim_v), torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    if given is None:
        return q.new_empty(shape, dtype=dtype)
    check_shape(check_output(given, "out"), "out", {"rows": shape[0], "num_heads": shape[1], "head_dim_v": dim_v})
    check_same_device(given, "out", q.device)
    if given.dtype is not dtype:
        raise ValidationError(f"out: expected dtype {dtype}, got {given.dtype}.")
    return given if given.is_contiguous() else q.new_empty(shape, dtype=dtype)


def ragged_tokens(keys: Keys, most: int) -> Keys:
    """Ragged keys as pages of one token, of which a request has at most `most`."""
    assert keys.offsets is not None
    offsets = keys.offsets.to(keys.k.device)
    table = offsets[:-1, None] + torch.arange(max(1, most), dtype=torch.int32, device=offsets.device)
    k, v = keys.k.unsqueeze(1), keys.v.unsqueeze(1)
    return Keys(k, v, None, keys.offsets.diff(), table.clamp(max=max(0, k.shape[0] - 1)).to(torch.int32))
