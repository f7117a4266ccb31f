"""`quire bench`: what a record has of batches, a regression that is found, and equal versions that are not blamed."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import quire
from quire import cli
from quire.cli import speed
from quire.cli.aot import read_manifest
from quire.cli.bench import Row, Worker, _judge, measure, order_bound, read_batches
from quire.engine.inspection import _grouped
from quire.engine.schedule import Lengths
from quire.errors import ValidationError

#: A version whose run() takes 5 % more processor time.
SLOWER = """
import time, torch, quire
def slower(cls):
    run = cls.run
    def slow(self, *given, **named):
        start = time.process_time()
        result = run(self, *given, **named)
        end = start + (time.process_time() - start) * {factor}
        while time.process_time() < end:
            pass
        return result
    cls.run = slow
for cls in (quire.BatchPrefillWithPagedKVCacheWrapper, quire.BatchPrefillWithRaggedKVCacheWrapper):
    slower(cls)
"""


@pytest.fixture(autouse=True)
def unrecorded() -> Iterator[None]:
    yield
    quire.record(None)


def offsets(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def attend(qo: list[int], kv: list[int], dtype: torch.dtype = torch.float32, **options: object) -> None:
    """A paged prefill on the CPU."""
    pages = [-(-n // 16) for n in kv]
    wrapper = quire.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 24, dtype=torch.uint8))
    last = torch.tensor([(n - 1) % 16 + 1 for n in kv], dtype=torch.int32)
    numbers = torch.arange(sum(pages), dtype=torch.int32)
    options = {"causal": True, "q_data_type": dtype, **options}
    wrapper.plan(offsets(qo), offsets(pages), numbers, last, 4, 2, 64, 16, **options)
    wrapper.run(torch.randn(sum(qo), 4, 64, dtype=dtype), torch.randn(sum(pages), 2, 16, 2, 64, dtype=dtype))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The record of a small server: a prompt, and decode."""
    path = tmp_path / "used.jsonl"
    quire.record(path)
    attend([200], [200])
    attend([1] * 6, [400, 300, 300, 200, 100, 17])
    quire.record(None)
    return path


def python_with(tmp_path: Path, factor: float) -> str:
    """An interpreter whose Quire takes `factor` of the time."""
    site = tmp_path / f"site{factor}"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOWER.format(factor=factor))
    script = tmp_path / f"python{factor}"
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_record_has_the_first_batch_of_each_size(tmp_path: Path) -> None:
    path = tmp_path / "used.jsonl"
    quire.record(path)
    attend([5, 3], [40, 33])
    attend([3, 5], [41, 33])  # as large
    attend([5, 3], [400, 330])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    batches = [line["batch"] for line in lines if "batch" in line]
    assert [batch["requests"] for batch in batches] == [[[1, 5, 40], [1, 3, 33]], [[1, 5, 400], [1, 3, 330]]]
    assert (batches[0]["num_qo_heads"], batches[0]["page_size"], batches[0]["mask"]) == (4, 16, "causal")
    assert read_manifest(path), "`quire warmup --manifest` still reads it"


def test_many_lengths_are_recorded_in_few_groups(tmp_path: Path) -> None:
    quire.record(tmp_path / "used.jsonl")
    lens = random.Random(0).sample(range(1, 2000), 300)
    attend([1] * 300, lens)
    ((batch, *_), _) = read_batches(tmp_path / "used.jsonl", 9)
    assert len(batch["requests"]) <= 64 and sum(group[0] for group in batch["requests"]) == 300
    tokens = sum(count * kv for count, _, kv in batch["requests"])
    assert abs(tokens / sum(lens) - 1) < 0.02


def test_what_cannot_be_replayed_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "used.jsonl"
    quire.record(path)
    attend([5], [40], causal=False, custom_mask=torch.ones(200, dtype=torch.bool))
    with pytest.raises(ValidationError, match="no batch that can be replayed"):
        read_batches(path, 9)
    attend([5], [40])
    batches, others = read_batches(path, 9)
    assert (len(batches), others) == (1, 1)


