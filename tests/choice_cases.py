"""Random valid calls that choose keys, rotate, quantise or merge ranks, for fuzz_values.py, and their truth."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import oracle
import quire
import quire.distributed
from fuzz_calls import (
    Args,
    Case,
    Kept,
    Results,
    as_results,
    cache_of,
    given,
    integers,
    number,
    offsets,
    paged_tokens,
    require,
    whole,
    workspace,
)
from problems import Problem, poisoned
from value_cases import (
    COMBINATIONS,
    E4M3,
    E5M2,
    SAME,
    batch,
    cache_args,
    check_values,
    numbers_of,
    pages_of,
    restrided,
    sinks,
    table_args,
    tokens_of,
)

# Blocks


def _blocks(rng: random.Random, length: int, size: int) -> list[int]:
    return [min(size, length - at) for at in range(0, length, size)]


def block_sparse(rng: random.Random) -> Case:
    dtype, _, dim, _ = rng.choice(SAME)
    rows, keys = rng.choice((1, 6, 33, 70)), rng.choice((1, 30, 77, 160))
    height, width = rng.choice((1, 5, 16, 32)), rng.choice((1, 7, 8, 32))
    kv_heads = rng.choice((1, 2))
    p = Problem([rows], [keys], kv_heads * rng.choice((1, 3)), kv_heads, dim, dtype=dtype, seed=rng.randrange(2**31))
    heights, widths = _blocks(rng, rows, height), _blocks(rng, keys, width)
    listed = [rng.sample(range(len(widths)), rng.randint(0, min(4, len(widths)))) for _ in heights]
    indices = [i for row in listed for i in row]
    args: Args = {
        "float_workspace_buffer": workspace(), "indptr": numbers_of(rng, oracle.indptr_of([len(r) for r in listed])),
        "indices": numbers_of(rng, indices), "M": rows, "N": keys, "R": height, "C": width,
        "num_qo_heads": p.num_qo_heads, "num_kv_heads": kv_heads, "head_dim": dim, "q_data_type": dtype,
        "sm_scale": rng.choice((None, 0.2)), "q": restrided(rng, p.q), "k": restrided(rng, p.k),
        "v": restrided(rng, p.v), "return_lse": rng.random() < 0.6,
    }  # fmt: skip
    if rng.random() < 0.4:
        args["mask"] = torch.rand(len(indices), height, width) < 0.5
    if rng.random() < 0.4:
        args["out"] = poisoned(p.q.shape, dtype, "cpu")
    plan = ("M", "N", "R", "C", "num_qo_heads", "num_kv_heads", "head_dim", "q_data_type", "sm_scale", "mask")
    wrapper = Kept(lambda a: quire.BlockSparseAttentionWrapper(a["float_workspace_buffer"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(a["indptr"], a["indices"], **given(a, *plan))
        return as_results(w.run(a["q"], a["k"], a["v"], **given(a, "out", "return_lse")))

    def check(a: Args, results: Results) -> None:
        rows, keys, height, width = (whole(a[n]) for n in "MNRC")
        require(min(height, width) > 0, "blocks of no size")
        heights, widths = _blocks(rng, rows, height), _blocks(rng, keys, width)
        ends, columns = offsets(a["indptr"]), integers(a["indices"])
        require(len(ends) == len(heights) + 1 and ends[-1] <= len(columns), "rows of blocks that are missing")
        require(all(0 <= i < len(widths) for i in columns[: ends[-1]]), "blocks that do not exist")
        require(a.get("mask") is None or a["mask"].shape == (len(columns), height, width), "a mask of other blocks")
        q, k, v = a["q"], a["k"], a["v"]
        require(q.shape[0] == rows and k.shape[0] == v.shape[0] == keys, "tensors of other lengths")
        parts, masks, lens = ([], []), [torch.zeros(0, dtype=torch.bool)], []
        for row, n in enumerate(heights):  # a request for each row of blocks: a block listed twice counts twice
            own = [(i, c) for i, c in enumerate(columns) if ends[row] <= i < ends[row + 1]]
            at = [c * width + j for _, c in own for j in range(widths[c])]
            for out, t in zip(parts, (k, v), strict=True):
                out.append(t[torch.tensor(at, dtype=torch.int64)])
            seen = [
                a["mask"][i, :n, : widths[c]] if a.get("mask") is not None else torch.ones(n, widths[c]) for i, c in own
            ]
            masks.append(torch.cat([torch.zeros(n, 0), *(s.float() for s in seen)], 1).bool().flatten())
            lens.append(len(at))
        k, v = (torch.cat([t[:0], *part]) for t, part in zip((k, v), parts, strict=True))
        qo, kv = oracle.indptr_of(heights), oracle.indptr_of(lens)
        check_values(results, q, k, v, qo, kv, mask=torch.cat(masks), sm_scale=a["sm_scale"])

    return Case("BlockSparseAttentionWrapper", args, invoke, check, frozenset({"out", "float_workspace_buffer"}))


def variable_blocks(rng: random.Random) -> Case:
    dtype, _, dim, _ = rng.choice(SAME)
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 3))
    rows, keys = rng.choice((6, 33, 128)), rng.choice((30, 77, 160))

    def cut(length: int, count: int) -> list[list[int]]:
        inner = [sorted(rng.randint(0, length) for _ in range(count - 1)) for _ in range(kv_heads)]
        return [oracle.lengths([0, *ends, length]) for ends in inner]

    heights, widths = cut(rows, rng.choice((1, 3))), cut(keys, rng.choice((1, 4)))
    args: Args = {
        "float_workspace_buffer": workspace(), "num_qo_heads": kv_heads * group, "num_kv_heads": kv_heads,
        "block_mask_map": torch.rand(kv_heads, len(heights[0]), len(widths[0])) < 0.6, "head_dim": dim,
        "block_row_sz": torch.tensor(heights, dtype=torch.int32), "q_data_type": dtype,
        "block_col_sz": torch.tensor(widths, dtype=torch.int32), "sm_scale": rng.choice((None, 0.2)),
        "q": restrided(rng, torch.randn(kv_heads * group, rows, dim).to(dtype)),
        **{n: restrided(rng, torch.randn(kv_heads, keys, dim).to(dtype)) for n in ("k", "v")},
        "return_lse": rng.random() < 0.6,
    }  # fmt: skip
    plan = ("num_qo_heads", "num_kv_heads", "head_dim", "q_data_type", "sm_scale")
    wrapper = Kept(lambda a: quire.VariableBlockSparseAttentionWrapper(a["float_workspace_buffer"]))

    def invoke(a: Args) -> Results:
        w = wrapper(a)
        w.plan(a["block_mask_map"], a["block_row_sz"], a["block_col_sz"], **given(a, *plan))
        return as_results(w.run(a["q"], a["k"], a["v"], return_lse=a["return_lse"]))

    def check(a: Args, results: Results) -> None:
        q, k, v = a["q"], a["k"], a["v"]
        shown, rows, columns = a["block_mask_map"], a["block_row_sz"], a["block_col_sz"]
        require(shown.dim() == 3 and rows.shape == shown.shape[:2], "blocks that do not match")
        require(columns.shape == (shown.shape[0], shown.shape[2]), "blocks that do not match")
        require(q.dim() == k.dim() == v.dim() == 3 and k.shape[0] == v.shape[0] == shown.shape[0], "other heads")
        require(q.shape[0] % k.shape[0] == 0 and q.shape[2] == k.shape[2], "other heads")
        require(bool((rows >= 0).all() & (columns >= 0).all()), "blocks of negative size")
        require(bool((rows.sum(1) == q.shape[1]).all() & (columns.sum(1) == k.shape[1]).all()), "blocks of another sum")
        group = q.shape[0] // k.shape[0]
        for h in range(k.shape[0]):
            seen = shown[h].bool().repeat_interleave(rows[h].long(), 0).repeat_interleave(columns[h].long(), 1)
            own = slice(h * group, (h + 1) * group)
            part = tuple(r[own].transpose(0, 1) for r in results)
            tensors = q[own].transpose(0, 1), k[h][:, None], v[h][:, None]
            ends = [0, q.shape[1]], [0, k.shape[1]]
            check_values(part, *tensors, *ends, mask=seen.flatten(), sm_scale=a["sm_scale"])

    return Case("VariableBlockSparseAttentionWrapper", args, invoke, check, frozenset({"float_workspace_buffer"}))


# Selection


def key_bounds(rng: random.Random) -> Case:
    p = batch(rng, queries=0, combinations=[c for c in COMBINATIONS if c[2] == c[3]])
    layout = rng.choice(("NHD", "HND"))
    paged = pages_of(rng, p, layout)
    args: Args = {"kv_layout": layout}
    args |= {"cache": paged.kv} if isinstance(paged.kv, Tensor) else {"k_cache": paged.kv[0], "v_cache": paged.kv[1]}

    def invoke(a: Args) -> Results:
        return (quire.page_key_bounds(cache_of(a), a["kv_layout"]),)

    def check(a: Args, results: Results) -> None:
        keys = a["cache"][:, 0] if "cache" in a else a["k_cache"]
        keys = keys.detach().resolve_neg()
        require(keys.dim() == 4, "a cache of other dimensions")
        token = 1 if a["kv_layout"] == "NHD" else 2
        want = torch.stack((keys.double().amin(token), keys.double().amax(token)), 2)
        assert torch.equal(results[0].double().nan_to_num(7.0), want.nan_to_num(7.0)), "other bounds"

    return Case("page_key_bounds", args, invoke, check)


def pages_selected(rng: random.Random) -> Case:
    """select_pages()."""
    p = batch(rng, queries=1, combinations=SAME)
    tables = table_args(rng, p, "NHD")
    keys, page_size = tables["k_cache"], tables["k_cache"].shape[1]
    low_high = (keys.float().nan_to_num(9.0).amin(1), keys.float().nan_to_num(-9.0).amax(1))
    args: Args = {
        "q": restrided(rng, p.q), "bounds": torch.stack(low_high, 2).to(p.dtype), "seq_lens": tables["seq_lens"],
        "block_tables": tables["block_tables"], "page_size": page_size, "top_k": rng.choice((1, 2, 5, 40)),
    }  # fmt: skip

    def check(a: Args, results: Results) -> None:
        table, lens, bounds = a["block_tables"], integers(a["seq_lens"]), a["bounds"].double()
        q, size, top_k = a["q"].detach().resolve_neg().double(), whole(a["page_size"]), whole(a["top_k"])
        require(table.dim() == 2 and table.shape[0] == len(lens) == q.shape[0], "a table of another batch")
        counts = [-(-n // size) for n in lens]
        require(all(0 <= c <= table.shape[1] for c in counts), "pages that are missing")
        heads, group = bounds.shape[1], q.shape[1] // bounds.shape[1]
        require(q.shape[1] == heads * group > 0 and q.shape[2] == bounds.shape[3], "heads that do not match")
        chosen, seen = results
        assert chosen.shape == (len(lens), heads, min(top_k, table.shape[1])), f"tables {list(chosen.shape)}"
        for b, count in enumerate(counts):
            own = table[b, :count].tolist()
            require(all(0 <= i < bounds.shape[0] for i in own), "pages that do not exist")
            for h in range(heads):
                rows = q[b, h * group : (h + 1) * group, None]
                products = torch.stack([rows * bounds[own, h, i] for i in (0, 1)])
                scores = products.amax(0).sum(2).amax(0)[: max(0, count - 1)] if count else torch.zeros(0)
                self_check = chosen[b, h, : min(top_k, count)].tolist()
                _check_choice(self_check, own, scores, top_k)
                last = lens[b] - (count - 1) * size if count else 0
                want = max(0, min(top_k, count) - 1) * size + last
                assert int(seen[b, h]) == want, f"{int(seen[b, h])} tokens, expected {want}"

    return Case("select_pages", args, lambda a: tuple(quire.select_pages(**a)), check)


def _check_choice(got: Sequence[int], own: Sequence[int], scores: Tensor, top_k: int) -> None:
    """The last page, and before it those with the largest scores, in the order of the request; near ties are free."""
    count = len(own)
    if not count:
        return
    assert got[-1] == own[-1], "not the last page last"
    if len(set(own)) < count:
        return
    places = [own.index(i) for i in got[:-1]] if set(got) <= set(own) else [-1]
    assert places == sorted(set(places)) and -1 not in places and count - 1 not in places, f"pages {got} of {own}"
    if places and len(places) < count - 1:
        rest = [i for i in range(count - 1) if i not in places]
        worst, best = float(scores[places].min()), float(scores[rest].max())
        assert worst >= best - 1e-4 * max(1.0, abs(best)), f"a page of {worst} and not that of {best}"


def decode_selected(rng: random.Random) -> Case:
    p = batch(rng, queries=1, combinations=[c for c in COMBINATIONS if c[2] == c[3]])
    layout = rng.choice(("NHD", "HND"))
    paged = pages_of(rng, p, layout, forms=("tuple", "tensor"))
    size, counts = paged.page_size, oracle.lengths(paged.indptr)
    width = rng.choice((1, 3, 8))
    tables = torch.full((len(p.qo_lens), p.num_kv_heads, width), 2**30, dtype=torch.int32)
    lens = torch.zeros(tables.shape[:2], dtype=torch.int32)
    for b, (begin, count) in enumerate(zip(paged.indptr.tolist(), counts, strict=False)):
        for h in range(p.num_kv_heads):
            n = min(width, count)
            picks = [*sorted(rng.sample(range(count - 1), n - 1)), count - 1] if n else []
            tables[b, h, :n] = paged.indices[begin:][torch.tensor(picks, dtype=torch.int64)]
            lens[b, h] = max(0, n - 1) * size + (int(paged.last_page_len[b]) if n else 0)
    args: Args = {
        "q": restrided(rng, p.q), "workspace_buffer": workspace(), "pages": tables, "lens": lens, "kv_layout": layout,
        "sm_scale": rng.choice((None, 0.2)), "return_lse": rng.random() < 0.6, "k_scale": rng.choice((None, 2.0)),
        "v_scale": rng.choice((None, 0.5)),
    }  # fmt: skip
    args |= {"cache": paged.kv} if isinstance(paged.kv, Tensor) else {"k_cache": paged.kv[0], "v_cache": paged.kv[1]}
    if rng.random() < 0.4:
        args["out"] = poisoned(p.q.shape, p.dtype, "cpu")

    def invoke(a: Args) -> Results:
        names = ("sm_scale", "kv_layout", "out", "return_lse", "k_scale", "v_scale")
        selected = quire.SelectedPages(a["pages"], a["lens"])
        run = quire.batch_decode_with_selected_pages
        return as_results(run(a["q"], cache_of(a), a["workspace_buffer"], selected, **given(a, *names)))

    def check(a: Args, results: Results) -> None:
        pages, lens, q = a["pages"], a["lens"], a["q"]
        k_cache, v_cache = a["cache"].unbind(1) if "cache" in a else (a["k_cache"], a["v_cache"])
        token = 1 if a["kv_layout"] == "NHD" else 2
        require(pages.dim() == 3 and lens.shape == pages.shape[:2] and q.shape[0] == len(lens), "a table of others")
        heads, size = k_cache.shape[3 - token], k_cache.shape[token]
        require(lens.shape[1] == heads and q.shape[1] % heads == 0, "heads that do not match")
        group = q.shape[1] // heads
        for h in range(heads):
            own_lens = lens[:, h].tolist()
            counts = [-(-n // size) for n in own_lens]
            require(all(0 <= c <= pages.shape[2] for c in counts), "pages that are missing")
            one = (t.select(3 - token, h).unsqueeze(2) for t in (k_cache, v_cache))
            tables = {
                "kv_indptr": oracle.indptr_of(counts), **dict(zip(("k_cache", "v_cache"), one, strict=True)),
                "kv_indices": [int(i) for row, c in zip(pages[:, h].tolist(), counts, strict=True) for i in row[:c]],
                "kv_last_page_len": [(n - 1) % size + 1 if n else 0 for n in own_lens],
            }  # fmt: skip
            k, v, kv = paged_tokens(tables, size, "NHD")
            mine = slice(h * group, (h + 1) * group)
            check_values(
                tuple(r[:, mine] for r in results), q[:, mine], k, v, list(range(len(kv))), kv, sm_scale=a["sm_scale"],
                logits_scale=number(a["k_scale"]), v_scale=a["v_scale"],
            )  # fmt: skip

    return Case("batch_decode_with_selected_pages", args, invoke, check, frozenset({"out", "workspace_buffer"}))


def tokens_selected(rng: random.Random) -> Case:
    rows, count, page_size = rng.choice((0, 1, 4)), rng.choice((1, 7, 100)), rng.choice((1, 4))
    scores = torch.randn(rows, count)
    if rng.random() < 0.4:
        scores = scores.round()
    scores[torch.rand(rows, count) < 0.1] = rng.choice((math.nan, -math.inf, math.inf, -0.0))
    args: Args = {
        "scores": restrided(rng, scores.to(rng.choice((torch.float32, torch.bfloat16, torch.float16)))),
        "top_k": rng.choice((1, 3, 64, 200)), "lens": None, "page_size": page_size,
    }  # fmt: skip
    if rng.random() < 0.6:
        args["lens"] = numbers_of(rng, [rng.randint(0, count) for _ in range(rows)])
    if rng.random() < 0.6:
        args["block_tables"] = torch.randint(0, 1000, (rows, -(-count // page_size)), dtype=torch.int32)

    def check(a: Args, results: Results) -> None:
        scores, top_k, size = a["scores"].detach().resolve_neg().double(), whole(a["top_k"]), whole(a["page_size"])
        ends = [scores.shape[1]] * scores.shape[0] if a["lens"] is None else integers(a["lens"])
        require(len(ends) == scores.shape[0], "lengths of other rows")
        table = a.get("block_tables")
        for row, n in enumerate(ends):
            known = scores[row, : max(0, n)].nan_to_num(-math.inf, math.inf, -math.inf).tolist()
            best = sorted(sorted(range(len(known)), key=lambda i: (-known[i], i))[:top_k])
            if table is not None:
                require(table.dim() == 2 and table.shape[0] == len(ends), "a table of other rows")
                best = [int(table[row, i // size]) * size + i % size for i in best]
            best += [-1] * (top_k - len(best))
            if all(-(2**31) <= i < 2**31 for i in best):
                assert results[0][row].tolist() == best, f"{results[0][row].tolist()[:9]}, expected {best[:9]}"

    return Case("select_tokens", args, lambda a: (quire.select_tokens(**a),), check)


# Rotation


def _rotated_tokens(rng: random.Random) -> tuple[int, torch.dtype, Args]:
    nnz, dtype = rng.choice((0, 1, 3, 19)), rng.choice((torch.float32, torch.bfloat16, torch.float16))
    dim = rng.choice((64, 64, 128))
    names = {n: restrided(rng, torch.randn(nnz, rng.choice((1, 2, 5)), dim).to(dtype)) for n in ("q", "k")}
    options = {
        "rotary_dim": rng.choice((None, dim // 2)), "interleave": rng.random() < 0.5,
        "rope_scale": rng.choice((1.0, 8.0)), "rope_theta": rng.choice((1e4, 5e5)),
    }  # fmt: skip
    return nnz, dtype, {**names, **options}


def other_ropes(rng: random.Random) -> Case:
    """apply_llama31_rope() and the functions of requests that write in place."""
    is_llama31, in_place = rng.choice(((True, False), (True, True), (False, True)))
    nnz, _, args = _rotated_tokens(rng)
    cuts = sorted(rng.randint(0, nnz) for _ in range(rng.choice((0, 2))))
    ends = [0, *cuts, nnz]
    args |= {
        "indptr": numbers_of(rng, ends),
        "offsets": numbers_of(rng, [rng.choice((0, 9, 131072)) for _ in ends[1:]]),
    }
    if is_llama31:
        args |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
    name = f"apply_{'llama31_' * is_llama31}rope{'_inplace' * in_place}"

    def invoke(a: Args) -> Results:
        result = getattr(quire, name)(**a)
        return (a["q"], a["k"]) if in_place else result

    def check(a: Args, results: Results) -> None:
        ends, starts = offsets(a["indptr"]), integers(a["offsets"])
        require(len(starts) == len(ends) - 1 and ends[-1] == a["q"].shape[0] == a["k"].shape[0], "other tokens")
        at = [start + i for start, n in zip(starts, oracle.lengths(ends), strict=True) for i in range(n)]
        dim = a["q"].shape[2] if a["rotary_dim"] is None else whole(a["rotary_dim"])
        names = ("low_freq_factor", "high_freq_factor", "old_context_len")
        factors = tuple(number(a[n]) for n in names) if is_llama31 else None
        require(factors is None or (factors[0] < factors[1] and factors[2] > 0), "factors that are none")
        require(a["k"].shape[2] == a["q"].shape[2] and 0 < dim <= a["q"].shape[2] and dim % 2 == 0, "other dims")
        require(isinstance(a["interleave"], bool), "a flag that is none")
        scale, theta = number(a["rope_scale"]), number(a["rope_theta"])
        require(scale > 0 and theta > 0, "no such angles")
        angles = oracle.rope_angles(torch.tensor(at, dtype=torch.int64), dim, scale, theta, factors)
        for x, got in zip((a["q"], a["k"]), results, strict=True):
            _check_turned(got, x, angles.cos(), angles.sin(), a["interleave"])

    return Case(name, args, invoke, check, frozenset({"q", "k"} if in_place else ()))


def _check_turned(got: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> None:
    plain = x.detach().resolve_neg()
    both = (oracle.rotate(plain, cos, sin, interleave, t) for t in (torch.float64, x.dtype))
    oracle.assert_close(got, *both)


def rope_table_in_place(rng: random.Random) -> Case:
    nnz, dim, dtype = rng.choice((0, 1, 9)), rng.choice((64, 32)), rng.choice((torch.float32, torch.bfloat16))
    args: Args = {
        "positions": numbers_of(rng, [rng.randrange(10) for _ in range(nnz)]), "head_size": 64,
        "query": torch.randn(nnz, 64 * rng.choice((1, 4))).to(dtype), "key": torch.randn(nnz, 64).to(dtype),
        "cos_sin_cache": torch.randn(10, dim), "is_neox": rng.random() < 0.5,
    }  # fmt: skip

    def invoke(a: Args) -> Results:
        quire.apply_rope_with_cos_sin_cache_inplace(**a)
        return a["query"], a["key"]

    def check(a: Args, results: Results) -> None:
        at, size = integers(a["positions"]), whole(a["head_size"])
        require(all(0 <= i < a["cos_sin_cache"].shape[0] for i in at), "positions beyond the table")
        require(isinstance(a["is_neox"], bool) and size > 0, "a flag that is none")
        cos, sin = a["cos_sin_cache"].double().chunk(2, 1)
        rows = torch.tensor(at, dtype=torch.int64)
        for x, got in zip((a["query"], a["key"]), results, strict=True):
            require(x.numel() % size == 0 and x.shape[0] == len(at), "heads of another size")
            heads = (t.reshape(len(at), x.numel() // max(1, len(at)) // size, size) for t in (got, x))
            _check_turned(*heads, cos[rows], sin[rows], not a["is_neox"])

    return Case("apply_rope_with_cos_sin_cache_inplace", args, invoke, check, frozenset({"query", "key"}))


def rope_quantized(rng: random.Random) -> Case:
    """rope_quantize_fp8() and mla_rope_quantize_fp8()."""
    is_mla, nnz, dim, rest = rng.random() < 0.5, rng.choice((0, 1, 19)), rng.choice((32, 64)), rng.choice((0, 20, 96))
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
    heads, kv_heads = rng.choice((1, 4, 8)), rng.choice((1, 2))
    angles = torch.arange(300)[:, None] * 1e4 ** (-torch.arange(dim // 2) / (dim // 2))
    k_shape = (nnz,) if is_mla else (nnz, kv_heads)

    def draw(shape: Sequence[int], width: int) -> Tensor | None:
        return restrided(rng, torch.randn(*shape, width).to(dtype) * rng.choice((1, 100))) if width else None

    args: Args = {
        "q_rope": draw((nnz, heads), dim), "k_rope": draw(k_shape, dim), "q_nope": draw((nnz, heads), rest),
        "k_nope": draw(k_shape, rest), "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1),
        "pos_ids": torch.tensor([rng.randrange(300) for _ in range(nnz)], dtype=torch.int64),
        "is_neox": rng.random() < 0.5, "quantize_dtype": rng.choice((None, E4M3, E5M2)),
        "quant_scale_q": rng.choice((1.0, 2.0)), "quant_scale_kv": rng.choice((1.0, 0.5)),
    }  # fmt: skip
    name = f"{'mla_' * is_mla}rope_quantize_fp8"

    def check(a: Args, results: Results) -> None:
        at = a["pos_ids"].long()
        require(at.dim() == 1 and bool(((at >= 0) & (at < a["cos_sin_cache"].shape[0])).all()), "no positions")
        require(isinstance(a["is_neox"], bool), "a flag that is none")
        cos, sin = a["cos_sin_cache"].double()[at].chunk(2, 1)
        wanted = a["quantize_dtype"] or E4M3
        parts = (a["q_rope"], a["k_rope"], a["q_nope"], a["k_nope"])
        for i, (x, got) in enumerate(zip(parts, results, strict=True)):
            if x is None or not x.shape[-1]:
                assert not got.numel()
                continue
            plain = x.detach().resolve_neg().double()
            rows = plain if x.dim() == 3 else plain[:, None]
            exact = oracle.rotate(rows, cos, sin, not a["is_neox"]) if i < 2 else rows
            scale = number(a["quant_scale_kv" if i % 2 else "quant_scale_q"])
            assert got.dtype is wanted, f"{got.dtype}"
            _check_rounded(got, exact.reshape(x.shape) * scale, plain.abs().amax() * abs(scale) if x.numel() else 0.0)

    return Case(name, args, lambda a: getattr(quire, name)(**a), check)


def _check_rounded(got: Tensor, exact: Tensor, largest: Any) -> None:
    """8-bit numbers next to the truth, up to an error of float32 in products of numbers as large as `largest`."""
    info = torch.finfo(got.dtype)
    want = exact.clamp(info.min, info.max)
    error = (got.double() - want).abs()
    allowed = want.abs() * info.eps / 2 * 1.001 + info.smallest_normal * info.eps / 2 + float(largest) * 1e-6
    assert bool((error <= allowed).all()), f"8 bits are off by up to {float((error - allowed).max()):.3g}"


def rope_quantized_append(rng: random.Random) -> Case:
    """rope_quantize_fp8_append_paged_kv_cache() with a cache of keys and values."""
    layout, dim, rest = rng.choice(("NHD", "HND")), 32, rng.choice((0, 96))
    p = Problem([1], [1], 4, rng.choice((1, 2)), dim + rest)
    page_size, kv_lens = rng.choice((1, 4, 16)), [rng.choice((0, 1, 9, 30)) for _ in range(rng.choice((1, 3)))]
    counts = [-(-n // page_size) for n in kv_lens]
    at = [(b, i) for b, n in enumerate(kv_lens) for i in range(max(0, n - rng.choice((0, 1, 6))), n)]
    nnz, num_pages, dtype = len(at), sum(counts) + 2, rng.choice((torch.float32, torch.bfloat16))
    quantize = rng.choice((E4M3, E5M2))
    shape = (num_pages, page_size, p.num_kv_heads, dim + rest)
    shape = shape if layout == "NHD" else (shape[0], shape[2], shape[1], shape[3])
    angles = torch.arange(300)[:, None] * 1e4 ** (-torch.arange(dim // 2) / (dim // 2))

    def draw(heads: int, width: int) -> Tensor | None:
        return restrided(rng, torch.randn(nnz, heads, width).to(dtype)) if width else None

    args: Args = {
        "q_rope": draw(4, dim), "k_rope": draw(p.num_kv_heads, dim), "q_nope": draw(4, rest),
        "k_nope": draw(p.num_kv_heads, rest), "v": draw(p.num_kv_heads, dim + rest),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1),
        "pos_ids": torch.tensor([rng.randrange(300) for _ in at], dtype=torch.int64),
        "k_cache": poisoned(shape, quantize, "cpu"), "v_cache": poisoned(shape, quantize, "cpu"),
        "kv_indices": numbers_of(rng, rng.sample(range(num_pages), sum(counts))),
        "kv_indptr": numbers_of(rng, oracle.indptr_of(counts)), "batch_indices": numbers_of(rng, [b for b, _ in at]),
        "positions": numbers_of(rng, [i for _, i in at]), "is_neox": rng.random() < 0.5,
        "quant_scale_q": rng.choice((1.0, 2.0)), "quant_scale_kv": rng.choice((1.0, 0.5)), "page_size": page_size,
        "kv_layout": layout,
    }  # fmt: skip

    def invoke(a: Args) -> Results:
        rest = {n: value for n, value in a.items() if n not in ("k_cache", "v_cache")}
        results = quire.rope_quantize_fp8_append_paged_kv_cache(paged_kv_cache=(a["k_cache"], a["v_cache"]), **rest)
        return (*results, a["k_cache"], a["v_cache"])

    def check(a: Args, results: Results) -> None:
        at, batch_idx, positions = a["pos_ids"].long(), integers(a["batch_indices"]), integers(a["positions"])
        require(at.dim() == 1 and bool(((at >= 0) & (at < a["cos_sin_cache"].shape[0])).all()), "no positions")
        require(isinstance(a["is_neox"], bool) and len(batch_idx) == len(positions) == len(at), "other tokens")
        cos, sin = a["cos_sin_cache"].double()[at].chunk(2, 1)
        parts = []
        for x in (a["q_rope"], a["k_rope"]):
            parts.append(oracle.rotate(x.detach().resolve_neg().double(), cos, sin, not a["is_neox"]))
        whole_k = parts[1] if a["k_nope"] is None else torch.cat((parts[1], a["k_nope"].double()), -1)
        scale_q, scale = number(a["quant_scale_q"]), number(a["quant_scale_kv"])
        _check_rounded(results[0], parts[0] * scale_q, 10.0 * abs(scale_q))
        if a["q_nope"] is not None:
            _check_rounded(results[1], a["q_nope"].detach().resolve_neg().double() * scale_q, 0.0)
        indptr, indices = offsets(a["kv_indptr"]), integers(a["kv_indices"])
        require(len(indices) >= indptr[-1], "page numbers that are missing")
        token = 1 if a["kv_layout"] == "NHD" else 2
        for new, old, got in zip((whole_k, a["v"].double()), (a["k_cache"], a["v_cache"]), results[2:], strict=True):
            size = old.shape[token]
            want, final = (t.double().transpose(1, token).clone() for t in (old, got))
            places = []
            for i, (b, position) in enumerate(zip(batch_idx, positions, strict=True)):
                if 0 <= b < len(indptr) - 1 and 0 <= position < (indptr[b + 1] - indptr[b]) * size:
                    place = indices[indptr[b] + position // size], position % size
                    require(0 <= place[0] < old.shape[0], "pages that do not exist")
                    want[place] = new[i] * scale
                    places.append(place)
            for place in {q for q in places if places.count(q) > 1}:
                want[place] = final[place]
            assert torch.equal(final.isnan(), want.isnan()), "not the tokens that were to be written"
            _check_rounded(final.nan_to_num(0.0).to(old.dtype), want.nan_to_num(0.0), 10.0 * abs(scale))

    return Case("rope_quantize_fp8_append_paged_kv_cache", args, invoke, check, frozenset({"k_cache", "v_cache"}))


def slopes(rng: random.Random) -> Case:
    args: Args = {"n_heads": rng.choice((1, 2, 3, 5, 8, 12, 40, 64, 100))}

    def invoke(a: Args) -> Results:
        n = a["n_heads"]
        if isinstance(n, int) and n > 2**24:  # a milliard of slopes takes longer than a call may
            raise quire.ValidationError("n_heads: expected fewer.")
        return (quire.get_alibi_slopes(n),)

    def check(a: Args, results: Results) -> None:
        n = whole(a["n_heads"])
        require(0 < n < 2**20, "no heads")
        assert torch.allclose(results[0].double(), oracle.alibi_slopes(n), rtol=1e-6, atol=0.0), "other slopes"

    return Case("get_alibi_slopes", args, invoke, check)


# One rank


def _one_rank() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def rank_merge(rng: random.Random) -> Case:
    natural, dim = rng.random() < 0.5, rng.choice((5, 64))
    n, dtype = rng.choice((0, 1, 7)), rng.choice((torch.float32, torch.bfloat16))
    lse = torch.randn(n, 6) * 5
    lse[torch.rand(n, 6) < 0.2] = -math.inf
    args: Args = {
        "o": restrided(rng, torch.randn(n, 6, dim).to(dtype)), "lse": lse, "natural_lse": natural,
        "exchange": rng.choice(("all_to_all", "all_gather")),
    }  # fmt: skip

    def invoke(a: Args) -> Results:
        _one_rank()
        return tuple(quire.distributed.merge_over_ranks(**a))

    def check(a: Args, results: Results) -> None:
        o, lse = a["o"].detach().resolve_neg(), a["lse"]
        require(lse.shape == o.shape[:2] and o.element_size() > 1, "states that do not match")
        want = oracle.merge_states(o[:, None], lse[:, None])
        oracle.assert_close(results[0], want.o, want.o)
        oracle.assert_lse_close(results[1], want.lse)

    return Case("merge_over_ranks", args, invoke, check)


def rank_decode(rng: random.Random) -> Case:
    p = batch(rng, queries=1, combinations=SAME, least=1)
    cache, page_size = cache_args(rng, p, "NHD")
    args: Args = {
        **cache, "float_workspace_buffer": workspace(), "seq_lens": numbers_of(rng, p.kv_lens), "page_size": page_size,
        "num_qo_heads": p.num_qo_heads, "num_kv_heads": p.num_kv_heads, "head_dim": p.head_dim, "q_data_type": p.dtype,
        "interleave_size": rng.choice((1, 5, 16)), "exchange": rng.choice(("all_to_all", "all_gather")),
        "sm_scale": rng.choice((None, 0.2)), "q": restrided(rng, p.q), **sinks(rng, p),
        "return_lse": rng.random() < 0.6,
    }  # fmt: skip
    del args["kv_last_page_len"]

    def invoke(a: Args) -> Results:
        _one_rank()
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(a["float_workspace_buffer"])
        call = quire.distributed.ContextParallelDecode(
            wrapper, interleave_size=a["interleave_size"], exchange=a["exchange"]
        )
        sizes = (a[n] for n in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"))
        call.plan(a["seq_lens"], a["kv_indptr"], a["kv_indices"], *sizes, **given(a, "q_data_type", "sm_scale"))
        return as_results(call.run(a["q"], cache_of(a), **given(a, "sinks", "return_lse")))

    def check(a: Args, results: Results) -> None:
        size, lens = whole(a["page_size"]), integers(a["seq_lens"])
        require(all(n >= 0 for n in lens), "negative lengths")
        last = [(n - 1) % size + 1 if n else 0 for n in lens]
        counts = [-(-n // size) for n in lens]
        require(oracle.lengths(offsets(a["kv_indptr"], of_a_part=True)) == counts, "pages of other lengths")
        k, v, kv = tokens_of({**a, "kv_last_page_len": last}, "NHD")
        check_values(
            results, a["q"], k, v, list(range(len(kv))), kv, sm_scale=a["sm_scale"], sinks=a.get("sinks")
        )  # fmt: skip

    return Case("ContextParallelDecode", args, invoke, check, frozenset({"float_workspace_buffer"}))


def rank_prefill(rng: random.Random) -> Case:
    p = batch(rng, combinations=SAME)
    p = Problem(p.kv_lens, p.kv_lens, p.num_qo_heads, p.num_kv_heads, p.head_dim, dtype=p.dtype, seed=p.seed)
    args: Args = {
        "float_workspace_buffer": workspace(), "page_size": rng.choice((1, 8, 128)), "num_gathers": rng.choice((1, 2)),
        "seq_lens": numbers_of(rng, p.kv_lens), "num_qo_heads": p.num_qo_heads, "num_kv_heads": p.num_kv_heads,
        "head_dim": p.head_dim, "q_data_type": p.dtype, "sm_scale": rng.choice((None, 0.2)), "q": restrided(rng, p.q),
        "k": restrided(rng, p.k), "v": restrided(rng, p.v), **sinks(rng, p), "return_lse": rng.random() < 0.6,
    }  # fmt: skip

    def invoke(a: Args) -> Results:
        _one_rank()
        call = quire.distributed.ZigzagPrefill(a["float_workspace_buffer"], **given(a, "page_size", "num_gathers"))
        sizes = (a[n] for n in ("num_qo_heads", "num_kv_heads", "head_dim"))
        call.plan(a["seq_lens"], *sizes, **given(a, "q_data_type", "sm_scale"))
        return as_results(call.run(a["q"], a["k"], a["v"], **given(a, "sinks", "return_lse")))

    def check(a: Args, results: Results) -> None:
        ends = oracle.indptr_of(integers(a["seq_lens"]))
        tensors = a["q"], a["k"], a["v"]
        check_values(results, *tensors, ends, ends, causal=True, sm_scale=a["sm_scale"], sinks=a.get("sinks"))

    return Case("ZigzagPrefill", args, invoke, check, frozenset({"float_workspace_buffer"}))


CASES: tuple[Any, ...] = (
    block_sparse, variable_blocks, key_bounds, pages_selected, decode_selected, tokens_selected, other_ropes,
    rope_table_in_place, rope_quantized, rope_quantized_append, slopes, rank_merge, rank_decode, rank_prefill,
)  # fmt: skip
