"""Random valid calls in the words of other libraries, for fuzz_values.py, and their truth: FlashAttention's functions,
flex_attention() and fmha_v2.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import oracle
import quire
from fuzz_calls import (
    Args,
    Case,
    Results,
    as_results,
    integers,
    number,
    offsets,
    require,
    tabled_tokens,
    whole,
    workspace,
)
from problems import poisoned
from quire.compat import flash_attn
from value_cases import COMBINATIONS, E4M3, SAME, batch, check_values, numbers_of, restrided, sinks, table_args

#: Of one dtype for queries and keys, as FlashAttention has it
TYPES = tuple(c for c in COMBINATIONS if c[1] is None)


def window_mask(qo: Sequence[int], kv: Sequence[int], causal: bool, window: tuple[int, int]) -> Tensor:
    """Which keys each query sees as FlashAttention's documentation says, flat."""
    masks = [torch.zeros(0, dtype=torch.bool)]
    left, right = window[0], 0 if causal else window[1]
    for n, m in zip(oracle.lengths(qo), oracle.lengths(kv), strict=True):
        distance = oracle.distances(n, m)
        masks.append((((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))).flatten())
    return torch.cat(masks)


def _scores(
    rng: random.Random, num_heads: int, dtype: torch.dtype, dims: tuple[int, int], packed: bool = False
) -> Args:
    args: Args = {
        "softmax_scale": rng.choice((None, None, 0.2)), "causal": rng.random() < 0.5, "softcap": 0.0,
        "window_size": rng.choice(((-1, -1), (-1, -1), (-1, -1), (5, 0), (4, 2), (-1, 3), (0, 0), (1000, 1000))),
    }  # fmt: skip
    if dtype is torch.float32 and dims == (64, 64):
        if rng.random() < 0.2:
            args["softcap"] = rng.choice((5.0, 30.0))
        elif rng.random() < 0.2 and args["causal"]:
            args["alibi_slopes"] = oracle.alibi_slopes(num_heads).float()
    if not packed and rng.random() < 0.2:
        args["s_aux"] = torch.randn(num_heads).to(dtype)
    return args


