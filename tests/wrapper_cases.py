"""Random valid calls of the wrappers and of the functions of one request, for fuzz_values.py, and their truth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import oracle
import quire
from fuzz_calls import (
    Args,
    Case,
    Kept,
    Results,
    as_results,
    cache_of,
    given,
    hnd,
    integers,
    number,
    offsets,
    paged_tokens,
    require,
    run_options,
    whole,
    workspace,
)
from problems import Problem, poisoned
from value_cases import (
    COMBINATIONS,
    LENGTHS,
    PAGE_SIZES,
    PLANNED,
    SAME,
    batch,
    cache_args,
    check_values,
    layout_of,
    logits,
    meant,
    numbers_of,
    pages_of,
    restrided,
    scaled,
    tokens_of,
    window,
)

# Wrappers over ragged tensors and pages


def _mask(rng: random.Random, p: Problem) -> Args:
    if rng.random() < 0.15:
        p.random_mask(rng.choice((0.1, 0.5, 0.95)), rng.randrange(2**31))
        return {"packed_custom_mask": p.packed_mask()} if rng.random() < 0.3 else {"custom_mask": p.mask}
    return {}


def mask_of(a: Args, qo: Sequence[int], kv: Sequence[int]) -> Tensor | None:
    """A custom mask as flags."""
    if a.get("packed_custom_mask") is None:
        return a.get("custom_mask")
    counts = [n * m for n, m in zip(oracle.lengths(qo), oracle.lengths(kv), strict=True)]
    ends, packed = oracle.indptr_of([-(-n // 8) for n in counts]), a["packed_custom_mask"]
    require(packed.dtype is torch.uint8 and packed.dim() == 1 and packed.numel() >= ends[-1], "bits that are missing")
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    parts = [bits[b:e].flatten()[:n] for (b, e), n in zip(itertools.pairwise(ends), counts, strict=True)]
    return torch.cat([*parts, bits.new_zeros(0)]).bool()


_mask_names = {"custom_mask", "packed_custom_mask"}


def _plan_args(rng: random.Random, p: Problem, layout: str) -> Args:
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, "qo_indptr": numbers_of(rng, p.qo_indptr),
        "num_qo_heads": p.num_qo_heads, "num_kv_heads": p.num_kv_heads, "head_dim_qk": p.head_dim,
        "head_dim_vo": p.v.shape[2], "causal": rng.random() < 0.5, "q_data_type": p.dtype,
        "kv_data_type": p.kv_dtype or p.dtype, "disable_split_kv": rng.random() < 0.2, "q": restrided(rng, p.q),
        **logits(rng, p), **run_options(rng, p), "lse_base": rng.choice(("log2", "log2", "ln")),
    }  # fmt: skip
    args |= _mask(rng, p)
    if rng.random() < 0.05 and p.dtype is torch.float32 and not _mask_names & args.keys() and args["window_left"] < 0:
        args |= {"attention_chunk_size": rng.choice((1, 7, 64)), "causal": True}
    return args


_PLAN = ("head_dim_qk", "head_dim_vo", "causal", "q_data_type", "kv_data_type", "custom_mask", "packed_custom_mask")
_RUN = ("q_scale", "k_scale", "v_scale", "return_lse", "out", "lse", "sinks", "lse_base")
_HEADS = ("num_qo_heads", "num_kv_heads")
_WRITTEN = frozenset({"out", "lse", "float_workspace_buffer"})


def _check_planned(a: Args, results: Results, k: Tensor, v: Tensor, kv: Sequence[int]) -> None:
    qo = offsets(a["qo_indptr"])
    require(len(qo) == len(kv), "as many offsets of queries as of keys")
    check_values(
        results, a["q"], k, v, qo, kv, mask=mask_of(a, qo, kv), natural=a["lse_base"] == "ln",
        causal=bool(a["causal"]), **meant(a), **scaled(a),
    )  # fmt: skip


def value_ragged(rng: random.Random) -> Case:
    p, layout = batch(rng), layout_of(rng)
    args = _plan_args(rng, p, layout)
    args |= {"kv_indptr": numbers_of(rng, p.kv_indptr), **{n: _ragged(rng, getattr(p, n), layout) for n in ("k", "v")}}
    wrapper = Kept(lambda a: quire.BatchPrefillWithRaggedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(
            a["qo_indptr"], a["kv_indptr"], *(a[n] for n in _HEADS), **given(a, *_PLAN, "disable_split_kv", *PLANNED)
        )
        return as_results(w.run(a["q"], a["k"], a["v"], **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        k, v = (hnd(a[n], a["kv_layout"]) for n in ("k", "v"))
        _check_planned(a, results, k, v, offsets(a["kv_indptr"], of_a_part=True))

    return Case("BatchPrefillWithRaggedKVCacheWrapper", args, invoke, check, _WRITTEN)


def _ragged(rng: random.Random, t: Tensor, layout: str) -> Tensor:
    """Ragged keys in the layout, in any memory."""
    return restrided(rng, hnd(t, layout))


def value_paged(rng: random.Random) -> Case:
    p, layout = batch(rng), layout_of(rng)
    args = _plan_args(rng, p, layout)
    cache, args["page_size"] = cache_args(rng, p, layout)
    args |= {**cache, "fixed_split_size": rng.choice((None, None, None, 64, 128))}
    if args["fixed_split_size"] is not None:
        args["disable_split_kv"] = False
    wrapper = Kept(lambda a: quire.BatchPrefillWithPagedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(
            a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _HEADS),
            **given(a, *_PLAN, "page_size", "fixed_split_size", "disable_split_kv", *PLANNED),
        )  # fmt: skip
        return as_results(w.run(a["q"], cache_of(a), **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        _check_planned(a, results, *tokens_of(a, a["kv_layout"]))

    return Case("BatchPrefillWithPagedKVCacheWrapper", args, invoke, check, _WRITTEN)


def sink_wrapper(rng: random.Random) -> Case:
    p, layout = batch(rng), layout_of(rng)
    args = _plan_args(rng, p, layout)
    cache, args["page_size"] = cache_args(rng, p, layout)
    args |= {**cache, "sink": torch.randn(p.num_qo_heads), "run_sm_scale": rng.choice((None, None, 0.2))}
    for name in ("sinks", "pos_encoding_mode", "rope_scale", "rope_theta"):
        args.pop(name, None)
    constructed = ("q_data_type", "kv_data_type", "head_dim_qk", "head_dim_vo", "window_left")

    def invoke(a: Args) -> Results:
        w = quire.BatchAttentionWithAttentionSinkWrapper(
            a["float_workspace_buffer"], a["kv_layout"], **given(a, *constructed)
        )
        tables = a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _HEADS)
        names = ("causal", "custom_mask", "packed_custom_mask", "page_size", "disable_split_kv", "sm_scale")
        options = given(a, *names, "logits_soft_cap", "attention_chunk_size", "head_dim_qk", "head_dim_vo")
        w.plan(*tables, **options)
        return as_results(w.run(a["q"], cache_of(a), a["sink"], a["run_sm_scale"], **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        scale = a["sm_scale"] if a["run_sm_scale"] is None else a["run_sm_scale"]
        _check_planned({**a, "sinks": a["sink"], "sm_scale": scale}, results, *tokens_of(a, a["kv_layout"]))

    return Case("BatchAttentionWithAttentionSinkWrapper", args, invoke, check, _WRITTEN)


def value_decode(rng: random.Random) -> Case:
    rows = rng.choice((1, 1, 1, 2, 4))
    p = batch(rng, queries=rows, combinations=[c for c in COMBINATIONS if c[2] == c[3]], requests=(0, 1, 2, 3, 5))
    layout = layout_of(rng)
    cache, page_size = cache_args(rng, p, layout)
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, **cache, "num_qo_heads": p.num_qo_heads,
        "num_kv_heads": p.num_kv_heads, "head_dim": p.head_dim, "page_size": page_size, "q_data_type": p.dtype,
        "kv_data_type": p.kv_dtype or p.dtype, "q_len_per_req": rows, "q": restrided(rng, p.q), **logits(rng, p),
        **run_options(rng, p), "use_tensor_cores": rng.random() < 0.3,
    }  # fmt: skip
    wrapper = Kept(
        lambda a: quire.BatchDecodeWithPagedKVCacheWrapper(
            a["float_workspace_buffer"], a["kv_layout"], use_tensor_cores=a["use_tensor_cores"]
        )
    )

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        names = ("head_dim", "page_size", "q_data_type", "kv_data_type", "q_len_per_req")
        w.plan(
            a["kv_indptr"],
            a["kv_indices"],
            a["kv_last_page_len"],
            *(a[n] for n in _HEADS),
            **given(a, *names, *PLANNED),
        )
        return as_results(w.run(a["q"], cache_of(a), **given(a, *_RUN)))

    def check(a: Args, results: Results) -> None:
        k, v, kv = tokens_of(a, a["kv_layout"])
        rows = whole(a["q_len_per_req"])
        qo = [rows * b for b in range(len(kv))]
        check_values(results, a["q"], k, v, qo, kv, causal=rows > 1, **meant(a), **scaled(a))

    return Case("BatchDecodeWithPagedKVCacheWrapper", args, invoke, check, _WRITTEN)


def batch_attention(rng: random.Random) -> Case:
    p, layout = batch(rng), layout_of(rng)
    cache, page_size = cache_args(rng, p, layout)
    del cache["kv_last_page_len"]
    plan = _plan_args(rng, p, layout)
    names = ("kv_layout", "qo_indptr", *_HEADS, *_PLAN[:5], "sm_scale", "logits_soft_cap", "q", "out", "lse")
    args = {**cache, **given(plan, *names, "k_scale", "v_scale"), "page_size": page_size}
    args["kv_len_arr"] = numbers_of(rng, p.kv_lens)

    def invoke(a: Args) -> Results:
        w = quire.BatchAttention(a["kv_layout"], "cpu")
        tables = a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["kv_len_arr"], *(a[n] for n in _HEADS)
        cap = a["logits_soft_cap"]
        w.plan(*tables, **given(a, *_PLAN[:5], "page_size", "sm_scale", "logits_soft_cap"))
        scales = dict(given(a, "out", "lse", "k_scale", "v_scale").items())
        return as_results(w.run(a["q"], cache_of(a), logits_soft_cap=0.0 if cap is None else cap, **scales))

    def check(a: Args, results: Results) -> None:
        size, lens = whole(a["page_size"]), integers(a["kv_len_arr"])
        last = [(n - 1) % size + 1 if n else 0 for n in lens]
        pages = oracle.lengths(offsets(a["kv_indptr"], of_a_part=True))
        counts = [-(-n // size) for n in lens]
        require(len(pages) == len(counts) and all(0 <= c <= n for c, n in zip(counts, pages, strict=True)), "no pages")
        begin, table = offsets(a["kv_indptr"], of_a_part=True), integers(a["kv_indices"])
        used = [i for b, c in zip(begin, counts, strict=False) for i in table[b : b + c]]
        own = {**a, "kv_indptr": oracle.indptr_of(counts), "kv_indices": used, "kv_last_page_len": last}
        k, v, kv = tokens_of(own, a["kv_layout"])
        words = {"window_left": -1, "soft_cap": a["logits_soft_cap"], "sm_scale": a["sm_scale"]}
        causal = bool(a["causal"])
        check_values(results, a["q"], k, v, offsets(a["qo_indptr"]), kv, causal=causal, **words, **scaled(a))

    return Case("BatchAttention", args, invoke, check, frozenset({"out", "lse"}))


def value_single(rng: random.Random) -> Case:
    p, layout = batch(rng, requests=(1,), combinations=SAME), layout_of(rng)
    plan = {**_plan_args(rng, p, layout), "return_lse": rng.random() < 0.5}
    names = ("kv_layout", "causal", "q", "window_left", "sm_scale", "logits_soft_cap", "pos_encoding_mode")
    args = {n: plan[n] for n in (*names, "rope_scale", "rope_theta", "custom_mask", "return_lse") if n in plan}
    args |= {n: _ragged(rng, getattr(p, n), layout) for n in ("k", "v")}
    if "custom_mask" in args:
        args["custom_mask"] = args["custom_mask"].view(p.q.shape[0], p.k.shape[0])
    is_lse = rng.random() < 0.2
    if is_lse:
        del args["return_lse"]

    def invoke(a: Args) -> Results:
        function = quire.single_prefill_with_kv_cache_return_lse if is_lse else quire.single_prefill_with_kv_cache
        return as_results(function(**a))

    def check(a: Args, results: Results) -> None:
        k, v = (hnd(a[n], a["kv_layout"]) for n in ("k", "v"))
        qo, kv = [0, a["q"].shape[0]], [0, k.shape[0]]
        mask = a.get("custom_mask")
        check_values(results, a["q"], k, v, qo, kv, mask=mask, causal=bool(a["causal"]), **meant(a))

    return Case("single_prefill_with_kv_cache", args, invoke, check)


def value_single_decode(rng: random.Random) -> Case:
    p, layout = batch(rng, requests=(1,), queries=1, combinations=SAME), layout_of(rng)
    args: Args = {
        "q": restrided(rng, p.q)[0], **{n: _ragged(rng, getattr(p, n), layout) for n in ("k", "v")}, **logits(rng, p),
        "kv_layout": layout, "return_lse": rng.random() < 0.5, "use_tensor_cores": rng.random() < 0.3,
        "q_scale": rng.choice((None, 0.5)), "k_scale": rng.choice((None, 2.0)), "v_scale": rng.choice((None, -2.0)),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        k, v = (hnd(a[n], a["kv_layout"]) for n in ("k", "v"))
        require(a["q"].dim() == 2, "q of other than two dimensions")
        o, *lse = (r[None] for r in results)
        check_values((o, *lse), a["q"][None], k, v, [0, 1], [0, k.shape[0]], **meant(a), **scaled(a))

    return Case(
        "single_decode_with_kv_cache", args, lambda a: as_results(quire.single_decode_with_kv_cache(**a)), check
    )


def chunked_prefill(rng: random.Random) -> Case:
    p, layout = batch(rng, at_least_queries=rng.random() < 0.5), layout_of(rng)
    prefix = [rng.choice(LENGTHS) for _ in p.qo_lens]
    before = Problem(
        p.qo_lens,
        prefix,
        p.num_qo_heads,
        p.num_kv_heads,
        p.head_dim,
        p.v.shape[2],
        p.dtype,
        p.kv_dtype,
        seed=p.seed + 1,
    )
    plan = _plan_args(rng, p, layout)
    names = ("float_workspace_buffer", "kv_layout", "qo_indptr", *_HEADS, *_PLAN[:5], "sm_scale", "q", "sinks", "out")
    args = {**given(plan, *names, "lse", "return_lse", "k_scale", "v_scale", "q_scale"), "logits_soft_cap": None}
    args |= {"kv_indptr": numbers_of(rng, p.kv_indptr), "prefix_indptr": numbers_of(rng, before.kv_indptr)}
    args |= {n: _ragged(rng, getattr(p, n), layout) for n in ("k", "v")}
    args |= {n + "_prefix": _ragged(rng, getattr(before, n), layout) for n in ("k", "v")}
    wrapper = Kept(lambda a: quire.BatchPrefillWithPrefixWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        options = given(a, *_PLAN[:5], "kv_indptr", "sm_scale", "logits_soft_cap")
        w.plan(a["qo_indptr"], a["prefix_indptr"], *(a[n] for n in _HEADS), **options)
        tensors = (a[n] for n in ("q", "k", "v", "k_prefix", "v_prefix"))
        return as_results(w.run(*tensors, **given(a, *_RUN[:-1])))

    def check(a: Args, results: Results) -> None:
        qo = offsets(a["qo_indptr"])
        kv, pre = (offsets(a[n], of_a_part=True) for n in ("kv_indptr", "prefix_indptr"))
        require(len(qo) == len(kv) == len(pre), "as many offsets of queries as of keys")
        parts = [hnd(a[n], a["kv_layout"]) for n in ("k", "v", "k_prefix", "v_prefix")]
        require(kv[-1] <= parts[0].shape[0] and pre[-1] <= parts[2].shape[0], "more keys than there are")
        k, v, ends, masks = joined_keys(parts, qo, kv, pre, bool(a["causal"]))
        words = {"window_left": -1, "soft_cap": a["logits_soft_cap"], "sm_scale": a["sm_scale"]}
        check_values(results, a["q"], k, v, qo, ends, mask=masks, **words, **scaled(a))

    return Case("BatchPrefillWithPrefixWrapper", args, invoke, check, _WRITTEN)


def joined_keys(
    parts: Sequence[Tensor], qo: Sequence[int], kv: Sequence[int], pre: Sequence[int], causal: bool
) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Each request's prefix and own keys one after the other, their offsets, and who sees which."""
    ks, vs, masks = [parts[0][:0]], [parts[1][:0]], [torch.zeros(0, dtype=torch.bool)]
    for b, rows in enumerate(oracle.lengths(qo)):
        own, first = slice(kv[b], kv[b + 1]), slice(pre[b], pre[b + 1])
        ks += [parts[2][first], parts[0][own]]
        vs += [parts[3][first], parts[1][own]]
        seen = oracle.visible(rows, kv[b + 1] - kv[b], causal=causal)
        masks.append(torch.cat([torch.ones(rows, pre[b + 1] - pre[b], dtype=torch.bool), seen], 1).flatten())
    ends = [i + j - kv[0] - pre[0] for i, j in zip(kv, pre, strict=True)]
    return torch.cat(ks), torch.cat(vs), ends, torch.cat(masks)


