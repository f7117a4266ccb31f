"""Host code for aarch64, made by a cross compiler and run under an emulator. No Arm machine has run it.

`apt-get install g++-aarch64-linux-gnu qemu-user` on Debian and Ubuntu; without them these tests are skipped.
"""

from __future__ import annotations

import io
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile

import emulated
from calls import prefill_paged
from problems import Problem
from quire import jit
from quire.cli import aot
from quire.engine import schedule, spec
from quire.jit import machine, module
from test_schedule import Batch, partitions_of, tiles_of

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="this is no x86-64 machine"),
    pytest.mark.skipif(emulated.COMPILER is None, reason="no aarch64-linux-gnu-g++"),
    pytest.mark.skipif(emulated.EMULATOR is None, reason="no qemu-aarch64"),
]
PLANNER = "schedule_attention.aarch64.any.v1"
BATCH = Batch(qo_lens=(1, 40, 3), kv_lens=(300, 40, 0), page_size=16)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.build_driver(tmp_path_factory.mktemp("aarch64"))


@contextmanager
def arm(driver: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, emulated.Emulated]]:
    """In here the processor is an emulated aarch64; what is returned are the functions that were called, by slug."""
    functions: dict[str, emulated.Emulated] = {}

    def load(slug: str, image: bytes) -> dict[str, emulated.Emulated]:
        library = directory / f"{slug}.so"
        library.write_bytes(image)
        (name,) = (symbol for symbol in ("quire_attention", f"quire_{slug.split('.')[0]}") if symbol.encode() in image)
        functions[slug] = emulated.Emulated(driver, library, name)
        return {name: functions[slug]}

    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_CPU_TARGET", "aarch64")
        patch.setattr(machine, "supports", lambda _: True)
        patch.setattr(module, "load_library", load)
        _forget()
        yield functions
    _forget()


def _forget() -> None:
    """Modules of another processor."""
    schedule._scheduler.cache_clear()
    spec._decide.cache_clear()
    jit.forget()


def test_the_cross_compiler_makes_code_for_aarch64() -> None:
    _, entry = jit.build(aot.spec_of(PLANNER))
    header = ELFFile(io.BytesIO(entry.artifact.read_bytes())).header
    assert (header.e_machine, header.e_type) == ("EM_AARCH64", "ET_DYN")
    assert "aarch64-linux-gnu" in entry.manifest.toolchain["version"]


def test_the_planner_makes_the_plans_of_this_machine(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = BATCH.schedule()
    with arm(driver, tmp_path, monkeypatch) as functions:
        there = BATCH.schedule()
    assert functions[PLANNER].calls > 0
    assert bytes(there.sizes) == bytes(here.sizes)
    assert bytes(there.kept) == bytes(here.kept)
    assert [bytes(tile) for tile in tiles_of(there)] == [bytes(tile) for tile in tiles_of(here)]
    assert [bytes(part) for part in partitions_of(there)] == [bytes(part) for part in partitions_of(here)]


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float16])
def test_prefill_is_right(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: torch.dtype) -> None:
    p = Problem((5, 1, 17, 0), (33, 70, 17, 4), dtype=number, causal=True)
    with arm(driver, tmp_path, monkeypatch) as functions:
        p.check(*prefill_paged(p, p.paged(16), "quire:cpu"))
    assert [slug.split(".")[1] for slug, function in functions.items() if function.calls] == ["aarch64"] * 2
