"""Random valid calls of latent attention (MLA) and of appends to its caches, for fuzz_values.py, and their truth."""

from __future__ import annotations

import itertools
import math
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
    given,
    has_memory,
    integers,
    number,
    offsets,
    require,
    whole,
    workspace,
)
from latents import BYTES, E4M3, Latents, packed, unpacked
from problems import poisoned
from quire.compat import flash_mla
from value_cases import E5M2, LN2, assert_eight_bits, numbers_of, restrided

TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZES = (1, 3, 16, 64)


# Drawing


def batch(rng: random.Random, *, queries: int | None = None, kind: str = "") -> Latents:
    count = rng.choice((1, 1, 2, 4))
    kv_lens = [rng.choice((0, 1, 5, 17, 64, 130, rng.randint(0, 90))) for _ in range(count)]
    qo_lens = [rng.choice((0, 1, 1, 3, 9)) if queries is None else queries for _ in range(count)]
    eight_bits = kind in ("rows", "e4m3")
    dtype = torch.bfloat16 if eight_bits else rng.choice(TYPES)
    return Latents(
        qo_lens, kv_lens, rng.choice((1, 2, 8, 16, 20)), dtype, seed=rng.randrange(2**31),
        kv_dtype=E4M3 if kind == "e4m3" else None,
    )  # fmt: skip


def kind_of(rng: random.Random) -> str:
    """Of a cache: of the queries' type, of 8 bits, or of rows of 656 bytes."""
    return rng.choice(("", "", "", "e4m3", "rows"))


