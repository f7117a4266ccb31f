"""Pictures of plans show what the scheduler decided: every KV tile once, and the parts that are merged."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
import torch

import quire
from problems import offsets, workspace
from public_calls import ints
from quire.engine.inspection import Explanation, Placed
from targets import Target, targets

QO, KV = [1, 1, 38, 1, 0, 7], [3000, 100, 90, 5800, 64, 3]
HEADS = (8, 2)


@pytest.fixture(params=[1, 3, 40], ids="threads-{}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of the host, which are as many lines of a picture."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def planned(qo: list[int] = QO, kv: list[int] = KV, **options: object) -> quire.BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 26, dtype=torch.uint8))
    options = {"causal": True, "q_data_type": torch.float32, **options}
    wrapper.plan(offsets(qo), offsets(kv), *HEADS, 64, **options)
    return wrapper


def visible(qo: int, kv: int, rows: tuple[int, int], window: int) -> range:
    """Keys that some row sees, counted without the scheduler."""
    group = HEADS[0] // HEADS[1]
    last = min(kv, (rows[1] - 1) // group + kv - qo + 1)
    first = 0 if window < 0 else max(0, rows[0] // group + kv - qo - window)
    return range(first, max(first, last))


@pytest.mark.parametrize(
    ("options", "window"),
    [({}, -1), ({"window_left": 200}, 200), ({"fixed_split_size": 512}, -1), ({"disable_split_kv": True}, -1)],
    ids=["partitions", "window", "splits", "whole"],
)
def test_each_key_is_computed_once(options: dict[str, object], window: int, threads: int) -> None:
    work = [placed.work for placed in quire.viz.schedule(planned(**options)).work]
    for request, (qo, kv) in enumerate(zip(QO, KV, strict=True)):
        for head in range(HEADS[1]):
            own = [w for w in work if (w.request, w.kv_head) == (request, head)]
            assert {row for w in own for row in range(*w.rows)} == set(range(qo * HEADS[0] // HEADS[1]))
            for rows in {w.rows for w in own}:
                seen = Counter(key for w in own if w.rows == rows for key in range(*w.keys))
                assert max(seen.values(), default=1) == 1
                assert set(visible(qo, kv, rows, window)) <= seen.keys()


def test_merge_groups_have_the_parts_of_one_row_tile(threads: int) -> None:
    picture = quire.viz.schedule(planned())
    groups: dict[int, list[Placed]] = {}
    for placed in picture.work:
        groups.setdefault(placed.work.group, []).append(placed)
    whole = groups.pop(-1, [])
    assert len({(p.work.request, p.work.kv_head, p.work.rows) for p in whole}) == len(whole)
    assert bool(groups) == (threads > 1)
    for parts in groups.values():
        assert len(parts) > 1 and len({p.line for p in parts}) == len(parts)
        assert len({(p.work.request, p.work.kv_head, p.work.rows) for p in parts}) == 1
        keys = sorted(p.work.keys for p in parts)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(keys))


@pytest.mark.parametrize("options", [{}, {"disable_split_kv": True}])
def test_a_line_does_one_thing_at_a_time(options: dict[str, object], threads: int) -> None:
    picture = quire.viz.schedule(planned(**options))
    assert max(placed.line for placed in picture.work) < threads
    for line in range(threads):
        own = sorted((p.begin, p.end) for p in picture.work if p.line == line)
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(own))
    assert 0 < picture.balance <= 1
    assert options or picture.balance > 0.8


def test_the_picture_is_well_formed_and_has_each_work_tile(threads: int) -> None:
    picture = quire.viz.schedule(planned())
    tree = ElementTree.fromstring(picture.svg)
    titles = [title.text for title in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 1 + len(picture.work)
    assert any("request 3, KV head 1" in (title or "") for title in titles)
    assert "http" not in picture.html.replace("http://www.w3.org/2000/svg", ""), "loads nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 200}, {"fixed_split_size": 512}, {"disable_split_kv": True}, {"causal": False}],
    ids=["partitions", "window", "splits", "whole", "full"],
)
def test_a_timeline_has_each_work_tile_once_one_after_the_other(options: dict[str, object], threads: int) -> None:
    wrapper = planned(**options)
    q, k, v = torch.randn(sum(QO), HEADS[0], 64), *torch.randn(2, sum(KV), HEADS[1], 64)
    measured = quire.viz.timeline(wrapper, q, k, v)
    assert sorted(p.work for p in measured.work) == sorted(p.work for p in quire.viz.schedule(wrapper).work)
    assert min(p.begin for p in measured.work) == 0 and all(p.begin <= p.end for p in measured.work)
    assert max(p.end for p in measured.work) > 1, "microseconds"
    for line in {p.line for p in measured.work}:
        own = sorted((p.begin, p.end) for p in measured.work if p.line == line)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))
    assert 0 < measured.balance <= 1 and "time, in µs" in measured.svg


@pytest.mark.slow
@pytest.mark.parametrize("target", targets(), ids=str)
@pytest.mark.parametrize("qo", [[1] * 6, [3, 1, 2, 4, 0, 5], [1, 700, 90, 1, 64, 3]], ids=["decode", "few", "many"])
def test_a_timeline_of_each_kernel(target: Target, qo: list[int]) -> None:
    if target.backend == "quire:decode" and max(qo) > 16:
        pytest.skip("its row tiles have 64 rows")
    kv, dtype = [3000, 900, 90, 5800, 64, 3], target.dtypes[-1]
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(workspace(target.device), backend=target.backend)
    pages = [-(-n // 16) for n in kv]
    last = torch.tensor([(n - 1) % 16 + 1 for n in kv], dtype=torch.int32)
    table = offsets(pages), torch.randperm(sum(pages)).int(), last
    wrapper.plan(offsets(qo), *table, *HEADS, 128, 16, causal=max(qo) > 1, q_data_type=dtype)
    q = torch.randn(sum(qo), HEADS[0], 128, dtype=dtype, device=target.device)
    cache = torch.randn(sum(pages), 2, 16, HEADS[1], 128, dtype=dtype, device=target.device)
    expected, out = wrapper.run(q, cache), torch.empty_like(q)
    measured = quire.viz.timeline(wrapper, q, cache, out=out)
    assert torch.equal(out, expected)
    assert sorted(p.work for p in measured.work) == sorted(p.work for p in quire.viz.schedule(wrapper).work)
    for line in {p.line for p in measured.work}:
        own = sorted((p.begin, p.end) for p in measured.work if p.line == line)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(own))


def test_a_timeline_of_few_rows_divides_the_time_of_heads_side_by_side() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    wrapper, heads = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 26, dtype=torch.uint8)), (16, 16)
    lens = [900] * 8
    wrapper.plan(offsets([1] * 8), offsets(lens), *heads, 64, q_data_type=torch.float32)
    q, k, v = torch.randn(8, 16, 64), *torch.randn(2, sum(lens), 16, 64)
    work = quire.viz.timeline(wrapper, q, k, v).work
    torch.set_num_threads(before)
    assert len(work) == 128 and all(p.begin < p.end for p in work) and {p.line for p in work} == {0}


def test_a_timeline_leaves_the_plan_and_its_results_alone() -> None:
    wrapper = planned()
    tensors = torch.randn(sum(QO), HEADS[0], 64), *torch.randn(2, sum(KV), HEADS[1], 64)
    expected, slug, out = wrapper.run(*tensors), wrapper._attention.decision.key.slug, torch.empty_like(tensors[0])
    quire.viz.timeline(wrapper, *tensors, out=out)
    assert torch.equal(out, expected) and torch.equal(wrapper.run(*tensors), expected)
    assert wrapper._attention.decision.key.slug == slug and "timed" not in slug


def test_a_timeline_needs_a_kernel_that_notes_times() -> None:
    variant = quire.Variant(score=lambda score: score * 2)
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), variant=variant)
    wrapper.plan(offsets([5]), offsets([5]), 2, 2, 64, q_data_type=torch.float32)
    with pytest.raises(quire.UnsupportedError, match="custom variants cannot be timed"):
        quire.viz.timeline(wrapper, *torch.randn(3, 5, 2, 64))
    latents = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    latents.plan(
        offsets([1]), offsets([1]), torch.zeros(1).int(), torch.tensor([5]), 2, 512, 64, 16, True, 0.1, torch.float32,
        torch.float32,
    )  # fmt: skip
    cache = torch.randn(1, 16, 576)
    with pytest.raises(quire.UnsupportedError, match="does not note when"):
        quire.viz.timeline(latents, *torch.randn(1, 2, 576).split([512, 64], -1), *cache.split([512, 64], -1))
    with pytest.raises(quire.PlanError, match="plan"):
        quire.viz.timeline(quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8)))


def test_a_cascade_has_each_key_of_each_node_once(threads: int) -> None:
    """Three levels: all requests, then two and three of them, then each by itself."""
    rows = [1, 1, 7, 2, 1]
    groups, pages, last = [ints(0, 12), ints(0, 9, 12), offsets(rows)], [[40], [9, 0], [1, 1, 20, 1, 3]], [5, 16]
    cascade = quire.MultiLevelCascadeAttentionWrapper(3, torch.empty(1 << 26, dtype=torch.uint8))
    cascade.plan(
        groups, [offsets(of_level) for of_level in pages], [torch.arange(sum(n)).int() for n in pages],
        [ints(5), ints(16, 0), ints(7, 16, 2, 1, 3)], *HEADS, 64, 16, causal=True, q_data_type=torch.float32,
    )  # fmt: skip
    picture = quire.viz.schedule(cascade)
    keys = {-1: 39 * 16 + last[0], -2: 9 * 16, 0: 7, 1: 16, 2: 19 * 16 + 2, 3: 1, 4: 35}
    queries = {-1: 12, -2: 9, **dict(enumerate(rows))}
    assert {p.work.request for p in picture.work} == keys.keys()
    for node, head in itertools.product(keys, range(HEADS[1])):
        own = [p.work for p in picture.work if (p.work.request, p.work.kv_head) == (node, head)]
        assert {row for w in own for row in range(*w.rows)} == set(range(4 * queries[node]))
        for tile in {w.rows for w in own}:
            seen = Counter(key for w in own if w.rows == tile for key in range(*w.keys))
            assert set(seen) == set(range(keys[node])) and max(seen.values()) == 1
    assert "Grey" in picture.svg and "shared node 1, KV head 0" in picture.svg and ElementTree.fromstring(picture.svg)


@pytest.mark.slow
def test_shared_prefixes_are_drawn_and_their_times_refused() -> None:
    wrapper = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 26, dtype=torch.uint8))
    pages = torch.cat([torch.tensor([*range(200), 200 + i]) for i in range(64)]).int()
    tables = torch.arange(65).int() * 201, pages, torch.full((64,), 5).int()
    wrapper.plan(*tables, *HEADS, 64, 16, q_data_type=torch.float32, shared_prefix="auto")
    work = [placed.work for placed in quire.viz.schedule(wrapper).work]
    assert {w.request for w in work} == {-1, *range(64)}
    assert sum(w.keys[1] - w.keys[0] for w in work if w.request >= 0) == 64 * 5 * HEADS[1]
    with pytest.raises(quire.UnsupportedError, match="timeline: expected a plan without shared keys"):
        quire.viz.timeline(wrapper, torch.randn(64, HEADS[0], 64), torch.randn(264, 2, 16, HEADS[1], 64))


def test_graphs_of_cuda_and_empty_batches_are_drawn() -> None:
    assert quire.viz.schedule(planned([0], [0])).work == []
    assert "<svg" in quire.viz.schedule(planned([0], [0])).svg
    buffers = torch.zeros(3, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    wrapper = quire.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 22, dtype=torch.uint8), *buffers)
    last = torch.tensor([16, 3], dtype=torch.int32)
    wrapper.plan(offsets([1, 3]), torch.arange(4).int(), last, *HEADS, 64, 16, q_data_type=torch.float32)
    keys = [(p.work.request, p.work.keys) for p in quire.viz.schedule(wrapper).work if p.work.kv_head == 0]
    assert {request for request, _ in keys} == {0, 1} and max(end for _, (_, end) in keys) == 35


def test_a_picture_needs_a_plan_that_fits() -> None:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    with pytest.raises(quire.PlanError, match="plan"):
        quire.viz.schedule(wrapper)
    with pytest.raises(quire.ValidationError, match="got function"):
        quire.viz.schedule(quire.single_prefill_with_kv_cache)
    with pytest.raises(quire.ValidationError, match="levels are one launch, got one apart: not planned"):
        quire.viz.schedule(quire.MultiLevelCascadeAttentionWrapper(1, torch.empty(1 << 20, dtype=torch.uint8)))
    with pytest.raises(quire.PlanError, match="plan"):
        quire.viz.schedule(quire.BatchAttention(device="cpu"))
    with pytest.raises(quire.ValidationError, match="at most 20000 work tiles"):
        quire.viz.schedule(planned([1] * 10001, [1] * 10001))


def test_explain_is_text_a_table_and_html() -> None:
    said = planned().explain()
    assert isinstance(said, Explanation) and isinstance(said, str)
    assert "6 requests, 48 query tokens, 9057 keys" in said
    assert "┃ kernel" in repr(said) and "attention_cpu" in repr(said)
    cells = [cell.text for cell in ElementTree.fromstring(said._repr_html_()).iter("td")]
    assert "chosen" in cells and "6 requests, 48 query tokens, 9057 keys" in cells


def test_repr_of_a_wrapper_says_what_it_has() -> None:
    wrapper = quire.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "HND")
    assert repr(wrapper) == "<BatchPrefillWithRaggedKVCacheWrapper on cpu, HND, not planned>"
    assert "planned: attention_cpu." in repr(planned())


def test_explain_names_the_mode() -> None:
    assert "divided at multiples of 512 keys" in planned(fixed_split_size=512).explain()
    assert "whole row tiles" in planned(disable_split_kv=True).explain()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "options", [(), ("--page-size", "16"), ("--page-size", "16", "--qo-lens", "5,1,1", "--causal")], ids=len
)
def test_the_program_writes_a_page(options: tuple[str, ...], tmp_path, capsys) -> None:
    page = tmp_path / "page.html"
    quire.viz.main(["--out", str(page), "--kv-lens", "700,0,30", "--device", "cpu", *options])
    assert "attention_cpu" in capsys.readouterr().out and "</html>" in page.read_text()


def test_the_page_has_the_timeline_unless_told_otherwise(tmp_path) -> None:
    pages = tmp_path / "both.html", tmp_path / "schedule.html"
    for page, options in zip(pages, ([], ["--no-timeline"]), strict=True):
        quire.viz.main(["--out", str(page), "--kv-lens", "700,0,30", "--device", "cpu", *options])
    assert "measured" in pages[0].read_text() and "measured" not in pages[1].read_text()


@pytest.mark.slow
def test_the_program_runs_as_a_module(tmp_path) -> None:
    command = [sys.executable, "-W", "error", "-m", "quire.viz", "--device", "cpu"]
    subprocess.run([*command, "--out", str(tmp_path / "page.html")], check=True, timeout=300)
    assert (tmp_path / "page.html").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "32"], "expected query and KV heads such as 32/8"),
        (["--kv-lens", "1,x"], "expected whole numbers"),
        (["--qo-lens", "1,2"], "expected 1 or 8 lengths, got 2"),
        (["--heads", "3/2"], "num_qo_heads: expected a multiple"),
    ],
)
def test_the_program_says_what_is_wrong(arguments: list[str], said: str, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        quire.viz.main(["--out", str(tmp_path / "x.html"), "--device", "cpu", *arguments])
    assert said in capsys.readouterr().err
