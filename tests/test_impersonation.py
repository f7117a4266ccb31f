"""GPUs that are taken for others (`pytest -m gpu --as-gpu 8.6`): what is compiled for them, which needs no GPU."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import problems
from ptx.artifacts import compiled_to_ptx, exports_of, text_of
from ptx.impersonated import GPUS, capability, impersonated, is_of_another_gpu, refusal
from quire import jit
from quire.cli.aot import spec_of
from quire.errors import CacheError, UnsupportedError
from quire.jit import machine
from quire.jit.toolchain import Nvcc, find_toolchain
from quire.kernels import AttentionProblem, Decision, decide, same_rows
from quire.kernels.features import MaskMode, dtype_of
from targets import targets

pytestmark = pytest.mark.skipif(find_toolchain("sm80") is None, reason="neither nvcc nor libnvrtc")

BF16 = dtype_of(torch.bfloat16, "q")
PROBLEM = {"page_size": 16, "mask": MaskMode.CAUSAL, "window": False, "soft_cap": False, "rows": 4}


def problem(target: str, head_dim: int = 128, **changes: object) -> AttentionProblem:
    return AttentionProblem(target, BF16, BF16, BF16, head_dim, head_dim, **{**PROBLEM, **changes})


@contextmanager
def on_an_h200(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """A GPU is played on a machine that has an H200, by what torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with impersonated(name):
        yield


@pytest.mark.parametrize("name", GPUS)
def test_the_planner_takes_it_for_the_other_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, own = GPUS[name], machine.Driver.max_dynamic_smem
    monkeypatch.setattr(machine, "capability", lambda _: (9, 0))
    machine.cuda_target.cache_clear()
    assert machine.cuda_target(0) == "sm90a"
    with on_an_h200(monkeypatch, name):
        assert machine.cuda_target(0) == gpu.target and capability() == gpu.capability
        assert machine.Driver.max_dynamic_smem(None, 0) == gpu.smem_of_cta  # type: ignore[arg-type]
        assert [target.backend for target in targets()] == ["quire:cpu", "quire:decode", "quire:fa2", "auto"]
        assert refusal(name) is None
        assert decide(problem(gpu.target)).key.target == gpu.target
    assert machine.cuda_target(0) == "sm90a" and machine.Driver.max_dynamic_smem is own
    machine.cuda_target.cache_clear()


@pytest.mark.parametrize(
    ("name", "slugs"),
    [
        ("8.0", ["attention_fa2.sm80.bf16-bf16-bf16.d128-128.paged.causal.m64"]),
        ("8.6", ["attention_fa2.sm86.bf16-bf16-bf16.d256-256.paged.causal.m64", "packbits.sm86.any.v1"]),
        ("8.9", ["attention_decode.sm89.bf16-e4m3-bf16.d128-128.paged.causal.m16"]),
        ("12.0", ["attention_mla_fa2.sm120a.bf16-bf16-bf16.d576-512.paged.none.m16"]),
    ],
)
def test_its_code_is_ptx_of_its_level_that_a_hopper_takes(name: str, slugs: list[str], tmp_path: Path) -> None:
    """Its constants are those of its machine code, and its shared memory is what the other GPU has."""
    gpu = GPUS[name]
    for slug in slugs:
        spec = spec_of(slug)
        with impersonated(name):
            module = jit.get_module(spec)
            text = text_of(module._image, slug)
        cubin = jit.get_module(spec)
        assert re.search(rf"^\.target sm_{gpu.level}$", text, re.MULTILINE)
        assert module.exports == cubin.exports == exports_of(cubin._image, spec)
        assert module.exports.get("kSmemBytes", 0) <= gpu.smem_of_cta
        with pytest.raises(CacheError, match="machine code"):
            text_of(cubin._image, slug)
        if Nvcc.find() is not None:  # and with it ptxas, which is the driver's compiler
            (tmp_path / "variant.ptx").write_text(text)
            ptxas = Path(jit.toolchain.require_toolchain("sm90a").path).with_name("ptxas")
            if ptxas.exists():
                command = [str(ptxas), "-arch=sm_90", "variant.ptx", "-o", "variant.cubin"]
                subprocess.run(command, cwd=tmp_path, check=True, timeout=120)


