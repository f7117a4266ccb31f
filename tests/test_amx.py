"""bf16 attention where instructions multiply bf16: AMX, emulated where there is none, and dot products of AVX-512."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quire
from calls import prefill_paged, prefill_ragged
from emulated_tiles import TARGET, processor_with_tiles
from problems import Problem
from quire import jit
from quire.cli import aot
from quire.engine import device, spec
from quire.jit import config, machine
from quire.kernels import AttentionProblem, decide
from quire.kernels.features import MaskMode, PosEncodingMode, dtype_of

HAS_AVX512 = machine.supports("x86-64-v4")
BF16 = torch.bfloat16


DOTS = "x86-64-v4-bf16"


@pytest.fixture
def tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor with tiles."""
    if not HAS_AVX512:
        pytest.skip("the emulated tiles are vectors of AVX-512")
    if machine.supports(TARGET):
        yield
        return
    with processor_with_tiles(tmp_path, monkeypatch):
        yield


#: Lengths around a tile (16), a panel (32), a KV tile (128) and a row tile (256), one request without rows, one
#: without keys.
LENGTHS = ((100, 1, 0, 17, 33, 140), (300, 129, 5, 0, 33, 141))


def problem(**options: object) -> Problem:
    return Problem(*LENGTHS, **{"dtype": BF16, **options})


PROBLEMS = {
    "full": problem(),
    "causal": problem(causal=True, num_qo_heads=6, num_kv_heads=2),
    "window": problem(causal=True, window_left=40),
    "bits": problem().random_mask(),
    "soft-cap": problem(causal=True, soft_cap=5.0),
    "padded-dims": problem(causal=True, head_dim=40),
    "odd-dims": problem(causal=True, head_dim=80),
    "unequal-dims": problem(causal=True, head_dim=192, head_dim_vo=128),
    "e4m3": problem(causal=True, kv_dtype=torch.float8_e4m3fn),
}


#: The other problems are of ragged keys.
RAGGED = ("bits", "full")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in RAGGED])
def test_pages(tiles: None, name: str) -> None:
    p = PROBLEMS[name]
    p.check(*prefill_paged(p, p.paged(16), "quire:cpu", plan=plan_of(p)))