def test_nothing_is_recorded_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.attention.record", lambda *_: pytest.fail("it was described"))
    monkeypatch.setattr("quire.jit.recorded", set())
    attend([5], [41])


@pytest.mark.parametrize("text", ["", "{}", "nothing", '{"batch": {"requests": null}}'])
def test_a_record_without_batches_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "used.jsonl").write_text(text)
    with pytest.raises(ValidationError, match="bench --recorded"):
        read_batches(tmp_path / "used.jsonl", 9)


# --- statistics ------------------------------------------------------------------------------------------------------


def test_the_bound_holds_the_median() -> None:
    """In 99.8 of 100 cases: in 2,000 cases 4 may miss, and 15 are too many."""
    source, missed = random.Random(1), 0
    for _ in range(2000):
        values = sorted(source.lognormvariate(0, 0.1) for _ in range(25))
        missed += abs(values[12] - 1) > 2 * order_bound(values)
    assert missed < 15
    assert order_bound([1.0] * 9) == float("inf"), "9 values have no such bound"
    assert order_bound([1.0] * 30 + [100.0] * 3) == 0, "outliers do not count"


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.05, 1.051, 1.049] * 8, "slower"),
        ([1.02, 1.021, 1.019] * 8, "equal"),
        ([0.9, 0.91, 0.89] * 8, "faster"),
        ([0.8, 1.0, 1.2] * 8, "unclear"),
        ([1.05] * 5, "unclear"),
    ],
)
def test_verdicts(ratios: list[float], verdict: str, record: Path) -> None:
    (batch, *_), _ = read_batches(record, 1)
    row = Row(batch, ["", ""], ["", ""], [[[1.0, ratio] for ratio in ratios]], [{}, {}])
    assert _judge(row, {}, 0.03)["verdict"] == verdict
    generations = [[[1.0, 1.0]] * 20, [[1.0, 1.1]] * 20]
    assert _judge(Row(batch, ["", ""], ["", ""], generations, [{}, {}]), {}, 0.03)["verdict"] == "unclear"


# --- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "verdict"), [(1.05, "slower"), (1.0, "equal")])
def test_two_of_two(factor: float, verdict: str, record: Path, tmp_path: Path) -> None:
    """A made-up regression of 5 % is found, and equal versions are never said to be slower.

    On an idle machine each of ten was found. Beside other tests noise leaves some unclear, which is no wrong answer.
    """
    batches, _ = read_batches(record, 9)
    other = sys.executable if factor == 1.0 else python_with(tmp_path, factor)
    verdicts = []
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(python, 1)) for python in (sys.executable, other)]
        for worker in workers:
            worker.wait()
        for _ in range(2):
            rows = [Row(batch) for batch in batches]
            measure(rows, workers, 15, 0.015)
            verdicts.append([_judge(row, {}, 0.03)["verdict"] for row in rows])
    wrong = "slower" if factor == 1.0 else "faster"
    assert not any(wrong in found for found in verdicts), verdicts
    assert any(verdict in found for found in verdicts), verdicts


@pytest.mark.slow
def test_the_command_finds_the_slower_version_within_its_time(
    record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = python_with(tmp_path, 1.25)
    command = ["bench", "--recorded", str(record), "--json", "--limit", "6", "--seconds"]
    start = time.monotonic()
    assert cli.main([*command, "40", "--against", sys.executable, "--python", slow]) == 1
    assert time.monotonic() - start < 60 + 40, "40 s and the start of its processes, beside other tests"
    answer = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in answer["batches"]] == ["slower", "slower"]
    assert all(1.15 < row["ratio"] < 1.4 for row in answer["batches"])
    assert cli.main([*command, "40", "--against", slow]) == 0, "the other way round it is faster"