# Prefill and decode together


def pod(rng: random.Random) -> Case:
    combination = [rng.choice(SAME)]
    d = batch(rng, queries=1, combinations=combination)
    p = Problem(
        [rng.choice((1, 5, 33))], [rng.choice((1, 40, 300))], d.num_qo_heads, d.num_kv_heads, d.head_dim,
        dtype=d.dtype, seed=d.seed + 1,
    )  # fmt: skip
    layout, layout_p = layout_of(rng), layout_of(rng)
    cache, page_size = cache_args(rng, d, layout)
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, **cache, "num_qo_heads": d.num_qo_heads,
        "num_kv_heads": d.num_kv_heads, "head_dim": d.head_dim, "page_size": page_size, "q_data_type": d.dtype,
        "window_left": window(rng), "sm_scale": None, "q_p": restrided(rng, p.q),
        **{n + "_p": _ragged(rng, getattr(p, n), layout_p) for n in ("k", "v")}, "q_d": restrided(rng, d.q),
        "causal_p": rng.random() < 0.5, "kv_layout_p": layout_p, "window_left_p": window(rng),
        "sm_scale_p": rng.choice((None, 0.2)), "return_lse_p": rng.random() < 0.5, "return_lse_d": rng.random() < 0.5,
        "k_scale": rng.choice((None, None, 0.5)), "v_scale": rng.choice((None, None, 2.0)),
    }  # fmt: skip
    if rng.random() < 0.2:
        args["custom_mask_p"] = torch.rand(p.q.shape[0], p.k.shape[0]) < 0.5
    wrapper = Kept(lambda a: quire.PODWithPagedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        tables = (a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _HEADS))
        w.plan(*tables, **given(a, "head_dim", "page_size", "q_data_type", "window_left", "sm_scale"))
        names = ("causal_p", "kv_layout_p", "window_left_p", "sm_scale_p", "return_lse_p", "return_lse_d")
        options = given(a, *names, "custom_mask_p", "k_scale", "v_scale")
        options |= {"kv_layout_d": a["kv_layout"], "window_left_d": a["window_left"]}
        first, second = w.run(a["q_p"], a["k_p"], a["v_p"], a["q_d"], cache_of(a), **options)
        return (*as_results(first), *as_results(second))

    def check(a: Args, results: Results) -> None:
        cut = 2 if a["return_lse_p"] else 1
        k, v = (hnd(a[n], a["kv_layout_p"]) for n in ("k_p", "v_p"))
        options = {"window_left": a["window_left_p"], "sm_scale": a["sm_scale_p"], "mask": a.get("custom_mask_p")}
        ends = [0, a["q_p"].shape[0]], [0, k.shape[0]]
        check_values(results[:cut], a["q_p"], k, v, *ends, causal=bool(a["causal_p"]), **options)
        k, v, kv = tokens_of(a, a["kv_layout"])
        options = {"window_left": a["window_left"], "sm_scale": a["sm_scale"], **scaled(a)}
        check_values(results[cut:], a["q_d"], k, v, list(range(len(kv))), kv, **options)

    return Case("PODWithPagedKVCacheWrapper", args, invoke, check, frozenset({"float_workspace_buffer"}))