@pytest.mark.parametrize("name", ["causal", "bits", "odd-dims", "e4m3"])
def test_dot_products(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if not machine.supports(DOTS):
        pytest.skip("this processor has no AVX512-BF16")
    p = PROBLEMS[name]
    monkeypatch.setenv("QUIRE_CPU_TARGET", DOTS)
    spec._decide.cache_clear()
    p.check(*prefill_paged(p, p.paged(16), "quire:cpu", plan=plan_of(p)))
    spec._decide.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", RAGGED)
def test_ragged(tiles: None, name: str) -> None:
    p = PROBLEMS[name]
    p.check(*prefill_ragged(p, "quire:cpu", plan=plan_of(p)))


def plan_of(p: Problem) -> dict[str, object]:
    return {} if p.kv_dtype is None else {"kv_data_type": p.kv_dtype}


def test_one_row_tile_in_parts(tiles: None) -> None:
    """Partial results of several threads."""
    p = Problem((60,), (5000,), num_qo_heads=2, num_kv_heads=1, dtype=BF16, causal=True)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        p.check(*prefill_ragged(p, "quire:cpu"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_no_row_may_see(tiles: None, value: float) -> None:
    """A weight of 0 times NaN is NaN: rows that see the value have it, and no others."""
    p = Problem((64,), (64,), num_qo_heads=1, num_kv_heads=1, dtype=BF16, causal=True)
    out = prefill_ragged(p, "quire:cpu")[0]
    p.v[40] = value
    poisoned = prefill_ragged(p, "quire:cpu")[0]
    assert torch.equal(poisoned[:40], out[:40]) or (poisoned[:40] - out[:40]).abs().max() < 0.02
    assert not poisoned[40:].isfinite().any()


def test_a_key_of_nan_stays_hidden(tiles: None) -> None:
    p = Problem((64,), (64,), num_qo_heads=1, num_kv_heads=1, dtype=BF16, causal=True)
    out = prefill_ragged(p, "quire:cpu")[0]
    p.k[40] = float("nan")
    poisoned = prefill_ragged(p, "quire:cpu")[0]
    assert torch.equal(poisoned[:40], out[:40])
    assert poisoned[40:].isnan().all()


def test_logits_that_grow_from_tile_to_tile(tiles: None) -> None:
    """The maximum of a row is raised many times, by less and by more than kSlack."""
    p = Problem((40,), (700,), num_qo_heads=1, num_kv_heads=1, dtype=BF16)
    steps = torch.arange(700)[:, None, None] / 700
    p.q[:] = p.q.abs()
    p.k[:] = (p.k.abs() * steps * 6).to(BF16)
    p.check(*prefill_ragged(p, "quire:cpu"))


# ---- which code runs ----


def attention_problem(dtype: str = "bf16", rows: int = 512, **more: object) -> AttentionProblem:
    kind = dtype_of(dtype, "dtype")
    options = {"window": False, "soft_cap": False, **more}
    return AttentionProblem(TARGET, kind, kind, kind, 128, 128, 0, MaskMode.CAUSAL, rows=rows, **options)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (attention_problem(), TARGET),
        (attention_problem(rows=16), "x86-64-v4"),
        (attention_problem("fp16"), "x86-64-v4"),
        (attention_problem("fp32"), "x86-64-v4"),
        (attention_problem(pos_encoding=PosEncodingMode.ROPE_LLAMA), "x86-64-v4"),
    ],
)
def test_only_code_that_multiplies_tiles_is_compiled_for_amx(problem: AttentionProblem, expected: str) -> None:
    key = decide(problem).key
    assert key.target == expected
    assert decide(key.problem()).kernel.tile(key).rows == key.tile_rows


def test_other_code_is_that_of_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_TARGET", TARGET)
    monkeypatch.setattr(machine, "supports", lambda _: True)
    assert jit.host_target() == device.target_of(torch.device("cpu")) == "x86-64-v4"
    assert device.target_of(torch.device("cpu"), matrix_unit=True) == TARGET


@pytest.mark.parametrize(("allowed", "expected"), [(True, TARGET), (False, DOTS)])
def test_a_process_that_may_not_use_tiles_takes_dot_products(
    monkeypatch: pytest.MonkeyPatch, allowed: bool, expected: str
) -> None:
    levels = frozenset[str]().union(*machine._LEVELS.values())
    monkeypatch.setattr(machine, "features", lambda: levels)
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "may_use_tiles", lambda: allowed)
    assert machine._best_target.__wrapped__() == expected
    assert machine.supports("native") == allowed


def test_without_a_compiler_prebuilt_code_for_avx512_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_AVX512:
        pytest.skip("this processor has no AVX-512")
    p = problem(causal=True)
    monkeypatch.delenv("QUIRE_CPU_TARGET", raising=False)
    monkeypatch.setattr(machine, "_best_target", lambda: TARGET)
    monkeypatch.setattr(spec, "is_obtainable", lambda wanted: wanted.target != TARGET)
    spec._decide.cache_clear()
    p.check(*prefill_ragged(p, "quire:cpu"))
    spec._decide.cache_clear()


def test_a_processor_without_tiles_refuses_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_TARGET", TARGET)
    monkeypatch.setattr(machine, "features", lambda: machine._LEVELS["x86-64-v3"])
    assert config.cpu_target() == TARGET
    with pytest.raises(quire.ValidationError, match="processor does not run 'x86-64-v4-amx'"):
        jit.host_target()


def test_warmup_for_other_hosts() -> None:
    """A row tile that a host does not have stands for all of its heights; operations need no matrix unit."""
    wide = decide(attention_problem()).key.slug
    on = {host: [spec.slug for spec in aot.for_hosts([aot.spec_of(wide)], [host])] for host in ("x86-64-v4", TARGET)}
    planner = "schedule_attention.x86-64-v4.any.v1"
    assert on[TARGET] == [wide, planner]
    assert on["x86-64-v4"] == [*(wide.replace("-amx", "").replace("m256", rows) for rows in ("m16", "m192")), planner]
