"""The benchmark programs run as a user runs them, on tiny problems, and do not believe a wrong result."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quire

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/attention.py, imported beside the modules that it uses."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention

    return attention


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The output of a program on a command line, in this process, which has imported torch; it must end well."""

    def run_here(script: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        name = f"benchmark_{Path(script).stem}"  # examples/ has programs of the same names
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        assert not module.main()
        return capsys.readouterr().out

    return run_here


def run(script: str, *arguments: str, status: int = 0) -> str:
    """The output of `python benchmarks/script`; fails with all of it if it exits otherwise than expected."""
    environment = {**os.environ, "QUIRE_LOG": "error"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == status, f"{script} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_attention(tmp_path: Path, run_here: Callable[..., str]) -> None:
    file = tmp_path / "attention.json"
    providers = "quire,fi-fa2,torch-math"
    output = run_here("attention.py", "--rows", "tiny-square,tiny-decode", "--providers", providers, "--rounds", "2",
                 "--device", "cpu", "--json", str(file))  # fmt: skip
    report = json.loads(file.read_text())
    assert "flashinfer is not installed" in output or "it needs a GPU" in output
    assert [row["row"] for row in report["rows"]] == ["tiny-square", "tiny-decode"]
    assert {"date", "device", "torch", "quire", "commit", "roof"} <= report.keys()
    ours, flashinfer, torch_math = report["rows"][0]["results"]
    assert ours["accuracy"]["error"] < 5e-3 and ours["timing"]["samples"] >= 2 and ours["rate"] > 0
    assert flashinfer["timing"] is None and flashinfer["reason"]
    assert torch_math["of_best_peer"] == 1.0
    assert report["geometric_mean"] == pytest.approx(ours["of_best_peer"])


@pytest.mark.slow
def test_determinism(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Bits of requests among neighbours, and a table of costs."""
    file, costs = tmp_path / "determinism.json", tmp_path / "cost.json"
    run_here("determinism.py", "--device", "cpu", "--requests", "6", "--sets", "6", "--most-tokens", "40",
             "--cases", "prefill-d64,decode-d64", "--json", str(file))  # fmt: skip
    for case in json.loads(file.read_text())["cases"]:
        assert case["compared"] >= 6 and case["rows_that_differ"] == case["requests_that_differ"] == 0
    run_here("attention.py", "--rows", "tiny-square", "--providers", "quire,quire-deterministic", "--rounds", "2",
             "--device", "cpu", "--json", str(costs))  # fmt: skip
    output = run_here("determinism.py", "--cost", str(costs))
    assert output.startswith("tiny-square") and "1 rows on" in output and "worst" in output


def test_attention_lists_the_rows(modules: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert modules.main(["--list"]) == 0
    assert "prefill-d128-causal-b2-8k" in capsys.readouterr().out


def test_attention_refuses_an_unknown_row(modules: ModuleType) -> None:
    with pytest.raises(SystemExit) as ended:
        modules.main(["--rows", "no-such-row"])
    assert ended.value.code == 2


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    file = tmp_path / "compile.json"
    slug = "packbits.x86-64-v3.any.v1"
    output = run("compile.py", slug, "--repeat", "1", "--max-seconds", "0.0001", "--json", str(file), status=1)
    (variant,) = json.loads(file.read_text())["variants"]
    assert variant["slug"] == slug and variant["seconds"] > 0.0001 and variant["peak_mb"] > 10
    assert json.loads(file.read_text())["warm"]["find_ms"] > 0
    assert f"FAILED {slug}" in output


@pytest.mark.slow
def test_plan(tmp_path: Path, run_here: Callable[..., str]) -> None:
    file = tmp_path / "plan.json"
    run_here("plan.py", "--cases", "decode-b1,prefill-b64", "--kv-len", "200", "--calls", "20", "--device", "cpu",
        "--providers", "quire", "--json", str(file))  # fmt: skip
    results = json.loads(file.read_text())["results"]
    assert [result["case"] for result in results] == ["decode-b1", "prefill-b64"]
    for result in results:
        assert 0 < result["plan"]["least"] <= result["plan"]["p50"] <= result["plan"]["p99"]


@pytest.mark.slow
def test_flex(tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases that compile little, on the cpu; a wrong result ends the program."""
    file = tmp_path / "flex.json"
    arguments = ("--device", "cpu", "--no-torch", "--rounds", "1", "--json", str(file), "--cases")
    run_here("flex.py", *arguments, "causal,10 % of 128 x 128,first call")
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["causal"]["error"] < 1e-4 and rows["causal"]["tflops"] > 0 and rows["first call"]["compiles"] == 0
    right = quire.flex_attention
    monkeypatch.setattr(quire, "flex_attention", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(AssertionError):  # its status is not 0
        run_here("flex.py", *arguments, "causal")
    assert "off by" in json.loads(file.read_text())["rows"][0]["failed"]


@pytest.mark.slow
def test_operations(tmp_path: Path, run_here: Callable[..., str]) -> None:
    file = tmp_path / "operations.json"
    run_here("operations.py", "--cases", "tiny-*", "--rounds", "1", "--device", "cpu", "--json", str(file))
    results = json.loads(file.read_text())["results"]
    kinds = ("merge_states", "merge_state", "append", "packbits", "packbits-segments")
    assert {result["case"] for result in results} == {f"tiny-{kind}" for kind in kinds}
    ours = [result for result in results if result["provider"] == "quire"]
    assert all(result["timing"]["median"] > 0 and result["error"] < 1e-2 for result in ours)


def test_an_operation_that_cannot_run_is_a_reason(modules: ModuleType) -> None:
    """Such as that of a peer whose module cannot be compiled where the benchmark runs."""
    from operations import CASES, measure

    def prepare(*_: object) -> tuple[None, object]:
        return None, lambda: int("a module\nthat is not there")

    (case,) = (case for case in CASES if case.name == "tiny-append")
    ours, copy = measure(case, ["quire", "torch-copy"], CPU, 1.0, 1, prepare)
    assert ours.timing is None and ours.reason and "ValueError" in ours.reason and "module" in ours.reason
    assert copy.timing is not None


@pytest.mark.slow
def test_cascade(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """One launch and level by level are both right; plain decode has no table of prefixes that end in a page."""
    file = tmp_path / "cascade.json"
    arguments = ("--cases", "tiny", "--rounds", "1", "--device", "cpu", "--providers", "quire,levels,plain")
    assert "a prefix that ends within a page" in run_here("cascade.py", *arguments, "--json", str(file))
    timed = [result for result in json.loads(file.read_text())["results"] if result["timing"]]
    assert {result["provider"] for result in timed} == {"quire", "levels"}
    assert all(result["timing"]["median"] > 0 and result["error"] < 1e-2 for result in timed)


@pytest.mark.slow
def test_joined(modules: ModuleType) -> None:
    """Prefill beside decode, and new tokens after a prefix: each provider that runs here is right."""
    import joined

    rows = joined.Row("pod", 2, 40, 70, 3, (4, 2)), joined.Row("mla", 2, 9, 130, heads=(2, 2), head_dims=(192, 128))
    for row in rows:
        ours, one, two, flashinfer = joined.measure(row, list(joined.PROVIDERS), CPU, 1)
        assert ours.timing is not None and two.timing is not None and not (ours.is_bad or two.is_bad)
        assert (one.reason is None) == (row.name == "mla") and flashinfer.reason
        assert (ours.tflops is None) == (row.name == "pod")


@pytest.mark.slow
def test_nvfp4(modules: ModuleType) -> None:
    """Caches of 4 bits beside others: each provider that runs here is right."""
    import nvfp4

    for kind, q_len in (("decode", 1), ("prefill", 20), ("append", 3)):
        row = nvfp4.Row(f"tiny-{kind}", kind, 2, 50, q_len, (4, 2), 64)
        ours, e4m3, bf16, flashinfer = nvfp4.measure(row, list(nvfp4._DTYPES), CPU, 1)
        assert all(result.timing is not None and not result.is_bad for result in (ours, e4m3, bf16))
        assert flashinfer.timing is None and flashinfer.reason


@pytest.mark.slow
def test_rope(tmp_path: Path) -> None:
    file = tmp_path / "rope.json"
    run("rope.py", "--cases", "tiny-*", "--rounds", "1", "--device", "cpu", "--json", str(file))
    results = json.loads(file.read_text())["results"]
    ours = {result["case"]: result for result in results if result["provider"] == "quire"}
    assert set(ours) == {f"tiny-{kind}" for kind in ("rope", "table", "prologue", "norm", "e4m3")}
    assert all(result["timing"]["median"] > 0 and result["error"] < 4e-2 for result in ours.values())


@pytest.mark.slow
def test_distributed(tmp_path: Path) -> None:
    file = tmp_path / "distributed.json"
    run("distributed.py", "--device", "cpu", "--ranks", "2", "--scale", "512", "--json", str(file))
    report = json.loads(file.read_text())
    assert report["ranks"] == 2 and set(report["results"]) >= {"decode", "decode-64x32k", "exchange"}
    assert all(report["results"]["decode"][kind]["right"] for kind in ("all_to_all", "all_gather"))
    for kind in ("zigzag", "zigzag_two_gathers", "ring", "ring_all_gather", "ulysses"):
        assert report["results"]["prefill-1x32k"][kind]["of_ideal"] > 0
    assert all(report["results"]["full-1x75600"][kind]["of_ideal"] > 0 for kind in ("ring", "ulysses"))


@pytest.mark.slow
def test_more_ranks_than_were_measured(tmp_path: Path) -> None:
    """The simulation of 2 to 64 ranks, whose point for two is the measured one."""
    measured = BENCHMARKS / "results/2026-11-27-h200x2-distributed.json"
    results = json.loads(measured.read_text())["results"]
    file = tmp_path / "ranks.json"
    run("scaling.py", "--of-ranks", str(measured), "--json", str(file))
    fast = json.loads(file.read_text())["rows"]
    run("scaling.py", "--of-ranks", str(measured), "--network", "1", "--json", str(file))
    slow = json.loads(file.read_text())["rows"]
    ways = {"zigzag", "zigzag_peer_memory", "ring", "ring_peer_memory", "ulysses"}
    assert {row["kind"] for row in fast} == ways
    for row, other in zip(fast, slow, strict=True):
        assert row["ms"]["2"] == pytest.approx(results[row["case"]][row["kind"]]["ms"], rel=1e-9)
        assert row["ms"]["8"] == other["ms"]["8"], "one host has no network"
        is_of_hosts = not row["kind"].endswith("peer_memory")  # Ulysses has at most as many ranks as there are heads
        assert ("64" in row["ms"]) == (is_of_hosts and row["kind"] != "ulysses")
        assert "64" not in row["ms"] or row["ms"]["64"] < other["ms"]["64"]


@pytest.mark.slow
def test_scaling(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    run("scaling.py", "--device", "cpu", "--most-tokens", "512", "--most-flops", "2e8", "--entries", "100",
        "--json", str(file))  # fmt: skip
    report = json.loads(file.read_text())
    assert {"decode: length, batch 1", "prefill: length, batch 1"} <= {point["sweep"] for point in report["points"]}
    assert all(point["run_us"] > 0 and point["plan_us"] > 0 for point in report["points"])
    assert [found["entries"] for found in report["caches"]] == [10, 100] and report["left_out"] > 0


@pytest.mark.slow
def test_generate(tmp_path: Path, run_here: Callable[..., str]) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "generate.json"
    run_here("generate.py", "--device", "cpu", "--tiny", "--new", "4", "--rounds", "1", "--json", str(file))
    results = json.loads(file.read_text())["results"]
    assert results["quire"]["tokens_per_s"] > 0 and results["quire"]["logits_error"] < 1e-4
    assert results["quire"]["first_tokens_as_sdpa"] == [4] * 8


def _result(modules: ModuleType, name: str, change: float) -> object:
    """What measure_row makes of torch's result plus noise of `change` times each element's size."""
    import peers
    import rows

    (row,) = rows.select_rows(("tiny-square",))
    (torch_math,) = peers.select_providers(("torch-math",))

    def prepare(sets: list) -> object:
        launch = torch_math.prepare(sets)
        noise = 1 + change * torch.randn(sets[0].out.shape, generator=torch.Generator().manual_seed(1))
        return lambda i: (launch(i).float() * noise).to(row.q_type)

    provider = peers.Provider(name, False, lambda row, device: None, prepare)
    (result,) = modules.measure_row(row, [provider], CPU, modules.Roof(1.0, 1.0), 1)
    return result


def test_a_right_result_is_timed(modules: ModuleType) -> None:
    result = _result(modules, "right", 0.0)
    assert result.accuracy.fine and result.timing is not None and not result.bad


def test_an_inaccurate_result_is_timed_and_told(modules: ModuleType) -> None:
    result = _result(modules, "noisy", 0.03)
    assert not result.accuracy.fine and not result.accuracy.wrong and result.bad and result.timing is not None


def test_a_wrong_result_is_not_timed(modules: ModuleType) -> None:
    result = _result(modules, "wrong", 1.0)
    assert result.accuracy.wrong and result.bad and result.timing is None
    assert "wrong result" in result.reason


@pytest.mark.parametrize("defect", ["unwritten", "other mask", "raises"])
def test_defects_are_found(modules: ModuleType, defect: str) -> None:
    import peers
    import rows

    (row,) = rows.select_rows(("tiny-square",))

    def unwritten(sets: list) -> object:
        return lambda i: sets[i].out  # still full of NaN

    def other_mask(sets: list) -> object:
        (torch_math,) = peers.select_providers(("torch-math",))
        for inputs in sets:
            inputs.row = rows.Row(**{**row.__dict__, "mask": "none"})
        launch = torch_math.prepare(sets)
        for inputs in sets:
            inputs.row = row
        return launch

    def raises(sets: list) -> object:
        raise RuntimeError("no kernel image")

    prepare = {"unwritten": unwritten, "other mask": other_mask, "raises": raises}[defect]
    provider = peers.Provider("defect", False, lambda row, device: None, prepare)
    (result,) = modules.measure_row(row, [provider], CPU, modules.Roof(1.0, 1.0), 1)
    assert result.bad and result.timing is None and result.reason


@pytest.mark.slow
def test_the_reference_is_the_oracle(modules: ModuleType) -> None:
    """On every tiny row, quire's cpu kernel, which has tests of its own, agrees with the sampled reference."""
    import peers
    import rows

    ours = peers.select_providers(("quire",))
    for row in rows.select_rows(("tiny",)):
        (result,) = modules.measure_row(row, ours, CPU, modules.Roof(1.0, 1.0), 1)
        assert result.accuracy is not None and result.accuracy.fine, (row.name, result)


def test_counts(modules: ModuleType) -> None:
    import rows

    by_name = {row.name: row for row in rows.ROWS}
    square = by_name["prefill-d128-causal-b2-8k"]
    assert square.flops == 2 * 2 * 32 * 8192 * 8192 * 256 / 2
    assert by_name["prefill-d128-full-b2-8k"].flops == 2 * square.flops
    assert by_name["decode-b64-kv4k-p16"].kv_bytes == 64 * 4096 * 8 * 256 * 2
    assert by_name["decode-b128-skewed"].kv_bytes == pytest.approx(1.92e9, rel=0.01)
    window = by_name["tiny-paged"]
    pairs = sum(
        kv - q + i - 8 <= j <= kv - q + i
        for q, kv in zip(window.qo_lens, window.kv_lens, strict=True) for i in range(q) for j in range(kv)
    )  # fmt: skip
    assert window.pairs == pairs


def test_targets(modules: ModuleType) -> None:
    import rows

    (row,) = rows.select_rows(("prefill-p16-causal-b2-8k",))
    ours = modules.Result("quire", False)

    def reached(median: float, medians: dict) -> object:
        ours.timing = modules.Timing(median, median, median, 1)
        return modules.verdict(row, [ours], medians)["reached"]

    assert reached(100.0, {}) is None
    assert reached(102.0, {"prefill-d128-causal-b2-8k": 100.0})
    assert not reached(104.0, {"prefill-d128-causal-b2-8k": 100.0})


def test_a_draft_mask_is_causal(modules: ModuleType) -> None:
    import peers

    mask = peers._draft_mask(2, 3)
    assert mask.dtype is torch.uint16 and mask.to(torch.int32).tolist() == [[[1, 0], [3, 0], [7, 0]]] * 2
