"""deterministic=True: the bits of a request's result depend on that request alone.

A pool of requests is computed one by one, each prompt at once; then in batches of chunks of several requests, in any
order, with other pages. Every row must have the bits that it has alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from latents import Latents
from problems import workspace
from quire.compat.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from quire.engine import upcast
from quire.engine.options import PlanOptions, Types, logits_options
from quire.engine.rope_prologue import may_pay
from quire.kernels import KERNELS, AttentionProblem, decide
from quire.kernels.attention import OWN_SPLITS
from quire.kernels.features import MaskMode, PosEncodingMode, dtype_of

#: "decode" takes batches of the decode wrapper alone: the tests of decode take it by "auto".
CUDA_BACKENDS = {"fa2": (8, 0), "fa3": (9, 0), "auto": (8, 0)}
SWITCHES = ("QUIRE_DETERMINISTIC", "VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")

Result = tuple[Tensor, Tensor]


def offsets(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass
class Part:
    """Rows [begin, end) of a request, over its keys up to `keys`."""

    request: int
    begin: int
    end: int
    keys: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


@dataclass
class Pool:
    """Requests with random queries, keys and values."""

    lens: Sequence[int]
    device: str
    dtype: torch.dtype
    heads: tuple[int, int] = (8, 2)
    head_dim: int = 64
    seed: int = 0
    kv_dtype: torch.dtype | None = None
    q: list[Tensor] = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        source, kv = torch.Generator().manual_seed(self.seed), self.kv_dtype or self.dtype
        drawn = [
            [torch.randn(n, heads, self.head_dim, generator=source).to(self.device, dtype) for n in self.lens]
            for heads, dtype in ((self.heads[0], self.dtype), (self.heads[1], kv), (self.heads[1], kv))
        ]
        self.q, self.k, self.v = drawn

    def queries(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([self.q[part.request][part.begin : part.end] for part in parts])

    def pages(self, parts: Sequence[Part], page_size: int, rng: random.Random) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A cache [pages, 2, page_size, heads, dim] whose other places are NaN, and the tables of a batch."""
        counts = [-(-part.keys // page_size) for part in parts]
        order = list(range(sum(counts) + 3))
        rng.shuffle(order)
        shape = len(order), 2, page_size, self.heads[1], self.head_dim
        cache = torch.full(shape, torch.nan, device=self.device).to(self.kv_dtype or self.dtype)
        indptr = offsets(counts)
        for i, part in enumerate(parts):
            pages = torch.tensor(order[indptr[i] : indptr[i + 1]])
            at = torch.arange(part.keys)
            for side, tensors in enumerate((self.k, self.v)):
                to = pages[at // page_size].to(self.device), at.to(self.device) % page_size
                cache[to[0], side, to[1]] = tensors[part.request][: part.keys]
        last = [(part.keys - 1) % page_size + 1 if part.keys else 0 for part in parts]
        indices = torch.tensor(order[: sum(counts)], dtype=torch.int32)
        return cache, indptr, indices, torch.tensor(last, dtype=torch.int32)

    def chunks(self, rng: random.Random, *, causal: bool = True) -> list[Part]:
        """Some requests in any order, each with rows of its prompt, and the keys that are there by then."""
        parts = []
        for request in rng.sample(range(len(self.lens)), rng.randint(1, len(self.lens))):
            length = self.lens[request]
            begin, end = rng.choice([(0, length), (length - 1, length), sorted(rng.sample(range(length + 1), 2))])
            parts.append(Part(request, begin, end, end if causal else length))
        return parts

    def wholes(self) -> list[Part]:
        return [Part(request, 0, length, length) for request, length in enumerate(self.lens)]


def prefill(pool: Pool, parts: Sequence[Part], backend: str, rng: random.Random, page_size: int, **plan: Any) -> Result:
    """Of a batch, ragged if there is no page size."""
    more = {"q_data_type": pool.dtype, "kv_data_type": pool.kv_dtype or pool.dtype, "causal": True, **plan}
    built = {name: more.pop(name) for name in ("variant", "deterministic") if name in more}
    given = {"backend": backend, "deterministic": True, **built}
    run = {name: more.pop(name) for name in ("sinks", "bias") if name in more}
    shape = *pool.heads, pool.head_dim
    rows = offsets([part.rows for part in parts])
    if not page_size:
        wrapper: Any = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace(pool.device), **given)
        wrapper.plan(rows, offsets([part.keys for part in parts]), *shape, **more)
        kv = tuple(torch.cat([t[part.request][: part.keys] for part in parts]) for t in (pool.k, pool.v))
        return wrapper.run(pool.queries(parts), *kv, return_lse=True, **run)
    cache, *tables = pool.pages(parts, page_size, rng)
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(pool.device), **given)
    wrapper.plan(rows, *tables, *shape, page_size, **more)
    return wrapper.run(pool.queries(parts), cache, return_lse=True, **run)


def decode(
    pool: Pool, parts: Sequence[Part], backend: str, rng: random.Random, page_size: int, q_len: int = 1, **plan: Any
) -> Result:
    cache, *tables = pool.pages(parts, page_size, rng)
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace(pool.device), backend=backend, deterministic=True)
    wrapper.plan(
        *tables, *pool.heads, pool.head_dim, page_size, q_data_type=pool.dtype, q_len_per_req=q_len,
        kv_data_type=pool.kv_dtype, **plan,
    )  # fmt: skip
    return wrapper.run(pool.queries(parts), cache, return_lse=True)


