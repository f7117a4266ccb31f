"""Whether the bits of a request depend on that request alone, among random neighbours; and what this promise costs.

    python benchmarks/determinism.py --json FILE             on a GPU: 200 requests x 1,000 neighbour sets, each case
    python benchmarks/determinism.py --cost FILE             the report of attention.py with both providers, as a table
    python benchmarks/determinism.py --device cpu --requests 8 --sets 3 --most-tokens 200

Each request is computed alone, its prompt at once. Then each set is one batch: the requests in random order, in one
set of three a few of them, each with the whole prompt, its last row or random rows of it, over keys that are ragged or
in pages of a random size and place. Rows whose bits are not those of the request alone are counted. Graphs are
captured once and planned again before each replay. Costs come from attention.py, in one process:

    python benchmarks/attention.py --providers quire,quire-deterministic --json cost.json

The exit status is 1 if a row differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import quire
from machine import describe, write_report
from quire.compat.flash_attn_interface import flash_attn_varlen_func
from tables import DECODE, PREFILL

WORKSPACE = 512 << 20  #: for partial results, beside the room for rotated keys and values
MOST_ROWS = 2048  #: of a chunk: those of the long prompts end anywhere
PAGE_SIZES = (16, 1, 64)
LATENT_PAGE_SIZES = (64, 1, 16)


class Case(NamedTuple):
    """What all requests of a pool have in common."""

    kind: str  #: "prefill", "graph", "decode", "decode graph", "varlen" or "latents"
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    kv_dtype: torch.dtype | None = None  #: None: bfloat16
    backend: str = "auto"
    plan: Mapping[str, Any] = {}
    rows: int = 1  #: of each step of decode
    has_lse: bool = True  #: one that does not count from the first row of a call
    part: int = 1  #: of the usual lengths, where rows are large or room for all of them is


CASES = {
    "prefill-d128": Case("prefill"),
    "prefill-d64": Case("prefill", (64, 8), (64, 64)),
    "prefill-d256": Case("prefill", (16, 8), (256, 256)),
    "prefill-d192-128": Case("prefill", (16, 16), (192, 128)),
    "prefill-group-of-7": Case("prefill", (28, 4)),
    "prefill-fa2": Case("prefill", backend="quire:fa2"),
    "prefill-fa2-d64": Case("prefill", (64, 8), (64, 64), backend="quire:fa2"),
    "prefill-e4m3": Case("prefill", kv_dtype=torch.float8_e4m3fn),
    "prefill-window": Case("prefill", plan={"window_left": 1023}),
    "prefill-cap": Case("prefill", plan={"logits_soft_cap": 30.0}),
    "prefill-alibi": Case("prefill", plan={"pos_encoding_mode": "ALIBI"}, has_lse=False),
    "prefill-rope": Case("prefill", plan={"pos_encoding_mode": "ROPE_LLAMA"}),
    "prefill-graph": Case("graph", part=8),
    "prefill-e4m3-graph": Case("graph", kv_dtype=torch.float8_e4m3fn, part=8),
    "varlen": Case("varlen"),
    "decode-d128": Case("decode"),
    "decode-d64": Case("decode", (64, 8), (64, 64)),
    "decode-d256": Case("decode", (16, 8), (256, 256)),
    "decode-e4m3": Case("decode", kv_dtype=torch.float8_e4m3fn),
    "decode-rope": Case("decode", plan={"pos_encoding_mode": "ROPE_LLAMA"}),
    "decode-window": Case("decode", (64, 8), (64, 64), plan={"window_left": 127}),
    "decode-4-rows": Case("decode", (64, 8), rows=4),
    "decode-graph": Case("decode graph"),
    "latents-16-heads": Case("latents", (16, 1), (576, 512), part=4),
    "latents-128-heads": Case("latents", (128, 1), (576, 512), part=4),
}


class Part(NamedTuple):
    """Rows [begin, end) of a request, over its keys up to `end`."""

    request: int
    begin: int
    end: int


class Pool:
    """Requests of random lengths, and their keys and values in pages of several sizes, ragged too (page size 0)."""

    def __init__(self, case: Case, lens: Sequence[int], device: torch.device, page_sizes: Sequence[int]) -> None:
        self.case, self.lens, self.device = case, lens, device
        self.starts = offsets(lens)
        self.kv_dtype = case.kv_dtype or torch.bfloat16
        draw = torch.Generator(device).manual_seed(1)
        total, (num_qo, num_kv), (qk, vo) = sum(lens), case.heads, case.dims

        def drawn(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(total, heads, dim, generator=draw, device=device).to(dtype)

        self.q = drawn(num_qo, qk, torch.bfloat16)
        self.k = drawn(num_kv, qk, self.kv_dtype)
        self.v = self.k[..., :vo] if case.kind == "latents" else drawn(num_kv, vo, self.kv_dtype)
        self.caches = {size: self._pages(size) for size in page_sizes}

    def _pages(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Pages of keys and of values in random places, their numbers request by request, and where each begins."""
        counts = [-(-n // size) for n in self.lens]
        firsts = offsets(counts)
        numbers = torch.randperm(int(firsts[-1]), generator=torch.Generator().manual_seed(size)).int()
        place = torch.cat([torch.arange(n) + int(first) * size for n, first in zip(self.lens, firsts, strict=False)])
        at = (numbers[place // size].long() * size + place % size).to(self.device)
        made = []
        for tokens in (self.k, self.v):
            pages = torch.zeros(len(numbers) * size, *tokens.shape[1:], dtype=tokens.dtype, device=self.device)
            pages.view(torch.uint8).index_copy_(0, at, tokens.contiguous().view(torch.uint8))
            made.append(pages.view(len(numbers), size, *tokens.shape[1:]))
        return made[0], made[1], numbers, firsts.tolist()

    def tables(self, parts: Sequence[Part], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, _, numbers, firsts = self.caches[size]
        counts = [-(-part.end // size) for part in parts]
        pages = [numbers[firsts[part.request] :][:count] for part, count in zip(parts, counts, strict=True)]
        last = torch.tensor([(part.end - 1) % size + 1 for part in parts], dtype=torch.int32)
        return offsets(counts), torch.cat(pages), last

    def rows(self, parts: Sequence[Part]) -> torch.Tensor:
        """The rows of all requests that are those of a batch, on the device."""
        begins = [int(self.starts[part.request]) for part in parts]
        places = [torch.arange(b + part.begin, b + part.end) for b, part in zip(begins, parts, strict=True)]
        return torch.cat(places).to(self.device)

    def keys(self, parts: Sequence[Part]) -> torch.Tensor:
        begins = [int(self.starts[part.request]) for part in parts]
        places = [torch.arange(b, b + part.end) for b, part in zip(begins, parts, strict=True)]
        return torch.cat(places).to(self.device)


def offsets(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


#: Computes a batch, over pages of that size: o and lse of its rows.
Attend = Callable[[Sequence[Part], int], tuple[torch.Tensor, torch.Tensor]]


def _typed(pool: Pool) -> dict[str, Any]:
    return {"q_data_type": torch.bfloat16, "kv_data_type": pool.kv_dtype, **pool.case.plan}


def prefill(pool: Pool, workspace: torch.Tensor) -> Attend:
    case, built = pool.case, {"backend": pool.case.backend, "deterministic": True}
    ragged = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace, **built)
    paged = quire.BatchPrefillWithPagedKVCacheWrapper(workspace, **built)
    shape = *case.heads, case.dims[0]

    def attend(parts: Sequence[Part], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, more = offsets([part.end - part.begin for part in parts]), {**_typed(pool), "causal": True}
        q = pool.q[pool.rows(parts)]
        if not size:
            keys = pool.keys(parts)
            ragged.plan(rows, offsets([part.end for part in parts]), *shape, case.dims[1], **more)
            return ragged.run(q, pool.k[keys], pool.v[keys], return_lse=True)
        paged.plan(rows, *pool.tables(parts, size), *shape, size, case.dims[1], **more)
        return paged.run(q, pool.caches[size][:2], return_lse=True)

    return attend


def decode(pool: Pool, workspace: torch.Tensor) -> Attend:
    case = pool.case
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace, backend=case.backend, deterministic=True)

    def attend(parts: Sequence[Part], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables = pool.tables(parts, size)
        wrapper.plan(*tables, *case.heads, case.dims[0], size, q_len_per_req=case.rows, **_typed(pool))
        return wrapper.run(pool.q[pool.rows(parts)], pool.caches[size][:2], return_lse=True)

    return attend


def graph(pool: Pool, workspace: torch.Tensor) -> Attend:
    """Replays of one capture, whose batches have empty requests behind their own; pages of the first size."""
    case, size, batch = pool.case, PAGE_SIZES[0], len(pool.lens)
    is_decode, most = case.kind == "decode graph", sum(-(-n // size) for n in pool.lens)
    sizes = {"indptr": batch + 1, "indices": most, "last_page_len": batch}
    names = {name: f"paged_kv_{name}_buf" + "fer" * is_decode for name in sizes}
    buffers = {names[name]: torch.zeros(count, dtype=torch.int32, device=pool.device) for name, count in sizes.items()}
    built = {"use_cuda_graph": True, "deterministic": True, **buffers}
    rows = batch * case.rows if is_decode else sum(pool.lens)
    q = torch.zeros(rows, *pool.q.shape[1:], dtype=torch.bfloat16, device=pool.device)
    o = torch.zeros(rows, case.heads[0], case.dims[1], dtype=torch.bfloat16, device=pool.device)
    lse = torch.zeros(rows, case.heads[0], device=pool.device)
    cache, captured = pool.caches[size][:2], torch.cuda.CUDAGraph()
    wrapper: Any
    if is_decode:
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace, **built)
    else:
        places = torch.zeros(batch + 1, dtype=torch.int32, device=pool.device)
        wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace, qo_indptr_buf=places, **built)

    def plan(parts: Sequence[Part]) -> None:
        indptr, pages, last = pool.tables(parts, size)
        spare = batch - len(parts)
        tables = torch.cat((indptr, indptr[-1:].expand(spare))), pages, torch.cat((last, last.new_zeros(spare)))
        shape = *case.heads, case.dims[0], size
        if is_decode:
            wrapper.plan(*tables, *shape, q_len_per_req=case.rows, **_typed(pool))
        else:
            lens = [*(part.end - part.begin for part in parts), *[0] * spare]
            wrapper.plan(offsets(lens), *tables, *shape, causal=True, **_typed(pool))

    first = [Part(i, n - case.rows if is_decode else 0, n) for i, n in enumerate(pool.lens)]
    plan(first)
    wrapper.run(q, cache, out=o, lse=lse, return_lse=True)
    with torch.cuda.graph(captured):
        wrapper.run(q, cache, out=o, lse=lse, return_lse=True)

    def attend(parts: Sequence[Part], _: int) -> tuple[torch.Tensor, torch.Tensor]:
        plan(parts)
        taken = pool.rows(parts)
        q[: len(taken)] = pool.q[taken]
        captured.replay()
        return o[: len(taken)], lse[: len(taken)]

    return attend


def varlen(pool: Pool, _: torch.Tensor) -> Attend:
    """FlashAttention's function, with lengths on the device, told by the environment."""
    os.environ["QUIRE_DETERMINISTIC"] = "1"

    def attend(parts: Sequence[Part], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        indptr, pages, _ = pool.tables(parts, size)
        counts = indptr.diff()
        table = torch.zeros(len(parts), int(counts.max()), dtype=torch.int32)
        table[torch.arange(table.shape[1]) < counts[:, None]] = pages
        rows = [part.end - part.begin for part in parts]
        lens = torch.tensor([part.end for part in parts], dtype=torch.int32, device=pool.device)
        k, v = pool.caches[size][:2]
        out, lse = flash_attn_varlen_func(
            pool.q[pool.rows(parts)], k, v, offsets(rows).to(pool.device), seqused_k=lens, max_seqlen_q=max(rows),
            max_seqlen_k=max(pool.lens), block_table=table.to(pool.device), causal=True, return_attn_probs=True,
            num_splits=0,
        )[:2]  # fmt: skip
        return out, lse.t()

    return attend


def latents(pool: Pool, workspace: torch.Tensor) -> Attend:
    wrapper = quire.mla.BatchMLAPagedAttentionWrapper(workspace, deterministic=True)

    def attend(parts: Sequence[Part], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        indptr, pages, _ = pool.tables(parts, size)
        lens = torch.tensor([part.end for part in parts], dtype=torch.int32)
        rows, kinds = offsets([part.end - part.begin for part in parts]), (torch.bfloat16, torch.bfloat16)
        wrapper.plan(rows, indptr, pages, lens, pool.case.heads[0], 512, 64, size, True, 192**-0.5, *kinds)
        q, cache = pool.q[pool.rows(parts)], pool.caches[size][0].squeeze(2)
        return wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)

    return attend


KINDS = {"prefill": prefill, "graph": graph, "decode": decode, "decode graph": graph, "varlen": varlen,
         "latents": latents}  # fmt: skip


def draw(pool: Pool, rng: random.Random, number: int) -> list[Part]:
    """A batch: all requests in random order or, in each third, a few."""
    count = len(pool.lens) if number % 3 else rng.randint(1, min(8, len(pool.lens)))
    chosen, steps = rng.sample(range(len(pool.lens)), count), pool.case.kind.startswith("decode")
    parts = []
    for request in chosen:
        length = pool.lens[request]
        chunks = [(0, length), (length - 1, length), tuple(sorted(rng.sample(range(length + 1), 2)))]
        begin, end = (length - pool.case.rows, length) if steps else rng.choice(chunks)
        parts.append(Part(request, max(begin, end - MOST_ROWS), end))
    return parts


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers as integers, so that zeros of both signs differ, and NaNs do not."""
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def check(name: str, lens: Sequence[int], sets: int, device: torch.device) -> dict[str, Any]:
    """A case: how many requests had rows with other bits, and in how many sets."""
    case, rng, began = CASES[name], random.Random(name), time.perf_counter()
    sizes = LATENT_PAGE_SIZES if case.kind == "latents" else PAGE_SIZES
    pool = Pool(case, [max(case.rows, n // case.part) for n in lens], device, sizes)
    rotated = 2 * (pool.k.nbytes + pool.v.nbytes) if "pos_encoding_mode" in case.plan else 0
    workspace = torch.zeros(WORKSPACE + rotated, dtype=torch.uint8, device=device)
    eager = {"graph": prefill, "decode graph": decode}.get(case.kind, KINDS[case.kind])
    reference, attend = eager(pool, workspace), KINDS[case.kind](pool, torch.zeros_like(workspace))
    steps = case.kind.startswith("decode")
    alone = [reference([Part(i, n - case.rows if steps else 0, n)], sizes[0]) for i, n in enumerate(pool.lens)]
    begins = offsets([len(o) for o, _ in alone]).tolist()
    want = [torch.cat(tensors) for tensors in zip(*alone, strict=True)][: 1 + case.has_lse]
    differ = torch.zeros(len(lens), dtype=torch.int64, device=device)
    compared = 0
    for number in range(sets):
        parts = draw(pool, rng, number)
        got = attend(parts, rng.choice((*sizes, 0) if eager is prefill else sizes))
        shift = [begins[part.request] + (0 if steps else part.begin) for part in parts]
        counts = [part.end - part.begin for part in parts]
        rows = torch.cat([torch.arange(b, b + n) for b, n in zip(shift, counts, strict=True)]).to(device)
        of_request = torch.tensor([part.request for part in parts]).repeat_interleave(torch.tensor(counts)).to(device)
        for mine, theirs in zip(got, want, strict=False):
            differ.index_add_(0, of_request, (bits(mine) != bits(theirs[rows])).flatten(1).any(1).long())
        compared += len(parts)
    wrong = differ.cpu()
    os.environ.pop("QUIRE_DETERMINISTIC", None)
    return {
        "case": name, "requests": len(lens), "sets": sets, "compared": compared,
        "requests_that_differ": int((wrong > 0).sum()), "rows_that_differ": int(wrong.sum()),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def cost(path: Path) -> None:
    """The time of each row of the README's tables (if there is none, of each row) with the promise, of that without."""
    report, ratios = json.loads(path.read_text(encoding="utf-8")), []
    measured = {row["row"] for row in report["rows"]}
    shown = measured & {*PREFILL.values(), *DECODE.values()} or measured
    for row in report["rows"]:
        times = {r["provider"]: r["timing"]["median"] for r in row["results"] if r["timing"]}
        reasons = [r["reason"] for r in row["results"] if r["provider"] == "quire-deterministic" and r["reason"]]
        if row["row"] not in shown or "quire" not in times:
            continue
        if reasons or "quire-deterministic" not in times:
            print(f"{row['row']:36} {times['quire']:10.1f}  {'; '.join(reasons)}")
            continue
        ratios.append(times["quire-deterministic"] / times["quire"])
        print(f"{row['row']:36} {times['quire']:10.1f} {times['quire-deterministic']:10.1f} {ratios[-1] - 1:+8.1%}")
    print(f"{len(ratios)} rows on {report['device']}: mean {statistics.mean(ratios) - 1:+.1%}, "
          f"worst {max(ratios) - 1:+.1%}")  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas; default: all")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--sets", type=int, default=1000, help="sets of neighbours of each case")
    parser.add_argument("--most-tokens", type=int, default=1500, help="of all requests but two, of which one is split")
    parser.add_argument("--long-tokens", type=int, default=0, help="of those two; default: 20 and 12 times as many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="a report of attention.py: print the table of costs")
    return parser.parse_args()


def main() -> int:
    """Run the command line; 1 if a row differs."""
    options = _arguments()
    if options.cost is not None:
        cost(options.cost)
        return 0
    device, rng = torch.device(options.device), random.Random(0)
    lens = [rng.randint(1, options.most_tokens) for _ in range(options.requests - 2)]
    lens += [options.long_tokens or times * options.most_tokens for times in (12, 20)]
    names = [name for name in options.cases.split(",") if device.type == "cuda" or "graph" not in CASES[name].kind]
    report: dict[str, Any] = {**describe(device), "cases": []}
    for name in names:
        if device.type == "cpu" and CASES[name].backend != "auto":
            continue
        report["cases"].append(done := check(name, lens, options.sets, device))
        print(f"{name:22} {done['compared']:8} results of {len(lens)} requests in {options.sets} sets, "
              f"{done['seconds']:6.1f} s: {done['requests_that_differ']} requests differ, in "
              f"{done['rows_that_differ']} rows", flush=True)  # fmt: skip
        write_report(options.json, report)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(any(done["rows_that_differ"] for done in report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
