"""A processor with AMX on a machine without: its instructions are C++ (emulated_tiles.h), other code is as shipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire import jit
from quire.engine import schedule, spec
from quire.jit import machine, toolchain, unit

TARGET = "x86-64-v4-amx"
_HEADER = Path(__file__).with_name("emulated_tiles.h")


@contextmanager
def processor_with_tiles(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In here this machine, which has AVX-512, has AMX too. `directory` gets a copy of the templates."""
    templates = directory / "templates"
    shutil.copytree(unit.root(), templates, dirs_exist_ok=True)
    shutil.copyfile(_HEADER, templates / "include/quire/tile/cpu/amx.h")
    with monkeypatch.context() as patch:
        patch.setenv("QUIRE_CPU_TARGET", TARGET)
        patch.setattr(unit, "root", lambda: templates)
        patch.setattr(machine, "supports", lambda _: True)
        patch.setitem(toolchain.HOST_TARGETS, TARGET, "x86-64-v4")
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Modules of another processor."""
    schedule._scheduler.cache_clear()
    spec._decide.cache_clear()
    jit.forget()
