"""Compiles in vLLM's monitor of compiles, which an engine turns on when its warm-up is over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from quire import jit
from quire.cli.aot import spec_of
from quire.compat import flashinfer as compat
from quire.jit import events
from stub_compiler import compiles, write_stub

SLUG = f"packbits.{jit.host_target()}.any.v1"


class Monitor(ModuleType):
    """What vllm.utils.jit_monitor has of it."""

    def __init__(self, mode: str, active: bool = True) -> None:
        super().__init__("vllm.utils.jit_monitor")
        self.mode, self.active, self.told = mode, active, list[tuple[str, str]]()

    def is_active(self) -> bool:
        return self.active

    def _handle_jit_event(self, *, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
        self.told.append((backend, fn_name))
        if self.mode == "error":
            raise RuntimeError(f"{backend} {event} during inference: {fn_name} ({detail})")


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, a compiler that takes no time, and Quire in FlashInfer's place."""
    path = write_stub(tmp_path / "stub-g++")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUIRE_CXX", str(path))
    compat.activate()
    yield path
    compat.deactivate()


def with_monitor(monkeypatch: pytest.MonkeyPatch, monitor: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "vllm.utils.jit_monitor", monitor)


def test_warn_tells_and_compiles(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor("warn")
    with_monitor(monkeypatch, monitor)
    assert jit.build(spec_of(SLUG))[0] == "built"
    assert jit.build(spec_of(SLUG))[0] == "hit"
    assert monitor.told == [("Quire", SLUG)]


def test_error_raises_and_compiles_nothing(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_monitor(monkeypatch, Monitor("error"))
    before = compiles(stub)
    with pytest.raises(RuntimeError, match=f"Quire kernel JIT compilation during inference: {SLUG}"):
        jit.build(spec_of(SLUG))
    assert compiles(stub) == before


def test_nothing_is_told_before_the_engine_turns_it_on_or_after_deactivate(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = Monitor("error", active=False)
    with_monitor(monkeypatch, monitor)
    assert jit.build(spec_of(SLUG))[0] == "built"
    monitor.active = True
    compat.deactivate()
    assert jit.build(spec_of(f"append.{jit.host_target()}.u16.v8"))[0] == "built"
    assert monitor.told == []


def test_a_monitor_of_another_version_gets_a_warning(
    stub: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = ModuleType("vllm.utils.jit_monitor")
    monitor.is_active = lambda: True  # type: ignore[attr-defined]
    with_monitor(monkeypatch, monitor)
    monkeypatch.setattr(events, "_warned", set())
    assert jit.build(spec_of(SLUG))[0] == "built"
    assert f"{SLUG} is compiled after the engine's warm-up" in caplog.text