def pages_of(
    rng: random.Random, p: Latents, kind: str, contiguous: bool = False
) -> tuple[Tensor, list[int], list[int]]:
    """A cache [num_pages, page_size, 576 or 656 bytes], NaN where no token is; offsets into page numbers, and these."""
    page_size = rng.choice(PAGE_SIZES)
    counts = [-(-n // page_size) for n in p.kv_lens]
    num_pages = max(1, sum(counts) + rng.choice((0, 3)))
    order = rng.sample(range(num_pages), sum(counts))
    rows = packed(p.keys) if kind == "rows" else p.keys
    gap, wide = (0, 0) if contiguous else (rng.choice((0, 0, 2)), rng.choice((0, 0, 64)))
    shape = (num_pages, page_size + gap, rows.shape[1] + wide)
    cache = torch.full(shape, 255, dtype=torch.uint8) if kind == "rows" else poisoned(shape, rows.dtype, "cpu")
    cache = cache[:, :page_size, : rows.shape[1]]
    free, at = iter(order), 0
    for n in p.kv_lens:
        for begin in range(0, n, page_size):
            count = min(page_size, n - begin)
            cache[next(free), :count] = rows[at : at + count]
            at += count
    return cache, oracle.indptr_of(counts), order


def table_of(rng: random.Random, indptr: Sequence[int], indices: Sequence[int]) -> Tensor:
    counts = oracle.lengths(indptr)
    table = torch.full((len(counts), max([*counts, 1]) + rng.choice((0, 2))), rng.choice((0, -3, 2**30)))
    for row, begin, count in zip(table, indptr, counts, strict=False):
        row[:count] = torch.tensor(indices[begin : begin + count])
    return restrided(rng, table.int())


# What caches hold


def tokens(cache: Tensor) -> Tensor:
    """float64 [num_pages * page_size, 576]."""
    require(cache.dim() == 3, "a cache of other than three dimensions")
    flat = cache.detach().resolve_neg().flatten(0, 1)
    return unpacked(flat) if cache.dtype is torch.uint8 else flat.double()


def keys_of(cache: Tensor, lens: Sequence[int], pages: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Keys of requests, ragged, and their offsets; pages: the numbers of each request's pages."""
    size, whole_cache = cache.shape[1], tokens(cache)
    parts = [whole_cache[:0]]
    for n, own in zip(lens, pages, strict=True):
        need = -(-n // size)
        require(n >= 0 and len(own) >= need, "pages that are missing")
        require(all(0 <= i < cache.shape[0] for i in own[:need]), "pages that do not exist")
        rows = [i * size + j for i in own[:need] for j in range(size)][:n]
        parts.append(whole_cache[torch.tensor(rows, dtype=torch.int64)])
    return torch.cat(parts), oracle.indptr_of(lens)


def tabled_keys(cache: Tensor, table: Tensor, lens: Sequence[int]) -> tuple[Tensor, list[int]]:
    require(table.dim() == 2 and table.shape[0] == len(lens), "a table of another batch")
    return keys_of(cache, lens, table.tolist())


def selected_keys(cache: Tensor, indices: Tensor, most: Sequence[int] | None) -> tuple[Tensor, list[int]]:
    """Keys that each row of indices [rows, topk] lists."""
    flat, rows = tokens(cache), indices.flatten(0, -2).tolist()
    if most is not None:
        rows = [row[: max(0, n)] for row, n in zip(rows, most, strict=True)]
    used = [[i for i in row if 0 <= i < flat.shape[0]] for row in rows]
    found = [flat[torch.tensor(row, dtype=torch.int64)] for row in used]
    return torch.cat([flat[:0], *found]), oracle.indptr_of([len(row) for row in used])


def check_latents(
    results: Results, q: Tensor, keys: Tensor, qo: Sequence[int], kv: Sequence[int], *, scale: float,
    causal: bool = False, v_scale: float = 1.0, sinks: Tensor | None = None, natural: bool = False,
    sinks_in_lse: bool = True, no_keys: float = -math.inf, rounded: Tensor | None = None,
) -> None:  # fmt: skip
    """o [nnz_qo, num_heads, 512] and lse against the truth, for the requests whose keys are numbers.

    no_keys: the lse of rows without keys. rounded: q as it is rounded once it has been multiplied by something, and
    divided by that again.
    """
    require(q.dim() == 3 and q.shape[2] == 576 and qo[-1] == q.shape[0], "as many rows of q as its offsets say")
    require(len(qo) == len(kv) and scale > 0, "other requests, or a scale that is not positive")
    q, o = q.detach().resolve_neg(), results[0]
    require(sinks is None or sinks.numel() == q.shape[1], "as many sinks as heads")
    sinks = None if sinks is None else sinks.detach().reshape(-1)
    lse = results[1] if len(results) > 1 else None
    if lse is not None and natural:
        lse = (lse.double() / LN2).float()
    if lse is not None:
        assert not bool((lse == -no_keys).any()), f"an lse of {-no_keys}"
        lse = lse.masked_fill(lse == no_keys, -math.inf)
    for b, (rows, own) in enumerate(zip(oracle.lengths(qo), oracle.lengths(kv), strict=True)):
        part, key = q[qo[b] : qo[b + 1]], keys[kv[b] : kv[b + 1]]
        if not bool(key.isfinite().all()):
            continue
        parts = part[..., :512], part[..., 512:], key[:, :512], key[:, 512:]
        near = parts if rounded is None else (*rounded[qo[b] : qo[b + 1]].split((512, 64), 2), *parts[2:])
        how: Args = {"causal": causal, "sm_scale": scale}
        truth = oracle.latent_attention(*parts, [0, rows], [0, own], sinks=sinks, **how)
        theirs = oracle.latent_attention(*near, [0, rows], [0, own], sinks=sinks, dtype=q.dtype, **how).o.double()
        theirs = theirs.where(theirs.isfinite(), truth.o)  # logits beyond the type
        here = slice(qo[b], qo[b + 1])
        if o.element_size() == 1:
            assert_eight_bits(o[here], truth.o * v_scale, theirs * v_scale, q.dtype)
            continue
        try:
            assert_scaled(o[here], truth.o, theirs, v_scale)
        except AssertionError:
            own_order = _summed_in_order(part, key, causal, scale, sinks, truth)
            assert_scaled(o[here], truth.o, own_order, v_scale, f"o of request {b}")
        if lse is not None:
            want = (
                truth if sinks_in_lse or sinks is None else oracle.latent_attention(*parts, [0, rows], [0, own], **how)
            )
            norms = [float(t.double().norm(dim=-1).amax()) if t.numel() else 0.0 for t in (part, key)]
            magnitude = norms[0] * norms[1] * scale * math.log2(math.e) + 1.0
            of_near = oracle.latent_attention(
                *near, [0, rows], [0, own], sinks=sinks if sinks_in_lse else None, **how
            )  # fmt: skip
            oracle.assert_lse_close(lse[here], want.lse, magnitude=magnitude, rounded=of_near.lse)


def assert_scaled(o: Tensor, truth: Tensor, own: Tensor, v_scale: float, what: str = "o") -> None:
    """assert_close() of results times a scale, which may make them smaller than any relative error applies to."""
    if 0 < abs(v_scale) < 1e-30:
        assert not o.numel() or float((o.double() - truth * v_scale).abs().max()) < 1e-36, what
    else:
        oracle.assert_close(o, truth * v_scale, own * v_scale, None, what)


def _summed_in_order(
    q: Tensor, keys: Tensor, causal: bool, scale: float, sinks: Tensor | None, truth: oracle.State
) -> Tensor:
    """An answer in q's dtype whose logits are summed over 576 dims one after the other: less lucky than torch's sums,
    which are in pairs, where few rows have weights that depend on few logits.
    """
    rows, own = q.detach().to(q.dtype), keys.to(q.dtype)
    scores = rows.new_zeros(*rows.shape[:2], own.shape[0])
    for i in range(rows.shape[2]):
        scores = scores + rows[..., i, None] * own[:, i]
    seen = oracle.visible(rows.shape[0], own.shape[0], causal=causal)[:, None]
    scores = (scores * scale).double().masked_fill(~seen, -math.inf)
    weights = torch.exp(scores - truth.lse[..., None] * LN2).nan_to_num(0.0)
    return (weights.to(q.dtype) @ own[:, :512]).double()


def sinks_of(rng: random.Random, p: Latents, name: str = "sinks") -> Args:
    return {name: torch.randn(p.num_heads) * 3} if rng.random() < 0.25 else {}


# Calls


def mla_wrapper(rng: random.Random) -> Case:
    kind = kind_of(rng)
    p = batch(rng, kind=kind)
    cache, indptr, indices = pages_of(rng, p, kind)
    q = restrided(rng, p.query)
    args: Args = {
        "float_workspace_buffer": workspace(), "qo_indptr": numbers_of(rng, p.qo_indptr), "kv_cache": cache,
        "kv_indptr": numbers_of(rng, indptr), "kv_indices": numbers_of(rng, indices),
        "kv_len_arr": numbers_of(rng, p.kv_lens), "num_heads": p.num_heads, "page_size": cache.shape[1],
        "causal": rng.random() < 0.5, "sm_scale": rng.choice((192**-0.5, 0.02)), "q_data_type": p.dtype,
        "kv_data_type": cache.dtype, "q_nope": q[..., :512], "q_pe": q[..., 512:], "return_lse": rng.random() < 0.6,
        "return_lse_base_on_e": rng.random() < 0.3, "disable_split_kv": rng.random() < 0.2, **sinks_of(rng, p),
    }  # fmt: skip
    if kind != "rows" and rng.random() < 0.6:
        args |= {"ckv_cache": cache[..., :512], "kpe_cache": cache[..., 512:]}
        del args["kv_cache"]
    if kind == "e4m3" and rng.random() < 0.5:
        args["ckv_scale"] = rng.choice((0.5, 2.0, 3.0))
        args["kpe_scale"] = rng.choice((args["ckv_scale"], args["ckv_scale"], 0.25, 7.0, 2e4))
    if rng.random() < 0.4:
        args["out"] = poisoned((*p.query.shape[:2], 512), p.dtype, "cpu")
    wrapper = Kept(lambda a: quire.BatchMLAPagedAttentionWrapper(a["float_workspace_buffer"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        arrays = (a[n] for n in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"))
        names = ("page_size", "causal", "sm_scale", "q_data_type", "kv_data_type", "disable_split_kv")
        w.plan(*arrays, a["num_heads"], 512, 64, **given(a, *names))
        names = ("q_nope", "q_pe", "kv_cache", "ckv_cache", "kpe_cache", "out", "return_lse", "return_lse_base_on_e")
        return as_results(w.run(**given(a, *names, "sinks", "ckv_scale", "kpe_scale")))

    def check(a: Args, results: Results) -> None:
        cache = a["kv_cache"] if "kv_cache" in a else joined(a["ckv_cache"], a["kpe_cache"])
        require(cache.dim() == 3 and cache.shape[1] == whole(a["page_size"]), "pages of another size")
        ends = offsets(a["kv_indptr"][: len(a["qo_indptr"])], of_a_part=True)  # of a buffer for more requests
        table = integers(a["kv_indices"])
        require(ends[-1] <= len(table), "page numbers that are missing")
        pages = [table[b:e] for b, e in itertools.pairwise(ends)]
        keys, kv = keys_of(cache, integers(a["kv_len_arr"]), pages)
        factor = number(a.get("ckv_scale"))
        rest = number(a.get("kpe_scale"))
        require(factor > 0, "a scale that is not positive")
        keys = torch.cat((keys[:, :512] * factor, keys[:, 512:] * rest), 1)
        largest = max(factor, abs(rest))
        q, times = torch.cat((a["q_nope"], a["q_pe"]), -1).detach().resolve_neg(), torch.ones(576, dtype=torch.float64)
        times[:512], times[512:] = factor / largest, rest / largest or 1.0
        check_latents(
            results, q, keys, offsets(a["qo_indptr"]), kv, scale=number(a["sm_scale"]), causal=bool(a["causal"]),
            sinks=a.get("sinks"), natural=bool(a["return_lse_base_on_e"]),
            rounded=(q.double() * times).to(q.dtype).double() / times,
        )  # fmt: skip

    return Case("BatchMLAPagedAttentionWrapper", args, invoke, check, frozenset({"out", "float_workspace_buffer"}))


def joined(latents: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Rows of both parts of a cache; where one part has fewer pages, none has a page that the other lacks."""
    pages = min(len(latents), len(rest))
    return torch.cat((latents[:pages], rest[:pages]), -1)


def table_mla(rng: random.Random) -> Case:
    """trtllm_batch_decode_with_kv_cache_mla() and xqa_batch_decode_with_kv_cache_mla()."""
    name = rng.choice(("trtllm", "trtllm", "xqa"))
    kind, rows = kind_of(rng), rng.choice((1, 1, 2, 4))
    p = batch(rng, queries=rows, kind=kind)
    cache, indptr, indices = pages_of(rng, p, kind)
    args: Args = {
        "query": restrided(rng, p.query.view(-1, rows, p.num_heads, 576)), "kv_cache": cache,
        "workspace_buffer": workspace(), "block_tables": table_of(rng, indptr, indices),
        "seq_lens": numbers_of(rng, p.kv_lens), "max_seq_len": max([1, *p.kv_lens]) + rng.choice((0, 7)),
        "bmm1_scale": rng.choice((192**-0.5, 0.02)), "bmm2_scale": rng.choice((1.0, 1.0, 2.0)), **sinks_of(rng, p),
    }  # fmt: skip
    if rng.random() < 0.4:
        args["kv_cache"] = cache.unsqueeze(1)
    if name == "trtllm":
        args |= {"return_lse": rng.random() < 0.5, "return_lse_base": rng.choice((None, "base2", "basee"))}
    if rng.random() < 0.3:
        args["out"] = poisoned((*args["query"].shape[:-1], 512), p.dtype, "cpu")

    def invoke(a: Args) -> Results:
        sizes = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        return as_results(getattr(quire.mla, f"{name}_batch_decode_with_kv_cache_mla")(**a, **sizes))

    def check(a: Args, results: Results) -> None:
        q, cache = a["query"], a["kv_cache"]
        require(q.dim() == 4, "queries of other than four dimensions")
        cache = cache.squeeze(1) if cache.dim() == 4 and cache.shape[1] == 1 else cache
        lens, rows = integers(a["seq_lens"]), q.shape[1]
        require(max([0, *lens]) <= whole(a["max_seq_len"]), "lengths that cannot be")
        keys, kv = tabled_keys(cache, a["block_tables"], lens)
        require(q.shape[0] == len(lens), "a table of another batch")
        o, *lse = results
        check_latents(
            (o.flatten(0, 1), *(x.reshape(-1, q.shape[2]) for x in lse)), q.flatten(0, 1), keys,
            [rows * b for b in range(len(kv))], kv, scale=number(a["bmm1_scale"]), causal=rows > 1,
            v_scale=number(a["bmm2_scale"]), sinks=a.get("sinks"), natural=a.get("return_lse_base") == "basee",
        )  # fmt: skip

    return Case(f"{name}_batch_decode_with_kv_cache_mla", args, invoke, check, frozenset({"out", "workspace_buffer"}))


def value_xqa_mla(rng: random.Random) -> Case:
    p = batch(rng, queries=1, kind=rng.choice(("", "", "e4m3")))
    cache, indptr, indices = pages_of(rng, p, "")
    beam, halves = rng.random() < 0.5, rng.random() < 0.5
    q = restrided(rng, p.query)
    args: Args = {
        "q": q.unsqueeze(1) if beam else q, "k_cache": cache.unsqueeze(2) if rng.random() < 0.5 else cache,
        "page_table": table_of(rng, indptr, indices), "seq_lens": numbers_of(rng, p.kv_lens),
        "page_size": cache.shape[1], "q_scale": rng.choice((192**-0.5, 0.02)), "kv_scale": rng.choice((1.0, 2.0, None)),
    }  # fmt: skip
    if rng.random() < 0.4:
        args["output"] = poisoned((*args["q"].shape[:-1], 512), p.dtype, "cpu")

    def invoke(a: Args) -> Results:
        values = a["k_cache"][..., :512] if halves and has_memory(a["k_cache"]) else a["k_cache"]
        return (quire.xqa_mla(v_cache=values, **a),)

    def check(a: Args, results: Results) -> None:
        cache = a["k_cache"].squeeze(2) if a["k_cache"].dim() == 4 else a["k_cache"]
        q = a["q"].squeeze(1) if a["q"].dim() == 4 else a["q"]
        keys, kv = tabled_keys(cache, a["page_table"], integers(a["seq_lens"].flatten()))
        factor = number(a["kv_scale"])
        scale = number(a["q_scale"]) * factor
        o = results[0].reshape(*q.shape[:-1], 512)
        check_latents((o,), q, keys, list(range(len(kv))), kv, scale=scale, v_scale=factor)

    return Case("xqa_mla", args, invoke, check, frozenset({"output"}))


def _indices(rng: random.Random, rows: Sequence[int], num_tokens: int) -> Tensor:
    """int32 [*rows, topk]: tokens, some of them none, twice, or beyond the cache."""
    topk = rng.choice((1, 8, 33, 64))
    chosen = torch.randint(0, max(1, num_tokens), (*rows, topk), dtype=torch.int32)
    if not num_tokens:
        chosen.fill_(-1)
    none = torch.rand(chosen.shape) < rng.choice((0.0, 0.2, 0.9))
    return restrided(rng, chosen.where(~none, rng.choice((-1, -5, num_tokens, 2**31 - 1))))


def _sparse_cache(rng: random.Random, p: Latents, kind: str) -> Tensor:
    """A cache in which each place has a token."""
    rows = packed(p.keys) if kind == "rows" else p.keys
    size = rng.choice([n for n in PAGE_SIZES if rows.shape[0] % n == 0])
    return rows.view(-1, size, rows.shape[1])


def sparse_mla(rng: random.Random) -> Case:
    """flash_mla_with_kvcache(indices=), flash_mla_sparse_fwd() and trtllm's function with sparse_mla_top_k."""
    name = rng.choice(("kvcache", "sparse_fwd", "trtllm"))
    kind = "" if name == "sparse_fwd" else kind_of(rng)
    requests, rows = rng.choice((1, 2, 4)), rng.choice((1, 1, 3))
    p = Latents(
        [rows] * requests, [rng.choice((0, 1, 48, 192))] * requests, rng.choice((1, 8, 16)),
        torch.bfloat16 if kind else rng.choice(TYPES), seed=rng.randrange(2**31),
        kv_dtype=E4M3 if kind == "e4m3" else None,
    )  # fmt: skip
    cache, q = _sparse_cache(rng, p, kind), p.query.view(requests, rows, p.num_heads, 576)
    args: Args = {
        "scale": rng.choice((192**-0.5, 0.02)),
        "k_cache": cache if name == "trtllm" else cache.unsqueeze(2),
        "q": restrided(rng, q),
    }
    total = cache.shape[0] * cache.shape[1]
    shape = (requests * rows, 1) if name == "sparse_fwd" else (requests, rows)
    args["indices"] = _indices(rng, shape, total)
    if name == "sparse_fwd":
        args |= {"q": args["q"].flatten(0, 1), "k_cache": cache.flatten(0, 1).unsqueeze(1)}
    if rng.random() < 0.4:
        counts = [rng.randint(0, args["indices"].shape[-1]) for _ in range(requests * rows)]
        if name == "kvcache":
            counts = counts[:requests]
        args["topk_length"] = numbers_of(rng, counts)
    args |= sinks_of(rng, p, "attn_sink")
    if name == "trtllm":
        args |= {"workspace_buffer": workspace()}

    def invoke(a: Args) -> Results:
        if name == "sparse_fwd":
            options = given(a, "attn_sink", "topk_length")
            return flash_mla.flash_mla_sparse_fwd(a["q"], a["k_cache"], a["indices"], a["scale"], **options)[::2]
        if name == "kvcache":
            options = given(a, "indices", "attn_sink", "topk_length")
            return flash_mla.flash_mla_with_kvcache(
                a["q"], a["k_cache"], None, None, 512, None, None, a["scale"], is_fp8_kvcache=bool(kind), **options
            )
        return quire.mla.trtllm_batch_decode_with_kv_cache_mla(
            a["q"], a["k_cache"], a["workspace_buffer"], 128, 512, 64, a["indices"], None, 1,
            getattr(a["indices"], "shape", (1,))[-1], bmm1_scale=a["scale"], sinks=a.get("attn_sink"), return_lse=True,
            sparse_mla_top_k_lens=a.get("topk_length"),
        )  # fmt: skip

    def check(a: Args, results: Results) -> None:
        q, scale = a["q"], number(a["scale"], 576**-0.5)
        cache = a["k_cache"]
        if name == "trtllm" and cache.dim() == 4 and cache.shape[1] == 1:
            cache = cache.squeeze(1)
        require(cache.dim() == 4 - (name != "kvcache"), "a cache of other dimensions")
        cache = cache.transpose(0, 1) if name == "sparse_fwd" else cache.squeeze(2) if name == "kvcache" else cache
        flat = q.flatten(0, -3) if q.dim() > 3 else q
        most = None if a.get("topk_length") is None else integers(a["topk_length"].flatten())
        if most is not None and name == "kvcache":
            require(len(most) == q.shape[0], "lengths of other requests")
            most = [n for n in most for _ in range(q.shape[1])]
        require(a["indices"].dim() >= 2 and a["indices"].shape[:-1].numel() == flat.shape[0], "indices of other rows")
        require(most is None or len(most) == flat.shape[0], "lengths of other rows")
        keys, kv = selected_keys(cache, a["indices"], most)
        o, lse = results
        if name == "kvcache":
            lse = lse.transpose(1, 2)
        rows = o.reshape(*flat.shape[:-1], 512), lse.reshape(flat.shape[:-1])
        check_latents(
            rows, flat, keys, list(range(flat.shape[0] + 1)), kv, scale=scale,
            sinks=a.get("attn_sink"), natural=name != "trtllm", sinks_in_lse=name == "trtllm",
            no_keys=-math.inf if name == "trtllm" else math.inf,
        )  # fmt: skip

    full = {"kvcache": "flash_mla_with_kvcache", "sparse_fwd": "flash_mla_sparse_fwd"}
    title = full.get(name, "trtllm_batch_decode_with_kv_cache_mla") + ("" if name == "sparse_fwd" else ", sparse")
    return Case(title, args, invoke, check, frozenset({"workspace_buffer"}))


def dense_flash_mla(rng: random.Random) -> Case:
    kind, rows = kind_of(rng), rng.choice((1, 1, 3))
    p = batch(rng, queries=rows, kind=kind)
    cache, indptr, indices = pages_of(rng, p, kind)
    args: Args = {
        "q": restrided(rng, p.query.view(-1, rows, p.num_heads, 576)), "k_cache": cache.unsqueeze(2),
        "block_table": table_of(rng, indptr, indices), "cache_seqlens": numbers_of(rng, p.kv_lens),
        "softmax_scale": rng.choice((None, 192**-0.5)), "causal": rng.random() < 0.5, "is_fp8_kvcache": bool(kind),
        "head_dim_v": 512, **sinks_of(rng, p, "attn_sink"),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        q = a["q"]
        require(q.dim() == 4 and a["k_cache"].dim() == 4, "tensors of other than four dimensions")
        keys, kv = tabled_keys(a["k_cache"].squeeze(2), a["block_table"], integers(a["cache_seqlens"]))
        require(q.shape[0] == len(kv) - 1, "a table of another batch")
        rows = q.shape[1]
        check_latents(
            (results[0].flatten(0, 1), results[1].transpose(1, 2).flatten(0, 1)), q.flatten(0, 1), keys,
            [rows * b for b in range(len(kv))], kv, scale=number(a["softmax_scale"], 576**-0.5),
            causal=bool(a["causal"]), sinks=a.get("attn_sink"), natural=True, sinks_in_lse=False, no_keys=math.inf,
        )  # fmt: skip

    return Case("flash_mla_with_kvcache", args, lambda a: flash_mla.flash_mla_with_kvcache(**a), check)


# Appends


def append_latents(rng: random.Random) -> Case:
    p = batch(rng, queries=0)
    dtype = rng.choice((torch.float32, torch.bfloat16))
    page_size = rng.choice(PAGE_SIZES)
    counts = [-(-n // page_size) for n in p.kv_lens]
    num_pages = sum(counts) + 2
    at = [(b, i) for b, n in enumerate(p.kv_lens) for i in range(max(0, n - rng.choice((0, 1, 6))), n)]
    args: Args = {
        "append_ckv": restrided(rng, torch.randn(len(at), 512).to(dtype)),
        "append_kpe": restrided(rng, torch.randn(len(at), 64).to(dtype)),
        "batch_indices": numbers_of(rng, [b for b, _ in at]), "positions": numbers_of(rng, [i for _, i in at]),
        "ckv_cache": poisoned((num_pages, page_size, 512), dtype, "cpu"),
        "kpe_cache": poisoned((num_pages, page_size, 128), dtype, "cpu")[..., :64],
        "kv_indices": numbers_of(rng, rng.sample(range(num_pages), sum(counts))),
        "kv_indptr": numbers_of(rng, oracle.indptr_of(counts)),
        "kv_last_page_len": numbers_of(rng, [(n - 1) % page_size + 1 if n else 0 for n in p.kv_lens]),
    }  # fmt: skip

    def invoke(a: Args) -> Results:
        quire.append_paged_mla_kv_cache(**a)
        return a["ckv_cache"], a["kpe_cache"]

    def check(a: Args, results: Results) -> None:
        batch_idx, at = integers(a["batch_indices"]), integers(a["positions"])
        indptr, indices = offsets(a["kv_indptr"]), integers(a["kv_indices"])
        require(len(batch_idx) == len(at) == a["append_ckv"].shape[0] == a["append_kpe"].shape[0], "other tokens")
        require(len(indices) >= indptr[-1], "page numbers that are missing")
        size = a["ckv_cache"].shape[1]
        for new, old, got in zip(
            (a["append_ckv"], a["append_kpe"]), (a["ckv_cache"], a["kpe_cache"]), results, strict=True
        ):
            require(old.dim() == 3 and new.dtype is old.dtype and old.shape[1] == size, "caches that do not match")
            want, places = old.clone(), []
            for i, (b, position) in enumerate(zip(batch_idx, at, strict=True)):
                if 0 <= b < len(indptr) - 1 and 0 <= position < (indptr[b + 1] - indptr[b]) * size:
                    page = indices[indptr[b] + position // size]
                    require(0 <= page < old.shape[0], "pages that do not exist")
                    want[page, position % size] = new[i]
                    places.append((page, position % size))
            for page, i in {place for place in places if places.count(place) > 1}:  # any of the tokens that go there
                want[page, i] = got[page, i]
            assert torch.equal(got.float().nan_to_num(7.0), want.float().nan_to_num(7.0)), "another cache"

    return Case("append_paged_mla_kv_cache", args, invoke, check, frozenset({"ckv_cache", "kpe_cache"}))


KINDS = {"auto": None, "fp8": E4M3, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "fp8_ds_mla": torch.uint8}


def concat_latents(rng: random.Random) -> Case:
    """concat_and_cache_mla() and concat_and_cache_mla_rope_fused()."""
    kind, turns = rng.choice(list(KINDS)), rng.random() < 0.5
    dtype = torch.bfloat16 if kind == "fp8_ds_mla" else rng.choice((torch.float32, torch.bfloat16, torch.float16))
    nnz, page_size, num_pages = rng.choice((0, 1, 7, 20)), rng.choice((1, 7, 16)), 24
    slots = rng.sample(range(page_size * num_pages), nnz)
    slots = [-1 if rng.random() < 0.2 else slot for slot in slots]
    width = BYTES if kind == "fp8_ds_mla" else 576
    cache = torch.full((num_pages, page_size, width), 3.0).to(KINDS[kind] or dtype)
    args: Args = {
        "kv_c": restrided(rng, torch.randn(nnz, 512).to(dtype) * rng.choice((1, 30))),
        "k_pe": restrided(rng, torch.randn(nnz, 64).to(dtype)), "kv_cache": cache,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64), "kv_cache_dtype": kind,
        "scale": torch.tensor([rng.choice((1.0, 0.25))]),
    }  # fmt: skip
    if turns:
        angles = torch.arange(50)[:, None] * 1e4 ** (-torch.arange(32) / 32)
        args |= {
            "positions": torch.tensor([rng.randrange(50) for _ in range(nnz)], dtype=torch.int64),
            "q_pe": torch.randn(nnz, rng.choice((1, 5)), 64).to(dtype), "is_neox": rng.random() < 0.5,
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1),
        }  # fmt: skip

    def invoke(a: Args) -> Results:
        if not turns:
            names = ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale")
            quire.mla.concat_and_cache_mla(*(a[n] for n in names))
            return (a["kv_cache"],)
        names = ("positions", "q_pe", "k_pe", "kv_c", "cos_sin_cache", "is_neox", "slot_mapping", "kv_cache")
        quire.mla.concat_and_cache_mla_rope_fused(*(a[n] for n in names), a["kv_cache_dtype"], a["scale"])
        return a["kv_cache"], a["q_pe"], a["k_pe"]

    def check(a: Args, results: Results) -> None:
        k_pe, keys = a["k_pe"], a["k_pe"]
        if turns:
            require(isinstance(a["is_neox"], bool), "a flag that is none")
            at = a["positions"].long()
            require(at.dim() == 1 and bool(((at >= 0) & (at < a["cos_sin_cache"].shape[0])).all()), "no positions")
            cos, sin = a["cos_sin_cache"][at].double().chunk(2, 1)
            for x, got in ((a["q_pe"], results[1]), (k_pe[:, None], results[2][:, None])):
                both = (oracle.rotate(x, cos, sin, not a["is_neox"], t) for t in (torch.float64, x.dtype))
                oracle.assert_close(got, *both)
            keys = results[2]
        _check_rows(a, results[0], torch.cat((a["kv_c"], keys), 1))

    name = "concat_and_cache_mla" + "_rope_fused" * turns
    return Case(name, args, invoke, check, frozenset({"kv_cache", "q_pe", "k_pe"} if turns else {"kv_cache"}))


def _check_rows(a: Args, got: Tensor, tokens: Tensor) -> None:
    """The rows of the cache after the call; `tokens` are what was to be written."""
    slots, kind = a["slot_mapping"].tolist(), a["kv_cache_dtype"]
    require(isinstance(kind, str) and kind in KINDS, "a format of no name")
    require(len(slots) <= tokens.shape[0], "more slots than tokens")
    want = a["kv_cache"].clone().flatten(0, 1)
    used = [(i, slot) for i, slot in enumerate(slots) if slot >= 0]
    require(all(slot < want.shape[0] for _, slot in used), "rows that do not exist")
    rows = packed(tokens) if kind == "fp8_ds_mla" else tokens
    if kind not in ("auto", "fp8_ds_mla"):
        eight_bits, scale = KINDS[kind], number(a["scale"])
        largest = torch.finfo(eight_bits).max
        rows = (tokens.float() / torch.tensor(scale)).clamp(-largest, largest).to(eight_bits)
        want, got = want.view(eight_bits), got.view(eight_bits)
    twice = {slot for i, slot in used for j, other in used if slot == other and i != j}
    final = got.flatten(0, 1)
    for i, slot in used:
        want[slot] = final[slot] if slot in twice else rows[i]
    assert final.dtype is want.dtype
    if kind == "auto":
        assert torch.equal(final, want), "another cache"
    elif kind == "fp8_ds_mla":
        assert torch.equal(final, want), "other rows"
    else:
        error, info = (final.double() - want.double()).abs(), torch.finfo(want.dtype)
        assert bool((error <= info.eps * (want.double().abs() + info.smallest_normal)).all()), "other numbers of 8 bits"


CASES: tuple[Any, ...] = (
    mla_wrapper, mla_wrapper, table_mla, table_mla, value_xqa_mla, sparse_mla, sparse_mla, dense_flash_mla,
    append_latents, concat_latents,
)  # fmt: skip