def check_flash(
    results: Results, q: Tensor, k: Tensor, v: Tensor, qo: Sequence[int], kv: Sequence[int], a: Args,
    row_lse: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """row_lse: the lse [rows, heads] of one as FlashAttention has it."""
    window = tuple(whole(side) for side in a["window_size"])
    o, *lse = results
    if a.get("alibi_slopes") is not None:
        require(a["alibi_slopes"].shape[-1] == q.shape[1], "slopes of other heads")
        lse = []
    sink = None if a.get("s_aux") is None else a["s_aux"].float()
    mode = "NONE" if a.get("alibi_slopes") is None else "ALIBI"
    check_values(
        (o, *(row_lse(x) for x in lse)), q, k, v, qo, kv, mask=window_mask(qo, kv, bool(a["causal"]), window),
        natural=True, soft_cap=a["softcap"], sm_scale=a["softmax_scale"], sinks=sink, pos_encoding_mode=mode,
    )  # fmt: skip


def flash_equal(rng: random.Random) -> Case:
    """flash_attn_func() and its packed forms."""
    form = rng.choice(("", "", "kvpacked_", "qkvpacked_"))
    dtype, _, dim_qk, dim_vo = rng.choice(SAME if form else TYPES)
    count, rows, keys = rng.choice((0, 1, 2, 3)), rng.choice((0, 1, 2, 17)), rng.choice((0, 1, 17, 40, 130))
    kv_heads = rng.choice((1, 2, 3))
    heads = kv_heads * (1 if form == "qkvpacked_" else rng.choice((1, 2, 4)))

    def draw(*shape: int) -> Tensor:
        return restrided(rng, torch.randn(shape).to(dtype))

    if form == "qkvpacked_":
        tensors: Args = {"qkv": draw(count, rows, 3, heads, dim_qk)}
    else:
        tensors = {"q": draw(count, rows, heads, dim_qk)}
        if form:
            tensors["kv"] = draw(count, keys, 2, kv_heads, dim_qk)
        else:
            tensors |= {"k": draw(count, keys, kv_heads, dim_qk), "v": draw(count, keys, kv_heads, dim_vo)}
    scores = _scores(rng, heads, dtype, (dim_qk, dim_vo), bool(form))
    args = {**tensors, **scores, "return_attn_probs": rng.random() < 0.5}
    name = f"flash_attn_{form}func"

    def invoke(a: Args) -> Results:
        return tuple(r for r in as_results(getattr(flash_attn, name)(**a)) if r is not None)

    def check(a: Args, results: Results) -> None:
        q, k, v = _three(a, 2)
        require(q.dim() == k.dim() == v.dim() == 4 and k.shape[0] in (1, q.shape[0]), "tensors of other batches")
        k, v = (t.expand(q.shape[0], -1, -1, -1) for t in (k, v))
        qo, kv = ([t.shape[1] * b for b in range(t.shape[0] + 1)] for t in (q, k))
        flat = (t.flatten(0, 1) for t in (q, k, v))
        o, *lse = results
        check_flash((o.flatten(0, 1), *lse), *flat, qo, kv, a, lambda lse: lse.transpose(1, 2).flatten(0, 1))

    return Case(name, args, invoke, check)


def _three(a: Args, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    if "qkv" in a:
        return a["qkv"].unbind(dim)
    return (a["q"], *a["kv"].unbind(dim)) if "kv" in a else (a["q"], a["k"], a["v"])


def flash_varlen(rng: random.Random) -> Case:
    form = rng.choice(("", "", "paged", "kvpacked_", "qkvpacked_"))
    p = batch(rng, combinations=SAME if "packed" in form else TYPES)
    if form == "qkvpacked_":
        p = type(p)(p.kv_lens, p.kv_lens, p.num_kv_heads, p.num_kv_heads, p.head_dim, dtype=p.dtype, seed=p.seed)
    args: Args = {
        **_scores(rng, p.num_qo_heads, p.dtype, (p.head_dim, p.v.shape[2]), "packed" in form),
        "return_attn_probs": rng.random() < 0.5,
    }  # fmt: skip
    longest = [max([1, *lens]) + rng.choice((0, 3)) for lens in (p.qo_lens, p.kv_lens)]
    cu = [numbers_of(rng, ends) for ends in (p.qo_indptr, p.kv_indptr)]
    if form == "qkvpacked_":
        args |= {"qkv": restrided(rng, torch.stack([p.q, p.k, p.v], 1)), "cu_seqlens": cu[0], "max_seqlen": longest[0]}
    else:
        args |= {"q": restrided(rng, p.q), "cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
        args |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    if form == "kvpacked_":
        args["kv"] = restrided(rng, torch.stack([p.k, p.v], 1))
    elif form == "paged":
        tables = table_args(rng, p, "NHD")
        args |= {"k": tables["k_cache"], "v": tables["v_cache"], "block_table": tables["block_tables"]}
    elif not form:
        args |= {"k": restrided(rng, p.k), "v": restrided(rng, p.v)}
    name = f"flash_attn_varlen_{form if 'packed' in form else ''}func"

    def invoke(a: Args) -> Results:
        return tuple(r for r in as_results(getattr(flash_attn, name)(**a)) if r is not None)

    def check(a: Args, results: Results) -> None:
        q, k, v = _three(a, 1)
        qo = offsets(a["cu_seqlens"] if "qkv" in a else a["cu_seqlens_q"])
        kv = offsets(a["cu_seqlens"] if "qkv" in a else a["cu_seqlens_k"], of_a_part=True)
        require(len(qo) == len(kv), "as many offsets of queries as of keys")
        for ends, most in ((qo, "q"), (kv, "k")):
            limit = a["max_seqlen"] if "qkv" in a else a[f"max_seqlen_{most}"]
            require(max(oracle.lengths(ends), default=0) <= int(limit), "lengths that cannot be")
        if form == "paged":
            own = {"k_cache": k, "v_cache": v, "block_tables": a["block_table"]}
            k, v, kv = tabled_tokens(own, oracle.lengths(kv), 2**30, "NHD")
        rows = qo[-1]
        require(rows <= q.shape[0], "more queries than there are")
        o, *lse = results
        assert not o[rows:].any(), "rows that belong to no request"
        lse = [x[:, :rows] for x in lse]
        check_flash((o[:rows], *lse), q[:rows], k, v, qo, kv, a, lambda lse: lse.t())

    return Case(name, args, invoke, check)


def flash_cache(rng: random.Random) -> Case:
    """flash_attn_with_kvcache(): rows or pages, with new tokens or none, rotated or not."""
    dtype, _, dim, _ = rng.choice(SAME)
    count, rows, new = rng.choice((1, 2, 4)), rng.choice((1, 1, 3)), rng.choice((None, None, 1, 3))
    kv_heads = rng.choice((1, 2))
    heads, paged = kv_heads * rng.choice((1, 2, 4)), rng.random() < 0.5
    size = rng.choice((1, 8, 16)) if paged else rng.choice((24, 40))
    pages = -(-40 // size) if paged else 1
    capacity = pages * size
    lens = [rng.choice((0, 1, 9, rng.randint(0, capacity))) for _ in range(count)]
    lens = [min(n, capacity - (new or 0)) for n in lens]
    number_of_pages = count * pages + rng.choice((0, 2))
    table = torch.tensor(rng.sample(range(number_of_pages), count * pages)).view(count, pages)
    pads = [rng.randint(0, n) for n in lens] if not paged and rng.random() < 0.25 else None
    caches = [poisoned((number_of_pages, size, kv_heads, dim), dtype, "cpu") for _ in range(2)]
    for cache in caches:
        for b, n in enumerate(lens):
            for i in range(pads[b] if pads else 0, n):
                cache[table[b, i // size], i % size] = torch.randn(kv_heads, dim).to(dtype)
    args: Args = {
        "q": restrided(rng, torch.randn(count, rows, heads, dim).to(dtype)), "k_cache": caches[0], "v_cache": caches[1],
        "cache_seqlens": numbers_of(rng, lens), **_scores(rng, heads, dtype, (dim, dim)),
        "num_splits": rng.choice((0, 1)), "return_softmax_lse": rng.random() < 0.5,
    }  # fmt: skip
    if paged:
        args["block_table"] = restrided(rng, table.int())
    else:
        args["cache_batch_idx"] = numbers_of(rng, table[:, 0])
    if pads is not None:
        args["cache_leftpad"] = numbers_of(rng, pads)
    if new is not None:
        args |= {n: restrided(rng, torch.randn(count, new, kv_heads, dim).to(dtype)) for n in ("k", "v")}
        if rng.random() < 0.4:
            turned = rng.choice((dim // 2, 16))
            angles = torch.arange(capacity + 8)[:, None] * 1e4 ** (-torch.arange(turned // 2) / (turned // 2))
            args |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
            args["rotary_interleaved"] = rng.random() < 0.5

    def invoke(a: Args) -> Results:
        results = as_results(flash_attn.flash_attn_with_kvcache(**a))
        return (*results, a["k_cache"], a["v_cache"])

    def check(a: Args, results: Results) -> None:
        *results, k_after, v_after = results
        q, size = a["q"], a["k_cache"].shape[1]
        require(q.dim() == 4 and a["k_cache"].dim() == 4, "tensors of other than four dimensions")
        count, rows = q.shape[:2]
        table = a["block_table"] if "block_table" in a else a["cache_batch_idx"]
        most = size * (table.shape[1] if table.dim() == 2 else 1)
        held = a["cache_seqlens"]
        lens = [whole(held)] * count if isinstance(held, int) else integers(held)
        pads = integers(a["cache_leftpad"]) if a.get("cache_leftpad") is not None else [0] * count
        require(len(lens) == len(pads) == count, "lengths of another batch")
        require(all(n <= most for n in lens), "lengths that cannot be")
        added = 0 if a.get("k") is None else a["k"].shape[1]
        ends = [n + added if n >= 0 else n for n in lens]  # a negative length: no keys, and none are written
        pages = _pages_of_requests(table, [-(-max(0, n) // size) for n in ends], a["k_cache"].shape[0])
        exact_q = own_q = q.detach().resolve_neg()
        if a.get("k") is not None:
            require(a["k"].shape[0] == a["v"].shape[0] == count, "new tokens of another batch")
            require(all(n <= most for n in ends), "more tokens than places")
            exact_k = own_k = a["k"].detach().resolve_neg()
            if a.get("rotary_cos") is not None:
                (exact_q, own_q), (exact_k, own_k) = _turned(a, lens)
            _check_written(a["k_cache"], k_after, exact_k, own_k, lens, pages)
            values = a["v"].detach().resolve_neg()
            _check_written(a["v_cache"], v_after, values, values, lens, pages)
        kept = [max(0, n - pad) if n > 0 else 0 for n, pad in zip(ends, pads, strict=True)]
        parts: tuple[list[Tensor], list[Tensor]] = ([k_after[:0, 0]], [v_after[:0, 0]])
        for b, (n, pad) in enumerate(zip(kept, pads, strict=True)):
            for out, cache in zip(parts, (k_after, v_after), strict=True):
                out += [torch.cat([cache[:0, 0], *(cache[page] for page in pages[b])])[pad : pad + n]]
        k, v = (torch.cat(part) for part in parts)
        qo, kv = [rows * b for b in range(count + 1)], oracle.indptr_of(kept)
        o, *lse = results
        if exact_q is own_q:
            flat = q.flatten(0, 1), k, v
            check_flash((o.flatten(0, 1), *lse), *flat, qo, kv, a, lambda lse: lse.transpose(1, 2).flatten(0, 1))
        else:
            _check_turned(o.flatten(0, 1), exact_q.flatten(0, 1), own_q.flatten(0, 1), k, v, qo, kv, a)

    return Case("flash_attn_with_kvcache", args, invoke, check, frozenset({"k_cache", "v_cache"}))


def _pages_of_requests(table: Tensor, counts: Sequence[int], num_pages: int) -> list[list[int]]:
    """Those that a request has; what comes behind them in the table may be anything."""
    rows = table if table.dim() == 2 else table[:, None]
    require(not table.is_floating_point() and rows.dim() == 2 and len(rows) == len(counts), "a table of another batch")
    pages = [row[:n] for row, n in zip(rows.tolist(), counts, strict=True)]
    require(all(0 <= i < num_pages for row in pages for i in row), "pages that do not exist")
    return pages


def _turned(a: Args, lens: Sequence[int]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Queries and keys, each exact and with operations rounded to the dtype."""
    require(a["rotary_cos"].dim() == 2 and a["rotary_cos"].shape == a["rotary_sin"].shape, "angles that do not match")
    moves = bool(a["causal"]) or tuple(a["window_size"]) != (-1, -1)
    both = []
    for x, is_moving in ((a["q"], moves), (a["k"], True)):
        at = torch.tensor([[max(n, 0) + (i if is_moving else 0) for i in range(x.shape[1])] for n in lens]).flatten()
        require(not at.numel() or (int(at.min()) >= 0 and int(at.max()) < a["rotary_cos"].shape[0]), "no such angles")
        cos, sin = a["rotary_cos"][at], a["rotary_sin"][at]
        flat = x.detach().resolve_neg().flatten(0, 1)
        turned = (oracle.rotate(flat, cos, sin, a["rotary_interleaved"], t) for t in (torch.float64, x.dtype))
        both.append(tuple(t.view(x.shape) for t in turned))
    return both[0], both[1]


def _check_written(
    before: Tensor, after: Tensor, exact: Tensor, own: Tensor, lens: Sequence[int], pages: Sequence[Sequence[int]]
) -> None:
    """New tokens are where they belong, and all else is as it was."""
    size, want, theirs, places = before.shape[1], before.double(), before.double(), []
    for b, n in enumerate(lens):
        for i in range(exact.shape[1]):
            if n >= 0:
                place = pages[b][(n + i) // size], (n + i) % size
                want[place], theirs[place] = exact[b, i].double(), own[b, i].double()
                places.append(place)
    final = after.clone()
    for place in {p for p in places if places.count(p) > 1}:
        want[place] = theirs[place] = 0.0
        final[place] = 0.0
    if exact is own:
        assert torch.equal(final.double().nan_to_num(7.0), want.nan_to_num(7.0)), "the cache is not as it should be"
    else:
        assert torch.equal(final.isnan(), want.isnan()), "not the tokens that were to be written"
        oracle.assert_close(*(t.nan_to_num(0.0) for t in (final, want, theirs)), None, "the cache")


def _check_turned(
    o: Tensor, exact: Tensor, own: Tensor, k: Tensor, v: Tensor, qo: Sequence[int], kv: Sequence[int], a: Args
) -> None:
    """A result of rotated queries, which are rounded to the dtype once."""
    window = tuple(whole(side) for side in a["window_size"])
    how: Args = {
        "mask": window_mask(qo, kv, bool(a["causal"]), window), "soft_cap": number(a["softcap"], 0.0),
        "sm_scale": None if a["softmax_scale"] is None else number(a["softmax_scale"]),
        "sinks": None if a.get("s_aux") is None else a["s_aux"].double(),
        "pos_encoding_mode": "NONE" if a.get("alibi_slopes") is None else "ALIBI",
    }  # fmt: skip
    if not bool(k.isfinite().all()) or not bool(v.isfinite().all()):
        return
    truth = oracle.attention(exact, k, v, qo, kv, **how).o
    theirs = oracle.torch_error(own, k, v, qo, kv, **how)
    oracle.assert_close(o, truth, theirs.where(theirs.isfinite(), truth), qo)


# torch's flex_attention


def _functions(heads: int, q_len: int, kv_len: int) -> dict[str, tuple[Any, Any]]:
    """Of a score and a mask. Tensors around them are drawn by the caller's seed."""
    slopes, table = torch.rand(heads), torch.randn(heads, kv_len)
    document = torch.randint(0, 3, (3, max(kv_len, q_len))).sort(1).values
    shift = kv_len - q_len

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i + shift >= j

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + shift >= j) & (i + shift - j <= 9)

    return {
        "plain": (None, None), "causal": (None, causal), "window": (None, near),
        "slopes": (lambda score, b, h, i, j: score + slopes[h] * (j - i), causal),
        "soft cap": (lambda score, b, h, i, j: torch.tanh(score / 3) * 3, None),
        "table": (lambda score, b, h, i, j: score + table[h, j], None),
        "documents": (None, lambda b, h, i, j: document[b, i] == document[b, j]),
    }  # fmt: skip


def flex(rng: random.Random) -> Case:
    name = rng.choice(("plain", "causal", "window", "slopes", "soft cap", "table", "documents"))
    count, kv_heads = rng.choice((1, 2, 3)), rng.choice((1, 2))
    heads, q_len, kv_len = kv_heads * rng.choice((1, 1, 3)), rng.choice((1, 5, 40)), rng.choice((1, 17, 70, 130))
    dtype = torch.float32 if name != "plain" else rng.choice((torch.float32, torch.bfloat16))
    score_mod, mask_mod = _functions(heads, q_len, kv_len)[name]

    def draw(num_heads: int, length: int) -> Tensor:
        return restrided(rng, torch.randn(count, num_heads, length, 64).to(dtype))

    args: Args = {
        "query": draw(heads, q_len), "key": draw(kv_heads, kv_len), "value": draw(kv_heads, kv_len),
        "scale": rng.choice((None, 0.2)), "enable_gqa": heads != kv_heads or rng.random() < 0.3,
        "return_lse": rng.random() < 0.5,
    }  # fmt: skip
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, count, None, q_len, kv_len, device="cpu")

    def invoke(a: Args) -> Results:
        return as_results(quire.flex_attention(score_mod=score_mod, block_mask=block_mask, **a))

    def check(a: Args, results: Results) -> None:
        q, k, v = (a[n].detach().resolve_neg() for n in ("query", "key", "value"))
        require(q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0], "tensors of other batches")
        require(q.shape[1] == k.shape[1] or bool(a["enable_gqa"]), "heads that do not match")
        require(
            mask_mod is None or (q.shape[0] == count and q.shape[2] == q_len and k.shape[2] == kv_len),
            "a mask of others",
        )

        def score(logits: Tensor, at: oracle.At) -> Tensor:
            return score_mod(logits, torch.tensor(at.request), at.head, at.q_idx, at.kv_idx)

        def sees(at: oracle.At) -> Tensor:
            return mask_mod(torch.tensor(at.request), at.head, at.q_idx, at.kv_idx)

        flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        qo, kv = ([t.shape[2] * b for b in range(t.shape[0] + 1)] for t in (q, k))
        more = {"score": None if score_mod is None else score, "sees": None if mask_mod is None else sees}
        o, *lse = results
        rows = (o.transpose(1, 2).flatten(0, 1), *(x.transpose(1, 2).flatten(0, 1) for x in lse))
        if score_mod is not None:
            rows = rows[:1]
        check_values(rows, *flat, qo, kv, sm_scale=a["scale"], natural=True, **more)

    return Case(f"flex_attention, {name}", args, invoke, check)


# TensorRT-LLM's fmha_v2


def fmha_v2(rng: random.Random) -> Case:
    layout = rng.choice(("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"))
    p = batch(rng, combinations=SAME, at_least_queries=True)
    if layout == "PACKED_QKV":
        p = type(p)(p.kv_lens, p.kv_lens, p.num_kv_heads, p.num_kv_heads, p.head_dim, dtype=p.dtype, seed=p.seed)
    mask = rng.choice(("causal", "causal", "padding", "sliding_window", "chunked"))
    if mask == "chunked" and p.dtype is not torch.float32:
        mask = "causal"
    args: Args = {
        "input_layout": layout, "workspace_buffer": workspace(), "seq_lens": numbers_of(rng, p.kv_lens),
        "max_q_len": max([1, *p.qo_lens]) + rng.choice((0, 3)), "max_kv_len": max([1, *p.kv_lens]) + rng.choice((0, 3)),
        "bmm1_scale": rng.choice((0.125, 0.05)), "bmm2_scale": rng.choice((1.0, 2.0)), "batch_size": len(p.qo_lens),
        "cum_seq_lens_q": numbers_of(rng, p.qo_indptr), "cum_seq_lens_kv": numbers_of(rng, p.kv_indptr),
        "mask_mode": mask, "save_softmax_stats": rng.random() < 0.4, **sinks(rng, p),
    }  # fmt: skip
    if mask == "sliding_window":
        args["window_left"] = rng.choice((0, 3, 40))
    if mask == "chunked":
        args["chunked_attention_size"] = rng.choice((1, 16))
    if (p.dtype, p.head_dim) == (torch.float32, 64) and rng.random() < 0.2 and mask == "causal":
        args["logits_soft_cap_scale"] = 5.0
    if layout == "PACKED_QKV":
        args["qkv"] = restrided(rng, torch.stack([p.q, p.k, p.v], 1))
    else:
        args["q"] = restrided(rng, p.q)
    if layout == "CONTIGUOUS_Q_KV":
        args["kv"] = restrided(rng, torch.stack([p.k, p.v], 1))
    elif layout == "SEPARATE_Q_K_V":
        args |= {"k": restrided(rng, p.k), "v": restrided(rng, p.v)}
    elif layout.startswith("Q_PAGED"):
        paged = p.paged(rng.choice((1, 3, 16)), layout[-3:], "tensor", rng.choice((0, 3)), rng.randrange(2**31))
        counts = oracle.lengths(paged.indptr)
        table = torch.full((len(counts), max([*counts, 1])), 2**30, dtype=torch.int32)
        for row, begin, n in zip(table, paged.indptr.tolist(), counts, strict=False):
            row[:n] = paged.indices[begin : begin + n]
        args |= {"cache": paged.kv, "block_tables": table}
    if rng.random() < 0.3:
        args["out"] = poisoned(p.q.shape, rng.choice((p.dtype, p.dtype, E4M3)), "cpu")

    def invoke(a: Args) -> Results:
        names = ("qkv", "q", "kv", "k", "v", "cache")
        parts = tuple(a[n] for n in names if n in a)
        rest = {n: value for n, value in a.items() if n not in names}
        return as_results(quire.trtllm_fmha_v2_prefill(parts[0] if "qkv" in a else parts, **rest))

    def check(a: Args, results: Results) -> None:
        qo, kv, lens = (
            offsets(a["cum_seq_lens_q"]),
            offsets(a["cum_seq_lens_kv"], of_a_part=True),
            integers(a["seq_lens"]),
        )
        require(len(qo) == len(lens) + 1, "lengths of another batch")
        require(whole(a["batch_size"]) == len(lens), "another batch size")
        require(max(oracle.lengths(qo), default=0) <= whole(a["max_q_len"]), "more queries than can be")
        require(max(lens, default=0) <= whole(a["max_kv_len"]), "more keys than can be")
        if "cache" in a:
            k_cache, v_cache = a["cache"].unbind(1)
            q, own = a["q"], {"k_cache": k_cache, "v_cache": v_cache, "block_tables": a["block_tables"]}
            k, v, kv = tabled_tokens(own, lens, 2**30, a["input_layout"][-3:])
        else:
            require(oracle.lengths(kv) == lens, "other lengths")
            q, k, v = _three(a, 1)
        mask, size = a["mask_mode"].lower(), whole(a.get("chunked_attention_size", 0))
        more: Args = {"attention_chunk_size": size} if mask == "chunked" else {}
        cap, scale = number(a.get("logits_soft_cap_scale"), 0.0), number(a["bmm1_scale"])
        o, *stats = results
        unit = math.sqrt(q.shape[2]) * (1.0 if cap else scale)
        lse = [(s[..., 0].double() * unit + s[..., 1].double().log()).float() for s in stats]
        check_values(
            (o, *lse), q, k, v, qo, kv, causal=mask != "padding", window_left=a.get("window_left", -1), soft_cap=cap,
            sm_scale=scale, v_scale=a["bmm2_scale"], sinks=a.get("sinks"), natural=True, **more,
        )  # fmt: skip

    return Case("trtllm_fmha_v2_prefill", args, invoke, check, frozenset({"out", "workspace_buffer"}))


CASES: tuple[Any, ...] = (flash_equal, flash_equal, flash_varlen, flash_varlen, flash_cache, flash_cache, flex, fmha_v2)
