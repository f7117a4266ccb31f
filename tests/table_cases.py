"""Random valid calls of the functions with block tables, for fuzz_values.py, and their truth."""

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
    Results,
    as_results,
    given,
    integers,
    number,
    offsets,
    require,
    tabled_tokens,
    whole,
    workspace,
)
from problems import Problem, poisoned
from value_cases import (
    COMBINATIONS,
    E4M3,
    SAME,
    batch,
    check_values,
    layout_of,
    numbers_of,
    restrided,
    sinks,
    table_args,
    window,
)

# Block tables


def draft_mask(rng: random.Random, p: Problem, rows: int) -> Tensor:
    """Which new tokens each of them sees: uint16 [batch, rows, words]."""
    words = -(-rows // 32) * 2
    return torch.randint(0, 2**16, (len(p.qo_lens), rows, words)).to(torch.uint16)


def dense_draft(mask: Tensor, rows: int, kv: Sequence[int]) -> Tensor:
    """The same as flags of all keys, flat."""
    flags = [torch.zeros(0, dtype=torch.bool)]
    for bits, n in zip(mask.to(torch.int64), oracle.lengths(kv), strict=True):
        seen = torch.ones(rows, n, dtype=torch.bool)
        for i, j in itertools.product(range(rows), range(min(rows, n))):
            seen[i, n - 1 - j] = bool(bits[i, (rows - 1 - j) // 16] >> ((rows - 1 - j) % 16) & 1)
        flags.append(seen.flatten())
    return torch.cat(flags)


def table_decode(rng: random.Random) -> Case:
    """xqa_batch_decode_with_kv_cache(), trtllm_batch_decode_with_kv_cache() and cudnn_batch_decode_with_kv_cache()."""
    name = rng.choice(("xqa", "trtllm", "trtllm", "cudnn"))
    rows = rng.choice((1, 1, 1, 2, 5))
    layout = "HND" if name == "cudnn" else layout_of(rng)
    p = batch(rng, queries=rows, combinations=[c for c in COMBINATIONS if c[2] == c[3]], at_least_queries=rows > 1)
    args: Args = {
        "query": restrided(rng, p.q), **table_args(rng, p, layout), "workspace_buffer": workspace(),
        "max_seq_len": max([1, *p.kv_lens]) + rng.choice((0, 5)), "bmm1_scale": rng.choice((0.125, 0.05)),
        "bmm2_scale": rng.choice((1.0, 1.0, 2.0, 0.5)), "window_left": window(rng), "q_len_per_req": rows,
        "kv_layout": layout, **sinks(rng, p),
    }  # fmt: skip
    if rng.random() < 0.3:
        args["out"] = poisoned(p.q.shape, rng.choice((p.dtype, p.dtype, E4M3)), "cpu")
    if name == "trtllm":
        args["return_lse"] = rng.random() < 0.5
    if rows > 1 and name != "cudnn" and rng.random() < 0.4:
        args["mask"] = draft_mask(rng, p, rows)
    if name == "cudnn":
        args["return_lse"] = rng.random() < 0.5
        del args["kv_layout"], args["bmm2_scale"]

    def invoke(a: Args) -> Results:
        cache = a["k_cache"], a["v_cache"]
        if name == "cudnn":
            options = given(a, "block_tables", "window_left", "sinks", "q_len_per_req", "out", "return_lse")
            return as_results(
                quire.cudnn_batch_decode_with_kv_cache(
                    a["query"], *cache, a["bmm1_scale"], a["workspace_buffer"], max_sequence_kv=a["max_seq_len"],
                    actual_seq_lens_kv=a["seq_lens"], **options,
                )
            )  # fmt: skip
        function = quire.xqa_batch_decode_with_kv_cache if name == "xqa" else quire.trtllm_batch_decode_with_kv_cache
        rest = {n: value for n, value in a.items() if n not in ("k_cache", "v_cache")}
        return as_results(function(kv_cache=cache, **rest))

    def check(a: Args, results: Results) -> None:
        k, v, kv = tabled_tokens(a, integers(a["seq_lens"]), a["max_seq_len"], a.get("kv_layout", "HND"))
        rows = 1 if a["q_len_per_req"] is None else whole(a["q_len_per_req"])
        qo = [rows * b for b in range(len(kv))]
        mask = None if a.get("mask") is None else dense_draft(a["mask"], rows, kv)
        check_values(
            results, a["query"], k, v, qo, kv, causal=rows > 1, mask=mask, window_left=a["window_left"],
            sm_scale=number(a["bmm1_scale"]), v_scale=a.get("bmm2_scale"), sinks=a.get("sinks"),
        )  # fmt: skip

    full = "cudnn_batch_decode_with_kv_cache" if name == "cudnn" else f"{name}_batch_decode_with_kv_cache"
    return Case(full, args, invoke, check, frozenset({"out", "workspace_buffer"}))


def table_prefill(rng: random.Random) -> Case:
    """trtllm_batch_context_with_kv_cache() and cudnn_batch_prefill_with_kv_cache() over pages."""
    is_cudnn = rng.random() < 0.4
    layout = "HND" if is_cudnn else layout_of(rng)
    p = batch(rng, at_least_queries=not is_cudnn or rng.random() < 0.5)
    args: Args = {
        "query": restrided(rng, p.q), **table_args(rng, p, layout), "workspace_buffer": workspace(),
        "max_q_len": max([1, *p.qo_lens]) + rng.choice((0, 3)), "max_kv_len": max([1, *p.kv_lens]) + rng.choice((0, 3)),
        "bmm1_scale": rng.choice((0.125, 0.05)), "bmm2_scale": rng.choice((1.0, 2.0)), "batch_size": len(p.qo_lens),
        "cum_seq_lens_q": numbers_of(rng, p.qo_indptr), "cum_seq_lens_kv": numbers_of(rng, p.kv_indptr),
        "window_left": -1 if is_cudnn else window(rng), "kv_layout": layout, "causal": rng.random() < 0.7,
        "return_lse": rng.random() < 0.5, **({} if is_cudnn else sinks(rng, p)),
    }  # fmt: skip
    if is_cudnn:
        for name in ("kv_layout", "cum_seq_lens_kv", "batch_size", "window_left"):
            del args[name]
        args["seq_lens_q"] = args.pop("cum_seq_lens_q").diff()
    if rng.random() < 0.3:
        types = (p.dtype,) if is_cudnn else (p.dtype, p.dtype, E4M3)
        args["out"] = poisoned((*p.q.shape[:2], p.v.shape[2]), rng.choice(types), "cpu")

    def invoke(a: Args) -> Results:
        if not is_cudnn:
            rest = {n: value for n, value in a.items() if n not in ("k_cache", "v_cache")}
            return as_results(quire.trtllm_batch_context_with_kv_cache(kv_cache=(a["k_cache"], a["v_cache"]), **rest))
        results = quire.cudnn.cudnn_batch_prefill_with_kv_cache(
            a["query"], a["k_cache"], a["v_cache"], a["bmm1_scale"], a["workspace_buffer"],
            max_token_per_sequence=a["max_q_len"], max_sequence_kv=a["max_kv_len"], actual_seq_lens_q=a["seq_lens_q"],
            actual_seq_lens_kv=a["seq_lens"], causal=a["causal"], return_lse=a["return_lse"], v_scale=a["bmm2_scale"],
            **given(a, "block_tables", "out"),
        )  # fmt: skip
        return tuple(r for r in results if r is not None)

    def check(a: Args, results: Results) -> None:
        k, v, kv = tabled_tokens(a, integers(a["seq_lens"]), a["max_kv_len"], a.get("kv_layout", "HND"))
        qo = oracle.indptr_of(integers(a["seq_lens_q"])) if is_cudnn else offsets(a["cum_seq_lens_q"])
        require(max(oracle.lengths(qo), default=0) <= whole(a["max_q_len"]), "more queries than can be")
        if is_cudnn and len(results) > 1:
            rows = [x[:n] for x, n in zip(results[1], oracle.lengths(qo), strict=True)]
            results = (results[0], torch.cat([torch.empty(0, a["query"].shape[1]), *rows]))
        check_values(
            results, a["query"], k, v, qo, kv, causal=bool(a["causal"]), window_left=a.get("window_left", -1),
            sm_scale=number(a["bmm1_scale"]), v_scale=a["bmm2_scale"], sinks=a.get("sinks"),
        )  # fmt: skip

    name = "cudnn_batch_prefill_with_kv_cache" if is_cudnn else "trtllm_batch_context_with_kv_cache"
    return Case(name, args, invoke, check, frozenset({"out", "workspace_buffer"}))


def value_xqa(rng: random.Random) -> Case:
    rows, layout = rng.choice((1, 1, 3)), layout_of(rng)
    p = batch(rng, queries=rows, combinations=[c for c in COMBINATIONS if c[2] == c[3]], at_least_queries=rows > 1)
    tables = table_args(rng, p, layout)
    shape = (len(p.qo_lens), 1, *((rows,) if rows > 1 else ()), p.num_qo_heads, p.head_dim)
    args: Args = {
        "q": restrided(rng, p.q).reshape(shape), "k_cache": tables["k_cache"], "v_cache": tables["v_cache"],
        "page_table": tables["block_tables"], "seq_lens": tables["seq_lens"], "num_kv_heads": p.num_kv_heads,
        "page_size": tables["k_cache"].shape[1 if layout == "NHD" else 2], "q_scale": rng.choice((1.0, 0.5)),
        "kv_scale": rng.choice((None, 1.0, 2.0)), "sliding_win_size": rng.choice((0, 0, 1, 9)), "kv_layout": layout,
        "q_seq_len": rows, **sinks(rng, p),
    }  # fmt: skip
    if rng.random() < 0.4:
        args["output"] = poisoned(shape, p.dtype, "cpu")
    if rng.random() < 0.4:
        args["workspace_buffer"] = workspace()
    if "sinks" in args and rng.random() < 0.5:
        args["sinks"] = args["sinks"].view(p.num_kv_heads, -1)

    def check(a: Args, results: Results) -> None:
        q, rows = a["q"], whole(a["q_seq_len"])
        own = {**a, "block_tables": a["page_table"]}
        lens = integers(a["seq_lens"].flatten())
        layout = a["kv_layout"] if isinstance(a["kv_layout"], str) else "NHD"  # a number is an older sm_count
        k, v, kv = tabled_tokens(own, lens, 2**30, layout)
        flat, left = q.reshape(-1, *q.shape[-2:]), whole(a["sliding_win_size"])
        require(left >= 0, "a window of negative size")
        sink = None if a.get("sinks") is None else a["sinks"].flatten()
        scale = number(a["q_scale"]) * number(a["kv_scale"]) * q.shape[-1] ** -0.5
        check_values(
            (results[0].reshape(flat.shape),), flat, k, v, [rows * b for b in range(len(kv))], kv, causal=rows > 1,
            window_left=left - 1 if left else -1, sm_scale=scale, v_scale=number(a["kv_scale"]), sinks=sink,
        )  # fmt: skip

    return Case("xqa", args, lambda a: (quire.xqa(**a),), check, frozenset({"output", "workspace_buffer"}))


def ragged_decode(rng: random.Random) -> Case:
    """Block tables with other numbers of queries in each request: q_cu_seq_lens and cum_seq_lens_q."""
    name, most = rng.choice(("xqa", "trtllm")), rng.choice((1, 2, 5))
    p = batch(rng, queries=most, combinations=SAME, at_least_queries=True)
    rows = [rng.randint(0, most) for _ in p.qo_lens]
    p = Problem(rows, p.kv_lens, p.num_qo_heads, p.num_kv_heads, p.head_dim, dtype=p.dtype, seed=p.seed)
    layout = layout_of(rng)
    offsets_name, most_name = ("q_cu_seq_lens", "q_len_per_req") if name == "xqa" else ("cum_seq_lens_q", "max_q_len")
    args: Args = {
        "query": restrided(rng, p.q), **table_args(rng, p, layout), "workspace_buffer": workspace(),
        "max_seq_len": max([1, *p.kv_lens]), "bmm1_scale": 0.125, "bmm2_scale": rng.choice((1.0, 2.0)),
        "window_left": window(rng), "kv_layout": layout, offsets_name: numbers_of(rng, p.qo_indptr), most_name: most,
        **sinks(rng, p),
    }  # fmt: skip
    if rng.random() < 0.3:
        args["out"] = poisoned(p.q.shape, p.dtype, "cpu")

    def invoke(a: Args) -> Results:
        rest = {n: value for n, value in a.items() if n not in ("k_cache", "v_cache")}
        function = quire.xqa_batch_decode_with_kv_cache if name == "xqa" else quire.trtllm_batch_decode_with_kv_cache
        return as_results(function(kv_cache=(a["k_cache"], a["v_cache"]), **rest))

    def check(a: Args, results: Results) -> None:
        k, v, kv = tabled_tokens(a, integers(a["seq_lens"]), a["max_seq_len"], a["kv_layout"])
        qo, most = offsets(a[offsets_name]), whole(a[most_name])
        require(max(oracle.lengths(qo), default=0) <= most, "more queries than can be")
        check_values(
            results, a["query"], k, v, qo, kv, causal=most > 1, window_left=a["window_left"],
            sm_scale=number(a["bmm1_scale"]), v_scale=a["bmm2_scale"], sinks=a.get("sinks"),
        )  # fmt: skip

    title = f"{name}_batch_decode_with_kv_cache, {offsets_name}"
    return Case(title, args, invoke, check, frozenset({"out", "workspace_buffer"}))


CASES: tuple[Any, ...] = (table_decode, table_decode, table_prefill, table_prefill, value_xqa, ragged_decode)