@pytest.mark.slow
def test_a_saved_result_can_be_compared_with(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, command = tmp_path / "result.json", ["bench", "--recorded", str(record), "--json", "--limit", "10"]
    assert cli.main([*command, "--seconds", "30", "--save", str(saved)]) == 0
    capsys.readouterr()
    slow = python_with(tmp_path, 1.6)
    assert cli.main([*command, "--seconds", "30", "--against", str(saved), "--python", slow]) == 1
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)["batches"]} == {"slower"}
    result = json.loads(saved.read_text())
    result["about"]["device"] = "another processor"
    saved.write_text(json.dumps(result))
    assert cli.main([*command, "--seconds", "9999", "--against", str(saved)]) == 2, "before anything is measured"
    assert "expected a result of this device" in capsys.readouterr().err


@pytest.mark.slow
def test_all_kinds_of_batches_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "used.jsonl"
    quire.record(path)
    attend([3], [50], torch.bfloat16, window_left=20)
    attend([3], [50], logits_soft_cap=30.0, disable_split_kv=True)
    attend([3], [50], pos_encoding_mode="ALIBI")
    k = torch.randn(50, 2, 64)
    quire.single_prefill_with_kv_cache(torch.randn(7, 4, 64), k, k, kv_layout="NHD")
    indptr, last = offsets([3, 1]), torch.tensor([5, 2], dtype=torch.int32)
    decode = quire.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 24, dtype=torch.uint8), "HND")
    decode.plan(indptr, torch.arange(4, dtype=torch.int32), last, 4, 2, 64, 16, kv_data_type=torch.float8_e4m3fn)
    decode.run(torch.randn(2, 4, 64).half(), torch.randn(4, 2, 2, 16, 64).to(torch.float8_e4m3fn))
    mla = quire.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 24, dtype=torch.uint8))
    mla.plan(offsets([1, 1]), indptr, torch.arange(4, dtype=torch.int32), torch.tensor([37, 2], dtype=torch.int32), 16,
             512, 64, 16, True, 0.1, torch.bfloat16, torch.bfloat16)  # fmt: skip
    quire.record(None)
    batches, others = read_batches(path, 99)
    assert (len(batches), others) == (6, 0)
    with Worker(sys.executable, 1) as worker:
        worker.wait()
        for batch in batches:
            answer = worker.ask(batch=batch)
            assert "error" not in answer, (answer, batch)
            recorded = [json.loads(line) for line in path.read_text().splitlines()]
            slug = next(line["slug"] for line in recorded if line.get("batch") == batch)
            assert answer["chosen"] == slug, "the same variant as in the server"


def test_a_wrong_interpreter_is_named(record: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["bench", "--recorded", str(record), "--against", "/nowhere/python"]) == 2
    assert "expected a Python interpreter, got /nowhere/python" in capsys.readouterr().err
    (tmp_path / "result.json").write_text("{}")
    assert cli.main(["bench", "--recorded", str(record), "--against", str(tmp_path / "result.json")]) == 2
    assert "expected a file of --save" in capsys.readouterr().err
    assert cli.main(["bench", "--recorded", str(record), "--against", "/bin/true"]) == 2
    assert "expected an interpreter that imports torch and quire" in capsys.readouterr().err


def test_lengths_that_a_device_knows_are_recorded(tmp_path: Path) -> None:
    """On the CPU they are on the host: the planner of a GPU's lengths is asked directly."""
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    of_tokens = Lengths(torch.tensor([50, 3], dtype=torch.int32), table, qo_len=2, page_size=16)
    assert _grouped(of_tokens) == [[1, 2, 50], [1, 2, 3]]
    assert _grouped(of_tokens._replace(kv_lens=None)) == [[2, 2, 64]]
    rows = of_tokens._replace(qo_indptr=torch.tensor([0, 3, 4], dtype=torch.int32), num_rows=4)
    assert _grouped(rows) == [[1, 3, 50], [1, 1, 3]]
    ragged = Lengths(None, None, 0, 0, qo_indptr=rows.qo_indptr, kv_indptr=torch.tensor([0, 9, 11]), num_tokens=11)
    assert _grouped(ragged) == [[1, 3, 9], [1, 1, 2]]