def check(got: Result, parts: Sequence[Part], alone: Sequence[Result], what: object, *, lse: bool = True) -> None:
    """Each row has the bits that it has when its request is alone."""
    begin = 0
    for part in parts:
        for mine, theirs in list(zip(got, alone[part.request], strict=True))[: 2 if lse else 1]:
            rows, want = mine[begin : begin + part.rows], theirs[part.begin : part.end]
            assert torch.equal(rows.view(torch.uint8), want.view(torch.uint8)), (what, part)
        begin += part.rows


def check_scenes(
    pool: Pool, attend: Callable[..., Result], draw: Callable[[random.Random], list[Part]], count: int,
    page_sizes: Sequence[int] = (0, 1, 3, 16, 64), *, lse: bool = True,
) -> None:  # fmt: skip
    rng = random.Random(pool.seed)
    alone = [attend([part], rng, page_sizes[0]) for part in pool.wholes()]
    for _ in range(count):
        parts, page_size = draw(rng), rng.choice(list(page_sizes))
        check(attend(parts, rng, page_size), parts, alone, (page_size, parts), lse=lse)


LENS = (1, 5, 40, 129, 64, 300, 17, 257, 90, 9)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 50},
    "chunks": {"attention_chunk_size": 64},
    "cap": {"logits_soft_cap": 3.0},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "window and cap": {"window_left": 70, "logits_soft_cap": 3.0},
}


