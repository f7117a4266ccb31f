"""Shared prefixes: one launch over all levels against a launch for each level and merges, plain decode, and FlashInfer.

Requests are the leaves of a tree in a paged cache; each decodes one token. The first provider that is right is compared
with attention in float64 on one KV head before anything is timed. Launches are captured and rotate over sets of inputs
that are together larger than the L2.

    python benchmarks/cascade.py --json results/cascade.json
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import quire
from machine import describe, write_report
from timing import Timing, captured, cpu_times, cuda_times, estimate_us, flusher, sets_for

HEAD_DIM = 128
ALLOWED_ERROR = 1e-2


@dataclass(frozen=True)
class Case:
    """levels: (nodes, tokens of each), from the root to the requests."""

    name: str
    levels: tuple[tuple[int, int], ...]
    num_qo_heads: int
    num_kv_heads: int
    target_us: float | None = None
    page_size: int = 64

    @property
    def batch_size(self) -> int:
        return self.levels[-1][0]

    @property
    def bytes(self) -> int:
        """Of keys and values, each counted once."""
        return sum(nodes * tokens for nodes, tokens in self.levels) * self.num_kv_heads * HEAD_DIM * 2 * 2


CASES = (
    Case("b64-8192+256-32/8", ((1, 8192), (64, 256)), 32, 8, 45.0),
    Case("b256-32768+256-64/8", ((1, 32768), (256, 256)), 64, 8, 470.0),
    Case("16x4x4-2048+1024+256-32/8", ((16, 2048), (64, 1024), (256, 256)), 32, 8),
    Case("b8-4000+64-8/1", ((1, 4000), (8, 64)), 8, 1, page_size=16),
    Case("tiny", ((1, 130), (2, 70), (4, 9)), 8, 2),
)


@dataclass(frozen=True)
class Inputs:
    """One set: queries, a cache, and the pages of each level's nodes one after another."""

    case: Case
    q: torch.Tensor
    cache: torch.Tensor
    levels: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], ...]
    pages_of: tuple[torch.Tensor, ...]  #: of each level [nodes, pages]


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    source = torch.Generator(device).manual_seed(seed)
    counts = [math.ceil(tokens / case.page_size) for _, tokens in case.levels]
    total = sum(nodes * count for (nodes, _), count in zip(case.levels, counts, strict=True))
    numbers = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    shape = total, 2, case.page_size, case.num_kv_heads, HEAD_DIM
    cache = torch.randn(shape, generator=source, device=device, dtype=torch.bfloat16)
    q = torch.randn(case.batch_size, case.num_qo_heads, HEAD_DIM, generator=source, device=device, dtype=torch.bfloat16)
    levels, pages, at = [], [], 0
    for (nodes, tokens), count in zip(case.levels, counts, strict=True):
        mine = numbers[at : at + nodes * count]
        at += nodes * count
        rows = torch.arange(nodes + 1, dtype=torch.int32) * (case.batch_size // nodes)
        indptr = torch.arange(nodes + 1, dtype=torch.int32) * count
        last = torch.full((nodes,), tokens - (count - 1) * case.page_size, dtype=torch.int32)
        levels.append((rows, indptr, mine, last))
        pages.append(mine.view(nodes, count))
    return Inputs(case, q, cache, tuple(levels), tuple(pages))


def truth(x: Inputs) -> torch.Tensor:
    """Attention in float64 of KV head 0's query heads for the first and the last request."""
    case, group = x.case, x.case.num_qo_heads // x.case.num_kv_heads
    rows = []
    for request in (0, case.batch_size - 1):
        keys = [
            x.cache[pages[request * nodes // case.batch_size].long().to(x.cache.device), :, :, 0].double().unbind(1)
            for (nodes, _), pages in zip(case.levels, x.pages_of, strict=True)
        ]
        k, v = (
            torch.cat(
                [pair[i].reshape(-1, HEAD_DIM)[:tokens] for pair, (_, tokens) in zip(keys, case.levels, strict=True)]
            )
            for i in range(2)
        )
        q = x.q[request, :group].double()
        rows.append(torch.softmax(q @ k.T / math.sqrt(HEAD_DIM), -1) @ v)
    return torch.stack(rows)


Launch = Callable[[int], torch.Tensor]


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device=device)


def _options(case: Case) -> dict[str, Any]:
    return {
        "num_qo_heads": case.num_qo_heads, "num_kv_heads": case.num_kv_heads, "page_size": case.page_size,
        "q_data_type": torch.bfloat16,
    }  # fmt: skip


def one_launch(backend: str, sets: Sequence[Inputs]) -> Launch:
    """MultiLevelCascadeAttentionWrapper, whose levels must be one launch."""
    wrappers = []
    for x in sets:
        wrapper = quire.MultiLevelCascadeAttentionWrapper(len(x.levels), _workspace(x.q.device), backend=backend)
        wrapper.plan(*(list(column) for column in zip(*x.levels, strict=True)), head_dim=HEAD_DIM, **_options(x.case))
        if not wrapper.explain().startswith("all levels in one launch"):
            raise quire.UnsupportedError(wrapper.explain().splitlines()[0])
        wrappers.append(wrapper)
    return lambda i: wrappers[i].run(sets[i].q, sets[i].cache)


def level_by_level(sets: Sequence[Inputs]) -> Launch:
    """An attention call for each level, and a merge after each but the first."""
    plans = []
    for x in sets:
        calls = []
        for level in x.levels:
            call = quire.BatchPrefillWithPagedKVCacheWrapper(_workspace(x.q.device))
            call.plan(*level, head_dim_qk=HEAD_DIM, **_options(x.case))
            calls.append(call)
        plans.append(calls)

    def launch(i: int) -> torch.Tensor:
        first, *rest = plans[i]
        o, lse = first.run_return_lse(sets[i].q, sets[i].cache)
        for call in rest:
            quire.merge_state_in_place(o, lse, *call.run_return_lse(sets[i].q, sets[i].cache))
        return o

    return launch


def _joined_pages(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request's pages of all levels, which are whole pages but the last."""
    if any(tokens % x.case.page_size for _, tokens in x.case.levels[:-1]):
        raise quire.UnsupportedError("a prefix that ends within a page has no joined table")
    batch = x.case.batch_size
    rows = torch.cat([pages.repeat_interleave(batch // len(pages), 0) for pages in x.pages_of], 1)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * rows.shape[1]
    return indptr, rows.reshape(-1), x.levels[-1][3]


def plain_decode(sets: Sequence[Inputs], shared_prefix: str | None = None) -> Launch:
    """Decode that reads each prefix once for each request, or finds shared prefixes by itself."""
    more = {} if shared_prefix is None else {"shared_prefix": shared_prefix}
    wrappers = []
    for x in sets:
        wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(_workspace(x.q.device))
        wrapper.plan(*_joined_pages(x), head_dim=HEAD_DIM, **_options(x.case), **more)
        wrappers.append(wrapper)
    return lambda i: wrappers[i].run(sets[i].q, sets[i].cache)


def flashinfer_levels(sets: Sequence[Inputs]) -> Launch:
    import flashinfer

    wrappers = []
    for x in sets:
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(x.levels), _workspace(x.q.device), "NHD")
        columns = [[level[i].to(x.q.device) for level in x.levels] for i in range(4)]
        wrapper.plan(*columns, head_dim=HEAD_DIM, **_options(x.case))
        wrappers.append(wrapper)
    return lambda i: wrappers[i].run(sets[i].q, sets[i].cache)


PROVIDERS: dict[str, Callable[[Sequence[Inputs]], Launch]] = {
    "quire": partial(one_launch, "auto"),
    "quire-fa3": partial(one_launch, "quire:fa3"),
    "quire-fa2": partial(one_launch, "quire:fa2"),
    "quire-decode": partial(one_launch, "quire:decode"),
    "levels": level_by_level,
    "plain": plain_decode,
    "auto": partial(plain_decode, shared_prefix="auto"),
    "flashinfer": flashinfer_levels,
}


@dataclass(frozen=True)
class Result:
    case: str
    provider: str
    error: float | None = None
    timing: Timing | None = None
    target_us: float | None = None
    reason: str | None = None


def measure(case: Case, providers: Sequence[str], device: torch.device, rounds: int) -> list[Result]:
    """The results of one case, of each provider."""
    num_sets = min(12, sets_for(case.bytes, device))
    sets = [make_inputs(case, device, seed) for seed in range(num_sets)]
    expected, found, calls = truth(sets[0]), [], {}
    for name in providers:
        try:
            call = PROVIDERS[name](sets)
            group = case.num_qo_heads // case.num_kv_heads
            got = call(0)[[0, case.batch_size - 1], :group].double()
        except (ImportError, RuntimeError, quire.QuireError) as error:
            found.append(Result(case.name, name, reason=str(error).splitlines()[0]))
            continue
        error = float((got - expected).norm() / expected.norm())
        if error <= ALLOWED_ERROR:
            calls[name] = call, error
        else:
            found.append(Result(case.name, name, error, reason=f"wrong: {error:.1e}"))
    times = _times([call for call, _ in calls.values()], device, num_sets, rounds)
    timed = zip(calls.items(), times, strict=True)
    return found + [Result(case.name, name, error, t, case.target_us) for (name, (_, error)), t in timed]


def _times(calls: list[Launch], device: torch.device, num_sets: int, rounds: int) -> list[Timing]:
    if device.type == "cpu":
        return cpu_times(calls, rounds)
    estimates = [estimate_us(call, num_sets) for call in calls]
    launches = []
    for call in calls:
        try:
            launches.append(captured(call, num_sets))
        except Exception:  # a plan without use_cuda_graph may refuse
            torch.cuda.synchronize()
            launches.append((call, 1))
    return cuda_times(launches, estimates, num_sets, rounds, flusher("write"))


def line(result: Result) -> str:
    """One result on one line."""
    head = f"{result.case:28} {result.provider:12}"
    if result.timing is None:
        return f"{head} {result.reason}"
    t, target = result.timing, "" if result.target_us is None else f"  target {result.target_us:.0f}"
    return f"{head} {t.median:8.1f} us ({t.least:.1f} to {t.most:.1f})  error {result.error:.1e}{target}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 if a result of quire was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="[!t]*", help="names or patterns, comma-separated; default: all but tiny")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    patterns, results = options.cases.split(","), []
    for case in CASES:
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns):
            found = measure(case, options.providers.split(","), torch.device(options.device), options.rounds)
            print(*map(line, found), sep="\n", flush=True)
            results += found
    head = describe(torch.device(options.device))
    write_report(options.json, {**head, "results": [asdict(result) for result in results]})
    return int(any(r.provider.startswith("quire") and (r.error or 0) > ALLOWED_ERROR for r in results))


if __name__ == "__main__":
    sys.exit(main())