def test_dependent_launches_are_of_code_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX below sm_90 has no griddepcontrol.wait, so its kernels start when the one before has ended."""
    decision = decide(problem("sm120a"), "quire:decode")
    assert decision.may_use_pdl
    with on_an_h200(monkeypatch, "12.0"):
        assert not decide(problem("sm120a"), "quire:decode").may_use_pdl
        assert not Decision.may_use_pdl
    assert decide(problem("sm120a"), "quire:decode").may_use_pdl


def refused(target: str, backend: str, **changes: object) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        decide(problem(target, **changes), backend)  # type: ignore[arg-type]
    return caught.value


def test_refusals_of_the_other_gpu_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    of_hopper, of_space = refused("sm86", "quire:fa3"), refused("sm120a", "quire:decode", head_dim=256)
    of_both, of_rows = refused("sm86", "auto", head_dim=60), refused("sm86", "quire:decode", rows=80)
    errors = (of_hopper, of_space, of_both, of_rows, AssertionError("sm86 is not sm90a"))
    assert not any(map(is_of_another_gpu, errors))
    with on_an_h200(monkeypatch, "8.6"):
        assert [is_of_another_gpu(error) for error in errors] == [True, True, False, False, False]


@pytest.mark.parametrize("target", sorted({gpu.target for gpu in GPUS.values()}))
def test_problems_of_as_many_rows_as_decode_takes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an A100, whose tiles are Hopper's, tests keep their rows."""
    monkeypatch.setattr(problems, "target_of", lambda _: target)
    more = {"dtype": torch.bfloat16, "causal": True}
    for head_dim, group, kv_dtype in itertools.product((64, 128, 192, 256), (1, 5, 8), (None, torch.float8_e4m3fn)):
        heads = {"num_qo_heads": 2 * group, "head_dim": head_dim, "kv_dtype": kv_dtype}
        given = problems.Problem((70, 0, 9), (80, 5, 9), **heads, **more)
        p = given.within_tiles("quire:decode")
        rows = same_rows(group * -(-sum(p.qo_lens) // 3))
        kv = BF16 if kv_dtype is None else dtype_of(kv_dtype, "kv")
        asked = AttentionProblem(target, BF16, kv, BF16, head_dim, head_dim, **{**PROBLEM, "rows": rows})
        if head_dim == 256 and target == "sm120a":
            assert p is given
        else:
            assert decide(asked, "quire:decode").key.tile_rows >= rows > 0
        small = problems.Problem((64 // group, 64 // group), (80, 9), **heads, **more)
        assert small.within_tiles("quire:fa2") is small
        assert target != "sm80" or small.within_tiles("quire:decode") is small


@pytest.mark.parametrize(
    ("available", "here", "name", "reason"),
    [
        (False, (0, 0), "8.6", "expected an NVIDIA GPU"),
        (True, (8, 0), "8.6", "expected a GPU from sm_86 on, which loads PTX of this level, got sm_80"),
        (True, (8, 9), "12.0", None),
    ],
)
def test_where_it_cannot_be_played(
    available: bool, here: tuple[int, int], name: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: here)
    assert refusal(name) == reason


def test_flags_of_other_targets_stay_as_they_are() -> None:
    toolchain = jit.toolchain.require_toolchain("sm80")
    flags = {target: toolchain.flags(target) for target in ("sm80", "sm86", "sm90a")}
    with compiled_to_ptx({"sm86": "86"}):
        assert toolchain.flags("sm80") == flags["sm80"] and toolchain.flags("sm90a") == flags["sm90a"]
        assert (
            any("compute_86" in flag for flag in toolchain.flags("sm86")) and toolchain.flags("sm86") != flags["sm86"]
        )
    assert toolchain.flags("sm86") == flags["sm86"]