# --- without a record ------------------------------------------------------------------------------------------------

SMALL = speed.Row("a small decode", [1] * 3, [40] * 3, (4, 2), 64)


def test_libraries_beside_quire_are_timed_if_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(batch: speed.Batch) -> speed.Launch:
        return lambda: torch.zeros_like(batch.q)

    def broken(_: speed.Batch) -> speed.Launch:
        raise RuntimeError("no kernel\nat all")

    ours = [entry for entry in speed._LIBRARIES if entry[0] in ("quire", "torch")]
    others = [("torch", "Wrong", wrong), ("torch", "Broken", broken), ("no_such_package", "Absent", wrong)]
    monkeypatch.setattr(speed, "_LIBRARIES", (*ours, *others))
    measured = speed.measure(SMALL, torch.device("cpu"), torch.float32, 0.1)
    assert set(measured.seconds) == {"Quire", "torch"} and all(taken > 0 for taken in measured.seconds.values())
    assert measured.reasons["Broken"] == "RuntimeError: no kernel" and "differs by 1.000" in measured.reasons["Wrong"]
    assert measured.rival == ("torch", measured.seconds["torch"])


@pytest.mark.parametrize(("launch", "rounds"), [(10.0, 3), (5.0, 5), (1.0, 13), (0.01, speed._MOST_ROUNDS)])
def test_a_slow_machine_makes_fewer_rounds(launch: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes `launch` seconds of a clock that nothing else moves, and a row 12."""
    clock, taken = [0.0], []

    def timed(*_: object) -> float:
        clock[0] += launch
        taken.append(launch)
        return launch

    monkeypatch.setattr(speed, "_LIBRARIES", speed._LIBRARIES[:1])
    monkeypatch.setattr(speed, "_time", timed)
    monkeypatch.setattr(speed.time, "monotonic", lambda: clock[0])
    assert speed.measure(SMALL, torch.device("cpu"), torch.float32, 12.0).seconds == {"Quire": launch}
    assert len(taken) == rounds


@pytest.mark.parametrize("row", speed.rows_for(on_gpu=False), ids=lambda row: row.name)
def test_torch_computes_the_same_rows(row: speed.Row) -> None:
    small = row._replace(new=[min(n, 7) for n in row.new], lens=[min(n, 50) for n in row.lens])
    if row.new == row.lens:
        small = small._replace(lens=small.new)
    launches, reasons = speed._launches(speed.Batch(small, torch.device("cpu"), torch.float32))
    assert not reasons
    assert ("torch" in launches) == (not row.latents and len(set(small.lens)) == 1)


def test_the_table_and_the_picture_name_the_fastest_rival() -> None:
    measured = [
        speed.Measured("decode", {"Quire": 2e-4, "torch": 5e-4, "FlashInfer": 3e-4}, {"FlashMLA": "no <GPU>"}),
        speed.Measured("prefill", {"Quire": 1.5e-3}, {}),
    ]
    table = speed.markdown("a machine", measured)
    assert "| decode | 200 us | 500 us | 300 us | 1.50 |" in table and "| prefill | 1.50 ms |  |  |  |" in table
    assert "- FlashMLA, decode: no <GPU>" in table
    image = speed.picture("a <machine>", measured)
    assert "1.50 (FlashInfer)" in image and ElementTree.fromstring(image).tag.endswith("svg")
    assert "no other library" in speed.picture("a machine", measured[1:])


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speed, "rows_for", lambda on_gpu: [SMALL])
    assert cli.main(["bench", "--seconds", "1", "--out", str(tmp_path / "mine"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["row"] == "a small decode" and row["seconds"]["Quire"] > 0
    assert (tmp_path / "mine.md").read_text().count("|") > 8 and (tmp_path / "mine.svg").exists()


def test_versions_are_compared_on_records_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--against", "python3"]) == 2
    assert "expected --recorded FILE" in capsys.readouterr().err
