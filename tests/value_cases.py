"""Random batches, caches and options for the calls of fuzz_values.py, and the comparison of their results.

What decides the compiled variant is drawn from a few combinations. Everything else is drawn freely: lengths, groups,
pages, strides, masks, scales. Whatever a call must not read is NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import oracle
from fuzz_calls import Args, Results, check_attention, given, number, paged_tokens, require, whole
from problems import FORMS, Problem, ints, poisoned

LN2 = math.log(2)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: dtype of queries, of keys and values, head_dim_qk, head_dim_vo
COMBINATIONS = (
    (torch.float32, None, 64, 64), (torch.float32, None, 64, 64), (torch.float32, None, 64, 32),
    (torch.bfloat16, None, 128, 128), (torch.float16, None, 64, 64), (torch.bfloat16, E4M3, 64, 64),
    (torch.float32, E5M2, 64, 64), (torch.float32, None, 256, 256), (torch.bfloat16, None, 40, 40),
)  # fmt: skip
SAME = tuple(c for c in COMBINATIONS if c[1] is None and c[2] == c[3])  #: keys as queries, one head_dim
PAGE_SIZES = (1, 3, 4, 16, 64)
LENGTHS = (0, 1, 2, 5, 16, 17, 40, 63, 130, 300)


# Drawing


def batch(
    rng: random.Random, *, queries: int | None = None, combinations: Sequence[Any] = COMBINATIONS, least: int = 0,
    requests: Sequence[int] = (1, 1, 2, 3, 5), longest: int = 300, at_least_queries: bool = False,
) -> Problem:  # fmt: skip
    """A batch; `queries` of each request or any number, `least` keys or more."""
    dtype, kv_dtype, dim_qk, dim_vo = rng.choice(combinations)
    count = rng.choice(requests)
    qo_lens = [rng.choice((0, 1, 1, 2, 7, 20, 33)) if queries is None else queries for _ in range(count)]
    kv_lens = [max(least, min(longest, rng.choice((*LENGTHS, rng.randint(0, 60))))) for _ in range(count)]
    if at_least_queries:
        kv_lens = [max(n, m) for n, m in zip(kv_lens, qo_lens, strict=True)]
    kv_heads = rng.choice((1, 2, 3))
    return Problem(
        qo_lens, kv_lens, kv_heads * rng.choice((1, 2, 3, 4, 8)), kv_heads, dim_qk, dim_vo, dtype, kv_dtype,
        seed=rng.randrange(2**31),
    )  # fmt: skip


def restrided(rng: random.Random, t: Tensor) -> Tensor:
    """The same numbers with NaN between rows, heads or dims, from an offset on, or in another order of dimensions."""
    if rng.random() < 0.4 or t.dim() < 2 or not t.numel():
        return t.contiguous()
    order = list(range(t.dim() - 1))
    if rng.random() < 0.3:
        rng.shuffle(order)
    order.append(t.dim() - 1)
    inner = t.permute(order)
    before = [rng.choice((0, 0, 1, 2)) for _ in order[:-1]] + [rng.choice((0, 0, 8))]
    after = [rng.choice((0, 0, 1)) for _ in order[:-1]] + [rng.choice((0, 0, 8))]
    shape = [a + n + b for a, n, b in zip(before, inner.shape, after, strict=True)]
    wide = poisoned(shape, t.dtype, "cpu") if t.is_floating_point() else torch.full(shape, 7).to(t.dtype)
    view = wide[tuple(slice(a, a + n) for a, n in zip(before, inner.shape, strict=True))]
    view.copy_(inner)
    return view.permute([order.index(i) for i in range(t.dim())])


def numbers_of(rng: random.Random, values: Sequence[int] | Tensor) -> Tensor:
    """int32, at times a view of a longer tensor of other numbers."""
    tensor = ints(values, "cpu")
    if rng.random() < 0.5:
        return tensor
    return torch.cat([torch.full((3,), -99, dtype=torch.int32), tensor, tensor.new_full((2,), 2**30)])[3:-2]


def pages_of(rng: random.Random, p: Problem, layout: str, page_size: int | None = None, forms: Any = None) -> Any:
    """A PagedCache of the problem."""
    forms = forms or (FORMS if p.v.shape[2] == p.head_dim else ("tuple", "sliced"))
    return p.paged(
        page_size or rng.choice(PAGE_SIZES), layout, rng.choice(forms), rng.choice((0, 3)), rng.randrange(2**31)
    )


def cache_args(rng: random.Random, p: Problem, layout: str, suffix: str = "") -> tuple[Args, int]:
    """A cache and its tables as arguments, and the page size."""
    paged = pages_of(rng, p, layout)
    tables = {n: numbers_of(rng, getattr(paged, n.removeprefix("kv_"))) for n in ("kv_indptr", "kv_indices")}
    args: Args = {**tables, "kv_last_page_len": numbers_of(rng, paged.last_page_len)}
    kv = paged.kv
    args |= {"cache": kv} if isinstance(kv, Tensor) else {"k_cache": kv[0], "v_cache": kv[1]}
    return {n + suffix: value for n, value in args.items()}, paged.page_size


def tokens_of(a: Args, layout: str, suffix: str = "") -> tuple[Tensor, Tensor, list[int]]:
    """Keys and values of the requests of a paged cache, and their offsets."""
    names = ("kv_indptr", "kv_indices", "kv_last_page_len", "cache", "k_cache", "v_cache")
    own = {n: a[n + suffix] for n in names if n + suffix in a}
    return paged_tokens(own, whole(a["page_size"]), layout)


def table_args(rng: random.Random, p: Problem, layout: str, forms: Any = ("tuple", "sliced")) -> Args:
    """A cache, and a block table with numbers of no page behind those of each request."""
    paged = pages_of(rng, p, layout, forms=forms)
    counts = oracle.lengths(paged.indptr)
    table = torch.full((len(counts), max([*counts, 1]) + rng.choice((0, 0, 2))), rng.choice((0, -7, 2**30)))
    for row, begin, count in zip(table, paged.indptr.tolist(), counts, strict=False):
        row[:count] = paged.indices[begin : begin + count]
    return {
        "k_cache": paged.kv[0], "v_cache": paged.kv[1], "block_tables": restrided(rng, table.int()),
        "seq_lens": numbers_of(rng, p.kv_lens),
    }  # fmt: skip


def window(rng: random.Random, chance: float = 0.2) -> int:
    return rng.choice((0, 1, 3, 20, 100)) if rng.random() < chance else -1


def sinks(rng: random.Random, p: Problem, chance: float = 0.2) -> Args:
    return {"sinks": torch.randn(p.num_qo_heads) * rng.choice((1, 5))} if rng.random() < chance else {}


def logits(rng: random.Random, p: Problem, positions: bool = True) -> Args:
    """Options of plan(). Encodings and chunks with one combination alone, as each makes variants of its own."""
    a: Args = {
        "window_left": window(rng), "sm_scale": rng.choice((0.03, 0.3)) if rng.random() < 0.3 else None,
        "logits_soft_cap": None,
    }  # fmt: skip
    if p.dtype is not torch.float32 or p.kv_dtype is not None or (p.head_dim, p.v.shape[2]) != (64, 64):
        return a
    if rng.random() < 0.3:
        a["logits_soft_cap"] = rng.choice((0.0, 5.0, 30.0))
    if positions and rng.random() < 0.3:
        a["pos_encoding_mode"] = rng.choice(("ALIBI", "ROPE_LLAMA"))
        if a["pos_encoding_mode"] == "ROPE_LLAMA":
            a |= {"rope_scale": rng.choice((None, 1.0, 8.0)), "rope_theta": rng.choice((None, 1e4, 5e5))}
    return a


PLANNED = (
    "window_left", "sm_scale", "logits_soft_cap", "pos_encoding_mode", "rope_scale", "rope_theta",
    "attention_chunk_size",
)  # fmt: skip


def meant(a: Args) -> Args:
    """What these options mean, in the oracle's words."""
    rope = a.get("rope_scale"), a.get("rope_theta")
    mode = a.get("pos_encoding_mode", "NONE")
    require(mode == "ROPE_LLAMA" or rope == (None, None), "a scale of positions that are not rotated")
    words: Args = {
        "window_left": a["window_left"], "soft_cap": a.get("logits_soft_cap"), "sm_scale": a.get("sm_scale"),
        "pos_encoding_mode": mode,
    }  # fmt: skip
    if mode == "ROPE_LLAMA":
        words |= {"rope_scale": rope[0], "rope_theta": number(rope[1], 1e4)}
    if a.get("attention_chunk_size") is not None:
        words["attention_chunk_size"] = whole(a["attention_chunk_size"])
    return words