@pytest.mark.daily(2)
@pytest.mark.first(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_of_prompts(device, backend, dtype, head_dim, variant):
    """Whole or in chunks, ragged or paged, beside others or alone. ALiBi's lse counts from the first row of a call."""
    pool = Pool(LENS, device, dtype, head_dim=head_dim)

    def attend(parts, rng, page_size):
        return prefill(pool, parts, backend, rng, page_size, **VARIANTS[variant])

    check_scenes(pool, attend, pool.chunks, 12, lse=variant != "alibi")


def test_heads_of_groups_that_divide_no_row_tile(device, backend, dtype):
    pool = Pool(LENS, device, dtype, heads=(10, 2))
    check_scenes(pool, lambda *at: prefill(pool, at[0], backend, *at[1:]), pool.chunks, 8)


def test_keys_of_8_bits(device, backend, dtype):
    pool = Pool(LENS, device, dtype, head_dim=128, kv_dtype=torch.float8_e4m3fn)
    check_scenes(pool, lambda *at: prefill(pool, at[0], backend, *at[1:]), pool.chunks, 8, (16, 8, 64))


@pytest.mark.parametrize("window_left", [-1, 9000])
def test_chunks_across_splits(device, backend, dtype, window_left):
    """A prompt is divided at absolute positions: chunks end before, at and behind them."""
    length, first = 33_100, 32_500
    pool = Pool((length, 40), device, dtype, heads=(2, 1))

    def attend(parts, rng, page_size):
        return prefill(pool, parts, backend, rng, page_size, window_left=window_left)

    rng = random.Random(0)
    whole = Part(0, first, length, length)
    want = [tuple(t.clone() for t in attend([whole], rng, 0))]
    for begin, end in ((0, 1), (255, 290), (267, 268), (268, 269), (100, 600), (260, 600), (599, 600)):
        part = Part(0, first + begin, first + end, first + end)
        got = attend([Part(1, 0, 40, 40), part], rng, 16)
        check((got[0][40:], got[1][40:]), [replace(part, begin=begin, end=end)], want, (begin, end))


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("plan", [{}, {"window_left": 60}, {"logits_soft_cap": 3.0}], ids=str)
def test_steps_of_decode(device, dtype, q_len, plan):
    """Beside other requests, with other pages. Lengths are on both sides of where the size of splits changes."""
    pool = Pool((3, 700, 513, 2049, 512, 4095, 40, 1025, 4200, 64), device, dtype)

    def draw(rng: random.Random) -> list[Part]:
        chosen = rng.sample(range(len(pool.lens)), rng.randint(1, len(pool.lens)))
        return [Part(i, pool.lens[i] - q_len, pool.lens[i], pool.lens[i]) for i in chosen]

    rng = random.Random(0)
    alone: dict[int, Result] = {
        part.request: decode(pool, [part], "auto", rng, 16, q_len, **plan)
        for part in [Part(i, n - q_len, n, n) for i, n in enumerate(pool.lens)]
    }
    for _ in range(8):
        parts = draw(rng)
        got = decode(pool, parts, "auto", rng, rng.choice((1, 16, 64)), q_len, **plan)
        want = [alone[part.request] for part in parts]
        rows = [Part(i, 0, q_len, 0) for i in range(len(parts))]
        check(got, rows, want, parts)


def test_latents(device, dtype):
    """MLA: chunks and decodes in one batch."""
    pool = Latents((200, 90, 5), (200, 90, 5), num_heads=16, dtype=dtype, device=device, causal=True)
    starts = pool.qo_indptr

    def attend(parts: Sequence[Part], rng: random.Random, page_size: int) -> Result:
        counts = [-(-part.keys // page_size) for part in parts]
        order = list(range(sum(counts) + 2))
        rng.shuffle(order)
        cache = torch.full((len(order), page_size, 576), torch.nan, dtype=dtype, device=device)
        indptr = offsets(counts)
        for i, part in enumerate(parts):
            at, pages = torch.arange(part.keys), torch.tensor(order[indptr[i] : indptr[i + 1]])
            rows = pool.keys[starts[part.request] :][: part.keys]
            cache[pages[at // page_size].to(device), at.to(device) % page_size] = rows
        wrapper = quire.mla.BatchMLAPagedAttentionWrapper(workspace(device), deterministic=True)
        lens = torch.tensor([part.keys for part in parts], dtype=torch.int32)
        wrapper.plan(
            offsets([part.rows for part in parts]), indptr, torch.tensor(order[: sum(counts)], dtype=torch.int32), lens,
            16, 512, 64, page_size, True, 192**-0.5, dtype, dtype,
        )  # fmt: skip
        q = torch.cat([pool.query[starts[p.request] + p.begin : starts[p.request] + p.end] for p in parts])
        return wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)

    lens = Pool((200, 90, 5), "cpu", torch.float32, head_dim=8)
    rng = random.Random(0)
    alone = [attend([part], rng, 64) for part in lens.wholes()]
    for _ in range(8):
        parts = lens.chunks(rng)
        check(attend(parts, rng, rng.choice((1, 16, 64))), parts, alone, parts)


def bias(score: Any, q_idx: Any, kv_idx: Any, head: Any, qo_len: Any, kv_len: Any, bias: Any) -> Any:
    return score + bias[head] * (kv_idx - (q_idx + kv_len - qo_len))


BIAS = quire.Variant(bias, tensors={"bias": torch.float32})
HIDES = quire.Variant(mask=lambda kv_idx, head: kv_idx % 7 != head)


@pytest.mark.parametrize("variant", ["bias", "mask"])
def test_custom_variants(device, backend, variant):
    pool = Pool(LENS, device, torch.bfloat16)
    given = {"bias": torch.linspace(0.01, 0.1, 8).to(device)} if variant == "bias" else {}

    def attend(parts, rng, page_size):
        own = BIAS if variant == "bias" else HIDES
        return prefill(pool, parts, backend, rng, page_size, variant=own, **given)

    check_scenes(pool, attend, pool.chunks, 8)


def test_custom_masks_and_sinks(device, backend):
    """Each request has the bits of its own mask. A sink joins once, however many parts are merged."""
    pool = Pool(LENS, device, torch.bfloat16)
    source, sinks = torch.Generator().manual_seed(3), torch.linspace(-2, 2, 8, device=device)
    masks = [torch.rand(n, n, generator=source) < 0.5 for n in LENS]

    def attend(parts, rng, page_size):
        mask = torch.cat([masks[p.request][p.begin : p.end, : p.keys].flatten() for p in parts])
        return prefill(pool, parts, backend, rng, page_size, custom_mask=mask.to(device), causal=False, sinks=sinks)

    check_scenes(pool, attend, lambda rng: pool.chunks(rng, causal=False), 8)


def test_a_decode_beside_a_prompt_that_grows(device, backend):
    """vLLM#51902: there the bits of a decode change as its neighbour's prompt grows from 9 to 10 tokens, because tiles
    are chosen by the mean number of rows.
    """
    pool = Pool((3000, 200), device, torch.bfloat16, heads=(32, 4), head_dim=128)
    one, rng = Part(0, 2999, 3000, 3000), random.Random(0)
    alone = prefill(pool, [one], backend, rng, 16)
    for rows in (1, 2, 8, 9, 10, 11, 64, 200):
        got = prefill(pool, [one, Part(1, 0, rows, rows)], backend, rng, 16)
        assert all(torch.equal(a[:1], b) for a, b in zip(got, alone, strict=True)), rows


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_in_words_of_flash_attention(device, switch, monkeypatch):
    """FlashAttention's functions, which have no such argument, do as the environment says."""
    monkeypatch.setenv(switch, "1")
    pool = Pool((3000, 200), device, torch.bfloat16, heads=(32, 4), head_dim=128)

    def attend(*parts: Part) -> Tensor:
        cache, indptr, pages, _ = pool.pages(parts, 16, random.Random(0))
        table = torch.zeros(len(parts), 188, dtype=torch.int32)
        for i in range(len(parts)):
            table[i, : indptr[i + 1] - indptr[i]] = pages[indptr[i] : indptr[i + 1]]
        lens = torch.tensor([part.keys for part in parts], dtype=torch.int32, device=device)
        out = flash_attn_varlen_func(
            pool.queries(parts), cache[:, 0], cache[:, 1], offsets([part.rows for part in parts]).to(device),
            seqused_k=lens, max_seqlen_q=max(part.rows for part in parts), max_seqlen_k=3000,
            block_table=table.to(device), causal=True, num_splits=0,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    one = Part(0, 2999, 3000, 3000)
    alone = attend(one)
    for rows in (1, 9, 10, 200):
        assert torch.equal(attend(one, Part(1, 0, rows, rows))[:1], alone), rows
    cache, _, pages, _ = pool.pages([one], 16, random.Random(1))
    seen = torch.tensor([3000], dtype=torch.int32, device=device)
    same = flash_attn_with_kvcache(
        pool.queries([one])[None], cache[:, 0], cache[:, 1], cache_seqlens=seen, block_table=pages[None].to(device)
    )
    assert torch.equal(same[0], alone)


def test_one_call_is_the_wrapper(device, dtype):
    """Chunks of single_prefill_with_kv_cache() have the bits of a wrapper's batch, and decodes those of the decode
    wrapper's.
    """
    pool, rng = Pool((700, 90), device, dtype), random.Random(0)
    whole = prefill(pool, pool.wholes(), "auto", rng, 16)
    for begin, end in ((0, 700), (699, 700), (100, 130)):
        q, k, v = pool.q[0][begin:end], pool.k[0][:end], pool.v[0][:end]
        got = quire.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True, deterministic=True)
        check(got, [Part(0, begin, end, end)], [whole], (begin, end))
    one = quire.single_decode_with_kv_cache(pool.q[0][-1], pool.k[0], pool.v[0], deterministic=True)
    steps = decode(pool, [Part(1, 89, 90, 90), Part(0, 699, 700, 700)], "auto", rng, 16)
    assert torch.equal(steps[0][1], one)


def test_prefill_beside_decode(device, dtype):
    """POD: both are what they are in wrappers of their own."""
    pool, rng = Pool((700, 90, 300), device, dtype), random.Random(0)
    steps = [Part(1, 89, 90, 90), Part(0, 699, 700, 700)]
    cache, *tables = pool.pages(steps, 16, rng)
    wrapper = quire.PODWithPagedKVCacheWrapper(workspace(device), deterministic=True)
    wrapper.plan(*tables, *pool.heads, pool.head_dim, 16, q_data_type=dtype)
    got = wrapper.run(pool.q[2], pool.k[2], pool.v[2], pool.queries(steps), cache, causal_p=True)
    want = prefill(pool, [Part(2, 0, 300, 300)], "auto", rng, 16), decode(pool, steps[::-1], "auto", rng, 64)
    assert torch.equal(got[0], want[0][0]) and torch.equal(got[1].flip(0), want[1][0])


def levels_of(pool: Pool, shared: int, page_size: int) -> tuple[Tensor, list[list[Tensor]], list[Part]]:
    """Two requests that begin with the keys of request 0, as two levels: cache, tables, and the rows of each."""
    cache, indptr, pages, last = pool.pages(pool.wholes(), page_size, random.Random(0))
    first = shared // page_size
    own = [pages[indptr[i] + first : indptr[i + 1]] for i in (0, 1)]
    copied = pages[indptr[1] : indptr[1] + first]
    cache[copied] = cache[pages[:first]]
    parts = [Part(i, pool.lens[i] - rows, pool.lens[i], pool.lens[i]) for i, rows in ((0, 5), (1, 7))]
    lens = [len(part) for part in own]
    full = torch.tensor([page_size], dtype=torch.int32)
    tables = [
        [offsets([12]), offsets([5, 7])], [offsets([first]), offsets(lens)], [pages[:first], torch.cat(own)],
        [full, last[:2]],
    ]  # fmt: skip
    return cache, tables, parts


def test_a_cascade_is_one_attention(device, dtype):
    pool = Pool((90, 101), device, dtype)
    cache, tables, parts = levels_of(pool, 64, 16)
    for tensors in (pool.k, pool.v):
        tensors[1][:64] = tensors[0][:64]
    want = prefill(pool, parts, "auto", random.Random(1), 16)
    built = 2, workspace(device)
    wrapper = quire.MultiLevelCascadeAttentionWrapper(*built, deterministic=True)
    wrapper.plan(*tables, *pool.heads, 64, 16, causal=True, q_data_type=dtype)
    assert torch.equal(wrapper.run(pool.queries(parts), cache), want[0])
    assert "one launch" in wrapper.explain() and "deterministic" in wrapper.explain()
    tables[3][0] = tables[3][0] - 1
    with pytest.raises(quire.UnsupportedError, match="level 0: expected last pages of 16 tokens"):
        wrapper.plan(*tables, *pool.heads, 64, 16, causal=True, q_data_type=dtype)


def test_replays_of_a_graph(device, backend):
    """plan() between replays: the bits are those of eager calls. On the CPU there is no graph, but the same plan()."""
    pool, rng = Pool(LENS, device, torch.bfloat16), random.Random(0)
    alone = [prefill(pool, [part], backend, rng, 16) for part in pool.wholes()]
    batch, rows, pages = len(LENS), sum(LENS), sum(-(-n // 16) for n in LENS) + 8
    sizes = {"qo_indptr_buf": batch + 1, "paged_kv_indptr_buf": batch + 1}
    sizes |= {"paged_kv_indices_buf": pages, "paged_kv_last_page_len_buf": batch}
    buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, backend=backend, deterministic=True, **buffers
    )
    q = torch.zeros(rows, *alone[0][0].shape[1:], dtype=torch.bfloat16, device=device)
    cache = torch.zeros(pages, 2, 16, 2, 64, dtype=torch.bfloat16, device=device)
    out, graph = torch.zeros_like(q), None
    for step in range(6):
        parts = pool.wholes() if step == 0 else pool.chunks(rng)
        given = pool.queries(parts)
        made, indptr, indices, last = pool.pages(parts, 16, rng)
        q[: len(given)], cache[: len(made)] = given, made
        missing = batch - len(parts)
        lens = [*(part.rows for part in parts), *[0] * missing]
        indptr = torch.cat((indptr, indptr[-1:].expand(missing)))
        last = torch.cat((last, last.new_zeros(missing)))
        wrapper.plan(offsets(lens), indptr, indices, last, 8, 2, 64, 16, causal=True, q_data_type=torch.bfloat16)
        if device == "cpu":
            wrapper.run(q[: len(given)], cache, out=out[: len(given)])
        elif graph is None:
            wrapper.run(q, cache, out=out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                wrapper.run(q, cache, out=out)
            graph.replay()
        else:
            graph.replay()
        check((out, out), parts, alone, parts, lse=False)


# What decides and what is refused


def explained(**options: Any) -> str:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), **options)
    tables = offsets([2]), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    wrapper.plan(*tables, 8, 2, 64, 16, q_data_type=torch.float32)
    return wrapper.explain()


def test_explain_says_it():
    assert "deterministic" not in explained()
    assert "the bits of a request depend on that request alone" in explained(deterministic=True)


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches(switch, monkeypatch):
    monkeypatch.setenv(switch, "1")
    assert "deterministic" in explained() and "deterministic" not in explained(deterministic=False)
    monkeypatch.setenv("QUIRE_DETERMINISTIC", "0")
    assert "deterministic" not in explained() and "deterministic" in explained(deterministic=True)
    monkeypatch.setenv("QUIRE_DETERMINISTIC", "yes")
    with pytest.raises(quire.ValidationError, match="QUIRE_DETERMINISTIC: expected 0 or 1, got 'yes'"):
        explained()


def test_the_caller_may_say_where_splits_are():
    """As vLLM and SGLang do, whose numbers then hold."""
    pool, rng = Pool((700, 90), "cpu", torch.float32), random.Random(0)
    parts = pool.wholes()
    for plan in ({"fixed_split_size": 256}, {"disable_split_kv": True}):
        alone = [prefill(pool, [part], "auto", rng, 16, **plan) for part in parts]
        check(prefill(pool, parts[::-1], "auto", rng, 1, **plan), parts[::-1], alone, plan)
    with pytest.raises(quire.ValidationError, match="fixed_split_size: expected at least window_left=300"):
        prefill(pool, parts, "auto", rng, 16, fixed_split_size=256, window_left=300)


def test_what_sums_parts_is_refused(monkeypatch):
    monkeypatch.setenv("QUIRE_DETERMINISTIC", "1")
    offs = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(quire.UnsupportedError, match="BatchPrefillWithPrefixWrapper: expected no deterministic=True"):
        quire.BatchPrefillWithPrefixWrapper(workspace("cpu")).plan(offs, offs, 8, 2, 64)
    shared = quire.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace("cpu"))
    indices, last = torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    shared.begin_forward(torch.tensor([0, 1], dtype=torch.int32), indices, last, 8, 2, 64, 16, data_type=torch.float32)
    q, k, cache = torch.zeros(1, 8, 64), torch.zeros(5, 2, 64), torch.zeros(1, 2, 16, 2, 64)
    with pytest.raises(quire.UnsupportedError, match="put shared keys into pages"):
        shared.forward(q, k, k, cache)
    with pytest.raises(quire.UnsupportedError, match="put shared keys into pages"):
        quire.cascade.batch_decode_with_shared_prefix_padded_kv_cache(q, k, k, k[None], k[None])
    pool = Pool((90, 101), "cpu", torch.float32)
    _, tables, _ = levels_of(pool, 64, 16)
    hides = quire.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), variant=HIDES)
    with pytest.raises(quire.UnsupportedError, match="MultiLevelCascadeAttentionWrapper: expected no deterministic"):
        hides.plan(*tables, 8, 2, 64, 16, q_data_type=torch.float32)


def problems(target: str, **changes: Any) -> list[AttentionProblem]:
    """The same with the row counts of different batches."""
    kv, bf16 = dtype_of(changes.pop("kv", "bfloat16"), "k"), dtype_of("bfloat16", "q")
    shape = {"head_dim_qk": 128, "head_dim_vo": 128, "page_size": 16, "mask": MaskMode.CAUSAL, "group_size": 8}
    shape |= {"window": False, "soft_cap": False, "uniform": False, "fixed_split_size": OWN_SPLITS, **changes}
    return [AttentionProblem(target, bf16, kv, bf16, rows=rows, **shape) for rows in (1, 16, 48, 128, 1024, 4096)]


PROBLEMS: tuple[dict[str, Any], ...] = (
    {}, {"window": True}, {"soft_cap": True}, {"kv": "float8_e4m3fn"}, {"head_dim_qk": 64, "head_dim_vo": 64},
    {"head_dim_qk": 64, "head_dim_vo": 64, "kv": "float8_e4m3fn"},
    {"head_dim_qk": 256, "head_dim_vo": 256}, {"head_dim_qk": 192}, {"head_dim_qk": 512, "head_dim_vo": 512},
    {"mask": MaskMode.CUSTOM}, {"pos_encoding": PosEncodingMode.ROPE_LLAMA}, {"page_size": 1},
    {"head_dim_qk": 576, "head_dim_vo": 512, "is_mla": True, "group_size": 16},
    {"head_dim_qk": 576, "head_dim_vo": 512, "is_mla": True, "group_size": 128, "page_size": 64},
    {"head_dim_qk": 576, "head_dim_vo": 512, "is_mla": True, "tile_scales": True, "kv": "float8_e4m3fn"},
)  # fmt: skip
TARGETS = "sm80", "sm86", "sm90a", "sm100a", "sm120a", "x86-64-v4-bf16", "x86-64-v3"


def orders_of_sums(given: Sequence[AttentionProblem]) -> set[tuple[Any, ...]]:
    """Whatever decides the order of a row's sum, () for splits that are no whole KV tiles. fa2's row tiles may have any
    height, as all of its heights have one KV tile and one order of sums.
    """
    found: set[tuple[Any, ...]] = set()
    for problem in given:
        try:
            kernel, key = (decision := decide(problem)).kernel, decision.key
        except quire.ValidationError:
            found.add(())
            continue
        rows = 0 if kernel.name == "attention_fa2" else key.tile_rows
        tile = kernel.tile(key)
        found.add((kernel.name, tile.kv, rows, *kernel.splits(problem, tile, -1).items()))
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
def test_row_counts_choose_no_kernel(target, changes):
    assert len(orders_of_sums(problems(target, **changes))) == 1


@pytest.mark.parametrize("split", [OWN_SPLITS, -1, 1792, 2048])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
def test_page_sizes_choose_no_kernel(target, changes, split):
    """Ragged, gathered or copied in boxes; latents are in pages."""
    sizes = (1, 3, 16, 64) if "is_mla" in changes else (0, 1, 3, 16, 64)
    given = [p for size in sizes for p in problems(target, **{**changes, "page_size": size, "fixed_split_size": split})]
    assert len(orders_of_sums(given)) == 1


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_own_splits_are_whole_kv_tiles(kernel):
    target = "sm90a" if kernel.on_cuda else "x86-64-v4-bf16"
    dims = {"head_dim_qk": 576, "head_dim_vo": 512, "is_mla": True} if kernel.is_mla else {}
    for more in ({}, {"head_dim_qk": 192}, {"head_dim_qk": 256, "head_dim_vo": 256}):
        problem = problems(target, **(dims or more))[0]
        for tile in kernel.tiles(problem):
            for window in (-1, 100, 16384, 100_000):
                splits = kernel.splits(problem, tile, window)
                assert splits["fixed_split_size"] % tile.kv == 0
                assert splits["fixed_split_size"] >= window or "splits_by_length" in splits


@pytest.mark.parametrize("rows", [1, 4096])
def test_rope_of_prefill_is_always_or_never_ahead_of_the_kernel(rows):
    """On Hopper: not as the number of rows says. Decode rotates in its kernel."""
    types = Types(*[dtype_of("bfloat16", "q")] * 3)
    logits = logits_options(128, None, -1, None, "ROPE_LLAMA")
    options = PlanOptions(8, 1, 128, 128, types, logits, True, 16, deterministic=True).settled()
    (problem,) = (p for p in problems("sm90a", pos_encoding=PosEncodingMode.ROPE_LLAMA) if p.rows == rows)
    assert may_pay(options, decide(problem), "auto") and not may_pay(options, decide(problem), "quire:fa2")
    steps = replace(problem, uniform=True, rows=8)
    assert not may_pay(options._replace(decodes=True), decide(steps), "auto")


def copying(
    rows: int = 4096, q: str = "bfloat16", kv: str = "float8_e4m3fn", split: int = OWN_SPLITS, **changes: Any
) -> tuple[Any, ...]:
    """What upcast.may_pay() is asked on Hopper."""
    types = Types(dtype_of(q, "q"), dtype_of(kv, "k"), dtype_of(q, "o"))
    (given,) = (p for p in problems("sm90a", kv=kv, fixed_split_size=split, **changes) if p.rows == rows)
    decision = decide(replace(given, q=types.q, o=types.o))
    logits = logits_options(128, None, -1, None, "NONE")
    options = PlanOptions(8, 1, given.head_dim_qk, given.head_dim_vo, types, logits, True, given.page_size, split)
    return options, decision, "auto"


@pytest.mark.parametrize("q", ["float16", "bfloat16"])
@pytest.mark.parametrize("split", [OWN_SPLITS, -1, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_widened_ahead_have_the_same_order_of_sums(q, split, page_size, head_dim):
    asked = copying(q=q, split=split, page_size=page_size, head_dim_qk=head_dim, head_dim_vo=head_dim)
    (narrow, wide), kernel = (asked[1], asked[1].over_copies), asked[1].kernel
    assert upcast.may_pay(*asked) and wide.kernel is kernel and wide.key.kv.slug == "fp16"
    assert (wide.key.q, wide.key.o, wide.key.tile_rows) == (narrow.key.q, narrow.key.o, narrow.key.tile_rows)
    tiles = [kernel.tile(decision.key) for decision in (narrow, wide)]
    assert tiles[0] == tiles[1] and wide.key.page_size == (0 if page_size == 1 else 16)
    splits = [kernel.splits(d.problem, tile, -1) for d, tile in zip((narrow, wide), tiles, strict=True)]
    assert splits[0] == splits[1]


def test_keys_are_widened_in_the_kernel_where_sums_would_differ():
    for changes in ({"rows": 1024}, {"soft_cap": True}, {"pos_encoding": PosEncodingMode.ALIBI},
                    {"head_dim_qk": 256, "head_dim_vo": 256}, {"mask": MaskMode.CUSTOM}):  # fmt: skip
        assert not upcast.may_pay(*copying(**changes)), changes


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tokens_put_side_by_side_have_the_same_order_of_sums(head_dim):
    shape = {"kv": "bfloat16", "head_dim_qk": head_dim, "head_dim_vo": head_dim, "page_size": 1}
    asked = copying(**shape)
    assert upcast.may_pay(*asked) and asked[1].over_copies.key == replace(asked[1].key, page_size=0)
    assert len(orders_of_sums([asked[1].problem, asked[1].over_copies.problem])) == 1
    for changes in ({"page_size": 16}, {"page_size": 3}, {"split": 0}, {"rows": 1024}, {"mask": MaskMode.CUSTOM}):
        assert not upcast.may_pay(*copying(**{**shape, **changes})), changes


def test_a_wrapper_of_latents_without_a_plan(device):
    """One row a request: it is not divided, with or without neighbours."""
    pool = Latents((1, 1), (200, 90), dtype=torch.bfloat16, device=device)
    pages = pool.paged(64)
    table, lens = pages.table(device), torch.tensor([200, 90], dtype=torch.int32, device=device)
    wrapper = quire.mla.BatchMLAPagedAttentionWrapper(workspace(device), deterministic=True)

    def attend(at: slice) -> Tensor:
        given = pool.query[at, :, :512], pool.query[at, :, 512:], pages.ckv, pages.kpe
        return wrapper.run(*given, kv_len=lens[at], page_table=table[at])

    assert torch.equal(attend(slice(0, 2))[1:], attend(slice(1, 2)))


def test_a_wrapper_for_graphs_has_room_for_few_splits_of_each_request():
    """However many tokens its buffers could hold."""
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace("cpu"), *(torch.zeros(n, dtype=torch.int32) for n in (3, 1 << 20, 2)), deterministic=True
    )
    indptr, last = offsets([300, 1]), torch.tensor([16, 1], dtype=torch.int32)
    arguments = indptr, torch.arange(301, dtype=torch.int32), last, 8, 2, 64, 16
    assert wrapper.workspace_size(*arguments, q_data_type=torch.float32)[0] <= 64 << 20


@pytest.mark.slow
def test_many_requests_among_many_neighbours(device, backend):
    rng = random.Random(7)
    pool = Pool([rng.randint(1, 400) for _ in range(200)], device, torch.bfloat16)
    check_scenes(pool, lambda *at: prefill(pool, at[0], backend, *at[1:]), pool.chunks, 40)