def batch_pod(rng: random.Random) -> Case:
    d = batch(rng, queries=1, combinations=SAME)
    lens = [rng.choice((1, 5, 33)) for _ in range(rng.choice((1, 2)))]
    p = Problem(
        lens, [rng.choice((1, 40, 300)) for _ in lens], d.num_qo_heads, d.num_kv_heads, d.head_dim, dtype=d.dtype,
        seed=d.seed + 1,
    )  # fmt: skip
    layout, page_size = layout_of(rng), rng.choice(PAGE_SIZES)
    args: Args = {
        "float_workspace_buffer": workspace(), "kv_layout": layout, "num_qo_heads": d.num_qo_heads,
        "num_kv_heads": d.num_kv_heads, "head_dim": d.head_dim, "page_size": page_size, "q_data_type": d.dtype,
        "window_left": window(rng), "sm_scale": rng.choice((None, 0.2)), "causal_p": rng.random() < 0.5,
        "return_lse": rng.random() < 0.5, "k_scale": rng.choice((None, None, 0.5)),
        "v_scale": rng.choice((None, None, 2.0)),
    }  # fmt: skip
    for problem, end in ((p, "_p"), (d, "_d")):
        paged = pages_of(rng, problem, layout, page_size, ("tuple", "sliced"))
        args |= {
            "q" + end: restrided(rng, problem.q), "qo_indptr" + end: numbers_of(rng, problem.qo_indptr),
            "kv_indptr" + end: paged.indptr, "kv_indices" + end: paged.indices,
            "kv_last_page_len" + end: paged.last_page_len, "k_cache" + end: paged.kv[0], "v_cache" + end: paged.kv[1],
        }  # fmt: skip
    if rng.random() < 0.15:
        args["custom_mask_p"] = p.random_mask().mask
    wrapper = Kept(lambda a: quire.BatchPODWithPagedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        tables = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        arrays = [a[n + end] for end in ("_p", "_d") for n in tables]
        w.plan(
            *arrays, *(a[n] for n in _HEADS),
            **given(a, "head_dim", "page_size", "window_left", "q_data_type", "sm_scale"),
        )  # fmt: skip
        options = given(a, "custom_mask_p", "causal_p", "return_lse", "k_scale", "v_scale")
        first, second = w.run(a["q_p"], cache_of(a, "_p"), a["q_d"], cache_of(a, "_d"), **options)
        return (*as_results(first), *as_results(second))

    def check(a: Args, results: Results) -> None:
        half = len(results) // 2
        words = {"window_left": a["window_left"], "sm_scale": a["sm_scale"]}
        qo, (k, v, kv) = offsets(a["qo_indptr_p"]), tokens_of(a, a["kv_layout"], "_p")
        mask, causal = a.get("custom_mask_p"), bool(a["causal_p"])
        check_values(results[:half], a["q_p"], k, v, qo, kv, mask=mask, causal=causal, **words)
        k, v, kv = tokens_of(a, a["kv_layout"], "_d")
        check_values(results[half:], a["q_d"], k, v, offsets(a["qo_indptr_d"]), kv, **words, **scaled(a))

    return Case("BatchPODWithPagedKVCacheWrapper", args, invoke, check, frozenset({"float_workspace_buffer"}))


# Levels and items


def levels(rng: random.Random) -> Case:
    """MultiLevelCascadeAttentionWrapper with one to three levels: each node of a level serves consecutive requests."""
    dtype, _, dim, _ = rng.choice(SAME)
    count, kv_heads = rng.choice((1, 2, 5)), rng.choice((1, 2))
    qo_lens = [rng.choice((1, 1, 3)) for _ in range(count)]
    rows = oracle.indptr_of(qo_lens)
    nodes = [
        sorted({0, count, *(rng.randint(0, count) for _ in range(cuts))}) for cuts in rng.choice(((), (0,), (0, 2)))
    ]
    nodes.append(list(range(count + 1)))
    page_size, tables, used = rng.choice((1, 4, 16)), [], 0
    for cuts in nodes:
        is_last = cuts is nodes[-1]
        lens = [rng.choice((0, 1, 5, 20, 70)) if is_last else rng.choice((1, 8, 40)) for _ in cuts[1:]]
        pages = [-(-n // page_size) for n in lens]
        tables.append((cuts, lens, pages))
        used += sum(pages)
    order = rng.sample(range(used + 2), used)
    shape = (used + 2, page_size, kv_heads, dim)
    caches = [poisoned(shape, dtype, "cpu") for _ in range(2)]
    args: Args = {
        "float_workspace_buffer": workspace(), "num_levels": len(nodes), "num_kv_heads": kv_heads, "head_dim": dim,
        "num_qo_heads": kv_heads * rng.choice((1, 3)), "page_size": page_size, "causal": rng.random() < 0.5,
        "q_data_type": dtype, "sm_scale": rng.choice((None, 0.2)),
    }  # fmt: skip
    for level, (cuts, lens, pages) in enumerate(tables):
        own, order = order[: sum(pages)], order[sum(pages) :]
        places = iter(own)
        for n in lens:
            for begin in range(0, n, page_size):
                page = next(places)
                for cache in caches:
                    held = min(page_size, n - begin)
                    cache[page, :held] = torch.randn(held, kv_heads, dim).to(dtype)
        args |= {
            f"qo_indptr_{level}": numbers_of(rng, [rows[i] for i in cuts]), f"kv_indices_{level}": numbers_of(rng, own),
            f"kv_indptr_{level}": numbers_of(rng, oracle.indptr_of(pages)),
            f"kv_last_page_len_{level}": numbers_of(rng, [(n - 1) % page_size + 1 if n else 0 for n in lens]),
        }  # fmt: skip
    args |= {"q": restrided(rng, torch.randn(rows[-1], args["num_qo_heads"], dim).to(dtype)), "k_cache": caches[0]}
    args["v_cache"] = caches[1]
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")

    def invoke(a: Args) -> Results:
        w = quire.MultiLevelCascadeAttentionWrapper(a["num_levels"], a["float_workspace_buffer"])
        arrays = ([a[f"{n}_{level}"] for level in range(len(nodes))] for n in names)
        options = given(a, "head_dim", "page_size", "causal", "q_data_type", "sm_scale")
        w.plan(*arrays, *(a[n] for n in _HEADS), **options)
        return (w.run(a["q"], (a["k_cache"], a["v_cache"])),)

    def check(a: Args, results: Results) -> None:
        own, last = [], len(nodes) - 1
        for level in range(len(nodes)):
            tables = {n: a[f"{n}_{level}"] for n in names[1:]}
            tokens = paged_tokens({**tables, **given(a, "k_cache", "v_cache")}, whole(a["page_size"]), "NHD")
            own.append((offsets(a[f"qo_indptr_{level}"]), *tokens))
        qo, ks, vs, masks, lens = own[last][0], [], [], [], []
        q = a["q"]
        require(all(ends[-1] == q.shape[0] and len(ends) == len(kv) for ends, _, _, kv in own), "levels of other rows")
        for row, end in itertools.pairwise(qo):  # each request: the keys of all nodes above it, then its own
            seen, total = [], 0
            for level, (ends, k, v, kv) in enumerate(own):
                at = [
                    i for i in range(len(ends) - 1) if ends[i] <= row and end <= ends[i + 1] and ends[i] < ends[i + 1]
                ]
                require(bool(at) or row == end, "requests of two nodes")
                node = at[0] if at else 0
                if row == end:
                    continue
                part = slice(kv[node], kv[node + 1])
                ks.append(k[part])
                vs.append(v[part])
                n = kv[node + 1] - kv[node]
                total += n
                seen.append(oracle.visible(end - row, n, causal=level == last and bool(a["causal"])))
            lens.append(total)
            masks.append(torch.cat([torch.zeros(end - row, 0, dtype=torch.bool), *seen], 1).flatten())
        k, v = (torch.cat([a[n][:0, 0], *parts]) for n, parts in (("k_cache", ks), ("v_cache", vs)))
        kv, mask = oracle.indptr_of(lens), torch.cat([torch.zeros(0, dtype=torch.bool), *masks])
        if not bool(k.isfinite().all() and v.isfinite().all()):
            return
        options = {"mask": mask, "sm_scale": None if a["sm_scale"] is None else number(a["sm_scale"])}
        truth = oracle.attention(q.detach().resolve_neg(), k, v, qo, kv, **options).o
        theirs = oracle.torch_error(q.detach().resolve_neg(), k, v, qo, kv, **options).double()
        # The results of levels are rounded to the dtype, or float32, before they are merged.
        slack = (theirs - truth) * 2 + (truth.abs().amax() if truth.numel() else 0.0) * torch.finfo(q.dtype).eps
        oracle.assert_close(results[0], truth, truth + slack, qo)

    return Case("MultiLevelCascadeAttentionWrapper", args, invoke, check, frozenset({"float_workspace_buffer"}))


def items(rng: random.Random) -> Case:
    """Multi-item scoring over pages."""
    layout = layout_of(rng)
    batch_items = [
        (rng.choice((1, 5, 33)), [rng.choice((0, 1, 4, 20)) for _ in range(rng.choice((0, 1, 3)))])
        for _ in range(rng.choice((1, 2)))
    ]
    kv_lens = [prefix + sum(own) + len(own) + 1 for prefix, own in batch_items]
    qo_lens = [rng.choice((n, n, min(n, 9), 0)) for n in kv_lens]
    p = Problem(qo_lens, kv_lens, kv_heads := rng.choice((1, 2)), kv_heads, seed=rng.randrange(2**31))
    cache, page_size = cache_args(rng, p, layout)
    rows = [oracle.item_positions(own) for _, own in batch_items]
    length = max(map(len, rows)) + rng.choice((0, 2))
    positions = [n for row in rows for n in (*row, *([0] * (length - len(row))))]
    args: Args = {
        **cache, "float_workspace_buffer": workspace(), "kv_layout": layout, "page_size": page_size,
        "qo_indptr": numbers_of(rng, p.qo_indptr), "num_qo_heads": kv_heads, "num_kv_heads": kv_heads,
        "causal": rng.random() < 0.5, "q": restrided(rng, p.q), "window_left": window(rng),
        "prefix_len_ptr": torch.tensor([prefix for prefix, _ in batch_items]).to(torch.uint32),
        "token_pos_in_items_ptr": torch.tensor(positions).to(torch.uint16), "token_pos_in_items_len": length,
    }  # fmt: skip
    fixed = ("prefix_len_ptr", "token_pos_in_items_ptr", "token_pos_in_items_len")

    def invoke(a: Args) -> Results:
        w = quire.BatchPrefillWithPagedKVCacheWrapper(a["float_workspace_buffer"], a["kv_layout"])
        tables = a["qo_indptr"], a["kv_indptr"], a["kv_indices"], a["kv_last_page_len"], *(a[n] for n in _HEADS)
        names = ("page_size", "causal", "window_left", *fixed)
        w.plan(*tables, 64, q_data_type=torch.float32, **given(a, *names))
        return w.run(a["q"], cache_of(a), return_lse=True)

    def check(a: Args, results: Results) -> None:
        same = all(torch.equal(torch.as_tensor(a[n]).long(), torch.as_tensor(args[n]).long()) for n in fixed)
        qo, (k, v, kv) = offsets(a["qo_indptr"]), tokens_of(a, a["kv_layout"])
        if not same or qo != p.qo_indptr or kv != p.kv_indptr:  # other items: not for this reference
            return
        seen = [
            oracle.visible_items(n, prefix, own).flatten()
            for n, (prefix, own) in zip(qo_lens, batch_items, strict=True)
        ]
        check_values(results, a["q"], k, v, qo, kv, mask=torch.cat(seen), window_left=a["window_left"])

    title = "BatchPrefillWithPagedKVCacheWrapper, items"
    return Case(title, args, invoke, check, frozenset({"float_workspace_buffer"}))


CASES: tuple[Any, ...] = (
    value_ragged, value_paged, value_paged, sink_wrapper, value_decode, value_decode, batch_attention, value_single,
    value_single_decode, chunked_prefill, pod, batch_pod, levels, items,
)  # fmt: skip