def scaled(a: Args) -> Args:
    """Scales of run(), and sinks."""
    scale = number(a.get("q_scale")) * number(a.get("k_scale"))
    return {"logits_scale": scale, "v_scale": a.get("v_scale"), "sinks": a.get("sinks")}


# Comparing


def check_values(
    results: Results, q: Tensor, k: Tensor, v: Tensor, qo: Sequence[int], kv: Sequence[int], *,
    mask: Tensor | None = None, natural: bool = False, **options: Any,
) -> None:  # fmt: skip
    """check_attention() of the requests whose keys are numbers. A changed table may name pages of NaN.

    natural: the lse is a natural logarithm. Results of 8 bits are what the truth is rounded to.
    """
    require(len(qo) == len(kv), "as many offsets of queries as of keys")
    require(q.dim() == 3 and qo[-1] == q.shape[0], "as many rows of q as its offsets say")
    require(kv[-1] <= k.shape[0], "more keys than there are")
    if mask is not None:
        bits = sum(a * b for a, b in zip(oracle.lengths(qo), oracle.lengths(kv), strict=True))
        require(mask.numel() == bits, "a mask of another size")
    kept = [b for b in range(len(kv) - 1) if all(_is_finite(t[kv[b] : kv[b + 1]]) for t in (k, v))]
    if len(kept) < len(kv) - 1:
        rows, keys = (_rows(ends, kept) for ends in (qo, kv))
        masks = oracle.split_mask(mask, qo, kv)
        mask = None if mask is None else torch.cat([masks[b].flatten() for b in kept] or [mask[:0].flatten()])
        qo, kv = (oracle.indptr_of([ends[b + 1] - ends[b] for b in kept]) for ends in (qo, kv))
        q, k, v = q[rows], k[keys], v[keys]
        results = tuple(r if r is None else r[rows] for r in results)
    if natural and len(results) > 1:
        results = (results[0], (results[1].double() / LN2).float())
    if results[0].element_size() == 1:
        _check_eight_bits(results[0], q, k, v, qo, kv, mask, options)
        results = (oracle.attention(*_plain(q, k, v), qo, kv, **_options(q, mask, options)).o.to(q.dtype), *results[1:])
    check_attention(results, q, k, v, qo, kv, mask=mask, **options)


