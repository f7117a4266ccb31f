"""quire.distributed on gloo in two and three processes, against the oracle."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import oracle
import quire
import quire.distributed
from covering import covering
from problems import offsets, poisoned, workspace
from quire.distributed import ContextParallelDecode, Interleave, Ulysses, Zigzag, ZigzagPrefill, merge_over_ranks
from rank_processes import Processes, fixture_of_ranks, group_of

#: Some ranks have no token of a request of one or two; a rank of three has none of the whole second batch.
KV_LENS = ((133, 1, 17, 300), (1, 2), (64, 48, 96))


def any_two_meet(**columns: tuple[Any, ...]) -> pytest.MarkDecorator:
    """As many combinations of parameters as it takes for any two values to meet."""
    rows = [*product(*columns.values())]
    return pytest.mark.parametrize([*columns], [rows[place] for place in covering(rows, 2)], ids=str)


ranks = fixture_of_ranks([group_of(2), group_of(3, is_slow=True)])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def own_heads(num_heads: int) -> slice:
    part = num_heads // dist.get_world_size()
    return slice(part * dist.get_rank(), part * (dist.get_rank() + 1))


class Batch:
    """Queries, keys and values of a batch, equal on all ranks; and the oracle's answer."""

    def __init__(
        self, qo_lens: list[int], kv_lens: list[int], heads: tuple[int, int] = (12, 6),
        dtype: torch.dtype = torch.float32, **logits: object,
    ) -> None:  # fmt: skip
        self.qo_lens, self.kv_lens, self.heads, self.dtype = qo_lens, kv_lens, heads, dtype
        self.q = torch.randn(sum(qo_lens), heads[0], 64).to(dtype)
        self.k, self.v = torch.randn(2, sum(kv_lens), heads[1], 64).to(dtype)
        self.logits = logits
        call = self.q, self.k, self.v, oracle.indptr_of(qo_lens), oracle.indptr_of(kv_lens)
        self.ref = oracle.attention(*call, **logits)
        self.own = oracle.torch_error(*call, **logits)

    def check(self, o: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor | slice, heads: slice) -> None:
        oracle.assert_close(o, self.ref.o[rows, heads], self.own[rows, heads])
        magnitude = 40.0  # no logit is as large
        oracle.assert_lse_close(lse, self.ref.lse[rows, heads], magnitude=magnitude)

    def local_cache(self, own: Interleave, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pages of a rank, in random order, NaN where it has no token; indptr and indices."""
        positions = [torch.arange(n) for n in self.kv_lens]
        held = [begin + at[own.holds(at)] for begin, at in zip(oracle.indptr_of(self.kv_lens), positions, strict=False)]
        counts = [-(-len(rows) // page_size) for rows in held]
        cache = poisoned((sum(counts) + 2, 2, page_size, self.heads[1], 64), self.dtype, "cpu")
        indices = torch.randperm(sum(counts) + 2)[: sum(counts)].int()
        free = iter(indices.tolist())
        for rows in held:
            for part in rows.split(page_size) if len(rows) else ():
                cache[next(free), :, : len(part)] = torch.stack([self.k[part], self.v[part]])
        return cache, offsets(counts), indices


def decode(
    batch: Batch, q_len: int, interleave_size: int, exchange: str, sinks: torch.Tensor | None = None, *,
    of_run: dict[str, object] | None = None, **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    kind = quire.BatchDecodeWithPagedKVCacheWrapper if q_len == 1 else quire.BatchPrefillWithPagedKVCacheWrapper
    call = ContextParallelDecode(kind(workspace("cpu")), interleave_size=interleave_size, exchange=exchange)
    cache, indptr, indices = batch.local_cache(call.interleave, 16)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    call.plan(
        lens, indptr, indices, *batch.heads, 64, 16, q_len_per_req=q_len, q_data_type=batch.dtype, check_ranks=True,
        **options,
    )  # fmt: skip
    return call.run(batch.q, cache, sinks=sinks, return_lse=True, **(of_run or {}))


def check_decode(kv_lens: tuple[int, ...], interleave_size: int, exchange: str, dtype: torch.dtype) -> None:
    batch = Batch([1] * len(kv_lens), list(kv_lens), dtype=dtype)
    heads = own_heads(12) if exchange == "all_to_all" else slice(None)
    batch.check(*decode(batch, 1, interleave_size, exchange), slice(None), heads)


@pytest.mark.slow
@any_two_meet(kv_lens=KV_LENS, interleave_size=(1, 5, 16), exchange=("all_to_all", "all_gather"))
def test_decode(ranks: Processes, kv_lens: tuple[int, ...], interleave_size: int, exchange: str) -> None:
    ranks.run(check_decode, kv_lens, interleave_size, exchange, torch.float32)


@pytest.mark.slow
def test_decode_in_bfloat16(ranks: Processes) -> None:
    ranks.run(check_decode, KV_LENS[0], 16, "all_to_all", torch.bfloat16)


def check_several_queries(interleave_size: int) -> None:
    batch = Batch([3, 3, 3], [133, 3, 40], causal=True)
    batch.check(*decode(batch, 3, interleave_size, "all_to_all"), slice(None), own_heads(12))


@pytest.mark.parametrize("interleave_size", [1, 16])
def test_queries_see_no_later_token_of_any_rank(ranks: Processes, interleave_size: int) -> None:
    ranks.run(check_several_queries, interleave_size)


def check_options() -> None:
    sinks = torch.randn(12)
    batch = Batch([1, 1], [90, 1], sinks=sinks, soft_cap=3.0, sm_scale=0.3)
    found = decode(batch, 1, 1, "all_gather", sinks, logits_soft_cap=3.0, sm_scale=0.3)
    batch.check(*found, slice(None), slice(None))


def test_sinks_count_once(ranks: Processes) -> None:
    ranks.run(check_options)


def check_base_of_lse(q_len: int, exchange: str) -> None:
    batch = Batch([q_len] * 2, [90, q_len], causal=True)
    o, lse = decode(batch, q_len, 1, exchange, of_run={"lse_base": "ln"})
    batch.check(o, lse / math.log(2), slice(None), own_heads(12) if exchange == "all_to_all" else slice(None))
    for given, kind in (({"lse_base": "log10"}, quire.ValidationError), ({"lse_layout": "HN"}, quire.UnsupportedError)):
        with pytest.raises(kind, match=next(iter(given))):
            decode(batch, q_len, 1, exchange, of_run=given)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_an_lse_in_base_e(ranks: Processes, q_len: int, exchange: str) -> None:
    """Partial results are merged in base 2, whichever is asked for."""
    ranks.run(check_base_of_lse, q_len, exchange)


def check_scale_of_values(exchange: str) -> None:
    batch = Batch([1, 1, 1], [90, 5, 7], dtype=torch.float16, v_scale=1e5)
    o, lse = decode(batch, 1, 1, exchange, of_run={"v_scale": 1e5})
    batch.check(o, lse, slice(None), own_heads(12) if exchange == "all_to_all" else slice(None))
    assert o.isinf().any() and o.isfinite().any()


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_a_scale_of_values_multiplies_the_merged_result(ranks: Processes, exchange: str) -> None:
    """The ranks' results times it are beyond float16 and of either sign where the merged result is not."""
    ranks.run(check_scale_of_values, exchange)


def check_scales_of_heads(exchange: str) -> None:
    batch = Batch([1, 1], [90, 7], heads=(12, 6), dtype=torch.float16)
    e4m3 = torch.float8_e4m3fn
    q, k, v = (t.to(e4m3) for t in (batch.q, batch.k, batch.v))
    scales = torch.randn(6) * 1e5
    call = q.half(), k.half(), v.half(), oracle.indptr_of([1, 1]), oracle.indptr_of([90, 7])
    ref, own = oracle.attention(*call), oracle.torch_error(*call)
    by_head = scales.double().repeat_interleave(2)[:, None]
    batch.ref, batch.own = oracle.State(ref.o * by_head, ref.lse), own * by_head
    batch.q, batch.k, batch.v, batch.dtype = q, k, v, e4m3
    options = {"kv_data_type": e4m3, "o_data_type": torch.float16, "of_run": {"v_scale": scales}}
    heads = own_heads(12) if exchange == "all_to_all" else slice(None)
    batch.check(*decode(batch, 1, 1, exchange, **options), slice(None), heads)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_scales_of_heads_multiply_the_merged_result(ranks: Processes, exchange: str) -> None:
    ranks.run(check_scales_of_heads, exchange)


def check_decode_invariance() -> None:
    batch, options = Batch([1, 1, 1], [900, 70, 300]), {"fixed_split_size": 128}
    together, lse = decode(batch, 1, 16, "all_to_all", **options)
    for request, begin in enumerate(oracle.indptr_of(batch.kv_lens)[:-1]):
        alone = Batch([1], [batch.kv_lens[request]])
        rows = slice(begin, begin + alone.kv_lens[0])
        alone.q, alone.k, alone.v = batch.q[request : request + 1], batch.k[rows], batch.v[rows]
        o, one = decode(alone, 1, 16, "all_to_all", **options)
        assert torch.equal(o[0], together[request]) and torch.equal(one[0], lse[request])


def test_decode_is_batch_invariant_when_asked(ranks: Processes) -> None:
    ranks.run(check_decode_invariance)


def check_merge(exchange: str, natural: bool, head_dim: int) -> None:
    size, rank, scale = dist.get_world_size(), dist.get_rank(), math.log(2) if natural else 1.0
    v, s = torch.randn(7, size, 6, head_dim), 5 * torch.randn(7, size, 6)
    s[2], s[3, 1:], s[4, 0] = -math.inf, -math.inf, -math.inf  # keys nowhere, on rank 0 alone, on all others
    v[s == -math.inf] = math.nan  # what a rank without keys has must not count
    ref = oracle.merge_states(v, s)
    wide = torch.cat([v[:, rank], v[:, rank]], 2)[..., :head_dim]  # rows further apart than they are long
    o, lse = merge_over_ranks(wide, s[:, rank] * scale, exchange=exchange, natural_lse=natural)
    heads = own_heads(6) if exchange == "all_to_all" else slice(None)
    oracle.assert_close(o, ref.o[:, heads], ref.o[:, heads].float())
    oracle.assert_lse_close(lse / scale, ref.lse[:, heads], magnitude=20.0)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("natural", [False, True], ids=["base 2", "base e"])
@pytest.mark.parametrize("head_dim", [64, 5])
def test_merge(ranks: Processes, exchange: str, natural: bool, head_dim: int) -> None:
    ranks.run(check_merge, exchange, natural, head_dim)


def prefill(batch: Batch, page_size: int, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows, o and lse."""
    call = ZigzagPrefill(workspace("cpu"), page_size=page_size, num_gathers=options.pop("num_gathers", 1))
    sinks = options.pop("sinks", None)
    lens = torch.tensor(batch.kv_lens)
    call.plan(lens, *batch.heads, 64, q_data_type=batch.dtype, check_ranks=True, **options)
    tensors = (x[call.rows] for x in (batch.q, batch.k, batch.v))
    return call.rows, *call.run(*tensors, sinks=sinks, return_lse=True)


def check_prefill(lens: tuple[int, ...], page_size: int, dtype: torch.dtype, num_gathers: int = 1) -> None:
    batch = Batch(list(lens), list(lens), dtype=dtype, causal=True)
    rows, o, lse = prefill(batch, page_size, num_gathers=num_gathers)
    batch.check(o, lse, rows, slice(None))


@pytest.mark.slow
@any_two_meet(lens=((96,), (133, 1, 17, 0, 200), (3, 2), (0,)), page_size=(1, 8, 64), num_gathers=(1, 2))
def test_zigzag_prefill(ranks: Processes, lens: tuple[int, ...], page_size: int, num_gathers: int) -> None:
    ranks.run(check_prefill, lens, page_size, torch.float32, num_gathers)


def test_zigzag_prefill_in_bfloat16(ranks: Processes) -> None:
    ranks.run(check_prefill, (300, 41), 16, torch.bfloat16)


def check_prefill_options() -> None:
    sinks = torch.randn(12)
    batch = Batch([77, 30], [77, 30], causal=True, sinks=sinks, soft_cap=3.0, sm_scale=0.3)
    rows, o, lse = prefill(batch, 4, sinks=sinks, logits_soft_cap=3.0, sm_scale=0.3)
    batch.check(o, lse, rows, slice(None))


def test_zigzag_prefill_with_sinks_and_cap(ranks: Processes) -> None:
    ranks.run(check_prefill_options)


def check_prefill_invariance() -> None:
    lens, options = [150, 520, 33], {"fixed_split_size": 128}
    batch = Batch(lens, lens, causal=True)
    rows, together, _ = prefill(batch, 16, **options)
    for begin, length in zip(oracle.indptr_of(lens), lens, strict=False):
        alone, part = Batch([length], [length], causal=True), slice(begin, begin + length)
        alone.q, alone.k, alone.v = batch.q[part], batch.k[part], batch.v[part]
        _, o, _ = prefill(alone, 16, **options)
        assert torch.equal(o, together[(rows >= begin) & (rows < begin + length)])


def test_zigzag_prefill_is_batch_invariant_when_asked(ranks: Processes) -> None:
    ranks.run(check_prefill_invariance)


def test_zigzag_is_even_and_whole() -> None:
    for lens in ([4096], [1000, 64, 5, 0]):
        zigzag = Zigzag(torch.tensor(lens), 4, 8)
        rows = torch.cat([zigzag.rows(rank) for rank in range(4)])
        assert torch.equal(rows.sort().values, torch.arange(sum(lens)))
    pairs = [int((Zigzag(torch.tensor([4096]), 4, 8).rows(rank) + 1).sum()) for rank in range(4)]
    assert len(set(pairs)) == 1, "queries times keys"


def test_interleave() -> None:
    lens, positions = torch.arange(70), torch.arange(70)
    for interleave_size, size in ((1, 2), (5, 3), (16, 4)):
        owners = [Interleave(interleave_size, rank, size) for rank in range(size)]
        assert torch.equal(sum(own.lengths(lens) for own in owners), lens)
        for own in owners:
            held = positions[own.holds(positions)]
            assert torch.equal(own.places(held), torch.arange(len(held)))
            assert own.lengths(lens).tolist() == [int(own.holds(positions[:n]).sum()) for n in lens]


def check_ulysses(heads: tuple[int, int], counts: tuple[int, ...]) -> None:
    rank, lens = dist.get_rank(), [5, sum(counts) - 5]
    batch = Batch(lens, lens, heads, causal=True)
    begin = sum(counts[:rank])
    rows = slice(begin, begin + counts[rank])
    ulysses = Ulysses(counts)
    q, k, v = ulysses.to_heads(batch.q[rows], batch.k[rows], batch.v[rows])
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    wrapper.plan(offsets(lens), offsets(lens), q.shape[1], k.shape[1], 64, causal=True, q_data_type=batch.dtype)
    o, lse = wrapper.run(q, k, v, return_lse=True)
    batch.check(o, lse, slice(None), own_heads(heads[0]))
    whole = ulysses.to_tokens(o)
    oracle.assert_close(whole, batch.ref.o[rows], batch.own[rows])


@pytest.mark.parametrize("counts", [(20, 20, 20), (31, 0, 7)], ids=str)
@pytest.mark.parametrize("heads", [(12, 6), (6, 1)], ids=str)
def test_ulysses(ranks: Processes, heads: tuple[int, int], counts: tuple[int, ...]) -> None:
    size = len(ranks._processes)
    ranks.run(check_ulysses, heads, counts[:size])


def check_errors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    call = ContextParallelDecode(wrapper)
    none = torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(quire.ValidationError, match=rf"num_qo_heads: expected a multiple of {size}.*got 7.*all_gather"):
        call.plan(torch.tensor([5]), *none, 7, 7, 64, 16)
    with pytest.raises(quire.ValidationError, match="num_qo_heads: expected"):
        call.plan(torch.tensor([5]), *none, torch.tensor([6, 6]), 6, 64, 16)
    with pytest.raises(quire.ValidationError, match=r"seq_lens: expected the same .* 30 on rank|seq_lens.*rank 1"):
        call.plan(torch.tensor([30 + rank]), *none, 6, 6, 64, 16, check_ranks=True)
    with pytest.raises(quire.ValidationError, match="indptr: expected 1 pages for request 0, of whose tokens"):
        call.plan(torch.tensor([30]), *none, 6, 6, 64, 16)
    with pytest.raises(quire.ValidationError, match="indptr"):
        call.plan(torch.tensor([30, 3]), *none, 6, 6, 64, 16)
    with pytest.raises(quire.ValidationError, match="seq_lens: expected at least"):
        call.plan(torch.tensor([0]), *none, 6, 6, 64, 16)
    with pytest.raises(quire.ValidationError, match="exchange: expected one of all_to_all"):
        ContextParallelDecode(wrapper, exchange="ring").plan(torch.tensor([5]), *none, 6, 6, 64, 16)
    with pytest.raises(quire.UnsupportedError, match="peer_memory"):
        ContextParallelDecode(wrapper, exchange="peer_memory").plan(torch.tensor([5]), *none, 6, 6, 64, 16)
    with pytest.raises(quire.UnsupportedError, match=r"q_len_per_req: .*BatchPrefillWithPagedKVCacheWrapper"):
        pages = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        call.plan(torch.tensor([30]), *pages, 6, 6, 64, 16, q_len_per_req=2)
    prefill = ZigzagPrefill(workspace("cpu"))
    for refused in ({"window_left": 8}, {"pos_encoding_mode": "ALIBI"}, {"attention_chunk_size": 16}):
        with pytest.raises(quire.UnsupportedError, match=f"{next(iter(refused))}: ContextParallelDecode"):
            call.plan(torch.tensor([5]), *none, 6, 6, 64, 16, **refused)
        with pytest.raises(quire.UnsupportedError, match=f"{next(iter(refused))}: ZigzagPrefill"):
            prefill.plan(torch.tensor([5]), 6, 6, 64, **refused)
    for planless in (lambda: call.run(None, None), lambda: prefill.run(None, None, None)):
        with pytest.raises(quire.PlanError, match=r"call plan\(\) first"):
            planless()
    with pytest.raises(quire.ValidationError, match="num_gathers: expected 1 or 2, got 3"):
        ZigzagPrefill(workspace("cpu"), num_gathers=3)
    with pytest.raises(quire.ValidationError, match="num_gathers: expected 1 or 2, got tensor"):
        ZigzagPrefill(workspace("cpu"), num_gathers=torch.tensor([1, 2]))
    with pytest.raises(quire.ValidationError, match="exchange: expected one of all_gather, peer_memory, got 'ring'"):
        ZigzagPrefill(workspace("cpu"), exchange="ring")
    with pytest.raises(quire.UnsupportedError, match="exchange: 'peer_memory' is for GPUs"):
        ZigzagPrefill(workspace("cpu"), exchange="peer_memory")
    with pytest.raises(quire.ValidationError, match=r"page_size: expected the same.*rank 1"):
        ZigzagPrefill(workspace("cpu"), page_size=8 * (rank + 1)).plan(torch.tensor([5]), 6, 6, 64, check_ranks=True)
    prefill.plan(torch.tensor([999]), 6, 6, 64, q_data_type=torch.float32)
    with pytest.raises(quire.ValidationError, match="q: expected"):
        prefill.run(*torch.zeros(3, 999, 6, 64))
    with pytest.raises(quire.ValidationError, match=rf"token_counts: .* each of the {size} ranks"):
        Ulysses([4] * (size + 1))
    ulysses = Ulysses([4] * size)
    with pytest.raises(quire.ValidationError, match=r"tensors\[0\]: expected"):
        ulysses.to_heads(torch.zeros(5, 6, 64))
    with pytest.raises(quire.ValidationError, match=f"num_heads: expected a multiple of {size}"):
        ulysses.to_heads(torch.zeros(4, 7, 64))
    with pytest.raises(quire.ValidationError, match="lse: expected"):
        merge_over_ranks(torch.zeros(4, 6, 64), torch.zeros(4, 7))
    other = dist.new_group([1])
    if rank != 1:
        with pytest.raises(quire.ValidationError, match=r"group: .* member"):
            merge_over_ranks(torch.zeros(4, 6, 64), torch.zeros(4, 6), other)


def test_errors_name_what(ranks: Processes) -> None:
    ranks.run(check_errors)


def test_without_a_process_group() -> None:
    with pytest.raises(quire.PlanError, match="init_process_group"):
        merge_over_ranks(torch.zeros(4, 6, 64), torch.zeros(4, 6))
    with pytest.raises(quire.PlanError, match="init_process_group"):
        Ulysses([1])


def test_a_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(quire.UnsupportedError, match=r"built with torch\.distributed"):
        Ulysses([1])


def test_other_wrappers_are_refused(one_rank: None) -> None:
    with pytest.raises(quire.ValidationError, match=r"wrapper: expected .* got BatchPrefillWithRagged"):
        ContextParallelDecode(quire.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu")))


def test_one_rank_is_the_wrapper_itself(one_rank: None) -> None:
    batch = Batch([1, 1], [133, 1])
    for exchange in ("all_to_all", "all_gather"):
        batch.check(*decode(batch, 1, 1, exchange), slice(None), slice(None))


@pytest.mark.parametrize("module", [found.name for found in pkgutil.iter_modules(quire.distributed.__path__)])
def test_examples(one_rank: None, module: str) -> None:
    found = importlib.import_module(f"quire.distributed.{module}")
    report: list[str] = []
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(found, globs={"quire": quire, "torch": torch}):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_public_name_has_an_example() -> None:
    for name in quire.distributed.__all__:
        assert ">>>" in (getattr(quire.distributed, name).__doc__ or ""), name
