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
from quire.runtime.explanation import Explanation
from quire.runtime.work import Placed

QO, KV = [1, 1, 38, 1, 0, 7], [3000, 100, 90, 5800, 64, 3]
HEADS = (8, 2)


@pytest.fixture(params=[1, 3, 40], ids="threads-{}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of the host, which are as many lines of a picture."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def offsets(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


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
    with pytest.raises(quire.ValidationError, match="got MultiLevelCascadeAttentionWrapper"):
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


@pytest.mark.parametrize(
    "options", [(), ("--page-size", "16"), ("--page-size", "16", "--qo-lens", "5,1,1", "--causal")], ids=len
)
def test_the_program_writes_a_page(options: tuple[str, ...], tmp_path, capsys) -> None:
    page = tmp_path / "page.html"
    quire.viz.main(["--out", str(page), "--kv-lens", "700,0,30", "--device", "cpu", *options])
    assert "attention_cpu" in capsys.readouterr().out and "</html>" in page.read_text()


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