def _is_finite(t: Tensor) -> bool:
    return bool(t.detach().float().isfinite().all())


def _rows(ends: Sequence[int], kept: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(ends[b], ends[b + 1]) for b in kept] or [torch.arange(0)])


def _plain(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().resolve_neg() for t in tensors]


def _options(q: Tensor, mask: Tensor | None, options: Args) -> Args:
    """Of check_attention(), as the oracle takes them."""
    names = ("causal", "pos_encoding_mode", "rope_scale", "rope_theta", "attention_chunk_size", "score", "sees")
    known = given(options, *names)
    scale = number(options.get("sm_scale"), q.shape[2] ** -0.5) * number(options.get("logits_scale"))
    return {
        **known, "mask": mask, "window_left": options.get("window_left", -1), "sinks": options.get("sinks"),
        "soft_cap": number(options.get("soft_cap"), 0.0), "sm_scale": scale, "v_scale": number(options.get("v_scale")),
    }  # fmt: skip


def _check_eight_bits(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, qo: Sequence[int], kv: Sequence[int], mask: Tensor | None, options: Args
) -> None:
    """assert_eight_bits() of results."""
    how = _options(q, mask, options)
    truth = oracle.attention(*_plain(q, k, v), qo, kv, **how).o.reshape(o.shape)
    own = oracle.torch_error(*_plain(q, k, v), qo, kv, **how).reshape(o.shape)
    assert_eight_bits(o, truth, own.where(own.isfinite(), truth), q.dtype)  # where logits are not beyond the type


def assert_eight_bits(o: Tensor, truth: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    """Each number is one of the two next to the truth, up to the error of `own`, torch's answer in `dtype`."""
    info = torch.finfo(o.dtype)
    error = (o.double() - truth.clamp(info.min, info.max)).abs()
    slack = 2 * (own - truth).abs().max() + truth.abs().max() * torch.finfo(dtype).eps if o.numel() else 0.0
    allowed = info.eps * truth.abs() + info.smallest_normal * info.eps + slack
    assert bool((error <= allowed).all()), f"8 bits are off by up to {float((error - allowed).max()):.3g}"


def layout_of(rng: random.Random) -> str:
    return rng.choice(("NHD", "NHD", "HND"))
